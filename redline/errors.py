"""Everything that Redline raises on purpose, and whom each error is for.

RedlineError
  x RequestError          the client can fix it; names the field of the request
    - ContextTooLong
    - ModelNotFound
    - MessageTooLarge
    - DeadlineExceeded
    - Refusal             what HTTP itself refuses (redline.api.errors)
  x ConfigError           the operator can fix it; names the place
    - CheckpointError     one line: file, tensor, what was expected
      - BrokenFile            the same, in its parts
  x Overloaded            a retry can fix it
  x WorkerLost            the worker has ended; a retry can fix it once there is another
    - RankLost              one of its ranks has
  x TransferFailed        bytes of a peer did not come (redline.transport.base); a retry can fix it
  x JobFailed             our fault, in one job alone (redline.api.gateway)
"""

import sys
from pathlib import Path


class RedlineError(Exception):
    """Root of the tree. The message is one line that says what to do."""


class RequestError(RedlineError):
    """The client sent something that it can mend. `param` names the field, as the client spells it.

    `status` is the HTTP status of the answer, `code` the word for programs in its body.
    """

    status = 400
    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(RequestError):
    """A prompt does not fit into what is read; the message has the numbers."""

    code = "context_length_exceeded"


class PromptTooLong(ContextTooLong):
    """A prompt leaves an answer no room in the model's context.

    Clients search for the words of OpenAI, which are the message, and of Anthropic, `in_messages`: coding agents then
    compact the conversation, and libraries raise an error of their own.
    """

    def __init__(self, param: str, tokens: int, limit: int, *, at_least: bool = False) -> None:
        """tokens: of the prompt. at_least: it may have more, since encoding has ended there. limit: of prompt and
        answer together."""
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, the prompt in {param} has "
            f"{'at least ' if at_least else ''}{tokens} tokens, and the answer needs 1 or more. "
            f"Please reduce the length of {param}.",
            param,
        )
        self.in_messages = f"prompt is too long: {tokens} tokens > {limit - 1} maximum"


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve; the message lists those that it does."""

    status = 404
    code = "model_not_found"


class MessageTooLarge(RequestError):
    """A message has more bytes than may travel between processes. Where it is an answer's, its job has failed (500)."""

    status = 413
    code = "message_too_large"


class ConfigError(RedlineError):
    """The deployment, a flag or a file is wrong; the message names the place."""


class CheckpointError(ConfigError):
    """A checkpoint cannot be read: the message names file, tensor and what was expected."""


class BrokenFile(CheckpointError):
    """A CheckpointError in its parts. tensor: its stored name; empty if the whole file is wrong."""

    def __init__(self, file: Path, tensor: str, what: str) -> None:
        super().__init__(f"{file}: {tensor}: {what}" if tensor else f"{file}: {what}")
        self.file = file
        self.tensor = tensor
        self.what = what


class Overloaded(RedlineError):
    """There is no room for the request now (a full queue, a model that is loading); it may succeed later.

    `retry_s`: in how many seconds, as far as that is known. `reason`: the word for metrics.
    """

    def __init__(self, message: str, retry_s: float = 1.0, reason: str = "overloaded") -> None:
        super().__init__(message)
        self.retry_s = retry_s
        self.reason = reason


class DeadlineExceeded(RequestError):
    """The answer was not complete when the time was over that its request gave it, or the deployment."""

    status = 504
    code = "deadline_exceeded"


class WorkerLost(RedlineError):
    """The worker that ran the request has ended, or must end because no further step can succeed."""


class RankLost(WorkerLost):
    """Another rank of the model has ended, or has kept this one waiting too long; the message names it and the step."""


def not_installed(package: str) -> str:
    """One line for a package that this Python does not have: where it looked, and what installs it."""
    tree, python = Path(__file__).resolve().parents[1], sys.executable
    if (tree / "pyproject.toml").is_file():
        how = f"run `make serve` in {tree}, which makes an environment, or {python} -m pip install -e {tree}"
    else:
        how = f"install Redline's wheel with {python} -m pip install, which brings what it needs"
    return f"{package} is not installed for {python}: {how}"


def unimportable(error: ImportError) -> str | None:
    """One line for a package of others that cannot be imported; None: the module is our own."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "redline"):
        return None
    if package in sys.stdlib_module_names:
        return f"{sys.executable} was built without a part of Python: {error}"
    return (
        not_installed(package) if isinstance(error, ModuleNotFoundError) else f"{package} cannot be imported: {error}"
    )
