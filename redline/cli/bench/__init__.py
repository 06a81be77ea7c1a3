"""`redline bench`: commands that measure steps in this process, and commands that measure a server over HTTP."""

from pathlib import Path
from typing import Annotated, Any

import typer

from redline.cli.bench.accept import bench_accept
from redline.cli.bench.agentic import bench_agentic
from redline.cli.bench.compare import bench_compare
from redline.cli.bench.leaderboard import bench_leaderboard
from redline.cli.bench.options import PeerCommand
from redline.cli.bench.report import bench_report
from redline.cli.bench.serve import bench_serve
from redline.cli.bench.sweep import bench_sweep
from redline.cli.console import plain_console
from redline.cli.options import SYNTHETIC, Drafter, Folder, model
from redline.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True, help="Measure speed; each figure is reported with the least time that the hardware allows."
)
app.command(name="serve", cls=PeerCommand)(bench_serve)
app.command(name="compare", cls=PeerCommand)(bench_compare)
app.command(name="agentic", cls=PeerCommand)(bench_agentic)
app.command(name="leaderboard")(bench_leaderboard)
app.command(name="sweep", cls=PeerCommand)(bench_sweep)
app.command(name="accept", cls=PeerCommand)(bench_accept)
app.command(name="report")(bench_report)


@app.command(name="decode")
def bench_decode(
    folder: Annotated[
        Path | None,
        typer.Argument(help="A checkpoint folder. Leave it out to build random weights with --shape.", callback=model),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="kimi-k2.6 (or with -nvfp4 or -bf16 experts) or kimi-nano: a step on random weights, no checkpoint."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the shape to run. Default: all.")] = None,
    alias: Annotated[
        int | None,
        typer.Option(
            metavar="P", min=1, help="Layers kept in memory; the step runs through them in turn. Default: all layers."
        ),
    ] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Experts per layer, to save memory. Default: the shape's.")
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            help="Expert routing, drawn again for each step of a shape: uniform or correlated. Default: uniform."
        ),
    ] = None,
    overlap: Annotated[
        float | None,
        typer.Option(
            metavar="W",
            min=0.0,
            max=1.0,
            help="Correlated routing: share of a token's experts that the row's next token reuses. Default: 0.4.",
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens per row of a shape, as when verifying draft tokens (repeatable). Default: 1."),
    ] = None,
    draft_shape: Annotated[
        str | None,
        typer.Option(
            metavar="eagle3-mla",
            help="With --shape: measure rounds of speculative decoding with a drafter of this architecture, in its "
            "public size. A round verifies 1 + K tokens per row and drafts K more.",
        ),
    ] = None,
    k: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="Draft tokens per round (repeatable). Default: 1 to 4.")
    ] = None,
    draft_head_bits: Annotated[
        int | None,
        typer.Option(metavar="16|8", help="Bits per weight of the drafter's head, as in `serve`. Default: 16."),
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(
            metavar="golden|LENGTH|RATES",
            help="Mean tokens per row and round. golden: 1.83, 2.43, 2.88, 3.24, 3.46 with 1 to 5 draft tokens. Or, "
            "for one --k, an acceptance length such as 2.88, or rates such as 0.83,0.6,0.45. Default: golden.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="KV cache format: bf16, fp8 or, for a checkpoint, float32. Default: bf16.")
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Rows in a step (repeatable). Default: 1, 4, 16 for a checkpoint, 1 for a shape."),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Tokens already in the KV cache (repeatable). Default: 200, 4000 for a checkpoint, 1024 for a shape.",
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed steps per case. Default: 40 for a checkpoint, 30 for a shape.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Tensor parallel ranks: 1, 2, 4 or 8 GPUs of this host, for a shape. Default: 1."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write the result as JSON; the cases of a shape are appended to the file's list."),
    ] = None,
) -> None:
    """Milliseconds per decode step by batch and context, with floor and ratio; for a shape, also per op.

    --draft-shape measures a round of speculative decoding instead: the whole round, its verification and its drafting,
    a step without drafts timed in the same run, floors, tokens/s, and the time in which the device was idle.
    """
    from redline.cli.bench.round_tables import RoundsConfig, bench_rounds
    from redline.cli.bench.step_tables import DepthConfig, bench_depth
    from redline.cli.bench.step_tables import bench_decode as run

    of_a_shape = {
        "layers": layers,
        "alias": alias,
        "experts": experts,
        "routing": routing,
        "overlap": overlap,
        "tokens": tokens and tuple(tokens),
        "draft_shape": draft_shape,
        "k": k and tuple(k),
        "draft_head_bits": draft_head_bits,
        "accept": accept,
        "ranks": ranks,
    }
    given: dict[str, Any] = {name: value for name, value in of_a_shape.items() if value is not None}
    if folder is not None and shape is None:
        if given:
            name = next(iter(given)).replace("_", "-")
            raise ConfigError(f"--{name} needs --shape; a checkpoint is measured as it is")
        batches, contexts = batch or [1, 4, 16], context or [200, 4000]
        raise typer.Exit(run(folder, batches, contexts, kv_dtype or "bf16", repeats or 40, save, plain_console()))
    if folder is not None or shape is None:
        raise ConfigError("give either a checkpoint folder or --shape")
    of_rounds = {name: given.pop(name) for name in ("draft_shape", "k", "draft_head_bits", "accept") if name in given}
    if "draft_shape" in of_rounds and "tokens" in given:
        raise ConfigError("--tokens and --draft-shape: a round has 1 + K tokens per row; give --k")
    if of_rounds and "draft_shape" not in of_rounds:
        name = next(iter(of_rounds)).replace("_", "-")
        raise ConfigError(f"--{name} applies to rounds; add --draft-shape, such as eagle3-mla")
    config = DepthConfig(
        shape=shape,
        batch=tuple(batch or (1,)),
        context=tuple(context or (1024,)),
        kv_dtype=kv_dtype or "bf16",
        repeats=repeats or 30,
        save=None if save is None else str(save),
        **given,
    )
    if of_rounds:
        raise typer.Exit(bench_rounds(RoundsConfig(step=config, **of_rounds), plain_console()))
    raise typer.Exit(bench_depth(config, plain_console()))


@app.command(name="prefill")
def bench_prefill(
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of the prefill chunk (repeatable). Default: 8192.")
    ] = None,
    start: Annotated[
        list[int] | None, typer.Option(min=0, help="Tokens of the prompt before the chunk (repeatable). Default: 0.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Tensor parallel ranks: 1, 2, 4 or 8 GPUs of this host.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs per figure; the median is reported.")] = 7,
    save: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """Milliseconds of one Kimi K2.6 layer over a prefill chunk on a GPU, whole and in parts, with floor and rate.

    Weights and activations are random; no checkpoint is read. The floor is the operations divided by the rate of a
    large bf16 matrix product, measured on this machine. --ranks also times communication between the GPUs, and checks
    whether they compute the same bits.
    """
    from redline.cli.bench.prefill_tables import PrefillConfig
    from redline.cli.bench.prefill_tables import bench_prefill as run

    config = PrefillConfig(
        tokens=tuple(tokens or (8192,)),
        start=tuple(start or (0,)),
        ranks=ranks,
        repeats=repeats,
        save=None if save is None else str(save),
    )
    raise typer.Exit(run(config, plain_console()))


@app.command(name="speculate")
def bench_speculate(
    folder: Folder,
    draft: Drafter,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="A file of prompts, JSONL (repeatable). Default: FOLDER/eval.")
    ] = None,
    k: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="Draft tokens per round (repeatable). Default: 1 to 7.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent requests (repeatable). Default: 1, 16.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="At most this many prompts per domain.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every variant runs each domain.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens per answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Sampling temperature; 0 is greedy.")] = 0,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens already in the KV cache when the parts of a step are timed.")
    ] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps per part.")] = 40,
    synthetic_acceptance: Annotated[str | None, typer.Option(metavar="RATES|LENGTH", help=SYNTHETIC)] = None,
    save: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """Acceptance and tokens/s by domain for k = 0..7 and suffix matches; the cost of verifying and drafting."""
    from redline.cli.bench.speculation_tables import SpeculateConfig
    from redline.cli.bench.speculation_tables import run as measure

    config = SpeculateConfig(
        folder=str(folder),
        draft=str(draft),
        prompts=tuple(map(str, prompts or ())),
        k=tuple(k or range(1, 8)),
        batch=tuple(batch or (1, 16)),
        questions=questions,
        rounds=rounds,
        max_tokens=max_tokens,
        temperature=temperature,
        context=context,
        repeats=repeats,
        synthetic_acceptance=synthetic_acceptance,
        save=None if save is None else str(save),
    )
    raise typer.Exit(measure(config, plain_console()))
