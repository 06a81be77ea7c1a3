"""Chooses the examples to train on next, by how much can be learned from them, and mixes them with the base set.

Deterministic in a seed, independent of the order of the examples.
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
MOST = 5.0  # maximum weight of an example, as a multiple of the mean weight


def weights(scored: Sequence[Scored], traffic: Mapping[str, float] | None, by: Choose) -> list[float]:
    """The sampling weight of each example, relative to the mean; at most MOST.

    A bucket here is a domain in a language. Its total weight is (share of the traffic)^.5 x its mean hardness, divided
    among its examples in proportion to their hardness; so rare traffic is represented, and common traffic does not
    dominate. `uniform` replaces hardness by 1: the control arm of a comparison. traffic: share of each domain; None or
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
    """Indices in `scored`, in order of the draw: weighted, without replacement, until the budget is used.

    budget: answer tokens; an example uses `times` the tokens of its own answer. If there are several buckets (domain
    and language), each gets at most `cap` of the budget. With `equal_domains` every domain has an equal share, which
    one bucket may use completely.
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
    """Efraimidis and Spirakis, 2006: the smallest keys -log(u) / w are a weighted sample without replacement."""
    return math.inf if weight <= 0 else -math.log(uniform(id, seed)) / weight


def uniform(id: str, seed: int) -> float:
    """A number in (0, 1) that depends only on id and seed."""
    digest = blake2b(f"{seed}\0{id}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**64


def window(example: Example, hardness_R: "np.ndarray", tokens: int) -> Example | None:
    """The example cut to the `tokens` consecutive answer tokens with the most hardness, and all tokens before them.

    None if the answer is not longer than `tokens`. The earlier tokens become prompt for the trainer: they have features
    but no loss. hardness_R: of positions from prompt + 1 on.
    """
    answer = len(example.tokens) - example.prompt
    if answer <= tokens or not len(hardness_R):
        return None
    sums = np.concatenate([[0.0, 0.0], hardness_R.cumsum()])  # there is no row for the answer's first token
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
    """The training set: at most `budget` answer tokens, at least the share `replay` of them from the base set.

    If there are too few hard examples, base examples fill their part; if the base is too small, the whole set shrinks.
    With `equal_domains` this applies to each domain separately, with equal budgets. Shuffled.
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
    """Number of answer tokens of the example."""
    return len(example.tokens) - example.prompt


def _fill(examples: Sequence[Example], budget: int, seed: int) -> list[Example]:
    """Some of the examples, in a random order given by the seed, with at most `budget` answer tokens."""
    found: list[Example] = []
    for example in sorted(examples, key=lambda example: (uniform(example.id, seed), example.id)):
        if answer_tokens(example) <= budget:
            budget -= answer_tokens(example)
            found.append(example)
    return found
