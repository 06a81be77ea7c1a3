"""Arithmetic: plain questions for the four operations, and word problems with one or two steps.

Thinking is the written work of data_numbers_steps; the answer is the number, sometimes in a short sentence. An operand
pair is reserved for evaluation by its hash, so `train` never sees it in a question, in either order where order does
not matter.
"""

import random
import re
from typing import Any, NamedTuple

from nano.data_numbers_steps import WORK
from nano.data_numbers_stories import (
    DISTRACTORS,
    HELD_DISTRACTORS,
    HELD_STORIES,
    HELD_TWO_STEP,
    HELD_WOVEN,
    HELD_WOVEN_TWO_STEP,
    STORIES,
    TWO_STEP,
    WOVEN,
    WOVEN_TWO_STEP,
)
from nano.data_numbers_wordings import (
    CORES,
    EXPRESSIONS,
    FRAMES,
    HELD_CORES,
    HELD_FRAMES,
    PREFIXES,
    SUFFIXES,
    SYMBOLS,
)
from nano.data_tools_values import CITIES, FIRST, ITEMS, pick, reserved
from nano.sample import Generator, Sample, Split

OPERATION = {"+": "add", "-": "sub", "*": "mul", "/": "div"}
SIGN = {operation: sign for sign, operation in OPERATION.items()}
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class Operands(NamedTuple):
    """The two numbers of an operation, in their order."""

    a: int
    b: int


def held_value(operation: str, *operands: int) -> bool:
    """Whether these operands are reserved for evaluation. For sums and products their order does not matter."""
    return reserved(operation, *(sorted(operands) if operation in ("add", "mul") else operands))


def _digits(rng: random.Random, count: int) -> int:
    """A number of so many digits; multiples of ten and of a hundred come a little more often than by chance."""
    if count == 1:
        return int(rng.random() * 10) or int(rng.random() * 10)
    number = int(rng.random() * 9 * 10 ** (count - 1)) + 10 ** (count - 1)
    if rng.random() < 0.06:
        number -= number % (10 if rng.random() < 0.6 else 10 ** (count - 1))
    return number


def _pick_operands(rng: random.Random, operation: str, split: Split, easy: bool, story: bool) -> Operands:
    long = split == "train" and not easy and rng.random() < 0.05
    match operation:
        case "add" | "sub":
            widths = (1, 1, 2, 2) if easy else (3, 4) if long else (1, 2, 2, 2, 3, 3, 3, 3, 3)
            a, b = _digits(rng, pick(rng, widths)), _digits(rng, pick(rng, widths))
            if operation == "sub" and a < b and (story or rng.random() < 0.7):
                a, b = b, a
        case "mul":
            wide, narrow = pick(rng, ((1, 1), (1, 1), (2, 1)) if easy else ((4, 1), (4, 2)) if long else
                ((1, 1), (2, 1), (2, 1), (3, 1), (3, 1), (2, 2), (2, 2), (2, 2), (3, 2), (3, 2), (3, 2)))  # fmt: skip
            a, b = _digits(rng, wide), _digits(rng, narrow)
            if rng.random() < 0.3:
                a, b = b, a
        case _:
            if easy:
                b, quotient = rng.randint(2, 10), rng.randint(1, 10)
            else:
                b = (
                    rng.randint(1 + story, 9)
                    if rng.random() < 0.45
                    else rng.randint(10, 99 if rng.random() < 0.75 else 12)
                )
                quotient = _digits(rng, pick(rng, (1, 2, 2, 3)))
                if quotient * b > 9999:
                    quotient //= 10
            a = b * quotient
            if split == "train" and not easy and not story and rng.random() < 0.04:
                a += rng.randrange(b)
    return Operands(max(a, 2), max(b, 2)) if story and operation != "div" else Operands(a, b)


def _operands(rng: random.Random, operation: str, split: Split, easy: bool, story: bool = False) -> Operands:
    while True:
        operands = _pick_operands(rng, operation, split, easy, story)
        if held_value(operation, *operands) == (split != "train") and (not story or operands.a):
            return operands


def _finish(
    rng: random.Random,
    kind: str,
    prompt: str,
    lines: list[str],
    answer: str,
    number: int,
    thinking: bool,
    system: str = "",
    graded: bool = True,
) -> Sample:
    reply: dict[str, Any] = {"role": "assistant", "content": answer}
    if thinking:
        reply["reasoning_content"] = "\n".join(lines)
    messages = [{"role": "user", "content": prompt}, reply]
    if rng.random() < 0.06:
        messages.insert(0, {"role": "system", "content": pick(rng, SYSTEM)})
    check = {"number": number} if graded else None
    return Sample(kind, messages, thinking=thinking, check=check)


SYSTEM = (
    "You are a helpful assistant.", "You are Kimi, a helpful assistant.", "You are a math tutor.", "Answer briefly.",
    "You answer questions about numbers.", "Be short and precise.", "You are a calculator.",
)  # fmt: skip


def _dress(rng: random.Random, core: str) -> str:
    """Greeting before, thanks after, careless typing."""
    how = rng.random()
    if how < 0.10:
        core = core.lower()
    elif how < 0.22:
        core = core.rstrip("?.")
    elif how < 0.25:
        core = core.rstrip(".") + ("?" if core.endswith("?") else "!")
    prefix = pick(rng, PREFIXES) if rng.random() < 0.3 else ""
    suffix = pick(rng, SUFFIXES) if rng.random() < 0.25 else ""
    if prefix.endswith(", ") and rng.random() < 0.7:
        core = core[0].lower() + core[1:]
    if suffix.startswith(" ") and (core[-1].isalnum() or core[-1] == "}"):
        suffix = pick(rng, (".", "?", ",", "")) + suffix
    return prefix + core + suffix


def plain(rng: random.Random, split: Split, operation: str) -> Sample:
    """One operation asked in words or in symbols."""
    easy = split == "train" and rng.random() < 0.16
    thinking = not easy or rng.random() < 0.35
    a, b = _operands(rng, operation, split, easy)
    frames, cores = (HELD_FRAMES, HELD_CORES) if split == "families" else (FRAMES, CORES)
    if rng.random() < 0.62:
        core = pick(rng, frames)
        core = core.replace("{e}", pick(rng, EXPRESSIONS[operation])).replace("{s}", pick(rng, SYMBOLS[operation]))
    else:
        core = pick(rng, cores[operation])
    prompt = _dress(rng, core).replace("{a}", str(a)).replace("{b}", str(b))
    work = WORK[operation](a, b)
    answer = work.lines[-1].removeprefix("= ")
    exact = "remainder" not in answer
    if exact and rng.random() < 0.15:
        answer = f"{a} {SIGN[operation]} {b} = {answer}"
    return _finish(rng, operation, prompt, work.lines, answer, work.result, thinking, graded=exact)


def _story_text(rng: random.Random, split: Split, story: str, **numbers: int) -> tuple[str, str]:
    """The story with its slots filled, perhaps with a number that has nothing to do with it; and the answer's unit."""
    text, unit = story.split("|")
    held: Split = "values" if split != "train" else "train"
    n, m = FIRST.draw(rng, held), FIRST.draw(rng, held)
    while m == n:
        m = pick(rng, FIRST.train)
    if rng.random() < 0.15:
        distractor = pick(rng, HELD_DISTRACTORS if split == "families" else DISTRACTORS)
        distractor = distractor.replace("{k}", str(rng.randint(2, 60)))
        text = f"{distractor} {text}" if rng.random() < 0.5 else text.replace(". ", f". {distractor} ", 1)
    slots = {"n": n, "m": m, "o": ITEMS.draw(rng, held), "d": pick(rng, WEEKDAYS), "v": CITIES.draw(rng, held)}
    text = text.format(**slots, **numbers)
    if rng.random() < 0.12:
        text = pick(rng, PREFIXES) + text
    if rng.random() < 0.12:
        text += pick(rng, SUFFIXES)
    return text, unit.format(**slots)


PLAN_WORDS = {"add": "add {a} and {b}", "sub": "take {b} from {a}", "mul": "{a} times {b}", "div": "{a} divided by {b}"}


def _as_told(operation: str, family: str, a: int, b: int) -> tuple[int, int]:
    """The operands in the story's order where the operation allows it: reading is simpler than ranking."""
    turned = operation in ("add", "mul") and family.index("{b}") < family.index("{a}")
    return (b, a) if turned else (a, b)


def _numbers(prompt: str) -> str:
    """The numbers of a story, in its order: three of them announce two steps or one to leave out."""
    return f"Numbers: {', '.join(re.findall('[0-9]+', prompt))}."


def _say(operation: str, a: object, b: object) -> str:
    words = PLAN_WORDS[operation].format(a=a, b=b)
    return words[0].upper() + words[1:] + "."


def story(rng: random.Random, split: Split) -> Sample:
    """A word problem: which operation, on which numbers, then the written work."""
    if rng.random() < 0.25:
        return _two_step(rng, split)
    operation = pick(rng, ("add", "sub", "mul", "div"))
    easy = split == "train" and rng.random() < 0.08
    a, b = _operands(rng, operation, split, easy or rng.random() < 0.3, story=True)
    written, woven = (HELD_STORIES, HELD_WOVEN) if split == "families" else (STORIES, WOVEN)
    family = pick(rng, (woven if rng.random() < 0.5 else written)[operation])
    prompt, unit = _story_text(rng, split, family, a=a, b=b)
    a, b = _as_told(operation, family, a, b)
    work = WORK[operation](a, b)
    answer = f"{work.result} {unit}" if rng.random() < 0.8 else str(work.result)
    lines = [_numbers(prompt), _say(operation, a, b), *work.lines]
    return _finish(rng, "word", prompt, lines, answer, work.result, not easy)


def _two_step(rng: random.Random, split: Split) -> Sample:
    written, woven = (HELD_TWO_STEP, HELD_WOVEN_TWO_STEP) if split == "families" else (TWO_STEP, WOVEN_TWO_STEP)
    plan, family = pick(rng, pick(rng, woven) if rng.random() < 0.4 else written).split("|", 1)
    first, second = OPERATION[plan[1]], OPERATION[plan[3]]
    while True:
        a, b = _pick_operands(rng, first, split, easy=rng.random() < 0.3, story=True)
        before = WORK[first](a, b).result
        c = rng.randint(2, 9) if second == "mul" else rng.randint(1, 99)
        sound = b > 1 and before > 0 and (second != "sub" or c < before) and (first != "sub" or a > b)
        if sound and held_value(plan, a, b, c) == (split != "train") and (first != "div" or a % b == 0):
            break
    prompt, unit = _story_text(rng, split, family, a=a, b=b, c=c)
    if rng.random() < 0.15:
        family = _chain(rng, split, plan)
        prompt, unit = _dress(rng, family).format(a=a, b=b, c=c), ""
    a, b = _as_told(first, family, a, b)
    one, two = WORK[first](a, b), WORK[second](before, c)
    lines = [_numbers(prompt), f"First {PLAN_WORDS[first].format(a=a, b=b)}.", *one.lines]
    lines += [f"Then {PLAN_WORDS[second].format(a=before, b=c)}.", *two.lines]
    return _finish(rng, "word", prompt, lines, f"{two.result} {unit}".strip(), two.result, thinking=True)


def _chain(rng: random.Random, split: Split, plan: str) -> str:
    """The bare expression of a two-step plan; brackets where multiplying comes last."""
    left, right = f"{{a}} {plan[1]} {{b}}", f"{plan[3]} {{c}}"
    expression = f"({left}) {right}" if plan[3] == "*" else f"{left} {right}"
    frame = pick(rng, HELD_FRAMES if split == "families" else FRAMES)
    return frame.replace("{e}", expression).replace("{s}", expression)


def add(rng: random.Random, split: Split) -> Sample:
    """A sum of two numbers with its written work; see `plain`."""
    return plain(rng, split, "add")


def sub(rng: random.Random, split: Split) -> Sample:
    """A difference of two numbers with its written work; see `plain`."""
    return plain(rng, split, "sub")


def mul(rng: random.Random, split: Split) -> Sample:
    """A product of two numbers with its written work; see `plain`."""
    return plain(rng, split, "mul")


def div(rng: random.Random, split: Split) -> Sample:
    """A quotient of two numbers with its written work; see `plain`."""
    return plain(rng, split, "div")


# Weights follow difficulty: products and quotients have the most steps to get right.
GENERATORS: dict[str, tuple[Generator, float]] = {
    "add": (add, 0.14),
    "sub": (sub, 0.14),
    "mul": (mul, 0.20),
    "div": (div, 0.30),
    "word": (story, 0.22),
}


def families(kind: str) -> tuple[int, int]:
    """How many phrase families there are: (for training, held out)."""
    if kind == "word":
        train = sum(len(STORIES[kind]) + len(WOVEN[kind]) for kind in STORIES)
        held = sum(len(HELD_STORIES[kind]) + len(HELD_WOVEN[kind]) for kind in STORIES)
        return train + len(TWO_STEP), held + len(HELD_TWO_STEP)
    return len(FRAMES) + len(CORES[kind]), len(HELD_FRAMES) + len(HELD_CORES[kind])
