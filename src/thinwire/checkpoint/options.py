"""Options of a `Checkpointer`: how versions are made, and where they are kept."""

import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from thinwire.comm.groups import Group

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str | float) -> float:
    """Return the seconds of a text such as ``3h``, ``30m`` or ``90s``, or of a number. Raises ValueError.

    Example:
        >>> parse_seconds("3h")
        10800.0
    """
    if isinstance(text, (int, float)):
        return float(text)
    if (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", text)) is None:
        raise ValueError(f"{text!r} is not a time: write it as 90s, 30m, 3h or 1d")
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class CheckpointPolicy:
    """When a `Checkpointer` makes versions, and how.

    Args:
        every: steps between two checkpoints, at least.
        max_overhead: share of the time of training that checkpoints may cost, such as 0.02. Where one after every step
            costs more, as measured while training, they are made less often. "auto" is 5 % or 10 ms a step, whichever
            is more; None never makes them less often.
        max_age_steps: `Checkpointer.step` raises ThinwireError when the newest checkpoint that all ranks have is older
            than that. Without it there is a warning (docs/guides/checkpoints.md says when).
        on_divergence: what happens when ranks that had the same parameters and optimizer state have not any more, which
            is silent corruption: `Checkpointer.step` raises ThinwireError ("raise"), or there is a warning ("warn").
            "off" compares nothing: for ranks that are meant to differ.
        overlap: copy parameters and the optimizer's state while the next iteration computes; ``optimizer.step`` waits
            for it. Pass False if anything else writes to them between `Checkpointer.step` and the next
            ``optimizer.step``; a version that was written to meanwhile is dropped, if torch notices (it does not with
            ``.data``).
        compress: "lossless" codes float tensors beside the training, and keeps and sends versions in fewer bytes: a
            third less of bfloat16 weights. Every bit comes back. The same on all ranks; any may restore any version.

    Raises:
        ValueError: an argument has another value.

    Example: Checkpointer(model, optimizer, policy=CheckpointPolicy(every=10))
    """

    every: int = 1
    max_overhead: float | Literal["auto"] | None = "auto"
    max_age_steps: int | None = None
    on_divergence: Literal["raise", "warn", "off"] = "raise"
    overlap: bool = True
    compress: Literal["lossless"] | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every}: it is 1, 2, ...")
        if self.on_divergence not in ("raise", "warn", "off"):
            raise ValueError(f"on_divergence={self.on_divergence!r}: it is 'raise', 'warn' or 'off'")
        if self.compress not in (None, "lossless"):
            raise ValueError(f"compress={self.compress!r}: it is 'lossless' or None")


@dataclass(frozen=True)
class Disk:
    """A directory that all ranks see, for a checkpoint on a disk now and then.

    It is read when the memory of all hosts has no version, or only older ones. It is made where there is none, its
    parent is not. It belongs to one run: others are refused.

    Args:
        directory: its path. A relative one means the same place wherever the script changes to later.
        every: seconds between two checkpoints, or a text such as "3h".
        keep: number of the newest checkpoints that are kept.

    Raises:
        ValueError: an argument has another value.

    Example: Disk("/shared/run", every="30m")
    """

    directory: str | Path
    every: str | float = "3h"
    keep: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory).absolute())
        parse_seconds(self.every)
        if self.keep < 1:
            raise ValueError(f"keep={self.keep}: it is 1, 2, ...")


@dataclass(frozen=True)
class Storage:
    """Where a `Checkpointer` keeps its versions, under which name, and which ranks share them.

    Args:
        run_id: names the run, the same after a restart. Default: the environment's THINWIRE_RUN_ID, or that of
            ``torchrun --rdzv-id``.
        replicas: copies of each state, including the one on its own machine.
        disk: saves a checkpoint on a disk now and then, as well.
        holder_socket: path of this host's holder (`thinwire holder`); default $THINWIRE_HOLDER. If all ranks are on
            one host, one is started where there is none.
        domain: name of what this host may be lost together with, such as its rack or its zone; default
            $THINWIRE_DOMAIN. Copies of a state go to hosts of other domains; a warning names those that cannot.
        process_group: the ranks that train together; default all.
        timeout: how long ranks wait for each other; default 30 minutes.

    Example: Checkpointer(model, optimizer, storage=Storage(run_id="my-run", disk=Disk("/shared/run")))
    """

    run_id: str | None = None
    replicas: int = 2
    disk: Disk | None = None
    holder_socket: str | Path | None = None
    domain: str | None = None
    process_group: Group = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.holder_socket is not None:  # which means the same place wherever the script changes to later
            object.__setattr__(self, "holder_socket", Path(self.holder_socket).absolute())
