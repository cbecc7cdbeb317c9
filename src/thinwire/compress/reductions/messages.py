"""Packed payloads of several parameters in one message, as `thinwire.compress.packing` joins them."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor

from thinwire.compress.base import Compressor, Parameter, Payload
from thinwire.compress.packing import message_bytes, split
from thinwire.compress.reductions.base import Arrived, Plan, T
from thinwire.compress.wrappers import packed_code
from thinwire.errors import CorruptMessageError
from thinwire.rows.formats import Header


def unpack(message: Tensor, plans: Sequence[Plan]) -> list[Payload]:
    """Return the payload of each plan.

    Raises:
        CorruptMessageError: see `thinwire.compress.packing.split` and `Packed.unpack`; it names the parameter.
    """
    payloads = []
    for (compressor, parameter), data in zip(plans, split(message, len(plans)), strict=True):
        try:
            payloads.append(packed_code(compressor).unpack(data, parameter))
        except CorruptMessageError as error:
            raise CorruptMessageError(f"{parameter.name}: {error}") from error
    return payloads


def read(arrived: Sequence[Arrived], parse: Callable[..., T], plans: Iterable[Sequence[Plan]]) -> list[T]:
    """Return messages as ``parse`` reads them, each with the plans of its sender; those beyond the plans have none."""
    return [message.read(partial(parse, plans=of_sender)) for message, of_sender in zip(arrived, plans, strict=False)]


def predicted_bytes(plans: Sequence[Plan]) -> int | None:
    """Return the bytes of a message with its header, or None if they depend on the gradients."""
    return announced_bytes([packed_code(compressor).packed_bytes(parameter) for compressor, parameter in plans])


def announced_bytes(lengths: Sequence[int | None]) -> int | None:
    """Return the bytes of a message and its header, or None if a length is not known."""
    known = all_known(lengths)
    return None if known is None else Header.NUM_BYTES + message_bytes(known)


def all_known(numbers: Sequence[int | None]) -> list[int] | None:
    """Return the numbers, or None if one of them is None."""
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) else None


def total(numbers: Sequence[int | None]) -> int | None:
    """Return the sum, or None if one of the numbers is None."""
    known = all_known(numbers)
    return None if known is None else sum(known)


def max_bytes(plans: Sequence[Plan]) -> int:
    """Return the largest legal size of a message; a longer one is not even received."""
    return message_bytes([max_packed_bytes(compressor, parameter) for compressor, parameter in plans])


def max_packed_bytes(compressor: Compressor, parameter: Parameter) -> int:
    """Return the largest legal size of a payload: above that of any code worth sending (an id and a value: 16)."""
    fixed = packed_code(compressor).packed_bytes(parameter)
    return 16 * parameter.numel + 4096 if fixed is None else fixed
