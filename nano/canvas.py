"""A canvas that looks a little different each time: edges smooth or hard, ground, light, noise, lossy compression."""

import io
import random
from math import cos, pi, sin
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont

GROUNDS = ((255, 255, 255), (244, 244, 240), (232, 238, 246), (224, 224, 224), (250, 243, 224))
FACTORS = (1, 1, 2, 3)  # pixels drawn per pixel of the picture, in each direction: 1 has hard edges
SHADED, NOISY, LOSSY = 0.35, 0.15, 0.25  # shares of the pictures


class Thing(NamedTuple):
    """A shape on a canvas: its centre and half of its size, in pixels."""

    shape: str
    colour: str
    x: float
    y: float
    half: float


class Canvas:
    """Draws with coordinates in pixels of the picture; `picture` ends the drawing.

    plain: shapes with hard edges, and one of GROUNDS, so that the file is small.
    """

    def __init__(self, rng: random.Random, size: tuple[int, int], *, plain: bool = False) -> None:
        self._rng, self._size, self._plain = rng, size, plain
        self._factor = 1 if plain else rng.choice(FACTORS)
        light = rng.uniform(222, 255)
        any_ground = (round(light - rng.uniform(0, 14)), round(light - rng.uniform(0, 14)), round(light))
        ground = rng.choice(GROUNDS) if plain or rng.random() < 0.5 else any_ground
        self._image = Image.new("RGB", (size[0] * self._factor, size[1] * self._factor), ground)
        self._pen = ImageDraw.Draw(self._image)

    def put(self, thing: Thing, fill: tuple[int, ...]) -> None:
        """Draws a shape: in a canvas that is not plain, turned and formed a little at random."""
        rng, (_, _, x, y, h) = self._rng, thing
        varied = not self._plain and rng.random() < 0.5
        turn = rng.uniform(-0.2, 0.2) if varied and rng.random() < 0.5 and thing.shape != "circle" else 0.0
        h /= cos(turn) + abs(sin(turn))  # so that it stays inside its square
        match thing.shape:
            case "circle":
                self._pen.ellipse(self._scaled((x - h, y - h, x + h, y + h)), fill=fill)
                return
            case "square":
                points = [(-h, -h), (h, -h), (h, h), (-h, h)]
            case "triangle":
                apex, wide = (rng.uniform(-0.3, 0.3) * h, rng.uniform(0.85, 1.0) * h) if varied else (0.0, h)
                points = [(apex, -h), (-wide, h), (wide, h)]
            case _:
                inner = h * (rng.uniform(0.36, 0.5) if varied else 0.42)
                points = [
                    ((h, inner)[k % 2] * sin(k * pi / 5), -(h, inner)[k % 2] * cos(k * pi / 5)) for k in range(10)
                ]
        a, b = cos(turn), sin(turn)
        self._pen.polygon([self._scaled((x + a * u - b * v, y + b * u + a * v)) for u, v in points], fill=fill)

    def bar(self, box: tuple[float, float, float, float], fill: tuple[int, ...]) -> None:
        """Fills a rectangle: left, top, right, bottom."""
        self._pen.rectangle(self._scaled(box), fill=fill)

    def text_size(self, text: str, points: float) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of a text that begins at the origin."""
        box = self._pen.textbbox((0, 0), text, font=ImageFont.load_default(points * self._factor))
        left, top, right, bottom = (value / self._factor for value in box)
        return left, top, right, bottom

    def text(self, place: tuple[float, float], text: str, points: float, fill: tuple[int, ...]) -> None:
        """Writes a text; with smooth edges sometimes bolder."""
        bold = self._factor // 2 if not self._plain and self._rng.random() < 0.2 else 0
        font = ImageFont.load_default(points * self._factor)
        self._pen.text(self._scaled(place), text, font=font, fill=fill, stroke_width=bold, stroke_fill=fill)

    def picture(self) -> Image.Image:
        """The picture, in the size that was asked for."""
        image, rng = self._image, self._rng
        if self._factor > 1:
            image = image.reduce(self._factor)
        if self._plain:
            return image
        if rng.random() < SHADED:
            light = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize(self._size)
            most = rng.uniform(4, 18) / 255
            dark = light.point([round(value * most) for value in range(256)])
            image = ImageChops.subtract(image, Image.merge("RGB", (dark, dark, dark)))
        if rng.random() < NOISY:
            drawn = np.random.default_rng(rng.getrandbits(32)).normal(128, rng.uniform(3, 12), self._size[::-1])
            noise = Image.fromarray(drawn.clip(0, 255).astype(np.uint8))
            image = ImageChops.add(image, Image.merge("RGB", (noise, noise, noise)), offset=-128)
        if rng.random() < LOSSY:
            file = io.BytesIO()
            image.save(file, "WEBP" if rng.random() < 0.2 else "JPEG", quality=rng.randint(60, 95))
            image = Image.open(file).convert("RGB")
        return image

    def _scaled(self, values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * self._factor for value in values)
