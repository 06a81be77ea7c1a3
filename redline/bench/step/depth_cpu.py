"""The step of `depth` on a CPU: the serving kernels op by op, random weights, pages of random rows.

The model's router chooses the experts, since these kernels cannot force them. Meant for small shapes and for tests of
the measurement; `redline bench decode FOLDER` measures the path that serves on a CPU.

T tokens, D hidden, H heads, N nope, P rope, R latent rank, V value, K inputs of a product.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redline.bench.step.depth import DepthCase, DepthStage, Progress
from redline.bench.step.depth_fit import DepthMemory
from redline.kernels.by_chip import linear
from redline.kernels.cpu.add_norm import add_norm
from redline.kernels.cpu.blocks.block import Block, Moe
from redline.kernels.cpu.mla import mla_decode, mla_qkv
from redline.kernels.cpu.moe import moe
from redline.kernels.cpu.panels import Matrix
from redline.kernels.cpu.route_experts import route_experts
from redline.kernels.inputs import Inputs
from redline.messages.job import PAGE_TOKENS
from redline.model.k2.random_cpu import CpuWeights
from redline.ops.mla import rounds
from redline.ops.moe import Routed
from redline.ops.op import Cost


class CpuStep:
    """A `DepthStep` of the serving kernels on a CPU. routing: the experts that the model chose, written by each run.

    progress: called with (bytes of weights created, total bytes).
    """

    def __init__(self, depth: DepthCase, progress: Progress) -> None:
        config = depth.config
        random = CpuWeights(config, torch.Generator().manual_seed(0))
        whole = DepthMemory(depth).weights
        self._depth = depth
        self._ids = torch.randint(config.vocab_size, (depth.rows * depth.tokens,), generator=random.generator)
        self._embedding_VD = random.normal(config.vocab_size, config.hidden_size).to(torch.bfloat16)
        self._head = random.matrix(config.vocab_size, config.hidden_size)
        self._norm = random.norm(config.hidden_size)
        self._blocks: list[Block] = []
        for layer in range(depth.physical):
            self._blocks.append(random.block(layer))
            progress(whole * (layer + 1) // depth.physical, whole)
        self._inputs = _inputs(depth, self._ids)
        self._planes = _planes(depth, self._inputs.tables.numel(), random.generator)
        self.routing = torch.zeros(
            config.num_hidden_layers, self._ids.shape[0], config.num_experts_per_tok, dtype=torch.int32
        )
        self.captures: Sequence[Callable[[], object]] = (self.run,)
        self.ops: Sequence[DepthStage] = _Ops(depth, self._blocks, self._inputs, self._planes, self._head).stages()

    def run(self) -> Tensor:
        """Logits, float32 [T, vocabulary]."""
        residual, partial = self._embedding_VD[self._ids].float(), None
        for layer in range(self._depth.config.num_hidden_layers):
            residual, partial = self._layer(layer, residual, partial)
        _, x_TD = add_norm(residual, partial, self._norm, self._depth.config.rms_norm_eps)
        return linear(x_TD, self._head)

    def _layer(self, layer: int, residual: Tensor, partial: Tensor | None) -> tuple[Tensor, Tensor]:
        """The ops of `kernels.cpu.blocks.block`, one by one."""
        block, inputs, plane = self._blocks[self._depth.physical_layer(layer)], self._inputs, self._planes[layer]
        w = block.attention
        residual, x = add_norm(residual, partial, block.attention_norm, block.eps)
        q = mla_qkv(x, w, inputs.cos_T, inputs.sin_T, inputs.rows_T, plane)
        o = _attend(q, block, inputs, plane)
        partial = linear(o.flatten(1), block.o_proj, rounds(plane))
        residual, x = add_norm(residual, partial, block.mlp_norm, block.eps)
        routed = None
        if block.experts is not None:
            routed = _route(x, block.experts)
            self.routing[layer] = routed.ids_TK
        return residual, moe(x, block.shared_gate_up, block.shared_down, routed, rounds(plane))


class _Ops:
    """Each op on its own, on activations of a step's shape."""

    def __init__(
        self, depth: DepthCase, blocks: Sequence[Block], inputs: Inputs, planes: Sequence[Tensor], head: Matrix
    ) -> None:
        self._depth, self._blocks, self._inputs, self._planes, self._head = depth, blocks, inputs, planes, head
        self._x_TD = torch.randn(depth.rows * depth.tokens, depth.config.hidden_size)
        self._zeros = torch.zeros_like(self._x_TD)
        block = blocks[-1]
        self._q = mla_qkv(self._x_TD, block.attention, inputs.cos_T, inputs.sin_T, inputs.rows_T, planes[-1])
        self._o = _attend(self._q, block, inputs, planes[-1])
        self._routed = _route(self._x_TD, block.experts) if block.experts is not None else None

    def stages(self) -> list[DepthStage]:
        depth, x = self._depth, self._x_TD
        layers, first = depth.config.num_hidden_layers, self._blocks[-1]
        w, inputs, plane = first.attention, self._inputs, self._planes[-1]
        queries = inputs.tokens_Q, inputs.slots_Q, inputs.lengths_Q, inputs.tables
        every = range(depth.physical)
        stages = [
            DepthStage(
                "add_norm",
                self._add_norm,
                add_norm.op.cost(add_norm.op.args(x, x, first.mlp_norm, first.eps)),
                2 * layers + 1,
                every,
            ),
            DepthStage(
                "mla_qkv",
                self._project,
                mla_qkv.op.cost(mla_qkv.op.args(x, w, inputs.cos_T, inputs.sin_T, inputs.rows_T, plane)),
                layers,
                every,
            ),
            DepthStage(
                "mla_decode",
                lambda layer: _attend(self._q, self._blocks[layer], inputs, self._planes[layer]),
                mla_decode.op.cost(mla_decode.op.args(self._q, w, first.softmax_scale, *queries, plane, self._o)),
                layers,
                every,
            ),
            DepthStage(
                "project_out",
                lambda layer: linear(self._o.flatten(1), self._blocks[layer].o_proj, rounds(plane)),
                linear.op.cost(linear.op.args(self._o.flatten(1), first.o_proj)),
                layers,
                every,
            ),
        ]
        if depth.dense:
            gate_up, down = self._blocks[0].shared_gate_up, self._blocks[0].shared_down
            dense = moe.op.cost(moe.op.args(x, gate_up, down, None))
            stages.append(DepthStage("dense_mlp", self._mlp, dense, depth.dense, range(depth.dense)))
        if first.experts is not None:
            stages += self._expert_stages(first, first.experts, layers - depth.dense)
        return [
            *stages,
            DepthStage("head", lambda _: linear(x, self._head), linear.op.cost(linear.op.args(x, self._head)), 1),
        ]

    def _expert_stages(self, block: Block, experts: Moe, count: int) -> list[DepthStage]:
        depth, x = self._depth, self._x_TD
        e = experts
        route = route_experts.op.cost(route_experts.op.args(x, e.router, e.bias_E, e.chosen, e.normalise, e.scale))
        pairs = x.shape[0] * e.chosen
        products = Cost(8 * pairs, 2 * pairs * depth.config.expert_parameters)
        shared = moe.op.cost(moe.op.args(x, block.shared_gate_up, block.shared_down, None))
        one = Cost(depth.expert_bytes)
        return [
            DepthStage("route_experts", self._choose, route, count),
            DepthStage("moe", self._mlp, shared + products, count, expert_cost=one),
        ]

    def _add_norm(self, layer: int) -> object:
        block = self._blocks[layer]
        return add_norm(self._x_TD, self._zeros, block.mlp_norm, block.eps)

    def _project(self, layer: int) -> object:
        inputs, w = self._inputs, self._blocks[layer].attention
        return mla_qkv(self._x_TD, w, inputs.cos_T, inputs.sin_T, inputs.rows_T, self._planes[layer])

    def _choose(self, layer: int) -> object:
        experts = self._blocks[layer].experts
        assert experts is not None
        return _route(self._x_TD, experts)

    def _mlp(self, layer: int) -> object:
        block, routed = self._blocks[layer], None
        if block.experts is not None and self._routed is not None:
            ids, weights = self._routed.ids_TK, self._routed.weights_TK
            routed = Routed(block.experts.gate_up, block.experts.down, ids, weights)
        return moe(self._x_TD, block.shared_gate_up, block.shared_down, routed, rounds(self._planes[layer]))


def _attend(q_THX: Tensor, block: Block, inputs: Inputs, plane: Tensor) -> Tensor:
    """[T, H, V]"""
    w = block.attention
    o = torch.empty(q_THX.shape[0], w.heads, w.value)
    queries = inputs.tokens_Q, inputs.slots_Q, inputs.lengths_Q, inputs.tables
    mla_decode(q_THX, w, block.softmax_scale, *queries, plane, o)
    return o


def _route(x_TD: Tensor, experts: Moe) -> Routed:
    e = experts
    ids, weights = route_experts(x_TD, e.router, e.bias_E, e.chosen, e.normalise, e.scale)
    return Routed(e.gate_up, e.down, ids, weights)


def _inputs(depth: DepthCase, ids_T: Tensor) -> Inputs:
    """Each row's tokens follow its context. Each row has pages of its own, in order."""
    pages = -(-(depth.context + depth.tokens) // PAGE_TOKENS)
    tables = torch.arange(depth.rows * pages, dtype=torch.int32).view(depth.rows, pages)
    slot_T = torch.arange(depth.rows).repeat_interleave(depth.tokens)
    place_T = (depth.context + torch.arange(depth.tokens)).repeat(depth.rows)
    angle = place_T.float()[:, None] * depth.config.inv_freq()
    return Inputs(
        ids_T=ids_T,
        cos_T=angle.cos(),
        sin_T=angle.sin(),
        rows_T=tables[slot_T, place_T // PAGE_TOKENS].long() * PAGE_TOKENS + place_T % PAGE_TOKENS,
        chunks=(),
        tokens_Q=torch.arange(ids_T.shape[0], dtype=torch.int32),
        slots_Q=slot_T.to(torch.int32),
        lengths_Q=(place_T + 1).to(torch.int32),
        tables=tables,
    )


def _planes(depth: DepthCase, pages: int, generator: torch.Generator) -> list[Tensor]:
    """The KV pages [pages, 64, kv width] of every layer."""
    size = pages, PAGE_TOKENS, depth.config.kv_width
    return [torch.randn(size, generator=generator).to(depth.kv_dtype) for _ in range(depth.config.num_hidden_layers)]
