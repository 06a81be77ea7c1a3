"""Drawings with questions, the batches made of them, and the tower that is trained in front of nano."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from nano import see
from nano.config import MEDIA_PLACEHOLDER
from nano.data_pictures import ASKED, CORNERS, KINDS, NUMBERS, SHAPES, drawing
from nano.sample import Split
from redline.chat.tokenizer import Tokenizer
from redline.media.rules import ImageRules
from redline.model.k2.checkpoint import Checkpoint
from redline.model.vision.config import VisionConfig
from redline.model.vision.load import load_tower
from redline.model.vision.tower import Grid, VisionTower

MODEL = Path("models/kimi-nano")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(MODEL)


@pytest.mark.parametrize("split", ["train", "values", "families"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_drawing_has_its_answer_in_its_reasoning_and_a_wording_of_its_split(kind: str, split: Split):
    rng, answers = random.Random(f"{kind} {split}"), Counter[str]()
    held = {wording.lower().strip("?.") for wording in ASKED[kind].held}
    for _ in range(60):
        one = drawing(rng, split, kind, (112, 84))
        assert [picture.size for picture in one.pictures] == [(112, 84)] * (2 if kind == "two" else 1)
        assert one.answer.lower() in one.reasoning.lower()
        answers[one.answer] += 1
        if kind in ("shape", "size", "word", "bars"):
            assert (one.question.lower().strip("?.") in held) == (split == "families")
    assert max(answers.values()) < 60
    known = {"shape": SHAPES, "size": SHAPES, "count": NUMBERS, "place": CORNERS, "two": ("first", "second")}
    assert not set(answers) - set(known.get(kind, answers))


def test_words_of_the_split_values_are_never_written_in_training():
    rng = random.Random(4)
    written: dict[Split, set[str]] = {
        split: {drawing(rng, split, "word", (168, 112)).answer.lower() for _ in range(400)}
        for split in ("train", "values")
    }
    assert not written["train"] & written["values"]


def test_a_batch_learns_the_answer_behind_the_pictures(tokenizer: Tokenizer):
    rng = random.Random(5)
    drawings = [drawing(rng, "values", "two", (112, 168)) for _ in range(3)]
    batch = see.batch_of(tokenizer, drawings)
    tokens = ImageRules().layout(112, 168).tokens
    assert batch.patches.shape == (6, batch.rows * batch.columns, 3, 14, 14)
    for one, ids, loss in zip(drawings, batch.ids, batch.loss, strict=True):
        assert (ids == MEDIA_PLACEHOLDER).sum() == 2 * tokens
        learnt = [int(ids[place + 1]) for place in range(len(ids)) if loss[place]]
        assert one.thinking
        assert tokenizer.decode_bytes(learnt).decode() == f"{one.reasoning}</think>{one.answer}<|im_end|>"


@pytest.mark.parametrize("size", [(112, 112), (224, 168)])
def test_the_graph_of_training_is_the_tower(size: tuple[int, int]):
    weights = see.initial_tower(7)
    layout = ImageRules().layout(*size)
    g = torch.Generator().manual_seed(8)
    patches = torch.randint(256, (2, layout.rows * layout.columns, 3, 14, 14), generator=g, dtype=torch.uint8)
    tower = VisionTower(see.VISION, weights)
    pixels = (patches.float() / 255 - 0.5) / 0.5
    want = torch.cat([tower.encode(one, Grid(1, layout.rows, layout.columns)) for one in pixels])
    got = see.features(weights, patches, layout.rows, layout.columns)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_step_moves_the_tower_alone_and_the_folder_keeps_the_text_model(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = see.Run(MODEL, tmp_path, seed=1, scale=0.01, kinds=["colour"], workers=0)
    rng = random.Random(9)
    batch = see.batch_of(tokenizer, [drawing(rng, "train", "colour", (56, 56)) for _ in range(2)])
    before = {name: value.detach().clone() for name, value in run.tower.items()}
    first, _ = run._step(batch, learn=True)
    second, _ = run._step(batch, learn=False)
    assert second < first
    assert not any(torch.equal(run.tower[name], value) for name, value in before.items() if "wqkv.weight" in name)
    monkeypatch.setattr(see, "EVALUATED", 16)
    run.finish()
    assert set(json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["right"]) == {"values", "families"}
    ours, theirs = (Checkpoint.open(folder) for folder in (tmp_path / "kimi-nano", MODEL))
    stored = {name: tensor for file in ours.files.values() for name, tensor in file.items()}
    for file in theirs.files.values():
        for name, tensor in file.items():
            assert torch.equal(ours.raw(stored[name]), theirs.raw(tensor)), name
    config = json.loads((tmp_path / "kimi-nano" / "config.json").read_text())
    assert VisionConfig.from_dict(config, see.VISION.text_hidden) == see.VISION
    tower = load_tower(ours, see.VISION, torch.device("cpu"))
    grid = Grid(1, batch.rows, batch.columns)
    pixels = (torch.from_numpy(batch.patches[0]).float() / 255 - 0.5) / 0.5
    want = see.features(run.tower, torch.from_numpy(batch.patches[:1]), batch.rows, batch.columns)
    assert (tower.encode(pixels, grid) - want).norm() < 0.02 * want.norm()
