"""Launcher that runs a function on N ranks, each a process of its own, and returns the result of every rank.

    def work(context: RankContext, scale: float) -> float:
        total = torch.tensor([scale * context.rank])
        dist.all_reduce(total)
        return total.item()

    outcomes = run_ranks(work, 2.0, world_size=4)

The processes are forked from a server that has torch imported and kernels loaded: 8 ranks with their process group
start and end in 0.4 s. Messages through the pipes between a rank and its parent are pickled by value; they never leave
the machine.
"""

import contextlib
import multiprocessing
import os
import pickle
import random
import signal
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

from thinwire.errors import ThinwireError
from thinwire.lab.testbed.network import EmulatedNetwork, in_namespace
from thinwire.lab.testbed.rank import RankContext, RankSetup, rank_main
from thinwire.lab.testbed.supervise import Outcome, RankProcess, describe, supervise

_KERNELS = "thinwire.lab.testbed.warmed"
_preloaded = ["torch", "torch.distributed", "thinwire", _KERNELS]
_PORTS = range(20_000, 32_768)
__all__ = ["Outcome", "RankContext", "RanksFailed", "run_ranks"]


class RanksFailed(ThinwireError):
    """Raised when ranks failed. The text has the root cause first; `outcomes` has all ranks in order."""

    def __init__(self, message: str, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int | None,
    ranks_per_host: int | None = None,
    network: EmulatedNetwork | None = None,
    timeout_seconds: float = 120.0,
    check: bool = True,
    init_process_group: bool = True,
    on_message: Callable[[int, Any], None] | None = None,
    kernels: Iterable[str] | None = None,
) -> list[Outcome]:
    """Call `function(context, *args)` on `world_size` ranks and return their outcomes in rank order.

    Every rank has one torch thread, the environment that torchrun would give it (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR ...) and, with `init_process_group`, a Gloo process group. With a `network`, consecutive blocks
    of `ranks_per_host` ranks (default: as few as suffice) live on its hosts. `on_message(rank, message)`
    gets the messages that the ranks pass to `context.send`. `function` and `args` must be picklable: define the
    function at the top of a module. `kernels` are those that the ranks call, by default all: they are compiled before
    the ranks start, and no other one is while they run.

    With `check`, the first failure gives the other ranks 5 s to report theirs, and RanksFailed is raised.
    Without, the ranks run to their end or to the timeout, and failures are read from the outcomes. At the
    timeout all ranks are killed, and the errors of those that were still running hold their Python stacks.
    However this function is left, no process of a rank stays behind.

    Without a `world_size` there is one process, the rank of a job that torchrun started this one as.
    """
    from thinwire.lab.testbed.kernels import compile_ahead  # imports torch

    payload = _pickle_call(function, args)
    kernels = None if kernels is None else tuple(kernels)
    compile_ahead(kernels)
    with tempfile.TemporaryDirectory(prefix="thinwire-ranks-") as directory, contextlib.ExitStack() as cleanup:
        ranks = []
        common = {"directory": directory, "timeout_seconds": timeout_seconds, "kernels": kernels}
        setup = partial(RankSetup, **common, init_process_group=init_process_group)
        setups = [_as_started(setup)] if world_size is None else _plan_ranks(setup, world_size, ranks_per_host, network)
        for each in setups:
            ranks.append(_start(each, payload))
            cleanup.callback(ranks[-1].close)
        supervise(ranks, directory, timeout_seconds, check, on_message or (lambda rank, message: None))
        outcomes = [rank.outcome() for rank in ranks]
        if check and any(rank.failed for rank in ranks):
            raise RanksFailed(describe(ranks), outcomes)
        return outcomes


def values_of_ranks(function: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
    """Call a function as `run_ranks` does, with its settings, and return the values of the ranks in rank order."""
    return [outcome.value for outcome in run_ranks(function, *args, **settings)]


def preload(module: str) -> None:
    """Have the server from which ranks are forked import a module too; call it before the first `run_ranks`.

    The constructor of DDP imports ``torch._dynamo``, for example: 1.2 s in every rank otherwise.
    """
    if module not in _preloaded:
        _preloaded.insert(-1, module)  # kernels are last


def leave_kernels_to_ranks() -> None:
    """Have ranks import numba and load kernels themselves, as those of a user do; call it before `run_ranks`."""
    _preloaded.remove(_KERNELS)


def _plan_ranks(
    setup: Callable[..., RankSetup], world_size: int, ranks_per_host: int | None, network: EmulatedNetwork | None
) -> list[RankSetup]:
    """One setup per rank; raises ValueError when the ranks do not fit on the hosts."""
    per_host = _ranks_per_host(world_size, ranks_per_host, 1 if network is None else network.hosts)
    shared = {
        "THINWIRE_ROUTE": "rows",  # from the first step on: short runs show what a training has once it is decided
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1" if network is None else network.address(0),
        "MASTER_PORT": str(free_port(network)),
        "GLOO_SOCKET_IFNAME": "lo" if network is None else network.interface,
    }
    return [
        setup(
            rank=rank,
            world_size=world_size,
            local_rank=rank % per_host,
            host=rank // per_host,
            environment={
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % per_host),
                "LOCAL_WORLD_SIZE": str(min(per_host, world_size - rank // per_host * per_host)),
            },
            namespace=None if network is None else network.namespace(rank // per_host),
        )
        for rank in range(world_size)
    ]


def _as_started(setup: Callable[..., RankSetup]) -> RankSetup:
    """The setup of the rank that torchrun started this process as."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
    rank, world_size, local_rank, host = (int(os.environ.get(name, "0")) for name in names)
    return setup(rank, world_size, local_rank, host, environment=dict(os.environ), namespace=None)


def _ranks_per_host(world_size: int, ranks_per_host: int | None, hosts: int) -> int:
    per_host = -(-world_size // hosts) if ranks_per_host is None else ranks_per_host
    if hosts > 1 and per_host * hosts < world_size:
        raise ValueError(f"{world_size} ranks do not fit on {hosts} hosts with {per_host} ranks each")
    return per_host


def free_port(network: EmulatedNetwork | None = None) -> int:
    """A port for user code that reads MASTER_PORT, free now where rank 0 runs; our own group needs none.

    It is below the ports that the system gives to connections: one of them would take it before rank 0 listens.
    """

    def bind() -> int:
        for port in random.SystemRandom().sample(_PORTS, 100):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("", port))
                return port
        raise OSError(f"100 ports from {_PORTS.start} to {_PORTS.stop} are taken")

    return bind() if network is None else in_namespace(network.namespace(0), bind)


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the ranks cannot be given {function!r} with its arguments: {error}. Define the function at the top "
            "of a module, and pass picklable arguments"
        ) from error


def _start(setup: RankSetup, payload: bytes) -> RankProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    ours, theirs = context.Pipe()
    with theirs, _interrupted_later():
        process = context.Process(target=rank_main, args=(setup, theirs, payload), name=f"rank {setup.rank}")
        try:
            process.start()
        except OSError as error:
            if "AF_UNIX" not in str(error):
                raise
            raise ValueError(f"no socket fits in {tempfile.gettempdir()}: set TMPDIR to a shorter path") from error
    return RankProcess(setup.rank, process, ours)


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Hold Ctrl-C back while a rank starts, for seconds if it is the first.

    Until the server has imported everything it would print a traceback, and so would a rank that is half described.
    The server inherits that the signal is held back, and its ranks ignore it.
    """
    resource_tracker.ensure_running()  # the server's start would call it, and it lets the signal through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
