"""Payloads averaged inside an all-reduce: fewest bytes, if payloads of different ranks can be added."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, Parameter, Payload, State, Summable
from thinwire.compress.memory import Forgotten
from thinwire.compress.reductions.base import Peers, Phase, Plan, Reduction, Result, Stopwatch, Task
from thinwire.compress.reductions.messages import total
from thinwire.compress.reductions.two_shot import TwoShot
from thinwire.compress.wrappers import code_of, summable_code, unwrapped
from thinwire.rows.formats import ring_all_reduce_bytes

Kind = tuple[torch.dtype, Any]
"""What travels together: a dtype, and a code if it has one."""


@dataclass(frozen=True)
class AllReduce(Reduction):
    """A reduction that scales parts by 1 / world_size and sums them by the group's all-reduce, in their own dtype.

    All parts of one dtype travel as one tensor; the compressor with the most rounds sets their number. Parts with a
    code take two shots, whose owners forget what the code loses: the compressor sees it in the mean. Each part begins a
    block of the code, so its mean has the same bits whatever else travels: DDP's buckets change after the first step.
    """

    name = "all_reduce"

    def check(self, compressor: Compressor, parameter: Parameter) -> None:
        code = code_of(compressor)
        if not isinstance(code, Summable):
            raise ValueError(
                f"{compressor.name}: payloads of different ranks cannot be added element by element, so they cannot"
                f" travel inside an all-reduce (parameter {parameter.name!r}): leave out .by()"
            )
        for specs in code.round_specs(parameter):
            for spec in specs:
                assert spec.dtype.is_floating_point, f"{compressor.name} sums {spec.dtype}, which has no mean"

    def run(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> list[Result]:
        sent: list[list[Payload]] = [[] for _ in tasks]
        last: dict[int, Payload] = {}
        with stopwatch.phase(Phase.COMPRESS):
            # so that a failure reaches the peers, in place of the sum that they wait for
            current = peers.attempt(lambda: {index: task.compress() for index, task in enumerate(tasks)})
        while current:
            for index, payload in current.items():
                sent[index].append(payload)
            means = _averaged(current, peers, stopwatch)
            with stopwatch.phase(Phase.COMPRESS):
                current = {}
                for index, mean in means.items():
                    code, state = _code(tasks[index])
                    if (following := code.next_round(mean, tasks[index].parameter, state)) is None:
                        last[index] = mean
                    else:
                        current[index] = following
        with stopwatch.phase(Phase.DECOMPRESS):
            return [_finished(task, last[index], sent[index]) for index, task in enumerate(tasks)]

    def sent_bytes(self, plans: Sequence[Plan], rank: int, world_size: int) -> int | None:
        sizes: list[int | None] = []
        rounds = [summable_code(compressor).round_specs(parameter) for compressor, parameter in plans]
        for parallel in zip_longest(*rounds):
            by_kind: dict[Kind, list[int]] = defaultdict(list)
            for spec in (spec for specs in parallel for spec in specs or ()):
                if spec.numel is None:
                    return None
                by_kind[spec.dtype, spec.code].append(spec.numel)
            for (dtype, code), numels in by_kind.items():
                numel = sum(_padded(numels, code, world_size))
                if code is None:
                    sizes.append(ring_all_reduce_bytes(numel * dtype.itemsize, world_size))
                else:
                    sizes.append(TwoShot().sent_bytes([_parts_plan(code, numel, dtype)], rank, world_size))
        return total(sizes)


def _code(task: Task) -> tuple[Summable, State]:
    """Return the code of a task's payloads, and its state."""
    return summable_code(task.compressor), unwrapped(task.compressor, task.state)[1]


def _averaged(payloads: dict[int, Payload], peers: Peers, stopwatch: Stopwatch) -> dict[int, Payload]:
    """Return the mean of each payload. Summed tensors are newly allocated: a payload may be a view of a state."""
    parts = [part for payload in payloads.values() for part in payload.parts]
    codes = [payload.code for payload in payloads.values() for _ in payload.parts]
    means: list[Tensor] = [torch.empty(0)] * len(parts)
    by_kind: dict[Kind, list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        by_kind[part.dtype, codes[number]].append(number)
    for (dtype, code), numbers in by_kind.items():
        sizes = _padded([parts[number].numel() for number in numbers], code, peers.world_size)
        scale = 1.0 / peers.world_size if code is None else 1.0
        with stopwatch.phase(Phase.COMPRESS):
            flat = torch.zeros(sum(sizes), dtype=dtype)
            for number, piece in zip(numbers, flat.split(sizes), strict=False):
                means[number] = piece[: parts[number].numel()].view(parts[number].shape)
                torch.mul(parts[number], scale, out=means[number])
        if code is None:
            with stopwatch.phase(Phase.EXCHANGE):
                peers.all_reduce(flat)
            if dtype.itemsize == 2:  # parts that were rounded up can add up to more than the dtype has
                flat.clamp_(torch.finfo(dtype).min, torch.finfo(dtype).max)
        else:
            plan = _parts_plan(code, flat.numel(), dtype)
            state = TwoShot().init(*plan, peers.rank, peers.world_size)
            flat.copy_(TwoShot().run([Task(*plan, flat, state)], peers, stopwatch)[0].mean)
    remaining = iter(means)
    return {
        index: replace(payload, parts=tuple(next(remaining) for _ in payload.parts))
        for index, payload in payloads.items()
    }


def _finished(task: Task, mean: Payload, sent: Sequence[Payload]) -> Result:
    code, state = _code(task)
    gradient = code.reconstruct(mean, task.parameter, state)
    task.finish(gradient)
    elements = sum(part.numel() for payload in sent for part in payload.parts)
    return Result(gradient, sum(payload.num_bytes for payload in sent), min(1.0, elements / max(1, gradient.numel())))


def _padded(numels: Sequence[int], code: Any, world_size: int) -> list[int]:
    """Return the elements that each part takes, and the rest: parts and the pieces of owners begin with a block."""
    block = getattr(code, "block", None) or 1
    sizes = [-(-numel // block) * block for numel in numels]
    return sizes if code is None else [*sizes, -sum(sizes) % (block * world_size)]


def _parts_plan(code: Compressor, numel: int, dtype: torch.dtype) -> Plan:
    return Forgotten(code), Parameter("parts of payloads", (numel,), dtype)
