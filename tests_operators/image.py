"""The steps of examples/operators/Dockerfile in a plain Debian root, where no container builder is at hand. As root:

    debootstrap --variant=minbase bookworm FOLDER
    python -m tests_operators.image FOLDER [NAME=VALUE ...]

NAME=VALUE are build arguments. PIP_* of the environment reach the steps, as proxies reach a builder's. Then the image's
own command serves models/kimi-nano as the image's own user: its health check holds, SIGTERM ends it with 0. FOLDER
wants /dev and /proc (mount --bind /dev FOLDER/dev; mount -t proc proc FOLDER/proc).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
READY_S = 180.0
END_S = 30.0
DEPLOYMENT = 'weights = "kimi-nano"\n[engine]\nkv_memory = "100MB"\n'


def instructions(text: str) -> list[tuple[str, str]]:
    """(name, arguments) of a Dockerfile's instructions, without comments."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    whole = (line.strip() for line in re.sub(r"\\\n", " ", lines).splitlines())
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in whole if line)]


class Image:
    """What the steps have made so far: a root, and how its command is to be run."""

    def __init__(self, root: Path, arguments: dict[str, str]) -> None:
        self.root = root
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.entry: list[str] = []
        self.command: list[str] = []
        self.check: list[str] = []
        self._arguments = arguments
        self._user = "0"
        self._folder = "/"

    def step(self, name: str, rest: str) -> None:
        """Does one instruction. Raises ValueError for one that it does not know, CalledProcessError where it fails."""
        match name:
            case "RUN":
                self.run(["/bin/sh", "-c", rest]).check_returncode()
            case "COPY":
                *sources, goal = rest.split()
                for source in sources:
                    self.copy(ROOT / source, goal)
            case "ARG":
                key, _, value = rest.partition("=")
                self._arguments.setdefault(key, value)
            case "ENV":
                for key, value in (word.split("=", 1) for word in rest.split()):
                    self.environment[key] = value.replace("$PATH", self.environment["PATH"])
            case "WORKDIR":
                self._folder = rest
            case "USER":
                self._user = rest
            case "ENTRYPOINT":
                self.entry = json.loads(rest)
            case "CMD":
                self.command = json.loads(rest)
            case "HEALTHCHECK":
                self.check = json.loads(rest.partition("CMD ")[2])
            case "FROM" | "EXPOSE" | "STOPSIGNAL":
                pass
            case _:
                raise ValueError(f"{name}: unknown here")

    def copy(self, source: Path, goal: str) -> None:
        """As COPY does; a folder's content goes into the folder of the goal's name."""
        target = self.root / goal.lstrip("/")
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)

    def words(self, command: list[str]) -> list[str]:
        """A command in the root, as the image's user and in its folder."""
        enter = 'cd "$0" && exec "$@"'
        who = [f"--userspec={self._user}:{self._user}"] if self._user != "0" else []
        return ["chroot", *who, str(self.root), "/bin/sh", "-c", enter, self._folder, *command]

    def run(self, command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        """Runs it to its end, with what a builder gives to steps."""
        pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        environment = {**self.environment, **self._arguments, **pip}
        return subprocess.run(self.words(command), env=environment, text=True, **how)

    def serves(self) -> None:
        """Its command begins, is healthy, and ends by SIGTERM. Raises AssertionError where it does not."""
        self.copy(ROOT / "models" / "kimi-nano", "/etc/redline/kimi-nano")
        (self.root / "etc/redline/deployment.toml").write_text(DEPLOYMENT)
        home = {"HOME": self._folder}
        server = subprocess.Popen(self.words([*self.entry, *self.command]), env={**self.environment, **home})
        try:
            deadline = time.monotonic() + READY_S
            while self.run(self.check, capture_output=True).returncode:
                assert server.poll() is None, f"it ended with {server.returncode}"
                assert time.monotonic() < deadline, f"not healthy after {READY_S} s"
                time.sleep(1)
            owners = {
                line.split()[1] for line in Path(f"/proc/{server.pid}/status").read_text().splitlines() if "Uid" in line
            }
            assert owners == {self._user}, owners
            server.send_signal(signal.SIGTERM)
            assert server.wait(END_S) == 0, server.returncode
        finally:
            server.kill()


def main() -> None:
    root, *words = sys.argv[1:]
    image = Image(Path(root), dict(word.split("=", 1) for word in words))
    for name, rest in instructions((ROOT / "examples/operators/Dockerfile").read_text()):
        print(f"{name} {rest}", flush=True)
        image.step(name, rest)
    image.serves()
    print("healthy as its own user, and ended with 0 after SIGTERM")


if __name__ == "__main__":
    main()
