"""Which part of a drafter each tensor parallel rank holds, and how many parameters a rank does not hold.

Divided: attention heads, the width of the MLP, and the drafter's own head. Replicated: the fusion of the target's
states, norms, the projections into attention (of grouped attention: keys and values), DSpark's bias, and the rows of a
page. If heads or width do not divide evenly, all layers are replicated: a layer with only one all-reduce would use the
same site twice in a row (rank_links.py). On a CPU every rank has the whole drafter.
"""

from redline.kernels.cuda.decode.gates import HALF
from redline.model.block.config import BlockConfig
from redline.model.eagle3.config import Eagle3Config
from redline.model.k2.shard import ROW_WORDS


def body_ranks(config: Eagle3Config | BlockConfig, ranks: int) -> int:
    """How many of `ranks` divide the attention and the MLP: all, or 1 (replicated) if a size does not divide evenly."""
    sizes = (config.num_attention_heads, 1), (config.num_key_value_heads, 1), (config.intermediate_size, HALF)
    return ranks if all(size % (ranks * unit) == 0 for size, unit in sizes) else 1


def head_ranks(config: Eagle3Config | BlockConfig, ranks: int) -> int:
    """How many of `ranks` divide the rows of the drafting head: all, or 1 (replicated) if it is the drafter's own head
    and does not divide evenly."""
    own = config.draft_vocab_size
    return ranks if own is None or own % (ranks * ROW_WORDS) == 0 else 1


def left_out(config: Eagle3Config | BlockConfig, ranks: int) -> int:
    """Number of the drafter's parameters that a rank does not hold."""
    own = (config.draft_vocab_size or 0) * config.hidden_size
    return body_left_out(config, ranks) + own - own // head_ranks(config, ranks)


def body_left_out(config: Eagle3Config | BlockConfig, ranks: int) -> int:
    """Number of the layers' parameters that a rank does not hold."""
    c, d = config, config.hidden_size
    if isinstance(c, BlockConfig):
        divided = c.num_hidden_layers * (2 * d * c.num_attention_heads * c.head_dim + 3 * d * c.intermediate_size)
        return divided - divided // body_ranks(c, ranks)
    if c.architecture == "mla":
        head = c.q_lora_rank * c.query_width + c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
    else:
        head = 2 * d * c.query_width  # keys and values are replicated
    divided = c.num_attention_heads * (head + d * c.value_width) + 3 * d * c.intermediate_size
    return divided - divided // body_ranks(c, ranks)
