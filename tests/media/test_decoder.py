"""Images are decoded in a process of their own: what it refuses, and what becomes of one that hangs or is killed."""

import asyncio
import io
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from PIL import Image

from redline.errors import Overloaded, RequestError
from redline.media import decoder as module
from redline.media.decoder import ImageDecoder
from redline.media.image import read_image
from redline.media.rules import ImageRules

pytestmark = pytest.mark.anyio
RULES = ImageRules()


def png(colour: str = "red", size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
async def decoder() -> AsyncIterator[ImageDecoder]:
    made = ImageDecoder(RULES, most_pixels=1_000_000, most_frames=4)
    yield made
    await made.close()


async def test_an_image_is_decoded_as_in_this_process_and_a_bad_one_is_refused_by_field(decoder: ImageDecoder):
    expected = read_image(png(), RULES, 1_000_000)
    found, *refused = await asyncio.gather(
        decoder.decode(png(), "a"), decoder.decode(b"text", "b"), decoder.decode(png(size=(2000, 2000)), "c"),
        return_exceptions=True,
    )  # fmt: skip
    assert not isinstance(found, BaseException)
    (image,) = found
    assert (image.layout, image.patches, image.frames) == (expected.layout, expected.patches.tobytes(), 1)
    assert [(error.param, str(error)[:23]) for error in refused if isinstance(error, RequestError)] == [
        ("b", "Could not process image"),
        ("c", "Could not process image"),
    ]


async def test_a_decoder_that_is_killed_is_started_again_for_the_same_image(decoder: ImageDecoder):
    await decoder.decode(png(), "a")
    process = decoder.child.process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    asked = asyncio.ensure_future(decoder.decode(png("blue"), "b"))
    while not decoder._waiting:
        await asyncio.sleep(0)
    os.kill(process.pid, signal.SIGKILL)
    assert await asked == await decoder.decode(png("blue"), "c")


async def test_an_image_that_ends_its_decoder_twice_is_refused(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The program answers the empty file with which it is started, and ends at any other."""
    program = tmp_path / "child"
    program.write_text(
        f"#!{sys.executable}\nimport sys, msgspec\nfrom redline.media.child import Decoded\n"
        "sys.stdin.buffer.read(4)\nreply = msgspec.msgpack.encode(Decoded())\n"
        "sys.stdout.buffer.write(len(reply).to_bytes(4, 'little') + reply)\nsys.stdout.flush()\n"
        "sys.stdin.buffer.read(4)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(RequestError, match="its decoder ended"):
        await decoder.decode(png(), "a")


async def test_an_image_that_takes_too_long_is_refused_and_its_process_is_killed(decoder: ImageDecoder):
    await decoder.decode(png(), "a")
    process = decoder.child.process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    decoder.decode_s = 0.0
    with pytest.raises(RequestError, match="more than 0 s"):
        await decoder.decode(png(), "b")
    assert await process.wait() == -signal.SIGKILL


async def test_a_process_whose_closing_is_cancelled_is_waited_for_by_the_next_closing(decoder: ImageDecoder):
    await decoder.decode(png(), "a")
    process = decoder.child.process
    assert process is not None
    closing = asyncio.ensure_future(decoder.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await decoder.close()
    assert process.returncode == -signal.SIGKILL


async def test_too_many_images_are_an_overload(decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "WAITING", 2)
    found = await asyncio.gather(*(decoder.decode(png(), str(n)) for n in range(3)), return_exceptions=True)
    assert [type(one) for one in found].count(Overloaded) == 1


async def test_a_reply_that_is_not_read_does_not_keep_its_process(decoder: ImageDecoder):
    """The process is killed while it writes more than the pipe and the reader hold."""
    decoder.child._reply_bytes = 1000
    with pytest.raises(RequestError, match="its decoder ended"):
        await decoder.decode(png(size=(900, 900)), "a")
    await decoder.child.ended()
    decoder.child._reply_bytes = 1 << 24
    (image,) = await decoder.decode(png(size=(900, 900)), "a")
    assert len(image.patches) > 1 << 20


async def test_the_limit_on_a_reply_holds_the_largest_video():
    rules, frames = RULES, 56
    decoder = ImageDecoder(rules, most_pixels=1 << 40, most_frames=frames)
    sides = [(1920, 1080), (1280, 720), (3840, 2160), (7168, 100), (100, 7168), (895, 897), (5000, 5000)]
    layouts = [rules.layout(*size, rules.in_patch_limit_each_frame) for size in sides]
    most = frames * max(one.rows * one.columns for one in layouts) * 3 * 14 * 14
    assert most <= decoder.child._reply_bytes <= 2 * most
