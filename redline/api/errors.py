"""Maps every exception to an HTTP status and a body in OpenAI's format.

Exceptions raised on purpose have a message for the client; all others are logged, and the client sees no internals.
"""

import logging
import math
import re
from typing import NamedTuple

from redline.api.body import ResponseBody, encode
from redline.errors import Overloaded, RedlineError, RequestError, WorkerLost

RETRY_AFTER_S = 1  # Retry-After of rejected requests, in seconds

log = logging.getLogger("redline.api")


class Refusal(RequestError):
    """A request rejected for an HTTP reason (size, key, path), before its body is interpreted.

    status: of HTTP. code: the machine-readable code in the body. `retry_s`: seconds after which a retry can help; None:
    never.
    """

    retry_s: float | None = None

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class WholeResponse(NamedTuple):
    """A complete HTTP response; `headers` are those other than content-type and content-length."""

    status: int
    body: bytes
    headers: dict[str, str]


class ErrorDetail(ResponseBody):
    """An error in OpenAI's format. param: the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseBody):
    """The body of an error in OpenAI's format."""

    error: ErrorDetail


def _retry_after(seconds: float) -> str:
    return str(max(RETRY_AFTER_S, math.ceil(seconds)))


class ClientError(NamedTuple):
    """An exception as reported to a client, before formatting for an API. kind: OpenAI's type. `message` names the
    field `param`, since clients show only the message."""

    status: int
    message: str
    kind: str
    param: str | None
    code: str | None
    headers: dict[str, str]


def tell(error: Exception) -> ClientError:
    """Convert an exception for the client. Server errors are logged, with a traceback if they are unexpected."""
    match error:
        case Refusal(status=429, retry_s=float() as seconds):
            headers = {"retry-after": _retry_after(seconds)}
            return ClientError(429, _naming(error), "rate_limit_error", error.param, error.code, headers)
        case RequestError():
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
            return ClientError(error.status, _naming(error), kind, error.param, error.code, headers)
        case Overloaded():
            return ClientError(
                503, str(error), "server_error", None, "overloaded", {"retry-after": _retry_after(error.retry_s)}
            )
        case WorkerLost():
            return ClientError(
                503, str(error), "server_error", None, "worker_lost", {"retry-after": str(RETRY_AFTER_S)}
            )
        case _:
            # An engine error about a job is expected and fits one line; only unexpected errors get a traceback.
            known = isinstance(error, RedlineError)
            log.error("a request failed: %s", error, exc_info=None if known else error)
            return ClientError(
                500, "Internal server error while processing this request", "server_error", None, None, {}
            )


def _naming(error: RequestError) -> str:
    """The message of an error, prefixed with the field unless it contains the field's name as a word."""
    message, param = str(error), error.param
    if not param or re.search(rf"(?<!\w){re.escape(param)}(?!\w)", message):
        return message
    return f"{param}: {message}"


def answer_to(error: Exception) -> WholeResponse:
    """The status and body for an exception, in OpenAI's format; `tell` logs server errors."""
    told = tell(error)
    body = encode(ErrorResponse(ErrorDetail(told.message, told.kind, told.param, told.code)))
    return WholeResponse(told.status, body, told.headers)
