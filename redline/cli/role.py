"""`redline role`: another role for a worker of a deployment that serves."""

from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Console

from redline.cli.terminal import one_line
from redline.errors import ConfigError

ANSWER_S = 10.0


def turn(worker: str, role: str, url: str, key: str | None) -> None:
    """Asks the admin routes for it. Raises ConfigError where nobody answers there, or the worker cannot."""
    place = f"{url.rstrip('/')}/admin/workers/{quote(worker, safe='')}/role"
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.post(place, json={"role": role}, headers=headers, timeout=ANSWER_S, trust_env=False)
        told: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(
            f"no admin routes at {url} ({one_line(str(error))}); a deployment's admin_port says where they are"
        ) from None
    if answer.status_code != 200:
        error = told.get("error", "")
        raise ConfigError(one_line(error if isinstance(error, str) else str(error["message"])))


def show(worker: str, role: str, console: Console) -> int:
    """Prints what comes of it: 0."""
    console.print(
        f"{one_line(worker)} becomes {role}: what is new goes by it at once; `turning_s` in /admin/status is null once "
        "it has ended what it had begun",
        highlight=False,
        soft_wrap=True,
    )
    return 0
