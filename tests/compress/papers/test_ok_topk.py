"""Ok-Topk's arithmetic of regions: even, complete, and nothing taken from the wire unseen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import compress
from thinwire.compress.memory import MomentumCorrection
from thinwire.compress.papers.ok_topk import (
    OkTopk,
    Tally,
    boundaries,
    mean_bounds,
    ok_topk,
    parse_boundaries,
    parse_tallies,
    saved_by_balance,
    shares,
)
from thinwire.errors import CorruptMessageError


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_shares_are_even_and_complete(counts: list[int]) -> None:
    spans = [shares(counts, owner) for owner in range(len(counts))]
    for owner, of_owner in enumerate(spans):
        assert [place for start, stop in of_owner for place in range(start, stop)] == list(range(counts[owner]))
    sizes = [sum(of_owner[rank][1] - of_owner[rank][0] for of_owner in spans) for rank in range(len(counts))]
    assert max(sizes) - min(sizes) <= 1
    moved = max(
        sum(stop - start for rank, (start, stop) in enumerate(spans[owner]) if rank != owner)
        for owner in range(len(counts))
    )
    direct, balanced = (len(counts) - 1) * max(counts), moved + (len(counts) - 1) * max(sizes)
    assert saved_by_balance(counts) == (direct - balanced if direct >= 2 * balanced else 0)


@given(st.sets(st.integers(0, 199), max_size=60), st.integers(1, 9))
def test_boundaries_split_evenly(chosen: set[int], world_size: int) -> None:
    ids = torch.tensor(sorted(chosen), dtype=torch.int64)
    (bounds,) = mean_bounds([[boundaries(ids, 200, world_size)]], [200])
    assert bounds.numel() == world_size + 1
    counts = torch.searchsorted(ids, bounds).diff()
    assert int(counts.sum()) == len(chosen)
    assert int(counts.max()) - int(counts.min()) <= 1


def test_what_cannot_have_been_sent_is_refused() -> None:
    tallies = [Tally(4, (4, 3, 3, 2, 2, 1, 0, 0), 0.5), Tally(0, (0,) * 8, 0.0)]
    good = torch.cat([tally.packed() for tally in tallies])
    assert parse_tallies(good, [4, 0]) == tallies
    for passing in ((5, *8 * (0,))[:8], (1, 2, 0, 0, 0, 0, 0, 0), (-1,) * 8):
        with pytest.raises(CorruptMessageError):
            parse_tallies(Tally(4, passing, 0.5).packed(), [4])
    for bad, sizes in ((good, [3, 0]), (good[:-8], [4, 0]), (-good, [4, 0])):
        with pytest.raises(CorruptMessageError):
            parse_tallies(bad, sizes)
    for inner, size in (([1, 5, 4], 9), ([1, 2, 10], 9), ([-1, 2, 3], 9), ([1, 2], 9)):
        with pytest.raises(CorruptMessageError):
            parse_boundaries(torch.tensor(inner).view(torch.uint8), [size], world_size=4)


@pytest.mark.parametrize(("arguments", "says"), [({"density": 0.0}, "density"), ({"reselect_every": 0}, "at least 1")])
def test_bad_settings(arguments: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ok_topk(**arguments)  # type: ignore[arg-type]


def test_values_are_not_coded_and_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match="leave values out"):
        OkTopk(density=0.1, values=compress.bf16())
    with pytest.raises(ValueError, match="memory of its own"):
        MomentumCorrection(ok_topk(0.1))
