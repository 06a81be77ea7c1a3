"""Access control by API key, or without keys by the origin of a request.

Without keys, everyone who reaches the port is served, except foreign web pages.

A browser lets every page that it shows send requests to this machine. The page cannot read the responses, but its
requests are computed; and with DNS rebinding, where the page's own name resolves to this machine, it can read them too.
Three headers that pages cannot forge detect this: Content-Type (before a page may send JSON to another origin, the
browser sends an OPTIONS request, which we reject), Origin, and, if only this machine can reach us, Host. A request with
a key was sent by the key's owner.
"""

import hmac
from collections.abc import Collection, Sequence
from hashlib import sha256
from ipaddress import ip_address

from redline.api.errors import Refusal

OPEN_PATHS = {"/health", "/live", "/ping"}  # paths without a key, other than the page
WAY_OUT = "; with a keys_file such requests are served"

Headers = Sequence[tuple[bytes, bytes]]


def check_key(headers: Headers, keys: Collection[bytes]) -> bytes:
    """The SHA-256 of the request's key. Raises Refusal (401) if it is not one of `keys`, which are digests too."""
    scheme, _, key = header(headers, b"authorization").strip().partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        key = header(headers, b"x-api-key")  # Anthropic's
    if not key.strip():
        raise Refusal(401, "no API key was given: send the header Authorization: Bearer KEY", "invalid_api_key")
    digest = sha256(key.strip()).digest()
    # Every key is compared, in constant time each.
    matches = [known for known in keys if hmac.compare_digest(digest, known)]
    if not matches:
        raise Refusal(401, "Incorrect API key provided", "invalid_api_key")
    return digest


def check_single(headers: Headers) -> None:
    """Raises Refusal (400) for more than one Authorization header: a proxy might use the other one."""
    if sum(name == b"authorization" for name, _ in headers) > 1:
        raise Refusal(400, "there is more than one header Authorization", "invalid_authorization")


def check_page(method: str, headers: Headers, local: bool, origins: frozenset[bytes] = frozenset()) -> None:
    """Raises Refusal (400, 403, 415) for a request that a foreign web page may have sent.

    local: only this machine can reach the server. origins: of pages that are allowed.
    """
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise Refusal(400, "there is more than one Host header", "invalid_host")
    host = hosts[0] if hosts else b""
    if local and host and not _is_here(host):
        raise Refusal(
            403,
            f"the header Host is {_shown(host)}; a server without keys on a loopback address must be addressed "
            f"by IP address or as localhost{WAY_OUT}",
            "foreign_host",
        )
    for name, origin in headers:
        if name == b"origin" and origin not in origins and not _is_own(origin, host, local):
            raise Refusal(
                403, f"the header Origin is {_shown(origin)}, which is a foreign web page{WAY_OUT}", "foreign_origin"
            )
    if method == "POST":
        kind = header(headers, b"content-type").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise Refusal(415, "the body must be JSON: send the header Content-Type: application/json", "not_json")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on this host."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def header(headers: Headers, name: bytes) -> bytes:
    """The first value of a header; empty if it is missing. name: in lower case, as in ASGI."""
    return next((value for key, value in headers if key == name), b"")


def _is_here(host: bytes) -> bool:
    """Whether it is localhost or an IP address, so not a name that others can make resolve to this machine."""
    name = _name(host)
    try:
        return name == "localhost" or bool(ip_address(name))
    except ValueError:
        return False


def _is_own(origin: bytes, host: bytes, local: bool) -> bool:
    """Whether the origin is the requested host, or, if only this machine can reach us, any page of this machine."""
    scheme, _, place = origin.lower().partition(b"://")
    if scheme not in (b"http", b"https"):
        return False
    return place == host.lower() or (local and is_loopback(_name(place)))


def _name(host: bytes) -> str:
    """Host without its port and without the brackets of an IPv6 address."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] or text if text.count(":") == 1 else text


def _shown(value: bytes) -> str:
    return ascii(value[:100].decode("latin-1"))
