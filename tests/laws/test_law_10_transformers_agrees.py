"""Law 10: our logits = those of transformers' DeepseekV3ForCausalLM on the same checkpoint, in float32.

Every position is compared: of a prompt in one chunk, of a prompt in two chunks split near the end of a page, and of
generated tokens one by one, which use the absorbed form of attention.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from redline.messages.job import PAGE_TOKENS, PageId, Sampling
from redline.messages.step import Begin, Row
from redline.model.k2.config import K2Config, Yarn
from redline.model.k2.cpu import K2
from redline.model.k2.write import Layout as Names
from redline.model.k2.write import random_checkpoint, tiny_config
from redline.run.fit import Layout
from redline.run.runner import Runner
from tests.oracle import logits, transformers_model
from tests.tiny_model import kernel_config, load_folder, prompt

if TYPE_CHECKING:
    from transformers import DeepseekV3ForCausalLM

LIMIT = 1e-3
PROMPT = 150  # followed by 20 tokens that are run as generated ones
TOKENS = prompt(seed=10, length=170)
SPLITS = [(), (63,), (64,), (65,), (1, 64, 128)]


class Case(NamedTuple):
    config: K2Config
    quantization: Literal["int4", "bf16", "fp8"] = "int4"
    names: Names = "k25"


def yarn(factor: float, beta_fast: float) -> Yarn:
    return Yarn(factor, beta_fast, 1.0, 1.0, 1.0, original_max_position_embeddings=64)


K2_ROPE: dict[str, Any] = {"yarn": yarn(32.0, 1.0), "rms_norm_eps": 1e-6}  # K2 and K2-Thinking
K25_ROPE: dict[str, Any] = {"yarn": yarn(64.0, 32.0), "rms_norm_eps": 1e-5}  # K2.5 and later
NANO = {
    "hidden_size": 320,
    "num_hidden_layers": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "intermediate_size": 768,
    "vocab_size": 4096,
}
GROUPS = {"n_routed_experts": 32, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
DEEPSEEK = kernel_config(
    **GROUPS,
    num_hidden_layers=5,
    first_k_dense_replace=3,
    routed_scaling_factor=2.5,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    yarn=Yarn(40.0, 32.0, 1.0, 1.0, 1.0, original_max_position_embeddings=64),
)
CASES = {
    "K2, INT4, one head": Case(kernel_config(**K2_ROPE, num_attention_heads=1), "int4", "k2"),
    "K2, FP8, two heads": Case(kernel_config(**K2_ROPE, num_attention_heads=2), "fp8", "k2"),
    "K2.5, INT4, four heads": Case(kernel_config(**K25_ROPE)),
    "K2.5, bf16, three heads": Case(kernel_config(**K25_ROPE, num_attention_heads=3), "bf16"),
    "K2.5, FP8, short names": Case(kernel_config(**K25_ROPE), "fp8", "k25-short"),
    "no YaRN": Case(kernel_config(yarn=None)),
    "two dense layers": Case(kernel_config(**K25_ROPE, first_k_dense_replace=2)),
    "weights of experts not normalised": Case(kernel_config(**K25_ROPE, norm_topk_prob=False)),
    "sizes that no kernel takes": Case(tiny_config()),
    "Kimi-Nano's sizes": Case(kernel_config(**K25_ROPE, **NANO)),
    "DeepSeek-V3, bf16": Case(DEEPSEEK, "bf16", "deepseek"),
    "DeepSeek-V3, FP8": Case(DEEPSEEK, "fp8", "deepseek"),
    "DeepSeek-V3, 256 experts": Case(replace(DEEPSEEK, n_routed_experts=256), "bf16", "deepseek"),
    "DeepSeek-V3, sizes that no kernel takes": Case(tiny_config(**GROUPS), "bf16", "deepseek"),
}
BUNDLED = Path(__file__).parents[2] / "models" / "kimi-nano"


@pytest.fixture(scope="module", params=[*CASES, "the bundled Kimi-Nano"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[K2, Tensor]:
    """Our model, and transformers' logits of TOKENS."""
    if request.param not in CASES:
        return load_folder(BUNDLED), logits(transformers_model(BUNDLED), list(TOKENS))
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("law10")
    random_checkpoint(folder, case.config, 10, case.quantization, case.names)
    theirs = transformers_model(folder)
    if case.quantization == "fp8":  # we store dequantised FP8 in bf16, as its publisher's conversion does
        for parameter in theirs.parameters():
            parameter.data = parameter.data.bfloat16().float()
    return load_folder(folder), logits(theirs, list(TOKENS))


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_every_position_agrees(pair: tuple[K2, Tensor], splits: tuple[int, ...]):
    model, expected = pair
    compare(our_logits(model, TOKENS, splits, PROMPT), expected)


def test_the_low_rank_norms_of_a_library_can_be_followed(tmp_path: Path):
    random_checkpoint(tmp_path, kernel_config(rms_norm_eps=1e-2))
    theirs = transformers_model(tmp_path)
    set_low_rank_eps(theirs, 1e-6)
    expected = logits(theirs, list(TOKENS))
    compare(our_logits(load_folder(tmp_path, low_rank_norm_eps=1e-6), TOKENS, (), PROMPT), expected)
    with pytest.raises(AssertionError):
        compare(our_logits(load_folder(tmp_path), TOKENS, (), PROMPT), expected)


def our_logits(model: K2, tokens: tuple[int, ...], splits: tuple[int, ...], prompt: int) -> Tensor:
    """float32 [tokens, V]: the prompt in chunks cut at `splits`, then single tokens, over float32 pages."""
    pages = -(-len(tokens) // PAGE_TOKENS)
    page_bytes = model.config.kv_bytes_per_token(torch.float32) * PAGE_TOKENS
    runner = Runner(model, Layout(pages, len(tokens), torch.float32, page_bytes), slots=1)
    table = tuple(PageId(page) for page in reversed(range(pages)))
    asked = Sampling(max_tokens=1)
    parts: list[Tensor] = []
    with torch.inference_mode():
        runner.slots.begin(Begin(slot=0, tokens=tokens, prompt=prompt, pages=table, sampling=asked, limit=prompt))
        for start, end in itertools.pairwise((0, *splits, *range(prompt, len(tokens) + 1))):
            inputs = runner.slots.inputs([runner.slots.span(Row(slot=0, start=start, count=end - start))], model)
            parts.append(model.logits(model.forward(inputs, runner.kv.planes)[0]))
    runner.close()
    return torch.cat(parts)


def compare(ours: Tensor, theirs: Tensor) -> None:
    """Compare the logits at every position."""
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().amax(-1)
    assert error.max() <= LIMIT, f"position {int(error.argmax())} differs by {float(error.max()):.1e}"
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def set_low_rank_eps(model: "DeepseekV3ForCausalLM", eps: float) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = eps
        layer.self_attn.kv_a_layernorm.variance_epsilon = eps
