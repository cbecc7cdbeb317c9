"""Gradients of models that FSDP2 laid out on a mesh: by `fully_shard` on one or two dimensions, or by `replicate`.

FSDP sums the gradients of a parameter group as one flat tensor: a reduce-scatter leaves each rank the part of its
shards, and on a mesh with a dimension of replicas an all-reduce follows. Its settings (accumulation, dtypes, divisors,
hooks) are applied around these two collectives, so thinwire replaces the collectives and nothing else: the
process group of the replicas is one that averages through `Buckets`, and sees each shard as a gradient of its own.

Attributes of FSDP that are private by name are read in `thinwire.gradients.torch_internals`.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.comm.c10d import check_names
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import reduce_scatter_bytes
from thinwire.compress.assign import Dense, assign
from thinwire.compress.base import Exchanged, Parameter
from thinwire.compress.memory import ErrorFeedback
from thinwire.compress.reductions.choose import scattered
from thinwire.errors import ThinwireError, is_of_a_peer, logger, warn
from thinwire.gradients import torch_internals as internals
from thinwire.gradients.buckets import Buckets, Contents, Pending
from thinwire.gradients.compression import Methods, Planned, planned
from thinwire.gradients.lossless import Other
from thinwire.gradients.module import is_sharded, local_of
from thinwire.gradients.parameters import ParameterHooks, Trained
from thinwire.gradients.tables import MIN_TABLE_BYTES, TableGradient, sparse_tables_of, tables_of


@dataclass(frozen=True, eq=False)
class LocalShard:
    """This rank's shard of a parameter.

    Args:
        source: FSDP's record of the parameter.
        is_table: whether its gradient has few non-zero rows.
    """

    name: str
    source: Any
    is_table: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the shard; the last ranks may have fewer rows, or none."""
        return tuple(self.source.sharded_size)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the largest shard, which each has in the flat tensor; the same on all ranks."""
        return tuple(self.source.padded_sharded_param_size)

    @property
    def is_read_early(self) -> bool:
        """Whether the gradient is read before backward ends: added to one that is there, or seen by a hook."""
        parameter = self.source.sharded_param
        return parameter.grad is not None or bool(internals.hooks_after(parameter))


class ParameterGroup:
    """The parameters that FSDP communicates together, by one call of `fully_shard`.

    Args:
        group: FSDP's parameter group.
        shards: all its parameters, in its order.
    """

    def __init__(self, group: Any, shards: Sequence[LocalShard]) -> None:
        self.group, self.shards = group, shards
        self._ready: list[LocalShard] = []
        self.release: Callable[[], object] = lambda: None
        """Undoes `watch`."""

    @property
    def name(self) -> str:
        """Name for messages and traces."""
        return f"{self.shards[0].name} and {len(self.shards) - 1} more"

    def watch(self, begin: Callable[[], object]) -> None:
        """From now on know which parameters a reduction is of, and call ``begin`` before each."""
        shards = {shard.source: shard for shard in self.shards}

        def reduces(sources: Sequence[Any]) -> None:
            self._ready = [shards[source] for source in sources]
            if self._ready and self.is_reduced:
                begin()

        self.release = internals.watch_reductions(self.group, reduces)

    @property
    def is_reduced(self) -> bool:
        """Whether FSDP reduces gradients in the next backward pass, and over replicas too where there are any."""
        return bool(self.group.reduce_grads and (self.group.all_reduce_grads or not self.has_replicas))

    @property
    def has_replicas(self) -> bool:
        """Whether FSDP all-reduces what a reduce-scatter leaves, if only over one rank."""
        return hasattr(self.group.mesh_info, "replicate_process_group")

    def cut(self, numel: int) -> list[tuple[LocalShard, int]]:
        """Return the shards in a flat tensor of ``numel`` elements, which is being reduced, and where each begins."""
        starts, end = [], 0
        for shard in self._ready:
            starts.append((shard, end))
            end += math.prod(shard.padded_shape)
        if end != numel:
            raise ThinwireError(
                f"FSDP reduces {numel} elements of {self.group}, and its {len(starts)} parameters with gradients have"
                f" {end}: this torch lays them out in another way than thinwire knows. Call Synchronizer.detach()"
            )
        return starts

    def may_be_late(self, flat: Tensor) -> bool:
        """Return whether nobody reads the reduced tensor before backward has ended."""
        is_copied = flat.is_cuda and any(shard.source.offload_to_cpu for shard in self._ready)
        if internals.all_reduce_hook(self.group) is not None or is_copied:
            return False
        ready = self._ready
        return all(internals.kept_dtype(one.source) == flat.dtype and not one.is_read_early for one in ready)


class Sharding:
    """The layout of parameters on one mesh.

    Args:
        units: all that FSDP communicates on the mesh.
        others: the layouts of the model's other parameters, on smaller meshes: of experts, say.
    """

    def __init__(self, units: Sequence[ParameterGroup], others: Sequence[Sharding] = ()) -> None:
        self.units, self.others = units, others
        self.info = units[0].group.mesh_info
        self.mesh = self.info.mesh
        dimensions = self.info.shard_mesh_dim, self.info.replicate_mesh_dim
        if self.mesh.ndim != sum(dimension is not None for dimension in dimensions):
            raise ValueError(
                "attach takes FSDP models on a mesh of one or two data-parallel dimensions: pass mesh[...]"
            )

    @classmethod
    def of(cls, model: nn.Module) -> Sharding:
        """Return the layout of a model on its largest mesh.

        Args:
            model: the outermost module with `fully_shard` or `replicate`.

        Raises:
            ValueError: a layout that cannot be synchronized; the message says what to do.
        """
        modules = filter(is_sharded, model.modules())
        groups = {id(group): group for module in modules for group in internals.parameter_groups(module)}.values()
        for group in groups:
            if isinstance(getattr(group.mesh_info, "replicate_process_group", None), Replicas):
                raise ValueError(
                    "thinwire is attached to a part of this model already: call detach() on its Synchronizer"
                )
            internals.to_sharded(group)  # after an evaluation, or a failed pass, modules may have whole parameters
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        tables = {id(weight) for weight in tables_of(model)}
        sparse = {id(weight) for weight in sparse_tables_of(model)}
        meshes: dict[Any, list[ParameterGroup]] = {}
        for group in groups:
            shards = []
            for source in group.fsdp_params:
                key = id(source.sharded_param)
                num_bytes = math.prod(source.padded_sharded_param_size) * source.sharded_param.element_size()
                shards.append(LocalShard(names[key], source, key in tables and num_bytes >= MIN_TABLE_BYTES))
                if source.sharded_param.is_meta:
                    raise ValueError(
                        f"parameter {names[key]!r} is on the meta device and has no values yet: see Module.to_empty()"
                    )
                if key in sparse:
                    raise ValueError(
                        f"{names[key]!r} gets sparse gradients, which FSDP cannot reduce: shard the model with"
                        " fully_shard(..., ignored_params=thinwire.embedding_tables(model))"
                    )
            meshes.setdefault(group.mesh_info.mesh, []).append(ParameterGroup(group, shards))
        if not meshes:
            raise ValueError("fully_shard left all parameters out: attach the model without it")
        largest = max(meshes, key=lambda mesh: mesh.size())
        return cls(meshes.pop(largest), [cls(units) for units in meshes.values()])

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shards, or None if there is one of each."""
        return internals.ranks_of(self.info, "replicate")

    @property
    def shards(self) -> dist.ProcessGroup | None:
        """The ranks that hold a parameter together, or None if each holds all of it."""
        return internals.ranks_of(self.info, "shard")

    def group(self) -> dist.ProcessGroup:
        """Return all ranks of the mesh, which train on other data. The first call is collective."""
        return internals.flattened(self.mesh).get_group()

    def dimension(self) -> dist.ProcessGroup:
        """Return the ranks among which thinwire sums: the replicas, or where there are none those with other shards."""
        return self.replicas or self.shards or self.group()

    def methods(self, dense: Dense) -> Methods:
        """Return how gradients travel: as this rank's shards, or whole, to be cut.

        All ranks choose by the largest shards, so that they choose alike.
        """
        world_size = self.dimension().size()
        pairs = [(unit, shard) for unit in self.units for shard in unit.shards if not shard.is_table]
        trained = [pair for pair in pairs if pair[1].source.sharded_param.requires_grad]
        if self.replicas is not None:
            wide = [Parameter(one.name, one.padded_shape, internals.reduced_dtype(unit.group)) for unit, one in trained]
            methods = _one_exact(assign(dense, wide))
            shapes = {shard.name: shard.shape for _, shard in trained if math.prod(shard.shape) > 0}
            compressed = {
                name: replace(plan, parameter=replace(plan.parameter, shape=shapes[name]))
                for name, plan in planned(methods, wide, world_size).items()
                if name in shapes
            }
            return Methods(methods, compressed)
        whole = [
            Parameter(one.name, _whole(one, world_size), internals.reduced_dtype(unit.group)) for unit, one in trained
        ]
        methods = _one_exact(assign(dense, whole))
        coded = [(one, method) for one in whole if isinstance(method := methods[one.name], Exchanged)]
        remembered = [one for one, method in coded if isinstance(method.compressor, ErrorFeedback)]
        num_bytes = sum(parameter.numel * parameter.working_dtype.itemsize for parameter in remembered)
        if num_bytes and self.dimension().rank() == 0:
            text = "error feedback remembers %d whole gradients on each rank: %.1f MB, which FSDP does not keep"
            logger.warning(text, len(remembered), num_bytes / 1e6)
        compressed = {
            one.name: Planned(one, method.compressor, scattered(method, one, world_size)) for one, method in coded
        }
        return Methods(methods, compressed)

    def checksum(self) -> list[float]:
        """Return which shards this rank has, and a number that replicas of them share: an exact sum of bits."""
        total = 0
        for unit in self.units:
            for shard in unit.shards:
                local = local_of(shard.source.sharded_param).detach().reshape(-1)
                bits = local.view({2: torch.int16, 4: torch.int32}.get(local.element_size(), torch.uint8))
                total = (31 * total + int(bits.sum())) % (1 << 52)
        return [float(self.shards.rank() if self.shards is not None else 0), float(total)]

    def compare(self, checksums: Sequence[Sequence[float]]) -> None:
        """Warn if replicas of a shard differ, given the `checksum` of each rank: nothing else would make them equal."""
        if len(set(map(tuple, checksums))) == len({shard for shard, _ in checksums}):
            return
        text = (
            "replicas of this FSDP model have other parameters, and stay different: build the model from the same seed"
            " on all ranks, or load a checkpoint into it before attach"
        )
        warn(text, 4)

    def names(self) -> list[str]:
        """Return the names of the parameters in shards, on all meshes."""
        mine = [shard.name for unit in self.units for shard in unit.shards]
        return [*mine, *(name for other in self.others for name in other.names())]

    def describe(self) -> str:
        """Return the mesh and the sharded parameters as text, equal on all ranks."""
        lines = [f"mesh {dict(zip(self.mesh.mesh_dim_names or 'rs', self.mesh.shape, strict=False))}"]
        for unit in self.units:
            for shard in unit.shards:
                parameter = shard.source.sharded_param
                lines.append(f"parameter {shard.name!r}: {parameter.dtype} {list(parameter.shape)}, sharded")
        return "\n".join([*lines, *(other.describe() for other in self.others)])


def sharding_of(model: nn.Module) -> Sharding | None:
    """Return the layout of a model that `fully_shard` or `replicate` was called on, or None for any other.

    Raises:
        ValueError: this torch does not have what thinwire needs of the model; or a layout that it does not synchronize.
    """
    instead = 'train without attach, under init_process_group("thinwire")'
    check_names("attach", instead, of_model=internals.needed(model))
    return Sharding.of(model) if is_sharded(model) else None


def _one_exact(methods: dict[str, str | Exchanged]) -> dict[str, str | Exchanged]:
    """Return methods that have one exact sum: FSDP reduces several gradients as one flat tensor."""
    exact = {method: name for name, method in methods.items() if isinstance(method, str)}
    if len(exact) > 1:
        (how, name), (other, by), *_ = exact.items()
        raise ValueError(
            f"{name!r} is {how!r} and {by!r} is {other!r} in dense=, and FSDP reduces the gradients of several"
            " parameters as one tensor: name one exact sum for all that are not compressed"
        )
    return methods


class ShardedHooks(ParameterHooks):
    """The plug of a model that FSDP laid out on a mesh.

    It averages shards over their replicas, and parameters that FSDP ignores over all ranks, as in a plain module. So
    are shards of tables that FSDP does not know (`RowShards`), over their replicas.

    Args:
        sharding: the layout.
        inside: the queues for shards, each on a lane of their group: on the mesh of the layout, and on others.
        count: counts the bytes that a rank sends in a reduce-scatter that stays FSDP's.
        reduces: called before each reduction of FSDP's.
        tables: the shards of tables with replicas, with a queue and a lane of these.
        hung: by a group of FSDP's, a lane of the same ranks, through whose connections FSDP sends.
        lost: called with what a collective of FSDP's raised; returns the error about the rank that failed, if any.
        rest: arguments of `ParameterHooks`, for the parameters that FSDP ignores.
    """

    can_hold = False

    def __init__(
        self,
        sharding: Sharding,
        inside: Mapping[Sharding, Buckets],
        count: Callable[[int], object],
        reduces: Callable[[], object],
        tables: Sequence[tuple[list[Trained], Buckets, Lane]],
        hung: Mapping[dist.ProcessGroup, Lane],
        lost: Callable[[BaseException], BaseException | None],
        *rest: Any,
    ) -> None:
        on = {unit: one for one in (sharding, *sharding.others) for unit in one.units}
        self._units, self._count = list(on), count
        self._inside, self._replicas = inside[sharding], sharding.replicas
        self._late: list[Waiting] = []
        super().__init__(*rest)
        _, ignored, lookups, _, *others = rest
        self.sends_at_end = ignored.is_of_model
        self._tables = [_Tables(self, trained, queue, lookups, lane, *others) for trained, queue, lane in tables]
        self._stock = [(unit.group.mesh_info, internals.collectives_of(unit.group)) for unit in self._units]
        compresses = any(self._inside.compresses(shard.name) for unit in sharding.units for shard in unit.shards)
        for unit, one in on.items():
            unit.watch(reduces)
            own = inside.get(one)
            gather, scatter = internals.collectives_of(unit.group)
            if one.shards in hung:
                gather, scatter = (Through(stock, one.shards, hung[one.shards], lost) for stock in (gather, scatter))
            if one is sharding and self._replicas is not None:
                unit.group.mesh_info = info = copy(unit.group.mesh_info)
                info.replicate_process_group = Replicas(self._replicas, partial(self._average, unit))
            elif own is not None and ((one is sharding and compresses) or own.has_lossless):
                scatter = Scatter(scatter, partial(self._scatter, unit, own, scatter))
            is_stock = (gather, scatter) == internals.collectives_of(unit.group)
            internals.set_collectives(unit.group, gather, scatter, None if is_stock else _refuse_to_choose)
        if self._lane.rank == 0:
            if compresses and sharding.others:
                names = ", ".join(shard.name for one in sharding.others for unit in one.units for shard in unit.shards)
                logger.warning("only gradients on the largest mesh are compressed: %s stay exact", names)
            num_shards = sum(len(unit.shards) for unit in sharding.units)
            how = "are averaged over replicas" if self._replicas is not None else "stay with FSDP's reduce-scatter"
            if self._replicas is None and (compresses or self._inside.has_lossless):
                how = "are compressed in the reduce-scatter" if compresses else "go to their owners without loss"
            ignored = f"{len(self.trained)} that it ignores are averaged over all ranks"
            logger.info("FSDP on %s: shards of %d parameters %s; %s", sharding.mesh, num_shards, how, ignored)

    @property
    def synchronizes(self) -> bool:
        """Whether the next backward pass averages over all ranks, as FSDP is set to."""
        return any(unit.is_reduced for unit in self._units)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which FSDP reduces nothing, see ``FSDPModule.set_requires_gradient_sync``."""
        groups = [unit.group for unit in self._units]
        before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
        for group in groups:
            group.reduce_grads = group.all_reduce_grads = False
        try:
            yield
        finally:
            for group, (reduces, all_reduces) in zip(groups, before, strict=True):
                group.reduce_grads, group.all_reduce_grads = reduces, all_reduces

    def finish(self) -> float:
        began = time.perf_counter()
        for one in self._tables:
            one.finish()
        self._inside.flush()
        blocked = time.perf_counter() - began
        return super().finish() - blocked

    def _send(self) -> None:
        super()._send()
        for one in self._tables:
            one._send()

    def take_in_flight(self) -> Sequence[Pending]:
        return [*super().take_in_flight(), *(work for one in self._tables for work in one.take_in_flight())]

    def deliver(self) -> None:
        self._late.clear()
        super().deliver()
        for one in self._tables:
            one.deliver()

    def reset(self) -> None:
        self._late.clear()
        super().reset()
        for one in self._tables:
            one.reset()

    def remove(self) -> None:
        super().remove()
        for one in self._tables:
            one.remove()
        for unit, (info, collectives) in zip(self._units, self._stock, strict=True):
            unit.release()
            unit.group.mesh_info = info
            internals.set_collectives(unit.group, *collectives)

    def _average(self, unit: ParameterGroup, flat: Tensor, op: Any) -> None:
        """Average a flat tensor of shards over their replicas, in place, or sum it if FSDP asks for that."""
        is_sum = op == dist.ReduceOp.SUM
        has_rows = not self._inside.is_of_model or (not is_sum and unit.may_be_late(flat))
        pending = self._inside.submit(self._contents_of(unit, flat, has_rows))
        assert self._replicas is not None
        then = partial(flat.mul_, self._replicas.size()) if is_sum else None
        self._finish(unit, flat, Waiting(pending, flat.device, then), not is_sum)

    def _scatter(
        self,
        unit: ParameterGroup,
        inside: Buckets,
        stock: Any,
        output: Tensor,
        flat: Tensor,
        group: dist.ProcessGroup,
        op: Any,
    ) -> None:
        """Leave the mean or sum of this rank's shards in ``output``; ``flat`` has a row for each rank."""
        rank, world_size = group.rank(), group.size()
        rows = flat.view(world_size, -1)
        compressed, results, rest = [], [], []
        for shard, start in unit.cut(output.numel()):
            self._clock.ready(shard.name)
            piece = slice(start, start + math.prod(shard.padded_shape))
            if inside.compresses(shard.name):
                gradient = rows[:, piece].reshape(_whole(shard, world_size))
                compressed.append((shard.name, gradient))
                results.append((output[piece], gradient.view(world_size, -1)[rank]))
            else:
                rest.append((output[piece], rows[:, piece]))
        scale = 1.0 if op == dist.ReduceOp.AVG else float(world_size)
        if scale != 1.0 and op != dist.ReduceOp.SUM:  # premultiplied
            scale /= unit.group.gradient_divide_factor
        contents = Contents(output, (), compressed=tuple(compressed), name=unit.name)
        pieces = [piece for piece, _ in rest]
        sums = output
        if compressed and rest:
            sums, flat = torch.cat(pieces), torch.cat([part for _, part in rest], 1).view(-1)
            results += zip(pieces, sums.split([piece.numel() for piece in pieces]), strict=True)
        whole = Other(unit.name, flat, inside.alike)
        is_lossless = bool(rest) and inside.goes_lossless(unit.name, [whole])
        if is_lossless:
            contents = replace(contents, scattered=(flat, sums, scale / world_size))
        pending = inside.submit(contents)
        if rest and not is_lossless:
            stock(output_tensor=sums, input_tensor=flat, group=group, op=op)
            self._count(reduce_scatter_bytes(flat.nbytes, world_size, flat.device))
        is_last = op == dist.ReduceOp.AVG and not unit.has_replicas  # else FSDP divides or adds next
        store = partial(_store, results, len(compressed), scale)
        self._finish(unit, output, Waiting(pending, output.device, store), is_last)

    def _finish(self, unit: ParameterGroup, flat: Tensor, waiting: Waiting, may_be_late: bool = True) -> None:
        """Wait now, or at the end of backward if nobody reads the tensor before and one runs: not in a pipeline."""
        self._late.append(waiting)
        if may_be_late and unit.may_be_late(flat) and self._begin():
            self.in_flight.append(waiting)  # type: ignore[arg-type]  # it waits like one
            return
        self._inside.flush()
        for one in self._late:  # FSDP may add to an earlier one next
            one.wait()
        self._late.clear()

    def _contents_of(self, unit: ParameterGroup, flat: Tensor, has_rows: bool) -> Contents:
        """Return the parts of a flat tensor; tables are none where their sum would have to end before backward does."""
        name = unit.name
        tables, compressed, others = [], [], []
        done = 0
        for shard, start in unit.cut(flat.numel()):
            self._clock.ready(shard.name)
            numel = math.prod(shard.shape)
            gradient = flat[start : start + numel].view(shard.shape)
            if numel and shard.is_table and has_rows and not self._inside.leaves(shard.name):
                tables.append(TableGradient(shard.name, gradient))
            elif numel and self._inside.compresses(shard.name):
                compressed.append((shard.name, gradient))
            else:
                continue
            others.append(flat[done:start])
            done = start + numel
        others.append(flat[done:])
        of = f"elements of the shards of {name}"
        named = [Other(of, other, self._inside.alike) for other in others if other.numel()]
        return Contents(flat, tuple(tables), tuple(named), compressed=tuple(compressed), name=name)


class _Tables(ParameterHooks):
    """The shards of tables that FSDP does not know, over their replicas; FSDP's settings say when."""

    def __init__(self, plug: ShardedHooks, trained: Sequence[Trained], queue: Buckets, *rest: Any) -> None:
        self._plug = weakref.ref(plug)
        super().__init__(trained, queue, *rest)
        self.sends_at_end = queue.is_of_model

    @property
    def synchronizes(self) -> bool:
        plug = self._plug()
        return plug is not None and plug.synchronizes


class Waiting:
    """A reduction under way, and what is to be done once when it has ended, on the stream that is the current one here.

    Whoever waits makes the stream that is the current one there wait for that.
    """

    def __init__(self, pending: Pending, device: torch.device, then: Callable[[], object] | None = None) -> None:
        self._pending, self._then, self._device = pending, then, device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def wait(self) -> None:
        stream, then, self._then = self._stream, self._then, None
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self._pending.wait()
            if then is not None:
                then()
        if stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(stream)


class Replicas(dist.ProcessGroup):
    """A process group whose all-reduce is thinwire's, for FSDP, which calls nothing else of it.

    Args:
        group: the group that it replaces.
        average: called with a tensor to reduce in place, and the operation.
    """

    def __init__(self, group: dist.ProcessGroup, average: Callable[[Tensor, Any], None]) -> None:
        super().__init__(group.rank(), group.size())  # pyrefly: ignore[missing-argument, bad-argument-type]
        self._average = average

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> None:  # type: ignore[override]
        """Average or sum one tensor over the replicas, in place; its values may arrive until backward ends."""
        (tensor,) = tensors
        self._average(tensor, options.reduceOp)


class Scatter:
    """A reduce-scatter that replaces FSDP's, and allocates as that does."""

    def __init__(self, stock: Any, reduce: Callable[..., None]) -> None:
        self.allocate, self._reduce = stock.allocate, reduce

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._reduce(output_tensor, input_tensor, group, op)


def _refuse_to_choose(*unused: object) -> NoReturn:
    raise ValueError(
        "FSDP's collectives are thinwire's while it is attached: choose who allocates for them before thinwire.attach"
    )


class Through:
    """A collective of FSDP's through connections that hang up when a rank fails, whose error names that rank.

    Args:
        stock: makes the collective.
        group: the group of it.
        lane: a lane of the same ranks.
        lost: as of `ShardedHooks`.
    """

    def __init__(
        self, stock: Any, group: dist.ProcessGroup, lane: Lane, lost: Callable[[BaseException], BaseException | None]
    ) -> None:
        self.allocate, self._stock = stock.allocate, stock
        self._group, self._own, self._naming = group, lane.native_group(), partial(naming, lane, lost)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *rest: Any, **options: Any
    ) -> dist.Work | None:
        group = self._own if group == self._group else group
        with self._naming():
            work = self._stock(output_tensor, input_tensor, group, *rest, **options)
        return None if work is None else _Named(work, self._naming)


class _Named(dist.Work):
    """A work of torch's whose error names the rank that failed."""

    def __init__(self, work: dist.Work, naming: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._work, self._naming = work, naming

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._naming():
            return self._work.wait() if timeout is None else self._work.wait(timeout)


@contextmanager
def naming(lane: Lane, lost: Callable[[BaseException], BaseException | None]) -> Iterator[None]:
    """Raise what ``lost`` returns for torch's error about a connection, or that the lane has broken off meanwhile."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # the latter of a group that is destroyed
        if (other := lost(error) if is_of_a_peer(error) else None) is not None:
            raise other from error
        lane.check("a collective of FSDP's")
        raise


def _store(results: Sequence[tuple[Tensor, Tensor]], count: int, scale: float) -> None:
    """Copy sums to where FSDP expects them; the first ``count`` are means, which are scaled."""
    for number, (target, value) in enumerate(results):
        target.copy_(value)
        if number < count and scale != 1.0:
            target.mul_(scale)


def embedding_tables(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of embeddings, to leave out of sharding: their gradients then travel as rows.

    A shard of a table has to be gathered as a whole before each forward, and its gradient is dense. Left out, the table
    stays whole on each rank, which costs memory and is logged, and `attach` synchronizes its few non-zero rows. Without
    `attach` nobody averages the gradients of parameters that FSDP ignores: the ranks drift apart.

    Call it before ``fully_shard``, and pass the result to each call.

    Example:
        >>> tables = thinwire.embedding_tables(model)                                     # doctest: +SKIP
        >>> for block in model.blocks:                                                    # doctest: +SKIP
        ...     fully_shard(block, ignored_params=tables)
        >>> fully_shard(model, ignored_params=tables)                                     # doctest: +SKIP
        >>> sync = thinwire.attach(model)                                                 # doctest: +SKIP
    """
    tables = {weight for weight in tables_of(model) if weight.requires_grad}
    names = [name for name, parameter in model.named_parameters() if parameter in tables]
    num_bytes = sum(table.numel() * table.element_size() for table in tables)
    logger.info("left out of sharding: %s, %.1f MB on each rank", ", ".join(names) or "nothing", num_bytes / 1e6)
    return tables


def _whole(shard: LocalShard, world_size: int) -> tuple[int, ...]:
    """Return the shape of all shards of a parameter, one below the other."""
    rows, *rest = shard.padded_shape
    return (world_size * rows, *rest)
