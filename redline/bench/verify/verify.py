"""`redline verify FOLDER`: checks that a checkpoint matches its config, and that this machine computes it correctly.

Shards are read in parallel. Each finished shard is a line of a progress file next to the report: when the command is
run again, it reads only shards that are not finished, had a problem or have changed. Then some layers are loaded and
computed.
"""

import hashlib
import os
import re
import shlex
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from redline import clock
from redline.bench.machine import device_name
from redline.bench.record import provenance
from redline.bench.verify.layers import chosen, compute, load_rate, steps_of, stored_of
from redline.bench.verify.report import Problem, Rates, VerifiedLayer, VerifiedShard, VerifyReport
from redline.bench.verify.shards import layer_of, read_shard, wanted
from redline.disk import written
from redline.errors import BrokenFile, CheckpointError, ConfigError
from redline.folder import check_model
from redline.limits import processors
from redline.model.k2.checkpoint import Stored, Survey, survey
from redline.progress import Working

MOST_READERS = 16  # shards read concurrently, at most
LOOK_S = 0.5  # seconds between two updates of the progress
EDITION = 1  # version of the checks: progress lines of other versions are ignored


class Progress:
    """Finished shards, in a file that stays readable if the process is killed.

    again: discards an existing file. Raises ConfigError if the file cannot be read or written.
    """

    def __init__(self, path: Path, again: bool = False) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._done: dict[tuple[str, str, int, int], VerifiedShard] = {}
        with written(path):
            if again:
                path.unlink(missing_ok=True)
            for line in path.read_bytes().splitlines() if path.exists() else ():
                with suppress(msgspec.DecodeError, UnicodeDecodeError):  # the last line may be incomplete after a kill
                    self._keep(msgspec.json.decode(line, type=VerifiedShard))

    def earlier(self, job: str, file: Path) -> VerifiedShard | None:
        """The earlier result of a shard that was sound and has not changed; None: the shard must be read."""
        state = file.stat()
        found = self._done.get((job, file.name, state.st_size, state.st_mtime_ns))
        return None if found is None or found.problems else found

    def add(self, shard: VerifiedShard) -> None:
        """Saves a finished shard. Raises ConfigError if the file cannot be written."""
        with self._lock, written(self._path), self._path.open("ab") as file:
            file.write(b"\n" + msgspec.json.encode(shard) + b"\n")
            file.flush()
            os.fsync(file.fileno())
            self._keep(shard)

    def _keep(self, shard: VerifiedShard) -> None:
        self._done[shard.job, shard.file, shard.bytes, shard.mtime_ns] = shard


class _Stopped(Exception):
    """Stops reading a shard, since the command is stopping."""


def verify(folder: Path, progress: Progress, device: torch.device, working: Working) -> VerifyReport:
    """Reads all shards, then computes some layers. Raises ConfigError if the progress cannot be written."""
    began = clock.monotonic()
    faults: list[BrokenFile] = []
    shards: list[VerifiedShard] = []
    layers: list[VerifiedLayer] = []
    earlier, rates, steps = 0, None, None
    try:
        found = survey(folder, faults.append)
    except CheckpointError as error:
        faults.append(error if isinstance(error, BrokenFile) else BrokenFile(folder, "", _reason(folder, error)))
        unchecked = ["shards and layers: they need a valid config and index"]
    else:
        shards, earlier = _read(folder, found, progress, working)
        damaged = {layer_of(fault.tensor) for fault in faults} | {at for shard in shards for at in shard.damaged}
        layers, rates, unchecked = _compute(found, damaged, device, working)
        steps = steps_of(found.config, layers, device)
    problems = [*_grouped(folder, faults), *(problem for shard in shards for problem in shard.problems)]
    problems += [_of_layer(layer) for layer in layers if not layer.why_not and _is_wrong(layer)]
    codes = [shard.codes for shard in shards if shard.codes]
    return VerifyReport(
        folder=str(folder),
        sound=not problems,
        problems=tuple(problems),
        unchecked=tuple(unchecked),
        bytes=sum(shard.bytes for shard in shards),
        tensors=sum(shard.tensors for shard in shards),
        codes=tuple(map(sum, zip(*codes, strict=True))),
        shards=tuple(shards),
        earlier=earlier,
        layers=tuple(layers),
        rates=rates,
        steps=steps,
        device=device_name(device),
        seconds=round(clock.monotonic() - began, 1),
        provenance=provenance("torch"),
    )


# ------------------------------------------------------------------------------------------------------------ shards


def _read(folder: Path, found: Survey, progress: Progress, working: Working) -> tuple[list[VerifiedShard], int]:
    """The results of all shards, and the number of shards that an earlier run has read."""
    of = wanted(found)
    done = {file: progress.earlier(_job(found, file), file) for file in found.files}
    left = [file for file, shard in done.items() if shard is None]
    stopped, lock = threading.Event(), threading.Lock()
    total = sum(_size(found, file) for file in found.files)
    passed, read, began = total - sum(_size(found, file) for file in left), 0, clock.monotonic()

    def tell(count: int, from_disk: int) -> None:
        nonlocal passed, read
        if stopped.is_set():
            raise _Stopped
        with lock:
            passed, read = passed + count, read + from_disk

    def work(file: Path) -> VerifiedShard:
        torch.set_num_threads(1)  # for this thread: shards are read in parallel
        try:
            shard = read_shard(_job(found, file), file, list(found.files[file].values()), of, again(file), tell)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror or error})") from None
        progress.add(shard)
        return shard

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(min(MOST_READERS, processors())) as pool:
        futures = {file: pool.submit(work, file) for file in left}
        try:
            running = set(futures.values())
            while running:
                rate = f"{read / max(clock.monotonic() - began, 1e-9) / 1e9:.2f} GB/s"
                working.show(float(passed), float(total), what="reading shards", note=rate)
                ended, running = wait(running, LOOK_S, FIRST_EXCEPTION)
                for future in ended:
                    future.result()
        finally:
            stopped.set()
            for future in futures.values():
                future.cancel()
    torch.set_num_threads(threads)
    every = [shard or futures[file].result() for file, shard in done.items()]
    return every, len(done) - len(left)


def _size(found: Survey, file: Path) -> int:
    return sum(stored.stop - stored.start for stored in found.files[file].values())


def _job(found: Survey, file: Path) -> str:
    """A hash of the inputs of a shard's checks: the model, its tensors' offsets, and the path of the file, since a copy
    of a folder has the same names, sizes and times."""
    tensors = [(stored.name, stored.dtype, stored.shape, stored.start) for stored in found.files[file].values()]
    said = f"{EDITION} {file.resolve()} {found.config} {tensors}"
    return hashlib.sha256(said.encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------------ layers


def _compute(
    found: Survey, damaged: set[int], device: torch.device, working: Working
) -> tuple[list[VerifiedLayer], Rates | None, list[str]]:
    """The computed layers, their load rates, and the checks that were not possible, each with its reason."""
    layers: list[VerifiedLayer] = []
    sample: list[Stored] = []
    numbers = chosen(found.config)
    for count, number in enumerate(numbers):
        working.show(count, len(numbers), what="computing layers", note=f"layer {number}")
        parts, dense = stored_of(found, number), not found.config.is_moe(number)
        if parts is None or number in damaged:
            why = "a shard or a tensor is missing" if parts is None else "one of its tensors has a problem"
            layers.append(VerifiedLayer(layer=number, dense=dense, why_not=why))
            continue
        try:
            layers.append(compute(found, number, parts, device))
        except OSError as error:
            layers.append(
                VerifiedLayer(layer=number, dense=dense, why_not=f"cannot be read ({error.strerror or error})")
            )
        if not layers[-1].why_not:
            sample = parts
    unchecked = [f"layer {layer.layer}: {layer.why_not}" for layer in layers if layer.why_not]
    if not sample:
        return layers, None, [*unchecked, "load rate: no layer was loaded"]
    working.show(what="plain reads")
    try:
        return layers, load_rate([layer for layer in layers if not layer.why_not], sample, found.bytes), unchecked
    except (OSError, ConfigError) as error:
        return layers, None, [*unchecked, f"load rate: {error}"]


def _is_wrong(layer: VerifiedLayer) -> bool:
    return layer.error is None or layer.error > layer.limit


# ---------------------------------------------------------------------------------------------------------- problems


def again(file: Path) -> str:
    """Advice to the user for a damaged file."""
    command = ["hf", "download", "OWNER/NAME", file.name, "--local-dir", str(file.parent), "--force-download"]
    return f"download it again: {shlex.join(command)}"


def _grouped(folder: Path, faults: Sequence[BrokenFile]) -> list[Problem]:
    """Problems from faults of the headers; faults of a file that differ only in numbers are merged."""
    groups: dict[tuple[Path, str], list[BrokenFile]] = {}
    for fault in faults:
        groups.setdefault((fault.file, re.sub(r"[\d\[\], ]+", " ", fault.what)), []).append(fault)
    return [
        Problem(
            file=str(file.relative_to(folder)) if file.is_relative_to(folder) else str(file),
            tensor=some[0].tensor,
            tensors=len(some),
            what=some[0].what,
            fix=_fix(file, some[0].what),
        )
        for (file, _), some in groups.items()
    ]


def _fix(file: Path, what: str) -> str:
    if what.startswith("holds the tensors of "):
        return f"rename the file to its own name ({what.split()[4].rstrip(';')}), or {again(file)}"
    if what.startswith(("a drafter", "model_type is")):
        return "name the folder of a model that Redline serves"
    if what.startswith("a Git LFS pointer"):
        return f"run `git lfs pull` in {file.parent}, or {again(file)}"
    if file.suffix == ".json" or file.is_dir():
        return "config.json, the index and the shards must be of one model: download the others again"
    if what.startswith(("expected", "a second tensor", "missing; expected here")):
        return f"it belongs to another model than config.json and the index: {again(file)}"
    return again(file)


def _reason(folder: Path, error: CheckpointError) -> str:
    """Why a folder cannot be surveyed; first of all, if it does not contain a model."""
    try:
        check_model(folder, weights=False)
    except CheckpointError as other:
        error = other
    return _without(folder, str(error))


def _without(folder: Path, message: str) -> str:
    return message.removeprefix(f"{folder}: ").removeprefix(f"{folder}/")


def _of_layer(layer: VerifiedLayer) -> Problem:
    error = "NaN or infinite" if layer.error is None else f"{layer.error:.1e}"
    return Problem(
        file=f"layer {layer.layer}",
        tensor="",
        tensors=0,
        what=f"the kernels of this machine differ from the float32 reference: {error}; at most {layer.limit:.0e}",
        fix="do not serve on this machine: run the tests (`make test`, on a GPU `make test-gpu`) and report failures",
    )
