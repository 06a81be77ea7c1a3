"""How a step is timed, its floor, its memory, and its record."""

import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from redline.bench.step.depth import WARM_UP, DepthCase, DepthStage, Timing, depth_of, measure_step
from redline.bench.step.depth_fit import DepthMemory, check
from redline.bench.step.depth_record import PEER_MS, DepthRecord, append, read, record_of
from redline.errors import ConfigError
from redline.model.k2.shapes import KIMI_K26, KIMI_NANO
from redline.ops.op import Cost, PeakRates

H200 = PeakRates("NVIDIA H200", 4.3e12, 700e12)


def depth(config: Any = KIMI_K26, **changes: Any) -> DepthCase:
    """One token of a whole Kimi K2.6 without context, with these changes."""
    asked = {
        "layers": config.num_hidden_layers,
        "physical": changes.get("layers", config.num_hidden_layers),
        "experts": None,
        "rows": 1,
        "tokens": 1,
        "context": 0,
        "kv_dtype": torch.bfloat16,
        "overlap": 0.0,
    }
    return depth_of("kimi-k2.6" if config is KIMI_K26 else "kimi-nano", config, **{**asked, **changes})


class FakeStep:
    """Records its calls; takes no time."""

    def __init__(self, case: DepthCase) -> None:
        config = case.config
        shape = config.num_hidden_layers, case.rows * case.tokens, config.num_experts_per_tok
        self.routing = torch.zeros(shape, dtype=torch.int32)
        self.seen: list[torch.Tensor] = []
        self.turns: list[int] = []
        self.launched: list[int] = []
        self.captures: Sequence[Callable[[], object]] = [self.capture(0), self.capture(1)]
        one = DepthStage("experts", self.launched.append, Cost(1000, 10), count=7, expert_cost=Cost(100, 1))
        self.ops: Sequence[DepthStage] = [one, DepthStage("head", lambda _: None, Cost(500), count=1)]

    def capture(self, turn: int) -> Callable[[], object]:
        def run() -> None:
            self.turns.append(turn)
            self.seen.append(self.routing.clone())

        return run

    def run(self) -> object:
        raise AssertionError("a captured step must not be run eagerly")


# ---------------------------------------------------------------------------------------------------------- timing


def test_every_step_has_fresh_experts_and_layers_in_other_places():
    case = depth(KIMI_NANO, rows=2, physical=4)
    step = FakeStep(case)
    measure_step(step, case, repeats=6)
    assert step.turns[: 6 + WARM_UP] == list(itertools.islice(itertools.cycle([0, 1]), 6 + WARM_UP))
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(step.seen))


def test_an_op_goes_over_the_layers_in_memory_in_turn():
    case = depth(KIMI_NANO, physical=4)
    step = FakeStep(case)
    measure_step(step, case, repeats=6)
    assert step.launched[:6] == [1, 2, 3, 1, 2, 3], "layer 0 has no experts"


def test_an_ops_floor_has_the_experts_that_were_drawn():
    case = depth(KIMI_NANO)
    step = FakeStep(case)
    timing = measure_step(step, case, repeats=6)
    assert timing.experts == 7 * 4, "one token, seven layers with experts"
    experts, head = timing.ops
    assert experts.cost == Cost(1000 + 4 * 100, 10 + 4 * 1)
    assert head.cost == Cost(500)
    assert timing.p10_ms <= timing.ms <= timing.p90_ms


def test_distinct_experts_are_counted_once():
    case = depth(KIMI_NANO, rows=16)
    timing = measure_step(FakeStep(case), case, repeats=6)
    assert timing.experts == pytest.approx(7 * 16 * (1 - 0.75**16), rel=0.02)


# ----------------------------------------------------------------------------------------------------------- floor


@pytest.mark.parametrize(("tokens", "expected_ms"), [(1, 7.67), (4, 15.6), (8, 25.5), (32, 70.0)])
def test_the_floor_of_kimi_is_its_weights_at_the_bandwidth(tokens: int, expected_ms: float):
    """Added up by hand from the published shapes, at 4.3 TB/s."""
    chosen = 384 * (1 - (1 - 8 / 384) ** tokens)
    floor_ms = 1e3 * depth(rows=tokens).cost(60 * chosen).bytes / 4.3e12
    assert floor_ms == pytest.approx(expected_ms, rel=2e-3)


def test_the_context_is_read_once_for_all_tokens_of_a_row():
    one, four = depth(context=1000).cost(480), depth(context=1000, tokens=4).cost(480)
    assert four.bytes - one.bytes == 3 * 576 * 2 * 61
    apart = depth(context=1000, rows=4).cost(480)
    assert apart.bytes - one.bytes == 3 * 1001 * 576 * 2 * 61


def test_fewer_layers_in_memory_are_no_less_work():
    assert depth(physical=12).cost(480) == depth().cost(480)


def test_layers_with_experts_share_places_and_dense_ones_lie_alone():
    case = depth(physical=4)
    assert [case.physical_layer(layer) for layer in range(8)] == [0, 1, 2, 3, 1, 2, 3, 1]
    assert [case.physical_layer(layer, rotation=1) for layer in range(5)] == [0, 2, 3, 1, 2]


# ---------------------------------------------------------------------------------------------------------- memory


def test_memory_is_the_arithmetic_of_the_model():
    whole = DepthMemory(depth(context=1000))
    assert whole.weights == KIMI_K26.weight_bytes
    assert whole.ends + whole.dense + 60 * whole.layer == whole.weights
    assert whole.kv == 1024 * 70_272
    said = "\n".join(whole.explain())
    assert "384 experts x 24.8 MB = 9.81 GB" in said
    assert "1 rows x 1,024 tokens x (61 layers x 576 values x 2 bytes) = 72.0 MB" in said


def test_what_does_not_fit_is_refused_with_what_does():
    case = depth(context=1024, rows=32)
    free = 149 * 10**9
    refusal = str(DepthMemory(case).refusal(free))
    assert "needs 596.65 GB, but only 149.00 GB are free" in refusal
    layers = DepthMemory(case).layers_that_fit(free)
    assert f"--alias {layers}" in refusal
    assert DepthMemory(depth(context=1024, rows=32, physical=layers)).whole <= free
    assert DepthMemory(depth(context=1024, rows=32, physical=layers + 1)).whole > free
    experts = DepthMemory(case).experts_that_fit(free)
    assert f"--experts {experts}" in refusal
    assert DepthMemory(depth(context=1024, rows=32, experts=experts)).whole <= free


def test_where_nothing_fits_nothing_is_recommended():
    refusal = str(DepthMemory(depth()).refusal(10**9))
    assert "no layer fits" in refusal
    assert "--alias" not in refusal


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"physical": 62}, "alias is 62; the model has 61 layers"),
        ({"physical": 1}, "at least 2"),
        ({"experts": 7}, "experts is 7; a token needs 8"),
        ({"context": 262144}, "maximum of 262,144"),
    ],
)
def test_a_case_that_is_none_is_refused(changes: dict[str, int], says: str):
    with pytest.raises(ConfigError, match=says):
        check(depth(**changes))


def test_a_step_of_dense_layers_alone_is_one():
    check(depth(layers=1))


# ---------------------------------------------------------------------------------------------------------- records


def test_a_record_says_what_was_measured_and_where(tmp_path: Path):
    case = depth(context=1024, physical=12, rows=4)
    timing = Timing(18.0, 17.9, 18.2, 60 * 31.0, ())
    record = record_of(case, timing, H200)
    assert (record.layers, record.physical_layers, record.experts, record.routing) == (61, 12, 384, "uniform")
    assert record.expert_bytes == 60 * 31 * 24_772_608
    assert record.floor_ms == pytest.approx(15.6, rel=0.01)
    assert record.peer_ms == PEER_MS[1, 4]
    path = tmp_path / "results" / "decode-h200.json"
    append(path, record)
    append(path, msgspec.structs.replace(record, rows=8))
    assert [one.rows for one in read(path, DepthRecord)] == [4, 8]
    assert read(path, DepthRecord)[0] == record
    assert record.machine
    assert isinstance(record.cores, int)


def test_records_that_do_not_say_the_host_are_read_and_stay_as_they_were(tmp_path: Path):
    record = record_of(depth(context=1024), Timing(9.0, 9.0, 9.0, 480.0, ()), H200)
    old = msgspec.structs.replace(record, machine=msgspec.UNSET, cores=msgspec.UNSET)
    path = tmp_path / "decode.json"
    append(path, old)
    append(path, record)
    assert read(path, DepthRecord) == [old, record]
    first, second = json.loads(path.read_bytes())
    assert set(second) - set(first) == {"machine", "cores"}


def test_two_runs_that_add_to_one_file_lose_nothing(tmp_path: Path):
    record = record_of(depth(context=1024), Timing(9.0, 9.0, 9.0, 480.0, ()), H200)
    path = tmp_path / "decode.json"

    def add(rows: int) -> None:
        append(path, msgspec.structs.replace(record, rows=rows))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(24)))
    assert sorted(one.rows for one in read(path, DepthRecord)) == list(range(24))


@pytest.mark.parametrize(
    "change",
    [{"context": 4096}, {"routing": "correlated 0.4"}, {"gpu": "NVIDIA H100"}, {"rows": 2}, {"kv_dtype": "fp8"}],
)
def test_the_peer_has_a_time_at_its_own_cases_alone(change: dict[str, Any]):
    record: DepthRecord = record_of(depth(context=1024), Timing(9.0, 9.0, 9.0, 480.0, ()), H200)
    assert record.peer_ms == PEER_MS[1, 1]
    assert msgspec.structs.replace(record, **change).peer_ms is None


def test_a_file_of_something_else_is_not_added_to(tmp_path: Path):
    path = tmp_path / "decode.json"
    path.write_text('{"folder": "kimi-nano"}')
    with pytest.raises(ConfigError, match="expected a list of measured steps"):
        read(path, DepthRecord)
