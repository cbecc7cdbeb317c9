"""Which parameters of a plain module travel together, and the order that rank 0 tells the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from loopback import LoopbackExchange, run_ranks
from thinwire.comm.channel import Channel, Subject
from thinwire.errors import CorruptMessageError
from thinwire.gradients.parameters import FIRST_GROUP_BYTES, GROUP_BYTES, Trained, agree_on_order, plan_groups


def trained(sizes_kib: Sequence[int], sparse: Sequence[int] = (), halves: Sequence[int] = ()) -> list[Trained]:
    """Parameters of so many KiB on no device: only their sizes count."""
    return [
        Trained(
            str(place),
            nn.Parameter(
                torch.empty(
                    size * 512 if place in halves else size * 256,
                    dtype=torch.float16 if place in halves else torch.float32,
                    device="meta",
                )
            ),
            is_sparse=place in sparse,
        )
        for place, size in enumerate(sizes_kib)
    ]


def test_a_small_first_group_then_large_ones() -> None:
    sizes = [600, 600, 10_000, 10_000, 10_000, 40_000, 1]
    assert plan_groups(trained(sizes), range(7)) == ((0,), (1, 2, 3), (4,), (5,), (6,))
    assert plan_groups(trained(sizes), range(6, -1, -1)) == ((6,), (5,), (4, 3), (2, 1, 0))


def test_sparse_gradients_and_dtypes_are_apart() -> None:
    assert plan_groups(trained([1] * 6, sparse=[1], halves=[3, 4]), range(6)) == ((0,), (1,), (2,), (3, 4), (5,))


@given(st.lists(st.integers(0, 30_000), max_size=12), st.randoms(use_true_random=False), st.data())
def test_every_parameter_is_in_one_group_in_order(sizes: list[int], random: Any, data: st.DataObject) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)
    sparse = data.draw(st.sets(st.sampled_from(order))) if order else set()
    parameters = trained(sizes, sparse=tuple(sparse))
    groups = plan_groups(parameters, order)
    assert [place for group in groups for place in group] == order
    for number, group in enumerate(groups):
        assert len(group) == 1 or not sparse.intersection(group)
        cap = GROUP_BYTES if number else FIRST_GROUP_BYTES
        assert len(group) == 1 or sum(parameters[place].local.nbytes for place in group) <= cap


class Lane:
    """What `agree_on_order` uses of a lane."""

    def __init__(self, exchange: LoopbackExchange) -> None:
        self.exchange = exchange

    def channel(self, subject: Subject) -> Channel:
        return Channel(self.exchange, subject, sequence=0)


def test_rank_0_decides_the_order() -> None:
    def run(network: LoopbackExchange) -> list[int]:
        lane: Any = Lane(network)
        return agree_on_order(lane, [2, 0, 1] if network.rank == 0 else [0, 1, 2])

    assert [outcome.get() for outcome in run_ranks(3, run)] == [[2, 0, 1]] * 3


@pytest.mark.parametrize("order", [[0, 0, 1], [0, 1, 3], [-1, 0, 1]])
def test_what_is_no_order_is_refused(order: list[int]) -> None:
    def run(network: LoopbackExchange) -> list[int]:
        lane: Any = Lane(network)
        return agree_on_order(lane, order if network.rank == 0 else [0, 1, 2])

    for outcome in run_ranks(2, run):
        assert isinstance(outcome.error, CorruptMessageError)
