"""The two things that generators make: samples to train on and prompts to evaluate with."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

# train:    training phrase families with training values
# values:   training phrase families with values that training never sees
# families: phrase families (wordings, tool names, schemas) that training never sees
Split = Literal["train", "values", "families"]


@dataclass
class Sample:
    """One conversation, in OpenAI's message shape.

    Assistant messages may carry "reasoning_content" and "tool_calls" (ids `functions.NAME:IDX`, IDX counted over the
    conversation). Loss falls on every assistant turn. `check` says how the last assistant turn would be graded, as
    `redline.bench.quality.checks.grade` reads it; None: this sample is for training only.
    """

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = True
    check: dict[str, Any] | None = None


@dataclass
class Document:
    """Plain text to continue (Python sources, documentation)."""

    text: str


Generator = Callable[[random.Random, Split], Sample]
