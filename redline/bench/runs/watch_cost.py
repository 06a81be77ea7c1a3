"""What it costs that somebody could watch: the ops of a CPU's step look at a pointer of their thread while nobody does.

    python -m redline.bench.runs.watch_cost [models/kimi-nano] [--rounds 300] [--save FILE]

A share is calculated: the time of a look, times the ops of a step, over the step's time. The look alone is timed in
three ways: again and again, where all that it touches is in the nearest cache (near); each time after FEW bytes were
written, about twice what an op of Kimi-Nano reads, as a step leaves the caches to the next look (behind an op); and
after 64 MB, where nothing of it is in any cache (far), which the first look of a step may meet.

Beside it the ratio, measured: steps over the kernels as they are, over a build of the same sources without the look,
and over a copy of the first, in turns; of each build the mean of its fastest tenth. The copy shows what the machine
makes of two equal builds: a share below that cannot be seen in a ratio. One thread computes, so that no thread is
waited for. Takes two to three minutes, most of it the build.
"""

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.disk import save
from redline.errors import ConfigError
from redline.kernels.cpu import native
from redline.kernels.cpu.watch import OpTimes
from redline.run.runner import Runner
from redline.wire.job import PageId, Sampling
from redline.wire.step import Begin, Row, Step
from redline.worker.config import EngineConfig
from redline.worker.engine import EngineCore

PROMPT = 48  # tokens before the one that a timed step computes; all in one page
BLOCK = 10  # steps over one build before it is another's turn; the first of them is left out
FEW, ALL = 1 << 20, 64 << 20  # bytes that are written before a look
BEGIN, END = "class OpSpan {", "};\n"
NOTHING = "class OpSpan {\npublic:\n    explicit OpSpan(const char*) {}\n"

# ns of a look, less those of a call that does nothing: the mean of many, and of single ones the faster half's mean.
LOOKS = r"""
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>
#include "core/watch.h"
static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
static __attribute__((noinline)) void look() { OpSpan span("look"); asm volatile("" ::: "memory"); }
static __attribute__((noinline)) void none() { asm volatile("" ::: "memory"); }
template <void call()> static double many(int64_t times) {
    int64_t began = now();
    for (int64_t i = 0; i < times; i++) call();
    return double(now() - began) / times;
}
template <void call()> static double single(int times, std::vector<char>& room) {
    std::vector<int64_t> took;
    for (int i = 0; i < times; i++) {
        memset(room.data(), i, room.size());
        int64_t began = now();
        call();
        took.push_back(now() - began);
    }
    std::sort(took.begin(), took.end());
    return double(std::accumulate(took.begin(), took.begin() + times / 2, int64_t(0))) / (times / 2);
}
extern "C" double near() { return many<look>(20000000) - many<none>(20000000); }
extern "C" double behind(int64_t bytes, int times) {
    std::vector<char> room(bytes);
    return single<look>(times, room) - single<none>(times, room);
}
"""


def without_a_look(header: str) -> str:
    """The text of core/watch.h with an `OpSpan` that does nothing. Raises ValueError where there is none to replace."""
    begin = header.index(BEGIN)
    end = header.index(END, begin)
    return header[:begin] + NOTHING + header[end:]


def built(compiler: str, folder: Path, name: str, *sources: str) -> ctypes.CDLL:
    """The library of some sources of a copy of the kernels. Raises ConfigError with the compiler's first line."""
    target = folder / name
    words = [compiler, *native.FLAGS, f"-I{folder}", "-o", str(target), *(str(folder / source) for source in sources)]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ConfigError(f"{name} does not build: {(found.stderr.splitlines() or ['no reason'])[0]}")
    return ctypes.CDLL(str(target))


def started(library: ctypes.CDLL) -> ctypes.CDLL:
    """The same, with one thread to compute."""
    library.redline_start(ctypes.c_int(1))
    return library


def ready(folder: Path) -> Runner:
    """The runner of a checkpoint, with a prompt in slot 0."""
    runner = EngineCore.load(folder, EngineConfig(kv_memory=16 << 20, max_running=1, device="cpu")).runner
    tokens = tuple(7919 * place % runner.model.config.vocab_size for place in range(PROMPT))
    begin = Begin(
        slot=0, tokens=tokens, prompt=PROMPT, pages=(), sampling=Sampling(max_tokens=8, temperature=0), limit=64
    )
    row = Row(slot=0, start=0, count=PROMPT, new_pages=(PageId(0),))
    runner.launch(Step(number=0, begins=(begin,), rows=(row,))).wait()
    return runner


def step_ms(runner: Runner) -> float:
    """Milliseconds of a step of one row, always the same."""
    runner.place(0, PROMPT + 1, ())
    began = clock.perf_counter()
    runner.launch(Step(number=0, rows=(Row(slot=0, start=None, count=1),))).wait()
    return 1e3 * (clock.perf_counter() - began)


def ops_of(runner: Runner) -> int:
    """How many ops of a step look."""
    watch = OpTimes()
    step_ms(runner)
    taken, _ = watch.taken()
    watch.close()
    return len(taken)


class Looks(NamedTuple):
    """Nanoseconds of one look, see above."""

    near: float
    behind_an_op: float
    far: float


def looks(library: ctypes.CDLL) -> Looks:
    """Timed by the library of LOOKS, in some seconds."""
    library.near.restype = library.behind.restype = ctypes.c_double
    few, everything = ((ctypes.c_int64(size), ctypes.c_int(times)) for size, times in ((FEW, 10_000), (ALL, 200)))
    return Looks(library.near(), library.behind(*few), library.behind(*everything))


def in_turns(runner: Runner, builds: dict[str, ctypes.CDLL], rounds: int) -> dict[str, list[float]]:
    """Of each build the milliseconds of its steps; a round to warm up is left out."""
    took: dict[str, list[float]] = {name: [] for name in builds}
    for number in range(rounds + 1):
        names = list(builds)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with patch.object(native, "library", lambda of=builds[name]: of):
                ms = [step_ms(runner) for _ in range(BLOCK)]
            if number:
                took[name] += ms[1:]
    return took


def fastest(took: Sequence[float]) -> float:
    """The mean of the fastest tenth."""
    return statistics.fmean(sorted(took)[: max(1, len(took) // 10)])


def result_of(took: dict[str, list[float]], ops: int, look: Looks) -> dict[str, Any]:
    """The share of a step, as calculated: one look far, all others behind an op; and the ratios, as measured."""
    ms = {name: fastest(times) for name, times in took.items()}
    own = ms["as it is"]
    share = (look.far + (ops - 1) * look.behind_an_op) / 1e6 / own
    return {
        "ops_of_a_step": ops,
        "look_ns": {name: round(ns, 2) for name, ns in look._asdict().items()},
        "step_ms": round(own, 4),
        "share_of_a_step": round(share, 6),
        "share_of_a_step_near": round(ops * look.near / 1e6 / own, 6),
        "time_over_without": round(own / ms["without"], 4),
        "time_of_a_copy_over_its_own": round(ms["copy"] / own, 4),
    }


def main() -> None:
    """Measures, prints, saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("models/kimi-nano"))
    parser.add_argument("--rounds", type=count, default=300)
    parser.add_argument("--save", type=output, default="runs/watch-cost-cpu.json")
    given = parser.parse_args()
    native.share_processors(native.threads())  # one thread
    own, compiler = native.library(), native.find_compiler()
    if own is None or compiler is None:
        raise ConfigError(f"there are no kernels to measure: {native.why_not()}")
    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        copied = Path(temporary) / "cpu"
        shutil.copytree(native.HERE, copied, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        (copied / "looks.cpp").write_text(LOOKS)
        look = looks(built(compiler, copied, "looks.so", "looks.cpp", "core/watch.cpp"))
        again = shutil.copy(own._name, copied / "again.so")  # a file of its own, so a library of its own
        header = copied / "core" / "watch.h"
        header.write_text(without_a_look(header.read_text()))
        builds = {
            "as it is": own,
            "without": started(built(compiler, copied, "without.so", *native.SOURCES)),
            "copy": started(ctypes.CDLL(str(again))),
        }
        runner = ready(given.folder)
        ops = ops_of(runner)
        found = result_of(in_turns(runner, builds, given.rounds), ops, look)
        runner.close()
    print(
        f"{ops} ops of a step of {found['step_ms']} ms look, ns: {found['look_ns']}; {found['share_of_a_step']:.3%} of "
        f"the step, calculated; steps over steps without {found['time_over_without']}, of a copy over its own "
        f"{found['time_of_a_copy_over_its_own']}"
    )
    body = {
        "what": "the look of a CPU's ops at who watches, while nobody does: its time, its share of a step as "
        "calculated from it, and steps over steps without it, in turns",
        "command": "python -m redline.bench.runs.watch_cost",
        "model": str(given.folder),
        **provenance("torch"),
        "load_average": round(os.getloadavg()[0], 1),
        "threads": 1,
        "rounds": given.rounds,
        "steps_of_a_round": BLOCK,
        **found,
    }
    save(given.save, (json.dumps(body, indent=2) + "\n").encode())


if __name__ == "__main__":
    program(main)
