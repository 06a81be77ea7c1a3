"""Acceptance traces: what a serving engine wrote down of its rounds, as examples to learn from.

One JSON object a line: {"id", "tokens": prompt and answer, "prompt": how many are prompt, "finish", "rounds":
[[position of the first draft, verified, accepted], ...], and perhaps "domain" and "language"}. A trace holds users'
text.
"""

from pathlib import Path

import msgspec

from redline.chat.lines import NOT_JSON
from redline.draft.corpus.corpus import Corpus, Example
from redline.errors import ConfigError

TRAFFIC = "traffic"  # the domain of lines that name none


class _Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that we do not know are left alone: a newer engine may say more."""

    id: str
    tokens: tuple[int, ...]
    prompt: int
    finish: str
    rounds: tuple[tuple[int, int, int], ...]
    domain: str | None = None
    language: str = "en"


def trace_file(named: str) -> tuple[str, Path]:
    """DOMAIN=FILE, or FILE, as (domain, file); without one the domain is TRAFFIC.

    A file whose own name has a = is taken whole where there is such a file.
    """
    domain, sign, path = named.partition("=")
    return (domain, Path(path)) if sign and domain and not Path(named).exists() else (TRAFFIC, Path(named))


def read_traces(*files: str) -> Corpus:
    """The traces as examples, and a message naming file and line for each line that is none.

    files: DOMAIN=FILE or FILE (`trace_file`); the domain is for those lines that name none. Answers without a token,
    and those that ended in an error, are left out without a message. Raises ConfigError where a file cannot be read.
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
                        id=f"{path.stem} {number} {trace.id}",  # ids of requests may come back after a restart
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
    """Raises ValueError for a trace whose numbers contradict each other."""
    if not 0 < trace.prompt <= len(trace.tokens) or min(trace.tokens) < 0:
        raise ValueError(
            f"prompt is {trace.prompt} of {len(trace.tokens)} tokens; expected ids from 0 on, and a prompt"
        )
    for position, proposed, accepted in trace.rounds:
        if not (trace.prompt < position < len(trace.tokens) + 1 and 0 <= accepted <= proposed):
            raise ValueError(f"rounds has [{position}, {proposed}, {accepted}]; expected a place in the answer")
