"""Gradients of a plain module: a hook on each parameter, and groups of parameters instead of DDP's buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from thinwire.errors import CorruptMessageError, ThinwireError
from thinwire.hooks.buckets import Buckets, Contents
from thinwire.hooks.embedding import LookupRows, tables_of
from thinwire.hooks.table import TableGradient
from thinwire.lane import Lane
from thinwire.sync.channel import Draft, Subject
from thinwire.wire import Format, Kind

FIRST_GROUP_BYTES = 1024 * 1024
GROUP_BYTES = 25 * 1024 * 1024
"""As DDP has them: a small first group starts the network early."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A parameter that gets gradients.

    Args:
        is_sparse: its gradient is a COO tensor, which travels alone.
        is_table: of a dense embedding, whose rows are looked at.
        is_compressed: it has a compressor.
    """

    name: str
    parameter: nn.Parameter
    is_sparse: bool = False
    is_table: bool = False
    is_compressed: bool = False

    @property
    def num_bytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()


@dataclass(eq=False)
class _Pass:
    """One backward pass: what is ready, and what was submitted of it."""

    ready: dict[int, None] = field(default_factory=dict)  # in the order of becoming ready
    submitted: int = 0
    sparse: list[tuple[Trained, Future[Tensor]]] = field(default_factory=list)
    flat: list[tuple[Sequence[Trained], Tensor]] = field(default_factory=list)


class ParameterHooks:
    """Averages the gradients of a module's parameters while backward runs.

    Groups are submitted in one order on all ranks: at first that of registration, reversed; from the second pass on
    the order in which gradients became ready on rank 0 in the first. A group is submitted when all its gradients are
    ready and all groups before it were submitted; at the end of backward the rest, with zeros for parameters that were
    not used. So all ranks submit the same, whatever each of them computed.

    Args:
        trained: all that get gradients, in the order of registration, which all ranks share.
        buckets: where groups go.
        lookups: which rows of tables a backward touched. It must have been made before this object.
        lane: by which the order is agreed.
        begin: called at the first gradient of each backward; has `finish` and `deliver` called when it ends.
        expect: called with each future of a group.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
        buckets: Buckets,
        lookups: LookupRows,
        lane: Lane,
        begin: Callable[[], object],
        expect: Callable[[Future[Tensor]], None],
    ) -> None:
        self._trained = trained
        self._buckets = buckets
        self._lookups = lookups
        self._lane = lane
        self._begin = begin
        self._expect = expect
        self._enabled = True
        self._is_ordered = False
        self._order(list(range(len(trained)))[::-1])
        self._pass = _Pass()
        self._handles: list[RemovableHandle] = [
            entry.parameter.register_post_accumulate_grad_hook(self._after_accumulation(place))
            for place, entry in enumerate(trained)
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in here stay on this rank, and add up until the next pass outside."""
        enabled, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = enabled

    def finish(self) -> None:
        """Submit the groups that are left, at the end of backward."""
        while self._pass.submitted < len(self._groups):
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
            rest = [place for group in self._groups for place in group if place not in done.ready]
            self._order(self._lane.submit(lambda lane: agree_on_order(lane, [*done.ready, *rest])).wait())
            self._is_ordered = True

    def reset(self) -> None:
        self._pass = _Pass()

    def remove(self) -> None:
        """Take all hooks off the parameters; of a backward that is running everything is submitted now."""
        if self._pass.ready:
            self.finish()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _order(self, order: Sequence[int]) -> None:
        self._groups = plan_groups(self._trained, order)
        self._group_of = {place: number for number, group in enumerate(self._groups) for place in group}

    def _after_accumulation(self, place: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            del parameter
            if self._enabled:
                self._add(place)

        return hook

    def _add(self, place: int) -> None:
        if not self._pass.ready:
            self._begin()
        if self._group_of[place] < self._pass.submitted:
            raise ThinwireError(
                f"parameter {self._trained[place].name!r} got a gradient twice in one backward, and the first is on its"
                " way already: with re-entrant checkpointing pass use_reentrant=False"
            )
        self._pass.ready[place] = None
        while self._pass.submitted < len(self._groups) and all(
            member in self._pass.ready for member in self._groups[self._pass.submitted]
        ):
            self._submit()

    def _submit(self) -> None:
        number = self._pass.submitted
        self._pass.submitted += 1
        members = [self._trained[place] for place in self._groups[number]]
        gradients = [_gradient(member) for member in members]
        if members[0].is_sparse:
            contents = Contents(gradients[0], (TableGradient(members[0].name, gradients[0]),))
        else:
            contents = self._contents(number, members, gradients)
        future = self._buckets.submit(contents)
        self._expect(future)
        if members[0].is_sparse:
            self._pass.sparse.append((members[0], future))

    def _contents(self, number: int, members: Sequence[Trained], gradients: Sequence[Tensor]) -> Contents:
        """Small gradients are copied into one tensor, and back in `deliver`; the others are averaged in place."""
        tables, compressed, rest, parts = [], [], [], []
        for member, gradient in zip(members, gradients, strict=True):
            if member.is_table:
                tables.append(TableGradient(member.name, gradient, self._lookups.take(member.parameter)))
            elif member.is_compressed:
                compressed.append((member.name, gradient))
            else:
                rest.append(member)
                parts.append(gradient.reshape(-1))
        flat = torch.cat(parts) if parts else torch.empty(0)
        self._pass.flat.append((rest, flat))
        others = ((f"{len(rest)} parameters of gradient group {number}", flat),) if rest else ()
        return Contents(flat, tuple(tables), others, compressed=tuple(compressed))


def plan_groups(trained: Sequence[Trained], order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Consecutive parameters of one dtype up to a number of bytes, as places; a sparse gradient is a group of its own.

    Args:
        order: all places, in the order in which gradients are expected.
    """
    groups: list[list[int]] = []
    size_bytes, dtype = 0, None
    for place in order:
        entry = trained[place]
        cap = FIRST_GROUP_BYTES if len(groups) <= 1 else GROUP_BYTES
        joins = groups and dtype == entry.parameter.dtype and not entry.is_sparse
        if joins and size_bytes + entry.num_bytes <= cap:
            groups[-1].append(place)
            size_bytes += entry.num_bytes
        else:
            groups.append([place])
            size_bytes, dtype = entry.num_bytes, None if entry.is_sparse else entry.parameter.dtype
    return tuple(map(tuple, groups))


def agree_on_order(lane: Lane, order: Sequence[int]) -> list[int]:
    """The order that rank 0 has; a job of the lane.

    Raises:
        CorruptMessageError: what came is not an order of so many parameters.
    """
    channel = lane.channel(Subject("the order of gradients", f"{len(order)} parameters"))

    def drafts() -> list[Draft]:
        mine = torch.tensor(order if channel.rank == 0 else [], dtype=torch.int64)
        return [Draft(Format.COO, 0, mine.view(torch.uint8))] * channel.world_size

    message = channel.swap(Kind.GATHER, drafts, 8 * len(order))[0]
    with channel.reading(message):
        theirs: list[int] = message.payload.view(torch.int64).tolist()
        if sorted(theirs) != list(range(len(order))):
            raise CorruptMessageError(f"{len(theirs)} numbers that are not an order of {len(order)} parameters")
    return theirs


def broadcast_module(module: nn.Module, process_group: dist.ProcessGroup) -> None:
    """Give all ranks the parameters and buffers of rank 0, as DDP does. Shapes must have been compared before."""
    for tensor in (*module.parameters(), *module.buffers()):
        data = tensor.detach()
        contiguous = data.contiguous()
        dist.broadcast(contiguous, group=process_group, group_src=0)
        if contiguous is not data:
            data.copy_(contiguous)


def trained_parameters(
    module: nn.Module, lookups: LookupRows, names: Mapping[int, str], compressed: Sequence[str]
) -> list[Trained]:
    """All parameters that get gradients, in the order of registration."""
    sparse = {id(weight) for weight in tables_of(module)} - {id(weight) for weight in lookups.parameters}
    tables = {id(parameter) for parameter in lookups.parameters}
    return [
        Trained(
            names[id(parameter)],
            parameter,
            id(parameter) in sparse,
            id(parameter) in tables,
            names[id(parameter)] in compressed,
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
