"""The step of `depth` on a GPU: the serving kernels, random weights in their layouts, KV pages of random values, forced
routing, captured as CUDA graphs.

T tokens of a step, k experts of a token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from redline.bench.step.depth import DepthCase, DepthStage, Progress, captured
from redline.bench.step.depth_fit import DepthMemory
from redline.kernels.by_chip import best, linear
from redline.kernels.cuda.block import FEW, MOST_DECODED, GpuBlock
from redline.kernels.cuda.collectives.rank_links import Linked, RankLinks
from redline.kernels.cuda.collectives.share_latents import divides
from redline.kernels.cuda.decode.absorb import absorb
from redline.kernels.cuda.decode.attend import attend
from redline.kernels.cuda.decode.choose_experts import Pairs
from redline.kernels.cuda.decode.embed import embed
from redline.kernels.cuda.decode.experts_down import experts_down
from redline.kernels.cuda.decode.experts_up import experts_up
from redline.kernels.cuda.decode.gates import gates
from redline.kernels.cuda.decode.pairs_down import pairs_down
from redline.kernels.cuda.decode.project_a import project_a, shares
from redline.kernels.cuda.decode.project_out import project_out
from redline.kernels.cuda.decode.project_q import project_q
from redline.kernels.cuda.decode.unabsorb import unabsorb
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.group import ALONE, Group
from redline.kernels.inputs import Inputs
from redline.messages.job import PAGE_TOKENS
from redline.model.k2.cuda import GpuK2
from redline.model.k2.forced_routing import draw
from redline.model.k2.random_gpu import random_gpu_k2
from redline.ops.op import Cost

CUDA = torch.device("cuda")
ROTATIONS = 3  # CUDA graphs of a step; each maps its layers to other physical layers


class GpuStep:
    """A `DepthStep` of the serving kernels on a GPU. routing int32 [layers, T, k]: read by each run.

    progress: called with (bytes of weights created, total bytes). The constructor captures the CUDA graphs.
    """

    def __init__(
        self,
        depth: DepthCase,
        progress: Progress,
        device: torch.device = CUDA,
        group: Group = ALONE,
        like: "GpuStep | None" = None,
    ) -> None:
        """group: must have `depth.ranks` ranks. like: a step to share the model with; None: build a new model."""
        config, whole = depth.config, DepthMemory(depth).weights
        place = [depth.physical_layer(layer) for layer in range(config.num_hidden_layers)]

        def made(count: int, of: int) -> None:
            progress(whole * count // of, whole)

        if like is None:
            self._model = random_gpu_k2(config, place, device, progress=made, group=group)
            at = {depth.physical_layer(layer): block for layer, block in enumerate(self._model.gpu_blocks)}
            self._blocks = [at[place] for place in range(depth.physical)]
        else:
            self._model, self._blocks = like._model, like._blocks
        self._depth = depth
        sizes = config.num_hidden_layers, depth.rows, depth.tokens, config.n_routed_experts, config.num_experts_per_tok
        self.routing = draw(torch.Generator(device).manual_seed(0), *sizes)
        self._inputs = _inputs(depth, self._model, self.routing)
        self._planes = _planes(depth, self._inputs.tables.numel(), device)
        with torch.inference_mode():
            self.captures: Sequence[Callable[[], object]] = [
                captured(partial(self.run, rotation), device) for rotation in range(min(ROTATIONS, depth.physical))
            ]
            # Steps of more tokens use other kernels, and ranks that divide contexts communicate in attention: neither
            # is timed op by op.
            apart = depth.rows * depth.tokens <= MOST_DECODED and not self._divides(group)
            self.ops: Sequence[DepthStage] = _Ops(self).stages() if apart else ()

    def run(self, rotation: int = 0) -> Tensor:
        """The argmax token of each row, int64 [T].

        rotation: number of places by which the MoE layers are shifted among the physical layers.
        """
        model, depth = self._model, self._depth
        model.gpu_blocks = [self._blocks[depth.physical_layer(i, rotation)] for i in range(len(model.gpu_blocks))]
        hidden, _ = model.forward(self._inputs, self._planes)
        return best(model.logits(hidden))[0]

    def _divides(self, group: Group) -> bool:
        depth, c = self._depth, self._depth.part
        sizes = depth.rows * depth.tokens, c.num_attention_heads, c.kv_lora_rank, depth.context + depth.tokens
        return divides(links_of(group), *sizes, depth.tokens)

    @property
    def parts(self) -> tuple[DepthCase, GpuK2, Sequence[GpuBlock], Inputs, Tensor]:
        """Operands of the timed ops: the case, model, blocks by physical layer, inputs and KV pages of all layers."""
        return self._depth, self._model, self._blocks, self._inputs, self._planes


def links_of(group: Group) -> RankLinks | None:
    """A group's links, if its ranks can access one another's memory; else None."""
    return group.links if isinstance(group, Linked) else None


def _inputs(depth: DepthCase, model: GpuK2, routing: Tensor) -> Inputs:
    """Rows with `context` tokens before them; each token attends to all tokens before it in its row."""
    device, count = model.device, depth.rows * depth.tokens
    pages = -(-(depth.context + depth.tokens) // PAGE_TOKENS)
    tables = torch.randperm(depth.rows * pages, device=device).to(torch.int32).view(depth.rows, pages)
    slots = torch.arange(depth.rows, device=device).repeat_interleave(depth.tokens)
    positions = depth.context + torch.arange(depth.tokens, device=device).repeat(depth.rows)
    cos, sin = model.angles(positions)
    return Inputs(
        ids_T=torch.randint(depth.config.vocab_size, (count,), device=device),
        cos_T=cos,
        sin_T=sin,
        rows_T=tables[slots, positions // PAGE_TOKENS].long() * PAGE_TOKENS + positions % PAGE_TOKENS,
        chunks=(),
        tokens_Q=torch.arange(count, dtype=torch.int32, device=device),
        slots_Q=slots.to(torch.int32),
        lengths_Q=(positions + 1).to(torch.int32),
        tables=tables,
        longest=depth.context + depth.tokens,
        positions=depth.tokens,
        routing=routing,
    )


def _planes(depth: DepthCase, pages: int, device: torch.device) -> Tensor:
    sizes = depth.config.num_hidden_layers, pages, PAGE_TOKENS, depth.config.kv_width
    planes = torch.empty(sizes, dtype=depth.kv_dtype, device=device)
    for plane in planes:
        plane.copy_(torch.randn(sizes[1:], device=device))
    return planes


class _Ops:
    """Each op on its own, on the activations of one layer."""

    def __init__(self, step: GpuStep) -> None:
        self.depth, self.model, self.blocks, self.inputs, self.planes = step.parts
        self.routing = step.routing
        self.dense, self.layers = self.depth.dense, self.depth.config.num_hidden_layers
        self.every = range(self.depth.physical)
        self.last = self.blocks[-1]

    def attention(self, q: Tensor) -> tuple[list[DepthStage], Tensor]:
        """From q [T, H, N + P] to o."""
        i, w, scale = self.inputs, self.last.attention, self.last.softmax_scale
        plane, queries = self.planes[-1], (i.tokens_Q, i.slots_Q, i.lengths_Q, i.tables)
        longest, positions = self.depth.context + self.depth.tokens, self.depth.tokens
        q_abs = absorb(q, w.w_uk)
        o, lse = attend(q_abs, *queries, plane, scale, longest, positions=positions)
        stages = [
            self.stage(
                "absorb", lambda k: absorb(q, self.blocks[k].attention.w_uk), absorb.op.cost(absorb.op.args(q, w.w_uk))
            ),
            self.stage(
                "attend",
                lambda k: attend(q_abs, *queries, self.planes[k], scale, longest, positions=positions),
                attend.op.cost(attend.op.args(q_abs, *queries, plane, scale, longest, positions=positions)),
            ),
            self.stage(
                "unabsorb",
                lambda k: unabsorb(o, lse, self.blocks[k].attention.w_uv),
                unabsorb.op.cost(unabsorb.op.args(o, lse, w.w_uv)),
            ),
        ]
        return stages, unabsorb(o, lse, w.w_uv)

    def experts(
        self, pairs: Mapping[int, Pairs], x: Tensor, rstd: Tensor, h: Tensor, residual: Tensor
    ) -> list[DepthStage]:
        """From the choice of experts, by layer, to the residual."""
        e, count, tokens = self.last.experts, self.layers - self.dense, self.depth.rows * self.depth.tokens
        if e is None:
            return []

        def up(layer: int):
            moe = self.blocks[layer].experts
            assert moe is not None
            return experts_up(x, rstd, moe.up, pairs[layer])

        def apart(layer: int):
            moe = self.blocks[layer].experts
            assert moe is not None
            return pairs_down(routed, pairs[layer], moe.down)

        def shared_down(layer: int):
            w = self.blocks[layer]
            return project_out(h, w.down, residual, w.mlp_norm, sums)

        def down(layer: int):
            w = self.blocks[layer]
            assert w.experts is not None
            assert not isinstance(w.down, Tiled)
            return experts_down(routed, pairs[layer], w.experts.down, h, w.down, residual, w.mlp_norm)

        c, each = self.depth.part, tokens * e.chosen
        product_flops = 2 * each * c.moe_intermediate_size * c.hidden_size
        shared_flops = 2 * tokens * c.hidden_size * self.last.width
        shared = Cost(self.last.down.nbytes + h.nbytes, shared_flops)
        routed = up(self.depth.physical - 1)
        into = Cost(x.nbytes + routed.nbytes, 2 * product_flops)
        out = Cost(routed.nbytes + 3 * residual.nbytes, product_flops) + shared
        first = DepthStage("experts_up", up, into, count, expert_cost=Cost(e.up.nbytes // e.up.experts))
        if tokens > FEW and e.lists(tokens):
            rows = Cost(routed.nbytes + residual.nbytes, product_flops)
            sums = apart(self.depth.physical - 1)
            return [
                first,
                DepthStage("pairs_down", apart, rows, count, expert_cost=Cost(e.down.nbytes // e.down.experts)),
                DepthStage("shared_down", shared_down, shared + Cost(4 * residual.nbytes), count),
            ]
        return [
            first,
            DepthStage("experts_down", down, out, count, expert_cost=Cost(e.down.nbytes // e.down.experts)),
        ]

    def head(self, x_TK: Tensor) -> DepthStage:
        head, hidden = self.model.head, x_TK[:, : self.depth.config.hidden_size]
        assert isinstance(head, Tiled)
        return DepthStage("head", lambda _: self.model.logits(hidden), linear.op.cost(linear.op.args(hidden, head)), 1)

    def stage(self, name: str, run: Callable[[int], object], cost: Cost) -> DepthStage:
        return DepthStage(name, run, cost, self.layers, self.every)

    def projections(self, tokens: int) -> tuple[list[Tiled], bool]:
        """W_a of each physical layer as a step of `tokens` tokens reads it, and whether that is a rank's part only."""
        links, whole = links_of(self.model.group), [block.attention.w_a for block in self.blocks]
        if links is None or not shares(whole[0], links, tokens):
            return whole, False
        return [Tiled.prepare(w.dense()[:, : w.inputs // links.ranks]) for w in whole], True

    def stages(self) -> list[DepthStage]:
        i, last, w = self.inputs, self.last, self.last.attention
        table, plane = self.model.embedding_VD, self.planes[-1]
        residual, x, squares = embed(i.ids_T, table, last.attention_norm)

        q_a, q_squares, kv = project_a(x, squares, w.w_a, w.q_norm, last.eps)
        projected, own = self.projections(x.shape[0])
        x_a = x[:, : projected[-1].inputs].contiguous() if own else x

        def a(layer: int):
            return project_a(x_a, squares, projected[layer], w.q_norm, last.eps)

        angles = i.cos_T, i.sin_T, i.rows_T

        def q(layer: int):
            part = self.blocks[layer].attention
            norms = kv, part.kv_norm
            return project_q(q_a, q_squares, part.w_q, w.heads, *norms, *angles, self.planes[layer], part.eps)

        queries = q(self.depth.physical - 1)
        attention, o = self.attention(queries)

        def out(layer: int):
            return project_out(o, self.blocks[layer].o_proj, residual, last.mlp_norm)

        count = 0 if last.experts is None else last.experts.bias_E.shape[0]

        def gate(layer: int):
            part = self.blocks[layer]
            choice = None if part.experts is None else part.experts.choice(self.routing[layer])
            return gates(x, squares, part.gates, count if choice else 0, part.width, last.eps, choice)

        _, h, rstd, _ = gate(self.depth.physical - 1)
        moe_layers = range(self.dense, self.depth.physical)
        # Each op runs alone: `gates` is not the previous launch, so no kernel waits for its `ready`.
        chosen = {layer: replace(pairs, ready=None) for layer in moe_layers if (pairs := gate(layer)[3])}
        a_cost = project_a.op.cost(project_a.op.args(x_a, squares, projected[-1], w.q_norm, last.eps))
        q_cost = project_q.op.cost(
            project_q.op.args(
                *(q_a, q_squares, w.w_q, w.heads, kv, w.kv_norm, i.cos_T, i.sin_T, i.rows_T, plane, w.eps)
            )
        )
        gate_cost = gates.op.cost(gates.op.args(x, squares, last.gates, count, last.width, last.eps))
        stages = [
            DepthStage("embed", lambda _: embed(i.ids_T, table, last.attention_norm), Cost(6 * residual.nbytes), 1),
            self.stage("project_a", a, a_cost),
            self.stage("project_q", q, q_cost),
            *attention,
            self.stage(
                "project_out", out, project_out.op.cost(project_out.op.args(o, last.o_proj, residual, last.mlp_norm))
            ),
            DepthStage("gates", gate, gate_cost, self.layers - self.dense, moe_layers),
            *self.experts(chosen, x, rstd, h, residual),
        ]
        if self.dense:
            stages += self.dense_stages(x, squares, residual)
        return [*stages, self.head(x)]

    def dense_stages(self, x: Tensor, squares: Tensor, residual: Tensor) -> list[DepthStage]:
        first = self.blocks[0]
        down = first.down
        assert isinstance(down, Tiled)
        h = gates(x, squares, first.gates, 0, first.width, first.eps)[1]
        up_cost = gates.op.cost(gates.op.args(x, squares, first.gates, 0, first.width, first.eps))
        down_cost = project_out.op.cost(project_out.op.args(h, down, residual, first.mlp_norm))

        def up(layer: int):
            return gates(x, squares, first.gates, 0, first.width, first.eps)

        return [
            DepthStage("dense gates", up, up_cost, self.dense, range(self.dense)),
            DepthStage(
                "dense down",
                lambda _: project_out(h, down, residual, first.mlp_norm),
                down_cost,
                self.dense,
                range(self.dense),
            ),
        ]
