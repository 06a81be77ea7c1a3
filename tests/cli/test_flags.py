"""A command's parameters come from a record: names, defaults, bounds, groups."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from msgspec import Meta
from typer.testing import CliRunner

from redline.cli.flags import Argument, AtLeast1, Flag, verb
from redline.errors import ConfigError
from redline.messages.base import Record


def refuse_missing(path: Path) -> None:
    if path.name == "missing":
        raise ConfigError(f"{path}: no such folder")


class ServerFlags(Record, frozen=True):
    host: Annotated[str, Meta(description="Address."), Flag("--host", "-h", panel="Server")] = "localhost"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port."), Flag(envvar="THE_PORT")] = 8000


class CopyFlags(Record, frozen=True):
    source: Annotated[Path, Meta(description="From."), Argument(metavar="SRC", check=refuse_missing)]
    server: ServerFlags
    k: Annotated[tuple[AtLeast1, ...], Meta(description="Drafts."), Flag("--k")] = (1, 2)
    share: Annotated[Annotated[float, Meta(gt=0, lt=1)] | None, Meta(description="Share."), Flag(metavar="X")] = None
    dry_run: Annotated[bool, Meta(description="Do nothing.")] = False
    cache: Annotated[bool, Meta(description="Use it."), Flag("--cache/--no-cache")] = True
    mode: Annotated[Literal["fast", "slow"], Meta(description="How.")] = "fast"
    name: Annotated[Annotated[str, Meta(max_length=3)] | None, Meta(description="Name.")] = None


def run(*arguments: str, **variables: str) -> tuple[CopyFlags | None, int, str]:
    taken: list[CopyFlags] = []
    app = typer.Typer()

    @verb(app, "copy", CopyFlags)
    def copy(flags: CopyFlags) -> int:
        """Copy a thing."""
        taken.append(flags)
        return 3

    assert copy
    wide = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    done = CliRunner().invoke(app, arguments, env={**wide, **variables})
    return (taken or [None])[0], done.exit_code, done.output + str(done.exception or "")


def test_a_record_is_filled_from_the_command_line():
    given = run("a", "-h", "::", "--k", "3", "--k", "4", "--share", "0.5", "--dry-run", "--no-cache", "--mode", "slow")
    server = ServerFlags(host="::")
    assert given[0] == CopyFlags(
        source=Path("a"), server=server, k=(3, 4), share=0.5, dry_run=True, cache=False, mode="slow"
    )
    assert given[1] == 3


def test_flags_that_are_left_out_have_the_records_defaults():
    assert run("a")[0] == CopyFlags(source=Path("a"), server=ServerFlags())
    assert run("a", THE_PORT="7")[0] == CopyFlags(source=Path("a"), server=ServerFlags(port=7))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--port", "70000"), "Invalid value for '--port': 70000 is not in the range 0<=x<=65535"),
        (("--k", "2", "--k", "0"), "Invalid value for '--k': [2, 0] is not in the range x>=1"),
        (("--share", "1"), "Invalid value for '--share': 1.0 is not in the range 0<x<1"),
        (("--name", "long"), "Invalid value for '--name': 'long': Expected `str` of length <= 3"),
        (("--mode", "x"), "'x' is not one of 'fast', 'slow'"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_flag(arguments: tuple[str, ...], expected: str):
    taken, code, output = run("a", *arguments)
    assert (taken, code) == (None, 2)
    assert expected in output


def test_the_help_shows_descriptions_defaults_choices_and_bounds():
    shown = run("--help")[2]
    for text in ("Copy a thing.", "SRC", "X [0<x<1]", "[0<=x<=65535]", "default: 8000", "--no-cache", "Server", "slow"):
        assert text in shown
    assert "--no-dry-run" not in shown


def test_a_check_refuses_a_value_before_the_command_runs():
    taken, code, output = run("missing")
    assert (taken, code) == (None, 1)
    assert "missing: no such folder" in output
