"""Pixels of images on their way from the API process to a worker. A job names its images by hash; the worker asks for
the pixels of those that it has not encoded, so that a job's message stays small and no pixels are sent twice."""

from redline.messages.base import WireMessage
from redline.messages.job import JobId


class ImageWanted(WireMessage, frozen=True):
    """From a worker: send the pixels of an image of this job."""

    job: JobId
    hash: bytes


class ImageData(WireMessage, frozen=True):
    """To a worker, and from rank 0 to the other ranks: the patches of an image, or of up to four frames of a video."""

    hash: bytes
    frames: int
    rows: int  # of patches
    columns: int
    patches: bytes  # uint8 [frames x rows x columns, 3, patch, patch]
