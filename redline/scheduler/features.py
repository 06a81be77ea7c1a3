"""The embeddings of images: which are in the device's feature table, which jobs use them, and what to encode next.

The feature table has a number of rows, one per prompt position of an image. An image takes rows when a job needs it; it
is encoded a few blocks of the vision encoder per step, so that running answers never wait long; then it stays until the
rows are needed for another image and no job uses it. A job starts once all of its images that the prefix cache does not
cover are encoded, so a second question about the same image costs only its text.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from redline.messages.delta import Encoded
from redline.messages.job import JobId, MediaSpan
from redline.messages.media import ImageData, ImageWanted
from redline.messages.step import Encode, Features, Step, StepResult
from redline.scheduler.active import ActiveJob

ENCODE_S = 0.020  # seconds of a step for the encoder: a running answer waits this much longer for its token
_LEARN = 0.3  # weight of the newest measured rate


class _Image:
    """An image in the table. asker: the job that it is encoded for. blocks: of the encoder, that are launched for it.
    settled: those that have run."""

    def __init__(self, span: MediaSpan, rows: tuple[int, ...], asker: JobId) -> None:
        self.span = span
        self.rows = rows
        self.asker = asker
        self.encode_s = 0.0
        self.users: set[JobId] = set()
        self.arrived = False  # its pixels are on the device
        self.blocks = self.settled = 0


class FeatureCache:
    """The books of the feature table. An image's rows are freed only when no job uses it."""

    def __init__(self, rows: int, blocks: int, operations: Callable[[int, int, int], float]) -> None:
        """rows: of the feature table. blocks: of the encoder. operations: floating-point operations to encode a grid of
        (frames, rows, columns)."""
        self.rows = rows
        self._blocks = blocks
        self._operations = operations
        self._free = list(range(rows - 1, -1, -1))
        self._images: OrderedDict[bytes, _Image] = OrderedDict()  # the least recently needed first
        self._wanted: list[ImageWanted] = []
        self._rate: float | None = None  # operations per second; None: not measured yet
        self.encoded = 0  # images, for the metrics
        self.reused = 0
        self.encode_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether images are waiting for their pixels, or are being encoded."""
        return any(image.settled < self._blocks for image in self._images.values())

    def refusal(self, media: Sequence[MediaSpan]) -> str | None:
        """Why a prompt with these images can never run; None if it can."""
        for span in media:
            if span.tokens * 4 != span.rows * span.columns:
                return f"an image of {span.rows} x {span.columns} patches is given {span.tokens} tokens"
        tokens = sum({span.hash: span.tokens for span in media}.values())
        if tokens > self.rows:
            return f"the images of the prompt take {tokens} tokens; at most {self.rows} are encoded at a time"
        return None

    def acquire(self, job: ActiveJob, start: int) -> bool:
        """Takes the images of a job that end after position `start`, for the job's lifetime. Returns whether all are
        encoded. Without room for all of them none is taken, and it returns False."""
        needed = {span.hash: span for span in job.job.media if span.start + span.tokens > start}
        absent = [span for hash, span in needed.items() if hash not in self._images]
        if not self._make_room(sum(span.tokens for span in absent), needed):
            return False
        for hash, span in needed.items():
            image = self._images.get(hash)
            if image is None:
                rows = tuple(self._free.pop() for _ in range(span.tokens))
                image = self._images[hash] = _Image(span, rows, job.job.id)
                self._wanted.append(ImageWanted(job=job.job.id, hash=hash))
            elif job.job.id not in image.users:
                self.reused += 1
            image.users.add(job.job.id)
            self._images.move_to_end(hash)
        return all(self._images[hash].settled == self._blocks for hash in needed)

    def release(self, job: ActiveJob) -> None:
        """A job has ended. Images that nobody uses and whose pixels have not arrived are dropped."""
        for span in job.job.media:
            image = self._images.get(span.hash)
            if image is not None:
                image.users.discard(job.job.id)
                if not image.users and not image.arrived:
                    self._drop(span.hash)

    def features(self, job: ActiveJob) -> tuple[Features, ...]:
        """Where a job's images are in the table, of those that it has taken."""
        return tuple(
            Features(start=span.start, rows=self._images[span.hash].rows)
            for span in job.job.media
            if span.hash in self._images and job.job.id in self._images[span.hash].users
        )

    def encoded_for(self, job: ActiveJob) -> Encoded | None:
        """What encoding the images that a job has taken has cost; None if it has taken none."""
        taken = {span.hash: self._images.get(span.hash) for span in job.job.media}
        images = [image for image in taken.values() if image is not None and job.job.id in image.users]
        if not images:
            return None
        new = [image for image in images if image.asker == job.job.id]
        return Encoded(
            images=len(images),
            tokens=sum(image.span.tokens for image in images),
            cached=len(images) - len(new),
            encode_s=sum(image.encode_s for image in new),
        )

    def wanted(self) -> list[ImageWanted]:
        """Requests for pixels since the last call."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def expects(self, data: ImageData) -> bool:
        """Whether these pixels have been requested and are still needed, and have the grid that the job stated."""
        image = self._images.get(data.hash)
        if image is None or image.arrived:
            return False
        span = image.span
        return (data.frames, data.rows, data.columns) == (span.frames, span.rows, span.columns)

    def arrived(self, hash: bytes) -> None:
        """The pixels of an expected image are on the device."""
        self._images[hash].arrived = True

    def next(self) -> tuple[Encode, ...]:
        """The blocks to run in the next step: about ENCODE_S seconds, and at least one block if an image waits."""
        encodes: list[Encode] = []
        left = ENCODE_S
        for hash, image in self._images.items():
            missing = self._blocks - image.blocks
            if not image.arrived or not missing:
                continue
            block_s = self._block_s(image)
            count = missing if block_s is None else min(missing, int(left / block_s))
            if block_s is None:
                count = 1  # the first of all: it measures the rate
            if not count:
                if encodes:
                    break
                count = 1
            rows = image.rows if count == missing else ()
            encodes.append(Encode(hash=hash, start=image.blocks, count=count, rows=rows))
            image.blocks += count
            left -= count * (block_s or left)
            if left <= 0:
                break
        return tuple(encodes)

    def settle(self, step: Step, result: StepResult, *, failed: bool) -> None:
        """A step with `encodes` has run. If it failed, its images start again from the first block."""
        done = 0.0
        work: list[tuple[_Image, float]] = []  # images with the operations of their blocks
        for encode in step.encodes:
            image = self._images[encode.hash]
            if failed:
                image.blocks = image.settled = 0
                continue
            if encode.start == image.settled:  # otherwise it has started again since
                image.settled += encode.count
                self.encoded += image.settled == self._blocks
            span = image.span
            work.append((image, encode.count * self._operations(span.frames, span.rows, span.columns) / self._blocks))
            done += work[-1][1]
        self.encode_s += result.encode_s or 0.0
        for image, operations in work:
            image.encode_s += (result.encode_s or 0.0) * operations / done
        if result.encode_s and done:
            rate = done / result.encode_s
            self._rate = rate if self._rate is None else (1 - _LEARN) * self._rate + _LEARN * rate

    def check(self, jobs: Iterable[JobId]) -> None:
        """Raises AssertionError unless every row is free or has one image, and only these jobs, which have not ended,
        use images."""
        taken = [row for image in self._images.values() for row in image.rows]
        assert sorted(taken + self._free) == list(range(self.rows)), "a row of the feature table is lost or taken twice"
        known = set(jobs)
        for hash, image in self._images.items():
            assert image.users <= known, f"ended jobs use image {hash.hex()}: {image.users - known}"
            assert image.users or image.arrived, f"nobody needs image {hash.hex()}, whose pixels have not arrived"
            assert 0 <= image.settled <= image.blocks <= self._blocks, f"image {hash.hex()}: blocks out of order"

    def _make_room(self, tokens: int, needed: Iterable[bytes]) -> bool:
        """Whether `tokens` rows are free, after unused images, except the needed ones, are evicted."""
        spare = [
            hash
            for hash, image in self._images.items()
            if not image.users and image.settled == self._blocks and hash not in set(needed)
        ]
        if tokens > len(self._free) + sum(len(self._images[hash].rows) for hash in spare):
            return False
        for hash in spare:
            if tokens <= len(self._free):
                break
            self._drop(hash)
        return True

    def _drop(self, hash: bytes) -> None:
        self._free += self._images.pop(hash).rows

    def _block_s(self, image: _Image) -> float | None:
        """Predicted seconds of one block for an image."""
        if self._rate is None:
            return None
        span = image.span
        return self._operations(span.frames, span.rows, span.columns) / self._blocks / self._rate
