"""What clients say, in OpenAI's dialect with vLLM's additions, read into our own words.

A type annotation is the check: msgspec decodes and bounds every field, and its complaint names the place. Fields that
we do not know are ignored, as clients send many (user, metadata, store, ...). Fields that we know and cannot honour,
where ignoring them would change the answer, are refused by name.

msgspec holds the interpreter's lock while it reads, and every stream stands still. Text costs a millisecond per MiB,
but 8 MiB of `[],` 0.4 s and 8 MiB of `1e300,` 10 s. So fields that may hold any JSON, or a collection with a bound, are
`Raw` at first, which makes no objects, and are read once their length is known to be bounded.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from redline.api.ask import WHAT_IS_LEFT, Ask, Prompt
from redline.api.config import Defaults, Limits
from redline.chat.conversation import Conversation, Message, Tool, ToolCall
from redline.chat.generation import MinP, Temperature, TopK, TopP
from redline.errors import RequestError
from redline.wire.base import Record
from redline.wire.job import Sampling

T = TypeVar("T")

# -- What a request may say ----------------------------------------------------------------------------------------

Name = Annotated[str, Meta(max_length=256)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
MaxTokens = Annotated[int, Meta(ge=1, lt=WHAT_IS_LEFT)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
StopTexts = Annotated[list[StopText], Meta(max_length=16)]
StopIds = Annotated[list[TokenId], Meta(max_length=64)]
Top = Annotated[int, Meta(ge=0, le=20)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
# It divides and multiplies float32 logits: at 1e-40 they overflow, and no token is the most likely one.
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10)]


# A factory, since a default of type Raw has no JSON schema (see api/openapi.py).
_ABSENT: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class _Item(msgspec.Struct, gc=False):
    """An item of which a body may hold hundreds of thousands: the garbage collector walks none of them."""

    def __post_init__(self) -> None:
        """Python code, so that the interpreter's lock can change hands while a long list is read."""


class _Part(_Item, gc=False):
    type: Name
    text: str | None = None


class _Function(msgspec.Struct, gc=False):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: msgspec.Raw = _ABSENT  # str | dict[str, Any]


class _Call(_Item, gc=False):
    id: Name
    function: _Function
    type: Literal["function"] = "function"


class _Message(_Item, gc=False):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: Name | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[_Call], Meta(max_length=128)] | None = None
    tool_call_id: Name | None = None
    refusal: str | None = None


class _Declared(msgspec.Struct, gc=False):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: msgspec.Raw = _ABSENT  # dict[str, Any] | None


class _Tool(_Item, gc=False):
    type: Name
    function: _Declared | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _TemplateOptions(msgspec.Struct):
    thinking: bool | None = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None


class _Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled"] = "enabled"
    keep: Literal["all"] | None = None


class _RefusedInPrompt(msgspec.Struct, kw_only=True):
    """Fields that would change the prompt and that are not served. Empty values pass."""

    truncate_prompt_tokens: msgspec.Raw = _ABSENT
    chat_template: msgspec.Raw = _ABSENT
    documents: msgspec.Raw = _ABSENT
    continue_final_message: msgspec.Raw = _ABSENT


class _Refused(_RefusedInPrompt, kw_only=True):
    """Fields that would change the answer and that are not served. Empty values and those in `_NEUTRAL` pass."""

    response_format: msgspec.Raw = _ABSENT
    functions: msgspec.Raw = _ABSENT
    function_call: msgspec.Raw = _ABSENT
    audio: msgspec.Raw = _ABSENT
    modalities: msgspec.Raw = _ABSENT
    web_search_options: msgspec.Raw = _ABSENT
    structured_outputs: msgspec.Raw = _ABSENT
    guided_json: msgspec.Raw = _ABSENT
    guided_regex: msgspec.Raw = _ABSENT
    guided_choice: msgspec.Raw = _ABSENT
    guided_grammar: msgspec.Raw = _ABSENT
    logits_processors: msgspec.Raw = _ABSENT
    logprob_token_ids: msgspec.Raw = _ABSENT
    allowed_token_ids: msgspec.Raw = _ABSENT
    bad_words: msgspec.Raw = _ABSENT
    use_beam_search: msgspec.Raw = _ABSENT
    length_penalty: msgspec.Raw = _ABSENT
    prompt_embeds: msgspec.Raw = _ABSENT
    suffix: msgspec.Raw = _ABSENT
    add_generation_prompt: msgspec.Raw = _ABSENT
    return_tokens_as_token_ids: msgspec.Raw = _ABSENT


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "length_penalty": (1,),
    "add_generation_prompt": (True,),
}
_OFF_IS_NOT_NEUTRAL = {"add_generation_prompt"}  # here false is what changes the answer


class _Common(_Refused, kw_only=True):
    """What both routes take. Field names are OpenAI's, then vLLM's."""

    model: Name | None = None
    n: Annotated[int, Meta(ge=1, le=8)] | None = None
    best_of: int | None = None
    max_tokens: Annotated[int, Meta(ge=0, lt=WHAT_IS_LEFT)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: msgspec.Raw = _ABSENT  # see _STOP
    stop_token_ids: msgspec.Raw = _ABSENT  # see _STOP_IDS
    min_tokens: Annotated[int, Meta(ge=0, lt=WHAT_IS_LEFT)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: msgspec.Raw = _ABSENT  # see _LOGIT_BIAS
    prompt_logprobs: Top | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cache_salt: Name | None = None


class _Chat(_Common, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    tools: list[_Tool] | None = None
    tool_choice: msgspec.Raw = _ABSENT
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    chat_template_kwargs: _TemplateOptions | None = None
    thinking: _Thinking | None = None
    reasoning_effort: Name | None = None


class _Completion(_Common, kw_only=True):
    prompt: msgspec.Raw  # str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Top | None = None
    echo: bool | None = None


class _Field(Generic[T]):
    """A field that came raw: what its JSON has to be, and how many bytes of it are read at all."""

    def __init__(self, decoder: msgspec.json.Decoder[T], most_bytes: int) -> None:
        self._decoder = decoder
        self._most_bytes = most_bytes

    def read(self, raw: msgspec.Raw, place: str) -> T | None:
        """None where it is absent or null. Raises RequestError, which names `place` and what is below it."""
        if _is_absent(raw):
            return None
        data = memoryview(raw)
        if data.nbytes > self._most_bytes:
            raise RequestError(f"more than {self._most_bytes} bytes of JSON", place)
        return _decoded(self._decoder, data, place)


def _is_absent(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:5]) in (b"", b"null")


_STOP = _Field(msgspec.json.Decoder(StopText | StopTexts), 256 << 10)
_STOP_IDS = _Field(msgspec.json.Decoder(StopIds), 4 << 10)
_LOGIT_BIAS: _Field[dict[int, float]] = _Field(
    msgspec.json.Decoder(Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=300)]),
    16 << 10,
)
REFUSED_BYTES = 1 << 10  # of a field that is not served: what passes, since it changes nothing, is a word or two
_SMALL = _Field(msgspec.json.Decoder(Any), REFUSED_BYTES)
# float_hook: some numbers that msgspec spends microseconds on cost Python's own reader a fifth of one.
_OBJECT = msgspec.json.Decoder(dict[str, Any], float_hook=float)
_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_IDS = msgspec.json.Decoder(list[TokenId])
_LISTS_OF_IDS = msgspec.json.Decoder(list[list[TokenId]])


# -- What a request says -------------------------------------------------------------------------------------------


class Streaming(Record, frozen=True):
    """The answer comes in pieces. `usage` adds a last chunk with the token counts; `continuous` puts them in each."""

    usage: bool = False
    continuous: bool = False


class ChatRequest(Record, frozen=True):
    """What a body of /v1/chat/completions asks for."""

    model: str | None  # None: the served one
    ask: Ask
    stream: Streaming | None  # None: the answer comes whole


class CompletionRequest(Record, frozen=True):
    """What a body of /v1/completions asks for."""

    model: str | None  # None: the served one
    ask: Ask
    stream: Streaming | None  # None: the answer comes whole
    echo: bool = False  # the prompt's text, and its logprobs if asked for, open the answer


def read_chat(body: bytes, limits: Limits, defaults: Defaults) -> ChatRequest:
    """Read the body of POST /v1/chat/completions. Raises RequestError, naming the field.

    defaults: what holds where the request is silent.
    """
    request = read(body, _Chat)
    _refuse(request)
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
    return ChatRequest(
        model=request.model, ask=_ask(request, (conversation,), sampling, "messages"), stream=_streaming(request)
    )


def read_completion(body: bytes, limits: Limits, defaults: Defaults) -> CompletionRequest:
    """Read the body of POST /v1/completions. Raises RequestError, naming the field.

    defaults: what holds where the request is silent.
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
        ask=_ask(request, prompts, sampling, "prompt"),
        stream=_streaming(request),
        echo=echo,
    )


_MISSING = re.compile(r"^Object missing required field `(.*?)`")
_COMPLAINT_CHARS = 400  # msgspec repeats a wrong word, however long it is


def read(body: bytes, shape: type[T]) -> T:
    """JSON decoded as `shape`. Raises RequestError, whose `param` is the place, as in `messages[2].role`."""
    return _decoded(msgspec.json.Decoder(shape), body, "")


def _decoded(decoder: msgspec.json.Decoder[T], data: bytes | memoryview, place: str) -> T:
    """`data` decoded; place: where it stands in the body, empty where it is all of it. Raises RequestError."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _complaint(str(error), place) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not valid JSON: {error}", place or None) from None
    except RecursionError:
        raise RequestError("The body is nested too deeply", place or None) from None


def _complaint(message: str, place: str) -> RequestError:
    text, _, path = message.rpartition(" - at ")  # the last one: the words before it may be the client's own
    if not text:
        text, path = message, ""
    param = place + path.rpartition("`$")[2].removesuffix("`")
    if missing := _MISSING.match(text):
        param = f"{param}.{missing.group(1)}"
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
        if memoryview(raw).nbytes > REFUSED_BYTES:
            raise RequestError(f"{field} is not supported", field)
        value = _SMALL.read(raw, field)
        if value is None or value in _NEUTRAL.get(field, ()):
            continue
        if not value and field not in _OFF_IS_NOT_NEUTRAL:
            continue
        kind = cast("dict[str, Any]", value).get("type") if isinstance(value, dict) else None
        raise RequestError(f"{field}{f' of type {kind}' if kind else ''} is not supported", field)


def _ask(request: _Common, prompts: tuple[Prompt, ...], sampling: Sampling, param: str) -> Ask:
    stop = _STOP.read(request.stop, "stop") or ()
    return Ask(
        prompts=prompts,
        sampling=sampling,
        n=request.n or 1,
        seed=request.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        ignore_eos=bool(request.ignore_eos),
        salt=request.cache_salt or "",
        param=param,
    )


def _streaming(request: _Common) -> Streaming | None:
    options = request.stream_options
    if not request.stream:
        if options is not None:
            raise RequestError("stream_options needs stream to be true", "stream_options")
        return None
    usage = bool(options and options.include_usage)
    return Streaming(usage=usage, continuous=usage and bool(options and options.continuous_usage_stats))


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
    return Sampling(
        max_tokens=most,
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=max(_or(request.top_k, defaults.top_k), 0),
        min_p=_or(request.min_p, defaults.min_p),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        stop_ids=tuple(_STOP_IDS.read(request.stop_token_ids, "stop_token_ids") or ()),
        min_tokens=least,
        logit_bias=tuple((_LOGIT_BIAS.read(request.logit_bias, "logit_bias") or {}).items()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


_FIRST = re.compile(rb"\s*\[\s*(.?)", re.DOTALL)


def _prompts(raw: msgspec.Raw, limits: Limits) -> tuple[Prompt, ...]:
    data = memoryview(raw)
    first = _FIRST.match(data)
    if first is None:
        return (_decoded(_TEXT, data, "prompt"),)
    match first[1]:
        case b"]":
            raise RequestError("prompt is empty", "prompt")
        case b'"' if _strings(bytes(data)) > limits.prompts:
            raise RequestError(f"at most {limits.prompts} prompts in one request", "prompt")
        case b'"':
            prompts: tuple[Prompt, ...] = tuple(_decoded(_TEXTS, data, "prompt"))
        case b"[" if bytes(data).count(b"[") > limits.prompts + 1:
            raise RequestError(f"at most {limits.prompts} prompts in one request", "prompt")
        case b"[":
            prompts = tuple(map(tuple, _decoded(_LISTS_OF_IDS, data, "prompt")))
        case _:
            return (_ids(raw, "prompt", limits.tokens),)
    if len(prompts) > limits.prompts:
        raise RequestError(f"at most {limits.prompts} prompts in one request", "prompt")
    return prompts


def _strings(data: bytes) -> int:
    """How many strings a JSON list of strings holds, by their quotes: two million of them take 0.2 s to read."""
    single = data.replace(rb"\\", b"")  # what is left of backslashes stands before what it escapes
    return (single.count(b'"') - single.count(rb"\"")) // 2


def _ids(raw: msgspec.Raw, place: str, most: int) -> tuple[int, ...]:
    data = memoryview(raw)
    if bytes(data).count(b",") >= most:
        raise RequestError(f"at most {most} token ids in one request", place)
    return tuple(_decoded(_IDS, data, place))


def _conversation(
    request: "_Chat | _Tokenize", messages: Sequence[_Message], limits: Limits, defaults: Defaults
) -> Conversation:
    thinking, preserve = _thinking(request, defaults)
    objects = _Objects(limits)
    return Conversation(
        messages=_messages(messages, limits, objects),
        tools=_tools(request.tools, limits, objects) if _tools_wanted(request.tool_choice) else (),
        thinking=thinking,
        preserve_thinking=preserve,
        add_generation_prompt=not isinstance(request, _Tokenize) or request.add_generation_prompt,
    )


def _thinking(request: "_Chat | _Tokenize", defaults: Defaults) -> tuple[bool, bool]:
    """The pair (thinking, preserve_thinking). Of several spellings the most explicit one decides: Moonshot's own field,
    then the template's variables, then OpenAI's reasoning_effort."""
    template = request.chat_template_kwargs or _TemplateOptions()
    said = (
        request.thinking.type == "enabled" if request.thinking else None,
        template.thinking,
        template.enable_thinking,
        request.reasoning_effort != "none" if request.reasoning_effort else None,
    )
    thinking = next((choice for choice in said if choice is not None), defaults.thinking)
    return thinking, bool(template.preserve_thinking) or bool(request.thinking and request.thinking.keep == "all")


def _tools_wanted(raw: msgspec.Raw) -> bool:
    choice = _SMALL.read(raw, "tool_choice")
    match choice:
        case None | "auto":
            return True
        case "none":
            return False
        case "required":
            raise RequestError("tool_choice required is not supported: use auto or none", "tool_choice")
        case {"type": "function"}:
            raise RequestError("tool_choice naming a function is not supported: use auto or none", "tool_choice")
        case _:
            raise RequestError("tool_choice has to be auto or none", "tool_choice")


class _Objects:
    """The JSON objects of one request, which are read whole: bounded together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._left = limits.json_bytes

    def read(self, raw: msgspec.Raw, place: str) -> dict[str, Any]:
        data = memoryview(raw)
        self._left -= data.nbytes
        if self._left < 0:
            raise RequestError(
                f"the parameters of tools and the arguments given as objects are more than {self._limits.json_bytes} "
                "bytes together",
                place,
            )
        value = _decoded(_OBJECT, data, place)
        if _depth(value) > self._limits.json_depth:
            raise RequestError(f"nested more than {self._limits.json_depth} deep", place)
        return value


def _messages(messages: Sequence[_Message], limits: Limits, objects: _Objects) -> tuple[Message, ...]:
    if len(messages) > limits.messages:
        raise RequestError(f"at most {limits.messages} messages in one request", "messages")
    if sum(len(message.tool_calls or ()) for message in messages) > limits.calls:
        raise RequestError(f"at most {limits.calls} tool calls in one request", "messages")
    return tuple(_message(message, f"messages[{index}]", objects) for index, message in enumerate(messages))


def _message(message: _Message, place: str, objects: _Objects) -> Message:
    role = "system" if message.role == "developer" else message.role
    content = _content(message.content, f"{place}.content")
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
        reasoning=message.reasoning_content or message.reasoning or "",
        tool_calls=tuple(
            _call(call, f"{place}.tool_calls[{index}].function.arguments", objects)
            for index, call in enumerate(message.tool_calls or ())
        ),
    )


def _content(content: str | list[_Part] | None, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text":
            raise RequestError(f"content of type {part.type} is not supported: text only", f"{place}[{index}].type")
        if part.text is None:
            raise RequestError("a part of type text needs text", f"{place}[{index}].text")
    return "".join(part.text or "" for part in content)


def _call(call: _Call, place: str, objects: _Objects) -> ToolCall:
    raw = call.function.arguments
    data = memoryview(raw)
    if not data.nbytes:
        arguments = ""
    elif bytes(data[:1]) == b"{":
        arguments = msgspec.json.encode(objects.read(raw, place)).decode()
    else:
        arguments = _decoded(_TEXT, data, place)
    return ToolCall(id=call.id, name=call.function.name, arguments=arguments)


def _tools(tools: Sequence[_Tool] | None, limits: Limits, objects: _Objects) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if len(tools) > limits.tools:
        raise RequestError(f"at most {limits.tools} tools in one request", "tools")
    read: list[Tool] = []
    for index, tool in enumerate(tools):
        if tool.type != "function":
            raise RequestError(f"a tool of type {tool.type} is not supported", f"tools[{index}].type")
        function = tool.function
        if function is None:
            raise RequestError("a tool of type function needs its function", f"tools[{index}].function")
        raw, place = function.parameters, f"tools[{index}].function.parameters"
        parameters = {} if _is_absent(raw) else objects.read(raw, place)
        read.append(Tool(name=function.name, description=function.description or "", parameters=parameters))
    return tuple(read)


def _depth(value: Any) -> int:
    """Nesting of objects and arrays, found without recursion."""
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
    tool_choice: msgspec.Raw = _ABSENT
    chat_template_kwargs: _TemplateOptions | None = None
    thinking: _Thinking | None = None
    reasoning_effort: Name | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class _Detokenize(msgspec.Struct, kw_only=True):
    model: Name | None = None
    tokens: msgspec.Raw  # list[TokenId]


class TokenizeRequest(Record, frozen=True):
    """What a body of /tokenize asks for."""

    model: str | None  # None: the served one
    prompt: Prompt
    token_strs: bool = False  # the answer has each token's text too


class DetokenizeRequest(Record, frozen=True):
    """What a body of /detokenize asks for; whether the ids are tokens of the model is not checked yet."""

    model: str | None  # None: the served one
    tokens: tuple[int, ...]


def read_tokenize(body: bytes, limits: Limits, defaults: Defaults) -> TokenizeRequest:
    """Read the body of POST /tokenize, which has either `prompt` or `messages`. Raises RequestError, naming the field.

    Messages become the prompt that they would be in a chat request with the same fields.
    Kimi has no token that opens a text, so add_special_tokens makes no difference.
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
    """Read the body of POST /detokenize; more than `most` ids are not read. Raises RequestError, naming the field."""
    request = read(body, _Detokenize)
    return DetokenizeRequest(model=request.model, tokens=_ids(request.tokens, "tokens", most))


# -- What `/openapi.json` is made from -----------------------------------------------------------------------------

ChatBody, CompletionBody, TokenizeBody, DetokenizeBody = _Chat, _Completion, _Tokenize, _Detokenize


def _passing(refused: type[_RefusedInPrompt]) -> dict[str, list[Any]]:
    """For each field that is not served, the values that pass, since they change nothing."""
    empty: list[Any] = ["", [], {}, False, 0]
    return {
        field: [None, *([] if field in _OFF_IS_NOT_NEUTRAL else empty), *_NEUTRAL.get(field, ())]
        for field in refused.__struct_fields__
    }


REFUSED = _passing(_Refused)
REFUSED_IN_PROMPT = _passing(_RefusedInPrompt)
