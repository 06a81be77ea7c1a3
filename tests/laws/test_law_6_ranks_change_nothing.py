"""Law 6: n ranks = one rank, to rounding.

An all-reduce sums in another order than a single rank does, so logits differ in their last bits; all ranks have the
same bits. A greedy or seeded token may differ only at a near tie, and these are counted.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from redline.chat.tokenizer import Tokenizer
from redline.errors import ConfigError, RankLost, WorkerLost
from redline.kernels.cpu.all_reduce import SharedMemoryGroup
from redline.kernels.inputs import Chunk, Inputs
from redline.messages.codec import Wire
from redline.messages.job import PAGE_TOKENS, Grammar, Job
from redline.messages.step import Drawn, Step
from redline.model.k2 import cpu
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import K2Config
from redline.model.k2.cpu import K2
from redline.model.k2.write import random_checkpoint
from redline.run import runner
from redline.worker import rank as follower
from redline.worker import ranks as worker_ranks
from redline.worker.config import EngineConfig, Learned, Suffix
from redline.worker.drawn import DigestComparison
from redline.worker.engine import EngineCore
from tests import forked
from tests.lost_ranks import at_step
from tests.tiny_model import CPU, Answer, job, kernel_config, run
from tests.waiting import until

MODELS = Path(__file__).parents[2] / "models"
TEXT = (MODELS.parent / "LICENSE").read_text()[:4000]
NANO = MODELS / "kimi-nano"
PROMPT = 100


def eight_heads() -> K2Config:
    return kernel_config(num_attention_heads=8, moe_intermediate_size=256, intermediate_size=256)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("eight")
    random_checkpoint(folder, eight_heads())
    return Checkpoint.open(folder)


# ---------------------------------------------------------------------------------------------------------- the model


def step(model: K2, first: int, count: int) -> Inputs:
    """Inputs for positions [first, first + count) of slot 0: a chunk, or a decode row."""
    positions = torch.arange(first, first + count)
    cos, sin = model.angles(positions)
    queries = torch.arange(0 if first == 0 else count, dtype=torch.int32)
    ids = torch.randint(model.config.vocab_size, (512,), generator=torch.Generator().manual_seed(0))
    return Inputs(
        ids_T=ids[positions],
        cos_T=cos,
        sin_T=sin,
        rows_T=positions,
        chunks=(Chunk(0, count, 0, 0),) if first == 0 else (),
        tokens_Q=queries,
        slots_Q=torch.zeros_like(queries),
        lengths_Q=queries + first + 1,
        tables=torch.arange(4, dtype=torch.int32)[None],
    )


def states_of(model: K2, dtype: torch.dtype) -> Tensor:
    """[positions, V + D]: logits and the hidden states before them, of a prompt's every position and some decoded.

    The logits of all ranks are the same tensor, gathered from the parts of each, even if their inputs differed; that
    the all-reduces give the same bits shows in the hidden states, which each rank computes for itself.
    """
    planes = torch.zeros(model.config.num_hidden_layers, 4, 64, model.config.kv_width, dtype=dtype)
    parts: list[Tensor] = []
    for first, count in ((0, PROMPT), *((position, 1) for position in range(PROMPT, PROMPT + 6))):
        out = model.predict(step(model, first, count), planes, (), range(count))
        parts.append(torch.cat([out.logits(), out.hidden()], 1))
    return torch.cat(parts)


def together(file: Path, ranks: int, work: Callable[[SharedMemoryGroup], Tensor]) -> list[Tensor]:
    """The results of all ranks, run as threads of this process."""
    SharedMemoryGroup.create(file, ranks)
    results: dict[int, Tensor] = {}

    def rank(number: int) -> None:
        with torch.inference_mode():
            results[number] = work(SharedMemoryGroup(file, number, ranks))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(ranks)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06)], ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_states_are_those_of_one_rank_and_the_same_on_all(
    ranks: int, dtype: torch.dtype, bound: float, tiny: Checkpoint, tmp_path: Path
) -> None:
    want = states_of(cpu.load(tiny, CPU), dtype)
    got = together(tmp_path / "meet", ranks, lambda group: states_of(cpu.load(tiny, CPU, group=group), dtype))
    assert all(torch.equal(got[0], other) for other in got), "the ranks' bits differ"
    for values, expected in zip(*(both.split(tiny.config.vocab_size, 1) for both in (got[0], want)), strict=True):
        assert (values - expected).abs().max() <= bound * expected.abs().max()


def test_ranks_that_route_within_groups_have_the_states_of_one(tmp_path: Path) -> None:
    groups = replace(eight_heads(), n_routed_experts=32, num_experts_per_tok=8, n_group=8, topk_group=4)
    random_checkpoint(tmp_path, groups, quantization="fp8", layout="deepseek")
    deepseek = Checkpoint.open(tmp_path)
    want = states_of(cpu.load(deepseek, CPU), torch.float32)
    got = together(tmp_path / "meet", 2, lambda group: states_of(cpu.load(deepseek, CPU, group=group), torch.float32))
    assert torch.equal(got[0], got[1]), "the ranks' bits differ"
    assert (got[0] - want).abs().max() <= 1e-5 * want.abs().max()


def test_a_slice_that_is_another_ranks_is_noticed(tiny: Checkpoint, tmp_path: Path) -> None:
    """The error of a wrong part is far above the bound used above."""
    want = states_of(cpu.load(tiny, CPU), torch.bfloat16)

    def wrong(group: SharedMemoryGroup) -> Tensor:
        if group.rank == 1:
            mine = cpu.Reader(tiny, CPU, tiny.config.low_rank_norm_eps, cpu.Shard(0, 2))
            blocks = [mine.block(layer) for layer in range(tiny.config.num_hidden_layers)]
            right = cpu.load(tiny, CPU, group=group)
            return states_of(K2(tiny.config, right.embedding_VD, blocks, right.norm, right.head, group), torch.bfloat16)
        return states_of(cpu.load(tiny, CPU, group=group), torch.bfloat16)

    got = together(tmp_path / "meet", 2, wrong)
    assert (got[0] - want).abs().max() > 0.12 * want.abs().max()


# --------------------------------------------------------------------------------------------------------- the engine


def config(**changes: object) -> EngineConfig:
    asked: dict[str, object] = {"kv_dtype": "float32", "max_model_len": 1024, "max_running": 4, "step_tokens": 96}
    return EngineConfig(**{**asked, "kv_memory": 60_000_000, "device": "cpu", **changes})  # type: ignore[arg-type]


def waves() -> list[list[Job]]:
    """Prompts in chunks, cached prefixes, every sampling mode, and more pages than a small pool has."""
    tokens = Tokenizer.open(NANO).encode(TEXT)
    schema = '%json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    grammar = Grammar(text=f"start: json\njson: {schema}")
    first = [
        job("greedy", tokens[:130], max_tokens=30),
        job("seeded", tokens[5:60], max_tokens=24, temperature=1.0, seed=5, seeded=True),
        job("penalties", tokens[9:80], max_tokens=20, temperature=0.7, seed=7, seeded=True, frequency_penalty=0.3),
    ]
    second = [
        job("cached", tokens[:140], max_tokens=20),
        job("grammar", tokens[:50], max_tokens=24, grammar=grammar),
        job("long", tokens[:300], max_tokens=40, prompt_logprobs=2),
    ]
    return [first, second]


class Said(NamedTuple):
    answers: dict[str, Answer]
    preemptions: int


def said(jobs: Sequence[Sequence[Job]], **changes: object) -> Said:
    with forked.all_processes():
        engine = EngineCore.load(NANO, config(**changes))
    try:
        with torch.inference_mode():
            answers = run(engine, *jobs, every=4)
        return Said(answers, engine.planner.load().preemptions)
    finally:
        engine.runner.close()


def answers(**changes: object) -> dict[str, Answer]:
    return said(waves(), **changes).answers


def counted(got: dict[str, Answer], want: dict[str, Answer], near: float) -> int:
    """The number of answers that diverge; each may do so only if one rank's two most likely tokens were closer than
    `near`.
    """
    apart = 0
    for name, answer in got.items():
        other = want[name]
        assert (answer.finish, answer.error) == (other.finish, other.error)
        places = [i for i, (a, b) in enumerate(zip(answer.tokens, other.tokens, strict=False)) if a != b]
        if places:
            best, second = (value for _, value in other.logprobs[places[0]].top[:2])
            assert best - second <= near, f"{name}: {best - second:.3f} apart at {places[0]}"
            apart += 1
    return apart


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Answer]:
    return answers()


SPECULATIONS = {
    "plain": None,
    "drafter": Learned(drafter=str(MODELS / "kimi-nano-eagle3"), adaptive=False),
    "suffix": Suffix(adaptive=False),
}


@pytest.mark.parametrize("way", ["plain", "drafter"])  # suffix drafts are in a test below
def test_two_ranks_say_what_one_says(way: str, one_rank: dict[str, Answer]) -> None:
    """Over float32 pages, in which rounding does not change a token; by law 4 the answers without drafts are the
    expected ones.
    """
    got = answers(ranks=2, speculation=SPECULATIONS[way])
    assert counted(got, one_rank, near=1e-3) == 0
    assert got["cached"].cached_tokens == one_rank["cached"].cached_tokens > 0
    if way != "plain":
        assert sum(answer.proposed for answer in got.values()) > 0


def test_two_ranks_say_what_one_says_in_steps_that_run_ahead(
    one_rank: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: captured as CUDA graphs, and planned before the last step's tokens are read. The ranks compare their
    sampled tokens.
    """
    program = (
        "import functools, sys; from redline.worker import rank\n"
        "rank.Runner = functools.partial(rank.Runner, captured=True); sys.exit(rank.main())"
    )
    monkeypatch.setattr(worker_ranks, "FOLLOW", (sys.executable, "-c", program))
    leading = functools.partial(worker_ranks.LeadingRunner, captured=True)
    monkeypatch.setattr("redline.worker.engine.LeadingRunner", leading)
    told: list[Drawn] = []
    tell = worker_ranks.Ranks.tell

    def listen(self: worker_ranks.Ranks, command: Wire) -> None:
        if isinstance(command, Step) and command.drawn is not None:
            told.append(command.drawn)
        tell(self, command)

    monkeypatch.setattr(worker_ranks.Ranks, "tell", listen)
    got = answers(ranks=2, speculation=SPECULATIONS["suffix"])
    assert counted(got, one_rank, near=1e-3) == 0
    assert sum(answer.proposed for answer in got.values()) > 0
    assert [drawn.steps for drawn in told[2:]] == list(range(1, len(told) - 1)), "all steps but the one in flight"


def crowd() -> list[list[Job]]:
    """Four jobs that begin within a page and end within a third: the pool has fewer pages than that, so one is
    pre-empted.
    """
    hows: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5, "seeded": True},
        {"temperature": 0.7, "seed": 7, "seeded": True, "frequency_penalty": 0.3},
        {"temperature": 0.8, "seed": 9, "seeded": True, "top_p": 0.9},
    ]
    length = PAGE_TOKENS - 2
    tokens = Tokenizer.open(NANO).encode(TEXT)
    return [
        [
            job(str(place), tokens[length * place : length * (place + 1)], max_tokens=80, stop_ids=(), **how)
            for place, how in enumerate(hows)
        ]
    ]


def test_four_ranks_that_draft_with_few_pages_say_what_one_says() -> None:
    """Jobs are pre-empted and restart; by laws 4 and 7 the expected answers are those without drafts and with enough
    pages.
    """
    jobs = crowd()
    few: dict[str, object] = {"kv_memory": 9_500_000, "max_model_len": 192}  # 7 pages
    got = said(jobs, ranks=4, speculation=SPECULATIONS["drafter"], **few)
    assert got.preemptions > 0
    assert sum(answer.proposed for answer in got.answers.values()) > 0
    want = said(jobs)
    assert want.preemptions == 0
    assert counted(got.answers, want.answers, near=1e-3) == 0


# ----------------------------------------------------------------------------------------------- when a rank is lost


def followers() -> list[int]:
    """The processes of ranks that this process has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended since it was listed
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"redline.worker.rank" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def long_job() -> Job:
    return job("long", range(5, 60), max_tokens=900, stop_ids=())


@pytest.mark.parametrize(
    ("number", "step_s", "said"),
    [
        (signal.SIGKILL, 3600.0, r"rank 1 failed in step \d+: it exited with code -9"),
        (signal.SIGSTOP, 1.0, r"rank 1 has kept rank 0 waiting for 1 s in sum"),
    ],
)
def test_a_rank_that_ends_or_hangs_ends_all_with_its_name(
    number: signal.Signals, step_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "STEP_S", step_s)
    monkeypatch.setattr(worker_ranks, "END_S", 0.5)
    engine = EngineCore.load(NANO, config(ranks=2))
    (other,) = followers()
    at_step(monkeypatch, 3, lambda: os.kill(other, number))
    try:
        with torch.inference_mode(), pytest.raises(RankLost, match=said):
            run(engine, [long_job()])
    finally:
        engine.runner.close()
    assert not followers(), "a rank is still running"


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("odd")], ids=str)
def test_a_step_that_fails_on_a_rank_ends_all(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed rank has left out all-reduces that the others wait for; with one rank only the jobs of that step would
    end.
    """
    monkeypatch.setattr(worker_ranks, "END_S", 0.5)
    with forked.all_processes():
        engine = EngineCore.load(NANO, config(ranks=2))
    assert isinstance(engine.runner, worker_ranks.LeadingRunner)
    (other,) = engine.runner._ranks._processes

    def failing(*_: object) -> None:
        raise error

    try:
        monkeypatch.setattr(engine.model, "predict", failing)
        with torch.inference_mode(), pytest.raises(RankLost, match=rf"rank 0 has failed in step \d+: .*{error}"):
            run(engine, [long_job()])
    finally:
        engine.runner.close()
    assert other.returncode is not None, "a rank is still running"


def test_a_follower_goes_on_behind_no_step_that_failed() -> None:
    class Failing:
        overlaps = False

        def launch(self, _: object) -> "Failing":
            return self

        def wait(self) -> None:
            raise MemoryError("no room")

    class Told:
        def drain(self, **_: object) -> list[Step]:
            return [Step(number=1)]

    with pytest.raises(MemoryError, match="no room"):
        follower._obey(Failing(), Told(), DigestComparison(1), None)  # type: ignore[arg-type]


def test_a_rank_that_cannot_load_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 finds another checkpoint than rank 0: the shards were removed in between."""
    folder = tmp_path / "model"
    random_checkpoint(folder, eight_heads())
    start, started = worker_ranks.Ranks._start, list[worker_ranks.Ranks]()

    def away(self: worker_ranks.Ranks, told: worker_ranks.RankConfig) -> None:
        started.append(self)
        start(self, worker_ranks.msgspec.structs.replace(told, weights=str(tmp_path / "gone")))

    monkeypatch.setattr(worker_ranks.Ranks, "_start", away)
    lost = pytest.raises(WorkerLost, match=r"rank 1 failed while it was loading: .*gone")
    with forked.all_processes(), lost:
        EngineCore.load(folder, config(ranks=2, max_model_len=128))
    assert [process.returncode is not None for ranks in started for process in ranks._processes] == [True]


def test_ranks_end_with_rank_0_however_it_ends() -> None:
    program = (
        "import sys; from redline.worker.engine import EngineCore; from redline.worker.config import EngineConfig\n"
        f"engine = EngineCore.load({str(NANO)!r}, EngineConfig(ranks=2, kv_memory=60_000_000, max_model_len=256))\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as zero:
        assert zero.stdout is not None
        assert zero.stdout.readline() == "ready\n"
        (follower,) = Path(f"/proc/{zero.pid}/task/{zero.pid}/children").read_text().split()
        zero.kill()
    until(lambda: not Path(f"/proc/{follower}").exists())


def test_ranks_that_the_model_cannot_make_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"engine\.ranks is 8; expected one of 1, 2, 4 for this model"):
        EngineCore.load(NANO, config(ranks=8))
