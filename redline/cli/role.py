"""`redline role`: another role for a worker of a deployment that serves."""

from urllib.parse import quote

from rich.console import Console

from redline.cli.admin import ask
from redline.cli.terminal import one_line


def turn(worker: str, role: str, url: str, key: str | None) -> None:
    """Asks the admin routes for it. Raises ConfigError where nobody answers there, or the worker cannot."""
    ask("POST", url, f"/admin/workers/{quote(worker, safe='')}/role", key, json={"role": role})


def show(worker: str, role: str, console: Console) -> int:
    """Prints what comes of it: 0."""
    console.print(
        f"{one_line(worker)} becomes {role}: what is new goes by it at once; `turning_s` in /admin/status is null once "
        "it has ended what it had begun",
        highlight=False,
        soft_wrap=True,
    )
    return 0
