"""A training learns, stops, resumes bit for bit, and leaves a drafter's folder; a mistake is reported in one line."""

import errno
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from redline.draft.extra import needs
from redline.draft.train import train_state
from redline.draft.train.batches import is_held_out
from redline.draft.train.budget import Reached, TrainBudget, rate
from redline.draft.train.curve import write_curve
from redline.draft.train.train import DrafterSizes, Journal, TrainConfig, check, open_source, run, train
from redline.draft.train.trainer import Recipe, Trainer
from redline.errors import ConfigError
from redline.model.eagle3.module import Eagle3
from redline.model.k2.checkpoint import Checkpoint
from tests.draft.train.captured import Captured, Given, sequences, target_config, target_folder

LAYERS = (0, 2, 3)
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"))


def source(target: Path, *lengths: int) -> Given:
    head = Checkpoint.open(target).plain("lm_head.weight")
    return Given(sequences(head, lengths or (20, 28, 40, 33, 25, 37) * 8))


def config_of(target: Path, out: Path, steps: int, **recipe: Any) -> TrainConfig:
    values = {"tokens_per_batch": 256, "max_length": 48, "steps_ahead": 2, "pool": 3, "held_out": 0.1, "lr": 3e-3}
    values |= {"log_every": 2, "measure_every": 4, "keep_every": 3, "accumulate": 2}
    budget = TrainBudget(steps=steps)
    return TrainConfig(
        target=str(target), out=str(out), capture="unread", recipe=Recipe(budget=budget, **values | recipe)
    )


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths of curves, which are not drawn: drawing takes longer than these trainings."""
    drawn: list[Path] = []
    monkeypatch.setattr("redline.draft.train.train.write_curve", lambda path, log: drawn.append(path))
    return drawn


def state_of(out: Path) -> tuple[train_state.Facts, dict[str, torch.Tensor]]:
    state = train_state.latest(out / "training")
    assert state is not None
    return train_state.load(state)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def test_a_training_that_was_killed_goes_on_bit_for_bit(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Six steps, and three, a kill, and three: weights, averages, moments, order of the data, random numbers."""
    given = source(target)
    monkeypatch.setattr(train_state, "remove", lambda path: None)  # keeps the last state for the comparison
    assert train(config_of(target, tmp_path / "whole", 6), given, LAYERS, QUIET) == 0
    expected_draw = torch.rand(1)
    step = Trainer._step

    def killed(self: Trainer, group: Any) -> Any:
        if self.step == 4:
            raise SystemExit
        return step(self, group)

    monkeypatch.setattr(Trainer, "_step", killed)
    with pytest.raises(SystemExit):
        train(config_of(target, tmp_path / "killed", 6), given, LAYERS, QUIET)
    monkeypatch.setattr(Trainer, "_step", step)
    facts, _ = state_of(tmp_path / "killed")
    assert facts.step == 3
    torch.rand(5)
    assert train(config_of(target, tmp_path / "killed", 6), given, LAYERS, QUIET) == 0
    assert torch.equal(torch.rand(1), expected_draw)
    (whole, tensors), (resumed, again) = state_of(tmp_path / "whole"), state_of(tmp_path / "killed")
    assert (whole.step, whole.drawn, whole.tokens) == (resumed.step, resumed.drawn, resumed.tokens)
    assert tensors.keys() == again.keys()
    assert {"model", "ema", "exp_avg", "exp_avg_sq", "random"} == {name.partition(".")[0] for name in tensors}
    assert not [name for name in tensors if not torch.equal(tensors[name], again[name])]
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "killed")[name])
    logs = [(tmp_path / out / "training" / "log.jsonl").read_text().splitlines() for out in ("whole", "killed")]
    timed = {"seconds", "tokens_per_s"}
    told = [[{k: v for k, v in json.loads(line).items() if k not in timed} for line in log] for log in logs]
    assert told[0] == told[1]


def test_a_training_learns_and_leaves_a_drafters_folder(target: Path, tmp_path: Path, pictures: list[Path]):
    config = config_of(target, tmp_path, 60, accumulate=1, log_every=10, measure_every=100, lr=1e-2, ema=0.9)
    assert train(config, source(target), LAYERS, QUIET) == 0
    log = [json.loads(line) for line in (tmp_path / "training" / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    drafter = Eagle3.open(tmp_path, target_config())
    assert drafter.config.layer_ids == LAYERS
    assert {"log.jsonl", "config.json", "result.json"} == {path.name for path in (tmp_path / "training").iterdir()}
    assert pictures == [tmp_path / "training" / "loss.png"]
    write_curve(pictures[0], log)
    assert pictures[0].stat().st_size > 10_000
    result = json.loads((tmp_path / "training" / "result.json").read_text())
    assert result["held_out"]["length"] > 1.3
    assert result["domains"].keys() <= {"numbers", "words"}
    assert train(config, Given([]), LAYERS, QUIET) == 0, "a finished training is not repeated"
    other = msgspec.structs.replace(config, recipe=msgspec.structs.replace(config.recipe, lr=1.0))
    with pytest.raises(ConfigError, match=r"recipe\.lr 0\.01, not 1\.0"):
        train(other, Given([]), LAYERS, QUIET)


def test_a_budget_of_tokens_counts_those_of_sequences_and_ends_the_training_that_has_spent_it(
    target: Path, tmp_path: Path
):
    given = source(target, 20, 30, 40)
    config = config_of(target, tmp_path, 40, held_out=0.0, pool=1, log_every=1, accumulate=1, tokens_per_batch=90)
    budget = TrainBudget(steps=40, tokens=200)
    config = msgspec.structs.replace(config, recipe=msgspec.structs.replace(config.recipe, budget=budget))
    assert train(config, given, LAYERS, QUIET) == 0
    log = [json.loads(line) for line in (tmp_path / "training" / "log.jsonl").read_text().splitlines()]
    tokens = sorted({line["tokens"] for line in log})
    assert tokens[-1] >= 200 > tokens[-2]
    assert all(90 * epoch in tokens for epoch in range(1, tokens[-1] // 90 + 1)), "an epoch is 90 tokens"


def test_what_is_saved_is_the_average_in_bf16(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train_state, "remove", lambda path: None)
    train(config_of(target, tmp_path, 3), source(target), LAYERS, QUIET)
    _, tensors = state_of(tmp_path)
    for name, tensor in weights(tmp_path).items():
        assert torch.equal(tensor, tensors[f"ema.{name}"].bfloat16())
        assert not torch.equal(tensors[f"ema.{name}"], tensors[f"model.{name}"])


def test_a_drafter_may_begin_where_another_ended_and_is_held_near_it(target: Path, tmp_path: Path):
    train(config_of(target, tmp_path / "first", 4), source(target), LAYERS, QUIET)
    first = weights(tmp_path / "first")
    moved: list[float] = []
    for l2_sp in (0.0, 100.0):
        out = tmp_path / f"second {l2_sp}"
        config = msgspec.structs.replace(
            config_of(target, out, 8, l2_sp=l2_sp, clip=1e9), start=str(tmp_path / "first")
        )
        train(config, source(target), LAYERS, QUIET)
        moved.append(sum(float((weights(out)[name] - first[name]).float().norm()) for name in first))
    assert moved[1] < 0.5 * moved[0]


def test_a_narrow_latent_is_written_as_wide_as_the_targets(target: Path, tmp_path: Path):
    config = msgspec.structs.replace(config_of(target, tmp_path, 2), drafter=DrafterSizes(kv_lora_rank=8))
    assert train(config, source(target), LAYERS, QUIET) == 0
    wide = target_config().kv_lora_rank
    assert json.loads((tmp_path / "config.json").read_text())["kv_lora_rank"] == wide == 32
    rows = weights(tmp_path)["layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    used = rows.any(1).tolist()
    assert used == [True] * 8 + [False] * 24 + [True] * target_config().qk_rope_head_dim


@pytest.mark.parametrize("loss", ["kl", "lk"])
def test_a_reduced_vocabulary_is_the_most_frequent_tokens_of_answers(target: Path, tmp_path: Path, loss: Any):
    config = config_of(target, tmp_path, 2, loss=loss, focus=1.0)
    config = msgspec.structs.replace(config, drafter=DrafterSizes(architecture="llama", draft_vocab_size=40))
    given = source(target)
    train(config, given, LAYERS, QUIET)
    drafter = Eagle3.open(tmp_path, target_config())
    ids = drafter.token_ids()
    assert ids is not None
    counts = torch.zeros(64, dtype=torch.int64)
    for one in given.items:
        if not is_held_out(one.id, 0.1):
            counts += torch.bincount(one.tokens[one.loss], minlength=64)
    left = torch.ones(64, dtype=torch.bool).index_fill(0, ids, False)
    assert counts[ids].min() >= counts[left].max()


def test_ctrl_c_keeps_the_state_and_says_so(target: Path, tmp_path: Path):
    class Interrupting(Given):
        def sequences(self, epoch: int, seed: int, rank: int = 0, world: int = 1) -> Iterator[Captured]:
            if epoch == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return super().sequences(epoch, seed, rank, world)

    before = signal.getsignal(signal.SIGINT)
    items = source(target).items
    assert train(config_of(target, tmp_path, 500), Interrupting(items), LAYERS, QUIET) == 130
    facts, _ = state_of(tmp_path)
    assert 0 < facts.step < 500
    assert signal.getsignal(signal.SIGINT) is before
    assert "batches" not in {thread.name for thread in threading.enumerate()}, (
        "the thread that collates batches has ended"
    )


def test_a_full_disk_keeps_the_last_state_and_says_what_to_do(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given, save = source(target), train_state.save_file

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if (tmp_path / "training" / "step-3").exists():
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path)

    monkeypatch.setattr(train_state, "save_file", full)
    with pytest.raises(ConfigError, match=r"no space left.*make room and run again; training resumes from step 3"):
        train(config_of(target, tmp_path, 9), given, LAYERS, QUIET)
    assert {path.name for path in (tmp_path / "training").iterdir()} == {"step-3", "log.jsonl", "config.json"}
    monkeypatch.setattr(train_state, "save_file", save)
    assert train(config_of(target, tmp_path, 9), given, LAYERS, QUIET) == 0


def test_a_damaged_state_is_named(tmp_path: Path):
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"step-3: damaged"):
        train_state.load(tmp_path / "step-3")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"budget": TrainBudget()}, "recipe.budget is empty"),
        ({"budget": TrainBudget(seconds=-1.0)}, "recipe.budget.seconds is -1.0"),
        ({"lr": 0.0}, "recipe.lr is 0.0"),
        ({"held_out": 1.0}, "recipe.held_out is 1.0"),
        ({"tokens_per_batch": 10}, "recipe.tokens_per_batch is 10"),
        ({"focus": -1.0}, "recipe.focus is -1.0"),
        ({"lr": math.nan}, "recipe.lr is nan"),
        ({"budget": TrainBudget(seconds=math.inf)}, "recipe.budget.seconds is inf"),
        ({"l2_sp": math.nan}, "recipe.l2_sp is nan"),
        ({"betas": (0.9, 1.0)}, r"recipe.betas is \[0.9, 1.0\]"),
        ({"seed": -1}, "recipe.seed is -1"),
    ],
)
def test_a_wrong_field_is_named(recipe: dict[str, Any], message: str):
    good = {"budget": TrainBudget(steps=1)}
    with pytest.raises(ConfigError, match=message):
        check(TrainConfig(target="t", out="o", capture="c", recipe=Recipe(**good | recipe)))


@pytest.mark.parametrize("sizes", [{"intermediate_size": 0}, {"draft_vocab_size": -1}, {"draft_vocab_size": 65}])
def test_a_size_that_no_drafter_of_this_target_has_is_named(target: Path, sizes: dict[str, int]):
    (key,) = sizes
    good = TrainConfig(target=str(target), out="o", capture="c", recipe=Recipe(budget=TrainBudget(steps=1)))
    check(good)
    with pytest.raises(ConfigError, match=f"drafter.{key} is {sizes[key]}"):
        check(msgspec.structs.replace(good, drafter=DrafterSizes(**sizes)))


def test_training_does_not_begin_where_its_state_has_no_room(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_000))
    with pytest.raises(ConfigError, match=r"the states of this training take .* and 10 kB are free"):
        train(config_of(target, tmp_path, 3), source(target), LAYERS, QUIET)


def test_a_log_that_is_damaged_costs_its_damaged_lines(tmp_path: Path):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe\n[1]\n{"loss": 2}\n{"step": "3"}\n{"step": 2}\n{"ste')
    assert Journal(tmp_path, 9, main=True).lines == [{"step": 1}, {"step": 2}]


def test_a_folder_that_somebody_has_renamed_is_no_state(tmp_path: Path):
    for name in ("step-3", "step-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").touch()
    assert train_state.latest(tmp_path) == tmp_path / "step-3"


def test_ctrl_c_before_the_first_step_is_one_line(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("redline.draft.train.train.open_source", interrupt)
    screen = io.StringIO()
    assert run(config_of(target, tmp_path, 3), Console(file=screen)) == 130
    assert screen.getvalue() == "stopped; the same command starts over\n"


def test_one_source_is_named_and_no_more():
    for places in ({}, {"capture": "a", "corpus": ("b",)}):
        with pytest.raises(ConfigError, match="expected exactly one of `capture`"):
            check(TrainConfig(target="t", out="o", recipe=Recipe(budget=TrainBudget(steps=1)), **places))


def test_what_is_not_installed_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("redline.draft.extra.find_spec", lambda name: None if name == "accelerate" else name)
    command = re.escape(f"{sys.executable} -m pip install 'redline[draft]'")
    with pytest.raises(ConfigError, match=f"^accelerate is not installed: {command}$"):
        run(TrainConfig(target="t", out="o", recipe=Recipe(budget=TrainBudget(steps=1))), QUIET)
    needs("matplotlib")


def test_a_capture_without_answers_is_no_endless_loop(target: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="no sequence with an answer"):
        train(config_of(target, tmp_path, 3), Given([]), LAYERS, QUIET)


def test_the_rate_rises_over_the_warm_up_and_falls_to_nothing_with_the_first_budget_that_is_spent():
    assert [rate(x, 0.1) for x in (0.0, 0.05, 0.1, 1.0)] == pytest.approx([0, 0.5, 1, 0])
    assert rate(0.55, 0.1) == pytest.approx(0.5)
    reached = Reached().next(10, 1000, 5.0)
    assert reached.share(10, TrainBudget(steps=40, tokens=2000)) == 0.5
    assert reached.share(12, TrainBudget(tokens=2000)) == 0.6, "between synchronisations the last value is used"
    assert reached.share(20, TrainBudget(seconds=10.0)) == 1.0


def test_a_folder_that_holds_another_training_is_refused(target: Path, tmp_path: Path):
    first = config_of(target, tmp_path / "d", 1)
    assert train(first, source(target), LAYERS, QUIET) == 0
    moved = msgspec.structs.replace(first, capture="elsewhere/unread")
    assert train(moved, source(target), LAYERS, QUIET) == 0
    for changes, says in (
        ({"capture": "another"}, "capture 'unread', not 'another'"),
        ({"start": "d0"}, "start None, not 'd0'"),
        ({"recipe": config_of(target, tmp_path, 2).recipe}, r"recipe\.budget\.steps 1, not 2"),
    ):
        with pytest.raises(ConfigError, match=says):
            train(msgspec.structs.replace(first, **changes), source(target), LAYERS, QUIET)


def test_lines_that_are_no_example_are_named_when_the_target_runs_beside(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "redline.draft.corpus.target.TargetModel.open", lambda *given: SimpleNamespace(fingerprint="f", layer_ids=())
    )
    monkeypatch.setattr(
        "redline.draft.corpus.capture.StreamedCapture", lambda target, examples: SimpleNamespace(skipped=["x: far"])
    )
    corpus, screen = tmp_path / "corpus.jsonl", io.StringIO()
    corpus.write_text("nothing\n")
    config = msgspec.structs.replace(config_of(target, tmp_path, 1), capture=None, corpus=(str(corpus),))
    open_source(config, Console(file=screen, width=500))
    assert f"skipped: {corpus}, line 1: JSON is malformed" in screen.getvalue()
    assert "skipped: x: far" in screen.getvalue()


@pytest.mark.parametrize(("compiled", "step", "goes_on"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_a_compiler_that_fails_is_done_without_and_no_other_mistake_is_passed_over(
    compiled: bool, step: int, goes_on: bool
):
    def once(group: list[str]) -> str:
        if trainee.figures is not None or not compiled:
            raise RuntimeError("no compiler")
        return f"step of {group}"

    trainee = SimpleNamespace(figures="compiled" if compiled else None)
    optimizer = SimpleNamespace(zero_grad=lambda: None)
    trainer: Any = SimpleNamespace(_step=once, step=step, why="eager", _trainee=trainee, _optimizer=optimizer)
    if goes_on:
        assert Trainer._first_or_next(trainer, ["batch"]) == "step of ['batch']"
        assert "not compiled: RuntimeError" in trainer.why
    else:
        with pytest.raises(RuntimeError, match="no compiler"):
            Trainer._first_or_next(trainer, ["batch"])
