"""Two levels on the collectives of a process group: the bits of the lane, fewer bytes between hosts, and failures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loopback import LoopbackExchange, run_ranks, synchronized
from tests.sums.collectives.collective import LoopbackCollectives, Tamper, results, run_collectives
from tests.sums.collectives.test_collective_faults import few, mean, some_rows
from tests.sums.test_collective import STACKED, dealt, uneven
from thinwire import schemes
from thinwire.comm.hosts import Hosts
from thinwire.comm.machine import Machine, measure_collectives
from thinwire.errors import CorruptMessageError, PeerError
from thinwire.lab.bench.recipes import RECIPES, Recipe, row_ids
from thinwire.lab.ledger import host_of_ranks
from thinwire.rows.sparse import SUPPORTED_DTYPES, SparseRows
from thinwire.sums import collective
from thinwire.sums.collective import CollectiveSum, Counts, NamedGradient, TablePlan, plan, refusal, sent_bytes
from thinwire.sums.two_level import TwoLevel

HOSTS: dict[str, Hosts] = {
    "2x2": ((0, 1), (2, 3)),
    "3x2": ((0, 1), (2, 3), (4, 5)),
    "interleaved": ((4, 1), (3, 0), (2, 5)),
    "one host": ((0, 1, 2),),
    "one rank a host": ((0,), (1,), (2,)),
    "one rank": ((0,),),
}
FOUR = (0, 0, 1, 1)
"""The host of each of four ranks."""
BETWEEN = ("zen", "agsparse_coded", "sparse_ps")
QUICK = (("2x2", "zen"), ("interleaved", "agsparse_coded"))


def levels(table: TablePlan, ids: list[Tensor], rank: int) -> list[tuple[TablePlan, list[list[int]], list[int]]]:
    """Of each level its plan, what each rank deals to each of its ranks, and the rows of each part of the sum."""
    world_size = len(ids)
    if not table.groups:
        pushed = [dealt(table.partition, each, world_size) for each in ids]
        return [(table, pushed, dealt(table.partition, torch.cat(ids).unique(), world_size))]
    assert table.partition is not None
    union = torch.cat(ids).unique()
    pushed = [dealt(table.partition, each, len(table.groups[0])) for each in ids]
    inside = table, pushed, dealt(table.partition, union, len(table.groups[0]))
    host = next(ranks for ranks in table.groups if rank in ranks)
    share = table.between(host.index(rank))
    held, positions = [EMPTY] * world_size, table.partition.split(union)[host.index(rank)][0]
    for ranks in table.groups:
        of_host = torch.cat([ids[one] for one in ranks]).unique()
        for index, one in enumerate(ranks):
            held[one] = table.partition.split(of_host)[index][0] if index == host.index(rank) else EMPTY
    pushed = [dealt(share.partition, each, len(table.groups)) for each in held]
    return [inside, (share, pushed, dealt(share.partition, positions, len(table.groups)))]


EMPTY = torch.empty(0, dtype=torch.int64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "between"),
    [
        pytest.param(hosts, between, marks=() if (hosts, between) in QUICK else pytest.mark.slow)
        for hosts in HOSTS
        for between in BETWEEN
    ],
)
def test_the_bits_of_the_lane_and_the_predicted_bytes(hosts: str, between: str) -> None:
    """Added in the order of the ranks of a host, then in that of the hosts."""
    placed, scale = TwoLevel(schemes.NAMED[between], HOSTS[hosts]), 1 / 3
    world_size, shapes = sum(map(len, HOSTS[hosts])), {dtype: (70 * at, 3) for at, dtype in enumerate(SUPPORTED_DTYPES)}

    def run(exchange: LoopbackCollectives) -> list[tuple[list[Tensor], dict[str, Counts], int, int]]:
        exchange.hosts = host_of_ranks(HOSTS[hosts])
        total, steps = CollectiveSum(exchange), []
        for step in range(3):
            waits, sent = exchange.host_waits, exchange.traffic.sent_bytes
            tables = [
                NamedGradient(f"{dtype} {sparse}", uneven(exchange.rank, step, *shape, dtype, sparse))
                for dtype, shape in shapes.items()
                for sparse in (False, True)
            ]
            sums = total.all_reduce(tables, placed, scale)
            moved = exchange.host_waits - waits, exchange.traffic.sent_bytes - sent
            steps.append(([each.to_dense() for each in sums], total.counts, *moved))
        return steps

    outcomes = results(run_collectives(world_size, run))
    for step in range(3):
        by_rank: list[list[tuple[TablePlan, list[list[int]], list[int]]]] = [[] for _ in outcomes]
        for at, (dtype, shape) in enumerate(shapes.items()):
            for which, sparse in enumerate((False, True)):
                rows = [SparseRows.from_tensor(uneven(r, step, *shape, dtype, sparse)) for r in range(world_size)]

                def on_lane(exchange: LoopbackExchange, rows: list[SparseRows] = rows) -> SparseRows:
                    exchange.hosts = host_of_ranks(HOSTS[hosts])
                    return synchronized(exchange, rows[exchange.rank], placed, scale)

                table = plan(placed, *shape, dtype, world_size)
                lane = run_ranks(world_size, on_lane)
                for rank, (steps, outcome) in enumerate(zip(outcomes, lane, strict=True)):
                    sums, counts, waits, _ = steps[step]
                    assert torch.equal(sums[2 * at + which], outcome.get().to_dense())
                    if world_size > 1:
                        assert counts[f"{dtype} {sparse}"].held == tuple(each.ids.numel() for each in rows)
                    assert waits == (3 if table.groups else 2)
                    by_rank[rank] += levels(table, [each.ids for each in rows], rank)
        if world_size > 1:
            for rank, (steps, known) in enumerate(zip(outcomes, by_rank, strict=True)):
                plans, pushed, unions = map(list, zip(*known, strict=True))
                assert steps[step][3] == sent_bytes(plans, pushed, unions, rank)


@pytest.mark.few(1)
@pytest.mark.parametrize("between", ["zen", "agsparse_coded"])
def test_stacked_tables_have_the_bits_of_tables_alone(between: str) -> None:
    """Some of them in one level: all share the messages of a step."""
    schemes_of = [TwoLevel(schemes.NAMED[between]) if at % 3 else schemes.ZEN for at in range(len(STACKED))]

    def run(exchange: LoopbackCollectives) -> list[Tensor]:
        exchange.hosts, sums = FOUR, []
        together, alone = CollectiveSum(exchange), [CollectiveSum(exchange) for _ in STACKED]
        for step in range(3):
            given = [
                uneven(exchange.rank, 7 * step + at, rows, 3, torch.float32, s) for at, (rows, s) in enumerate(STACKED)
            ]
            copies = [each.clone() for each in given]
            before = exchange.host_waits
            sums = together.all_reduce([NamedGradient(f"{at}", each) for at, each in enumerate(given)], schemes_of, 0.5)
            assert exchange.host_waits == before + 3
            for at, (total, copy) in enumerate(zip(sums, copies, strict=True)):
                (single,) = alone[at].all_reduce([NamedGradient("alone", copy)], schemes_of[at], 0.5)
                assert torch.equal(total.to_dense(), single.to_dense())
                mine, its = together.counts[f"{at}"], alone[at].counts["alone"]
                assert (mine.held, mine.union, sum(mine.shares)) == (its.held, its.union, sum(its.shares))
        return sums

    first, *others = results(run_collectives(4, run))
    for sums in others:
        assert all(torch.equal(mine.to_dense(), its.to_dense()) for mine, its in zip(sums, first, strict=True))


def test_hosts_of_several_sizes_are_refused() -> None:
    uneven_hosts = TwoLevel(schemes.ZEN, ((0, 1), (2,)))
    assert "different numbers of ranks" in refusal(uneven_hosts)
    assert "stages" in refusal(TwoLevel(schemes.SPARCML))
    assert refusal(TwoLevel(schemes.ZEN)) == "", "its hosts are not known yet"


# --- failures

TWO = TwoLevel(schemes.ZEN)


def fail_once(monkeypatch: pytest.MonkeyPatch, phase: str, is_share: bool) -> None:
    """The first call of a method of a table on rank 1 raises: inside of its host, or between hosts."""
    works, failed = getattr(collective._Job, phase), []

    def fail(job: collective._Job, *args: object) -> object:
        if job.rank == 1 and isinstance(job, collective._Share) == is_share and not failed:
            failed.append(job)
            raise MemoryError("no memory")
        return works(job, *args)

    monkeypatch.setattr(collective._Job, phase, fail)


@pytest.mark.parametrize("is_share", [False, True])
@pytest.mark.parametrize("phase", ["deal", "encoded", "add"])
def test_a_failure_before_the_sums_are_agreed_on_raises_everywhere(
    phase: str, is_share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, phase, is_share)

    def run(exchange: LoopbackCollectives) -> Tensor:
        exchange.hosts, total = FOUR, CollectiveSum(exchange)
        error, reason = (MemoryError, "no memory") if exchange.rank == 1 else (PeerError, "rank 1 reports.*no memory")
        with pytest.raises(error, match=reason):
            mean(total, some_rows(exchange.rank), TWO)
        return mean(total, some_rows(exchange.rank), TWO)

    for total in results(run_collectives(4, run)):
        torch.testing.assert_close(total, sum(map(some_rows, range(4))))


@pytest.mark.parametrize("is_share", [False, True])
def test_a_failure_with_the_sums_is_never_taken_for_a_gradient(is_share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_once(monkeypatch, "encoded_sum", is_share)

    def run(exchange: LoopbackCollectives) -> Tensor:
        exchange.hosts, total = FOUR, CollectiveSum(exchange)
        if exchange.rank == 1:
            with pytest.raises(MemoryError):
                mean(total, some_rows(exchange.rank), TWO)
        else:
            is_poisoned = mean(total, some_rows(exchange.rank), TWO).isnan().any()
            assert is_poisoned == (is_share or exchange.rank == 0), "the other host has all that it needs"
        with pytest.raises(CorruptMessageError, match=r"in the last call"):
            mean(total, some_rows(exchange.rank), TWO)
        return mean(total, some_rows(exchange.rank), TWO)

    for total in results(run_collectives(4, run)):
        torch.testing.assert_close(total, sum(map(some_rows, range(4))))


@pytest.mark.few(4)
@pytest.mark.parametrize("call", [1, 3, 5, 6])
@pytest.mark.parametrize("pattern", [0, 255])
def test_ids_that_arrive_changed_are_noticed(call: int, pattern: int) -> None:
    """Of rows inside of a host, rows between hosts, sums between hosts, and sums inside: on rank 1."""

    def tamper_of(rank: int) -> Tamper:
        def tamper(name: str, number: int, incoming: Tensor) -> None:
            if rank == 1 and number == call:
                is_value = incoming.view(-1, 4).eq(torch.tensor([0, 0, 128, 63], dtype=torch.uint8)).all(1)
                incoming.view(-1, 4)[~is_value] = pattern

        return tamper

    def run(exchange: LoopbackCollectives) -> list[object]:
        exchange.hosts, total, found = FOUR, CollectiveSum(exchange), []
        for _ in range(3):
            try:
                found.append(mean(total, few(exchange), TWO))
            except CorruptMessageError as error:
                found.append(error)
        return found

    for rank, (first, second, third) in enumerate(results(run_collectives(4, run, tamper_of))):
        if call < 5:
            assert isinstance(first, CorruptMessageError), "before anybody has a sum"
            assert isinstance(second, Tensor)
        else:
            assert isinstance(second, CorruptMessageError)
            assert isinstance(first, Tensor)
            assert bool(first.isnan().any()) == (rank == 1 or (call == 5 and rank == 0))
        assert isinstance(third, Tensor)
        assert third.sum() == 2 * 4 * 6


# --- bytes between hosts

TABLES = {
    "uniform": Recipe("uniform", num_rows=1_000_000, width=64, density=0.052, exponent=0.0),
    **{name: RECIPES[name] for name in ("lstm", "nmt", "bert", "deepfm")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_two_hosts_of_eight_send_fewer_bytes_than_in_one_level(name: str) -> None:
    """The tables of docs/gpu.md, scaled: at least 1.6 times fewer between the hosts, and the predicted ones."""
    whole = TABLES[name]
    recipe = whole.scaled(min(1.0, 2.5e7 / (4 * whole.num_rows * whole.width)))
    hosts = tuple(tuple(range(8 * host, 8 * host + 8)) for host in range(2))
    ids = [row_ids(recipe, rank, seed=0) for rank in range(16)]
    placed = TwoLevel(schemes.ZEN, hosts)

    def run(exchange: LoopbackCollectives) -> list[tuple[int, int]]:
        exchange.hosts, total, sent = host_of_ranks(hosts), CollectiveSum(exchange), []
        for scheme in (schemes.ZEN, placed):
            gradient = torch.zeros(recipe.num_rows, recipe.width)
            gradient[ids[exchange.rank]] = 1.0 + exchange.rank
            before = replace(exchange.traffic)
            mean(total, gradient, scheme)
            after = exchange.traffic
            between = after.sent_between_hosts_bytes - before.sent_between_hosts_bytes
            sent.append((after.sent_bytes - before.sent_bytes, between))
        return sent

    outcomes = results(run_collectives(16, run))
    for level, scheme in enumerate((schemes.ZEN, placed)):
        table = plan(scheme, recipe.num_rows, recipe.width, torch.float32, 16)
        for rank, sent in enumerate(outcomes):
            plans, pushed, unions = map(list, zip(*levels(table, ids, rank), strict=True))
            assert sent[level][0] == sent_bytes(plans, pushed, unions, rank, 1)
    one, two = (sum(sent[level][1] for sent in outcomes) for level in (0, 1))
    print(f"{name}: {one / 2e6:.3f} MB from a host to the other in one level, {two / 2e6:.3f} in two, {one / two:.2f}x")
    assert one >= 1.6 * two


@pytest.mark.slow
def test_the_links_of_each_level_are_measured() -> None:
    """All ranks know the same; without two levels nothing is measured for them."""

    def run(exchange: LoopbackCollectives) -> list[tuple[Machine, ...]]:
        found = []
        for host_of_rank in (range(4), (0, 0, 0, 1), FOUR, (0, 0, 0, 0)):
            exchange.hosts = host_of_rank
            found.append(measure_collectives(exchange, torch.device("cpu")))
        return found

    first, *others = results(run_collectives(4, run))
    assert all(other == first for other in others)
    assert [len(machines) for machines in first] == [1, 1, 3, 1]
    assert len({replace(machine, byte_seconds=1.0) for machine in first[2]}) == 1, "they differ only in links"
