"""The verbs from the command line: help texts, one line for a mistake, and the output of each."""

import errno
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from redline.cli import app, main
from redline.cli.bench.steps import SpeculateFlags
from redline.draft.corpus.synth import SynthConfig
from redline.draft.evaluate import EvalConfig
from redline.draft.mine.mine import MineConfig
from redline.errors import ConfigError
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.shapes import shape
from redline.model.k2.write import random_checkpoint
from redline.ops.op import PeakRates
from redline.progress import Working
from redline.run.fit import MemorySizes, fit
from redline.worker.config import EngineConfig, Suffix
from redline.worker.engine import vision_bytes
from tests.laws.test_images_change_nothing import PAD, TEXT, VISION
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer
from tests.waiting import LIMIT_S

REDLINE = Path(sys.executable).with_name("redline")


MODELS = Path(__file__).parents[2] / "models"
NANO, DRAFTER = MODELS / "kimi-nano", MODELS / "kimi-nano-eagle3"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    random_checkpoint(folder, kernel_config(vocab_size=TINY_VOCAB))
    return write_tiny_tokenizer(folder)


@pytest.fixture
def shipped_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has the shipped model as `t`, and its drafter as `d`."""
    (tmp_path / "t").symlink_to(NANO)
    (tmp_path / "d").symlink_to(DRAFTER)
    monkeypatch.chdir(tmp_path)


def typed(*words: str | Path) -> str:
    """The output of a command."""
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


# ----------------------------------------------------------------------------------------------------------- words


def test_the_installed_command_without_a_verb_teaches_and_imports_no_torch():
    done = subprocess.run([REDLINE], capture_output=True, text=True, timeout=LIMIT_S)
    assert all(verb in done.stdout for verb in ("serve", "chat", "eval", "doctor", "bench"))
    program = "import sys, redline.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S)


VERBS = ["serve", "chat", "eval", "quantize", "audit", "doctor", "bench decode", "bench speculate"]
DRAFT_VERBS = [f"draft {verb}" for verb in ("synth", "capture", "train", "mine", "eval", "export", "run")]


@pytest.mark.parametrize("verb", [*VERBS, *DRAFT_VERBS])
def test_every_verb_has_help_for_every_option(verb: str):
    lines = typed(*verb.split(), "--help").splitlines()
    options = [line for line in lines if "--" in line and "--help" not in line]
    assert lines[1].strip().startswith("Usage:")
    assert all(len(line.split()) > 4 for line in options), "an option without an explanation"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serve", "nowhere"], "nowhere: no such folder or file"),
        (["eval", "nowhere"], "nowhere"),
        (["quantize", "nowhere", "out"], "nowhere"),
        (
            ["quantize", str(NANO), "out", "--level", "best"],
            "level: Invalid enum value 'best'; expected 'fast' or 'search' or 'calibrated'",
        ),
        (["doctor", "--on", "3 x H200"], "expected 1, 2, 4, 8 GPUs of one host"),
        (["doctor", "--on", "64 x H200"], "expected 1, 2, 4, 8 GPUs of one host"),
        (["audit", "nowhere", "nobody"], "nowhere"),
        (["doctor", "nowhere"], "nowhere"),
        (["bench", "decode", "nowhere"], "nowhere"),
        (["bench", "speculate", "nowhere", "--draft", "nobody"], "no such folder"),
        (["draft", "run", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["draft", "eval", "nowhere", "--draft", "nobody"], "no such folder"),
        (["chat", "--url", "http://127.0.0.1:9", "hi"], "no server at http://127.0.0.1:9"),
    ],
)
def test_a_mistake_is_one_line_and_code_1(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["redline", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    said = capfd.readouterr().err
    *_, last = said.splitlines()
    assert last.startswith("error: ")
    assert says in last
    assert "Traceback" not in said


# ---------------------------------------------------------------------------------------------------------- quantize


def test_a_checkpoint_is_calibrated_and_audited_by_two_commands(tiny: Path, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"domain": "chat", "messages": [{"role": "user", "content": "again " * n}]} for n in range(1, 30)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out, texts = tmp_path / "out", ("--text", prompts, "--device", "cpu")
    said = typed("quantize", tiny, out, "--level", "calibrated", "--tokens", "500", *texts)
    assert "outputs over the calibration texts" in said
    said = typed("audit", tiny, out, "--most-kl", "9", "--least-agreement", "0", *texts)
    assert "everything is within its bounds" in said
    assert "is complete already" in typed("quantize", tiny, out, "--level", "calibrated", "--tokens", "500", *texts)


# ---------------------------------------------------------------------------------------------------------- doctor


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed machine, because measuring takes seconds."""
    monkeypatch.setattr("redline.cli.doctor.measure", lambda *_, **__: PeakRates("any", 1e10, 1e11))


def test_doctor_prints_what_fits_with_its_arithmetic(tiny: Path):
    said = typed("doctor", tiny)
    for words in (
        "reads memory at",
        "multiplies at",
        "CPU kernels",
        "parameters",
        "a page ",
        "KV capacity",
        "floor ",
        "to NVFP4",
    ):
        assert words in said
    # 3 layers x (64 + 32) values x 2 bytes
    assert "64 tokens x 576 bytes = 36,864 bytes" in said


@pytest.mark.usefixtures("machine")
def test_doctor_answers_from_config_json_alone_and_says_so(tiny: Path, tmp_path: Path):
    folder = tmp_path / "k2 [bold]"
    folder.mkdir()
    config = json.loads((tiny / "config.json").read_bytes())
    text = config.get("text_config", config)
    # Kimi K2's sizes: 61 layers of 384 experts of 3 x 7168 x 2048, except that the first layer has none.
    sizes = {"num_hidden_layers": 61, "n_routed_experts": 384, "hidden_size": 7168, "moe_intermediate_size": 2048}
    text |= {**sizes, "num_experts_per_tok": 8, "first_k_dense_replace": 1}
    (folder / "config.json").write_text(json.dumps(config))
    said = typed("doctor", folder)
    assert "k2 [bold]\n" in said
    assert "config.json alone, no weights yet: the figures below are computed from it" in said
    assert "60 layers x 384 experts x 44,040,192 = 1,014.7 B" in said
    assert "does not fit" in said
    assert "whole" not in said


@pytest.mark.usefixtures("machine")
def test_doctor_says_what_is_wrong_with_the_files_and_answers_all_the_same(tiny: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    shard = next(broken.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    done = CliRunner().invoke(app, ["doctor", str(broken)], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    assert "truncated" in done.output
    assert "floor " in done.output


@pytest.mark.usefixtures("machine")
def test_doctor_reads_the_headers_of_the_shards_once(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[Path] = []
    read = Checkpoint.open

    def counted(folder: Path) -> Checkpoint:
        opened.append(folder)
        return read(folder)

    monkeypatch.setattr(Checkpoint, "open", counted)
    typed("doctor", tiny)
    assert opened == [tiny]


@pytest.mark.usefixtures("machine")
def test_doctor_counts_what_reading_images_takes(tiny: Path, tmp_path: Path):
    seeing = tmp_path / "seeing"
    random_checkpoint(seeing, TEXT, vision=VISION, media_token=PAD)
    write_tiny_tokenizer(seeing)
    said, blind = typed("doctor", seeing), typed("doctor", tiny)
    assert f"images           {vision_bytes(VISION, torch.device('cpu')) / 1e9:.2f} GB: the vision tower" in said
    assert "images " not in blind


def test_doctor_prints_every_recorded_shape_with_its_memory():
    from redline.cli import doctor

    sizes = MemorySizes(shape("kimi-nano"), device="cuda", gpu_kernels=True, max_running=2, positions=4)
    said = doctor._memory(sizes, 140 << 30, 0, fit(sizes, 140 << 30, alone=True))
    recorded = sizes.recorded_steps(65_536).explain()
    assert len(recorded) == 2 + 2 * 4 * 3
    start = said.index(recorded[0])
    assert said[start : start + len(recorded)] == recorded
    assert "MB of launches" in recorded[1]


def test_the_floor_of_doctor_is_measured_over_the_bytes_that_a_token_reads(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    """Weights that fit into a cache are read faster than memory, so memory's bandwidth would give too high a floor."""
    from redline.cli import doctor

    measured: list[int] = []

    def measure(device: torch.device, working_set_bytes: int = doctor.WORKING_SET_BYTES) -> PeakRates:
        measured.append(working_set_bytes)
        return PeakRates("any", 1e9 if working_set_bytes == doctor.WORKING_SET_BYTES else 1e12, 1e12)

    monkeypatch.setattr(doctor, "measure", measure)
    read = Checkpoint.open(tiny).config.bytes_per_token
    said = typed("doctor", tiny)
    assert measured == [doctor.WORKING_SET_BYTES, read]
    assert "at 1000.0 GB/s (measured over that size)" in said
    assert f"at most {1e12 / read:,.0f} tokens/s" in said


@pytest.mark.usefixtures("machine")
def test_doctor_names_the_drafter_next_to_the_model(tiny: Path, tmp_path: Path):
    model, drafter = tmp_path / "tiny", tmp_path / "tiny-eagle3"
    model.symlink_to(tiny)
    assert "drafter  " not in typed("doctor", model)
    config = Eagle3Config.for_target(Checkpoint.open(tiny).config)
    Eagle3(config).save(drafter)
    said = " ".join(typed("doctor", model).split())
    assert f"redline serve {model} --draft {drafter}" in said
    assert f"drafter {drafter} is next to the model" in said
    Eagle3(replace(config, vocab_size=config.vocab_size + 1)).save(drafter)
    said = " ".join(typed("doctor", model).split())
    assert "--draft" not in said
    assert f"drafter not used: {drafter}: vocab_size is {config.vocab_size + 1}; this target needs" in said


@pytest.mark.usefixtures("machine")
def test_doctor_without_a_folder_speaks_of_the_machine_alone():
    said = typed("doctor")
    assert "reads memory at" in said
    assert "a page " not in said


# ---------------------------------------------------------------------------------------------------- bench decode


def test_bench_decode_prints_floor_and_ratio_and_keeps_where_the_numbers_come_from(tiny: Path, tmp_path: Path):
    result = tmp_path / "decode.json"
    said = typed("bench", "decode", tiny, "--batch", "2", "--context", "70", "--repeats", "3", "--save", result)
    assert "floor/time" in said
    record = json.loads(result.read_bytes())
    assert {"machine", "commit", "date", "versions"} <= set(record)
    (case,) = record["cases"]
    assert (case["batch"], case["context"]) == (2, 70)
    assert case["floor_ms"] > 0  # no upper bound: on a busy machine the measured limits may be too low
    assert case["p10_ms"] <= case["ms"] <= case["p90_ms"]


# ------------------------------------------------------------------------------------------------- bench speculate


def test_bench_speculate_compares_every_variant_with_no_drafts_and_times_the_parts(tiny: Path, tmp_path: Path):
    drafter, prompts, result = tmp_path / "drafter", tmp_path / "prompts.jsonl", tmp_path / "speculate.json"
    Eagle3(Eagle3Config.for_target(Checkpoint.open(tiny).config)).save(drafter)
    lines = [{"domain": name, "messages": [{"role": "user", "content": "hello"}]} for name in ("code", "math")]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    shape = ["--k", "2", "--batch", "2", "--rounds", "1", "--max-tokens", "8", "--repeats", "2", "--context", "70"]
    said = typed("bench", "speculate", tiny, "--draft", drafter, "--prompts", prompts, *shape, "--save", result)
    assert "mean over domains" in said
    record = json.loads(result.read_bytes())
    assert {"machine", "commit", "date", "versions"} <= set(record)
    by_variant = {(rate["domain"], rate["variant"]): rate for rate in record["rates"]}
    assert set(by_variant) == {(name, how) for name in ("code", "math") for how in ("off", "k2", "suffix", "auto")}
    assert by_variant["code", "off"]["times"] == 1
    assert by_variant["code", "off"]["length"] is None
    assert by_variant["code", "k2"]["rounds"] > 0
    assert 1 <= by_variant["code", "k2"]["length"] <= 3
    parts = {part["name"]: part["ms"] for part in record["parts"]}
    assert set(parts) == {"verify 1", "verify 2", "verify 4", "verify 8", "drafter pass"}
    assert all(ms > 0 for ms in parts.values())


def test_bench_speculate_at_a_stated_acceptance_accepts_so_much(tiny: Path, tmp_path: Path):
    drafter, prompts, result = tmp_path / "drafter", tmp_path / "prompts.jsonl", tmp_path / "speculate.json"
    Eagle3(Eagle3Config.for_target(Checkpoint.open(tiny).config)).save(drafter)
    prompts.write_text(json.dumps({"domain": "code", "messages": [{"role": "user", "content": "hello"}]}))
    words = ["bench", "speculate", tiny, "--draft", drafter, "--prompts", prompts, "--batch", "1", "--rounds", "1"]
    words += ["--max-tokens", "40", "--repeats", "1", "--context", "70"]
    typed(*words, "--k", "2", "--synthetic-acceptance", "2", "--save", result)
    by_variant = {rate["variant"]: rate for rate in json.loads(result.read_bytes())["rates"]}
    assert set(by_variant) == {"off", "k2"}
    assert by_variant["k2"]["length"] == pytest.approx(2, abs=0.15), "the last round has less room"
    wrong = [*words, "--k", "3", "--k", "1", "--synthetic-acceptance", "2.5"]
    done = CliRunner().invoke(app, list(map(str, wrong)))
    assert "synthetic-acceptance, with --k 1, is 2.5; expected a mean number of tokens per round, 1 to 2" in str(
        done.exception
    )


# --------------------------------------------------------------------------------------------------- draft export


def test_draft_export_writes_both_widths_and_each_is_the_same_drafter(tmp_path: Path):
    target = write_tiny_tokenizer(tmp_path / "target")
    random_checkpoint(target, kernel_config(vocab_size=TINY_VOCAB, kv_lora_rank=256))
    config = Checkpoint.open(target).config
    torch.manual_seed(3)
    made = Eagle3(Eagle3Config.for_target(config, kv_lora_rank=64)).bfloat16()
    made.save(tmp_path / "made")
    said = typed("draft", "export", target, "--draft", tmp_path / "made", "--out", tmp_path / "wide")
    assert "latent 64 padded to 256" in said
    typed("draft", "export", target, "--draft", tmp_path / "wide", "--out", tmp_path / "own", "--latent", "own")
    widths = [json.loads((tmp_path / name / "config.json").read_text())["kv_lora_rank"] for name in ("wide", "own")]
    assert widths == [256, 64]
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "made" / name).read_bytes()
    assert Eagle3.open(tmp_path / "wide", config).config == made.config


def test_draft_export_says_what_latent_may_be_and_what_cannot_be_written(tiny: Path, tmp_path: Path):
    Eagle3(Eagle3Config.for_target(Checkpoint.open(tiny).config)).save(tmp_path / "made")
    (tmp_path / "file").write_text("")
    for words, message in (
        (("--out", tmp_path / "out", "--latent", "wide"), "export.latent: .*expected 'target' or 'own'"),
        (("--out", tmp_path / "file" / "out"), "file/out: cannot be written"),
    ):
        done = CliRunner().invoke(
            app, ["draft", "export", str(tiny), "--draft", str(tmp_path / "made"), *map(str, words)]
        )
        assert isinstance(done.exception, ConfigError)
        assert re.search(message, str(done.exception))


# ----------------------------------------------------------------------------------------------------------- draft


def test_the_verbs_of_the_factory_follow_one_another(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a folder with a name that looks like markup. Progress is printed at each step, not every ten seconds."""
    enter, show = Working.__enter__, Working.show

    def tell(working: Working) -> None:
        print(working.line(), file=working._stream, flush=True)

    def entered(working: Working) -> Working:
        tell(working)
        return enter(working)

    def shown(working: Working, *done: Any, **more: Any) -> None:
        show(working, *done, **more)
        tell(working)

    monkeypatch.setattr(Working, "__enter__", entered)
    monkeypatch.setattr(Working, "show", shown)
    monkeypatch.setattr("redline.progress._minutes", lambda _: "0:00")
    tmp_path = tmp_path / "[bold] [/] :x:"
    tmp_path.mkdir(parents=True)
    corpus, states, drafter, mined = (tmp_path / name for name in ("corpus.jsonl", "states", "drafter", "mined"))
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "eval.json"
    lines = [{"domain": "code", "messages": [{"role": "user", "content": f"{i}"}]} for i in range(3)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    said = typed("draft", "synth", tiny, "--out", corpus, "--prompts", prompts, "--max-tokens", "12")
    assert f"{corpus} holds 3" in said
    assert "answers: 0:00 passed" in said
    said = typed("draft", "capture", tiny, "--corpus", corpus, "--out", states, "--disk", "10MB")
    assert f"{states} holds 3 examples" in said
    assert "loading weights: " in said
    (tmp_path / "t.toml").write_text("[recipe]\nmax_length = 256\ntokens_per_batch = 512\nheld_out = 0.0\n")
    learn = ["--capture", states, "--settings", tmp_path / "t.toml", "--steps", "1", "--steps-ahead", "2"]
    assert "training: 0:00 passed" in typed("draft", "train", tiny, "--out", drafter, *learn)
    budget = ["--budget", "40", "--answers", "1", "--max-tokens", "12", "--traffic", "code=1"]
    said = typed("draft", "mine", tiny, "--draft", drafter, "--corpus", corpus, "--out", mined, *budget)
    assert f"{mined / 'mixed.jsonl'}: " in said
    assert "scored examples: 0 of 3" in said
    assert "fresh answers: " in said
    assert (mined / "mixed.jsonl").stat().st_size > 0
    empty, little = tmp_path / "empty", ["--budget", "1", "--answers", "1"]
    typed("draft", "mine", tiny, "--draft", drafter, "--corpus", corpus, "--out", empty, *little)
    assert (empty / "mixed.jsonl").read_bytes() == b"", (
        "no example fits the budget, so no answer is requested, and no error is raised"
    )
    shape = ["--k", "1", "--mode", "greedy", "--rounds", "0", "--max-tokens", "8"]
    said = typed("draft", "eval", tiny, "--draft", drafter, "--prompts", prompts, *shape, "--save", report)
    assert "first draft, greedy: the engine accepts" in said
    assert f"written to {report}" in said
    assert "loading the engine: " in said
    assert json.loads(report.read_bytes())["measured"][0]["rounds"] > 0


def test_a_disk_that_fails_in_the_midst_is_one_line(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stale(*_: Any, **__: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(tmp_path / "corpus.jsonl"))

    monkeypatch.setattr("redline.draft.corpus.synth.synth", stale)
    words = ["draft", "synth", tiny, "--out", tmp_path / "corpus.jsonl", "--domain", "code", "--count", "1"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(f"{tmp_path / 'corpus.jsonl'}: cannot be read or written (Stale file handle)")


@pytest.mark.usefixtures("shipped_here")
def test_a_share_that_is_none_is_refused():
    done = CliRunner().invoke(
        app, ["draft", "mine", "t", "--draft", "d", "--corpus", "c", "--out", "o", "--traffic", "code"]
    )
    assert done.exit_code == 2
    assert "expected DOMAIN=SHARE" in done.output


# ------------------------------------------------------------------------------------------------------------ eval


def test_eval_prints_a_table_and_saves_it(tiny: Path, tmp_path: Path):
    sets = tmp_path / "sets"
    sets.mkdir()
    asked = {"kind": "add", "messages": [{"role": "user", "content": "1 + 1?"}], "check": {"number": 2}}
    (sets / "values.jsonl").write_text(json.dumps(asked) + "\n")
    (sets / "targets.json").write_text(json.dumps({"values": {"add": 90}}))
    result = tmp_path / "report.json"
    said = typed("eval", tiny, "--sets", sets, "--save", result)
    assert "add" in said
    assert "90" in said
    assert json.loads(result.read_bytes())


@pytest.mark.usefixtures("shipped_here")
@pytest.mark.parametrize(
    ("words", "verb", "expected"),
    [
        (
            "draft synth t --prompts p --out o",
            "redline.draft.corpus.synth.run",
            SynthConfig(weights="t", out="o", prompts=("p",), engine=EngineConfig()),
        ),
        (
            "draft synth t --prompts p --out o --draft suffix",
            "redline.draft.corpus.synth.run",
            SynthConfig(weights="t", out="o", prompts=("p",), engine=EngineConfig(speculation=Suffix())),
        ),
        (
            "draft mine t --draft d --corpus c --out o",
            "redline.draft.mine.mine.run",
            MineConfig(target="t", draft="d", out="o", corpus=("c",)),
        ),
        ("draft eval t --draft d", "redline.draft.evaluate.run", EvalConfig(target="t", draft="d")),
        (
            "bench speculate t --draft d",
            "redline.cli.bench.speculation_tables.run",
            SpeculateFlags(folder="t", draft="d"),
        ),
    ],
)
def test_a_flag_that_is_not_given_is_what_a_recipe_says_without_its_key(
    words: str, verb: str, expected: object, monkeypatch: pytest.MonkeyPatch
):
    given: list[object] = []
    monkeypatch.setattr(verb, lambda config, *_: given.append(config) or 0)
    typed(*words.split())
    assert given == [expected]
