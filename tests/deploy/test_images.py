"""Images over HTTP, in every dialect, at a served tiny model with a vision tower: `redline serve` as a process."""

import base64
import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from openai import BadRequestError
from PIL import Image

from redline.model.k2.write import random_checkpoint
from tests.deploy.test_serve import Server, wait_for
from tests.laws.test_images_change_nothing import PAD, TEXT, VISION
from tests.media.videos import video
from tests.tiny_tokenizer import write_tiny_tokenizer
from tests.waiting import LIMIT_S

QUESTION = "what is in it? "
PLAIN = {"temperature": 0, "extra_body": {"logit_bias": {str(ord("a")): 100}}}  # a random model also writes marks


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("images")
    with serving(folder, "--set", f"responses_file={json.dumps(str(folder / 'responses.sqlite'))}") as served:
        yield served


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Server]:
    """A served tiny model with a vision tower, written into the folder."""
    weights = folder / "tiny"
    random_checkpoint(weights, TEXT, vision=VISION, media_token=PAD)
    common = ("--port", "0", "--kv-memory", "20MB", "--device", "cpu")
    served = Server(write_tiny_tokenizer(weights), *common, *words)
    try:
        yield served.until_ready()
    finally:
        served.close()


def picture(colour: str = "red", size: tuple[int, int] = (224, 224), kind: str = "PNG") -> str:
    """An image file as base64. 224 x 224 pixels take 64 tokens."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def part(data: str, kind: str = "png", **how: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}", **how}}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def chat(server: Server, *content: Any, role: str = "user", max_tokens: int = 4, **how: Any):
    messages = [{"role": role, "content": list(content)}]
    if role != "user":
        messages.append({"role": "user", "content": "go on"})
    return server.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=max_tokens, **{**PLAIN, **how}
    )


def test_a_video_is_read_in_chunks_with_their_times(server: Server):
    """Six frames at two a second: a chunk of four and one of two, of 12 tokens each."""
    url = "data:video/mp4;base64," + base64.b64encode(video(6, fps=2)).decode()
    film = {"type": "video_url", "video_url": {"url": url}}
    first, text = chat(server, said(QUESTION), film), chat(server, said(QUESTION))
    marks = 2 * (3 + len("00:00:00.000video")) + len("\n")
    assert first.usage.prompt_tokens == text.usage.prompt_tokens + 2 * 12 + marks
    assert first.usage.prompt_tokens_details.image_tokens == 24
    again = chat(server, said(QUESTION), film, part(picture()), said("and now?"))
    assert again.usage.prompt_tokens_details.image_tokens == 24 + 64
    cut = {"type": "video_url", "video_url": {"url": url[:600]}}
    with pytest.raises(BadRequestError, match="Could not process video"):
        chat(server, said(QUESTION), cut)
    for wrong, message in (
        ({"url": "https://example.com/film.mp4"}, "remote video URLs are not fetched"),
        ({"url": url.replace("video/mp4", "image/png")}, "expected a data URL: data:video/mp4"),
    ):
        with pytest.raises(BadRequestError, match=message):
            chat(server, {"type": "video_url", "video_url": wrong})
    long = {
        "type": "video_url",
        "video_url": {"url": "data:video/mp4;base64," + base64.b64encode(video(40, fps=2)).decode()},
    }
    with pytest.raises(BadRequestError, match="more than 56 frames in the videos of one request"):
        chat(server, long, long)
    with pytest.raises(BadRequestError, match="videos are read in messages of users and tools"):
        chat(server, film, role="system")


def test_the_models_card_says_that_it_reads_images(server: Server):
    card = server.client.models.retrieve("tiny")
    assert card.model_dump()["supports_image_in"] is True


def test_an_image_is_read_counted_and_cached_with_its_prefix(server: Server):
    first = chat(server, said(QUESTION), part(picture(), detail="high"))
    text = chat(server, said(QUESTION))
    marks = 3 + len("image\n")  # three control tokens; every letter is a token of this vocabulary
    assert first.usage.prompt_tokens == text.usage.prompt_tokens + 64 + marks
    assert first.usage.prompt_tokens_details.image_tokens == 64
    assert text.usage.prompt_tokens_details.image_tokens is None
    again = chat(server, said(QUESTION), part(picture()), said("and now?"))
    assert again.usage.prompt_tokens_details.cached_tokens >= 64
    other = chat(server, said(QUESTION), part(picture("blue")), said("and now?"))
    assert other.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens_details.cached_tokens


def test_streams_and_several_images_between_texts(server: Server):
    content = part(picture()), said("or "), part(picture("blue", (60, 40), "JPEG"), "jpeg"), said("?")
    whole = chat(server, *content)
    assert whole.usage.prompt_tokens_details.image_tokens == 64 + 6
    stream = chat(server, *content, stream=True, stream_options={"include_usage": True})
    *_, last = stream
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_tool_results_may_hold_images_and_messages_of_other_roles_may_not(server: Server):
    call = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    answer = server.client.chat.completions.create(
        model="tiny", tools=[tool], max_tokens=4, **PLAIN, messages=[
            {"role": "user", "content": "look"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": [said("here:"), part(picture())]},
        ],
    )  # fmt: skip
    assert answer.usage.prompt_tokens_details.image_tokens == 64
    for role in ("system", "assistant"):
        with pytest.raises(BadRequestError, match=f"not of role {role}"):
            chat(server, part(picture()), role=role)


REFUSED: dict[str, tuple[Any, str]] = {
    "a bare string": ({"type": "image_url", "image_url": "data:image/png;base64,aaaa"}, "expected an object"),
    "a remote one": ({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, "not fetched"),
    "no data URL": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "expected a data URL"),
    "bad base64": (part("a b"), "base64 is not valid"),
    "empty": (part(""), "Could not process image"),
    "SVG": (part(base64.b64encode(b"<svg/>").decode(), "svg+xml"), "Could not process image"),
    "PDF": (part(base64.b64encode(b"%PDF-1.7").decode(), "pdf"), "Could not process image"),
    "truncated": (part(picture()[:200]), "Could not process image"),
    "a line": (part(picture(size=(1, 30_000))), "ratio of its sides"),
    "too many pixels": (part(picture(size=(9000, 9000))), "pixels exceed the limit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_a_400_that_names_the_part(name: str, server: Server):
    wrong, words = REFUSED[name]
    with pytest.raises(BadRequestError, match=words) as error:
        chat(server, said("see"), wrong)
    assert error.value.body["param"].startswith("messages[0].content[1].image_url")


def test_too_many_images_and_images_longer_than_the_context_are_refused(server: Server):
    with pytest.raises(BadRequestError, match="more than 16 images"):
        chat(server, *[part(picture(size=(28, 28)))] * 17)
    with pytest.raises(BadRequestError, match="maximum context length"):
        chat(server, *[part(picture(size=(1900, 1900 + 28 * n))) for n in range(2)])


def test_text_that_spells_the_pad_stays_text(server: Server):
    spelled = chat(server, said("<|media_pad|>"))
    assert spelled.usage.prompt_tokens_details.image_tokens is None
    assert spelled.usage.prompt_tokens > chat(server, said("")).usage.prompt_tokens + 3


def test_tokenize_counts_an_image(server: Server):
    body = {"messages": [{"role": "user", "content": [part(picture())]}]}
    found = server.client.post(f"{server.url}/tokenize", body=body, cast_to=dict[str, Any])
    assert found["tokens"].count(PAD) == 64


def test_anthropic_reads_images_also_in_tool_results(server: Server):
    from anthropic import Anthropic  # 3,000 modules, which no other test imports

    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture()}}
        url = {"type": "image", "source": {"type": "url", "url": f"data:image/png;base64,{picture()}"}}
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": [block, said(QUESTION)]}]}
        answer = client.messages.create(**asked, max_tokens=4)
        counted = client.messages.count_tokens(**asked)
        assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted.input_tokens
        without = client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": [said(QUESTION)]}])
        assert counted.input_tokens >= without.input_tokens + 64
        history = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [said("see"), url]}]},
        ]
        tools = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
        found = client.messages.count_tokens(model="tiny", messages=history, tools=tools)
        text = [
            *history[:2],
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "see"}]},
        ]
        assert (
            found.input_tokens
            >= client.messages.count_tokens(model="tiny", messages=text, tools=tools).input_tokens + 64
        )


def test_responses_read_images_and_remember_them(server: Server):
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture()}", "detail": "auto"}
    asked = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}, image]}]
    first = server.client.responses.create(model="tiny", input=asked, max_output_tokens=4, temperature=0)
    assert first.usage.input_tokens > 64
    second = server.client.responses.create(
        model="tiny", input="and now?", previous_response_id=first.id, max_output_tokens=4, temperature=0
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    wrong = {"type": "input_image", "file_id": "file-1"}
    with pytest.raises(BadRequestError, match="send the image as a data URL"):
        server.client.responses.create(model="tiny", input=[{"role": "user", "content": [wrong]}])


def read(server: Server, colour: str, begun: Callable[[], object] = lambda: None, tokens: int = 60) -> list[float]:
    """The log probabilities of a streamed answer about an image. They are the model's own, before the bias that makes
    every token an "a", so the image decides them. begun: called at the first chunk."""
    asked: dict[str, Any] = {
        "max_tokens": tokens, "logprobs": True, "extra_body": {"ignore_eos": True, **PLAIN["extra_body"]}
    }  # fmt: skip
    found: list[float] = []
    for chunk in chat(server, said(QUESTION), part(picture(colour)), stream=True, **asked):
        if not found:
            begun()
        found += [one.logprob for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content or ()]
    assert len(found) == tokens
    return found


def off(these: Sequence[float], those: Sequence[float]) -> float:
    """The largest difference."""
    return max(abs(one - other) for one, other in zip(these, those, strict=True))


def test_an_image_is_sent_again_to_a_worker_that_was_restarted(server: Server):
    """The worker is killed while it answers about an image, and the decoder of images with it."""

    def kill() -> None:
        for process in server.workers:
            with suppress(ProcessLookupError):  # some end with their parents
                os.kill(process, signal.SIGKILL)

    expected = read(server, "green", tokens=700)
    assert off(expected, read(server, "blue", tokens=700)) > 0.1
    assert off(expected, read(server, "green", kill, tokens=700)) < 1e-3
    assert "the worker has ended with code -9; it is restarted" in server.said


def test_metrics_count_encoded_images(server: Server):
    chat(server, said(QUESTION), part(picture("olive", (300, 200))))

    def counted(name: str) -> bool:  # a worker reports its load a moment after its answer
        text = urlopen(f"{server.url}/metrics", timeout=LIMIT_S).read().decode()
        found = re.search(rf"^redline:{name}_total\S* (\S+)$", text, re.MULTILINE)
        return found is not None and float(found[1]) > 0

    for name in ("images_encoded", "image_encode_seconds"):
        wait_for(lambda name=name: counted(name), server)


@pytest.mark.parametrize("how", ["pools", "ranks", "replicas"])
def test_where_an_image_is_read_does_not_matter(how: str, server: Server, tmp_path: Path):
    """Law 5: the prompt is computed by another worker. Law 6: by two ranks, which each encode the image. The image
    comes from the API replica that sent the job."""
    folder = tmp_path / "tiny"
    random_checkpoint(folder, TEXT, vision=VISION, media_token=PAD)
    write_tiny_tokenizer(folder)
    shape = '[[workers]]\nrole = "prefill"\n[[workers]]\nrole = "decode"\n' if how == "pools" else ""
    replicas = "api_replicas = 2\n" if how == "replicas" else ""
    ranks = "ranks = 2\n" if how == "ranks" else ""
    (tmp_path / "one.toml").write_text(
        f'weights = "tiny"\nport = 0\n{replicas}[engine]\ndevice = "cpu"\nkv_memory = "20MB"\n{ranks}{shape}'
    )
    other = Server(tmp_path / "one.toml")
    try:
        other.until_ready()
        expected = read(server, "navy")
        assert off(expected, read(server, "white")) > 0.1
        # Two ranks add in another order; over bf16 pages that is a rounding of a latent now and then.
        assert off(expected, read(other, "navy")) <= (0.02 if how == "ranks" else 0)
    finally:
        other.close()
