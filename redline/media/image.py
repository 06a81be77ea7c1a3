"""From the bytes of an image file to uint8 patches, with Pillow. Untrusted input: runs in a process of its own.

PNG, JPEG, WebP, BMP, and the first frame of a GIF. The EXIF orientation is applied, transparency is laid on white,
16-bit and CMYK images become 8-bit RGB. Metadata is read for the orientation alone, and is not kept.
"""

import io
import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from redline.media.rules import ImageLayout, ImageRules

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_RATIO = 200  # between the sides of an image: a line of pixels shows nothing after it is resized


class BadImage(Exception):
    """The file is not an image that can be processed. The message is for the client; it quotes nothing of the file."""


class Pixels(NamedTuple):
    """An image, resized and padded."""

    patches: NDArray[np.uint8]  # [rows x columns, 3, patch, patch], row by row
    layout: ImageLayout


def read_image(data: bytes, rules: ImageRules, most_pixels: int) -> Pixels:
    """Decodes and resizes an image. most_pixels: limit on width x height, checked before pixels are decoded.

    Raises BadImage.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own limit on pixels, and remarks on damaged metadata
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                check_size(image.width, image.height, most_pixels)
                return _pixels(_rgb(image), rules)
    except BadImage:
        raise
    except UnidentifiedImageError:
        raise BadImage("Could not process image: expected PNG, JPEG, WebP, GIF or BMP") from None
    except Exception as error:  # a damaged file makes Pillow raise OSError, SyntaxError, struct.error, and others
        raise BadImage("Could not process image: the file is damaged or incomplete") from error


def check_size(width: int, height: int, most_pixels: int, what: str = "image") -> None:
    """Raises BadImage. what: the name of the file in the message."""
    if width * height > most_pixels:
        raise BadImage(
            f"Could not process {what}: {width} x {height} pixels exceed the limit of {most_pixels:,} pixels"
        )
    if max(width, height) > MOST_RATIO * min(width, height):
        raise BadImage(
            f"Could not process {what}: {width} x {height} pixels; the ratio of its sides exceeds {MOST_RATIO}"
        )


def _rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB, upright, without transparency."""
    image.seek(0)
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "I;16", "I;16B", "I;16L"):  # 16 bits of grey
        values = np.asarray(image).astype(np.uint32)
        image = Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _pixels(image: Image.Image, rules: ImageRules) -> Pixels:
    layout = rules.layout(image.width, image.height)
    return Pixels(patches_of(image, layout, rules), layout)


def patches_of(image: Image.Image, layout: ImageLayout, rules: ImageRules) -> NDArray[np.uint8]:
    """[rows x columns, 3, patch, patch], row by row: an RGB image, resized and padded."""
    if image.size != (layout.width, layout.height):
        image = image.resize((layout.width, layout.height), Image.Resampling.BICUBIC)
    patch = rules.patch_size
    padded = np.zeros((layout.rows * patch, layout.columns * patch, 3), dtype=np.uint8)
    padded[: layout.height, : layout.width] = np.asarray(image)
    grid = padded.reshape(layout.rows, patch, layout.columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(grid).reshape(-1, 3, patch, patch)
