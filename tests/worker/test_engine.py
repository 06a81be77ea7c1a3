"""The engine as its users drive it: jobs in, deltas out, and every page returned."""

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.chat.page_hashes import make_job
from redline.errors import CheckpointError, ConfigError, WorkerLost
from redline.kernels.cpu.blocks.transformer import TransformerOutput
from redline.kernels.inputs import Inputs
from redline.messages.delta import Delta
from redline.messages.job import Job, JobId, Sampling
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.forward import predicted
from redline.model.k2.write import random_checkpoint
from redline.worker.config import EngineConfig, Learned
from redline.worker.engine import Engine, EngineCore
from tests.tiny_model import kernel_config, prompt
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer
from tests.waiting import LIMIT_S

IDS = "eagle_aux_hidden_state_layer_ids"
CONFIG = EngineConfig(kv_memory=1_000_000, max_model_len=512, max_running=8, step_tokens=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    random_checkpoint(folder, kernel_config(vocab_size=TINY_VOCAB))
    return write_tiny_tokenizer(folder)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    """An engine which at the end must be idle, with every page free or held by the prefix cache."""
    with Engine.open(folder, CONFIG) as opened:
        yield opened
    planner = opened.engine.planner
    planner.check()
    assert planner.idle
    assert planner.load().pages_used == 0


def job(engine: Engine, name: str, tokens: tuple[int, ...], **options: object) -> Job:
    asked = Sampling(**{"max_tokens": 8, "temperature": 0.0, **options})  # type: ignore[arg-type]
    return make_job(JobId(name), tokens, asked, engine.fingerprint)


def answer(deltas: list[Delta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.tokens)


def test_jobs_run_to_their_ends(engine: Engine):
    jobs = [job(engine, f"{n}", prompt(n, 10 * n + 1), max_tokens=n + 1) for n in range(12)]
    told: list[Delta] = []
    deltas = engine.generate(jobs, told.append)
    for n, one in enumerate(jobs):
        assert len(answer(deltas[one.id])) == n + 1
        assert [delta.finish for delta in deltas[one.id]] == [None] * (len(deltas[one.id]) - 1) + ["length"]
        assert [delta for delta in told if delta.job == one.id] == deltas[one.id]


def test_more_jobs_than_the_planner_sees_at_a_time(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("redline.worker.engine.OUTSTANDING", 3)
    seen: list[int] = []
    jobs = [job(engine, f"{n}", prompt(n, 5), max_tokens=n % 4 + 1) for n in range(40)]
    deltas = engine.generate(jobs, lambda _: seen.append(engine.engine.planner.load().running))
    assert [len(answer(deltas[one.id])) for one in jobs] == [n % 4 + 1 for n in range(40)]
    assert max(seen) <= 3


def test_a_job_is_taken_from_its_source_when_it_is_wanted(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("redline.worker.engine.OUTSTANDING", 3)
    taken, ended, ahead = 0, 0, list[int]()

    def jobs() -> Iterator[Job]:
        nonlocal taken
        for n in range(20):
            taken += 1
            ahead.append(taken - ended)
            yield job(engine, f"{n}", prompt(n, 5), max_tokens=n % 4 + 1)

    def take(delta: Delta) -> None:
        nonlocal ended
        ended += delta.finish is not None

    engine.run(jobs(), take)
    assert (taken, ended) == (20, 20)
    assert max(ahead) <= 2 * 3  # three running jobs, and three with their ends not yet published


def test_an_exception_in_the_source_of_jobs_aborts_those_that_run(engine: Engine):
    def jobs() -> Iterator[Job]:
        yield job(engine, "first", prompt(1, 20), max_tokens=400)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(jobs(), lambda delta: None)
    assert len(answer(engine.generate([job(engine, "after", prompt(1, 20))])[JobId("after")])) == 8


def test_jobs_that_begin_together_get_the_answers_that_they_get_alone(engine: Engine, folder: Path):
    def jobs(opened: Engine) -> list[Job]:
        return [job(opened, f"{n}", prompt(n, 10 + n), max_tokens=3 + n % 5) for n in range(14)]

    alone = engine.generate(jobs(engine))
    with Engine.open(folder, msgspec.structs.replace(CONFIG, admit_together=CONFIG.max_running)) as other:
        together = other.generate(jobs(other))
    assert {id: answer(deltas) for id, deltas in together.items()} == {id: answer(alone[id]) for id in alone}


def test_a_stop_id_ends_an_answer(engine: Engine):
    whole = answer(engine.generate([job(engine, "whole", prompt(1, 20), max_tokens=20)])[JobId("whole")])
    stop = whole[7]
    asked = job(engine, "stopped", prompt(1, 20), max_tokens=20, stop_ids=(stop,))
    deltas = engine.generate([asked])[asked.id]
    assert answer(deltas) == whole[: whole.index(stop) + 1]
    assert deltas[-1].finish == "stop"


def test_an_exception_in_on_delta_aborts_the_jobs_and_goes_on(engine: Engine):
    def refuse(delta: Delta) -> None:
        if delta.tokens:
            raise KeyboardInterrupt

    jobs = [job(engine, f"{n}", prompt(n, 40), max_tokens=400) for n in range(10)]
    with pytest.raises(KeyboardInterrupt):
        engine.generate(jobs, refuse)
    after = engine.generate([job(engine, "after", prompt(1, 20))])
    assert list(after) == ["after"]
    assert len(answer(after[JobId("after")])) == 8
    assert engine.engine.planner.load().generation_tokens < 1000  # out of the 4,000 requested


def test_an_aborted_jobs_id_may_be_used_again_at_once(engine: Engine):
    def refuse(delta: Delta) -> None:
        raise KeyboardInterrupt

    asked = job(engine, "asked", prompt(1, 20), max_tokens=400)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([asked], refuse)
    again = engine.generate([asked])[asked.id]
    assert len(answer(again)) == 400
    assert again[-1].finish == "length"


def test_the_same_id_may_be_used_again_after_its_end(engine: Engine):
    asked = job(engine, "again", prompt(1, 20))
    assert answer(engine.generate([asked])[asked.id]) == answer(engine.generate([asked])[asked.id])


@pytest.mark.parametrize(
    ("length", "max_tokens", "reason"),
    [
        (0, 1, "the prompt is empty"),
        (512, 1, "the prompt has 512 tokens; prompt and answer may have 512 together"),
        (2000, 1, "the prompt has 2000 tokens; prompt and answer may have 512 together"),
    ],
)
def test_a_job_that_can_never_run_ends_with_the_reason(engine: Engine, length: int, max_tokens: int, reason: str):
    good = job(engine, "good", prompt(1, 20))
    bad = job(engine, "bad", prompt(1, length), max_tokens=max_tokens)
    deltas = engine.generate([bad, good])
    assert deltas[bad.id] == [Delta(job=bad.id, finish="error", error=reason, fault="refused")]
    assert len(answer(deltas[good.id])) == 8


def test_an_answer_ends_where_the_model_ends(engine: Engine):
    asked = job(engine, "long", prompt(1, 500), max_tokens=1000)
    deltas = engine.generate([asked])[asked.id]
    assert len(answer(deltas)) == 12
    assert deltas[-1].finish == "length"


def test_a_logit_that_is_not_finite_ends_its_job_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    model, sound = engine.engine.model, engine.engine.model.predict
    bad, good = job(engine, "bad", prompt(1, 30)), job(engine, "good", prompt(2, 30))
    expected = answer(engine.generate([good])[good.id])

    def broken(inputs: Inputs, planes: Tensor, layers: Sequence[int], asked: Sequence[int]) -> TransformerOutput:
        out = sound(inputs, planes, layers, asked)
        logits = out.logits()
        if len(asked) == 2:  # both jobs sample in this step
            logits[0, 5] = torch.nan
        return predicted(out.hidden(), out.features, logits)

    monkeypatch.setattr(model, "predict", broken)
    deltas = engine.generate([bad, good])
    assert deltas[bad.id][-1].finish == "error"
    assert deltas[bad.id][-1].error is not None
    assert "non-finite" in deltas[bad.id][-1].error
    assert answer(deltas[good.id]) == expected


def test_a_row_that_cannot_be_sampled_ends_its_job_alone(engine: Engine):
    bad = job(engine, "bad", prompt(1, 30), logit_bias=((10**6, 1.0),))
    good = job(engine, "good", prompt(2, 30))
    expected = answer(engine.generate([good])[good.id])
    deltas = engine.generate([bad, good])
    assert (deltas[bad.id][-1].error or "").startswith("the next token could not be chosen")
    assert answer(deltas[good.id]) == expected


def test_a_step_that_fails_ends_its_jobs_and_the_next_ones_run(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("out of luck")

    asked = job(engine, "bad", prompt(4, 9))
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine.model, "predict", broken)
        deltas = engine.generate([asked])[asked.id]
    assert deltas[-1].finish == "error"
    assert "the step failed: out of luck" in (deltas[-1].error or "")
    assert len(answer(engine.generate([job(engine, "good", prompt(1, 9))])[JobId("good")])) == 8


def test_a_device_error_while_a_row_is_chosen_ends_the_engine_and_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The error occurs while one row is processed, but it would occur for all others too."""

    def broken(*_: object) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with Engine.open(folder, CONFIG) as opened:
        monkeypatch.setattr("redline.run.drafting.verify.sample_token", broken)
        asked = job(opened, "asked", prompt(1, 9), presence_penalty=0.5)
        (delta,) = opened.generate([asked])[asked.id]
        assert (delta.finish, delta.fault) == ("error", "lost")
        with pytest.raises(WorkerLost, match="an illegal memory access was encountered"):
            opened.generate([job(opened, "later", prompt(1, 9))])


def test_prompt_logprobs_are_complete_although_the_prompt_came_in_chunks(engine: Engine):
    tokens = prompt(3, 300)  # steps have 64 tokens
    asked = job(engine, "asked", tokens, prompt_logprobs=2, logprobs=0, max_tokens=3)
    for name in ("cold", "warm"):  # also if all of it is in the prefix cache
        deltas = engine.generate([make_job(JobId(name), tokens, asked.sampling, engine.fingerprint)])[JobId(name)]
        scored = [item for delta in deltas for item in delta.prompt_logprobs]
        assert tuple(item.token for item in scored) == tokens[1:]
        assert all(len(item.top) == 2 for item in scored)
        assert all(item.top[0][1] >= item.logprob for item in scored)
        assert [delta for delta in deltas if delta.tokens][1].prompt_logprobs == ()
        assert tuple(item.token for delta in deltas for item in delta.logprobs) == answer(deltas)


def test_jobs_with_the_same_prompt_share_its_pages(engine: Engine):
    tokens = prompt(4, 260)
    engine.generate([job(engine, "first", tokens, max_tokens=1)])
    jobs = [job(engine, f"{n}", tokens, temperature=1.0, seed=n, max_tokens=5) for n in range(8)]
    most: list[int] = []
    deltas = engine.generate(jobs, lambda _: most.append(engine.engine.planner.load().pages_used))
    assert all(delta.cached_tokens == 256 for parts in deltas.values() for delta in parts)
    assert max(most) <= 4 + 8  # the prompt's four full pages once, and one page per job
    assert len({answer(parts) for parts in deltas.values()}) > 1


def test_another_salt_shares_nothing(engine: Engine):
    tokens = prompt(5, 200)
    for name, salt in (("mine", "a"), ("yours", "b")):
        asked = make_job(JobId(name), tokens, Sampling(max_tokens=1), engine.fingerprint, salt)
        assert engine.generate([asked])[asked.id][-1].cached_tokens == 0


def test_many_threads_may_generate(engine: Engine):
    expected = answer(engine.generate([job(engine, "alone", prompt(6, 50))])[JobId("alone")])
    given: list[tuple[int, ...]] = []

    def ask(n: int) -> None:
        given.append(answer(engine.generate([job(engine, f"{n}", prompt(6, 50))])[JobId(f"{n}")]))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert given == [expected] * 6


def test_loading_reports_every_byte(folder: Path):
    seen: list[tuple[int, int]] = []
    EngineCore.load(folder, CONFIG, progress=lambda done, total: seen.append((done, total))).runner.close()
    done = [count for count, _ in seen]
    assert done == sorted(done)
    assert seen[-1] == (seen[0][1], seen[0][1])


def test_the_summary_says_what_there_is(engine: Engine):
    ready = engine.engine.ready
    assert ready.max_model_len == 512
    assert ready.pages == 1_000_000 // engine.engine.layout.page_bytes
    assert "cpu" in ready.summary
    assert f"{ready.pages * 64:,} tokens" in ready.summary
    assert (ready.step_tokens, ready.slots, ready.step_ms) == (64, 8, None)


def test_fp8_pages_hold_twice_the_tokens_under_other_names(engine: Engine, folder: Path):
    with Engine.open(folder, msgspec.structs.replace(CONFIG, kv_dtype="fp8", step_ms=50.0)) as other:
        assert other.engine.ready.step_ms == 50
        assert other.engine.layout.pages == 1_000_000 // (engine.engine.layout.page_bytes // 2)
        assert f"{other.engine.ready.pages * 64:,} tokens, fp8" in other.engine.ready.summary
        asked, again = job(engine, "one", prompt(7, 100)), job(other, "one", prompt(7, 100))
        assert asked.pages
        assert not set(asked.pages) & set(again.pages)
        assert len(answer(other.generate([again])[again.id])) == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_dtype": "fp4"}, "kv-dtype is 'fp4'; expected one of bf16, fp8, float32"),
        ({"kv_memory": 1000}, "--kv-memory"),
        ({"max_model_len": 65537}, "this model supports 1 to 65,536 tokens"),
        ({"max_running": 65}, "a step needs a token for each running job"),
    ],
)
def test_what_does_not_fit_is_one_line(folder: Path, change: dict[str, object], words: str):
    config = msgspec.structs.replace(CONFIG, **change)
    with pytest.raises(ConfigError) as caught:
        EngineCore.load(folder, config)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step_tokens": 65537}, "step_tokens is 65,537; the maximum is 65,536"),
        ({"step_tokens": 0}, "max_running is 8 and step_tokens 0: a step needs a token for each running job"),
        ({"max_running": 65}, "max_running is 65 and step_tokens 64: a step needs a token for each running job"),
        ({"max_running": 513, "step_tokens": None}, "max_running is 513 and step_tokens 512: a step needs a token"),
    ],
)
def test_numbers_that_cannot_work_together_are_refused_before_the_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], words: str
):
    def read(*_: object) -> None:
        pytest.fail("the weights are read")

    monkeypatch.setattr("redline.model.k2.load.load", read)
    with pytest.raises(ConfigError, match=words):
        EngineCore.load(folder, msgspec.structs.replace(CONFIG, **change))


UNFIT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "its width": ({"hidden_size": 32, "target_hidden_size": 32}, {}, "hidden_size is 32; this target needs 64"),
    "its states": ({"eagle_config": {}, IDS: [0, 2, 9]}, {}, r"\[0, 2, 9\]; this target has ids 0 .* to 3"),
    "a tensor": ({}, {"fc.weight": torch.zeros(64, 64)}, r"fc.weight: expected .* \[64, 192\], found F32 \[64, 64\]"),
    "an id": ({}, {"d2t": torch.arange(96) * 1000}, "d2t: draft id 1 is token 1001; the target has"),
    "a size for a GPU": ({}, {}, "intermediate_size is 84; the GPU's kernels take multiples of 8"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_drafter_that_does_not_fit_is_refused_by_name_before_the_weights_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    values, tensors, words = UNFIT[name]
    config = Eagle3Config.for_target(Checkpoint.open(folder).config, draft_vocab_size=96, intermediate_size=84)
    Eagle3(config).save(tmp_path)
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    save_file({**load_file(weights), **tensors}, weights)
    monkeypatch.setattr("redline.model.k2.load.load", lambda *_: pytest.fail("the model's weights are read"))
    if name == "a size for a GPU":
        monkeypatch.setattr("redline.worker.engine.why_not", lambda *_: None)
    asked = msgspec.structs.replace(CONFIG, speculation=Learned(drafter=str(tmp_path)))
    with pytest.raises(CheckpointError, match=words) as caught:
        EngineCore.load(folder, asked)
    assert str(caught.value).startswith(str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


def test_a_head_of_other_bits_is_refused_before_anything_is_read(folder: Path):
    asked = msgspec.structs.replace(CONFIG, speculation=Learned(drafter="nowhere", head_bits=4))
    with pytest.raises(ConfigError, match="head_bits is 4; expected 16 or 8"):
        EngineCore.load(folder, asked)


def test_a_folder_without_a_model_is_one_line(tmp_path: Path):
    with pytest.raises(CheckpointError) as caught:
        Engine.open(tmp_path, CONFIG)
    assert len(str(caught.value).splitlines()) == 1
