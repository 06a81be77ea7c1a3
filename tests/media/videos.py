"""Video files for tests, written with PyAV, which reads the clock for its own timeouts."""

import io
from collections.abc import Callable
from fractions import Fraction

import av
import numpy as np


def video(
    frames: int,
    fps: Fraction | int = 4,
    size: tuple[int, int] = (96, 64),
    codec: str = "mpeg4",
    kind: str = "mp4",
    every: int = 1,
    shade: Callable[[int], int] = lambda number: min(250, 10 + 6 * number),
) -> bytes:
    """A file of evenly grey frames. every: time between two of them, in frames."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for number in range(frames):
            grey = np.full((size[1], size[0], 3), shade(number), np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            frame.pts, frame.time_base = number * every, 1 / Fraction(fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def sound() -> bytes:
    """A file without a video stream."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()
