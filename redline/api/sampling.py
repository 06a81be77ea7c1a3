"""Sampling options as request fields: derived, for every API, from their declarations in `redline.messages.job`."""

from typing import Any

import msgspec

from redline.api.config import Defaults
from redline.messages.job import OPTIONS, Sampling
from redline.messages.sampling_option import Api, Option, Own


def plain_options(api: Api) -> tuple[Option, ...]:
    """The options that requests of this API give as plain numbers."""
    return tuple(option for option in OPTIONS.values() if api in option.apis and not isinstance(option, Own))


def with_sampling(base: type[msgspec.Struct], api: Api, *, whole: bool = False) -> type[msgspec.Struct]:
    """`base` with a field for each of `plain_options`, None if it is absent.

    whole: integers may be sent as 6.0 (`whole_number` reads them); the struct has to convert them.
    """
    fields = [
        (option.name, (whole_number(option) if whole and option.kind is int else option.annotation) | None, None)
        for option in plain_options(api)
    ]
    return msgspec.defstruct(f"{base.__name__}Sampling", fields, bases=(base,), kw_only=True, module=base.__module__)


def whole_number(option: Option) -> Any:
    """The type of an integer that some clients, which have no integer type, send as 6.0."""
    return option.annotation | option.ranged(float)


def sampling_of(request: msgspec.Struct, api: Api, defaults: Defaults, max_tokens: int, **others: Any) -> Sampling:
    """The sampling parameters of a request; fields that it lacks have this server's defaults.

    others: the options that the API reads by code of its own.
    """
    asked = {option.name: (option, getattr(request, option.name)) for option in plain_options(api)}
    given = {name: option.meaning(value) for name, (option, value) in asked.items() if value is not None}
    return msgspec.structs.replace(defaults.sampling, max_tokens=max_tokens, **given, **others)


def default_schemas(api: Api, defaults: Defaults) -> dict[str, dict[str, Any]]:
    """For /openapi.json: what the absence of each of `plain_options` means on this server."""
    return {option.name: {"default": getattr(defaults.sampling, option.name)} for option in plain_options(api)}
