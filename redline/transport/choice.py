"""Which transport a deployment's workers hand prompts over with, by its name in the deployment's file."""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from redline.errors import ConfigError
from redline.transport.base import Transport

TransportName = Literal["auto", "peer", "shared", "nixl"]
WITHIN_A_HOST = "auto", "peer", "shared"  # each has areas of `shared`, if only to fall back on


def check_installed(name: TransportName) -> None:
    """Raises ConfigError where this machine lacks what the transport needs."""
    if name == "nixl" and find_spec("nixl") is None:
        raise ConfigError("`nixl` needs its library: pip install 'redline[nixl]'")


def open_transport(name: TransportName, folder: Path | None) -> Transport:
    """The transport of that name, `shared` or `nixl`: for the others a worker has several (`worker/ways.py`).

    folder: of `shared`'s areas. Raises ConfigError where it cannot be had.
    """
    if name == "nixl":
        from redline.transport.nixl import NixlTransport

        return NixlTransport()
    from redline.transport.shared import SharedTransport

    assert name == "shared", f"`{name}` is no transport of its own here"
    assert folder is not None, "areas of `shared` lie in a folder"
    return SharedTransport(folder)
