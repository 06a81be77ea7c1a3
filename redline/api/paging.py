"""How much of a list a client asks for."""

import re

from redline.errors import RequestError


def page_limit(said: str | None, most: int, default: int) -> int:
    """The entries of a page, as the query's `limit` has them. Raises RequestError for anything but 1 to `most`."""
    if said is None:
        return default
    if not (re.fullmatch("[0-9]{1,6}", said) and 1 <= int(said) <= most):
        raise RequestError(f"limit is {said[:20]!a}; expected a number from 1 to {most}", "limit")
    return int(said)
