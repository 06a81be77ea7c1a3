"""Renders the OpenAPI document as one HTML page without scripts or external resources."""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from redline.api.openapi.operation import Schema

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_STYLE = """
:root{color-scheme:light dark;--line:light-dark(#ddd,#3a3a3a);--soft:light-dark(#666,#aaa);
--ground:light-dark(#f6f6f4,#202022);--link:light-dark(#b3202a,#ff8a80)}
*{box-sizing:border-box}html{scroll-padding-top:1em}
body{margin:0;font:15px/1.5 system-ui,sans-serif;display:grid;grid-template-columns:19em minmax(0,1fr)}
nav{position:sticky;top:0;height:100vh;overflow:auto;padding:1.2em;border-right:1px solid var(--line);font-size:13px}
nav b{display:block;margin:1.2em 0 .3em}nav a{display:block;padding:.1em 0;overflow-wrap:anywhere}
main{padding:1em 2.5em 6em;max-width:66em}a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
h1{margin:.2em 0}h2{margin:2.5em 0 0;padding-top:.6em;border-top:2px solid var(--line);font-size:1.5em}
h3{margin:2em 0 .2em;font-size:1.1em}h4{margin:1.2em 0 .2em;font-size:.95em}p,ul{margin:.4em 0}
code,pre{font:13px/1.5 ui-monospace,monospace}pre{background:var(--ground);padding:.8em 1em;white-space:pre-wrap;
overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;font-size:14px}
td,th{text-align:left;vertical-align:top;padding:.3em 1em .3em 0;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:normal}td:first-child{white-space:nowrap;width:1%}summary{cursor:pointer;margin:.6em 0}
.method{display:inline-block;min-width:4.6em;color:var(--soft);font:12px ui-monospace,monospace}.soft{color:var(--soft)}
@media(max-width:60em){body{display:block}nav{position:static;height:auto;border:0}main{padding:1em}}
"""


def page(document: Schema) -> str:
    """The document as an HTML page."""
    pieces = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>Redline API</title><style>{_STYLE}</style><nav>{''.join(_links(document))}</nav><main>",
        f"<h1>Redline {escape(document['info']['version'])}</h1>",
        '<p>Requests and responses of this server, with its limits and defaults. For programs: <a href="openapi.json">'
        "openapi.json</a>, an OpenAPI 3.1 document.</p>",
    ]
    for group in _groups(document):
        pieces.append(f'<h2 id="{escape(group)}">{escape(group)}</h2>')
        for path, method, told in _operations(document):
            if group in told["tags"]:
                pieces += _section(document, path, method, told)
    pieces.append('<h2 id="schemas">Schemas</h2>')
    for name, schema in document["components"]["schemas"].items():
        pieces.append(f'<h3 id="{escape(name)}">{escape(name)}</h3>{_fields(schema)}')
    return "".join([*pieces, "</main></html>"])


def _groups(document: Schema) -> list[str]:
    return [tag["name"] for tag in document["tags"]]


def _operations(document: Schema) -> Iterator[tuple[str, str, Schema]]:
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            yield path, method.upper(), told


def _links(document: Schema) -> Iterator[str]:
    yield '<a href="#">Redline API</a>'
    for group in _groups(document):
        yield f"<b>{escape(group)}</b>"
        for path, method, told in _operations(document):
            if group in told["tags"]:
                yield f'<a href="#{told["operationId"]}"><span class="method">{method}</span>{escape(path)}</a>'
    yield '<b><a href="#schemas">Schemas</a></b>'
    for name in document["components"]["schemas"]:
        yield f'<a href="#{escape(name)}">{escape(name)}</a>'


def _section(document: Schema, path: str, method: str, told: Schema) -> Iterator[str]:
    yield f'<h3 id="{told["operationId"]}"><code>{method} {escape(path)}</code></h3><p>{escape(told["summary"])}.'
    if "security" in told:
        yield ' <span class="soft">Needs a key: <code>Authorization: Bearer</code> or <code>X-Api-Key</code>.</span>'
    yield "</p>"
    if "description" in told:
        notes = (f"<li>{escape(note.removeprefix('- '))}" for note in told["description"].split("\n"))
        yield f"<ul>{''.join(notes)}</ul>"
    yield f"<pre>{escape(_call(path, method, told))}</pre>"
    if "requestBody" in told:
        name = _name(told["requestBody"]["content"]["application/json"]["schema"])
        yield f'<h4>Body: <a href="#{escape(name)}">{escape(name)}</a></h4>'
        yield _fields(document["components"]["schemas"][name])
    content = told["responses"]["200"]["content"]
    for kind, answer in content.items():
        if "x-event" in answer:
            *shapes, _ = answer["x-event"]["anyOf"]
            yield f"<details><summary>{escape(told['responses']['200']['description'])}</summary>"
            for event in [_resolved(document, inner) for one in shapes for inner in one.get("anyOf", [one])]:
                [name] = event["properties"].get("type", {}).get("enum", [""])
                yield f"<h4>{escape(name)}</h4>{_fields(event)}"
            yield "</details>"
        elif "$ref" in answer["schema"]:
            yield f"<details><summary>Response: {_kind(answer['schema'])}</summary>"
            yield f"{_fields(_resolved(document, answer['schema']))}</details>"
        else:
            yield f"<p>Response: {escape(kind)}</p>"
    rows = [
        (f"<code>{status}</code>", escape(answer["description"]))
        for status, answer in told["responses"].items()
        if status != "200"
    ]
    yield f"<details><summary>Errors</summary>{_table(('Status', 'Meaning'), rows)}"
    yield f"<p>Format: {_kind(told['responses']['500']['content']['application/json']['schema'])}.</p></details>"


def _call(path: str, method: str, told: Schema) -> str:
    """The request as a curl command."""
    for parameter in told.get("parameters", ()):
        path = path.replace(f"{{{parameter['name']}}}", str(parameter.get("example")))
    words = ["curl"] if method == "GET" else ["curl", "-X", method]
    if method == "POST":
        words = ["curl", "-H 'content-type: application/json'"]
        body: Any = told["requestBody"]["content"]["application/json"]["example"] if "requestBody" in told else {}
        words.append(f"-d '{json.dumps(body)}'")
    return " ".join([*words[:1], f"http://127.0.0.1:8000{path}", *words[1:]])


def _fields(schema: Schema) -> str:
    """A table of an object's fields; fields that are not supported are listed below it."""
    required = schema.get("required", ())
    refused = {
        field for field, told in schema["properties"].items() if told.get("description", "").startswith("Not se")
    }
    rows = [
        (f"<code>{escape(field)}</code>{' <b>*</b>' if field in required else ''}", _cell(told))
        for field, told in schema["properties"].items()
        if field not in refused
    ]
    said = _table(("Field", "Is"), rows)
    if required and len(required) < len(schema["properties"]):
        said += '<p class="soft">* required</p>'
    if refused:
        names = ", ".join(f"<code>{escape(field)}</code>" for field in schema["properties"] if field in refused)
        said += f"<details><summary>{len(refused)} fields that are rejected by name</summary><p>{names}</p></details>"
    return said


def _cell(told: Schema) -> str:
    parts = [_kind(told)]
    if told.get("default") is not None:
        parts.append(f'<span class="soft">; default <code>{escape(json.dumps(told["default"]))}</code></span>')
    if "description" in told:
        parts.append(f"<br>{escape(told['description'])}")
    return "".join(parts)


def _kind(told: Schema) -> str:
    """A description of a schema; empty for null."""
    if "$ref" in told:
        return f'<a href="#{escape(_name(told))}">{escape(_name(told))}</a>'
    if "const" in told:
        return f"<code>{escape(json.dumps(told['const']))}</code>"
    if "enum" in told and told["enum"] != [None]:
        return " · ".join(f"<code>{escape(json.dumps(value))}</code>" for value in told["enum"] if value is not None)
    if "anyOf" in told:
        some = [one for one in told["anyOf"] if one.get("type") != "null"]
        bounds = _bounds({key: value for key, value in told.items() if key != "anyOf"})
        return " or ".join(dict.fromkeys(said for one in some if (said := _kind(one)))) + bounds
    kinds = told.get("type", "anything")
    kinds = [kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null"]
    said = " or ".join(kinds)
    if kinds == ["array"]:
        said = f"list of {_kind(told['items'])}" if "items" in told else "list"
    elif kinds == ["object"] and told.get("properties"):
        inner = ", ".join(f"{escape(field)}: {_kind(one)}" for field, one in told["properties"].items())
        said = f"{{{inner}}}"
    elif kinds == ["object"] and isinstance(told.get("additionalProperties"), dict) and told["additionalProperties"]:
        said = f"object of {_kind(told['additionalProperties'])}"
    return said + _bounds(told)


_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minItems": "{} or more",
    "maxItems": "at most {}",
    "maxProperties": "at most {}",
    "minLength": "{} characters or more",
    "maxLength": "at most {} characters",
}


def _bounds(told: Schema) -> str:
    words = [words.format(_number(told[key])) for key, words in _BOUNDS.items() if key in told]
    return f' <span class="soft">({escape(", ".join(words))})</span>' if words else ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _resolved(document: Schema, schema: Schema) -> Schema:
    return document["components"]["schemas"][_name(schema)]


def _name(schema: Schema) -> str:
    return schema["$ref"].rpartition("/")[2]


def _table(head: tuple[str, str], rows: list[tuple[str, Any]]) -> str:
    body = "".join(f"<tr><td>{left}<td>{right}" for left, right in rows)
    return f"<table><tr><th>{head[0]}<th>{head[1]}{body}</table>"
