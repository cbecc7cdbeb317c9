"""Payloads averaged inside an all-reduce: fewest bytes, if payloads of different ranks can be added."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, Parameter, Payload, State, Summable
from thinwire.compress.reduction.base import Peers, Phase, Plan, Reduction, Result, Stopwatch, Task
from thinwire.compress.wrappers import code_of, summable_code, unwrapped
from thinwire.wire import ring_all_reduce_bytes


@dataclass(frozen=True)
class AllReduce(Reduction):
    """A reduction that scales parts by 1 / world_size and sums them by the group's all-reduce, in their own dtype.

    All parts of one dtype travel as one tensor; the compressor with the most rounds sets their number.
    """

    name = "all_reduce"

    def check(self, compressor: Compressor, parameter: Parameter) -> None:
        code = code_of(compressor)
        if not isinstance(code, Summable):
            raise ValueError(
                f"{compressor.name}: payloads of different ranks cannot be added element by element, so they cannot"
                f' travel inside an all-reduce (parameter {parameter.name!r}): use exchange="auto"'
            )
        for specs in code.round_specs(parameter):
            for spec in specs:
                assert spec.dtype.is_floating_point, f"{compressor.name} sums {spec.dtype}, which has no mean"

    def run(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> list[Result]:
        sent: list[list[Tensor]] = [[] for _ in tasks]
        last: dict[int, Payload] = {}
        with stopwatch.phase(Phase.COMPRESS):
            current = self._encoded(tasks, peers)
        while current:
            for place, payload in current.items():
                sent[place].extend(payload.parts)
            means = _averaged(current, peers, stopwatch)
            with stopwatch.phase(Phase.COMPRESS):
                current = {}
                for place, mean in means.items():
                    code, state = _code(tasks[place])
                    following = code.next_round(mean, tasks[place].parameter, state)
                    if following is None:
                        last[place] = mean
                    else:
                        current[place] = following
        with stopwatch.phase(Phase.DECOMPRESS):
            return [_finished(task, last[place], sent[place]) for place, task in enumerate(tasks)]

    def sent_bytes(self, plans: Sequence[Plan], rank: int, world_size: int) -> int | None:
        total = 0
        rounds = [summable_code(compressor).round_specs(parameter) for compressor, parameter in plans]
        for parallel in zip_longest(*rounds):
            by_dtype: dict[torch.dtype, int] = defaultdict(int)
            for spec in (spec for specs in parallel for spec in specs or ()):
                if spec.numel is None:
                    return None
                by_dtype[spec.dtype] += spec.numel * spec.dtype.itemsize
            total += sum(ring_all_reduce_bytes(num_bytes, world_size) for num_bytes in by_dtype.values())
        return total

    @staticmethod
    def _encoded(tasks: Sequence[Task], peers: Peers) -> dict[int, Payload]:
        """Compress all tasks; a failure reaches the peers in place of the sum that they wait for."""

        def prepare() -> dict[int, Payload]:
            return {
                place: task.compressor.compress(task.gradient, task.parameter, task.state)
                for place, task in enumerate(tasks)
            }

        return peers.attempt(prepare)


def _code(task: Task) -> tuple[Summable, State]:
    """Return the code of a task's payloads, and its state."""
    _, state = unwrapped(task.compressor, task.state)
    return summable_code(task.compressor), state


def _averaged(payloads: dict[int, Payload], peers: Peers, stopwatch: Stopwatch) -> dict[int, Payload]:
    """Return the mean of each payload. Summed tensors are newly allocated: a payload may be a view of a state."""
    parts = [part for payload in payloads.values() for part in payload.parts]
    means: list[Tensor] = [torch.empty(0)] * len(parts)
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        by_dtype[part.dtype].append(number)
    for dtype, numbers in by_dtype.items():
        sizes = [parts[number].numel() for number in numbers]
        with stopwatch.phase(Phase.COMPRESS):
            flat = torch.empty(sum(sizes), dtype=dtype)
            for number, piece in zip(numbers, flat.split(sizes), strict=True):
                torch.mul(parts[number].reshape(-1), 1.0 / peers.world_size, out=piece)
        with stopwatch.phase(Phase.EXCHANGE):
            peers.all_reduce(flat)
        for number, piece in zip(numbers, flat.split(sizes), strict=True):
            means[number] = piece.view(parts[number].shape)
    remaining = iter(means)
    return {
        place: replace(payload, parts=tuple(next(remaining) for _ in payload.parts))
        for place, payload in payloads.items()
    }


def _finished(task: Task, mean: Payload, sent: Sequence[Tensor]) -> Result:
    code, state = _code(task)
    gradient = code.reconstruct(mean, task.parameter, state)
    task.compressor.finish(gradient, task.parameter, task.state)
    elements = sum(part.numel() for part in sent)
    return Result(gradient, Payload(tuple(sent)).num_bytes, min(1.0, elements / max(1, gradient.numel())))
