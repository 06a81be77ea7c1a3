"""The images and videos of conversations: decodes those of a request, and sends their pixels to workers that ask.

Invariant: the patches of an image are kept from its decoding until a worker has them, or no request needs them. A
worker that asks again, after a restart or for another job, gets them decoded again from the file, which the request
holds.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from redline.api.ask import Prompt
from redline.api.config import Limits
from redline.api.gateway.active_requests import JobState
from redline.chat.conversation import Conversation, Message, Picture
from redline.errors import RedlineError, RequestError
from redline.media.child import DecodedItem
from redline.media.decoder import ImageDecoder
from redline.media.rules import ImageLayout, ImageRules
from redline.messages.media import ImageData
from redline.router.worker_registry import WorkerHandle

PATCH_BYTES = 1 << 30  # of patches that no worker has yet; the oldest beyond it are decoded again when they are needed
KNOWN = 4096  # decoded files whose hash and size are remembered, so that a file in a history is decoded once


class _Known(NamedTuple):
    """An image, or a chunk of a video."""

    hash: bytes
    layout: ImageLayout
    frames: int
    time: str


class Pictures:
    """Decodes images in a process of its own. rules: None if the model reads no images."""

    def __init__(self, rules: ImageRules | None, limits: Limits) -> None:
        self._limits = limits
        self._decoder = None if rules is None else ImageDecoder(rules, limits.image_pixels, limits.video_frames)
        self._known: OrderedDict[bytes, list[_Known]] = OrderedDict()  # by the hash of the file; the latest used last
        self._patches: OrderedDict[bytes, bytes] = OrderedDict()  # by image hash, until a worker has them
        self._patch_bytes = 0
        self._decoding: dict[bytes, asyncio.Task[tuple[DecodedItem, ...]]] = {}  # by the hash of the file
        self._users: dict[bytes, int] = {}  # requests with the image, by image hash
        self._sending: set[asyncio.Task[None]] = set()

    async def decoded(self, prompt: Prompt, *, hold: bool = True) -> Prompt:
        """A prompt with the hash and the size of each of its images, which are held until `release` (hold=False: they
        are only measured). Raises RequestError for a file that cannot be processed, and Overloaded."""
        if not isinstance(prompt, Conversation) or not any(message.pictures for message in prompt.messages):
            return prompt
        messages, found, frames = list[Message](), list[Picture](), 0
        try:
            for message in prompt.messages:
                pictures: list[Picture] = []
                for picture in message.pictures:
                    pictures += (read := await self._read(picture, hold=hold))
                    found += read
                    frames += sum(one.frames for one in read if one.video)
                    if frames > (most := self._limits.video_frames):
                        raise RequestError(f"more than {most} frames in the videos of one request", picture.param)
                messages.append(msgspec.structs.replace(message, pictures=tuple(pictures)) if pictures else message)
        except BaseException:
            if hold:
                self.release(found)
            raise
        return msgspec.structs.replace(prompt, messages=tuple(messages))

    def release(self, pictures: Sequence[Picture]) -> None:
        """The request that held these images has ended, or was refused."""
        for hash in [picture.hash for picture in pictures]:
            self._users[hash] -= 1
            if not self._users[hash]:
                del self._users[hash]
                self._take(hash)

    def send(self, worker: WorkerHandle, hash: bytes, job: JobState) -> None:
        """Sends the pixels of an image of a job to a worker, soon. If that fails, so does the response."""
        task = asyncio.get_running_loop().create_task(self._send(worker, hash, job))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def ended(self) -> None:
        """Kills the decoding process."""
        for task in (*self._sending, *self._decoding.values()):
            task.cancel()
        if self._decoder is not None:
            await self._decoder.close()

    async def _send(self, worker: WorkerHandle, hash: bytes, job: JobState) -> None:
        picture = next(one for one in job.pictures if one.hash == hash)
        patches = self._take(hash)
        if patches is None:
            try:
                patches = (await self._decode(picture, _key(picture)))[picture.chunk].patches
            except RedlineError as error:
                job.response.fail(error)
                return
        if worker.lost is None:
            of = picture.frames, picture.rows, picture.columns
            worker.outbox.put(ImageData(hash=hash, frames=of[0], rows=of[1], columns=of[2], patches=patches))

    async def _read(self, picture: Picture, *, hold: bool) -> list[Picture]:
        file = _key(picture)
        known = self._known.get(file)
        if known is None:
            items = await self._decode(picture, file)
            known = [_Known(item.hash, item.layout, item.frames, item.time) for item in items]
            for item in items if hold else ():
                self._keep(item.hash, item.patches)
            self._known[file] = known
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(file)
        if hold:
            for one in known:
                self._users[one.hash] = self._users.get(one.hash, 0) + 1
        return [
            msgspec.structs.replace(
                picture,
                hash=one.hash,
                frames=one.frames,
                rows=one.layout.rows,
                columns=one.layout.columns,
                chunk=number,
                time=one.time,
                ends=number == len(known) - 1,
            )
            for number, one in enumerate(known)
        ]

    def _keep(self, hash: bytes, patches: bytes) -> None:
        self._take(hash)
        self._patches[hash] = patches
        self._patch_bytes += len(patches)
        while self._patch_bytes > PATCH_BYTES:
            self._take(next(iter(self._patches)))

    def _take(self, hash: bytes) -> bytes | None:
        patches = self._patches.pop(hash, None)
        self._patch_bytes -= 0 if patches is None else len(patches)
        return patches

    async def _decode(self, picture: Picture, file: bytes) -> tuple[DecodedItem, ...]:
        """Callers who want the same file at a time share one decoding, such as those of a video's chunks."""
        assert self._decoder is not None, "the readers of requests refuse images if the model reads none"
        task = self._decoding.get(file)
        if task is None:
            decoding = self._decoder.decode(picture.data, picture.param, video=picture.video)
            task = self._decoding[file] = asyncio.get_running_loop().create_task(decoding)
            task.add_done_callback(lambda ended: self._decoded(file, ended))
        try:
            return await asyncio.shield(task)
        except RequestError as error:  # it names the field of the first caller
            raise RequestError(str(error), picture.param) from error

    def _decoded(self, file: bytes, task: "asyncio.Task[tuple[DecodedItem, ...]]") -> None:
        del self._decoding[file]
        if not task.cancelled():
            task.exception()  # if all callers are gone, nobody else looks at it


def _key(picture: Picture) -> bytes:
    """Names a file, as an image or as a video."""
    return blake2b(picture.data, digest_size=16, person=b"video" if picture.video else b"image").digest()


def pictures_of(prompt: Prompt) -> list[Picture]:
    """The images of a prompt, in their order."""
    return [one for message in prompt.messages for one in message.pictures] if isinstance(prompt, Conversation) else []
