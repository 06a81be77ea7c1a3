"""Reads a checkpoint in the Hugging Face layout, as Moonshot publishes it.

`Checkpoint.open` reads config, index and shard headers, and checks that every tensor exists with the dtype and shape
that the config requires. Data is read later, tensor by tensor, through memory maps: a returned tensor is a view of the
file, and the caller copies it to its destination.
"""

import hashlib
import math
import mmap
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from redline.errors import BrokenFile, CheckpointError
from redline.model.k2.ahead import Ahead
from redline.model.k2.config import Fp8Blocks, Int4Experts, K2Config, Nvfp4Experts, Quantization, read_json
from redline.ops.formats import INT4_GROUP, NVFP4_GROUP, Int4, Nvfp4

Projection = Literal["gate", "up", "down"]


class CheckpointWeight(NamedTuple):
    """A tensor that the config requires, under its logical name.

    The logical name has no prefix, and ends in `.weight` even if the file stores a quantised form under other names.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["plain", "linear", "expert"]  # plain is never quantised; linear may be FP8 or NVFP4; expert INT4 too


def weights(config: K2Config) -> Iterator[CheckpointWeight]:
    """Every tensor of the text model, in the order of computation. Shapes are [out, in]."""
    hidden = config.hidden_size
    heads = config.num_attention_heads
    yield CheckpointWeight("embed_tokens.weight", (config.vocab_size, hidden), "plain")
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        yield CheckpointWeight(f"{at}.input_layernorm.weight", (hidden,), "plain")
        attention = f"{at}.self_attn"
        yield CheckpointWeight(f"{attention}.q_a_proj.weight", (config.q_lora_rank, hidden), "linear")
        yield CheckpointWeight(f"{attention}.q_a_layernorm.weight", (config.q_lora_rank,), "plain")
        yield CheckpointWeight(
            f"{attention}.q_b_proj.weight", (heads * config.qk_head_dim, config.q_lora_rank), "linear"
        )
        yield CheckpointWeight(f"{attention}.kv_a_proj_with_mqa.weight", (config.kv_width, hidden), "linear")
        yield CheckpointWeight(f"{attention}.kv_a_layernorm.weight", (config.kv_lora_rank,), "plain")
        key_and_value = heads * (config.qk_nope_head_dim + config.v_head_dim)
        yield CheckpointWeight(f"{attention}.kv_b_proj.weight", (key_and_value, config.kv_lora_rank), "linear")
        yield CheckpointWeight(f"{attention}.o_proj.weight", (hidden, heads * config.v_head_dim), "linear")
        yield CheckpointWeight(f"{at}.post_attention_layernorm.weight", (hidden,), "plain")
        if not config.is_moe(layer):
            yield from _mlp(f"{at}.mlp", hidden, config.intermediate_size, "linear")
            continue
        yield CheckpointWeight(f"{at}.mlp.gate.weight", (config.n_routed_experts, hidden), "plain")
        yield CheckpointWeight(f"{at}.mlp.gate.e_score_correction_bias", (config.n_routed_experts,), "plain")
        yield from _mlp(f"{at}.mlp.shared_experts", hidden, config.shared_intermediate_size, "linear")
        for expert in range(config.n_routed_experts):
            yield from _mlp(f"{at}.mlp.experts.{expert}", hidden, config.moe_intermediate_size, "expert")
    yield CheckpointWeight("norm.weight", (hidden,), "plain")
    if not config.tie_word_embeddings:
        yield CheckpointWeight("lm_head.weight", (config.vocab_size, hidden), "plain")


def layer_weights(config: K2Config, layer: int) -> Iterator[CheckpointWeight]:
    """The tensors of one layer, in the order of `weights`."""
    return (weight for weight in weights(config) if weight.name.startswith(f"layers.{layer}."))


def _mlp(at: str, hidden: int, width: int, kind: Literal["linear", "expert"]) -> Iterator[CheckpointWeight]:
    yield CheckpointWeight(f"{at}.gate_proj.weight", (width, hidden), kind)
    yield CheckpointWeight(f"{at}.up_proj.weight", (width, hidden), kind)
    yield CheckpointWeight(f"{at}.down_proj.weight", (hidden, width), kind)


class Checkpoint:
    """An open checkpoint whose headers have been checked.

    config       the model's geometry
    fingerprint  hex hash over config, headers and samples of the data; the same for the same files in every process
    bytes        stored bytes of all tensors that the model needs
    files        every tensor of every shard by its stored name, including tensors that the model does not read
    progress     called with the bytes of each tensor as it is returned; the sum is `bytes` if each is read once
    """

    def __init__(
        self,
        config: K2Config,
        tensors: "Mapping[str, Stored]",
        files: "Mapping[Path, Mapping[str, Stored]]",
        needed: int,
        fingerprint: str,
    ) -> None:
        self.config = config
        self.fingerprint = fingerprint
        self.bytes = needed
        self.files = files
        self.progress: Callable[[int], object] = lambda _: None
        self._tensors = tensors
        self._maps: dict[Path, mmap.mmap] = {}
        self._ahead: Ahead | None = None

    @classmethod
    def open(cls, folder: Path | str) -> "Checkpoint":
        """Reads headers only. CheckpointError, one line with file, tensor and expectation, if anything is wrong."""
        found = survey(folder, _refuse)
        return cls(found.config, found.tensors, found.files, found.bytes, _fingerprint(found.config, found.files))

    def plain(self, name: str) -> Tensor:
        """A tensor by its logical name (`layers.3.self_attn.o_proj.weight`): bf16 or float32, as stored.

        An FP8 or NVFP4 weight is returned dequantised to bf16, in new memory; any other is a view of the file.
        CheckpointError if the scale of an NVFP4 block is NaN.
        """
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            name = "embed_tokens.weight"
        if (nvfp4 := self.nvfp4(name)) is not None:
            return nvfp4.dequantize(torch.bfloat16)
        tensor = self._view(name)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        assert isinstance(self.config.quantization, Fp8Blocks)
        return dequantize_fp8(tensor, self._view(f"{name}_scale_inv"), self.config.quantization)

    def expert(self, layer: int, expert: int, projection: Projection) -> Int4 | Nvfp4 | Tensor:
        """One projection of a routed expert, [out, in]: Int4 or Nvfp4 if the config has that format, else as `plain`.

        CheckpointError if the scale of an NVFP4 block is NaN.
        """
        name = f"layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
        if isinstance(self.config.quantization, Int4Experts):
            return Int4(packed=self._view(f"{name}_packed"), scale=self._view(f"{name}_scale"))
        return self.nvfp4(name) or self.plain(name)

    @contextmanager
    def read_ahead(self, part: int = 0, parts: int = 1, layer: int | None = None) -> Generator[None]:
        """Context manager that prefetches the files, if tensors are read roughly in the order of `weights`.

        part, parts: this process prefetches part `part` of `parts` of every tensor, if several processes read them all.
        layer: the only layer that is read; None: all.
        """
        every = weights(self.config) if layer is None else layer_weights(self.config, layer)
        needed = (stored for weight in every for stored in self.parts(weight))
        self._ahead = ahead = Ahead(((stored.file, stored.start, stored.stop) for stored in needed), part, parts)
        try:
            yield
        finally:
            ahead.close()
            if self._ahead is ahead:  # ranks that are threads, as in tests, may read one checkpoint at the same time
                self._ahead = None

    def parts(self, weight: CheckpointWeight) -> list["Stored"]:
        """The stored tensors of a weight that the model needs; codes first if it is quantised.

        A file may also contain `...weight_shape` and `...input_scale`, which are not used.
        """
        return [self._tensors[demand.name] for demand in _demands(weight, self.config.quantization, self._tensors)]

    def raw(self, stored: "Stored") -> Tensor:
        """The bytes of a tensor, uint8 [bytes]: a view of the file."""
        if stored.file not in self._maps:
            with stored.file.open("rb") as file:
                # Copy-on-write, since torch warns about read-only memory. No page is ever copied: nothing writes.
                self._maps[stored.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(
            self._maps[stored.file], dtype=torch.uint8, count=stored.stop - stored.start, offset=stored.start
        )

    def nvfp4(self, name: str) -> Nvfp4 | None:
        """A weight by its logical name in its stored form; None if it is not stored as NVFP4.

        CheckpointError if the scale of a block is NaN.
        """
        if not isinstance(self.config.quantization, Nvfp4Experts):
            return None
        packed, whole = NVFP4_NAMES[self.config.quantization.maker]
        if name + packed not in self._tensors or self._tensors[name + packed].dtype != "U8":
            return None
        codes, scales, scale = (self._view(name + suffix) for suffix in (packed, "_scale", whole))
        scale = scale.reshape(1) if self.config.quantization.maker == "ModelOpt" else 1 / scale
        return Nvfp4(codes, self._mended(f"{name}_scale", codes, scales), scale)

    def _mended(self, name: str, codes: Tensor, scales: Tensor) -> Tensor:
        """The scales, with 0 for the NaN that some exporters write for zero blocks. CheckpointError for another NaN."""
        wrong = (scales.view(torch.uint8) & 127) == 127
        if not wrong.any():
            return scales
        if (codes.unflatten(-1, (-1, NVFP4_GROUP // 2))[wrong] & 0x77).any():
            raise CheckpointError(
                f"{self._tensors[name].file}: {self._tensors[name].name}: the scale of a block is NaN"
            )
        return scales.view(torch.uint8).masked_fill(wrong, 0).view(torch.float8_e4m3fn)

    def _view(self, name: str) -> Tensor:
        stored = self._tensors[name]
        raw = self.raw(stored)
        dtype = _DTYPES[stored.dtype]
        if raw.data_ptr() % dtype.itemsize:  # the file format allows unaligned tensors; kernels do not
            raw = raw.clone()
        self.progress(raw.nbytes)
        if (ahead := self._ahead) is not None:
            ahead.handed_out(raw.nbytes)
        return raw.view(dtype).view(stored.shape)


def dequantize_fp8(weight: Tensor, scale_inv: Tensor, block: Fp8Blocks) -> Tensor:
    """w[n, k] = weight[n, k] * scale_inv[n // rows, k // columns]; the last block of either axis may be partial.

    weight float8_e4m3fn [N, K], scale_inv float32 [ceil(N / rows), ceil(K / columns)] -> bf16 [N, K].
    One block row at a time, so it needs memory for `rows` rows in addition to the result. Source: DeepSeek-V3's
    README_WEIGHTS.
    """
    out = torch.empty(weight.shape, dtype=torch.bfloat16)
    for row, scale in zip(range(0, weight.shape[0], block.rows), scale_inv, strict=True):
        rows = slice(row, row + block.rows)
        out[rows] = weight[rows].float() * scale.repeat_interleave(block.columns)[: weight.shape[1]]
    return out


# Contents of a checkpoint: index and headers.


class Survey(NamedTuple):
    """The contents of a checkpoint according to its index and headers.

    config   the model's geometry
    tensors  the tensors that the model needs, by logical name
    files    every tensor of every readable shard, by its stored name
    bytes    stored bytes of the needed tensors that match the config
    lost     missing or broken shards, with the number of tensors that the index expects there
    """

    config: K2Config
    tensors: "dict[str, Stored]"
    files: "dict[Path, dict[str, Stored]]"
    bytes: int
    lost: dict[Path, int]


def survey(folder: Path | str, fault: Callable[[BrokenFile], object]) -> Survey:
    """Reads config, index and headers, and calls `fault` for each fault; `fault` may raise it.

    A tensor that belongs in a missing or broken shard is not reported separately. CheckpointError if config.json or the
    index cannot be used.
    """
    folder = Path(folder)
    config = K2Config.from_folder(folder)
    index, names_of = _index(folder)
    home = {name: file for file, names in names_of.items() for name in names or ()}
    tensors: dict[str, Stored] = {}
    files: dict[Path, dict[str, Stored]] = {}
    lost: dict[Path, int] = {}
    absent: set[str] = set()  # weights with a part in a missing or broken shard
    for file, names in names_of.items():
        try:
            header = _header(file, names)
            _check_owner(file, names, header, home)
        except BrokenFile as error:
            fault(error)
            lost[file] = len(names or ())
            absent |= {_weight_of(_logical(name)) for name in names or ()}
            continue
        files[file] = {}
        for name in header if names is None else names:
            if name not in header:
                fault(BrokenFile(file, name, f"missing; {index.name} expects it here"))
                absent.add(_weight_of(_logical(name)))
                continue
            files[file][name] = header[name]
            logical = _logical(name)
            if logical in tensors:
                fault(BrokenFile(file, name, "a second tensor of that name; expected one"))
            if not _skipped(logical, config):
                tensors[logical] = header[name]
    needed = 0
    unused = set(tensors)
    for weight in weights(config) if names_of.keys() != lost.keys() else ():
        for demand in _demands(weight, config.quantization, tensors):
            unused.discard(demand.name)
            if demand.name not in tensors and _weight_of(demand.name) in absent:
                continue
            try:
                needed += _check(demand, tensors, index)
            except BrokenFile as error:
                fault(error)
    for name in sorted(unused):
        if _weight_of(name) not in absent:
            fault(BrokenFile(tensors[name].file, tensors[name].name, "expected nothing of that name"))
    return Survey(config, tensors, files, needed, lost)


def _refuse(error: BrokenFile) -> None:
    raise error


def _weight_of(name: str) -> str:
    """The part of a logical name before `.weight`: the same for all tensors of a quantised weight."""
    return name.partition(".weight")[0]


def _check_owner(file: Path, names: list[str] | None, header: Mapping[str, "Stored"], home: Mapping[str, Path]) -> None:
    """BrokenFile if most tensors of a shard belong to another shard, as when two files have swapped names."""
    if names is None or any(name in header for name in names):
        return
    owner, count = Counter(home[name] for name in header if name in home).most_common(1)[0] if header else (file, 0)
    if count:
        raise BrokenFile(file, "", f"holds the tensors of {owner.name}; expected to hold {_some(names)}")


class Stored(NamedTuple):
    """Bytes [start, stop) of a file: a tensor with the name, dtype and shape of its header entry."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _Entry(msgspec.Struct):
    """A tensor in a safetensors header; offsets count from the header's end."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_SAMPLE_BYTES = 4096
_LFS_POINTER = b"version https://git-lfs"  # start of the pointer file that Git LFS puts in place of a large file

# The dtypes that are supported, by safetensors' names.
_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "U8": torch.uint8,
}


def _index(folder: Path) -> tuple[Path, dict[Path, list[str] | None]]:
    """(file that lists the tensors, tensor names by shard); None in place of names: all tensors of the only shard."""
    path = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not path.exists():
        if not single.exists():
            raise CheckpointError(f"{folder}: no weights; expected {path.name} and its shards, or {single.name}")
        return single, {single: None}
    try:
        weight_map = msgspec.convert(read_json(path).get("weight_map"), dict[str, str])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: weight_map: {error}") from None
    names_of: dict[Path, list[str] | None] = {}
    for file, names in _grouped(weight_map).items():
        if file != Path(file).name:
            raise CheckpointError(f"{path}: {names[0]}: is in {file!r}; expected a file of the same folder")
        names_of[folder / file] = names
    return path, names_of


def _grouped(weight_map: dict[str, str]) -> dict[str, list[str]]:
    names_of: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        names_of.setdefault(file, []).append(name)
    return dict(sorted(names_of.items()))


def _some(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1:,} more" if len(names) > 1 else names[0]


def _header(path: Path, expected: Sequence[str] | None) -> dict[str, Stored]:
    """The tensors of a shard, by stored name. A shard is 8 bytes of length, JSON, and data without a gap.

    expected: the tensors that the index expects in the shard, for the message about a missing one.
    """
    if expected and not path.is_file():
        raise BrokenFile(path, "", f"missing shard; expected to hold {_some(expected)}")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(len(_LFS_POINTER))
            length = int.from_bytes(first[:8], "little")
            start = 8 + length
            if first == _LFS_POINTER:
                raise BrokenFile(path, "", f"a Git LFS pointer of {size:,} bytes; expected the shard itself")
            if length > _HEADER_BYTES or start > size:
                expects = f"expected a header of {length:,}"
                raise BrokenFile(path, "", f"{size:,} bytes, truncated or not safetensors; {expects}")
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise BrokenFile(path, "", f"cannot be read: {error.strerror}") from None
    name = "its header"
    tensors: dict[str, Stored] = {}
    try:
        entries = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        for name, value in entries.items():
            entry = msgspec.json.decode(value, type=_Entry)
            first, last = entry.data_offsets
            tensors[name] = Stored(path, name, entry.dtype, entry.shape, start + first, start + last)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenFile(path, name, f"expected a safetensors header: {error}") from None
    end, name = start, "its header"
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.stop < tensor.start:
            raise BrokenFile(path, tensor.name, "its data ends before it begins")
        if tensor.start != end:
            raise BrokenFile(path, tensor.name, f"its data begins at {tensor.start:,}; expected {end:,}")
        end, name = tensor.stop, tensor.name
    if end != size:
        fault = "truncated" if size < end else "too long"
        raise BrokenFile(path, name, f"{fault}: the file has {size:,} bytes; expected {end:,}")
    return tensors


def _fingerprint(config: K2Config, files: Iterable[Path]) -> str:
    """A hash over config, headers, and a sample of the data at the start, middle and end of each shard.

    Fine-tunes of one model differ in the samples."""
    digest = hashlib.sha256(repr(config).encode())
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            digest.update(file.read(start - 8))
            for place in (start, (start + size) // 2, max(size - _SAMPLE_BYTES, start)):
                file.seek(place)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _logical(stored: str) -> str:
    """The logical name for a stored name; the prefix depends on the release.

    K2: `model.`. K2.5: `language_model.model.`. Some NVIDIA revisions: only `language_model.`. lm_head: any of them.
    """
    return stored.removeprefix("language_model.").removeprefix("model.")


_COMPUTED = r"rotary_emb\.inv_freq|weight_shape|k_scale|v_scale|input_scale|input_global_scale"
_NOT_READ = re.compile(rf"(vision_tower|mm_projector)\..*|.*\.({_COMPUTED})")


def _skipped(name: str, config: K2Config) -> bool:
    """Whether a tensor is ignored: vision, MTP layers, and tensors that are computed from the config.

    `weight_shape` has wrong values in some files.
    """
    if _NOT_READ.fullmatch(name) or (name == "lm_head.weight" and config.tie_word_embeddings):
        return True
    layer = re.match(r"layers\.(\d{1,6})\.", name)
    return layer is not None and int(layer[1]) >= config.num_hidden_layers


# Tensors that a checkpoint must contain.


# The stored tensors of an NVFP4 weight: codes and the matrix's scale, as suffixes of `....weight`.
NVFP4_NAMES = {"ModelOpt": ("", "_scale_2"), "compressed-tensors": ("_packed", "_global_scale")}


class _Demand(NamedTuple):
    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


def _demands(weight: CheckpointWeight, quantization: Quantization, tensors: Mapping[str, Stored]) -> Iterator[_Demand]:
    """The stored tensors of a weight. Whether a linear is FP8 or NVFP4 depends on the tensors in the file."""
    name, shape, kind = weight
    match quantization:
        case Int4Experts() if kind == "expert":
            rows, columns = shape
            yield _Demand(f"{name}_packed", ("I32",), (rows, columns // 8))
            yield _Demand(f"{name}_scale", ("BF16",), (rows, columns // INT4_GROUP))
        case Nvfp4Experts(maker) if kind == "expert" or (kind == "linear" and _is_packed(name, maker, tensors)):
            (rows, columns), (packed, whole) = shape, NVFP4_NAMES[maker]
            yield _Demand(name + packed, ("U8",), (rows, columns // 2))
            yield _Demand(f"{name}_scale", ("F8_E4M3",), (rows, columns // NVFP4_GROUP))
            yield _Demand(name + whole, ("F32",), () if maker == "ModelOpt" else (1,))
        case Fp8Blocks() as block if kind != "plain" and name in tensors and tensors[name].dtype == "F8_E4M3":
            rows, columns = shape
            yield _Demand(name, ("F8_E4M3",), shape)
            yield _Demand(
                f"{name}_scale_inv", ("F32",), (math.ceil(rows / block.rows), math.ceil(columns / block.columns))
            )
        case _:
            yield _Demand(name, ("BF16", "F32"), shape)


def _is_packed(name: str, maker: str, tensors: Mapping[str, Stored]) -> bool:
    stored = tensors.get(name + NVFP4_NAMES[maker][0])
    return stored is not None and stored.dtype == "U8"


def _check(demand: _Demand, tensors: Mapping[str, Stored], index: Path) -> int:
    """The tensor's size in bytes. BrokenFile if it is missing, or of another dtype, shape or size."""
    name, dtypes, shape = demand
    expected = f"expected {' or '.join(dtypes)} {list(shape)}"
    if name not in tensors:
        raise BrokenFile(index, name, f"missing; {expected}")
    stored = tensors[name]
    if stored.dtype not in dtypes or stored.shape != shape:
        found = f"found {stored.dtype} {list(stored.shape)}"
        raise BrokenFile(stored.file, stored.name, f"{expected}, {found}")
    size = math.prod(shape) * _DTYPES[stored.dtype].itemsize
    if stored.stop - stored.start != size:
        found = f"found {stored.stop - stored.start:,}"
        raise BrokenFile(stored.file, stored.name, f"expected {size:,} bytes, {found}")
    return size
