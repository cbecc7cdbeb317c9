"""Every point of the design space obeys the laws of `test_conformance`; failures of the points that go in stages."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loopback import Outcome, run_ranks, synchronized
from tests.sums.test_conformance import SCHEMES, Case, bits, check_laws, make_case, run
from thinwire import schemes
from thinwire.comm.channel import Draft
from thinwire.errors import ThinwireError
from thinwire.lab.bench.design_space import label, points
from thinwire.lab.ledger import sent_bytes
from thinwire.rows.sparse import SparseRows
from thinwire.schemes import Ownership, Unit
from thinwire.sums import direct

POINTS = {label(scheme): scheme for scheme in points()}
IN_STAGES = {
    name: scheme
    for name, scheme in POINTS.items()
    if scheme.is_parallel and scheme.unit is Unit.ROWS and "hierarchy" in (scheme.communication, scheme.pull_by)
}


def uneven_case(world_size: int, dtype: torch.dtype = torch.float32, width: int = 2) -> Case:
    """Rank r holds every (r + 2)-th of 60 rows, so that the sum of few parts is full."""
    return make_case([torch.arange(rank, 60, rank + 2) for rank in range(world_size)], 60, width, dtype)


@pytest.mark.few(40)
@pytest.mark.parametrize("name", POINTS)
def test_every_point_of_the_design_space_runs(name: str) -> None:
    check_laws(uneven_case(3), POINTS[name], 1 / 3)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 6, 7])
@pytest.mark.parametrize("name", IN_STAGES)
def test_hierarchies_of_parts_run_on_any_number_of_ranks(name: str, world_size: int) -> None:
    check_laws(uneven_case(world_size, torch.float64), IN_STAGES[name])


CAN_SWITCH = [name for name, p in POINTS.items() if not p.is_dense and not p.knows_ids]


@pytest.mark.slow
@pytest.mark.parametrize("name", CAN_SWITCH)
def test_every_point_can_switch_to_dense(name: str) -> None:
    """One 16-bit value a row: COO is more than dense from two thirds on. Every 31st row is on no rank, and appears."""
    scheme = replace(POINTS[name], push_format="coo", pull_format="coo", dense_switch=True)
    rows = torch.arange(240)
    for world_size in (3, 4):
        ids = [rows[(rows % 31 != 5) & (rows % (rank + 6) != 1)] for rank in range(world_size)]
        case = make_case(ids, 240, 1, torch.bfloat16)
        total = check_laws(case, scheme)
        if scheme.unit is Unit.BLOCKS:  # all rows are in one block, of which those come back that are not zero
            assert torch.equal(total.ids, case.union)
        else:
            assert total.ids.tolist() == rows.tolist()


@pytest.mark.few(8)
@pytest.mark.parametrize("ownership", [each for each in Ownership if each not in (Ownership.COLUMNS, Ownership.UNION)])
@pytest.mark.parametrize("servers", [1, 2, 3, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_any_number_of_servers(ownership: Ownership, servers: int, world_size: int) -> None:
    base = next(point for point in points() if point.ownership is ownership)
    scheme = replace(base, servers=servers)
    if servers > world_size:
        case = uneven_case(world_size)
        for outcome in run(case, scheme):
            with pytest.raises(ValueError, match=f"{servers} servers on {world_size} ranks.*from 1 to {world_size}"):
                outcome.get()
        with pytest.raises(ValueError, match=f"{servers} servers on {world_size} ranks"):
            sent_bytes(scheme, case.ids, 60, 2, torch.float32)
        return
    total = check_laws(uneven_case(world_size), scheme)
    other = run(uneven_case(world_size), replace(scheme, servers=None))[0].get()
    assert torch.equal(total.ids, other.ids)
    assert torch.equal(bits(total.values), bits(other.values)), "who sums changes no bit: all add in rank order"


def test_servers_get_the_rows_and_others_only_headers() -> None:
    """Of two servers among four ranks; the pull is a header only from those that own nothing."""
    scheme = replace(schemes.SPARSE_PS, servers=2)
    traffic = [outcome.traffic for outcome in run(uneven_case(4, width=64), scheme)]
    assert min(t.received_bytes for t in traffic[:2]) > max(t.received_bytes for t in traffic[2:])
    assert min(t.sent_bytes for t in traffic[:2]) > max(t.sent_bytes for t in traffic[2:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["halving_zen", "dense_halving_doubling", "sparcml_split", "sparcml_dense"])
@pytest.mark.parametrize("world_size", [3, 4, 7])
def test_a_bit_that_changes_in_any_message_is_never_summed_silently(name: str, world_size: int) -> None:
    """Each message in turn arrives damaged: whoever returns a sum has the right one, and somebody complains."""
    case = uneven_case(world_size)
    expected = run(case, SCHEMES[name])[0].get()
    swaps: set[tuple[int, int, int]] = set()

    def damaging(where: tuple[int, int, int] | None) -> list[Outcome[SparseRows]]:
        def tamper(rank_from: int, rank_to: int, swap: int, tensor: Tensor) -> Tensor:
            if tensor.numel():
                swaps.add((rank_from, rank_to, swap))
            if (rank_from, rank_to, swap) != where or not tensor.numel():
                return tensor
            damaged = tensor.clone()
            damaged[-1] ^= 1
            return damaged

        scheme = SCHEMES[name]
        return run_ranks(world_size, lambda peer: synchronized(peer, case.rows[peer.rank], scheme), tamper=tamper)

    damaging(None)
    for where in sorted(swaps)[:: max(1, len(swaps) // 12)]:
        outcomes = damaging(where)
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        assert errors, f"nobody noticed {where}"
        assert all(isinstance(error, ThinwireError) for error in errors), errors
        for outcome in outcomes:
            if outcome.error is None:
                assert torch.equal(bits(outcome.get().values), bits(expected.values))


@pytest.mark.parametrize(
    "name", ["halving_zen", "ring_pull_by_hierarchy_dense_switch", "sparcml_split", "one_server_broadcast"]
)
def test_a_rank_that_cannot_prepare_tells_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the push it splits, in the pull it drafts: whichever fails on one rank, all raise and none waits."""
    case, scheme = uneven_case(5), SCHEMES[name]
    draft, failing = direct.draft, threading.local()

    def break_on_rank_0(*args: Any, **kwargs: Any) -> Draft:
        if getattr(failing, "left", -1) == 0:
            raise RuntimeError("no memory left")
        failing.left = getattr(failing, "left", -1) - 1
        return draft(*args, **kwargs)

    monkeypatch.setattr(direct, "draft", break_on_rank_0)
    for drafts_before in (0, 1):

        def job(peer: Any, drafts_before: int = drafts_before) -> SparseRows:
            failing.left = drafts_before if peer.rank == 0 else -1
            return synchronized(peer, case.rows[peer.rank], scheme)

        outcomes = run_ranks(5, job)
        assert all(outcome.error is not None for outcome in outcomes), drafts_before
        assert sum("no memory left" in str(outcome.error) for outcome in outcomes) == 5
