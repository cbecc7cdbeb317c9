"""Two shots: pieces to owners, which decode, add and encode again; sums to all. Bytes do not grow with ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.compress import packing
from thinwire.compress.base import Compressor, Parameter, State, WholeTensor
from thinwire.compress.memory import ErrorFeedback, MomentumCorrection, clipped, with_memory
from thinwire.compress.papers.random_k import RandomK
from thinwire.compress.reductions import messages
from thinwire.compress.reductions.all_gather import check_decodes_alone, encoded
from thinwire.compress.reductions.base import Arrived, Peers, Phase, Plan, Reduction, Result, Stopwatch, Task
from thinwire.compress.state import salted, span
from thinwire.compress.wrappers import Wrapper, core_of, packed_code


@dataclass(frozen=True)
class TwoShot(Reduction):
    """A reduction by all-to-all of compressed pieces, local sum, all-gather of compressed sums, as in 1-bit Adam.

    Rank r owns the r-th piece of every flat gradient. The owner keeps its loss from encoding the mean again in a memory
    of its own (the *server error* of Tang et al., ICML'21, next to the *worker error* of each rank), unless the
    compressor is unbiased. Each rank sends 2 (n - 1) / n of a payload, for any number of ranks n.

    State of a parameter: ``pieces``, the worker's state of each piece by the index of its owner, and ``server``.
    """

    name = "two_shot"

    def check(self, compressor: Compressor, parameter: Parameter) -> None:
        check_decodes_alone(compressor, parameter, "sent in two shots")
        if isinstance(core_of(compressor), WholeTensor):
            raise ValueError(
                f"{compressor.name}: a piece of a flat gradient cannot be compressed for itself, as two shots need"
                f" (parameter {parameter.name!r}): leave out .by()"
            )

    def init(self, compressor: Compressor, parameter: Parameter, rank: int, world_size: int) -> State:
        owned = pieces(parameter, world_size)
        return {
            "pieces": {str(owner): salted(compressor.init(piece), rank) for owner, piece in enumerate(owned)},
            "server": salted(server_side(compressor).init(owned[rank]), world_size + rank),  # draws of its own
        }

    def run(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> list[Result]:
        shots = _Shots(tasks, peers.rank, peers.world_size, stopwatch)
        with stopwatch.phase(Phase.EXCHANGE):
            arrived = peers.all_to_all(shots.push, messages.max_bytes(shots.pushed[peers.rank]))
            sums = peers.all_gather(lambda: shots.pull(arrived), max(map(messages.max_bytes, shots.pulled)))
        return shots.results(sums)

    def sent_bytes(self, plans: Sequence[Plan], rank: int, world_size: int) -> int | None:
        pull = messages.predicted_bytes(_pull_plans(plans, rank, world_size))
        return messages.total([*_pushed_bytes(plans, rank, world_size), *[pull] * (world_size - 1)])


@dataclass(frozen=True)
class ReduceScatter(TwoShot):
    """The first of `TwoShot`'s two shots, after which each rank has the mean of its own piece: FSDP's other dimension.

    Each rank sends (n - 1) / n of a payload. What it did not send it remembers for all pieces, so error feedback costs
    the memory of the whole gradient on each rank.

    State of a parameter: ``pieces``, as in two shots.
    """

    name = "reduce_scatter"

    def init(self, compressor: Compressor, parameter: Parameter, rank: int, world_size: int) -> State:
        return {"pieces": super().init(compressor, parameter, rank, world_size)["pieces"]}

    def run(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> list[Result]:
        """Return means that are zero outside of this rank's piece: the r-th part of the flat gradient."""
        shots = _Shots(tasks, peers.rank, peers.world_size, stopwatch)
        with stopwatch.phase(Phase.EXCHANGE):
            arrived = peers.all_to_all(shots.push, messages.max_bytes(shots.pushed[peers.rank]))
        means = shots.means(arrived)
        results = []
        for index, (task, mean) in enumerate(zip(tasks, means, strict=True)):
            start, stop = span(task.parameter.numel, peers.rank, peers.world_size)
            whole = torch.nn.functional.pad(mean, (start, task.parameter.numel - stop))
            results.append(shots.result(index, whole))
        return results

    def sent_bytes(self, plans: Sequence[Plan], rank: int, world_size: int) -> int | None:
        return messages.total(_pushed_bytes(plans, rank, world_size))


class _Shots:
    """One run: the messages of each shot, and their results."""

    def __init__(self, tasks: Sequence[Task], rank: int, world_size: int, stopwatch: Stopwatch) -> None:
        plans = [task.plan for task in tasks]
        self.pushed = [_push_plans(plans, owner, world_size) for owner in range(world_size)]
        self.pulled = [_pull_plans(plans, owner, world_size) for owner in range(world_size)]
        self._tasks, self._rank, self._world_size, self._stopwatch = tasks, rank, world_size, stopwatch
        self._sent_bytes = [0] * len(tasks)
        self._sent_elements = [0.0] * len(tasks)

    def push(self) -> list[Tensor]:
        """Return the message for each owner: this rank's payload of its piece of each gradient."""
        with self._stopwatch.phase(Phase.COMPRESS):
            gradients = [clipped(task.compressor, task.gradient).view(-1) for task in self._tasks]
            return [packing.join(self._packed_for(owner, gradients)) for owner in range(self._world_size)]

    def means(self, arrived: Sequence[Arrived]) -> list[Tensor]:
        """Return the mean of this rank's own piece of each gradient."""
        plans = self.pushed[self._rank]
        with self._stopwatch.phase(Phase.DECOMPRESS):
            payloads = messages.read(arrived, messages.unpack, [plans] * len(arrived))
            return [
                packed_code(compressor).combine([of_rank[index] for of_rank in payloads], piece)
                for index, (compressor, piece) in enumerate(plans)
            ]

    def pull(self, arrived: Sequence[Arrived]) -> Tensor:
        """Return the message for all: the mean of this rank's own piece of each gradient, encoded again."""
        means = self.means(arrived)
        with self._stopwatch.phase(Phase.COMPRESS):
            packed = []
            for index, ((server, piece), mean, task) in enumerate(
                zip(self.pulled[self._rank], means, self._tasks, strict=True)
            ):
                packed.append(encoded(server, piece, mean, task.state["server"])[0])
                self._sent_bytes[index] += packed[-1].numel()
            return packing.join(packed)

    def results(self, sums: Sequence[Arrived]) -> list[Result]:
        with self._stopwatch.phase(Phase.DECOMPRESS):
            decoded = messages.read(sums, _decoded, self.pulled)
            return [self._result(index, [of_owner[index] for of_owner in decoded]) for index in range(len(self._tasks))]

    def _packed_for(self, owner: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        packed = []
        for index, (task, (compressor, piece)) in enumerate(zip(self._tasks, self.pushed[owner], strict=True)):
            start, stop = span(task.parameter.numel, owner, self._world_size)
            gradient, state = gradients[index][start:stop], task.state["pieces"][str(owner)]
            data, density = encoded(compressor, piece, gradient, state)
            packed.append(data)
            self._sent_bytes[index] += data.numel()
            self._sent_elements[index] += density * piece.numel
        return packed

    def _result(self, index: int, means: Sequence[Tensor]) -> Result:
        task = self._tasks[index]
        for owner, mean in enumerate(means):
            compressor, piece = self.pushed[owner][index]
            compressor.finish(mean, piece, task.state["pieces"][str(owner)])
        server, piece = self.pulled[self._rank][index]
        server.finish(means[self._rank], piece, task.state["server"])
        return self.result(index, torch.cat(list(means)))

    def result(self, index: int, mean: Tensor) -> Result:
        """Return the result of a task from its flat mean."""
        shape = self._tasks[index].parameter.shape
        density = self._sent_elements[index] / max(1, math.prod(shape))
        return Result(mean.view(shape), self._sent_bytes[index], density)


def server_side(compressor: Compressor) -> Compressor:
    """Return an owner's compressor of means: without the worker's memory or momentum, with its own memory if biased."""
    return with_memory(_bare(compressor))


def pieces(parameter: Parameter, world_size: int) -> list[Parameter]:
    """Return the piece of a flat gradient that each rank owns: even ones, with names such as ``fc.weight[2/8]``."""
    return [_piece(parameter, owner, world_size) for owner in range(world_size)]


def _bare(compressor: Compressor) -> Compressor:
    if isinstance(compressor, (ErrorFeedback, MomentumCorrection)):
        return _bare(compressor.inner)
    if isinstance(compressor, RandomK):
        return replace(compressor, unbiased=False)  # owners draw the same elements, which workers have scaled
    if not isinstance(compressor, Wrapper):
        return compressor
    return replace(compressor, inner=_bare(compressor.inner))


def _piece(parameter: Parameter, owner: int, world_size: int) -> Parameter:
    start, stop = span(parameter.numel, owner, world_size)
    return Parameter(f"{parameter.name}[{owner}/{world_size}]", (stop - start,), parameter.dtype)


def _push_plans(plans: Sequence[Plan], owner: int, world_size: int) -> list[Plan]:
    return [(compressor, _piece(parameter, owner, world_size)) for compressor, parameter in plans]


def _pull_plans(plans: Sequence[Plan], owner: int, world_size: int) -> list[Plan]:
    return [(server_side(compressor), _piece(parameter, owner, world_size)) for compressor, parameter in plans]


def _pushed_bytes(plans: Sequence[Plan], rank: int, world_size: int) -> list[int | None]:
    """Return the bytes of the message to each owner but the rank itself."""
    others = (owner for owner in range(world_size) if owner != rank)
    return [messages.predicted_bytes(_push_plans(plans, owner, world_size)) for owner in others]


def _decoded(message: Tensor, plans: Sequence[Plan]) -> list[Tensor]:
    payloads = messages.unpack(message, plans)
    return [server.decompress(payload, piece) for (server, piece), payload in zip(plans, payloads, strict=True)]
