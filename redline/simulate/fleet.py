"""Discrete-event simulation of a fleet on a trace: requests arrive, are routed and computed, and meet their SLO targets
or do not.

Server code: `router.placement` (`predict`, `apart`) routes requests with the times that `router.latency_model` has
learned, `policy.roles.choose_roles` chooses the roles of workers if they are not fixed, and
`policy.worker_count.choose_count` the number of workers. Before roles change, the recent requests are replayed with
each candidate split (`tried`). Simulated: workers (`worker.py`), prefix caches (`caches.py`) and KV transfers (a time
per token). In a pool of more than EVERYBODY workers, a request considers only the workers with the longest cached
prefix, and a few random ones.
"""

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from redline.messages.news import Role
from redline.policy.expected import RequestTokens, Roles, Traffic, WorkerModel
from redline.policy.pairs import Work, expanded_of, pairs_of
from redline.policy.roles import FleetRoles as Chosen
from redline.policy.roles import RoleChoice, best_roles, choose_roles, settled, splits_to_try
from redline.policy.targets import Targets
from redline.policy.worker_count import NEWEST, Look, ScalingLimits, choose_count, forgotten, rising, role_of_another
from redline.router.latency_model import LatencyModel, PrefillShare
from redline.router.placement import PlacementCandidate, PredictedPlacement, apart, beside, cheapest, predict
from redline.simulate.caches import CachedPrefix, Caches
from redline.simulate.traces import BLOCK_TOKENS, TracedRequest
from redline.simulate.worker import Played, Worker

EVERYBODY = 16  # largest pool in which every worker is considered for every request
SOME = 4  # in larger pools: workers with the longest cached prefix, and random workers, that are considered
PATIENCE_S = 600.0  # after the last request: requests that have not ended by then count as unfinished
RECENT_S = 60.0  # window of recent requests by which roles are chosen
REST_S = 30.0  # minimum between two role changes
CONFIRM = 2  # evaluations in a row with the same direction before a change; these three as in a server's [steer]
LEAST_REQUESTS = 50  # minimum of requests in the window for an evaluation
TRIED_WORKERS = EVERYBODY  # maximum of workers in a replay; larger fleets are scaled down to it
TRIED_TIMES = 2  # repetitions of the recent requests in a replay: a burst of some seconds does not last for minutes
TRIED_BEHIND = 2.0  # a replay is extended by this factor times the time for all workers to prefill the pending prompts
TRIED_LEAST, TRIED_MOST = 256, 2048  # requests of a replay: with fewer it is repeated with other arrival times; maximum
LEARNT = 256  # requests from which the router of a replay learns prefill times and answer lengths
WATCH_EVERY = 5_000  # events

Way = Literal["predicted", "remote", "local"]
"""Which worker computes a prompt. predicted: the one that the router predicts to be faster; remote: a prefill worker;
local: the worker that decodes."""


class AutoscaleLimits(NamedTuple):
    """Autoscaling of the number of workers; the fields are those of `policy.worker_count.ScalingLimits`."""

    least: int
    most: int
    start_s: float
    spare_s: float = 300.0


class Setting(NamedTuple):
    """The parameters of a simulation.

    roles: the initial roles. plan_s: seconds between two evaluations of roles; None: roles are fixed. flip_s: seconds
    in which a worker that switches its role gets no new jobs. horizon_s: seconds over which a change has to pay for
    itself. slow_s: longer inter-token gaps are counted for each request. counted: autoscaling, which needs plan_s;
    None: the number of workers stays that of `roles`.
    """

    model: WorkerModel
    roles: Roles
    targets: Mapping[str, Targets]
    way: Way = "predicted"
    plan_s: float | None = None
    flip_s: float = 5.0
    horizon_s: float = 300.0
    seed: int = 0
    slow_s: float = math.inf
    counted: AutoscaleLimits | None = None


class RequestResult(NamedTuple):
    """The result of one request; first_s is infinite if it never ended. of: its class. slow: the share of its
    inter-token gaps that were longer than `slow_s`."""

    came_s: float
    prompt: int
    cached: int
    output: int
    of: str
    first_s: float
    itl_s: float
    remote: bool
    good: bool
    slow: float = 0.0


class Period(NamedTuple):
    """The fleet has these roles from `at_s` on. why: the reason of the change; empty at the beginning.

    running: workers that are paid for, including those that start or drain.
    """

    at_s: float
    roles: Roles
    why: str
    running: int


class Simulation:
    """One run. Call `run` once with requests sorted by time; then read `ended`, `periods`, `gaps` and the workers."""

    def __init__(self, setting: Setting, watch: Callable[[float], object] | None = None) -> None:
        """watch: called every WATCH_EVERY events with the simulated time in seconds."""
        self.now = 0.0
        self.ended: list[RequestResult] = []
        self.gaps: Counter[int] = Counter()  # number of inter-token gaps, by bin (`worker.gap_ms`)
        self.events = 0
        model, runs, counted = setting.model, setting.roles.workers, setting.counted
        count = runs if counted is None else max(runs, counted.most)
        self.periods = [Period(0.0, setting.roles, "", runs)]
        each: list[Role] = [*_each(setting.roles), *["both" for _ in range(count - runs)]]
        self.workers = [Worker(index, model, role, self.gaps, setting.slow_s) for index, role in enumerate(each)]
        self._off = set(range(runs, count))  # workers that do not run
        self._starting: dict[int, Role] = {}
        self._ending: set[int] = set()  # workers that drain before they stop
        self._looks: list[Look] = []
        self._setting, self._model, self._watch = setting, model, watch
        self._caches = Caches(count, max(1, model.kv_tokens // BLOCK_TOKENS))
        self._pace = LatencyModel(model.steps)
        self._pace.step_tokens = model.step_tokens
        self._busy = [PrefillShare() for _ in self.workers]
        self._draw = random.Random(setting.seed)
        self._given = itertools.count(1)
        self._numbers = itertools.count()
        self._open: dict[int, Played] = {}  # requests that have not ended
        self._heap: list[tuple[float, int, int, int, Played | None]] = []
        self._order = itertools.count()
        self._until: dict[int, Role] = {}  # workers that are switching roles, and their new role
        self._said = 0, 0  # more prefill workers (1) or fewer (-1), and the number of evaluations in a row that gave it
        self._changed_s = 0.0  # time of the last role change, or of the start of the run
        self._tried_s = -math.inf  # time of the last replay in which no other split was better
        self._recent: deque[tuple[float, RequestTokens]] = deque()
        self._pool()

    def run(self, requests: Iterable[TracedRequest]) -> None:
        """Simulate requests, sorted by time, to their end. Those that have not ended PATIENCE_S after the last arrival
        count as unfinished."""
        heap, plan_s, promised = self._heap, self._setting.plan_s, self._setting.targets
        coming = iter(requests)
        request, last = next(coming, None), 0.0
        plan_at = math.inf if plan_s is None else plan_s
        while request is not None or heap:
            at = math.inf if request is None else request.at_s
            soonest = min(heap[0][0] if heap else math.inf, at)
            if request is None and soonest > last + PATIENCE_S:
                break
            if plan_s is not None and plan_at <= soonest:
                self.now = plan_at
                self._look()
                plan_at = math.inf if request is None else plan_at + plan_s
                continue
            self.events += 1
            if self._watch is not None and self.events % WATCH_EVERY == 0:
                self._watch(soonest)
            if request is not None and at == soonest:
                self.now = last = at
                targets = promised.get(request.of) or promised[""]
                number, lengths = next(self._numbers), (request.prompt, request.output)
                self._send(Played(number, at, *lengths, request.of, targets.ttft_s), request)
                request = next(coming, None)
            else:
                self._happen()
        for job in self._open.values():
            self.ended.append(
                RequestResult(
                    job.came, job.prompt, job.cached, job.output, job.of, math.inf, math.inf, job.travels, False
                )
            )

    def learn(self, requests: Sequence[RequestTokens]) -> None:
        """Teach the router the prefill work and answer lengths of these requests, as if it had already routed them."""
        for each in requests[:LEARNT]:
            self._pace.stepped(_of_prompt(each.cached, max(1, each.uncached)), 0.0, 0.0)
            self._pace.answered(each.of, each.output)
        context = sum(each.cached + each.uncached + each.output / 2 for each in requests) / len(requests)
        self._pace.stepped(Work(rows=1, context=context), 0.0, self._model.tokens_per_step)

    def check(self) -> None:
        """Raises AssertionError unless the accounts of caches and workers are consistent."""
        self._caches.check()
        for worker in self.workers:
            worker.check()
            if not self._open:
                assert worker.queue == worker.jobs == worker.outputs == 0, f"{worker.name} still counts jobs or tokens"

    def _happen(self) -> None:
        """Process the next event of the heap."""
        self.now, _, number, version, landed = heapq.heappop(self._heap)
        if number < 0:
            self._changed(-number - 1)
            return
        worker = self.workers[number]
        if landed is not None:
            self._first(landed)
            if landed.output > 1:
                worker.land(landed, self.now)
                self._push(worker)
        elif version == worker.version:
            if (plain := worker.plain) is not None:
                self._pace.stepped(*plain)
            whole, ended = worker.advance()
            for job in whole:
                self._computed(job, worker)
            for job in ended:
                self._end(job)
            self._push(worker)

    # ------------------------------------------------------------------------------------------------------- a request

    def _send(self, job: Played, request: TracedRequest) -> None:
        """Choose the prefill and the decode worker of a request, as `WorkerRegistry.route` does."""
        self._open[job.index] = job
        depths = self._caches.depths(request.blocks)
        here = self._candidates(self._answering, depths, job, request.cached)
        computing = self._computing if job.output > 1 else []
        there = self._candidates(computing, depths, job, request.cached)
        targets = self._setting.targets
        wanted = targets.get(job.of) or targets[""]
        expected = predict(job.prompt, [each[1] for each in (*here, *there)], self._pace, job.of, wanted)
        place, computes = sent(self._setting.way, expected[: len(here)], expected[len(here) :])
        answerer = here[place][0]
        computer = answerer if computes is None else there[computes][0]
        chosen = here[place][1] if computes is None else there[computes][1]
        own_s = expected[place if computes is None else len(here) + computes].own_s
        job.answerer, job.computer = answerer, computer
        job.cached = chosen.cached
        job.work = job.remaining = job.prompt - chosen.cached
        answerer.jobs += 1
        answerer.awaited += computer is not answerer
        answerer.given = next(self._given)
        answerer.outputs += job.output
        computer.queue += job.work
        self._busy[computer.index].add(own_s, self.now)
        for worker in {answerer.index: answerer, computer.index: computer}.values():
            room = self._caches.blocks - worker.outputs // BLOCK_TOKENS
            self._caches.use(worker.index, request.blocks, max(1, room))
        if self._setting.plan_s is not None:
            self._recent.append((self.now, RequestTokens(job.cached, job.work, job.output, job.of)))
        computer.compute(job, self.now)
        self._push(computer)

    def _candidates(
        self, pool: Sequence[Worker], depths: Sequence[CachedPrefix], job: Played, everywhere: int | None
    ) -> list[tuple[Worker, PlacementCandidate]]:
        """The workers of a pool that are considered, each with its state; the one with the oldest last job comes first.
        everywhere: tokens of the prompt that all workers have cached; None: according to the caches."""
        if len(pool) <= EVERYBODY:
            looked_at = sorted(pool, key=lambda worker: worker.given)
        else:
            some = {worker.index: worker for worker in self._draw.sample(pool, SOME)}
            role_bits = self._bits[pool[0].role == "prefill"]
            for depth in reversed(depths):
                holders = depth.workers & role_bits
                while holders and len(some) < 2 * SOME:
                    lowest = holders & -holders
                    holders ^= lowest
                    index = lowest.bit_length() - 1
                    some[index] = self.workers[index]
                if len(some) >= 2 * SOME:
                    break
            looked_at = list(some.values())
        found: list[tuple[Worker, PlacementCandidate]] = []
        caches = self._caches
        waits_s = max((each.queue for each in self._computing), default=0) * self._pace.token_s(self._model.steps)
        for worker in looked_at:
            bit, blocks = 1 << worker.index, 0
            for depth in depths:  # each entry's workers are a subset of the one before
                if not depth.workers & bit:
                    break
                blocks = depth.blocks
            cached = min(blocks * BLOCK_TOKENS if everywhere is None else everywhere, job.prompt - 1)
            free = max(0, (caches.blocks - caches.kept(worker.index)) * BLOCK_TOKENS - worker.queue)
            answers = 0 if worker.role == "prefill" else worker.jobs - worker.awaited
            if worker.awaited:
                answer_s = self._pace.output(job.of) * self._pace.between_s(answers + 1)
                answers = beside(answers, worker.awaited, answer_s, waits_s)
            busy = self._busy[worker.index].share(self.now)
            found.append((worker, PlacementCandidate(worker.name, cached, worker.queue, answers, free, busy)))
        return found

    def _computed(self, job: Played, worker: Worker) -> None:
        worker.queue -= job.work
        if job.travels and job.answerer is not None:
            job.answerer.awaited -= 1
        self._is_over(worker)
        assert job.answerer is not None
        self._pace.stepped(_of_prompt(job.cached, job.work), 0.0, 0.0)
        if job.travels:
            handoff_s = (self._model.handoff_ms + self._model.handoff_token_ms * job.prompt) / 1e3
            event = (self.now + handoff_s, next(self._order), job.answerer.index, 0, job)
            heapq.heappush(self._heap, event)
        else:
            self._first(job)

    def _first(self, job: Played) -> None:
        job.first = self.now
        if job.output == 1 and job.travels:
            self._end(job)

    def _end(self, job: Played) -> None:
        if self._open.pop(job.index, None) is None:
            return
        assert job.answerer is not None
        job.answerer.jobs -= 1
        job.answerer.outputs -= job.output
        self._is_over(job.answerer)
        self._pace.answered(job.of, job.output)
        first_s = job.first - job.came
        itl_s = (self.now - job.first) / (job.output - 1) if job.output > 1 else 0.0
        targets = self._setting.targets
        wanted = targets.get(job.of) or targets[""]
        good = first_s <= wanted.ttft_s and itl_s <= wanted.itl_s
        slow = job.slow * self._model.tokens_per_step / max(1, job.output - 1)
        self.ended.append(
            RequestResult(job.came, job.prompt, job.cached, job.output, job.of, first_s, itl_s, job.travels, good, slow)
        )

    def _push(self, worker: Worker) -> None:
        if worker.wake != math.inf:
            heapq.heappush(self._heap, (worker.wake, next(self._order), worker.index, worker.version, None))

    # ----------------------------------------------------------------------------------------------------------- roles

    def _pool(self) -> None:
        """Update the decode and prefill pools; workers that switch roles or drain get no new jobs."""
        if self._setting.counted is not None:  # with autoscaling, decode workers are "both" without prefill workers
            answers: Role = "decode" if any(worker.role == "prefill" for worker in self._serving) else "both"
            for worker in self._serving:
                worker.role = worker.role if worker.role == "prefill" else answers
        there = [worker for worker in self._serving if worker.index not in self._until]
        self._answering = [worker for worker in there if worker.role != "prefill"]
        self._computing = [worker for worker in there if worker.role == "prefill"]
        if not self._answering:  # at least one worker has to decode: use those that switch roles, or else all
            self._answering = [worker for worker in self._serving if worker.role != "prefill"] or self._serving
        self._bits = {
            role: sum(1 << worker.index for worker in pool)
            for role, pool in ((True, self._computing), (False, self._answering))
        }

    @property
    def _serving(self) -> list[Worker]:
        out = self._off | self._ending | self._starting.keys()
        return [worker for worker in self.workers if worker.index not in out]

    @property
    def _roles(self) -> Roles:
        counts = Counter(worker.role for worker in self._serving)
        return Roles(counts["prefill"], counts["decode"], counts["both"])

    @property
    def _running(self) -> int:
        return len(self.workers) - len(self._off)

    def _look(self) -> None:
        """Choose roles and the number of workers by the recent requests; running requests stay at their workers."""
        setting = self._setting
        while self._recent and self._recent[0][0] < self.now - RECENT_S:
            self._recent.popleft()
        rested = self.now >= self._changed_s + REST_S
        few = len(self._recent) < LEAST_REQUESTS
        stays = bool(self._until) or not rested or few
        if stays and setting.counted is None:
            return
        seconds, now = min(RECENT_S, self.now), self._roles
        traffic = Traffic(len(self._recent) / seconds, [asked for _, asked in self._recent], self._under_way())
        fleet = Chosen(now.workers, self._model, now, setting.flip_s, setting.horizon_s)
        if setting.counted is not None:
            newest_s = NEWEST * RECENT_S
            newest = sum(at > self.now - newest_s for at, _ in self._recent)
            fleet = fleet._replace(peak=rising(traffic.rate, newest, newest_s))
        choice = choose_roles(traffic, fleet, setting.targets)
        if not stays and self.now >= self._tried_s + REST_S and (splits := splits_to_try(choice, now)):
            shares = tried(traffic, self._model, setting.targets, splits)
            by_trial = settled(choice, traffic, fleet, setting.targets, shares)
            way = (by_trial.roles.prefill > now.prefill) - (by_trial.roles.prefill < now.prefill)
            self._said = (way, self._said[1] + 1 if self._said[0] == way else 1)
            if not way:
                self._tried_s = self.now
            elif self._said[1] >= CONFIRM:
                self._said = 0, 0
                self._flip(now, by_trial)
                return
        if setting.counted is not None:
            self._looks.append(Look(self.now, choice.ample))
            self._count(setting.counted, traffic, fleet)

    def _under_way(self) -> list[RequestTokens]:
        """Requests that have not ended, with what is left of them; of a running answer, half is assumed to be left."""
        return [
            RequestTokens(
                job.prompt - job.remaining, job.remaining, job.output if job.first < 0 else job.output // 2, job.of
            )
            for job in self._open.values()
        ]

    def _count(self, counted: AutoscaleLimits, traffic: Traffic, fleet: Chosen) -> None:
        """Start or stop one worker if the number that runs differs from the number wanted (as `autoscaler.py`)."""
        limits = ScalingLimits(counted.least, counted.most, counted.spare_s, counted.start_s)
        del self._looks[: forgotten(self._looks, limits.kept_s, self.now)]
        running = fleet.workers + len(self._starting)
        count = choose_count(self._looks, running, limits, self.now)
        counts = Counter([*(worker.role for worker in self._serving), *self._starting.values()])
        now = Roles(counts["prefill"], counts["decode"], counts["both"])
        if count.workers == running or (count.workers < running and (self._ending or fleet.workers < 2)):
            return
        more = count.workers > running
        wanted = best_roles(traffic, fleet, self._setting.targets, running + (1 if more else -1)).roles
        if more:
            index = min(self._off)
            self._off.discard(index)
            self._starting[index] = role_of_another(now, wanted)
            event = (self.now + counted.start_s, next(self._order), -index - 1, 0, None)
            heapq.heappush(self._heap, event)
            self._tell(count.why)
            return
        fewer_prompts = wanted.prefill < now.prefill
        answering = sum(worker.role != "prefill" for worker in self._serving)
        may = [worker for worker in self._serving if worker.role == "prefill" or answering > 1]
        may = [worker for worker in may if worker.index not in self._until]
        if may:
            worker = min(
                may,
                key=lambda each: ((each.role == "prefill") != fewer_prompts, each.jobs + (each.queue > 0), -each.index),
            )
            self._ending.add(worker.index)
            self._pool()
            self._tell(count.why)
            self._is_over(worker)

    def _is_over(self, worker: Worker) -> None:
        """If `worker` drains and has no more jobs, stop it."""
        if worker.index in self._ending and not worker.jobs and not worker.queue:
            self._ending.discard(worker.index)
            self._off.add(worker.index)
            self._caches.forget(worker.index)
            self._busy[worker.index] = PrefillShare()
            self._tell(f"{worker.name} has ended")

    def _tell(self, why: str) -> None:
        self.periods.append(Period(self.now, self._roles, why, self._running))

    def _flip(self, now: Roles, choice: RoleChoice) -> None:
        wanted = _each(Roles(*(max(0, wants - has) for has, wants in zip(now, choice.roles, strict=True))))
        surplus = Counter(_each(Roles(*(max(0, has - wants) for has, wants in zip(now, choice.roles, strict=True)))))
        for worker in sorted(self._serving, key=lambda each: each.queue + each.jobs):  # the least busy first
            if not surplus[worker.role]:
                continue
            surplus[worker.role] -= 1
            role = wanted.pop()
            if role != "prefill" and worker.role != "prefill":
                worker.role = role  # between "decode" and "both" it need not drain
                continue
            self._until[worker.index] = role
            event = (self.now + self._setting.flip_s, next(self._order), -worker.index - 1, 0, None)
            heapq.heappush(self._heap, event)
        self._changed_s = self.now
        self.periods.append(Period(self.now, choice.roles, choice.why, self._running))
        self._pool()

    def _changed(self, index: int) -> None:
        """A worker has switched its role, or has been started."""
        started = index in self._starting
        self.workers[index].role = (self._starting if started else self._until).pop(index)
        self._pool()
        if started:
            self._tell(f"{self.workers[index].name} takes requests")


def tried(
    traffic: Traffic, model: WorkerModel, targets: Mapping[str, Targets], splits: Sequence[Roles]
) -> dict[Roles, float]:
    """The share of requests that meet their SLO targets with each split of workers, when the requests of `traffic`
    arrive twice. The arrival times are the same for each split.

    A larger fleet is simulated as TRIED_WORKERS workers, with proportionally less traffic. `policy.roles` predicts any
    split in a millisecond, by formulas that do not know how well the router separates prefill from decode; this takes
    about 50 ms.

    Raises ValueError if there is no traffic, or a split has no worker that decodes.
    """
    if not traffic.rate or not traffic.requests:
        raise ValueError("no traffic: the rate is 0 or there are no requests")
    found: dict[Roles, float] = {}
    played: dict[Roles, float] = {}
    for roles in splits:
        if not roles.decode + roles.both:
            raise ValueError(f"no worker decodes with {roles}")
        some = _smaller(roles)
        if some not in played:
            played[some] = _good(traffic, some.workers / roles.workers, model, targets, some)
        found[roles] = played[some]
    return found


def _good(traffic: Traffic, part: float, model: WorkerModel, targets: Mapping[str, Targets], roles: Roles) -> float:
    """The share of requests that meet their SLO targets, with the fraction `part` of the traffic."""
    good: list[bool] = []
    for seed in itertools.count(1):
        simulation = Simulation(Setting(model, roles, targets))
        simulation.learn(traffic.requests)
        simulation.run(_requests(traffic, part, model, roles.workers, seed))
        good += [each.good for each in simulation.ended if each.came_s]
        if len(good) >= TRIED_LEAST:
            break
    return sum(good) / len(good)


def _requests(traffic: Traffic, part: float, model: WorkerModel, workers: int, seed: int) -> Iterator[TracedRequest]:
    """The fraction `part` of the running requests, at time 0; then the recent requests in their order, with random
    (Poisson) arrival times at `part` of their rate. A large backlog extends the replay, or else splits that clear the
    backlog soonest would gain nothing."""
    behind_ms = 0.0
    for each in traffic.under_way[:: max(1, round(1 / part))][:TRIED_MOST]:  # more would be a backlog for long anyway
        behind_ms += model.steps.prompt_ms(each.cached, each.uncached, model.step_tokens)
        yield _request(0.0, each)
    draw, at_s, rate = random.Random(seed), 0.0, part * traffic.rate
    behind = rate * TRIED_BEHIND * behind_ms / 1e3 / workers
    count = min(TRIED_MOST, math.ceil(TRIED_TIMES * part * len(traffic.requests) + behind))
    for each in itertools.islice(itertools.cycle(traffic.requests), count):
        at_s += draw.expovariate(rate)
        yield _request(at_s, each)


def sent(way: Way, here: Sequence[PredictedPlacement], there: Sequence[PredictedPlacement]) -> tuple[int, int | None]:
    """The indexes of the decode worker in `here`, and of the prefill worker in `there`; None: the decode worker."""
    match way:
        case "predicted":
            return apart(here, there)
        case "local":
            return cheapest(here), None
        case "remote":
            if not there:
                return cheapest(here), None
            few = min(range(len(here)), key=lambda place: (here[place].answers, here[place].uncached_tokens))
            return few, cheapest(there)


def _of_prompt(cached: int, uncached: int) -> Work:
    """The work of a prompt's steps."""
    return Work(prompt=uncached, pairs=pairs_of(cached, uncached), expanded=expanded_of(cached, uncached))


def _request(at_s: float, asked: RequestTokens) -> TracedRequest:
    prompt, output = asked.cached + max(1, asked.uncached), max(1, asked.output)
    return TracedRequest(at_s, prompt, output, (), asked.of, asked.cached)


def _smaller(roles: Roles) -> Roles:
    """The split scaled down to at most TRIED_WORKERS workers."""
    if roles.workers <= TRIED_WORKERS:
        return roles
    if not roles.prefill:
        return Roles(both=TRIED_WORKERS)
    prefill = min(max(1, round(roles.prefill * TRIED_WORKERS / roles.workers)), TRIED_WORKERS - 1)
    return Roles(prefill=prefill, decode=TRIED_WORKERS - prefill)


def _each(roles: Roles) -> list[Role]:
    """One role per worker."""
    named: tuple[Role, Role, Role] = ("prefill", "decode", "both")
    return [role for role, count in zip(named, roles, strict=True) for _ in range(count)]
