"""A deployment printed as equivalent TOML."""

from pathlib import Path

import pytest

from redline.deploy.config import ServeConfig, read
from redline.deploy.shown import ABSENT, as_file, as_toml
from tests.deploy.test_config import WHOLE, write
from tests.test_house import KEYS

POOLS = """
weights = "model"
requests.timeout_s = 60.0
[sla.default]
ttft_ms = 500.0
[sla.interactive]
ttft_ms = 250.5
itl_ms = 30.0
[steer]
every_s = 2.5
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
    assert remarks["max_model_len"] == "default: whatever fits"
    assert (read(write(tmp_path, text), {})).engine == read(tmp_path, flags).engine


def test_a_file_is_named_where_it_said_so(tmp_path: Path):
    source = write(tmp_path, POOLS)
    lines = as_toml(read(source, {}), source, {}).splitlines()
    for start in ("weights", "timeout_s", "kv_memory", "type", "tokens", "role", "devices"):
        assert source.name in next(line for line in lines if line.startswith(start)).rpartition("#")[2]


def test_every_key_that_can_be_absent_says_what_holds_then(tmp_path: Path):
    assert set(ABSENT) <= {*KEYS.split(), "engine.speculation", "workers.engine", "steer", "cluster", "events"}
    text = as_toml(read(tmp_path, {"engine.speculation": "suffix"}), tmp_path, {})
    shown = {line.strip("# ").partition(" =")[0] for line in text.splitlines()}
    tables = {"per_key", "requests", "handoff", "sla", "steer", "engine", "cluster", "events", "workers"}
    assert set(ServeConfig.__struct_fields__) - tables <= shown


@pytest.mark.parametrize(
    "steer",
    ["[steer]\n", "[steer]\nevery_s = 2.0\n", '[events]\nendpoint = "tcp://127.0.0.1:5557"\ntopic = "kv"\n'],
)
def test_promises_and_steering_are_in_the_shortest_file_too(tmp_path: Path, steer: str):
    file = tmp_path / "deployment.toml"
    file.write_text(f'weights = "{tmp_path}"\n[sla.default]\nttft_ms = 500.0\n{steer}[[workers]]\ncount = 2\n')
    config = read(file, {})
    file.write_text(as_file(config))
    assert read(file, {}) == config
    assert as_file(read(tmp_path, {})) == f'weights = "{tmp_path}"\n', "and nothing more is printed"
