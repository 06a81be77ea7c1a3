"""Prompts for the target: built-in templates, one set per domain, and users' files.

A template is a text with slots. `{city}` is a random entry of a word list, and entries may have slots themselves;
`{2..19}` is a random number; `{city:1}` and `{2..19:1}` have the same value wherever they occur in one prompt. So that
answers do not depend on one wording, system prompts, suffixes, tool declarations, earlier turns and thinking vary too.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from redline.chat.lines import NOT_JSON, CalledFunction, CallMade, Chat, DeclaredFunction, DeclaredTool, Turn
from redline.errors import ConfigError

Turns = Literal["all", "last"]

DOMAINS = ("code", "math", "agent", "science", "multilingual", "chat", "long")
LONG_CHARACTERS = (4_000, 40_000)  # length of a document, log-uniform
TRIES = 200  # after this number of draws in a row without a new prompt, a domain counts as exhausted

# Probabilities of the optional parts of a prompt.
SYSTEM, SUFFIX, INSTANT, EARLIER, TOOLS_UNUSED = 0.5, 0.35, 0.2, 0.3, 0.05

_TEMPLATES = Path(__file__).parent / "templates"
_SLOT = re.compile(r"\{(?:(?P<low>\d+)\.\.(?P<high>\d+)|(?P<name>[A-Za-z_]+))(?::(?P<key>\w+))?\}")


class PromptLine(Chat, frozen=True, kw_only=True):
    """One line of a prompt file. If it has no id, one is made from its content."""

    domain: str
    id: str = ""
    language: str = "en"
    kind: str = ""


class PromptSet(NamedTuple):
    """The prompts of some files, and messages about the lines that were skipped."""

    prompts: list[PromptLine]
    skipped: list[str]  # "file, line n: reason"


def read_prompts(*paths: Path, turns: Turns = "last") -> PromptSet:
    """The prompts of users' files, in order, each with an id. Lines that are not prompts are skipped and reported.

    An answer at the end of a conversation is dropped: the target generates its own. With `turns` "all", the earlier
    answers are generated too, each as a prompt before the conversation itself (`earlier`). Raises ConfigError if a file
    cannot be read.
    """
    decoder = msgspec.json.Decoder(PromptLine)
    found = PromptSet([], [])
    seen: set[str] = set()
    for path in paths:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected prompts, one JSON a line") from None
        for number, line in enumerate(lines, 1):
            try:
                prompt = named(_without_answer(decoder.decode(line)))
                reason = _wrong(prompt) or (f"duplicate id {prompt.id!r}" if prompt.id in seen else None)
            except NOT_JSON as error:
                prompt, reason = None, str(error) if line.strip() else "the line is empty"
            if prompt is not None and reason is None:
                new = [turn for turn in earlier(prompt) if turn.id not in seen] if turns == "all" else []
                found.prompts.extend([*new, prompt])
                seen.update(turn.id for turn in (*new, prompt))
            else:
                found.skipped.append(f"{path}, line {number}: {reason}")
    return found


def earlier(prompt: PromptLine) -> list[PromptLine]:
    """A prompt for each earlier answer of the conversation: all messages before that answer.

    If the prompt's id is made from its content, so are these ids, so a log in which each request repeats the previous
    one yields each prompt once.
    """
    made_id = named(msgspec.structs.replace(prompt, id="")).id
    found: list[PromptLine] = []
    for place, turn in enumerate(prompt.messages):
        if turn.role == "assistant" and place and prompt.messages[place - 1].role in ("user", "tool"):
            id = "" if prompt.id == made_id else f"{prompt.id}/{len(found) + 1}"
            found.append(named(msgspec.structs.replace(prompt, id=id, messages=prompt.messages[:place])))
    return found


def prompts(
    domains: Sequence[str], count: int, seed: int = 0, long_characters: tuple[int, int] = LONG_CHARACTERS
) -> list[PromptLine]:
    """`count` distinct prompts of each domain. A larger count continues a smaller one.

    long_characters: minimum and maximum length of documents in the domain long. Raises ConfigError for a domain without
    templates, or if its templates are exhausted.
    """
    found: list[PromptLine] = []
    for domain in domains:
        if domain not in DOMAINS:
            raise ConfigError(f"domain is {domain!r}; there are templates for {', '.join(DOMAINS)}")
        new: dict[str, PromptLine] = {}
        fruitless = 0
        for prompt in _drawn(domain, random.Random(f"{seed}/{domain}"), long_characters):
            if len(new) >= count:
                break
            fruitless = fruitless + 1 if prompt.id in new else 0
            if fruitless == TRIES:
                raise ConfigError(f"count is {count:,}; the templates of {domain} make about {len(new):,} prompts")
            new[prompt.id] = prompt
        found += new.values()
    return found


def named(prompt: PromptLine) -> PromptLine:
    """The prompt with an id; a missing id is made from the content, and is equal for equal content."""
    if prompt.id:
        return prompt
    digest = blake2b(msgspec.json.encode(prompt, order="sorted"), digest_size=8).hexdigest()
    return msgspec.structs.replace(prompt, id=f"{prompt.domain}-{digest}")


def _wrong(prompt: PromptLine) -> str | None:
    if not prompt.domain:
        return "domain is empty"
    if not prompt.messages:
        return "messages has no message to answer"
    return None


def _without_answer(prompt: PromptLine) -> PromptLine:
    messages = list(prompt.messages)
    while messages and messages[-1].role == "assistant":
        messages.pop()
    return msgspec.structs.replace(prompt, messages=tuple(messages))


# ------------------------------------------------------------------------------------------------------------ slots


class _Filler:
    """Fills slots for one prompt: a slot with a key is drawn once."""

    def __init__(self, rng: random.Random, words: Mapping[str, Sequence[str]]) -> None:
        self._rng = rng
        self._words = words
        self._kept: dict[str, str] = {}

    def text(self, template: str) -> str:
        return _SLOT.sub(self._slot, template)

    def value(self, template: Any) -> Any:
        """JSON with its slots filled. A string that consists of one number slot becomes a number."""
        if isinstance(template, str):
            slot = _SLOT.fullmatch(template)
            return int(self.text(template)) if slot and slot["low"] else self.text(template)
        if isinstance(template, list):
            return [self.value(item) for item in template]
        if isinstance(template, dict):
            return {key: self.value(item) for key, item in template.items()}
        return template

    def _slot(self, slot: re.Match[str]) -> str:
        key = slot["key"] and (slot["name"] or "number") + slot["key"]
        if key and key in self._kept:
            return self._kept[key]
        if slot["low"]:
            text = str(_between(self._rng, int(slot["low"]), int(slot["high"])))
        elif slot["name"] in self._words:
            taken = set(self._kept.values())
            choices = [word for word in self._words[slot["name"]] if word not in taken] if key else ()
            text = self.text(_pick(self._rng, choices or self._words[slot["name"]]))
        else:
            return slot[0]  # braces of program code, not a slot
        if key:
            self._kept[key] = text
        return text


def _pick(rng: random.Random, choices: Sequence[Any]) -> Any:
    """Uses `random()`, the only method with guaranteed equal results across Python versions."""
    return choices[int(rng.random() * len(choices))]


def _between(rng: random.Random, low: int, high: int) -> int:
    return low + int(rng.random() * (high - low + 1))


@cache
def _templates(name: str) -> dict[str, Any]:
    return json.loads((_TEMPLATES / f"{name}.json").read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------------------------------- domains


def _drawn(domain: str, rng: random.Random, long_characters: tuple[int, int]) -> Iterator[PromptLine]:
    """An endless sequence of prompts of a domain."""
    templates = _templates(domain)
    words = {**_templates("common")["words"], **templates.get("words", {})}
    while True:
        match domain:
            case "agent":
                prompt = _agent(rng, templates, words)
            case "long":
                prompt = _long(rng, templates, words, long_characters)
            case _:
                prompt = _plain(rng, domain, _pick(rng, templates["groups"]))
        yield named(prompt)


def _plain(rng: random.Random, domain: str, group: Mapping[str, Any]) -> PromptLine:
    """A question, optionally after an exchange about another topic, and optionally with tools that it does not need."""
    common = _templates("common")
    words = group["words"] if "language" in group else {**common["words"], **group["words"]}
    filler = _Filler(rng, words)
    kind = _pick(rng, list(group["kinds"]))
    text = filler.text(_pick(rng, group["kinds"][kind]))
    frame = group if "language" in group else common
    if rng.random() < SUFFIX:
        suffix = filler.text(_pick(rng, frame["suffix"]))
        text = f"{text}{'' if suffix.startswith(chr(10)) else ' '}{suffix}"
    system, words = (common["system"], {**common["words"], **words}) if rng.random() < 0.3 else (frame["system"], words)
    turns: list[Turn] = []
    if "exchanges" in group and rng.random() < EARLIER:
        said = _Filler(rng, words)
        for _ in range(_between(rng, 1, 3)):
            asked, answered = _pick(rng, group["exchanges"])
            turns += [Turn(role="user", content=said.text(asked)), Turn(role="assistant", content=said.text(answered))]
    tools: tuple[DeclaredTool, ...] = ()
    if rng.random() < TOOLS_UNUSED:
        family = _pick(rng, _templates("agent")["families"])
        tools = tuple(_declared(rng, tool) for tool in family["tools"])
    return PromptLine(
        domain=domain,
        language=group.get("language", "en"),
        kind=kind,
        messages=(*_system(rng, system, words), *turns, Turn(role="user", content=text)),
        tools=tools,
        thinking=rng.random() >= INSTANT,
    )


def _agent(rng: random.Random, templates: Mapping[str, Any], words: Mapping[str, Sequence[str]]) -> PromptLine:
    """A request with the tools that it needs and others; it ends before a call, after a result, or after an answer."""
    families: list[dict[str, Any]] = templates["families"]
    family = _pick(rng, families)
    filler = _Filler(rng, words)
    ask = _pick(rng, family["asks"])
    text = filler.text(ask["text"])
    if rng.random() < SUFFIX:
        text = f"{text} {filler.text(_pick(rng, templates['extra']))}"
    others = [tool for other in families if other is not family for tool in other["tools"]]
    declared = [*family["tools"], *(_pick(rng, others) for _ in range(_between(rng, 0, 4)))]
    declared = list({tool["name"]: tool for tool in declared}.values())
    declared.sort(key=lambda _: rng.random())
    turns = [Turn(role="user", content=text)]
    kind = _pick(rng, ("call", "call", "result", "result", "again"))
    if kind != "call":
        call = CallMade(
            id=f"functions.{ask['call']}:0",
            function=CalledFunction(
                name=ask["call"], arguments=json.dumps(filler.value(ask["arguments"]), ensure_ascii=False)
            ),
        )
        result = json.dumps(filler.value(ask["result"]), ensure_ascii=False)
        turns += [
            Turn(role="assistant", tool_calls=(call,)),
            Turn(role="tool", content=result, tool_call_id=call.id),
        ]
    if kind == "again":
        turns += [
            Turn(role="assistant", content=f"Here is what I got: {turns[-1].content}"),
            Turn(role="user", content=_Filler(rng, words).text(_pick(rng, family["asks"])["text"])),
        ]
    return PromptLine(
        domain="agent",
        kind=f"{family['name']} {kind}",
        messages=(*_system(rng, _templates("common")["system"], words), *turns),
        tools=tuple(_declared(rng, tool) for tool in declared),
        thinking=rng.random() >= INSTANT,
    )


def _declared(rng: random.Random, tool: Mapping[str, Any]) -> DeclaredTool:
    """The tool's JSON schema; how much of it is described varies."""
    described = rng.random() < 0.8
    properties: dict[str, Any] = {}
    for name, (type, description, _) in tool["parameters"].items():
        schema: dict[str, Any] = {"type": "string", "enum": type.split("|")} if "|" in type else {"type": type}
        if type == "array":
            schema["items"] = {"type": "string"}
        properties[name] = {**schema, "description": description} if described else schema
    required = [name for name, (_, _, needed) in tool["parameters"].items() if needed]
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if rng.random() < 0.3:
        parameters["additionalProperties"] = False
    return DeclaredTool(
        function=DeclaredFunction(name=tool["name"], description=tool["description"], parameters=parameters)
    )


def _long(
    rng: random.Random,
    templates: Mapping[str, Any],
    words: Mapping[str, Sequence[str]],
    characters: tuple[int, int],
) -> PromptLine:
    """A document and a question about one of its lines, or about the whole; the question first or last."""
    document = _pick(rng, templates["documents"])
    low, high = characters
    wanted = low * (high / low) ** rng.random()
    lines: list[str] = []
    asked_line = _Filler(rng, words)
    length, place = 0, rng.random() * wanted
    while length < wanted:
        filler = _Filler(rng, words)
        line = filler.text(_pick(rng, document["lines"]))
        if length <= place:
            asked_line = filler
        lines.append(line)
        length += len(line) + 1
    text = "\n".join([_Filler(rng, words).text(document["title"]), "", *lines])
    question = asked_line.text(_pick(rng, document["questions"]))
    return PromptLine(
        domain="long",
        kind=document["kind"],
        messages=(
            *_system(rng, _templates("common")["system"], words),
            Turn(role="user", content=f"{question}\n\n{text}" if rng.random() < 0.3 else f"{text}\n\n{question}"),
        ),
        thinking=rng.random() >= INSTANT,
    )


def _system(rng: random.Random, texts: Sequence[str], words: Mapping[str, Sequence[str]]) -> tuple[Turn, ...]:
    if rng.random() >= SYSTEM:
        return ()
    return (Turn(role="system", content=_Filler(rng, words).text(_pick(rng, texts))),)
