"""Compares some layers of a checkpoint, computed by this machine's kernels, with the float32 references.

Each layer runs as a model of its own. Its input rows are random, since the layer's norms scale them; they are small, so
that the output is dominated by the layer's contribution. A token is left out if its last chosen expert has almost the
same score as the next one, since rounding may choose either. The bounds are those of law 1: of a CPU's model in one
call over float32 pages, and of a GPU's model.

T tokens of a step, V rows to choose from.
"""

import math
import re
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from redline import clock
from redline.bench.disk_rate import THREADS, FilePart, Read, forget, read_parts
from redline.bench.machine import measure
from redline.bench.step.depth import captured
from redline.bench.step.machines import CHIPS, Several
from redline.bench.step.predict import SHORT, PredictedRanks, like_kimi
from redline.bench.verify.report import Rates, Steps, VerifiedLayer
from redline.disk import human
from redline.errors import CheckpointError
from redline.kernels.inputs import Chunk, Inputs
from redline.kernels.kernel import references
from redline.kernels.rates import WORKING_SET_BYTES
from redline.limits import free_memory
from redline.messages.job import PAGE_TOKENS
from redline.model.k2 import cpu
from redline.model.k2.checkpoint import Checkpoint, Stored, Survey, layer_weights
from redline.model.k2.config import K2Config
from redline.model.k2.cpu import K2
from redline.model.k2.forward import attended, route
from redline.model.k2.load import load_layer
from redline.ops.moe import MoeArgs
from redline.ops.moe import reference as moe

ROWS = 64  # rows of the embedding
SIZE = 0.1  # scale of the embedding's values
LIMITS = {"cpu": 1e-4, "cuda": 2e-2}  # bounds of relative errors in the L2 norm
NEAR = {"cpu": 1e-5, "cuda": 1e-2}  # score difference of two experts below which rounding may choose either
CONTEXTS = (70, 5, 64, 130, 1, 33)  # contexts of the rows of a decode step
CHUNKS = (Chunk(0, 3, 0, 0), Chunk(3, 3, PAGE_TOKENS, 1))  # chunks of a prefill step
ROUNDS, WARM = 20, 3  # timed runs and warm-up runs of a step
SAMPLE_BYTES = 4_000_000_000  # bytes of plain reads
ROOM_BYTES = 2_000_000_000  # bytes of free memory required in addition to the layer


def chosen(config: K2Config) -> list[int]:
    """The layers to check: the first, which is dense in every Kimi model, a middle one and the last."""
    layers = config.num_hidden_layers
    return sorted({0, layers // 2, layers - 1})


def stored_of(found: Survey, layer: int) -> list[Stored] | None:
    """The stored tensors of the layer's weights; None if one is missing."""
    try:
        checkpoint = _opened(found)
        return [part for weight in layer_weights(found.config, layer) for part in checkpoint.parts(weight)]
    except KeyError:
        return None


def compute(found: Survey, layer: int, parts: Sequence[Stored], device: torch.device) -> VerifiedLayer:
    """Loads a layer with an empty page cache, compares its steps with the references, and times a step.

    Raises OSError if a file cannot be read.
    """
    size, dense = sum(part.stop - part.start for part in parts), not found.config.is_moe(layer)
    needs, free = size + size // 4 + ROOM_BYTES, free_memory()
    if free < needs:
        why = f"it needs {human(needs)} of memory, but {human(free)} are free"
        return VerifiedLayer(layer=layer, dense=dense, why_not=why)
    embedding = SIZE * torch.randn(ROWS, found.config.hidden_size, generator=torch.Generator().manual_seed(layer))
    embedding = embedding.to(torch.bfloat16)
    forget(sorted({part.file for part in parts}))
    try:
        began = clock.monotonic()
        ours = load_layer(_opened(found), device, layer, embedding)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        load_s = clock.monotonic() - began
        theirs = ours if device.type == "cpu" else cpu.load_layer(_opened(found), torch.device("cpu"), layer, embedding)
    except CheckpointError as error:
        return VerifiedLayer(layer=layer, dense=dense, why_not=str(error))
    with torch.inference_mode():
        compared = [_compare(ours, theirs, *step) for step in ((CHUNKS, ()), ((), CONTEXTS))]
        ms = _step_ms(ours, size)
    errors, tokens = [error for one in compared for error in one[0]], sum(one[1] for one in compared)
    worst = max(errors) if all(map(math.isfinite, errors)) else None
    return VerifiedLayer(
        layer=layer,
        dense=dense,
        bytes=size,
        load_s=round(load_s, 3),
        error=worst,
        limit=LIMITS[device.type],
        tokens=tokens,
        near_ties=sum(one[2] for one in compared),
        step_ms=round(ms, 4),
    )


def _opened(found: Survey) -> Checkpoint:
    """A checkpoint with its own file mappings: mapped files cannot be evicted from the page cache."""
    return Checkpoint(found.config, found.tensors, found.files, found.bytes, fingerprint="")


def _compare(ours: K2, theirs: K2, chunks: Sequence[Chunk], contexts: Sequence[int]) -> tuple[list[float], int, int]:
    """(relative errors of a step's outputs and of its latent KV, tokens compared, tokens left out)."""
    kind = ours.device.type
    inputs, plain = _inputs(ours, chunks, contexts), _inputs(theirs, chunks, contexts)
    planes, wanted_planes = _planes(ours, inputs), _planes(theirs, plain)
    _, features = ours.forward(inputs, planes, (1,))
    with references():
        wanted, margin_T = _reference(theirs, plain, wanted_planes[0])
    assert features is not None
    clear = margin_T > NEAR[kind]
    errors = [_error(planes[0].flatten(0, 1)[inputs.rows_T], wanted_planes[0].flatten(0, 1)[plain.rows_T])]
    if clear.any():
        errors.append(_error(features[clear.to(features.device)], wanted[clear]))
    return errors, int(clear.sum()), int((~clear).sum())


def _reference(model: K2, inputs: Inputs, plane: Tensor) -> tuple[Tensor, Tensor]:
    """(output of the layer, float32 [T, D]; score margin of a token's last chosen expert over the next one, [T])."""
    (block,) = model.blocks
    residual, x = attended(model.embedding_VD[inputs.ids_T].float(), None, block, inputs, plane)
    routed = route(x, block.experts)
    out = residual + moe(MoeArgs(x, block.shared_gate_up, block.shared_down, routed))
    experts = block.experts
    if experts is None or experts.chosen >= len(experts.bias_E):
        return out, torch.full((len(x),), torch.inf)
    scores = torch.sigmoid(x @ experts.router.dense().float().T) + experts.bias_E
    best = scores.topk(experts.chosen + 1).values
    return out, best[:, -2] - best[:, -1]


def _error(a: Tensor, b: Tensor) -> float:
    b = b.double()
    return math.sqrt(float((a.cpu().double() - b).square().sum()) / max(float(b.square().sum()), 1e-60))


def _inputs(model: K2, chunks: Sequence[Chunk], contexts: Sequence[int]) -> Inputs:
    """A step of chunks, or of one decoded token per context, each in its own slot."""
    places = [(chunk.slot, chunk.start + i) for chunk in chunks for i in range(chunk.count)]
    places += [(slot, context - 1) for slot, context in enumerate(contexts)]
    slots, pages = 1 + max(slot for slot, _ in places), 1 + max(at for _, at in places) // PAGE_TOKENS
    tables = torch.arange(slots * pages, dtype=torch.int32).view(slots, pages)
    rows = [int(tables[slot, at // PAGE_TOKENS]) * PAGE_TOKENS + at % PAGE_TOKENS for slot, at in places]
    cos, sin = model.angles(torch.tensor([at for _, at in places], device=model.device))
    first = len(places) - len(contexts)

    def there(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=model.device)

    return Inputs(
        ids_T=there(range(len(places)), torch.int64),
        cos_T=cos,
        sin_T=sin,
        rows_T=there(rows, torch.int64),
        chunks=chunks,
        tokens_Q=there(range(first, len(places))),
        slots_Q=there(range(len(contexts))),
        lengths_Q=there(contexts),
        tables=tables.to(model.device),
    )


def _planes(model: K2, inputs: Inputs) -> Tensor:
    """Random latent KV [1, pages, 64, kv width]: float32 on a CPU, bf16 on a GPU; all values are exact in bf16."""
    sizes = 1, inputs.tables.numel(), PAGE_TOKENS, model.config.kv_width
    latents = (0.5 * torch.randn(sizes, generator=torch.Generator().manual_seed(9))).to(torch.bfloat16)
    return latents.to(model.device, torch.float32 if model.device.type == "cpu" else torch.bfloat16)


def _step_ms(model: K2, size: int) -> float:
    """Median milliseconds of a step of one token at a context of SHORT, with another token each time and a cold cache.

    size: bytes of the weights. A small layer would stay in the CPU's or GPU's cache, from which a whole model's other
    layers would evict it.
    """
    inputs = _inputs(model, (), (SHORT,))
    planes = _planes(model, inputs).to(torch.bfloat16)

    def wait() -> None:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    def work() -> None:
        model.forward(inputs, planes)

    run = captured(work, model.device) if model.recordable else work
    times: list[float] = []
    between = torch.zeros(
        WORKING_SET_BYTES if size < 4 * WORKING_SET_BYTES else 0, device=model.device, dtype=torch.uint8
    )
    for round in range(WARM + ROUNDS):
        inputs.ids_T.fill_(round % ROWS)
        between.add_(1)
        wait()
        began = clock.perf_counter()
        run()
        wait()
        times.append(1e3 * (clock.perf_counter() - began))
    return statistics.median(times[WARM:])


def load_rate(layers: Sequence[VerifiedLayer], parts: Sequence[Stored], whole: int) -> Rates:
    """The load rate of the layers compared with plain reads of some of their bytes, each with an empty page cache.

    whole: bytes of all weights. Raises OSError if a file cannot be read, ConfigError if it has become shorter.
    """
    sample: list[FilePart] = []
    left = SAMPLE_BYTES
    for part in parts:
        if left > 0:
            sample.append(FilePart(part.file, part.start, min(part.stop, part.start + left)))
            left -= part.stop - part.start
    reads: list[Read] = []
    for threads in THREADS:
        forget(sorted({part.file for part in sample}))
        reads.append(read_parts(sample, threads))
    rate = sum(layer.bytes for layer in layers) / sum(layer.load_s for layer in layers) / 1e9
    best = max(read.gb_per_s for read in reads)
    return Rates(
        disk=tuple(reads),
        load_gb_per_s=round(rate, 3),
        of_disk=round(rate / best, 3) if best else 0.0,
        whole_load_s=round(whole / rate / 1e9, 1),
    )


def steps_of(config: K2Config, layers: Sequence[VerifiedLayer], device: torch.device) -> Steps | None:
    """The time of a step of all layers, extrapolated from the measured ones; None if a kind of layer is missing."""
    whole = 0.0
    for dense, count in ((True, config.num_hidden_layers - config.moe_layers), (False, config.moe_layers)):
        took = [layer.step_ms for layer in layers if layer.dense is dense and not layer.why_not]
        if count and not took:
            return None
        whole += count * statistics.fmean(took) if count else 0.0
    read = config.bytes_per_token - 2 * config.vocab_size * config.hidden_size * (not config.tie_word_embeddings)
    machine = measure(device)
    on = _known(machine.name) if device.type == "cuda" else None
    predicted = PredictedRanks(config, on).step(1, 1, SHORT).ms if on is not None and like_kimi(config) else None
    return Steps(
        measured_ms=round(whole, 3),
        floor_ms=round(1e3 * read / machine.bytes_per_s, 3),
        predicted_ms=None if predicted is None else round(predicted, 3),
        on=machine.name if on is None else on.name,
    )


def _known(name: str) -> Several | None:
    """One GPU known to `redline doctor`."""
    found = re.search("|".join(CHIPS), name)
    return None if found is None else Several(1, CHIPS[found[0]])
