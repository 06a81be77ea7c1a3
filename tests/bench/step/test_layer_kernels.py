"""The layers of a step out of made-up kernels, checked by hand: the table, what is left out, and the picture."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redline.bench.step.depth import WARM_UP
from redline.bench.step.depth_gpu import GpuStep
from redline.bench.step.depth_record import DepthRecord, OpRecord
from redline.bench.step.layer_kernels import (
    OPS,
    LaneTrace,
    LayerTrace,
    Ran,
    RankTrace,
    Recording,
    kernels_of,
    layer_trace,
    op_of,
    replays,
)
from redline.bench.step.layer_kernels import layers as layers_of
from redline.bench.step.layer_lanes import COLOURS, draw, rows_of
from redline.errors import ConfigError
from redline.kernels.hopper import triton
from redline.kernels.hopper.kernel import launched_by
from redline.kernels.hopper.prefill.rowwise import norm_rows
from redline.model.k2.shapes import KIMI_NANO
from tests.bench.step.test_depth import depth
from tests.tiny_model import CPU

LAYERS = 8
FEW = "dense", "dense", "absorb", "attend", "unabsorb", "dense", "dense", "experts_up", "experts_down"
MANY = (
    *("_project_a", "_project_q", "absorb", "attend", "unabsorb", "_partial_out", "sum_ranks", "_gates"),
    *("choose_experts", "experts_up", "experts_down"),
)


def replay(layer: Sequence[str] = FEW, layers: int = LAYERS, apart: int = 10_000, early: int = 2_000) -> list[Ran]:
    """A step: each kernel ends `apart` ns behind the one in front, and begins `early` ns before that one's end."""
    names = ["embed", *(name for _ in range(layers) for name in layer), "_add_norm", "dense", "best"]
    return [Ran(name, i * apart - early, (i + 1) * apart) for i, name in enumerate(names)]


def recording(*ranks: Sequence[Sequence[Ran]], rows: int = 1) -> Recording:
    """Of each rank the replays that count; those that warm up, a mark and what lies between replays are put in."""
    ops = [
        ("project_a", 610.0, 488.0, LAYERS),
        ("experts_down", 840.0, 560.0, LAYERS - 1),
        ("dense down", 9.0, 5.0, 2),
        ("head", 9.0, 5.0, 1),
    ]
    ones = dict.fromkeys(("p10_ms", "p90_ms", "floor_ms", "bytes_per_s", "flops_per_s"), 1.0)
    step = DepthRecord(
        **ones,
        shape="kimi-k2.6",
        gpu="made up",
        ranks=len(ranks),
        layers=LAYERS,
        physical_layers=3,
        experts=384,
        rows=rows,
        tokens_per_row=1,
        context=1024,
        kv_dtype="bf16",
        routing="uniform",
        ms=0.7,
        expert_bytes=3,
        commit="abc",
        date="2026-11-26",
        versions={},
        ops=tuple(OpRecord(name=name, us=us, floor_us=floor, launches=n) for name, us, floor, n in ops),
    )
    return Recording(
        origin={"machine": "made up"},
        replays=max(len(of) for of in ranks),
        steps=(step,),
        ranks=tuple(
            RankTrace(rank=rank, ms=(0.7,), traced_ms=((0.8, 0.9, 1.0),), kernels=tuple(laid(of)))
            for rank, of in enumerate(ranks)
        ),
    )


def laid(counting: Sequence[Sequence[Ran]]) -> list[Ran]:
    """Replays one behind the other, with a kernel of torch between them."""
    found, at = [Ran("void at::cuda::(anonymous namespace)::spin_kernel(long)", 0, 100)], 10_000
    for one in [*([replay()] * WARM_UP), *counting]:
        found += [Ran(name, at + start, at + end) for name, start, end in one]
        at = found[-1].end_ns + 30_000
        found.append(Ran("void at::native::topk(float)", at - 20_000, at - 10_000))
    return found


def lane(found: LayerTrace, rank: int = 0) -> LaneTrace:
    return found.cases[0].lanes[rank]


def test_a_layer_by_hand():
    found = layer_trace(recording([replay()] * 3))
    one = lane(found)
    assert [k.op for k in one.kernels] == [
        *("project_a", "project_q", "absorb", "attend", "unabsorb"),
        *("project_out", "gates", "experts_up", "experts_down"),
    ]
    for i, k in enumerate(one.kernels):
        assert (k.start_us, k.end_us, k.us) == (10.0 * i, 10.0 * i + 12, 12.0)
        assert (k.gap_us, k.adds_us) == (-2.0, 10.0)
    assert one.layer_us == 90.0 == sum(k.adds_us for k in one.kernels)
    assert one.one == tuple((k.op, k.start_us, k.end_us) for k in one.kernels)
    assert (one.replays, one.layers, one.left_out, one.unknown) == (3, 3 * LAYERS // 2, {}, ())
    assert (one.overlaps, one.ms, one.traced_ms) == (9, 0.7, 0.9)
    assert one.span_ms == (10 * (1 + 9 * LAYERS + 3) + 2) / 1e3
    assert one.kernels[0].alone_us == 610 / LAYERS
    assert one.kernels[-1].floor_us == 560 / (LAYERS - 1)
    assert one.kernels[1].alone_us is None, "it was not timed"
    assert found.cases[0].floor_us == 488 / LAYERS + 560 / (LAYERS - 1), "what a step launches once is no layer's"
    assert "100% to 100%" in found.notes[-1]
    assert "1.089 times" in found.notes[-1]


def test_medians_are_of_layers_and_replays():
    """Of five replays two are slower: neither moves the median."""
    found = layer_trace(recording([replay(apart=11_000), *([replay()] * 3), replay(apart=15_000)]))
    assert lane(found).layer_us == 90.0
    assert lane(found).layers == 5 * LAYERS // 2


def test_where_nothing_overlaps_it_is_said():
    found = layer_trace(recording([replay(early=-500)]))
    assert lane(found).overlaps == 0
    assert {k.gap_us for k in lane(found).kernels} == {0.5}
    assert "keeps launches apart" in found.notes[-1]


def test_more_rows_over_ranks():
    found = layer_trace(recording([replay(MANY)] * 2, rows=32))
    ops = [k.op for k in lane(found).kernels]
    assert ops[:2] == ["project_a", "project_q"]
    assert ops[5:9] == ["project_out", "sum_ranks", "gates", "choose_experts"]
    assert lane(found).unknown == ()
    assert lane(found).layer_us == 110.0


def test_a_kernel_that_nobody_knows_is_shown_as_it_is():
    found = lane(layer_trace(recording([replay((*FEW[:3], "Memset (Device)", *FEW[3:], "added_later"))])))
    assert [k.op for k in found.kernels][3] == "Memset (Device)"
    assert found.kernels[-1].op == "added_later"
    assert found.unknown == ("Memset (Device)", "added_later")
    assert found.layer_us == 110.0


def test_what_is_not_whole_is_left_out_and_counted():
    whole = replay()
    no_absorb = [k for i, k in enumerate(whole) if i != 1 + 4 * 9 + 2]
    no_end = whole[:-1]
    no_first = [k for i, k in enumerate(whole) if i != 1 + 4 * 9]  # of layer 4, so layer 3 seems longer
    no_attend = [k for i, k in enumerate(whole) if i != 1 + 3 * 9 + 3]
    found = lane(layer_trace(recording([whole, no_absorb, no_end, no_first, no_attend, whole[1:]])))
    assert found.left_out == {
        "replays with 7 of 8 layers": 1,
        "replays with no best at its end": 1,
        "layers with other launches than most": 3,
        "replays that were not seen": 1,
    }
    assert (found.replays, found.layers) == (3, 3 * LAYERS // 2 - 3)
    assert found.layer_us == 90.0


def test_a_layer_of_other_products_does_not_begin_in_the_one_before():
    """Triton's kernels have names of their own: where one is missing there is no first product."""
    broken = [k for i, k in enumerate(replay(MANY)) if i != 1 + 4 * len(MANY)]
    found = lane(layer_trace(recording([replay(MANY), broken])))
    assert found.left_out == {"replays with fewer than two products in front of absorb": 1}


def test_ranks_may_have_seen_different_numbers():
    found = layer_trace(recording([replay()] * 3, [replay(apart=12_000)], [replay()[:-1]] * 2))
    first, second, third = found.cases[0].lanes
    assert (first.layer_us, second.layer_us) == (90.0, 108.0)
    assert second.left_out == {"replays that were not seen": 2}
    assert (third.kernels, third.layers, third.layer_us) == ((), 0, 0.0)
    assert third.left_out == {"replays with no best at its end": 2, "replays that were not seen": 1}


def test_what_cannot_be_told_is_refused():
    with pytest.raises(ConfigError, match=r"1 rows: no replay was recorded whole \(replays with no best at its end: 2"):
        layer_trace(recording([replay()[:-1]] * 2))
    unmarked = recording([replay()])
    bare = RankTrace(rank=0, ms=(0.7,), traced_ms=((0.8,),), kernels=unmarked.ranks[0].kernels[1:])
    with pytest.raises(ConfigError, match="rank 0: the profiler told of no kernel behind a mark"):
        layer_trace(Recording(origin={}, replays=1, steps=unmarked.steps, ranks=(bare,)))


def test_a_chrome_trace_is_read():
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "kernel", "name": "attend", "ts": 7_000_000_000_002.5, "dur": 3.25, "args": {}},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 7_000_000_000_006.0, "dur": 1.0},
        {"ph": "X", "cat": "kernel", "name": "absorb", "ts": 7_000_000_000_000.0, "dur": 3.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1.0, "dur": 1.0},
        {"ph": "M", "name": "process_name"},
    ]
    assert kernels_of({"traceEvents": events}) == [
        *(Ran("absorb", 0, 3000), Ran("attend", 2500, 5750), Ran("Memset (Device)", 6000, 7000))
    ]
    assert kernels_of({"traceEvents": []}) == []


def test_what_the_step_launches_is_known(monkeypatch: pytest.MonkeyPatch):
    """The names that a step of our kernels really has, without running them."""
    config = replace(KIMI_NANO, hidden_size=512, num_hidden_layers=LAYERS)
    step = GpuStep(depth(config, context=70, physical=3), lambda done, whole: None, CPU)
    monkeypatch.setattr("redline.model.k2.hopper.norm_rows", norm_rows.op)  # Triton's, behind the layers
    names: list[str] = []
    with launched_by(lambda source, name, *launch: names.append(name)):
        step.run()
    (one,) = replays([Ran(name, i, i + 1) for i, name in enumerate(names)])
    assert len(one) == len(names)
    found = layers_of(one)
    assert len(found) == LAYERS - 1
    assert {layer.ops for layer in found[1:]} == {lane_ops(FEW)}


def lane_ops(layer: Sequence[str]) -> tuple[str, ...]:
    return layers_of(replay(layer))[3].ops


def test_tritons_products_are_known():
    source = (Path(str(triton.__file__)).parent / "dense.py").read_text()
    launched = set(re.findall(r"launch\((_\w+),", source))
    assert {"_project_a", "_project_q", "_partial_out", "_project_out", "_gates"} == launched
    assert {op_of(name) for name in launched} <= OPS


def test_what_overlaps_lies_in_rows_of_its_own():
    apart, two, three = (lane(layer_trace(recording([replay(early=by)]))).kernels for by in (-500, 2_000, 12_000))
    assert rows_of(apart) == [0] * 9
    assert rows_of(two) == [0, 1] * 4 + [0]
    assert rows_of(three) == [0, 1, 2] * 3
    assert rows_of([apart[0]] * 4) == [0, 1, 2, 0], "no fourth row"


def test_every_op_has_a_colour_of_its_own():
    assert set(COLOURS) == OPS
    assert len(set(COLOURS.values())) == len(OPS)


def test_it_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    unknown = replay((*FEW, "a_kernel_with_a_name_that_is_longer_than_its_bar"))
    for number, ranks in enumerate([[[replay()]], [[replay()], [unknown], [replay()[:-1]], [replay(apart=12_000)]]]):
        to = tmp_path / f"{number}.png"
        draw(layer_trace(recording(*ranks)), to)
        assert to.stat().st_size > 10_000
