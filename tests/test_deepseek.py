"""DeepSeek-V3 on a CPU: a tiny random checkpoint in its published form, from the folder to an answer over HTTP."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError

from redline.api.app import create_app
from redline.api.config import ApiConfig
from redline.api.gateway.gateway import Gateway
from redline.api.telemetry.metrics import Metrics
from redline.chat.template import style_of
from redline.chat.tokenizer import Tokenizer
from redline.errors import ConfigError
from redline.folder import check_model
from redline.messages.channel import MemoryChannel
from redline.messages.news import Stop
from redline.model.k2.config import K2Config
from redline.model.k2.write import random_checkpoint
from redline.model.spec import spec_of
from redline.worker.config import EngineConfig
from redline.worker.engine import Engine, EngineCore
from tests import forked
from tests.tiny_model import SUFFIX, Answer, job, kernel_config, prompt, run
from tests.tiny_tokenizer import DEEPSEEK_VOCAB, write_tiny_deepseek_tokenizer

R1 = "{{'<｜Assistant｜><think>\\n'}}"  # what tells R1's template from V3's
QUESTION = "hello and the functions " * 12


def config() -> K2Config:
    return kernel_config(
        vocab_size=DEEPSEEK_VOCAB,
        num_hidden_layers=5,
        first_k_dense_replace=3,
        n_routed_experts=32,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        intermediate_size=128,
        moe_intermediate_size=64,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    random_checkpoint(folder, config(), 5, "fp8", "deepseek")
    return write_tiny_deepseek_tokenizer(folder, R1)


def load(folder: Path, **changes: Any) -> EngineCore:
    with forked.all_processes():
        return EngineCore.load(
            folder, EngineConfig(kv_memory=10_000_000, max_model_len=1024, max_running=4, device="cpu", **changes)
        )


def answers(folder: Path, **changes: Any) -> dict[str, Answer]:
    """Of a prompt that repeats itself, and of the same again: a prefix of the second one is cached."""
    engine = load(folder, **changes)
    tokens = [token % DEEPSEEK_VOCAB for token in prompt(3, 15)] * 10
    jobs = [job(name, tokens, max_tokens=40, logprobs=None, stop_ids=()) for name in ("first", "again")]
    try:
        with torch.inference_mode():
            return {name: answer for one in jobs for name, answer in run(engine, [one]).items()}
    finally:
        engine.runner.close()


@contextmanager
def served(folder: Path, engine: EngineCore) -> Iterator[tuple[Any, Any]]:
    """The worker's channels, while its loop runs."""
    to_worker, from_worker = MemoryChannel(), MemoryChannel()
    worker = threading.Thread(target=engine.serve, args=(to_worker, from_worker))
    worker.start()
    try:
        yield to_worker, from_worker
    finally:
        to_worker.put(Stop())
        worker.join()


def ask(folder: Path, *requests: dict[str, Any]) -> list[Any]:
    """The responses of an API over the model, one request after another; of one that is refused its error."""

    async def asked(engine: EngineCore, to_worker: Any, from_worker: Any) -> list[Any]:
        gateway = Gateway(Tokenizer.open(folder), style_of(folder, spec_of(folder).chat), Metrics("tiny"))
        worker = gateway.monitor.join("worker", to_worker)
        gateway.monitor.receive(worker, [engine.ready])
        following = asyncio.create_task(gateway.monitor.follow(worker, from_worker))
        app = create_app(gateway, ApiConfig(served_model_names=("tiny",)))
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
        found: list[Any] = []
        async with AsyncOpenAI(base_url="http://redline/v1", api_key="none", http_client=http) as client:
            for request in requests:
                messages = [{"role": "user", "content": QUESTION}]
                try:
                    found.append(
                        await client.chat.completions.create(**{"model": "tiny", "messages": messages, **request})
                    )
                except BadRequestError as error:
                    found.append(error)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        gateway.close()
        await gateway.ended()
        return found

    engine = load(folder, speculation=SUFFIX)
    with served(folder, engine) as channels:
        found = asyncio.run(asked(engine, *channels))
    engine.planner.check()
    assert engine.planner.load().pages_used == 0
    return found


def test_a_chat_over_http_with_a_cached_prefix_and_suffix_drafts(folder: Path) -> None:
    check_model(folder)
    greedy = {"max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
    first, again = ask(folder, greedy, greedy)
    assert first.choices[0].message == again.choices[0].message
    assert first.usage.completion_tokens == 40
    assert first.usage.completion_tokens_details.reasoning_tokens > 0, "R1's answer begins with reasoning"
    assert again.usage.prompt_tokens_details.cached_tokens == 64


def test_an_answer_follows_a_schema_and_tools_are_refused(folder: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["the"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer, refused = ask(
        folder, {"response_format": form, "max_tokens": 200, "temperature": 0, "seed": 1}, {"tools": tools}
    )
    assert answer.choices[0].message.content.replace(" ", "").replace("\n", "") == '{"a":"the"}'
    assert "declares no tools" in str(refused)


def test_two_ranks_and_drafts_answer_as_one_without(folder: Path) -> None:
    alone = answers(folder)
    assert alone["again"].tokens == alone["first"].tokens
    assert alone["again"].cached_tokens == 128
    drafted = answers(folder, speculation=SUFFIX)
    assert drafted["again"].tokens == alone["first"].tokens
    assert sum(answer.proposed for answer in drafted.values()) > 0
    exact, ranks = (answers(folder, ranks=ranks, speculation=SUFFIX, kv_dtype="float32") for ranks in (1, 2))
    assert [answer.tokens for answer in ranks.values()] == [answer.tokens for answer in exact.values()]


def test_an_engine_in_this_process_has_the_style_of_its_folder(folder: Path) -> None:
    with Engine.open(folder, EngineConfig(kv_memory=1_000_000, max_model_len=128, device="cpu")) as engine:
        assert engine.style == style_of(folder, "deepseek")


def test_a_gpu_is_refused_by_what_is_missing_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"routing within groups of experts \(n_group is 8\) .* set engine.device to"):
        EngineCore.load(folder, EngineConfig(), device=torch.device("cuda"))
