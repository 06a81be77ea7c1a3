"""The ranks of `test_gpu_drafter_ranks.py`, one process each: drafters divided over ranks, with emulated kernels.

usage: ranks_program.py FOLDER

FOLDER/states.pt has the drafters' weights, FOLDER/inboxes-N the inboxes of N ranks; FOLDER/RANK.pt gets the results.
"""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is decorated
    from tests import triton_bf16

    triton_bf16.mend()

from redline.kernels.cpu.blocks.draft_pass import DraftRows
from redline.kernels.cuda.collectives.all_gather import all_gather
from redline.kernels.cuda.collectives.rank_links import MOST_TOKENS, RankLinks, new_control
from redline.kernels.cuda.layouts.tiled import Tiled
from redline.kernels.cuda.triton import dense, linear
from redline.kernels.group import ALONE, Alone, Group
from redline.kernels.kernel import fallbacks
from redline.messages.job import PAGE_TOKENS
from redline.model.block import cuda as block_cuda
from redline.model.block.config import BlockConfig
from redline.model.block.cuda import GpuServedBlock
from redline.model.block.serve import BlockRows
from redline.model.eagle3 import cuda
from redline.model.eagle3.config import Eagle3Config
from redline.model.eagle3.cuda import GpuServed
from redline.model.k2.shard import Shard, rooms_of
from redline.model.k2.write import tiny_config
from tests.emulator.emulator import emulation

HIDDEN, WIDTH = 96, 64
TARGET = tiny_config(
    hidden_size=HIDDEN,
    num_attention_heads=4,
    q_lora_rank=64,
    kv_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=WIDTH,
    vocab_size=160,
)
CONFIGS: dict[str, Eagle3Config | BlockConfig] = {
    "latent": Eagle3Config.for_target(TARGET, draft_vocab_size=None, norm_output=False),
    "grouped": Eagle3Config.for_target(
        TARGET, architecture="llama", num_attention_heads=8, num_key_value_heads=4, head_dim=32, draft_vocab_size=48
    ),
    "block": BlockConfig.for_target(
        TARGET, layer_ids=(1, 2), mask_token_id=9, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, markov_rank=64, block_size=3, draft_vocab_size=48,
    ),
}  # fmt: skip
FEW = DraftRows([1, 0, 0, 1], [5, 70, 71, 6], [3, 1, 2])
MORE = DraftRows([1, 0, 0], [7, 72, 73], [0, 1, 2], [9, 150, 0])
MANY = DraftRows([0] * 8 + [1] * 4, [*range(70, 78), *range(5, 9)], [11, 0, 1, 2, 3, 7, 8, 9, 10])
TWO = DraftRows([1, 1], [5, 6], [1])
PASSES = {  # by drafter and ranks; Triton's interpreter is slow for rows of the second drafter
    ("latent", 2): (FEW, MORE),
    ("latent", 4): (MANY, FEW, MORE),
    ("grouped", 2): (TWO, TWO),
    ("grouped", 4): (TWO, TWO),
    ("block", 2): (TWO,),
    ("block", 4): (TWO,),
}


class Result(NamedTuple):
    """The results of a drafter's passes: (normed, fed, logits) of each, for a block its states twice; and its pages."""

    passes: list[tuple[Tensor, Tensor, Tensor]]
    plane: Tensor


class Ranks(Alone):
    """A group over inboxes in a file that all ranks map. seconds: of the emulated clock, which advances with each read
    of it.
    """

    def __init__(self, file: Path, rank: int, ranks: int, seconds: float = 1e6) -> None:
        self.rank, self.ranks, rooms = rank, ranks, rooms_of(TARGET, ranks)
        words = ranks * rooms.words
        self._mapped = torch.from_file(str(file), shared=True, size=ranks * words, dtype=torch.int32)
        at = tuple(self._mapped.data_ptr() + 4 * words * other for other in range(ranks))
        turns = torch.zeros(2, dtype=torch.int32)
        self.links = RankLinks(rank, ranks, at, new_control(seconds, pinned=False), turns, rooms)

    def all_gather(self, part_RV: Tensor) -> Tensor:
        """As `GpuGroup.gather`."""
        return all_gather(part_RV, self.links)


def served(
    config: Eagle3Config | BlockConfig, state: Mapping[str, Tensor], group: Group = ALONE
) -> GpuServed | GpuServedBlock:
    """This rank's part of the drafter, and of its target's head."""
    embedding, head = torch.randn(2, TARGET.vocab_size, HIDDEN, generator=torch.Generator().manual_seed(7))
    own = Tiled.prepare(Shard(group.rank, group.ranks).rows(head).to(torch.bfloat16))
    if isinstance(config, BlockConfig):
        return GpuServedBlock(config, state, embedding.to(torch.bfloat16), own, torch.arange(48), group)
    return GpuServed(config, state, embedding.to(torch.bfloat16), own, 16, group)


def computed(drafter: GpuServed | GpuServedBlock, width: int, given: Sequence[DraftRows]) -> Result:
    """Runs the passes in sequence. width: of a page's row."""
    g = torch.Generator().manual_seed(5)
    tokens = torch.randint(TARGET.vocab_size, (2, 2 * PAGE_TOKENS), generator=g)
    tables = torch.randperm(4, generator=g).to(torch.int32).view(2, 2)
    spare = isinstance(drafter, GpuServedBlock)
    plane = torch.randn(4 + spare, PAGE_TOKENS, width, generator=g).to(torch.bfloat16)
    passes: list[tuple[Tensor, Tensor, Tensor]] = []
    before = fallbacks.copy()
    with emulation(), torch.inference_mode():
        for rows in given:
            if isinstance(drafter, GpuServedBlock):
                passes.append(_block(drafter, tables, plane))
                continue
            feature = torch.randn(len(rows.slots), HIDDEN, generator=g).to(torch.bfloat16)
            normed, fed = drafter.read(feature, drafter.pages(tokens, tables), rows, plane)
            passes.append((normed.clone(), fed.clone(), drafter.logits(normed)))
    assert fallbacks == before, "an op fell back to its reference"
    return Result(passes, plane)


def _block(drafter: GpuServedBlock, tables: Tensor, plane: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two blocks, the second of which has one used position."""
    blocks = BlockRows(torch.tensor([3, 150]), torch.tensor([70, 5]), torch.tensor([3, 1]), tables, 70, 4)
    states = drafter.states(blocks, plane)
    states = torch.cat([states[0], states[1, :1]])
    return states, states, drafter.biased(drafter.logits(states), torch.tensor([3, 8, 9, 150]))


def run(folder: Path, rank: int) -> None:
    """All passes in which this rank takes part."""
    states, results = torch.load(folder / "states.pt"), {}
    groups = {ranks: Ranks(folder / f"inboxes-{ranks}", rank, ranks) for ranks in (2, 4) if rank < ranks}
    for (name, ranks), given in PASSES.items():
        if ranks in groups:
            # with two ranks, rows are processed in several parts
            cuda.MOST_TOKENS_OF_RANKS = 2 if ranks == 2 else MOST_TOKENS
            block_cuda.MOST_TOKENS_OF_RANKS = 3 if ranks == 2 else MOST_TOKENS
            drafter = served(CONFIGS[name], states[name], groups[ranks])
            results[name, ranks] = tuple(computed(drafter, CONFIGS[name].kv_width, given))
    for group in groups.values():
        assert not group.links.control[1], "a rank gave up waiting"
    torch.save(results, folder / f"{rank}.pt")


def main() -> None:
    torch.set_num_threads(1)
    for module in (linear, dense):
        # Triton's interpreter is as slow for a small program as for a large one
        module.block_rows = lambda *_: 256
    folder, started = Path(sys.argv[1]), []
    # forked before any computation, so there is one thread to copy; the import of torch takes most of the time
    for rank in range(4):
        started.append(os.fork())
        if not started[-1]:
            with contextlib.ExitStack() as end:
                end.callback(os._exit, 1)
                run(folder, rank)
                end.pop_all()
            os._exit(0)
    ended = [os.waitpid(process, 0)[1] for process in started]
    sys.exit(int(any(ended)))


if __name__ == "__main__":
    main()
