"""The runner's vision encoder over steps that fail."""

from types import SimpleNamespace
from typing import Any

import torch

from redline.messages.media import ImageData
from redline.messages.step import Encode
from redline.model.vision.load import random_tensors
from redline.model.vision.tower import VisionTower
from redline.run.vision import KEPT, VisionEncoder
from tests.laws.test_images_change_nothing import VISION, picture


def encoder() -> VisionEncoder:
    tower = VisionTower(VISION, {name: values.float() for name, values in random_tensors(VISION)})
    model: Any = SimpleNamespace(feature_table=torch.zeros(64, VISION.text_hidden))
    return VisionEncoder(tower, model, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def whole(data: ImageData) -> Encode:
    rows = tuple(range(data.rows * data.columns // 4))
    return Encode(hash=data.hash, start=0, count=VISION.layers, rows=rows)


def test_an_image_whose_last_step_failed_is_encoded_again():
    made, first = encoder(), picture(1).data
    made.put(first)
    made.run((whole(first),))
    expected = made._table.clone()
    made._table.zero_()
    for seed in range(2, KEPT):  # other images are encoded by the steps that were planned before
        other = picture(seed).data
        made.put(other)
        made.run((whole(other),))
    made.run((whole(first),))
    assert torch.equal(made._table, expected)


def test_the_pixels_of_images_are_not_kept_for_good():
    made = encoder()
    for seed in range(3 * KEPT):
        data = picture(seed).data
        made.put(data)
        made.run((whole(data),))
    assert len(made._images) <= KEPT
