"""Reads requests in OpenAI's format, with vLLM's additions, into `Ask`.

Validation is by type annotation: msgspec decodes and bounds every field, and its error names the place. Unknown fields
are ignored, as clients send many (user, metadata, store, ...). Known fields that are not supported, and that would
change the answer if ignored, are rejected by name.

msgspec holds the GIL while it decodes, so all streams stall. Text costs a millisecond per MiB, but 8 MiB of
`[],` take 0.4 s and 8 MiB of `1e300,` 10 s. So fields that may hold any JSON, or a collection with a bound, are `Raw`
at first, which creates no objects, and are decoded once their length is known to be bounded.
"""

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, Union, cast, get_args, get_type_hints

import msgspec
from msgspec import Meta

from redline.api import media
from redline.api.ask import MOST_BIASES, WHAT_IS_LEFT, Ask, Prompt
from redline.api.config import Defaults, Limits
from redline.api.dialect import ParsedRequest, Streaming
from redline.api.openai.constraints import of_response_format, of_structured_outputs
from redline.api.sampling import sampling_of, whole_number, with_sampling
from redline.chat.constraint import Calls, Constraint
from redline.chat.conversation import Conversation, Message, Tool, ToolCall
from redline.errors import RequestError
from redline.messages.base import Record
from redline.messages.job import OPTIONS, Sampling
from redline.messages.sampling_option import Api

T = TypeVar("T")

# -- Fields of a request --------------------------------------------------------------------------------------------

Name = Annotated[str, Meta(max_length=256)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
StopTexts = Annotated[list[StopText], Meta(max_length=16)]
MOST_STOP_CHARS = 2048  # of all stop strings together: building the matcher takes 1 ms in the event loop
StopIds = Annotated[list[TokenId], Meta(max_length=64)]
Timeout = Annotated[float, Meta(ge=0.001, le=86400)]  # seconds


# Some clients have no integer type and send 6.0: `_Common.__post_init__` leaves integers alone.
if TYPE_CHECKING:
    Choices = int
    MaxTokens = int
    Bias = float
    Tokens = int
    Top = int
    Seed = int
    BestOf = int
else:

    def _whole(ge: int, le: int) -> Any:
        return Annotated[int, Meta(ge=ge, le=le)] | Annotated[float, Meta(ge=ge, le=le)]

    Bias = OPTIONS["logit_bias"].annotation
    Tokens = whole_number(OPTIONS["min_tokens"])
    Top = whole_number(OPTIONS["logprobs"])
    Seed = whole_number(OPTIONS["seed"])

    Choices = _whole(1, 64)
    MaxTokens = _whole(1, WHAT_IS_LEFT - 1)
    BestOf = _whole(-(1 << 31), 1 << 31)

_WHOLE = (
    "n", "best_of", "max_tokens", "max_completion_tokens", "top_logprobs", "thinking_token_budget", "thinking_budget",
    *(option.name for option in OPTIONS.values() if option.kind is int),
)  # fmt: skip


# A factory, since a default of type Raw has no JSON schema (see api/openapi/document.py).
ABSENT: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class Item(msgspec.Struct, gc=False):
    """Base of items of which a body may hold hundreds of thousands: gc=False keeps them out of garbage collection."""

    def __post_init__(self) -> None:
        """Runs Python code, so that other threads can take the GIL while a long list is decoded."""


class _Thought(Item, gc=False):
    type: Name = "text"
    text: str | None = None


class _ImageUrl(Item, gc=False):
    url: str
    detail: Name | None = None  # Kimi's preprocessor has one resolution


class _Part(Item, gc=False):
    type: Name
    text: str | None = None
    image_url: _ImageUrl | str | None = None
    video_url: _ImageUrl | str | None = None
    refusal: str | None = None
    thinking: str | list[_Thought] | None = None


class _Function(msgspec.Struct, gc=False):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: msgspec.Raw = ABSENT  # str | dict[str, Any]


class _Call(Item, gc=False):
    id: Name
    function: _Function | None = None
    type: Literal["function", "custom"] = "function"


class _Message(Item, gc=False):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: Name | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[_Call], Meta(max_length=128)] | None = None
    tool_call_id: Name | None = None
    refusal: str | None = None
    partial: bool | None = None


class _Declared(msgspec.Struct, gc=False):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    strict: bool | None = None
    parameters: msgspec.Raw = ABSENT  # dict[str, Any] | None


class _Tool(Item, gc=False):
    type: Name
    function: _Declared | None = None


class _Named(msgspec.Struct, gc=False):
    name: str


class _NamedTool(Item, gc=False):
    type: Name
    function: _Named | None = None


class _Allowed(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], Meta(min_length=1)]


class _ToolChoice(msgspec.Struct):
    type: Name
    function: _Named | None = None
    allowed_tools: _Allowed | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_proposers: bool | None = None


class _WholeNumbers(msgspec.Struct):
    """A nested object with integers in its numeric fields."""

    def __post_init__(self) -> None:
        """Convert 6.0 and the like to int. Raises ValueError for other floats: msgspec adds the place."""
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if type(value) is float:
                if not value.is_integer():
                    raise ValueError(f"{field}: Expected `int`, got {value}")
                setattr(self, field, int(value))


class _TemplateOptions(_WholeNumbers, forbid_unknown_fields=True):
    thinking: bool | None = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    thinking_budget: Tokens | None = None


class _Thinking(_WholeNumbers):
    """Moonshot's field, with the keys of other APIs' fields of this name."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] = "enabled"
    keep: Literal["all"] | None = None
    budget_tokens: Tokens | None = None


class _Reasoning(_WholeNumbers):
    """OpenRouter's field."""

    effort: "_Effort | None" = None
    max_tokens: Tokens | None = None
    enabled: bool | None = None
    exclude: bool | None = None


# Kimi has thinking on or off: every effort but none turns it on.
_Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _RefusedInPrompt(msgspec.Struct, kw_only=True):
    """Fields that would change the prompt and that are not supported. Empty values pass."""

    truncate_prompt_tokens: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    input_ids: msgspec.Raw = ABSENT


class _Refused(_RefusedInPrompt, kw_only=True):
    """Fields that would change the answer and that are not supported. Empty values and those in `_NEUTRAL` pass.

    docs/api.md lists them, with what to use instead.
    """

    functions: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    modalities: msgspec.Raw = ABSENT
    web_search_options: msgspec.Raw = ABSENT
    guided_json: msgspec.Raw = ABSENT
    guided_regex: msgspec.Raw = ABSENT
    guided_choice: msgspec.Raw = ABSENT
    guided_grammar: msgspec.Raw = ABSENT
    guided_decoding_backend: msgspec.Raw = ABSENT
    logits_processors: msgspec.Raw = ABSENT
    logprob_token_ids: msgspec.Raw = ABSENT
    allowed_token_ids: msgspec.Raw = ABSENT
    bad_words: msgspec.Raw = ABSENT
    use_beam_search: msgspec.Raw = ABSENT
    length_penalty: msgspec.Raw = ABSENT
    prompt_embeds: msgspec.Raw = ABSENT
    suffix: msgspec.Raw = ABSENT
    return_tokens_as_token_ids: msgspec.Raw = ABSENT
    verbosity: msgspec.Raw = ABSENT
    moderation: msgspec.Raw = ABSENT
    priority: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT
    ec_transfer_params: msgspec.Raw = ABSENT
    vllm_xargs: msgspec.Raw = ABSENT
    repetition_detection: msgspec.Raw = ABSENT
    return_prompt_text: msgspec.Raw = ABSENT
    watermarking: msgspec.Raw = ABSENT
    regex: msgspec.Raw = ABSENT
    ebnf: msgspec.Raw = ABSENT
    json_schema: msgspec.Raw = ABSENT
    structural_tag: msgspec.Raw = ABSENT
    stop_regex: msgspec.Raw = ABSENT
    no_stop_trim: msgspec.Raw = ABSENT
    lora_path: msgspec.Raw = ABSENT
    session_params: msgspec.Raw = ABSENT
    separate_reasoning: msgspec.Raw = ABSENT
    stream_reasoning: msgspec.Raw = ABSENT
    custom_logit_processor: msgspec.Raw = ABSENT
    custom_params: msgspec.Raw = ABSENT
    return_hidden_states: msgspec.Raw = ABSENT
    return_routed_experts: msgspec.Raw = ABSENT
    return_cached_tokens_details: msgspec.Raw = ABSENT
    return_prompt_token_ids: msgspec.Raw = ABSENT
    return_meta_info: msgspec.Raw = ABSENT
    extra_key: msgspec.Raw = ABSENT
    bootstrap_host: msgspec.Raw = ABSENT
    bootstrap_port: msgspec.Raw = ABSENT
    bootstrap_room: msgspec.Raw = ABSENT


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "length_penalty": (1,),
    "verbosity": ("medium",),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
}
_OFF_IS_NOT_NEUTRAL = {  # for these, false or zero changes the answer
    "separate_reasoning",
    "stream_reasoning",
}
_INSTEAD = {
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "json_schema": "response_format",
    "structural_tag": "structured_outputs, or tools",
    "no_stop_trim": "include_stop_str_in_output",
    "extra_key": "cache_salt",
    "return_prompt_token_ids": "return_token_ids",
    "return_prompt_text": "return_token_ids, and /detokenize",
}


if TYPE_CHECKING:
    _Sampled = _Refused
else:
    _Sampled = with_sampling(_Refused, Api.OPENAI, whole=True)


class _Common(_Sampled, kw_only=True):
    """Fields of both routes, beside the sampling options that are plain numbers. Names are OpenAI's, then vLLM's."""

    model: Name | None = None
    n: Choices | None = None
    best_of: BestOf | None = None
    max_tokens: Tokens | None = None
    seed: Seed | None = None
    stop: msgspec.Raw = ABSENT  # see _STOP
    stop_token_ids: msgspec.Raw = ABSENT  # see _STOP_IDS
    min_tokens: Tokens | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: msgspec.Raw = ABSENT  # see _LOGIT_BIAS
    prompt_logprobs: Top | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cache_salt: Name | None = None
    response_format: msgspec.Raw = ABSENT  # see constraints.py
    structured_outputs: msgspec.Raw = ABSENT  # see constraints.py
    return_token_ids: bool | None = None
    timeout: Timeout | None = None

    def __post_init__(self) -> None:
        """Convert 6.0 and the like to int. Raises RequestError, naming the field, for other floats."""
        for field in _WHOLE:
            value = getattr(self, field, None)
            if type(value) is float:
                if not value.is_integer():
                    raise RequestError(f"Expected `int`, got {value}", field)
                setattr(self, field, int(value))


class _Chat(_Common, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    tools: list[_Tool] | None = None
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    chat_template_kwargs: _TemplateOptions | None = None
    thinking: _Thinking | None = None
    enable_thinking: bool | None = None
    reasoning_effort: _Effort | None = None
    thinking_token_budget: Tokens | None = None
    thinking_budget: Tokens | None = None
    reasoning: _Reasoning | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None


class _Completion(_Common, kw_only=True):
    prompt: msgspec.Raw  # str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Top | None = None
    echo: bool | None = None


class _Field(Generic[T]):
    """Decoder of a field that was received as `Raw`, with the largest number of bytes that is decoded."""

    def __init__(self, decoder: msgspec.json.Decoder[T], most_bytes: int) -> None:
        self._decoder = decoder
        self._most_bytes = most_bytes

    def read(self, raw: msgspec.Raw, place: str) -> T | None:
        """Decode the field; None if it is absent or null. Raises RequestError, naming `place` and the path in it."""
        if is_absent(raw):
            return None
        data = memoryview(raw)
        if data.nbytes > self._most_bytes:
            raise RequestError(f"more than {self._most_bytes} bytes of JSON", place)
        return decoded(self._decoder, data, place)


def is_absent(raw: msgspec.Raw) -> bool:
    """Whether the field is missing or null."""
    return bytes(memoryview(raw)[:5]) in (b"", b"null")


_STOP = _Field(msgspec.json.Decoder(StopText | StopTexts), 256 << 10)
_STOP_IDS = _Field(msgspec.json.Decoder(StopIds), 4 << 10)
_LOGIT_BIAS: _Field[dict[int, float]] = _Field(
    msgspec.json.Decoder(Annotated[dict[TokenId, Bias], Meta(max_length=MOST_BIASES)]),
    16 << 10,
)
REFUSED_BYTES = 1 << 10  # of an unsupported field: the values that pass, since they change nothing, are short
_SMALL = _Field(msgspec.json.Decoder(Any), REFUSED_BYTES)
CHOICE_BYTES = 128 << 10  # of a tool_choice, which may list the names of all tools that a request may declare
_CHOICE: "_Field[str | _ToolChoice]" = _Field(msgspec.json.Decoder(str | _ToolChoice), CHOICE_BYTES)
# float_hook: Python's float parser takes a fifth of a microsecond for numbers that take msgspec microseconds.
_OBJECT = msgspec.json.Decoder(dict[str, Any], float_hook=float)
_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_IDS = msgspec.json.Decoder(list[TokenId])
_LISTS_OF_IDS = msgspec.json.Decoder(list[list[TokenId]])


# -- Parsing a request ----------------------------------------------------------------------------------------------


class ChatRequest(ParsedRequest, frozen=True):
    """A parsed body of /v1/chat/completions."""

    reasoning_field: str = "reasoning_content"


class CompletionRequest(ParsedRequest, frozen=True):
    """A parsed body of /v1/completions."""


def read_chat(body: bytes, limits: Limits, defaults: Defaults) -> ChatRequest:
    """Read the body of POST /v1/chat/completions. Raises RequestError, naming the field.

    defaults: values of fields that the request does not set.
    """
    request = read(body, _Chat)
    _refuse(request)
    if request.echo:
        raise RequestError("echo is not supported by chat completions: the client has the last message itself", "echo")
    conversation = _conversation(request, request.messages, limits, defaults)
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    sampling = _sampling(
        request,
        defaults,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    if request.max_tokens == 0:
        raise RequestError("Expected `int` >= 1", "max_tokens")
    hidden = request.include_reasoning is False or (request.reasoning is not None and request.reasoning.exclude)
    ask = _ask(
        *(request, (conversation,), sampling, "messages", limits),
        calls=_calls(request, conversation.tools),
        reasoning=not hidden,
        thinking_budget=_thinking_budget(request),
    )
    if conversation.continues and ask.constraint is not None:
        raise RequestError("a constrained answer cannot continue an assistant message", ask.constraint.param)
    return ChatRequest(
        model=request.model,
        ask=ask,
        stream=_streaming(request),
        left_out=tuple(dict.fromkeys(tool.type for tool in request.tools or () if tool.type != "function")),
        reasoning_field=defaults.reasoning_field,
    )


def read_completion(body: bytes, limits: Limits, defaults: Defaults) -> CompletionRequest:
    """Read the body of POST /v1/completions. Raises RequestError, naming the field.

    defaults: values of fields that the request does not set.
    """
    request = read(body, _Completion)
    _refuse(request)
    prompts = _prompts(request.prompt, limits)
    echo = bool(request.echo)
    if request.max_tokens == 0 and not echo:
        raise RequestError("max_tokens may be 0 only together with echo", "max_tokens")
    sampling = _sampling(
        request,
        defaults,
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if echo and request.logprobs is not None else request.prompt_logprobs,
    )
    return CompletionRequest(
        model=request.model,
        ask=_ask(request, prompts, sampling, "prompt", limits),
        stream=_streaming(request),
        echo=echo,
    )


_MISSING = re.compile(r"^Object missing required field `(.*?)`")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*?)`")
_COMPLAINT_CHARS = 400  # msgspec repeats an invalid value, however long it is


def read(body: bytes, shape: type[T]) -> T:
    """Decode JSON as `shape`. Raises RequestError; its `param` is the place, such as `messages[2].role`."""
    return decoded(msgspec.json.Decoder(shape), body.removeprefix(codecs.BOM_UTF8), "")


def decoded(decoder: msgspec.json.Decoder[T], data: bytes | memoryview, place: str) -> T:
    """Decode `data`. place: its path in the body, empty for the whole body. Raises RequestError."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _complaint(str(error), place) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not valid JSON: {_cause(data) or error}", place or None) from None
    except RecursionError:
        raise RequestError("The body is nested too deeply", place or None) from None


def one_line(raw: msgspec.Raw, place: str) -> bytes:
    """A JSON value of the body without whitespace between its tokens, so that it fits into one line of an event stream.
    Raises RequestError."""
    try:
        return msgspec.json.format(bytes(raw), indent=-1)
    except RecursionError:
        raise RequestError("The body is nested too deeply", place) from None


# Matches the escape of a lone surrogate: no matching half next to it. A backslash may itself be escaped.
_CAUSE_BYTES = 256 << 10  # of a body are searched for it, on the event loop
_HALF = re.compile(
    rb"(?<!\\)(?:\\\\)*\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F][0-9a-fA-F]{2}(?<!\\u[dD][89abAB]..\\u....))"
)


def _cause(data: bytes | memoryview) -> str | None:
    """The reason why a body is not valid JSON, if the decoder's message would be misleading."""
    begin = bytes(data[:4])
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in begin:
        return "it is UTF-16 or UTF-32; send UTF-8"
    if (half := _HALF.search(data[:_CAUSE_BYTES])) is not None:
        return f"a string has half of a surrogate pair at byte {half.end() - 6}, which is not a character"
    return None


def _complaint(message: str, place: str) -> RequestError:
    text, _, path = message.rpartition(" - at ")  # the last one: the text before it may contain the client's values
    if not text:
        text, path = message, ""
    param = place + path.rpartition("`$")[2].removesuffix("`")
    if named := _MISSING.match(text) or _UNKNOWN.match(text):
        param = f"{param}.{named.group(1)}"[:_COMPLAINT_CHARS]
    if len(text) > _COMPLAINT_CHARS:
        text = f"{text[:_COMPLAINT_CHARS]} ..."
    return RequestError(text, param.removeprefix(".") or None)


def _refuse(request: _Common) -> None:
    _refuse_fields(request, _Refused)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError("best_of is not supported: it may only equal n", "best_of")


def _refuse_fields(request: _RefusedInPrompt, refused: type[_RefusedInPrompt]) -> None:
    for field in refused.__struct_fields__:
        raw: msgspec.Raw = getattr(request, field)
        if not raw:
            continue  # the field is missing: no JSON value is empty
        if memoryview(raw).nbytes > REFUSED_BYTES:
            raise RequestError(f"{field} is not supported{_instead(field)}", field)
        value = _SMALL.read(raw, field)
        if value is None or value in _NEUTRAL.get(field, ()):
            continue
        if not value and field not in _OFF_IS_NOT_NEUTRAL:
            continue
        kind = cast("dict[str, Any]", value).get("type") if isinstance(value, dict) else None
        raise RequestError(f"{field}{f' of type {kind}' if kind else ''} is not supported{_instead(field)}", field)


def _instead(field: str) -> str:
    if not field.startswith("guided_"):
        return f": use {_INSTEAD[field]}" if field in _INSTEAD else ""
    return f": use structured_outputs.{field.removeprefix('guided_')}" if field != "guided_decoding_backend" else ""


def _ask(
    request: _Common,
    prompts: tuple[Prompt, ...],
    sampling: Sampling,
    param: str,
    limits: Limits,
    calls: Calls = Calls(),  # noqa: B008
    reasoning: bool = True,
    thinking_budget: int | None = None,
) -> Ask:
    constraint = _constraint(request, limits)
    if constraint is not None or calls.mode == "required":
        field = constraint.param if constraint is not None else "tool_choice"
        if request.min_tokens:
            raise RequestError(f"min_tokens conflicts with {field}, which decides where the answer ends", "min_tokens")
        if request.ignore_eos:
            raise RequestError(f"ignore_eos conflicts with {field}, which decides where the answer ends", "ignore_eos")
    choices = len(prompts) * (request.n or 1)
    if choices > limits.choices:
        raise RequestError(f"prompts times n is {choices}; at most {limits.choices} in one request", "n")
    stop = _STOP.read(request.stop, "stop") or ()
    stop = check_stops((stop,) if isinstance(stop, str) else tuple(stop), "stop")
    return Ask(
        prompts=prompts,
        sampling=sampling,
        n=request.n or 1,
        seed=request.seed,
        stop=stop,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        ignore_eos=bool(request.ignore_eos),
        timeout_s=request.timeout,
        salt=request.cache_salt or "",
        constraint=constraint,
        calls=calls,
        thinking_budget=thinking_budget,
        reasoning=reasoning,
        token_ids=bool(request.return_token_ids),
        proposers=bool(request.stream_options and request.stream_options.include_proposers),
        param=param,
    )


def check_stops(stops: tuple[str, ...], param: str) -> tuple[str, ...]:
    """Returns the stop strings. Raises RequestError if they are too long in total."""
    chars = sum(map(len, stops))
    if chars > MOST_STOP_CHARS:
        raise RequestError(f"stop strings have {chars:,} characters in total; at most {MOST_STOP_CHARS:,}", param)
    return stops


def _constraint(request: _Common, limits: Limits) -> Constraint | None:
    """The constraint on the visible answer, if any. Raises RequestError, naming the field."""
    objects = Objects(limits)
    found: list[Constraint] = []
    for field, read_field in (("response_format", of_response_format), ("structured_outputs", of_structured_outputs)):
        raw: msgspec.Raw = getattr(request, field)
        if not is_absent(raw) and (one := read_field(objects.read(raw, field))) is not None:
            found.append(one)
    if len(found) > 1:
        raise RequestError("give either response_format or structured_outputs", "structured_outputs")
    return found[0] if found else None


def _streaming(request: _Common) -> Streaming | None:
    options = request.stream_options
    if not request.stream:
        if options is not None:
            raise RequestError("stream_options needs stream to be true", "stream_options")
        return None
    usage = bool(options and options.include_usage)
    return Streaming(
        usage=usage,
        continuous=usage and bool(options and options.continuous_usage_stats),
        proposers=bool(options and options.include_proposers),
    )


def _sampling(
    request: _Common,
    defaults: Defaults,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> Sampling:
    most = WHAT_IS_LEFT if max_tokens is None else max_tokens
    least = request.min_tokens or 0
    if least > most:
        raise RequestError(f"min_tokens ({least}) is more than max_tokens ({most})", "min_tokens")
    return sampling_of(
        request,
        Api.OPENAI,
        defaults,
        max_tokens=most,
        stop_ids=tuple(_STOP_IDS.read(request.stop_token_ids, "stop_token_ids") or ()),
        min_tokens=least,
        logit_bias=tuple((_LOGIT_BIAS.read(request.logit_bias, "logit_bias") or {}).items()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


_FIRST = re.compile(rb"\s*\[\s*(.?)", re.DOTALL)


def _prompts(raw: msgspec.Raw, limits: Limits) -> tuple[Prompt, ...]:
    data = memoryview(raw)
    first = _FIRST.match(data)
    if first is None:
        return (decoded(_TEXT, data, "prompt"),)
    match first[1]:
        case b"]":
            raise RequestError("prompt is empty", "prompt")
        case b'"' if _strings(bytes(data)) > limits.prompts:
            raise RequestError(f"at most {limits.prompts} prompts in one request", "prompt")
        case b'"':
            prompts: tuple[Prompt, ...] = tuple(decoded(_TEXTS, data, "prompt"))
        case b"[" if bytes(data).count(b"[") > limits.prompts + 1:
            raise RequestError(f"at most {limits.prompts} prompts in one request", "prompt")
        case b"[":
            prompts = tuple(map(tuple, decoded(_LISTS_OF_IDS, data, "prompt")))
        case _:
            return (_ids(raw, "prompt", limits.tokens),)
    if len(prompts) > limits.prompts:
        raise RequestError(f"at most {limits.prompts} prompts in one request", "prompt")
    return prompts


def _strings(data: bytes) -> int:
    """Number of strings in a JSON list of strings, by counting quotes: decoding two million of them takes 0.2 s."""
    single = data.replace(rb"\\", b"")  # each backslash that is left escapes the next character
    return (single.count(b'"') - single.count(rb"\"")) // 2


def _ids(raw: msgspec.Raw, place: str, most: int) -> tuple[int, ...]:
    data = memoryview(raw)
    if bytes(data).count(b",") >= most:
        raise RequestError(f"at most {most} token ids in one request", place)
    return tuple(decoded(_IDS, data, place))


def _conversation(
    request: "_Chat | _Tokenize", messages: Sequence[_Message], limits: Limits, defaults: Defaults
) -> Conversation:
    thinking, preserve = _thinking(request, defaults)
    objects, images = Objects(limits), media.Images(limits)
    continues = _continues(request, messages)
    if not (continues or isinstance(request, _Tokenize) or request.add_generation_prompt is not False):
        raise RequestError("false is supported only together with continue_final_message", "add_generation_prompt")
    return Conversation(
        messages=images.placed(_messages(messages, limits, objects, images)),
        tools=_tools(request.tools, limits, objects) if _choice(request.tool_choice) != "none" else (),
        thinking=thinking,
        preserve_thinking=preserve,
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continues=continues,
    )


def _continues(request: "_Chat | _Tokenize", messages: Sequence[_Message]) -> bool:
    """Whether the answer continues the last message: Moonshot's `partial` in it, or vLLM's field of the request."""
    *others, last = messages
    for index, message in enumerate(others):
        if message.partial:
            raise RequestError("only the last message may be partial", f"messages[{index}].partial")
    place = f"messages[{len(others)}]"
    param = f"{place}.partial" if last.partial else "continue_final_message"
    if not last.partial and not request.continue_final_message:
        return False
    if last.role != "assistant":
        raise RequestError(f"only an assistant message can be continued; the last one has role {last.role}", param)
    if last.tool_calls:
        raise RequestError("a message with tool calls cannot be continued", f"{place}.tool_calls")
    if request.add_generation_prompt:
        raise RequestError(f"true cannot be combined with {param}, which continues a message", "add_generation_prompt")
    return True


def _thinking(request: "_Chat | _Tokenize", defaults: Defaults) -> tuple[bool, bool]:
    """Returns (thinking, preserve_thinking). If several fields set thinking, the most explicit one wins: Moonshot's own
    field, then the template's variables, then OpenAI's reasoning_effort, then OpenRouter's reasoning."""
    template, reasoning = request.chat_template_kwargs or _TemplateOptions(), request.reasoning or _Reasoning()
    said = (
        request.thinking.type != "disabled" if request.thinking else None,
        template.thinking,
        template.enable_thinking,
        request.enable_thinking,
        request.reasoning_effort != "none" if request.reasoning_effort else None,
        reasoning.enabled,
        reasoning.effort != "none" if reasoning.effort else None,
    )
    thinking = next((choice for choice in said if choice is not None), defaults.thinking)
    return thinking, bool(template.preserve_thinking) or bool(request.thinking and request.thinking.keep == "all")


def _thinking_budget(request: _Chat) -> int | None:
    """The least value of all fields that set a thinking budget."""
    said = (
        request.thinking_token_budget,
        request.thinking_budget,
        request.thinking.budget_tokens if request.thinking else None,
        request.chat_template_kwargs.thinking_budget if request.chat_template_kwargs else None,
        request.reasoning.max_tokens if request.reasoning else None,
    )
    return min((most for most in said if most is not None), default=None)


def _choice(raw: msgspec.Raw) -> "str | _ToolChoice":
    """Parse tool_choice. Raises RequestError for an invalid one."""
    choice = _CHOICE.read(raw, "tool_choice")
    if choice is None or isinstance(choice, str):
        return check_word("auto" if choice is None else choice)
    if choice.type not in ("function", "allowed_tools"):
        raise RequestError(
            f"tool_choice of type {choice.type} is not supported: only function tools can be called", "tool_choice"
        )
    if choice.type == "function" and choice.function is None:
        raise RequestError("a tool_choice of type function needs the function's name", "tool_choice.function.name")
    if choice.type == "allowed_tools" and choice.allowed_tools is None:
        raise RequestError("a tool_choice of type allowed_tools needs mode and tools", "tool_choice.allowed_tools")
    return choice


def check_word(choice: str) -> str:
    """Returns the tool_choice. Raises RequestError for an unknown word."""
    if choice not in ("auto", "none", "required"):
        raise RequestError(
            f"{choice[:64]!r} is not a valid tool_choice: use auto, none or required, or name a function", "tool_choice"
        )
    return choice


def _calls(request: "_Chat", tools: Sequence[Tool]) -> Calls:
    """Which declared tools may be called. Raises RequestError if tool_choice asks for a call that is not possible."""
    choice, parallel = _choice(request.tool_choice), request.parallel_tool_calls is not False
    if isinstance(choice, str):
        return calls_of(choice, None, tools, parallel, "tool_choice")
    if (allowed := choice.allowed_tools) is None or choice.type == "function":
        assert choice.function is not None, "other types were rejected before"
        return calls_of("required", [choice.function.name], tools, parallel, "tool_choice")
    names: list[str] = []
    for index, tool in enumerate(allowed.tools):
        if tool.type == "function":
            if tool.function is None:
                place = f"tool_choice.allowed_tools.tools[{index}].function"
                raise RequestError("a tool of type function needs its function's name", place)
            names.append(tool.function.name)
    return calls_of(allowed.mode, names, tools, parallel, "tool_choice.allowed_tools.tools")


def calls_of(mode: str, names: Sequence[str] | None, tools: Sequence[Tool], parallel: bool, place: str) -> Calls:
    """Which declared tools may be called. mode: auto, none or required. names: tools that tool_choice lists. Raises
    RequestError, naming `place`, if no tool is declared, or if a listed one is not."""
    declared = {tool.name for tool in tools}
    if (unknown := next((name for name in names or () if name not in declared), None)) is not None:
        raise RequestError(f"tool_choice names {unknown!r}, which is not among the functions of tools", place)
    if names is not None and not names:
        raise RequestError("tool_choice lists no function: list at least one function of tools", place)
    if mode == "required" and not tools:
        raise RequestError("tool_choice requires a call, but tools declares no function", "tool_choice")
    return Calls(
        mode="required" if mode == "required" else "auto",
        names=None if names is None else frozenset(names),
        parallel=parallel,
    )


class Objects:
    """Decodes the JSON objects of one request under a shared size limit."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._left = limits.json_bytes

    def read(self, raw: msgspec.Raw, place: str) -> dict[str, Any]:
        """Decode an object. Raises RequestError, naming `place`, for other JSON and beyond the limits."""
        data = memoryview(raw)
        self._left -= data.nbytes
        if self._left < 0:
            raise RequestError(
                "schemas, the parameters of tools and the arguments given as objects are more than "
                f"{self._limits.json_bytes} bytes in total",
                place,
            )
        value = decoded(_OBJECT, data, place)
        if _depth(value) > self._limits.json_depth:
            raise RequestError(f"nested more than {self._limits.json_depth} levels deep", place)
        return value


def _messages(
    messages: Sequence[_Message], limits: Limits, objects: Objects, images: media.Images
) -> tuple[Message, ...]:
    if len(messages) > limits.messages:
        raise RequestError(f"at most {limits.messages} messages in one request", "messages")
    if sum(len(message.tool_calls or ()) for message in messages) > limits.calls:
        raise RequestError(f"at most {limits.calls} tool calls in one request", "messages")
    custom = {call.id for message in messages for call in message.tool_calls or () if call.type == "custom"}
    return tuple(
        _message(message, f"messages[{index}]", objects, images)
        for index, message in enumerate(messages)
        if not (custom and _is_custom(message, custom))
    )


def _is_custom(message: _Message, custom: set[str]) -> bool:
    """Whether a message only makes calls of custom tools, or is the result of one. custom: ids of such calls."""
    if message.role == "tool":
        return message.tool_call_id in custom
    return not message.content and bool(calls := message.tool_calls) and all(call.type == "custom" for call in calls)


def _message(message: _Message, place: str, objects: Objects, images: media.Images) -> Message:
    role = "system" if message.role == "developer" else message.role
    content = _content(message.content, f"{place}.content", role, images)
    if role == "assistant" and message.content is None:
        content = message.refusal or ""
    if role == "tool" and not message.tool_call_id:
        raise RequestError("a tool message needs the id of the call that it answers", f"{place}.tool_call_id")
    if role == "user" and message.content is None:
        raise RequestError("a user message needs content", f"{place}.content")
    if role != "assistant":
        return Message(role=role, content=content, name=message.name, tool_call_id=message.tool_call_id or "")
    return Message(
        role=role,
        content=content,
        name=message.name,
        reasoning=message.reasoning_content or message.reasoning or _thoughts(message.content),
        tool_calls=tuple(
            _call(call, f"{place}.tool_calls[{index}].function", objects)
            for index, call in enumerate(message.tool_calls or ())
            if call.type == "function"
        ),
    )


_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")  # part types that gateways translate other APIs' into


def _content(content: str | list[_Part] | None, place: str, role: str, images: media.Images) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(_text_of(part, f"{place}[{index}]", role, images) for index, part in enumerate(content))


def _text_of(part: _Part, place: str, role: str, images: media.Images) -> str:
    match part.type:
        case "text":
            if part.text is None:
                raise RequestError("a part of type text needs text", f"{place}.text")
            return part.text
        case "refusal" if part.refusal is not None:
            return part.refusal
        case kind if role == "assistant" and kind in _THOUGHTS:
            return ""  # see _thoughts
        case "image_url" | "video_url" as kind if images.read and role in ("user", "tool"):
            given = part.image_url if kind == "image_url" else part.video_url
            if not isinstance(given, _ImageUrl):
                raise RequestError("expected an object with a `url`", f"{place}.{kind}")
            return images.of_url(given.url, f"{place}.{kind}.url", video=kind == "video_url")
        case "image_url" | "video_url" as kind if images.read:
            names = f"{kind.removesuffix('_url')}s"
            raise RequestError(f"{names} are read in messages of users and tools, not of role {role}", f"{place}.type")
        case kind if role == "tool" and (instead := media.in_result(kind)) is not None:
            return instead
        case kind:
            raise media.refused(kind, f"{place}.type", f"content of type {kind} is not supported: text only")


def _thoughts(content: str | list[_Part] | None) -> str:
    """The reasoning in the parts of an assistant message's content."""
    found: list[str] = []
    for part in content if isinstance(content, list) else ():
        if part.type in _THOUGHTS:
            thought = part.thinking if part.thinking is not None else part.text or ""
            found.append(thought if isinstance(thought, str) else "".join(one.text or "" for one in thought))
    return "\n".join(filter(None, found))


def _call(call: _Call, place: str, objects: Objects) -> ToolCall:
    if call.function is None:
        raise RequestError("Object missing required field `function`", place)
    raw, place = call.function.arguments, f"{place}.arguments"
    data = memoryview(raw)
    if not data.nbytes:
        arguments = ""
    elif bytes(data[:1]) == b"{":
        arguments = msgspec.json.encode(objects.read(raw, place)).decode()
    else:
        arguments = decoded(_TEXT, data, place)
    return ToolCall(id=call.id, name=call.function.name, arguments=arguments)


def _tools(tools: Sequence[_Tool] | None, limits: Limits, objects: Objects) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if len(tools) > limits.tools:
        raise RequestError(f"at most {limits.tools} tools in one request", "tools")
    read: list[Tool] = []
    for index, tool in enumerate(tools):
        function = tool.function
        if tool.type != "function":
            if function is not None:
                raise RequestError(
                    f"a tool with a function must have type function, not {tool.type}", f"tools[{index}].type"
                )
            continue  # ignored: see ParsedRequest.left_out
        if function is None:
            raise RequestError("a tool of type function needs its function", f"tools[{index}].function")
        raw, place = function.parameters, f"tools[{index}].function.parameters"
        parameters = None if is_absent(raw) else objects.read(raw, place)
        read.append(
            Tool(
                name=function.name,
                description=function.description or "",
                parameters=parameters,
                strict=bool(function.strict),
                param=place,
            )
        )
    return tuple(read)


def _depth(value: Any) -> int:
    """Nesting depth of objects and arrays, without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [
            inner
            for item in cast("list[dict[str, Any] | list[Any]]", level)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


# -- vLLM's /tokenize and /detokenize ------------------------------------------------------------------------------


class _Tokenize(_RefusedInPrompt, kw_only=True):
    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[_Message], Meta(min_length=1)] | None = None
    tools: list[_Tool] | None = None
    tool_choice: msgspec.Raw = ABSENT
    chat_template_kwargs: _TemplateOptions | None = None
    thinking: _Thinking | None = None
    enable_thinking: bool | None = None
    reasoning_effort: _Effort | None = None
    reasoning: _Reasoning | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class _Detokenize(msgspec.Struct, kw_only=True):
    model: Name | None = None
    tokens: msgspec.Raw  # list[TokenId]


class TokenizeRequest(Record, frozen=True):
    """A parsed body of /tokenize."""

    model: str | None  # None: the served model
    prompt: Prompt
    token_strs: bool = False  # also return the text of each token


class DetokenizeRequest(Record, frozen=True):
    """A parsed body of /detokenize. Whether the ids are in the vocabulary is checked later."""

    model: str | None  # None: the served model
    tokens: tuple[int, ...]


def read_tokenize(body: bytes, limits: Limits, defaults: Defaults) -> TokenizeRequest:
    """Read the body of POST /tokenize, which has either `prompt` or `messages`. Raises RequestError, naming the field.

    Messages are rendered as in a chat request with the same fields. Kimi has no BOS token, so add_special_tokens makes
    no difference.
    """
    request = read(body, _Tokenize)
    _refuse_fields(request, _RefusedInPrompt)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    prompt: Prompt = request.prompt or ""
    if request.messages is not None:
        prompt = _conversation(request, request.messages, limits, defaults)
    return TokenizeRequest(model=request.model, prompt=prompt, token_strs=bool(request.return_token_strs))


def read_detokenize(body: bytes, most: int) -> DetokenizeRequest:
    """Read the body of POST /detokenize, with at most `most` ids. Raises RequestError, naming the field."""
    request = read(body, _Detokenize)
    return DetokenizeRequest(model=request.model, tokens=_ids(request.tokens, "tokens", most))


# -- For `/openapi.json` --------------------------------------------------------------------------------------------

ChatBody, CompletionBody, TokenizeBody, DetokenizeBody = _Chat, _Completion, _Tokenize, _Detokenize


def _passing(refused: type[_RefusedInPrompt]) -> dict[str, list[Any]]:
    """For each unsupported field the values that pass, since they change nothing."""
    empty: list[Any] = ["", [], {}, False, 0]
    return {
        field: [None, *([] if field in _OFF_IS_NOT_NEUTRAL else empty), *_NEUTRAL.get(field, ())]
        for field in refused.__struct_fields__
    }


def whole(body: type[_Common]) -> dict[str, Any]:
    """Types of the integer fields without the floats that pass too: in JSON Schema 6.0 is an integer."""
    hints = get_type_hints(body, include_extras=True)
    return {
        field: Union[tuple(kind for kind in get_args(hints[field]) if getattr(kind, "__origin__", None) is not float)]  # noqa: UP007
        for field in _WHOLE
        if field in hints
    }


REFUSED = _passing(_Refused)
REFUSED_IN_PROMPT = _passing(_RefusedInPrompt)
