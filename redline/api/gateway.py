"""Between HTTP and the workers: an Ask becomes jobs, and their deltas become events.

One reader per worker passes its messages to `Gateway.take`. Each Generation collects the deltas of its own jobs and
decodes them in the task that writes the response, so that all deltas that arrived since the last write go out in one
write.

If a worker goes down, its jobs are requeued to another worker together with the tokens generated so far. The next token
is a function of prompt, output and seed, and decoder and parser are in this process, so the stream continues without a
gap.
"""

import asyncio
import functools
import logging
import math
import secrets
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from types import MappingProxyType, TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import msgspec

from redline import clock
from redline.api.ask import MOST_BIASES, WHAT_IS_LEFT, Ask, Prompt
from redline.api.auth.quota import CALLER, Caller, ServedRate
from redline.api.config import Limits, Sla
from redline.api.grammars.grammars import Grammars
from redline.api.http.stream_flusher import ImmediateWriter, StreamFlusher
from redline.api.peer_replicas import PeerReplicas
from redline.api.telemetry.metrics import Metrics
from redline.api.telemetry.request_span import RequestSpan
from redline.api.telemetry.request_traces import RequestTrace, RequestTraces
from redline.api.telemetry.sla import Attainment, Took, targets_of
from redline.chat.constraint import bound_thinking
from redline.chat.conversation import Conversation, ToolCall
from redline.chat.decoder import Decoder
from redline.chat.events import CallArguments, CallBegin, End, Event, Thought
from redline.chat.hashing import make_job
from redline.chat.known import KnownTexts
from redline.chat.said_calls import SaidCalls
from redline.chat.template import Style, render
from redline.chat.tokenizer import Tokenizer
from redline.errors import (
    ContextTooLong,
    DeadlineExceeded,
    MessageTooLarge,
    Overloaded,
    PromptTooLong,
    RedlineError,
    RequestError,
    WorkerLost,
)
from redline.messages.channel import AsyncInbox, Outbox
from redline.messages.codec import Wire
from redline.messages.delta import Delta, Finish, Note, Preempted, Resumed
from redline.messages.handoff import Prefill, WorkerDown
from redline.messages.job import PAGE_TOKENS, Abort, Grammar, Job, JobId, Sampling
from redline.messages.news import Cached, Failed, Heartbeat, Load, Missed, Ping, Ready, Role, RoleTaken, TakeRole
from redline.messages.profile import Profiled
from redline.messages.replicas import Use
from redline.messages.step import Proposer, TokenLogprobs
from redline.policy.targets import Targets
from redline.router.preemption_forecast import ConcurrentAnswer, goes_on
from redline.router.request_history import RequestHistory, RequestRecord
from redline.router.roles import STAY_S, is_done
from redline.router.worker_registry import Route, WorkerHandle, WorkerRegistry

INLINE_CHARS = 4096  # encoding more characters takes over a millisecond, during which the event loop serves no stream
SEED_MASK = (1 << 63) - 1
_SAMPLING = msgspec.msgpack.Decoder(Sampling)
NEVER = -100.0  # added to the logit of a token that must practically never be sampled
LOOKS = 3  # checks for written data per keep-alive interval of a stream
LOOK_S = 0.25  # seconds between two checks for workers without a heartbeat
AHEAD_TOKENS = 64  # tokens of a job buffered for a slow client before the job is paused and its pages are released
MOST_MOVES = 3  # requeues of a job after worker failures or timeouts: more often, the job itself may be the cause

NO_TARGETS: Mapping[str, Sla] = MappingProxyType({})

log = logging.getLogger("redline.api")

P = ParamSpec("P")
T = TypeVar("T")


class JobFailed(RedlineError):
    """The engine failed this one job; a client sees status 500 and no reason."""


class Profiling(Protocol):
    """Receives worker messages while a profile is being recorded (`api.profile`)."""

    def took(self, link: WorkerHandle, messages: Sequence[Wire], began: float) -> None:
        """Called after a batch of worker messages was processed and written. began: start, by time.perf_counter."""
        ...

    def told(self, link: WorkerHandle, message: Profiled) -> None:
        """Called with each Profiled message of a worker."""
        ...


class Batch(msgspec.Struct, frozen=True, gc=False):
    """The output of one delta for one choice."""

    choice: int  # index of the choice
    events: Sequence[Event]
    completion_tokens: int  # tokens of the choice so far
    first: bool = False  # the first batch of its choice
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # with the first batch, if requested
    token_ids: Sequence[int] | None = None  # output tokens since the last batch, if requested
    prompt_ids: Sequence[int] | None = None  # with the first batch, if requested
    proposer: Proposer | None = None  # what proposed these tokens, if requested
    elapsed_ms: float = 0.0  # from the request's start until the engine's tokens arrived, with `proposer`


class Gateway:
    """Sends jobs to workers and receives their deltas. `take` and everything else run in one event loop.

    `links` are the workers; `join` registers each start of one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        style: Style,
        metrics: Metrics,
        limits: Limits = Limits(),  # noqa: B008
        clock: Callable[[], float] = clock.monotonic,
        resume_s: float = 0.0,
        targets: Mapping[str, Sla] = NO_TARGETS,
        replica: str = "",
    ) -> None:
        """resume_s: seconds beyond a worker's start time for which jobs of a worker that went down wait for another
        one. targets: SLO targets by class name. replica: name of this API replica, if there are several."""
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._at_end: list[Callable[[], object]] = []
        self.links = WorkerRegistry(clock)
        self.replica = replica
        self.others = PeerReplicas()
        self._clock = clock
        self._style = style
        self._limits = limits
        self._resume_s = resume_s
        self._looked_at: float | None = None
        self._stranded: dict[_Lane, asyncio.TimerHandle] = {}  # jobs that wait for a worker to continue on
        self.pours = StreamFlusher()
        self.profiling: Profiling | None = None  # set while a profile is being recorded
        self.stories = RequestTraces()
        self.attainment = Attainment(targets, metrics, clock)
        self._targets = targets_of(targets)
        self.lately = RequestHistory(clock)
        self.loads: Callable[[str, Load], object] = lambda _worker, _load: None  # called with each Load message
        self._known = KnownTexts(limits.known_bytes)
        self._said = SaidCalls(limits.said_bytes)
        self._lanes: dict[JobId, _Lane] = {}
        self._waiting = 0  # jobs without a delta so far
        self._waiting_tokens = 0  # prompt tokens of the waiting jobs, and of jobs that are being prepared
        self._grammars = Grammars(tokenizer, limits)
        self._served = ServedRate(clock)
        metrics.queue(lambda: self._waiting, lambda: self._waiting_tokens)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="encode")
        self._call_marks = tokenizer.call_marks
        self._longest_token = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))

    @property
    def ready(self) -> Ready | None:
        """Properties of the engine (context length, fingerprint); None while no worker can serve."""
        return self.links.ready

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens of one job, prompt and output. Raises Overloaded or WorkerLost while no worker is
        ready."""
        return self._engine().max_model_len

    @property
    def load(self) -> int:
        """Number of requests that are running or waiting."""
        return len({lane.generation for lane in self._lanes.values()})

    @property
    def waiting(self) -> tuple[int, int]:
        """Jobs without a first token, and their prompt tokens, including those of jobs that are being prepared."""
        return self._waiting, self._waiting_tokens

    @property
    def running(self) -> int:
        """Number of jobs that have a first token and have not ended."""
        return len(self._lanes) - self._waiting

    @property
    def retry_s(self) -> float:
        """Seconds until the jobs that wait now will have started, at the recent rate of served prompts."""
        return self._served.retry_s(self._waiting_tokens)

    @property
    def served_per_s(self) -> float:
        """Recent rate of served prompt tokens, in tokens per second, cached ones included."""
        return self._served.per_s

    # -- from the workers

    def join(
        self, name: str, outbox: Outbox, role: Role = "both", epoch: int = 1, inbox: str = "", at: str | None = None
    ) -> WorkerHandle:
        """Register a started worker; pass its messages to `take`. Jobs are sent to it through `outbox`.

        inbox: the address that the worker reads, for other workers. at: the machine that it runs on, if it is a remote
        one. Raises AssertionError if the worker's last start is not marked as down.
        """
        link = WorkerHandle(name, outbox, role, epoch, inbox, at)
        self.links.join(link)
        self.metrics.joined(name)
        self.metrics.role(name, role)
        return link

    def drain(self, link: WorkerHandle) -> None:
        """Send nothing new to a worker that is about to be replaced."""
        link.draining = True

    def hear(self, use: Use) -> None:
        """Store the load of another API replica."""
        self.others.heard(use)
        for link in self.links:
            self.others.tell(link)

    async def follow(self, link: WorkerHandle, inbox: AsyncInbox) -> None:
        """Read a worker's messages until cancelled. The worker counts as down once reading ends, for any reason."""
        try:
            while link.lost is None:
                self.take(link, await inbox.get())
        finally:
            self.lose(link, "the worker's messages are no longer read")

    def take(self, link: WorkerHandle, messages: Sequence[Wire]) -> None:
        """Process messages of a worker that arrived together, with one write per stream. Raises like `deliver`."""
        began = 0.0 if self.profiling is None else clock.perf_counter()
        for message in messages:
            self._take(link, message)
        self.pours.flush()
        if self.profiling is not None:
            self.profiling.took(link, messages, began)

    def deliver(self, link: WorkerHandle, message: Wire) -> None:
        """Process one message of a worker; more may arrive in this iteration of the event loop. Raises AssertionError
        for a message type that no worker sends."""
        self._take(link, message)
        self.pours.soon()

    def _take(self, link: WorkerHandle, message: Wire) -> None:
        if link.lost is not None:  # jobs requeued, cached pages dropped; a drained one sends its last
            return
        match message:
            case Delta():
                lane = self._lanes.get(message.job)
                if lane is not None and lane.link is link:  # else: aborted before the worker knew, or requeued
                    if message.noted:
                        self._note(lane, link, message.noted)
                    if not message.notes_only:
                        self._deliver(lane, message)
            case Load():
                self.links.loaded(link, message)
                self.metrics.load(message, link.name, link.epoch)
                self.loads(link.name, message)
            case Heartbeat():
                link.heard(message, self._clock())
            case Ping():
                pass  # a lost message before it would have been reported as Missed
            case Missed():
                self._missed(link, message.messages)
            case Cached():
                self.links.cached(link, message)
            case Profiled():
                if self.profiling is not None:
                    self.profiling.told(link, message)
            case Ready():
                if (why_not := self.links.speaks(link, message)) is not None:
                    self.lose(link, why_not)
                    return
                self.metrics.ready(message, link.name)
                for lane in list(self._stranded):
                    self._resend(lane)
            case RoleTaken():
                link.told = message.role
            case Failed():
                self.lose(link, message.reason)
            case _:
                raise AssertionError(f"a worker does not send {type(message).__name__}")

    def _note(self, lane: "_Lane", link: WorkerHandle, notes: Sequence[Note]) -> None:
        computes = None if lane.heard or lane.route is None else lane.route.prefill
        for note in notes:
            if not isinstance(note, Preempted):
                lane.waits = lane.waits and not isinstance(note, Resumed)
                lane.story.notes(note, lane.job.id)
                continue
            lane.waits = True
            # A prefill worker's other prompts are not known here, and none of them is decoding.
            expected = goes_on(note, self._beside(lane, link) if computes is None else (), self.links.pace)
            lane.story.notes(note, lane.job.id, expected, lane.tokens)
            log.info(
                "job %s was preempted on %s after %d tokens, for a page of %s: all %d are in use; %d tokens to compute "
                "again; predicted to continue in %.3f s, of which %.3f s until pages are free",
                *(lane.job.id, (computes or link).name, lane.tokens),
                "its own" if note.by == lane.job.id else f"job {note.by}",
                *(note.pages, note.again_tokens, sum(expected), expected.wait_s),
            )

    def _beside(self, lane: "_Lane", link: WorkerHandle) -> list[ConcurrentAnswer]:
        """The other decoding jobs of a worker; preempted ones have no pages to give back."""
        return [
            ConcurrentAnswer(
                -(-(len(other.job.tokens) + other.tokens) // PAGE_TOKENS),
                *(other.tokens, other.job.sampling.max_tokens, other.generation.caller.sla),
            )
            for other in self._lanes_of(link)
            if other is not lane and other.heard and not other.waits
        ]

    def _deliver(self, lane: "_Lane", delta: Delta) -> None:
        if delta.fault == "lost" and lane.link is not None:  # the worker is going down, and has not reported it yet
            lane.link.draining = True
            self._requeue(lane, delta.error or "the worker is going down")
            return
        now = clock.perf_counter()
        if not lane.heard:
            lane.heard = True
            lane.cached_tokens = lane.came.cached = delta.cached_tokens
            self._computed(lane)
            self._waits_no_more(lane)
            if delta.finish not in ("error", "aborted"):
                self._served.served(len(lane.job.tokens))
        elif delta.tokens:
            self._computed(lane)  # from another worker, or repeated, if the job was requeued or paused
        lane.story.comes(delta, now)
        if delta.queued_s is not None:
            lane.queued_s = delta.queued_s
        if tokens := len(delta.tokens):
            if lane.tokens:
                self.metrics.tokens.generated(tokens, now - lane.last_at)
            else:
                lane.first_at = now
                self.metrics.time_to_first_token.observe(now - lane.began)
                self.metrics.tokens.generated(tokens, None)
            lane.last_at = now
            lane.answer += delta.tokens
            lane.came.output = lane.tokens
            if (account := lane.generation.caller.account) is not None:
                account.charge(tokens)
        lane.scored += len(delta.prompt_logprobs)
        if delta.finish is not None:
            del self._lanes[lane.job.id]
            self._leave(lane)
            self._ended(lane, now, delta.finish)
        if lane.moves and delta.cached_tokens != lane.cached_tokens:
            delta = msgspec.structs.replace(delta, cached_tokens=lane.cached_tokens)
        lane.generation.push(lane, delta)

    def _ended(self, lane: "_Lane", now: float, finish: Finish) -> None:
        lane.story.ends(finish, lane.tokens, now)
        lane.came.ended = finish in ("stop", "length")
        if lane.came.ended:
            self.links.pace.answered(lane.generation.caller.sla, lane.tokens)
        self.metrics.finished(finish)
        self.metrics.e2e_latency.observe(now - lane.began)
        first_token_s = lane.first_at - lane.began if lane.tokens else None
        pace_s = (lane.last_at - lane.first_at) / (lane.tokens - 1) if lane.tokens > 1 else None
        self.attainment.ended(lane.generation.caller.sla, Took(now - lane.began, first_token_s, pace_s), finish)
        self.metrics.job_ended(len(lane.job.tokens), lane.tokens)
        if lane.tokens:
            prefill_s = max(0.0, lane.first_at - lane.sent_at - lane.queued_s)
            self.metrics.job_took(lane.queued_s, prefill_s, lane.last_at - lane.first_at)
        if (longest := lane.generation.job_ended(lane.tokens)) is not None:
            self.metrics.answered_whole(longest)
        if pace_s is not None:
            self.metrics.time_per_output_token.observe(pace_s)

    def lose(self, link: WorkerHandle, reason: str, *, asked: bool = False) -> None:
        """Mark a worker as down; idempotent. Its jobs are requeued to other workers, or fail with WorkerLost if none
        can take them.

        asked: the worker was stopped on purpose, so its jobs are not the cause.
        """
        if link.lost is None:
            jobs = self.answers_of(link)
            log.log(logging.ERROR if jobs else logging.DEBUG, "%s is down with %d jobs: %s", link.name, jobs, reason)
            self.links.lose(link, reason)
            self.metrics.lost(link.name, link.epoch)
            self._tell_gone(*self.links.newly_gone())
        for lane in self._lanes_of(link):
            self._requeue(lane, reason, blamed=not asked)

    def _missed(self, link: WorkerHandle, messages: int) -> None:
        """A connection was cut and messages on it were lost: a job, an abort or tokens. It is unknown which jobs they
        belonged to, so all jobs of the worker are requeued under new ids, and none of its KV transfers continues."""
        reason = f"{messages} messages of the worker's connections were lost"
        if link.ready is None:
            # Its Ready may have been lost; with several replicas it is sent again.
            if not self.replica:
                self.lose(link, reason, asked=True)
            return
        lanes = self._lanes_of(link)
        log.warning("%s: %s; %d jobs are requeued", link.name, reason, len(lanes))
        self._tell_gone(link)
        self.links.recall(link)
        if not self.replica:  # with several replicas, roles do not change
            link.outbox.put(TakeRole(role=link.role))  # a TakeRole may be among the lost messages
        for lane in lanes:
            link.outbox.put(Abort(job=lane.job.id))
            self._requeue(lane, reason, blamed=False)

    def turn(self, link: WorkerHandle, role: Role) -> None:
        """Switch the role of a worker (`roles.refusal` checks whether it can); new jobs are routed by the new role at
        once.

        If it becomes a prefill worker, jobs without a first token are requeued elsewhere at once. Its decoding jobs
        finish there, or are requeued after STAY_S. If jobs cannot be resumed, all of them finish there, however long
        that takes.
        """
        log.info("%s: role is now %s, was %s", link.name, role, link.role)
        self.links.turn(link, role)
        self.metrics.role(link.name, role)
        self.metrics.turned(link.name, role)
        if role == "prefill":
            self._take_from(link, [lane for lane in self._lanes_of(link) if not lane.heard])

    @property
    def under_way(self) -> list[RequestRecord]:
        """Jobs that have not ended, as `lately` records them."""
        return [lane.came for lane in self._lanes.values()]

    def answers_of(self, link: WorkerHandle) -> int:
        """Number of unfinished jobs that decode on a worker."""
        return len(self._lanes_of(link))

    def _turning(self, link: WorkerHandle, turning_s: float) -> None:
        if link.role == "prefill" and turning_s >= STAY_S:
            self._take_from(link, self._lanes_of(link))
        if is_done(link, self.answers_of(link)):
            link.turning = None
            log.info("%s: switch to role %s is complete after %.1f s", link.name, link.role, turning_s)

    def _take_from(self, link: WorkerHandle, lanes: Sequence["_Lane"]) -> None:
        for lane in lanes if self._resume_s else ():
            link.outbox.put(Abort(job=lane.job.id))
            self._requeue(lane, f"the role of {link.name} is now {link.role}", blamed=False)

    def _lanes_of(self, link: WorkerHandle) -> list["_Lane"]:
        return [lane for lane in self._lanes.values() if lane.link is link]

    def look(self) -> None:
        """Call every LOOK_S: requeues the jobs of workers whose heartbeat timed out. If this event loop itself was
        stalled, messages that arrived in that time are still unread, so no worker counts as silent."""
        now = self._clock()
        before, self._looked_at = self._looked_at, now
        if before is None:
            return
        if now - before > 2 * LOOK_S:
            for link in self.links:
                link.forgive(now - before)
            return
        for link in self.links:
            if link.beat_at is not None and link.ready is not None and link.busy:
                link.knock(now, self.replica)
        self._tell_gone(*self.links.newly_gone())
        for link in self.links:
            if (turning_s := self.links.turning_s(link)) is not None and link.ready is not None:
                self._turning(link, turning_s)
        for link in self.links.fallen_silent():
            for lane in self._lanes_of(link):
                link.outbox.put(Abort(job=lane.job.id))  # in case the worker continues
                self._requeue(lane, f"{link.name} has sent no heartbeat for {self.links.silent_s(link):.1f} s")

    def _tell_gone(self, *gone: WorkerHandle) -> None:
        for link in gone:
            for other in self.links:
                if other.ready is not None and other is not link and other.ready.format:
                    other.outbox.put(WorkerDown(worker=link.name, epoch=link.epoch))

    def lose_all(self, reason: str) -> None:
        """Fail every response with WorkerLost, and every later `begin`: no other worker will start."""
        self._resume_s = 0.0
        for link in self.links:
            self.lose(link, reason)
        for lane in list(self._stranded):
            self._fail(lane)

    def _requeue(self, lane: "_Lane", reason: str, *, blamed: bool = True) -> None:
        """Requeue a job whose worker cannot continue it. blamed: the job may be the cause."""
        if lane.job.id not in self._lanes:
            return  # its response has ended in the meantime
        self._leave(lane)
        lane.moved_because = reason
        lane.blamed += blamed
        if lane.blamed > MOST_MOVES:
            self._fail(lane)
            return
        self._rename(lane)
        if self._resume_s:
            log.info("job %s is requeued after %d tokens: %s", lane.job.id, lane.tokens, reason)
            self.metrics.moved()
        self._wait_for_worker(lane)

    def pause(self, lane: "_Lane") -> bool:
        """Pause a job whose client does not read: abort it on its worker, which frees its slot and pages until
        `go_on`. Returns False if the job has ended, has no token yet, or could not be resumed."""
        if lane.link is None or not lane.tokens or not self._resume_s or lane.job.id not in self._lanes:
            return False
        lane.link.outbox.put(Abort(job=lane.job.id))
        self._leave(lane)
        lane.moved_because = "its client had stopped reading, and reads again"
        self._rename(lane)
        log.info("job %s is paused after %d tokens: its client does not read", lane.job.id, lane.tokens)
        return True

    def go_on(self, lane: "_Lane") -> None:
        """Requeue a paused job with the tokens generated so far, unless its response has ended."""
        if lane.job.id in self._lanes:
            self._wait_for_worker(lane)

    def _rename(self, lane: "_Lane") -> None:
        """Give a job that leaves its worker a new id: later messages of that worker refer to a job that no longer
        exists."""
        lane.moves += 1
        del self._lanes[lane.job.id]
        lane.job = msgspec.structs.replace(lane.job, id=JobId(f"{lane.id}.{lane.moves}"))
        self._lanes[lane.job.id] = lane

    def _wait_for_worker(self, lane: "_Lane") -> None:
        """Let a job without a worker wait for one, if jobs may be resumed; else fail it."""
        if not self._resume_s:
            self._fail(lane)
            return
        wait_s = self.links.start_s + self._resume_s
        self._stranded[lane] = asyncio.get_running_loop().call_later(wait_s, self._fail, lane)
        self._resend(lane)

    def _resend(self, lane: "_Lane") -> None:
        """Send a waiting job to a worker, with the tokens generated so far, if a worker can take it."""
        job = msgspec.structs.replace(lane.job, answer=tuple(lane.answer), scored=lane.scored)
        if (route := self._route(lane, job)) is None:
            return
        self._unstrand(lane)
        try:
            self._send(lane, route, job)
        except MessageTooLarge:  # because of the tokens generated so far
            self._fail(lane)

    def _route(self, lane: "_Lane", job: Job) -> Route | None:
        of = lane.generation.caller.sla
        return self.links.route(job, of, self._promised(of))

    def _promised(self, of: str) -> Targets:
        return self._targets.get(of) or self._targets[""]

    def _send(self, lane: "_Lane", route: Route, job: Job) -> None:
        """Raises MessageTooLarge."""
        lane.route, lane.link, lane.sent_at, lane.waits = route, route.link, clock.perf_counter(), False
        if not lane.heard:
            lane.came.cached = route.expected.cached_tokens
            if (ttft_s := self._promised(lane.generation.caller.sla).ttft_s) < math.inf:
                left_s = ttft_s - (lane.sent_at - lane.began)  # the job may have waited for a worker
                job = msgspec.structs.replace(job, ttft_ms=1e3 * left_s)
        self.links.sent(route, job)
        lane.story.goes(route, lane.moved_because)
        if route.prefill is None:
            route.link.outbox.put(job)
            return
        route.prefill.outbox.put(Prefill(job=job, to=route.link.as_other))
        route.link.outbox.put(msgspec.structs.replace(job, pages_from=route.prefill.as_other))

    def _leave(self, lane: "_Lane") -> None:
        if lane.link is not None:
            lane.link.jobs -= 1
            lane.link = None
        self._computed(lane)

    def _computed(self, lane: "_Lane") -> None:
        """The prompt of a job does not have to be computed any more."""
        if lane.route is not None:
            self.links.computed(lane.route, lane.job.id)
            lane.route = None

    def _unstrand(self, lane: "_Lane") -> None:
        if (timer := self._stranded.pop(lane, None)) is not None:
            timer.cancel()

    def _fail(self, lane: "_Lane") -> None:
        """Fail a job that no worker can continue, with all other jobs of its request."""
        self._unstrand(lane)
        lane.generation.fail(WorkerLost("the worker that ran this request went down"))
        for other in lane.generation.lanes:
            self.forget(other, "error")

    def close(self) -> None:
        """Fail every response with WorkerLost, and stop the threads once their current work is done; idempotent."""
        self.lose_all("the server is shutting down")
        self._grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def at_end(self, close: Callable[[], object]) -> None:
        """Have `ended` call `close` in a thread, since it may wait for a disk; a coroutine that it returns is
        awaited."""
        self._at_end.append(close)

    async def ended(self) -> None:
        """Call after `close`, once no request is served any more: waits for the grammar processes to exit, then calls
        the functions given to `at_end`."""
        await self._grammars.ended()
        while self._at_end:
            left = await asyncio.to_thread(self._at_end.pop())
            if asyncio.iscoroutine(left):
                await left

    # -- from a request

    async def begin(self, ask: Ask) -> "Generation":
        """Encode, check and send a request: one job per choice. Returns the response to iterate over.

        Raises RequestError (ContextTooLong, MessageTooLarge, DeadlineExceeded; LimitReached if the caller's quota is
        used up), Overloaded or WorkerLost; then no job is left running. If the caller is cancelled while waiting here,
        nothing is left running either: no further text is encoded, and jobs that were sent are aborted.
        """
        caller, timeout_s = CALLER.get(), self._timeout_s(ask)
        if timeout_s is None:
            return await self._begin(ask, caller)
        passed = max(0.0, clock.monotonic() - caller.began) if caller.began else 0.0
        until = asyncio.get_running_loop().time() + timeout_s - passed
        try:
            async with asyncio.timeout_at(until):
                generation = await self._begin(ask, caller)
        except TimeoutError:
            raise DeadlineExceeded(_too_late(timeout_s)) from None
        generation.end_at(until, DeadlineExceeded(_too_late(timeout_s)))
        return generation

    async def _begin(self, ask: Ask, caller: Caller) -> "Generation":
        began = clock.perf_counter()
        engine = self._engine()
        salt = _salt(caller, ask.salt)
        self._admit(ask)
        if caller.account is not None:
            caller.account.check_tokens(0)  # before its text is encoded
        self._check_ids(ask.sampling)
        jobs: list[Job] = []
        tokens_before = 0  # prompt tokens of this request so far, each prompt counted n times
        try:
            for place, prompt in enumerate(ask.prompts):
                param = ask.param if len(ask.prompts) == 1 else f"{ask.param}[{place}]"
                limit = engine.max_model_len
                try:
                    tokens = await self.encode(prompt, param, limit, ask.salt)
                except ContextTooLong:
                    raise PromptTooLong(param, limit + 1, limit, at_least=True) from None
                if not tokens:
                    raise RequestError(f"{param} is empty", param)
                sampling = self._settle(ask, prompt, len(tokens), limit, param)
                if ask.sampling.max_tokens:
                    at = clock.perf_counter()
                    grammar = await self._grammar(ask, prompt, tokens, sampling)
                    sampling = msgspec.structs.replace(sampling, grammar=grammar)
                    if caller.passage is not None and sampling.grammar is not None:
                        caller.passage.did("grammar", at)
                # A worker that cannot decode a job dies, and so does the next one that the job is requeued to.
                sampling = _SAMPLING.decode(msgspec.msgpack.encode(sampling))
                self._admit_tokens(ask, tokens_before, len(tokens))
                tokens_before += ask.n * len(tokens)
                self._waiting_tokens += ask.n * len(tokens)
                job = await self.in_thread(len(tokens), _job, tokens, sampling, engine.fingerprint, salt)
                jobs += _copies(job, ask, caller, self.replica)
            # During encoding, the worker may have gone down and other requests may have arrived.
            if self._engine().fingerprint != engine.fingerprint:
                raise WorkerLost("the model was replaced while the request was encoded")
            self._admit(ask)
            if caller.account is not None:
                caller.account.check_tokens(tokens_before)
                caller.account.charge(tokens_before)
            generation = Generation(self, ask, jobs, began, caller)
        except BaseException:
            self._waiting_tokens -= tokens_before
            raise
        stories = [lane.story for lane in generation.lanes]
        self.stories.begin(caller.request_id, stories)
        if caller.passage is not None:
            caller.passage.jobs, caller.passage.sampling = stories, generation.lanes[0].job.sampling
        self.metrics.asked(ask.n, generation.lanes[0].job.sampling.max_tokens)
        if not self._waiting:
            self._served.begins()
        for lane in generation.lanes:
            self._lanes[lane.job.id] = lane
            self._waiting += 1
        try:
            for lane in generation.lanes:
                if lane.job.id in self._lanes:  # else: it has ended in the meantime
                    if (route := self._route(lane, lane.job)) is None:
                        self._wait_for_worker(lane)
                    else:
                        self._send(lane, route, lane.job)
                    self.metrics.prompt_tokens.inc(len(lane.job.tokens))
                if len(lane.job.tokens) > INLINE_CHARS:
                    await asyncio.sleep(0)  # serialising a job of 262,144 tokens takes milliseconds
        except BaseException:  # if one job cannot be sent, all jobs of the request end
            generation.close()
            raise
        return generation

    async def _grammar(self, ask: Ask, prompt: Prompt, tokens: Sequence[int], sampling: Sampling) -> Grammar | None:
        """Grammar of the response to a prompt. tokens: of the prompt. sampling: with the final max_tokens."""
        conversation = prompt if isinstance(prompt, Conversation) else None
        thinks = conversation is not None and self._style.thinks(conversation)
        grammar = None
        if ask.constraint is not None or (conversation is not None and conversation.tools):
            account = CALLER.get().account
            tenant = "" if account is None else account.name
            grammar = await self._grammars.grammar(
                ask.constraint, ask.calls, conversation, thinks=thinks, tenant=tenant
            )
        if not thinks:
            return grammar
        must = ask.constraint is not None or ask.calls.mode == "required"
        of_prompt = tokens if conversation is not None and conversation.continues else ()
        thinking = bound_thinking(ask.thinking_budget, sampling.max_tokens if must else None, of_prompt, self.tokenizer)
        return grammar if thinking is None else msgspec.structs.replace(grammar or Grammar(text=""), thinking=thinking)

    async def encode(self, prompt: Prompt, param: str, most: int, salt: str = "") -> tuple[int, ...]:
        """Token ids of a prompt. Encoding stops soon after `most` tokens, so there may be slightly more.

        param: the request field of the prompt, for errors. salt: of the request. Cached encodings and the recorded
        arguments of tool calls are shared only between requests of the same caller and salt. Raises RequestError for
        ids outside the vocabulary, ContextTooLong for a list of more than `most` ids and for a text that was not
        encoded to its end.
        """
        caller = CALLER.get()
        salt = _salt(caller, salt)
        chars = most * self._longest_token
        match prompt:
            case str():
                size = len(prompt)
                if size > chars:
                    raise ContextTooLong(f"{param} is {size} characters; this model reads at most {chars}", param)
            case Conversation():
                if prompt.tools and not self._style.declares_tools:
                    raise RequestError("this model's chat template declares no tools; leave `tools` out", "tools")
                size = _size(prompt)
            case _:
                if len(prompt) > most:
                    raise ContextTooLong(f"{param} is {len(prompt)} tokens; at most {most} are read", param)
                await self.in_thread(len(prompt), self._check_range, prompt, param)
                return prompt
        left = threading.Event()
        try:
            return await self.in_thread(size, self._encode, prompt, most, chars, left, salt, caller.passage)
        except ContextTooLong as error:
            raise ContextTooLong(f"{param} is {error}; at most {most} tokens are read", param) from None
        except asyncio.CancelledError:
            left.set()
            raise

    async def in_thread(self, chars: int, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """The result of `work`, which runs in a thread if it costs more than encoding INLINE_CHARS characters, else
        inline.

        chars: its cost, as the number of characters that take as long to encode. Raises what `work` raises.
        """
        if chars <= INLINE_CHARS:
            return work(*arguments, **named)
        call = functools.partial(work, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def decoder(self, ask: Ask, prompt: Prompt, job: Job) -> Decoder:
        """The decoder for a job's deltas: parses Kimi's chat format for a conversation, else passes plain text
        through."""
        chat = isinstance(prompt, Conversation)
        return Decoder(
            self.tokenizer,
            thinking=chat and self._style.thinks(prompt),
            stop=ask.stop,
            stop_ids=job.sampling.stop_ids,
            prompt_tokens=len(job.tokens),
            parse=chat,
            include_stop_str=ask.include_stop,
            skip_special_tokens=ask.skip_special_tokens,
            most_calls=0 if chat and not prompt.tools else None if ask.calls.parallel else 1,
            min_tokens=job.sampling.min_tokens,
        )

    def said(self, salt: str, name: str, arguments: str) -> None:
        """Record a complete tool call of the model."""
        if len(arguments) <= INLINE_CHARS:
            self._said.note(salt, name, arguments)
        else:
            self._threads.submit(self._said.note, salt, name, arguments)

    def forget(self, lane: "_Lane", finish: Finish) -> None:
        """Stop a job that has not ended: no more deltas are delivered, and the worker is sent an Abort. Idempotent.

        finish: the finish reason for metrics: "aborted" if the client disconnected, else the one that the client sees.
        """
        if self._lanes.pop(lane.job.id, None) is not None:
            if not lane.heard:
                self._waits_no_more(lane)
            self._ended(lane, clock.perf_counter(), finish)
            self._unstrand(lane)
            if lane.link is not None:
                lane.link.outbox.put(Abort(job=lane.job.id))
                self._leave(lane)

    def _engine(self) -> Ready:
        if (ready := self.links.ready) is None:
            if self._resume_s and self.links.last is not None:
                return self.links.last  # the job waits for the worker's restart, as requeued jobs do
            if self.links.lost is not None:
                raise WorkerLost("the worker went down")
            raise Overloaded("the model is still loading", reason="loading")
        held_up = self._looked_at is not None and self._clock() - self._looked_at > 2 * LOOK_S  # this loop stalled
        if not held_up and (silence := self.links.silence) is not None:
            raise Overloaded(silence, reason="silent")
        return ready

    def _admit(self, ask: Ask) -> None:
        waiting = self._waiting + self.others.waiting
        if waiting + ask.choices > self._limits.waiting:
            raise Overloaded(f"{waiting} jobs wait already; try again later", self.retry_s, "queue_jobs")

    def _admit_tokens(self, ask: Ask, before: int, tokens: int) -> None:
        """Check the limits on prompt tokens times n, and on their logprobs. Raises RequestError or Overloaded.

        tokens: of this prompt. before: tokens of this request's earlier prompts, which are part of the waiting tokens.
        """
        asked, most = before + ask.n * tokens, self._limits.tokens
        if asked > most and asked > tokens:  # one prompt is limited by the context length
            raise RequestError(
                f"the prompts, each counted n times, are {asked} tokens or more; at most {most} in one request",
                ask.param,
            )
        waiting = self._waiting_tokens + self.others.waiting_tokens
        if waiting > before and waiting + ask.n * tokens > self._limits.queue_tokens:
            raise Overloaded(f"{waiting} prompt tokens wait already; try again later", self.retry_s, "queue_tokens")
        scored = ask.sampling.prompt_logprobs
        if scored is not None and asked * (scored + 1) > (most := self._limits.prompt_logprobs):
            raise RequestError(
                f"{scored + 1} log probabilities for each of {asked} prompt tokens, each prompt counted n times: "
                f"at most {most} in one request",
                "prompt_logprobs",
            )

    def _timeout_s(self, ask: Ask) -> float | None:
        """Seconds from the request's arrival to its last token: the least of the field, the header and the deployment's
        limit."""
        said = [seconds for seconds in (ask.timeout_s, CALLER.get().timeout_s) if seconds is not None]
        of_all = self._limits.timeout_s
        return min([*said, *([] if of_all is None else [of_all])], default=None)

    def _waits_no_more(self, lane: "_Lane") -> None:
        self._waiting -= 1
        self._waiting_tokens -= len(lane.job.tokens)

    def _encode(
        self,
        prompt: Conversation | str,
        most: int,
        chars: int,
        left: threading.Event,
        salt: str,
        passage: RequestSpan | None,
    ) -> tuple[int, ...]:
        def check() -> None:
            if left.is_set():
                raise asyncio.CancelledError  # no request waits for the result any more

        began = clock.perf_counter()
        if isinstance(prompt, str):  # a raw prompt was rendered by the client
            tokens = tuple(self.tokenizer.encode_with_specials(prompt, most, check))
        else:
            pieces = render(self._said.restored(salt, prompt), self._style, chars)
            if passage is not None:
                passage.did("template", began)
                began = clock.perf_counter()
            tokens = tuple(self.tokenizer.encode_pieces(pieces, most, check, self._known, salt))
        if passage is not None:
            passage.did("tokenise", began)
        return tokens

    def _check_ids(self, sampling: Sampling) -> None:
        self._check_range(sampling.stop_ids, "stop_token_ids")
        self._check_range([token for token, _ in sampling.logit_bias], "logit_bias")

    def _check_range(self, tokens: Sequence[int], param: str) -> None:
        if tokens and max(tokens) >= self.tokenizer.vocab_size:
            raise RequestError(f"token ids range from 0 to {self.tokenizer.vocab_size - 1}; got {max(tokens)}", param)

    def _settle(self, ask: Ask, prompt: Prompt, prompt_tokens: int, limit: int, param: str) -> Sampling:
        """The sampling parameters of a prompt's jobs, without the seed. Scoring needs one step, so max_tokens becomes
        1, or 0 if the prompt fills the context."""
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
        own = () if ask.ignore_eos else self.tokenizer.stop_ids
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
            marks = self._call_marks
            biases = *(one for one in sampling.logit_bias if one[0] not in marks), *((mark, NEVER) for mark in marks)
            if len(biases) <= MOST_BIASES:
                sampling = msgspec.structs.replace(sampling, logit_bias=biases)
        return sampling


def _size(conversation: Conversation) -> int:
    """Approximate number of characters to render; counting stops above INLINE_CHARS."""
    size = 0
    values: list[Any] = [tool.parameters for tool in conversation.tools]
    values += [tool.description for tool in conversation.tools]
    for message in conversation.messages:
        size += len(message.content) + len(message.reasoning)
        values += message.tool_calls
        if size + len(values) > INLINE_CHARS:
            break
    while values and size <= INLINE_CHARS:
        match values.pop():
            case str() as text:
                size += len(text)
            case ToolCall(id=id, arguments=text):
                size += len(id) + len(text)
            case dict() as fields:  # pyright: ignore[reportUnknownVariableType]
                values += cast("dict[str, Any]", fields)
                values += cast("dict[str, Any]", fields).values()
            case list() as items:  # pyright: ignore[reportUnknownVariableType]
                values += cast("list[Any]", items)
            case _:
                pass
        size += 1
    return size


def _too_late(timeout_s: float) -> str:
    return f"the deadline has passed: the answer was not complete {timeout_s:g} s after the request arrived"


def _salt(caller: Caller, salt: str) -> str:
    """The cache salt, which separates the cached pages of one key name from others'; a name contains no newline."""
    return salt if caller.account is None else f"{caller.account.name}\n{salt}"


def _job(tokens: tuple[int, ...], sampling: Sampling, fingerprint: str, salt: str) -> Job:
    return make_job(JobId(uuid.uuid4().hex), tokens, sampling, fingerprint, salt)


def _copies(job: Job, ask: Ask, caller: Caller, replica: str) -> list[Job]:
    # The job's id begins with the request's id, so that worker messages contain it.
    id = f"{caller.request_id}.{job.id}" if caller.request_id else job.id
    tenant = "" if caller.account is None else caller.account.name
    seed = secrets.randbits(63) if ask.seed is None else ask.seed & SEED_MASK
    return [
        msgspec.structs.replace(
            job,
            id=JobId(f"{id}-{k}"),
            tenant=tenant,
            replica=replica,
            sampling=msgspec.structs.replace(job.sampling, seed=derived_seed(seed, k), seeded=ask.seed is not None),
        )
        for k in range(ask.n)
    ]


def derived_seed(seed: int, k: int) -> int:
    """The seed of a prompt's choice k: the request's own for choice 0, so that n does not change it; else a hash."""
    if k == 0:
        return seed
    digest = blake2b(b"%d,%d" % (seed, k), digest_size=8).digest()
    return int.from_bytes(digest, "little") & SEED_MASK


def _failure(delta: Delta) -> Exception:
    reason = delta.error or "the engine failed this job"
    match delta.fault:
        case "refused":
            return RequestError(reason)
        case "overloaded":
            return Overloaded(reason)
        case "lost":
            return WorkerLost("the worker that ran this request went down")
        case "failed" | None:
            return JobFailed(reason)


class _Lane:
    """State of one job: its worker, its decoder, and the times of its tokens."""

    __slots__ = (
        "answer",
        "began",
        "blamed",
        "cached_tokens",
        "calls",
        "came",
        "choice",
        "decoder",
        "ended",
        "first_at",
        "generation",
        "heard",
        "id",
        "job",
        "last_at",
        "link",
        "moved_because",
        "moves",
        "opened",
        "queued_s",
        "read",
        "route",
        "scored",
        "sent_at",
        "story",
        "untold",
        "waits",
    )

    def __init__(
        self, generation: "Generation", choice: int, job: Job, decoder: Decoder, began: float, came: RequestRecord
    ) -> None:
        self.generation = generation
        self.choice = choice
        self.id = job.id  # id of the first send
        self.job = job
        self.decoder = decoder
        self.began = began
        self.sent_at = clock.perf_counter()  # time of sending to the worker, without serialising the jobs
        self.queued_s = 0.0  # seconds queued at the worker
        self.first_at = began
        self.last_at = began
        self.link: WorkerHandle | None = None  # None: no worker at the moment
        self.route: Route | None = None  # the job's route while its prompt is being computed
        self.moves = 0  # requeues so far
        self.blamed = 0  # requeues that the job may have caused
        self.moved_because = ""
        self.story = RequestTrace(choice, len(job.tokens), began)
        self.came = came
        self.answer: list[int] = []  # output tokens received so far
        self.scored = 0  # prompt tokens whose logprobs were received
        self.cached_tokens = 0  # prompt tokens cached at the first worker
        self.read = 0  # output tokens decoded
        self.heard = False  # a delta was received
        self.waits = False  # preempted, and no token since
        self.opened = False  # a first batch was returned
        self.ended = False  # its End was returned
        self.calls: list[tuple[str, list[str]]] = []  # tool calls of the output: names, and pieces of their arguments
        self.untold: list[int] = []  # token ids for the next batch, if requested

    @property
    def tokens(self) -> int:
        """Number of output tokens received."""
        return len(self.answer)


class Generation:
    """The streamed response to one Ask: iterate for batches; leaving the `with` block aborts jobs that still run.

        with await gateway.begin(ask) as generation:
            async for batches in generation: ...

    Iterating raises WorkerLost, Overloaded, RequestError or JobFailed if the response cannot be completed. `prompts`
    holds the token ids of each prompt, `n` is the number of choices for each. `direct` is the connection that `pour`
    writes to, if there is one. The caller that writes the response calls `wrote` after each write, and `break_silence`
    first if the iteration must also return while no tokens arrive.
    """

    def __init__(self, gateway: Gateway, ask: Ask, jobs: Sequence[Job], began: float, caller: Caller) -> None:
        self.n = ask.n
        self.caller = caller
        self._ending: asyncio.TimerHandle | None = None
        self._silence_due: asyncio.TimerHandle | None = None
        self._silence = 0  # runs of `_silence_due` since the last write
        self.direct: ImmediateWriter | None = None
        self._gateway = gateway
        self._pours = gateway.pours
        self._scores = ask.sampling.max_tokens == 0
        self._salt = _salt(caller, ask.salt)
        self._reasoning, self._token_ids, self._proposers = ask.reasoning, ask.token_ids, ask.proposers
        self._arrived: list[tuple[_Lane, Delta]] = []
        self._ahead = 0  # tokens received and not yet taken
        self._paused: list[_Lane] = []
        self._wake: asyncio.Future[None] | None = None
        self._pour: Callable[[list[Batch]], bytes] | None = None
        self._left = b""  # rendered by `pour`'s `write`, but not sent
        self._failure: Exception | None = None
        self._open = self._unended = len(jobs)
        self._longest = 0  # output tokens of the longest job
        self.lanes = [
            _Lane(
                *(self, choice, job, gateway.decoder(ask, ask.prompts[choice // ask.n], job), began),
                gateway.lately.came(caller.sla, len(job.tokens)),
            )
            for choice, job in enumerate(jobs)
        ]
        self.prompts = [lane.job.tokens for lane in self.lanes[:: ask.n]]

    @property
    def workers(self) -> list[str]:
        """Names of the workers that ran its jobs last, without duplicates; empty if there is only one worker."""
        names = dict.fromkeys(name for lane in self.lanes if (name := lane.story.worker) is not None)
        return list(names) if self._gateway.links.several else []

    def push(self, lane: _Lane, delta: Delta) -> None:
        """Add the next delta of one of its jobs, and wake the task that iterates."""
        if self._pour is None or delta.finish is not None:
            self._notify()
        elif not self._arrived:
            self._pours.add(self)
        self._arrived += [(lane, part) for part in delta.by_proposer()] if self._proposers else [(lane, delta)]
        self._ahead += len(delta.tokens)
        if self._ahead > AHEAD_TOKENS * len(self.lanes) and self.direct is not None and self.direct.lags:
            self._paused += [each for each in self.lanes if self._gateway.pause(each)]

    def _take(self) -> list[tuple[_Lane, Delta]]:
        """The deltas received since the last call. If there are none, the client has caught up, and paused jobs
        continue."""
        arrived, self._arrived, self._ahead = self._arrived, [], 0
        if not arrived and self._paused:
            paused, self._paused = self._paused, []
            for lane in paused:
                self._gateway.go_on(lane)
        return arrived

    async def pour(self, write: Callable[[list[Batch]], bytes]) -> bytes:
        """Write the result of `write` for each group of batches directly to `direct`, which costs half as much as
        waking a task each time.

        Returns whenever the iterating task has to continue: at once without `direct`, later if the client is slow, and
        at the end of a choice or of the response. The returned bytes were not sent. Raises what `write` raises.
        """
        if self.direct is None or self._arrived or self._open == 0 or self._failure is not None:
            return b""
        self._take()
        self._pour = write
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
            return self._left
        finally:
            self._wake = self._pour = None
            self._left = b""

    def flush(self) -> None:
        """Write everything received in this iteration of the event loop (`pour.Poured`)."""
        if (write := self._pour) is None or (wake := self._wake) is None or wake.done():
            return  # the iterating task takes it
        assert self.direct is not None
        batches: list[Batch] = []
        try:
            for lane, delta in self._take():
                if (batch := self._read(lane, delta)) is not None:
                    batches.append(batch)
            body = write(batches)
        except Exception as error:
            wake.set_exception(error)
            return
        if body and not self.direct.write_part(body):
            self._left = body
            wake.set_result(None)
            return
        if body:
            self._silence = 0
        if self._open == 0:
            wake.set_result(None)

    def job_ended(self, tokens: int) -> int | None:
        """Count the end of one of its jobs, with `tokens` output tokens. Returns the longest job's tokens once all have
        ended."""
        self._unended -= 1
        self._longest = max(self._longest, tokens)
        return None if self._unended else self._longest

    def fail(self, error: Exception) -> None:
        """Fail the response: batches received so far are still returned, then the iteration raises `error`."""
        self._failure = error
        self._notify()

    def end_at(self, when: float, error: Exception) -> None:
        """Fail the response and abort its jobs unless it is complete by `when`, in event loop time."""

        def end() -> None:
            self.close()
            self.fail(error)

        self._ending = asyncio.get_running_loop().call_at(when, end)

    def break_silence(self, seconds: float) -> None:
        """From now on become `silent` after `seconds` without a write, or after two thirds of them at the earliest. The
        iteration then returns what there is at once, which may be an empty list."""
        loop = asyncio.get_running_loop()

        def look(due: float) -> None:
            self._silence += 1
            if self.silent:
                self._notify()
            due += seconds / LOOKS
            self._silence_due = loop.call_at(due, look, due)

        due = loop.time() + seconds / LOOKS
        self._silence_due = loop.call_at(due, look, due)

    @property
    def silent(self) -> bool:
        """Whether something must be written to keep the stream alive, though no visible output has arrived."""
        return self._silence >= LOOKS

    def wrote(self) -> None:
        """Record that the response stream was written to."""
        self._silence = 0

    async def admitted(self, seconds: float) -> bool:
        """Wait up to `seconds` for the first delta. Returns False if the response has already failed."""
        if not self._arrived and self._failure is None and self._open:
            self._wake = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._wake}, timeout=seconds)
            self._wake = None
        ended = any(delta.finish in ("error", "aborted") for _, delta in self._arrived)
        return self._failure is None and not ended

    def close(self) -> None:
        """Abort every job of this response that has not ended; idempotent."""
        for timer in (self._ending, self._silence_due):
            if timer is not None:
                timer.cancel()
        for lane in self.lanes:
            self._gateway.forget(lane, "aborted")

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Batch]:
        while True:
            if arrived := self._take():
                batches = [batch for lane, delta in arrived if (batch := self._read(lane, delta))]
                if batches or self.silent:
                    return batches
            elif self._open == 0:
                raise StopAsyncIteration
            elif self._failure is not None:
                raise self._failure
            elif self.silent:
                return []
            else:
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake
                self._wake = None

    def _note_calls(self, lane: _Lane, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case CallBegin(name=name):
                    lane.calls.append((name, []))
                case CallArguments(index=index, text=text):
                    lane.calls[index][1].append(text)
                case End(finish="stop"):
                    for name, pieces in lane.calls:
                        self._gateway.said(self._salt, name, "".join(pieces))
                case _:
                    pass

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _read(self, lane: _Lane, delta: Delta) -> Batch | None:
        if lane.ended:
            return None  # its stop string was found in an earlier delta
        if delta.finish is None:
            if not delta.tokens:
                lane.decoder.push(delta)  # prompt logprobs, which are returned with the first batch
                return None
        elif delta.finish in ("error", "aborted"):
            raise _failure(delta)
        if self._scores:
            self._gateway.forget(lane, "length")
            delta = msgspec.structs.replace(delta, tokens=(), logprobs=(), finish="length")
        events = lane.decoder.push(delta)
        before = lane.read
        lane.read += len(delta.tokens)
        if lane.decoder.stopped:
            self._gateway.forget(lane, "stop")
        if lane.decoder.calls:
            self._note_calls(lane, events)
        if events and isinstance(end := events[-1], End):
            lane.ended = True
            lane.read = end.completion_tokens
            self._open -= 1
        if not self._reasoning:
            events = [event for event in events if not isinstance(event, Thought)]
        if self._token_ids:
            lane.untold += delta.tokens[: lane.read - before]
        if not events and lane.opened:
            return None  # the tokens so far end inside a character or a tag
        first, lane.opened = not lane.opened, True
        scored = first and lane.job.sampling.prompt_logprobs is not None
        batch = Batch(lane.choice, events, lane.read, first, lane.decoder.prompt_logprobs if scored else None)
        if self._token_ids:
            told, lane.untold = lane.untold, []
            prompt_ids = lane.job.tokens if first else None
            batch = msgspec.structs.replace(batch, token_ids=told, prompt_ids=prompt_ids)
        if self._proposers:
            elapsed_s = (lane.first_at if first else lane.last_at) - lane.began
            batch = msgspec.structs.replace(batch, proposer=delta.proposer, elapsed_ms=round(1000 * elapsed_s, 1))
        return batch
