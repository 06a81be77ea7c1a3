"""Answers of the corpus as a small file: prompts can be made again from their seed, answers only by the model.

The file is xz of: sha256 of the prompts' file, then uint16, little-endian: for each of its lines how many tokens the
answer has (0: none came; bit 15: it met the length limit), then the tokens of all answers. 9 M tokens take a few MB.
"""

import hashlib
import lzma
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np

from redline.chat.lines import conversation
from redline.chat.template import Style, encode, style_of
from redline.chat.tokenizer import Tokenizer
from redline.draft.corpus.corpus import Example
from redline.draft.corpus.prompts import PromptLine, read_prompts

CUT = 1 << 15  # marks an answer that met its limit
CHUNK = 256  # prompts that a process encodes at a time


def pack(examples: Iterable[Example], prompts: Path, into: Path) -> int:
    """Writes the answers to the prompts of a file into `into`; gives how many of the prompts are answered.

    Examples of other prompts are left out. Raises AssertionError where an answer has CUT tokens or more.
    """
    answers = {example.id: example for example in examples}
    lengths: list[int] = []
    tokens: list[int] = []
    for line in read_prompts(prompts).prompts:
        example = answers.get(line.id)
        answer = example.tokens[example.prompt :] if example is not None else ()
        assert len(answer) < CUT, line.id
        lengths.append(len(answer) | (CUT if example is not None and example.finish == "length" else 0))
        tokens += answer
    data = np.array(lengths + tokens, "<u2").tobytes()
    into.write_bytes(lzma.compress(hashlib.sha256(prompts.read_bytes()).digest() + data))
    return sum(length & ~CUT > 0 for length in lengths)


def unpack(packed: Path, prompts: Path, target: Path) -> Iterator[Example]:
    """The examples, in the order of the prompts, which are encoded with the tokenizer of the folder `target`.

    Raises ValueError where `prompts` is not the file whose prompts were answered.
    """
    data = lzma.decompress(packed.read_bytes())
    if data[:32] != hashlib.sha256(prompts.read_bytes()).digest():
        raise ValueError(f"{packed}: its answers are to other prompts than those of {prompts}")
    numbers = np.frombuffer(data, "<u2", offset=32)
    asked = read_prompts(prompts).prompts
    lengths, tokens = numbers[: len(asked)], iter(numbers[len(asked) :].tolist())
    context = multiprocessing.get_context("fork")
    with context.Pool(len(os.sched_getaffinity(0))) as pool:
        work = ((target, chunk) for chunk in _chunks(asked))
        encoded = (ids for chunk in pool.imap(_encode, work) for ids in chunk)
        for line, ids, length in zip(asked, encoded, lengths.tolist(), strict=True):
            answer = tuple(islice(tokens, length & ~CUT))
            if answer:
                yield Example(
                    id=line.id,
                    domain=line.domain,
                    language=line.language,
                    tokens=(*ids, *answer),
                    prompt=len(ids),
                    finish="length" if length & CUT else "stop",
                    kind=line.kind,
                )


def _encode(work: tuple[Path, list[PromptLine]]) -> list[list[int]]:
    folder, asked = work
    tokenizer, style = _opened(folder)
    return [encode(conversation(prompt), tokenizer, style) for prompt in asked]


def _chunks(asked: list[PromptLine]) -> Iterator[list[PromptLine]]:
    return (asked[first : first + CHUNK] for first in range(0, len(asked), CHUNK))


@cache
def _opened(folder: Path) -> tuple[Tokenizer, Style]:
    return Tokenizer.open(folder), style_of(folder)
