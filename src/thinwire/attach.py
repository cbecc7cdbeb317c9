"""`attach`: synchronize the gradients of a model through thinwire, with one line in the training script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.lane import Group, resolve_group, telling_peers
from thinwire.compress.assign import Compress
from thinwire.compress.base import Compressor, Parameter
from thinwire.compress.memory import MomentumCorrection
from thinwire.compress.methods.sign import Signum
from thinwire.compress.reduction.choose import AUTO as AUTO_EXCHANGE
from thinwire.compress.wrappers import Wrapper
from thinwire.errors import unknown
from thinwire.follow.grouping import Intent
from thinwire.fuse.policy import Policy, default_policies
from thinwire.gradients.compression import Compression, GradScaler, Planned, PlannedCompression, check_scaler
from thinwire.gradients.ddp import check_buckets
from thinwire.gradients.exact import route_asked_for
from thinwire.gradients.fsdp import sharding_of
from thinwire.gradients.lossless import AUTO as AUTO_DENSE
from thinwire.gradients.lossless import LOSSLESS, NATIVE
from thinwire.gradients.model import (
    check_mesh,
    check_parameters,
    find_model,
    is_sharded,
    leave_out,
    local_of,
    module_of,
    synchronized_parameters,
)
from thinwire.gradients.tables import tables_of
from thinwire.outer.loop import OuterLoop, is_outer
from thinwire.outer.members import Members
from thinwire.outer.recipe import OuterRecipe
from thinwire.plan.plan import Plan
from thinwire.sync.named import AUTO, resolve
from thinwire.sync.scheme import Scheme
from thinwire.sync.two_level import TwoLevel
from thinwire.synchronizer import Synchronizer, is_attached


def attach(
    model: nn.Module,
    scheme: str | Scheme | TwoLevel = AUTO,
    timeout: timedelta | None = None,
    *,
    process_group: Group | Members = None,
    exclude: str | Iterable[str | Tensor] = (),
    compress: Compress | None = None,
    exchange: str | Scheme | TwoLevel = AUTO_EXCHANGE,
    grad_scaler: GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    fuse: Policy | None = None,
    ahead: bool = True,
    plan: Plan | None = None,
    fallback: bool = False,
    outer: OuterRecipe | None = None,
    dense: str | None = None,
) -> Synchronizer:
    """Synchronize the gradients of a model: sparse ones as sparse rows, others exactly or compressed.

    From the next backward on, gradients of ``nn.Embedding(sparse=True)`` and the non-zero rows of dense embedding
    gradients travel by ``scheme``; everything else is all-reduced. The mean over ranks is what stock DDP computes, up
    to the rounding of another order of addition, and has the same bits on all ranks. Gradients keep their layout, so
    any optimizer works. Call it on all ranks, after wrapping the model and before the first backward.

    With ``compress`` large matrices that are not tables are compressed, which is lossy (docs/guides/compression.md). A
    plain module needs no DDP: all ranks get the parameters and buffers of rank 0. With ``fuse`` or ``plan`` gradients
    travel in groups that suit the link (docs/guides/plan-execution.md).

    Args:
        model: a ``DistributedDataParallel``, an FSDP2 model (see docs/integrations/fsdp.md), or a plain module. All
            its parameters are on one device.
        scheme: a name of `thinwire.schemes`, a `Scheme` or a `TwoLevel` ("two_level:zen": ranks of one host add up
            first); "auto" chooses by bytes and by the seconds of real steps, and may leave a table to DDP.
        timeout: how long to wait for a peer; None means the timeout of the model's process group.
        process_group: the ranks that have a copy of a plain module, as a ProcessGroup or a one-dimensional DeviceMesh
            such as ``mesh["dp"]``; None for all ranks. DDP has its own. With ``outer`` also `thinwire.outer.Members`.
        exclude: parameters and buffers that a plain module leaves alone: names, patterns (``fnmatch``), or parameters.
        compress: a compressor of `thinwire.compress`, for all matrices of 1024 elements or more; or a policy, which is
            a function from a ``Parameter`` to a compressor or None; or compressors by name pattern (``fnmatch``).
            Biased compressors without a memory get error feedback.
        exchange: how payloads are averaged: "all_reduce", "all_gather", "two_shot", or a scheme such as "zen" for
            sparsifiers; "auto" chooses the one of fewest bytes that the compressor allows, but no scheme.
        grad_scaler: the ``torch.amp.GradScaler`` of the training loop. Memories are then kept in units of unscaled
            gradients, and a step that the scaler skips leaves them as they were.
        optimizer: the optimizer to check: it must have no momentum for parameters whose compressor has it, like `dgc`.
            With ``outer`` the one whose steps are counted.
        fuse: a policy of `thinwire.fuse` for a plain module on the CPU, whose groups are used after ten measured steps.
        ahead: whether each parameter is compressed by itself; False compresses those of a group as one flat tensor.
        plan: what to compress and what travels together; DDP needs its buckets: `thinwire.Plan.bucket_cap_mb_list`.
        fallback: whether a plan that is slower than exact synchronization is dropped, on all ranks at the same step.
        outer: a recipe of `thinwire.outer`, with which ranks train apart: another algorithm, see docs/guides/outer.md.
        dense: how dense gradients are summed that are not compressed: "native", "lossless" or "auto", see
            docs/guides/lossless.md. None is what a plan says, "native" with ``fuse`` or ``compress``, else "auto".

    Returns:
        A `Synchronizer`: statistics, state, ``no_sync`` and ``detach``; with ``outer`` a `thinwire.outer.OuterLoop`.

    Raises:
        ValueError: an FSDP1 model, one that has another hook or is attached already; an unknown scheme; a
            compressor that refuses a parameter or cannot be exchanged as asked for; momentum twice; a plan of another
            model or world size, or with other groups than the buckets of DDP.
        MismatchError: ranks attach different models, schemes, compressors or plans; on every rank.

    Example:
        >>> model = DistributedDataParallel(model)                                        # doctest: +SKIP
        >>> sync = thinwire.attach(model)                                                 # doctest: +SKIP
        >>> sync = thinwire.attach(model, compress=thinwire.compress.top_k(0.01))         # doctest: +SKIP
        >>> sync = thinwire.attach(model, dense="lossless")                               # doctest: +SKIP
    """
    model = find_model(model)
    _check_arguments(scheme, timeout, grad_scaler)
    if outer is not None:
        others = {"plan": plan, "fallback": fallback, "grad_scaler": grad_scaler, "dense": dense}
        _check_outer(outer, fuse=fuse, ahead=ahead, **others)
        return _attach_outer(model, outer, optimizer, process_group, timeout, scheme, exclude, compress, exchange)
    group = _group_of(model, process_group)
    with telling_peers(group, timeout):
        leave_out(model, exclude)
        _check_model(model, group)
    if is_attached(model):
        raise ValueError("thinwire is attached to this model already: call detach() on its Synchronizer first")
    alone = {"compress": compress, "fuse": fuse, "exchange": exchange, "ahead": ahead}
    _check_grouping(model, plan, fuse, fallback, alone)
    dense = _dense(dense, model, plan, compress, fuse)
    if plan is None and compress is None:
        _check_exact(exchange, ahead)
        intent = None if fuse is None else Intent(_names(model), (fuse,))
        return Synchronizer(model, group, scheme, timeout, intent=intent, dense=dense)
    compression = _compression(compress, exchange, grad_scaler, ahead, plan)
    plans = _plans(model, compression, group, timeout)
    if optimizer is not None:
        _check_momentum(optimizer, plans, module_of(model))
    intent = _intent(model, fuse, plan, fallback, any(_has_momentum(entry.compressor) for entry in plans.values()))
    return Synchronizer(model, group, scheme, timeout, plans or None, compression if plans else None, intent, dense)


def _dense(dense: object, model: nn.Module, plan: Plan | None, compress: Compress | None, fuse: Policy | None) -> str:
    """Return how dense gradients are summed; "auto" where somebody else does not time steps or count their bytes."""
    if dense is None:
        others = (compress, fuse, plan)
        if plan is not None and any(group.dense == LOSSLESS for group in plan.groups):
            return LOSSLESS
        return NATIVE if is_sharded(model) or any(other is not None for other in others) else AUTO_DENSE
    legal = (NATIVE, LOSSLESS, AUTO_DENSE)
    if dense not in legal:
        raise unknown("dense", str(dense), legal)
    return str(dense)


def _attach_outer(
    model: nn.Module,
    recipe: OuterRecipe,
    optimizer: object,
    process_group: Group | Members,
    timeout: timedelta | None,
    scheme: str | Scheme | TwoLevel,
    exclude: str | Iterable[str | Tensor],
    compress: Compress | None,
    exchange: str | Scheme | TwoLevel,
) -> OuterLoop:
    """Return the outer loop of a model."""
    group = process_group if isinstance(process_group, Members) else resolve_group(process_group)
    with nullcontext() if isinstance(group, Members) else telling_peers(group, timeout):
        leave_out(model, exclude)
        _check_model(model, group)
        if is_outer(model):
            raise ValueError("an outer loop of this model runs already: call detach() on it first")
        if recipe.min_ranks is not None and recipe.min_ranks > group.size():
            raise ValueError(f"min_ranks={recipe.min_ranks} is more than the {group.size()} ranks of the process group")
        if compress is None:
            _check_exact(exchange, ahead=True)
        counted = _unwrapped(optimizer, module_of(model))
        compression = None if compress is None else Compression(compress, exchange)
    return OuterLoop(model, group, recipe, counted, compression, scheme, timeout)


def _check_outer(recipe: object, **others: object) -> None:
    """Raise ValueError for what is no recipe, and for arguments that are about gradients."""
    if not isinstance(recipe, OuterRecipe):
        raise ValueError(f"outer is {recipe!r}: pass a recipe such as thinwire.outer.diloco(every=64)")
    reasons = {
        "fuse": "no gradients travel that could be grouped",
        "plan": "no gradients travel that could be grouped",
        "fallback": "there is no plan to drop",
        "ahead": "a difference is compressed parameter by parameter",
        "dense": "no gradients travel, and what compress= leaves of differences travels as it is",
        "grad_scaler": "differences carry no loss scale, and steps that a scaler skips do not count anyway",
    }
    for name, value in others.items():
        if value != (name == "ahead") and value is not None:
            raise ValueError(f"{name}={value!r} has no meaning with outer=: {reasons[name]}. Leave it out")


def _unwrapped(optimizer: object, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer inside of what Accelerate and Lightning wrap around it."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"outer= counts the steps of an optimizer, and optimizer is {optimizer!r}: pass optimizer=")
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in known for parameter in module.parameters()):
        raise ValueError(f"{type(optimizer).__name__} has no parameter of the model: pass the optimizer that trains it")
    return optimizer


def _check_model(model: nn.Module, group: dist.ProcessGroup | Members) -> None:
    """Raise ValueError for what ranks read for themselves: parameters, their mesh, and the environment."""
    check_parameters(model)
    if not isinstance(group, Members):
        check_mesh(model, group)
    route_asked_for()


def _check_arguments(scheme: str | Scheme | TwoLevel, timeout: object, grad_scaler: object) -> None:
    resolve(scheme)
    check_scaler(grad_scaler)
    if timeout is not None and not isinstance(timeout, timedelta):
        raise ValueError(f"timeout is {timeout!r}: pass a datetime.timedelta, such as timedelta(seconds=5)")


def _compression(
    compress: Compress | None,
    exchange: str | Scheme | TwoLevel,
    grad_scaler: GradScaler | None,
    ahead: bool,
    plan: Plan | None,
) -> Compression | PlannedCompression:
    if plan is not None:
        return PlannedCompression(plan, grad_scaler)
    assert compress is not None
    return Compression(compress, exchange, grad_scaler, ahead)


def _plans(
    model: nn.Module,
    compression: Compression | PlannedCompression,
    group: dist.ProcessGroup,
    timeout: timedelta | None,
) -> dict[str, Planned]:
    """Return the method of each compressed parameter; a plan is checked first."""
    sharding = sharding_of(model)
    if sharding is not None and isinstance(compression, Compression):
        return sharding.plans(compression)
    parameters = _dense_parameters(model)
    if isinstance(compression, Compression):
        return compression.plans(parameters, group.size())
    with telling_peers(group, timeout):
        compression.plan.check(parameters, group.size())
        if isinstance(model, DistributedDataParallel):
            check_buckets(model, compression.plan.jobs)
        return compression.plans(parameters, group.size())


def _group_of(model: nn.Module, process_group: Group | Members) -> dist.ProcessGroup:
    if isinstance(process_group, Members):
        raise ValueError("gradients need all ranks in every step: Members are for outer=, pass a process group instead")
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


def _check_grouping(
    model: nn.Module, plan: Plan | None, fuse: Policy | None, fallback: bool, others: Mapping[str, object]
) -> None:
    """Raise ValueError for a plan or a policy that this model cannot follow, or next to ``others``."""
    if (plan is not None or fuse is not None) and is_sharded(model):
        raise ValueError("FSDP decides which gradients travel together: leave out plan= and fuse=, and pass compress=")
    if fallback:
        _check_fallback(model, plan)
    if plan is not None:
        _check_alone(plan, others)
    if fuse is not None:
        _check_fuse(model, fuse)


def _check_alone(plan: Plan, others: Mapping[str, object]) -> None:
    """Raise ValueError for an argument that the plan already decides."""
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is {plan!r}: pass a thinwire.Plan, such as thinwire.Plan.load('plan.json')")
    nothing = {"compress": None, "fuse": None, "exchange": AUTO_EXCHANGE, "ahead": True}
    for name, value in others.items():
        if value != nothing[name]:
            raise ValueError(f"the plan says what to compress and what to fuse: leave out plan= or {name}=")


def _check_fallback(model: nn.Module, plan: Plan | None) -> None:
    if plan is None:
        raise ValueError("fallback=True drops a plan that does not pay: pass plan= too")
    if not _is_on_cpu(model):
        raise ValueError(
            "fallback=True times steps by the clock of the processor, and gradients are on another device: leave it out"
        )


def _is_on_cpu(model: nn.Module) -> bool:
    trained = (parameter for _, parameter in synchronized_parameters(model) if parameter.requires_grad)
    return all(parameter.device.type == "cpu" for parameter in trained)


def _check_fuse(model: nn.Module, fuse: object) -> None:
    if isinstance(fuse, type) or not callable(getattr(fuse, "groups", None)):
        raise ValueError(f"fuse is {fuse!r}: pass a policy such as thinwire.fuse.cupcake()")
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "DDP fixed its buckets when it was built, so no policy can group gradients: attach the plain module"
            " instead; or make a plan with `thinwire plan --measure`, and build"
            " DistributedDataParallel(model, bucket_cap_mb_list=plan.bucket_cap_mb_list())"
        )
    if not _is_on_cpu(model):
        raise ValueError(
            "fuse= sees by the clock of the processor when gradients are ready, and they are on another device: make a"
            " plan with `thinwire plan --measure`, which measures there, and pass plan="
        )


def _check_exact(exchange: object, ahead: bool) -> None:
    if exchange != AUTO_EXCHANGE:
        raise ValueError(f"exchange={exchange!r} is about compressed gradients: pass compress= too")
    if not ahead:
        raise ValueError("ahead=False is about compressed gradients: pass compress= too")


def _intent(model: nn.Module, fuse: Policy | None, plan: Plan | None, fallback: bool, momentum: bool) -> Intent | None:
    """Return what the synchronizer is to follow: a plan, a policy, or None."""
    if plan is None:
        return None if fuse is None else Intent(_names(model), (fuse,), momentum=momentum)
    return Intent(
        _names(model),
        () if isinstance(model, DistributedDataParallel) else default_policies(),
        plan.jobs,
        plan.predicted_seconds,
        plan.dense_seconds,
        fallback,
        momentum,
        is_watched=_is_on_cpu(model),
    )


def _names(model: nn.Module) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in _dense_parameters(model))


def _dense_parameters(model: nn.Module) -> list[Parameter]:
    """Return what can be compressed: real trained parameters that are no embedding tables."""
    tables = {id(table) for table in tables_of(model)}
    return [
        Parameter(name, tuple(local_of(parameter).shape), parameter.dtype)
        for name, parameter in synchronized_parameters(model)
        if parameter.requires_grad and not parameter.is_complex() and id(parameter) not in tables
    ]


def _check_momentum(optimizer: torch.optim.Optimizer, plans: Mapping[str, Planned], module: nn.Module) -> None:
    """Raise ValueError if the optimizer has momentum for parameters whose compressor has it too.

    A group counts as others' only if it has nothing else: tensors that are not the module's may be copies of it.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"optimizer is {optimizer!r}: pass the optimizer of the model")
    corrected = [name for name, plan in plans.items() if _has_momentum(plan.compressor)]
    others = {id(parameter) for name, parameter in module.named_parameters() if name not in corrected}
    for group in optimizer.param_groups if corrected else ():
        momentum = group.get("momentum") or next(iter(group.get("betas", ())), 0.0)
        if momentum and any(id(parameter) not in others for parameter in group["params"]):
            name = corrected[0]
            raise ValueError(
                f"{type(optimizer).__name__} has momentum {momentum:g}, and so has {plans[name].compressor.name} of"
                f" parameter {name!r}, which would count it twice: put parameters with this compressor in a group of"
                " torch.optim.SGD with momentum=0.0; others may keep theirs, in a group of their own"
            )


def _has_momentum(compressor: Compressor) -> bool:
    if isinstance(compressor, (MomentumCorrection, Signum)):
        return compressor.momentum > 0.0
    return isinstance(compressor, Wrapper) and _has_momentum(compressor.inner)
