"""The dashboard and the alerts of examples/operators query only series that `/metrics` has."""

import asyncio
import itertools
import json
import re
import runpy
from typing import Any, get_args

import pytest
from openai import InternalServerError

from redline.api.config import Limits
from redline.messages.delta import Delta
from redline.messages.job import Job
from redline.messages.news import STEP_SIZES, Load, StepKind, StepTimes
from tests.api.test_chat import ask
from tests.api.world import END, World, ids
from tests.operators.queries import EXAMPLES, Asked, Series, asked, document, panels, rules, series, wrong
from tests_operators.image import ROOT, instructions

ASKED = list(asked())


def script(job: Job) -> list[Delta]:
    """Prompts with an x end with an error."""
    if set(ids("x")) & set(job.tokens[-40:]):
        return [Delta(job=job.id, finish="error", error="no", fault="failed")]
    first = Delta(job=job.id, tokens=tuple(ids("</think>ab")), queued_s=0.01)
    return [first, Delta(job=job.id, tokens=(*ids("c"), END), finish="stop")]


async def loaded() -> str:
    """The text of /metrics after one of each: an answer, an error, a refusal, draft tokens, a KV transfer."""
    names = "running waiting pages_used pages_cached pages_total replayed led preemptions prompt_tokens"
    counters = dict.fromkeys(f"{names} prompt_tokens_cached generation_tokens steps drafts draft_tokens".split(), 8)
    handoffs = (("handed over", 1), ("taken over", 1))
    sizes = (1,) * (len(STEP_SIZES) + 1)
    times = tuple(StepTimes(kind=kind, steps=1, seconds=0.02, floor_s=0.01) for kind in get_args(StepKind))
    load = Load(
        **counters,
        accepted_tokens=2,
        accepted_per_pos=(1, 1),
        step_sizes=sizes,
        handoffs=handoffs,
        step_times=times,
    )
    async with World(script, Limits(waiting=1)) as world:
        await ask(world)
        with pytest.raises(InternalServerError, match="error"):
            await ask(world, messages=[{"role": "user", "content": "x"}])
        with pytest.raises(InternalServerError, match="wait already"):
            await ask(world, n=2)
        world.metrics.load(load, "worker")
        return (await world.http.get("/metrics")).text


@pytest.fixture(scope="module")
def given() -> Series:
    return series(asyncio.run(loaded()))


@pytest.mark.parametrize("one", ASKED, ids=[one.where for one in ASKED])
def test_a_query_reads_series_and_labels_that_a_loaded_server_gives(one: Asked, given: Series):
    assert not wrong(one, given)


@pytest.mark.parametrize(
    ("query", "told", "found"),
    [
        ("rate(vllm:generation_tokens[5m])", "", "vllm:generation_tokens: no such series"),
        ("sum(rate(redline:requests_total[5m])) / redline:request_total", "", "redline:request_total: no such"),
        ('redline:steps_total{by="gpu"}', "", "redline:steps_total: none with"),
        ('redline:requests_total{code=~"5.."}', "", "redline:requests_total: none with"),
        ("sum by (proposer)(redline:steps_total)", "", "redline:steps_total: has no label proposer"),
        (
            "sum by (by)(redline:steps_total) / sum by (by)(redline:queue_jobs)",
            "by",
            "redline:queue_jobs: has no label",
        ),
        ("sum by (by)(redline:steps_total)", "engine", "the result has no label engine"),
        ("redline:queue_jobs", "position", "the result has no label position"),
        ("redline:steps_total and up == 0 or redline:nothing", "", "redline:nothing: no such series"),
    ],
)
def test_a_query_for_what_is_not_there_is_found(query: str, told: str, found: str, given: Series):
    lines = wrong(Asked("", query, frozenset(told.split())), given)
    assert len(lines) == 1
    assert lines[0].startswith(found)


@pytest.mark.parametrize("query", ["sum(redline:steps_total) by (by)", "sum without (by)(redline:steps_total)"])
def test_a_query_that_is_not_understood_is_refused(query: str):
    with pytest.raises(AssertionError, match=r"sum by|without"):
        wrong(Asked("", query, frozenset()), {})


def test_the_dashboard_is_what_its_program_writes():
    assert (EXAMPLES / "grafana.json").read_text() == runpy.run_path(str(EXAMPLES / "dashboard.py"))["text"]()


def test_no_two_panels_share_a_number_or_a_place():
    assert len({panel["id"] for panel in panels()}) == len(panels())
    places = [panel["gridPos"] for panel in panels()]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_what_to_do_and_its_test_has_both_sides(rule: dict[str, Any]):
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert "for" in rule
    assert {"summary", "description"} == set(rule["annotations"])
    (tried,) = [one for one in document("alerts_test.yml")["tests"] if one["name"] == rule["alert"]]
    fired = {sample["labels"] for each in tried["promql_expr_test"] for sample in each["exp_samples"]}
    assert len(fired) == 1
    assert f'alertname="{rule["alert"]}"' in fired.pop()
    assert [] in [each["exp_samples"] for each in tried["promql_expr_test"]], "the alert does not fire before its time"
    instances = {re.findall(r'instance="([^"]+)"', one["series"])[0] for one in tried["input_series"]}
    assert "bad" in instances
    assert len(instances) > 1


IMAGE = instructions((EXAMPLES / "Dockerfile").read_text())


def of_image(name: str) -> list[str]:
    return [rest for each, rest in IMAGE if each == name]


def test_the_image_runs_redline_as_a_user_of_its_own_and_signals_reach_it():
    assert int(of_image("USER")[-1]) > 0, "a number: an orchestrator cannot check that a name is not root's"
    assert json.loads(of_image("ENTRYPOINT")[-1]) == ["redline"], "no shell, which would not pass SIGTERM on"
    verb, _, *flags = json.loads(of_image("CMD")[-1])
    assert verb == "serve"
    assert flags[::2] == ["--host", "--port"]
    port = flags[3]
    assert of_image("EXPOSE") == [port]
    assert f"http://127.0.0.1:{port}/health" in of_image("HEALTHCHECK")[-1]
    assert of_image("STOPSIGNAL") == ["SIGTERM"]


def test_nothing_that_could_be_a_key_gets_into_a_layer_of_the_image():
    copied = {source for rest in of_image("COPY") for source in rest.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    sent = (EXAMPLES / "Dockerfile.dockerignore").read_text().split()
    assert sent[0] == "*"
    assert {line.removeprefix("!") for line in sent if line.startswith("!")} == copied
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "redline"}
    assert not [rest for _, rest in IMAGE if re.search(r"key|secret|password|token", rest, re.IGNORECASE)]
