"""Presets of a load by name: prompts and concurrency. Explicit flags override them."""

from typing import Any

from redline.bench.serving.datasets import DatasetConfig
from redline.bench.serving.target import LoadPace
from redline.errors import ConfigError
from redline.messages.base import Record


class Preset(Record, frozen=True):
    """One preset. dataset: fields of a `DatasetConfig`. streams: concurrent requests, the default of --max-concurrency.

    prompts_per_stream, warmups_per_stream: requests and warm-ups per stream. about: a description of one line.
    """

    about: str
    dataset: dict[str, Any]
    streams: int
    prompts_per_stream: int
    warmups_per_stream: int


def _inferencex(prompt: int, answer: int) -> Preset:
    return Preset(
        about=f"InferenceX: lengths in [0.8 L, L] of {prompt} in, {answer} out, 10 prompts and 2 warm-ups per stream",
        dataset={
            "dataset_name": "random",
            "random_input_len": prompt,
            "random_output_len": answer,
            "random_range_ratio": 0.2,
            "random_range": "below",
            "ignore_eos": True,
        },
        streams=32,
        prompts_per_stream=10,
        warmups_per_stream=2,
    )


PRESETS: dict[str, Preset] = {
    "lambda": Preset(
        about="Lambda's setting: 8,192 in, 2,048 out, 32 streams",
        dataset={
            "dataset_name": "random",
            "random_input_len": 8192,
            "random_output_len": 2048,
            "ignore_eos": True,
        },
        streams=32,
        prompts_per_stream=5,
        warmups_per_stream=1,
    ),
    "inferencex-8k-1k": _inferencex(8192, 1024),
    "inferencex-1k-1k": _inferencex(1024, 1024),
    "chat": Preset(
        about="a chat turn: 256 in after a shared system prompt of 256, 256 out, lengths vary by half",
        dataset={
            "dataset_name": "random",
            "random_input_len": 256,
            "random_output_len": 256,
            "random_range_ratio": 0.5,
            "random_prefix_len": 256,
        },
        streams=16,
        prompts_per_stream=10,
        warmups_per_stream=1,
    ),
}


def with_preset(name: str | None, dataset: dict[str, Any], pace: dict[str, Any]) -> tuple[DatasetConfig, LoadPace]:
    """The configuration and the pace of the given flags, which override those of a preset, if any.

    dataset, pace: the given fields of `DatasetConfig` and `LoadPace`. A preset's numbers of prompts and warm-ups scale
    with max_concurrency. Raises ConfigError for an unknown name.
    """
    if name is None:
        return DatasetConfig(**dataset), LoadPace(**pace)
    preset = PRESETS.get(name)
    if preset is None:
        raise ConfigError(f"--preset {name}: expected one of {', '.join(PRESETS)}")
    streams = pace.get("max_concurrency") or preset.streams
    whole: dict[str, Any] = {"num_prompts": preset.prompts_per_stream * streams, **preset.dataset, **dataset}
    timed: dict[str, Any] = {"warmups": preset.warmups_per_stream * streams, **pace, "max_concurrency": streams}
    return DatasetConfig(**whole), LoadPace(**timed)
