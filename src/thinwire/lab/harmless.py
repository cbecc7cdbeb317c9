"""What a script or a job does not do while it is measured: it keeps no checkpoints of thinwire, and joins no other run.

Its parameters drift apart, or are trained by a way on trial. Saved as its run's newest version, they would be what the
run goes on from.
"""

import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any, Self
from unittest import mock

from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.errors import ThinwireError
from thinwire.gradients.module import is_dtensor


@contextmanager
def harmless() -> Iterator[None]:
    """Have Checkpointers, and DCP's writers and readers of hosts' memory, do nothing, and refuse ranks of other jobs.
    Handlers that a script has for signals of its end are not installed.

    The back end "thinwire" codes nothing: it is Gloo and NCCL, with which ways are compared.
    It holds for all that have a `Checkpointer` inside, such as the callbacks of trainers.
    """
    from thinwire import backend
    from thinwire.checkpoint.checkpointer import Checkpointer
    from thinwire.checkpoint.dcp.memory import MemoryReader, MemoryWriter
    from thinwire.outer.members import Members

    prepare = Members.prepare

    def prepare_own(members: Members, *args: Any, **settings: Any) -> None:
        if members._is_new:
            raise ValueError("Members meet other jobs, which a measurement must not join: pass a process group")
        prepare(members, *args, **settings)

    with ExitStack() as undo:
        for kind, stand_in in ((Checkpointer, _NoCheckpointer), (MemoryWriter, _NoWriter), (MemoryReader, _NoReader)):
            for name, value in vars(stand_in).items():
                if callable(value) or name in ("step", "steps"):
                    undo.enter_context(mock.patch.object(kind, name, value))
        undo.enter_context(mock.patch.object(Members, "prepare", prepare_own))
        plain = lambda made, settings: backend.ThinwireGroup(made, backend.Options(dense="native"))  # noqa: E731
        undo.enter_context(mock.patch.object(backend, "create", plain))
        undo.enter_context(mock.patch.object(backend.ThinwireGroup, "_scale", _nothing))  # of sparse sums too
        undo.enter_context(mock.patch.object(signal, "signal", _set_signal))
        yield


_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""By these a terminal or a scheduler says that a job ends, and scripts save then: Ctrl-C reaches all ranks."""
_install = signal.signal


def _set_signal(number: int, handler: Any) -> Any:
    return signal.getsignal(number) if number in _ENDS else _install(number, handler)


def _nothing(self: object, *args: object, **options: object) -> None: ...


class _NoCheckpointer:
    """What a `Checkpointer` does meanwhile."""

    steps = 0
    __init__ = restore = persist_now = close = _nothing
    __repr__ = lambda self: "<Checkpointer of a script that is measured: it keeps nothing>"  # noqa: E731

    def step(self) -> None:
        self.steps += 1

    def flush(self, *args: object) -> bool:
        return True

    def records(self) -> list[Any]:
        return []

    def stats(self) -> dict[str, float]:
        return defaultdict(float)


class _NoWriter:
    """What a `MemoryWriter` does meanwhile."""

    __init__ = close = reset = _nothing

    def write_data(self, *args: object) -> Future[list[Any]]:
        done: Future[list[Any]] = Future()
        done.set_result([])
        return done


class _NoReader:
    """What a `MemoryReader` does meanwhile: as before the first checkpoint of a run."""

    __init__ = close = _nothing
    step = None

    def read_metadata(self, *args: object, **options: object) -> None:
        raise ThinwireError("no checkpoint is read while a script is measured")


_IN_FSDP1 = "_fsdp_flattened"
"""What FSDP1 sets on parameters that it shards. Nothing public says so: with ``use_orig_params`` they are views."""


def why_not_measured(parameters: Iterable[Tensor]) -> str:
    """Return what a model is that is not measured, because no DDP has these parameters of it, and what to do."""
    parameters = list(parameters)
    if any(getattr(parameter, _IN_FSDP1, False) for parameter in parameters):
        return (
            "a FullyShardedDataParallel, whose synchronization is not measured here, and which `thinwire.attach` does"
            " not take: shard the model with torch's `fully_shard`, or compare the steps of the script with"
            ' init_process_group("thinwire") and without'
        )
    if any(map(is_dtensor, parameters)):
        return (
            "a sharded model, whose synchronization is not measured here; `thinwire.attach(model)` works with"
            " fully_shard: compare the steps of the script with it and without"
        )
    return (
        "a model without DistributedDataParallel, so there is no synchronization to measure: for this, wrap it in"
        " torch.nn.parallel.DistributedDataParallel"
    )


@contextmanager
def without_attach(on_call: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Make ``thinwire.attach`` and ``thinwire.outer.attach`` do nothing but call a function; their results do nothing.

    Raises:
        ValueError: in the script, if it attaches to a model without DDP: there is nothing to compare with then.
    """

    def do_nothing(model: nn.Module, *args: object, **kwargs: object) -> _NotAttached:
        wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        if not wrapped:
            raise ValueError(f"this line attaches {why_not_measured(model.parameters())}")
        on_call()
        return _NotAttached(wrapped[0])

    modules = (thinwire, import_module("thinwire.attach"), import_module("thinwire.outer.attachment"))
    with ExitStack() as undo:
        for module in modules:  # names of public functions may have been resolved before
            undo.enter_context(mock.patch.object(module, "attach", do_nothing))
        yield


class _NotAttached:
    """What a script has in place of its `thinwire.Synchronizer` or `thinwire.outer.OuterLoop`."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def stats(self) -> dict[str, float]:
        return defaultdict(float)

    def table(self) -> list[dict[str, Any]]:
        return []

    def no_sync(self) -> AbstractContextManager[None]:
        return self._model.no_sync()

    def one_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    global_parameters = one_sync

    def gathered(self) -> Self:
        return self

    def state_dict(self) -> dict[str, Any]:
        return {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **options: None
