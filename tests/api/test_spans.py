"""Spans of requests: their parents, their order, and that none are made unless configured."""

import subprocess
import sys
from collections.abc import Mapping

import httpx2
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from redline.api.app import create_app
from redline.api.auth.auth_state import AuthState
from redline.api.telemetry.spans import RequestSpans, open_spans
from redline.errors import ConfigError
from tests.api.world import MODEL, World, answer
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.anyio
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "n": 2, "temperature": 0.5}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def spans_of(path: str, body: object, headers: Mapping[str, str], status: int) -> list[ReadableSpan]:
    """The spans of one request, the request's own last; a GET of /live adds none."""
    exporter = InMemorySpanExporter()
    async with World(answer("Four.")) as world:
        edge = AuthState(world.config)
        spans = RequestSpans(SimpleSpanProcessor(exporter))
        edge.passages.watchers.append(spans)
        transport = httpx2.ASGITransport(create_app(world.gateway, world.config, edge))
        async with httpx2.AsyncClient(transport=transport, base_url="http://redline") as client:
            assert (await client.post(path, json=body, headers=headers)).status_code == status
            assert (await client.get("/live")).status_code == 200
        found = list(exporter.get_finished_spans())
        spans.close()
    return found


async def test_a_request_is_a_span_of_its_callers_trace_with_its_stages_within():
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "peer=1", "x-request-id": "mine"}
    *stages, whole = await spans_of("/v1/chat/completions", CHAT, headers, 200)
    assert (whole.name, whole.kind.name) == ("POST /v1/chat/completions", "SERVER")
    assert whole.parent is not None
    assert whole.context is not None
    assert (f"{whole.parent.trace_id:032x}", f"{whole.parent.span_id:016x}") == (TRACE, PARENT)
    assert whole.context.trace_state.to_header() == "peer=1"
    assert whole.resource.attributes["service.name"] == "redline"
    known = dict(whole.attributes or {})
    assert known.pop("gen_ai.usage.input_tokens") > 2
    assert known.pop("gen_ai.usage.output_tokens") > 2
    assert known == {
        "http.request.method": "POST", "url.path": "/v1/chat/completions", "http.response.status_code": 200,
        "redline.request_id": "mine", "gen_ai.request.model": MODEL, "gen_ai.request.max_tokens": 30,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 1.0,
        "gen_ai.response.finish_reasons": ("stop", "stop"),
    }  # fmt: skip
    names = [span.name for span in stages]
    assert names[:4] == ["read", "parse", "template", "tokenise"]
    assert names[4:] == ["queue", "first token", "stream"] * 2
    assert [span.attributes["redline.choice"] for span in stages if span.name == "queue" and span.attributes] == [0, 1]
    for span in stages:
        assert span.parent == whole.context
        assert whole.start_time <= span.start_time <= span.end_time <= whole.end_time, span.name


async def test_a_caller_that_records_nothing_is_heard_and_rubbish_begins_a_trace_of_its_own():
    assert await spans_of("/tokenize", {"prompt": "a"}, {"traceparent": f"00-{TRACE}-{PARENT}-00"}, 200) == []
    *_, refused = await spans_of("/v1/chat/completions", {"messages": 3}, {"traceparent": "rubbish"}, 400)
    assert refused.parent is None
    assert (refused.attributes or {})["http.response.status_code"] == 400
    assert refused.status.status_code.name == "UNSET", "a client error does not mark the span as failed"


async def test_a_span_that_cannot_be_made_costs_no_answer(caplog: pytest.LogCaptureFixture):
    class Broken(InMemorySpanExporter):
        pass

    class Raises(SimpleSpanProcessor):
        def on_start(self, *_: object) -> None:
            raise RuntimeError("no")

    async with World(answer("Four.")) as world:
        edge = AuthState(world.config)
        edge.passages.watchers.append(RequestSpans(Raises(Broken())))
        transport = httpx2.ASGITransport(create_app(world.gateway, world.config, edge))
        async with httpx2.AsyncClient(transport=transport, base_url="http://redline") as client:
            for _ in range(2):
                assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
    assert [record.message for record in caplog.records if "spans" in record.message] == [
        "a request's spans could not be created; further failures are not logged"
    ]


def test_the_environment_says_whether_and_where():
    to = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    for nobody in ({}, {**to, "OTEL_SDK_DISABLED": "true"}, {**to, "OTEL_TRACES_EXPORTER": "none"}):
        assert open_spans(nobody) is None
    for wrong in ({"OTEL_TRACES_EXPORTER": "zipkin"}, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            open_spans({**to, **wrong})


def test_nothing_is_imported_where_nobody_asks_and_a_missing_extra_is_said():
    program = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from redline.api.telemetry.spans import open_spans\n"
        "import redline.deploy.serve\n"
        "assert open_spans({}) is None\n"
        "try: open_spans({'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://127.0.0.1:1'})\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout == (
        "ConfigError OTEL_EXPORTER_OTLP_ENDPOINT is set, but its library is missing: pip install 'redline[otel]'\n"
    )
