"""Sparsifiers, which send some elements of a gradient with their ids; the ways to select are in other files."""

import struct
from abc import abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Additive, Compressor, Joint, Memory, Packed, Parameter, Payload, State, WholeTensor
from thinwire.compress.methods.lossless import LosslessFloats
from thinwire.compress.packing import PartSpec
from thinwire.compress.wrappers import packed_code
from thinwire.errors import CorruptMessageError
from thinwire.rows import formats as wire
from thinwire.rows.formats import Format, Whole

FORMATS = (Format.COO, Format.BITMAP, Format.ELIAS_FANO, Format.DENSE)
"""Formats of ids, of which the smallest is used; DENSE, without ids, is for a selection of all elements."""

HEADER_BYTES = 16
_HEADER = struct.Struct("<QQ")  # 56 bits of count and 8 of format; the checksum of what follows, mixed with the former
_COUNT_BITS = 56
_UINT64 = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15  # odd, so that headers that differ have products that do

Selection = tuple[Tensor, Tensor]
"""Ids of elements of a flat gradient, int64 [k], strictly increasing; and their values [k], newly allocated."""


@dataclass(frozen=True)
class Selector(Additive):
    """A compressor that sends selected elements of a gradient; subclasses define the parts of its payloads.

    Payloads add up: elements that several ranks selected accumulate, 9 and 7 at one index give 16. Without ``values``,
    or with ``lossless()``, sent elements are exact, and the memory of error feedback is exactly zero there. With others
    it keeps there the loss of the code.

    Args:
        values: code of the vector of selected values, such as ``bf16()``; None sends it as it is.

    Raises:
        ValueError: ``values`` that cannot code a vector by itself.
    """

    values: Compressor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_values(type(self).__name__, self.values)

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings that `name` lists in brackets: the first, and what is no default, a truth by its name alone."""
        first, *others = (item for item in fields(self) if item.name not in ("values", "varying"))
        said = [(item.name, value) for item in others if (value := getattr(self, item.name)) != item.default]
        return f"{getattr(self, first.name):g}", *(key if value is True else f"{key}={value}" for key, value in said)

    @property
    def label(self) -> str:
        return "".join(f"_{one.lower()}" if one.isupper() else one for one in type(self).__name__).lstrip("_")

    @property
    def name(self) -> str:
        coded = () if self.values is None else (f"values={self.values.name}",)
        return f"{self.label}({', '.join((*self.settings, *coded))})"

    @abstractmethod
    def select(self, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        """Select elements of a gradient [n]; the values share no memory with it."""

    @abstractmethod
    def chosen(self, payload: Payload, parameter: Parameter) -> Selection:
        """Return ids and values of a payload, in working dtype; they may share its memory."""

    def fixed_count(self, parameter: Parameter) -> int | None:
        """Return the number of elements sent of every gradient, or None if that depends on the gradient."""
        return None

    def init(self, parameter: Parameter) -> State:
        return {} if self.values is None else {"values": self.values.init(values_of(parameter, parameter.numel))}

    def encode(self, chosen: Tensor, parameter: Parameter, state: State) -> tuple[Tensor, ...]:
        """Return the parts that code selected values."""
        if self.values is None:
            return (chosen,)
        return self.values.compress(chosen, values_of(parameter, chosen.numel()), state["values"]).parts

    def decode(self, coded: tuple[Tensor, ...], count: int, parameter: Parameter) -> Tensor:
        """Return the values that such parts code."""
        if self.values is None:
            return coded[0]
        return self.values.decompress(Payload(coded), values_of(parameter, count))

    def code_specs(self, count: int | None, parameter: Parameter) -> tuple[PartSpec, ...]:
        """Return the parts that code ``count`` values, or any number of them for None."""
        if self.values is None:
            return (PartSpec(parameter.working_dtype, count, parameter.numel),)
        specs = packed_code(self.values).part_specs(values_of(parameter, parameter.numel if count is None else count))
        if count is not None:
            return specs
        return tuple(replace(spec, numel=None, max_numel=spec.numel or spec.max_numel) for spec in specs)

    def pack_values(self, coded: tuple[Tensor, ...], count: int, parameter: Parameter) -> Tensor:
        """Return the bytes of the parts that code ``count`` values."""
        if self.values is None:
            return coded[0].view(torch.uint8)
        return packed_code(self.values).pack(Payload(coded), values_of(parameter, count))

    def unpack_values(self, data: Tensor, count: int, parameter: Parameter) -> tuple[Tensor, ...]:
        """Return the parts that code ``count`` values; ``data`` may be padded to a multiple of 8 bytes.

        Raises:
            CorruptMessageError: another number of bytes, or what no rank sends.
        """
        size = self.values_bytes(count, parameter)
        is_exact = size is not None and data.numel() == wire.aligned(size)
        if self.values is not None:
            return packed_code(self.values).unpack(data[:size] if is_exact else data, values_of(parameter, count)).parts
        if not is_exact:
            raise CorruptMessageError(f"{data.numel()} bytes, where {count} values need {size}")
        return (data[:size].view(parameter.working_dtype),)

    def values_bytes(self, count: int, parameter: Parameter) -> int | None:
        """Return the bytes of ``count`` values, or None if their code has no fixed size."""
        if self.values is None:
            return count * parameter.working_dtype.itemsize
        return packed_code(self.values).packed_bytes(values_of(parameter, count))

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        ids, values = self.chosen(payload, parameter)
        dense = torch.zeros(parameter.numel, 1, dtype=parameter.working_dtype)
        return kernels.scatter_rows(dense, ids, values.view(-1, 1)).view(parameter.shape)

    @property
    def is_exact(self) -> bool:
        """Whether sent elements arrive as they are, so that nothing of them is left."""
        return self.values is None or (isinstance(self.values, LosslessFloats) and self.values.is_exact)

    def add(self, payload: Payload, parameter: Parameter, total: Tensor, negated: bool = False) -> None:
        ids, values = self.chosen(payload, parameter)
        if negated and self.is_exact:
            total.view(-1).index_fill_(0, ids, 0.0)
        else:
            total.view(-1).index_add_(0, ids, values, alpha=-1 if negated else 1)


@dataclass(frozen=True)
class Sparsifier(Selector):
    """A selector of ids and values: ``parts`` are ids (int64 [k], strictly increasing) and values [k], or coded values.

    The exact schemes of `thinwire.sums` can add these up.
    """

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        ids, chosen = self.select(gradient.detach().view(-1), parameter, state)
        return Payload((ids, *self.encode(chosen, parameter, state)))

    def chosen(self, payload: Payload, parameter: Parameter) -> Selection:
        ids, *coded = payload.parts
        return ids, self.decode(tuple(coded), ids.numel(), parameter)

    def pack(self, payload: Payload, parameter: Parameter) -> Tensor:
        """Return count and format of ids, a checksum, ids and values; docs/guides/sparsifiers.md has the layout."""
        ids, *coded = payload.parts
        rows = coded[0].view(-1, 1) if self.values is None else coded[0].new_empty(ids.numel(), 0)
        format = _format(ids.numel(), rows.shape[1] * rows.element_size(), parameter)
        body = [wire.encode(format, Whole(parameter.numel), ids, rows)]
        if self.values is not None:
            body.append(self.pack_values(tuple(coded), ids.numel(), parameter))
        return sealed(ids.numel(), FORMATS.index(format), body)

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        count, code, body = opened(data)
        row_bytes = parameter.working_dtype.itemsize if self.values is None else 0
        if count > parameter.numel or code != FORMATS.index(format := _format(count, row_bytes, parameter)):
            raise CorruptMessageError(f"{count} ids in format {code}: no rank sends that of {parameter.numel} elements")
        end = wire.payload_bytes(format, count, row_bytes, parameter.numel, parameter.numel)
        ids, rows = wire.decode(
            format, Whole(parameter.numel), count, body[:end], int(row_bytes > 0), parameter.working_dtype
        )
        if self.values is not None:
            return Payload((ids, *self.unpack_values(body[end:], count, parameter)))
        if end != body.numel():
            raise CorruptMessageError(f"{body.numel() - end} bytes after the values of a sparse payload")
        return Payload((ids, rows.view(-1)))

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        """Return the parts of a payload in memory; packed, its ids are smaller."""
        count = self.fixed_count(parameter)
        return PartSpec(torch.int64, count, parameter.numel), *self.code_specs(count, parameter)

    def packed_bytes(self, parameter: Parameter) -> int | None:
        count = self.fixed_count(parameter)
        return None if count is None else self.packed_bytes_of(count, parameter)

    def packed_bytes_of(self, count: int, parameter: Parameter) -> int | None:
        """Return the packed bytes of ``count`` elements, or None if the code of their values has no fixed size."""
        row_bytes = parameter.working_dtype.itemsize if self.values is None else 0
        format = _format(count, row_bytes, parameter)
        coded = 0 if self.values is None else self.values_bytes(count, parameter)
        ids = wire.payload_bytes(format, count, row_bytes, parameter.numel, parameter.numel)
        return None if coded is None else HEADER_BYTES + ids + wire.aligned(coded)


@dataclass(frozen=True)
class DensitySelector(Selector):
    """A selector with a density: it sends exactly or about ``k = max(1, round(density * numel))`` elements.

    At density 1 every element is sent, zeros too. Nothing is sent of an empty parameter.

    Args:
        density: k / numel, in (0, 1].
        varying: whether the density changes from step to step, as in a warm-up, so that sizes are not known beforehand.
        values: see `Selector`.

    Raises:
        ValueError: a density outside (0, 1].
    """

    density: float = 0.01
    varying: bool = field(default=False, kw_only=True)

    has_fixed_count: ClassVar[bool] = False
    """Whether the number of elements sent is the same for every gradient of a parameter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.density, str) or not 0.0 < self.density <= 1.0:
            raise ValueError(f"density is the part of the elements that is sent, in (0, 1], not {self.density!r}")

    def target(self, numel: int) -> int:
        """Return k for ``numel`` elements."""
        return min(numel, max(1, round(self.density * numel)))

    def fixed_count(self, parameter: Parameter) -> int | None:
        return self.target(parameter.numel) if self.has_fixed_count and not self.varying else None

    def select(self, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        k = self.target(flat.numel())
        if k == flat.numel():
            return torch.arange(k), flat.clone()
        return self.select_about(k, flat, parameter, state)

    @abstractmethod
    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        """Select about (or exactly, if `has_fixed_count`) ``k`` elements of [n], 0 < k < n."""


@dataclass(frozen=True)
class DensitySparsifier(DensitySelector, Sparsifier):
    """A sparsifier with a density, see `DensitySelector`."""


def check_values(method: str, values: Compressor | None, may_draw: bool = True) -> None:
    """Raise ValueError unless a compressor can code vectors of which each step has another, or is None."""
    is_vector_code = isinstance(values, Packed) and not isinstance(values, (Selector, Joint, WholeTensor))
    if values is not None and not (
        is_vector_code and values.memory is not Memory.OWN and (may_draw or not values.init(Parameter("", (1,))))
    ):
        raise ValueError(
            f"{method} cannot code its values by {values!r}: take a code without a memory that works element by"
            f" element{'' if may_draw else ' and draws nothing'}, such as bf16() or int8(); error feedback goes"
            f" around {method}"
        )


def values_of(parameter: Parameter, count: int) -> Parameter:
    """Return the parameter that stands for the vector of ``count`` selected values in the code of values."""
    return Parameter(parameter.name, (count,), parameter.working_dtype)


def sealed(count: int, code: int, body: list[Tensor]) -> Tensor:
    """Return a header and the body after it, padded to 8 bytes."""
    size = sum(part.numel() for part in body)
    data = torch.empty(HEADER_BYTES + wire.aligned(size), dtype=torch.uint8)
    torch.cat(body, out=data[HEADER_BYTES : HEADER_BYTES + size])
    data[HEADER_BYTES + size :] = 0
    head = count | code << _COUNT_BITS
    header = _HEADER.pack(head, _checksum(head, data[HEADER_BYTES:]))
    data[:HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return data


def opened(data: Tensor) -> tuple[int, int, Tensor]:
    """Return count, code and body from the result of `sealed`.

    Raises:
        CorruptMessageError: a length that no rank sends, or another checksum than the one announced.
    """
    if data.dtype != torch.uint8 or data.numel() < HEADER_BYTES or data.numel() % 8:
        raise CorruptMessageError(f"{data.numel()} bytes are not a sparse payload")
    head, checksum = _HEADER.unpack(data[:HEADER_BYTES].numpy().tobytes())
    body = data[HEADER_BYTES:]
    if checksum != _checksum(head, body):
        raise CorruptMessageError("a sparse payload whose checksum does not match: bits changed on the way")
    return head & ((1 << _COUNT_BITS) - 1), head >> _COUNT_BITS, body


def _checksum(head: int, body: Tensor) -> int:
    return (kernels.checksum(body) ^ (head + 1) * _SPREAD) & _UINT64


def _format(count: int, row_bytes: int, parameter: Parameter) -> Format:
    return wire.smallest(FORMATS, count, row_bytes, parameter.numel, parameter.numel)
