"""The optional dependencies of `pip install 'redline[draft]'`: training and plots."""

import shlex
import sys
from importlib.util import find_spec

from redline.errors import ConfigError

PARTS = ("accelerate", "matplotlib")


def install() -> str:
    """The shell command that installs these packages for the Python that runs this program."""
    return f"{shlex.quote(sys.executable)} -m pip install 'redline[draft]'"


def needs(*parts: str) -> None:
    """Raises ConfigError, with the install command, if one of these packages is not installed."""
    missing = [part for part in parts if find_spec(part) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} not installed: {install()}")
