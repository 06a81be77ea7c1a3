"""What a worker tells the gateway about one job."""

from typing import Literal

import msgspec

from redline.wire.base import Message
from redline.wire.job import JobId
from redline.wire.step import Drafter, Proposer, TokenLogprobs

Finish = Literal["stop", "length", "aborted", "error"]

Fault = Literal["refused", "overloaded", "failed", "lost"]
"""Whose an error is. refused: the job can never run, which the client can mend; overloaded: the same job may run later;
failed: the engine could not compute this job; lost: the worker ends, and every job with it."""


class Delta(Message, frozen=True):
    """New tokens of a job, perhaps its end; or, before its first token, a piece of its prompt's log probabilities.

    Where finish is "stop", the last of `tokens` is the stop id.
    """

    job: JobId
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None  # in a job's last delta, and in no other
    queued_s: float | None = None  # from its coming to its first step; with its first token, where it was timed
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; the same in every delta
    logprobs: tuple[TokenLogprobs, ...] = ()  # as many as tokens, where asked for
    prompt_logprobs: tuple[
        TokenLogprobs, ...
    ] = ()  # the next ones: all have come when the first token comes, or the end
    proposed: int = 0  # drafts that the step behind this delta verified
    accepted: int = 0  # how many of them held: the first of `tokens`
    by: Drafter | None = None  # who made those drafts
    error: str | None = None  # one line, where finish is "error"
    fault: Fault | None = None  # whose that error is

    @property
    def proposer(self) -> Proposer:
        """Who proposed its first token."""
        return self.by if self.accepted and self.by is not None else "target"

    def by_proposer(self) -> tuple["Delta", ...]:
        """The same, as deltas whose tokens each have one proposer: accepted drafts, then the model's own token."""
        held = self.accepted
        if not 0 < held < len(self.tokens):
            return (self,)
        mine = msgspec.structs.replace(
            self,
            tokens=self.tokens[:held],
            logprobs=self.logprobs[:held],
            proposed=held,
            finish=None,
            error=None,
            fault=None,
        )
        rest = msgspec.structs.replace(
            self,
            tokens=self.tokens[held:],
            logprobs=self.logprobs[held:],
            prompt_logprobs=(),
            queued_s=None,
            proposed=self.proposed - held,
            accepted=0,
        )
        return mine, rest
