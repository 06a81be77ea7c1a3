"""`redline role`: switches the role of a running deployment's worker."""

from urllib.parse import quote

from rich.console import Console

from redline.cli.admin import ask
from redline.cli.terminal import one_line


def turn(worker: str, role: str, url: str, key: str | None) -> None:
    """Send the role switch to the admin routes. Raises ConfigError if there is no server, or if it refuses."""
    ask("POST", url, f"/admin/workers/{quote(worker, safe='')}/role", key, json={"role": role})


def show(worker: str, role: str, console: Console) -> int:
    """Print the result; returns the exit code, 0."""
    console.print(
        f"{one_line(worker)} becomes {role}: new requests follow the new role at once; `turning_s` in /admin/status is "
        "null once the requests of the old role have ended",
        highlight=False,
        soft_wrap=True,
    )
    return 0
