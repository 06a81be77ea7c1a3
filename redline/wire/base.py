"""The two kinds of fact: a Record travels inside another; a Message travels on its own and carries its name.

And what is wrong with values that are to become one (`explained`).
"""

from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A fact that may cross a process border.

    Facts hold no cycles, so the garbage collector need not know of them: over 80,000 log probabilities of answers that
    are written, one full collection stopped every stream for 110 ms.
    """


class Message(Record, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A record sent on its own, so it carries its own name. Fields at their defaults are not sent."""


def explained(error: msgspec.ValidationError, kind: type[Record]) -> tuple[str, str]:
    """(what is wrong, where: `.engine.kv_dtype`, empty for the whole) of values that were to become a `kind`.

    msgspec names an invalid value of an enum; this names those that are valid too.
    """
    message, _, at = str(error).partition(" - at `$")
    at = at.rstrip("`")
    choices = _choices(kind, at.removeprefix("."))
    if message.startswith("Invalid enum value") and choices:
        message += f"; expected {' or '.join(choices)}"
    return message, at


def _choices(kind: Any, dotted: str) -> list[str]:
    """What a field of Records within Records may hold, where that is a Literal; [] for any other."""
    for key in dotted.partition("[")[0].split("."):
        kinds = [kind] if isinstance(kind, type) else [one for one in get_args(kind) if isinstance(one, type)]
        kind = next((hints[key] for one in kinds if key in (hints := get_type_hints(one))), None)
    while kind is not None and get_origin(kind) is not Literal and get_args(kind):
        kind = get_args(kind)[0]
    return [repr(value) for value in get_args(kind)]
