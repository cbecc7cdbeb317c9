"""TorchRec: replicated tables as rows, and 2D-parallel tables kept equal over their replicas by the rows touched.

`DistributedModelParallel` wraps dense parameters in one DDP, and each group of replicated (``data_parallel``) tables in
another, which no ``named_modules`` shows. Sharded tables are on one rank, and their gradients cross no network.
`DMPCollection` has replicas of sharded tables, and its ``sync()`` averages them whole; but the fused optimizer changes
only rows that were looked up, and all others are equal on all replicas already. Read on torchrec 1.9.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.attach import attach as attach_model
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.errors import ThinwireError, logger
from thinwire.gradients.synchronizer import Synchronizer
from thinwire.gradients.tables import lookups_of_features
from thinwire.outer import OuterLoop, OuterRecipe, local_sgd
from thinwire.outer import attach as attach_outer


def attach(model: Any, outer: OuterRecipe | None = None, tables: Any = None, **options: Any) -> DmpSynchronizer:
    """Synchronize a `DistributedModelParallel` or `DMPCollection` through thinwire; all ranks call it.

    Gradients of replicated tables travel as rows. Sharded tables are left alone, and tables of a `DMPCollection` are
    averaged by ``sync()`` in the rows that any replica touched since the last one, with the optimizer's state. The
    first ``sync()``, and each after somebody else wrote to a table (``load_state_dict``), averages whole tables.

    With ``outer`` or ``tables`` a ``sync()`` is an inner step of an outer loop over the replicas of each table.

    Args:
        model: a `DistributedModelParallel` whose data parallelism is initialized.
        outer: a recipe of `thinwire.outer`, such as ``diloco(every=8)``, by which replicas of tables are averaged; each
            keeps the state of its own fused optimizer. With ``tables`` alone it is ``local_sgd(every=1)``.
        tables: how the differences of replicas travel, as `thinwire.outer.attach` takes ``dense=``: a compressor, which
            has a memory; by default they travel as rows.
        options: keyword arguments of `thinwire.attach`. ``rows`` and ``timeout`` are for replicated tables too, all
            others for dense parameters only.

    Raises:
        ValueError: a model with nothing to synchronize, or whose replicas are synchronized in another way already; and
            what `thinwire.attach` raises.

    Example:
        >>> model = DMPCollection(...)                                                  # doctest: +SKIP
        >>> sync = thinwire.integrations.torchrec.attach(model)                         # doctest: +SKIP
        >>> loss.backward(); optimizer.step(); model.sync()                             # doctest: +SKIP
    """
    if not hasattr(model, "_dmp_wrapped_module"):
        raise ValueError(f"{type(model).__name__} is no DistributedModelParallel: use thinwire.attach(model)")
    models = dict(_data_parallel(model))
    replicas = ReplicaSync(model) if hasattr(model, "sync") else None
    recipe = local_sgd(every=1) if outer is None and tables is not None else outer
    if replicas is None and recipe is not None:
        raise ValueError("outer= and tables= are for the replicas of a DMPCollection: leave them out")
    if not models and replicas is None:
        raise ValueError(
            "all parameters of this DistributedModelParallel are sharded, so no gradient is synchronized; with"
            " init_data_parallel=False call model.init_data_parallel() before attach"
        )
    parts: dict[str, Synchronizer | OuterLoop] = {}
    of_tables = {name: value for name, value in options.items() if name in ("rows", "timeout")}
    with ExitStack() as undo:
        for name, ddp in models.items():
            parts[name] = attach_model(ddp, **(of_tables if name else options))
            undo.callback(parts[name].detach)
        if replicas is not None and recipe is not None:
            of_loops = of_tables if tables is None else {**of_tables, "dense": tables}
            for name, loop in replicas.loops(recipe, of_loops):
                parts[name] = loop
                undo.callback(loop.detach)
        if replicas is not None:
            replicas.start()
        undo.pop_all()
    sharded = [f"{name} {plan.sharding_type}" for module in model.plan.plan.values() for name, plan in module.items()]
    logger.info("TorchRec: attached to %s; tables: %s", [name or "dense" for name in parts], ", ".join(sharded))
    return DmpSynchronizer(parts, replicas)


def _data_parallel(model: Any) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Yield the DDP of dense parameters by the name "", and each DDP of replicated tables, which are in plain lists."""
    if isinstance(model._dmp_wrapped_module, DistributedDataParallel):
        yield "", model._dmp_wrapped_module
    for name, module in model.module.named_modules():
        for index, lookup in enumerate(getattr(module, "_lookups", ())):
            if isinstance(lookup, DistributedDataParallel):
                yield f"{name}._lookups.{index}", lookup


class DmpSynchronizer:
    """The synchronizations of one model: of its dense parameters, of replicated tables, and of replicas.

    Args:
        parts: by the name of the module of TorchRec that has a DDP of its own; "" for dense parameters; and outer loops
            of replicas.
        replicas: replicas of sharded tables, or None without 2D parallelism.
    """

    def __init__(self, parts: dict[str, Synchronizer | OuterLoop], replicas: ReplicaSync | None) -> None:
        self.parts, self.replicas = parts, replicas

    def stats(self) -> dict[str, float]:
        """Return the statistics of all parts added up; see `Synchronizer.stats` and `ReplicaSync.stats`."""
        total: dict[str, float] = {} if self.replicas is None else self.replicas.stats()
        for part in self.parts.values():
            for name, value in part.stats().items():
                is_count = name in ("comm/steps", "comm/optimizer_steps")
                total[name] = max(total.get(name, 0.0), value) if is_count else total.get(name, 0.0) + value
        return total

    def table(self) -> list[dict[str, str | int | float]]:
        """Return the rows of `Synchronizer.table` of all parts, with the names of TorchRec's modules before theirs."""
        return [
            {**row, "name": f"{part}.{row['name']}" if part else row["name"]}
            for part, sync in self.parts.items()
            for row in sync.table()
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of backward passes inside locally."""
        with ExitStack() as stack:
            for part in self.parts.values():
                if isinstance(part, Synchronizer):
                    stack.enter_context(part.no_sync())
            yield

    def synchronize(self) -> None:
        """End the rounds of outer loops, so that all replicas are alike; on all ranks."""
        for part in self.parts.values():
            if isinstance(part, OuterLoop):
                part.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all parts, see `Synchronizer.state_dict`. Replicas have none: call ``sync()`` before."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank.

        Raises:
            ValueError: a state of a model with other parts; and what `Synchronizer.load_state_dict` raises.
        """
        if set(state) != set(self.parts):
            raise ValueError(f"a state of the parts {sorted(state)}, and this model has {sorted(self.parts)}")
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def detach(self) -> None:
        """Return the model to TorchRec's own synchronization, on all ranks."""
        for part in self.parts.values():
            part.detach()
        if self.replicas is not None:
            self.replicas.stop()


@dataclass(eq=False)
class _Replicated:
    """A table, or the part of it in this shard, that other ranks have too.

    Args:
        weight: [num_rows, width].
        state: of the optimizer, [num_rows] or [num_rows, width].
        touched: bool [num_rows], rows looked up since weights were averaged; a view of its kernel's.
        pending: bool [num_rows], rows of any replica whose ``state`` was not averaged since.
    """

    weight: Tensor
    state: Tensor
    touched: Tensor
    pending: Tensor
    versions: tuple[int, int] = (-1, -1)  # of the tensors after the last average

    @property
    def is_edited(self) -> bool:
        """Whether somebody wrote to it: fused optimizers do not raise the version counter, all else does."""
        return self.versions != (self.weight._version, self.state._version)


class ReplicaSync:
    """Replicas of the sharded tables of a `DMPCollection`, kept equal by the rows that any of them touched.

    Ranks of a replica group gather the ids that they touched; the rows of the union are averaged by an all-reduce. A
    row that no replica touched is equal on all. Weights, and the state that rowwise Adagrad has, are averaged as
    TorchRec averages them, so results differ by rounding only.

    Args:
        model: the `DMPCollection`, with fused optimizers that change nothing but rows looked up.

    Raises:
        ValueError: another all-reduce was set, sharded relay, ``FULLY_SHARDED``, or zero-collision hashing.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._steps: dict[int, torch.optim.Optimizer] = {}  # of outer loops, by id() of the first table
        self._tables: dict[int, _Replicated] = {}  # by id() of weights and states, which the model keeps
        self._hooks: list[Any] = []
        self._sent_bytes = self._dense_bytes = self._rows = 0
        try:
            taken = model._custom_all_reduce or model._all_reduce_hook or model._use_sharded_relay
            contexts, _ = model._ctxs, model.set_all_reduce_hook
        except AttributeError as error:
            raise ThinwireError(f"thinwire reads DMPCollection as it is in torchrec 1.9; here, {error}") from error
        if taken:
            raise ValueError("this DMPCollection has an all-reduce of its own (custom, hook, relay): leave it out")
        for context in contexts:
            if context.hash_zch_modules or context.sharding_strategy.name == "FULLY_SHARDED":
                raise ValueError("with FULLY_SHARDED or zero-collision hashing there are no whole tables to average")
            self._add(context)

    def _add(self, context: Any) -> None:
        weights = {dtype: iter(tensors) for dtype, tensors in context.weights_by_dtype.items()}
        states = {dtype: iter(tensors) for dtype, tensors in context.optimizer_tensors_by_dtype.items()}
        for kernel, _ in context.modules_to_sync:  # in TorchRec's order
            of_weights, of_states = kernel.split_embedding_weights(), kernel.get_optimizer_state()
            touched = torch.zeros(sum(map(len, of_weights)), dtype=torch.bool, device=of_weights[0].device)
            parts = touched.split([len(weight) for weight in of_weights])
            for weight, state, part in zip(of_weights, of_states, parts, strict=True):
                table = _Replicated(next(weights[weight.dtype]), next(states[state["sum"].dtype]), part, part.clone())
                self._tables[id(table.weight)] = self._tables[id(table.state)] = table
            self._hooks.append((kernel, touched))

    def loops(self, recipe: OuterRecipe, options: dict[str, Any]) -> Iterator[tuple[str, OuterLoop]]:
        """Begin outer loops of the tables of each group of replicas and dtype, whose steps are calls of ``sync()``."""
        if recipe.in_background:
            raise ValueError("fused optimizers write to tables at any time: take outer=diloco(..., delay=1) instead")
        for number, context in enumerate(self._model._ctxs):
            for dtype, weights in context.weights_by_dtype.items():
                model = nn.ModuleList(nn.Embedding.from_pretrained(weight, freeze=False) for weight in weights)
                if "dense" in options:  # compressed, and not sent as rows
                    model = nn.ParameterList(table.weight for table in model)
                model.steps = count = nn.Parameter(weights[0].new_zeros(1))  # fused optimizers train all others
                self._steps[id(weights[0])] = steps = torch.optim.SGD([count], 0.0)
                loop = attach_outer(model, steps, recipe, process_group=context.replica_pg, **options)
                yield f"replicas {number} {dtype}", loop

    def start(self) -> None:
        """Average touched rows from the next ``sync()`` on, or have outer loops count it."""
        self._hooks = [_recorded(kernel, touched) for kernel, touched in self._hooks if not self._steps]
        self._model.set_all_reduce_hook(self._count if self._steps else self._average)

    def stop(self) -> None:
        """Return ``sync()`` to whole tables."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._model._all_reduce_hook = None

    def stats(self) -> dict[str, float]:
        """Return totals of this rank: rows averaged, bytes sent, and bytes that whole tables would have taken."""
        return {
            "replicas/rows": float(self._rows),
            "replicas/bytes_sent": float(self._sent_bytes),
            "replicas/bytes_dense": float(self._dense_bytes),
        }

    @torch.no_grad()
    def _average(self, group: dist.ProcessGroup, tensors: list[Tensor]) -> None:
        """Average tensors of one dtype: all weights, and after them all states, if the caller wants those."""
        tables = [self._tables[id(tensor)] for tensor in tensors]
        if tensors[0] is tables[0].weight:
            self._unite(group, tables)
            rows = [table.touched.nonzero().squeeze(1) for table in tables]
            for table in tables:
                table.pending |= table.touched
                table.touched.zero_()
        else:
            rows = [table.pending.nonzero().squeeze(1) for table in tables]
            for table in tables:
                table.pending.zero_()
        pairs = list(zip(tensors, rows, strict=True))
        for tensor in (tensor for tensor, ids in pairs if len(ids) == len(tensor)):
            self._mean(group, tensor)
        some = [(tensor, ids) for tensor, ids in pairs if 0 < len(ids) < len(tensor)]
        if some:
            packed = torch.cat([tensor[ids].flatten() for tensor, ids in some])
            self._mean(group, packed)
            sizes = [tensor[:1].numel() * len(ids) for tensor, ids in some]
            for (tensor, ids), mean in zip(some, packed.split(sizes), strict=True):
                tensor[ids] = mean.view(-1, *tensor.shape[1:])
        for table in tables:
            table.versions = (table.weight._version, table.state._version)
        self._rows += sum(map(len, rows))
        self._dense_bytes += sum(ring_all_reduce_bytes(tensor.nbytes, group.size()) for tensor in tensors)

    def _count(self, group: dist.ProcessGroup, tensors: list[Tensor]) -> None:
        """Count a ``sync()`` of weights; states of optimizers stay those of each replica."""
        if id(tensors[0]) in self._steps:
            self._steps[id(tensors[0])].step()

    def _mean(self, group: dist.ProcessGroup, tensor: Tensor) -> None:
        tensor /= group.size()  # before the sum, as DDP does: a sum of float16 could overflow
        dist.all_reduce(tensor, group=group)
        self._sent_bytes += ring_all_reduce_bytes(tensor.nbytes, group.size())

    def _unite(self, group: dist.ProcessGroup, tables: list[_Replicated]) -> None:
        """Mark rows that any replica touched; all rows if tables may differ elsewhere."""
        device, world_size = tables[0].weight.device, group.size()
        mine = [table.touched.nonzero().squeeze(1).to(torch.int32) for table in tables]
        edited = any(table.is_edited for table in tables)
        header = torch.tensor([edited, *(ids.numel() for ids in mine)], device=device)
        headers = [torch.empty_like(header) for _ in range(world_size)]
        dist.all_gather(headers, header, group=group)
        counts = torch.stack(headers).tolist()
        self._sent_bytes += (world_size - 1) * header.nbytes
        if any(is_edited for is_edited, *_ in counts):
            for table in tables:
                table.touched.fill_(True)
            return
        most = max(sum(sizes) for _, *sizes in counts)
        ids = torch.cat([*mine, torch.zeros(most - sum(map(len, mine)), dtype=torch.int32, device=device)])
        everything = [torch.empty_like(ids) for _ in range(world_size)]
        dist.all_gather(everything, ids, group=group)
        self._sent_bytes += (world_size - 1) * ids.nbytes
        for (_, *sizes), theirs in zip(counts, everything, strict=True):
            for table, part in zip(tables, theirs[: sum(sizes)].split(sizes), strict=True):
                table.touched[part.long()] = True


def _recorded(kernel: Any, touched: Tensor) -> Any:
    """Mark the rows that each lookup of a kernel reads while gradients are on, in a bool tensor of all its tables."""

    def hook(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if torch.is_grad_enabled():
            bound = dict(zip(("indices", "offsets", "weights", "requires", "batches"), args, strict=False))
            indices, offsets = (kwargs.get(name, bound.get(name)) for name in ("indices", "offsets"))
            sizes = kwargs.get("batch_size_per_feature_per_rank", bound.get("batches"))
            first_rows = kernel.hash_size_cumsum[:-1]
            counts = lookups_of_features(offsets, first_rows.numel(), sizes)
            rows = first_rows.repeat_interleave(counts, output_size=indices.numel()) + indices  # a GPU need not wait
            touched[rows] = True

    return kernel.register_forward_hook(hook, with_kwargs=True)
