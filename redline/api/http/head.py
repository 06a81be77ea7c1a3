"""Checks request heads for malformations that RFC 9110 and 9112 require a server to reject, and that httptools accepts.

If two parsers of one connection disagree about a request, an attacker can exploit that (request smuggling), so
malformed requests are rejected rather than interpreted.
"""

import re
from collections.abc import Sequence

from redline.api.errors import Refusal

_HOST = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")  # uri-host [ ":" port ]
_ABSOLUTE = re.compile(rb"(https?)://([^/?#]*)([^#]*)", re.IGNORECASE)
_PORTS = {b"http": b":80", b"https": b":443"}  # default ports, which may be omitted


def is_without_version(data: bytes) -> bool:
    """Whether the beginning of a request is a complete line without an HTTP version.

    An HTTP/0.9 request is one such line; an HTTP/1.1 parser would wait for headers.
    """
    line, ended, _ = data.lstrip(b"\r\n").partition(b"\n")
    return bool(ended) and b" HTTP/" not in line


def check_head(version: str, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The path and query of a request. headers: names in lower case; a Host is added if only the target has it.

    Raises Refusal: 505 for a version other than 1.1 or 1.0; 400 for a Host that is missing (HTTP/1.1), repeated or
    malformed, for a target that is not a path, is a URI of another host, or is `*` without OPTIONS, and for a body
    of ambiguous length; 501 for a transfer coding other than chunked.
    """
    if version not in ("1.1", "1.0"):
        raise Refusal(505, f"HTTP/{version} is not supported; use HTTP/1.1", "http_version")
    hosts = _of(headers, b"host")
    if len(hosts) > 1 or (hosts and not _HOST.fullmatch(hosts[0])):
        raise Refusal(400, "send one Host header, with a name or address and optionally a port", "invalid_host")
    if not hosts and version == "1.1":
        raise Refusal(400, "the Host header is missing; HTTP/1.1 requires it", "invalid_host")
    codings = [part.strip().lower() for value in _of(headers, b"transfer-encoding") for part in value.split(b",")]
    if any(coding != b"chunked" for coding in codings):
        raise Refusal(501, "the only supported transfer coding is chunked", "transfer_coding")
    if len(codings) > 1 or (codings and version == "1.0"):
        raise Refusal(400, "the transfer coding chunked may be applied once, in HTTP/1.1 only", "transfer_coding")
    if target[:1] == b"/" or (target == b"*" and method == b"OPTIONS"):
        return target
    return _path_of(target, headers, hosts)


def _path_of(target: bytes, headers: list[tuple[bytes, bytes]], hosts: list[bytes]) -> bytes:
    """The path and query of an absolute URI, which must have the Host header's host. Raises Refusal."""
    found = _ABSOLUTE.fullmatch(target)
    if found is None or not found[2] or not _HOST.fullmatch(found[2]):
        raise Refusal(400, "the request target is neither a path nor an http URI", "invalid_target")
    scheme, authority, rest = found[1].lower(), found[2], found[3]
    if not hosts:
        headers.append((b"host", authority))
    elif _normal(hosts[0], scheme) != _normal(authority, scheme):
        raise Refusal(400, "the host of the request target differs from the Host header", "invalid_host")
    return rest if rest[:1] == b"/" else b"/" + rest


def _normal(host: bytes, scheme: bytes) -> bytes:
    return host.lower().removesuffix(b":").removesuffix(_PORTS[scheme])


def _of(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value.strip() for key, value in headers if key == name]
