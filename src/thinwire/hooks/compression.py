"""What `thinwire.attach` is asked to compress, and what follows from it for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from thinwire.compress.assign import Compress, assign
from thinwire.compress.base import Compressor, Parameter
from thinwire.compress.choose import AUTO, EXCHANGES, exchange_for
from thinwire.compress.exchange import Exchange
from thinwire.sync.named import name_of, resolve
from thinwire.sync.scheme import Scheme
from thinwire.sync.two_level import TwoLevel


class GradScaler(Protocol):
    """What is used of ``torch.amp.GradScaler``."""

    def get_scale(self) -> float: ...
    def is_enabled(self) -> bool: ...


@dataclass(frozen=True)
class Planned:
    """What happens to one parameter; the same on all ranks."""

    parameter: Parameter
    compressor: Compressor
    exchange: Exchange

    def describe(self) -> str:
        return f"{self.compressor.name} by {self.exchange.name}"


@dataclass(frozen=True)
class Compression:
    """What `thinwire.attach` was asked for.

    Args:
        compress: see `thinwire.compress.assign.assign`.
        exchange: "auto", a name of `EXCHANGES`, or a scheme of `thinwire.schemes` or its name.
        grad_scaler: whose scale gradients carry; memories are kept without it.

    Raises:
        ValueError: an unknown exchange.
    """

    compress: Compress
    exchange: str | Scheme | TwoLevel = AUTO
    grad_scaler: GradScaler | None = None

    def __post_init__(self) -> None:
        if self.exchange in (AUTO, *EXCHANGES):
            return
        try:
            resolve(self.exchange)
        except ValueError as error:
            generic = ", ".join((AUTO, *EXCHANGES))
            raise ValueError(
                f"unknown exchange {self.exchange!r}; legal are {generic}, and schemes: {error}"
            ) from error

    @property
    def scheme(self) -> Scheme | TwoLevel | None:
        """The scheme that sparse payloads are summed by, if they are."""
        return None if self.exchange in (AUTO, *EXCHANGES) else resolve(self.exchange)

    def plans(self, parameters: Sequence[Parameter], world_size: int) -> dict[str, Planned]:
        """What happens to each parameter that is compressed, by name.

        Raises:
            ValueError: see `thinwire.compress.assign.assign` and `exchange_for`.
        """
        name = self.exchange if isinstance(self.exchange, str) else name_of(self.exchange)
        compressors = assign(self.compress, parameters)
        return {
            parameter.name: Planned(
                parameter,
                compressors[parameter.name],
                exchange_for(name, compressors[parameter.name], parameter, world_size),
            )
            for parameter in parameters
            if parameter.name in compressors
        }
