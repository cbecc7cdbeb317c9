"""What ranks have in common is on each host once, sealed by its ranks together, and filled in stripes."""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.checkpoint.holder import sessions
from thinwire.checkpoint.holder.client import Common, HolderClient, SlotWriter
from thinwire.checkpoint.holder.frames import Connection, FrameKind
from thinwire.checkpoint.holder.server import Holder, HolderConfig, _Fetch
from thinwire.checkpoint.holder.slots import Slot, SlotSize, chunk_crcs
from thinwire.checkpoint.holder.store import Holding, Shard, Store
from thinwire.checkpoint.holder.version import CHUNK_BYTES, Manifest, ShardId, Version, stored_steps, topology_digest
from thinwire.errors import CorruptMessageError, ThinwireError

SECRET = b"a secret of the tests, long enough"
TOPOLOGY = {"world_size": 2}
SHARD = ShardId("run", topology_digest(TOPOLOGY), -1)
COMMON_BYTES = CHUNK_BYTES + 5000


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[[str], Holder]]:
    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(
            Holder(HolderConfig(socket=str(tmp_path / name), secret=SECRET, budget_bytes=1 << 30, drain_seconds=0))
        )


def whole(step: int) -> bytes:
    return bytes((step + i) % 251 for i in range(997)) * (COMMON_BYTES // 997 + 1)


def alike_of(payload: bytes, step: int) -> Manifest:
    payload = payload[:COMMON_BYTES]
    crcs = [zlib.crc32(payload[i : i + CHUNK_BYTES]) for i in range(0, COMMON_BYTES, CHUNK_BYTES)]
    return Manifest.stated(SHARD, step, 1, COMMON_BYTES, crcs)


class Ranks:
    """The ranks of one host. Each writes its part of what all of them have in common."""

    def __init__(self, holder: Holder, count: int = 2, replicas: tuple[str, ...] = ()) -> None:
        self.count, self.clients = (
            count,
            [HolderClient.connect(holder.config.socket_path, SECRET) for _ in range(count)],
        )
        for owner, client in enumerate(self.clients):
            common = Common(0, COMMON_BYTES, count)
            client.hello("run", TOPOLOGY, owner, 100, replicas, attempt=1, layout_bytes=100, common=common)

    def begin(self, owner: int, step: int, keep: int | None = None) -> SlotWriter:
        writer = self.clients[owner].slot(step, keep)
        assert writer is not None
        assert writer.common is not None
        return writer

    def write(self, owner: int, step: int, payload: bytes, keep: int | None = None) -> SlotWriter:
        writer = self.begin(owner, step, keep)
        bounds = [COMMON_BYTES * each // self.count for each in (owner, owner + 1)]
        assert writer.common is not None
        writer.common[slice(*bounds)] = payload[slice(*bounds)]
        writer.payload[:100] = bytes([owner]) * 100
        return writer

    def store(self, step: int, keep: int | None = None) -> None:
        for owner in range(self.count):
            self.write(owner, step, whole(step), keep).publish(b"{}", 100, alike=alike_of(whole(step), step))
        wait_for(lambda: all(client.status()["newest_local"] == step for client in self.clients))

    def steps(self) -> set[tuple[int, int]]:
        return {(version.shard.owner, version.step) for version in self.clients[0].inventory("run")}

    def close(self) -> None:
        for client in self.clients:
            client.close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_is_a_version_once_all_ranks_of_the_host_have_published_it_and_takes_two_slots(
    host: Callable[[str], Holder],
) -> None:
    holder = host("a")
    ranks = Ranks(holder)
    first = ranks.write(0, 1, whole(1))
    first.publish(b"{}", 100, alike=alike_of(whole(1), 1))
    assert ranks.steps() == set(), "the other rank has not written its part"
    ranks.write(1, 1, whole(1)).publish(b"{}", 100, alike=alike_of(whole(1), 1), wait=True)
    wait_for(lambda: ranks.steps() == {(-1, 1), (0, 1), (1, 1)})
    for step in (2, 3, 4):
        ranks.store(step, step - 1)
    assert ranks.steps() == {(owner, step) for owner in (-1, 0, 1) for step in (3, 4)}
    slots = 2 * SlotSize(COMMON_BYTES, 0).total_bytes + 4 * SlotSize(100, 100).total_bytes
    assert ranks.clients[0].holder_status()["used_bytes"] == slots
    (version,) = (each for each in ranks.clients[1].inventory("run") if (each.shard.owner, each.step) == (1, 4))
    with ranks.clients[1].open(version) as reader:
        assert reader.common is not None
        assert bytes(reader.common) == whole(4)[:COMMON_BYTES]
        reader.verify()
    ranks.close()


def test_a_rank_that_dies_as_another_begins_leaves_no_slot_busy(
    host: Callable[[str], Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never writes its part, so the other would wait with its slots, also in the next start, which has none then."""
    ranks, begin = Ranks(holder := host("a")), Store.begin
    ranks.store(1)

    def dying(store: Store, shard: Shard, keep: tuple[int, int] | None) -> Holding | None:
        if shard.id == SHARD:
            ranks.clients[1].close()
            wait_for(lambda: len(shard.writers) == 1)
        return begin(store, shard, keep)

    monkeypatch.setattr(Store, "begin", dying)
    if (writer := ranks.clients[0].slot(2, 1)) is not None:
        writer.publish(b"{}", 100, alike=alike_of(whole(2), 2))
    monkeypatch.undo()
    ranks.close()
    again = Ranks(holder)
    assert [client.status()["free"] for client in again.clients] == [True, True]
    again.store(3, 1)
    again.close()


def test_ranks_of_a_host_that_differ_make_no_version_and_what_was_there_stays(host: Callable[[str], Holder]) -> None:
    ranks = Ranks(host("a"))
    ranks.store(1)
    ranks.store(2, 1)
    flipped = bytearray(whole(3))
    flipped[77] ^= 1
    for owner, payload in enumerate((whole(3), bytes(flipped))):
        ranks.write(owner, 3, payload, 2).publish(b"{}", 100, alike=alike_of(payload, 3))
    wait_for(lambda: all(client.status()["failed"] == [1, 3] for client in ranks.clients))
    assert ranks.steps() == {(owner, 2) for owner in (-1, 0, 1)}
    ranks.store(4, 2)
    assert ranks.steps() == {(owner, step) for owner in (-1, 0, 1) for step in (2, 4)}
    ranks.close()


@pytest.mark.parametrize("ending", ["dies", "gives up", "stays away", "goes on", "lies"])
def test_a_rank_that_does_not_write_its_part_keeps_no_other_waiting(host: Callable[[str], Holder], ending: str) -> None:
    ranks = Ranks(host("a"), 3)
    ranks.store(1)
    for owner in (0, 1):
        ranks.write(owner, 2, whole(2), 1).publish(b"{}", 100, alike=alike_of(whole(2), 2))
    if ending in ("gives up", "lies"):
        writer = ranks.write(2, 2, whole(2), 1)
        if ending == "lies":
            with pytest.raises(ValueError, match=r"alike is of .* step 1"):
                writer.publish(b"{}", 100, alike=alike_of(whole(1), 1))
        writer.abandon()
    elif ending == "dies":
        ranks.clients[2].close()
    elif ending == "stays away":
        ranks.clients[2].leave(2)
    else:
        ranks.begin(2, 3, 1)
    wait_for(lambda: ranks.clients[0].status()["failed"] == [1, 2])
    assert ranks.steps() == {(owner, 1) for owner in (-1, 0, 1, 2)}
    ranks.close()


@pytest.mark.parametrize("coded", [False, True])
def test_what_ranks_have_alike_is_digested_once_also_where_it_is_kept_with_each_rank(
    host: Callable[[str], Holder], coded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[int] = []

    def count(payload: memoryview, chunk_bytes: int = CHUNK_BYTES) -> tuple[int, ...]:
        digested.append(len(payload))
        return chunk_crcs(payload, chunk_bytes)

    monkeypatch.setattr("thinwire.checkpoint.holder.slots.chunk_crcs", count)
    payload = whole(1)[:COMMON_BYTES] + bytes(100)
    size = len(payload)
    with HolderClient.connect(host("a").config.socket_path, SECRET) as client:
        client.hello("run", TOPOLOGY, 0, size, attempt=1, layout_bytes=100)
        writer = client.slot(1)
        assert writer is not None
        writer.payload[:size] = payload
        writer.publish(b"{}", size, True, [size] if coded else [], alike_of(whole(1), 1))
        assert digested == [size if coded else size - CHUNK_BYTES], "a whole chunk of what ranks have alike"
        (version,) = client.inventory("run")
        assert version.shared == alike_of(whole(1), 1).version.digest
        with client.open(version) as reader:
            assert bytes(reader.payload) == payload
            reader.verify()


@pytest.mark.parametrize("ending", ["stays away", "is lost"])
def test_a_rank_that_is_gone_before_the_others_begin_keeps_none_of_them_waiting(
    host: Callable[[str], Holder], ending: str
) -> None:
    """Its notice comes before their first request, so there is no version yet that it could give up."""
    holder = host("a")
    ranks = Ranks(holder, 3)
    ranks.store(1)
    if ending == "stays away":
        ranks.clients[2].leave(2)
    else:
        ranks.clients[2].close()
        shard = holder.store.shards[ShardId("run", SHARD.topology, 2)]
        wait_for(lambda: shard.trainer is None)
    assert [ranks.clients[owner].slot(2, 1) for owner in (0, 1)] == [None, None]
    assert all(ranks.clients[owner].status()["free"] for owner in (0, 1)), "its slot waits for the rank that is gone"
    assert ranks.steps() == {(owner, 1) for owner in (-1, 0, 1, 2)}
    if ending == "stays away":
        ranks.store(3, 1)
    ranks.close()


def test_a_peer_sends_nothing_that_ranks_have_in_common(host: Callable[[str], Holder]) -> None:
    """Each host makes it itself, and what arrived would replace what trainers here are writing."""
    holder, peer = host("a"), host("b")
    with contextlib.closing(peer.call(holder.address)) as connection:
        request = {"shard": SHARD.to_json(), **SlotSize(100, 0).to_json()}
        with pytest.raises(ValueError, match="in common are not sent"):
            connection.request("register", request)
    assert SHARD not in holder.store.shards


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["publish", "abandon", "die"])), max_size=14), st.data())
def test_whatever_ranks_do_a_complete_version_is_what_all_of_them_wrote(
    acts: list[tuple[int, str]], data: st.DataObject
) -> None:
    """The law of a gathering: complete only if all members said the same, each hears it once, no slot stays busy."""
    store = Store(1 << 24)
    shard = store.register(SHARD, SlotSize(100, 0))
    shard.writers = dict.fromkeys(range(3), 1)
    learned: dict[tuple[int, int], list[bool]] = {}
    step = 1
    said: dict[int, int] = {}
    for owner, act in acts:
        gathering = store.gather(shard, (1, step), 3)
        if gathering is None or owner in said:
            step, said = step + 1, {}
            continue
        crc = data.draw(st.sampled_from([7, 7, 7, 8]))
        if act == "publish":
            said[owner] = crc
            outcome = learned.setdefault((step, owner), [])
            manifest = Manifest.stated(SHARD, step, 1, 100, [crc])
            store.contribute(shard, gathering, owner, manifest, outcome.append)
        else:
            store.end_gathering(shard, False)
        if len(said) == 3 or shard.gathering is None:
            complete = len(said) == 3 and len(set(said.values())) == 1
            assert store.shards[SHARD].complete()[-1][1].step == step if complete else True
            assert all(learned[step, each] == [complete] for each in said)
            step, said = step + 1, {}
    store.end_gathering(shard, False)
    assert all(len(outcome) == 1 for outcome in learned.values())
    assert not any(holding.busy for holding in shard.holdings)
    store.close()


def listed(client: HolderClient) -> Version:
    (version,) = (each for each in client.inventory("run", verify=False) if each.shard.owner < 0)
    return version


def stored_on(sources: list[Holder]) -> Version:
    """The version that ranks have stored on each of these."""
    for source in sources:
        ranks = Ranks(source)
        ranks.store(1)
        version = listed(ranks.clients[0])
        ranks.close()
    return version


@pytest.mark.parametrize("lost", ["none", "one", "all"])
def test_a_lost_host_is_filled_in_stripes_from_all_that_have_it(
    host: Callable[[str], Holder], lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.checkpoint.holder.server._STRIPE", 1)
    sources = [host(name) for name in "abc"]
    version = stored_on(sources)
    addresses = [source.address for source in sources]
    for source in sources[: {"none": 0, "one": 1, "all": 3}[lost]]:
        source.stop()
    with HolderClient.connect(host("new").config.socket_path, SECRET) as client:
        if lost == "all":
            with pytest.raises(ThinwireError):
                client.fetch(version, *addresses)
            assert client.inventory("run") == []
            return
        assert client.fetch(version, *addresses)["bytes"] == COMMON_BYTES
        assert client.inventory("run") == [version]
        assert client.fetch(version, *addresses)["bytes"] == 0
    served = [source.status()["bytes_served"] for source in sources if not source.stopping.is_set()]
    assert sum(served) == COMMON_BYTES


def test_sources_serve_at_once_and_one_that_does_not_answer_delays_nobody(
    host: Callable[[str], Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first source answers after the version is here, and the others begin their first stripes together."""
    monkeypatch.setattr("thinwire.checkpoint.holder.server._STRIPE", 1)
    sources, new = [host(name) for name in "abc"], host("new")
    version = stored_on(sources)
    is_here, call, together = threading.Event(), new.call, threading.Barrier(2, timeout=20)
    pull, began = _Fetch._pull, set[int]()

    def call_slowly(address: str, seconds: float | None = None) -> Connection:
        if address == sources[0].address:
            assert is_here.wait(30)
        return call(address, seconds)

    def pull_together(self: _Fetch, connection: Connection, first: int, last: int) -> None:
        if id(connection) not in began:
            began.add(id(connection))
            together.wait()
        pull(self, connection, first, last)

    monkeypatch.setattr(new, "call", call_slowly)
    monkeypatch.setattr(_Fetch, "_pull", pull_together)
    try:
        with HolderClient.connect(new.config.socket_path, SECRET) as client:
            assert client.fetch(version, *(source.address for source in sources))["bytes"] == COMMON_BYTES
            assert client.inventory("run") == [version]
    finally:
        is_here.set()
    served = [source.status()["bytes_served"] for source in sources]
    assert served[0] == 0
    assert min(served[1:]) > 0


@pytest.mark.slow
def test_a_source_that_stalls_in_a_stripe_gives_it_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.checkpoint.holder.server._STRIPE", 1)
    goes_on, send = threading.Event(), sessions.send_payload
    served: list[int] = []

    def send_some(connection: Connection, slot: Slot, *others: object, chunks: tuple[int, int]) -> object:
        served.append(chunks[0])
        if len(served) == 1:
            connection.send(FrameKind.DATA, {}, slot.payload(1000))
            assert goes_on.wait(60)
        return send(connection, slot, *others, chunks=chunks)

    monkeypatch.setattr("thinwire.checkpoint.holder.sessions.send_payload", send_some)
    with contextlib.ExitStack() as stack:
        config = HolderConfig(socket="", secret=SECRET, budget_bytes=1 << 30, drain_seconds=0, timeout_seconds=600.0)
        a, b, new = (
            stack.enter_context(Holder(replace(config, socket=str(tmp_path / name)))) for name in ("a", "b", "new")
        )
        stack.callback(goes_on.set)
        version = stored_on([a, b])
        with HolderClient.connect(new.config.socket_path, SECRET) as client:
            assert client.fetch(version, a.address, b.address)["bytes"] == COMMON_BYTES
            with client.open(version) as reader:
                reader.verify()
    assert sorted(served) in ([0, 0, 1], [0, 1, 1])


def test_a_source_whose_bytes_were_altered_gives_its_stripes_to_the_others(host: Callable[[str], Holder]) -> None:
    sources = [host(name) for name in "ab"]
    version = stored_on(sources)
    shard = sources[0].store.shards[SHARD]
    holding = shard.find(version.digest)
    assert holding is not None
    with holding.slot.payload() as payload:
        payload[5] ^= 1
    with HolderClient.connect(host("new").config.socket_path, SECRET) as client:
        assert client.fetch(version, sources[0].address, sources[1].address)["bytes"] == COMMON_BYTES
        with client.open(version) as reader:
            assert bytes(reader.payload) == whole(1)[:COMMON_BYTES]
    with HolderClient.connect(host("other").config.socket_path, SECRET) as client:
        with pytest.raises(CorruptMessageError, match="altered"):
            client.fetch(version, sources[0].address)
        assert client.inventory("run") == []


def test_ranks_of_a_new_host_fetch_it_once(host: Callable[[str], Holder]) -> None:
    source, new = host("a"), host("new")
    ranks = Ranks(source)
    ranks.store(1)
    version = listed(ranks.clients[0])
    ranks.close()
    moved: list[int] = []

    def fetch() -> None:
        with HolderClient.connect(new.config.socket_path, SECRET) as client:
            moved.append(client.fetch(version, source.address)["bytes"])

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(moved) == [0, 0, 0, COMMON_BYTES]


def test_a_step_is_whole_if_somebody_has_what_its_owners_have_in_common() -> None:
    alike = alike_of(whole(1), 1).version
    own = [Version(ShardId("run", SHARD.topology, owner), 1, 1, 9, f"{owner:016}", shared=alike.digest,
                   common_bytes=COMMON_BYTES) for owner in (0, 1)]  # fmt: skip
    (step,) = stored_steps({"a": own, "b": [*own, alike]})
    assert (step.lacking, step.certified, step.common) == ([], True, {alike.digest: ("b",)})
    (step,) = stored_steps({"a": own})
    assert step.lacking == [0, 1]
