"""The route table: all routes in `/openapi.json`, those of each API and those about the server, with their handlers."""

from typing import Any

from redline.api.anthropic import openapi as anthropic_operations
from redline.api.config import ApiConfig
from redline.api.handlers import Handlers, ServerReady, ServerUnready
from redline.api.openai import openapi as openai_operations
from redline.api.openai.protocol import TokenizerInfo
from redline.api.openapi.operation import Operation
from redline.api.page.chat_page import EngineView
from redline.api.responses import openapi as responses_operations


def operations(config: ApiConfig) -> tuple[Operation, ...]:
    """A record for each route of a server with this configuration."""
    limits, defaults = config.limits, config.defaults
    name = config.served_model_names[0]
    chat, completions, *tokens = openai_operations.operations(limits, defaults)
    messages, count = anthropic_operations.operations(limits, defaults)
    respond, *kept = responses_operations.operations(limits, defaults, config.responses_file is not None)
    return (
        *(chat, respond, messages, completions),
        *tokens,
        Operation(
            *("GET", "/tokenizer_info", "Tokens", "vLLM's: the checkpoint's tokenizer_config.json", TokenizerInfo),
            handler=Handlers.tokenizer_info,
        ),
        count,
        *kept,
        Operation("GET", "/v1/models", "Models", "The served names", handler=Handlers.models),
        Operation(
            *("GET", "/v1/models/{id:path}", "Models", "One model"),
            handler=Handlers.one_model,
            example=name,
            missing="It is not served",
        ),
        Operation("GET", "/", "Server", "A page to talk to the model and to watch the engine", str, text="text/html")
        if config.page
        else Operation("GET", "/", "Server", _VERSION, handler=Handlers.version),
        *_SERVER,
    )


_VERSION = "Name, version and routes of this server"
_HEALTH: dict[str, Any] = {"answer": ServerReady, "handler": Handlers.health, "unready": ServerUnready}
_SERVER = (
    Operation(
        *("GET", "/engine", "Server", "Engine state for the web page, one event per second", str),
        handler=EngineView.stream,
        text="text/event-stream",
    ),
    Operation("GET", "/health", "Server", "Whether the model is ready to serve", **_HEALTH),
    Operation("GET", "/ping", "Server", "The same as /health, for SageMaker", **_HEALTH),
    Operation("POST", "/ping", "Server", "The same as /health, for SageMaker", **_HEALTH),
    Operation("GET", "/live", "Server", "Whether this process is alive", handler=Handlers.live),
    Operation("GET", "/load", "Server", "Number of running and waiting requests", handler=Handlers.load),
    Operation(
        *("GET", "/metrics", "Server", "Metrics in Prometheus's text format", str),
        handler=Handlers.metrics,
        text="text/plain",
    ),
    Operation("GET", "/version", "Server", _VERSION, handler=Handlers.version),
    Operation("GET", "/openapi.json", "Server", "This document", dict[str, Any], handler=Handlers.openapi),
    Operation("GET", "/docs", "Server", "This document as a page", str, handler=Handlers.docs, text="text/html"),
)
