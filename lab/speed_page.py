"""docs/speed.md from benchmarks/results/decode-*.json, which `redline bench decode --shape ... --save FILE` writes.

    python -m lab.speed_page

If a case was measured more than once, the page has the last result; git has the history.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from redline.bench.step.depth_record import PEER, PEER_DATE, PEER_MS, DepthRecord, OpRecord, read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "speed.md"

HEAD = """# Speed: a decode step at its true depth

Made by `python -m lab.speed_page` from `benchmarks/results/decode-*.json`; a test holds the two
together.

    redline bench decode --shape kimi-k2.6 --layers 61 --alias 12 --batch 1 --batch 4 --save FILE
    redline bench decode --shape kimi-k2.6 --layers 61 --alias 12 --tokens 4 --routing correlated --save FILE

**The step** is all layers, embedding and head, on random weights in the layouts that serving uses. Kimi K2.6 as a whole
is 594 GB. With aliased layers the step still goes through all 61, but several of them are one in memory; its weights
are out of the L2 cache long before they are read again. Layers without experts, and the KV pages of every layer, are
not shared.

**Routing** is forced and drawn for each step, because random weights would send all tokens to a few experts. `uniform`:
without replacement, each token independent of the others. `correlated W`: each expert of a row's token is kept for the
row's next token with probability W, as if drafts were verified; rows are independent. `model`: the model routes (CPU).

**Times.** A step: CUDA graphs, launched ahead, the median of the timed steps, with p10 to p90. An op: at least 24
launches in a graph over the layers in memory in turn, so that weights are read from memory. Small inputs (activations,
KV pages of short contexts) are in the L2 cache there, unlike in a step.

**Floors** are the larger of bytes over the bandwidth and operations over the rate, both measured on that machine in the
same run. A step's floor counts, from the model's sizes alone, every weight once, each distinct chosen expert once, and
each row's context once. An op's floor adds its activations. `weights alone` is the floor of the step's weights at 4.3
TB/s (two GPUs 4.5) with the number of experts that uniform routing chooses on average: the fixed measure of an NVIDIA
H200. On several GPUs every weight counts once over all of them, since commit d5e5fe1 also the projection into
attention.

An NVIDIA H200 that reads its memory at the full rate takes about 650 of its 700 W. The experts' arithmetic takes the
rest and more, so in long runs the power limit lowers the clock from 1.98 to about 1.5 GHz, and the experts reach 0.88
of their floor (measured 2026-11-29, [log](log.md)).

![One layer of four GPUs: each launch with its floor](../benchmarks/results/layer-four-h100.png)
"""


def page(records: Sequence[DepthRecord]) -> str:
    """The whole text of the page. records: in the order of measurement; of equal cases the last counts."""
    if not records:
        return f"{HEAD}\nNo step has been measured on a GPU yet: this page has no figures.\n"
    groups = [list(group) for _, group in groupby(sorted(_latest(records), key=_order), key=_group)]
    return "\n".join([HEAD, *(line for group in groups for line in _section(group)), *_peer()])


def _latest(records: Iterable[DepthRecord]) -> list[DepthRecord]:
    return list({(_group(record), _case(record)): record for record in records}.values())


def _group(record: DepthRecord) -> tuple[object, ...]:
    r = record
    return r.shape, r.gpu, r.ranks, -r.layers, -r.physical_layers, -r.experts, r.context, r.kv_dtype, r.routing


def _case(record: DepthRecord) -> tuple[int, int, int]:
    return record.tokens, record.tokens_per_row, record.rows


def _order(record: DepthRecord) -> tuple[object, ...]:
    return _group(record), _case(record)


def _section(group: Sequence[DepthRecord]) -> Iterator[str]:
    """All cases that differ only in rows and tokens."""
    one = group[0]
    whole = "" if one.physical_layers == one.layers else f", {one.physical_layers} of them in memory"
    ranks = "" if one.ranks == 1 else f"{one.ranks} x "
    yield f"## {one.shape}, {ranks}{one.gpu}, context {one.context:,}, {one.kv_dtype} pages, routing {one.routing}\n"
    yield f"{one.layers} layers{whole}; {one.experts} experts a layer.\n"
    yield from _table(["", *map(_title, group)], _step_rows(group))
    if all(record.ops for record in group):
        yield "Each op: us of a launch / floor (floor over time).\n"
        yield from _table(["op", "launches", *map(_title, group)], _op_rows(group))
    else:
        yield "Its ops were not timed one by one.\n"
    yield from _origins(group)


def _step_rows(group: Sequence[DepthRecord]) -> Iterator[list[str]]:
    def row(name: str, value: Callable[[DepthRecord], str]) -> list[str]:
        return [name, *map(value, group)]

    yield row("step, ms", lambda r: f"**{r.ms:.2f}**")
    yield row("p10 to p90", lambda r: f"{r.p10_ms:.2f} to {r.p90_ms:.2f}")
    yield row("floor, ms", lambda r: f"{r.floor_ms:.2f}")
    yield row("floor over time", lambda r: f"{r.floor_ms / r.ms:.0%}")
    yield row("tokens/s", lambda r: f"{1e3 * r.tokens / r.ms:,.0f}")
    yield row("experts read, GB", lambda r: f"{r.expert_bytes / 1e9:.2f}")
    if any(record.peer_ms for record in group):
        yield row(f"{PEER}, ms", lambda r: f"{r.peer_ms:g}" if r.peer_ms else "")
        yield row("vLLM's time over ours", lambda r: f"{r.peer_ms / r.ms:.2f}" if r.peer_ms else "")


def _op_rows(group: Sequence[DepthRecord]) -> Iterator[list[str]]:
    ops = [{op.name: op for op in record.ops} for record in group]
    for name, launches in dict.fromkeys((op.name, op.launches) for record in group for op in record.ops):
        found = [by_name.get(name) for by_name in ops]
        cells = [_op_cell(op) if op is not None and op.launches == launches else "" for op in found]
        yield [name, str(launches), *cells]
    yield ["sum of ops, ms", "", *(_sum_cell(record) for record in group)]
    yield ["step measured, ms", "", *(f"{record.ms:.2f}" for record in group)]
    yield ["sum over step", "", *(f"{record.ops_ms / record.ms:.2f}" for record in group)]


def _op_cell(op: OpRecord) -> str:
    return f"{op.us / op.launches:.1f} / {op.floor_us / op.launches:.1f} ({op.floor_us / op.us:.0%})"


def _sum_cell(record: DepthRecord) -> str:
    floor_ms = sum(op.floor_us for op in record.ops) / 1e3
    return f"{record.ops_ms:.2f} / {floor_ms:.2f} ({floor_ms / record.ops_ms:.0%})"


def _title(record: DepthRecord) -> str:
    return f"{record.rows} x {record.tokens_per_row}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'--:|' * (len(head) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def _origins(group: Sequence[DepthRecord]) -> Iterator[str]:
    """Machine, versions, commit and date, once for all cases that share them."""
    yield "Cases are rows x tokens of each.\n"
    for origin in dict.fromkeys(map(_origin, group)):
        cases = [_title(record) for record in group if _origin(record) == origin]
        yield f"- {', '.join(cases)}: {origin}"
    yield ""


def _origin(record: DepthRecord) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    rates = f"{record.bytes_per_s / 1e12:.2f} TB/s, {record.flops_per_s / 1e12:.0f} TFLOP/s"
    return f"{record.gpu} ({rates} measured), {versions}, commit {record.commit}, {record.date} UTC"


def _peer_steps(ranks: int) -> str:
    return ", ".join(f"{tokens} tokens {ms:g} ms" for (of, tokens), ms in PEER_MS.items() if of == ranks)


def _peer() -> list[str]:
    return [
        "## The peer\n",
        f"{PEER} on NVIDIA H200s, {PEER_DATE} (Humming experts, FlashAttention-3 MLA, CUDA graphs), Kimi K2's sizes,",
        "INT4, random weights with a router made to spread, context 1,024. Measured at 5 and 9 layers (two GPUs: 9 and",
        f"13) and carried to 61 by the slope: {_peer_steps(1)} on one GPU, {_peer_steps(2)} on two.",
        "Our cases of as many tokens on the same chip have it in their tables.\n",
    ]


def main() -> None:
    """Writes docs/speed.md. Raises ConfigError if a file of results has another format."""
    files = sorted(RESULTS.glob("decode-*.json"))
    PAGE.write_text(page([record for path in files for record in read(path, DepthRecord)]))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
