"""Which twin of a kernel runs: the plain torch reference, or the one that numba compiles. docs/kernels.md has figures.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from itertools import chain, islice
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from thinwire.kernels import reference, reference_codes, reference_quantize, reference_select
from thinwire.kernels.once import Once, shared
from thinwire.ranges import ranged

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
    chosen = _forced or _environment_mode()
    if chosen not in MODES:
        raise ValueError(f"THINWIRE_KERNELS is {chosen!r}: use one of {', '.join(MODES)}")
    return chosen


@cache
def _environment_mode() -> str:
    return os.environ.get("THINWIRE_KERNELS", "auto")


@contextmanager
def using(chosen: str) -> Iterator[None]:
    """Force a mode for all threads, for tests and benchmarks; of those that overlap the last one holds."""
    global _forced
    use = object()
    with _uses_lock:
        _uses[use] = _forced = chosen
    try:
        yield
    finally:
        with _uses_lock:
            del _uses[use]
            _forced = next(reversed(_uses.values()), None)


def available() -> bool:
    """Whether numba can be imported, which this does."""
    return compiled_kernels() is not None


@cache
def compilation() -> Once | None:
    """That of all kernels; None where there is no numba, or it does not compile, or cannot keep what it compiles."""
    compiled = compiled_kernels()
    if compiled is None:
        return None
    from thinwire.kernels.cpu_bits import count_ones

    return shared(count_ones, set(compiled.__all__))


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


def _dispatched(
    twin: Callable[P, R], size: Callable[..., int], at_least: int, known: Callable[..., bool]
) -> Callable[P, R]:
    """The compiled twin of the same name for inputs of ``at_least`` so much ``size`` that it knows, else the reference.

    A step with small tables makes dozens of calls, so what is small is not looked at any further.
    """

    is_loaded = False

    @wraps(twin)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal is_loaded
        if _BUILT_FOR_GPU and torch.cuda.is_initialized() and _any_on_gpu((*args, *kwargs.values())):
            return _call_on_gpu(twin, *args, **kwargs)
        chosen = mode()
        is_small = chosen == "auto" and size(*args, **kwargs) < at_least
        if is_small or chosen == "reference" or not known(*args, **kwargs):
            return twin(*args, **kwargs)
        compiled = compiled_kernels()
        if compiled is not None and not is_loaded:
            _count_unready()
        if compiled is not None and (chosen == "numba" or _is_compiled(twin.__name__)):
            is_loaded = True
            return getattr(compiled, twin.__name__)(*args, **kwargs)
        if compiled is None and chosen == "numba":
            raise ValueError("THINWIRE_KERNELS=numba, but numba cannot be imported: pip install 'thinwire[cpu]'")
        return twin(*args, **kwargs)

    return call


def _is_compiled(name: str) -> bool:
    once = compilation()
    return once is None or once.has(name)


@cache
def compiled_kernels() -> ModuleType | None:
    """The module of compiled kernels; None where there is no numba."""
    try:
        from thinwire.kernels import cpu
    except ImportError as error:
        _logger.info("kernels run in plain torch: %s; pip install 'thinwire[cpu]' makes them faster", error)
        return None
    return cpu


def gpu_kernels(*inputs: object) -> ModuleType | None:
    """The module of Triton kernels; None where they cannot run, may not, or do not know the dtype of an input."""
    if mode() == "reference" or not all(tensor.dtype in _GPU_DTYPES for tensor in _tensors(inputs)):
        return None
    return _triton()


@cache
def _triton() -> ModuleType | None:
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_GPU:
        _logger.info("kernels on the GPU run in plain torch: Triton needs compute capability 7.0, not %s", capability)
        return None
    try:
        from thinwire.kernels import gpu
    except ImportError as error:
        _logger.info("kernels on the GPU run in plain torch: %s; Triton comes with torch for CUDA on Linux", error)
        return None
    return gpu


def _call_on_gpu(twin: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    compiled = gpu_kernels(*args, *kwargs.values())
    if hasattr(compiled, twin.__name__):
        return getattr(compiled, twin.__name__)(*args, **kwargs)
    if twin.__module__ == reference_codes.__name__:
        return _through_host(twin, *args, **kwargs)  # pyrefly: ignore [bad-argument-type]
    return twin(*args, **kwargs)


def _through_host(twin: Callable[..., R], buffer: Tensor, *sizes: int) -> R:
    """For the codes, of which the reference is in numpy."""
    result = twin(buffer.cpu(), *sizes)
    return result.to(buffer.device) if isinstance(result, Tensor) else result  # pyrefly: ignore [bad-return]


def _any_on_gpu(values: Iterable[object]) -> bool:
    return any(tensor.is_cuda for tensor in _tensors(values))


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Those among arguments, also in lists of pieces; not in iterators, of which looking would take."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _indexable(*tensors: Tensor) -> bool:
    """Whether numba can index them as they are."""
    return all(tensor.device.type == "cpu" and tensor.is_contiguous() and _is_aligned(tensor) for tensor in tensors)


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % tensor.element_size() == 0


def _elements(tensor: Tensor, *others: object, **settings: object) -> int:
    return tensor.numel()


def _ids(ids: Tensor, *settings: int, **named: int) -> bool:
    return ids.dtype == torch.int64 and ids.dim() == 1 and _indexable(ids)


def _bytes(buffer: Tensor, *sizes: int) -> bool:
    return buffer.dtype == torch.uint8 and _indexable(buffer)


def _words(buffer: Tensor) -> bool:
    return _bytes(buffer) and buffer.numel() % 8 == 0 and buffer.data_ptr() % 8 == 0


def _dense(dense: Tensor) -> bool:
    return dense.device.type == "cpu" and _is_aligned(dense)


def _gathered(values: Tensor, places: Tensor, out: Tensor | None = None) -> bool:
    alike = out is None or (out.dtype == values.dtype and out.shape == (places.numel(), *values.shape[1:]))
    outs = () if out is None else (out,)
    return alike and _ids(places) and _indexable(values, *outs)


def _scattered(dense: Tensor, ids: Tensor, values: Tensor) -> bool:
    alike = dense.dtype == values.dtype and values.shape == (ids.numel(), *dense.shape[1:])
    return alike and _ids(ids) and _indexable(dense, values)


def _ids_of_pieces(pieces: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> int:
    return sum([ids.numel() for ids, _ in pieces])


def _pieces(pieces: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> bool:
    return all(_ids(ids) and values.device.type == "cpu" for ids, values in pieces)


def _sum(
    pieces: Iterable[tuple[Tensor, Tensor]], num_rows: int, width: int, dtype: torch.dtype, scale: float = 1.0
) -> bool:
    return dtype != torch.float16  # numba has none on a CPU


def _united(pieces: Sequence[Tensor], size: int) -> bool:
    return all(map(_ids, pieces))


def _dealt(ids: Tensor, world_size: int, seed: int) -> bool:
    return _ids(ids) and world_size <= 1 << 16


def _floats(values: Tensor, *others: Tensor) -> bool:
    """Kernels that draw random numbers count in 32 bits."""
    alike = values.dtype in (torch.float32, torch.float64) and values.dim() == 1 and values.numel() < 1 << 32
    return alike and _indexable(values, *others)


def _magnitudes(values: Tensor, *settings: float | None, **named: float | None) -> bool:
    return values.dtype in (torch.float32, torch.float64) and values.dim() == 1 and _indexable(values)


# What runs compiled, and from which size on, measured with one thread (docs/kernels.md): numbers of ids, elements of
# matrices, bytes of buffers. Below 1024 nothing is worth the half second in which a process imports numba.
nonzero_rows = _dispatched(reference.nonzero_rows, _elements, 1 << 12, _dense)
nonzero_rows_into = _dispatched(reference.nonzero_rows_into, _elements, 0, lambda dense, ids, count: False)  # for GPUs
gather_rows = _dispatched(reference.gather_rows, lambda values, places, out=None: places.numel(), 1 << 20, _gathered)
scatter_rows = _dispatched(reference.scatter_rows, lambda dense, ids, values: values.numel(), 1 << 17, _scattered)
sum_rows = ranged("sum")(_dispatched(reference.sum_rows, _ids_of_pieces, 1 << 11, _pieces))
_sum_rows_at = _dispatched(
    reference.sum_rows_at, lambda pieces, num_rows, width, dtype, scale=1.0: num_rows * width, 1 << 13, _sum
)
union_places = _dispatched(
    reference.union_places, lambda pieces, size: sum([piece.numel() for piece in pieces]), 1 << 11, _united
)
mix = _dispatched(reference.mix, _elements, 1 << 10, _ids)
owner_by_hash = _dispatched(reference.owner_by_hash, _elements, 1 << 10, _ids)
hierarchical_hash = _dispatched(reference.hierarchical_hash, _elements, 1 << 10, _ids)
deal = _dispatched(reference.deal, _elements, 1 << 10, _dealt)
dealt_ids = _dispatched(
    reference.dealt_ids,
    lambda owner, positions, world_size, seed: positions.numel(),
    1 << 10,
    lambda owner, positions, world_size, seed: _ids(positions),
)
group_by_owner = _dispatched(reference.group_by_owner, _elements, 1 << 10, _ids)
pack_bits = _dispatched(reference_codes.pack_bits, _elements, 1 << 10, _ids)
unpack_bits = _dispatched(reference_codes.unpack_bits, _elements, 1 << 12, _bytes)
elias_fano_encode = _dispatched(reference_codes.elias_fano_encode, _elements, 1 << 10, _ids)
elias_fano_decode = _dispatched(reference_codes.elias_fano_decode, _elements, 1 << 10, _bytes)
checksum = _dispatched(reference_codes.checksum, _elements, 1 << 12, _words)
magnitude_moments = _dispatched(reference_select.magnitude_moments, _elements, 1 << 12, _magnitudes)
sum_log_magnitudes = _dispatched(reference_select.sum_log_magnitudes, _elements, 1 << 12, _magnitudes)
count_at_least = _dispatched(reference_select.count_at_least, _elements, 1 << 14, _magnitudes)
select_at_least = _dispatched(reference_select.select_at_least, _elements, 1 << 12, _magnitudes)
leading_magnitudes = _dispatched(reference_select.leading_magnitudes, _elements, 1 << 12, _magnitudes)
top_magnitudes = _dispatched(reference_select.top_magnitudes, _elements, 1 << 12, _magnitudes)
largest_of_blocks = _dispatched(
    reference_quantize.largest_of_blocks, _elements, 1 << 10, lambda values, block: _floats(values)
)
pack_signs = _dispatched(reference_quantize.pack_signs, _elements, 1 << 10, lambda values, phase: _floats(values))
add_signs = _dispatched(
    reference_quantize.add_signs,
    lambda packed, scales, block, total: total.numel(),
    1 << 10,
    lambda packed, scales, block, total: _floats(total, packed, scales),
)
mean_of_blocks = _dispatched(
    reference_quantize.mean_of_blocks, _elements, 1 << 10, lambda values, block: _floats(values)
)
quantize = _dispatched(
    reference_quantize.quantize,
    _elements,
    1 << 10,
    lambda values, steps, block, levels, bits, seed: _floats(values, steps),
)
add_quantized = _dispatched(
    reference_quantize.add_quantized,
    lambda packed, steps, block, levels, bits, total: total.numel(),
    1 << 10,
    lambda packed, steps, block, levels, bits, total: _floats(total, packed, steps),
)
round_to_powers = _dispatched(
    reference_quantize.round_to_powers, _elements, 1 << 10, lambda values, base, seed: _floats(values)
)
add_from_table = _dispatched(
    reference_quantize.add_from_table,
    lambda codes, table, steps, block, total: total.numel(),
    1 << 10,
    lambda codes, table, steps, block, total: _floats(total, codes, table, steps),
)


@ranged("sum")
@wraps(reference.sum_rows_at)
def sum_rows_at(
    pieces: Iterable[tuple[Tensor, Tensor]], num_rows: int, width: int, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    if _BUILT_FOR_GPU and torch.cuda.is_initialized() and isinstance(pieces, Iterator):
        # the first one says where they are
        first = tuple(islice(pieces, 1))
        pieces = chain(first, pieces)
        if _any_on_gpu(first):
            return _call_on_gpu(reference.sum_rows_at, pieces, num_rows, width, dtype, scale)
    return _sum_rows_at(pieces, num_rows, width, dtype, scale)
