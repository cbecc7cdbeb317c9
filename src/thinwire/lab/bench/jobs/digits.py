"""A convolutional net on the handwritten digits that scikit-learn ships."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from thinwire.errors import missing_package
from thinwire.lab.bench.jobs.job import Data, Job, Samples

_HELD_OUT_EVERY = 5


@dataclass(frozen=True)
class DigitsJob(Job):
    """Classification of 1,797 images of 8 x 8 (Alpaydin and Kaynak 1998, UCI), a fifth of them held out. Needs
    scikit-learn.

    Two convolutions and two linear layers: 1.12 million parameters, 4.5 MB of gradients. Labels are smoothed by 0.1,
    so that no loss is below 0.50 nats: without, the net learns all images by heart, and differences of losses of 0.0001
    mean nothing.
    """

    name = "digits"

    steps: int = 400
    batch_size: int = 16
    learning_rate: float = 0.1
    label_smoothing: float = 0.1
    channels: int = 32
    hidden_size: int = 1064

    def load(self) -> Data:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise missing_package("scikit-learn", "the job digits") from error
        pixels, digits = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).div(16.0).view(-1, 1, 8, 8)
        labels = torch.tensor(digits, dtype=torch.int16)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # the file is sorted by writer
        held_out, train = order[::_HELD_OUT_EVERY], order[torch.arange(len(order)) % _HELD_OUT_EVERY != 0]
        return Data(Samples(images[train], labels[train]), Samples(images[held_out], labels[held_out]))

    def network(self) -> nn.Module:
        channels = self.channels
        return nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * 16, self.hidden_size),
            nn.ReLU(),
            nn.Linear(self.hidden_size, 10),
        )
