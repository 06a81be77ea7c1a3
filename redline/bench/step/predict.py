"""Predicts the time of a decode step and of a round on other GPUs: the floor plus the measured excess over it.

A step on one H200 and on two takes its floor and an excess. Of the excess, each rank takes `kept` whatever the number
of ranks, and the ranks divide `divided`: these two numbers are solved from the two measured steps. So

    step = floor of a rank + whole + kept + divided / ranks + all-reduces + gather

Timings of single ops cannot separate the two: attention with half the heads and a shared expert of half the width
exceed their floors by the same time as whole ones. A floor counts every byte once over all ranks; `whole` is the time
for what each rank reads beyond its part of that: contexts, and the projections into attention. The steps that the model
is fitted to (FITTED) read both in full on every rank, and so do predicted steps. A test recomputes STEPS, LONG_STEPS,
ROUNDS, ROUND_MS, BLOCKS, BLOCK_MS and MEETINGS from benchmarks/results.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from redline.bench.step.depth import DepthCase
from redline.bench.step.drafters import DFLASH, DSPARK, EAGLE3_MLA, public_drafter
from redline.bench.step.machines import Several
from redline.bench.step.rounds import RoundCase, floors
from redline.model.block.config import BlockConfig
from redline.model.k2.config import K2Config
from redline.model.k2.shapes import KIMI_K26
from redline.ops.op import PeakRates
from redline.policy.synthetic import GOLDEN, GOLDEN_BLOCK_DRAFTS, golden_block, rates_of

TOKENS = 1, 4, 8, 32  # of the measured steps
SHORT, LONG = 1024, 32768  # contexts


class StepTime(NamedTuple):
    """Milliseconds of a step, and of reading its rank's bytes at the bandwidth measured in the same run."""

    ms: float
    read: float


class Meeting(NamedTuple):
    """Microseconds that an all-reduce of two ranks adds to the product before it, and of gathering their logits."""

    sum: float
    gather: float


class StepExcess(NamedTuple):
    """Milliseconds of a step on one H200 beyond its reads. kept, divided: see the module's docstring."""

    kept: float
    divided: float


class RoundExcess(NamedTuple):
    """Milliseconds above the floors of a round of one row on one H200: for verifying, and for drafting."""

    verify: float
    draft: float


FITTED = {1: "164e3dc", 2: "a176d55"}  # commits at which STEPS were measured, on one and on two H200s
STEPS = {  # by number of H200s, then by tokens
    1: {
        1: StepTime(9.114, 7.334),
        4: StepTime(17.790, 14.972),
        8: StepTime(28.904, 24.457),
        32: StepTime(83.651, 67.312),
    },
    2: {
        1: StepTime(5.694, 3.989),
        4: StepTime(10.619, 7.904),
        8: StepTime(16.441, 12.766),
        32: StepTime(46.863, 34.785),
    },
}
MEETINGS = {1: Meeting(1.839, 4.351), 4: Meeting(1.391, 7.537), 8: Meeting(1.142, 11.214), 32: Meeting(1.062, 36.099)}
LONG_STEPS = {
    "bf16": StepTime(10.078, 7.835),
    "fp8": StepTime(10.589, 7.579),
}  # steps of one token at LONG, on one H200, at commit LONG_FITTED
LONG_FITTED = "758818a"
ROUNDS_FITTED = "6c1c330", "164e3dc"  # commits at which the rounds on one H200 were measured
ROUNDS = {
    1: RoundExcess(2.305, 0.058),
    2: RoundExcess(2.533, 0.079),
    3: RoundExcess(2.907, 0.113),
    4: RoundExcess(3.414, 0.135),
}
# One H200 divides nothing; of two, each had the drafter's whole body (`RoundCase.whole`). The excess over a round's
# floors is taken from one H200 only.
ROUND_MS = {  # whole rounds, by number of H200s, then by draft tokens
    1: {1: 13.101, 2: 16.632, 3: 20.257, 4: 23.962},
    2: {2: 10.011, 3: 12.021, 4: 14.078},
}
BLOCK_DRAFTS = GOLDEN_BLOCK_DRAFTS
BLOCKS = {DFLASH: RoundExcess(4.477, 0.680), DSPARK: RoundExcess(4.444, 0.573)}  # of BLOCK_DRAFTS draft tokens
BLOCK_MS = {DFLASH: 31.123, DSPARK: 30.332}  # whole rounds on one H200
BLOCKS_FITTED = "28fc23af"
SUMS_OF_A_LAYER = 2
SUMS = SUMS_OF_A_LAYER * KIMI_K26.num_hidden_layers
NVFP4_OVER_INT4 = 0.03  # share of the time to read the experts: measured by a probe, gate and up of one token
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def excess(tokens: int) -> StepExcess:
    """The excess of a step of 1 to 32 tokens, interpolated linearly between the measured steps."""
    return StepExcess(*_between(tokens, {count: _excess(count) for count in TOKENS}))


def _excess(tokens: int) -> StepExcess:
    """Solves kept + divided = excess of one rank; kept + divided / 2 = excess of two ranks without all-reduces."""
    one, two = STEPS[1][tokens], STEPS[2][tokens]
    meeting = MEETINGS[tokens]
    alone = one.ms - one.read
    shared = two.ms - two.read - (SUMS * meeting.sum + meeting.gather) / 1e3
    divided = 2 * (alone - shared)
    return StepExcess(alone - divided, divided)


def _between(tokens: int, measured: Mapping[int, tuple[float, ...]]) -> tuple[float, ...]:
    low = max(count for count in measured if count <= tokens)
    high = min(count for count in measured if count >= tokens)
    share = (tokens - low) / (high - low) if high > low else 0.0
    return tuple(a + share * (b - a) for a, b in zip(measured[low], measured[high], strict=True))


def long_ms(kv_dtype: str) -> float:
    """Milliseconds by which the excess of one row at LONG is higher than at SHORT."""
    longer, shorter = LONG_STEPS[kv_dtype], STEPS[1][1]
    return (longer.ms - longer.read) - (shorter.ms - shorter.read)


def like_kimi(config: K2Config) -> bool:
    """Whether the config has the sizes of the measured model; the format of the experts may differ."""
    sizes = (
        "hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
        "v_head_dim n_routed_experts num_experts_per_tok n_shared_experts first_k_dense_replace moe_intermediate_size "
        "intermediate_size vocab_size"
    )
    return all(getattr(config, name) == getattr(KIMI_K26, name) for name in sizes.split())


def distinct_experts(config: K2Config, tokens: int) -> float:
    """Mean distinct experts of one layer if each token chooses k of E independently: E (1 - (1 - k / E)^T)."""
    missed = (1 - config.num_experts_per_tok / config.n_routed_experts) ** tokens
    return config.n_routed_experts * (1 - missed)


@dataclass(frozen=True)
class PredictedStep:
    """One predicted step of `rows` rows of `tokens` tokens each: milliseconds, but for `gb` and `experts`.

    gb       gigabytes of a rank's floor: every byte once over all ranks, contexts included
    floor    time to read them
    whole    time for reads that each rank does in full though the floor divides them: contexts, projections into
             attention
    experts  distinct experts per layer
    kept, divided, sums, gather  the excess over floor and whole; sums: all-reduces
    nvfp4    added time with NVFP4 experts instead of INT4
    """

    rows: int
    tokens: int
    gb: float
    experts: float
    floor: float
    whole: float
    kept: float
    divided: float
    sums: float
    gather: float
    nvfp4: float

    @property
    def ms(self) -> float:
        """Milliseconds of the whole step with INT4 experts."""
        return self.floor + self.whole + self.kept + self.divided + self.sums + self.gather


@dataclass(frozen=True)
class PredictedRanks:
    """The ranks of a model on a machine. The caller must have called check_ranks."""

    config: K2Config
    on: Several

    @property
    def machine(self) -> PeakRates:
        """The limits of one rank."""
        return PeakRates(self.on.chip.name, self.on.chip.reads.value, self.on.chip.flops.value)

    def depth(self, rows: int, tokens: int, context: int, kv_dtype: str) -> DepthCase:
        """The case with these sizes."""
        layers = self.config.num_hidden_layers
        return DepthCase(
            shape="", config=self.config, physical=layers, rows=rows, tokens=tokens, context=context,
            kv_dtype=KV_DTYPES[kv_dtype], overlap=0.0, ranks=self.on.count,
        )  # fmt: skip

    def step(self, rows: int, tokens: int, context: int, kv_dtype: str = "bf16") -> PredictedStep:
        """Predicts a step of 1 to 32 tokens (rows x tokens)."""
        depth, machine, all_tokens = self.depth(rows, tokens, context, kv_dtype), self.machine, rows * tokens
        layer = distinct_experts(self.config, all_tokens)
        experts = layer * self.config.moe_layers
        cost = depth.cost(experts)
        floor = 1e3 * cost.seconds(machine)
        # As in the measured steps. Ranks now divide both if that is faster; this gain is not fitted, so not predicted.
        whole = 1e3 * depth.cost(experts, divided=False).seconds(machine) - floor
        kept, divided = excess(all_tokens)
        kept += long_ms(kv_dtype) * rows * max(context - SHORT, 0) / (LONG - SHORT)
        nvfp4 = NVFP4_OVER_INT4 * experts * depth.expert_bytes / machine.bytes_per_s
        return PredictedStep(
            rows, tokens, cost.bytes / 1e9, layer, floor, whole,
            kept, divided / self.on.count, SUMS * self.sum_us(all_tokens) / 1e3, self.gather_us(all_tokens) / 1e3,
            1e3 * nvfp4,
        )  # fmt: skip

    def round(self, drafts: int, kv_dtype: str = "bf16", *, whole: bool = False) -> tuple[PredictedStep, float]:
        """(the verifying step, milliseconds of drafting) of one row with a drafter that the ranks divide.

        Drafting is its floor, its excess on one H200 (all of it kept), and per pass two all-reduces and a gather.
        whole: each rank has the drafter's whole body, as in the measurement on two H200s (ROUND_MS); no all-reduces.
        """
        meeting = self.gather_us(1) + (0.0 if whole else SUMS_OF_A_LAYER * self.sum_us(1))
        rates = rates_of(GOLDEN[drafts - 1], drafts, "accept")
        step, drafting = self._round(EAGLE3_MLA, rates, ROUNDS[drafts], kv_dtype, whole=whole)
        return step, drafting + drafts * meeting / 1e3

    def block_round(self, shape: str, kv_dtype: str = "bf16") -> tuple[PredictedStep, float]:
        """(the verifying step, milliseconds of drafting) of one row with a block drafter of BLOCKS, of BLOCK_DRAFTS
        draft tokens: two all-reduces a layer and one gather."""
        rates = rates_of(golden_block(BLOCK_DRAFTS), BLOCK_DRAFTS, "accept")
        drafter = public_drafter(shape, self.config)
        assert isinstance(drafter, BlockConfig)
        sums = SUMS_OF_A_LAYER * drafter.num_hidden_layers * self.sum_us(drafter.block_size)
        step, drafting = self._round(shape, rates, BLOCKS[shape], kv_dtype)
        return step, drafting + (sums + self.gather_us(BLOCK_DRAFTS)) / 1e3

    def _round(
        self, shape: str, rates: tuple[float, ...], above: RoundExcess, kv_dtype: str, *, whole: bool = False
    ) -> tuple[PredictedStep, float]:
        """(the verifying step, milliseconds of drafting without communication)."""
        tokens = 1 + len(rates)
        step, alone = self.step(1, tokens, SHORT, kv_dtype), excess(tokens)
        case = RoundCase(
            depth=self.depth(1, tokens, SHORT, kv_dtype),
            drafter=public_drafter(shape, self.config),
            rates=rates,
            whole=whole,
        )
        _, floor = floors(case, step.experts * self.config.moe_layers, self.machine)
        return replace(step, kept=step.kept + above.verify - alone.kept - alone.divided), floor + above.draft

    def sum_us(self, tokens: int) -> float:
        """Microseconds of one all-reduce: that of two ranks, plus the bytes pushed to each further rank, in float32."""
        if self.on.count == 1:
            return 0.0
        pushed = (self.on.count - 2) * tokens * self.config.hidden_size * 4
        return Meeting(*_between(tokens, MEETINGS)).sum + 1e6 * pushed / self.on.chip.link.value

    def gather_us(self, tokens: int) -> float:
        """Microseconds of gathering logits: that of two ranks, plus the additional bytes that more ranks push."""
        ranks = self.on.count
        if ranks == 1:
            return 0.0
        pushed = tokens * self.config.vocab_size * 4 * ((ranks - 1) / ranks - 1 / 2)
        return Meeting(*_between(tokens, MEETINGS)).gather + 1e6 * pushed / self.on.chip.link.value
