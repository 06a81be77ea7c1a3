"""Where the time of a decode step on a CPU goes: the kernels, and what the engine does around them.

    python -m redline.bench.runs.step_profile [models/kimi-nano] [--draft models/kimi-nano-eagle3] [--rounds 7]

The engine as it serves: its loop in a thread, deltas through a socket to another process. That thread does all of a
step, so `host_ms`, which is the step without its kernels, is all that the engine does around them.

Functions are wrapped from here, two looks at the clock a call, in every other run. The runs between mark the steps
alone, so `unprofiled_ms` shows what the marks cost. Prompts are real, answers greedy, or drawn where it is said. A step
counts if all rows decode in it and in the next; from its begin to the next one's is its time. A figure is the mean over
the fastest tenth of the steps of the most frequent kind (as many drafts verified, as many asked for), so that the parts
sum to the whole and other users of the machine count least; `median_ms` and `p90_ms` are over all of that kind.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar
from unittest.mock import patch

import redline.run.runner
from redline import clock
from redline.bench.program import drawn, output, program
from redline.bench.record import provenance
from redline.bench.speculation.rates import read_questions
from redline.chat.hashing import make_job
from redline.chat.template import style_of
from redline.chat.tokenizer import Tokenizer
from redline.kernels.cpu import native
from redline.wire.channel import MemoryChannel, SocketInbox, SocketOutbox, ipc_address
from redline.wire.codec import Wire
from redline.wire.delta import Delta
from redline.wire.job import Job, JobId, Sampling
from redline.wire.news import Stop
from redline.wire.step import Step, StepResult
from redline.worker.config import EngineConfig, Learned
from redline.worker.engine import EngineCore

GOAL_MS = 0.25  # of host_ms, one row
THREADS = 2
NEW = 96  # tokens of an answer
CONTEXT = 1024
COLOURS = {
    "kernels": "#d5d5d5",
    "inputs": "#1b4f8a",
    "model": "#4a90c4",
    "choose": "#b5432e",
    "results": "#d98a6a",
    "draft": "#7a4f9a",
    "settle": "#2e7d4f",
    "plan": "#6fae80",
    "message": "#a9cfb0",
    "deltas": "#c99a1a",
    "loop": "#8a8a8a",
}  # of the parts, in the order of the bars

P = ParamSpec("P")
R = TypeVar("R")


class Case(NamedTuple):
    """What one measured answer is: rows of a step, with the drafter or without, drawn tokens or greedy ones."""

    rows: int
    drafter: bool = False
    drawn: bool = False

    @property
    def name(self) -> str:
        """The case in words, such as "16 rows, drafter"."""
        extra = ", drafter" * self.drafter + ", drawn" * self.drawn
        return f"{self.rows} row{'s' * (self.rows > 1)}{extra}"

    def sampling(self, seed: int) -> Sampling:
        """How an answer of this case is sampled: NEW tokens. seed: for drawn ones."""
        if self.drawn:
            return Sampling(max_tokens=NEW, temperature=0.8, top_p=0.95, seed=seed)
        return Sampling(max_tokens=NEW, temperature=0)


CASES = Case(1), Case(1, drafter=True), Case(1, drawn=True), Case(16), Case(16, drafter=True), Case(16, drawn=True)


class Span(NamedTuple):
    """A call, or what is left of it when the calls within it are cut out. begin, end: time.perf_counter_ns."""

    part: str
    name: str
    begin: int
    end: int


class Ran(NamedTuple):
    """A step that has run. begin, end: time.perf_counter_ns."""

    step: Step
    result: StepResult
    begin: int
    end: int

    @property
    def decodes(self) -> bool:
        """Whether no row of the step is a part of a prompt."""
        return all(row.start is None for row in self.step.rows)


class Marks:
    """The steps that ran and the calls that were made for them, in their order."""

    def __init__(self) -> None:
        self.ran: list[Ran] = []
        self.spans: list[Span] = []

    def step(self, run: Callable[[Step], StepResult]) -> Callable[[Step], StepResult]:
        """`run` as before, with each of its steps added to `ran`."""

        def marked(step: Step) -> StepResult:
            begin = clock.perf_counter_ns()
            result = run(step)
            self.ran.append(Ran(step, result, begin, clock.perf_counter_ns()))
            return result

        return marked


def timed(spans: list[Span], part: str, name: str, call: Callable[P, R]) -> Callable[P, R]:
    """`call` as before, with a span of this part and name added to `spans` for each call that returns."""
    now = clock.perf_counter_ns

    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        begin = now()
        result = call(*args, **kwargs)
        spans.append(Span(part, name, begin, now()))
        return result

    return marked


class Served:
    """An engine whose loop runs in a thread; deltas go to the socket at `address`. Leaving it ends the thread."""

    def __init__(self, engine: EngineCore, address: str) -> None:
        self.engine = engine
        self._outbox = SocketOutbox(address)
        self._inbox = MemoryChannel()
        self._left: set[JobId] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=engine.serve, args=(self._inbox, self), name="loop", daemon=True)
        self._thread.start()

    def put(self, message: Wire) -> None:
        """Sends a message to the process in front, as the loop's outbox, and notes which answers have ended."""
        self._outbox.put(message)
        if isinstance(message, Delta) and message.finish is not None:
            self._left.discard(message.job)
            if not self._left:
                self._ended.set()

    def answer(self, jobs: Sequence[Job]) -> None:
        """Hands the jobs to the loop, and returns when all their answers have ended."""
        self._left = {job.id for job in jobs}
        self._ended.clear()
        for job in jobs:
            self._inbox.put(job)
        self._ended.wait()

    @contextmanager
    def marked(self, marks: Marks, *, parts: bool) -> Generator[None]:
        """Marks every step; with `parts` also what is done for it. The engine must be idle."""
        runner, planner = self.engine.runner, self.engine.planner
        with ExitStack() as stack:
            stack.enter_context(patch.object(runner, "run", marks.step(runner.run)))
            if parts:
                library = native.library()
                for part, owner, names in (
                    ("plan", planner, ("next_step",)),
                    ("message", runner, ("launch",)),
                    ("inputs", runner.slots, ("add_pages", "span", "inputs")),
                    ("model", runner.model, ("predict",)),
                    ("kernels", library, [name for name in vars(library) if name.startswith("redline_")]),
                    ("choose", redline.run.runner, ("sample_each", "verify")),
                    ("choose", runner.slots, ("append",)),
                    ("draft", runner.drafting, ("follow",)),
                    ("results", runner, ("run",)),
                    ("settle", planner, ("settle",)),
                    ("deltas", self, ("put",)),
                ):
                    for name in names:
                        wrapped = timed(marks.spans, part, name.removeprefix("redline_"), getattr(owner, name))
                        stack.enter_context(patch.object(owner, name, wrapped))
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._inbox.put(Stop())
        self._thread.join()
        self._outbox.close()


class Window(NamedTuple):
    """The time from a step's begin to the next one's: ns nanoseconds, in spans without gaps."""

    ran: Ran
    ns: int
    spans: list[Span]


def windows(marks: Marks, rows: int) -> list[Window]:
    """A window for each step of so many rows that decodes, as the next one does."""
    found: list[Window] = []
    for ran, after in itertools.pairwise(marks.ran):
        if not all(one.decodes and len(one.step.rows) == rows for one in (ran, after)):
            continue
        begin, end = ran.begin, after.begin
        spans = flat([Span("loop", "", begin, end), *clipped(marks.spans, begin, end)])
        found.append(Window(ran, end - begin, spans))
    return found


def clipped(spans: Sequence[Span], begin: int, end: int) -> Iterator[Span]:
    """The parts of the spans that lie within [begin, end), in time.perf_counter_ns."""
    for span in spans:
        if span.end > begin and span.begin < end:
            yield span._replace(begin=max(begin, span.begin), end=min(end, span.end))


def flat(spans: Sequence[Span]) -> list[Span]:
    """Nested spans as a sequence without overlap: what lies within a span is cut out of it."""
    found: list[Span] = []
    open_: list[Span] = []
    at = 0

    def until(time: int) -> None:
        nonlocal at
        if open_ and time > at:
            found.append(open_[-1]._replace(begin=at, end=time))
        at = max(at, time)

    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while open_ and open_[-1].end <= span.begin:
            until(open_[-1].end)
            open_.pop()
        until(span.begin)
        open_.append(span)
    while open_:
        until(open_[-1].end)
        open_.pop()
    return found


def fastest(found: Sequence[Window]) -> list[Window]:
    """The fastest tenth of the windows, one at least, the fastest first."""
    ordered = sorted(found, key=lambda window: window.ns)
    return ordered[: max(1, len(ordered) // 10)]


def kind_of(window: Window) -> tuple[int, int]:
    """(drafts that the step verified, drafts that it asked for): only steps of one kind are compared."""
    step, result = window.ran.step, window.ran.result
    return sum(row.proposed for row in result.rows), sum(row.propose for row in step.rows)


def mean_ns(found: Sequence[Window]) -> float:
    """The mean of the windows' times, in nanoseconds. Raises StatisticsError where there is none."""
    return statistics.fmean(window.ns for window in found)


def shares(found: Sequence[Sequence[Span]], key: Callable[[Span], str]) -> dict[str, float]:
    """Microseconds a step of the spans that `key` names alike, the largest first. found: the spans of each step."""
    sums: Counter[str] = Counter()
    for span in itertools.chain.from_iterable(found):
        sums[key(span)] += span.end - span.begin
    return {part: round(ns / len(found) / 1000, 1) for part, ns in sums.most_common()}


def summary(case: Case, profiled: Sequence[Window], plain: Sequence[Window]) -> dict[str, Any]:
    """The figures of a case as JSON can hold them, over the windows of the kind that is most frequent in both.

    profiled: windows with their parts marked; plain: those with steps marked alone. Raises ValueError where they have
    no kind in common.
    """
    [(kind, _)] = (Counter(map(kind_of, profiled)) & Counter(map(kind_of, plain))).most_common(1)
    profiled, plain = ([window for window in found if kind_of(window) == kind] for found in (profiled, plain))
    best = fastest(profiled)
    all_ms = sorted(window.ns / 1e6 for window in plain)
    parts = shares([window.spans for window in best], lambda span: span.part)
    kernels = [[span for span in window.spans if span.part == "kernels"] for window in best]
    ms, kernels_ms = mean_ns(best) / 1e6, parts.pop("kernels") / 1000
    typical = min(best, key=lambda window: abs(window.ns - mean_ns(best)))
    return {
        "name": case.name,
        "rows": case.rows,
        "steps": len(best),
        "drafts_verified": kind[0],
        "drafts_asked_for": kind[1],
        "step_ms": round(ms, 4),
        "unprofiled_ms": round(mean_ns(fastest(plain)) / 1e6, 4),
        "median_ms": round(statistics.median(all_ms), 4),
        "p90_ms": round(all_ms[len(all_ms) * 9 // 10], 4),
        "kernels_ms": round(kernels_ms, 4),
        "host_ms": round(ms - kernels_ms, 4),
        "host_us": parts,
        "kernels_us": shares(kernels, lambda span: span.name),
        "a_step": [
            [span.part, *(round((at - typical.ran.begin) / 1000, 1) for at in (span.begin, span.end))]
            for span in typical.spans
        ],
    }


def measure(engines: dict[bool, Served], prompts: Sequence[tuple[int, ...]], rounds: int) -> list[dict[str, Any]]:
    """The summary of every case, after `rounds` runs with parts marked and as many without, and one of each to warm up.

    engines: without the drafter and with it. prompts: token ids, one for each row of the largest case.
    """
    numbers = itertools.count()
    profiled: dict[Case, list[Window]] = {case: [] for case in CASES}
    plain: dict[Case, list[Window]] = {case: [] for case in CASES}
    for number, case, parts in itertools.product(range(rounds + 1), CASES, (False, True)):
        served, marks = engines[case.drafter], Marks()
        jobs = [
            make_job(JobId(f"job-{next(numbers)}"), prompt, case.sampling(seed), served.engine.fingerprint)
            for seed, prompt in enumerate(prompts[: case.rows])
        ]
        with served.marked(marks, parts=parts):
            served.answer(jobs)
        if number:  # the first round warms up
            (profiled if parts else plain)[case] += windows(marks, case.rows)
    return [summary(case, profiled[case], plain[case]) for case in CASES]


def read(address: str) -> None:
    """The main function of the process in front: takes what comes at `address` until it is told to stop."""
    with SocketInbox(address) as inbox:
        while not any(isinstance(message, Stop) for message in inbox.drain(wait=True)):
            pass


def draw(result: dict[str, Any], path: Path) -> None:
    """A picture at `path`: a step of one row along the clock, and what the host does in every case, beside the goal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    cases = result["cases"]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(11, 7.2), height_ratios=(2, 7), layout="constrained")
    for part, begin, end in cases[0]["a_step"]:
        above.broken_barh([(begin, end - begin)], (0, 1), color=COLOURS[part])
    above.set(yticks=[], xlim=(0, cases[0]["a_step"][-1][2]), xlabel="microseconds")
    above.set_title(
        f"A step of one row, from its begin to the next one's: the host's parts between "
        f"{cases[0]['kernels_ms']:.2f} ms of kernels (grey)",
        loc="left",
    )
    for place, case in enumerate(cases):
        left = 0.0
        for part, colour in COLOURS.items():
            width = case["host_us"].get(part, 0.0) / 1000
            below.barh(place, width, left=left, color=colour, height=0.6)
            left += width
        below.text(left, place, f"  {left:.2f} ms around {case['kernels_ms']:.2f} ms of kernels", va="center")
    goal = result["goal_ms"]
    below.axvline(goal, color="black", linewidth=1, linestyle="--")
    below.text(goal, -0.62, f" goal for one row: {goal} ms", va="center")
    below.set_yticks(range(len(cases)), [case["name"] for case in cases])
    below.set_xlim(0, 1.4 * max(case["host_ms"] for case in cases))
    below.set_ylim(len(cases) - 0.5, -0.9)
    below.set_xlabel("milliseconds of a step that are not kernels")
    below.legend(
        handles=[Patch(color=COLOURS[part], label=part) for part in COLOURS if part != "kernels"],
        loc="upper right",
        ncols=2,
        frameon=False,
    )
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result['model']}, {result['machine']}, {result['cores']} cores, load {result['load_average']}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Measures every case, and prints and writes the result, with a picture beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("models/kimi-nano"))
    parser.add_argument("--draft", type=Path, default=Path("models/kimi-nano-eagle3"))
    parser.add_argument("--rounds", type=int, default=7, help="of each case, with the parts marked and without")
    parser.add_argument("--out", type=output, default="runs/step-profile.json", help="the picture is beside it")
    asked = parser.parse_args()
    folder: Path = asked.folder
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])  # of this process, and so of every child
    questions = read_questions([folder / "eval" / "hand.jsonl"], Tokenizer.open(folder), style_of(folder), 2)
    prompts = [question.tokens for question in questions]
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        address = ipc_address(Path(temporary), "front")
        front = multiprocessing.get_context("spawn").Process(target=read, args=(address,))
        front.start()
        always = Learned(drafter=str(asked.draft), adaptive=False, suffix=False)  # so that steps are alike
        engines = {
            drafter: stack.enter_context(
                Served(
                    EngineCore.load(
                        folder, EngineConfig(max_model_len=CONTEXT, speculation=always if drafter else None)
                    ),
                    address,
                )
            )
            for drafter in (False, True)
        }
        cases = measure(engines, prompts, asked.rounds)
        with SocketOutbox(address) as outbox:
            outbox.put(Stop())
        front.join()
    for case in cases:
        print(json.dumps({key: value for key, value in case.items() if key != "a_step"}), flush=True)
    result = {
        "command": "python -m redline.bench.runs.step_profile",
        "model": str(folder),
        "drafter": str(asked.draft),
        **provenance("torch"),
        "load_average": round(os.getloadavg()[0], 1),
        "rounds": asked.rounds,
        "goal_ms": GOAL_MS,
        "cases": cases,
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    drawn(partial(draw, result), asked.out.with_suffix(".png"))


if __name__ == "__main__":
    program(main)
