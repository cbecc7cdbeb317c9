"""Means of compressed gradients, and of the dense ones that travel with them: averaging, memories and statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.comm.channel import Channel, Draft, Subject, opening_bytes
from thinwire.comm.hosts import Hosts, ranks_of_hosts
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import Staging, ring_all_reduce_bytes
from thinwire.compress import state as states
from thinwire.compress.base import Identity, Parameter, State
from thinwire.compress.methods.sparsify import Sparsifier
from thinwire.compress.reductions.all_reduce import AllReduce
from thinwire.compress.reductions.base import Phase, Reduction, Result, Stopwatch, Task
from thinwire.compress.state import outstanding
from thinwire.compress.wrappers import code_of
from thinwire.errors import LostPeerError, warn
from thinwire.gradients.compression import GradScaler, Planned, counts_steps, is_skipped
from thinwire.gradients.exact import OTHERS
from thinwire.gradients.tables import by_dtype, flattened, share
from thinwire.observe.step import ParameterRecords
from thinwire.rows.formats import Format, Kind, Message
from thinwire.rows.sparse import SparseRows
from thinwire.sums.cost import Demand, expected_bytes
from thinwire.sums.scheme import Scheme
from thinwire.sums.synchronize import agree, dense_all_reduce, synchronize
from thinwire.sums.two_level import TwoLevel
from thinwire.tune.prices import chosen

T = TypeVar("T")


def can_ride(tensor: Tensor) -> bool:
    """Return whether an exactly summed tensor may join the all-reduce of a compressor, which is of float32 on a CPU."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite. (25 million float32: 10 ms; 210 ms by ``isfinite(tensor).all()``.)"""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


KIND = "compressed"
FLUSH_STEPS = 20
"""Number of steps over which memories are handed out when compression ends: at once they would be one huge step."""

NamedGradients = Sequence[tuple[str, Tensor]]
Coded = Callable[..., Sequence[Tensor]]
Outcome = tuple[Planned, Result]
"""The result of one parameter's gradient, with its method."""


class Memories:
    """The states of compressed parameters between steps, until they are handed out when compression ends.

    Args:
        plans: methods of the compressed parameters, by name.
        rank, world_size: rank and number of ranks of the synchronization.
        can_skip: whether a step can be skipped after gradients were averaged, which restores the states before it.
        get_scale: returns the scale of the scaler that skips steps, if one does.
    """

    def __init__(
        self,
        plans: Mapping[str, Planned],
        rank: int,
        world_size: int,
        can_skip: bool,
        get_scale: Callable[[], float] | None = None,
    ) -> None:
        self.dropped = False
        self.rank, self.world_size = rank, world_size
        self.plans = plans
        self.states: dict[str, State] = {name: self._new_state(plan) for name, plan in plans.items()}
        self._can_skip = can_skip
        self._get_scale, self._scale = get_scale, 0.0
        self._before_step: dict[str, State] = {}
        self._passes = Counter[str]()  # in which a gradient was compressed for a step that no optimizer has made yet
        self._parts_left: dict[str, int] = {}  # of each memory that is handed out

    def take(self, name: str) -> State:
        """Return the state of a parameter for this step, to be updated in place."""
        state = self.states[name]
        self._passes[name] += 1
        if self._can_skip:
            self._before_step.setdefault(name, states.copied(state))
        return state

    def finish_pass(self, is_kept: bool, is_over: bool = True) -> None:
        """End a pass, and restore the memories before the step unless it is kept.

        Args:
            is_over: whether the step ends too. Else the memories before it are there until `commit` or `settle`.
        """
        if is_over:
            if not is_kept:
                self._undo()
            self._before_step = {}

    def commit(self, names: Collection[str]) -> list[str]:
        """Note that an optimizer makes the step of these parameters: what was sent for them is used.

        Return those that were compressed more than once for it.
        """
        for name in names:
            self._before_step.pop(name, None)
        return [name for name in names if self._passes.pop(name, 0) > 1]

    def settle(self) -> None:
        """Restore the memories before a step that the scaler had optimizers skip: it has lowered its scale then."""
        if self._get_scale is not None:
            scale, before = self._get_scale(), self._scale
            self._scale = scale
            if scale < before:
                self._undo()

    def _undo(self) -> None:
        self.states.update(self._before_step)
        self._before_step = {}
        self._passes.clear()

    def drop(self) -> bool:
        """Compress nothing from the next step on; return whether memories are handed out to coming gradients.

        They are not if steps can be skipped: such a step would lose its part. They stay in `state_dict` then.
        """
        self.dropped = True
        self._parts_left = {} if self._can_skip else dict.fromkeys(self.plans, FLUSH_STEPS)
        return not self._can_skip

    def release(self, name: str, gradient: Tensor) -> None:
        """After `drop`, add to a gradient its part of the unsent rest of its parameter, before it is summed."""
        left = self._parts_left.pop(name, 0)
        if left and (memory := self.outstanding(name)) is not None:
            part = memory.to(gradient.device, gradient.dtype).view(gradient.shape)
            gradient.add_(part, alpha=1.0 / FLUSH_STEPS)
        if left > 1:
            self._parts_left[name] = left - 1
        elif left:
            self.states[name] = self._new_state(self.plans[name])

    def outstanding(self, name: str) -> Tensor | None:
        """Return the part of a parameter's gradients that this rank has not sent, or None without a memory."""
        return outstanding(self.states[name], self.rank, self.world_size)

    def state_dict(self) -> dict[str, Any]:
        """Return all memories by parameter name: the tensors themselves, as in other state dicts of torch."""
        self.settle()
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "methods": self._methods(),
            "states": dict(self.states),
            "dropped": self.dropped,
            "flush_left": dict(self._parts_left),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError, saying what to do, if `load_state_dict` cannot restore the state."""
        if state["world_size"] != self.world_size:
            raise ValueError(
                f"the state was saved by {state['world_size']} ranks, and there are {self.world_size} now: collect"
                " the states of all ranks and pass them through thinwire.compress.redistribute(states, world_size)"
            )
        if state["rank"] != self.rank:
            raise ValueError(
                f"the state of rank {state['rank']}, on rank {self.rank}: each rank has memories of its own. Save the"
                " state of every rank, or where one file is written for all save sync.gathered() in place of sync, such"
                " as by accelerator.register_for_checkpointing(sync.gathered())"
            )
        methods = self._methods()
        for name in sorted(set(methods) | set(state["methods"])):
            saved, here = state["methods"].get(name, "not compressed"), methods.get(name, "not compressed")
            if saved != here:
                raise ValueError(f"parameter {name!r} is {here} here, and was {saved} when the state was saved")
        for name, plan in self.plans.items():
            entry = state["states"].get(name, {})
            states.check_fits(entry, self._new_state(plan), f"the state of parameter {name!r}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `check_state` has accepted."""
        self._before_step = {}
        self.states = {name: states.copied(entry) for name, entry in state["states"].items()}
        self.dropped, left = bool(state["dropped"]), state["flush_left"]
        self._parts_left = dict(left if isinstance(left, Mapping) else dict.fromkeys(self.plans, left))  # or earlier

    def _new_state(self, plan: Planned) -> State:
        return plan.reduction.init(plan.compressor, plan.parameter, self.rank, self.world_size)

    def _methods(self) -> dict[str, str]:
        return {name: plan.describe() for name, plan in self.plans.items()}


class Statistics:
    """The bytes and seconds of compression, for `Synchronizer.stats` and `Synchronizer.table`.

    Args:
        records: rows of the table, by name.
        stock_bytes: returns what a rank of stock sends for a tensor of so many bytes.
    """

    def __init__(
        self, records: ParameterRecords, world_size: int, stock_bytes: Callable[[int], int] | None = None
    ) -> None:
        self._stock_bytes = stock_bytes or partial(ring_all_reduce_bytes, world_size=world_size)
        self.records, self.world_size, self.stopwatch = records, world_size, Stopwatch()
        self.nonfinite_steps = self.bytes_sent = 0
        self._num_tensors = self._num_missing = 0

    def numbers(self, num_parameters: int) -> dict[str, float]:
        """Return the ``compress/`` entries of `Synchronizer.stats`."""
        seconds = self.stopwatch.seconds
        return {
            "compress/parameters": float(num_parameters),
            "compress/bytes_sent": float(self.bytes_sent),
            "compress/encode_seconds": seconds[Phase.COMPRESS],
            "compress/wire_seconds": seconds[Phase.EXCHANGE],
            "compress/decode_seconds": seconds[Phase.DECOMPRESS],
            "compress/nonfinite_steps": float(self.nonfinite_steps),
            "compress/tensor_missing_rate": self._num_missing / max(1, self._num_tensors),
        }

    def ring_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes that a rank sends for tensors that are summed exactly in a ring."""
        return ring_all_reduce_bytes(sum(tensor.nbytes for tensor in tensors), self.world_size)

    def average(self, channel: Channel, tensors: Sequence[Tensor]) -> None:
        """Average tensors exactly, in place, in one all-reduce for each dtype, and count their bytes."""
        before = channel.exchange.traffic.sent_bytes
        for alike in by_dtype(tensors):
            flat, copy_back = flattened(alike)
            dense_all_reduce(flat, channel, 1.0 / channel.world_size)
            copy_back()
        self.book_others(self.ring_bytes(tensors), channel.exchange.traffic.sent_bytes - before)

    def book_others(self, dense_bytes: int, sent_bytes: int) -> None:
        """Count bytes of gradients that were summed exactly, next to compressed ones."""
        record = self.records.get(OTHERS) or self.records.book(OTHERS, "all-reduce", "dense", "dense")
        record.add(sent_bytes, dense_bytes, dense_bytes)

    def book(self, outcomes: Sequence[Outcome], predicted_bytes: float, sent_bytes: int) -> None:
        """Count bytes for each parameter of a job, shared out by the size of their payloads."""
        weights = [result.payload_bytes for _, result in outcomes]
        sent = share(sent_bytes, weights)
        for index, (plan, result) in enumerate(outcomes):
            parameter = plan.parameter
            by, code = plan.reduction.name, plan.compressor.name
            record = self.records.book(parameter.name, KIND, by, code, result.density, fused=len(outcomes))
            part = weights[index] / sum(weights) if any(weights) else 1 / len(outcomes)
            dense = self._stock_bytes(parameter.numel * parameter.dtype.itemsize)
            record.add(sent[index], predicted_bytes * part, dense)

    def count_missing(self, outcomes: Sequence[Outcome]) -> None:
        """Count tensors of which a sparsifier selected no element."""
        for plan, result in outcomes:
            is_sparse = isinstance(code_of(plan.compressor), Sparsifier)
            self._num_tensors += 1
            self._num_missing += is_sparse and plan.parameter.numel > 0 and result.density == 0.0


@dataclass(frozen=True, eq=False)
class ArrivedMessage:
    """A message of a channel, see `thinwire.compress.reductions.base.Arrived`."""

    channel: Channel
    message: Message

    def read(self, parse: Callable[[Tensor], T]) -> T:
        with self.channel.reading(self.message):
            return parse(self.message.payload)


class ChannelPeers:
    """An implementation of `thinwire.compress.reductions.base.Peers` over an open channel.

    Args:
        channel: the channel of this job.
        next_channel: opens another channel, for a scheme.
        scheme: the scheme of `sparse_sum`; None if nothing is summed that way.
    """

    def __init__(self, channel: Channel, next_channel: Callable[[Subject], Channel], scheme: object = None) -> None:
        self._channel, self._next_channel, self._scheme = channel, next_channel, scheme
        self.rank, self.world_size = channel.rank, channel.world_size
        self.expected_scheme_bytes = 0.0
        """Bytes that schemes would have sent for the same rows with perfectly even ownership."""

    @property
    def hosts(self) -> Hosts:
        return ranks_of_hosts(self._channel.exchange.hosts)

    def among(self, ranks: Sequence[int]) -> ChannelPeers:
        return ChannelPeers(self._channel.among(ranks), self._next_channel)

    def attempt(self, prepare: Callable[[], T]) -> T:
        """Return the result of ``prepare``. If it raises, hang up: peers wait in an all-reduce, which must fail.

        Raises:
            LostPeerError: ``prepare`` failed; the lane hangs up at this error.
        """
        try:
            return prepare()
        except Exception as error:
            raise LostPeerError(
                f"{self._channel.where()}: compressing failed, and this rank leaves its peers in"
                f" the middle of an all-reduce: {type(error).__name__}: {error}"
            ) from error

    def all_reduce(self, tensor: Tensor) -> None:
        self._channel.all_reduce(tensor)

    def all_gather(self, prepare: Callable[[], Tensor], max_bytes: int) -> Sequence[ArrivedMessage]:
        def drafts() -> list[Draft]:
            return [_draft(prepare())] * self.world_size

        return self._arrived(self._channel.swap(Kind.GATHER, drafts, max_bytes))

    def all_to_all(self, prepare: Callable[[], Sequence[Tensor]], max_bytes: int) -> Sequence[ArrivedMessage]:
        return self._arrived(self._channel.swap(Kind.PUSH, lambda: list(map(_draft, prepare())), max_bytes))

    def sparse_sum(
        self, prepare: Callable[[], tuple[Tensor, Tensor]], numel: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(self._scheme, (Scheme, TwoLevel))
        subject = self._channel.subject
        channel = self._next_channel(Subject(f"{subject.name}, as rows", f"{subject.description}\n{numel} elements"))

        def rows() -> SparseRows:
            ids, values = prepare()
            return SparseRows.trusted(ids, values.view(-1, 1), numel)

        held, scheme = agree(rows, self._scheme, channel, chosen)
        total = synchronize(held, scheme, channel, scale)
        mean, itemsize = sum(channel.held) / self.world_size, held.values.element_size()
        demand = Demand(self.world_size, numel, 1, itemsize, mean, total.ids.numel())
        self.expected_scheme_bytes += expected_bytes(scheme, demand)
        return total.ids, total.values.view(-1)

    def _arrived(self, messages: Sequence[Message]) -> list[ArrivedMessage]:
        return [ArrivedMessage(self._channel, message) for message in messages]


def _draft(payload: Tensor) -> Draft:
    """Wrap a payload in a draft. Its format is unused: the agreed compressors give bytes their meaning."""
    return Draft(Format.COO, 0, payload)


class CompressedSync:
    """The mean over ranks of the gradients of compressed parameters, next to `GradientSync`.

    `synchronize` is called by jobs of a lane, on all ranks with the same gradients in the same order. Between steps
    compression can be paused, or dropped for good: all its parameters are then synchronized exactly.

    Args:
        plans: methods of the compressed parameters, by name.
        lane: the lane, for its rank and world_size.
        statistics: counts what was sent.
        scaler: the scaler whose scale gradients carry, or None.
        can_skip: whether `finish_step` may have to forget a step; with a scaler it may in any case.
        staging: copies gradients of a device to the host and means back.
    """

    def __init__(
        self,
        plans: Mapping[str, Planned],
        lane: Lane,
        statistics: Statistics,
        scaler: GradScaler | None = None,
        can_skip: bool = False,
        staging: Staging | None = None,
    ) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.plans = dict(plans)
        self.paused = False
        can_skip = can_skip or self._scaler is not None
        get_scale = None if self._scaler is None else self._scaler.get_scale
        self.memories = Memories(self.plans, lane.rank, lane.world_size, can_skip, get_scale)
        self.statistics, self._stopwatch = statistics, statistics.stopwatch
        self._staging = staging or Staging()
        self._is_finite = True
        self._has_warned = False

    def describe(self) -> list[str]:
        """Return lines on which all ranks must agree."""
        lines = [f"parameter {name!r} is compressed: {plan.describe()}" for name, plan in self.plans.items()]
        return [*lines, f"gradients carry a loss scale: {self._scaler is not None}"]

    def takes(self, name: str) -> bool:
        """Return whether the gradient of a parameter is compressed in this step; the same on all ranks."""
        return name in self.plans and not (self.paused or self.memories.dropped)

    def synchronize(
        self, lane: Lane, gradients: NamedGradients, others: Sequence[Tensor], coded: Coded | None = None
    ) -> None:
        """Replace gradients by their means, in place: ``gradients`` with compression, ``others`` exactly.

        If gradients of any rank are not finite, all ranks get NaN instead of the compressed ones and no state changes.

        Args:
            gradients: gradients by name.
            others: dense and contiguous gradients.
            coded: averages the others that travel losslessly coded, and returns the rest.
        """
        self.memories.settle()
        traffic = lane.exchange.traffic
        before = traffic.sent_bytes
        there = [*(gradient for _, gradient in gradients), *others]
        hosts = self._staging.to_host(*there)
        named = [(name, host) for (name, _), host in zip(gradients, hosts, strict=False)]
        self._is_finite &= self._synchronize(lane, named, hosts[len(named) :], coded)
        if not self._staging.is_host:
            for gradient, mean in zip(there, self._staging.to_device(*hosts), strict=True):
                gradient.copy_(mean)
        self.statistics.bytes_sent += traffic.sent_bytes - before

    def finish_step(self, is_kept: bool = True) -> None:
        """End a pass. If it is not kept, or was not finite, memories are restored to those before the step.

        With a scaler a step ends for each optimizer when that makes it, see `Memories.commit`, or the scaler skips it.
        """
        self.statistics.nonfinite_steps += not self._is_finite
        self.memories.finish_pass(self._is_finite and is_kept, is_over=self._scaler is None)
        self._is_finite = True

    def commit(self, optimizer: torch.optim.Optimizer, names: Collection[str]) -> None:
        """Note that an optimizer is about to step. Only with a scaler is it asked whether it skips: a GPU waits.

        Warn once of a second pass for one step by a compressor that takes each for a step of its own.
        """
        if self._scaler is not None and is_skipped(optimizer):
            return
        twice = [name for name in self.memories.commit(names) if counts_steps(self.plans[name].compressor)]
        if twice and not self._has_warned:
            self._has_warned = True
            warn(
                f"{type(optimizer).__name__} steps after several synchronized backward passes, each of which was a step"
                f" for {self.plans[twice[0]].compressor.name} of parameter {twice[0]!r}, which keeps momentum or signs:"
                " where gradients add up, sums or momentum are wrong. Call no_sync() around all of them but the last"
            )

    def stats(self) -> dict[str, float]:
        """Return the ``compress/`` entries of `Synchronizer.stats`."""
        return self.statistics.numbers(len(self.plans))

    def _synchronize(
        self, lane: Lane, gradients: NamedGradients, others: Sequence[Tensor], coded: Coded | None
    ) -> bool:
        """Replace gradients of the host by their means; return whether all were finite."""
        channel = lane.channel(self._subject(gradients, others))
        traffic = lane.exchange.traffic
        before = traffic.sent_bytes
        finite = all(channel.open(held=int(all(map(is_finite, (*(gradient for _, gradient in gradients), *others))))))
        opening = traffic.sent_bytes - before
        others = others if coded is None else coded(channel, tensors=others)
        is_riding = finite and any(isinstance(self.plans[name].reduction, AllReduce) for name, _ in gradients)
        if alone := [other for other in others if not (is_riding and can_ride(other))]:
            with self._stopwatch.phase(Phase.EXCHANGE):
                self.statistics.average(channel, alone)
        if finite:
            riders = [other for other in others if is_riding and can_ride(other)]
            self._average(lane, channel, gradients, riders, opening)
        else:
            self._refuse(lane, gradients, opening)
        return finite

    def _subject(self, gradients: NamedGradients, others: Sequence[Tensor]) -> Subject:
        lines = [
            f"parameter {name!r}: {gradient.dtype} {list(gradient.shape)}, {self.plans[name].describe()}"
            for name, gradient in gradients
        ]
        lines += [f"others: {other.dtype} {list(other.shape)}" for other in others]
        first, last = gradients[0][0], gradients[-1][0]
        several = f"{len(gradients)} compressed parameters, {first!r} to {last!r}"
        return Subject(f"parameter {first!r}" if first == last else several, "\n".join(lines))

    def _refuse(self, lane: Lane, gradients: NamedGradients, opening: int) -> None:
        for _, gradient in gradients:
            gradient.fill_(float("nan"))
        results = [Result(gradient, gradient.numel()) for _, gradient in gradients]
        self.statistics.book(self._outcomes(gradients, results), opening_bytes(lane.world_size), opening)

    def _average(
        self, lane: Lane, channel: Channel, gradients: NamedGradients, riders: Sequence[Tensor], opening: int
    ) -> None:
        """Average by each reduction. Riders join an all-reduce and need no round."""
        by_reduction: dict[Reduction, list[tuple[str, Tensor]]] = {}
        for name, gradient in gradients:
            by_reduction.setdefault(self.plans[name].reduction, []).append((name, gradient))
        opening_predicted = opening_bytes(lane.world_size)
        for reduction, named in by_reduction.items():
            joining, riders = (riders, []) if isinstance(reduction, AllReduce) else ([], riders)
            results, predicted, sent = self._reduce(lane, channel, reduction, named, joining)
            outcomes = self._outcomes(named, results)
            self.statistics.count_missing(outcomes)
            self.statistics.book(outcomes, opening_predicted + predicted, opening + sent)
            opening_predicted = opening = 0

    def _reduce(
        self, lane: Lane, channel: Channel, reduction: Reduction, gradients: NamedGradients, riders: Sequence[Tensor]
    ) -> tuple[list[Result], float, int]:
        """Average by one reduction, in place; return the results, and the predicted and sent bytes without riders."""
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        with self._stopwatch.phase(Phase.COMPRESS):
            tasks = [self._task(name, gradient, scale) for name, gradient in gradients]
        tasks += [Task(Identity(), Parameter(OTHERS, tuple(rider.shape), rider.dtype), rider, {}) for rider in riders]
        peers = ChannelPeers(channel, lane.channel, reduction.scheme)
        before = channel.exchange.traffic.sent_bytes
        results = reduction.run(tasks, peers, self._stopwatch)
        sent = channel.exchange.traffic.sent_bytes - before
        known = reduction.sent_bytes([task.plan for task in tasks], lane.rank, lane.world_size)
        predicted = known if known is not None else peers.expected_scheme_bytes or sent
        means = results[: len(gradients)]
        with self._stopwatch.phase(Phase.DECOMPRESS):
            for result in means if scale != 1.0 else ():
                result.mean.mul_(scale)
            for gradient, result in zip((*(gradient for _, gradient in gradients), *riders), results, strict=True):
                if gradient.dtype == torch.float16 and self._scaler is None:  # which would skip the step
                    result.mean.clamp_(torch.finfo(gradient.dtype).min, torch.finfo(gradient.dtype).max)
                gradient.copy_(result.mean)
        dense = self.statistics.ring_bytes(riders)  # as if riders had a ring of their own
        if riders:
            self.statistics.book_others(dense, dense)
        return means, predicted - dense, sent - dense

    def _task(self, name: str, gradient: Tensor, scale: float) -> Task:
        plan, state = self.plans[name], self.memories.take(name)
        working = gradient.detach().to("cpu", plan.parameter.working_dtype).contiguous()
        if scale != 1.0:
            working = working / scale
        return Task(plan.compressor, plan.parameter, working, state)

    def _outcomes(self, gradients: NamedGradients, results: Sequence[Result]) -> list[Outcome]:
        return [(self.plans[name], result) for (name, _), result in zip(gradients, results, strict=True)]
