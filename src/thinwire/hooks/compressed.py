"""Synchronize the gradients of named parameters with compression, and keep their states and account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thinwire.compress import state as states
from thinwire.compress.all_reduce import AllReduce
from thinwire.compress.base import State
from thinwire.compress.exchange import Exchange, Phase, Result, Stopwatch, Task
from thinwire.compress.regroup import outstanding
from thinwire.hooks.compression import Compression, Planned, PlannedCompression
from thinwire.hooks.dense import can_ride, exact_task, fused_all_reduce, is_finite
from thinwire.hooks.fusion import share
from thinwire.hooks.peers import ChannelPeers
from thinwire.lane import Lane
from thinwire.observe.ledger import ParameterRecord
from thinwire.sync.channel import Channel, Subject
from thinwire.sync.cost import opening_bytes
from thinwire.sync.exchange import ring_all_reduce_bytes

KIND = "compressed"
FLUSH_STEPS = 20
"""Over how many steps memories are handed out when compression ends: at once they would be a step as long as many."""

NamedGradients = Sequence[tuple[str, Tensor]]


class CompressedSync:
    """Mean over ranks of the gradients of the parameters that are compressed. Next to `GradientSync`.

    `synchronize` is called by jobs of a lane, on all ranks with the same gradients in the same order. Between steps
    compression can be paused, or dropped for good: all its parameters are then synchronized exactly.

    Args:
        plans: of the parameters that are compressed, by name.
        compression: what they follow from.
        lane: tells rank and world_size.
        records: where accounts are kept, by name.
    """

    def __init__(
        self,
        plans: Mapping[str, Planned],
        compression: Compression | PlannedCompression,
        lane: Lane,
        records: dict[str, ParameterRecord],
    ) -> None:
        self.plans = plans
        self.stopwatch = Stopwatch()
        self.nonfinite_steps = 0
        self.bytes_sent = 0
        self.paused = False
        self._records = records
        self._rank, self._world_size = lane.rank, lane.world_size
        self._scheme = compression.scheme
        scaler = compression.grad_scaler
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._units: dict[str, Planned] = dict(plans)  # what is compressed as one
        self._states: dict[str, State] = {name: self._new_state(plan) for name, plan in plans.items()}
        self._before_step: dict[str, State] = {}
        self._is_finite = True
        self._dropped = False
        self._flush_left = 0
        self._num_tensors = self._num_missing = 0

    def describe(self) -> list[str]:
        """Lines on which all ranks must agree."""
        lines = [f"parameter {name!r} is compressed: {self._method(plan)}" for name, plan in self.plans.items()]
        return [*lines, f"gradients carry a loss scale: {self._scaler is not None}"]

    def takes(self, name: str) -> bool:
        """Whether the gradient of a parameter is compressed in this step; the same on all ranks."""
        return name in self.plans and not (self.paused or self._dropped)

    def drop(self) -> bool:
        """Compress nothing from the next step on, on all ranks; whether memories are handed out to coming gradients.

        They are not where gradients carry a loss scale: a step that is skipped would lose its part. They stay as they
        are then, in `state_dict`.
        """
        self._dropped = True
        self._flush_left = FLUSH_STEPS if self._scaler is None else 0
        return self._flush_left > 0

    def release(self, name: str, gradient: Tensor) -> None:
        """After `drop`: add to a gradient its part of what was never sent of its parameter, before it is summed."""
        if self._flush_left == 0 or name not in self.plans:
            return
        memory = self.outstanding(name)
        if memory is not None:
            part = memory.to(gradient.device, gradient.dtype).view(gradient.shape)
            gradient.add_(part, alpha=1.0 / FLUSH_STEPS)

    def outstanding(self, name: str) -> Tensor | None:
        """What this rank has not sent of a parameter's gradients; None without a memory."""
        return outstanding(self._states[name], self._rank, self._world_size)

    def synchronize(self, lane: Lane, gradients: NamedGradients, others: Sequence[Tensor], account: str) -> None:
        """Replace gradients by their means, in place: these compressed, the others exactly, together.

        If those of any rank are not finite, all ranks get NaN in place of the compressed ones and no state changes.

        Args:
            gradients: by name.
            others: dense and contiguous.
            account: the record of the others.
        """
        channel = lane.channel(self._subject(gradients, others))
        traffic = lane.exchange.traffic
        before = traffic.sent_bytes
        finite = channel.open(held=int(all(map(is_finite, (*(gradient for _, gradient in gradients), *others)))))
        opening = Booking(opening_bytes(lane.world_size), traffic.sent_bytes - before)
        riding = all(finite) and any(isinstance(self._units[name].exchange, AllReduce) for name, _ in gradients)
        riders = [(account, other) for other in others if riding and can_ride(other)]
        alone = [other for other in others if not (riding and can_ride(other))]
        if alone:
            self._sum_others(channel, alone, account)
        if all(finite):
            self._average(lane, channel, gradients, riders, opening)
        else:
            self._is_finite = False
            for _, gradient in gradients:
                gradient.fill_(float("nan"))
            results = [Result(gradient, gradient.numel()) for _, gradient in gradients]
            self._book(self._of_parameters([name for name, _ in gradients], results), opening)
        self.bytes_sent += traffic.sent_bytes - before

    def finish_step(self) -> None:
        """With a scaler, which skips a step that overflowed, memories are as they were before it."""
        if not self._is_finite:
            self.nonfinite_steps += 1
            self._states.update(self._before_step)
        self._is_finite, self._before_step = True, {}
        if self._flush_left > 0:
            self._flush_left -= 1
            if self._flush_left == 0:
                self._states = {name: self._new_state(plan) for name, plan in self._units.items()}

    def stats(self) -> dict[str, float]:
        """For `Synchronizer.stats`."""
        seconds = self.stopwatch.seconds
        return {
            "compress/parameters": float(len(self.plans)),
            "compress/bytes_sent": float(self.bytes_sent),
            "compress/encode_seconds": seconds[Phase.COMPRESS],
            "compress/wire_seconds": seconds[Phase.EXCHANGE],
            "compress/decode_seconds": seconds[Phase.DECOMPRESS],
            "compress/nonfinite_steps": float(self.nonfinite_steps),
            "compress/tensor_missing_rate": self._num_missing / max(1, self._num_tensors),
        }

    def state_dict(self) -> dict[str, Any]:
        """All memories, by parameter name: the tensors themselves, as other state dicts of torch have them."""
        return {
            "rank": self._rank,
            "world_size": self._world_size,
            "methods": self._methods(),
            "states": dict(self._states),
            "dropped": self._dropped,
            "flush_left": self._flush_left,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError, saying what to do, if `load_state_dict` cannot take it."""
        if state["world_size"] != self._world_size:
            raise ValueError(
                f"the state was saved by {state['world_size']} ranks, and there are {self._world_size} now: collect"
                " those of all ranks and pass them through thinwire.compress.redistribute(states, world_size)"
            )
        if state["rank"] != self._rank:
            raise ValueError(
                f"the state of rank {state['rank']}, on rank {self._rank}: each rank has memories of its own. Save the"
                " state of every rank, or where one file is written for all save sync.gathered() in place of sync, such"
                " as by accelerator.register_for_checkpointing(sync.gathered())"
            )
        methods = self._methods()
        for name in sorted(set(methods) | set(state["methods"])):
            saved, here = state["methods"].get(name, "not compressed"), methods.get(name, "not compressed")
            if saved != here:
                raise ValueError(f"parameter {name!r} is {here} here, and was {saved} when the state was saved")
        self._check_memories(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `check_state` has found to fit."""
        self._states = {name: states.copied(entry) for name, entry in state["states"].items()}
        self._dropped, self._flush_left = bool(state["dropped"]), int(state["flush_left"])

    def _check_memories(self, state: Mapping[str, Any]) -> None:
        for name, plan in self._units.items():
            entry = state["states"].get(name, {})
            states.check_fits(entry, self._new_state(plan), f"the state of parameter {name!r}")

    def _new_state(self, plan: Planned) -> State:
        return plan.exchange.init(plan.compressor, plan.parameter, self._rank, self._world_size)

    def _method(self, plan: Planned) -> str:
        return plan.describe()

    def _methods(self) -> dict[str, str]:
        return {name: self._method(plan) for name, plan in self.plans.items()}

    def _subject(self, gradients: NamedGradients, others: Sequence[Tensor]) -> Subject:
        lines = [
            f"parameter {name!r}: {gradient.dtype} {list(gradient.shape)}, {self._units[name].describe()}"
            for name, gradient in gradients
        ]
        lines += [f"others: {other.dtype} {list(other.shape)}" for other in others]
        first, last = gradients[0][0], gradients[-1][0]
        span = (
            f"parameter {first!r}"
            if first == last
            else f"{len(gradients)} compressed parameters, {first!r} to {last!r}"
        )
        return Subject(span, "\n".join(lines))

    def _sum_others(self, channel: Channel, others: Sequence[Tensor], account: str) -> None:
        traffic = channel.exchange.traffic
        before = traffic.sent_bytes
        with self.stopwatch.phase(Phase.EXCHANGE):
            fused_all_reduce(channel, others)
        self._book_others(others, account, traffic.sent_bytes - before)

    def _book_others(self, others: Sequence[Tensor], account: str, sent_bytes: int | None = None) -> int:
        """Returns what others take in a ring, which is also what they sent unless something else was counted."""
        record = self._records.setdefault(account, ParameterRecord(account, "all-reduce", "dense", "dense"))
        dense = ring_all_reduce_bytes(sum(other.nbytes for other in others), self._world_size)
        record.add(dense if sent_bytes is None else sent_bytes, dense, dense)
        return dense

    def _average(
        self, lane: Lane, channel: Channel, gradients: NamedGradients, riders: NamedGradients, opening: Booking
    ) -> None:
        """Riders, by the name of their account, need no round of their own: they join the first of an all-reduce."""
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        by_exchange: dict[Exchange, list[int]] = {}
        for place, (name, _) in enumerate(gradients):
            by_exchange.setdefault(self._units[name].exchange, []).append(place)
        for exchange, places in by_exchange.items():
            chosen = [gradients[place] for place in places]
            with self.stopwatch.phase(Phase.COMPRESS):
                tasks = [self._task(name, gradient, scale) for name, gradient in chosen]
            joining, riders = (riders, []) if isinstance(exchange, AllReduce) else ([], riders)
            tasks += [exact_task(name, other) for name, other in joining]
            peers = ChannelPeers(channel, lane.channel, self._scheme)
            before = channel.exchange.traffic.sent_bytes
            results = exchange.run(tasks, peers, self.stopwatch)
            sent = channel.exchange.traffic.sent_bytes - before
            predicted = exchange.sent_bytes([task.plan for task in tasks], self._rank, self._world_size)
            if predicted is None:
                predicted = peers.expected_scheme_bytes or sent
            with self.stopwatch.phase(Phase.DECOMPRESS):
                for result in results[: len(chosen)] if scale != 1.0 else ():
                    result.mean.mul_(scale)
                for (_, gradient), result in zip((*chosen, *joining), results, strict=True):
                    gradient.copy_(result.mean)
            if joining:
                dense = self._book_others([other for _, other in joining], joining[0][0])
                predicted, sent = predicted - dense, sent - dense
            booking = Booking(opening.predicted_bytes + predicted, opening.sent_bytes + sent)
            booked = self._of_parameters([name for name, _ in chosen], results[: len(chosen)])
            self._count(booked)
            self._book(booked, booking)
            opening = Booking()

    def _of_parameters(self, names: Sequence[str], results: Sequence[Result]) -> list[tuple[Planned, Result]]:
        """What became of each parameter."""
        return [(self._units[name], result) for name, result in zip(names, results, strict=True)]

    def _count(self, booked: Sequence[tuple[Planned, Result]]) -> None:
        """Tensors of which a sparsifier chose no element."""
        for plan, result in booked:
            self._num_tensors += 1
            self._num_missing += plan.compressor.traits.sparse and plan.parameter.numel > 0 and result.density == 0.0

    def _task(self, name: str, gradient: Tensor, scale: float) -> Task:
        plan, state = self._units[name], self._states[name]
        if self._scaler is not None:
            self._before_step.setdefault(name, states.copied(state))
        working = gradient.detach().to("cpu", plan.parameter.working_dtype).contiguous()
        if scale != 1.0:
            working = working / scale
        return Task(plan.compressor, plan.parameter, working, state)

    def _book(self, booked: Sequence[tuple[Planned, Result]], booking: Booking) -> None:
        weights = [result.payload_bytes for _, result in booked]
        sent = share(booking.sent_bytes, weights)
        for place, (plan, result) in enumerate(booked):
            parameter = plan.parameter
            record = self._records.setdefault(parameter.name, ParameterRecord(parameter.name, KIND))
            record.scheme, record.formats, record.fused = plan.exchange.name, plan.compressor.name, len(booked)
            record.density = result.density
            part = weights[place] / sum(weights) if any(weights) else 1 / len(booked)
            dense = ring_all_reduce_bytes(parameter.numel * parameter.dtype.itemsize, self._world_size)
            record.add(sent[place], booking.predicted_bytes * part, dense)


@dataclass(frozen=True)
class Booking:
    """Bytes to be shared out among the parameters of a job."""

    predicted_bytes: float = 0.0
    sent_bytes: int = 0
