"""Trainings that are restored."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from thinwire.checkpoint import Checkpointer, Disk, Storage


def keeper(socket: str, directory: Path, every: float | str = "1d", run: str = "run") -> Checkpointer:
    return Checkpointer(nn.Linear(9, 9), storage=Storage(run, 1, Disk(directory, every), socket))


def on_disk(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-????????"))
