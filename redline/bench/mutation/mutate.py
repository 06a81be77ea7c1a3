"""How many small bugs the tests find: each is written into a copy of the project, and the tests that should see it run.

    python -m redline.bench.mutation.mutate [--count 120] [--seed N] [--only FILE] [--named] [--workers 2] [--save FILE]
    python -m redline.bench.mutation.mutate --again JOURNAL [--workers 2] [--save FILE]

The bugs (`mutants.py`) are drawn over all rooms, kernels included: those of CUDA run in the emulator. `--named`
are the ones that lived through an earlier search, found again by their text. For each mutant the tests that know its
file run, nearest first, until one fails: those that mirror it, those that import it, the laws, the room's others, as
many as take `--seconds` without a bug. What was found is kept line by line in runs/, so that a search that was stopped
goes on there; survivors are named as they are found; `--save` keeps the result. `--again` takes the mutants of an
earlier journal, and tries out those that lived once more, now that tests have been written for them.
"""

import argparse
import ast
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from redline import clock
from redline.bench.mutation.mutants import CPP, Mutant, mutants
from redline.bench.record import provenance
from redline.kernels.cpu import native

ROOT = Path(__file__).parents[3]
RUNS = ROOT / "runs"
LINKED = ".venv", "models"  # folders that every copy links to: large, and nobody writes there
# The laws, by their numbers, that a room is held to; then what is one request through everything.
LAWS = {
    "ops": (1,),
    "kernels": (1,),
    "model": (2, 10),
    "run": (2, 3, 4, 7),
    "plan": (8, 9, 3),
    "worker": (8, 9),
    "wire": (8, 9),
    "api": (8,),
    "chat": (8,),
}
# The tests' own apparatus, and programs that measure.
NOT_OURS = (
    "redline/kernels/emulator/",
    "redline/bench/program.py",
    *(f"redline/bench/{room}/" for room in ("attack", "mutation", "peers", "runs")),
)
PATIENCE = 4.0  # times what the tests take without a bug, before a mutant counts as one that hangs
SLACK_S = 40.0
HANGS_S = 900.0  # of a test file without a bug, before it counts as one that hangs
MEASURED = 8  # test files whose times have to be known for a mutant

# What lived through the search at commit 243b700: file, text before, text after.
NAMED = (
    ("redline/draft/train/losses.py", "alpha.detach()).exp()", "alpha).exp()"),
    ("redline/draft/corpus/capture.py", "+ 2 * len(msgspec.json.encode(self.index)) +", "+"),
    ("redline/wire/channel.py", "& 0o077", "& 0o007"),
    ("redline/model/k2/checkpoint.py", "(start, (start + size) // 2, max(", "(start, max("),
    ("redline/model/k2/write.py", "_FP8_MAX = 448.0", "_FP8_MAX = 240.0"),
    ("redline/model/k2/config.py", "min(high, rope_dim - 1)", "min(high, rope_dim)"),
    ("redline/model/k2/config.py", "return max(low, 0), min(", "return max(low, 1), min("),
    ("redline/api/gateway.py", "        self._admit(ask)\n        generation =", "        generation ="),
    ("redline/api/gateway.py", "            lane.read = end.completion_tokens\n", ""),
    ("redline/api/sse.py", "self._ids[choice // self._n]", "self._ids[choice]"),
    ("redline/api/openai.py", "_depth(parameters) > limits.json_depth", "_depth(parameters) >= limits.json_depth"),
    ("redline/plan/speculation.py", "if propose > done)", "if propose >= done)"),
    ("redline/plan/prefix.py", "return min(idle, key=", "return max(idle, key="),
    ("redline/tune/choose.py", "rows + max(0, drafts - rows)", "rows + max(0, drafts)"),
    ("redline/chat/tokenizer.py", "        if token in self._skipped:\n            return self.flush()\n", ""),
    ("redline/chat/tokenizer.py", "range(start + run.start() + _RUN_CHARS,", "range(start + run.start(),"),
    ("redline/run/drafting/verify.py", "masses[accepted] <= 0", "masses[accepted] < 0"),
    ("redline/bench/quality/checks.py", 'text.strip().rstrip(".!?。！？ ")', 'text.strip().rstrip(".!?")'),
)


class Found(NamedTuple):
    """What became of a mutant: killed (a test failed), hung (killed by the clock), lived, or gone (its text is absent).

    by: of a mutant that lived the test files that ran, else the line that names the failure. seconds: of its tests.
    """

    id: str
    file: str
    line: int
    kind: str
    diff: str
    outcome: str
    by: str
    seconds: float


# -- Which bugs ----------------------------------------------------------------------------------------------------


def sources(root: Path) -> list[str]:
    """The package's files that mutants are drawn from, as git knows them. Raises CalledProcessError where git fails."""
    listed = subprocess.run(["git", "ls-files", "redline"], cwd=root, capture_output=True, text=True, check=True)
    return [
        file
        for file in listed.stdout.split()
        if Path(file).suffix in CPP | {".py"} and not file.startswith(NOT_OURS) and (root / file).exists()
    ]


def room(file: str) -> str:
    """The room that a file of the package belongs to; the kernels of each chip count as a room, "cpu" and "cuda"."""
    path = Path(file)
    if path.suffix in (".cu", ".cuh"):
        return "cuda"
    if path.suffix in CPP:
        return "cpu"
    return path.parts[1].removesuffix(".py")


def drawn(root: Path, count: int, seed: int, only: Sequence[str] = ()) -> list[Mutant]:
    """`count` mutants over all rooms: a room's share is the root of its number of mutants, and each has at least one.

    No two are of one line. only: ends of file paths; empty: every file. The order is random too, by the same seed.
    """
    rng = random.Random(seed)
    rooms: dict[str, list[Mutant]] = {}
    for file in sources(root):
        if not only or any(file.endswith(name) for name in only):
            rooms.setdefault(room(file), []).extend(mutants(root, file))
    weights = {name: len(found) ** 0.5 for name, found in rooms.items() if found}
    chosen: list[Mutant] = []
    for name in sorted(weights):
        share = max(1, round(count * weights[name] / sum(weights.values())))
        lines: set[tuple[str, int]] = set()
        of_room: list[Mutant] = []
        for mutant in rng.sample(rooms[name], len(rooms[name])):
            if len(of_room) < share and (mutant.file, mutant.line) not in lines:
                lines.add((mutant.file, mutant.line))
                of_room.append(mutant)
        chosen += of_room
    rng.shuffle(chosen)  # a search that is stopped has seen all rooms
    return chosen


def named(root: Path) -> Iterator[Mutant | Found]:
    """The survivors of the first search as mutants of the files as they are.

    A text that does not stand there exactly once is a Found that is gone.
    """
    for file, before, after in NAMED:
        source = (root / file).read_bytes()
        if source.count(before.encode()) != 1:
            yield Found(f"{file}:{before}", file, 0, "named", f"-{before}\n+{after}", "gone", "", 0.0)
            continue
        start = source.index(before.encode())
        line = source.count(b"\n", 0, start) + 1
        end = start + len(before.encode())
        yield Mutant(file, line, "named", start, end, before, after, source.decode().split("\n")[line - 1])


def again(root: Path, journal: Path) -> Iterator[Mutant | Found]:
    """The mutants of a journal, of the files as they are; a Found that is gone where the text is no more."""
    earlier = {found.id: found for found in read_journal(journal)}
    here: dict[str, dict[str, Mutant]] = {}
    for id, found in earlier.items():
        if found.file not in here:
            of_file = mutants(root, found.file) if (root / found.file).exists() else []
            here[found.file] = {mutant.id: mutant for mutant in of_file}
        yield here[found.file].get(id) or found._replace(outcome="gone")


# -- Which tests ---------------------------------------------------------------------------------------------------


class Suite:
    """The project's test files, what each imports, and how many seconds each takes without a bug.

    kept: a JSON file of those times, which is read first and grows. failing: tests that fail without a bug, and files
    that hang without one.
    """

    def __init__(self, root: Path, kept: Path) -> None:
        self._root = root
        self._kept = kept
        self._lock = threading.Lock()
        self._measured: set[str] = set()  # files that were measured, or are being measured
        self._files = sorted(
            str(path.relative_to(root))
            for path in (root / "tests").rglob("test_*.py")
            if path.name != "test_house.py" and "_on_a_gpu" not in path.name
        )
        self._imports = {file: _imports(root, file) for file in self._files}
        self.seconds: dict[str, float] = {}
        self.failing: set[str] = set()  # as FILE::TEST, or FILE where all of it does
        if kept.exists():
            known = json.loads(kept.read_text())
            self.seconds, self.failing = known["seconds"], set(known["failing"])

    def nearest(self, file: str) -> list[str]:
        """All test files that may see a bug in a file of the package, the nearest first."""
        path = Path(file)
        of = path.parts[1] if len(path.parts) > 2 else "api"  # errors.py: most of them are for a client
        # An op's halves are in two rooms, and the tests of either run both.
        own_rooms = ("tests/ops/", "tests/kernels/") if of in ("ops", "kernels") else (f"tests/{of}/",)
        laws = tuple(f"tests/laws/test_law_{number}_" for number in LAWS.get(of, ()))
        module = ".".join(path.with_suffix("").parts)
        stem = path.stem

        def distance(test: str) -> tuple[int, float]:
            name = Path(test).stem.removeprefix("test_")
            in_room = test.startswith(own_rooms)
            knows = module in self._imports[test]
            if path.suffix in (".cu", ".cuh"):
                emulates = "redline.kernels.emulator.emulator" in self._imports[test]
                place = 0 if emulates and knows and in_room else 1 if emulates else 9
            elif path.suffix in CPP:
                law = "test_law_1_kernel_is_reference" in test
                place = 0 if in_room and name == stem else 1 if law else 2 if in_room and "cuda" not in name else 3
                place = place if in_room or law or "/laws/" in test or "/run/" in test else 9
            elif in_room and (name == stem or name.startswith(f"{stem}_")):
                place = 0
            elif knows and in_room:
                place = 1
            elif test.startswith(laws):
                place = 2
            elif knows:
                place = 3
            elif in_room:
                place = 4
            else:
                place = 5 if "/laws/" in test or test == "tests/test_tiny.py" else 9
            return place, self.seconds.get(test, 0.0)

        return [test for test in sorted(self._files, key=distance) if distance(test)[0] < 9]

    def within(self, tests: Iterable[str], seconds: float) -> list[str]:
        """As many of the tests, in their order, as take so many seconds without a bug; one at least.

        Raises KeyError for a test that was not measured.
        """
        chosen: list[str] = []
        total = 0.0
        for test in tests:
            if chosen and total + self.seconds[test] > seconds:
                continue
            chosen.append(test)
            total += self.seconds[test]
        return chosen

    def measure(self, tree: "Tree", tests: Sequence[str]) -> None:
        """Runs each test file that was not run yet, alone in `tree`; keeps its seconds and which tests fail.

        A file that says nothing of its tests, as it hangs or pytest ends before them, fails as a whole.
        """
        for file in tests:
            with self._lock:
                if file in self.seconds or file in self._measured:
                    continue
                self._measured.add(file)
            report = tree.folder / "report.xml"
            report.unlink(missing_ok=True)  # that of the file before
            began = clock.monotonic()
            tree.pytest([file, f"--junitxml={report}", "-p", "no:randomly"], HANGS_S)
            took = clock.monotonic() - began
            failing = _failing(file, report) if report.exists() else [file]
            with self._lock:
                self.seconds[file] = round(took, 1)
                self.failing |= set(failing)
                text = json.dumps({"seconds": self.seconds, "failing": sorted(self.failing)}, indent=1)
                self._kept.write_text(text + "\n")


def _failing(file: str, report: Path) -> list[str]:
    """The tests of a file that fail, by pytest's report in JUnit's format."""
    return [
        f"{file}::{case.get('name')}"
        for case in ElementTree.parse(report).iter("testcase")
        if any(case.find(what) is not None for what in ("failure", "error"))
    ]


def _imports(root: Path, file: str) -> frozenset[str]:
    """Modules of the package that a test imports, itself or through the tests' own helpers."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [file]
    while waiting:
        name = waiting.pop()
        if name in seen or not (root / name).exists():
            continue
        seen.add(name)
        for module in _modules(root / name):
            if module.startswith("tests."):
                waiting.append(module.replace(".", "/") + ".py")
            found.add(module)
    return frozenset(found)


@functools.cache
def _modules(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


# -- Running them --------------------------------------------------------------------------------------------------


class Tree:
    """A copy of the project, made at once, in which one mutant at a time lives.

    cache: where its kernels are compiled to.
    """

    def __init__(self, root: Path, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.project = folder / "project"
        self.project.mkdir()
        listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
        for file in listed.stdout.split("\n"):
            if file and not file.startswith(tuple(f"{name}/" for name in LINKED)) and (root / file).is_file():
                target = self.project / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / file, target)
                shutil.copymode(root / file, target)
        for name in LINKED:
            if (root / name).exists():
                (self.project / name).symlink_to((root / name).resolve())
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(self.project),
            "PYTHONDONTWRITEBYTECODE": "1",  # a mutant of the same size and second would be taken for the original
            "XDG_CACHE_HOME": str(cache),
            "OMP_NUM_THREADS": "1",
        }

    def pytest(self, words: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """Runs pytest with these words; returns its code (None where it was ended after `seconds`) and its output."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *words]
        with tempfile.TemporaryFile("w+", dir=self.folder) as said:
            process = subprocess.Popen(
                ["nice", *command],
                cwd=self.project,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what its tests have left, too
                process.wait()
            said.seek(0)
            return code, said.read()

    def try_out(self, mutant: Mutant, suite: Suite, seconds: float, also: Sequence[str] = ()) -> Found:
        """Writes the mutant's bug, runs the nearest tests, and restores the file.

        also: test files that run before the nearest. seconds: what the chosen tests may take without a bug, together.
        Raises AssertionError where the mutant's text is gone.
        """
        source = (self.project / mutant.file).read_bytes()
        nearest = list(dict.fromkeys([*also, *suite.nearest(mutant.file)]))
        suite.measure(self, nearest[: MEASURED + len(also)])
        ending = [test for test in nearest if test in suite.seconds and test not in suite.failing]
        chosen = suite.within(ending, seconds)
        least = sum(suite.seconds[test] for test in chosen)
        words = [*chosen, "-x", *(f"--deselect={test}" for test in sorted(suite.failing))]
        began = clock.monotonic()
        (self.project / mutant.file).write_bytes(mutant.apply(source))
        try:
            code, said = self.pytest(words, PATIENCE * least + SLACK_S)
        finally:
            (self.project / mutant.file).write_bytes(source)
        outcome = "hung" if code is None else "lived" if code == 0 else "killed"
        took = round(clock.monotonic() - began, 1)
        by = " ".join(chosen) if outcome == "lived" else _reason(said)
        return Found(mutant.id, mutant.file, mutant.line, mutant.kind, mutant.diff(source), outcome, by, took)


def _reason(said: str) -> str:
    lines = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR", "E  ", "Fatal"))]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "Fatal"))]
    return (failed or lines or said.splitlines() or [""])[-1][:200]


def search(asked: argparse.Namespace, wanted: Sequence[Mutant], journal: Path) -> list[Found]:
    """Tries out what the journal does not know yet, or with `--again` what lived, and adds each result to the journal.

    Returns what was found for every wanted mutant, in their order.
    """
    suite = Suite(ROOT, RUNS / "mutation-tests.json")
    known = {found.id: found for found in read_journal(journal)}
    if asked.again is not None:
        known = {id: found for id, found in known.items() if found.outcome != "lived"}
    left = [mutant for mutant in wanted if mutant.id not in known]
    print(f"{len(wanted)} mutants, {len(wanted) - len(left)} of them known", flush=True)
    lock = threading.Lock()
    began = clock.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutate-") as name:
        folder = Path(name)
        cache = folder / "cache"
        cache.mkdir()
        if native.cache_folder().exists():
            # What mutants build dies with the copy. Names that end in a number are others' that are still being built,
            # and locks are theirs.
            unfinished = shutil.ignore_patterns("*.[0-9]*", "*.lock")
            shutil.copytree(native.cache_folder(), cache / "redline", ignore=unfinished)
        trees: list[Tree] = []
        for number in range(asked.workers):
            (folder / str(number)).mkdir()
            trees.append(Tree(ROOT, folder / str(number), cache))
        free = list(trees)

        def one(mutant: Mutant) -> None:
            with lock:
                tree = free.pop()
            try:
                found = tree.try_out(mutant, suite, asked.seconds, asked.also)
            finally:
                with lock:
                    free.append(tree)
            with lock:
                known[found.id] = found
                with journal.open("a") as file:
                    file.write(json.dumps(found._asdict()) + "\n")
                done = sum(mutant.id in known for mutant in wanted)
                print(
                    f"{clock.monotonic() - began:5.0f} s {done}/{len(wanted)} {found.outcome:6} "
                    f"{found.file}:{found.line} ({found.kind}, {found.seconds:.0f} s)",
                    flush=True,
                )
                if found.outcome == "lived":
                    print(found.diff, flush=True)

        with ThreadPoolExecutor(asked.workers) as pool:
            list(pool.map(one, left))
    return [known[mutant.id] for mutant in wanted]


def read_journal(path: Path) -> list[Found]:
    """The results that a search has kept, one JSON object per line; none where there is no file yet."""
    return [Found(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def summary(results: Sequence[Found]) -> dict[str, Any]:
    """Counts by outcome and room, over the mutants whose text was there; those that lived or are gone are listed."""
    tried = [found for found in results if found.outcome != "gone"]
    by_room: dict[str, Counter[str]] = {}
    for found in tried:
        by_room.setdefault(room(found.file), Counter())[found.outcome] += 1
    dead = sum(found.outcome in ("killed", "hung") for found in tried)
    return {
        "mutants": len(tried),
        "killed": dead,
        "killed_share": round(dead / len(tried), 3) if tried else None,
        "by_room": {name: dict(counts) for name, counts in sorted(by_room.items())},
        "lived": [found._asdict() for found in results if found.outcome == "lived"],
        "gone": [found.id for found in results if found.outcome == "gone"],
    }


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program with `words` in place of the command line's; returns 0 however many mutants lived.

    Raises SystemExit for a --save or --again that cannot be used.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="the end of a file's path (repeatable)")
    parser.add_argument("--named", action="store_true", help="the survivors of the first search instead")
    parser.add_argument("--again", type=Path, metavar="JOURNAL", help="its survivors once more; they are added to it")
    parser.add_argument("--list", action="store_true", help="print the mutants, and do nothing")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=75.0, help="of tests, for a mutant that lives")
    parser.add_argument(
        "--also", action="append", default=[], metavar="TEST", help="a test file that runs first for each (repeatable)"
    )
    parser.add_argument("--journal", type=Path, help="absent: runs/mutation-COMMIT.jsonl")
    parser.add_argument("--save", type=Path, help="of the result; absent: nothing is saved but the journal")
    asked = parser.parse_args(words)
    if asked.save is not None and not asked.save.parent.is_dir():
        raise SystemExit(f"--save: {asked.save.parent} is no folder")
    if asked.again is not None and not asked.again.is_file():
        raise SystemExit(f"--again: {asked.again} is no file")
    wanted: Sequence[Mutant | Found]
    if asked.named:
        wanted = list(named(ROOT))
    elif asked.again is not None:
        wanted = list(again(ROOT, asked.again))
    else:
        wanted = drawn(ROOT, asked.count, asked.seed, asked.only)
    there = [one for one in wanted if isinstance(one, Mutant)]
    gone = [one for one in wanted if isinstance(one, Found)]
    if asked.list:
        for mutant in there:
            print(f"{mutant.file}:{mutant.line} ({mutant.kind})\n{mutant.diff((ROOT / mutant.file).read_bytes())}")
        return 0
    where = provenance("torch", "pytest")
    RUNS.mkdir(exist_ok=True)
    journal = asked.again or asked.journal or RUNS / f"mutation-{where['commit']}.jsonl"
    results = [*search(asked, there, journal), *gone]
    record = {**where, "seed": asked.seed, "named": asked.named, **summary(results)}
    if asked.save is not None:
        asked.save.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    for found in gone:
        print(f"gone: {found.id}")
    share = "" if record["killed_share"] is None else f" ({record['killed_share']:.1%})"
    print(f"{record['killed']} of {record['mutants']} killed{share}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
