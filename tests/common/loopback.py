"""An `Exchange` of ranks that are threads of one process: deterministic, without sockets, with faults on demand."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from thinwire.comm.channel import Channel, Subject
from thinwire.comm.process_group import Exchange, Receive, Traffic, ring_all_reduce_bytes
from thinwire.errors import LostPeerError, ranks_told
from thinwire.rows.sparse import SparseRows
from thinwire.sums.scheme import Scheme
from thinwire.sums.synchronize import agree, synchronize
from thinwire.sums.two_level import TwoLevel
from thinwire.tune.prices import chosen

T = TypeVar("T")
Tamper = Callable[[int, int, int, Tensor], Tensor]  # (rank_from, rank_to, swap_number, tensor) -> what arrives


def untouched(rank_from: int, rank_to: int, swap_number: int, tensor: Tensor) -> Tensor:
    return tensor


@dataclass
class Hub:
    """Where the threads meet: in each turn every member posts one thing and takes what all have posted.

    Members are all ranks, or those of a subset, whose turns are counted apart; their names are those among all ranks.
    A rank runs only while it holds ``baton``, and passes it on only when it waits here: one thread at a time, or
    else they wear each other out over Python's own lock (ZEN on 8 ranks: 190 ms, half of it system time, against 100).
    """

    world_size: int
    timeout_seconds: float
    tamper: Tamper = untouched
    _turns: dict[tuple[object, int], dict[int, object]] = field(default_factory=lambda: defaultdict(dict))
    _left: set[int] = field(default_factory=set)
    _mail: dict[tuple[int, int, int], list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    baton: threading.Condition = field(default_factory=threading.Condition)

    def post(self, members: tuple[int, ...], kind: str, rank: int, turn: int, item: T) -> Callable[[], list[T]]:
        """Post in this turn of the members, counted for each kind; a function that waits for what all have posted.

        It raises LostPeerError if one of them left or does not come.
        """
        posted = self._turns[(members, kind), turn]
        posted[rank] = item
        if len(posted) == len(members):
            self.baton.notify_all()
            self._turns.pop(((members, kind), turn))  # each has it

        def take() -> list[T]:
            self.baton.wait_for(
                lambda: len(posted) == len(members) or not self._left.isdisjoint(members), self.timeout_seconds
            )
            if len(posted) < len(members):
                missing = sorted(set(members) - set(posted))
                how = f"ranks {sorted(self._left)} left" if self._left else "timeout"
                raise LostPeerError(f"rank {rank}: ranks {missing} did not take part in exchange {turn}: {how}")
            return [posted[peer] for peer in members]  # type: ignore[misc]

        return take

    def put(self, source: int, target: int, tag: int, data: Tensor) -> None:
        """Leave a message of a stream."""
        self._mail[source, target, tag].append(data)
        self.baton.notify_all()

    def take(self, source: int, target: int, tag: int, number: int) -> Tensor:
        """Wait for the message of a stream that is the ``number``-th between two ranks."""
        mail = self._mail[source, target, tag]
        self.baton.wait_for(lambda: len(mail) > number or source in self._left, self.timeout_seconds)
        if len(mail) <= number:
            how = f"ranks {sorted(self._left)} left" if self._left else "timeout"
            raise LostPeerError(f"rank {target}: message {number} of rank {source} did not come: {how}")
        return mail[number]

    def leave(self, rank: int) -> None:
        with self.baton:
            self._left.add(rank)
            self.baton.notify_all()


class LoopbackStream:
    """A stream without a thread: what is sent is made and delivered at once."""

    def __init__(self, exchange: LoopbackExchange, tag: int) -> None:
        self._exchange, self._tag = exchange, tag
        self._swap = exchange.next_swap()
        self._failure: Exception | None = None

    def receive(self, source: int, most_bytes: int, size: Callable[[Tensor], int]) -> Receive:
        number = self._exchange.next_posted(source, self._tag)

        def wait() -> Tensor:
            data = self._exchange.take(source, self._tag, number, size, self._swap)
            assert data.numel() <= most_bytes, f"{source} sends {data.numel()} bytes, at most {most_bytes} are expected"
            return data

        return wait

    def send(self, target: int, make: Callable[[], Tensor]) -> None:
        self._exchange.put(target, self._tag, make())

    def fail(self, error: Exception) -> None:
        self._failure = error

    def __enter__(self) -> LoopbackStream:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None and self._failure is not None:
            raise self._failure


@dataclass
class Counts:
    """What a rank counts over all its exchanges, that of all ranks and those of subsets."""

    traffic: Traffic = field(default_factory=Traffic)
    turns: dict[object, int] = field(default_factory=lambda: defaultdict(int))  # by members and kind
    posted: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))  # by source and tag
    swaps: int = 0


class LoopbackExchange:
    """One rank's end of a `Hub`. Counts traffic as `Exchange` does, and holds callers to its contract."""

    def __init__(
        self, hub: Hub, rank: int, members: tuple[int, ...] | None = None, counts: Counts | None = None
    ) -> None:
        self._members = tuple(range(hub.world_size)) if members is None else members
        self.rank = self._members.index(rank)
        self.world_size = len(self._members)
        self.hosts: Sequence[int] = range(self.world_size)
        self.global_ranks = self._members
        self._records = "point to point" if members else "collective"  # as of an `Exchange`: of a subset it is no other
        self._counts = counts or Counts()
        self.traffic = self._counts.traffic
        self._hub = hub

    def subset(self, ranks: Sequence[int]) -> LoopbackExchange:
        members = tuple(self._members[rank] for rank in ranks)
        inner = LoopbackExchange(self._hub, self._members[self.rank], members, self._counts)
        inner.hosts = [self.hosts[rank] for rank in ranks]
        return inner

    def swap_records(self, outgoing: Sequence[Tensor]) -> list[Tensor]:
        return self.begin_records(outgoing)()

    def begin_records(self, outgoing: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        assert len({part.numel() for part in outgoing}) == 1, "records have one length"
        return self._begin_swap(outgoing, [outgoing[0].numel()] * self.world_size, self._records)

    def swap(self, outgoing: Sequence[Tensor], receive_bytes: Sequence[int]) -> list[Tensor]:
        return self._begin_swap(outgoing, receive_bytes, "point to point")()

    def _begin_swap(
        self, outgoing: Sequence[Tensor], receive_bytes: Sequence[int], kind: str
    ) -> Callable[[], list[Tensor]]:
        assert len(outgoing) == len(receive_bytes) == self.world_size
        assert all(part.dtype == torch.uint8 and part.dim() == 1 for part in outgoing)
        take = self._post([part.clone() for part in outgoing], kind)
        return lambda: self._complete_swap(take(), outgoing, receive_bytes)

    def _complete_swap(
        self, posted: Sequence[Sequence[Tensor]], outgoing: Sequence[Tensor], receive_bytes: Sequence[int]
    ) -> list[Tensor]:
        incoming = list(outgoing)
        swap = self.next_swap()
        for peer in self._others():
            part = posted[peer][self.rank]
            assert part.numel() == receive_bytes[peer], f"{peer} sends {part.numel()}, not {receive_bytes[peer]} bytes"
            incoming[peer] = self._tampered(peer, swap, part)
            self._count_sent(peer, outgoing[peer].numel())
            self.traffic.received_bytes += receive_bytes[peer]
        return incoming

    def swap_with(self, target: int | None, outgoing: Tensor, source: int | None, receive_bytes: int) -> Tensor:
        assert self.rank not in (target, source), "nobody talks to itself"
        assert target is not None or outgoing.numel() == 0
        posted = self._post((target, outgoing.clone()), "point to point")()
        if target is not None:
            self._count_sent(target, outgoing.numel())
        self.traffic.received_bytes += receive_bytes
        senders = [rank for rank, (to, _) in enumerate(posted) if to == self.rank]
        assert senders == ([] if source is None else [source]), f"ranks {senders} send here, not {source}"
        swap = self.next_swap()
        if source is None:
            assert receive_bytes == 0
            return torch.empty(0, dtype=torch.uint8)
        part = posted[source][1]
        assert part.numel() == receive_bytes, f"{source} sends {part.numel()}, not {receive_bytes} bytes"
        return self._tampered(source, swap, part) if receive_bytes else part

    def stream(self, tag: int) -> LoopbackStream:
        return LoopbackStream(self, tag)

    def next_posted(self, source: int, tag: int) -> int:
        """The number, among those that ``source`` sends here in streams, of the message that is received next."""
        self._counts.posted[self._members[source], tag] += 1
        return self._counts.posted[self._members[source], tag] - 1

    def take(self, source: int, tag: int, number: int, size: Callable[[Tensor], int], swap: int) -> Tensor:
        """The message of that number that ``source`` sent here in the streams so far."""
        part = self._hub.take(self._members[source], self._members[self.rank], tag, number)
        arrived = self._tampered(source, swap, part)
        num_bytes = size(arrived)
        self.traffic.received_bytes += num_bytes
        return arrived[:num_bytes]

    def put(self, target: int, tag: int, data: Tensor) -> None:
        self._count_sent(target, data.numel())
        self._hub.put(self._members[self.rank], self._members[target], tag, data.clone())

    def next_swap(self) -> int:
        self._counts.swaps += 1
        return self._counts.swaps - 1

    def all_reduce(self, tensor: Tensor) -> None:
        """Added one rank after the other, in the dtype of the tensor."""
        assert tensor.is_contiguous()
        assert self.world_size == self._hub.world_size, "the native all-reduce is of the whole group"
        posted = self._meet(tensor.clone())
        total = posted[0].clone()
        for piece in posted[1:]:
            total += piece
        tensor.copy_(total)
        if self.world_size > 1:
            self.count_all_reduce(ring_all_reduce_bytes(tensor.numel() * tensor.element_size(), self.world_size))

    def count_all_reduce(self, moved_bytes: int) -> None:
        self._count_sent((self.rank + 1) % self.world_size, moved_bytes)
        self.traffic.received_bytes += moved_bytes

    def close(self) -> None:
        self._hub.leave(self._members[self.rank])

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _count_sent(self, peer: int, num_bytes: int) -> None:
        self.traffic.sent_bytes += num_bytes
        if self.hosts[peer] != self.hosts[self.rank]:
            self.traffic.sent_between_hosts_bytes += num_bytes

    def _tampered(self, source: int, swap: int, part: Tensor) -> Tensor:
        return self._hub.tamper(self._members[source], self._members[self.rank], swap, part)

    def _meet(self, item: T) -> list[T]:
        return self._post(item, "collective")()

    def _post(self, item: T, kind: str) -> Callable[[], list[T]]:
        turn = self._counts.turns[self._members, kind]
        self._counts.turns[self._members, kind] += 1
        take = self._hub.post(self._members, kind, self._members[self.rank], turn, item)

        def checked() -> list[T]:
            posted = take()
            assert all(type(other) is type(item) for other in posted), "ranks call different collectives"
            return posted

        return checked


@dataclass
class Outcome(Generic[T]):
    """What a rank's function returned or raised, and the bytes that it moved."""

    result: T | None = None
    error: Exception | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def get(self) -> T:
        """The result; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


def run_ranks(
    world_size: int,
    function: Callable[[LoopbackExchange], T],
    *,
    timeout_seconds: float = 10.0,
    tamper: Tamper = untouched,
) -> list[Outcome[T]]:
    """Run ``function(exchange)`` on a thread for each rank; the outcomes in rank order.

    As on a lane, a rank hangs up after a failure that not all ranks raise at the same point.
    """
    hub = Hub(world_size, timeout_seconds, tamper)
    outcomes: list[Outcome[T]] = [Outcome() for _ in range(world_size)]

    def run(rank: int) -> None:
        exchange = LoopbackExchange(hub, rank)
        outcome = outcomes[rank]
        outcome.traffic = exchange.traffic
        try:
            with hub.baton:
                outcome.result = function(exchange)
        except Exception as error:
            outcome.error = error
            if ranks_told(error) < world_size:
                exchange.close()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * timeout_seconds)
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not stuck, f"still running: ranks {stuck}"
    return outcomes


def synchronized(
    exchange: Exchange, rows: SparseRows, scheme: str | Scheme | TwoLevel, scale: float = 1.0, name: str = "table"
) -> SparseRows:
    """The sum of ``rows`` over the ranks of an exchange: what one job on a lane does."""
    text = scheme if isinstance(scheme, str) else scheme.describe()
    channel = Channel(exchange, Subject(name, f"[{rows.num_rows}, {rows.width}], {text}"), sequence=0)
    return synchronize(*agree(lambda: rows, scheme, channel, chosen), channel, scale)


def run_threads(
    world_size: int,
    function: Callable[[LoopbackExchange], T],
    *,
    timeout_seconds: float = 10.0,
    tamper: Tamper = untouched,
) -> list[T | Exception | None]:
    """`run_ranks` without the traffic: for each rank its result, or the exception that it raised."""
    outcomes = run_ranks(world_size, function, timeout_seconds=timeout_seconds, tamper=tamper)
    return [outcome.error or outcome.result for outcome in outcomes]
