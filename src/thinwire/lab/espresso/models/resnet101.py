"""ResNet101 on ImageNet, 32 images: 33 bottleneck blocks of three convolutions (He et al., CVPR 2016)."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.lab.espresso.models.model import ModelParameter, PublishedModel, backward_order, convolution, linear, norm

_STAGES = ((64, 3), (128, 4), (256, 23), (512, 3))  # channels inside a block, blocks
_EXPANSION = 4


def resnet101() -> PublishedModel:
    """Return ResNet101: 314 tensors, 169.94 MiB of the published 170."""
    return PublishedModel(
        name="resnet101",
        parameters=backward_order(_forward()),
        backward_total_seconds=0.1204,
        published_tensors=314,
        published_mebibytes=170,
        algorithm="dgc",
        cpu_gbit=20.0,
        source="Espresso (EuroSys'23), tables 4 and 5; backward 120.4 ms, processors 20 Gbit/s: its public simulator",
    )


def _forward() -> Iterator[ModelParameter]:
    yield from _normalized("conv1", "bn1", 3, 64, kernel=7, side=112)
    channels_in, side = 64, 56
    for stage, (channels, blocks) in enumerate(_STAGES, 1):
        for block in range(blocks):
            shrinks = block == 0 and stage > 1
            yield from _bottleneck(f"layer{stage}.{block}", channels_in, channels, side, side // (2 if shrinks else 1))
            channels_in = channels * _EXPANSION
            side //= 2 if shrinks else 1
    yield from linear("fc", channels_in, 1000)


def _bottleneck(name: str, channels_in: int, channels: int, side_in: int, side: int) -> Iterator[ModelParameter]:
    """The 3 x 3 convolution strides, as in torchvision; the shortcut is projected in a stage's first block."""
    channels_out = channels * _EXPANSION
    if channels_in != channels_out:
        yield from _normalized(f"{name}.downsample.0", f"{name}.downsample.1", channels_in, channels_out, 1, side)
    yield from _normalized(f"{name}.conv1", f"{name}.bn1", channels_in, channels, 1, side_in)
    yield from _normalized(f"{name}.conv2", f"{name}.bn2", channels, channels, 3, side)
    yield from _normalized(f"{name}.conv3", f"{name}.bn3", channels, channels_out, 1, side)


def _normalized(
    convolution_name: str, norm_name: str, channels_in: int, channels_out: int, kernel: int, side: int
) -> Iterator[ModelParameter]:
    yield from convolution(convolution_name, channels_in, channels_out, kernel, side)
    yield from norm(norm_name, channels_out, side**2)
