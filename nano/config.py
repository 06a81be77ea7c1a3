"""Kimi-Nano's geometry: K2's architecture with K2's own attention sizes, small enough to lie in a repository."""

from dataclasses import replace

from nano.tokenizer import RANKS
from redline.chat.tokenizer import RESERVED
from redline.model.config import Int4Experts, K2Config, Unquantized, Yarn

# K2.5's own factor, so that the softmax scale is K2.5's too. The original length times the factor is 65,536 positions,
# and with 1,024 the ramp's ends are pairs 4 and 16 of 32: the fast pairs tell apart neighbours in the rows of 1,024
# that most training reads, the slow ones stay within a fraction of a turn at 4,096 and serve content at any distance.
YARN = Yarn(
    factor=64.0,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    original_max_position_embeddings=1_024,
)

NANO = K2Config(
    hidden_size=320,
    num_hidden_layers=8,
    num_attention_heads=4,
    q_lora_rank=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    moe_intermediate_size=128,
    intermediate_size=768,
    routed_scaling_factor=2.827,
    norm_topk_prob=True,
    rms_norm_eps=1e-5,
    low_rank_norm_eps=1e-5,
    vocab_size=RANKS + RESERVED,
    max_position_embeddings=65_536,
    rope_theta=50_000.0,
    yarn=YARN,
    bos_token_id=RANKS,
    eos_token_ids=(RANKS + 2,),  # <|im_end|>, as in K2.6
    pad_token_id=RANKS + 255,
    tie_word_embeddings=False,
    quantization=Int4Experts(),
)
NANO_BF16 = replace(NANO, quantization=Unquantized())
MEDIA_PLACEHOLDER = RANKS + 21  # <|media_pad|>
