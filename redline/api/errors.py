"""Every exception as an HTTP status and a body in OpenAI's shape.

What was raised on purpose explains itself to the client; anything else is logged, and says nothing of our insides.
"""

import logging
import math
import re
from typing import NamedTuple

import msgspec

from redline.errors import Overloaded, RedlineError, RequestError, WorkerLost

RETRY_AFTER_S = 1  # what a refused client is told to wait, in seconds

log = logging.getLogger("redline.api")


class Refusal(RequestError):
    """A request that is refused for its HTTP side (size, key, path), before its body is understood.

    status: of HTTP. code: the word for programs in the body. `retry_s`: when to ask again, where that would help.
    """

    retry_s: float | None = None

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Answer(NamedTuple):
    """A whole HTTP answer; `headers` do not count the type and length of the body."""

    status: int
    body: bytes
    headers: dict[str, str]


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON {"error": {"message", "type", "param", "code"}}; kind is the type, param the field that is wrong."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def _retry_after(seconds: float) -> str:
    return str(max(RETRY_AFTER_S, math.ceil(seconds)))


class Told(NamedTuple):
    """What a client is told of an exception, in no dialect's shape yet. kind: OpenAI's type. `message` names the field
    `param`, since clients show the message alone."""

    status: int
    message: str
    kind: str
    param: str | None
    code: str | None
    headers: dict[str, str]


def tell(error: Exception) -> Told:
    """What a client is told of an exception; what is our fault is logged, with its trace where nobody foresaw it."""
    match error:
        case Refusal(status=429, retry_s=float() as seconds):
            headers = {"retry-after": _retry_after(seconds)}
            return Told(429, _naming(error), "rate_limit_error", error.param, error.code, headers)
        case RequestError():
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
            return Told(error.status, _naming(error), kind, error.param, error.code, headers)
        case Overloaded():
            return Told(
                503, str(error), "server_error", None, "overloaded", {"retry-after": _retry_after(error.retry_s)}
            )
        case WorkerLost():
            return Told(503, str(error), "server_error", None, "worker_lost", {"retry-after": str(RETRY_AFTER_S)})
        case _:
            # What the engine says of a job is known, and one line; a trace is for what nobody foresaw.
            known = isinstance(error, RedlineError)
            log.error("a request failed: %s", error, exc_info=None if known else error)
            return Told(500, "The server met an error with this request", "server_error", None, None, {})


def _naming(error: RequestError) -> str:
    """The message of an error, which begins with the field unless it names it as a word of its own."""
    message, param = str(error), error.param
    if not param or re.search(rf"(?<!\w){re.escape(param)}(?!\w)", message):
        return message
    return f"{param}: {message}"


def answer_to(error: Exception) -> Answer:
    """The status and body for an exception, in OpenAI's shape; `tell` says what is logged."""
    told = tell(error)
    return Answer(told.status, error_body(told.message, told.kind, told.param, told.code), told.headers)
