"""How much of their prompts several workers compute, by how jobs are sent to them.

    python -m redline.bench.runs.routing [--workers 4] [--conversations 300] [--every 0.3] [--seed 1] [--save FILE]

Conversations of several turns come to workers that are played: each has a real prefix cache over a real pool of pages,
computes prompts one after another at a fixed pace, and writes its answers beside. Who gets a job is chosen in turn, by
the fewest jobs, or by `route.links.Links.route` as in the server, from the same news of caches and first tokens. The
least that can be computed is what one worker with a cache without end would. Time is counted, not waited for.
"""

import argparse
import heapq
import itertools
import json
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redline import clock
from redline.bench.program import count, output, program
from redline.bench.record import provenance
from redline.chat.hashing import make_job
from redline.plan.pages import PagePool
from redline.plan.prefix import PrefixCache
from redline.route.choose import cheapest, predict
from redline.route.links import Link, Links, Route
from redline.tune.pairs import Work, expanded_of, pairs_of
from redline.tune.steps import StepModel
from redline.wire.channel import MemoryChannel
from redline.wire.job import PAGE_TOKENS, Job, JobId, PageHash, PageId, Sampling
from redline.wire.news import Cached, Ready

STEPS = StepModel(base=10.0, prompt=0.08)  # of 512 positions: 10,000 tokens of prompts a second
ANSWER_S = 1e-3 * STEPS.base  # between two tokens of an answer
STEP_TOKENS = 512
THINK_S = 20.0  # between an answer and the next question, on average
POLICIES = "in turn", "fewest jobs", "by cost"


@dataclass
class Conversation:
    """Its turns are known before it begins: (the tokens that are asked, those that are answered)."""

    begins_s: float
    turns: list[tuple[tuple[int, ...], tuple[int, ...]]]
    said: tuple[int, ...] = ()


def conversations(how_many: int, every_s: float, seed: int) -> list[Conversation]:
    """Of 2 to 10 turns behind one of five system prompts of 1,000 tokens; one begins every so many seconds."""
    draw = random.Random(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(100_000) for _ in range(draw.randint(least, most)))

    systems = [tokens(1000, 1000) for _ in range(5)]
    found: list[Conversation] = []
    now = 0.0
    for _ in range(how_many):
        now += draw.expovariate(1 / every_s)
        turns = [(tokens(50, 600), tokens(50, 400)) for _ in range(draw.randint(2, 10))]
        turns[0] = draw.choice(systems) + turns[0][0], turns[0][1]
        found.append(Conversation(now, turns))
    return found


@dataclass
class Worker:
    """A played worker: prompts one after another, answers beside."""

    link: Link
    cache: PrefixCache
    pool: PagePool
    waiting: deque[tuple[Job, Route, Callable[[float, int], None]]] = field(default_factory=deque)
    busy: bool = False
    told: int = 0
    computed: int = 0  # tokens

    def fill(self, pages: Sequence[PageHash], held: list[PageId]) -> None:
        """Remembers pages of a prompt or answer behind those that are held, as far as there is room."""
        for number in range(len(held), len(pages)):
            if not self.pool.free:
                if not self.pool.idle:
                    return
                self.cache.evict(1)
            (page,) = self.pool.take(1)
            self.cache.insert(pages[number], page, pages[number - 1] if number else None, exact=True)
            held.append(page)

    def news(self) -> Cached:
        """What it tells of its cache."""
        stored, removed = self.cache.changes()
        self.told += 1
        return Cached(number=self.told, stored=tuple(stored), removed=tuple(removed), whole=self.told == 1)


class Fleet:
    """Workers, and what happens at them, by time."""

    def __init__(self, workers: int, pages: int, policy: str) -> None:
        self.now = 0.0
        self.first_token_s: list[float] = []
        self.chosen_s: list[float] = []
        self._policy = policy
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._turn = itertools.count()
        self.links = Links(lambda: self.now)
        self.workers: dict[str, Worker] = {}
        for number in range(workers):
            link = Link(f"worker-{number}", MemoryChannel())
            self.links.join(link)
            self.links.speaks(link, Ready(max_model_len=1 << 20, pages=pages, fingerprint="played", summary=""))
            pool = PagePool(pages)
            self.workers[link.name] = Worker(link, PrefixCache(pool), pool)

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Something is to happen at that time."""
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def run(self) -> None:
        """Until nothing is to happen any more."""
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def ask(self, talk: Conversation, number: int) -> None:
        """A turn of a conversation, and then the next."""
        asked, answered = talk.turns[number]
        prompt = talk.said + asked
        job = make_job(JobId(f"{id(talk)}.{number}"), prompt, Sampling(max_tokens=len(answered)), "played")
        began = self.now

        def ended(at: float) -> None:
            talk.said = prompt + answered
            if number + 1 < len(talk.turns):
                think_s = random.Random(f"{talk.begins_s} {number}").expovariate(1 / THINK_S)
                self.at(at + think_s, lambda: self.ask(talk, number + 1))

        counted = clock.perf_counter()
        route = self._route(job)
        self.chosen_s.append(clock.perf_counter() - counted)
        worker = self.workers[route.link.name]
        self.links.sent(route, job)

        def first(at: float, cached: int) -> None:
            self.first_token_s.append(at - began)
            for begins in range(cached, len(prompt), STEP_TOKENS):
                tokens = min(STEP_TOKENS, len(prompt) - begins)
                step = Work(prompt=tokens, pairs=pairs_of(begins, tokens), expanded=expanded_of(begins, tokens))
                self.links.pace.stepped(step, STEPS.step_ms(step) / 1e3, 0)
            self.links.pace.stepped(Work(rows=worker.link.jobs), ANSWER_S, worker.link.jobs)
            self.links.computed(route, job.id)
            whole = make_job(job.id, prompt + answered, job.sampling, "played").pages

            def told() -> None:
                held = worker.cache.match(whole)
                worker.cache.use(held, of_tokens=0)
                worker.fill(whole, held)
                for page in held:
                    worker.cache.release(page)
                self.links.cached(worker.link, worker.news())
                worker.link.jobs -= 1
                self.links.pace.answered("", len(answered))
                ended(self.now)

            self.at(at + len(answered) * ANSWER_S, told)

        worker.waiting.append((job, route, first))
        if not worker.busy:
            self._compute(worker)

    def _compute(self, worker: Worker) -> None:
        if not worker.waiting:
            worker.busy = False
            return
        worker.busy = True
        job, _, first = worker.waiting.popleft()
        held = worker.cache.match(job.pages[: (len(job.tokens) - 1) // PAGE_TOKENS])
        cached = len(held) * PAGE_TOKENS
        worker.cache.use(held, of_tokens=len(job.tokens))
        worker.computed += len(job.tokens) - cached

        def done() -> None:
            worker.fill(job.pages, held)
            for page in held:
                worker.cache.release(page)
            self.links.cached(worker.link, worker.news())
            first(self.now, cached)
            self._compute(worker)

        self.at(self.now + STEPS.prompt_ms(cached, len(job.tokens) - cached, STEP_TOKENS) / 1e3, done)

    def _route(self, job: Job) -> Route:
        if self._policy == "by cost":
            route = self.links.route(job)
            assert route is not None
            return route
        links = [worker.link for worker in self.workers.values()]
        link = (
            links[next(self._turn) % len(links)]
            if self._policy == "in turn"
            else min(links, key=lambda each: each.jobs)
        )
        expected = predict(len(job.tokens), [self.links.candidate(link, job, {})], self.links.pace)
        return Route(link, None, expected[cheapest(expected)])


def least(talks: Sequence[Conversation]) -> tuple[int, int]:
    """(tokens that one worker with a cache without end computes, tokens of all prompts)."""
    known: set[PageHash] = set()
    computed = every = 0
    for talk in talks:
        said: tuple[int, ...] = ()
        for asked, answered in talk.turns:
            prompt = said + asked
            pages = make_job(JobId("-"), prompt, Sampling(max_tokens=1), "played").pages
            usable = pages[: (len(prompt) - 1) // PAGE_TOKENS]
            cached = sum(1 for _ in itertools.takewhile(known.__contains__, usable)) * PAGE_TOKENS
            computed, every = computed + len(prompt) - cached, every + len(prompt)
            said = prompt + answered
            known.update(make_job(JobId("-"), said, Sampling(max_tokens=1), "played").pages)
    return computed, every


def measured(asked: argparse.Namespace, policy: str) -> dict[str, Any]:
    """What the same conversations make the workers compute."""
    talks = conversations(asked.conversations, asked.every, asked.seed)
    fleet = Fleet(asked.workers, asked.pages, policy)
    for talk in talks:
        fleet.at(talk.begins_s, lambda talk=talk: fleet.ask(talk, 0))
    fleet.run()
    computed = [worker.computed for worker in fleet.workers.values()]
    ordered = sorted(fleet.first_token_s)
    return {
        "computed_tokens": sum(computed),
        "most_of_one_worker": round(max(computed) / sum(computed), 3),
        "first_token_s": {
            "mean": round(statistics.fmean(ordered), 4),
            "p99": round(ordered[int(0.99 * len(ordered))], 4),
        },
        "choosing_us": round(1e6 * statistics.fmean(fleet.chosen_s), 1),
    }


def arguments() -> argparse.ArgumentParser:
    """The flags of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=count, default=4)
    parser.add_argument("--pages", type=count, default=4096, help="of each worker, 64 tokens each")
    parser.add_argument("--conversations", type=count, default=300)
    parser.add_argument("--every", type=float, default=0.3, help="seconds between two that begin, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=output, default="runs/routing.json")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Runs the program with `words` in place of the command line's, and writes JSON."""
    asked = arguments().parse_args(words)
    computed, every = least(conversations(asked.conversations, asked.every, asked.seed))
    results: dict[str, dict[str, Any]] = {}
    for policy in POLICIES:
        results[policy] = found = measured(asked, policy)
        found["of_the_least"] = round(found["computed_tokens"] / computed, 3)
        print(f"{policy}: {json.dumps(found)}", flush=True)
    record = {
        **provenance(),
        "workers": asked.workers,
        "pages": asked.pages,
        "conversations": asked.conversations,
        "every_s": asked.every,
        "seed": asked.seed,
        "prompt_tokens": every,
        "least_tokens": computed,
        "policies": results,
    }
    asked.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    program(main)
