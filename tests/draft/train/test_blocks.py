"""Training of block drafters: the loss against a block at a time, in plain words; learning; the exported folder."""

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F

from redline.draft.train import batches, blocks
from redline.draft.train.blocks import anchors_of, block_loss, numbers
from redline.draft.train.losses import measured
from redline.draft.train.train import DrafterSizes, check, train
from redline.draft.train.trainer import Trainer
from redline.errors import ConfigError
from redline.model.block.config import BlockConfig
from redline.model.block.module import BlockDrafter
from redline.model.k2.checkpoint import Checkpoint
from tests.draft.train.captured import VOCABULARY, sequences, target_config, target_folder
from tests.draft.train.test_train import LAYERS, QUIET, config_of, pictures, source

__all__ = ["pictures"]  # an autouse fixture: no pictures are drawn here either

SIZES: dict[str, Any] = {"block_size": 4, "num_hidden_layers": 1, "mask_token_id": 63}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"kind": "dflash"},
    "dspark": {"kind": "dspark", "markov_rank": 8},
    "dspark, reduced": {"kind": "dspark", "markov_rank": 8, "draft_vocab_size": 40},
    "dspark, no bias": {"kind": "dspark", "markov_rank": 0},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"))


def drafter_and_head(target: Path, kind: str) -> tuple[BlockDrafter, torch.Tensor]:
    torch.manual_seed(1)
    drafter = BlockDrafter(BlockConfig.for_target(target_config(), layer_ids=LAYERS, **SIZES | KINDS[kind]))
    if drafter.config.markov_rank:
        torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    if "d2t" in drafter.state_dict():
        drafter.keep(torch.arange(40) + 11)
    opened = Checkpoint.open(target)
    head = opened.plain("lm_head.weight").float()
    drafter.initialise(opened.plain("embed_tokens.weight").float(), head)
    return drafter, head


def batch_of(head: torch.Tensor, *lengths: int) -> batches.TrainBatch:
    return batches.collate(sequences(head, lengths, answer=5), 48, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_each_block_alone(kind: str, target: Path):
    """Every answer token of two sequences after an anchor; a block sees only tokens before its anchor, and itself."""
    drafter, head = drafter_and_head(target, kind)
    config = drafter.config
    batch = batch_of(head, 20, 9)
    with torch.no_grad():
        total, stats = block_loss(drafter, batch, head, 100, 2.0, learning=False)
    wanted = torch.zeros(2)
    counts = [0] * config.drafts
    ids = drafter.token_ids()
    for number, one in enumerate(sequences(head, (20, 9), answer=5)):
        losses, weights = [], []
        for anchor in range(4, len(one.tokens) - 1):
            block = torch.full((4,), 63)
            block[0] = one.tokens[anchor]
            seen = torch.ones(1, 4, anchor + 4, dtype=torch.bool)
            context = drafter.context(one.features[:anchor].float())
            places = torch.arange(anchor, anchor + 4)
            with torch.no_grad():
                states = drafter(drafter.embed(block)[None], context[None], places[None], seen)[0]
            for draft, state in enumerate(states if config.sample_from_anchor else states[1:]):
                at = anchor + 1 + draft
                if at >= len(one.tokens):
                    break
                p = (one.last[at - 1].float() @ head.T).softmax(-1)
                with torch.no_grad():
                    q = drafter.draft_logits(state, one.tokens[at - 1]).softmax(-1)
                    known = int(one.tokens[at]) if ids is None else (ids == one.tokens[at]).nonzero().flatten().tolist()
                    p_K = p if ids is None else p[ids]
                    alpha = torch.minimum(p_K, q).sum()
                    loss = 0.9 * 2 * (1 - alpha)
                    if known != []:
                        loss = loss - 0.1 * q[known].log().squeeze()
                    if config.confidence:
                        given = drafter.confidence(state, one.tokens[at - 1])
                        loss = loss + F.binary_cross_entropy_with_logits(given, alpha)
                losses.append(loss * torch.tensor(-draft / 2.0).exp())
                weights.append(torch.tensor(-draft / 2.0).exp())
                counts[draft] += 1
        wanted[number] = torch.stack(losses).sum() / torch.stack(weights).sum()
    assert stats.tokens.tolist() == counts
    torch.testing.assert_close(total, wanted.sum(), rtol=1e-3, atol=1e-3)


def test_anchors_are_distinct_and_their_next_token_is_an_answers(target: Path):
    _, head = drafter_and_head(target, "dspark")
    batch = batch_of(head, 30, 9, 6)
    number_BT = numbers(batch)
    for random in (True, False):
        found = anchors_of(batch, number_BT, 7, random=random)
        assert found.kept.sum(1).tolist() == [7, 4, 1]  # answers begin at position 5
        for places, kept, length in zip(found.places.tolist(), found.kept.tolist(), (30, 9, 6), strict=True):
            used = [place for place, keep in zip(places, kept, strict=True) if keep]
            assert len(set(used)) == len(used)
            assert all(4 <= place < length - 1 for place in used)
    again = [anchors_of(batch, number_BT, 7, random=True).places for _ in range(2)]
    assert not torch.equal(*again)
    assert torch.equal(*(anchors_of(batch, number_BT, 7, random=False).places for _ in range(2)))


def test_chunks_and_the_gradient_through_them_are_the_same(target: Path, monkeypatch: pytest.MonkeyPatch):
    drafter, head = drafter_and_head(target, "dspark")
    batch = batch_of(head, 30, 25)
    found: list[tuple[float, torch.Tensor]] = []
    for rows in (1000, 7):
        monkeypatch.setattr(blocks, "chunk_rows", lambda vocabulary, rows=rows: rows)
        drafter.zero_grad()
        total, _ = block_loss(drafter, batch, head, 100, 4.0, learning=False)
        total.backward()
        assert drafter.fc.weight.grad is not None
        found.append((float(total.detach()), drafter.fc.weight.grad.clone()))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_learns_and_leaves_a_folder_in_the_public_form(kind: str, target: Path, tmp_path: Path):
    sizes = DrafterSizes(**SIZES | KINDS[kind])
    config = msgspec.structs.replace(
        config_of(target, tmp_path, 20, anchors=16, accumulate=1, lr=1e-2, ema=0.8), drafter=sizes
    )
    given = source(target)
    assert train(config, given, LAYERS, QUIET) == 0
    random, head = drafter_and_head(target, kind)
    trained = BlockDrafter.open(tmp_path, target_config()).float()
    trained.attach(Checkpoint.open(target).plain("embed_tokens.weight").float(), head)
    with torch.no_grad():
        before, after = (
            measured(block_loss(drafter, batch_of(head, 40, 40), head, 100, 4.0, learning=False)[1])
            for drafter in (random, trained)
        )
    assert sum(after.loss) < sum(before.loss) - 0.1


def test_a_stopped_training_resumes_bit_for_bit(target: Path, tmp_path: Path):
    """Anchors are drawn from the generator that a state keeps."""
    given, sizes = source(target), DrafterSizes(**SIZES | KINDS["dspark"])
    outs = [tmp_path / name for name in ("whole", "stopped")]
    whole, stopped = (msgspec.structs.replace(config_of(target, out, 6), drafter=sizes) for out in outs)
    assert train(whole, given, LAYERS, QUIET) == 0
    with pytest.MonkeyPatch.context() as patch:
        step = Trainer._step

        def killed(self: Trainer, group: Any) -> Any:
            if self.step == 4:
                raise SystemExit
            return step(self, group)

        patch.setattr(Trainer, "_step", killed)
        with pytest.raises(SystemExit):
            train(stopped, given, LAYERS, QUIET)
    torch.rand(3)
    assert train(stopped, given, LAYERS, QUIET) == 0
    a, b = (BlockDrafter.open(out, target_config()).state_dict() for out in outs)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_drafter_to_start_from_is_of_the_named_kind(target: Path, tmp_path: Path):
    drafter_and_head(target, "dspark")[0].save(tmp_path / "start")
    config = msgspec.structs.replace(config_of(target, tmp_path / "out", 1), start=str(tmp_path / "start"))
    with pytest.raises(ConfigError, match=r"a block drafter, and drafter\.kind is 'eagle3'; name its kind"):
        check(config)


def test_draft_ids_may_have_any_order(target: Path):
    """A file's d2t need not be sorted."""
    drafter, head = drafter_and_head(target, "dspark, reduced")
    order = torch.randperm(40)
    other = copy.deepcopy(drafter)
    ids = drafter.token_ids()
    assert ids is not None
    with torch.no_grad():
        other.d2t.copy_(ids[order] - torch.arange(40))
        other.lm_head.weight.copy_(drafter.lm_head.weight[order])
        other.markov_head.markov_w2.weight.copy_(drafter.markov_head.markov_w2.weight[order])
        losses = [block_loss(each, batch_of(head, 30), head, 100, 4.0, learning=False)[0] for each in (drafter, other)]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    ("sizes", "recipe", "message"),
    [
        (
            {"kind": "dspark", "q_lora_rank": 4},
            {},
            "drafter.q_lora_rank is 4; a drafter of kind dspark has no such size",
        ),
        ({"markov_rank": 4}, {}, "drafter.markov_rank is 4; a drafter of kind eagle3 has no such size"),
        ({"kind": "dflash"}, {"loss": "lk"}, "recipe.loss is 'lk'; it has no effect on a block drafter"),
        ({"kind": "dflash", "block_size": 1}, {}, "drafter.block_size is 1; a block of DFlash needs at least 2"),
        ({"kind": "dspark", "mask_token_id": VOCABULARY}, {}, "drafter.mask_token_id is 64; the target has 64 tokens"),
        ({"kind": "dspark"}, {"steps_ahead": 2}, "recipe.steps_ahead is 2; it has no effect on a block drafter"),
        ({"kind": "dspark"}, {"anchors": 0}, "recipe.anchors is 0; expected more than 0"),
    ],
)
def test_what_does_not_fit_is_named(sizes: dict[str, Any], recipe: dict[str, Any], message: str, target: Path):
    config = config_of(target, target / "out", 1, **{"steps_ahead": 7, **recipe})
    with pytest.raises(ConfigError, match=message):
        check(msgspec.structs.replace(config, drafter=DrafterSizes(**sizes)))
