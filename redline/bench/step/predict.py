"""What a decode step and a round would take on GPUs that are not here: the floor, and what was measured above it.

A step on one H200 takes its floor and something more. Of that, `kept` stays on every one of several ranks: all that a
step of one token takes (the hand-over from kernel to kernel), and what more tokens add to the ops that every rank does
whole. `divided` is what more tokens add to the others: arithmetic, of which a rank has its share. So

    step = floor of a rank + kept + divided / ranks + sums + gather

On one H200 that is the measured step again. A test recomputes MEASURED, LONG_MS and ROUNDS from benchmarks/results.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from redline.bench.step.depth import Depth
from redline.bench.step.machines import Several
from redline.bench.step.rounds import RoundCase, floors
from redline.model.eagle3.config import Eagle3Config
from redline.model.k2.config import K2Config, Nvfp4Experts
from redline.model.k2.shapes import KIMI_K26
from redline.ops.op import Machine
from redline.tune.synthetic import GOLDEN, rates_of

TOKENS = 1, 4, 8, 32  # of a measured step
SHORT, LONG = 1024, 32768  # contexts
WHOLE_OPS = {"embed", "project_a", "gates"}  # every rank has them whole, but for the shared expert's part of gates


class Excess(NamedTuple):
    """Milliseconds of a step on one H200 above its floor. kept, divided: see above."""

    kept: float
    divided: float


class Round(NamedTuple):
    """Milliseconds above the floors of a round of one row on one H200: of verifying, and of drafting."""

    verify: float
    draft: float


MEASURED = {1: Excess(1.719, 0.0), 4: Excess(1.814, 1.196), 8: Excess(1.972, 2.457), 32: Excess(3.769, 12.989)}
LONG_MS = {"bf16": 0.524, "fp8": 1.291}  # more of one row at LONG than at SHORT
ROUNDS = {1: Round(2.305, 0.058), 2: Round(2.711, 0.084), 3: Round(2.935, 0.109), 4: Round(3.414, 0.135)}
SUM_US = 0.65  # that a sum of the ranks adds to the kernel it ends, beside its bytes: measured by a probe, two H200s
SUMS_OF_A_LAYER = 2
NVFP4_OVER_INT4 = 0.03  # of reading the experts: measured by a probe, gate and up of one token
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def excess(tokens: int) -> Excess:
    """Of a step of 1 to 32 tokens: linear between those that were measured."""
    low = max(count for count in TOKENS if count <= tokens)
    high = min(count for count in TOKENS if count >= tokens)
    share = (tokens - low) / (high - low) if high > low else 0.0
    kept, divided = (a + share * (b - a) for a, b in zip(MEASURED[low], MEASURED[high], strict=True))
    return Excess(kept, divided)


def like_kimi(config: K2Config) -> bool:
    """Whether what was measured is of a model of these sizes; formats of the experts aside."""
    sizes = (
        "hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
        "v_head_dim n_routed_experts num_experts_per_tok n_shared_experts first_k_dense_replace moe_intermediate_size "
        "intermediate_size vocab_size"
    )
    return all(getattr(config, name) == getattr(KIMI_K26, name) for name in sizes.split())


def distinct_experts(config: K2Config, tokens: int) -> float:
    """Of one layer: E (1 - (1 - k / E)^T), the mean where each token chooses k of E on its own."""
    missed = (1 - config.num_experts_per_tok / config.n_routed_experts) ** tokens
    return config.n_routed_experts * (1 - missed)


@dataclass(frozen=True)
class Step:
    """One predicted step of `rows` rows of `tokens` tokens each: milliseconds, but for `gb` and `experts`.

    gb       that a rank reads, contexts among it
    experts  distinct ones of a layer
    weights  the floor of the weights alone
    floor    of all that is read
    kept, divided, sums, gather  above it
    nvfp4    what NVFP4 adds, where experts are INT4
    """

    rows: int
    tokens: int
    gb: float
    experts: float
    weights: float
    floor: float
    kept: float
    divided: float
    sums: float
    gather: float
    nvfp4: float

    @property
    def ms(self) -> float:
        """The whole step with INT4 experts."""
        return self.floor + self.kept + self.divided + self.sums + self.gather


@dataclass(frozen=True)
class Machines:
    """The ranks of a model on a machine. check_ranks has been asked."""

    config: K2Config
    on: Several

    @property
    def machine(self) -> Machine:
        """A rank's limits."""
        return Machine(self.on.chip.name, self.on.chip.reads.value, self.on.chip.flops.value)

    def depth(self, rows: int, tokens: int, context: int, kv_dtype: str) -> Depth:
        """The case."""
        layers = self.config.num_hidden_layers
        return Depth(
            shape="", config=self.config, physical=layers, rows=rows, tokens=tokens, context=context,
            kv_dtype=KV_DTYPES[kv_dtype], overlap=0.0, ranks=self.on.count,
        )  # fmt: skip

    def step(self, rows: int, tokens: int, context: int, kv_dtype: str = "bf16") -> Step:
        """Predicts a step of 1 to 32 tokens in all."""
        depth, machine, all_tokens = self.depth(rows, tokens, context, kv_dtype), self.machine, rows * tokens
        layer = distinct_experts(self.config, all_tokens)
        experts = layer * self.config.moe_layers
        cost = depth.cost(experts)
        weights = replace(depth, context=0).cost(experts).bytes - self._pages(replace(depth, context=0))
        kept, divided = excess(all_tokens)
        kept += LONG_MS[kv_dtype] * rows * max(context - SHORT, 0) / (LONG - SHORT)
        nvfp4 = NVFP4_OVER_INT4 * experts * depth.expert_bytes / machine.bytes_per_s
        return Step(
            rows, tokens, cost.bytes / 1e9, layer, 1e3 * weights / machine.bytes_per_s, 1e3 * cost.seconds(machine),
            kept, divided / self.on.count, self._sums_ms(all_tokens), self._gather_ms(all_tokens), 1e3 * nvfp4,
        )  # fmt: skip

    def round(self, drafts: int, kv_dtype: str = "bf16") -> tuple[Step, float]:
        """(verifying, milliseconds of drafting) of one row with a whole drafter on every rank, its head divided."""
        step = self.step(1, 1 + drafts, SHORT, kv_dtype)
        alone = excess(1 + drafts)
        settle = ROUNDS[drafts].verify - alone.kept - alone.divided
        case = RoundCase(
            depth=self.depth(1, 1 + drafts, SHORT, kv_dtype),
            drafter=Eagle3Config.for_target(self.config),
            rates=rates_of(GOLDEN[drafts - 1], drafts, "accept"),
        )
        _, floor = floors(case, step.experts * self.config.moe_layers, self.machine)
        return replace(step, kept=step.kept + settle), floor + ROUNDS[drafts].draft + drafts * self._gather_ms(1)

    def _pages(self, depth: Depth) -> int:
        seen = depth.context + depth.tokens
        return depth.rows * seen * self.config.kv_bytes_per_token(depth.kv_dtype)

    def sum_us(self, tokens: int) -> float:
        """Microseconds of one sum, pushed to each of the other ranks in float32."""
        if self.on.count == 1:
            return 0.0
        pushed = (self.on.count - 1) * tokens * self.config.hidden_size * 4
        return SUM_US + 1e6 * pushed / self.on.chip.link.value

    def _sums_ms(self, tokens: int) -> float:
        return SUMS_OF_A_LAYER * self.config.num_hidden_layers * self.sum_us(tokens) / 1e3

    def _gather_ms(self, tokens: int) -> float:
        if self.on.count == 1:
            return 0.0
        ranks = self.on.count
        pushed = (ranks - 1) * tokens * (self.config.vocab_size // ranks) * 4
        return SUM_US / 1e3 + 1e3 * pushed / self.on.chip.link.value


def nvfp4(config: K2Config) -> K2Config:
    """The same model with NVFP4 experts."""
    return replace(config, quantization=Nvfp4Experts("ModelOpt"))
