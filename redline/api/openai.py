"""What clients say, in OpenAI's dialect with vLLM's additions, read into our own words.

A type annotation is the check: msgspec decodes and bounds every field, and its complaint names the place. Fields that
we do not know are ignored, as clients send many (user, metadata, store, ...). Fields that we know and cannot honour,
where ignoring them would change the answer, are refused by name.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from redline.api.ask import WHAT_IS_LEFT, Ask, Prompt
from redline.api.config import Defaults, Limits
from redline.chat.conversation import Conversation, Message, Tool, ToolCall
from redline.chat.generation import MinP, Temperature, TopK, TopP
from redline.errors import RequestError
from redline.wire.base import Record
from redline.wire.job import Sampling

# -- What a request may say ----------------------------------------------------------------------------------------

Name = Annotated[str, Meta(max_length=256)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
MaxTokens = Annotated[int, Meta(ge=1, lt=WHAT_IS_LEFT)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Top = Annotated[int, Meta(ge=0, le=20)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
# It divides and multiplies float32 logits: at 1e-40 they overflow, and no token is the most likely one.
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10)]


class _Part(msgspec.Struct):
    type: Name
    text: str | None = None


class _Function(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str | dict[str, Any] = ""


class _Call(msgspec.Struct):
    id: Name
    function: _Function
    type: Literal["function"] = "function"


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: Name | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[_Call], Meta(max_length=128)] | None = None
    tool_call_id: Name | None = None
    refusal: str | None = None


class _Declared(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
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


class _Refused(msgspec.Struct, kw_only=True):
    """Fields that would change the answer and that are not served. Empty values and those in `_NEUTRAL` pass."""

    response_format: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    truncate_prompt_tokens: Any = None
    prompt_embeds: Any = None
    suffix: Any = None
    chat_template: Any = None
    documents: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    return_tokens_as_token_ids: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "length_penalty": (1, 1.0),
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
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=WHAT_IS_LEFT)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=300)] | None = None
    prompt_logprobs: Top | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cache_salt: Name | None = None


class _Chat(_Common, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    chat_template_kwargs: _TemplateOptions | None = None
    thinking: _Thinking | None = None
    reasoning_effort: Name | None = None


class _Completion(_Common, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Top | None = None
    echo: bool | None = None


# -- What a request says -------------------------------------------------------------------------------------------


class Streaming(Record, frozen=True):
    """The answer comes in pieces; `usage` adds a last chunk with the counts, `continuous` puts them in every chunk."""

    usage: bool = False
    continuous: bool = False


class ChatRequest(Record, frozen=True):
    model: str | None  # None: the served one
    ask: Ask
    stream: Streaming | None  # None: the answer comes whole


class CompletionRequest(Record, frozen=True):
    model: str | None
    ask: Ask
    stream: Streaming | None
    echo: bool = False  # the prompt's text, and its logprobs if asked for, open the answer


def read_chat(body: bytes, limits: Limits, defaults: Defaults) -> ChatRequest:
    """The body of POST /v1/chat/completions. Raises RequestError, naming the field."""
    request = read(body, _Chat)
    _refuse(request)
    thinking, preserve = _thinking(request, defaults)
    conversation = Conversation(
        messages=read_messages(request.messages, limits),
        tools=read_tools(request.tools, limits) if _tools_wanted(request.tool_choice) else (),
        thinking=thinking,
        preserve_thinking=preserve,
    )
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
    """The body of POST /v1/completions. Raises RequestError, naming the field."""
    request = read(body, _Completion)
    _refuse(request)
    prompts = _prompts(request.prompt)
    if len(prompts) > limits.prompts:
        raise RequestError(f"at most {limits.prompts} prompts in one request", "prompt")
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


T = TypeVar("T")
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_MISSING = re.compile(r"^Object missing required field `(.*?)`")


def read(body: bytes, shape: type[T]) -> T:
    """JSON of a given shape. Raises RequestError: `param` is the place, as in `messages[2].role`."""
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise _complaint(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("The body is nested too deeply") from None


def _complaint(message: str) -> RequestError:
    place = _PLACE.search(message)
    text = message[: place.start()] if place else message
    param = place.group(1) if place else ""
    if missing := _MISSING.match(text):
        param = f"{param}.{missing.group(1)}".lstrip(".")
    return RequestError(text, param or None)


def _refuse(request: _Common) -> None:
    for field in _Refused.__struct_fields__:
        value = getattr(request, field)
        if value is None or value in _NEUTRAL.get(field, ()):
            continue
        if not value and field not in _OFF_IS_NOT_NEUTRAL:
            continue
        kind = cast("dict[str, Any]", value).get("type") if isinstance(value, dict) else None
        raise RequestError(f"{field}{f' of type {kind}' if kind else ''} is not supported", field)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError("best_of is not supported: it may only equal n", "best_of")


def _ask(request: _Common, prompts: tuple[Prompt, ...], sampling: Sampling, param: str) -> Ask:
    stop = request.stop or ()
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
        stop_ids=tuple(request.stop_token_ids or ()),
        min_tokens=least,
        logit_bias=tuple((request.logit_bias or {}).items()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    match prompt:
        case str():
            return (prompt,)
        case []:
            raise RequestError("prompt is empty", "prompt")
        case [int(), *_]:
            return (tuple(_each(prompt, int)),)
        case [str(), *_]:
            return tuple(_each(prompt, str))
        case _:
            return tuple(tuple(ids) for ids in _each(prompt, list[int]))


def _each(items: Sequence[Any], kind: type[T]) -> list[T]:
    for index, item in enumerate(items):
        if not isinstance(item, list if kind == list[int] else kind):
            raise RequestError("prompt mixes texts, ids and lists: it has to be all of one kind", f"prompt[{index}]")
    return cast("list[T]", items)


def _thinking(request: _Chat, defaults: Defaults) -> tuple[bool, bool]:
    """(thinking, preserve_thinking). The most explicit spelling wins: Moonshot's own field, then the template's
    variables, then OpenAI's effort."""
    template = request.chat_template_kwargs or _TemplateOptions()
    said = (
        request.thinking.type == "enabled" if request.thinking else None,
        template.thinking,
        template.enable_thinking,
        request.reasoning_effort != "none" if request.reasoning_effort else None,
    )
    thinking = next((choice for choice in said if choice is not None), defaults.thinking)
    return thinking, bool(template.preserve_thinking) or bool(request.thinking and request.thinking.keep == "all")


def _tools_wanted(choice: Any) -> bool:
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


def read_messages(messages: Sequence[_Message], limits: Limits) -> tuple[Message, ...]:
    if len(messages) > limits.messages:
        raise RequestError(f"at most {limits.messages} messages in one request", "messages")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _message(message: _Message, place: str) -> Message:
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
        tool_calls=tuple(_call(call) for call in message.tool_calls or ()),
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


def _call(call: _Call) -> ToolCall:
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCall(id=call.id, name=call.function.name, arguments=arguments)


def read_tools(tools: Sequence[_Tool] | None, limits: Limits) -> tuple[Tool, ...]:
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
        parameters = function.parameters or {}
        if _depth(parameters) > limits.json_depth:
            raise RequestError(
                f"parameters are nested more than {limits.json_depth} deep", f"tools[{index}].function.parameters"
            )
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


class _Tokenize(msgspec.Struct, kw_only=True):
    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[_Message], Meta(min_length=1)] | None = None
    tools: list[_Tool] | None = None
    chat_template_kwargs: _TemplateOptions | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class _Detokenize(msgspec.Struct, kw_only=True):
    model: Name | None = None
    tokens: list[TokenId]


class TokenizeRequest(Record, frozen=True):
    model: str | None
    prompt: Prompt
    token_strs: bool = False


class DetokenizeRequest(Record, frozen=True):
    model: str | None
    tokens: tuple[int, ...]


def read_tokenize(body: bytes, limits: Limits, defaults: Defaults) -> TokenizeRequest:
    """`prompt` or `messages`. Kimi has no token that opens a text, so add_special_tokens makes no difference."""
    request = read(body, _Tokenize)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    prompt: Prompt = request.prompt or ""
    if request.messages is not None:
        options = request.chat_template_kwargs or _TemplateOptions()
        prompt = Conversation(
            messages=read_messages(request.messages, limits),
            tools=read_tools(request.tools, limits),
            thinking=_or(options.thinking, _or(options.enable_thinking, defaults.thinking)),
            preserve_thinking=bool(options.preserve_thinking),
            add_generation_prompt=request.add_generation_prompt,
        )
    return TokenizeRequest(model=request.model, prompt=prompt, token_strs=bool(request.return_token_strs))


def read_detokenize(body: bytes) -> DetokenizeRequest:
    request = read(body, _Detokenize)
    return DetokenizeRequest(model=request.model, tokens=tuple(request.tokens))
