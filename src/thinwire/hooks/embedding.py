"""Which rows of an embedding's dense gradient can be non-zero: known from the forward pass, and proven."""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from thinwire.hooks.hook import Hook, weakly

MIN_TABLE_BYTES = 16 * 1024
"""Smaller tables are all-reduced with the rest: their sizes and headers would cost more than their zeros."""


@dataclass(frozen=True, eq=False)
class _Lookup:
    """The gradient that one lookup produced.

    Args:
        ids: of the rows that were looked up.
        gradient: an alias, which keeps the memory from being used again and shares the version counter. (The tensor
            itself would make autograd copy it instead of handing it on.)
        version: of the gradient when it was made.
    """

    ids: Tensor
    gradient: Tensor
    version: int

    @property
    def is_unwritten(self) -> bool:
        return self.gradient._version == self.version

    def produced(self, gradient: Tensor) -> bool:
        """Whether ``gradient`` is that very tensor, and nobody has written to it since."""
        return self.is_unwritten and _share_memory(gradient, self.gradient)


class LookupRows:
    """Watches the embeddings of a module and tells which rows their gradients touch, until the next forward.

    The backward of a lookup writes only the rows that it looked up. So if the gradient that a parameter ends
    up with *is* the tensor that a lookup produced (the same memory, never written to since), its rows are the
    ids of that lookup, and the gradient need not be read to find them. Any other use of the weight (tied
    output layer, two lookups, a hook that edits the gradient, accumulation over micro-batches) makes another
    tensor or raises the version counter, and the answer is "not known", never a wrong one. That is proven when the
    gradient is there, and again when the rows are asked for.

    Writes that PyTorch does not count (through ``gradient.data``, or by other libraries in the same memory) cannot be
    seen. So while anybody else has a hook on the parameter or on its AccumulateGrad node, where such writes are made,
    rows are not known either.

    Args:
        module: what is trained.
        own_hooks: how many post-accumulate-gradient hooks thinwire has on each parameter, this object's included.
        compressed: ``id()`` of weights that are compressed, so that nobody asks for their rows.
    """

    def __init__(self, module: nn.Module, own_hooks: int = 1, compressed: Collection[int] = ()) -> None:
        self._own_hooks = own_hooks
        self._pending: dict[int, _Lookup] = {}  # by id() of parameters that this object keeps alive
        self._known: dict[int, _Lookup] = {}
        self._handles: list[RemovableHandle] = []
        self._probes: dict[int, RemovableHandle] = {}  # see `hooks_on_node`
        self.parameters: list[nn.Parameter] = []
        self._handles.append(module.register_forward_pre_hook(Hook(self._before_forward)))
        for table in filter(_has_dense_gradient, module.modules()):
            if id(table.weight) not in compressed:
                self._watch(table)

    def take(self, parameter: nn.Parameter, bucket: Tensor | None = None) -> Tensor | None:
        """Ids (any order, with repetitions) of all rows that can be non-zero in the gradient just made, or None.

        Args:
            bucket: of DDP, to which the gradient was copied; with ``gradient_as_bucket_view`` it lives there now.
        """
        lookup, gradient = self._known.pop(id(parameter), None), parameter.grad
        if lookup is None or gradient is None:
            return None
        moved = bucket is not None and lookup.is_unwritten and _share_memory(gradient, bucket)
        return lookup.ids if moved or lookup.produced(gradient) else None

    def remove(self) -> None:
        """Take all hooks off the module."""
        for handle in (*self._handles, *self._probes.values()):
            handle.remove()
        self._handles.clear()
        self._probes.clear()

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """What is known is about one backward; a gradient kept for longer may have been edited meanwhile."""
        del module, args
        if not torch.compiler.is_compiling():  # nothing becomes known in a compiled forward
            self._known.clear()

    def _watch(self, table: nn.Module) -> None:
        weight = table.weight
        assert isinstance(weight, nn.Parameter)
        if all(weight is not known for known in self.parameters):
            self.parameters.append(weight)
            self._handles.append(weight.register_post_accumulate_grad_hook(weakly(self._after_accumulation)))
        if type(table) in (nn.Embedding, nn.EmbeddingBag) and "forward" not in vars(table):
            self._handles.append(table.register_forward_hook(Hook(self._after_forward), with_kwargs=True))

    def _after_forward(
        self, table: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: Tensor
    ) -> None:
        if torch.compiler.is_compiling():  # a graph has no grad_fn: asking for it would break the graph
            return
        node = output.grad_fn if isinstance(output, Tensor) else None
        ids = args[0] if args else kwargs.get("input")
        if node is None or not isinstance(ids, Tensor) or not type(node).__name__.startswith("Embedding"):
            return
        weight = table.weight
        looked_up = ids.detach().flatten()

        def after_backward(made: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> None:
            gradient = made[0]
            if gradient is not None and gradient.layout == torch.strided:
                self._pending[id(weight)] = _Lookup(looked_up, gradient.detach(), gradient._version)

        node.register_hook(after_backward)

    def _after_accumulation(self, parameter: nn.Parameter) -> None:
        lookup = self._pending.pop(id(parameter), None)
        self._known.pop(id(parameter), None)
        gradient = parameter.grad
        if lookup is not None and gradient is not None and not self._others(parameter) and lookup.produced(gradient):
            self._known[id(parameter)] = lookup

    def _others(self, parameter: nn.Parameter) -> bool:
        """Whether somebody else has hooks that could edit the gradient, before us or after us."""
        after = len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
        return bool(after != self._own_hooks or parameter._backward_hooks or self.hooks_on_node(parameter) != 1)

    def hooks_on_node(self, parameter: nn.Parameter) -> int:
        """How many there are on the node that accumulates the gradient: one of ours, that shows the others.

        The node lives as long as somebody holds it, such as DDP or whoever registered a hook on it.
        """
        probe = self._probes.get(id(parameter))
        hooks = None if probe is None else probe.hooks_dict_ref()
        if hooks is None:
            probe = self._probes[id(parameter)] = get_gradient_edge(parameter).node.register_hook(_nothing)
            hooks = probe.hooks_dict_ref()
        return len(hooks or ())


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _nothing(*_: object) -> None:
    """A hook that shows in its dictionary which others there are."""


def tables_of(module: nn.Module) -> list[nn.Parameter]:
    """The weights whose gradients have rows: of embeddings with sparse gradients, and of large ones with dense.

    Not of an embedding that shares its weight with another kind of module, such as the output layer of a language
    model: that gradient is as dense as any other.
    """
    embeddings = [entry for entry in module.modules() if isinstance(entry, (nn.Embedding, nn.EmbeddingBag))]
    shared = {
        id(weight)
        for entry in module.modules()
        if not isinstance(entry, (nn.Embedding, nn.EmbeddingBag))
        for weight in entry.parameters(recurse=False)
    }
    weights = [
        entry.weight
        for entry in embeddings
        if entry.sparse or (_has_dense_gradient(entry) and id(entry.weight) not in shared)
    ]
    return [weight for weight in weights if isinstance(weight, nn.Parameter)]


def has_tables(module: nn.Module, synchronized: Container[int]) -> bool:
    """Whether there is an embedding whose gradient is not all-reduced unread, of the weights with these ``id()``."""
    embeddings = (entry for entry in module.modules() if isinstance(entry, (nn.Embedding, nn.EmbeddingBag)))
    return any(
        id(entry.weight) in synchronized and (entry.sparse or _has_dense_gradient(entry)) for entry in embeddings
    )


def _has_dense_gradient(module: nn.Module) -> bool:
    """Whether it is a large enough embedding whose weight is trained and gets a dense gradient, row after row."""
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.sparse:
        return False
    weight = module.weight
    large = weight.numel() * weight.element_size() >= MIN_TABLE_BYTES
    has_rows = weight.is_contiguous() and not weight.is_complex()
    return isinstance(weight, nn.Parameter) and weight.requires_grad and large and has_rows
