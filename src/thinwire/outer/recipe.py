"""Recipes of outer loops: when parameters are averaged, and what is done with the mean, as data.

All ranks share an *anchor*, a copy of the parameters with the same bits everywhere. Each rank trains its own parameters
away from it. A round averages the differences ``anchor - parameter`` over ranks, and takes the mean as the gradient of
the anchor: an outer SGD steps the anchor, and ``mix`` says how far the parameters go to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from thinwire.errors import unknown

LEAST_ROUNDS = 100
"""Rounds below which a training from scratch ends behind data parallelism: by 11 to 44 % in docs/guides/outer.md."""
_NO_PAUSE = 1e-3
"""Seconds between the beginnings of two rounds that follow each other at once."""
ALGORITHMS = {"easgd": (0.5, 0.0, 0.5), "average": (1.0, 0.0, 0.5), "bmuf": (0.5, 0.5, 0.5)}
"""Defaults of lr, momentum and mix of the algorithms of `shadow_sync`."""


@dataclass(frozen=True)
class OuterRecipe:
    """The settings of an outer loop, which `local_sgd`, `diloco` and `shadow_sync` fill in.

    Args:
        name: the function that made it.
        algorithm: that of `shadow_sync`, or the name again.
        every: inner steps of a full round; None for rounds in the background.
        every_seconds: least seconds between the beginnings of two rounds in the background; 0 for no pause.
        lr, momentum, nesterov: settings of the outer ``torch.optim.SGD``, whose gradient is the mean difference;
            nesterov has no effect without momentum.
        mix: weight of the anchor in ``parameter = (1 - mix) * parameter + mix * anchor``; 1 replaces the parameter.
        fragments: parts of the model, of similar size, that take turns, one every ``every / fragments`` steps.
        delay: inner steps between the launch of a fragment and its landing in the parameters; at most ``every``.
        start_step: inner steps at the start after each of which parameters are averaged exactly.
        min_ranks: how many ranks are enough to go on when others are lost; None for all.

    Raises:
        ValueError: a setting out of range.
    """

    name: str
    algorithm: str
    every: int | None = None
    every_seconds: float = 0.0
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    mix: float = 1.0
    fragments: int = 1
    delay: int = 0
    start_step: int = 0
    min_ranks: int | None = None

    @property
    def in_background(self) -> bool:
        """Whether rounds are not counted in inner steps."""
        return self.every is None

    def __post_init__(self) -> None:
        if self.name != "shadow_sync":
            _check_count("every", self.every, 1, "the number of inner steps of a full round, such as 64")
        _check_count("fragments", self.fragments, 1, "the number of parts that take turns, such as 4")
        _check_count("delay", self.delay, 0, "a number of inner steps, or 0 to wait for the mean")
        _check_count("start_step", self.start_step, 0, "a number of inner steps, or 0")
        if self.min_ranks is not None:
            _check_count("min_ranks", self.min_ranks, 1, "a number of ranks, or None for all")
        _check_number("lr", self.lr, math.inf, (0.0, math.inf), "more than 0, such as 0.7")
        _check_number("momentum", self.momentum, 1.0, (1.0,), "from 0 to less than 1, such as 0.9")
        _check_number("mix", self.mix, 1.0, (0.0,), "more than 0 and at most 1, which replaces")
        _check_number("every_seconds", self.every_seconds, math.inf, (math.inf,), "seconds, or None")
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"nesterov is {self.nesterov!r}: pass True or False")
        if self.momentum == 0.0:  # Nesterov's look ahead is along the momentum
            object.__setattr__(self, "nesterov", False)
        if self.every is not None and self.fragments > self.every:
            raise ValueError(
                f"{self.fragments} fragments do not fit in every={self.every} steps: one is launched every"
                " `every / fragments` steps, so pass at most as many"
            )
        if self.every is not None and self.delay > self.every:
            raise ValueError(
                f"delay={self.delay} is more than every={self.every}: a fragment lands before it is launched again, so"
                " pass at most as many steps"
            )

    def after(self, start_step: int) -> OuterRecipe:
        """Return this recipe with so many first steps after each of which parameters are averaged exactly.

        Example:
            >>> diloco(every=64).after(500).start_step
            500
        """
        return replace(self, start_step=start_step)

    def few_rounds(self, steps: float) -> str:
        """Return a warning if a training of so many inner steps has few rounds; else nothing.

        Example:
            >>> diloco(every=64).few_rounds(64 * LEAST_ROUNDS)
            ''
        """
        if self.every is None or not 0 < steps - self.start_step < self.every * LEAST_ROUNDS:
            return ""
        rounds = (int(steps) - self.start_step) // self.every
        return (
            f"{steps:,} steps are {rounds} rounds of {self.name}(every={self.every}); from scratch, fewer than"
            f" {LEAST_ROUNDS} ended 11 to 44 % above DDP: pass a smaller every=, or begin by recipe.after(steps)"
        )

    def launched(self, step: int) -> int:
        """Return how many launches there have been after so many inner steps; fragments take turns.

        Each fragment is launched once in ``every`` steps, evenly; up to ``start_step`` all are after each step.
        """
        assert self.every is not None, "rounds in the background are not counted in inner steps"
        at_start, later = min(step, self.start_step), max(0, step - self.start_step)
        return self.fragments * at_start + self.fragments * later // self.every

    def step_of(self, launched: int) -> int:
        """Return the last inner step after which there have been at most so many launches when they began."""
        assert self.every is not None, "rounds in the background are not counted in inner steps"
        rounds, rest = divmod(launched, self.fragments)
        if rounds < self.start_step:
            return rounds
        return self.start_step + ((rounds - self.start_step) * self.fragments + rest) * self.every // self.fragments


def local_sgd(every: int = 8, start_step: int = 0, min_ranks: int | None = None) -> OuterRecipe:
    """Average parameters after every so many inner steps: local SGD, and post-local SGD with ``start_step``.

    With plain SGD and ``every=1`` this is data-parallel training.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR'19; Lin et al., "Don't Use Large
    Mini-Batches, Use Local SGD", ICLR'20.

    Args and errors: as of `OuterRecipe`.

    Example:
        >>> sync = thinwire.outer.attach(model, optimizer, local_sgd(every=8))      # doctest: +SKIP
    """
    return OuterRecipe("local_sgd", "local_sgd", every, start_step=start_step, min_ranks=min_ranks)


def diloco(
    every: int = 64,
    lr: float = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 1.0,
    min_ranks: int | None = None,
) -> OuterRecipe:
    """Step the anchor by the mean difference with Nesterov momentum: DiLoCo, and Streaming DiLoCo with fragments.

    With ``fragments`` parts of the model take turns; with ``delay`` training goes on while they travel. With a
    sparsifier and ``momentum=0.0`` this is SparseLoCo. A training from scratch begins better `after` some plain steps.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, and "Streaming
    DiLoCo with overlapping communication", 2025; Sarfi et al., "Communication Efficient LLM Pre-training with
    SparseLoCo", 2025.

    Args and errors: as of `OuterRecipe`. (Streaming DiLoCo's alpha is 1 - mix.)

    Example:
        >>> recipe = diloco(every=32, fragments=4, delay=2, mix=0.5)
        >>> [recipe.launched(step) for step in (7, 8, 9, 32)]
        [0, 1, 1, 4]
    """
    return OuterRecipe(
        "diloco", "diloco", every, 0.0, lr, momentum, nesterov, mix, fragments, delay, min_ranks=min_ranks
    )


def shadow_sync(
    algorithm: str = "easgd",
    every_seconds: float | None = None,
    mix: float | None = None,
    lr: float | None = None,
    momentum: float | None = None,
    min_ranks: int | None = None,
) -> OuterRecipe:
    """Average in the background, as often as the network allows, and never block a step: ShadowSync.

    Source: Zheng et al., "ShadowSync: Performing Synchronization in the Background for Highly Scalable Distributed
    Training", 2020; Zhang et al., "Deep learning with Elastic Averaging SGD", NeurIPS'15; Chen and Huo, "Scalable
    training of deep learning machines by incremental block training with intra-block parallel optimization and
    blockwise model-update filtering", ICASSP'16.

    Args:
        algorithm: "easgd" moves the anchor by ``lr`` towards the mean; "average" makes it the mean; "bmuf" gives it
            block momentum.
        every_seconds: least seconds between the beginnings of two rounds. None for as often as the network allows, and
            a hundredth of the processor time of the process allow: its cores train. 0 leaves that bound out: a round
            begins when the last one is over, as in the paper.
        mix: weight of the anchor in the parameters after a round.
        lr, momentum: settings of the outer SGD; None for the defaults of the algorithm.
        min_ranks: how many ranks are enough to go on when others are lost; None for all.

    Raises:
        ValueError: an unknown algorithm, or a setting out of range.

    Example:
        >>> shadow_sync("average").lr
        1.0
    """
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise unknown("algorithm", str(algorithm), ALGORITHMS)
    if algorithm == "average" and (lr, momentum) != (None, None):
        raise ValueError("algorithm='average' takes the mean as it is: leave out lr= and momentum=, or take 'bmuf'")
    if algorithm == "easgd" and momentum:
        raise ValueError("algorithm='easgd' has no momentum: leave out momentum=, or take algorithm='bmuf'")
    is_zero = every_seconds == 0 and every_seconds is not False
    seconds = 0.0 if every_seconds is None else _NO_PAUSE if is_zero else every_seconds
    given = zip((lr, momentum, mix), ALGORITHMS[algorithm], strict=True)
    lr, momentum, mix = (usual if value is None else value for value, usual in given)
    return OuterRecipe("shadow_sync", algorithm, None, seconds, lr, momentum, mix=mix, min_ranks=min_ranks)


def _check_count(name: str, value: object, least: int, instead: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}: pass {instead}")


def _check_number(name: str, value: object, most: float, excluded: tuple[float, ...], instead: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0.0 <= value <= most or value in excluded:
        raise ValueError(f"{name} is {value!r}: pass {instead}")
