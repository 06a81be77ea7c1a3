"""Values beyond the range of e4m3 become its largest number, of either sign, in every part of a page's row."""

import copy

import pytest
import torch

from redline.kernels.cuda.decode.project_q import project_q
from tests.emulator.emulator import emulation

KV, GAMMA, ROWS, PLANE = 4, 5, 8, 9  # indices of project_q's arguments
LARGEST = 448.0


@pytest.mark.parametrize("tokens", [8, 9], ids=["CUDA", "Triton"])
def test_a_pages_row_saturates(tokens: int):
    case = next(case for case in project_q.op.cases() if case.name == f"T={tokens} nano e4m3 pages")
    args = list(case.make(torch.Generator().manual_seed(2)))
    args[KV] *= 1000
    args[GAMMA] *= 1000
    theirs = copy.deepcopy(args)
    with emulation():
        project_q.run(project_q.op.args(*args))
    project_q.op.reference(project_q.op.args(*theirs))
    ours, wanted = (given[PLANE].view(-1, given[PLANE].shape[-1])[given[ROWS]].float() for given in (args, theirs))
    rank = args[GAMMA].shape[0]
    evens, odds = (torch.arange(rank + place, wanted.shape[1], 2) for place in (0, 1))
    for part in (torch.arange(rank), evens, odds):
        for largest in (LARGEST, -LARGEST):
            assert ((wanted == largest)[:, part].sum(1) > 2).all(), "each token needs saturated values"
            assert torch.equal((ours == largest)[:, part], (wanted == largest)[:, part])
