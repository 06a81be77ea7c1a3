"""Reasoning that travels through a client which need not show it, and comes back with the next request.

Two dialects have an opaque string for it: the `signature` of a thinking block and `encrypted_content`. Ours is no
secret, since who gets it may read the reasoning anyway, and no proof: a client may send whatever reasoning it likes.
"""

import base64
import binascii
from hashlib import blake2b

_SEALED = "redline1."


def seal(text: str) -> str:
    """An opaque string that holds the text."""
    return _SEALED + base64.b64encode(text.encode(errors="replace")).decode()


def unseal(sealed: str) -> str:
    """The text that `seal` was given; empty for a string that somebody else made."""
    if not sealed.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(sealed[len(_SEALED) :], validate=True).decode(errors="replace")
    except (binascii.Error, ValueError):
        return ""


def sign(text: str) -> str:
    """An opaque string for a text that travels beside it."""
    return blake2b(text.encode(errors="replace"), digest_size=32).hexdigest()
