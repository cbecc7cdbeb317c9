"""Registration of the ranks with their holders: hosts, destinations of replicas, and recovery from a lost holder."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.checkpoint.group import failures_of, gather_json
from thinwire.checkpoint.placement import replicas_of_ranks
from thinwire.comm.hosts import boot_id
from thinwire.errors import ThinwireError
from thinwire.holder.client import DEFAULT_LAYOUT_BYTES, HolderClient
from thinwire.holder.start import HolderOptions, ensure_holder, load_secret, socket_path
from thinwire.holder.version import topology_digest

logger = logging.getLogger("thinwire")

GRANULE_BYTES = 1 << 20
LAYOUT_BYTES_PER_TENSOR = 4096
_LOOPBACK = ("127.", "[::1]", "localhost")


def room_bytes(payload_bytes: int) -> int:
    """Return the capacity of a slot in bytes, rounded up, so that states of similar size get the same slots."""
    return max(1, -(-payload_bytes // GRANULE_BYTES)) * GRANULE_BYTES


def peers_of(rank: int, holders: Sequence[str], replicas: int) -> list[str]:
    """Return the addresses of the holders that get a copy of a rank's shard. Ranks with one holder are one machine."""
    ranks_of: dict[str, list[int]] = {}
    for other, holder in enumerate(holders):
        ranks_of.setdefault(holder, []).append(other)
    return [holders[peer] for peer in replicas_of_ranks(list(ranks_of.values()), replicas)[rank][1:]]


class Registration:
    """The connection of this rank to its holder, and the addresses of all others'.

    ``client`` is None while this host has no holder. `connect`, `exchange` and `register` are collective.

    Args:
        socket: path of the holder of this host; None for the default path.
        replicas: copies of each shard, including its own.
        num_tensors: tensors of the model, which determine the room for layouts.
    """

    def __init__(
        self,
        socket: str | Path | None,
        run_id: str,
        topology: dict[str, Any],
        replicas: int,
        num_tensors: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._path, self._run_id, self._topology = socket_path(socket), run_id, topology
        self._group, self.rank = group, dist.get_rank(group)
        self.layout_bytes = max(DEFAULT_LAYOUT_BYTES, LAYOUT_BYTES_PER_TENSOR * num_tensors)
        self.client: HolderClient | None = None
        self.registered = False
        self.room_bytes = 0
        self._attempt = -1
        self.holders: list[str] = []
        self.peers: list[str] = []
        self.replicas = replicas
        try:
            self._connect_all()
        except BaseException:
            self.lost()
            raise

    @property
    def here(self) -> str:
        """The address of the holder of this host."""
        return self.holders[self.rank]

    @property
    def local_ranks(self) -> int:
        return self.holders.count(self.here)

    def _connect_all(self) -> None:
        """Connect all ranks. Raises ValueError on all ranks if one has no holder, or if there are too few hosts."""
        error = ""
        try:
            self.client = self._connect(start=True)
        except (ThinwireError, ValueError, OSError) as reason:
            error = str(reason)
        self.exchange(error)
        machines = len(set(self.holders))
        if machines == 1 and self.replicas > 1:
            self.replicas = 1
            if self.rank == 0:
                warnings.warn(
                    "all ranks are on one machine, so there is nobody to keep a replica: checkpoints survive the death"
                    " of processes, not of the machine (pass replicas=1 to say that this is meant)",
                    stacklevel=4,
                )
        peers_of(self.rank, self.holders, self.replicas)  # raises an error with advice if there are too few machines

    def _connect(self, start: bool = False) -> HolderClient:
        """To the holder of this host, which is started if all ranks of the job are on this host."""
        world_size = str(dist.get_world_size(self._group))
        if start and os.environ.get("LOCAL_WORLD_SIZE") == world_size:
            return ensure_holder(HolderOptions(socket=str(self._path)))
        if not self._path.exists():
            raise ValueError(
                f"no holder at {self._path}: start one on each host, before the trainers, with: thinwire holder"
                " --bind ADDRESS --secret-file FILE --detach"
            )
        return HolderClient.connect(self._path, load_secret(self._path))

    def exchange(self, error: str = "") -> None:
        """Gather the addresses of all holders. Raises ValueError on all ranks if one of them is missing."""
        address, error = "", error or "the holder of its host is lost"
        if self.client is not None:
            try:
                address = str(self.client.holder_status()["address"])
            except ThinwireError as reason:
                error = str(reason)
        names = [self._run_id, topology_digest(self._topology)]
        told = gather_json({"address": address, "error": error, "boot": boot_id() or "", "names": names}, self._group)
        for rank, each in enumerate(told):
            if each["names"] != told[0]["names"]:
                raise ValueError(f"rank {rank} has another run_id, or another model or other parts, than rank 0")
        failed = [f"rank {rank}: {each['error']}" for rank, each in enumerate(told) if not each["address"]]
        if failed:
            raise ValueError("; ".join(failed[:4]))
        self.holders = [each["address"] for each in told]
        local = next((holder for holder in self.holders if holder.startswith(_LOOPBACK)), None)
        if local is not None and len({each["boot"] for each in told}) > 1:
            raise ValueError(f"other hosts cannot reach the holder at {local}: start it with --bind ADDRESS")

    def reconnect(self) -> bool:
        """Reconnect if necessary and return whether there is a connection; not collective."""
        if self.client is None:
            with contextlib.suppress(ThinwireError, ValueError, OSError):
                self.client = self._connect()
        return self.client is not None

    def lost(self) -> None:
        """Close the connection to a holder that is gone; not collective."""
        self.registered = False
        client, self.client = self.client, None
        if client is not None:
            client.close()

    def register(self, payload_bytes: int, attempt: int) -> None:
        """Register slots for a state of that size, here and on the peers; ranks that have them already keep them.

        Raises ValueError on all ranks, with the reasons, if one of them did not get them.
        """
        error = ""
        try:
            self.exchange()
            peers = peers_of(self.rank, self.holders, self.replicas)
            if not (self.registered and peers == self.peers and attempt == self._attempt):
                self._hello(payload_bytes, attempt, peers)
        except (ThinwireError, ValueError, OSError) as reason:
            error = str(reason)
            self.lost()
        failed = failures_of(error, self._group)
        if failed:
            raise ValueError(failed)

    def _hello(self, payload_bytes: int, attempt: int, peers: list[str]) -> None:
        if self.registered:  # a connection has one shard, and its peers stay
            self.lost()
        self.reconnect()
        if self.client is None:
            raise ValueError(f"no holder at {self._path}")
        room = room_bytes(payload_bytes)
        self.client.hello(self._run_id, self._topology, self.rank, room, peers, attempt, self.layout_bytes)
        for address, reason in self.client.unreachable.items():
            logger.warning("the holder at %s cannot be reached yet: %s", address, reason)
        self.registered, self.room_bytes, self.peers, self._attempt = True, room, peers, attempt

    def close(self) -> None:
        self.lost()
