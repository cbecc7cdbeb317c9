"""The six models of Espresso's evaluation, generated from their architectures: no framework model is built.

Only totals of backward times are published in words; a total is split over the tensors by the multiply-adds of each
parameter in one sample's forward pass: its elements times the uses of each (positions of a convolution, tokens of a
linear layer). A gradient's share of backward is proportional to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from published.costs import Cost, compression
from thinwire.plan.profile import Linear, Profile

FORWARD_OVER_BACKWARD = 0.5
"""Ratio of forward to backward time: one product for each weight against two, for the gradients of input and weight."""

_ELEMENT_BYTES = 4  # all six are trained in float32


@dataclass(frozen=True)
class ModelParameter:
    """One gradient. ``uses``: number of times that one sample's forward pass multiplies with each of its elements."""

    name: str
    shape: tuple[int, ...]
    uses: float = 1.0

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _ELEMENT_BYTES

    @property
    def multiply_adds(self) -> float:
        return math.prod(self.shape) * self.uses


@dataclass(frozen=True)
class PublishedModel:
    """A model of Espresso's evaluation (EuroSys'23, tables 4 and 5).

    Attributes:
        name: "vgg16".
        parameters: in backward order.
        backward_total_seconds: seconds from the first gradient to the last, one accelerator (NVIDIA V100).
        algorithm: the compressor that the paper's figures 12 and 13 train it with.
        cpu_gbit: rate at which a host's processors encode and decode its gradients, see `compression`.
    """

    name: str
    parameters: tuple[ModelParameter, ...]
    backward_total_seconds: float
    algorithm: str
    cpu_gbit: float

    @property
    def num_tensors(self) -> int:
        return len(self.parameters)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    @cached_property
    def size_bytes(self) -> tuple[int, ...]:
        return tuple(parameter.size_bytes for parameter in self.parameters)

    @cached_property
    def backward_seconds(self) -> tuple[float, ...]:
        """Backward time of each tensor: the total, split by multiply-adds."""
        total = sum(parameter.multiply_adds for parameter in self.parameters)
        return tuple(self.backward_total_seconds * item.multiply_adds / total for item in self.parameters)

    @property
    def other_seconds(self) -> float:
        """Seconds of the forward pass, assumed half a backward pass: `FORWARD_OVER_BACKWARD`."""
        return FORWARD_OVER_BACKWARD * self.backward_total_seconds

    @property
    def source(self) -> str:
        return (
            f"Espresso (EuroSys'23), tables 4 and 5; backward {1e3 * self.backward_total_seconds:g} ms, processors"
            f" {self.cpu_gbit:g} Gbit/s: its public simulator"
        )

    def profile(self, algorithm: str | None, communicate: Linear) -> Profile:
        """Return the profile for fusion policies: encoding and decoding on the GPU delay backward.

        Args:
            algorithm: "random_k", "dgc", "ef_sign_sgd" or "onebit"; None: uncompressed.
            communicate: seconds of a group's uncompressed bytes; compression is folded into its beta here.

        Raises:
            ValueError: an unknown algorithm.
        """
        encode = decode = Linear(0.0, 0.0)
        if algorithm is not None:
            costs = compression(algorithm, self.cpu_gbit)
            communicate = Linear(communicate.alpha, communicate.beta * costs.ratio)
            encode, decode = _line(costs.encode, self.size_bytes), _line(costs.decode, self.size_bytes)
        return Profile(
            self.backward_seconds, self.size_bytes, encode, decode, communicate, self.names, self.other_seconds
        )


def _line(cost: Cost, size_bytes: tuple[int, ...]) -> Linear:
    """A kernel's nearest line for groups from the smallest tensor to the whole model."""
    if isinstance(cost, Linear):
        return cost
    smallest, largest = min(size_bytes), sum(size_bytes)
    return cost.linear([2**power for power in range(smallest.bit_length() - 1, largest.bit_length() + 1)])


def backward_order(forward: Iterable[ModelParameter]) -> tuple[ModelParameter, ...]:
    """Return parameters of layers in forward order, last layer first; a layer's bias is ready before its weight."""
    return tuple(reversed(tuple(forward)))


def convolution(
    name: str, channels_in: int, channels_out: int, kernel: int, side: int, bias: bool = False
) -> list[ModelParameter]:
    """Return weight, then bias, of a convolution; ``side`` is that of the square output."""
    layer = [ModelParameter(f"{name}.weight", (channels_out, channels_in, kernel, kernel), side**2)]
    return [*layer, ModelParameter(f"{name}.bias", (channels_out,), side**2)] if bias else layer


def linear(
    name: str, features_in: int, features_out: int, uses: float = 1.0, bias: bool = True
) -> list[ModelParameter]:
    layer = [ModelParameter(f"{name}.weight", (features_out, features_in), uses)]
    return [*layer, ModelParameter(f"{name}.bias", (features_out,), uses)] if bias else layer


def norm(name: str, features: int, uses: float) -> list[ModelParameter]:
    """Return a batch or layer normalization: bias, then weight, so that backward has the weight first."""
    return [ModelParameter(f"{name}.bias", (features,), uses), ModelParameter(f"{name}.weight", (features,), uses)]


def embedding(name: str, rows: int, width: int, tokens: int) -> Iterator[ModelParameter]:
    """Yield the weight of an embedding.

    Its backward adds one row a token, so it counts as tokens * width, not as a product with the whole table.
    """
    yield ModelParameter(f"{name}.weight", (rows, width), tokens / rows)


_VGG16_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions
_VGG16_IMAGE_SIDE = 224


def vgg16() -> PublishedModel:
    """Return VGG16: 32 tensors, 527.79 MiB of the published 528.

    VGG16 on ImageNet, 32 images: 13 convolutions and 3 linear layers, all with biases (Simonyan and Zisserman).
    """
    return PublishedModel("vgg16", backward_order(_vgg16()), 0.0853, "random_k", 8.0)


def _vgg16() -> Iterator[ModelParameter]:
    side, channels_in, layer = _VGG16_IMAGE_SIDE, 3, 0
    for channels, convolutions in _VGG16_STAGES:
        for _ in range(convolutions):
            yield from convolution(f"features.{layer}", channels_in, channels, kernel=3, side=side, bias=True)
            channels_in, layer = channels, layer + 2  # each is followed by a ReLU
        side, layer = side // 2, layer + 1  # and the stage by a pooling
    for layer, (features_in, features_out) in enumerate(((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000))):
        yield from linear(f"classifier.{3 * layer}", features_in, features_out)


_RESNET101_STAGES = ((64, 3), (128, 4), (256, 23), (512, 3))  # channels inside a block, blocks
_RESNET101_EXPANSION = 4


def resnet101() -> PublishedModel:
    """Return ResNet101: 314 tensors, 169.94 MiB of the published 170.

    ResNet101 on ImageNet, 32 images: 33 bottleneck blocks of three convolutions (He et al., CVPR 2016).
    """
    return PublishedModel("resnet101", backward_order(_resnet101()), 0.1204, "dgc", 20.0)


def _resnet101() -> Iterator[ModelParameter]:
    yield from _normalized("conv1", "bn1", 3, 64, kernel=7, side=112)
    channels_in, side = 64, 56
    for stage, (channels, blocks) in enumerate(_RESNET101_STAGES, 1):
        for block in range(blocks):
            shrinks = block == 0 and stage > 1
            yield from _bottleneck(f"layer{stage}.{block}", channels_in, channels, side, side // (2 if shrinks else 1))
            channels_in = channels * _RESNET101_EXPANSION
            side //= 2 if shrinks else 1
    yield from linear("fc", channels_in, 1000)


def _bottleneck(name: str, channels_in: int, channels: int, side_in: int, side: int) -> Iterator[ModelParameter]:
    """The 3 x 3 convolution strides, as in torchvision; the shortcut is projected in a stage's first block."""
    channels_out = channels * _RESNET101_EXPANSION
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


_UGATIT_IMAGE_SIDE, _UGATIT_CHANNELS, _UGATIT_BLOCKS = 256, 64, 4
_UGATIT_GLOBAL_LAYERS, _UGATIT_LOCAL_LAYERS = 7, 5


def ugatit() -> PublishedModel:
    """Return UGATIT: 148 tensors, 2558.75 MiB of the published 2559; one linear layer of each generator has 1 GiB.

    UGATIT on selfie2anime, 2 images of 256 x 256: two generators and four discriminators (Kim et al., ICLR 2020).
    """
    return PublishedModel("ugatit", backward_order(_ugatit()), 0.4342, "dgc", 20.0)


def _ugatit() -> Iterator[ModelParameter]:
    yield from _generator("genA2B")
    yield from _generator("genB2A")
    yield from _discriminator("disGA", _UGATIT_GLOBAL_LAYERS)
    yield from _discriminator("disLA", _UGATIT_LOCAL_LAYERS)
    yield from _discriminator("disGB", _UGATIT_GLOBAL_LAYERS)
    yield from _discriminator("disLB", _UGATIT_LOCAL_LAYERS)


def _generator(name: str) -> Iterator[ModelParameter]:
    wide, side = 4 * _UGATIT_CHANNELS, _UGATIT_IMAGE_SIDE // 4
    yield from convolution(f"{name}.DownBlock.1", 3, _UGATIT_CHANNELS, 7, _UGATIT_IMAGE_SIDE)
    yield from convolution(f"{name}.DownBlock.5", _UGATIT_CHANNELS, 2 * _UGATIT_CHANNELS, 3, _UGATIT_IMAGE_SIDE // 2)
    yield from convolution(f"{name}.DownBlock.9", 2 * _UGATIT_CHANNELS, wide, 3, side)
    for block in range(12, 12 + _UGATIT_BLOCKS):
        for number in (1, 5):
            yield from convolution(f"{name}.DownBlock.{block}.conv_block.{number}", wide, wide, 3, side)
    yield from linear(f"{name}.gap_fc", wide, 1, bias=False)
    yield from linear(f"{name}.gmp_fc", wide, 1, bias=False)
    yield from convolution(f"{name}.conv1x1", 2 * wide, wide, 1, side, bias=True)
    yield from linear(f"{name}.FC.0", side * side * wide, wide, bias=False)
    for part in ("FC.2", "gamma", "beta"):
        yield from linear(f"{name}.{part}", wide, wide, bias=False)
    yield from _up(name, wide, side)


def _up(name: str, wide: int, side: int) -> Iterator[ModelParameter]:
    """Blocks with adaptive layer-instance normalization, then two upsampling convolutions with a plain one each."""
    for block in range(1, _UGATIT_BLOCKS + 1):
        for number in (1, 2):
            yield from convolution(f"{name}.UpBlock1_{block}.conv{number}", wide, wide, 3, side)
            yield ModelParameter(f"{name}.UpBlock1_{block}.norm{number}.rho", (1, wide, 1, 1), side**2)
    for number, (channels, scale) in enumerate(((wide // 2, 2), (wide // 4, 4))):
        grown = side * scale
        yield from convolution(f"{name}.UpBlock2.{2 + 5 * number}", 2 * channels, channels, 3, grown)
        for part in ("rho", "gamma", "beta"):
            yield ModelParameter(f"{name}.UpBlock2.{3 + 5 * number}.{part}", (1, channels, 1, 1), grown**2)
    yield from convolution(f"{name}.UpBlock2.11", _UGATIT_CHANNELS, 3, 7, _UGATIT_IMAGE_SIDE)


def _discriminator(name: str, layers: int) -> Iterator[ModelParameter]:
    """Convolutions of 4 x 4, which halve the image except for the last two; with hardly any padding."""
    side, channels_in, channels = _UGATIT_IMAGE_SIDE, 3, _UGATIT_CHANNELS
    for layer in range(layers - 1):
        side = side // 2 if layer < layers - 2 else side - 1
        yield from convolution(f"{name}.model.{1 + 3 * layer}", channels_in, channels, 4, side, bias=True)
        channels_in, channels = channels, 2 * channels
    wide = channels_in
    yield from linear(f"{name}.gap_fc", wide, 1, bias=False)
    yield from linear(f"{name}.gmp_fc", wide, 1, bias=False)
    yield from convolution(f"{name}.conv1x1", 2 * wide, wide, 1, side, bias=True)
    yield from convolution(f"{name}.conv", wide, 1, 4, side - 1)


_BERT_LAYERS, _BERT_WIDTH, _BERT_INNER, _BERT_TOKENS = 12, 768, 3072, 1024
_BERT_VOCABULARY = 30528  # 30522, padded to a multiple of 8


def bert() -> PublishedModel:
    """Return BERT-base: 199 tensors, 415.41 MiB; published are 207 and 420 (1.1 % more).

    The model that answers questions is the encoder and one small layer: 199 tensors, as in the public
    simulator. The paper's 420 MB belong to the model with its pretraining heads.

    BERT-base on SQuAD, 1024 tokens: 12 layers of width 768 (Devlin et al., NAACL 2019).
    """
    return PublishedModel("bert", backward_order(_bert()), 0.0663, "random_k", 40.0)


def _bert() -> Iterator[ModelParameter]:
    for name, rows in (("word", _BERT_VOCABULARY), ("position", 512), ("token_type", 2)):
        yield from embedding(f"bert.embeddings.{name}_embeddings", rows, _BERT_WIDTH, _BERT_TOKENS)
    yield from norm("bert.embeddings.LayerNorm", _BERT_WIDTH, _BERT_TOKENS)
    for layer in range(_BERT_LAYERS):
        yield from _bert_layer(f"bert.encoder.layer.{layer}")
    yield from linear("qa_outputs", _BERT_WIDTH, 2, _BERT_TOKENS)


def _bert_layer(name: str) -> Iterator[ModelParameter]:
    for projection in ("query", "key", "value"):
        yield from linear(f"{name}.attention.self.{projection}", _BERT_WIDTH, _BERT_WIDTH, _BERT_TOKENS)
    yield from linear(f"{name}.attention.output.dense", _BERT_WIDTH, _BERT_WIDTH, _BERT_TOKENS)
    yield from norm(f"{name}.attention.output.LayerNorm", _BERT_WIDTH, _BERT_TOKENS)
    yield from linear(f"{name}.intermediate.dense_act", _BERT_WIDTH, _BERT_INNER, _BERT_TOKENS)
    yield from linear(f"{name}.output.dense", _BERT_INNER, _BERT_WIDTH, _BERT_TOKENS)
    yield from norm(f"{name}.output.LayerNorm", _BERT_WIDTH, _BERT_TOKENS)


_GPT2_LAYERS, _GPT2_WIDTH, _GPT2_INNER, _GPT2_TOKENS = 12, 768, 3072, 80
_GPT2_VOCABULARY, _GPT2_POSITIONS = 50257, 1024


def gpt2() -> PublishedModel:
    """Return GPT2 small: 148 tensors, 474.70 MiB of the published 475.

    The token embedding is also the output layer. Its gradient is complete with that of the embedding, last of all; the
    product at the output comes before the first gradient, from which the published time counts.

    GPT2 small on WikiText-2, 80 tokens: 12 layers of width 768 (Radford et al., 2019).
    """
    return PublishedModel("gpt2", backward_order(_gpt2()), 0.2113, "ef_sign_sgd", 20.0)


def _gpt2() -> Iterator[ModelParameter]:
    yield from embedding("transformer.wte", _GPT2_VOCABULARY, _GPT2_WIDTH, _GPT2_TOKENS)
    yield from embedding("transformer.wpe", _GPT2_POSITIONS, _GPT2_WIDTH, _GPT2_TOKENS)
    for layer in range(_GPT2_LAYERS):
        yield from _gpt2_layer(f"transformer.h.{layer}")
    yield from norm("transformer.ln_f", _GPT2_WIDTH, _GPT2_TOKENS)


def _gpt2_layer(name: str) -> Iterator[ModelParameter]:
    yield from norm(f"{name}.ln_1", _GPT2_WIDTH, _GPT2_TOKENS)
    yield from linear(f"{name}.attn.c_attn", _GPT2_WIDTH, 3 * _GPT2_WIDTH, _GPT2_TOKENS)
    yield from linear(f"{name}.attn.c_proj", _GPT2_WIDTH, _GPT2_WIDTH, _GPT2_TOKENS)
    yield from norm(f"{name}.ln_2", _GPT2_WIDTH, _GPT2_TOKENS)
    yield from linear(f"{name}.mlp.c_fc", _GPT2_WIDTH, _GPT2_INNER, _GPT2_TOKENS)
    yield from linear(f"{name}.mlp.c_proj", _GPT2_INNER, _GPT2_WIDTH, _GPT2_TOKENS)


_LSTM_LAYERS, _LSTM_WIDTH, _LSTM_VOCABULARY, _LSTM_TOKENS = 2, 1500, 33278, 80
_LSTM_GATES = 4


def lstm() -> PublishedModel:
    """Return the LSTM language model: 10 tensors, 327.97 MiB of the published 328.

    The embedding is also the output layer, whose product comes before the first gradient: see `gpt2`.

    A language model of words on WikiText-2, 80 tokens: two LSTM layers of width 1500, tied embedding (Merity et al.).
    """
    return PublishedModel("lstm", backward_order(_lstm()), 0.07145, "ef_sign_sgd", 20.0)


def _lstm() -> Iterator[ModelParameter]:
    yield from embedding("encoder", _LSTM_VOCABULARY, _LSTM_WIDTH, _LSTM_TOKENS)
    for layer in range(_LSTM_LAYERS):
        for name in ("bias_ih_l0", "bias_hh_l0"):
            yield ModelParameter(f"rnns.{layer}.{name}", (_LSTM_GATES * _LSTM_WIDTH,), _LSTM_TOKENS)
        for name in ("weight_hh_l0", "weight_ih_l0"):
            yield ModelParameter(f"rnns.{layer}.{name}", (_LSTM_GATES * _LSTM_WIDTH, _LSTM_WIDTH), _LSTM_TOKENS)
    yield ModelParameter("decoder.bias", (_LSTM_VOCABULARY,), _LSTM_TOKENS)


MODELS: dict[str, Callable[[], PublishedModel]] = {
    model.__name__: model for model in (vgg16, resnet101, ugatit, bert, gpt2, lstm)
}
