"""Between HTTP and the workers: a request is admitted, encoded to jobs, and sent; its deltas come back as a Generation.

Invariant: `begin` returns a Generation that owns every job it has sent, or raises and leaves no job running.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

from redline import clock
from redline.api.ask import Ask, Prompt
from redline.api.auth.quota import CALLER, Caller, ServedRate
from redline.api.config import Limits, Sla
from redline.api.gateway.active_requests import ActiveRequests
from redline.api.gateway.admission import RequestAdmission
from redline.api.gateway.dispatcher import Dispatcher
from redline.api.gateway.encoder import INLINE_CHARS, EncodedPrompt, Encoder
from redline.api.gateway.generation import Generation
from redline.api.gateway.job_builder import JobBuilder
from redline.api.gateway.job_metrics import JobMetrics
from redline.api.gateway.pictures import Pictures, pictures_of
from redline.api.gateway.worker_monitor import WorkerMonitor
from redline.api.http.stream_flusher import StreamFlusher
from redline.api.peer_replicas import PeerReplicas
from redline.api.telemetry.metrics import Metrics
from redline.api.telemetry.request_traces import RequestTraces
from redline.api.telemetry.sla import Attainment, targets_of
from redline.chat.conversation import Picture
from redline.chat.template import Style
from redline.chat.tokenizer import Tokenizer
from redline.errors import ContextTooLong, DeadlineExceeded, PromptTooLong, RequestError, WorkerLost
from redline.media.rules import ImageRules
from redline.messages.job import Job, Sampling
from redline.messages.news import Ready
from redline.router.request_history import RequestHistory
from redline.router.worker_registry import WorkerRegistry

NO_TARGETS: Mapping[str, Sla] = MappingProxyType({})


class Gateway:
    """The parts of the API behind HTTP, and the start of a request. Everything runs in one event loop."""

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
        rules: ImageRules | None = None,
    ) -> None:
        """resume_s: seconds beyond a worker's start time for which jobs of a worker that went down wait for another
        one. targets: SLO targets by class name. replica: name of this API replica, if there are several.
        rules: of the model's preprocessor; None: the model reads no images."""
        self.metrics = metrics
        self.workers = WorkerRegistry(clock)
        self.peers = PeerReplicas(self.workers)
        self.traces = RequestTraces()
        self.attainment = Attainment(targets, metrics, clock)
        self.history = RequestHistory(clock)
        self.encoder = Encoder(tokenizer, style, limits)
        self.builder = JobBuilder(self.encoder, limits, replica)
        self.pictures = Pictures(rules, limits)
        self.requests = ActiveRequests(self.workers)
        metrics.queue(lambda: self.requests.waiting, lambda: self.requests.waiting_tokens)
        self._served = ServedRate(clock)
        self._flusher = StreamFlusher()
        measured = JobMetrics(metrics, self.attainment, self.workers.latency_model, self.requests)
        self.dispatcher = Dispatcher(
            self.workers, self.requests, metrics, measured, self._served, targets_of(targets), resume_s
        )
        self.monitor = WorkerMonitor(
            self.workers, self.requests, self.dispatcher, self._flusher, metrics, self.pictures, clock, replica
        )
        self.admission = RequestAdmission(
            limits, self.requests, self.peers, self.monitor, self.dispatcher, self._served
        )
        self._at_end: list[Callable[[], object]] = []

    @property
    def ready(self) -> Ready | None:
        """Properties of the engine (context length, fingerprint); None while no worker can serve."""
        return self.workers.ready

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens of one job, prompt and output. Raises Overloaded or WorkerLost while no worker is
        ready."""
        return self.admission.engine().max_model_len

    async def begin(self, ask: Ask) -> Generation:
        """Encode, check and send a request: one job per choice. Returns the response to iterate over.

        Raises RequestError (ContextTooLong, MessageTooLarge, DeadlineExceeded; LimitReached if the caller's quota is
        used up), Overloaded or WorkerLost; then no job is left running. If the caller is cancelled while waiting here,
        nothing is left running either: no further text is encoded, and jobs that were sent are aborted.
        """
        caller, timeout_s = CALLER.get(), self.admission.timeout_s(ask)
        if timeout_s is None:
            return await self._begin(ask, caller)
        passed = max(0.0, clock.monotonic() - caller.began) if caller.began else 0.0
        until = asyncio.get_running_loop().time() + timeout_s - passed
        late = f"the deadline has passed: the answer was not complete {timeout_s:g} s after the request arrived"
        try:
            async with asyncio.timeout_at(until):
                generation = await self._begin(ask, caller)
        except TimeoutError:
            raise DeadlineExceeded(late) from None
        generation.end_at(until, DeadlineExceeded(late))
        return generation

    def fail_all(self, reason: str) -> None:
        """Fail every response with WorkerLost, and every later `begin`: no other worker will start."""
        self.dispatcher.stop_resuming()
        for worker in self.workers:
            self.monitor.mark_down(worker, reason)

    def close(self) -> None:
        """Fail every response with WorkerLost, and stop the threads once their current work is done; idempotent."""
        self.fail_all("the server is shutting down")
        self.builder.grammars.close()
        self.encoder.close()

    def at_end(self, close: Callable[[], object]) -> None:
        """Have `ended` call `close` in a thread, since it may wait for a disk; a coroutine that it returns is
        awaited."""
        self._at_end.append(close)

    async def ended(self) -> None:
        """Call after `close`, once no request is served any more: waits for the grammar processes to exit, then calls
        the functions given to `at_end`."""
        await self.builder.grammars.ended()
        await self.pictures.ended()
        while self._at_end:
            left = await asyncio.to_thread(self._at_end.pop())
            if asyncio.iscoroutine(left):
                await left

    async def _begin(self, ask: Ask, caller: Caller) -> Generation:
        arrived_at = clock.perf_counter()
        engine = self.admission.engine()
        self.admission.check_queue(ask)
        self.admission.check_quota(caller, 0)  # before its text is encoded
        self.encoder.check_ids(ask.sampling.stop_ids, "stop_token_ids")
        self.encoder.check_ids([token for token, _ in ask.sampling.logit_bias], "logit_bias")
        jobs, pictures = list[Job](), list[Picture]()
        tokens = 0  # prompt tokens of this request so far, each prompt counted n times
        try:
            for place in range(len(ask.prompts)):
                asked = await self.pictures.decoded(ask.prompts[place])
                pictures += pictures_of(asked)
                prompt, sampling = await self._prepare(ask, place, asked, tokens, engine)
                tokens += ask.n * len(prompt.tokens)
                self.requests.preparing_tokens += ask.n * len(prompt.tokens)
                jobs += await self.builder.jobs(ask, prompt, sampling, engine.fingerprint)
            # During encoding, the worker may have gone down and other requests may have arrived.
            if self.admission.engine().fingerprint != engine.fingerprint:
                raise WorkerLost("the model was replaced while the request was encoded")
            self.admission.check_queue(ask)
            self.admission.charge(caller, tokens)
        except BaseException:
            self.pictures.release(pictures)
            raise
        finally:
            self.requests.preparing_tokens -= tokens
        generation = Generation(
            ask, jobs, caller, arrived_at, self.dispatcher, self.encoder, self._flusher, self.history
        )
        if pictures:
            generation.at_close = functools.partial(self.pictures.release, pictures)
            for job in generation.jobs:
                job.pictures = tuple(pictures)
        await self._start(generation)
        return generation

    async def _prepare(
        self, ask: Ask, place: int, prompt: Prompt, before: int, engine: Ready
    ) -> tuple[EncodedPrompt, Sampling]:
        """Token ids and sampling parameters of the request's prompt at index `place`. before: tokens of the prompts
        before it."""
        limit, param = engine.max_model_len, ask.param if len(ask.prompts) == 1 else f"{ask.param}[{place}]"
        try:
            encoded = await self.encoder.encode(prompt, param, limit, ask.salt)
        except ContextTooLong:
            raise PromptTooLong(param, limit + 1, limit, at_least=True) from None
        tokens = encoded.tokens
        if not tokens:
            raise RequestError(f"{param} is empty", param)
        if (images := sum({span.hash: span.tokens for span in encoded.media}.values())) > engine.image_tokens:
            reads = f"at most {engine.image_tokens} in one request" if engine.image_tokens else "the model reads none"
            raise RequestError(f"the images take {images} tokens; {reads}", param)
        sampling = await self.builder.sampling(ask, prompt, tokens, limit, param)
        self.admission.check_tokens(ask, before, len(tokens))
        return encoded, sampling

    async def _start(self, generation: Generation) -> None:
        """Send the jobs of a request. Raises MessageTooLarge; then all of them are aborted."""
        caller, jobs = generation.caller, generation.jobs
        traces, sampling = [job.trace for job in jobs], jobs[0].message.sampling
        self.traces.begin(caller.request_id, traces)
        if caller.passage is not None:
            caller.passage.jobs, caller.passage.sampling = traces, sampling
        self.metrics.asked(generation.n, sampling.max_tokens)
        if not self.requests.waiting:
            self._served.begins()
        for job in jobs:
            self.requests.add(job)
        try:
            for job in jobs:
                if job in self.requests:  # else: it has ended in the meantime
                    self.dispatcher.dispatch(job)
                    self.metrics.prompt_tokens.inc(job.prompt_tokens)
                if job.prompt_tokens > INLINE_CHARS:
                    await asyncio.sleep(0)  # serialising a job of 262,144 tokens takes milliseconds
        except BaseException:
            generation.close()
            raise
