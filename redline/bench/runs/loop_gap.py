"""How much of its time a GPU waits between decode steps: one greedy answer through planner, runner and loop.

    python -m redline.bench.runs.loop_gap [--weights models/kimi-nano] [--context 1000] [--steps 200]
    python -m redline.bench.runs.loop_gap --shape kimi-k2.6 --layers 61 --alias 12 --steps 100

Three numbers. Through the loop: milliseconds a token, nothing watching. Back to back: the same steps launched without
waiting for any, so the device always has the next one. And from a trace of the kernels: the share of the time in which
none ran, which is too high rather than too low, since torch.profiler slows the host. Saved as JSON, and a few steps as
a picture.
"""

import argparse
import itertools
import json
import logging
import random
from dataclasses import replace
from pathlib import Path

import torch

from redline import clock
from redline.bench.program import output, program
from redline.bench.record import provenance
from redline.bench.step.trace import ON_DEVICE, draw, idle_share, intervals, joined, traced
from redline.chat.hashing import make_job
from redline.model.k2.config import K2Config
from redline.model.k2.random_hopper import random_gpu_k2
from redline.model.k2.shapes import shape
from redline.plan.recorded import RecordedShapes
from redline.run.fit import Layout
from redline.wire.job import PAGE_TOKENS, JobId, Sampling
from redline.wire.step import Row, Step
from redline.worker.config import EngineConfig
from redline.worker.engine import EngineCore, Loaded
from redline.worker.loop import StepInFlight, turn

FINGERPRINT = "loop gap"


def random_engine(config: K2Config, in_memory: int, engine_config: EngineConfig, device: torch.device) -> EngineCore:
    """An engine on random weights of these sizes, made where they stay.

    in_memory: layers that lie there, the dense ones among them; the others are one of those, in turn.

    Raises AssertionError where no layer with experts lies in memory, or the engine's config says no max_model_len.
    """
    dense, tokens = config.first_k_dense_replace, engine_config.max_model_len
    assert tokens is not None
    assert in_memory > dense, f"{in_memory} layers in memory are the dense one alone"
    layers = range(config.num_hidden_layers)
    places = [layer if layer < dense else dense + (layer - dense) % (in_memory - dense) for layer in layers]
    model = random_gpu_k2(config, places, device)
    page_bytes = config.kv_bytes_per_token(torch.bfloat16) * PAGE_TOKENS
    layout = Layout(-(-tokens // PAGE_TOKENS) + 1, tokens, torch.bfloat16, page_bytes)
    return EngineCore(Loaded(model, layout, FINGERPRINT), engine_config)


class Answering:
    """One answer that does not end, turn by turn of the loop; its first token is there once this is made.

    context: tokens of its random prompt. tokens: of the answer, at most. Raises AssertionError where the job is
    refused.
    """

    def __init__(self, engine: EngineCore, context: int, tokens: int) -> None:
        self._engine = engine
        self._flight: StepInFlight | None = None
        vocabulary = engine.model.config.vocab_size
        prompt = tuple(random.Random(0).randrange(vocabulary) for _ in range(context))
        job = make_job(JobId("gap"), prompt, Sampling(max_tokens=tokens, temperature=0.0), engine.fingerprint)
        assert not engine.planner.submit(job), "the job is refused"
        while not self.turn():
            pass

    def turn(self) -> int:
        """One turn of the loop; returns how many new tokens it brought.

        Raises AssertionError where the answer fails.
        """
        self._flight, deltas = turn(self._engine.planner, self._engine.runner, self._flight)
        for delta in deltas:
            assert delta.error is None, delta.error
        return sum(len(delta.tokens) for delta in deltas)

    def milliseconds(self, steps: int) -> float:
        """Milliseconds of each token, over so many of them."""
        began = clock.perf_counter()
        count = 0
        while count < steps:
            count += self.turn()
        return (clock.perf_counter() - began) * 1000 / count

    def end(self) -> None:
        """Aborts the answer, and waits for the step that is in flight."""
        self._engine.planner.abort_all()
        while self._flight is not None:
            self.turn()


def back_to_back(engine: EngineCore, steps: int) -> float:
    """Milliseconds of a step of slot 0, which goes on where the answer has ended.

    All steps are launched before any result is read. The slot's pages end on the way, and its table then names page 0:
    the text is wrong, the time is not.
    """
    row, shapes = Row(slot=0, start=None, count=1), RecordedShapes(engine.runner.recorded)
    named = shapes.choose(rows=1, positions=1, longest=PAGE_TOKENS * engine.runner.slots.at[0].pages)
    launched = [engine.runner.launch(Step(number=n, rows=(row,), shape=named)) for n in range(steps // 4)]
    launched[-1].wait()
    began = clock.perf_counter()
    launched = [engine.runner.launch(Step(number=n, rows=(row,), shape=named)) for n in range(steps)]
    launched[-1].wait()
    return (clock.perf_counter() - began) * 1000 / steps


def main() -> None:
    """Measures as the command line says, and writes JSON and a picture. Raises SystemExit where torch sees no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=Path("models/kimi-nano"))
    parser.add_argument("--shape", help="random weights of this shape instead")
    parser.add_argument("--layers", type=int, help="of the shape; all of them where nothing is said")
    parser.add_argument("--alias", type=int, help="layers of the shape in memory; the others are one of those")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--running", type=int, default=1, help="jobs in one step, at most: for so many, steps are recorded"
    )
    parser.add_argument("--save", type=output, default="runs/loop-gap.json")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # how long recording took
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and torch sees none")
    config = EngineConfig(max_running=asked.running, max_model_len=asked.context + 8 * asked.steps + 64)
    began = clock.perf_counter()
    if asked.shape is None:
        name, engine = asked.weights.name, EngineCore.load(asked.weights, config)
    else:
        whole = shape(asked.shape)
        sizes = replace(whole, num_hidden_layers=asked.layers or whole.num_hidden_layers)
        in_memory = asked.alias or sizes.num_hidden_layers
        name = f"{asked.shape}, {sizes.num_hidden_layers} layers, {in_memory} of them in memory"
        engine = random_engine(sizes, in_memory, config, torch.device("cuda"))
    print(f"{name}: open after {clock.perf_counter() - began:.0f} s", flush=True)
    with torch.inference_mode():
        answering = Answering(engine, asked.context, 7 * asked.steps)
        answering.milliseconds(asked.steps)
        through = answering.milliseconds(asked.steps)
        trace = traced(lambda: answering.milliseconds(asked.steps))
        alone = back_to_back(engine, asked.steps)
        answering.end()
        engine.runner.close()
    launched = intervals(trace, ON_DEVICE, "cat")
    busy = joined(launched)
    record = {
        **provenance("torch"),
        "device": torch.cuda.get_device_name(),
        "model": name,
        "context": asked.context,
        "replays": engine.runner.replays,
        "led": dict(engine.runner.led),
        "ms_per_token": round(through, 4),
        "ms_back_to_back": round(alone, 4),
        "idle_share": round(max(0.0, 1 - alone / through), 4),
        "idle_share_traced": round(idle_share(busy), 4),
        "launches_per_token": round(len(launched) / asked.steps, 1),
        "longest_gaps_us_traced": sorted((round(b.start - a.end, 1) for a, b in itertools.pairwise(busy)))[-20:],
    }
    asked.save.write_text(json.dumps(record, indent=1) + "\n")
    title = f"{name} on {record['device']}: idle {record['idle_share']:.1%}, {through:.2f} ms a token"
    draw(trace, through, title, asked.save.with_suffix(".png"))
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    program(main)
