"""How much memory the holder may take: what this machine and its control groups have left."""

from __future__ import annotations

import re
from pathlib import Path

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class BudgetError(ValueError):
    """The holder has no room for that: the message gives the bytes needed and available."""


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``64GiB``, ``64G``, ``500 MB`` or ``1000``. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"unknown size {text!r}; legal forms: '64GiB', '500MB', '1000000'")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that can be taken now without swapping: MemAvailable, or less if a control group allows less."""
    meminfo = (root / "proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(match[1]) * 1024 if match else 0
    return max(0, min([available, *_left_in_control_groups(root)]))


def _left_in_control_groups(root: Path) -> list[int]:
    """Limit less usage of each memory control group of this process, up to the root; versions 1 and 2."""
    left = []
    path = root / "proc/self/cgroup"
    for line in path.read_text().splitlines() if path.exists() else []:
        _, controllers, group = line.split(":", 2)
        if controllers == "memory":
            mount, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif controllers == "":
            mount, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        else:
            continue
        inner = mount / group.strip("/")
        for directory in [inner, *inner.parents]:
            left += _left(directory / limit, directory / usage)
            if directory == mount:
                break
    return left


def _left(limit: Path, usage: Path) -> list[int]:
    try:
        return [int(limit.read_text()) - int(usage.read_text())]
    except (OSError, ValueError):  # not mounted here, or "max"
        return []
