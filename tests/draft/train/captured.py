"""A small target that can be learned from, and its states, without a model: random walks of tokens with a pattern."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from redline.model.k2.config import K2Config
from redline.model.k2.write import random_checkpoint, tiny_config

VOCABULARY = 64


@dataclass(frozen=True)
class Captured:
    id: str
    domain: str
    tokens: Tensor
    loss: Tensor
    features: Tensor
    last: Tensor


@dataclass(frozen=True)
class Given:
    """A source of given sequences, in another order in each epoch."""

    items: Sequence[Captured]

    def sequences(self, epoch: int, seed: int, rank: int = 0, world: int = 1) -> Iterator[Captured]:
        order = torch.randperm(len(self.items), generator=torch.Generator().manual_seed(1000 * seed + epoch)).tolist()
        for number in order[rank::world]:
            yield self.items[number]


def target_config() -> K2Config:
    return tiny_config(vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=2, intermediate_size=32)


def target_folder(folder: Path) -> Path:
    random_checkpoint(folder, target_config(), seed=5)
    return folder


def sequences(head_VD: Tensor, lengths: Sequence[int], seed: int = 0, answer: int = 4) -> list[Captured]:
    """Token t + 1 is token t plus 1, or plus 3 with probability 0.2; the target's states encode the likely one.

    answer: position of the first token of the answers.
    """
    generator = torch.Generator().manual_seed(seed)
    width = head_VD.shape[1]
    found: list[Captured] = []
    for number, length in enumerate(lengths):
        jumps = torch.where(torch.rand(length, generator=generator) < 0.2, 3, 1)
        tokens = (jumps.cumsum(0) + int(torch.randint(VOCABULARY, (1,), generator=generator))) % VOCABULARY
        # The state that the head reads at t has the direction of the token that usually follows.
        rows = head_VD.float()[(tokens + 1) % VOCABULARY]
        last = rows * (8 / rows.square().sum(-1, keepdim=True))
        noise = torch.randn(length, 3 * width, generator=generator) * 0.1
        features = _unit(head_VD.float()[tokens]).repeat(1, 3) + noise
        loss = torch.arange(length) >= answer
        domain = ("numbers", "words")[number % 2]
        one = Captured(f"s{number}", domain, tokens, loss, features.to(torch.bfloat16), last.to(torch.bfloat16))
        found.append(one)
    return found


def _unit(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()
