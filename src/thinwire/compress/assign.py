"""The compressor of each parameter, from the ``compress=`` of users: a compressor, a policy, or name patterns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from thinwire.compress.base import Compressor, Parameter, Policy, check_parameter
from thinwire.compress.memory import with_memory


@dataclass(frozen=True)
class LeaveSmall:
    """A policy that leaves small and one-dimensional parameters to an exact all-reduce.

    DGC and PowerSGD do this. Biases and norms are a thousandth of the bytes, cost a message like any other, and suffer
    most from a stale value.

    Args:
        compressor: compressor of all other parameters.
        min_elements: least number of elements of a compressed parameter.
        min_dimensions: least number of dimensions of a compressed parameter.

    Raises:
        ValueError: negative limits.

    Example:
        >>> from thinwire.compress.methods.select import top_k
        >>> policy = leave_small(top_k(0.01))
        >>> policy(Parameter("fc.bias", (4096,))) is None
        True
    """

    compressor: Compressor
    min_elements: int = 1024
    min_dimensions: int = 2

    def __post_init__(self) -> None:
        _compressor(self.compressor, "leave_small got")
        if self.min_elements < 0 or self.min_dimensions < 0:
            raise ValueError(
                f"parameters of fewer than {self.min_elements} elements or {self.min_dimensions} dimensions: use limits"
                " of at least 0"
            )

    def __call__(self, parameter: Parameter) -> Compressor | None:
        large = parameter.numel >= self.min_elements and len(parameter.shape) >= self.min_dimensions
        return self.compressor if large else None


leave_small = LeaveSmall


Compress = Compressor | Policy | Mapping[str, Compressor | None]
"""Type of the argument ``compress`` of `thinwire.attach`."""


def assign(compress: Compress, parameters: Sequence[Parameter]) -> dict[str, Compressor]:
    """Return the compressor of each compressed parameter, by name, with error feedback where it is needed.

    Args:
        compress: a compressor, for which `leave_small` decides; a policy; or compressors by name pattern, as
            in ``fnmatch``, of which the first match counts and None stands for an exact all-reduce.
        parameters: all parameters that can be compressed.

    Raises:
        ValueError: a pattern that matches no parameter; a value that is no compressor; a compressor that refuses a
            parameter.
    """
    policy = _policy(compress, parameters)
    found: dict[str, Compressor] = {}
    for parameter in parameters:
        compressor = policy(parameter)
        if compressor is not None:
            check_parameter(compressor, parameter)
            found[parameter.name] = with_memory(compressor)
    return found


def _policy(compress: Compress, parameters: Sequence[Parameter]) -> Policy:
    if isinstance(compress, Compressor):
        return leave_small(compress)
    if isinstance(compress, Mapping):
        return _by_pattern(dict(compress), parameters)
    if not callable(compress):
        raise ValueError(
            f"compress is {compress!r}: pass a compressor such as thinwire.compress.top_k(0.01), not its name; a policy"
            " (a function from a Parameter to a compressor or None); or a dict of name patterns and compressors"
        )
    return _called(compress)


def _called(policy: Callable[[Parameter], object]) -> Policy:
    """Return the policy with clear errors: ``compress=top_k`` is a function of a density, not of a parameter."""
    name = getattr(policy, "__name__", repr(policy))

    def call(parameter: Parameter) -> Compressor | None:
        try:
            answer = policy(parameter)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the policy {name} failed for parameter {parameter.name!r}: {error} (a compressor is made by calling"
                " its constructor, as in compress=thinwire.compress.top_k(0.01))"
            ) from error
        return None if answer is None else _compressor(answer, f"{name} answers for parameter {parameter.name!r}")

    return call


def _by_pattern(patterns: dict[str, Compressor | None], parameters: Sequence[Parameter]) -> Policy:
    for pattern, compressor in patterns.items():
        if compressor is not None:
            _compressor(compressor, f"compress has for {pattern!r}")
        if not any(fnmatchcase(parameter.name, pattern) for parameter in parameters):
            names = ", ".join(parameter.name for parameter in parameters)
            raise ValueError(
                f"no parameter that can be compressed has a name like {pattern!r}; tables of embeddings cannot, these"
                f" can: {names}"
            )

    def first(parameter: Parameter) -> Compressor | None:
        fitting = (compressor for pattern, compressor in patterns.items() if fnmatchcase(parameter.name, pattern))
        return next(fitting, None)

    return first


def _compressor(value: object, where: str) -> Compressor:
    if not isinstance(value, Compressor):
        raise ValueError(f"{where} {value!r}: pass a compressor such as thinwire.compress.top_k(0.01)")
    return value
