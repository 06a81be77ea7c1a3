"""Ranks that divide a prompt's rows compute for each row what one rank with all rows would."""

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor

from redline.kernels.cpu.all_reduce import SharedMemoryGroup
from redline.kernels.cuda.prefill import stream as streams
from redline.kernels.cuda.prefill.stream import CommunicatedRows, PromptStream
from redline.kernels.group import ALONE, Group
from redline.kernels.kernel import references
from redline.ops.add_norm import rms_norm
from tests.ranks_in_turn import Meeting
from tests.seeds import fresh_generator
from tests.waiting import LIMIT_S

HIDDEN = 128
EPS = 1e-5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "DIVIDED", 8)
    monkeypatch.setattr(streams, "PART_ROWS", 16)


def two_sublayers(residual_TD: Tensor, weights_RDD: Tensor, gammas: Tensor, group: Group) -> tuple[Tensor, ...]:
    """Run two sublayers, each with this rank's weight giving partial sums; -> the input of each, and the last
    residual.
    """
    tokens, weights = residual_TD.shape[0], weights_RDD[group.rank]
    stream = PromptStream.begin(tokens, lambda rows: residual_TD[rows].clone(), group)
    read: list[Tensor] = []
    with references():
        for gamma in gammas:
            x_TD, arriving = stream.gather(stream.normed(gamma, EPS))
            assert [row for rows in arriving for row in range(tokens)[rows]] == list(range(tokens))
            read.append(x_TD.clone())

            def partial(part: CommunicatedRows, x_TD: Tensor = x_TD) -> Tensor:
                return part.of(x_TD).float() @ weights

            stream = stream.adding(partial)
        stream = stream.added()
        return *read, stream.whole(part.residual for part in stream.parts)


def meant(residual_TD: Tensor, weights_RDD: Tensor, gammas: Tensor) -> tuple[Tensor, ...]:
    """What `two_sublayers` computes, for all rows and ranks at once."""
    read: list[Tensor] = []
    for gamma in gammas:
        read.append(rms_norm(residual_TD, gamma, EPS))
        residual_TD = residual_TD + read[-1] @ weights_RDD.sum(0)
    return *read, residual_TD


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [15, 16, 17, 31, 32, 45])
def test_of_any_number_of_rows_each_is_added_up_and_normed_once(ranks: int, tokens: int):
    g = fresh_generator()
    residual_TD, gammas = torch.randn(tokens, HIDDEN, generator=g), torch.rand(2, HIDDEN, generator=g) + 0.5
    weights_RDD = torch.randn(ranks, HIDDEN, HIDDEN, generator=g) * (ranks * HIDDEN) ** -0.5
    want = meant(residual_TD, weights_RDD, gammas)
    meeting = Meeting(ranks)
    got = meeting.run(lambda group: two_sublayers(residual_TD, weights_RDD, gammas, group))
    for other in got[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got[0], other, strict=True)), "the ranks' bits differ"
    for a, b in zip(got[0], want, strict=True):
        assert a.shape == b.shape
        assert (a.float() - b.float()).norm() < 1e-2 * b.float().norm()
    divided = "add rows" in meeting.said[0]
    assert divided == (ranks > 1 and tokens >= streams.DIVIDED * ranks)
    assert ("add" in meeting.said[0]) != divided


def test_a_part_is_begun_before_the_one_in_front_is_waited_for():
    """The ranks compute the second part while the first one is all-reduced and gathered."""

    def work(group: Group) -> None:
        stream = PromptStream.begin(32, lambda rows: torch.ones(rows.stop - rows.start, HIDDEN), group)
        stream = stream.adding(lambda part: torch.ones(part.evened, HIDDEN))
        with references():
            _, arriving = stream.gather(stream.normed(torch.ones(HIDDEN), EPS))
        assert [(rows.start, rows.stop) for rows in arriving] == [(0, 16), (16, 32)]

    meeting = Meeting(2)
    meeting.run(work)
    begun = ["add rows", "add rows", "add rows: end", "gather rows", "add rows: end", "gather rows"]
    assert meeting.said[0] == [*begun, "gather rows: end", "gather rows: end"]


def test_a_rank_keeps_its_own_rows_alone():
    def shapes(group: Group) -> list[tuple[int, int]]:
        stream = PromptStream.begin(45, lambda rows: torch.ones(rows.stop - rows.start, 2), group)
        return [(part.count, len(part.residual)) for part in stream.parts]

    assert Meeting(4).run(shapes) == [[(20, 5), (25, 7)]] * 4


def together(file: Path, ranks: int) -> Iterator[Group]:
    SharedMemoryGroup.create(file, ranks)
    for rank in range(ranks):
        yield SharedMemoryGroup(file, rank, ranks)


def test_a_cpus_ranks_add_and_gather_rows_too(tmp_path: Path):
    groups = list(together(tmp_path / "meet", 2))
    given = torch.randn(2, 6, 5, generator=fresh_generator())
    sums: dict[int, Tensor] = {}
    wholes = [torch.zeros(6, 5) for _ in groups]

    def rank(group: Group) -> None:
        sums[group.rank] = own = group.begin_reduce_scatter(given[group.rank])()
        group.begin_all_gather_rows(own, wholes[group.rank])()

    threads = [Thread(target=rank, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    want = given.sum(0)
    assert torch.equal(torch.cat([sums[0], sums[1]]), want)
    assert all(torch.equal(whole, want) for whole in wholes)


def test_one_rank_alone_has_all_rows():
    given, whole = torch.randn(3, 4, generator=fresh_generator()), torch.zeros(3, 4)
    assert ALONE.begin_reduce_scatter(given)() is given
    ALONE.begin_all_gather_rows(given, whole)()
    assert torch.equal(whole, given)
