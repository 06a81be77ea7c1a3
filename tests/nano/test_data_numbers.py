"""Arithmetic data: the written work is right line by line, and reserved problems never occur in training."""

import random
import re

import pytest

from nano.data_numbers import GENERATORS, families, held_value
from nano.data_numbers_steps import WORK
from nano.data_numbers_stories import (
    HELD_STORIES,
    HELD_TWO_STEP,
    HELD_WOVEN,
    STORIES,
    TWO_STEP,
    WOVEN,
)
from nano.data_numbers_wordings import CORES, FRAMES, HELD_CORES, HELD_FRAMES
from nano.sample import Sample, Split
from redline.bench.quality.checks import grade

SPLITS: tuple[Split, ...] = ("train", "values", "families")
PYTHON = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
HEADER = re.compile(r"(\d+) ([-+*/]) (\d+)")


def draw(kind: str, split: Split, count: int, seed: int = 1) -> list[Sample]:
    rng = random.Random(seed)
    return [GENERATORS[kind][0](rng, split) for _ in range(count)]


def thought(sample: Sample) -> str:
    return sample.messages[-1].get("reasoning_content", "")


def prompt(sample: Sample) -> str:
    return sample.messages[-2]["content"]


def wrong_line(line: str) -> str:
    """Recompute one line from its own tokens; returns a description of the error."""
    if m := re.fullmatch(r"(\d)\+(\d)\+(\d)=(\d+) -> (\d+), carry (\d)", line):
        x, y, carry_in, total, done, carry = (int(m[i]) if i != 5 else m[5] for i in range(1, 7))
        right = x + y + carry_in == total and carry == total // 10 and int(done[0]) == total % 10
    elif m := re.fullmatch(r"(\d)-(\d)-(\d)=(-?\d+) -> (\d+), borrow (\d)", line):
        x, y, borrow_in, left, done, borrow = (int(m[i]) if i != 5 else m[5] for i in range(1, 7))
        right = x - y - borrow_in == left and borrow == (left < 0) and int(done[0]) == left % 10
    elif m := re.fullmatch(r"(\d)\*(\d)=(\d+), \+(\d)=(\d+) -> (\d+), carry (\d)", line):
        x, y, product, carry_in, total, done, carry = (int(m[i]) if i != 6 else m[6] for i in range(1, 8))
        right = x * y == product and product + carry_in == total and carry == total // 10
        right = right and int(done[0]) == total % 10
    elif m := re.fullmatch(r"(\d+): (\d):(\d+), rest ([-\d=>, ]+) = (\d+) -> (\d+), left (\d+|none)", line):
        columns = [re.fullmatch(r"(\d)-(\d)-(\d)=(-?\d+) -> (\d)", column) for column in m[4].split(", ")]
        digits, borrow, right = "", 0, True
        for column in columns:
            assert column, line
            x, y, borrow_in, below, digit = map(int, column.groups())
            right = right and x - y - borrow_in == below and digit == below % 10 and borrow_in == borrow
            digits, borrow = column[5] + digits, int(below < 0)
        right = right and int(m[1]) - int(m[3]) == int(m[5]) and digits == m[5] and m[6][-1] == m[2]
    elif m := re.fullmatch(r"0:0+((?: \d:\d+){9})", line):
        multiples = [int(part.split(":")[1]) for part in m[1].split()]
        right = multiples == [multiples[0] * i for i in range(1, 10)]
    elif m := re.fullmatch(r"(\d+) (<|>=) (\d+)(?:, so minus \((\d+) - (\d+)\))?", line):
        right = (int(m[1]) < int(m[3])) == (m[2] == "<") and (not m[4] or (m[4], m[5]) == (m[3], m[1]))
    else:
        right = bool(
            HEADER.fullmatch(line)
            or re.fullmatch(r"= -?\d+( remainder \d+)?|[A-Z].*\.|\d+ (times|divided by) \d+\.", line)
        )
    return "" if right else line


@pytest.mark.parametrize("operation", WORK)
def test_every_line_of_the_written_work_is_true_and_the_next_follows_from_it(operation: str) -> None:
    rng = random.Random(3)
    pairs = [(a, b) for a in range(40) for b in range(1, 40)]
    pairs += [(rng.randrange(10**4), rng.randrange(1, 10**3)) for _ in range(700)]
    sign = {"add": "+", "sub": "-", "mul": "*", "div": "/"}[operation]
    for a, b in pairs:
        if operation == "div" and b > 99:
            continue
        work = WORK[operation](a, b)
        assert not [line for line in work.lines if wrong_line(line)], work.lines
        assert work.result == PYTHON[sign](a, b)
        assert work.lines[-1].split()[1] == str(work.result)


@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_a_carry_and_the_digits_so_far_pass_from_column_to_column(operation: str) -> None:
    rng = random.Random(4)
    for _ in range(500):
        work = WORK[operation](rng.randrange(10**3), rng.randrange(10**2))
        before, done = 0, ""
        for line in work.lines:
            if m := re.search(r"-> (\d+), (?:carry|borrow) (\d)", line):
                used = re.search(r"[\d][+-]\d[+-](\d)=|, \+(\d)=", line)
                assert used, line
                assert int(used[1] or used[2]) == before, work.lines
                assert m[1][1:] == done, work.lines
                before, done = int(m[2]), m[1]
            else:
                before, done = 0, ""


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("split", SPLITS)
def test_the_thinking_of_a_sample_is_true_and_ends_in_its_answer(kind: str, split: Split) -> None:
    for sample in draw(kind, split, 1000 if split == "train" else 300):
        answer = sample.messages[-1]["content"]
        if sample.check is None:
            assert "remainder" in answer
            assert split == "train"
            continue
        assert grade(sample.check, answer, []).ok, (sample.check, answer)
        if not sample.thinking:
            assert split == "train"
            assert "reasoning_content" not in sample.messages[-1]
            continue
        lines = thought(sample).split("\n")
        assert not [line for line in lines if wrong_line(line)], lines
        assert lines[-1].removeprefix("= ") == str(sample.check["number"])
        if kind != "word":
            work = HEADER.fullmatch(lines[0])
            assert work, lines
            assert PYTHON[work[2]](int(work[1]), int(work[3])) == sample.check["number"]


@pytest.mark.parametrize("kind", ["add", "sub", "mul", "div"])
def test_training_never_asks_for_reserved_operands_and_evaluation_always_does(kind: str) -> None:
    for split in SPLITS:
        for sample in draw(kind, split, 1000 if split == "train" else 200):
            if sample.thinking:
                work = HEADER.match(thought(sample))
                assert work, sample
                assert held_value(kind, int(work[1]), int(work[3])) == (split != "train"), sample


def test_order_does_not_unreserve_a_sum_or_a_product() -> None:
    for a, b in [(a, b) for a in range(60) for b in range(60)]:
        assert held_value("add", a, b) == held_value("add", b, a)
        assert held_value("mul", a, b) == held_value("mul", b, a)


def family_pattern(family: str) -> re.Pattern[str]:
    """A pattern for any question of this family, in lower case, with any values in its slots."""
    text = re.escape(family.split("|")[-2] if "|" in family else family).lower().rstrip(r"\.?!")
    return re.compile(re.sub(r"\\\{\w\\\}", r"[^?.\\n]{1,40}?", text))


def test_held_out_wordings_never_reach_training() -> None:
    for kind in ("add", "sub", "mul", "div"):
        assert not set(FRAMES + CORES[kind]) & set(HELD_FRAMES + HELD_CORES[kind])
        assert not set(STORIES[kind] + WOVEN[kind]) & set(HELD_STORIES[kind] + HELD_WOVEN[kind])
        assert len(STORIES[kind] + WOVEN[kind]) > 100
        held = [family_pattern(family) for family in (*HELD_FRAMES, *HELD_CORES[kind])]
        for sample in draw(kind, "train", 1000):
            text = prompt(sample).lower()
            assert not [pattern.pattern for pattern in held if pattern.fullmatch(text.rstrip("?.!"))], text
    assert not set(TWO_STEP) & set(HELD_TWO_STEP)
    held = [family_pattern(family) for stories in HELD_STORIES.values() for family in stories]
    for sample in draw("word", "train", 1000):
        text = prompt(sample).lower()
        assert not [pattern.pattern for pattern in held if pattern.search(text)], text


def test_the_families_split_uses_only_held_out_wordings() -> None:
    held = [family_pattern(family) for stories in (*HELD_STORIES.values(), *HELD_WOVEN.values()) for family in stories]
    seen = 0
    for sample in draw("word", "families", 400):
        if "First" not in thought(sample) and not re.search(r"is \d+ years old|cousins|takes \d+ min", prompt(sample)):
            seen += 1
            assert any(pattern.search(prompt(sample).lower()) for pattern in held), prompt(sample)
    assert seen > 100


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_fifth_of_the_families_is_held_out(kind: str) -> None:
    train, held = families(kind)
    assert held >= 0.2 * (train + held)
    assert train >= 60


@pytest.mark.parametrize("kind", GENERATORS)
def test_the_same_seed_makes_the_same_samples(kind: str) -> None:
    assert draw(kind, "train", 50, seed=8) == draw(kind, "train", 50, seed=8)
    assert draw(kind, "train", 50, seed=8) != draw(kind, "train", 50, seed=9)
