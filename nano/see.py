"""Teaches Kimi-Nano to see: trains a vision tower and its projector in front of the text model, which stays as it is.

    python -m nano.see --out runs/see --seconds 480            on one GPU
    python -m nano.see --out runs/try --seconds 300 --scale 0.05 --kinds colour shape      a rehearsal on a CPU

Drawings (`nano.data_pictures`) are made in worker processes. Loss falls on the sentence that the model reasons and on
its answer. At the end OUT/kimi-nano is the model's folder with the tower in it; every text answer is bit-equal to that
of the model without, since no other weight changes. log.jsonl has a line every ten seconds, and at the end the share of
right answers by kind and split, each token predicted behind the right ones.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from nano.attention import layout_of
from nano.config import MEDIA_PLACEHOLDER, NANO
from nano.data_pictures import KINDS, Drawing, drawing
from nano.export import SIDE_CONFIGS, stacks_of
from nano.model import Compiled, blocks, effective, mean_loss
from nano.sample import Split
from redline.chat.conversation import Conversation, Message, Picture
from redline.chat.template import render
from redline.chat.tokenizer import Special, Tokenizer
from redline.media.image import patches_of
from redline.media.rules import ImageRules
from redline.model.k2.write import k25_config, write_checkpoint
from redline.model.vision.config import MERGE, PROJECTOR, TOWER, VisionConfig
from redline.model.vision.tower import position_angles, positions_between

VISION = VisionConfig(
    patch=14, rows=16, columns=16, frames=4, hidden=160, layers=4, heads=4, intermediate=480,
    text_hidden=NANO.hidden_size, token=MEDIA_PLACEHOLDER, projector_eps=1e-5,
)  # fmt: skip
RULES = ImageRules()
SIZES = ((112, 112), (168, 168), (224, 224), (224, 168), (168, 224), (280, 196), (224, 224), (336, 224))  # pixels
BATCH = 512  # drawings of a step, of pictures of 224 x 224
RATE, WARM = 2e-3, 0.03  # highest learning rate; share of the time in which it rises
SPLITS: tuple[Split, ...] = ("values", "families")
EVALUATED = 128  # drawings of a kind and split


class Batch(NamedTuple):
    """Drawings of one kind of size, a row of L tokens each. Arrays, so that a worker sends no tensors."""

    ids: NDArray[np.int64]  # [B, L], filled up with 0
    loss: NDArray[np.float32]  # [B, L]: 1 where the next token is one to learn
    patches: NDArray[np.uint8]  # [pictures, P, 3, 14, 14]
    rows: int  # of patches
    columns: int


def batch_of(tokenizer: Tokenizer, drawings: Sequence[Drawing]) -> Batch:
    """Drawings whose pictures all have the same size, and of which each has as many."""
    layout = RULES.layout(*drawings[0].pictures[0].size)
    known = Picture(at=0, data=b"", rows=layout.rows, columns=layout.columns)
    lines: list[list[int]] = []
    learnt: list[int] = []
    for one in drawings:
        asked = Message(role="user", content=one.question, pictures=(known,) * len(one.pictures))
        ids = tokenizer.encode_pieces(render(Conversation(messages=(asked,), thinking=one.thinking)))
        learnt.append(len(ids))
        thought = (one.reasoning, Special("</think>")) if one.thinking else ()
        lines.append(ids + tokenizer.encode_pieces((*thought, one.answer, Special("<|im_end|>"))))
    length = -(-max(map(len, lines)) // 16) * 16
    ids, loss = np.zeros((len(lines), length), np.int64), np.zeros((len(lines), length), np.float32)
    for row, (line, first) in enumerate(zip(lines, learnt, strict=True)):
        ids[row, : len(line)] = line
        loss[row, first - 1 : len(line) - 1] = 1
    patches = np.stack([patches_of(picture, layout, RULES) for one in drawings for picture in one.pictures])
    return Batch(ids, loss, patches, layout.rows, layout.columns)


def batches(seed: int, size: int, kinds: Sequence[str], folder: Path) -> Iterator[Batch]:
    """Batches for training, without end. size: of drawings of 224 x 224; for others as many as have as many patches."""
    rng, tokenizer = random.Random(seed), Tokenizer.open(folder)
    single = [kind for kind in kinds if kind != "two"]
    while True:
        pixels = rng.choice(SIZES)
        two = "two" in kinds and (not single or rng.random() < 0.12)
        count = max(1, round(size * 224 * 224 / (pixels[0] * pixels[1]) / (1 + two)))
        chosen = ["two"] * count if two else [rng.choice(single) for _ in range(count)]
        yield batch_of(tokenizer, [drawing(rng, "train", kind, pixels) for kind in chosen])


def _work(queue: Any, *given: Any) -> None:
    for batch in batches(*given):
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
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + product(mixed, f"{at}.wo")
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
        scale = 0.02 if "pos_emb" in name else math.prod(shape[1:]) ** -0.5
        if name.endswith((".wo.weight", ".fc1.weight")):
            scale *= (2 * VISION.layers) ** -0.5
        made[name] = torch.randn(shape, generator=g) * scale
    return made


class Run:
    """One training."""

    def __init__(self, model: Path, out: Path, seed: int, scale: float, kinds: Sequence[str], workers: int) -> None:
        self.model, self.out, self.kinds = model, out, kinds
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        masters, bias = stacks_of(model)
        self.text = {name: value.to(self.device) for name, value in effective(masters, False, self.dtype).items()}
        self.bias, self.code = bias.to(self.device), Compiled()
        self.tower = {name: value.to(self.device).requires_grad_() for name, value in initial_tower(seed).items()}
        matrices = [value for name, value in self.tower.items() if value.ndim > 1 and "pos_emb" not in name]
        others = [value for name, value in self.tower.items() if value.ndim == 1 or "pos_emb" in name]
        groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), fused=self.device.type == "cuda")
        self.log_file = (out / "log.jsonl").open("w")
        context = multiprocessing.get_context("spawn")
        self.queue: Any = context.Queue(maxsize=3 * workers)
        size = max(1, round(BATCH * scale))
        self.workers = [
            context.Process(target=_work, args=(self.queue, seed + 1 + n, size, tuple(kinds), model), daemon=True)
            for n in range(workers)
        ]
        for worker in self.workers:
            worker.start()

    def train(self, seconds: float) -> None:
        """Takes steps until `seconds` after the first one began."""
        began = shown = time.monotonic()
        seen = steps = 0
        while (now := time.monotonic()) - began < seconds:
            progress = (now - began) / seconds
            rate = min(progress / WARM, 1.0) * 0.5 * (1 + math.cos(math.pi * progress))
            for group in self.optimizer.param_groups:
                group["lr"] = RATE * rate
            batch = self.queue.get()
            loss, right = self._step(batch, learn=True)
            seen, steps = seen + len(batch.ids), steps + 1
            if now - shown >= 10:
                shown = now
                figures = {"loss": round(float(loss), 4), "right": round(float(right.float().mean()), 3)}
                self._write({"seconds": round(now - began), "drawings": seen, "steps": steps, **figures})
        self._write({"seconds": round(seconds), "drawings": seen, "steps": steps})

    def _step(self, batch: Batch, *, learn: bool) -> tuple[Tensor, Tensor]:
        """(mean loss, whether all tokens to learn are the likeliest ones, bool [B])."""
        ids, loss_BL, patches = (torch.from_numpy(x).to(self.device, non_blocking=True) for x in batch[:3])
        number, length = ids.shape
        with torch.set_grad_enabled(learn), torch.autocast(self.device.type, self.dtype, self.dtype != torch.float32):
            seen = features(self.tower, patches, batch.rows, batch.columns).to(self.dtype)
        with torch.set_grad_enabled(learn):
            flat = ids.flatten()
            embedded = F.embedding(flat, self.text["embed"])
            x_TD = embedded.masked_scatter((flat == MEDIA_PLACEHOLDER)[:, None], seen)
            starts = torch.zeros(number, length, dtype=torch.bool, device=self.device)
            starts[:, 0] = True
            layout = layout_of(starts.flatten(), length, "causal", number)
            hidden, _ = blocks(NANO, self.text, self.bias, x_TD, layout, self.code)
            told = loss_BL.flatten() > 0
            targets = torch.cat([ids[:, 1:], ids[:, :1]], 1).flatten()[told]
            asked = hidden[told]
            ones = torch.ones(len(asked), device=self.device)
            mean, _ = mean_loss(asked, self.text["head"], targets, ones, ones, self.code)
        if learn:
            mean.backward()
            torch.nn.utils.clip_grad_norm_(list(self.tower.values()), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            wrong = (F.linear(asked, self.text["head"]).argmax(-1) != targets).float()
            line = torch.arange(number, device=self.device).repeat_interleave(length)[told]
            right = torch.zeros(number, device=self.device).index_add_(0, line, wrong) == 0
        return mean.detach(), right

    def finish(self) -> None:
        """Measures on held-out drawings, and writes the model with its tower."""
        for worker in self.workers:
            worker.kill()
        tokenizer, right = Tokenizer.open(self.model), dict[str, dict[str, float]]()
        for split, kind in itertools.product(SPLITS, self.kinds):
            rng, found = random.Random(f"{split} {kind}"), list[Tensor]()
            for _ in range(0, EVALUATED, 16):
                drawn = [drawing(rng, split, kind, (224, 224)) for _ in range(16)]
                found.append(self._step(batch_of(tokenizer, drawn), learn=False)[1])
            right.setdefault(split, {})[kind] = round(float(torch.cat(found).float().mean()), 3)
        self._write({"right": right})
        self.log_file.close()
        self.export(self.out / "kimi-nano")

    def export(self, folder: Path) -> None:
        """The model's files with the tower's tensors, in bf16, after the text model's, which stay bit-equal."""
        text = (one for file in sorted(self.model.glob("*.safetensors")) for one in load_file(file).items())
        tower = ((name, value.detach().cpu().to(torch.bfloat16)) for name, value in self.tower.items())
        config = k25_config(NANO, vision_config=VISION.to_dict(), media_placeholder_token_id=MEDIA_PLACEHOLDER)
        write_checkpoint(folder, itertools.chain(text, tower), config)
        for file in self.model.iterdir():
            if file.is_file() and (file.name in SIDE_CONFIGS or file.name.startswith(("token", "tiktoken", "chat"))):
                shutil.copy(file, folder)

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
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.model, arguments.out, arguments.seed, arguments.scale, arguments.kinds, arguments.workers)
    run.train(arguments.seconds)
    run.finish()


if __name__ == "__main__":
    main()
