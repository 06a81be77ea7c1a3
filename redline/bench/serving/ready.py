"""What is asked of a server beside the load: whether it is there, which models it has, and what its drafts did."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import msgspec

from redline import clock
from redline.bench.serving.target import Target
from redline.errors import ConfigError
from redline.wire.base import Record

LOADING_S, ABSENT_S = 600.0, 10.0  # a server that says 503 loads its model; where nobody listens, perhaps nobody will
ANSWER_S = 30.0
MOST_BYTES = 16 << 20  # of one such answer


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class Drafting(Record, frozen=True):
    """Counters of speculative decoding since a server's start. accepted_at: by the place among a step's drafts."""

    drafts: int = 0  # times that drafts were verified
    tokens: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()


def models(
    target: Target,
    seconds: float | None,
    tell: Callable[[str], object],
    *,
    clock: Callable[[], float] = clock.monotonic,
    wait: Callable[[float], object] = clock.sleep,
) -> tuple[str, ...]:
    """The names of a server's models, once it is ready; none where it has no /v1/models.

    seconds: to wait for it; None: LOADING_S while it loads, ABSENT_S while nobody listens; 0: not at all. tell: called
    with a line before it waits. clock, wait: for tests. Raises ConfigError where it is not there, or refuses the key.
    """
    place = f"{target.base_url}/v1/models"
    began, told = clock(), False
    with _http(target) as http:
        while True:
            try:
                answer = _get(http, place)
                if answer.status == 200 and _get(http, f"{target.base_url}/health").status == 503:
                    answer = None  # some list their models while they load them
                state, most = f"{target.base_url} is not ready (503)", LOADING_S
            except httpx.TransportError as error:
                answer = None
                state, most = f"no server at {target.base_url} ({error or type(error).__name__})", ABSENT_S
            if answer is not None and answer.status != 503:
                return _names(place, answer)
            most = most if seconds is None else seconds
            if clock() - began >= most:
                waited = f"; waited {most:g} s" if most else ""
                raise ConfigError(f"{state}{waited}: is --base-url right? --ready-check-timeout-sec waits longer")
            if not told:
                tell(f"{state}; waiting {most:g} s at most, Ctrl-C leaves")
                told = True
            wait(0.5)


class _Answer(NamedTuple):
    status: int
    data: bytes


def _get(http: httpx.Client, place: str) -> _Answer:
    """One answer, of MOST_BYTES and ANSWER_S at most: what comes beyond them is left."""
    data, until = b"", clock.monotonic() + ANSWER_S
    with http.stream("GET", place) as answer:
        for part in answer.iter_bytes():
            data += part
            if len(data) > MOST_BYTES or clock.monotonic() > until:
                break
    return _Answer(answer.status_code, data)


def _names(place: str, answer: _Answer) -> tuple[str, ...]:
    if answer.status in (401, 403):
        raise ConfigError(f"{place} answers {answer.status}: set the server's key in OPENAI_API_KEY")
    if answer.status != 200:
        return ()
    try:
        return tuple(model.id for model in msgspec.json.decode(answer.data, type=_Models).data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


def max_model_len(target: Target) -> int | None:
    """Tokens of a prompt and its answer that the target's model takes, where the server's list of models says so."""
    try:
        with _http(target) as http:
            answer = _get(http, f"{target.base_url}/v1/models")
        models = msgspec.json.decode(answer.data, type=_Models).data
    except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return next((model.max_model_len for model in models if model.id == target.model), None)


def drafting(target: Target) -> Drafting | None:
    """The counters of speculative decoding in a server's /metrics, under vLLM's names; None where it has none."""
    try:
        with _http(target) as http:
            answer = _get(http, f"{target.base_url}/metrics")
    except httpx.HTTPError:
        return None
    if answer.status != 200 or len(answer.data) > MOST_BYTES:
        return None
    return counters(answer.data.decode(errors="replace"))


_LINE = re.compile(r"vllm:spec_decode_(\w+?)(?:_total)?(\{[^\n]*\})?\s+([0-9.eE+]+)(?:\s+\d+)?$")


def counters(text: str) -> Drafting | None:
    """`Drafting` from a page of Prometheus' format, summed over its labels; None where no line speaks of drafts."""
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
            continue  # no number, or one without end
        place = re.search(r'[{,]position="(\d{1,3})"', labels)
        if name == "num_accepted_tokens_per_pos" and place is not None:
            places[int(place[1])] = places.get(int(place[1]), 0) + value
        elif name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            found[name] = found.get(name, 0) + value
    if not found:
        return None
    return Drafting(
        drafts=found.get("num_drafts", 0),
        tokens=found.get("num_draft_tokens", 0),
        accepted=found.get("num_accepted_tokens", 0),
        accepted_at=tuple(places.get(place, 0) for place in range(max(places, default=-1) + 1)),
    )


def drafting_figures(before: Drafting | None, after: Drafting | None) -> dict[str, Any]:
    """What drafts did between two looks, under vLLM's keys; nothing where the server does not say, or drafted nothing.

    Counters are the server's, so what others asked of it meanwhile is in them too.
    """
    if before is None or after is None or after.drafts <= before.drafts or after.tokens <= before.tokens:
        return {}
    drafts, tokens = after.drafts - before.drafts, after.tokens - before.tokens
    accepted = after.accepted - before.accepted
    earlier = (*before.accepted_at, *[0] * len(after.accepted_at))
    return {
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [
            (count - was) / drafts for count, was in zip(after.accepted_at, earlier, strict=False)
        ],
    }


def _http(target: Target) -> httpx.Client:
    headers = dict(target.headers)
    if target.key is not None and "authorization" not in {name.lower() for name in headers}:
        headers["Authorization"] = f"Bearer {target.key}"
    host = httpx.URL(target.base_url).host
    here = host == "localhost" or host.startswith("127.") or host == "::1"
    try:
        return httpx.Client(headers=headers, timeout=ANSWER_S, verify=target.verify_tls, trust_env=not here)
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(f"the proxy or certificates of the environment cannot be used: {error}") from None
