"""Requests of `explain`, `profile` and `role` to a deployment's admin routes, and the errors if they fail."""

from typing import Any

import httpx

from redline.cli.terminal import one_line
from redline.errors import ConfigError

ANSWER_S = 10.0
PRINTED = "a server prints --url and --key of its admin routes when it is ready, in the line `redline explain ...`"


def ask(
    method: str, url: str, path: str, key: str | None, *, answer_s: float = ANSWER_S, **more: Any
) -> httpx.Response:
    """The 200 response of a route. url: address of the admin routes. more: arguments of httpx.request.

    Raises ConfigError if there is no server, or with the server's message if it refuses the request.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(ANSWER_S, read=answer_s)
    try:
        answer = httpx.request(
            method, url.rstrip("/") + path, headers=headers, timeout=timeout, trust_env=False, **more
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise no_admin_routes(url, str(error)) from None
    if answer.status_code == 200:
        return answer
    try:
        why = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise no_admin_routes(url, f"status {answer.status_code}") from None
    raise ConfigError(one_line(why) + (f"; {PRINTED}" if answer.status_code == 401 else ""))


def no_admin_routes(url: str, why: str) -> ConfigError:
    """The error if no admin routes answer at `url`."""
    return ConfigError(f"no admin routes at {url} ({one_line(why)}); {PRINTED}")
