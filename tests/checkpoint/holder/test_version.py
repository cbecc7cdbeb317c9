"""Names of versions, and digests of parts."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from thinwire.checkpoint.holder.version import (
    NONCE_BITS,
    joined_crc,
    next_attempt,
    start_order,
)


@given(st.lists(st.integers(0, (1 << 50) - 1), max_size=5), st.integers(0, (1 << NONCE_BITS) - 1))
def test_a_new_start_is_after_all_that_were_seen(seen: list[int], nonce: int) -> None:
    attempt = next_attempt(seen, nonce)
    assert all(attempt >> NONCE_BITS > other >> NONCE_BITS for other in seen)
    assert attempt % (1 << NONCE_BITS) == nonce
    assert 0 <= attempt <= 1 << 62


def test_two_starts_that_did_not_see_each_other_differ() -> None:
    first, second = next_attempt([], 7), next_attempt([], 8)
    assert first != second
    assert start_order(first, 3) == start_order(second, 3) == (0, 3)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_crc_of_two_texts_in_one_is_made_of_theirs(first: bytes, second: bytes) -> None:
    assert joined_crc(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
