"""Checks of files that could become outdated unnoticed: the list of settings, the docs, the dependencies, security
rules.

A list that is frozen here makes each change a visible decision: a new flag or key needs a new line.
"""

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
import typer
from setuptools import find_namespace_packages

import redline
from redline.__main__ import PYTHONS
from redline.cli import app
from redline.deploy.config import ServeConfig, Workers
from redline.deploy.process import OF_A_WORKER

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = sorted(path.name for path in (ROOT / "redline").iterdir() if (path / "__init__.py").exists())
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("models/*/README.md"),
        *(ROOT / folder / "README.md" for folder in ("lab", "nano")),
    ]
)

PROGRAMS = sorted(path for folder in ("redline", "nano") for path in (ROOT / folder).rglob("*.py"))
SHIPPED = [path for path in PROGRAMS if path.is_relative_to(ROOT / "redline")]


# ------------------------------------------------------------------------------------------------- what can be set


# Flags common to all verbs that measure a server over HTTP.
OF_A_SERVER = (
    "--base-url --host --port --endpoint --backend --model --served-model-name --tokenizer --header --extra-body "
    "--insecure --html --disable-tqdm --ready-check-timeout-sec --connect-timeout-sec --first-token-timeout-sec "
    "--silence-timeout-sec --request-timeout-sec "
)
OF_A_DEPLOYMENT = (
    "--nano --set --host --port --served-model-name --max-model-len --kv-memory --kv-dtype --keys-file --device "
    "--max-running --admit-together --step-tokens --ranks --draft --draft-tokens --draft-head-bits --draft-trace "
    "--synthetic-acceptance --log-level"
)
FLAGS = {
    "serve": OF_A_DEPLOYMENT,
    "config": OF_A_DEPLOYMENT,
    "chat": "--url --model --instant --temperature --system --key --history",
    "eval": "--sets --limit --run-code --against --kv-dtype --save",
    "manifests": "--image --kind --name --claim --secret",
    "agent": "--join --key-file --name --listen",
    "explain": "--url --key",
    "role": "--url --key",
    "profile": "--url --key --out",
    "kernels build": "--shape --arch --max-running --draft --draft-tokens --draft-head-bits --max-model-len --kv-dtype "
    "--save",
    "quantize": "--format --level --also --kv-scales --text --tokens --most-weight-error --workers --device",
    "audit": "--text --tokens --most-weight-error --most-output-error --most-kl --least-agreement --save --html "
    "--device",
    "doctor": "--on --self-test --save",
    "verify": "--server --requests --model --key --max-concurrency --save --again --device",
    "simulate": "--gpus --worker --roles --prompts --goodput --price --every --least --start --spare --time-scale "
    "--seed --keep-trace --json --html",
    "bench decode": "--shape --layers --alias --experts --routing --overlap --tokens --draft-shape --k "
    "--draft-head-bits --accept --kv-dtype --batch --context --repeats --ranks --save",
    "bench prefill": "--tokens --start --ranks --repeats --save",
    "bench speculate": "--draft --prompts --k --batch --questions --rounds --max-tokens --temperature --context "
    "--repeats --synthetic-acceptance --save",
    "bench serve": "--base-url --host --port --endpoint --backend --model --served-model-name --tokenizer "
    "--skip-tokenizer-init --header --extra-body --insecure --preset --dataset-name --dataset-path --num-prompts "
    "--input-len --output-len --random-input-len --random-output-len --random-range-ratio --random-prefix-len "
    "--sharegpt-output-len --custom-output-len --prefix-repetition-prefix-len --prefix-repetition-suffix-len "
    "--prefix-repetition-num-prefixes --prefix-repetition-output-len --no-oversample --disable-shuffle "
    "--skip-chat-template --seed "
    "--request-rate --burstiness --max-concurrency --ramp-up-strategy --ramp-up-start-rps --ramp-up-end-rps "
    "--num-warmups --max-seconds --ignore-eos --temperature --top-p --top-k --min-p --frequency-penalty "
    "--presence-penalty --repetition-penalty --logprobs --goodput --percentile-metrics --metric-percentiles "
    "--save-result --save-detailed --result-dir --result-filename --html --label --metadata --disable-tqdm "
    "--ready-check-timeout-sec --connect-timeout-sec --first-token-timeout-sec --silence-timeout-sec "
    "--request-timeout-sec",
    "bench leaderboard": OF_A_SERVER
    + "--workload --input-len --output-len --parallel --runs --num-warmups --ignore-eos "
    "--temperature --o200k --seed --save",
    "bench sweep": OF_A_SERVER + "--max-concurrency --request-rate --dataset-name --dataset-path --random-input-len "
    "--random-output-len --random-range-ratio --output-len --num-prompts --num-warmups --ignore-eos --temperature "
    "--goodput --attainment --search --to-the-end --gpus --seed --save",
    "bench accept": OF_A_SERVER + "--metrics-url --dataset-name --dataset-path --domain --num-prompts --output-len "
    "--temperature --max-concurrency --ignore-eos --seed --save",
    "bench compare": "--model-a --model-b --backend-a --backend-b --endpoint-a --endpoint-b --key-env-a --key-env-b "
    "--tokenizer --header --extra-body --insecure --max-concurrency --request-rate --num-prompts --num-warmups "
    "--blocks --until --max-blocks --figure --dataset-name --dataset-path --random-input-len --random-output-len "
    "--random-range-ratio --output-len --ignore-eos --temperature --seed --save --html --disable-tqdm "
    "--ready-check-timeout-sec --connect-timeout-sec --first-token-timeout-sec --silence-timeout-sec "
    "--request-timeout-sec",
    "bench agentic": OF_A_SERVER + "--history --users --session-rate --time-scale --sessions --max-seconds "
    "--ignore-eos --temperature --seed --save --synthesize --context-tokens --output-tokens --result-tokens "
    "--tool-s --think-s",
    "bench report": "--html",
    "draft synth": "--out --prompts --turns --domain --count --samples --max-tokens --temperature --top-p --shard "
    "--batch --draft --seed --device",
    "draft capture": "--corpus --out --disk --max-tokens --layer --other-answers --device",
    "draft train": "--out --capture --corpus --start --settings --steps --tokens --seconds --lr "
    "--tokens-per-batch --max-length --loss --steps-ahead --l2-sp --kind --architecture --draft-vocab-size --seed "
    "--device",
    "draft mine": "--draft --corpus --out --traces --k --proposals --temperature --top-p --examples --traffic --budget "
    "--replay --cap --equal-domains --choose --answers --windows --window-tokens --max-tokens --batch --seed --device",
    "draft eval": "--draft --prompts --corpus --domain --count --k --mode --rounds --temperature --top-p --max-tokens "
    "--batch --suffix --offline --seed --save --device",
    "draft export": "--draft --out --latent",
    "draft run": "--out --device",
}

# Flags of another project's command line, which its users type here unchanged.
PEERS_NAMES = {"--backend", "--backend-a", "--backend-b", "--disable-tqdm", "--disable-shuffle"}

KEYS = """
    weights host port api_replicas served_model_name keys_file responses_file reasoning_field cors_origins
    metrics_port page log_level access_log drain_s
    resume_s admin_port
    admin_keys_file unix_socket
    tls_cert tls_key
    per_key.requests_per_s per_key.concurrency per_key.tokens_per_minute per_key.tokens_per_day
    requests.default_max_tokens requests.most_max_tokens requests.timeout_s requests.queue_tokens
    requests.images requests.video_frames
    handoff.transport
    cluster.listen cluster.key_file cluster.kind
    events.endpoint events.replay events.topic
    engine.kv_memory engine.max_model_len engine.max_running engine.admit_together engine.step_tokens engine.step_ms
    engine.kv_dtype engine.device engine.kernels engine.ranks engine.random_weights engine.host_memory engine.disk
    engine.disk_size
    sla.ttft_ms sla.itl_ms steer.every_s steer.window_s steer.rest_s steer.horizon_s steer.spare_s
    engine.speculation.type engine.speculation.tokens engine.speculation.adaptive engine.speculation.trace
    engine.speculation.synthetic_acceptance engine.speculation.drafter engine.speculation.suffix
    engine.speculation.head_bits
    workers.role workers.count workers.least workers.name workers.devices workers.cores workers.at workers.weights
    workers.drafter
"""


@cache
def flags() -> dict[str, set[str]]:
    """verb -> its options, as registered with typer."""
    found: dict[str, set[str]] = {}

    def visit(command: Any, name: str) -> None:
        if hasattr(command, "commands"):
            for verb, inner in command.commands.items():
                visit(inner, f"{name} {verb}".strip())
            return
        options = (option for parameter in command.params for option in parameter.opts if option.startswith("--"))
        found[name] = set(options) - {"--help"}

    visit(typer.main.get_command(app), "")
    return found


def keys(record: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """The leaves of a tree of records; for a union of records those of all of them, and the tag. The engine settings of
    a kind of worker are those of [engine].
    """
    for name, hint in get_type_hints(record).items():
        if record is Workers and name == "engine":
            continue
        inner = [one for one in (hint, *get_args(hint)) if isinstance(one, type) and issubclass(one, msgspec.Struct)]
        for one in inner:
            yield from keys(one, f"{prefix}{name}.")
            if one.__struct_config__.tag is not None:
                yield f"{prefix}{name}.{one.__struct_config__.tag_field}"
        if not inner:
            yield prefix + name


def test_the_flags_are_those_that_we_decided_on():
    assert flags() == {verb: set(options.split()) for verb, options in FLAGS.items()}


def test_the_keys_of_a_deployment_are_those_that_we_decided_on():
    assert set(keys(ServeConfig)) == set(KEYS.split())


# Settings that the flags of `serve` spell differently from the file: the drafter, which is two keys, and its options.
SPELLED = {"--draft": "type"} | {f"--draft-{key}": key for key in ("tokens", "head-bits", "trace")}


def test_every_flag_of_serve_is_the_spelling_of_a_key():
    spellings = {key.rpartition(".")[2].replace("_", "-") for key in KEYS.split()} | {"nano", "set"}
    assert {SPELLED.get(flag, flag.removeprefix("--")) for flag in flags()["serve"]} <= spellings


def test_nothing_that_can_be_set_is_called_enable_or_disable():
    everything = [*KEYS.split(), *(flag for options in flags().values() for flag in options)]
    found = {name for name in everything if re.search(r"enable|disable|use_|override|backend", name)}
    assert found <= PEERS_NAMES


def test_make_serve_speculates_where_a_drafter_lies_beside_the_model(tmp_path: Path):
    def command(**variables: Any) -> str:
        words = [f"{name}={value}" for name, value in variables.items()]
        make = ["make", "--no-print-directory", "--dry-run", "serve", *words]
        # without make's variables, so that it is not a child of make
        alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        done = subprocess.run(make, cwd=ROOT, env=alone, capture_output=True, text=True, check=True)
        return next(line for line in done.stdout.splitlines() if "redline serve" in line)

    model, drafter = tmp_path / "model", tmp_path / "model-eagle3"
    assert "--draft" not in command(MODEL=model)
    drafter.mkdir()
    assert "--draft" not in command(MODEL=model), "an empty folder is not a drafter"
    (drafter / "config.json").write_text("{}")
    assert f"--draft {drafter}" in command(MODEL=model)
    assert f"--draft {drafter}" in command(MODEL=f"{model}/")
    assert "--draft" not in command(MODEL=model, DRAFT="")
    assert "--draft suffix" in command(MODEL=model, DRAFT="suffix")


def test_the_versions_of_python_are_the_same_everywhere(tmp_path: Path):
    assert PROJECT["project"]["requires-python"] == f">={'.'.join(map(str, PYTHONS[0]))},<3.{PYTHONS[-1][1] + 1}"
    assert tuple((3, minor) for minor in range(PYTHONS[0][1], PYTHONS[-1][1] + 1)) == PYTHONS
    makefile = (ROOT / "Makefile").read_text()
    assert f"sys.version_info[:2] not in {PYTHONS})" in makefile
    names = " ".join(f"python{major}.{minor}" for major, minor in reversed(PYTHONS))
    assert f"PYTHON ?= python3 {names}\n" in makefile
    assert "Python 3.11, 3.12 or 3.13," in (ROOT / "README.md").read_text()
    (tmp_path / "pyproject.toml").touch()
    make = ["make", "--silent", "-f", ROOT / "Makefile", "-C", tmp_path, "PYTHON=false", "serve"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(make, env=alone, capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert ours == [
        "Redline needs Python 3.11, 3.12 or 3.13, and found none of them as: false. "
        "Name one: make PYTHON=/path/to/python3.13"
    ]


# ------------------------------------------------------------------------------------------------------------ docs


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\(([\w-]+\.md)\)", index))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_in_a_page_lead_somewhere(page: Path):
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]
    paths = re.findall(r"`((?![A-Z]+/)(?:[\w.-]+/)+[\w.-]+\.(?:py|md|cpp|h|json|jsonl|toml|svg|png))`", text)
    roots = (ROOT, ROOT / "redline", ROOT / "redline" / page.stem, page.parent)
    assert not [path for path in paths if not any((root / path).exists() for root in roots)]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def remarks(path: Path) -> Iterator[str]:
    """A program's docstrings and comments; text after # or // in a string counts as one."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from re.findall(r"//.*", text)
        return
    yield from re.findall(r"#.*", text)
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def test_a_file_that_a_remark_cites_is_there():
    """Pages and sources, by the end of their path; data files have names that an operator chooses."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ours = [path for path in listed if path.startswith(("redline/", "nano/"))]
    endings = {"/".join(parts[start:]) for parts in (path.split("/") for path in listed) for start in range(len(parts))}
    elsewhere = re.compile(r"github\.com/|llama\.(cpp|h)$")
    missing = {
        f"{path}: {cited}"
        for path in ours
        if path.endswith((".py", ".cpp", ".cu", ".cuh", ".h"))
        for remark in remarks(ROOT / path)
        for cited in re.findall(r"(?<![\w./*{}-])[\w/-]+(?:\.[\w/-]+)*\.(?:md|py|cpp|cuh|cu|h)\b(?![\w(])", remark)
        if cited not in endings and not elsewhere.match(cited)
    }
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_a_page_exist(page: Path):
    text = page.read_text()
    verbs = "|".join(sorted(FLAGS, key=len, reverse=True))
    for verb, rest in re.findall(rf"\bredline ({verbs})\b([^`\n]*)", text):
        given = set(re.findall(r"(?<!\S)\[?(--[a-z0-9-]+)", rest.split("#")[0].split("  ")[0]))
        assert given <= flags()[verb], f"redline {verb}{rest}"
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)", text)) <= targets
    for module in re.findall(r"python -m ((?:redline|lab|nano|benchmarks|tests)[\w.]*)", text):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or place.is_dir(), f"python -m {module}"


def test_every_flag_and_every_key_is_explained():
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "log.md")
    assert not [flag for options in flags().values() for flag in options if f"{flag} " not in pages.replace("]", " ")]
    assert not [key for key in KEYS.split() if f"{key.rpartition('.')[2]} = " not in pages]


def test_the_version_is_the_same_everywhere():
    assert redline.__version__ == PROJECT["project"]["version"]


def test_the_changelog_knows_this_version():
    assert f"## {PROJECT['project']['version']}" in (ROOT / "CHANGELOG.md").read_text()


# --------------------------------------------------------------------------------------------------------- structure

CLASS_LINES = 400
FUNCTION_LINES = 100  # as PARAMETERS outside redline/kernels, whose launches have one argument per tensor
PARAMETERS = 12
SOURCES = 32  # of one folder
Function = ast.FunctionDef | ast.AsyncFunctionDef


def definitions(kind: Any) -> Iterator[tuple[Path, Any]]:
    """(path from the root, definition) for each class or function of the package, nested ones included."""
    for path in SHIPPED:
        yield from ((path.relative_to(ROOT), node) for node in ast.walk(parsed(path)) if isinstance(node, kind))


def lines_of(node: Any) -> int:
    return node.end_lineno - node.lineno + 1


def parameters_of(node: Any) -> int:
    found = node.args
    every = [*found.posonlyargs, *found.args, *found.kwonlyargs, found.vararg, found.kwarg]
    return sum(one is not None for one in every)


def test_classes_and_functions_are_short():
    found = [
        f"{path}: class {node.name} has {lines_of(node)} lines, at most {CLASS_LINES}"
        for path, node in definitions(ast.ClassDef)
        if lines_of(node) > CLASS_LINES
    ]
    for path, node in definitions(Function):
        if path.parts[1] == "kernels":
            continue
        for count, most, what in (
            (lines_of(node), FUNCTION_LINES, "lines"),
            (parameters_of(node), PARAMETERS, "parameters"),
        ):
            if count > most:
                found.append(f"{path}: {node.name} has {count} {what}, at most {most}")
    assert not found, "\n".join(found)


def test_the_name_of_a_public_class_is_used_once():
    by_name: dict[str, list[str]] = {}
    for path in SHIPPED:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                by_name.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    found = [f"{name} has {len(paths)} files: {', '.join(paths)}" for name, paths in by_name.items() if len(paths) > 1]
    assert not found, "\n".join(found)


def test_a_folder_has_few_sources():
    sources = Counter(
        path.parent.relative_to(ROOT)
        for path in (ROOT / "redline").rglob("*")
        if path.suffix in (".py", ".cpp", ".cu", ".cuh", ".h", ".js", ".css", ".html")
    )
    found = [f"{folder} has {count} sources, at most {SOURCES}" for folder, count in sources.items() if count > SOURCES]
    assert not found, "\n".join(found)


# ---------------------------------------------------------------------------------------------------- dependencies

# uvicorn runs on uvloop and httptools; httpx is `redline chat`'s client, prompt-toolkit its prompt: a pasted text is
# one question in every terminal, which input() cannot guarantee; jsonschema grades answers in `redline eval`;
# markdown-it-py, Pygments, latex2mathml and nh3 render the page's answers, in a separate process; filelock, which torch
# needs too, keeps corpora and folders to one process; pillow decodes images, in a separate process.
RUN_TIME = {
    "torch": "torch", "numpy": "numpy", "safetensors": "safetensors", "msgspec": "msgspec", "pyzmq": "zmq",
    "tiktoken": "tiktoken", "starlette": "starlette", "uvicorn": "uvicorn", "uvloop": "uvloop",
    "httptools": "httptools", "httpx": "httpx", "prometheus-client": "prometheus_client", "typer": "typer",
    "rich": "rich", "prompt-toolkit": "prompt_toolkit", "jsonschema": "jsonschema", "filelock": "filelock",
    "llguidance": "llguidance", "markdown-it-py": "markdown_it", "pygments": "pygments",
    "latex2mathml": "latex2mathml", "nh3": "nh3", "pillow": "PIL",
}  # fmt: skip
# Plots, foreign vocabularies, training, RDMA, YAML, Ray, spans and videos (`bench`, `draft`, `train`, `nixl`,
# `manifests`, `ray`, `otel`, `video`); the library that law 10 compares with, which `test` installs.
EXTRAS = {
    "av",
    "matplotlib",
    "tokenizers",
    "accelerate",
    "deepspeed",
    "transformers",
    "compressed_tensors",
    "nixl",
    "yaml",
    "ray",
    "huggingface_hub",
    "opentelemetry",
}
TRITON = (
    ROOT / "redline" / "kernels" / "cuda" / "triton"
)  # comes with torch for CUDA; imported when a GPU's op is called


def test_the_run_time_parts_are_those_that_we_decided_on():
    declared = {re.match(r"[\w-]+", line)[0] for line in PROJECT["project"]["dependencies"]}  # type: ignore[index]
    assert declared == set(RUN_TIME)


def test_the_package_imports_every_run_time_part_and_nothing_else():
    known = {module for module in RUN_TIME.values() if module is not None}
    found: set[str] = set()
    for path in set((ROOT / "redline").rglob("*.py")) - set(TRITON.glob("*.py")):
        found |= {module.partition(".")[0] for module in imported(path)}
    assert found - set(sys.stdlib_module_names) - {"redline"} - EXTRAS == known


def test_what_an_extra_brings_is_imported_in_the_function_that_needs_it():
    extras = " ".join(line for lines in PROJECT["project"]["optional-dependencies"].values() for line in lines)
    assert all(module.replace("_", "-") in extras for module in EXTRAS)
    for path in (ROOT / "redline").rglob("*.py"):
        tree = ast.parse(path.read_text())
        tree.body = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        assert not EXTRAS & {module.partition(".")[0] for module in imports(tree)}, path


def test_the_engines_core_needs_torch_numpy_safetensors_and_msgspec_alone():
    """pyzmq is excepted: it is needed by the channel between processes, its handshakes, and the
    sockets of KV events.
    """
    core = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for room in ("ops", "kernels", "transport", "model", "run", "scheduler", "messages")
        for path in sorted((ROOT / "redline" / room).rglob("*.py"))
        if path.name not in ("__init__.py", "channel.py", "handshakes.py", "kv_sockets.py") and path.parent != TRITON
    ]
    allowed = {"torch", "numpy", "safetensors", "msgspec", None}
    hidden = ["triton", *(module for module in RUN_TIME.values() if module not in allowed)]
    program = f"import sys\nfor name in {hidden}: sys.modules[name] = None\nimport {', '.join(core)}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)


def test_what_is_looked_for_before_a_worker_is_started_are_run_time_parts():
    assert set(OF_A_WORKER) <= set(RUN_TIME)


def test_a_wheel_has_the_folders_of_kernels_and_no_module_of_it_imports_the_tests():
    packages = find_namespace_packages(str(ROOT), **PROJECT["tool"]["setuptools"]["packages"]["find"])
    assert {"redline.kernels.cuda", "redline.kernels.cuda.blocks", "redline.kernels.cpu.core"} <= set(packages)
    shipped = (ROOT / "redline").rglob("*.py")
    assert not [path for path in shipped if any(name.split(".")[0] == "tests" for name in imported(path))]


# -------------------------------------------------------------------------------------------------------- security

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "torch.load", "torch.jit.load", "torch.hub.load", "os.system", "os.popen", "yaml.load"}
EXECUTING_CALLS = {"exec", "compile", "__import__"}  # nano runs its own list of functions to know their results
FORBIDDEN_KEYWORDS = {"trust_remote_code", "allow_pickle", "shell"}


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """All modules that a program imports, at any place."""
    return tuple(imports(parsed(path)))


def name_of(called: ast.expr) -> str:
    """`a.b.c`, the name of a called function; empty if it has none, such as the result of another call."""
    names: list[str] = []
    while isinstance(called, ast.Attribute):
        names.append(called.attr)
        called = called.value
    return ".".join(reversed([*names, called.id])) if isinstance(called, ast.Name) else ""


def offences(tree: ast.AST, forbidden_calls: set[str]) -> list[str]:
    """Violations of the security rules, with their lines."""
    found = [module for module in imports(tree) if module.partition(".")[0] in FORBIDDEN_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = name_of(node.func)
            if name in forbidden_calls:
                found.append(f"line {node.lineno}: {name}()")
            found += [f"line {node.lineno}: {word.arg}=" for word in node.keywords if word.arg in FORBIDDEN_KEYWORDS]
    return found


def test_nothing_unpickles_evaluates_or_runs_a_checkpoints_code():
    found = {str(path): offences(parsed(path), FORBIDDEN_CALLS) for path in PROGRAMS}
    assert not {path: lines for path, lines in found.items() if lines}


def test_nothing_that_we_ship_executes_text():
    """One exception, a program in a string: `redline eval --run-code` runs it in a sandboxed child process
    (run_code.py).
    """
    found = {str(path): offences(parsed(path), FORBIDDEN_CALLS | EXECUTING_CALLS) for path in SHIPPED}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "eval('1')", "torch.load(path)", "f(x, trust_remote_code=True)"],
)
def test_the_search_for_offences_finds_them(source: str):
    assert offences(ast.parse(source), FORBIDDEN_CALLS)


@pytest.mark.parametrize("room", ["messages", "policy", "chat", "scheduler", "simulate", "api", "transport"])
def test_rooms_that_decide_know_no_gpu_even_where_the_checker_does_not_look(room: str):
    """import-linter checks the import laws; this test also sees imports within functions."""
    for path in (ROOT / "redline" / room).rglob("*.py"):
        assert not {"torch", "triton"} & {name.partition(".")[0] for name in imported(path)}


def test_the_import_laws_name_every_room():
    layers = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    named = {room.strip() for layer in layers for room in layer.split("|")}
    files = {path.stem for path in (ROOT / "redline").glob("*.py")} - {"__init__"}
    assert named == {*ROOMS, *files}


def test_no_two_files_import_each_other():
    """Nor may three or more in a circle: during loading, one would see another half-initialised. Imports inside
    functions are free.
    """
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "redline").rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in files.items()}
    graph = {name: loaded(parsed(path)) & set(modules) - {name} for name, path in modules.items()}
    assert sum(map(len, graph.values())) > 500
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def loaded(tree: ast.AST) -> set[str]:
    """The modules that are imported when this one is loaded, and imported names that may be modules."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= loaded(node)
    return found
