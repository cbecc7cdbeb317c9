"""The all-gather of payloads, which each rank adds up: for all payloads that cannot be added before decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from torch import Tensor

from thinwire.compress.base import Compressor, Joint, Packed, Parameter, Payload, State
from thinwire.compress.methods.sparsify import Sparsifier
from thinwire.compress.reduction import messages, stacked
from thinwire.compress.reduction.base import Peers, Phase, Plan, Reduction, Result, Stopwatch, Task
from thinwire.compress.reduction.stacked import Stack
from thinwire.compress.wrappers import code_of, packed_code


@dataclass(frozen=True)
class AllGather(Reduction):
    """A reduction in which every rank sends its payloads to all others and combines all in rank order."""

    name = "all_gather"

    def check(self, compressor: Compressor, parameter: Parameter) -> None:
        check_decodes_alone(compressor, parameter, "gathered")

    def run(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> list[Result]:
        ways = stacked.stacks([task.plan for task in tasks])
        mine: dict[int, tuple[int, float]] = {}

        def prepare() -> Tensor:
            with stopwatch.phase(Phase.COMPRESS):
                payloads = [task.compressor.compress(task.gradient, task.parameter, task.state) for task in tasks]
                packed = [way.pack([payloads[place] for place in way.places]) for way in ways]
                for way, data in zip(ways, packed, strict=True):
                    mine.update(_shares(way, data.numel(), tasks, payloads))
                return messages.join(packed)

        with stopwatch.phase(Phase.EXCHANGE):
            most = messages.message_bytes([way.max_bytes for way in ways])
            arrived = peers.all_gather(prepare, most)
        with stopwatch.phase(Phase.DECOMPRESS):
            plans = [way.plan for way in ways]
            of_ranks = [message.read(partial(messages.unpack, plans=plans)) for message in arrived]
            means: dict[int, Tensor] = {}
            for number, way in enumerate(ways):
                chosen = [tasks[place] for place in way.places]
                parts = _combined(way, chosen, [of_rank[number] for of_rank in of_ranks])
                means.update(zip(way.places, parts, strict=True))
            return [Result(means[place], *mine[place]) for place in range(len(tasks))]

    def sent_bytes(self, plans: Sequence[Plan], rank: int, world_size: int) -> int | None:
        message = stacked.predicted_bytes(plans)
        return None if message is None else (world_size - 1) * message


def _shares(
    way: Stack, num_bytes: int, tasks: Sequence[Task], payloads: Sequence[Payload]
) -> dict[int, tuple[int, float]]:
    """Return, by index of a task, its bytes of a packed stack, in proportion to its elements, and its density."""
    counts = [payloads[place].parts[0].numel() for place in way.places] if way.offsets else []
    counts = counts if any(counts) else [1] * len(way.places)
    ends = [num_bytes * end // max(1, sum(counts)) for end in accumulate(counts, initial=0)]
    densities = [density(*tasks[place].plan, payloads[place]) for place in way.places]
    return {
        place: (end - start, part)
        for place, (start, end), part in zip(way.places, pairwise(ends), densities, strict=True)
    }


def _combined(way: Stack, tasks: Sequence[Task], payloads: Sequence[Payload]) -> list[Tensor]:
    """Return the means of all ranks' payloads, and finish the states."""
    if not way.offsets:
        return [combined(tasks[0], payloads)]
    code, parameter = way.plan
    means = way.parts(packed_code(code).combine(payloads, parameter), [task.parameter.shape for task in tasks])
    for task, mean in zip(tasks, means, strict=True):
        task.compressor.finish(mean, task.parameter, task.state)
    return means


def check_decodes_alone(compressor: Compressor, parameter: Parameter, done: str) -> None:
    """Raise ValueError if only the sum of the payloads of all ranks is a gradient."""
    code = code_of(compressor)
    if isinstance(code, Joint) or not isinstance(code, Packed):
        raise ValueError(
            f"{compressor.name}: only the mean of its payloads stands for a gradient, so they cannot be {done}"
            f' (parameter {parameter.name!r}): use exchange="all_reduce" or "auto"'
        )


def encoded(compressor: Compressor, parameter: Parameter, gradient: Tensor, state: State) -> tuple[Tensor, float]:
    """Return a packed payload, and the fraction of the elements in it."""
    payload = compressor.compress(gradient, parameter, state)
    return packed_code(compressor).pack(payload, parameter), density(compressor, parameter, payload)


def density(compressor: Compressor, parameter: Parameter, payload: Payload) -> float:
    """Return the fraction of the elements in a payload; 1 for payloads that are not sparse."""
    if not isinstance(code_of(compressor), Sparsifier):
        return 1.0
    return payload.parts[0].numel() / max(1, parameter.numel)


def combined(task: Task, payloads: Sequence[Payload]) -> Tensor:
    """Return the mean of all ranks' payloads, and finish the state."""
    mean = packed_code(task.compressor).combine(payloads, task.parameter)
    task.compressor.finish(mean, task.parameter, task.state)
    return mean
