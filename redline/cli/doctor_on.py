"""`redline doctor --on "8 x H200"`: predictions for GPUs that are not here, each line with its arithmetic.

The model is Kimi K2.6, or that of a folder with a config.json. Nothing is measured: predictions are based on
measurements on one and two H200s (`bench/step/predict.py`) and on known data of the chips (`bench/step/machines.py`).
"""

import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from redline.bench.step.drafters import drafter_weights
from redline.bench.step.machines import CHIPS, LISTED, Several, machine
from redline.bench.step.predict import (
    BLOCK_DRAFTS,
    BLOCK_MS,
    BLOCKS,
    FITTED,
    KV_DTYPES,
    LONG,
    LONG_STEPS,
    NVFP4_OVER_INT4,
    ROUND_MS,
    ROUNDS,
    SHORT,
    STEPS,
    SUMS,
    TOKENS,
    PredictedRanks,
    PredictedStep,
    distinct_experts,
    like_kimi,
    long_ms,
)
from redline.errors import ConfigError
from redline.messages.job import PAGE_TOKENS
from redline.model.draft_shard import left_out
from redline.model.eagle3.config import Eagle3Config
from redline.model.k2.config import K2Config
from redline.model.k2.shapes import KIMI_K26
from redline.model.k2.shard import RANKS, check_ranks, weight_bytes
from redline.policy.synthetic import GOLDEN, golden_block
from redline.run.fit import KV_PAGES_ALONE, KV_SHARE_ALONE, MemorySizes, fit

LABEL = 17  # columns of a line's label
WIDEST = 120
MOST_DRAFTS = max(ROUNDS)

KIMI_BITS = KIMI_K26.bits_per_routed_parameter
Rounds = dict[str, tuple[PredictedStep, float, float]]  # by name: the verifying step, ms of drafting, accepted tokens
Lines = Iterator[tuple[str, str]]  # (label, text); a table's lines have no label
MARKS = (
    "measured: by this repository, on one H200 and on two. published: by the manufacturer. derived: arithmetic on "
    "those and on the model's sizes. assumed: neither"
)


def doctor_on(text: str, folder: Path | None, console: Console) -> int:
    """Print the predictions for the machine named by `text`; returns the exit code, 0.

    Raises ConfigError if the machine is unknown, or if the model cannot be split into that number of ranks;
    CheckpointError if config.json cannot be read.
    """
    on = machine(text)
    config = KIMI_K26 if folder is None else K2Config.from_folder(folder)
    try:
        check_ranks(config, on.count)
    except ConfigError as error:
        raise ConfigError(f"on is {on.name!r}: {error}") from None
    title = "Kimi K2.6" if folder is None else str(folder)
    machines = PredictedRanks(config, on) if like_kimi(config) else None
    sections = {
        f"{on.name}: {title}": _verdict(config, on, machines, folder),
        "The machine": _machine(on),
        "Bytes of a rank (derived)": _bytes(config, on),
    }
    if machines is not None:
        steps = [machines.step(tokens, 1, SHORT) for tokens in TOKENS]
        longer = {kv_dtype: machines.step(1, 1, LONG, kv_dtype) for kv_dtype in KV_DTYPES}
        rounds = {_drafts(drafts): (*machines.round(drafts), GOLDEN[drafts - 1]) for drafts in ROUNDS}
        rounds |= {_block(shape): (*machines.block_round(shape), golden_block(BLOCK_DRAFTS)) for shape in BLOCKS}
        sections |= {
            "What it would give (derived)": _summary(on, steps, longer, rounds),
            "A step: milliseconds": _steps(machines, steps, longer),
            "A round of one stream with drafts: milliseconds": _rounds(machines, rounds),
        }
    else:
        sections["What it would give"] = iter([("steps", "predicted for models of Kimi K2's sizes alone")])
    for number, (heading, lines) in enumerate(sections.items()):
        console.print(f"{chr(10) * (number > 0)}{heading}", style="bold", highlight=False, soft_wrap=True, markup=False)
        for name, line in lines:
            say_line(console, name, line)
    return 0


def say_line(console: Console, name: str, line: str) -> None:
    """Print a line after its label, wrapped between words; without a label, a table's line unchanged."""
    whole = line
    if name:
        whole = textwrap.fill(
            f"{name:<{LABEL}}{line}", min(console.width, WIDEST), subsequent_indent=" " * LABEL,
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip
    console.print(whole, highlight=False, soft_wrap=True, markup=False)


def _verdict(config: K2Config, on: Several, machines: PredictedRanks | None, folder: Path | None) -> Lines:
    """Whether the model fits, the speed it would reach, and the commands to run."""
    if not fits(config, on):
        yield "verdict", f"does not fit: {would_do(config)} would do"
        return
    memory = int(on.chip.memory.value)
    tokens = {kv_dtype: capacity(_sizes(config, on, kv_dtype), memory) for kv_dtype in KV_DTYPES}
    pages = " or ".join(f"{count:,} tokens in {kv_dtype}" for kv_dtype, count in tokens.items())
    speed = ""
    if machines is not None:
        step = machines.step(1, 1, SHORT)
        speed = (
            f"; one stream {1e3 / step.ms:,.0f} tokens/s predicted, {1e3 / (step.floor + step.whole):,.0f} at the floor"
        )
    yield "verdict", f"fits: a KV cache of {pages}{speed}"
    if not on.chip.served:
        yield "but", f"our kernels: {on.chip.kernels[0]}"
        return
    where = "FOLDER" if folder is None else shlex.quote(str(folder))
    yield "run", f"redline serve {where}" + (f" --ranks {on.count}" if on.count > 1 else "")
    yield "verify", f"redline verify {where}"


def fits(config: K2Config, on: Several) -> bool:
    """Whether a machine's ranks hold the model and one page of context; the basis of every verdict on a machine."""
    try:
        check_ranks(config, on.count)
    except ConfigError:
        return False
    sizes = _sizes(config, on, "bf16")
    return sizes.left(int(on.chip.memory.value), PAGE_TOKENS) >= sizes.page_bytes


def would_do(config: K2Config) -> str:
    """The smallest number of GPUs of each chip that holds the model."""
    found = (
        next((one for ranks in RANKS if fits(config, one := Several(ranks, CHIPS[name]))), None) for name in LISTED
    )
    return ", ".join(one.name for one in found if one is not None) or "no machine known here"


def capacity(sizes: MemorySizes, memory: int) -> int:
    """The tokens of context that fit into all the remaining memory."""
    try:
        length = fit(sizes, memory, alone=True).max_model_len
    except ConfigError:
        return 0
    return sizes.left(memory, length) // sizes.page_bytes * PAGE_TOKENS


def _machine(on: Several) -> Lines:
    chip = on.chip
    yield "memory", f"{chip.memory.value / 1e9:g} GB a GPU: {chip.memory.source}"
    yield "reads memory at", f"{chip.reads.value / 1e12:.3f} TB/s a GPU: {chip.reads.source}"
    if on.count > 1:
        yield "sends at", f"{chip.link.value / 1e9:g} GB/s to other ranks: {chip.link.source}"
    for number, line in enumerate(chip.kernels):
        yield "our kernels" if number == 0 else "and", line
    yield "words", MARKS


def _sizes(config: K2Config, on: Several, kv_dtype: str, drafter: Eagle3Config | None = None) -> MemorySizes:
    return MemorySizes(
        config, kv_dtype=KV_DTYPES[kv_dtype], device="cuda", gpu_kernels=True, ranks=on.count,
        positions=1 if drafter is None else 1 + MOST_DRAFTS, drafter=drafter,
        drafter_parameters=0 if drafter is None else drafter_weights(drafter),
    )  # fmt: skip


def _bytes(config: K2Config, on: Several) -> Lines:
    c, ranks = config, on.count
    share = f" / {ranks} ranks" if ranks > 1 else ""
    experts = c.moe_layers * c.n_routed_experts
    bits = c.bits_per_routed_parameter
    alike = "; NVFP4 takes the same" if bits == KIMI_BITS else ""
    yield (
        "routed experts",
        f"{c.moe_layers} layers x {c.n_routed_experts} experts x {c.expert_parameters:,} x {bits:g} bits{share} = "
        f"{_gb(experts * c.expert_parameters * bits / 8 / ranks)}{alike}",
    )
    whole_attention = c.hidden_size * (c.q_lora_rank + c.kv_width) + c.q_lora_rank + c.kv_lora_rank
    heads = c.attention_parameters - whole_attention
    yield (
        "heads",
        f"{c.num_hidden_layers} layers x {heads:,} x 2 bytes{share} = {_gb(2 * c.num_hidden_layers * heads / ranks)}",
    )
    dense, shared = 3 * c.hidden_size * c.intermediate_size, 3 * c.hidden_size * c.shared_intermediate_size
    dense_layers = c.num_hidden_layers - c.moe_layers
    mlps = dense_layers * dense + c.moe_layers * shared
    yield (
        "other MLPs",
        f"({dense_layers} x {dense:,} + {c.moe_layers} shared x {shared:,}) x 2 bytes{share} = {_gb(2 * mlps / ranks)}",
    )
    head = 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size
    if head:
        yield "head", f"{c.vocab_size:,} x {c.hidden_size:,} x 2 bytes{share} = {_gb(2 * head / ranks)}"
    whole = c.dense_parameters - c.num_hidden_layers * heads - mlps - head
    parts = "embedding, routers, norms, projections into attention"
    yield "whole on each", f"{parts}: {whole:,} x 2 bytes = {_gb(2 * whole)}"
    yield "weights", f"the sum: {_gb(weight_bytes(c, ranks))} of {_gb(c.weight_bytes)}"
    sizes, memory = _sizes(c, on, "bf16"), int(on.chip.memory.value)
    if not fits(c, on):
        yield "does not fit", _does_not_fit(c, sizes, memory)
        return
    for kv_dtype in KV_DTYPES:
        yield f"{kv_dtype} pages", _pages(_sizes(c, on, kv_dtype), memory)
    if like_kimi(c):
        drafter = Eagle3Config.for_target(c)
        yield (
            "with a drafter",
            f"of EAGLE-3's public size, {_gb(2 * drafter_weights(drafter))}{_drafter_part(drafter, ranks)}: "
            f"{_pages(_sizes(c, on, 'bf16', drafter), memory)}, bf16",
        )


def _drafter_part(drafter: Eagle3Config, ranks: int) -> str:
    held = drafter_weights(drafter) - left_out(drafter, ranks)
    return f", of which a rank holds {_gb(2 * held)}" if ranks > 1 else ""


def _pages(sizes: MemorySizes, memory: int) -> str:
    """The tokens of context that fit into all the remaining memory, as one line."""
    tokens = capacity(sizes, memory)
    if not tokens:
        return f"none: {sizes.needs(PAGE_TOKENS).sentence()} do not fit into {_gb(memory)}"
    length = fit(sizes, memory, alone=True).max_model_len
    left, beside = sizes.left(memory, length), _gb(sizes.needs(length).whole)
    return (
        f"{_gb(memory)} - {beside} of weights, scratch and CUDA graphs = {_gb(left)} / "
        f"{sizes.page_bytes / PAGE_TOKENS:,.0f} bytes = {tokens:,} tokens (--kv-memory; without it "
        f"{min(KV_SHARE_ALONE * tokens, KV_PAGES_ALONE * PAGE_TOKENS):,.0f})"
    )


def _does_not_fit(config: K2Config, sizes: MemorySizes, memory: int) -> str:
    needs = sizes.needs(PAGE_TOKENS)
    return (
        f"{needs.sentence()} = {_gb(needs.whole)} of {_gb(memory)}; {would_do(config)} would do. "
        "The figures below are what this machine would give if it did"
    )


def _summary(
    on: Several,
    steps: list[PredictedStep],
    longer: dict[str, PredictedStep],
    rounds: Rounds,
) -> Lines:
    yield "", f"{'':<26}{'floor':>7}{'INT4':>8}{'tokens/s':>10}{'NVFP4':>8}{'tokens/s':>10}{'measured':>10}"
    measured = on.chip.name == "H200"
    for step in steps:
        took = STEPS.get(on.count, {}).get(step.rows) if measured else None
        of = f"{_tokens(step.rows)}, no drafts"
        yield "", _row(of, step.floor + step.whole, step.ms, step.nvfp4, step.rows, took and took.ms)
    for kv_dtype, step in longer.items():
        took = LONG_STEPS[kv_dtype] if measured and on.count == 1 else None
        yield (
            "",
            _row(f"1 token at {LONG:,}, {kv_dtype}", step.floor + step.whole, step.ms, step.nvfp4, 1, took and took.ms),
        )
    known = {_drafts(drafts): ms for drafts, ms in ROUND_MS.get(on.count, {}).items()}
    if on.count == 1:
        known |= {_block(shape): ms for shape, ms in BLOCK_MS.items()}
    for name, (step, drafting, accepted) in rounds.items():
        took = known.get(name) if measured else None
        yield "", _row(f"1 stream, {name}", None, step.ms + drafting, step.nvfp4, accepted, took)
    if on.count > 1:
        yield "floor", "of the bytes a rank reads: data that every rank reads counts once per rank (`whole` below)"
    yield "contexts", f"{SHORT:,} and bf16 pages unless given otherwise; uniform routing"
    yield "NVFP4", f"INT4 + {NVFP4_OVER_INT4:.0%} of reading the experts: measured by a probe, with one token"
    if measured and on.count in STEPS:
        yield (
            "measured",
            f"commit {FITTED[on.count]} of decode-h200.json, and rounds-h200.json; later runs are in docs/speed.md. "
            "Steps are predicted from these same rows, and differ by the bandwidth of their runs; rounds of two GPUs "
            "are not, and each GPU then held the drafter's whole body, which the prediction divides",
        )


def _row(of: str, floor: float | None, ms: float, nvfp4: float, tokens: float, took: float | None) -> str:
    """A line of the summary; tokens: tokens produced in `ms` milliseconds."""
    low = "" if floor is None else f"{floor:.2f}"
    beside = "" if took is None else f"{took:.2f}"
    speeds = f"{ms:>8.2f}{1e3 * tokens / ms:>10.0f}{ms + nvfp4:>8.2f}{1e3 * tokens / (ms + nvfp4):>10.0f}"
    return f"{of:<26}{low:>7}{speeds}{beside:>10}".rstrip()


def _steps(machines: PredictedRanks, steps: list[PredictedStep], longer: dict[str, PredictedStep]) -> Lines:
    on, c = machines.on, machines.config
    named = {_tokens(step.rows): step for step in steps} | {f"1, long, {key}": step for key, step in longer.items()}
    for name, step in named.items():
        yield "", f"{name:<14}{_sum(machines, step)} = {step.ms:6.2f}"
    yield "so", _columns(on)
    distinct = ", ".join(f"{distinct_experts(c, tokens):.1f}" for tokens in TOKENS)
    yield (
        "GB",
        f"derived: all weights but the embedding, contexts, and of a layer's experts {c.n_routed_experts} x (1 - (1 - "
        f"{c.num_experts_per_tok}/{c.n_routed_experts})^T) = {distinct} at {', '.join(map(str, TOKENS))} tokens",
    )
    yield (
        "kept, divided",
        "measured, on H200s: the solution of kept + divided = a step of one GPU - its reading, and kept + divided / 2 "
        "= a step of two GPUs - its reading - its sums"
        + ("" if on.chip.name == "H200" else f"; assumed to hold for a {on.chip.name} too")
        + ("" if on.count <= 2 else f"; assumed: {on.count} ranks divide it as two do"),
    )
    yield (
        f"long: {LONG:,}",
        "kept has "
        + " and ".join(f"{long_ms(kv_dtype):.2f} ms ({kv_dtype})" for kv_dtype in LONG_STEPS)
        + " more, measured on one GPU; assumed: ranks do not divide it",
    )
    if on.count > 1:
        yield (
            "whole",
            "what each rank reads beyond its part: contexts and the projections into attention, which the floor counts "
            "once over all ranks. Measured steps read both whole; ranks now divide them if it pays, which is left out",
        )
        each = ", ".join(f"{machines.sum_us(tokens):.2f}" for tokens in TOKENS)
        logits = ", ".join(f"{machines.gather_us(tokens):.1f}" for tokens in TOKENS)
        more = (
            ""
            if on.count == 2
            else "; beyond two ranks (measured), the bytes sent to each further rank at the link's speed: assumed"
        )
        yield "sums", f"{SUMS} all-reduces of {each} us, and the all-gather of logits {logits} us{more}"


def _columns(on: Several) -> str:
    if on.count == 1:
        return "GB / TB/s = floor + kept + divided = step"
    return f"GB / TB/s = floor + whole + kept + divided / {on.count} + sums = step"


def _sum(machines: PredictedRanks, step: PredictedStep) -> str:
    on = machines.on
    speed = on.chip.reads.value / 1e12
    floor, above = (
        f"{step.gb:6.2f} / {speed:.3f} = {step.floor:5.2f}",
        f"{step.kept:4.2f} + {step.divided * on.count:4.2f}",
    )
    if on.count == 1:
        return f"{floor} + {above}"
    return f"{floor} + {step.whole:4.2f} + {above} / {on.count} + {step.sums + step.gather:4.2f}"


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count > 1)}"


def _rounds(machines: PredictedRanks, rounds: Rounds) -> Lines:
    on = machines.on
    for name, (step, drafting, _) in rounds.items():
        of = _tokens(step.tokens) if name[0].isdigit() else name.partition(",")[0]
        yield "", f"{of:<9}{_sum(machines, step)} + {drafting:.2f} = {step.ms + drafting:6.2f}"
    for name, (step, drafting, accepted) in rounds.items():
        ms = step.ms + drafting
        yield name, f"{accepted:.3g} tokens of a round / {ms:.2f} ms = {1e3 * accepted / ms:.0f} tokens/s"
    yield "so", f"{_columns(on).removesuffix(' = step')} + drafting = round; kept has settling, measured"
    yield (
        "drafting",
        "EAGLE-3 with latent attention, DFlash and DSpark, of the public sizes, 16 bits"
        + (
            ", divided by the ranks except for fusing states, projecting into attention, and a bias by the token before"
            if on.count > 1
            else ""
        )
        + ": its floor, derived, and the time above the floor on one GPU, measured"
        + (", and two all-reduces a layer and pass, and all-gathers of logits" if on.count > 1 else ""),
    )
    yield (
        "acceptance",
        "tokens per round: InferenceX's golden curve for Kimi's EAGLE-3, published; of DFlash "
        f"{golden_block(BLOCK_DRAFTS):.1f}, z-lab/Kimi-K2.5-DFlash on GSM8K, published (3.7 on MT-Bench: blocks lose "
        "more than chains on traffic unlike their training data); of DSpark the same, assumed",
    )


def _drafts(count: int) -> str:
    return f"{count} draft{'s' * (count > 1)}"


def _block(shape: str) -> str:
    return f"{shape}, {_drafts(BLOCK_DRAFTS)}"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"
