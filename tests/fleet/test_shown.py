"""A deployment as the TOML that says the same."""

from pathlib import Path

import pytest

from redline.fleet.config import ServeConfig, read
from redline.fleet.shown import ABSENT, as_toml
from tests.fleet.test_config import WHOLE, write
from tests.test_house import KEYS

POOLS = """
weights = "model"
requests.timeout_s = 60.0
[engine]
kv_memory = "1GB"
[engine.speculation]
type = "suffix"
tokens = 5
[[workers]]
role = "prefill"
engine = { step_tokens = 4096 }
[[workers]]
role = "decode"
count = 2
devices = [0, 1]
"""


MACHINES = """
weights = "model"
[cluster]
listen = "10.0.0.1:7600"
key_file = "cluster.key"
[[workers]]
count = 2
at = "gpu-1"
weights = "/srv/model"
"""


@pytest.mark.parametrize("text", [WHOLE, POOLS, MACHINES, 'weights = "model"\nserved_model_name = ["q\\"\\\\é"]'])
def test_what_is_shown_is_read_as_the_same_deployment(text: str, tmp_path: Path):
    source = write(tmp_path, text)
    config = read(source, {})
    (tmp_path / "again").mkdir()
    assert read(write(tmp_path / "again", as_toml(config, source, {})), {}) == config


def test_a_folder_and_flags_are_shown_with_who_said_what(tmp_path: Path):
    flags = {"port": 9000, "engine.kv_memory": "1GB", "engine.speculation": "suffix", "engine.speculation.tokens": 2}
    text = as_toml(read(tmp_path, flags), tmp_path, flags)
    remarks = {line.split(" =")[0].strip("# "): line.rpartition("# ")[2] for line in text.splitlines() if " =" in line}
    assert remarks["weights"] == "argument"
    assert {remarks[key] for key in ("port", "kv_memory", "type", "tokens")} == {"flag"}
    assert {remarks[key] for key in ("host", "kv_dtype", "adaptive")} == {"default"}
    assert remarks["max_model_len"] == "default: what fits"
    assert (read(write(tmp_path, text), {})).engine == read(tmp_path, flags).engine


def test_a_file_is_named_where_it_said_so(tmp_path: Path):
    source = write(tmp_path, POOLS)
    lines = as_toml(read(source, {}), source, {}).splitlines()
    for start in ("weights", "timeout_s", "kv_memory", "type", "tokens", "role", "devices"):
        assert source.name in next(line for line in lines if line.startswith(start)).rpartition("#")[2]


def test_every_key_that_can_be_absent_says_what_holds_then(tmp_path: Path):
    assert set(ABSENT) <= {*KEYS.split(), "engine.speculation", "cluster"}
    text = as_toml(read(tmp_path, {"engine.speculation": "suffix"}), tmp_path, {})
    shown = {line.strip("# ").partition(" =")[0] for line in text.splitlines()}
    assert (
        set(ServeConfig.__struct_fields__) - {"per_key", "requests", "handoff", "engine", "cluster", "workers"} <= shown
    )
