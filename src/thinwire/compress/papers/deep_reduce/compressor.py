"""A sparsifier whose ids and values are coded independently of each other."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, Joint, Parameter, Payload, State
from thinwire.compress.methods.lossless import lossless
from thinwire.compress.methods.select import TopK
from thinwire.compress.methods.sparsify import HEADER_BYTES, Selection, Sparsifier, opened, sealed
from thinwire.compress.papers.deep_reduce.indices import LOSSLESS, Auto, Bloom, IndexCodec, index_codec
from thinwire.compress.papers.deep_reduce.values import double_exponential, polynomial
from thinwire.compress.wrappers import Wrapper
from thinwire.errors import CorruptMessageError, unknown
from thinwire.rows.formats import aligned

_LENGTH_BYTES = 8
_VALUES: dict[str, Callable[[], Compressor | None]] = {
    "raw": lambda: None,
    "lossless": lossless,
    "polynomial": polynomial,
    "double_exponential": double_exponential,
}


@dataclass(frozen=True, eq=False)
class CodedPayload(Payload):
    """A payload with the number of selected ids, the number of the codec in headers, and the code of the ids."""

    count: int
    codec: int
    index: Tensor


@dataclass(frozen=True)
class DeepReduce(Wrapper, Sparsifier):
    """The compressor of `deep_reduce`. ``parts`` are ids, as receivers get them, and values or coded values.

    State: ``inner``, of the sparsifier; ``values``, of the code of values.
    """

    index: IndexCodec

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Sparsifier) or isinstance(self.inner, (Wrapper, Joint)):
            raise ValueError(
                f"deep_reduce codes ids and values of a sparsifier such as top_k(0.01), not of {self.inner!r}: memories"
                " and other wrappers go around it, as in momentum_correction(deep_reduce(top_k(0.01)))"
            )
        if self.inner.values is not None:
            raise ValueError(f"{self.inner.name} codes its values already: give that code to deep_reduce, as values=")
        Sparsifier.__post_init__(self)

    @property
    def name(self) -> str:
        values = "raw" if self.values is None else self.values.name
        return f"deep_reduce({self.inner.name}, {self.index.name}, {values})"

    @property
    def code(self) -> Compressor:
        return self

    def init(self, parameter: Parameter) -> State:
        return {**Wrapper.init(self, parameter), **Sparsifier.init(self, parameter)}

    def select(self, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        assert isinstance(self.inner, Sparsifier), "checked when it was made"
        return self.inner.select(flat, parameter, state["inner"])

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        flat = gradient.detach().view(-1)
        ids, chosen = self.select(flat, parameter, state)
        count, index = ids.numel(), torch.empty(0, dtype=torch.uint8)
        codec = self.index.of(count, flat.numel()) if count and isinstance(self.index, Auto) else self.index
        if count:
            index = codec.encode(ids, flat.numel())
        if count and isinstance(codec, Bloom):
            ids = codec.decode(index, count, flat.numel())
            chosen = flat[ids]
        coded = self.encode(chosen, parameter, state)
        return CodedPayload((ids, *coded), count, _number(codec), index)

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        return Sparsifier.decompress(self, payload, parameter)

    def pack(self, payload: Payload, parameter: Parameter) -> Tensor:
        """Return a header, the bytes of the code of ids, that code, and the code of values."""
        assert isinstance(payload, CodedPayload), "a payload that another rank has packed is not packed again"
        ids, *coded = payload.parts
        values = self.pack_values(tuple(coded), ids.numel(), parameter)
        length = payload.index.numel()
        index = torch.nn.functional.pad(payload.index, (0, aligned(length) - length))
        return sealed(payload.count, payload.codec, [torch.tensor([length]).view(torch.uint8), index, values])

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        count, number, body = opened(data)
        length = int(body[:_LENGTH_BYTES].view(torch.int64)) if body.numel() else -1
        end = _LENGTH_BYTES + aligned(length)
        if not 0 <= length <= body.numel() or end > body.numel() or count > parameter.numel:
            raise CorruptMessageError(f"{count} ids of {parameter.numel} in {length} of {body.numel()} bytes")
        codec = LOSSLESS[number] if isinstance(self.index, Auto) and number < len(LOSSLESS) else self.index
        known = codec.num_bytes(count, parameter.numel) if count else 0
        if number != _number(codec) or (known is not None and known != length):
            raise CorruptMessageError(f"{count} ids in {length} bytes of code {number}, not in {self.index.name}")
        ids = torch.empty(0, dtype=torch.int64)
        if count:
            ids = codec.decode(body[_LENGTH_BYTES : _LENGTH_BYTES + length], count, parameter.numel)
        return Payload((ids, *self.unpack_values(body[end:], ids.numel(), parameter)))

    def fixed_count(self, parameter: Parameter) -> int | None:
        assert isinstance(self.inner, Sparsifier), "checked when it was made"
        return self.inner.fixed_count(parameter) if self.index.keeps_count else None

    def packed_bytes_of(self, count: int, parameter: Parameter) -> int | None:
        index = self.index.num_bytes(count, parameter.numel) if count else 0
        values = self.values_bytes(count, parameter)
        if index is None or values is None:
            return None
        return HEADER_BYTES + _LENGTH_BYTES + aligned(index) + aligned(values)

    def expected_bytes(self, count: int, parameter: Parameter) -> float:
        """Return the bytes of ``count`` random ids with values, by formula; "lossless" values count as they are."""
        index = self.index.expected_bytes(count, parameter.numel) if count else 0.0
        if count and not self.index.keeps_count and isinstance(self.index, Bloom):
            count += round(self.index.rate(count, parameter.numel) * (parameter.numel - count))
        coded = self.values_bytes(count, parameter)
        values = count * parameter.working_dtype.itemsize if coded is None else coded
        return HEADER_BYTES + _LENGTH_BYTES + index + values


def deep_reduce(
    sparsifier: Compressor = TopK(),  # noqa: B008  frozen
    index: str | IndexCodec = "elias_fano",
    values: str | Compressor = "raw",
) -> DeepReduce:
    """Return DeepReduce (Xu et al., NeurIPS'21, arXiv 2102.03112): ids and values of a sparsifier, each coded apart.

    A lossless code of ids gives the elements that the sparsifier selected. A Bloom filter gives those that its policy
    finds in it, with the values that the gradient has there: more than selected for "bloom:p0", partly others for
    "bloom:p1" and "bloom:p2". Error feedback, which `attach` adds, keeps the difference of the gradient and what
    receivers decode, whatever the codes lose. docs/guides/deep-reduce.md compares all codes.

    Args:
        sparsifier: a sparsifier without a code of values, such as ``top_k(0.01)``.
        index: code of the ids: "elias_fano", "bitmap", "run_length", "huffman"; "auto", that of these four which has
            the fewest bytes by formula for the number of ids; "bloom:p0", "bloom:p1", "bloom:p2", with a rate of false
            positives if wanted, "bloom:p2:0.001".
        values: code of the values: "raw", "lossless", "polynomial", "double_exponential", or a compressor that codes
            vectors, such as ``qsgd(4)``.

    Raises:
        ValueError: an unknown code; a sparsifier with a code of values, in a wrapper, or without ids (`random_k`).

    Example:
        >>> parameter = Parameter("weight", (100_000,))
        >>> deep_reduce(TopK(0.01)).packed_bytes(parameter)  # 1000 values of 4 bytes, ids in 1072
        5096
    """
    if not isinstance(index, IndexCodec):
        index = index_codec(str(index))
    if not isinstance(values, str):
        return DeepReduce(sparsifier, index, values=values)
    if values not in _VALUES:
        raise unknown("code of values", values, _VALUES)
    return DeepReduce(sparsifier, index, values=_VALUES[values]())


def _number(codec: IndexCodec) -> int:
    """Return the number of a codec in headers: of a lossless one its index among them, of a filter the next."""
    return LOSSLESS.index(codec) if codec in LOSSLESS else len(LOSSLESS)
