"""Which parameters are compressed at all."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compress.base import Compressor, Parameter


@dataclass(frozen=True)
class LeaveSmall:
    """See `leave_small`."""

    compressor: Compressor
    min_elements: int = 1024
    min_dimensions: int = 2

    def __post_init__(self) -> None:
        if self.min_elements < 0 or self.min_dimensions < 0:
            raise ValueError(
                f"parameters of fewer than {self.min_elements} elements or {self.min_dimensions} dimensions: use limits"
                " of at least 0"
            )

    def __call__(self, parameter: Parameter) -> Compressor | None:
        large = parameter.numel >= self.min_elements and len(parameter.shape) >= self.min_dimensions
        return self.compressor if large else None


def leave_small(compressor: Compressor, min_elements: int = 1024, min_dimensions: int = 2) -> LeaveSmall:
    """A policy that leaves small and one-dimensional parameters to an exact all-reduce, as DGC and PowerSGD do.

    Biases and norms are a thousandth of the bytes, cost a message like any other, and suffer most from a stale value.

    Args:
        compressor: for all others.
        min_elements: with fewer a parameter is left alone.
        min_dimensions: with fewer, too.

    Raises:
        ValueError: negative limits.

    Example:
        >>> from thinwire.compress.top_k import top_k
        >>> policy = leave_small(top_k(0.01))
        >>> policy(Parameter("fc.bias", (4096,))) is None
        True
    """
    return LeaveSmall(compressor, min_elements, min_dimensions)
