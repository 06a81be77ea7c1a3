"""The command line. Each command is a module; those that need torch import it only when run, so `--help` is instant."""

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
from redline.cli.flags import verb
from redline.cli.options import Folder, geometry, model
from redline.cli.quantize import audit, quantize
from redline.cli.simulate import SimulateConfig, simulate
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before every command."""


app.command()(quantize)
app.command()(audit)
app.command()(verify)


app.command()(serve)
app.command(name="config")(show_config)
app.command()(manifests)
verb(app, "simulate", SimulateConfig)(simulate)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name. Default: the first that the server lists.")] = None,
    instant: Annotated[bool, typer.Option("--instant", help="Answer without thinking first.")] = False,
    temperature: Annotated[float, typer.Option(help="Sampling temperature. 0: greedy.")] = 0.6,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    key: Annotated[
        str | None, typer.Option(envvar="REDLINE_API_KEY", help="API key, if the server requires one.")
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            envvar="REDLINE_HISTORY",
            help="File for the history of questions, which the arrow keys bring back; /dev/null disables it. "
            "Default: ~/.local/state/redline/questions.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Argument(help="Ask this and exit; -: read standard input. Default: a conversation.")
    ] = None,
) -> None:
    """Chat with a server in the terminal: dimmed thinking, a streamed answer, tokens/s at the end."""
    from redline.cli.chat import Client, talk

    client = Client(url, key, model, not instant, temperature, system)
    raise typer.Exit(talk(client, prompt, Terminal(), Terminal(stderr=True), history or _questions()))


def _questions() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "redline" / "questions"


@app.command()
def agent(
    join: Annotated[str, typer.Option(metavar="tcp://HOST:PORT", help="The server's `cluster.listen` address.")],
    key_file: Annotated[Path, typer.Option(help="File with the secret shared by the deployment's machines.")],
    name: Annotated[
        str | None, typer.Option(help="Name of this machine, as `at` in [[workers]]. Default: its host name.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address of this machine for the others. Default: the one towards HOST."),
    ] = None,
) -> None:
    """Run a deployment's workers on this machine, as ordered by its server, until SIGTERM or Ctrl-C."""
    from redline.deploy.agent import AgentConfig, check_name, run_agent, this_host

    raise typer.Exit(run_agent(AgentConfig(join, key_file, check_name(name or this_host()), listen)))


@app.command()
def explain(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="Request id: X-Request-Id of the response, or from the log.")
    ],
    url: Annotated[str, typer.Option(help="Address of the admin routes (`admin_port`).")] = "http://127.0.0.1:8001",
    key: Annotated[str | None, typer.Option(envvar="REDLINE_ADMIN_KEY", help="A key from `admin_keys_file`.")] = None,
) -> None:
    """Explain a request's routing: each candidate worker, the expected latency, and the measured one."""
    from redline.cli.explain import asked, show

    raise typer.Exit(show(asked(request, url, key), plain_console()))


@app.command()
def profile(
    seconds: Annotated[float, typer.Argument(metavar="SECONDS", help="Duration from now on, at most 60.")],
    url: Annotated[str, typer.Option(help="Address of the admin routes (`admin_port`).")] = "http://127.0.0.1:8001",
    key: Annotated[str | None, typer.Option(envvar="REDLINE_ADMIN_KEY", help="A key from `admin_keys_file`.")] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("redline-trace.json.gz"),
) -> None:
    """Profile a running server for some seconds: a trace of its requests and steps, for Perfetto."""
    from redline.cli.profile import taken, write
    from redline.disk import check_output

    check_output(out)
    raise typer.Exit(write(taken(seconds, url, key), out, plain_console()))


@app.command()
def role(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="The worker's name, from /admin/status.")],
    role: Annotated[Literal["prefill", "decode", "both"], typer.Argument(metavar="ROLE")],
    url: Annotated[str, typer.Option(help="Address of the admin routes (`admin_port`).")] = "http://127.0.0.1:8001",
    key: Annotated[str | None, typer.Option(envvar="REDLINE_ADMIN_KEY", help="A key from `admin_keys_file`.")] = None,
) -> None:
    """Switch a worker's role while it serves: prefill, decode or both. No request is lost."""
    from redline.cli.role import show, turn

    turn(worker, role, url, key)
    raise typer.Exit(show(worker, role, plain_console()))


@app.command(name="eval")
def evaluate(
    folder: Folder,
    sets: Annotated[Path | None, typer.Option(help="The folder of prompts. Default: FOLDER/eval.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum prompts per kind and set; always the same ones. Default: all.")
    ] = None,
    run_code: Annotated[
        bool,
        typer.Option("--run-code", help="Run the functions that the model writes, each in a restricted child process."),
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="A second checkpoint for a pairwise comparison.", callback=model)
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="Dtype of the KV cache: bf16, fp8 or float32.")] = "bf16",
    save: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
) -> None:
    """Grade a model on the prompts in FOLDER/eval: greedy, with thinking; prints a table by kind."""
    from redline.cli.eval import GradeConfig, run

    config = GradeConfig(
        folder=folder, sets=sets, limit=limit, run_code=run_code, against=against, kv_dtype=kv_dtype, save=save
    )
    raise typer.Exit(run(config, plain_console()))


@app.command()
def doctor(
    folder: Annotated[Path | None, typer.Argument(help="A checkpoint to check for fit.", callback=geometry)] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE",
            help="Predict for these GPUs instead, as in '8 x H200'. Without FOLDER: for Kimi K2.6.",
        ),
    ] = None,
) -> None:
    """Report this machine's hardware, what fits on it, and why: each number with its arithmetic."""
    if on is not None:
        from redline.cli.doctor_on import doctor_on

        raise typer.Exit(doctor_on(on, folder, Terminal()))
    from redline.cli.doctor import doctor as run

    raise typer.Exit(run(folder, Terminal()))


def main() -> None:
    """Run the command line and end the process with its exit code, by SystemExit.

    An error prints one line, exit code 1; a usage error prints typer's own message, code 2. REDLINE_DEBUG=1 prints the
    traceback as well.
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
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 turns Ctrl-C during __set_name__ into this
            raise error.__cause__ from None
        if isinstance(error, ImportError) and (why := unimportable(error)) is not None:
            sys.exit(_report(why))
        if isinstance(error, MemoryError):
            sys.exit(_report("no memory is left: check ulimit -v and the container's memory limit"))
        code = _report(f"{type(error).__name__}: {one_line(str(error))}; this is a bug in Redline{_kept_traceback()}")
    else:
        code = 0
    finally:
        _flush()
    sys.exit(code)


def _accept_any_text(stream: TextIO | None) -> None:
    """Make a stream write characters that its encoding lacks, and lone surrogates, as escapes instead of raising."""
    reconfigure = getattr(stream, "reconfigure", None)  # None if the stream is closed
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
    """Save the traceback of the current exception to a file; returns the end of a sentence that names the file."""
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
    """Flush stdout. Raises OSError, except for a broken pipe."""
    if sys.stdout is not None and not sys.stdout.closed:
        with suppress(BrokenPipeError):
            sys.stdout.flush()


def _flush() -> None:
    """Flush stdout and stderr."""
    open_ones: list[TextIO | None] = [sys.stdout, sys.stderr]  # None if closed before the process started
    for stream in filter(None, open_ones):
        drop_held(stream)
