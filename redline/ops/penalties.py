"""Penalties on the logits of tokens that occurred before, as in OpenAI's API and vLLM."""

import torch
from torch import Tensor

from redline.messages.job import options_at
from redline.messages.sampling_option import SamplingStage

PENALTIES = tuple(option.name for option in options_at(SamplingStage.PENALTY))


def penalized(
    x: Tensor, generated: Tensor, *, presence_penalty: Tensor, frequency_penalty: Tensor, repetition_penalty: Tensor
) -> Tensor:
    """The logits x of tokens that occur in the prompt or the answer, float32; the keywords are PENALTIES.

    generated: how often each occurs in the answer, integers. The penalties are float32 tensors: a GPU would multiply by
    the inverse of a Python number.
    """
    x = torch.where(x > 0, x / repetition_penalty, x * repetition_penalty)
    return torch.where(generated > 0, x - (presence_penalty + frequency_penalty * generated), x)
