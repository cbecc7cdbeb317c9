"""Dense gradients over NCCL, as stock DDP sends them: where the model's own process group is of that kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.hooks.gradients import GradientSync
from thinwire.lane import Lane
from thinwire.observe.ledger import ParameterRecord
from thinwire.sync.exchange import ring_all_reduce_bytes


@dataclass(frozen=True, eq=False)
class Started:
    """An all-reduce under way."""

    work: dist.Work
    size_bytes: int


class NativeAllReduce:
    """Starts the all-reduce of dense gradients on the thread of DDP's hook.

    So they are in the order of the buckets, which all ranks share, on the communicator and after the kernels after
    which stock DDP has them. A communicator of the lane's own would run beside that of the model in an order that
    differs from rank to rank, of which torch and NCCL warn.

    Args:
        process_group: the model's.
        account: whose books the bytes go to, under ``name``.
    """

    def __init__(self, process_group: dist.ProcessGroup, account: GradientSync, name: str) -> None:
        self._process_group = process_group
        self._account = account
        self._name = name

    def start(self, gradients: Sequence[Tensor]) -> list[Started]:
        """Divide by the world size and sum over the ranks, in place."""
        world_size = self._process_group.size()
        return [self._start(gradient.div_(world_size)) for gradient in gradients]

    def finish(self, lane: Lane, started: Sequence[Started]) -> None:
        """Called by a job of the lane, whose stream waits; its thread does not. Books the bytes of a ring."""
        for one in started:
            one.work.wait()
            moved = ring_all_reduce_bytes(one.size_bytes, lane.world_size)
            record = self._account.records.setdefault(self._name, ParameterRecord(self._name))
            record.kind, record.scheme, record.formats, record.fused = "all-reduce", "NCCL", "dense", 1
            record.density = record.density_after = 1.0
            record.add(moved, moved, moved)
            lane.exchange.traffic.sent_bytes += moved
            lane.exchange.traffic.received_bytes += moved

    def _start(self, gradient: Tensor) -> Started:
        work = dist.all_reduce(gradient, group=self._process_group, async_op=True)
        assert work is not None, "DDP runs on ranks of its group"
        return Started(work, gradient.nbytes)


def is_native(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group all-reduces tensors of this device by NCCL."""
    return device.type == "cuda" and "nccl" in dist.get_backend_config(process_group).lower()
