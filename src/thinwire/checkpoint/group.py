"""What ranks say to each other about checkpoints: JSON and small numbers, over a Gloo group of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import ThinwireError
from thinwire.lane import Group, resolve_group

MAX_GATHERED_BYTES = 256 << 20


def new_group(parent: Group, timeout: timedelta) -> dist.ProcessGroup:
    """A Gloo group of the same ranks, so that nothing else interleaves with what they agree on; collective."""
    parent = resolve_group(parent)
    ranks = dist.get_process_group_ranks(parent)
    some = len(ranks) < dist.get_world_size()
    group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=some)
    assert isinstance(group, dist.ProcessGroup), "this rank is in it"
    return group


def run_id_of(given: str | None) -> str:
    """The name of the run: as given, or of the environment; torchrun's default is the same for all jobs, so no name.

    Raises ValueError if there is none.
    """
    found = given or os.environ.get("THINWIRE_RUN_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "")
    if found in ("", "none"):
        raise ValueError(
            "a run needs a name that is the same after a restart: pass run_id=, set THINWIRE_RUN_ID, or start with"
            " torchrun --rdzv-id NAME"
        )
    return found


def gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every rank passes, in the order of ranks; collective, over a group of Gloo."""
    text = json.dumps(value).encode()
    world_size = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
    lengths = [int(size) for size in sizes]
    if sum(lengths) > MAX_GATHERED_BYTES:
        raise ThinwireError(f"{sum(lengths):,} bytes of JSON to gather, more than {MAX_GATHERED_BYTES:,}")
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded, group=group)
    return [json.loads(each[:length].numpy().tobytes()) for each, length in zip(gathered, lengths, strict=True)]


def failures_of(reason: str, group: dist.ProcessGroup) -> str:
    """Why ranks failed, of at most four of them, or empty; collective. Each passes its own reason, or an empty one."""
    failed = [f"rank {rank}: {each}" for rank, each in enumerate(gather_json(reason, group)) if each]
    return "; ".join(failed[:4])


def least(values: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The least that any rank passes, for each place; collective, over a group of Gloo."""
    tensor = torch.tensor(list(values), dtype=torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.MIN, group=group)
    return tensor.tolist()
