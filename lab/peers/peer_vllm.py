"""The peer: vLLM at Kimi K2's sizes with few layers and dummy weights, timed in a separate process.

    PYTHON lab/peers/peer_vllm.py TASK

PYTHON has vLLM (0.33 or newer), and needs nothing of Redline. TASK is JSON: {"layers": 5, "ranks": 1, "rows": [1, 8],
"context": 1024, "prompt": 8192, "drafts": 0, "accepted": 2.88, "eager": false, "config": {...}, "draft": {...}}. It
prints one JSON line for each figure:

    {"vllm": "0.33.0", "gpu": "NVIDIA H200"}
    {"rows": 8, "ms": 3.07}                    a step, or a round if there are drafts
    {"prompt": 8192, "ms": 96.8}               a prompt alone, one token out
    {"rows": 8, "experts": 59.6}               distinct experts of a layer and step, if eager

Dummy weights would send every token to the same eight experts, since the correction bias outweighs the scores: norms
are set to one, the bias to zero, and router, embedding and packed weights to random numbers.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

OUT = 128  # tokens of a timed answer
TRIES = 3
QUIET = {  # no network access, and the kernels that vLLM chooses by default on one host
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


class Spread:
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    def spread(self) -> None:
        """Set weights with which tokens are routed uniformly to all experts."""
        import torch

        with torch.no_grad():
            for place, (name, weight) in enumerate(sorted(self._network().named_parameters())):
                draw = torch.Generator(device=weight.device).manual_seed(place)
                if name.endswith("e_score_correction_bias"):
                    weight.zero_()
                elif "norm" in name and weight.dim() == 1:
                    weight.fill_(1)
                elif name.endswith(".gate.weight"):
                    weight.normal_(0, 0.02, generator=draw)
                elif "embed_tokens" in name:
                    weight.normal_(0, 1, generator=draw)
                elif ".experts." in name and not weight.dtype.is_floating_point and weight.dim() > 1:
                    codes = torch.iinfo(weight.dtype)
                    weight.random_(codes.min, codes.max, generator=draw)

    def watch(self, chosen: int) -> None:
        """Count the distinct experts of each layer's step from now on; the model must run eagerly."""
        self._distinct: list[int] = []

        def look(_module: object, _inputs: object, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            self._distinct.append(logits.topk(chosen).indices.unique().numel())

        for name, module in self._network().named_modules():
            if name.endswith(".mlp.gate"):
                module.register_forward_hook(look)

    def counted(self) -> list[int]:
        """The counts since the last call."""
        counted, self._distinct = self._distinct, []
        return counted

    def _network(self) -> Any:
        return self.model_runner.get_model()  # type: ignore[attr-defined]


def main() -> None:
    """Times the figures of the task."""
    task = json.loads(sys.argv[1])
    here = str(Path(__file__).parent)
    os.environ.update(QUIET, PYTHONPATH=os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))
    sys.path.insert(0, here)
    import torch

    vllm = import_module("vllm")  # not a dependency of Redline

    tell(vllm=vllm.__version__, gpu=torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() as folder:
        run(vllm, task, Path(folder))


def run(vllm: Any, task: dict[str, Any], folder: Path) -> None:
    """Builds the model and prints its figures."""
    most, context, drafts = max(task["rows"]), task["context"], task["drafts"]
    options: dict[str, Any] = {}
    if drafts:
        options["speculative_config"] = {
            "method": "eagle3",
            "model": written(folder / "draft", task["draft"]),
            "num_speculative_tokens": drafts,
            "draft_tensor_parallel_size": task["ranks"],
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": task["accepted"],
        }
    model = vllm.LLM(
        model=written(folder / "model", task["config"]),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        tensor_parallel_size=task["ranks"],
        max_model_len=max(context, task["prompt"]) + OUT + 64,
        max_num_seqs=most,
        max_num_batched_tokens=8192,
        enforce_eager=task["eager"],
        disable_log_stats=False,
        generation_config="vllm",
        worker_extension_cls="peer_vllm.Spread",
        **options,
    )
    model.collective_rpc("spread")
    draw = random.Random(1)
    vocabulary = task["config"]["vocab_size"]
    prompts = [[draw.randrange(16, vocabulary - 1000) for _ in range(context)] for _ in range(most)]

    def answers(prompts: list[list[int]], tokens: int) -> list[Any]:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return model.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)

    answers(prompts, 4)  # fills the prefix cache: a timed step waits for no prompt
    for rows in task["rows"]:
        answers(prompts[:rows], 4)
        if task["eager"]:
            model.collective_rpc("watch", args=(task["config"]["num_experts_per_tok"],))
            answers(prompts[:rows], 20)
            counted = model.collective_rpc("counted")[0]
            tell(rows=rows, experts=statistics.mean(counted[len(counted) // 4 :]))
            return  # hooks stay installed: one number of rows for each process
        times = [each_ms(answers(prompts[:rows], OUT)) for _ in range(TRIES)]
        tell(rows=rows, ms=statistics.median(times) * (task["accepted"] if drafts else 1))
    if task["prompt"] and not drafts:
        spans: list[float] = []
        for _ in range(TRIES + 1):
            fresh = [[draw.randrange(16, vocabulary - 1000) for _ in range(task["prompt"])]]
            began = time.perf_counter()
            answers(fresh, 1)
            spans.append(1e3 * (time.perf_counter() - began))
        tell(prompt=task["prompt"], ms=statistics.median(spans[1:]))


def each_ms(answers: list[Any]) -> float:
    """Milliseconds per token, by the engine's own clock: without the time of the host that reads the answers."""
    spans = [
        1e3 * (one.metrics.last_token_ts - one.metrics.first_token_ts) / (len(one.outputs[0].token_ids) - 1)
        for one in answers
    ]
    return statistics.median(spans)


def written(folder: Path, config: dict[str, Any]) -> str:
    """A folder with a config and no weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def tell(**figure: Any) -> None:
    """Print one JSON line."""
    print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
