"""Cached blocks of each worker on a trace, compared with a plain list for each worker."""

import random

from redline.simulate.caches import Caches
from tests.seeds import fresh_seed


def test_how_far_a_prompt_is_cached_is_what_a_list_for_each_worker_says():
    draw = random.Random(fresh_seed())
    caches, lists = Caches(5, 12), [list[int]() for _ in range(5)]  # newest last
    for _ in range(400):
        start = draw.randrange(4)
        prompt = [100 * start + place for place in range(draw.randrange(1, 8))]
        found = dict.fromkeys(range(5), 0)
        for depth in caches.depths(prompt):
            for worker in range(5):
                if depth.workers >> worker & 1:
                    found[worker] = depth.blocks
        for worker, own in enumerate(lists):
            expected = next((place for place, block in enumerate(prompt) if block not in own), len(prompt))
            assert found[worker] == expected
        worker, most = draw.randrange(5), draw.randrange(4, 13)
        caches.use(worker, prompt, most)
        own = [block for block in lists[worker] if block not in prompt] + list(reversed(prompt))
        lists[worker] = own[-most:]
        assert caches.kept(worker) == len(lists[worker])
        caches.check()


def test_of_a_prompt_the_last_block_goes_first():
    caches = Caches(1, 3)
    caches.use(0, [1, 2, 3, 4, 5], 3)
    assert [(depth.blocks, depth.workers) for depth in caches.depths([1, 2, 3, 4, 5])] == [(3, 1)]
