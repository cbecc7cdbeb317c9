"""Convolutional nets on the handwritten digits that scikit-learn ships."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.lab.bench.jobs.job import Data, Job, Published, Samples
from thinwire.lab.missing import missing_package

_HELD_OUT_EVERY = 5
_VGG16 = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Stages of VGG16: multiple of the first width, number of convolutions; each ends in a pooling by two."""


@dataclass(frozen=True)
class _ImagesJob(Job):
    """Base of jobs on the digits: 1,797 images of 8 x 8, a fifth of them held out.

    Labels are smoothed, so that differences of losses mean something.
    """

    steps: int = 150
    batch_size: int = 16
    label_smoothing: float = 0.1

    def load(self) -> Data:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise missing_package("scikit-learn", f"the job {self.name}") from error
        pixels, digits = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).div(16.0).view(-1, 1, 8, 8)
        labels = torch.tensor(digits, dtype=torch.int16)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # the file is sorted by writer
        held_out, train = order[::_HELD_OUT_EVERY], order[torch.arange(len(order)) % _HELD_OUT_EVERY != 0]
        return Data(Samples(images[train], labels[train]), Samples(images[held_out], labels[held_out]))


@dataclass(frozen=True)
class DigitsJob(_ImagesJob):
    """Classification of 1,797 images of 8 x 8 (Alpaydin and Kaynak 1998, UCI), a fifth of them held out. Needs
    scikit-learn.

    Two convolutions and two linear layers: 1.12 million parameters, 4.5 MB of gradients. Labels are smoothed by 0.1,
    so that no loss is below 0.50 nats: without, the net learns all images by heart, and differences of losses of 0.0001
    mean nothing.
    """

    name: str = "digits"
    steps: int = 400
    channels: int = 32
    hidden_size: int = 1064

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


@dataclass(frozen=True)
class VggJob(_ImagesJob):
    """VGG16 with batch normalization (Simonyan and Zisserman, ICLR'15) on the digits, enlarged to three colors of
    ``size`` x ``size``.

    Thirteen convolutions and three linear layers, which at full size have nine tenths of the parameters.

    Published: VGG16 on ImageNet, 138.4M parameters.
    """

    published = Published(138.4e6, size=224, channels=64, hidden_size=4096, num_classes=1000, batch_size=32)

    name: str = "vgg"
    learning_rate: float = 0.03
    size: int = 32
    channels: int = 12
    hidden_size: int = 704
    num_classes: int = 10

    def network(self) -> nn.Module:
        layers: list[nn.Module] = [_Enlarge(self.size)]
        before = 3
        for width, number in _VGG16:
            for _ in range(number):
                layers += [*_normalized(before, width * self.channels, 3), nn.ReLU()]
                before = width * self.channels
            layers.append(nn.MaxPool2d(2))
        for convolution in layers:
            if isinstance(convolution, nn.Conv2d):
                nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
        return nn.Sequential(
            *layers,
            nn.Flatten(),
            nn.Linear(before * (self.size // 32) ** 2, self.hidden_size),
            nn.ReLU(),
            nn.Linear(self.hidden_size, self.hidden_size),
            nn.ReLU(),
            nn.Linear(self.hidden_size, self.num_classes),
        )


@dataclass(frozen=True)
class ResNetJob(_ImagesJob):
    """A ResNet of bottleneck blocks (He et al., CVPR'16) on the digits, in three colors of ``size`` x ``size``.

    Published: ResNet-101 on ImageNet, 44.5M parameters.
    """

    published = Published(44.5e6, size=224, channels=64, blocks=(3, 4, 23, 3), num_classes=1000, batch_size=32)

    name: str = "resnet"
    learning_rate: float = 0.02
    size: int = 32
    channels: int = 24
    blocks: tuple[int, ...] = (1, 1, 1, 1)
    num_classes: int = 10

    def network(self) -> nn.Module:
        stages: list[nn.Module] = []
        before = self.channels
        for index, number in enumerate(self.blocks):
            width = self.channels << index
            for block in range(number):
                stages.append(Bottleneck(before, width, stride=2 if index and not block else 1))
                before = 4 * width
        return nn.Sequential(
            _Enlarge(self.size),
            nn.Conv2d(3, self.channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(self.channels),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
            *stages,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(before, self.num_classes),
        )


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1 around which a shortcut goes, projected where the shape changes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *_normalized(before, width, 1), nn.ReLU(),
            *_normalized(width, width, 3, stride), nn.ReLU(),
            *_normalized(width, 4 * width, 1),
        )  # fmt: skip
        same = before == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normalized(before, 4 * width, 1, stride))

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.layers(images) + self.shortcut(images))


def _normalized(before: int, after: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(after)


class _Enlarge(nn.Module):
    """Images ``[batch, 1, 8, 8]`` to ``[batch, 3, size, size]``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        return functional.interpolate(images, size=(self.size, self.size)).expand(-1, 3, -1, -1)
