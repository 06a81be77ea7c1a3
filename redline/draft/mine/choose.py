"""Which examples to train on next: chosen by what could be learned from them, mixed with what is known already.

Deterministic in a seed, whatever the order in which the examples come.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Literal

import numpy as np

from redline.draft.corpus.corpus import Example
from redline.draft.mine.buckets import Scored

Choose = Literal["gap", "uniform"]
MOST = 5.0  # times the mean weight; no example is worth more


def weights(scored: Sequence[Scored], traffic: Mapping[str, float] | None, by: Choose) -> list[float]:
    """How likely each example is chosen, relative to the mean; none is above MOST.

    A bucket here is a domain in a language. All of it together weighs (share of the traffic)^.5 x its mean hardness,
    spread over its examples by theirs; so a rare kind of traffic is heard, and a common one does not drown it.
    `uniform` puts 1 in the place of hardness: the control arm of a comparison. traffic: share of each domain; None or
    empty: as in the examples, by answer tokens.
    """
    count: dict[tuple[str, str], int] = defaultdict(int)
    tokens: dict[tuple[str, str], int] = defaultdict(int)
    for one in scored:
        count[one.domain, one.language] += 1
        tokens[one.domain, one.language] += one.answer
    of_domain: dict[str, int] = defaultdict(int)
    for (domain, _), size in tokens.items():
        of_domain[domain] += size
    total = sum(of_domain.values())
    told = sum((traffic or {}).values())

    def share(one: Scored) -> float:
        own = tokens[one.domain, one.language]
        if not told or traffic is None:
            return own / total
        return traffic.get(one.domain, 0.0) / told * own / max(1, of_domain[one.domain])

    raw = [
        math.sqrt(share(one)) / count[one.domain, one.language] * (one.hardness if by == "gap" else 1.0)
        for one in scored
    ]
    mean = sum(raw) / len(raw) if raw else 0.0
    return [min(value / mean, MOST) if mean > 0 else 0.0 for value in raw]


def choose(
    scored: Sequence[Scored],
    weight: Sequence[float],
    budget: int,
    *,
    cap: float = 0.5,
    equal_domains: bool = False,
    times: int = 1,
    seed: int = 0,
) -> list[int]:
    """Places in `scored`, in the order of the draw: weighted, without replacement, until the budget is full.

    budget: answer tokens; an example takes `times` its own answer's. No bucket (domain and language) gets more than
    `cap` of it, where there are several. With `equal_domains` every domain has an equal part, and may fill it.
    """
    domains = sorted({one.domain for one in scored})
    part = budget // len(domains) if equal_domains and domains else budget
    several = len({(one.domain, one.language) for one in scored}) > 1
    most = int(cap * part) if not equal_domains and several else part
    used: dict[str, int] = defaultdict(int)
    in_bucket: dict[tuple[str, str], int] = defaultdict(int)
    chosen: list[int] = []
    for place in sorted(
        range(len(scored)), key=lambda place: (_key(scored[place].id, weight[place], seed), scored[place].id)
    ):
        one, purse = scored[place], scored[place].domain if equal_domains else ""
        size, bucket = times * one.answer, (one.domain, one.language)
        if weight[place] <= 0 or size == 0:
            continue
        if used[purse] + size > part or in_bucket[bucket] + size > most:
            continue
        used[purse] += size
        in_bucket[bucket] += size
        chosen.append(place)
    return chosen


def _key(id: str, weight: float, seed: int) -> float:
    """Efraimidis and Spirakis, 2006: the smallest keys -log(u) / w are a weighted draw without replacement."""
    return math.inf if weight <= 0 else -math.log(uniform(id, seed)) / weight


def uniform(id: str, seed: int) -> float:
    """A number in (0, 1) that is a function of id and seed alone."""
    digest = blake2b(f"{seed}\0{id}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**64


def window(example: Example, hardness_R: "np.ndarray", tokens: int) -> Example | None:
    """The example cut to the `tokens` answer tokens that hold the most hardness, behind all that stands before them.

    None where the answer is no longer than that. What stands before is prompt to the trainer: it makes features, and no
    loss. hardness_R: of positions prompt + 1 on.
    """
    answer = len(example.tokens) - example.prompt
    if answer <= tokens or not len(hardness_R):
        return None
    sums = np.concatenate([[0.0, 0.0], hardness_R.cumsum()])  # the answer's first token has no row
    begin = int((sums[tokens:] - sums[: len(sums) - tokens]).argmax())
    start = example.prompt + begin
    return Example(
        id=f"{example.id}@{start}",
        domain=example.domain,
        language=example.language,
        tokens=example.tokens[: start + tokens],
        prompt=start,
        finish="length",
        kind=example.kind,
    )


def mix(
    base: Iterable[Example], hard: Iterable[Example], budget: int, *, replay: float, equal_domains: bool, seed: int
) -> list[Example]:
    """What to train on: at most `budget` answer tokens, at least the share `replay` of them from the base set.

    Where the hard ones do not fill their part, the base does; where the base is too small, all becomes smaller. With
    `equal_domains` this holds for each domain on its own, each with an equal part of the budget. Shuffled.
    """
    taken: list[Example] = []
    domains: dict[str, tuple[list[Example], list[Example]]] = defaultdict(lambda: ([], []))
    for kind, examples in enumerate((base, hard)):
        for example in examples:
            domains[example.domain if equal_domains else ""][kind].append(example)
    for old, new in domains.values():
        part = budget // len(domains)
        if replay > 0:
            part = min(part, int(sum(map(answer_tokens, old)) / replay))
        fresh = _fill(new, int(part * (1 - replay)), seed)
        taken += fresh + _fill(old, part - sum(map(answer_tokens, fresh)), seed)
    return sorted(taken, key=lambda example: (uniform(example.id, seed + 1), example.id))


def answer_tokens(example: Example) -> int:
    """How many tokens of the example are its answer."""
    return len(example.tokens) - example.prompt


def _fill(examples: Sequence[Example], budget: int, seed: int) -> list[Example]:
    """Some of them, in an order of the seed's, that hold at most `budget` answer tokens."""
    found: list[Example] = []
    for example in sorted(examples, key=lambda example: (uniform(example.id, seed), example.id)):
        if answer_tokens(example) <= budget:
            budget -= answer_tokens(example)
            found.append(example)
    return found
