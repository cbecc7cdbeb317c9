"""Exchanges on the device: payloads in rank order, bytes as predicted, and one error for all that torch raises."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.sums.collectives.collective import LoopbackCollectives, results, run_collectives
from thinwire.comm.collectives import MOST_PADDING, gathered_bytes, is_padded
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.errors import LostPeerError

HOST = torch.device("cpu")


def payload(rank: int, size: int) -> Tensor:
    return (torch.arange(size) + 50 * rank).to(torch.uint8)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_padding_is_bounded(sizes: list[int]) -> None:
    padded, exact = len(sizes) * max(sizes), sum(sizes)
    assert is_padded(sizes) == (padded <= MOST_PADDING * exact)
    sent = sum(gathered_bytes(sizes, rank) for rank in range(len(sizes)))
    assert (len(sizes) - 1) * exact <= sent <= MOST_PADDING * (len(sizes) - 1) * exact


@settings(max_examples=25)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.booleans())
def test_all_ranks_get_what_each_sent_in_as_many_bytes_as_predicted(sizes: list[int], has_room: bool) -> None:
    def run(exchange: LoopbackCollectives) -> Any:
        room = torch.zeros(100, dtype=torch.uint8) if has_room else None
        gathered = exchange.all_gather(payload(exchange.rank, sizes[exchange.rank]), sizes, room)
        return gathered, exchange.traffic.sent_bytes

    for rank, (gathered, sent_bytes) in enumerate(results(run_collectives(len(sizes), run))):
        expected = [payload(source, size) for source, size in enumerate(sizes)]
        assert all(torch.equal(one, other) for one, other in zip(gathered, expected, strict=True))
        assert sent_bytes == gathered_bytes(sizes, rank)


def test_pieces_go_to_their_ranks_and_what_stays_is_not_counted() -> None:
    """Rank r sends 1 + 2 r + s bytes to rank s, and keeps its own."""

    def run(exchange: LoopbackCollectives) -> Any:
        rank, ranks = exchange.rank, range(exchange.world_size)
        sizes = [1 + 2 * rank + target for target in ranks]
        outgoing = torch.cat([payload(10 * rank + target, size) for target, size in enumerate(sizes)])
        exchange.hosts = [0, 0, 1]
        incoming = exchange.all_to_all(outgoing, sizes, [1 + 2 * source + rank for source in ranks])
        return incoming, exchange.traffic

    for rank, (incoming, traffic) in enumerate(results(run_collectives(3, run))):
        expected = [payload(10 * source + rank, 1 + 2 * source + rank) for source in range(3)]
        assert torch.equal(incoming, torch.cat(expected))
        sent = {target: 1 + 2 * rank + target for target in range(3) if target != rank}
        assert traffic.sent_bytes == sum(sent.values())
        assert traffic.received_bytes == sum(1 + 2 * source + rank for source in range(3) if source != rank)
        assert traffic.sent_between_hosts_bytes == sum(sent[other] for other in sent if 2 in (rank, other))


def test_numbers_are_one_wait_of_the_host() -> None:
    def run(exchange: LoopbackCollectives) -> Any:
        mine = torch.tensor([[100 * exchange.rank + target, -target] for target in range(3)])
        return exchange.numbers(mine), exchange.host_waits

    for rank, (numbers, waits) in enumerate(results(run_collectives(3, run))):
        assert numbers.sent.tolist() == [[100 * rank + target, -target] for target in range(3)]
        assert numbers.received.tolist() == [[100 * source + rank, -rank] for source in range(3)]
        assert torch.equal(numbers.received, numbers.on_device)
        assert waits == 1


def test_sums_are_counted_as_those_of_a_ring_and_one_rank_sends_nothing() -> None:
    def run(exchange: LoopbackCollectives) -> Any:
        total = torch.full((7,), 1.0 + exchange.rank)
        exchange.all_reduce(total)
        exchange.all_reduce(torch.empty(0))
        return total, exchange.traffic.sent_bytes

    for world_size in (1, 3):
        for total, sent_bytes in results(run_collectives(world_size, run)):
            assert torch.equal(total, torch.full((7,), float(sum(range(1, world_size + 1)))))
            assert sent_bytes == ring_all_reduce_bytes(28, world_size)


def test_texts_are_cut_and_arrive_in_rank_order() -> None:
    said = ["", "out of memory: ü", "x" * 30]

    def run(exchange: LoopbackCollectives) -> list[str]:
        return exchange.texts(said[exchange.rank], HOST, most=16)

    assert results(run_collectives(3, run)) == [["", "out of memory: �", "x" * 16]] * 3


class Broken(LoopbackCollectives):
    """One whose group fails."""

    def _all_gather(self, incoming: Tensor, outgoing: Tensor) -> NoReturn:
        raise RuntimeError("[gloo.cc:1] Connection closed by peer.")


@pytest.mark.parametrize("is_known", [False, True])
def test_an_error_of_torch_is_a_lost_peer_or_what_is_known_of_it(is_known: bool) -> None:
    known = LostPeerError("rank 2 was killed")

    def run(exchange: LoopbackCollectives) -> None:
        broken = Broken(exchange)  # type: ignore[arg-type]
        broken.lost = lambda error: known if is_known else None
        broken.texts("", HOST)

    for rank, error in enumerate(run_collectives(2, run)):
        assert isinstance(error, LostPeerError)
        expected = "rank 2 was killed" if is_known else f"rank {rank}: the exchange with the other 1 ranks broke off"
        assert expected in str(error)
        assert isinstance(error.__cause__, RuntimeError)
