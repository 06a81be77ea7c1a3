"""Requests as OpenTelemetry spans: one per request, with its stages as children, below the caller's span.

Off unless the environment names a collector (`OTEL_EXPORTER_OTLP_ENDPOINT`); then nothing is imported. A request's
spans are created when it has ended, from its recorded timings, and are exported in a thread; if the export queue is
full they are dropped. They contain no text of a prompt or an answer.
"""

import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from redline import clock
from redline.api.telemetry.request_span import RequestSpan
from redline.api.telemetry.stages import RequestStage, stages_of
from redline.errors import ConfigError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FLUSH_S = 3.0  # at shutdown, for the collector to receive the remaining spans

_LOOKS = ("GET", "HEAD", "OPTIONS")  # methods without spans: probes, scrapes and the page would be most of all spans
_log = logging.getLogger("redline.api")

if TYPE_CHECKING:
    Processor = Any  # opentelemetry.sdk.trace.SpanProcessor, which an extra brings


class RequestSpans:
    """Watches requests, and creates spans for those that do work."""

    def __init__(self, processor: "Processor") -> None:
        """processor: a SpanProcessor with a non-blocking `on_end`. Needs the extra `otel`."""
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()  # from OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "redline"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("redline")
        self._parents = TraceContextTextMapPropagator()
        self._failed = False

    def ended(self, passage: RequestSpan) -> None:
        """Create the spans of an ended request. Errors here are logged once: tracing must never cost a response."""
        if passage.method in _LOOKS:
            return
        try:
            self._write(passage)
        except Exception:
            if not self._failed:
                _log.exception("a request's spans could not be created; further failures are not logged")
            self._failed = True

    def close(self) -> None:
        """Export the remaining spans, for at most FLUSH_S."""
        flushing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)

    def _write(self, passage: RequestSpan) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        told = stages_of(passage)
        epoch_ns = clock.now_ns() - clock.perf_counter_ns()  # both clocks are read each time: the wall clock may be set
        traceparent, tracestate = passage.trace
        parent = self._parents.extract({"traceparent": traceparent, "tracestate": tracestate})
        whole = self._tracer.start_span(
            told.whole.name, parent, SpanKind.SERVER, _facts(passage), start_time=_ns(told.whole.began, epoch_ns)
        )
        if whole.is_recording():
            within = set_span_in_context(whole)
            for stage in (*told.stages, *(stage for job in told.jobs for stage in job)):
                self._write_stage(stage, within, epoch_ns)
            if passage.status >= 500:
                whole.set_status(Status(StatusCode.ERROR))
        whole.end(_ns(told.whole.ended, epoch_ns))

    def _write_stage(self, stage: RequestStage, within: Any, epoch_ns: int) -> None:
        known = {f"redline.{name}": value for name, value in stage.facts.items() if value is not None}
        span = self._tracer.start_span(stage.name, within, attributes=known, start_time=_ns(stage.began, epoch_ns))
        span.end(_ns(stage.ended, epoch_ns))


def open_spans(environment: Mapping[str, str] = os.environ) -> RequestSpans | None:
    """Spans exported to the collector that the environment names, by OTLP over HTTP; None if it names none or
    disables tracing. Raises ConfigError if the extra is missing, or if the settings are not supported."""
    named = next((name for name in ENDPOINTS if environment.get(name)), None)
    if named is None or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if (wanted := environment.get("OTEL_TRACES_EXPORTER", "otlp")) not in ("otlp", "none"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {wanted}; supported values are otlp and none")
    if wanted == "none":
        return None
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (protocol := environment.get(name, "http/protobuf")) != "http/protobuf":
            raise ConfigError(f"{name} is {protocol}; the supported protocol is http/protobuf, usually on port 4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"{named} is set, but its library is missing: pip install 'redline[otel]'") from error
    return RequestSpans(BatchSpanProcessor(OTLPSpanExporter()))


def _ns(at: float, epoch_ns: int) -> int:
    return epoch_ns + round(at * 1e9)


def _facts(passage: RequestSpan) -> dict[str, str | int | float | list[str]]:
    """Attributes of a request, named by OpenTelemetry's semantic conventions for HTTP and for generative AI."""
    facts: dict[str, str | int | float | list[str]] = {
        "http.request.method": passage.method,
        "url.path": passage.path,
        "redline.request_id": passage.id,
    }
    if passage.status:
        facts["http.response.status_code"] = passage.status
    if passage.jobs:
        facts["gen_ai.request.model"] = passage.model
        facts["gen_ai.usage.input_tokens"] = sum(job.prompt_tokens for job in passage.jobs)
        facts["gen_ai.usage.output_tokens"] = sum(job.tokens for job in passage.jobs)
        facts["gen_ai.response.finish_reasons"] = [job.finish for job in passage.jobs if job.finish is not None]
    if (sampling := passage.sampling) is not None:
        facts["gen_ai.request.max_tokens"] = sampling.max_tokens
        facts["gen_ai.request.temperature"] = sampling.temperature
        facts["gen_ai.request.top_p"] = sampling.top_p
    return facts
