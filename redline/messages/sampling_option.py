"""What all layers know about a sampling option, declared once: at its field of `Sampling` (`redline.messages.job`).

Derived from it: request fields and defaults of every API, generation_config.json, the choice of kernels and CUDA
graphs, the device's columns, the table in docs/api.md, and the options that tests combine.
"""

import dataclasses
from enum import Enum, Flag, auto
from typing import Annotated, Any, get_args, get_type_hints

import msgspec


class SamplingStage(Enum):
    """Where sampling reads an option; stages run in this order."""

    BIAS = auto()  # added to logits
    PENALTY = auto()  # changes logits of tokens that occurred: `ops.penalties`
    LENGTH = auto()  # bans tokens until a length
    TEMPERATURE = auto()  # divides logits
    FILTER = auto()  # excludes tokens by their probability: `ops.sample`
    DRAW = auto()  # chooses among the tokens that are left
    REPORT = auto()  # changes no token


class Api(Flag):
    """The APIs with a request field of the option's name."""

    OPENAI = auto()  # chat completions and completions
    RESPONSES = auto()
    ANTHROPIC = auto()


@dataclasses.dataclass(frozen=True)
class Option:
    """One sampling option. At a field of `Sampling` without `name`, `kind` and `neutral`, which the field gives."""

    stage: SamplingStage
    ge: float  # smallest value of a request
    le: float  # largest one
    apis: Api
    example: Any  # a value that changes answers, for tests
    owner: str = "V"  # whose field it is: O OpenAI, V vLLM
    file: bool = False  # generation_config.json may set its default
    off: float | None = None  # a value of a request that means the neutral one
    note: str = ""  # for docs/api.md
    name: str = ""
    kind: type[float] = float  # or int
    neutral: Any = None  # the field's default: changes nothing

    @property
    def annotation(self) -> Any:
        """The type of a value in a request or a file, with its range."""
        return self.ranged(self.kind)

    def ranged(self, kind: type[float]) -> Any:
        """`kind`, float or int, with the option's range."""
        return Annotated[kind, msgspec.Meta(ge=self.ge, le=self.le)]

    def meaning(self, value: Any) -> Any:
        """The value in `Sampling` of a value in a request or a file."""
        return self.neutral if value == self.off else value


class Own(Option):
    """An option that is not a plain number of a request: each API reads it by code of its own."""


def options_of(record: type[msgspec.Struct]) -> dict[str, Option]:
    """The options that are declared at the fields of a record, by name, in its order."""
    hints = get_type_hints(record, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(record)}
    found: dict[str, Option] = {}
    for name, hint in hints.items():
        for option in getattr(hint, "__metadata__", ()):
            if isinstance(option, Option):
                bare = get_args(hint)[0]
                kind = int if int in (bare, *get_args(bare)) else float
                found[name] = dataclasses.replace(option, name=name, kind=kind, neutral=defaults[name])
    return found
