"""The shared key of a deployment's machines, and the addresses at which they reach one another.

The key is the only authentication between machines: with it one can start workers, read prompts and write answers. So
it is read from a file that other users cannot read, and it is too long to be guessed.
"""

import ipaddress
import re
import socket
import stat
from pathlib import Path

from redline.errors import ConfigError

LEAST_KEY = 32  # characters
MAKE_KEY = "openssl rand -hex 32"


def read_key(path: Path, place: str) -> str:
    """The shared key in a file, stripped of whitespace. Raises ConfigError, naming `place`."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if mode & 0o007:
        raise ConfigError(f"{place}: every user of this machine can use {path}: chmod o= {path}")
    if len(text) < LEAST_KEY:
        raise ConfigError(
            f"{place}: {path} has {len(text)} characters; expected at least {LEAST_KEY} random ones: "
            f"{MAKE_KEY} > {path}"
        )
    return text


def check_listen(text: str, place: str) -> None:
    """Raises ConfigError, naming `place`, unless `text` is ADDRESS:PORT with an address that other machines can use."""
    address, _, port = text.rpartition(":")
    if not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"{place} is {text!r}; expected ADDRESS:PORT, such as 10.0.0.1:7600")
    check_address(address, place)


def check_address(text: str, place: str) -> None:
    """Raises ConfigError, naming `place`, unless `text` is the IPv4 address of one interface."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        raise ConfigError(
            f"{place} is at {text!r}; expected the IPv4 address by which other machines reach this one"
        ) from None
    if address.is_unspecified:
        raise ConfigError(
            f"{place} is at {text}, all addresses of this machine; give the one by which other machines reach it"
        )


def check_join(text: str, place: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT. Raises ConfigError, naming `place`."""
    match = re.fullmatch(r"tcp://([A-Za-z0-9._-]{1,253}):(\d{1,5})", text)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ConfigError(f"{place} is {text!r}; expected tcp://HOST:PORT, the server's cluster.listen")
    return match[1], int(match[2])


def address_towards(host: str, port: int) -> str | None:
    """This machine's own IPv4 address on the route to `host`; None if there is no route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return None
        return probe.getsockname()[0]
