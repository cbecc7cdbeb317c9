"""Which ranks are on one host: what links them is fast, and what crosses hosts is what costs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from thinwire.comm.agree import gather_records
from thinwire.comm.process_group import Exchange

HOST_VARIABLE = "THINWIRE_HOST"
"""An environment variable: ranks that have the same text in it are on one host, whatever the system says."""

RECORD_BYTES = 16

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host: every rank of the group is on exactly one."""


def boot_id() -> str | None:
    """The boot of this machine, which tells machines apart; None where there is none to read."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def host_identity() -> str:
    """A text that processes on one host share and others do not.

    The boot (or, where there is none to read, the host name) and the network namespace: containers with namespaces
    of their own, and emulated hosts, are hosts of their own, since bytes between them pass a network. Where that is
    not what is meant, `HOST_VARIABLE` says what is.
    """
    told = os.environ.get(HOST_VARIABLE)
    if told:
        return f"told {told}"
    machine, namespace = boot_id() or socket.gethostname(), ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    return f"{machine} {namespace}"


def discover(exchange: Exchange) -> Sequence[int]:
    """For each rank the number of its host, for `Exchange.hosts`; collective, one round of 24 bytes for each peer.

    Hosts are numbered by their first rank. All ranks know the same records, so they find the same hosts.

    Raises:
        LostPeerError, CorruptHeaderError: see `thinwire.comm.agree.gather_records`.
    """
    digest = hashlib.blake2b(host_identity().encode(), digest_size=RECORD_BYTES).digest()
    return _numbered(gather_records(exchange, "host", digest))


def ranks_of_hosts(host_of_rank: Sequence[int]) -> Hosts:
    """The ranks of each host, from the number of the host of each rank; hosts in the order of their first ranks.

    Example:
        >>> ranks_of_hosts([0, 0, 2, 0, 2])
        ((0, 1, 3), (2, 4))
    """
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(host_of_rank):
        members.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in members.values())


def host_of_ranks(hosts: Hosts) -> list[int]:
    """For each rank the number of its host: the inverse of `ranks_of_hosts`.

    Example:
        >>> host_of_ranks(((0, 1, 3), (2, 4)))
        [0, 0, 1, 0, 1]
    """
    return [host for _, host in sorted((rank, host) for host, ranks in enumerate(hosts) for rank in ranks)]


def _numbered(records: Sequence[bytes]) -> list[int]:
    first: dict[bytes, int] = {}
    return [first.setdefault(record, len(first)) for record in records]
