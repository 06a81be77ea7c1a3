"""Responses as server-sent events, in OpenAI's chunk formats.

Each delta of the engine becomes a chunk (or one chunk per event, if it has several), so that clients can time tokens;
deltas that arrived together are sent in one write. Nearly every chunk is a piece of text, so everything but the text is
encoded once per choice.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter

from msgspec import UNSET, UnsetType

from redline.api.body import MARK, around, encode
from redline.api.dialect import Streaming
from redline.api.errors import answer_to
from redline.api.gateway.generation import ChoiceDelta
from redline.api.openai.answers import (
    Offsets,
    Opening,
    Placed,
    Scored,
    TokenBytes,
    chat_logprobs,
    completion_logprobs,
    finish_reason,
    json_list,
    usage,
    usage_of,
    vllm_prompt_logprobs,
)
from redline.api.openai.protocol import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatDelta,
    CompletionChunkChoice,
    CompletionUsage,
    FunctionDelta,
    TextCompletionChunk,
    ToolCallDelta,
)
from redline.chat.events import CallArguments, CallBegin, End, Logprobs, Text, Thought

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"  # a comment


def data(body: bytes) -> bytes:
    """One server-sent event around a JSON body."""
    return b"data: " + body + b"\n\n"


def _around(chunk: ChatCompletionChunk | TextCompletionChunk) -> list[bytes]:
    """As `around`, of the chunk as an event."""
    head, tail = around(chunk)
    return [b"data: " + head, tail + b"\n\n"]


class _ChunkStream(ABC):
    """Shared by both streams: usage, token ids, and the token count of each choice."""

    def __init__(self, prompts: Sequence[int], n: int, how: Streaming, logprobs: bool, token_bytes: TokenBytes):
        self._how = how
        self._n = n
        self._prompts = prompts  # lengths, in tokens
        self._logprobs = logprobs
        self._token_bytes = token_bytes
        self._completion = [0] * (len(prompts) * n)
        self._ends: list[End | None] = [None] * (len(prompts) * n)
        self._token_ids: list[list[int] | UnsetType] = [UNSET] * len(self._ends)  # for the next chunk
        self._batch = ChoiceDelta(0, (), 0)  # the current one
        self._plain = not (logprobs or how.continuous or how.proposers)

    @abstractmethod
    def _usage_chunk(self, usage: CompletionUsage) -> bytes:
        """The chunk without choices."""

    @property
    def _usage(self) -> CompletionUsage | UnsetType | None:
        """Of a chunk: with include_usage all but the last have null; with continuous_usage_stats the counts so far."""
        if self._how.continuous:
            return usage(sum(self._prompts), sum(self._completion))
        return None if self._how.usage else UNSET

    def _begin(self, batch: ChoiceDelta) -> None:
        self._batch = batch
        self._completion[batch.choice] = batch.completion_tokens

    def _add_ids(self, batch: ChoiceDelta) -> None:
        if batch.token_ids is not None:
            self._token_ids[batch.choice] = [*(self._token_ids[batch.choice] or ()), *batch.token_ids]

    def _extended(self, choice: ChatChunkChoice | CompletionChunkChoice, end: End | None) -> None:
        """Set the fields that both formats have."""
        choice.token_ids, self._token_ids[choice.index] = self._token_ids[choice.index], UNSET
        if self._batch.proposer is not None:
            choice.proposer, choice.elapsed_ms = self._batch.proposer, self._batch.elapsed_ms
        if end is not None:
            choice.finish_reason, choice.stop_reason = finish_reason(end), end.stop

    def open(self) -> bytes:
        """Nothing: the first chunk of a choice is sent with its first tokens."""
        return b""

    def keepalive(self) -> bytes:
        """A comment."""
        return KEEPALIVE

    def fail(self, error: Exception) -> bytes:
        """The error as the last event."""
        return data(answer_to(error).body)

    async def close(self) -> bytes:
        """The end of the stream: a chunk with the usage, if requested, and [DONE]."""
        if not self._how.usage:
            return DONE
        return self._usage_chunk(usage_of([end for end in self._ends if end is not None], self._n)) + DONE


class ChatStream(_ChunkStream):
    """The stream of a chat completion.

    created: Unix seconds. prompts: lengths, in tokens. n: choices for each prompt. logprobs: whether they were
    requested.
    """

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        prompts: Sequence[int],
        n: int,
        how: Streaming,
        logprobs: bool,
        token_bytes: TokenBytes,
        reasoning_field: str,
    ) -> None:
        super().__init__(prompts, n, how, logprobs, token_bytes)
        self._id, self._created, self._model = id, created, model
        self._reasoning_field = reasoning_field
        self._held: list[list[Scored]] = [[] for _ in self._ends]  # logprobs of text that has not been sent yet
        if self._plain:
            self._text = [_around(self._chunk(index, ChatDelta(content=MARK))) for index in range(len(self._ends))]
            self._thought = [_around(self._chunk(index, self._reasoning(MARK))) for index in range(len(self._ends))]

    def write(self, batches: Sequence[ChoiceDelta]) -> bytes:
        """The chunks of these batches, in order; logprobs are sent with the next chunk of their choice."""
        chunks: list[bytes] = []
        for batch in batches:
            choice, events = batch.choice, batch.events
            plain = self._plain and batch.token_ids is None
            if plain and not batch.first and len(events) == 1 and isinstance(event := events[0], (Text, Thought)):
                head, tail = (self._text if isinstance(event, Text) else self._thought)[choice]
                chunks.append(head + encode(event.text) + tail)  # nearly every chunk is such a one
                continue
            self._begin(batch)
            if batch.first:
                chunks.append(self._open(batch))
            self._add_ids(batch)
            if self._logprobs:
                self._held[choice] += [item for event in events if isinstance(event, Logprobs) for item in event.items]
            for event in events:
                match event:
                    case Text(text=text) if plain:
                        chunks.append(encode(text).join(self._text[choice]))
                    case Text(text=text):
                        chunks.append(self._event(choice, ChatDelta(content=text)))
                    case Thought(text=text) if plain:
                        chunks.append(encode(text).join(self._thought[choice]))
                    case Thought(text=text):
                        chunks.append(self._event(choice, self._reasoning(text)))
                    case CallBegin(index=index, id=id, name=name):
                        function = FunctionDelta(name=name, arguments="")
                        call = ToolCallDelta(index=index, id=id, type="function", function=function)
                        chunks.append(self._event(choice, ChatDelta(tool_calls=[call])))
                    case CallArguments(index=index, text=text):
                        call = ToolCallDelta(index=index, function=FunctionDelta(arguments=text))
                        chunks.append(self._event(choice, ChatDelta(tool_calls=[call])))
                    case Logprobs():
                        pass
                    case End():
                        self._ends[choice] = event
                        chunks.append(self._event(choice, ChatDelta(), event))
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _reasoning(self, text: str) -> ChatDelta:
        delta = ChatDelta()
        setattr(delta, self._reasoning_field, text)
        return delta

    def _open(self, batch: ChoiceDelta) -> bytes:
        """The chunk with the role, before a choice's first event."""
        chunk = self._chunk(batch.choice, ChatDelta(role="assistant", content=""))
        if batch.prompt_logprobs is not None:
            chunk.prompt_logprobs = vllm_prompt_logprobs(batch.prompt_logprobs, self._token_bytes)
        if batch.prompt_ids is not None:
            chunk.prompt_token_ids = json_list(batch.prompt_ids)
        return data(encode(chunk))

    def _event(self, choice: int, delta: ChatDelta, end: End | None = None) -> bytes:
        return data(encode(self._chunk(choice, delta, end)))

    def _chunk(self, index: int, delta: ChatDelta, end: End | None = None) -> ChatCompletionChunk:
        """A chunk with one choice, and with the held logprobs, if any."""
        held, self._held[index] = self._held[index], []
        choice = ChatChunkChoice(
            index=index, delta=delta, logprobs=chat_logprobs(held, self._token_bytes) if held else None
        )
        self._extended(choice, end)
        return self._with([choice], self._usage)

    def _with(self, choices: list[ChatChunkChoice], usage: CompletionUsage | UnsetType | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _usage_chunk(self, usage: CompletionUsage) -> bytes:
        return data(encode(self._with([], usage)))


class CompletionStream(_ChunkStream):
    """The stream of a text completion.

    created: Unix seconds. prompts: token ids. n: choices for each prompt. logprobs: whether they were requested. echo:
    each choice's text begins with the prompt. hidden: ids that are decoded to no text.
    """

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        prompts: Sequence[Sequence[int]],
        n: int,
        how: Streaming,
        logprobs: bool,
        echo: bool,
        token_bytes: TokenBytes,
        hidden: frozenset[int],
    ) -> None:
        super().__init__([len(prompt) for prompt in prompts], n, how, logprobs, token_bytes)
        self._id, self._created, self._model = id, created, model
        self._ids = prompts
        self._echo = echo
        self._held: list[list[Placed]] = [[] for _ in self._ends]
        self._offsets = [Offsets(hidden) for _ in self._ends]
        self._shown = [0] * len(self._ends)  # characters sent
        if self._plain:
            self._text = [_around(self._chunk(index, MARK)) for index in range(len(self._ends))]

    def write(self, batches: Sequence[ChoiceDelta]) -> bytes:
        """The chunks of these batches, in order; logprobs are sent with the next chunk of their choice."""
        chunks: list[bytes] = []
        for batch in batches:
            choice = batch.choice
            self._begin(batch)
            if batch.first and (self._echo or batch.prompt_logprobs is not None or batch.prompt_ids is not None):
                chunks.append(self._open(batch))
            self._add_ids(batch)
            if self._logprobs:
                scored = [item for event in batch.events if isinstance(event, Logprobs) for item in event.items]
                self._held[choice] += self._offsets[choice].of(scored)
            for event in batch.events:
                match event:
                    case Text(text=text) if self._plain and batch.token_ids is None:
                        chunks.append(encode(text).join(self._text[choice]))
                    case Text(text=text):
                        self._shown[choice] += len(text)
                        chunks.append(data(encode(self._chunk(choice, text))))
                    case End():
                        self._ends[choice] = event
                        chunks.append(data(encode(self._chunk(choice, "", event))))
                    case _:
                        pass  # raw text has no reasoning and no tool calls; logprobs are held above
        return b"".join(chunks)

    def _open(self, batch: ChoiceDelta) -> bytes:
        """The beginning of a choice's text: the prompt and its logprobs, if requested."""
        choice, scored = batch.choice, batch.prompt_logprobs
        opening = Opening(self._ids[choice // self._n], scored, self._echo, self._token_bytes)
        if self._logprobs:
            self._held[choice] += self._offsets[choice].of_prompt(opening.scored)
        self._shown[choice] += len(opening.text)
        chunk = self._chunk(choice, opening.text)
        [first] = chunk.choices
        if scored is not None:
            first.prompt_logprobs = vllm_prompt_logprobs(scored, self._token_bytes)
        if batch.prompt_ids is not None:
            first.prompt_token_ids = json_list(batch.prompt_ids)
        return data(encode(chunk))

    def _chunk(self, index: int, text: str, end: End | None = None) -> TextCompletionChunk:
        """A chunk with one choice. Logprobs of text that is held back as a possible stop string wait."""
        held, shown, scored = self._held[index], self._shown[index], None
        ready = len(held) if self._ends[index] else bisect_right(held, shown, key=itemgetter(2))
        if ready:
            scored = completion_logprobs(held[:ready], self._token_bytes, shown)
            del held[:ready]
        choice = CompletionChunkChoice(index=index, text=text, logprobs=scored)
        self._extended(choice, end)
        return self._with([choice], self._usage)

    def _with(
        self, choices: list[CompletionChunkChoice], usage: CompletionUsage | UnsetType | None
    ) -> TextCompletionChunk:
        return TextCompletionChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _usage_chunk(self, usage: CompletionUsage) -> bytes:
        return data(encode(self._with([], usage)))
