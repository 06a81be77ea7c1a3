"""What one name may use: requests in a second, requests at once, tokens in a minute and in a day.

Tokens are paid for afterwards. A prompt is charged when it is admitted and each generated token when it comes, so an
account may go into debt by what its running requests still generate; it is refused while it cannot pay for the prompt.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

from redline import clock
from redline.api.config import DEFAULT_SLA, KeyLimits
from redline.api.errors import Refusal
from redline.api.passage import Passage
from redline.wire.replicas import OfKey

BUSY_RETRY_S = 1.0  # where a place is free once another request ends, which nobody can foresee


class LimitReached(Refusal):
    """A request that is refused (429) because its key has used up one of its limits; `retry_s` says when it has not."""

    def __init__(self, name: str, limit: str, most: float, retry_s: float) -> None:
        super().__init__(429, f"the key {name} has reached its limit: {limit} is {most:g}", "rate_limit_exceeded")
        self.limit = limit
        self.retry_s = retry_s


class Bucket:
    """So many units in so many seconds: it is full at first, fills evenly by `per_s`, and may be in debt."""

    def __init__(self, most: float, seconds: float, now: float) -> None:
        self.most = max(most, 1.0)
        self.per_s = most / seconds
        self._level = self.most
        self._at = now

    def level(self, now: float) -> float:
        """Units that can be taken now; negative where more has been taken than there was."""
        self._level = min(self.most, self._level + (now - self._at) * self.per_s)
        self._at = now
        return self._level

    def wait_s(self, units: float, now: float) -> float:
        """Seconds until `units` can be taken, 0 where they can be now; until it is full, for more than it holds."""
        return max(0.0, (min(units, self.most) - self.level(now)) / self.per_s)

    def take(self, units: float) -> None:
        """Take units, whether they are there or not."""
        self._level -= units


class Account:
    """What requests under one name use. `tokens` and `requests` count since the server started."""

    def __init__(self, name: str, limits: KeyLimits, clock: Callable[[], float] = clock.monotonic) -> None:
        self.name = name
        self.sla = DEFAULT_SLA  # the class of its requests
        self.running = 0  # requests
        self.requests = 0
        self.tokens = 0  # of prompts and answers
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        self._elsewhere: dict[str, OfKey] = {}  # what other replicas of the API have said last
        self.limit(limits)

    def limit(self, limits: KeyLimits) -> None:
        """From now on these limits hold. A quota whose number has not changed goes on from where it is."""
        before = self._buckets
        self.limits = limits
        self._buckets = {}
        for name, seconds in (("requests_per_s", 1.0), ("tokens_per_minute", 60.0), ("tokens_per_day", 86400.0)):
            most: float | None = getattr(limits, name)
            if most is not None:
                old = before.get(name)
                if old is None or old.per_s != most / seconds:
                    old = Bucket(most, seconds, self._clock())
                self._buckets[name] = old

    @contextmanager
    def request(self) -> Generator[None]:
        """While inside, a request runs. Raises LimitReached, before it costs anything."""
        most = self.limits.concurrency
        if most is not None and self.running + sum(other.running for other in self._elsewhere.values()) >= most:
            raise LimitReached(self.name, "concurrency", most, BUSY_RETRY_S)
        self._check("requests_per_s", 1.0)
        if (rate := self._buckets.get("requests_per_s")) is not None:
            rate.take(1.0)
        self.requests += 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def check_tokens(self, tokens: int) -> None:
        """Raises LimitReached where a prompt of so many tokens (0: of any length) cannot be paid for now."""
        for name in ("tokens_per_minute", "tokens_per_day"):
            self._check(name, max(tokens, 1))

    def charge(self, tokens: int) -> None:
        """Pay for tokens that were admitted or generated."""
        self.tokens += tokens
        for name in ("tokens_per_minute", "tokens_per_day"):
            if (bucket := self._buckets.get(name)) is not None:
                bucket.level(self._clock())
                bucket.take(tokens)

    def heard(self, replica: str, use: OfKey) -> None:
        """Take in what another replica of the API says of the same name. What was used there is missing here too; where
        one is heard of for the first time, whoever has less left is right."""
        before = self._elsewhere.get(replica)
        self._elsewhere[replica] = use
        now = self._clock()
        for name, bucket in self._buckets.items():
            if before is None:
                bucket.take(max(0.0, bucket.level(now) - use.left.get(name, math.inf)))
            elif name == "requests_per_s":
                bucket.take(use.requests - before.requests)
            else:
                bucket.take(use.tokens - before.tokens)

    def forget(self, replica: str) -> None:
        """Another replica of the API has ended, with all that ran there."""
        self._elsewhere.pop(replica, None)

    def left(self) -> dict[str, float]:
        """What can be taken now of each limit that fills with time, by its name."""
        now = self._clock()
        return {name: round(bucket.level(now), 3) for name, bucket in self._buckets.items()}

    def _check(self, name: str, units: float) -> None:
        bucket = self._buckets.get(name)
        if bucket is not None and (wait := bucket.wait_s(units, self._clock())) > 0:
            raise LimitReached(self.name, name, getattr(self.limits, name), wait)


class Caller(msgspec.Struct, frozen=True):
    """Who a request comes from, and until when its answer is of use."""

    request_id: str = ""
    account: Account | None = None  # None: no keys are asked for
    began: float = 0.0  # as time.monotonic tells
    timeout_s: float | None = None  # from there to the last token
    passage: Passage | None = None  # where it is noted what was done for it

    @property
    def sla(self) -> str:
        """The class of its request."""
        return DEFAULT_SLA if self.account is None else self.account.sla


CALLER: ContextVar[Caller] = ContextVar("CALLER", default=Caller())  # noqa: B039  (it is frozen)
"""Of the request that the current task serves: routes and dialects need not hand it through."""


class ServedRate:
    """Prompt tokens that got their first token, by the second, while any waited; the last minute or so counts."""

    LASTING_S = 60.0
    LEAST_S, MOST_S = 1.0, 600.0  # what a client may be told

    def __init__(self, clock: Callable[[], float] = clock.monotonic) -> None:
        self._clock = clock
        self._since = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def begins(self) -> None:
        """Something waits, and before nothing did."""
        self._since = self._clock()

    def served(self, tokens: int) -> None:
        """So many tokens wait no more."""
        now = self._clock()
        passed, self._since = now - self._since, now
        kept = math.exp(-passed / self.LASTING_S)
        self._seconds = kept * self._seconds + passed
        self._tokens = kept * self._tokens + tokens

    @property
    def per_s(self) -> float:
        """Tokens; 0 where nothing has been measured."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def retry_s(self, tokens: int) -> float:
        """Seconds until so many tokens have been served, within LEAST_S and MOST_S."""
        rate = self.per_s
        return min(self.MOST_S, max(self.LEAST_S, tokens / rate)) if rate > 0 else self.LEAST_S
