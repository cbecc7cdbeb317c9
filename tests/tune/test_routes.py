"""Which way a table goes where the model's own group takes its tensors: the cheapest, the same on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.comm.hosts import Hosts
from thinwire.comm.machine import Machine
from thinwire.sums.cost import Demand
from thinwire.sums.named import AGSPARSE_CODED, DENSE, ZEN
from thinwire.sums.two_level import TwoLevel
from thinwire.tune.prices import Route, RoutePrice, route_prices, shared_seconds
from thinwire.tune.routes import Routes

KERNELS = 0.0, 5e-10, 7e-13, 5e-10, 7e-13, 5e-10, 7e-13
HOST_KERNELS = 1e-4, 3e-9, 2e-10, 1e-8, 3e-10, 1.6e-8, 7e-10
SCHEMES = (ZEN, AGSPARSE_CODED)


def own(gbit: float) -> Machine:
    """NCCL on a link of so many Gbit/s."""
    return Machine(6e-5, 3e-5, 8e-9 / gbit, 8e-9 / gbit, *KERNELS)


def lane(gbit: float) -> Machine:
    """Gloo on the same link, which reaches at most 10 Gbit/s."""
    return Machine(4e-4, 2e-4, 8e-9 / min(gbit, 10), 8e-9 / min(gbit, 10), *HOST_KERNELS)


def demand(density: float, num_rows: int = 1_000_000, width: int = 64, world_size: int = 8) -> Demand:
    return Demand.of([density * num_rows] * world_size, num_rows, width, 4)


def routes(gbit: float) -> Routes:
    return Routes((own(gbit),), lane(gbit), (), SCHEMES)


def taken(known: Routes, *demands: Demand, is_sparse: bool = False) -> list[Route]:
    named = {str(place): (one, is_sparse) for place, one in enumerate(demands)}
    return [prices[0].route for prices in known.choose(named).values()]


@pytest.mark.parametrize(("gbit", "density", "expected"), [
    (100, 0.052, Route.COLLECTIVE),  # the table of the roofline: dense it takes 36 ms
    (10, 0.01, Route.COLLECTIVE), (100, 0.95, Route.NATIVE), (10, 0.95, Route.NATIVE),
    (3600, 0.4, Route.NATIVE),  # links between GPUs of a host: 1 ms for the whole table
])  # fmt: skip
def test_the_cheapest_way_of_a_table(gbit: float, density: float, expected: Route) -> None:
    assert taken(routes(gbit), demand(density)) == [expected]


def test_a_gradient_that_nccl_does_not_reduce_is_never_native() -> None:
    assert taken(routes(3600), demand(0.9), is_sparse=True) == [Route.COLLECTIVE]


def test_a_group_with_slow_collectives_leaves_tables_to_the_lane() -> None:
    slow = replace(own(0.01), round_seconds=0.05)
    assert taken(Routes((slow,), lane(10), (), SCHEMES), demand(0.01)) == [Route.STAGED]
    assert taken(Routes((slow,), None, (), SCHEMES), demand(0.0001)) == [Route.COLLECTIVE]


def test_tables_that_do_not_pay_alone_pay_together() -> None:
    """A sum costs the same rounds for one table and for many."""
    small = demand(0.01, num_rows=12_000)
    known = routes(100)
    assert taken(known, small) == [Route.NATIVE]
    assert taken(known, *[small] * 30) == [Route.COLLECTIVE] * 30
    assert taken(known, small) == [Route.COLLECTIVE], "the other tables are still there"


def test_seconds_of_real_sums_correct_the_estimate() -> None:
    known, table = routes(100), demand(0.052)
    assert taken(known, table) == [Route.COLLECTIVE]
    for seconds in (1.0, 1.0, 1.0):
        known.learn(seconds, {"0": (table, False)}, {"0": ZEN})
    assert taken(known, table) == [Route.NATIVE]
    known.learn(0.005, {"0": (table, False)}, {"0": ZEN})
    assert taken(known, table) == [Route.COLLECTIVE], "one sum that was not disturbed counts"


NVLINK = 350.0 * 8


def hosts_of(count: int) -> Hosts:
    return tuple(tuple(range(8 * host, 8 * host + 8)) for host in range(count))


def levels(gbit: float, num_hosts: int = 2) -> Routes:
    """Hosts of eight GPUs each, which share a network card of so many Gbit/s."""
    mine, away = gbit / 8, (num_hosts - 1) / (num_hosts - 1 / 8)
    dense = replace(own(mine / away), reduced_byte_seconds=8e-9 / gbit)  # a ring leaves a host once
    points = (*SCHEMES, *[TwoLevel(scheme, hosts_of(num_hosts)) for scheme in SCHEMES])
    return Routes((dense, own(NVLINK), own(mine)), lane(mine), hosts_of(num_hosts), points)


def scheme_of(known: Routes, table: Demand) -> object:
    return known.choose({"table": (table, False)})["table"][0].price.scheme


@pytest.mark.parametrize(("num_hosts", "gbit", "expected"), [
    (2, 25, TwoLevel(AGSPARSE_CODED, hosts_of(2))),  # two hosts send each other all that they have
    (2, 100, TwoLevel(AGSPARSE_CODED, hosts_of(2))), (8, 100, TwoLevel(ZEN, hosts_of(8))), (2, 8000, DENSE),
])  # fmt: skip
def test_two_levels_are_taken_where_hosts_share_a_link(num_hosts: int, gbit: float, expected: object) -> None:
    assert scheme_of(levels(gbit, num_hosts), demand(0.052, world_size=8 * num_hosts)) == expected


def test_a_second_level_is_for_tables_that_pay_its_round_together() -> None:
    small, known = demand(0.05, num_rows=40_000, world_size=16), levels(100)
    assert scheme_of(known, small) == ZEN, "it saves less than a round"
    many = {str(at): (small, False) for at in range(40)}
    assert all(isinstance(ways[0].price.scheme, TwoLevel) for ways in known.choose(many).values())


def test_two_levels_are_for_no_one_who_wants_the_order_of_ranks() -> None:
    table = replace(demand(0.052, world_size=16), in_rank_order=True)
    assert scheme_of(levels(25), table) in SCHEMES


tables = st.lists(
    st.tuples(st.floats(0, 0.85), st.integers(10, 200_000), st.integers(1, 128), st.booleans()), min_size=1, max_size=5
)


@given(tables=tables, gbit=st.floats(0.05, 4000), world_size=st.integers(2, 64))
def test_no_step_is_expected_to_take_longer_than_dense(
    tables: list[tuple[float, int, int, bool]], gbit: float, world_size: int
) -> None:
    """Nor than all tables by collectives, nor by the lane: counted with what tables share."""
    known = routes(gbit)
    demands = {
        str(place): (demand(density, rows, width, world_size), is_sparse)
        for place, (density, rows, width, is_sparse) in enumerate(tables)
    }
    chosen = known.choose(demands)
    assert known.choose(demands) == chosen, "pure: ranks that know the same decide the same"

    def seconds(ways: list[RoutePrice]) -> float:
        shared = shared_seconds(known.own[0], False) if any(way.route is Route.COLLECTIVE for way in ways) else 0.0
        return shared + sum(way.seconds for way in ways)

    mine = seconds([prices[0] for prices in chosen.values()])
    for route in Route:
        if all(any(way.route is route for way in prices) for prices in chosen.values()):
            other = seconds([next(way for way in prices if way.route is route) for prices in chosen.values()])
            assert mine <= other * (1 + 1e-9)


def test_the_native_way_is_that_of_stock_ddp() -> None:
    native = next(way for way in route_prices(demand(0.1), SCHEMES, (own(100),), None, (), False, False)
                  if way.route is Route.NATIVE)  # fmt: skip
    assert native.price.scheme == DENSE
    assert native.seconds == pytest.approx(0.036, rel=0.01), "the roofline's table, 8 ranks, 100 Gbit/s"
    assert native.text == "native (448.000 MB in 35.84 ms)"
