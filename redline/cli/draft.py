"""`redline draft`: commands for training drafters. Flags make a configuration; a module of `redline.draft` runs it."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer
from msgspec import Meta

from redline.cli.console import plain_console, until_interrupted
from redline.cli.flags import Argument, Flag, verb
from redline.cli.options import Device, DrafterFolder
from redline.folder import check_drafter, check_model
from redline.messages.base import Record

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Drafters for speculative decoding, from the target's own hidden states.

    synth -> capture -> train -> mine -> capture -> train -> eval; [bold]run[/bold] does all of it from a recipe,
    [bold]export[/bold] writes a drafter for other engines.

    Every command resumes from the point at which it was stopped, if run again. Overview: docs/drafters.md.""",
)

Target = Annotated[
    Path, Meta(description="The target's checkpoint folder."), Argument(metavar="TARGET", check=check_model)
]
Seed = Annotated[int, Meta(description="Random seed; results are reproducible.")]
FromCheckpoint = Annotated[float | None, Meta(description="Default: from the checkpoint's generation config.")]
Domains = Annotated[
    tuple[str, ...],
    Meta(
        description="A domain of the built-in templates (repeatable): code, math, agent, science, multilingual, chat, "
        "long."
    ),
    Flag("--domain"),
]
Corpus = Annotated[tuple[Path, ...], Meta(description="A corpus written by synth (repeatable).")]
Batch = Annotated[int, Meta(description="Maximum batch size.")]
AnswerTokens = Annotated[int, Meta(description="Maximum tokens per answer.")]


class _SynthFlags(Record, frozen=True):
    weights: Target
    out: Annotated[Path, Meta(description="The corpus, one example per line. Existing answers are not repeated.")]
    prompts: Annotated[
        tuple[Path, ...],
        Meta(
            description='A file of prompts (repeatable), one per line: {"domain": "law", "messages": [{"role": "user", '
            "...}]}."
        ),
    ] = ()
    turns: Annotated[
        str,
        Meta(description="For conversations in files: all regenerates every answer in them; last, only the last."),
    ] = "all"
    domains: Domains = ()
    count: Annotated[int, Meta(description="Prompts per domain.")] = 1000
    samples: Annotated[int, Meta(description="Answers per prompt.")] = 1
    max_tokens: AnswerTokens = 2048
    temperature: FromCheckpoint = None
    top_p: FromCheckpoint = None
    shard: Annotated[str, Meta(description="Answer only this part of the prompts."), Flag(metavar="i/n")] = "1/1"
    batch: Batch = 64
    draft: Annotated[str | None, Meta(description="A drafter to answer faster with, or suffix.")] = None
    seed: Seed = 0
    device: Device = None


@verb(app, "synth", _SynthFlags)
def synth(flags: _SynthFlags) -> int:
    """Generate a corpus: prompts answered by the target itself, with the serving engine."""
    from redline.worker.config import SUFFIX, EngineConfig, drafts_of

    if flags.draft is not None and flags.draft != SUFFIX:
        check_drafter(Path(flags.draft))
    from redline.draft.corpus.synth import SynthConfig, run
    from redline.draft.stages import fill

    values = _values(flags)
    batch, draft, device = values.pop("batch"), values.pop("draft"), values.pop("device")
    speculation = None if draft is None else drafts_of(draft)
    step = batch if batch > 512 else None  # a step needs a token per answer; up to 512, use the device's default
    engine = EngineConfig(max_running=batch, step_tokens=step, device=device, speculation=speculation)
    return _worked(run, fill(SynthConfig, "synth", values, {"engine": engine}))


class _CaptureFlags(Record, frozen=True):
    target: Target
    corpus: Corpus
    out: Annotated[Path, Meta(description="A folder of shards and their index. Existing shards are not recomputed.")]
    disk: Annotated[str | None, Meta(description="Stop before it takes more space: 500GB."), Flag(metavar="SIZE")] = (
        None
    )
    max_tokens: Annotated[int | None, Meta(description="Split longer sequences into windows of this size.")] = None
    layer_ids: Annotated[
        tuple[int, ...],
        Meta(description="Layer to capture the input of (repeatable). Default: as in vLLM and SGLang."),
        Flag("--layer"),
    ] = ()
    other_answers: Annotated[bool, Meta(description="Accept a corpus answered by another target.")] = False
    device: Device = None


@verb(app, "capture", _CaptureFlags)
def capture(flags: _CaptureFlags) -> int:
    """Capture the target's hidden states over a corpus, stored for training."""
    from redline.deploy.config import size
    from redline.draft.corpus.capture import CaptureConfig, run
    from redline.draft.stages import fill

    disk = None if flags.disk is None else size(flags.disk, "--disk")
    values = _values(flags) | {"disk": disk, "layer_ids": flags.layer_ids or None}
    return _worked(run, fill(CaptureConfig, "capture", values, {}))


class _BudgetFlags(Record, frozen=True, omit_defaults=True):
    steps: Annotated[int | None, Meta(description="Budget in optimizer steps.")] = None
    tokens: Annotated[int | None, Meta(description="Budget in training tokens.")] = None
    seconds: Annotated[float | None, Meta(description="Budget in seconds. The first exhausted budget counts.")] = None


class _RecipeFlags(Record, frozen=True, omit_defaults=True):
    budget: _BudgetFlags
    lr: Annotated[float | None, Meta(description="The peak learning rate. \\[default: 0.001]")] = None
    tokens_per_batch: Annotated[int | None, Meta(description="Tokens per optimizer step. \\[default: 32768]")] = None
    max_length: Annotated[int | None, Meta(description="Longer sequences are cut. \\[default: 4096]")] = None
    loss: Annotated[str | None, Meta(description="kl, or lk: the hybrid. \\[default: kl]")] = None
    steps_ahead: Annotated[int | None, Meta(description="Steps of training-time test. \\[default: 7]")] = None
    l2_sp: Annotated[float | None, Meta(description="Penalty towards --start. \\[default: 0]")] = None
    seed: Annotated[int | None, Meta(description="Random seed; reproducible. \\[default: 1]")] = None


class _ArchitectureFlags(Record, frozen=True, omit_defaults=True):
    kind: Annotated[str | None, Meta(description="eagle3, dflash or dspark. \\[default: eagle3]")] = None
    architecture: Annotated[str | None, Meta(description="Of EAGLE-3: mla or llama. \\[default: mla]")] = None
    draft_vocab_size: Annotated[
        int | None,
        Meta(description="Tokens in its vocabulary. Default: all; 0: no head of its own, the target's."),
    ] = None


class _TrainFlags(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The keys of a recipe's [train]; those that are not given are the file's."""

    target: Target
    out: Annotated[Path, Meta(description="The drafter's folder. An interrupted training in it is resumed.")]
    capture: Annotated[Path | None, Meta(description="A folder written by `redline draft capture`.")] = None
    corpus: Annotated[tuple[Path, ...], Meta(description="Or a corpus; the target runs too (repeatable).")] = ()
    start: Annotated[
        Path | None, Meta(description="A drafter to start from. Default: a new one."), Flag(check=check_drafter)
    ] = None
    settings: Annotated[
        Path | None,
        Meta(description="A TOML file: a recipe, or only the keys of its table 'train'. Flags override it."),
    ] = None
    recipe: _RecipeFlags
    drafter: _ArchitectureFlags
    device: Device = None


@verb(app, "train", _TrainFlags)
def train(flags: _TrainFlags) -> int:
    """Train a drafter from the target's states: EAGLE-3 or a block drafter. Several GPUs: `accelerate launch`.

    Needs --capture or --corpus, and a budget: --steps, --tokens or --seconds. docs/drafters.md has every key.
    """
    from redline.draft.recipe import read_train
    from redline.draft.train.train import run

    values = _values(flags)
    values.pop("settings", None)
    return _worked(run, read_train(flags.settings, dict(_dotted(values))))


class _MineFlags(Record, frozen=True):
    target: Target
    draft: DrafterFolder
    corpus: Corpus
    out: Annotated[Path, Meta(description="A folder for report, picture and corpora. Train on its mixed.jsonl.")]
    traces: Annotated[
        tuple[str, ...],
        Meta(description="Acceptance traces of a server, from `serve --draft-trace` (repeatable)."),
        Flag(metavar="[DOMAIN=]FILE"),
    ] = ()
    steps: Annotated[int, Meta(description="Draft tokens per round."), Flag("--k")] = 3
    proposals: Annotated[str, Meta(description="onehot or sampled: how drafts are proposed.")] = "onehot"
    temperature: FromCheckpoint = None
    top_p: FromCheckpoint = None
    examples: Annotated[int, Meta(description="Maximum scored examples per domain. 0: all.")] = 0
    traffic: Annotated[
        tuple[str, ...],
        Meta(description="A domain's share of the traffic (repeatable)."),
        Flag(metavar="DOMAIN=SHARE"),
    ] = ()
    budget: Annotated[int, Meta(description="Answer tokens to train on.")] = 1_000_000
    replay: Annotated[float, Meta(description="Minimum share of them from the base set.")] = 0.5
    cap: Annotated[float, Meta(description="Maximum share of the hard ones in one bucket.")] = 0.5
    equal_domains: Annotated[bool, Meta(description="The same tokens for every domain.")] = False
    choose: Annotated[str, Meta(description="gap, or uniform: the control arm.")] = "gap"
    answers: Annotated[int, Meta(description="New answers per selected prompt.")] = 4
    windows: Annotated[float, Meta(description="Share of the hard ones cut from existing answers.")] = 0.25
    window_tokens: Annotated[int, Meta(description="Tokens per such window.")] = 2048
    max_tokens: Annotated[int, Meta(description="Maximum tokens per new answer.")] = 4096
    batch: Batch = 64
    seed: Seed = 0
    device: Device = None


@verb(app, "mine", _MineFlags)
def mine(flags: _MineFlags) -> int:
    """Find where the drafter is weak and could improve; selects the next training data."""
    from redline.draft.mine.mine import run
    from redline.draft.recipe import mine_config

    return _worked(run, mine_config(_values(flags) | {"traffic": _shares(flags.traffic)}))


class _EvaluateFlags(Record, frozen=True):
    target: Target
    draft: DrafterFolder
    prompts: Annotated[Path | None, Meta(description="A file of prompts, JSONL.")] = None
    corpus: Annotated[Path | None, Meta(description="Or a corpus; its prompts are answered again.")] = None
    domains: Domains = ()
    count: Annotated[int, Meta(description="Prompts per such domain.")] = 200
    k: Annotated[tuple[int, ...], Meta(description="Drafts per round (repeatable). Default: 1 to 7.")] = (
        1, 2, 3, 4, 5, 6, 7,
    )  # fmt: skip
    modes: Annotated[
        tuple[str, ...], Meta(description="greedy or sampled (repeatable). Default: both."), Flag("--mode")
    ] = ("greedy", "sampled")
    rounds: Annotated[int, Meta(description="Rounds per domain, k and mode. 0: every prompt once.")] = 2000
    temperature: Annotated[float, Meta(description="Temperature of the sampled mode.")] = 1.0
    top_p: Annotated[float, Meta(description="Top-p of the sampled mode.")] = 1.0
    max_tokens: AnswerTokens = 1024
    batch: Batch = 16
    suffix: Annotated[bool, Meta(description="Also propose suffix matches; long ones replace the drafter's.")] = False
    offline: Annotated[int, Meta(description="Answers per domain also scored by teacher forcing.")] = 64
    seed: Seed = 0
    save: Annotated[Path | None, Meta(description="Write the result as JSON, with pictures.")] = None
    device: Device = None


@verb(app, "eval", _EvaluateFlags)
def evaluate(flags: _EvaluateFlags) -> int:
    """Measure the acceptance length by domain and k, greedy and sampled, in the engine itself."""
    from redline.bench.record import provenance
    from redline.draft.evaluate import run
    from redline.draft.recipe import eval_config

    return _worked(run, eval_config(_values(flags)), provenance("torch"))


class _ExportFlags(Record, frozen=True):
    target: Target
    drafter: Annotated[DrafterFolder, Flag("--draft", check=check_drafter)]
    out: Annotated[Path, Meta(description="The output folder; may be the drafter's own.")]
    latent: Annotated[
        str,
        Meta(
            description="target: pad a latent narrower than the target's with zeros to its width, as vLLM requires (it "
            "keeps both in one cache); no value changes. own: the width it was trained with, a smaller file. Redline "
            "reads either and drops the padding."
        ),
        Flag(metavar="target|own"),
    ] = "target"


@verb(app, "export", _ExportFlags)
def export(flags: _ExportFlags) -> int:
    """Export a drafter for other engines: config.json and model.safetensors, the same files as of `train` and `run`."""
    from redline.draft.export import ExportConfig, run
    from redline.draft.stages import fill

    return run(fill(ExportConfig, "export", _values(flags), {}), plain_console())


class _RunFlags(Record, frozen=True):
    recipe: Annotated[
        Path,
        Meta(description="Such as redline/draft/recipe_example.toml; docs/drafters.md."),
        Argument(metavar="recipe.toml"),
    ]
    out: Annotated[Path | None, Meta(description="The output folder. Default: from the recipe.")] = None
    device: Annotated[
        str | None,
        Meta(description="cpu or cuda, for every stage. Default: from the recipe, else the GPU, if there is one."),
    ] = None


@verb(app, "run", _RunFlags)
def run_recipe(flags: _RunFlags) -> int:
    """Run all stages from one file, skipping finished ones; OUT/drafter is the argument for `serve --draft`."""
    from redline.bench.record import provenance
    from redline.draft.recipe import RunConfig, run

    return _worked(run, RunConfig(**_values(flags)), provenance("torch"))


def _values(flags: Record) -> dict[str, Any]:
    """The flags by name, with paths as text."""
    return msgspec.to_builtins(flags, enc_hook=str)


def _dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables by dotted key, such as recipe.budget.steps."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _dotted(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _worked(run: Callable[..., int], config: Any, *more: Any) -> int:
    console = plain_console()
    return until_interrupted(lambda: run(config, console, *more), console, "run the same command to resume")


def _shares(given: tuple[str, ...]) -> dict[str, float]:
    """Parse ["code=0.5"] into {"code": 0.5}. Raises typer.BadParameter for anything else."""
    shares: dict[str, float] = {}
    for text in given:
        domain, sign, share = text.partition("=")
        try:
            shares[domain] = float(share)
        except ValueError:
            sign = ""
        if not (domain and sign):
            raise typer.BadParameter(f"{text!r}; expected DOMAIN=SHARE, such as code=0.3", param_hint="--traffic")
    return shares
