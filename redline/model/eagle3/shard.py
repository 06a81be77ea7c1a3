"""Which part of a drafter a rank of several GPUs holds, and how many numbers of it a rank is spared.

Divided are its heads, the width of its MLP, and its own head; whole on each are what fuses the target's states, norms,
projections into attention, and a page's rows. Where heads or width do not come apart evenly the whole body stays on
each: a pass that had one sum alone would meet at the same site twice in a row (kernels/hopper/ranks.py). On a CPU every
rank has the whole drafter.
"""

from redline.kernels.hopper.decode.gates import HALF
from redline.model.eagle3.config import Eagle3Config
from redline.model.k2.shard import ROW_WORDS


def body_ranks(config: Eagle3Config, ranks: int) -> int:
    """How many of `ranks` share the attention and the MLP: all of them, or 1, each, where a size cannot be shared."""
    sizes = (config.num_attention_heads, 1), (config.num_key_value_heads, 1), (config.intermediate_size, HALF)
    return ranks if all(size % (ranks * unit) == 0 for size, unit in sizes) else 1


def head_ranks(config: Eagle3Config, ranks: int) -> int:
    """How many of `ranks` share the rows of the head that drafts: all of them, or 1, each, where it is the drafter's
    own and they cannot be shared."""
    own = config.draft_vocab_size
    return ranks if own is None or own % (ranks * ROW_WORDS) == 0 else 1


def left_out(config: Eagle3Config, ranks: int) -> int:
    """Numbers of the drafter that a rank does not hold."""
    own = (config.draft_vocab_size or 0) * config.hidden_size
    return body_left_out(config, ranks) + own - own // head_ranks(config, ranks)


def body_left_out(config: Eagle3Config, ranks: int) -> int:
    """Numbers of its layer among them."""
    c, d = config, config.hidden_size
    if c.architecture == "mla":
        head = c.q_lora_rank * c.query_width + c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
    else:
        head = 2 * d * c.query_width  # its keys and values are every rank's
    divided = c.num_attention_heads * (head + d * c.value_width) + 3 * d * c.intermediate_size
    return divided - divided // body_ranks(c, ranks)
