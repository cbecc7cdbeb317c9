"""Base of training jobs: samples, a model of any size, and the settings with which stock DDP trains it well."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from thinwire.lab.planning.training import Training

_LAST_LEARNING_RATE = 0.05  # of the first, so that a run that goes on after its last step still learns


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and their targets: the first dimension of both counts samples. Small dtypes travel faster."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, ids: Tensor) -> Samples:
        """Return the samples of these indices, with targets as int64."""
        return Samples(self.inputs[ids], self.targets[ids].long())


@dataclass(frozen=True, eq=False)
class Data:
    """Data for training, and held-out data that is only measured."""

    train: Samples
    held_out: Samples


class Published:
    """The model of a paper or a release: number of parameters that its source states, and the fields of its shape."""

    def __init__(self, parameters: float, **sizes: Any) -> None:
        self.parameters, self.sizes = parameters, sizes


@dataclass(frozen=True)
class Job(ABC):
    """A training of a model whose loss is a mean over samples.

    The learning rate rises over ``warm_up_steps`` and falls to a twentieth by a half cosine. The settings were searched
    for stock DDP alone. A job's other fields are its shape; the defaults are sized for two cores.

    Args:
        steps: default number of steps.
        batch_size: samples a rank and step.
        optimizer: "sgd" (with Nesterov momentum), "adamw" or "adagrad".
        learning_rate: the highest learning rate.
        clip_norm: largest norm of the synchronized gradient; None leaves it alone.
        label_smoothing: smoothing of labels in training and in measuring.
        autocast: dtype of `torch.autocast` in the forward pass, such as "bfloat16"; empty for none.
        judged_by: name of the loss that compares methods.
    """

    published: ClassVar[Published | None] = None

    name: str = ""
    steps: int = 300
    batch_size: int = 8
    optimizer: str = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9
    warm_up_steps: int = 20
    clip_norm: float | None = None
    label_smoothing: float = 0.0
    autocast: str = ""
    judged_by: str = "held-out loss"

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adamw", "adagrad"):
            raise ValueError(f"unknown optimizer {self.optimizer!r}; legal are sgd, adamw and adagrad")
        if self.autocast not in ("", "bfloat16", "float16"):
            raise ValueError(f"autocast is bfloat16 or float16, not {self.autocast!r}")
        if self.optimizer == "adamw" and getattr(self, "sparse", False):
            raise ValueError("AdamW takes no sparse gradients: leave out sparse, or give optimizer=adagrad")
        if self.optimizer != "sgd":
            object.__setattr__(self, "momentum", 0.0)

    def scaled(self, scale: float) -> Self:
        """Return the job with about ``scale`` times the parameters of the published model, and its very shape at 1.

        Each size lies between that of this job and the published one, on a geometric scale.

        Raises:
            ValueError: the job has no published shape, or the scale is not in (0, 1].
        """
        if self.published is None:
            raise ValueError(f"{self.name} has one size: leave out the scale")
        if not 0.0 < scale <= 1.0:
            raise ValueError(f"a scale is larger than 0 and at most 1, the published model, not {scale}")
        own = self.num_parameters / self.published.parameters
        share = 1.0 - math.log(scale) / math.log(own)
        sizes = {name: _between(getattr(self, name), value, share) for name, value in self.published.sizes.items()}
        return replace(self, **sizes)

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters of the model, which is not allocated for that."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.network().parameters())

    @abstractmethod
    def load(self) -> Data:
        """Load the data, the same on every machine with the same Python (and scikit-learn)."""

    @abstractmethod
    def network(self) -> nn.Module:
        """Create a model with parameters drawn from torch's default generator; `objective` knows what it returns."""

    def model(self, seed: int) -> nn.Module:
        """Create the model with the initial parameters of a seed; the state of torch's generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.network()

    def batches(self, data: Data, rank: int, world_size: int, seed: int) -> Iterator[Samples]:
        """Yield batches without end: each epoch in an order drawn from the seed, dealt to the ranks in turn.

        Raises:
            ValueError: more ranks than there are batches in the data.
        """
        step_size = self.batch_size * world_size
        if step_size > len(data.train):
            raise ValueError(f"{self.name}: {len(data.train)} samples are too few for {world_size} ranks")
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(data.train), generator=generator)
            for start in range(0, len(order) - step_size + 1, step_size):
                first = start + rank * self.batch_size
                yield data.train.take(order[first : first + self.batch_size])

    def training(self, data: Data | None, rank: int, world_size: int, seed: int) -> Training:
        """Make the training on one rank; without data they are loaded."""
        from thinwire.lab.planning.training import Training

        batches = self.batches(data or self.load(), rank, world_size, seed)
        model = self.model(seed)
        torch.manual_seed(seed * world_size + rank + 1)  # of what a loss draws: other candidates on each rank
        return Training(model, lambda: next(batches), self.loss, self.make_optimizer(model.parameters()), self.clip)

    def optimizer_of(self, training: Training) -> torch.optim.Optimizer:
        """Return the optimizer of the training."""
        assert training.optimizer is not None, "the job's own"
        return training.optimizer

    def held_out(self, training: Training, data: Data | None, rank: int, world_size: int) -> tuple[Samples, int]:
        """Return a rank's share of the held-out samples, and their number."""
        data = data or self.load()
        share = torch.arange(rank, len(data.held_out), world_size)
        return data.held_out.take(share), len(share)

    def loss(self, model: nn.Module, batch: Samples) -> Tensor:
        """Return the loss of a batch, a scalar, under `autocast`."""
        dtype = getattr(torch, self.autocast or "float32")
        with torch.autocast(batch.inputs.device.type, dtype, enabled=bool(self.autocast)):
            return self.objective(model, batch)

    def objective(self, model: nn.Module, batch: Samples) -> Tensor:
        """Return the mean cross entropy in nats of logits, classes last; targets of -100 do not count."""
        logits = model(batch.inputs)
        return functional.cross_entropy(
            logits.flatten(end_dim=-2), batch.targets.flatten(), label_smoothing=self.label_smoothing
        )

    def make_optimizer(self, parameters: Iterable[Tensor] | Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """Create the optimizer at the highest learning rate; multiply it by `learning_rate_share`."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=self.learning_rate)
        if self.optimizer == "adagrad":
            return torch.optim.Adagrad(parameters, lr=self.learning_rate)
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=self.momentum, nesterov=self.momentum > 0.0)

    def clip(self, model: nn.Module) -> None:
        """Scale the gradients of a model down to `clip_norm`, as between backward and the optimizer's step."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)

    def learning_rate_share(self, step: int, steps: int) -> float:
        """Return the share of the highest learning rate at a step (from 0) of a run; constant after its end."""
        rise = min(1.0, (step + 1) / max(1, self.warm_up_steps))
        fall = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps)))
        return rise * (_LAST_LEARNING_RATE + (1.0 - _LAST_LEARNING_RATE) * fall)


def _between(own: Any, published: Any, share: float) -> Any:
    """Return the size at a share of the way, on a geometric scale; element by element for tuples."""
    if isinstance(own, tuple):
        return tuple(_between(*pair, share) for pair in zip(own, published, strict=True))
    return max(1, round(own ** (1.0 - share) * published**share))
