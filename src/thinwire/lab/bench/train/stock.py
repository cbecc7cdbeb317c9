"""Torch's own ways to synchronize, as baselines: stock DDP, all-reduce in bfloat16, the PowerSGD hook.

The bytes of their collectives are not counted; the reported ones follow from the ring that Gloo runs.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, not with text.
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.lab.bench.train.account import Account, covered_seconds

POWER_SGD_RANK = 4
POWER_SGD_START_STEP = 10
"""Step before which torch's hook all-reduces exactly; it requires at least 2, because DDP rebuilds its buckets."""


class StockDdp:
    """DDP without a hook. The time of its collectives comes from its own logger, for the step before."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._wire_seconds = self._sent_bytes = 0.0
        gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        self._step_bytes = ring_all_reduce_bytes(gradients, dist.get_world_size(model.process_group))
        model._set_ddp_runtime_logging_sample_rate(1)

    def account(self) -> Account:
        nanoseconds = self._model._get_ddp_logging_data().get("backward_comm_time", 0)
        self._wire_seconds += float(nanoseconds) * 1e-9
        self._sent_bytes += self._step_bytes
        return Account(0.0, self._wire_seconds, 0.0, self._sent_bytes)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class Bf16AllReduce:
    """Cast, all-reduce in bfloat16, cast back: the honest baseline. Torch's own bf16 hook refuses Gloo.

    Gradients are divided by the world size before the cast, and added up in bfloat16 by Gloo's ring.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._encode_seconds = self._decode_seconds = self._sent_bytes = 0.0
        self._intervals: list[tuple[float, float]] = []
        self._world_size = dist.get_world_size(model.process_group)
        model.register_comm_hook(None, self._hook)

    def _hook(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        del state
        started = time.perf_counter()
        gradient = bucket.buffer()
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

    def account(self) -> Account:
        return Account(self._encode_seconds, covered_seconds(self._intervals), self._decode_seconds, self._sent_bytes)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class TorchPowerSgd:
    """Torch's PowerSGD hook (Vogels et al., NeurIPS'19).

    It encodes and decodes between its all-reduces: encode is the time in the hook, wire the rest until the bucket is
    there, and decode unknown.
    """

    def __init__(self, model: DistributedDataParallel, rank: int) -> None:
        self._encode_seconds = self._sent_bytes = 0.0
        self._intervals: list[tuple[float, float]] = []
        self._world_size = dist.get_world_size(model.process_group)
        state = PowerSGDState(
            process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=POWER_SGD_START_STEP
        )
        model.register_comm_hook(state, self._hook)

    def _hook(self, state: PowerSGDState, bucket: dist.GradBucket) -> Future[Tensor]:
        exact = bucket.buffer().numel() if state.iter < POWER_SGD_START_STEP else 0
        sent_before = state.total_numel_after_compression
        started = time.perf_counter()
        future = powerSGD_hook(state, bucket)
        returned = time.perf_counter()
        self._encode_seconds += returned - started
        elements = exact + state.total_numel_after_compression - sent_before
        self._sent_bytes += ring_all_reduce_bytes(elements * bucket.buffer().element_size(), self._world_size)

        def arrived(done: Future[Tensor]) -> Tensor:
            self._intervals.append((returned, time.perf_counter()))
            return done.value()

        return future.then(arrived)

    def account(self) -> Account:
        return Account(self._encode_seconds, covered_seconds(self._intervals), None, self._sent_bytes)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
