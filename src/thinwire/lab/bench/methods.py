"""Methods that `thinwire bench sync` can measure, and the texts that name them."""

from functools import lru_cache

from thinwire.lab.bench.design_space import label, points
from thinwire.sums.named import AUTO, NAMED, resolve
from thinwire.sums.scheme import Scheme
from thinwire.sums.two_level import TWO_LEVEL_PREFIX, TwoLevel

AGSPARSE_TORCH = "agsparse_torch"
"""Name of the baseline: torch's own all_reduce of a sparse tensor over Gloo, not a scheme of thinwire."""
METHODS = (*NAMED, AUTO, AGSPARSE_TORCH)


@lru_cache(maxsize=1)
def design_space() -> dict[str, Scheme]:
    """Return every point of the design space by its label, and the named schemes outside it."""
    named = {name: scheme for name, scheme in NAMED.items() if label(scheme) == name}
    return {label(scheme): scheme for scheme in points()} | named


def scheme_of(method: str) -> Scheme | TwoLevel | None:
    """Return the scheme that a text names; None for "auto".

    Raises:
        ValueError: an unknown text; the message says what is legal.
    """
    if method in design_space():
        return design_space()[method]
    try:
        return resolve(method)
    except ValueError:
        legal = ", ".join(METHODS)
        raise ValueError(
            f"unknown scheme {method!r}; legal are {legal}, {TWO_LEVEL_PREFIX}NAME, and the labels that"
            " --design-space prints"
        ) from None
