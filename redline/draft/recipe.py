"""`redline draft run recipe.toml`: the whole training pipeline from one file, resumable; it ends in a servable folder.

    OUT/corpus.jsonl        synth       the target's answers to prompts
    OUT/capture             capture     the target's hidden states over them
    OUT/base                train       the base drafter
    OUT/mine                mine        its weak points; OUT/mine/mixed.jsonl: new answers and replay
    OUT/mine-capture        capture
    OUT/mined               train       the base drafter, trained further
    OUT/control-mine        control-mine: as mine, but prompts are chosen without regard to difficulty
    OUT/control             control-mine-capture, control: the base drafter, trained further for as long on these
    OUT/eval-base.json      eval-base   the base drafter in the engine
    OUT/eval-control.json   eval-control
    OUT/eval.json           eval        the mined drafter, or, without [mine], the base; an evaluation ends the run if
                                        the engine and the trainer disagree
    OUT/drafter             export      the better of the base and the mined drafter, for `redline serve --draft`

A recipe's tables have the keys of the verbs' configurations; keys that the recipe sets itself (folders, target) are not
allowed there. Without [mine] the base drafter is evaluated and exported; without [eval] the last drafter is exported.
`control = false` omits the control arm. recipe_example.toml, next to this module, is an example.
"""

import shlex
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from redline.disk import alone
from redline.draft import best, evaluate
from redline.draft.best import BASE, CONTROL, MINED, BestConfig
from redline.draft.corpus import capture, synth
from redline.draft.corpus.capture import CaptureConfig
from redline.draft.corpus.synth import INTERRUPTED, SynthConfig
from redline.draft.corpus.traces import trace_file
from redline.draft.evaluate import EvalConfig
from redline.draft.mine import mine
from redline.draft.mine.mine import MineConfig
from redline.draft.stages import RecipeStage, fill, run_stages
from redline.draft.train import train
from redline.draft.train.train import TrainConfig
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.model.k2.checkpoint import Checkpoint
from redline.worker.config import new_spelling

TABLES = ("synth", "capture", "train", "mine", "retrain", "eval")


class RunConfig(Record, frozen=True):
    """Settings of `redline draft run`."""

    recipe: str
    out: str | None = None  # overrides the recipe's
    device: str | None = None  # for every stage; overrides the recipe


class _Top(Record, frozen=True):
    target: str
    out: str | None = None
    device: str | None = None  # default for all stages: cpu or cuda; None: the GPU, if there is one
    corpus: tuple[str, ...] = ()  # an existing base set; excludes [synth]
    synth: dict[str, Any] | None = None
    stream: bool = False  # the trainer computes the states on demand; nothing is captured
    capture: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    train: dict[str, Any] | None = None
    mine: dict[str, Any] | None = None
    control: bool = True  # with [mine] and [eval]: whether to train a control drafter on prompts that were not mined
    retrain: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    eval: dict[str, Any] | None = None


TellStage = Callable[[str, int, float], object]
"""Callback after [synth] and after captures: the stage's name, its tokens, its seconds without loading."""


def run(
    config: RunConfig,
    console: Console,
    origin: Mapping[str, Any] | None = None,
    told: TellStage = lambda stage, tokens, seconds: None,
) -> int:
    """Runs a recipe. Returns 0 if the drafter is exported, 130 after Ctrl-C, else the status of the failed stage.

    origin: where and when the numbers were made; saved with them. Raises ConfigError.
    """
    stages, out = stages_of(
        Path(config.recipe), None if config.out is None else Path(config.out), origin, told, config.device
    )
    try:
        with alone(out):
            status = run_stages(stages, out, console)
    except KeyboardInterrupt:  # outside a stage's own work: a stage reports itself what it keeps
        console.print("stopped; run the same command to resume", highlight=False)
        return INTERRUPTED
    if not status:
        exported = stages[-1].config
        assert isinstance(exported, BestConfig), f"the last stage is {stages[-1].name}"
        console.print(
            f"redline serve {shlex.quote(exported.target)} --draft {shlex.quote(str(out / 'drafter'))}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    return status


def stages_of(
    path: Path,
    out: Path | None,
    origin: Mapping[str, Any] | None = None,
    told: TellStage = lambda stage, tokens, seconds: None,
    device: str | None = None,
) -> tuple[list[RecipeStage], Path]:
    """The stages of a recipe, and the folder of all their outputs.

    path: the recipe. out, device: override the recipe's. Raises ConfigError naming file and table.key, and
    CheckpointError if the target cannot be opened.
    """
    top = _read(path)
    if out is None:
        if top.out is None:
            raise ConfigError(f"{path}: out: missing; give the output folder here or with --out")
        out = path.resolve().parent / top.out
    else:
        out = out.resolve()
    recipe = _Recipe(path, top, out, told, device)
    if (top.synth is None) == (not top.corpus):
        raise ConfigError(f"{path}: expected [synth], or corpus = [files], and not both")
    if top.stream and top.capture:
        raise ConfigError(f"{path}: capture: not used with stream = true; remove one of them")
    if top.synth is not None:
        recipe.synth(top.synth)
    if top.train is None:
        raise ConfigError(f"{path}: [train]: missing; a budget at least: [train.recipe.budget] steps = 1000")
    recipe.base(top.train)
    if top.mine is not None and (kind := top.train.get("drafter", {}).get("kind", "eagle3")) != "eagle3":
        raise ConfigError(
            f"{path}: [mine]: scores EAGLE-3 drafters only, and train.drafter.kind is {kind!r}; remove one"
        )
    if top.mine is not None:
        recipe.mined(MINED, "mine", top.train, top.mine)
        if top.eval is not None and top.control and top.mine.get("choose") != "uniform":
            recipe.mined(CONTROL, "control-mine", top.train, {**top.mine, "choose": "uniform"})
    if top.eval is not None:
        recipe.measured(top.eval, origin)
    recipe.exported()
    return recipe.stages, recipe.out


class _Recipe:
    """The stages so far; each method adds some. `drafters`, `evaluations`: their folders and files, by arm."""

    def __init__(self, path: Path, top: _Top, out: Path, told: TellStage, device: str | None) -> None:
        self.stages: list[RecipeStage] = []
        self.out = out
        self._path, self._top, self._told = path, top, told
        self._here = path.resolve().parent
        self._target = str(self._here / top.target)
        self._facts = (Checkpoint.open(self._target).fingerprint,)
        self._somewhere = {} if top.device is None else {"device": top.device}
        self._forced = {} if device is None else {"device": device}
        self._corpus = tuple(str(self._here / name) for name in top.corpus)
        self._outside = tuple(map(Path, self._corpus))  # files of the corpus that no stage makes
        self._drafters: dict[str, str] = {}
        self._evaluations: dict[str, str] = {}

    def synth(self, given: Mapping[str, Any]) -> None:
        """Its output becomes the corpus. Raises ConfigError."""
        values, reads = _beside(self._here, given, ("prompts",))
        engine: Any = values.get("engine", {})
        if isinstance(engine, dict):
            for key, value in engine.items():
                now = new_spelling(key, value, "synth.engine")
                if now is not None:
                    raise ConfigError(f"{self._path}: synth.engine.{key}: no such key; it is {now} now")
            values["engine"] = {**self._somewhere, **engine, **self._forced}
        file = self.out / "corpus.jsonl"
        self._corpus = (str(file),)
        paths = {"weights": self._target, "out": str(file)}
        config = fill(SynthConfig, f"{self._path}: synth", values, paths)
        made = (file, self.out / "corpus.jsonl.about.json")
        work = partial(synth.run, told=partial(self._told, "synth"))
        idle = (*paths, "engine")
        self.stages.append(RecipeStage("synth", config, work, made, reads, self._facts, idle, ("count",), synth.check))

    def base(self, given: Mapping[str, Any]) -> None:
        source = self._captured("capture", self._corpus, self._outside)
        self._drafters[BASE] = self._trained("base", "train", given, source, None)

    def mined(self, name: str, stage: str, train: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Adds the stages that mine prompts for the base drafter and train it on them."""
        values, reads = _beside(self._here, given, ("traces",), lambda name: trace_file(name)[1])
        folder, base = self.out / stage, self._drafters[BASE]
        paths = {"target": self._target, "draft": base, "corpus": self._corpus, "out": str(folder)}
        config = self._table("mine", MineConfig, values, paths)
        idle = (*paths, "device", "batch")
        self.stages.append(RecipeStage(stage, config, mine.run, (folder,), reads, idle=idle, check=mine.check))
        source = self._captured(f"{stage}-capture", (str(folder / "mixed.jsonl"),), ())
        self._drafters[name] = self._trained(name, "retrain", _merged(train, self._top.retrain), source, base)

    def measured(self, given: Mapping[str, Any], origin: Mapping[str, Any] | None) -> None:
        """Adds an evaluation of every drafter."""

        def evaluated(config: EvalConfig, console: Console) -> int:
            return evaluate.run(config, console, origin)

        last = MINED if MINED in self._drafters else BASE
        for name, drafter in self._drafters.items():
            stage = "eval" if name == last else f"eval-{name}"
            values, reads = _beside(self._here, given, ("prompts", "corpus"))
            save = self.out / f"{stage}.json"
            self._evaluations[name] = str(save)
            paths = {"target": self._target, "draft": drafter, "save": str(save)}
            config = self._table("eval", EvalConfig, values, paths)
            # The batch size is not idle: a step with more rows has less room for drafts, and rounds with fewer are
            # shorter.
            idle = (*paths, "device")
            self.stages.append(RecipeStage(stage, config, evaluated, (save,), reads, idle=idle, check=evaluate.check))

    def exported(self) -> None:
        final = self.out / "drafter"
        config = BestConfig(target=self._target, out=str(final), drafters=self._drafters, evaluations=self._evaluations)
        self.stages.append(RecipeStage("export", config, best.run, (final,), idle=config.__struct_fields__))

    def _table(self, name: str, kind: type[Record], given: Mapping[str, Any], paths: Mapping[str, Any]) -> Any:
        return fill(kind, f"{self._path}: {name}", {**self._somewhere, **given, **self._forced}, paths)

    def _captured(self, name: str, corpus: tuple[str, ...], reads: tuple[Path, ...]) -> dict[str, Any]:
        """The trainer's source: a capture or, with `stream`, the corpus itself."""
        if self._top.stream:
            return {"capture": None, "corpus": corpus}
        folder = self.out / name
        paths = {"target": self._target, "corpus": corpus, "out": str(folder)}
        config = self._table("capture", CaptureConfig, self._top.capture, paths)
        idle = (*paths, "device", "shard_bytes")
        work = partial(capture.run, told=partial(self._told, name))
        self.stages.append(
            RecipeStage(name, config, work, (folder,), reads, self._facts, idle, ("disk",), capture.check)
        )
        return {"capture": str(folder), "corpus": ()}

    def _trained(
        self, name: str, title: str, values: Mapping[str, Any], source: Mapping[str, Any], start: str | None
    ) -> str:
        """-> the drafter's folder."""
        folder = self.out / name
        paths = {"target": self._target, "out": str(folder), **source}
        if start is not None:
            paths["start"] = start
        config, reads = self._table(title, TrainConfig, values, paths), self._outside if self._top.stream else ()
        idle = (*paths, "device")
        self.stages.append(RecipeStage(name, config, train.run, (folder,), reads, self._facts, idle, check=train.check))
        return str(folder)


def read_train(path: Path | None, flags: Mapping[str, Any]) -> TrainConfig:
    """A training configuration from a TOML file (a recipe's [train], or only its keys) and flags, which override it.

    flags: dotted keys, such as recipe.budget.steps. Raises ConfigError naming file and key.
    """
    values: dict[str, Any] = {} if path is None else _toml(path)
    if isinstance(values.get("train"), dict):
        values = values["train"]
    for key, value in flags.items():
        *tables, last = key.split(".")
        place = values
        for name in tables:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{path}: {name}: expected a table")
        place[last] = value
    place = values
    for name in ("recipe", "budget"):
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{path}: {name}: expected a table")
    return fill(TrainConfig, str(path) if path is not None else "train", values, {})


def mine_config(values: Mapping[str, Any]) -> MineConfig:
    """The configuration of `mine` from its keys. Raises ConfigError with the wrong key."""
    return fill(MineConfig, "mine", values, {})


def eval_config(values: Mapping[str, Any]) -> EvalConfig:
    """The configuration of `eval` from its keys. Raises ConfigError with the wrong key."""
    return fill(EvalConfig, "eval", values, {})


def _read(path: Path) -> _Top:
    values = _toml(path)
    unknown = sorted(set(values) - set(_Top.__struct_fields__))
    if unknown:
        raise ConfigError(f"{path}: {unknown[0]}: no such key; expected {', '.join(_Top.__struct_fields__)}")
    try:
        return msgspec.convert(values, _Top)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$.")
        raise ConfigError(f"{path}: {at.rstrip('`') or 'recipe'}: {message}") from None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None


def _beside(
    here: Path, table: Mapping[str, Any], keys: tuple[str, ...], file: Callable[[str], Path] = Path
) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """The table with the paths under `keys` resolved relative to the recipe's folder, and the list of those paths.

    file: extracts the path from a value, which may have a prefix.
    """

    def whole(name: str) -> str:
        path = str(file(name))
        return name.removesuffix(path) + str(here / path)

    values, paths = dict(table), list[Path]()
    for key in keys:
        given = values.get(key)
        if isinstance(given, str):
            values[key] = whole(given)
            paths.append(here / file(given))
        elif isinstance(given, list):
            names = [name for name in given if isinstance(name, str)]
            values[key] = list(map(whole, names))
            paths += [here / file(name) for name in names]
    return values, tuple(paths)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The second mapping's values override the first's, table by table."""
    merged = dict(first)
    for key, value in second.items():
        before = merged.get(key)
        merged[key] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged
