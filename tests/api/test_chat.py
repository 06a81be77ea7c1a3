"""Chat completions through the official client, whole and streamed, over a scripted engine."""

import asyncio
import json
import re
from typing import Any

import pytest
from openai import APIError, APIStatusError, BadRequestError, NotFoundError
from openai.types.chat import ChatCompletionChunk

from redline.api.config import Limits
from redline.messages.delta import Delta
from redline.messages.job import Job
from redline.messages.news import Failed
from tests.api.fake_engine import deliver, say
from tests.api.world import CALLS, END, MODEL, TOKENIZER, World, answer, ids, openai_client
from tests.waiting import eventually

pytestmark = pytest.mark.anyio
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GET = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def ask(world: World, **fields: Any) -> Any:
    return await world.client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})


async def chunks(world: World, **fields: Any) -> list[ChatCompletionChunk]:
    return [chunk async for chunk in await ask(world, stream=True, **fields)]


def joined(stream: list[ChatCompletionChunk], field: str, choice: int = 0) -> str:
    pieces = [c.delta for chunk in stream for c in chunk.choices if c.index == choice]
    return "".join(getattr(piece, field, None) or "" for piece in pieces)


async def test_an_answer_comes_whole() -> None:
    async with World(answer("hello there", thought="the user greets", cached=64)) as world:
        whole = await ask(world)
    (choice,) = whole.choices
    assert whole.id.startswith("chatcmpl-")
    assert (whole.object, whole.model) == ("chat.completion", MODEL)
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello there", "stop")
    assert choice.message.reasoning_content == "the user greets"
    assert not hasattr(choice.message, "reasoning"), "the thinking is sent in one field only"
    assert choice.message.tool_calls is None
    usage = whole.usage
    assert usage.prompt_tokens == len(world.engine.jobs[0].tokens)
    assert usage.completion_tokens == len(ids("the user greets</think>hello there<|im_end|>"))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 64
    assert usage.completion_tokens_details.reasoning_tokens == len(ids("the user greets"))


@pytest.mark.parametrize("per_delta", [1, 3, 100])
async def test_the_stream_joined_is_the_whole_answer(per_delta: int) -> None:
    script = answer("héllo, 世界! 👋", thought="hm — ok", per_delta=per_delta)
    async with World(script) as world:
        stream = await chunks(world)
    assert joined(stream, "content") == "héllo, 世界! 👋"
    assert (joined(stream, "reasoning"), joined(stream, "reasoning_content")) == ("", "hm — ok")
    assert stream[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in stream][-2:] == [None, "stop"]
    assert len({chunk.id for chunk in stream}) == 1
    assert all(chunk.usage is None for chunk in stream)


async def test_one_delta_of_the_engine_is_one_chunk() -> None:
    async with World(answer("abcdefgh")) as world:
        stream = await chunks(world, extra_body={"thinking": {"type": "disabled"}})
    assert [chunk.choices[0].delta.content for chunk in stream][1:-1] == list("abcdefgh")


async def test_usage_stands_in_a_last_chunk_or_in_every_one() -> None:
    async with World(answer("abc", cached=5)) as world:
        last = await chunks(world, stream_options={"include_usage": True})
        every = await chunks(world, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk.usage is None for chunk in last] == [True] * (len(last) - 1) + [False]
    assert last[-1].choices == []
    assert last[-1].usage is not None
    assert last[-1].usage.completion_tokens == len(ids("</think>abc<|im_end|>"))
    assert last[-1].usage.prompt_tokens_details.cached_tokens == 5
    counts = [chunk.usage.completion_tokens for chunk in every if chunk.usage]
    assert len(counts) == len(every)
    assert counts == sorted(counts)
    assert counts[-1] == last[-1].usage.completion_tokens


async def test_drafts_are_told_in_the_usage_streamed_or_not() -> None:
    tokens = len(ids("</think>abcdef<|im_end|>"))
    assert tokens == 8
    async with World(answer("abcdef", per_delta=3, drafts=3)) as world:
        whole = await ask(world, n=2)
        stream = await chunks(world, n=2, stream_options={"include_usage": True})
    async with World(answer("abcdef")) as world:
        plain = await ask(world)
    details = whole.usage.completion_tokens_details
    # Per choice, deltas of 3, 3 and 2 tokens, each the end of 3 draft tokens that were verified.
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2 * 5, 2 * 4)
    assert stream[-1].usage == whole.usage
    details = plain.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


async def test_tool_calls_come_whole_with_the_models_own_ids() -> None:
    async with World(answer(CALLS, thought="two cities")) as world:
        whole = await ask(world, tools=[{"type": "function", "function": {"name": "get", "parameters": {}}}])
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = [
        (call.id, call.type, call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls
    ]
    assert calls == [
        ("functions.get:0", "function", "get", {"city": "Rome"}),
        ("functions.get:1", "function", "get", {"city": "Oslo"}),
    ]


@pytest.mark.parametrize("per_delta", [1, 7, 200])
async def test_tool_calls_stream_head_first_then_arguments(per_delta: int) -> None:
    async with World(answer(CALLS, per_delta=per_delta)) as world:
        stream = await chunks(world, tools=[GET])
    pieces = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    for index, city in enumerate(("Rome", "Oslo")):
        head, *rest = [piece for piece in pieces if piece.index == index]
        assert (head.id, head.type, head.function.name, head.function.arguments) == (
            f"functions.get:{index}",
            "function",
            "get",
            "",
        )
        assert json.loads("".join(piece.function.arguments for piece in rest)) == {"city": city}
        assert all(piece.id is None and piece.function.name is None for piece in rest)
    assert stream[-1].choices[0].finish_reason == "tool_calls"


async def test_an_instant_answer_has_no_reasoning() -> None:
    async with World(lambda job: [Delta(job=job.id, tokens=(*ids("hello"), END), finish="stop")]) as world:
        whole = await ask(world, extra_body={"chat_template_kwargs": {"thinking": False}})
        thinking = await ask(world)
    assert whole.choices[0].message.content == "hello"
    assert not hasattr(whole.choices[0].message, "reasoning_content")
    assert thinking.choices[0].message.content == ""
    assert thinking.choices[0].message.reasoning_content == "hello"


async def test_logprobs_cover_every_token_streamed_or_not() -> None:
    async with World(answer("héllo", per_delta=2)) as world:
        whole = await ask(world, logprobs=True, top_logprobs=2)
        stream = await chunks(world, logprobs=True, top_logprobs=2)
        bare = await ask(world, logprobs=True)
    content = whole.choices[0].logprobs.content
    said = [entry for chunk in stream for c in chunk.choices if c.logprobs for entry in c.logprobs.content or ()]
    assert said == content
    # All generated tokens except the stop token; characters of several tokens come as bytes.
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == "</think>héllo"
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    assert content[-1].top_logprobs[0].token == content[-1].token
    assert content[-1].top_logprobs[1].token == "a"
    assert content[-1].logprob == -0.5
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content] == [[]] * len(content)


async def test_prompt_logprobs_come_in_vllms_shape() -> None:
    async with World(answer("x")) as world:
        whole = await ask(world, extra_body={"prompt_logprobs": 1})
        stream = await chunks(world, extra_body={"prompt_logprobs": 1})
    tokens = world.engine.jobs[0].tokens
    assert len(whole.prompt_logprobs) == len(tokens)
    assert whole.prompt_logprobs[0] is None
    assert whole.prompt_logprobs[1][str(tokens[1])]["rank"] == 1
    assert stream[0].prompt_logprobs == whole.prompt_logprobs


async def test_choices_run_as_jobs_with_seeds_of_their_own() -> None:
    def script(job: Job) -> list[Delta]:
        text = f"{job.sampling.seed % 97}"
        return [Delta(job=job.id, tokens=(*ids(f"</think>{text}"), END), finish="stop", cached_tokens=3)]

    async with World(script) as world:
        whole = await ask(world, n=3, seed=7)
        stream = await chunks(world, n=3, seed=7, stream_options={"include_usage": True})
        alone = await ask(world, seed=7)
        await ask(world)
        await ask(world)
    seeds = [job.sampling.seed for job in world.engine.jobs]
    assert seeds[:3] == seeds[3:6]
    assert len(set(seeds[:3])) == 3
    assert seeds[6] == seeds[0] == 7
    assert seeds[7] != seeds[8]
    assert [job.sampling.seeded for job in world.engine.jobs] == [True] * 7 + [False] * 2
    texts = [choice.message.content for choice in whole.choices]
    assert texts == [str(seed % 97) for seed in seeds[:3]]
    assert [joined(stream, "content", choice) for choice in range(3)] == texts
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    assert whole.usage.completion_tokens == sum(len(ids(f"</think>{text}<|im_end|>")) for text in texts)
    assert whole.usage.prompt_tokens_details.cached_tokens == 3
    assert stream[-1].usage == whole.usage


async def test_a_stop_string_ends_the_answer_and_the_job() -> None:
    async with World(answer("one two three four")) as world:
        whole = await ask(world, stop=["three"])
        stream = await chunks(world, stop=["three"])
        await eventually(lambda: len(world.engine.aborted) == 2)
        included = await ask(world, stop="two", extra_body={"include_stop_str_in_output": True})
    assert whole.choices[0].message.content == joined(stream, "content") == "one two "
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].stop_reason == "three"
    assert included.choices[0].message.content == "one two"


async def test_max_tokens_ends_with_length() -> None:
    async with World(answer("abcdefgh")) as world:
        whole = await ask(world, max_tokens=4)
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].message.content == "abc"
    assert world.engine.jobs[0].sampling.max_tokens == 4


async def test_without_max_tokens_the_rest_of_the_context_is_meant() -> None:
    async with World(answer("a"), max_model_len=500) as world:
        await ask(world)
    (job,) = world.engine.jobs
    assert job.sampling.max_tokens == 500 - len(job.tokens)


async def test_the_models_own_ends_stop_the_job_unless_ignored() -> None:
    async with World(answer("a")) as world:
        await ask(world, extra_body={"stop_token_ids": [65]})
        await ask(world, extra_body={"ignore_eos": True})
    assert world.engine.jobs[0].sampling.stop_ids == (*TOKENIZER.stop_ids, 65)
    assert world.engine.jobs[1].sampling.stop_ids == ()


async def test_a_prompt_beyond_the_context_is_refused_with_the_numbers() -> None:
    async with World(answer("a"), max_model_len=100) as world:
        for text in ("ab" * 300, "a" * 100_000):
            with pytest.raises(BadRequestError) as refused:
                await ask(world, messages=[{"role": "user", "content": text}])
            assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
            words = (
                r"This model's maximum context length is 100 tokens\. However, the prompt in messages has .*\d+ tokens"
            )
            assert re.search(words, refused.value.message), refused.value.message
    assert world.engine.jobs == []


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_more_tokens_than_are_left_are_cut_to_what_is_left(field: str) -> None:
    async with World(answer("a"), max_model_len=100) as world:
        for asked in (100, 1 << 20):
            await ask(world, **{field: asked})
        completed = await world.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1 << 20})
    assert completed.status_code == 200
    for job in world.engine.jobs:
        assert job.sampling.max_tokens == 100 - len(job.tokens)


async def test_a_prompt_may_be_as_long_as_the_context_where_it_is_only_scored() -> None:
    fields = {"max_tokens": 0, "echo": True, "logprobs": 0}
    async with World(answer("a"), max_model_len=100) as world:
        for count, status in ((100, 200), (101, 400)):
            scored = await world.http.post("/v1/completions", json={"prompt": [65] * count, **fields})
            assert scored.status_code == status
    assert [job.sampling.max_tokens for job in world.engine.jobs] == [0]


# -- calls that are not allowed

TEMPTED: list[Any] = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [{"id": "functions.get:0", "function": {"name": "get"}}]},
    {"role": "tool", "tool_call_id": "functions.get:0", "content": "sunny"},
]


@pytest.mark.parametrize("fields", [{"tools": [GET], "tool_choice": "none"}, {}], ids=["none", "no tools"])
@pytest.mark.parametrize("text", ["It is sunny." + CALLS, CALLS], ids=["behind a text", "alone"])
async def test_a_call_that_is_not_allowed_ends_the_answer_and_is_not_shown(fields: dict[str, Any], text: str) -> None:
    async with World(answer(text, thought="hm")) as world:
        whole = (await ask(world, **fields)).choices[0]
        stream = [chunk.choices[0] for chunk in await chunks(world, **fields)]
    assert (whole.finish_reason, whole.message.tool_calls) == ("stop", None)
    assert whole.message.content == text.removesuffix(CALLS)
    assert stream[-1].finish_reason == "stop"
    assert not any(choice.delta.tool_calls for choice in stream)


async def test_a_history_with_calls_tempts_nobody_where_calls_are_not_allowed() -> None:
    bias = {str(token): 1.0 for token in range(298)}
    async with World(answer("a")) as world:
        await ask(world, messages=TEMPTED, tools=[GET], tool_choice="none", logit_bias=bias)
        await ask(world, messages=TEMPTED, tools=[GET])
        await ask(world)
    first, *others = (dict(job.sampling.logit_bias) for job in world.engine.jobs)
    marks = [TOKENIZER.special(f"<|tool_call{mark}_begin|>") for mark in ("s_section", "")]
    assert [first[mark] for mark in marks] == [-100.0, -100.0]
    assert others == [{}, {}]


async def test_stop_strings_are_held_back_until_min_tokens() -> None:
    said = [*ids("ab" * 4), END]
    async with World(say(said)) as world:
        body = {"prompt": "x", "stop": ["b"], "min_tokens": 5}
        whole = (await world.http.post("/v1/completions", json=body)).json()
        begun = (
            await world.http.post("/v1/completions", json={"prompt": "x", "stop": ["abab"], "min_tokens": 3})
        ).json()
        most = {"prompt": "x", "max_tokens": 9000, "min_tokens": 9000}
        await world.http.post("/v1/completions", json=most)
    assert whole["choices"][0]["text"] == TOKENIZER.decode_bytes(said[:5]).decode()
    assert whole["usage"]["completion_tokens"] == 6
    assert begun["choices"][0]["text"] == "", "a stop string that began before min_tokens ends the answer where it ends"
    sampling = world.engine.jobs[-1].sampling
    assert sampling.min_tokens == sampling.max_tokens < 9000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_top_p_of_zero_is_greedy(path: str) -> None:
    asked = {"messages": HELLO, "prompt": "x", "input": "x", "max_tokens": 5, "top_p": 0, "temperature": 1}
    taken = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    body = {key: value for key, value in asked.items() if key in (taken, "top_p", "temperature", "max_tokens")}
    async with World(answer("a")) as world:
        assert (await world.http.post(path, json=body)).status_code == 200
    sampling = world.engine.jobs[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0, 1)


async def test_control_tokens_spelled_by_a_user_are_text() -> None:
    async with World(answer("a")) as world:
        await ask(world, messages=[{"role": "user", "content": "<|im_end|>"}])
    (job,) = world.engine.jobs
    assert job.tokens.count(END) == 2  # the ends of the default system message and of the user's message


async def test_an_unknown_model_is_not_found_and_every_served_name_is() -> None:
    async with World(answer("a")) as world:
        with pytest.raises(NotFoundError) as refused:
            await ask(world, model="gpt-4")
        assert refused.value.code == "model_not_found"
        assert (await ask(world, model="alias")).model == "alias"


async def test_a_token_id_beyond_the_vocabulary_is_refused() -> None:
    async with World(answer("a")) as world:
        for fields in ({"logit_bias": {str(TOKENIZER.vocab_size): 1}}, {"extra_body": {"stop_token_ids": [10**6]}}):
            with pytest.raises(BadRequestError, match="range from"):
                await ask(world, **fields)


async def test_an_engine_error_ends_its_own_request_without_our_insides(caplog: pytest.LogCaptureFixture) -> None:
    def script(job: Job) -> list[Delta]:
        if job.sampling.temperature == 0:
            return [
                Delta(job=job.id, tokens=tuple(ids("</think>ab"))),
                Delta(job=job.id, finish="error", error="kernel at 0xdeadbeef failed"),
            ]
        return list(answer("fine")(job))

    async with World(script) as world:
        good, bad, mid = await asyncio.gather(
            ask(world), ask(world, temperature=0), chunks(world, temperature=0), return_exceptions=True
        )
    assert good.choices[0].message.content == "fine"
    assert isinstance(bad, APIStatusError)
    assert bad.status_code == 500
    assert "0xdeadbeef" not in str(bad)
    assert isinstance(mid, APIError)
    assert mid.type == "server_error"
    assert "0xdeadbeef" in caplog.text


async def test_a_lost_worker_ends_whole_answers_with_503_and_streams_with_an_error_event() -> None:
    async with World(answer("abcdef")) as world, world.listening() as address:
        client = openai_client(address)
        stream = await ask_on(client, stream=True)
        seen = [await anext(stream)]
        world.engine.gate.clear()
        waiting = asyncio.create_task(ask_on(client))
        unopened = asyncio.create_task(ask_on(client, stream=True))
        await eventually(lambda: len(world.engine.jobs) == 3)
        deliver(world.gateway, world.link, Failed(reason="out of memory at 0x1"))
        with pytest.raises(APIError, match="went down") as broken:
            seen += [chunk async for chunk in stream]
        assert broken.value.code == "worker_lost"
        for task in (waiting, unopened):
            with pytest.raises(APIStatusError) as lost:
                await task
            assert lost.value.status_code == 503
            assert lost.value.response.headers["retry-after"] == "1"
        with pytest.raises(APIStatusError):
            await ask_on(client)
        assert (await world.http.get("/health")).status_code == 503
        world.engine.serve(world.gateway)
        world.engine.gate.set()
        assert (await ask_on(client)).choices[0].message.content == "abcdef"
        await client.close()


async def ask_on(client: Any, **fields: Any) -> Any:
    return await client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_job(stream: bool) -> None:
    async with World(answer("abcdef")) as world, world.listening() as address:
        client = openai_client(address)
        world.engine.gate.clear()
        task = asyncio.create_task(ask_on(client, stream=stream, n=2))
        await eventually(lambda: len(world.engine.jobs) == 2)
        task.cancel()
        await eventually(lambda: len(world.engine.aborted) == 2)
        await client.close()
    assert {job.id for job in world.engine.jobs} == world.engine.aborted


async def test_a_client_that_leaves_mid_stream_aborts_its_job() -> None:
    async with World(answer("abcdef" * 100)) as world, world.listening() as address:
        client = openai_client(address)
        async for chunk in await ask_on(client, stream=True):
            world.engine.gate.clear()
            if chunk.choices[0].delta.content:
                break
        await client.close()
        await eventually(lambda: len(world.engine.aborted) == 1)


async def test_sixty_four_streams_at_once_each_get_their_own_answer() -> None:
    def script(job: Job) -> Any:
        number = TOKENIZER.decode_bytes(job.tokens).decode().split("number ")[1].split("<")[0]
        return answer(f"you said {number}. " * 3)(job)

    async def one(client: Any, number: int) -> str:
        messages = [{"role": "user", "content": f"number {number}"}]
        stream = await ask_on(client, stream=True, messages=messages)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with World(script) as world, world.listening() as address:
        client = openai_client(address)
        answers = await asyncio.gather(*(one(client, number) for number in range(64)))
        await client.close()
    assert answers == [f"you said {number}. " * 3 for number in range(64)]


async def test_too_many_waiting_jobs_are_refused_with_a_time_to_come_back() -> None:
    async with World(answer("a"), limits=Limits(waiting=2)) as world:
        world.engine.gate.clear()
        held = asyncio.create_task(ask(world, n=2))
        await eventually(lambda: len(world.engine.jobs) == 2)
        with pytest.raises(APIStatusError) as refused:
            await ask(world)
        assert refused.value.status_code == 503
        assert refused.value.code == "overloaded"
        assert refused.value.response.headers["retry-after"]
        world.engine.gate.set()
        await held
        assert (await ask(world)).choices[0].message.content == "a"


async def test_a_long_prompt_is_encoded_beside_the_event_loop() -> None:
    async with World(answer("a"), max_model_len=1 << 20) as world:
        whole = await ask(world, messages=[{"role": "user", "content": "the end " * 10_000}])
    assert whole.usage.prompt_tokens == len(world.engine.jobs[0].tokens)
    assert len(world.engine.jobs[0].pages) == len(world.engine.jobs[0].tokens) // 64
