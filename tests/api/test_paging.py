"""A page of a list, as selected by a query."""

import pytest

from redline.api.paging import page_limit
from redline.errors import RequestError


@pytest.mark.parametrize("limit", ["0", "-1", "1" + "0" * 5000, "0" * 5000 + "1", "000001000000", "x", "٣"])
def test_a_limit_of_a_page_is_a_small_number(limit: str) -> None:
    assert page_limit("00020", 100, 7) == 20
    assert page_limit(None, 100, 7) == 7
    with pytest.raises(RequestError, match="expected a number from 1 to 100"):
        page_limit(limit, 100, 7)
