"""Methods of `thinwire bench train` that are outer loops: ranks train alone, and parameters are averaged seldom.

``diloco:every=32:codec=top_k:density=0.0156:values=qsgd(bits=2):decay=0.95``: settings up to ``codec=`` belong to
`thinwire.outer.diloco`, and what follows is the compressor of the differences, with the settings that it has as a
method of its own; ``decay`` is that of its error feedback.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from thinwire import outer
from thinwire.compress.base import Compressor
from thinwire.compress.memory import error_feedback
from thinwire.compress.named import construct
from thinwire.lab.bench.train.account import Account, RunningMethod
from thinwire.outer.recipe import OuterRecipe

SETTINGS: dict[str, tuple[Callable[..., OuterRecipe], dict[str, Any]]] = {
    "local_sgd": (outer.local_sgd, {}),
    "diloco": (outer.diloco, {"every": 32}),
    "streaming_diloco": (outer.diloco, {"every": 32, "fragments": 4, "delay": 4, "mix": 0.5}),
    "shadow_sync": (outer.shadow_sync, {}),
}
"""Recipe and settings of each method; those not given here have the recipe's defaults."""

CODEC = ":codec="
"""Separator of the settings of the recipe and the compressor of the differences."""


@dataclass(frozen=True)
class Outer:
    """An outer loop as a method.

    Args:
        recipe: recipe of `thinwire.outer`.
        inner_lr: factor for the learning rate of the job, whose own was searched for stock DDP.
        longer: factor for the number of steps: more of them, which cost no bytes, may be worth their time.
    """

    recipe: OuterRecipe
    inner_lr: float = 1.0
    longer: float = 1.0

    @classmethod
    def of(cls, name: str, settings: dict[str, Any]) -> Self:
        """Create from the settings of a method.

        Raises:
            ValueError: settings that the recipe does not take, or values out of range.
        """
        make, usual = SETTINGS[name]
        arguments = usual | settings
        factors = {key: arguments.pop(key) for key in ("inner_lr", "longer") if key in arguments}
        for key, factor in factors.items():
            if not isinstance(factor, (int, float)) or not 0.0 < factor < float("inf"):
                of = "learning rate" if key == "inner_lr" else "number of steps"
                raise ValueError(f"{key} of {name} is a factor above 0 for the {of} of the job, not {factor!r}")
        try:
            return cls(make(**arguments), **factors)
        except TypeError as error:
            raise ValueError(
                f"thinwire.outer.{make.__name__} does not take these settings: {error}; settings of the"
                " compressor stand behind codec=, as in diloco:every=32:codec=top_k:density=0.0156"
            ) from error


def codec_of(name: str, arguments: dict[str, Any]) -> Compressor:
    """Return the compressor of the differences, with error feedback that decays if ``decay`` is among its settings.

    Raises:
        ValueError: an unknown compressor, or settings that it does not take; a warm-up.
    """
    arguments = dict(arguments)
    if arguments.pop("warm_up", None):
        raise ValueError(f"codec={name} has no warm_up: there are rounds, not steps; local_sgd takes a start_step=")
    if name in ("ef_sign_sgd", "error_feedback") or "decay" not in arguments:
        return construct(name, arguments)
    decay = arguments.pop("decay")
    if not isinstance(decay, (int, float)):
        raise ValueError(f"decay of codec={name} is a number in [0, 1], not {decay!r}")
    return error_feedback(construct(name, arguments), decay=decay)


class OuterMethod(RunningMethod):
    """Method that attaches an outer loop; bytes and seconds are spent in rounds, not in every step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: OuterRecipe, dense: Any) -> None:
        from thinwire.outer.attachment import attach

        self._loop = attach(model, optimizer, recipe, dense=dense)

    def account(self) -> Account:
        stats = self._loop.stats()
        return Account.of_stats(stats, exposed_seconds=stats["comm/exposed_seconds"], rounds=stats["outer/rounds"])

    @contextmanager
    def judged(self) -> Iterator[None]:
        with self._loop.global_parameters():
            yield

    def finish(self) -> None:
        self._loop.synchronize()

    def close(self) -> None:
        self._loop.detach()
