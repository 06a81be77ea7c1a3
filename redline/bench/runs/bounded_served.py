"""What bounding steps (`engine.step_ms`) does to answers and to prompts beside them, served over HTTP on loopback.

    python -m redline.bench.runs.bounded_served [--weights models/kimi-nano] [--paced 2] [--step-ms 200] [--streams 4]
        [--waves 8] [--rounds 1] [--save FILE]

Two servers of one worker stand beside each other, with the bound and without it. Each in turn is sent the same: streams
that are answered all the time, and every few seconds a wave of prompts that are answered with one token: four short
ones together, or a long one. Told are the times between two tokens of the streams from the first prompt on, and the
prompts' times to their token. Turns of a few seconds come first and are not counted: what a step takes is learnt from
steps.

With --paced steps take so many times what Kimi-Nano's take on a core of its own, by waiting (`paced_worker.py`), and
--slow is as much: all but the arithmetic is the product, and other programs on the machine decide little.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.bench.runs.paced_worker import LAYERS, PACED, write
from redline.bench.runs.trees import ROOT, Server, Tree, commit_of, ended_by_a_signal
from redline.bench.serving.client import Client
from redline.bench.serving.metrics import ttft
from redline.bench.serving.records import Answer, Ask
from redline.bench.serving.target import Target
from redline.chat.tokenizer import Tokenizer
from redline.errors import RedlineError

MODEL_NAME = "kimi-nano"
WHOLE, BOUNDED = "whole", "bounded"
SETTLE_S = 2.0  # of streams alone, before the first prompt
WARM_WAVES = 2
# Of a wave: prompts, tokens of each, and seconds to the next, times as long as on a core of its own things take.
KINDS = {"four short prompts": (4, 120, 0.75), "a long prompt": (1, 600, 2.0)}
STREAM_TOKENS = 3500  # more than a stream comes to


class Turn(NamedTuple):
    """What came of one turn, in milliseconds: between two tokens of streams, and to the token of each prompt."""

    gaps_ms: list[float]
    firsts_ms: list[float]


def asks(streams: int, waves: int, kind: str, vocabulary: int, seed: int) -> tuple[list[Ask], list[list[Ask]]]:
    """Streams, and waves of prompts, of random tokens, so that nothing is cached."""
    draw, (together, tokens, _) = random.Random(seed), KINDS[kind]

    def ask(tokens: int, answer: int) -> Ask:
        return Ask(max_tokens=answer, ids=tuple(draw.randrange(10, vocabulary) for _ in range(tokens)))

    waved = [[ask(tokens, 1) for _ in range(together)] for _ in range(waves)]
    return [ask(20, STREAM_TOKENS) for _ in range(streams)], waved


async def sent(port: int, streams: Sequence[Ask], waves: Sequence[Sequence[Ask]], every_s: float) -> Turn:
    """Sends streams, then a wave every so many seconds, and cuts the streams when all prompts have their token.

    Raises RedlineError where a prompt has none after ten times the seconds between two waves.
    """
    body = {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
    target = Target(base_url=f"http://127.0.0.1:{port}", backend="openai", model=MODEL_NAME, body=body)
    async with Client(target) as client:
        client.begin()

        def send(ask: Ask) -> asyncio.Task[Answer]:
            return asyncio.create_task(client.ask(ask, 0, client.clock(), client.request(ask)))

        tasks = [send(ask) for ask in streams]
        await asyncio.sleep(SETTLE_S)
        from_s, asked = client.clock(), list[asyncio.Task[Answer]]()
        for wave in waves:
            asked += [send(ask) for ask in wave]
            await asyncio.sleep(every_s)
        await asyncio.wait(asked, timeout=10 * every_s)
        to_s = client.clock()
        client.cut("all prompts have their token")
        answers = [await task for task in asked]
        streamed = [await task for task in tasks]
    firsts = [ttft(answer) for answer in answers]
    if None in firsts or not all(stream.chunks for stream in streamed):
        errors = {answer.error for answer in (*answers, *streamed)} - {None}
        raise RedlineError(f"a prompt or a stream has no token: {', '.join(map(str, errors))}")
    gaps = [
        1e3 * (b.at - a.at)
        for stream in streamed
        for a, b in pairwise(stream.chunks)
        if from_s <= b.at and a.at <= to_s
    ]
    return Turn(gaps, [1e3 * each for each in firsts if each is not None])


def told(turns: Sequence[Turn], step_ms: float) -> dict[str, Any]:
    """Figures of all turns of a server."""
    gaps = sorted(gap for turn in turns for gap in turn.gaps_ms)
    firsts = sorted(first for turn in turns for first in turn.firsts_ms)
    return {
        "gaps": len(gaps),
        "itl_ms_mean": round(sum(gaps) / len(gaps), 2),
        "itl_ms_p50": round(median(gaps), 2),
        "itl_ms_p99": round(gaps[int(0.99 * (len(gaps) - 1))], 2),
        "itl_ms_most": round(gaps[-1], 2),
        "longer_than_the_bound": sum(gap > step_ms for gap in gaps),
        "prompts": len(firsts),
        "ttft_ms_p50": round(median(firsts), 1),
        "ttft_ms_most": round(firsts[-1], 1),
    }


def started(given: argparse.Namespace, folder: Path, stack: ExitStack) -> tuple[dict[str, Server], int]:
    """Both servers, which answer, and how many ids the model's prompts are drawn from."""
    weights, python = write(folder) if given.paced else (given.weights, sys.executable)
    tree, servers = Tree(".", ROOT, commit_of(ROOT)), dict[str, Server]()
    for name in (WHOLE, BOUNDED):
        bound = f"step_ms = {given.step_ms}\n" if name == BOUNDED else ""
        random_weights = f"random_weights = {LAYERS}\n" if given.paced else ""
        file = folder / f"{name}.toml"
        file.write_text(
            f'weights = "{weights.resolve()}"\nserved_model_name = ["{MODEL_NAME}"]\n'
            f'[engine]\nkv_memory = "100MB"\nmax_model_len = 4096\n{bound}{random_weights}'
        )
        servers[name] = Server(tree, [str(file)], folder, str(python), {PACED: str(given.paced)})
        stack.callback(servers[name].close)
    for server in servers.values():
        server.until_ready()
    return servers, Tokenizer.open(weights).vocab_size // 2


def main(words: Sequence[str] | None = None) -> None:
    """Runs the program with `words` in place of the command line's, and writes JSON. Raises RedlineError where a server
    does not start, or does not answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=ROOT / "models" / "kimi-nano")
    parser.add_argument("--paced", type=count, help="times a core of its own that steps take, by waiting")
    parser.add_argument("--step-ms", type=float, default=200.0)
    parser.add_argument("--streams", type=count, default=4)
    parser.add_argument("--waves", type=count, default=8, help="of prompts, in a turn")
    parser.add_argument("--slow", type=float, default=2.0, help="times as long as on a core of its own things take")
    parser.add_argument("--rounds", type=count, default=1)
    parser.add_argument("--save", type=output, default="runs/bounded-served-nano-cpu.json")
    given = parser.parse_args(words)
    loads, turns = list[float](), {kind: {WHOLE: list[Turn](), BOUNDED: list[Turn]()} for kind in KINDS}
    with ended_by_a_signal(), tempfile.TemporaryDirectory(prefix="redline-bounded-") as folder, ExitStack() as stack:
        servers, vocabulary = started(given, Path(folder), stack)
        for number, kind in itertools.product(range(given.rounds + 1), KINDS):
            waves = given.waves if number else WARM_WAVES
            load = asks(given.streams, waves, kind, vocabulary, number)
            for name in (WHOLE, BOUNDED) if number % 2 else (BOUNDED, WHOLE):
                turn = asyncio.run(sent(servers[name].port, *load, given.slow * KINDS[kind][2]))
                servers[name].check()
                if number:
                    loads.append(round(os.getloadavg()[0], 1))
                    turns[kind][name].append(turn)
                    print(f"round {number}, {kind}, {name}: {json.dumps(told([turn], given.step_ms))}", flush=True)
        for server in servers.values():
            server.stop()
    record: dict[str, Any] = {
        **provenance("torch", "uvicorn", "uvloop"),
        "model": f"{LAYERS} random layers, paced as Kimi-Nano" if given.paced else given.weights.name,
        "paced": given.paced,
        "step_ms": given.step_ms,
        "streams": given.streams,
        "slow": given.slow,
        "waves": {kind: dict(zip(("prompts", "tokens", "every_s"), of, strict=True)) for kind, of in KINDS.items()},
        "rounds": given.rounds,
        "load_average_after_turns": loads,
        "kinds": {kind: beside(of, given.step_ms) for kind, of in turns.items()},
    }
    given.save.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({kind: of["bounded_over_whole"] for kind, of in record["kinds"].items()}), flush=True)


def beside(turns: Mapping[str, Sequence[Turn]], step_ms: float) -> dict[str, Any]:
    """Figures of both servers, and those with the bound over those without."""
    figures = {name: told(all, step_ms) for name, all in turns.items()}
    keys = ("itl_ms_mean", "itl_ms_p99", "itl_ms_most", "ttft_ms_p50", "ttft_ms_most")
    return {
        **figures,
        "bounded_over_whole": {key: round(figures[BOUNDED][key] / figures[WHOLE][key], 3) for key in keys},
    }


if __name__ == "__main__":
    program(main)
