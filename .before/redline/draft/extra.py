"""The parts that `pip install 'redline[draft]'` brings: training and pictures."""

import shlex
import sys
from importlib.util import find_spec

from redline.errors import ConfigError

PARTS = ("accelerate", "matplotlib")


def install() -> str:
    """The command that installs them where this program runs."""
    return f"{shlex.quote(sys.executable)} -m pip install 'redline[draft]'"


def needs(*parts: str) -> None:
    """ConfigError where one is not installed."""
    missing = [part for part in parts if find_spec(part) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} not installed: {install()}")
