"""Answers as server-sent events, in OpenAI's chunk shapes.

Each delta of the engine has a chunk of its own (a chunk for each event, where it has several), so that a client can
time tokens; deltas that arrived together leave in one write. Nearly every chunk is a piece of text, so all of it but
the text is encoded once per choice.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from redline.api.answers import (
    Opening,
    Scored,
    TokenBytes,
    chat_logprobs,
    completion_logprobs,
    finish_of,
    usage,
    usage_of,
    vllm_prompt_logprobs,
)
from redline.api.gateway import Batch
from redline.api.openai import Streaming
from redline.chat.events import CallArguments, CallBegin, End, Logprobs, Text, Thought
from redline.wire.step import TokenLogprobs

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


def data(body: bytes) -> bytes:
    """One server-sent event around a JSON body."""
    return b"data: " + body + b"\n\n"


class EventStream(Protocol):
    """Turns the batches of one answer into the bytes of its stream."""

    def write(self, batches: Sequence[Batch]) -> bytes:
        """The chunks of these batches, in their order, as server-sent events; empty where they show nothing."""
        ...

    def close(self) -> bytes:
        """What follows the last choice's end: a chunk with the usage, if asked for, and [DONE]."""
        ...


class _ChunkWriter:
    """What both kinds of stream share: the envelope, usage, and each choice's count."""

    def __init__(self, id: str, object: str, created: int, model: str, prompts: Sequence[int], n: int, how: Streaming):
        envelope = {"id": id, "object": object, "created": created, "model": model}
        self._head = b"data: " + _json(envelope)[:-1] + b',"choices":'
        self._how = how
        self._n = n
        self._prompts = prompts  # lengths, in tokens
        self._completion = [0] * (len(prompts) * n)
        self._ends: list[End | None] = [None] * (len(prompts) * n)
        # With include_usage every chunk but the last says null; with continuous_usage_stats, the counts so far.
        self._tail = b',"usage":null}\n\n' if how.usage else b"}\n\n"

    def _chunk(self, choice: int, rest: bytes) -> bytes:
        """A chunk with one choice: `rest` is the choice's members after its index, as JSON text."""
        return b'%b[{"index":%d,%b}]%b' % (self._head, choice, rest, self._usage_tail())

    def _usage_tail(self) -> bytes:
        if not self._how.continuous:
            return self._tail
        return b',"usage":' + _json(usage(sum(self._prompts), sum(self._completion))) + b"}\n\n"

    def close(self) -> bytes:
        """What follows the last choice's end: a chunk with the usage, if asked for, and [DONE]."""
        if not self._how.usage:
            return DONE
        ends = [end for end in self._ends if end is not None]
        return b'%b[],"usage":%b}\n\n%b' % (self._head, _json(usage_of(ends, self._n)), DONE)


class ChatStream(_ChunkWriter):
    """The stream of a chat completion.

    created: Unix seconds. prompts: lengths, in tokens. n: choices for each prompt. logprobs: whether they were asked
    for.
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
    ) -> None:
        super().__init__(id, "chat.completion.chunk", created, model, prompts, n, how)
        self._logprobs = logprobs
        self._token_bytes = token_bytes
        self._held: list[list[Scored]] = [[] for _ in self._ends]  # logprobs whose text has not left yet
        self._plain = not logprobs and not how.continuous
        self._after = b'},"logprobs":null,"finish_reason":null}]' + self._tail
        self._text = [b'%b[{"index":%d,"delta":{"content":' % (self._head, index) for index in range(len(self._ends))]
        self._thought = [
            b'%b[{"index":%d,"delta":{"reasoning":' % (self._head, index) for index in range(len(self._ends))
        ]

    def write(self, batches: Sequence[Batch]) -> bytes:
        """The chunks of these batches, in their order; log probabilities leave with the next chunk of their choice."""
        chunks: list[bytes] = []
        for batch in batches:
            choice, events = batch.choice, batch.events
            self._completion[choice] = batch.completion_tokens
            if batch.first:
                chunks.append(self._open(batch))
            elif self._plain and len(events) == 1 and isinstance(event := events[0], Text):  # nearly always
                chunks.append(self._text[choice] + _json(event.text) + self._after)
                continue
            if self._logprobs:
                self._held[choice] += [item for event in events if isinstance(event, Logprobs) for item in event.items]
            for event in events:
                match event:
                    case Text(text=text):
                        chunks.append(self._piece(choice, self._text[choice], b'"delta":{"content":', _json(text)))
                    case Thought(text=text):
                        piece = _json(text)
                        both = piece + b',"reasoning_content":' + piece
                        chunks.append(self._piece(choice, self._thought[choice], b'"delta":{"reasoning":', both))
                    case CallBegin(index=index, id=id, name=name):
                        function = {"name": name, "arguments": ""}
                        call = {"index": index, "id": id, "type": "function", "function": function}
                        chunks.append(self._delta(choice, {"tool_calls": [call]}))
                    case CallArguments(index=index, text=text):
                        call = {"index": index, "function": {"arguments": text}}
                        chunks.append(self._delta(choice, {"tool_calls": [call]}))
                    case Logprobs():
                        pass
                    case End():
                        self._ends[choice] = event
                        chunks.append(self._delta(choice, {}, finish_of(event)))
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _open(self, batch: Batch) -> bytes:
        """The chunk that names the role, before a choice's first event."""
        delta = {"role": "assistant", "content": ""}
        if batch.prompt_logprobs is None:
            return self._delta(batch.choice, delta)
        scored = _json(vllm_prompt_logprobs(batch.prompt_logprobs, self._token_bytes))
        head = self._head.replace(b',"choices":', b',"prompt_logprobs":%b,"choices":' % scored)
        return self._delta(batch.choice, delta).replace(self._head, head, 1)

    def _piece(self, choice: int, plain: bytes, opening: bytes, text: bytes) -> bytes:
        if self._plain:
            return plain + text + self._after
        return self._chunk(choice, opening + text + b"}," + self._rest(choice, {"finish_reason": None}))

    def _delta(self, choice: int, delta: dict[str, Any], finish: dict[str, Any] | None = None) -> bytes:
        rest = self._rest(choice, finish or {"finish_reason": None})
        return self._chunk(choice, b'"delta":' + _json(delta) + b"," + rest)

    def _rest(self, choice: int, finish: dict[str, Any]) -> bytes:
        """The members after the delta: the held logprobs, if any, leave with it."""
        held, self._held[choice] = self._held[choice], []
        scored = chat_logprobs(held, self._token_bytes) if held else None
        return _json({"logprobs": scored, **finish})[1:-1]


class CompletionStream(_ChunkWriter):
    """The stream of a text completion.

    created: Unix seconds. prompts: token ids. n: choices for each prompt. logprobs: whether they were asked for. echo:
    the prompt opens each choice's text.
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
    ) -> None:
        super().__init__(id, "text_completion", created, model, [len(prompt) for prompt in prompts], n, how)
        self._ids = prompts
        self._logprobs = logprobs
        self._echo = echo
        self._token_bytes = token_bytes
        self._held: list[list[tuple[TokenLogprobs | None, bytes]]] = [[] for _ in self._ends]
        self._offset = [0] * len(self._ends)  # characters that logprobs have covered
        self._plain = not logprobs and not how.continuous
        self._after = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._text = [b'%b[{"index":%d,"text":' % (self._head, index) for index in range(len(self._ends))]

    def write(self, batches: Sequence[Batch]) -> bytes:
        """The chunks of these batches, in their order; log probabilities leave with the next chunk of their choice."""
        chunks: list[bytes] = []
        for batch in batches:
            choice = batch.choice
            self._completion[choice] = batch.completion_tokens
            if batch.first and (self._echo or batch.prompt_logprobs is not None):
                chunks.append(self._open(batch))
            if self._logprobs:
                self._held[choice] += [
                    item for event in batch.events if isinstance(event, Logprobs) for item in event.items
                ]
            for event in batch.events:
                match event:
                    case Text(text=text) if self._plain:
                        chunks.append(self._text[choice] + _json(text) + self._after)
                    case Text(text=text):
                        rest = self._rest(choice, {"finish_reason": None})
                        chunks.append(self._chunk(choice, b'"text":' + _json(text) + b"," + rest))
                    case End():
                        self._ends[choice] = event
                        chunks.append(self._chunk(choice, b'"text":"",' + self._rest(choice, finish_of(event))))
                    case _:
                        pass  # raw text has no thoughts and no calls; logprobs are held above
        return b"".join(chunks)

    def _open(self, batch: Batch) -> bytes:
        """What stands before a choice's own text: the prompt and its logprobs, where asked for."""
        choice, scored = batch.choice, batch.prompt_logprobs
        opening = Opening(self._ids[choice // self._n], scored, self._echo, self._token_bytes)
        if self._logprobs:
            self._held[choice] += opening.scored
        extra: dict[str, Any] = {"finish_reason": None}
        if scored is not None:
            extra["prompt_logprobs"] = vllm_prompt_logprobs(scored, self._token_bytes)
        return self._chunk(choice, b'"text":' + _json(opening.text) + b"," + self._rest(choice, extra))

    def _rest(self, choice: int, finish: dict[str, Any]) -> bytes:
        held, self._held[choice] = self._held[choice], []
        scored = None
        if held:
            scored = completion_logprobs(held, self._token_bytes, self._offset[choice])
            self._offset[choice] += sum(map(len, scored["tokens"]))
        return _json({"logprobs": scored, **finish})[1:-1]
