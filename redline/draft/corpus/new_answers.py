"""New answers of the target to prompts that are stored in a corpus as tokens."""

from collections.abc import Callable, Container, Iterator, Sequence
from hashlib import blake2b

import msgspec

from redline.chat.page_hashes import make_job
from redline.draft.corpus.corpus import Example
from redline.messages.job import Job, JobId, Sampling
from redline.worker.engine import Engine

JOBS = 256  # requests submitted at the same time


def answer_afresh(
    engine: Engine,
    chosen: Sequence[Example],
    sampling: Sampling,
    answers: int,
    seed: int,
    have: Container[str] = (),
    done: Callable[[int], object] = lambda asked: None,
) -> Iterator[Example]:
    """Yields `answers` new answers of the target to each prompt of `chosen`, in batches of JOBS requests.

    sampling: parameters of all requests; each has its own seed, derived from `seed` and its id. Ids in `have` are not
    requested, and requests that fail are left out. done: called after every JOBS requests with the number processed so
    far, of len(chosen) x answers.
    """
    stop_ids, room = engine.tokenizer.stop_ids, engine.engine.layout.max_model_len
    wanted = [(example, f"{example.id} again {number}") for example in chosen for number in range(1, answers + 1)]
    count = 0
    for first in range(0, len(wanted), JOBS):
        part = wanted[first : first + JOBS]
        jobs: dict[JobId, Job] = {}
        source: dict[JobId, Example] = {}
        for example, id in part:
            prompt = example.tokens[: example.prompt]
            if id in have or len(prompt) >= room:
                continue
            drawn = int.from_bytes(blake2b(f"{seed} {id}".encode(), digest_size=6).digest(), "little")
            most = min(sampling.max_tokens, room - len(prompt))
            asked = msgspec.structs.replace(sampling, max_tokens=most, seed=drawn, stop_ids=stop_ids)
            jobs[JobId(id)] = make_job(JobId(id), prompt, asked, engine.fingerprint)
            source[JobId(id)] = example
        for id, deltas in (engine.generate(list(jobs.values())) if jobs else {}).items():
            finish, example = deltas[-1].finish, source[id]
            tokens = tuple(token for delta in deltas for token in delta.tokens)
            if finish in ("stop", "length") and tokens:
                yield Example(
                    id=id,
                    domain=example.domain,
                    language=example.language,
                    tokens=(*example.tokens[: example.prompt], *tokens),
                    prompt=example.prompt,
                    finish=finish,
                    kind="hard",
                )
        count += len(part)
        done(count)
