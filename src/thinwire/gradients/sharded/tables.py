"""Tables in FSDP's shards of which only rows travel: the batch's to its rank, and their gradients back to owners.

FSDP gathers a table whole for the forward and again for the backward, and reduce-scatters a gradient of the whole. But
a batch looks few rows up. So the table stays in shards: each rank asks the owners for the rows of its batch, and sends
them the gradients of these. Parameter, gradient and moments are the DTensors that they were, so clipping, optimizers
and checkpoints do not change. Where shards have replicas, gradients are then averaged over these like any tables: see
`ShardedHooks`.

On a GPU both are collectives of FSDP's own group. The host waits twice in a lookup, for the number of distinct ids and
for how many rows ranks ask for, and never in backward.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional

from thinwire import kernels
from thinwire.comm.c10d import never_compiled
from thinwire.comm.collectives import Collectives
from thinwire.comm.connections import PrivateGroup
from thinwire.comm.groups import private_group
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import reduce_scatter_bytes
from thinwire.errors import CorruptMessageError, LostPeerError, MismatchError, PeerError
from thinwire.gradients import torch_internals as internals
from thinwire.gradients.exact import is_native
from thinwire.gradients.module import is_sharded, local_of
from thinwire.observe.step import ParameterRecords
from thinwire.sums.pieces import ALIGNMENT_BYTES

LEAST_BYTES = 128 * 1024
"""Least bytes of a table of which only rows travel: on one host, where bytes cost least, steps take as long either way
here, and a third with 8 MiB. With all rows of a table in each batch they take as long at any size."""
_READ_WHOLE = 'thinwire leaves tables in shards for lookups: if this forward reads one, use attach(model, rows="dense")'
_NO_COPY = "a table in FSDP's shards cannot be copied while thinwire is attached: call Synchronizer.detach() first"


@dataclass(frozen=True)
class _Origin:
    """What FSDP knew of a parameter, to give it back."""

    state: Any
    group: Any
    index: int
    source: Any

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that have the same shard, or None if there are no others."""
        return internals.ranks_of(self.group.mesh_info, "replicate")


class RowShards:
    """The tables of a model of which only rows travel. FSDP does not know them any more until `remove`.

    Make it on all ranks alike, before FSDP's layout is read.

    Args:
        model: a model that `fully_shard` laid out.
        timeout: how long to wait for a peer; None means the timeout of FSDP's group.
        agree: called with the names of the tables before ranks make groups for them.
    """

    def __init__(
        self,
        model: nn.Module,
        timeout: timedelta | None = None,
        agree: Callable[[list[str]], object] = lambda names: None,
    ) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found, kept = _tables_of(model)
        tables = {names[id(origin.source.sharded_param)]: (modules, origin) for modules, origin in found}
        self._tables: dict[str, tuple[list[Any], _Origin]] = {}
        self._kept = {names[key]: why for key, why in kept.items()}
        self._exchanges: dict[int, Collectives] = {}
        self._own: list[PrivateGroup] = []  # groups of the same ranks as FSDP's
        agree(list(tables))
        self._common = _Common(list(tables))
        self._noted = model.register_forward_hook(_note, always_call=True)
        with ExitStack() as undo:
            undo.callback(self.remove)
            for name, (modules, origin) in tables.items():
                shards, device = origin.group.mesh_info.shard_process_group, origin.source.sharded_param.device
                if id(shards) not in self._exchanges:
                    self._exchanges[id(shards)] = Collectives(self._group_for(shards, device, timeout))
                table = _Table(name, self._exchanges[id(shards)], origin, self._common)
                self._tables[name] = modules, origin
                for module in modules:
                    module.forward = _Lookup(module, table)
                internals.forget(origin.group, origin.source)
                if not origin.group.fsdp_params:
                    internals.parameter_groups_of(origin.state).remove(origin.group)
            undo.pop_all()
        if tables:
            modules = filter(is_sharded, model.modules())
            self._common.other = next(group for module in modules for group in internals.parameter_groups(module))

    def _group_for(self, shards: dist.ProcessGroup, device: torch.device, timeout: timedelta | None) -> Any:
        """Return FSDP's own group on NCCL, which orders what is in flight there; else a group of the same ranks."""
        if is_native(shards, device):
            return shards
        self._own.append(private_group(shards, timeout))
        return self._own[-1].process_group

    def follow(self, lane: Lane, lost: Callable[[BaseException], LostPeerError | None]) -> None:
        """Let lookups fail with a lane of these ranks, and say what ``lost`` returns of a peer that is gone."""
        for group in self._own:
            lane.adopt(group)
        for exchange in self._exchanges.values():
            exchange.lost = lost

    @property
    def names(self) -> frozenset[str]:
        """Names of the tables."""
        return frozenset(self._tables)

    @property
    def bytes_sent(self) -> float:
        """Bytes that all tables have sent."""
        return float(self._common.sent)

    @property
    def host_waits(self) -> int:
        """How often the host has waited for the device to know sizes of messages."""
        return sum(exchange.host_waits for exchange in self._exchanges.values())

    def replicated(self) -> Mapping[dist.ProcessGroup, list[tuple[str, nn.Parameter]]]:
        """Return the tables, with rows on this rank, that others have too, by the group of ranks with the same rows."""
        found: dict[dist.ProcessGroup, list[tuple[str, nn.Parameter]]] = {}
        for name, ((module, *_), origin) in self._tables.items():
            if origin.replicas is not None:
                of_group = found.setdefault(origin.replicas, [])
                of_group += [(f"{name} over replicas", module.weight)] if len(local_of(module.weight)) else []
        return found

    def count(self, records: ParameterRecords) -> None:
        """Count the bytes of each table there from now on."""
        self._common.records, self._common.sent = records, 0
        for name, why in self._kept.items():
            records.book(name, "reduce-scatter", "native", "dense").reason = f"left to FSDP: {why}"

    def remove(self) -> None:
        """Give the tables back to FSDP. Safe to call twice."""
        self._noted.remove()
        for modules, origin in self._tables.values():
            internals.to_sharded(origin.group)  # after an evaluation the others are whole
            for module in modules:
                vars(module).pop("forward", None)
            groups = internals.parameter_groups_of(origin.state)
            groups += [] if origin.group in groups else [origin.group]
            origin.group.fsdp_params.insert(origin.index, origin.source)
            if self._common.other is not None:  # else FSDP did not miss them
                internals.begin_again(origin.group, self._common.other)
        self._tables = {}
        for own in self._own:
            own.destroy()
        self._own.clear()


class _Common:
    """What tables share: their names, a group of parameters that stays with FSDP, and counts of what they send."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.records, self.sent = names, ParameterRecords(), 0
        self.other: Any = None

    def add(self, name: str, num_bytes: int, predicted_bytes: int, dense_bytes: int = 0) -> None:
        record = self.records.book(name, "sparse gradient, rows in shards", "owners", "ids")
        record.add(num_bytes, predicted_bytes, dense_bytes)
        self.sent += num_bytes


def _note(*unused: object) -> None:
    """Add what to write to the error of a forward that reads a table whole, which no module shows beforehand."""
    error = sys.exception()
    if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
        error.add_note(_READ_WHOLE)


def _tables_of(model: nn.Module) -> tuple[list[tuple[list[Any], _Origin]], dict[int, str]]:
    """Return the embeddings whose tables stay in shards, and their tables; and why FSDP keeps others, by id."""
    origins = {}
    for module in filter(is_sharded, model.modules()):
        state = internals.fsdp_state(module)
        for group in internals.parameter_groups(module):
            internals.to_sharded(group)
            for index, source in enumerate(group.fsdp_params):
                origins[id(source.sharded_param)] = _Origin(state, group, index, source)
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    taken: list[tuple[list[Any], _Origin]] = []
    kept: dict[int, str] = {}
    for key, origin in origins.items():
        if any(isinstance(user, (nn.Embedding, nn.EmbeddingBag)) for user in users[key]):
            kept[key] = _why_kept(users[key], origin)
            taken += [] if kept[key] else [(users[key], origin)]
    if len(taken) == len(origins):
        kept, taken = dict.fromkeys(kept, "all parameters are tables, and FSDP has to keep one"), []
    return taken, {key: why for key, why in kept.items() if why}


def _only_looks_up(module: Any) -> bool:
    has_own = type(module).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward) and "forward" not in vars(module)
    return has_own and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def _why_kept(users: Sequence[nn.Module], origin: _Origin) -> str:
    """Return why FSDP keeps a table, or nothing if only rows are to travel."""
    parameter, group, replicas = origin.source.sharded_param, origin.group, origin.replicas
    ranks = internals.ranks_of(group.mesh_info, "shard")
    is_shared = not all(isinstance(user, (nn.Embedding, nn.EmbeddingBag)) for user in users)
    reasons = {
        f"less than {LEAST_BYTES // 1024} KiB cost less than asking for rows": parameter.nbytes < LEAST_BYTES,
        "another module uses the table too": is_shared,
        "its module does not only look rows up": not all(map(_only_looks_up, users)),
        "ranks may leave it out of a step": getattr(group, "reduce_scatter_unused_params", False),
        "a hook reads its gradient before replicas are averaged": replicas and internals.hooks_after(parameter),
        "a hook would change its gradient, which FSDP does not call": internals.hooks_before(parameter),
        "its rows are not dealt to ranks": ranks is None or parameter.placements[-1] != Shard(0),
        "tensor parallelism deals its rows, too": not all(one.is_replicate() for one in parameter.placements[:-1]),
        "its shard is not where the model computes": group.mesh_info.mesh.device_type != parameter.device.type,
        "this torch has another FSDP": not internals.parameter_groups_of(origin.state),
    }
    return next((why for why, applies in reasons.items() if applies), "")


class _Table:
    """One table in shards: how its rows travel.

    Args:
        exchange: the ranks that share it, in the order of their rows.
    """

    def __init__(self, name: str, exchange: Collectives, origin: _Origin, common: _Common) -> None:
        self.name, self._exchange, self._origin, self._common = name, exchange, origin, common
        parameter = origin.source.sharded_param
        self.num_rows, self.width = len(parameter), math.prod(parameter.shape[1:])
        self.reduce_dtype = internals.reduced_dtype(origin.group)
        self.dtype = origin.source.param_dtype or parameter.dtype
        most = -(-self.num_rows // exchange.world_size)
        self._starts = [min(most * rank, self.num_rows) for rank in range(exchange.world_size + 1)]
        self._cuts = torch.tensor(self._starts)  # moved to the device
        self._booked = -1  # the last backward
        self._late: Tensor | None = None  # whether ids of the last lookup were corrupt, on the device

    def ask(self, ids: Tensor) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Return the rows of this rank that others ask for.

        Args:
            ids: int64 [k], distinct and in order.

        Returns:
            (indices int64 [n] of rows, in rank order; which of them no rank can have asked for, bool [n]; how many each
            rank asks for; and of each, how many this rank does).

        Raises:
            IndexError: an id that the table does not have; the other ranks raise PeerError.
            MismatchError: ranks look up different tables; on every rank.
            CorruptMessageError: a rank asks for more rows than this one has, or was asked for others before.
        """
        exchange, rank = self._exchange, self._exchange.rank
        if self._cuts.device != ids.device:
            self._cuts = self._cuts.to(ids.device)
        zero = ids.new_zeros(1)
        asks = torch.searchsorted(ids, self._cuts).diff()
        ends = (ids[:1], ids[-1:]) if len(ids) else (zero, zero)
        late = zero if self._late is None else self._late.long()
        same = *ends, late, zero + self._common.names.index(self.name)
        record = torch.stack([asks, *(one.expand(exchange.world_size) for one in same)], 1)
        numbers = exchange.numbers(record)
        of_others, of_me = numbers.sent[:, 0].tolist(), numbers.received[:, 0].tolist()
        self._check(numbers.sent[0].tolist(), numbers.received.tolist())
        self._count((exchange.world_size - 1) * record[0].nbytes)
        size = self._starts[rank + 1] - self._starts[rank]
        if not all(0 <= count <= size for count in of_me):
            raise CorruptMessageError(f"ranks ask for {of_me} of the {size} rows of {self.name} on this rank")
        kind = torch.int32 if self.num_rows < 1 << 31 else torch.int64
        local = self.move(ids.to(kind), of_me, of_others).long() - self._starts[rank]
        wrong = (local < 0) | (local >= size)
        self._late = wrong.any().view(1)
        return local.clamp_(0, max(0, size - 1)), wrong, of_me, of_others

    def _check(self, mine: Sequence[int], received: Sequence[Sequence[int]]) -> None:
        """Raise on all ranks alike for what any of them has told: ids that the table does not have, or corrupt ones."""
        names = {
            rank: self._common.names[row[-1]] for rank, row in zip(self._exchange.global_ranks, received, strict=True)
        }
        if len(set(names.values())) > 1:
            raise MismatchError(f"ranks look up different tables: {names}. All look up the same, in the same order")
        for rank, (_, least, most, is_late, _) in zip(self._exchange.global_ranks, received, strict=True):
            text = f"ids of {self.name} from {least} to {most}: it has {self.num_rows} rows"
            if not 0 <= least <= most < self.num_rows:
                is_mine = [least, most] == list(mine[1:3])
                raise IndexError(text) if is_mine else PeerError(f"rank {rank} looks up {text}")
            if is_late:
                raise CorruptMessageError(
                    f"in the last lookup rank {rank} was asked for rows of {self.name} that it does not have, and sent"
                    " nan for them"
                )

    def move(self, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Return what other ranks sent of their rows [n, ...]; the host does not wait.

        Pieces begin at multiples of `ALIGNMENT_BYTES`, or NCCL would copy them byte by byte.
        """
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        sizes = [[count * row_bytes for count in each] for each in (sent, received)]
        aligned = [[-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in each] for each in sizes]
        outgoing = rows.contiguous().view(-1).view(torch.uint8)
        if sizes[0] != aligned[0]:
            zeros, pieces = outgoing.new_zeros(ALIGNMENT_BYTES), outgoing.split(sizes[0])
            gaps = [zeros[: end - size] for size, end in zip(sizes[0], aligned[0], strict=True)]
            outgoing = torch.cat([part for pair in zip(pieces, gaps, strict=True) for part in pair])
        incoming = self._exchange.all_to_all(outgoing, aligned[0], aligned[1])
        if sizes[1] != aligned[1]:
            pieces = incoming.split(aligned[1])
            incoming = torch.cat([piece[:size] for piece, size in zip(pieces, sizes[1], strict=True)])
        self._count(sum(aligned[0]) - aligned[0][self._exchange.rank])
        return incoming.view(rows.dtype).view(-1, *rows.shape[1:])

    def divisor(self) -> float:
        """Return what a sum over shards is divided by, if replicas are averaged afterwards."""
        replicas, factor = self._origin.replicas, self._origin.group.gradient_divide_factor
        num_replicas = 1 if replicas is None else replicas.size()
        return float(self._exchange.world_size if factor is None else factor / num_replicas)

    def book(self) -> None:
        """Count once a backward what FSDP would have sent: all-gathers, and a reduce-scatter unless it accumulates."""
        task, self._booked = self._booked, internals.graph_task()
        if task == self._booked:
            return
        world_size, origin = self._exchange.world_size, self._origin
        gathers = 2 if internals.gathers_again(origin.state, origin.group) else 1
        share = (world_size - 1) / world_size * self.num_rows * self.width
        num_bytes = self.num_rows * self.width * self.reduce_dtype.itemsize
        device, is_reduced = origin.source.sharded_param.device, self._common.other.reduce_grads
        reduced = reduce_scatter_bytes(num_bytes, world_size, device) if is_reduced else 0
        self._common.add(self.name, 0, 0, round(gathers * share * self.dtype.itemsize) + reduced)

    def _count(self, predicted_bytes: int) -> None:
        """Count what was sent since the last call."""
        sent, self._exchange.traffic.sent_bytes = self._exchange.traffic.sent_bytes, 0
        self._common.add(self.name, sent, predicted_bytes)


class _Rows(torch.autograd.Function):
    """The rows of a batch, as a function of this rank's shard."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, ids: Tensor, table: _Table) -> Tensor:  # type: ignore[override]
        local, wrong, ctx.of_me, ctx.of_others = table.ask(ids)
        ctx.table, ctx.shape, ctx.dtype = table, shard.shape, shard.dtype
        ctx.save_for_backward(local)
        rows = shard[local].to(table.dtype).view(-1, table.width).masked_fill(wrong[:, None], torch.nan)
        return table.move(rows, ctx.of_others, ctx.of_me)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        table, (local,) = ctx.table, ctx.saved_tensors
        parts = table.move(gradient.to(table.reduce_dtype).contiguous(), ctx.of_me, ctx.of_others)
        table.book()
        mean = torch.zeros(ctx.shape, dtype=ctx.dtype, device=gradient.device).view(-1, table.width)
        rows = kernels.merge_rows(local, parts.to(ctx.dtype), len(mean), len(local), 1.0 / table.divisor())
        kernels.put_rows(mean, rows[0], rows[1])  # sums in rank order, rounded once, as FSDP's means are
        return mean.to(table.reduce_dtype).to(ctx.dtype).view(ctx.shape), None, None


class _Lookup:
    """The forward of an embedding whose table stays in shards."""

    def __init__(self, module: nn.Embedding | nn.EmbeddingBag, table: _Table) -> None:
        self._module, self._table = module, table

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ValueError(_NO_COPY)

    @never_compiled
    def __call__(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        if input.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"ids of {self._table.name} are {input.dtype}: they have to be integers, int64 or int32")
        wanted, ids = input.unique(return_inverse=True)
        rows = _Rows.apply(internals.local_shard(self._module.weight), wanted.long(), self._table)
        padding = self._module.padding_idx
        if isinstance(self._module, nn.Embedding):
            if padding is not None:  # whose gradient is zero
                rows = torch.where((wanted == padding)[:, None], rows.detach(), rows)
            return functional.embedding(ids, rows)
        if padding is not None:  # which bags leave out: another row, of zeros, at the end
            ids = torch.where(input == padding, rows.shape[0], ids)
            rows, padding = torch.cat([rows, rows.new_zeros(1, self._table.width)]), rows.shape[0]
        weights = None if per_sample_weights is None else per_sample_weights.to(rows.dtype)
        mode, has_end = self._module.mode, bool(self._module.include_last_offset)
        return functional.embedding_bag(
            ids, rows, offsets, mode=mode, per_sample_weights=weights, include_last_offset=has_end, padding_idx=padding
        )
