"""What the machines of one deployment share: a secret, and addresses at which they can reach one another.

The secret is the whole of their trust: whoever has it may have workers started, read prompts and write answers, so it
is read from a file that others cannot read, and is long enough that nobody finds it by trying.
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
    """The shared key in a file, without the blanks around it. Raises ConfigError, naming `place`."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if mode & 0o007:
        raise ConfigError(f"{place}: every user of this machine can use {path}: chmod o= {path}")
    if len(text) < LEAST_KEY:
        raise ConfigError(
            f"{place}: {path} has {len(text)} characters; expected {LEAST_KEY} at least, that nobody can guess: "
            f"{MAKE_KEY} > {path}"
        )
    return text


def check_listen(text: str, place: str) -> None:
    """Raises ConfigError, naming `place`, for what is not ADDRESS:PORT with an address that others can be told."""
    address, _, port = text.rpartition(":")
    if not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"{place} is {text!r}; expected ADDRESS:PORT, such as 10.0.0.1:7600")
    check_address(address, place)


def check_address(text: str, place: str) -> None:
    """Raises ConfigError, naming `place`, for what is not the IPv4 address of one interface."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        raise ConfigError(
            f"{place} is at {text!r}; expected the IPv4 address of this machine by which the others reach it"
        ) from None
    if address.is_unspecified:
        raise ConfigError(
            f"{place} is at {text}, every network of this machine; name the one address by which the others reach it"
        )


def check_join(text: str, place: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT. Raises ConfigError, naming `place`."""
    match = re.fullmatch(r"tcp://([A-Za-z0-9._-]{1,253}):(\d{1,5})", text)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ConfigError(f"{place} is {text!r}; expected tcp://HOST:PORT, the server's cluster.listen")
    return match[1], int(match[2])


def address_towards(host: str, port: int) -> str | None:
    """This machine's own IPv4 address on the way to another; None where no way is known. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return None
        return probe.getsockname()[0]
