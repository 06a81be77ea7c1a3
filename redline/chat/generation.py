"""The default sampling parameters of a checkpoint: its generation_config.json."""

from pathlib import Path
from typing import Any

import msgspec

from redline.errors import ConfigError
from redline.messages.job import OPTIONS, Sampling

_READ = {option.name: option for option in OPTIONS.values() if option.file}
_File = msgspec.defstruct(
    "GenerationConfig", [(name, option.annotation, option.neutral) for name, option in _READ.items()]
)


def generation_config_of(folder: Path) -> Sampling:
    """The sampling parameters of a checkpoint folder; keys missing or null in its generation_config.json get defaults.
    max_tokens is 1: no file sets it.

    `do_sample: false` means greedy, whatever the temperature, as in transformers. Raises ConfigError if the file is not
    JSON or a value is out of bounds.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return Sampling(max_tokens=1)
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        known = {key: values[key] for key in _READ if values.get(key) is not None}
        if values.get("do_sample") is False:
            known["temperature"] = 0.0
        read: dict[str, Any] = msgspec.structs.asdict(msgspec.convert(known, _File))
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return Sampling(max_tokens=1, **{key: _READ[key].meaning(value) for key, value in read.items()})
