"""One request through the whole system, in one process: a checkpoint's folder, the engine, the gateway, the API, the
official client. Read this first: the parts are created in the order in which a request passes them.
"""

import asyncio
import threading
from pathlib import Path

import httpx2
from openai import AsyncOpenAI

from redline.api.app import create_app
from redline.api.config import ApiConfig
from redline.api.gateway.gateway import Gateway
from redline.api.telemetry.metrics import Metrics
from redline.chat.template import style_of
from redline.chat.tokenizer import Tokenizer
from redline.messages.channel import MemoryChannel
from redline.messages.news import Stop
from redline.model.k2.write import random_checkpoint
from redline.worker.config import EngineConfig
from redline.worker.engine import EngineCore
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer

TOKENS = 40


def test_one_request_through_the_whole_system(tmp_path: Path):
    # On disk: weights in Kimi's format, here random ones, and a tokenizer in Kimi's format.
    random_checkpoint(tmp_path, kernel_config(vocab_size=TINY_VOCAB))
    write_tiny_tokenizer(tmp_path)

    # The worker: model, pages, planner, runner, and a thread that runs the loop. `redline serve` runs it as a process.
    engine = EngineCore.load(tmp_path, EngineConfig(kv_memory=1_000_000, max_model_len=512))
    to_worker, from_worker = MemoryChannel(), MemoryChannel()
    worker = threading.Thread(target=engine.serve, args=(to_worker, from_worker))
    worker.start()
    try:
        streamed, whole = asyncio.run(_ask(tmp_path, engine, to_worker, from_worker))
    finally:
        to_worker.put(Stop())
        worker.join()

    assert len(streamed) > 1, "the answer must arrive in several chunks"
    assert "".join(streamed) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == TOKENS
    assert whole.usage.prompt_tokens_details.cached_tokens == 64, "the second request must reuse the first one's page"
    engine.planner.check()
    assert engine.planner.load().pages_used == 0


async def _ask(folder: Path, engine: EngineCore, to_worker: MemoryChannel, from_worker: MemoryChannel):
    """The same greedy completion twice: streamed, and as one response."""
    # The API's process: text and protocol on one side, messages on the other.
    gateway = Gateway(Tokenizer.open(folder), style_of(folder), Metrics("tiny"))
    worker = gateway.monitor.join("worker", to_worker)
    gateway.monitor.receive(worker, [engine.ready])
    following = asyncio.create_task(gateway.monitor.follow(worker, from_worker))
    app = create_app(gateway, ApiConfig(served_model_names=("tiny",)))

    # The client.
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    async with AsyncOpenAI(base_url="http://redline/v1", api_key="none", http_client=http) as client:
        asked = {
            "model": "tiny",
            "prompt": "hello and the functions " * 12,
            "max_tokens": TOKENS,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        chunks = [chunk async for chunk in await client.completions.create(stream=True, **asked)]
        whole = await client.completions.create(**asked)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    gateway.close()
    return [choice.text for chunk in chunks for choice in chunk.choices], whole
