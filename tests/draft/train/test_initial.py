"""First weights of a block drafter: heads attend to the token at their distance; outputs reach the embedding's size."""

import pytest
import torch

from redline.draft.train.initial import set_initial
from redline.model.block.config import BlockConfig
from redline.model.block.module import BlockDrafter, BlockLayer
from redline.model.k2.config import K2Config
from redline.model.k2.write import tiny_config
from tests.draft.train.captured import Captured, Given

ROWS = 40


def target() -> K2Config:
    return tiny_config(vocab_size=96, hidden_size=64, num_attention_heads=4, intermediate_size=32)


def given() -> Given:
    """States with a common mean, as a model's have."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(3 * 64, generator=generator)
    found: list[Captured] = []
    for number in range(20):
        features = mean + 0.5 * torch.randn(ROWS, 3 * 64, generator=generator)
        tokens = torch.randint(90, (ROWS,), generator=generator)
        found.append(Captured(f"s{number}", "words", tokens, torch.ones(ROWS) > 0, features, features[:, :64]))
    return Given(found)


def drafter(size: float, key_heads: int = 4, block: int = 6) -> BlockDrafter:
    torch.manual_seed(3)
    config = BlockConfig.for_target(
        target(), layer_ids=(0, 2, 3), block_size=block, num_hidden_layers=2, mask_token_id=95, head_dim=32,
        num_key_value_heads=key_heads, markov_rank=4,
    )  # fmt: skip
    made = BlockDrafter(config)
    embedding = size * (torch.randn(96, 64) + torch.randn(64))
    made.initialise(embedding, torch.randn(96, 64))
    set_initial(made, given(), 1)
    return made


@pytest.mark.parametrize("key_heads", [4, 2])
@torch.no_grad()
def test_heads_of_the_first_layers_attend_to_the_token_at_their_distance(key_heads: int):
    made = drafter(1.0, key_heads)
    contexts = [made.context(one.features) for one in given().items]
    ids = torch.full((6,), 95)
    ids[0] = 17
    cos, sin = made.angles(torch.arange(ROWS + 6))
    hits: list[bool] = []
    for number, layer in enumerate(made.layers):
        assert isinstance(layer, BlockLayer)
        q = layer.self_attn.queries(layer.input_layernorm(made.embed(ids)), cos[ROWS:], sin[ROWS:])
        for context in contexts:
            k, _ = layer.self_attn.keys_values(context, cos[:ROWS], sin[:ROWS])
            likeliest = torch.einsum("qhx,nhx->hqn", q, k.repeat_interleave(4 // key_heads, 1)).argmax(-1)
            for head in range(4):
                distance = (4 * number + head) % 6 + 1
                # Masks further on look back into the block; the anchor's query is the least alike of all.
                hits += [int(likeliest[head, place]) == ROWS + place - distance for place in range(1, distance)]
    assert sum(hits) > 0.6 * len(hits), f"{sum(hits)} of {len(hits)}"


@pytest.mark.parametrize("size", [0.02, 7.0])
@torch.no_grad()
def test_what_the_layers_write_is_as_large_as_the_embedding(size: float):
    made = drafter(size)
    one = given().items[0]
    x = made.embed(torch.cat([one.tokens[:1], torch.full((5,), 95)]))[None]
    seen = torch.ones(1, 6, ROWS + 6, dtype=torch.bool)
    kept: list[torch.Tensor] = []
    made.norm.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    made(x, made.context(one.features)[None], torch.arange(ROWS, ROWS + 6)[None], seen)
    written = (kept[0] - x).square().mean().sqrt() / x.square().mean().sqrt()
    assert 0.2 < written < 2.0


def test_the_same_source_and_seed_give_the_same_weights():
    a, b = drafter(1.0).state_dict(), drafter(1.0).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
