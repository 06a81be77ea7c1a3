"""`redline draft`: commands for training drafters. Flags make a configuration; a module of `redline.draft` runs it."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from redline.cli.console import plain_console, until_interrupted
from redline.cli.options import Drafter, drafter, model
from redline.folder import check_drafter

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Drafters for speculative decoding, from the target's own hidden states.

    synth -> capture -> train -> mine -> capture -> train -> eval; [bold]run[/bold] does all of it from a recipe,
    [bold]export[/bold] writes a drafter for other engines.

    Every command resumes from the point at which it was stopped, if run again. Overview: docs/drafters.md.""",
)

Target = Annotated[Path, typer.Argument(help="The target's checkpoint folder.", callback=model)]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU, if there is one.")]
Seed = Annotated[int, typer.Option(help="Random seed; results are reproducible.")]
Temperature = Annotated[float | None, typer.Option(help="Default: from the checkpoint's generation config.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Default: from the checkpoint's generation config.")]
Domains = Annotated[
    list[str] | None,
    typer.Option(
        help="A domain of the built-in templates (repeatable): code, math, agent, science, multilingual, chat, long."
    ),
]
Corpus = Annotated[list[Path], typer.Option(help="A corpus written by synth (repeatable).")]


@app.command()
def synth(
    target: Target,
    out: Annotated[Path, typer.Option(help="The corpus, one example per line. Existing answers are not repeated.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help='A file of prompts (repeatable), one per line: {"domain": "law", "messages": [{"role": "user", ...}]}.'
        ),
    ] = None,
    turns: Annotated[
        str, typer.Option(help="For conversations in files: all regenerates every answer in them; last, only the last.")
    ] = "all",
    domain: Domains = None,
    count: Annotated[int, typer.Option(help="Prompts per domain.")] = 1000,
    samples: Annotated[int, typer.Option(help="Answers per prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.")] = 2048,
    temperature: Temperature = None,
    top_p: TopP = None,
    shard: Annotated[str, typer.Option(metavar="i/n", help="Answer only this part of the prompts.")] = "1/1",
    batch: Annotated[int, typer.Option(help="Maximum batch size.")] = 64,
    draft: Annotated[str | None, typer.Option(help="A drafter to answer faster with, or suffix.")] = None,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Generate a corpus: prompts answered by the target itself, with the serving engine."""
    if draft not in (None, "suffix"):
        check_drafter(Path(draft))
    from redline.draft.corpus.synth import SynthConfig, run
    from redline.draft.stages import fill
    from redline.worker.config import EngineConfig, drafts_of

    values = {
        "weights": str(target),
        "out": str(out),
        "prompts": _names(prompts),
        "turns": turns,
        "domains": tuple(domain or ()),
        "count": count,
        "samples": samples,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "shard": shard,
    }
    speculation = None if draft is None else drafts_of(draft)
    step = batch if batch > 512 else None  # a step needs a token per answer; up to 512, use the device's default
    engine = EngineConfig(max_running=batch, step_tokens=step, device=device, speculation=speculation)
    raise typer.Exit(_worked(run, fill(SynthConfig, "synth", values, {"engine": engine})))


@app.command()
def capture(
    target: Target,
    corpus: Corpus,
    out: Annotated[Path, typer.Option(help="A folder of shards and their index. Existing shards are not recomputed.")],
    disk: Annotated[str | None, typer.Option(metavar="SIZE", help="Stop before it takes more space: 500GB.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Split longer sequences into windows of this size.")] = None,
    layer_ids: Annotated[
        list[int] | None,
        typer.Option("--layer", help="Layer to capture the input of (repeatable). Default: as in vLLM and SGLang."),
    ] = None,
    other_answers: Annotated[
        bool, typer.Option("--other-answers", help="Accept a corpus answered by another target.")
    ] = False,
    device: Device = None,
) -> None:
    """Capture the target's hidden states over a corpus, stored for training."""
    from redline.deploy.config import size
    from redline.draft.corpus.capture import CaptureConfig, run

    config = CaptureConfig(
        target=str(target),
        corpus=_names(corpus),
        out=str(out),
        disk=None if disk is None else size(disk, "--disk"),
        max_tokens=max_tokens,
        layer_ids=None if layer_ids is None else tuple(layer_ids),
        other_answers=other_answers,
        device=device,
    )
    raise typer.Exit(_worked(run, config))


@app.command()
def train(
    target: Target,
    out: Annotated[Path, typer.Option(help="The drafter's folder. An interrupted training in it is resumed.")],
    capture: Annotated[Path | None, typer.Option(help="A folder written by `redline draft capture`.")] = None,
    corpus: Annotated[list[Path] | None, typer.Option(help="Or a corpus; the target runs too (repeatable).")] = None,
    start: Annotated[
        Path | None, typer.Option(help="A drafter to start from. Default: a new one.", callback=drafter)
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(help="A TOML file: a recipe, or only the keys of its table 'train'. Flags override it."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Budget in optimizer steps.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Budget in training tokens.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Budget in seconds. The first exhausted budget counts.")] = None,
    lr: Annotated[float | None, typer.Option(help="The peak learning rate. \\[default: 0.001]")] = None,
    tokens_per_batch: Annotated[int | None, typer.Option(help="Tokens per optimizer step. \\[default: 32768]")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longer sequences are cut. \\[default: 4096]")] = None,
    loss: Annotated[str | None, typer.Option(help="kl, or lk: the hybrid. \\[default: kl]")] = None,
    steps_ahead: Annotated[int | None, typer.Option(help="Steps of training-time test. \\[default: 7]")] = None,
    l2_sp: Annotated[float | None, typer.Option("--l2-sp", help="Penalty towards --start. \\[default: 0]")] = None,
    architecture: Annotated[str | None, typer.Option(help="mla or llama. \\[default: mla]")] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Tokens in its vocabulary. Default: all; 0: no head of its own, the target's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed; reproducible. \\[default: 1]")] = None,
    device: Device = None,
) -> None:
    """Train an EAGLE-3 drafter from the target's states, with training-time test. Several GPUs: `accelerate launch`.

    Needs --capture or --corpus, and a budget: --steps, --tokens or --seconds. docs/drafters.md has every key.
    """
    from redline.draft.recipe import read_train
    from redline.draft.train.train import run

    flags = {
        "capture": capture and str(capture),
        "corpus": [str(path) for path in corpus or ()] or None,
        "start": start and str(start),
        "recipe.budget.steps": steps,
        "recipe.budget.tokens": tokens,
        "recipe.budget.seconds": seconds,
        "recipe.lr": lr,
        "recipe.tokens_per_batch": tokens_per_batch,
        "recipe.max_length": max_length,
        "recipe.loss": loss,
        "recipe.steps_ahead": steps_ahead,
        "recipe.l2_sp": l2_sp,
        "recipe.seed": seed,
        "drafter.architecture": architecture,
        "drafter.draft_vocab_size": draft_vocab_size,
        "device": device,
    }
    given: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    config = read_train(settings, {"target": str(target), "out": str(out), **given})
    raise typer.Exit(_worked(run, config))


@app.command()
def mine(
    target: Target,
    draft: Drafter,
    corpus: Corpus,
    out: Annotated[Path, typer.Option(help="A folder for report, picture and corpora. Train on its mixed.jsonl.")],
    traces: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[DOMAIN=]FILE", help="Acceptance traces of a server, from `serve --draft-trace` (repeatable)."
        ),
    ] = None,
    k: Annotated[int, typer.Option("--k", help="Draft tokens per round.")] = 3,
    proposals: Annotated[str, typer.Option(help="onehot or sampled: how drafts are proposed.")] = "onehot",
    temperature: Temperature = None,
    top_p: TopP = None,
    examples: Annotated[int, typer.Option(help="Maximum scored examples per domain. 0: all.")] = 0,
    traffic: Annotated[
        list[str] | None, typer.Option(metavar="DOMAIN=SHARE", help="A domain's share of the traffic (repeatable).")
    ] = None,
    budget: Annotated[int, typer.Option(help="Answer tokens to train on.")] = 1_000_000,
    replay: Annotated[float, typer.Option(help="Minimum share of them from the base set.")] = 0.5,
    cap: Annotated[float, typer.Option(help="Maximum share of the hard ones in one bucket.")] = 0.5,
    equal_domains: Annotated[bool, typer.Option("--equal-domains", help="The same tokens for every domain.")] = False,
    choose: Annotated[str, typer.Option(help="gap, or uniform: the control arm.")] = "gap",
    answers: Annotated[int, typer.Option(help="New answers per selected prompt.")] = 4,
    windows: Annotated[float, typer.Option(help="Share of the hard ones cut from existing answers.")] = 0.25,
    window_tokens: Annotated[int, typer.Option(help="Tokens per such window.")] = 2048,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per new answer.")] = 4096,
    batch: Annotated[int, typer.Option(help="Maximum batch size.")] = 64,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Find where the drafter is weak and could improve; selects the next training data."""
    from redline.draft.mine.mine import run
    from redline.draft.recipe import mine_config

    values = {
        "target": str(target),
        "draft": str(draft),
        "out": str(out),
        "corpus": _names(corpus),
        "traces": tuple(traces or ()),
        "steps": k,
        "proposals": proposals,
        "temperature": temperature,
        "top_p": top_p,
        "examples": examples,
        "traffic": _shares(traffic),
        "budget": budget,
        "replay": replay,
        "cap": cap,
        "equal_domains": equal_domains,
        "choose": choose,
        "answers": answers,
        "windows": windows,
        "window_tokens": window_tokens,
        "max_tokens": max_tokens,
        "batch": batch,
        "seed": seed,
        "device": device,
    }
    raise typer.Exit(_worked(run, mine_config(values)))


@app.command(name="eval")
def evaluate(
    target: Target,
    draft: Drafter,
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts, JSONL.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="Or a corpus; its prompts are answered again.")] = None,
    domain: Domains = None,
    count: Annotated[int, typer.Option(help="Prompts per such domain.")] = 200,
    k: Annotated[list[int] | None, typer.Option("--k", help="Drafts per round (repeatable). Default: 1 to 7.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="greedy or sampled (repeatable). Default: both.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds per domain, k and mode. 0: every prompt once.")] = 2000,
    temperature: Annotated[float, typer.Option(help="Temperature of the sampled mode.")] = 1.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Top-p of the sampled mode.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.")] = 1024,
    batch: Annotated[int, typer.Option(help="Maximum batch size.")] = 16,
    suffix: Annotated[
        bool, typer.Option("--suffix", help="Also propose suffix matches; long ones replace the drafter's.")
    ] = False,
    offline: Annotated[int, typer.Option(help="Answers per domain also scored by teacher forcing.")] = 64,
    seed: Seed = 0,
    save: Annotated[Path | None, typer.Option(help="Write the result as JSON, with pictures.")] = None,
    device: Device = None,
) -> None:
    """Measure the acceptance length by domain and k, greedy and sampled, in the engine itself."""
    from redline.bench.record import provenance
    from redline.draft.evaluate import run
    from redline.draft.recipe import eval_config

    values = {
        "target": str(target),
        "draft": str(draft),
        "prompts": prompts and str(prompts),
        "corpus": corpus and str(corpus),
        "domains": domain or [],
        "count": count,
        "k": k or list(range(1, 8)),
        "modes": mode or ["greedy", "sampled"],
        "rounds": rounds,
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "batch": batch,
        "suffix": suffix,
        "offline": offline,
        "seed": seed,
        "save": save and str(save),
        "device": device,
    }
    raise typer.Exit(_worked(run, eval_config(values), provenance("torch")))


@app.command()
def export(
    target: Target,
    draft: Drafter,
    out: Annotated[Path, typer.Option(help="The output folder; may be the drafter's own.")],
    latent: Annotated[
        str,
        typer.Option(
            metavar="target|own",
            help="target: pad a latent narrower than the target's with zeros to its width, as vLLM requires (it keeps "
            "both in one cache); no value changes. own: the width it was trained with, a smaller file. Redline reads "
            "either and drops the padding.",
        ),
    ] = "target",
) -> None:
    """Export a drafter for other engines: config.json and model.safetensors, the same files as of `train` and `run`."""
    from redline.draft.export import ExportConfig, run
    from redline.draft.stages import fill

    values = {"target": str(target), "drafter": str(draft), "out": str(out), "latent": latent}
    raise typer.Exit(run(fill(ExportConfig, "export", values, {}), plain_console()))


@app.command(name="run")
def run_recipe(
    recipe: Annotated[
        Path, typer.Argument(metavar="recipe.toml", help="Such as redline/draft/recipe_example.toml; docs/drafters.md.")
    ],
    out: Annotated[Path | None, typer.Option(help="The output folder. Default: from the recipe.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda, for every stage. Default: from the recipe, else the GPU, if there is one."),
    ] = None,
) -> None:
    """Run all stages from one file, skipping finished ones; OUT/drafter is the argument for `serve --draft`."""
    from redline.bench.record import provenance
    from redline.draft.recipe import RunConfig, run

    config = RunConfig(recipe=str(recipe), out=None if out is None else str(out), device=device)
    raise typer.Exit(_worked(run, config, provenance("torch")))


def _worked(run: Callable[..., int], config: Any, *more: Any) -> int:
    console = plain_console()
    return until_interrupted(lambda: run(config, console, *more), console, "run the same command to resume")


def _names(paths: list[Path] | None) -> tuple[str, ...]:
    return tuple(map(str, paths or ()))


def _shares(given: list[str] | None) -> dict[str, float]:
    """Parse ["code=0.5"] into {"code": 0.5}. Raises typer.BadParameter for anything else."""
    shares: dict[str, float] = {}
    for text in given or ():
        domain, sign, share = text.partition("=")
        try:
            shares[domain] = float(share)
        except ValueError:
            sign = ""
        if not (domain and sign):
            raise typer.BadParameter(f"{text!r}; expected DOMAIN=SHARE, such as code=0.3", param_hint="--traffic")
    return shares
