"""How each dense gradient travels, by the ``dense=`` of users: an exact sum, or a compressor and its exchange."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal, cast

from thinwire.compress.base import Compressor, Exchanged, Parameter, check_parameter
from thinwire.compress.memory import with_memory
from thinwire.errors import unknown

NATIVE, LOSSLESS, AUTO = "native", "lossless", "auto"
"""Exact sums: by the process group, in fewer bytes with the same exact result, or the faster of the two."""
EXACT = (NATIVE, LOSSLESS, AUTO)
Exact = Literal["native", "lossless", "auto"]

Method = Exact | Compressor | Exchanged
"""How one gradient travels: one of `EXACT`, or a compressor, with its exchange where that is chosen by hand."""
Rule = Callable[[Parameter], Method]
"""A function from a parameter to its method; the same on all ranks."""
Patterns = Mapping[str, Method | Rule | str]
"""Methods and rules by name pattern; ``str``, because a dict that is built before the call has values of that type."""
Dense = Method | Rule | Patterns
"""Type of the argument ``dense`` of `thinwire.attach`, but for policies of `thinwire.fuse` and plans."""
_SHOWN = 8
"""Largest number of names in an error."""


@dataclass(frozen=True)
class LeaveSmall:
    """A rule that compresses large matrices, and sums small and one-dimensional parameters exactly.

    DGC and PowerSGD do this. Biases and norms are a thousandth of the bytes, cost a message like any other, and suffer
    most from a stale value.

    Args:
        compressor: compressor of all other parameters.
        min_elements: least number of elements of a compressed parameter.
        min_dimensions: least number of dimensions of a compressed parameter.
        rest: method of the others: "native", "lossless" or "auto".

    Raises:
        ValueError: negative limits; an unknown sum.

    Example:
        >>> from thinwire.compress.methods.select import top_k
        >>> leave_small(top_k(0.01))(Parameter("fc.bias", (4096,)))
        'native'
    """

    compressor: Compressor | Exchanged
    min_elements: int = 1024
    min_dimensions: int = 2
    rest: Method = NATIVE

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, (Compressor, Exchanged)):
            given = f"leave_small got {self.compressor!r}"
            raise ValueError(f"{given}: pass a compressor such as thinwire.compress.top_k(0.01)")
        _checked(self.rest, "leave_small got rest=")
        if self.min_elements < 0 or self.min_dimensions < 0:
            raise ValueError(
                f"parameters of fewer than {self.min_elements} elements or {self.min_dimensions} dimensions: use limits"
                " of at least 0"
            )

    def __call__(self, parameter: Parameter) -> Method:
        large = parameter.numel >= self.min_elements and len(parameter.shape) >= self.min_dimensions
        return self.compressor if large else self.rest


leave_small = LeaveSmall


def assign(
    dense: Dense, parameters: Sequence[Parameter], others: Sequence[Parameter] = ()
) -> dict[str, str | Exchanged]:
    """Return how each gradient travels, by name; compressors have error feedback where it is needed.

    Args:
        dense: one of `EXACT`; a compressor, for which `leave_small` decides; a rule; or any of these by name pattern,
            as in ``fnmatch``, of which the first match counts. What no pattern matches is "native".
        parameters: all parameters whose gradients can be compressed.
        others: those whose gradients cannot: where a compressor is named for them they are "native".

    Raises:
        ValueError: a pattern that matches no parameter; a value that is no method; a compressor that refuses a
            parameter.
    """
    if isinstance(dense, Mapping):
        _check_patterns(dense, parameters, others)
    methods: dict[str, str | Exchanged] = {}
    for parameter in parameters:
        method = _method_of(dense, parameter)
        if isinstance(method, Compressor):
            method = Exchanged(method)
        if isinstance(method, Exchanged):
            check_parameter(method.compressor, parameter)
            method = Exchanged(with_memory(method.compressor), method.exchange)
        methods[parameter.name] = method
    for other in others:
        method = _method_of(dense, other)
        methods[other.name] = method if isinstance(method, str) else NATIVE
    return methods


def _method_of(dense: Dense, parameter: Parameter) -> Method:
    """Return the method of one parameter."""
    if isinstance(dense, (Compressor, Exchanged)):
        return leave_small(dense)(parameter)
    how = dense
    if isinstance(dense, Mapping):
        how = next((value for pattern, value in dense.items() if fnmatchcase(parameter.name, pattern)), NATIVE)
    return _called(how, parameter) if callable(how) else _checked(how, "dense is" if how is dense else "dense has")


def _called(rule: Rule, parameter: Parameter) -> Method:
    """Return the answer of a rule, with clear errors: ``top_k`` is a function of a density, not of a parameter."""
    name = getattr(rule, "__name__", repr(rule))
    try:
        answer = rule(parameter)
    except Exception as error:
        raise ValueError(
            f"the rule {name} failed for parameter {parameter.name!r}: {type(error).__name__}: {error} (a compressor is"
            " made by calling its constructor, as in dense=thinwire.compress.top_k(0.01))"
        ) from error
    return _checked(answer, f"{name} answers for parameter {parameter.name!r}")


def _check_patterns(patterns: Patterns, parameters: Sequence[Parameter], others: Sequence[Parameter]) -> None:
    for pattern, value in patterns.items():
        if not isinstance(pattern, str):
            raise ValueError(f"dense has the key {pattern!r}: keys are names or patterns of names, as in '*.weight'")
        if not callable(value):
            _checked(value, f"dense has for {pattern!r}")
        named = (*parameters, *others) if isinstance(value, str) else parameters
        if not any(fnmatchcase(parameter.name, pattern) for parameter in named):
            names = [parameter.name for parameter in named]
            near = get_close_matches(pattern, names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"such names are {', '.join(names[:_SHOWN])}"
            which = "" if isinstance(value, str) else " that can be compressed (no table that travels as rows can)"
            raise ValueError(f"no parameter{which} has a name like {pattern!r}; {hint}")


def _checked(value: object, where: str) -> Method:
    if isinstance(value, str) and value not in EXACT:
        others = ", a compressor such as thinwire.compress.top_k(0.01), or a thinwire.Plan; schemes belong in rows="
        raise unknown("dense", value, EXACT, others)
    if isinstance(value, (str, Compressor, Exchanged)):
        return cast("Method", value)
    raise ValueError(
        f"{where} {value!r}: pass {', '.join(map(repr, EXACT))}, a compressor such as thinwire.compress.top_k(0.01), a"
        " function from a Parameter to one of these, or a dict of name patterns; policies of thinwire.fuse and plans"
        " are for all gradients"
    )
