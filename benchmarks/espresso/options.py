"""Espresso's decision tree as data: every way to compress and communicate one tensor (EuroSys'23, section 4.2).

An option is a path from the root of the tree to a leaf: a series of action tasks, of eight kinds (the paper's table 3),
that takes a rank's gradient to the sum of all ranks'. Three rules prune the tree: a task may only follow certain others
(`FOLLOWS`), a communication must be the step that its position requires (`STEPS`, `PATTERNS`), and the two steps of a
divisible scheme pair (`PAIRS`).

The paper leaves the valid connections out "due to space limitations" and says that 4341 options remain. The tree here,
rebuilt from its figure 8, has exactly that number: 5 flat indivisible, 58 flat divisible, 338 hierarchical indivisible
and 3940 hierarchical divisible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import NamedTuple

from published.cluster import FLAT, INTER, INTRA

GPU, CPU = "gpu", "cpu"

# Table 3: the eight kinds of action tasks and the routines of each. Kinds with _comp communicate compressed data.
KINDS: dict[str, tuple[str, ...]] = {
    "comp": (GPU, CPU),
    "decomp": (GPU, CPU),
    "comm": ("all_reduce",),
    "comm1": ("reduce_scatter", "reduce"),
    "comm2": ("all_gather", "broadcast"),
    "comm_comp": ("all_gather",),
    "comm1_comp": ("all_to_all", "gather"),
    "comm2_comp": ("all_gather", "broadcast"),
}

# Rule 1: kinds that may follow each kind. An option ends after its last communication, uncompressed.
FOLLOWS: dict[str, tuple[str, ...]] = {
    "start": ("comm", "comm1", "comp"),
    "comp": ("comm_comp", "comm1_comp", "comm2_comp"),
    "decomp": ("comm", "comm1", "comm2", "comp", "end"),
    "comm": ("comm2", "comp", "end"),
    "comm1": ("comm", "comm1", "comm2", "comp"),
    "comm2": ("comm2", "comp", "end"),
    "comm_comp": ("comm2_comp", "decomp"),
    "comm1_comp": ("comm_comp", "comm1_comp", "comm2_comp", "decomp"),
    "comm2_comp": ("comm2_comp", "decomp"),
}

# Rule 2: the step of a scheme that a kind can be, and the steps of the four communication patterns.
STEPS: dict[str, str] = {
    "comm": "only",
    "comm1": "first",
    "comm2": "second",
    "comm_comp": "only",
    "comm1_comp": "first",
    "comm2_comp": "second",
}
PATTERNS: dict[str, tuple[tuple[str, str], ...]] = {
    "flat indivisible": ((FLAT, "only"),),
    "flat divisible": ((FLAT, "first"), (FLAT, "second")),
    "hierarchical indivisible": ((INTRA, "first"), (INTER, "only"), (INTRA, "second")),
    "hierarchical divisible": ((INTRA, "first"), (INTER, "first"), (INTER, "second"), (INTRA, "second")),
}

# Rule 3: the second step that belongs to a first one.
PAIRS: dict[str, str] = {
    "reduce_scatter": "all_gather",
    "reduce": "broadcast",
    "all_to_all": "all_gather",
    "gather": "broadcast",
}

PAPER_OPTIONS = 4341  # section 4.4.1


class ActionTask(NamedTuple):
    """One action task: its kind, the device or the collective, and the level of the collective ("" for a device)."""

    kind: str
    routine: str
    level: str = ""


@dataclass(frozen=True)
class Option:
    """A path of the tree: the tasks of one tensor, in order."""

    pattern: str
    tasks: tuple[ActionTask, ...]

    @cached_property
    def compressions(self) -> int:
        """Number of times the tensor is encoded: each time with an error."""
        return sum(task.kind == "comp" for task in self.tasks)

    @cached_property
    def compressed_levels(self) -> frozenset[str]:
        """Levels on which compressed data travels: of "intra", "inter" and "flat"."""
        return frozenset(task.level for task in self.tasks if task.kind.endswith("_comp"))

    @cached_property
    def devices(self) -> frozenset[str]:
        return frozenset(task.routine for task in self.tasks if not task.level)

    def on(self, device: str) -> Option:
        """Return the same path with all encoding and decoding on one device.

        Example:
            >>> next(option for option in options() if option.compressions).on("cpu").devices
            frozenset({'cpu'})
        """
        moved = (task if task.level else task._replace(routine=device) for task in self.tasks)
        return Option(self.pattern, tuple(moved))

    def __str__(self) -> str:
        words = {"comp": "encode on {}", "decomp": "decode on {}"}
        return ", ".join(
            words[task.kind].format(task.routine) if not task.level else f"{task.level} {task.routine}"
            for task in self.tasks
        )


def options(
    devices: tuple[str, ...] = (GPU, CPU),
    max_compressions: int | None = None,
    patterns: tuple[str, ...] = tuple(PATTERNS),
    compressed_levels: frozenset[str] | None = None,
) -> tuple[Option, ...]:
    """Return all paths of the tree, or those that are left when users restrict it.

    Args:
        devices: devices that encode and decode.
        max_compressions: largest number of times to encode a tensor. None: no limit.
        patterns: keys of `PATTERNS`.
        compressed_levels: levels on which compressed data may travel. None: all.

    Raises:
        ValueError: devices or patterns that the tree does not have, or a number below 0.

    Example:
        >>> len(options()), len(options(devices=("gpu",))), len(options(max_compressions=0))
        (4341, 174, 9)
    """
    unknown = set(devices) - {GPU, CPU} or set(patterns) - set(PATTERNS) or (compressed_levels or set()) - _LEVELS
    if unknown:
        raise ValueError(f"the tree has no {', '.join(sorted(unknown))}: it has gpu, cpu, {', '.join(PATTERNS)}")
    if max_compressions is not None and max_compressions < 0:
        raise ValueError(f"max_compressions is {max_compressions}; 0 allows none, None any number")
    return tuple(
        option
        for pattern in patterns
        for option in _paths(pattern, tuple(sorted(set(devices), reverse=True)))
        if (max_compressions is None or option.compressions <= max_compressions)
        and (compressed_levels is None or option.compressed_levels <= compressed_levels)
    )


_LEVELS = {FLAT, INTER, INTRA}


@cache
def _paths(pattern: str, devices: tuple[str, ...]) -> tuple[Option, ...]:
    return tuple(Option(pattern, tasks) for tasks in _grow(pattern, (), devices))


def _grow(pattern: str, path: tuple[ActionTask, ...], devices: tuple[str, ...]) -> Iterator[tuple[ActionTask, ...]]:
    """Every way to complete a path, depth first."""
    done = sum(bool(task.level) for task in path)
    steps = PATTERNS[pattern]
    for kind in FOLLOWS[path[-1].kind if path else "start"]:
        if kind == "end":
            if done == len(steps):
                yield path
        elif kind in ("comp", "decomp"):
            for device in KINDS[kind]:
                if device in devices:
                    yield from _grow(pattern, (*path, ActionTask(kind, device)), devices)
        elif done < len(steps) and STEPS[kind] == steps[done][1]:
            for routine in _routines(kind, steps[done][0], path):
                yield from _grow(pattern, (*path, ActionTask(kind, routine, steps[done][0])), devices)


def _routines(kind: str, level: str, path: tuple[ActionTask, ...]) -> tuple[str, ...]:
    if STEPS[kind] != "second":
        return KINDS[kind]
    first = next(task for task in path if task.level == level)
    return (PAIRS[first.routine],)


def count_by_pattern(devices: tuple[str, ...] = (GPU, CPU)) -> dict[str, int]:
    """Return the number of options of each communication pattern.

    Example:
        >>> count_by_pattern()["hierarchical indivisible"]
        338
    """
    return dict(Counter(option.pattern for option in options(devices)))


def with_processors(tree: Sequence[Option]) -> tuple[Option, ...]:
    """Return the options, and each with some or all of its encoding and decoding on the host's processors.

    Example:
        >>> set(with_processors(options(devices=("gpu",)))) == set(options())
        True
    """
    found: dict[Option, None] = {}
    for option in tree:
        moved = [(task,) if task.level else (task, task._replace(routine=CPU)) for task in option.tasks]
        found.update(dict.fromkeys(Option(option.pattern, tasks) for tasks in product(*moved)))
    return tuple(found)


DENSE = Option(
    "hierarchical indivisible",
    (
        ActionTask("comm1", "reduce_scatter", INTRA),
        ActionTask("comm", "all_reduce", INTER),
        ActionTask("comm2", "all_gather", INTRA),
    ),
)
"""Option without compression: reduce-scatter inside the host, all-reduce between hosts, all-gather inside."""


def between_hosts(device: str, divisible: bool = False) -> Option:
    """Return the option that compresses only between hosts, as systems before Espresso do.

    It is a reduce-scatter inside the host, the shard encoded and all-gathered between hosts, or its parts exchanged,
    summed, encoded again and all-gathered; all-gather inside.

    Example:
        >>> between_hosts("gpu") in options() and between_hosts("cpu", divisible=True) in options()
        True
    """
    first, last = ActionTask("comm1", "reduce_scatter", INTRA), ActionTask("comm2", "all_gather", INTRA)
    encode, decode = ActionTask("comp", device), ActionTask("decomp", device)
    if not divisible:
        return Option(
            "hierarchical indivisible", (first, encode, ActionTask("comm_comp", "all_gather", INTER), decode, last)
        )
    exchange, join = ActionTask("comm1_comp", "all_to_all", INTER), ActionTask("comm2_comp", "all_gather", INTER)
    return Option("hierarchical divisible", (first, encode, exchange, decode, encode, join, decode, last))


def over_all_ranks(device: str) -> Option:
    """Return the option that encodes, all-gathers among all ranks, and decodes.

    Example:
        >>> over_all_ranks("gpu") in options()
        True
    """
    tasks = ActionTask("comp", device), ActionTask("comm_comp", "all_gather", FLAT), ActionTask("decomp", device)
    return Option("flat indivisible", tasks)
