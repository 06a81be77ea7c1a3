"""Image files of every accepted kind become the same patches as plain RGB; anything else is refused in one sentence."""

import io
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from redline.media.image import BadImage, Pixels, read_image
from redline.media.rules import ImageRules

RULES = ImageRules()
PIXELS = 100_000_000


def picture(width: int = 60, height: int = 40, seed: int = 0) -> NDArray[np.uint8]:
    """Smooth colours, so that JPEG keeps them."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    planes = [x, y, (x + y + seed) / (2 + seed)]
    return (np.stack(planes, axis=-1) * 255).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def whole(pixels: Pixels) -> NDArray[np.uint8]:
    """The image without its padding, [height, width, 3]."""
    patch, layout = RULES.patch_size, pixels.layout
    grid = pixels.patches.reshape(layout.rows, layout.columns, 3, patch, patch).transpose(0, 3, 1, 4, 2)
    image = grid.reshape(layout.rows * patch, layout.columns * patch, 3)
    assert not image[layout.height :].any()
    assert not image[:, layout.width :].any()
    return image[: layout.height, : layout.width]


def shown(data: bytes) -> NDArray[np.uint8]:
    return whole(read_image(data, RULES, PIXELS))


@pytest.mark.parametrize(
    ("kind", "how", "off"),
    [
        ("PNG", {}, 0),
        ("BMP", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("WEBP", {"quality": 95}, 12),
        ("JPEG", {"quality": 98}, 6),
        ("JPEG", {"quality": 98, "progressive": True}, 6),
    ],
)
def test_every_format_shows_the_same_picture(kind: str, how: dict[str, Any], off: int):
    found = shown(encoded(Image.fromarray(picture()), kind, **how))
    assert int(np.abs(found.astype(int) - picture()).max()) <= off


def test_a_gif_shows_its_first_frame():
    frames = [Image.new("RGB", (30, 30), colour) for colour in ("red", "blue")]
    found = shown(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert (found == [255, 0, 0]).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_a_photo_is_applied(orientation: int):
    upright = Image.fromarray(picture())
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert (shown(encoded(stored, "PNG", exif=exif)) == picture()).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_transparent_parts_are_white(mode: str):
    image = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 20, 30))
    stored = image.quantize(4) if mode in ("P", "PA") else image.convert(mode)
    found = shown(encoded(stored, "PNG"))
    assert (found[:, :20] == 0).all()
    assert (found[:, 20:] == 255).all()


def test_16_bit_grey_keeps_its_brightness():
    values = (np.arange(40 * 30).reshape(30, 40) * 54).astype(np.uint16)
    found = shown(encoded(Image.fromarray(values), "PNG"))
    assert (found == (values >> 8)[..., None]).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK"])
def test_other_colours_become_rgb(mode: str):
    found = shown(encoded(Image.new("RGB", (30, 30), "white").convert(mode), "JPEG" if mode == "CMYK" else "PNG"))
    assert (found == 255).all()


def test_a_large_image_is_resized_and_a_small_one_is_not():
    small, large = (
        read_image(encoded(Image.new("RGB", size), "PNG"), RULES, PIXELS) for size in ((9, 5), (3000, 3000))
    )
    assert (small.layout.width, small.layout.height, small.layout.tokens) == (9, 5, 1)
    assert large.layout == RULES.layout(3000, 3000)
    assert large.layout.width < 3000


def refused(data: bytes, most_pixels: int = PIXELS) -> str:
    with pytest.raises(BadImage) as error:
        read_image(data, RULES, most_pixels)
    return str(error.value)


def test_too_many_pixels_are_refused_before_they_are_decoded():
    data = encoded(Image.new("L", (2000, 2000)), "PNG")
    assert "2000 x 2000 pixels exceed the limit of 1,000,000" in refused(data, 1_000_000)


@pytest.mark.parametrize("size", [(1, 30_000), (30_000, 1)])
def test_a_line_is_refused(size: tuple[int, int]):
    assert "ratio" in refused(encoded(Image.new("L", size), "PNG"))


@pytest.mark.parametrize(
    "data",
    [b"", b"not an image", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", b"II*\0" + bytes(100)],
    ids=["empty", "text", "svg", "pdf", "tiff"],
)
def test_other_files_are_refused(data: bytes):
    assert refused(data).startswith("Could not process image: expected PNG")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_truncated_file_is_refused(kind: str):
    data = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)), kind)
    assert refused(data[: len(data) // 2]).startswith("Could not process image")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_damaged_file_is_read_or_refused(kind: str):
    """Any other exception than BadImage fails the test."""
    data, draw = encoded(Image.fromarray(picture()), kind), random.Random(kind)
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(draw.randrange(1, 20)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        with suppress(BadImage):
            read_image(bytes(damaged), RULES, 1_000_000)
