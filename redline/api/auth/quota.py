"""Rate limits of one key name: requests per second, concurrent requests, tokens per minute and per day.

Tokens are charged after the fact: a prompt when it is admitted, each generated token when it arrives. So an account may
go into debt by the tokens that its running requests still generate; new requests are rejected while the account cannot
pay for the prompt.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

from redline import clock
from redline.api.config import DEFAULT_SLA, KeyLimits
from redline.api.errors import Refusal
from redline.api.telemetry.request_span import RequestSpan
from redline.messages.replicas import OfKey

BUSY_RETRY_S = 1.0  # seconds, at the concurrency limit: it is unknown when a running request will end


class LimitReached(Refusal):
    """A request rejected with 429 because its key has reached a limit; retry after `retry_s` seconds."""

    def __init__(self, name: str, limit: str, most: float, retry_s: float) -> None:
        super().__init__(429, f"the key {name} has reached its rate limit: {limit} is {most:g}", "rate_limit_exceeded")
        self.limit = limit
        self.retry_s = retry_s


class TokenBucket:
    """Token bucket of `most` units per `seconds`: starts full, refills at `per_s`, and may be in debt."""

    def __init__(self, most: float, seconds: float, now: float) -> None:
        self.most = max(most, 1.0)
        self.per_s = most / seconds
        self._level = self.most
        self._at = now

    def level(self, now: float) -> float:
        """Units available now; negative if more were taken than available."""
        self._level = min(self.most, self._level + (now - self._at) * self.per_s)
        self._at = now
        return self._level

    def wait_s(self, units: float, now: float) -> float:
        """Seconds until `units` are available, 0 if they are now. For more than the bucket holds: until it is full."""
        return max(0.0, (min(units, self.most) - self.level(now)) / self.per_s)

    def take(self, units: float) -> None:
        """Take units, even if fewer are available."""
        self._level -= units


class KeyAccount:
    """Usage of one key name. `tokens` and `requests` count since the server started."""

    def __init__(self, name: str, limits: KeyLimits, clock: Callable[[], float] = clock.monotonic) -> None:
        self.name = name
        self.sla = DEFAULT_SLA  # SLO class of its requests
        self.running = 0  # requests
        self.requests = 0
        self.tokens = 0  # tokens of prompts and answers
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self._elsewhere: dict[str, OfKey] = {}  # the last report of each other API replica
        self.limit(limits)

    def limit(self, limits: KeyLimits) -> None:
        """Replace the limits. A bucket keeps its level if its limit has not changed."""
        before = self._buckets
        self.limits = limits
        self._buckets = {}
        for name, seconds in (("requests_per_s", 1.0), ("tokens_per_minute", 60.0), ("tokens_per_day", 86400.0)):
            most: float | None = getattr(limits, name)
            if most is not None:
                old = before.get(name)
                if old is None or old.per_s != most / seconds:
                    old = TokenBucket(most, seconds, self._clock())
                self._buckets[name] = old

    @contextmanager
    def request(self) -> Generator[None]:
        """Context of a running request. Raises LimitReached before the request costs anything."""
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
        """Raises LimitReached if a prompt of `tokens` tokens (0: of any length) cannot be paid for now."""
        for name in ("tokens_per_minute", "tokens_per_day"):
            self._check(name, max(tokens, 1))

    def charge(self, tokens: int) -> None:
        """Charge tokens that were admitted or generated."""
        self.tokens += tokens
        for name in ("tokens_per_minute", "tokens_per_day"):
            if (bucket := self._buckets.get(name)) is not None:
                bucket.level(self._clock())
                bucket.take(tokens)

    def heard(self, replica: str, use: OfKey) -> None:
        """Apply another API replica's report for this name: tokens and requests used there are taken from the buckets
        here too. At the first report of a replica, each bucket takes the lower of the two levels."""
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
        """Drop the usage of an API replica that has ended, with its running requests."""
        self._elsewhere.pop(replica, None)

    def left(self) -> dict[str, float]:
        """Units available now of each limit that refills, by its name."""
        now = self._clock()
        return {name: round(bucket.level(now), 3) for name, bucket in self._buckets.items()}

    def _check(self, name: str, units: float) -> None:
        bucket = self._buckets.get(name)
        if bucket is not None and (wait := bucket.wait_s(units, self._clock())) > 0:
            raise LimitReached(self.name, name, getattr(self.limits, name), wait)


class Caller(msgspec.Struct, frozen=True):
    """The caller of a request, and the request's deadline."""

    request_id: str = ""
    account: KeyAccount | None = None  # None: the server has no keys
    began: float = 0.0  # by time.monotonic
    timeout_s: float | None = None  # from `began` to the last token
    passage: RequestSpan | None = None  # collects the request's timings, if set

    @property
    def sla(self) -> str:
        """SLO class of the request."""
        return DEFAULT_SLA if self.account is None else self.account.sla


CALLER: ContextVar[Caller] = ContextVar("CALLER", default=Caller())  # noqa: B039  (it is frozen)
"""The caller of the request that the current task serves, so that routes need not pass it along."""


class ServedRate:
    """Rate of prompt tokens whose jobs got a first token, measured while any job waited, over the last minute or so."""

    LASTING_S = 60.0
    LEAST_S, MOST_S = 1.0, 600.0  # bounds of the Retry-After that a client gets

    def __init__(self, clock: Callable[[], float] = clock.monotonic) -> None:
        self._clock = clock
        self._since = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def begins(self) -> None:
        """The first job starts to wait."""
        self._since = self._clock()

    def served(self, tokens: int) -> None:
        """Count prompt tokens of jobs that got their first token."""
        now = self._clock()
        passed, self._since = now - self._since, now
        kept = math.exp(-passed / self.LASTING_S)
        self._seconds = kept * self._seconds + passed
        self._tokens = kept * self._tokens + tokens

    @property
    def per_s(self) -> float:
        """Tokens per second; 0 if nothing has been measured."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def retry_s(self, tokens: int) -> float:
        """Seconds until `tokens` prompt tokens are served, within LEAST_S and MOST_S."""
        rate = self.per_s
        return min(self.MOST_S, max(self.LEAST_S, tokens / rate)) if rate > 0 else self.LEAST_S
