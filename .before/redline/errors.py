"""Everything that Redline raises on purpose, and whom each error is for.

RedlineError
  x RequestError          the client can fix it; names the field of the request
    - ContextTooLong
    - ModelNotFound
    - MessageTooLarge
  x ConfigError           the operator can fix it; names the place
    - CheckpointError     one line: file, tensor, what was expected
  x Overloaded            a retry can fix it
  x WorkerLost
"""


class RedlineError(Exception):
    """Root of the tree. The message is one line that says what to do."""


class RequestError(RedlineError):
    """The client sent something that it can mend. `param` names the field, as the client spells it."""

    status = 400
    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"


class MessageTooLarge(RequestError):
    """What one request is, or what it is answered, has more bytes than a message between processes may have."""

    status = 413
    code = "message_too_large"


class ConfigError(RedlineError):
    """The deployment, a flag or a file is wrong; the message names the place."""


class CheckpointError(ConfigError):
    """A checkpoint cannot be read: the message names file, tensor and what was expected."""


class Overloaded(RedlineError):
    """The queue is full; the same request may succeed later."""


class WorkerLost(RedlineError):
    """The worker that ran this request has ended."""
