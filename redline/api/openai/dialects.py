"""OpenAI's chat and completions as dialects: `openai` reads, `answers` and `sse` write."""

import uuid
from collections.abc import Sequence

from redline.api.dialect import Dialect, Reply, Streaming
from redline.api.errors import WholeResponse, answer_to
from redline.api.openai.answers import ChoiceOutput, chat_answer, completion_answer
from redline.api.openai.requests import ChatRequest, CompletionRequest, read_chat, read_completion
from redline.api.openai.sse import ChatStream, CompletionStream


def openai_error(error: Exception, request_id: str) -> WholeResponse:
    """The response for an exception; OpenAI's error bodies do not contain the request's id."""
    return answer_to(error)


def _chat_stream(reply: Reply[ChatRequest]) -> ChatStream:
    prompts = [len(prompt) for prompt in reply.generation.prompts]
    how = reply.asked.stream or Streaming()
    logprobs = reply.asked.ask.sampling.logprobs is not None
    id, token_bytes = f"chatcmpl-{uuid.uuid4().hex}", reply.tokenizer.token_bytes
    return ChatStream(
        *(id, reply.created, reply.model, prompts, reply.generation.n, how, logprobs, token_bytes),
        reply.asked.reasoning_field,
    )


def _chat_answer(reply: Reply[ChatRequest], choices: Sequence[ChoiceOutput]) -> bytes:
    logprobs = reply.asked.ask.sampling.logprobs is not None
    id, token_bytes = f"chatcmpl-{uuid.uuid4().hex}", reply.tokenizer.token_bytes
    field = reply.asked.reasoning_field
    return chat_answer(id, reply.created, reply.model, choices, logprobs, token_bytes, field)


def _completion_stream(reply: Reply[CompletionRequest]) -> CompletionStream:
    asked, generation = reply.asked, reply.generation
    return CompletionStream(
        f"cmpl-{uuid.uuid4().hex}",
        reply.created,
        reply.model,
        generation.prompts,
        generation.n,
        asked.stream or Streaming(),
        asked.ask.sampling.logprobs is not None,
        asked.echo,
        reply.tokenizer.token_bytes,
        _hidden(reply),
    )


def _completion_answer(reply: Reply[CompletionRequest], choices: Sequence[ChoiceOutput]) -> bytes:
    asked = reply.asked
    return completion_answer(
        f"cmpl-{uuid.uuid4().hex}",
        reply.created,
        reply.model,
        reply.generation.prompts,
        choices,
        asked.ask.sampling.logprobs is not None,
        asked.echo,
        reply.tokenizer.token_bytes,
        _hidden(reply),
    )


def _hidden(reply: Reply[CompletionRequest]) -> frozenset[int]:
    """Token ids that are decoded to no text in the response."""
    return reply.tokenizer.skipped if reply.asked.ask.skip_special_tokens else frozenset[int]()


CHAT = Dialect(read=read_chat, stream=_chat_stream, answer=_chat_answer, error=openai_error)
COMPLETIONS = Dialect(read=read_completion, stream=_completion_stream, answer=_completion_answer, error=openai_error)
