"""The config of an EAGLE-3 drafter: reading, checking and writing its config.json.

There are two architectures. "mla" is `Eagle3DeepseekV2ForCausalLM`, with latent attention like its target. "llama" is
`LlamaForCausalLMEagle3`. Which engine reads which key, and where engines differ: docs/drafters.md.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from redline.errors import CheckpointError
from redline.model.k2.config import K2Config, Section, Yarn, inv_freq, read_json, read_rope

Architecture = Literal["mla", "llama"]

_ARCHITECTURES: dict[str, Architecture] = {
    "Eagle3DeepseekV2ForCausalLM": "mla",
    "Eagle3DeepseekV3ForCausalLM": "mla",
    "LlamaForCausalLMEagle3": "llama",
}
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def default_layer_ids(layers: int) -> tuple[int, ...]:
    """The default layer ids of vLLM and SGLang for a target of L = `layers` layers: the inputs of 2, L // 2 and L - 3.

    A target of fewer than 7 layers does not have three such ids. For those: the embedding, a middle layer, and the
    output of the last layer (never a first id of 1: see `_check_ids`).
    """
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return tuple(sorted({0, min(layers, max(2, layers // 2)), layers}))


class Eagle3Sizes(TypedDict, total=False):
    """Sizes of a new drafter. None, or left out: the target's."""

    intermediate_size: int | None
    q_lora_rank: int | None
    kv_lora_rank: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """A drafter's geometry, under the names of the published config.json files.

    MLA sizes are 0 in a Llama drafter; head_dim is 0 in an MLA drafter.
    """

    architecture: Architecture
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    vocab_size: int
    draft_vocab_size: int | None
    """None: the drafter has no head of its own and uses the target's."""
    rms_norm_eps: float
    rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    layer_ids: tuple[int, ...]
    """Target layers whose states are read, by vLLM's and SGLang's ids: k is the residual stream that enters layer k."""
    fc_norm: bool
    norm_output: bool
    norm_before_residual: bool = False
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    @classmethod
    def for_target(
        cls,
        target: K2Config,
        *,
        architecture: Architecture = "mla",
        draft_vocab_size: int | None = -1,
        layer_ids: tuple[int, ...] | None = None,
        fc_norm: bool = True,
        norm_output: bool = True,
        **own: Unpack[Eagle3Sizes],
    ) -> "Eagle3Config":
        """A drafter config for this target; by default EAGLE-3.1 with a full head.

        draft_vocab_size  number of tokens in the drafter's own head; -1: the whole vocabulary, None: no head of its own
        layer_ids         None: `default_layer_ids`

        A Llama drafter has plain rope (theta 1e6, as in published
        drafters), since engines disagree about YaRN there.
        """
        heads = own.get("num_attention_heads") or target.num_attention_heads
        sizes: dict[str, Any]
        if architecture == "mla":
            sizes = {
                "num_key_value_heads": heads,
                "q_lora_rank": own.get("q_lora_rank") or target.q_lora_rank,
                "kv_lora_rank": own.get("kv_lora_rank") or target.kv_lora_rank,
                "qk_nope_head_dim": target.qk_nope_head_dim,
                "qk_rope_head_dim": target.qk_rope_head_dim,
                "v_head_dim": target.v_head_dim,
                "rope_theta": target.rope_theta,
                "yarn": target.yarn,
            }
        else:
            sizes = {
                "num_key_value_heads": own.get("num_key_value_heads") or heads,
                "head_dim": own.get("head_dim") or target.v_head_dim,
                "rope_theta": 1e6,
                "yarn": None,
            }
        return cls(
            architecture=architecture,
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=own.get("intermediate_size") or target.intermediate_size,
            num_attention_heads=heads,
            vocab_size=target.vocab_size,
            draft_vocab_size=target.vocab_size if draft_vocab_size == -1 else draft_vocab_size,
            rms_norm_eps=target.rms_norm_eps,
            max_position_embeddings=target.max_position_embeddings,
            layer_ids=layer_ids or default_layer_ids(target.num_hidden_layers),
            fc_norm=fc_norm,
            norm_output=norm_output,
            bos_token_id=target.bos_token_id,
            eos_token_ids=target.eos_token_ids,
            pad_token_id=target.pad_token_id,
            **sizes,
        )

    @classmethod
    def from_folder(cls, folder: Path | str, target: K2Config | None = None) -> "Eagle3Config":
        """Reads `folder/config.json`. CheckpointError if it is missing, broken, or not a supported drafter."""
        path = Path(folder) / "config.json"
        return cls.from_dict(read_json(path), str(path), target)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], place: str = "config.json", target: K2Config | None = None
    ) -> "Eagle3Config":
        """Reads a parsed config.json. `place` is the prefix of error messages.

        target  supplies the default layer ids if the file has none; without a target such a file is rejected

        CheckpointError if it is not a supported drafter.
        """
        top = Section(values, place)
        architecture = _architecture(top)
        nested = top.section("eagle_config") if top.get("eagle_config") is not None else Section({}, place)
        for section, key, supported, absent in _one_way(top, nested):
            section.demand(key, supported, absent)
        hidden = top.integer("hidden_size")
        heads = top.integer("num_attention_heads")
        theta, yarn = read_rope(top, scaled_angles=architecture == "llama")
        key_value_heads = heads if top.get("num_key_value_heads") is None else top.integer("num_key_value_heads")
        if heads % key_value_heads or (architecture == "mla" and key_value_heads != heads):
            raise top.refusal("num_key_value_heads", f"{heads}, the number of heads" + _OR_DIVISOR[architecture])
        if architecture == "mla":
            sizes = {key: top.integer(key) for key in _MLA_SIZES}
        else:
            sizes = {"head_dim": hidden // heads if top.get("head_dim") is None else top.integer("head_dim")}
        rotated = "qk_rope_head_dim" if architecture == "mla" else "head_dim"
        if sizes[rotated] % 2:
            raise CheckpointError(
                f"{place}: {rotated} is {sizes[rotated]}; supported: an even number: rope turns pairs"
            )
        vocabulary = top.integer("vocab_size")
        draft = None if top.get("draft_vocab_size") is None else top.integer("draft_vocab_size")
        if draft is not None and draft > vocabulary:
            raise top.refusal("draft_vocab_size", f"at most vocab_size, {vocabulary}")
        return cls(
            architecture=architecture,
            hidden_size=hidden,
            target_hidden_size=hidden if top.get("target_hidden_size") is None else top.integer("target_hidden_size"),
            intermediate_size=top.integer("intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            vocab_size=vocabulary,
            draft_vocab_size=draft,
            rms_norm_eps=top.number("rms_norm_eps"),
            rope_theta=theta,
            yarn=yarn,
            max_position_embeddings=top.integer("max_position_embeddings"),
            layer_ids=_layer_ids(top, nested, target),
            fc_norm=_flag(top, nested, "fc_norm"),
            norm_output=_flag(top, nested, "norm_output"),
            norm_before_residual=_flag(top, nested, "norm_before_residual"),
            bos_token_id=top.token("bos_token_id", top),
            eos_token_ids=top.tokens("eos_token_id", top),
            pad_token_id=top.token("pad_token_id", top),
            **sizes,
        )

    def to_dict(self) -> dict[str, Any]:
        """config.json in a form that every engine reads (docs/drafters.md); `from_dict` of it returns an equal config.

        CheckpointError if the layer ids are not increasing or begin with 1.
        """
        _check_ids(self.layer_ids, "layer_ids")
        mla = self.architecture == "mla"
        values: dict[str, Any] = {
            "architectures": ["Eagle3DeepseekV2ForCausalLM" if mla else "LlamaForCausalLMEagle3"],
            "model_type": "kimi_k2" if mla else "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            **{key: getattr(self, key) for key in (_MLA_SIZES if mla else _LLAMA_SIZES)},
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.yarn is None else {"type": "yarn", **asdict(self.yarn)},
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "attention_bias": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids),
            "pad_token_id": self.pad_token_id,
            _LAYER_IDS: list(self.layer_ids),
            "num_aux_hidden_states": len(self.layer_ids),
            "eagle_config": {_LAYER_IDS: list(self.layer_ids), "use_aux_hidden_state": True},
        }
        if mla:
            values.update(first_k_dense_replace=1, moe_layer_freq=1)
        # A missing key is not the same as null: SGLang uses the target's head only if the key is missing.
        if self.draft_vocab_size is not None:
            values["draft_vocab_size"] = self.draft_vocab_size
        values.update({key: True for key in ("fc_norm", "norm_output", "norm_before_residual") if getattr(self, key)})
        return values

    def check(self, target: K2Config, place: str = "drafter") -> None:
        """CheckpointError, with the field and the reason, if this drafter cannot draft for `target`."""
        for key, value, wanted in (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        ):
            if value != wanted:
                raise CheckpointError(f"{place}: {key} is {value}; this target needs {wanted}")
        _check_ids(self.layer_ids, f"{place}: {_LAYER_IDS}")
        if self.layer_ids[-1] > target.num_hidden_layers:
            raise CheckpointError(
                f"{place}: {_LAYER_IDS} is {list(self.layer_ids)}; this target has ids 0 (its embedding) to "
                f"{target.num_hidden_layers} (what enters its last norm)"
            )

    # Sizes derived from the geometry.

    @property
    def fused_width(self) -> int:
        """Values per token that `fc` reads: the target's hidden states, concatenated."""
        return len(self.layer_ids) * self.target_hidden_size

    @property
    def query_width(self) -> int:
        """Values of one query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.architecture == "mla" else self.head_dim

    @property
    def value_width(self) -> int:
        """Values of one head's output."""
        return self.v_head_dim if self.architecture == "mla" else self.head_dim

    @property
    def rope_width(self) -> int:
        """Values of one head that are rotated."""
        return self.qk_rope_head_dim if self.architecture == "mla" else self.head_dim

    @property
    def kv_width(self) -> int:
        """Values per token in the drafter's plane. MLA: latent | rotated key. Llama: rotated keys | values."""
        if self.architecture == "mla":
            return self.kv_lora_rank + self.qk_rope_head_dim
        return 2 * self.num_key_value_heads * self.head_dim

    @property
    def tail_width(self) -> int:
        """Values per page for the row at the next page's first place: the last token's fused feature."""
        return self.hidden_size

    def passes(self, drafts: int) -> int:
        """Passes of a round that drafts this many tokens."""
        return drafts

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes per token in the drafter's plane, for pages of this dtype."""
        return self.kv_width * dtype.itemsize

    @property
    def softmax_scale(self) -> float:
        """Query width^-0.5 times the square of YaRN's temperature: cos and sin are never scaled.

        MLA: as in K2Config. Llama: transformers scales cos and sin by mscale / mscale_all_dim there; all values of a
        head are rotated, so the square of that factor belongs in this scale.
        """
        if self.yarn is None:
            m = 1.0
        elif self.architecture == "mla":
            m = self.yarn.temperature
        else:
            m = (0.1 * self.yarn.mscale * math.log(self.yarn.factor) + 1) / self.yarn.temperature
        return self.query_width**-0.5 * m * m

    def inv_freq(self) -> Tensor:
        """Radians per position of each rope pair: float32 [rope width / 2]."""
        return inv_freq(self.rope_width, self.rope_theta, self.yarn)


_MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LLAMA_SIZES = ("head_dim", "target_hidden_size")
_OR_DIVISOR: dict[Architecture, str] = {"mla": "", "llama": ", or a divisor of it"}


def _architecture(top: Section) -> Architecture:
    match top.get("architectures"):
        case [str(name)] if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
        case _:
            raise top.refusal("architectures", " or ".join(f'["{name}"]' for name in _ARCHITECTURES))


def _one_way(top: Section, nested: Section) -> tuple[tuple[Section, str, Any, Any], ...]:
    """(section, key, supported value, meaning of a missing key) for each key that has exactly one supported value."""
    return (
        (top, "num_hidden_layers", 1, ...),
        (top, "hidden_act", "silu", "silu"),
        (top, "attention_bias", False, False),
        (top, "mlp_bias", False, False),
        (top, "rope_interleave", True, True),
        (nested, "use_aux_hidden_state", True, True),
        (nested, "use_input_layernorm_in_first_layer", True, True),
        (nested, "use_last_layernorm", True, True),
        (nested, "use_mtp_layernorm", False, False),
        (nested, "norm_before_fc", False, False),
        (top, "norm_before_fc", False, False),
    )


def _flag(top: Section, nested: Section, key: str) -> bool:
    """The flag at the top level, which engines read, else the one in eagle_config: some files have it only there."""
    inner = nested.flag(key, default=False)
    return top.flag(key, default=inner)


def _layer_ids(top: Section, nested: Section, target: K2Config | None) -> tuple[int, ...]:
    """The layer ids, in vLLM's meaning.

    vLLM reads the top-level ids unchanged. SGLang reads those in eagle_config and adds 1 to all if the first is 1.
    """
    found = [section.tokens(_LAYER_IDS, section) for section in (top, nested) if section.get(_LAYER_IDS) is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise CheckpointError(
            f"{top.place}: {_LAYER_IDS} is {list(found[0])} at the top and {list(found[1])} in eagle_config; "
            "expected the same: engines read one or the other"
        )
    if found:
        ids = found[0]
        if ids[:1] == (1,) and top.get(_LAYER_IDS) is None:
            ids = tuple(layer + 1 for layer in ids)
    elif target is not None:
        ids = default_layer_ids(target.num_hidden_layers)
    else:
        raise top.refusal(_LAYER_IDS, "layer ids, where the target is not known")
    _check_ids(ids, f"{top.place}: {_LAYER_IDS}")
    count = top.get("num_aux_hidden_states")
    if count is not None and count != len(ids):
        raise top.refusal("num_aux_hidden_states", f"{len(ids)}, the number of {_LAYER_IDS}")
    return ids


def _check_ids(ids: tuple[int, ...], place: str) -> None:
    if not ids or any(a >= b for a, b in itertools.pairwise(ids)):
        raise CheckpointError(f"{place} is {list(ids)}; supported: ids that increase, for vLLM sorts them")
    if ids[0] == 1:
        raise CheckpointError(f"{place} is {list(ids)}; a first id of 1 means another layer to SGLang than to vLLM")
