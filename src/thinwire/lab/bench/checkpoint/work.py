"""Training during which checkpoints are made: a model of a given size that mostly waits, or a job of `bench train`."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.lab.bench.jobs.job import Data, Job, Samples
from thinwire.lab.bench.jobs.named import get_job

SYNTHETIC = "synthetic"
LAYERS = 8
_STATE_BYTES_PER_PARAMETER = 12  # float32, and the two moments of Adam
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BATCH_SIZE = 4


@dataclass(frozen=True)
class TrainingWork:
    """Settings of the training on each rank.

    Args:
        job: SYNTHETIC, or a name of `thinwire.lab.bench.jobs`.
        state_bytes: approximate size of the synthetic model and its optimizer, on every rank.
        dtype: of the parameters of the synthetic model, and of the optimizer's moments: float32 or bfloat16.
        compute_seconds: part of a step in which a rank sleeps, a third of it in forward and the rest in backward: the
            time of an accelerator, which uses no core of the machine that plays all hosts.

    Raises:
        ValueError: an unknown job, too small a state, or negative seconds.
    """

    job: str = SYNTHETIC
    state_bytes: int = 4_000_000
    compute_seconds: float = 1.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.job != SYNTHETIC:
            get_job(self.job)
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: one of {', '.join(_DTYPES)}")
        if self.state_bytes < LAYERS * _STATE_BYTES_PER_PARAMETER or self.compute_seconds < 0:
            raise ValueError(f"a state of {self.state_bytes} bytes and {self.compute_seconds} s of compute cannot be")

    def load(self) -> Data | None:
        """Load the data that all ranks read; None for the synthetic model. Raises ImportError."""
        return None if self.job == SYNTHETIC else get_job(self.job).load()


class Accelerator:
    """An emulated accelerator whose work lasts a fixed time under any load of the machine: a host that wakes up late
    from one piece of work sleeps less for the next, just as an accelerator does not wait for a host that launches
    kernels ahead of time."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def begin_step(self) -> None:
        self._free_at = time.perf_counter()

    def work(self, seconds: float) -> None:
        """Sleep until this piece of work is done, which began at the end of the previous one."""
        self._free_at += seconds
        time.sleep(max(0.0, self._free_at - time.perf_counter()))


class Compute(torch.autograd.Function):
    """Identity function at a cost of some accelerator seconds in forward, and twice that in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, accelerator: Accelerator, seconds: float) -> Tensor:
        ctx.accelerator, ctx.seconds = accelerator, seconds
        accelerator.work(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.accelerator.work(2 * ctx.seconds)
        return grads[0], None, None


class WaitingNet(nn.Module):
    """Linear layers, each followed by its share of an accelerator's time, and dropout."""

    def __init__(self, width: int, accelerator: Accelerator, compute_seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        self.dropout = nn.Dropout(0.1)
        self._accelerator, self._seconds = accelerator, compute_seconds / 3 / LAYERS

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Compute.apply(self.dropout(torch.tanh(layer(x))), self._accelerator, self._seconds)
        return x


class Batches:
    """Batches of a rank; the state is their number so far, so that a restored training goes on with the next."""

    def __init__(self, job: Job, data: Data, rank: int, world_size: int) -> None:
        self._arguments = (job, data, rank, world_size)
        self._start()

    def _start(self) -> None:
        job, data, rank, world_size = self._arguments
        self._batches: Iterator[Samples] = job.batches(data, rank, world_size, seed=0)
        self._taken = 0

    def next(self) -> Samples:
        self._taken += 1
        return next(self._batches)

    def state_dict(self) -> dict[str, int]:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start()
        for _ in range(state["taken"]):
            self.next()


class Trainer:
    """One rank of the training: the same parameters on all ranks, different data on each.

    The model is not in DDP, which sums in another order once it has rebuilt its buckets, so that no restart could be
    bitwise equal; `thinwire.attach` averages the gradients, and by nothing that the clock decides.
    """

    def __init__(self, work: TrainingWork, data: Data | None, rank: int, world_size: int) -> None:
        self._work, self._batches, self._accelerator = work, None, Accelerator()
        torch.manual_seed(0)
        if data is None:
            dtype = _DTYPES[work.dtype]
            parameter_bytes = _STATE_BYTES_PER_PARAMETER * dtype.itemsize // 4
            width = max(1, round(math.sqrt(work.state_bytes / parameter_bytes / LAYERS)))
            self.model: nn.Module = WaitingNet(width, self._accelerator, work.compute_seconds).to(dtype)
            self._input_shape = (_BATCH_SIZE, width)
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        else:
            job = get_job(work.job)
            self.model = job.model(seed=0)
            self.optimizer = job.make_optimizer(self.model.parameters())
            self._batches = Batches(job, data, rank, world_size)
        torch.manual_seed(1 + rank)
        self.synchronizer = thinwire.attach(self.model, "zen", "native")
        self.training = TrainingState(self.model, self.optimizer, synchronizer=self.synchronizer, data=self._batches)

    def step(self) -> Tensor:
        """Make one training step and return the loss of this rank's batch."""
        self._accelerator.begin_step()
        self.optimizer.zero_grad()
        loss = self._loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _loss(self) -> Tensor:
        if self._batches is None:
            inputs = torch.randn(self._input_shape, dtype=_DTYPES[self._work.dtype])
            return (self.model(inputs) - inputs).square().mean()
        loss = get_job(self._work.job).loss(self.model, self._batches.next())
        return Compute.apply(loss, self._accelerator, self._work.compute_seconds / 3)
