"""One layer of a measured step, as a picture."""

from pathlib import Path

import pytest

from redline.bench.runs.layer_picture import chosen, draw, pieces
from redline.bench.step.depth_record import DepthRecord, read

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_a_layers_pieces_are_its_step():
    """But for what is launched once: the head, the dense layer, the embedding."""
    records = chosen(read(RESULTS / "decode-h100.json", DepthRecord), "kimi-k2.6", 4)
    assert [record.rows for record in records] == [1, 4, 8, 16, 32]
    for record in records:
        once = sum(op.us for op in record.ops if op.launches == 1)
        layers = max(op.launches for op in record.ops)
        assert sum(us for _, us, _ in pieces(record)) * layers + once == pytest.approx(1e3 * record.ms, rel=0.02)
        assert pieces(record)[-1][1] > 0, "four ranks add up, in each layer"


def test_it_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    draw(chosen(read(RESULTS / "decode-h100.json", DepthRecord), "kimi-k2.6", 1), tmp_path / "layer.png")
    assert (tmp_path / "layer.png").stat().st_size > 10_000
