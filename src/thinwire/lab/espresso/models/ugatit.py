"""UGATIT on selfie2anime, 2 images of 256 x 256: two generators and four discriminators (Kim et al., ICLR 2020)."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.lab.espresso.models.model import ModelParameter, PublishedModel, backward_order, convolution, linear

_IMAGE_SIDE, _CHANNELS, _BLOCKS = 256, 64, 4
_GLOBAL_LAYERS, _LOCAL_LAYERS = 7, 5


def ugatit() -> PublishedModel:
    """Return UGATIT: 148 tensors, 2558.75 MiB of the published 2559; one linear layer of each generator has 1 GiB."""
    return PublishedModel(
        name="ugatit",
        parameters=backward_order(_forward()),
        backward_total_seconds=0.4342,
        published_tensors=148,
        published_mebibytes=2559,
        algorithm="dgc",
        cpu_gbit=20.0,
        source="Espresso (EuroSys'23), tables 4 and 5; backward 434.2 ms, processors 20 Gbit/s: its public simulator",
    )


def _forward() -> Iterator[ModelParameter]:
    yield from _generator("genA2B")
    yield from _generator("genB2A")
    yield from _discriminator("disGA", _GLOBAL_LAYERS)
    yield from _discriminator("disLA", _LOCAL_LAYERS)
    yield from _discriminator("disGB", _GLOBAL_LAYERS)
    yield from _discriminator("disLB", _LOCAL_LAYERS)


def _generator(name: str) -> Iterator[ModelParameter]:
    wide, side = 4 * _CHANNELS, _IMAGE_SIDE // 4
    yield from convolution(f"{name}.DownBlock.1", 3, _CHANNELS, 7, _IMAGE_SIDE)
    yield from convolution(f"{name}.DownBlock.5", _CHANNELS, 2 * _CHANNELS, 3, _IMAGE_SIDE // 2)
    yield from convolution(f"{name}.DownBlock.9", 2 * _CHANNELS, wide, 3, side)
    for block in range(12, 12 + _BLOCKS):
        for place in (1, 5):
            yield from convolution(f"{name}.DownBlock.{block}.conv_block.{place}", wide, wide, 3, side)
    yield from linear(f"{name}.gap_fc", wide, 1, bias=False)
    yield from linear(f"{name}.gmp_fc", wide, 1, bias=False)
    yield from convolution(f"{name}.conv1x1", 2 * wide, wide, 1, side, bias=True)
    yield from linear(f"{name}.FC.0", side * side * wide, wide, bias=False)
    for part in ("FC.2", "gamma", "beta"):
        yield from linear(f"{name}.{part}", wide, wide, bias=False)
    yield from _up(name, wide, side)


def _up(name: str, wide: int, side: int) -> Iterator[ModelParameter]:
    """Blocks with adaptive layer-instance normalization, then two upsampling convolutions with a plain one each."""
    for block in range(1, _BLOCKS + 1):
        for place in (1, 2):
            yield from convolution(f"{name}.UpBlock1_{block}.conv{place}", wide, wide, 3, side)
            yield ModelParameter(f"{name}.UpBlock1_{block}.norm{place}.rho", (1, wide, 1, 1), side**2)
    for place, (channels, scale) in enumerate(((wide // 2, 2), (wide // 4, 4))):
        grown = side * scale
        yield from convolution(f"{name}.UpBlock2.{2 + 5 * place}", 2 * channels, channels, 3, grown)
        for part in ("rho", "gamma", "beta"):
            yield ModelParameter(f"{name}.UpBlock2.{3 + 5 * place}.{part}", (1, channels, 1, 1), grown**2)
    yield from convolution(f"{name}.UpBlock2.11", _CHANNELS, 3, 7, _IMAGE_SIDE)


def _discriminator(name: str, layers: int) -> Iterator[ModelParameter]:
    """Convolutions of 4 x 4, which halve the image except for the last two; with hardly any padding."""
    side, channels_in, channels = _IMAGE_SIDE, 3, _CHANNELS
    for layer in range(layers - 1):
        side = side // 2 if layer < layers - 2 else side - 1
        yield from convolution(f"{name}.model.{1 + 3 * layer}", channels_in, channels, 4, side, bias=True)
        channels_in, channels = channels, 2 * channels
    wide = channels_in
    yield from linear(f"{name}.gap_fc", wide, 1, bias=False)
    yield from linear(f"{name}.gmp_fc", wide, 1, bias=False)
    yield from convolution(f"{name}.conv1x1", 2 * wide, wide, 1, side, bias=True)
    yield from convolution(f"{name}.conv", wide, 1, 4, side - 1)
