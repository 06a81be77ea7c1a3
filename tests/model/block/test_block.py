"""Block drafters: transformers' layers on the same weights, the training form, and the served form over pages."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.errors import CheckpointError, ConfigError
from redline.messages.job import PAGE_TOKENS
from redline.model.block.config import BlockConfig
from redline.model.block.module import BlockDrafter
from redline.model.block.serve import BlockRows
from redline.model.drafter import open_drafter
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.config import Yarn
from redline.ops import block_attention
from tests.tiny_model import tiny_model

TARGET = tiny_model().config
IDS = (1, 2, 3)
CONFIGS = {
    "dflash": BlockConfig.for_target(TARGET, kind="dflash", layer_ids=IDS, mask_token_id=5, num_hidden_layers=2),
    "dspark": BlockConfig.for_target(
        TARGET, layer_ids=IDS, mask_token_id=5, num_hidden_layers=3, markov_rank=32, num_key_value_heads=2, block_size=5
    ),
    "dspark, reduced": BlockConfig.for_target(
        TARGET,
        layer_ids=IDS[1:],
        mask_token_id=5,
        num_hidden_layers=1,
        markov_rank=16,
        draft_vocab_size=96,
        head_dim=24,
    ),
}
CONFIGS["dflash, windows"] = replace(CONFIGS["dflash"], windows=(70, None))
CONFIGS["dflash, yarn"] = replace(CONFIGS["dflash"], yarn=Yarn(8.0, 32.0, 1.0, 1.0, 0.0, 64))
CONFIGS["dspark, no heads"] = replace(CONFIGS["dspark"], markov_rank=0, confidence="")


def random_drafter(config: BlockConfig, seed: int = 3) -> BlockDrafter:
    """Weights far from their initial ones, so that a forgotten weight shows."""
    torch.manual_seed(seed)
    drafter = BlockDrafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            spread = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * spread if parameter.dim() == 1 else spread * parameter.shape[1] ** -0.5)
        if "d2t" in drafter.state_dict():
            drafter.keep(torch.arange(0, TARGET.vocab_size, 2)[: drafter.config.draft_vocab_size])
    return drafter


def opened(config: BlockConfig, folder: Path) -> BlockDrafter:
    random_drafter(config).save(folder)
    return BlockDrafter.open(folder, TARGET)


def one_block(config: BlockConfig, length: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """The ids of a block after `length` tokens, and the target's states of those, [T, F]."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.full((config.block_size,), config.mask_token_id)
    ids[0] = torch.randint(TARGET.vocab_size, (), generator=g)
    return ids, torch.randn(length, config.fused_width, generator=g)


def dense_states(drafter: BlockDrafter, ids: Tensor, features: Tensor) -> Tensor:
    """[B, D] of the training form."""
    length, size = len(features), len(ids)
    seen = torch.ones(1, size, length + size, dtype=torch.bool)
    positions = torch.arange(length, length + size)[None]
    return drafter(drafter.embed(ids)[None], drafter.context(features)[None], positions, seen)[0]


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> BlockConfig:
    return CONFIGS[request.param]


def test_the_training_form_is_transformers_layers(config: BlockConfig, tmp_path: Path):
    """Norms, MLP and rope are transformers' Qwen3; attention is written out: every query sees the whole context and the
    whole block, except in windowed layers, which are causal."""
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import (
        Qwen3MLP,
        Qwen3RMSNorm,
        Qwen3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    drafter = opened(config, tmp_path).float()
    drafter.attach(tiny_model().embedding_VD, tiny_model().head.dense())
    values = json.loads((tmp_path / "config.json").read_text())
    values["rope_scaling"] = values["rope_scaling"] or {"rope_type": "default"}
    theirs: Any = Qwen3Config(**{key: value for key, value in values.items() if key not in ("architectures", "dtype")})
    state: dict[str, Tensor] = {
        name: tensor.float() for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    ids, features = one_block(config, 100)

    def loaded(module: Any, at: str) -> Callable[..., Tensor]:
        module.load_state_dict({name.removeprefix(at): x for name, x in state.items() if name.startswith(at)})
        return module

    def norm(at: str, width: int) -> Callable[..., Tensor]:
        return loaded(Qwen3RMSNorm(width, config.rms_norm_eps), at)

    context = norm("hidden_norm.", config.hidden_size)(F.linear(features, state["fc.weight"]))
    x = tiny_model().embedding_VD[ids].float()
    places = torch.arange(len(context) + len(ids))
    cos, sin = Qwen3RotaryEmbedding(theirs)(x, places[None])
    for number, window in enumerate(config.windows):
        at = f"layers.{number}."
        normed = norm(f"{at}input_layernorm.", config.hidden_size)(x)

        def heads(name: str, of: Tensor, at: str = at) -> Tensor:
            return F.linear(of, state[f"{at}self_attn.{name}_proj.weight"]).unflatten(-1, (-1, config.head_dim))

        both = torch.cat([context, normed])
        q = norm(f"{at}self_attn.q_norm.", config.head_dim)(heads("q", torch.cat([context, normed])))
        k = norm(f"{at}self_attn.k_norm.", config.head_dim)(heads("k", both))
        q, k = (each[0] for each in apply_rotary_pos_emb(*(each.transpose(0, 1)[None] for each in (q, k)), cos, sin))
        q, v = q[:, -len(ids) :], heads("v", both).transpose(0, 1)
        times = len(q) // len(k)
        scores = q @ k.repeat_interleave(times, 0).mT * config.head_dim**-0.5
        if window is not None:
            distance = places[-len(ids) :, None] - places
            scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        mixed = (scores.softmax(-1) @ v.repeat_interleave(times, 0)).transpose(0, 1).flatten(1)
        x = x + F.linear(mixed, state[f"{at}self_attn.o_proj.weight"])
        x = x + loaded(Qwen3MLP(theirs), f"{at}mlp.")(norm(f"{at}post_attention_layernorm.", config.hidden_size)(x))
    wanted = norm("norm.", config.hidden_size)(x)
    torch.testing.assert_close(dense_states(drafter, ids, features), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [(100,), (1, 64, 150)])
def test_the_served_form_is_the_training_form(config: BlockConfig, lengths: tuple[int, ...], tmp_path: Path):
    """Contexts read in two parts, over pages in any order; every block alone and together with others."""
    served, dense = opened(config, tmp_path), BlockDrafter.open(tmp_path, TARGET).float()
    model = tiny_model()
    served.prepare(model)
    dense.attach(model.embedding_VD, model.head.dense())
    g = torch.Generator().manual_seed(2)
    pages = -(-max(lengths) // PAGE_TOKENS)
    tables = torch.randperm(len(lengths) * pages, generator=g).to(torch.int32).view(len(lengths), pages)
    plane = torch.full((tables.numel() + 1, PAGE_TOKENS, config.kv_width), torch.nan)
    blocks = [one_block(config, length, seed) for seed, length in enumerate(lengths)]
    for table, (_, features) in zip(tables, blocks, strict=True):
        for part in range(len(features)), range(len(features) // 2, len(features)):  # the same again changes nothing
            place = torch.tensor(part)
            rows = table[place // PAGE_TOKENS].long() * PAGE_TOKENS + place % PAGE_TOKENS
            served.served.read(features[place], place, rows, plane)
    anchors, starts = torch.stack([ids[0] for ids, _ in blocks]), torch.tensor(lengths)
    asked = BlockRows(anchors, starts, torch.full_like(starts, config.block_size), tables, max(lengths))
    found = served.served.states(asked, plane)
    for number, (ids, features) in enumerate(blocks):
        wanted = dense_states(dense, ids, features)
        torch.testing.assert_close(found[number], wanted, rtol=2e-2, atol=2e-2)
        one = slice(number, number + 1)
        alone = BlockRows(anchors[one], starts[one], asked.counts_R[one], tables[one], lengths[number])
        torch.testing.assert_close(served.served.states(alone, plane)[0], found[number], rtol=2e-2, atol=2e-2)
        before = torch.randint(TARGET.vocab_size, (len(ids),), generator=g)
        biased = served.served.biased(served.served.logits(found[number]), before)
        torch.testing.assert_close(biased, dense.draft_logits(found[number], before), rtol=2e-2, atol=3e-2)
        known = dense.token_ids()
        tokens = served.served.likeliest(biased)
        assert torch.equal(tokens, biased.argmax(-1) if known is None else known[biased.argmax(-1)])
        whole = served.served.whole(biased[0])
        assert whole.shape == (TARGET.vocab_size,)
        assert int(whole.argmax()) == int(tokens[0])


def test_positions_that_are_not_used_are_not_seen(config: BlockConfig, tmp_path: Path):
    """A block of which two positions are used is a shorter block."""
    served, dense = opened(config, tmp_path), BlockDrafter.open(tmp_path, TARGET).float()
    served.prepare(tiny_model())
    dense.attach(tiny_model().embedding_VD, tiny_model().head.dense())
    ids, features = one_block(config, 40)
    plane, place = torch.zeros(1, PAGE_TOKENS, config.kv_width), torch.arange(40)
    served.served.read(features, place, place, plane)
    tables = torch.zeros(1, 1, dtype=torch.int32)
    asked = BlockRows(ids[:1], torch.tensor([40]), torch.tensor([2]), tables, 40)
    found = served.served.states(asked, plane)[0, :2]
    torch.testing.assert_close(found, dense_states(dense, ids[:2], features), rtol=2e-2, atol=2e-2)


def test_saved_and_opened_it_is_the_same(config: BlockConfig, tmp_path: Path):
    drafter = opened(config, tmp_path)
    own = config.draft_vocab_size
    assert drafter.config == config
    drafter.save(tmp_path / "again")
    assert (tmp_path / "again/config.json").read_text() == (tmp_path / "config.json").read_text()
    assert isinstance(open_drafter(tmp_path / "again", TARGET), BlockDrafter)
    assert ("lm_head.weight" in drafter.state_dict()) == (own is not None)


def test_confidence_is_one_number_for_each_draft(tmp_path: Path):
    drafter = opened(CONFIGS["dspark"], tmp_path).float()
    normed, before = torch.randn(2, 5, TARGET.hidden_size), torch.randint(TARGET.vocab_size, (2, 5))
    found = drafter.confidence(normed, before)
    weight, bias = drafter.confidence_head.proj.weight[0], drafter.confidence_head.proj.bias
    wanted = torch.cat([normed, drafter.markov_head.markov_w1.weight[before]], -1) @ weight + bias
    torch.testing.assert_close(found, wanted)


# Files and configs of others.


def written(values: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_the_public_config_of_kimi_k25s_drafter_is_read(tmp_path: Path):
    """The keys and values of z-lab/Kimi-K2.5-DFlash."""
    values = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "block_size": 8,
        "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "layer_types": ["full_attention"] * 6, "max_position_embeddings": 262144, "num_attention_heads": 64,
        "num_hidden_layers": 6, "num_key_value_heads": 8, "num_target_layers": 61, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "mscale": 1.0,
                            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
        "sliding_window": None, "use_sliding_window": False, "vocab_size": 163840,
    }  # fmt: skip
    config = BlockConfig.from_folder(written(values, tmp_path))
    assert (config.kind, config.drafts, config.block_size, config.sample_from_anchor) == ("dflash", 7, 8, False)
    assert config.layer_ids == (2, 13, 25, 36, 48, 59)
    assert config.softmax_scale == pytest.approx(128**-0.5)
    assert config.row_width == 2 * 8 * 128
    deepspec = values | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 256, "markov_head_type": "vanilla"}
    deepspec |= {"enable_confidence_head": True, "confidence_head_with_markov": True, "num_anchors": 512}
    deepspec |= deepspec.pop("dflash_config")
    config = BlockConfig.from_folder(written(deepspec, tmp_path))
    assert (config.kind, config.drafts, config.markov_rank, config.confidence) == ("dspark", 8, 256, "hidden and token")


def test_keys_without_an_effect_are_read():
    values = CONFIGS["dspark"].to_dict()
    without = {"is_causal": False, "final_logit_softcapping": 0.0, "hidden_act": None, "attention_bias": None}
    without |= {"fc_layernorm": None, "output_multiplier": 1, "input_embedding_scale": None, "use_sliding_window": None}
    assert BlockConfig.from_dict(values | without) == BlockConfig.from_dict(values)
    slides = {"layer_types": None, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    assert BlockConfig.from_dict(values | slides).windows == (None, 9, 9)


def test_yarns_mscale_counts_only_together_with_mscale_all_dim():
    """As in transformers: Kimi's factor of 64 with both gives 1, with mscale alone 0.1 ln 64 + 1."""
    plain = CONFIGS["dflash"]
    for mscale, of_all, wanted in ((1.0, 1.0, 1.0), (0.5, 0.0, 0.1 * math.log(64) + 1)):
        config = replace(plain, yarn=Yarn(64.0, 32.0, 1.0, mscale, of_all, 4096))
        assert config.softmax_scale == pytest.approx(config.head_dim**-0.5 * wanted**2)


def test_sizes_of_a_new_drafter():
    assert (
        BlockConfig.for_target(
            replace(TARGET, num_attention_heads=64), layer_ids=IDS, mask_token_id=1
        ).num_key_value_heads
        == 8
    )
    assert (
        BlockConfig.for_target(
            replace(TARGET, num_attention_heads=6), layer_ids=IDS, mask_token_id=1
        ).num_key_value_heads
        == 6
    )
    for sizes in ({"num_attention_heads": 6, "num_key_value_heads": 4}, {"head_dim": 15}):
        with pytest.raises(ConfigError, match="expected key heads that divide the heads, and an even head_dim"):
            BlockConfig.for_target(TARGET, layer_ids=IDS, mask_token_id=1, **sizes)


def test_long_contexts_are_read_in_parts(config: BlockConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two slots of three and one page, a page of both at a time."""
    served = opened(config, tmp_path)
    served.prepare(tiny_model())
    plane = torch.randn(8, PAGE_TOKENS, config.kv_width)
    tables = torch.tensor([[5, 0, 3], [2, 7, 7]], dtype=torch.int32)
    asked = BlockRows(torch.tensor([1, 2]), torch.tensor([150, 20]), torch.tensor([5, 5]), tables, 150)
    whole = served.served.states(asked, plane)
    monkeypatch.setattr(block_attention, "TOGETHER", 2 * PAGE_TOKENS)
    torch.testing.assert_close(served.served.states(asked, plane), whole, rtol=2e-2, atol=2e-2)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no block size": ({"block_size": ...}, "block_size is missing"),
    "no mask token": ({"mask_token_id": ...}, "mask_token_id is missing"),
    "a mask token outside": ({"mask_token_id": 10**6}, "mask_token_id is 1000000; supported: 0 to"),
    "no layers": ({"target_layer_ids": ...}, "target_layer_ids is missing"),
    "layers in no order": ({"target_layer_ids": [3, 1]}, "in increasing order"),
    "a layer that is none": ({"target_layer_ids": [0, True]}, "in increasing order"),
    "a layer that the target lacks": ({"target_layer_ids": [0, 99]}, "this target has layers 0 to"),
    "another width": ({"hidden_size": 96}, "hidden_size is 96; this target needs"),
    "another vocabulary": ({"vocab_size": 77}, "vocab_size is 77; this target needs"),
    "a gated bias": ({"markov_head_type": "gated"}, "markov_head_type is 'gated'; supported: vanilla"),
    "confidence by a bias that is not": ({"markov_rank": 0}, "confidence_head_with_markov"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
    "a scaled embedding": ({"input_embedding_scale": 2.0}, "input_embedding_scale"),
    "a window without a size": (
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "use_sliding_window": True},
        "sliding_window is None",
    ),
    "windows that are switched off": (
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 8},
        "use_sliding_window is False; supported: true, since layer_types has sliding layers",
    ),
    "causal layers": ({"is_causal": True}, "is_causal is True"),
    "a true that is no number": ({"output_multiplier": True}, "output_multiplier is True; supported: 1.0"),
    "a huge block": ({"block_size": 2_000_000_000}, "block_size is 2000000000; supported: 1 to 64"),
    "countless layers": (
        {"num_hidden_layers": 2_000_000_000},
        "num_hidden_layers is 2000000000; supported: at most 64",
    ),
    "speculators' form": ({"speculators_model_type": "dspark"}, "speculators_model_type is 'dspark'"),
    "another architecture": ({"architectures": ["DSparkDraftModel", "B"]}, "architectures"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_is_refused_by_name_before_weights_are_read(mistake: str, tmp_path: Path):
    changes, message = MISTAKES[mistake]
    values = CONFIGS["dspark"].to_dict() | changes
    folder = written({key: value for key, value in values.items() if value is not ...}, tmp_path)
    with pytest.raises(CheckpointError, match=message):  # there is no weight file
        BlockDrafter.open(folder, TARGET)


def test_the_weights_may_be_in_several_files_and_have_a_prefix(tmp_path: Path):
    drafter = opened(CONFIGS["dspark"], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(stored)
    parts = {f"model-{n}-of-2.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    for file, mine in parts.items():
        save_file({f"model.{name}": stored[name] for name in mine}, tmp_path / file)
    index = {"weight_map": {f"model.{name}": file for file, mine in parts.items() for name in mine}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    again = BlockDrafter.open(tmp_path, TARGET).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in drafter.state_dict().items())
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2-of-2\.safetensors: missing"):
        BlockDrafter.open(tmp_path, TARGET)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map is None; expected the file of each tensor"):
        BlockDrafter.open(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": ...}, r"norm\.weight: missing"),
        ({"extra.weight": torch.zeros(2)}, r"extra\.weight: expected nothing of that name"),
        ({"fc.weight": torch.zeros(64, 64)}, "it reads 1 states of the target, and 3 layer ids are given"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Any], message: str, tmp_path: Path):
    opened(CONFIGS["dspark"], tmp_path)
    stored = {**load_file(tmp_path / "model.safetensors"), **change}
    save_file({name: x for name, x in stored.items() if x is not ...}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        BlockDrafter.open(tmp_path, TARGET)


def test_a_head_in_the_file_is_used_and_an_embedding_ignored(tmp_path: Path):
    """DeepSpec stores copies of the target's embedding and head; its config names no draft vocabulary."""
    config = CONFIGS["dspark"]
    opened(replace(config, draft_vocab_size=TARGET.vocab_size), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file(
        {**stored, "embed_tokens.weight": torch.zeros_like(stored["lm_head.weight"])}, tmp_path / "model.safetensors"
    )
    written(config.to_dict(), tmp_path)
    drafter = BlockDrafter.open(tmp_path, TARGET)
    assert drafter.config.draft_vocab_size == TARGET.vocab_size
    assert torch.equal(drafter.state_dict()["lm_head.weight"], stored["lm_head.weight"])


def test_a_chain_is_opened_as_one(tmp_path: Path):
    Eagle3(Eagle3Config.for_target(TARGET)).save(tmp_path)
    assert isinstance(open_drafter(tmp_path, TARGET), Eagle3)


def test_sizes_of_pages_and_rounds():
    chain, block = Eagle3Config.for_target(TARGET), CONFIGS["dspark"]
    assert [each.passes(n) for each, n in itertools.product((chain, block), (0, 1, 5))] == [0, 1, 5, 0, 1, 1]
    assert (chain.tail_width, block.tail_width) == (TARGET.hidden_size, 0)
    assert block.kv_bytes_per_token(torch.bfloat16) == 2 * 3 * block.row_width
