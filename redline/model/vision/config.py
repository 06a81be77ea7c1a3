"""The geometry of MoonViT-3D, the vision tower of K2.5 and later, and of its projector: config.json's vision_config.

Unsupported settings are refused by name, as in `redline.model.k2.config`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from redline.model.k2.config import Section

# What the published files have and this code computes: (key, value, what a missing key means).
_ONE_WAY: tuple[tuple[str, Any, Any], ...] = (
    ("pos_emb_type", "divided_fixed", "divided_fixed"),
    ("merge_type", "sd2_tpool", "sd2_tpool"),
    ("video_attn_type", "spatial_temporal", "spatial_temporal"),
    ("mm_projector_type", "patchmerger", "patchmerger"),
    ("projector_hidden_act", "gelu", "gelu"),
    ("merge_kernel_size", [2, 2], [2, 2]),
)
MERGE = 2  # patches of one token, in each direction
TOWER, PROJECTOR = "vision_tower", "mm_projector"


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes under shorter names than the file's. The tower's width is a multiple of 4 x heads: rope turns pairs of two
    axes."""

    patch: int  # pixels of a patch, in each direction
    rows: int  # of the learned table of positions
    columns: int
    frames: int  # at most this number in one item
    hidden: int
    layers: int
    heads: int
    intermediate: int
    text_hidden: int  # width of the text model's embeddings
    token: int  # the id that a prompt has at each position of an image
    projector_eps: float

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], text_hidden: int, place: str = "config.json"
    ) -> "VisionConfig | None":
        """Reads a parsed config.json; None if the model has no vision tower. text_hidden: K2Config.hidden_size.

        CheckpointError, with key, value and the supported values, if the tower is not a supported one.
        """
        top = Section(values, place)
        if top.get("vision_config") is None:
            return None
        vision = top.section("vision_config")
        for key, supported, absent in _ONE_WAY:
            vision.demand(key, supported, absent)
        hidden, heads = vision.integer("vt_hidden_size"), vision.integer("vt_num_attention_heads")
        vision.demand("mm_hidden_size", hidden, hidden)
        vision.demand("text_hidden_size", text_hidden, text_hidden)
        if hidden % (4 * heads):
            raise vision.refusal("vt_hidden_size", f"a multiple of 4 x vt_num_attention_heads ({heads})")
        return cls(
            patch=vision.integer("patch_size"),
            rows=vision.integer("init_pos_emb_height"),
            columns=vision.integer("init_pos_emb_width"),
            frames=vision.integer("init_pos_emb_time"),
            hidden=hidden,
            layers=vision.integer("vt_num_hidden_layers"),
            heads=heads,
            intermediate=vision.integer("vt_intermediate_size"),
            text_hidden=text_hidden,
            token=top.integer("media_placeholder_token_id", least=0),
            projector_eps=vision.number("projector_ln_eps", default=1e-5),
        )

    def to_dict(self) -> dict[str, Any]:
        """The vision_config of a config.json, in Moonshot's keys."""
        return {
            "patch_size": self.patch,
            "init_pos_emb_height": self.rows,
            "init_pos_emb_width": self.columns,
            "init_pos_emb_time": self.frames,
            "vt_hidden_size": self.hidden,
            "vt_num_hidden_layers": self.layers,
            "vt_num_attention_heads": self.heads,
            "vt_intermediate_size": self.intermediate,
            "mm_hidden_size": self.hidden,
            "text_hidden_size": self.text_hidden,
            "projector_ln_eps": self.projector_eps,
            **{key: value for key, value, _ in _ONE_WAY},
        }

    @property
    def head(self) -> int:
        """Values of one head."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """The number of stored values of tower and projector."""
        return sum(math.prod(shape) for _, shape in self.tensors())

    def operations(self, frames: int, rows: int, columns: int) -> int:
        """Floating-point operations to encode one item of this grid of patches, two per multiplication and addition."""
        patches = frames * rows * columns
        products = self.hidden * (4 * self.hidden + 2 * self.intermediate)
        tower = 2 * patches * (3 * self.patch**2 * self.hidden + self.layers * products)
        attention = 4 * patches * patches * self.hidden * self.layers
        merged = MERGE**2 * self.hidden
        projector = 2 * (rows * columns // MERGE**2) * merged * (merged + self.text_hidden)
        return tower + attention + projector

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(stored name, shape) of every tensor, in the order of the forward pass. All are stored in bf16."""

        def linear(name: str, outputs: int, *inputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
            yield f"{name}.weight", (outputs, *inputs)
            yield f"{name}.bias", (outputs,)

        def norm(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
            yield f"{name}.weight", (self.hidden,)
            yield f"{name}.bias", (self.hidden,)

        merged = MERGE**2 * self.hidden
        yield from linear(f"{TOWER}.patch_embed.proj", self.hidden, 3, self.patch, self.patch)
        yield f"{TOWER}.patch_embed.pos_emb.weight", (self.rows, self.columns, self.hidden)
        for layer in range(self.layers):
            at = f"{TOWER}.encoder.blocks.{layer}"
            yield from norm(f"{at}.norm0")
            yield from linear(f"{at}.wqkv", 3 * self.hidden, self.hidden)
            yield from linear(f"{at}.wo", self.hidden, self.hidden)
            yield from norm(f"{at}.norm1")
            yield from linear(f"{at}.mlp.fc0", self.intermediate, self.hidden)
            yield from linear(f"{at}.mlp.fc1", self.hidden, self.intermediate)
        yield from norm(f"{TOWER}.encoder.final_layernorm")
        yield from norm(f"{PROJECTOR}.pre_norm")
        yield from linear(f"{PROJECTOR}.proj.0", merged, merged)
        yield from linear(f"{PROJECTOR}.proj.2", self.text_hidden, merged)


# As in the config.json of Kimi K2.5 and K2.6.
KIMI_K26_VISION = VisionConfig(
    patch=14,
    rows=64,
    columns=64,
    frames=4,
    hidden=1152,
    layers=27,
    heads=16,
    intermediate=4304,
    text_hidden=7168,
    token=163605,
    projector_eps=1e-5,
)
