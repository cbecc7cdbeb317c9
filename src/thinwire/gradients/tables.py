"""Gradients of embedding tables: their touched rows, their means, and small tables stacked as one.

- `Hook` and `weak`: hooks that stay behind when their model is copied or saved, and that keep nothing alive.
- `LookupRows`: the rows of a dense gradient that can be non-zero, known from its lookups, and proven.
- `TableGradient`: a gradient as rows, and the mean back in the layout of DDP. `StagedTable` is one on a GPU: only its
  non-zero rows go to the host, and only the mean comes back.
- `stack`, `unstack`: small tables of one step travel as one.

A synchronization costs a header round and a message for each peer and phase, however small it is. A model with
26 small tables pays that 26 times a step. Tables whose rows have the same width, dtype and device are one taller
matrix: the ids of a table are shifted by the rows of those before it, and one synchronization moves them all. Each row
is still summed over the same ranks, in the same order where the scheme sums in rank order, so the bits are the
same as of tables sent alone. Grouping is pure: it depends only on numbers known to all ranks, so all stack the same.
"""

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import accumulate, pairwise
from math import gcd
from types import NoneType
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from thinwire import kernels
from thinwire.comm.c10d import never_compiled
from thinwire.comm.process_group import Staging
from thinwire.compress.base import Parameter
from thinwire.gradients.module import local_of, synchronized_parameters
from thinwire.gradients.torch_internals import graph_task, hooks_after, hooks_before, saved_indices, version
from thinwire.observe.step import named
from thinwire.rows.sparse import Layout, SparseRows


class Hook(partial[Any]):
    """A module hook that is neither copied nor pickled with its module: copies get one that does nothing.

    A bound method as a hook carries its object into each copy, with lanes and process groups, which cannot be copied,
    and into each file, which then needs thinwire to be read. The substitute takes any arguments, returns None, and
    comes from the standard library.

    Args:
        method: the method to call. Its object lives as long as the hook is on the module, so it must not hold the
            module.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

    @property
    def __name__(self) -> NoReturn:
        """Raise AttributeError for `torch.jit.script`, which compiles the hooks of a module by their names."""
        raise AttributeError(
            "torch.jit.script compiles the hooks of a module, and hooks of thinwire cannot be compiled: script the"
            " module before attach, or after Synchronizer.detach()"
        )


def weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method as long as its object lives, and returns None afterwards.

    It is for hooks of parameters: objects that hold the parameter would keep it alive, and C++ holds the hooks of
    parameters and buckets out of reach of the garbage collector.
    """
    owner, function = ref(method.__self__), method.__func__  # type: ignore[attr-defined]  # of a bound method

    @never_compiled
    def call(*args: Any) -> Any:
        alive = owner()
        return None if alive is None else function(alive, *args)

    return call


MIN_TABLE_BYTES = 16 * 1024
"""Size below which tables are all-reduced with the rest: their sizes and headers would cost more than their zeros."""


MOST_FOLDED = 0.5
"""Largest ratio of looked up ids to the rows of a table at which the gradients of two lookups are added row by row."""
NODES_OF_A_LOOKUP = 64
"""Largest number of nodes between the output of an embedding's subclass and its lookups, such as a scale."""
NODES_OF_A_MODEL = 20_000
"""Largest number of nodes that are searched for lookups in the graph of a model, in 0.5 us each."""


@dataclass(eq=False)
class _Lookup:
    """The gradient that the lookups of a table produced in one backward pass.

    Args:
        ids: ids of the rows that were looked up.
        gradient: an alias, which keeps the memory from being reused and shares the version counter. (The tensor
            itself would make autograd copy it instead of passing it on.)
        version: version of the gradient when it was made.
        folded: distinct ids and rows of further lookups, to be added.
    """

    ids: list[Tensor]
    gradient: Tensor
    version: int
    folded: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def produced(self, gradient: Tensor) -> bool:
        """Return whether ``gradient`` is that very tensor, and has not been written to since."""
        return version(self.gradient) == self.version and _share_memory(gradient, self.gradient)

    def fold(self, gradient: Tensor) -> Tensor:
        """Return the gradient that arrived, with the further lookups added to it; their rows stay known."""
        is_known = self.produced(gradient)
        total = gradient if is_known else gradient.clone()
        for ids, rows in self.folded:
            total.index_add_(0, ids, rows)
            self.ids.append(ids)
        self.folded = []
        self.version = version(self.gradient) if is_known else -1
        return total


class LookupRows:
    """A watcher of a module's lookups that knows which rows their gradients touch, until the next forward.

    The backward of a lookup writes only the rows that it looked up. So if the gradient that a parameter ends
    up with *is* the tensor that a lookup produced (the same memory, never written to since), its rows are the
    ids of that lookup, and the gradient need not be scanned for them. Any other use of the weight (tied
    output layer, a hook that edits the gradient, accumulation over micro-batches) makes another tensor or raises the
    version counter, and the answer is "not known", never a wrong one. That is proven when the gradient is there, and
    again when the rows are asked for.

    Of several lookups of a table the first passes its gradient on. The rows of the others are added when that arrives
    at the parameter, whatever else arrives with it, in place of whole tables on the way there: so the proof holds for
    all of them, and the sum reads a few rows. It is the same sum, of each element in the same order.

    Lookups are calls of embedding modules and their subclasses, and of ``F.embedding`` and ``F.embedding_bag`` on any
    parameter: those that no module announces are found in the graph of the first forward, and from then on in each.

    Writes that PyTorch does not count (through ``gradient.data``, or by other libraries in the same memory) cannot be
    detected. So while the parameter or its AccumulateGrad node, where such writes are made, has any other hook, rows
    are not known either.

    Args:
        module: the module that is trained.
        compressed: ``id()`` of weights that are compressed, so that their rows are not needed.
        is_called: whether the caller has a post-accumulate-gradient hook on each parameter, and calls `settle` in it.
        waits: whether the hooks wait for `install`; but candidates are looked for in the first forward.
    """

    def __init__(
        self, module: nn.Module, compressed: Collection[int] = (), is_called: bool = False, waits: bool = False
    ) -> None:
        self._is_called = is_called
        self._pending: dict[tuple[int, int], _Lookup] = {}  # by id() of a parameter kept alive here, and backward pass
        self._known: dict[int, _Lookup] = {}
        self._handles: list[RemovableHandle] = []
        self._folding: set[int] = set()  # parameters with a hook that folds
        self._hooks_of_nodes: dict[int, Callable[[], Any]] = {}  # weak references, see `hooks_on_node`
        self._search: RemovableHandle | None = None
        self._module = weakref.ref(module)
        tables = [one for one in module.modules() if _has_dense_gradient(one) and id(_weight_of(one)) not in compressed]
        self._embeddings = list(map(weakref.ref, tables))
        weights = {id(_weight_of(table)): _weight_of(table) for table in tables}
        self.parameters = list(weights.values())
        self._widths = {id(_weight_of(table)): _flat_width(table) for table in filter(_is_flat, tables)}
        self.candidates = [
            entry for entry in _bare_tables(module) if id(entry) not in compressed and id(entry) not in weights
        ]
        self.looked_up: set[int] = set()  # candidates that are looked up, and used in no other way
        if not waits or self.candidates:
            self.install()

    def install(self) -> None:
        """Put the hooks on the module, until `remove`."""
        module = self._module()
        if self._handles or module is None or not (self.parameters or self.candidates):
            return
        for table in filter(None, (one() for one in self._embeddings)):
            is_known = _is_flat(table) or type(table) in (nn.Embedding, nn.EmbeddingBag)
            if is_known and "forward" not in vars(table):
                self._handles.append(table.register_forward_hook(Hook(self._after_forward), with_kwargs=True))
            else:
                self._handles.append(table.register_forward_hook(Hook(self._after_subclass)))
        for parameter in self.parameters:
            self._settle_after(parameter)
        self._handles.append(module.register_forward_pre_hook(Hook(self._before_forward)))
        self._search = module.register_forward_hook(Hook(self._after_model))
        self._handles.append(self._search)

    def adopt(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take candidates as tables from the next forward on; all ranks take the same."""
        self.candidates = []
        for parameter in parameters:
            self.parameters.append(parameter)
            self._settle_after(parameter)

    def take(self, parameter: nn.Parameter, bucket: Tensor | None = None) -> Tensor | None:
        """Return ids (any order, repeated) of all rows that can be non-zero in the gradient just made, or None.

        Args:
            bucket: DDP's bucket, to which the gradient was copied; with ``gradient_as_bucket_view`` it lives there.
        """
        lookup, gradient = self._known.pop(id(parameter), None), parameter.grad
        if lookup is None or gradient is None:
            return None
        moved = bucket is not None and version(lookup.gradient) == lookup.version and _share_memory(gradient, bucket)
        if not (moved or lookup.produced(gradient)):
            return None
        return lookup.ids[0] if len(lookup.ids) == 1 else torch.cat(lookup.ids)

    def settle(self, parameter: Tensor) -> None:
        """Note which rows of the gradient that has just been accumulated are known."""
        lookup = self._pending.pop((id(parameter), graph_task()), None)
        self._known.pop(id(parameter), None)
        gradient = parameter.grad
        if lookup is not None and gradient is not None and not self._others(parameter) and lookup.produced(gradient):
            self._known[id(parameter)] = lookup

    def matrix(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of a table, as a view [num_rows, width] where the weight is flat."""
        width = self._widths.get(id(parameter))
        return gradient if width is None else gradient.view(-1, width)

    def remove(self) -> None:
        """Remove all hooks from the module."""
        for handle in self._handles:
            handle.remove()
        for kept in (self._handles, self._hooks_of_nodes, self._folding, self._pending, self._known):
            kept.clear()

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Forget the rows of the last backward; a gradient kept for longer may have been edited meanwhile."""
        if torch.compiler.is_compiling():  # nothing becomes known in a compiled forward
            return
        self._known.clear()
        if graph_task() < 0:  # else checkpointing runs it again, in a backward that needs them
            self._pending.clear()

    def _settle_after(self, parameter: nn.Parameter) -> None:
        if not self._is_called:
            self._handles.append(parameter.register_post_accumulate_grad_hook(weak(self.settle)))

    def _after_forward(self, table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if torch.compiler.is_compiling():  # a graph has no grad_fn: asking for it would break the graph
            return
        node = output.grad_fn if isinstance(output, Tensor) else None
        is_flat = _is_flat(table)
        if is_flat and not output.is_cpu:  # rows of a gradient on a GPU are searched for, and these would make it wait
            return
        ids = _flat_rows(table, *args, **kwargs) if is_flat else args[0] if args else kwargs.get("input")
        made_by = "CppFunction" if is_flat else "Embedding"
        if node is not None and isinstance(ids, Tensor) and type(node).__name__.startswith(made_by):
            self._follow(_weight_of(table), node, ids)

    def _after_subclass(self, table: nn.Module, args: tuple[object, ...], output: object) -> None:
        if not torch.compiler.is_compiling():
            self._follow_all(output, NODES_OF_A_LOOKUP)

    def _after_model(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Follow the lookups that no module announced; if the first graph has none, search no further."""
        if torch.compiler.is_compiling() or not any(tensor.requires_grad for tensor in tensors_of(output)):
            return
        if self._search is not None and not self._follow_all(output, NODES_OF_A_MODEL):
            self._search.remove()
            self._search = None

    def _follow_all(self, output: object, most: int) -> bool:
        """Follow the lookups in a graph, and return whether there are any that are not followed yet."""
        watched = {id(parameter): parameter for parameter in (*self.parameters, *self.candidates)}
        used_otherwise, is_new = set(), False
        for node, variable in _uses(output, most):
            if id(variable) not in watched:
                continue
            if not type(node).__name__.startswith("Embedding"):
                used_otherwise.add(id(variable))
                continue
            self.looked_up.add(id(variable))
            if _FOLLOWED in node.metadata:
                continue
            is_new = True
            ids = saved_indices(node)
            if ids is not None:
                self._follow(variable, node, ids)
        self.looked_up -= used_otherwise
        return is_new

    def _follow(self, weight: Any, node: Any, ids: Tensor) -> None:
        """Note the gradient of a lookup when its node has made it, or fold it into that of an earlier one."""
        if self._search is not None:  # which finds it again
            node.metadata[_FOLLOWED] = True
        looked_up = ids.detach().flatten()

        def after_backward(made: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> Any:
            gradient = made[0]
            if type(gradient) is not Tensor or gradient.layout != torch.strided:  # the memory of a DTensor is another
                return None
            key = id(weight), graph_task()
            first = self._pending.get(key)
            if first is None:
                self._pending[key] = _Lookup([looked_up], gradient.detach(), version(gradient))
            elif len(looked_up) <= MOST_FOLDED * len(gradient) and gradient.ndim == 2 and self._can_fold(weight):
                rows = looked_up.unique()
                first.folded.append((rows, gradient.index_select(0, rows)))
                return None, *made[1:]
            return None

        node.register_hook(after_backward)

    def _can_fold(self, weight: Tensor) -> bool:
        """Return whether a hook of ours sees the gradient first that arrives at a weight.

        Never on a GPU: autograd waits for a node's stream only where a gradient passes, so rows kept for later would
        race if lookups ran on two streams; distinct ids would make the host wait; and rows are searched for anyway.
        """
        if weight.device.type != "cpu":
            return False
        hooks = len(hooks_before(weight) or ())
        if id(weight) not in self._folding and not hooks:
            self._folding.add(id(weight))
            fold = weak(self._fold)
            self._handles.append(weight.register_hook(lambda gradient: fold(id(weight), gradient)))
            hooks = 1
        return id(weight) in self._folding and hooks == 1 and not torch.is_grad_enabled()

    def _fold(self, key: int, gradient: Tensor) -> Tensor | None:
        lookup = self._pending.get((key, graph_task()))
        return lookup.fold(gradient) if lookup is not None and lookup.folded else None

    def _others(self, parameter: Tensor) -> bool:
        """Return whether other hooks could edit the gradient, before or after thinwire's."""
        before, after = len(hooks_before(parameter) or ()), len(hooks_after(parameter) or ())
        own = id(parameter) in self._folding
        return bool(after != 1 or before != own or self.hooks_on_node(parameter))

    def hooks_on_node(self, parameter: Tensor) -> int:
        """Return the number of hooks on the node that accumulates the gradient.

        The node lives as long as anything holds it, such as DDP or an object that registered a hook on it. Its hooks
        are in one dictionary, which the first one that is registered makes, and which stays when that is removed.
        """
        hooks = self._hooks_of_nodes.get(id(parameter), NoneType)()
        if hooks is None:
            probe = get_gradient_edge(parameter).node.register_hook(_nothing)
            self._hooks_of_nodes[id(parameter)] = probe.hooks_dict_ref
            probe.remove()
            hooks = probe.hooks_dict_ref()
        return len(hooks or ())


_FOLLOWED = "followed by thinwire"


def _uses(output: object, most: int) -> Iterator[tuple[Any, Tensor]]:
    """Yield each node of a graph that uses a leaf, with the leaf."""
    waiting = [tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while waiting and len(seen) < most:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            variable = getattr(following, "variable", None)
            if isinstance(variable, Tensor):
                yield node, variable
            elif following is not None:
                waiting.append(following)


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield the tensors in the output of a module."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_of(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_of([getattr(value, entry.name, None) for entry in fields(value)])


def _bare_tables(module: nn.Module) -> list[nn.Parameter]:
    """Return parameters of users' own modules that could be tables."""
    owners = (entry for entry in module.modules() if not type(entry).__module__.startswith("torch.nn."))
    bare = {id(entry): entry for owner in owners for entry in owner.parameters(recurse=False)}
    return [entry for entry in bare.values() if entry.ndim == 2 and _is_table(entry)]


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _nothing(*_: object) -> None:
    """Do nothing: a hook whose dictionary shows the other hooks."""


def tables_of(module: nn.Module) -> list[nn.Parameter]:
    """Return weights whose gradients have rows: of embeddings with sparse gradients, and of large ones with dense.

    An embedding that shares its weight with another kind of module, such as the output layer of a language model, is
    left out: that gradient is as dense as any other.
    """
    shared = {
        id(weight)
        for entry in module.modules()
        if not _is_embedding(entry)
        for weight in entry.parameters(recurse=False)
    }
    return [weight for entry, weight in _tables(module) if _is_sparse(entry) or id(weight) not in shared]


def dense_parameters(
    model: nn.Module, excluded: Container[str] = (), patterns: Iterable[str] = ()
) -> tuple[list[Parameter], list[Parameter]]:
    """Return parameters whose gradients can be compressed, and the others: tables, complex and frozen ones.

    A pattern that names tables with dense gradients, and nothing else, asks for them to be compressed.
    """
    tables = {id(table) for table in tables_of(model)}
    synchronized = list(synchronized_parameters(model, excluded))
    with_rows = tables - {id(table) for table in sparse_tables_of(model)}
    for pattern in patterns:
        named = {id(parameter) for name, parameter in synchronized if fnmatchcase(name, pattern)}
        tables -= named if named <= with_rows else set()
    parameters: tuple[list[Parameter], list[Parameter]] = [], []
    for name, parameter in synchronized:
        is_other = not parameter.requires_grad or parameter.is_complex() or id(parameter) in tables
        parameters[is_other].append(Parameter(name, tuple(local_of(parameter).shape), parameter.dtype))
    return parameters


def sparse_tables_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of embeddings whose gradients are COO tensors."""
    return [weight for entry, weight in _tables(module) if _is_sparse(entry)]


def table_names(module: nn.Module, names: Mapping[int, str]) -> list[str]:
    """Return the names of embedding weights whose gradients are not all-reduced unread, of those with a name by id."""
    return list(dict.fromkeys(names[id(weight)] for _, weight in _tables(module) if id(weight) in names))


def _tables(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield embeddings whose gradients have rows, with the weights."""
    for entry in filter(_is_embedding, module.modules()):
        weight = _weight_of(entry)
        if weight is not None and (_is_sparse(entry) or _has_dense_gradient(entry)):
            yield entry, weight


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or _is_flat(module)


def _is_sparse(embedding: nn.Module) -> bool:
    return bool(getattr(embedding, "sparse", False))


def _weight_of(embedding: nn.Module) -> nn.Parameter:
    """Return the weight of an embedding; None where it is parametrized.

    To read such a weight would evaluate it, which may change buffers and draw random numbers.
    """
    return embedding._parameters.get("weights" if _is_flat(embedding) else "weight")  # type: ignore[return-value]


def _is_flat(module: nn.Module) -> bool:
    """Return whether a module has tables in one flat weight: fbgemm's, with which TorchRec replicates tables."""
    return type(module).__name__ == "DenseTableBatchedEmbeddingBagsCodegen"


def _flat_width(module: Any) -> int:
    """Return the width of all rows, or if tables differ in it, a width of which the rows of each are several."""
    return gcd(*(width for _, width in module.embedding_specs))


def lookups_of_features(offsets: Tensor, num_features: int, batch_sizes: list[list[int]] | None = None) -> Tensor:
    """Return how many indices each feature looks up in a batch of fbgemm: int64 [num_features].

    Args:
        offsets: where each bag begins among the indices, first of the first feature, then of the second...
        batch_sizes: bags of each feature and rank; None if all features have the same number.
    """
    bags = [sum(sizes) for sizes in batch_sizes or ()] or [(offsets.numel() - 1) // num_features] * num_features
    return offsets[torch.tensor([0, *accumulate(bags)], device=offsets.device)].diff().to(torch.int64)


def _flat_rows(
    module: Any,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    feature_requires_grad: Tensor | None = None,
    batch_size_per_feature_per_rank: list[list[int]] | None = None,
) -> Tensor:
    """Return the rows of a flat weight that a lookup of fbgemm reads, in units of `_flat_width`."""
    width, units = _flat_width(module), module.D_offsets.diff() // _flat_width(module)
    counts = lookups_of_features(offsets, units.numel(), batch_size_per_feature_per_rank)
    rows = (module.weights_offsets // width).repeat_interleave(counts) + indices * units.repeat_interleave(counts)
    most = int(units.max())
    if most == 1:
        return rows
    pieces = rows[:, None] + torch.arange(most, device=rows.device)
    return pieces[torch.arange(most, device=rows.device) < units.repeat_interleave(counts)[:, None]]


def _has_dense_gradient(module: nn.Module) -> bool:
    """Return whether a module is a large embedding with a trained weight and a dense gradient in contiguous rows."""
    weight = _weight_of(module) if _is_embedding(module) and not _is_sparse(module) else None
    return isinstance(weight, nn.Parameter) and _is_table(weight)


def _is_table(weight: nn.Parameter) -> bool:
    has_rows = weight.is_contiguous() and not weight.is_complex()
    return weight.requires_grad and weight.numel() * weight.element_size() >= MIN_TABLE_BYTES and has_rows


@dataclass(frozen=True, eq=False)
class TableGradient:
    """A gradient with few non-zero rows: a COO tensor, or a dense one [num_rows, ...].

    Args:
        name: name of the parameter.
        gradient: the gradient; a dense one is written to in place.
        touched: int64 ids (any order, repeated) of all rows of a dense gradient that can be non-zero; None to scan
            for them.
    """

    name: str
    gradient: Tensor
    touched: Tensor | None = None

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.gradient)

    @property
    def kind(self) -> str:
        """Kind of gradient in `Synchronizer.table`."""
        if self.gradient.is_sparse:
            return "sparse gradient"
        return "dense gradient, rows " + ("scanned" if self.touched is None else "known")

    def rows(self) -> SparseRows:
        """Return the rows of this rank.

        Raises:
            ValueError: a gradient that `Layout` cannot read as rows, with the name of the parameter.
        """
        try:
            return self._read()
        except ValueError as error:
            raise ValueError(f"gradient of {self.name!r}: {error}") from error

    def store(self, held: SparseRows, mean: SparseRows) -> Tensor:
        """Return the mean as a gradient of the same layout: a new coalesced COO tensor, or the dense one, in place.

        All rows but ``held`` are zero on this rank already.
        """
        if self.gradient.is_sparse:
            return self.layout.tensor(mean)
        matrix = self._matrix()
        with named("scatter"):
            matrix.index_fill_(0, held.ids, 0.0)  # a sum by blocks leaves out rows that cancelled
            matrix.index_copy_(0, mean.ids, mean.values)
        return self.gradient

    def _read(self) -> SparseRows:
        if self.touched is None:
            return self.layout.rows(self.gradient)
        with named("find"):
            ids = self.touched.to(torch.int64).unique()
            return SparseRows(ids, self._matrix().index_select(0, ids), self.layout.num_rows)

    def _matrix(self) -> Tensor:
        return self.gradient.view(self.layout.num_rows, self.layout.width)


def stack(tables: Sequence[SparseRows]) -> SparseRows:
    """Return tables of the same width and dtype as one matrix, one below the other; a single one is not copied."""
    if len(tables) == 1:
        return tables[0]
    *offsets, num_rows = accumulate((table.num_rows for table in tables), initial=0)
    ids = torch.cat([table.ids + offset for table, offset in zip(tables, offsets, strict=True)])
    return SparseRows.trusted(ids, torch.cat([table.values for table in tables]), num_rows)


def unstack(stacked: SparseRows, num_rows: Sequence[int]) -> list[SparseRows]:
    """Cut the sum of stacked tables into tables of ``num_rows`` rows each. Values share memory."""
    if len(num_rows) == 1:
        return [stacked]
    ends = list(accumulate(num_rows, initial=0))
    assert ends[-1] == stacked.num_rows
    cuts = torch.searchsorted(stacked.ids, torch.tensor(ends)).tolist()
    return [
        SparseRows.trusted(stacked.ids[start:stop] - offset, stacked.values[start:stop], rows)
        for offset, rows, (start, stop) in zip(ends[:-1], num_rows, pairwise(cuts), strict=True)
    ]


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors of each dtype, in the order in which the first of each comes."""
    return [[one for one in tensors if one.dtype == dtype] for dtype in dict.fromkeys(one.dtype for one in tensors)]


def flattened(tensors: Sequence[Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Return tensors of a dtype as a flat one, a single one as it is, and what copies the flat one back."""
    if len(tensors) == 1:
        return tensors[0], lambda: None
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])

    def copy_back() -> None:
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    return flat, copy_back


def share(total: int, weights: Sequence[int]) -> list[int]:
    """Split a whole number in proportion to ``weights`` (evenly if all are 0), exactly.

    Example:
        >>> share(10, [1, 1, 1])
        [3, 3, 4]
    """
    ends = list(accumulate(weights if any(weights) else [1] * len(weights)))
    cuts = [total * end // ends[-1] for end in ends]
    return [stop - start for start, stop in pairwise([0, *cuts])]


@dataclass(frozen=True, eq=False)
class StagedTable(TableGradient):
    """A `TableGradient` of a device. Its rows are tensors of the host that belong to the job of the lane.

    A dense gradient is always scanned for rows: a GPU reads 100 MB in a tenth of a millisecond, and sorting the ids of
    a lookup, as a CPU does, costs no less.
    """

    staging: Staging = field(default_factory=Staging)

    def store(self, held: SparseRows, mean: SparseRows) -> Tensor:
        if self.gradient.is_sparse:
            ids, values = self.staging.to_device(mean.ids, mean.values)
            return self.layout.tensor(SparseRows.trusted(ids, values, mean.num_rows))
        with named("scatter"):
            held_ids, ids, values = self.staging.to_device(held.ids, mean.ids, mean.values)
            matrix = self._matrix()
            matrix.index_fill_(0, held_ids, 0.0)
            kernels.scatter_rows(matrix, ids, values)
        return self.gradient

    def _read(self) -> SparseRows:
        with named("find"):
            ids, values = self._summed() if self.gradient.is_sparse else self._looked_up()
            ids, values = self.staging.to_host(ids, values)
            return SparseRows(ids, values, self.layout.num_rows)

    def _summed(self) -> tuple[Tensor, Tensor]:
        """Return one row for each id: the backward of a lookup gives one row for each occurrence."""
        assert self.gradient.sparse_dim() == 1, "embeddings have one sparse dimension"
        ids, values = self.gradient._indices()[0], self.gradient._values()
        values = values.reshape(ids.numel(), self.layout.width)
        return (ids, values) if self.gradient.is_coalesced() else kernels.sum_rows([(ids, values)])

    def _looked_up(self) -> tuple[Tensor, Tensor]:
        """Return ids and values of the non-zero rows; only `Staging.to_host` waits for their number."""
        matrix = self._matrix()
        ids, count = kernels.find_rows(matrix, matrix.shape[0])
        (count,) = self.staging.to_host(count)
        ids = ids[: int(count)]
        return ids, kernels.gather_rows(matrix, ids)


def staged(table: TableGradient, staging: Staging) -> TableGradient:
    """Return the table in a form that the lane can read: staged if it is on a device."""
    return table if staging.is_host else StagedTable(table.name, table.gradient, staging=staging)
