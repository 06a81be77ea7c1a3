"""All errors that Redline raises on purpose, grouped by whether the client, the operator or a retry can fix them.

RedlineError
  x RequestError          the client can fix it; names the field of the request
    - ContextTooLong
    - ModelNotFound
    - MessageTooLarge
    - DeadlineExceeded
    - Refusal             refused at the level of HTTP (redline.api.errors)
  x ConfigError           the operator can fix it; names the place
    - CheckpointError     one line: file, tensor, expected value
      - BrokenFile            the same, with its parts as attributes
  x Overloaded            a retry can fix it
  x WorkerLost            the worker is down; a retry can fix it once another worker is ready
    - RankLost              one of its tensor parallel ranks is down
  x TransferFailed        a transfer from a peer failed (redline.transport.base); a retry can fix it
  x JobFailed             an internal error, in this job alone (redline.api.gateway.generation)
"""

import sys
from pathlib import Path


class RedlineError(Exception):
    """Base class. The message is one line that names the remedy."""


class RequestError(RedlineError):
    """The client sent something that it can correct. `param` names the field, as the client spells it.

    `status` is the HTTP status of the response, `code` the machine-readable code in its body.
    """

    status = 400
    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(RequestError):
    """A prompt is longer than the server accepts; the message contains the numbers."""

    code = "context_length_exceeded"


class PromptTooLong(ContextTooLong):
    """A prompt leaves no room for an answer in the model's context.

    Clients search for the wording of OpenAI, which is in the message, and of Anthropic, `in_messages`: coding agents
    then compact the conversation, and client libraries raise a specific error.
    """

    def __init__(self, param: str, tokens: int, limit: int, *, at_least: bool = False) -> None:
        """tokens: length of the prompt. at_least: encoding stopped at that length, so the prompt may be longer. limit:
        maximum of prompt and answer together, in tokens."""
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, the prompt in {param} has "
            f"{'at least ' if at_least else ''}{tokens} tokens, and the answer needs 1 or more. "
            f"Please reduce the length of {param}.",
            param,
        )
        self.in_messages = f"prompt is too long: {tokens} tokens > {limit - 1} maximum"


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve; the message lists the served models."""

    status = 404
    code = "model_not_found"


class MessageTooLarge(RequestError):
    """A message between processes exceeds the size limit. If it belongs to an answer, its job has failed (500)."""

    status = 413
    code = "message_too_large"


class ConfigError(RedlineError):
    """The deployment, a flag or a file is wrong; the message names the place."""


class CheckpointError(ConfigError):
    """A checkpoint cannot be read: the message names the file, the tensor and the expected value."""


class BrokenFile(CheckpointError):
    """A CheckpointError with its parts as attributes. tensor: its stored name; empty if the whole file is wrong."""

    def __init__(self, file: Path, tensor: str, what: str) -> None:
        super().__init__(f"{file}: {tensor}: {what}" if tensor else f"{file}: {what}")
        self.file = file
        self.tensor = tensor
        self.what = what


class Overloaded(RedlineError):
    """The server has no capacity for the request now (a full queue, a model that is loading); it may succeed later.

    `retry_s`: seconds until a retry may succeed, as far as known. `reason`: the label for metrics.
    """

    def __init__(self, message: str, retry_s: float = 1.0, reason: str = "overloaded") -> None:
        super().__init__(message)
        self.retry_s = retry_s
        self.reason = reason


class DeadlineExceeded(RequestError):
    """The answer was not complete within the timeout of the request or of the deployment."""

    status = 504
    code = "deadline_exceeded"


class WorkerLost(RedlineError):
    """The worker that ran the request has ended, or must end because no further step can succeed."""


class RankLost(WorkerLost):
    """Another rank has ended, or did not answer before the timeout; the message names the rank and the step."""


def not_installed(package: str) -> str:
    """One line for a package that this Python lacks: which Python was searched, and the command that installs it."""
    tree, python = Path(__file__).resolve().parents[1], sys.executable
    if (tree / "pyproject.toml").is_file():
        how = f"run `make serve` in {tree}, which makes an environment, or {python} -m pip install -e {tree}"
    else:
        how = f"install Redline's wheel with {python} -m pip install, which brings its dependencies"
    return f"{package} is not installed for {python}: {how}"


def unimportable(error: ImportError) -> str | None:
    """One line for a third-party package that cannot be imported; None if the module is part of Redline."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "redline"):
        return None
    if package in sys.stdlib_module_names:
        return f"{sys.executable} was built without a part of Python: {error}"
    return (
        not_installed(package) if isinstance(error, ModuleNotFoundError) else f"{package} cannot be imported: {error}"
    )
