"""Acceptance traces: speculative decoding rounds logged by a serving engine, as examples for training.

One JSON object per line: {"id", "tokens": prompt and answer, "prompt": number of prompt tokens, "finish", "rounds":
[[position of the first draft, verified, accepted], ...], and optionally "domain" and "language"}. A trace contains
users' text.
"""

from pathlib import Path

import msgspec

from redline.chat.lines import NOT_JSON
from redline.draft.corpus.corpus import Corpus, Example
from redline.errors import ConfigError

TRAFFIC = "traffic"  # the domain of lines without one


class _Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Unknown fields are ignored: newer engines may add some."""

    id: str
    tokens: tuple[int, ...]
    prompt: int
    finish: str
    rounds: tuple[tuple[int, int, int], ...]
    domain: str | None = None
    language: str = "en"


def trace_file(named: str) -> tuple[str, Path]:
    """DOMAIN=FILE, or FILE, as (domain, file); the default domain is TRAFFIC.

    If a file with the whole text as its name exists, the = is part of the name.
    """
    domain, sign, path = named.partition("=")
    return (domain, Path(path)) if sign and domain and not Path(named).exists() else (TRAFFIC, Path(named))


def read_traces(*files: str) -> Corpus:
    """The traces as examples, and a message with file and line for each invalid line.

    files: DOMAIN=FILE or FILE (`trace_file`); the domain applies to lines without one. Empty answers, and answers that
    ended in an error, are omitted without a message. Raises ConfigError if a file cannot be read.
    """
    examples: list[Example] = []
    skipped: list[str] = []
    decoder = msgspec.json.Decoder(_Trace)
    for domain, path in map(trace_file, files):
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a file of traces") from None
        for number, line in enumerate(lines, 1):
            try:
                trace = decoder.decode(line)
                _check(trace)
            except (*NOT_JSON, ValueError) as error:
                skipped.append(f"{path}, line {number}: {error}")
                continue
            if trace.prompt < len(trace.tokens) and trace.finish != "error":
                examples.append(
                    Example(
                        id=f"{path.stem} {number} {trace.id}",  # request ids may repeat after a restart
                        domain=trace.domain or domain,
                        language=trace.language,
                        tokens=trace.tokens,
                        prompt=trace.prompt,
                        finish=trace.finish,
                        kind="trace",
                        rounds=trace.rounds,
                    )
                )
    return Corpus(examples, skipped)


def _check(trace: _Trace) -> None:
    """Raises ValueError if the numbers of a trace are inconsistent."""
    if not 0 < trace.prompt <= len(trace.tokens) or min(trace.tokens) < 0:
        raise ValueError(
            f"prompt is {trace.prompt} of {len(trace.tokens)} tokens; expected ids from 0 on, and a prompt"
        )
    for position, proposed, accepted in trace.rounds:
        if not (trace.prompt < position < len(trace.tokens) + 1 and 0 <= accepted <= proposed):
            raise ValueError(f"rounds has [{position}, {proposed}, {accepted}]; expected a place in the answer")
