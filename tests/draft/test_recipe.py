"""The pipeline from one file: stages run once, in order, and mistakes in a recipe are reported with their place."""

import errno
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from lab.draft_run import accepted, took
from redline.draft import evaluate
from redline.draft import recipe as module
from redline.draft.mine.mine import MineConfig
from redline.draft.recipe import RunConfig, read_train, run, stages_of
from redline.draft.stages import RecipeStage, fill, run_stages, seconds_of, stamp_of
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.model.eagle3.module import Eagle3
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.write import random_checkpoint
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer

EXAMPLE = Path(module.__file__).with_name("recipe_example.toml")
QUIET = Console(file=io.StringIO())


class Cook(Record, frozen=True):
    out: str
    salt: int = 0
    spoon: int = 0
    guests: int = 0


# ---------------------------------------------------------------------------------------------------------- stages


@pytest.fixture
def kitchen(tmp_path: Path) -> tuple[Callable[..., int], list[str]]:
    """Two stages, the second after the first; and the list of stages run, in order."""
    ran: list[str] = []

    def cook(config: Cook, console: Console) -> int:
        place = Path(config.out)
        ran.append(f"{place.name} {'again' if place.exists() else 'new'}")
        place.write_text("done")
        return 7 if config.salt == 13 else 0

    def serve(first: int = 0, second: int = 0, **soup: int) -> int:
        stages = [
            RecipeStage(
                name,
                Cook(out=str(tmp_path / name), salt=salt, **more),
                cook,
                (tmp_path / name,),
                (tmp_path / "shop",),
                idle=("out", "spoon"),
                grows=("guests",),
            )
            for name, salt, more in (("soup", first, soup), ("cake", second, {}))
        ]
        return run_stages(stages, tmp_path, QUIET)

    (tmp_path / "shop").write_text("flour")
    return serve, ran


def test_what_is_done_is_not_done_again(kitchen: tuple[Callable[..., int], list[str]]):
    serve, ran = kitchen
    assert serve() == serve() == 0
    assert ran == ["soup new", "cake new"]


def test_a_changed_stage_and_all_behind_it_begin_from_nothing(kitchen: tuple[Callable[..., int], list[str]]):
    serve, ran = kitchen
    serve()
    serve(second=1)
    assert ran[2:] == ["cake new"]
    serve(first=1, second=1)
    assert ran[3:] == ["soup new", "cake new"]


def test_what_changes_no_result_is_no_reason_to_begin_again(kitchen: tuple[Callable[..., int], list[str]]):
    serve, ran = kitchen
    serve()
    serve(spoon=1)
    assert ran == ["soup new", "cake new"]


def test_more_of_the_same_is_added_and_what_follows_begins_again(kitchen: tuple[Callable[..., int], list[str]]):
    serve, ran = kitchen
    serve()
    serve(guests=1)
    assert ran[2:] == ["soup again", "cake new"]


def test_a_stage_that_failed_goes_on_where_it_was(kitchen: tuple[Callable[..., int], list[str]]):
    serve, ran = kitchen
    assert serve(second=13) == 7
    assert serve(second=13) == 7
    assert ran == ["soup new", "cake new", "cake again"]


def test_a_file_from_outside_counts_by_its_content(kitchen: tuple[Callable[..., int], list[str]], tmp_path: Path):
    serve, ran = kitchen
    serve()
    (tmp_path / "shop").write_text("sugar")
    serve()
    assert ran[2:] == ["soup new", "cake new"]


def test_what_somebody_has_removed_is_made_again(kitchen: tuple[Callable[..., int], list[str]], tmp_path: Path):
    serve, ran = kitchen
    serve()
    (tmp_path / "cake").unlink()
    serve()
    assert ran[2:] == ["cake new"]


# -------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"budgett": 1}, r"r\.toml: mine\.budgett: no such key; expected one of answers, "),
        ({"budget": "much"}, r"r\.toml: mine\.budget: Expected `int`, got `str`"),
        ({"traffic": {"code": "all"}}, r"r\.toml: mine\.traffic.*Expected `float`"),
        ({"out": "x"}, r"r\.toml: mine\.out: set by the recipe itself"),
        ({"choose": "luck"}, r"r\.toml: mine\.choose: Invalid enum value 'luck'; expected 'gap' or 'uniform'"),
    ],
)
def test_a_wrong_key_is_named_with_its_table(table: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        fill(MineConfig, "r.toml: mine", table, {"target": "t", "draft": "d", "out": "o", "corpus": ("c",)})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe") / "tiny"
    random_checkpoint(folder, kernel_config(vocab_size=TINY_VOCAB))
    return write_tiny_tokenizer(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[mine]", "target"),
        ('target = "{}"\nsinth = 1', "sinth: no such key"),
        ('target = "{}"\nsynth = 1', "synth: Expected `object"),
        ('target = "{}"\n[synth]\ncount = 1', "out: missing; give the output folder"),
        ('target = "{}"\nout = "o"', r"expected \[synth\], or corpus"),
        ('target = "{}"\nout = "o"\n[synth]\ncuont = 1', r"synth\.cuont: no such key"),
        ('target = "{}"\nout = "o"\n[synth]\ncount = 1', r"\[train\]: missing"),
        (
            'target = "{}"\nout = "o"\n[synth.engine]\ndraft = "suffix"',
            r'synth\.engine\.draft: no such key; it is \[synth\.engine\.speculation\] type = "suffix" now',
        ),
        (
            'target = "{}"\nout = "o"\n[synth.engine.speculation]\ntokens = 3',
            r"synth\.engine\.speculation: Object missing required field `type`",
        ),
        ('target = "{}"\nout = "o"\n[synth]\n[train.recipe]\nlr = "fast"', r"train\.recipe\.lr: Expected `float`"),
        ("target =", "not a TOML file"),
    ],
)
def test_a_recipe_that_is_wrong_is_one_line(tiny: Path, tmp_path: Path, text: str, says: str):
    path = tmp_path / "r.toml"
    path.write_text(text.replace("{}", str(tiny)))
    with pytest.raises(ConfigError, match=says) as error:
        stages_of(path, None)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_recipes_device_is_that_of_every_stage_that_names_none_and_a_flag_wins(tiny: Path, tmp_path: Path):
    path = tmp_path / "r.toml"
    path.write_text(
        f'target = "{tiny}"\nout = "o"\ndevice = "cuda"\n[synth]\ncount = 1\n[capture]\ndevice = "cpu"\n'
        "[train.recipe.budget]\nsteps = 1\n[mine]\n[eval]\n"
    )

    def devices(flag: str | None) -> dict[str, str | None]:
        stages, _ = stages_of(path, None, device=flag)
        configs = {stage.name: stage.config for stage in stages if stage.name != "export"}
        return {name: getattr(config, "engine", config).device for name, config in configs.items()}

    both = dict.fromkeys(("capture", "mine-capture", "control-mine-capture"), "cpu")
    names = ("synth", "base", "mine", "mined", "control-mine", "control", "eval-base", "eval", "eval-control")
    others = dict.fromkeys(names, "cuda")
    assert devices(None) == others | both
    assert devices("cpu") == dict.fromkeys(others | both, "cpu")


@pytest.mark.parametrize("path", [EXAMPLE, *sorted(Path("models/kimi-nano-eagle3").glob("*.toml"))], ids=str)
def test_a_recipe_that_is_shipped_is_one_of_every_stage(path: Path):
    assert [stage.name for stage in stages_of(path, None)[0]] == [
        *(
            "synth",
            "capture",
            "base",
            "mine",
            "mine-capture",
            "mined",
            "control-mine",
            "control-mine-capture",
            "control",
        ),
        *("eval-base", "eval", "eval-control", "export"),
    ]


def test_the_example_mines_for_the_drafter_that_it_has_trained():
    stages, _ = stages_of(EXAMPLE, None)
    base, mined = (stage.config for stage in stages if stage.name in ("base", "mined"))
    assert mined.start == base.out
    assert (mined.recipe.lr, mined.recipe.budget.tokens, mined.recipe.steps_ahead) == (1e-4, 5_000_000, 5)


def test_a_recipe_may_be_moved_and_called_from_anywhere(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = (
        f'target = "{tiny}"\nout = "o"\n[synth]\ndomains = ["code"]\n[train.recipe.budget]\nsteps = 1\n[mine]\n[eval]\n'
    )

    def stamps(path: Path) -> list[str]:
        found = [""]
        for stage in stages_of(path, None)[0]:
            found.append(stamp_of(stage, found[-1]))
        return found

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "r.toml").write_text(text)
    monkeypatch.chdir(tmp_path / "one")
    assert stamps(Path("r.toml")) == stamps(tmp_path / "two" / "r.toml")


def test_a_recipe_that_streams_captures_nothing(tiny: Path, tmp_path: Path):
    path = tmp_path / "r.toml"
    text = (
        f'target = "{tiny}"\nout = "o"\nstream = true\n[synth]\ncount = 1\n[train.recipe.budget]\nsteps = 1\n[mine]\n'
    )
    path.write_text(text)
    stages, out = stages_of(path, None)
    assert [stage.name for stage in stages] == ["synth", "base", "mine", "mined", "export"]
    base, mined = (stage.config for stage in stages if stage.name in ("base", "mined"))
    assert (base.capture, base.corpus) == (None, (str(out / "corpus.jsonl"),))
    assert mined.corpus == (str(out / "mine" / "mixed.jsonl"),)
    path.write_text(text + "[capture]\nmax_tokens = 9\n")
    with pytest.raises(ConfigError, match="capture: not used with stream = true"):
        stages_of(path, None)


def test_traces_of_a_recipe_lie_beside_it_and_may_name_their_domain(tiny: Path, tmp_path: Path):
    path = tmp_path / "r.toml"
    path.write_text(
        f'target = "{tiny}"\nout = "o"\n[synth]\ncount = 1\n[train.recipe.budget]\nsteps = 1\n'
        '[mine]\ntraces = ["code=a.jsonl", "b.jsonl"]\n'
    )
    (mined,) = (stage for stage in stages_of(path, None)[0] if stage.name == "mine")
    assert mined.config.traces == (f"code={tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl")
    assert mined.reads == (tmp_path / "a.jsonl", tmp_path / "b.jsonl")


def test_training_reads_its_table_from_a_whole_recipe(tmp_path: Path):
    path = tmp_path / "r.toml"
    path.write_text("target = 't'\n[synth]\n[train.recipe]\nlr = 5e-4\n[train.recipe.budget]\nsteps = 3\n")
    config = read_train(path, {"target": "t", "out": "o", "capture": "c"})
    assert (config.recipe.lr, config.recipe.budget.steps) == (5e-4, 3)


def test_retrain_is_merged_over_train_table_by_table(tiny: Path, tmp_path: Path):
    path = tmp_path / "r.toml"
    begin = f'target = "{tiny}"\nout = "o"\n[synth]\ncount = 1\n'
    begin += "[train.recipe]\nlr = 0.5\nbudget.steps = 9\n[mine]\n"
    path.write_text(f"{begin}[retrain]\nrecipe.budget.steps = 1\ndrafter.draft_vocab_size = 40\n")
    (mined,) = (stage.config for stage in stages_of(path, None)[0] if stage.name == "mined")
    assert (mined.recipe.lr, mined.recipe.budget.steps, mined.drafter.draft_vocab_size) == (0.5, 1, 40)
    path.write_text(f"{begin}[retrain]\nrecipe = 7\n")
    with pytest.raises(ConfigError, match=r"retrain\.recipe: Expected `object`, got `int`"):
        stages_of(path, None)


def test_flags_win_over_the_file_in_training(tmp_path: Path):
    path = tmp_path / "train.toml"
    path.write_text("[recipe]\nlr = 1e-3\nema = 0.5\n[recipe.budget]\nsteps = 3\n")
    config = read_train(path, {"target": "t", "out": "o", "capture": "c", "recipe.lr": 2e-3})
    assert (config.recipe.lr, config.recipe.ema, config.recipe.budget.steps) == (2e-3, 0.5, 3)
    with pytest.raises(ConfigError, match=r"train\.toml\.recipe\.lr"):
        read_train(path, {"target": "t", "out": "o", "recipe.lr": "fast"})


# ------------------------------------------------------------------------------------------------------------- all


def factory(tiny: Path, tmp_path: Path) -> RunConfig:
    """A recipe of every stage."""
    lines = [{"id": f"{i}", "domain": "ab"[i % 2], "messages": [{"role": "user", "content": f"{i}"}]} for i in range(8)]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "r.toml").write_text(f"""
        target = "{tiny}"
        out = "out"
        [synth]
        prompts = ["asked.jsonl"]
        max_tokens = 24
        [train.recipe]
        tokens_per_batch = 512
        max_length = 256
        steps_ahead = 2
        held_out = 0.0
        [train.recipe.budget]
        steps = 2
        [mine]
        steps = 2
        budget = 200
        answers = 1
        max_tokens = 24
        [eval]
        prompts = "asked.jsonl"
        k = [2]
        modes = ["greedy"]
        rounds = 0
        max_tokens = 16
    """)
    return RunConfig(recipe=str(tmp_path / "r.toml"))


def test_the_whole_factory_ends_in_a_folder_that_opens(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, out = factory(tiny, tmp_path), tmp_path / "out"
    screen = io.StringIO()
    told: list[tuple[str, int]] = []
    status = run(
        config, Console(file=screen, width=200), {"machine": "here"}, lambda *one: told.append((one[0], one[1]))
    )
    assert status == 0
    stages, _ = stages_of(Path(config.recipe), None)
    assert all(seconds_of(stage, out) is not None for stage in stages)
    assert seconds_of(stages[0], tmp_path) is None
    assert [name for name, _ in told] == ["synth", "capture", "mine-capture", "control-mine-capture"]
    text = screen.getvalue()
    (why,) = (line for line in text.splitlines() if line.startswith("exported: "))
    chosen = why.split()[1].rstrip(",")
    assert chosen in ("base", "mined")
    assert "control, trained for as long on prompts that were not mined" in text
    assert "mined - base" in text
    mining, control = (stage.config for stage in stages if stage.name in ("mined", "control"))
    assert (mining.recipe, mining.drafter, mining.start) == (control.recipe, control.drafter, control.start)
    given, exported = (load_file(at / "model.safetensors") for at in (out / chosen, out / "drafter"))
    assert torch.equal(given["fc.weight"], exported["fc.weight"])
    asked = [set(json.loads((out / f"{name}.json").read_bytes())["pooled"][0]["by_prompt"]) for name in EVALUATIONS]
    assert asked[0] == asked[1] == asked[2]
    figures = {one.name: one for one in (took(stage, out, {"synth": (9, 3.0)}) for stage in stages)}
    assert (figures["synth"].tokens_per_s, figures["capture"].tokens) == (3, None)
    assert figures["base"].tokens == json.loads((out / "base/training/result.json").read_bytes())["tokens"] > 0
    (length,) = accepted(out / "eval.json", "here")
    assert (length.k, length.mode, set(length.by_domain)) == (2, "greedy", {"a", "b"})
    assert length.mean == pytest.approx(sum(length.by_domain.values()) / 2, abs=1e-4)
    assert screen.getvalue().splitlines()[-1] == f"redline serve {tiny} --draft {out / 'drafter'}"
    Eagle3.open(out / "drafter", Checkpoint.open(tiny).config)
    assert sorted(path.name for path in (out / "drafter").iterdir()) == ["config.json", "model.safetensors"]
    report = json.loads((out / "eval.json").read_bytes())
    assert report["machine"] == "here"
    assert {one["domain"] for one in report["measured"]} == {"a", "b"}
    for one in report["measured"]:
        assert one["engine_first"] == pytest.approx(one["offline_first"])
    mined = json.loads((out / "mine" / "report.json").read_bytes())
    assert mined["positions"] > 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    monkeypatch.setattr("redline.draft.extra.find_spec", lambda name: None)  # finished stages need no package any more
    assert run(config, QUIET) == 0
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}


EVALUATIONS = ("eval-base", "eval", "eval-control")
STAGES = {  # stage -> a function that it calls in the middle of its work
    "synth": "redline.draft.corpus.synth.synth",
    "capture": "redline.draft.corpus.capture.capture",
    "base": "redline.draft.train.train.train",
    "mine": "redline.draft.mine.mine.buckets",
    "mine-capture": "redline.draft.corpus.capture.capture",
    "mined": "redline.draft.train.train._export",
    "control-mine": "redline.draft.mine.mine.buckets",
    "control-mine-capture": "redline.draft.corpus.capture.capture",
    "control": "redline.draft.train.train._export",
    **dict.fromkeys(EVALUATIONS, "redline.draft.evaluate.evaluate"),
    "export": "redline.model.eagle3.module.Eagle3.save",
}


def test_ctrl_c_in_any_stage_is_one_line_and_the_same_command_goes_on(tiny: Path, tmp_path: Path):
    config = factory(tiny, tmp_path)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def after_one(work: Callable[..., Any]) -> Callable[..., Any]:
        """For two successive stages with one function: the first call completes the interrupted stage before."""
        calls = iter((work, interrupt))
        return lambda *given, **more: next(calls)(*given, **more)

    for number, name in enumerate(STAGES):
        screen = io.StringIO()
        again = number > 0 and list(STAGES.values())[number - 1] == STAGES[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(STAGES[name], after_one(evaluate.evaluate) if again else interrupt)
            assert run(config, Console(file=screen, width=200)) == 130, name
        lines = screen.getvalue().splitlines()
        done = list(STAGES)[: max(0, number - 1)]  # the stage before was interrupted, and completes in this run
        assert lines[: len(done)] == [f"{n}/13 {stage}: done" for n, stage in enumerate(done, 1)]
        assert [line.strip("\u2500 ") for line in lines if re.search(r"\u2500 \d+/13 ", line)][
            -1
        ] == f"{number + 1}/13 {name}"
        assert lines[-1].startswith("stopped"), name
    assert run(config, QUIET) == 0


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("steps_ahead = 2", "betas = [0.9, 2.0]", "stage base: recipe.betas"),
        (
            "held_out = 0.0",
            "held_out = 0.0\n[train.drafter]\ndraft_vocab_size = 9999999",
            "stage base: drafter.draft_voc",
        ),
        ("[mine]", "[capture]\nlayer_ids = [0, 99]\n[mine]", "stage capture: layer_ids is"),
        ("answers = 1", "answers = -1", "stage mine: examples, answers"),
        ("answers = 1", "device = 'tpu'", "stage mine: device is 'tpu'"),
        ('prompts = "asked.jsonl"', 'prompts = "nowhere.jsonl"', "nowhere.jsonl: cannot be read"),
        ('prompts = "asked.jsonl"', 'prompts = "empty.jsonl"', "stage eval-base: .*empty.jsonl: contains no prompt"),
        ('prompts = ["asked.jsonl"]', 'prompts = ["empty.jsonl"]', "stage synth: .*empty.jsonl: contains no prompt"),
        ("k = [2]", "k = [0]", "stage eval-base: .*--k is"),
        ("k = [2]", "temperature = 7.0", "stage eval-base: temperature is 7.0"),
    ],
)
def test_what_a_late_stage_would_refuse_is_refused_before_the_first(
    tiny: Path, tmp_path: Path, before: str, after: str, says: str
):
    config = factory(tiny, tmp_path)
    recipe = Path(config.recipe)
    assert before in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(before, after))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match=says):
        run(config, QUIET)
    assert not (tmp_path / "out" / "corpus.jsonl").exists()


def test_a_package_that_the_third_stage_imports_is_asked_for_before_the_first(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = factory(tiny, tmp_path)
    monkeypatch.setattr("redline.draft.extra.find_spec", lambda name: None if name == "accelerate" else name)
    command = re.escape(f"{sys.executable} -m pip install 'redline[draft]'")
    with pytest.raises(ConfigError, match=f"^stage base: accelerate is not installed: {command}$"):
        run(config, QUIET)
    assert not (tmp_path / "out" / "corpus.jsonl").exists()


def test_a_folder_that_cannot_be_written_is_said_before_the_first_stage(tiny: Path, tmp_path: Path):
    (tmp_path / "out").touch()
    with pytest.raises(ConfigError, match="out: cannot be written"):
        run(factory(tiny, tmp_path), QUIET)


def test_a_disk_that_is_full_at_a_stamp_is_one_line(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("redline.disk.os.fsync", full)
    with pytest.raises(ConfigError, match=r"synth.json: cannot be written \(no space left"):
        run(factory(tiny, tmp_path), QUIET)
