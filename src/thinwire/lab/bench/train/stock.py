"""Torch's own ways to synchronize, as baselines: stock DDP, all-reduce in bfloat16, the PowerSGD hook.

The bytes of their collectives are not counted; the reported ones follow from the algorithms that Gloo runs: a ring, and
for the sparse gradients of ``nn.Embedding(sparse=True)`` an all-gather of each rank's distinct rows.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, not with text.
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.process_group import ring_all_reduce_bytes, sparse_all_reduce_bytes
from thinwire.gradients.tables import sparse_tables_of
from thinwire.lab.bench.train.account import Account, RunningMethod, covered_seconds

POWER_SGD_RANK = 4
POWER_SGD_START_STEP = 10
"""Step before which torch's hook all-reduces exactly; it requires at least 2, because DDP rebuilds its buckets."""


class StockDdp(RunningMethod):
    """DDP without a hook. The time of its collectives comes from its own logger, for the step before."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._wire_seconds = self._sent_bytes = 0.0
        self._world_size = dist.get_world_size(model.process_group)
        sparse = {id(weight) for weight in sparse_tables_of(model)}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        dense = sum(parameter.nbytes for parameter in trained if id(parameter) not in sparse)
        self._step_bytes = ring_all_reduce_bytes(dense, self._world_size)
        self._hooks = [parameter.register_hook(self._count_rows) for parameter in trained if id(parameter) in sparse]
        model._set_ddp_runtime_logging_sample_rate(1)

    def _count_rows(self, gradient: Tensor) -> None:
        self._sent_bytes += gathered_bytes(gradient, self._world_size)

    def account(self) -> Account:
        nanoseconds = self._model._get_ddp_logging_data().get("backward_comm_time", 0)
        self._wire_seconds += float(nanoseconds) * 1e-9
        self._sent_bytes += self._step_bytes
        return Account(0.0, self._wire_seconds, 0.0, self._sent_bytes)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def gathered_bytes(gradient: Tensor, world_size: int) -> int:
    """Return the bytes that a rank sends when Gloo sums sparse gradients with as many distinct rows on every rank.

    With different numbers of rows this is exact for the mean over ranks.
    """
    rows = gradient._indices()[0].unique().numel()
    return sparse_all_reduce_bytes([rows] * world_size, 0, gradient[0].numel() * gradient.element_size())


class _Hooked(RunningMethod):
    """Base of hooks of DDP. Lists of rows have nothing to cast or factorize, and are averaged as DDP does."""

    def __init__(self, model: DistributedDataParallel, state: object = None) -> None:
        self._encode_seconds = self._decode_seconds = self._sent_bytes = 0.0
        self._intervals: list[tuple[float, float]] = []
        self._world_size = dist.get_world_size(model.process_group)
        model.register_comm_hook(state, self._hook)

    def _hook(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        gradient = bucket.buffer()
        if not gradient.is_sparse:
            return self._sum(state, bucket, gradient)
        self._sent_bytes += gathered_bytes(gradient, self._world_size)
        work = dist.all_reduce(gradient.div_(self._world_size), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    def account(self) -> Account:
        return Account(self._encode_seconds, covered_seconds(self._intervals), self._decode_seconds, self._sent_bytes)

    @abstractmethod
    def _sum(self, state: Any, bucket: dist.GradBucket, gradient: Tensor) -> Future[Tensor]:
        """Begin the sum of a bucket, whose values are ``gradient``."""


class Bf16AllReduce(_Hooked):
    """Cast, all-reduce in bfloat16, cast back: the honest baseline. Torch's own bf16 hook refuses Gloo.

    Gradients are divided by the world size before the cast, and added up in bfloat16 by Gloo's ring.
    """

    def _sum(self, state: Any, bucket: dist.GradBucket, gradient: Tensor) -> Future[Tensor]:
        started = time.perf_counter()
        small = gradient.div(self._world_size).to(torch.bfloat16)
        sent = time.perf_counter()
        self._encode_seconds += sent - started
        self._sent_bytes += ring_all_reduce_bytes(small.nbytes, self._world_size)
        work = dist.all_reduce(small, async_op=True)
        assert work is not None

        def decode(done: Future[list[Tensor]]) -> Tensor:
            arrived = time.perf_counter()
            self._intervals.append((sent, arrived))
            gradient.copy_(done.value()[0])
            self._decode_seconds += time.perf_counter() - arrived
            return gradient

        return work.get_future().then(decode)


class RankOrderAllReduce(_Hooked):
    """The uncoded sum in rank order, in float32 or wider, scaled at the end: what a lossless sum has the bits of.

    Each rank adds up a piece of the bucket and sends the sum to all. It waits in the hook, so nothing overlaps with
    backward: it is there for its bits, not for its time.
    """

    def _sum(self, state: Any, bucket: dist.GradBucket, gradient: Tensor) -> Future[Tensor]:
        ranks, started = self._world_size, time.perf_counter()
        width = -(-gradient.numel() // ranks)
        padded = torch.nn.functional.pad(gradient, (0, ranks * width - gradient.numel()))
        pieces = torch.empty_like(padded)
        dist.all_to_all_single(pieces, padded)
        dist.all_gather(list(padded.view(ranks, width).unbind()), rank_order_sum(pieces.view(ranks, width).unbind()))
        wide = torch.promote_types(gradient.dtype, torch.float32)
        gradient.copy_(padded[: gradient.numel()].to(wide) * (1.0 / ranks))
        self._intervals.append((started, time.perf_counter()))
        self._sent_bytes += ring_all_reduce_bytes(padded.nbytes, ranks)
        future: Future[Tensor] = Future()
        future.set_result(gradient)
        return future


def rank_order_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors in their order: of float32 in float32, of 16-bit ones in float32 and rounded once."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    total = tensors[0].to(wide, copy=True)
    for tensor in tensors[1:]:
        total += tensor.to(wide)
    return total.to(tensors[0].dtype)


class TorchPowerSgd(_Hooked):
    """Torch's PowerSGD hook (Vogels et al., NeurIPS'19).

    It encodes and decodes between its all-reduces: encode is the time in the hook, wire the rest until the bucket is
    there, and decode unknown.
    """

    def __init__(self, model: DistributedDataParallel, rank: int) -> None:
        state = PowerSGDState(
            process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=POWER_SGD_START_STEP
        )
        super().__init__(model, state)

    def _sum(self, state: Any, bucket: dist.GradBucket, gradient: Tensor) -> Future[Tensor]:
        exact = gradient.numel() if state.iter < POWER_SGD_START_STEP else 0
        sent_before = state.total_numel_after_compression
        started = time.perf_counter()
        future = powerSGD_hook(state, bucket)
        returned = time.perf_counter()
        self._encode_seconds += returned - started
        elements = exact + state.total_numel_after_compression - sent_before
        self._sent_bytes += ring_all_reduce_bytes(elements * gradient.element_size(), self._world_size)

        def arrived(done: Future[Tensor]) -> Tensor:
            self._intervals.append((returned, time.perf_counter()))
            return done.value()

        return future.then(arrived)

    def account(self) -> Account:
        return replace(super().account(), decode_seconds=None)
