"""How processes end that have a model attached: with status 0 and without waiting, where those of stock DDP may not."""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.comm import lane
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

ENDS = ("nothing", "destroy", "destroy, then free", "free, then destroy")
kept: dict[str, Any] = {}
"""What only the end of Python frees."""


def end_python() -> None:
    """What `sys.exit` comes to once nobody has caught it; a rank of the testbed ends otherwise.

    Since Python 3.13, what multiprocessing forks has forgotten what its fork server had registered to run at the end.
    """
    atexit.unregister(lane._end_all)
    atexit.register(lane._end_all)
    ctypes.pythonapi.Py_Exit(0)


def ended(function: Callable[..., None], *args: Any, world_size: int) -> list[tuple[int | None, str | None]]:
    """Return the status of each rank, and where it hung."""
    outcomes = run_ranks(function, *args, world_size=world_size, timeout_seconds=60, check=False, kernels=())
    return [(outcome.exit_code, outcome.error) for outcome in outcomes]


def _held_up(group: dist.ProcessGroup, rank: int, go: threading.Event) -> None:
    """Have a thread of the group's on rank 0 be in Python, where it waits for an event."""
    inside = threading.Event()
    work: Any = None

    def wait(future: object) -> None:
        inside.set()
        go.wait()

    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        work.get_future().add_done_callback(wait)
    dist.barrier()
    if rank == 0:
        assert inside.wait(30)
    else:
        dist.all_reduce(torch.ones(1), group=group)


def _trained(group: dist.ProcessGroup, has_table: bool, is_attached: bool) -> DistributedDataParallel:
    torch.manual_seed(0)
    first = nn.Embedding(3000, 16) if has_table else nn.Linear(4, 64)
    model = nn.Sequential(first, nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 1))
    ddp = DistributedDataParallel(model, process_group=group)
    if is_attached:
        kept["sync"] = thinwire.attach(ddp)
    for _ in range(3):
        ids = torch.randint(0, 3000, (8, 4))
        ddp(ids if has_table else ids.float()).square().mean().backward()
    return ddp


def _frees_a_model_whose_group_was_destroyed(context: RankContext, is_attached: bool) -> bool:
    group, go = dist.new_group(), threading.Event()
    ddp = _trained(group, False, is_attached)  # whose hooks hold the group, too, if it has tables
    if context.rank == 0:
        sys.setswitchinterval(1000)  # Python changes hands only where it is let go
    _held_up(group, context.rank, go)
    kept.clear()
    dist.destroy_process_group(group)
    del group
    reducer = ddp.__dict__.pop("reducer")
    ddp.__dict__ |= {"freed just before": lambda: None, "reducer": reducer}
    weakref.finalize(ddp.__dict__["freed just before"], go.set)
    del reducer, ddp
    return True


def test_a_model_that_is_freed_after_its_group_was_destroyed_does_not_wait_for_ever() -> None:
    """A thread of the group wants Python, and the destructor of DDP, where it is the last owner, waits for it."""
    run_ranks(_frees_a_model_whose_group_was_destroyed, True, world_size=2, timeout_seconds=60, kernels=())


def _exits_while_a_thread_wants_python(context: RankContext, is_attached: bool) -> None:
    kept["group"], go = dist.new_group(), threading.Event()
    kept["ddp"] = _trained(kept["group"], True, is_attached)
    _held_up(kept["group"], context.rank, go)
    sys.setswitchinterval(1000)

    def join(this: lane.Lane, seconds: float) -> None:
        joined(this, seconds)
        go.set()

    joined = lane.Lane.join
    lane.Lane.join = join  # type: ignore[method-assign]  # the last that lets go of Python before it ends
    end_python()


def test_threads_of_gloo_are_done_with_python_before_it_ends() -> None:
    """Otherwise Python ends the thread, and C++ aborts the process."""
    assert ended(_exits_while_a_thread_wants_python, True, world_size=2) == [(0, None)] * 2


def _ends(context: RankContext, how: str, is_attached: bool) -> None:
    kept["ddp"] = _trained(dist.group.WORLD, True, is_attached)
    if how == "free, then destroy":
        kept.clear()
    if how != "nothing":
        dist.destroy_process_group()
    if how == "destroy, then free":
        kept.clear()
    end_python()


@pytest.mark.parametrize(
    ("how", "world_size", "jobs"),
    [
        *((how, 2, 1) for how in ENDS),
        *(pytest.param(how, size, 5, marks=pytest.mark.slow) for how in ENDS for size in (2, 4)),
    ],
)
def test_a_job_ends_with_status_0(how: str, world_size: int, jobs: int) -> None:
    for _ in range(jobs):
        assert ended(_ends, how, True, world_size=world_size) == [(0, None)] * world_size
