"""A K2 checkpoint as a GGUF of architecture `deepseek2`, so that llama.cpp can be measured on the same model.

    python -m lab.peers.to_gguf models/kimi-nano FOLDER [--dense q4_0] [--vocabulary] [--check ...]

writes FOLDER/q4_0.gguf, and so on for each `--dense`.

Routed experts become Q4_0 without being quantised again: blocks of 32, codes 0..15 minus 8, one scale, as in
compressed-tensors, except that the scale is bf16 there and fp16 here (exact from 2^-14 to 65504, the range of trained
scales). Every other matrix is rounded to `--dense`: q4_0 with a head of q8_0, as llama.cpp's own quantiser makes a Q4_0
file of these widths; or q8_0, or bf16 as in the checkpoint. Norms, routers and their biases are float32. f32 is for
`--check`: all weights dequantised, including experts, so that remaining differences are not due to rounding of weights.

Attention is stored split, for the latent form: the keys' half of kv_b transposed (`attn_k_b`), the values' unchanged
(`attn_v_b`). Rope pairs are interleaved on both sides. There is no vocabulary by default, since measurements use token
ids; `--vocabulary`, which a server needs to answer in text, adds that of tokenizer.json.

The container (version 3, github.com/ggml-org/ggml/blob/master/docs/gguf.md) is written here; it is built in memory.

--check prints, for real prompts with their greedy answers and for all of them as one long context, how often
llama.cpp's most likely token is transformers' (float32, dequantised weights), and the differences of logits. llama.cpp
rounds in any case: cache rows to fp16, and the activations multiplied with Q4_0 and Q8_0 weights to 8 bits.
"""

import argparse
import itertools
import json
import math
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lab.program import program
from redline.bench.speculation.rates import read_questions
from redline.chat.template import style_of
from redline.chat.tokenizer import Tokenizer
from redline.errors import CheckpointError
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import K2Config
from redline.ops.formats import Int4
from tests.oracle import greedy, logits, transformers_model

BLOCK = 32  # values that share a scale, in Q4_0 and Q8_0
ALIGNMENT = 32  # bytes: each tensor starts at a multiple of it
ANSWER = 32  # tokens of a greedy answer
THREADS = 2
DENSE = ("q4_0", "q8_0", "bf16", "f32")
NORMAL, CONTROL = 1, 3  # kinds of tokens: LLAMA_TOKEN_TYPE_* of llama.h
PEER = Path(__file__).with_name("peer_llama_cpp.py")

Value = bool | int | float | str | list[str] | list[int]


class Kind(NamedTuple):
    """A type of ggml: its number, and the number of a file of mostly this type (llama.h's llama_ftype)."""

    number: int
    file: int


KINDS = {"f32": Kind(0, 0), "q4_0": Kind(2, 2), "q8_0": Kind(8, 7), "bf16": Kind(30, 32)}


class Stored(NamedTuple):
    """A tensor of the file. kind: a key of KINDS. shape: in torch's order, [..., out, in].

    data: its bytes in ggml's layout.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: bytes


def convert(folder: Path, out: Path, dense: str = "q4_0", *, words: bool = False) -> None:
    """Writes the checkpoint in `folder` to `out`. dense: the type of all matrices except routed experts, one of DENSE.

    With f32 the experts have that type too. words: with the vocabulary of tokenizer.json. Raises CheckpointError if the
    checkpoint is broken, or beyond what llama.cpp's deepseek2 computes.
    """
    checkpoint = Checkpoint.open(folder)
    values = metadata(checkpoint.config, dense) | (vocabulary(folder) if words else {})
    write(out, values, list(tensors(checkpoint, dense)))


def metadata(config: K2Config, dense: str) -> dict[str, Value]:
    """The metadata that llama.cpp's loader reads, under its names. Latent attention counts as one key head of a cache
    row's width.

    Raises CheckpointError if YaRN has two different mscales, of which deepseek2 supports one.
    """
    yarn = config.yarn
    if yarn is not None and yarn.mscale != yarn.mscale_all_dim:
        raise CheckpointError(
            f"mscale is {yarn.mscale} and mscale_all_dim {yarn.mscale_all_dim}; expected the same: deepseek2 has one"
        )
    at = "deepseek2"
    values: dict[str, Value] = {
        "general.architecture": at,
        "general.alignment": ALIGNMENT,
        "general.quantization_version": 2,
        "general.file_type": KINDS[dense].file,
        f"{at}.vocab_size": config.vocab_size,
        f"{at}.context_length": config.max_position_embeddings,
        f"{at}.embedding_length": config.hidden_size,
        f"{at}.block_count": config.num_hidden_layers,
        f"{at}.leading_dense_block_count": config.first_k_dense_replace,
        f"{at}.feed_forward_length": config.intermediate_size,
        f"{at}.attention.head_count": config.num_attention_heads,
        f"{at}.attention.head_count_kv": 1,
        f"{at}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{at}.attention.q_lora_rank": config.q_lora_rank,
        f"{at}.attention.kv_lora_rank": config.kv_lora_rank,
        f"{at}.attention.key_length": config.kv_width,
        f"{at}.attention.value_length": config.kv_lora_rank,
        f"{at}.attention.key_length_mla": config.qk_head_dim,
        f"{at}.attention.value_length_mla": config.v_head_dim,
        f"{at}.expert_count": config.n_routed_experts,
        f"{at}.expert_used_count": config.num_experts_per_tok,
        f"{at}.expert_shared_count": config.n_shared_experts,
        f"{at}.expert_feed_forward_length": config.moe_intermediate_size,
        f"{at}.expert_weights_scale": config.routed_scaling_factor,
        f"{at}.expert_weights_norm": config.norm_topk_prob,
        f"{at}.expert_gating_func": 2,  # sigmoid
        f"{at}.rope.dimension_count": config.qk_rope_head_dim,
        f"{at}.rope.freq_base": config.rope_theta,
        "tokenizer.ggml.model": "no_vocab",
    }
    if yarn is None:
        return values
    scaling = f"{at}.rope.scaling"
    return values | {
        f"{scaling}.type": "yarn",
        f"{scaling}.factor": yarn.factor,
        f"{scaling}.original_context_length": yarn.original_max_position_embeddings,
        f"{scaling}.yarn_beta_fast": yarn.beta_fast,
        f"{scaling}.yarn_beta_slow": yarn.beta_slow,
        f"{scaling}.yarn_log_multiplier": 0.1 * yarn.mscale_all_dim,  # the 0.1 of 0.1 m ln(factor) + 1
    }


def vocabulary(folder: Path) -> dict[str, Value]:
    """The vocabulary of `folder`/tokenizer.json under llama.cpp's names. Its control tokens end no answer.

    Raises CheckpointError if the file is missing, or its ids are not 0, 1, 2 and so on.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{path}: missing; a file with a vocabulary is made from it")
    read = json.loads(path.read_text())
    ordinary: dict[str, int] = read["model"]["vocab"]
    control = {token["content"]: token["id"] for token in read["added_tokens"]}
    names = {id: name for name, id in (ordinary | control).items()}
    if sorted(names) != list(range(len(names))):
        raise CheckpointError(f"{path}: {len(names)} tokens with other ids than 0 to {len(names) - 1}")
    every = [names[id] for id in range(len(names))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in read["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "kimi-k2",
        "tokenizer.ggml.tokens": every,
        "tokenizer.ggml.token_type": [CONTROL if name in control else NORMAL for name in every],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }


def tensors(checkpoint: Checkpoint, dense: str) -> Iterator[Stored]:
    """Yields every tensor under llama.cpp's name for it. dense: as in `convert`.

    Raises CheckpointError for a missing one.
    """
    config, plain = checkpoint.config, checkpoint.plain
    experts = "f32" if dense == "f32" else "q4_0"

    def matrix(name: str, weight: Tensor, kind: str = dense) -> Stored:
        return Stored(f"{name}.weight", kind, tuple(weight.shape), pack(weight, kind))

    def single(name: str, weight: Tensor) -> Stored:
        return Stored(name, "f32", tuple(weight.shape), pack(weight, "f32"))

    def mlp(at: str, mine: str, ending: str = "") -> Iterator[Stored]:
        for projection in ("gate", "up", "down"):
            yield matrix(f"{at}.ffn_{projection}{ending}", plain(f"{mine}.{projection}_proj.weight"))

    yield matrix("token_embd", plain("embed_tokens.weight"))
    yield single("output_norm.weight", plain("norm.weight"))
    yield matrix("output", plain("lm_head.weight"), "q8_0" if dense == "q4_0" else dense)
    for layer in range(config.num_hidden_layers):
        at, mine, attention = f"blk.{layer}", f"layers.{layer}", f"layers.{layer}.self_attn"
        yield single(f"{at}.attn_norm.weight", plain(f"{mine}.input_layernorm.weight"))
        yield single(f"{at}.attn_q_a_norm.weight", plain(f"{attention}.q_a_layernorm.weight"))
        yield single(f"{at}.attn_kv_a_norm.weight", plain(f"{attention}.kv_a_layernorm.weight"))
        yield single(f"{at}.ffn_norm.weight", plain(f"{mine}.post_attention_layernorm.weight"))
        yield matrix(f"{at}.attn_q_a", plain(f"{attention}.q_a_proj.weight"))
        yield matrix(f"{at}.attn_q_b", plain(f"{attention}.q_b_proj.weight"))
        yield matrix(f"{at}.attn_kv_a_mqa", plain(f"{attention}.kv_a_proj_with_mqa.weight"))
        both: Tensor = plain(f"{attention}.kv_b_proj.weight").view(config.num_attention_heads, -1, config.kv_lora_rank)
        yield matrix(f"{at}.attn_k_b", both[:, : config.qk_nope_head_dim].transpose(1, 2))
        yield matrix(f"{at}.attn_v_b", both[:, config.qk_nope_head_dim :])
        yield matrix(f"{at}.attn_output", plain(f"{attention}.o_proj.weight"))
        if not config.is_moe(layer):
            yield from mlp(at, f"{mine}.mlp")
            continue
        yield single(f"{at}.ffn_gate_inp.weight", plain(f"{mine}.mlp.gate.weight"))
        yield single(f"{at}.exp_probs_b.bias", plain(f"{mine}.mlp.gate.e_score_correction_bias"))
        yield from mlp(at, f"{mine}.mlp.shared_experts", "_shexp")
        for projection in ("gate", "up", "down"):
            every = [checkpoint.expert(layer, expert, projection) for expert in range(config.n_routed_experts)]
            shape = (len(every), *every[0].shape)
            data = b"".join(pack(one, experts) for one in every)  # pyright: ignore[reportArgumentType] - not of NVFP4
            yield Stored(f"{at}.ffn_{projection}_exps.weight", experts, shape, data)


# The types.


def pack(weight: Tensor | Int4, kind: str) -> bytes:
    """A tensor [..., K] in ggml's layout of `kind`. In q4_0 an Int4 keeps its codes. Blocks need K divisible by 32.

    Raises ValueError for a kind not in DENSE.
    """
    if kind == "q4_0":
        return _bytes(q4_0(weight) if isinstance(weight, Int4) else q4_0_of(weight))
    values = weight.dequantize() if isinstance(weight, Int4) else weight
    match kind:
        case "f32":
            return _bytes(values.float())
        case "bf16":
            return _bytes(values.to(torch.bfloat16))
        case "q8_0":
            return _bytes(q8_0_of(values))
        case _:
            raise ValueError(f"{kind!r}; expected one of {', '.join(DENSE)}")


def q4_0(weight: Int4) -> Tensor:
    """uint8 [..., K / 32, 18]: the scale in fp16, then 16 bytes of codes, columns i (low bits) and 16 + i (high)."""
    codes = weight.codes()
    return _q4_0_blocks(codes.view(*codes.shape[:-1], -1, BLOCK), weight.scale)


def q4_0_of(weight: Tensor) -> Tensor:
    """A plain tensor [..., K] in the layout of `q4_0`, rounded as in llama.cpp: the value farthest from zero becomes
    -8.
    """
    groups = _groups(weight)
    farthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = farthest / -8
    codes = (groups * torch.where(scale == 0, 0, 1 / scale) + 8.5).clamp(0, 15).to(torch.int32)
    return _q4_0_blocks(codes, scale[..., 0])


def q8_0_of(weight: Tensor) -> Tensor:
    """uint8 [..., K / 32, 34]: the scale in fp16, then 32 signed bytes; the value farthest from zero becomes 127."""
    groups = _groups(weight)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    codes = (groups * torch.where(scale == 0, 0, 1 / scale)).round().to(torch.int8)
    return torch.cat([_fp16(scale[..., 0]), codes.view(torch.uint8)], dim=-1)


def _q4_0_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """codes int32 [..., K / 32, 32], scale [..., K / 32]."""
    low, high = codes[..., : BLOCK // 2], codes[..., BLOCK // 2 :]
    return torch.cat([_fp16(scale), (low | high << 4).to(torch.uint8)], dim=-1)


def _groups(weight: Tensor) -> Tensor:
    return weight.float().reshape(*weight.shape[:-1], -1, BLOCK)


def _fp16(scale: Tensor) -> Tensor:
    """uint8 [..., 2], little-endian."""
    return scale.to(torch.float16)[..., None].view(torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# The container.


def write(path: Path, values: dict[str, Value], stored: list[Stored]) -> None:
    """GGUF version 3: header, values, the offset of each tensor, then the data, each tensor at a multiple of ALIGNMENT.

    Raises OSError if the file cannot be written.
    """
    head = [b"GGUF", struct.pack("<IQQ", 3, len(stored), len(values))]
    head += [_string(key) + _value(value) for key, value in values.items()]
    start = 0
    for tensor in stored:
        dimensions = tuple(reversed(tensor.shape))  # GGUF names the fastest dimension first
        place = struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, KINDS[tensor.kind].number, start)
        head.append(_string(tensor.name) + place)
        start += _aligned(len(tensor.data))
    with path.open("wb") as file:
        opening = b"".join(head)
        file.write(opening.ljust(_aligned(len(opening)), b"\0"))
        for tensor in stored:
            file.write(tensor.data.ljust(_aligned(len(tensor.data)), b"\0"))


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Value) -> bytes:
    """The number of the value's type, and the value."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, map(str, value)))
        case _:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *map(int, value))


# The check.


class Text(NamedTuple):
    """A text that both peers compute: its token ids, and transformers' logits."""

    tokens: list[int]
    logits: Tensor  # transformers': float32 [tokens, vocabulary]


def texts(folder: Path) -> list[Text]:
    """A prompt of each domain with its greedy answer, and then all of these as one text."""
    files = sorted((folder / "eval").glob("*.jsonl"))
    questions = read_questions(files, Tokenizer.open(folder), style_of(folder), most=1)
    model = transformers_model(folder)
    found = [[*question.tokens, *greedy(model, [*question.tokens], ANSWER)] for question in questions]
    found.append([token for tokens in found for token in tokens])
    return [Text(tokens, logits(model, tokens)) for tokens in found]


def compare(mine: Sequence[Text], theirs: Sequence[Tensor]) -> dict[str, Any]:
    """The differences of llama.cpp's logits [tokens, vocabulary] of each text from transformers'.

    same_top: the share of tokens with the same most likely next token. The others are differences of logits.
    """
    here, there = torch.cat([text.logits for text in mine]), torch.cat([*theirs])
    apart = (there - here).abs()
    return {
        "tokens": len(here),
        "same_top": round((there.argmax(-1) == here.argmax(-1)).float().mean().item(), 4),
        "mean_apart": round(apart.mean().item(), 5),
        "largest_apart": {
            "of all": round(apart.max().item(), 4),
            "of half the tokens": round(apart.amax(-1).median().item(), 4),
        },
    }


def peer_logits(python: Path, folder: Path, dense: str, mine: Sequence[Text]) -> list[Tensor]:
    """llama.cpp's logits of each text, float32 [tokens, vocabulary], from FOLDER/dense.gguf.

    python: one that has llama-cpp-python. Raises CalledProcessError if the peer's process fails.
    """
    way = {"dense": dense, "attention": "plain", "threads": THREADS}
    with tempfile.TemporaryDirectory() as place:
        file = f"{place}/logits.npy"
        task = json.dumps({"way": way, "prompts": [text.tokens for text in mine], "logits": file})
        subprocess.run([python, PEER, folder], input=f"{task}\n", text=True, check=True, stdout=subprocess.PIPE)
        found = torch.tensor(np.load(file))
    ends = list(itertools.accumulate(len(text.tokens) for text in mine))
    return [found[end - len(text.tokens) : end] for end, text in zip(ends, mine, strict=True)]


def main() -> None:
    """Writes the files named on the command line, and with --check prints a line of JSON for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dense", action="append", choices=DENSE, help="repeatable (default: q4_0)")
    parser.add_argument(
        "--vocabulary", action="store_true", help="include that of tokenizer.json, as a server needs it"
    )
    parser.add_argument("--check", action="store_true", help="compare llama.cpp's logits with transformers'")
    parser.add_argument("--llama-python", type=Path, help="a Python that has llama-cpp-python")
    arguments = parser.parse_args()
    if arguments.check and arguments.llama_python is None:
        parser.error("--check needs --llama-python")
    every: list[str] = arguments.dense or ["q4_0"]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for dense in every:
        convert(arguments.folder, arguments.out / f"{dense}.gguf", dense, words=arguments.vocabulary)
    if not arguments.check:
        return
    mine = texts(arguments.folder)
    for dense in every:
        theirs = peer_logits(arguments.llama_python, arguments.out, dense, mine)
        print(json.dumps({"dense": dense, "texts": len(mine) - 1} | compare(mine[:-1], theirs[:-1])), flush=True)
        print(json.dumps({"dense": dense, "texts": "as one"} | compare(mine[-1:], theirs[-1:])), flush=True)


if __name__ == "__main__":
    program(main)
