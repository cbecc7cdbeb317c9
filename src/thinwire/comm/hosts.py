"""The hosts of the ranks: bytes between ranks of one host are cheap, bytes between hosts cost."""

import contextlib
import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from thinwire.comm.agree import gather_records
from thinwire.comm.process_group import Exchange

HOST_VARIABLE = "THINWIRE_HOST"
"""Environment variable that puts ranks with the same text on one host, whatever the system says."""

RECORD_BYTES = 16

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host; every rank of the group is on exactly one host."""


def boot_id() -> str | None:
    """Return the boot id of this machine, which tells machines apart, or None if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def host_identity() -> str:
    """Return a text that processes on one host share and others do not.

    It is the network of this process, unless `HOST_VARIABLE` overrides it.
    """
    given = os.environ.get(HOST_VARIABLE)
    return f"given {given}" if given else network_identity()


def network_identity() -> str:
    """Return a text that processes share which reach each other over the loopback interface.

    It is the boot id (or the host name if that cannot be read) and the network namespace: containers with their own
    namespaces, and emulated hosts, count as separate hosts, since bytes between them pass a network.
    """
    machine, namespace = boot_id() or socket.gethostname(), ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    return f"{machine} {namespace}"


def discover(exchange: Exchange) -> Sequence[int]:
    """Return the host number of each rank, for `Exchange.hosts`; collective, one round of 24 bytes for each peer.

    Hosts are numbered in the order of their first ranks. All ranks hold the same records, so they agree.

    Raises:
        LostPeerError, CorruptHeaderError: see `thinwire.comm.agree.gather_records`.
    """
    digest = hashlib.blake2b(host_identity().encode(), digest_size=RECORD_BYTES).digest()
    return numbered(gather_records(exchange, "host", digest))


def ranks_of_hosts(host_of_rank: Sequence[int]) -> Hosts:
    """Return the ranks of each host, from the host number of each rank; hosts are ordered by their first ranks.

    Example:
        >>> ranks_of_hosts([0, 0, 2, 0, 2])
        ((0, 1, 3), (2, 4))
    """
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(host_of_rank):
        members.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in members.values())


def has_levels(hosts: Hosts) -> bool:
    """Return whether there are several hosts, with several ranks each, and as many on each."""
    return len(hosts) > 1 and {len(hosts[0])} == set(map(len, hosts)) and len(hosts[0]) > 1


def numbered(identities: Sequence[object]) -> list[int]:
    """Return the number of each rank's host, from what each says of its own."""
    first: dict[object, int] = {}
    return [first.setdefault(identity, len(first)) for identity in identities]
