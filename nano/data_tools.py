"""Tool calling: one call, several calls, none, and the answer after the result.

Names, parameters and descriptions are made up anew for every sample, so that a model must read the declaration. The
thinking is work that copying can do. First what the user wants, a noun of the request, and the pieces of the request
that say with what values; then each declared function with its noun, `yes` where it is the wanted one. A set verb
follows the noun only where functions with one noun differ in it. Then each call: its function, and a line for every
parameter in the order of the TypeScript declaration (required ones first, each group by alphabet), with the piece that
tells it and the value, or `none` where the user did not say. The call's JSON has this order, compact, without those.
"""

import json
import operator
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nano import data_numbers
from nano.data_tools_topics import (
    FRAMES,
    HELD_FRAMES,
    HELD_NOUNS,
    HELD_RESULT_FIELDS,
    HELD_TOPICS,
    NOUNS,
    PARAMS,
    RESULT_FIELDS,
    SHAPES,
    SHAPES_OF_ONE,
    TOPICS,
    VERBS,
    Param,
    Topic,
    invented,
)
from nano.data_tools_values import KINDS, PRODUCTS, WORDS, is_open, pick, pseudo, reserved
from nano.sample import Generator, Sample, Split


def compact(value: Any) -> str:
    """JSON without blanks, letters beyond ASCII as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# ---------------------------------------------------------------------------------------------------- declarations


class Slot(NamedTuple):
    """A parameter as one function declares it."""

    key: str  # the topic's name for it
    name: str  # the declared name
    param: Param
    choices: tuple[str, ...]  # of an enum
    required: bool
    explicit: bool  # the name means nothing, so the user says it: "with trovel 38"


@dataclass(slots=True)
class Function:
    """A function that a conversation declares to the model."""

    name: str
    declaration: dict[str, Any]
    slots: list[Slot]  # in the order of the TypeScript declaration
    topic: Topic | None  # None: composed of verbs and a noun
    key: str  # what it is about; two functions with one key do the same
    verbs: tuple[str, ...] = ()
    noun: str = ""
    group: tuple[str, frozenset[str]] | None = None  # a nested object and the slots in it

    @property
    def thing(self) -> str:
        """What it is about, in a word of the request."""
        return self.topic.label if self.topic else self.noun


def _styled(rng: random.Random, words: Sequence[str]) -> str:
    style = rng.random()
    if style < 0.62:
        return "_".join(words)
    if style < 0.84:
        return words[0] + "".join([word.capitalize() for word in words[1:]])
    if style < 0.90:
        return "".join([word.capitalize() for word in words])
    if style < 0.94:
        return "-".join(words)
    return "".join(words)


def _pseudo_name(rng: random.Random) -> str:
    words = [pseudo(rng, "train") for _ in range(1 + (rng.random() < 0.6))]
    if rng.random() < 0.3:
        words.append(str(rng.randint(1, 99)))
    return _styled(rng, words)


_PREFIXES = ("api", "do", "my", "tool", "user", "app", "svc", "x", "run", "home", "v1", "sys", "call", "fn")
_SUFFIXES = ("v2", "tool", "api", "now", "fn", "action", "2", "service", "by_name", "info", "helper", "data")


def _function_name(rng: random.Random, held: bool, words: Sequence[str]) -> str:
    """A name that means something, or (an eighth of the time) nothing. Held-out names are known by their hash."""
    while True:
        if rng.random() < 0.12:
            name = _pseudo_name(rng)
        else:
            parts = list(words)
            dress = rng.random()
            if dress < 0.12:
                parts.insert(0, pick(rng, _PREFIXES))
            elif dress < 0.24:
                parts.append(pick(rng, _SUFFIXES))
            elif dress < 0.30:
                parts.append(str(rng.randint(1, 99)))
            elif dress < 0.36 and len(parts) > 1:
                parts = [*parts[1:], parts[0]]
            elif dress < 0.40:
                parts.insert(0, pseudo(rng, "train"))
            name = _styled(rng, parts)
        if held_name(name) == held:
            return name
        if rng.random() < 0.03:  # a short name may have no spelling on this side
            words = [*words, pseudo(rng, "train")]


def held_name(name: str) -> bool:
    """Whether training never declares a function of this name (one in five)."""
    return reserved("function", name, one_in=5)


def _schema(rng: random.Random, slot: Slot, described: bool) -> dict[str, Any]:
    kind = slot.param.kind
    schema: dict[str, Any]
    if slot.choices:
        schema = {"type": "string", "enum": list(slot.choices)}
    elif kind == "flag":
        schema = {"type": "boolean"}
    else:
        json_type = KINDS[kind][0]
        schema = {"type": json_type}
        if json_type == "array":
            schema["items"] = {"type": "string"}
    if described:
        schema["description"] = pick(rng, slot.param.about)
    if kind == "small" and not slot.required and rng.random() < 0.1:
        schema["default"] = rng.randint(1, 10)
    return schema


def _declare(
    rng: random.Random,
    held: bool,
    words: Sequence[str],
    about: str,
    params: Sequence[tuple[str, Param, bool]],
    composed: bool,
) -> tuple[str, dict[str, Any], list[Slot], tuple[str, frozenset[str]] | None]:
    name = _function_name(rng, held, words)
    camel = "_" not in name and name != name.lower()
    slots: list[Slot] = []
    used: set[str] = set()
    for key, param, required in params:
        explicit = rng.random() < 0.05 and param.kind != "message" and (composed or not required or len(params) == 1)
        spelled = pseudo(rng, "families" if held else "train") if explicit else pick(rng, param.names)
        while spelled in used:
            spelled = f"{spelled}_{len(used)}"
        used.add(spelled)
        if camel and "_" in spelled:
            first, *rest = spelled.split("_")
            spelled = first + "".join([part.capitalize() for part in rest])
        choices: tuple[str, ...] = ()
        if param.kind.startswith("enum:"):
            members = param.kind[5:].split(",")
            choices = tuple(rng.sample(members, rng.randint(2, len(members))))
        slots.append(Slot(key, spelled, param, choices, required, explicit))
    slots.sort(key=lambda slot: (not slot.required, slot.name))
    described = rng.random()
    properties = {slot.name: _schema(rng, slot, described < 0.45 or (described < 0.6 and rng.random() < 0.5))
                  for slot in slots}  # fmt: skip
    required_names = [slot.name for slot in slots if slot.required]
    group = None
    if len(slots) > 2 and rng.random() < 0.08:
        group = _nest(rng, slots, properties, required_names)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required_names or rng.random() < 0.5:
        parameters["required"] = required_names
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    meaningful = (camel or "_" in name or "-" in name) and all(word.lower() in name.lower() for word in words)
    if not meaningful or rng.random() < 0.88:
        function["description"] = about + ("." if rng.random() < 0.3 else "")
    return name, {"type": "function", "function": function}, slots, group


def _nest(
    rng: random.Random, slots: list[Slot], properties: dict[str, Any], required: list[str]
) -> tuple[str, frozenset[str]]:
    """Move two parameters into an object. It is required if one of them is."""
    inner = rng.sample(slots, 2)
    outer = pick(rng, ("options", "details", "data", "settings", "info", "params"))
    while outer in properties:
        outer += "_1"
    inside = [slot.name for slot in slots if slot in inner]
    needed = [slot.name for slot in inner if slot.required]
    properties[outer] = {"type": "object", "properties": {name: properties.pop(name) for name in inside}}
    if needed:
        properties[outer]["required"] = needed
        required[:] = [*(name for name in required if name not in inside), outer]
    return outer, frozenset(inside)


def _from_topic(rng: random.Random, split: Split, key: str) -> Function:
    return _of_topic(rng, split, key, TOPICS.get(key) or HELD_TOPICS[key])


def _invent(rng: random.Random, split: Split) -> Function:
    """A function whose noun alone tells what it is for."""
    noun = _noun(rng, split)
    if rng.random() < 0.2:  # the function's text tells how many words make the noun
        noun = f"{_noun(rng, split)} {noun}"
    return _of_topic(rng, split, noun, invented(noun, int(rng.random() * SHAPES)))


def _of_topic(rng: random.Random, split: Split, key: str, topic: Topic) -> Function:
    params = [(slot, param, True) for slot, param in topic.required.items()]
    params += [(slot, param, False) for slot, param in topic.optional.items() if rng.random() < 0.45]
    words, about = pick(rng, topic.names).split(), pick(rng, topic.about)
    name, declaration, slots, group = _declare(rng, split == "families", words, about, params, composed=False)
    return Function(name, declaration, slots, topic, key, group=group)


_ABOUT = (
    "{Verb} {a} {noun}", "{Verb} {a} {noun}", "{Verb} one {noun}", "Use this to {verb} {a} {noun}",
    "Function to {verb} {a} {noun}", "Can {verb} {a} {noun}", "{Verb} the {noun}", "Tool to {verb} the {noun}",
)  # fmt: skip


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeio" else "a"


# Nouns that no function is about: for training, any word that is not kept for evaluation may name a thing to act on.
_NO_THINGS = {"number", *HELD_NOUNS, *(verb for verbs in VERBS for verb in verbs)}
_NO_THINGS |= {word for topic in (*TOPICS.values(), *HELD_TOPICS.values()) for word in topic.label.split()}
_THINGS = tuple(sorted({word for word in (*WORDS.train, *PRODUCTS.train) if word.isalpha()} - _NO_THINGS))


def _noun(rng: random.Random, split: Split) -> str:
    which = rng.random()
    if which < 0.2:
        return pseudo(rng, split)
    if split == "families":
        return pick(rng, HELD_NOUNS)
    return pick(rng, NOUNS if which < 0.55 else _THINGS)


def _compose(rng: random.Random, split: Split, verbs: tuple[str, ...] = (), noun: str = "") -> Function:
    """A function made of a verb, a noun and one to four parameters."""
    held = split == "families"
    verbs = verbs or pick(rng, VERBS)
    if not noun:
        noun = _noun(rng, split)
    while True:
        count = pick(rng, (1, 1, 1, 2, 2, 2, 3, 3, 4))
        chosen = [(key, PARAMS[key], rng.random() < 0.6) for key in rng.sample(list(PARAMS), count)]
        shape = sorted(f"{param.kind}{required}" for _, param, required in chosen)
        if held == reserved("shape", *shape, one_in=5):
            break
    verb = pick(rng, verbs)
    about = pick(rng, _ABOUT).format(verb=verb, Verb=verb.capitalize(), noun=noun, a=_article(noun))
    words = [*pick(rng, verbs).split(), noun]
    name, declaration, slots, group = _declare(rng, held, words, about, chosen, composed=True)
    return Function(name, declaration, slots, None, f"{verbs[0]} {noun}", verbs, noun, group)


_TRAIN_KEYS, _ALL_KEYS, _HELD_KEYS = tuple(TOPICS), (*TOPICS, *HELD_TOPICS), tuple(HELD_TOPICS)


def _target(rng: random.Random, split: Split) -> Function:
    """A function that the user will need. One to evaluate with takes a value that can be new."""
    while True:
        which = rng.random()
        if which < 0.4:
            function = _compose(rng, split)
        elif which < 0.65:
            function = _invent(rng, split)
        else:
            held = split == "families" and rng.random() < 0.5
            function = _from_topic(rng, split, pick(rng, _HELD_KEYS if held else _TRAIN_KEYS))
        if split == "train" or any(slot.required and is_open(slot.param.kind) for slot in function.slots):
            return function


_TOO_GENERAL = frozenset({"search", "calculator"})  # could answer questions that are not about them


def _others(
    rng: random.Random, split: Split, targets: Sequence[Function], count: int, general: bool = True
) -> list[Function]:
    """Functions that the user does not need; a third share a word with one that is needed."""
    names = {target.name for target in targets}
    keys = {target.key for target in targets}
    things = {target.thing for target in targets if target.topic}  # a "find contact" beside them would be the same
    composed = {target.thing for target in targets if not target.topic}
    found: list[Function] = []
    while len(found) < count:
        like = pick(rng, targets) if targets else None
        if like and like.noun and rng.random() < 0.5:
            same_noun = rng.random() < 0.6
            other = _compose(rng, split, pick(rng, VERBS) if same_noun else like.verbs, like.noun if same_noun else "")
        elif (which := rng.random()) < 0.45:
            other = _compose(rng, split)
        elif which < 0.6:
            other = _invent(rng, split)
        else:
            other = _from_topic(rng, split, pick(rng, _ALL_KEYS if split == "families" else _TRAIN_KEYS))
        taken = composed | things if other.topic else things
        unlike = not set(other.thing.split()) & {word for thing in taken for word in thing.split()}
        if unlike and other.name not in names and other.key not in keys and (general or other.key not in _TOO_GENERAL):
            names.add(other.name)
            keys.add(other.key)
            (things if other.topic else composed).add(other.thing)
            found.append(other)
    return found


# -------------------------------------------------------------------------------------------------------- requests


class Call(NamedTuple):
    """One call of a function that is to be made."""

    function: Function
    values: dict[str, Any]  # by the topic's name for the parameter; those the user said

    @property
    def arguments(self) -> dict[str, Any]:
        """As declared: required first, then optional, each by alphabet, nested ones inside their object."""
        flat = [(slot, self.values[slot.key]) for slot in self.function.slots if slot.key in self.values]
        if not self.function.group:
            return {slot.name: value for slot, value in flat}
        outer, inside = self.function.group
        inner = {slot.name: value for slot, value in flat if slot.name in inside}
        entries = [(not slot.required, slot.name, value) for slot, value in flat if slot.name not in inside]
        if inner:
            needed = any(slot.required for slot in self.function.slots if slot.name in inside)
            entries.append((not needed, outer, inner))
        return {name: value for _, name, value in sorted(entries, key=lambda entry: entry[:2])}

    def thought(self, pieces: Sequence["Piece"]) -> str:
        """The function and a line for each parameter: the piece that tells its value, and the value."""
        function = self.function
        told = {piece.key: piece.text for piece in pieces}
        outer, inside = function.group or ("", frozenset[str]())
        needed = any(slot.required for slot in function.slots if slot.name in inside)

        def place(slot: Slot) -> tuple[bool, str, bool, str]:
            if slot.name in inside:
                return not needed, outer, not slot.required, slot.name
            return not slot.required, slot.name, False, ""

        lines = [function.name]
        for slot in sorted(function.slots, key=place):
            name = f"{outer}.{slot.name}" if slot.name in inside else slot.name
            said = f"{told[slot.key]} -> {compact(self.values[slot.key])}" if slot.key in self.values else "none"
            lines.append(f"{name}: {said}")
        return "\n".join(lines)


def _draw(rng: random.Random, split: Split, slot: Slot) -> Any:
    kind = slot.param.kind
    if slot.choices:
        return pick(rng, slot.choices)
    if kind == "flag":
        return rng.random() < 0.6
    return KINDS[kind][1](rng, split)


def _spoken(rng: random.Random, kind: str, value: Any) -> str:
    """The value as a user writes it."""
    if isinstance(value, list):
        *first, last = value
        return f"{', '.join(first)} and {last}" if rng.random() < 0.8 else ", ".join(value)
    if value is True or value is False:
        return "true" if value else "false"
    if kind == "title" and rng.random() < 0.4:
        return f'"{value}"' if rng.random() < 0.7 else f"'{value}'"
    return str(value)


def _named(slot: Slot) -> str:
    """The parameter's name in words: max_price or maxPrice -> max price; a word without meaning stays as it is."""
    return slot.name if slot.explicit else slot.name.replace("_", " ")


def _clause(rng: random.Random, slot: Slot, value: Any, short: bool) -> tuple[str, bool]:
    """How the user says an optional value, and whether it goes inside the sentence. `short`: it must."""
    param = slot.param
    spoken = _spoken(rng, param.kind, value)
    inline = param.inline and not slot.explicit
    if short and not inline:
        return f" with {_named(slot)} {spoken}", True
    if slot.explicit or rng.random() < 0.12 or not (param.inline or param.says):
        name = _named(slot)
        if param.kind == "flag":
            return pick(rng, ("Set {} to {}.", "{}: {}.", "The value of {} is {}.")).format(name, spoken), False
        if short or rng.random() < 0.5:
            return pick(rng, (" with {} {}", " with the {} {}", " ({}: {})")).format(name, spoken), True
        return pick(rng, ("The {} is {}.", "Set {} to {}.")).format(name, spoken), False
    if param.kind == "flag":
        return pick(rng, param.says if value else param.denies).replace("{name}", _named(slot)), False
    if param.inline and (short or not param.says or rng.random() < 0.6):
        return pick(rng, param.inline).replace("{}", spoken), True
    return pick(rng, param.says).replace("{}", spoken), False


def _sentence(clause: str) -> str:
    clause = clause.strip(" ()")
    return clause[0].upper() + clause[1:] + "."


def _asks(topic: Topic, split: Split) -> Sequence[str]:
    """The last fifth of a topic's questions is held out; a held-out topic is held out whole."""
    if topic in HELD_TOPICS.values():
        return topic.asks
    cut = _cut(topic)
    return topic.asks[cut:] if split == "families" else topic.asks[:cut]


def _cut(topic: Topic) -> int:
    return len(topic.asks) - max(1, len(topic.asks) // 5)


def _values(rng: random.Random, split: Split, function: Function) -> dict[str, Any]:
    """Values for what the user will say: all that is required, some of the rest. No two are equal."""
    values: dict[str, Any] = {}
    for slot in function.slots:
        if slot.required or rng.random() < 0.5:
            value = _draw(rng, split, slot)
            while not isinstance(value, bool) and value in values.values():
                value = _draw(rng, "train" if split == "train" else "values", slot)
            values[slot.key] = value
    return values


class Piece(NamedTuple):
    """Words of the request that say a value, and the topic's name for the parameter."""

    key: str
    text: str


class Request(NamedTuple):
    """What the user says, and which of its words tell a value."""

    text: str
    pieces: list[Piece]  # of the text, in its order


_SLOT = re.compile(r"\{(\w+)\}")


def _fill(rng: random.Random, ask: str, call: Call) -> Request:
    """A topic's question with its values. A piece is a value with up to two words before it."""
    kinds = {slot.key: slot.param.kind for slot in call.function.slots}
    text, pieces, done = "", list[Piece](), 0
    for slot in _SLOT.finditer(ask):
        before = ask[done : slot.start()]
        spoken = _spoken(rng, kinds[slot[1]], call.values[slot[1]])
        quote = ask[slot.end() : slot.end() + 1] if ask[slot.end() : slot.end() + 1] in ("'", '"') else ""
        lead = re.split(r"[\n.?!] ?", before)[-1].split(" ")[-3:]
        pieces.append(Piece(slot[1], " ".join(lead).lstrip(" ,") + spoken + quote))
        text += before + spoken
        done = slot.end()
    return Request(text + ask[done:], pieces)


def _ask(rng: random.Random, split: Split, call: Call, short: bool = False) -> Request:
    """The request that `call` answers: one sentence or more; `short`: one."""
    function, values = call
    inside: list[Piece] = []
    after: list[Piece] = []
    for slot in function.slots:
        if slot.key not in values or (function.topic and slot.required):
            continue
        clause, inline = _clause(rng, slot, values[slot.key], short)
        (inside if inline else after).append(Piece(slot.key, clause))
    rng.shuffle(inside)
    rng.shuffle(after)
    pieces = [Piece(key, clause.strip(" ()")) for key, clause in inside]
    pieces += [Piece(key, clause.removesuffix(".")) for key, clause in after]
    within = "".join([clause for _, clause in inside])
    if function.topic:
        ask, required = _fill(rng, pick(rng, _asks(function.topic, split)), call)
        end = ask[-1] if ask[-1] in ".?!" else ""
        text = ask[: len(ask) - len(end)] + within + end
        if inside and (ask[-1] == '"' or ": " in ask):  # a clause would become part of the quoted text
            text = ask if end else ask + "."
            sentences = [Piece(key, _sentence(clause)) for key, clause in inside]
            text += " " + " ".join([sentence for _, sentence in sentences])
            pieces[: len(inside)] = [Piece(key, sentence.removesuffix(".")) for key, sentence in sentences]
        pieces = required + pieces
    else:
        do = f"{pick(rng, function.verbs)} {pick(rng, (_article(function.noun), 'the', 'the', 'my', 'this', 'our'))} "
        do += function.noun + within
        frame = pick(rng, HELD_FRAMES if split == "families" else FRAMES)
        text = frame.replace("{do}", do[0].upper() + do[1:] if frame.startswith("{do}") else do)
    if after:
        text += ("" if text[-1] in ".?!" else ".") + " " + " ".join([clause for _, clause in after])
    return Request(text, pieces)


_GREETINGS = (
    "Hi! ",
    "Hello, ",
    "Hey, ",
    "Hello! ",
    "Kimi, ",
    "Please help: ",
    "Good morning. ",
    "Hi Kimi, ",
    "OK. ",
    "So, ",
)
_THANKS = (
    " Thanks!",
    " Thank you.",
    " Please.",
    " Thanks a lot.",
    " It is important.",
    "\nThanks",
    " I am in a hurry.",
)


def _dress(rng: random.Random, text: str, pieces: Sequence[Piece] = ()) -> str:
    if rng.random() < 0.15 and not text.startswith(tuple(piece.text for piece in pieces)):
        text = text[0].lower() + text[1:]
    if rng.random() < 0.18:
        text = pick(rng, _GREETINGS) + text
    if rng.random() < 0.12:
        text += ("" if text[-1] in ".?!" else ".") + pick(rng, _THANKS)
    return text


# ---------------------------------------------------------------------------------------------------- conversations


@dataclass(slots=True)
class Talk:
    """A conversation being written: the functions it declares and the calls counted so far."""

    functions: list[Function]
    thinking: bool
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    calls: int = 0
    contested: frozenset[str] = frozenset()  # nouns of functions that only their verbs tell apart

    def action(self, function: Function) -> str:
        """What the function does, in few words: its noun, with its verb where several functions have that noun."""
        return f"{function.noun} {function.verbs[0]}" if function.noun in self.contested else function.thing

    def wish(self, function: Function, pieces: Sequence[Piece]) -> str:
        """What the user wants of the function, for the thinking: the action, then the pieces that tell values."""
        action = self.action(function)
        return f"{action}: {' | '.join([piece.text for piece in pieces])}" if pieces else action

    def user(self, text: str) -> None:
        """Appends a turn of the user."""
        self.messages.append({"role": "user", "content": text})

    def judged(self, wants: Sequence[str], needed: Sequence[Function]) -> list[str]:
        """The lines of thinking that decide which functions are called.

        First the wishes; then, for each declared function, what it does and whether it is wanted, and by which wish.
        """
        lines = [f"{'Also' if i else 'Want'}: {want}" for i, want in enumerate(wants)]
        for function in self.functions:
            which = [str(i) for i, other in enumerate(needed, 1) if other is function]
            verdict = " ".join(["yes", *which]) if len(needed) > 1 and which else "yes" if which else "no"
            lines.append(f"{function.name}: {self.action(function)}: {verdict}")
        return lines

    def call(self, calls: Sequence[Call], pieces: Sequence[Sequence[Piece]]) -> list[str]:
        """Appends an assistant's turn that makes these calls, and gives their ids.

        pieces: of the request, those that tell each call's values.
        """
        wants = [self.wish(call.function, said) for call, said in zip(calls, pieces, strict=True)]
        lines = self.judged(wants, [call.function for call in calls])
        for i, (call, said) in enumerate(zip(calls, pieces, strict=True), 1):
            lines.append(f"{i}. {call.thought(said)}" if len(calls) > 1 else call.thought(said))
        made = [
            {
                "id": f"functions.{call.function.name}:{self.calls + i}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": compact(call.arguments)},
            }
            for i, call in enumerate(calls)
        ]
        self.calls += len(calls)
        self.assistant("\n".join(lines), "", tool_calls=made)
        return [f"functions.{call.function.name}:{self.calls - len(calls) + i}" for i, call in enumerate(calls)]

    def result(self, call_id: str, content: str) -> None:
        """Appends a tool's answer to the call of this id."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def assistant(self, thought: str, content: str, **rest: Any) -> None:
        """Appends an assistant's turn, with `thought` where the conversation has thinking. rest: its other keys."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.thinking:
            message["reasoning_content"] = thought
        self.messages.append(message | rest)

    def sample(self, kind: str, check: dict[str, Any]) -> Sample:
        """The conversation as it stands, whose last turn `check` grades."""
        tools = [function.declaration for function in self.functions]
        return Sample(kind, self.messages, tools, self.thinking, check)


_SYSTEM = (
    "You are a helpful assistant.", "You are Kimi, an assistant with tools.", "Use the functions when they help.",
    "Call functions when needed. Be brief.", "You help users of our app.", "Answer briefly.",
)  # fmt: skip
_INSTANT = 0.1  # share of training samples without thinking; evaluation always thinks


def _talk(
    rng: random.Random, split: Split, targets: Sequence[Function], count: int | None = None, general: bool = True
) -> Talk:
    """Declare the targets and some functions that are not needed, in any order."""
    if count is None:
        count = max(0, pick(rng, (1, 1, 1, 2, 2, 2, 2, 3, 3, 4)) - len(targets))
    functions = [*targets, *_others(rng, split, targets, count, general)]
    rng.shuffle(functions)
    talk = Talk(functions, split != "train" or rng.random() >= _INSTANT)
    nouns = [function.noun for function in functions if function.noun]
    talk.contested = frozenset(noun for noun in nouns if nouns.count(noun) > 1)
    if rng.random() < 0.12:
        talk.messages.append({"role": "system", "content": pick(rng, _SYSTEM)})
    return talk


def _calls_check(calls: Sequence[Call]) -> dict[str, Any]:
    return {"tool_calls": [{"name": call.function.name, "arguments": call.arguments} for call in calls]}


def one_call(rng: random.Random, split: Split) -> Sample:
    """The user needs one function; sometimes after an earlier call and its answer."""
    target = _target(rng, split)
    talk = _talk(rng, split, [target])
    if rng.random() < 0.12:
        earlier = pick(rng, talk.functions)
        before = Call(earlier, _values(rng, split, earlier))
        request = _ask(rng, split, before)
        _loop(rng, split, Several(talk, request, [before], [request.pieces]))
    call = Call(target, _values(rng, split, target))
    request = _ask(rng, split, call)
    talk.user(_dress(rng, request.text, request.pieces))
    talk.call([call], [request.pieces])
    return talk.sample("tool_call", _calls_check([call]))


_JOIN = ("{0} {1}", "{0} Also: {1}", "{0} And: {1}", "{0} Then: {1}", "{0}\n{1}", "1. {0}\n2. {1}",
         "Two things: {0} {1}", "- {0}\n- {1}", "{0} After that: {1}", "First: {0} Second: {1}",
         "{0} Plus: {1}", "{0} I also have this: {1}", "{0} Second, {1}", "{0} Another one: {1}",
         "{0} One more thing: {1}", "{0} Besides: {1}", "Please do both. {0} {1}",
         "{0}\n\n{1}", "{0} And one more request: {1}", "{0} Further: {1}", "{0} Oh, and: {1}", "{0} When done: {1}",
         "I need two things. {0} {1}", "{0} As well: {1}", "{0} In the second place: {1}", "{0} The next one: {1}",
         "(1) {0} (2) {1}", "a) {0} b) {1}", "{0} Moreover: {1}", "{0} At the same time: {1}")  # fmt: skip
_HELD_JOIN = ("{0} In addition: {1}", "{0} Next: {1}", "Do two things. {0} {1}", "{0} Additionally: {1}",
              "A: {0} B: {1}", "{0} Finally: {1}", "* {0}\n* {1}", "There are two requests. {0} {1}")  # fmt: skip
_LISTED = frozenset({"city", "ticker", "code", "pseudo", "path", "full_name", "word", "expression"})


class Several(NamedTuple):
    """A request for several calls, and the conversation in which it is made."""

    talk: Talk
    request: Request
    calls: list[Call]
    pieces: list[list[Piece]]  # of the request, for each call


def _several(rng: random.Random, split: Split) -> Several:
    target = _target(rng, split)
    needed = [slot for slot in target.slots if slot.required]
    if target.topic and len(needed) == 1 and needed[0].param.kind in _LISTED and rng.random() < 0.7:
        slot, seen = needed[0], list[str]()
        while len(seen) < (3 if rng.random() < 0.3 else 2):
            value = _draw(rng, split if not seen else "train", slot)
            if value not in seen:
                seen.append(value)
        calls = [Call(target, {slot.key: value}) for value in seen]
        ask = pick(rng, _asks(target.topic, split))
        joined = _spoken(rng, "", seen) if len(seen) > 2 else " and ".join(seen)
        pieces = [Piece(slot.key, value) for value in seen]
        request = Request(ask.replace("{" + slot.key + "}", joined), pieces)
        return Several(_talk(rng, split, [target]), request, calls, [[piece] for piece in pieces])
    targets = [target]
    if rng.random() < 0.65 or not target.slots:
        other = _target(rng, split)
        if other.key != target.key and other.name != target.name and other.thing != target.thing:
            targets.append(other)
    both = targets if len(targets) == 2 else [target, target]
    calls = [Call(function, _values(rng, split, function)) for function in both]
    while calls[0] == calls[1]:
        other = _others(rng, split, targets, 1)
        targets += other
        calls[1] = Call(other[0], _values(rng, split, other[0]))
    requests = [_ask(rng, split, call, short=True) for call in calls]
    asks = [ask + ("" if ask[-1] in ".?!" else ".") for ask, _ in requests]
    text = pick(rng, _HELD_JOIN if split == "families" else _JOIN).format(*asks)
    pieces = [each.pieces for each in requests]
    return Several(_talk(rng, split, targets), Request(text, sum(pieces, list[Piece]())), calls, pieces)


def several_calls(rng: random.Random, split: Split) -> Sample:
    """Two or three calls in one answer, of one function or of two."""
    talk, request, calls, pieces = _several(rng, split)
    talk.user(_dress(rng, *request))
    talk.call(calls, pieces)
    return talk.sample("tool_multi", _calls_check(calls))


_CHAT = {
    "train": (
        ("Hello!", "Hello! How can I help you?"), ("Hi", "Hello! How can I help you?"),
        ("Hey there", "Hello! How can I help you?"), ("Good morning!", "Good morning! How can I help you?"),
        ("Thanks!", "You're welcome!"), ("Thank you so much.", "You're welcome!"),
        ("Great, thanks.", "You're welcome!"), ("Thank you, that is all.", "You're welcome!"),
        ("Who are you?", "I am Kimi, an AI assistant."),
        ("What's your name?", "I am Kimi, an AI assistant."), ("Are you a robot?", "I am Kimi, an AI assistant."),
        ("How are you?", "I am fine, thank you. How can I help you?"),
        ("Goodbye!", "Goodbye!"), ("Bye", "Goodbye!"),
        ("See you tomorrow.", "Goodbye!"), ("Say hello.", "Hello!"),
        ("Tell me something nice.", "You are doing great."), ("You are great!", "Thank you!"),
        ("I am bored.", "How about reading a book?"), ("I am tired.", "Take a rest. You have earned it."),
        ("What is the capital of France?", "Paris."), ("What is the capital of Japan?", "Tokyo."),
        ("What color is the sky?", "Blue."), ("How many days are in a week?", "7."),
        ("How many legs does a cat have?", "4."), ("Is water wet?", "Yes."), ("Good night", "Good night!"),
        ("Nice to meet you.", "Nice to meet you too!"),
        ("Hallo!", "Hallo! Wie kann ich helfen?"), ("Bonjour !", "Bonjour ! Comment puis-je aider ?"),
        ("What can you do?", "I can answer questions and call functions."),
    ),
    "families": (
        ("Hi Kimi!", "Hello! How can I help you?"), ("Good evening!", "Good evening! How can I help you?"),
        ("Many thanks!", "You're welcome!"), ("Tell me who you are.", "I am Kimi, an AI assistant."),
        ("How are you today?", "I am fine, thank you. How can I help you?"), ("See you!", "Goodbye!"),
        ("What is the capital of Germany?", "Berlin."), ("How many days does a week have?", "7."),
    ),
}  # fmt: skip
_REFUSAL = "I have no function for that."


def no_call(rng: random.Random, split: Split) -> Sample:
    """Tools are declared, but the answer needs none, or none of them fits, or a required value is missing."""
    which = rng.random()
    if which < 0.16:
        return _missing(rng, split)
    if which < 0.5:
        return _unfit(rng, split)
    talk = _talk(rng, split, [], pick(rng, (1, 1, 2, 2, 3, 4, 5)), general=False)
    check: dict[str, Any] = {"no_tool_calls": True}
    if which < 0.75:
        ask, answer = pick(rng, _CHAT["families" if split == "families" else "train"])
        want, thought = "talk", "No function is needed."
    else:
        sum_ = data_numbers.plain(rng, split, pick(rng, ("add", "sub", "mul", "div")))
        ask = sum_.messages[-2]["content"]
        answer = sum_.messages[-1]["content"]
        talk.thinking = sum_.thinking
        want, thought = "number", "No function is needed.\n" + sum_.messages[-1].get("reasoning_content", "")
        check |= sum_.check or {}
    talk.user(_dress(rng, ask) if rng.random() < 0.3 else ask)
    talk.assistant("\n".join([*talk.judged([want], []), thought]), answer)
    return talk.sample("tool_none", check)


def _unfit(rng: random.Random, split: Split) -> Sample:
    """The function that the user needs is not there; ones that share a word with it may be."""
    wanted = _target(rng, split)
    talk = _talk(rng, split, [wanted], pick(rng, (1, 1, 2, 2, 3, 4)), general=False)
    talk.functions.remove(wanted)
    request = _ask(rng, split, Call(wanted, _values(rng, split, wanted)))
    talk.user(_dress(rng, *request))
    talk.assistant("\n".join([*talk.judged([talk.wish(wanted, request.pieces)], []), "No function fits."]), _REFUSAL)
    return talk.sample("tool_none", {"no_tool_calls": True})


_BARE = tuple(key for key, topic in TOPICS.items() if topic.bare)


_BARE_ASKS = ("Show me the {noun}.", "What about the {noun}?", "Check my {noun}.", "I need the {noun}.",
              "Get me the {noun}.", "How is the {noun}?", "Where is my {noun}?", "Can you check the {noun}?",
              "Is there a {noun}?", "I want to know the {noun}.", "Which {noun} is there?",
              "Look at the {noun}.")  # fmt: skip
_HELD_BARE_ASKS = ("Tell me about the {noun}.", "Could you show the {noun}?", "What is the {noun}?")


def _missing(rng: random.Random, split: Split) -> Sample:
    """The one required value is not said, so the answer asks for it."""
    if rng.random() < 0.5:
        noun = _noun(rng, split)
        target = _of_topic(rng, split, noun, invented(noun, rng.randrange(SHAPES_OF_ONE)))
        ask = pick(rng, _HELD_BARE_ASKS if split == "families" else _BARE_ASKS).replace("{noun}", noun)
    else:
        key = pick(rng, _BARE)
        target = _from_topic(rng, split, key)
        bare = TOPICS[key].bare
        ask = bare[-1] if split == "families" else pick(rng, bare[:-1] or bare)
    talk = _talk(rng, split, [target])
    talk.user(_dress(rng, ask))
    slot = next(slot for slot in target.slots if slot.required)
    thought = [*talk.judged([talk.action(target)], [target]), target.name, f"{slot.name}: missing"]
    talk.assistant("\n".join(thought), f"Please tell me the {slot.name.replace('_', ' ')}.")
    return talk.sample("tool_none", {"no_tool_calls": True})


_ERRORS = ("not found", "timeout", "no access", "service unavailable", "invalid request", "rate limit reached",
           "no data", "server error", "unknown id", "quota exceeded")  # fmt: skip
_HELD_ERRORS = ("connection lost", "permission denied", "internal error")


def _encode(rng: random.Random, result: dict[str, Any]) -> str:
    """Tools answer in all sorts of JSON, and sometimes in lines."""
    how = rng.random()
    if how < 0.45:
        return compact(result)
    if how < 0.75:
        return json.dumps(result, ensure_ascii=False)
    if how < 0.85:
        return json.dumps(result, ensure_ascii=False, indent=2)
    return ("\n" if how < 0.93 else ", ").join([f"{key}: {value}" for key, value in result.items()])


_CALCULATE: dict[str, Callable[[int, int], int | float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: round(a / b, 2),
}


class Told(NamedTuple):
    """A result of a call, and the answer that tells it to the user."""

    result: dict[str, Any]
    thought: str
    answer: str
    facts: list[str]  # what the answer must contain


_PLURAL = frozenset({"hours", "lines", "minutes", "rows", "seconds"})  # fields of results


def _draw_field(rng: random.Random, split: Split, kind: str) -> Any:
    return pick(rng, kind[5:].split(",")) if kind.startswith("enum:") else KINDS[kind][1](rng, split)


def _tell(rng: random.Random, split: Split, call: Call) -> Told:
    """A made-up result and how it is told."""
    if rng.random() < 0.07:
        error = pick(rng, _HELD_ERRORS if split == "families" else _ERRORS)
        return Told({"error": error}, f"Error: {error}.", f"That did not work: {error}.", [error])
    topic = call.function.topic
    if topic:
        result = {name: _draw_field(rng, split, kind) for name, kind in topic.fields.items()}
        if "expression" in call.values:
            a, sign, b = call.values["expression"].split()
            result["result"] = _CALCULATE[sign](int(a), int(b))
    else:
        fields = HELD_RESULT_FIELDS if split == "families" else RESULT_FIELDS
        kinds = {name: fields[name] for name in rng.sample(list(fields), pick(rng, (1, 1, 2, 2, 3)))}
        result = {pseudo(rng, split) if rng.random() < 0.12 else name: _draw_field(rng, split, kind)
                  for name, kind in kinds.items()}  # fmt: skip
    thought = "Result: " + ", ".join([f"{name} {value}" for name, value in result.items()]) + "."
    said = [f"the {name} {'are' if name in _PLURAL else 'is'} {value}" for name, value in result.items()]
    answer = " and ".join(said)
    return Told(result, thought, f"{answer[0].upper()}{answer[1:]}.", [str(value) for value in result.values()])


def _loop(rng: random.Random, split: Split, several: Several) -> list[str]:
    """A whole loop: question, calls, results, answer. Returns what the answer must contain."""
    talk, request, calls, pieces = several
    talk.user(_dress(rng, *request))
    told = [_tell(rng, split, call) for call in calls]
    for call_id, each in zip(talk.call(calls, pieces), told, strict=True):
        talk.result(call_id, _encode(rng, each.result))
    talk.assistant("\n".join([each.thought for each in told]), " ".join([each.answer for each in told]))
    return [fact for each in told for fact in each.facts]


def follow_up(rng: random.Random, split: Split) -> Sample:
    """A call and its result; the last answer tells the user what the result says."""
    if rng.random() < 0.15:
        several = _several(rng, split)
    else:
        target = _target(rng, split)
        call = Call(target, _values(rng, split, target))
        request = _ask(rng, split, call)
        several = Several(_talk(rng, split, [target]), request, [call], [request.pieces])
    return several.talk.sample("tool_followup", {"contains": _loop(rng, split, several)})


GENERATORS: dict[str, tuple[Generator, float]] = {
    "tool_call": (one_call, 0.45),
    "tool_multi": (several_calls, 0.2),
    "tool_none": (no_call, 0.15),
    "tool_followup": (follow_up, 0.2),
}


def families(kind: str) -> tuple[int, int]:
    """How many phrase families there are: (for training, held out). Function names are held out besides."""
    train = sum(_cut(topic) for topic in TOPICS.values()) + len(FRAMES)
    held = sum(len(topic.asks) - _cut(topic) for topic in TOPICS.values()) + len(HELD_FRAMES)
    held += sum(len(topic.asks) for topic in HELD_TOPICS.values())
    match kind:
        case "tool_multi":
            return train + len(_JOIN), held + len(_HELD_JOIN)
        case "tool_none":
            return train + len(_CHAT["train"]), held + len(_CHAT["families"])
        case _:
            return train, held
