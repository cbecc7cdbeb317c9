"""A benchmark as one rank of a job that torchrun started: all its ranks together run one benchmark."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Value = TypeVar("Value")


def is_in_job() -> bool:
    """Return whether torchrun, or a similar launcher, started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    """Return whether this is rank 0, or no rank of a job."""
    return int(os.environ.get("RANK", "0")) == 0


def size_of_job() -> tuple[int, int]:
    """Return the numbers of hosts and of ranks on each, which are consecutive, as the environment has them.

    Raises:
        ValueError: hosts with different numbers of ranks.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if world_size % local:
        raise ValueError(f"{world_size} ranks, {local} of them on this host: every host needs the same number")
    return world_size // local, local


@contextmanager
def job_group(backend: str = "gloo") -> Iterator[None]:
    """Join the job's process group, if there is none yet, and leave it again; benchmarks compute on the CPU."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    dist.init_process_group(backend)
    try:
        yield
        dist.barrier()  # a rank that leaves early resets connections that others read from
    finally:
        dist.destroy_process_group()


def on_all_ranks(
    function: Callable[..., Value], *args: Any, on_message: Callable[[Any], None] = lambda message: None
) -> list[Value]:
    """Call ``function(context, *args)`` here as on all other ranks, and return the values of all, on all.

    ``on_message`` gets the messages of this rank. An error ends this rank; the launcher then ends the others.
    """
    import torch.distributed as dist

    from thinwire.lab.testbed.rank import RankContext

    rank, local = dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0"))
    _, ranks_per_host = size_of_job()
    value = function(RankContext(rank, dist.get_world_size(), local, rank // ranks_per_host, on_message), *args)
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
