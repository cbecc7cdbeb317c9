"""Costs are what is sent (`test_conformance` holds them to the byte); here their closed forms and the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from thinwire import schemes
from thinwire.comm.channel import opening_bytes
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.lab import ledger
from thinwire.rows.formats import Header
from thinwire.schemes import Scheme, Unit
from thinwire.sums import cost

named = pytest.mark.parametrize("scheme", schemes.NAMED.values(), ids=schemes.NAMED.keys())

HEADER = Header.NUM_BYTES
ON_ROWS = {name: scheme for name, scheme in schemes.NAMED.items() if scheme.unit is Unit.ROWS}


@named
def test_one_rank_sends_nothing(scheme: Scheme) -> None:
    assert ledger.sent_bytes(scheme, [torch.arange(5)], 10, 4, torch.float32) == [0]
    assert cost.expected_bytes(scheme, cost.Demand(1, 10, 4, 4, 5, 5)) == 0
    assert ledger.value_lower_bound_bytes([torch.arange(5)], 16) == 0


def test_dense_is_a_ring() -> None:
    """2 (n - 1) / n of the tensor, rounded up, and one header to each peer to agree."""
    ids = [torch.arange(3)] * 4
    assert ledger.sent_bytes(schemes.DENSE, ids, 100, 8, torch.float32) == [3 * HEADER + 2 * 3 * 3200 // 4] * 4
    assert ledger.sent_bytes(schemes.DENSE, ids[:3], 5, 1, torch.bfloat16) == [2 * HEADER + 14] * 3  # 13.3 bytes
    assert ring_all_reduce_bytes(10, 1) == 0


def test_agsparse_by_hand() -> None:
    """Two and no rows of 3 floats, to two peers: 12 bytes of values and 1 of index a row, padded to 8."""
    ids = [torch.tensor([1, 7]), torch.empty(0, dtype=torch.int64), torch.tensor([2])]
    sent = ledger.sent_bytes(schemes.AGSPARSE, ids, 200, 3, torch.float32)
    assert sent == [2 * (HEADER + 32), 2 * HEADER, 2 * (HEADER + 16)]


def test_sparse_ps_by_hand() -> None:
    """Rows 0 to 9 belong to rank 0, 10 to 19 to rank 1. Push: what the other owns; pull: the sum of what one owns."""
    ids = [torch.tensor([1, 15, 16]), torch.tensor([1, 2])]
    push = [HEADER + 2 * 9 + 6, HEADER + 2 * 9 + 6]  # two rows of 8 + 1 bytes, padded to 24
    pull = [HEADER + 2 * 9 + 6, HEADER + 2 * 9 + 6]  # rows 1 and 2; rows 15 and 16
    assert ledger.sent_bytes(schemes.SPARSE_PS, ids, 20, 2, torch.float32) == [
        a + b for a, b in zip(push, pull, strict=True)
    ]


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("scheme", ON_ROWS.values(), ids=ON_ROWS.keys())
def test_expected_is_sent_where_rows_are_dealt_evenly(scheme: Scheme, world_size: int) -> None:
    """Every id of every 8th group of ``world_size``: each owner has one of each group, in push and in pull."""
    groups = torch.arange(0, 4096, 8)
    ids = (groups[:, None] * world_size + torch.arange(world_size)).flatten()
    num_rows = 4096 * world_size
    sent = ledger.sent_bytes(scheme, [ids] * world_size, num_rows, 8, torch.float32)
    expected = cost.expected_bytes(scheme, cost.Demand(world_size, num_rows, 8, 4, ids.numel(), ids.numel()))
    assert sent == [expected] * world_size


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_expected_is_sent_in_units_other_than_rows(world_size: int) -> None:
    """Blocks to the byte where rows are consecutive; elements within 3 %, since owners are hashed."""
    num_rows, ids = 4096 * world_size, torch.arange(512 * world_size)
    sent = ledger.sent_bytes(schemes.OMNIREDUCE, [ids] * world_size, num_rows, 8, torch.float32)
    count = ids.numel()
    assert (
        sent
        == [cost.expected_bytes(schemes.OMNIREDUCE, cost.Demand(world_size, num_rows, 8, 4, count, count))] * world_size
    )
    sent = ledger.sent_bytes(schemes.ZEN_ELEMENTS, [ids] * world_size, num_rows, 8, torch.bfloat16)
    expected = cost.expected_bytes(schemes.ZEN_ELEMENTS, cost.Demand(world_size, num_rows, 8, 2, count, count))
    assert max(sent) == pytest.approx(expected, rel=0.03)


def test_expected_is_sent_by_stages_where_no_row_is_on_two_ranks() -> None:
    """Partial sums grow with the ranks in them; of 8 ranks each has every 8th row."""
    ids = [torch.arange(rank, 8192, 8) for rank in range(8)]
    for scheme in (schemes.SPARCML, replace(schemes.BALANCED_PARALLELISM, communication="ring")):
        sent = ledger.sent_bytes(scheme, ids, 8192, 8, torch.float32)
        expected = cost.expected_bytes(scheme, cost.Demand(8, 8192, 8, 4, 1024, 8192))
        assert max(sent) == pytest.approx(expected, rel=0.02)


def test_sparcml_by_hand() -> None:
    """Three ranks: 2 hands its row to 0, 0 and 1 exchange what they have, 0 returns the sum to 2."""
    ids = [torch.tensor([1]), torch.tensor([7]), torch.tensor([1])]
    sent = ledger.sent_bytes(schemes.SPARCML, ids, 200, 3, torch.float32)
    opening = 2 * HEADER
    one, two = HEADER + 16, HEADER + 32  # rows of 12 + 1 bytes, padded to 8
    assert sent == [opening + one + two, opening + one, opening + one]


def test_halving_and_doubling_by_hand() -> None:
    """Three ranks: 2 hands both parts to 0, 0 and 1 give each other a part, and the sums; 0 returns them to 2."""
    ids = [torch.tensor([1]), torch.tensor([150]), torch.tensor([1, 150])]  # rows below 100 belong to rank 0
    scheme = replace(schemes.SPARSE_PS, communication="hierarchy", aggregation="incremental")
    sent = ledger.sent_bytes(scheme, ids, 200, 3, torch.float32)
    opening, none, one = 2 * HEADER, HEADER, HEADER + 16  # rows of 12 + 1 bytes, padded to 8
    assert sent == [opening + one + one + 2 * one, opening + none + one, opening + 2 * one]


def test_split_and_all_gather_by_hand() -> None:
    """Four ranks of 50 rows each, all hold row 1: three push it to rank 0, and it goes to 1, then from both on."""
    none, one = HEADER, HEADER + 16
    sent = ledger.sent_bytes(schemes.SPARCML_SPLIT, [torch.tensor([1])] * 4, 200, 3, torch.float32)
    push = [3 * none] + [one + 2 * none] * 3
    pull = [one + (one + none), none + (one + none), none + 2 * none, none + 2 * none]
    assert sent == [a + b for a, b in zip(push, pull, strict=True)]


def test_servers_by_hand() -> None:
    """Three ranks, rank 0 owns all 200 rows: the others push to it, and send headers to each other."""
    ids = [torch.tensor([1]), torch.tensor([1]), torch.tensor([7])]
    sent = ledger.sent_bytes(replace(schemes.SPARSE_PS, servers=1), ids, 200, 3, torch.float32)
    none, one, two = HEADER, HEADER + 16, HEADER + 32
    assert sent == [2 * none + 2 * two, one + none + 2 * none, one + none + 2 * none]


def test_a_dense_switch_by_hand() -> None:
    """Of 10 rows of 4 bytes, nine in COO are 45 bytes, padded to 48; dense, all are 40. Ranks 0 and 1 merge nine."""
    ids = [torch.arange(8), torch.tensor([8]), torch.tensor([0]), torch.tensor([0])]
    opening, one, eight, nine, dense = 3 * HEADER, HEADER + 8, HEADER + 40, HEADER + 48, HEADER + 40
    sent = ledger.sent_bytes(schemes.SPARCML, ids, 10, 1, torch.float32)
    assert sent == [opening + eight + nine, opening + one + nine, opening + 2 * one, opening + 2 * one]
    sent = ledger.sent_bytes(schemes.SPARCML_DENSE, ids, 10, 1, torch.float32)
    assert sent == [opening + eight + dense, opening + one + dense, opening + 2 * one, opening + 2 * one]


def test_more_servers_than_ranks_have_no_price() -> None:
    scheme = replace(schemes.ZEN, servers=3)
    with pytest.raises(ValueError, match="3 servers on 2 ranks"):
        ledger.sent_bytes(scheme, [torch.arange(3)] * 2, 10, 1, torch.float32)
    with pytest.raises(ValueError, match="3 servers on 2 ranks"):
        cost.expected_bytes(scheme, cost.Demand(2, 10, 1, 4, 3, 3))


@pytest.mark.parametrize("world_size", [2, 3, 5, 6, 8])
@pytest.mark.parametrize("pull", ["point_to_point", "ring", "hierarchy"])
@pytest.mark.parametrize("push", ["point_to_point", "ring", "hierarchy"])
def test_expected_is_sent_by_the_busiest_for_every_push_and_pull(push: str, pull: str, world_size: int) -> None:
    """Where every rank holds the same rows, evenly dealt to however many owners: to the byte."""
    ids = torch.arange(0, 240 * 64)
    for servers in (None, 1, 2) if push == "point_to_point" else (None,):
        scheme = replace(schemes.ZEN, communication=push, pull_communication=pull, servers=servers)
        sent = ledger.sent_bytes(scheme, [ids] * world_size, 240 * 64, 4, torch.float32)
        count = ids.numel()
        assert max(sent) == cost.expected_bytes(scheme, cost.Demand(world_size, 240 * 64, 4, 4, count, count))


def test_agsparse_sends_as_many_bytes_by_ring_and_hierarchy() -> None:
    """But for the opening. In a hierarchy of 8, a rank passes on 1, 2 and 4 pieces; around a ring all but its own."""
    ids = [torch.arange(0, 100, 2)] * 8
    direct = ledger.sent_bytes(schemes.AGSPARSE, ids, 100, 3, torch.float32)
    for scheme in (schemes.AGSPARSE_RING, schemes.AGSPARSE_HIERARCHY):
        staged = ledger.sent_bytes(scheme, ids, 100, 3, torch.float32)
        assert staged == [sent + opening_bytes(8) for sent in direct]


def test_units_by_hand() -> None:
    """Rows of 100 elements: rows 0 and 5 touch blocks 0, 1 and 2 (elements 0 to 99 and 500 to 599)."""
    ids = [torch.tensor([0, 5]), torch.empty(0, dtype=torch.int64)]
    sent = ledger.sent_bytes(schemes.OMNIREDUCE, ids, 8, 100, torch.float32)
    one, two = HEADER + 1032, HEADER + 2056  # blocks of 1024 + 1 bytes, padded to 8; owner 0 has blocks 0 and 2
    assert sent == [one + two, HEADER + one]
    sent = ledger.sent_bytes(schemes.OMNIREDUCE_CONTIGUOUS, ids, 8, 100, torch.float32)
    assert sent == [one + two, HEADER + one]  # owner 0 has blocks 0 and 1
    elements = ledger.sent_bytes(replace(schemes.AGSPARSE, unit="elements"), ids, 8, 100, torch.float32)
    assert elements == [HEADER + 200 * (4 + 2), HEADER]
