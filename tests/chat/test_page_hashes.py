"""Equal page hashes imply equal content."""

import pytest

from redline.chat.page_hashes import make_job, page_hashes
from redline.messages.job import PAGE_TOKENS, JobId, MediaSpan, Sampling

TOKENS = tuple(range(3 * PAGE_TOKENS + 5))
HASHES = page_hashes(TOKENS, "salt", "kimi/bf16")


def test_only_full_pages_have_a_name():
    assert len(HASHES) == 3
    assert page_hashes(TOKENS[: PAGE_TOKENS - 1], "salt", "kimi/bf16") == ()
    assert {len(page) for page in HASHES} == {16}


def test_a_longer_prompt_shares_the_names_of_its_beginning():
    assert page_hashes((*TOKENS, *TOKENS), "salt", "kimi/bf16")[:3] == HASHES


def test_a_changed_token_changes_its_page_and_all_behind_it():
    changed = list(TOKENS)
    changed[PAGE_TOKENS] += 1
    hashes = page_hashes(tuple(changed), "salt", "kimi/bf16")
    assert hashes[0] == HASHES[0]
    assert not set(hashes[1:]) & set(HASHES)


def test_equal_pages_at_different_places_have_different_names():
    hashes = page_hashes((1,) * (3 * PAGE_TOKENS), "", "m")
    assert len(set(hashes)) == 3


@pytest.mark.parametrize(("salt", "fingerprint"), [("other", "kimi/bf16"), ("salt", "kimi/fp8"), ("saltk", "imi/bf16")])
def test_salt_and_fingerprint_separate_every_page(salt: str, fingerprint: str):
    assert not set(page_hashes(TOKENS, salt, fingerprint)) & set(HASHES)


def test_an_image_changes_the_pages_that_it_touches_and_all_behind_them():
    def hashes(*media: MediaSpan) -> tuple[bytes, ...]:
        return page_hashes(TOKENS, "salt", "kimi/bf16", media)

    one = hashes(MediaSpan(start=PAGE_TOKENS + 3, tokens=4, hash=b"cat"))
    assert one[0] == HASHES[0]
    assert not set(one[1:]) & set(HASHES)
    assert hashes(MediaSpan(start=PAGE_TOKENS + 3, tokens=4, hash=b"dog"))[1] != one[1]
    assert hashes(MediaSpan(start=PAGE_TOKENS + 4, tokens=4, hash=b"cat"))[1] != one[1]
    behind = MediaSpan(start=3 * PAGE_TOKENS, tokens=2, hash=b"cat")
    assert hashes(behind) == HASHES  # it is in the last page, which is not full


def test_names_are_the_same_on_every_machine():
    assert page_hashes((7,) * PAGE_TOKENS, "", "")[0].hex() == "a176207d5ebacdb20af8fdb1055a1181"


def test_a_job_carries_its_pages():
    job = make_job(JobId("j"), TOKENS, Sampling(max_tokens=1), "kimi/bf16", salt="salt")
    assert (job.pages, job.salt, job.tokens) == (HASHES, "salt", TOKENS)
