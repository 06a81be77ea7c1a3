"""The training graph: the same model as transformers', for any packing; exact gradients; cached decoding."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nano.attention import attend, choose, layout_of
from nano.export import export
from nano.generate import greedy
from nano.model import (
    EXPERTS,
    Compiled,
    Moe,
    Weights,
    cross_entropy_with_gradients,
    effective,
    entropy_of,
    forward,
    initial_weights,
    layers,
    mean_loss,
    route,
)
from nano.optim import Optimizer, balance, schedule
from redline.model.k2.config import K2Config
from redline.model.k2.write import tiny_config
from redline.ops.formats import fake_int4
from tests.oracle import logits, transformers_model

CONFIG = tiny_config()

# Matrices this small gain nothing from threads, and waiting for them on a busy machine costs a hundred times more.
torch.set_num_threads(1)


def random_model(config: K2Config, seed: int = 0) -> tuple[Weights, Tensor]:
    """Masters without a value at exactly zero or one, and a bias that changes the choice of experts."""
    masters = initial_weights(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for w in masters.values():
        w += torch.randn(w.shape, generator=generator) * 0.3 * w.shape[-1] ** -0.5
    return masters, torch.randn(config.moe_layers, config.n_routed_experts, generator=generator) * 0.2


def starts_of(*lengths: int) -> Tensor:
    """The starts of documents of these lengths, one after the other."""
    return torch.cat([torch.arange(length) == 0 for length in lengths])


def hidden(masters: Weights, bias: Tensor, tokens: Tensor, *lengths: int, row: int = 0) -> Tensor:
    layout = layout_of(starts_of(*lengths), row or len(tokens), "each", documents=8)
    return forward(CONFIG, effective(masters, True, torch.float32), bias, tokens, layout, Compiled())[0]


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (96,), generator=torch.Generator().manual_seed(5))


def test_the_graph_is_transformers_model_on_the_exported_weights(tmp_path: Path, tokens: Tensor) -> None:
    masters, bias = random_model(CONFIG)
    export(tmp_path, masters, bias, CONFIG)
    expected = logits(transformers_model(tmp_path), tokens.tolist())
    # The engine dequantises INT4 in float32; the graph has the same values rounded to bf16.
    exact = effective(masters, True, torch.float32) | {name: fake_int4(masters[name]) for name in EXPERTS}
    layout = layout_of(starts_of(96), 96, "each", documents=1)
    x_TD, _ = forward(CONFIG, exact, bias, tokens, layout, Compiled())
    actual = F.linear(x_TD, exact["head"])
    assert (actual - expected).abs().max() <= 1e-3
    assert actual.argmax(-1).equal(expected.argmax(-1))


def test_packed_documents_do_not_see_each_other(tokens: Tensor) -> None:
    masters, bias = random_model(CONFIG)
    packed = hidden(masters, bias, tokens, 30, 18, 32, 16, row=48)
    begin = 0
    for length in (30, 18, 32, 16):
        alone = hidden(masters, bias, tokens[begin : begin + length], length)
        torch.testing.assert_close(packed[begin : begin + length], alone, atol=2e-5, rtol=1e-4)
        begin += length


def test_a_layout_knows_positions_and_ends_of_every_document() -> None:
    layout = layout_of(starts_of(3, 1, 4), 4, "each", documents=5)
    assert layout.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert layout.ends.tolist() == [0, 3, 4, 8, 8, 8]
    assert layout_of(starts_of(3, 1, 4), 4, "flash", documents=3).ends.tolist() == [0, 3, 4, 8]


def test_causal_rows_are_single_documents_where_rows_are_documents() -> None:
    q, k, v = torch.randn(3, 64, 2, 24, generator=torch.Generator().manual_seed(0)).unbind()
    each, causal = (attend(q, k, v, layout_of(starts_of(32, 32), 32, way, 2), 0.3) for way in ("each", "causal"))
    torch.testing.assert_close(each, causal)


def test_without_a_gpu_documents_are_taken_one_by_one() -> None:
    assert choose(torch.device("cpu"), 4, 192) == ("each", "no GPU")


def test_the_loss_and_its_gradients_are_those_of_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 16, generator=generator, requires_grad=True)
    head = torch.randn(40, 16, generator=generator, requires_grad=True)
    targets = torch.randint(0, 40, (50,), generator=generator)
    weights = torch.rand(50, generator=generator)
    loss, told = mean_loss(x, head, targets, weights, (weights > 0.5).float(), Compiled())
    each = F.cross_entropy(x @ head.t(), targets, reduction="none")
    expected = (each * weights).sum() / weights.sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(told, each[weights > 0.5].mean())
    for ours, theirs in zip(
        torch.autograd.grad(2 * loss, (x, head)), torch.autograd.grad(2 * expected, (x, head)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_routing_chooses_by_score_and_bias_and_weighs_by_score_alone() -> None:
    masters, bias = random_model(CONFIG)
    mlp = layers(CONFIG, effective(masters, True, torch.float32), bias)[1].mlp
    assert isinstance(mlp, Moe)
    x = torch.randn(20, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    weights, chosen = route(x, CONFIG, mlp)
    scores = torch.sigmoid(x @ mlp.router.t())
    best = (scores + mlp.bias).topk(CONFIG.num_experts_per_tok).indices
    expected = torch.zeros_like(scores).scatter(1, best, scores.gather(1, best))
    expected = expected / expected.sum(-1, keepdim=True) * CONFIG.routed_scaling_factor
    torch.testing.assert_close(weights, expected)
    assert chosen.sum(-1).eq(CONFIG.num_experts_per_tok).all()


def test_equal_scores_still_choose_the_right_number_of_experts() -> None:
    masters, bias = random_model(CONFIG)
    mlp = layers(CONFIG, masters, bias)[1].mlp
    assert isinstance(mlp, Moe)
    even = mlp._replace(router=torch.zeros_like(mlp.router), bias=torch.zeros_like(mlp.bias))
    _, chosen = route(torch.ones(3, CONFIG.hidden_size), CONFIG, even)
    assert chosen.sum(-1).eq(CONFIG.num_experts_per_tok).all()


def test_every_master_gets_a_gradient(tokens: Tensor) -> None:
    masters, bias = random_model(CONFIG)
    for w in masters.values():
        w.requires_grad_()
    weights = effective(masters, True, torch.float32)
    layout = layout_of(starts_of(96), 96, "each", documents=1)
    x_TD, load_ME = forward(CONFIG, weights, bias, tokens, layout, Compiled())
    ones = torch.ones(96)
    mean_loss(x_TD, weights["head"], tokens, ones, ones, Compiled())[0].backward()
    assert load_ME.sum(-1).eq(96 * CONFIG.num_experts_per_tok).all()
    for name, w in masters.items():
        assert w.grad is not None, name
        assert w.grad.abs().sum() > 0, name


def test_cached_absorbed_decoding_says_what_the_whole_forward_says(tokens: Tensor) -> None:
    masters, bias = random_model(CONFIG)
    weights = effective(masters, True, torch.float32)
    prompts = [tokens[:20].tolist(), tokens[20:27].tolist(), tokens[27:90].tolist()]
    made = greedy(CONFIG, weights, bias, prompts, 12, "each", stop=-1)
    for prompt, answer in zip(prompts, made, strict=True):
        sequence = list(prompt)
        for token in answer:
            x_TD = hidden(masters, bias, torch.tensor(sequence), len(sequence))
            assert int((x_TD[-1] @ weights["head"].t()).argmax()) == token
            sequence.append(token)
    again = greedy(CONFIG, weights, bias, prompts, 12, "each", stop=made[0][5])
    assert again[0] == made[0][: made[0].index(made[0][5])]


def test_a_few_steps_learn_a_sequence_by_heart(tokens: Tensor) -> None:
    masters = {name: w.requires_grad_() for name, w in initial_weights(CONFIG, 0).items()}
    bias = torch.zeros(CONFIG.moe_layers, CONFIG.n_routed_experts)
    optimizer = Optimizer(masters)
    layout = layout_of(starts_of(96), 96, "each", documents=1)
    ones = torch.ones(96)
    losses: list[float] = []
    for step in range(30):
        weights = effective(masters, step >= 15, torch.float32)
        x_TD, load_ME = forward(CONFIG, weights, bias, tokens, layout, Compiled())
        loss, _ = mean_loss(x_TD, weights["head"], tokens.roll(-1), ones, ones, Compiled())
        loss.backward()
        optimizer.step(1.0)
        balance(bias, load_ME, 1e-3)
        losses.append(loss.item())
    assert losses[0] > 5.5
    assert losses[-1] < 1.0


def test_the_schedule_rises_stays_and_falls_to_zero() -> None:
    assert schedule(0.0) == 0
    assert schedule(0.2) == schedule(0.5) == 1
    assert schedule(0.75) == pytest.approx(0.5)
    assert schedule(1.0) == 0


def test_an_overloaded_expert_loses_bias() -> None:
    bias = torch.zeros(1, 4)
    balance(bias, torch.tensor([[9.0, 1.0, 1.0, 1.0]]), 0.01)
    assert bias[0, 0] < 0 < bias[0, 1]
    assert bias.mean().abs() < 1e-8
    assert entropy_of(torch.ones(1, 4)).item() == pytest.approx(1.0)


def test_the_cross_entropy_that_is_compiled_is_the_one_that_is_tested() -> None:
    assert Compiled().cross_entropy is cross_entropy_with_gradients
