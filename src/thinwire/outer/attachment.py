"""`thinwire.outer.attach`: train the ranks of a model apart, and bring them together by a recipe."""

from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.comm.c10d import NEEDED, UNREGISTERED, check_names
from thinwire.comm.groups import Group
from thinwire.comm.lane import telling_peers
from thinwire.compress.assign import NATIVE, Dense
from thinwire.gradients.module import check_mesh, check_parameters, check_timeout, find_model, left_out, module_of
from thinwire.gradients.torch_internals import needed
from thinwire.outer.inner import outer_group, ranks_of
from thinwire.outer.loop import OuterLoop
from thinwire.outer.members import Members
from thinwire.outer.recipe import OuterRecipe
from thinwire.sums.named import AUTO, Rows, resolve


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: OuterRecipe,
    rows: Rows = AUTO,
    dense: Dense = NATIVE,
    *,
    process_group: Group | Members = None,
    exclude: str | Iterable[str | Tensor] = (),
    timeout: timedelta | None = None,
) -> OuterLoop:
    """Train each rank by itself, and average parameters seldom or in the background: see docs/guides/outer.md.

    Call it on all ranks, before the first step: they get the parameters and buffers of rank 0. From then on hooks of
    the optimizer count its steps.

    Args:
        model: a plain module; or one of DDP or FSDP2 inside of each host, with ``process_group`` between hosts. One
            that a trainer has wrapped for all ranks is taken too: DDP no longer averages gradients, and FSDP2 with
            replicas averages them only over the ranks that hold shards of one copy.
        optimizer: the optimizer that trains the model, whose steps are counted.
        recipe: when ranks meet, and what is done with their mean: `diloco`, `local_sgd` or `shadow_sync`.
        rows: how changed rows of embedding tables travel, as `thinwire.attach` takes it.
        dense: how all other differences travel: "native" or a compressor, by pattern or by a function too, as
            `thinwire.attach` takes them.
        process_group: the ranks that train apart, as a ProcessGroup or a one-dimensional DeviceMesh; None for the
            replicas of an FSDP2 model that has them, and for all ranks otherwise. `Members` are ranks that may come and
            go.
        exclude: parameters and buffers that are left alone: names, patterns (``fnmatch``), or parameters.
        timeout: how long to wait for a peer; None means the timeout of the process group.

    Returns:
        An `OuterLoop`: statistics, state, ``synchronize``, ``global_parameters`` and ``detach``.

    Raises:
        ValueError: a model that something else attached averages, or its gradients; an optimizer that trains another
            model; an unknown scheme; a compressor that refuses a parameter or its exchange.
        MismatchError: ranks attach different models, recipes, schemes or compressors; on every rank.

    Example:
        >>> recipe = thinwire.outer.diloco(every=64)                                      # doctest: +SKIP
        >>> loop = thinwire.outer.attach(model, optimizer, recipe)                        # doctest: +SKIP
        >>> train(model, optimizer)                                                       # doctest: +SKIP
        >>> loop.synchronize()                                                            # doctest: +SKIP
    """
    model = find_model(model)
    if not isinstance(recipe, OuterRecipe):
        raise ValueError(f"recipe is {recipe!r}: pass a recipe such as thinwire.outer.diloco(every=64)")
    may_lose_ranks = isinstance(process_group, Members) or recipe.min_ranks is not None
    instead = 'average gradients by DDP, under init_process_group("thinwire")'
    check_names("outer.attach", instead, f"{NEEDED} {UNREGISTERED * may_lose_ranks}", needed(model))
    group = process_group if isinstance(process_group, Members) else outer_group(model, process_group)
    with nullcontext() if isinstance(group, Members) else telling_peers(group, timeout):
        check_timeout(timeout)
        resolve(rows)
        excluded = left_out(model, exclude)
        check_parameters(model, excluded)
        if not isinstance(group, Members):
            check_mesh(model, group, excluded)
        _check_recipe(recipe, group)
        counted = _unwrapped(optimizer, module_of(model))
    OuterLoop.check_free(model, excluded, ranks_of(group))
    return OuterLoop(model, group, recipe, counted, rows, dense, excluded, timeout)


def _check_recipe(recipe: OuterRecipe, group: dist.ProcessGroup | Members) -> None:
    if recipe.in_background and torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "shadow_sync averages when the network allows, so no two runs are alike, which"
            " torch.use_deterministic_algorithms(True) rules out: take another recipe, such as diloco(every=64)"
        )
    if recipe.min_ranks is not None and recipe.min_ranks > group.size():
        raise ValueError(f"min_ranks={recipe.min_ranks} is more than the {group.size()} ranks of the process group")


def _unwrapped(optimizer: object, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer inside of what Accelerate and Lightning wrap around it."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"an outer loop counts the steps of an optimizer, and optimizer is {optimizer!r}")
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in known for parameter in module.parameters()):
        raise ValueError(f"{type(optimizer).__name__} has no parameter of the model: pass the optimizer that trains it")
    return optimizer
