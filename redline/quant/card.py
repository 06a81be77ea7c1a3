"""README.md of a quantised folder: its format, its source, the quantisation error and the command to serve it.

The source's own card follows, under its YAML head (the licence), which stays at the top.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from redline.disk import human
from redline.model.k2.config import Fp8Blocks, Int4Experts, Nvfp4Experts, Quantization
from redline.ops.formats import INT4_GROUP, NVFP4_GROUP

CARD = "README.md"
_PARTS = {  # part of a model by a pattern of the stored name; the first match counts
    "vision tower": r"^(vision_tower|mm_projector)\.",
    "embeddings": r"embed_tokens\.",
    "head": r"lm_head\.",
    "norms": r"norm\.weight$",
    "attention": r"\.self_attn\.",
    "router": r"\.mlp\.gate\.",
    "shared experts": r"\.shared_experts\.",
    "routed experts": r"\.mlp\.experts\.",
    "dense layers": r"\.mlp\.",
}


def part_of(name: str) -> str:
    """The part of a model that a tensor of this name belongs to; "others" for an unknown name."""
    return next((part for part, pattern in _PARTS.items() if re.search(pattern, name)), "others")


class QuantizedCard(NamedTuple):
    """What the card tells about a quantised folder."""

    to: Quantization
    how: str  # the level, or a note that codes were kept
    source: str  # the source folder's name
    was: Quantization  # the source's format
    fingerprint: str
    version: str
    size: int
    quantised: Iterable[str]  # stored names of weights in 4 bits
    kept: Iterable[tuple[str, str]]  # (stored name, dtype) of all other tensors
    activations: bool
    kv_scales: bool
    errors: Sequence[str]  # lines that summarize the quantisation error
    theirs: str  # the source's card; empty if it has none

    def text(self) -> str:
        head, body = _split(self.theirs)
        parts = sorted({part_of(name) for name in self.quantised})
        by_dtype: dict[str, set[str]] = {}
        for name, dtype in self.kept:
            by_dtype.setdefault(_DTYPES.get(dtype, dtype), set()).add(part_of(name))
        rows = [("format", f"{_name(self.to)}; {_formula(self.to)}")]
        if parts:
            rows += [("group size", f"{_group(self.to)} weights"), ("quantised", ", ".join(parts))]
        rows += [(f"in {dtype}", ", ".join(sorted(found))) for dtype, found in sorted(by_dtype.items())]
        if isinstance(self.to, Nvfp4Experts):
            rows.append(
                ("activations", "scales for 4 bits are stored" if self.activations else "16 bits: no scales are stored")
            )
            rows += [("KV cache", "scales for fp8 are stored")] * self.kv_scales
        rows += [
            ("made from", f"{self.source}, {_name(self.was)}, fingerprint {self.fingerprint[:16]}"),
            ("made by", f"`redline quantize` {self.version}, {self.how}"),
            ("size", human(self.size)),
        ]
        lines = [
            f"# {self.source} in {_name(self.to)}",
            "",
            "| | |",
            "|---|---|",
            *(f"| {key} | {value} |" for key, value in rows),
            "",
            "config.json names the modules that are not quantised. quantize.json has each weight's error and each "
            "shard's\nSHA-256.",
            "",
            "## Errors",
            "",
            *(f"- {line}" for line in self.errors),
            "",
            "`redline audit SOURCE FOLDER` also compares experts' outputs and next tokens with those of "
            f"{self.source}.",
            "",
            "## To serve it",
            "",
            "    redline serve FOLDER",
            "",
            "`--draft DRAFTER` adds the drafter of the source, which fits this model too.",
        ]
        if self.to == Nvfp4Experts("compressed-tensors"):
            lines += [
                "",
                "transformers 5.24 drops `weight_global_scale` of these experts as it loads them, and computes with "
                "wrong\nweights.",
            ]
        if body:
            lines += ["", "# The card of the source", "", body]
        return head + "\n".join(lines).rstrip() + "\n"


_DTYPES = {"BF16": "bf16", "F32": "float32", "F16": "float16", "F8_E4M3": "fp8"}


def _split(card: str) -> tuple[str, str]:
    """(its YAML head with the lines of dashes, the rest)."""
    found = re.match(r"---\n.*?\n---\n", card, re.DOTALL)
    head = found[0] if found else ""
    return head + "\n" * bool(head), card[len(found[0]) if found else 0 :].strip()


def _name(quantization: Quantization) -> str:
    match quantization:
        case Nvfp4Experts(maker):
            return f"NVFP4 ({maker})"
        case Int4Experts():
            return "INT4 (compressed-tensors, pack-quantized)"
        case Fp8Blocks(rows, columns):
            return f"FP8 in blocks of {rows} x {columns}"
        case _:
            return "bf16"


def _group(quantization: Quantization) -> int:
    match quantization:
        case Nvfp4Experts():
            return NVFP4_GROUP
        case Int4Experts():
            return INT4_GROUP
        case _:
            return 1


def _formula(quantization: Quantization) -> str:
    match quantization:
        case Nvfp4Experts():
            return "e2m1 codes, an e4m3 scale for each group, a float32 scale for each matrix"
        case Int4Experts():
            return "codes of 4 bits, a bf16 scale for each group"
        case _:
            return "nothing is quantised"
