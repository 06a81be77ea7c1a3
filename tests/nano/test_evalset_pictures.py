"""The evaluation sets of pictures: their files, and that the drawings fit the answers."""

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nano import evalset_pictures
from nano.data_pictures import COLOURS, KINDS, NUMBERS, drawing
from nano.evalset_pictures import DRAWN, PAINT, drawn, of_split, png
from redline.bench.quality.prompts import read_sets


def pictures_of(line: dict[str, Any]) -> list[Image.Image]:
    parts = line["messages"][0]["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def test_the_sets_are_read_and_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["evalset_pictures", str(tmp_path)])
    monkeypatch.setattr(evalset_pictures, "of_split", lambda split: of_split(split, per_kind=1))
    evalset_pictures.main()
    sets = read_sets(tmp_path / "eval" / "vision")
    assert set(sets) == {"values", "families", "drawn"}
    assert [prompt.kind for prompt in sets["values"]] == list(KINDS)
    assert len(sets["drawn"]) == sum(DRAWN.values()) == 60
    targets = json.loads((tmp_path / "eval" / "vision" / "targets.json").read_bytes())
    assert set(targets) == set(sets)


def test_the_same_seed_gives_the_same_questions():
    first, second = ([(line["check"], line["messages"][0]["content"][-1]) for line in drawn()] for _ in range(2))
    assert first == second


def test_a_file_has_exactly_the_pixels():
    rng = random.Random(3)
    for plain in (True, False):
        for kind in KINDS:
            picture = drawing(rng, "values", kind, (90, 70), plain=plain).pictures[0]
            assert Image.open(io.BytesIO(png(picture))).convert("RGB").tobytes() == picture.tobytes()


def near(picture: Image.Image, colour: str) -> np.ndarray[Any, Any]:
    """Which pixels are nearer to this colour than to any other, and to the ground."""
    names = [*PAINT, "ground"]
    paints = np.array([*PAINT.values(), (245, 245, 245)])
    pixels = np.asarray(picture.convert("RGB"), np.int64)
    nearest = ((pixels[:, :, None] - paints) ** 2).sum(-1).argmin(-1)
    return nearest == names.index(colour)


def pieces(inked: np.ndarray[Any, Any]) -> int:
    """Connected parts of more than a few pixels."""
    left, count = inked.copy(), 0
    while left.any():
        seen, edge = np.zeros_like(left), np.zeros_like(left)
        edge[tuple(np.argwhere(left)[0])] = True
        while edge.any():
            seen |= edge
            grown = edge.copy()
            for axis in (0, 1):
                for by in (1, -1):
                    grown |= np.roll(edge, by, axis)
            edge = grown & left & ~seen
        left &= ~seen
        count += int(seen.sum() > 20)
    return count


def test_drawings_by_other_code_fit_the_answers():
    formats = set()
    for line in drawn():
        shown, answer = pictures_of(line), line["check"]["equals"]
        formats |= {picture.format for picture in shown}
        match line["kind"]:
            case "colour":
                assert near(shown[0], answer).mean() > 0.02
            case "bars":
                heights = {colour: near(shown[0], colour).any(1).sum() for colour in PAINT}
                assert max(heights, key=lambda colour: heights[colour]) == answer
            case "place":
                colour = next(name for name in PAINT if name in line["messages"][0]["content"][-1]["text"])
                rows, columns = near(shown[0], colour).nonzero()
                down, across = int(rows.mean() > shown[0].height / 2), int(columns.mean() > shown[0].width / 2)
                assert answer == f"{('top', 'bottom')[down]} {('left', 'right')[across]}"
            case "two":
                colour = next(name for name in PAINT if name in line["messages"][0]["content"][-1]["text"])
                assert near(shown[answer == "second"], colour).mean() > 0.02
            case "count":
                assert pieces(~near(shown[0], "ground")) == NUMBERS.index(answer)
            case "shape":
                inked = ~near(shown[0], "ground")
                rows, columns = inked.nonzero()
                box = np.ptp(rows) * np.ptp(columns)
                filled = {"square": (0.9, 1.1), "circle": (0.7, 0.85), "triangle": (0.46, 0.58), "star": (0.3, 0.45)}
                least, most = filled[answer]
                assert least < inked.sum() / box < most, answer
            case "size":
                assert pieces(~near(shown[0], "ground")) == 2
            case _:
                assert (~near(shown[0], "ground")).mean() > 0.005
    assert formats == {"PNG", "JPEG", "WEBP"}
    assert set(PAINT) <= set(COLOURS)
