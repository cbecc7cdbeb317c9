"""Holders of shards: hosts are replaced one after the other, in any order, within the memory that the guide names."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holders import placed_at
from thinwire.checkpoint import Checkpointer, Storage
from thinwire.checkpoint.choice import choose
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.slots import SlotSize
from thinwire.checkpoint.holder.store import Assignment, Holding, Shard, Store
from thinwire.checkpoint.holder.version import Manifest, ShardId, Version, next_attempt
from thinwire.checkpoint.registration import holders_of, kept_once

SIZE = SlotSize(100, 10)
RUN, TOPOLOGY = "run", "a1"


class Link:
    """A sender to a peer's store, which knows what that one said it has."""

    def __init__(self, store: Store, shard_id: ShardId) -> None:
        self.store, self.shard_id = store, shard_id
        if not store.is_placed(shard_id):
            raise ValueError("not placed here")
        shard = store.register(shard_id, SIZE)
        self.held = {manifest.version.digest for _, manifest in shard.complete()}

    def has(self, digest: str) -> bool:
        return digest in self.held

    is_settled = has

    def stop(self) -> None:
        """Nothing runs."""

    def send(self, holding: Holding, keep: tuple[int, int] | None) -> bool:
        """As a holder receives: whether the peer has it now."""
        manifest = holding.manifest
        assert manifest is not None
        shard = self.store.shards[self.shard_id]
        if not any(held == manifest for _, held in shard.complete()):
            if shard.is_superseded(manifest.order) and not self.store.wants(manifest.version):
                return False
            if not put(self.store, shard, manifest, keep, before=manifest.order):
                return False
        self.held.add(manifest.version.digest)
        return True


def put(
    store: Store,
    shard: Shard,
    manifest: Manifest,
    keep: tuple[int, int] | None = None,
    before: tuple[int, int] | None = None,
    recovering: bool = False,
) -> bool:
    holding = store.begin(shard, keep, before, recovering, manifest.version.digest)
    if holding is None:
        return False
    store.seal(holding, manifest, b"")
    return True


@dataclass
class Cluster:
    """Hosts with exactly two slots for each shard that they hold, in the protocol of a Checkpointer, in one thread.

    ``safe``: the newest step of which all hosts had their copies; ``lost``: hosts lost since.
    """

    hosts: int
    replicas: int
    ranks_per_host: int
    stores: dict[str, Store] = field(default_factory=dict)
    safe: int | None = None
    lost: int = 0

    def __post_init__(self) -> None:
        for number in range(self.hosts):
            self.add(f"h{1000 * number:04}")

    def add(self, name: str) -> None:
        self.stores[name] = Store(2 * self.replicas * self.ranks_per_host * SIZE.total_bytes)

    def lose(self, name: str) -> None:
        self.stores.pop(name).close()
        self.lost += 1

    def rename(self, random: Random) -> None:
        """The same hosts, and all ranks on others of them."""
        names, stores = list(self.stores), list(self.stores.values())
        random.shuffle(stores)
        self.stores = dict(zip(names, stores, strict=True))

    def check(self) -> None:
        for store in self.stores.values():
            assert store.used_bytes <= store.budget_bytes
            held = sum(h.slot.size.total_bytes for shard in store.shards.values() for h in shard.holdings)
            assert held == store.used_bytes

    def job(self) -> Iterator[int | None]:
        """A start of the training that goes on for ever: it may be killed wherever it yields, which is the step."""
        holders = [name for name in sorted(self.stores) for _ in range(self.ranks_per_host)]
        placed = {name: placed_at(name, holders, self.replicas) for name in holders}
        versions = {name: store.verified(RUN, verify=False) for name, store in self.stores.items()}
        choice = choose(versions, holders, RUN, TOPOLOGY, placed)
        attempt = next_attempt((v.attempt for each in versions.values() for v in each), 7)
        if self.safe is not None and self.lost < self.replicas:
            assert choice.step is not None, choice.reasons
            assert choice.step >= self.safe
        if choice.step is None:
            self.safe = None
        yield choice.step
        for name, store in self.stores.items():
            shards = frozenset(ShardId(RUN, TOPOLOGY, owner) for owner in placed[name])
            chosen = (choice.attempt, choice.step) if choice.step is not None else (-1, -1)
            store.assign(RUN, Assignment(shards, frozenset(choice.wanted_at(name, placed[name])), attempt, chosen))
            yield choice.step
        own: list[tuple[Store, Shard]] = []
        for rank, held_at in enumerate(holders_of(holders, self.replicas)):
            store, shard_id = self.stores[held_at[0]], ShardId(RUN, TOPOLOGY, rank)
            shard = store.register(shard_id, SIZE)
            shard.trainer, shard.role, shard.keep = object(), "own", None
            shard.replicas = {name: Link(self.stores[name], shard_id) for name in held_at[1:]}
            own.append((store, shard))
            yield choice.step
        for rank, (store, shard) in enumerate(own):
            if choice.step is not None:
                self.fetch(store, shard, choice.versions[rank], self.stores[choice.sources[rank]])
                shard.keep = choice.attempt, choice.step
            yield choice.step
        yield from self.train(own, attempt, choice.step or 0)

    def fetch(self, store: Store, shard: Shard, version: Version, source: Store) -> None:
        with source.reading(version) as holding:
            assert holding.manifest is not None
            if not any(held == holding.manifest for _, held in shard.complete()):
                assert put(store, shard, holding.manifest, recovering=True), "a slot for the version to go back to"

    def train(self, own: list[tuple[Store, Shard]], attempt: int, step: int) -> Iterator[int | None]:
        moving = True
        while True:
            for _, shard in own:
                for link in shard.replicas.values():
                    for holding, manifest in shard.complete():
                        if shard.is_wanted(manifest):
                            assert isinstance(link, Link)
                            link.send(holding, shard.keep)
                            yield step
            newest = [shard.newest(replicated=True) for _, shard in own]
            if all(shard.is_safe(attempt) for _, shard in own):
                found = min(step for step in newest if step is not None)
                assert self.safe is None or found >= self.safe or self.lost >= self.replicas
                self.safe, self.lost = found, 0
                if moving:
                    for store in self.stores.values():
                        store.release(RUN, [TOPOLOGY])
                        yield step
                    moving = False
            for store, shard in own:
                store.fill_up(shard)
            assert moving or all(len(s.holdings) == 2 for store in self.stores.values() for s in store.shards.values())
            if all(shard.is_free() for _, shard in own):
                step += 1
                for rank, (store, shard) in enumerate(own):
                    shard.attempt = attempt
                    if self.safe is not None:
                        shard.keep = shard.order_of(self.safe, attempt) or shard.keep
                    manifest = Manifest(ShardId(RUN, TOPOLOGY, rank), step, attempt, 0, 1, (), 0, zlib.crc32(b""))
                    assert put(store, shard, manifest, shard.keep)
                    yield step
            else:
                yield step

    def kill(self) -> None:
        for store in self.stores.values():
            for shard in store.shards.values():
                shard.trainer = None
                shard.unmap(shard)


def run_for(job: Iterator[int | None], turns: int, cluster: Cluster) -> None:
    for _ in range(turns):
        next(job)
        cluster.check()


SHAPES = [(2, 2, 1), (3, 2, 1), (4, 2, 2), (5, 2, 1), (3, 3, 1), (5, 3, 1), (4, 3, 2), (6, 2, 1), (8, 2, 1)]
TURNS = st.integers(0, 40) | st.integers(30, 150)  # until the trainers are killed: before all is in its place, or after


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(SHAPES), st.randoms(use_true_random=False), st.lists(st.integers(0, 150), min_size=2, max_size=11)
)
def test_ten_replacements_fit_into_the_budget(shape: tuple[int, int, int], random: Random, turns: list[int]) -> None:
    """The trainers are killed anywhere, in the middle of a transition too; names move all ranks in every way."""
    cluster = Cluster(*shape)
    for number, each in enumerate(turns):
        job = cluster.job()
        run_for(job, each, cluster)
        cluster.kill()
        if random.random() < 0.5:
            cluster.lose(random.choice(sorted(cluster.stores)))
            cluster.add(f"h{random.randrange(10_000):04}-{number}")
        else:
            cluster.rename(random)
    job = cluster.job()
    run_for(job, 400, cluster)
    assert cluster.safe is not None, "training goes on"
    for store in cluster.stores.values():
        store.close()


def test_copies_are_in_other_domains_than_the_state() -> None:
    holders = ["a:1", "a:1", "b:1", "b:1", "c:1", "d:1"]  # two ranks on a and b, one on c and d
    domains = ["rack 1"] * 4 + ["rack 2"] * 2
    assert [held[1] for held in holders_of(holders, 2)] == ["b:1", "b:1", "a:1", "a:1", "d:1", "c:1"]
    places = holders_of(holders, 2, domains)
    assert all({"a:1", "b:1"} & set(held) and {"c:1", "d:1"} & set(held) for held in places)
    for holder in ("a:1", "b:1", "c:1", "d:1"):
        assert placed_at(holder, holders, 2, domains) == [rank for rank in range(6) if holder in places[rank]]


@pytest.mark.parametrize(
    ("hosts", "groups", "racks", "once"),
    [
        ("aabb", [0, 0, 0, 0], "", True),
        ("aabb", [0, 1, 0, 1], "", True),  # HSDP: each group is on both hosts
        ("aabb", [0, 0, 2, 2], "", False),  # each group is on one host, and two copies are wanted
        ("abcd", [0, 0, 0, 0], "xxyy", True),
        ("abcd", [0, 0, 2, 2], "xxyy", False),  # a rack would take the only two copies with it
        ("abcd", [0, 1, 0, 1], "xxyy", True),
        ("aabb", [0, 0, 0, 0], "xxxx", True),  # there is no other rack
    ],
)
def test_what_is_kept_once_outlives_what_its_copies_would(
    hosts: str, groups: list[int], racks: str, once: bool
) -> None:
    """The hosts, or racks, of a group are as many as the copies that would otherwise be sent."""
    result = [kept_once(rank, hosts, [(each, 100) for each in groups], 2, racks or None) for rank in range(4)]
    assert all((common is not None) == once for common in result)
    assert all(common.members == sum((hosts[rank], groups[rank]) == (hosts[other], groups[other]) for other in range(4))
               for rank, common in enumerate(result) if common is not None)  # fmt: skip


def test_a_reconnect_that_comes_through_after_the_end_leaves_no_lease(alone: None, socket: str) -> None:
    """It runs in the background, as a paused holder answers late: the next job of that name was refused the run."""
    checkpointer = Checkpointer(nn.Linear(2, 2), storage=Storage("run", 1, holder_socket=socket))
    registration = checkpointer._registration
    connect, made = registration._connect, list[HolderClient]()

    def connect_late(start: bool) -> HolderClient:
        made.append(connect(start))
        checkpointer.close()
        return made[0]

    registration.close()  # the holder was lost
    registration._connect = connect_late  # type: ignore[method-assign,assignment]
    registration.reconnect()
    assert registration.client is None
    assert [client.is_closed for client in made] == [True]
