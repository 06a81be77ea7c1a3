"""The config of a block drafter, DFlash (arXiv 2602.06036) or DSpark (arXiv 2607.05147): reading, checking, writing.

Both are layers of Qwen3's kind. The config.json files are z-lab's `DFlashDraftModel`, with a table `dflash_config`, and
DeepSpec's `Qwen3DSparkModel`, with the same keys at the top level; each key is read at either place, as vLLM does.
Where engines differ: docs/drafters.md.
"""

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from redline.errors import CheckpointError, ConfigError
from redline.model.k2.config import K2Config, Section, Yarn, inv_freq, read_json, read_rope

BlockKind = Literal["dflash", "dspark"]

ARCHITECTURES: dict[str, BlockKind] = {
    "DFlashDraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
}
BLOCK, LAYERS, MARKOV_RANK, KEY_HEADS = 8, 5, 256, 8  # of a new drafter; key heads: at most
MOST_BLOCK, MOST_LAYERS = 64, 64  # of a file
_LAYER_IDS, _ENTERING = "target_layer_ids", "eagle_aux_hidden_state_layer_ids"


class BlockSizes(TypedDict, total=False):
    """Sizes of a new drafter. None, or left out: the target's, its padding token as the mask token, or a default."""

    block_size: int | None
    mask_token_id: int | None
    markov_rank: int | None
    num_hidden_layers: int | None
    draft_vocab_size: int | None  # None: the target's head
    intermediate_size: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """A drafter's geometry, under the names of the published config.json files.

    A block is the last token, called the anchor, and `block_size` - 1 mask tokens. Position k of it predicts the k-th
    token after the anchor; with `sample_from_anchor` (DSpark) the one after that, so that the anchor's position
    predicts too.
    """

    kind: BlockKind
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int | None
    """None: the drafter has no head of its own and uses the target's."""
    rms_norm_eps: float
    rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    layer_ids: tuple[int, ...]
    """Target layers whose states are read: k is the residual stream that enters layer k, one more than in the file."""
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool
    windows: tuple[int | None, ...]
    """Of each layer: positions that a query sees, itself included; such layers are causal. None: all of them."""
    markov_rank: int = 0
    """Rank of the bias on the logits by the token before; 0: none."""
    confidence: Literal["", "hidden", "hidden and token"] = ""
    """What the head reads that predicts the acceptance of each draft; empty: there is no such head."""

    @classmethod
    def for_target(
        cls, target: K2Config, *, kind: BlockKind = "dspark", layer_ids: tuple[int, ...], **own: Unpack[BlockSizes]
    ) -> "BlockConfig":
        """A new drafter for this target: 5 layers, a block of 8, for DSpark a bias of rank 256 and a confidence head.

        Plain rope with theta 1e6, as in the published drafters that have no YaRN. ConfigError if the target has no
        padding token and no mask token is given.
        """
        mask = own.get("mask_token_id")
        mask = target.pad_token_id if mask is None else mask
        if mask is None:
            raise ConfigError(
                "drafter.mask_token_id is missing, and the target has no pad_token_id: give an unused token"
            )
        heads, dspark = own.get("num_attention_heads") or target.num_attention_heads, kind == "dspark"
        groups = own.get("num_key_value_heads") or max(each for each in range(1, KEY_HEADS + 1) if heads % each == 0)
        width = own.get("head_dim") or target.v_head_dim
        if heads % groups or width % 2:
            raise ConfigError(
                f"drafter: {heads} heads of {width} values with {groups} key heads; expected key heads that divide the "
                "heads, and an even head_dim, since rope turns pairs"
            )
        layers = own.get("num_hidden_layers") or LAYERS
        rank = own.get("markov_rank")
        return cls(
            kind=kind,
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=own.get("intermediate_size") or target.intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=width,
            vocab_size=target.vocab_size,
            draft_vocab_size=own.get("draft_vocab_size"),
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=1e6,
            yarn=None,
            max_position_embeddings=target.max_position_embeddings,
            layer_ids=layer_ids,
            block_size=own.get("block_size") or BLOCK,
            mask_token_id=mask,
            sample_from_anchor=dspark,
            windows=(None,) * layers,
            markov_rank=(MARKOV_RANK if rank is None else rank) if dspark else 0,
            confidence="" if not dspark else "hidden" if rank == 0 else "hidden and token",
        )

    @classmethod
    def from_folder(cls, folder: Path | str) -> "BlockConfig":
        """Reads `folder/config.json`. CheckpointError if it is missing, broken, or not a supported block drafter."""
        path = Path(folder) / "config.json"
        return cls.from_dict(read_json(path), str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], place: str = "config.json") -> "BlockConfig":
        """Reads a parsed config.json. `place` is the prefix of error messages.

        CheckpointError names the key that is missing or not supported.
        """
        top = Section(values, place)
        kind = _kind(top)
        table = top.section("dflash_config") if top.get("dflash_config") is not None else Section({}, place)
        hidden, layers = top.integer("hidden_size"), top.integer("num_hidden_layers")
        if layers > MOST_LAYERS:
            raise top.refusal("num_hidden_layers", f"at most {MOST_LAYERS}")
        windows = _windows(top, layers)
        for key, without in _WITHOUT_EFFECT.items():
            section = _either(table, top, key)
            if (value := section.get(key)) is not None and (isinstance(value, bool), value) not in without:
                raise section.refusal(key, " or ".join(json.dumps(each) for _, each in without))
        # Without a value, sliding layers are causal and others are not.
        causal = _either(table, top, "is_causal")
        if causal.get("is_causal") not in (None, False) or (causal.get("is_causal") is False and any(windows)):
            raise causal.refusal("is_causal", "null: sliding layers are causal, others are not")
        heads = top.integer("num_attention_heads")
        groups = heads if top.get("num_key_value_heads") is None else top.integer("num_key_value_heads")
        if heads % groups:
            raise top.refusal("num_key_value_heads", f"{heads}, the number of heads, or a divisor of it")
        width = hidden // heads if top.get("head_dim") is None else top.integer("head_dim")
        if width % 2:
            raise CheckpointError(f"{place}: head_dim is {width}; supported: an even number: rope turns pairs")
        theta, yarn = read_rope(top, scaled_angles=True)
        vocabulary = top.integer("vocab_size")
        draft = None if top.get("draft_vocab_size") is None else top.integer("draft_vocab_size")
        if draft is not None and draft > vocabulary:
            raise top.refusal("draft_vocab_size", f"at most vocab_size, {vocabulary}")
        mask = _either(table, top, "mask_token_id").integer("mask_token_id", least=0)
        if mask >= vocabulary:
            raise _either(table, top, "mask_token_id").refusal("mask_token_id", f"0 to {vocabulary - 1}, a token")
        anchored = _either(table, top, "sample_from_anchor").flag("sample_from_anchor", default=kind == "dspark")
        rank = 0 if kind == "dflash" or top.get("markov_rank") is None else top.integer("markov_rank", least=0)
        if rank:
            top.one_of("markov_head_type", ("vanilla",))
        confidence = ""
        if kind == "dspark" and top.flag("enable_confidence_head", default=False):
            confidence = "hidden and token" if top.flag("confidence_head_with_markov", default=False) else "hidden"
            if confidence == "hidden and token" and not rank:
                raise top.refusal("confidence_head_with_markov", "false, since markov_rank is 0")
        return cls(
            kind=kind,
            hidden_size=hidden,
            target_hidden_size=hidden if top.get("target_hidden_size") is None else top.integer("target_hidden_size"),
            intermediate_size=top.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=width,
            vocab_size=vocabulary,
            draft_vocab_size=draft,
            rms_norm_eps=top.number("rms_norm_eps"),
            rope_theta=theta,
            yarn=yarn,
            max_position_embeddings=top.integer("max_position_embeddings"),
            layer_ids=_layer_ids(top, table),
            block_size=_block(_either(table, top, "block_size"), 1 if anchored else 2),
            mask_token_id=mask,
            sample_from_anchor=anchored,
            windows=windows,
            markov_rank=rank,
            confidence=confidence,
        )

    def to_dict(self) -> dict[str, Any]:
        """config.json in the public form of its kind; `from_dict` of it returns an equal config."""
        dspark, windows = self.kind == "dspark", [window for window in self.windows if window is not None]
        ids = [each - 1 for each in self.layer_ids]
        values: dict[str, Any] = {
            "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
            "model_type": "qwen3",
            **{key: getattr(self, key) for key in _SIZES},
            "layer_types": ["full_attention" if w is None else "sliding_attention" for w in self.windows],
            "sliding_window": windows[0] if windows else None,
            "use_sliding_window": bool(windows),
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.yarn is None else {"type": "yarn", **asdict(self.yarn)},
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "attention_bias": False,
            "sample_from_anchor": self.sample_from_anchor,
        }
        if self.draft_vocab_size is not None:
            values["draft_vocab_size"] = self.draft_vocab_size
        if not dspark:
            table = {"mask_token_id": self.mask_token_id, _LAYER_IDS: ids}
            return {**values, "block_size": self.block_size, "dflash_config": table}
        values |= {"block_size": self.block_size, "mask_token_id": self.mask_token_id, _LAYER_IDS: ids}
        values |= {"num_anchors": 512}  # read by DeepSpec's class, which trains with it
        values |= {"markov_rank": self.markov_rank, "enable_confidence_head": bool(self.confidence)}
        if self.markov_rank:
            values["markov_head_type"] = "vanilla"
        if self.confidence:
            values["confidence_head_with_markov"] = self.confidence == "hidden and token"
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
        if self.layer_ids[-1] > target.num_hidden_layers:
            raise CheckpointError(
                f"{place}: {_LAYER_IDS} is {[each - 1 for each in self.layer_ids]}; this target has layers 0 to "
                f"{target.num_hidden_layers - 1} (-1: its embedding)"
            )

    # Sizes derived from the geometry.

    @property
    def drafts(self) -> int:
        """Draft tokens of a whole block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def fused_width(self) -> int:
        """Values per token that `fc` reads: the target's hidden states, concatenated."""
        return len(self.layer_ids) * self.target_hidden_size

    @property
    def row_width(self) -> int:
        """Values per token and layer in the drafter's plane: rotated keys, then values."""
        return 2 * self.num_key_value_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Values per token in the drafter's plane, of all layers."""
        return self.num_hidden_layers * self.row_width

    @property
    def tail_width(self) -> int:
        """Values per page that the next page's first row needs: none."""
        return 0

    def passes(self, drafts: int) -> int:
        """Passes of a round that drafts this many tokens: one over the whole block."""
        return min(drafts, 1)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes per token in the drafter's plane, for pages of this dtype."""
        return self.kv_width * dtype.itemsize

    @property
    def softmax_scale(self) -> float:
        """head_dim^-0.5 times the square of YaRN's factor, by which transformers scales cos and sin in such layers."""
        m = 1.0
        if self.yarn is not None:  # mscale counts only together with mscale_all_dim
            mscale = self.yarn.mscale if self.yarn.mscale_all_dim else 1.0
            m = (0.1 * mscale * math.log(self.yarn.factor) + 1) / self.yarn.temperature
        return self.head_dim**-0.5 * m * m

    def inv_freq(self) -> Tensor:
        """Radians per position of each rope pair: float32 [head_dim / 2]."""
        return inv_freq(self.head_dim, self.rope_theta, self.yarn)


_SIZES = (
    "hidden_size", "target_hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip

# Values, next to null and a missing key, without an effect; each with whether it is a bool, since 1 equals true.
_WITHOUT_EFFECT: dict[str, tuple[tuple[bool, Any], ...]] = {
    "hidden_act": ((False, "silu"),),
    "attention_bias": ((True, False),),
    "fc_layernorm": ((True, False),),
    "input_embedding_scale": ((False, 1.0),),
    "output_multiplier": ((False, 1.0),),
    "final_logit_softcapping": ((False, 0.0),),
}


def _kind(top: Section) -> BlockKind:
    if top.get("speculators_model_type") is not None:
        raise top.refusal("speculators_model_type", "none: convert the file to DFlash's or DeepSpec's form")
    match top.get("architectures"):
        case [str(name)] if name in ARCHITECTURES:
            return ARCHITECTURES[name]
        case _:
            raise top.refusal("architectures", " or ".join(f'["{name}"]' for name in ARCHITECTURES))


def _either(table: Section, top: Section, key: str) -> Section:
    return table if table.get(key) is not None else top


def _layer_ids(top: Section, table: Section) -> tuple[int, ...]:
    """By our ids. The file's key counts layers by their outputs, so that -1 is the embedding; vLLM's counts inputs."""
    key, step = (_LAYER_IDS, 1) if _either(table, top, _LAYER_IDS).get(_LAYER_IDS) is not None else (_ENTERING, 0)
    place = _either(table, top, key)
    found = place.get(key)
    if place.get(key) is None:
        raise top.refusal(_LAYER_IDS, "a list of the target's layers")
    ids = [each + step for each in found] if isinstance(found, list) and all(map(_is_int, found)) else []
    if not ids or ids[0] < 0 or any(a >= b for a, b in itertools.pairwise(ids)):
        raise place.refusal(key, "layers of the target, in increasing order")
    return tuple(ids)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _block(place: Section, least: int) -> int:
    size = place.integer("block_size", least=least)
    if size > MOST_BLOCK:
        raise place.refusal("block_size", f"{least} to {MOST_BLOCK}")
    return size


def _windows(top: Section, layers: int) -> tuple[int | None, ...]:
    """As transformers' Qwen3Config: without `layer_types`, those from `max_window_layers` on slide, if any do."""
    kinds, slides = top.get("layer_types"), top.flag("use_sliding_window", default=False)
    supported = "full_attention", "sliding_attention"
    if kinds is None:
        first = top.integer("max_window_layers", least=0) if slides and top.get("max_window_layers") is not None else 28
        kinds = [supported[slides and layer >= first] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in supported for kind in kinds):
        raise top.refusal("layer_types", f"{layers} times {' or '.join(supported)}")
    if supported[1] in kinds and top.get("use_sliding_window") is False:
        raise top.refusal("use_sliding_window", "true, since layer_types has sliding layers")
    return tuple(top.integer("sliding_window") if kind == supported[1] else None for kind in kinds)
