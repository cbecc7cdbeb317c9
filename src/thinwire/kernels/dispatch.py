"""Which twin of a kernel runs: the plain torch reference, or the one that numba compiles. `registry` has the rows.

The compiled one is taken where numba is installed, the input is one that it knows (tensors on the CPU, contiguous,
aligned, of a dtype that numba has), and the work is large enough that it is faster: below, the call alone, 1 us an
argument, costs more than the reference needs. ``THINWIRE_KERNELS=reference`` or ``=numba`` forces one for every size;
what the compiled one does not know goes to the reference even then. Twins give equal bits, so ranks may differ in this,
and a rank may change from one to the other: on a machine that is new to them, kernels are compiled in the background
(`thinwire.kernels.once`), and until one is there its reference runs. Forced, it is compiled at the first call.

CUDA tensors go to the Triton twin, unless ``reference`` is forced, Triton is missing or the GPU is too old for it; then
to the reference on the GPU, codes through the host.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from importlib import import_module
from itertools import chain, islice
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from thinwire.kernels import inputs, reference_codes
from thinwire.kernels.once import Once, shared
from thinwire.kernels.samples import Samples
from thinwire.ranges import Name, ranged

P = ParamSpec("P")
R = TypeVar("R")

MODES = ("auto", "reference", "numba")
OLDEST_GPU = (7, 0)  # the compute capability that Triton's own requirements name
_BUILT_FOR_GPU = torch.backends.cuda.is_built()
_GPU_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8}

_logger = logging.getLogger("thinwire")
_forced: str | None = None
_uses: dict[object, str] = {}  # of `using`, in the order in which they began
_uses_lock = threading.Lock()
_unready_calls = 0


def mode() -> str:
    """One of `MODES`, from ``THINWIRE_KERNELS``. Raises ValueError for another value."""
    return _forced or _environment_mode()


@cache
def _environment_mode() -> str:
    return _known_mode(os.environ.get("THINWIRE_KERNELS", "auto"))


def _known_mode(chosen: str) -> str:
    if chosen not in MODES:
        raise ValueError(f"THINWIRE_KERNELS is {chosen!r}: use one of {', '.join(MODES)}")
    return chosen


@contextmanager
def using(chosen: str) -> Iterator[None]:
    """Force a mode for all threads, for tests and benchmarks; of those that overlap the last one holds."""
    global _forced
    use = object()
    with _uses_lock:
        _uses[use] = _forced = _known_mode(chosen)
    try:
        yield
    finally:
        with _uses_lock:
            del _uses[use]
            _forced = next(reversed(_uses.values()), None)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A row of `thinwire.kernels.registry`: the twins of a kernel, which of them runs, and calls to try them with.

    Args:
        reference: the twin in plain torch; its name is that of the kernel.
        cpu: the module of the twin that numba compiles, which has the same name; imported when it is first called.
        gpu: the same of the Triton twin.
        size: how much work a call is, from its arguments.
        from_size: from which size on the twin on the CPU is faster.
        knows: whether the twin on the CPU takes these arguments.
        equal_bits: whether twins give equal bits; else they are sums that agree to 1e-12.
        samples: calls of all types that the compiled twins take.
    """

    reference: Callable[..., Any]
    cpu: str | None
    gpu: str | None
    size: Callable[..., int]
    from_size: int
    knows: Callable[..., bool]
    equal_bits: bool
    samples: Samples

    @property
    def name(self) -> str:
        return self.reference.__name__

    def on_cpu(self) -> Callable[..., Any]:
        """The twin that numba compiles."""
        return getattr(_module(self.cpu), self.reference.__name__)

    def on_gpu(self) -> Callable[..., Any]:
        """The Triton twin."""
        return getattr(_module(self.gpu), self.reference.__name__)


_module = cache(import_module)  # import_module looks for its argument each time, which takes 0.3 us
KERNELS: dict[str, Kernel] = {}
"""All rows of the registry, by name, in its order."""


def compiled_kernels() -> list[Kernel]:
    """Those that have a twin that numba compiles."""
    return [kernel for kernel in KERNELS.values() if kernel.cpu]


def register(
    reference: Callable[P, R],
    *,
    cpu: str | None = None,
    gpu: str | None = None,
    size: Callable[..., int] = inputs.elements,
    from_size: int = 0,
    knows: Callable[..., bool] = inputs.nothing,
    equal_bits: bool = True,
    profiled_as: Name | None = None,
    samples: Samples,
) -> Callable[P, R]:
    """Add a row, see `Kernel`, and return what calls the right twin, as a range of that name in `torch.profiler`."""
    kernel = Kernel(reference, cpu, gpu, size, from_size, knows, equal_bits, samples)
    KERNELS[kernel.name] = kernel
    call = _dispatched(reference, kernel)
    return call if profiled_as is None else ranged(profiled_as)(call)


def is_compiling() -> bool:
    """Whether a process of this machine compiles kernels for this one, on processors that all share."""
    once = compilation() if mode() == "auto" else None
    return once is not None and once.is_busy()


def unready_calls() -> int:
    """How many calls so far took longer than the next will: the kernel was not compiled yet, or was loaded first."""
    return _unready_calls


def _count_unready() -> None:
    global _unready_calls
    _unready_calls += 1


def _dispatched(reference: Callable[P, R], kernel: Kernel) -> Callable[P, R]:
    """The compiled twin for inputs that are large enough and that it knows, else the reference.

    A step with small tables makes dozens of calls, so what is small is not looked at any further.
    """
    size, from_size, knows, name = kernel.size, kernel.from_size, kernel.knows, kernel.name
    is_loaded = False

    @wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal is_loaded
        if _BUILT_FOR_GPU and torch.cuda.is_initialized():
            seen, args = _look_into(args)  # pyrefly: ignore [bad-assignment]
            if _any_on_gpu((*seen, *kwargs.values())):
                runs = runs_on_gpu(*seen, *kwargs.values())
                return _on_gpu(kernel, runs)(*args, **kwargs)
        chosen = _forced or _environment_mode()
        is_small = chosen == "auto" and size(*args, **kwargs) < from_size
        if is_small or chosen == "reference" or not knows(*args, **kwargs):
            return reference(*args, **kwargs)
        if has_numba() and not is_loaded:
            _count_unready()
        if has_numba() and (chosen == "numba" or _is_compiled(name)):
            is_loaded = True
            return kernel.on_cpu()(*args, **kwargs)
        if chosen == "numba" and not has_numba():
            raise ValueError("THINWIRE_KERNELS=numba, but numba cannot be imported: pip install 'thinwire[cpu]'")
        return reference(*args, **kwargs)

    return call


@cache
def has_numba() -> bool:
    """Whether numba can be imported, which this does."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        _logger.info("kernels run in plain torch: %s; pip install 'thinwire[cpu]' makes them faster", error)
        return False
    return True


@cache
def compilation() -> Once | None:
    """That of all kernels; None where there is no numba, or it does not compile, or cannot keep what it compiles."""
    if not has_numba():
        return None
    from thinwire.kernels.cpu_bits import count_ones

    return shared(count_ones, {kernel.name for kernel in compiled_kernels()})


def _is_compiled(name: str) -> bool:
    once = compilation()
    return once is None or once.has(name)


def runs_on_gpu(*inputs: object) -> bool:
    """Whether Triton kernels can run, may, and know the dtypes of all inputs."""
    return mode() != "reference" and all(tensor.dtype in _GPU_DTYPES for tensor in _tensors(inputs)) and _has_triton()


@cache
def _has_triton() -> bool:
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_GPU:
        _logger.info("kernels on the GPU run in plain torch: Triton needs compute capability 7.0, not %s", capability)
        return False
    try:
        import triton  # noqa: F401  # pyrefly: ignore [missing-import]
    except ImportError as error:
        _logger.info("kernels on the GPU run in plain torch: %s; Triton comes with torch for CUDA on Linux", error)
        return False
    return True


def _on_gpu(kernel: Kernel, runs: bool) -> Callable[..., Any]:
    """What runs for CUDA tensors: the Triton twin, if there is one and it ``runs``, else the reference."""
    if kernel.gpu and runs:
        return kernel.on_gpu()
    if kernel.reference.__module__ == reference_codes.__name__:
        return partial(_through_host, kernel.reference)
    return kernel.reference


def _through_host(reference: Callable[..., Any], buffer: Tensor, *sizes: int) -> Any:
    """For the codes, of which the reference is in numpy."""
    result = reference(buffer.cpu(), *sizes)
    return result.to(buffer.device) if isinstance(result, Tensor) else result


def _look_into(args: Iterable[object]) -> tuple[list[object], list[object]]:
    """What can be seen of arguments, and the arguments: of an iterator of pieces the first says where they are."""
    seen, kept = [], []
    for value in args:
        if isinstance(value, Iterator):
            first = tuple(islice(value, 1))
            seen.append(first)
            kept.append(chain(first, value))
        else:
            seen.append(value)
            kept.append(value)
    return seen, kept


def _any_on_gpu(values: Iterable[object]) -> bool:
    return any(tensor.is_cuda for tensor in _tensors(values))


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Those among arguments, also in lists of pieces."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
