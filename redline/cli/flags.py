"""The parameters of a command, declared by a record.

A field of the record is one option, or with `Argument` one argument of the command:

    class ServeFlags(Record, frozen=True):
        port: Annotated[int, Meta(ge=0, le=65535, description="Port. 0: any free one.")] = 8000
        k: Annotated[int, Meta(description="Draft tokens per round."), Flag("--k", metavar="K")] = 3

    @verb(app, "serve", ServeFlags)
    def serve(flags: ServeFlags) -> int | None: ...

The field's name gives the option's, its type and bounds the accepted values, its description the help. A field with a
tuple is a repeatable option. A field with a record is a group: its fields are options of the command too.
"""

import inspect
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
import typer
from msgspec import NODEFAULT, UNSET, Meta

AtLeast1 = Annotated[int, Meta(ge=1)]
Check = Callable[[Any], object]  # takes a parsed value that is not None; raises ConfigError


class Flag:
    """How an option is spelled and shown, where the field does not tell. names: `--name`, `-n`, or `--on/--off`."""

    def __init__(
        self,
        *names: str,
        metavar: str | None = None,
        panel: str | None = None,
        envvar: str | None = None,
        check: Check | None = None,
        hidden: bool = False,
    ) -> None:
        self.names, self.check, self.metavar = names, check, metavar
        self.shown: dict[str, Any] = {
            "metavar": metavar, "rich_help_panel": panel, "envvar": envvar, "hidden": hidden,
        }  # fmt: skip


class Argument(Flag):
    """Makes the field a positional argument. `names` stays empty."""


class _Field(NamedTuple):
    """A field of a record as a parameter of a command."""

    path: tuple[str, ...]  # names of the groups that contain it, and its own
    parameter: inspect.Parameter
    default: Any  # for an option that is not given; UNSET: it is required
    spelling: str  # in an error
    bounds: str  # 1<=x<=64; empty: none


T = TypeVar("T")


def verb(
    app: typer.Typer, name: str, record: type[T], **how: Any
) -> Callable[[Callable[[T], int | None]], Callable[[T], int | None]]:
    """Register a function as the command `name`, with the parameters that `record` declares.

    The function takes the record and returns the exit code. how: arguments of typer's `command`.
    """
    assert issubclass(record, msgspec.Struct)
    fields = list(_fields(record, ()))

    def register(act: Callable[[T], int | None]) -> Callable[[T], int | None]:
        def command(**given: Any) -> None:
            raise typer.Exit(act(_filled(record, fields, given)) or 0)

        parameters = [field.parameter for field in fields]
        command.__doc__ = act.__doc__
        command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name, **how)(command)
        return act

    return register


def _fields(record: type[msgspec.Struct], groups: tuple[str, ...]) -> Iterator[_Field]:
    hints = get_type_hints(record, include_extras=True)
    for field in msgspec.structs.fields(record):
        kind, extras = _unwrapped(hints[field.name])
        path = (*groups, field.name)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _fields(kind, path)
            continue
        default = UNSET if field.default is NODEFAULT else field.default
        if field.default_factory is not NODEFAULT:
            default = field.default_factory()
        shown = inspect.Parameter.empty if default is UNSET else default
        if several := get_origin(kind) is tuple:
            kind, inner = _unwrapped(get_args(kind)[0])
            extras += inner
            shown = shown if default is UNSET else None
        info, spelling, bounds = _declared(field.name, extras, "float" if kind is float else "int")
        kind = cast("Any", list[kind] if several else kind)
        annotation = Annotated[kind if default is UNSET else kind | None, info]
        parameter = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=annotation)
        yield _Field(path, parameter, default, spelling, bounds)


def _unwrapped(hint: Any) -> tuple[Any, list[Any]]:
    """A type without None and annotations, and the annotations, the outermost last."""
    if get_origin(hint) is Annotated:
        inner, *extras = get_args(hint)
        kind, more = _unwrapped(inner)
        return kind, [*more, *extras]
    if get_origin(hint) in (Union, UnionType):
        (only,) = (each for each in get_args(hint) if each is not NoneType)
        return _unwrapped(only)
    return hint, []


def _declared(name: str, extras: list[Any], number: str) -> tuple[Any, str, str]:
    """typer's declaration of a parameter, its name in errors, and its bounds. number: the type of a bounded value."""
    flag = next((each for each in reversed(extras) if isinstance(each, Flag)), Flag())
    meta = [each for each in extras if isinstance(each, Meta)]
    shown: dict[str, Any] = {key: value for key, value in flag.shown.items() if value is not None}
    shown["help"] = next((each.description for each in reversed(meta) if each.description is not None), None)
    bounds = "".join(range_of(each) for each in meta)
    if bounds:
        shown["metavar"] = f"{shown.get('metavar', f'<{number}>')} [{bounds}]"
    if (check := flag.check) is not None:
        shown["callback"] = _callback(check)
    if isinstance(flag, Argument):
        shown.setdefault("metavar", name.upper())
        return typer.Argument(**shown), flag.metavar or name.upper(), bounds
    names = flag.names or (f"--{name.rstrip('_').replace('_', '-')}",)  # named, a bool has no --no-name
    return typer.Option(*names, **shown), names[0].partition("/")[0], bounds


def range_of(meta: Meta) -> str:
    """The bounds of a number, as in 1<=x<=64, x>=1 or 0<x<1; empty if there are none."""
    low = next((f"{value}{sign}" for value, sign in ((meta.ge, "<="), (meta.gt, "<")) if value is not None), "")
    high = next((f"{sign}{value}" for value, sign in ((meta.le, "<="), (meta.lt, "<")) if value is not None), "")
    if low and not high:
        return f"x>{'=' * low.endswith('=')}{low.rstrip('<=')}"
    return f"{low}x{high}" if high else ""


def _callback(check: Check) -> Callable[[typer.Context, Any], Any]:
    def checked(context: typer.Context, value: Any) -> Any:
        if value is not None and not context.resilient_parsing:
            check(value)
        return value

    return checked


def _filled(record: type[T], fields: list[_Field], given: dict[str, Any]) -> T:
    """The record of a command line. Raises typer.BadParameter for a value that its field's type does not allow."""
    values: dict[str, Any] = {}
    for field in fields:
        value = given[field.parameter.name]
        if field.default is not UNSET and (value is None or value == []):
            value = field.default
        place = values
        for group in field.path[:-1]:
            place = place.setdefault(group, {})
        place[field.path[-1]] = value
    try:
        return msgspec.convert(values, record)
    except msgspec.ValidationError as error:
        why, _, at = str(error).partition(" - at `$.")
        name = at.rstrip("`").partition("[")[0].rpartition(".")[2]
        (field,) = (each for each in fields if each.path[-1] == name)
        wrong = f" is not in the range {field.bounds}" if field.bounds else f": {why}"
        raise typer.BadParameter(f"{given[name]!r}{wrong}", param_hint=f"'{field.spelling}'") from None
