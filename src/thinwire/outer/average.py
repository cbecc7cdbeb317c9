"""Weighted means over ranks of differences between anchors and parameters: exact, as rows, or compressed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.futures import Future

from thinwire.comm.agree import RECORD_BYTES, SEAL_BYTES
from thinwire.comm.channel import Subject, opening_bytes
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import Staging
from thinwire.compress.assign import NATIVE, Dense, assign
from thinwire.compress.base import Parameter
from thinwire.compress.methods.sign import SignSGD
from thinwire.compress.state import owe
from thinwire.compress.wrappers import core_of
from thinwire.errors import logger
from thinwire.gradients.buckets import as_real, set_exception
from thinwire.gradients.compressed import CompressedSync, Statistics
from thinwire.gradients.compression import planned
from thinwire.gradients.exact import GradientSync
from thinwire.gradients.module import local_of
from thinwire.gradients.steps import state as states
from thinwire.gradients.tables import TableGradient, staged
from thinwire.observe.step import ParameterRecords
from thinwire.sums.named import Rows

OPENINGS = "openings of rounds"
"""Name of the row of `OuterLoop.table` for the numbers that a round begins and ends with."""
LARGEST = 1e12
"""Largest element of a difference that counts as finite: the squares of a thousand million of them are, in float32."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Entry:
    """A parameter of an outer loop.

    Args:
        name: its name, the same on all ranks.
        parameter: the parameter; of a DTensor its shard on this rank counts.
        is_table: whether a round changes few of its rows.
    """

    name: str
    parameter: nn.Parameter
    is_table: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its differences: of 16-bit parameters they would vanish in 16 bits."""
        is_double = self.parameter.dtype in (torch.float64, torch.complex128)
        dtype = torch.float64 if is_double else torch.float32
        return dtype.to_complex() if self.parameter.is_complex() else dtype

    def describe(self) -> str:
        return f"parameter {self.name!r}: {self.parameter.dtype} {list(local_of(self.parameter).shape)}"


@dataclass(frozen=True)
class RoundReport:
    """What all ranks know after a round, in rank order.

    Args:
        steps: inner steps that each rank made.
        refused: ranks whose differences were not finite, so that they have to take the anchors.
        flags: the number that each rank passed as ``flag``.
    """

    steps: tuple[float, ...]
    refused: tuple[int, ...]
    flags: tuple[int, ...]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> RoundReport:
        """Return what `numbers` returned, of one rank or the largest of several, as far as they were given."""
        steps, refused, flags = (numbers[index::3] for index in range(3))
        return cls(tuple(steps), tuple(rank for rank, one in enumerate(refused) if one), tuple(map(int, flags)))

    def numbers(self) -> list[float]:
        """Return three numbers for each rank."""
        refused = [float(rank in self.refused) for rank in range(len(self.steps))]
        return [float(one) for of_rank in zip(self.steps, refused, self.flags, strict=True) for one in of_rank]

    @property
    def weights(self) -> tuple[float, ...]:
        """The steps that count."""
        return tuple(0.0 if rank in self.refused else max(0.0, steps) for rank, steps in enumerate(self.steps))

    @property
    def total(self) -> float:
        """The sum of weights; without any there is no mean, and anchors stay."""
        return sum(self.weights)

    @property
    def ranks(self) -> int:
        """The number of ranks that count."""
        return sum(weight > 0 for weight in self.weights)


class Averager:
    """The mean over ranks of their differences, weighted by inner steps: ``sum(w_k d_k) / sum(w_k)``.

    Tables travel as the rows in which the difference is not zero, which are those that any step since the last round
    touched; what is compressed, as gradients are, with memories of what was not sent; all else in an all-reduce. All
    ranks get the same bits, with equal steps the bits of the plain mean. A rank without steps counts nothing, nor does
    one whose differences are not finite. (They are weighted before they are compressed, so a memory holds what the
    mean is owed, and it is sent even by a rank that counts nothing.)

    Args:
        lane: the lane of the ranks.
        entries: all parameters of the outer loop.
        dense: what to compress, as `thinwire.outer.attach` takes it; tables never are.
        scheme: the scheme of tables.
        records: rows of the table, by name.
        staging: the way of differences to the host, and back; None if they are there.

    Raises:
        ValueError: a compressor that refuses a parameter, or cannot be exchanged as asked for.
    """

    def __init__(
        self,
        lane: Lane,
        entries: Sequence[Entry],
        dense: Dense,
        scheme: Rows,
        records: ParameterRecords,
        staging: Staging | None = None,
    ) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._dense, self._scheme, self._staging = dense, scheme, staging or Staging()
        self._statistics = Statistics(records, lane.world_size)
        self._rounds = self._skipped = self._refused = 0
        self._enter(lane)

    def describe(self) -> list[str]:
        """Return lines on which all ranks must agree."""
        lines = [entry.describe() + ", as rows" * entry.is_table for entry in self._entries.values()]
        return [*lines, f"scheme {self._tables.scheme}", *(self._compressed.describe() if self._compressed else ())]

    @property
    def remembers(self) -> bool:
        """Whether what is not sent is remembered and sent later, which outer momentum would count several times."""
        memories = [] if self._compressed is None else [self._compressed.memories]
        return any(one.outstanding(name) is not None for one in memories for name in one.plans)

    def is_table(self, name: str) -> bool:
        """Return whether a parameter travels as rows."""
        return name in self._entries and self._entries[name].is_table

    def mean(
        self,
        lane: Lane,
        differences: Mapping[str, Tensor],
        steps: float,
        buffers: Sequence[Tensor] = (),
        flag: int = 0,
        is_exact: bool = False,
    ) -> RoundReport:
        """Replace differences by their mean, in place; a job of the lane calls it on all ranks with the same names.

        Where differences are on a device the job does so inside of ``staging.taking``. After an error they are
        undefined: who wants to try again makes them again, or passes copies. `finish_round` follows in the same job.

        Args:
            differences: contiguous tensors of `Entry.dtype` by name, in the same order on all ranks.
            steps: inner steps of this rank since it passed these names last, 0 or more.
            buffers: differences of buffers: contiguous, of any floating-point dtype.
            flag: a number to tell all ranks.
            is_exact: whether nothing is compressed this time; the same on all ranks.

        Returns:
            What all ranks know then. If nobody counts, all differences are 0.

        Raises:
            MismatchError: ranks pass other names, shapes or dtypes; on all of them.
            PeerError, CorruptMessageError: as for gradients.
        """
        tensors = [as_real(tensor) for tensor in (*differences.values(), *buffers)]
        limits = [LARGEST] * len(differences) + [math.inf] * len(buffers)
        compressed = None if is_exact else self._compressed  # another one once a lane has taken over from this one
        channel = lane.channel(_subject(differences, buffers))
        with self.booking(lane, 3):
            mine = channel.attempt(lambda: [float(steps), float(not self._is_finite(tensors, limits)), float(flag)])
            report = RoundReport.of([number for of_rank in channel.gather_numbers(mine) for number in of_rank])
        self._note(lane, report, differences)
        if not report.total:
            _weigh(tensors, 0.0)
            return report
        _weigh(tensors, lane.world_size * report.weights[lane.rank] / report.total)
        self._average_tables(lane, differences)
        names = [name for name in differences if not self.is_table(name)]
        coded = [name for name in names if compressed is not None and compressed.takes(name)]
        exact = [as_real(tensor) for tensor in (*(differences[one] for one in names if one not in coded), *buffers)]
        if compressed is not None and coded:
            compressed.synchronize(lane, [(name, differences[name]) for name in coded], exact)
        elif exact:
            self._statistics.average(channel, exact)
        return report

    @contextmanager
    def booking(self, lane: Lane, numbers: int) -> Iterator[None]:
        """Count what the opening of a channel sends, and so many numbers that are gathered in it."""
        before = lane.exchange.traffic.sent_bytes
        yield
        record = self._statistics.records.book(OPENINGS, "numbers", "all-gather", "")
        gathered = (lane.world_size - 1) * max(RECORD_BYTES, 8 * numbers + SEAL_BYTES) if numbers else 0
        record.add(lane.exchange.traffic.sent_bytes - before, opening_bytes(lane.world_size) + gathered, 0)

    def finish_round(self, committed: bool = True) -> None:
        """End a round; one that is not committed leaves memories as they were, so that it can be sent again."""
        if self._compressed is not None:
            self._compressed.finish_step(committed)
        self._tables.finish_step()

    def moved_to(self, lane: Lane) -> None:
        """Go on with other ranks, on all of them. What the mean was owed by this rank it still gets."""
        before = self._compressed
        self._enter(lane)
        if before is None or self._compressed is None:
            return
        memories = self._compressed.memories
        for name in before.plans.keys() & self._compressed.plans.keys():
            rest = before.memories.outstanding(name)
            if rest is not None:  # of a sum that is divided by another number of ranks from now on
                owe(memories.states[name], rest * (lane.world_size / before.memories.world_size))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, in the layout of `thinwire.Synchronizer.state_dict`."""
        return states.saved(self._rounds, self._entries, self._tables, self._compressed, None)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError, saying what to do, if `load_state_dict` cannot restore the state."""
        states.check(state, self._entries, self._compressed, None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `check_state` has accepted."""
        states.restore(state, self._tables, self._compressed, None)
        self._rounds = int(state["steps"])

    def stats(self) -> dict[str, float]:
        """Return the counts of rounds, and the ``compress/`` entries of `thinwire.Synchronizer.stats`."""
        return {
            "outer/rounds": float(self._rounds),
            "outer/skipped_rounds": float(self._skipped),
            "outer/refused": float(self._refused),
            **(self._compressed.stats() if self._compressed is not None else {}),
        }

    def _enter(self, lane: Lane) -> None:
        """Begin with the ranks of a lane, which know nothing of each other."""
        self._statistics.world_size = lane.world_size
        self._tables = GradientSync(self._scheme, by_bytes=True)  # rounds are seldom, and unlike each other
        self._tables.records = self._statistics.records
        self._compressed: CompressedSync | None = None
        entries = [entry for entry in self._entries.values() if not (entry.is_table or entry.parameter.is_complex())]
        dense = [Parameter(one.name, tuple(local_of(one.parameter).shape), one.dtype) for one in entries]
        methods = assign(self._dense, dense)
        for name, how in methods.items():
            if isinstance(how, str) and how != NATIVE:
                raise ValueError(f"{how!r} of {name!r} sums gradients: differences are {NATIVE!r} or have a compressor")
        plans = planned(methods, dense, lane.world_size)
        for name, plan in plans.items():
            if isinstance(core_of(plan.compressor), SignSGD):
                raise ValueError(
                    f"{plan.compressor.name} of parameter {name!r} makes each element of a difference 1 or -1, however"
                    " small it was: take ef_sign_sgd(), which keeps its size"
                )
        if plans:
            self._compressed = CompressedSync(plans, lane, self._statistics, can_skip=True, staging=self._staging)

    def _is_finite(self, tensors: Sequence[Tensor], limits: Sequence[float]) -> bool:
        """Return whether all elements are finite and within limits; a device is asked once."""
        pairs = [
            (torch.stack(torch.aminmax(one)), limit) for one, limit in zip(tensors, limits, strict=True) if one.numel()
        ]
        if not pairs:
            return True
        (seen,) = self._staging.to_host(torch.stack([extremes.double() for extremes, _ in pairs]))
        return bool(seen.isfinite().all() and (seen.abs().amax(1) <= torch.tensor([limit for _, limit in pairs])).all())

    def _average_tables(self, lane: Lane, differences: Mapping[str, Tensor]) -> None:
        """Average tables as rows. Each is searched for them, however dense it was: a round is worth that."""
        tables = [TableGradient(name, difference) for name, difference in differences.items() if self.is_table(name)]
        self._tables.pauses.clear()
        self._tables.tables(lane, [staged(table, self._staging) for table in tables])

    def _note(self, lane: Lane, report: RoundReport, differences: Mapping[str, Tensor]) -> None:
        self._rounds += 1
        self._skipped += not report.total
        self._refused += len(report.refused)
        if lane.rank in report.refused or (report.refused and lane.rank == 0):
            ranks = ", ".join(str(lane.exchange.global_ranks[rank]) for rank in report.refused)
            then = "it takes the anchors, and does not count" if report.total else "no rank counts, and anchors stay"
            names = _span(list(differences))
            logger.warning("rank %s: not finite in round %d of %s: %s", ranks, self._rounds, names, then)


def _subject(differences: Mapping[str, Tensor], buffers: Sequence[Tensor]) -> Subject:
    lines = [f"parameter {name!r}: {one.dtype} {list(one.shape)}" for name, one in differences.items()]
    lines += [f"buffer: {buffer.dtype} {list(buffer.shape)}" for buffer in buffers]
    return Subject(f"differences of {_span(list(differences))}", "\n".join(lines))


def _span(names: Sequence[str]) -> str:
    if len(names) < 2:
        return f"parameter {names[0]!r}" if names else "no parameters"
    return f"{len(names)} parameters, {names[0]!r} to {names[-1]!r}"


def _weigh(tensors: Sequence[Tensor], weight: float) -> None:
    """Multiply in place. A weight of 0 makes zeros of anything; one of 1 changes no bits."""
    for tensor in tensors if weight != 1.0 else ():
        tensor.mul_(weight) if weight else tensor.zero_()


def submit(
    lane: Lane, staging: Staging, tensors: Sequence[Tensor], job: Callable[[Lane], T]
) -> Future[tuple[T, Sequence[Tensor]]]:
    """Submit a job that reads and writes tensors, and return a future of its result, and of them.

    On a device the job runs after what wrote them, and streams that wait for the future run after the job.
    """
    handover, future = staging.hand_over(tensors), staging.future()

    def run(lane: Lane) -> None:
        with staging.taking(handover):
            future.set_result((job(lane), tensors))

    def pass_on(done: Future[None]) -> None:
        try:
            done.value()
        except Exception as error:
            set_exception([future], error)

    lane.submit(run).add_done_callback(pass_on)
    return future
