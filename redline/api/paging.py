"""The page size of a list."""

import re

from redline.errors import RequestError


def page_limit(said: str | None, most: int, default: int) -> int:
    """The number of entries per page, from the query's `limit`. Raises RequestError for anything but 1 to `most`."""
    if said is None:
        return default
    if not (re.fullmatch("[0-9]{1,6}", said) and 1 <= int(said) <= most):
        raise RequestError(f"limit is {said[:20]!a}; expected a number from 1 to {most}", "limit")
    return int(said)
