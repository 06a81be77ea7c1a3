"""What a step of a given depth needs of memory: a pure function whose result prints its own arithmetic."""

import dataclasses
from dataclasses import dataclass

from redline.bench.step.depth import Depth
from redline.errors import ConfigError
from redline.model.k2.random_weights import check_in_memory
from redline.model.k2.shard import weight_bytes
from redline.wire.job import PAGE_TOKENS


@dataclass(frozen=True)
class Memory:
    """Bytes of weights and pages that a case takes.

    Pages are every layer's own, weights only those of the physical layers.

    drafter  bytes of a drafter, where there is one, and of what it is laid out from
    grows    tokens that a row gains while it is measured, beyond those of the first step
    """

    depth: Depth
    drafter: int = 0
    grows: int = 0

    @property
    def ends(self) -> int:
        """Bytes of the embedding, the head and the last norm."""
        return self._weights(0)

    @property
    def dense(self) -> int:
        """Bytes of all layers without experts."""
        return self._weights(self.depth.dense) - self.ends

    @property
    def layer(self) -> int:
        """Bytes of one layer with experts."""
        first = self.depth.config.first_k_dense_replace
        return self._weights(first + 1) - self._weights(first)

    @property
    def weights(self) -> int:
        """Bytes of all weights that lie in memory."""
        return self._weights(self.depth.physical)

    def _weights(self, layers: int) -> int:
        """Bytes of so many layers and the ends, a rank's part of each."""
        return weight_bytes(dataclasses.replace(self.depth.config, num_hidden_layers=layers), self.depth.ranks)

    @property
    def tokens(self) -> int:
        """Tokens that one row's pages hold, whole pages counted."""
        return -(-(self.depth.context + self.depth.tokens + self.grows) // PAGE_TOKENS) * PAGE_TOKENS

    @property
    def kv(self) -> int:
        """Bytes of the pages of all rows and layers."""
        return self.depth.rows * self.tokens * self.depth.config.kv_bytes_per_token(self.depth.kv_dtype)

    @property
    def whole(self) -> int:
        """Bytes in all: weights, the drafter and pages."""
        return self.weights + self.drafter + self.kv

    def explain(self) -> list[str]:
        """Lines for a reader: each number with its arithmetic."""
        depth, config = self.depth, self.depth.config
        routed = config.n_routed_experts * depth.expert_bytes
        moe = depth.physical - depth.dense
        lines = [
            f"a layer          {_size(self.layer - routed)} + {config.n_routed_experts} experts x "
            f"{_size(depth.expert_bytes)} = {_size(self.layer)}",
            f"weights          {moe} layers x {_size(self.layer)} + {depth.dense} dense {_size(self.dense)} + "
            f"embedding and head {_size(self.ends)} = {_size(self.weights)}",
            f"KV               {config.num_hidden_layers} layers x {depth.rows} rows x {self.tokens:,} tokens x "
            f"{config.kv_width} values x {depth.kv_dtype.itemsize} bytes = {_size(self.kv)}",
            f"in all           {_size(self.whole)}",
        ]
        if self.drafter:
            lines.insert(3, f"drafter          {_size(self.drafter)}, with what it is laid out from")
        return lines[1:] if moe <= 0 else lines

    def layers_that_fit(self, free: int) -> int:
        """How many physical layers fit into `free` bytes, the dense ones among them; no more than the step has."""
        left = free - self.ends - self.dense - self.drafter - self.kv
        if left < 0:
            return 0
        return min(self.depth.dense + left // self.layer, self.depth.config.num_hidden_layers)

    def experts_that_fit(self, free: int) -> int:
        """How many experts fit into `free` bytes in each of the physical layers."""
        depth = self.depth
        moe = max(depth.physical - depth.dense, 1)
        missing = max(0, self.whole - free)
        return max(0, depth.config.n_routed_experts - -(-missing // (moe * depth.expert_bytes)))

    def refusal(self, free: int) -> ConfigError:
        """The error that says what would fit into `free` bytes; `explain` has the arithmetic."""
        depth, layers, experts = self.depth, self.layers_that_fit(free), self.experts_that_fit(free)
        advice = [f"--alias {layers}"] if layers > depth.dense else []
        advice += [f"--experts {experts}"] if experts >= depth.config.num_experts_per_tok else []
        fits = " or ".join(advice) or "no layer, as it is: give fewer rows, a shorter context or fewer --experts"
        return ConfigError(f"the step needs {_size(self.whole)}, and {_size(free)} are free; what fits: {fits}")


def check(depth: Depth) -> None:
    """Raises ConfigError where the sizes of the case contradict each other."""
    config = depth.config
    check_in_memory(config, depth.physical, "alias")
    if config.n_routed_experts < config.num_experts_per_tok:
        raise ConfigError(
            f"experts is {config.n_routed_experts}; a token chooses {config.num_experts_per_tok}, so at least as many"
        )
    if depth.context + depth.tokens > config.max_position_embeddings:
        raise ConfigError(
            f"context is {depth.context:,}, and {depth.tokens} tokens follow; {depth.shape} reads "
            f"{config.max_position_embeddings:,}"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if abs(count) >= 1e9 else f"{count / 1e6:,.1f} MB"
