"""Worker models that can be simulated by name: Kimi K2.6 on eight H200s.

No complete worker of this kind has been measured. A test (`tests/simulate/test_models.py`) recomputes each number from
the sources in the comments. Other workers are read from a file: `WorkerModel` as JSON.
"""

from pathlib import Path

import msgspec

from redline.errors import ConfigError
from redline.policy.expected import WorkerModel
from redline.policy.steps import StepModel

# Decode: fitted to the predictions of `redline doctor --on "8 x H200"` for 1 to 32 rows of 1,024 to 32,768 tokens,
# which are based on steps measured on one and on two H200s. More than 32 rows are extrapolated.
# Prefill: one layer with 2,048 and with 8,192 tokens, measured on one H200 (benchmarks/results/prefill-h200.json),
# times 61, divided by 8: the slope of matrix products, rows and experts, and attention by pairs. All-reduces per token:
# 122 of 14,336 bytes, 1.75 times over a link of 397 GB/s, assumed not to be overlapped with compute.
# Pages: 836,160 tokens in bf16, by the same arithmetic, with jobs of up to 60,000 tokens. KV transfer: 70,272 bytes a
# token at 100 GB/s (assumed: two 400 Gbit/s cards), plus 5 ms (assumed).
KIMI_8_H200 = WorkerModel(
    name="kimi-8xh200",
    steps=StepModel(
        base=2.307,
        experts=18.84,
        row=0.2190,
        context=3.024e-5,
        prompt=0.0208,
        pair=1.02e-6,
        experts_of=384,
        experts_chosen=8,
    ),
    step_tokens=8192,
    slots=64,
    kv_tokens=836_160,
    gpus=8,
    handoff_ms=5.0,
    handoff_token_ms=7.03e-4,
)
MODELS = {model.name: model for model in (KIMI_8_H200,)}


def worker_model(asked: str) -> WorkerModel:
    """The worker model with that name, or read from a JSON file with the fields of `WorkerModel`. Raises ConfigError,
    listing the known names."""
    if asked in MODELS:
        return MODELS[asked]
    path = Path(asked)
    try:
        model = msgspec.json.decode(path.read_bytes(), type=WorkerModel)
    except OSError:
        raise ConfigError(f"--worker {asked}: no such file, and not a known worker: {', '.join(MODELS)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--worker {asked}: not a worker model: {error}") from None
    for name in ("step_tokens", "slots", "kv_tokens"):
        if getattr(model, name) < 1:
            raise ConfigError(f"--worker {asked}: `{name}` is {getattr(model, name)}; give 1 or more")
    if model.tokens_per_step < 1 or model.gpus < 0:
        raise ConfigError(f"--worker {asked}: `tokens_per_step` is at least 1, `gpus` at least 0")
    if model.step_ms is not None and not model.step_ms > 0:
        raise ConfigError(f"--worker {asked}: `step_ms` is {model.step_ms:g}; give more than 0, or leave it out")
    costs = [getattr(model.steps, name) for name in StepModel.__struct_fields__]
    if min(costs) < 0 or model.steps.base <= 0:
        raise ConfigError(f"--worker {asked}: fields of `steps` must be at least 0, and `base` more than 0")
    return model
