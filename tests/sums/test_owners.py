"""Sums by owners, of numbers: each is added up once, in rank order, and what arrives late or wrong names its sender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopback import LoopbackExchange, Outcome, run_ranks
from thinwire.comm.channel import Channel, Subject, opening_bytes
from thinwire.comm.frames import Frames, frame_bytes
from thinwire.errors import CorruptHeaderError, CorruptMessageError, LostPeerError, MismatchError, raising
from thinwire.sums import owners
from thinwire.sums.owners import Arriving, OwnerSum, begin

Sizes = Sequence[Sequence[int]]
"""Of each owner the numbers in each of its segments."""


def held(rank: int, owner: int, number: int, size: int) -> Tensor:
    """What a rank has of a segment, int64."""
    return torch.arange(size) + 1000 * rank + 100 * owner + 10 * number


def total(world_size: int, owner: int, number: int, size: int) -> Tensor:
    return sum((held(rank, owner, number, size) for rank in range(world_size)), torch.zeros(size, dtype=torch.int64))


@dataclass
class Numbers:
    """Integers that travel as they are, on one rank of a sum; ``sources`` are those from whom each segment came."""

    rank: int
    sizes: Sizes
    segments: list[int] = field(init=False)
    found: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    sources: list[list[int]] = field(default_factory=list)

    @staticmethod
    def read(content: Tensor) -> Tensor:
        if content.numel() % 8:
            raise CorruptMessageError(f"{content.numel()} bytes are no numbers")
        return content.view(torch.int64).clone()

    def __post_init__(self) -> None:
        self.segments = [len(sizes) for sizes in self.sizes]

    def most_pushed(self, source: int, owner: int, number: int) -> int:
        return 8 * self.sizes[owner][number]

    def most_pulled(self, owner: int, number: int) -> int:
        return 8 * self.sizes[owner][number]

    def push(self, owner: int, number: int) -> Tensor:
        return held(self.rank, owner, number, self.sizes[owner][number]).view(torch.uint8)

    def add(self, number: int, arriving: Arriving) -> Tensor:
        added = held(self.rank, self.rank, number, self.sizes[self.rank][number])
        self.sources.append([])
        for source, receive in arriving:
            added = added + self.read(receive())
            self.sources[-1].append(source)
        self.found[self.rank, number] = added
        return added

    def pull(self, number: int, total: Tensor) -> Tensor:
        return total.view(torch.uint8)

    def take(self, owner: int, number: int, receive: Callable[[], Tensor]) -> None:
        self.found[owner, number] = self.read(receive())


def opened(exchange: LoopbackExchange) -> Channel:
    channel = Channel(exchange, Subject("numbers", "the same on all ranks"), 0)
    channel.open()
    return channel


def summed(
    sizes: Sizes, has_pulls: bool = True, code: Callable[[int, Sizes], Numbers] = Numbers
) -> list[Outcome[tuple[Numbers, int]]]:
    """The code of each rank afterwards, and the bytes that it says were sent."""

    def run(exchange: LoopbackExchange) -> tuple[Numbers, int]:
        mine = code(exchange.rank, sizes)
        return mine, begin(mine, opened(exchange), has_pulls)()

    return run_ranks(len(sizes), run)


SIZES = st.integers(1, 4).flatmap(
    lambda ranks: st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=ranks, max_size=ranks)
)


@given(SIZES, st.booleans(), st.sampled_from([0, 1, 100, 1 << 20]))
def test_all_ranks_have_all_sums_in_rank_order_and_bytes_are_those_of_their_frames(
    sizes: list[list[int]], has_pulls: bool, posted_bytes: int
) -> None:
    """Segments are of any number and size, also of none; without pulls each owner has its own."""
    world_size = len(sizes)
    with mock.patch.object(owners, "POSTED_BYTES", posted_bytes):
        outcomes = summed(sizes, has_pulls)
    everything = {(owner, number): size for owner, row in enumerate(sizes) for number, size in enumerate(row) if size}
    for rank, outcome in enumerate(outcomes):
        code, sent_bytes = outcome.get()
        own = {key: size for key, size in everything.items() if key[0] == rank}
        assert code.found.keys() == (everything if has_pulls else own).keys()
        for key, found in code.found.items():
            assert torch.equal(found, total(world_size, *key, everything[key]))
        others = [other for other in range(world_size) if other != rank]
        assert code.sources == [others] * len(own)
        pushed = sum(frame_bytes(8 * size) for key, size in everything.items() if key not in own)
        pulled = sum(len(others) * frame_bytes(8 * size) for size in own.values()) if has_pulls else 0
        assert sent_bytes == pushed + pulled == outcome.traffic.sent_bytes - opening_bytes(world_size)


@pytest.mark.parametrize("posted_bytes", [0, 1000, 1 << 30])
def test_receives_that_wait_are_bounded_in_bytes_but_for_one_and_in_number(
    posted_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "POSTED_BYTES", posted_bytes)
    waiting: dict[int, list[int]] = {rank: [] for rank in range(3)}
    lengths: dict[int, list[int]] = {rank: [] for rank in range(3)}
    receive = Frames.receive

    def counted(frames: Frames, source: int, kind: Any, number: int, most_bytes: int) -> Callable[[], Tensor]:
        mine = waiting[frames._channel.rank]
        assert sum(mine) < max(posted_bytes, 1), "what was posted before leaves no room"
        mine.append(most_bytes)
        lengths[frames._channel.rank].append(len(mine))
        wait = receive(frames, source, kind, number, most_bytes)

        def waited() -> Tensor:
            mine.remove(most_bytes)
            return wait()

        return waited

    monkeypatch.setattr(Frames, "receive", counted)
    for outcome in summed([[40] * 12, [30] * 9, [50] * 3]):
        assert len(outcome.get()[0].found) == 24
    assert waiting == {rank: [] for rank in range(3)}
    for posted in lengths.values():
        most = {0: 1, 1000: 5, 1 << 30: owners._LEAST_POSTED}[posted_bytes]
        assert max(posted) <= most
        assert max(posted[len(posted) // 2 :]) >= most - 2, "what came leaves its room to others"


class CutPush(Numbers):
    """Rank 1 pushes less than whole numbers to owner 2."""

    def push(self, owner: int, number: int) -> Tensor:
        return super().push(owner, number)[: -1 if (self.rank, owner) == (1, 2) else None]


class CutSum(Numbers):
    """Rank 1 sends less than whole numbers of its sum."""

    def pull(self, number: int, total: Tensor) -> Tensor:
        return super().pull(number, total)[: -1 if self.rank == 1 else None]


@pytest.mark.parametrize(("code", "refusing"), [(CutPush, {2}), (CutSum, {0, 2})])
def test_what_a_code_refuses_names_the_rank_that_sent_it(code: type[Numbers], refusing: set[int]) -> None:
    errors = [outcome.error for outcome in summed([[5, 5], [3, 4], [6]], code=code)]
    refused = {rank for rank, error in enumerate(errors) if type(error) is CorruptMessageError}
    assert refused == refusing
    for rank in refusing:
        assert str(errors[rank]).startswith(f"rank {rank}, numbers: from rank 1: ")
        assert str(errors[rank]).endswith("bytes are no numbers")
    assert all(isinstance(error, LostPeerError) for rank, error in enumerate(errors) if rank not in refusing | {1})


class Failing(Numbers):
    """Rank 1 has no memory for what it pushes."""

    def push(self, owner: int, number: int) -> Tensor:
        if self.rank == 1:
            raise ValueError("no memory left")
        return super().push(owner, number)


def test_a_rank_that_cannot_push_says_why_to_all_who_wait_for_it() -> None:
    for rank, outcome in enumerate(summed([[5], [5], [5]], code=Failing)):
        assert outcome.error is not None
        if rank != 1:
            assert isinstance(outcome.error, LostPeerError)
            assert "no memory left" in str(outcome.error)


def test_a_sum_that_began_before_ranks_agreed_is_refused_where_they_mean_others() -> None:
    def run(exchange: LoopbackExchange) -> int:
        channel = Channel(exchange, Subject("numbers", f"of {'twos' if exchange.rank == 1 else 'threes'}"), 0)
        channel.begin_open()
        return begin(Numbers(exchange.rank, [[5], [5], [5]]), channel)()

    for outcome in run_ranks(3, run):
        assert isinstance(outcome.error, MismatchError)


def test_errors_name_what_arrived_last_or_was_kept_and_headers_name_their_own() -> None:
    channel: Any = SimpleNamespace(rank=0, world_size=3, where=lambda source: f"from rank {source}")
    run = OwnerSum(channel, Numbers(0, [[1], [1], [1]]))

    def refused() -> None:
        raise CorruptMessageError("not so")

    kept = torch.ones(3)
    assert run.again(2, kept) is kept
    for source, named in ((None, 2), (1, 1)):
        with pytest.raises(CorruptMessageError, match=f"^from rank {named}: not so$"):
            run.naming(refused, source)
    with pytest.raises(CorruptHeaderError, match=r"^from rank 7: altered$"):
        run.naming(raising(CorruptHeaderError("from rank 7: altered")))
    assert run.naming(lambda: 5) == 5
