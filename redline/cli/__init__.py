"""The command line. Each verb is a module; those that compute import torch when they run: `--help` is instant."""

import os
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TextIO

import typer

from redline.cli import bench
from redline.cli.console import plain_console
from redline.cli.deploy import manifests, serve, show_config
from redline.cli.draft import app as draft
from redline.cli.options import Folder, geometry, model
from redline.cli.quantize import audit, quantize
from redline.cli.simulate import simulate
from redline.cli.terminal import Terminal, one_line
from redline.cli.verify import verify
from redline.disk import drop_held
from redline.errors import RedlineError, unimportable

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="""From a published Kimi K2 checkpoint to record serving speed.

    Start with  [bold]redline serve --nano[/bold]  and talk to it with  [bold]redline chat[/bold].
    Redline runs on Linux.""",
)
app.add_typer(bench.app, name="bench")
app.add_typer(draft, name="draft")


def _version(asked: bool) -> None:
    if asked:
        from redline import __version__

        typer.echo(f"redline {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """What stands before every verb."""


app.command()(quantize)
app.command()(audit)
app.command()(verify)


app.command()(serve)
app.command(name="config")(show_config)
app.command()(manifests)
app.command()(simulate)


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
    history: Annotated[
        Path | None,
        typer.Option(
            envvar="REDLINE_HISTORY",
            help="A file that keeps the questions of conversations, for the arrows to bring back; /dev/null keeps "
            "none. Absent: ~/.local/state/redline/questions.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Argument(help="Ask this and leave; -: standard input. Absent: a conversation.")
    ] = None,
) -> None:
    """Talk to a server in the terminal: the thinking dimmed, the answer as it comes, tokens/s at the end."""
    from redline.cli.chat import Client, talk

    client = Client(url, key, model, not instant, temperature, system)
    raise typer.Exit(talk(client, prompt, Terminal(), Terminal(stderr=True), history or _questions()))


def _questions() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "redline" / "questions"


@app.command()
def agent(
    join: Annotated[str, typer.Option(metavar="tcp://HOST:PORT", help="The server: its `cluster.listen`.")],
    key_file: Annotated[Path, typer.Option(help="The secret that the deployment's machines share.")],
    name: Annotated[
        str | None, typer.Option(help="Of this machine, as `at` in [[workers]]. Absent: its host name.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Where this machine is reached. Absent: its address towards HOST."),
    ] = None,
) -> None:
    """Run a deployment's workers on this machine, as its server orders, until told to leave (SIGTERM, Ctrl-C)."""
    from redline.fleet.agent import AgentConfig, check_name, run_agent, this_host

    raise typer.Exit(run_agent(AgentConfig(join, key_file, check_name(name or this_host()), listen)))


@app.command()
def explain(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="Its id: X-Request-Id of the answer, or of the log.")
    ],
    url: Annotated[str, typer.Option(help="Where the admin routes are (`admin_port`).")] = "http://127.0.0.1:8001",
    key: Annotated[str | None, typer.Option(envvar="REDLINE_ADMIN_KEY", help="A key of `admin_keys_file`.")] = None,
) -> None:
    """Why a request went where it did: each worker that could have had it, what was expected, and what came."""
    from redline.cli.explain import asked, show

    raise typer.Exit(show(asked(request, url, key), plain_console()))


@app.command()
def profile(
    seconds: Annotated[float, typer.Argument(metavar="SECONDS", help="From now on, 60 at most.")],
    url: Annotated[str, typer.Option(help="Where the admin routes are (`admin_port`).")] = "http://127.0.0.1:8001",
    key: Annotated[str | None, typer.Option(envvar="REDLINE_ADMIN_KEY", help="A key of `admin_keys_file`.")] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("redline-trace.json.gz"),
) -> None:
    """What a running server does in the next seconds, request by request and step by step, as a trace for Perfetto."""
    from redline.cli.profile import taken, write
    from redline.disk import check_output

    check_output(out)
    raise typer.Exit(write(taken(seconds, url, key), out, plain_console()))


@app.command()
def role(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its name, as /admin/status has it.")],
    role: Annotated[Literal["prefill", "decode", "both"], typer.Argument(metavar="ROLE")],
    url: Annotated[str, typer.Option(help="Where the admin routes are (`admin_port`).")] = "http://127.0.0.1:8001",
    key: Annotated[str | None, typer.Option(envvar="REDLINE_ADMIN_KEY", help="A key of `admin_keys_file`.")] = None,
) -> None:
    """Give a worker another role while it serves: prefill, decode or both. No request is lost."""
    from redline.cli.role import show, turn

    turn(worker, role, url, key)
    raise typer.Exit(show(worker, role, plain_console()))


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
    against: Annotated[
        Path | None, typer.Option(help="A second checkpoint, compared pair by pair.", callback=model)
    ] = None,
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
def doctor(
    folder: Annotated[Path | None, typer.Argument(help="A checkpoint whose fit to check.", callback=geometry)] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE",
            help="GPUs that are not here, as in '8 x H200': what they would give. Without FOLDER: of Kimi K2.6.",
        ),
    ] = None,
) -> None:
    """What this machine has, what fits on it, and why: each number with its arithmetic."""
    if on is not None:
        from redline.cli.doctor_on import doctor_on

        raise typer.Exit(doctor_on(on, folder, Terminal()))
    from redline.cli.doctor import doctor as run

    raise typer.Exit(run(folder, Terminal()))


def main() -> None:
    """Run the verb of the command line and end the process with its exit code, by SystemExit.

    An error is one line and exit code 1, a mistake in the flags typer's own message and code 2. REDLINE_DEBUG=1 prints
    the traceback as well.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        _accept_any_text(stream)
    try:
        try:
            app()
        finally:
            _flush_page()
    except RedlineError as error:
        code = _report(str(error))
    except OSError as error:
        code = _report(": ".join(filter(None, [error.filename and str(error.filename), error.strerror or str(error)])))
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C as a class was made: Python 3.11 says RuntimeError
            raise error.__cause__ from None
        if isinstance(error, ImportError) and (why := unimportable(error)) is not None:
            sys.exit(_report(why))
        if isinstance(error, MemoryError):
            sys.exit(_report("no memory is left: ulimit -v, or a container's limit, may bound it"))
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
        from rich.text import Text

        screen = Terminal(stderr=True)
        screen.print(Text.assemble(("error:", "red"), " ", message), highlight=False, soft_wrap=True)
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


def _flush_page() -> None:
    """Write what a verb has printed and Python still holds. Raises OSError, unless the reader of a pipe has gone."""
    if sys.stdout is not None and not sys.stdout.closed:
        with suppress(BrokenPipeError):
            sys.stdout.flush()


def _flush() -> None:
    """Flush both outputs."""
    open_ones: list[TextIO | None] = [sys.stdout, sys.stderr]  # None: closed before we began
    for stream in filter(None, open_ones):
        drop_held(stream)
