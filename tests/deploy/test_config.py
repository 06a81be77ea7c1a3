"""A deployment is read from a folder or a file, flags win, and a mistake names its place."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from redline.api.config import Sla
from redline.deploy.config import ServeConfig, Steer, read, size
from redline.deploy.shown import as_toml
from redline.errors import ConfigError
from redline.transport import choice
from redline.worker.config import EventsConfig, Learned, Suffix

WHOLE = """
weights = "weights/kimi"
host = "::1"
port = 9000
served_model_name = ["kimi", "k2"]
keys_file = "keys.txt"
responses_file = "kept.sqlite"

[engine]
kv_memory = "1.5GiB"
max_model_len = 4096
max_running = 8
step_tokens = 256
kv_dtype = "float32"
device = "cpu"

[engine.speculation]
type = "learned"
drafter = "weights/kimi-eagle3"
tokens = 5
adaptive = false
suffix = false
head_bits = 8
trace = "accepted.jsonl"
"""

SUFFIX = """
weights = "w"
[engine.speculation]
type = "suffix"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "deployment.toml"
    path.write_text(text)
    return path


def test_a_folder_is_a_deployment_with_everything_derived(tmp_path: Path):
    config = read(tmp_path, {})
    assert config == ServeConfig(weights=str(tmp_path))
    assert config.names == (tmp_path.name,)
    assert (config.host, config.port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "examples").glob("pools*.toml")), ids=lambda file: file.stem
)
def test_an_example_of_pools_serves_a_model_that_comes_with_redline(file: Path):
    config = read(file, {})
    assert (Path(config.weights) / "config.json").exists()
    assert [place.role for place in config.places] == ["prefill", "decode"]
    assert len(config.places[0].devices) in (0, config.places[0].engine.ranks)


def test_a_file_states_every_key_and_its_paths_are_relative_to_it(tmp_path: Path):
    config = read(write(tmp_path, WHOLE), {})
    assert config.weights == str(tmp_path / "weights/kimi")
    assert config.keys_file == str(tmp_path / "keys.txt")
    assert config.responses_file == str(tmp_path / "kept.sqlite")
    assert config.names == ("kimi", "k2")
    assert (config.host, config.port) == ("::1", 9000)
    engine = config.engine
    assert (engine.kv_memory, engine.max_model_len) == (3 * 2**29, 4096)
    assert (engine.max_running, engine.step_tokens, engine.kv_dtype, engine.device) == (8, 256, "float32", "cpu")
    drafter, trace = str(tmp_path / "weights/kimi-eagle3"), str(tmp_path / "accepted.jsonl")
    how: dict[str, Any] = {"tokens": 5, "adaptive": False, "suffix": False, "head_bits": 8, "trace": trace}
    assert engine.speculation == Learned(drafter=drafter, **how)


STEERED = """
weights = "w"
[sla.default]
ttft_ms = 2000
[sla.interactive]
ttft_ms = 500
itl_ms = 30
[steer]
every_s = 2
[[workers]]
count = 2
"""


def test_classes_of_requests_have_targets_and_roles_are_steered_by_them(tmp_path: Path):
    config = read(write(tmp_path, STEERED), {})
    assert config.sla == {"default": Sla(ttft_ms=2000), "interactive": Sla(ttft_ms=500, itl_ms=30)}
    assert config.steer == Steer(every_s=2.0)
    assert {place.transport for place in config.places} == {"auto"}, "any of them may switch to the prefill role"
    alone = read(write(tmp_path, STEERED.replace("[steer]\nevery_s = 2\n", "")), {})
    assert alone.steer is None
    assert {place.transport for place in alone.places} == {None}


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("itl_ms = 30", "tpot_ms = 30", "unknown key sla.interactive.tpot_ms"),
        ("[sla.default]\nttft_ms = 2000\n", "", "[steer] needs SLO targets; set [sla.default]"),
        ("ttft_ms = 2000", "", "[sla.default] has no target; set ttft_ms, itl_ms, or both"),
        ("ttft_ms = 2000", "ttft_ms = 0", "$.sla[...].ttft_ms"),
        ("[sla.interactive]", '[sla."a b"]', "a class of requests is called 'a b'"),
        ("every_s = 2", "every_s = 0", "steer.every_s is 0; expected 0.1 to 86400"),
        ("every_s = 2", "every = 2", "unknown key steer.every; did you mean steer.every_s?"),
        ("count = 2", "count = 1", "[steer] switches roles between workers, and there is one"),
        ("[sla.default]", "api_replicas = 2\n[sla.default]", "api_replicas is 2, and [steer] is set"),
        ("every_s = 2", "spare_s = 0", "steer.spare_s is 0; expected 0.1 to 86400"),
        ("count = 2", "count = 2\nleast = 3", "workers[0].least is 3, and count is 2; expected at most 2"),
        (
            "count = 2",
            "count = 2\nleast = 0",
            'no worker with role "decode" or "both" always runs; set least to 1 or more',
        ),
        (
            "[steer]\nevery_s = 2\n[[workers]]",
            "[[workers]]\nleast = 1",
            "least is 1, and only [steer] starts the others",
        ),
    ],
)
def test_targets_and_steering_that_cannot_be_are_named(tmp_path: Path, old: str, new: str, complaint: str):
    with pytest.raises(ConfigError) as error:
        read(write(tmp_path, STEERED.replace(old, new)), {})
    assert complaint in str(error.value)


def test_workers_beyond_the_least_run_only_while_they_are_wanted(tmp_path: Path):
    kinds = STEERED.replace("count = 2", 'count = 4\nleast = 1\ndevices = [0, 1, 2, 3]\n[[workers]]\nrole = "prefill"')
    places = read(write(tmp_path, kinds), {}).places
    assert [(place.name, place.spare, place.devices) for place in places] == [
        ("worker-0", False, (0,)), ("worker-1", True, (1,)), ("worker-2", True, (2,)), ("worker-3", True, (3,)),
        ("prefill", False, ()),
    ]  # fmt: skip
    for more, complaint in (
        ("resume_s = 0", "workers[0].least is 1, and resume_s is 0"),
        ('cluster = { listen = "10.0.0.1:1", key_file = "k", kind = "ray" }', 'least is 1, and cluster.kind is "ray"'),
    ):
        with pytest.raises(ConfigError) as error:
            read(write(tmp_path, f"{more}\n{STEERED}least = 1\n"), {})
        assert complaint in str(error.value)


def test_suffix_drafts_without_a_folder(tmp_path: Path):
    assert read(write(tmp_path, SUFFIX + "tokens = 0"), {}).engine.speculation == Suffix(tokens=0)
    assert read(write(tmp_path, SUFFIX), {}).engine.draft_tokens == 3
    assert read(tmp_path, {"engine.speculation": "suffix"}).engine.speculation == Suffix()
    assert read(tmp_path, {}).engine.draft_tokens == 0


def test_synthetic_acceptance_is_a_length_or_rates_in_the_file_and_as_text(tmp_path: Path):
    def rates(text: str, **flags: Any) -> tuple[float, ...]:
        return read(write(tmp_path, SUFFIX + text), flags).engine.synthetic_rates()

    assert rates("") == ()
    assert rates("synthetic_acceptance = 3") == (1.0, 1.0, 0.0)
    assert rates("synthetic_acceptance = [0.83, 0.6, 0.45]") == (0.83, 0.6, 0.45)
    flag = {"engine.speculation.synthetic_acceptance": "0.5,0.25,0"}
    assert rates("synthetic_acceptance = 3", **flag) == (0.5, 0.25, 0.0)
    here = {**flag, "host": "localhost"}
    assert rates("", **here) == (0.5, 0.25, 0.0)
    with pytest.raises(ConfigError, match=r"host is 10\.1\.2\.3"):
        rates("", **{**flag, "host": "10.1.2.3"})


def test_a_flag_changes_who_drafts_and_the_file_still_says_how(tmp_path: Path):
    how = {"tokens": 5, "adaptive": False, "trace": str(tmp_path / "accepted.jsonl")}
    flags: dict[str, Any] = {"engine.speculation": "suffix"}
    assert read(write(tmp_path, WHOLE), flags).engine.speculation == Suffix(**how)
    flags["engine.speculation"] = "other"
    other = Learned(drafter="other", suffix=False, head_bits=8, **how)
    assert read(write(tmp_path, WHOLE), flags).engine.speculation == other
    flags |= {"engine.speculation.tokens": 2, "engine.speculation.trace": "here"}
    assert read(write(tmp_path, SUFFIX), flags).engine.speculation == Learned(drafter="other", tokens=2, trace="here")
    flags = {"engine.speculation.tokens": 2}
    assert read(write(tmp_path, SUFFIX), flags).engine.speculation == Suffix(tokens=2)
    flags["engine.speculation"] = "suffix"
    how_alone = 'weights = "w"\n[engine.speculation]\nadaptive = false'
    assert read(write(tmp_path, how_alone), flags).engine.speculation == Suffix(tokens=2, adaptive=False)


def test_a_flag_wins_over_the_file(tmp_path: Path):
    flags: dict[str, Any] = {"port": 1234, "engine.kv_memory": "64MB", "keys_file": "here.txt"}
    config = read(write(tmp_path, WHOLE), flags)
    assert (config.port, config.engine.kv_memory, config.engine.max_model_len) == (1234, 64_000_000, 4096)
    assert config.keys_file == "here.txt", "a flag's path is relative to the working directory"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = 8000", r"missing required field `weights`"),
        (
            'weights = "w"\nporrt = 1',
            r"unknown key porrt; did you mean port\? the keys are weights, host, .*head_bits$",
        ),
        ('weights = "w"\n[engine]\nkv_memry = 1', r"unknown key engine\.kv_memry; did you mean engine\.kv_memory\?"),
        ('weights = "w"\nmax-model-len = 1', r"unknown key max-model-len; did you mean engine\.max_model_len\?"),
        ('weights = "w"\n[engine]\nport = 1', r"unknown key engine\.port; did you mean port\?"),
        ('weights = "w"\n[engin]\nkv_memory = 1', r"unknown key engin; did you mean \[engine\]\?"),
        (
            'weights = "w"\n"[/x]" = 1',
            r"unknown key \[/x\]; the keys are weights, host, .*, under \[engine\] kv_memory",
        ),
        ('weights = "a\\u0000b"', r"weights is 'a\\x00b'; expected text without zero bytes"),
        ('weights = "w"\nhost = ""', r"host is empty"),
        ('weights = "w"\nserved_model_name = ["\\u001b[2J"]', r"the model would be called '\\x1b\[2J'; set"),
        ('weights = "w"\nserved_model_name = [""]', r"the model would be called ''; set served_model_name"),
        ('weights = "w"\n[engine]\nmax_running = 0', r"engine\.max_running is 0; expected 1 to 4096"),
        ('weights = "w"\n[engine]\nstep_tokens = -1', r"engine\.step_tokens is -1; expected 1 to 65536"),
        ('weights = "w"\n[engine]\nstep_ms = 0', r"engine\.step_ms is 0; expected 0\.1 to 60000"),
        ('weights = "w"\n[engine]\nstep_ms = 1e6', r"engine\.step_ms is 1000000\.0; expected 0\.1 to 60000"),
        ('weights = "w"\n[engine]\nstep_ms = nan', r"engine\.step_ms is nan; expected 0\.1 to 60000"),
        ('weights = "w"\n[engine]\nstep_tokens = 65537', r"engine\.step_tokens is 65537; expected 1 to 65536"),
        ('weights = "w"\n[engine]\nkv_memory = 0', r"engine\.kv_memory is 0; expected 1 to"),
        ('weights = "w"\n[engine]\nkv_memory = "9999999TB"', r"engine\.kv_memory is .*; expected 1 to"),
        ('weights = "w"\nport = "x"', r"Expected `int`, got `str` - at `\$\.port`"),
        ('weights = "w"\nport = 65536', r"port is 65536; expected 0 to 65535"),
        ('weights = "w"\n[engine]\nkv_memory = "2 bags"', r"engine\.kv_memory is '2 bags'; expected a size"),
        ('weights = "w"\nengine = 1', r"engine"),
        (SUFFIX + "tokens = 16", r"engine\.speculation\.tokens is 16; expected 0 to 15"),
        (
            SUFFIX.replace("suffix", "learned") + 'drafter = "d"\nhead_bits = 4',
            r"engine\.speculation\.head_bits is 4; expected 16 or 8",
        ),
        (SUFFIX + "tokens = -1", r"engine\.speculation\.tokens is -1; expected 0 to 15"),
        (SUFFIX + "tokns = 1", r"unknown key engine\.speculation\.tokns; did you mean engine\.speculation\.tokens\?"),
        (
            SUFFIX + "synthetic_acceptance = 5",
            r"engine\.speculation\.synthetic_acceptance is 5; expected a mean number of tokens",
        ),
        (SUFFIX + "synthetic_acceptance = [0.5, 0.6, 0]", r"synthetic_acceptance is 0\.5, 0\.6, 0; .* never rise"),
        (SUFFIX + 'synthetic_acceptance = "much"', r"synthetic_acceptance is 'much'; expected a length such as"),
        (
            'host = "0.0.0.0"\n' + SUFFIX + "synthetic_acceptance = 2.5",
            r"synthetic_acceptance is for benchmarks: .*; host is 0\.0\.0\.0, which other machines reach",
        ),
        (
            SUFFIX + 'drafter = "d"',
            r'unknown key engine\.speculation\.drafter; .* \("suffix"\) type, tokens,',
        ),
        (SUFFIX + "suffix = true", r'unknown key engine\.speculation\.suffix; the keys are .* \("suffix"\) type, tok'),
        (SUFFIX + 'trace = "\\u0000"', r"engine\.speculation\.trace is '\\x00'; expected text without zero bytes"),
        ('weights = "w"\n[engine.speculation]\ntype = "eagle"', r"Invalid value 'eagle' - at `\$\.engine\.speculation"),
        ('weights = "w"\n[engine.speculation]\ntype = "learned"', r"missing required field `drafter` - at `\$\.engine"),
        (
            'weights = "w"\n[engine.speculation]\ntokens = 3',
            r"engine\.speculation\.tokens is set, but there is no drafter: set",
        ),
        (
            'weights = "w"\n[engine.speculation]\ntrace = "t"',
            r"engine\.speculation\.trace is set, but there is no drafter",
        ),
        (
            'weights = "w"\n[engine.speculation]',
            r"engine\.speculation is set, but there is no drafter: set engine\.speculation\.t",
        ),
        (
            'weights = "w"\n[engine]\nspeculation = "suffix"',
            r"engine\.speculation is 'suffix'; expected a table with type =",
        ),
        ('weights = "w"\n[engine]\nspeculation = 3', r"engine\.speculation is 3; expected a table"),
        (
            'weights = "w"\n[engine]\ndraft = "a/b"',
            r'unknown key engine\.draft; it is \[engine\.speculation\] type = "learned", drafter = "a/b" now$',
        ),
        (
            'weights = "w"\n[engine]\ndraft = "a\\nb"',
            r'it is \[engine\.speculation\] type = "learned", drafter = "a\\nb" now$',
        ),
        ('weights = "w"\n[engine]\ndraft = "suffix"', r'it is \[engine\.speculation\] type = "suffix" now$'),
        (
            'weights = "w"\n[engine]\ndraft = 3',
            r'it is \[engine\.speculation\] type = "learned", drafter = "FOLDER" now$',
        ),
        (
            'weights = "w"\n[engine]\ndraft_tokens = 3',
            r"unknown key engine\.draft_tokens; it is engine\.speculation\.tokens ",
        ),
        ('weights = "w"\n[engine]\ndraft_trace = "t"', r"it is engine\.speculation\.trace now$"),
        ('weights = "w"\n[engine]\ndraft_adaptive = false', r"it is engine\.speculation\.adaptive now$"),
        ('weights = "w"\n[engine]\nsuffix = false', r"it is engine\.speculation\.suffix now$"),
        ('weights = "w"\ndraft-tokens = 3', r"unknown key draft-tokens; it is engine\.speculation\.tokens now$"),
        ("weights = ", r"not a TOML file"),
        ("\xff", r"not a TOML file"),
    ],
)
def test_a_mistake_in_a_file_names_file_and_place(tmp_path: Path, text: str, words: str):
    path = tmp_path / "deployment.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=words) as caught:
        read(path, {})
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_neither_folder_nor_file(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such folder or file"):
        read(tmp_path / "nowhere", {})


def test_a_models_name_on_hugging_face_is_answered_with_what_fetches_it():
    with pytest.raises(
        ConfigError, match=r"hf download moonshotai/Kimi-K2\.6 --local-dir Kimi-K2\.6, then serve Kimi-K2\.6"
    ):
        read(Path("moonshotai/Kimi-K2.6"), {})


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ('weights = "w"\nengine = 1', {"engine.device": "cpu"}),
        ('weights = "w"\nengine = 1', {"engine.speculation": "suffix"}),
        ('weights = "w"\n[engine]\nspeculation = 1', {"engine.speculation.tokens": 1}),
        ('weights = "w"', {"port": -1}),
        ('weights = "w"', {"engine.speculation.tokens": 1}),
        (SUFFIX, {"engine.speculation.tokens": 16}),
    ],
)
def test_flags_over_a_wrong_file_are_no_crash(tmp_path: Path, text: str, flags: dict[str, Any]):
    with pytest.raises(ConfigError):
        read(write(tmp_path, text), flags)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("500MB", 500_000_000),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        (" 1 tb ", 10**12),
        ("8k", 8000),
    ],
)
def test_sizes(text: str, expected: int):
    assert size(text, "here") == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "1 GB or so", "1XB"])
def test_what_is_no_size(text: str):
    with pytest.raises(ConfigError, match="here is"):
        size(text, "here")


def test_limits_and_what_requests_may_ask_for_are_tables(tmp_path: Path):
    path = tmp_path / "deployment.toml"
    path.write_text(
        'weights = "w"\nkeys_file = "keys"\ndrain_s = 60\n[per_key]\nrequests_per_s = 2\nconcurrency = 3\n'
        "[requests]\ndefault_max_tokens = 10\ntimeout_s = 1.5\n"
    )
    config = read(path, {})
    assert (config.per_key.requests_per_s, config.per_key.concurrency, config.per_key.tokens_per_day) == (2, 3, None)
    assert (config.requests.default_max_tokens, config.requests.timeout_s, config.drain_s) == (10, 1.5, 60)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[per_key]\nconcurrency = 3", r"\[per_key\] limits the names in keys_file; set keys_file too"),
        ("keys_file = 'k'\n[per_key]\nconcurrency = 0", r"per_key.concurrency is 0; expected 1 to 1125899906842624"),
        ("[requests]\ntimeout_s = 0", "requests.timeout_s is 0; expected 0.001 to 86400"),
        ("[requests]\nmax_tokens = 5", "unknown key requests.max_tokens; did you mean requests.most_max_tokens"),
        ("concurrency = 5", "unknown key concurrency; did you mean per_key.concurrency"),
        ("admin_port = 1", "admin_port and admin_keys_file need each other"),
        ("admin_port = 99999\nadmin_keys_file = 'a'", "admin_port is 99999; expected 0 to 65535"),
        ("tls_key = 'key.pem'", "tls_cert and tls_key need each other"),
        ("admin_port = 8000\nadmin_keys_file = 'a'", "port and admin_port are both port 8000"),
        ("host = '0.0.0.0'\nadmin_port = 8000\nadmin_keys_file = 'a'", "port and admin_port are both port 8000"),
        ("metrics_port = 8000\napi_replicas = 3", "port and metrics_port are both port 8000"),
        (
            "host = 'localhost'\nport = 1\nmetrics_port = 9000\nadmin_port = 9000\nadmin_keys_file = 'a'",
            "admin_port and metrics_port are both port 9000",
        ),
        (
            "host = '::'\n[cluster]\nlisten = '10.0.0.1:8000'\nkey_file = 'k'\n[[workers]]\nat = 'b'",
            "port and cluster.listen are both port 8000",
        ),
        (
            "[events]\nendpoint = 'tcp://*:7999'\n[[workers]]\ncount = 2",
            "port and events.endpoint of worker-1 are both port 8000",
        ),
        ("drain_s = -1", r"drain_s is -1; expected 0 to 86400"),
        ("access_log = 'xml'", r"\$.access_log"),
    ],
)
def test_a_wrong_edge_is_named(tmp_path: Path, text: str, complaint: str):
    path = tmp_path / "deployment.toml"
    path.write_text(f'weights = "w"\n{text}\n')
    with pytest.raises(ConfigError, match=complaint):
        read(path, {})


POOLS = """
weights = "w"
[engine]
kv_memory = "1GB"
max_running = 8
[engine.speculation]
type = "suffix"
[[workers]]
role = "prefill"
devices = [0, 1]
count = 2
[workers.engine]
kv_memory = "2GB"
step_tokens = 4096
[[workers]]
role = "decode"
cores = [1]
"""


@pytest.mark.parametrize(
    "text",
    [
        "port = 0\nmetrics_port = 0\nadmin_port = 0\nadmin_keys_file = 'a'",
        "host = '10.0.0.1'\nadmin_port = 8000\nadmin_keys_file = 'a'",
        "unix_socket = 's'\nadmin_port = 8000\nadmin_keys_file = 'a'",
    ],
)
def test_ports_that_do_not_meet_are_no_mistake(tmp_path: Path, text: str):
    path = tmp_path / "deployment.toml"
    path.write_text(f'weights = "w"\n{text}\n')
    read(path, {})


def test_each_kind_of_worker_has_what_the_engine_table_says_and_over_it_its_own(tmp_path: Path):
    config = read(write(tmp_path, POOLS), {"engine.max_running": 4})
    first, second, last = config.places
    assert [(place.name, place.role, place.devices) for place in (first, second, last)] == [
        ("prefill-0", "prefill", (0,)),
        ("prefill-1", "prefill", (1,)),
        ("decode", "decode", ()),
    ]
    assert first.engine == second.engine
    assert (first.engine.kv_memory, first.engine.step_tokens, first.engine.max_running) == (2 * 10**9, 4096, 4)
    assert (last.engine.kv_memory, last.engine.step_tokens, last.cores) == (10**9, None, (1,))
    assert first.engine.speculation == last.engine.speculation == Suffix()


@pytest.mark.parametrize(
    ("workers", "alone"),
    [
        ("", [True]),
        ("count = 2\ndevices = [0, 1]", [True, True]),
        ("devices = [0, 1]|devices = [1, 2]|devices = [3]", [False, False, True]),
        ("devices = [0]|", [False, False]),
        ("count = 2", [False, False]),
    ],
)
def test_a_worker_is_alone_where_no_other_may_have_its_gpus(tmp_path: Path, workers: str, alone: list[bool]):
    """workers: the settings of each kind of worker, separated by "|"."""
    kinds = [f'[[workers]]\nname = "w{number}"\n{kind}\n' for number, kind in enumerate(workers.split("|"))]
    config = read(write(tmp_path, 'weights = "w"\n' + "".join(kinds if workers else ())), {})
    assert [place.alone for place in config.places] == alone


def test_one_worker_does_everything_where_none_is_named(tmp_path: Path):
    (place,) = read(write(tmp_path, SUFFIX), {}).places
    assert (place.name, place.role, place.engine.speculation) == ("worker", "both", Suffix())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workers = 3", "workers is 3; expected tables"),
        ("workers = [3]", r"workers\[0\] is 3; expected a table"),
        (
            "[[workers]]\nrolle = 'both'",
            r"unknown key workers\[0\].rolle; did you mean role\? the keys are role",
        ),
        ("[[workers]]\nrole = 'cook'", "Invalid enum value 'cook'"),
        ("[[workers]]\nengine = 3", r"workers\[0\].engine is 3; expected a table"),
        ("[[workers]]\nengine = {kv_memry = 3}", "did you mean kv_memory"),
        ("[[workers]]\nengine = {kv_memory = 'x'}", r"workers\[0\].engine.kv_memory is 'x'; expected a size"),
        ("[[workers]]\nengine = {ranks = 9}", r"workers\[0\].engine.ranks is 9; expected 1 to 8"),
        ("[[workers]]\nname = 'a/b'", "name is 'a/b'; expected 1 to 32 letters"),
        ("[[workers]]\ncount = 2\ndevices = [0]", "has 1 GPUs for count = 2"),
        ("[[workers]]\ndevices = [0]\nengine = {ranks = 2}", "has 1 GPUs for each worker, and engine.ranks is 2"),
        ("[[workers]]\n[[workers]]", "two kinds of .* are called worker"),
        ("[[workers]]\nrole = 'prefill'", "add one with role"),
    ],
)
def test_a_mistake_in_a_kind_of_worker_names_its_place(text: str, words: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=words):
        read(write(tmp_path, f'weights = "w"\n{text}\n'), {})


def test_how_prompts_are_handed_over_is_one_key_and_reaches_each_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deployment.toml"
    pools = '[[workers]]\nrole = "prefill"\n[[workers]]\nrole = "decode"\n'
    file.write_text(f'weights = "w"\n{pools}')
    assert [place.transport for place in read(file, {}).places] == ["auto", "auto"]
    file.write_text('weights = "w"\n')
    assert [place.transport for place in read(file, {}).places] == [None], "no KV transfer without a prefill worker"
    file.write_text(f'weights = "w"\n[handoff]\ntransport = "nixl"\n{pools}')
    monkeypatch.setattr(choice, "find_spec", lambda name: name)
    assert [place.transport for place in read(file, {}).places] == ["nixl", "nixl"]
    monkeypatch.setattr(choice, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"handoff\.transport: `nixl` needs.*'redline\[nixl\]'"):
        read(file, {})
    file.write_text('weights = "w"\n[handoff]\ntransport = "tcp"\n')
    with pytest.raises(ConfigError, match=r"value 'tcp'; expected 'auto' or .* - at `\$\.handoff\.transport`"):
        read(file, {})


# ------------------------------------------------------------------------------------------------ other machines


CLUSTER = 'weights = "w"\n[cluster]\nlisten = "10.0.0.1:7600"\nkey_file = "cluster.key"\n'


def test_a_worker_at_another_machine_has_that_machines_paths(tmp_path: Path):
    drafts = '[engine.speculation]\ntype = "learned"\ndrafter = "d"\n'
    there = (
        '[[workers]]\nat = "gpu-1"\nweights = "/srv/k2"\ndrafter = "/srv/d"\n[[workers]]\nname = "b"\nat = "gpu-2"\n'
    )
    config = read(write(tmp_path, f'{CLUSTER}{drafts}{there}[[workers]]\nname = "c"\n'), {})
    one, two, here = config.places
    assert [place.alone for place in config.places] == [True] * 3, "each worker has a machine of its own"
    assert (one.at, one.weights, two.at, two.weights) == ("gpu-1", "/srv/k2", "gpu-2", f"{tmp_path}/w")
    assert [place.engine.speculation.drafter for place in (one, two, here)] == [  # type: ignore[union-attr]
        "/srv/d", f"{tmp_path}/d", f"{tmp_path}/d",
    ]  # fmt: skip
    assert (here.at, here.weights) == (None, None)
    assert config.cluster is not None
    assert config.cluster.key_file == f"{tmp_path}/cluster.key"


def test_ray_gives_every_worker_a_machine_of_its_own_name(tmp_path: Path):
    config = read(write(tmp_path, CLUSTER + 'kind = "ray"\n'), {})
    assert [(place.name, place.at) for place in config.places] == [("worker", "worker")]
    config = read(write(tmp_path, CLUSTER + 'kind = "ray"\n[[workers]]\ncount = 2\n'), {})
    assert [(place.name, place.at) for place in config.places] == [("worker-0", "worker-0"), ("worker-1", "worker-1")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('weights = "w"\n[[workers]]\nat = "gpu-1"', r"workers\[0\].at is gpu-1; set \[cluster\] listen and key_file"),
        (CLUSTER, r"\[cluster\] is for workers on other machines, and no \[\[workers\]\] has `at`"),
        (CLUSTER + '[[workers]]\nat = "a b"', r"workers\[0\].at is 'a b'; expected 1 to 63 letters"),
        (CLUSTER + '[[workers]]\nat = "a"\nweights = "w"', r"workers\[0\].weights is w; expected an absolute path"),
        (CLUSTER + '[[workers]]\nweights = "/w"', r"workers\[0\].weights is a path on another machine; set at"),
        (CLUSTER + 'kind = "ray"\n[[workers]]\nat = "a"', r'at is a, and cluster.kind is "ray", which chooses'),
        (CLUSTER + 'kind = "ray"\n[[workers]]\ndevices = [0]', r'devices is set, and cluster.kind is "ray"'),
        (CLUSTER.replace("10.0.0.1", "0.0.0.0"), "cluster.listen is at 0.0.0.0, all addresses of this machine"),
        (CLUSTER.replace("10.0.0.1", "here"), "cluster.listen is at 'here'; expected the IPv4 address"),
        (CLUSTER.replace(":7600", ""), "cluster.listen is '10.0.0.1'; expected ADDRESS:PORT"),
        (CLUSTER.replace("key_file", "keyfile"), "unknown key cluster.keyfile; did you mean cluster.key_file"),
        (
            CLUSTER + '[[workers]]\nrole = "prefill"\nat = "gpu-1"\n[[workers]]\nrole = "decode"',
            'handoff.transport is "auto", which works within one machine, and prefill is at gpu-1, decode is here: set '
            'handoff.transport = "nixl"',
        ),
    ],
)
def test_a_mistake_about_machines_names_its_place(tmp_path: Path, text: str, why: str):
    with pytest.raises(ConfigError, match=why):
        read(write(tmp_path, text), {})


def test_pools_of_one_other_machine_may_share_its_memory_and_of_two_use_nixl(tmp_path: Path):
    pools = '[[workers]]\nrole = "prefill"\nat = "a"\n[[workers]]\nrole = "decode"\nat = "%s"'
    assert {place.transport for place in read(write(tmp_path, CLUSTER + pools % "a"), {}).places} == {"auto"}
    text = CLUSTER + '[handoff]\ntransport = "nixl"\n' + pools % "b"
    assert {place.transport for place in read(write(tmp_path, text), {}).places} == {"nixl"}, (
        "workers of two machines need NIXL"
    )


def test_memory_below_the_prefix_cache_is_sizes_and_a_folder_for_each_worker(tmp_path: Path) -> None:
    file = tmp_path / "deployment.toml"
    file.write_text(
        'weights = "w"\n[engine]\nhost_memory = "2GB"\ndisk = "pages"\ndisk_size = "1.5GiB"\n'
        '[[workers]]\ncount = 2\n[[workers]]\nname = "other"\nengine = { disk = "elsewhere", disk_size = "1GB" }\n'
    )
    config = read(file, {})
    assert (config.engine.host_memory, config.engine.disk_size) == (2 * 10**9, 3 * 2**29)
    first, second, other = (place.engine for place in config.places)
    assert first.disk == str(tmp_path / "pages" / "worker-0")
    assert second.disk == str(tmp_path / "pages" / "worker-1")
    assert (other.disk, other.disk_size) == (str(tmp_path / "elsewhere" / "other"), 10**9)
    assert str(tmp_path / "elsewhere") in as_toml(config, file, {})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("host_memory = 0", r"engine\.host_memory is 0; expected 1 to"),
        ("host_memory = 'much'", r"engine\.host_memory is 'much'; expected a size"),
        ("disk_size = '1GB'", r"engine\.disk and engine\.disk_size need each other"),
        ("disk = 'pages'", r"engine\.disk and engine\.disk_size need each other"),
        ("disk = 'pages'\ndisk_size = -1", r"engine\.disk_size is -1; expected 1 to"),
    ],
)
def test_memory_below_the_prefix_cache_that_could_not_be_is_one_line(tmp_path: Path, keys: str, said: str) -> None:
    file = tmp_path / "deployment.toml"
    file.write_text(f'weights = "w"\n[engine]\n{keys}\n')
    with pytest.raises(ConfigError, match=said):
        read(file, {})


def test_each_worker_tells_of_its_pages_at_an_address_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "deployment.toml"
    file.write_text(
        'weights = "w"\n[events]\nendpoint = "tcp://127.0.0.1:5557"\nreplay = "ipc:///run/again"\ntopic = "kv"\n'
        "[[workers]]\ncount = 2\n[[workers]]\nname = 'other'\n"
    )
    config = read(file, {})
    assert [place.events for place in config.places] == [
        EventsConfig(endpoint="tcp://127.0.0.1:5557", number=0, replay="ipc:///run/again", topic="kv"),
        EventsConfig(endpoint="tcp://127.0.0.1:5558", number=1, replay="ipc:///run/again.1", topic="kv"),
        EventsConfig(endpoint="tcp://127.0.0.1:5559", number=2, replay="ipc:///run/again.2", topic="kv"),
    ]
    assert config.events is not None
    assert config.events.local
    assert not msgspec.structs.replace(config.events, endpoint="tcp://*:5557").local
    assert not msgspec.structs.replace(config.events, replay="tcp://10.0.0.1:5557").local
    file.write_text('weights = "w"\n[events]\nendpoint = "tcp://[::1]:5557"\n')
    (only,) = read(file, {}).places
    assert only.events == EventsConfig(endpoint="tcp://[::1]:5557", number=0)
    two_hosts = 'endpoint = "tcp://10.0.0.1:5557"\nreplay = "tcp://127.0.0.1:5557"'
    file.write_text(f'weights = "w"\n[events]\n{two_hosts}\n[[workers]]\ncount = 2\n')
    assert len(read(file, {}).places) == 2


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ('endpoint = "127.0.0.1:5557"', r"events\.endpoint is '127\.0\.0\.1:5557'; expected tcp://ADDRESS:PORT"),
        ('endpoint = "tcp://127.0.0.1:65535"', r"events\.endpoint is .*, with a port for each worker up to 65535"),
        ('endpoint = "ipc://a"\nreplay = "tcp://x"', r"events\.replay is 'tcp://x'; expected"),
        (
            'endpoint = "tcp://127.0.0.1:5557"\nreplay = "tcp://127.0.0.1:5558"',
            r"events\.endpoint and events\.replay overlap: .* leave a gap of at least 2",
        ),
        (
            'endpoint = "tcp://*:5557"\nreplay = "tcp://127.0.0.1:5558"',
            r"events\.endpoint and events\.replay overlap: .* leave a gap of at least 2",
        ),
        ('replay = "ipc://a"', r"missing required field `endpoint`"),
    ],
)
def test_addresses_of_events_that_could_not_be_are_one_line(tmp_path: Path, keys: str, said: str) -> None:
    file = tmp_path / "deployment.toml"
    file.write_text(f'weights = "w"\n[events]\n{keys}\n[[workers]]\ncount = 2\n')
    with pytest.raises(ConfigError, match=said):
        read(file, {})
