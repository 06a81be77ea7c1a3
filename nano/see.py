"""Teaches Kimi-Nano to see: trains a vision tower and its projector in front of the text model, which stays as it is.

    python -m nano.see --out runs/see --seconds 480            on one GPU
    python -m nano.see --out runs/more --seconds 480 --start runs/see         goes on from there
    python -m nano.see --out runs/try --seconds 3600 --scale 0.05      on a CPU

Every drawing (`nano.data_pictures`) has a caption of a few words out of a hundred. Training has three parts:

1. Words. A vector for each word is learnt through the text model, which answers questions about captions. It looks at
   no picture, and a few thousand drawings are enough: a hundred vectors are little to learn.
2. Looking. The tower learns to give the vectors of a picture's caption in its first places. The text model, which
   costs ten times as much as the tower, is not needed.
3. Answers. As 2, and loss falls on the sentence that the text model reasons and on its answer as well.

Drawings are made in worker processes. At the end OUT/kimi-nano is the model's folder with the tower in it; every text
answer is bit-equal to that of the model without, since no other weight changes. log.jsonl has a line every ten seconds,
and at the end the share of right answers by kind and split, each token predicted behind the right ones.
"""

import argparse
import itertools
import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, multiprocessing

from nano.attention import Layout, layout_of, mixed
from nano.config import MEDIA_PLACEHOLDER, NANO
from nano.data_pictures import CAPTION_WORDS, KINDS, LONGEST, Drawing, drawing
from nano.export import stacks_of
from nano.model import (
    Attention,
    Compiled,
    Dense,
    Moe,
    attention,
    blocks,
    effective,
    rms_norm,
    route,
    swiglu,
)  # fmt: skip
from nano.optim import schedule
from nano.sample import Split
from redline.chat.conversation import Conversation, Message, Picture
from redline.chat.template import render
from redline.chat.tokenizer import Tokenizer
from redline.draft.train.muon import orthogonalized
from redline.media.image import patches_of
from redline.media.rules import ImageRules
from redline.model.k2.config import K2Config
from redline.model.k2.write import k25_config
from redline.model.vision.config import MERGE, PROJECTOR, TOWER, VisionConfig
from redline.model.vision.tower import position_angles, positions_between

VISION = VisionConfig(
    patch=14, rows=16, columns=16, frames=4, hidden=160, layers=4, heads=4, intermediate=480,
    text_hidden=NANO.hidden_size, token=MEDIA_PLACEHOLDER, projector_eps=1e-5,
)  # fmt: skip
RULES = ImageRules()
SMALL = range(4, 6), range(4, 6)  # widths and heights in tokens of 28 x 28 pixels
LARGE = range(5, 13), range(5, 10)  # all of them: a tower reads no grid that it has not been trained on
FILLED = 0.3  # share of the drawings that fill their last tokens; of the others a part is padding, which is black
SAYING = {"place": 2.0, "word": 0.5}  # how often a kind is drawn while words are learnt, where it is not 1
SEEING = {"word": 3.0, "place": 2.0, "count": 1.5}  # and later
BATCH = 256  # drawings of a step, of pictures of 224 x 224
WORDS, LOOK = 0.15, 0.45  # shares of the time for the words of captions, and for the tower without the text model
WORDS_RATE, WORDS_BATCH = 0.2, 64  # highest learning rate of the words of captions; most drawings of a step
MOVED_DECAY = 0.05  # of what moves words, per unit of rate: else steps at random make it as long as words are
RATE, MATRIX_RATE, MATRIX_DECAY = 2e-3, 0.02, 0.05  # of the tower: AdamW's, and Muon's for the matrices of its blocks
MOMENTUM, WARM = 0.95, 0.03  # of Muon; share of a phase in which the learning rate rises
SPREAD = 7.0  # of nano's embeddings: the root mean square of a number, which the projector must reach
FILL_WEIGHT = 0.1  # of a place of a picture behind its caption, in the tower's loss
SHARPNESS = 16.0  # of the choice between words by their distance
_ROLES = ("user", "assistant", "user")
SPLITS: tuple[Split, ...] = ("values", "families")
TOWER_FILE = "vision.safetensors"
STATE = "training.safetensors"  # in OUT: the tower in float32, and the words of captions
KEPT_EVERY = 120.0  # seconds
EVALUATED = 128  # drawings of a kind and split


class Batch(NamedTuple):
    """Drawings whose pictures take as many tokens in each direction, a row of L tokens each.

    Tensors, which reach another process in shared memory: through a pipe 50 MB take 0.1 s.
    """

    ids: Tensor  # int64 [B, L], filled up with 0
    loss: Tensor  # float32 [B, L]: 1 where the next token is one to learn
    patches: Tensor  # uint8 [pictures, P, 3, 14, 14]
    said: Tensor  # int64 [pictures, P / 4]: captions as indices of CAPTION_WORDS, filled up with FILL
    rows: int  # of patches
    columns: int

    def part(self, first: int, end: int) -> "Batch":
        """The drawings from `first` to before `end`."""
        each = len(self.said) // len(self.ids)
        own, theirs = slice(first, end), slice(first * each, end * each)
        return self._replace(
            ids=self.ids[own], loss=self.loss[own], patches=self.patches[theirs], said=self.said[theirs]
        )


def batch_of(tokenizer: Tokenizer, drawings: Sequence[Drawing]) -> Batch:
    """Drawings whose pictures all take as many tokens in each direction, and of which each has as many pictures."""
    pictures = [picture for one in drawings for picture in one.pictures]
    layouts = [RULES.layout(*picture.size) for picture in pictures]
    (layout,) = {each._replace(width=0, height=0) for each in layouts}
    known = Picture(at=0, data=b"", rows=layout.rows, columns=layout.columns)
    lines: list[list[int]] = []
    learnt: list[int] = []
    for one in drawings:
        said = [one.question] if one.earlier is None else [*one.earlier, one.question]
        messages = tuple(Message(role=role, content=text) for role, text in zip(_ROLES, said, strict=False))
        shown = (msgspec.structs.replace(messages[0], pictures=(known,) * len(one.pictures)), *messages[1:])
        ids = tokenizer.encode_pieces(render(Conversation(messages=shown, thinking=one.thinking)))
        learnt.append(len(ids))
        thought = [*_spelled(tokenizer, one, one.reasoning), tokenizer.specials["</think>"]] if one.thinking else []
        lines.append([*ids, *thought, *_spelled(tokenizer, one, one.answer), tokenizer.specials["<|im_end|>"]])
    length = -(-max(map(len, lines)) // 16) * 16
    ids, loss = np.zeros((len(lines), length), np.int64), np.zeros((len(lines), length), np.float32)
    for row, (line, first) in enumerate(zip(lines, learnt, strict=True)):
        ids[row, : len(line)] = line
        loss[row, first - 1 : len(line) - 1] = 1
    patches = np.stack([patches_of(picture, own, RULES) for picture, own in zip(pictures, layouts, strict=True)])
    said = np.zeros((len(patches), layout.tokens), np.int64)
    for row, caption in zip(said, (caption for one in drawings for caption in one.captions), strict=True):
        words = [CAPTION_WORDS.index(word) for word in caption][: layout.tokens]
        row[: len(words)] = words
    given = (torch.from_numpy(each) for each in (ids, loss, patches, said))
    return Batch(*given, layout.rows, layout.columns)


def _spelled(tokenizer: Tokenizer, one: Drawing, text: str) -> list[int]:
    """Ids of an answer. A word that was read is spelled: the tower gives letters, which the text model repeats."""
    if one.kind != "word":
        return tokenizer.encode_pieces((text,))
    before, word, after = text.rpartition(one.answer)
    return [token for part in (before, *word, after) if part for token in tokenizer.encode_pieces((part,))]


def batches(seed: int, size: int, kinds: Sequence[str], folder: Path, progress: Any) -> Iterator[Batch]:
    """Batches for training, without end. size: of drawings of 224 x 224; a batch of others has as many patches.

    progress: its `value` is the share of the training that is done. Large pictures are drawn more and more often.
    """
    rng, tokenizer = random.Random(seed), Tokenizer.open(folder)
    single = [kind for kind in kinds if kind != "two"]
    while True:
        often = SAYING if progress.value < WORDS else SEEING
        weights = [often.get(kind, 1.0) for kind in single]
        widths, heights = LARGE if rng.random() < 0.1 + 0.5 * progress.value else SMALL
        across, down = rng.choice(widths), rng.choice(heights)
        two = "two" in kinds and (not single or rng.random() < 0.2)
        count = max(1, round(size * 64 / (across * down) / (1 + two)))
        chosen = ["two"] * count if two else rng.choices(single, weights, k=count)
        yield batch_of(tokenizer, [drawing(rng, "train", kind, pixels_of(rng, across, down)) for kind in chosen])


def pixels_of(rng: random.Random, across: int, down: int) -> tuple[int, int]:
    """A width and a height that take so many tokens."""
    if rng.random() < FILLED:
        return 28 * across, 28 * down
    return 28 * across - rng.randrange(28), 28 * down - rng.randrange(28)


def _work(queue: Any, progress: Any, *given: Any) -> None:
    for batch in batches(*given, progress):
        queue.put(batch)


def features(w: Mapping[str, Tensor], patches: Tensor, rows: int, columns: int) -> Tensor:
    """The formulas of `redline.model.vision.tower`, differentiable, for pictures of one size.

    patches uint8 [N, P, 3, 14, 14]. -> [N * tokens, D]."""
    config, (number, places) = VISION, patches.shape[:2]

    def product(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"].flatten(1), w[f"{name}.bias"])

    def norm(x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    table = w[f"{TOWER}.patch_embed.pos_emb.weight"].permute(2, 0, 1)
    placed = positions_between(table, rows, columns).permute(1, 2, 0).reshape(places, -1)
    x = product((patches.flatten(2).float() / 255 - 0.5) / 0.5, f"{TOWER}.patch_embed.proj") + placed
    turn = position_angles(config.head, rows, columns, patches.device)
    cos, sin = turn.cos()[:, None], turn.sin()[:, None]
    for layer in range(config.layers):
        at = f"{TOWER}.encoder.blocks.{layer}"
        qkv = product(norm(x, f"{at}.norm0"), f"{at}.wqkv").unflatten(-1, (3, config.heads, config.head))
        first, second = qkv[:, :, :2].float().unflatten(-1, (-1, 2)).unbind(-1)
        c, s = cos[:, None], sin[:, None]
        qk = torch.stack((first * c - second * s, first * s + second * c), -1).flatten(-2).to(qkv.dtype)
        q, k, v = (each.transpose(1, 2) for each in (qk[:, :, 0], qk[:, :, 1], qkv[:, :, 2]))
        x = x + product(mixed(q, k, v).transpose(1, 2).flatten(2), f"{at}.wo")
        inner = F.gelu(product(norm(x, f"{at}.norm1"), f"{at}.mlp.fc0"), approximate="tanh")
        x = x + product(inner, f"{at}.mlp.fc1")
    x = norm(norm(x, f"{TOWER}.encoder.final_layernorm"), f"{PROJECTOR}.pre_norm", config.projector_eps)
    x = x.view(number, rows // MERGE, MERGE, columns // MERGE, MERGE, -1).transpose(2, 3)
    merged = x.reshape(number * places // MERGE**2, -1)
    return product(F.gelu(product(merged, f"{PROJECTOR}.proj.0")), f"{PROJECTOR}.proj.2")


def initial_tower(seed: int) -> dict[str, Tensor]:
    """Weights by stored name. Products that add to the residual stream, and the last one, start small."""
    g = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, shape in VISION.tensors():
        if len(shape) == 1:
            made[name] = torch.ones(shape) if "norm" in name and name.endswith("weight") else torch.zeros(shape)
            continue
        scale = 0.5 if "pos_emb" in name else math.prod(shape[1:]) ** -0.5
        if name.endswith((".wo.weight", ".fc1.weight")):
            scale *= (2 * VISION.layers) ** -0.5
        if name.endswith("proj.2.weight"):
            scale *= SPREAD
        made[name] = torch.randn(shape, generator=g) * scale
    return made


class Language(NamedTuple):
    """What the tower is to give the text model for a caption: vectors, of which each is the sum of four.

    Those of the word itself, of the two words before it, so that what is said of a thing is found by its colour and its
    shape, and of its place in the caption.
    """

    words: Tensor  # [CAPTION_WORDS, D]
    before: Tensor  # [2, CAPTION_WORDS, D]: of the word before, and of that before it
    places: Tensor  # [LONGEST + 1, D]; the last is of all behind

    @classmethod
    def stored(cls, state: Mapping[str, Tensor], device: torch.device) -> "Language":
        """From the names and tensors of `named`."""
        return cls(*(state[f"language.{name}"].to(device).requires_grad_() for name in cls._fields))

    def named(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {f"language.{name}": value for name, value in self._asdict().items()}

    @classmethod
    def initial(cls, tokenizer: Tokenizer, embed_VD: Tensor) -> "Language":
        """The embeddings of the words' text."""
        texts = [word if len(word) == 1 else f" {word}" if word else "\n" for word in CAPTION_WORDS]
        ids = [tokenizer.encode_pieces((text,)) for text in texts]
        words = torch.stack([embed_VD[torch.tensor(each, device=embed_VD.device)].float().mean(0) for each in ids])
        before, places = torch.zeros(2, *words.shape).to(words), torch.zeros_like(words[: LONGEST + 1])
        return cls(*(each.requires_grad_() for each in (words, before, places)))

    def say(self, said: Tensor) -> Tensor:
        """The vectors of captions: int64 [N, cells] -> [N, cells, D]."""
        return self.words[said] + self._around(said)

    def _around(self, said: Tensor) -> Tensor:
        first, second = (F.pad(said, (by, 0))[:, :-by] for by in (1, 2))
        places = self.places[torch.arange(said.shape[1], device=said.device).clamp_max(LONGEST)]
        return self.before[0][first] + self.before[1][second] + places

    def loss(self, seen: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
        """(how far `seen` [N, cells, D] is from the captions, whether they are the nearest words, bool [N])."""
        words = self.words.detach()
        spread = 2 * words.var(0).sum()  # mean square of the distance of two words
        flat = (seen - self._around(said).detach()).flatten(0, 1)
        far = (flat.square().sum(-1)[:, None] - 2 * flat @ words.t() + words.square().sum(-1)) / spread
        right, weight = said.flatten(), torch.where(said.flatten() > 0, 1.0, FILL_WEIGHT)
        each = F.cross_entropy(-SHARPNESS * far, right, reduction="none") + far.gather(1, right[:, None]).squeeze(1)
        return (each * weight).sum() / weight.sum(), (far.argmin(-1) == right).view(said.shape).all(-1)


class Optimizer:
    """Muon for the matrices of the tower's blocks, AdamW for the rest, which includes the projector."""

    def __init__(self, tower: Mapping[str, Tensor], gentle: float) -> None:
        """gentle: of all learning rates, 0 to 1."""
        self._gentle = gentle
        shapes: dict[torch.Size, list[Tensor]] = {}
        for name, value in tower.items():
            if ".blocks." in name and value.ndim == 2:
                shapes.setdefault(value.shape, []).append(value)
        self._matrices = list(shapes.values())  # those of one shape are turned together
        self._momentum = [torch.zeros_like(torch.stack(each)) for each in self._matrices]
        out = [value for name, value in tower.items() if f"{PROJECTOR}.proj.2." in name]
        taken = {id(value) for value in (*itertools.chain(*self._matrices), *out)}
        rest = [value for value in tower.values() if id(value) not in taken]
        groups = [{"params": rest, "rate": RATE}, {"params": out, "rate": RATE * SPREAD}]
        self._adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01, fused=out[0].is_cuda)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Moves all weights. factor: the schedule's, 0 to 1."""
        factor *= self._gentle
        rate = factor * MATRIX_RATE
        for matrices, momentum in zip(self._matrices, self._momentum, strict=True):
            given = [w.grad for w in matrices if w.grad is not None]
            assert len(given) == len(matrices), "every matrix has a gradient"
            gradient = torch.stack(given)
            momentum.lerp_(gradient, 1 - MOMENTUM)
            updates = orthogonalized(gradient.lerp(momentum, MOMENTUM)).to(momentum)
            rows, columns = updates.shape[1:]
            torch._foreach_mul_(matrices, 1 - rate * MATRIX_DECAY)
            torch._foreach_add_(matrices, list(updates.unbind()), alpha=-rate * max(1.0, rows / columns) ** 0.5)
            for w in matrices:
                w.grad = None
        for group in self._adam.param_groups:
            group["lr"] = group["rate"] * factor
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)


def moe_layer_of_few(
    x_TD: Tensor, config: K2Config, w: Attention, mlp: Moe, cos: Tensor, sin: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """`moe_layer` in which an expert computes its own tokens only: half the work on a CPU, but of changing sizes."""
    x_TD = x_TD + attention(x_TD, config, w, cos, sin, layout)
    normed = rms_norm(x_TD, w.post_norm, config.rms_norm_eps)
    weights_TE, chosen_TE = route(normed, config, mlp)
    x_TD = x_TD + swiglu(normed, mlp.shared)
    for expert in range(config.n_routed_experts):
        mine = chosen_TE[:, expert].nonzero().squeeze(1)
        out = swiglu(normed[mine], Dense(mlp.gate_up[:, expert], mlp.down[expert]))
        x_TD = x_TD.index_add(0, mine, (out * weights_TE[mine, expert, None]).to(x_TD.dtype))
    return x_TD, chosen_TE.sum(0)


class Run:
    """One training."""

    def __init__(
        self,
        model: Path,
        out: Path,
        seed: int,
        scale: float,
        read: float,
        kinds: Sequence[str],
        workers: int,
        start: Path | None = None,
    ) -> None:
        self.model, self.out, self.read, self.kinds = model, out, read, kinds
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if gpu or torch.cpu._is_avx512_bf16_supported() else torch.float32  # of the tower
        masters, bias = stacks_of(model)
        text = effective(masters, False, torch.bfloat16 if gpu else torch.float32)
        self.text, self.bias = {name: value.to(self.device) for name, value in text.items()}, bias.to(self.device)
        self.code = Compiled() if gpu else Compiled(moe_layer=moe_layer_of_few)
        self.language = Language.initial(Tokenizer.open(model), self.text["embed"])
        tower, self.first = initial_tower(seed), 0.0
        if start is not None:
            stored = load_file(start / STATE)
            self.language, self.first = Language.stored(stored, self.device), WORDS
            tower = {name: stored[name].float() for name in tower}
        self.tower = {name: value.to(self.device).requires_grad_() for name, value in tower.items()}
        words, *moved = self.language
        groups = [{"params": [words], "weight_decay": 0.0}, {"params": moved, "weight_decay": MOVED_DECAY}]
        self.words_optimizer = torch.optim.AdamW(groups, lr=WORDS_RATE, betas=(0.9, 0.98))
        # Gradients of few drawings are noisy: at a scale of 1/20, full rates take twice as many drawings.
        self.optimizer = Optimizer(self.tower, min(1.0, scale) ** (1 / 3))
        self.log_file = (out / "log.jsonl").open("w")
        context = multiprocessing.get_context("spawn")
        self.queue: Any = context.Queue(maxsize=3 * workers)
        self.progress: Any = context.Value("d", self.first)
        size = max(1, round(BATCH * scale))
        self.workers = [
            context.Process(
                target=_work, args=(self.queue, self.progress, seed + 1 + n, size, tuple(kinds), model), daemon=True
            )
            for n in range(workers)
        ]
        for worker in self.workers:
            worker.start()

    def train(self, seconds: float) -> None:
        """Takes steps until `seconds` after the first one began: words first, unless they are known from an earlier
        training, then looking, then both together."""
        began = shown = kept = time.monotonic()
        seen = steps = 0
        looking = self.first > 0
        while (now := time.monotonic()) - began < seconds:
            self.progress.value = progress = self.first + (1 - self.first) * (now - began) / seconds
            batch = self.queue.get()
            if progress < WORDS:
                figures = self.learn_words(batch, schedule(progress / WORDS, WARM))
            else:
                if not looking:
                    self.start_looking()
                looking = True
                figures = self.look(batch, schedule((progress - WORDS) / (1 - WORDS), WARM), progress >= WORDS + LOOK)
            seen, steps = seen + len(batch.ids), steps + 1
            if now - shown >= 10:
                shown = now
                rounded = {name: round(float(value.float().mean()), 4) for name, value in figures.items()}
                self._write({"seconds": round(now - began), "drawings": seen, "steps": steps, **rounded})
            if now - kept >= KEPT_EVERY:
                kept = now
                self.keep()
        self._write({"seconds": round(seconds), "drawings": seen, "steps": steps})

    def learn_words(self, batch: Batch, factor: float) -> dict[str, Tensor]:
        """Steps for the words of captions: no picture is looked at."""
        for group in self.words_optimizer.param_groups:
            group["lr"] = WORDS_RATE * factor
        for first in range(0, len(batch.ids), WORDS_BATCH):
            part = batch.part(first, first + WORDS_BATCH)
            said = part.said.to(self.device, non_blocking=True)
            loss, right = self._answers(part, self.language.say(said).flatten(0, 1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.language, 1.0)
            self.words_optimizer.step()
            self.words_optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.detach(), "right": right}

    @torch.no_grad()
    def start_looking(self) -> None:
        """What the tower gives for any picture is at first what stands behind a caption."""
        silence = torch.zeros(1, LONGEST + 1, dtype=torch.int64, device=self.device)
        self.tower[f"{PROJECTOR}.proj.2.bias"].copy_(self.language.say(silence)[0, -1])

    def look(self, batch: Batch, factor: float, answering: bool) -> dict[str, Tensor]:
        """A step for the tower: towards the captions and, if `answering`, the text model's answers."""
        seen = self._features(batch)
        said = batch.said.to(self.device, non_blocking=True)
        loss, told = self.language.loss(seen.view(*said.shape, -1), said)
        figures = {"caption_loss": loss.detach(), "told": told}
        if answering:
            part = batch.part(0, max(1, round(self.read * len(batch.ids))))
            mean, figures["right"] = self._answers(part, seen[: part.said.numel()])
            figures["loss"] = mean.detach()
            loss = loss + mean
        loss.backward()
        self.optimizer.step(factor)
        return figures

    def _features(self, batch: Batch) -> Tensor:
        patches = batch.patches.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, self.dtype, self.dtype != torch.float32):
            return features(self.tower, patches, batch.rows, batch.columns).float()

    def _answers(self, batch: Batch, seen: Tensor) -> tuple[Tensor, Tensor]:
        """(mean loss, whether all tokens to learn are the likeliest ones, bool [B]).

        seen: what the text model reads of their pictures, [tokens of pictures, D]."""
        ids, loss_BL = (x.to(self.device, non_blocking=True) for x in batch[:2])
        (number, length), flat = ids.shape, ids.flatten()
        embedded = F.embedding(flat, self.text["embed"])
        x_TD = embedded.masked_scatter((flat == MEDIA_PLACEHOLDER)[:, None], seen.to(embedded.dtype))
        starts = torch.zeros(number, length, dtype=torch.bool, device=self.device)
        starts[:, 0] = True
        layout = layout_of(starts.flatten(), length, "causal", number)
        hidden, _ = blocks(NANO, self.text, self.bias, x_TD, layout, self.code)
        told = loss_BL.flatten() > 0
        targets = torch.cat([ids[:, 1:], ids[:, :1]], 1).flatten()[told]
        logits = F.linear(hidden[told], self.text["head"]).float()
        mean = F.cross_entropy(logits, targets)
        with torch.no_grad():
            wrong = (logits.argmax(-1) != targets).float()
            line = torch.arange(number, device=self.device).repeat_interleave(length)[told]
            right = torch.zeros(number, device=self.device).index_add_(0, line, wrong) == 0
        return mean, right

    @torch.no_grad()
    def finish(self) -> None:
        """Measures on held-out drawings, and writes the model with its tower.

        right: answers; told: captions of which every word is right. They say whether the tower or the text model errs.
        """
        for worker in self.workers:
            worker.kill()
        self.export(self.out / "kimi-nano")
        self.keep()
        tokenizer, shares = Tokenizer.open(self.model), dict[str, dict[str, dict[str, float]]]()
        for split, kind in itertools.product(SPLITS, self.kinds):
            rng, found = random.Random(f"{split} {kind}"), {"right": list[Tensor](), "told": list[Tensor]()}
            for _ in range(0, EVALUATED, 16):
                batch = batch_of(tokenizer, [drawing(rng, split, kind, (224, 224)) for _ in range(16)])
                seen, said = self._features(batch), batch.said.to(self.device)
                found["right"].append(self._answers(batch, seen)[1])
                found["told"].append(self.language.loss(seen.view(*said.shape, -1), said)[1])
            for name, each in found.items():
                share = round(float(torch.cat(each).float().mean()), 3)
                shares.setdefault(name, {}).setdefault(split, {})[kind] = share
        self._write(shares)
        self.log_file.close()

    def keep(self) -> None:
        """Writes what `--start` reads."""
        state = {**self.tower, **self.language.named()}
        save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, self.out / ".writing")
        (self.out / ".writing").replace(self.out / STATE)

    def export(self, folder: Path) -> None:
        """The model's folder with the tower's tensors, in bf16, in a file of their own: the text model's stay as they
        are."""
        shutil.copytree(self.model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("eval", "training"))
        tower = {name: value.detach().cpu().to(torch.bfloat16).contiguous() for name, value in self.tower.items()}
        save_file(tower, folder / TOWER_FILE, metadata={"format": "pt"})
        place = folder / "model.safetensors.index.json"
        index = json.loads(place.read_text())
        index["weight_map"] |= dict.fromkeys(sorted(tower), TOWER_FILE)
        sizes = (load_file(folder / file) for file in sorted(set(index["weight_map"].values())))
        index["metadata"]["total_size"] = sum(tensor.nbytes for tensors in sizes for tensor in tensors.values())
        place.write_text(json.dumps(index, indent=2) + "\n")
        config = k25_config(NANO, vision_config=VISION.to_dict(), media_placeholder_token_id=MEDIA_PLACEHOLDER)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        self.log_file.write(text + "\n")
        self.log_file.flush()


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/kimi-nano"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480.0, help="of training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of the drawings of a step")
    parser.add_argument("--read", type=float, default=0.25, help="share of a step's drawings that get answers")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--start", type=Path, metavar="OUT", help="of an earlier training, which goes on")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = Run(
        arguments.model,
        arguments.out,
        arguments.seed,
        arguments.scale,
        arguments.read,
        arguments.kinds,
        arguments.workers,
        arguments.start,
    )
    run.train(arguments.seconds)
    run.finish()


if __name__ == "__main__":
    main()
