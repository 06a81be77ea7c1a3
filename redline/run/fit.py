"""Memory planning: the number of KV pages and the longest context that fit. Pure functions; their results can print the
arithmetic.

In addition to the pages, memory holds the weights, a drafter, the state of running jobs, the activations of a step, and
on a GPU the CUDA graphs. These are upper bounds computed from sizes, not measurements; tests compare them with the
memory of a step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from redline.errors import ConfigError
from redline.kernels.cuda.step.adjust import LogitAdjustments
from redline.kernels.cuda.step.step_rows import MOST_STEP
from redline.messages.job import PAGE_TOKENS
from redline.messages.step import Shape
from redline.model.block.config import BlockConfig
from redline.model.draft_shard import head_ranks, left_out
from redline.model.drafter import DrafterConfig
from redline.model.k2.config import K2Config
from redline.model.k2.shard import part_of, rooms_of, weight_bytes
from redline.ops.block_attention import TOGETHER
from redline.run.graphs.shapes import FIRST_SHAPES, shapes
from redline.run.sampling.on_device import TOP_LOGPROBS
from redline.run.sampling.on_host import SCORED_ROWS

# Default share of the memory left for pages, and its upper bound in bytes
KV_SHARE = 0.25
KV_MOST = 4 << 30
# The same for a GPU that the worker has for itself. The bound is in pages, two million tokens; more on request.
KV_SHARE_ALONE, KV_PAGES_ALONE = 0.9, 1 << 15
# Rows sorted at once over the vocabulary on a GPU, and bytes per token for that (redline/ops/sample.py)
DRAWN_ROWS, DRAWN_BYTES = 32, 48
RECORDED_LAUNCH = 16 << 10  # bytes per kernel launch in a CUDA graph
LAUNCHES = 24  # kernel launches per layer, and per drafter pass, in a CUDA graph, at most
# bytes that torch and its libraries take, in addition to a step's tensors
LIBRARIES = {"cpu": 64 << 20, "cuda": 768 << 20}


@dataclass(frozen=True)
class Layout:
    """The number of KV pages of PAGE_TOKENS tokens, and the longest context of a job, prompt and output together.

    page_bytes: bytes of one page in all planes, including draft_bytes for the drafter.
    """

    pages: int
    max_model_len: int
    kv_dtype: torch.dtype
    page_bytes: int
    draft_bytes: int = 0

    @property
    def tokens(self) -> int:
        """KV capacity in tokens."""
        return self.pages * PAGE_TOKENS

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pages together."""
        return self.pages * self.page_bytes

    def explain(self) -> list[str]:
        """Lines that show the pages, their bytes and their tokens, with the arithmetic."""
        per_token = (self.page_bytes - self.draft_bytes) // PAGE_TOKENS
        drafter = f" + {self.draft_bytes:,} of the drafter" if self.draft_bytes else ""
        jobs = self.tokens / self.max_model_len
        return [
            f"a page           {PAGE_TOKENS} tokens x {per_token:,} bytes{drafter} = {self.page_bytes:,} bytes",
            f"KV memory        {self.pages:,} pages x {self.page_bytes:,} bytes = {self.kv_bytes / 1e9:.2f} GB",
            f"KV capacity      {self.tokens:,} tokens = {jobs:.1f} x the longest context of {self.max_model_len:,}",
        ]


@dataclass(frozen=True)
class Needs:
    """Bytes of everything except KV pages, for jobs of a given length."""

    weights: int
    drafter: int  # weights of the drafter
    slots: int  # tokens, page tables, angles, on a GPU the logit adjustments of running jobs, and the spare page
    scratch: int  # activations of a step, with the most tokens and the longest context
    recorded: int  # CUDA graphs

    @property
    def whole(self) -> int:
        """Bytes in total."""
        return self.weights + self.drafter + self.slots + self.scratch + self.recorded

    def explain(self) -> list[str]:
        """A line for each part above 0, in GB."""
        return [f"{name:<16} {size / 1e9:.2f} GB" for name, size in self._parts()]

    def sentence(self) -> str:
        """The parts as a sum in GB, for an error message."""
        return " + ".join(f"{size / 1e9:,.2f} GB of {name}" for name, size in self._parts())

    def _parts(self) -> Iterator[tuple[str, int]]:
        yield "weights", self.weights
        for name, size in (("drafter", self.drafter), ("running jobs", self.slots), ("a step's scratch", self.scratch)):
            if size:
                yield name, size
        if self.recorded:
            yield "CUDA graphs", self.recorded


class ShapeMemory(NamedTuple):
    """Bytes of one shape's CUDA graphs."""

    launches: int
    between: int  # tensors between launches and graphs; all shapes share the largest


@dataclass(frozen=True)
class RecordedSteps:
    """The captured shapes of decode steps, in the order of their capture, with their memory."""

    shapes: Mapping[Shape, ShapeMemory]

    @property
    def between(self) -> int:
        """Bytes of the tensors between launches and graphs, which all shapes share: one shape runs at a time."""
        return max((memory.between for memory in self.shapes.values()), default=0)

    @property
    def whole(self) -> int:
        """Bytes in total."""
        return sum(memory.launches for memory in self.shapes.values()) + self.between

    def explain(self) -> list[str]:
        """A line for each shape, and one for the shared memory."""
        later = len(self.shapes) - FIRST_SHAPES
        when = f"the last {later} while idle" if later > 0 else "all before the first job"
        lines = [
            f"CUDA graphs      {len(self.shapes)} shapes of rows x positions, up to a context length in tokens; {when}"
        ]
        for shape, memory in self.shapes.items():
            size = f"{shape.rows} x {shape.positions}"
            lines.append(
                f"  {size:<6} to {shape.longest:<9,} {memory.launches / 1e6:,.1f} MB of launches, "
                f"{memory.between / 1e6:,.1f} MB between them"
            )
        launches, between = (size / 1e6 for size in (self.whole - self.between, self.between))
        shared = f"{between:,.1f} MB between them, shared by all"
        lines.append(f"graph memory     {launches:,.1f} MB of launches + {shared} = {self.whole / 1e6:,.1f} MB")
        return lines


@dataclass(frozen=True)
class MemorySizes:
    """The sizes that determine an engine's memory, except for pages and the length of jobs.

    positions    per decode row, at most: its last token and its drafts
    gpu_kernels  whether the GPU's own kernels run the model; only they are captured, and shard a drafter over ranks
    drafter_parameters  of the whole drafter
    head_bits    of the drafter's output head: 16, or 8
    ranks        tensor parallel ranks; all byte counts are per rank
    in_memory    number of first layers of the model that are loaded; None: all
    """

    config: K2Config
    kv_dtype: torch.dtype = torch.bfloat16
    step_tokens: int = 512
    max_running: int = 64
    positions: int = 1
    device: str = "cpu"
    gpu_kernels: bool = False
    drafter: DrafterConfig | None = None
    drafter_parameters: int = 0
    head_bits: int = 16
    ranks: int = 1
    in_memory: int | None = None

    @property
    def draft_bytes(self) -> int:
        """Bytes of a page for the drafter: its rows, and what the next page's first row needs (`KvPool.tails`)."""
        if self.drafter is None:
            return 0
        return self.drafter.kv_bytes_per_token(self.kv_dtype) * PAGE_TOKENS + 4 * self.drafter.tail_width

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: the target's latents of all layers, and the drafter's part."""
        return self.config.kv_bytes_per_token(self.kv_dtype) * PAGE_TOKENS + self.draft_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of one rank's part of the target's weights."""
        config = self.config
        if self.in_memory is not None:
            config = replace(config, num_hidden_layers=self.in_memory)
        return weight_bytes(config, self.ranks)

    @property
    def links_bytes(self) -> int:
        """Bytes of the all-reduce buffers of a GPU's ranks (`GpuGroup`)."""
        if self.ranks == 1 or self.device != "cuda":
            return 0
        return 4 * self.ranks * rooms_of(self.config, self.ranks).words

    def needs(self, max_model_len: int) -> Needs:
        """Bytes of everything except pages, for jobs of up to `max_model_len` tokens."""
        slots, pages = self.max_running + 1, _pages(max_model_len)
        angles = 8 * self.config.qk_rope_head_dim  # bytes per position, for the model's table and the drafter's
        return Needs(
            weights=self.weight_bytes,
            drafter=self._drafter_bytes,
            slots=slots * (8 * (max_model_len + 1) + 4 * pages)
            + angles * (max_model_len + 1)
            + self.page_bytes
            + self._wishes_bytes,
            scratch=self._scratch(max_model_len),
            recorded=self.recorded_steps(max_model_len).whole,
        )

    @property
    def _wishes_bytes(self) -> int:
        """Bytes of the sampling state of CUDA graphs: token counts, masks and log probabilities."""
        if self.device != "cuda":
            return 0
        vocabulary, positions = self.config.vocab_size, MOST_STEP
        of_positions = positions * (4 * -(-vocabulary // 32) + 8 * TOP_LOGPROBS.stop)
        return LogitAdjustments.bytes_of(self.max_running + 1, vocabulary) + of_positions

    @property
    def _drafter_bytes(self) -> int:
        """Bytes of one rank's part of the drafter's weights."""
        if self.drafter is None:
            return 0
        ranks = self.ranks if self.gpu_kernels else 1
        numbers = self.drafter_parameters - left_out(self.drafter, ranks)
        # On a CPU: as loaded, in float32, and as the ops use it, in bf16.
        return (2 if self.device == "cuda" else 6) * numbers + self._head_bytes(head_ranks(self.drafter, ranks))

    def _head_bytes(self, ranks: int) -> int:
        """Additional bytes of an 8-bit output head; negative if the drafter has a head of its own.

        ranks: tensor parallel ranks that share the head.
        """
        if self.drafter is None or self.head_bits == 16:
            return 0
        rows, hidden = (self.drafter.draft_vocab_size or self.drafter.vocab_size) // ranks, self.drafter.hidden_size
        own = 0 if self.drafter.draft_vocab_size is None else 2 * rows * hidden
        return (rows * (hidden + 4) if self.gpu_kernels else 2 * rows * hidden) - own

    def _scratch(self, max_model_len: int) -> int:
        c, exact = part_of(self.config, self.ranks), self.kv_dtype == torch.float32
        tokens, asked = self.step_tokens, min(self.step_tokens, self.max_running * self.positions)
        heads, head, value = c.num_attention_heads, c.qk_head_dim, c.v_head_dim
        features = 0 if self.drafter is None else len(self.drafter.layer_ids) * c.hidden_size
        wide = max(2 * c.intermediate_size, c.num_experts_per_tok * (2 * c.moe_intermediate_size + c.hidden_size))
        narrow = c.q_lora_rank + c.kv_width + 2 * c.shared_intermediate_size + c.n_routed_experts
        # Per token: the residual stream in several forms, queries and attention outputs, the widest of the MLPs.
        token = 4 * (8 * c.hidden_size + 2 * features + 2 * heads * (head + value) + wide + narrow)
        if self.drafter is not None:  # the drafter's one layer over the same tokens
            token += 4 * (8 * c.hidden_size + 2 * heads * (head + value) + 3 * self.drafter.intermediate_size)
        parts = 0
        if (
            isinstance(self.drafter, BlockConfig) and self.device == "cpu"
        ):  # contexts, and scores of the blocks with them
            d = self.drafter
            parts = TOGETHER * 4 * (3 * d.row_width + 2 * d.num_attention_heads * d.block_size)
        # Per token with logits: absorbed queries, partial sums, logits, and copies for sampling.
        row = 8 * heads * (c.kv_width + c.kv_lora_rank) + 4 * 4 * c.vocab_size
        scored = 2 * 4 * SCORED_ROWS * c.vocab_size
        if self.device == "cuda":
            # A prompt's expanded context: rows and where they are, keys and values; and the weights that expand it.
            context = 4 * c.kv_width + 48 + 2 * heads * (c.qk_nope_head_dim + value)
            token += 2 * heads * head  # keys of a whole prompt with the part that heads share
            fixed = 4 * heads * c.kv_lora_rank * (c.qk_nope_head_dim + value)
            fixed += DRAWN_ROWS * DRAWN_BYTES * c.vocab_size
        else:
            # Latents as rows and as panels, keys and values of one head at a time.
            context = (4 if exact else 2) * (2 * c.kv_lora_rank + head + value)
            fixed = 16 * c.vocab_size
        whole = tokens * token + asked * row + max_model_len * context + fixed + scored + parts
        return whole + self.links_bytes + LIBRARIES[self.device]

    def recorded_steps(self, max_model_len: int) -> RecordedSteps:
        """The shapes captured for jobs of `max_model_len` tokens: those before the first job and later ones, all
        counted."""
        if not self.gpu_kernels:
            return RecordedSteps({})
        c = part_of(self.config, self.ranks)
        heads = c.num_attention_heads
        # Per position: the residual stream in several forms, absorbed queries and attention outputs, logits.
        position = (
            4 * (8 * c.hidden_size + 2 * heads * (c.kv_width + c.kv_lora_rank + c.v_head_dim)) + 16 * c.vocab_size
        )
        passes = 0
        if self.drafter is not None:  # the features that the drafter reads, and one layer of it
            features = len(self.drafter.layer_ids) * c.hidden_size
            position += 4 * (2 * features + 8 * c.hidden_size + 3 * self.drafter.intermediate_size)
        if isinstance(self.drafter, BlockConfig):  # the logits of all drafts of a row, and its block
            passes = self.drafter.num_hidden_layers
            position += 8 * c.vocab_size + 16 * self.drafter.block_size * c.hidden_size

        def memory(shape: Shape) -> ShapeMemory:
            launches = LAUNCHES * c.num_hidden_layers + 64
            if self.drafter is not None:  # one pass per draft, a first one, and one more; or the layers of a block
                launches += LAUNCHES * (shape.positions + 1 + passes)
            between = shape.rows * shape.positions * position
            return ShapeMemory(launches * RECORDED_LAUNCH, between + DRAWN_ROWS * DRAWN_BYTES * c.vocab_size)

        wanted = shapes(self.max_running, self.positions, _pages(max_model_len) * PAGE_TOKENS)
        return RecordedSteps({shape: memory(shape) for shape in wanted})

    def left(self, free: int, max_model_len: int) -> int:
        """Bytes of `free` that are left for pages, for jobs of `max_model_len` tokens; negative if even the rest
        does not fit."""
        return free - self.needs(max_model_len).whole


ROOM = 4  # factor: the memory left for pages must be at least this multiple of what larger steps add


def in_steps(sizes: MemorySizes, free: int, choices: Sequence[int]) -> MemorySizes:
    """The sizes with the largest number of positions per step, among `choices`, that leaves enough of `free` for
    pages: ROOM times what its activations take in addition to those of the smallest choice. If none does, the
    smallest choice."""
    fewest = replace(sizes, step_tokens=min(choices))
    for tokens in sorted(choices, reverse=True):
        larger = replace(sizes, step_tokens=tokens)
        left = larger.left(free, 1)
        if left >= ROOM * (fewest.left(free, 1) - left):
            return larger
    return fewest


def fit(
    sizes: MemorySizes, free: int, kv_bytes: int | None = None, max_model_len: int | None = None, *, alone: bool = False
) -> Layout:
    """The number of pages that `kv_bytes` holds, and the longest context that they allow.

    free           bytes of unused memory
    kv_bytes       bytes for pages; None: derived from `free`
    max_model_len  tokens of one job; None: derived from `free`
    alone          with a GPU's own kernels: no other process needs the GPU's free memory, so pages may take most of it

    Raises ConfigError, one line with the arithmetic, if that does not fit. The settings that it suggests instead do
    fit.
    """
    reads = sizes.config.max_position_embeddings
    if max_model_len is not None and not 1 <= max_model_len <= reads:
        raise ConfigError(f"max-model-len is {max_model_len:,}; this model supports 1 to {reads:,} tokens")
    alone = alone and sizes.gpu_kernels  # the memory of reference ops is not counted to the last byte
    length = max_model_len or _derived_length(sizes, free, kv_bytes, alone)
    given = kv_bytes
    if kv_bytes is None:
        most = sizes.left(free, length)
        kv_bytes = max(_share(sizes, most, alone), min(_paged(sizes, length), most))
    if length == 0 or not _paged(sizes, length) <= kv_bytes <= sizes.left(free, length):
        raise _refusal(sizes, free, given, max_model_len)
    return Layout(kv_bytes // sizes.page_bytes, length, sizes.kv_dtype, sizes.page_bytes, sizes.draft_bytes)


def _derived_length(sizes: MemorySizes, free: int, kv_bytes: int | None, alone: bool) -> int:
    """The longest context of a job, in tokens; 0: none fits.

    If `kv_bytes` is None too, pages get their default share of the memory, or all that is left if that share holds no
    job.
    """
    if kv_bytes is not None:
        return _longest(sizes, free, kv_bytes)
    return _longest(sizes, free, _share(sizes, sizes.left(free, 1), alone)) or _longest(sizes, free, None)


def _share(sizes: MemorySizes, left: int, alone: bool) -> int:
    """The default bytes for pages, of the `left` bytes."""
    share, most = (KV_SHARE_ALONE, KV_PAGES_ALONE * sizes.page_bytes) if alone else (KV_SHARE, KV_MOST)
    return max(0, min(most, int(left * share)))


def _longest(sizes: MemorySizes, free: int, kv_bytes: int | None) -> int:
    """The longest context of a job, in tokens, that `kv_bytes` of pages hold and that fits into `free`; 0: none does.

    kv_bytes: None: the bytes that the job needs.
    """

    def fits(length: int) -> bool:
        paged = _paged(sizes, length)
        return (kv_bytes is None or paged <= kv_bytes) and (kv_bytes or paged) <= sizes.left(free, length)

    low, high = 0, sizes.config.max_position_embeddings
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _refusal(sizes: MemorySizes, free: int, kv_bytes: int | None, max_model_len: int | None) -> ConfigError:
    """The error, in one line: the requested and the available memory, and settings that fit."""
    length = max_model_len or 1
    needs, needed = sizes.needs(length), _paged(sizes, length)
    asked = needed if kv_bytes is None else kv_bytes
    what = f" for max-model-len {max_model_len:,}" if max_model_len else ""
    if kv_bytes is not None and kv_bytes < needed:
        fault = (
            f"kv-memory {kv_bytes / 1e9:,.2f} GB holds {kv_bytes // sizes.page_bytes:,} pages of "
            f"{sizes.page_bytes:,} bytes; {_pages(length):,} are needed{what}"
        )
    else:
        missing = (needs.whole + asked - free) / 1e9
        fault = (
            f"{needs.sentence()} + {asked / 1e9:,.2f} GB of pages{what} do not fit into the {free / 1e9:,.2f} GB of "
            f"free memory: {missing:,.2f} GB too many"
        )
    advice = list(_advice(sizes, free, kv_bytes, max_model_len))
    weights = "; ".join(sizes.config.explain_weight_bytes())
    if not advice:
        return ConfigError(f"{fault}; use a larger device, or several. The weights: {weights}")
    return ConfigError(f"{fault}: give {', or '.join(advice)}")


def _advice(sizes: MemorySizes, free: int, kv_bytes: int | None, max_model_len: int | None) -> Iterator[str]:
    """Flags that fit, each line on its own; a line changes one flag if that is enough."""
    length = max_model_len or 1
    least, most = _paged(sizes, length), sizes.left(free, length)
    alone = False
    if kv_bytes is not None and least <= most:
        alone = True
        yield f"--kv-memory {_size(max(least, min(kv_bytes, most)), least, most)}"
    if max_model_len is not None and (shorter := _longest(sizes, free, kv_bytes)):
        alone = True
        yield f"--max-model-len {shorter}"
    if not alone and max_model_len is not None and kv_bytes is not None and (shorter := _longest(sizes, free, None)):
        least, most = _paged(sizes, shorter), sizes.left(free, shorter)
        yield f"--max-model-len {shorter} --kv-memory {_size(least, least, most)}"


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


def _paged(sizes: MemorySizes, tokens: int) -> int:
    """Bytes of the pages of one job."""
    return _pages(tokens) * sizes.page_bytes


def _size(wanted: int, least: int, most: int) -> str:
    """A size near `wanted` in [least, most], in the form that the flag takes, with the fewest digits possible."""
    for unit, digits, name in ((10**9, 2, "GB"), (10**6, 2, "MB")):
        step = unit // 10**digits
        for steps in (-(-wanted // step), wanted // step):
            if least <= steps * step <= most:
                return f"{steps * step / unit:.{digits}f}{name}"
    return str(wanted)
