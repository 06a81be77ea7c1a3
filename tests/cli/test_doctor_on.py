"""`redline doctor --on`: printed predictions for machines that are not available."""

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from redline.bench.step.machines import machine
from redline.bench.step.predict import SHORT, TOKENS, PredictedRanks
from redline.cli import app
from redline.errors import ConfigError
from redline.model.k2.shapes import KIMI_K26
from redline.model.k2.shard import weight_bytes


def said(on: str, *words: str, columns: int = 120) -> str:
    done = CliRunner().invoke(app, ["doctor", *words, "--on", on], env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.output
    assert all(len(line) <= columns and line == line.rstrip() for line in done.output.splitlines())
    return done.output


def flat(text: str) -> str:
    return " ".join(text.split())


def summary(text: str) -> dict[str, list[float]]:
    """The numbers of each line of the summary."""
    lines = re.findall(r"^(\d+ (?:token|stream).*?, \w+(?: drafts?)?) +(\d[\d. ]*)$", text, re.MULTILINE)
    return {name: [float(number) for number in numbers.split()] for name, numbers in lines}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("on", ["8 x H200", "8 x B200"])
def test_eight_ranks_hold_the_model_and_each_line_has_its_arithmetic(on: str, columns: int):
    text = said(on, columns=columns)
    words = flat(text)
    assert "60 layers x 384 experts x 44,040,192 x 4.5 bits / 8 ranks = 71.35 GB" in words
    assert f"the sum: {weight_bytes(KIMI_K26, 8) / 1e9:.2f} GB of 594.21 GB" in words
    assert "does not fit" not in words
    machines = PredictedRanks(KIMI_K26, machine(on))
    table = summary(text)
    for tokens in TOKENS:
        step = machines.step(tokens, 1, SHORT)
        line = table[f"{tokens} token{'s' * (tokens > 1)}, no drafts"]
        expected = step.floor + step.whole, step.ms, 1e3 * tokens / step.ms, step.ms + step.nvfp4
        assert line[:4] == pytest.approx(expected, abs=0.51), tokens
        assert f"{step.gb:.2f} / {machines.on.chip.reads.value / 1e12:.3f} = {step.floor:5.2f}" in text
    for drafts, accepted in enumerate((1.83, 2.43, 2.88, 3.24), 1):
        step, drafting = machines.round(drafts)
        ms, speed = table[f"1 stream, {drafts} draft{'s' * (drafts > 1)}"][:2]
        assert ms == pytest.approx(step.ms + drafting, abs=0.006)
        assert speed == pytest.approx(1e3 * accepted / ms, rel=0.01)
        assert f"{accepted:g} tokens of a round / {ms:.2f} ms = {speed:.0f} tokens/s" in words
    for shape in ("dflash", "dspark"):
        step, drafting = machines.block_round(shape)
        ms, speed = table[f"1 stream, {shape}, 7 drafts"][:2]
        assert ms == pytest.approx(step.ms + drafting, abs=0.006)
        assert f"{shape}, 7 drafts 5.3 tokens of a round / {ms:.2f} ms = {speed:.0f} tokens/s" in words


def test_parts_of_a_rank_add_up():
    text = flat(said("8 x H200"))
    names = "routed experts", "heads", "other MLPs", "head ", "whole on each"
    parts = [float(re.findall(rf"{name}.*?= ([\d.]+) GB", text)[0]) for name in names]
    assert sum(parts) == pytest.approx(weight_bytes(KIMI_K26, 8) / 1e9, abs=0.03)


def test_pages_are_what_is_left_over_their_bytes():
    text = flat(said("8 x H200"))
    bf16, fp8 = re.findall(r"= ([\d.]+) GB / ([\d,]+) bytes = ([\d,]+) tokens", text)[:2]
    for (left, each, tokens), size in ((bf16, 61 * 576 * 2), (fp8, 61 * 576)):
        assert int(each.replace(",", "")) == size
        assert int(tokens.replace(",", "")) == pytest.approx(float(left) * 1e9 / size, rel=0.001)


def test_a_rank_holds_its_part_of_a_drafter():
    assert "public size, 3.68 GB, of which a rank holds 0.78 GB: 141.00 GB" in flat(said("8 x H200"))
    assert "of which a rank holds" not in flat(said("1 x B200"))


@pytest.mark.parametrize("chip", ["B200", "B300", "GB200"])
def test_a_chip_for_which_kernels_are_only_compiled_is_told_honestly(chip: str):
    text = flat(said(f"4 x {chip}"))
    assert "none has been run on this chip" in text
    assert "the speed of neither is known" in text
    assert "NVFP4 is not faster than INT4" in text
    assert "none has been run" not in said("8 x H200")


def test_a_chip_without_kernels_is_told_honestly():
    text = flat(said("8 x RTX PRO 6000"))
    assert "but our kernels: none: a block has 99 KB of shared memory and the CUDA kernels need up to 227" in text
    assert "redline serve" not in text


def test_what_does_not_fit_is_a_line_that_says_what_would():
    text = flat(said("4 x H200"))
    assert re.search(
        r"does not fit 151\.95 GB of weights .* of 141\.00 GB; 8 x H200, 4 x B200, 4 x B300 would do\.", text
    )
    assert "pages" not in text.split("What it would give")[0]
    assert "4 x B200" not in said("8 x H200")
    assert "does not fit" not in said("4 x B200")


def test_what_was_measured_stands_beside_what_is_predicted():
    table = summary(said("2 x H200"))
    for tokens, measured in {"1 token": 5.69, "4 tokens": 10.62, "8 tokens": 16.44, "32 tokens": 46.86}.items():
        assert table[f"{tokens}, no drafts"][-1] == measured
    assert table["1 stream, 3 drafts"][-1] == 12.02
    assert len(table["1 stream, 1 draft"]) == 4, "this case has not been measured"
    assert len(summary(said("2 x B200"))["1 token, no drafts"]) == 5


@pytest.mark.parametrize("on", ["8 x H300", "", "[bold]8", "16 x H200", "3 x H200"])
def test_nonsense_is_one_error(on: str):
    done = CliRunner().invoke(app, ["doctor", "--on", on])
    assert done.exit_code == 1
    assert isinstance(done.exception, ConfigError)
    assert f"on is {on!r}" in str(done.exception)
    assert "H200" in str(done.exception)
    assert done.output == ""


def test_another_model_gets_its_bytes_and_no_times(tmp_path: Path):
    folder = tmp_path / "k2 [bold]"
    folder.mkdir()
    shutil.copy(Path(__file__).parents[2] / "models/kimi-nano/config.json", folder)
    text = said("1 x H200", str(folder))
    assert "k2 [bold]\n" in text
    assert "bf16 pages" in text
    assert "predicted for models of Kimi K2's sizes alone" in text
