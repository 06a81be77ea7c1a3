"""How many patches and prompt tokens an image or a frame of a video takes: the numbers of preprocessor_config.json, and
Moonshot's formula.

The formula never enlarges an image. It floors the sides to whole patches before it compares their product with the
limit, and pads up to whole tokens after it, so the result may exceed the limit.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from redline.errors import CheckpointError

Whole = Annotated[int, Meta(ge=1, le=1_000_000)]


class ImageLayout(NamedTuple):
    """An image on its way to the tower: its size in pixels when resized, and its grid of patches when padded."""

    width: int
    height: int
    rows: int
    columns: int
    tokens: int


class ImageRules(msgspec.Struct, frozen=True):
    """The keys of media_proc_cfg that decide sizes and pixel values; the defaults are those of K2.5, K2.6 and K2.7."""

    in_patch_limit: Whole = 16_384
    in_patch_limit_each_frame: Whole = 4_096  # of a video
    patch_limit_on_one_side: Whole = 512
    patch_size: Annotated[int, Meta(ge=1, le=64)] = 14
    merge_kernel_size: Annotated[int, Meta(ge=2, le=2)] = 2
    fixed_output_tokens: None = None
    sample_fps: Annotated[float, Meta(gt=0, le=1000)] = 2.0  # frames of a video per second
    temporal_merge_kernel_size: Annotated[int, Meta(ge=1, le=4)] = 4  # frames of a chunk
    timestamp_mode: Literal["hh:mm:ss.fff"] = "hh:mm:ss.fff"
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        """ValueError for a standard deviation that pixels cannot be divided by."""
        if not all(value > 0 for value in self.image_std):
            raise ValueError("image_std: expected numbers above 0")

    @classmethod
    def of(cls, folder: Path | str) -> "ImageRules":
        """Reads `folder/preprocessor_config.json`. CheckpointError, with the key, if it is missing or not supported."""
        path = Path(folder) / "preprocessor_config.json"
        try:
            values = json.loads(path.read_text())["media_proc_cfg"]
            return msgspec.convert(values, cls)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: it decides how many tokens an image takes") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: media_proc_cfg: {error}") from None

    @classmethod
    def of_model(cls, folder: Path | str) -> "ImageRules | None":
        """As `of`; None if the model in this folder reads no images: its config or its index has no vision tower, or
        there is no preprocessor_config.json."""
        folder = Path(folder)
        try:
            config = json.loads((folder / "config.json").read_text())
            index = folder / "model.safetensors.index.json"
            names = json.loads(index.read_text())["weight_map"] if index.exists() else ["vision_tower."]
        except (OSError, ValueError, KeyError):
            return None  # the reader of the checkpoint tells what is wrong
        tower = config.get("vision_config") and any(name.startswith("vision_tower.") for name in names)
        return cls.of(folder) if tower and (folder / "preprocessor_config.json").exists() else None

    def most_patches(self, patch_limit: int) -> int:
        """A bound on the patches of an image with this limit: sides are floored to patches before they are compared
        with it, and padded up to whole tokens afterwards."""
        return patch_limit + 4 * self.merge_kernel_size * (self.patch_limit_on_one_side + self.merge_kernel_size)

    def layout(self, width: int, height: int, patch_limit: int | None = None) -> ImageLayout:
        """The layout of an image of this size in pixels, after its orientation has been applied. patch_limit: None:
        `in_patch_limit`."""
        patch, side = self.patch_size, self.patch_limit_on_one_side * self.patch_size
        patches = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt((patch_limit or self.in_patch_limit) / patches), side / width, side / height)
        width, height = (min(max(1, int(size * scale)), side) for size in (width, height))
        unit = patch * self.merge_kernel_size
        across, down = -(-width // unit), -(-height // unit)
        merge = self.merge_kernel_size
        return ImageLayout(width, height, down * merge, across * merge, down * across)
