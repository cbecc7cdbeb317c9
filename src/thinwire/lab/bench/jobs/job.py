"""Base of training jobs: samples, a model, and the settings with which stock DDP trains it well."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class Job(ABC):
    """A training of a classifier: of images, or of the next word at every position of a text.

    Stochastic gradient descent with Nesterov momentum; the learning rate rises over ``warm_up_steps`` and falls to a
    twentieth by a half cosine. The settings were searched for stock DDP alone.

    Args:
        steps: default number of steps.
        batch_size: samples a rank and step.
        learning_rate: the highest learning rate.
        clip_norm: largest norm of the synchronized gradient; None leaves it alone.
        label_smoothing: smoothing of labels in training and in measuring.
        judged_by: name of the loss that compares methods.
    """

    name = ""

    steps: int = 300
    batch_size: int = 8
    learning_rate: float = 0.1
    momentum: float = 0.9
    warm_up_steps: int = 20
    clip_norm: float | None = None
    label_smoothing: float = 0.0
    judged_by: str = "held-out loss"

    @abstractmethod
    def load(self) -> Data:
        """Load the data, the same on every machine with the same Python (and scikit-learn)."""

    @abstractmethod
    def network(self) -> nn.Module:
        """Create a model with parameters drawn from torch's default generator. It returns logits, classes last."""

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
        return Training(model, lambda: next(batches), self.loss, self.optimizer(model.parameters()), self.clip)

    def optimizer_of(self, training: Training) -> torch.optim.Optimizer:
        """Return the optimizer of the training."""
        assert training.optimizer is not None, "the job's own"
        return training.optimizer

    def held_out(self, training: Training, data: Data | None, rank: int, world_size: int) -> tuple[Samples, int]:
        """Return a rank's share of the held-out samples, and their number."""
        del training
        data = data or self.load()
        share = torch.arange(rank, len(data.held_out), world_size)
        return data.held_out.take(share), len(share)

    def loss(self, model: nn.Module, batch: Samples) -> Tensor:
        """Return the mean cross entropy in nats, a scalar."""
        logits = model(batch.inputs)
        return functional.cross_entropy(
            logits.flatten(end_dim=-2), batch.targets.flatten(), label_smoothing=self.label_smoothing
        )

    def optimizer(self, parameters: Iterable[Tensor] | Iterable[dict[str, Any]]) -> torch.optim.SGD:
        """Create the optimizer at the highest learning rate; multiply it by `learning_rate_share`."""
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
