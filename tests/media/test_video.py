"""Videos become chunks of up to four frames, sampled as Moonshot does; other files are refused."""

import io
import random
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from redline.media import video as module
from redline.media.image import BadImage
from redline.media.rules import ImageRules
from redline.media.video import VideoChunk, clock_time, read_video
from tests.media.videos import sound, video

RULES = ImageRules()


def read(data: bytes, most_pixels: int = 1_000_000, most_frames: int = 64) -> list[VideoChunk]:
    return read_video(data, RULES, most_pixels, most_frames)


def shades(chunk: VideoChunk) -> list[float]:
    """The grey of each frame."""
    first = chunk.patches.reshape(chunk.frames, -1, 3, 14, 14)[:, 0]
    return [float(frame.mean()) for frame in first]


def test_two_frames_a_second_in_chunks_of_four():
    """34 frames at 4 a second are 8.5 s: 17 frames of Moonshot's formula."""
    expected = np.linspace(0, 33, 17).round().astype(int).tolist()
    chunks = read(video(34))
    assert [chunk.frames for chunk in chunks] == [4, 4, 4, 4, 1]
    found = [shade for chunk in chunks for shade in shades(chunk)]
    assert found == pytest.approx([10 + 6 * number for number in expected], abs=6)
    assert [chunk.time for chunk in chunks] == [clock_time(expected[4 * at] / 4) for at in range(5)]
    assert chunks[1].time == "00:00:02.000"


@pytest.mark.parametrize(
    ("codec", "kind"),
    [
        ("mpeg4", "mp4"),
        ("libx264", "mov"),
        ("libx265", "mp4"),
        ("mjpeg", "avi"),
        ("libvpx", "webm"),
        ("libvpx-vp9", "webm"),
        ("libsvtav1", "mp4"),
    ],
)
def test_containers_and_codecs(codec: str, kind: str):
    (chunk,) = read(video(5, fps=2, codec=codec, kind=kind))[:1]
    assert (chunk.frames, chunk.layout.rows, chunk.layout.columns, chunk.layout.tokens) == (4, 6, 8, 12)
    assert shades(chunk) == pytest.approx([10, 16, 22, 28], abs=5)


def test_a_slow_video_is_seen_whole_and_a_short_one_has_one_frame():
    assert [chunk.frames for chunk in read(video(3, fps=1))] == [3]
    assert [chunk.frames for chunk in read(video(1, fps=30))] == [1]
    assert [chunk.frames for chunk in read(video(59, fps=Fraction(30_000, 1001)))] == [4]


def test_a_frame_has_a_limit_of_its_own():
    (chunk,) = read(video(1, size=(1920, 1088)), most_pixels=4_000_000)
    image = RULES.layout(1920, 1088)
    assert chunk.layout == RULES.layout(1920, 1088, RULES.in_patch_limit_each_frame)
    assert chunk.layout.tokens < image.tokens


def test_limits_are_named():
    with pytest.raises(BadImage, match=r"5 frames at 2 a second exceed the limit of 4"):
        read(video(10), most_frames=4)
    with pytest.raises(BadImage, match=r"96 x 64 pixels exceed the limit of 6,000 pixels"):
        read(video(2), most_pixels=6_000)


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text",
        picture(),
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"\0\0\0\x18ftypisom" + bytes(40),
        b"\x1a\x45\xdf\xa3" + bytes(100),
        b"RIFF\0\0\0\0AVI " + bytes(100),
    ],
    ids=["empty", "text", "picture", "playlist", "concat", "mov", "matroska", "avi"],
)
def test_other_files_are_refused(data: bytes):
    with pytest.raises(BadImage, match=r"^Could not process video: "):
        read(data)


def test_a_codec_that_is_not_listed_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CODECS", frozenset(["h264"]))
    with pytest.raises(BadImage, match="expected one of the codecs h264"):
        read(video(2))


def test_a_file_without_video_is_refused():
    with pytest.raises(BadImage, match="no video stream"):
        read(sound())


def test_damaged_files_are_read_or_refused():
    rng, whole = random.Random(5), video(12, codec="libx264")
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 12)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        try:
            assert 1 <= sum(chunk.frames for chunk in read(bytes(data), most_pixels=100_000)) <= 64
        except BadImage:
            refused += 1
    assert 0 < refused < 150


def test_times_are_written_as_a_clock():
    assert clock_time(0) == "00:00:00.000"
    assert clock_time(3725.0625) == "01:02:05.062"
    assert clock_time(1 / 24) == "00:00:00.041", "cut off"


def test_the_rate_is_that_of_the_frames_and_not_the_headers():
    """Sixty frames a second by the header, one a second by their times."""
    (chunk,) = read(video(3, fps=60, kind="matroska", every=60))
    assert (chunk.frames, chunk.time) == (3, "00:00:00.000")


def test_memory_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "patches_of", full)
    with pytest.raises(BadImage, match="more memory than allowed"):
        read(video(2))


@pytest.mark.parametrize(("rotation", "size"), [(0, (6, 4)), (90, (4, 6)), (-90, (4, 6)), (180, (6, 4)), (45, (6, 4))])
def test_frames_are_turned_by_quarters_alone(rotation: int, size: tuple[int, int]):
    assert module._upright(Image.new("RGB", (6, 4)), rotation).size == size
