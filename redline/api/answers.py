"""Whole answers in OpenAI's shape, and the parts that streams share with them: finish reasons, usage, logprobs."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any

import msgspec

from redline.api.gateway import Batch, Generation
from redline.chat.events import CallArguments, CallBegin, End, Logprobs, Text, Thought
from redline.wire.step import TokenLogprobs

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]
Scored = tuple[TokenLogprobs, bytes]

_AT_ONCE = 256  # entries of a list that are written in one call, which holds the interpreter's lock
_json = msgspec.json.Encoder().encode


def json_list(items: Iterable[Any]) -> msgspec.Raw:
    """A JSON list, written piece by piece, so that streams are served in between while a thread writes a large one."""
    pieces: list[bytes] = []
    iterator = iter(items)
    while some := list(islice(iterator, _AT_ONCE)):
        pieces.append(_json(some)[1:-1])
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


class Choice:
    """One choice's events, gathered until it ends; `index` and order are those of the generation's lanes."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.thought: list[str] = []
        self.calls: list[tuple[CallBegin, list[str]]] = []
        self.logprobs: list[Scored] = []
        self.end: End | None = None
        self.prompt_logprobs: Sequence[TokenLogprobs] | None = None
        self.prompt_ids: Sequence[int] | None = None
        self.token_ids: list[int] = []  # both where they are asked for

    def add(self, batch: Batch) -> None:
        """Take in the choice's next batch."""
        if batch.first:
            self.prompt_logprobs = batch.prompt_logprobs
            self.prompt_ids = batch.prompt_ids
        self.token_ids += batch.token_ids or ()
        for event in batch.events:
            match event:
                case Text(text=text):
                    self.text.append(text)
                case Thought(text=text):
                    self.thought.append(text)
                case CallBegin():
                    self.calls.append((event, []))
                case CallArguments(index=index, text=text):
                    self.calls[index][1].append(text)
                case Logprobs(items=items):
                    self.logprobs.extend(items)
                case End():
                    self.end = event

    @property
    def entries(self) -> int:
        """How much is to be written: the log probabilities that are told, and the pieces of text."""
        ids = (len(self.prompt_ids or ()) + len(self.token_ids)) // 8
        return ids + len(self.text) + len(self.thought) + sum(1 + len(item.top) for item, _ in self.logprobs)

    def ended(self) -> End:
        """The choice's end. Raises AssertionError where it has not come."""
        assert self.end is not None, "the gateway's batches ended before the choice did"
        return self.end


async def gather(generation: Generation) -> list[Choice]:
    """Read a generation to its end: its choices, in order of their index. Raises what the generation raises."""
    gathered = [Choice() for _ in generation.lanes]
    async for together in generation:
        for batch in together:
            gathered[batch.choice].add(batch)
    return gathered


def chat_answer(
    id: str,
    created: int,
    model: str,
    choices: Sequence[Choice],
    logprobs: bool,
    token_bytes: TokenBytes,
) -> bytes:
    """The body of a whole chat completion, as JSON.

    created: Unix seconds. choices: in order of their index, all of them ended. logprobs: whether they were asked for.
    """
    answer: Json = {
        "id": id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": chat_logprobs(choice.logprobs, token_bytes) if logprobs else None,
                **finish_of(choice.ended()),
                **({} if choice.prompt_ids is None else {"token_ids": json_list(choice.token_ids)}),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_of([choice.ended() for choice in choices], n=len(choices)),
    }
    if (prompt_ids := choices[0].prompt_ids) is not None:
        answer["prompt_token_ids"] = json_list(prompt_ids)
    if (prompt_logprobs := choices[0].prompt_logprobs) is not None:
        answer["prompt_logprobs"] = vllm_prompt_logprobs(prompt_logprobs, token_bytes)
    return _json(answer)


def _message(choice: Choice) -> Json:
    text, thought = "".join(choice.text), "".join(choice.thought)
    message: Json = {"role": "assistant", "content": text or (None if choice.calls else ""), "refusal": None}
    if thought:
        message |= {"reasoning": thought, "reasoning_content": thought}
    if choice.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(arguments)},
            }
            for call, arguments in choice.calls
        ]
    return message


def finish_of(end: End) -> Json:
    """The members finish_reason and stop_reason (vLLM's: the stop string or id that ended the answer, or null)."""
    reason = "tool_calls" if end.tool_calls and end.finish == "stop" else end.finish
    return {"finish_reason": reason, "stop_reason": end.stop}


def usage_of(ends: Sequence[End], n: int) -> Json:
    """The usage, in tokens, of all choices together; a prompt that was answered `n` times counts once.

    ends: one for each choice, in order of the choices' indices.
    """
    firsts = ends[::n]
    cached = sum(min(end.cached_tokens for end in ends[start : start + n]) for start in range(0, len(ends), n))
    return usage(
        prompt=sum(end.prompt_tokens for end in firsts),
        completion=sum(end.completion_tokens for end in ends),
        cached=cached,
        reasoning=sum(end.reasoning_tokens for end in ends),
        accepted=sum(end.accepted_tokens for end in ends),
        rejected=sum(end.rejected_tokens for end in ends),
    )


def usage(
    prompt: int, completion: int, cached: int = 0, reasoning: int = 0, accepted: int = 0, rejected: int = 0
) -> Json:
    """OpenAI's usage object; all counts are tokens. cached: of the prompt. reasoning, accepted: part of `completion`.

    accepted, rejected: drafts, which OpenAI's shape calls prediction tokens; the rejected ones are part of nothing.
    """
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def completion_answer(
    id: str,
    created: int,
    model: str,
    prompts: Sequence[Sequence[int]],
    choices: Sequence[Choice],
    logprobs: bool,
    echo: bool,
    token_bytes: TokenBytes,
) -> bytes:
    """The body of a whole text completion, as JSON.

    created: Unix seconds. prompts: their token ids. choices: the answers to the first prompt, then to the second, and
    so on, all of them ended. logprobs: whether they were asked for. echo: the prompt opens each choice's text.
    """
    n = len(choices) // len(prompts)
    answer = {
        "id": id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            _completion_choice(
                index,
                choice,
                Opening(prompts[index // n], choice.prompt_logprobs, echo, token_bytes),
                logprobs,
                token_bytes,
            )
            for index, choice in enumerate(choices)
        ],
        "usage": usage_of([choice.ended() for choice in choices], n),
    }
    return _json(answer)


def _completion_choice(index: int, choice: Choice, opening: "Opening", logprobs: bool, token_bytes: TokenBytes) -> Json:
    scored = None
    if logprobs:
        scored = completion_logprobs([*opening.scored, *choice.logprobs], token_bytes)
    answer: Json = {
        "index": index,
        "text": opening.text + "".join(choice.text),
        "logprobs": scored,
        **finish_of(choice.ended()),
    }
    if opening.prompt_logprobs is not None:
        answer["prompt_logprobs"] = vllm_prompt_logprobs(opening.prompt_logprobs, token_bytes)
    if choice.prompt_ids is not None:
        answer |= {"prompt_token_ids": json_list(choice.prompt_ids), "token_ids": json_list(choice.token_ids)}
    return answer


def tokenize_answer(tokens: Sequence[int], max_model_len: int, token_bytes: TokenBytes | None) -> bytes:
    """The body of an answer to /tokenize, as JSON. token_bytes: None where the tokens' texts are not asked for."""
    strings = None
    if token_bytes is not None:
        strings = json_list(token_bytes(token).decode(errors="replace") for token in tokens)
    return _json(
        {"count": len(tokens), "max_model_len": max_model_len, "tokens": json_list(tokens), "token_strs": strings}
    )


def detokenize_answer(tokens: Sequence[int], decode_bytes: Callable[[Sequence[int]], bytes]) -> bytes:
    """The body of an answer to /detokenize, as JSON; bytes that are no UTF-8 become U+FFFD."""
    return _json({"prompt": decode_bytes(tokens).decode(errors="replace")})


class Opening:
    """What stands before a completion's own text: with `echo` the prompt, and its logprobs.

    `text` is empty without `echo`; `scored` holds an entry for each prompt token, the first without log probabilities,
    and is empty without `echo` or prompt_logprobs.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        prompt_logprobs: Sequence[TokenLogprobs] | None,
        echo: bool,
        token_bytes: TokenBytes,
    ) -> None:
        self.prompt_logprobs = prompt_logprobs
        self.text = b"".join(map(token_bytes, prompt)).decode(errors="replace") if echo else ""
        self.scored: list[tuple[TokenLogprobs | None, bytes]] = []
        if echo and prompt_logprobs is not None:
            self.scored.append((None, token_bytes(prompt[0])))  # nothing stands before the first token
            self.scored += [(item, token_bytes(item.token)) for item in prompt_logprobs]


def chat_logprobs(items: Iterable[Scored], token_bytes: TokenBytes) -> Json:
    """OpenAI's chat shape, an entry per token; its `bytes` carry tokens that are only part of a character.

    items: each token's log probabilities with the token's bytes.
    """
    return {
        "content": json_list(
            {
                **_scored(data, item.logprob),
                "top_logprobs": [_scored(token_bytes(token), logprob) for token, logprob in item.top],
            }
            for item, data in items
        ),
        "refusal": None,
    }


def _scored(data: bytes, logprob: float) -> Json:
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def completion_logprobs(
    items: Iterable[tuple[TokenLogprobs | None, bytes]], token_bytes: TokenBytes, offset: int = 0
) -> Json:
    """OpenAI's completions shape: parallel lists. The chosen token is always among the top ones, as in OpenAI's.

    items: each token's log probabilities (None for a prompt's first token) with the token's bytes. offset: characters
    of the choice's text before the first item; `text_offset` counts on from there.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for item, data in items:
        token = data.decode(errors="replace")
        tokens.append(token)
        offsets.append(offset)
        offset += len(token)
        logprobs.append(item.logprob if item else None)
        top = {token_bytes(id).decode(errors="replace"): logprob for id, logprob in item.top} if item else None
        tops.append({token: item.logprob, **(top or {})} if item else None)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": json_list(tops), "text_offset": offsets}


def vllm_prompt_logprobs(items: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> msgspec.Raw:
    """vLLM's shape: per prompt token null (the first) or {id: {logprob, rank, decoded_token}}."""
    return json_list(chain((None,), (_prompt_entry(item, token_bytes) for item in items)))


def _prompt_entry(item: TokenLogprobs, token_bytes: TokenBytes) -> Json:
    entry: Json = {}
    for rank, (token, logprob) in enumerate(item.top, start=1):
        entry[str(token)] = _ranked(token_bytes(token), logprob, rank)
    entry[str(item.token)] = _ranked(token_bytes(item.token), item.logprob, item.rank)
    return entry


def _ranked(data: bytes, logprob: float, rank: int) -> Json:
    return {"logprob": logprob, "rank": rank, "decoded_token": data.decode(errors="replace")}
