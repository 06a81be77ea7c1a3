"""Requests with known answers, and the outcome of each.

Each is greedy or has a seed, so its answer is a function of the request: any server must give the answer of an
undisturbed one. Together they use every state of an answer: grammars, penalties, stop strings, log probabilities,
several choices, thinking and tool calls.
"""

import http.client
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from redline import clock

DEADLINE_S = 90.0  # of each request, sent to the server
TOPICS = ("a lighthouse", "prime numbers", "the tides", "a bicycle", "bread", "a chess game", "snow", "two friends")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 5},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "strict": True, "parameters": SCHEMA}}


@dataclass(frozen=True)
class Asked:
    """A request. leaves: chunks after which its client disconnects; None: it reads to the end."""

    name: str
    path: str
    body: dict[str, Any]
    leaves: int | None = None


@dataclass
class Answer:
    """The outcome of a request. choices: by index, everything that must be the same each time. Seconds since it was
    sent.
    """

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: str = ""
    status: int = 0
    first_s: float = 0.0
    gap_s: float = 0.0  # the longest between two of its chunks
    gap_at: float = 0.0  # when that gap began (time.monotonic)
    seconds: float = 0.0
    whole: bool = False  # the answer is complete

    def read(self, event: dict[str, Any]) -> None:
        """Add a chunk of a stream, or a whole answer."""
        for told in event.get("choices", ()):
            choice = self.choices.setdefault(told["index"], {})
            part = told.get("delta") or told.get("message") or {"content": told.get("text")}
            for key in ("reasoning", "reasoning_content", "content"):
                if part.get(key):
                    choice[key] = choice.get(key, "") + part[key]
            for number, call in enumerate(part.get("tool_calls") or ()):
                function = call["function"]
                calls = choice.setdefault("calls", {})
                of = calls.setdefault(str(call.get("index", number)), {"name": "", "arguments": ""})
                of["name"] += function.get("name") or ""
                of["arguments"] += function.get("arguments") or ""
            choice["ids"] = choice.get("ids", []) + list(told.get("token_ids") or ())
            if told.get("logprobs"):
                choice["logprobs"] = choice.get("logprobs", []) + [
                    (one["token"], round(one["logprob"], 4)) for one in told["logprobs"]["content"]
                ]
            if told.get("finish_reason"):
                choice["finish"] = told["finish_reason"]


def mix(seed: int, model: str, long_tokens: int, vocabulary: int) -> list[Asked]:
    """One of each kind, drawn with the seed. long_tokens: of the long prompts."""
    draw = random.Random(f"requests {seed}")
    asked: list[Asked] = []

    def add(kind: str, path: str, leaves: int | None = None, **body: Any) -> None:
        told = {"model": model, "return_token_ids": True, "timeout": DEADLINE_S, **body}
        asked.append(Asked(f"{kind} {seed}", path, told, leaves))

    def say(what: str = "Tell me about") -> list[dict[str, str]]:
        text = f"{what} {draw.choice(TOPICS)} and {draw.choice(TOPICS)}, {draw.randrange(1000)} words."
        return [{"role": "user", "content": text}]

    def ids(count: int) -> list[int]:
        return [draw.randrange(10, vocabulary) for _ in range(count)]

    chat, plain = "/v1/chat/completions", "/v1/completions"
    own: dict[str, Any] = {"temperature": 1.0, "seed": draw.randrange(1 << 30)}
    greedy: dict[str, Any] = {"temperature": 0}
    long: dict[str, Any] = {"ignore_eos": True, "stream": True}
    thinks: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}
    calls: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
    shape: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
    add("thinking", chat, messages=say(), max_tokens=300, stream=True, **greedy, **thinks)
    add("tools", chat, messages=say("Look up"), max_tokens=300, stream=True, **own, **calls)
    add("schema", chat, messages=say("Describe"), max_tokens=250, response_format=shape, stream=True, **own)
    add("schema whole", chat, messages=say("Describe"), max_tokens=250, response_format=shape, **greedy)
    add("seeded", chat, messages=say(), max_tokens=400, **own, **long)
    add("greedy", plain, prompt=ids(150), max_tokens=500, **greedy, **long)
    add("two", chat, messages=say(), n=2, max_tokens=200, **own, **long)
    add("stop", chat, messages=say(), max_tokens=300, stop=["the ", "ing "], min_tokens=40, stream=True, **own)
    add("logprobs", chat, messages=say(), max_tokens=150, logprobs=True, top_logprobs=2, **own, **long)
    add("penalties", plain, prompt=ids(90), max_tokens=300, frequency_penalty=0.5, presence_penalty=0.2, **own, **long)
    add("whole", plain, prompt=ids(200), max_tokens=200, ignore_eos=True, **own)
    add("long greedy", plain, prompt=ids(long_tokens), max_tokens=150, **greedy, **long)
    add("long seeded", plain, prompt=ids(long_tokens * 2 // 3), max_tokens=250, **own, **long)
    add("leaves", plain, draw.randrange(1, 60), prompt=ids(300), max_tokens=400, **own, **long)
    add("leaves early", plain, 0, prompt=ids(long_tokens), max_tokens=100, **greedy, **long)
    draw.shuffle(asked)
    return asked


def ask(port: int, asked: Asked, salt: str) -> Answer:
    """Sends a request and reads its answer. salt: requests with the same salt share cached pages."""
    answer = Answer()
    began = last = clock.monotonic()
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S + 10)
    try:
        body = json.dumps({**asked.body, "cache_salt": salt})
        link.request("POST", asked.path, body, {"content-type": "application/json"})
        if asked.leaves == 0:
            clock.sleep(0.2)
            return answer
        reply = link.getresponse()
        answer.status = reply.status
        if reply.status != 200:
            answer.error = f"status {reply.status}: {reply.read()[:300]!r}"
            return answer
        if not asked.body.get("stream"):
            answer.read(json.loads(reply.read()))
            answer.whole = True
            return answer
        for chunks, event in enumerate(_events(reply)):
            now = clock.monotonic()
            if event is None:
                answer.whole = True
                break
            if "error" in event:
                answer.error = str(event["error"])
                break
            if not chunks:
                answer.first_s = now - began
            elif now - last > answer.gap_s:
                answer.gap_s, answer.gap_at = now - last, last
            last = now
            answer.read(event)
            if asked.leaves is not None and chunks >= asked.leaves:
                break
    except (OSError, ValueError, http.client.HTTPException) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.seconds = clock.monotonic() - began
        link.close()
    return answer


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any] | None]:
    """The events of a stream; None for its end."""
    for line in reply:
        if line.startswith(b"data: [DONE]"):
            yield None
        elif line.startswith(b"data: "):
            yield json.loads(line[6:])


def difference(asked: Asked, truth: Answer, answer: Answer) -> str:
    """The difference of an answer from the truth, in one line; empty if there is none."""
    if answer.error:
        return answer.error
    if asked.leaves is not None:
        for index, choice in answer.choices.items():
            ids = truth.choices[index]["ids"]
            if choice["ids"] != ids[: len(choice["ids"])]:
                return f"choice {index}: its first {len(choice['ids'])} tokens are others"
        return ""
    if not answer.whole:
        return "it ended without its end"
    if sorted(answer.choices) != sorted(truth.choices):
        return f"it has choices {sorted(answer.choices)}"
    for index, choice in answer.choices.items():
        of = truth.choices[index]
        for key in of.keys() | choice.keys():
            if choice.get(key) != of.get(key):
                return f"choice {index}, {key}: {_where(of.get(key), choice.get(key))}"
    return ""


def _where(expected: Any, seen: Any) -> str:
    if not (isinstance(expected, list | str) and isinstance(seen, list | str)):
        return f"{seen!r}, expected {expected!r}"
    same = next(
        (at for at, (a, b) in enumerate(zip(expected, seen, strict=False)) if a != b), min(len(expected), len(seen))
    )
    return (
        f"the same up to {same} of {len(expected)}, {len(seen)} came: {seen[same : same + 8]!r}, expected "
        f"{expected[same : same + 8]!r}"
    )
