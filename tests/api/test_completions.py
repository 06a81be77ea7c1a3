"""Text completions through the official client: every shape of prompt, echo, logprobs, streams."""

from typing import Any

import pytest
from openai import BadRequestError

from redline.messages.delta import Delta
from redline.messages.job import Job
from redline.messages.step import TokenLogprobs
from tests.api.fake_engine import say
from tests.api.world import END, MODEL, TOKENIZER, World, ids

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def complete(world: World, **fields: Any) -> Any:
    return await world.client.completions.create(**{"model": MODEL, "prompt": "hello", **fields})


async def chunks(world: World, **fields: Any) -> list[Any]:
    return [chunk async for chunk in await complete(world, stream=True, **fields)]


def parrot(job: Job) -> list[Delta]:
    """Repeats the prompt in capitals."""
    text = TOKENIZER.decode_bytes(job.tokens).decode().upper()
    return list(say([*ids(text), END], cached=1)(job))


async def test_a_prompt_in_every_shape_gets_its_answers_in_order() -> None:
    async with World(parrot) as world:
        for prompt, texts in (
            ("one", ["ONE"]),
            (["one", "two"], ["ONE", "TWO"]),
            (ids("one"), ["ONE"]),
            ([ids("one"), ids("two")], ["ONE", "TWO"]),
        ):
            whole = await complete(world, prompt=prompt)
            assert [choice.text for choice in whole.choices] == texts
            assert [choice.index for choice in whole.choices] == list(range(len(texts)))
            assert whole.object == "text_completion"
            stream = await chunks(world, prompt=prompt)
            for index, text in enumerate(texts):
                assert "".join(c.text for chunk in stream for c in chunk.choices if c.index == index) == text


async def test_usage_counts_each_prompt_once_and_each_choice() -> None:
    async with World(parrot) as world:
        whole = await complete(world, prompt=["one", "twos"], n=2)
        stream = await chunks(world, prompt=["one", "twos"], n=2, stream_options={"include_usage": True})
    assert [choice.text for choice in whole.choices] == ["ONE", "ONE", "TWOS", "TWOS"]
    prompts = len(ids("one")) + len(ids("twos"))
    assert whole.usage.prompt_tokens == prompts
    assert whole.usage.completion_tokens == 2 * (len(ids("ONE")) + len(ids("TWOS")) + 2)
    assert whole.usage.prompt_tokens_details.cached_tokens == 2
    assert stream[-1].usage == whole.usage


async def test_drafts_are_told_in_the_usage_streamed_or_not() -> None:
    async with World(say([*ids("abcd"), END], per_delta=5, drafts=6)) as world:
        whole = await complete(world, prompt=["one", "two"])
        stream = await chunks(world, prompt=["one", "two"], stream_options={"include_usage": True})
    details = whole.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (8, 4)
    assert stream[-1].usage == whole.usage


async def test_raw_text_is_not_parsed_as_a_chat() -> None:
    async with World(say([*ids("<think>a</think>b"), END])) as world:
        whole = await complete(world)
        assert whole.choices[0].text == "<think>a</think>b"
        with_end = await complete(world, extra_body={"include_stop_str_in_output": True, "skip_special_tokens": False})
    assert with_end.choices[0].text == "<think>a</think>b<|im_end|>"


async def test_a_raw_prompt_may_spell_control_tokens() -> None:
    async with World(parrot) as world:
        await complete(world, prompt="<|im_user|>user<|im_middle|>hi<|im_end|>")
    assert world.engine.jobs[0].tokens[-1] == END


async def test_logprobs_have_the_completions_shape_streamed_or_not() -> None:
    async with World(say([*ids("héy"), END])) as world:
        whole = await complete(world, logprobs=2)
        stream = await chunks(world, logprobs=2)
    scored = whole.choices[0].logprobs
    count = len(ids("héy"))
    assert len(scored.tokens) == len(scored.token_logprobs) == len(scored.top_logprobs) == len(scored.text_offset)
    assert len(scored.tokens) == count
    assert scored.tokens[0] == "h"
    assert scored.token_logprobs == [-0.5] * count
    assert scored.top_logprobs[0] == {"h": -0.5, "a": -1.0}
    assert scored.text_offset[0] == 0
    assert scored.text_offset == sorted(scored.text_offset)
    parts = [c.logprobs for chunk in stream for c in chunk.choices if c.logprobs]
    assert [token for part in parts for token in part.tokens] == scored.tokens
    assert [offset for part in parts for offset in part.text_offset] == scored.text_offset


async def test_echo_opens_the_answer_with_the_prompt_and_its_logprobs() -> None:
    async with World(say([*ids("xy"), END])) as world:
        whole = await complete(world, prompt="hello one", echo=True, logprobs=1)
        stream = await chunks(world, prompt="hello one", echo=True, logprobs=1)
        bare = await complete(world, prompt=ids("hello one"), echo=True)
        scored_only = await chunks(world, prompt="hello one", echo=True, extra_body={"prompt_logprobs": 0})
    assert len(scored_only[0].choices[0].prompt_logprobs) == len(ids("hello one"))
    assert all(choice.logprobs is None for chunk in scored_only for choice in chunk.choices)
    prompt = [TOKENIZER.token_bytes(token).decode() for token in ids("hello one")]
    scored = whole.choices[0].logprobs
    assert whole.choices[0].text == "hello onexy"
    assert scored.tokens == [*prompt, "x", "y"]
    assert scored.token_logprobs == [None, *[-0.5] * (len(prompt) + 1)]
    assert scored.top_logprobs[0] is None
    assert scored.text_offset[-1] == len("hello onex")
    assert "".join(c.text for chunk in stream for c in chunk.choices) == "hello onexy"
    parts = [c.logprobs for chunk in stream for c in chunk.choices if c.logprobs]
    assert [offset for part in parts for offset in part.text_offset] == scored.text_offset
    assert bare.choices[0].text == "hello onexy"
    assert bare.choices[0].logprobs is None


async def test_every_choice_of_a_stream_opens_with_its_own_prompt() -> None:
    async with World(parrot) as world:
        stream = await chunks(world, prompt=["one", "two", "six"], n=2, echo=True)
    texts = ["".join(c.text for chunk in stream for c in chunk.choices if c.index == index) for index in range(6)]
    assert texts == ["oneONE", "oneONE", "twoTWO", "twoTWO", "sixSIX", "sixSIX"]


async def test_scoring_generates_nothing() -> None:
    async with World(say(ids("never shown"))) as world:
        whole = await complete(world, prompt=["hello", "one two"], echo=True, logprobs=0, max_tokens=0)
    assert [choice.text for choice in whole.choices] == ["hello", "one two"]
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert len(whole.choices[1].logprobs.tokens) == len(ids("one two"))
    assert whole.usage.completion_tokens == 0
    assert [job.sampling.max_tokens for job in world.engine.jobs] == [1, 1]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [("", "prompt"), (["a", ""], "prompt[1]"), ([1, 10**6], "prompt"), ([[1], [10**6]], "prompt[1]")],
)
async def test_a_prompt_that_cannot_be_continued_is_named(prompt: Any, param: str) -> None:
    async with World(parrot) as world:
        with pytest.raises(BadRequestError) as refused:
            await complete(world, prompt=prompt)
    assert refused.value.param == param
    assert world.engine.jobs == []


def unsure(text: str) -> Any:
    """Generates a text byte by byte, each time its third choice: the two better ones are parts of other characters."""

    def script(job: Job) -> Any:
        for place, byte in enumerate((*text.encode(), END)):
            top = ((0xE2, -7.41), (0x98, -8.0))
            one = TokenLogprobs(token=byte, logprob=-10.0, rank=3, top=top[: job.sampling.logprobs])
            finish = "stop" if byte == END else None
            yield Delta(job=job.id, tokens=(byte,), logprobs=(one,), finish=finish)
            assert place < 100

    return script


async def test_tokens_that_are_part_of_a_character_have_keys_of_their_own() -> None:
    async with World(unsure("é!")) as world:
        scored: Any = (await complete(world, logprobs=2)).choices[0].logprobs
    assert scored.tokens == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert scored.top_logprobs[0] == {"bytes:\\xc3": -10.0, "bytes:\\xe2": -7.41, "bytes:\\x98": -8.0}
    for token, logprob, top in zip(scored.tokens, scored.token_logprobs, scored.top_logprobs, strict=True):
        assert (top[token], len(top)) == (logprob, 3)


@pytest.mark.parametrize("per_delta", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("a—é👋z", {}),
        ("one STOP two", {"stop": ["STOP"]}),
        ("a STO", {"stop": ["STOP"]}),
        ("a STO b STOP", {"stop": ["STOP"]}),
        ("é<|im_user|>x<|im_user|>y", {"stop": ["STOP"]}),
        ("é<|im_user|>x", {"extra_body": {"skip_special_tokens": False}}),
        ("é<think>x", {"echo": True, "prompt": "ü<|im_end|>—"}),
    ],
)
async def test_offsets_point_at_the_text_and_never_beyond(per_delta: int, said: str, fields: dict[str, Any]) -> None:
    async with World(say([*ids(said), END], per_delta=per_delta)) as world:
        whole: Any = (await complete(world, logprobs=1, **fields)).choices[0]
        stream: Any = [c for chunk in await chunks(world, logprobs=1, **fields) for c in chunk.choices]
    scored = whole.logprobs
    assert "".join(part.text for part in stream) == whole.text
    parts = [part.logprobs for part in stream if part.logprobs]
    assert [offset for part in parts for offset in part.text_offset] == scored.text_offset
    assert [token for part in parts for token in part.tokens] == scored.tokens
    assert scored.text_offset == sorted(scored.text_offset)
    assert scored.text_offset[-1] <= len(whole.text)
    for token, offset in zip(scored.tokens, scored.text_offset, strict=True):
        if token.startswith("bytes:") or (token == "<|im_user|>" and "extra_body" not in fields):
            continue  # a part of a character, or a token without text
        assert whole.text.startswith(token, offset) or token.startswith(whole.text[offset:])


async def test_an_ordinary_end_has_no_stop_reason() -> None:
    async with World(say([*ids("ab"), END])) as world:
        plain = (await complete(world)).choices[0]
        named = (await complete(world, extra_body={"stop_token_ids": [END]})).choices[0]
    async with World(say(ids("ab"))) as world:
        by_id = (await complete(world, extra_body={"stop_token_ids": ids("b")})).choices[0]
        by_text = (await complete(world, stop="b")).choices[0]
    assert [choice.finish_reason for choice in (plain, named, by_id, by_text)] == ["stop"] * 4
    assert [getattr(choice, "stop_reason", 0) for choice in (plain, named, by_id, by_text)] == [None, None, 98, "b"]
