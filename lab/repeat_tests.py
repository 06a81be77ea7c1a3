"""Runs `make tests` repeatedly: other Pythons, other instruction sets, idle and busy machines. All runs must pass.

    python -m lab.repeat_tests [--times 12] [--python python3.11 ...] [--isa avx2 avx512] [--save FILE]

Every Python gets a clone of HEAD with its own environment (`make .venv/.test`), kept in --folder for the next call.
Runs take the Pythons and the instruction sets of the CPU kernels (REDLINE_CPU_ISA) in rotation; in every second run two
other processes keep two cores busy. Each run is added to the JSON file when it ends, with the names of the tests that
failed; a call with the same file and commit continues after the last run. Exits with 1 if a run failed.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUSY = 2  # busy processes
LIMIT_S = 3600  # timeout of one run; a busy process ends by itself after it


def git(*arguments, folder=ROOT):
    """The output of git."""
    return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def clone(folder, python, commit):
    """A clone of this repository at `commit`, and the seconds that creating its environment took."""
    tree = folder / Path(python).name
    if not tree.exists():
        subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True)
    git("fetch", "--quiet", ROOT, "HEAD", folder=tree)
    git("checkout", "--quiet", "--force", "--detach", commit, folder=tree)
    began = time.monotonic()
    with (tree / "environment.log").open("w") as log:
        done = subprocess.run(["make", f"PYTHON={python}", ".venv/.test"], cwd=tree, stdout=log, stderr=log)
    if done.returncode:
        sys.exit(f"no environment for {python}: see {log.name}")
    return tree, time.monotonic() - began


@contextmanager
def busy(number):
    """`number` processes that each keep a core busy, until the end."""
    program = f"import time\nend = time.monotonic() + {LIMIT_S}\nwhile time.monotonic() < end: pass"
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def kept(tree, said):
    """The name of a file with the whole output of a failed run, next to the clones."""
    file = tree.parent / f"failed-{time.strftime('%m%d-%H%M%S', time.gmtime())}.log"
    file.write_text(said)
    return file.name


def run(tree, isa, others):
    """One run of `make tests`: its counts, seconds and failures."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}  # as in a user's shell
    environment = {**own, "REDLINE_CPU_ISA": isa}
    began = time.monotonic()
    with busy(others):
        command = [
            "timeout",
            "--kill-after=10",
            str(LIMIT_S),
            "make",
            "--no-print-directory",
            "tests",
            "PYTEST_ARGS=-q",
        ]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    code, said = done.returncode, done.stdout
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", said[-2000:])}
    return {
        "seconds": round(time.monotonic() - began),
        "exit": code,
        **counts,
        "failures": re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE),
        "tail": [] if code == 0 else said[-6000:].splitlines(),
        "said": None if code == 0 else kept(tree, said),
    }


def main():
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=12, help="runs in all (default: 12)")
    parser.add_argument("--python", nargs="+", default=["python3.11", "python3.12", "python3.13"])
    parser.add_argument("--isa", nargs="+", default=["avx2", "avx512"], help="values of REDLINE_CPU_ISA")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "repeat_tests", help="of the clones")
    parser.add_argument("--save", type=Path, default=ROOT / "runs" / "repeat_tests.json")
    asked = parser.parse_args()
    pythons = [shutil.which(python) or sys.exit(f"--python {python}: no such program") for python in asked.python]
    commit = git("rev-parse", "--short", "HEAD")
    asked.folder.mkdir(parents=True, exist_ok=True)
    asked.save.parent.mkdir(parents=True, exist_ok=True)
    record = {"commit": commit, "cores": len(os.sched_getaffinity(0)), "runs": []}
    if asked.save.exists():
        before = json.loads(asked.save.read_text())
        record = before if before["commit"] == commit else record
    info = Path("/proc/cpuinfo").read_text()
    record["machine"] = next(iter(re.findall(r"model name\s*: (.*)", info)), "unknown")
    # Each instruction set is combined with each Python, idle and busy: runs n and n + 1 differ in the first two and in
    # the load.
    plan = list(itertools.islice(itertools.cycle(itertools.product(asked.isa, pythons)), asked.times))
    trees = {}
    for number, (isa, python) in enumerate(plan):
        if number < len(record["runs"]):
            continue
        if python not in trees:
            trees[python] = clone(asked.folder, python, commit)
        tree, environment_s = trees[python]
        others = BUSY if (number + number // len(pythons) // len(asked.isa)) % 2 else 0
        version = subprocess.run(
            [tree / ".venv/bin/python", "--version"], capture_output=True, text=True
        ).stdout.split()
        one = {"python": version[-1], "isa": isa, "busy_processes": others, "environment_s": round(environment_s)}
        one |= {"date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), **run(tree, isa, others)}
        record["runs"].append(one)
        asked.save.write_text(json.dumps(record, indent=1) + "\n")
        said = f"{number + 1}/{asked.times}: Python {one['python']}, {isa}, {others} busy: {one['seconds']} s, "
        print(said + ("passed" if one["exit"] == 0 else f"failed: {one['failures']}"), flush=True)
    failed = sum(one["exit"] != 0 for one in record["runs"])
    print(f"{len(record['runs']) - failed} of {len(record['runs'])} runs passed; {asked.save}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
