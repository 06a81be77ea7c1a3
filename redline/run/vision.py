"""Runs the vision encoder between a step's predecessor and its rows, and keeps the results in the feature table.

The feature table is the part of the model's embedding behind the vocabulary: row r of it is token id `vocabulary + r`.
A slot holds these ids at the positions of an image, so that the target and its drafter read the features wherever they
read an embedding, on every device, and no kernel knows of images.
"""

from collections import deque

import torch
from torch import Tensor

from redline import clock
from redline.messages.media import ImageData
from redline.messages.step import Encode
from redline.model.k2.cpu import K2
from redline.model.vision.tower import Encoding, Grid, VisionTower

KEPT = 4  # calls: a step that fails after an image's last block is followed by up to two that were planned before


class VisionEncoder:
    """The encoder of one runner. Only the thread that runs steps calls `run`; `put` may be called by another."""

    def __init__(self, tower: VisionTower, model: K2, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """mean, std: of the pixel values in [0, 1], for each colour."""
        self.tower = tower
        self._table = model.feature_table
        device = self._table.device
        self._mean, self._std = (torch.tensor(each, device=device)[:, None, None] for each in (mean, std))
        self._images: dict[bytes, ImageData] = {}  # until they are encoded, and KEPT calls longer
        self._ended: deque[list[bytes]] = deque([[]], maxlen=KEPT)  # images that the last calls have encoded
        self._begun: dict[bytes, Encoding] = {}
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # around the last encodes, on a GPU

    def put(self, image: ImageData) -> None:
        """Takes the pixels of an image that will be encoded."""
        self._images[image.hash] = image

    def run(self, encodes: tuple[Encode, ...]) -> float | None:
        """Runs blocks of the encoder. Returns their seconds; on a GPU, which is not waited for, those of an earlier
        call, if they are known by now."""
        if self._table.is_cuda:
            return self._timed_on_gpu(encodes)
        began = clock.monotonic()
        self._run(encodes)
        return clock.monotonic() - began

    def _timed_on_gpu(self, encodes: tuple[Encode, ...]) -> float | None:
        """A time belongs to the last call, whose number of operations differs little from this one's."""
        before, seconds = self._events, None
        if before is not None and before[1].query():
            seconds = before[0].elapsed_time(before[1]) / 1000
        self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._events[0].record()
        self._run(encodes)
        self._events[1].record()
        return seconds

    def _run(self, encodes: tuple[Encode, ...]) -> None:
        if len(self._ended) == KEPT:
            for hash in self._ended[0]:
                self._images.pop(hash, None)
        self._ended.append([])
        for encode in encodes:
            if encode.start == 0:
                for hashes in self._ended:  # its last step has failed
                    hashes[:] = [hash for hash in hashes if hash != encode.hash]
                self._begun[encode.hash] = self._begin(self._images[encode.hash])
            encoding = self._begun.get(encode.hash)
            if encoding is None or encoding.blocks != encode.start:
                continue  # an earlier step with this image failed; the image starts again
            self.tower.advance(encoding, encode.count)
            if encode.rows:
                features = self.tower.finish(encoding)
                rows = torch.tensor(encode.rows, device=self._table.device)
                self._table.index_copy_(0, rows, features.to(self._table.dtype))
                del self._begun[encode.hash]
                self._ended[-1].append(encode.hash)

    def _begin(self, image: ImageData) -> Encoding:
        grid, patch = Grid(image.frames, image.rows, image.columns), self.tower.config.patch
        data: Tensor = torch.frombuffer(bytearray(image.patches), dtype=torch.uint8)
        pixels = data.to(self._table.device).view(grid.patches, 3, patch, patch).float() / 255
        return self.tower.begin((pixels - self._mean) / self._std, grid)
