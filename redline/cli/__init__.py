"""The command line. Each verb is a module; those that compute import torch when they run: `--help` is instant."""

import os
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from redline.cli.console import plain_console
from redline.cli.draft import app as draft
from redline.cli.terminal import Terminal, one_line
from redline.errors import ConfigError, RedlineError
from redline.fleet import config as deployment
from redline.fleet.serve import serve as run_server

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="""From a published Kimi K2 checkpoint to record serving speed.

    Start with  [bold]redline serve models/kimi-nano[/bold]  and talk to it with  [bold]redline chat[/bold].
    Redline runs on Linux.""",
)
bench = typer.Typer(no_args_is_help=True, help="Speed, each number beside the least time that the hardware allows.")
app.add_typer(bench, name="bench")
app.add_typer(draft, name="draft")

SYNTHETIC = (
    "For benchmarks: drafting and verifying run in full, and a draw says how many drafts hold. 0.83,0.6,0.45: the "
    "share of rounds in which the first 1, 2, 3 all hold; 2.88: the mean tokens of a round. Answers are not the "
    "model's, so a server listens on this machine alone. Absent: drafts are verified."
)
Folder = Annotated[Path, typer.Argument(help="A checkpoint's folder: config.json, *.safetensors, tiktoken.model.")]


@app.command()
def serve(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER|deployment.toml", help="A checkpoint's folder, or a TOML file with the keys below."
        ),
    ],
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. 0.0.0.0: every network; then set keys_file.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port. 0: any free one.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model (repeatable). Absent: the folder's name.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of one request, prompt and answer. Absent: what fits.")
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for all contexts: 500MB, 2GB. Absent: a quarter of what is free, at most 4 GiB.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="bf16|fp8|float32",
            help="How pages hold contexts. fp8 (e4m3): twice as many tokens fit, rounded to 4 bits. Absent: bf16.",
        ),
    ] = None,
    keys_file: Annotated[str | None, typer.Option(help="API keys, one per line.")] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            metavar="debug|info|warning|error",
            help="What is written while it serves. Absent: info, a line per request.",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Absent: the GPU, if there is one.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|suffix",
            help="Speculate: the folder of an EAGLE-3 drafter of this model, or `suffix`, which repeats what the text "
            "has said before. The answers are the same, sooner. Absent: no speculation.",
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Tokens drafted per step and request, 0 to 15 at most; fewer where they do not pay. Absent: 3.",
        ),
    ] = None,
    draft_head_bits: Annotated[
        int | None,
        typer.Option(
            metavar="16|8",
            help="How the drafter's head is kept: 8 halves the bytes of a pass's largest part on a GPU, and drafts are "
            "rounded a little. Absent: 16.",
        ),
    ] = None,
    draft_trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write what was accepted where, for `redline draft mine`. The file holds users' text."
        ),
    ] = None,
    synthetic_acceptance: Annotated[str | None, typer.Option(metavar="RATES|LENGTH", help=SYNTHETIC)] = None,
) -> None:
    """Serve a model over the OpenAI API.

    Loads the checkpoint, then answers /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /health, /metrics.
    Every flag is a key of deployment.toml (--draft and those after it: of its table engine.speculation), and wins over
    the file.
    """
    given = {
        "host": host,
        "port": port,
        "served_model_name": served_model_name,
        "keys_file": keys_file,
        "log_level": log_level,
        "engine.max_model_len": max_model_len,
        "engine.kv_memory": kv_memory,
        "engine.kv_dtype": kv_dtype,
        "engine.device": device,
        "engine.speculation": draft,
        "engine.speculation.tokens": draft_tokens,
        "engine.speculation.head_bits": draft_head_bits,
        "engine.speculation.trace": draft_trace,
        "engine.speculation.synthetic_acceptance": synthetic_acceptance,
    }
    flags = {key: value for key, value in given.items() if value is not None}
    raise typer.Exit(run_server(deployment.read(source, flags), Terminal()))


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="A server's address.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Absent: the first that the server names.")] = None,
    instant: Annotated[bool, typer.Option("--instant", help="Answer without thinking first.")] = False,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.6,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    key: Annotated[
        str | None, typer.Option(envvar="REDLINE_API_KEY", help="API key, where the server wants one.")
    ] = None,
    prompt: Annotated[str | None, typer.Argument(help="Ask this and leave. Absent: a conversation.")] = None,
) -> None:
    """Talk to a server in the terminal: the thinking dimmed, the answer as it comes, tokens/s at the end."""
    from redline.cli.chat import Client, talk

    raise typer.Exit(talk(Client(url, key, model, not instant, temperature, system), prompt, Terminal()))


@app.command(name="eval")
def evaluate(
    folder: Folder,
    sets: Annotated[Path | None, typer.Option(help="The folder of prompts. Absent: FOLDER/eval.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each kind of each set, at most; always the same. Absent: all.")
    ] = None,
    run_code: Annotated[
        bool,
        typer.Option("--run-code", help="Run the functions that the model writes, each in a closed child process."),
    ] = False,
    against: Annotated[Path | None, typer.Option(help="A second checkpoint, compared pair by pair.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="Of the pages: bf16, fp8 or float32.")] = "bf16",
    save: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
) -> None:
    """Grade a model on the prompts in FOLDER/eval: greedy, thinking, a table by kind."""
    from redline.cli.eval import GradeConfig, run

    config = GradeConfig(
        folder=folder, sets=sets, limit=limit, run_code=run_code, against=against, kv_dtype=kv_dtype, save=save
    )
    raise typer.Exit(run(config, plain_console()))


@app.command()
def doctor(folder: Annotated[Path | None, typer.Argument(help="A checkpoint whose fit to check.")] = None) -> None:
    """What this machine has, what fits on it, and why: each number with its arithmetic."""
    from redline.cli.doctor import doctor as run

    raise typer.Exit(run(folder, Terminal()))


@bench.command(name="decode")
def bench_decode(
    folder: Annotated[
        Path | None, typer.Argument(help="A checkpoint's folder, or none: then --shape says what is built.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="kimi-k2.6 or kimi-nano: a step on random weights, no checkpoint needed.")
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
    save: Annotated[
        Path | None, typer.Option(help="Write the result as JSON; a shape's cases are added to the file's list.")
    ] = None,
) -> None:
    """Milliseconds per decode step by batch and context, with floor and ratio; of a shape, also of each op.

    With --draft-shape a round of speculation instead: the round, what verifies and what drafts in it, the step without
    drafts beside it in the same run, floors, tokens/s, and the time in which the device did nothing.
    """
    from redline.cli.round_tables import RoundsConfig, bench_rounds
    from redline.cli.step_tables import DepthConfig, bench_depth
    from redline.cli.step_tables import bench_decode as run

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


@bench.command(name="speculate")
def bench_speculate(
    folder: Folder,
    draft: Annotated[Path, typer.Option(help="The drafter's folder.")],
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
    from redline.cli.speculation_tables import SpeculateConfig
    from redline.cli.speculation_tables import run as measure

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


def main() -> None:
    """Run the verb of the command line and end the process with its exit code, by SystemExit.

    An error is one line and exit code 1, a mistake in the flags typer's own message and code 2. REDLINE_DEBUG=1 prints
    the traceback as well.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        _accept_any_text(stream)
    try:
        app()
    except RedlineError as error:
        code = _report(str(error))
    except OSError as error:
        code = _report(": ".join(filter(None, [error.filename and str(error.filename), error.strerror or str(error)])))
    except Exception as error:
        code = _report(f"{type(error).__name__}: {one_line(str(error))}; this is a mistake of ours{_kept_traceback()}")
    else:
        code = 0
    finally:
        _flush()
    sys.exit(code)


def _accept_any_text(stream: TextIO | None) -> None:
    """Have a stream write a character that its encoding lacks, or half of one, as an escape instead of raising."""
    reconfigure = getattr(stream, "reconfigure", None)  # None where the stream is closed
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _report(message: str) -> int:
    if os.environ.get("REDLINE_DEBUG"):
        traceback.print_exc()
    with suppress(OSError):
        screen = Terminal(stderr=True)
        screen.print("error:", end=" ", style="red")
        screen.print(message, highlight=False, soft_wrap=True)
    return 1


def _kept_traceback() -> str:
    """Where the traceback of the current exception is kept, as the end of a sentence."""
    if os.environ.get("REDLINE_DEBUG"):
        return ""
    try:
        descriptor, name = tempfile.mkstemp(prefix="redline-", suffix=".traceback")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(traceback.format_exc())
    except OSError:
        return "; REDLINE_DEBUG=1 prints the traceback"
    return f"; the traceback is in {name}"


def _flush() -> None:
    """Flush both outputs. What cannot be written, as to a pipe that nobody reads, is dropped, so that it is no second
    error when the interpreter ends."""
    open_ones: list[TextIO | None] = [sys.stdout, sys.stderr]  # None: closed before we began
    for stream in filter(None, open_ones):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
