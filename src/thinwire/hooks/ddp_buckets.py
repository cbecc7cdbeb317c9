"""Whether the buckets of a DDP model are the groups of a plan: DDP fixes them when it is built."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

Groups = tuple[tuple[str, ...], ...]


def check_buckets(model: DistributedDataParallel, groups: Groups) -> None:
    """Whether DDP puts into one bucket what the plan has in one group.

    Args:
        groups: of the plan, names in the order in which gradients become ready.

    Raises:
        ValueError: with the argument to pass.
    """
    buckets = expected_buckets(model, groups)
    if are_same(buckets, groups):
        return
    raise ValueError(
        f"the plan has {len(groups)} groups, and DDP was built for {len(buckets)} other buckets, which cannot change"
        f" any more: {_how(model)}"
    )


def are_same(buckets: Sequence[Sequence[str]], groups: Sequence[Sequence[str]]) -> bool:
    """Whether the same parameters are together; tables of embeddings, which no plan has, must have been left out."""
    return set(map(frozenset, buckets)) == set(map(frozenset, groups))


def expected_buckets(model: DistributedDataParallel, groups: Groups) -> Groups:
    """The buckets that DDP forms of what is in the groups, once it has seen one backward pass."""
    names = [name for group in groups for name in group]
    if _stays(model):
        known = set(names)
        names = [name for name, _ in model.module.named_parameters() if name in known]
    tensors: list[Tensor] = [model.module.get_parameter(name) for name in names]
    if not tensors:
        return ()
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, _caps_bytes(model), [False] * len(tensors))
    return tuple(tuple(names[place] for place in bucket) for bucket in indices)


def _caps_bytes(model: DistributedDataParallel) -> list[int]:
    """As DDP passes them on; per bucket since torch 2.11."""
    caps = list(getattr(model, "bucket_bytes_cap_list", ()))
    if caps:
        return caps
    first = dist._DEFAULT_FIRST_BUCKET_BYTES if model.bucket_bytes_cap_default else model.bucket_bytes_cap
    return [first, model.bucket_bytes_cap]


def _how(model: DistributedDataParallel) -> str:
    plain = "attach the plain module, whose groups follow any plan"
    if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel.__init__).parameters:
        return f"this torch has no DistributedDataParallel(bucket_cap_mb_list=...), so {plain}"
    unused = " and without find_unused_parameters, under which they follow no plan" if _stays(model) else ""
    return (
        f"build it as DistributedDataParallel(model, bucket_cap_mb_list=plan.bucket_cap_mb_list()){unused}; or {plain}"
    )


def _stays(model: DistributedDataParallel) -> bool:
    """Whether buckets stay as they are first, in the order of registration."""
    return bool(model.find_unused_parameters) and not model.static_graph
