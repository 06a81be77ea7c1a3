"""The hand-written set is well formed, its functions can be written, and no generator produces its prompts."""

import json
import random
from pathlib import Path

import jsonschema

import nano
from nano import data_chat, data_code, data_recall, data_words
from redline.bench.quality.checks import grade

HAND = [
    json.loads(line) for line in (Path(nano.__file__).parent / "texts" / "hand.jsonl").read_text("utf-8").splitlines()
]


def test_there_are_at_least_120_different_prompts() -> None:
    assert len({json.dumps(line["messages"]) for line in HAND}) >= 120


def test_every_check_is_one_that_the_grader_knows() -> None:
    for line in HAND:
        assert line["messages"][-1]["role"] in ("user", "tool")
        grade(line["check"], "", [])


def test_json_values_fit_their_schemas_and_tool_calls_their_tools() -> None:
    for line in HAND:
        if "json" in line["check"]:
            jsonschema.validate(line["check"]["json"]["value"], line["check"]["json"]["schema"])
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in line.get("tools", [])}
        for call in line["check"].get("tool_calls", []):
            jsonschema.validate(call["arguments"], tools[call["name"]])
            assert not call["arguments"].keys() - tools[call["name"]]["properties"].keys()


SOLUTIONS = """
def f(x): return sum(n for n in x if n % 2 == 0)
def is_palindrome(word): return word == word[::-1]
def f(x): return sum(1 for c in x if c in "aeiou")
def biggest(numbers): return max(numbers)
def flip(s): return s[::-1]
def fact(n): return 1 if n < 2 else n * fact(n - 1)
def squares_up_to(x): return [n * n for n in x]
def f(n): return n > 1 and all(n % i for i in range(2, n))
def f(c): return c * 9 / 5 + 32
def count_long(words): return sum(1 for w in words if len(w) > 5)
def f(d): return {v: k for k, v in d.items()}
def gcd(a, b): return a if b == 0 else gcd(b, a % b)
def f(x): return list(dict.fromkeys(x))
def shout(text): return text.upper()
def age_group(age): return "adult" if age >= 18 else "child"
def f(x): return sum(x) / len(x)
"""


def test_the_functions_asked_for_can_be_written() -> None:
    lines = [line for line in HAND if line["kind"] == "code"]
    for line, solution in zip(lines, SOLUTIONS.strip().splitlines(), strict=True):
        scope: dict[str, object] = {}
        exec(solution, scope)
        exec(line["check"]["asserts"]["code"], scope)


def test_training_does_not_contain_what_was_typed_by_hand() -> None:
    rng = random.Random(0)
    generators = [
        generator
        for module in (data_chat, data_code, data_recall, data_words)
        for kind, (generator, _) in module.GENERATORS.items()
        if kind != "recall"
    ]
    trained = {generator(rng, "train").messages[-2]["content"] for generator in generators for _ in range(5_000)}
    typed = [line["messages"][-1]["content"] for line in HAND if len(line["messages"][-1]["content"]) > 40]
    assert not trained & set(typed)
