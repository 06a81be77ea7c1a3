"""Words that Redline's prose does not use: each has a term of the field, which a reader searches for."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The field's term -> what may not be written for it.
NOT_SAID = {
    "the drafter": ["who drafts", "whoever drafts", "whoever listens", "who listens"],
    "prefill worker, decode worker": ["who computes", "who answers", "workers that do both"],
    "the received message": ["what was told", "what it was told", "what is told", "it was told", "is told anew"],
    "reports, returns, contains": ["what it says", "where nothing is said", "where none is said", "as it says it"],
    "if no request is waiting": [
        "where nobody",
        "nobody waits",
        "nobody wants",
        "nobody foresaw",
        "nobody else is told",
    ],
    "at most N; the number that pays off": ["so many as", "as many as pay", "every so manieth", "so manieth"],
    "CUDA graph, captured, replayed": ["recorded shape", "recorded step", "recorded pieces"],
    "eager": ["led by the host", "the host leads"],
    "greedy, argmax": ["likeliest tokens", "the likeliest one"],
    "heartbeat, timeout": ["said nothing for", "has not been heard", "silent for so long", "its pulse", "its heart "],
    "requeue, failover, down": ["is stranded", "moves on to", "is lost and gone", "strands"],
    "KV transfer": ["hands its parcel", "what is handed over", "is handed over for nothing"],
    "KV offload tier": ["memory below the prefix cache"],
    "SLO target": ["what requests are promised", "promises kept", "promises are lost"],
    "role switch": ["to take a role", "takes a turn", "take a turn"],
    "scheduler": ["what now?", "who decides"],
    "all-reduce": ["sums of ranks"],
    "rate limit": ["what one may ask"],
    "publish, subscribe": ["is told to every", "tells every"],
    "default": ["absent: what it does", "none: what it does", "none: nobody"],
    "a bug in Redline": ["a mistake of ours"],
    "start again, resume": ["goes on where it was stopped", "begins anew", "is made anew"],
    "while, next to, compared with": ["beside it,", "beside which"],
    "is in": ["stands in for its", "lies below it"],
}
PHRASES = [phrase for phrases in NOT_SAID.values() for phrase in phrases]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a page outside its code; comments, and sentences in strings, of a program."""
    text = path.read_text()
    if path.suffix == ".md":
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            fenced ^= line.startswith("```")
            if not fenced and not line.startswith("    "):
                yield number, line
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):  # from 3.12 on an f-string is no token
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 3:
            yield node.lineno, node.value


def sources() -> list[Path]:
    """Package, tests and pages; the log is a record of its days."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    programs = [*ROOT.glob("redline/**/*.py"), *ROOT.glob("tests/**/*.py")]
    return [path for path in (*pages, *programs) if path.name not in ("log.md", Path(__file__).name)]


def test_sixty_phrases_have_a_term_of_the_field():
    assert len(set(PHRASES)) == len(PHRASES) >= 60


def folder_of(path: Path) -> str:
    return "pages" if path.suffix == ".md" else path.relative_to(ROOT).parts[0]


@pytest.mark.parametrize("folder", ["redline", "tests", "pages"])
def test_prose_has_the_fields_words(folder: str):
    rule = re.compile(rf"\b({'|'.join(map(re.escape, PHRASES))})", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in sources()
        if folder_of(path) == folder
        for number, text in prose(path)
        for match in rule.finditer(" ".join(text.split()))
    ]
    assert not found, "\n".join(found[:40])
