"""The geometry of a text model with latent attention and routed experts, read from its config.json: Kimi K2's and
DeepSeek-V3's.

All variants of their config files are read here and nowhere else; unsupported settings are rejected by name.
`K2Config` also computes the model's cost: parameters, bytes of weights, bytes of KV per token.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch
from torch import Tensor

from redline.errors import CheckpointError
from redline.ops.formats import INT4_GROUP, NVFP4_GROUP

NVFP4_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")  # ModelOpt's names: with and without scales for 4-bit activations
READABLE = "bf16, INT4 (compressed-tensors pack-quantized, groups of 32), NVFP4 and FP8 (e4m3 blocks)"


@dataclass(frozen=True)
class Unquantized:
    """Every weight is stored in bf16 or float32."""


@dataclass(frozen=True)
class Int4Experts:
    """Routed experts are `redline.ops.formats.Int4`; all other weights are bf16."""


@dataclass(frozen=True)
class Fp8Blocks:
    """Linear weights are float8_e4m3fn with one float32 scale per block of `rows` outputs x `columns` inputs."""

    rows: int
    columns: int


Maker = Literal["ModelOpt", "compressed-tensors"]


@dataclass(frozen=True)
class Nvfp4Experts:
    """Routed experts are `redline.ops.formats.Nvfp4`, and so are other linear weights if the files store them so.

    maker: the exporter that defines tensor names and scale convention: compressed-tensors stores the scale's inverse.
    """

    maker: Maker


Quantization = Unquantized | Int4Experts | Nvfp4Experts | Fp8Blocks


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071), under the names of DeepSeek's rope_scaling."""

    factor: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    original_max_position_embeddings: int

    def correction_range(self, rope_dim: int, theta: float) -> tuple[int, int]:
        """(low, high): frequency pairs up to `low` are unchanged, pairs from `high` on are divided by `factor`.

        rope_dim: rotated values of a head, twice the number of pairs. theta: the base of the frequencies.
        """

        def pair_that_turns(times: float) -> float:
            wavelength = self.original_max_position_embeddings / (2 * math.pi * times)
            return rope_dim * math.log(wavelength) / (2 * math.log(theta))

        low = math.floor(pair_that_turns(self.beta_fast))
        high = math.ceil(pair_that_turns(self.beta_slow))
        return max(low, 0), min(high, rope_dim - 1)

    @property
    def temperature(self) -> float:
        """m = 0.1 mscale_all_dim ln(factor) + 1. It scales queries and keys, so the softmax scale includes m^2."""
        return 0.1 * self.mscale_all_dim * math.log(self.factor) + 1


@dataclass(frozen=True, kw_only=True)
class K2Config:
    """The text model's geometry, under the names of the published config.json. Sizes count values, not bytes."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    first_k_dense_replace: int
    moe_intermediate_size: int
    intermediate_size: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    rms_norm_eps: float
    low_rank_norm_eps: float
    """The epsilon of q_a_layernorm and kv_a_layernorm: rms_norm_eps, as in vLLM and SGLang. transformers has 1e-6."""
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    yarn: Yarn | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    tie_word_embeddings: bool
    quantization: Quantization
    n_group: int = 1
    topk_group: int = 1
    """Experts are chosen from the `topk_group` best of `n_group` groups of experts; Kimi has one group."""

    @classmethod
    def from_folder(cls, folder: Path | str) -> "K2Config":
        """Reads `folder/config.json`. CheckpointError if it is missing, broken, or not a supported model."""
        path = Path(folder) / "config.json"
        values = read_json(path)
        # Older ModelOpt exports give their format only in hf_quant_config.json, in the same folder.
        beside = path.with_name("hf_quant_config.json")
        if beside.exists():
            values = {**values, "hf_quant_config": read_json(beside)}
        return cls.from_dict(values, str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], place: str = "config.json") -> "K2Config":
        """Reads a parsed config.json: K2.5's nested form or K2's flat one. `place` is the prefix of error messages.

        CheckpointError, with key, value and the supported values, if it is not a supported model.
        """
        top = Section(values, place)
        text = _text_section(top)
        for key, supported, absent in _ONE_WAY:
            text.demand(key, supported, absent)
        groups = _groups(text, top)
        heads = text.integer("num_attention_heads")
        text.demand("num_key_value_heads", heads, heads)
        eps = text.number("rms_norm_eps")
        theta, yarn = read_rope(text)
        config = cls(
            hidden_size=text.integer("hidden_size"),
            num_hidden_layers=text.integer("num_hidden_layers"),
            num_attention_heads=heads,
            q_lora_rank=text.integer("q_lora_rank"),
            kv_lora_rank=text.integer("kv_lora_rank"),
            qk_nope_head_dim=text.integer("qk_nope_head_dim"),
            qk_rope_head_dim=text.integer("qk_rope_head_dim"),
            v_head_dim=text.integer("v_head_dim"),
            n_routed_experts=text.integer("n_routed_experts"),
            num_experts_per_tok=text.integer("num_experts_per_tok"),
            n_shared_experts=text.integer("n_shared_experts"),
            first_k_dense_replace=text.integer("first_k_dense_replace", least=0),
            moe_intermediate_size=text.integer("moe_intermediate_size"),
            intermediate_size=text.integer("intermediate_size"),
            routed_scaling_factor=text.number("routed_scaling_factor"),
            norm_topk_prob=text.flag("norm_topk_prob"),
            rms_norm_eps=eps,
            low_rank_norm_eps=eps,
            vocab_size=text.integer("vocab_size"),
            max_position_embeddings=text.integer("max_position_embeddings"),
            rope_theta=theta,
            yarn=yarn,
            bos_token_id=text.token("bos_token_id", top),
            eos_token_ids=text.tokens("eos_token_id", top),
            pad_token_id=text.token("pad_token_id", top),
            tie_word_embeddings=text.flag(
                "tie_word_embeddings", default=top.flag("tie_word_embeddings", default=False)
            ),
            quantization=_quantization(top, text),
            n_group=groups[0],
            topk_group=groups[1],
        )
        _check_sizes(config, text)
        return config

    # Sizes derived from the geometry.

    @property
    def qk_head_dim(self) -> int:
        """Values of one query head: the part without rope, then the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_width(self) -> int:
        """Values per token and layer in the KV cache: the latent, then the rotated key that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-0.5 * m^2. YaRN's temperature is applied here only: cos and sin are not scaled."""
        m = self.yarn.temperature if self.yarn else 1.0
        return self.qk_head_dim**-0.5 * m * m

    def inv_freq(self) -> Tensor:
        """Radians per position of each interleaved rope pair: float32 [qk_rope_head_dim / 2]."""
        return inv_freq(self.qk_rope_head_dim, self.rope_theta, self.yarn)

    def is_moe(self, layer: int) -> bool:
        """Whether the layer (counted from 0) has experts rather than one dense MLP."""
        return layer >= self.first_k_dense_replace

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return max(self.num_hidden_layers - self.first_k_dense_replace, 0)

    @property
    def shared_intermediate_size(self) -> int:
        """The width of a layer's shared experts, concatenated as one MLP."""
        return self.n_shared_experts * self.moe_intermediate_size

    # The model's cost.

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention, its two low-rank norms included."""
        heads = self.num_attention_heads
        return (
            self.hidden_size * (self.q_lora_rank + self.kv_width)
            + self.q_lora_rank * (1 + heads * self.qk_head_dim)
            + self.kv_lora_rank * (1 + heads * (self.qk_nope_head_dim + self.v_head_dim))
            + heads * self.v_head_dim * self.hidden_size
        )

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding and the output head, which may be tied."""
        return (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size

    @property
    def dense_parameters(self) -> int:
        """Parameters that every token uses: all but the routed experts; embeddings and router are included."""
        dense_layers = self.num_hidden_layers - self.moe_layers
        shared = 3 * self.hidden_size * self.shared_intermediate_size
        router = self.n_routed_experts * (self.hidden_size + 1)
        return (
            self.embedding_parameters
            + self.hidden_size * (2 * self.num_hidden_layers + 1)
            + self.num_hidden_layers * self.attention_parameters
            + dense_layers * 3 * self.hidden_size * self.intermediate_size
            + self.moe_layers * (shared + router)
        )

    @property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.moe_layers * self.n_routed_experts * self.expert_parameters

    @property
    def total_parameters(self) -> int:
        """Parameters of the whole text model."""
        return self.dense_parameters + self.routed_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, with embeddings and head counted in full."""
        return self.dense_parameters + self.moe_layers * self.num_experts_per_tok * self.expert_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in the engine's memory.

        4-bit routed experts keep their format; all other weights are bf16, including FP8, which is dequantised on load.
        """
        return 2 * self.dense_parameters + round(self.routed_parameters * self.bits_per_routed_parameter / 8)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that a token reads in a decode step. The embedding is not counted: only one row is read."""
        chosen = self.moe_layers * self.num_experts_per_tok * self.expert_parameters
        dense = self.dense_parameters - self.vocab_size * self.hidden_size
        return 2 * dense + round(chosen * self.bits_per_routed_parameter / 8)

    @property
    def bits_per_routed_parameter(self) -> float:
        """4.5 for INT4 and for NVFP4: four bits plus a share of the group's scale (bf16 or e4m3); otherwise 16."""
        match self.quantization:
            case Int4Experts():
                return 4 + 16 / INT4_GROUP
            case Nvfp4Experts():
                return 4 + 8 / NVFP4_GROUP
            case _:
                return 16.0

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of the KV cache per token, over all layers, in pages of this dtype."""
        return self.num_hidden_layers * self.kv_width * dtype.itemsize

    # The same numbers as text, each with its arithmetic.

    def explain_parameters(self) -> list[str]:
        """Lines of text with the total and active parameters and their arithmetic."""
        routed = f"{self.moe_layers} layers x {self.n_routed_experts} experts x {self.expert_parameters:,}"
        chosen = f"{self.moe_layers} layers x {self.num_experts_per_tok} experts x {self.expert_parameters:,}"
        return [
            f"one expert       3 x {self.hidden_size} x {self.moe_intermediate_size} = {self.expert_parameters:,}",
            f"routed experts   {routed} = {_count(self.routed_parameters)}",
            f"all else         {_count(self.dense_parameters)}",
            f"parameters       {_count(self.total_parameters)}",
            f"active           {_count(self.dense_parameters)} + {chosen} = {_count(self.active_parameters)}",
        ]

    def explain_weight_bytes(self) -> list[str]:
        """Lines of text with `weight_bytes` and its arithmetic."""
        bits = self.bits_per_routed_parameter
        routed = self.weight_bytes - 2 * self.dense_parameters
        return [
            f"routed experts   {_count(self.routed_parameters)} x {bits:g} bits = {_bytes(routed)}",
            f"all else         {_count(self.dense_parameters)} x 16 bits = {_bytes(2 * self.dense_parameters)}",
            f"weights          {_bytes(self.weight_bytes)}",
        ]

    def explain_kv_bytes(self, dtype: torch.dtype) -> str:
        """A line of text with `kv_bytes_per_token` and its arithmetic."""
        row = f"({self.kv_lora_rank} latent + {self.qk_rope_head_dim} rope)"
        total = self.kv_bytes_per_token(dtype)
        return f"KV per token     {self.num_hidden_layers} layers x {row} x {dtype.itemsize} bytes = {total:,} bytes"


def inv_freq(rope_dim: int, theta: float, yarn: Yarn | None) -> Tensor:
    """Radians per position of each rope pair: float32 [rope_dim / 2]. yarn: None for plain rope."""
    pairs = torch.arange(rope_dim // 2, dtype=torch.float64)
    freq = theta ** (-2 * pairs / rope_dim)
    if yarn is not None:
        low, high = yarn.correction_range(rope_dim, theta)
        # Equal ends give a step function; all YaRN implementations use 0.001 here to avoid a division by zero.
        ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
        freq = freq * (1 - ramp) + freq / yarn.factor * ramp
    return freq.float()


def read_json(path: Path) -> dict[str, Any]:
    """A file that contains one JSON object. CheckpointError if it is missing or contains anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected one JSON object: {error}") from None


# (key, supported value, meaning of a missing key) for keys with one supported value. `...`: the key is required, since
# the default of the classes that read these files is a value that is not supported here.
_ONE_WAY: tuple[tuple[str, Any, Any], ...] = (
    ("scoring_func", "sigmoid", "sigmoid"),
    ("topk_method", "noaux_tc", "noaux_tc"),
    ("hidden_act", "silu", "silu"),
    ("moe_layer_freq", 1, 1),
    ("attention_bias", False, False),
    ("rope_interleave", True, True),
)


def _text_section(top: "Section") -> "Section":
    if "text_config" not in top.values:
        top.one_of("model_type", ("kimi_k2", "deepseek_v3"))
        return top
    top.one_of("model_type", ("kimi_k25",))
    text = top.section("text_config")
    text.one_of("model_type", ("kimi_k2", "deepseek_v3"))
    return text


def _groups(text: "Section", top: "Section") -> tuple[int, int]:
    """(n_group, topk_group): of a flat deepseek_v3 any that are possible, else (1, 1)."""
    if text is not top or text.get("model_type") != "deepseek_v3":
        for key in ("n_group", "topk_group"):
            text.demand(key, 1, ...)
        return 1, 1
    groups, chosen, experts = (text.integer(key) for key in ("n_group", "topk_group", "n_routed_experts"))
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise text.refusal("n_group", f"a divisor of n_routed_experts ({experts}) with two experts or more in a group")
    if chosen > groups:
        raise text.refusal("topk_group", f"at most n_group ({groups})")
    return groups, chosen


def read_rope(text: "Section", *, scaled_angles: bool = False) -> tuple[float, Yarn | None]:
    """(rope_theta, yarn), from `rope_scaling` or from newer exports' `rope_parameters`, which may contain theta too.

    scaled_angles  whether the model supports unequal mscale and mscale_all_dim, which scale cos and sin; K2 does not

    CheckpointError if the rope is of another kind, or has unsupported settings.
    """
    key = "rope_parameters" if text.get("rope_parameters") is not None else "rope_scaling"
    if text.get(key) is None:
        return text.number("rope_theta", least=2.0), None
    rope = text.section(key)
    theta = (text if text.get("rope_theta") is not None else rope).number("rope_theta", least=2.0)
    kind_key = "rope_type" if "rope_type" in rope.values else "type"
    if rope.one_of(kind_key, ("yarn", "default")) == "default":
        return theta, None
    yarn = Yarn(
        factor=rope.number("factor", least=1.0),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        mscale=rope.number("mscale", default=1.0),
        mscale_all_dim=rope.number("mscale_all_dim", default=0.0, least=0.0),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )
    # Unequal values scale cos and sin as well; no target of the family does.
    if yarn.mscale != yarn.mscale_all_dim and not scaled_angles:
        raise rope.refusal("mscale_all_dim", f"the value of mscale ({yarn.mscale:g})")
    rope.demand("attention_factor", None, None)
    rope.demand("truncate", True, True)
    return theta, yarn


def _quantization(top: "Section", text: "Section") -> Quantization:
    """The storage format of the weights.

    Moonshot's K2.5 files have quantization_config inside text_config, all others at the top level.
    """
    sections = [s.section("quantization_config") for s in (text, top) if s.get("quantization_config") is not None]
    if not sections:
        if top.get("hf_quant_config") is not None:
            beside = top.section("hf_quant_config").section("quantization")
            algorithm = beside.get("quant_algo")
            if algorithm in NVFP4_ALGORITHMS:
                beside.demand("group_size", NVFP4_GROUP, NVFP4_GROUP)
                return Nvfp4Experts("ModelOpt")
            raise CheckpointError(
                f"{top.place}: hf_quant_config.json has {algorithm} (ModelOpt); supported: {READABLE}"
            )
        return Unquantized()
    quant = sections[0]
    if any(section.values != quant.values for section in sections):
        raise CheckpointError(f"{top.place}: quantization_config at the top and in text_config differ")
    method, form, algorithm = (quant.get(key) for key in ("quant_method", "format", "quant_algo"))
    if algorithm in NVFP4_ALGORITHMS or form == "nvfp4-pack-quantized":
        return _nvfp4(quant, "ModelOpt" if algorithm else "compressed-tensors")
    if method == "fp8":
        return _fp8(quant)
    if method == "compressed-tensors" and form == "pack-quantized":
        return _int4(quant)
    found = ", ".join(f"{key} {quant.get(key)!r}" for key in ("quant_method", "format") if key in quant.values)
    raise CheckpointError(f"{quant.place}: unknown quantisation ({found or 'no quant_method'}); supported: {READABLE}")


def _fp8(quant: "Section") -> Fp8Blocks:
    quant.demand("fmt", "e4m3", "e4m3")
    match quant.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Fp8Blocks(rows, columns)
        case _:
            raise quant.refusal("weight_block_size", "two positive integers, as in [128, 128]")


def _nvfp4(quant: "Section", maker: Maker) -> Nvfp4Experts:
    """The settings of NVFP4 weights. Settings for activations and KV cache are ignored: both stay bf16."""
    groups = quant.section("config_groups")
    for name in groups.values:
        weights = groups.section(name).section("weights")
        weights.demand("num_bits", 4, ...)
        weights.demand("type", "float", "float")
        weights.demand("group_size", NVFP4_GROUP, ...)
    return Nvfp4Experts(maker)


def _int4(quant: "Section") -> Int4Experts:
    groups = quant.section("config_groups")
    if len(groups.values) != 1:
        raise CheckpointError(f"{groups.place}: {len(groups.values)} groups; supported: one, of INT4 weights")
    group = groups.section(next(iter(groups.values)))
    group.demand("input_activations", None, None)
    weights = group.section("weights")
    weights.demand("num_bits", 4, ...)
    weights.demand("type", "int", "int")
    weights.demand("symmetric", True, True)
    weights.demand("strategy", "group", ...)
    weights.demand("group_size", INT4_GROUP, ...)
    weights.demand("actorder", None, None)
    return Int4Experts()


def _check_sizes(config: K2Config, text: "Section") -> None:
    if config.qk_rope_head_dim % 2:
        raise text.refusal("qk_rope_head_dim", "an even number: rope turns pairs")
    if config.num_experts_per_tok > config.n_routed_experts:
        raise text.refusal("num_experts_per_tok", f"at most n_routed_experts ({config.n_routed_experts})")
    if config.num_experts_per_tok * config.n_group > config.n_routed_experts * config.topk_group:
        most = config.n_routed_experts // config.n_group * config.topk_group
        raise text.refusal("num_experts_per_tok", f"at most {most}, the experts of topk_group groups")
    match config.quantization:
        case Int4Experts():
            name, group = "INT4", INT4_GROUP
        case Nvfp4Experts():
            name, group = "NVFP4", NVFP4_GROUP
        case _:
            return
    for key in ("hidden_size", "moe_intermediate_size"):
        if getattr(config, key) % group:
            raise text.refusal(key, f"a multiple of {name}'s group, {group}")


class Section:
    """One JSON object and its place in the file, so that errors name file, key, value and the supported values.

    Methods that read a value raise CheckpointError if it has the wrong type.
    """

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values = values
        self.place = place

    def get(self, key: str) -> Any:
        """The value, unchecked; None if it is null or missing."""
        return self.values.get(key)

    def refusal(self, key: str, supported: str) -> CheckpointError:
        """The error to raise for this key, with the supported values."""
        found = repr(self.values[key]) if key in self.values else "missing"
        return CheckpointError(f"{self.place}: {key} is {found}; supported: {supported}")

    def section(self, key: str) -> "Section":
        """The JSON object under this key."""
        if not isinstance(self.get(key), dict):
            raise self.refusal(key, "an object")
        return Section(cast("dict[str, Any]", self.get(key)), f"{self.place}: {key}")

    def demand(self, key: str, supported: Any, absent: Any) -> None:
        """Raises CheckpointError unless the value equals `supported`; a missing key is read as `absent`."""
        found = self.values.get(key, absent)
        # true and 1 are equal in Python but different in a config.
        if found != supported or isinstance(found, bool) != isinstance(supported, bool):
            raise self.refusal(key, repr(supported))

    def one_of(self, key: str, supported: tuple[str, ...]) -> str:
        """The value, which must be one of these strings."""
        if self.get(key) not in supported:
            raise self.refusal(key, ", ".join(supported))
        return self.values[key]

    def integer(self, key: str, least: int = 1) -> int:
        """An integer in [least, 2^31)."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise self.refusal(key, f"an integer from {least}")
        return value

    def number(self, key: str, *, default: float | None = None, least: float = 1e-12) -> float:
        """A number in [least, 1e12], or `default` if it is null or missing.

        The range is wider than any model needs, and narrow enough that no formula overflows.
        """
        value = self.get(key) if self.get(key) is not None else default
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= 1e12:
            raise self.refusal(key, f"a number from {least:g} to 1e+12")
        return float(value)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """true or false; `default` if the value is null or missing."""
        value = self.get(key) if self.get(key) is not None else default
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def token(self, key: str, outer: "Section") -> int | None:
        """A token id of this object, else of the enclosing object; None if neither has one."""
        place = self if self.get(key) is not None else outer
        return place.integer(key, least=0) if place.get(key) is not None else None

    def tokens(self, key: str, outer: "Section") -> tuple[int, ...]:
        """As `token`, for one id or a list of ids; () if there is none."""
        place = self if self.get(key) is not None else outer
        value = place.get(key)
        if value is None:
            return ()
        several = cast("list[Any]", value) if isinstance(value, list) else [value]
        return tuple(Section({key: one}, place.place).integer(key, least=0) for one in several)


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:,.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} M"


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
