"""What torch promises around a device: futures, threads, ``torch.cuda``, the order of NCCL; and `simulated`.

A future takes an event on each device of the tensors in its value, and of no other, if it was made with devices
(ivalue_inl.h of torch 2.13, ``markCompleted``); the current streams of whoever waits then wait for these.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from simgpu import device as simulated_device
from simgpu import engine
from simgpu.device import DeviceContext, Event, Stream, StreamContext, World, current, index_of, where
from simgpu.network import ordered
from simgpu.tensors import Mode, device_of, is_simulated, issue, patched_tensors, touch
from thinwire.gradients.sharded.layout import Replicas

_C_Future = torch._C.Future

# --- futures


def _future_init(self: Any, *, devices: Any = None) -> None:
    _C_Future.__init__(self, [])
    self.sim_devices = {index_of(one) for one in devices or ()}
    self.sim_events, self.sim_clock, self.sim_value = [], None, None


def _complete(self: Any, value: Any) -> None:
    world = current()
    self.sim_clock = world.tell()
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and is_simulated(leaf)]
    found = {device_of(tensor) for tensor in tensors}
    if self.sim_devices:
        if not found <= self.sim_devices:
            raise ValueError(f"The result contained tensors residing on {found}, not among {self.sim_devices}")
        for index in sorted(found):
            event = Event()
            event.record(world.stream(index))
            self.sim_events.append(event)
        self.sim_value = tensors


def _set_result(self: Any, result: Any) -> None:
    _complete(self, result)
    _C_Future.set_result(self, result)


def _set_exception(self: Any, error: Any) -> None:
    _complete(self, None)

    def raise_error(fut_result: Any) -> None:
        raise fut_result

    _C_Future._set_unwrap_func(self, raise_error)
    _C_Future.set_result(self, error)


def _after(self: Any) -> None:
    """Let the current streams of this thread wait for the value, and keep its memory from their allocators."""
    world = current()
    if getattr(self, "sim_clock", None) is not None:
        world.learn(self.sim_clock)
    for event in getattr(self, "sim_events", ()):
        world.stream(event.device_index).wait_event(event)
    for tensor in getattr(self, "sim_value", None) or ():
        for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
            part.record_stream(world.stream(device_of(part)))


def _wait(self: Any) -> Any:
    try:
        return _C_Future.wait(self)
    finally:
        _after(self)


def _value(self: Any) -> Any:
    if getattr(self, "sim_clock", None) is not None:
        current().learn(self.sim_clock)
    return _C_Future.value(self)


def _add_done_callback(self: Any, callback: Callable[[Any], None]) -> None:
    """A callback of a future with devices runs on streams of its own, which wait for the value."""

    def run(_: Any) -> None:
        if getattr(self, "sim_clock", None) is not None:
            current().learn(self.sim_clock)
        with ExitStack() as cleanup:
            for event in self.sim_events:
                cleanup.enter_context(StreamContext(Stream(event.device_index)))
            if self.sim_events:
                _after(self)
            callback(self)

    _C_Future.add_done_callback(self, run)


def _then(self: Any, callback: Callable[[Any], Any]) -> Any:
    child: Any = Future(devices=[torch.device("cuda", index) for index in getattr(self, "sim_devices", ())])

    def run(done: Any) -> None:
        try:
            child.set_result(callback(done))
        except Exception as error:
            child.set_exception(error)

    if hasattr(self, "sim_devices"):
        self.add_done_callback(run)
    else:
        _C_Future.add_done_callback(self, run)
    return child


_FUTURE = {
    "__init__": _future_init,
    "set_result": _set_result,
    "set_exception": _set_exception,
    "wait": _wait,
    "value": _value,
    "add_done_callback": _add_done_callback,
    "then": _then,
}


def _register_comm_hook(reducer: Any, state: Any, hook: Callable[..., Any]) -> None:
    """DDP's reducer waits in C++, at the end of backward, for what hooks return, before it stores the means."""

    def called(state: Any, bucket: Any) -> Any:
        future = hook(state, bucket)
        if current().is_computed:
            current().delayed_hooks.append(future)
        else:
            torch.autograd.Variable._execution_engine.queue_callback(future.wait)  # before that of the reducer
        return future

    _REGISTER(reducer, state, called)


_REGISTER = dist._register_comm_hook
_backward = Tensor.backward


def _backward_pass(self: Tensor, *args: Any, **kwargs: Any) -> None:
    """Note when it is computed: under ``static_graph`` DDP calls the hooks of the first pass only then."""
    world = current()
    world.is_computed = False

    def begin(_: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: setattr(world, "is_computed", True))

    with engine.ordered(world, self):
        self.register_hook(begin)
        _backward(self, *args, **kwargs)
    world.is_computed = False


# --- threads and queues


class SimpleQueue(queue.Queue):
    """What is put into a queue is known to whoever takes it out."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put((current().tell() if simulated_device._current else {}, item))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        clock, item = super().get(block, timeout)
        if simulated_device._current:
            current().learn(clock)
        return item


_thread_start, _thread_join = threading.Thread.start, threading.Thread.join


def _start(self: threading.Thread) -> None:
    world = current()
    known, run = world.tell(), self.run

    def simulated_run() -> None:
        with Mode():
            world.learn(known)
            try:
                run()
            finally:
                self.sim_clock = world.tell()  # type: ignore[attr-defined]

    self.run = simulated_run  # type: ignore[method-assign]
    _thread_start(self)


def _join(self: threading.Thread, timeout: float | None = None) -> None:
    _thread_join(self, timeout)
    if not self.is_alive() and hasattr(self, "sim_clock") and simulated_device._current:
        current().learn(self.sim_clock)


_event_set, _event_wait = threading.Event.set, threading.Event.wait


def _set(self: Any) -> None:
    if simulated_device._current and threading.get_ident() in threading._active:  # type: ignore[attr-defined]
        self.sim_clock = current().tell()  # not of a thread that is being started
    _event_set(self)


def _event_waits(self: Any, timeout: float | None = None) -> bool:
    found = _event_wait(self, timeout)
    if found and hasattr(self, "sim_clock") and simulated_device._current:
        current().learn(self.sim_clock)
    return found


_set_outcome = {name: getattr(futures.Future, name) for name in ("set_result", "set_exception")}
_result = futures.Future.result


def _completes(name: str) -> Callable[..., None]:
    def complete(self: Any, value: Any) -> None:
        if simulated_device._current:
            self.sim_clock = current().tell()
        _set_outcome[name](self, value)

    return complete


def _gives(self: Any, timeout: float | None = None) -> Any:
    try:
        return _result(self, timeout)
    finally:
        if hasattr(self, "sim_clock") and simulated_device._current:
            current().learn(self.sim_clock)


# --- NCCL: one stream for each communicator, which all collectives of a process issue from one thread


class Work:
    """A collective of NCCL: `wait` makes the current stream wait, and not the host."""

    def __init__(self, stream: Stream, tensors: list[Tensor]) -> None:
        self._stream, self._tensors = stream, tensors
        self._event = stream.record_event()
        self._key = next(current().numbers)
        current().stashed[self._key] = tensors

    def wait(self, timeout: Any = None) -> bool:
        current().stream(self._stream.device_index).wait_event(self._event)
        current().stashed.pop(self._key, None)
        return True

    def is_completed(self) -> bool:
        return self._event.query()

    def get_future(self) -> Any:
        future: Any = Future(devices=[self._stream.device])
        with StreamContext(self._stream):
            future.set_result(self._tensors)
        return future


_COLLECTIVES = (
    "all_reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather_single", "all_gather", "broadcast",
    "reduce_scatter_tensor", "reduce_scatter_single",
)  # fmt: skip
_COPIED_AT_ONCE = 16
"""Bytes that NCCL copies at once from and to addresses that are multiples of them."""
_PLACE = {
    "all_reduce": 2, "all_to_all_single": 4, "all_gather_into_tensor": 2, "all_gather_single": 2, "all_gather": 2,
    "broadcast": 2,
}  # fmt: skip
"""Where the group is among the positional arguments."""


def _over_nccl(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that the network of NCCL does for tensors of a device, if the world has it; bits are Gloo's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        world = current()
        is_method = name == "allreduce_coalesced"
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_ours = any(isinstance(one, Replicas) for one in (*args, *kwargs.values()))  # which calls others itself
        if is_ours or not world.has_nccl or not any(map(is_simulated, tensors)):
            return real(*args, **kwargs)
        if not all(map(is_simulated, tensors)):
            raise RuntimeError(f"No backend type associated with device type cpu ({name} over NCCL)")
        if name == "all_to_all_single":
            sizes = {size for of_ranks in args[2:4] for size in of_ranks} - {0}
            if len(sizes) > 1 and any(size % _COPIED_AT_ONCE for size in sizes):  # a record has one size
                world.error(f"NCCL copies single bytes of pieces of {sorted(sizes)} bytes")
        is_async = is_method or kwargs.pop("async_op", False)
        place = 0 if is_method else _PLACE.get(name, len(args))
        group = kwargs.get("group") or (args[place] if len(args) > place else None)
        index = device_of(tensors[0]) or 0
        with world.lock:
            key = f"nccl {id(group) if group is not None and group is not dist.group.WORLD else 'default'}"
            stream = issue(world, index, name, key, tensors, is_async)
        with world.blind():
            done = real(*args, **kwargs)
            if is_method:
                done.wait()
        return Work(stream, tensors) if is_async else None

    return call


# --- FSDP2, which empties and fills storages of whole parameters


def _storage(change: Callable[[World, Any], None], real: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    def changed(tensor: Tensor) -> None:
        block = current().block_of(tensor)
        if block is None:
            real(tensor)
        else:
            change(current(), block)

    return changed


def _fsdp(cleanup: ExitStack) -> None:
    changes = {"alloc_storage": World.fill, "free_storage": World.empty}
    for module in (_fsdp_param, _fsdp_param_group):
        for name, change in changes.items():
            if hasattr(module, name):
                cleanup.enter_context(patch.object(module, name, _storage(change, getattr(module, name))))


# --- torch.cuda


def _synchronize(device: Any = None) -> None:
    world, index = current(), index_of(device)
    clock: dict[str, int] = {}
    for name, known in world.clocks.items():
        if name.startswith(f"cuda:{index} "):
            simulated_device.join(clock, known)
    world.host_waits("torch.cuda.synchronize", clock)
    with world.lock:
        for stream in list(world.streams.values()):
            if stream.device_index == index:
                stream.run()


def _current_stream(device: Any = None) -> Stream:
    return current().stream(index_of(device))


def _set_device(device: Any) -> None:
    index = index_of(device)
    if index >= 0:
        current().set_device(index)


_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "device_count": lambda: 8,
    "current_device": lambda: current().host().device,
    "set_device": _set_device,
    "device": DeviceContext,
    "Stream": Stream,
    "Event": Event,
    "StreamContext": StreamContext,
    "stream": engine.Noting,
    "set_stream": lambda stream: current().set_stream(stream),
    "current_stream": _current_stream,
    "default_stream": lambda device=None: current().default_stream(index_of(device)),
    "synchronize": _synchronize,
    "is_current_stream_capturing": lambda: current().stream() == current().captured,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: "simulated",
    "manual_seed_all": lambda seed: None,
    "manual_seed": lambda seed: None,
    "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda state, device="cuda": None,
    "empty_cache": lambda: None,
}


# --- kernels


def has_interpreter() -> bool:
    """Whether Triton's kernels run, by its interpreter: else the references do."""
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def _launcher(real: Callable[..., None]) -> Callable[..., None]:
    def launch(kernel: Any, num_programs: int, on: Tensor, *args: Any, **constants: Any) -> None:
        """Book a kernel: it reads all of its arguments, and writes to those whose memory is another afterwards."""
        if not num_programs:
            return
        world, name = current(), getattr(getattr(kernel, "fn", kernel), "__name__", "kernel")
        if not is_simulated(on):
            real(kernel, num_programs, on, *args, **constants)
            return
        here = f"{name} at {where()}"
        tensors = [argument for argument in args if isinstance(argument, Tensor)]
        for tensor in tensors:
            if device_of(tensor) != device_of(on):
                world.error(f"Pointer argument cannot be accessed from Triton (cpu tensor?) in {name}")
        with world.lock:
            actor = world.launch(device_of(on) or 0, f"triton {name}").name
            held = [peek(tensor) for tensor in tensors]
            with world.blind():
                real(kernel, num_programs, on, *args, **constants)
            for tensor, before in zip(tensors, held, strict=True):
                is_written = not _same_bits(before, peek(tensor))
                touch(world, actor, tensor, is_written, here)

    return launch


def _same_bits(one: Tensor, other: Tensor) -> bool:
    with torch._C._DisableTorchDispatch():
        return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _kernels(cleanup: ExitStack) -> None:
    from thinwire.kernels import dispatch

    cleanup.enter_context(patch.object(dispatch, "_BUILT_FOR_GPU", True))
    if not has_interpreter():
        cleanup.enter_context(patch.object(dispatch, "_has_triton", lambda *args: False))
        return
    cleanup.enter_context(patch.object(dispatch, "_has_triton", lambda *args: True))
    from thinwire.kernels.gpu import jit

    real = jit.launch
    for name, module in list(sys.modules.items()):
        if name.startswith("thinwire.kernels.gpu.") and hasattr(module, "launch"):
            cleanup.enter_context(patch.object(module, "launch", _launcher(real)))


@contextmanager
def simulated(own: tuple[int, ...] = (0, 1), nccl: bool = False) -> Iterator[World]:
    """Simulate CUDA devices in this process; ``own`` are those that it may use, ``nccl`` is whether groups have it."""
    assert simulated_device._current is None, "a device is simulated already"
    world = World(own)
    world.has_nccl = nccl
    with ExitStack() as cleanup:
        if has_interpreter():
            import thinwire.kernels.gpu.rows  # noqa: F401  # all modules, so that their `launch` can be replaced
        simulated_device.make_current(world)
        cleanup.callback(simulated_device.make_current, None)
        for name, value in _CUDA.items():
            cleanup.enter_context(patch.object(torch.cuda, name, value))
        cleanup.enter_context(patch.object(torch.backends.cuda, "is_built", lambda: True))
        for name, value in _FUTURE.items():
            cleanup.enter_context(patch.object(Future, name, value))
        cleanup.enter_context(patch.object(Tensor, "backward", _backward_pass))
        cleanup.enter_context(patch.object(dist, "_register_comm_hook", _register_comm_hook))
        for name in filter(partial(hasattr, dist), _COLLECTIVES):
            cleanup.enter_context(patch.object(dist, name, _over_nccl(name, getattr(dist, name))))
        coalesced = _over_nccl("allreduce_coalesced", dist.ProcessGroup.allreduce_coalesced)
        cleanup.enter_context(patch.object(dist.ProcessGroup, "allreduce_coalesced", coalesced))
        config = dist.get_backend_config
        named = lambda group=None: "cpu:gloo,cuda:nccl" if world.has_nccl else config(group)  # noqa: E731
        cleanup.enter_context(patch.object(dist, "get_backend_config", named))
        for name in _set_outcome:
            cleanup.enter_context(patch.object(futures.Future, name, _completes(name)))
        cleanup.enter_context(patch.object(futures.Future, "result", _gives))
        cleanup.enter_context(patch.object(queue, "SimpleQueue", SimpleQueue))
        cleanup.enter_context(patch.object(threading.Thread, "start", _start))
        cleanup.enter_context(patch.object(threading.Thread, "join", _join))
        cleanup.enter_context(patch.object(threading.Event, "set", _set))
        cleanup.enter_context(patch.object(threading.Event, "wait", _event_waits))
        _kernels(cleanup)
        _fsdp(cleanup)
        cleanup.enter_context(ordered(world))
        cleanup.enter_context(patched_tensors())
        cleanup.enter_context(Mode())
        yield world


def peek(tensor: Tensor) -> Tensor:
    """A dense copy on the host of what the memory holds now, unseen by the simulation."""
    with current().blind(), torch.no_grad():
        return (tensor.to_dense() if tensor.is_sparse else tensor).detach().clone()
