"""Writes the evaluation sets of pictures: MODEL/eval/vision, which `redline eval MODEL --sets vision` asks.

    python -m nano.evalset_pictures models/kimi-nano

values, families: the generator's drawings, plain ones. In "values" the written words are new, in "families" the
wordings. drawn: DRAWN drawings by the code below, which shares with the generator only the words to read, Pillow's font
and the held-out wordings: edges are smooth, grounds shaded, colours and forms a little different, files PNG, JPEG and
WebP. The same seed gives the same questions on every machine; Pillow's release decides the files' bytes.
"""

import argparse
import base64
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from nano.data_pictures import ASKED, KINDS, NUMBERS, ORDER, SHAPES, WORDS, drawing
from nano.evalset import SEED, SETS, write
from nano.sample import Split
from nano.wordings import reserved

PER_KIND = 40
DRAWN = {"shape": 10, "colour": 10, "count": 8, "place": 10, "size": 6, "word": 6, "bars": 6, "two": 4}
GOALS = {"shape": 95, "colour": 95, "count": 95, "place": 90, "size": 90, "word": 80, "bars": 90, "two": 90}
TARGETS = {"values": GOALS, "families": GOALS, "drawn": {"all": 90}}
FORMATS = ("PNG", "JPEG", "WEBP")
SIZES = ((240, 180), (224, 224), (168, 210), (256, 192), (196, 196), (300, 200))  # pixels
PAINT = {
    "red": (200, 30, 48), "green": (56, 150, 52), "blue": (48, 92, 224), "yellow": (252, 220, 60), "black": (8, 8, 12),
}  # fmt: skip

Pixels = NDArray[np.float64]  # [height, width, 3], 0 to 255
Numbers = NDArray[np.float64]


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder / "eval" / "vision"
    folder.mkdir(parents=True, exist_ok=True)
    for split in SETS:
        write(folder / f"{split}.jsonl.gz", of_split(split))
    write(folder / "drawn.jsonl.gz", drawn())
    (folder / "targets.json").write_text(json.dumps(TARGETS, indent=1) + "\n")


def of_split(split: Split, per_kind: int = PER_KIND, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """Prompts with the generator's drawings, kind by kind."""
    for kind in KINDS:
        rng = random.Random(f"{seed}/{split}/{kind}")
        for _ in range(per_kind):
            one = drawing(rng, split, kind, rng.choice(SIZES), plain=True)
            yield prompt(kind, one.question, [("PNG", png(picture)) for picture in one.pictures], one.answer)


def drawn(seed: int = SEED) -> Iterator[dict[str, Any]]:
    """Prompts with the drawings of this file."""
    rng = random.Random(f"{seed}/drawn")
    for kind, count in DRAWN.items():
        for _ in range(count):
            one = _MADE[kind](rng, rng.choice(SIZES))
            question = ASKED[kind].pick(rng, "families").format(**one.names)
            forms = [rng.choice(FORMATS) for _ in one.pictures]
            files = [(form, _file(picture, form)) for picture, form in zip(one.pictures, forms, strict=True)]
            yield prompt(kind, question, files, one.answer)


def prompt(kind: str, question: str, files: list[tuple[str, bytes]], answer: str) -> dict[str, Any]:
    """One line of a set: pictures, then the question. files: format and bytes of each picture."""
    urls = [f"data:image/{form.lower()};base64,{base64.b64encode(file).decode()}" for form, file in files]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": question}]
    return {"kind": kind, "messages": [{"role": "user", "content": content}], "check": {"equals": answer}}


def png(picture: Image.Image) -> bytes:
    """A file of exactly these pixels, with a palette if they have at most 256 colours."""
    colours, indices = np.unique(np.asarray(picture).reshape(-1, 3), axis=0, return_inverse=True)
    if len(colours) <= 256:
        few = Image.fromarray(indices.reshape(picture.height, picture.width).astype(np.uint8), "L")
        few.putpalette(colours.tobytes())
        picture = few
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return out.getvalue()


# Drawings by other code.


class _Drawn(NamedTuple):
    pictures: list[Pixels]
    answer: str
    names: dict[str, str]


def _file(picture: Pixels, form: str) -> bytes:
    out = io.BytesIO()
    quality = {} if form == "PNG" else {"quality": 88}
    Image.fromarray(picture.round().clip(0, 255).astype(np.uint8)).save(out, form, **quality)
    return out.getvalue()


def _ground(rng: random.Random, size: tuple[int, int]) -> Pixels:
    """A light ground that gets a little darker towards one side."""
    width, height = size
    light = np.array([rng.uniform(232, 255)] * 3) - np.array([rng.uniform(0, 10) for _ in range(3)])
    shade = np.linspace(0, rng.uniform(0, 14), height)[:, None, None]
    return np.broadcast_to(light - shade, (height, width, 3)).copy()


def _distance(points: Numbers, x: Numbers, y: Numbers) -> Numbers:
    """Signed distance to a convex or star-shaped polygon around the origin: negative inside."""
    nearest = np.full(x.shape, np.inf)
    crossings = np.zeros(x.shape, bool)
    for (ax, ay), (bx, by) in zip(points, np.roll(points, -1, 0), strict=True):
        dx, dy = bx - ax, by - ay
        along = (((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy)).clip(0, 1)
        nearest = np.minimum(nearest, np.hypot(x - ax - along * dx, y - ay - along * dy))
        above = (ay > y) != (by > y)
        crossings ^= above & (x < ax + (y - ay) / np.where(above, by - ay, 1) * dx)
    return np.where(crossings, -nearest, nearest)


def _paint(canvas: Pixels, shape: str, colour: str, place: tuple[float, float], half: float) -> None:
    """Blends a shape into the canvas; its edge is one pixel wide."""
    height, width = canvas.shape[:2]
    y, x = np.mgrid[:height, :width] + 0.5
    x, y = x - place[0], y - place[1]
    match shape:
        case "circle":
            far = np.hypot(x, y) - half
        case "square":
            far = np.maximum(np.abs(x), np.abs(y)) - half
        case "triangle":
            turns = np.arange(3) * 2 * np.pi / 3
            far = _distance(1.15 * half * np.stack([np.sin(turns), 0.22 - np.cos(turns)], 1), x, y)
        case _:
            turns = np.arange(10) * np.pi / 5
            length = half * np.where(np.arange(10) % 2, 0.45, 1.0)
            far = _distance(np.stack([length * np.sin(turns), -length * np.cos(turns)], 1), x, y)
    cover = (0.5 - far).clip(0, 1)[..., None]
    canvas[:] = canvas * (1 - cover) + np.array(PAINT[colour]) * cover


def _one(rng: random.Random, size: tuple[int, int], shape: str, colour: str) -> Pixels:
    canvas, half = _ground(rng, size), min(size) * rng.uniform(0.18, 0.38)
    place = tuple(rng.uniform(half * 1.2, side - half * 1.2) for side in size)
    _paint(canvas, shape, colour, (place[0], place[1]), half)
    return canvas


def _shape(rng: random.Random, size: tuple[int, int]) -> _Drawn:
    shape = rng.choice(SHAPES)
    return _Drawn([_one(rng, size, shape, rng.choice(list(PAINT)))], shape, {})


def _colour(rng: random.Random, size: tuple[int, int]) -> _Drawn:
    shape, colour = rng.choice(SHAPES), rng.choice(list(PAINT))
    return _Drawn([_one(rng, size, shape, colour)], colour, {"s": shape})


def _count(rng: random.Random, size: tuple[int, int]) -> _Drawn:
    """Shapes in cells of a grid of three by two."""
    number, shape, canvas = rng.randint(1, 6), rng.choice(SHAPES), _ground(rng, size)
    cells = rng.sample([(a, b) for a in range(3) for b in range(2)], number)
    for across, down in cells:
        half = min(size[0] / 3, size[1] / 2) * rng.uniform(0.2, 0.32)
        place = [
            (cell + rng.uniform(0.42, 0.58)) * side / n
            for cell, side, n in zip((across, down), size, (3, 2), strict=True)
        ]
        _paint(canvas, shape, rng.choice(list(PAINT)), (place[0], place[1]), half)
    return _Drawn([canvas], NUMBERS[number], {"s": shape})


def _place(rng: random.Random, size: tuple[int, int]) -> _Drawn:
    """One or two shapes, each in a corner of its own."""
    canvas, colours, forms = _ground(rng, size), rng.sample(list(PAINT), 2), rng.sample(SHAPES, 2)
    corners = rng.sample([(a, b) for a in range(2) for b in range(2)], rng.randint(1, 2))
    for (across, down), colour, shape in zip(corners, colours, forms, strict=False):
        half = min(size) * rng.uniform(0.1, 0.17)
        place = [(cell + rng.uniform(0.4, 0.6)) * side / 2 for cell, side in zip((across, down), size, strict=True)]
        _paint(canvas, shape, colour, (place[0], place[1]), half)
    across, down = corners[0]
    return _Drawn([canvas], f"{('top', 'bottom')[down]} {('left', 'right')[across]}", {"c": colours[0], "s": forms[0]})


def _size(rng: random.Random, size: tuple[int, int]) -> _Drawn:
    """Two shapes, one 1.6 to 2 times as wide as the other, on the two halves."""
    canvas, forms, small = _ground(rng, size), rng.sample(SHAPES, 2), min(size) * rng.uniform(0.09, 0.12)
    halves = [small * rng.uniform(1.6, 2.0), small]
    sides = rng.sample((0.27, 0.75), 2)
    for shape, half, side in zip(forms, halves, sides, strict=True):
        _paint(canvas, shape, rng.choice(list(PAINT)), (size[0] * side, size[1] * rng.uniform(0.4, 0.6)), half)
    return _Drawn([canvas], forms[0], {})


def _word(rng: random.Random, size: tuple[int, int]) -> _Drawn:
    """Written large and made smaller, so that its edges are soft."""
    text = rng.choice([word for word in WORDS if reserved("picture", word)])
    font = ImageFont.load_default(96)
    left, top, right, bottom = (round(value) for value in font.getbbox(text))
    mask = Image.new("L", (right - left + 8, bottom - top + 8))
    ImageDraw.Draw(mask).text((4 - left, 4 - top), text, font=font, fill=255)
    shrink = min(rng.uniform(0.26, 0.42), (size[0] - 12) / mask.width)
    mask = mask.resize((round(mask.width * shrink), round(mask.height * shrink)), Image.Resampling.LANCZOS)
    canvas = _ground(rng, size)
    x, y = (rng.randint(4, side - own - 4) for side, own in zip(size, mask.size, strict=True))
    cover = np.asarray(mask, np.float64)[..., None] / 255
    part = canvas[y : y + mask.height, x : x + mask.width]
    part[:] = part * (1 - cover) + np.array(PAINT[rng.choice(["black", "blue", "red"])]) * cover
    return _Drawn([canvas], text, {})


def _bars(rng: random.Random, size: tuple[int, int]) -> _Drawn:
    """Two or three bars on a grey line."""
    canvas, colours = _ground(rng, size), rng.sample(list(PAINT), rng.randint(2, 3))
    heights = [rng.uniform(0.2, 0.6) for _ in colours]
    tallest = rng.randrange(len(colours))
    heights[tallest] = max(heights) + rng.uniform(0.15, 0.25)
    floor, step = size[1] - 12, size[0] / len(colours)
    for number, (colour, share) in enumerate(zip(colours, heights, strict=True)):
        left, right = round(step * (number + 0.2)), round(step * (number + 0.8))
        canvas[floor - round(share * (size[1] - 24)) : floor, left:right] = PAINT[colour]
    canvas[floor : floor + 2] = 120
    return _Drawn([canvas], colours[tallest], {})


def _two(rng: random.Random, size: tuple[int, int]) -> _Drawn:
    forms, colours, asked = rng.sample(SHAPES, 2), rng.sample(list(PAINT), 2), rng.randrange(2)
    pictures = [_one(rng, size, shape, colour) for shape, colour in zip(forms, colours, strict=True)]
    return _Drawn(pictures, ORDER[asked], {"c": colours[asked], "s": forms[asked]})


_MADE: dict[str, Callable[[random.Random, tuple[int, int]], _Drawn]] = {
    "shape": _shape, "colour": _colour, "count": _count, "place": _place, "size": _size, "word": _word, "bars": _bars,
    "two": _two,
}  # fmt: skip


if __name__ == "__main__":
    main()
