"""Memory needed by a step of a given depth: a pure function, and an explanation of its arithmetic."""

import dataclasses
from dataclasses import dataclass

from redline.bench.step.depth import DepthCase
from redline.errors import ConfigError
from redline.messages.job import PAGE_TOKENS
from redline.model.k2.random_weights import check_in_memory
from redline.model.k2.shard import weight_bytes


@dataclass(frozen=True)
class DepthMemory:
    """Bytes of weights and KV pages of a case.

    Every layer has KV pages of its own; only the physical layers have weights.

    drafter  bytes of the drafter, if any, and of the weights it is converted from
    grows    tokens by which a row grows during the measurement, after the first step
    draft_kv bytes per token of the drafter's KV pages
    """

    depth: DepthCase
    drafter: int = 0
    grows: int = 0
    draft_kv: int = 0

    @property
    def ends(self) -> int:
        """Bytes of the embedding, the head and the last norm."""
        return self._weights(0)

    @property
    def dense(self) -> int:
        """Bytes of all dense layers."""
        return self._weights(self.depth.dense) - self.ends

    @property
    def layer(self) -> int:
        """Bytes of one MoE layer."""
        first = self.depth.config.first_k_dense_replace
        return self._weights(first + 1) - self._weights(first)

    @property
    def weights(self) -> int:
        """Bytes of all weights in memory."""
        return self._weights(self.depth.physical)

    def _weights(self, layers: int) -> int:
        """Bytes of `layers` layers, the embedding, the head and the last norm: one rank's part of each."""
        return weight_bytes(dataclasses.replace(self.depth.config, num_hidden_layers=layers), self.depth.ranks)

    @property
    def tokens(self) -> int:
        """Token capacity of one row's pages, rounded up to whole pages."""
        return -(-(self.depth.context + self.depth.tokens + self.grows) // PAGE_TOKENS) * PAGE_TOKENS

    @property
    def kv(self) -> int:
        """Bytes of the KV pages of all rows and layers."""
        each = self.depth.config.kv_bytes_per_token(self.depth.kv_dtype) + self.draft_kv
        return self.depth.rows * self.tokens * each

    @property
    def whole(self) -> int:
        """Total bytes: weights, drafter and KV pages."""
        return self.weights + self.drafter + self.kv

    def explain(self) -> list[str]:
        """Lines that show each number with its arithmetic."""
        depth, config = self.depth, self.depth.config
        routed = config.n_routed_experts * depth.expert_bytes
        moe = depth.physical - depth.dense
        drafted = f" + {self.draft_kv:,} of the drafter" if self.draft_kv else ""
        lines = [
            f"a layer          {_size(self.layer - routed)} + {config.n_routed_experts} experts x "
            f"{_size(depth.expert_bytes)} = {_size(self.layer)}",
            f"weights          {moe} layers x {_size(self.layer)} + {depth.dense} dense {_size(self.dense)} + "
            f"embedding and head {_size(self.ends)} = {_size(self.weights)}",
            f"KV               {depth.rows} rows x {self.tokens:,} tokens x ({config.num_hidden_layers} layers x "
            f"{config.kv_width} values x {depth.kv_dtype.itemsize} bytes{drafted}) = {_size(self.kv)}",
            f"in all           {_size(self.whole)}",
        ]
        if self.drafter:
            lines.insert(3, f"drafter          {_size(self.drafter)}, with the weights it is converted from")
        return lines[1:] if moe <= 0 else lines

    def layers_that_fit(self, free: int) -> int:
        """Number of physical layers that fit into `free` bytes, dense ones included; at most the layers of the step."""
        left = free - self.ends - self.dense - self.drafter - self.kv
        if left < 0:
            return 0
        return min(self.depth.dense + left // self.layer, self.depth.config.num_hidden_layers)

    def experts_that_fit(self, free: int) -> int:
        """Number of experts per physical layer that fit into `free` bytes."""
        depth = self.depth
        moe = max(depth.physical - depth.dense, 1)
        missing = max(0, self.whole - free)
        return max(0, depth.config.n_routed_experts - -(-missing // (moe * depth.expert_bytes)))

    def refusal(self, free: int) -> ConfigError:
        """The error that reports the sizes that would fit into `free` bytes; `explain` shows the arithmetic."""
        depth, layers, experts = self.depth, self.layers_that_fit(free), self.experts_that_fit(free)
        advice = [f"--alias {layers}"] if layers > depth.dense else []
        advice += [f"--experts {experts}"] if experts >= depth.config.num_experts_per_tok else []
        fits = " or ".join(advice) or "fewer rows, a shorter context or fewer --experts: no layer fits"
        return ConfigError(f"the step needs {_size(self.whole)}, but only {_size(free)} are free; use {fits}")


def check(depth: DepthCase) -> None:
    """Raises ConfigError if the sizes of the case contradict each other."""
    config = depth.config
    check_in_memory(config, depth.physical, "alias")
    if config.n_routed_experts < config.num_experts_per_tok:
        raise ConfigError(f"experts is {config.n_routed_experts}; a token needs {config.num_experts_per_tok}")
    if depth.context + depth.tokens > config.max_position_embeddings:
        raise ConfigError(
            f"context is {depth.context:,}, followed by {depth.tokens} tokens; {depth.shape} has a maximum of "
            f"{config.max_position_embeddings:,}"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if abs(count) >= 1e9 else f"{count / 1e6:,.1f} MB"
