"""Two levels: right sums, the same bits, bytes to the byte, and failures that reach every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loopback import LoopbackExchange, Outcome, run_ranks, synchronized
from references.between_hosts import between_hosts_bytes
from thinwire import schemes
from thinwire.comm.channel import Channel, Subject
from thinwire.comm.hosts import Hosts
from thinwire.errors import CorruptMessageError, LostPeerError, PeerError, ThinwireError
from thinwire.lab.ledger import host_of_ranks, pair_bytes, sent_bytes
from thinwire.rows.sparse import SUPPORTED_DTYPES, SparseRows
from thinwire.schemes import Communication, Format, Ownership, Scheme, Unit
from thinwire.sums.cost import Demand, expected_bytes
from thinwire.sums.named import name_of, resolve
from thinwire.sums.synchronize import agree, synchronize
from thinwire.sums.two_level import TwoLevel
from thinwire.tune.prices import chosen

HOSTS: dict[str, Hosts] = {
    "2x2": ((0, 1), (2, 3)),
    "4x2": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "2x4": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "interleaved": ((4, 1), (3, 0), (2, 5)),
    "uneven": ((0, 1, 2), (3, 4), (5, 6, 7)),
    "one_is_alone": ((0, 1, 2), (3,)),
    "one_host": ((0, 1, 2),),
    "one_rank_a_host": ((0,), (1,), (2,)),
    "one_rank": ((0,),),
}
BETWEEN: dict[str, Scheme] = {
    **{name: scheme for name, scheme in schemes.NAMED.items() if not scheme.is_dense},
    "ring_zen": replace(schemes.ZEN, communication=Communication.RING),
    "zen_hierarchical_hash": replace(schemes.ZEN, ownership=Ownership.HIERARCHICAL_HASH),
    "zen_blocks": replace(schemes.ZEN, unit=Unit.BLOCKS),
    "ring_dense_pull": replace(schemes.ZEN, communication=Communication.RING, pull_format=(Format.DENSE,)),
    "sparcml_dense_format": replace(schemes.SPARCML, push_format=(Format.DENSE,)),
}
EMPTY = torch.empty(0, dtype=torch.int64)


def make_rows(world_size: int, num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> list[SparseRows]:
    """Whole numbers, whose sums are exact in any order and dtype; densities from none to all, by rank."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for rank in range(world_size):
        density = (0.3, 0.0, 0.03, 1.0, 0.6)[(rank + seed) % 5]
        ids = (torch.rand(num_rows, generator=generator) < density).nonzero().flatten()
        values = torch.randint(1, 9, (ids.numel(), width), generator=generator).to(dtype)
        rows.append(SparseRows(ids, values, num_rows))
    return rows


def run(
    rows: list[SparseRows], scheme: Scheme | TwoLevel, hosts: Hosts, scale: float = 1.0
) -> list[Outcome[SparseRows]]:
    def work(exchange: LoopbackExchange) -> SparseRows:
        exchange.hosts = host_of_ranks(hosts)
        return synchronized(exchange, rows[exchange.rank], scheme, scale)

    return run_ranks(len(rows), work)


def exact_sum(rows: list[SparseRows]) -> Tensor:
    return torch.stack([part.to_dense().double() for part in rows]).sum(0)


def check(rows: list[SparseRows], scheme: Scheme | TwoLevel, hosts: Hosts) -> SparseRows:
    outcomes = run(rows, scheme, hosts)
    first = outcomes[0].get()
    SparseRows(first.ids, first.values, first.num_rows)  # ids are strictly increasing and in range
    for outcome in outcomes:
        assert torch.equal(outcome.get().ids, first.ids)
        assert torch.equal(outcome.get().values, first.values)
    assert torch.equal(first.to_dense().double(), exact_sum(rows))

    ids, like = [part.ids for part in rows], rows[0]
    shape = (like.num_rows, like.width, like.values.dtype)
    placed = scheme.placed(host_of_ranks(hosts)) if isinstance(scheme, TwoLevel) else scheme
    assert [outcome.traffic.sent_bytes for outcome in outcomes] == sent_bytes(placed, ids, *shape)
    crossed = [sum(outcomes[rank].traffic.sent_between_hosts_bytes for rank in ranks) for ranks in hosts]
    assert crossed == between_hosts_bytes(scheme, hosts, ids, *shape)
    return first


CASES = [(name, "uneven") for name in BETWEEN]


CASES += [(name, hosts) for name in ("zen", "column_split", "sparcml") for hosts in HOSTS if hosts != "uneven"]


@pytest.mark.few(16)
@pytest.mark.parametrize(("name", "places"), CASES)
def test_sums_bits_and_bytes(name: str, places: str) -> None:
    hosts = HOSTS[places]
    world_size = sum(map(len, hosts))
    for seed, (num_rows, width, dtype) in enumerate(((300, 7, torch.float32), (41, 1, torch.bfloat16))):
        rows = make_rows(world_size, num_rows, width, dtype, seed)
        check(rows, TwoLevel(BETWEEN[name]), hosts)
        check(rows, BETWEEN[name], hosts)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [0, 1, 3])
@pytest.mark.parametrize("name", BETWEEN)
def test_fewer_rows_than_ranks(name: str, num_rows: int) -> None:
    check(make_rows(8, num_rows, 2, torch.float32), TwoLevel(BETWEEN[name]), HOSTS["uneven"])


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_ids_of_zen_are_those_of_the_union(dtype: torch.dtype) -> None:
    """Rows that are present and zero, and rows that cancel each other, stay rows."""
    rows = make_rows(4, 50, 3, dtype)
    rows[2] = SparseRows(rows[3].ids, -rows[3].values, 50)
    total = check(rows, TwoLevel(schemes.ZEN), HOSTS["2x2"])
    assert torch.equal(total.ids, torch.cat([part.ids for part in rows]).unique())


def test_hosts_of_the_scheme_come_before_those_discovered() -> None:
    """And what crosses hosts is counted by where ranks are, not by what the scheme takes for hosts."""
    rows = make_rows(4, 60, 2, torch.float32)
    given = TwoLevel(schemes.ZEN, hosts=((0, 2), (1, 3)))
    outcomes = run(rows, given, ((0, 1), (2, 3)))
    pairs = pair_bytes(given, [part.ids for part in rows], 60, 2, torch.float32)
    for rank, outcome in enumerate(outcomes):
        far = (2, 3) if rank < 2 else (0, 1)
        assert outcome.traffic.sent_between_hosts_bytes == sum(pairs[rank][peer] for peer in far)


def test_addition_is_by_ranks_of_a_host_and_then_by_hosts() -> None:
    """((a + b) + (c + d)) in float32, bit for bit, and sixteen-bit sums are rounded once on each level."""
    ids = torch.arange(40)
    generator = torch.Generator().manual_seed(0)
    for dtype in SUPPORTED_DTYPES:
        values = [torch.randn(40, 3, generator=generator).to(dtype) for _ in range(4)]
        rows = [SparseRows(ids, value, 40) for value in values]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        hosts = [
            (values[0].to(wide) + values[1].to(wide)).to(dtype),
            (values[2].to(wide) + values[3].to(wide)).to(dtype),
        ]
        expected = ((hosts[0].to(wide) + hosts[1].to(wide)) * 0.25).to(dtype)
        for outcome in run(rows, TwoLevel(schemes.ZEN), HOSTS["2x2"], scale=0.25):
            assert torch.equal(outcome.get().values, expected)


def test_one_level_is_left_where_there_is_only_one() -> None:
    rows = make_rows(3, 200, 4, torch.float32)
    ids, shape = [part.ids for part in rows], (200, 4, torch.float32)
    apart = TwoLevel(schemes.SPARCML, hosts=((0,), (1,), (2,)))
    assert sent_bytes(apart, ids, *shape) == sent_bytes(schemes.SPARCML, ids, *shape)
    together = TwoLevel(schemes.SPARCML, hosts=((0, 1, 2),))
    assert sent_bytes(together, ids, *shape) == sent_bytes(schemes.ZEN, ids, *shape)
    assert between_hosts_bytes(together, ((0, 1, 2),), ids, *shape) == [0]


@pytest.mark.few(8)
@pytest.mark.parametrize("name", schemes.NAMED)
def test_bytes_between_pairs_are_counted_as_such(name: str) -> None:
    """What each rank sends in all, and what it sends to each half of the ranks, is its row of the ledger."""
    scheme = schemes.NAMED[name]
    for world_size in (1, 2, 3, 5, 8):
        rows = make_rows(world_size, 300, 5, torch.float32)
        pairs = pair_bytes(scheme, [part.ids for part in rows], 300, 5, torch.float32)
        assert all(pairs[rank][rank] == 0 for rank in range(world_size))
        odd, even = tuple(range(1, world_size, 2)), tuple(range(0, world_size, 2))
        for rank, outcome in enumerate(run(rows, scheme, (even, odd) if odd else (even,))):
            assert outcome.traffic.sent_bytes == sum(pairs[rank])
            far = even if rank in odd else odd
            assert outcome.traffic.sent_between_hosts_bytes == sum(pairs[rank][peer] for peer in far)


def test_fewer_bytes_cross_hosts() -> None:
    """4 hosts of 2 with the same hot rows: a host sends its union once, not the rows of each of its ranks."""
    ids = [torch.arange(0, 4000, 4)] * 8
    two = between_hosts_bytes(TwoLevel(schemes.ZEN), HOSTS["4x2"], ids, 4000, 64, torch.float32)
    one = between_hosts_bytes(schemes.ZEN, HOSTS["4x2"], ids, 4000, 64, torch.float32)
    assert max(two) < 0.6 * max(one)
    values_once = 2 * 1000 * 256 * 3 / 4  # 2 (h - 1) / h of the union's values
    assert max(two) < 1.1 * values_once


def test_the_levels_deal_rows_by_different_hashes() -> None:
    """Ids of one residue, on as many hosts as ranks of a host, would otherwise all go to one owner."""
    ids = [torch.arange(1, 40_000, 4)] * 16
    hosts = tuple(tuple(range(first, first + 4)) for first in range(0, 16, 4))
    for between in (schemes.ZEN, replace(schemes.ZEN, ownership=Ownership.HIERARCHICAL_HASH)):
        sent = between_hosts_bytes(TwoLevel(between), hosts, ids, 40_000, 8, torch.float32)
        assert max(sent) < 1.1 * min(sent)
        alone = pair_bytes(TwoLevel(between, hosts), ids, 40_000, 8, torch.float32)
        sums = [sum(row) for row in alone]
        assert max(sums) < 1.1 * min(sums)


@pytest.mark.parametrize("hosts", ["4x2", "2x4", "one_host", "one_rank_a_host"])
def test_expected_is_sent_where_rows_are_dealt_evenly(hosts: str) -> None:
    """All ranks hold the same rows; owners are hashed, so within 3 %."""
    world_size = sum(map(len, HOSTS[hosts]))
    ids = torch.arange(0, 64_000, 4)
    for between in (schemes.ZEN, schemes.SPARCML, schemes.COLUMN_SPLIT, schemes.OMNIREDUCE_CONTIGUOUS):
        scheme = TwoLevel(between, HOSTS[hosts])
        sent = sent_bytes(scheme, [ids] * world_size, 64_000, 256, torch.float32)
        expected = expected_bytes(scheme, Demand(world_size, 64_000, 256, 4, ids.numel(), ids.numel()))
        assert max(sent) == pytest.approx(expected, rel=0.03)


def test_names() -> None:
    scheme = resolve("two_level:zen")
    assert scheme == TwoLevel(schemes.ZEN)
    assert isinstance(scheme, TwoLevel)
    assert name_of(scheme) == name_of(scheme.placed([0, 0, 1])) == "two_level:zen"
    assert scheme.describe() != scheme.placed([0, 0, 1]).describe() != scheme.placed([0, 1, 1]).describe()
    assert resolve("two_level:agsparse") == TwoLevel(schemes.AGSPARSE)
    with pytest.raises(ValueError, match=r"two_level:NAME"):
        resolve("two_level:zenn")
    with pytest.raises(ValueError, match="dense_ring"):
        resolve("two_level:dense")
    with pytest.raises(ValueError, match="placed"):
        sent_bytes(TwoLevel(schemes.ZEN), [EMPTY] * 2, 10, 1, torch.float32)


@pytest.mark.parametrize("hosts", [((0, 1), (1, 2)), ((0, 2),), ((0, 1), ()), (), ((-1, 0),)])
def test_hosts_that_do_not_part_the_ranks(hosts: Hosts) -> None:
    with pytest.raises(ValueError, match="once each"):
        TwoLevel(schemes.ZEN, hosts=hosts)


def test_hosts_of_another_group_reach_every_rank() -> None:
    outcomes = run(make_rows(3, 9, 1, torch.float32), TwoLevel(schemes.ZEN, hosts=((0, 1), (2, 3))), ((0, 1, 2),))
    for outcome in outcomes:
        with pytest.raises(ValueError, match="4 ranks, the process group 3"):
            outcome.get()


def test_more_servers_than_hosts_reach_every_rank() -> None:
    scheme = TwoLevel(replace(schemes.SPARSE_PS, servers=3))
    for outcome in run(make_rows(5, 9, 1, torch.float32), scheme, ((0, 1, 2), (3, 4))):
        with pytest.raises((ValueError, PeerError), match="3 servers on 2 ranks"):
            outcome.get()


def test_ranks_that_differ_in_hosts_or_levels_all_hear_of_it() -> None:
    rows = make_rows(4, 30, 2, torch.float32)
    odd: list[Scheme | TwoLevel] = [TwoLevel(schemes.ZEN, HOSTS["2x2"]), TwoLevel(schemes.AGSPARSE), schemes.ZEN]
    for scheme in odd:

        def work(exchange: LoopbackExchange, scheme: Scheme | TwoLevel = scheme) -> SparseRows:
            exchange.hosts = [0, 0, 1, 1]
            usual = TwoLevel(schemes.ZEN, ((0, 2), (1, 3)))
            return synchronized(exchange, rows[exchange.rank], scheme if exchange.rank == 3 else usual)

        for outcome in run_ranks(4, work):
            with pytest.raises(ThinwireError, match="disagree"):
                outcome.get()


@pytest.mark.parametrize("hosts", ["4x2", "uneven", "one_is_alone", "one_host"])
def test_a_rank_that_cannot_prepare_tells_all(hosts: str) -> None:
    groups = HOSTS[hosts]
    rows = make_rows(sum(map(len, groups)), 30, 2, torch.float32)

    def work(exchange: LoopbackExchange) -> SparseRows:
        exchange.hosts = host_of_ranks(groups)
        channel = Channel(exchange, Subject("table", "one"), 0)

        def prepare() -> SparseRows:
            if exchange.rank == 1:
                raise ValueError("no gradient today")
            return rows[exchange.rank]

        return synchronize(*agree(prepare, "two_level:zen", channel, chosen), channel)

    for rank, outcome in enumerate(run_ranks(len(rows), work)):
        with pytest.raises(ValueError if rank == 1 else PeerError, match="no gradient today"):
            outcome.get()


def corrupting(rank_from: int, rank_to: int, swap: int) -> Callable[[int, int, int, Tensor], Tensor]:
    """Flips a bit in the first byte of what arrives at one rank from another in one of its swaps."""

    def tamper(source: int, target: int, number: int, data: Tensor) -> Tensor:
        if (source, target, number) != (rank_from, rank_to, swap) or not data.numel():
            return data
        changed = data.clone()
        changed[0] ^= 1
        return changed

    return tamper


def failures(
    hosts: Hosts, tamper: Callable[[int, int, int, Tensor], Tensor], between: Scheme = schemes.ZEN
) -> list[Exception | None]:
    """What each rank raised; those that raised nothing have the right sum."""
    rows = make_rows(sum(map(len, hosts)), 300, 2, torch.float32, seed=3)

    def work(exchange: LoopbackExchange) -> SparseRows:
        exchange.hosts = host_of_ranks(hosts)
        return synchronized(exchange, rows[exchange.rank], TwoLevel(between))

    outcomes = run_ranks(len(rows), work, tamper=tamper, timeout_seconds=100)
    for outcome in outcomes:
        assert outcome.error or torch.equal(outcome.get().to_dense().double(), exact_sum(rows))
    return [outcome.error for outcome in outcomes]


@pytest.mark.parametrize(("rank_from", "rank_to"), [(0, 2), (2, 0), (1, 0)])
def test_bits_that_change_inside_a_host_reach_every_rank_of_all_hosts(rank_from: int, rank_to: int) -> None:
    """Swaps of a rank: 0 and 1 open, 2 and 3 are headers and payloads of the push."""
    errors = failures(((0, 1, 2), (3, 4, 5), (6, 7)), corrupting(rank_from, rank_to, 3))
    if rank_to == 2:  # owns nothing, since another host has two ranks: what it gets is empty, and cannot change
        assert errors == [None] * 8
        return
    assert isinstance(errors[rank_to], CorruptMessageError)
    others = [error for rank, error in enumerate(errors) if rank != rank_to]
    assert all(isinstance(error, PeerError) and not isinstance(error, LostPeerError) for error in others)
    assert all(f"from rank {rank_from}" in str(error) for error in errors)


def test_bits_that_change_between_hosts_reach_every_rank() -> None:
    """Swaps 4 and 5 are headers and payloads of the push between the ranks 1, 4 and 7."""
    errors = failures(((0, 1, 2), (3, 4, 5), (6, 7)), corrupting(7, 4, 5))
    assert isinstance(errors[4], CorruptMessageError)
    others = [error for rank, error in enumerate(errors) if rank != 4]
    assert all(isinstance(error, PeerError) and not isinstance(error, LostPeerError) for error in others)


@pytest.mark.few(4)
@pytest.mark.parametrize("rank_from", [1, 2], ids=["inside a host", "between hosts"])
@pytest.mark.parametrize("between", ["zen", "column_split", "sparcml", "dense_ring", "agsparse_hierarchy"])
def test_whatever_changes_on_the_way_nobody_waits(between: str, rank_from: int) -> None:
    """A bit of what rank 0 gets, in each of its swaps: headers, payloads, opening, both levels."""
    for swap in range(12):
        tampered: list[int] = []

        def tamper(*where: int, data: Tensor, swap: int = swap, tampered: list[int] = tampered) -> Tensor:
            changed = corrupting(rank_from, 0, swap)(*where, data)
            tampered += [] if changed is data else [swap]
            return changed

        errors = failures(((0, 1), (2, 3)), lambda *args, f=tamper: f(*args[:3], data=args[3]), schemes.NAMED[between])
        assert isinstance(errors[0], ThinwireError) == bool(tampered)
        assert all(isinstance(error, ThinwireError | None) for error in errors)
        assert not any("timeout" in str(error) for error in errors)
        if swap == 3 and tampered:  # the push inside a host: all ranks of all hosts depend on it
            assert all(errors)


@pytest.mark.parametrize("rank", [0, 2, 7])
def test_a_rank_that_leaves_is_missed_by_all(rank: int) -> None:
    def work(exchange: LoopbackExchange) -> SparseRows:
        exchange.hosts = host_of_ranks(HOSTS["uneven"])
        if exchange.rank == rank:
            exchange.close()
            raise ValueError("gone")
        return synchronized(exchange, make_rows(8, 30, 2, torch.float32)[exchange.rank], TwoLevel(schemes.ZEN))

    errors = [outcome.error for outcome in run_ranks(8, work)]
    assert all(isinstance(error, LostPeerError) for place, error in enumerate(errors) if place != rank)


def test_inputs_are_not_changed() -> None:
    rows = make_rows(4, 60, 2, torch.float32)
    before = [(part.ids.clone(), part.values.clone()) for part in rows]
    run(rows, TwoLevel(schemes.ZEN), HOSTS["2x2"], scale=0.5)
    for part, (ids, values) in zip(rows, before, strict=True):
        assert torch.equal(part.ids, ids)
        assert torch.equal(part.values, values)
