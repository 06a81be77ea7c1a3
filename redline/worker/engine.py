"""Assembles a worker's engine: checkpoint, model, KV pages, scheduler (planner), runner, and the loop over them.

A worker process (`worker.main`) serves with an `EngineCore`; `Engine` runs one in a thread of its caller's process, for
tests, evaluation and benchmarks.
"""

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import torch
from filelock import FileLock

from redline import __version__, clock, limits
from redline.chat.conversation import Conversation, Picture
from redline.chat.page_hashes import page_hash
from redline.chat.template import Style, style_of
from redline.chat.tokenizer import Tokenizer
from redline.chat.vocabulary import grammar_tokens
from redline.disk import hold, human
from redline.errors import ConfigError, WorkerLost
from redline.kernels.cpu import native
from redline.kernels.cuda.chips import chip, use_portable_kernels
from redline.kernels.group import ALONE, LOAD_S, START_S, Group, all_reduce_min, barrier
from redline.media.hashing import image_hash
from redline.media.image import BadImage, read_image
from redline.media.rules import ImageRules
from redline.messages.channel import Inbox, MemoryChannel, Outbox
from redline.messages.delta import Delta
from redline.messages.job import Abort, Job, JobId
from redline.messages.media import ImageData, ImageWanted
from redline.messages.news import Ready, Stop
from redline.model.block.config import BlockConfig
from redline.model.block.cuda import check as check_block
from redline.model.block.module import BlockDrafter
from redline.model.drafter import Drafter, is_block, open_drafter
from redline.model.eagle3.cuda import check as check_drafter
from redline.model.eagle3.module import Eagle3
from redline.model.k2.config import K2Config
from redline.model.k2.cpu import K2
from redline.model.k2.load import why_not
from redline.model.k2.random_weights import check_in_memory
from redline.model.spec import spec_of
from redline.model.vision.config import VisionConfig
from redline.model.vision.load import load_tower, vision_config
from redline.model.vision.tower import VisionTower
from redline.policy.floor import StepFloor
from redline.policy.forecast import StepForecast
from redline.run.fit import Layout, MemorySizes, fit, in_steps
from redline.run.kv import KvPool
from redline.run.runner import Runner
from redline.run.tiers.disk import DiskPages
from redline.run.tiers.pages import WholePages, staged_bytes
from redline.run.tiers.store import Store
from redline.run.vision import VisionEncoder
from redline.scheduler.config import PlanConfig
from redline.scheduler.features import FeatureCache
from redline.scheduler.planner import Planner
from redline.worker.calibrate import calibrate
from redline.worker.config import HANDOFF_SHARE, HEAD_BITS, MOST_DRAFTS, STAGING_BYTES, EngineConfig, Learned, Suffix
from redline.worker.delta_router import DeltaRouter
from redline.worker.floor import measure, step_work
from redline.worker.heartbeat import LoopStatus
from redline.worker.kv_transfer.manager import KvTransferManager
from redline.worker.loop import lead
from redline.worker.profile import ProfileService
from redline.worker.rank_parcels import RankPages, RankParcels
from redline.worker.ranks import LeadingRunner, Ranks
from redline.worker.ranks import check as check_ranks
from redline.worker.service import Service
from redline.worker.tiers import SHARE, Tiers
from redline.worker.trace import Trace
from redline.worker.transfer_paths import Carrier, open_ways
from redline.worker.turn import one_line
from redline.worker.vision import VisionService

KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "float32": torch.float32}
# Default for the most tokens of a step: the largest of these that leaves enough memory for KV pages. A prefill chunk
# reads nearly all experts, so one chunk of 8,192 tokens takes less time than four of 2,048 (docs/kv_transfer.md).
STEP_TOKENS = {"cpu": (512,), "cuda": (2048, 8192)}
_log = logging.getLogger(__name__)
MOST_PIXELS = 64_000_000  # of an image in a file of prompts
IMAGE_TOKENS = 16_384  # rows of the feature table: four images of 4,096 tokens
OUTSTANDING = 512  # most jobs of one `generate` that are submitted at a time; the planner's queue is bounded


class Loaded(NamedTuple):
    """A checkpoint, and a drafter if configured, loaded on a device."""

    model: K2
    layout: Layout
    fingerprint: str  # identifies the checkpoint and the number format of its KV pages, for page hashes
    drafter: Drafter | None = None  # the drafter of the config's `Learned` speculation, prepared for the model
    tokenizer: Callable[[], Tokenizer] | None = None  # opens the checkpoint's tokenizer; None disables grammars
    step_tokens: int | None = None  # default number of tokens of a step, chosen by the free memory
    vision: VisionTower | None = None  # None: the model reads no images
    rules: ImageRules | None = None  # of the preprocessor; None: the model reads no images


class EngineCore:
    """One model on one device, with its KV pages, planner and runner. `serve` closes the runner when it ends.

    With tensor parallelism this is rank 0, which schedules for all ranks.
    """

    def __init__(self, loaded: Loaded, config: EngineConfig, ranks: Ranks | None = None) -> None:
        """Allocates pages and slots and, if speculation is adaptive, measures the time of steps.

        ranks: the other tensor parallel ranks, which have loaded their shards. Raises ConfigError if the trace cannot
        be written or if values of the config contradict each other.
        """
        speculation, model, layout = config.speculation, loaded.model, loaded.layout
        self.model = model
        self.layout = layout
        self.fingerprint = loaded.fingerprint
        self.drafter = loaded.drafter
        self._ranks = config.ranks
        self._others = ranks
        self._head_bits = speculation.head_bits if isinstance(speculation, Learned) else 16
        self._floor: StepFloor | None = None
        self._random = config.random_weights
        plan = plan_of(config, model.device, loaded.step_tokens)
        self.step_tokens = plan.step_tokens
        self._slots, self._step_ms = plan.max_running, plan.step_ms
        self.trace = Trace(Path(speculation.trace)) if speculation is not None and speculation.trace else None
        make = Runner if ranks is None else functools.partial(LeadingRunner, ranks)
        self.runner = make_runner(make, loaded, config)
        drafts = plan.draft_tokens
        self.planner = Planner(
            layout.pages,
            replace(plan, ahead=int(self.runner.overlaps)),
            layout.max_model_len,
            functools.partial(page_hash, fingerprint=loaded.fingerprint),
            calibrate(self.runner, drafts) if drafts and speculation is not None and speculation.adaptive else None,
            clock.monotonic,
        )
        if plan.step_ms is not None:
            self.planner.foresee(StepForecast(*_experts(model.config)))
        self.planner.compile_with(self.runner.hold)
        self.features: FeatureCache | None = None
        if loaded.vision is not None:
            sizes = loaded.vision.config
            self.features = FeatureCache(len(loaded.model.feature_table), sizes.layers, sizes.operations)
            self.planner.encode_with(self.features)
        self.tiers = tiers_of(self.planner, self.runner.kv, loaded, config, self.step_tokens, ranks)
        self.runner.hurry()

    @classmethod
    def load(
        cls,
        folder: Path | str,
        config: EngineConfig,
        *,
        device: torch.device | None = None,
        progress: Callable[[int, int], object] | None = None,
        lost: Callable[[str], object] | None = None,
        aside: int = 0,
        alone: bool = False,
    ) -> "EngineCore":
        """Load a checkpoint, and the drafter that the config names, if any, onto a device, and start the other ranks.

        device: default: the config's. progress: called with (bytes read, bytes in total) while weights are read. lost:
        the same parameter of `Ranks`. aside: bytes of each rank's device to leave free for other uses. alone: whether
        this process has the GPU's memory to itself (`run.fit`). Raises CheckpointError for files that cannot be read,
        ConfigError for a config that cannot be satisfied, such as more memory than is free, and RankLost if another
        rank could not load.
        """
        device = device or pick_device(config.device)
        config = with_drafts(config, device)
        if config.ranks == 1:
            return cls(load_model(folder, config, device, ALONE, progress, aside, alone), config)
        model = spec_of(folder).loader.config(folder)
        check_ranks(model, config.ranks, device)
        with ExitStack() as started:
            ranks = Ranks(str(folder), config, device, model, lost, alone=alone, aside=aside)
            started.callback(ranks.close)
            loaded = load_model(folder, config, ranks.device, ranks.group, progress, aside, alone)
            engine = cls(loaded, config, ranks)
            started.pop_all()
        return engine

    def measure(self) -> StepFloor | None:
        """Measures the device's memory bandwidth and matrix throughput, in about 0.1 s: from then on each step's time
        is compared with the least time that it could take. None: the measurement failed. No step may run during it."""
        given, device = (self.model.config, self.layout.kv_dtype), self.model.device
        draft_ranks = self._ranks if device.type == "cuda" else 1
        work = step_work(*given, self._ranks, self.drafter, self._head_bits, draft_ranks)
        self._floor = measure(work, device)
        if self._floor is not None:
            self.planner.stand_beside(self._floor)
        return self._floor

    @property
    def ready(self) -> Ready:
        """The message that the worker sends once it is loaded: limits, fingerprint and a summary for the operator."""
        config = self.model.config
        weights = f"{config.total_parameters / 1e6:,.1f} M parameters, {config.active_parameters / 1e6:,.1f} M active"
        if self.model.device.type == "cpu":
            where = f"{native.threads()} threads" if native.library() else f"reference path: {native.why_not()}"
        else:
            reason = why_not(config, self.model.device)
            where = torch.cuda.get_device_name(self.model.device) + (f", reference path: {reason}" if reason else "")
        dtype = next(name for name, dtype in KV_DTYPES.items() if dtype == self.layout.kv_dtype)
        drafts = f"; drafter {self.drafter.parameter_count / 1e6:,.1f} M" if self.drafter is not None else ""
        ranks = f"; {self._ranks} ranks" if self._ranks > 1 else ""
        layers = f"{self._random} of {config.num_hidden_layers} layers in memory"
        random = f"; random weights, {layers}" if self._random is not None else ""
        device, kv = self.model.device.type, f"KV {self.layout.tokens:,} tokens, {dtype}"
        summary = f"{weights}{random}{drafts}{ranks}; {device}, {where}; {kv}"
        experts_of, experts_chosen = _experts(config)
        return Ready(
            max_model_len=self.layout.max_model_len,
            pages=self.layout.pages,
            fingerprint=self.fingerprint,
            summary=summary,
            step_tokens=self.step_tokens,
            slots=self._slots,
            experts_of=experts_of,
            experts_chosen=experts_chosen,
            step_ms=self._step_ms,
            image_tokens=0 if self.features is None else self.features.rows,
            read_bytes_per_s=self._floor.bytes_per_s if self._floor is not None else 0.0,
            ops_per_s=self._floor.ops_per_s if self._floor is not None else 0.0,
        )

    def exchange(
        self,
        carriers: Sequence[Carrier],
        *,
        lends: bool,
        area_bytes: int | None = None,
        clock: Callable[[], float] = clock.monotonic,
        **how: Any,
    ) -> KvTransferManager:
        """The manager of KV transfers to and from other workers. how: further arguments of `KvTransferManager`.

        carriers: the transports for KV chunks, best first. lends: whether this worker prefills for other workers.
        area_bytes: size of the transfer buffer of each transport; None: the default of its memory. With several tensor
        parallel ranks, chunks are received into memory that all of them read. Raises ConfigError if there is no room
        for the buffers.
        """
        if self._others is not None:
            others = self._others
            carriers = [one._replace(memory=RankParcels(others, one.memory, one.chip)) for one in carriers]
        share = HANDOFF_SHARE[self.model.device.type]
        ways = open_ways(carriers, self.runner.kv, share, clock, area_bytes if lends else 0)
        self.runner.marks_layers = lends
        return KvTransferManager(self.planner, ways, clock=clock, **how)

    def serve(
        self,
        inbox: Inbox,
        outbox: Outbox,
        services: Sequence[Service] = (),
        *,
        pulse: LoopStatus | None = None,
        record: bool = True,
        failed: Callable[[Exception], object] | None = None,
    ) -> None:
        """Run the loop in this thread until a Stop arrives, then close runner and trace. It may be called only once.

        services: those of the worker in addition to the engine's own (trace, offload tiers, profiles). record: whether
        CUDA graphs that were not captured at the start are captured while the worker is idle. failed: called with the
        loop's exception before anything is closed, since closing may take seconds.

        Raises WorkerLost if no further step should be tried.
        """
        own: list[Service] = [service for service in (self.trace, self.tiers) if service is not None]
        outbox = outbox if isinstance(outbox, DeltaRouter) else DeltaRouter(outbox)
        if self.features is not None:
            own.append(VisionService(self.features, self.runner, outbox))
        profiles = ProfileService(self.planner, self.runner, outbox, clock.monotonic_ns)
        try:
            with torch.inference_mode():
                everything = [*own, *services, profiles]
                lead(self.planner, self.runner, inbox, outbox, everything, pulse=pulse, record=record)
        except Exception as error:
            if failed is not None:
                failed(error)
            raise
        finally:
            self.runner.close()
            if self.trace is not None:
                self.trace.close()


class Engine:
    """An engine that runs in a thread of its caller's process. Use as a context manager, or call `close`.

    Any number of threads may call `generate`.
    """

    def __init__(self, engine: EngineCore, tokenizer: Tokenizer, style: Style, rules: ImageRules | None = None) -> None:
        """rules: of the model's preprocessor; None: it reads no images."""
        self.engine = engine
        self.rules = rules
        self.tokenizer = tokenizer
        self.style = style
        self.fingerprint = engine.fingerprint
        self.images: dict[bytes, ImageData] = {}  # of the jobs to come, by hash
        self._inbox = MemoryChannel()
        self._outbox = MemoryChannel()
        self._lost = "the engine is closed"  # the reason why the loop has ended
        self._loop = threading.Thread(target=self._serve, name="loop", daemon=True)
        self._loop.start()
        self._generating = threading.Lock()

    @classmethod
    def open(
        cls,
        folder: Path | str,
        config: EngineConfig | None = None,
        *,
        device: torch.device | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> "Engine":
        """Load a checkpoint with its tokenizer, and start the loop in a thread of this process.

        progress: called with (bytes read, bytes in total). Raises ConfigError or CheckpointError.
        """
        engine = EngineCore.load(folder, config or EngineConfig(), device=device, progress=progress)
        style, rules = style_of(Path(folder), spec_of(folder).chat), ImageRules.of_model(folder)
        return cls(engine, Tokenizer.open(Path(folder)), style, rules)

    def seen(self, conversation: Conversation) -> Conversation:
        """As `JobRunner.seen`."""
        messages = tuple(
            msgspec.structs.replace(message, pictures=tuple(map(self._seen, message.pictures)))
            if message.pictures
            else message
            for message in conversation.messages
        )
        return msgspec.structs.replace(conversation, messages=messages)

    def _seen(self, picture: Picture) -> Picture:
        if self.rules is None:
            raise ConfigError("the model reads no images, and a prompt has one")
        try:
            pixels = read_image(picture.data, self.rules, MOST_PIXELS)
        except BadImage as error:
            raise ConfigError(str(error)) from None
        rows, columns, patches = pixels.layout.rows, pixels.layout.columns, pixels.patches.tobytes()
        hash = image_hash(patches, 1, rows, columns)
        self.images[hash] = ImageData(hash=hash, frames=1, rows=rows, columns=columns, patches=patches)
        return msgspec.structs.replace(picture, hash=hash, rows=rows, columns=columns)

    def _serve(self) -> None:
        try:
            self.engine.serve(self._inbox, self._outbox, record=False)
        except WorkerLost as error:
            self._lost = str(error)
        except Exception as error:
            self._lost = f"the engine's loop has ended: {one_line(error)}"
            raise

    def generate(
        self, jobs: Sequence[Job], on_delta: Callable[[Delta], object] | None = None
    ) -> dict[JobId, list[Delta]]:
        """Run jobs to completion with continuous batching. -> each job's deltas, in order; the last has a `finish`.

        on_delta: called with each delta as it arrives, in this thread. An exception from it aborts the jobs, waits
        until they have ended, and is raised again. Raises WorkerLost if the loop ends first, AssertionError if two jobs
        have the same id.
        """
        deltas: dict[JobId, list[Delta]] = {job.id: [] for job in jobs}
        assert len(deltas) == len(jobs), "two jobs have the same id"

        def keep(delta: Delta) -> None:
            deltas[delta.job].append(delta)
            if on_delta is not None:
                on_delta(delta)

        self.run(jobs, keep)
        return deltas

    def run(self, jobs: Iterable[Job], on_delta: Callable[[Delta], object]) -> None:
        """As `generate`, for any number of jobs: it stores no deltas, and takes jobs from `jobs` only as earlier ones
        end, at most OUTSTANDING at a time.

        An exception from `jobs` is treated like one from `on_delta`.
        """
        waiting, running = iter(jobs), set[JobId]()

        def submit(count: int) -> None:
            for job in itertools.islice(waiting, count):
                assert job.id not in running, f"two jobs have the id {job.id}"
                running.add(job.id)
                self._inbox.put(job)

        def told() -> list[Delta]:
            """Waits for new deltas of these jobs. Raises WorkerLost if the loop has ended."""
            new: list[Delta] = []
            while not new:
                messages = self._outbox.drain(wait=True, timeout=5.0)
                if not messages and not self._loop.is_alive():
                    raise WorkerLost(self._lost)
                for message in messages:
                    if isinstance(message, ImageWanted) and message.job in running:
                        self._inbox.put(self.images[message.hash])
                new = [message for message in messages if isinstance(message, Delta) and message.job in running]
            for delta in new:
                if delta.finish is not None:
                    running.discard(delta.job)
            return new

        with self._generating:
            try:
                submit(OUTSTANDING)
                while running:
                    new = told()
                    submit(OUTSTANDING - len(running))
                    for delta in new:
                        on_delta(delta)
            except BaseException:
                for id in running:
                    self._inbox.put(Abort(job=id))
                while running and self._loop.is_alive():
                    told()  # discards their last deltas, so that a later call does not receive them
                raise

    def record_all(self) -> None:
        """Capture the CUDA graphs of decode steps that a server captures while it is idle. Call it before timing steps.

        An `Engine` captures them only in this call, since its caller may use the device itself. Raises WorkerLost if
        the loop has ended, and a device's own error.
        """
        with self._generating:
            if not self._loop.is_alive():
                raise WorkerLost(self._lost)
            while self.engine.runner.record_more():
                pass

    def close(self) -> None:
        """Abort all jobs, end the loop and wait for its thread; a later `generate` raises WorkerLost."""
        self._inbox.put(Stop())
        self._loop.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def with_drafts(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The config with the number of draft tokens of the configured block drafter, unless it has a number.

    Raises ConfigError if that number is larger than a block, or if a block drafter has no such head; CheckpointError
    for a drafter that cannot be read, or whose sizes the GPU's kernels do not support.
    """
    drafts = config.speculation
    if isinstance(drafts, Learned) and drafts.head_bits not in HEAD_BITS:
        raise ConfigError(f"head_bits is {drafts.head_bits}; expected 16 or 8")
    if not isinstance(drafts, Learned) or not is_block(drafts.drafter):
        return config
    block = BlockConfig.from_folder(drafts.drafter)
    most = block.drafts
    if device.type != "cpu":
        check_block(block, str(Path(drafts.drafter) / "config.json"))
    if drafts.head_bits != 16:
        raise ConfigError(f"engine.speculation.head_bits is {drafts.head_bits}; a block drafter supports 16")
    if drafts.synthetic_acceptance is not None and drafts.tokens is None:
        raise ConfigError("engine.speculation.tokens is missing: with a block drafter, synthetic_acceptance needs it")
    if drafts.tokens is not None and drafts.tokens > most:
        raise ConfigError(
            f"engine.speculation.tokens is {drafts.tokens}; a block of {drafts.drafter} has {most} draft tokens: set "
            f"it to {most} or less, or remove it"
        )
    tokens = min(most, MOST_DRAFTS) if drafts.tokens is None else drafts.tokens
    return msgspec.structs.replace(config, speculation=msgspec.structs.replace(drafts, tokens=tokens))


def load_model(
    folder: Path | str,
    config: EngineConfig,
    device: torch.device,
    group: Group,
    progress: Callable[[int, int], object] | None = None,
    aside: int = 0,
    alone: bool = False,
) -> Loaded:
    """Loads a checkpoint, or this rank's shard of it, onto a device. The number of KV pages is the least that any rank
    has room for.

    aside: bytes of the device to leave free for other uses. alone: as in `EngineCore.load`. It is a collective call: it
    returns on all ranks at the same time. Raises the same errors as `EngineCore.load`.
    """
    loader = spec_of(folder).loader
    checkpoint = loader.open(folder) if config.random_weights is None else None
    geometry = loader.config(folder) if checkpoint is None else checkpoint.config
    if (refusal := loader.refusal(geometry, device)) is not None:
        raise ConfigError(f"{folder}: {refusal}")
    if config.random_weights is not None:
        check_in_memory(geometry, config.random_weights, "engine.random_weights")
    dtype = kv_dtype_of(config.kv_dtype)
    free = free_memory(device)
    use_portable_kernels(config.kernels == "portable")
    speculation = config.speculation
    plan_of(config, device)  # raises its config errors before the weights are read
    if device.type == "cuda" and why_not(geometry, device) is None and not chip().was_run:
        name = torch.cuda.get_device_name(device)
        _log.warning("Redline's authors have not run its kernels on a %s: see `redline doctor --self-test`", name)
    drafter = None
    if isinstance(speculation, Learned):
        drafter = open_drafter(speculation.drafter, geometry)
        reason = why_not(geometry, device) if device.type == "cuda" else None
        if reason is not None and isinstance(drafter, BlockDrafter):
            raise ConfigError(f"engine.speculation.drafter: a block drafter has no reference path on a GPU: {reason}")
        if why_not(geometry, device) is None and isinstance(drafter, Eagle3):
            check_drafter(drafter.config, str(Path(speculation.drafter) / "config.json"))
    rules = ImageRules.of_model(folder) if checkpoint is not None else None
    vision = None if rules is None else vision_config(folder, geometry.hidden_size)
    if vision is not None:
        aside += vision_bytes(vision, device)
    if device.type == "cpu":
        free //= group.ranks  # all ranks share the host's memory
    elif config.host_memory is not None or config.disk is not None:
        aside += staged_bytes(sizes_of(geometry, config, device, dtype, free, drafter).page_bytes)
    sizes = sizes_of(geometry, config, device, dtype, free - aside, drafter)
    sizes = replace(sizes, step_tokens=all_reduce_min(group, sizes.step_tokens, device))
    # The group is open: its buffers are no longer in `free`, but `fit` counts them as needed, so they are added.
    layout = fit(sizes, free + sizes.links_bytes - aside, config.kv_memory, config.max_model_len, alone=alone)
    pages, length = (all_reduce_min(group, each, device) for each in (layout.pages, layout.max_model_len))
    layout = replace(layout, pages=pages, max_model_len=length)
    # The CPU kernels have threads of their own, and torch only runs small operations. With a GPU, torch's threads read
    # the checkpoint, as they do on the other ranks.
    has_threads = device.type == "cpu" and native.library() is not None
    torch.set_num_threads(1 if has_threads else max(1, native.threads() // group.ranks))
    if checkpoint is None:
        assert config.random_weights is not None, "neither a checkpoint nor random weights"
        # The most positions of a step: its prefill tokens, and the decode positions of every running job.
        most = sizes.step_tokens + config.max_running * (1 + config.draft_tokens)

        def made(layers: int, of: int) -> None:
            if progress is not None:
                progress(sizes.weight_bytes * layers // of, sizes.weight_bytes)

        model = loader.random(geometry, config.random_weights, most, device, made, group)
        fingerprint = f"random {config.random_weights} of {geometry}"
    else:
        if progress is not None:
            checkpoint.progress = _counted(progress, checkpoint.bytes)
        model, fingerprint = loader.load(checkpoint, device, group), checkpoint.fingerprint
    tower = None
    if vision is not None and checkpoint is not None:
        tower = load_tower(checkpoint, vision, device)
        model.add_features(IMAGE_TOKENS)
    if drafter is not None:
        assert isinstance(speculation, Learned), "only `Learned` speculation names a drafter"
        drafter.prepare(model, speculation.head_bits)
    barrier(group, device, LOAD_S, START_S)
    return Loaded(
        model,
        layout,
        f"{fingerprint} {config.kv_dtype}",
        drafter,
        lambda: Tokenizer.open(Path(folder)),
        sizes.step_tokens,
        tower,
        rules,
    )


def vision_bytes(config: VisionConfig, device: torch.device) -> int:
    """Bytes on the device for the vision tower, the feature table, and the activations of one image."""
    size = 4 if device.type == "cpu" else 2
    # Of IMAGE_TOKENS patches, float32: the states, and either the MLP's or queries and keys while they are turned.
    activations = 4 * IMAGE_TOKENS * (2 * config.hidden + max(config.intermediate, 6 * config.hidden))
    return size * config.parameters + 2 * IMAGE_TOKENS * config.text_hidden + activations


def _counted(progress: Callable[[int, int], object], whole: int) -> Callable[[int], object]:
    """A callback for the bytes read since its last call. progress: called with the sum, and with `whole`."""
    done = 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        progress(done, whole)

    return read


def make_runner(make: Callable[..., Runner], loaded: Loaded, config: EngineConfig) -> Runner:
    """The runner of one rank, with the same settings on all ranks; on a GPU its start captures the first CUDA graphs.
    make: its class."""
    speculation, tokenizer = config.speculation, loaded.tokenizer
    assert isinstance(speculation, Learned) == (loaded.drafter is not None), f"{speculation}, {loaded.drafter}"
    match speculation:
        case Learned():
            suffix = speculation.suffix
        case Suffix():
            suffix = True
        case None:
            suffix = False
    size, encoder = loaded.model.config.vocab_size, None
    if loaded.vision is not None and loaded.rules is not None:
        encoder = VisionEncoder(loaded.vision, loaded.model, loaded.rules.image_mean, loaded.rules.image_std)
    return make(
        *(loaded.model, loaded.layout, config.max_running, loaded.drafter),
        suffix=suffix,
        drafts=config.draft_tokens,
        rates=config.synthetic_rates(),
        vision=encoder,
        tokens=None if tokenizer is None else lambda: grammar_tokens(tokenizer(), size),
    )


def tiers_of(
    planner: Planner, kv: KvPool, loaded: Loaded, config: EngineConfig, step_tokens: int, ranks: Ranks | None
) -> Tiers | None:
    """The KV offload tiers (host memory, disk) that the config asks for, connected to the planner; None: no tiers.

    ranks: the other tensor parallel ranks. Raises ConfigError if there is not enough memory, or if another process uses
    the disk's folder. If the disk cannot be written, a warning is logged and the disk is not used.
    """
    if config.host_memory is None and config.disk is None:
        return None
    host_bytes, free = config.host_memory or STAGING_BYTES, limits.free_memory()
    if host_bytes > free:
        raise ConfigError(f"engine.host_memory is {human(host_bytes)}, but only {human(free)} are free; lower it")
    pages, disk = WholePages(kv), None
    name = f"{__version__}; {loaded.fingerprint}; {pages.device.type}; {pages.format}; {_name_of(loaded.drafter)}"
    if config.ranks > 1:
        name += f"; {config.ranks} ranks"  # the rounding of all-reduces depends on the number of ranks
    if config.disk is not None and config.disk_size is not None:
        try:
            disk = DiskPages(Path(config.disk), name, pages.size, config.disk_size, _keep)
        except OSError as error:
            _log.warning("engine.disk: %s: %s; pages are not offloaded to disk", config.disk, error.strerror or error)
    others = None if ranks is None else RankPages(ranks, kv)
    store = Store(pages, host_bytes, disk, share=SHARE[pages.device.type], others=others)
    return Tiers(planner, store, step_tokens=step_tokens, experts=_experts(loaded.model.config))


def _experts(config: K2Config) -> tuple[int, int]:
    """Number of routed experts per layer, and of experts per token; both are 0 for a model without experts."""
    return (config.n_routed_experts, config.num_experts_per_tok) if config.moe_layers else (0, 0)


def _keep(folder: Path, lock: Path, wait_s: float) -> FileLock:
    """Locks the disk's folder for this worker by the file `lock`; waits at most `wait_s` seconds for a worker that is
    ending."""
    try:
        held = hold(folder, lock, wait_s)
    except ConfigError:
        raise ConfigError(
            f"engine.disk: {folder} is in use by another running worker; end that worker, or use another folder"
        ) from None
    lock.chmod(0o600)
    return held


def _name_of(drafter: Drafter | None) -> str:
    """Identifies a drafter by samples of its weights: pages with rows of another drafter must not be reused."""
    if drafter is None:
        return "no drafter"
    said = blake2b(repr(drafter.config).encode(), digest_size=16)
    for name, weights in sorted(drafter.state_dict().items()):
        sample = weights.flatten()[:: max(1, weights.numel() // 256)].float().cpu()
        said.update(name.encode() + sample.numpy().tobytes())
    return said.hexdigest()


def pick_device(name: str | None) -> torch.device:
    """The device with the name "cpu" or "cuda"; None: the GPU if there is one, else the CPU.

    Raises ConfigError for another name, and if the name is "cuda" and there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no GPU; remove the setting, or set it to cpu")
    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; expected cpu or cuda")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def kv_dtype_of(name: str) -> torch.dtype:
    """The number format of pages by its name, a key of KV_DTYPES. Raises ConfigError for another name."""
    if name not in KV_DTYPES:
        raise ConfigError(f"kv-dtype is {name!r}; expected one of {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name]


def plan_of(config: EngineConfig, device: torch.device, step_tokens: int | None = None) -> PlanConfig:
    """The planner's limits. step_tokens: the default for the tokens of a step; None: the smallest default of the
    device. Raises ConfigError if values of the config contradict each other."""
    config.synthetic_rates()  # called for its config errors
    given = config.step_tokens
    return PlanConfig(
        step_tokens=given if given is not None else step_tokens or min(STEP_TOKENS[device.type]),
        step_ms=config.step_ms,
        max_running=config.max_running,
        admit_together=config.admit_together,
        draft_tokens=config.draft_tokens,
        learned=isinstance(config.speculation, Learned) and config.draft_tokens > 0,
    )


def sizes_of(
    model: K2Config,
    config: EngineConfig,
    device: torch.device,
    kv_dtype: torch.dtype,
    free: int,
    drafter: Drafter | None = None,
) -> MemorySizes:
    """The figures that determine an engine's memory use (`run.fit`). free: bytes of memory that are free."""
    sizes = MemorySizes(
        model,
        kv_dtype,
        step_tokens=config.step_tokens or min(STEP_TOKENS[device.type]),
        max_running=config.max_running,
        positions=1 + config.draft_tokens,
        device=device.type,
        gpu_kernels=why_not(model, device) is None,
        drafter=drafter and drafter.config,
        drafter_parameters=drafter.parameter_count if drafter is not None else 0,
        head_bits=config.speculation.head_bits if isinstance(config.speculation, Learned) else 16,
        ranks=config.ranks,
        in_memory=config.random_weights,
    )
    return sizes if config.step_tokens is not None else in_steps(sizes, free, STEP_TOKENS[device.type])


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on a device; on a CPU within its cgroup's limit
    (`limits.free_memory`)."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else limits.free_memory()
