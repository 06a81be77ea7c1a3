"""`redline audit A B`: the loss of the second checkpoint against the first, by weight, by layer and end to end.

Weights are compared one by one. Texts run through A layer by layer; the inputs of each expert are given to both
checkpoints, which isolates the error of its outputs from that of earlier layers. Then both models read all texts from
end to end, and their next-token distributions are compared position by position.

T tokens, D hidden, V vocabulary, I expert width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from redline import clock
from redline.errors import ConfigError
from redline.kernels.by_chip import linear
from redline.messages.base import Record
from redline.model.k2.checkpoint import Checkpoint, CheckpointWeight, weights
from redline.model.k2.cpu import Reader
from redline.ops.moe import gated
from redline.quant.read import dense
from redline.quant.stream import through
from redline.quant.texts import CalibrationText

ROWS = 512  # positions with logits in memory at once
TOKENS_OF_AN_EXPERT = 512  # maximum number of tokens by which an expert's outputs are compared

Progress = Callable[[str, float], object]


class Bounds(Record, frozen=True):
    """The limits of the loss; every excess is reported, and the exit code is then 1.

    weight, output: for any one weight or expert, the root of the squared error divided by the squared reference (max
    scaling of Gaussian weights gives 0.095, of INT4 0.102). kl: nats per token; agreement: share of tokens; both for
    any one domain.
    """

    weight: float = 0.15
    output: float = 0.25
    kl: float = 0.05
    agreement: float = 0.9


class WeightRow(Record, frozen=True):
    """A weight that differs. error: relative, as in `Bounds`. output: None if no token was routed to its expert."""

    name: str
    layer: int
    error: float
    output: float | None = None


class ExpertRow(Record, frozen=True):
    """A routed expert's output as a whole, over the tokens that were routed to it."""

    layer: int
    expert: int
    tokens: int
    output: float


class DomainRow(Record, frozen=True):
    """Next tokens of one domain. kl: KL(A || B) in nats per token, its mean and its 99th percentile; agreement: the
    share of positions with the same argmax; perplexities of the texts under A and B."""

    domain: str
    tokens: int
    kl: float
    kl_99: float
    agreement: float
    perplexity_a: float
    perplexity_b: float


class BoundExceeded(Record, frozen=True):
    """An excess over a limit: which limit, of which weight, expert or domain, the value, and the most allowed."""

    bound: Literal["weight", "output", "kl", "agreement"]
    of: str
    value: float
    most: float


class Audit(Record, frozen=True):
    """The complete result of an audit. weights: only those that differ; same: the number of equal weights."""

    a: str  # fingerprints
    b: str
    weights: tuple[WeightRow, ...]
    same: int
    experts: tuple[ExpertRow, ...]
    domains: tuple[DomainRow, ...]  # the last row is over all domains
    seconds: float
    bounds: Bounds
    excess: tuple[BoundExceeded, ...]


def audit(
    a: Checkpoint,
    b: Checkpoint,
    texts: Sequence[CalibrationText],
    bounds: Bounds,
    device: torch.device,
    progress: Progress = lambda what, share: None,
) -> Audit:
    """Compare two checkpoints. texts: if empty, only the weights are compared.

    Raises ConfigError if they are not the same model, CheckpointError if one is broken.
    """
    began = clock.monotonic()
    check_alike(a, b)
    rows, same = _weights(a, b, device, progress)
    experts: list[ExpertRow] = []
    domains: list[DomainRow] = []
    if texts:
        outputs = _Outputs(a, b, device)
        states_a = through(a, texts, device, outputs, lambda done, of: progress("A, layer by layer", done / of))
        rows = [_with_output(row, outputs.weights) for row in rows]
        experts = outputs.experts()
        states_b = through(b, texts, device, progress=lambda done, of: progress("B, layer by layer", done / of))
        domains = _domains(texts, _Next(a, states_a, device), _Next(b, states_b, device), progress)
    return Audit(
        a=a.fingerprint,
        b=b.fingerprint,
        weights=tuple(rows),
        same=same,
        experts=tuple(experts),
        domains=tuple(domains),
        seconds=clock.monotonic() - began,
        bounds=bounds,
        excess=tuple(excess(rows, experts, domains, bounds)),
    )


def check_alike(a: Checkpoint, b: Checkpoint) -> None:
    """Raise ConfigError unless both are the same model, apart from the weight format."""
    for field in a.config.__dataclass_fields__:
        if field != "quantization" and getattr(a.config, field) != getattr(b.config, field):
            was, now = getattr(a.config, field), getattr(b.config, field)
            raise ConfigError(f"{field} is {was} in the first and {now} in the second: not the same model")


def excess(
    rows: Sequence[WeightRow], experts: Sequence[ExpertRow], domains: Sequence[DomainRow], bounds: Bounds
) -> list[BoundExceeded]:
    """The excesses over the limits, worst first within each kind. NaN exceeds every limit."""
    found = [_over("weight", row.name, row.error, bounds.weight) for row in rows]
    found += [_over("output", f"layers.{e.layer}.mlp.experts.{e.expert}", e.output, bounds.output) for e in experts]
    found += [_over("kl", row.domain, row.kl, bounds.kl) for row in domains]
    over = sorted((one for one in found if one is not None), key=lambda one: (one.bound, -one.value))
    for row in domains:
        if not row.agreement >= bounds.agreement:
            over.append(BoundExceeded(bound="agreement", of=row.domain, value=row.agreement, most=bounds.agreement))
    return over


def _over(bound: Literal["weight", "output", "kl"], of: str, value: float, most: float) -> BoundExceeded | None:
    return None if value <= most else BoundExceeded(bound=bound, of=of, value=value, most=most)


# ---------------------------------------------------------------------------------------------------------- weights


def _weights(a: Checkpoint, b: Checkpoint, device: torch.device, progress: Progress) -> tuple[list[WeightRow], int]:
    found: list[WeightRow] = []
    every = list(weights(a.config))
    for number, weight in enumerate(every):
        one, other = dense(a, weight, device), dense(b, weight, device)
        if not torch.equal(one, other):
            found.append(WeightRow(name=weight.name, layer=_layer(weight.name), error=relative(one, other)))
        progress("weights", (number + 1) / len(every))
    return found, len(every) - len(found)


def relative(one: Tensor, other: Tensor) -> float:
    """The root of sum (one - other)^2 over sum one^2; infinite if the first is all zeros and the other is not."""
    squared = float((one.float() - other.float()).square().sum(dtype=torch.float64))
    whole = float(one.float().square().sum(dtype=torch.float64))
    return math.sqrt(squared / whole) if whole else (math.inf if squared else 0.0)


def _layer(name: str) -> int:
    """The layer's number; -1 for a weight outside the layers."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" else -1


# ---------------------------------------------------------------------------------------------------------- outputs


@dataclass
class _Sums:
    """Sums of one expert so far: tokens, and [squared error, squared output] per projection and as a whole."""

    tokens: int
    gate: Tensor
    up: Tensor
    down: Tensor
    whole: Tensor


class _Outputs:
    """A listener that feeds the inputs of each routed expert to A's weights and to B's."""

    def __init__(self, a: Checkpoint, b: Checkpoint, device: torch.device) -> None:
        self._a, self._b, self._device = a, b, device
        self._sums: dict[tuple[int, int], _Sums] = {}

    def __call__(self, layer: int, x: Tensor, ids: Tensor | None, kept: Tensor) -> None:
        """Compare on the first tokens of each expert, up to TOKENS_OF_AN_EXPERT in total."""
        if ids is None:
            return
        for expert in ids.unique().tolist():
            sums = self._sums.setdefault((layer, expert), _Sums(0, *(torch.zeros(2) for _ in range(4))))
            rows = x[(ids == expert).any(1)][: TOKENS_OF_AN_EXPERT - sums.tokens].float()
            if len(rows):
                self._compare(layer, expert, rows, sums)

    def _compare(self, layer: int, expert: int, x: Tensor, sums: _Sums) -> None:
        at = f"layers.{layer}.mlp.experts.{expert}"
        one, other = ({name: self._read(of, at, name) for name in _PROJECTIONS} for of in (self._a, self._b))
        gate, up = x @ one["gate"].T, x @ one["up"].T
        gate_b, up_b = x @ other["gate"].T, x @ other["up"].T
        h = gated(gate, up)
        y = h @ one["down"].T
        sums.tokens += len(x)
        sums.gate += _squares(gate, gate_b)
        sums.up += _squares(up, up_b)
        sums.down += _squares(y, h @ other["down"].T)
        sums.whole += _squares(y, gated(gate_b, up_b) @ other["down"].T)

    def _read(self, of: Checkpoint, at: str, projection: str) -> Tensor:
        shape = (0, 0)  # `dense` reads an expert by its name
        return dense(of, CheckpointWeight(f"{at}.{projection}_proj.weight", shape, "expert"), self._device).float()

    @property
    def weights(self) -> dict[str, float]:
        """The relative output error of each projection, by its weight's name."""
        found: dict[str, float] = {}
        for (layer, expert), sums in self._sums.items():
            at = f"layers.{layer}.mlp.experts.{expert}"
            for name, one in (("gate", sums.gate), ("up", sums.up), ("down", sums.down)):
                found[f"{at}.{name}_proj.weight"] = _root(one)
        return found

    def experts(self) -> list[ExpertRow]:
        """A row for each expert that received tokens."""
        return [
            ExpertRow(layer=layer, expert=expert, tokens=sums.tokens, output=_root(sums.whole))
            for (layer, expert), sums in sorted(self._sums.items())
        ]


_PROJECTIONS = ("gate", "up", "down")


def _squares(one: Tensor, other: Tensor) -> Tensor:
    return torch.stack([(one - other).square().sum(), one.square().sum()]).cpu()


def _root(sums: Tensor) -> float:
    squared, whole = sums.tolist()
    return math.sqrt(squared / whole) if whole else (math.inf if squared else 0.0)


def _with_output(row: WeightRow, outputs: dict[str, float]) -> WeightRow:
    return WeightRow(name=row.name, layer=row.layer, error=row.error, output=outputs.get(row.name))


# ------------------------------------------------------------------------------------------------------- end to end


class _Next:
    """A model's output head with its final hidden states [T, D]."""

    def __init__(self, checkpoint: Checkpoint, states: Tensor, device: torch.device) -> None:
        reader = Reader(checkpoint, device, checkpoint.config.low_rank_norm_eps)
        self._head, self._states = reader.matrix("lm_head.weight"), states
        self._device, self._dtype = device, torch.float32 if device.type == "cpu" else torch.bfloat16

    def log_probabilities(self, rows: Tensor) -> Tensor:
        """Float32 [rows, V]."""
        return F.log_softmax(linear(self._states[rows].to(self._device, self._dtype), self._head).float(), -1)


def _domains(texts: Sequence[CalibrationText], a: _Next, b: _Next, progress: Progress) -> list[DomainRow]:
    rows, following, domain_of = _positions(texts)
    names = sorted({text.domain for text in texts})
    kls, same, likely_a, likely_b = (list[Tensor]() for _ in range(4))
    for first in range(0, len(rows), ROWS):
        some = slice(first, first + ROWS)
        log_a, log_b = a.log_probabilities(rows[some]), b.log_probabilities(rows[some])
        kls.append(F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1).cpu())
        same.append((log_a.argmax(-1) == log_b.argmax(-1)).cpu())
        at = following[some, None].to(log_a.device)
        likely_a.append(log_a.gather(1, at)[:, 0].cpu())
        likely_b.append(log_b.gather(1, at)[:, 0].cpu())
        progress("next tokens", min(first + ROWS, len(rows)) / len(rows))
    every = [torch.cat(parts) for parts in (kls, same, likely_a, likely_b)]
    found: list[DomainRow] = []
    for name in (*names, "all"):
        chosen = domain_of == names.index(name) if name in names else torch.ones_like(domain_of, dtype=torch.bool)
        if chosen.any():
            found.append(_domain_row(name, *(part[chosen] for part in every)))
    return found


def _domain_row(name: str, kl: Tensor, same: Tensor, likely_a: Tensor, likely_b: Tensor) -> DomainRow:
    return DomainRow(
        domain=name,
        tokens=len(kl),
        kl=float(kl.double().mean()),
        kl_99=float(kl.sort().values[math.ceil(0.99 * len(kl)) - 1]),
        agreement=float(same.double().mean()),
        perplexity_a=float((-likely_a.double().mean()).exp()),  # a tensor's exp: gives inf instead of an OverflowError
        perplexity_b=float((-likely_b.double().mean()).exp()),
    )


def _positions(texts: Sequence[CalibrationText]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with a judged next token, counted through all texts; that token; the index of the domain's name."""
    names = sorted({text.domain for text in texts})
    rows: list[int] = []
    following: list[int] = []
    domains: list[int] = []
    first = 0
    for text in texts:
        places = range(min(text.judged, len(text.tokens) - 1), len(text.tokens) - 1)
        rows += [first + place for place in places]
        following += [text.tokens[place + 1] for place in places]
        domains += [names.index(text.domain)] * len(places)
        first += len(text.tokens)
    if not rows:
        raise ConfigError("texts: they contain no judged token")
    return torch.tensor(rows), torch.tensor(following), torch.tensor(domains)
