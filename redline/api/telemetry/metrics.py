"""Prometheus metrics under the names that vLLM dashboards expect, from the gateway and from worker reports."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate, zip_longest
from math import inf
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from starlette.types import Scope

from redline import clock
from redline.api.errors import Refusal
from redline.api.telemetry.step_metrics import StepMetrics
from redline.api.telemetry.tier_metrics import TierMetrics
from redline.errors import Overloaded
from redline.messages.delta import Finish
from redline.messages.job import PAGE_TOKENS
from redline.messages.news import STEP_SIZES, Load, Ready, Role
from redline.messages.step import Drafter

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ENGINE = "0"  # label value that dashboards select: the first worker, and server-wide metrics

EXPOSED_S = 0.25  # seconds for which the text of a scrape is reused

# Upper bounds in seconds, those of vLLM.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
E2E_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 80, 120, 240, 480, 960, 1920, 7680)
# In tokens: 1, 2, 5, 10 ... up to a context.
COUNT_BUCKETS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
CHOICE_BUCKETS = (1, 2, 5, 10, 20, 50, 64)

LABELS = ("model_name", "engine")
# Each metric's name and help. Histograms: then the upper bounds; each has one series, of the whole server.
HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "From the request's arrival to its first token", TTFT_BUCKETS),
    ("vllm:request_time_per_output_token_seconds", "(last token - first token) / (tokens - 1)", TOKEN_BUCKETS),
    ("vllm:e2e_request_latency_seconds", "From the request's arrival to its last token", E2E_BUCKETS),
    ("vllm:request_prompt_tokens", "Prompt tokens of a job", COUNT_BUCKETS),
    ("vllm:request_generation_tokens", "Tokens that a job generated", COUNT_BUCKETS),
    ("vllm:request_max_num_generation_tokens", "Tokens of the longest choice of a request", COUNT_BUCKETS),
    ("vllm:request_params_n", "Choices that a request asks for", CHOICE_BUCKETS),
    ("vllm:request_params_max_tokens", "max_tokens of a request", COUNT_BUCKETS),
    ("vllm:request_queue_time_seconds", "From the worker's receipt of a job to its place in the batch", E2E_BUCKETS),
    ("vllm:request_prefill_time_seconds", "From a job's admission to the batch to its first token", E2E_BUCKETS),
    ("vllm:request_decode_time_seconds", "From the first token to the last", E2E_BUCKETS),
    ("vllm:request_inference_time_seconds", "From a job's admission to the batch to its last token", E2E_BUCKETS),
    ("redline:event_loop_lag_seconds", "Delay of a timer of the API's event loop", LAG_BUCKETS),
)
# Counters and gauges: then the labels besides LABELS.
COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens of admitted jobs"),
    ("vllm:request_success", "Jobs that ended, by reason", "finished_reason"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    ("redline:requests", "HTTP requests that have ended", "route", "status"),
    ("redline:rejections", "Requests rejected, by reason", "reason"),
    ("redline:worker_starts", "Number of starts of a worker, including the first"),
    ("redline:steps", "Engine steps, replayed as a CUDA graph or run eagerly", "by"),
    ("vllm:num_preemptions", "Jobs that were preempted and recomputed"),
    ("vllm:spec_decode_num_drafts", "Steps of a job that verified draft tokens"),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified"),
    ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted"),
    (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by position among the draft tokens of a step",
        "position",
    ),
    ("redline:draft_tokens", "Draft tokens verified, by drafter", "by"),
    ("redline:accepted_draft_tokens", "Draft tokens accepted, by drafter", "by"),
    ("redline:handoffs", "Prompts of a worker's KV transfers, by outcome", "result"),
    ("redline:role_changes", "Number of role switches of a worker", "role"),
    ("redline:sla_requests", "Ended requests of a class, by the SLO targets met", "sla", "ttft", "itl"),
    ("redline:jobs_moved", "Jobs requeued to another worker"),
    ("redline:images_encoded", "Images that the vision encoder has encoded"),
    ("redline:images_reused", "Images of jobs that were encoded already"),
    ("redline:image_encode_seconds", "Time of the vision encoder"),
)
GAUGES = (
    (
        "vllm:cache_config_info",
        "Configuration of the KV cache",
        *("block_size", "num_gpu_blocks", "enable_prefix_caching", "max_model_len"),
    ),
    ("vllm:num_requests_running", "Jobs in the running batch"),
    ("vllm:num_requests_waiting", "Jobs waiting for admission to the batch"),
    ("vllm:kv_cache_usage_perc", "Share of KV pages that jobs own, 0 to 1"),
    ("redline:queue_jobs", "Jobs without a first token"),
    ("redline:queue_tokens", "Prompt tokens of jobs without a first token"),
    ("redline:ready", "1 while new requests are accepted, as /health reports, else 0"),
    ("redline:kv_chunks", "KV chunks offered to other workers, or in transfer to this one"),
    ("redline:worker_role", "1 for the current role of a worker, 0 for the others", "role"),
    ("redline:workers_wanted", "Number of workers that the autoscaler requests to meet the SLO targets"),
    ("redline:sla_target_seconds", "SLO target of a class of requests", "sla", "of"),
)
# Metrics with the value of a field of `Load`; its counters begin at 0 in each start of a worker.
LOAD_GAUGES = {"vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting"}
LOAD_COUNTERS = {
    "vllm:prefix_cache_queries": "prompt_tokens",
    "vllm:prefix_cache_hits": "prompt_tokens_cached",
    "vllm:num_preemptions": "preemptions",
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
    "redline:images_encoded": "images_encoded",
    "redline:images_reused": "images_reused",
    "redline:image_encode_seconds": "encode_s",
}


class TokenTimes:
    """Metrics updated for every token: plain numbers that become series at scrape time, at a tenth of the cost."""

    def __init__(self, model_name: str) -> None:
        self._labels = [model_name, ENGINE]
        self._counts = [0] * (len(TOKEN_BUCKETS) + 1)
        self._seconds = 0.0
        self._tokens = 0

    def generated(self, tokens: int, gap_s: float | None) -> None:
        """Count the tokens of a delta. gap_s: seconds since the job's previous delta with tokens; None: it is the
        first."""
        self._tokens += tokens
        if gap_s is not None:
            self._counts[bisect_left(TOKEN_BUCKETS, gap_s)] += 1
            self._seconds += gap_s

    def collect(self) -> Iterator[Metric]:
        """The series in Prometheus's form; called by the registry."""
        label = ["model_name", "engine"]
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens generated", labels=label)
        tokens.add_metric(self._labels, self._tokens)
        yield tokens
        gaps = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Seconds between consecutive deltas of a job", labels=label
        )
        bounds = [*(str(float(bound)) for bound in TOKEN_BUCKETS), "+Inf"]
        gaps.add_metric(self._labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._seconds)
        yield gaps


class StepSizes:
    """Histogram of the number of positions per engine step, as counted by the workers."""

    def __init__(self, model_name: str) -> None:
        self._labels = [model_name, ENGINE]
        self._counts = [0] * (len(STEP_SIZES) + 1)
        self._positions = 0

    def add(self, load: Load, last: Load | None) -> None:
        """Count the steps between two reports of a worker. last: None at the first one since its start."""
        before = last.step_sizes if last else ()
        for place, (now, then) in enumerate(zip_longest(load.step_sizes, before, fillvalue=0)):
            self._counts[place] += now - then
        self._positions += load.step_positions - (last.step_positions if last else 0)

    def collect(self) -> Iterator[Metric]:
        """The series in Prometheus's form; called by the registry."""
        sizes = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens computed by a step", labels=["model_name", "engine"]
        )
        bounds = [*(str(float(bound)) for bound in STEP_SIZES), "+Inf"]
        sizes.add_metric(self._labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._positions)
        yield sizes


class Metrics:
    """The metrics of one server, in their own registry, so that several servers can run in one process. Times are in
    seconds."""

    def __init__(self, model_name: str, clock: Callable[[], float] = clock.monotonic) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._own = own = (model_name, ENGINE)
        self._histograms = {
            name: Histogram(name, help, LABELS, registry=self.registry, buckets=buckets).labels(*own)
            for name, help, buckets in HISTOGRAMS
        }
        self._counters = {
            name: Counter(name, help, (*LABELS, *more), registry=self.registry) for name, help, *more in COUNTERS
        }
        self._gauges = {
            name: Gauge(name, help, (*LABELS, *more), registry=self.registry) for name, help, *more in GAUGES
        }
        self.time_to_first_token = self._histograms["vllm:time_to_first_token_seconds"]
        self.time_per_output_token = self._histograms["vllm:request_time_per_output_token_seconds"]
        self.e2e_latency = self._histograms["vllm:e2e_request_latency_seconds"]
        self.loop_lag = self._histograms["redline:event_loop_lag_seconds"]
        self.prompt_tokens = self._counters["vllm:prompt_tokens"].labels(*own)
        self.tokens = TokenTimes(model_name)
        self.registry.register(self.tokens)
        self._step_sizes = StepSizes(model_name)
        self.registry.register(self._step_sizes)
        self._tiers = TierMetrics(self.registry)
        self._step_times = StepMetrics(self.registry)
        self._engines: dict[str, str] = {}  # the engine label of each worker, by its name
        for name in (
            *LOAD_GAUGES,
            "vllm:kv_cache_usage_perc",
            "redline:queue_jobs",
            "redline:queue_tokens",
            "redline:ready",
        ):
            self._gauges[name].labels(*own)  # creates the series
        for name in (*LOAD_COUNTERS, "redline:jobs_moved"):
            self._counters[name].labels(*own)
        self._clock = clock
        self._exposed, self._exposed_until = b"", -inf
        self._last: dict[str, tuple[int, Load]] = {}  # by worker: epoch, and the report that the counters include
        self._ended: dict[str, int] = {}  # by worker: the latest epoch that has ended

    def asked(self, n: int, max_tokens: int) -> None:
        """Count an admitted request."""
        self._histograms["vllm:request_params_n"].observe(n)
        self._histograms["vllm:request_params_max_tokens"].observe(max_tokens)

    def answered_whole(self, longest: int) -> None:
        """Count a request after its last job has ended. longest: tokens of its longest answer."""
        self._histograms["vllm:request_max_num_generation_tokens"].observe(longest)

    def job_ended(self, prompt: int, generated: int) -> None:
        """Count an ended job, by its tokens."""
        self._histograms["vllm:request_prompt_tokens"].observe(prompt)
        self._histograms["vllm:request_generation_tokens"].observe(generated)

    def job_took(self, queued_s: float, prefill_s: float, decode_s: float) -> None:
        """Count an ended job that had a first token, by its times."""
        self._histograms["vllm:request_queue_time_seconds"].observe(queued_s)
        self._histograms["vllm:request_prefill_time_seconds"].observe(prefill_s)
        self._histograms["vllm:request_decode_time_seconds"].observe(decode_s)
        self._histograms["vllm:request_inference_time_seconds"].observe(prefill_s + decode_s)

    def ready(self, ready: Ready, worker: str) -> None:
        """Set the cache and device series of a worker that is ready."""
        own = self._labels(worker)
        self._gauges["vllm:cache_config_info"].remove_by_labels({"engine": own[1]})
        self._gauges["vllm:cache_config_info"].labels(*own, PAGE_TOKENS, ready.pages, True, ready.max_model_len).set(1)
        self._step_times.measured(own, ready)

    def moved(self) -> None:
        """Count a requeued job of a worker that went down."""
        self._counters["redline:jobs_moved"].labels(*self._own).inc()

    def joined(self, worker: str) -> None:
        """Count a worker's start. At its first start the worker gets the next engine label."""
        self._counters["redline:worker_starts"].labels(*self._labels(worker)).inc()

    def promised(self, sla: str, ttft_ms: float | None, itl_ms: float | None) -> None:
        """Set the SLO targets of a class; None: no target."""
        for of, most_ms in (("ttft", ttft_ms), ("itl", itl_ms)):
            if most_ms is not None:
                self._gauges["redline:sla_target_seconds"].labels(*self._own, sla, of).set(most_ms / 1000)
        for ttft in ("met", "missed"):
            for itl in ("met", "missed"):
                self._counters["redline:sla_requests"].labels(*self._own, sla, ttft, itl)  # creates the series

    def kept(self, sla: str, *, ttft: bool, itl: bool) -> None:
        """Count an ended request of a class, by the SLO targets met."""
        self._counters["redline:sla_requests"].labels(
            *self._own, sla, "met" if ttft else "missed", "met" if itl else "missed"
        ).inc()

    def workers_wanted(self, workers: int) -> None:
        """Set the number of workers to run. The series does not exist before the first call."""
        self._gauges["redline:workers_wanted"].labels(*self._own).set(workers)

    def lost(self, worker: str, epoch: int = 1) -> None:
        """Reset the gauges of a worker that went down; later reports of that epoch do not set them again."""
        own, self._ended[worker] = self._labels(worker), epoch
        for name in (*LOAD_GAUGES, "vllm:kv_cache_usage_perc", "redline:kv_chunks"):
            self._gauges[name].labels(*own).set(0)
        for each in get_args(Role):
            self._gauges["redline:worker_role"].labels(*own, each).set(0)

    def role(self, worker: str, role: Role) -> None:
        """Set the current role of a worker."""
        for each in get_args(Role):
            self._gauges["redline:worker_role"].labels(*self._labels(worker), each).set(each == role)

    def turned(self, worker: str, role: Role) -> None:
        """Count a role switch of a serving worker."""
        self._counters["redline:role_changes"].labels(*self._labels(worker), role).inc()

    def _labels(self, worker: str) -> tuple[str, str]:
        return self._own[0], self._engines.setdefault(worker, str(len(self._engines)))

    def finished(self, finish: Finish) -> None:
        """Count an ended job, by vLLM's name of the finish reason."""
        self._counters["vllm:request_success"].labels(*self._own, "abort" if finish == "aborted" else finish).inc()

    def queue(self, jobs: Callable[[], int], tokens: Callable[[], int]) -> None:
        """Set the callbacks that return the number of waiting jobs and of their prompt tokens at each scrape."""
        self._gauges["redline:queue_jobs"].labels(*self._own).set_function(jobs)
        self._gauges["redline:queue_tokens"].labels(*self._own).set_function(tokens)

    def health(self, ready: Callable[[], bool]) -> None:
        """Set the callback that returns whether the server is ready at each scrape."""
        self._gauges["redline:ready"].labels(*self._own).set_function(lambda: float(ready()))

    def answered(self, scope: Scope, status: int) -> None:
        """Count an ended request; status 0: its client disconnected before a status was sent."""
        known = scope.get("endpoint") is not None and not scope.get("path_params")  # else clients could create series
        route = scope["path"] if known else "other"
        self._counters["redline:requests"].labels(*self._own, route, str(status or "none")).inc()

    def rejected(self, error: Exception) -> None:
        """Count a request that was rejected for the server's capacity or the key's rate limit, by the error's
        reason."""
        if isinstance(error, Refusal) and error.status == 429:
            self._counters["redline:rejections"].labels(*self._own, getattr(error, "limit", "rate")).inc()
        elif isinstance(error, Overloaded):
            self._counters["redline:rejections"].labels(*self._own, error.reason).inc()

    def load(self, load: Load, worker: str, epoch: int = 1) -> None:
        """Apply a worker's report. epoch: the start of the worker that it belongs to; counters begin at 0 in each.
        Reports of earlier epochs than the newest are ignored."""
        of, before = self._last.get(worker, (epoch, None))
        if epoch < of:
            return
        last = before if of == epoch else None
        own = self._labels(worker)
        if epoch > self._ended.get(worker, 0):
            for name, field in LOAD_GAUGES.items():
                self._gauges[name].labels(*own).set(getattr(load, field))
            used = load.pages_used / load.pages_total if load.pages_total else 0.0
            self._gauges["vllm:kv_cache_usage_perc"].labels(*own).set(used)
            self._gauges["redline:kv_chunks"].labels(*own).set(load.kv_chunks)
        for name, field in LOAD_COUNTERS.items():
            self._counters[name].labels(*own).inc(getattr(load, field) - (getattr(last, field) if last else 0))
        for by, field in (("replay", "replayed"), ("host", "led")):
            steps = getattr(load, field) - (getattr(last, field) if last else 0)
            self._counters["redline:steps"].labels(*own, by).inc(steps)
        for (by, tokens, accepted), (_, tokens_then, accepted_then) in zip(_drafts(load), _drafts(last), strict=True):
            self._counters["redline:draft_tokens"].labels(*own, by).inc(tokens - tokens_then)
            self._counters["redline:accepted_draft_tokens"].labels(*own, by).inc(accepted - accepted_then)
        then_per_pos = last.accepted_per_pos if last else ()
        for place, (now, then) in enumerate(zip_longest(load.accepted_per_pos, then_per_pos, fillvalue=0)):
            self._counters["vllm:spec_decode_num_accepted_tokens_per_pos"].labels(*own, str(place)).inc(now - then)
        handed = dict(last.handoffs) if last else {}
        for result, number in load.handoffs:
            self._counters["redline:handoffs"].labels(*own, result.replace(" ", "_")).inc(
                number - handed.get(result, 0)
            )
        self._tiers.add(own, load.tiers, last.tiers if last else ())
        self._step_times.add(own, load.step_times, last.step_times if last else ())
        self._step_times.bounded(own, load.bounded, last.bounded if last else 0)
        self._step_sizes.add(load, last)
        self._last[worker] = epoch, load

    def expose(self) -> bytes:
        """The text format that Prometheus scrapes (CONTENT_TYPE), at most EXPOSED_S seconds old.

        Rendering takes milliseconds, which stall all streams, and many scrapers may ask at once.
        """
        now = self._clock()
        if now >= self._exposed_until:
            self._exposed, self._exposed_until = generate_latest(self.registry), now + EXPOSED_S
        return self._exposed


class OwnMetrics(Metrics):
    """Metrics of one of several API replicas: worker reports are counted by the process that started the workers."""

    def ready(self, ready: Ready, worker: str) -> None:
        """Not counted here."""

    def joined(self, worker: str) -> None:
        """Not counted here."""

    def load(self, load: Load, worker: str, epoch: int = 1) -> None:
        """Not counted here."""

    def lost(self, worker: str, epoch: int = 1) -> None:
        """Not counted here."""

    def role(self, worker: str, role: Role) -> None:
        """Not counted here."""


def _drafts(load: Load | None) -> list[tuple[Drafter, int, int]]:
    """Draft tokens verified and accepted, by drafter."""
    if load is None:
        return [("learned", 0, 0), ("suffix", 0, 0), ("grammar", 0, 0)]
    suffix = load.suffix_draft_tokens, load.suffix_accepted_tokens
    grammar = load.grammar_draft_tokens, load.grammar_accepted_tokens
    learned = load.draft_tokens - suffix[0] - grammar[0], load.accepted_tokens - suffix[1] - grammar[1]
    return [("learned", *learned), ("suffix", *suffix), ("grammar", *grammar)]
