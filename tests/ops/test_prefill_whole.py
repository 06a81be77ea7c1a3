"""First chunks of several slots, computed together = computed one by one."""

import torch

from redline.messages.job import PAGE_TOKENS
from redline.ops.mla import NANO, mla_prefill, prefill_whole, random_weights


def test_chunks_together_are_the_chunks_one_by_one():
    g = torch.Generator().manual_seed(1)
    w = random_weights(g, *NANO)
    counts = (1, 70, 64, 3, 129, 65, 80, 90)  # five of similar lengths, so that padding rows are needed
    pages = sum(-(-count // PAGE_TOKENS) for count in counts)
    plane = torch.randn(pages, PAGE_TOKENS, w.rank + w.rope, generator=g)
    order = torch.randperm(pages, generator=g).to(torch.int32)
    q = torch.randn(sum(counts) + 2, w.heads, w.nope + w.rope, generator=g)  # two tokens belong to no chunk
    expected, found = torch.full((2, len(q), w.heads, w.value), 7.0)
    spans: list[tuple[int, int]] = []
    rows = torch.zeros(len(q), dtype=torch.int64)
    first, page = 1, 0
    for count in counts:
        table = order[page : page + -(-count // PAGE_TOKENS)]
        page += len(table)
        place = torch.arange(count)
        rows[first : first + count] = table[place // PAGE_TOKENS].long() * PAGE_TOKENS + place % PAGE_TOKENS
        mla_prefill.reference(
            mla_prefill.args(q[first : first + count], w, 0.1, 0, table, plane, expected[first : first + count])
        )
        spans.append((first, count))
        first += count
    prefill_whole(q, w, 0.1, spans, rows, plane, found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
