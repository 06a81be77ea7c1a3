"""What `explain`, `profile` and `role` ask of a deployment's admin routes, and what is said where that fails."""

from typing import Any

import httpx

from redline.cli.terminal import one_line
from redline.errors import ConfigError

ANSWER_S = 10.0


def ask(
    method: str, url: str, path: str, key: str | None, *, answer_s: float = ANSWER_S, **more: Any
) -> httpx.Response:
    """The answer (200) of a route. url: where the admin routes are. more: as httpx.request takes it.

    Raises ConfigError where nobody answers there, or with what is said of a request that is refused.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(ANSWER_S, read=answer_s)
    try:
        answer = httpx.request(
            method, url.rstrip("/") + path, headers=headers, timeout=timeout, trust_env=False, **more
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _nobody(url, str(error)) from None
    if answer.status_code == 200:
        return answer
    try:
        why = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise _nobody(url, f"status {answer.status_code}") from None
    raise ConfigError(one_line(why))


def _nobody(url: str, why: str) -> ConfigError:
    return ConfigError(f"no admin routes at {url} ({one_line(why)}); a deployment's admin_port says where they are")
