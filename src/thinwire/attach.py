"""`attach`: synchronize the gradients of a model through thinwire, with one line in the training script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.cuda.staging import staging_for
from thinwire.comm.groups import Group, resolve_group
from thinwire.comm.lane import agree_before, telling_peers
from thinwire.compress.assign import NATIVE, Dense
from thinwire.compress.base import Parameter
from thinwire.gradients.compression import GradScaler, Methods, Planned, check_scaler, has_momentum
from thinwire.gradients.ddp import check_buckets
from thinwire.gradients.exact import route_asked_for
from thinwire.gradients.module import (
    check_mesh,
    check_parameters,
    check_timeout,
    find_model,
    is_sharded,
    left_out,
    module_of,
    synchronized_parameters,
)
from thinwire.gradients.passes import check_optimizers
from thinwire.gradients.sharded.layout import sharding_of
from thinwire.gradients.sharded.tables import RowShards
from thinwire.gradients.steps.grouping import Intent
from thinwire.gradients.synchronizer import Synchronizer
from thinwire.gradients.tables import dense_parameters
from thinwire.plan.plan import Plan
from thinwire.plan.policy import Policy, default_policies
from thinwire.sums.named import AUTO, DENSE, Rows, resolve


def attach(
    model: nn.Module,
    rows: Rows = AUTO,
    dense: Dense | Policy | Plan = AUTO,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: GradScaler | None = None,
    process_group: Group = None,
    exclude: str | Iterable[str | Tensor] = (),
    timeout: timedelta | None = None,
) -> Synchronizer:
    """Synchronize the gradients of a model: sparse ones as sparse rows, others exactly or compressed.

    From the next backward on, gradients of ``nn.Embedding(sparse=True)`` and the non-zero rows of dense embedding
    gradients travel as ``rows`` says, everything else as ``dense`` says. By default the mean over ranks is what stock
    DDP computes, up to the rounding of another order of addition, and has the same bits on all ranks. Gradients keep
    their layout, so any optimizer works. Call it on all ranks, after wrapping the model and before the first backward.
    A plain module needs no DDP: all ranks get the parameters and buffers of rank 0. Under
    ``torch.use_deterministic_algorithms(True)``, which is read here, bits depend on no clock, and "auto" is "native".

    Args:
        model: a ``DistributedDataParallel``, an FSDP2 model (see docs/integrations/fsdp.md), or a plain module. All
            its parameters are on one device.
        rows: how rows of embedding tables travel: a name of `thinwire.schemes`, a `Scheme` or a `TwoLevel`
            ("two_level:zen": ranks of one host add up first); "auto" chooses by bytes and by the seconds of real steps,
            and may leave a table to DDP.
        dense: how all other gradients travel:

            - "native", "lossless" or "auto": exactly; see docs/guides/lossless.md;
            - a compressor of `thinwire.compress`, for all matrices of 1024 elements or more, the others being "native".
              That is lossy (docs/guides/compression.md): biased compressors without a memory get error feedback.
              ``top_k(0.01).by("two_shot")`` chooses the exchange, too;
            - ``{pattern: any of these}``: the first pattern (``fnmatch``) that matches a name counts, "native" if none
              does; or a function from a `thinwire.compress.Parameter` to any of these. A pattern of a compressor that
              names embedding tables with dense gradients, and nothing else, takes them from ``rows``;
            - a policy of `thinwire.fuse` around any of these, such as ``cupcake(top_k(0.01))``: gradients of a plain
              module on the CPU travel in its groups, after ten measured steps;
            - a `thinwire.Plan` (docs/guides/plan-execution.md). DDP needs its buckets: `Plan.bucket_cap_mb_list`.
        optimizer: the optimizer to check: it must have no momentum for parameters whose compressor has it, like `dgc`.
        grad_scaler: the ``torch.amp.GradScaler`` of the training loop. Memories are then kept in units of unscaled
            gradients, and a step that the scaler skips leaves them as they were.
        process_group: the ranks that have a copy of a plain module, as a ProcessGroup or a one-dimensional DeviceMesh
            such as ``mesh["dp"]``; None for all ranks. DDP and FSDP have their own.
        exclude: names, patterns (``fnmatch``) or tensors of what is left alone; DDP and FSDP average what is theirs.
        timeout: how long to wait for a peer; None means the timeout of the model's process group.

    Returns:
        A `Synchronizer`: statistics, state, ``no_sync`` and ``detach``.

    Raises:
        ValueError: an FSDP1 model; one that has another hook, or whose parameters something attached averages; an
            unknown scheme; a compressor that refuses a parameter or its exchange; momentum twice; a plan of another
            model or world size, or with other groups than the buckets of DDP.
        MismatchError: ranks attach different models, schemes, compressors or plans; on every rank.

    Example:
        >>> sync = thinwire.attach(DistributedDataParallel(model))                        # doctest: +SKIP
        >>> sync = thinwire.attach(model, dense="lossless")                               # doctest: +SKIP
        >>> rules = {"*.attention.*": thinwire.compress.power_sgd(4), "*": "lossless"}    # doctest: +SKIP
        >>> sync = thinwire.attach(model, rows="zen", dense=rules)                        # doctest: +SKIP
    """
    model = find_model(model)
    group = _group_of(model, process_group)
    with telling_peers(group, timeout):
        check_timeout(timeout)
        resolve(rows)
        check_scaler(grad_scaler)
        excluded = left_out(model, exclude)
        check_parameters(model, excluded)
        check_optimizers(model, excluded)
        check_mesh(model, group, excluded)
        route_asked_for()
    Synchronizer.check_free(model, excluded, frozenset(dist.get_process_group_ranks(group)))
    with ExitStack() as undo:
        tables = _rows_in_shards(model, rows, group, timeout)
        if tables is not None:
            undo.callback(tables.remove)
            excluded |= tables.names
        with telling_peers(group, timeout):
            trained = (one for _, one in synchronized_parameters(model, excluded) if one.requires_grad)
            is_on_cpu = {one.device.type for one in trained} <= {"cpu"}
            grouped = _Grouped.of(dense)
            grouped.check(model, is_on_cpu)
            parameters, others = dense_parameters(model, excluded, grouped.patterns())
            methods = replace(_methods(model, grouped, parameters, others, group), tables=tables)
            if optimizer is not None:
                _check_momentum(optimizer, methods.compressed, module_of(model))
        names = tuple(parameter.name for parameter in parameters)
        intent = grouped.intent(names, isinstance(model, DistributedDataParallel), is_on_cpu)
        sync = Synchronizer(model, group, rows, timeout, methods, excluded, intent, grad_scaler)
        undo.pop_all()
    return sync


def _rows_in_shards(
    model: nn.Module, rows: Rows, group: dist.ProcessGroup, timeout: timedelta | None
) -> RowShards | None:
    """Return the tables in FSDP's shards of which rows travel; all ranks agree on them before they make groups."""
    sharding = sharding_of(model)
    if sharding is None:
        return None

    def agree(names: Sequence[str]) -> None:
        text = f"tables of which rows travel: {', '.join(names) or 'none'}"
        agree_before(group, timeout, text, staging_for(sharding.units[0].group.device))

    if resolve(rows) != DENSE:
        return RowShards(model, timeout, agree)
    agree([])
    return None


@dataclass(frozen=True)
class _Grouped:
    """The argument ``dense``, taken apart: what groups gradients, and how each of them travels."""

    dense: Any
    grouping: Policy | Plan | None = None

    @classmethod
    def of(cls, dense: Any) -> _Grouped:
        if isinstance(dense, Plan):
            return cls(dense.dense(), dense)
        if callable(getattr(dense, "groups", None)) and not isinstance(dense, type):
            return cls(getattr(dense, "dense", NATIVE), dense)
        return cls(dense)

    def patterns(self) -> list[str]:
        """Return the patterns of what is no exact sum, which may name embedding tables."""
        named = self.dense.items() if isinstance(self.dense, Mapping) else ()
        return [pattern for pattern, how in named if isinstance(pattern, str) and not isinstance(how, str)]

    def check(self, model: nn.Module, is_on_cpu: bool) -> None:
        """Raise ValueError for a plan or a policy that this model cannot follow."""
        grouping, is_ddp = self.grouping, isinstance(model, DistributedDataParallel)
        if grouping is not None and (is_sharded(model) or (is_ddp and not isinstance(grouping, Plan))):
            raise ValueError(
                "DDP fixed its buckets when it was built, so no policy can group gradients: attach the plain module"
                " instead; or make a plan with `thinwire plan --measure`, and build"
                " DistributedDataParallel(model, bucket_cap_mb_list=plan.bucket_cap_mb_list())"
                if is_ddp
                else "FSDP decides which gradients travel together: pass the compressor itself as dense=, and neither a"
                " plan nor a policy of thinwire.fuse"
            )
        if grouping is None or (isinstance(grouping, Plan) and not grouping.fallback):
            return
        why = "they are on another device, whose work the clock of the processor does not see" if not is_on_cpu else ""
        if torch.are_deterministic_algorithms_enabled():
            why = "two runs would differ in their last bits, which torch.use_deterministic_algorithms(True) rules out"
        if why:
            raise ValueError(
                "policies of thinwire.fuse and plans with fallback=True decide by measured times how gradients are"
                f" summed, and {why}: make a plan with `thinwire plan --measure`, and pass that without fallback"
            )

    def intent(self, names: tuple[str, ...], is_ddp: bool, is_on_cpu: bool) -> Intent | None:
        """Return what the synchronizer is to follow, or None."""
        plan = self.grouping
        if not isinstance(plan, Plan):
            return None if plan is None else Intent(names, (plan,))
        policies, seconds = () if is_ddp else default_policies(), (plan.predicted_seconds, plan.dense_seconds)
        is_watched = is_on_cpu and not torch.are_deterministic_algorithms_enabled()
        return Intent(names, policies, plan.jobs, *seconds, plan.fallback, is_watched)


def _methods(
    model: nn.Module,
    grouped: _Grouped,
    parameters: Sequence[Parameter],
    others: Sequence[Parameter],
    group: dist.ProcessGroup,
) -> Methods:
    """Return how each dense gradient travels; a plan is checked first."""
    sharding = sharding_of(model)
    if sharding is not None:
        return sharding.methods(grouped.dense)
    if isinstance(plan := grouped.grouping, Plan):
        plan.check(parameters, group.size())
        if isinstance(model, DistributedDataParallel):
            check_buckets(model, plan.jobs)
    return Methods.of(grouped.dense, parameters, others, group.size())


def _group_of(model: nn.Module, process_group: Group) -> dist.ProcessGroup:
    sharding = sharding_of(model)
    if isinstance(model, DistributedDataParallel):
        wrapper, own = "DDP", resolve_group(model.process_group)
    elif sharding is not None:
        wrapper, own = "FSDP", sharding.group()
    else:
        return resolve_group(process_group)
    if process_group is not None and resolve_group(process_group) != own:
        raise ValueError(f"{wrapper} averages over the ranks that it was built with: leave out process_group=")
    return own


def _check_momentum(optimizer: torch.optim.Optimizer, plans: Mapping[str, Planned], module: nn.Module) -> None:
    """Raise ValueError if the optimizer has momentum for parameters whose compressor has it too.

    A group counts as others' only if it has nothing else: tensors that are not the module's may be copies of it.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"optimizer is {optimizer!r}: pass the optimizer of the model")
    corrected = [name for name, plan in plans.items() if has_momentum(plan.compressor)]
    others = {id(parameter) for name, parameter in module.named_parameters() if name not in corrected}
    for group in optimizer.param_groups if corrected else ():
        momentum = group.get("momentum") or next(iter(group.get("betas", ())), 0.0)
        if momentum and any(id(parameter) not in others for parameter in group["params"]):
            name = corrected[0]
            raise ValueError(
                f"{type(optimizer).__name__} has momentum {momentum:g}, and so has {plans[name].compressor.name} of"
                f" parameter {name!r}, which would count it twice: put parameters with this compressor in a group with"
                " momentum=0.0, of torch.optim.SGD or Muon; others may keep theirs, in a group of their own"
            )
