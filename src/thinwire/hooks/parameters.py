"""Gradients of a plain module: a hook on each parameter, and groups of parameters instead of DDP's buckets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from thinwire.errors import ThinwireError
from thinwire.hooks.agree import agree_on_order
from thinwire.hooks.buckets import Buckets, Contents
from thinwire.hooks.clock import Clock
from thinwire.hooks.embedding import LookupRows, tables_of
from thinwire.hooks.groups import Groups, Trained, plan_groups, with_others
from thinwire.hooks.table import TableGradient
from thinwire.lane import Lane


@dataclass(eq=False)
class _Pass:
    """One backward pass: what is ready, and what was submitted of it."""

    ready: dict[int, None] = field(default_factory=dict)  # in the order of becoming ready
    submitted: int = 0
    sparse: list[tuple[Trained, Future[Tensor]]] = field(default_factory=list)
    flat: list[tuple[Sequence[Trained], Tensor]] = field(default_factory=list)


class ParameterHooks:
    """Averages the gradients of a module's parameters while backward runs.

    Groups are submitted in one order on all ranks: that of a plan; or at first that of registration, reversed, and from
    the second pass on the order in which gradients became ready on rank 0 in the first. A group is submitted when all
    its gradients are ready and all groups before it were submitted; at the end of backward the rest, with zeros for
    parameters that were not used. So all ranks submit the same, whatever each of them computed.

    Args:
        trained: all that get gradients, in the order of registration, which all ranks share.
        buckets: where groups go.
        lookups: which rows of tables a backward touched. It must have been made before this object.
        lane: by which the order is agreed.
        begin: called at each gradient of a backward; has `finish` and `deliver` called when it ends.
        expect: called with each future of a group.
        clock: is told when gradients are ready.
        planned: the groups of a plan, of all parameters but tables; None for those of `plan_groups`.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
        buckets: Buckets,
        lookups: LookupRows,
        lane: Lane,
        begin: Callable[[], object],
        expect: Callable[[Future[Tensor]], None],
        clock: Clock,
        planned: Groups | None = None,
    ) -> None:
        self.trained = trained
        self._buckets = buckets
        self._lookups = lookups
        self._lane = lane
        self._begin = begin
        self._expect = expect
        self._clock = clock
        self._planned = planned
        self.synchronizes = True
        self._is_ordered = False
        self.order = list(range(len(trained)))[::-1]
        self._pass = _Pass()
        self.regroup(planned)
        self._handles: list[RemovableHandle] = [
            entry.parameter.register_post_accumulate_grad_hook(self._after_accumulation(place))
            for place, entry in enumerate(trained)
        ]

    def regroup(self, planned: Groups | None) -> None:
        """Follow these groups from the next backward pass on; on all ranks, and between two passes."""
        assert not self._pass.ready, "gradients of this pass are on their way in other groups"
        self._planned = planned
        if planned is None:
            self.groups = plan_groups(self.trained, self.order)
        else:
            self.groups = with_others(self.trained, planned, self.order)
        self._group_of = {place: number for number, group in enumerate(self.groups) for place in group}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in here stay on this rank, and add up until the next pass outside."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def finish(self) -> None:
        """Submit the groups that are left, at the end of backward."""
        while self._pass.submitted < len(self.groups):
            self._submit()
        self._buckets.flush()

    def deliver(self) -> None:
        """Store what futures brought, when all of them are done; and agree on the order after the first pass."""
        done, self._pass = self._pass, _Pass()
        for entry, future in done.sparse:
            entry.parameter.grad = future.value()
        for entries, flat in done.flat:
            sizes = [entry.parameter.numel() for entry in entries]
            for entry, mean in zip(entries, flat.split(sizes), strict=True):
                gradient = entry.parameter.grad
                assert gradient is not None
                gradient.copy_(mean.view(gradient.shape))
        if not self._is_ordered and self._handles:
            rest = [place for group in self.groups for place in group if place not in done.ready]
            self.order = self._lane.submit(lambda lane: agree_on_order(lane, [*done.ready, *rest])).wait()
            self._is_ordered = True
            self.regroup(self._planned)

    def reset(self) -> None:
        self._pass = _Pass()

    def remove(self) -> None:
        """Take all hooks off the parameters; of a backward that is running everything is submitted now."""
        if self._pass.ready:
            self.finish()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _after_accumulation(self, place: int) -> Callable[[Tensor], None]:
        """It must not hold this object, which holds the parameter."""
        weak = weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            del parameter
            hooks = weak()
            if hooks is None:
                raise ThinwireError(
                    "thinwire was attached to a module that is gone, and its parameters go on training: keep the module"
                    " or the Synchronizer, or call detach() on that before"
                )
            if hooks.synchronizes:
                hooks._add(place)

        return hook

    def _add(self, place: int) -> None:
        self._begin()
        self._clock.ready(self.trained[place].name)
        if self._group_of[place] < self._pass.submitted:
            raise ThinwireError(
                f"parameter {self.trained[place].name!r} got a gradient twice in one backward, and the first is on its"
                " way already: with re-entrant checkpointing pass use_reentrant=False"
            )
        self._pass.ready[place] = None
        while self._pass.submitted < len(self.groups) and all(
            member in self._pass.ready for member in self.groups[self._pass.submitted]
        ):
            self._submit()

    def _submit(self) -> None:
        number = self._pass.submitted
        self._pass.submitted += 1
        members = [self.trained[place] for place in self.groups[number]]
        gradients = [_gradient(member) for member in members]
        if members[0].is_sparse:
            table = TableGradient(members[0].name, gradients[0])
            contents = Contents(gradients[0], (table,), name=f"group {number}")
        else:
            contents = self._contents(number, members, gradients)
        future = self._buckets.submit(contents)
        self._expect(future)
        if members[0].is_sparse:
            self._pass.sparse.append((members[0], future))

    def _contents(self, number: int, members: Sequence[Trained], gradients: Sequence[Tensor]) -> Contents:
        """Those that are summed are copied into one tensor of each dtype, and back in `deliver`; the others stay."""
        tables, compressed = [], []
        rest: dict[torch.dtype, list[tuple[Trained, Tensor]]] = {}
        for member, gradient in zip(members, gradients, strict=True):
            if member.is_table:
                tables.append(TableGradient(member.name, gradient, self._lookups.take(member.parameter)))
            elif self._buckets.compresses(member.name):
                compressed.append((member.name, gradient))
            else:
                self._buckets.release(member.name, gradient)
                rest.setdefault(gradient.dtype, []).append((member, gradient))
        others = []
        for dtype, pairs in rest.items():
            flat = torch.cat([gradient.reshape(-1) for _, gradient in pairs])
            self._pass.flat.append(([member for member, _ in pairs], flat))
            others.append((f"{len(pairs)} parameters of {dtype} in gradient group {number}", flat))
        buffer = others[0][1] if others else torch.empty(0)
        return Contents(buffer, tuple(tables), tuple(others), compressed=tuple(compressed), name=f"group {number}")


def broadcast_module(module: nn.Module, process_group: dist.ProcessGroup) -> None:
    """Give all ranks the parameters and buffers of rank 0, as DDP does. Shapes must have been compared before."""
    for tensor in (*module.parameters(), *module.buffers()):
        data = tensor.detach()
        contiguous = data.contiguous()
        dist.broadcast(contiguous, group=process_group, group_src=0)
        if contiguous is not data:
            data.copy_(contiguous)


def trained_parameters(module: nn.Module, lookups: LookupRows, names: Mapping[int, str]) -> list[Trained]:
    """All parameters that get gradients, in the order of registration."""
    sparse = {id(weight) for weight in tables_of(module)} - {id(weight) for weight in lookups.parameters}
    tables = {id(parameter) for parameter in lookups.parameters}
    return [
        Trained(
            names[id(parameter)],
            parameter,
            id(parameter) in sparse,
            id(parameter) in tables,
        )
        for parameter in module.parameters()
        if parameter.requires_grad
    ]


def _gradient(entry: Trained) -> Tensor:
    """What backward left, in this pass or earlier ones; zeros for a parameter that was not used."""
    parameter = entry.parameter
    if parameter.grad is None:
        parameter.grad = _no_rows(parameter) if entry.is_sparse else torch.zeros_like(parameter)
    if parameter.grad.is_sparse != entry.is_sparse:
        found = "sparse" if parameter.grad.is_sparse else "dense"
        raise ValueError(
            f"parameter {entry.name!r} got a {found} gradient, and the other kind was expected: sparse ones come from"
            " nn.Embedding or nn.EmbeddingBag with sparse=True, and from nothing else that uses the same weight"
        )
    return parameter.grad.detach()


def _no_rows(parameter: Tensor) -> Tensor:
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)
