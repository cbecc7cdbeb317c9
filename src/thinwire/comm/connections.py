"""Access to the sockets of a Gloo group, so that a rank can hang up at once, whatever still holds the group.

Gloo closes its sockets when the last reference to a group goes: that of the group, of each of its works, and of the
futures and frames that hold works. Some of these are not ours (DDP keeps the futures of its last backward), a thread
that waits in a collective keeps the others, and the abort of a Gloo group does nothing (torch 2.13). So hanging up
shuts the sockets down themselves: pending operations of this rank and of its peers fail at once.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import select
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch.distributed as dist

from thinwire.comm.agree import gather_bytes
from thinwire.comm.process_group import Exchange, peers_at
from thinwire.errors import forget_locals

Address = tuple[bytes, int]
"""An IP address as 16 bytes, with IPv4 mapped into IPv6, and a port."""
_NOWHERE: Address = (bytes(16), 0)
_PACKED_BYTES = 18
_NO_TIMEOUT = getattr(socket, "SOCK_NONBLOCK", -1)
"""A type of sockets under which Python leaves their flags alone, and sets no timeout."""
Connection = tuple[Address, Address]
"""The addresses of the local and the remote end of a connection."""


def packed_ends(connections: Iterable[Connected]) -> bytes:
    """Return the local ends of connections, for `between` on other ranks."""
    return b"".join(_packed(local) for (local, _), _ in connections)


def between(connections: Sequence[Connected], ends: Sequence[bytes]) -> list[list[Connected]]:
    """Return which of this rank's connections lead to each rank; ``ends[r]`` is what rank r packed."""
    by_remote = {one[0][1]: one for one in connections}
    theirs = (
        [_unpacked(data[start : start + _PACKED_BYTES]) for start in range(0, len(data), _PACKED_BYTES)]
        for data in ends
    )
    return [[by_remote[end] for end in dict.fromkeys(addresses) if end in by_remote] for addresses in theirs]


def dead(processes: Sequence[Sequence[Connected]]) -> set[int]:
    """Return the ranks all of whose connections, as `between` returned them, are gone."""
    return {rank for rank, links in enumerate(processes) if links and not any(one.is_connected() for _, one in links)}


@dataclass(frozen=True)
class _Socket:
    """A socket that another owner may close at any time; then its descriptor may be that of another file."""

    descriptor: int
    inode: int

    def is_connected(self) -> bool:
        """Return whether no end hung up; no object owns the descriptor here, which an interrupt would then close."""
        look = select.poll()
        look.register(self.descriptor, select.POLLRDHUP)
        with contextlib.suppress(OSError):
            return os.fstat(self.descriptor).st_ino == self.inode and not look.poll(0)
        return False


Connected = tuple[Connection, _Socket]
Gather = Callable[[bytes], list[bytes]]


_numbers = itertools.count()
shut_down_groups = WeakSet[dist.ProcessGroup]()


class PrivateGroup:
    """A Gloo group that nothing else uses, with the addresses that identify its sockets.

    Each rank of a Gloo group listens at a port of its own, which is one end of each of its connections. Ranks exchange
    these addresses, and the local ends of all their connections: connections of other groups tell a rank that hung up
    from a process that ended. Where a rank cannot identify its own (another thread began to
    listen at the same moment), the sockets between two such ranks close only with the last reference.

    Args:
        make: makes the group, in a collective call of its ranks; so this constructor is collective too.
        gather: gathers bytes of each rank, in rank order; None does so over the new group, where nobody tells a rank
            that waits that another one failed before it knew all addresses.

    Attributes:
        kind: what its owner tells it from others by.
        number: grows with each group of this process, so ranks have those of one parent in the same order.
    """

    MAX_BYTES = 4 << 20
    """Most bytes of the addresses of one rank's connections: 200,000 of them."""

    def __init__(
        self, make: Callable[[], dist.ProcessGroup], gather: Gather | None = None, kind: object = None
    ) -> None:
        self.kind = kind
        before = set(_listening())
        self.process_group, self.number = make(), next(_numbers)
        self._addresses: set[Address] = set()
        self._sockets: dict[int, _Socket] = {}
        self._processes: list[list[Connected]] = []
        if self.process_group.size() > 1:
            begun = [address for address in _listening() if address not in before]
            try:
                self._agree(begun[0] if len(begun) == 1 else _NOWHERE, gather or self._gather)
            except BaseException as error:
                self.shut_down()
                self.destroy()
                del self.process_group
                forget_locals(error)  # what shutting down could not find closes with the last reference
                raise

    def _gather(self, data: bytes) -> list[bytes]:
        return gather_bytes(Exchange(self.process_group), "connections", data, self.MAX_BYTES)

    def _agree(self, mine: Address, gather: Gather) -> None:
        """Gather the addresses, and learn which connections lead to which rank."""
        self._addresses = {mine} - {_NOWHERE}
        connections = connected()
        records = gather(_packed(mine) + packed_ends(connections))
        self._addresses = {_unpacked(record[:_PACKED_BYTES]) for record in records} - {_NOWHERE}
        self._processes = between(connections, [record[_PACKED_BYTES:] for record in records])
        global_ranks = Exchange(self.process_group).global_ranks
        for rank, theirs in enumerate(self._processes):
            for (local, remote), one in theirs:
                if not self._addresses.isdisjoint((local, remote)):
                    self._sockets[rank] = one
                    ip = ipaddress.IPv6Address(remote[0])  # and as Gloo prints it, with the port in network byte order
                    peers_at[f"[{ip.ipv4_mapped or ip}]:{socket.htons(remote[1])}"] = global_ranks[rank]

    def lost(self) -> set[int]:
        """Return the ranks to which the connection is gone or was shut down by one end.

        It looks at the descriptors of this group alone, in 7 to 10 us each, without duplicates: one open while the
        owner closes would delay the end of the connection. (Three peers, four busy ranks on two cores.)
        """
        return {rank for rank, own in self._sockets.items() if not own.is_connected()}

    def dead(self) -> set[int]:
        """Return the ranks to which all connections are gone, of other groups too: their processes ended."""
        return self.lost() & dead(self._processes)

    def shut_down(self) -> None:
        """Make all pending operations of the group fail at once, on this rank and its peers; from any thread.

        One that is in the middle of its messages may never fail: Gloo signals no error to a send that it has queued
        behind a socket that was full or shut down (``Pair::signalException``).
        """
        shut_down_groups.add(self.process_group)
        for _, own in _tcp_sockets():
            with contextlib.suppress(OSError):
                if not self._addresses.isdisjoint(_ends(own)):
                    own.shutdown(socket.SHUT_RDWR)

    def destroy(self) -> None:
        """Destroy the process group."""
        with contextlib.suppress(Exception):
            dist.destroy_process_group(self.process_group)


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the sockets of this process: descriptors, and duplicates, which stay valid if an original is closed.

    Nothing else is duplicated: closing a descriptor drops all locks (``fcntl``) of the process on its file, such as
    those of sqlite. A duplicate shares the flags of the original, which Python would change to have the default timeout
    of sockets, but not where it is said to have none.
    """
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.fromfd(int(name), -1, _NO_TIMEOUT, -1) as own:
                    is_stream = own.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
                    if is_stream and own.family in (socket.AF_INET, socket.AF_INET6):
                        yield int(name), own


def listens_at(port: int) -> bool:
    """Return whether this process accepts connections at a port, as the rank does that hosts a store."""
    return any(address[1] == port for address in _listening())


def _listening() -> list[Address]:
    return [
        _address(own.getsockname())
        for _, own in _tcp_sockets()
        if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ]


def connected() -> list[Connected]:
    """Return the connections of this process."""
    found = []
    for descriptor, own in _tcp_sockets():
        with contextlib.suppress(OSError):
            known = _Socket(descriptor, os.fstat(own.fileno()).st_ino)
            if known.is_connected():
                found.append((_ends(own), known))
    return found


def _ends(own: socket.socket) -> Connection:
    """Return the two ends of a socket; raise OSError if it is not connected."""
    return _address(own.getsockname()), _address(own.getpeername())


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    ip = ipaddress.ip_address(name[0].split("%")[0])
    mapped = ip if ip.version == 6 else ipaddress.ip_address(f"::ffff:{ip}")
    return mapped.packed, name[1]


def _packed(address: Address) -> bytes:
    return address[0] + address[1].to_bytes(2, "little")


def _unpacked(record: bytes) -> Address:
    return record[:16], int.from_bytes(record[16:], "little")
