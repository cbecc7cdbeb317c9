"""Registration of the ranks with their holders: hosts, destinations of replicas, and recovery from a lost holder."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.checkpoint.group import gather_json, on_all
from thinwire.checkpoint.pacing.counters import BusySampler, TransmitCounters, interface_to
from thinwire.checkpoint.placement import replicas_of_ranks
from thinwire.comm.hosts import boot_id
from thinwire.errors import ThinwireError
from thinwire.holder.client import DEFAULT_LAYOUT_BYTES, HolderClient
from thinwire.holder.replication import is_loopback, parse_address
from thinwire.holder.start import HolderOptions, end_with_agent, ensure_holder, load_secret, socket_path
from thinwire.holder.version import ShardId, topology_digest

logger = logging.getLogger("thinwire")

GRANULE_BYTES = 1 << 20
LAYOUT_BYTES_PER_TENSOR = 4096
_JOBS: dict[int, str] = {}  # by process, because a forked one is another job


def room_bytes(payload_bytes: int) -> int:
    """Return the capacity of a slot in bytes, rounded up, so that states of similar size get the same slots."""
    return max(1, -(-payload_bytes // GRANULE_BYTES)) * GRANULE_BYTES


def places_of(holders: Sequence[str], replicas: int, domains: Sequence[str] | None = None) -> list[list[str]]:
    """Return for each rank the addresses of the holders of its shard, its own first.

    ``holders`` and ``domains`` have, for each rank, the address of its host's holder and its failure domain. Ranks with
    one holder are one machine. ``replicas`` counts the copies of a shard, its own included.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, holder in enumerate(holders):
        ranks_of.setdefault(holder, []).append(rank)
    machines = list(ranks_of.values())
    labels = None if domains is None else [domains[ranks[0]] for ranks in machines]
    return [[holders[peer] for peer in peers] for peers in replicas_of_ranks(machines, replicas, labels)]


def placed_at(holder: str, holders: Sequence[str], replicas: int, domains: Sequence[str] | None = None) -> list[int]:
    """Return the ranks whose shards are placed at a holder: those of its own host, and those that it keeps for others.

    Example:
        >>> placed_at("b:1", ["a:1", "b:1", "c:1", "d:1"], replicas=2)
        [0, 1]
    """
    return [rank for rank, places in enumerate(places_of(holders, replicas, domains)) if holder in places]


def peers_of(rank: int, holders: Sequence[str], replicas: int, domains: Sequence[str] | None = None) -> list[str]:
    """Return the addresses of the holders that get a copy of a rank's shard."""
    return places_of(holders, replicas, domains)[rank][1:]


class Registration:
    """The connection of this rank to its holder, and the addresses of all others'.

    ``client`` is None while this host has no holder. `connect`, `exchange` and `register` are collective.

    ``num_tensors`` determines the room for layouts; ``leases``: whether this job must be the only one that uses the
    run. The other arguments are those of `Checkpointer`.

    Whoever chooses the versions to go back to sets ``wanted``, for each holder the digests of those that it keeps or
    gets, ``chosen``, their attempt and step, and ``left``, their topology if it is another one. ``moving``: until
    `release`.
    """

    def __init__(
        self,
        socket: str | Path | None,
        run_id: str,
        topology: dict[str, Any],
        replicas: int,
        num_tensors: int,
        group: dist.ProcessGroup,
        domain: str | None = None,
        leases: bool = True,
    ) -> None:
        self._path, self._run_id, self._topology = socket_path(socket), run_id, topology
        self._domain = domain if domain is not None else os.environ.get("THINWIRE_DOMAIN", "")
        self.wanted: Mapping[str, Sequence[str]] = {}
        self.chosen: tuple[int, int] | None = None
        self.left: str | None = None
        self.moving = False
        self._domains: list[str] | None = None
        self._group, self.rank = group, dist.get_rank(group)
        self.layout_bytes = max(DEFAULT_LAYOUT_BYTES, LAYOUT_BYTES_PER_TENSOR * num_tensors)
        self.client: HolderClient | None = None
        self.registered = False
        self._room = (0, 0)  # bytes of a payload and of a layout
        self._attempt = -1
        self.holders: list[str] = []
        self.peers: list[str] = []
        self.replicas = replicas
        first = gather_json(_JOBS.setdefault(os.getpid(), secrets.token_hex(8)), group)[0]
        self._job = f"{first}/{topology_digest(topology)}" if leases else ""
        end_with_agent()
        try:
            self._connect_all()
        except BaseException:
            self.close()
            raise

    @property
    def here(self) -> str:
        """The address of the holder of this host."""
        return self.holders[self.rank]

    @property
    def local_ranks(self) -> int:
        return self.holders.count(self.here)

    def sampler(self) -> BusySampler | None:
        """Return what sees the traffic on the way to the other holders; None if there are none, or no counters."""
        other = next((holder for holder in self.holders if holder != self.here), None)
        if other is None or self.replicas < 2:
            return None
        try:
            return BusySampler(TransmitCounters(interface_to(parse_address(other)[0])))
        except OSError as error:
            logger.info("no transmit counters: %s", error)
            return None

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
            self._warn(
                "all ranks are on one machine, so there is nobody to keep a replica: checkpoints survive the death of"
                " processes, not of the machine (pass replicas=1 to say that this is meant)"
            )
            self.replicas = 1
        places = places_of(self.holders, self.replicas, self._domains)  # or an error: too few machines
        labels = dict(zip(self.holders, self._domains or self.holders, strict=True))
        sharing = sorted({held[0] for held in places if len({labels[holder] for holder in held}) < len(held)})
        if sharing:
            self._warn(
                "two copies of one shard are in one failure domain, whose loss would cost both, for the hosts"
                f" {', '.join(sharing[:8])}{' and more' * (len(sharing) > 8)}: spread the job over more domains"
            )

    def _warn(self, text: str) -> None:
        if self.rank == 0:
            warnings.warn(text, stacklevel=6)

    def _connect(self, start: bool = False) -> HolderClient:
        """To the holder of this host, which is started if all ranks of the job are on this host."""
        world_size = str(dist.get_world_size(self._group))
        if start and os.environ.get("LOCAL_WORLD_SIZE") == world_size:
            client = ensure_holder(HolderOptions(socket=str(self._path)))
        elif not self._path.exists():
            raise ValueError(
                f"no holder at {self._path} on {os.uname().nodename}: start one on each host, before the trainers,"
                " with: thinwire holder --bind ADDRESS --secret-file FILE --detach"
            )
        else:
            client = HolderClient.connect(self._path, load_secret(self._path))
        try:
            if self._job:
                client.join(self._run_id, self._job)
        except BaseException:
            client.close()
            raise
        return client

    def exchange(self, error: str = "") -> None:
        """Gather the addresses of all holders. Raises ValueError on all ranks if one of them is missing."""
        address, error = "", error or "the holder of its host is lost"
        if self.client is not None:
            try:
                address = str(self.client.holder_status()["address"])
            except ThinwireError as reason:
                error = str(reason)
        names = [self._run_id, topology_digest(self._topology)]
        mine = {"address": address, "error": error, "boot": boot_id() or "", "names": names, "domain": self._domain}
        told = gather_json(mine, self._group)
        for rank, each in enumerate(told):
            if each["names"] != told[0]["names"]:
                raise ValueError(f"rank {rank} has another run_id, or another model or other parts, than rank 0")
        failed = [f"rank {rank}: {each['error']}" for rank, each in enumerate(told) if not each["address"]]
        if failed:
            raise ValueError("; ".join(failed[:4]))
        self.holders = [each["address"] for each in told]
        labels = [each["domain"] or each["address"] for each in told]
        self._domains = labels if any(each["domain"] for each in told) else None
        local = next((holder for holder in self.holders if is_loopback(parse_address(holder)[0])), None)
        if local is not None and len({each["boot"] for each in told}) > 1:
            raise ValueError(f"other hosts cannot reach the holder at {local}: start it with --bind ADDRESS")

    def reconnect(self) -> bool:
        """Reconnect if necessary and return whether there is a connection; not collective."""
        if self.client is None:
            with contextlib.suppress(ThinwireError, ValueError, OSError):
                self.client = self._connect()
        return self.client is not None

    def close(self) -> None:
        """Close the connection, also to a holder that is gone; not collective."""
        self.registered = False
        client, self.client = self.client, None
        if client is not None:
            client.close()

    def has_room(self, payload_bytes: int) -> bool:
        """Return whether this rank has slots, and they are large enough."""
        return self.registered and payload_bytes <= self._room[0] and self.layout_bytes <= self._room[1]

    def placed(self) -> dict[str, list[int]]:
        """Return for each holder the ranks whose shards are placed there."""
        places = places_of(self.holders, self.replicas, self._domains)
        return {holder: [rank for rank, held in enumerate(places) if holder in held] for holder in self.holders}

    def register(self, payload_bytes: int, attempt: int) -> None:
        """Register slots for a state of that size, here and on the peers; ranks that have them already keep them.

        Raises ValueError on all ranks, with the reasons, if one of them did not get them.
        """
        self.place(attempt)
        peers = peers_of(self.rank, self.holders, self.replicas, self._domains)
        if self.has_room(payload_bytes) and peers == self.peers and attempt == self._attempt:
            self._all(lambda: None)
        else:
            self._all(lambda: self._hello(payload_bytes, attempt, peers))

    def place(self, attempt: int) -> None:
        """Tell the holders which shards belong where, and what stays until all of them are there; collective.

        Raises ValueError on all ranks.
        """
        self._all(self.exchange)
        self._all(lambda: self._place(attempt))
        self.moving = True

    def _place(self, attempt: int) -> None:
        if self.client is not None and self.is_first:
            topology = topology_digest(self._topology)
            placed = [ShardId(self._run_id, topology, rank) for rank in self.placed()[self.here]]
            self.client.place(self._run_id, placed, self.wanted.get(self.here, ()), attempt, self.chosen)

    def release(self) -> None:
        """Have this host free what belongs elsewhere; when all ranks know that all copies are there."""
        self.moving, self.wanted = False, {}
        if self.client is not None and self.is_first:
            topologies = [topology_digest(self._topology), *([self.left] if self.left is not None else [])]
            self.client.release(self._run_id, topologies)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its host, which speaks for all of them."""
        return self.holders.index(self.here) == self.rank

    def _all(self, do: Callable[[], None]) -> None:
        """Do something on all ranks. Raises ValueError on all of them if it fails on one, which loses its holder."""

        def guarded() -> None:
            try:
                do()
            except Exception:
                self.close()
                raise

        on_all(self._group, guarded, ValueError)

    def _hello(self, payload_bytes: int, attempt: int, peers: list[str]) -> None:
        if self.registered:  # a connection has one shard, and its peers stay
            self.close()
        self.reconnect()
        if self.client is None:
            raise ValueError(f"no holder at {self._path}")
        room = max(room_bytes(payload_bytes), self._room[0]), self.layout_bytes
        self.client.hello(self._run_id, self._topology, self.rank, room[0], peers, attempt, room[1])
        for address, reason in self.client.unreachable.items():
            logger.warning("the holder at %s cannot be reached yet: %s", address, reason)
        self.registered, self._room, self.peers, self._attempt = True, room, peers, attempt
