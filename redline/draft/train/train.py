"""Trains a drafter on a capture of its target: `redline draft train`.

Writes a drafter's folder `out` (config.json, model.safetensors: the moving average) and `out/training` with log.jsonl,
loss.png, config.json, result.json. If interrupted, it keeps its state there, and the same call resumes from it.
"""

import math
import os
import signal
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from redline.disk import alone, check_room, is_full
from redline.draft.extra import PARTS, needs
from redline.draft.mine.report import drawn, tell_skipped
from redline.draft.train import train_state
from redline.draft.train.batches import Source, is_held_out
from redline.draft.train.curve import write_curve
from redline.draft.train.initial import set_initial
from redline.draft.train.trainer import Line, Recipe, Trainer
from redline.errors import ConfigError
from redline.messages.base import Record
from redline.model.block.config import BlockConfig
from redline.model.block.module import BlockDrafter
from redline.model.drafter import Drafter, is_block, open_drafter
from redline.model.eagle3.config import Architecture
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import K2Config
from redline.progress import Working
from redline.worker.engine import pick_device

INTERRUPTED = 130  # the exit status of shells for SIGINT
STATE_COPIES = 4  # float32 copies of the parameters in a state: weights, their average, two moments


DrafterKind = Literal["eagle3", "dflash", "dspark"]
# Sizes that only one kind of drafter has.
_OF_CHAINS = "architecture", "q_lora_rank", "kv_lora_rank", "fc_norm", "norm_output"
_OF_BLOCKS = "block_size", "num_hidden_layers", "markov_rank", "mask_token_id"


class DrafterSizes(Record, frozen=True):
    """The sizes of a new drafter. None: the target's."""

    kind: DrafterKind = "eagle3"
    architecture: Architecture = "mla"
    draft_vocab_size: int | None = None
    """Tokens of the drafter's own head: the most frequent in the capture's answers. None: all; 0: no own head."""
    intermediate_size: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    fc_norm: bool = True
    norm_output: bool = True
    block_size: int | None = None
    """Of a block drafter, as are the following: positions of a block. None: 8."""
    num_hidden_layers: int | None = None
    """None: 5."""
    markov_rank: int | None = None
    """Rank of DSpark's bias by the token before. None: 256; 0: none."""
    mask_token_id: int | None = None
    """A token that no text has. None: the target's padding token."""


class TrainConfig(Record, frozen=True):
    """Settings of `redline draft train`.

    `capture` is the folder of a stored capture; without it `corpus` lists files of examples, and the target is loaded
    to compute their states during training.

    start  folder of the drafter to start from; None: a new one of the given sizes
    """

    target: str
    out: str
    recipe: Recipe
    capture: str | None = None
    corpus: tuple[str, ...] = ()
    start: str | None = None
    drafter: DrafterSizes = DrafterSizes()
    device: str | None = None  # cpu or cuda; None: the GPU, if there is one


def run(config: TrainConfig, console: Console) -> int:
    """Returns 0 if the drafter is exported, 130 if training was interrupted and can resume.

    Raises ConfigError, and CheckpointError if target or drafter cannot be read.
    """
    check(config)
    try:
        with alone(Path(config.out) / "training") if is_main() else nullcontext():
            return _run(config, console)
    except KeyboardInterrupt:  # Ctrl-C before the first step, or a second Ctrl-C
        if is_main():
            state = train_state.latest(Path(config.out) / "training")
            console.print(f"stopped; the same command {train_state.goes_on(state)}", highlight=False)
        return INTERRUPTED


def is_main() -> bool:
    """Whether this process is the first one started by a launcher, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def _run(config: TrainConfig, console: Console) -> int:
    source, layer_ids = open_source(config, console)
    return train(config, source, layer_ids, console)


def check(config: TrainConfig) -> None:
    """Raises ConfigError, with the field or the missing package, before anything is loaded."""
    needs(*PARTS)
    pick_device(config.device)
    recipe, budget = config.recipe, config.recipe.budget
    if budget.steps is None and budget.tokens is None and budget.seconds is None:
        raise ConfigError("recipe.budget is empty; expected steps, tokens or seconds (--steps, --tokens, --seconds)")
    positive = {f"recipe.budget.{key}": getattr(budget, key) for key in ("steps", "tokens", "seconds")}
    names = (
        "tokens_per_batch accumulate max_length pool lr clip steps_ahead step_decay anchors block_decay log_every "
        "measure_every keep_every"
    )
    positive |= {f"recipe.{key}": getattr(recipe, key) for key in names.split()}
    for key, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{key} is {value}; expected more than 0, and finite")
    for key in ("warmup", "ema", "held_out"):
        value = getattr(recipe, key)
        if not 0 <= value < 1:
            raise ConfigError(f"recipe.{key} is {value}; expected 0 <= {key} < 1")
    for key in ("weight_decay", "l2_sp", "focus", "lk_decay"):
        if not 0 <= getattr(recipe, key) < math.inf:
            raise ConfigError(f"recipe.{key} is {getattr(recipe, key)}; expected 0 or more, and finite")
    if not all(0 <= beta < 1 for beta in recipe.betas):
        raise ConfigError(f"recipe.betas is {list(recipe.betas)}; expected 0 <= beta < 1")
    if not 0 <= recipe.seed < 2**32:
        raise ConfigError(f"recipe.seed is {recipe.seed}; expected 0 to {2**32 - 1}")
    if recipe.tokens_per_batch < recipe.max_length * recipe.accumulate:
        raise ConfigError(
            f"recipe.tokens_per_batch is {recipe.tokens_per_batch}; expected at least max_length x accumulate "
            f"({recipe.max_length * recipe.accumulate}), so that the longest sequence fits"
        )
    if (config.capture is None) == (not config.corpus):
        raise ConfigError(
            "expected exactly one of `capture` (a stored capture) and `corpus` (examples; the target is loaded too)"
        )
    target = Checkpoint.open(config.target).config
    for key, value in msgspec.structs.asdict(config.drafter).items():
        least = 0 if key in ("draft_vocab_size", "markov_rank", "mask_token_id") else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ConfigError(f"drafter.{key} is {value}; expected at least {least}")
    wanted = config.drafter.draft_vocab_size
    if wanted is not None and wanted > target.vocab_size:
        raise ConfigError(f"drafter.draft_vocab_size is {wanted}; the target has {target.vocab_size} tokens")
    blocks = config.drafter.kind != "eagle3"
    # An earlier stage of a recipe may still have to make the drafter to start from.
    made = config.start if config.start is not None and (Path(config.start) / "config.json").exists() else None
    if made is not None and is_block(made) != blocks:
        kind = "a block drafter" if is_block(made) else "EAGLE-3"
        raise ConfigError(f"start is {made}, {kind}, and drafter.kind is {config.drafter.kind!r}; name its kind")
    for key in _OF_CHAINS if blocks else _OF_BLOCKS:
        if (value := getattr(config.drafter, key)) != getattr(DrafterSizes(), key):
            raise ConfigError(f"drafter.{key} is {value!r}; a drafter of kind {config.drafter.kind} has no such size")
    for key in ("loss", "lk_decay", "focus", "steps_ahead", "step_decay", "compile") if blocks else ():
        if (value := getattr(recipe, key)) != getattr(Recipe(budget=budget), key):
            raise ConfigError(f"recipe.{key} is {value!r}; it has no effect on a block drafter: remove the key")
    if config.drafter.mask_token_id is not None and config.drafter.mask_token_id >= target.vocab_size:
        raise ConfigError(
            f"drafter.mask_token_id is {config.drafter.mask_token_id}; the target has {target.vocab_size} tokens"
        )
    if config.drafter.kind == "dflash" and config.drafter.block_size == 1:
        raise ConfigError("drafter.block_size is 1; a block of DFlash needs at least 2 positions to draft a token")


def train(config: TrainConfig, source: Source, layer_ids: tuple[int, ...], console: Console) -> int:
    """As `run`, for an opened source. layer_ids: layers of the states in it."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingTypeStubs]
    from accelerate.utils import set_seed  # pyright: ignore[reportMissingTypeStubs]

    out, folder = Path(config.out), Path(config.out) / "training"
    on_gpu = pick_device(config.device).type == "cuda"
    accelerator = Accelerator(
        cpu=config.device == "cpu",
        mixed_precision="bf16" if on_gpu else "no",
        gradient_accumulation_steps=config.recipe.accumulate,
    )
    main = accelerator.is_main_process
    if _is_done(folder, config):
        if main:
            console.print(f"{out}: already trained")
        return 0
    set_seed(config.recipe.seed)
    drafter, head_VD = drafter_to_train(config, source, layer_ids, accelerator.device)
    trainer = Trainer(accelerator, drafter, head_VD, source, config.recipe)
    state = train_state.latest(folder)
    if main:
        # A new state is complete before the previous one is removed; the drafter is written last.
        sizes = STATE_COPIES * (1 if state is not None else 2) + 1
        check_room(folder, 4 * sizes * drafter.parameter_count, "the states of this training take")
    if state is not None:
        trainer.resume(*train_state.load(state))
    journal = Journal(folder, trainer.step, main)
    if main:
        _write(folder / "config.json", msgspec.json.format(msgspec.json.encode(config), indent=2))
        console.print(
            f"drafter of {drafter.parameter_count / 1e6:.1f} M parameters on {accelerator.num_processes} x "
            f"{accelerator.device.type}; attention {trainer.way} ({trainer.why})"
            + (f"; resumes from step {trainer.step}" if state is not None else ""),
            highlight=False,
            markup=False,
        )

    def keep() -> None:
        facts, tensors = trainer.state()
        if main:
            train_state.save(folder, facts, tensors)
        accelerator.wait_for_everyone()

    with _interrupts(trainer), Working("training", shown=main) as working:

        def log(line: Line) -> None:
            journal.write(line)
            note = ""
            if "loss" in line:
                note = f"step {line['step']}, loss {line['loss']:.3f}, length {line['length']:.2f}"
                note += f", {line['tokens_per_s']:,} tokens/s"
            working.show(min(trainer.reached.share(trainer.step, config.recipe.budget), 1.0), 1.0, note=note)

        trainer.train(log, keep)
        if trainer.stopped:
            keep()
            if main:
                console.print(f"stopped after step {trainer.step}; the same call resumes from there")
            return INTERRUPTED
        result: Line = {"step": trainer.step, "tokens": round(trainer.reached.tokens)}
        result["seconds"] = round(trainer.reached.seconds, 2)
        result |= trainer.measure() if trainer.held_out else {}
        journal.write(result)
        _export(config, drafter, trainer.averaged(), main)
    if main:
        drawn(folder / "loss.png", console, write_curve, journal.lines)
        _write(folder / "result.json", msgspec.json.format(msgspec.json.encode(result), indent=2))
        for path in folder.glob("step-*"):
            train_state.remove(path)
        if "held_out" in result:
            console.print(f"held out: acceptance length {result['held_out']['length']:.3f} (simulated, greedy)")
    accelerator.wait_for_everyone()
    return 0


# Inputs of a training.


def open_source(config: TrainConfig, console: Console) -> tuple[Source, tuple[int, ...]]:
    """The capture, or the corpus with its target; and the ids of the layers of its states.

    Raises ConfigError if either is of another target, broken or empty.
    """
    from redline.draft.corpus.capture import StoredCapture, StreamedCapture, taught_by
    from redline.draft.corpus.corpus import read_examples
    from redline.draft.corpus.target import TargetModel

    if config.capture is not None:
        stored = StoredCapture(Path(config.capture), Checkpoint.open(config.target).fingerprint)
        return stored, stored.layer_ids
    target = TargetModel.open(Path(config.target), pick_device(config.device))
    taught_by(config.corpus, target.fingerprint)
    corpus = read_examples(*map(Path, config.corpus))
    streamed = StreamedCapture(target, corpus.examples)
    if is_main():
        tell_skipped([*corpus.skipped, *streamed.skipped], console)
    return streamed, target.layer_ids


def drafter_to_train(
    config: TrainConfig, source: Source, layer_ids: tuple[int, ...], device: torch.device
) -> tuple[Drafter, Tensor]:
    """(drafter in float32 with the target's embedding and head attached, head bf16 [V, D]), both on the device.

    Raises ConfigError if the drafter to start from reads other layers than the source provides.
    """
    checkpoint = Checkpoint.open(config.target)
    target = K2Config.from_folder(config.target)
    embedding = checkpoint.plain("embed_tokens.weight").to(torch.bfloat16)
    head = embedding if target.tie_word_embeddings else checkpoint.plain("lm_head.weight").to(torch.bfloat16)
    if config.start is not None:
        drafter = open_drafter(config.start, target).float()
        if drafter.config.layer_ids != layer_ids:
            raise ConfigError(
                f"{config.start}: reads the target's layers {drafter.config.layer_ids}; the capture has {layer_ids}"
            )
    else:
        drafter = new_drafter(config, target, source, layer_ids)
        drafter.initialise(embedding, head)
        if isinstance(drafter, BlockDrafter):
            set_initial(drafter, source, config.recipe.seed)
    drafter = drafter.to(device)
    head = head.to(device)
    drafter.attach(embedding.to(device), head)
    return drafter, head


def new_drafter(config: TrainConfig, target: K2Config, source: Source, layer_ids: tuple[int, ...]) -> Drafter:
    """A drafter of the configured sizes, with uninitialised weights.

    A reduced vocabulary is chosen from the source.
    """
    sizes = msgspec.structs.asdict(config.drafter)
    wanted, kind = sizes.pop("draft_vocab_size"), sizes.pop("kind")
    for key in _OF_BLOCKS if kind == "eagle3" else _OF_CHAINS:
        sizes.pop(key)
    if kind == "eagle3":
        sizes["draft_vocab_size"] = {None: -1, 0: None}.get(wanted, wanted)
        drafter = Eagle3(Eagle3Config.for_target(target, layer_ids=layer_ids, **sizes))
    else:  # the public block drafters read the target's head
        sizes["draft_vocab_size"] = wanted or None
        drafter = BlockDrafter(BlockConfig.for_target(target, kind=kind, layer_ids=layer_ids, **sizes))
    if wanted and wanted < target.vocab_size:
        drafter.keep(frequent(source, wanted, target.vocab_size, config.recipe))
    return drafter


def frequent(source: Source, count: int, vocabulary: int, recipe: Recipe) -> Tensor:
    """The `count` most frequent tokens of the training answers, int64 [count]; ties are broken by the lower id."""
    found: Counter[int] = Counter()
    for sequence in source.sequences(0, recipe.seed):
        if not is_held_out(sequence.id, recipe.held_out):
            found.update(sequence.tokens[sequence.loss].tolist())
    return torch.tensor(sorted(range(vocabulary), key=lambda token: (-found[token], token))[:count])


# Outputs of a training.


def _is_done(folder: Path, config: TrainConfig) -> bool:
    """Whether a training with these settings has ended. ConfigError if the folder contains another training."""
    try:
        written = (folder / "config.json").read_bytes()
    except FileNotFoundError:
        return False
    try:
        before = msgspec.json.decode(written, type=TrainConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{folder / 'config.json'}: damaged ({error}): remove {folder} to start over") from None
    for key, was in _facts(before).items():
        if (now := _facts(config)[key]) != was:
            raise ConfigError(
                f"{folder.parent}: contains a training with {key} {was!r}, not {now!r}: use another folder, or remove "
                "this one"
            )
    return (folder / "result.json").exists()


def _facts(config: TrainConfig) -> dict[str, Any]:
    """The settings that identify a training. Of files and folders only the last path component: they may have moved."""
    facts: dict[str, Any] = {
        "capture": config.capture and Path(config.capture).name,
        "corpus": [Path(path).name for path in config.corpus],
        "start": config.start and Path(config.start).name,
    }
    tables = {"recipe": config.recipe, "recipe.budget": config.recipe.budget, "drafter": config.drafter}
    for place, table in tables.items():
        facts |= {f"{place}.{key}": value for key, value in msgspec.structs.asdict(table).items()}
    return {key: value for key, value in facts.items() if key != "recipe.budget"}


def _export(config: TrainConfig, like: Drafter, tensors: dict[str, Tensor], main: bool) -> None:
    """Saves the drafter; a chain's latent padded to the target's width, as vLLM needs; Redline removes the padding."""
    if not main:
        return
    out = Path(config.out)
    drafter = BlockDrafter(like.config) if isinstance(like, BlockDrafter) else Eagle3(like.config)
    tables = {name: buffer.cpu() for name, buffer in like.named_buffers()}
    drafter.load_state_dict({**{name: value.cpu() for name, value in tensors.items()}, **tables})
    try:
        if isinstance(drafter, Eagle3):
            drafter.save(out, K2Config.from_folder(config.target).kv_lora_rank)
        else:
            drafter.save(out)
    except Exception as error:
        if not is_full(error):
            raise
        raise train_state.full(out, error, train_state.latest(out / "training")) from None


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data + b"\n")
    except OSError as error:
        raise train_state.full(path.parent, error, train_state.latest(path.parent)) from None


class Journal:
    """log.jsonl: one line per event, in order. Lines after `step`, from an interrupted run, are removed.

    main: whether this process writes; only one rank does. Raises ConfigError if the disk is full.
    """

    def __init__(self, folder: Path, step: int, main: bool) -> None:
        self._path, self._main = folder / "log.jsonl", main
        self.lines: list[Line] = []
        if main and self._path.exists():
            for line in self._path.read_bytes().splitlines(keepends=True):
                try:
                    found = msgspec.json.decode(line) if line.endswith(b"\n") else None
                except msgspec.DecodeError:  # a line cut by a full disk or by an incomplete copy
                    continue
                if isinstance(found, dict) and isinstance(found.get("step"), int) and found["step"] <= step:
                    self.lines.append(found)
        if main:
            _write(self._path, b"\n".join(msgspec.json.encode(line) for line in self.lines))
            if not self.lines:
                self._path.write_bytes(b"")

    def write(self, line: Line) -> None:
        """Appends a line, in the main process. Raises ConfigError if the disk is full."""
        if not self._main:
            return
        self.lines.append(line)
        try:
            with open(self._path, "ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            raise train_state.full(self._path.parent, error, train_state.latest(self._path.parent)) from None


@contextmanager
def _interrupts(trainer: Trainer) -> Generator[None]:
    """The first Ctrl-C ends the training cleanly, the second one immediately."""

    def ask(number: int, frame: FrameType | None) -> None:
        if trainer.asked:
            raise KeyboardInterrupt
        trainer.asked = True

    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(kind, ask) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
