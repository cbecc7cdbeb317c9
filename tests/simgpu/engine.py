"""The streams of autograd's engine: a node of backward runs on the stream of its forward.

Streams wait for each other only at edges where a gradient passes (InputBuffer::add of torch returns at once for an
undefined one), and the stream of the caller waits for those of the leaves before callbacks of the end run. The engine
of a GPU does that in C++; the simulation runs backward on the caller's thread and does it by hooks of nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from simgpu.device import Stream, StreamContext, World

_STREAM = "stream of the simulation"


class Forward(TorchFunctionMode):
    """Notes the stream of the nodes that are made."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.metadata.setdefault(_STREAM, self._stream)
        return out


class Noting(StreamContext):
    """``torch.cuda.stream``: what forward does in it, backward will do on this stream."""

    def __enter__(self) -> None:
        super().__enter__()
        self._forward = None if self.stream is None or not _is_training() else Forward(self.stream)
        if self._forward is not None:
            self._forward.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._forward is not None:
            self._forward.__exit__(None, None, None)
        super().__exit__(*error)


def _is_training() -> bool:
    return threading.current_thread() is threading.main_thread() and torch.is_grad_enabled()


def keep(parameters: Iterable[Tensor], stream: Stream) -> list[Any]:
    """Note that the nodes of these parameters are of a stream, as where DDP makes and keeps them; return them."""
    nodes = [get_gradient_edge(parameter).node for parameter in parameters]
    for node in nodes:
        node.metadata[_STREAM] = stream
    return nodes


def _nodes(root: Any) -> list[Any]:
    found, left = {id(root): root}, [root]
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None and id(node) not in found:
                found[id(node)] = node
                left.append(node)
    return list(found.values())


@contextmanager
def ordered(world: World, root: Tensor) -> Iterator[None]:
    """A backward pass from ``root``, each node on its stream; nothing is done where all are on that of the caller."""
    caller, main = world.stream(), world.default_stream(world.host().device)
    nodes = [] if root.grad_fn is None else _nodes(root.grad_fn)
    made = [node for node in nodes if node.next_functions]
    everywhere = {node.metadata.setdefault(_STREAM, main) for node in made}
    for node in nodes:  # that of a leaf is made where it is used first
        node.metadata.setdefault(_STREAM, everywhere.copy().pop() if len(everywhere) == 1 else main)
    if all(node.metadata[_STREAM] == caller for node in nodes):
        yield
        return
    handles = [handle for node in nodes for handle in _hooked(world, node)]
    root.grad_fn.metadata[_STREAM].wait_stream(caller)  # type: ignore[union-attr]
    leaves = {node.metadata[_STREAM] for node in nodes if not node.next_functions}

    def end() -> None:
        world.set_stream(caller)
        for stream in leaves:
            caller.wait_stream(stream)

    def begin(_: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(end)  # before those of plugs and of DDP

    handles.append(root.register_hook(begin))
    try:
        yield
    finally:
        world.set_stream(caller)
        for handle in handles:
            handle.remove()


def _hooked(world: World, node: Any) -> list[Any]:
    stream, following = node.metadata[_STREAM], [one and one.metadata[_STREAM] for one, _ in node.next_functions]

    def before(_: Any) -> None:
        world.set_stream(stream)

    def after(made: tuple[Tensor | None, ...], _: Any) -> None:
        for gradient, target in zip(made, following, strict=False):
            if gradient is not None and target is not None and target != stream:
                target.wait_stream(stream)
                for part in (gradient._indices(), gradient._values()) if gradient.is_sparse else (gradient,):
                    part.record_stream(target)  # type: ignore[arg-type]
                world.set_stream(target)  # which adds it to what is there

    return [node.register_prehook(before), node.register_hook(after)]
