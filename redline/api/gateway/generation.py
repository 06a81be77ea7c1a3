"""The response to one request: the deltas of its jobs become events.

A Generation collects the deltas of its own jobs and decodes them in the task that writes the response, so that all
deltas that arrived since the last write go out in one write. Invariant: every delta is decoded once, in order of
arrival, and nothing follows the End of a choice.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import msgspec

from redline.api.ask import Ask, Prompt
from redline.api.auth.quota import Caller
from redline.api.gateway.active_requests import JobState
from redline.api.gateway.dispatcher import Dispatcher
from redline.api.gateway.encoder import Encoder, cache_salt
from redline.api.http.stream_flusher import ImmediateWriter, StreamFlusher
from redline.api.telemetry.request_traces import RequestTrace
from redline.chat.conversation import Conversation
from redline.chat.decoder import Decoder
from redline.chat.events import CallArguments, CallBegin, End, Event, Thought
from redline.errors import Overloaded, RedlineError, RequestError, WorkerLost
from redline.messages.delta import Delta
from redline.messages.job import Job
from redline.messages.step import Proposer, TokenLogprobs
from redline.router.request_history import RequestHistory

SILENCE_CHECKS = 3  # checks for written data per keep-alive interval of a stream
AHEAD_TOKENS = 64  # tokens of a job buffered for a slow client before the job is paused and its pages are released


class JobFailed(RedlineError):
    """The engine failed this one job; a client sees status 500 and no reason."""


class ChoiceDelta(msgspec.Struct, frozen=True, gc=False):
    """The output of one delta for one choice."""

    choice: int  # index of the choice
    events: Sequence[Event]
    completion_tokens: int  # tokens of the choice so far
    first: bool = False  # the first one of its choice
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # with the first one, if requested
    token_ids: Sequence[int] | None = None  # output tokens since the last one, if requested
    prompt_ids: Sequence[int] | None = None  # with the first one, if requested
    proposer: Proposer | None = None  # what proposed these tokens, if requested
    elapsed_ms: float = 0.0  # from the request's start until the engine's tokens arrived, with `proposer`


@dataclass(eq=False, slots=True)
class ChoiceState:
    """What is decoded of one choice."""

    decoder: Decoder
    decoded: int = 0  # output tokens
    opened: bool = False  # a first ChoiceDelta was returned
    ended: bool = False  # its End was returned
    # Tool calls of the output: names, and pieces of their arguments.
    calls: list[tuple[str, list[str]]] = field(default_factory=list[tuple[str, list[str]]])
    unsent_ids: list[int] = field(default_factory=list[int])  # token ids for the next ChoiceDelta, if requested


class Generation:
    """The streamed response to one Ask: iterate for deltas; leaving the `with` block aborts jobs that still run.

        with await gateway.begin(ask) as generation:
            async for deltas in generation: ...

    Iterating raises WorkerLost, Overloaded, RequestError or JobFailed if the response cannot be completed. `prompts`
    holds the token ids of each prompt, `n` is the number of choices for each. `direct` is the connection that `pour`
    writes to, if there is one. The caller that writes the response calls `wrote` after each write, and `break_silence`
    first if the iteration must also return while no tokens arrive.
    """

    def __init__(
        self,
        ask: Ask,
        messages: Sequence[Job],
        caller: Caller,
        arrived_at: float,
        dispatcher: Dispatcher,
        encoder: Encoder,
        flusher: StreamFlusher,
        history: RequestHistory,
    ) -> None:
        """messages: one per choice. arrived_at: time of the request's arrival, by time.perf_counter."""
        self.n = ask.n
        self.caller = caller
        self.direct: ImmediateWriter | None = None
        self._dispatcher = dispatcher
        self._encoder = encoder
        self._flusher = flusher
        self._salt = cache_salt(caller, ask.salt)
        self._scores = ask.sampling.max_tokens == 0
        self._reasoning, self._token_ids, self._proposers = ask.reasoning, ask.token_ids, ask.proposers
        self.at_close: Callable[[], object] | None = None  # called once
        self._deadline: asyncio.TimerHandle | None = None
        self._silence_check: asyncio.TimerHandle | None = None
        self._silence = 0  # runs of `_silence_check` since the last write
        self._arrived: list[tuple[JobState, Delta]] = []
        self._ahead = 0  # tokens received and not yet taken
        self._paused: list[JobState] = []
        self._wake: asyncio.Future[None] | None = None
        self._pour: Callable[[list[ChoiceDelta]], bytes] | None = None
        self._left = b""  # rendered by `pour`'s `write`, but not sent
        self._failure: Exception | None = None
        self._open = self._unended = len(messages)
        self._longest = 0  # output tokens of the longest job
        self.jobs: list[JobState] = []
        self._choices: list[ChoiceState] = []
        for choice, job in enumerate(messages):
            record, trace = history.add(caller.sla, len(job.tokens)), RequestTrace(choice, len(job.tokens), arrived_at)
            self.jobs.append(JobState(self, choice, job, arrived_at, record, trace))
            self._choices.append(ChoiceState(_decoder(encoder, ask, ask.prompts[choice // ask.n], job)))
        self.prompts = [job.message.tokens for job in self.jobs[:: ask.n]]

    @property
    def workers(self) -> list[str]:
        """Names of the workers that ran its jobs last, without duplicates; empty if there is only one worker."""
        names = dict.fromkeys(name for job in self.jobs if (name := job.trace.worker) is not None)
        return list(names) if self._dispatcher.workers.several else []

    @property
    def completion_tokens(self) -> int:
        """Number of output tokens decoded so far, over all choices."""
        return sum(choice.decoded for choice in self._choices)

    # -- from the workers (`DeltaSink`)

    def push(self, job: JobState, delta: Delta) -> None:
        """Add the next delta of one of its jobs, and wake the task that iterates."""
        if self._pour is None or delta.finish is not None:
            self._notify()
        elif not self._arrived:
            self._flusher.add(self)
        self._arrived += [(job, part) for part in delta.by_proposer()] if self._proposers else [(job, delta)]
        self._ahead += len(delta.tokens)
        if self._ahead > AHEAD_TOKENS * len(self.jobs) and self.direct is not None and self.direct.lags:
            self._paused += [each for each in self.jobs if self._dispatcher.pause(each)]

    def job_ended(self, tokens: int) -> int | None:
        """Count the end of one of its jobs, with `tokens` output tokens. Returns the longest job's tokens once all have
        ended."""
        self._unended -= 1
        self._longest = max(self._longest, tokens)
        return None if self._unended else self._longest

    def fail(self, error: Exception) -> None:
        """Fail the response: deltas received so far are still returned, then the iteration raises `error`."""
        self._failure = error
        self._notify()

    # -- to the client

    async def pour(self, write: Callable[[list[ChoiceDelta]], bytes]) -> bytes:
        """Write the result of `write` for each group of deltas directly to `direct`, which costs half as much as
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
        """Write everything received in this iteration of the event loop (`stream_flusher.Flushable`)."""
        if (write := self._pour) is None or (wake := self._wake) is None or wake.done():
            return  # the iterating task takes it
        assert self.direct is not None
        try:
            body = write(self._decode_arrived())
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

    def end_at(self, when: float, error: Exception) -> None:
        """Fail the response and abort its jobs unless it is complete by `when`, in event loop time."""

        def end() -> None:
            self.close()
            self.fail(error)

        self._deadline = asyncio.get_running_loop().call_at(when, end)

    def break_silence(self, seconds: float) -> None:
        """From now on become `silent` after `seconds` without a write, or after two thirds of them at the earliest. The
        iteration then returns what there is at once, which may be an empty list."""
        loop = asyncio.get_running_loop()

        def check(due: float) -> None:
            self._silence += 1
            if self.silent:
                self._notify()
            due += seconds / SILENCE_CHECKS
            self._silence_check = loop.call_at(due, check, due)

        due = loop.time() + seconds / SILENCE_CHECKS
        self._silence_check = loop.call_at(due, check, due)

    @property
    def silent(self) -> bool:
        """Whether something must be written to keep the stream alive, though no visible output has arrived."""
        return self._silence >= SILENCE_CHECKS

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
        for timer in (self._deadline, self._silence_check):
            if timer is not None:
                timer.cancel()
        for job in self.jobs:
            self._dispatcher.abort(job, "aborted")
        if self.at_close is not None:
            self.at_close()
            self.at_close = None

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        while True:
            if self._arrived:
                deltas = self._decode_arrived()
                if deltas or self.silent:
                    return deltas
                continue
            self._take()
            if self._open == 0:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            if self.silent:
                return []
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
            self._wake = None

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _take(self) -> list[tuple[JobState, Delta]]:
        """The deltas received since the last call. If there are none, the client has caught up, and paused jobs
        continue."""
        arrived, self._arrived, self._ahead = self._arrived, [], 0
        if not arrived and self._paused:
            paused, self._paused = self._paused, []
            for job in paused:
                self._dispatcher.resume(job)
        return arrived

    def _decode_arrived(self) -> list[ChoiceDelta]:
        return [found for job, delta in self._take() if (found := self._decode(job, delta)) is not None]

    def _decode(self, job: JobState, delta: Delta) -> ChoiceDelta | None:
        choice = self._choices[job.choice]
        if choice.ended:
            return None  # its stop string was found in an earlier delta
        if delta.finish is None:
            if not delta.tokens:
                choice.decoder.push(delta)  # prompt logprobs, which are returned with the first ChoiceDelta
                return None
        elif delta.finish in ("error", "aborted"):
            raise _failure(delta)
        if self._scores:
            self._dispatcher.abort(job, "length")
            delta = msgspec.structs.replace(delta, tokens=(), logprobs=(), finish="length")
        events = choice.decoder.push(delta)
        before = choice.decoded
        choice.decoded += len(delta.tokens)
        if choice.decoder.stopped:
            self._dispatcher.abort(job, "stop")
        if choice.decoder.calls:
            self._record_calls(choice, events)
        if events and isinstance(end := events[-1], End):
            choice.ended = True
            choice.decoded = end.completion_tokens
            self._open -= 1
        if not self._reasoning:
            events = [event for event in events if not isinstance(event, Thought)]
        if self._token_ids:
            choice.unsent_ids += delta.tokens[: choice.decoded - before]
        if not events and choice.opened:
            return None  # the tokens so far end inside a character or a tag
        first, choice.opened = not choice.opened, True
        scored = first and job.message.sampling.prompt_logprobs is not None
        prompt_logprobs = choice.decoder.prompt_logprobs if scored else None
        found = ChoiceDelta(job.choice, events, choice.decoded, first, prompt_logprobs)
        if self._token_ids:
            ids, choice.unsent_ids = choice.unsent_ids, []
            found = msgspec.structs.replace(found, token_ids=ids, prompt_ids=job.message.tokens if first else None)
        if self._proposers:
            elapsed_s = (job.first_token_at if first else job.last_token_at) - job.arrived_at
            found = msgspec.structs.replace(found, proposer=delta.proposer, elapsed_ms=round(1000 * elapsed_s, 1))
        return found

    def _record_calls(self, choice: ChoiceState, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case CallBegin(name=name):
                    choice.calls.append((name, []))
                case CallArguments(index=index, text=text):
                    choice.calls[index][1].append(text)
                case End(finish="stop"):
                    for name, pieces in choice.calls:
                        self._encoder.record_call(self._salt, name, "".join(pieces))
                case _:
                    pass


def _decoder(encoder: Encoder, ask: Ask, prompt: Prompt, job: Job) -> Decoder:
    """Parses Kimi's chat format for a conversation, else passes plain text through."""
    chat = isinstance(prompt, Conversation)
    return Decoder(
        encoder.tokenizer,
        thinking=encoder.thinks(prompt),
        stop=ask.stop,
        stop_ids=job.sampling.stop_ids,
        prompt_tokens=len(job.tokens),
        parse=chat,
        include_stop_str=ask.include_stop,
        skip_special_tokens=ask.skip_special_tokens,
        most_calls=0 if chat and not prompt.tools else None if ask.calls.parallel else 1,
        min_tokens=job.sampling.min_tokens,
        image_tokens=sum(span.tokens for span in job.media),
    )


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
