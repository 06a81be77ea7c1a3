"""What a worker tells the gateway about one job."""

from typing import Literal

import msgspec

from redline.wire.base import Message, Record
from redline.wire.job import JobId
from redline.wire.step import Drafter, Proposer, TokenLogprobs

Finish = Literal["stop", "length", "aborted", "error"]

Fault = Literal["refused", "overloaded", "failed", "lost"]
"""Whose an error is. refused: the job can never run, which the client can mend; overloaded: the same job may run later;
failed: the engine could not compute this job; lost: the worker ends, and every job with it."""


class Preempted(Record, frozen=True, tag=True):
    """A job that ran has lost slot and pages, since one was wanted and all were held; it waits in front of others."""

    by: JobId  # whose page it was; it may be the job's own
    running: int  # jobs that go on meanwhile
    pages: int  # of the worker, all held
    lost_tokens: int  # that were computed
    again_tokens: int  # of these, what is to be computed again, if what is cached of them stays
    short_pages: int  # that have to become free before it goes on, as of now


class Resumed(Record, frozen=True, tag=True):
    """A job that was pre-empted has its next token. Seconds since it was; None: nobody has looked at a clock."""

    again_tokens: int  # that were computed again
    waited_s: float | None  # until it had slot and pages again
    paused_s: float | None  # until that token


class Brought(Record, frozen=True, tag=True):
    """Pages of a job's prompt were read from below the prefix cache (`worker/tiers.py`)."""

    host_tokens: int
    disk_tokens: int
    read_s: float  # from the reading's beginning until the job could go on
    predicted_s: float  # of the same, when it was chosen
    compute_s: float | None  # what computing these tokens was predicted to take; None: nothing was known of that


class Drafted(Record, frozen=True, tag=True):
    """Some of the steps that verified drafts of a job, and nothing of a prompt beside them: sums over these."""

    steps: int
    seconds: float  # that they took
    predicted_s: float  # of the same, from what was known before each
    without_s: float  # what they were predicted to take without any draft


Note = Preempted | Resumed | Brought | Drafted
"""Why a job's answer came when it did."""


class Delta(Message, frozen=True):
    """New tokens of a job, perhaps its end; or, before its first token, a piece of its prompt's log probabilities; or a
    note alone.

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
    noted: tuple[Note, ...] = ()  # one of each kind at most: of most deltas there is nothing to note

    @property
    def notes_only(self) -> bool:
        """Whether it has nothing for the job's client."""
        return bool(self.noted) and not (self.tokens or self.finish or self.prompt_logprobs)

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
            noted=(),
        )
        return mine, rest
