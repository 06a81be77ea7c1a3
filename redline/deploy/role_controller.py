"""Switches roles of workers to follow the traffic, and starts and stops workers: at most one change per evaluation.

Every `every_s` seconds the recent requests and the measured step times are passed to `policy.roles.choose_roles`, which
predicts the roles with the highest SLO attainment. If a split other than the present one may be better, the candidates
are replayed on the recent requests (`trials.py`), and the replay decides. Against oscillation, CONFIRM evaluations in a
row have to give the same direction, and `rest_s` has to have passed since the last change. Then the workers switch one
after another, each when the one before has its new role, until the whole split is reached: half of it may be worse than
none. If no worker is left that answers, a prefill worker becomes a decode worker at once.

Roles are chosen first. If the SLO targets cannot be met even with the best roles of the running workers, another worker
is started; if fewer suffice for `spare_s`, one is stopped (`autoscaler.py`). Each change is logged; the changes, the
last evaluation and its numbers are in /admin/status.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from redline import clock
from redline.api.config import Sla
from redline.api.gateway.gateway import Gateway
from redline.api.telemetry.sla import targets_of
from redline.deploy.autoscaler import Autoscaler, WorkerPool
from redline.deploy.config import Steer
from redline.deploy.trials import tried
from redline.errors import RedlineError
from redline.messages.job import PAGE_TOKENS
from redline.messages.news import Load, Ready, Role
from redline.policy.expected import PredictedGoodput, RequestTokens, Roles, Traffic, WorkerModel
from redline.policy.pairs import Work
from redline.policy.roles import FleetRoles, RoleChoice, best_roles, choose_roles, predict_roles, settled, splits_to_try
from redline.policy.steps import StepModel, StepTimeFit, on_the_mean
from redline.policy.worker_count import NEWEST, rising, role_of_another
from redline.router.roles import STAY_S, can_answer
from redline.router.worker_registry import MOVE_S, WorkerHandle

CONFIRM = 2  # evaluations in a row with the same direction, before anything changes
LEAST_REQUESTS = 8  # minimum of requests in the window (or queued at a worker) for a conclusion
MOST_TOLD = 16  # changes that are kept for /admin/status
ALL_WITH = 32  # steps with prefill that suffice without a decode-only step: an overloaded worker has none of those
MOST_STEPS = 1024  # newest steps with prefill that are kept, and the same number of steps without
TOLD_ROWS, TOLD_TOKENS = (1, 16), 512  # batch sizes, and tokens of contexts and prompt, of step times in /admin/status
MEMORY = 0.98  # decay of the sums of tokens and rows at each further step

log = logging.getLogger("redline.deploy")


class Decision(NamedTuple):
    """The result of one evaluation.

    at: seconds since the epoch. worker: the one that changes; None: no change. does: the change, "turns" (it switches
    its role), "starts" or "ends". role: its role afterwards; None: it ends. now, expected: predictions for the present
    and the chosen roles; None if nothing was predicted. wanted: number of workers wanted.
    """

    at: float
    why: str
    worker: str | None = None
    role: Role | None = None
    does: Literal["turns", "starts", "ends"] | None = None
    now: PredictedGoodput | None = None
    expected: PredictedGoodput | None = None
    wanted: int | None = None

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "at": clock.strftime("%Y-%m-%dT%H:%M:%SZ", clock.gmtime(self.at)),
            "worker": self.worker,
            "does": self.does,
            "role": self.role,
            "why": self.why,
            "now": None if self.now is None else _told(self.now),
            "expected": None if self.expected is None else _told(self.expected),
            "workers_wanted": self.wanted,
        }


class Measured:
    """Recent step times of all workers, and the mean number of tokens that a decode row gives per step."""

    def __init__(self) -> None:
        self._with_prompts: deque[tuple[Work, float]] = deque(maxlen=MOST_STEPS)  # work and milliseconds of each step
        self._without: deque[tuple[Work, float]] = deque(maxlen=MOST_STEPS)
        self._newest: dict[str, int] = {}  # by worker, the number of the newest step that was added
        self._tokens = self._rows = 0.0

    def hear(self, worker: str, load: Load) -> None:
        """Add the steps in a worker's load report. Step numbers restart with the worker."""
        newest = self._newest.get(worker, 0)
        if load.steps < newest:
            newest = 0
        for step in load.timed:
            if step.number <= newest:
                continue
            self._newest[worker] = step.number
            kind = self._with_prompts if step.prompt else self._without
            kind.append((Work(step.prompt, step.pairs, step.rows, step.context, step.expanded), step.ms))
            if step.rows:
                self._tokens = MEMORY * self._tokens + step.tokens
                self._rows = MEMORY * self._rows + step.rows

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens of one answer per step, at least 1."""
        return max(1.0, self._tokens / self._rows) if self._rows else 1.0

    @property
    def enough(self) -> bool:
        """Whether steps with and without prefill were measured, or at least ALL_WITH with prefill and none without."""
        return bool(self._with_prompts) and bool(self._without or len(self._with_prompts) >= ALL_WITH)

    @property
    def steps(self) -> tuple[tuple[Work, float], ...]:
        """The work of each step, and its milliseconds."""
        return (*self._with_prompts, *self._without)


class Steering:
    """Evaluates the traffic, switches roles, starts and stops workers. `run` until cancelled; `told` for operators."""

    def __init__(
        self,
        config: Steer,
        gateway: Gateway,
        crew: WorkerPool,
        targets: Mapping[str, Sla],
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        self.measured = Measured()
        self.last: Decision | None = None
        self.changes: deque[Decision] = deque(maxlen=MOST_TOLD)
        self._config = config
        self._gateway = gateway
        self._crew = crew
        self._spares = Autoscaler(crew, gateway.workers, config.spare_s, clock)
        self._targets = targets_of(targets)
        self._clock = clock
        self._changed_at = -math.inf
        self._tried_at = -math.inf  # time of the last replay in which no other split was better
        self._said = 0, 0  # direction of the wanted change, and the number of evaluations in a row that gave it
        self._goal: Decision | None = None  # the decision that is being carried out, one worker after the other
        self._weighed: tuple[Traffic, FleetRoles] | None = None  # input of the last evaluation that predicted anything
        gateway.monitor.on_load = self.measured.hear
        gateway.history.start()

    async def run(self) -> None:
        """Evaluate every `every_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._config.every_s)
            try:
                await self.look()
            except Exception:  # an error here must not end the server: requests are served with the present roles
                log.exception("the evaluation of worker roles failed")

    async def look(self) -> Decision:
        """Evaluate once, make at most one change, and return the decision."""
        decision = self._at_once() or self._go_on() or await self._weigh()
        if decision.worker is None:
            decision = await self._count(decision)
        match decision.does:
            case "turns":
                self._changed_at, self._said = self._clock(), (0, 0)
                log.info("%s switches its role to %s: %s", decision.worker, decision.role, decision.why)
            case "starts":
                log.info("%s is started with role %s: %s", decision.worker, decision.role, decision.why)
            case "ends":
                log.info("%s is scaled down: %s", decision.worker, decision.why)
            case None:
                log.debug("no change of workers: %s", decision.why)
        if decision.worker is not None:
            self.changes.append(decision)
        self.last = decision
        return decision

    def told(self) -> dict[str, Any]:
        """As JSON: the last evaluation and the newest changes."""
        return {
            "roles": self._roles()._asdict(),
            "workers": self._spares.told(),
            "last": None if self.last is None else self.last.told(),
            "changes": [change.told() for change in reversed(self.changes)],
            "weighed": None if self._weighed is None else _told_weighed(self._weighed[0], self._weighed[1].model.steps),
        }

    # -- inputs

    def _able(self) -> list[WorkerHandle]:
        """Workers that can be sent new jobs."""
        links = self._gateway.workers
        return [link for link in links if link.ready and not link.draining and links.silent_s(link) <= MOVE_S]

    def _roles(self) -> Roles:
        return roles_of([link.role for link in self._able()])

    def _at_once(self) -> Decision | None:
        """If no worker can answer, switch one to decode."""
        able = self._able()
        if not able or any(can_answer(self._gateway.workers, link) for link in able):
            return None
        return self._change(able[0], "decode", Decision(clock.now(), "no other worker can answer"))

    def _go_on(self) -> Decision | None:
        """Switch the next worker towards the split that was decided on; None if no such change is in progress."""
        if (goal := self._goal) is None or goal.expected is None:
            return None
        able, roles = self._able(), goal.expected.roles
        way = roles.prefill - roles_of([link.role for link in able]).prefill
        if not way or roles.workers != len(able):  # done; or the number of workers changed, so evaluate again
            self._goal = None
            return None
        if any(link.switching_since is not None for link in able):
            return None
        decision = self._step(able, way, goal._replace(at=clock.now()))
        if decision.worker is None:
            self._goal = None
        return decision

    async def _weigh(self) -> Decision:
        """Choose roles and the number of workers by the recent traffic."""
        why_stays = self._why_stays()
        if why_stays is not None and not self._spares.any:
            return Decision(clock.now(), why_stays)
        asked, came = self._asked(), self._came()
        if isinstance(asked, str):
            if not came:
                self._spares.saw(self._with_queues())
            return Decision(clock.now(), why_stays or asked)
        # Numpy and a fit: some milliseconds, which would stall every stream if they ran in the event loop.
        choice = await asyncio.get_running_loop().run_in_executor(None, self._choose, *asked)
        self._spares.saw(max(choice.ample, self._with_queues()))
        if why_stays is None:
            choice, why_stays = await self._try(choice)
        if why_stays is not None:
            return Decision(clock.now(), why_stays, None, None, None, choice.now, choice.expected, choice.wanted)
        return self._decide(choice)

    async def _try(self, choice: RoleChoice) -> tuple[RoleChoice, str | None]:
        """Replay the present and other roles. Returns (the choice, the reason why no role can change now, or None)."""
        assert self._weighed is not None, "`_choose` sets it"
        traffic, fleet = self._weighed
        assert fleet.now is not None
        assert choice.now is not None
        stays = choice._replace(roles=fleet.now, expected=choice.now)
        splits = splits_to_try(choice, fleet.now)
        if not splits:
            why = choice.why if choice.roles == fleet.now else f"{choice.why}, too small a gain for a change"
            return stays._replace(why=why), None
        if (rest_s := self._tried_at + self._config.rest_s - self._clock()) > 0:
            return stays, f"roles were simulated recently; the next simulation is in {rest_s:.0f} s"
        left = self._gateway.history.remaining(self._gateway.requests.records)
        traffic = traffic._replace(under_way=[RequestTokens(*each) for each in left])
        try:
            shares = await tried(traffic, fleet, self._targets, splits)
        except RedlineError as error:
            log.warning("%s; the roles stay as they are", error)
            self._tried_at = self._clock()
            return stays, str(error)
        what = choice, traffic, fleet, self._targets, shares
        choice = await asyncio.get_running_loop().run_in_executor(None, settled, *what)
        if choice.roles == fleet.now:
            self._tried_at = self._clock()
        return choice, None

    def _with_queues(self) -> int:
        """Minimum of workers wanted: all that run while at least LEAST_REQUESTS are queued at one of them; else 0."""
        waits = any(link.load is not None and link.load.waiting >= LEAST_REQUESTS for link in self._gateway.workers)
        return len(self._spares.running) if waits else 0

    def _came(self) -> int:
        """Number of requests in the window."""
        return len(self._gateway.history.lengths(self._config.window_s))

    def _why_stays(self) -> str | None:
        """Why no role can change now; None if one can."""
        able = self._able()
        if (turning := next((link for link in able if link.switching_since is not None), None)) is not None:
            return f"{turning.name} is still switching its role"
        if (left := self._changed_at + self._config.rest_s - self._clock()) > 0:
            return f"a role was switched recently; the next switch is possible in {left:.0f} s"
        if len(able) < 2:
            return f"{len(able)} workers are ready: roles need at least 2"
        if (came := self._came()) < LEAST_REQUESTS:
            window_s = self._config.window_s
            return f"{came} requests arrived in {window_s:g} s; at least {LEAST_REQUESTS} are needed"
        return None

    def _asked(self) -> tuple[Traffic, FleetRoles, Sequence[tuple[Work, float]]] | str:
        """The input of an evaluation: traffic, workers and measured steps; or the reason why there is none."""
        able = self._able()
        window_s, lately = self._config.window_s, self._gateway.history
        lengths = lately.lengths(window_s)
        if not able or not lengths:
            return "no worker is ready" if not able else f"no request arrived in {window_s:g} s"
        if not self.measured.enough:
            return "no steps with prefill, or no decode-only steps, have been measured yet"
        asked = [RequestTokens(*each) for each in lengths]
        readies = [link.ready for link in able if link.ready is not None]
        now, worker = roles_of([link.role for link in able]), _worker(readies, self.measured.tokens_per_step)
        newest_s, rate = NEWEST * window_s, lately.rate(window_s)
        peak = rising(rate, len(lately.lengths(newest_s)), newest_s)
        fleet = FleetRoles(len(able), worker, now, flip_s=STAY_S, horizon_s=self._config.horizon_s, peak=peak)
        return Traffic(rate, asked), fleet, self.measured.steps

    def _choose(self, traffic: Traffic, fleet: FleetRoles, steps: Sequence[tuple[Work, float]]) -> RoleChoice:
        experts_of, experts_chosen = fleet.model.steps.experts_of, fleet.model.steps.experts_chosen
        fit = StepTimeFit(experts_of=experts_of, experts_chosen=experts_chosen)
        for work, ms in steps:
            fit.add(work, ms)
        worker = msgspec.structs.replace(fleet.model, steps=on_the_mean(fit.model(), steps))
        self._weighed = traffic, fleet._replace(model=worker)
        return choose_roles(*self._weighed, self._targets)

    # -- changes

    def _decide(self, choice: RoleChoice) -> Decision:
        seen = Decision(clock.now(), choice.why, None, None, None, choice.now, choice.expected, choice.wanted)
        able = self._able()
        way = choice.roles.prefill - roles_of([link.role for link in able]).prefill
        if not way or choice.roles.workers != len(able):  # the number of workers changed during the evaluation
            self._said = 0, 0
            return seen
        sign = 1 if way > 0 else -1
        self._said = sign, self._said[1] + 1 if self._said[0] == sign else 1
        if self._said[1] < CONFIRM:
            return seen._replace(why=f"{choice.why}; a role switches if the next evaluation confirms it")
        self._goal = seen
        return self._step(able, way, seen)

    def _step(self, able: Sequence[WorkerHandle], way: int, seen: Decision) -> Decision:
        """Switch the worker with the fewest jobs. way: positive if the number of prefill workers is to go up."""
        some = [link for link in able if (link.role == "prefill") == (way < 0)]
        link = min(some, key=lambda link: link.jobs)
        alone = seen.expected is not None and not seen.expected.roles.prefill
        return self._change(link, "prefill" if way > 0 else "both" if alone else "decode", seen)

    def _change(self, link: WorkerHandle, role: Role, seen: Decision) -> Decision:
        if (why_not := self._crew.turn(link.name, role)) is not None:
            return seen._replace(why=f"{seen.why}; but {why_not}")
        return seen._replace(worker=link.name, role=role, does="turns")

    async def _count(self, seen: Decision) -> Decision:
        """Start or stop one worker if the number that runs differs from the number wanted."""
        count, running = self._spares.count(), self._spares.running
        self._gateway.metrics.workers_wanted(count.workers)
        if not self._spares.any or count.workers == len(running):
            return seen
        more = count.workers > len(running)
        now, does = roles_of([seat.role for seat in running]), "starts" if more else "ends"
        expected = await self._with(len(running) + (1 if more else -1), apart=now.prefill > 0)
        wants = now if expected is None else expected.roles
        if more:
            role = role_of_another(now, wants)
            name, why_not = self._spares.start(role)
        else:
            role = None
            name, why_not = self._spares.end(fewer_prompts=wants.prefill < now.prefill)
        if name is None:
            return seen._replace(why=f"{seen.why}; {count.why}, but {why_not}")
        return seen._replace(
            at=clock.now(), why=count.why, worker=name, role=role, does=does,
            expected=expected or seen.expected,
        )  # fmt: skip

    async def _with(self, workers: int, apart: bool) -> PredictedGoodput | None:
        """Prediction for `workers` workers with the best roles, or, without `apart`, with all of role "both"; None if
        nothing was evaluated yet."""
        if self._weighed is None or workers < 1:
            return None
        weighed, run = (*self._weighed, self._targets), asyncio.get_running_loop().run_in_executor
        if apart:
            return await run(None, best_roles, *weighed, workers)
        return await run(None, predict_roles, *weighed, Roles(both=workers))


def roles_of(roles: Sequence[Role]) -> Roles:
    """The number of workers of each role. Without prefill workers, "decode" workers count as "both", as they compute
    prompts too; with prefill workers, "both" counts as "decode", as those get equally few prompts."""
    prefill = sum(role == "prefill" for role in roles)
    others = len(roles) - prefill
    return Roles(prefill=prefill, decode=others) if prefill else Roles(both=others)


def _worker(readies: Sequence[Ready], tokens_per_step: float) -> WorkerModel:
    """A worker model with the minimum of each limit over the ready workers; its step times are filled in later."""
    return WorkerModel(
        name="measured",
        steps=StepModel(base=0.0, experts_of=readies[0].experts_of, experts_chosen=readies[0].experts_chosen),
        step_tokens=min(ready.step_tokens for ready in readies),
        slots=min(ready.slots for ready in readies),
        kv_tokens=min(ready.pages for ready in readies) * PAGE_TOKENS,
        tokens_per_step=tokens_per_step,
        step_ms=min((ready.step_ms for ready in readies if ready.step_ms is not None), default=None),
    )


def _told_weighed(traffic: Traffic, steps: StepModel) -> dict[str, Any]:
    """As JSON, the input of the last evaluation: mean token counts, and fitted times of steps and of a lone prompt."""
    asked = traffic.requests
    return {
        "requests_per_s": round(traffic.rate, 3),
        "prompt_tokens": round(sum(each.cached + each.uncached for each in asked) / len(asked), 1),
        "cached_tokens": round(sum(each.cached for each in asked) / len(asked), 1),
        "answer_tokens": round(sum(each.output for each in asked) / len(asked), 1),
        "step_ms": {str(rows): round(steps.decode_ms(rows, TOLD_TOKENS), 3) for rows in TOLD_ROWS},
        "prompt_ms": round(steps.prompt_ms(0, TOLD_TOKENS, TOLD_TOKENS), 3),
    }


def _told(predicted: PredictedGoodput) -> dict[str, Any]:
    def finite(value: float) -> float | None:
        return round(value, 4) if math.isfinite(value) else None

    return {
        "roles": predicted.roles._asdict(),
        "goodput": finite(predicted.goodput),
        "attainment": finite(predicted.attainment),
        "prefill_use": finite(predicted.prefill),
        "decode_use": finite(predicted.decode),
    }
