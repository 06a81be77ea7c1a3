"""The functions that nano learns to write are right, and the held-out ways to ask for them stay out of training."""

import random
import re
from itertools import pairwise

import pytest

from nano import data_code
from nano.data_code import NAMED, NAMELESS, STEPS_NAMED, code, families
from nano.sample import Sample, Split
from redline.bench.quality.checks import grade


def drawn(split: Split, count: int) -> list[Sample]:
    rng = random.Random(f"code {split}")
    return [code(rng, split) for _ in range(count)]


def program(sample: Sample) -> dict[str, object]:
    scope: dict[str, object] = {}
    fenced = re.fullmatch(r"```python\n(.*)\n```", sample.messages[-1]["content"], re.S)
    assert fenced, sample
    exec(fenced[1], scope)
    return scope


@pytest.mark.parametrize("split", ["values", "families"])
def test_every_function_passes_its_own_asserts(split: Split) -> None:
    for sample in drawn(split, 500):
        assert sample.check
        exec(sample.check["asserts"]["code"], program(sample))


def test_the_grader_that_runs_code_agrees() -> None:
    for sample in drawn("families", 3):
        assert sample.check
        assert grade(sample.check, sample.messages[-1]["content"], [], run_code=True).ok


@pytest.mark.parametrize("split", ["train", "values", "families"])
def test_a_name_that_the_user_gives_is_used(split: Split) -> None:
    for sample in drawn(split, 500):
        name = sample.check and sample.check["asserts"]["function"]
        if name:
            assert re.search(rf"\b{name}\b", sample.messages[0]["content"], re.I)
            assert f"def {name}(" in sample.messages[-1]["content"]


@pytest.mark.parametrize("split", ["train", "values"])
def test_the_thinking_names_the_parameters_that_the_function_has(split: Split) -> None:
    for sample in drawn(split, 500):
        if sample.thinking:
            thought, answer = (sample.messages[-1][key] for key in ("reasoning_content", "content"))
            assert thought.startswith(f"Function {answer.removeprefix('```python').split('def ')[1].split(':')[0]}. ")


KNOWN = {  # expected results of known functions, written by hand
    "gcd": ((12, 18), 6),
    "lcm": ((4, 6), 12),
    "factorial": ((5,), 120),
    "is_prime": ((91,), False),
    "primes_up_to": ((12,), [2, 3, 5, 7, 11]),
    "fibonacci": ((10,), 55),
    "fibonacci_list": ((6,), [0, 1, 1, 2, 3, 5]),
    "digit_sum": ((407,), 11),
    "reverse_digits": ((130,), 31),
    "clamp": ((15, 0, 10), 10),
    "to_fahrenheit": ((100,), 212),
    "to_celsius": ((212,), 100),
    "is_leap_year": ((1900,), False),
    "sign": ((-4,), -1),
    "collatz_steps": ((6,), 8),
    "divisors": ((12,), [1, 2, 3, 4, 6, 12]),
    "sum_to": ((100,), 5050),
    "fizzbuzz": ((30,), "FizzBuzz"),
    "count_vowels": (("Education",), 5),
    "count_consonants": (("Hello you",), 4),
    "remove_vowels": (("Apple pie",), "ppl p"),
    "is_palindrome": (("level",), True),
    "capitalize_words": (("the old cat",), "The Old Cat"),
    "reverse_words": (("one two three",), "three two one"),
    "initials": (("as soon as possible",), "ASAP"),
    "is_anagram": (("listen", "silent"), True),
    "count_characters": (("aba",), {"a": 2, "b": 1}),
    "most_common": (([1, 2, 2, 3],), 2),
    "invert": (({"a": 1, "b": 2},), {1: "a", 2: "b"}),
    "group_by_length": ((["a", "to", "be"],), {1: ["a"], 2: ["to", "be"]}),
    "second_largest": (([4, 9, 9, 7],), 7),
    "remove_duplicates": (([1, 2, 1, 3, 2],), [1, 2, 3]),
    "flatten": (([[1], [], [2, 3]],), [1, 2, 3]),
    "chunk": (([1, 2, 3, 4, 5], 2), [[1, 2], [3, 4], [5]]),
    "rotate": (([1, 2, 3, 4], 1), [2, 3, 4, 1]),
    "running_sum": (([1, 2, 3],), [1, 3, 6]),
    "differences": (([1, 4, 9],), [3, 5]),
    "dot_product": (([1, 2], [3, 4]), 11),
    "swap_ends": (([1, 2, 3],), [3, 2, 1]),
    "median": (([5, 1, 4, 2],), 3),
    "min_of_three": ((3, 1, 2), 1),
    "is_divisible": ((12, 5), False),
    "remainder": ((17, 5), 2),
    "average": (([1, 2, 6],), 3),
    "sum_even": (([1, 2, 4],), 6),
    "last_letter": (("stone",), "e"),
    "square_all": (([1, -2],), [1, 4]),
    "is_empty": (([],), True),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_shelf_gives_what_we_know_by_hand(name: str) -> None:
    task = next(task for task in data_code._SHELF if task.name == name)
    scope: dict[str, object] = {}
    exec(f"def f({', '.join(parameter for parameter, _ in task.parameters)}):\n{task.body}", scope)
    arguments, expected = KNOWN[name]
    function = scope["f"]
    assert callable(function)
    assert function(*arguments) == expected


def test_compositions_say_and_do_the_same() -> None:
    evens = next(part for part in data_code.NUMBER_FILTERS if part.label == "even")
    assert eval(f"[n for n in range(6) if {evens.code.format(v='n')}]") == [0, 2, 4]
    for part in [*data_code.NUMBER_AGGREGATES, *data_code.NUMBER_MAPS, *data_code.NUMBER_FILTERS]:
        assert all("{x}" in noun for noun in (*part.noun.train, *part.noun.held)), part
        assert bool(part.constant) == ("{k}" in part.code), part


def test_held_out_frames_never_ask_in_training() -> None:
    prompts = [sample.messages[0]["content"].lower() for sample in drawn("train", 6_000)]
    for held in (*NAMED.held, *NAMELESS.held, *STEPS_NAMED.held):
        between = [piece.lower() for piece in re.split(r"\{\w\}", held) if len(piece) > 12]
        pattern = re.compile(".+".join(map(re.escape, between)) if between else r"\0")
        assert not any(pattern.match(prompt) for prompt in prompts), held


def test_classics_are_asked_for_in_a_few_words_and_by_name_alone() -> None:
    prompts = [sample.messages[0]["content"].lower().rstrip(".?") for sample in drawn("train", 12_000)]
    assert any("function that adds two numbers" in prompt for prompt in prompts)
    assert any(re.search(r"write `?reverse_string(\(\w+\))?`?$", prompt) for prompt in prompts)
    for phrases in data_code.PHRASES.values():
        for held in phrases.held:
            # "returns ..." also occurs in other frames with other descriptions
            if not held.startswith("returns "):
                assert not any(prompt.endswith(held.lower()) for prompt in prompts), held
    names = {name.lower() for name in data_code.PHRASES}
    for held in data_code.NAME_ONLY.held:
        asked = {held.lower().rstrip(".?").replace("{f}", name) for name in names}
        assert asked.isdisjoint(prompts), held


def test_held_out_compositions_are_never_trained() -> None:
    rng = random.Random(1)
    for _ in range(2_000):
        keep, change, total = data_code._composition(rng, rng.random() < 0.4, False)
        assert not data_code._held([part.label for part in (keep, change, total) if part and part.label != "list"])


def test_a_fifth_of_the_wordings_is_held_out() -> None:
    train, held = families("code")
    assert held / (train + held) >= 0.2


def test_a_seed_gives_the_same_samples() -> None:
    assert drawn("train", 50) == drawn("train", 50)
    assert all(a != b for a, b in pairwise(drawn("train", 10)))
