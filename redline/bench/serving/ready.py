"""Queries to a server outside the load: readiness, its list of models, its counters of speculative decoding."""

import contextlib
import re
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import httpx
import msgspec

from redline import clock
from redline.bench.serving.target import ServerTarget
from redline.errors import ConfigError
from redline.messages.base import Record

LOADING_S, ABSENT_S = (
    600.0,
    10.0,
)  # timeouts: while a server loads (503); if connections are refused
ANSWER_S = 30.0
MOST_BYTES = 16 << 20  # maximum bytes of one response


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class DraftCounters(Record, frozen=True):
    """Counters of speculative decoding since a server's start. accepted_at: accepted drafts by their position."""

    drafts: int = 0  # rounds that verified drafts
    tokens: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()

    def since(self, before: "DraftCounters") -> "DraftCounters":
        """The counts since an earlier read. After a restart the server counts from 0."""
        if self.drafts < before.drafts or self.tokens < before.tokens:
            return self
        earlier = (*before.accepted_at, *[0] * len(self.accepted_at))
        return DraftCounters(
            drafts=self.drafts - before.drafts,
            tokens=self.tokens - before.tokens,
            accepted=self.accepted - before.accepted,
            accepted_at=tuple(now - was for now, was in zip(self.accepted_at, earlier, strict=False)),
        )


def models(
    target: ServerTarget,
    seconds: float | None,
    tell: Callable[[str], object],
    *,
    clock: Callable[[], float] = clock.monotonic,
    wait: Callable[[float], object] = clock.sleep,
) -> tuple[str, ...]:
    """Waits until a server is ready, and returns the names of its models; () if it has no /v1/models.

    seconds: timeout; None: LOADING_S while the server loads, ABSENT_S while connections are refused; 0: does not wait.
    tell: called with a message before waiting. clock, wait: for tests. Raises ConfigError if the server is not ready in
    time, or rejects the key.
    """
    place = f"{target.base_url}/v1/models"
    began, told = clock(), False
    with _http(target) as http:
        while True:
            try:
                answer = _get(http, place)
                if answer.status == 200 and _get(http, f"{target.base_url}/health").status == 503:
                    answer = None  # some servers list their models while loading
                state, most = f"{target.base_url} is not ready (503)", LOADING_S
            except httpx.TransportError as error:
                answer = None
                state, most = f"no server at {target.base_url} ({error or type(error).__name__})", ABSENT_S
            if answer is not None and answer.status != 503:
                return _names(place, answer)
            most = most if seconds is None else seconds
            if clock() - began >= most:
                waited = f"; waited {most:g} s" if most else ""
                raise ConfigError(f"{state}{waited}: check --base-url, or increase --ready-check-timeout-sec")
            if not told:
                tell(f"{state}; waiting up to {most:g} s (Ctrl-C to abort)")
                told = True
            wait(0.5)


class _Answer(NamedTuple):
    status: int
    data: bytes


def _get(http: httpx.Client, place: str) -> _Answer:
    """GETs a response, truncated after MOST_BYTES bytes or ANSWER_S seconds."""
    data, until = b"", clock.monotonic() + ANSWER_S
    with http.stream("GET", place) as answer:
        for part in answer.iter_bytes():
            data += part
            if len(data) > MOST_BYTES or clock.monotonic() > until:
                break
    return _Answer(answer.status_code, data)


def _names(place: str, answer: _Answer) -> tuple[str, ...]:
    if answer.status in (401, 403):
        raise ConfigError(f"{place} returns {answer.status}: set the server's key in OPENAI_API_KEY")
    if answer.status != 200:
        return ()
    try:
        return tuple(model.id for model in msgspec.json.decode(answer.data, type=_Models).data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


def max_model_len(target: ServerTarget) -> int | None:
    """Maximum tokens of prompt and answer of the target's model, from the server's list of models; None: unknown."""
    try:
        with _http(target) as http:
            answer = _get(http, f"{target.base_url}/v1/models")
        models = msgspec.json.decode(answer.data, type=_Models).data
    except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return next((model.max_model_len for model in models if model.id == target.model), None)


class ServerTokenizer:
    """The tokenizer of a server, by its route /tokenize (Redline, vLLM, SGLang). Close it after use."""

    def __init__(self, target: ServerTarget) -> None:
        """Raises ConfigError if the server has no such route."""
        self.name = f"{target.base_url}/tokenize"
        self._model, self._http = target.model, _http(target)
        try:
            self.added = 0
            self.added = len(self.encode("of")) - (len(self.encode("of of")) - len(self.encode("of")))
        except ConfigError:
            self._http.close()
            raise

    def encode(self, text: str) -> list[int]:
        """Raises ConfigError if the server does not answer with token ids."""
        try:
            answer = self._http.post(self.name, json={"model": self._model, "prompt": text})
            tokens = msgspec.json.decode(answer.content, type=_Tokenized).tokens if answer.is_success else None
        except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.name}: {error}") from None
        if tokens is None:
            raise ConfigError(f"{self.name} returns {answer.status_code}")
        return tokens[self.added :]

    def close(self) -> None:
        """Closes its connections."""
        self._http.close()


@contextlib.contextmanager
def tokenizer_of(target: ServerTarget) -> Generator[ServerTokenizer | None]:
    """The server's own tokenizer while the context is open; None if it has none."""
    try:
        found = ServerTokenizer(target)
    except ConfigError:
        yield None
        return
    with contextlib.closing(found):
        yield found


def drafting(target: ServerTarget) -> DraftCounters | None:
    """The counters of speculative decoding in a server's /metrics, under vLLM's names; None if there are none."""
    try:
        with _http(target) as http:
            answer = _get(http, f"{target.base_url}/metrics")
    except httpx.HTTPError:
        return None
    if answer.status != 200 or len(answer.data) > MOST_BYTES:
        return None
    return counters(answer.data.decode(errors="replace"))


_LINE = re.compile(r"vllm:spec_decode_(\w+?)(?:_total)?(\{[^\n]*\})?\s+([0-9.eE+]+)(?:\s+\d+)?$")


def counters(text: str) -> DraftCounters | None:
    """Parses `DraftCounters` from Prometheus' text format, summed over labels; None without counters of drafts."""
    found: dict[str, int] = {}
    places: dict[int, int] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels = match[1], match[2] or ""
        try:
            value = int(float(match[3]))
        except (ValueError, OverflowError):
            continue  # not a number, or infinite
        place = re.search(r'[{,]position="(\d{1,3})"', labels)
        if name == "num_accepted_tokens_per_pos" and place is not None:
            places[int(place[1])] = places.get(int(place[1]), 0) + value
        elif name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            found[name] = found.get(name, 0) + value
    if not found:
        return None
    return DraftCounters(
        drafts=found.get("num_drafts", 0),
        tokens=found.get("num_draft_tokens", 0),
        accepted=found.get("num_accepted_tokens", 0),
        accepted_at=tuple(places.get(place, 0) for place in range(max(places, default=-1) + 1)),
    )


def drafting_figures(before: DraftCounters | None, after: DraftCounters | None) -> dict[str, Any]:
    """The acceptance between two reads, under vLLM's keys; {} if the server has no counters, or had no drafts.

    The counters cover the whole server, including the requests of other clients.
    """
    if before is None or after is None or after.drafts <= before.drafts or after.tokens <= before.tokens:
        return {}
    found = after.since(before)
    return {
        "spec_decode_acceptance_rate": 100 * found.accepted / found.tokens,
        "spec_decode_acceptance_length": 1 + found.accepted / found.drafts,
        "spec_decode_num_drafts": found.drafts,
        "spec_decode_draft_tokens": found.tokens,
        "spec_decode_accepted_tokens": found.accepted,
        "spec_decode_per_position_acceptance_rates": [count / found.drafts for count in found.accepted_at],
    }


def _http(target: ServerTarget) -> httpx.Client:
    headers = dict(target.headers)
    if target.key is not None and "authorization" not in {name.lower() for name in headers}:
        headers["Authorization"] = f"Bearer {target.key}"
    host = httpx.URL(target.base_url).host
    here = host == "localhost" or host.startswith("127.") or host == "::1"
    try:
        return httpx.Client(headers=headers, timeout=ANSWER_S, verify=target.verify_tls, trust_env=not here)
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(f"the proxy or certificate settings of the environment are invalid: {error}") from None
