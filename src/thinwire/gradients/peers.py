"""The ranks of a lane, as `thinwire.compress` sees them: messages with checksums over a channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from thinwire.comm.channel import Channel, Draft, Subject
from thinwire.comm.hosts import Hosts, ranks_of_hosts
from thinwire.errors import LostPeerError
from thinwire.sparse import SparseRows
from thinwire.sync.cost import expected_bytes
from thinwire.sync.scheme import Scheme
from thinwire.sync.synchronize import agree, synchronize
from thinwire.sync.two_level import TwoLevel
from thinwire.wire import Format, Kind, Message

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ArrivedMessage:
    """A message of a channel, see `thinwire.compress.reduction.base.Arrived`."""

    channel: Channel
    message: Message

    def read(self, parse: Callable[[Tensor], T]) -> T:
        with self.channel.reading(self.message):
            return parse(self.message.payload)


class ChannelPeers:
    """An implementation of `thinwire.compress.reduction.base.Peers` over an open channel.

    Args:
        channel: the channel of this job.
        next_channel: opens another channel, for a scheme.
        scheme: the scheme of `sparse_sum`; None if nothing is summed that way.
    """

    def __init__(
        self, channel: Channel, next_channel: Callable[[Subject], Channel], scheme: Scheme | TwoLevel | None = None
    ) -> None:
        self._channel = channel
        self.rank, self.world_size = channel.rank, channel.world_size
        self._next_channel = next_channel
        self._scheme = scheme
        self.expected_scheme_bytes = 0.0
        """Bytes that schemes would have sent for the same rows with perfectly even ownership."""

    @property
    def hosts(self) -> Hosts:
        return ranks_of_hosts(self._channel.exchange.hosts)

    def among(self, ranks: Sequence[int]) -> ChannelPeers:
        return ChannelPeers(self._channel.among(ranks), self._next_channel)

    def attempt(self, prepare: Callable[[], T]) -> T:
        """Return the result of ``prepare``. If it raises, hang up: peers wait in an all-reduce, which must fail.

        Raises:
            LostPeerError: ``prepare`` failed; the lane hangs up at this error.
        """
        try:
            return prepare()
        except Exception as error:
            raise LostPeerError(
                f"{self._channel.where()}: compressing failed, and this rank leaves its peers in"
                f" the middle of an all-reduce: {type(error).__name__}: {error}"
            ) from error

    def all_reduce(self, tensor: Tensor) -> None:
        self._channel.all_reduce(tensor)

    def all_gather(self, prepare: Callable[[], Tensor], max_bytes: int) -> Sequence[ArrivedMessage]:
        def drafts() -> list[Draft]:
            return [_draft(prepare())] * self.world_size

        return self._arrived(self._channel.swap(Kind.GATHER, drafts, max_bytes))

    def all_to_all(self, prepare: Callable[[], Sequence[Tensor]], max_bytes: int) -> Sequence[ArrivedMessage]:
        return self._arrived(self._channel.swap(Kind.PUSH, lambda: list(map(_draft, prepare())), max_bytes))

    def sparse_sum(
        self, prepare: Callable[[], tuple[Tensor, Tensor]], numel: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert self._scheme is not None
        subject = self._channel.subject
        channel = self._next_channel(Subject(f"{subject.name}, as rows", f"{subject.description}\n{numel} elements"))

        def rows() -> SparseRows:
            ids, values = prepare()
            return SparseRows.trusted(ids, values.view(-1, 1), numel)

        held, scheme = agree(rows, self._scheme, channel)
        total = synchronize(held, scheme, channel, scale)
        mean, itemsize = sum(channel.held) / self.world_size, held.values.element_size()
        self.expected_scheme_bytes += expected_bytes(
            scheme, self.world_size, numel, itemsize, mean, total.ids.numel(), itemsize
        )
        return total.ids, total.values.view(-1)

    def _arrived(self, messages: Sequence[Message]) -> list[ArrivedMessage]:
        return [ArrivedMessage(self._channel, message) for message in messages]


def _draft(payload: Tensor) -> Draft:
    """Wrap a payload in a draft. Its format is unused: the agreed compressors give bytes their meaning."""
    return Draft(Format.COO, 0, payload)
