"""A small training shared by several ranks, stopped once on the way.

python -m tests.draft.train.ranks TARGET OUT KIND...    each kind below with its ranks, all at once, into OUT/KIND
DRAFTER=dspark: of that kind of drafter, not EAGLE-3
accelerate launch --config_file F -m tests.draft.train.ranks TARGET OUT     this process is one rank of those in F
"""

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
from rich.console import Console

from redline.draft.train import train as training
from redline.draft.train.batches import is_held_out
from redline.draft.train.budget import TrainBudget
from redline.draft.train.train import DrafterSizes, TrainConfig, train
from redline.draft.train.trainer import Recipe, Trainer
from redline.model.k2.checkpoint import Checkpoint
from tests.draft.train.captured import Captured, sequences

KINDS: dict[str, tuple[int, dict[str, str]]] = {
    "one process": (1, {}),
    "data parallel": (2, {}),
    "fully sharded": (2, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}),
}
SHARE = 0.2


@dataclass(frozen=True)
class Even:
    """Sequences of one length, the training ones first, so any number of ranks divides each batch evenly."""

    items: list[Captured]

    def sequences(self, epoch: int, seed: int, rank: int = 0, world: int = 1) -> Iterator[Captured]:
        yield from sorted(self.items, key=lambda one: is_held_out(one.id, SHARE))[rank::world]


def rank(target: str, out: str, stop: int = 2, steps: int = 4) -> None:
    """Trains, is interrupted in the main process after `stop` steps, and resumes to the end."""
    torch.set_num_threads(1)
    source = Even(sequences(Checkpoint.open(target).plain("lm_head.weight"), [32] * 50))
    own: dict[str, Any] = {"steps_ahead": 2}
    sizes = DrafterSizes()
    if os.environ.get("DRAFTER") == "dspark":
        own = {}  # every token of an answer is an anchor, so that it does not matter which rank draws them
        sizes = DrafterSizes(kind="dspark", block_size=4, num_hidden_layers=1, mask_token_id=63, markov_rank=8)
    recipe = Recipe(
        budget=TrainBudget(steps=steps),
        tokens_per_batch=256,
        accumulate=2,
        max_length=32,
        pool=2,
        lr=3e-3,
        l2_sp=1e-4,
        held_out=SHARE,
        log_every=1,
        **own,
    )
    config = TrainConfig(target=target, out=out, capture="unread", recipe=recipe, drafter=sizes)
    training.write_curve = lambda path, log: None  # drawing takes longer than this training
    step = Trainer._step

    def stepping(self: Trainer, group: Any) -> Any:
        self.asked = self.step + 1 == stop and self.accelerator.is_main_process
        return step(self, group)

    Trainer._step = stepping
    assert train(config, source, (0, 2, 3), Console(quiet=True)) == 130
    Trainer._step = step
    assert train(config, source, (0, 2, 3), Console(quiet=True)) == 0


def fork(target: str, out: Path, kind: str) -> list[int]:
    """Starts the ranks; returns their process ids. Forked, to share imports, which take longer than training."""
    world, environment = KINDS[kind]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children: list[int] = []
    for number in range(world):
        child = os.fork()
        if child:
            children.append(child)
            continue
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world, "MASTER_PORT": port} if world > 1 else {}
        os.environ |= {key: str(value) for key, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true", **environment}
        try:
            rank(target, str(out / kind))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return children


if __name__ == "__main__":
    target, out, *kinds = sys.argv[1:]
    if not kinds:
        # accelerate expects DeepSpeed's ranks on accelerators only, unless a backend is given.
        accelerate.PartialState(backend="nccl" if torch.cuda.is_available() else "gloo")
        rank(target, out)
        accelerate.PartialState().destroy_process_group()
        raise SystemExit
    children = [child for kind in kinds for child in fork(target, Path(out), kind)]
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    raise SystemExit(len(failed))
