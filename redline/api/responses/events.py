"""Responses of OpenAI's Responses API: whole, or as a stream of numbered events; and their dialect.

A response is a list of items: reasoning, a message, calls. In a stream each item is added, extended and completed
before the next one is added. A call's `call_id` is the model's own, so that the model recognises it in its history.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from redline.api.auth.quota import CALLER
from redline.api.config import Limits
from redline.api.dialect import Dialect, Reply
from redline.api.errors import tell
from redline.api.gateway.generation import ChoiceDelta
from redline.api.openai.answers import Choice
from redline.api.openai.dialects import openai_error
from redline.api.paging import page_limit
from redline.api.responses.requests import REASONING, ResponsesRequest, behind, namespaces_of, read_responses, resolved
from redline.api.responses.sealed import seal
from redline.api.responses.store import ResponseStore
from redline.chat.conversation import Message, ToolCall
from redline.chat.events import CallArguments, CallBegin, End, Logprobs, Text, Thought
from redline.errors import RequestError

Json = dict[str, Any]
Namespaces = Mapping[str, tuple[str, str]]

_json = msgspec.json.Encoder().encode


class _Body:
    """Builds the response object of one answer."""

    def __init__(self, reply: Reply[ResponsesRequest], store: bool) -> None:
        """store: the value of the response's `store` field."""
        self.id = _id("resp")
        asked, sampling = reply.asked, reply.asked.ask.sampling
        self._same: Json = {
            "id": self.id,
            "object": "response",
            "created_at": reply.created,
            "model": reply.model,
            "background": False,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "parallel_tool_calls": asked.parallel,
            "previous_response_id": asked.previous,
            "reasoning": {"effort": asked.effort, "summary": asked.summary},
            "store": store,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "text": {"format": msgspec.Raw(asked.format)},
            "tool_choice": msgspec.Raw(asked.tool_choice),
            "tools": msgspec.Raw(asked.tools),
            "truncation": "disabled",
        }

    def now(self, status: str, output: list[Json], end: End | None = None, error: Json | None = None) -> Json:
        """The object with these items."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = None if end is None else _usage(end)
        more = {"status": status, "error": error, "incomplete_details": cut, "output": output, "usage": usage}
        return {**self._same, **more}

    def ended(self, end: End, output: list[Json]) -> Json:
        """The object of an answer that has ended."""
        return self.now("incomplete" if end.finish == "length" else "completed", output, end)


class _Kept(msgspec.Struct):
    id: str
    output: list[msgspec.Raw]


class _KeptItem(msgspec.Struct):
    id: str


_item_of = msgspec.json.Decoder(_KeptItem).decode


async def _keep(store: ResponseStore | None, asked: ResponsesRequest, body: bytes, turn: Message) -> bytes:
    """Store the response object of an ended answer, if the client asked for that. turn: the assistant's message.
    Returns the object to send, with `store: false` if it could not be stored."""
    if store is None or not asked.stores:
        return body
    kept = msgspec.json.decode(body, type=_Kept)
    items = {_item_of(item).id: bytes(item) for item in kept.output}
    if await store.keep(kept.id, asked.owner, body, (*asked.said, turn), items):
        return body
    return _json({**msgspec.json.decode(body, type=dict[str, msgspec.Raw]), "store": False})


def _usage(end: End) -> Json:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }


def _reasoning(id: str, text: str, status: str, sealed: bool, summarised: bool) -> Json:
    """summarised: the text is returned as the summary, for clients that do not display the content."""
    kind, place = ("summary_text", "summary") if summarised else ("reasoning_text", "content")
    item: Json = {"id": id, "type": "reasoning", "summary": [], "status": status, "content": []}
    if text:
        item[place] = [{"type": kind, "text": text}]
    return {**item, "encrypted_content": seal(text)} if sealed and text else item


def _output_text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _said(id: str, text: str, status: str) -> Json:
    content = [_output_text(text)] if text else []
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def _called(id: str, call: CallBegin, arguments: str, status: str, namespaces: Namespaces) -> Json:
    item: Json = {"id": id, "type": "function_call", "call_id": call.id, **_named(call.name, namespaces)}
    return {**item, "arguments": arguments, "status": status}


def _named(name: str, namespaces: Namespaces) -> Json:
    """The fields that name a function: a function of a namespace is declared under another name
    (`responses._Declared`)."""
    if (of := namespaces.get(name)) is None:
        return {"name": name}
    return {"name": of[1], "namespace": of[0]}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class ResponseStream:
    """The stream of one response."""

    def __init__(self, reply: Reply[ResponsesRequest], store: ResponseStore | None) -> None:
        self._asked, self._store = reply.asked, store
        self._body = _Body(reply, store is not None and reply.asked.stores)
        self._end: End | None = None
        self._sealed, self._summarised = reply.asked.sealed, reply.asked.summarised
        self._number = 0  # of the next event
        self._output: list[Json] = []  # completed items
        self._choice = Choice()
        self._kind = ""  # of the open item; empty: none is open
        self._id = ""  # of the open item
        self._call: CallBegin | None = None  # the open item, if it is a call
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._head = b""  # encoded prefix of the open item's delta events

    def open(self) -> bytes:
        """response.created and response.in_progress."""
        return b"".join(self._response(kind, "in_progress") for kind in ("created", "in_progress"))

    def write(self, batches: Sequence[ChoiceDelta]) -> bytes:
        """The events of these batches, without the final one, which `close` returns."""
        out: list[bytes] = []
        for batch in batches:
            self._choice.add(batch)
            for event in batch.events:
                match event:
                    case Text(text=text):
                        if self._kind != "message":
                            self._open_text(out)
                        out.append(self._piece(text))
                    case Thought(text=text):
                        if self._kind != "reasoning":
                            self._open_reasoning(out)
                        out.append(self._piece(text))
                    case CallBegin():
                        self._open_call(event, out)
                    case CallArguments(text=text):
                        out.append(self._piece(text))
                    case Logprobs():
                        pass  # logprobs are rejected in requests
                    case End():
                        self._done(out, "incomplete" if event.finish == "length" else "completed")
                        self._end = event
        return b"".join(out)

    def keepalive(self) -> bytes:
        """A `keepalive` event, which OpenAI sends too."""
        return self._event("keepalive", {})

    async def close(self) -> bytes:
        """The final event, response.completed or response.incomplete, once the response is stored."""
        assert self._end is not None
        body = self._body.ended(self._end, self._output)
        told = await _keep(self._store, self._asked, _json(body), _turn(self._choice))
        return self._event(f"response.{body['status']}", {"response": msgspec.Raw(told)})

    def fail(self, error: Exception) -> bytes:
        """response.failed as the final event."""
        told = tell(error)
        failure = {"code": told.code or "server_error", "message": told.message}
        return self._event("response.failed", {"response": self._body.now("failed", self._output, error=failure)})

    def _response(self, kind: str, status: str) -> bytes:
        return self._event(f"response.{kind}", {"response": self._body.now(status, [])})

    def _event(self, name: str, fields: Json) -> bytes:
        number, self._number = self._number, self._number + 1
        return b"event: %b\ndata: %b\n\n" % (
            name.encode(),
            _json({"type": name, "sequence_number": number, **fields}),
        )

    def _of_item(self, name: str, fields: Json) -> bytes:
        return self._event(name, {"output_index": len(self._output), "item_id": self._id, **fields})

    def _piece(self, text: str) -> bytes:
        """A delta event; all of it but its number and the text was encoded when the item was added."""
        self._pieces.append(text)
        number, self._number = self._number, self._number + 1
        return b'%b,"sequence_number":%d,"delta":%b}\n\n' % (self._head, number, _json(text))

    def _open(self, kind: str, prefix: str, item: Json, delta: str, fields: Json, out: list[bytes]) -> None:
        """Complete the open item, and add another one, whose pieces are sent as `delta` events with these fields."""
        self._done(out, "completed")
        self._kind, self._id = kind, _id(prefix)
        added = {"output_index": len(self._output), "item": {**item, "id": self._id}}
        out.append(self._event("response.output_item.added", added))
        place = {"type": delta, "output_index": len(self._output), "item_id": self._id, **fields}
        self._head = b"event: %b\ndata: %b" % (delta.encode(), _json(place)[:-1])

    def _open_reasoning(self, out: list[bytes]) -> None:
        item = _reasoning("", "", "in_progress", sealed=False, summarised=self._summarised)
        if self._summarised:
            self._open("reasoning", REASONING, item, "response.reasoning_summary_text.delta", {"summary_index": 0}, out)
            part = {"type": "summary_text", "text": ""}
            out.append(self._of_item("response.reasoning_summary_part.added", {"summary_index": 0, "part": part}))
            return
        self._open("reasoning", REASONING, item, "response.reasoning_text.delta", {"content_index": 0}, out)
        part = {"type": "reasoning_text", "text": ""}
        out.append(self._of_item("response.content_part.added", {"content_index": 0, "part": part}))

    def _open_text(self, out: list[bytes]) -> None:
        fields: Json = {"content_index": 0, "logprobs": []}
        self._open("message", "msg", _said("", "", "in_progress"), "response.output_text.delta", fields, out)
        out.append(self._of_item("response.content_part.added", {"content_index": 0, "part": _output_text("")}))

    def _open_call(self, call: CallBegin, out: list[bytes]) -> None:
        item = _called("", call, "", "in_progress", self._asked.namespaces)
        self._open("function_call", "fc", item, "response.function_call_arguments.delta", {}, out)
        self._call = call

    def _done(self, out: list[bytes], status: str) -> None:
        """Complete the open item, if there is one."""
        text = "".join(self._pieces)
        self._pieces.clear()
        match self._kind:
            case "reasoning" if self._summarised:
                item = _reasoning(self._id, text, status, self._sealed, summarised=True)
                fields: Json = {"summary_index": 0, "text": text}
                out.append(self._of_item("response.reasoning_summary_text.done", fields))
                part = {"type": "summary_text", "text": text}
                out.append(self._of_item("response.reasoning_summary_part.done", {"summary_index": 0, "part": part}))
            case "reasoning":
                item = _reasoning(self._id, text, status, self._sealed, summarised=False)
                out.append(self._of_item("response.reasoning_text.done", {"content_index": 0, "text": text}))
                part = {"type": "reasoning_text", "text": text}
                out.append(self._of_item("response.content_part.done", {"content_index": 0, "part": part}))
            case "message":
                item = _said(self._id, text, status)
                fields = {"content_index": 0, "text": text, "logprobs": []}
                out.append(self._of_item("response.output_text.done", fields))
                part = {"content_index": 0, "part": _output_text(text)}
                out.append(self._of_item("response.content_part.done", part))
            case "function_call":
                assert self._call is not None
                item = _called(self._id, self._call, text, status, self._asked.namespaces)
                fields = {"name": item["name"], "arguments": text}
                out.append(self._of_item("response.function_call_arguments.done", fields))
            case _:
                return
        self._kind = ""
        out.append(self._event("response.output_item.done", {"output_index": len(self._output), "item": item}))
        self._output.append(item)


def _turn(choice: Choice) -> Message:
    """The assistant's message, for the next request."""
    calls = [ToolCall(id=call.id, name=call.name, arguments="".join(pieces)) for call, pieces in choice.calls]
    return Message(
        role="assistant", content="".join(choice.text), reasoning="".join(choice.thought), tool_calls=tuple(calls)
    )


def response_answer(reply: Reply[ResponsesRequest], choices: Sequence[Choice], stores: bool) -> bytes:
    """The body of a whole response. If it was cut off, its last item is incomplete. stores: whether responses are
    stored if requested."""
    [choice] = choices
    output: list[Json] = []
    if thought := "".join(choice.thought):
        asked = reply.asked
        output.append(_reasoning(_id(REASONING), thought, "completed", asked.sealed, asked.summarised))
    if text := "".join(choice.text):
        output.append(_said(_id("msg"), text, "completed"))
    for call, pieces in choice.calls:
        output.append(_called(_id("fc"), call, "".join(pieces), "completed", reply.asked.namespaces))
    end = choice.ended()
    if end.finish == "length" and output:
        output[-1]["status"] = "incomplete"
    return _json(_Body(reply, stores and reply.asked.stores).ended(end, output))


def responses(store: ResponseStore | None, limits: Limits) -> Dialect[ResponsesRequest]:
    """The Responses dialect. store: where responses are stored; None: nowhere, so responses have `store: false`."""

    async def recall(asked: ResponsesRequest) -> ResponsesRequest:
        asked = msgspec.structs.replace(asked, owner=owner())
        if asked.references:
            kept = (
                {}
                if store is None
                else await store.items(dict.fromkeys(asked.references), asked.owner, limits.body_bytes)
            )
            asked = await asyncio.to_thread(resolved, asked, kept, limits)
        if asked.previous is None:
            return asked
        if store is None:
            raise RequestError("this server stores no responses: send the whole conversation", "previous_response_id")
        return behind(asked, await store.messages(asked.previous, asked.owner), limits)

    return Dialect(
        read=read_responses,
        stream=lambda reply: ResponseStream(reply, store),
        answer=lambda reply, choices: response_answer(reply, choices, store is not None),
        error=openai_error,
        recall=recall,
        keep=lambda reply, choices, body: _keep(store, reply.asked, body, _turn(choices[0])),
    )


class KeptResponses:
    """The routes of stored responses."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def read(self, request: Request) -> Response:
        """GET: the response as it was sent."""
        body = await self._store.body(request.path_params["id"], owner())
        return Response(body, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """GET: the input items of the response, one page of them."""
        id, query = request.path_params["id"], request.query_params
        limit, order, after = page_limit(query.get("limit"), 100, 20), query.get("order", "desc"), query.get("after")
        if order not in ("asc", "desc"):
            raise RequestError(f"order is {order[:64]!r}; expected asc or desc", "order")
        body, messages = await self._store.body(id, owner()), await self._store.messages(id, owner())
        page = await asyncio.to_thread(_page, id, body, messages[:-1], limit, order == "desc", after)
        return Response(page, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """DELETE: delete the response."""
        id = request.path_params["id"]
        await self._store.delete(id, owner())
        return Response(_json({"id": id, "object": "response", "deleted": True}), media_type="application/json")


class _Said(msgspec.Struct):
    tools: msgspec.Raw


def _page(
    id: str, body: bytes, messages: Sequence[Message], limit: int, newest_first: bool, after: str | None
) -> bytes:
    """The items of these messages, after the one with id `after`. Raises RequestError if there is no such item."""
    items: list[Json] = []
    namespaces = namespaces_of(msgspec.json.decode(body, type=_Said).tools)

    def add(prefix: str, kind: str, **fields: Any) -> None:
        items.append({"id": f"{prefix}_{id.removeprefix('resp_')}_{len(items)}", "type": kind, **fields})

    for message in messages:
        if message.role == "tool":
            add("fco", "function_call_output", call_id=message.tool_call_id, output=message.content, status="completed")
            continue
        if message.reasoning:
            add(REASONING, "reasoning", summary=[], content=[{"type": "reasoning_text", "text": message.reasoning}])
        if message.content or not (message.reasoning or message.tool_calls):
            said = message.role == "assistant"
            part = _output_text(message.content) if said else {"type": "input_text", "text": message.content}
            add("msg", "message", role=message.role, content=[part], status="completed")
        for call in message.tool_calls:
            named = _named(call.name, namespaces)
            add("fc", "function_call", call_id=call.id, **named, arguments=call.arguments, status="completed")
    if newest_first:
        items.reverse()
    if after is not None:
        place = next((place for place, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise RequestError(f"after is {after[:64]!r}, which is not an input item of this response", "after")
        items = items[place + 1 :]
    shown = items[:limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    more = {"first_id": first, "last_id": last, "has_more": len(items) > limit}
    return _json({"object": "list", "data": shown, **more})


def count_input(tokens: int) -> bytes:
    """The body of a response to /v1/responses/input_tokens."""
    return _json({"object": "response.input_tokens", "input_tokens": tokens})


def owner() -> str:
    """The owner of the responses that the current request may access: the name of its key; empty without keys."""
    account = CALLER.get().account
    return "" if account is None else account.name
