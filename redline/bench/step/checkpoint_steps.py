"""Milliseconds of a decode step, compared with the least time for its bytes and operations on this machine.

Drives the runner directly: each step is launched and awaited, over contexts of random tokens written by a prefill. The
figure is therefore the step alone, without scheduler, HTTP or launch-ahead.
"""

import random
import statistics
from collections.abc import Callable, Iterator, Sequence

from redline import clock
from redline.messages.base import Record
from redline.messages.job import PAGE_TOKENS, PageId, Sampling
from redline.messages.step import Begin, Row, Step
from redline.ops.op import Cost, PeakRates
from redline.run.runner import Runner

_GREEDY = Sampling(max_tokens=1 << 20, temperature=0)
CHUNK = 512


class DecodeCase(Record, frozen=True):
    """A step of `batch` rows with `context` tokens each.

    ms: the median of the timed steps, with p10 and p90 in their own fields.
    """

    batch: int
    context: int
    ms: float
    p10_ms: float
    p90_ms: float
    floor_ms: float

    @property
    def ratio(self) -> float:
        """Floor over time: 1 is the limit."""
        return self.floor_ms / self.ms


def step_cost(runner: Runner, batch: int, context: int) -> Cost:
    """The bytes and operations of a step of `batch` rows, each with `context` tokens before it.

    Bytes are the weights that the step reads (each expert once; their number is the mean of independent routing) and
    the latent KV of every row; operations are multiplications and additions.
    """
    config = runner.model.config
    chosen = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** batch
    routed_bytes = config.routed_parameters * config.bits_per_routed_parameter / 8
    dense = config.dense_parameters - config.vocab_size * config.hidden_size  # the embedding is a gather
    kv = batch * context * config.kv_width * runner.kv.planes.element_size() * config.num_hidden_layers
    per_context = 2 * config.num_attention_heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim)
    attention = batch * context * per_context * config.num_hidden_layers
    active = config.active_parameters - config.vocab_size * config.hidden_size
    return Cost(round(2 * dense + chosen * routed_bytes + kv), 2 * batch * active + attention)


def bench_decode(
    runner: Runner,
    machine: PeakRates,
    batches: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Iterator[DecodeCase]:
    """Yields a DecodeCase per batch and context. The runner must be idle, with KV cache for batch x context tokens.

    progress: called with (tokens computed, total tokens), prefills included.
    """
    done, total = 0, sum(batch * (context + repeats + 8) for context in contexts for batch in batches)
    generator = random.Random(0)
    number = 0
    for context in contexts:
        for batch in batches:
            pages_each = -(-(context + repeats + 8) // PAGE_TOKENS)
            for slot in range(batch):
                ids = tuple(generator.randrange(runner.model.config.vocab_size) for _ in range(context))
                pages = tuple(PageId(slot * pages_each + i) for i in range(pages_each))
                begin = Begin(
                    slot=slot, tokens=ids, prompt=context, pages=(), sampling=_GREEDY, limit=context + repeats + 9
                )
                for start in range(0, context, CHUNK):
                    count = min(CHUNK, context - start)
                    first = start == 0
                    row = Row(slot=slot, start=start, count=count, new_pages=pages if first else (), samples=False)
                    runner.launch(Step(number=number, begins=(begin,) if first else (), rows=(row,))).wait()
                    number += 1
                    done += count
                    progress(done, total)
            times: list[float] = []
            for i in range(repeats + 8):
                rows = tuple(Row(slot=slot, start=context + i, count=1) for slot in range(batch))
                start_s = clock.perf_counter()
                runner.launch(Step(number=number, rows=rows)).wait()
                times.append((clock.perf_counter() - start_s) * 1e3)
                number += 1
                done += batch
                progress(done, total)
            times = sorted(times[8:])
            floor = step_cost(runner, batch, context).seconds(machine) * 1e3
            yield DecodeCase(
                batch=batch,
                context=context,
                ms=statistics.median(times),
                p10_ms=times[len(times) // 10],
                p90_ms=times[len(times) * 9 // 10],
                floor_ms=floor,
            )
