"""Tool declarations, character for character: the TypeScript that K2.5 was trained on, and the earlier JSON."""

from typing import Any

import pytest

from redline.chat.conversation import Tool
from redline.chat.tools import declare_json, declare_typescript


def declared(parameters: dict[str, Any], description: str = "") -> str:
    """The declarations inside the namespace."""
    text = declare_typescript((Tool(name="f", description=description, parameters=parameters),))
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(head), text
    assert text.endswith(tail)
    return text.removeprefix(head).removesuffix(tail)


def field(schema: Any) -> str:
    """The declaration of one required property `x`, with its comments."""
    text = declared({"type": "object", "properties": {"x": schema}, "required": ["x"]})
    head, tail = "type f = (_: {\n", "\n}) => any;"
    return text.removeprefix(head).removesuffix(tail)


def test_a_function_without_parameters_takes_an_empty_object():
    assert declared({}) == "type f = (_: {}) => any;"
    assert declared({"type": "object", "properties": {}}) == "type f = (_: {}) => any;"


def test_descriptions_are_comments_and_empty_lines_stay_empty():
    assert declared({}, "One.\n\nTwo.") == "// One.\n\n// Two.\ntype f = (_: {}) => any;"


def test_required_parameters_come_first_and_each_group_is_alphabetical():
    properties = {name: {"type": "string"} for name in ("d", "b", "c", "a")}
    text = declared({"type": "object", "properties": properties, "required": ["c", "b"]})
    assert text == "type f = (_: {\n  b: string,\n  c: string,\n  a?: string,\n  d?: string\n}) => any;"


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, "  x: string"),
        ({"type": "integer"}, "  x: number"),
        ({"type": "boolean"}, "  x: boolean"),
        ({}, "  x: any"),
        (True, "  x: any"),
        (False, "  x: null"),
        ({"enum": ["a", "b"]}, '  x: "a" | "b"'),
        ({"type": ["string", "null"], "enum": ["a", None]}, '  x: "a" | None'),
        ({"type": "integer", "enum": [1, 2]}, "  x: 1 | 2"),
        ({"enum": [True]}, "  x: True"),
        ({"anyOf": [{"type": "string", "description": "lost"}, {"type": "null"}]}, "  x: string | null"),
        ({"type": ["integer", "object", "array"]}, "  x: number | {} | Array<any>"),
        ({"type": "array"}, "  x: Array<any>"),
        ({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}, "  x: Array<Array<number>>"),
        ({"type": "object"}, "  x: {}"),
        ({"type": "object", "additionalProperties": True}, "  x: {\n    [k: string]: any\n  }"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "  x: {\n    [k: string]: number\n  }"),
        ({"type": "string", "description": "One\nTwo"}, "  // One\n  // Two\n  x: string"),
        (
            {"type": "string", "pattern": "^a", "minLength": 1, "maxLength": 5, "format": "date"},
            "  // maxLength: 5, minLength: 1, pattern: ^a\n  x: string",
        ),
        ({"type": "number", "minimum": 0.5, "maximum": 2}, "  // maximum: 2, minimum: 0.5\n  x: number"),
        ({"type": "array", "minItems": 1, "maxItems": 2}, "  // maxItems: 2, minItems: 1\n  x: Array<any>"),
        ({"type": "string", "minimum": 1}, "  x: string"),
        ({"type": "string", "default": 'é"'}, '  // Default: "é\\""\n  x: string'),
        ({"type": "boolean", "default": False}, "  // Default: False\n  x: boolean"),
        ({"type": "array", "default": [1, {"b": 1, "a": 2}]}, '  // Default: [1, {"a": 2, "b": 1}]\n  x: Array<any>'),
        (
            {"type": "array", "items": {"type": "string", "description": "D", "minLength": 1}},
            "  x: Array<\n    // D\n    // minLength: 1\n    string\n  >",
        ),
        (
            {"type": "object", "properties": {"z": {"type": "string"}, "y": {"type": "object"}}, "required": ["z"]},
            "  x: {\n    z: string,\n    y?: {}\n  }",
        ),
    ],
)
def test_a_schema_is_written_as_the_model_learned_it(schema: Any, text: str):
    assert field(schema) == text


def test_definitions_become_interfaces():
    node = {"type": "object", "description": "A node.", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    text = declared({"type": "object", "$defs": {"Node": node}, "properties": {"head": {"$ref": "#/$defs/Node"}}})
    assert text == (
        "// A node.\ninterface Node {\n  next?: Node\n}\n"  # the reference to itself resolves
        "type f = (_: {\n  head?: Node\n}) => any;"
    )


def test_a_schema_that_refers_to_itself_becomes_an_interface():
    properties = {"children": {"type": "array", "items": {"$ref": "#"}}, "name": {"type": "string"}}
    text = declared({"type": "object", "properties": properties, "required": ["name"]}, "Tree.")
    assert text == (
        "interface parameters {\n  children?: Array<parameters>,\n  name: string\n}\n"  # alphabetical, as upstream
        "// Tree.\ntype f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}]},
        {"$ref": "#/definitions/X"},
        {"$ref": "#/$defs/Missing"},
        {"type": "integer", "enum": ["a"]},
        {"type": ["string", "integer"], "enum": ["a"]},
        {"type": ["string", "odd"]},
        {"type": "string", "description": 7},
        "string",
    ],
)
def test_a_schema_without_a_typescript_form_falls_back_to_json_for_all_tools(schema: Any):
    tools = (Tool(name="ok"), Tool(name="f", parameters={"type": "object", "properties": {"x": schema}}))
    assert declare_typescript(tools) == declare_json(tools)


def test_json_is_compact_with_every_key_sorted():
    tool = Tool(
        name="f", description="É", parameters={"type": "object", "properties": {"b": {}, "a": {"z": 1, "y": [2]}}}
    )
    assert declare_json((tool,)) == (
        '[{"function":{"description":"É","name":"f","parameters":'
        '{"properties":{"a":{"y":[2],"z":1},"b":{}},"type":"object"}},"type":"function"}]'
    )


def test_tools_stand_in_the_order_in_which_they_were_given():
    text = declare_typescript((Tool(name="b"), Tool(name="a")))
    assert (
        text
        == "# Tools\n\n## functions\nnamespace functions {\ntype b = (_: {}) => any;\ntype a = (_: {}) => any;\n}\n"
    )


def test_a_function_without_parameters_is_declared_as_one_of_which_they_are_empty():
    for declare in (declare_typescript, declare_json):
        assert declare((Tool(name="a"),)) == declare((Tool(name="a", parameters={}),))
    assert "parameters" not in declare_json((Tool(name="a"),))
