"""`redline bench`: the verbs that measure steps in this process, and those that measure a server over HTTP."""

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

app = typer.Typer(no_args_is_help=True, help="Speed, each number beside the least time that the hardware allows.")
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
        typer.Argument(help="A checkpoint's folder, or none: then --shape says what is built.", callback=model),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="kimi-k2.6 (or with -nvfp4 or -bf16 experts) or kimi-nano: a step on random weights, no checkpoint."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Of the shape. Absent: all of it.")] = None,
    alias: Annotated[
        int | None,
        typer.Option(
            metavar="P", min=1, help="Layers that lie in memory; the step takes them in turn. Absent: all layers."
        ),
    ] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Of a layer, where memory is short. Absent: the shape's.")
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            help="Who goes where, drawn anew for each step of a shape: uniform or correlated. Absent: uniform."
        ),
    ] = None,
    overlap: Annotated[
        float | None,
        typer.Option(
            metavar="W",
            min=0.0,
            max=1.0,
            help="Correlated: the share of its experts that a row's token keeps for the next. Absent: 0.4.",
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of each row of a shape, as in verifying drafts (repeatable). Absent: 1."),
    ] = None,
    draft_shape: Annotated[
        str | None,
        typer.Option(
            metavar="eagle3-mla",
            help="Of a shape: measure rounds of speculation, with a drafter of this body in the public size. A round "
            "verifies 1 + K tokens of each row and drafts K more.",
        ),
    ] = None,
    k: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="Drafts of a round (repeatable). Absent: 1 to 4.")
    ] = None,
    draft_head_bits: Annotated[
        int | None, typer.Option(metavar="16|8", help="How the drafter's head is kept, as `serve` has it. Absent: 16.")
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(
            metavar="golden|LENGTH|RATES",
            help="Mean tokens of a row's round. golden: 1.83, 2.43, 2.88, 3.24, 3.46 with 1 to 5 drafts. A length such "
            "as 2.88, or rates such as 0.83,0.6,0.45, of one --k. Absent: golden.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of the pages: bf16, fp8 or, of a checkpoint, float32. Absent: bf16.")
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Rows in a step (repeatable). Absent: 1, 4, 16 of a checkpoint, 1 of a shape."),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Tokens already there (repeatable). Absent: 200, 4000 of a checkpoint, 1024 of a shape."
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed steps of each case. Absent: 40 of a checkpoint, 30 of a shape.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="GPUs of this host that share a shape: 1, 2, 4 or 8. Absent: 1.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the result as JSON; a shape's cases are added to the file's list.")
    ] = None,
) -> None:
    """Milliseconds per decode step by batch and context, with floor and ratio; of a shape, also of each op.

    With --draft-shape a round of speculation instead: the round, what verifies and what drafts in it, the step without
    drafts beside it in the same run, floors, tokens/s, and the time in which the device did nothing.
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
            raise ConfigError(f"--{name} is of a --shape; a checkpoint is measured as it is")
        batches, contexts = batch or [1, 4, 16], context or [200, 4000]
        raise typer.Exit(run(folder, batches, contexts, kv_dtype or "bf16", repeats or 40, save, plain_console()))
    if folder is not None or shape is None:
        raise ConfigError("give a checkpoint's folder or --shape, one of the two")
    of_rounds = {name: given.pop(name) for name in ("draft_shape", "k", "draft_head_bits", "accept") if name in given}
    if "draft_shape" in of_rounds and "tokens" in given:
        raise ConfigError("--tokens and --draft-shape: a round has 1 + K tokens of each row; give --k")
    if of_rounds and "draft_shape" not in of_rounds:
        name = next(iter(of_rounds)).replace("_", "-")
        raise ConfigError(f"--{name} is of rounds; give --draft-shape too, such as eagle3-mla")
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
        list[int] | None, typer.Option(min=1, help="Of the prompt's chunk (repeatable). Absent: 8192.")
    ] = None,
    start: Annotated[
        list[int] | None, typer.Option(min=0, help="Tokens of the prompt before it (repeatable). Absent: 0.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="GPUs of this host that share the layer: 1, 2, 4 or 8.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each figure; the median counts.")] = 7,
    save: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """Milliseconds of one Kimi K2.6 layer over a chunk of a prompt on a GPU, whole and in parts, with floor and rate.

    Weights and activations are random; no checkpoint is read. The floor is operations over the rate of a large bf16
    product, measured here. With --ranks also what the GPUs exchange, and whether they compute the same bits.
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
        list[Path] | None, typer.Option(help="A file of prompts, JSONL (repeatable). Absent: FOLDER/eval.")
    ] = None,
    k: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="Drafts of a round (repeatable). Absent: 1 to 7.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Answers at once (repeatable). Absent: 1, 16.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Prompts of each domain, at most.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that every variant takes in each domain.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer, at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Of the answers; 0 is greedy.")] = 0,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens already there, where the parts of a step are timed.")
    ] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each part.")] = 40,
    synthetic_acceptance: Annotated[str | None, typer.Option(metavar="RATES|LENGTH", help=SYNTHETIC)] = None,
    save: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """Acceptance and tokens/s by domain for k = 0..7 and suffix matches, what verifying and drafting cost."""
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
