"""Messages between ranks about checkpoints: JSON and small numbers, over a Gloo group of their own."""

import errno
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from thinwire.checkpoint.holder.start import AGENT_VARIABLE
from thinwire.comm import agree, groups
from thinwire.comm.c10d import check_names
from thinwire.comm.connections import PrivateGroup
from thinwire.comm.groups import Group
from thinwire.comm.process_group import Exchange
from thinwire.errors import ThinwireError

T = TypeVar("T")
_TIMEOUT = timedelta(minutes=30)


def private_group(parent: Group, timeout: timedelta | None) -> PrivateGroup:
    """Create a Gloo group of the same ranks, so that nothing interleaves with their agreements; collective.

    It can be shut down under a thread that waits in it. Without a ``timeout`` ranks wait for each other for 30 minutes.
    """
    check_names("a checkpoint in memory", "save by torch.distributed.checkpoint")
    return groups.private_group(parent, timeout or _TIMEOUT)


def restart_hint() -> str:
    """Return what to set so that workers which torchrun restarts find each other, or an empty text.

    The store of torchrun (torch 2.13) stays for all starts of the workers, and has no prefix for each: restarted ones
    find the addresses of the dead there, and `init_process_group` fails or hangs. The thinwire rendezvous has one for
    each.
    """
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    done = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if most <= done or AGENT_VARIABLE in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return (
        "torchrun shares one store between all starts of the workers, so restarted ones do not find each other: export"
        " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, and start it with --standalone or --rdzv-backend c10d"
    )


def run_id_of(given: str | None) -> str:
    """Return the name of the run: as given, or from the environment.

    The default of torchrun is the same for all jobs, so it is no name. Raises ValueError if there is none.
    """
    result = given or os.environ.get("THINWIRE_RUN_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "")
    if result in ("", "none"):
        raise ValueError(
            "a run needs a name that is the same after a restart: pass run_id=, set THINWIRE_RUN_ID, or start with"
            " torchrun --rdzv-id NAME"
        )
    return result


def lasting(run_id: str) -> str | None:
    """Return the name of a run, or None for one that torchrun makes up at each start, as with ``--standalone``."""
    return None if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", run_id) else run_id


def gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Gather one value of every rank, in rank order; collective."""
    return agree.gather_json(Exchange(group), "checkpoint record", value)


def check_alike(settings: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Raise ValueError on all ranks if they were given different values; collective."""
    gathered = gather_json({name: repr(value) for name, value in settings.items()}, group)
    for name in settings:
        if len(values := sorted({each[name] for each in gathered})) > 1:
            raise ValueError(f"{name} is {' on some ranks and '.join(values)} on others: pass all the same")


def failures_of(reason: str, group: dist.ProcessGroup) -> str:
    """Return the reasons of at most four failed ranks, or an empty text; collective. A rank without failure passes
    ""."""
    failed = [f"rank {rank}: {each}" for rank, each in enumerate(gather_json(reason, group)) if each]
    return "; ".join(failed[:4])


def odd_ranks(values: Sequence[Hashable], groups: Sequence[Any] = ()) -> tuple[tuple[int, ...], str]:
    """Return the ranks whose values differ from the majority's of their group, and a text that names them; empty for
    none. Without ``groups`` all ranks are one.

    Without a majority that is all of them.

    Example: odd_ranks("aab") == ((2,), "rank 2 differ from the other ranks")
    """
    odd: tuple[int, ...] = ()
    majority, groups = True, groups or [0] * len(values)
    for group in sorted(set(groups)):
        ranks = [rank for rank, its in enumerate(groups) if its == group]
        (most, count), *others = Counter(values[rank] for rank in ranks).most_common()
        if others:
            has_majority = count > others[0][1]
            odd += tuple(rank for rank in ranks if not has_majority or values[rank] != most)
            majority = majority and has_majority
    if not odd:
        return (), ""
    odd = tuple(sorted(odd))
    names = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd[:8]))}{' ...' if len(odd) > 8 else ''}"
    return odd, f"{names} differ from {'the other ranks' if majority else 'each other'}"


def describe(error: BaseException) -> str:
    """Return an error as one line for people, with the system's name for it, such as ENOSPC."""
    name = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
    return (str(error) if isinstance(error, ThinwireError) else f"{name}: {error}").splitlines()[0]


def on_all(group: dist.ProcessGroup, do: Callable[[], T], kind: type[Exception] = ThinwireError) -> T:
    """Do something on all ranks and return its result; collective. If it fails on one, raises ``kind`` on all, with
    the reasons."""
    done: list[T] = []
    reason = ""
    try:
        done.append(do())
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        reason = (str(error) if isinstance(error, (ThinwireError, ValueError)) else describe(error)) or repr(error)
    if failed := failures_of(reason, group):
        raise kind(failed)
    return done[0]


def gather(values: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Gather the numbers of each rank, in rank order; collective. All are below 2**53."""
    gathered = agree.gather_numbers(Exchange(group), "checkpoint votes", values)
    return [list(map(int, numbers)) for numbers in gathered]
