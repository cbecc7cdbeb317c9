"""Names of torch that are not public, and that process groups need: `thinwire.comm`, `outer` and `backend`.

| names of ``torch.distributed.distributed_c10d`` | known in torch |
|---|---|
| ``_get_object_coll_device``, ``_get_process_group_store``, ``_get_default_store`` | 2.13 |
| ``_new_process_group_helper``, ``_world.pg_group_ranks`` | 2.13 |
| ``_get_default_timeout``, ``_create_process_group_wrapper``, ``_DistributedBackendOptions`` | 2.13 |
| of ``torch._C._dynamo.eval_frame``: ``set_code_exec_strategy`` and its types; ``_torchdynamo_disable`` | 2.13 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions as BackEndOptions
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.distributed import distributed_c10d

F = TypeVar("F", bound=Callable[..., Any])
_NEVER = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # nor what it calls


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device of tensors that a group takes in any case."""
    return torch.device(distributed_c10d._get_object_coll_device(group))


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store in which the ranks of a group met."""
    return distributed_c10d._get_process_group_store(group)  # type: ignore[attr-defined]


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    return distributed_c10d._get_default_store()


def gloo_group(name: str, ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Make a Gloo group of ranks, of which each calls it, that meet in the default store under a name.

    `torch.distributed.new_group` takes a counter of this rank's groups for the name, another one in each version, and
    ranks that made different numbers of groups wait for each other under different names.
    """
    about: Any = len(ranks), ranks.index(dist.get_rank()), list(ranks), dist.Backend("gloo"), default_store(), name
    group: Any = distributed_c10d._new_process_group_helper(*about, timeout=timeout)[0]
    distributed_c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


def default_timeout() -> timedelta:
    """Return the timeout of groups of Gloo that are made without one."""
    return distributed_c10d._get_default_timeout(dist.Backend.GLOO)  # type: ignore[arg-type]


def checked(back_end: Any, store: dist.Store, made: BackEndOptions) -> Any:
    """Return a back end that compares the calls of ranks, as under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    return distributed_c10d._create_process_group_wrapper(
        wrapped_pg=back_end,
        store_prefix=made.group_id,
        store=store,
        rank=made.group_rank,
        world_size=made.group_size,
        timeout=made.timeout,
    )


def never_compiled(function: F) -> F:
    """Decorate a function as `torch.compiler.disable` does, at no cost: that imports the compiler, and wraps each call.

    A compiled train step would compile what its forward and backward call. Four wrapped hooks took 30 us of a step.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    set_code_exec_strategy(function.__code__, _NEVER)  # type: ignore[attr-defined]
    return function
