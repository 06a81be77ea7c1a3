"""The default sampling parameters of a checkpoint: its generation_config.json."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from redline.errors import ConfigError
from redline.messages.base import Record

# Ranges of sampling parameters, for requests and checkpoints alike.
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(ge=0, le=1)]  # 0: greedy
TopK = Annotated[int, Meta(ge=-1, le=1 << 20)]
MinP = Annotated[float, Meta(ge=0, le=1)]


class GenerationConfig(Record, frozen=True):
    """Sampling parameters that apply if the request sets none."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0


def generation_config_of(folder: Path) -> GenerationConfig:
    """The sampling parameters of a checkpoint folder; keys missing or null in its generation_config.json get defaults.

    `do_sample: false` means greedy, whatever the temperature, as in transformers. Raises ConfigError if the file is not
    JSON or a value is out of bounds.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationConfig()
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        known = {key: values[key] for key in GenerationConfig.__struct_fields__ if values.get(key) is not None}
        if values.get("do_sample") is False:
            known["temperature"] = 0.0
        return msgspec.convert(known, GenerationConfig)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
