"""transformers' vision tower and projector on our weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from redline.model.vision.config import VisionConfig


def theirs(config: VisionConfig, weights: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """transformers' tower and projector. They rotate halves, not pairs, so rows of queries and keys are permuted."""
    from transformers import DeepseekV3Config, Kimi_K25Config, Kimi_K25VisionConfig
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25MultimodalProjection, Kimi_K25VisionModel

    vision = Kimi_K25VisionConfig(
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.intermediate,
        pos_emb_height=config.rows,
        pos_emb_width=config.columns,
        rope_parameters={"rope_type": "axial", "rope_theta": 10000.0},
    )
    text = DeepseekV3Config(hidden_size=config.text_hidden)
    whole = Kimi_K25Config(text_config=text, vision_config=vision, projection_hidden_size=config.hidden)
    tower, projector = Kimi_K25VisionModel(vision).eval(), Kimi_K25MultimodalProjection(whole).eval()
    halves = torch.arange(config.head).view(-1, 2).t().flatten()
    named: dict[str, Tensor] = {}
    for name, values in weights.items():
        if name.startswith("mm_projector"):
            continue
        name = name.removeprefix("vision_tower.").removeprefix("encoder.").replace("blocks.", "layers.")
        for old, new in (
            ("norm0", "norm1_"),
            ("norm1.", "norm2."),
            ("norm1_", "norm1"),
            ("fc1", "fc2"),
            ("fc0", "fc1"),
        ):
            name = name.replace(old, new)
        if ".wqkv." in name:
            for part, rows in zip("qkv", values.chunk(3), strict=True):
                if part != "v":
                    rows = rows.view(config.heads, config.head, *rows.shape[1:])[:, halves].reshape(rows.shape)
                named[name.replace("wqkv", f"attn.{part}_proj")] = rows
        else:
            name = name.replace(".wo.", ".attn.proj.").replace("pos_emb.weight", "pos_emb.position_embeddings")
            named[name] = values
    tower.load_state_dict(named)
    projector.load_state_dict(
        {
            name.removeprefix("mm_projector.").replace("proj.0", "in_proj").replace("proj.2", "out_proj"): values
            for name, values in weights.items()
            if name.startswith("mm_projector")
        }
    )
    return tower, projector


@torch.inference_mode()
def their_features(
    config: VisionConfig, weights: Mapping[str, Tensor], pixels: Tensor, grid: tuple[int, int, int]
) -> Tensor:
    """[tokens, text_hidden]. pixels: normalised patches."""
    tower, projector = theirs(config, weights)
    return projector(tower(pixels, torch.tensor([grid])).pooler_output)[:, 0]
