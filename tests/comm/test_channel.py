"""Failures of one rank reach every rank: as an error that names rank and reason, within the timeout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from clocks import PATIENCE
from loopback import LoopbackExchange, run_threads, synchronized
from thinwire import schemes
from thinwire.comm.c10d import unregistered_group
from thinwire.comm.channel import Channel, Draft, Subject, first_difference
from thinwire.comm.process_group import Exchange
from thinwire.errors import CorruptHeaderError, CorruptMessageError, LostPeerError, MismatchError, PeerError
from thinwire.rows.formats import Format, Header, Kind
from thinwire.rows.sparse import SparseRows
from thinwire.sums.schedules import Stages, all_gather
from thinwire.sums.synchronize import agree, synchronize
from thinwire.tune.prices import chosen

EMPTY_DRAFT = Draft(Format.COO, 0, torch.empty(0, dtype=torch.uint8))
SUBJECT = Subject("embedding.weight", "float32 [20, 3]")
TIMEOUT_SECONDS = 2.0


@dataclass
class Fault:
    """Changes the header or the payload of every message of one kind from rank 1 to the ranks ``to``."""

    kind: Kind
    what: str
    change: Callable[[Tensor], Tensor]
    to: Sequence[int] = (0,)
    _expected: set[int] = field(default_factory=set)
    hits: int = 0

    def __call__(self, rank_from: int, rank_to: int, swap_number: int, tensor: Tensor) -> Tensor:
        if rank_from != 1 or rank_to not in self.to:
            return tensor
        if rank_to in self._expected:  # the payload follows its header
            self._expected.remove(rank_to)
            return self._hit(tensor) if self.what == "payload" else tensor
        if tensor.numel() == Header.NUM_BYTES and Header.unpack(tensor.numpy().tobytes()).kind is self.kind:
            self._expected.add(rank_to)
            return self._hit(tensor) if self.what == "header" else tensor
        return tensor

    def _hit(self, tensor: Tensor) -> Tensor:
        self.hits += 1
        return self.change(tensor)


def flip(place: int, bit: int = 0) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[place] ^= 1 << bit
        return tensor

    return change


def reheader(**fields: Any) -> Callable[[Tensor], Tensor]:
    """A header that is well formed, and says something else."""

    def change(tensor: Tensor) -> Tensor:
        header = replace(Header.unpack(tensor.numpy().tobytes()), **fields)
        return torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)

    return change


def rows_of(rank: int) -> SparseRows:
    return SparseRows(torch.arange(rank, 20, 2), torch.ones(len(range(rank, 20, 2)), 3), 20)


def run(scheme: schemes.Scheme, tamper: Fault, world_size: int = 3) -> list[SparseRows | Exception | None]:
    outcomes = run_threads(
        world_size,
        lambda exchange: synchronized(exchange, rows_of(exchange.rank), scheme),
        tamper=tamper,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    assert tamper.hits, "the fault was not injected"
    return outcomes


def disagree(subjects: Sequence[Subject], sequences: Sequence[int]) -> list[Exception | None]:
    def rank(exchange: LoopbackExchange) -> None:
        Channel(exchange, subjects[exchange.rank], sequences[exchange.rank]).open(1)

    return run_threads(len(subjects), rank)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ("float32 [20, 3], scheme=zen", "float32 [20, 4], scheme=zen"),
        ("float32 [20, 3], scheme=zen", "bfloat16 [20, 3], scheme=zen"),
        (f"[20, 3], {schemes.ZEN.describe()}", f"[20, 3], {schemes.AGSPARSE.describe()}"),
        (f"[20, 3], {schemes.ZEN.describe()}", f"[20, 3], {replace(schemes.ZEN, seed=1).describe()}"),
    ],
    ids=["shape", "dtype", "scheme", "seed"],
)
def test_disagreement_is_explained_on_every_rank(theirs: str, mine: str, odd: int) -> None:
    subjects = [Subject("w", mine if rank == odd else theirs) for rank in range(3)]
    for rank, error in enumerate(disagree(subjects, [5, 5, 5])):
        assert isinstance(error, MismatchError)
        assert f"rank {rank}, w" in str(error)
        assert mine in str(error)
        assert theirs in str(error)
        assert f"rank {odd}: {mine}" in str(error)


def test_another_order_of_calls_is_explained_on_every_rank() -> None:
    for error in disagree([SUBJECT] * 3, [7, 7, 8]):
        assert isinstance(error, MismatchError)
        assert "call 7 " in str(error)
        assert "call 8 " in str(error)
    for error in disagree([Subject("a", "same"), Subject("b", "same")], [0, 0]):
        assert isinstance(error, MismatchError)
        assert "rank 0: call 0 on this lane: a" in str(error)
        assert "rank 1: call 0 on this lane: b" in str(error)


def _differs_while_one_is_ahead(exchange: Any) -> str:
    """Rank 0 has begun the next conversation too, where the first is one that ranks disagree about."""
    first = Channel(exchange, Subject("bucket 0", f"of rank {exchange.rank}"), 0)
    second = Channel(exchange, Subject("bucket 1", ""), 1)
    first.begin_open()
    if exchange.rank == 0:
        second.begin_open()
    with pytest.raises(MismatchError) as caught:
        first.settle()
    if exchange.rank == 1:
        second.begin_open()
    second.settle()
    return str(caught.value)


def _over_gloo(store: dist.Store, rank: int) -> str:
    exchange = Exchange(unregistered_group(store, [0, 1], rank, timedelta(seconds=PATIENCE)))
    return _differs_while_one_is_ahead(exchange)


@pytest.mark.parametrize("transport", ["loopback", "gloo"])
def test_disagreement_is_explained_where_one_rank_has_begun_the_next_conversation(transport: str) -> None:
    if transport == "loopback":
        texts = run_threads(2, _differs_while_one_is_ahead)
    else:
        with ThreadPoolExecutor(2) as ranks:
            texts = list(ranks.map(partial(_over_gloo, dist.HashStore()), range(2)))
    for text in map(str, texts):
        assert "rank 0: of rank 0" in text
        assert "rank 1: of rank 1" in text


@pytest.mark.parametrize("description", ["x" * 5000, "ü" * 3000, "line\nline\nline"])
def test_long_and_odd_descriptions(description: str) -> None:
    errors = disagree([Subject("w", description), Subject("w", description + "!")], [0, 0])
    assert all(isinstance(error, MismatchError) for error in errors)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("row id 99 is out of range"), "row id 99 is out of range"),
        (KeyError("no such row"), "KeyError: 'no such row'"),
        (ValueError("é" * 5000), "é" * 2000),
        (ValueError(""), "rank 1 reports:"),
    ],
)
@pytest.mark.parametrize("scheme", ["zen", "agsparse", "dense", "auto", "sparcml", "dense_ring", "zen_elements"])
def test_a_failure_before_sending_reaches_every_rank(scheme: str, error: Exception, reason: str) -> None:
    def rank(exchange: LoopbackExchange) -> SparseRows:
        def prepare() -> SparseRows:
            if exchange.rank == 1:
                raise error
            return rows_of(exchange.rank)

        channel = Channel(exchange, SUBJECT, 0)
        return synchronize(*agree(prepare, scheme, channel, chosen), channel)

    for number, got in enumerate(run_threads(3, rank)):
        if number == 1:
            assert got is error
        else:
            assert isinstance(got, PeerError)
            assert not isinstance(got, LostPeerError)
            assert f"rank {number}, {SUBJECT.name}: rank 1 reports" in str(got)
            assert reason in str(got)


def test_an_unknown_scheme_is_told_to_all() -> None:
    def rank(exchange: LoopbackExchange) -> SparseRows:
        channel = Channel(exchange, SUBJECT, 0)
        scheme = "zenn" if exchange.rank == 1 else "zen"
        return synchronize(*agree(lambda: rows_of(exchange.rank), scheme, channel, chosen), channel)

    first, second = run_threads(2, rank)
    assert isinstance(first, PeerError)
    assert isinstance(second, ValueError)
    assert "zenn" in str(first)


def test_the_conversation_goes_on_after_a_reported_failure() -> None:
    """All ranks have left the failed call at the same place, so the next one works."""

    def rank(exchange: LoopbackExchange) -> list[int]:
        def prepare() -> SparseRows:
            if exchange.rank == 1:
                raise ValueError("not today")
            return rows_of(exchange.rank)

        channel = Channel(exchange, SUBJECT, 0)
        with pytest.raises((ValueError, PeerError)):
            synchronize(*agree(prepare, "zen", channel, chosen), channel)
        return Channel(exchange, SUBJECT, 1).open(exchange.rank)

    assert run_threads(3, rank) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("scheme", [schemes.ZEN, schemes.SPARSE_PS], ids=["zen", "sparse_ps"])
def test_a_bit_flip_on_the_way_to_an_owner_reaches_every_rank(scheme: schemes.Scheme) -> None:
    """The others wait for the owner's total, so they must be told: nobody may wait for the timeout."""
    outcomes = run(scheme, Fault(Kind.PUSH, "payload", flip(3)))
    assert isinstance(outcomes[0], CorruptMessageError)
    assert f"rank 0, table: from rank 1: {'a message whose checksum does not match'}" in str(outcomes[0])
    for other in outcomes[1:]:
        assert isinstance(other, PeerError)
        assert "timeout" not in str(other)
        assert "rank 0 reports" in str(other)
        assert "checksum" in str(other)


def test_a_bit_flip_beside_a_reported_failure_strands_nobody() -> None:
    def rank(exchange: LoopbackExchange) -> SparseRows:
        def prepare() -> SparseRows:
            if exchange.rank == 2:
                raise ValueError("not today")
            return rows_of(exchange.rank)

        channel = Channel(exchange, SUBJECT, 0)
        return synchronize(*agree(prepare, schemes.ZEN, channel, chosen), channel)

    fault = Fault(Kind.PUSH, "payload", flip(3))
    first, second, third = run_threads(3, rank, tamper=fault, timeout_seconds=TIMEOUT_SECONDS)
    assert fault.hits
    assert isinstance(third, ValueError)
    for error in (first, second):
        assert isinstance(error, PeerError)
        assert "rank 2 reports: not today" in str(error)


@pytest.mark.parametrize(
    ("scheme", "kind"), [(schemes.ZEN, Kind.PULL), (schemes.AGSPARSE, Kind.GATHER)], ids=["pull", "gather"]
)
def test_a_bit_flip_in_the_last_payload_is_seen_by_its_receiver(scheme: schemes.Scheme, kind: Kind) -> None:
    """The others have all they need: their sums are right. The lane tells them at its next job."""
    outcomes = run(scheme, Fault(kind, "payload", flip(0, bit=7)))
    assert isinstance(outcomes[0], CorruptMessageError)
    assert all(isinstance(other, SparseRows) for other in outcomes[1:])


def test_every_changed_bit_of_a_payload_is_noticed() -> None:
    for place in range(0, 96, 5):
        fault = Fault(Kind.GATHER, "payload", flip(place, bit=place % 8), to=(0, 2))
        outcomes = run(schemes.AGSPARSE, fault)
        assert isinstance(outcomes[0], CorruptMessageError)
        assert isinstance(outcomes[2], CorruptMessageError)


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.PULL])
@pytest.mark.parametrize("place", [0, 2, 3, 9, 17, 33])
def test_a_bit_flip_in_a_header_ends_the_conversation_everywhere(kind: Kind, place: int) -> None:
    outcomes = run(schemes.ZEN, Fault(kind, "header", flip(place)))
    assert isinstance(outcomes[0], CorruptHeaderError)
    assert "rank 0, table" in str(outcomes[0])
    for other in outcomes[1:]:
        assert isinstance(other, LostPeerError)
        assert "table: rank" in str(other)
        assert "timeout" not in str(other)


@pytest.mark.parametrize("length", [0, 8, 16])
def test_a_truncated_payload_is_noticed(length: int) -> None:
    outcomes = run(schemes.AGSPARSE, Fault(Kind.GATHER, "payload", lambda tensor: tensor[:length]))
    assert isinstance(outcomes[0], CorruptMessageError)
    assert "truncated" in str(outcomes[0])
    assert "rank 1" in str(outcomes[0])


def test_a_truncated_header_is_noticed() -> None:
    outcomes = run(schemes.ZEN, Fault(Kind.PUSH, "header", lambda tensor: tensor[:-8]))
    assert isinstance(outcomes[0], CorruptHeaderError)
    assert all(isinstance(other, LostPeerError) for other in outcomes[1:])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"payload_bytes": 1 << 50}, f"rank 1 announces {1 << 50} bytes"),
        ({"kind": Kind.ERROR, "payload_bytes": 1 << 20}, f"rank 1 announces {1 << 20} bytes"),
        ({"kind": Kind.PULL}, "rank 1 sent PULL, this rank waits for PUSH"),
        ({"payload_bytes": 13}, "rank 1 announces 13 bytes"),
    ],
    ids=["oversized", "oversized_error", "another_kind", "no_multiple_of_8"],
)
def test_a_senseless_announcement_is_refused_before_anything_is_received(fields: dict[str, Any], reason: str) -> None:
    outcomes = run(schemes.ZEN, Fault(Kind.PUSH, "header", reheader(**fields)))
    assert isinstance(outcomes[0], CorruptHeaderError)
    assert reason in str(outcomes[0])
    assert all(isinstance(other, LostPeerError) for other in outcomes[1:])


@pytest.mark.parametrize(
    "change", [{"count": 1}, {"count": 1 << 40}, {"format": Format.BITMAP}, {"format": Format.DENSE}]
)
def test_a_header_that_belies_its_payload_is_refused(change: dict[str, Any]) -> None:
    """Well formed and well summed, so this is no accident: still an error that says where, and no wrong sum."""
    outcomes = run(schemes.AGSPARSE, Fault(Kind.GATHER, "header", reheader(**change)))
    assert isinstance(outcomes[0], CorruptMessageError)
    assert "rank 0, table: from rank 1" in str(outcomes[0])


def test_a_peer_that_does_not_come_is_lost_within_the_timeout() -> None:
    def rank(exchange: LoopbackExchange) -> list[int] | None:
        return None if exchange.rank == 2 else Channel(exchange, SUBJECT, 0).open()

    first, second, third = run_threads(3, rank, timeout_seconds=0.3)
    assert third is None
    for error in (first, second):
        assert isinstance(error, LostPeerError)
        assert SUBJECT.name in str(error)


def test_a_bit_flip_in_a_stage_of_a_hierarchy_goes_no_further() -> None:
    """Ranks 0 and 1 talk first, then 0 with 2 and 1 with 3: rank 2 is told, 1 and 3 have right sums, none waits."""
    first, second, third, fourth = run(schemes.SPARCML, Fault(Kind.GATHER, "payload", flip(3)), world_size=4)
    assert isinstance(first, CorruptMessageError)
    assert "rank 0, table: from rank 1" in str(first)
    assert isinstance(third, PeerError)
    assert not isinstance(third, LostPeerError)
    assert "rank 2, table: rank 0 reports: rank 0, table: from rank 1" in str(third)
    expected = torch.stack([rows_of(rank).to_dense() for rank in range(4)]).sum(0)
    for good in (second, fourth):
        assert isinstance(good, SparseRows)
        assert torch.equal(good.to_dense(), expected)


@pytest.mark.parametrize("world_size", [3, 5])
@pytest.mark.parametrize("scheme", [schemes.DENSE_RING, replace(schemes.ZEN, communication="ring")])
def test_a_bit_flip_in_a_ring_is_passed_on_to_all(scheme: schemes.Scheme, world_size: int) -> None:
    outcomes = run(scheme, Fault(Kind.PUSH, "payload", flip(3), to=(2,)), world_size)
    for rank, outcome in enumerate(outcomes):
        if rank == 2:
            assert isinstance(outcome, CorruptMessageError)
        else:
            assert isinstance(outcome, PeerError)
            assert not isinstance(outcome, LostPeerError)
            assert f"rank {rank}, table: rank 2 reports: rank 2, table: from rank 1: a message whose" in str(outcome)


@pytest.mark.parametrize("scheme", [schemes.AGSPARSE_RING, schemes.AGSPARSE_HIERARCHY, schemes.SPARCML])
def test_a_bit_flip_where_pieces_are_passed_on_strands_nobody(scheme: schemes.Scheme) -> None:
    """Whoever has an answer has the right one: what arrived corrupt is never passed on as good."""
    expected = torch.stack([rows_of(rank).to_dense() for rank in range(5)]).sum(0)
    receiver = 2 if scheme is schemes.AGSPARSE_RING else 0
    outcomes = run(scheme, Fault(Kind.GATHER, "payload", flip(3), to=(receiver,)), world_size=5)
    assert isinstance(outcomes[receiver], CorruptMessageError)
    for outcome in outcomes:
        assert not isinstance(outcome, LostPeerError)
        if isinstance(outcome, SparseRows):
            assert torch.equal(outcome.to_dense(), expected)
        else:
            assert isinstance(outcome, (CorruptMessageError, PeerError))


@pytest.mark.parametrize("place", [0, 3, 9, 17, 33])
@pytest.mark.parametrize("scheme", [schemes.SPARCML, schemes.AGSPARSE_HIERARCHY])
def test_a_bit_flip_in_a_header_of_a_stage_ends_the_conversation(scheme: schemes.Scheme, place: int) -> None:
    outcomes = run(scheme, Fault(Kind.GATHER, "header", flip(place)), world_size=4)
    assert isinstance(outcomes[0], CorruptHeaderError)
    assert all(isinstance(other, (LostPeerError, SparseRows)) for other in outcomes[1:])
    assert isinstance(outcomes[2], LostPeerError)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"payload_bytes": 1 << 50}, f"rank 1 announces {1 << 50} bytes"),
        ({"kind": Kind.PULL}, "rank 1 sent PULL, this rank waits for GATHER"),
        ({"sequence": 5}, "rank 1 is in another conversation"),
        ({"digest": 5}, "rank 1 is in another conversation"),
    ],
)
def test_a_senseless_announcement_in_a_stage_is_refused(fields: dict[str, Any], reason: str) -> None:
    outcomes = run(schemes.SPARCML, Fault(Kind.GATHER, "header", reheader(**fields)))
    assert isinstance(outcomes[0], CorruptHeaderError)
    assert reason in str(outcomes[0])


def test_a_failure_inside_a_stage_is_told_and_the_conversation_goes_on() -> None:
    def rank(exchange: LoopbackExchange) -> tuple[Exception | None, list[int]]:
        channel = Channel(exchange, SUBJECT, 0)
        channel.open()
        stages, error = Stages(channel), None
        if exchange.rank == 1:
            stages.attempt(lambda: [][0])
        try:
            all_gather(stages, schemes.AGSPARSE_RING, Kind.GATHER, lambda: EMPTY_DRAFT, 8)
        except Exception as caught:
            error = caught
        return error, Channel(exchange, SUBJECT, 1).open(exchange.rank)

    outcomes = run_threads(3, rank)
    assert all(isinstance(outcome, tuple) and outcome[1] == [0, 1, 2] for outcome in outcomes), outcomes
    errors = [outcome[0] for outcome in outcomes if isinstance(outcome, tuple)]
    assert isinstance(errors[1], IndexError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerError)
        assert "rank 1 reports: IndexError" in str(error)


def test_equal_drafts_are_sealed_once() -> None:
    def rank(exchange: LoopbackExchange) -> int:
        draft = Draft(Format.COO, 0, torch.zeros(8, dtype=torch.uint8))
        messages = Channel(exchange, SUBJECT, 0).swap(Kind.PULL, lambda: [draft] * 3, max_payload_bytes=8)
        return sum(message.payload.numel() for message in messages)

    assert run_threads(3, rank) == [24] * 3


@pytest.mark.parametrize(
    ("mine", "theirs", "shown"),
    [
        ("a b route", "a q b route", ("(no such line)", "q")),
        ("a q b route", "a b route", ("q", "(no such line)")),
        ("a b", "a b q", ("(no such line)", "q")),
        ("a b route", "a q route", ("b", "q")),
        ("a b route", "b a route", ("a", "b")),
        ("a", "a a", ("(no such line)", "a")),
    ],
)
def test_of_a_line_that_only_one_rank_has_the_line_is_shown(mine: str, theirs: str, shown: tuple[str, str]) -> None:
    """Ranks with one more parameter on one of them were told about the line behind the parameters."""
    assert first_difference(mine.replace(" ", "\n"), theirs.replace(" ", "\n")) == shown
