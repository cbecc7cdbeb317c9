"""Simulated CUDA tensors: every ATen operation is booked, checked for mixed devices, and counted if the host waits.

A simulated tensor is an ordinary tensor of the CPU, whose memory the simulated allocator made; `torch.Tensor.device`
and the like look at the memory. So autograd, optimizers and DDP's reducer in C++ take it, and all of its views and
aliases are simulated too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from simgpu import device as simulated_device
from simgpu.device import PINNED, Block, Stream, World, current, index_of, where

BASE = torch._C.TensorBase
WAITS = {
    "_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "bincount",
    "equal", "is_nonzero", "_coalesce", "_to_sparse", "_validate_sparse_coo_tensor_args",
}  # fmt: skip
"""Operations that return after the device has told the host a size or a value."""
EMPTY = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("sparse_dim", "dense_dim", "is_coalesced", "_sparse_coo_tensor_with_dims_and_tensors"),
}
COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
_HOST_IDS = {"index", "index_put_", "index_put", "_unsafe_index", "_index_put_impl_"}


@cache
def _schema(func: Any) -> tuple[tuple[tuple[int, str], ...], bool]:
    """Which arguments an operation writes to, and whether it only makes a view."""
    writes = tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    returns = func._schema.returns
    is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    return writes, is_view


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def span(tensor: Tensor) -> tuple[int, int]:
    """The first byte and the one behind the last in its storage."""
    if tensor.numel() == 0:
        return 0, 0
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that hold a tensor's memory."""
    if tensor.layout is not torch.sparse_coo:
        return [tensor]
    with torch._C._DisableTorchDispatch():
        return [BASE._indices(tensor), BASE._values(tensor)]


def touch(world: World, actor: str, tensor: Tensor, is_write: bool, what: str) -> None:
    for part in parts(tensor):
        block = world.block_of(part)
        if block is not None:
            world.touch(actor, block, *span(part), is_write, what)


def device_of(tensor: Tensor) -> int | None:
    """Index of its device; PINNED for pinned memory, None for other memory of the host."""
    block = current().block_of(tensor)
    return None if block is None else block.device


def is_simulated(tensor: Tensor) -> bool:
    device = device_of(tensor)
    return device is not None and device != PINNED


def moved(world: World, out: Tensor, device: int) -> Tensor:
    """A result in memory of the allocator, in place of where the CPU put it."""
    if out.layout is torch.sparse_coo:
        ids, values = (moved(world, part, device) for part in (BASE._indices(out), BASE._values(out)))
        made = torch.sparse_coo_tensor(ids, values, out.shape, check_invariants=False)
        return made._coalesced_(out.is_coalesced())
    start, end = span(out)
    size = out.element_size()
    room = world.allocate(max(end - start, size), device).view(out.dtype)
    new = room.as_strided(out.shape, out.stride(), 0)
    if out.numel():
        new.copy_(out)
    return new


def _asks_for(kwargs: dict[str, Any]) -> int | None:
    """The device that a factory is called for, None for the host.

    DDP's reducer and formulas of autograd call factories in C++ with the options of a tensor, which there is one of the
    CPU: with none of Python between, it is a simulated one.
    """
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return index_of(device)
    return None


def run(world: World, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    given = _tensors((args, kwargs))
    blocks = [world.block_of(tensor) for tensor in given]
    asked = _asks_for(kwargs)
    if asked is None and not any(blocks) and not kwargs.get("pin_memory"):
        if given or not _is_from_cpp(func):
            return func(*args, **kwargs)
        asked = world.host().device
    if world.delayed_hooks and _caller()[0].endswith("torch/autograd/graph.py"):  # DDP has waited, and stores means
        hooks, world.delayed_hooks = world.delayed_hooks, []
        for future in hooks:
            future.wait()
    if func.namespace == "c10d":
        return _collective(world, func, args, kwargs, given)
    writes, is_view = _schema(func)
    if is_view:
        return func(*args, **kwargs)
    if "_sparse_coo_tensor" in name and len(given) > 1:
        _check_ids(world, given[0], next((one for one in args if isinstance(one, (list, tuple, torch.Size))), None))
    with world.lock:
        return _run(world, func, name, args, kwargs, given, blocks, asked, writes)


def _check_ids(world: World, ids: Tensor, shape: Any) -> None:
    """Report ids of no row, with which torch would write elsewhere, and end the process."""
    with world.blind(), torch.no_grad():
        most = ids.amax(1).tolist() if ids.numel() else []
        least = int(ids.amin()) if ids.numel() else 0
    if least < 0 or any(one >= size for one, size in zip(most, shape or (), strict=False)):
        world.error(f"ids up to {most} of a sparse tensor of shape {list(shape)}")
        raise IndexError("ids out of range")


def _caller() -> tuple[str, str]:
    """File and function of the innermost frame of Python that called an operation."""
    frame = sys._getframe(3)
    while frame.f_code.co_filename.endswith(("tensors.py", "_compile.py", "eval_frame.py")):
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_filename, frame.f_code.co_name


def _is_from_cpp(func: Any) -> bool:
    """Whether a factory is called by DDP's reducer or a formula of autograd."""
    if func.overloadpacket.__name__ not in ("empty", "empty_strided", "zeros", "full", "ones"):
        return False
    name, function = _caller()
    if name.endswith("torch/nn/parallel/distributed.py"):
        return function in ("_ddp_init_helper", "_pre_forward", "_rebuild_buckets", "_should_disable_cpp_reducer")
    return name.endswith("torch/autograd/graph.py")


def _run(
    world: World,
    func: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: list[Tensor],
    blocks: list[Block | None],
    asked: int | None,
    writes: tuple[tuple[int, str], ...],
) -> Any:
    here = f"{name} at {where()}"
    devices = {block.device for block in blocks if block is not None and block.device != PINNED}
    written = {
        id(tensor)
        for place, argument in writes
        for tensor in _tensors(args[place] if place < len(args) else kwargs.get(argument))
    }
    if asked is not None:
        devices.add(asked)
        kwargs = {**kwargs, "device": torch.device("cpu")}
    wants_pinned = bool(kwargs.get("pin_memory"))
    if wants_pinned:
        kwargs = {**kwargs, "pin_memory": False}
    if not devices:
        out = func(*args, **kwargs)
        if wants_pinned:
            return moved(world, out, PINNED)
        _host_access(world, given, written, here)
        return out
    if name not in COPIES and asked is None:
        _check_devices(world, func, given, blocks, devices)
    target = asked if asked is not None else next(iter(devices))
    late = _late_copy(world, name, args, kwargs, blocks)
    actor = world.stream(target).name
    if name not in EMPTY:
        stream = world.launch(target, name, is_late=late is not None)
        actor = stream.name
        if late is not None:
            stream.put(late)
    for tensor in given:  # an operation in place may resize the parts of a sparse tensor, which this memory cannot
        if tensor.layout is torch.sparse_coo and id(tensor) in written:
            touch(world, actor, tensor, True, here)
            with torch._C._DisableTorchDispatch():
                tensor.data = tensor.detach().clone()
    out = args[0] if late is not None else func(*args, **kwargs)
    if name not in EMPTY:
        for tensor, block in zip(given, blocks, strict=True):
            if block is not None:
                touch(world, actor, tensor, id(tensor) in written, here)
    for tensor in given:  # an operation in place gives a sparse tensor other parts
        if tensor.layout is torch.sparse_coo and id(tensor) in written and world.block_of(tensor) is None:
            tensor.data = moved(world, tensor, target)
            touch(world, actor, tensor, True, here)
    old = {id(tensor): tensor for tensor in given}
    storages = {part.untyped_storage().data_ptr() for tensor in given for part in parts(tensor)} - {0}  # no memory

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in old:
            return value
        if all(part.untyped_storage().data_ptr() in storages for part in parts(value)):
            return value
        new = moved(world, value, target)
        if name not in EMPTY:
            touch(world, actor, new, True, here)
        return new

    if name != "_local_scalar_dense":
        out = tree_map(placed, out)
    _waits_of(world, name, args, kwargs, given, blocks, target)
    return out


def _late_copy(
    world: World, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], blocks: list[Block | None]
) -> Callable[[], None] | None:
    """A copy between pinned memory and a device, which is done when somebody waits for it; None for others.

    Until then the target holds garbage. It keeps no tensor alive, as the device does not.
    """
    if name != "copy_" or not _is_non_blocking(name, args, kwargs) or None in blocks or len(blocks) < 2:
        return None
    (target, source), (there, here) = args[:2], blocks[:2]
    assert there is not None
    assert here is not None
    is_plain = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
    if PINNED not in (there.device, here.device) or target.numel() != source.numel() or not is_plain:
        return None
    (start, end), (first, last) = span(target), span(source)
    stream = world.stream(max(there.device, here.device))
    if not stream.copies_from(there.memory[start:end]):
        there.memory[start:end] = 0xAB
    return partial(np.copyto, there.memory[start:end], here.memory[first:last])


def _is_non_blocking(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking") or (name in ("copy_", "_foreach_copy_") and len(args) > 2 and args[2]))


def _check_devices(world: World, func: Any, given: list[Tensor], blocks: list[Block | None], devices: set[int]) -> None:
    name = func.overloadpacket.__name__
    on_host = [
        tensor
        for tensor, block in zip(given, blocks, strict=True)
        if (block is None or block.device == PINNED) and tensor.dim() > 0
    ]
    if on_host and name in _HOST_IDS:
        on_host = [tensor for tensor in on_host if tensor.dtype not in (torch.int64, torch.int32, torch.bool)]
    if on_host or len(devices) > 1:
        found = [f"cuda:{index}" for index in sorted(devices)] + (["cpu"] if on_host else [])
        text = f"Expected all tensors to be on the same device, but found {' and '.join(found)} ({func})"
        world.error(text)
        raise RuntimeError(text)


def _waits_of(
    world: World,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: list[Tensor],
    blocks: list[Block | None],
    device: int,
) -> None:
    """Count the waits of the host, and note what it knows afterwards."""
    if name in _HOST_IDS:
        if any(tensor.dtype == torch.bool for tensor in given[1:]):
            world.host_waits("index by a mask", world.clocks[world.stream(device).name])
        elif any(block is None for block in blocks[1:]) and any(t.dim() for t in given[1:]):
            world.count_wait("index by ids of the host")
    elif name in COPIES:
        non_blocking = _is_non_blocking(name, args, kwargs)
        crosses = any(block is None or block.device == PINNED for block in blocks)
        pageable = any(block is None and tensor.numel() > 0 for tensor, block in zip(given, blocks, strict=True))
        if crosses and non_blocking and pageable and blocks[0] is not None:  # it returns when the source is staged
            world.count_wait("pageable copy")
        elif crosses and (pageable or not non_blocking):
            what = "pageable copy" if pageable else "blocking copy"
            world.host_waits(what, world.clocks[world.stream(device).name])
    elif name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        world.host_waits(name, world.clocks[world.stream(device).name])


def _host_access(world: World, given: list[Tensor], written: set[int], what: str) -> None:
    actor = world.host().name
    world.tick(actor)
    for tensor in given:
        touch(world, actor, tensor, id(tensor) in written, what)


def _collective(world: World, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> Any:
    """A collective of Gloo: the host reads and writes; for a tensor of a device it waits for the current stream.

    One of NCCL comes here only from DDP's reducer in C++, which lets the current stream wait for it.
    """
    name = func.overloadpacket.__name__
    there = [tensor for tensor in given if is_simulated(tensor)]
    with world.lock:
        if there and world.has_nccl:
            index = device_of(there[0]) or 0
            world.stream(index).wait_stream(issue(world, index, name, "nccl default", there, is_async=True))
        else:
            for tensor in there:
                world.host_waits("Gloo on CUDA tensors", world.clocks[world.stream(device_of(tensor)).name])
            _host_access(world, given, {id(tensor) for tensor in given}, f"{name} of Gloo at {where()}")
    return func(*args, **kwargs)


def issue(world: World, index: int, name: str, communicator: str, tensors: list[Tensor], is_async: bool) -> Stream:
    """Book a collective of NCCL: on the stream of its communicator behind the current one, or else on the current one.

    As in torch since 2.8, no stream is recorded: what is asynchronous keeps its tensors alive until somebody waits.
    """
    threads = world.issued_nccl[index]
    threads.add(world.host().name)
    if len(threads) > 1:
        world.error(f"NCCL on cuda:{index} is issued by several threads ({', '.join(sorted(threads))})")
    stream = world.stream(index)
    if is_async:
        before, stream = stream, world.streams.get(f"cuda:{index} {communicator}")
        stream = stream or Stream(torch.device("cuda", index), kind=communicator)
        stream.wait_stream(before)
    world.launch(index, f"nccl {name}", stream=stream)
    for tensor in tensors:
        touch(world, stream.name, tensor, True, f"{name} of NCCL at {where()}")
    return stream


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        world = simulated_device._current
        if world is None:  # a thread that outlives the simulation
            return func(*args, **(kwargs or {}))
        if any(issubclass(one, DTensor) for one in types):  # whose parts come here again
            return NotImplemented
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:  # finds out about shapes
            return func(*args, **(kwargs or {}))
        return run(world, func, args, kwargs or {})


# --- what tensors look like in Python


def _device(tensor: Tensor) -> torch.device:
    index = device_of(tensor)
    return _RAW["device"].__get__(tensor) if index is None or index == PINNED else torch.device("cuda", index)


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    copy = kwargs.pop("copy", False)
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    if len(args) > 3:
        copy, args = args[3] or copy, args[:3]
    device, dtype, non_blocking, _memory_format = torch._C._nn._parse_to(*args, **kwargs)
    there = device_of(tensor)
    on_cuda = there is not None and there != PINNED
    target = _index(device) if device is not None else (there if on_cuda else None)
    same = target == (there if on_cuda else None)
    if same:
        if (device is not None and on_cuda) or device is None:
            return _RAW["to"](tensor, dtype or tensor.dtype, non_blocking=non_blocking, copy=copy)
        return _RAW["to"](tensor, device, dtype or tensor.dtype, non_blocking=non_blocking, copy=copy)
    if tensor.layout is torch.sparse_coo:
        ids, values = tensor._indices(), tensor._values()
        made = torch.sparse_coo_tensor(
            _to(ids, device), _to(values, device, dtype), tensor.shape, check_invariants=False
        )
        return made._coalesced_(tensor.is_coalesced())
    if target is None:  # to the host, where torch pins the memory of a copy that it does not wait for
        made = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=non_blocking)
        return made.copy_(tensor, non_blocking).to(dtype or tensor.dtype)
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=torch.device("cuda", target))
    made.copy_(tensor, non_blocking)
    return made if dtype in (None, tensor.dtype) else made.to(dtype)


def _index(device: torch.device) -> int | None:
    return index_of(device) if device.type == "cuda" else None


def _numpy(tensor: Tensor, **kwargs: Any) -> Any:
    device = device_of(tensor)
    if device is not None and device != PINNED:
        text = f"can't convert cuda:{device} device type tensor to numpy"
        current().error(text)
        raise TypeError(text)
    if device == PINNED:
        world = current()
        with world.lock:
            _host_access(world, [tensor], set(), f"numpy at {where()}")
    return _RAW["numpy"](tensor, **kwargs)


def _tolist(tensor: Tensor) -> Any:
    if device_of(tensor) == PINNED:
        world = current()
        with world.lock:
            _host_access(world, [tensor], set(), f"tolist at {where()}")
    return _RAW["tolist"](_cpu(tensor) if is_simulated(tensor) else tensor)


def _cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _to(tensor, torch.device("cpu"))


def _record_stream(tensor: Tensor, stream: Any) -> None:
    world = current()
    if tensor.layout is not torch.strided:
        raise NotImplementedError("Could not run 'aten::record_stream' with arguments from the 'SparseCUDA' backend")
    block = world.block_of(tensor)
    if block is not None:
        block.recorded.add(stream.name)


def _pin_memory(tensor: Tensor, *args: Any) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _tensor(data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False):
    made = _MADE["tensor"](data, dtype=dtype)
    if device is not None and torch.device(device).type == "cuda":
        made = made.to(device)
    return (made.pin_memory() if pin_memory else made).requires_grad_(requires_grad)


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    if isinstance(data, Tensor):
        return data.to(device or data.device, dtype or data.dtype)
    return _MADE["as_tensor"](data, dtype=dtype) if device is None else _tensor(data, dtype=dtype, device=device)


def _new_tensor(tensor: Tensor, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
    return _tensor(data, dtype=dtype or tensor.dtype, device=device or tensor.device, **kwargs)


def _setitem(tensor: Tensor, place: Any, value: Any) -> None:
    """A number is written by a kernel; torch for a CPU, which this runs on, would copy a tensor of it."""
    if isinstance(value, (int, float, bool)) and is_simulated(tensor):
        parts_of_place = place if isinstance(place, tuple) else (place,)
        if not any(isinstance(part, (Tensor, list)) for part in parts_of_place):
            tensor[place].fill_(value)
            return
    _RAW["__setitem__"](tensor, place, value)


_RAW = {name: getattr(BASE, name) for name in ("device", "to", "numpy", "tolist", "is_cuda", "is_cpu", "__setitem__")}
_MADE = {"tensor": torch.tensor, "as_tensor": torch.as_tensor}


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not is_simulated(tensor):
        return _DEEPCOPY(tensor, memo)
    made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made = type(tensor)(made, tensor.requires_grad) if type(tensor) is not Tensor else made
    return made


_DEEPCOPY = Tensor.__deepcopy__

PATCHES: dict[str, Any] = {
    "device": property(_device),
    "is_cuda": property(is_simulated),
    "is_cpu": property(lambda tensor: not is_simulated(tensor) and _RAW["is_cpu"].__get__(tensor)),
    "to": _to,
    "cpu": _cpu,
    "cuda": lambda tensor, device=None, non_blocking=False: _to(
        tensor, torch.device("cuda", index_of(device)), non_blocking=non_blocking
    ),
    "numpy": _numpy,
    "tolist": _tolist,
    "new_tensor": _new_tensor,
    "__setitem__": _setitem,
    "record_stream": _record_stream,
    "pin_memory": _pin_memory,
    "is_pinned": lambda tensor, *args: device_of(tensor) == PINNED,
    "get_device": lambda tensor: device_of(tensor) if is_simulated(tensor) else -1,
    "__deepcopy__": _deepcopy,
}


@contextmanager
def patched_tensors() -> Iterator[None]:
    missing = object()
    before = {name: Tensor.__dict__.get(name, missing) for name in PATCHES}
    for name, value in PATCHES.items():
        setattr(Tensor, name, value)
    torch.tensor, torch.as_tensor = _tensor, _as_tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.tensor, torch.as_tensor = _MADE["tensor"], _MADE["as_tensor"]
        for name, value in before.items():
            if value is missing:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, value)
