"""HiTopKComm, the joint part of all ranks: dense inside a host, the largest elements of its sum to the other hosts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress import packing
from thinwire.compress.base import Parameter, Payload
from thinwire.compress.methods.select import HI_TOP_K, HiTopK, MsTopK
from thinwire.compress.methods.sparsify import Selection
from thinwire.compress.reductions import messages
from thinwire.compress.reductions.base import Arrived, OwnReduction, Peers, Phase, Plan, Result, Stopwatch, Task
from thinwire.compress.state import span
from thinwire.compress.warm_up import DensePayload
from thinwire.compress.wrappers import unwrapped
from thinwire.errors import deferred


@dataclass(frozen=True)
class HiTopKReduction(OwnReduction):
    """A reduction by reduce-scatter in each host, all-gather of selections between hosts, and all-gather in the host.

    Selections travel among ranks of the same index on their hosts. Sums are in the order of the ranks of a host and
    then of the hosts, so all ranks get the same bits.
    """

    name = HI_TOP_K
    method = HiTopK
    title = "HiTopKComm"

    def run(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> list[Result]:
        with stopwatch.phase(Phase.EXCHANGE):
            return _Run(tasks, peers, stopwatch).results()


_PAIRS = MsTopK(varying=True)
"""The code of selections and their unions, of any size."""


class _Run:
    """One run of the reduction.

    A failure does not stop a rank: it takes part to the end, sends the reason in place of its messages, and raises
    then. So the reason reaches its host, its partners on the other hosts, and by them theirs.
    """

    def __init__(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> None:
        self._tasks, self._stopwatch, self._world_size = tasks, stopwatch, peers.world_size
        hosts = peers.hosts
        host = next(ranks for ranks in hosts if peers.rank in ranks)
        self._num_shards = min(map(len, hosts))
        self._shard = host.index(peers.rank)
        self._is_single_host = len(hosts) == 1
        self._inside = peers.among(host)
        has_shard = self._shard < self._num_shards
        self._partners = peers.among([ranks[self._shard] for ranks in hosts]) if has_shard else None
        self._selectors: list[MsTopK] = []
        self._remembering: list[bool] = []
        self._counts = [0] * len(tasks)
        self._packed_bytes = [0] * len(tasks)

    def results(self) -> list[Result]:
        most = packing.packed_bytes(self._specs()) if self._partners else 0
        handed_in = deferred(lambda: self._inside.all_to_all(self._hand_in, most))
        summed = deferred(lambda: self._between_hosts(handed_in))

        def share() -> Tensor:
            selections = summed()
            with self._stopwatch.phase(Phase.COMPRESS):
                return self._pack(selections) if self._partners else torch.empty(0, dtype=torch.uint8)

        plans = [self._plans(shard) for shard in range(self._num_shards)]
        gathered = self._inside.all_gather(share, max(map(messages.max_bytes, plans)))
        with self._stopwatch.phase(Phase.DECOMPRESS):
            payloads = messages.read(gathered, messages.unpack, plans)
            return [
                self._result(number, [of_shard[number] for of_shard in payloads]) for number in range(len(self._tasks))
            ]

    def _hand_in(self) -> list[Tensor]:
        """Return each shard of this rank's gradients and memory, for the rank of the host that has the shard."""
        with self._stopwatch.phase(Phase.COMPRESS):
            payloads = [task.compress() for task in self._tasks]
            self._selectors = [self._selector(*pair) for pair in zip(self._tasks, payloads, strict=True)]
            self._remembering = [not isinstance(payload, DensePayload) for payload in payloads]
            flats = [payload.parts[0] for payload in payloads]
            outgoing = [torch.empty(0, dtype=torch.uint8)] * self._inside.world_size
            for shard in range(self._num_shards):
                spans = [self._span(task.parameter, shard) for task in self._tasks]
                outgoing[shard] = packing.pack([flat[slice(*span)] for flat, span in zip(flats, spans, strict=True)])
            return outgoing

    def _selector(self, task: Task, payload: Payload) -> MsTopK:
        """Return the selector of this step: of everything on one host, and in dense steps of a warm-up."""
        core, _ = unwrapped(task.compressor, task.state)
        assert isinstance(core, HiTopK)
        is_dense = self._is_single_host or isinstance(payload, DensePayload)
        return replace(core.selector, density=1.0) if is_dense else core.selector

    def _between_hosts(self, handed_in: Callable[[], Sequence[Arrived]]) -> list[Selection]:
        """Return the mean of this rank's shards, of all hosts' selections; nothing on ranks without shards."""
        if self._partners is None:
            handed_in()
            self._remember([None] * len(self._tasks))
            return []

        def select() -> Tensor:
            arrived = handed_in()
            with self._stopwatch.phase(Phase.DECOMPRESS):
                shards = self._summed(arrived)
            with self._stopwatch.phase(Phase.COMPRESS):
                selections = [
                    selector.select(shard, replace(task.parameter, shape=(shard.numel(),)), {})
                    for selector, task, shard in zip(self._selectors, self._tasks, shards, strict=True)
                ]
                for shard, (ids, _) in zip(shards, selections, strict=True):
                    shard.index_fill_(0, ids, 0.0)
                self._remember(shards)
                self._counts = [ids.numel() for ids, _ in selections]
                return self._pack(selections)

        plans = self._plans(self._shard)
        arrived = self._partners.all_gather(select, messages.max_bytes(plans))
        with self._stopwatch.phase(Phase.DECOMPRESS):
            payloads = messages.read(arrived, messages.unpack, [plans] * len(arrived))
            return [_mean([of_host[number] for of_host in payloads], self._world_size) for number in range(len(plans))]

    def _summed(self, arrived: Sequence[Arrived]) -> list[Tensor]:
        """Return this rank's shard of each task, added up over the ranks of the host; newly allocated."""
        parse = partial(packing.unpack, specs=self._specs())
        first, *others = [message.read(parse) for message in arrived]
        totals = [shard.clone() for shard in first]
        for shards in others:
            for total, shard in zip(totals, shards, strict=True):
                total.add_(shard)
        return totals

    def _remember(self, shards: Sequence[Tensor | None]) -> None:
        """Keep the unsent rest of this rank's shards, and nothing of the shards that it handed in."""
        for task, kept, is_remembering in zip(self._tasks, shards, self._remembering, strict=True):
            if not is_remembering:
                continue
            _, state = unwrapped(task.compressor, task.state)
            error = state["error"].zero_().view(-1)
            if kept is not None:
                error[slice(*self._span(task.parameter, self._shard))] = kept

    def _pack(self, selections: Sequence[Selection]) -> Tensor:
        packed = []
        for number, ((_, shard), selection) in enumerate(zip(self._plans(self._shard), selections, strict=True)):
            packed.append(_PAIRS.pack(Payload(selection), shard))
            self._packed_bytes[number] += packed[-1].numel()
        return packing.join(packed)

    def _result(self, number: int, payloads: Sequence[Payload]) -> Result:
        task = self._tasks[number]
        flat = torch.zeros(task.parameter.numel, dtype=task.parameter.working_dtype)
        for shard, payload in enumerate(payloads):
            start, stop = self._span(task.parameter, shard)
            ids, values = payload.parts
            flat[start:stop][ids] = values
        mean = flat.view(task.parameter.shape)
        task.finish(mean)
        return Result(mean, self._packed_bytes[number], self._counts[number] / max(1, task.parameter.numel))

    def _span(self, parameter: Parameter, shard: int) -> tuple[int, int]:
        return span(parameter.numel, shard, self._num_shards)

    def _specs(self) -> list[packing.PartSpec]:
        """Return the parts by which this rank's shards travel inside a host."""
        spans = [(self._span(task.parameter, self._shard), task.parameter.working_dtype) for task in self._tasks]
        return [packing.PartSpec(dtype, stop - start) for (start, stop), dtype in spans]

    def _plans(self, shard: int) -> list[Plan]:
        """Return the plans by which selections of shards travel."""
        spans = [(task.parameter, *self._span(task.parameter, shard)) for task in self._tasks]
        return [(_PAIRS, replace(parameter, shape=(stop - start,))) for parameter, start, stop in spans]


def _mean(payloads: Sequence[Payload], world_size: int) -> Selection:
    pieces = [(ids, values.view(-1, 1)) for ids, values in (payload.parts for payload in payloads)]
    ids, total = kernels.sum_rows(pieces)
    return ids, total.view(-1).div_(world_size)
