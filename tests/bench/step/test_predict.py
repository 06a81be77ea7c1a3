"""Predictions for GPUs that are not available: the constants against their measurements, floors, arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest

from redline.bench.step.drafters import public_drafter
from redline.bench.step.machines import CHIPS, Several, SourcedFigure, machine
from redline.bench.step.predict import (
    BLOCK_DRAFTS,
    BLOCK_MS,
    BLOCKS,
    BLOCKS_FITTED,
    FITTED,
    LONG_FITTED,
    LONG_STEPS,
    MEETINGS,
    ROUND_MS,
    ROUNDS,
    ROUNDS_FITTED,
    SHORT,
    STEPS,
    TOKENS,
    PredictedRanks,
    RoundExcess,
    StepTime,
    distinct_experts,
    excess,
    like_kimi,
)
from redline.bench.step.rounds import RoundCase, floors
from redline.errors import ConfigError
from redline.model.draft_shard import body_left_out
from redline.model.eagle3.config import Eagle3Config
from redline.model.k2.shapes import KIMI_K26, KIMI_NANO
from redline.ops.op import PeakRates
from redline.policy.synthetic import GOLDEN, golden_block, rates_of

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
NEAR = 0.0006  # half a unit of the third decimal of ms and µs, rounded up


def rows(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """The rows of Kimi at full depth that have these values, the newest last."""
    fixed = {"shape": "kimi-k2.6", "gpu": "NVIDIA H200", "layers": 61, "experts": 384, "routing": "uniform", **wanted}
    listed = json.loads((RESULTS / name).read_bytes())
    found = [row for row in listed if all(row.get(key) == value for key, value in fixed.items())]
    return sorted(found, key=lambda row: row["date"])


def took(**wanted: Any) -> StepTime:
    row = rows("decode-h200.json", tokens_per_row=1, **wanted)[-1]
    case = PredictedRanks(KIMI_K26, Several(wanted["ranks"], CHIPS["H200"])).depth(
        row["rows"], 1, row["context"], row["kv_dtype"]
    )
    machine = PeakRates(row["gpu"], row["bytes_per_s"], row["flops_per_s"])
    read = case.cost(row["expert_bytes"] / case.expert_bytes, divided=False).seconds(machine)
    return StepTime(row["ms"], 1e3 * read)


def of(text: str) -> PredictedRanks:
    return PredictedRanks(KIMI_K26, machine(text))


# ---------------------------------------------------------------------------------- constants and measurements


@pytest.mark.parametrize("ranks", STEPS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_steps_are_those_that_were_measured(ranks: int, tokens: int):
    assert set(STEPS[ranks]) == set(TOKENS)
    measured = took(ranks=ranks, rows=tokens, context=SHORT, kv_dtype="bf16", commit=FITTED[ranks])
    assert STEPS[ranks][tokens] == pytest.approx(measured, abs=NEAR)


@pytest.mark.parametrize("kv_dtype", LONG_STEPS)
def test_long_steps_are_those_that_were_measured(kv_dtype: str):
    measured = took(ranks=1, rows=1, context=32768, kv_dtype=kv_dtype, commit=LONG_FITTED)
    assert LONG_STEPS[kv_dtype] == pytest.approx(measured, abs=NEAR)


def test_meetings_are_those_that_were_measured():
    measured = json.loads((RESULTS / "sums-h200.json").read_bytes())
    assert measured["ranks"] == 2
    times = {int(tokens): (us["added by a sum"], us["gather_ranks"]) for tokens, us in measured["times_us"].items()}
    assert set(times) == set(MEETINGS) == set(TOKENS)
    for tokens, meeting in MEETINGS.items():
        assert meeting == pytest.approx(times[tokens], abs=NEAR)


def test_rounds_are_those_that_were_measured():
    for ranks, known in ROUND_MS.items():
        listed = rows("rounds-h200.json", ranks=ranks, rows=1, draft_head_bits=16, drafter="eagle3")
        listed = [row for row in listed if row["commit"] in (FITTED[2], *ROUNDS_FITTED)]
        assert {row["k"]: row["ms"] for row in listed} == pytest.approx(known, abs=NEAR)
    for drafter, ms in BLOCK_MS.items():
        assert block_row(drafter)["ms"] == pytest.approx(ms, abs=NEAR)


@pytest.mark.parametrize("drafts", ROUNDS)
def test_what_a_round_takes_above_its_floors_is_as_measured(drafts: int):
    listed = rows("rounds-h200.json", ranks=1, rows=1, k=drafts, draft_head_bits=16, drafter="eagle3")
    row = next(row for row in reversed(listed) if row["commit"] in ROUNDS_FITTED)
    case = RoundCase(
        depth=of("1 x H200").depth(1, 1 + drafts, SHORT, "bf16"),
        drafter=Eagle3Config.for_target(KIMI_K26),
        rates=rates_of(GOLDEN[drafts - 1], drafts, "accept"),
    )
    experts = row["expert_bytes"] / case.depth.expert_bytes
    verify, draft = floors(case, experts, PeakRates("measured", row["bytes_per_s"], row["flops_per_s"]))
    assert verify + draft == pytest.approx(row["floor_ms"], rel=1e-6)
    assert ROUNDS[drafts] == pytest.approx(RoundExcess(row["verify_ms"] - verify, row["draft_ms"] - draft), abs=NEAR)


def block_row(drafter: str) -> dict[str, Any]:
    of = {"ranks": 1, "rows": 1, "k": BLOCK_DRAFTS, "context": SHORT, "commit": BLOCKS_FITTED}
    (row,) = rows("rounds-h200.json", drafter=drafter, **of)
    return row


@pytest.mark.parametrize("drafter", BLOCKS)
def test_what_a_blocks_round_takes_above_its_floors_is_as_measured(drafter: str):
    row = block_row(drafter)
    case = RoundCase(
        depth=of("1 x H200").depth(1, 1 + BLOCK_DRAFTS, SHORT, "bf16"),
        drafter=public_drafter(drafter, KIMI_K26),
        rates=rates_of(golden_block(BLOCK_DRAFTS), BLOCK_DRAFTS, "accept"),
    )
    experts = row["expert_bytes"] / case.depth.expert_bytes
    verify, draft = floors(case, experts, PeakRates("measured", row["bytes_per_s"], row["flops_per_s"]))
    assert verify + draft == pytest.approx(row["floor_ms"], rel=1e-6)
    assert BLOCKS[drafter] == pytest.approx(RoundExcess(row["verify_ms"] - verify, row["draft_ms"] - draft), abs=NEAR)
    step, drafting = of("1 x H200").block_round(drafter)
    assert step.ms + drafting == pytest.approx(BLOCK_MS[drafter], rel=0.02)


@pytest.mark.parametrize("drafter", BLOCKS)
def test_ranks_divide_a_block(drafter: str):
    (_, alone), (_, eight) = (of(f"{ranks} x H200").block_round(drafter) for ranks in (1, 8))
    assert eight < 0.6 * alone


# ------------------------------------------------------------------------------------------------------ predictions


@pytest.mark.parametrize("ranks", STEPS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_one_and_two_h200s_are_predicted_as_they_were_measured_but_for_the_bandwidth(ranks: int, tokens: int):
    step, measured = of(f"{ranks} x H200").step(tokens, 1, SHORT), STEPS[ranks][tokens]
    assert step.ms - step.floor - step.whole == pytest.approx(measured.ms - measured.read, abs=1e-6)
    assert step.ms == pytest.approx(measured.ms, rel=0.02)


def test_rounds_of_two_h200s_which_no_constant_is_from_are_predicted_within_2_percent():
    """Each rank read the whole body of the drafter."""
    for drafts, measured in ROUND_MS[2].items():
        step, drafting = of("2 x H200").round(drafts, whole=True)
        assert step.ms + drafting == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_drafter_that_ranks_divide_spares_reading_and_costs_two_sums_a_pass(ranks: int):
    machines, drafts = of(f"{ranks} x H200"), 3
    (step, drafting), (same, with_whole) = machines.round(drafts), machines.round(drafts, whole=True)
    spared = 2 * body_left_out(Eagle3Config.for_target(KIMI_K26), ranks) / CHIPS["H200"].reads.value
    assert step == same
    assert with_whole - drafting == pytest.approx(drafts * (1e3 * spared - 2 * machines.sum_us(1) / 1e3))
    assert (drafting < with_whole) == (ranks > 1)


@pytest.mark.parametrize(
    ("ranks", "tb_per_s", "expected"), [(2, 4.5, (3.9, 7.7, 12.4, 33.7)), (4, 4.3, (2.3, 4.3, 6.75, 17.9))]
)
def test_what_ranks_read_of_the_weights_as_the_goals_have_it(ranks: int, tb_per_s: float, expected: tuple[float, ...]):
    chip = CHIPS["H200"]._replace(reads=SourcedFigure(1e12 * tb_per_s, "asked for"))
    machines = PredictedRanks(KIMI_K26, Several(ranks, chip))
    steps = [machines.step(tokens, 1, 0) for tokens in TOKENS]
    assert [step.floor + step.whole for step in steps] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_floors_are_those_of_measured_steps(ranks: int):
    """Each weight counts once over all ranks, in `redline doctor --on` as in docs/speed.md."""
    for tokens in TOKENS:
        wanted = {"ranks": ranks, "rows": tokens, "tokens_per_row": 1, "context": SHORT, "kv_dtype": "bf16"}
        row = rows("decode-h100.json", gpu="NVIDIA H100 80GB HBM3", **wanted)[-1]
        chip = CHIPS["H100"]._replace(reads=SourcedFigure(row["bytes_per_s"], "measured"))
        floor = PredictedRanks(KIMI_K26, Several(ranks, chip)).step(tokens, 1, SHORT).floor
        assert floor == pytest.approx(row["floor_ms"], rel=0.005), tokens


def test_one_rank_reads_nothing_beyond_its_floor_and_more_read_projections_whole():
    assert of("1 x H200").step(8, 1, SHORT).whole == 0
    projections = 2 * 61 * 7168 * (1536 + 576)
    step = of("4 x H200").step(1, 1, 0)
    assert step.whole == pytest.approx(1e3 * projections * (1 - 1 / 4) / 4.505e12, rel=0.01)


def test_a_floor_is_its_bytes_over_the_bandwidth_and_a_step_its_parts():
    step = of("8 x H200").step(4, 1, SHORT)
    assert step.floor == pytest.approx(step.gb / 4.505)
    assert step.ms == step.floor + step.whole + step.kept + step.divided + step.sums + step.gather
    assert step.divided == pytest.approx(excess(4).divided / 8)
    assert step.experts == pytest.approx(384 * (1 - (376 / 384) ** 4))


def test_sums_cost_what_two_ranks_were_measured_to_take_and_bytes_for_each_further_rank():
    assert of("1 x H200").sum_us(8) == of("1 x H200").gather_us(8) == 0
    assert of("2 x H200").sum_us(8) == MEETINGS[8].sum
    assert of("8 x H200").sum_us(8) - MEETINGS[8].sum == pytest.approx(6 * 8 * 7168 * 4 / 397e3)
    assert of("8 x H200").gather_us(8) - MEETINGS[8].gather == pytest.approx(8 * 163840 * 4 * (7 / 8 - 1 / 2) / 397e3)


def test_between_measured_tokens_it_is_linear():
    four, eight, six = excess(4), excess(8), excess(6)
    assert six.kept == pytest.approx((four.kept + eight.kept) / 2)
    assert six.divided == pytest.approx((four.divided + eight.divided) / 2)


def test_distinct_experts_of_one_token_are_those_that_it_chooses():
    assert distinct_experts(KIMI_K26, 1) == pytest.approx(8)
    assert distinct_experts(KIMI_K26, 10_000) == pytest.approx(384)


def test_only_kimis_sizes_are_like_kimi():
    assert like_kimi(KIMI_K26)
    assert not like_kimi(KIMI_NANO)


# --------------------------------------------------------------------------------------------------------- machines


@pytest.mark.parametrize("text", ["8 x H200", "8xh200", " 8 X nvidia H200 ", "8*H200"])
def test_a_machine_is_read_however_it_is_spelled(text: str):
    assert machine(text) == Several(8, CHIPS["H200"])
    assert machine(text).name == "8 x H200"


def test_a_chip_alone_is_one():
    assert machine("B200") == Several(1, CHIPS["B200"])
    assert machine("8 x nvidia rtx  pro 6000") == Several(8, CHIPS["RTX PRO 6000"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "eight",
        "8",
        "8 x",
        "8 x H300",
        "0 x H200",
        "3 x H200",
        "65 x H200",
        "-1 x H200",
        "8 x H200 x",
        "٨ x H200",
        "[b]",
    ],
)
def test_nonsense_is_one_line_that_names_what_is_known(text: str):
    with pytest.raises(ConfigError, match=r"1, 2, 4, 8 GPUs of one host, .* chips: H100, H200, B200") as caught:
        machine(text)
    assert "\n" not in str(caught.value)
    assert repr(text) in str(caught.value)
