"""A fleet on a trace, by events: requests come, are sent, are played, and keep their targets or do not.

What is the product's: `route.choose` (`predict`, `apart`) says where a request goes, by what `route.pace` has learned,
`tune.roles.choose_roles` which roles workers have, where they are not fixed, and `tune.count.choose_count` how many
run. Before roles change others are tried (`tried`): what came lately is played with each. What is played: workers
(`worker.py`), caches (`caches.py`) and handoffs (a time for each token). In a pool of more than EVERYBODY workers not
all are looked at for each request, but those that have most of the prompt, and a few at random.
"""

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from redline.route.choose import Candidate, Predicted, apart, beside, cheapest, predict
from redline.route.pace import Busy, Pace
from redline.simulate.caches import Caches, Depth
from redline.simulate.traces import BLOCK_TOKENS, Request
from redline.simulate.worker import Played, Worker
from redline.tune.count import NEWEST, Limits, Look, choose_count, forgotten, rising, role_of_another
from redline.tune.expected import Asked, Roles, Traffic, WorkerModel
from redline.tune.pairs import Work, expanded_of, pairs_of
from redline.tune.roles import Choice, best_roles, choose_roles, settled, splits_to_try
from redline.tune.roles import Fleet as Chosen
from redline.tune.targets import Targets
from redline.wire.news import Role

EVERYBODY = 16  # workers of a pool, up to which each is looked at for every request
SOME = 4  # otherwise: of those that have most of the prompt, and of all at random
PATIENCE_S = 600.0  # behind the last request: who has not ended by then never does
RECENT_S = 60.0  # of requests, by which roles are chosen
REST_S = 30.0  # between two changes, at least
CONFIRM = 2  # looks in a row that say the same, before anything changes: these three as [steer] of a server has them
LEAST_REQUESTS = 50  # of these
TRIED_WORKERS = EVERYBODY  # of a fleet that is played to try its roles, at most
TRIED_TIMES = 2  # what came is played behind itself: a rush of some seconds for no minutes
TRIED_BEHIND = 2.0  # times what computing the prompts under way takes all workers, that it is played for longer
TRIED_LEAST, TRIED_MOST = 256, 2048  # requests: of few it is played anew, with other times between them
LEARNT = 256  # requests, by which its router knows how long prompts take and answers become
WATCH_EVERY = 5_000  # events

Way = Literal["predicted", "remote", "local"]
"""Where prompts are computed: where the router expects less, by the workers for prompts, or where answers are."""


class Counted(NamedTuple):
    """How many workers run, where that follows the traffic; the fields as in `tune.count.Limits`."""

    least: int
    most: int
    start_s: float
    spare_s: float = 300.0


class Setting(NamedTuple):
    """What is simulated. plan_s: how often roles are chosen anew; None: they stay. flip_s: a worker that changes its
    role gets nothing new for so long. horizon_s: over which a change has to pay. slow_s: longer gaps between two tokens
    are counted for each request. counted: how many workers run, with plan_s; None: as many as have `roles`, with which
    it begins."""

    model: WorkerModel
    roles: Roles
    targets: Mapping[str, Targets]
    way: Way = "predicted"
    plan_s: float | None = None
    flip_s: float = 5.0
    horizon_s: float = 300.0
    seed: int = 0
    slow_s: float = math.inf
    counted: Counted | None = None


class Ended(NamedTuple):
    """One request, once it has ended, or never did (first_s is infinite). of: its class. slow: the share of the gaps
    between its tokens that were longer than the setting's `slow_s`."""

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
    """From a time on the fleet has these roles. why: what was said of it; empty: at the beginning.

    running: workers that are paid for, those that start or end included.
    """

    at_s: float
    roles: Roles
    why: str
    running: int


class Simulation:
    """One run. Give it requests by time once, with `run`; then read `ended`, `periods`, `gaps` and the workers."""

    def __init__(self, setting: Setting, watch: Callable[[float], object] | None = None) -> None:
        """watch: called now and then with the time that has been simulated, in seconds."""
        self.now = 0.0
        self.ended: list[Ended] = []
        self.gaps: Counter[int] = Counter()  # milliseconds between two tokens, by class
        self.events = 0
        model, runs, counted = setting.model, setting.roles.workers, setting.counted
        count = runs if counted is None else max(runs, counted.most)
        self.periods = [Period(0.0, setting.roles, "", runs)]
        each: list[Role] = [*_each(setting.roles), *["both" for _ in range(count - runs)]]
        self.workers = [Worker(index, model, role, self.gaps, setting.slow_s) for index, role in enumerate(each)]
        self._off = set(range(runs, count))  # workers that do not run
        self._starting: dict[int, Role] = {}
        self._ending: set[int] = set()  # workers that write what they have, and run no more then
        self._looks: list[Look] = []
        self._setting, self._model, self._watch = setting, model, watch
        self._caches = Caches(count, max(1, model.kv_tokens // BLOCK_TOKENS))
        self._pace = Pace(model.steps)
        self._pace.step_tokens = model.step_tokens
        self._busy = [Busy() for _ in self.workers]
        self._draw = random.Random(setting.seed)
        self._given = itertools.count(1)
        self._numbers = itertools.count()
        self._open: dict[int, Played] = {}  # requests that have not ended
        self._heap: list[tuple[float, int, int, int, Played | None]] = []
        self._order = itertools.count()
        self._until: dict[int, Role] = {}  # workers that change their role, and to which
        self._said = 0, 0  # more workers for prompts (1) or fewer (-1), and in how many looks in a row
        self._changed_s = 0.0  # when roles changed last, or the run began
        self._tried_s = -math.inf  # when others were tried last, and none was better
        self._recent: deque[tuple[float, Asked]] = deque()
        self._pool()

    def run(self, requests: Iterable[Request]) -> None:
        """Plays requests, which come by time, to their end. What has not ended PATIENCE_S after the last never does."""
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
                Ended(job.came, job.prompt, job.cached, job.output, job.of, math.inf, math.inf, job.travels, False)
            )

    def learn(self, requests: Sequence[Asked]) -> None:
        """The router knows from the beginning what these are like, as one does that has been routing them."""
        for each in requests[:LEARNT]:
            self._pace.stepped(_of_prompt(each.cached, max(1, each.uncached)), 0.0, 0.0)
            self._pace.answered(each.of, each.output)
        context = sum(each.cached + each.uncached + each.output / 2 for each in requests) / len(requests)
        self._pace.stepped(Work(rows=1, context=context), 0.0, self._model.tokens_per_step)

    def check(self) -> None:
        """Raises AssertionError unless the books of caches and workers are right."""
        self._caches.check()
        for worker in self.workers:
            worker.check()
            if not self._open:
                assert worker.queue == worker.jobs == worker.outputs == 0, f"{worker.name} is owed something"

    def _happen(self) -> None:
        """The next event of the heap."""
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

    def _send(self, job: Played, request: Request) -> None:
        """Who computes it and who answers, as `route.links.Links.route` does it."""
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
            self._recent.append((self.now, Asked(job.cached, job.work, job.output, job.of)))
        computer.compute(job, self.now)
        self._push(computer)

    def _candidates(
        self, pool: Sequence[Worker], depths: Sequence[Depth], job: Played, everywhere: int | None
    ) -> list[tuple[Worker, Candidate]]:
        """Those of a pool that are looked at, and what is known of each; first the one whose last job is the oldest.
        everywhere: tokens of the prompt that all have; None: as the caches say."""
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
        found: list[tuple[Worker, Candidate]] = []
        caches = self._caches
        waits_s = max((each.queue for each in self._computing), default=0) * self._pace.token_s(self._model.steps)
        for worker in looked_at:
            bit, blocks = 1 << worker.index, 0
            for depth in depths:  # each one's workers are among those before
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
            found.append((worker, Candidate(worker.name, cached, worker.queue, answers, free, busy)))
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
            Ended(job.came, job.prompt, job.cached, job.output, job.of, first_s, itl_s, job.travels, good, slow)
        )

    def _push(self, worker: Worker) -> None:
        if worker.wake != math.inf:
            heapq.heappush(self._heap, (worker.wake, next(self._order), worker.index, worker.version, None))

    # ----------------------------------------------------------------------------------------------------------- roles

    def _pool(self) -> None:
        """Who answers and who computes prompts for others; those that change their role, or end, get nothing new."""
        if self._setting.counted is not None:  # one more or one less decides whether those that answer do both
            answers: Role = "decode" if any(worker.role == "prefill" for worker in self._serving) else "both"
            for worker in self._serving:
                worker.role = worker.role if worker.role == "prefill" else answers
        there = [worker for worker in self._serving if worker.index not in self._until]
        self._answering = [worker for worker in there if worker.role != "prefill"]
        self._computing = [worker for worker in there if worker.role == "prefill"]
        if not self._answering:  # as many as there are: somebody has to
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
        """Roles, and how many run, by what has come lately; what is under way ends where it is."""
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

    def _under_way(self) -> list[Asked]:
        """Of an answer that is written half is taken to be left."""
        return [
            Asked(job.prompt - job.remaining, job.remaining, job.output if job.first < 0 else job.output // 2, job.of)
            for job in self._open.values()
        ]

    def _count(self, counted: Counted, traffic: Traffic, fleet: Chosen) -> None:
        """One worker is started, or one ends, where so many are to run (as `fleet/spares.py` does it)."""
        limits = Limits(counted.least, counted.most, counted.spare_s, counted.start_s)
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
        """One that is to run no more has ended what it had."""
        if worker.index in self._ending and not worker.jobs and not worker.queue:
            self._ending.discard(worker.index)
            self._off.add(worker.index)
            self._caches.forget(worker.index)
            self._busy[worker.index] = Busy()
            self._tell(f"{worker.name} has ended")

    def _tell(self, why: str) -> None:
        self.periods.append(Period(self.now, self._roles, why, self._running))

    def _flip(self, now: Roles, choice: Choice) -> None:
        wanted = _each(Roles(*(max(0, wants - has) for has, wants in zip(now, choice.roles, strict=True))))
        surplus = Counter(_each(Roles(*(max(0, has - wants) for has, wants in zip(now, choice.roles, strict=True)))))
        for worker in sorted(self._serving, key=lambda each: each.queue + each.jobs):  # the least busy first
            if not surplus[worker.role]:
                continue
            surplus[worker.role] -= 1
            role = wanted.pop()
            if role != "prefill" and worker.role != "prefill":
                worker.role = role  # it goes on as it is
                continue
            self._until[worker.index] = role
            event = (self.now + self._setting.flip_s, next(self._order), -worker.index - 1, 0, None)
            heapq.heappush(self._heap, event)
        self._changed_s = self.now
        self.periods.append(Period(self.now, choice.roles, choice.why, self._running))
        self._pool()

    def _changed(self, index: int) -> None:
        """A worker is in its new role, or has been started."""
        started = index in self._starting
        self.workers[index].role = (self._starting if started else self._until).pop(index)
        self._pool()
        if started:
            self._tell(f"{self.workers[index].name} takes requests")


def tried(
    traffic: Traffic, model: WorkerModel, targets: Mapping[str, Targets], splits: Sequence[Roles]
) -> dict[Roles, float]:
    """Of the requests of `traffic`, as they come twice, the share that is good with each split of workers. To each of
    them they come at the same times.

    A large fleet is played as TRIED_WORKERS, with as much less traffic. `tune.roles` predicts any split in a
    millisecond, by formulas that do not know how well the router keeps prompts from answers; this takes some 50.

    Raises ValueError where nothing comes, or a split has nobody who answers.
    """
    if not traffic.rate or not traffic.requests:
        raise ValueError("nothing comes")
    found: dict[Roles, float] = {}
    played: dict[Roles, float] = {}
    for roles in splits:
        if not roles.decode + roles.both:
            raise ValueError(f"nobody answers with {roles}")
        some = _smaller(roles)
        if some not in played:
            played[some] = _good(traffic, some.workers / roles.workers, model, targets, some)
        found[roles] = played[some]
    return found


def _good(traffic: Traffic, part: float, model: WorkerModel, targets: Mapping[str, Targets], roles: Roles) -> float:
    """Of such a part of what comes, the share that is good."""
    good: list[bool] = []
    for seed in itertools.count(1):
        simulation = Simulation(Setting(model, roles, targets))
        simulation.learn(traffic.requests)
        simulation.run(_requests(traffic, part, model, roles.workers, seed))
        good += [each.good for each in simulation.ended if each.came_s]
        if len(good) >= TRIED_LEAST:
            break
    return sum(good) / len(good)


def _requests(traffic: Traffic, part: float, model: WorkerModel, workers: int, seed: int) -> Iterator[Request]:
    """Of what is under way such a part, at once; then what came, in its order, by chance, so much less often. It comes
    for longer where much is under way, or roles that end a backlog soonest would seem to be worth nothing."""
    behind_ms = 0.0
    for each in traffic.under_way[:: max(1, round(1 / part))][:TRIED_MOST]:  # more than that is behind for long
        behind_ms += model.steps.prompt_ms(each.cached, each.uncached, model.step_tokens)
        yield _request(0.0, each)
    draw, at_s, rate = random.Random(seed), 0.0, part * traffic.rate
    behind = rate * TRIED_BEHIND * behind_ms / 1e3 / workers
    count = min(TRIED_MOST, math.ceil(TRIED_TIMES * part * len(traffic.requests) + behind))
    for each in itertools.islice(itertools.cycle(traffic.requests), count):
        at_s += draw.expovariate(rate)
        yield _request(at_s, each)


def sent(way: Way, here: Sequence[Predicted], there: Sequence[Predicted]) -> tuple[int, int | None]:
    """Who of `here` answers, and who of `there` computes the prompt; None: whoever answers."""
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
    """What the steps of a prompt compute."""
    return Work(prompt=uncached, pairs=pairs_of(cached, uncached), expanded=expanded_of(cached, uncached))


def _request(at_s: float, asked: Asked) -> Request:
    prompt, output = asked.cached + max(1, asked.uncached), max(1, asked.output)
    return Request(at_s, prompt, output, (), asked.of, asked.cached)


def _smaller(roles: Roles) -> Roles:
    """The same split of TRIED_WORKERS at most."""
    if roles.workers <= TRIED_WORKERS:
        return roles
    if not roles.prefill:
        return Roles(both=TRIED_WORKERS)
    prefill = min(max(1, round(roles.prefill * TRIED_WORKERS / roles.workers)), TRIED_WORKERS - 1)
    return Roles(prefill=prefill, decode=TRIED_WORKERS - prefill)


def _each(roles: Roles) -> list[Role]:
    """The role of each worker."""
    named: tuple[Role, Role, Role] = ("prefill", "decode", "both")
    return [role for role, count in zip(named, roles, strict=True) for _ in range(count)]
