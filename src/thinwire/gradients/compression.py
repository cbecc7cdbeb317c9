"""The request to `thinwire.attach` to compress, and the method of each parameter that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from thinwire.compress.assign import Compress, assign
from thinwire.compress.base import Compressor, Parameter, check_parameter
from thinwire.compress.memory import with_memory
from thinwire.compress.reduction.base import Reduction
from thinwire.compress.reduction.choose import AUTO, REDUCTIONS, reduction_for
from thinwire.errors import unknown
from thinwire.plan.plan import Group, Plan
from thinwire.sync.named import NAMED, name_of, resolve
from thinwire.sync.scheme import Scheme
from thinwire.sync.two_level import TWO_LEVEL_PREFIX, TwoLevel


class GradScaler(Protocol):
    """The part of ``torch.amp.GradScaler`` that thinwire uses."""

    def get_scale(self) -> float: ...
    def is_enabled(self) -> bool: ...


def check_scaler(scaler: object) -> None:
    """Raise ValueError for what is no scaler."""
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise ValueError(f"grad_scaler is {scaler!r}: pass the torch.amp.GradScaler of the training loop")


@dataclass(frozen=True)
class Planned:
    """The compressor and reduction of one parameter; the same on all ranks."""

    parameter: Parameter
    compressor: Compressor
    reduction: Reduction

    def describe(self) -> str:
        return f"{self.compressor.name} by {self.reduction.name}"


@dataclass(frozen=True)
class Compression:
    """The request to `thinwire.attach` to compress gradients.

    Args:
        compress: see `thinwire.compress.assign.assign`.
        reduction: "auto", a name of `REDUCTIONS`, or a scheme of `thinwire.schemes` or its name.
        grad_scaler: the scaler whose scale gradients carry; memories are kept without the scale.
        ahead: whether each parameter is compressed by itself, before payloads travel together; if not, gradients that
            travel together are compressed as one flat tensor.

    Raises:
        ValueError: an unknown reduction; users write it as ``exchange=``.
    """

    compress: Compress
    reduction: str | Scheme | TwoLevel = AUTO
    grad_scaler: GradScaler | None = None
    ahead: bool = True

    def __post_init__(self) -> None:
        if self.reduction in (AUTO, *REDUCTIONS):
            return
        if isinstance(self.reduction, str) and self.reduction.removeprefix(TWO_LEVEL_PREFIX) not in NAMED:
            raise unknown("exchange", self.reduction, (AUTO, *REDUCTIONS, *NAMED))
        resolve(self.reduction)

    @property
    def scheme(self) -> Scheme | TwoLevel | None:
        """The scheme that sums sparse payloads, or None."""
        return None if self.reduction in (AUTO, *REDUCTIONS) else resolve(self.reduction)

    def plans(self, parameters: Sequence[Parameter], world_size: int) -> dict[str, Planned]:
        """Return the method of each compressed parameter, by name.

        Raises:
            ValueError: see `thinwire.compress.assign.assign` and `reduction_for`.
        """
        name = self.reduction if isinstance(self.reduction, str) else name_of(self.reduction)
        compressors = assign(self.compress, parameters)
        return {
            parameter.name: Planned(
                parameter,
                compressors[parameter.name],
                reduction_for(name, compressors[parameter.name], parameter, world_size),
            )
            for parameter in parameters
            if parameter.name in compressors
        }


@dataclass(frozen=True)
class PlannedCompression:
    """The compression of a plan, with the interface of `Compression`."""

    plan: Plan
    grad_scaler: GradScaler | None = None

    @property
    def scheme(self) -> Scheme | TwoLevel | None:
        """None: plans have no schemes, whose bytes depend on the elements that ranks select."""
        return None

    @property
    def ahead(self) -> bool:
        return self.plan.ahead

    def plans(self, parameters: Sequence[Parameter], world_size: int) -> dict[str, Planned]:
        """Return the method of each compressed parameter, by name.

        Raises:
            ValueError: a compressor that refuses a parameter, or cannot be averaged as the plan says.
        """
        by_name = {parameter.name: parameter for parameter in parameters}
        alone = self.plan.compressors(parameters)
        found: dict[str, Planned] = {}
        for group in self.plan.groups:
            together = self._together(group, by_name)
            for name in group.parameters:
                compressor = alone.get(name) if self.ahead else group.make_compressor()
                if compressor is not None:
                    parameter, remembering = by_name[name], with_memory(compressor)
                    check_parameter(compressor, parameter)
                    shape = parameter if self.ahead else together
                    reduction = reduction_for(group.exchange, remembering, shape, world_size)
                    found[name] = Planned(parameter, remembering, reduction)
        return {parameter.name: found[parameter.name] for parameter in parameters if parameter.name in found}

    @staticmethod
    def _together(group: Group, parameters: Mapping[str, Parameter]) -> Parameter:
        members = [parameters[name] for name in group.parameters]
        return Parameter(members[0].name, (sum(member.numel for member in members),), members[0].dtype)
