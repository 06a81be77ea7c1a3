"""Pictures and questions about them: shapes, colours, counts, places, sizes, words and numbers, bars, two pictures.

A drawing is made at random, with every property that the question does not ask for drawn as freely as the others. As
for text, a fifth of the wordings are held out for the split "families"; words and numbers of the split "values" are
never written in training. In training, half of the words are made up, so that letters are learnt and not words.

Every picture has a caption of at most LONGEST of CAPTION_WORDS, which says all that may be asked about it and
depends on nothing but the picture.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from PIL import Image

from nano.canvas import Canvas, Thing
from nano.sample import Split
from nano.wordings import INSTANT, casual, reserved, wordings

COLOURS = {
    "red": (214, 40, 40), "green": (44, 160, 60), "blue": (36, 80, 210), "yellow": (245, 210, 40),
    "black": (20, 20, 20), "orange": (245, 130, 30), "purple": (130, 60, 170), "pink": (245, 130, 180),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
WORDS = tuple(
    """
    cat dog sun moon tree fish bird book lamp door rain snow wind fire lake road ship boat star leaf milk rice
    salt corn blue gold iron wool desk wall roof hill rock sand wave king farm shop town gift song game ball
    cake soup bread apple water house green chair table plant stone river cloud light music paper train horse
    mouse tiger lemon grape honey exit open stop push pull start sale menu home search send save help login
    error draft total north south east west
    """.split()  # noqa: SIM905
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
FILL, QUOTE, BAR, LARGER = "", '"', "bar", "larger"
SIDES = ("top", "bottom", "left", "right")
CAPTION_WORDS = (
    FILL, QUOTE, BAR, LARGER, *SIDES, *COLOURS, *SHAPES, *NUMBERS[1:], *LETTERS, *LETTERS.upper(), *"0123456789"
)  # fmt: skip
LONGEST = 16  # words of a caption
CORNERS = ("top left", "top right", "bottom left", "bottom right")
ORDER = ("first", "second")
AGAIN = 0.3  # share of a chat with two questions, among the drawings for training about which more can be asked

_ASKED = {
    "shape": """
        What shape is in the picture?
        Which shape is this?
        What shape do you see?
        Name the shape.
        What is the shape in this image?
        What is drawn here?
        Tell me the shape in the picture.
        Which shape does the image show?
        What kind of shape is it?
        Look at the picture. Which shape is it?
    """,
    "colour": """
        What colour is the {s}?
        Which colour does the {s} have?
        What color is the {s}?
        Name the colour of the {s}.
        The {s} in the picture: what colour is it?
        Tell me the colour of the {s}.
        What is the colour of the {s} in this image?
        Which color is the {s}?
        Look at the {s}. What colour is it?
        In what colour is the {s} drawn?
    """,
    "count": """
        How many {s}s are there?
        How many {s}s do you see?
        Count the {s}s.
        What is the number of {s}s in the picture?
        How many {s}s does the image show?
        Tell me how many {s}s there are.
        Number of {s}s?
        How many {s}s can you find in this picture?
        Please count the {s}s in the image.
        How many {s}s are drawn here?
    """,
    "place": """
        Where is the {c} {s}?
        In which corner is the {c} {s}?
        Where in the picture is the {c} {s}?
        Which corner holds the {c} {s}?
        Where in this drawing is the {c} {s}?
        Where do you see the {c} {s}?
        Tell me where the {c} {s} is.
        In what part of the image is the {c} {s}?
        What is the position of the {c} {s}?
        Where in the image can you see the {c} {s}?
        In which part of the picture is the {c} {s}?
        Where on the page is the {c} {s}?
        Where does the image show the {c} {s}?
        Locate the {c} {s}.
        Where inside the frame is the {c} {s}?
        In the picture, where is the {c} {s}?
        Find the {c} {s}. Where is it?
        At which place of the image is the {c} {s}?
        Say in which corner you see the {c} {s}.
        What corner of the picture is the {c} {s} in?
    """,
    "size": """
        Which shape is larger?
        Which of the two shapes is bigger?
        What is the bigger shape?
        Which one is larger in the picture?
        Name the larger shape.
        Which shape is the biggest?
        Of the two shapes, which is larger?
        What shape is bigger in this image?
        Tell me which shape is larger.
        Which shape takes more room?
    """,
    "word": """
        What does the picture say?
        Which word is written here?
        Read the text.
        What is written in the image?
        What word do you see?
        Read the word in the picture.
        What does it say?
        Which text is in this image?
        Tell me what is written here.
        What is the text in the picture?
    """,
    "bars": """
        Which bar is taller?
        Which of the two bars is higher?
        Which bar has the larger value?
        What colour is the tallest bar?
        Which bar is the largest in the chart?
        Name the taller bar.
        In the chart, which bar is higher?
        Which bar stands highest?
        Tell me which bar is larger.
        Look at the chart. Which bar is the tallest?
    """,
    "two": """
        Which picture shows a {c} {s}?
        Which of the two images has a {c} {s}?
        Is the {c} {s} in the first or the second picture?
        In which picture is the {c} {s}?
        Where is the {c} {s}: in the first or in the second image?
        Which image contains the {c} {s}?
        First or second picture: which one has the {c} {s}?
        Tell me which picture shows the {c} {s}.
        Which one of these pictures has a {c} {s}?
        The {c} {s} is in which picture?
    """,
}
ASKED = {kind: wordings(lines) for kind, lines in _ASKED.items()}
KINDS = tuple(ASKED)


@dataclass
class Drawing:
    """Pictures with their captions, a question about them, and the short answer, with the sentences that reason it."""

    kind: str  # of the question
    pictures: list[Image.Image]
    captions: list[list[str]]  # of CAPTION_WORDS
    question: str
    reasoning: str
    answer: str
    thinking: bool = True
    earlier: tuple[str, str] | None = None  # a question about the same picture that was asked before, and its answer


def drawing(rng: random.Random, split: Split, kind: str, size: tuple[int, int], *, plain: bool = False) -> Drawing:
    """One of this kind; pictures have `size` in pixels, width and height. plain: as in `Canvas`.

    In training a chat may have two questions about a picture; the kind is that of one of them.
    """
    made = _MADE[kind](rng, split, Sheet(size, plain))
    asked = Asked(kind, made.reasoning, made.answer, made.names)
    thinking = split != "train" or rng.random() >= INSTANT
    earlier = None
    if split == "train" and made.others and rng.random() < AGAIN:
        first, asked = rng.sample([asked, rng.choice(made.others)], 2)
        earlier = _question(rng, split, first), first.answer
    question = _question(rng, split, asked)
    return Drawing(asked.kind, made.pictures, made.captions, question, asked.reasoning, asked.answer, thinking, earlier)


def _question(rng: random.Random, split: Split, asked: "Asked") -> str:
    return casual(rng, ASKED[asked.kind].pick(rng, split).format(**asked.names))


class Sheet(NamedTuple):
    """What a drawing is drawn on: width and height in pixels, and whether it is plain."""

    size: tuple[int, int]
    plain: bool

    def canvas(self, rng: random.Random) -> Canvas:
        """A new canvas."""
        return Canvas(rng, self.size, plain=self.plain)

    def drawn(self, rng: random.Random, things: list[Thing]) -> Image.Image:
        """A picture of these things."""
        canvas = self.canvas(rng)
        for thing in things:
            canvas.put(thing, _tinted(rng, thing.colour))
        return canvas.picture()


class Asked(NamedTuple):
    """A question: its kind, the sentence that reasons its answer, the answer, and what its wording names."""

    kind: str
    reasoning: str
    answer: str
    names: dict[str, Any]


class _Made(NamedTuple):
    pictures: list[Image.Image]
    captions: list[list[str]]
    reasoning: str
    answer: str
    names: dict[str, Any]
    others: Sequence[Asked] = ()  # questions that may be asked about the same picture


def _tinted(rng: random.Random, colour: str) -> tuple[int, ...]:
    """The colour, a little lighter or darker, and a little off."""
    shift = rng.randint(-18, 18)
    return tuple(min(255, max(0, value + shift + rng.randint(-10, 10))) for value in COLOURS[colour])


def _placed(rng: random.Random, shape: str, colour: str, size: tuple[int, int], share: tuple[float, float]) -> Thing:
    """A shape that fits on the canvas. share: of the shorter side that its size is, least and most."""
    half = min(size) * rng.uniform(*share) / 2
    x, y = (rng.uniform(half + 2, side - half - 2) for side in size)
    return Thing(shape, colour, x, y, half)


def _caption(size: tuple[int, int], things: list[Thing]) -> list[str]:
    """How many there are; of up to three the colour, the shape and the place of each; and the shape of the largest."""
    said = [NUMBERS[len(things)]]
    if len(things) > 3:
        return [*said, things[0].shape]
    placed = [(SIDES[one.y > size[1] / 2], SIDES[2 + (one.x > size[0] / 2)], one) for one in things]
    for upright, across, one in sorted(placed, key=lambda each: (each[0] == "bottom", each[1] == "right", each[2].y)):
        said += one.colour, one.shape, upright, across
    if len(things) > 1:
        said += LARGER, max(things, key=lambda one: one.half).shape
    return said


def _others(kind: str, things: list[Thing]) -> list[Asked]:
    """Questions of other kinds about things: the shape of a single one, colours, and numbers."""
    shapes = [thing.shape for thing in things]
    found = [Asked("shape", f"The shape is a {shapes[0]}.", shapes[0], {})] if len(things) == 1 else []
    for thing in things:
        number = shapes.count(thing.shape)
        found.append(Asked("count", f"The {thing.shape}s: {NUMBERS[number]}.", NUMBERS[number], {"s": thing.shape}))
        if number == 1:
            reasoning = f"The {thing.shape} is {thing.colour}."
            found.append(Asked("colour", reasoning, thing.colour, {"s": thing.shape}))
    return [asked for asked in found if asked.kind != kind]


def _one(rng: random.Random, size: tuple[int, int], share: tuple[float, float] = (0.3, 0.85)) -> Thing:
    return _placed(rng, rng.choice(SHAPES), rng.choice(list(COLOURS)), size, share)


def _shape(rng: random.Random, split: Split, sheet: Sheet) -> _Made:
    thing = _one(rng, sheet.size)
    reasoning = f"The shape is a {thing.shape}."
    drawn, said = sheet.drawn(rng, [thing]), _caption(sheet.size, [thing])
    return _Made([drawn], [said], reasoning, thing.shape, {}, _others("shape", [thing]))


def _colour(rng: random.Random, split: Split, sheet: Sheet) -> _Made:
    thing = _one(rng, sheet.size)
    reasoning = f"The {thing.shape} is {thing.colour}."
    drawn, said = sheet.drawn(rng, [thing]), _caption(sheet.size, [thing])
    return _Made([drawn], [said], reasoning, thing.colour, {"s": thing.shape}, _others("colour", [thing]))


def _apart(
    rng: random.Random, size: tuple[int, int], count: int, share: tuple[float, float]
) -> list[tuple[float, ...]]:
    """Centres and half sizes of shapes that do not touch."""
    found: list[tuple[float, ...]] = []
    while len(found) < count:
        found = []
        for _ in range(40 * count):
            half = min(size) * rng.uniform(*share) / 2
            x, y = (rng.uniform(half + 2, side - half - 2) for side in size)
            if all(max(abs(x - a), abs(y - b)) > half + c + 4 for a, b, c in found):
                found.append((x, y, half))
            if len(found) == count:
                break
        share = share[0] * 0.9, share[1] * 0.9
    return found


def _count(rng: random.Random, split: Split, sheet: Sheet) -> _Made:
    shape, number = rng.choice(SHAPES), rng.randint(1, 6)
    one_colour = rng.choice(list(COLOURS)) if rng.random() < 0.6 else None
    things = [
        Thing(shape, one_colour or rng.choice(list(COLOURS)), *place)
        for place in _apart(rng, sheet.size, number, (0.14, 0.26))
    ]
    answer = NUMBERS[number]
    return _Made(
        [sheet.drawn(rng, things)], [_caption(sheet.size, things)], f"The {shape}s: {answer}.", answer, {"s": shape}
    )


def _place(rng: random.Random, split: Split, sheet: Sheet) -> _Made:
    """One to three shapes in different corners; the question is about one of them."""
    (width, height), size = sheet.size, sheet.size
    corners = rng.sample(range(4), rng.randint(1, 3))
    kinds = rng.sample([(shape, colour) for shape in SHAPES for colour in COLOURS], len(corners))
    things: list[Thing] = []
    for corner, (shape, colour) in zip(corners, kinds, strict=True):
        half = min(size) * rng.uniform(0.14, 0.36) / 2
        x = rng.uniform(half + 2, width / 2 - half - 2) + (width / 2 if corner % 2 else 0)
        y = rng.uniform(half + 2, height / 2 - half - 2) + (height / 2 if corner > 1 else 0)
        things.append(Thing(shape, colour, x, y, half))
    asked = things[0]
    answer = CORNERS[corners[0]]
    reasoning = f"The {asked.colour} {asked.shape} {answer}."
    return _Made(
        [sheet.drawn(rng, things)],
        [_caption(sheet.size, things)],
        reasoning,
        answer,
        {"c": asked.colour, "s": asked.shape},
        _others("place", things),
    )


def _size(rng: random.Random, split: Split, sheet: Sheet) -> _Made:
    first, second = rng.sample(SHAPES, 2)
    small = rng.uniform(0.14, 0.26)
    large = small * rng.uniform(1.5, 2.2)
    side, size = rng.random() < 0.5, sheet.size
    things: list[Thing] = []
    for shape, share, left in ((first, large, side), (second, small, not side)):
        half = min(size) * share / 2
        x = rng.uniform(half + 2, size[0] / 2 - half) + (0 if left else size[0] / 2 - 2)
        things.append(Thing(shape, rng.choice(list(COLOURS)), x, rng.uniform(half + 2, size[1] - half - 2), half))
    reasoning = f"The {first} is larger."
    drawn, said = sheet.drawn(rng, things), _caption(sheet.size, things)
    return _Made([drawn], [said], reasoning, first, {}, _others("size", things))


def _text_of(rng: random.Random, split: Split) -> str:
    while True:
        if rng.random() < 0.3:
            text = str(rng.randint(0, 999))
        else:
            made_up = split == "train" and rng.random() < 0.5
            text = "".join(rng.choices(LETTERS, k=rng.randint(3, 6))) if made_up else rng.choice(WORDS)
            text = rng.choice((text, text.upper(), text.capitalize()))
        if reserved("picture", text.lower()) == (split == "values"):
            return text


def _word(rng: random.Random, split: Split, sheet: Sheet) -> _Made:
    text, canvas, (width, height) = _text_of(rng, split), sheet.canvas(rng), sheet.size
    points = rng.uniform(22, 44)
    left, top, right, bottom = canvas.text_size(text, points)
    if right - left > width - 8:
        points *= (width - 8) / (right - left) * 0.98
        left, top, right, bottom = canvas.text_size(text, points)
    x = rng.uniform(4, max(5, width - (right - left) - 4)) - left
    y = rng.uniform(4, max(5, height - (bottom - top) - 4)) - top
    canvas.text((x, y), text, points, _tinted(rng, rng.choice(["black", "black", "blue", "red", "green"])))
    return _Made([canvas.picture()], [[QUOTE, *text, QUOTE]], f'It says "{text}".', text, {})


def _bars(rng: random.Random, split: Split, sheet: Sheet) -> _Made:
    count = rng.randint(2, 4)
    colours = rng.sample(list(COLOURS), count)
    while True:
        heights = [rng.uniform(0.15, 0.9) for _ in range(count)]
        high, next_high = sorted(heights, reverse=True)[:2]
        if high - next_high > 0.1:
            break
    canvas, (width, height) = sheet.canvas(rng), sheet.size
    room = width / count
    for place, (colour, share) in enumerate(zip(colours, heights, strict=True)):
        left = place * room + room * rng.uniform(0.12, 0.22)
        right = (place + 1) * room - room * rng.uniform(0.12, 0.22)
        canvas.bar((left, height - 6 - share * (height - 12), right, height - 6), _tinted(rng, colour))
    if rng.random() < 0.7:
        canvas.bar((0, height - 6, width, height - 4), rng.choice((COLOURS["black"], (120, 120, 120))))
    answer = colours[heights.index(high)]
    return _Made([canvas.picture()], [[BAR, answer]], f"The {answer} bar is the tallest.", answer, {})


def _two(rng: random.Random, split: Split, sheet: Sheet) -> _Made:
    kinds = rng.sample([(shape, colour) for shape in SHAPES for colour in COLOURS], 2)
    things = [[_placed(rng, *kind, sheet.size, (0.3, 0.8))] for kind in kinds]
    pictures, captions = [sheet.drawn(rng, one) for one in things], [_caption(sheet.size, one) for one in things]
    place = rng.randrange(2)
    shape, colour = kinds[place]
    answer = ORDER[place]
    listed = ", ".join(f"a {c} {s} {which}" for (s, c), which in zip(kinds, ORDER, strict=True))
    reasoning = f"{listed.capitalize()}. The {colour} {shape} {answer}."
    return _Made(pictures, captions, reasoning, answer, {"c": colour, "s": shape})


_MADE: dict[str, Callable[[random.Random, Split, Sheet], _Made]] = {
    "shape": _shape, "colour": _colour, "count": _count, "place": _place, "size": _size, "word": _word, "bars": _bars,
    "two": _two,
}  # fmt: skip
