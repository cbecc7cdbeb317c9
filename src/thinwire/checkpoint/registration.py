"""Registration of the ranks with their holders: hosts, destinations of replicas, and recovery from a lost holder."""

import contextlib
import os
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.checkpoint.group import gather_json, on_all
from thinwire.checkpoint.holder.client import Common, HolderClient
from thinwire.checkpoint.holder.frames import closed_on_error
from thinwire.checkpoint.holder.replication import is_loopback, parse_address
from thinwire.checkpoint.holder.slots import SlotSize
from thinwire.checkpoint.holder.start import (
    HolderOptions,
    RunMarker,
    end_with_agent,
    ensure_holder,
    load_secret,
    socket_path,
)
from thinwire.checkpoint.holder.store import SLOTS_PER_SHARD
from thinwire.checkpoint.holder.version import ShardId, topology_digest
from thinwire.checkpoint.options import Storage
from thinwire.checkpoint.pacing.counters import BusySampler, TransmitCounters, interface_to
from thinwire.checkpoint.placement import replicas_of_ranks
from thinwire.checkpoint.state.layout import aligned
from thinwire.comm.hosts import boot_id, network_identity, numbered, ranks_of_hosts
from thinwire.errors import LostPeerError, ThinwireError, logger

_PAGE_BYTES = 4096
LAYOUT_BYTES = 16 << 10  # grows with the first version
_BIND = (
    "end it with: thinwire holder --stop, and start one with --bind ADDRESS, or torchrun's thinwire rendezvous with"
    " --local-addr ADDRESS or THINWIRE_BIND"
)
_JOBS: dict[int, str] = {}  # by process, because a forked one is another job


def room_bytes(payload_bytes: int) -> int:
    """Return the capacity of a slot in bytes, up to an eighth more, so that similar states get the same slots."""
    granule = max(_PAGE_BYTES, 1 << max(0, payload_bytes.bit_length() - 4))
    return max(1, -(-payload_bytes // granule)) * granule


def holders_of(holders: Sequence[str], replicas: int, domains: Sequence[str] | None = None) -> list[list[str]]:
    """Return for each rank the addresses of the holders of its shard, its own first.

    ``holders`` and ``domains`` have, for each rank, the address of its host's holder and its failure domain. Ranks with
    one holder are one machine. ``replicas`` counts the copies of a shard, its own included.
    """
    machines = ranks_of_hosts(numbered(holders))
    labels = None if domains is None else [domains[ranks[0]] for ranks in machines]
    return [[holders[peer] for peer in peers] for peers in replicas_of_ranks(machines, replicas, labels)]


def kept_once(
    rank: int,
    holders: Sequence[str],
    commons: Sequence[tuple[int, int]],
    replicas: int,
    domains: Sequence[str] | None = None,
) -> Common | None:
    """Return what a rank has in common with others, if they are on so many hosts that it need not be sent to any.

    ``commons`` has the group of each rank, named by its first rank, and the bytes that they have in common. Their hosts
    are in as many failure domains as copies would be.
    """
    group, num_bytes = commons[rank] if commons else (0, 0)
    members = [other for other, (its, _) in enumerate(commons) if its == group]
    hosts, labels = [holders[other] for other in members], domains or holders
    spread, possible = {labels[other] for other in members}, min(replicas, len(set(labels)))
    if not num_bytes or len(hosts) < 2 or len(set(hosts)) < replicas or len(spread) < possible:
        return None
    return Common(group, num_bytes, hosts.count(holders[rank]))


class Registration:
    """The connection of this rank to its holder, and the addresses of all others'.

    ``client`` is None while this host has no holder, and ``failure`` why, once it was tried. `connect`, `exchange` and
    `register` are collective.

    ``about`` describes the training; ``topology`` is the digest of that, which names it. ``group`` has its ranks.
    ``leases``: whether this job must be the only one that uses the
    run.

    Whoever chooses the versions to go back to sets ``wanted``, for each holder the digests of those that it keeps or
    gets, ``chosen``, their attempt and step, and ``left``, their topology if it is another one. ``moving``: until
    `release`.

    ``groups``: for each rank the first one that has the same in common with others, and ``common`` what this one has,
    if it is kept once on each host.
    """

    def __init__(
        self, storage: Storage, run_id: str, about: dict[str, Any], group: dist.ProcessGroup, leases: bool = True
    ) -> None:
        domain = storage.domain
        self._path = on_all(group, lambda: socket_path(storage.holder_socket), ValueError)
        self.run_id, self.about = run_id, about
        self.topology = topology_digest(about)
        self.marker = RunMarker(self._path, run_id, Path(storage.disk.directory) if storage.disk else None)
        self._domain = domain if domain is not None else os.environ.get("THINWIRE_DOMAIN", "")
        self.wanted: Mapping[str, Sequence[str]] = {}
        self.chosen: tuple[int, int] | None = None
        self.left: str | None = None
        self.moving = False
        self._domains: list[str] | None = None
        self.group, self.rank = group, dist.get_rank(group)
        self.layout_bytes = LAYOUT_BYTES
        self.groups: list[int] = [0] * dist.get_world_size(group)
        self.common: Common | None = None
        self._commons: list[tuple[int, int]] = []
        self.client: HolderClient | None = None
        self.failure: Exception | None = None
        self.registered = self._is_over = False
        self._room = (0, 0)  # bytes of a payload and of a layout
        self._attempt = -1
        self.holders: list[str] = []
        self._names: dict[str, str] = {}  # of their hosts
        self.peers: list[str] = []
        self.replicas = storage.replicas
        first = gather_json(_JOBS.setdefault(os.getpid(), secrets.token_hex(8)), group)[0]
        self._job = f"{first}/{self.topology}" if leases else ""
        end_with_agent()
        with closed_on_error(self):
            self._connect_all()

    @property
    def here(self) -> str:
        """The address of the holder of this host."""
        return self.holders[self.rank]

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
        self.reconnect(start=True)
        self.exchange()
        if len(set(self.holders)) == 1 and self.replicas > 1:
            self._warn(
                "all ranks are on one machine, so there is nobody to keep a replica: checkpoints survive the death of"
                " processes, not of the machine (pass replicas=1 to say that this is meant)"
            )
            self.replicas = 1
        copies = holders_of(self.holders, self.replicas, self._domains)  # or an error: too few machines
        on_all(self.group, lambda: self._call(copies), ValueError)
        labels = dict(zip(self.holders, self._domains or self.holders, strict=True))
        if sharing := sorted({held[0] for held in copies if len({labels[holder] for holder in held}) < len(held)}):
            self._warn(
                "two copies of one shard are in one failure domain, whose loss would cost both, for the hosts"
                f" {', '.join(sharing[:8])}{' and more' * (len(sharing) > 8)}: spread the job over more domains"
            )

    def _call(self, copies: Sequence[Sequence[str]]) -> None:
        """Have the holder of this host call another one, and those that get its copies. Raises ValueError if one is not
        reached at its address, which is what whoever started it said, or takes no call under this job's secret."""
        hosts = sorted(set(self.holders))
        called = {hosts[hosts.index(self.here) - 1], *(h for held in copies if held[0] == self.here for h in held)}
        called -= {self.here}
        if self.client is not None and self.is_first and called:
            for address, reason in self.client.look(self.run_id, called)[1].items():
                raise ValueError(
                    f"{os.uname().nodename} cannot reach the holder of {self._names[address]} at {address}: {reason}."
                    f" If that is no address on which others reach it, {_BIND}"
                )

    def _warn(self, text: str) -> None:
        if self.rank == 0:
            warnings.warn(text, stacklevel=6)

    def _connect(self, start: bool) -> HolderClient:
        """To the holder of this host, which is started if all ranks of the job are on this host."""
        world_size = str(dist.get_world_size(self.group))
        if start and os.environ.get("LOCAL_WORLD_SIZE") == world_size:
            client = ensure_holder(HolderOptions(socket=str(self._path)))
        elif not self._path.exists():
            raise LostPeerError(
                f"no holder at {self._path} on {os.uname().nodename}: start one on each host, before the trainers,"
                " with: thinwire holder --bind ADDRESS --secret-file FILE --detach (on one host, ranks of torchrun"
                " start it by themselves, and others with LOCAL_WORLD_SIZE set to the number of ranks)"
            )
        else:
            client = HolderClient.connect(self._path, load_secret(self._path))
        with closed_on_error(client):
            if self._job:
                client.join(self.run_id, self._job)
        return client

    def exchange(self) -> None:
        """Gather the addresses of all holders. Raises ValueError on all ranks if one of them is missing."""
        address, error = "", str(self.failure or "the holder of its host is lost")
        if self.client is not None:
            try:
                address = str(self.client.holder_status()["address"])
            except ThinwireError as reason:
                error = str(reason)
        mine = {"address": address, "error": error, "names": [self.run_id, self.topology], "domain": self._domain}
        mine |= {"machine": boot_id() or "", "network": network_identity(), "host": os.uname().nodename}
        gathered = gather_json(mine, self.group)
        for rank, each in enumerate(gathered):
            if each["names"] != gathered[0]["names"]:
                raise ValueError(f"rank {rank} has another run_id, or another model or other parts, than rank 0")
        if failed := [f"rank {rank}: {each['error']}" for rank, each in enumerate(gathered) if not each["address"]]:
            raise ValueError("; ".join(failed[:4]))
        self.holders = [each["address"] for each in gathered]
        labels = [each["domain"] or each["address"] for each in gathered]
        self._domains = labels if any(each["domain"] for each in gathered) else None
        first = {each["address"]: each for each in reversed(gathered)}
        self._names = {address: each["host"] for address, each in first.items()}
        local = next((holder for holder in self.holders if is_loopback(parse_address(holder)[0])), None)
        where = "network" if len(first) > 1 else "machine"  # containers may share one holder by its socket
        if local is not None and len({each[where] for each in gathered}) > 1:
            raise ValueError(f"other hosts cannot reach the holder at {local}: {_BIND}")
        for each in gathered:
            address = each["address"]
            if first[address]["machine"] != each["machine"]:
                raise ValueError(f"{self._names[address]} and {each['host']} have their holders at {address}: {_BIND}")

    def reconnect(self, start: bool = False) -> None:
        """Connect if necessary and possible, or with ``start`` to a holder that this job starts; not collective."""
        if self.client is not None and self.client.is_closed:
            self.close()
        if self.client is None:
            try:
                self.client, self.failure = self._connect(start), None
            except (ThinwireError, ValueError, OSError) as error:
                self.failure = error
        if self._is_over:  # `close` came meanwhile, in another thread
            self.close()

    def close(self, for_good: bool = False) -> None:
        """Close the connection, also to a holder that is gone; ``for_good``: `reconnect` keeps none any more. Not
        collective."""
        self.registered, self._is_over = False, self._is_over or for_good
        client, self.client = self.client, None
        if client is not None:
            client.close()

    def has_room(self, payload_bytes: int, shared_bytes: int = 0) -> bool:
        """Return whether this rank has slots, and they are large enough for a state of that size (0: not yet known), of
        which other ranks have ``shared_bytes`` too."""
        if self.common is not None and payload_bytes:
            if shared_bytes != self.common.payload_bytes:
                return False
            payload_bytes -= aligned(shared_bytes)
        return self.registered and payload_bytes <= self._room[0] and self.layout_bytes <= self._room[1]

    def share(self, chunks: int) -> tuple[int, int]:
        """Return the chunks that this rank writes of those that it has in common with others: from, to before."""
        mine = self.groups[self.rank]
        here = [rank for rank, its in enumerate(self.groups) if its == mine and self.holders[rank] == self.here]
        index = here.index(self.rank)
        return chunks * index // len(here), chunks * (index + 1) // len(here)

    @property
    def has_in_common(self) -> bool:
        """Whether some ranks have something in common with others, as far as that was registered."""
        return any(num_bytes for _, num_bytes in self._commons)

    def _kept_once(self, rank: int) -> Common | None:
        return kept_once(rank, self.holders, self._commons, self.replicas, self._domains)

    def placed(self) -> dict[str, list[int]]:
        """Return for each holder the ranks whose shards are placed there."""
        copies = holders_of(self.holders, self.replicas, self._domains)
        return {holder: [rank for rank, held in enumerate(copies) if holder in held] for holder in self.holders}

    def register(self, payload_bytes: int, attempt: int, commons: Sequence[tuple[int, int]] = ()) -> None:
        """Register slots for a state of that size, here and on the peers; ranks that have them already keep them.

        ``commons``: for each rank its group, named by the first rank of it, and the bytes that it has in common with
        that. Raises ValueError on all ranks, with the reasons, if one of them did not get them.
        """
        before = self.common
        self._commons, self.groups = list(commons), [group for group, _ in commons] or [0] * len(self.holders)
        self.assign(attempt)
        self.common = self._kept_once(self.rank)
        shared_bytes = self.common.payload_bytes if self.common is not None else 0
        peers = holders_of(self.holders, self.replicas, self._domains)[self.rank][1:]
        is_same = peers == self.peers and attempt == self._attempt and self.common == before
        is_kept = is_same and self.has_room(payload_bytes, shared_bytes)
        rest = max(0, payload_bytes - aligned(shared_bytes))
        self._all(lambda: None if is_kept else self._hello(rest, attempt, peers))

    def shortage(self, payload_bytes: int, commons: Sequence[tuple[int, int]] = ()) -> str:
        """Return which holder can never keep a state of that size, by its budget, or an empty text; collective."""
        self._commons, self.groups = list(commons), [group for group, _ in commons] or self.groups
        common = [self._kept_once(rank) for rank in range(len(self.holders))]
        own = common[self.rank]
        rest = payload_bytes - (aligned(own.payload_bytes) if own is not None else 0)
        slot, budget = SlotSize(max(room_bytes(max(0, rest)), self._room[0]), self.layout_bytes), None
        with contextlib.suppress(ThinwireError):
            budget = self.client and int(self.client.holder_status()["budget_bytes"])
        gathered = gather_json([budget, slot.total_bytes, rest], self.group)
        for holder, ranks in self.placed().items():
            budget, _, _ = gathered[self.holders.index(holder)]
            slots = [gathered[rank][1] for rank in ranks]
            once = {each for each, its in zip(common, self.holders, strict=True) if each and its == holder}
            in_common = [SlotSize(each.payload_bytes, 0).total_bytes for each in once]
            needed = SLOTS_PER_SHARD * sum(slots + in_common)
            if budget is not None and needed > budget:
                more = f" and {len(ranks) - 8} more" * (len(ranks) > 8)
                return (
                    f"the holder at {holder} has a memory budget of {budget:,} bytes and needs {needed:,}, which is"
                    f" {SLOTS_PER_SHARD} slots for each of the {len(ranks)} shards that it keeps (of ranks"
                    f" {', '.join(map(str, ranks[:8]))}{more}), and for the {sum(in_common):,} bytes that its ranks"
                    f" have in common with others. A slot has the rest of its rank's state, up to an eighth more, and"
                    f" {self.layout_bytes:,} for the layout, and some pages: {slots[0]:,}"
                    f" for the {gathered[ranks[0]][2]:,} of rank {ranks[0]}. Start the holder with"
                    f" --memory-budget={needed} or more, or pass fewer replicas"
                )
        return ""

    def assign(self, attempt: int) -> None:
        """Tell the holders which shards belong where, and what stays until all of them are there; collective.

        Raises ValueError on all ranks.
        """
        self.reconnect()  # after an attempt that failed
        self._all(self.exchange)
        self._all(lambda: self._assign(attempt))
        self.moving = True

    def _assign(self, attempt: int) -> None:
        if self.client is not None and self.is_first:
            placed = [ShardId(self.run_id, self.topology, rank) for rank in self.placed()[self.here]]
            here = [rank for rank, holder in enumerate(self.holders) if holder == self.here]
            groups = {each.group for each in map(self._kept_once, here) if each is not None}
            groups |= {self.groups[rank] for rank in here if self.has_in_common and self.chosen is not None}
            placed += [placed[0].common_id(group) for group in sorted(groups)]
            self.client.assign(self.run_id, placed, self.wanted.get(self.here, ()), attempt, self.chosen)

    def release(self) -> None:
        """Have this host free what belongs elsewhere; when all ranks know that all copies are there."""
        self.moving, self.wanted = False, {}
        if self.client is not None and self.is_first:
            topologies = [self.topology, *([self.left] if self.left is not None else [])]
            self.client.release(self.run_id, topologies)

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

        on_all(self.group, guarded, ValueError)

    def _hello(self, payload_bytes: int, attempt: int, peers: list[str]) -> None:
        if self.registered:  # a connection has one shard, and its peers stay
            self.close()
        self.reconnect()
        if self.client is None:
            raise ValueError(str(self.failure))
        room = max(room_bytes(payload_bytes), self._room[0]), self.layout_bytes
        self.client.hello(self.run_id, self.about, self.rank, room[0], peers, attempt, room[1], self.common)
        for address, reason in self.client.unreachable.items():
            logger.warning("the holder at %s cannot be reached yet: %s", address, reason)
        self.registered, self._room, self.peers, self._attempt = True, room, peers, attempt
