"""JSON by schema: a text with facts and a schema in; the object alone out.

The thinking takes the fields in the schema's order. For each it copies the words of the text that tell it, then the
value; `none` for an optional one that the text does not tell. The answer has the same order, compact.
"""

import json
import random
import re
from typing import Any, NamedTuple

from nano.data_json_topics import FRAMES, HELD_FRAMES, HELD_RECORDS, RECORDS
from nano.data_tools_topics import PARAMS, Param
from nano.data_tools_values import KINDS, is_open, pick, pseudo
from nano.sample import Generator, Sample, Split


class Field(NamedTuple):
    """One key of a schema. `choices` are the values of an enum."""

    name: str
    param: Param
    choices: tuple[str, ...]
    required: bool
    nullable: bool
    plain: bool  # the name is the only way to tell the value: "trovel: 38"


class Record(NamedTuple):
    """The schema of one object of the kind `what`. `inner` names the fields that lie in a nested object, `outer`."""

    what: str
    fields: list[Field]
    outer: str = ""
    inner: frozenset[str] = frozenset()

    def nested(self, field: Field) -> bool:
        """Whether the field lies in the nested object."""
        return field.name in self.inner


def _record(rng: random.Random, split: Split) -> Record:
    """Some fields; the text will tell one at least whose value can be new."""
    while True:
        record = _any_record(rng, split)
        if any(field.required and not field.nullable and is_open(field.param.kind) for field in record.fields):
            return record


def _any_record(rng: random.Random, split: Split) -> Record:
    """Some fields of a known kind of record, or of one that nobody has seen."""
    held = split == "families"
    if rng.random() < 0.35:
        what = pseudo(rng, split)
        params = [PARAMS[key] for key in rng.sample(_INVENTED, pick(rng, (1, 2, 2, 3, 3, 4)))]
    else:
        records = HELD_RECORDS if held else RECORDS
        what = pick(rng, tuple(records))
        params = rng.sample(records[what], min(pick(rng, (1, 2, 2, 3, 3, 4, 5)), len(records[what])))
        extra = PARAMS[pick(rng, _INVENTED)]
        if rng.random() < 0.2 and all(extra.kind != param.kind for param in params):  # two cities would be a riddle
            params.append(extra)
    plain_keys = rng.random() < 0.2
    camel = rng.random() < 0.15
    fields: list[Field] = []
    for param in params:
        plain = plain_keys or rng.random() < 0.2
        name = pseudo(rng, split) if plain and rng.random() < 0.7 else pick(rng, param.names)
        if plain and rng.random() < 0.15:
            name = f"{name}_{pseudo(rng, split)}"
        while any(name == other.name for other in fields):
            name, plain = pseudo(rng, split), True
        if camel and "_" in name:
            first, *rest = name.split("_")
            name = first + "".join([part.capitalize() for part in rest])
        choices: tuple[str, ...] = ()
        if param.kind.startswith("enum:"):
            members = param.kind[5:].split(",")
            choices = tuple(rng.sample(members, rng.randint(2, len(members))))
        required = rng.random() < 0.75
        scalar = not choices and param.kind not in ("words", "people", "flag")
        fields.append(Field(name, param, choices, required, required and scalar and rng.random() < 0.08, plain))
    if len(fields) > 2 and rng.random() < 0.15:
        outer = (
            pick(rng, ("details", "info", "data", "extra", "meta", "props"))
            if rng.random() < 0.8
            else pseudo(rng, split)
        )
        start = rng.randrange(len(fields) - 1)
        if all(field.name != outer for field in fields):
            return Record(what, fields, outer, frozenset(field.name for field in fields[start : start + 2]))
    return Record(what, fields)


# Parameters of tools that also make sense as facts about a thing.
_INVENTED = tuple(key for key in PARAMS if key not in ("limit", "notify", "page", "people"))


# ---------------------------------------------------------------------------------------------------------- schemas


def _leaf(field: Field) -> dict[str, Any]:
    kind = field.param.kind
    if field.choices:
        return {"type": "string", "enum": list(field.choices)}
    json_type = "boolean" if kind == "flag" else KINDS[kind][0]
    if json_type == "array":
        return {"type": "array", "items": {"type": "string"}}
    return {"type": [json_type, "null"] if field.nullable else json_type}


def _schema(record: Record) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    required: list[str] = []
    for field in record.fields:
        place, needed = properties, required
        if record.nested(field):
            inner = properties.setdefault(record.outer, {"type": "object", "properties": {}, "required": []})
            place, needed = inner["properties"], inner["required"]
            if record.outer not in required:
                required.append(record.outer)
        place[field.name] = _leaf(field)
        if field.required:
            needed.append(field.name)
    return {"type": "object", "properties": properties, "required": required}


def _type_name(schema: dict[str, Any], typescript: bool) -> str:
    if "enum" in schema:
        return " | ".join([f'"{member}"' for member in schema["enum"]])
    kind = schema["type"]
    if isinstance(kind, list):
        return " | ".join([_type_name({"type": one}, typescript) for one in kind])
    if kind == "array":
        return _type_name(schema["items"], typescript) + "[]" if typescript else "list of strings"
    return "number" if typescript and kind == "integer" else kind


def _typescript(schema: dict[str, Any], end: str = ";") -> str:
    members: list[str] = []
    for name, each in schema["properties"].items():
        optional = "" if name in schema["required"] else "?"
        shown = _typescript(each, end) if each["type"] == "object" else _type_name(each, True)
        members.append(f"{name}{optional}: {shown}")
    return "{ " + f"{end} ".join(members) + " }"


def _list(schema: dict[str, Any], item: str, between: str) -> str:
    """The fields in words: `title (string), year (integer, optional)`."""
    shown: list[str] = []
    for name, each in schema["properties"].items():
        if each["type"] == "object":
            kind = "object with " + _list(each, "{} ({})", " and ")
        elif "enum" in each:
            kind = "one of " + "/".join(each["enum"])
        else:
            kind = _type_name(each, False).replace(" | ", " or ")
        shown.append(item.format(name, kind + ("" if name in schema["required"] else ", optional")))
    return between.join(shown)


def _show(rng: random.Random, record: Record, schema: dict[str, Any]) -> str:
    """The schema as a user writes it: JSON schema, TypeScript, or a list of fields."""
    how = rng.random()
    if how < 0.5:
        shown = schema
        if rng.random() < 0.15:
            shown = schema | {"additionalProperties": False}
        if rng.random() < 0.15:
            shown = {"title": record.what} | shown
        layout = rng.random()
        if layout < 0.45:
            return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
        return json.dumps(shown, ensure_ascii=False, indent=2 if layout > 0.92 else None)
    if how < 0.7:
        name = record.what.capitalize()
        body = _typescript(schema, pick(rng, (";", ",", ";")))
        return pick(rng, ("interface {} {}", "type {} = {}", "{1}")).format(name, body)
    if how < 0.85:
        return _list(schema, "{} ({})", ", ")
    return "\n" + _list(schema, pick(rng, ("- {}: {}", "* {} ({})", "{}: {}")), "\n")


# ------------------------------------------------------------------------------------------------------------ facts


def _draw(rng: random.Random, split: Split, field: Field) -> Any:
    if field.choices:
        return pick(rng, field.choices)
    if field.param.kind == "flag":
        return rng.random() < 0.5
    return KINDS[field.param.kind][1](rng, split)


def _values(rng: random.Random, split: Split, record: Record) -> dict[str, Any]:
    """The values that the text will tell. A nullable or an optional field may stay untold."""
    told: dict[str, Any] = {}
    for field in record.fields:
        if rng.random() < (0.5 if field.nullable else 1.0 if field.required else 0.6):
            value = _draw(rng, split, field)
            while not isinstance(value, bool) and value in told.values():
                value = _draw(rng, "train" if split == "train" else "values", field)
            told[field.name] = value
    return told


def _spoken(rng: random.Random, value: Any) -> str:
    if isinstance(value, bool):
        return pick(rng, ("no", "false", "yes", "true")[2 * value :][:2])
    if isinstance(value, list):
        return ", ".join(value[:-1]) + " and " + value[-1]
    return str(value)


class Text(NamedTuple):
    """A text that tells the values of a record, and where it tells each."""

    text: str
    words: dict[str, str]  # field -> the words of the text that tell it


def _key_words(name: str) -> str:
    """`has_garden` and `hasGarden` as a text says them: `has garden`."""
    return re.sub("([a-z])([A-Z])", r"\1 \2", name).replace("_", " ").lower()


def _names(name: str, clause: str) -> bool:
    """Whether the clause says a word of the key, so that a reader who never saw the topic can match the two."""
    return any(word in clause.lower() for word in _key_words(name).split() if word not in ("is", "has"))


def _told_by_topic(rng: random.Random, param: Param, value: Any) -> str:
    says = param.denies if value is False else param.says
    if param.inline and (not says or rng.random() < 0.4):
        return pick(rng, param.inline).replace("{}", _spoken(rng, value))
    return pick(rng, says).replace("{}", _spoken(rng, value)) if says else ""


_BY_NAME = (
    "The {} is {}.", "Its {} is {}.", "{}: {}.", "{} = {}.", "The {}: {}.", "It has the {} {}.", " with {} {}",
    " with the {} {}", "{1} is the {0}.",
)  # fmt: skip
_YES = ("It has {}.", "It has a {}.", "It is {}.", "{}: yes.", "{}: true.", "With {}.")
_NO = ("It has no {}.", "There is no {}.", "It is not {}.", "{}: no.", "{}: false.", "Without {}.")


def _told_by_name(rng: random.Random, field: Field, value: Any) -> str:
    """A fact in a shape that fits every key, so that finding the key in the text is enough."""
    name = field.name if field.plain or rng.random() < 0.25 else _key_words(field.name)
    if isinstance(value, bool):
        name = name if field.plain else name.removeprefix("is ").removeprefix("has ")
        return pick(rng, _YES if value else _NO).format(name)
    if isinstance(value, list) and rng.random() < 0.5:
        return f"The {name} are {_spoken(rng, value)}."
    return pick(rng, _BY_NAME).format(name, _spoken(rng, value))


def _text(rng: random.Random, record: Record, told: dict[str, Any], held: bool) -> Text:
    """The facts, in any order: as `name: value`, or as sentences about the thing."""
    fields = [field for field in record.fields if field.name in told]
    rng.shuffle(fields)
    words: dict[str, str] = {}
    if rng.random() < 0.22:
        colon = pick(rng, (": ", " = ", " is ", ": "))
        for field in fields:
            words[field.name] = field.name.replace("_", " ") + colon + _spoken(rng, told[field.name])
        return Text(pick(rng, (", ", "; ", "\n", ", ")).join(words.values()), words)
    inside: list[str] = []
    after: list[str] = []
    for field in fields:
        param, value = field.param, told[field.name]
        clause = "" if field.plain or rng.random() < 0.4 else _told_by_topic(rng, param, value)
        if not clause or (held and not _names(field.name, clause)):
            clause = _told_by_name(rng, field, value)
        (inside if clause[0] == " " else after).append(clause)
        words[field.name] = clause.strip().removesuffix(".")
    article = "an" if record.what[0] in "aeio" else "a"
    opening = ""
    if inside or rng.random() < 0.3:
        opening = pick(rng, ("{A} {w}", "This is {a} {w}", "There is {a} {w}", "We have {a} {w}", "I have {a} {w}"))
        opening = opening.format(A=article.capitalize(), a=article, w=record.what) + "".join(inside) + "."
    return Text(" ".join([opening, *after]).strip(), words)


def _object(record: Record, told: dict[str, Any]) -> dict[str, Any]:
    """The object in the schema's order; nullable fields that the text does not tell are null."""
    result: dict[str, Any] = {}
    for field in record.fields:
        place = result.setdefault(record.outer, {}) if record.nested(field) else result
        if field.name in told:
            place[field.name] = told[field.name]
        elif field.nullable:
            place[field.name] = None
    return result


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _thought(record: Record, told: dict[str, Any], words: dict[str, str]) -> str:
    lines: list[str] = []
    for field in record.fields:
        path = f"{record.outer}.{field.name}" if record.nested(field) else field.name
        if field.name in told:
            lines.append(f"{path}: {words[field.name]} -> {_compact(told[field.name])}")
        else:
            lines.append(f"{path}: {'null' if field.nullable else 'none'}")
    return "\n".join(lines)


_SYSTEM = (
    "You answer only with JSON.", "Reply with a JSON object and nothing else.", "You turn text into JSON.",
    "You are a helpful assistant.", "Extract data as JSON.",
)  # fmt: skip
_INSTANT = 0.12  # share of training samples without thinking; evaluation always thinks


def extract(rng: random.Random, split: Split) -> Sample:
    """Facts and a schema in, an object out; one time in fourteen a list of objects of one kind."""
    record = _record(rng, split)
    schema = _schema(record)
    shown = _show(rng, record, schema)
    if rng.random() < 0.07 and len(record.fields) <= 3:
        all_told = [_values(rng, split, record) for _ in range(2)]
        key = pick(rng, ("items", "list", "results", "entries", "rows"))
        if rng.random() < 0.5:
            shown = f"{shown}\nReturn both under the key {key}."
        else:
            shown = f'{{"{key}": [...]}} where each entry is {shown.strip()}'
        texts = [_text(rng, record, told, split == "families") for told in all_told]
        text = "First: {} Second: {}".format(*[each.text for each in texts])
        thoughts = [_thought(record, told, each.words) for told, each in zip(all_told, texts, strict=True)]
        thought = "\n".join([f"{i}.\n{each}" for i, each in enumerate(thoughts, 1)])
        value: dict[str, Any] = {key: [_object(record, told) for told in all_told]}
        schema = {"type": "object", "properties": {key: {"type": "array", "items": schema}}, "required": [key]}
    else:
        told = _values(rng, split, record)
        text, words = _text(rng, record, told, split == "families")
        thought, value = _thought(record, told, words), _object(record, told)
    frame = pick(rng, HELD_FRAMES if split == "families" else FRAMES)
    prompt = frame.replace("{record}", record.what).replace("{schema}", shown).replace("{text}", text)
    reply: dict[str, Any] = {"role": "assistant", "content": _compact(value)}
    thinking = split != "train" or rng.random() >= _INSTANT
    if thinking:
        reply["reasoning_content"] = thought
    messages = [{"role": "user", "content": prompt}, reply]
    if rng.random() < 0.15:
        messages.insert(0, {"role": "system", "content": pick(rng, _SYSTEM)})
    return Sample("json", messages, thinking=thinking, check={"json": {"schema": schema, "value": value}})


GENERATORS: dict[str, tuple[Generator, float]] = {"json": (extract, 1.0)}


def families(kind: str) -> tuple[int, int]:
    """How many phrase families and kinds of records there are: (for training, held out)."""
    assert kind == "json", kind
    return len(FRAMES) + len(RECORDS), len(HELD_FRAMES) + len(HELD_RECORDS)
