"""A worker's service for images: it asks for the pixels of images that jobs wait for, and hands them to the encoder.

Pixels are pulled: a job names its images by hash, and those that are encoded already, or that the prefix cache covers,
are never sent.
"""

from redline.messages.channel import Outbox
from redline.messages.codec import Wire
from redline.messages.delta import Delta
from redline.messages.media import ImageData
from redline.run.runner import Runner
from redline.scheduler.features import FeatureCache
from redline.worker.service import Service


class VisionService(Service):
    """Images of one worker. outbox: routes an `ImageWanted` to the sender of its job."""

    def __init__(self, features: FeatureCache, runner: Runner, outbox: Outbox) -> None:
        self._features = features
        self._runner = runner
        self._outbox = outbox
        self._changes = 0

    @property
    def changes(self) -> int:
        return self._changes

    def hear(self, message: Wire) -> list[Delta] | None:
        if not isinstance(message, ImageData):
            return None
        if self._features.expects(message):
            self._runner.put_image(message)
            self._features.arrived(message.hash)
            self._changes += 1
        return []

    def work(self) -> None:
        for wanted in self._features.wanted():
            self._outbox.put(wanted)
