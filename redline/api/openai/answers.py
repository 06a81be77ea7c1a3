"""Whole responses in OpenAI's format, and parts shared with streams: finish reasons, usage, logprobs."""

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, TypeVar, cast

import msgspec
from msgspec import UNSET

from redline.api.body import encode
from redline.api.gateway.generation import ChoiceDelta, Generation
from redline.api.openai.protocol import (
    ChatChoice,
    ChatCompletion,
    ChatFunction,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    CompletionUsage,
    ContentLogprob,
    DetokenizeResponse,
    FinishReason,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    TextCompletion,
    TokenizeResponse,
    TopLogprob,
)
from redline.chat.events import CallArguments, CallBegin, End, Logprobs, Text, Thought
from redline.messages.step import TokenLogprobs

T = TypeVar("T")
TokenBytes = Callable[[int], bytes]
Scored = tuple[TokenLogprobs, bytes]
Placed = tuple[TokenLogprobs | None, bytes, int]  # with its offset in the text

_AT_ONCE = 256  # list entries encoded in one call, which holds the GIL


def json_list(items: Iterable[T]) -> list[T]:
    """The items as a field of a body, encoded already: piece by piece, so that streams are served while a thread
    encodes a long list."""
    pieces: list[bytes] = []
    iterator = iter(items)
    while some := list(islice(iterator, _AT_ONCE)):
        pieces.append(encode(some)[1:-1])
    return cast("list[T]", msgspec.Raw(b"[" + b",".join(pieces) + b"]"))


class ChoiceOutput:
    """The collected events of one choice; `index` and order are those of the generation's lanes."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.thought: list[str] = []
        self.calls: list[tuple[CallBegin, list[str]]] = []
        self.logprobs: list[Scored] = []
        self.end: End | None = None
        self.prompt_logprobs: Sequence[TokenLogprobs] | None = None
        self.prompt_ids: Sequence[int] | None = None
        self.token_ids: list[int] = []  # this and the prompt's ids, if requested

    def add(self, batch: ChoiceDelta) -> None:
        """Add the choice's next batch."""
        if batch.first:
            self.prompt_logprobs = batch.prompt_logprobs
            self.prompt_ids = batch.prompt_ids
        self.token_ids += batch.token_ids or ()
        for event in batch.events:
            match event:
                case Text(text=text):
                    self.text.append(text)
                case Thought(text=text):
                    self.thought.append(text)
                case CallBegin():
                    self.calls.append((event, []))
                case CallArguments(index=index, text=text):
                    self.calls[index][1].append(text)
                case Logprobs(items=items):
                    self.logprobs.extend(items)
                case End():
                    self.end = event

    @property
    def entries(self) -> int:
        """Number of entries to encode: logprobs and pieces of text."""
        ids = (len(self.prompt_ids or ()) + len(self.token_ids)) // 8
        return ids + len(self.text) + len(self.thought) + sum(1 + len(item.top) for item, _ in self.logprobs)

    def ended(self) -> End:
        """The choice's end. Raises AssertionError if it has not arrived."""
        assert self.end is not None, "the gateway's batches ended before the choice did"
        return self.end


async def gather(generation: Generation) -> list[ChoiceOutput]:
    """Read a generation to its end; returns its choices by index. Raises what the generation raises."""
    gathered = [ChoiceOutput() for _ in generation.jobs]
    async for together in generation:
        for batch in together:
            gathered[batch.choice].add(batch)
    return gathered


def chat_answer(
    id: str,
    created: int,
    model: str,
    choices: Sequence[ChoiceOutput],
    logprobs: bool,
    token_bytes: TokenBytes,
    reasoning_field: str,
) -> bytes:
    """The body of a whole chat completion, as JSON.

    created: Unix seconds. choices: by index, all ended. logprobs: whether they were requested.
    """
    prompt_ids, prompt_logprobs = choices[0].prompt_ids, choices[0].prompt_logprobs
    body = ChatCompletion(
        id=id,
        created=created,
        model=model,
        choices=[
            ChatChoice(
                index=index,
                message=_message(choice, reasoning_field),
                logprobs=chat_logprobs(choice.logprobs, token_bytes) if logprobs else None,
                finish_reason=finish_reason(choice.ended()),
                stop_reason=choice.ended().stop,
                token_ids=UNSET if choice.prompt_ids is None else json_list(choice.token_ids),
            )
            for index, choice in enumerate(choices)
        ],
        usage=usage_of([choice.ended() for choice in choices], n=len(choices)),
        prompt_token_ids=UNSET if prompt_ids is None else json_list(prompt_ids),
        prompt_logprobs=UNSET if prompt_logprobs is None else vllm_prompt_logprobs(prompt_logprobs, token_bytes),
    )
    return encode(body)


def _message(choice: ChoiceOutput, reasoning_field: str) -> ChatMessage:
    text, thought = "".join(choice.text), "".join(choice.thought)
    message = ChatMessage(content=text or (None if choice.calls else ""))
    if thought:
        setattr(message, reasoning_field, thought)
    if choice.calls:
        message.tool_calls = [
            ChatToolCall(id=call.id, function=ChatFunction(call.name, "".join(arguments)))
            for call, arguments in choice.calls
        ]
    return message


def finish_reason(end: End) -> FinishReason:
    """Of an answer that was neither aborted nor failed: nobody reads the end of those."""
    return "tool_calls" if end.tool_calls and end.finish == "stop" else cast("FinishReason", end.finish)


def usage_of(ends: Sequence[End], n: int) -> CompletionUsage:
    """Token usage of all choices together; a prompt that was answered `n` times counts once.

    ends: one per choice, by choice index.
    """
    firsts = ends[::n]
    cached = sum(min(end.cached_tokens for end in ends[start : start + n]) for start in range(0, len(ends), n))
    return usage(
        prompt=sum(end.prompt_tokens for end in firsts),
        completion=sum(end.completion_tokens for end in ends),
        cached=cached,
        images=sum(end.image_tokens for end in firsts),
        reasoning=sum(end.reasoning_tokens for end in ends),
        accepted=sum(end.accepted_tokens for end in ends),
        rejected=sum(end.rejected_tokens for end in ends),
    )


def usage(
    prompt: int,
    completion: int,
    cached: int = 0,
    images: int = 0,
    reasoning: int = 0,
    accepted: int = 0,
    rejected: int = 0,
) -> CompletionUsage:
    """All counts are tokens. cached, images: of the prompt. reasoning, accepted: part of `completion`. accepted,
    rejected: draft tokens."""
    return CompletionUsage(
        prompt,
        completion,
        prompt + completion,
        PromptTokensDetails(cached, images or UNSET),
        CompletionTokensDetails(reasoning, accepted, rejected),
    )


def completion_answer(
    id: str,
    created: int,
    model: str,
    prompts: Sequence[Sequence[int]],
    choices: Sequence[ChoiceOutput],
    logprobs: bool,
    echo: bool,
    token_bytes: TokenBytes,
    hidden: frozenset[int],
) -> bytes:
    """The body of a whole text completion, as JSON.

    created: Unix seconds. prompts: their token ids. choices: the answers to the first prompt, then to the second, and
    so on, all ended. logprobs: whether they were requested. echo: each choice's text begins with the prompt. hidden:
    ids that are decoded to no text.
    """
    n = len(choices) // len(prompts)
    body = TextCompletion(
        id=id,
        created=created,
        model=model,
        choices=[
            _completion_choice(
                index,
                choice,
                Opening(prompts[index // n], choice.prompt_logprobs, echo, token_bytes),
                Offsets(hidden) if logprobs else None,
                token_bytes,
            )
            for index, choice in enumerate(choices)
        ],
        usage=usage_of([choice.ended() for choice in choices], n),
    )
    return encode(body)


def _completion_choice(
    index: int, choice: ChoiceOutput, opening: "Opening", offsets: "Offsets | None", token_bytes: TokenBytes
) -> CompletionChoice:
    text, scored, end = opening.text + "".join(choice.text), None, choice.ended()
    if offsets is not None:
        placed = [*offsets.of_prompt(opening.scored), *offsets.of(choice.logprobs)]
        scored = completion_logprobs(placed, token_bytes, len(text))
    answer = CompletionChoice(
        index=index, text=text, logprobs=scored, finish_reason=finish_reason(end), stop_reason=end.stop
    )
    if opening.prompt_logprobs is not None:
        answer.prompt_logprobs = vllm_prompt_logprobs(opening.prompt_logprobs, token_bytes)
    if choice.prompt_ids is not None:
        answer.prompt_token_ids, answer.token_ids = json_list(choice.prompt_ids), json_list(choice.token_ids)
    return answer


def tokenize_answer(tokens: Sequence[int], max_model_len: int, token_bytes: TokenBytes | None) -> bytes:
    """The body of a response to /tokenize, as JSON. token_bytes: None if the tokens' texts are not requested."""
    strings = None
    if token_bytes is not None:
        strings = json_list(token_bytes(token).decode(errors="replace") for token in tokens)
    return encode(TokenizeResponse(len(tokens), max_model_len, json_list(tokens), strings))


def detokenize_answer(tokens: Sequence[int], decode_bytes: Callable[[Sequence[int]], bytes]) -> bytes:
    """The body of a response to /detokenize, as JSON; bytes that are not UTF-8 become U+FFFD."""
    return encode(DetokenizeResponse(decode_bytes(tokens).decode(errors="replace")))


def tokenizer_info(config: dict[str, Any], max_model_len: int) -> bytes:
    """The body of a response to /tokenizer_info, as JSON. config: of the tokenizer, with its chat template."""
    tokens = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
    # json instead of msgspec, since it encodes integers of any size.
    return json.dumps({"chat_template": None, **config, **tokens, "model_max_length": max_model_len}).encode()


def _token_text(token: Any) -> str | None:
    """The text of a token in tokenizer_config.json, which is a string or an object with the text."""
    return cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token


class Opening:
    """The beginning of a completion's text: with `echo` the prompt, and its logprobs.

    `text` is empty without `echo`; `scored` has an entry per prompt token, the first one without logprobs, and is empty
    without `echo` or prompt_logprobs.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        prompt_logprobs: Sequence[TokenLogprobs] | None,
        echo: bool,
        token_bytes: TokenBytes,
    ) -> None:
        self.prompt_logprobs = prompt_logprobs
        self.text = b"".join(map(token_bytes, prompt)).decode(errors="replace") if echo else ""
        self.scored: list[tuple[TokenLogprobs | None, bytes]] = []
        if echo and prompt_logprobs is not None:
            self.scored.append((None, token_bytes(prompt[0])))  # the first token has no preceding tokens
            self.scored += [(item, token_bytes(item.token)) for item in prompt_logprobs]


def chat_logprobs(items: Iterable[Scored], token_bytes: TokenBytes) -> ChatLogprobs:
    """OpenAI's chat format, an entry per token; its `bytes` are for tokens that are only part of a character.

    items: each token's logprobs with the token's bytes.
    """
    return ChatLogprobs(
        json_list(
            ContentLogprob(
                data.decode(errors="replace"),
                item.logprob,
                list(data),
                [_top(token_bytes(token), logprob) for token, logprob in item.top],
            )
            for item, data in items
        )
    )


def _top(data: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(data.decode(errors="replace"), logprob, list(data))


class Offsets:
    """Offsets of a choice's tokens in its text, in characters.

    A token that is only part of a character has the offset of that character.
    """

    def __init__(self, hidden: frozenset[int]) -> None:
        """`hidden`: generated ids that are decoded to no text."""
        self._hidden = hidden
        self._pending = b""  # bytes of an incomplete character
        self._chars = 0

    def of_prompt(self, items: Iterable[tuple[TokenLogprobs | None, bytes]]) -> list[Placed]:
        """The tokens of an echoed prompt, which comes first, and is decoded separately."""
        placed = [(item, data, self._pass(data)) for item, data in items]
        self._flush()
        return placed

    def of(self, items: Iterable[Scored]) -> list[Placed]:
        """The next tokens of the answer."""
        placed: list[Placed] = []
        for item, data in items:
            if item.token in self._hidden:
                self._flush()
                placed.append((item, data, self._chars))
            else:
                placed.append((item, data, self._pass(data)))
        return placed

    def _pass(self, data: bytes) -> int:
        begin, data = self._chars, self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._chars += len(text)
        self._pending = data[used:]
        return begin

    def _flush(self) -> None:
        self._chars += len(self._pending.decode(errors="replace"))
        self._pending = b""


def completion_logprobs(items: Iterable[Placed], token_bytes: TokenBytes, most: int) -> CompletionLogprobs:
    """OpenAI's completions format: parallel lists. The chosen token is always among the top ones, as at OpenAI.

    items: each token's logprobs (None for a prompt's first token) with the token's bytes and its offset. most:
    characters of the text so far; tokens of a stop string that is not shown have this offset.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for item, data, offset in items:
        token = _spelled(data)
        tokens.append(token)
        offsets.append(min(offset, most))
        logprobs.append(item.logprob if item else None)
        top = {_spelled(token_bytes(id)): logprob for id, logprob in item.top} if item else None
        tops.append({token: item.logprob, **(top or {})} if item else None)
    return CompletionLogprobs(tokens, logprobs, json_list(tops), offsets)


def _spelled(data: bytes) -> str:
    """A token as text; part of a character is written in OpenAI's form, `bytes:\\xe2\\x80`, so that all are
    distinct."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def vllm_prompt_logprobs(items: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> PromptLogprobs:
    """vLLM's format: per prompt token null (the first) or {id: {logprob, rank, decoded_token}}."""
    return json_list(chain((None,), (_prompt_entry(item, token_bytes) for item in items)))


def _prompt_entry(item: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, PromptLogprob]:
    entry = {
        str(token): _ranked(token_bytes(token), logprob, rank)
        for rank, (token, logprob) in enumerate(item.top, start=1)
    }
    entry[str(item.token)] = _ranked(token_bytes(item.token), item.logprob, item.rank)
    return entry


def _ranked(data: bytes, logprob: float, rank: int) -> PromptLogprob:
    return PromptLogprob(logprob, rank, data.decode(errors="replace"))
