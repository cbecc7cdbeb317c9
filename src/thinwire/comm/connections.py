"""Access to the sockets of a Gloo group, so that a rank can hang up at once, whatever still holds the group.

Gloo closes its sockets when the last reference to a group goes: that of the group, of each of its works, and of the
futures and frames that hold works. Some of these are not ours (DDP keeps the futures of its last backward), a thread
that waits in a collective keeps the others, and the abort of a Gloo group does nothing (torch 2.13). So hanging up
shuts the sockets down themselves: pending operations of this rank and of its peers fail at once.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator

import torch.distributed as dist

from thinwire.comm.agree import gather_records
from thinwire.comm.process_group import Exchange, peers_at
from thinwire.errors import forget_locals

Address = tuple[bytes, int]
"""An IP address as 16 bytes, with IPv4 mapped into IPv6, and a port."""
_NOWHERE: Address = (bytes(16), 0)
_PACKED_BYTES = 18
_ESTABLISHED = 1  # value of the first byte of struct tcp_info, in <linux/tcp.h>
Connection = tuple[Address, Address]
"""The addresses of the local and the remote end of a connection."""


class PrivateGroup:
    """A Gloo group that nothing else uses, with the addresses that identify its sockets.

    Each rank of a Gloo group listens at a port of its own, which is one end of each of its connections. Ranks exchange
    these addresses and those from which they connected. Where a rank cannot identify its own (another thread began to
    listen at the same moment), the sockets between two such ranks close only with the last reference.

    Args:
        make: makes the group, in a collective call of its ranks; so this constructor is collective too.
    """

    def __init__(self, make: Callable[[], dist.ProcessGroup]) -> None:
        before = set(_listening())
        self.process_group = make()
        self._addresses: set[Address] = set()
        self._connections: dict[int, Connection] = {}
        if self.process_group.size() > 1:
            begun = [address for address in _listening() if address not in before]
            try:
                self._agree(begun[0] if len(begun) == 1 else _NOWHERE)
            except BaseException as error:
                self.shut_down()
                self.destroy()
                del self.process_group
                forget_locals(error)  # what shutting down could not find closes with the last reference
                raise

    def _agree(self, mine: Address) -> None:
        """Gather the addresses, and learn which connection leads to which rank from the ranks that connected."""
        self._addresses = {mine} - {_NOWHERE}
        exchange = Exchange(self.process_group)
        listening = list(map(_unpacked, gather_records(exchange, "address", _packed(mine))))
        self._addresses = set(listening) - {_NOWHERE}
        local = {remote: local for local, remote in _connected()}
        mine_to = [local.get(address, _NOWHERE) for address in listening]
        told = gather_records(exchange, "connections", b"".join(map(_packed, mine_to)))
        remote = {remote: (local, remote) for local, remote in _connected()}
        for rank, record in enumerate(told):
            to_me = _unpacked(record[_PACKED_BYTES * exchange.rank :][:_PACKED_BYTES])
            found = remote.get(listening[rank]) or remote.get(to_me)
            if found is not None:
                self._connections[rank] = found
                peers_at[_as_gloo_writes(found[1])] = exchange.global_ranks[rank]

    def lost(self) -> set[int]:
        """Return the ranks to which the connection is gone or was shut down by one end."""
        connected = set(_connected())
        return {rank for rank, connection in self._connections.items() if connection not in connected}

    def shut_down(self) -> None:
        """Make all pending operations of the group fail at once, on this rank and its peers; from any thread."""
        for found in _tcp_sockets():
            with contextlib.suppress(OSError):
                if not self._addresses.isdisjoint(_ends(found)):
                    found.shutdown(socket.SHUT_RDWR)

    def destroy(self) -> None:
        """Destroy the process group."""
        with contextlib.suppress(Exception):
            dist.destroy_process_group(self.process_group)


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yield duplicates of the sockets of this process, which stay valid if an original is closed meanwhile."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), _duplicate(int(name)) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                yield found


def _duplicate(descriptor: int) -> socket.socket:
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _listening() -> list[Address]:
    return [
        _address(found.getsockname())
        for found in _tcp_sockets()
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ]


def _connected() -> Iterator[Connection]:
    for found in _tcp_sockets():
        with contextlib.suppress(OSError):
            if found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED:
                yield _ends(found)


def _ends(found: socket.socket) -> Connection:
    """Return the two ends of a socket; raise OSError if it is not connected."""
    return _address(found.getsockname()), _address(found.getpeername())


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    ip = ipaddress.ip_address(name[0].split("%")[0])
    mapped = ip if ip.version == 6 else ipaddress.ip_address(f"::ffff:{ip}")
    return mapped.packed, name[1]


def _as_gloo_writes(address: Address) -> str:
    """Return an address as Gloo prints it, with the port still in network byte order."""
    ip = ipaddress.IPv6Address(address[0])
    return f"[{ip.ipv4_mapped or ip}]:{socket.htons(address[1])}"


def _packed(address: Address) -> bytes:
    return address[0] + address[1].to_bytes(2, "little")


def _unpacked(record: bytes) -> Address:
    return record[:16], int.from_bytes(record[16:], "little")
