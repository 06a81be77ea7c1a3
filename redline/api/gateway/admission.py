"""Admission of requests: limits on their size and on the queue, the caller's token quota, the deadline.

Invariant: every check either raises or changes nothing; a request that was admitted is charged once (`charge`).
"""

from redline.api.ask import Ask
from redline.api.auth.quota import CALLER, Caller, ServedRate
from redline.api.config import Limits
from redline.api.gateway.active_requests import ActiveRequests
from redline.api.gateway.dispatcher import Dispatcher
from redline.api.gateway.worker_monitor import WorkerMonitor
from redline.api.peer_replicas import PeerReplicas
from redline.errors import Overloaded, RequestError, WorkerLost
from redline.messages.news import Ready


class RequestAdmission:
    """Decides which requests are accepted. `peers` counts for the limits on the queue."""

    def __init__(
        self,
        limits: Limits,
        requests: ActiveRequests,
        peers: PeerReplicas,
        monitor: WorkerMonitor,
        dispatcher: Dispatcher,
        served: ServedRate,
    ) -> None:
        self._limits = limits
        self._requests = requests
        self._peers = peers
        self._monitor = monitor
        self._dispatcher = dispatcher
        self._served = served

    @property
    def retry_s(self) -> float:
        """Seconds until the jobs that wait now will have started, at the recent rate of served prompts."""
        return self._served.retry_s(self._requests.waiting_tokens)

    @property
    def served_per_s(self) -> float:
        """Recent rate of served prompt tokens, in tokens per second, cached ones included."""
        return self._served.per_s

    def engine(self) -> Ready:
        """Limits of jobs, while a worker can run one or a worker's restart can be waited for. Raises Overloaded or
        WorkerLost otherwise."""
        workers = self._monitor.workers
        if (ready := workers.ready) is None:
            if self._dispatcher.resumes and workers.last is not None:
                return workers.last  # the job waits for the worker's restart, as requeued jobs do
            if workers.lost is not None:
                raise WorkerLost("the worker went down")
            raise Overloaded("the model is still loading", reason="loading")
        if not self._monitor.stalled and (silence := workers.silence) is not None:
            raise Overloaded(silence, reason="silent")
        return ready

    def check_queue(self, ask: Ask) -> None:
        """Raises Overloaded if the queue has no room for the jobs of a request."""
        waiting = self._requests.waiting + self._peers.waiting
        if waiting + ask.choices > self._limits.waiting:
            raise Overloaded(f"{waiting} jobs wait already; try again later", self.retry_s, "queue_jobs")

    def check_quota(self, caller: Caller, tokens: int) -> None:
        """Raises LimitReached if the caller's quota does not allow prompts of `tokens` tokens (0: of any length)."""
        if caller.account is not None:
            caller.account.check_tokens(tokens)

    def charge(self, caller: Caller, tokens: int) -> None:
        """Charge prompts of `tokens` tokens to the caller's quota. Raises LimitReached as `check_quota`."""
        self.check_quota(caller, tokens)
        if caller.account is not None:
            caller.account.charge(tokens)

    def check_tokens(self, ask: Ask, before: int, tokens: int) -> None:
        """Check the limits on prompt tokens times n, and on their logprobs. Raises RequestError or Overloaded.

        tokens: of this prompt. before: tokens of this request's earlier prompts, which are part of the waiting tokens.
        """
        asked, most = before + ask.n * tokens, self._limits.tokens
        if asked > most and asked > tokens:  # one prompt is limited by the context length
            raise RequestError(
                f"the prompts, each counted n times, are {asked} tokens or more; at most {most} in one request",
                ask.param,
            )
        waiting = self._requests.waiting_tokens + self._peers.waiting_tokens
        if waiting > before and waiting + ask.n * tokens > self._limits.queue_tokens:
            raise Overloaded(f"{waiting} prompt tokens wait already; try again later", self.retry_s, "queue_tokens")
        scored = ask.sampling.prompt_logprobs
        if scored is not None and asked * (scored + 1) > (most := self._limits.prompt_logprobs):
            raise RequestError(
                f"{scored + 1} log probabilities for each of {asked} prompt tokens, each prompt counted n times: "
                f"at most {most} in one request",
                "prompt_logprobs",
            )

    def timeout_s(self, ask: Ask) -> float | None:
        """Seconds from the request's arrival to its last token: the least of the field, the header and the deployment's
        limit."""
        limits = ask.timeout_s, CALLER.get().timeout_s, self._limits.timeout_s
        return min((seconds for seconds in limits if seconds is not None), default=None)
