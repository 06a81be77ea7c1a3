"""Token ids to jobs: final sampling parameters, the grammar, page hashes, seeds.

Invariant: a job that is built here can be decoded and run by every worker with the engine's limits.
"""

import secrets
import uuid
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from redline import clock
from redline.api.ask import MOST_BIASES, WHAT_IS_LEFT, Ask, Prompt
from redline.api.auth.quota import CALLER, Caller
from redline.api.config import Limits
from redline.api.gateway.encoder import EncodedPrompt, Encoder, cache_salt
from redline.api.grammars.grammars import Grammars
from redline.chat.constraint import bound_thinking
from redline.chat.conversation import Conversation
from redline.chat.page_hashes import make_job
from redline.errors import PromptTooLong, RequestError
from redline.messages.job import Grammar, Job, JobId, Sampling

SEED_MASK = (1 << 63) - 1
NEVER = -100.0  # added to the logit of a token that must practically never be sampled
_SAMPLING = msgspec.msgpack.Decoder(Sampling)


class JobBuilder:
    """Builds the jobs of prompts. `replica`: as in `Gateway`."""

    def __init__(self, encoder: Encoder, limits: Limits, replica: str) -> None:
        self.grammars = Grammars(encoder.tokenizer, limits)
        self._encoder = encoder
        self._limits = limits
        self._replica = replica
        self._call_tokens = encoder.tokenizer.call_marks

    async def sampling(self, ask: Ask, prompt: Prompt, tokens: Sequence[int], limit: int, param: str) -> Sampling:
        """The sampling parameters of a prompt's jobs, without the seed. tokens: of the prompt. limit: the context
        length. param: the request field of the prompt, for errors. Raises RequestError or Overloaded."""
        sampling = self._settle(ask, prompt, len(tokens), limit, param)
        if ask.sampling.max_tokens:
            at, caller = clock.perf_counter(), CALLER.get()
            sampling = msgspec.structs.replace(
                sampling, grammar=await self._grammar(ask, prompt, tokens, sampling, caller)
            )
            if caller.passage is not None and sampling.grammar is not None:
                caller.passage.did("grammar", at)
        # A worker that cannot decode a job dies, and so does the next one that the job is requeued to.
        return _SAMPLING.decode(msgspec.msgpack.encode(sampling))

    async def jobs(self, ask: Ask, prompt: EncodedPrompt, sampling: Sampling, fingerprint: str) -> list[Job]:
        """The `n` jobs of a prompt. fingerprint: of the model."""
        caller = CALLER.get()
        id, salt = JobId(uuid.uuid4().hex), cache_salt(caller, ask.salt)
        tokens, media = prompt
        job = await self._encoder.in_thread(len(tokens), make_job, id, tokens, sampling, fingerprint, salt, media)
        # The job's id begins with the request's id, so that worker messages contain it.
        prefix = f"{caller.request_id}.{job.id}" if caller.request_id else job.id
        seed = secrets.randbits(63) if ask.seed is None else ask.seed & SEED_MASK
        return [
            msgspec.structs.replace(
                job,
                id=JobId(f"{prefix}-{k}"),
                tenant=_tenant(caller),
                replica=self._replica,
                sampling=msgspec.structs.replace(job.sampling, seed=derived_seed(seed, k), seeded=ask.seed is not None),
            )
            for k in range(ask.n)
        ]

    async def _grammar(
        self, ask: Ask, prompt: Prompt, tokens: Sequence[int], sampling: Sampling, caller: Caller
    ) -> Grammar | None:
        """Grammar of the response to a prompt. sampling: with the final max_tokens."""
        conversation = prompt if isinstance(prompt, Conversation) else None
        thinks = self._encoder.thinks(prompt)
        grammar = None
        if ask.constraint is not None or (conversation is not None and conversation.tools):
            grammar = await self.grammars.grammar(
                ask.constraint, ask.calls, conversation, thinks=thinks, tenant=_tenant(caller)
            )
        if not thinks:
            return grammar
        must = ask.constraint is not None or ask.calls.mode == "required"
        of_prompt = tokens if conversation is not None and conversation.continues else ()
        most = sampling.max_tokens if must else None
        thinking = bound_thinking(ask.thinking_budget, most, of_prompt, self._encoder.tokenizer)
        return grammar if thinking is None else msgspec.structs.replace(grammar or Grammar(text=""), thinking=thinking)

    def _settle(self, ask: Ask, prompt: Prompt, prompt_tokens: int, limit: int, param: str) -> Sampling:
        """The sampling parameters without seed and grammar. Scoring needs one step, so max_tokens becomes 1, or 0 if
        the prompt fills the context."""
        asked = ask.sampling.max_tokens
        most = self._limits.most_max_tokens
        if asked == WHAT_IS_LEFT:
            allowed = [tokens for tokens in (most, self._limits.default_max_tokens) if tokens is not None]
            allowed = min(allowed, default=WHAT_IS_LEFT)
            if ask.sampling.min_tokens > allowed:
                raise RequestError(f"min_tokens exceeds the limit of {allowed} tokens for an answer", "min_tokens")
        else:
            allowed = asked if most is None else min(asked, most)
        left = limit - prompt_tokens
        if left < min(1, asked):
            raise PromptTooLong(param, prompt_tokens, limit)
        most_here = min(max(1, allowed), left)
        own = () if ask.ignore_eos else self._encoder.tokenizer.stop_ids
        sampling = msgspec.structs.replace(
            ask.sampling,
            max_tokens=most_here,
            min_tokens=min(ask.sampling.min_tokens, most_here),
            stop_ids=tuple(dict.fromkeys((*own, *ask.sampling.stop_ids))),
        )
        if sampling.top_p == 0:
            sampling = msgspec.structs.replace(sampling, top_p=1.0, temperature=0.0)
        if isinstance(prompt, Conversation) and not prompt.tools and any(one.tool_calls for one in prompt.messages):
            # A history with tool calls tempts the model to make calls, though no tool is declared: suppress the call
            # tokens.
            marks = self._call_tokens
            biases = *(one for one in sampling.logit_bias if one[0] not in marks), *((mark, NEVER) for mark in marks)
            if len(biases) <= MOST_BIASES:
                sampling = msgspec.structs.replace(sampling, logit_bias=biases)
        return sampling


def derived_seed(seed: int, k: int) -> int:
    """The seed of a prompt's choice k: the request's own for choice 0, so that n does not change it; else a hash."""
    if k == 0:
        return seed
    digest = blake2b(b"%d,%d" % (seed, k), digest_size=8).digest()
    return int.from_bytes(digest, "little") & SEED_MASK


def _tenant(caller: Caller) -> str:
    return "" if caller.account is None else caller.account.name
