"""Steps that are captured as CUDA graphs and replayed give the same tokens as eager steps.

On a CPU a captured piece is a plain call of the same torch operations over the same tensors.
"""

import dataclasses
import functools
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from redline.errors import WorkerLost
from redline.kernels.cpu import native
from redline.kernels.cuda.decode import gqa
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.cuda.step.step_rows import SLOT, SlotTensors
from redline.kernels.cuda.triton import dense as streamed
from redline.kernels.cuda.triton import linear
from redline.kernels.group import Alone
from redline.kernels.inputs import Inputs
from redline.kernels.kernel import fallbacks
from redline.messages.channel import MemoryChannel
from redline.messages.delta import Delta
from redline.messages.job import OPTIONS, PAGE_TOKENS, Job, PageId, Sampling
from redline.messages.news import Stop
from redline.messages.step import Begin, CapturedShapes, Row, Shape, Step
from redline.model.eagle3.cuda import GpuServed
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.eagle3.serve import Served
from redline.model.k2.cpu import K2
from redline.ops.draws import signed, uniforms
from redline.run.graphs import decode_step
from redline.run.graphs.cuda_graph_runner import CudaGraphRunner, SamplingNeeds, _facts, _way, _wishes
from redline.run.graphs.decode_step import DecodeStep, SamplingKind, SharedState
from redline.run.graphs.graph_recorder import Recorder
from redline.run.graphs.shapes import FIRST_SHAPES, shapes
from redline.run.runner import Runner
from redline.run.sampling.on_device import sample_rows
from redline.run.sampling.on_host import odds_of, sample_each, uniform
from redline.run.slots import Slot, Slots
from redline.scheduler.recorded import RecordedShapes
from redline.scheduler.speculation import Speculation
from redline.worker.config import DraftConfig, EngineConfig, Learned, Suffix
from redline.worker.engine import Engine, EngineCore, sizes_of
from tests.emulator.emulator import emulation
from tests.run.graphs.conftest import Open
from tests.tiny_model import (
    BLOCK,
    BOTH,
    LEARNED,
    SUFFIX,
    VOCABULARY,
    Answer,
    job,
    open_engine,
    prompt,
    run,
    run_alone,
    tiny_model,
)
from tests.waiting import LIMIT_S, until

GREEDY = {"logprobs": None}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    GREEDY,
    {"logprobs": None, "temperature": 1.0, "seed": 5, "seeded": True},
    GREEDY,
    {"logprobs": None, "min_tokens": 12, "stop_ids": (1, 2, 3)},
    {"logprobs": None, "frequency_penalty": 0.4},
    {"temperature": 1.0, "seed": 6, "seeded": True, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    {"logprobs": None, "logit_bias": ((3, 1.0), (3, 2.0))},  # a bias for the same token twice, which runs eagerly
)


def answers_of(engine: EngineCore, *waves: list[Job], every: int = 3) -> dict[str, Answer]:
    try:
        return run(engine, *waves, every=every)
    finally:
        engine.runner.close()


@functools.cache
def alone(asked: Job) -> Answer:
    """The answer of an eager engine without drafts."""
    return run_alone(tiny_model(), asked)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 5},
    "top_p": {"temperature": 0.7, "top_p": 0.9, "seed": (1 << 64) - 3},
    "all": {"temperature": 1.5, "top_p": 0.95, "top_k": 100, "min_p": 0.02, "seed": 1 << 63},
    "one": {"temperature": 0.7, "top_k": 1},
}


@pytest.mark.parametrize(
    ("slots", "positions", "reach"),
    [(64, 1, 262_144), (64, 4, 262_144), (256, 8, 262_144), (1, 1, 64), (5, 20, 2048), (300, 3, 16_384), (2, 2, 4096)],
)
def test_which_shapes_are_recorded_is_a_function_of_the_configuration(slots: int, positions: int, reach: int):
    wanted = shapes(slots, positions, reach)
    assert wanted == shapes(slots, positions, reach)
    assert len(set(wanted)) == len(wanted)
    rows, most = min(slots, 256), min(positions, 16)
    first = wanted[:FIRST_SHAPES]
    for count, asked in ((rows, min(most, 512 // rows)), (min(rows, 32), most), (1, most), (rows, 1), (1, 1)):
        assert any(shape.rows >= count and shape.positions >= asked and shape.longest >= reach for shape in first)
    assert Shape(1, 1, reach) in first
    assert max(shape.rows for shape in wanted) < 2 * rows or rows == 1
    assert {shape.positions for shape in wanted} == set(range(1, most + 1))
    assert max(shape.longest for shape in wanted) == reach
    assert max(shape.rows * shape.positions for shape in wanted) <= 512


def test_the_shapes_of_kimi_with_three_drafts():
    wanted = [(shape.rows, shape.positions, shape.longest) for shape in shapes(64, 4, 262_144)]
    assert wanted[:28] == [(*size, longest) for longest in (262_144, 2048) for size in FEW_FIRST]
    assert len(wanted) == 7 * 4 * 3
    between = [*itertools.product((1, 2, 4, 8, 16, 32, 64), (2, 3))]
    assert set(wanted[28:56]) == {(*size, longest) for size in between for longest in (262_144, 2048)}
    assert {longest for _, _, longest in wanted[56:]} == {16_384}


FEW_FIRST = (
    *((1, 1), (2, 1), (1, 4), (4, 1), (2, 4), (8, 1), (4, 4), (16, 1), (8, 4)),
    *((32, 1), (16, 4), (64, 1), (32, 4), (64, 4)),
)


def test_a_step_of_more_than_512_positions_is_not_recorded():
    deepest = {shape.rows: shape.positions for shape in sorted(shapes(256, 8, 2048), key=lambda shape: shape.positions)}
    assert deepest == {1: 8, 2: 8, 4: 8, 8: 8, 16: 8, 32: 8, 64: 8, 96: 5, 128: 4, 192: 2, 256: 2}


def test_what_is_recorded_does_not_depend_on_a_clock(captured: Open, monkeypatch: pytest.MonkeyPatch):
    """As on a machine on which an hour passes between any two reads of the clock."""
    hours = itertools.count(0.0, 3600.0)
    with monkeypatch.context() as patch:
        for clock in ("monotonic", "perf_counter"):
            patch.setattr(f"redline.clock.{clock}", lambda: next(hours))
        runner = captured(speculation=SUFFIX, max_running=64, max_model_len=20_000, pages=320).runner
        try:
            wanted = shapes(64, 4, 20_032)
            assert set(runner.recorded.shapes) == set(wanted[:FIRST_SHAPES])
            for count in range(FIRST_SHAPES + 1, len(wanted) + 1):
                assert runner.record_more()
                assert set(runner.recorded.shapes) == set(wanted[:count])
            assert not runner.record_more()
        finally:
            runner.close()


def test_memory_is_counted_for_all_that_is_recorded(captured: Open):
    config = EngineConfig(speculation=SUFFIX, max_model_len=20_000)
    counted = sizes_of(tiny_model().config, config, tiny_model().device, torch.bfloat16, free=0)
    counted = dataclasses.replace(counted, device="cuda", gpu_kernels=True).recorded_steps(20_000)
    runner = captured(speculation=SUFFIX, max_running=64, max_model_len=20_000, pages=320).runner
    try:
        while runner.record_more():
            pass
        assert set(runner.recorded.shapes) == set(counted.shapes)
        largest = runner.recorded.shapes[0]  # the first captured shape; all others share its memory pool
        assert counted.shapes[largest].between == counted.between
    finally:
        runner.close()


def test_shapes_that_the_start_has_left_are_recorded_while_nothing_runs(
    captured: Open, monkeypatch: pytest.MonkeyPatch
):
    """They are replayed from then on, unless their capture fails."""
    record = Recorder.record

    def failing(recorder: Recorder, *pieces: Any) -> Any:
        if pieces[0].__self__.shape == Shape(2, 3, 1024):
            raise RuntimeError("out of memory")
        return record(recorder, *pieces)

    monkeypatch.setattr(Recorder, "record", failing)
    monkeypatch.setattr("redline.run.graphs.cuda_graph_runner.FIRST_SHAPES", 4)
    wanted = shapes(2, 4, 1024)
    core = captured(speculation=SUFFIX, max_running=2)
    assert set(core.runner.recorded.shapes) == set(wanted[:4]) == set(itertools.starmap(Shape, FOUR))
    inbox, outbox = MemoryChannel(), MemoryChannel()
    asked = job("asked", prompt(seed=3, length=30), max_tokens=40, **GREEDY)
    told: list[Delta] = []
    thread = threading.Thread(target=core.serve, args=[inbox, outbox])
    thread.start()
    try:
        late = {shape for shape in wanted if shape != Shape(2, 3, 1024)}
        until(lambda: set(core.runner.recorded.shapes) == late)
        inbox.put(asked)
        while not told or told[-1].finish is None:
            told += [message for message in outbox.drain(wait=True, timeout=LIMIT_S) if isinstance(message, Delta)]
    finally:
        inbox.put(Stop())
        thread.join(LIMIT_S)
    assert tuple(token for delta in told for token in delta.tokens) == alone(asked).tokens
    assert core.planner._recorded._shapes == late
    assert not core.runner.led


def test_an_engine_beside_its_caller_records_what_is_left_where_it_is_told_to(
    captured: Open, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("redline.run.graphs.cuda_graph_runner.FIRST_SHAPES", 4)
    core = captured(speculation=SUFFIX, max_running=2)
    engine = Engine(core, cast(Any, None), cast(Any, None))
    asked = [job(f"{n}", prompt(seed=n, length=30), max_tokens=20, **GREEDY) for n in range(3)]
    try:
        for one in asked:
            (told,) = engine.generate([one]).values()
            assert tuple(token for delta in told for token in delta.tokens) == alone(one).tokens
            assert len(core.runner.recorded.shapes) == (4 if one is asked[0] else len(shapes(2, 4, 1024)))
            engine.record_all()
    finally:
        engine.close()
    with pytest.raises(WorkerLost, match="the engine is closed"):
        engine.record_all()


FOUR = (1, 1, 1024), (2, 1, 1024), (1, 4, 1024), (2, 4, 1024)


def test_a_device_that_breaks_while_it_records_ends_the_worker(captured: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("redline.run.graphs.cuda_graph_runner.FIRST_SHAPES", 1)
    core = captured(max_running=2)
    channel, outbox = MemoryChannel(), MemoryChannel()

    def broken(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Recorder, "record", broken)
    with pytest.raises(WorkerLost, match="could not be captured: AcceleratorError: CUDA error"):
        core.serve(channel, outbox)


def _named(runner: Runner, *rows: Row, number: int = 1) -> Step:
    """A step of decode rows, with the shape that the planner would have named."""
    at = runner.slots.at
    longest = PAGE_TOKENS * max(at[row.slot].pages + len(row.new_pages) for row in rows)
    shape = RecordedShapes(runner.recorded).choose(len(rows), max(row.count for row in rows), longest)
    return Step(number=number, rows=rows, shape=shape)


def test_a_step_replays_the_shape_that_it_names_or_the_host_leads_it(captured: Open):
    tokens = prompt(seed=3, length=30)
    answer = alone(job("asked", tokens, max_tokens=40, **GREEDY)).tokens
    runner = captured(speculation=SUFFIX).runner
    captures = runner._captured
    assert captures is not None
    kept = [Shape(2, 1, 1024), Shape(8, 1, 1024), Shape(8, 4, 1024)]
    captures._recorded = {shape: captures._recorded[shape] for shape in kept}
    captures.report = CapturedShapes(shapes=tuple(kept))
    ran: list[Shape] = []

    def forward(shape: Shape, whole: Callable[[], None]) -> None:
        ran.append(shape)
        whole()

    for shape, recorded in captures._recorded.items():
        captures._recorded[shape] = recorded._replace(forward=functools.partial(forward, shape, recorded.forward))
    try:
        for slot in range(9):
            _begin(runner, tokens, limit=64, slot=slot)

        def replayed(slots: int, drafts: int = 0, **changes: Any) -> tuple[Shape | None, list[int]]:
            """The shape that was replayed for a step of `slots` rows, and the number of tokens of the answer that each
            row got.
            """
            at = [runner.slots.at[slot].length - 30 for slot in range(slots)]
            for slot in range(slots):
                runner.place(slot, 30 + at[slot], answer[at[slot] : at[slot] + drafts])
            rows = (Row(slot=slot, start=None, count=1 + drafts, drafts=drafts) for slot in range(slots))
            step = msgspec.structs.replace(_named(runner, *rows), **changes)
            ran.clear()
            before, led = runner.replays, runner.led["shape"]
            results = runner.launch(step).wait().rows
            given = [row.tokens for row in results]
            captures.catch_up()
            assert all(row.proposed == len(row.tokens) - 1 == row.accepted for row in results)
            assert (runner.replays - before, runner.led["shape"] - led) == (len(ran), 1 - len(ran))
            assert given == [answer[first : first + len(new)] for first, new in zip(at, given, strict=True)]
            return ran[0] if ran else None, [len(new) for new in given]

        assert replayed(1) == (kept[0], [1])
        assert replayed(3) == (kept[1], [1] * 3)
        assert replayed(1, drafts=1) == (kept[2], [2])
        assert replayed(8, drafts=3) == (kept[2], [4] * 8)
        assert replayed(2, drafts=7) == (kept[2], [4] * 2), "one token for each position of the shape"
        assert replayed(1, drafts=1, shape=kept[0]) == (kept[0], [1])
        assert replayed(1, shape=kept[2]) == (kept[2], [1])
        assert replayed(9) == (None, [1] * 9)
        assert replayed(1, shape=None) == (None, [1])
        assert replayed(3, shape=kept[0]) == (None, [1] * 3), "more rows than the shape has"
        assert replayed(1, shape=Shape(1, 1, 1024)) == (None, [1]), "this shape was not captured here"
        captures._recorded[Shape(4, 1, 64)] = captures._recorded[kept[0]]
        assert replayed(1, shape=Shape(4, 1, 64)) == (None, [1]), "the shape's context is shorter than the row's"
    finally:
        runner.close()


def test_a_shape_that_cannot_be_recorded_is_left_to_the_host(captured: Open, monkeypatch: pytest.MonkeyPatch):
    record = Recorder.record

    def failing(recorder: Recorder, *pieces: Any) -> Any:
        if pieces[0].__self__.shape.rows == 2:
            raise RuntimeError("out of memory")
        return record(recorder, *pieces)

    monkeypatch.setattr(Recorder, "record", failing)
    jobs = [job(f"{n}", prompt(seed=n, length=40), max_tokens=30, logprobs=None) for n in range(2)]
    engine = captured(max_running=2)
    assert answers_of(engine, jobs) == {one.id: alone(one) for one in jobs}
    assert engine.runner.led["shape"] > 20


def test_where_ranks_share_the_model_a_shape_that_one_cannot_record_ends_it(
    captured: Open, monkeypatch: pytest.MonkeyPatch
):
    """The other ranks have captured the shape and would replay it without this one: at the start, and later."""

    class Two(Alone):
        ranks = 2

    record, failing_rows = Recorder.record, 2

    def failing(recorder: Recorder, *pieces: Any) -> Any:
        if pieces[0].__self__.shape.rows == failing_rows:
            raise RuntimeError("out of memory")
        return record(recorder, *pieces)

    monkeypatch.setattr(tiny_model(), "group", Two())
    monkeypatch.setattr(Recorder, "record", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        captured(max_running=2)
    failing_rows = 0
    monkeypatch.setattr("redline.run.graphs.cuda_graph_runner.FIRST_SHAPES", 1)
    runner = captured(max_running=2).runner
    try:
        failing_rows = 2
        with pytest.raises(RuntimeError, match="out of memory"):
            all(iter(runner.record_more, False))
    finally:
        runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_one_answer_is_replayed_behind_its_prompt(captured: Open, kind: str):
    asked = job("asked", prompt(seed=1, length=70), max_tokens=150, logprobs=None, **KINDS[kind])
    engine = captured()
    assert answers_of(engine, [asked])["asked"] == alone(asked)
    assert (engine.runner.replays, engine.runner.chunks) == (149, 1)
    assert not engine.runner.led


def test_a_recording_that_fails_ends_the_start_and_is_not_waited_for(captured: Open, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("redline.run.graphs.graph_recorder.Recorder.record", broken)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        captured()


def test_whatever_breaks_the_thread_that_records_is_raised(captured: Open, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise MemoryError("no room for a plan")

    monkeypatch.setattr("redline.run.graphs.cuda_graph_runner.CudaGraphRunner._plan", broken)
    with pytest.raises(MemoryError, match="no room for a plan"):
        captured()


@pytest.mark.parametrize("count", [2, 3, 5, 16])
def test_rows_beside_rows_that_only_fill_a_shape_up(captured: Open, count: int):
    kinds = list(KINDS.values())
    jobs = [
        job(f"{n}", prompt(seed=n, length=5 + 31 * n % 200), max_tokens=60 + n, logprobs=None, **kinds[n % len(kinds)])
        for n in range(count)
    ]
    engine = captured(pages=128)
    answers = answers_of(engine, jobs)
    assert answers == {one.id: alone(one) for one in jobs}
    assert engine.runner.replays >= 60


def test_answers_that_end_and_begin_among_others_that_the_host_leads(captured: Open):
    """Replayed and eager steps alternate: prompts in chunks, draws, penalties, pre-emption and cached prefixes, with
    few pages.
    """
    waves = [
        [
            job(f"{wave}.{n}", prompt(seed=n % 3, length=20 + 25 * n), max_tokens=120 + 15 * n, **sampling)
            for n, sampling in enumerate(SAMPLINGS[: 1 + wave % 3 * 3])
        ]
        for wave in range(5)
    ]
    engine = captured(pages=12, max_model_len=400, step_tokens=90)
    answers = answers_of(engine, *waves, every=110)
    load = engine.planner.load()
    assert load.preemptions > 0
    assert load.prompt_tokens_cached > 0
    assert engine.runner.replays > 200
    assert engine.runner.led["sampling: too many logit biases, or two of one token"] > 100
    for wave in waves:
        for asked in wave:
            assert answers[asked.id]._replace(cached_tokens=0) == alone(asked), asked.id


@pytest.mark.parametrize("speculation", [SUFFIX, BOTH, LEARNED, BLOCK], ids=["suffix", "both", "drafter", "block"])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_drafts_change_nothing(captured: Open, speculation: DraftConfig, drafts: int):
    kinds = [{}, {}, {"temperature": 0.01, "seeded": True, "seed": 3, "top_p": 0.9}]
    jobs = [
        job(f"{n}", prompt(seed=n, length=40 + 25 * n), max_tokens=90 - n, logprobs=None, **kind)
        for n, kind in enumerate(kinds)
    ]
    engine = captured(speculation=msgspec.structs.replace(speculation, tokens=drafts))
    answers = answers_of(engine, jobs)
    assert engine.runner.replays > 20
    # A random drafter is rarely right.
    assert sum(answer.accepted for answer in answers.values()) > 0 or isinstance(speculation, Learned)
    for asked in jobs:
        assert answers[asked.id].tokens == alone(asked).tokens


OTHER_DRAFTERS: dict[str, tuple[dict[str, Any], int]] = {
    "a head in 8 bits": ({}, 8),
    "the target's head in 8 bits": ({"draft_vocab_size": None}, 8),
    "a part of the vocabulary": ({"draft_vocab_size": 96}, 16),
    "a part of the vocabulary in 8 bits": ({"draft_vocab_size": 96}, 8),
}


@pytest.mark.parametrize("name", OTHER_DRAFTERS)
def test_other_drafters_change_nothing_and_draft_the_targets_tokens(
    captured: Open, monkeypatch: pytest.MonkeyPatch, name: str
):
    """In CUDA graph rounds the token ids stored on the device are ids of the target's vocabulary, not
    of the drafter's.
    """
    sizes, head_bits = OTHER_DRAFTERS[name]
    torch.manual_seed(4)
    drafter = Eagle3(Eagle3Config.for_target(tiny_model().config, **sizes))
    known = set(range(VOCABULARY))
    if drafter.token_ids() is not None:
        drafter.keep(torch.randperm(VOCABULARY)[:96])
        known = set(drafter.token_ids().tolist())
    drafter.prepare(tiny_model(), head_bits)
    drafted: set[int] = set()

    def keep_drafts(token_B: torch.Tensor, *rest: Any) -> None:
        drafted.update(token_B.tolist())
        kept(token_B, *rest)

    kept = decode_step.keep_drafts
    monkeypatch.setattr(decode_step, "keep_drafts", keep_drafts)
    asked = [job(f"{n}", prompt(seed=n, length=40 + 25 * n), max_tokens=60 - n, logprobs=None) for n in range(3)]
    led, replayed = (opened(speculation=LEARNED, drafter=drafter) for opened in (open_tiny_engine, captured))
    replayed_answers, led_answers = answers_of(replayed, asked), answers_of(led, asked)
    assert replayed.runner.replays > 20
    assert len(drafted) > 10
    assert drafted <= known
    for one in asked:
        assert replayed_answers[one.id].tokens == led_answers[one.id].tokens == alone(one).tokens
        assert replayed_answers[one.id].accepted == led_answers[one.id].accepted


class GpuServedBesideACpu(GpuServed):
    """A drafter with bf16 features, as on a GPU, for a model with a float32 residual stream."""

    def fuse(self, features_NF: torch.Tensor, sources: Sequence[int] | None = None) -> torch.Tensor:
        return super().fuse(features_NF, sources).float()

    def forward(
        self, inputs: Inputs, feature_TD: torch.Tensor, plane: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(inputs, feature_TD.to(torch.bfloat16), plane)


@pytest.mark.skipif(native.find_compiler() is None, reason="emulation needs a C++ compiler")
def test_a_gpus_llama_drafter_drafts_in_recorded_rounds_what_the_reference_drafts(
    captured: Open, monkeypatch: pytest.MonkeyPatch
):
    """The drafter's GPU kernels, emulated thread by thread on the CPU; a reduced vocabulary, its head in 8 bits.

    Few Triton programs are launched, since Triton's interpreter is as slow for a small one as for a large one.
    """
    monkeypatch.setattr(gqa, "_PROGRAMS", 12)
    for products in (linear, streamed):
        monkeypatch.setattr(products, "block_rows", lambda *_: 256)
    model = tiny_model()
    config = Eagle3Config.for_target(model.config, architecture="llama", num_key_value_heads=2, draft_vocab_size=96)
    torch.manual_seed(4)
    drafter = Eagle3(config)
    drafter.keep(torch.randperm(VOCABULARY)[:96])
    drafter.prepare(model, 8)
    asked = [job(f"{n}", prompt(seed=n, length=59 + n), max_tokens=8, logprobs=None) for n in range(2)]
    drafted: list[list[list[int]]] = []

    def launch(self: CudaGraphRunner, step: Step, wants: SamplingNeeds, masks: Any) -> Any:
        replay = launched(self, step, wants, masks)
        drafted[-1].extend(outcome.drafts for outcome in replay.outcomes)
        return replay

    def emulating(runner: Runner) -> None:
        with emulation():
            serve(runner)

    launched, serve = CudaGraphRunner.launch, Runner._serve
    monkeypatch.setattr(CudaGraphRunner, "launch", launch)
    answers: list[dict[str, Answer]] = []
    for on_gpu in (False, True):
        if on_gpu:
            head = Tiled.prepare(model.head.dense())
            monkeypatch.setattr(
                drafter, "_served", GpuServedBesideACpu(config, drafter.state_dict(), model.embedding_VD, head, 8)
            )
            monkeypatch.setattr(Runner, "_serve", emulating)
        before = fallbacks.copy()
        drafted.append([])
        answers.append(answers_of(captured(speculation=LEARNED, drafter=drafter, max_running=2), asked))
        if on_gpu:
            assert all(fallbacks[name] == before[name] for name in ("keep_rows", "attend_grouped", "head_8", "gates"))
    assert [answer.tokens for answer in answers[0].values()] == [answer.tokens for answer in answers[1].values()]
    assert [one.tokens for one in answers[0].values()] == [alone(one).tokens for one in asked]
    pairs = [*zip(*(itertools.chain.from_iterable(each) for each in drafted), strict=True)]
    assert len(pairs) > 20
    assert sum(a == b for a, b in pairs) > 0.9 * len(pairs)


def open_tiny_engine(**config: Any) -> EngineCore:
    return open_engine(tiny_model(), **config)


def test_drafts_of_the_models_own_answer_all_hold(captured: Open):
    """The drafts given to the runner are not a drafter's: they are the answer itself, and the answer with one token
    replaced.
    """
    tokens = prompt(seed=3, length=30)
    answer = alone(job("asked", tokens, max_tokens=40, **GREEDY)).tokens
    engine = captured(speculation=Suffix(tokens=5, adaptive=False))
    runner = engine.runner
    try:
        first = _begin(runner, tokens, limit=70)
        assert first == answer[:1]
        runner.place(0, 31, answer[1:6])
        assert _decode(runner, drafts=5) == (answer[1:7], 5, 5)
        runner.place(0, 37, (*answer[7:9], (answer[9] + 1) % 512, answer[10]))
        assert _decode(runner, drafts=5) == (answer[7:10], 4, 2)
        assert _decode(runner, drafts=5) == (answer[10:11], 0, 0)
        assert runner.replays == 3
    finally:
        runner.close()


@pytest.mark.skipif(native.find_compiler() is None, reason="emulation needs a C++ compiler")
def test_steps_around_a_gpus_kernels_are_the_same_steps(captured: Open, monkeypatch: pytest.MonkeyPatch):
    """The kernels that build a step's inputs and settle it, emulated thread by thread on the CPU."""
    serve = Runner._serve

    def emulating(runner: Runner) -> None:
        with emulation():
            serve(runner)

    monkeypatch.setattr(Runner, "_serve", emulating)
    kinds = [{}, {"temperature": 0.8, "seed": 3, "seeded": True}, {"frequency_penalty": 0.3, "logit_bias": ((7, 2.0),)}]
    jobs = [
        job(f"{n}", prompt(seed=n, length=50 + 25 * n), max_tokens=20 - n, logprobs=None, **kind)
        for n, kind in enumerate(kinds)
    ]
    engine = captured(speculation=SUFFIX, max_running=4)
    before = fallbacks.copy()
    answers = answers_of(engine, jobs)
    assert engine.runner.replays > 5
    assert all(fallbacks[name] == before[name] for name in ("step_rows", "adjust", "best", "verify_drafts"))
    for asked in jobs:
        assert answers[asked.id].tokens == alone(asked).tokens


def test_a_row_that_draws_without_a_seed_stays_in_the_recorded_round(captured: Open):
    """Its tokens are drawn as without a drafter, and drafts equal to the drawn tokens are accepted."""
    asked = job("asked", prompt(seed=1, length=70), max_tokens=40, logprobs=None, temperature=1.0, seed=3)
    engine = captured(speculation=msgspec.structs.replace(LEARNED, tokens=2))
    assert answers_of(engine, [asked])["asked"].tokens == alone(asked).tokens
    assert not engine.runner.led
    assert engine.runner.replays > 10


def test_no_row_goes_beyond_its_limit(captured: Open):
    tokens = prompt(seed=3, length=30)
    answer = alone(job("asked", tokens, max_tokens=40, **GREEDY)).tokens
    engine = captured(speculation=Suffix(tokens=5, adaptive=False))
    runner = engine.runner
    try:
        _begin(runner, tokens, limit=34)
        runner.place(0, 31, answer[1:6])
        assert _decode(runner, drafts=5) == (answer[1:4], 2, 2)
        assert _decode(runner, drafts=0) == ((), 0, 0)
        assert _decode(runner, drafts=3) == ((), 0, 0)
    finally:
        runner.close()


def test_a_logit_that_is_not_finite_ends_its_own_job_only(captured: Open, monkeypatch: pytest.MonkeyPatch):
    model = tiny_model()
    whole = model.logits
    jobs = [job(f"{n}", prompt(seed=n, length=20 + n), max_tokens=20, **GREEDY) for n in range(3)]
    expected = {one.id: alone(one) for one in jobs}

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = whole(hidden)
        if logits.shape[0] == 4 and engine.runner.replays == 9:
            logits[1, 7] = torch.nan
        return logits

    engine = captured()
    monkeypatch.setattr(model, "logits", broken)
    answers = answers_of(engine, jobs)
    assert answers["1"].error is not None
    assert "non-finite" in answers["1"].error
    assert answers["1"].tokens == expected["1"].tokens[: len(answers["1"].tokens)]
    assert len(answers["1"].tokens) < 20
    assert answers["0"] == expected["0"]
    assert answers["2"] == expected["2"]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}], ids=repr)
def test_a_replayed_row_of_which_nothing_can_be_drawn_ends_its_own_job_only(
    captured: Open, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Every logit is finite, but divided by a very low temperature none is: without a check, token V was written into
    the slot.
    """
    model, whole, steps = tiny_model(), tiny_model().logits, 0
    cold = {"temperature": 2e-5, "seed": 3, **options}
    jobs = [job("0", prompt(seed=0, length=20), max_tokens=20, **GREEDY)]
    jobs.append(job("1", prompt(seed=1, length=21), max_tokens=20, logprobs=None, **cold))

    def huge(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += hidden.shape[0] == 2
        return whole(hidden) * (1e34 if steps > 5 else 1)

    engine = captured()
    before = engine.runner.replays
    monkeypatch.setattr(model, "logits", huge)
    answers = answers_of(engine, jobs)
    monkeypatch.undo()
    assert engine.runner.replays > before + 10
    assert (answers["1"].finish, len(answers["1"].tokens) < 20) == ("error", True)
    assert "non-finite" in answers["1"].error
    assert all(token < VOCABULARY for token in answers["1"].tokens)
    assert answers["0"] == alone(jobs[0])


def test_rows_drawn_together_are_those_that_are_drawn_alone():
    generator, pick = torch.Generator().manual_seed(0), random.Random(0)
    for vocabulary in (50, 512, 4096, 20000):
        logits = torch.randn(40, vocabulary, generator=generator) * 3
        asked = [
            Sampling(
                max_tokens=1,
                temperature=pick.choice([0.3, 1.0, 1.7]),
                top_p=pick.choice([1, 0.9, 0.5, 0.999]),
                top_k=pick.choice([0, 0, 1, 40, 300, 4096]),
                min_p=pick.choice([0, 0, 0.05]),
                seed=pick.choice([0, 5, (1 << 64) - 1, 1 << 63, 12345678901234]),
            )
            for _ in logits
        ]
        positions = [pick.randrange(100_000) for _ in logits]
        odds = torch.tensor([odds_of(one) for one in asked], dtype=torch.float64)
        seeds = torch.tensor([signed(one.seed) for one in asked])
        each = [uniform(one.seed, position) for one, position in zip(asked, positions, strict=True)]
        assert uniforms(seeds, torch.tensor(positions)).tolist() == each
        alone = [sample_each(row[None], [one], [u])[0] for row, one, u in zip(logits, asked, each, strict=True)]
        assert sample_each(logits, asked, each) == alone
        assert sample_rows(logits, odds, seeds, torch.tensor(positions), narrowed=True).tolist() == alone


def test_the_pieces_look_at_no_number(monkeypatch: pytest.MonkeyPatch):
    """They neither read values on the host nor have shapes that depend on values: tensors without contents (meta
    tensors) suffice.
    """
    whole = tiny_model()  # before: all tests share this model, and it keeps the layouts that it was built with
    monkeypatch.setattr("redline.kernels.cpu.native.library", lambda: None)

    class Model:
        device, config = whole.device, whole.config

        def forward(self, inputs: Inputs, planes: torch.Tensor, layers: object) -> tuple[torch.Tensor, None]:
            hidden = whole.embedding_VD[inputs.ids_T].float()
            planes.flatten(1, 2)[0, inputs.rows_T] = hidden[:, : planes.shape[-1]].to(planes.dtype)
            return hidden, None

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden @ whole.embedding_VD.float().T

    model: Any = Model()
    kv: Any = SimpleNamespace(planes=torch.zeros(1, 17, 64, 64), pages=16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        shared = SharedState(model, Slots(20, 1024, VOCABULARY, whole.device), kv)
        for shape in (Shape(1, 1, 1024), Shape(4, 3, 2048), Shape(64, 8, 1024)):
            step = DecodeStep(shared, shape)
            step.forward()
            for kind in SamplingKind:
                step.settle(kind)
                step.settle(kind, adjusted=True)
            step.score()


def test_what_steps_cost_is_measured_over_replayed_ones(captured: Open):
    engine = captured(speculation=Learned(drafter="tiny", suffix=False))
    assert engine.runner.replays > 100
    asked = job("asked", prompt(seed=1, length=70), max_tokens=60, **GREEDY)
    assert answers_of(engine, [asked])["asked"].tokens == alone(asked).tokens


def test_a_step_can_be_launched_before_the_one_before_is_read(captured: Open):
    tokens = prompt(seed=3, length=30)
    answer = alone(job("asked", tokens, max_tokens=40, **GREEDY)).tokens
    runner = captured().runner
    try:
        _begin(runner, tokens, limit=70)
        steps = [_named(runner, Row(slot=0, start=None, count=1), number=n) for n in range(20)]
        launched = [runner.launch(step) for step in steps]
        assert [token for one in reversed(launched) for token in one.wait().rows[0].tokens] == [*answer[20:0:-1]]
    finally:
        runner.close()


def test_the_board_is_nobodys_where_no_row_writes(captured: Open):
    """After a step of 3 rows in a shape of 4, the pages and slots of other jobs are unchanged."""
    runner = captured().runner
    try:
        runner.kv.planes.zero_()
        for slot in range(3):
            _begin(runner, prompt(seed=slot, length=20), limit=60, slot=slot)
        planes, tokens = runner.kv.planes.clone(), runner.slots.tokens.clone()
        rows = (Row(slot=slot, start=None, count=1) for slot in range(3))
        runner.launch(_named(runner, *rows)).wait()
        changed = (runner.kv.planes != planes).any(-1).any(0)
        changed[runner.kv.pages] = False
        assert changed.nonzero().tolist() == [[slot, 20] for slot in range(3)]
        assert (runner.slots.tokens != tokens)[:-1].nonzero().tolist() == [[slot, 21] for slot in range(3)]
    finally:
        runner.close()


def _begin(runner: Runner, tokens: tuple[int, ...], limit: int, slot: int = 0) -> tuple[int, ...]:
    begin = Begin(slot=slot, tokens=tokens, prompt=len(tokens), pages=(), sampling=_greedy(), limit=limit)
    row = Row(slot=slot, start=0, count=len(tokens), new_pages=(PageId(slot), PageId(slot + 16)))
    return runner.launch(Step(number=0, begins=(begin,), rows=(row,))).wait().rows[0].tokens


def _greedy() -> Sampling:
    return Sampling(max_tokens=64, temperature=0.0)


def _decode(runner: Runner, drafts: int) -> tuple[tuple[int, ...], int, int]:
    row = Row(slot=0, start=None, count=1 + drafts, drafts=drafts)
    given = runner.launch(_named(runner, row)).wait().rows[0]
    assert given.error is None
    return given.tokens, given.proposed, given.accepted


def test_no_option_of_sampling_is_lost_on_the_way_to_the_device():
    """Each option is a fact of the slot that the plan sends, a request to adjust its logits, or used
    by the host alone.
    """
    # The length limit, stop tokens, prompt log probabilities, the choice of verification, masks, and how many log
    # probabilities are reported.
    by_host = {"max_tokens", "stop_ids", "prompt_logprobs", "seeded", "logprobs", "grammar"}
    plain = Sampling(max_tokens=9, temperature=0.5)
    others = {option.name: option.example for option in OPTIONS.values() if option.name not in by_host}
    assert set(others) | by_host == set(Sampling.__struct_fields__)
    for name, value in others.items():
        sampling = msgspec.structs.replace(plain, **{name: value}, stop_ids=(1,))
        slot, other = Slot(sampling=sampling, limit=99), Slot(sampling=plain, limit=99)
        assert _facts(slot) != _facts(other) or (_wishes(slot) != _wishes(other) and _way(slot, 512).until), name


@pytest.mark.parametrize("seed", range(8))
def test_a_drafters_rows_stay_in_their_slots_own_pages(captured: Open, monkeypatch: pytest.MonkeyPatch, seed: int):
    """Few pages, pre-emption, rows with different numbers of drafts, and drafts that are mostly accepted. Entries of a
    page table past the slot's own pages are stale, and name pages that now belong to other slots.
    """
    pick, known, strays = random.Random(seed), [], []
    engines: list[EngineCore] = []

    def owned(slot: int) -> set[int]:
        slots = engines[0].runner.slots
        return {engines[0].runner.kv.pages, *slots.tables[slot, : slots.at[slot].pages].tolist()}

    def forward(self: Served, inputs: Inputs, feature: torch.Tensor, plane: torch.Tensor) -> Any:
        if engines and inputs.longest is not None:
            each = inputs.rows_T.shape[0] // inputs.slots_Q.shape[0]
            slots = inputs.slots_Q.repeat_interleave(each).tolist()
            rows = zip(inputs.rows_T.tolist(), slots, strict=True)
            strays.extend((row, slot) for row, slot in rows if row // PAGE_TOKENS not in owned(slot))
            assert int(inputs.lengths_Q.max()) <= inputs.longest
        return passed(self, inputs, feature, plane)

    def keep_drafts(token_B: torch.Tensor, plan_BC: torch.Tensor, slots: SlotTensors, *rest: Any) -> None:
        for row, slot in enumerate(plan_BC[:, SLOT].tolist()):
            end = int(slots.lengths[slot] + slots.drafted[slot])
            have = tuple(slots.tokens[slot, : slots.lengths[slot]].tolist())
            right = [answer for answer in known if answer[: len(have)] == have and len(answer) > end]
            if right and pick.random() < 0.8:
                token_B[row] = right[0][end]
        kept(token_B, plan_BC, slots, *rest)

    passed, kept, lengths = Served.forward, decode_step.keep_drafts, Speculation.lengths
    monkeypatch.setattr(Served, "forward", forward)
    monkeypatch.setattr(decode_step, "keep_drafts", keep_drafts)
    monkeypatch.setattr(
        Speculation, "lengths", lambda self, *asked: [min(n, pick.choice((0, 1, 2, 3))) for n in lengths(self, *asked)]
    )
    jobs = [
        job(
            f"{n}",
            prompt(seed=n % 3, length=pick.choice((30, 61, 62, 63, 64, 65, 127, 128))),
            max_tokens=pick.choice((1, 3, 30, 62, 66, 100)),
            logprobs=None,
        )
        for n in range(9)
    ]
    known += [asked.tokens + alone(asked).tokens for asked in jobs]
    engines.append(captured(speculation=LEARNED, pages=pick.choice((6, 8, 64)), max_running=4, max_model_len=512))
    answers = answers_of(engines[0], jobs[:3], jobs[3:6], jobs[6:], every=pick.choice((2, 7, 20)))
    assert not strays
    assert [asked.id for asked in jobs if answers[asked.id].tokens != alone(asked).tokens] == []
    assert sum(answer.accepted for answer in answers.values()) > 50


def test_the_positions_of_a_row_are_queries_of_one_slot_side_by_side(captured: Open, monkeypatch: pytest.MonkeyPatch):
    """Also for the positions that a row does not use, and for padding rows: attention may group their queries."""
    seen: list[Inputs] = []

    def forward(self: K2, inputs: Inputs, *rest: Any) -> Any:
        if inputs.longest is not None:
            seen.append(inputs)
        return passed(self, inputs, *rest)

    passed = K2.forward
    monkeypatch.setattr(K2, "forward", forward)
    jobs = [job(f"{n}", prompt(seed=n, length=40 + n), max_tokens=12 + n, logprobs=None) for n in range(3)]
    answers_of(captured(speculation=LEARNED, max_running=3), jobs)
    assert len({inputs.positions for inputs in seen}) > 1
    for inputs in seen:
        slots_BK = inputs.slots_Q.view(-1, inputs.positions)
        assert torch.equal(slots_BK, slots_BK[:, :1].expand_as(slots_BK))
        assert torch.equal(inputs.tokens_Q, torch.arange(inputs.count, dtype=torch.int32))
    lengths = [inputs.lengths_Q.view(-1, inputs.positions).diff() for inputs in seen if inputs.positions > 1]
    assert any((each == 1).any() for each in lengths)
    assert any((each < 1).any() for each in lengths), "no position was left unused by its row"


def test_behind_its_last_draft_a_row_writes_nothing(captured: Open):
    """Slot 0 had two pages and has one now; its position 64 would be the first of a page that now belongs to another
    job.
    """
    runner = captured(speculation=LEARNED).runner

    def begin(slot: int, length: int, *pages: int) -> None:
        tokens = prompt(seed=slot, length=length)
        begins = Begin(slot=slot, tokens=tokens, prompt=length, pages=(), sampling=_greedy(), limit=200, drafting=True)
        row = Row(slot=slot, start=0, count=length, new_pages=tuple(map(PageId, pages)), drafting=True)
        runner.launch(Step(number=0, begins=(begins,), rows=(row,))).wait()

    try:
        begin(0, 70, 5, 6)
        begin(0, 62, 0)
        begin(1, 70, 6, 7)
        before = runner.kv.draft[6, 0].clone()
        wanted = {0: 1, 1: 3}
        rows = (Row(slot=slot, start=None, count=1, drafting=True, propose=n) for slot, n in wanted.items())
        runner.launch(_named(runner, *rows)).wait()
        assert runner.replays == 1
        assert torch.equal(runner.kv.draft[6, 0], before)
    finally:
        runner.close()


def test_a_launch_that_raises_ends_its_jobs_before_the_next_step_runs(captured: Open, monkeypatch: pytest.MonkeyPatch):
    """Slot 0 had a long job, of which the device still has the state; the begin of its new job was not sent to the
    device, because a launch failed half way. The next step, already launched, must not write into the long job's former
    pages.
    """
    runner = captured(max_running=2).runner

    def begin(slot: int, tokens: tuple[int, ...], first_page: int, pages: int, **asked: Any) -> None:
        sampling = Sampling(max_tokens=400, temperature=0.0, **asked)
        begins = Begin(
            slot=slot, tokens=tokens, prompt=len(tokens), pages=(), sampling=sampling, limit=len(tokens) + 300
        )
        new = tuple(PageId(first_page + n) for n in range(pages))
        row = Row(slot=slot, start=0, count=len(tokens), new_pages=new)
        runner.launch(Step(number=0, begins=(begins,), rows=(row,))).wait()

    def half_way(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    try:
        begin(0, prompt(1, 300), 0, 5)
        runner.launch(_named(runner, Row(slot=0, start=None, count=1))).wait()
        begin(0, prompt(2, 10), 8, 1, prompt_logprobs=1)  # eager: the device gets the begin with the next plan
        begin(1, prompt(3, 10), 9, 1, prompt_logprobs=1, frequency_penalty=0.5)
        planes = runner.kv.planes.clone()
        rows = [Row(slot=slot, start=None, count=1) for slot in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr("redline.run.graphs.cuda_graph_runner.CudaGraphRunner._tell_wishes", half_way)
            failed = runner.launch(_named(runner, *rows))
            with pytest.raises(torch.OutOfMemoryError):
                failed.wait()
        given = runner.launch(_named(runner, *rows)).wait().rows
        assert [row.error for row in given] == ["an earlier step of this slot failed"] * 2
        assert torch.equal(runner.kv.planes.view(torch.int16), planes.view(torch.int16))
    finally:
        runner.close()
