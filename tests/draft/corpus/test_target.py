"""The target's states equal the engine's, however the sequences are packed."""

from pathlib import Path

import pytest
import torch

from redline.draft.corpus.target import TargetModel
from redline.errors import ConfigError
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.write import random_checkpoint
from tests.tiny_model import VOCABULARY, job, kernel_config, prompt, run_alone, tiny_model

LENGTHS = (5, 64, 65, 130, 1, 200)


def target(**options: object) -> TargetModel:
    return TargetModel(tiny_model(), "tiny", **options)  # type: ignore[arg-type]


def sequences(*lengths: int) -> list[list[int]]:
    return [list(prompt(seed, length)) for seed, length in enumerate(lengths)]


def test_the_heads_view_of_the_last_states_is_what_the_engine_samples_from():
    tokens = prompt(3, 150)
    ((_, last),) = target().features([list(tokens)])
    logits = last.float() @ target().head.float().T
    answer = run_alone(tiny_model(), job("a", tokens, max_tokens=1, prompt_logprobs=0))
    for position, said in enumerate((*answer.prompt_logprobs, *answer.logprobs)):
        assert logits[position].log_softmax(-1)[said.token].item() == pytest.approx(said.logprob, abs=0.05)


@pytest.mark.parametrize("call_tokens", [1, 7, 64, 100, 300])
def test_packing_changes_no_bit(call_tokens: int):
    one_by_one = [target().features([tokens])[0] for tokens in sequences(*LENGTHS)]
    packed = target(call_tokens=call_tokens).features(sequences(*LENGTHS))
    for alone, together in zip(one_by_one, packed, strict=True):
        assert torch.equal(alone.features, together.features)
        assert torch.equal(alone.last, together.last)


def test_a_target_keeps_nothing_from_one_call_to_the_next():
    used, tokens = target(), sequences(100, 40)
    used.features(sequences(*LENGTHS))
    for fresh, again in zip(target().features(tokens), used.features(tokens), strict=True):
        assert torch.equal(fresh.features, again.features)


def test_features_are_the_states_that_enter_the_named_layers():
    tokens = sequences(70)[0]
    every = target(layer_ids=(0, 1, 2, 3)).features([tokens])[0].features
    some = target(layer_ids=(0, 2, 3)).features([tokens])[0].features
    assert every.shape == (70, 4, tiny_model().config.hidden_size)
    assert every.dtype == torch.bfloat16
    assert torch.equal(some, every[:, [0, 2, 3]])
    assert torch.equal(every[:, 0], target().embedding[tokens])
    assert not torch.equal(every[:, 1], every[:, 2])
    assert not every.is_inference()  # a drafter is trained on them


def test_long_contexts_are_cut_where_scores_would_take_too_much(monkeypatch: pytest.MonkeyPatch):
    whole = target().features(sequences(300))[0]
    monkeypatch.setattr("redline.draft.corpus.target.SCORES", 1)
    assert torch.equal(whole.features, target().features(sequences(300))[0].features)


def test_what_opens_has_the_checkpoints_fingerprint_and_embeddings(tmp_path: Path):
    config = kernel_config()
    random_checkpoint(tmp_path, config)
    read: list[tuple[int, int]] = []
    opened = TargetModel.open(tmp_path, torch.device("cpu"), progress=lambda done, total: read.append((done, total)))
    checkpoint = Checkpoint.open(tmp_path)
    assert opened.fingerprint == checkpoint.fingerprint
    assert torch.equal(opened.head, checkpoint.plain("lm_head.weight").bfloat16())
    assert opened.embedding.shape == (VOCABULARY, config.hidden_size)
    assert opened.config.num_hidden_layers == config.num_hidden_layers
    assert read[-1][0] == read[-1][1]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([], "no tokens"),
        ([1, VOCABULARY], f"token id {VOCABULARY}"),
        ([3, -1], "token id -1"),
        ([1] * 10**6, "supports"),
    ],
)
def test_what_the_target_cannot_read_is_refused(tokens: list[int], reason: str):
    with pytest.raises(ConfigError, match=f"sequence 1: .*{reason}"):
        target().features([[1, 2], tokens])


@pytest.mark.parametrize("ids", [(), (0, 4), (2, 1, 0), (1, 1, 2), (-1, 0)])
def test_layers_that_are_not_there_are_refused(ids: tuple[int, ...]):
    with pytest.raises(ConfigError, match=r"layer_ids is .*from 0 \(the embedding\) to 3"):
        target(layer_ids=ids)
