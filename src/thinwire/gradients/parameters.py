"""Gradients of a plain module: a hook on each parameter, and groups of parameters like DDP's buckets or a plan's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from thinwire.comm.c10d import never_compiled
from thinwire.comm.channel import Subject
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import lost_peer
from thinwire.errors import CorruptMessageError, MismatchError, ThinwireError
from thinwire.gradients.buckets import Buckets, Contents, Pending, as_real
from thinwire.gradients.ddp import Plug
from thinwire.gradients.lossless import Other
from thinwire.gradients.module import is_dtensor, like, local_of
from thinwire.gradients.passes import EARLY_STEP
from thinwire.gradients.tables import LookupRows, TableGradient, sparse_tables_of
from thinwire.gradients.torch_internals import graph_task, hooks_after, version
from thinwire.observe.step import Clock

FIRST_GROUP_BYTES = 1024 * 1024
GROUP_BYTES = 25 * 1024 * 1024
"""Caps of groups, equal to DDP's: a small first group starts the network early."""

Groups = tuple[tuple[int, ...], ...]
"""Indices of parameters in the order of registration, group by group, in the order of submission."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A parameter that gets gradients.

    Args:
        is_sparse: whether its gradient is a COO tensor, which travels alone.
        is_table: whether it is the weight of an embedding with a dense gradient, which travels as rows.
        sparse_dim: number of sparse dimensions of a COO gradient.
    """

    name: str
    parameter: nn.Parameter
    is_sparse: bool = False
    is_table: bool = False
    sparse_dim: int = 1

    @property
    def kind(self) -> int:
        """Number of sparse dimensions that its gradient travels with; 0 if it travels dense."""
        return self.sparse_dim if self.is_sparse else 0

    def of_kind(self, kind: int) -> Trained:
        """Return it with a gradient that travels with so many sparse dimensions."""
        return replace(self, is_sparse=kind > 0, is_table=self.is_table and kind == 0, sparse_dim=max(kind, 1))

    @property
    def local(self) -> Tensor:
        """The parameter, or this rank's part of a DTensor."""
        return local_of(self.parameter.detach())


def plan_groups(trained: Sequence[Trained], order: Sequence[int]) -> Groups:
    """Group consecutive parameters of one dtype up to a number of bytes; a sparse gradient is a group of its own.

    Args:
        order: indices in the order in which gradients are expected.
    """
    groups: list[list[int]] = []
    size_bytes, dtype = 0, None
    for index in order:
        entry = trained[index]
        cap = FIRST_GROUP_BYTES if len(groups) <= 1 else GROUP_BYTES
        joins = groups and dtype == entry.parameter.dtype and not entry.is_sparse
        if joins and size_bytes + entry.local.nbytes <= cap:
            groups[-1].append(index)
            size_bytes += entry.local.nbytes
        else:
            groups.append([index])
            size_bytes, dtype = entry.local.nbytes, None if entry.is_sparse else entry.parameter.dtype
    return tuple(map(tuple, groups))


def with_others(trained: Sequence[Trained], planned: Groups, order: Sequence[int]) -> Groups:
    """Return the groups of a plan, and between them groups of embedding tables, which no plan has.

    A table goes before the first group that is complete later than the table is ready, so that nothing waits for it.

    Args:
        planned: groups of any parameters, each in one group.
        order: all indices in the order in which gradients are expected.
    """
    position = {index: number for number, index in enumerate(order)}
    ends = [max(position[index] for index in group) for group in planned]
    known = {index for group in planned for index in group}
    before: dict[int, list[int]] = {}
    for index in order:
        if index not in known:
            later = (number for number, end in enumerate(ends) if end > position[index])
            before.setdefault(next(later, len(planned)), []).append(index)
    groups: list[tuple[int, ...]] = []
    for number in range(len(planned) + 1):
        groups += plan_groups(trained, before.get(number, ()))
        groups += planned[number : number + 1]
    return tuple(groups)


def indices_of(trained: Sequence[Trained], groups: Sequence[Sequence[str]]) -> Groups:
    """Return groups of names as groups of indices."""
    index = {entry.name: number for number, entry in enumerate(trained)}
    return tuple(tuple(index[name] for name in group) for group in groups)


def agree_on_order(lane: Lane, order: Sequence[int]) -> list[int]:
    """Broadcast the order of rank 0, in a job of the lane.

    Raises:
        CorruptMessageError: the received numbers are not an order of the parameters.
    """
    theirs: list[int] = lane.channel(Subject("the order of gradients", f"{len(order)} parameters")).broadcast(order)
    if sorted(theirs) != list(range(len(order))):
        raise CorruptMessageError(f"{len(theirs)} numbers that are not an order of {len(order)} parameters")
    return theirs


@dataclass(eq=False)
class _Pass:
    """The state of one backward pass: ready gradients and submitted groups. Numbers are indices of parameters.

    Args:
        ready: indices in the order of becoming ready.
        missing: number of gradients of each group that are not ready.
        task: number of autograd's pass that the last gradient came from.
        waits: whether all is submitted at its end, because re-entrant checkpointing runs passes inside of it, or hooks
            of others edit gradients after they were added.
        stand_ins: zeros for parameters that have no gradient on this rank; their means, later.
        sparse: futures of means of sparse gradients.
        flat: indices of gradients that are summed as one tensor, and the parts of that: the gradients, and one element
            for each: whether a rank has it.
        apart: indices of gradients synchronized by themselves, in place: of tables, and compressed ones.
        odd: this rank's number of sparse dimensions, for each gradient for which the ranks agreed on another number.
    """

    ready: dict[int, None] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    task: int = -1
    submitted: int = 0
    waits: bool = False
    stand_ins: dict[int, Tensor] = field(default_factory=dict)
    sparse: list[tuple[int, Future[Tensor]]] = field(default_factory=list)
    flat: list[tuple[Sequence[int], Sequence[Tensor]]] = field(default_factory=list)
    apart: list[int] = field(default_factory=list)
    odd: dict[int, int] = field(default_factory=dict)


class ParameterHooks(Plug):
    """The plug of a plain module, which averages the gradients of its parameters while backward runs.

    Groups are submitted in one order on all ranks: that of a plan; or at first that of registration, reversed, and from
    the second pass on the order in which gradients became ready on rank 0 in the first. A group is submitted when all
    its gradients are ready and all groups before it were submitted; at the end of backward the rest, with zeros for
    parameters that were not used. So all ranks submit the same, independent of their own gradients. A parameter that
    some ranks used has the mean on all of them; one that no rank used keeps its ``grad`` of None, so that an optimizer
    skips it.

    Parameters may be frozen and unfrozen between two backward passes, on all ranks alike. A gradient travels sparse if
    it was sparse in the first pass, on all ranks that had one. In any pass a rank may have it in the other layout, as
    functions of users make it; it gets the mean in that.

    Args:
        trained: all parameters that get gradients or may once they are unfrozen, in the order of registration, which
            all ranks share.
        buckets: the queue for groups.
        lookups: the rows of tables that a backward touched; the hooks of this object call its `LookupRows.settle`.
        lane: the lane that agrees on the order.
        begin: called at each gradient of a backward; arranges for `finish` and `deliver` to be called when it ends.
        clock: records when gradients are ready.
        planned: groups of a plan, of all parameters but tables; None for the result of `plan_groups`.
        is_nested: returns whether a backward pass inside of another is running.
    """

    begins_at_output = True
    sends_at_end = False
    """Whether nothing is submitted before the end of backward: the group has other collectives of the model until then,
    and which gradients are ready earlier may differ between ranks."""

    def __init__(
        self,
        trained: Sequence[Trained],
        buckets: Buckets,
        lookups: LookupRows,
        lane: Lane,
        begin: Callable[[], object],
        clock: Clock,
        planned: Groups | None = None,
        is_nested: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.trained = list(trained)
        self._buckets = buckets
        buckets.sees_zeros = True
        self._lookups = lookups
        self._lane = lane
        self._begin = begin
        self._clock = clock
        self._is_nested = is_nested
        self._is_ordered = False
        self._has_loaded = False  # whether a state was loaded since the last pass
        self._order = list(range(len(trained)))[::-1]
        self._pass = _Pass()
        self._thawed = self._trains = self._unfrozen()
        self._is_left = False  # whether local passes have left gradients
        self._nodes: dict[int, object] = {}  # those that accumulate gradients, which keep their hooks while they live
        self._versions: list[int] = []  # of the parameters, when the running pass began
        self._changes: Callable[[], list[float]] = list  # waits for which ranks have changed what is trained
        self.regroup(planned)
        self._handles = [
            _hooked(entry.parameter, self._after_accumulation(index)) for index, entry in enumerate(trained)
        ]

    @property
    def order(self) -> list[int]:
        """Indices of the parameters that get gradients, in the order in which these are expected."""
        return [index for index in self._order if self._thawed[index]]

    @property
    def names(self) -> list[str]:
        """Names of all parameters in the order in which their gradients are expected, for `expect_order`."""
        return [self.trained[index].name for index in self._order]

    @property
    def kinds(self) -> dict[str, int] | None:
        """Numbers of sparse dimensions of gradients, by name; None before ranks have agreed on them and the order."""
        return {entry.name: entry.kind for entry in self.trained} if self._is_ordered else None

    def expect_order(self, names: Sequence[str], kinds: Mapping[str, int] | None) -> None:
        """Expect gradients in the order of another run, so that sums of groups have its bits from the first step on.

        Args:
            kinds: those of that run. Without them ranks agree on order and kinds after the first pass here.
        """
        index = {entry.name: number for number, entry in enumerate(self.trained)}
        if index.keys() == set(names):
            self._order, self._has_loaded = [index[name] for name in names], True
            if kinds is not None:
                self.trained, self._is_ordered = [entry.of_kind(kinds[entry.name]) for entry in self.trained], True
            self.regroup(self._planned)

    def regroup(self, planned: Groups | None) -> None:
        """Follow these groups from the next backward pass on; on all ranks, and between two passes."""
        assert not self._pass.ready, "gradients of this pass are on their way in other groups"
        self._planned = planned
        if planned is None:
            self._follow(plan_groups(self.trained, self.order))
        else:
            trained = [trains and not entry.is_sparse for trains, entry in zip(self._thawed, self.trained, strict=True)]
            thawed = (tuple(index for index in group if trained[index]) for group in planned)
            self._follow(with_others(self.trained, tuple(filter(None, thawed)), self.order))

    def _follow(self, groups: Groups) -> None:
        self.groups = groups
        self._group_of = {index: number for number, group in enumerate(groups) for index in group}

    def finish(self) -> float:
        """Submit the remaining groups at the end of backward."""
        if not self._pass.ready:  # on this rank
            self._start()
        while self._pass.submitted < len(self.groups):
            self._submit()
        return self._buckets.finish()

    def take_in_flight(self) -> Sequence[Pending]:
        self._check_changes()
        return super().take_in_flight()

    def deliver(self) -> None:
        """Store the results of all futures, when they are done, and agree on the order after the first pass."""
        done, self._pass, self._is_left = self._pass, _Pass(), False
        self._check_untouched(done.ready)
        means = {index: future.value() for index, future in done.sparse}
        self._buckets.count_left()
        for indices, parts in done.flat:
            self._deliver_flat(done, indices, *parts)
        for index in done.apart:
            gradient = self.trained[index].parameter.grad
            assert index in done.stand_ins or gradient is not None, "it was there when it was submitted"
            means[index] = done.stand_ins[index] if gradient is None else local_of(gradient)
        unused = self._used_by_nobody(done, means)
        for index, mean in means.items():
            if index not in unused:
                self._store(index, mean)
        for index, kind in done.odd.items():
            parameter = self.trained[index].parameter
            if parameter.grad is not None:
                parameter.grad = _of_kind(parameter.grad, kind)
        if not self._is_ordered and self._handles:
            self._agree_on_order(done)

    def _deliver_flat(self, done: _Pass, indices: Sequence[int], *parts: Tensor) -> None:
        *means, ones = parts
        used = ones.tolist() if not done.stand_ins.keys().isdisjoint(indices) else ()  # a device is waited for
        for number, (index, mean) in enumerate(zip(indices, means, strict=True)):
            parameter = self.trained[index].parameter
            if index in done.stand_ins and used[number] != 0:
                self._store(index, done.stand_ins[index])
            if parameter.grad is not None:
                gradient = local_of(parameter.grad)
                gradient.copy_(mean.view(gradient.shape))

    def _store(self, index: int, mean: Tensor) -> None:
        """Make a mean the gradient, if it is not the memory of that already."""
        parameter = self.trained[index].parameter
        if parameter.grad is None or not is_dtensor(parameter):
            parameter.grad = like(parameter, mean)

    def _used_by_nobody(self, done: _Pass, means: Mapping[int, Tensor]) -> set[int]:
        """Return parameters, among those synchronized by themselves, that no rank used.

        Only a mean of zeros can be of a parameter without a gradient on any rank. All ranks have the same means, so
        they gather votes about the same parameters, and about none in an ordinary step.
        """
        empty = [
            index
            for index, mean in means.items()
            if (mean._nnz() == 0 if mean.is_sparse else self._buckets.is_zero(self.trained[index].name))
        ]
        if not (empty and self._handles):  # after `remove` nobody can be asked
            return set()
        mine = [float(index not in done.stand_ins) for index in empty]
        gathered = self._lane.agree("gradients of zeros", mine)
        return {index for index, ranks in zip(empty, zip(*gathered, strict=True), strict=True) if not any(ranks)}

    def _agree_on_order(self, done: _Pass) -> None:
        order = [*done.ready, *(index for index in self._order if index not in done.ready)]
        mine = [_kind(index, entry, done) for index, entry in enumerate(self.trained)]

        def job(lane: Lane) -> list[int]:
            with lane.setting_up():
                return agree_on_order(lane, order)

        self._order = self._lane.submit(job).wait()
        gathered = self._lane.agree("which gradients are sparse", mine)
        for index, ranks in enumerate(zip(*gathered, strict=True)):
            kinds = {int(kind) for kind in ranks if kind}
            if kinds:
                self.trained[index] = self.trained[index].of_kind(max(kinds.pop(), 0) if len(kinds) == 1 else 0)
        self._is_ordered = True
        self.regroup(self._planned)

    def _send(self) -> None:
        self._begin()
        for index, entry in enumerate(self.trained):
            if entry.parameter.requires_grad and entry.parameter.grad is not None:
                self._add(index)

    def reset(self) -> None:
        """Forget a backward that was not completed. Its gradients stay in ``grad``, as they do without thinwire."""
        self._pass, self._changes = _Pass(), list

    def adopt(self, tables: Sequence[nn.Parameter]) -> None:
        """Let these parameters travel as rows from the next pass on; on all ranks, and between two passes."""
        new = {id(parameter) for parameter in tables}
        self.trained = [
            replace(entry, is_table=True) if id(entry.parameter) in new and not entry.is_sparse else entry
            for entry in self.trained
        ]

    def remove(self) -> None:
        """Remove all hooks from the parameters; of a running backward everything is submitted now."""
        if self._pass.ready:
            with suppress(ThinwireError):  # of an earlier failure
                self.finish()
        while self._handles:
            self._handles.pop().remove()
        self._nodes.clear()  # which know the shapes of the parameters

    def _after_accumulation(self, index: int) -> Callable[[Tensor], None]:
        """Return a hook that does not hold this object, which holds the parameter."""
        weak = weakref.ref(self)

        @never_compiled
        def hook(parameter: Tensor) -> None:
            hooks = weak()
            if hooks is None:
                raise ThinwireError(
                    "thinwire was attached to a module that is gone, and its parameters go on training: keep the module"
                    " or the Synchronizer, or call detach() on that before"
                )
            if hooks.trained[index].is_table:
                hooks._lookups.settle(parameter)
            if not hooks.synchronizes:
                hooks._is_left = True
            elif parameter.requires_grad:  # else frozen since the forward, without a gradient
                hooks._add(index)

        return hook

    def _add(self, index: int) -> None:
        if not self._pass.ready or graph_task() != self._pass.task:
            self._begin()  # forgets a pass that an exception broke off
            if not self._pass.ready:
                self._start()
            self._pass.task = graph_task()
            self._pass.waits = self._pass.waits or self.sends_at_end or self._is_nested()
        now, entry, number = self._pass, self.trained[index], self._group_of[index]
        self._clock.ready(entry.name)
        _lay_out(entry.parameter)
        if number < now.submitted:
            raise ThinwireError(
                f"parameter {entry.name!r} got a gradient twice in one backward, and the first is on its way already:"
                " with re-entrant checkpointing pass use_reentrant=False"
            )
        now.missing[number] -= index not in now.ready
        now.ready[index] = None
        now.waits = self._is_edited_later(index) or now.waits
        # In nested passes it is unknown until the end whether all of a group are ready.
        while not now.waits and now.submitted < len(self.groups) and not now.missing[now.submitted]:
            self._submit()

    def _is_edited_later(self, index: int) -> bool:
        """Return whether other hooks run after the one that adds the gradient, which the lane must not read yet."""
        parameter = self.trained[index].parameter
        if index not in self._nodes:  # without a reference autograd makes a new one in each step
            self._nodes[index] = get_gradient_edge(parameter).node
        after = hooks_after(parameter) or {}
        is_last = len(after) < 2 or next(reversed(after)) == self._handles[index].id
        if has_hooks := self._lookups.hooks_on_node(parameter) > 0:
            del self._nodes[index]  # with it go hooks that the user has put on it for one pass
        return has_hooks or not is_last

    def _start(self) -> None:
        """Begin a pass: agree on which parameters get gradients, if that has changed since the last one.

        What has been frozen since then travels once more where passes of `no_sync` may have left gradients of it.
        """
        if self._lane.is_closed:
            raise self._lane.refusal()
        self._versions = [version(entry.parameter) for entry in self.trained]
        before, self._trains = self._trains, self._unfrozen()
        thawed = self._trains
        has_changed, self._has_loaded = before != thawed or self._has_loaded, False
        self._changes = self._buckets.ask(has_changed)
        if has_changed:
            self._check_changes()
            kinds = [entry.kind for entry in self.trained] if self._is_ordered else None
            subject = Subject(_WHAT_IS_TRAINED, f"all but {self._frozen()}\norder {self._order}, sparse {kinds}")
            are_left = self._lane.submit(lambda lane: lane.channel(subject).gather_numbers([self._is_left])).wait()
            if [1.0] in are_left:
                thawed = [now or then for now, then in zip(thawed, before, strict=True)]
        if thawed != self._thawed:
            self._thawed, self._is_ordered = thawed, False
            self.regroup(self._planned)
        self._pass.missing = list(map(len, self.groups))

    def _check_changes(self) -> None:
        """Raise if ranks have frozen parameters, or loaded a state, and others have not: they send other groups."""
        changes, self._changes = self._changes, list
        flags = changes()
        if len(set(flags)) > 1:
            ranks = [self._lane.exchange.global_ranks[number] for number, flag in enumerate(flags) if flag]
            raise MismatchError(
                f"{_WHAT_IS_TRAINED} has changed on ranks {ranks} alone since the last backward, or these have loaded a"
                f" state; rank {self._lane.global_rank} trains all but {self._frozen()}: freeze and unfreeze the same"
                " on all ranks, and load a state on all"
            )

    def _frozen(self) -> list[str]:
        return [entry.name for entry, trains in zip(self.trained, self._trains, strict=True) if not trains]

    def _unfrozen(self) -> list[bool]:
        return [entry.parameter.requires_grad for entry in self.trained]

    def _check_untouched(self, indices: Iterable[int]) -> None:
        """Raise if an optimizer consumed a gradient before it was sent: the models of ranks would diverge."""
        for index in indices:
            entry = self.trained[index]
            is_written = version(entry.parameter) != self._versions[index]
            if entry.parameter.grad is None or (is_written and len(hooks_after(entry.parameter) or ()) > 1):
                raise ThinwireError(EARLY_STEP.format(f"parameter {entry.name!r}"))

    def _submit(self) -> None:
        number = self._pass.submitted
        self._pass.submitted += 1
        indices = self.groups[number]
        self._check_untouched(index for index in indices if index in self._pass.ready)
        gradients = [self._gradient(index) for index in indices]
        if not self.trained[indices[0]].is_sparse:
            self.in_flight.append(self._buckets.submit(self._contents(number, indices, gradients)))
            return
        table, name = TableGradient(self.trained[indices[0]].name, gradients[0]), f"group {number}"
        pending: Pending | None = self._buckets.start_left(table.name, table.gradient, name)
        pending = pending or self._buckets.submit(Contents(gradients[0], (table,), name=name))
        self.in_flight.append(pending)
        self._pass.sparse.append((indices[0], pending if isinstance(pending, Future) else pending.future()))

    def _gradient(self, index: int) -> Tensor:
        """Return the gradient of this and earlier passes, or zeros for a parameter that was not used."""
        entry = self.trained[index]
        if entry.parameter.grad is not None:
            gradient = local_of(entry.parameter.grad.detach())
            own = gradient.sparse_dim() if gradient.is_sparse else 0
            if own == entry.kind:
                return gradient
            self._pass.odd[index] = own
            gradient = _of_kind(gradient, entry.kind)
            if not entry.is_sparse:
                entry.parameter.grad = gradient  # which gets the mean in place
            return gradient
        return self._pass.stand_ins.setdefault(index, _no_gradient(entry))

    def _contents(self, number: int, indices: Sequence[int], gradients: Sequence[Tensor]) -> Contents:
        """Return a group's parts. Summed gradients are copied into one tensor of each dtype, and back in `deliver`."""
        tables, compressed, compresses = [], [], self._buckets.may_compress
        rest: dict[tuple[torch.dtype, str], list[tuple[int, Tensor]]] = {}
        for index, gradient in zip(indices, gradients, strict=True):
            entry = self.trained[index]
            if entry.is_table and not self._buckets.leaves(entry.name):
                touched = _NO_IDS if index in self._pass.stand_ins else self._lookups.take(entry.parameter)
                tables.append(TableGradient(entry.name, self._lookups.matrix(entry.parameter, gradient), touched))
                self._pass.apart.append(index)
            elif compresses and self._buckets.compresses(entry.name):
                compressed.append((entry.name, gradient))
                self._pass.apart.append(index)
            else:
                if compresses:
                    self._buckets.release(entry.name, gradient)
                how = self._buckets.how(entry.name) if self._buckets.has_lossless else self._buckets.alike
                rest.setdefault((gradient.dtype, how), []).append((index, gradient))
        others = []
        for (dtype, how), pairs in rest.items():
            flat = self._flattened(pairs)
            sizes = [gradient.numel() for _, gradient in pairs]
            self._pass.flat.append(([index for index, _ in pairs], flat.split([*sizes, len(pairs)])))
            name = f"{len(pairs)} parameters of {dtype} in gradient group {number}"
            others.append(Other(name, as_real(flat), how))
        buffer = others[0].gradient if others else gradients[0]  # of the device, or its future orders no stream
        parts, name = (buffer, tuple(tables), tuple(others)), f"group {number}"
        any_dtype = any(getattr(self.trained[index].parameter, "grad_dtype", ...) is None for index in indices)
        return Contents(*parts, compressed=tuple(compressed), name=name, is_compared=any_dtype)

    def _flattened(self, pairs: Sequence[tuple[int, Tensor]]) -> Tensor:
        """Return gradients in one tensor, and behind them for each a one, or a zero if this rank has none."""
        used = pairs[0][1].new_ones(len(pairs))
        for number, (index, gradient) in enumerate(pairs):
            if index in self._pass.stand_ins:
                used[number] = gradient.any()  # memories may have been added to zeros
        return torch.cat([*(gradient.reshape(-1) for _, gradient in pairs), used])


def share_first(tensors: Iterable[Tensor], process_group: dist.ProcessGroup, lane: Lane) -> None:
    """Broadcast the values of rank 0 as `broadcast_all` does, on the host by a job of the lane.

    That notices at once if a rank is lost, of which only some ranks see something in a collective of the group itself.
    """
    tensors = list(tensors)
    if any(tensor.device.type != "cpu" for tensor in tensors):
        broadcast_all(tensors, process_group)
        return

    def job(lane: Lane) -> None:
        group = lane.exchange.process_group
        assert group is not None, "a job of the lane runs"
        try:
            broadcast_all(tensors, group, lane.exchange.waits.wait)
        except RuntimeError as error:
            raise lost_peer(error, lane.global_rank, lane.world_size) from error

    lane.submit(job).wait()


def broadcast_all(
    tensors: Iterable[Tensor],
    process_group: dist.ProcessGroup,
    wait: Callable[[dist.Work | None], object] = lambda work: work is None or work.wait(),
) -> None:
    """Broadcast the values of rank 0, as DDP does, and as bytes: backends know few dtypes. Shapes are the same."""
    for tensor in tensors:
        data = local_of(tensor.detach())
        contiguous = data.contiguous()
        wait(dist.broadcast(contiguous.view(-1).view(torch.uint8), group=process_group, group_src=0, async_op=True))
        if contiguous is not data:
            data.copy_(contiguous)


def trained_parameters(module: nn.Module, lookups: LookupRows, names: Mapping[int, str]) -> list[Trained]:
    """Return all parameters that get gradients, now or when they are unfrozen, in the order of registration."""
    sparse = {id(weight) for weight in sparse_tables_of(module)}
    tables = {id(parameter) for parameter in lookups.parameters}
    return [
        Trained(names[id(parameter)], parameter, id(parameter) in sparse, id(parameter) in tables)
        for parameter in module.parameters()
        if id(parameter) in names and (parameter.is_floating_point() or parameter.is_complex())
    ]


_NO_IDS = torch.empty(0, dtype=torch.int64)
_WHAT_IS_TRAINED = "which parameters are trained"


def _hooked(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a hook, also on a frozen parameter: it may be unfrozen."""
    frozen = not parameter.requires_grad
    try:
        return parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(not frozen)


def _lay_out(parameter: nn.Parameter) -> None:
    """Lay the gradient of a DTensor out like the parameter: that of a norm may be a part of a sum."""
    gradient: object = parameter.grad
    if is_dtensor(parameter) and is_dtensor(gradient) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _kind(index: int, entry: Trained, done: _Pass) -> float:
    """Return the sparse dimensions of this rank's gradient in a pass, -1 if it was dense, and 0 if there was none."""
    return float(done.odd.get(index, entry.kind) or -1) if index in done.ready else 0.0


def _of_kind(gradient: Tensor, sparse_dim: int) -> Tensor:
    """Return a gradient as a COO tensor of so many sparse dimensions, or as a dense one for 0."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.to_sparse(sparse_dim) if sparse_dim else dense


def _no_gradient(entry: Trained) -> Tensor:
    """Return the gradient of a parameter that this rank did not use: zeros, or no rows."""
    dtype = getattr(entry.parameter, "grad_dtype", None) or entry.parameter.dtype  # no such attribute in older ones
    if not entry.is_sparse:
        return torch.zeros_like(entry.local, dtype=dtype)
    shape, device = entry.parameter.shape, entry.parameter.device
    indices = torch.empty(entry.sparse_dim, 0, dtype=torch.int64, device=device)
    values = torch.empty(0, *shape[entry.sparse_dim :], dtype=dtype, device=device)
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)
