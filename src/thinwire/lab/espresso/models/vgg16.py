"""VGG16 on ImageNet, 32 images: 13 convolutions and 3 linear layers, all with biases (Simonyan and Zisserman)."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.lab.espresso.models.model import ModelParameter, PublishedModel, backward_order, convolution, linear

_CHANNELS = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool")
_IMAGE_SIDE = 224


def vgg16() -> PublishedModel:
    """Return VGG16: 32 tensors, 527.79 MiB of the published 528."""
    return PublishedModel(
        name="vgg16",
        parameters=backward_order(_forward()),
        backward_total_seconds=0.0853,
        published_tensors=32,
        published_mebibytes=528,
        algorithm="random_k",
        cpu_gbit=8.0,
        source="Espresso (EuroSys'23), tables 4 and 5; backward 85.3 ms, processors 8 Gbit/s: its public simulator",
    )


def _forward() -> Iterator[ModelParameter]:
    side, channels_in, layer = _IMAGE_SIDE, 3, 0
    for channels in _CHANNELS:
        if isinstance(channels, str):
            side, layer = side // 2, layer + 1
            continue
        yield from convolution(f"features.{layer}", channels_in, channels, kernel=3, side=side, bias=True)
        channels_in, layer = channels, layer + 2  # each is followed by a ReLU
    for layer, (features_in, features_out) in enumerate(((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000))):
        yield from linear(f"classifier.{3 * layer}", features_in, features_out)
