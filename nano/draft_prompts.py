"""Prompts for the drafter's corpus, from Kimi-Nano's own generators; the answers are the model's to give.

    python -m nano.draft_prompts --out train.jsonl --seed 1 --answer-tokens 1300000
    python -m nano.draft_prompts --out held.jsonl --seed 2 --split families values --answer-tokens 90000 \
        --avoid train.jsonl

One JSON line per prompt: id, domain, language, kind, messages (all but the last answer), tools, thinking. A domain is a
`nano.data_*` module. The domain whose expected answers have the fewest tokens goes next, so domains are equal in
answer tokens, not in prompts, and that holds for the first lines of a file as well as for all of it. Expected is what
the generator itself would answer. The same arguments give the same file, whatever the number of processes, with the
same release of Python: recall's texts quote its documentation.

`--own FILE` writes the generators' own answers too, as examples that a drafter can be trained on.

Split "train" is drawn as training is: earlier exchanges before a question, made-up words. Held-out splits have neither.
No prompt stands in a file twice, and none that a file of `--avoid` has, there as a whole or as the end of a chain.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from itertools import count
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from nano.data import EARLIER, LOSS_SHIFT, ROW, Encoder, Mixture
from nano.data_recall import CHARACTERS_PER_TOKEN, recall
from nano.data_words import LANGUAGES, SCRIPTS
from nano.sample import Sample, Split
from nano.substitute import vocabulary_pieces
from redline.chat.tokenizer import RESERVED, Tokenizer
from redline.draft.corpus.corpus import Example

DOMAINS = ("numbers", "code", "words", "recall", "json", "tools", "chat")
SPLITS: tuple[Split, ...] = ("train", "values", "families")

# Tokens of a recall document: a third of them short, a third middle, a third long.
LENGTHS = ((200, 800), (800, 2_000), (2_000, 3_500))
SHORT = ((200, 600), (600, 1_000), (1_000, 3_500))  # with --short: two thirds below 1,000

BLOCK = 32  # prompts that one random stream gives
WAVE = 64  # blocks of a domain under way
LEAST_NEW = 0.02  # share of a wave; a domain that gives fewer new prompts has no more to say

CODES: dict[str, str] = dict(
    zip((*LANGUAGES, *SCRIPTS), ("de", "fr", "es", "it", "pt", "nl", "zh", "ru", "ja"), strict=True)
)

Line = dict[str, Any]


class Source(NamedTuple):
    """Where the prompts of a domain come from; splits take turns."""

    tokenizer: Path
    domain: str
    splits: Sequence[Split]
    seed: int
    lengths: Sequence[tuple[int, int]] = LENGTHS


class Drawn(NamedTuple):
    """A prompt with the generator's own answer, as a worker gives it."""

    line: Line  # its id without a number
    digest: bytes  # of what is asked
    prompt: int  # tokens
    answer: int  # tokens of the generator's own answer
    tokens: bytes  # uint16: the prompt and that answer


@dataclass
class Share:
    """What a file holds of one domain."""

    prompts: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    dropped: int = 0  # seen before, or to be avoided


class Exhausted(Exception):
    """Raised where a domain has hardly any more different prompts in these splits."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line above. arguments: its words; None: those of this process. Raises Exhausted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--count", type=int, metavar="N", help="prompts in all")
    size.add_argument("--answer-tokens", type=int, metavar="N", help="expected, of each domain")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--split", nargs="+", choices=SPLITS, default=["train"], help="several take turns")
    parser.add_argument("--domains", nargs="+", choices=DOMAINS, default=list(DOMAINS))
    parser.add_argument("--avoid", nargs="+", type=Path, default=[], metavar="FILE", help="prompts that may not return")
    parser.add_argument("--short", action="store_true", help="shorter texts of recall")
    parser.add_argument("--own", type=Path, metavar="FILE", help="examples with the generators' own answers")
    parser.add_argument("--tokenizer", type=Path, default=Path("models/kimi-nano"))
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args(arguments)
    began = time.perf_counter()
    seen = digests_of(given.avoid)
    shares = {domain: Share() for domain in given.domains}
    context = multiprocessing.get_context("fork")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    own = nullcontext() if given.own is None else given.own.open("wb")
    with context.Pool(given.processes) as pool, given.out.open("wb") as file, own as answers:
        lengths = SHORT if given.short else LENGTHS
        streams = {
            domain: distinct(
                pool, Source(given.tokenizer, domain, given.split, given.seed, lengths), shares[domain], seen
            )
            for domain in given.domains
        }
        for drawn in interleave(streams, shares, given.count, given.answer_tokens):
            file.write(msgspec.json.encode(drawn.line) + b"\n")
            if answers is not None:
                answers.write(msgspec.json.encode(example(drawn)) + b"\n")
    for domain, share in shares.items():
        print(
            f"{domain:8} {share.prompts:7,} prompts, {share.prompt_tokens:11,} tokens; {share.answer_tokens:10,} "
            f"expected of answers; {share.dropped:,} dropped"
        )
    total = sum(share.prompts for share in shares.values())
    print(f"{given.out}: {total:,} prompts in {time.perf_counter() - began:.1f} s")


def interleave(
    streams: dict[str, Iterator[Drawn]], shares: dict[str, Share], prompts: int | None, answer_tokens: int | None
) -> Iterator[Drawn]:
    """Prompts of all domains, each time of the one that is furthest behind in answer tokens; counts them in `shares`.

    Ends after so many `prompts`, or when every domain has `answer_tokens`. Raises Exhausted.
    """
    for number in count() if prompts is None else range(prompts):
        domain = min(shares, key=lambda name: shares[name].answer_tokens)
        share = shares[domain]
        if answer_tokens is not None and share.answer_tokens >= answer_tokens:
            return
        drawn = next(streams[domain])
        share.prompts += 1
        share.prompt_tokens += drawn.prompt
        share.answer_tokens += drawn.answer
        yield drawn._replace(line=drawn.line | {"id": f"{drawn.line['id']}-{number}"})


def example(drawn: Drawn) -> Example:
    """The prompt with the generator's own answer, ended as the model would end it."""
    line = drawn.line
    return Example(
        id=line["id"],
        domain=line["domain"],
        language=line["language"],
        tokens=tuple(np.frombuffer(drawn.tokens, np.uint16).tolist()),
        prompt=drawn.prompt,
        finish="stop",
        kind=line["kind"],
    )


def distinct(pool: Pool, source: Source, share: Share, seen: set[bytes]) -> Iterator[Drawn]:
    """Prompts whose digests are not in `seen`, to which they are added; counts in `share` those that are dropped.

    Raises Exhausted where a wave of blocks has hardly any new prompt.
    """
    for first in count(0, WAVE):
        new = 0
        for made in pool.imap(partial(block, source), range(first, first + WAVE)):
            for drawn in made:
                if drawn.digest in seen:
                    share.dropped += 1
                    continue
                seen.add(drawn.digest)
                new += 1
                yield drawn
        if new < LEAST_NEW * BLOCK * WAVE:
            splits = " and ".join(source.splits)
            raise Exhausted(f"{source.domain}: {share.prompts:,} different prompts of {splits}, and hardly more")


def block(source: Source, number: int) -> list[Drawn]:
    """`BLOCK` prompts, always the same for the same arguments. The splits take turns by `number`."""
    encoder, pieces = opened(source.tokenizer)
    split = source.splits[number % len(source.splits)]
    name = f"{split}-{source.seed}-{source.domain}"
    made = samples(source.domain, split, f"{source.seed}/{split}/{source.domain}/{number}", pieces, source.lengths)
    return [as_drawn(encoder, name, source.domain, sample) for sample in made]


@cache
def opened(tokenizer: Path) -> tuple[Encoder, list[str]]:
    """(encoder, pieces for made-up words) of this checkpoint's folder, opened once in a process."""
    read = Tokenizer.open(tokenizer)
    plain = range(read.vocab_size - RESERVED)
    return Encoder(read), vocabulary_pieces([read.token_bytes(token) for token in plain])


def samples(
    domain: str, split: Split, key: str, pieces: Sequence[str], lengths: Sequence[tuple[int, int]] = LENGTHS
) -> Iterator[Sample]:
    """`BLOCK` samples of a domain. key: of the random stream; lengths: tokens of recall's texts, (least, most) each."""
    rng = random.Random(f"{key}/held")
    generators = importlib.import_module(f"nano.data_{domain}").GENERATORS
    weights = [weight for _, weight in generators.values()]
    # Of modules that have spent nothing the first goes next, here always.
    mixture = Mixture(key, ROW, dict.fromkeys((domain, *EARLIER), 1.0), pieces)
    for _ in range(BLOCK):
        kind = rng.choices(list(generators), weights)[0]
        if kind == "recall":
            yield recall(rng, split, int(rng.randint(*rng.choice(lengths)) * CHARACTERS_PER_TOKEN))
        elif split != "train":
            yield generators[kind][0](rng, split)
        else:
            yield _of_mixture(mixture)


def _of_mixture(mixture: Mixture) -> Sample:
    """The next sample that is no long text."""
    while True:
        _, sample = mixture.draw()
        if isinstance(sample, Sample) and sample.kind != "recall":
            return sample


def as_drawn(encoder: Encoder, name: str, domain: str, sample: Sample) -> Drawn:
    """The sample as a line without its last answer, with its digest and its tokens. name: the line's id."""
    messages = [_asked(message, sample.thinking) for message in sample.messages[:-1]]
    line: Line = {
        "id": name,
        "domain": domain,
        "language": language(sample),
        "kind": sample.kind,
        "messages": messages,
        "tools": sample.tools,
        "thinking": sample.thinking,
    }
    prompt = len(encoder.prompt(sample))
    whole = encoder.sample(sample) & np.uint16((1 << LOSS_SHIFT) - 1)
    return Drawn(line, digest(messages, sample.tools), prompt, len(whole) - prompt, whole.tobytes())


def _asked(message: dict[str, Any], thinking: bool) -> dict[str, Any]:
    """A message of the prompt. Where the sample is answered without thinking, earlier turns have no thinking either."""
    return message if thinking else {key: value for key, value in message.items() if key != "reasoning_content"}


def language(sample: Sample) -> str:
    """The code of the language that the answer deals with: the first that it names, else "en"."""
    answer = sample.messages[-1]
    if sample.tools or sample.kind not in ("lexicon", "fact", "chat"):
        return "en"
    text = f"{answer.get('reasoning_content') or ''} {answer.get('content') or ''}"
    named = [name for name in CODES if name in text]
    return CODES[min(named, key=text.index)] if named else "en"


def digest(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> bytes:
    """16 bytes that are equal for prompts that read alike: of what is asked, without earlier thinking and calls."""
    said = [(message["role"], message.get("content") or "") for message in messages]
    return blake2b(json.dumps([said, tools], sort_keys=True).encode(), digest_size=16).digest()


def digests_of(files: Iterable[Path]) -> set[bytes]:
    """The digests of every prompt in these files, and of every end of a conversation that begins with a user's turn."""
    found: set[bytes] = set()
    for file in files:
        for raw in file.read_bytes().splitlines():
            line = msgspec.json.decode(raw)
            messages = line["messages"]
            starts = (i for i, message in enumerate(messages) if i == 0 or message["role"] == "user")
            found |= {digest(messages[start:], line["tools"]) for start in starts}
    return found


if __name__ == "__main__":
    main()
