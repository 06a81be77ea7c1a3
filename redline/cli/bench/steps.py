"""`redline bench decode`, `prefill` and `speculate`, which measure steps in this process: their flags."""

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

import redline.cli.options as options
from redline.cli.bench.options import NotNegative
from redline.cli.console import plain_console
from redline.cli.flags import Argument, AtLeast1, Flag
from redline.cli.options import SYNTHETIC
from redline.errors import ConfigError
from redline.messages.base import Record

SaveJson = Annotated[Path | None, Meta(description="Write the result as JSON.")]


class DecodeFlags(Record, frozen=True):
    """The flags of `redline bench decode`. None, or (): not given; the defaults of a checkpoint and a shape differ."""

    folder: Annotated[
        Path | None,
        Meta(description="A checkpoint folder. Leave it out to build random weights with --shape."),
        Argument(check=lambda folder: options.check_model(folder)),
    ] = None
    shape: Annotated[
        str | None,
        Meta(
            description="kimi-k2.6 (or with -nvfp4 or -bf16 experts) or kimi-nano: a step on random weights, no "
            "checkpoint."
        ),
    ] = None
    layers: Annotated[AtLeast1 | None, Meta(description="Layers of the shape to run. Default: all.")] = None
    alias: Annotated[
        AtLeast1 | None,
        Meta(description="Layers kept in memory; the step runs through them in turn. Default: all layers."),
        Flag(metavar="P"),
    ] = None
    experts: Annotated[
        AtLeast1 | None, Meta(description="Experts per layer, to save memory. Default: the shape's.")
    ] = None
    routing: Annotated[
        str | None,
        Meta(
            description="Expert routing, drawn again for each step of a shape: uniform or correlated. Default: uniform."
        ),
    ] = None
    overlap: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(
            description="Correlated routing: share of a token's experts that the row's next token reuses. Default: 0.4."
        ),
        Flag(metavar="W"),
    ] = None
    tokens: Annotated[
        tuple[AtLeast1, ...],
        Meta(description="Tokens per row of a shape, as when verifying draft tokens (repeatable). Default: 1."),
    ] = ()
    draft_shape: Annotated[
        str | None,
        Meta(
            description="With --shape: measure rounds of speculative decoding with a drafter of this architecture, in "
            "its public size. A round verifies 1 + K tokens per row and drafts K more: a chain in K passes, a block "
            "(dflash, dspark) in one."
        ),
        Flag(metavar="eagle3-mla|dflash|dspark"),
    ] = None
    k: Annotated[
        tuple[AtLeast1, ...],
        Meta(description="Draft tokens per round (repeatable). Default: 1 to 4; blocks: 3, 5, 7."),
        Flag("--k"),
    ] = ()
    draft_head_bits: Annotated[
        int | None,
        Meta(description="Bits per weight of the drafter's head, as in `serve`. Default: 16."),
        Flag(metavar="16|8"),
    ] = None
    accept: Annotated[
        str | None,
        Meta(
            description="Mean tokens per row and round. golden: 1.83, 2.43, 2.88, 3.24, 3.46 with 1 to 5 draft tokens; "
            "of a block 3.33, 4.44, 5.30 with 3, 5, 7 (0.878 for each draft, which gives DFlash's published 5.30). Or, "
            "for one --k, an acceptance length such as 2.88, or rates such as 0.83,0.6,0.45. Default: golden."
        ),
        Flag(metavar="golden|LENGTH|RATES"),
    ] = None
    kv_dtype: Annotated[str, Meta(description="KV cache format: bf16, fp8 or, for a checkpoint, float32.")] = "bf16"
    batch: Annotated[
        tuple[AtLeast1, ...],
        Meta(description="Rows in a step (repeatable). Default: 1, 4, 16 for a checkpoint, 1 for a shape."),
    ] = ()
    context: Annotated[
        tuple[AtLeast1, ...],
        Meta(
            description="Tokens already in the KV cache (repeatable). Default: 200, 4000 for a checkpoint, 1024 for a "
            "shape."
        ),
    ] = ()
    repeats: Annotated[
        AtLeast1 | None, Meta(description="Timed steps per case. Default: 40 for a checkpoint, 30 for a shape.")
    ] = None
    ranks: Annotated[
        AtLeast1 | None,
        Meta(description="Tensor parallel ranks: 1, 2, 4 or 8 GPUs of this host, for a shape. Default: 1."),
    ] = None
    save: Annotated[
        Path | None,
        Meta(description="Write the result as JSON; the cases of a shape are appended to the file's list."),
    ] = None

    def given(self, *names: str) -> dict[str, Any]:
        """The values of the flags among `names` that were given."""
        return {name: value for name in names if (value := getattr(self, name)) not in (None, ())}


_OF_ROUNDS = ("draft_shape", "k", "draft_head_bits", "accept")
_OF_A_SHAPE = ("layers", "alias", "experts", "routing", "overlap", "tokens", *_OF_ROUNDS, "ranks")


def bench_decode(flags: DecodeFlags) -> int:
    """Milliseconds per decode step by batch and context, with floor and ratio; for a shape, also per op.

    --draft-shape measures a round of speculative decoding instead: the whole round, its verification and its drafting,
    a step without drafts timed in the same run, floors, tokens/s, and the time in which the device was idle.
    """
    from redline.cli.bench.round_tables import RoundsConfig, bench_rounds
    from redline.cli.bench.step_tables import DepthConfig, bench_checkpoint, bench_depth

    if flags.folder is not None and flags.shape is None:
        if of_a_shape := flags.given(*_OF_A_SHAPE):
            name = next(iter(of_a_shape)).replace("_", "-")
            raise ConfigError(f"--{name} needs --shape; a checkpoint is measured as it is")
        return bench_checkpoint(flags.folder, flags, plain_console())
    if flags.folder is not None or flags.shape is None:
        raise ConfigError("give either a checkpoint folder or --shape")
    rounds = flags.given(*_OF_ROUNDS)
    if flags.draft_shape and flags.tokens:
        raise ConfigError("--tokens and --draft-shape: a round has 1 + K tokens per row; give --k")
    if rounds and not flags.draft_shape:
        name = next(iter(rounds)).replace("_", "-")
        raise ConfigError(f"--{name} applies to rounds; add --draft-shape, such as eagle3-mla or dflash")
    step = flags.given(*(name for name in _OF_A_SHAPE if name not in _OF_ROUNDS), "batch", "context", "repeats", "save")
    config = DepthConfig(shape=flags.shape, kv_dtype=flags.kv_dtype, **step)
    if rounds:
        return bench_rounds(RoundsConfig(step=config, **rounds), plain_console())
    return bench_depth(config, plain_console())


class PrefillFlags(Record, frozen=True):
    """The flags of `redline bench prefill`, which measures each tokens x start."""

    tokens: Annotated[
        tuple[AtLeast1, ...], Meta(description="Tokens of the prefill chunk (repeatable). Default: 8192.")
    ] = (8192,)
    start: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(description="Tokens of the prompt before the chunk (repeatable). Default: 0."),
    ] = (0,)
    ranks: Annotated[AtLeast1, Meta(description="Tensor parallel ranks: 1, 2, 4 or 8 GPUs of this host.")] = 1
    repeats: Annotated[AtLeast1, Meta(description="Timed runs per figure; the median is reported.")] = 7
    save: SaveJson = None


def bench_prefill(flags: PrefillFlags) -> int:
    """Milliseconds of one Kimi K2.6 layer over a prefill chunk on a GPU, whole and in parts, with floor and rate.

    Weights and activations are random; no checkpoint is read. The floor is the operations divided by the rate of a
    large bf16 matrix product, measured on this machine. --ranks also times communication between the GPUs, and checks
    whether they compute the same bits.
    """
    from redline.cli.bench import prefill_tables

    return prefill_tables.run(flags, plain_console())


class SpeculateFlags(Record, frozen=True):
    """The flags of `redline bench speculate`."""

    folder: Annotated[
        str,
        Meta(description="A checkpoint's folder: config.json, *.safetensors, tiktoken.model."),
        Argument(check=lambda folder: options.check_model(Path(folder))),
    ]
    draft: Annotated[
        str, Meta(description="The drafter's folder."), Flag(check=lambda folder: options.check_drafter(Path(folder)))
    ]
    prompts: Annotated[
        tuple[str, ...], Meta(description="A file of prompts, JSONL (repeatable). Default: FOLDER/eval.")
    ] = ()
    k: Annotated[
        tuple[AtLeast1, ...], Meta(description="Draft tokens per round (repeatable). Default: 1 to 7."), Flag("--k")
    ] = (1, 2, 3, 4, 5, 6, 7)
    batch: Annotated[tuple[AtLeast1, ...], Meta(description="Concurrent requests (repeatable). Default: 1, 16.")] = (
        1,
        16,
    )
    questions: Annotated[AtLeast1, Meta(description="At most this many prompts per domain.")] = 16
    rounds: Annotated[AtLeast1, Meta(description="Times that every variant runs each domain.")] = 3
    max_tokens: Annotated[int, Meta(ge=2, description="Maximum tokens per answer.")] = 128
    temperature: Annotated[NotNegative, Meta(le=2, description="Sampling temperature; 0 is greedy.")] = 0.0
    context: Annotated[
        AtLeast1, Meta(description="Tokens already in the KV cache when the parts of a step are timed.")
    ] = 512
    repeats: Annotated[AtLeast1, Meta(description="Timed steps per part.")] = 40
    synthetic_acceptance: Annotated[str | None, Meta(description=SYNTHETIC), Flag(metavar="RATES|LENGTH")] = None
    save: SaveJson = None


def bench_speculate(flags: SpeculateFlags) -> int:
    """Acceptance and tokens/s by domain for k = 0..7 and suffix matches; the cost of verifying and drafting."""
    from redline.cli.bench import speculation_tables

    return speculation_tables.run(flags, plain_console())
