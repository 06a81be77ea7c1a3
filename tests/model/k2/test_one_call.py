"""Greedy tokens and log probabilities of rows with non-finite logits."""

import pytest
import torch

from redline.kernels.cpu.blocks.transformer import TransformerArgs
from redline.model.k2.one_call import transformer


@pytest.mark.parametrize("run", [transformer.run, transformer.op.reference])
def test_a_token_behind_which_a_logit_is_not_finite_has_no_likeliest_next_token(run):
    planes, weights, inputs, _, _ = next(transformer.op.cases()).make(torch.Generator().manual_seed(0))
    [sound] = run(TransformerArgs(planes.clone(), weights, inputs, (), [0])).likeliest
    assert sound >= 0
    for value in (torch.nan, torch.inf, -torch.inf):
        weights.embedding_VD[inputs.ids_T] = value
        assert run(TransformerArgs(planes.clone(), weights, inputs, (), [0])).likeliest == [-1]


def test_only_what_is_asked_for_has_logits_in_the_order_of_asking():
    planes, weights, inputs, layers, _ = list(transformer.op.cases())[1].make(torch.Generator().manual_seed(0))
    whole = transformer(planes.clone(), weights, inputs, layers, range(inputs.count))
    some = transformer(planes.clone(), weights, inputs, layers, [21, 3])
    assert torch.equal(some.logits(), whole.logits()[[21, 3]])
    assert some.likeliest == [whole.likeliest[21], whole.likeliest[3]]
    assert torch.equal(some.hidden(), whole.hidden())
    none = transformer(planes.clone(), weights, inputs, layers, ())
    assert none.likeliest == []
    assert none.logits().shape == (0, weights.head.outputs)
    assert torch.equal(none.hidden(), whole.hidden())
