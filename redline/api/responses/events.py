"""Responses of OpenAI's Responses API: whole, or as a stream of numbered events; and their dialect.

A response is a list of items: reasoning, a message, calls. In a stream each item is added, extended and completed
before the next one is added. A call's `call_id` is the model's own, so that the model recognises it in its history.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from redline.api.auth.quota import CALLER
from redline.api.body import MARK, around, encode
from redline.api.config import Limits
from redline.api.dialect import Dialect, Reply
from redline.api.errors import tell
from redline.api.gateway.generation import ChoiceDelta
from redline.api.openai.answers import ChoiceOutput
from redline.api.openai.dialects import openai_error
from redline.api.paging import page_limit
from redline.api.responses.protocol import (
    ArgumentsDelta,
    ArgumentsDone,
    DeletedResponse,
    FunctionCallItem,
    FunctionOutputItem,
    IncompleteDetails,
    InputItem,
    InputItemPage,
    InputMessageItem,
    InputText,
    InputTokensDetails,
    InputTokensResponse,
    ItemAdded,
    ItemDone,
    ItemStatus,
    Keepalive,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    PieceEvent,
    ReasoningItem,
    ReasoningOptions,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    ReasoningTokensDetails,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponseUsage,
    SummaryPartAdded,
    SummaryPartDone,
    SummaryText,
    SummaryTextDelta,
    SummaryTextDone,
    TextOptions,
)
from redline.api.responses.requests import REASONING, ResponsesRequest, behind, namespaces_of, read_responses, resolved
from redline.api.responses.sealed import seal
from redline.api.responses.store import ResponseStore
from redline.chat.conversation import Message, ToolCall
from redline.chat.events import CallArguments, CallBegin, End, Logprobs, Text, Thought
from redline.errors import RequestError

Namespaces = Mapping[str, tuple[str, str]]


def _begun(reply: Reply[ResponsesRequest], store: bool) -> ResponseObject:
    """The response object of an answer that has begun. store: its `store` field."""
    asked, sampling = reply.asked, reply.asked.ask.sampling
    return ResponseObject(
        id=_id("resp"),
        created_at=reply.created,
        model=reply.model,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        metadata=asked.metadata,
        parallel_tool_calls=asked.parallel,
        previous_response_id=asked.previous,
        reasoning=ReasoningOptions(asked.effort, asked.summary),
        store=store,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        text=TextOptions(msgspec.Raw(asked.format)),
        tool_choice=msgspec.Raw(asked.tool_choice),
        tools=msgspec.Raw(asked.tools),
    )


def _ended(body: ResponseObject, end: End, output: list[OutputItem]) -> ResponseObject:
    """The object of an answer that has ended."""
    cut = end.finish == "length"
    return msgspec.structs.replace(
        body,
        status="incomplete" if cut else "completed",
        incomplete_details=IncompleteDetails() if cut else None,
        output=output,
        usage=_usage(end),
    )


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
    return encode({**msgspec.json.decode(body, type=dict[str, msgspec.Raw]), "store": False})


def _usage(end: End) -> ResponseUsage:
    return ResponseUsage(
        end.prompt_tokens,
        InputTokensDetails(end.cached_tokens, cache_write_tokens=0),
        end.completion_tokens,
        ReasoningTokensDetails(end.reasoning_tokens),
        end.prompt_tokens + end.completion_tokens,
    )


def _reasoning(id: str, text: str, status: ItemStatus, sealed: bool, summarised: bool) -> ReasoningItem:
    """summarised: the text is returned as the summary, for clients that do not display the content."""
    item = ReasoningItem(id=id, status=status)
    if text and summarised:
        item.summary = [SummaryText(text)]
    elif text:
        item.content = [ReasoningText(text)]
    if text and sealed:
        item.encrypted_content = seal(text)
    return item


def _said(id: str, text: str, status: ItemStatus) -> MessageItem:
    return MessageItem(id=id, status=status, content=[OutputText(text=text)] if text else [])


def _called(
    id: str, call: CallBegin | ToolCall, arguments: str, status: ItemStatus, namespaces: Namespaces
) -> FunctionCallItem:
    """A function of a namespace is declared to the model under another name (`requests._Declared`)."""
    namespace, name = namespaces.get(call.name, (UNSET, call.name))
    return FunctionCallItem(id=id, call_id=call.id, name=name, namespace=namespace, arguments=arguments, status=status)


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class ResponseStream:
    """The stream of one response."""

    def __init__(self, reply: Reply[ResponsesRequest], store: ResponseStore | None) -> None:
        self._asked, self._store = reply.asked, store
        self._body = _begun(reply, store is not None and reply.asked.stores)
        self._end: End | None = None
        self._sealed, self._summarised = reply.asked.sealed, reply.asked.summarised
        self._number = 0  # of the next event
        self._output: list[OutputItem] = []  # completed items
        self._choice = ChoiceOutput()
        self._kind = ""  # of the open item; empty: none is open
        self._id = ""  # of the open item
        self._call: CallBegin | None = None  # the open item, if it is a call
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._around: list[bytes] = []  # a delta event of the open item, around its number and its text

    def open(self) -> bytes:
        """response.created and response.in_progress."""
        return self._event(ResponseCreated(0, self._body)) + self._event(ResponseInProgress(1, self._body))

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
        return self._event(Keepalive(self._number))

    async def close(self) -> bytes:
        """The final event, response.completed or response.incomplete, once the response is stored."""
        assert self._end is not None
        body = _ended(self._body, self._end, self._output)
        told = await _keep(self._store, self._asked, encode(body), _turn(self._choice))
        kind = ResponseIncomplete if body.status == "incomplete" else ResponseCompleted
        return self._event(kind(self._number, cast("ResponseObject", msgspec.Raw(told))))

    def fail(self, error: Exception) -> bytes:
        """response.failed as the final event."""
        told = tell(error)
        failure = ResponseFailure(told.code or "server_error", told.message)
        body = msgspec.structs.replace(self._body, status="failed", error=failure, output=self._output)
        return self._event(ResponseFailed(self._number, body))

    def _event(self, event: ResponseEvent) -> bytes:
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (_name(event), encode(event))

    @property
    def _place(self) -> tuple[int, int, str]:
        """The first fields of the next event of the open item."""
        return self._number, len(self._output), self._id

    def _piece(self, text: str) -> bytes:
        """A delta event; all of it but its number and the text was encoded when the item was added."""
        self._pieces.append(text)
        number, self._number = self._number, self._number + 1
        head, between, tail = self._around
        return b"%b%d%b%b%b" % (head, number, between, encode(text), tail)

    def _open(self, kind: str, item: OutputItem, delta: type[PieceEvent], out: list[bytes]) -> None:
        """Add an item, whose pieces are sent as `delta` events."""
        self._kind, self._id = kind, item.id
        out.append(self._event(ItemAdded(self._number, len(self._output), item)))
        event = delta(output_index=len(self._output), item_id=self._id, sequence_number=MARK, delta=MARK)
        head, between, tail = around(event)
        self._around = [b"event: %b\ndata: %b" % (_name(event), head), between, tail + b"\n\n"]

    def _open_reasoning(self, out: list[bytes]) -> None:
        self._done(out, "completed")
        item = _reasoning(_id(REASONING), "", "in_progress", sealed=False, summarised=self._summarised)
        if self._summarised:
            self._open("reasoning", item, SummaryTextDelta, out)
            out.append(self._event(SummaryPartAdded(*self._place, 0, SummaryText(""))))
            return
        self._open("reasoning", item, ReasoningTextDelta, out)
        out.append(self._event(PartAdded(*self._place, 0, ReasoningText(""))))

    def _open_text(self, out: list[bytes]) -> None:
        self._done(out, "completed")
        self._open("message", _said(_id("msg"), "", "in_progress"), OutputTextDelta, out)
        out.append(self._event(PartAdded(*self._place, 0, OutputText(text=""))))

    def _open_call(self, call: CallBegin, out: list[bytes]) -> None:
        self._done(out, "completed")
        item = _called(_id("fc"), call, "", "in_progress", self._asked.namespaces)
        self._open("function_call", item, ArgumentsDelta, out)
        self._call = call

    def _done(self, out: list[bytes], status: ItemStatus) -> None:
        """Complete the open item, if there is one."""
        text = "".join(self._pieces)
        self._pieces.clear()
        match self._kind:
            case "reasoning":
                item = _reasoning(self._id, text, status, self._sealed, self._summarised)
                if self._summarised:
                    out.append(self._event(SummaryTextDone(*self._place, 0, text)))
                    out.append(self._event(SummaryPartDone(*self._place, 0, SummaryText(text))))
                else:
                    out.append(self._event(ReasoningTextDone(*self._place, 0, text)))
                    out.append(self._event(PartDone(*self._place, 0, ReasoningText(text))))
            case "message":
                item = _said(self._id, text, status)
                out.append(self._event(OutputTextDone(*self._place, 0, text, [])))
                out.append(self._event(PartDone(*self._place, 0, OutputText(text=text))))
            case "function_call":
                assert self._call is not None
                item = _called(self._id, self._call, text, status, self._asked.namespaces)
                out.append(self._event(ArgumentsDone(*self._place, item.name, text)))
            case _:
                return
        self._kind = ""
        out.append(self._event(ItemDone(self._number, len(self._output), item)))
        self._output.append(item)


def _name(event: ResponseEvent) -> bytes:
    return str(event.__struct_config__.tag).encode()


def _turn(choice: ChoiceOutput) -> Message:
    """The assistant's message, for the next request."""
    calls = [ToolCall(id=call.id, name=call.name, arguments="".join(pieces)) for call, pieces in choice.calls]
    return Message(
        role="assistant", content="".join(choice.text), reasoning="".join(choice.thought), tool_calls=tuple(calls)
    )


def response_answer(reply: Reply[ResponsesRequest], choices: Sequence[ChoiceOutput], stores: bool) -> bytes:
    """The body of a whole response. If it was cut off, its last item is incomplete. stores: whether responses are
    stored if requested."""
    [choice] = choices
    output: list[OutputItem] = []
    if thought := "".join(choice.thought):
        asked = reply.asked
        output.append(_reasoning(_id(REASONING), thought, "completed", asked.sealed, asked.summarised))
    if text := "".join(choice.text):
        output.append(_said(_id("msg"), text, "completed"))
    for call, pieces in choice.calls:
        output.append(_called(_id("fc"), call, "".join(pieces), "completed", reply.asked.namespaces))
    end = choice.ended()
    if end.finish == "length" and output:
        output[-1].status = "incomplete"
    return encode(_ended(_begun(reply, stores and reply.asked.stores), end, output))


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
        return Response(encode(DeletedResponse(id=id)), media_type="application/json")


class _Said(msgspec.Struct):
    tools: msgspec.Raw


def _page(
    id: str, body: bytes, messages: Sequence[Message], limit: int, newest_first: bool, after: str | None
) -> bytes:
    """The items of these messages, after the one with id `after`. Raises RequestError if there is no such item."""
    items: list[InputItem] = []
    namespaces = namespaces_of(msgspec.json.decode(body, type=_Said).tools)

    def next_id(prefix: str) -> str:
        return f"{prefix}_{id.removeprefix('resp_')}_{len(items)}"

    for message in messages:
        if message.role == "tool":
            items.append(FunctionOutputItem(id=next_id("fco"), call_id=message.tool_call_id, output=message.content))
            continue
        if message.reasoning:
            items.append(ReasoningItem(id=next_id(REASONING), content=[ReasoningText(message.reasoning)]))
        if message.content or not (message.reasoning or message.tool_calls):
            said = message.role == "assistant"
            part = OutputText(text=message.content) if said else InputText(message.content)
            items.append(InputMessageItem(id=next_id("msg"), role=message.role, content=[part]))
        for call in message.tool_calls:
            items.append(_called(next_id("fc"), call, call.arguments, "completed", namespaces))
    if newest_first:
        items.reverse()
    if after is not None:
        place = next((place for place, item in enumerate(items) if item.id == after), None)
        if place is None:
            raise RequestError(f"after is {after[:64]!r}, which is not an input item of this response", "after")
        items = items[place + 1 :]
    shown = items[:limit]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return encode(InputItemPage(data=shown, first_id=first, last_id=last, has_more=len(items) > limit))


def count_input(tokens: int) -> bytes:
    """The body of a response to /v1/responses/input_tokens."""
    return encode(InputTokensResponse(input_tokens=tokens))


def owner() -> str:
    """The owner of the responses that the current request may access: the name of its key; empty without keys."""
    account = CALLER.get().account
    return "" if account is None else account.name
