"""Sums on the collectives of a process group when something is wrong: all ranks learn of it, and none waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sums.collectives.collective import LoopbackCollectives, Tamper, results, run_collectives
from thinwire import schemes
from thinwire.comm import process_group
from thinwire.errors import CorruptHeaderError, CorruptMessageError, MismatchError, PeerError
from thinwire.schemes import Scheme
from thinwire.sums import collective
from thinwire.sums.collective import CollectiveSum, NamedGradient, refusal
from thinwire.sums.named import resolve

RUNS = ("zen", "sparse_ps", "agsparse")


def some_rows(rank: int, num_rows: int = 40, width: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    gradient = torch.randn(num_rows, width, generator=generator)
    gradient[torch.rand(num_rows, generator=generator) < 0.6] = 0
    return gradient


def mean(total: CollectiveSum, gradient: Tensor, scheme: Scheme = schemes.ZEN, name: str = "words") -> Tensor:
    return total.all_reduce([NamedGradient(name, gradient)], scheme)[0]


def expected(world_size: int, **shape: int) -> Tensor:
    return torch.stack([some_rows(rank, **shape) for rank in range(world_size)]).sum(0)


@pytest.mark.parametrize("name", RUNS)
def test_a_table_that_grows_suddenly_is_redone_exactly(name: str) -> None:
    def run(exchange: LoopbackCollectives) -> list[int]:
        total, waits = CollectiveSum(exchange), []
        for held in (3, 4, 1700, 1700, 0, 2000):
            gradients = [torch.zeros(2000, 2), torch.zeros(9, 2)]
            gradients[0][: held if exchange.rank == 1 else 2] = 1
            before = exchange.host_waits
            words, small = total.all_reduce(
                [NamedGradient("words", gradients[0]), NamedGradient("small", gradients[1])], schemes.NAMED[name]
            )
            waits.append(exchange.host_waits - before)
            assert words[:held].sum() == 2 * (held + 2 * min(2, held) if held > 1 else 0)
            assert words.sum() == 2 * (held + 4)
            assert small.sum() == 0
        return waits

    assert results(run_collectives(3, run)) == [[2, 2, 3, 2, 2, 3]] * 3


def bad_gradients() -> dict[str, Callable[[], Tensor]]:
    ids = torch.tensor([[0, 50]])
    return {
        "strides": lambda: torch.zeros(2, 40).t(),
        "dtype": lambda: torch.zeros(40, 2, dtype=torch.int32),
        "out of range": lambda: torch.sparse_coo_tensor(ids, torch.ones(2, 2), (40, 2), check_invariants=False),
    }


@pytest.mark.parametrize("what", bad_gradients())
@pytest.mark.parametrize("name", [*RUNS, "dense"])
def test_a_bad_gradient_raises_there_and_tells_the_others(what: str, name: str) -> None:
    def run(exchange: LoopbackCollectives) -> Tensor:
        total = CollectiveSum(exchange)
        is_bad = exchange.rank == 1
        sparse = what == "out of range"
        mine = some_rows(exchange.rank).to_sparse(1) if sparse else some_rows(exchange.rank)
        with pytest.raises(ValueError if is_bad else PeerError, match=what if is_bad else f"rank 1 reports.*{what}"):
            mean(total, bad_gradients()[what]() if is_bad else mine, schemes.NAMED[name])
        return mean(total, mine, schemes.NAMED[name]).to_dense()

    for total in results(run_collectives(3, run)):
        torch.testing.assert_close(total, expected(3))


@pytest.mark.parametrize("phase", ["find", "encoded", "add"])
@pytest.mark.parametrize("name", RUNS)
def test_a_failure_before_the_sums_are_agreed_on_raises_everywhere(
    name: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, phase)

    def run(exchange: LoopbackCollectives) -> Tensor:
        total = CollectiveSum(exchange)
        error, reason = (MemoryError, "no memory") if exchange.rank == 1 else (PeerError, "rank 1 reports.*no memory")
        with pytest.raises(error, match=reason):
            mean(total, some_rows(exchange.rank), schemes.NAMED[name])
        return mean(total, some_rows(exchange.rank), schemes.NAMED[name])

    for total in results(run_collectives(3, run)):
        torch.testing.assert_close(total, expected(3))


def test_a_failure_with_the_sums_poisons_them_and_raises_in_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody can tell any more is never taken for a gradient."""
    fail_once(monkeypatch, "encoded_sum")

    def run(exchange: LoopbackCollectives) -> Tensor:
        total, gradient = CollectiveSum(exchange), some_rows(exchange.rank)
        if exchange.rank == 1:
            with pytest.raises(MemoryError):
                mean(total, gradient)
        else:
            assert mean(total, gradient).isnan().any()
        with pytest.raises(CorruptMessageError, match=r"ranks 0, 2 .* in the last call"):
            mean(total, some_rows(exchange.rank))
        return mean(total, some_rows(exchange.rank))

    for total in results(run_collectives(3, run)):
        torch.testing.assert_close(total, expected(3))


@pytest.mark.parametrize("name", ["zen", "agsparse", "two_level:zen"])
@pytest.mark.parametrize("grows", [False, True])
def test_a_rank_without_memory_for_what_arrives_says_so_before_the_others_send(
    name: str, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as much as the last sum suggests, or rows that did not fit; that is used for all exchanges of a sum."""
    empty, calls = torch.empty, []
    many = torch.zeros(4000, 2).index_fill_(0, torch.arange(2000), 1.0)

    def run(exchange: LoopbackCollectives) -> Tensor:
        exchange.hosts, total, me = (0, 0, 1, 1), CollectiveSum(exchange), threading.get_ident()
        scheme = resolve(name)
        mean(total, few(exchange), scheme)
        mine = total._room_bytes
        assert mine > 0

        def fail(*size: Any, **settings: Any) -> Tensor:
            is_room = size[0] > mine if grows else size == (mine,)
            if is_room and settings.get("dtype") == torch.uint8 and threading.get_ident() == me and not calls:
                calls.append(exchange.rank)
                raise MemoryError("no memory")
            return empty(*size, **settings)

        if exchange.rank == 1:
            monkeypatch.setattr(torch, "empty", fail)
        error, reason = (MemoryError, "no memory") if exchange.rank == 1 else (PeerError, "rank 1 reports.*no memory")
        with pytest.raises(error, match=reason):
            mean(total, many.clone() if grows else few(exchange), scheme)
        return mean(total, few(exchange), scheme)

    sums = results(run_collectives(4, run))
    assert calls == [1]
    assert all(total.sum() == 2 * 4 * 6 for total in sums)


def fail_once(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """The first call of a method of a table on rank 1 raises."""
    works, failed = getattr(collective._Job, phase), []

    def fail(job: Any, *args: Any) -> Any:
        if job.rank == 1 and not failed:
            failed.append(job)
            raise MemoryError("no memory")
        return works(job, *args)

    monkeypatch.setattr(collective._Job, phase, fail)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "other"}, "other: torch.float32"),
        ({"rows": 41}, r"\[41, 2\]"),
        ({"dtype": torch.float64}, "float64"),
        ({"scheme": replace(schemes.ZEN, seed=1)}, "seed=1"),
        ({"scheme": schemes.AGSPARSE}, "centralization"),
        ({"scale": 0.5}, "scale=0.5"),
        ({"tables": 2}, "more"),
        ({"calls": 1}, "call 2"),
    ],
)
def test_ranks_that_sum_different_things_raise_on_all_of_them(change: dict[str, Any], reason: str) -> None:
    def run(exchange: LoopbackCollectives) -> Any:
        total = CollectiveSum(exchange)
        mine = change if exchange.rank == 2 else {}
        total._step += mine.get("calls", 0)
        gradient = torch.ones(mine.get("rows", 40), 2, dtype=mine.get("dtype", torch.float32))
        tables = [NamedGradient(mine.get("name", "words"), gradient)]
        tables += [NamedGradient("more", gradient)] * (mine.get("tables", 1) - 1)
        with pytest.raises(MismatchError, match=reason):
            total.all_reduce(tables, mine.get("scheme", schemes.ZEN), mine.get("scale", 1.0))
        return True

    assert results(run_collectives(4, run)) == [True] * 4


@pytest.mark.parametrize("before", [900, 1000, 5000])
def test_the_first_difference_is_named_wherever_it_is(before: int) -> None:
    """Of what did not fit one message, ranks said no more than that it differs."""

    def run(exchange: LoopbackCollectives) -> Any:
        table = "x" * before + (".other" if exchange.rank == 2 else ".words")
        with pytest.raises(MismatchError, match=r"\.other: torch\.float32 \[40, 2\]"):
            CollectiveSum(exchange).all_reduce([NamedGradient(table, torch.ones(40, 2))], schemes.ZEN)
        return True

    assert results(run_collectives(4, run)) == [True] * 4


def changing(call: int, change: Callable[[Tensor], None]) -> Callable[[int], Tamper]:
    """Change what rank 1 receives in one of its calls."""

    def tamper_of(rank: int) -> Tamper:
        def tamper(name: str, number: int, incoming: Tensor) -> None:
            if rank == 1 and number == call:
                change(incoming)

        return tamper

    return tamper_of


ONES = torch.tensor([[1.0, 1.0]])


def few(exchange: LoopbackCollectives) -> Tensor:
    gradient = torch.zeros(4000, 2)
    gradient[[1, 2, 1500, 1501, 3000, 3001 + exchange.rank]] = 1
    return gradient


def with_bad_ids(name: str, call: int, pattern: int) -> list[Any]:
    """All ids that rank 1 receives in a call become ones of another part, or decrease; values stay."""

    def change(incoming: Tensor) -> None:
        is_value = incoming.view(-1, 4).eq(torch.tensor([0, 0, 128, 63], dtype=torch.uint8)).all(1)
        incoming.view(-1, 4)[~is_value] = pattern

    def run(exchange: LoopbackCollectives) -> Any:
        total = CollectiveSum(exchange)
        try:
            first: Any = mean(total, few(exchange), schemes.NAMED[name])
        except CorruptMessageError as error:
            first = error
        try:
            return first, mean(total, few(exchange), schemes.NAMED[name])
        except CorruptMessageError as error:
            return first, error

    return results(run_collectives(3, run, changing(call, change)))


@pytest.mark.parametrize("pattern", [0, 255])
@pytest.mark.parametrize("name", RUNS)
def test_ids_that_arrive_changed_raise_on_all_ranks(name: str, pattern: int) -> None:
    for first, second in with_bad_ids(name, 1, pattern):
        assert isinstance(first, CorruptMessageError)
        assert "ranks 1 received ids" in str(first)
        assert second.sum() == 2 * 3 * 6


@pytest.mark.parametrize("pattern", [0, 255])
def test_sums_that_arrive_with_changed_ids_become_nan_and_raise_in_the_next_call(pattern: int) -> None:
    outcomes = with_bad_ids("zen", 3, pattern)
    for rank, (first, second) in enumerate(outcomes):
        assert bool(first.isnan().any()) == (rank == 1)
        assert isinstance(second, CorruptMessageError)


@pytest.mark.parametrize("column", range(8))
@pytest.mark.parametrize("value", [-1, 1 << 40])
def test_a_changed_record_raises_and_allocates_nothing(column: int, value: int) -> None:
    def change(incoming: Tensor) -> None:
        incoming.view(torch.int64).view(2, -1)[0, column] = value

    def run(exchange: LoopbackCollectives) -> Any:
        return mean(CollectiveSum(exchange), few(exchange))

    outcomes = run_collectives(2, run, changing(0, change))
    assert isinstance(outcomes[1], (CorruptHeaderError, MismatchError, PeerError, CorruptMessageError)), outcomes[1]


@pytest.mark.parametrize("call", [0, 2])
def test_a_record_of_zeros_is_none(call: int) -> None:
    outcomes = run_collectives(
        2, lambda exchange: mean(CollectiveSum(exchange), few(exchange)), changing(call, Tensor.zero_)
    )
    assert isinstance(outcomes[1], CorruptHeaderError)


@pytest.mark.parametrize("name", RUNS)
def test_rows_that_do_not_fit_into_memory_are_not_received(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "UNASKED_BYTES", 0)
    monkeypatch.setattr(process_group, "_available_bytes", lambda: 10)
    outcomes = run_collectives(2, lambda exchange: mean(CollectiveSum(exchange), few(exchange), schemes.NAMED[name]))
    assert all("has 10 bytes of memory left" in str(outcome) for outcome in outcomes), outcomes


@pytest.mark.parametrize("name", schemes.NAMED)
def test_every_named_scheme_runs_or_says_which_do(name: str) -> None:
    scheme = schemes.NAMED[name]

    def run(exchange: LoopbackCollectives) -> Any:
        if not refusal(scheme):
            return mean(CollectiveSum(exchange), some_rows(exchange.rank), scheme)
        with pytest.raises(ValueError, match=r"because .*: use .*zen"):
            mean(CollectiveSum(exchange), some_rows(exchange.rank), scheme)
        return expected(2)

    for total in results(run_collectives(2, run)):
        torch.testing.assert_close(total, expected(2))


def test_no_tables_are_a_call_too() -> None:
    assert results(run_collectives(2, lambda exchange: CollectiveSum(exchange).all_reduce([], schemes.ZEN))) == [[], []]


def test_ranks_whose_tables_need_records_of_other_sizes_raise_on_all_of_them() -> None:
    """A record that is longer than what is received for it ends the process over Gloo."""

    def run(exchange: LoopbackCollectives) -> list[int]:
        total, waits = CollectiveSum(exchange), []
        tables = [NamedGradient(f"{number}", torch.ones(2, 1)) for number in range(65)]
        with pytest.raises(MismatchError, match=r"of 6[45] tables"):
            total.all_reduce(tables[: 64 + exchange.rank], schemes.ZEN)
        for count in (65, 65, 1):
            before = exchange.host_waits
            total.all_reduce(tables[:count], schemes.ZEN)
            waits.append(exchange.host_waits - before)
        return waits

    assert results(run_collectives(2, run)) == [[3, 2, 3]] * 2


def test_a_rank_that_holds_more_rows_than_there_are_is_named_before_memory_is_taken() -> None:
    def change(incoming: Tensor) -> None:
        record = incoming.view(torch.int64).view(2, -1)[0]
        record[collective._FIXED] += 1 << 50
        record[collective._CHECK] -= 1 << 50

    def run(exchange: LoopbackCollectives) -> None:
        total = CollectiveSum(exchange)
        for _ in range(2):
            mean(total, few(exchange))

    error = run_collectives(2, run, changing(4, change))[1]
    assert isinstance(error, CorruptHeaderError)
    assert "from rank 0: " in str(error)
