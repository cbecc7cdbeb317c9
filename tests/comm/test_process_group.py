"""What a process group refuses, what is said of errors of torch, and the bytes of torch's own sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.comm import process_group
from thinwire.comm.process_group import (
    Telling,
    check_fits,
    lost_peer,
    reduce_scatter_bytes,
    ring_all_reduce_bytes,
    sparse_all_reduce_bytes,
)
from thinwire.errors import CorruptHeaderError


def test_what_does_not_fit_into_memory_is_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_available_bytes", lambda: 10**9)
    check_fits(10**9, lambda: "here")
    with pytest.raises(CorruptHeaderError, match="2000000000 bytes are announced"):
        check_fits(2 * 10**9, lambda: "here")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 64), st.integers(1, 3))
def test_bytes_of_torchs_sparse_sum_are_those_of_a_ring(held: list[int], row_bytes: int, num_tensors: int) -> None:
    """In each round a rank passes on what came in the one before, and its own rows in the first."""
    n = len(held)
    for rank in range(n):
        rows = sum(held[(rank - number) % n] for number in range(n - 1))
        sizes = num_tensors * (n - 1) * 72
        assert sparse_all_reduce_bytes(held, rank, row_bytes, num_tensors) == sizes + rows * (8 + row_bytes)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_gloo_makes_the_whole_sum_where_each_rank_keeps_a_part(world_size: int) -> None:
    on_host = reduce_scatter_bytes(4000, world_size, torch.device("cpu"))
    assert on_host == ring_all_reduce_bytes(4000, world_size)
    assert reduce_scatter_bytes(4000, world_size, torch.device("cuda")) == on_host // 2


def test_a_lost_peer_is_named_and_torchs_advice_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "peers_at", {"[10.0.0.2]:4711": 3})
    cause = "[/gloo/pair.cc:5] Timed out waiting 9 ms on [10.0.0.2]:4711. This is typically an issue with the weather."
    text = str(lost_peer(RuntimeError(cause), 2, 4))
    assert text.startswith("rank 2: the exchange with the other 3 ranks broke off, because a peer died, gave up or did")
    assert text.endswith("or several attached models ran backward in another order: Timed out waiting 9 ms on rank 3")
    assert "another order" not in str(lost_peer(RuntimeError("Connection reset by peer"), 0, 2))


def test_what_leaves_a_context_is_passed_on_and_may_become_another_error() -> None:
    seen: list[BaseException] = []
    with Telling(seen.append):
        pass
    error = ValueError("a")
    with pytest.raises(ValueError, match="a"), Telling(seen.append):
        raise error
    assert seen == [error]

    def other(error: BaseException) -> None:
        raise OSError("b") from error

    with pytest.raises(OSError, match="b"), Telling(other):
        raise error
