"""Gradients of models that FSDP2 laid out on a mesh: by `fully_shard` on one or two dimensions, or by `replicate`.

FSDP sums the gradients of a parameter group as one flat tensor: a reduce-scatter leaves each rank the part of its
shards, and on a mesh with a dimension of replicas an all-reduce follows. Its settings (accumulation, dtypes, divisors,
hooks) are applied around these two collectives, so thinwire takes the place of the collectives and of nothing else: the
process group of the replicas is one that averages through `Buckets`, and sees each shard as a gradient of its own.

All private attributes of FSDP are read in this file.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.compress.assign import assign
from thinwire.compress.base import Parameter
from thinwire.compress.memory import ErrorFeedback
from thinwire.compress.reduction.choose import AUTO, scattered
from thinwire.errors import ThinwireError
from thinwire.gradients.buckets import Buckets, Contents, Pending
from thinwire.gradients.compression import Compression, Planned
from thinwire.gradients.model import is_sharded, local_of
from thinwire.gradients.parameters import ParameterHooks
from thinwire.gradients.tables import MIN_TABLE_BYTES, TableGradient, tables_of

logger = logging.getLogger("thinwire")


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

    def is_reduced_next(self, with_zeros: bool) -> bool:
        """Return whether FSDP has a gradient to reduce next, of this backward pass or of earlier ones, or zeros."""
        whole = getattr(self.source, "_unsharded_param", None)
        if whole is None:
            return False
        has_gradient = self.source.unsharded_accumulated_grad is not None or whole.grad is not None
        return has_gradient or (with_zeros and whole.requires_grad)

    @property
    def is_read_early(self) -> bool:
        """Whether the gradient is read before backward ends: added to one that is there, or seen by a hook."""
        parameter = self.source.sharded_param
        return parameter.grad is not None or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


class ParameterGroup:
    """The parameters that FSDP communicates together: those of one call of `fully_shard`.

    Args:
        group: FSDP's parameter group.
        shards: all its parameters, in its order.
    """

    def __init__(self, group: Any, shards: Sequence[LocalShard]) -> None:
        self.group, self.shards = group, shards
        self._ready: list[LocalShard] = []

    @property
    def name(self) -> str:
        """Name for messages and traces."""
        return f"{self.shards[0].name} and {len(self.shards) - 1} more"

    def watch(self, begin: Callable[[], object]) -> None:
        """From now on know which parameters a reduction is of, and call ``begin`` before each."""
        reduce = self.group.post_backward

        def post_backward(*unused: Any) -> None:
            with_zeros = getattr(self.group, "reduce_scatter_unused_params", False)
            self._ready = [shard for shard in self.shards if shard.is_reduced_next(with_zeros)]
            if self._ready and self.is_reduced:
                begin()
            reduce(*unused)

        self.group.post_backward = post_backward

    @property
    def is_reduced(self) -> bool:
        """Whether FSDP reduces gradients in the next backward pass, and over replicas too where there are any."""
        return bool(self.group.reduce_grads and (self.group.all_reduce_grads or not self.has_replicas))

    @property
    def has_replicas(self) -> bool:
        """Whether FSDP all-reduces what a reduce-scatter leaves, if only over one rank."""
        return hasattr(self.group.mesh_info, "replicate_process_group")

    def release(self) -> None:
        """Undo `watch`."""
        vars(self.group).pop("post_backward", None)

    def cut(self, numel: int) -> list[tuple[LocalShard, int]]:
        """Return the shards in a flat tensor of ``numel`` elements, which is being reduced, and where each begins."""
        places, end = [], 0
        for shard in self._ready:
            places.append((shard, end))
            end += math.prod(shard.padded_shape)
        if end != numel:
            raise ThinwireError(
                f"FSDP reduces {numel} elements of {self.group}, and its {len(places)} parameters with gradients have"
                f" {end}: this torch lays them out in another way than thinwire knows. Call Synchronizer.detach()"
            )
        return places

    def may_be_late(self, dtype: object) -> bool:
        """Return whether nobody reads the reduced tensor before backward has ended."""
        if getattr(self.group, "_all_reduce_hook", None) is not None:
            return False
        return all(shard.source.orig_dtype == dtype and not shard.is_read_early for shard in self._ready)


class Sharding:
    """The layout of a model on a mesh.

    Args:
        model: the outermost module with `fully_shard` or `replicate`.

    Raises:
        ValueError: a layout that cannot be synchronized; the message says what to do.
    """

    def __init__(self, model: nn.Module) -> None:
        groups = _groups_of(model)
        for group in groups:
            group._to_sharded()  # after an evaluation, or a failed pass, modules may have whole parameters
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        tables = {id(weight) for weight in tables_of(model)}
        sparse = {id(entry.weight) for entry in model.modules() if getattr(entry, "sparse", False) is True}
        self.units: list[ParameterGroup] = []
        for group in groups:
            shards = []
            for source in group.fsdp_params:
                key = id(source.sharded_param)
                num_bytes = math.prod(source.padded_sharded_param_size) * source.sharded_param.element_size()
                shards.append(LocalShard(names[key], source, key in tables and num_bytes >= MIN_TABLE_BYTES))
                if key in sparse:
                    raise ValueError(
                        f"{names[key]!r} gets sparse gradients, which FSDP cannot reduce: shard the model with"
                        " fully_shard(..., ignored_params=thinwire.embedding_tables(model))"
                    )
            self.units.append(ParameterGroup(group, shards))
        if not self.units:
            raise ValueError("fully_shard left all parameters out: attach the model without it")
        infos = [unit.group.mesh_info for unit in self.units]
        if any(info.mesh != infos[0].mesh for info in infos):
            raise ValueError("parameters of this model are on several meshes: attach takes one mesh for all of them")
        self.info = infos[0]
        self.mesh = self.info.mesh
        _check(model, self.units, self.info)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shards, or None if there is one of each."""
        group: dist.ProcessGroup | None = getattr(self.info, "replicate_process_group", None)
        return group if group is not None and group.size() > 1 else None

    @property
    def shards(self) -> dist.ProcessGroup | None:
        """The ranks that hold a parameter together, or None if each holds all of it."""
        group: dist.ProcessGroup | None = getattr(self.info, "shard_process_group", None)
        return group if group is not None and group.size() > 1 else None

    def group(self) -> dist.ProcessGroup:
        """Return all ranks that train on other data: those of the mesh. The first call is collective."""
        mesh = self.mesh if self.mesh.ndim == 1 else self.mesh._flatten()
        group: dist.ProcessGroup = mesh.get_group()
        return group

    def dimension(self) -> dist.ProcessGroup:
        """Return the ranks among which thinwire sums: the replicas, or where there are none those with other shards."""
        return self.replicas or self.shards or self.group()

    def plans(self, compression: Compression) -> dict[str, Planned]:
        """Return the method of each compressed parameter, by name: of this rank's shard, or of the whole to be cut.

        All ranks choose by the largest shards, so that they choose alike.
        """
        world_size = self.dimension().size()
        trained = [
            (unit, shard)
            for unit in self.units
            for shard in unit.shards
            if shard.source.sharded_param.requires_grad and not shard.is_table
        ]
        if self.replicas is not None:
            wide = [Parameter(shard.name, shard.padded_shape, _reduced_dtype(unit, shard)) for unit, shard in trained]
            plans = compression.plans(wide, world_size)
            shapes = {shard.name: shard.shape for _, shard in trained if math.prod(shard.shape) > 0}
            return {
                name: replace(plan, parameter=replace(plan.parameter, shape=shapes[name]))
                for name, plan in plans.items()
                if name in shapes
            }
        if compression.reduction != AUTO:
            raise ValueError(
                f"exchange={compression.reduction!r} is for means that all ranks get, and FSDP's shards go to one rank"
                " each: leave it out"
            )
        whole = [
            Parameter(shard.name, _whole(shard, world_size), _reduced_dtype(unit, shard)) for unit, shard in trained
        ]
        compressors = assign(compression.compress, whole)
        found = {parameter.name: parameter for parameter in whole if parameter.name in compressors}
        remembered = [one for one in found.values() if isinstance(compressors[one.name], ErrorFeedback)]
        num_bytes = sum(parameter.numel * parameter.working_dtype.itemsize for parameter in remembered)
        if num_bytes and self.dimension().rank() == 0:
            logger.warning(
                "error feedback remembers %d whole gradients on each rank: %.1f MB, which FSDP does not keep",
                len(remembered),
                num_bytes / 1e6,
            )
        return {
            name: Planned(parameter, compressors[name], scattered(compressors[name], parameter, world_size))
            for name, parameter in found.items()
        }

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
        logger.warning(text)
        warnings.warn(text, stacklevel=4)

    def names(self) -> list[str]:
        """Return the names of the parameters in shards."""
        return [shard.name for unit in self.units for shard in unit.shards]

    def describe(self) -> str:
        """Return the mesh and the sharded parameters as text, equal on all ranks."""
        lines = [f"mesh {dict(zip(self.mesh.mesh_dim_names or 'rs', self.mesh.shape, strict=False))}"]
        for unit in self.units:
            for shard in unit.shards:
                parameter = shard.source.sharded_param
                lines.append(f"parameter {shard.name!r}: {parameter.dtype} {list(parameter.shape)}, sharded")
        return "\n".join(lines)


def sharding_of(model: nn.Module) -> Sharding | None:
    """Return the layout of a model that `fully_shard` or `replicate` was called on, or None for any other."""
    return Sharding(model) if is_sharded(model) else None


class ShardedHooks(ParameterHooks):
    """The plug of a model that FSDP laid out on a mesh.

    It averages shards over their replicas, and parameters that FSDP ignores over all ranks, as those of a plain module.

    Args:
        sharding: the layout.
        inside: the queue for shards, on a lane of their group.
        count: counts a reduce-scatter of bytes that stays FSDP's.
        rest: arguments of `ParameterHooks`, for the parameters that FSDP ignores.
    """

    def __init__(self, sharding: Sharding, inside: Buckets, count: Callable[[int], object], *rest: Any) -> None:
        self._units, self._count = sharding.units, count
        self._inside, self._replicas = inside, sharding.replicas
        self._late: list[Waiting] = []
        super().__init__(*rest)
        self._stock = [(unit.group.mesh_info, unit.group._reduce_scatter_comm) for unit in self._units]
        compresses = any(inside.compresses(shard.name) for unit in self._units for shard in unit.shards)
        for unit in self._units:
            unit.watch(self._enter)
            if self._replicas is not None:
                unit.group.mesh_info = info = copy(unit.group.mesh_info)
                info.replicate_process_group = Replicas(self._replicas, partial(self._average, unit))
            elif compresses or inside.has_lossless:
                stock = unit.group._reduce_scatter_comm
                unit.group._reduce_scatter_comm = Scatter(stock, partial(self._scatter, unit, stock))
        if self._lane.rank == 0:
            num_shards = sum(len(unit.shards) for unit in self._units)
            how = "are averaged over replicas" if self._replicas is not None else "stay with FSDP's reduce-scatter"
            if self._replicas is None and (compresses or inside.has_lossless):
                how = f"are {'compressed' if compresses else 'coded without loss'} in the reduce-scatter"
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

    def deliver(self) -> None:
        self._late.clear()
        super().deliver()

    def reset(self) -> None:
        self._late.clear()
        super().reset()

    def remove(self) -> None:
        super().remove()
        for unit, (info, comm) in zip(self._units, self._stock, strict=True):
            unit.release()
            unit.group.mesh_info, unit.group._reduce_scatter_comm = info, comm

    def _enter(self) -> None:
        self._begin()

    def _average(self, unit: ParameterGroup, flat: Tensor, op: Any) -> None:
        """Average a flat tensor of shards over their replicas, in place, or sum it if FSDP asks for that."""
        pending = self._inside.submit(self._contents_of(unit, flat))
        if op == dist.ReduceOp.SUM:
            assert self._replicas is not None
            self._finish(unit, flat, Waiting(pending, partial(flat.mul_, self._replicas.size())), False)
        else:
            self._finish(unit, flat, Waiting(pending))

    def _scatter(
        self, unit: ParameterGroup, stock: Any, output: Tensor, flat: Tensor, group: dist.ProcessGroup, op: Any
    ) -> None:
        """Leave the mean or sum of this rank's shards in ``output``; ``flat`` has a row for each rank."""
        rank, world_size = group.rank(), group.size()
        rows = flat.view(world_size, -1)
        compressed, results, rest = [], [], []
        for shard, start in unit.cut(output.numel()):
            self._clock.ready(shard.name)
            piece = slice(start, start + math.prod(shard.padded_shape))
            if self._inside.compresses(shard.name):
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
        is_lossless = bool(rest) and self._inside.goes_lossless(unit.name, [flat])
        if is_lossless:
            contents = replace(contents, scattered=(flat, sums, scale / world_size))
        pending = self._inside.submit(contents)
        if rest and not is_lossless:
            stock(output_tensor=sums, input_tensor=flat, group=group, op=op)
            self._count(flat.nbytes)
        is_last = op == dist.ReduceOp.AVG and not unit.has_replicas  # else FSDP divides or adds next
        self._finish(unit, output, Waiting(pending, partial(_store, results, len(compressed), scale)), is_last)

    def _finish(self, unit: ParameterGroup, flat: Tensor, waiting: Waiting, may_be_late: bool = True) -> None:
        """Wait now, or at the end of backward if nobody reads the tensor before and one runs: not in a pipeline."""
        self._late.append(waiting)
        if may_be_late and flat.device.type == "cpu" and unit.may_be_late(flat.dtype) and self._begin():
            self._expect(waiting)  # type: ignore[arg-type]  # it waits like one
            return
        for one in self._late:  # FSDP may add to an earlier one next
            one.wait()
        self._late.clear()

    def _contents_of(self, unit: ParameterGroup, flat: Tensor) -> Contents:
        name = unit.name
        tables, compressed, others = [], [], []
        done = 0
        for shard, start in unit.cut(flat.numel()):
            self._clock.ready(shard.name)
            numel = math.prod(shard.shape)
            gradient = flat[start : start + numel].view(shard.shape)
            if numel and shard.is_table and not self._inside.leaves(shard.name):
                tables.append(TableGradient(shard.name, gradient))
            elif numel and self._inside.compresses(shard.name):
                compressed.append((shard.name, gradient))
            else:
                continue
            others.append(flat[done:start])
            done = start + numel
        others.append(flat[done:])
        named = [(f"elements of the shards of {name}", other) for other in others if other.numel()]
        return Contents(flat, tuple(tables), tuple(named), compressed=tuple(compressed), name=name)


class Waiting:
    """A reduction under way, and what is to be done once when it has ended."""

    def __init__(self, pending: Pending, then: Callable[[], object] | None = None) -> None:
        self._pending, self._then = pending, then

    def wait(self) -> None:
        self._pending.wait()
        then, self._then = self._then, None
        if then is not None:
            then()


class Replicas(dist.ProcessGroup):
    """A process group whose all-reduce is thinwire's, for FSDP, which calls nothing else of it.

    Args:
        group: the group in whose place it is.
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
    """A reduce-scatter in the place of FSDP's, which allocates as that does."""

    def __init__(self, stock: Any, reduce: Callable[..., None]) -> None:
        self.allocate, self._reduce = stock.allocate, reduce

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._reduce(output_tensor, input_tensor, group, op)


def _store(results: Sequence[tuple[Tensor, Tensor]], count: int, scale: float) -> None:
    """Copy sums to where FSDP expects them; the first ``count`` are means, which are scaled."""
    for number, (place, value) in enumerate(results):
        place.copy_(value)
        if number < count and scale != 1.0:
            place.mul_(scale)


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


def _groups_of(model: nn.Module) -> list[Any]:
    """Return FSDP's parameter groups, each once."""
    found: dict[int, Any] = {}
    for module in filter(is_sharded, model.modules()):
        state = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 has several of a module
        for group in (state._fsdp_param_group,) if groups is None else groups:
            if group is not None:
                found[id(group)] = group
    needed = ("fsdp_params", "mesh_info", "post_backward", "reduce_grads", "all_reduce_grads", "_to_sharded")
    missing = [name for group in found.values() for name in needed if not hasattr(group, name)]
    if missing:
        raise ValueError(
            f"this torch has FSDP parameter groups without {missing[0]}: thinwire was tested with those of torch 2.13"
        )
    return list(found.values())


def _check(model: nn.Module, units: Sequence[ParameterGroup], info: Any) -> None:
    for unit in units:
        if type(unit.group.offload_policy).__name__ == "CPUOffloadPolicy":
            raise ValueError("attach does not take models with CPUOffloadPolicy: leave out offload_policy=")
        if isinstance(getattr(unit.group.mesh_info, "replicate_process_group", None), Replicas):
            raise ValueError("thinwire is attached to a part of this model already: call detach() on its Synchronizer")
        for shard in unit.shards:
            if shard.source.sharded_param.is_meta:
                raise ValueError(
                    f"parameter {shard.name!r} is on the meta device and has no values yet: see Module.to_empty()"
                )
    if info.mesh.ndim != sum(info_dim is not None for info_dim in (info.shard_mesh_dim, info.replicate_mesh_dim)):
        raise ValueError("attach takes FSDP models on a mesh of one or two data-parallel dimensions: pass mesh[...]")


def _whole(shard: LocalShard, world_size: int) -> tuple[int, ...]:
    """Return the shape of all shards of a parameter, one below the other."""
    rows, *rest = shard.padded_shape
    return (world_size * rows, *rest)


def _reduced_dtype(unit: ParameterGroup, shard: LocalShard) -> Any:
    """Return the dtype in which FSDP reduces a gradient."""
    policy = unit.group.mp_policy
    return policy.reduce_dtype or policy.param_dtype or shard.source.sharded_param.dtype
