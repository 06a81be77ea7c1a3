"""The ranks of `test_cuda_all_reduce.py`, one process each: launches kernels of several ranks and checks their
results.

usage: ranks_program.py FILE RANKS ROUNDS      FILE holds the inboxes of all ranks. Prints a line for each rank.
       ranks_program.py FILE RANKS absent      The last rank never arrives: prints the rank that each of the others
names, a line for each.

The ranks are forked, so that modules are imported once.
"""

import contextlib
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from redline.kernels.cuda.collectives.all_gather import all_gather, all_gather_queries
from redline.kernels.cuda.collectives.all_reduce import AllReduceArgs, all_reduce
from redline.kernels.cuda.collectives.rank_links import ATTENTION, MOST_TOKENS, RankLinks, Rooms, new_control
from redline.kernels.cuda.collectives.share_latents import share_latents
from redline.kernels.cuda.decode.dense import random_x
from redline.kernels.cuda.decode.experts_down import ExpertsDownArgs, experts_down
from redline.kernels.cuda.decode.experts_up import encode_h, some_pairs
from redline.kernels.cuda.decode.project_a import ProjectAArgs, project_a
from redline.kernels.cuda.decode.project_out import ProjectOutArgs, project_out
from redline.kernels.cuda.layouts.records import Records, Slabs, random_experts
from redline.kernels.cuda.layouts.tiled import Tiled
from tests.emulator.emulator import emulation

HIDDEN, INPUTS, WIDTH, EXPERTS, CHOSEN = 128, 256, 128, 3, 2
COLUMNS, ROWS = 60, 5  # columns and rows of an all-gather
QUERY_RANK, KV = 40, 24  # output widths of `project_a`
HEADS, RANK, ROPE = 2, 256, 64  # heads of one rank; widths of latent and rotary parts
ROOMS = Rooms(
    sums=HIDDEN * MOST_TOKENS,
    gathered=ROWS * COLUMNS,
    queries=8 * HEADS * (RANK + ROPE) // 2,
    latents=8 * HEADS * (RANK // 2 + 1),
    projected=8 * (QUERY_RANK + KV),
)


def links_of(file: Path, rank: int, ranks: int, seconds: float) -> RankLinks:
    """One rank's links over inboxes in a file that all ranks map."""
    words = ranks * ROOMS.words
    inboxes = torch.from_file(str(file), shared=True, size=ranks * words, dtype=torch.int32)
    at = tuple(inboxes.data_ptr() + 4 * words * other for other in range(ranks))
    control, turns = new_control(seconds, pinned=False), torch.zeros(2, dtype=torch.int32)
    links = RankLinks(rank, ranks, at, control, turns, ROOMS, projection="divided")
    _mapped.append(inboxes)
    return links


_mapped: list[Tensor] = []  # kept referenced for the life of the process


def near(got: Tensor, want: Tensor) -> None:
    assert not got.isnan().any(), "NaN"
    error = (got.double() - want.double()).abs().max() / want.double().abs().max()
    assert error < 1e-2 if got.dtype == torch.bfloat16 else error < 1e-4, f"{error:.2e}"


def generator(round_: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * round_ + rank)


def projected(round_: int, tokens: int, links: RankLinks) -> tuple[Tensor, ...]:
    """Run `project_a` with its input columns split over the ranks; -> the outputs as every rank sees them."""
    g = generator(round_, 99)
    inputs = 128 * links.ranks * (1 + round_ % 2)
    weight = Tiled.prepare((torch.randn(QUERY_RANK + KV, inputs, generator=g) * inputs**-0.5).bfloat16())
    x, squares = random_x(g, tokens, inputs)
    given = x, squares, weight, torch.rand(QUERY_RANK, generator=g) + 0.5, 1e-5
    got = q_a, q_squares, kv = project_a(*given, links)
    want = project_a.op.reference(ProjectAArgs(*given))
    near(q_a, want[0])
    near(q_squares.sum(0)[:tokens], want[1].sum(0)[:tokens])
    near(kv, want[2])
    return got


def attention(round_: int, tokens: int, links: RankLinks) -> Tensor:
    """Run `project_out` on this rank's inputs; -> the residual after the all-reduce."""
    shared = generator(round_, 99)
    residual, gamma = torch.randn(tokens, HIDDEN, generator=shared), torch.rand(HIDDEN, generator=shared) + 0.5

    def part(rank: int) -> tuple[Tensor, Tiled]:
        g = generator(round_, rank)
        weight = torch.randn(HIDDEN, INPUTS, generator=g) * INPUTS**-0.5
        return torch.randn(tokens, INPUTS, generator=g).bfloat16(), Tiled.prepare(weight.bfloat16())

    got, x, squares = project_out(*part(links.rank), residual, gamma, None, links, ATTENTION)
    want = residual
    for rank in range(links.ranks):
        want = project_out.op.reference(ProjectOutArgs(*part(rank), want, gamma))[0]
    near(got, want)
    near(x, want * gamma)
    near(squares.sum(0)[:tokens], want.square().sum(1))
    return got


def experts(round_: int, tokens: int, links: RankLinks) -> Tensor:
    """Run `experts_down` on this rank's part of every expert's width; -> the residual after the all-reduce."""
    shared = generator(round_, 99)
    residual, gamma = torch.randn(tokens, HIDDEN, generator=shared), torch.rand(HIDDEN, generator=shared) + 0.5
    pairs = some_pairs(shared, tokens, EXPERTS, CHOSEN)

    def part(rank: int) -> tuple[Tensor, Records, Tensor, Slabs]:
        g = generator(round_, rank)
        records = Records.prepare("down", random_experts(g, "INT4", "down", EXPERTS, HIDDEN, WIDTH))
        h = encode_h(torch.randn(len(pairs), WIDTH, generator=g), records.form.width, "INT4")
        down = Slabs.prepare((torch.randn(HIDDEN, WIDTH, generator=g) * WIDTH**-0.5).bfloat16())
        return h, records, torch.randn(tokens, WIDTH, generator=g).bfloat16(), down

    h, records, shared_h, down = part(links.rank)
    got, x, squares = experts_down(h, pairs, records, shared_h, down, residual, gamma, links)
    want = residual
    for rank in range(links.ranks):
        h, records, shared_h, down = part(rank)
        want = experts_down.op.reference(ExpertsDownArgs(h, pairs, records, shared_h, down, want, gamma))[0]
    near(got, want)
    near(x, want * gamma)
    near(squares.sum(0)[:tokens], want.square().sum(1))
    return got


def sums(round_: int, tokens: int, links: RankLinks) -> Tensor:
    """Run `all_reduce` on inputs that contain minus zeros; -> the residual after the all-reduce."""
    shared = generator(round_, 99)
    residual, gamma = torch.randn(tokens, HIDDEN, generator=shared), torch.rand(HIDDEN, generator=shared) + 0.5

    def part(rank: int) -> tuple[Tensor, Tensor]:
        both = torch.randn(2, tokens, HIDDEN, generator=generator(round_, rank))
        both[:, :, ::3] = -0.0
        return both[0], both[1]

    partial, routed = part(links.rank)
    got, x, squares = all_reduce(partial, residual, gamma, routed, links, ATTENTION)
    want = residual
    for rank in range(links.ranks):
        partial, routed = part(rank)
        want = all_reduce.op.reference(AllReduceArgs(partial, want, gamma, routed))[0]
    near(got, want)
    near(x, want * gamma)
    near(squares.sum(0)[:tokens], want.square().sum(1))
    return got


def gathered(round_: int, links: RankLinks) -> None:
    parts = [torch.randn(ROWS, COLUMNS, generator=generator(round_, rank)) for rank in range(links.ranks)]
    assert torch.equal(all_gather(parts[links.rank], links), torch.cat(parts, 1))


def queries(round_: int, tokens: int, links: RankLinks) -> None:
    """Run `all_gather_queries` on pairs that hold zeros of both signs in every place."""

    def part(rank: int) -> Tensor:
        g = generator(round_, rank)
        signs = torch.randint(-1, 2, (tokens, HEADS, RANK + ROPE), generator=g)
        return (torch.randn(signs.shape, generator=g) * signs).bfloat16()

    parts = [part(rank) for rank in range(links.ranks)]
    assert torch.equal(all_gather_queries(parts[links.rank], links), torch.cat(parts, 1))


def latents(round_: int, tokens: int, splits: int, links: RankLinks) -> None:
    """Run `share_latents` on parts in which some or all splits are empty; empty splits have NaN latents."""

    def part(rank: int) -> tuple[Tensor, Tensor]:
        g = generator(round_, rank)
        heads = HEADS * links.ranks
        lse = torch.randn(tokens, heads, splits, generator=g) * 3
        held = torch.randint(0, splits + 1, (tokens, 1, 1), generator=g)
        lse = lse.where(torch.arange(splits) < held, -torch.inf)
        partial = torch.randn(tokens, heads, splits, RANK, generator=g).bfloat16()
        return partial.masked_fill(lse[..., None] == -torch.inf, torch.nan), lse

    got, lse = share_latents(*part(links.rank), links)
    own = slice(HEADS * links.rank, HEADS * (links.rank + 1))
    for rank in range(links.ranks):
        partial, part_lse = (x[:, own] for x in part(rank))
        torch.testing.assert_close(lse[:, :, rank], part_lse.logsumexp(-1), atol=1e-4, rtol=1e-5)
        shares = part_lse.softmax(-1).nan_to_num(0.0)
        want = torch.einsum("qhs,qhsr->qhr", shares, partial.float().nan_to_num(0.0))
        near(got[:, :, rank], want)


@contextlib.contextmanager
def in_step(file: Path, rank: int, ranks: int) -> Iterator[None]:
    """Within this context the emulated clock advances while all ranks that have not ended poll it (`emulate.cpp`)."""
    looks = file.with_name("looks")
    os.environ["REDLINE_EMULATED_LOOKS"] = f"{looks}:{rank}:{ranks}"
    try:
        yield
    finally:
        with looks.open("r+b") as counts:
            counts.seek(8 * rank)
            counts.write((1 << 62).to_bytes(8, "little"))


def of_rank(file: Path, rank: int, ranks: int, rounds: int) -> str:
    """A rank's output line: a sum over the bits of its results, and the rank that kept it waiting too long, or 0."""
    pace = random.Random(rank)
    links = links_of(file, rank, ranks, seconds=60)
    hashes: list[int] = []
    with in_step(file, rank, ranks), emulation():
        for round_ in range(rounds):
            tokens = (1, 8, 3, 12)[round_ % 4]
            for _ in range(pace.choice((0, 0, 10, 1000))):
                os.sched_yield()
            few = min(tokens, 8)
            hashes += [hash(got.view(torch.uint8).numpy().tobytes()) for got in projected(round_, few, links)]
            if round_ % 2:  # contexts are divided: two exchanges before the sums
                queries(3 * round_, few, links)
                latents(3 * round_, few, (3, 19, 8, 9)[round_ // 2 % 4], links)
            # With twelve tokens the experts' all-reduce takes two shots; attention's takes two, or one as a launch of
            # its own.
            first = sums if tokens > few or round_ % 3 == 2 else attention
            once = links if tokens == few or round_ % 8 > 3 else replace(links, shots=2)
            then = links if tokens == few else replace(links, shots=2)
            for got in (first(3 * round_, tokens, once), experts(3 * round_ + 1, tokens, then)):
                hashes.append(hash(got.numpy().tobytes()))
            for again in range(round_ % 3):  # two launches back to back
                gathered(3 * round_ + again, links)
    return f"{sum(value % 2**40 for value in hashes)} {int(links.control[1])}"


def without_the_last(file: Path, rank: int, ranks: int) -> str:
    """The rank named by one that waits for parts, the rank named by one that waits for sums of an owner that waits
    itself, and whether all results are NaN.
    """
    links = replace(links_of(file, rank, ranks, seconds=0.05), shots=2)
    x = torch.randn(ranks, HIDDEN)  # one token per owner
    with in_step(file, rank, ranks - 1), emulation():
        got, *_ = all_reduce(x, x, x[0], None, links, ATTENTION)
    return f"{int(links.control[1]) - 1} {bool(got.isnan().all())}"


def main() -> None:
    file, ranks, rounds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    file.with_name("looks").write_bytes(bytes(8 * ranks))
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("fork")) as pool:
        if rounds == "absent":
            results = [pool.submit(without_the_last, file, rank, ranks) for rank in range(ranks - 1)]
        else:
            results = [pool.submit(of_rank, file, rank, ranks, int(rounds)) for rank in range(ranks)]
        for result in results:
            print(result.result())


if __name__ == "__main__":
    main()
