"""The all-gather of payloads, which each rank adds up: for all payloads that cannot be added before decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from thinwire.compress import packing
from thinwire.compress.base import Compressor, Joint, Packed, Parameter, Payload, State
from thinwire.compress.methods.sparsify import Sparsifier
from thinwire.compress.reductions import messages, stacked
from thinwire.compress.reductions.base import Peers, Phase, Plan, Reduction, Result, Stopwatch, Task
from thinwire.compress.reductions.stacked import Stack
from thinwire.compress.wrappers import code_of, packed_code


@dataclass(frozen=True)
class AllGather(Reduction):
    """A reduction in which every rank sends its payloads to all others and combines all in rank order."""

    name = "all_gather"

    def check(self, compressor: Compressor, parameter: Parameter) -> None:
        check_decodes_alone(compressor, parameter, "gathered")

    def run(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> list[Result]:
        stacks = stacked.stacks([task.plan for task in tasks])
        mine: dict[int, tuple[int, float]] = {}

        def prepare() -> Tensor:
            with stopwatch.phase(Phase.COMPRESS):
                payloads = [task.compress() for task in tasks]
                packed = [stack.pack([payloads[index] for index in stack.indices]) for stack in stacks]
                for stack, data in zip(stacks, packed, strict=True):
                    mine.update(_shares(stack, data.numel(), tasks, payloads))
                return packing.join(packed)

        with stopwatch.phase(Phase.EXCHANGE):
            most = packing.message_bytes([stack.max_bytes for stack in stacks])
            arrived = peers.all_gather(prepare, most)
        with stopwatch.phase(Phase.DECOMPRESS):
            plans = [stack.plan for stack in stacks]
            of_ranks = messages.read(arrived, messages.unpack, [plans] * len(arrived))
            means: dict[int, Tensor] = {}
            for number, stack in enumerate(stacks):
                chosen = [tasks[index] for index in stack.indices]
                parts = _combined(stack, chosen, [of_rank[number] for of_rank in of_ranks])
                means.update(zip(stack.indices, parts, strict=True))
            return [Result(means[index], *mine[index]) for index in range(len(tasks))]

    def sent_bytes(self, plans: Sequence[Plan], rank: int, world_size: int) -> int | None:
        message = stacked.predicted_bytes(plans)
        return None if message is None else (world_size - 1) * message


def _shares(
    stack: Stack, num_bytes: int, tasks: Sequence[Task], payloads: Sequence[Payload]
) -> dict[int, tuple[int, float]]:
    """Return, by index of a task, its bytes of a packed stack, in proportion to its elements, and its density."""
    counts = [payloads[index].parts[0].numel() for index in stack.indices] if stack.offsets else []
    counts = counts if any(counts) else [1] * len(stack.indices)
    ends = [num_bytes * end // max(1, sum(counts)) for end in accumulate(counts, initial=0)]
    densities = [density(*tasks[index].plan, payloads[index]) for index in stack.indices]
    return {
        index: (end - start, part)
        for index, (start, end), part in zip(stack.indices, pairwise(ends), densities, strict=True)
    }


def _combined(stack: Stack, tasks: Sequence[Task], payloads: Sequence[Payload]) -> list[Tensor]:
    """Return the means of all ranks' payloads, and finish the states."""
    code, parameter = stack.plan
    means = stack.parts(packed_code(code).combine(payloads, parameter), [task.parameter.shape for task in tasks])
    for task, mean in zip(tasks, means, strict=True):
        task.finish(mean)
    return means


def check_decodes_alone(compressor: Compressor, parameter: Parameter, done: str) -> None:
    """Raise ValueError if only the sum of the payloads of all ranks is a gradient."""
    code = code_of(compressor)
    if isinstance(code, Joint) or not isinstance(code, Packed):
        raise ValueError(
            f"{compressor.name}: only the mean of its payloads stands for a gradient, so they cannot be {done}"
            f' (parameter {parameter.name!r}): use .by("all_reduce"), or leave out .by()'
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
