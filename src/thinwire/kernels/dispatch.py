"""Dispatch of kernels to one of their twins, and compilation of the twins, once a machine.

On the CPU the twins are the plain torch reference and the one that numba compiles. The compiled one runs if numba is
installed, it supports the input (tensors on the CPU, contiguous, aligned, of a dtype that numba has), and the work is
large enough that it is faster: below, the call alone, 1 us an argument, costs more than the reference.
``THINWIRE_KERNELS=reference`` or ``=numba`` forces one for every size; what the compiled one does not support goes to
the reference even then. Twins give equal bits, so ranks may differ in this, and a rank may change from one to the
other. CUDA tensors go to the Triton twin, unless ``reference`` is forced, Triton is missing or the GPU is too old for
it; then to the reference on the GPU, codes through the host.

Kernels are compiled once a machine, by one process in the background; until one is ready, its reference runs. Forced,
it is compiled at the first call. numba needs 33 to 78 s of a processor for all kernels and holds the GIL. When each
rank did that in its first backward pass, the ranks of a host all compiled the same, on the cores that train: for
minutes. With the machine code lies a list of the kernels whose code is complete. Locks say who compiles what: one for
the process in the background, and one for each kernel, so that processes which wait for all kernels share the work.
They save work only; code of two processes cannot be mixed up (`thinwire.kernels.jit.MachineCode`). A lock ends with its
process, so another one takes over from one that was killed.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from thinwire.kernels.jit import code_directory, release_lock, remove_old, take_lock
from thinwire.kernels.samples import Sample, once
from thinwire.observe.step import Name, ranged

LOOK_SECONDS = 0.2
COMPILE = "import sys; from thinwire.kernels.warm import compile_alone; compile_alone(sys.argv[1], sys.argv[2:])"
# In the background a little nicer than ranks, since these are faster once it is done: by 5 in 86 s, by 2 in 57 s.
_COMMAND = f"import os; os.nice(2); {COMPILE}"

_logger = logging.getLogger("thinwire")


class Once:
    """The compilation of the kernels ``names``, in this order, shared by all processes that use a ``directory``."""

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.directory = directory
        self._list = directory / "compiled"
        self._lock = directory / "lock"
        self._compiled: frozenset[str] = frozenset()
        self._child: subprocess.Popen[bytes] | None = None
        self._looking = threading.Lock()
        self._look_again = 0.0

    def has(self, name: str) -> bool:
        """Return whether a kernel is compiled; if not, look now and then, and start to compile if no process does."""
        if name not in self._compiled and time.monotonic() >= self._look_again:
            self.start()
        return name in self._compiled

    def start(self) -> None:
        """Compile in the background, unless all kernels are compiled or another process compiles."""
        if self._looking.acquire(blocking=False):
            try:
                self._look()
            except OSError as error:
                self._give_up(str(error))
            finally:
                self._looking.release()

    def compiled(self) -> list[str]:
        """Return the names of those that are compiled."""
        self._compiled |= self._read()
        return [name for name in self.names if name in self._compiled]

    def is_complete(self) -> bool:
        return len(self.compiled()) == len(self.names)

    def is_busy(self) -> bool:
        """Return whether a process compiles right now."""
        if self.is_complete():
            return False
        try:
            with _locked(self._lock) as is_free:
                return not is_free
        except OSError:
            return False

    def compile_here(self, compile_kernel: Callable[[str], bool], show: Callable[[int], None]) -> None:
        """Compile each kernel that no other process compiles, and wait for those that one does.

        Args:
            compile_kernel: compiles a kernel, and returns whether its machine code was kept.
            show: called with the number of compiled kernels now and then.
        """
        with _locked(self._lock, exclusive=False):  # if it is not to be had, a process in the background is busy
            remove_old(self.directory)
            mine: set[str] = set()
            while missing := [name for name in self.names if name not in mine.union(self._read())]:
                before = len(mine)
                for name in missing:
                    show(len(mine.union(self._read())))
                    with _locked(self.directory / f"{name}.lock") as is_mine:
                        if is_mine and name not in self._read():
                            mine.add(name)
                            if compile_kernel(name):
                                self._add(name)
                if len(mine) == before:
                    time.sleep(LOOK_SECONDS)

    def _add(self, name: str) -> None:
        with open(self._list, "a") as names:
            names.write(f"\n{name}\n")  # the first end is that of a line which a killed process left unfinished

    def _look(self) -> None:
        if self.is_complete():
            if self._child is not None:
                _logger.info("all kernels are compiled")
        elif self._child is None:
            self._start_child()
        elif self._child.poll() is not None:
            self._give_up(f"the process that compiled them ended with {self._child.returncode}, see {self._lock}")
        self._look_again = time.monotonic() + LOOK_SECONDS

    def _start_child(self) -> None:
        """Start a process that compiles, unless another one does; its stderr is the lock file, so it holds the lock."""
        lock = take_lock(self._lock)
        if lock is None:
            return
        with lock:
            lock.truncate(0)
            self._child = python(_COMMAND, str(self.directory), *self.names, stderr=lock)
        threading.Thread(target=self._child.wait, name="thinwire-compiles", daemon=True).start()
        _logger.info(
            "process %d compiles %d kernels, once a machine; until one is there, plain torch does its work",
            self._child.pid,
            len(self.names),
        )

    def _give_up(self, reason: str) -> None:
        _logger.warning("kernels are compiled by each process at their first calls: %s", reason)
        self._compiled = frozenset(self.names)

    def _read(self) -> frozenset[str]:
        """Return the kernels in the list; an unfinished last line does not count."""
        try:
            text = self._list.read_text()
        except OSError:
            return frozenset()
        return frozenset(self.names).intersection(text[: text.rfind("\n") + 1].splitlines())


def python(command: str, *arguments: str, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process of the same Python, with the same path, that runs a command; it reads and prints nothing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    nothing = subprocess.DEVNULL
    words = [sys.executable, "-P", "-c", command, *arguments]
    return subprocess.Popen(words, env=environment, stdin=nothing, stdout=nothing, stderr=stderr)


@contextmanager
def _locked(path: Path, exclusive: bool = True) -> Iterator[bool]:
    """Hold a lock, and yield whether it was to be had; a child that was forked meanwhile does not keep it."""
    lock = take_lock(path, exclusive)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            release_lock(lock)


def elements(tensor: Tensor, *others: object, **settings: object) -> int:
    return tensor.numel()


def elements_of(index: int) -> Callable[..., int]:
    """Return a function that counts the elements of the argument at an index."""
    return lambda *args, **kwargs: args[index].numel()


def indexable(*tensors: Tensor) -> bool:
    """Return whether numba can index the tensors as they are."""
    return all(tensor.device.type == "cpu" and tensor.is_contiguous() and _is_aligned(tensor) for tensor in tensors)


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % tensor.element_size() == 0


def nothing(*args: object, **settings: object) -> bool:
    """Return False, for kernels without a compiled twin."""
    return False


def are_ids(ids: Tensor, *settings: int, **named: int) -> bool:
    return ids.dtype == torch.int64 and ids.dim() == 1 and indexable(ids)


def are_bytes(buffer: Tensor, *sizes: int) -> bool:
    return buffer.dtype == torch.uint8 and indexable(buffer)


def is_matrix(dense: Tensor) -> bool:
    """Return whether numba can index the matrix, of any strides."""
    return dense.device.type == "cpu" and _is_aligned(dense)


def can_scatter(dense: Tensor, ids: Tensor, values: Tensor) -> bool:
    alike = dense.dtype == values.dtype and values.shape == (ids.numel(), *dense.shape[1:])
    return alike and are_ids(ids) and indexable(dense, values)


def can_sum_at(
    pieces: Iterable[tuple[Tensor, Tensor]], num_rows: int, width: int, dtype: torch.dtype, scale: float = 1.0
) -> bool:
    return dtype != torch.float16  # numba has none on a CPU


def are_floats(values: Tensor, *others: Tensor) -> bool:
    """Return whether numba can index the floats; at most 2^32, because random numbers are counted in 32 bits."""
    alike = values.dtype in (torch.float32, torch.float64) and values.dim() == 1 and values.numel() < 1 << 32
    return alike and indexable(values, *others)


def can_code(values: Tensor, *settings: object) -> bool:
    return are_floats(values)


def can_add(codes: Tensor, steps: Tensor, *others: Any) -> bool:
    """Return whether numba can index the codes, their steps and, last of the arguments, the sum to add them to."""
    return are_floats(others[-1], codes, steps)


def have_magnitudes(values: Tensor, *settings: float | None, **named: float | None) -> bool:
    return values.dtype in (torch.float32, torch.float64) and values.dim() == 1 and indexable(values)


P = ParamSpec("P")
R = TypeVar("R")

MODES = ("auto", "reference", "numba")
OLDEST_GPU = (7, 0)  # the compute capability that Triton's own requirements name
_BUILT_FOR_GPU = torch.backends.cuda.is_built()
_OF_CODES = ("thinwire.kernels.reference.codes", "thinwire.kernels.reference.floats")
_GPU_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8}

_forced: str | None = None
_uses: dict[object, str] = {}  # modes of the active `using` contexts, in the order in which they began
_uses_lock = threading.Lock()
_unready_calls = 0


def mode() -> str:
    """Return the mode in force, one of `MODES`; raise ValueError if ``THINWIRE_KERNELS`` has another value."""
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
    """Force a mode for all threads, for tests and benchmarks; of overlapping contexts the last one counts."""
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
    """A row of `thinwire.kernels.registry`: the twins of a kernel, the rule that picks one, and sample calls.

    Args:
        reference: the twin in plain torch; its name is that of the kernel.
        makes: functions that make sample calls, from what ``over`` yields.
        cpu: the module of the twin that numba compiles, which has the same name; imported at its first call.
        gpu: the module of the Triton twin, likewise.
        size: returns the amount of work of a call, from its arguments.
        from_size: smallest size at which the twin on the CPU is faster.
        knows: returns whether the twin on the CPU supports the arguments.
        equal_bits: whether twins give equal bits; else they are sums that agree to 1e-12.
        over: yields inputs of all types that the compiled twins support.
    """

    reference: Callable[..., Any]
    makes: tuple[Callable[..., Sample], ...]
    cpu: str | None = None
    gpu: str | None = None
    size: Callable[..., int] = elements
    from_size: int = 0
    knows: Callable[..., bool] = nothing
    equal_bits: bool = True
    over: Callable[[], Iterator[tuple[Tensor, ...]]] = once

    def samples(self) -> Iterator[Sample]:
        """Yield sample calls, new ones each time: some kernels write to their arguments."""
        return (make(*inputs) for make in self.makes for inputs in self.over())

    @property
    def name(self) -> str:
        return self.reference.__name__

    def on_cpu(self) -> Callable[..., Any]:
        """Return the twin that numba compiles."""
        return getattr(_module(self.cpu), self.reference.__name__)

    def on_gpu(self) -> Callable[..., Any]:
        """Return the Triton twin."""
        return getattr(_module(self.gpu), self.reference.__name__)


_module = cache(import_module)  # import_module looks up its argument each time, which costs 0.3 us
KERNELS: dict[str, Kernel] = {}
"""All rows of the registry, by name, in its order."""


_wanted: frozenset[str] | None = None


def only(names: Iterable[str] | None) -> None:
    """Compile only the named kernels from now on, in this process: of the others the reference runs. None is all.

    For trainings whose time is measured: a process in the background would compile what they never call.
    """
    global _wanted
    _wanted = None if names is None else frozenset(names)
    compilation.cache_clear()


def compiled_kernels() -> list[Kernel]:
    """Return the kernels with a twin that numba compiles, of those that `only` named."""
    return [kernel for kernel in KERNELS.values() if kernel.cpu and (_wanted is None or kernel.name in _wanted)]


def register(
    reference: Callable[P, R], *makes: Callable[..., Sample], profiled_as: Name | None = None, **rules: Any
) -> Callable[P, R]:
    """Add a row, and return a function that calls the right twin; ``rules`` are the other fields of `Kernel`.

    ``profiled_as`` is the name of its range in `torch.profiler`, if any.
    """
    kernel = Kernel(reference, makes, **rules)
    KERNELS[kernel.name] = kernel
    call = _dispatched(reference, kernel)
    return call if profiled_as is None else ranged(profiled_as)(call)


def is_compiling() -> bool:
    """Return whether a process of this machine compiles kernels for this one, on processors that all share."""
    once = compilation() if mode() == "auto" else None
    return once is not None and once.is_busy()


def unready_calls() -> int:
    """Return the number of calls that were slower than later ones: their kernel was not compiled or not loaded yet."""
    return _unready_calls


def _count_unready() -> None:
    global _unready_calls
    _unready_calls += 1


def _dispatched(reference: Callable[P, R], kernel: Kernel) -> Callable[P, R]:
    """Return a function that calls the compiled twin for large enough, supported inputs, else the reference.

    A step with small embedding tables makes dozens of calls, so small inputs are not checked any further.
    """
    size, from_size, knows, name = kernel.size, kernel.from_size, kernel.knows, kernel.name
    is_loaded = False
    # when a kernel is compiled depends on the clock
    bits_by_clock = bool if kernel.equal_bits else torch.are_deterministic_algorithms_enabled

    @wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal is_loaded
        if _BUILT_FOR_GPU and torch.cuda.is_initialized():
            seen, args = _look_into(args)  # pyrefly: ignore [bad-assignment]
            if any(tensor.is_cuda for tensor in _tensors((*seen, *kwargs.values()))):
                return _on_gpu(kernel, runs_on_gpu(*seen, *kwargs.values()), call)(*args, **kwargs)
        chosen = _forced or _environment_mode()
        is_left = chosen == "auto" and (size(*args, **kwargs) < from_size or bits_by_clock())
        if is_left or chosen == "reference" or not knows(*args, **kwargs):
            return reference(*args, **kwargs)
        if has_numba() and not is_loaded:
            _count_unready()
        if has_numba() and (chosen == "numba" or is_compiled(name)):
            is_loaded = True
            return kernel.on_cpu()(*args, **kwargs)
        if chosen == "numba" and not has_numba():
            raise ValueError("THINWIRE_KERNELS=numba, but numba cannot be imported: pip install '.[cpu]' in a checkout")
        return reference(*args, **kwargs)

    return call


@cache
def has_numba() -> bool:
    """Import numba and return whether that worked."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        _logger.info("kernels run in plain torch: %s; pip install '.[cpu]' in a checkout makes them faster", error)
        return False
    return True


@cache
def compilation() -> Once | None:
    """Return the compilation of all kernels; None if numba is missing, does not compile, or has no cache."""
    if not has_numba():
        return None
    directory = code_directory()
    return None if directory is None else Once(directory, [kernel.name for kernel in compiled_kernels()])


def is_compiled(name: str) -> bool:
    """Return whether a kernel is compiled, or will be at its first call; if it is not, it is from now on."""
    once = compilation()
    return once is None or once.has(name)


def runs_on_gpu(*inputs: object) -> bool:
    """Return whether Triton kernels can run, are allowed to, and support the dtypes of all inputs."""
    tensors = list(_tensors(inputs))
    alike = all(tensor.dtype in _GPU_DTYPES for tensor in tensors)
    return (
        mode() != "reference"
        and alike
        and all(map(_has_triton, {tensor.device for tensor in tensors if tensor.is_cuda}))
    )


@cache
def _has_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels run on a CUDA device, by running one; a log line says why not.

    Triton may be there and yet fail at every launch, as in an image without a C compiler, with which it builds its
    driver's stub. The reference runs then.
    """
    capability = torch.cuda.get_device_capability(device)
    try:
        if capability < OLDEST_GPU:
            raise RuntimeError(f"Triton needs compute capability 7.0, not {capability[0]}.{capability[1]}")
        result = _module("thinwire.kernels.gpu.find").nonzero_rows(torch.tensor([[0], [1], [0], [2]], device=device))
        if result.tolist() != [1, 3]:
            raise RuntimeError(f"a kernel found {result.tolist()}, not [1, 3]")
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        _logger.warning("kernels on %s run in plain torch, which is slower: %s", device, reason)
        return False
    return True


def _on_gpu(kernel: Kernel, runs: bool, on_host: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function for CUDA tensors: the Triton twin, if there is one and it ``runs``, else the reference.

    Of codes, whose references are in numpy, that is ``on_host``, which takes tensors of the host.
    """
    if kernel.gpu and runs:
        return kernel.on_gpu()
    if kernel.reference.__module__ in _OF_CODES:
        return partial(_through_host, on_host)
    return kernel.reference


def _through_host(on_host: Callable[..., Any], buffer: Tensor, *others: Any) -> Any:
    """Call a function on the host; it writes to tensors that are not the first."""
    hosts = [other.cpu() if isinstance(other, Tensor) else other for other in others]
    result = on_host(buffer.cpu(), *hosts)
    for other, host in zip(others, hosts, strict=True):
        if isinstance(other, Tensor):
            other.copy_(host)
    return result.to(buffer.device) if isinstance(result, Tensor) else result


def _look_into(args: Iterable[object]) -> tuple[list[object], list[object]]:
    """Return the visible arguments, with the first piece for an iterator of pieces, and the arguments to pass on."""
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


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also those in lists of pieces."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
