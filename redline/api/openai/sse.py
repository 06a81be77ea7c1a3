"""Responses as server-sent events, in OpenAI's chunk formats.

Each delta of the engine becomes a chunk (or one chunk per event, if it has several), so that clients can time tokens;
deltas that arrived together are sent in one write. Nearly every chunk is a piece of text, so everything but the text is
encoded once per choice.
"""

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec

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
    finish_of,
    json_list,
    usage,
    usage_of,
    vllm_prompt_logprobs,
)
from redline.chat.events import CallArguments, CallBegin, End, Logprobs, Text, Thought
from redline.messages.step import Proposer

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"  # a comment

_json = msgspec.json.Encoder().encode


def data(body: bytes) -> bytes:
    """One server-sent event around a JSON body."""
    return b"data: " + body + b"\n\n"


class _ChunkWriter:
    """Shared by both streams: the chunk envelope, usage, and the token count of each choice."""

    def __init__(self, id: str, object: str, created: int, model: str, prompts: Sequence[int], n: int, how: Streaming):
        envelope = {"id": id, "object": object, "created": created, "model": model}
        self._head = b"data: " + _json(envelope)[:-1] + b',"choices":'
        self._how = how
        self._n = n
        self._prompts = prompts  # lengths, in tokens
        self._completion = [0] * (len(prompts) * n)
        self._ends: list[End | None] = [None] * (len(prompts) * n)
        # With include_usage every chunk but the last has usage null; with continuous_usage_stats, the counts so far.
        self._tail = b',"usage":null}\n\n' if how.usage else b"}\n\n"

    def _chunk(self, choice: int, rest: bytes) -> bytes:
        """A chunk with one choice. rest: the choice's fields after its index, as JSON text."""
        return b'%b[{"index":%d,%b}]%b' % (self._head, choice, rest, self._usage_tail())

    def _usage_tail(self) -> bytes:
        if not self._how.continuous:
            return self._tail
        return b',"usage":' + _json(usage(sum(self._prompts), sum(self._completion))) + b"}\n\n"

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
        ends = [end for end in self._ends if end is not None]
        return b'%b[],"usage":%b}\n\n%b' % (self._head, _json(usage_of(ends, self._n)), DONE)


class ChatStream(_ChunkWriter):
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
        super().__init__(id, "chat.completion.chunk", created, model, prompts, n, how)
        self._logprobs = logprobs
        self._token_bytes = token_bytes
        self._held: list[list[Scored]] = [[] for _ in self._ends]  # logprobs of text that has not been sent yet
        self._token_ids: list[Sequence[int] | None] = [None] * len(self._ends)  # for the next chunk
        self._proposer: Proposer | None = None  # of the current batch
        self._elapsed_ms = 0.0  # from the request's start until the current batch's tokens arrived
        self._plain = not (logprobs or how.continuous or how.proposers)
        self._after = b'},"logprobs":null,"finish_reason":null}]' + self._tail
        self._text = [b'%b[{"index":%d,"delta":{"content":' % (self._head, index) for index in range(len(self._ends))]
        self._as_thought = b'"delta":{"%b":' % reasoning_field.encode()
        self._thought = [
            b'%b[{"index":%d,%b' % (self._head, index, self._as_thought) for index in range(len(self._ends))
        ]

    def write(self, batches: Sequence[ChoiceDelta]) -> bytes:
        """The chunks of these batches, in order; logprobs are sent with the next chunk of their choice."""
        chunks: list[bytes] = []
        for batch in batches:
            choice, events = batch.choice, batch.events
            self._completion[choice] = batch.completion_tokens
            self._proposer, self._elapsed_ms = batch.proposer, batch.elapsed_ms
            if batch.first:
                chunks.append(self._open(batch))
            if batch.token_ids is not None:
                self._token_ids[choice] = [*(self._token_ids[choice] or ()), *batch.token_ids]
            elif self._plain and not batch.first and len(events) == 1 and isinstance(event := events[0], Text):
                chunks.append(self._text[choice] + _json(event.text) + self._after)  # nearly every chunk is such a one
                continue
            if self._logprobs:
                self._held[choice] += [item for event in events if isinstance(event, Logprobs) for item in event.items]
            for event in events:
                match event:
                    case Text(text=text):
                        chunks.append(self._piece(choice, self._text[choice], b'"delta":{"content":', _json(text)))
                    case Thought(text=text):
                        chunks.append(self._piece(choice, self._thought[choice], self._as_thought, _json(text)))
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

    def _open(self, batch: ChoiceDelta) -> bytes:
        """The chunk with the role, before a choice's first event."""
        chunk = self._delta(batch.choice, {"role": "assistant", "content": ""})
        extra: dict[str, Any] = {}
        if batch.prompt_logprobs is not None:
            extra["prompt_logprobs"] = vllm_prompt_logprobs(batch.prompt_logprobs, self._token_bytes)
        if batch.prompt_ids is not None:
            extra["prompt_token_ids"] = json_list(batch.prompt_ids)
        if not extra:
            return chunk
        head = self._head.removesuffix(b'"choices":') + _json(extra)[1:-1] + b',"choices":'
        return head + chunk.removeprefix(self._head)

    def _piece(self, choice: int, plain: bytes, opening: bytes, text: bytes) -> bytes:
        if self._plain and self._token_ids[choice] is None:
            return plain + text + self._after
        return self._chunk(choice, opening + text + b"}," + self._rest(choice, {"finish_reason": None}))

    def _delta(self, choice: int, delta: dict[str, Any], finish: dict[str, Any] | None = None) -> bytes:
        rest = self._rest(choice, finish or {"finish_reason": None})
        return self._chunk(choice, b'"delta":' + _json(delta) + b"," + rest)

    def _rest(self, choice: int, finish: dict[str, Any]) -> bytes:
        """The fields after the delta, with the held logprobs, if any."""
        held, self._held[choice] = self._held[choice], []
        scored = chat_logprobs(held, self._token_bytes) if held else None
        ids, self._token_ids[choice] = self._token_ids[choice], None
        told: dict[str, Any] = {} if ids is None else {"token_ids": ids}
        if self._proposer is not None:
            told |= {"proposer": self._proposer, "elapsed_ms": self._elapsed_ms}
        return _json({"logprobs": scored, **finish, **told})[1:-1]


class CompletionStream(_ChunkWriter):
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
        super().__init__(id, "text_completion", created, model, [len(prompt) for prompt in prompts], n, how)
        self._ids = prompts
        self._logprobs = logprobs
        self._echo = echo
        self._token_bytes = token_bytes
        self._held: list[list[Placed]] = [[] for _ in self._ends]
        self._token_ids: list[Sequence[int] | None] = [None] * len(self._ends)  # for the next chunk
        self._proposer: Proposer | None = None  # of the current batch
        self._elapsed_ms = 0.0  # from the request's start until the current batch's tokens arrived
        self._offsets = [Offsets(hidden) for _ in self._ends]
        self._shown = [0] * len(self._ends)  # characters sent
        self._plain = not (logprobs or how.continuous or how.proposers)
        self._after = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._text = [b'%b[{"index":%d,"text":' % (self._head, index) for index in range(len(self._ends))]

    def write(self, batches: Sequence[ChoiceDelta]) -> bytes:
        """The chunks of these batches, in order; logprobs are sent with the next chunk of their choice."""
        chunks: list[bytes] = []
        for batch in batches:
            choice, self._proposer, self._elapsed_ms = batch.choice, batch.proposer, batch.elapsed_ms
            self._completion[choice] = batch.completion_tokens
            if batch.first and (self._echo or batch.prompt_logprobs is not None or batch.prompt_ids is not None):
                chunks.append(self._open(batch))
            if batch.token_ids is not None:
                self._token_ids[choice] = [*(self._token_ids[choice] or ()), *batch.token_ids]
            if self._logprobs:
                scored = [item for event in batch.events if isinstance(event, Logprobs) for item in event.items]
                self._held[choice] += self._offsets[choice].of(scored)
            for event in batch.events:
                match event:
                    case Text(text=text) if self._plain and batch.token_ids is None:
                        chunks.append(self._text[choice] + _json(text) + self._after)
                    case Text(text=text):
                        self._shown[choice] += len(text)
                        rest = self._rest(choice, {"finish_reason": None})
                        chunks.append(self._chunk(choice, b'"text":' + _json(text) + b"," + rest))
                    case End():
                        self._ends[choice] = event
                        chunks.append(self._chunk(choice, b'"text":"",' + self._rest(choice, finish_of(event))))
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
        extra: dict[str, Any] = {"finish_reason": None}
        if scored is not None:
            extra["prompt_logprobs"] = vllm_prompt_logprobs(scored, self._token_bytes)
        if batch.prompt_ids is not None:
            extra["prompt_token_ids"] = json_list(batch.prompt_ids)
        return self._chunk(choice, b'"text":' + _json(opening.text) + b"," + self._rest(choice, extra))

    def _rest(self, choice: int, finish: dict[str, Any]) -> bytes:
        """The fields after the text. Logprobs of text that is held back as a possible stop string wait."""
        held, shown, scored = self._held[choice], self._shown[choice], None
        ready = len(held) if self._ends[choice] else bisect_right(held, shown, key=itemgetter(2))
        if ready:
            scored = completion_logprobs(held[:ready], self._token_bytes, shown)
            del held[:ready]
        ids, self._token_ids[choice] = self._token_ids[choice], None
        told: dict[str, Any] = {} if ids is None else {"token_ids": ids}
        if self._proposer is not None:
            told |= {"proposer": self._proposer, "elapsed_ms": self._elapsed_ms}
        return _json({"logprobs": scored, **finish, **told})[1:-1]
