"""The compressor and the reduction of each parameter, and the loss scale around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from torch.optim import Optimizer

from thinwire.compress.assign import Dense, assign
from thinwire.compress.base import Compressor, Exchanged, Parameter
from thinwire.compress.methods.sign import SignSGD
from thinwire.compress.reductions.base import Reduction
from thinwire.compress.reductions.by_scheme import ByScheme
from thinwire.compress.reductions.choose import AUTO, REDUCTIONS, reduction_for
from thinwire.compress.wrappers import Wrapper, core_of
from thinwire.gradients.sharded.tables import RowShards
from thinwire.sums.named import name_of, resolve


class GradScaler(Protocol):
    """The part of ``torch.amp.GradScaler`` that thinwire uses."""

    def get_scale(self) -> float: ...
    def is_enabled(self) -> bool: ...


def check_scaler(scaler: object) -> None:
    """Raise ValueError for what is no scaler."""
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise ValueError(f"grad_scaler is {scaler!r}: pass the torch.amp.GradScaler of the training loop")


def is_skipped(optimizer: Optimizer) -> bool:
    """Return whether a scaler has an optimizer skip this step that skips steps by itself, as fused ones do."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def has_momentum(compressor: Compressor) -> bool:
    """Return whether a compressor keeps momentum of its own."""
    own = getattr(compressor, "momentum", 0.0) > 0.0
    return own or (isinstance(compressor, Wrapper) and has_momentum(compressor.inner))


def counts_steps(compressor: Compressor) -> bool:
    """Return whether a compressor takes each gradient for that of a whole step: of parts it loses or repeats some."""
    return has_momentum(compressor) or isinstance(core_of(compressor), SignSGD)


@dataclass(frozen=True)
class Methods:
    """How the dense gradients of a model travel: what ``dense=`` of `thinwire.attach` comes to.

    Args:
        each: the method of each gradient by name, as ``dense=`` takes it.
        compressed: compressor and reduction of each compressed gradient, by name.
        tables: tables that stay in FSDP's shards, of which only rows travel.
    """

    each: Mapping[str, str | Exchanged] = field(default_factory=dict)
    compressed: Mapping[str, Planned] = field(default_factory=dict)
    tables: RowShards | None = None

    @classmethod
    def of(cls, dense: Dense, parameters: Sequence[Parameter], others: Sequence[Parameter], world_size: int) -> Methods:
        """Return the methods of a model's parameters, see `thinwire.compress.assign.assign`."""
        methods = assign(dense, parameters, others)
        return cls(methods, planned(methods, parameters, world_size))

    @cached_property
    def exact(self) -> dict[str, str]:
        """How each gradient that is not compressed is summed, by name: "native", "lossless" or "auto"."""
        return {name: method for name, method in self.each.items() if isinstance(method, str)}

    def has(self, how: str) -> bool:
        """Return whether any gradient is summed in this way."""
        return how in self.exact.values()

    def describe(self) -> str:
        """Return the exact sums, on which all ranks must agree, as text."""
        names: dict[str, list[str]] = {}
        for name, how in sorted(self.exact.items()):
            names.setdefault(how, []).append(name)
        return f"dense={next(iter(names))}" if len(names) == 1 else f"dense={names}"


@dataclass(frozen=True)
class Planned:
    """The compressor and reduction of one parameter; the same on all ranks."""

    parameter: Parameter
    compressor: Compressor
    reduction: Reduction

    def describe(self) -> str:
        return f"{self.compressor.name} by {self.reduction.name}"


def planned(
    methods: Mapping[str, str | Exchanged], parameters: Sequence[Parameter], world_size: int
) -> dict[str, Planned]:
    """Return the compressor and reduction of each compressed parameter, by name.

    Args:
        methods: result of `thinwire.compress.assign.assign`.

    Raises:
        ValueError: an unknown exchange, or one that the compressor does not allow.
    """
    return {
        one.name: Planned(one, how.compressor, reduction_for(_exchange(how.exchange), how.compressor, one, world_size))
        for one in parameters
        if isinstance(how := methods[one.name], Exchanged)
    }


def _exchange(exchange: object) -> str | Reduction:
    """Return a name of `REDUCTIONS`, "auto", or the sum by a scheme."""
    if exchange in (AUTO, *REDUCTIONS):
        return str(exchange)
    scheme: Any = resolve(exchange)  # type: ignore[arg-type]  # which refuses what is no scheme
    return ByScheme(exchange if isinstance(exchange, str) else name_of(scheme), scheme)
