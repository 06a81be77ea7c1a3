"""The transport that a deployment's workers use for KV transfers, by its name in the deployment's file."""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from redline.errors import ConfigError
from redline.transport.base import Transport

TransportName = Literal["auto", "peer", "shared", "nixl"]
WITHIN_A_HOST = "auto", "peer", "shared"  # each opens areas of `shared`, at least as a fallback


def check_installed(name: TransportName) -> None:
    """Raises ConfigError if this machine lacks a library that the transport needs."""
    if name == "nixl" and find_spec("nixl") is None:
        raise ConfigError("`nixl` needs its library: pip install 'redline[nixl]'")


def open_transport(name: TransportName, folder: Path | None) -> Transport:
    """The transport of that name, `shared` or `nixl`; for the other names a worker opens several (`transfer_paths.py`).

    folder: the folder of `shared`'s areas. Raises ConfigError if the transport cannot be opened.
    """
    if name == "nixl":
        from redline.transport.nixl import NixlTransport

        return NixlTransport()
    from redline.transport.shared import SharedTransport

    assert name == "shared", f"`{name}` is not a single transport that can be opened here"
    assert folder is not None, "areas of `shared` need a folder"
    return SharedTransport(folder)
