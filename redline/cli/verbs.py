"""The commands, and the settings of the short ones. Those that need torch import it only when run."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec import Meta

from redline.cli.bench import app as bench
from redline.cli.console import plain_console
from redline.cli.deploy import DeploymentFlags, ManifestsFlags, manifests, serve, show_config
from redline.cli.draft import app as draft
from redline.cli.flags import Argument, AtLeast1, Flag, verb
from redline.cli.kernels import app as kernels
from redline.cli.options import ModelFolder
from redline.cli.quantize import AuditConfig, QuantizeFlags, audit, quantize
from redline.cli.simulate import SimulateConfig, simulate
from redline.cli.terminal import Terminal
from redline.cli.verify import VerifyFlags, verify
from redline.errors import ConfigError
from redline.folder import check_model
from redline.messages.base import Record

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="""From a published Kimi K2 checkpoint to record serving speed.

    Start with  [bold]redline serve --nano[/bold]  and talk to it with  [bold]redline chat[/bold].
    Redline runs on Linux.""",
)
app.add_typer(bench, name="bench")
app.add_typer(draft, name="draft")
app.add_typer(kernels, name="kernels")


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


verb(app, "quantize", QuantizeFlags)(quantize)
verb(app, "audit", AuditConfig)(audit)
verb(app, "verify", VerifyFlags)(verify)
verb(app, "serve", DeploymentFlags)(serve)
verb(app, "config", DeploymentFlags)(show_config)
verb(app, "manifests", ManifestsFlags)(manifests)
verb(app, "simulate", SimulateConfig)(simulate)


class _ChatFlags(Record, frozen=True):
    url: Annotated[str, Meta(description="The server's address.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, Meta(description="Model name. Default: the first that the server lists.")] = None
    instant: Annotated[bool, Meta(description="Answer without thinking first.")] = False
    temperature: Annotated[float, Meta(description="Sampling temperature. 0: greedy.")] = 0.6
    system: Annotated[str | None, Meta(description="A system prompt.")] = None
    key: Annotated[
        str | None, Meta(description="API key, if the server requires one."), Flag(envvar="REDLINE_API_KEY")
    ] = None
    history: Annotated[
        Path | None,
        Meta(
            description="File for the history of questions, which the arrow keys bring back; /dev/null disables it. "
            "Default: ~/.local/state/redline/questions."
        ),
        Flag(envvar="REDLINE_HISTORY"),
    ] = None
    prompt: Annotated[
        str | None,
        Meta(description="Ask this and exit; -: read standard input. Default: a conversation."),
        Argument(),
    ] = None


@verb(app, "chat", _ChatFlags)
def chat(flags: _ChatFlags) -> int:
    """Chat with a server in the terminal: dimmed thinking, a streamed answer, tokens/s at the end."""
    from redline.cli.chat import Client, talk

    client = Client(flags.url, flags.key, flags.model, not flags.instant, flags.temperature, flags.system)
    return talk(client, flags.prompt, Terminal(), Terminal(stderr=True), flags.history or _questions())


def _questions() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "redline" / "questions"


class _AgentFlags(Record, frozen=True):
    join: Annotated[str, Meta(description="The server's `cluster.listen` address."), Flag(metavar="tcp://HOST:PORT")]
    key_file: Annotated[Path, Meta(description="File with the secret shared by the deployment's machines.")]
    name: Annotated[
        str | None, Meta(description="Name of this machine, as `at` in [[workers]]. Default: its host name.")
    ] = None
    listen: Annotated[
        str | None,
        Meta(description="Address of this machine for the others. Default: the one towards HOST."),
        Flag(metavar="ADDRESS"),
    ] = None


@verb(app, "agent", _AgentFlags)
def agent(flags: _AgentFlags) -> int:
    """Run a deployment's workers on this machine, as ordered by its server, until SIGTERM or Ctrl-C."""
    from redline.deploy.agent import AgentConfig, check_name, run_agent, this_host

    return run_agent(AgentConfig(flags.join, flags.key_file, check_name(flags.name or this_host()), flags.listen))


AdminUrl = Annotated[
    str, Meta(description="Address of the admin routes (`admin_port`); a server prints it when it is ready.")
]
AdminKey = Annotated[str | None, Meta(description="A key from `admin_keys_file`."), Flag(envvar="REDLINE_ADMIN_KEY")]
ADMIN = "http://127.0.0.1:8001"


class _ExplainFlags(Record, frozen=True):
    request: Annotated[str, Meta(description="Request id: X-Request-Id of the response, or from the log."), Argument()]
    url: AdminUrl = ADMIN
    key: AdminKey = None


@verb(app, "explain", _ExplainFlags)
def explain(flags: _ExplainFlags) -> int:
    """Explain a request's routing: each candidate worker, the expected latency, and the measured one."""
    from redline.cli.explain import asked, show

    return show(asked(flags.request, flags.url, flags.key), plain_console())


class _ProfileFlags(Record, frozen=True):
    seconds: Annotated[float, Meta(description="Duration from now on, at most 60."), Argument()]
    url: AdminUrl = ADMIN
    key: AdminKey = None
    out: Annotated[Path, Meta(description="The file to write.")] = Path("redline-trace.json.gz")


@verb(app, "profile", _ProfileFlags)
def profile(flags: _ProfileFlags) -> int:
    """Profile a running server for some seconds: a trace of its requests and steps, for Perfetto."""
    from redline.cli.profile import taken, write
    from redline.disk import check_output

    check_output(flags.out)
    return write(taken(flags.seconds, flags.url, flags.key), flags.out, plain_console())


class _RoleFlags(Record, frozen=True):
    worker: Annotated[str, Meta(description="The worker's name, from /admin/status."), Argument()]
    role: Annotated[Literal["prefill", "decode", "both"], Argument()]
    url: AdminUrl = ADMIN
    key: AdminKey = None


@verb(app, "role", _RoleFlags)
def role(flags: _RoleFlags) -> int:
    """Switch a worker's role while it serves: prefill, decode or both. No request is lost."""
    from redline.cli.role import show, turn

    turn(flags.worker, flags.role, flags.url, flags.key)
    return show(flags.worker, flags.role, plain_console())


class GradeConfig(Record, frozen=True):
    """The settings of `redline eval`."""

    folder: ModelFolder
    sets: Annotated[
        Path | None,
        Meta(description="A folder of prompts, or the name of one in FOLDER/eval: vision. Default: FOLDER/eval."),
    ] = None
    limit: Annotated[
        AtLeast1 | None,
        Meta(description="Maximum prompts per kind and set; always the same ones. Default: all."),
    ] = None
    run_code: Annotated[
        bool,
        Meta(description="Run the functions that the model writes, each in a restricted child process."),
    ] = False
    against: Annotated[
        Path | None, Meta(description="A second checkpoint for a pairwise comparison."), Flag(check=check_model)
    ] = None
    kv_dtype: Annotated[str, Meta(description="Dtype of the KV cache: bf16, fp8 or float32.")] = "bf16"
    save: Annotated[Path | None, Meta(description="Write the report as JSON.")] = None


@verb(app, "eval", GradeConfig)
def evaluate(config: GradeConfig) -> int:
    """Grade a model on the prompts in FOLDER/eval: greedy, with thinking; prints a table by kind."""
    from redline.cli.eval import run

    return run(config, plain_console())


def _check_geometry(folder: Path) -> None:
    check_model(folder, weights=False)


class _DoctorFlags(Record, frozen=True):
    folder: Annotated[
        Path | None, Meta(description="A checkpoint to check for fit."), Argument(check=_check_geometry)
    ] = None
    on: Annotated[
        str | None,
        Meta(description="Predict for these GPUs instead, as in '8 x H200'. Without FOLDER: for Kimi K2.6."),
        Flag(metavar="MACHINE"),
    ] = None
    self_test: Annotated[
        bool,
        Meta(description="Compare every GPU kernel with its reference here, and time a step: minutes, on a free GPU."),
    ] = False
    save: Annotated[
        Path | None, Meta(description="Of --self-test: the report, as JSON. Default: redline-self-test.json.")
    ] = None


@verb(app, "doctor", _DoctorFlags)
def doctor(flags: _DoctorFlags) -> int:
    """Report this machine's hardware, what fits on it, and why: each number with its arithmetic."""
    if flags.self_test:
        from redline.cli.doctor_self_test import doctor_self_test

        if flags.on is not None or flags.folder is not None:
            raise ConfigError("--self-test tests this machine's GPU: give it neither FOLDER nor --on")
        return doctor_self_test(flags.save or Path("redline-self-test.json"), Terminal())
    if flags.save is not None:
        raise ConfigError("--save is for --self-test only")
    if flags.on is not None:
        from redline.cli.doctor_on import doctor_on

        return doctor_on(flags.on, flags.folder, Terminal())
    from redline.cli.doctor import doctor as run

    return run(flags.folder, Terminal())
