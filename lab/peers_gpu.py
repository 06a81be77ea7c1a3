"""vLLM on this GPU at Kimi K2.6's sizes, compared with our newest stored steps: decode, a prompt of 8,192 tokens,
rounds.

    python -m lab.peers_gpu --python PYTHON [--layers 5 9] [--ranks 1] [--rows 1 4 8 32 64 128 256]
        [--rounds 1 8 16] [--save FILE]

PYTHON is an interpreter that has vLLM. It loads the model with the lower and with the higher number of layers (dummy
weights, a router with a uniform distribution), and both are extrapolated to 61 layers by the time per layer. Then it
runs eagerly to count the distinct experts of a step, which shows that both engines read the same bytes, and with an
EAGLE-3 head of the usual shape and synthetic acceptance for rounds. Takes about fifteen minutes.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.program import count, output, program
from redline.bench.record import provenance
from redline.bench.step.depth_record import DepthRecord, read
from redline.disk import save
from redline.errors import ConfigError
from redline.model.k2.shapes import KIMI_K26

PEER = Path(__file__).parent / "peers" / "peer_vllm.py"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
CONTEXT, PROMPT = 1024, 8192
DRAFTS, ACCEPTED = 3, 2.88  # drafts of a round; tokens that it gives, the figure of our own drafters on agents' texts
COUNTED = (8, 64)  # rows of the steps in which distinct experts are counted


def config(layers: int) -> dict[str, Any]:
    """Kimi K2.6's text model with `layers` layers, in the format that vLLM reads."""
    c = KIMI_K26
    group = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "dtype": "bfloat16",
        "hidden_size": c.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_attention_heads,
        "q_lora_rank": c.q_lora_rank,
        "kv_lora_rank": c.kv_lora_rank,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "v_head_dim": c.v_head_dim,
        "intermediate_size": c.intermediate_size,
        "moe_intermediate_size": c.moe_intermediate_size,
        "n_routed_experts": c.n_routed_experts,
        "num_experts_per_tok": c.num_experts_per_tok,
        "n_shared_experts": c.n_shared_experts,
        "first_k_dense_replace": c.first_k_dense_replace,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": c.routed_scaling_factor,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": 262144,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": c.vocab_size - 254,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"],
            "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": group}},
        },
    }


def draft() -> dict[str, Any]:
    """An EAGLE-3 head of the usual shape, a Llama layer."""
    c = KIMI_K26
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": c.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "head_dim": 128,
        "intermediate_size": c.intermediate_size,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.vocab_size,
        "max_position_embeddings": 262144,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def asked(python: str, **task: Any) -> list[dict[str, Any]]:
    """The output of the peer's process. Raises ConfigError, with the end of its output, if it fails."""
    task = {"prompt": 0, "drafts": 0, "accepted": 1.0, "eager": False, "context": CONTEXT, "draft": draft()} | task
    task["config"] = config(task["layers"])
    try:
        done = subprocess.run([python, PEER, json.dumps(task)], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"--python is {python}, which cannot be run: {error.strerror}") from None
    if done.returncode:
        said = " ".join(done.stderr.split())[-600:]
        raise ConfigError(f"--python {python}: the peer's process ended with code {done.returncode}: {said}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def carried(few: float, many: float, layers: Sequence[int]) -> float:
    """Milliseconds at 61 layers, extrapolated from the time per layer between these two depths."""
    fewer, more = layers
    return few + (KIMI_K26.num_hidden_layers - fewer) * (many - few) / (more - fewer)


def figures(given: argparse.Namespace) -> dict[str, Any]:
    """All measured figures."""
    how = {"python": given.python, "ranks": given.ranks}
    shallow, deep = (asked(**how, layers=layers, rows=given.rows, prompt=PROMPT) for layers in given.layers)
    first = shallow[0]

    def of(told: list[dict[str, Any]], key: str, value: int) -> float:
        return next(one["ms"] for one in told if one.get(key) == value and "ms" in one)

    def whole(few: list[dict[str, Any]], many: list[dict[str, Any]], rows: int) -> dict[str, Any]:
        return {"rows": rows, "ms": carried(of(few, "rows", rows), of(many, "rows", rows), given.layers)}

    decode = [whole(shallow, deep, rows) for rows in given.rows]
    prompts = [of(told, "prompt", PROMPT) for told in (shallow, deep)]
    experts = [
        one
        for rows in COUNTED
        for one in asked(**how, layers=given.layers[0], rows=[rows], eager=True)
        if "experts" in one
    ]
    rounds: list[dict[str, Any]] = []
    if given.rounds:
        few, many = (
            asked(**how, layers=layers, rows=given.rounds, drafts=DRAFTS, accepted=ACCEPTED) for layers in given.layers
        )
        rounds = [whole(few, many, rows) for rows in given.rounds]
    return {
        **provenance(),
        **first,
        "ranks": given.ranks,
        "layers": given.layers,
        "context": CONTEXT,
        "decode": decode,
        "prompt_layer_ms": (prompts[1] - prompts[0]) / (given.layers[1] - given.layers[0]),
        "experts": experts,
        "rounds": rounds,
    }


def ours(gpu: str, ranks: int) -> dict[int, DepthRecord]:
    """Our newest stored step by its number of tokens, on cards of this kind."""
    found: dict[int, DepthRecord] = {}
    for file in sorted(RESULTS.glob("decode-*.json")):
        for one in read(file, DepthRecord):
            same = one.gpu == gpu and one.ranks == ranks and one.layers == KIMI_K26.num_hidden_layers
            if same and one.context == CONTEXT and one.kv_dtype == "bf16" and one.tokens_per_row == 1:
                found[one.tokens] = one
    return found


def table(found: dict[str, Any]) -> Iterator[str]:
    """The lines that are printed."""
    stored = ours(found["gpu"], found["ranks"])
    yield f"vLLM {found['vllm']} on {found['ranks']} x {found['gpu']}, carried from {found['layers']} layers to 61"
    yield f"{'rows':>6} {'vLLM, ms':>10} {'Redline, ms':>12} {'floor, ms':>10} {'vLLM over ours':>15}"
    for one in found["decode"]:
        line = f"{one['rows']:>6} {one['ms']:>10.2f}"
        if (mine := stored.get(one["rows"])) is not None:
            line += f" {mine.ms:>12.2f} {mine.floor_ms:>10.2f} {one['ms'] / mine.ms:>15.2f}   commit {mine.commit}"
        yield line
    yield f"a prompt of {PROMPT:,} tokens: {found['prompt_layer_ms']:.2f} ms a layer"
    for one in found["experts"]:
        yield f"{one['experts']:.1f} distinct experts of a layer at {one['rows']} rows"
    for one in found["rounds"]:
        tokens_per_s = 1e3 * ACCEPTED * one["rows"] / one["ms"]
        yield f"a round of {DRAFTS} drafts at {one['rows']} rows: {one['ms']:.2f} ms, {tokens_per_s:,.0f} tokens/s"


def main(words: Sequence[str] | None = None) -> None:
    """Runs the program. Raises ConfigError if the peer cannot be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter that has vLLM")
    parser.add_argument("--layers", type=count, nargs=2, default=[5, 9], help="the two depths (default: 5 9)")
    parser.add_argument("--ranks", type=count, default=1, help="GPUs, by tensor parallelism (default: 1)")
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 4, 8, 32, 64, 128, 256], help="of each step")
    parser.add_argument("--rounds", type=count, nargs="*", default=[1, 8, 16], help="rows of rounds; none: no rounds")
    parser.add_argument("--save", type=output, help="a file for the figures, JSON")
    given = parser.parse_args(words)
    if given.layers[0] >= given.layers[1]:
        raise ConfigError(f"--layers is {given.layers}; the second has to be more than the first")
    found = figures(given)
    print("\n".join(table(found)))
    if given.save is not None:
        save(given.save, json.dumps(found, indent=1).encode() + b"\n")


if __name__ == "__main__":
    program(main)
