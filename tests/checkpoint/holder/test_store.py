"""Which version of a shard means what: which one to go back to, which to send on, and which to keep out."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.checkpoint.holder.slots import SlotSize, SlotView, choose_slot
from thinwire.checkpoint.holder.store import Assignment, Holding, Shard, Store
from thinwire.checkpoint.holder.version import NONCE_BITS, Manifest, ShardId

SHARD = ShardId("run", "a1", 0)
SIZE = SlotSize(100, 10)
Order = tuple[int, int]


class Peer:
    """A replica that has said what it has."""

    def __init__(self) -> None:
        self.held: set[str] = set()

    def is_settled(self, digest: str) -> bool:
        return digest in self.held

    def has(self, digest: str) -> bool:
        return digest in self.held

    def stop(self) -> None:
        """Nothing runs."""


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(1 << 20)
    yield made
    made.close()


def put(store: Store, *orders: Order, keep: Order | None = None) -> Shard:
    """A shard with these versions, (attempt, step), as if they had been written one after the other."""
    shard = store.register(SHARD, SIZE)
    for order in orders:
        assert write(store, shard, order, keep) is not None
    return shard


def write(
    store: Store, shard: Shard, order: Order, keep: Order | None = None, recovering: bool = False, own: bool = True
) -> Holding | None:
    holding = store.begin(shard, keep, None if recovering or own else order, recovering)
    if holding is not None:
        manifest = Manifest(SHARD, order[1], order[0], 0, 1, (), 0, zlib.crc32(b""))
        store.seal(holding, manifest, b"")
    return holding


def orders(shard: Shard) -> list[Order]:
    return [manifest.order for _, manifest in shard.complete()]


def test_an_older_version_never_takes_the_place_of_a_newer_one(store: Store) -> None:
    """But for what is fetched to go back to it."""
    shard = put(store, (1, 7), (1, 8))
    assert shard.is_superseded((0, 9))
    assert shard.is_superseded((1, 6))
    assert not shard.is_superseded((1, 9))
    assert write(store, shard, (0, 9), own=False) is None
    assert orders(shard) == [(1, 7), (1, 8)]
    assert write(store, shard, (1, 9), own=False) is not None
    assert orders(shard) == [(1, 8), (1, 9)]
    assert write(store, shard, (0, 9), recovering=True) is not None
    assert orders(shard) == [(0, 9), (1, 9)]


def test_a_second_slot_is_not_waited_for_while_others_get_theirs(store: Store) -> None:
    shard = put(store)
    shard.holdings.pop().slot.close()
    said: list[str] = []
    asks = threading.Thread(target=lambda: said.append(store.fill_up(shard)), daemon=True)
    with store._registering:
        asks.start()
        asks.join(5)
        assert (said, len(shard.holdings)) == ([""], 1)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_second_slot_does_not_wait_for_what_ranks_may_have_in_common(store: Store, is_there: bool) -> None:
    """Where that is kept with each rank it never comes: there were no checkpoints any more, for want of memory."""
    placed, common = frozenset({SHARD, SHARD.common_id(0)}), []
    store.assign("run", Assignment(placed, frozenset({"0" * 16}), 1 << NONCE_BITS, (0, 5)))
    if is_there:
        common.append(store.register(SHARD.common_id(0), SIZE))
    own = store.register(SHARD, SIZE)
    store.release("run", [SHARD.topology])
    assert [len(shard.holdings) for shard in (own, *common)] == [2] * (1 + is_there)
    assert store.fill_up(own) == ""


def test_an_older_version_may_have_an_empty_slot(store: Store) -> None:
    shard = put(store, (1, 8))
    assert not shard.is_superseded((1, 7))
    assert write(store, shard, (1, 7), own=False) is not None
    assert orders(shard) == [(1, 7), (1, 8)]


def test_a_version_of_an_owner_who_lives_here_comes_from_him_only(store: Store) -> None:
    shard = put(store, (0, 1))
    assert not shard.is_superseded((5, 5))
    shard.trainer = object()
    assert shard.is_superseded((5, 5))


def test_what_is_fetched_finds_a_slot_though_nothing_was_sent_on(store: Store) -> None:
    """A host comes back with versions in all slots that nobody ever got."""
    shard = put(store, (0, 5), (0, 6))
    shard.replicas = {"peer": Peer()}
    assert write(store, shard, (1, 12)) is None
    assert write(store, shard, (1, 12), recovering=True) is not None
    assert orders(shard) == [(0, 6), (1, 12)]


def test_the_step_to_keep_is_that_of_this_history(store: Store) -> None:
    """Step 12 was written by attempt 1, given up; training went on from step 12 of attempt 0."""
    shard = put(store, (0, 12), (1, 12))
    shard.keep = (0, 12)
    assert shard.order_of(12, attempt=2) == (0, 12)
    assert shard.order_of(12, attempt=1) == (1, 12)
    assert shard.order_of(13, attempt=2) is None
    shard.keep = None
    assert shard.order_of(12, attempt=2) is None


@pytest.mark.parametrize(
    ("keep", "attempt", "wanted"),
    [
        (None, 0, [(0, 5), (0, 6), (1, 7)]),
        ((0, 6), 0, [(0, 6), (1, 7)]),
        ((0, 6), 1, [(0, 6), (1, 7)]),
        ((0, 5), 1, [(0, 5), (1, 7)]),
        (None, 1, [(1, 7)]),
        ((1, 7), 1, [(1, 7)]),
    ],
)
def test_what_is_worth_sending(store: Store, keep: Order | None, attempt: int, wanted: list[Order]) -> None:
    """What training can go back to: not what is older than that, nor what was given up."""
    shard = store.register(SHARD, SIZE)
    shard.keep, shard.attempt = keep, attempt
    manifests = [Manifest(SHARD, step, of, 0, 1, (), 0, 0) for of, step in ((0, 5), (0, 6), (1, 7))]
    assert [manifest.order for manifest in manifests if shard.is_wanted(manifest)] == wanted


def test_what_was_given_up_makes_room_though_it_was_never_sent(store: Store) -> None:
    shard = put(store, (0, 5), (0, 6))
    shard.replicas = {"peer": Peer()}
    assert write(store, shard, (1, 6), keep=(0, 5)) is None
    shard.keep, shard.attempt = (0, 5), 1
    assert write(store, shard, (1, 6), keep=(0, 5)) is not None
    assert orders(shard) == [(0, 5), (1, 6)]


views = st.builds(SlotView, st.none() | st.tuples(st.integers(0, 2), st.integers(0, 4)), st.booleans(), st.booleans())
an_order = st.tuples(st.integers(0, 2), st.integers(0, 4))


@given(st.lists(views, min_size=2, max_size=3), st.none() | an_order, an_order)
def test_whatever_comes_late_costs_nothing_newer(slots: list[SlotView], keep: Order | None, before: Order) -> None:
    index = choose_slot(slots, keep, before)
    unlimited: Callable[[], int | None] = lambda: choose_slot(slots, keep)  # noqa: E731
    if index is None:
        chosen = unlimited()
        assert chosen is None or slots[chosen].order is None or slots[chosen].order >= before  # type: ignore[operator]
    elif slots[index].order is not None:
        assert slots[index].order < before  # type: ignore[operator]
