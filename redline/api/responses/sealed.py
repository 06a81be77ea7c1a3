"""Reasoning as an opaque string that a client returns with its next request, without having to display it.

Two APIs have a field for it: the `signature` of a thinking block and `encrypted_content`. Ours is not encrypted, since
its receiver may read the reasoning anyway, and not authenticated: a client may send any reasoning it likes.
"""

import base64
import binascii
from hashlib import blake2b

_SEALED = "redline1."


def seal(text: str) -> str:
    """Encode the text as an opaque string."""
    return _SEALED + base64.b64encode(text.encode(errors="replace")).decode()


def unseal(sealed: str) -> str:
    """The text given to `seal`; empty for a string that another server produced."""
    if not sealed.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(sealed[len(_SEALED) :], validate=True).decode(errors="replace")
    except (binascii.Error, ValueError):
        return ""


def sign(text: str) -> str:
    """An opaque string for a text that is sent along with it."""
    return blake2b(text.encode(errors="replace"), digest_size=32).hexdigest()
