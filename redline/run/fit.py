"""What fits: pages, and the longest job, from memory. Pure functions whose results print their own arithmetic.

Beside the pages stand the weights, a drafter, what running jobs are written in, what a step computes in, and on a GPU
its recorded steps. These are bounds from sizes alone, not measurements; tests hold them against what a step takes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from redline.errors import ConfigError
from redline.kernels.hopper.step.adjust import SlotWishes
from redline.kernels.hopper.step.step_rows import MOST_STEP
from redline.model.eagle3.module import Eagle3Config
from redline.model.eagle3.shard import head_ranks, left_out
from redline.model.k2.config import K2Config
from redline.model.k2.shard import part_of, rooms_of, weight_bytes
from redline.run.graphs.shapes import FIRST_SHAPES, shapes
from redline.run.sampling.on_device import TOP_LOGPROBS
from redline.run.sampling.on_host import SCORED_ROWS
from redline.wire.job import PAGE_TOKENS
from redline.wire.step import Shape

KV_SHARE = 0.25  # of the memory that is left for pages, where nothing is said; at most KV_MOST
KV_MOST = 4 << 30
# Likewise, of a GPU that the worker has for itself; at most so many pages, two million tokens: who wants more says it.
KV_SHARE_ALONE, KV_PAGES_ALONE = 0.9, 1 << 15
DRAWN_ROWS, DRAWN_BYTES = (
    32,
    48,
)  # rows whose vocabularies are sorted at once on a GPU, bytes a token (redline/ops/sample.py)
RECORDED_LAUNCH = 16 << 10  # bytes of a launch in a recorded step
LAUNCHES = 24  # of a layer in a recorded step, and of a drafter's pass, at most
LIBRARIES = {"cpu": 64 << 20, "cuda": 768 << 20}  # what torch and its libraries take beside the tensors of a step


@dataclass(frozen=True)
class Layout:
    """How many pages of PAGE_TOKENS tokens there are, and how many tokens one job may have, prompt and answer.

    page_bytes: of one page in all planes, of which draft_bytes are the drafter's.
    """

    pages: int
    max_model_len: int
    kv_dtype: torch.dtype
    page_bytes: int
    draft_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that all pages hold together."""
        return self.pages * PAGE_TOKENS

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pages together."""
        return self.pages * self.page_bytes

    def explain(self) -> list[str]:
        """Lines that tell the pages, their bytes and their tokens, with the arithmetic."""
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
    """Bytes of everything but pages, for jobs of a given length."""

    weights: int
    drafter: int  # its weights
    slots: int  # tokens, page tables, angles and on a GPU wishes of running jobs, and the page that is nobody's
    scratch: int  # what a step computes in, at its most tokens and its longest context
    recorded: int  # steps on a GPU

    @property
    def whole(self) -> int:
        """Bytes of all of it."""
        return self.weights + self.drafter + self.slots + self.scratch + self.recorded

    def explain(self) -> list[str]:
        """A line for each part that there is, in GB."""
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
            yield "recorded steps", self.recorded


class ShapeMemory(NamedTuple):
    """Bytes of one recorded shape."""

    launches: int
    between: int  # what lies between launches and pieces, of which all shapes share the largest


@dataclass(frozen=True)
class RecordedSteps:
    """The recorded shapes of decode steps in the order of their recording, with their memory."""

    shapes: Mapping[Shape, ShapeMemory]

    @property
    def between(self) -> int:
        """Bytes that lie between launches and pieces: one shape runs at a time."""
        return max((memory.between for memory in self.shapes.values()), default=0)

    @property
    def whole(self) -> int:
        """Bytes of all of it."""
        return sum(memory.launches for memory in self.shapes.values()) + self.between

    def explain(self) -> list[str]:
        """A line for each shape, and one for what they share."""
        later = len(self.shapes) - FIRST_SHAPES
        when = f"the last {later} while nothing runs" if later > 0 else "all before the first job"
        lines = [f"recorded shapes  {len(self.shapes)} of rows x positions, contexts to so many tokens; {when}"]
        for shape, memory in self.shapes.items():
            size = f"{shape.rows} x {shape.positions}"
            lines.append(
                f"  {size:<6} to {shape.longest:<9,} {memory.launches / 1e6:,.1f} MB of launches, "
                f"{memory.between / 1e6:,.1f} MB between them"
            )
        launches, between = (size / 1e6 for size in (self.whole - self.between, self.between))
        shared = f"{between:,.1f} MB between them, which all share"
        lines.append(f"recorded memory  {launches:,.1f} MB of launches + {shared} = {self.whole / 1e6:,.1f} MB")
        return lines


@dataclass(frozen=True)
class Sizes:
    """What decides how much memory an engine needs, but for pages and the length of jobs.

    positions    of a decode row, at most: its last token and its drafts
    gpu_kernels  whether the GPU's own kernels run the model; they alone are recorded, and divide a drafter among ranks
    drafter_parameters  of the whole drafter
    head_bits    of the head that drafts: 16, or 8
    ranks        that share the model: the bytes are those of one
    in_memory    layers that lie there, the first of the model; None: all
    """

    config: K2Config
    kv_dtype: torch.dtype = torch.bfloat16
    step_tokens: int = 512
    max_running: int = 64
    positions: int = 1
    device: str = "cpu"
    gpu_kernels: bool = False
    drafter: Eagle3Config | None = None
    drafter_parameters: int = 0
    head_bits: int = 16
    ranks: int = 1
    in_memory: int | None = None

    @property
    def draft_bytes(self) -> int:
        """Bytes of a page that are the drafter's: its rows, and the page's last feature (`KvPool.tails`)."""
        if self.drafter is None:
            return 0
        return self.drafter.kv_bytes_per_token(self.kv_dtype) * PAGE_TOKENS + 4 * self.drafter.hidden_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: the target's latents of all layers, and the drafter's part."""
        return self.config.kv_bytes_per_token(self.kv_dtype) * PAGE_TOKENS + self.draft_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the target's weights, a rank's part of them."""
        config = self.config
        if self.in_memory is not None:
            config = replace(config, num_hidden_layers=self.in_memory)
        return weight_bytes(config, self.ranks)

    @property
    def links_bytes(self) -> int:
        """Bytes of the inbox through which a GPU's ranks meet (`GpuGroup`)."""
        if self.ranks == 1 or self.device != "cuda":
            return 0
        return 4 * self.ranks * rooms_of(self.config, self.ranks).words

    def needs(self, max_model_len: int) -> Needs:
        """Bytes of everything but pages, where jobs come to `max_model_len` tokens."""
        slots, pages = self.max_running + 1, _pages(max_model_len)
        angles = 8 * self.config.qk_rope_head_dim  # of the model's table, and of a drafter's
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
        """Bytes of what recorded steps know of requests: counts of tokens, masks and log probabilities."""
        if self.device != "cuda":
            return 0
        vocabulary, positions = self.config.vocab_size, MOST_STEP
        of_positions = positions * (4 * -(-vocabulary // 32) + 8 * TOP_LOGPROBS.stop)
        return SlotWishes.bytes_of(self.max_running + 1, vocabulary) + of_positions

    @property
    def _drafter_bytes(self) -> int:
        """Bytes of the drafter's weights, a rank's part of them."""
        if self.drafter is None:
            return 0
        ranks = self.ranks if self.gpu_kernels else 1
        numbers = self.drafter_parameters - left_out(self.drafter, ranks)
        # As it is read, in float32; and as its ops want it, in bf16.
        return (2 if self.device == "cuda" else 6) * numbers + self._head_bytes(head_ranks(self.drafter, ranks))

    def _head_bytes(self, ranks: int) -> int:
        """Bytes that a head in 8 bits takes beyond what the drafter would take: negative where it has its own.

        ranks: that share it.
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
        # Of every token: its stream in several forms, queries and what attention gives, the widest of the MLPs.
        token = 4 * (8 * c.hidden_size + 2 * features + 2 * heads * (head + value) + wide + narrow)
        if self.drafter is not None:  # its one layer over the same tokens
            token += 4 * (8 * c.hidden_size + 2 * heads * (head + value) + 3 * self.drafter.intermediate_size)
        # Of every token whose next one is asked for: absorbed queries, parts of sums, logits, and copies to draw from.
        row = 8 * heads * (c.kv_width + c.kv_lora_rank) + 4 * 4 * c.vocab_size
        scored = 2 * 4 * SCORED_ROWS * c.vocab_size
        if self.device == "cuda":
            # A prompt's context unfolded: rows, keys in two pieces and whole, values; and the weights that unfold it.
            context = 4 * c.kv_width + 2 * heads * (c.qk_nope_head_dim + 2 * head + 2 * value)
            fixed = 4 * heads * c.kv_lora_rank * (c.qk_nope_head_dim + value)
            fixed += DRAWN_ROWS * DRAWN_BYTES * c.vocab_size
        else:
            # Latents as rows and as panels, keys and values of one head at a time.
            context = (4 if exact else 2) * (2 * c.kv_lora_rank + head + value)
            fixed = 16 * c.vocab_size
        whole = tokens * token + asked * row + max_model_len * context + fixed + scored
        return whole + self.links_bytes + LIBRARIES[self.device]

    def recorded_steps(self, max_model_len: int) -> RecordedSteps:
        """What is recorded for jobs of `max_model_len` tokens: before the first job or later, all of it is counted."""
        if not self.gpu_kernels:
            return RecordedSteps({})
        c = part_of(self.config, self.ranks)
        heads = c.num_attention_heads
        # Of every position: its stream in several forms, absorbed queries and what attention gives, its logits.
        position = (
            4 * (8 * c.hidden_size + 2 * heads * (c.kv_width + c.kv_lora_rank + c.v_head_dim)) + 16 * c.vocab_size
        )
        if self.drafter is not None:  # the features that it reads, and its one layer
            features = len(self.drafter.layer_ids) * c.hidden_size
            position += 4 * (2 * features + 8 * c.hidden_size + 3 * self.drafter.intermediate_size)

        def memory(shape: Shape) -> ShapeMemory:
            launches = LAUNCHES * c.num_hidden_layers + 64
            if self.drafter is not None:  # as many passes as there are drafts, a first one, and one more
                launches += LAUNCHES * (shape.positions + 1)
            between = shape.rows * shape.positions * position
            return ShapeMemory(launches * RECORDED_LAUNCH, between + DRAWN_ROWS * DRAWN_BYTES * c.vocab_size)

        wanted = shapes(self.max_running, self.positions, _pages(max_model_len) * PAGE_TOKENS)
        return RecordedSteps({shape: memory(shape) for shape in wanted})

    def left(self, free: int, max_model_len: int) -> int:
        """Bytes of `free` for pages, for jobs of `max_model_len` tokens; negative where even the rest does not fit."""
        return free - self.needs(max_model_len).whole


ROOM = 4  # times what larger steps take more, that has to be left beside them


def in_steps(sizes: Sizes, free: int, choices: Sequence[int]) -> Sizes:
    """The sizes with the most positions of a step among `choices` whose working memory leaves enough of `free` for
    pages: ROOM times what it takes beyond that of the fewest, which are taken where none does."""
    fewest = replace(sizes, step_tokens=min(choices))
    for tokens in sorted(choices, reverse=True):
        larger = replace(sizes, step_tokens=tokens)
        left = larger.left(free, 1)
        if left >= ROOM * (fewest.left(free, 1) - left):
            return larger
    return fewest


def fit(
    sizes: Sizes, free: int, kv_bytes: int | None = None, max_model_len: int | None = None, *, alone: bool = False
) -> Layout:
    """As many pages as `kv_bytes` holds, and the longest job that they allow.

    free           bytes of memory that nobody uses
    kv_bytes       for pages; None: derived from `free`
    max_model_len  tokens of one job; None: derived from `free`
    alone          with a GPU's own kernels: nobody else is to have what is free there, so pages may have most of it

    ConfigError, one line with the arithmetic, where that does not fit. Whatever it advises to give instead does fit.
    """
    reads = sizes.config.max_position_embeddings
    if max_model_len is not None and not 1 <= max_model_len <= reads:
        raise ConfigError(
            f"max-model-len is {max_model_len:,}; this model reads {reads:,} tokens at most, and 1 at least"
        )
    alone = alone and sizes.gpu_kernels  # what ops of references take for themselves is not counted to the last byte
    length = max_model_len or _derived_length(sizes, free, kv_bytes, alone)
    given = kv_bytes
    if kv_bytes is None:
        most = sizes.left(free, length)
        kv_bytes = max(_share(sizes, most, alone), min(_paged(sizes, length), most))
    if length == 0 or not _paged(sizes, length) <= kv_bytes <= sizes.left(free, length):
        raise _refusal(sizes, free, given, max_model_len)
    return Layout(kv_bytes // sizes.page_bytes, length, sizes.kv_dtype, sizes.page_bytes, sizes.draft_bytes)


def _derived_length(sizes: Sizes, free: int, kv_bytes: int | None, alone: bool) -> int:
    """The longest job, in tokens; 0: none fits.

    Where `kv_bytes` is None too, pages get their share of the memory, or all that is left where the share holds no job.
    """
    if kv_bytes is not None:
        return _longest(sizes, free, kv_bytes)
    return _longest(sizes, free, _share(sizes, sizes.left(free, 1), alone)) or _longest(sizes, free, None)


def _share(sizes: Sizes, left: int, alone: bool) -> int:
    """Bytes for pages, where nothing is said, of those that are left."""
    share, most = (KV_SHARE_ALONE, KV_PAGES_ALONE * sizes.page_bytes) if alone else (KV_SHARE, KV_MOST)
    return max(0, min(most, int(left * share)))


def _longest(sizes: Sizes, free: int, kv_bytes: int | None) -> int:
    """The longest job, in tokens, that `kv_bytes` of pages hold and that fits into `free`; 0: none does.

    kv_bytes: None: as many as the job needs.
    """

    def fits(length: int) -> bool:
        paged = _paged(sizes, length)
        return (kv_bytes is None or paged <= kv_bytes) and (kv_bytes or paged) <= sizes.left(free, length)

    low, high = 0, sizes.config.max_position_embeddings
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _refusal(sizes: Sizes, free: int, kv_bytes: int | None, max_model_len: int | None) -> ConfigError:
    """In one line: what was asked for, what there is, and what to give instead."""
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
            f"{needs.sentence()} + {asked / 1e9:,.2f} GB of pages{what} do not fit into the {free / 1e9:,.2f} GB that "
            f"are free here: {missing:,.2f} GB too many"
        )
    advice = list(_advice(sizes, free, kv_bytes, max_model_len))
    weights = "; ".join(sizes.config.explain_weight_bytes())
    if not advice:
        return ConfigError(f"{fault}; a larger device is needed, or several. The weights: {weights}")
    return ConfigError(f"{fault}: give {', or '.join(advice)}")


def _advice(sizes: Sizes, free: int, kv_bytes: int | None, max_model_len: int | None) -> Iterator[str]:
    """Flags that fit, each line by itself; a line changes one flag where one is enough."""
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


def _paged(sizes: Sizes, tokens: int) -> int:
    """Bytes of the pages of one job."""
    return _pages(tokens) * sizes.page_bytes


def _size(wanted: int, least: int, most: int) -> str:
    """A size near `wanted` in [least, most], as the flag takes it, with as few digits as that allows."""
    for unit, digits, name in ((10**9, 2, "GB"), (10**6, 2, "MB")):
        step = unit // 10**digits
        for steps in (-(-wanted // step), wanted // step):
            if least <= steps * step <= most:
                return f"{steps * step / unit:.{digits}f}{name}"
    return str(wanted)
