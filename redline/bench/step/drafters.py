"""Drafters of the public sizes for a target, the number of their weights, and the costs of a round's drafting.

Costs are bytes and operations of one rank.
"""

from redline.bench.step.depth import DepthCase
from redline.errors import ConfigError
from redline.model.block.config import BlockConfig
from redline.model.draft_shard import body_left_out, body_ranks, head_ranks
from redline.model.drafter import DrafterConfig
from redline.model.eagle3.config import Eagle3Config, default_layer_ids
from redline.model.k2.config import K2Config
from redline.ops.op import Cost

EAGLE3_MLA, DFLASH, DSPARK = DRAFT_SHAPES = "eagle3-mla", "dflash", "dspark"
KIMI_LAYERS = 61


def public_drafter(shape: str, target: K2Config) -> DrafterConfig:
    """The config of a public drafter, for this target: of DRAFT_SHAPES.

    dflash: z-lab/Kimi-K2.5-DFlash. dspark: novita/kimi-k2.6-dspark, with a bias of rank 256 and a confidence head.
    Raises ConfigError for other names.
    """
    if shape == EAGLE3_MLA:
        return Eagle3Config.for_target(target)
    kimi, mask = target.num_hidden_layers == KIMI_LAYERS, target.vocab_size - 2
    if shape == DFLASH:
        layers = (2, 13, 25, 36, 48, 59) if kimi else default_layer_ids(target.num_hidden_layers)
        return BlockConfig.for_target(target, kind="dflash", layer_ids=layers, num_hidden_layers=6, mask_token_id=mask)
    if shape == DSPARK:
        layers = (2, 30, 58) if kimi else default_layer_ids(target.num_hidden_layers)
        heads = 56 if kimi else None
        return BlockConfig.for_target(
            target, kind="dspark", layer_ids=layers, num_hidden_layers=3, num_attention_heads=heads, mask_token_id=mask
        )
    raise ConfigError(f"draft-shape is {shape!r}; expected {', '.join(DRAFT_SHAPES[:-1])} or {DRAFT_SHAPES[-1]}")


def draft_costs(
    config: DrafterConfig, depth: DepthCase, *, head_bits: int = 16, whole: bool = False
) -> tuple[Cost, ...]:
    """The costs of a round's drafting, of parts that run one after another.

    depth: the verifying step; its `tokens` - 1 drafts are made. Every part reads the rank's weights, and what the
    rank's heads attend to of each row's context, once. head_bits, whole: of chains, as in `RoundCase`.
    """
    if isinstance(config, BlockConfig):
        return _of_block(config, depth)
    return _of_chain(config, depth, head_bits, whole)


def drafter_weights(config: DrafterConfig) -> int:
    """Number of weights in the matrices of a whole drafter. A block drafter without a head of its own reads the
    target's, which is not counted."""
    if isinstance(config, BlockConfig):
        own = head_rows(config) * config.hidden_size if config.draft_vocab_size is not None else 0
        bias = config.markov_rank * (config.vocab_size + head_rows(config))
        return config.hidden_size * config.fused_width + _layers_of_block(config) + own + bias
    c, d = config, config.hidden_size
    heads, rank, nope, value = c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.v_head_dim
    attention = 2 * d * (c.q_lora_rank + c.kv_width) + heads * (
        c.q_lora_rank * c.query_width + rank * (nope + value) + value * d
    )
    return d * c.fused_width + attention + 3 * d * c.intermediate_size + d * head_rows(c)


def head_rows(config: DrafterConfig) -> int:
    """Vocabulary size of a drafter."""
    return config.draft_vocab_size or config.vocab_size


def _of_chain(c: Eagle3Config, depth: DepthCase, head_bits: int, whole: bool) -> tuple[Cost, ...]:
    """A pass for each draft. The weights that fuse the target's hidden states are read by the first pass only."""
    rows, tokens, ranks = depth.rows, depth.rows * depth.tokens, depth.ranks
    body = 1 if whole else body_ranks(c, ranks)
    fuse = c.hidden_size * c.fused_width
    context = rows * depth.context
    pages = context * c.kv_bytes_per_token(depth.kv_dtype)
    scores = 2 * context * (c.num_attention_heads // body) * (c.kv_width + c.kv_lora_rank)
    head = head_rows(c) // head_ranks(c, ranks)
    weights = drafter_weights(c) - fuse - body_left_out(c, body) - c.hidden_size * (head_rows(c) - head)
    rounded = head * (c.hidden_size - 4) if head_bits == 8 else 0  # bytes saved, less a scale per row
    further = Cost(2 * weights - rounded + pages, 2 * rows * weights + scores)
    # The projections of tokens that only write KV are not counted.
    return (Cost(2 * fuse, 2 * tokens * fuse) + further, *[further] * (depth.tokens - 2))


def _of_block(c: BlockConfig, depth: DepthCase) -> tuple[Cost, ...]:
    """The context rows with the pass over all blocks, the head over all drafts, and the bias of each draft."""
    rows, tokens, drafts = depth.rows, depth.rows * depth.tokens, depth.tokens - 1
    positions, context = rows * c.block_size, depth.rows * depth.context
    body = body_ranks(c, depth.ranks)
    fuse, layers = c.hidden_size * c.fused_width, _layers_of_block(c) - body_left_out(c, body)
    written = c.num_hidden_layers * c.hidden_size * c.row_width
    scores = 4 * c.num_hidden_layers * c.num_attention_heads // body * c.head_dim * c.block_size * context
    head = c.hidden_size * head_rows(c) // head_ranks(c, depth.ranks)
    read = Cost(
        2 * (fuse + layers) + context * c.kv_bytes_per_token(depth.kv_dtype) // body,
        2 * tokens * (fuse + written) + 2 * positions * layers + scores,
    )
    bias = c.markov_rank * head_rows(c)
    biases = (Cost(2 * bias, 2 * rows * bias),) * drafts if c.markov_rank else ()
    return (read, Cost(2 * head, 2 * rows * drafts * head), *biases)


def _layers_of_block(c: BlockConfig) -> int:
    queries = c.num_attention_heads * c.head_dim
    return c.num_hidden_layers * c.hidden_size * (2 * queries + c.row_width + 3 * c.intermediate_size)
