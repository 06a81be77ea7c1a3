"""A command line of `vllm bench serve` is accepted as its users write it; unsupported options are refused by name."""

from base64 import b64encode
from typing import Any

import pytest

from redline.bench.serving.target import ServerTarget
from redline.cli.bench import options
from redline.cli.bench.options import ServerFlags, as_ours, goals, pairs, percentiles
from redline.errors import ConfigError

KNOWN = {"--goodput", "--header", "--metadata", "--num-prompts", "--seed", "--save-result"}


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("REDLINE_API_KEY", raising=False)


def target_of(base_url: str | None = None, body: dict[str, Any] | None = None, **flags: Any) -> ServerTarget:
    return ServerFlags(**flags).target(base_url, body=body)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("--num_prompts 5 --seed=-1", "--num-prompts 5 --seed=-1"),
        ("--goodput ttft:5 tpot:6 e2el:7 --seed 1", "--goodput ttft:5 --goodput tpot:6 --goodput e2el:7 --seed 1"),
        ("--goodput=ttft:5 tpot:6", "--goodput=ttft:5 --goodput tpot:6"),
        ("--header a=1 --header b=2 c=3", "--header a=1 --header b=2 --header c=3"),
        ("--metadata a=1 b=2 --save-result", "--metadata a=1 --metadata b=2 --save-result"),
        ("--surprise --seed 1", "--surprise --seed 1"),  # unknown flags are left to typer
    ],
)
def test_words_are_read_as_vllms_users_write_them(given: str, read: str):
    assert as_ours(given.split(), KNOWN) == read.split()


@pytest.mark.parametrize("flag", [*options.REFUSED, "--hf-split", "--random-mm-bucket-config", "--append_result"])
def test_a_flag_of_vllms_that_is_not_served_is_refused_with_what_to_use(flag: str):
    with pytest.raises(ConfigError, match="is not supported here: ") as caught:
        as_ours([flag, "x"], KNOWN)
    assert flag.replace("_", "-") in str(caught.value)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "gpu7", "port": 9000}, "http://gpu7:9000"),
        ({"host": "::1"}, "http://[::1]:8000"),
        ({"base_url": "https://api.example.com/v1/"}, "https://api.example.com"),
        ({"base_url": "localhost:1234"}, "http://localhost:1234"),
        ({"base_url": "http://gateway/kimi"}, "http://gateway/kimi"),
    ],
)
def test_an_address_is_understood_however_it_is_written(given: dict[str, Any], address: str):
    assert target_of(**given).base_url == address


@pytest.mark.parametrize("url", ["http://", "ftp://host", "http://host:port", "http://host:0", "http://h?x=1", ""])
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(ConfigError, match="--base-url"):
        target_of(base_url=url)


def test_the_path_says_the_backend_where_nothing_else_does():
    def spoken(**given: str) -> tuple[str, str]:
        target = ServerFlags(**given).target(otherwise="openai")  # pyright: ignore[reportArgumentType]
        return target.backend, target.endpoint

    assert spoken() == ("openai", "")
    assert spoken(endpoint="/v1/chat/completions") == ("openai-chat", "/v1/chat/completions")
    assert spoken(endpoint="v1/completions") == ("openai", "/v1/completions")
    assert spoken(endpoint="/x", backend="openai-chat") == ("openai-chat", "/x")
    with pytest.raises(ConfigError, match="--endpoint"):
        target_of(endpoint="http://host/v1")


def test_a_target_has_what_the_flags_say(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    target = target_of(
        model="folder/m", served_model_name="m", header=("X-A= b=c",), extra_body='{"top_k": 1}',
        insecure=True, body={"top_k": 5, "top_p": 0.5},
    )  # fmt: skip
    assert target == ServerTarget(
        base_url="http://127.0.0.1:8000", model="m", key="sk-1", headers={"X-A": "b=c"},
        body={"top_k": 1, "top_p": 0.5}, verify_tls=False,
    )  # fmt: skip
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\n1")
    with pytest.raises(ConfigError, match="key"):
        target_of()


@pytest.mark.parametrize("text", ["{", "[1]", "3", '{"a": 1} x'])
def test_a_body_that_is_no_object_is_refused(text: str):
    with pytest.raises(ConfigError, match="--extra-body"):
        target_of(extra_body=text)


def test_bounds_of_goodput_have_a_name_and_milliseconds():
    assert goals(["ttft:500", "e2el:1e4"], ("ttft", "e2el")) == {"ttft": 500.0, "e2el": 10000.0}
    for wrong in ("ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "tpot:3"):
        with pytest.raises(ConfigError, match="--goodput"):
            goals([wrong], ("ttft", "e2el"))


def test_lists_and_pairs_are_checked():
    assert percentiles("50,99.9") == (50.0, 99.9)
    for wrong in ("", "x", "101", "nan", "50;90"):
        with pytest.raises(ConfigError, match="--metric-percentiles"):
            percentiles(wrong)
    for wrong in ("a", "=b", "a=b\r\nc"):
        with pytest.raises(ConfigError, match="--header"):
            pairs("--header", [wrong])
    with pytest.raises(ConfigError, match="expected one of ttft"):
        options.choices("--percentile-metrics", "ttft,itl", ("ttft",))


@pytest.mark.parametrize("url", ["http://me:s%40cret@host:1/v1/", "me:s%40cret@host:1"])
def test_a_user_in_an_address_becomes_a_header_and_is_shown_nowhere(url: str):
    target = target_of(base_url=url)
    assert target.base_url == "http://host:1"
    assert target.headers == {"Authorization": "Basic " + b64encode(b"me:s@cret").decode()}
    with pytest.raises(ConfigError) as caught:
        target_of(base_url="http://me:hunter2@host:port")
    assert "hunter2" not in str(caught.value)
