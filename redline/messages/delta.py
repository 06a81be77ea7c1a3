"""Messages from a worker to the gateway about one job: new tokens, the end of the answer, notes for its trace."""

from typing import Literal

import msgspec

from redline.messages.base import Record, WireMessage
from redline.messages.job import JobId
from redline.messages.step import Drafter, Proposer, TokenLogprobs

Finish = Literal["stop", "length", "aborted", "error"]

Fault = Literal["refused", "overloaded", "failed", "lost"]
"""Category of an error. refused: the job can never run, an error of the client; overloaded: the same job may run
later; failed: the engine could not compute this job; lost: the worker ended, and all its jobs with it."""


class Preempted(Record, frozen=True, tag=True):
    """A running job was preempted: it lost its slot and its pages because another job needed a page and none was
    free. It is requeued in front of the waiting jobs."""

    by: JobId  # the job that needed a page; it may be the preempted job itself
    running: int  # number of jobs that keep running
    pages: int  # all pages of the worker, none of them free
    lost_tokens: int  # computed tokens whose pages were released
    again_tokens: int  # of these, tokens to recompute if the cached pages are not evicted before
    short_pages: int  # pages that have to become free before the job can resume, as of now


class Resumed(Record, frozen=True, tag=True):
    """A preempted job has its next token. Times are seconds since the preemption; None if the planner has no clock."""

    again_tokens: int  # tokens that were recomputed
    waited_s: float | None  # until it had a slot and pages again
    paused_s: float | None  # until the next token


class Brought(Record, frozen=True, tag=True):
    """Pages of a job's prompt were read from a KV offload tier, host memory or disk (`worker/tiers.py`)."""

    host_tokens: int
    disk_tokens: int
    read_s: float  # from the start of the read until the job could proceed
    predicted_s: float  # the prediction of `read_s` that the choice was based on
    compute_s: float | None  # predicted time to compute these tokens instead; None: no prediction


class Encoded(Record, frozen=True, tag=True):
    """The images of a job's prompt, without those that the prefix cache covers (`scheduler/features.py`)."""

    images: int
    tokens: int  # prompt positions of the images
    cached: int  # of the images: those encoded before, for an earlier request
    encode_s: float  # time of the vision encoder for the others


class Drafted(Record, frozen=True, tag=True):
    """Sums over some of the steps that verified draft tokens of a job and had no prompt tokens."""

    steps: int
    seconds: float  # duration of these steps
    predicted_s: float  # predicted duration, from the state before each step
    without_s: float  # predicted duration without speculative decoding


Note = Preempted | Resumed | Brought | Encoded | Drafted
"""Why a job's tokens came when they did; shown in its trace."""


class Delta(WireMessage, frozen=True):
    """New tokens of a job, perhaps with its end; or, before the first token, a part of the prompt's log probabilities;
    or only notes.

    If finish is "stop", the last of `tokens` is the stop id.
    """

    job: JobId
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None  # in a job's last delta, and in no other
    # From arrival to the first step; in the delta with the first token, if the planner has a clock.
    queued_s: float | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; the same in every delta
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of `tokens`, if requested
    # The next ones: complete when the first token or the end is sent.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    proposed: int = 0  # draft tokens that this delta's step verified
    accepted: int = 0  # how many of them were accepted: the first ones of `tokens`
    by: Drafter | None = None  # the drafter that made them
    error: str | None = None  # one line; set if finish is "error"
    fault: Fault | None = None  # category of that error
    noted: tuple[Note, ...] = ()  # at most one of each kind; empty in most deltas

    @property
    def notes_only(self) -> bool:
        """Whether it contains nothing for the job's client."""
        return bool(self.noted) and not (self.tokens or self.finish or self.prompt_logprobs)

    @property
    def proposer(self) -> Proposer:
        """The drafter or model that proposed the first of its tokens."""
        return self.by if self.accepted and self.by is not None else "target"

    def by_proposer(self) -> tuple["Delta", ...]:
        """The delta split by proposer: the accepted draft tokens, then the model's own token."""
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
