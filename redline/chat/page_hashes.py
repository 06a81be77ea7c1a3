"""Hashes of prompt pages, the keys of the prefix cache: equal hashes mean equal latents, so a page may be shared.

A hash chains over everything that a page's content depends on: the pages before it, its tokens, the images in it, the
tenant's salt, and a fingerprint of the model and its cache's number format.
"""

import struct
from array import array
from hashlib import blake2b

from redline.messages.job import PAGE_TOKENS, Job, JobId, MediaSpan, PageHash, Sampling

_BYTES = 16  # per hash: a collision is unlikely among fewer than 2^64 pages
_PAGE_BYTES = 4 * PAGE_TOKENS


def page_hashes(
    tokens: tuple[int, ...], salt: str, fingerprint: str, media: tuple[MediaSpan, ...] = ()
) -> tuple[PageHash, ...]:
    """One hash of 16 bytes for each full page of `tokens`; hash i covers tokens [0, (i + 1) * PAGE_TOKENS).

    salt: the tenant's. fingerprint: of the model and its pages' number format (Ready.fingerprint).
    """
    data = array("I", tokens).tobytes()  # four bytes each, little-endian; twice as fast as struct for many tokens
    previous = blake2b(_framed(salt.encode()) + _framed(fingerprint.encode()), digest_size=_BYTES).digest()
    hashes: list[PageHash] = []
    for start in range(0, len(data) - _PAGE_BYTES + 1, _PAGE_BYTES):
        chain = blake2b(previous + data[start : start + _PAGE_BYTES], digest_size=_BYTES)
        if media:
            _add_media(chain, media, start // 4)
        previous = chain.digest()
        hashes.append(PageHash(previous))
    return tuple(hashes)


def _add_media(chain: blake2b, media: tuple[MediaSpan, ...], start: int) -> None:
    """Add the images that overlap the page with first token `start`."""
    for span in media:
        begin = span.start - start
        if begin < PAGE_TOKENS and begin + span.tokens > 0:
            chain.update(struct.pack("<qq", begin, span.tokens) + _framed(span.hash))


def make_job(
    job: JobId,
    tokens: tuple[int, ...],
    sampling: Sampling,
    fingerprint: str,
    salt: str = "",
    media: tuple[MediaSpan, ...] = (),
) -> Job:
    """A job with its page hashes; arguments as for `page_hashes`."""
    pages = page_hashes(tokens, salt, fingerprint, media)
    return Job(id=job, tokens=tokens, pages=pages, sampling=sampling, salt=salt, media=media)


def _framed(data: bytes) -> bytes:
    """Data with its length as prefix, so that two adjacent fields stay distinguishable."""
    return struct.pack("<q", len(data)) + data


def page_hash(previous: PageHash | None, tokens: tuple[int, ...], fingerprint: str) -> PageHash:
    """The next hash of a chain, for a page that was filled with generated tokens.

    previous: the hash of the page before; None for the first page, without a salt. tokens: the PAGE_TOKENS of the page.
    """
    if previous is None:
        return page_hashes(tokens, "", fingerprint)[0]
    return PageHash(blake2b(previous + struct.pack(f"<{len(tokens)}I", *tokens), digest_size=_BYTES).digest())
