"""A worker without a model: it answers each job with the deltas of a script, encoded as on the real wire."""

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from redline.api.gateway.gateway import Gateway
from redline.messages.codec import Wire, decode, encode
from redline.messages.delta import Delta, Finish
from redline.messages.handoff import WorkerDown
from redline.messages.job import Abort, Job, JobId
from redline.messages.news import Ping, Ready, Recall, Role, RoleTaken, TakeRole
from redline.messages.step import TokenLogprobs
from redline.router.worker_registry import WorkerHandle
from tests.waiting import turns

Script = Callable[[Job], Iterable[Delta]]


class FakeEngine:
    """The gateway's outbox. Sends one delta per iteration of the event loop, while `gate` is open."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.gate = asyncio.Event()
        self.gate.set()
        self.jobs: list[Job] = []
        self.aborted: set[JobId] = set()
        self.sent = 0
        self._deliver: Callable[[Wire], None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(
        self,
        gateway: Gateway,
        max_model_len: int = 4096,
        name: str = "worker",
        role: Role = "both",
        epoch: int = 1,
        image_tokens: int = 0,
    ) -> WorkerHandle:
        """Join this gateway as a worker, and become ready at once. image_tokens: as in `Ready`."""
        link = gateway.monitor.join(name, self, role, epoch)
        self._deliver = functools.partial(deliver, gateway, link)
        ready = Ready(
            max_model_len=max_model_len, pages=1000, fingerprint="tiny", summary="a fake", image_tokens=image_tokens
        )
        self._deliver(ready)
        return link

    def put(self, message: Wire) -> None:
        match decode(encode([message]))[0]:
            case Job() as job:
                self.jobs.append(job)
                task = asyncio.get_running_loop().create_task(self._run(job))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Abort(job=id):
                self.aborted.add(id)
            case Ping() as knock:
                assert self._deliver is not None
                self._deliver(knock)
            case TakeRole(role=role):
                assert self._deliver is not None
                self._deliver(RoleTaken(role=role))
            case Recall() | WorkerDown():
                pass  # it has no prefix cache, and transfers no KV
            case other:
                raise AssertionError(other)

    async def _run(self, job: Job) -> None:
        assert self._deliver is not None
        for delta in self.script(job):
            await turns()
            await self.gate.wait()
            if job.id in self.aborted:
                return
            self._deliver(decode(encode([delta]))[0])
            self.sent += 1


def deliver(gateway: Gateway, worker: WorkerHandle, message: Wire) -> None:
    """Pass one message of a worker to the gateway, whose books must then agree."""
    gateway.monitor.receive(worker, [message])
    gateway.requests.check()


def say(tokens: Sequence[int], finish: Finish = "stop", per_delta: int = 1, cached: int = 0, drafts: int = 0) -> Script:
    """Generate the same tokens for every job, at most `max_tokens`; logprobs of -0.5 if requested.

    drafts: draft tokens verified for each delta; all accepted that it has room for.
    """

    def script(job: Job) -> Iterator[Delta]:
        most = job.sampling.max_tokens
        said, end = (tokens[:most], "length") if most < len(tokens) else (tokens, finish)
        scored = _prompt_scores(job)
        for start in range(0, len(scored), 2):  # in pieces, as prefill in chunks yields them
            yield Delta(job=job.id, prompt_logprobs=scored[start : start + 2], cached_tokens=cached)
        for start in range(0, max(1, len(said)), per_delta):  # an answer without tokens ends as well
            piece = tuple(said[start : start + per_delta])
            yield Delta(
                job=job.id,
                tokens=piece,
                finish=end if start + per_delta >= len(said) else None,
                cached_tokens=cached,
                proposed=drafts,
                accepted=min(drafts, len(piece) - 1),
                by="learned" if drafts else None,
                logprobs=tuple(_score(token, job.sampling.logprobs) for token in piece)
                if job.sampling.logprobs is not None
                else (),
            )

    return script


def _prompt_scores(job: Job) -> tuple[TokenLogprobs, ...]:
    if job.sampling.prompt_logprobs is None:
        return ()
    return tuple(_score(token, job.sampling.prompt_logprobs) for token in job.tokens[1:])


def _score(token: int, top: int) -> TokenLogprobs:
    """The token itself is the most likely, followed by the letters from `a` on."""
    others = [(ord("a") + index, -1.0 - index) for index in range(top)]
    return TokenLogprobs(token=token, logprob=-0.5, rank=1, top=tuple([(token, -0.5), *others][:top]))
