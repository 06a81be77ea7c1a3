"""Resumable stages: a chain of steps, each with a stamp (a hash) of everything that its result depends on.

A stage's stamp is a hash over its name, its configuration, the contents of the external files that it reads, and the
stamps of the stages before it; not over paths, nor over settings that do not change the result (`idle`). It is written
to OUT/stamps/NAME.json before the stage runs, and again when it is done. A stage that is done with the same stamp is
skipped. A stage that was killed runs again and continues from its partial result (every verb can resume). So does a
stage of which only settings that extend its result have changed (`grows`). Any other stage with a changed stamp
starts over: its outputs are removed.

Before the first stage runs, the requirements of every unfinished stage are checked, so that hours of work are not lost
because the third stage needs a package that is not installed.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import msgspec
from rich.console import Console

from redline import clock
from redline.disk import save, written
from redline.errors import ConfigError
from redline.messages.base import Record, explained

STAMPS = "stamps"


class StageFunction(Protocol):
    """The function of a stage; every verb has one."""

    def __call__(self, config: Any, console: Console) -> int:
        """Does the stage's work; returns its status, 0 if it is complete. Raises ConfigError."""
        ...


@dataclass(frozen=True)
class RecipeStage:
    """One step of a chain.

    `makes`: the stage's own files and folders under OUT; they are removed if it starts over.
    """

    name: str
    config: Record
    run: StageFunction
    makes: tuple[Path, ...]
    reads: tuple[Path, ...] = ()  # external files, hashed by content
    facts: tuple[str, ...] = ()  # other inputs of the result, such as the target's fingerprint
    idle: tuple[str, ...] = ()  # keys of the configuration that do not change the result: paths, batches, devices
    grows: tuple[str, ...] = ()  # keys that only extend an existing result
    check: Callable[[Any], object] = lambda config: None
    """Called with the configuration before any stage runs; raises ConfigError if a requirement is missing."""


class _Stamp(Record, frozen=True):
    stamp: str
    done: bool
    ground: str = ""  # the stamp without the keys `grows`
    seconds: float = 0.0  # duration of the run that completed it


def run_stages(stages: Sequence[RecipeStage], out: Path, console: Console) -> int:
    """Runs the unfinished stages in order; returns 0, or the first nonzero status, which ends the run.

    out: the folder of all outputs. Raises ConfigError before any stage runs if a requirement is missing, and
    AssertionError if a stage returns 0 without having made its outputs.
    """
    with written(out):
        (out / STAMPS).mkdir(parents=True, exist_ok=True)
    stamps: list[tuple[str, str]] = []  # of each stage: without the keys `grows`, and complete
    for stage in stages:
        before = stamps[-1][1] if stamps else ""
        stamps.append((stamp_of(stage, before, stage.grows), stamp_of(stage, before)))
    for stage, (_, stamp) in zip(stages, stamps, strict=True):
        if not _is_done(stage, stamp, out):
            try:
                stage.check(stage.config)
            except ConfigError as error:
                raise ConfigError(f"stage {stage.name}: {error}") from None
    for number, (stage, (ground, stamp)) in enumerate(zip(stages, stamps, strict=True), 1):
        path = _stamp_file(stage, out)
        found = _read(path)
        title = f"{number}/{len(stages)} {stage.name}"
        if _is_done(stage, stamp, out):
            console.print(f"{title}: done", style="dim", markup=False, highlight=False)
            continue
        if found is None or found.stamp != stamp:
            if found is None or found.ground != ground:
                _empty(stage, out, console)
            save(path, msgspec.json.encode(_Stamp(stamp=stamp, done=False, ground=ground)))
        console.rule(title)
        began = clock.monotonic()
        status = stage.run(stage.config, console)
        if status:
            return status
        seconds = round(clock.monotonic() - began, 2)
        console.print(f"{title}: {seconds:,.0f} s", style="dim", markup=False, highlight=False)
        missing = [str(made) for made in stage.makes if not made.exists()]
        assert not missing, f"stage {stage.name} did not make {', '.join(missing)}"
        save(path, msgspec.json.encode(_Stamp(stamp=stamp, done=True, ground=ground, seconds=seconds)))
    return 0


def seconds_of(stage: RecipeStage, out: Path) -> float | None:
    """Duration of the run that completed the stage, loading included; None if it is not done."""
    found = _read(_stamp_file(stage, out))
    return found.seconds if found is not None and found.done else None


def _is_done(stage: RecipeStage, stamp: str, out: Path) -> bool:
    found = _read(_stamp_file(stage, out))
    return found is not None and found.done and found.stamp == stamp and all(made.exists() for made in stage.makes)


def _stamp_file(stage: RecipeStage, out: Path) -> Path:
    return out / STAMPS / f"{stage.name}.json"


def stamp_of(stage: RecipeStage, before: str, without: tuple[str, ...] = ()) -> str:
    """The stamp in hex, over all keys but those in `without` and the idle ones. before: the previous stage's stamp.

    Raises ConfigError if a file that the stage reads does not exist.
    """
    parts = blake2b(digest_size=16)
    for fact in (stage.name, before, *stage.facts):
        parts.update(_framed(fact.encode()))
    values = {key: value for key, value in msgspec.to_builtins(stage.config).items() if key not in stage.idle + without}
    parts.update(_framed(msgspec.json.encode(values, order="deterministic")))
    for path in stage.reads:
        try:
            with open(path, "rb") as file:
                content = blake2b(digest_size=16)
                while piece := file.read(1 << 20):
                    content.update(piece)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); stage {stage.name} needs it") from None
        parts.update(_framed(content.digest()))
    return parts.hexdigest()


def fill(kind: type[Record], place: str, table: Mapping[str, Any], paths: Mapping[str, Any]) -> Any:
    """A configuration from a recipe's table and the keys that the recipe sets itself (`paths`; no table may set them).

    place: "FILE: table", the prefix of messages. Raises ConfigError naming table.key.
    """
    known = set(kind.__struct_fields__)
    for key in table:
        if key in paths:
            raise ConfigError(f"{place}.{key}: set by the recipe itself; remove it")
        if key not in known:
            settable = ", ".join(sorted(known - set(paths)))
            raise ConfigError(f"{place}.{key}: no such key; expected one of {settable}")
    try:
        return msgspec.convert({**table, **paths}, kind)
    except msgspec.ValidationError as error:
        message, at = explained(error, kind)
        raise ConfigError(f"{place}{at}: {message}") from None


def _empty(stage: RecipeStage, out: Path, console: Console) -> None:
    """Removes the stage's outputs that were made with another stamp."""
    for made in stage.makes:
        if made.exists():
            console.print(
                f"{made}: made with other settings; starts over", style="yellow", highlight=False, markup=False
            )
        with written(made):
            _remove(made, out)


def _read(path: Path) -> _Stamp | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Stamp)
    except (OSError, msgspec.DecodeError):
        return None


def _remove(path: Path, out: Path) -> None:
    assert path.resolve().is_relative_to(out.resolve()), f"{path} is not in {out}"
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data
