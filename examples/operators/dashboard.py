"""Redline's Grafana dashboard: a line for each query. Running it writes grafana.json beside it.

    python examples/operators/dashboard.py

Every series is one that `/metrics` gives (docs/metrics.md). Figures of several servers are added up; those of
single workers are drawn each. A panel says in a sentence what it shows.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).with_name("grafana.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24  # of Grafana's grid
SHARE, SECONDS, BYTES = "percentunit", "s", "bytes"
TOKENS_PER_S, REQUESTS_PER_S, STEPS_PER_S, PER_S = "suffix: tokens/s", "reqps", "suffix: steps/s", "suffix: /s"
COUNT, TOKENS, READY = "short", "suffix: tokens", "bool_yes_no"


class Panel(NamedTuple):
    """Queries in one frame. queries: legend -> PromQL. most: of the axis, where it has a natural end."""

    title: str
    unit: str
    queries: Mapping[str, str]
    tells: str
    most: float | None = None
    kind: str = "timeseries"


class Row(NamedTuple):
    """Panels under one heading. across: how many lie beside each other. height: of each, in Grafana's grid."""

    title: str
    across: int
    height: int
    panels: tuple[Panel, ...]


def now(name: str) -> str:
    """A gauge of the servers that are looked at."""
    return f'{name}{{instance=~"$instance"}}'


def grown(name: str, labels: str = "", how: str = "rate") -> str:
    """By how much a counter grows: in a second, or (how: "increase") from one point of the drawing to the next."""
    return f'{how}({name}{{instance=~"$instance"{labels and ", " + labels}}}[$__rate_interval])'


def total(name: str, by: str = "", labels: str = "", how: str = "rate") -> str:
    """The same, added up over everything but the labels in `by`."""
    return f"sum{by and f' by ({by})'}({grown(name, labels, how)})"


def mean(name: str) -> str:
    """Of what a histogram has observed."""
    return f"{total(name + '_sum')} / {total(name + '_count')}"


def quantiles(name: str, *percents: int) -> dict[str, str]:
    """Of a histogram, as its buckets can tell them."""
    buckets = total(f"{name}_bucket", "le")
    return {f"p{percent}": f"histogram_quantile({percent / 100}, {buckets})" for percent in percents or (50, 95, 99)}


WORKER = "{{instance}} worker {{engine}}"
ANSWERED = 'route=~"/v1/.*"'
FAILED = ANSWERED + ', status=~"5.."'
TTFT, GAP = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
DRAFTED_BY, ACCEPTED_BY = "redline:draft_tokens_total", "redline:accepted_draft_tokens_total"
ACCEPTANCE_LENGTH = f"1 + {total(ACCEPTED)} / {total(DRAFTS)}"
REQUESTS = "redline:requests_total"
STEP_S, FLOOR_S, TIMED = "redline:step_seconds_total", "redline:step_floor_seconds_total", "redline:timed_steps_total"
OF_WORKERS = "instance, engine, kind"
ERROR_SHARE = f"({total(REQUESTS, labels=FAILED)} or vector(0)) / {total(REQUESTS, labels=ANSWERED)}"


def stat(title: str, unit: str, query: str, tells: str) -> Panel:
    """One number."""
    return Panel(title, unit, {"": query}, tells, kind="stat")


ROWS = (
    Row("Now", 6, 4, (
        stat("Ready", READY, f"min({now('redline:ready')})", "Whether every server takes new requests."),
        stat("Tokens out", TOKENS_PER_S, total("vllm:generation_tokens_total"), "Tokens that are generated."),
        stat("Running", COUNT, f"sum({now('vllm:num_requests_running')})", "Jobs in the running batches."),
        stat("Waiting", COUNT, f"sum({now('redline:queue_jobs')})", "Jobs that have no first token yet."),
        stat("First token, p95", SECONDS, quantiles(TTFT, 95)["p95"], "From a request's arrival."),
        stat("Errors", SHARE, ERROR_SHARE, "Share of requests to /v1 that were answered with a 5xx."),
    )),
    Row("What clients see", 3, 8, (
        Panel("Tokens", TOKENS_PER_S, {
            "out": total("vllm:generation_tokens_total"),
            "in": total("vllm:prompt_tokens_total"),
        }, "Generated, and of the prompts of admitted jobs, cached ones included."),
        Panel("Time to first token", SECONDS, quantiles(TTFT),
              "From a request's arrival; where it grows, see whether queue time does or prefill."),
        Panel("Inter-token latency", SECONDS, quantiles(GAP), "Between two deltas of a job, each of a token or more."),
        Panel("Whole answers", SECONDS, quantiles("vllm:e2e_request_latency_seconds"), "From arrival to end."),
        Panel("Requests by ending", REQUESTS_PER_S, {
            "{{finished_reason}}": total("vllm:request_success_total", "finished_reason"),
        }, "abort: the client left or the worker stopped."),
        Panel("Requests by status", REQUESTS_PER_S, {
            "{{status}}": total(REQUESTS, "status", ANSWERED),
            "turned away: {{reason}}": total("redline:rejections_total", "reason"),
        }, "A limit's name is a key's; queue_tokens and queue_jobs say that the server has more than it can begin."),
    )),
    Row("Where time goes", 3, 8, (
        Panel("Jobs", COUNT, {
            f"running, {WORKER}": f"sum by (instance, engine)({now('vllm:num_requests_running')})",
            f"waiting, {WORKER}": f"sum by (instance, engine)({now('vllm:num_requests_waiting')})",
        }, "In the batch of each worker, and in its queue for a place there."),
        Panel("Queue time", SECONDS, quantiles("vllm:request_queue_time_seconds"),
              "From a worker's taking a job to its first place in a step; the least bucket ends at 0.3 s."),
        Panel("A request's parts, mean", SECONDS, {
            part: mean(f"vllm:request_{part}_time_seconds") for part in ("queue", "prefill", "decode")
        }, "Waiting for a place, then up to the first token, then up to the last."),
        Panel("Prompt tokens that wait", TOKENS, {"tokens": f"sum({now('redline:queue_tokens')})"},
              "Of jobs without a first token; requests.queue_tokens bounds them."),
        Panel("Steps", STEPS_PER_S, {"{{by}}": total("redline:steps_total", "by")},
              "replay: from recorded graphs, on a GPU; host: led launch by launch, as every step on a CPU."),
        Panel("Floor over step time", SHARE, {
            f"{{{{kind}}}}, {WORKER}": f"{total(FLOOR_S, OF_WORKERS)} / {total(STEP_S, OF_WORKERS)}",
        }, "Floor over time: 100 % is the least that the machine takes for what the steps read and compute.", most=1),
        Panel("Step time and floor, mean", SECONDS, {
            f"{{{{kind}}}}, step, {WORKER}": f"{total(STEP_S, OF_WORKERS)} / {total(TIMED, OF_WORKERS)}",
            f"{{{{kind}}}}, floor, {WORKER}": f"{total(FLOOR_S, OF_WORKERS)} / {total(TIMED, OF_WORKERS)}",
        }, "decode: steps of answers alone; prompts: steps that compute prompts too."),
        Panel("Positions in a step", COUNT, {
            **quantiles("vllm:iteration_tokens_total", 50, 95), "mean": mean("vllm:iteration_tokens_total"),
        }, "Prompt chunks, answers and drafts together; quantiles are as coarse as the buckets."),
    )),
    Row("Memory of the model", 3, 8, (
        Panel("KV cache use", SHARE, {WORKER: f"sum by (instance, engine)({now('vllm:kv_cache_usage_perc')})"},
              "Share of the pages that jobs hold; what only the prefix cache holds is free to them.", most=1),
        Panel("Prefix cache hits", SHARE, {
            "found": f"{total('vllm:prefix_cache_hits_total')} / {total('vllm:prefix_cache_queries_total')}",
        }, "Share of prompt tokens that were not computed again.", most=1),
        Panel("Pre-emptions", PER_S, {WORKER: total("vllm:num_preemptions_total", "instance, engine")},
              "Jobs that lost their pages and start again: more is run at once than there are pages for."),
    )),
    Row("Speculation", 4, 8, (
        Panel("Acceptance length", TOKENS, {"tokens": ACCEPTANCE_LENGTH},
              "Tokens of a step that verified drafts, the model's own included."),
        Panel("Acceptance by position", SHARE, {
            "{{position}}": f"{total('vllm:spec_decode_num_accepted_tokens_per_pos_total', 'position')}"
                            f" / scalar({total(DRAFTS)})",
        }, "How often the first, second ... draft of a step held; one that was not made did not.", most=1),
        Panel("Acceptance by proposer", SHARE, {
            "{{by}}": f"{total(ACCEPTED_BY, 'by')} / {total(DRAFTED_BY, 'by')}",
        }, "learned: the drafter; suffix: matches of the text's own past; grammar: what a grammar has forced.", most=1),
        Panel("Drafts by proposer", TOKENS_PER_S, {
            "{{by}}, verified": total(DRAFTED_BY, "by"),
            "{{by}}, accepted": total(ACCEPTED_BY, "by"),
        }, "What lies between the two is work of the target that was in vain."),
    )),
    Row("Workers and processes", 3, 8, (
        Panel("Handoffs", PER_S, {"{{result}}": total("redline:handoffs_total", "result")},
              "Prompts between workers for prefill and decode; where each worker does both there are none."),
        Panel("Jobs moved, workers started", COUNT, {
            "jobs moved": total("redline:jobs_moved_total", how="increase"),
            f"starts, {WORKER}": total("redline:worker_starts_total", "instance, engine", how="increase"),
        }, "Where a worker ends, others go on with its jobs and it is started again."),
        Panel("Event-loop lag", SECONDS, quantiles("redline:event_loop_lag_seconds", 50, 99),
              "By how much a timer of the API process is late: every stream waits for that long."),
        Panel("Memory of the API process", BYTES, {"{{instance}}": now("process_resident_memory_bytes")},
              "Without the workers', which hold the model."),
        Panel("Processors of the API process", COUNT, {"{{instance}}": grown("process_cpu_seconds_total")},
              "1: one core is busy with HTTP, and streams begin to wait for it."),
        Panel("Open files of the API process", COUNT, {"{{instance}}": now("process_open_fds")},
              "Connections above all; LimitNOFILE bounds them."),
    )),
)  # fmt: skip


def frame(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    """A panel as Grafana reads it."""
    targets = [
        {"refId": chr(ord("A") + at), "expr": query, "legendFormat": legend, "datasource": SOURCE}
        for at, (legend, query) in enumerate(panel.queries.items())
    ]
    ends = {"min": 0} if panel.most is None else {"min": 0, "max": panel.most}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.tells,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, **ends}, "overrides": []},
        "targets": targets,
    }


def frames() -> list[dict[str, Any]]:
    """All panels in their places: each row's heading, and its panels below from left to right."""
    found: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        head = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        kind = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        found.append({"id": len(found) + 1, "gridPos": head, **kind})
        y += 1
        width = COLUMNS // row.across
        for at, panel in enumerate(row.panels):
            line, column = divmod(at, row.across)
            place = {"x": column * width, "y": y + line * row.height, "w": width, "h": row.height}
            found.append(frame(panel, len(found) + 1, place))
        y += -(-len(row.panels) // row.across) * row.height
    return found


def dashboard() -> dict[str, Any]:
    """What Grafana imports. Its first choice is the datasource, its second which servers."""
    instances = "label_values(redline:ready, instance)"
    chosen = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "label": "Server",
            "type": "query",
            "datasource": SOURCE,
            "query": {"qryType": 1, "query": instances, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
            "definition": instances,
            "refresh": 2,  # whenever the time range changes
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]
    return {
        "uid": "redline",
        "title": "Redline",
        "tags": ["redline", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,  # one crosshair in all panels
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": chosen},
        "panels": frames(),
    }


def text() -> str:
    """The file, whole."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
