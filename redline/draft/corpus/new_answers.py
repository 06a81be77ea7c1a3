"""The target's own new answers to prompts that stand in a corpus as tokens."""

from collections.abc import Callable, Container, Iterator, Sequence
from hashlib import blake2b

import msgspec

from redline.chat.hashing import make_job
from redline.draft.corpus.corpus import Example
from redline.wire.job import Job, JobId, Sampling
from redline.worker.engine import Engine

JOBS = 256  # answers that are asked for at once


def answer_afresh(
    engine: Engine,
    chosen: Sequence[Example],
    sampling: Sampling,
    answers: int,
    seed: int,
    have: Container[str] = (),
    done: Callable[[int], object] = lambda asked: None,
) -> Iterator[Example]:
    """Yields the target's own new answers, `answers` of them to each prompt of `chosen`, JOBS at a time.

    sampling: of each, with a seed of its own made of `seed` and its id. Those whose ids are in `have` are not asked
    for, and what the engine could not answer is left out. done: told after every JOBS answers how many were gone
    through, of chosen x answers.
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
