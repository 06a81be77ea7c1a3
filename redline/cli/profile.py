"""`redline profile`: what a running server does in the next seconds, as a file that https://ui.perfetto.dev opens."""

import gzip
from pathlib import Path

import msgspec
from rich.console import Console

from redline.cli.admin import ask
from redline.cli.terminal import one_line
from redline.disk import human, save

ANSWER_S = 180.0  # a window is 60 s at most; behind it kernels are read, and the file is written


class _Notes(msgspec.Struct):
    requests: int
    left_out: dict[str, int]
    notes: list[str]


class _Trace(msgspec.Struct):
    otherData: _Notes  # Chrome's word


def taken(seconds: float, url: str, key: str | None) -> bytes:
    """A trace of the next seconds, gzipped. Raises ConfigError where nobody answers, or it is refused."""
    window = {"seconds": f"{seconds:g}"}
    return ask("POST", url, "/admin/profile", key, answer_s=ANSWER_S, params=window, json={}).content


def write(trace: bytes, path: Path, console: Console) -> int:
    """Writes the file and tells what is in it: 0. Raises OSError where it cannot be written."""
    told = msgspec.json.decode(gzip.decompress(trace), type=_Trace).otherData
    save(path, trace)
    console.print(
        f"{told.requests:,} requests in {path} ({human(len(trace))}); https://ui.perfetto.dev opens it",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    for what, count in told.left_out.items():
        console.print(f"left out for want of room: {count:,} {one_line(what)}", highlight=False, markup=False)
    for note in told.notes:
        console.print(one_line(note), highlight=False, markup=False)
    return 0
