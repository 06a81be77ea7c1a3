"""Prompts reach the engine as its template renders them, and its tokens come back as answers."""

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from redline.bench.quality.answering import Greedy
from redline.bench.quality.kept import KeptAnswers
from redline.bench.quality.prompts import EvalPrompt
from redline.chat.conversation import Conversation
from redline.chat.lines import CalledFunction, CallMade, DeclaredFunction, DeclaredTool, Turn, conversation
from redline.chat.template import K2_6, encode
from redline.chat.tokenizer import Tokenizer
from redline.errors import ConfigError
from redline.messages.delta import Delta
from redline.messages.job import Job, JobId
from redline.model.k2.write import random_checkpoint
from tests.laws.test_images_change_nothing import PAD, TEXT, VISION, opened
from tests.tiny_tokenizer import write_tiny_tokenizer

HELLO = EvalPrompt(kind="chat", messages=(Turn(role="user", content="hello"),), check={"contains": ["hello"]})


class Script:
    """An engine that generates the given answers, one token per delta, the jobs in reverse order."""

    style = K2_6
    fingerprint = "script"

    def __init__(self, tokenizer: Tokenizer, *answers: str) -> None:
        self.tokenizer = tokenizer
        self.answers = [tokenizer.encode_with_specials(answer) for answer in answers]
        self.jobs: list[Job] = []

    def seen(self, conversation: Conversation) -> Conversation:
        return conversation

    def generate(
        self, jobs: Sequence[Job], on_delta: Callable[[Delta], object] | None = None
    ) -> dict[JobId, list[Delta]]:
        self.jobs = list(jobs)
        deltas: dict[JobId, list[Delta]] = {}
        for job, answer in reversed(list(zip(jobs, self.answers, strict=True))):
            ended = answer[-1] in job.sampling.stop_ids
            last = len(answer) - 1
            deltas[job.id] = [
                Delta(job=job.id, tokens=(token,), finish=None if i < last else "stop" if ended else "length")
                for i, token in enumerate(answer)
            ]
            for delta in deltas[job.id]:
                if on_delta is not None:
                    on_delta(delta)
        return deltas


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.open(write_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


def test_an_answer_is_split_into_reasoning_words_and_calls(tokenizer: Tokenizer) -> None:
    script = Script(
        tokenizer,
        "a greeting</think>hello there<|im_end|>",
        "look it up</think><|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
        '<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
        "on and on",
    )
    ended: list[None] = []
    spoken, called, cut = Greedy(script).answer([HELLO, HELLO, HELLO], lambda: ended.append(None))
    assert (spoken.reasoning, spoken.content, spoken.finish) == ("a greeting", "hello there", "stop")
    assert spoken.tokens == len(script.answers[0])
    assert called.tool_calls == (("find", '{"x": 1}'),)
    assert called.content == ""
    assert (cut.reasoning, cut.content, cut.finish) == ("on and on", "", "length")
    assert len(ended) == 3


def test_jobs_are_greedy_bounded_and_share_pages_where_prompts_begin_alike(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    long = [EvalPrompt(kind="chat", messages=(Turn(role="user", content="x" * 200 + end),), check={}) for end in "ab"]
    script = Script(tokenizer, "hello<|im_end|>", "hello<|im_end|>")
    Greedy(script, max_tokens=9).answer(long, lambda: None)
    first, second = script.jobs
    assert {(job.sampling.temperature, job.sampling.max_tokens) for job in script.jobs} == {(0, 9)}
    assert first.sampling.stop_ids == tokenizer.stop_ids
    assert first.pages[0] == second.pages[0]
    assert first.tokens != second.tokens


def test_everything_in_a_prompt_reaches_the_template(tokenizer: Tokenizer) -> None:
    tool = DeclaredFunction(name="find", description="Finds it.", parameters={"type": "object", "properties": {}})
    call = CallMade(id="functions.find:0", function=CalledFunction(name="find", arguments='{"x": 1}'))
    prompt = EvalPrompt(
        kind="tools",
        messages=(
            Turn(role="system", content="Be brief."),
            Turn(role="user", content="Where?"),
            Turn(role="assistant", reasoning_content="I must look.", tool_calls=(call,)),
            Turn(role="tool", content="Here.", tool_call_id="functions.find:0"),
        ),
        tools=(DeclaredTool(function=tool),),
        check={},
    )
    read = conversation(prompt)
    text = tokenizer.decode_bytes(encode(read, tokenizer, K2_6)).decode()
    for part in ("Finds it.", "Be brief.", "Where?", "I must look.", "functions.find:0", '{"x": 1}', "Here."):
        assert part in text
    assert text.endswith("<think>")
    instant = conversation(EvalPrompt(kind="chat", messages=HELLO.messages, check={}, thinking=False))
    assert tokenizer.decode_bytes(encode(instant, tokenizer, K2_6)).decode().endswith("<think></think>")


def test_an_evaluation_that_was_stopped_asks_only_what_is_left(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompts = [
        HELLO,
        EvalPrompt(kind="chat", messages=(Turn(role="user", content="bye"),), check={"contains": ["bye"]}),
    ]
    file, ended = tmp_path / "state" / "eval.jsonl", list[str]()

    def stop() -> None:
        raise KeyboardInterrupt

    both = "a</think>hello<|im_end|>", "b</think>bye<|im_end|>"
    with pytest.raises(KeyboardInterrupt):
        KeptAnswers(Greedy(Script(tokenizer, *both)), file).answer(prompts, stop)
    file.write_bytes(file.read_bytes() + b'{"prompt": "cut o')
    script = Script(tokenizer, both[0])
    kept = KeptAnswers(Greedy(script), file)
    answers = kept.answer(prompts, lambda: ended.append("one"))
    assert [answer.content for answer in answers] == ["hello", "bye"]
    assert len(script.jobs) == 1, "the second was answered first, and its answer is stored"
    assert len(ended) == 2
    assert kept.earlier_s > 0
    kept.forget()
    assert not file.exists()


def test_where_nothing_can_be_written_an_evaluation_goes_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = KeptAnswers(Greedy(Script(tokenizer, "a</think>hello<|im_end|>")), tmp_path / "file" / "eval.jsonl")
    assert [answer.content for answer in kept.answer([HELLO], lambda: None)] == ["hello"]


def test_a_prompt_with_an_image_is_answered_by_a_model_that_reads_it(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (56, 84), "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "text", "text": "what is it? "}, {"type": "image_url", "image_url": {"url": url}}]
    line = {"kind": "see", "check": {"equals": "red"}, "messages": [{"role": "user", "content": content}]}
    asked = msgspec.convert(line, EvalPrompt)
    seen = conversation(asked)
    assert [(one.at, one.data) for one in seen.messages[0].pictures] == [(len("what is it? "), file.getvalue())]
    random_checkpoint(tmp_path, TEXT, vision=VISION, media_token=PAD)
    with opened(write_tiny_tokenizer(tmp_path)) as engine:
        (found,) = Greedy(engine, max_tokens=4).answer([asked], lambda: None)
        (data,) = engine.images.values()
        assert (found.tokens, data.rows * data.columns) == (4, 24)
        engine.rules = None
        with pytest.raises(ConfigError, match="the model reads no images"):
            Greedy(engine).answer([asked], lambda: None)


@pytest.mark.parametrize("url", ["https://example.com/a.png", "data:text/plain;base64,YQ==", "data:image/png,abc"])
def test_an_image_in_a_prompt_is_a_data_url(url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(msgspec.ValidationError, match="needs a data URL"):
        msgspec.convert({"role": "user", "content": [part]}, Turn)


def test_an_image_in_a_prompt_whose_base64_is_damaged_is_refused_with_its_line() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,a"}}
    with pytest.raises(msgspec.ValidationError, match="base64 of an image_url is not valid"):
        msgspec.convert({"role": "user", "content": [part]}, Turn)
