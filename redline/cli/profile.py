"""`redline profile`: a trace of a running server's next seconds, as a file for https://ui.perfetto.dev."""

import gzip
from pathlib import Path

import msgspec
from rich.console import Console

from redline.cli.admin import ask
from redline.cli.terminal import one_line
from redline.disk import human, save

ANSWER_S = 180.0  # timeout: a window is at most 60 s; after it kernel times are read, and the file is written


class _Notes(msgspec.Struct):
    requests: int
    left_out: dict[str, int]
    notes: list[str]


class _Trace(msgspec.Struct):
    otherData: _Notes  # the name in Chrome's trace format


def taken(seconds: float, url: str, key: str | None) -> bytes:
    """A gzipped trace of the next seconds. Raises ConfigError if there is no server, or if it refuses."""
    window = {"seconds": f"{seconds:g}"}
    return ask("POST", url, "/admin/profile", key, answer_s=ANSWER_S, params=window, json={}).content


def write(trace: bytes, path: Path, console: Console) -> int:
    """Write the file and print a summary; returns the exit code, 0. Raises OSError if it cannot be written."""
    told = msgspec.json.decode(gzip.decompress(trace), type=_Trace).otherData
    save(path, trace)
    console.print(
        f"{told.requests:,} requests in {path} ({human(len(trace))}); open it in https://ui.perfetto.dev",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    for what, count in told.left_out.items():
        console.print(f"left out, limit reached: {count:,} {one_line(what)}", highlight=False, markup=False)
    for note in told.notes:
        console.print(one_line(note), highlight=False, markup=False)
    return 0
