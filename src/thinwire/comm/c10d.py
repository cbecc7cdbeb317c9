"""Names of torch that are not public, and that process groups need: `thinwire.comm`, `outer` and `backend`.

Each call that makes groups looks by `check_names` at all that it needs, before anything is sent.

| names of ``torch.distributed.distributed_c10d`` | known in torch |
|---|---|
| ``_get_object_coll_device``, ``_get_process_group_store``, ``_get_default_store`` | 2.11 to 2.15 |
| ``_new_process_group_helper``, ``_world.pg_group_ranks`` | 2.11 to 2.15 |
| ``_get_backend``, ``_register_backend``, ``_set_default_backend`` of a group | 2.11 to 2.15 |
| ``_reduce_scatter_base``, ``_allgather_base`` of a group (``_single`` since 2.13) | 2.11 to 2.15 |
| ``_set_default_timeout`` and ``options._timeout`` of a back end | 2.11 to 2.15 |
| ``ProcessGroupGloo._Options``, ``create_device``, ``create_default_device`` | 2.11 to 2.15 |
| ``_get_default_timeout``, ``_create_process_group_wrapper``, ``_DistributedBackendOptions`` | 2.11 to 2.15 |
| ``_hash_ranks_to_str`` with ``_world.pg_names``; later it counts otherwise | 2.11 to 2.13 |
| ``torch._C._set_print_stack_traces_on_fatal_signal`` (where it is missing, nothing is shown) | 2.11 to 2.15 |
| ``set_code_exec_strategy`` and its types of ``torch._C._dynamo.eval_frame``; ``_torchdynamo_disable`` | 2.11 to 2.15 |
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain, cycle
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions as BackEndOptions

TESTED = "2.11 to 2.15"
"""Versions of torch of which `make test-torches` runs the oldest and the newest."""
NEEDED = """_get_object_coll_device _get_process_group_store _get_default_store _new_process_group_helper
    _world.pg_group_ranks ProcessGroupGloo._Options"""
"""Those that a group of ours needs whose ranks torch knows."""
UNREGISTERED = """ProcessGroup._get_backend ProcessGroup._register_backend ProcessGroup._set_default_backend
    ProcessGroupGloo._set_default_timeout ProcessGroupGloo._Options"""
"""Those that a group needs which torch does not know: of `Members`, and of the back end."""
F = TypeVar("F", bound=Callable[..., Any])


def check_names(what: str, instead: str, names: str = NEEDED, of_model: Iterable[tuple[object, str]] = ()) -> None:
    """Raise ValueError for a private name that this torch does not have; on every rank, as all have one torch.

    Args:
        what: the call that needs the names.
        instead: what works without them.
        names: names of ``torch.distributed.distributed_c10d``.
        of_model: others, each with what has it; later ones may need earlier ones.
    """
    try:
        for owner, needed in chain([(distributed_c10d, names)], of_model):
            attrgetter(*needed.split())(owner)
    except AttributeError as error:
        raise ValueError(
            f"{what} does not know torch {torch.__version__}, in which {error}: install torch {TESTED}, or {instead}"
        ) from error


def show_native_stacks() -> None:
    """Print the C++ stacks of all threads at a fatal signal, before what Python's `faulthandler` prints."""
    getattr(torch._C, "_set_print_stack_traces_on_fatal_signal", lambda shown: None)(True)


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
    stock: Any = getattr(distributed_c10d, "_hash_ranks_to_str", None)
    if stock is not None and "pg_names" in stock.__code__.co_names:
        distributed_c10d._hash_ranks_to_str = _hash_ranks
    group: Any = distributed_c10d._new_process_group_helper(*about, timeout=timeout)[0]
    _ours.add(group)
    distributed_c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


_ours = WeakSet[dist.ProcessGroup]()


def _hash_ranks(ranks: Sequence[int]) -> str:
    """Return the name of a local group as torch makes it before 2.14, from the number of groups: ours do not count.

    They end when a lane does, after which torch would give a name twice, and some ranks may have more of them.
    """
    others = sum(group not in _ours for group in [*distributed_c10d._world.pg_names])
    return hashlib.sha1("_".join(map(str, [*ranks, others])).encode(), usedforsecurity=False).hexdigest()


def unregistered_group(store: dist.Store, ranks: Sequence[int], rank: int, limit: Any) -> dist.ProcessGroup:
    """Make a Gloo group of global ranks, of which each calls it, that torch does not know, so that it may end any time.

    Args:
        rank: index of this rank in ``ranks``.
        limit: the timeout, or options of Gloo.
    """
    group = dist.ProcessGroup(store, rank, len(ranks))
    add_back_end(group, "cpu", dist.ProcessGroup.BackendType.GLOO, gloo_back_end(store, ranks, rank, limit))
    return group


class _Alternating(dist.ProcessGroup):
    """A group whose collectives of DDP go through several back ends in turn; all ranks call them in the same order.

    DDP calls these two from C++. Any other one would run with Python locked, for which a thread of Gloo can wait.
    """

    turns: Iterator[Any]

    def allreduce(self, *tensors_and_options: Any) -> Any:  # type: ignore[override]  # one for all overloads
        """Start an all-reduce."""
        return next(self.turns).allreduce(*tensors_and_options)

    def broadcast(self, *tensors_and_options: Any) -> Any:  # type: ignore[override]
        """Start a broadcast."""
        return next(self.turns).broadcast(*tensors_and_options)


def sparse_group(name: str, ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Make a group like `gloo_group`, unregistered, whose back ends run one all-reduce after the other each.

    Those of sparse tensors must not run beside others of a back end. Torch's Gloo runs two at a time, and both threads
    write the name of theirs into one string, without a lock. "_ALLREDUCE_SPARSE" is too long to be stored in the string
    itself, so one thread writes into a block that the other has freed. Two back ends of one thread each have a string
    each. They share the device, and with it the thread that waits for its sockets. (A small table on four ranks of two
    cores: 1.37 to 1.42 of stock's step with one back end, 1.04 to 1.09 so, by benchmarks/not_slower.py.)
    """
    store, rank = dist.PrefixStore(f"{name}/", default_store()), ranks.index(dist.get_rank())
    return alternating(store, ranks, rank, gloo_options(timeout))


def alternating(store: dist.Store, ranks: Sequence[int], rank: int, options: Any) -> dist.ProcessGroup:
    """Make the group of `sparse_group`, with these options but for the number of threads."""
    options._threads, make = 1, _Alternating
    group: Any = make(rank, len(ranks))  # type: ignore  # torch's stubs know another constructor, which C++ does not call
    back_ends = [gloo_back_end(dist.PrefixStore(f"{turn}/", store), ranks, rank, options) for turn in range(2)]
    add_back_end(group, "cpu", dist.ProcessGroup.BackendType.GLOO, back_ends[0])
    group.turns = cycle(back_ends)
    return group


def gloo_options(timeout: timedelta) -> Any:
    """Return the options that torch makes for a Gloo back end. Those made with the same ones share a thread."""
    gloo: Any = dist.ProcessGroupGloo
    interfaces = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=one) for one in interfaces] or [gloo.create_default_device()]
    options._threads, options._timeout = 2 * len(options._devices), timeout
    return options


def gloo_back_end(store: dist.Store, ranks: Sequence[int], rank: int, limit: Any, name: str = "") -> Any:
    """Connect these ranks by Gloo; ``limit`` is as of `unregistered_group`."""
    gloo = dist.ProcessGroupGloo(store, rank, len(ranks), limit)
    gloo.options.global_ranks_in_group, gloo.options.group_name = list(ranks), name  # type: ignore
    return gloo


def add_back_end(group: Any, device: str, kind: Any, back_end: Any) -> None:
    """Let a back end do what a group is asked for on a device, and where the caller names none."""
    group._register_backend(torch.device(device), kind, back_end)
    group._set_default_backend(kind)


def back_end_of(group: dist.ProcessGroup, device: str = "cpu") -> Any:
    """Return the back end of a group for a device; RuntimeError if it has none."""
    return group._get_backend(torch.device(device))


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout that the group was made with, or None, for torch's default, if this torch hides it."""
    for device in ("cpu", "cuda"):  # a group of NCCL has no part for the CPU
        with suppress(AttributeError, RuntimeError):
            return back_end_of(group, device).options._timeout
    return None


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let later calls of a Gloo group wait for so long."""
    back_end_of(group)._set_default_timeout(timeout)


def default_timeout() -> timedelta:
    """Return the timeout of groups of Gloo that are made without one."""
    return distributed_c10d._get_default_timeout(dist.Backend.GLOO)  # type: ignore[arg-type]


def checked(back_end: Any, store: dist.Store, made: BackEndOptions) -> Any:
    """Return a back end that compares the calls of ranks, as under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    met = made.group_id, store, made.group_rank, made.group_size, made.timeout
    return distributed_c10d._create_process_group_wrapper(back_end, *met)


def never_compiled(function: F) -> F:
    """Decorate a function as `torch.compiler.disable` does, at no cost: that imports the compiler, and wraps each call.

    A compiled train step would compile what its forward and backward call. Four wrapped hooks took 30 us of a step.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    with suppress(AttributeError):  # an import of another torch must not fail, which `attach` refuses in a sentence
        frames: Any = torch._C._dynamo.eval_frame
        never = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)  # nor what it calls
        frames.set_code_exec_strategy(function.__code__, never)
    return function
