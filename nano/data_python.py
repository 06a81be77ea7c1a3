"""Python's own sources and documentation as plain text to continue.

Both come with the interpreter that runs this, under the PSF licence; `python_version` says which it was. Texts are cut
at blank lines, so that a piece is a few whole functions or paragraphs.
"""

import platform
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from nano.sample import Document

SHORTEST, LONGEST = 500, 3_000  # characters in a piece
LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "lib2to3", "__pycache__", "encodings", "pydoc_data"}


def python_version() -> str:
    """The version whose sources were read, such as "3.11.7"."""
    return platform.python_version()


def documents(rng: random.Random) -> Iterator[Document]:
    """An endless stream of pieces of the standard library and the documentation topics, shuffled anew each round."""
    pieces = [*sources(), *topics()]
    while True:
        rng.shuffle(pieces)
        yield from map(Document, pieces)


def sources() -> list[str]:
    """Pieces of the standard library's modules, without tests, tables of encodings and bundled packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts))
    pieces: list[str] = []
    for path in files:
        try:
            pieces += cut(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:  # a few old modules declare another encoding
            continue
    return pieces


def topics() -> list[str]:
    """Pieces of the language reference as `help()` prints it."""
    from pydoc_data.topics import topics as pages

    return [piece for name in sorted(pages) for piece in cut(pages[name])]


def cut(text: str) -> list[str]:
    """`text` in pieces of SHORTEST to LONGEST characters that end at blank lines; other pieces are dropped."""
    pieces: list[str] = []
    piece = ""
    for paragraph in text.split("\n\n"):
        if len(piece) + len(paragraph) + 2 > LONGEST:
            pieces.append(piece)
            piece = ""
        piece += paragraph + "\n\n"
    pieces.append(piece)
    cleaned = (piece.strip("\n") for piece in pieces)
    return [piece for piece in cleaned if SHORTEST <= len(piece) <= LONGEST]
