"""The series that vLLM's Grafana dashboard queries, and their values."""

import inspect
import re
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from redline.api.config import ApiConfig
from redline.api.telemetry.metrics import Metrics, OwnMetrics
from redline.api.telemetry.scrape import create_metrics_app
from redline.messages.delta import Delta
from redline.messages.job import Job
from redline.messages.news import STEP_SIZES, Load, StepTimes
from tests.api.test_chat import ask
from tests.api.world import END, MODEL, World, answer, ids
from tests.clocks import FakeClock

pytestmark = pytest.mark.anyio

# The series used by the panels of vLLM's dashboard, and by those that its users add.
ASKED = """
    e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum e2e_request_latency_seconds_count
    prompt_tokens_total generation_tokens_total
    request_time_per_output_token_seconds_bucket inter_token_latency_seconds_bucket
    num_requests_running num_requests_waiting
    time_to_first_token_seconds_bucket time_to_first_token_seconds_sum time_to_first_token_seconds_count
    kv_cache_usage_perc request_prompt_tokens_bucket request_generation_tokens_bucket request_success_total
    request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
    request_inference_time_seconds_sum request_max_num_generation_tokens_sum request_params_n_sum
    request_params_max_tokens_sum iteration_tokens_total_bucket iteration_tokens_total_sum cache_config_info
    num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def values(text: bytes) -> dict[str, float]:
    """The series by name[,le], without other labels; checks that `engine` and `model_name` are present."""
    found: dict[str, float] = {}
    for line in text.decode().splitlines():
        if match := re.fullmatch(r"vllm:(\w+)\{(.*)\} (\S+)", line):
            assert 'engine="0"' in match[2]
            assert f'model_name="{MODEL}"' in match[2]
            le = re.search(r'le="([^"]+)"', match[2])
            found[match[1] + (f",{le[1]}" if le else "")] = float(match[3])
    return found


def timed(job: Job) -> list[Delta]:
    first = Delta(job=job.id, tokens=tuple(ids("</think>ab")), queued_s=0.0)
    return [first, Delta(job=job.id, tokens=(*ids("c"), END), finish="stop")]


async def test_every_series_of_the_dashboard_is_there_with_its_labels() -> None:
    async with World(timed) as world:
        await ask(world, n=2)
        world.metrics.load(load(), "worker")
        text = (await world.http.get("/metrics")).content
    found = values(text)
    names = {name.partition(",")[0] for name in found}
    assert set(ASKED.split()) <= names
    assert b"process_resident_memory_bytes " in text
    assert b"process_cpu_seconds_total " in text
    assert found["inter_token_latency_seconds_bucket,80.0"] == 2
    assert found["request_time_per_output_token_seconds_bucket,80.0"] == 2
    assert b'block_size="64"' in text
    assert b'num_gpu_blocks="1000"' in text


async def test_requests_and_jobs_are_counted_by_their_tokens() -> None:
    async with World(answer("x" * 30)) as world:
        await ask(world, n=3, max_tokens=20)
        found = values(world.metrics.expose())
        prompt = len(world.engine.jobs[0].tokens)
    assert found["request_prompt_tokens_count"] == 3
    assert found["request_prompt_tokens_sum"] == 3 * prompt
    assert (found["request_generation_tokens_count"], found["request_generation_tokens_sum"]) == (3, 60)
    assert (found["request_max_num_generation_tokens_count"], found["request_max_num_generation_tokens_sum"]) == (1, 20)
    assert (found["request_params_n_sum"], found["request_params_max_tokens_sum"]) == (3, 20)
    assert found["request_generation_tokens_bucket,20.0"] == 3
    assert found["request_generation_tokens_bucket,10.0"] == 0


async def test_the_times_of_a_job_add_up() -> None:
    clock = FakeClock()

    def script(job: Job) -> Any:
        clock.advance(0.06)  # the worker reports half of it as queue time
        yield Delta(job=job.id, tokens=tuple(ids("</think>a")), queued_s=0.03)
        clock.advance(0.04)
        yield Delta(job=job.id, tokens=(END,), finish="stop")

    with clock.installed():
        async with World(script) as world:
            await ask(world)
            found = values(world.metrics.expose())
    queue, prefill, decode, inference = (
        found[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode", "inference")
    )
    assert queue == 0.03
    assert (prefill, decode, inference) == (pytest.approx(0.03), pytest.approx(0.04), pytest.approx(0.07))
    assert found["e2e_request_latency_seconds_sum"] == pytest.approx(0.1)


async def test_a_job_without_a_token_has_no_times() -> None:
    async with World(lambda job: [Delta(job=job.id, finish="error", error="no", fault="failed")]) as world:
        with pytest.raises(Exception, match="error"):
            await ask(world)
        found = values(world.metrics.expose())
    assert (found["request_queue_time_seconds_count"], found["request_generation_tokens_sum"]) == (0, 0)
    assert found["request_prompt_tokens_count"] == 1


def load(steps: int = 1, sizes: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1), positions: int = 0) -> Load:
    others = "running waiting pages_used pages_cached pages_total replayed led preemptions prompt_tokens"
    counters = dict.fromkeys(f"{others} prompt_tokens_cached generation_tokens".split(), 0)
    return Load(steps=steps, step_sizes=sizes, step_positions=positions, **counters)


def test_step_sizes_add_up_over_workers() -> None:
    metrics = Metrics(MODEL, iter(range(0, 100, 10)).__next__)
    none = [0] * (len(STEP_SIZES) + 1)
    metrics.load(load(2, (1, 1, *none[2:]), 9), "worker")
    metrics.load(load(4, (1, 2, *none[3:], 1), 9 + 8 + 20_000), "worker")
    metrics.load(load(1, (1, *none[1:]), 1), "worker", epoch=2)
    found = values(metrics.expose())
    assert found["iteration_tokens_total_bucket,1.0"] == 2
    assert found["iteration_tokens_total_bucket,8.0"] == 4
    assert found["iteration_tokens_total_bucket,16384.0"] == 4
    assert found["iteration_tokens_total_bucket,+Inf"] == found["iteration_tokens_total_count"] == 5
    assert found["iteration_tokens_total_sum"] == 9 + 8 + 20_000 + 1


def test_a_worker_that_is_started_again_counts_anew_however_many_steps_its_first_news_has() -> None:
    """Its last start had ended early: its counters may be lower now, or higher, than the last reported ones."""
    metrics = Metrics(MODEL)
    told = (1, 0.75), (2, 0.5)
    sums = [StepTimes(kind="decode", steps=steps, seconds=1.0, floor_s=floor_s) for steps, floor_s in told]
    for epoch, one in enumerate(sums, 1):
        metrics.load(msgspec.structs.replace(load(10 * epoch), step_times=(one,)), "worker", epoch)
    metrics.load(msgspec.structs.replace(load(11), step_times=sums[:1]), "worker", 1)  # a late message
    text = metrics.expose().decode()
    assert re.search(r"^redline:timed_steps_total\{.*\} 3.0$", text, re.MULTILINE), text
    assert re.search(r"^redline:step_floor_seconds_total\{.*\} 1.25$", text, re.MULTILINE), text


def test_what_a_start_of_a_worker_reports_after_it_has_ended_moves_no_gauge() -> None:
    metrics = Metrics(MODEL)
    busy = msgspec.structs.replace(load(5), running=3, kv_chunks=2, pages_used=1, pages_total=4)
    gauges = "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "redline:kv_chunks"

    def found() -> list[float]:
        text = metrics.expose().decode()
        metrics._exposed_until = 0.0
        return [float(re.search(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)[1]) for name in gauges]  # type: ignore[index]

    metrics.load(busy, "worker", 1)
    assert found() == [3, 0.25, 2]
    metrics.lost("worker", 1)
    metrics.load(msgspec.structs.replace(busy, steps=6), "worker", 1)
    assert found() == [0, 0, 0], "a late message changes no gauge"
    metrics.load(busy, "worker", 2)
    assert found() == [3, 0.25, 2]


async def test_metrics_have_a_port_without_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    async with World(answer("a"), keys_file=str(tmp_path / "keys")) as world:
        assert (await world.http.get("/metrics")).status_code == 401
        app = create_metrics_app(world.gateway.metrics, ApiConfig(served_model_names=(MODEL,)))
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://redline") as scraper:
            told = await scraper.get("/metrics")
            assert told.status_code == 200
            assert told.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "request_queue_time_seconds" in told.text
            for path in ("/", "/v1/models", "/v1/chat/completions"):
                assert (await scraper.get(path)).status_code == 404
            page = await scraper.get("/metrics", headers={"origin": "https://evil.example"})
            assert page.status_code == 403


def own(text: bytes, name: str) -> dict[str, float]:
    """A `redline:` series by engine."""
    found = re.findall(rf'^redline:{name}\{{engine="(\d)",model_name="{MODEL}"\}} (\S+)$', text.decode(), re.MULTILINE)
    return {engine: float(value) for engine, value in found}


async def test_a_scrape_says_whether_the_server_is_ready_as_health_does() -> None:
    async def told() -> tuple[float, int]:
        scraped = (await world.http.get("/metrics")).content
        return own(scraped, "ready")["0"], (await world.http.get("/health")).status_code

    async with World(answer("a")) as world:
        assert await told() == (1, 200)
        world.gateway.monitor.mark_down(world.link, "killed")
        assert await told() == (0, 503)
        world.engine.serve(world.gateway, epoch=2)
        assert await told() == (1, 200)


async def test_starts_of_workers_are_counted() -> None:
    async with World(answer("a")) as world:
        world.engine.serve(world.gateway, name="another")
        world.gateway.monitor.mark_down(world.link, "killed")
        world.engine.serve(world.gateway, epoch=2)
        assert own(world.metrics.expose(), "worker_starts_total") == {"0": 2, "1": 1}


def test_what_a_replica_leaves_to_the_supervisor_takes_what_the_server_s_own_metrics_take() -> None:
    left_out = [name for name in vars(OwnMetrics) if not name.startswith("_") and hasattr(Metrics, name)]
    assert "load" in left_out
    for name in left_out:
        assert inspect.signature(getattr(OwnMetrics, name)) == inspect.signature(getattr(Metrics, name)), name
