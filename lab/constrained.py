"""Checks that constrained output always matches its constraint, with a model of random weights.

    python -m lab.constrained [--schemas 500] [--masks FOLDER]

Each schema is requested in several ways, over the API and a complete engine with drafts: as a response format, as
structured outputs, as the arguments of a tool that is required, named, or optional; streamed and not; one choice and
four. Every answer that was ended by its grammar is parsed and validated by jsonschema. Closing tokens get a positive
bias, since random weights would rarely end a JSON text. `--masks` also measures the time of masks with a real
vocabulary, over answers to the same schemas.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import jsonschema
import torch

from lab.attack.schemas import schemas, unbounded
from lab.frontend import commit, machine
from lab.program import output, program
from redline import clock
from redline.api.app import create_app
from redline.api.config import ApiConfig
from redline.api.gateway.gateway import Gateway
from redline.api.telemetry.metrics import Metrics
from redline.chat.constraint import Calls, Constraint, compose
from redline.chat.template import K2_6
from redline.chat.tokenizer import Tokenizer
from redline.chat.vocabulary import grammar_tokens
from redline.messages.channel import MemoryChannel
from redline.messages.job import PAGE_TOKENS
from redline.messages.news import Stop
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.cpu import load
from redline.model.k2.write import random_checkpoint, tiny_config
from redline.run.fit import Layout
from redline.run.grammar.matcher import Matcher, Matchers
from redline.worker.config import DraftConfig, EngineConfig, Suffix
from redline.worker.engine import EngineCore, Loaded
from tests.tiny_tokenizer import TINY_VOCAB, tokenizer

MODEL = "tiny"

CONTEXT = 2048
ANSWER = 600  # maximum tokens of an answer
AT_ONCE = 8  # requests in flight
DRAFTS = Suffix(tokens=4, adaptive=False)

# How a schema is requested; each way has its own seed.
WAYS = (
    "response_format",
    "structured_outputs",
    "thinking",
    "required",
    "named",
    "auto",
    "n",
    "streamed",
    "calls streamed",
)


class Outcome(NamedTuple):
    """The outcome of one request: complete answers by validity, answers that were cut off, or a refusal."""

    way: str
    valid: int = 0
    cut: int = 0
    wrong: tuple[str, ...] = ()  # the errors of invalid answers
    refused: str | None = None
    tokens: int = 0


@cache
def bias() -> dict[str, float]:
    """Biases: closing tokens of strings, lists, objects, thinking and calls are more likely, and white space less
    likely.
    """
    token, special = tokenizer().encode, tokenizer().special
    likelier = {token(text)[0]: 4.0 for text in ('"', "}", "]", ",")}
    rarer = {token(text)[0]: -4.0 for text in (" ", "\n", "\t", "\r", "  ", "    ")}
    ends = {special(name): 7.0 for name in ("</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")}
    return {str(id): value for id, value in {**likelier, **rarer, **ends}.items()}


@asynccontextmanager
async def tiny_server(
    speculation: DraftConfig | None = DRAFTS, *, max_running: int = 32
) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of the complete system, in process: API, gateway, planner, runner and a tiny model of random weights."""
    sizes = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 64, "kv_lora_rank": 64}
    with TemporaryDirectory() as folder:
        random_checkpoint(folder, tiny_config(vocab_size=TINY_VOCAB, **sizes))
        model = load(Checkpoint.open(folder), torch.device("cpu"))
    pages, kv_dtype = max_running * CONTEXT // PAGE_TOKENS, torch.bfloat16
    layout = Layout(pages, CONTEXT, kv_dtype, model.config.kv_bytes_per_token(kv_dtype) * PAGE_TOKENS)
    config = EngineConfig(max_running=max_running, speculation=speculation)
    engine = EngineCore(Loaded(model, layout, "tiny", tokenizer=tokenizer), config)
    inbox, outbox = MemoryChannel(), MemoryChannel()
    gateway = Gateway(tokenizer(), K2_6, Metrics(MODEL, count().__next__))
    worker = gateway.monitor.join("worker", inbox)
    gateway.monitor.receive(worker, [engine.ready])
    loop = threading.Thread(target=engine.serve, args=(inbox, outbox), name="loop")
    loop.start()
    following = asyncio.create_task(gateway.monitor.follow(worker, outbox))
    app = create_app(gateway, ApiConfig(served_model_names=(MODEL,)))
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://tiny", timeout=None
        ) as client:
            yield client
    finally:
        inbox.put(Stop())
        await asyncio.to_thread(loop.join)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        gateway.close()
        await gateway.ended()


def request(schema: dict[str, Any], way: str, seed: int) -> dict[str, Any]:
    """The body of a chat request for this schema in one of WAYS."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": ANSWER,
        "seed": seed,
        "logit_bias": bias(),
        "thinking": {"type": "disabled"},
        "stream": way.endswith("streamed"),
    }
    form = {"type": "json_schema", "json_schema": {"name": "form", "strict": True, "schema": schema}}
    other = {"type": "function", "function": {"name": "other-tool_2", "parameters": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "get", "strict": True, "parameters": schema}}
    named = {"type": "function", "function": {"name": "get"}}
    match way:
        case "structured_outputs":
            return {**body, "structured_outputs": {"json": schema}, "temperature": 0}
        case "thinking":
            return {**body, "response_format": form, "thinking": {"type": "enabled"}}
        case "required":
            return {**body, "tools": [tool, other], "tool_choice": "required", "thinking": {"type": "enabled"}}
        case "named" | "calls streamed":
            return {**body, "tools": [other, tool], "tool_choice": named, "parallel_tool_calls": False}
        case "auto":
            return {**body, "tools": [tool, other]}
        case "n":
            return {**body, "response_format": form, "n": 4, "temperature": 1.5, "top_p": 0.95}
        case _:
            return {**body, "response_format": form}


async def ask(client: httpx.AsyncClient, schema: dict[str, Any], way: str, seed: int) -> Outcome:
    """Requests a schema in one way, and validates the answer."""
    body = request(schema, way, seed)
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code == 400:
        return Outcome(way, refused=str(answer.json()["error"]["message"]))
    answer.raise_for_status()
    choices = _joined(answer.text) if body["stream"] else answer.json()["choices"]
    valid, cut, wrong = 0, 0, list[str]()
    for choice in choices:
        if choice["finish_reason"] == "length":
            cut += 1
        elif (error := _error(choice, schema, way)) is None:
            valid += 1
        else:
            wrong.append(f"{way}: {error}: {json.dumps(choice)}")
    tokens = 0 if body["stream"] else answer.json()["usage"]["completion_tokens"]
    return Outcome(way, valid, cut, tuple(wrong), tokens=tokens)


def _joined(text: str) -> list[dict[str, Any]]:
    """The only choice of a stream, in the format of a whole answer."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    choice: dict[str, Any] = {"finish_reason": None, "message": message}
    for line in text.split("\n\n"):
        data = line.removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        for one in json.loads(data)["choices"]:
            delta = one["delta"]
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                calls: list[dict[str, Any]] = message["tool_calls"]
                if call["index"] == len(calls):
                    calls.append({"function": {"name": "", "arguments": ""}})
                for key, part in call["function"].items():
                    calls[call["index"]]["function"][key] += part or ""
            choice["finish_reason"] = one["finish_reason"] or choice["finish_reason"]
    return [choice]


def _error(choice: dict[str, Any], schema: dict[str, Any], way: str) -> str | None:
    """The error of a complete answer; None if it is valid."""
    message = choice["message"]
    calls = message.get("tool_calls") or []
    if way not in ("required", "named", "auto", "calls streamed"):
        return _invalid(message["content"], schema)
    if way in ("named", "calls streamed") and [call["function"]["name"] for call in calls] != ["get"]:
        return "not one call of the named tool"
    if not calls:
        return None if way == "auto" else "no call"
    for call in calls:
        name = call["function"]["name"]
        if name not in ("get", "other-tool_2"):
            return "a call of a tool that is not declared"
        if error := _invalid(call["function"]["arguments"], schema if name == "get" else {"type": "object"}):
            return error
    return None


def _invalid(text: str, schema: dict[str, Any]) -> str | None:
    try:
        value = json.loads(text)
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


async def ask_all(client: httpx.AsyncClient, asked: Sequence[dict[str, Any]], ways: Sequence[str]) -> list[Outcome]:
    """Every schema in every way, AT_ONCE requests at a time."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, schema: dict[str, Any], way: str) -> Outcome:
        async with free:
            return await ask(client, schema, way, number)

    return await asyncio.gather(*(one(n, schema, way) for n, schema in enumerate(asked) for way in ways))


def drawn(real: Tokenizer, matcher: Matcher, generator: torch.Generator) -> list[int]:
    """A text of the matcher's grammar: a draw from each mask, in which closing tokens have half of the probability."""
    closing = torch.tensor(real.encode('"}],'))
    text: list[int] = []
    while len(text) < ANSWER // 4:
        bits = (matcher.masks(())[0][:, None] >> torch.arange(32) & 1).flatten()[: real.vocab_size]
        allowed = bits.nonzero().flatten()
        weights = torch.ones(len(allowed))
        weights[torch.isin(allowed, closing)] = max(1, len(allowed) / 2)
        text.append(int(allowed[torch.multinomial(weights, 1, generator=generator)]))
        if text[-1] in real.stop_ids:
            break
        matcher.advance(text[-1:])
    return text


def masks(folder: Path, asked: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Microseconds of a mask with the vocabulary of a folder, over matching texts: wall time, and the thread's own.

    Texts are drawn first, with separate matchers: so hardly any time passes between two timed masks, as in an engine. A
    grammar's first masks are included, without anything precomputed.
    """
    real = Tokenizer.open(folder)
    tokens = grammar_tokens(real)
    drawing, timing = (Matchers(lambda: tokens, real.vocab_size) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    took: dict[str, list[float]] = {"wall": [], "thread": []}
    compiled: list[float] = []
    for schema in asked:
        constraint = Constraint(kind="json_schema", text=json.dumps(schema), param="schema")
        composed = compose(constraint, Calls(), None, real, thinks=False)
        assert composed is not None, "the schema has no constraint"
        text = drawn(real, drawing.begin(composed.grammar, ()), generator)
        began = clock.perf_counter()
        matcher = timing.begin(composed.grammar, ())
        matcher.forced()  # waits for the compilation
        compiled.append((clock.perf_counter() - began) * 1e3)
        for token in text:
            began = clock.perf_counter(), clock.thread_time()
            matcher.masks(())
            took["wall"].append((clock.perf_counter() - began[0]) * 1e6)
            took["thread"].append((clock.thread_time() - began[1]) * 1e6)
            matcher.advance((token,))
    drawing.close()
    timing.close()

    def told(times: list[float]) -> dict[str, float]:
        times = sorted(times)
        mean, half = round(statistics.fmean(times), 1), round(times[len(times) // 2], 1)
        return {"mean": mean, "p50": half, "p99": round(times[len(times) * 99 // 100], 1), "most": round(times[-1], 1)}

    count = len(took["wall"])
    us = {f"{which}_us": told(times) for which, times in took.items()}
    return {"vocabulary": real.vocab_size, "masks": count, **us, "compile_ms": told(compiled)}


def main() -> int:
    """Requests, validates, measures; prints and writes the result. 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=500, help="how many")
    parser.add_argument("--masks", type=Path, help="a folder with a tokenizer, for the times of masks")
    parser.add_argument("--out", type=output, default="runs/grammar-cpu.json", help="the JSON to write")
    asked = parser.parse_args()
    made = schemas(asked.schemas)

    async def run() -> list[Outcome]:
        async with tiny_server() as client:
            return await ask_all(client, made, WAYS)

    began = clock.perf_counter()
    outcomes = asyncio.run(run())
    reasons = Counter((outcome.way, outcome.refused) for outcome in outcomes if outcome.refused is not None)
    refused = {reason: times for (way, reason), times in reasons.items() if way == WAYS[0]}
    other_reasons = {f"{way}: {reason}": times for (way, reason), times in reasons.items() if reason not in refused}
    ways = {
        way: {
            "valid": sum(outcome.valid for outcome in outcomes if outcome.way == way),
            "cut": sum(outcome.cut for outcome in outcomes if outcome.way == way),
            "wrong": sum(len(outcome.wrong) for outcome in outcomes if outcome.way == way),
            "refused": sum(outcome.refused is not None for outcome in outcomes if outcome.way == way),
        }
        for way in WAYS
    }
    wrong = [text for outcome in outcomes for text in outcome.wrong]
    result: dict[str, Any] = {
        "what": "constrained output by random weights, validated by jsonschema; and what masks take",
        "machine": machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("llguidance", "jsonschema", "torch")},
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "load_average": round(os.getloadavg()[0], 1),
        "schemas": len(made),
        "accepted": 1 - sum(refused.values()) / len(made),
        "refused": refused,
        "refused_in_other_ways": other_reasons,
        "seconds": round(clock.perf_counter() - began, 1),
        "ways": ways,
        "wrong": wrong[:20],
    }
    if asked.masks is not None:
        sound = [schema for schema in made if "odd" not in schema["properties"]]
        result["masks"] = {
            "strings of any length": masks(asked.masks, [unbounded(schema) for schema in sound]),
            "strings of a few characters": masks(asked.masks, sound),
        }
    asked.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(result, indent=2, ensure_ascii=False))
    return 1 if wrong else 0


if __name__ == "__main__":
    program(main)
