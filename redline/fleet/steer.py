"""Gives workers other roles as the traffic asks for, and starts and ends some: every few seconds one look, one change.

What came lately, as it came, and what steps took lately are put to `tune.roles.choose_roles`, which says which roles
keep most of what is promised. Where others than the present ones may, all are tried on what came (`trials.py`), and
what comes of that counts. Against changing to and fro it has to say the same direction in CONFIRM looks in a row, and
`rest_s` has to have passed since the last change. Then the workers change one after the other, each once the one
before is in its role: half of a way may be worse than none. Where nobody is left that answers, a worker that computes
prompts does so at once.

Roles come first. Where with the best roles of those that run what is promised is not to be kept, another worker is
started; where fewer are ample for long, one ends (`spares.py`). Each change is a line in the log; it, the last look
and its numbers are in /admin/status.
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
from redline.api.gateway import Gateway
from redline.api.sla import targets_of
from redline.errors import RedlineError
from redline.fleet.config import Steer
from redline.fleet.spares import Crew, Spares
from redline.fleet.trials import tried
from redline.route.links import MOVE_S, Link
from redline.route.roles import STAY_S, can_answer
from redline.tune.count import NEWEST, rising, role_of_another
from redline.tune.expected import Asked, Predicted, Roles, Traffic, WorkerModel
from redline.tune.pairs import Work
from redline.tune.roles import Choice, Fleet, best_roles, choose_roles, predict_roles, settled, splits_to_try
from redline.tune.steps import StepFit, StepModel, on_the_mean
from redline.wire.job import PAGE_TOKENS
from redline.wire.news import Load, Ready, Role

CONFIRM = 2  # looks in a row that say the same, before anything changes
LEAST_REQUESTS = 8  # that have come in the window, or wait at a worker: of fewer nothing is concluded
MOST_TOLD = 16  # changes that are remembered
ALL_WITH = 32  # steps with prompts, before one of answers alone: where more comes than can be done there is none
MOST_STEPS = 1024  # with prompts, and as many without, that are remembered
TOLD_ROWS, TOLD_TOKENS = (1, 16), 512  # of what is told of a step model: answers at once; of a context, and of a prompt
MEMORY = 0.98  # share of the tokens and rows of steps that stays when those of another are added

log = logging.getLogger("redline.fleet")


class Decision(NamedTuple):
    """What came of one look. at: seconds since the epoch. worker: who changes; None: nobody. does: what it does.

    role: that it has then; None: it ends. now, expected: what the present roles and the chosen ones are predicted to
    do; None where nothing was predicted.
    """

    at: float
    why: str
    worker: str | None = None
    role: Role | None = None
    does: Literal["turns", "starts", "ends"] | None = None
    now: Predicted | None = None
    expected: Predicted | None = None
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
    """What steps of all workers took lately, and how many tokens a row of an answer gives."""

    def __init__(self) -> None:
        self._with_prompts: deque[tuple[Work, float]] = deque(maxlen=MOST_STEPS)  # and milliseconds
        self._without: deque[tuple[Work, float]] = deque(maxlen=MOST_STEPS)
        self._newest: dict[str, int] = {}  # step of each worker that was added
        self._tokens = self._rows = 0.0

    def hear(self, worker: str, load: Load) -> None:
        """Add the steps that a worker's load tells of. It counts from its own start."""
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
        """Of an answer, at least one."""
        return max(1.0, self._tokens / self._rows) if self._rows else 1.0

    @property
    def enough(self) -> bool:
        """Whether steps of both kinds were measured; or so many with prompts that there are none of answers alone."""
        return bool(self._with_prompts) and bool(self._without or len(self._with_prompts) >= ALL_WITH)

    @property
    def steps(self) -> tuple[tuple[Work, float], ...]:
        """What steps computed, and the milliseconds that they took."""
        return (*self._with_prompts, *self._without)


class Steering:
    """Looks and changes roles, and who runs. `run` until it is cancelled; `told` is for the operator."""

    def __init__(
        self,
        config: Steer,
        gateway: Gateway,
        crew: Crew,
        targets: Mapping[str, Sla],
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        self.measured = Measured()
        self.last: Decision | None = None
        self.changes: deque[Decision] = deque(maxlen=MOST_TOLD)
        self._config = config
        self._gateway = gateway
        self._crew = crew
        self._spares = Spares(crew, gateway.links, config.spare_s, clock)
        self._targets = targets_of(targets)
        self._clock = clock
        self._changed_at = -math.inf
        self._tried_at = -math.inf  # when roles were tried last, and none was better
        self._said = 0, 0  # which way to change, and in how many looks in a row
        self._goal: Decision | None = None  # whose roles are being given, one worker after the other
        self._weighed: tuple[Traffic, Fleet] | None = None  # by the last look that weighed anything
        gateway.loads = self.measured.hear
        gateway.lately.remember()

    async def run(self) -> None:
        """Look every `every_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._config.every_s)
            try:
                await self.look()
            except Exception:  # whatever it is, requests are served without it
                log.exception("the roles of workers could not be weighed")

    async def look(self) -> Decision:
        """Look once, and change what is to be changed. What came of it."""
        decision = self._at_once() or self._go_on() or await self._weigh()
        if decision.worker is None:
            decision = await self._count(decision)
        match decision.does:
            case "turns":
                self._changed_at, self._said = self._clock(), (0, 0)
                log.info("%s becomes %s: %s", decision.worker, decision.role, decision.why)
            case "starts":
                log.info("%s is started, and is to be %s: %s", decision.worker, decision.role, decision.why)
            case "ends":
                log.info("%s is to run no more: %s", decision.worker, decision.why)
            case None:
                log.debug("no worker changes: %s", decision.why)
        if decision.worker is not None:
            self.changes.append(decision)
        self.last = decision
        return decision

    def told(self) -> dict[str, Any]:
        """As JSON: the last look and the newest changes."""
        return {
            "roles": self._roles()._asdict(),
            "workers": self._spares.told(),
            "last": None if self.last is None else self.last.told(),
            "changes": [change.told() for change in reversed(self.changes)],
            "weighed": None if self._weighed is None else _told_weighed(self._weighed[0], self._weighed[1].model.steps),
        }

    # -- what is seen

    def _able(self) -> list[Link]:
        """Workers that can be sent something new."""
        links = self._gateway.links
        return [link for link in links if link.ready and not link.draining and links.silent_s(link) <= MOVE_S]

    def _roles(self) -> Roles:
        return roles_of([link.role for link in self._able()])

    def _at_once(self) -> Decision | None:
        """Somebody has to answer."""
        able = self._able()
        if not able or any(can_answer(self._gateway.links, link) for link in able):
            return None
        return self._change(able[0], "decode", Decision(clock.now(), "no other worker is left that answers"))

    def _go_on(self) -> Decision | None:
        """The next worker changes on the way to roles that were decided on; None where there is no such way."""
        if (goal := self._goal) is None or goal.expected is None:
            return None
        able, roles = self._able(), goal.expected.roles
        way = roles.prefill - roles_of([link.role for link in able]).prefill
        if not way or roles.workers != len(able):  # there; or somebody has come or gone, and all is to be weighed anew
            self._goal = None
            return None
        if any(link.turning is not None for link in able):
            return None
        decision = self._step(able, way, goal._replace(at=clock.now()))
        if decision.worker is None:
            self._goal = None
        return decision

    async def _weigh(self) -> Decision:
        """What roles are to be, and how many workers, by what comes."""
        why_stays = self._why_stays()
        if why_stays is not None and not self._spares.any:
            return Decision(clock.now(), why_stays)
        asked, came = self._asked(), self._came()
        if isinstance(asked, str):
            if not came:
                self._spares.saw(self._with_queues())
            return Decision(clock.now(), why_stays or asked)
        # Numpy and a fit: some milliseconds, in which every stream would stand still.
        choice = await asyncio.get_running_loop().run_in_executor(None, self._choose, *asked)
        self._spares.saw(max(choice.ample, self._with_queues()))
        if why_stays is None:
            choice, why_stays = await self._try(choice)
        if why_stays is not None:
            return Decision(clock.now(), why_stays, None, None, None, choice.now, choice.expected, choice.wanted)
        return self._decide(choice)

    async def _try(self, choice: Choice) -> tuple[Choice, str | None]:
        """(The choice by a trial of the present roles and others, and why no role can change now; None: one can.)"""
        assert self._weighed is not None, "what is chosen was weighed"
        traffic, fleet = self._weighed
        assert fleet.now is not None
        assert choice.now is not None
        stays = choice._replace(roles=fleet.now, expected=choice.now)
        splits = splits_to_try(choice, fleet.now)
        if not splits:
            why = choice.why if choice.roles == fleet.now else f"{choice.why}, which is too little for a change"
            return stays._replace(why=why), None
        if (rest_s := self._tried_at + self._config.rest_s - self._clock()) > 0:
            return stays, f"roles were tried lately; they are again in {rest_s:.0f} s"
        left = self._gateway.lately.left(self._gateway.under_way)
        traffic = traffic._replace(under_way=[Asked(*each) for each in left])
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
        """Workers that are wanted in any case: all that run, while many requests wait at one of them; else none."""
        waits = any(link.load is not None and link.load.waiting >= LEAST_REQUESTS for link in self._gateway.links)
        return len(self._spares.running) if waits else 0

    def _came(self) -> int:
        """Requests of the window."""
        return len(self._gateway.lately.lengths(self._config.window_s))

    def _why_stays(self) -> str | None:
        """Why no role can change now."""
        able = self._able()
        if (turning := next((link for link in able if link.turning is not None), None)) is not None:
            return f"{turning.name} is still changing its role"
        if (left := self._changed_at + self._config.rest_s - self._clock()) > 0:
            return f"a role was changed lately; the next can be in {left:.0f} s"
        if len(able) < 2:
            return f"{len(able)} workers are ready: there is nothing to choose"
        if (came := self._came()) < LEAST_REQUESTS:
            window_s = self._config.window_s
            return f"{came} requests came in {window_s:g} s; {LEAST_REQUESTS} at least are weighed"
        return None

    def _asked(self) -> tuple[Traffic, Fleet, Sequence[tuple[Work, float]]] | str:
        """What is to be weighed, with the steps that say what a worker can do; or why nothing is."""
        able = self._able()
        window_s, lately = self._config.window_s, self._gateway.lately
        lengths = lately.lengths(window_s)
        if not able or not lengths:
            return "no worker is ready" if not able else f"no request came in {window_s:g} s"
        if not self.measured.enough:
            return "no steps with prompts, or none with answers alone, have been measured yet"
        asked = [Asked(*each) for each in lengths]
        readies = [link.ready for link in able if link.ready is not None]
        now, worker = roles_of([link.role for link in able]), _worker(readies, self.measured.tokens_per_step)
        newest_s, rate = NEWEST * window_s, lately.rate(window_s)
        peak = rising(rate, len(lately.lengths(newest_s)), newest_s)
        fleet = Fleet(len(able), worker, now, flip_s=STAY_S, horizon_s=self._config.horizon_s, peak=peak)
        return Traffic(rate, asked), fleet, self.measured.steps

    def _choose(self, traffic: Traffic, fleet: Fleet, steps: Sequence[tuple[Work, float]]) -> Choice:
        experts_of, experts_chosen = fleet.model.steps.experts_of, fleet.model.steps.experts_chosen
        fit = StepFit(experts_of=experts_of, experts_chosen=experts_chosen)
        for work, ms in steps:
            fit.add(work, ms)
        worker = msgspec.structs.replace(fleet.model, steps=on_the_mean(fit.model(), steps))
        self._weighed = traffic, fleet._replace(model=worker)
        return choose_roles(*self._weighed, self._targets)

    # -- what is done

    def _decide(self, choice: Choice) -> Decision:
        seen = Decision(clock.now(), choice.why, None, None, None, choice.now, choice.expected, choice.wanted)
        able = self._able()
        way = choice.roles.prefill - roles_of([link.role for link in able]).prefill
        if not way or choice.roles.workers != len(able):  # somebody has come or gone meanwhile
            self._said = 0, 0
            return seen
        sign = 1 if way > 0 else -1
        self._said = sign, self._said[1] + 1 if self._said[0] == sign else 1
        if self._said[1] < CONFIRM:
            return seen._replace(why=f"{choice.why}; once more, and a role changes")
        self._goal = seen
        return self._step(able, way, seen)

    def _step(self, able: Sequence[Link], way: int, seen: Decision) -> Decision:
        """The worker with least to end changes. way: more than 0 where more are to compute prompts."""
        some = [link for link in able if (link.role == "prefill") == (way < 0)]
        link = min(some, key=lambda link: link.jobs)
        alone = seen.expected is not None and not seen.expected.roles.prefill
        return self._change(link, "prefill" if way > 0 else "both" if alone else "decode", seen)

    def _change(self, link: Link, role: Role, seen: Decision) -> Decision:
        if (why_not := self._crew.turn(link.name, role)) is not None:
            return seen._replace(why=f"{seen.why}; but {why_not}")
        return seen._replace(worker=link.name, role=role, does="turns")

    async def _count(self, seen: Decision) -> Decision:
        """One worker more or less, where so many are to run."""
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

    async def _with(self, workers: int, apart: bool) -> Predicted | None:
        """What so many workers are expected to do with the best roles, or, where no prompts are computed apart, with
        none; None where nothing was weighed yet."""
        if self._weighed is None or workers < 1:
            return None
        weighed, run = (*self._weighed, self._targets), asyncio.get_running_loop().run_in_executor
        if apart:
            return await run(None, best_roles, *weighed, workers)
        return await run(None, predict_roles, *weighed, Roles(both=workers))


def roles_of(roles: Sequence[Role]) -> Roles:
    """How many workers have each role. Where nobody computes prompts for others, all do both, however that is called;
    where somebody does, those that do both are sent as few prompts as those that answer."""
    prefill = sum(role == "prefill" for role in roles)
    others = len(roles) - prefill
    return Roles(prefill=prefill, decode=others) if prefill else Roles(both=others)


def _worker(readies: Sequence[Ready], tokens_per_step: float) -> WorkerModel:
    """A worker as the least of these, but for what its steps take."""
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
    """What was weighed: tokens on the mean, and what is believed of steps and of a prompt that stands alone."""
    asked = traffic.requests
    return {
        "requests_per_s": round(traffic.rate, 3),
        "prompt_tokens": round(sum(each.cached + each.uncached for each in asked) / len(asked), 1),
        "cached_tokens": round(sum(each.cached for each in asked) / len(asked), 1),
        "answer_tokens": round(sum(each.output for each in asked) / len(asked), 1),
        "step_ms": {str(rows): round(steps.decode_ms(rows, TOLD_TOKENS), 3) for rows in TOLD_ROWS},
        "prompt_ms": round(steps.prompt_ms(0, TOLD_TOKENS, TOLD_TOKENS), 3),
    }


def _told(predicted: Predicted) -> dict[str, Any]:
    def finite(value: float) -> float | None:
        return round(value, 4) if math.isfinite(value) else None

    return {
        "roles": predicted.roles._asdict(),
        "goodput": finite(predicted.goodput),
        "attainment": finite(predicted.attainment),
        "prefill_use": finite(predicted.prefill),
        "decode_use": finite(predicted.decode),
    }
