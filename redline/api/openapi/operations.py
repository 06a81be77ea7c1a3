"""All routes in `/openapi.json`: those of each API, and those about the server."""

from redline.api.anthropic import operations as anthropic_operations
from redline.api.config import ApiConfig
from redline.api.openai import operations as openai_operations
from redline.api.openapi.operation import COUNT, TEXT, YES, Operation, Schema, always, listed, nullable, shape
from redline.api.responses import operations as responses_operations

_ROOT = shape(name=always("redline"), version=TEXT, models=listed(TEXT), routes=listed(TEXT))
_READY = shape(status=always("ready"))
_UNREADY = shape(optional=("reason",), status={"enum": ["loading", "worker lost", "draining", "stalled"]}, reason=TEXT)
_CARD = shape(
    id=TEXT,
    object=always("model"),
    created=COUNT,
    owned_by=TEXT,
    max_model_len=nullable(COUNT),
    type=always("model"),
    display_name=TEXT,
    created_at=TEXT,
    lifecycle=always("active"),
    max_input_tokens=nullable(COUNT),
    max_tokens=nullable(COUNT),
)
_CARDS = shape(object=always("list"), data=listed(_CARD), has_more=YES, first_id=nullable(TEXT), last_id=nullable(TEXT))
_TOKENIZER: Schema = {
    "type": "object",
    "properties": dict.fromkeys(("bos_token", "eos_token", "pad_token"), nullable(TEXT))
    | {"model_max_length": {"type": "integer"}, "tokenizer_class": TEXT},
    "required": ["bos_token", "eos_token", "pad_token", "model_max_length", "chat_template"],
}


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
        Operation("GET", "/tokenizer_info", "Tokens", "vLLM's: the checkpoint's tokenizer_config.json", _TOKENIZER),
        count,
        *kept,
        Operation("GET", "/v1/models", "Models", "The served names", _CARDS),
        Operation("GET", "/v1/models/{id}", "Models", "One model", _CARD, example=name, missing="It is not served"),
        Operation("GET", "/", "Server", "A page to talk to the model and to watch the engine", TEXT, text="text/html")
        if config.page
        else Operation("GET", "/", "Server", "Name, version and routes of this server", _ROOT),
        *_SERVER,
    )


_SERVER = (
    Operation(
        "GET",
        "/engine",
        "Server",
        "Engine state for the web page, one event per second",
        TEXT,
        text="text/event-stream",
    ),
    Operation("GET", "/health", "Server", "Whether the model is ready to serve", _READY, unready=_UNREADY),
    Operation("GET", "/ping", "Server", "The same as /health, for SageMaker", _READY, unready=_UNREADY),
    Operation("POST", "/ping", "Server", "The same as /health, for SageMaker", _READY, unready=_UNREADY),
    Operation("GET", "/live", "Server", "Whether this process is alive", shape(status=always("live"))),
    Operation("GET", "/load", "Server", "Number of running and waiting requests", shape(server_load=COUNT)),
    Operation("GET", "/metrics", "Server", "Metrics in Prometheus's text format", TEXT, text="text/plain"),
    Operation("GET", "/version", "Server", "Name, version and routes of this server", _ROOT),
    Operation("GET", "/openapi.json", "Server", "This document", {"type": "object"}),
    Operation("GET", "/docs", "Server", "This document as a page", TEXT, text="text/html"),
)
