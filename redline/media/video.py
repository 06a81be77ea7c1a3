"""From the bytes of a video file to chunks of up to four frames, with PyAV. Untrusted input: runs in a process of its
own.

MP4, MOV, WebM, Matroska and AVI. Moonshot's sampling: at most two frames a second, evenly spaced, and four neighbouring
ones are a chunk, which takes as many prompt tokens as one image of its size. The container is chosen by the file's
first bytes and never probed, since formats such as playlists make FFmpeg open other files.
"""

import io
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from redline.media.image import BadImage, check_size, patches_of
from redline.media.rules import ImageLayout, ImageRules

FORMATS = "MP4, MOV, WebM, Matroska or AVI"
CODECS = ("av1", "h264", "hevc", "mjpeg", "mpeg4", "vp8", "vp9")
# FFmpeg opens decoders while it reads a file's head: these only. Two codecs have decoders of other names.
DECODERS = ",".join([*CODECS, "libdav1d", "libvpx", "libvpx-vp9"])
MOST_CODED = 1_000_000  # frames of a file


class VideoChunk(NamedTuple):
    """Neighbouring frames, resized and padded."""

    patches: NDArray[np.uint8]  # [frames x rows x columns, 3, patch, patch], by frame and row
    layout: ImageLayout  # of each frame
    frames: int
    time: str  # of the first frame: hh:mm:ss.mmm


class _Stream(NamedTuple):
    frames: int
    per_second: float


def reads_videos() -> bool:
    """Whether PyAV is installed."""
    return find_spec("av") is not None


def read_video(data: bytes, rules: ImageRules, most_pixels: int, most_frames: int) -> list[VideoChunk]:
    """Decodes, samples and resizes a video. most_pixels: limit on width x height. most_frames: limit on sampled frames.

    Raises BadImage.
    """
    container = _container(data)
    try:
        stream = _measured(data, container, most_pixels)
        sampled = _sampled(stream, rules.sample_fps)
        if len(sampled) > most_frames:
            raise BadImage(
                f"Could not process video: {len(sampled)} frames at {rules.sample_fps:g} a second exceed the limit of "
                f"{most_frames}; send a shorter part of it"
            )
        frames = _decoded(data, container, sampled, most_pixels)
        chunks = list[VideoChunk]()
        while some := list(islice(frames, rules.temporal_merge_kernel_size)):  # frames of one chunk in memory
            chunks.append(_chunk(some, stream, rules))
    except BadImage:
        raise
    except MemoryError as error:
        raise BadImage("Could not process video: decoding it takes more memory than allowed") from error
    except Exception as error:  # of damaged files PyAV raises many kinds
        raise BadImage("Could not process video: the file is damaged or incomplete") from error
    if not chunks:
        raise BadImage("Could not process video: the file is damaged or incomplete")
    return chunks


def _container(data: bytes) -> str:
    """FFmpeg's name of the container."""
    if data[4:8] == b"ftyp":
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    raise BadImage(f"Could not process video: expected {FORMATS}")


def _opened(data: bytes, container: str) -> Any:
    import av  # only this process has it

    return av.open(io.BytesIO(data), format=container, options={"codec_whitelist": DECODERS})


def _measured(data: bytes, container: str, most_pixels: int) -> _Stream:
    """Counts the frames without decoding them: the number in the header may be missing or wrong."""
    with _opened(data, container) as file:
        if not file.streams.video:
            raise BadImage("Could not process video: the file has no video stream")
        stream = file.streams.video[0]
        if stream.codec_context is None or stream.codec_context.codec.canonical_name not in CODECS:
            raise BadImage(f"Could not process video: expected one of the codecs {', '.join(CODECS)}")
        check_size(stream.width, stream.height, most_pixels, "video")
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        times, count = list[int](), 0
        for packet in file.demux(stream):
            count += bool(packet.size)
            if packet.size and packet.pts is not None:
                times.append(packet.pts)
            if count > MOST_CODED:
                raise BadImage(f"Could not process video: more than {MOST_CODED:,} frames")
        if len(times) > 1 and stream.time_base and max(times) > min(times):  # the rate in the header may be wrong
            rate = (len(times) - 1) / float((max(times) - min(times)) * stream.time_base)
    if not rate > 0 or not count:
        raise BadImage("Could not process video: the file is damaged or incomplete")
    return _Stream(count, rate)


def _sampled(stream: _Stream, sample_fps: float) -> list[int]:
    """The numbers of the frames that the model sees."""
    rate = min(sample_fps, stream.per_second)
    count = max(1, round(stream.frames * rate / stream.per_second))
    return np.linspace(0, stream.frames - 1, count).round().astype(int).tolist()


def _decoded(data: bytes, container: str, sampled: list[int], most_pixels: int) -> Iterator[tuple[int, Image.Image]]:
    """The sampled frames with their numbers; those that the file lacks are left out."""
    wanted = set(sampled)
    with _opened(data, container) as file:
        stream = file.streams.video[0]
        stream.thread_type, stream.codec_context.thread_count = "NONE", 1
        for number, frame in enumerate(file.decode(stream)):
            if number in wanted:
                check_size(frame.width, frame.height, most_pixels, "video")
                yield number, _upright(frame.to_image(), frame.rotation)
            if number >= sampled[-1]:
                return


def _upright(image: Image.Image, rotation: int) -> Image.Image:
    """rotation: in degrees, counter-clockwise; other angles than quarters of a turn are ignored."""
    turns = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}
    turn = turns.get(rotation % 360)
    return image if turn is None else image.transpose(turn)


def _chunk(frames: list[tuple[int, Image.Image]], stream: _Stream, rules: ImageRules) -> VideoChunk:
    first, image = frames[0]
    layout = rules.layout(image.width, image.height, rules.in_patch_limit_each_frame)
    patches = np.concatenate([patches_of(each, layout, rules) for _, each in frames])
    return VideoChunk(patches, layout, len(frames), clock_time(first / stream.per_second))


def clock_time(seconds: float) -> str:
    """hh:mm:ss.mmm, cut off and not rounded, as Kimi K2.5's processor has it."""
    whole = int(seconds)
    return f"{whole // 3600 % 24:02}:{whole // 60 % 60:02}:{whole % 60:02}.{int(seconds % 1 * 1000):03}"
