"""What a run has learned, measured on the device it ran on: held-out loss and graded greedy answers, by kind.

`redline eval` measures the exported checkpoint through the engine; this says within the same minute whether a run was
good. Prompts come from phrase families that training never sees.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nano.attention import Way, layout_of
from nano.data import ANSWER, DOCUMENTS_PER_ROW, LONG_ROW, LOSS_SHIFT, ROW, START_SHIFT, Encoder, Packer, Tokens
from nano.generate import greedy
from nano.model import Compiled, Weights, forward, mean_loss
from nano.sample import Sample
from redline.bench.quality.checks import GradedCall, grade
from redline.chat.events import CallArguments, CallBegin, Event, Text
from redline.chat.parser import Parser
from redline.chat.stops import StopStrings
from redline.chat.tokenizer import Tokenizer
from redline.model.k2.config import K2Config

ANSWER_TOKENS = 512


class Model(NamedTuple):
    """What answers: weights from `effective`, and how attention is computed here."""

    config: K2Config
    weights: Weights
    bias: Tensor
    way: Way


class Unpacked(NamedTuple):
    """A batch of rows on the device, flat. T tokens."""

    tokens: Tensor  # int64 [T]
    targets: Tensor  # int64 [T], the next token
    loss: Tensor  # int64 [T], what kind of loss falls on the target: NO_LOSS, PROMPT or ANSWER
    starts: Tensor  # bool [T]


def unpack(rows: Tensor) -> Unpacked:
    """A batch of rows, int32 [N, row] of packed tokens (`nano.data`), as flat tensors on the same device."""
    flat = rows.flatten().long()
    # The last token's target is the first one's, a start, and starts have no loss.
    following = flat.roll(-1)
    ids = (1 << LOSS_SHIFT) - 1
    return Unpacked(flat & ids, following & ids, following >> LOSS_SHIFT & 3, (flat >> START_SHIFT & 1).bool())


@torch.no_grad()
def held_out_loss(model: Model, encoder: Encoder, samples: Sequence[tuple[str, Sample]]) -> dict[str, float]:
    """Mean loss of a token of an answer, in nats, by kind.

    samples: (kind, sample); those of more than LONG_ROW tokens are left out. Raises ValueError, before anything is
    computed, for a kind of which none is left.
    """
    kinds: defaultdict[str, list[Tokens]] = defaultdict(list)
    for kind, sample in samples:
        kinds[kind].append(encoder.sample(sample))
    fitting = {kind: [one for one in documents if len(one) <= LONG_ROW] for kind, documents in kinds.items()}
    for kind, fits in fitting.items():
        if not fits:
            raise ValueError(f"{kind}: every sample has more than {LONG_ROW} tokens, so there is no loss to tell")
    device = model.bias.device
    losses: dict[str, float] = {}
    for kind, fits in fitting.items():
        row = -(-max(map(len, fits)) // ROW) * ROW
        packer = Packer(row, encoder.pad)
        rows = [full for tokens in fits if (full := packer.add(tokens)) is not None] + packer.close()
        total = weight = 0.0
        for first in range(0, len(rows), 16):
            part = np.stack(rows[first : first + 16])
            batch = unpack(torch.from_numpy(part.astype(np.int32)).to(device))
            layout = layout_of(batch.starts, row, model.way, part.size // ROW * DOCUMENTS_PER_ROW)
            x_TD, _ = forward(model.config, model.weights, model.bias, batch.tokens, layout, Compiled())
            told = (batch.loss == ANSWER).float()
            loss, _ = mean_loss(x_TD, model.weights["head"], batch.targets, told, told, Compiled())
            total += float(loss) * float(told.sum())
            weight += float(told.sum())
        losses[kind] = total / max(weight, 1)
    return losses


def answers(
    model: Model, encoder: Encoder, tokenizer: Tokenizer, samples: Sequence[Sample], longest: int = ANSWER_TOKENS
) -> list[tuple[str, bool]]:
    """(the answer as text with control tokens spelled out, whether its check passes) of each sample's last turn.

    Answers are greedy and end after `longest` tokens. A check that runs code runs it on this machine.
    """
    prompts = [encoder.prompt(sample) for sample in samples]
    stop = tokenizer.special("<|im_end|>")
    made = greedy(model.config, model.weights, model.bias, prompts, longest, model.way, stop)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        verdicts = list(threads.map(lambda sample, ids: _passes(sample, tokenizer, ids), samples, made))
    texts = [b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace") for ids in made]
    return list(zip(texts, verdicts, strict=True))


def _passes(sample: Sample, tokenizer: Tokenizer, ids: list[int]) -> bool:
    content, calls = _read(tokenizer, ids, sample.thinking)
    return bool(grade(sample.check or {}, content, calls, run_code=True).ok)


def _read(tokenizer: Tokenizer, ids: list[int], thinking: bool) -> tuple[str, list[GradedCall]]:
    """(visible text, tool calls), as a client would get them."""
    parser = Parser(tokenizer, thinking, StopStrings(()), tokenizer.skipped)
    events: list[Event] = []
    for token in ids:
        parser.push(token, events)
    parser.finish(events, complete=True)
    calls: list[GradedCall] = []
    for event in events:
        match event:
            case CallBegin():
                calls.append(GradedCall(name=event.name.removeprefix("functions."), arguments=""))
            case CallArguments():
                calls[event.index]["arguments"] += event.text
            case _:
                pass
    return "".join(event.text for event in events if isinstance(event, Text)), calls


def table(kinds: Sequence[str], verdicts: Sequence[bool]) -> dict[str, tuple[int, int]]:
    """kind -> (right, asked), from the kind and the verdict of each answer."""
    rows: dict[str, tuple[int, int]] = {}
    for kind, right in zip(kinds, verdicts, strict=True):
        before = rows.get(kind, (0, 0))
        rows[kind] = (before[0] + right, before[1] + 1)
    return rows
