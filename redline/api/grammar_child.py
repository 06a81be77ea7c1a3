"""The process in which grammars are tried: what a client's schema costs, it costs this process, which can be killed.

Standard input has frames, each a length (4 bytes, the lowest first) and msgpack: first the vocabulary, then requests.
Each request is answered by a frame on standard output.
"""

import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from redline.chat.tokenizer import Tokenizer
from redline.chat.vocabulary import grammar_tokens
from redline.wire.base import Record

LENGTH = struct.Struct("<I")


class Vocabulary(Record, frozen=True):
    """The first frame: tokens in the order of their ids, names of control tokens, and the memory that may be taken."""

    tokens: tuple[bytes, ...]
    names: dict[int, str]
    memory_bytes: int


class Trial(Record, frozen=True):
    """What is to be tried. converts: it is GBNF, and wanted in Lark's syntax; else it is a grammar to compile."""

    text: str
    converts: bool = False


class Verdict(Record, frozen=True):
    """What came of it. error: why it cannot be used; None: it can. text: the converted grammar."""

    error: str | None = None
    text: str = ""


def framed(message: Record) -> bytes:
    """A message as a frame."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def main() -> None:
    """Answer until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the whole group; the end of standard input says when
    inlet, outlet = sys.stdin.buffer, sys.stdout.buffer
    data = _frame(inlet)
    if data is None:
        return
    vocabulary = msgspec.msgpack.decode(data, type=Vocabulary)
    resource.setrlimit(resource.RLIMIT_AS, (vocabulary.memory_bytes, vocabulary.memory_bytes))
    ranks = {token: rank for rank, token in enumerate(vocabulary.tokens)}
    tokens = grammar_tokens(Tokenizer(ranks, vocabulary.names))
    while (data := _frame(inlet)) is not None:
        outlet.write(framed(_verdict(msgspec.msgpack.decode(data, type=Trial), tokens)))
        outlet.flush()


def _verdict(trial: Trial, tokens: Any) -> Verdict:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if trial.converts:
        try:
            return Verdict(text=gbnf_to_lark(trial.text))
        except Exception as error:  # whatever a grammar out of shape raises there
            return Verdict(error=f"it cannot be read as GBNF: {error}")
    matcher = LLMatcher(tokens, trial.text, log_level=0)
    if matcher.is_error():
        return Verdict(error=matcher.get_error())
    matcher.compute_bitmask()  # what takes too much shows in the first mask
    return Verdict(error=matcher.get_error() if matcher.is_error() else None)


def _frame(inlet: BinaryIO) -> bytes | None:
    head = inlet.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    return inlet.read(size)


if __name__ == "__main__":
    main()
