"""The wheel: built from what is committed, installed into an environment of its own, run in an empty folder.

What it depends on comes from the environment of the tests, so no network is asked.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import venv
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

import pytest
import setuptools
import torch

from redline import __version__

ROOT = Path(__file__).parents[1]
PATIENCE_S = 300
urlopen = build_opener(ProxyHandler({})).open  # it is on this machine


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `redline` of a fresh environment that has the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        source = ROOT / name
        if source.exists():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / "source" / name, follow_symlinks=False)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", folder, folder / "source"], check=True, timeout=PATIENCE_S)
    (wheel,) = folder.glob("redline-*.whl")
    shutil.rmtree(folder / "source")  # what is installed must not find it
    venv.create(folder / "venv", with_pip=False)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    # A path that is only named here is searched last, and its own editable installations are not followed.
    theirs = {Path(module.__path__[0]).parent for module in (torch, setuptools)}
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in sorted(map(str, theirs))))
    python = folder / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, timeout=PATIENCE_S, env=plain())
    return folder / "venv" / "bin" / "redline"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A folder with nothing in it."""
    return tmp_path


def plain() -> dict[str, str]:
    """The environment, without what leads Python to this tree."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def said(words: list[str | Path], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, env=plain(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_the_installed_package_that_tells_its_version(installed: Path, empty: Path):
    found = said([installed.parent / "python", "-c", "import redline; print(redline.__file__)"], empty)
    assert Path(found.strip()).is_relative_to(installed.parents[1])
    assert __version__ in said([installed, "--version"], empty)


def address_of(server: "subprocess.Popen[str]") -> str:
    """Where it is, once it is ready; it is killed where that takes too long, and its output ends."""
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"ready at (http://[\w.:]+)", line):
            return found[1]
    raise AssertionError("it ended before it was ready")


def test_nano_is_in_it_and_answers(installed: Path, empty: Path):
    words = [installed, "serve", "--nano", "--port", "0", "--kv-memory", "100MB", "--log-level", "warning"]
    server = subprocess.Popen(words, cwd=empty, env=plain(), stdout=subprocess.PIPE, text=True)
    stop = threading.Timer(PATIENCE_S, server.kill)
    stop.start()
    try:
        address = address_of(server)
        with urlopen(f"{address}/v1/models", timeout=60) as answer:
            (model,) = (each["id"] for each in json.load(answer)["data"])
        body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urlopen(Request(f"{address}/v1/chat/completions", data, kind), timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
        server.terminate()
        assert server.wait(60) == 0
        assert not list(empty.iterdir()), "it leaves nothing where it was started"
    finally:
        stop.cancel()
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
