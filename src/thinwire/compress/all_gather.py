"""Payloads of all ranks to all ranks, which each add them up: for whatever cannot be added before it is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from thinwire.compress import messages
from thinwire.compress.base import Compressor, Parameter, Payload, State
from thinwire.compress.exchange import Exchange, Peers, Phase, Plan, Result, Stopwatch, Task


@dataclass(frozen=True)
class AllGather(Exchange):
    """Every rank sends its payloads to all others and combines what arrives in rank order, so all get the same bits."""

    name = "all_gather"

    def check(self, compressor: Compressor, parameter: Parameter) -> None:
        check_decodes_alone(compressor, parameter, "gathered")

    def run(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> list[Result]:
        plans = [task.plan for task in tasks]
        mine: list[tuple[int, float]] = []

        def prepare() -> Tensor:
            with stopwatch.phase(Phase.COMPRESS):
                packed, densities = zip(
                    *(encoded(*task.plan, task.gradient, task.state) for task in tasks), strict=True
                )
                mine.extend(zip((data.numel() for data in packed), densities, strict=True))
                return messages.join(packed)

        with stopwatch.phase(Phase.EXCHANGE):
            arrived = peers.all_gather(prepare, messages.max_bytes(plans))
        with stopwatch.phase(Phase.DECOMPRESS):
            payloads = [message.read(partial(messages.unpack, plans=plans)) for message in arrived]
            return [
                Result(combined(task, [of_rank[place] for of_rank in payloads]), *mine[place])
                for place, task in enumerate(tasks)
            ]

    def sent_bytes(self, plans: Sequence[Plan], rank: int, world_size: int) -> int | None:
        del rank
        message = messages.predicted_bytes(plans)
        return None if message is None else (world_size - 1) * message


def check_decodes_alone(compressor: Compressor, parameter: Parameter, done: str) -> None:
    """Raises ValueError if only the sum of the payloads of all ranks stands for a gradient."""
    traits = compressor.traits
    if traits.residual_after_sum or (traits.summable and len(compressor.round_specs(parameter)) > 1):
        raise ValueError(
            f"{compressor.name}: only the mean of its payloads stands for a gradient, so they cannot be {done}"
            f' (parameter {parameter.name!r}): use exchange="all_reduce" or "auto"'
        )


def encoded(compressor: Compressor, parameter: Parameter, gradient: Tensor, state: State) -> tuple[Tensor, float]:
    """A packed payload, and the part of the elements that it holds."""
    payload = compressor.compress(gradient, parameter, state)
    return compressor.pack(payload, parameter), density(compressor, parameter, payload)


def density(compressor: Compressor, parameter: Parameter, payload: Payload) -> float:
    """The part of the elements that a payload holds; 1 for those that are not sparse."""
    if not compressor.traits.sparse:
        return 1.0
    return payload.parts[0].numel() / max(1, parameter.numel)


def combined(task: Task, payloads: Sequence[Payload]) -> Tensor:
    """The mean that the payloads of all ranks stand for; the state is told."""
    mean = task.compressor.combine(payloads, task.parameter)
    task.compressor.finish(mean, task.parameter, task.state)
    return mean
