"""Model geometries by name, for measurements that need a model's sizes but not its weights.

Copied from the published config.json files; a test compares them.
"""

from dataclasses import replace

from redline.errors import ConfigError
from redline.model.k2.config import Int4Experts, K2Config, Nvfp4Experts, Unquantized, Yarn

KIMI_K26 = K2Config(
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=384,
    num_experts_per_tok=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    moe_intermediate_size=2048,
    intermediate_size=18432,
    routed_scaling_factor=2.827,
    norm_topk_prob=True,
    rms_norm_eps=1e-5,
    low_rank_norm_eps=1e-5,
    vocab_size=163840,
    max_position_embeddings=262144,
    rope_theta=50000.0,
    yarn=Yarn(
        factor=64.0,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
    ),
    bos_token_id=163584,
    eos_token_ids=(163586,),
    pad_token_id=163839,
    tie_word_embeddings=False,
    quantization=Int4Experts(),
)

KIMI_NANO = replace(
    KIMI_K26,
    hidden_size=320,
    num_hidden_layers=8,
    num_attention_heads=4,
    q_lora_rank=128,
    n_routed_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=128,
    intermediate_size=768,
    vocab_size=4096,
    max_position_embeddings=65536,
    yarn=Yarn(
        factor=64.0,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=1024,
    ),
    bos_token_id=3840,
    eos_token_ids=(3842,),
    pad_token_id=4095,
)

SHAPES = {
    "kimi-k2.6": KIMI_K26,
    "kimi-k2.6-nvfp4": replace(KIMI_K26, quantization=Nvfp4Experts("ModelOpt")),
    "kimi-k2.6-bf16": replace(KIMI_K26, quantization=Unquantized()),
    "kimi-nano": KIMI_NANO,
}


def shape(name: str) -> K2Config:
    """The geometry of this name. ConfigError, with the known names, if there is none."""
    if name not in SHAPES:
        raise ConfigError(f"shape is {name!r}; expected one of {', '.join(SHAPES)}")
    return SHAPES[name]
