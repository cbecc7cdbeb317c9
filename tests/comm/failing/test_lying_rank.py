"""A rank that lies: its lies change nothing, or raise on those who receive them, and nothing hangs.

Its lies are those of bits that change, even where the CRC of a header fits them. A rank that computes the checksum of
what it made up can always send other rows: nothing is authenticated.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loopback import LoopbackExchange, Outcome, run_ranks, synchronized
from thinwire import schemes
from thinwire.comm import process_group
from thinwire.comm.agree import broadcast_json, gather_bytes, gather_json, gather_records, longest
from thinwire.comm.hosts import discover
from thinwire.comm.process_group import Exchange
from thinwire.errors import CorruptHeaderError, ThinwireError
from thinwire.rows.formats import FORMATS, Header, Kind, Message
from thinwire.rows.sparse import SparseRows
from thinwire.sums.two_level import TwoLevel

WORLD_SIZE, LIAR, NUM_ROWS, WIDTH = 4, 1, 64, 4
SCHEMES = [
    schemes.ZEN,
    schemes.COLUMN_SPLIT,
    schemes.UNION_SPLIT,
    schemes.AGSPARSE_CODED,
    schemes.SPARCML_CODED,
    schemes.AGSPARSE_RING,
    schemes.DENSE_HALVING_DOUBLING,
    TwoLevel(schemes.ZEN, hosts=((0, 1), (2, 3))),
]


class Liar:
    """Tampers with what its rank sends: a field of a header under a valid checksum, a bit, or the whole record."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.lies = 0

    def tamper(self, source: int, target: int, number: int, part: Tensor) -> Tensor:
        del target, number
        if source != LIAR or part.numel() == 0 or self._random.random() < 0.7:
            return part
        self.lies += 1
        data = part.clone()
        if data.numel() == Header.NUM_BYTES and self._random.random() < 0.8:
            return self._lying_header(data)
        for _ in range(self._random.randint(1, 4)):
            data[self._random.randrange(data.numel())] ^= 1 << self._random.randrange(8)
        return data

    def _lying_header(self, data: Tensor) -> Tensor:
        try:
            header = Header.unpack(data.numpy().tobytes())
        except ThinwireError:
            return data
        huge = self._random.choice([0, 1, 7, 8, 1 << 20, 10**10, (1 << 63) - 1, (1 << 64) - 1])
        lie: dict[str, Any] = self._random.choice(
            [
                {"held": huge},
                {"count": huge},
                {"payload_bytes": huge},
                {"source": self._random.randrange(256)},
                {"sequence": self._random.randrange(1 << 32)},
                {"digest": self._random.randrange(1 << 64)},
                {"checksum": self._random.randrange(1 << 64)},
                {"kind": self._random.choice(list(Kind))},
                {"format": self._random.choice(FORMATS)},
            ]
        )
        return torch.frombuffer(bytearray(replace(header, **lie).pack()), dtype=torch.uint8)


def _rows(rank: int) -> SparseRows:
    ids = torch.arange(rank, NUM_ROWS, 5)
    return SparseRows(ids, torch.full((ids.numel(), WIDTH), float(rank + 1)), NUM_ROWS)


def _synchronize(seed: int) -> tuple[Liar, list[Outcome[SparseRows]]]:
    liar = Liar(seed)
    scheme = SCHEMES[seed % len(SCHEMES)]
    outcomes = run_ranks(
        WORLD_SIZE, lambda exchange: synchronized(exchange, _rows(exchange.rank), scheme), tamper=liar.tamper
    )
    return liar, outcomes


def _lie_until(num_lies: int) -> None:
    expected = torch.zeros(NUM_ROWS, WIDTH)
    for rank in range(WORLD_SIZE):
        expected += _rows(rank).to_dense()
    lies, seed = 0, 0
    while lies < num_lies:
        liar, outcomes = _synchronize(seed)
        for outcome in outcomes:
            if outcome.error is None:
                assert outcome.result is not None
                assert torch.equal(outcome.result.to_dense(), expected), f"seed {seed}: another sum"
            else:
                assert isinstance(outcome.error, (ThinwireError, AssertionError)), f"seed {seed}: {outcome.error!r}"
            if isinstance(outcome.error, AssertionError):  # the exchange holds ranks to what they announced
                assert "bytes" in str(outcome.error), f"seed {seed}: {outcome.error!r}"
        lies, seed = lies + liar.lies, seed + 1
        if seed % 1000 == 0:
            print(f"{seed} seeds, {lies} lies", flush=True)


@pytest.mark.timeout(100)
def test_lies_are_harmless_or_raise() -> None:
    _lie_until(200)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_lies_are_harmless_or_raise() -> None:
    _lie_until(10_000)


def _changing(field: str, value: int) -> Any:
    """Has rank 1 say something else in its first header."""

    def tamper(source: int, target: int, number: int, part: Tensor) -> Tensor:
        del target
        if source != LIAR or number or part.numel() != Header.NUM_BYTES:
            return part
        header = replace(Header.unpack(part.numpy().tobytes()), **{field: value})
        if not header.payload_bytes:  # else the payload that follows no longer fits, which is seen later
            header = Message.sealed(header, torch.empty(0, dtype=torch.uint8)).header
        return torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)

    return tamper


@pytest.mark.parametrize("scheme", ["zen", "column_split", "auto", "two_level:zen"])
def test_no_rank_holds_more_rows_than_there_are(scheme: str) -> None:
    def run(exchange: LoopbackExchange) -> SparseRows:
        exchange.hosts = [0, 0, 1, 1]
        return synchronized(exchange, _rows(exchange.rank), scheme)

    outcomes = run_ranks(WORLD_SIZE, run, tamper=_changing("held", 10**10))
    assert any(isinstance(outcome.error, CorruptHeaderError) for outcome in outcomes)
    assert "says that it holds 10000000000 rows of 64" in str(outcomes[0].error)


@pytest.mark.parametrize("scheme", ["zen", "column_split"])
def test_a_header_of_another_rank_is_refused(scheme: str) -> None:
    outcomes = run_ranks(
        WORLD_SIZE, lambda exchange: synchronized(exchange, _rows(exchange.rank), scheme), tamper=_changing("source", 2)
    )
    assert "says that rank 2 made it" in str(outcomes[0].error)


def test_a_header_of_another_rank_is_refused_in_stages() -> None:
    def tamper(source: int, target: int, number: int, part: Tensor) -> Tensor:
        return part if number == 0 else _changing("source", 3)(source, target, 0, part)

    outcomes = run_ranks(
        WORLD_SIZE,
        lambda exchange: synchronized(exchange, _rows(exchange.rank), schemes.SPARCML_CODED),
        tamper=tamper,
    )
    assert any("says that rank 3 made it" in str(outcome.error) for outcome in outcomes)


def _flipping(source: int, target: int, number: int, part: Tensor) -> Tensor:
    del target, number
    changed = part.clone()
    if source == LIAR:
        changed[3] ^= 1
    return changed


def _found(exchange: Exchange) -> Sequence[int]:
    return discover(exchange)


@pytest.mark.parametrize(
    "swap",
    [
        _found,
        lambda exchange: longest(exchange, 1.0),
        lambda exchange: gather_json(exchange, "thing", "x" * exchange.rank),
        lambda exchange: broadcast_json(exchange, "thing", exchange.rank),
    ],
)
def test_records_that_changed_on_the_way_are_refused(swap: Any) -> None:
    outcomes = run_ranks(WORLD_SIZE, swap, tamper=_flipping)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, CorruptHeaderError) == (rank != LIAR)


def test_a_record_is_of_one_kind_and_one_rank() -> None:
    outcomes = run_ranks(2, lambda exchange: gather_records(exchange, f"thing {exchange.rank}", bytes(8)))
    assert all(isinstance(outcome.error, CorruptHeaderError) for outcome in outcomes)


@pytest.mark.parametrize("target", [0, 2])
def test_a_payload_that_changed_behind_its_length_is_refused(target: int) -> None:
    def tamper(source: int, to: int, number: int, part: Tensor) -> Tensor:
        return _flipping(source, to, number, part) if number and to == target else part

    def run(exchange: LoopbackExchange) -> list[bytes]:
        return gather_bytes(exchange, "thing", b"abcdef"[: exchange.rank + 1])

    outcomes = run_ranks(3, run, tamper=tamper)
    assert isinstance(outcomes[target].error, CorruptHeaderError)
    assert "bad checksum on the thing from rank 1" in str(outcomes[target].error)
    assert all(outcome.result == [b"a", b"ab", b"abc"] for rank, outcome in enumerate(outcomes) if rank != target)


def test_more_bytes_than_a_rank_may_have_are_not_received() -> None:
    def run(exchange: LoopbackExchange) -> list[bytes]:
        return gather_bytes(exchange, "thing", bytes(9 if exchange.rank == LIAR else 8), max_bytes=8)

    for outcome in run_ranks(2, run):
        assert isinstance(outcome.error, CorruptHeaderError)
        assert f"from rank {LIAR}: 9 bytes are announced, more than 8" in str(outcome.error)


def test_rows_that_do_not_fit_into_memory_are_refused_before_they_are_received(monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows = 10**8

    def run(exchange: LoopbackExchange) -> SparseRows:
        rows = SparseRows(torch.arange(3), torch.ones(3, 64), num_rows)
        return synchronized(exchange, rows, "column_split")

    monkeypatch.setattr(process_group, "_available_bytes", lambda: 10**9)
    outcomes = run_ranks(2, run, tamper=_changing("held", num_rows))
    assert isinstance(outcomes[0].error, CorruptHeaderError)
    assert "bytes are announced" in str(outcomes[0].error)
