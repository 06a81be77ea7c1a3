"""Answers become examples; a run that is cut off at any point resumes there."""

import errno
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console

from redline.chat.template import K2_6
from redline.chat.tokenizer import Tokenizer
from redline.draft.corpus import synth as room
from redline.draft.corpus.corpus import read_examples
from redline.draft.corpus.synth import SynthConfig, in_bulk, run, synth, wanted
from redline.errors import ConfigError
from redline.messages.delta import Delta
from redline.messages.job import Job, JobId
from redline.model.k2.write import random_checkpoint
from redline.worker.config import EngineConfig
from redline.worker.job_runner import JobRunner
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer

ENGINE = EngineConfig(kv_memory=4_000_000, max_model_len=1024, max_running=4, step_tokens=128)


class Parrot:
    """A target that answers each job with the digits of its seed, and refuses prompts longer than `limit`."""

    style = K2_6

    def __init__(self, folder: Path, limit: int = 10_000, fingerprint: str = "parrot") -> None:
        self.tokenizer = Tokenizer.open(folder)
        self.fingerprint = fingerprint
        self.limit = limit
        self.asked: list[Job] = []
        self.before_delta: Callable[[int], None] = lambda count: None

    def generate(
        self, jobs: Sequence[Job], on_delta: Callable[[Delta], object] | None = None
    ) -> dict[JobId, list[Delta]]:
        raise NotImplementedError

    def run(self, jobs: Iterable[Job], on_delta: Callable[[Delta], object]) -> None:
        asked = list(jobs)
        self.asked += asked
        count = 0
        for job in reversed(asked):
            end = self.tokenizer.stop_ids[1]
            if len(job.tokens) > self.limit:
                deltas = [Delta(job=job.id, finish="error", error=f"the prompt is {len(job.tokens)} tokens")]
            else:
                words = self.tokenizer.encode(str(job.sampling.seed))
                deltas = [Delta(job=job.id, tokens=tuple(words), proposed=3, accepted=1)]
                deltas.append(Delta(job=job.id, tokens=(end,), finish="stop"))
            for delta in deltas:
                self.before_delta(count)
                count += 1
                on_delta(delta)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    random_checkpoint(folder, kernel_config(vocab_size=TINY_VOCAB))
    return write_tiny_tokenizer(folder)


@pytest.fixture
def parrot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Parrot:
    parrot = Parrot(folder)

    @contextmanager
    def opened(config: SynthConfig) -> Iterator[Parrot]:
        yield parrot

    monkeypatch.setattr(room, "open_engine", opened)
    return parrot


def config(folder: Path, out: Path, **changes: object) -> SynthConfig:
    fields = {"domains": ("chat", "math"), "count": 6, "engine": ENGINE, **changes}
    return SynthConfig(weights=str(folder), out=str(out), **fields)  # type: ignore[arg-type]


def quietly(config: SynthConfig) -> tuple[int, str]:
    text = io.StringIO()
    return run(config, Console(file=text, width=500)), text.getvalue()


def test_each_prompt_becomes_an_example(folder: Path, tmp_path: Path, parrot: Parrot):
    asked = config(folder, tmp_path / "corpus.jsonl")
    status, text = quietly(asked)
    assert status == 0
    assert "12 new answers" in text
    examples = {one.id: one for one in read_examples(tmp_path / "corpus.jsonl").examples}
    assert set(examples) == {prompt.id for prompt in wanted(asked).prompts}
    for job in parrot.asked:
        one = examples[job.id]
        assert one.tokens[: one.prompt] == job.tokens
        answer = parrot.tokenizer.decode_bytes(one.tokens[one.prompt : -1]).decode()
        assert answer == str(job.sampling.seed)
        assert one.tokens[-1] in parrot.tokenizer.stop_ids  # the drafter has to learn where answers end
        assert one.rounds == ((one.prompt, 3, 1),)
        assert one.finish == "stop"


def test_in_bulk_a_gpu_takes_prompts_in_together_and_a_cpu_as_they_come(monkeypatch: pytest.MonkeyPatch):
    assert in_bulk(EngineConfig(device="cpu")) == EngineConfig(device="cpu")
    monkeypatch.setattr(room, "pick_device", lambda name: torch.device("cuda"))
    found = in_bulk(EngineConfig())
    assert (found.admit_together, found.step_tokens) == (32, 8192)
    told = in_bulk(EngineConfig(max_running=8, step_tokens=64, admit_together=6))
    assert (told.admit_together, told.step_tokens) == (6, 64)
    assert in_bulk(EngineConfig(max_running=1)).admit_together == 1


def test_a_run_that_is_cut_off_at_any_point_loses_and_doubles_nothing(folder: Path, tmp_path: Path, parrot: Parrot):
    out = tmp_path / "corpus.jsonl"
    asked = config(folder, tmp_path / "whole.jsonl", count=3)
    quietly(asked)
    whole = {one.id: one for one in read_examples(tmp_path / "whole.jsonl").examples}
    parrot.asked.clear()

    def cut(count: int) -> None:
        if count == 3:  # within the second answer
            raise KeyboardInterrupt

    parrot.before_delta = cut
    statuses: list[int] = []
    while len(statuses) < 20 and 0 not in statuses:
        status, text = quietly(config(folder, out, count=3))
        statuses.append(status)
        assert status == 0 or "run the same command to resume" in text
        with open(out, "ab") as file:
            file.write(b'{"id":"torn","dom')  # the incomplete line left by a kill
    assert statuses == [130] * 5 + [0]
    found = read_examples(out)
    assert len(found.examples) == len(whole)
    assert {one.id: one for one in found.examples} == whole
    assert quietly(config(folder, out, count=3))[0] == 0  # nothing to do: the target is not even opened
    assert len(parrot.asked) == 6 + 5 + 4 + 3 + 2 + 1


def test_a_full_disk_stops_with_one_line_and_the_next_run_goes_on(
    folder: Path, tmp_path: Path, parrot: Parrot, monkeypatch: pytest.MonkeyPatch
):
    out, real = tmp_path / "corpus.jsonl", os.write

    def write(file: int, data: bytes) -> int:
        if os.fstat(file).st_size > 1500:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:700])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        status, text = quietly(config(folder, out))
    assert status == 1
    assert len(text.splitlines()) == 1
    assert "the disk is full" in text
    kept = read_examples(out)
    assert 0 < len(kept.examples) < 12
    assert not kept.skipped
    assert quietly(config(folder, out))[0] == 0
    assert len(read_examples(out).examples) == 12


def test_prompts_that_are_too_long_are_named_and_counted(folder: Path, tmp_path: Path, parrot: Parrot):
    prompts = tmp_path / "prompts.jsonl"
    say = [{"id": f"p{n}", "domain": "law", "messages": [{"role": "user", "content": "x" * n}]} for n in (5, 900, 7)]
    prompts.write_text("\n".join(map(json.dumps, say)) + "\nnothing\n")
    parrot.limit = 300
    status, text = quietly(config(folder, tmp_path / "corpus.jsonl", domains=(), prompts=(str(prompts),)))
    assert status == 0
    assert "skipped p900: the prompt is" in text
    assert "1 prompts were refused" in text
    assert f"skipped {prompts}, line 4" in text
    assert {one.id for one in read_examples(tmp_path / "corpus.jsonl").examples} == {"p5", "p7"}


def test_shards_divide_the_prompts(folder: Path, tmp_path: Path):
    whole = [one.id for one in wanted(config(folder, tmp_path / "c", count=40)).prompts]
    shards = [
        [one.id for one in wanted(config(folder, tmp_path / "c", count=40, shard=f"{i}/3")).prompts] for i in (1, 2, 3)
    ]
    assert sorted(id for shard in shards for id in shard) == sorted(whole)
    assert min(map(len, shards)) > 10


def test_several_answers_to_one_prompt_are_drawn_apart(folder: Path, tmp_path: Path, parrot: Parrot):
    quietly(config(folder, tmp_path / "corpus.jsonl", domains=("chat",), count=1, samples=4))
    examples = read_examples(tmp_path / "corpus.jsonl").examples
    assert len({one.id for one in examples}) == len({one.tokens for one in examples}) == 4
    assert len({one.tokens[: one.prompt] for one in examples}) == 1


def test_several_answers_at_temperature_0_would_be_one(folder: Path, tmp_path: Path, parrot: Parrot):
    with pytest.raises(ConfigError, match="samples is 4, but at temperature 0 all answers to a prompt are the same"):
        quietly(config(folder, tmp_path / "corpus.jsonl", samples=4, temperature=0.0))
    assert not list(tmp_path.iterdir())


def test_a_users_conversation_is_asked_for_each_of_its_answers(folder: Path, tmp_path: Path):
    turns = [("user", "A"), ("assistant", "a"), ("user", "B"), ("assistant", "b")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"domain": "law", "messages": messages}))
    for kind, lengths in (("all", [1, 3]), ("last", [3])):
        asked = config(folder, tmp_path / "c", domains=(), prompts=(str(tmp_path / "talk.jsonl"),), turns=kind)
        assert [len(prompt.messages) for prompt in wanted(asked).prompts] == lengths


def test_sampling_is_the_checkpoints_unless_told_otherwise(folder: Path, tmp_path: Path, parrot: Parrot):
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.95}')
    quietly(config(folder, tmp_path / "served.jsonl"))
    quietly(config(folder, tmp_path / "greedy.jsonl", temperature=0.0, top_p=1.0))
    used = [(job.sampling.temperature, job.sampling.top_p) for job in parrot.asked]
    assert used == [(0.6, 0.95)] * 12 + [(0.0, 1.0)] * 12
    (folder / "generation_config.json").unlink()


def test_one_corpus_holds_the_answers_of_one_target(folder: Path, tmp_path: Path, parrot: Parrot):
    out = tmp_path / "corpus.jsonl"
    quietly(config(folder, out, count=1))
    with pytest.raises(ConfigError, match=r"answered with temperature 1\.0, this run has 0\.5"):
        quietly(config(folder, out, count=2, temperature=0.5))
    parrot.fingerprint = "another"
    with pytest.raises(ConfigError, match="answered with fingerprint parrot, this run has another"):
        quietly(config(folder, out, count=2))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"domains": ()}, "nothing to answer"),
        ({"count": 0}, "count is 0"),
        ({"shard": "0/2"}, "shard is '0/2'"),
        ({"shard": "3/2"}, "shard is '3/2'"),
        ({"shard": "half"}, "shard is 'half'"),
        ({"temperature": 3.0}, "temperature is 3.0; expected 0 to 2"),
        ({"top_p": 0.0}, "top_p is 0.0; expected more than 0"),
    ],
)
def test_what_cannot_be_asked_is_refused(folder: Path, tmp_path: Path, changes: dict[str, object], reason: str):
    with pytest.raises(ConfigError, match=reason):
        wanted(config(folder, tmp_path / "c", **changes))


def test_the_engine_answers(folder: Path, tmp_path: Path):
    """A real engine gives the same answers one by one as in a batch."""
    asked = config(folder, tmp_path / "batch.jsonl", domains=("math",), count=5, max_tokens=12, temperature=0.8)
    assert quietly(asked)[0] == 0
    together = {one.id: one for one in read_examples(tmp_path / "batch.jsonl").examples}
    assert len(together) == 5
    assert {len(one.tokens) - one.prompt for one in together.values() if one.finish == "length"} <= {12}
    with room.open_engine(asked) as target:

        @contextmanager
        def opened(config: SynthConfig) -> Iterator[JobRunner]:
            yield target

        for prompt in wanted(asked).prompts:
            synth(config(folder, tmp_path / "alone.jsonl", max_tokens=12, temperature=0.8), [prompt], opened)
    assert {one.id: one for one in read_examples(tmp_path / "alone.jsonl").examples} == together


def test_a_prompts_seed_is_63_bits_and_the_same_in_every_version_so_that_a_corpus_goes_on_as_it_began():
    numbers = [room._number(f"0/{i}") for i in range(200)]
    assert numbers[0] == 1576848291327681832
    assert max(map(int.bit_length, numbers)) == 63
