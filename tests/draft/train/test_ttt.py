"""Training-time test: the unrolled drafter equals the dense formula, and the drafter that drafts token by token."""

import pytest
import torch
from torch import Tensor

from redline.draft.train import ttt
from redline.model.eagle3.config import Architecture
from redline.model.eagle3.module import Eagle3, Eagle3Config
from tests.draft.train.captured import VOCABULARY, target_config

STEPS = 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ttt, "QUERIES", 5)


def drafter_of(architecture: Architecture = "mla") -> Eagle3:
    torch.manual_seed(1)
    heads = {"num_key_value_heads": 1} if architecture == "llama" else {}
    drafter = Eagle3(Eagle3Config.for_target(target_config(), architecture=architecture, **heads))
    for parameter in drafter.parameters():
        parameter.data += torch.randn(parameter.shape) * 0.2 * parameter.shape[-1] ** -0.5
    drafter.attach(torch.randn(VOCABULARY, 32), torch.randn(VOCABULARY, 32))
    return drafter


def inputs(batch: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (batch, rows), generator=generator)
    return tokens, torch.randn(batch, rows, 3 * 32, generator=generator)


def dense(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """The keys of all steps concatenated, under the mask of the published code."""
    rows = q.shape[1]
    at, key_at = torch.arange(rows)[:, None], torch.arange(len(keys) * rows)[None]
    seen = torch.where(key_at < rows, key_at <= at, (key_at - at) % rows == 0)
    scores = torch.einsum("bthx,bshx->bhts", q, torch.cat(keys, 1)) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", weights, torch.cat(values, 1))


@pytest.mark.parametrize("steps", [1, STEPS])
def test_attention_is_the_softmax_under_the_published_mask_and_so_are_its_gradients(steps: int):
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(2, 13, 3, width, generator=generator).requires_grad_() for width in [6] + [6] * steps + [4] * steps
    ]
    q, keys, values = leaves[0], leaves[1 : 1 + steps], leaves[1 + steps :]
    weight = torch.randn(2, 13, 3, 4, generator=generator)
    wanted, found = dense(q, keys, values, 0.5), ttt.attend(q, keys, values, 0.5)
    torch.testing.assert_close(found, wanted)
    for a, b in zip(
        torch.autograd.grad(found, leaves, weight), torch.autograd.grad(wanted, leaves, weight), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["mla", "llama"])
def test_a_row_alone_drafting_token_by_token_is_the_row_in_training(architecture: Architecture):
    """As in serving: step 0 over the context's features, then row by row over the own feature, next position."""
    drafter = drafter_of(architecture)
    tokens, features = inputs(1, 12)
    row = 7
    with torch.no_grad():
        trained = ttt.unroll(drafter, tokens, features, STEPS)
        feature = drafter.fuse(features[0, : row + 1])
        cos, sin = drafter.angles(torch.arange(row + 1))
        q, kv = drafter.project(drafter.embed(tokens[0, 1 : row + 2]), feature, cos, sin)
        plane = [kv]
        q, feature = q[-1:], feature[-1:]
        for step in range(STEPS):
            if step:
                cos, sin = drafter.angles(torch.tensor([row + step]))
                q, kv = drafter.project(drafter.embed(tokens[0, row + 1 + step][None]), feature, cos, sin)
                plane.append(kv)
            keys, values = drafter.expand(torch.cat(plane))
            weights = (torch.einsum("thx,shx->hts", q, keys) * drafter.config.softmax_scale).softmax(-1)
            normed, feature = drafter.finish(torch.einsum("hts,shv->thv", weights, values), feature)
            torch.testing.assert_close(trained[step][0, row], normed[0], rtol=1e-4, atol=1e-5)


def test_what_fills_a_batch_up_changes_no_row_that_counts():
    drafter = drafter_of()
    tokens, features = inputs(2, 20)
    filled, states = tokens.clone(), features.clone()
    filled[:, 12:], states[:, 12:] = 3, 100.0
    for step, (a, b) in enumerate(
        zip(ttt.unroll(drafter, tokens, features, 3), ttt.unroll(drafter, filled, states, 3), strict=True)
    ):
        counts = 12 - 2 - step  # row t predicts token t + 2 + step
        assert torch.equal(a[:, :counts], b[:, :counts])


def test_every_parameter_of_the_body_learns_from_every_step():
    drafter = drafter_of()
    tokens, features = inputs(1, 9)
    for normed in ttt.unroll(drafter, tokens, features, 3):
        drafter.zero_grad()
        normed[:, 2].square().sum().backward(retain_graph=True)
        silent = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.any()]
        assert silent == ["lm_head.weight"]


def test_no_gpu_no_fused_kernel():
    assert ttt.choose(torch.device("cpu"), 2, 24, 16)[0] == "blocked"
