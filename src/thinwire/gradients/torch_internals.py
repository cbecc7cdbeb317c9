"""Names of torch that are not public, and that `thinwire.gradients` needs: each is read here and nowhere else.

`needed` yields all that a model needs, for `thinwire.comm.c10d.check_names`, which looks at them before anything is
sent; the names of process groups are there too. One test each, in ``tests/gradients/test_torch_internals.py``, says
that a name is what it is taken for here. Names in torch's manual of sparse tensors (``_indices``) are not among them.
What every gradient needs is another name of torch's own function, without a call around it.

All versions in `c10d.TESTED` have the names that `needed` yields. Done without, where they are missing:

| names | of | known in torch |
|---|---|---|
| ``_divide_by_initial_world_size``, in ``join`` | DDP | 2.11 to 2.15 |
| ``Node._raw_saved_indices``, ``_saved_indices`` | the node of a lookup; gradients are scanned without | 2.11 to 2.15 |
| ``_in_backward_optimizers`` | a parameter; its optimizer's step is refused then, and not ``attach`` | 2.11 to 2.15 |
| ``_fsdp_param_groups`` of a state | FSDP2; before it ``_fsdp_param_group`` | 2.12 to 2.15 |
| ``_unsharded_param`` of a parameter, once it was gathered | FSDP2 | 2.11 to 2.15 |
| ``unsharded_grad_dtype``, ``sharded_grad_dtype`` of a parameter | FSDP2 | 2.15 |
| ``_take_unsharded_grads_to_reduce``, ``_reduce_scatter_param_indices`` | FSDP2 | 2.15 |
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import reduce
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from thinwire.gradients.module import is_sharded

ENGINE_FRAME = "_engine_run_backward"
"""Name of the function of torch that calls autograd's engine."""
REBUILD = "_rebuild_buckets"
JOIN_CONFIG = "_join_config"
"""Attribute of a DDP model whose ``enable`` says that ranks may run out of data before others."""
graph_task: Any = getattr(torch._C, "_current_graph_task_id", None)
"""Return the number of the backward pass that runs on this thread, or -1 outside of any."""
at_end_of_backward: Any = getattr(Variable._execution_engine, "queue_callback", None)
"""Call a function at the end of the running backward pass; RuntimeError if none runs. An exception drops it."""
version: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor was written to in place."""
has_optimizer: Callable[[Tensor], bool] = lambda parameter: hasattr(parameter, "_in_backward_optimizers")  # noqa: E731
"""Return whether ``_apply_optimizer_in_backward`` gave a parameter an optimizer that steps in a hook of its node."""
hooks_before: Callable[[Tensor], Mapping[int, object] | None] = attrgetter("_backward_hooks")
"""Return the hooks that see a gradient before it is accumulated, by the number of their handle."""
hooks_after: Callable[[Tensor], Mapping[int, object] | None] = attrgetter("_post_accumulate_grad_hooks")
"""Return the hooks that run after a gradient was accumulated, by the number of their handle."""
comm_hooks: Callable[[DistributedDataParallel], Sequence[object]] = attrgetter("_comm_hooks")
"""Return the communication hooks that were registered."""
delays_all_reduces: Callable[[DistributedDataParallel], Sequence[object]] = attrgetter("_delay_all_reduce_params")
"""Return the parameters that a hook of DDP's own all-reduces after its last bucket."""
fsdp_state = methodcaller("_get_fsdp_state")
"""Return FSDP's state of a module that `fully_shard` was called on."""
local_shard: Callable[[Any], Tensor] = methodcaller("to_local")
"""Return this rank's part of a DTensor, through which its gradient flows back."""
to_sharded = methodcaller("_to_sharded")
"""Let FSDP give up the whole parameters of a group that an evaluation or a failed pass has left."""
all_reduce_hook = attrgetter("_all_reduce_hook")
"""Return the hook that FSDP calls after its all-reduce, or None."""
collectives_of = attrgetter("_all_gather_comm", "_reduce_scatter_comm")
"""Return what gathers the parameters of a group of FSDP's, and what reduces their gradients."""


def saved_indices(lookup: Any) -> Tensor | None:
    """Return the ids that the node of a lookup has saved; None if reading them would run a checkpoint again.

    And of a torch in which they have other names.
    """
    saved = getattr(lookup, "_raw_saved_indices", lookup)
    return getattr(lookup, "_saved_indices", None) if getattr(saved, "unpack_hook", saved) is None else None


def divides_by_initial_world_size(ddp: DistributedDataParallel | None) -> bool:
    """Return whether ``join``, in which this is called, divides by all ranks, and not by those that have data left."""
    return getattr(ddp, "_divide_by_initial_world_size", False)


def active_ddp() -> DistributedDataParallel | None:
    """Return the DDP model whose forward runs."""
    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[return-value]


def set_comm_hooks(ddp: DistributedDataParallel, hooks: list[Any]) -> None:
    """Let DDP keep its communication hooks in another list."""
    ddp._comm_hooks = hooks


def renew_reducer(ddp: DistributedDataParallel) -> None:
    """Give a DDP model a reducer that has never had a communication hook, as DDP does when it is read from a file."""
    ddp._comm_hooks.clear()
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)


def bucket_indices(ddp: Any, tensors: list[Tensor]) -> list[list[int]]:
    """Return which of these gradients, in the order in which they become ready, DDP puts into one bucket each."""
    first = dist._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    caps = ddp.bucket_bytes_cap_list or [first, ddp.bucket_bytes_cap]
    return dist._compute_bucket_assignment_by_size(tensors, caps, [False] * len(tensors))[0]


def update_process_group(ddp: DistributedDataParallel, group: Any) -> None:
    """Let a DDP model all-reduce its buckets in another group of the same ranks."""
    ddp.reducer._update_process_group(group)


def parameter_groups(module: nn.Module) -> list[Any]:
    """Return FSDP's parameter groups of a module that `fully_shard` was called on."""
    state = fsdp_state(module)
    own = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 has several of a module
    return [group for group in ([state._fsdp_param_group] if own is None else own) if group is not None]


def parameter_groups_of(state: Any) -> list[Any]:
    """Return the list of groups in FSDP's state, which a caller may change; an empty one before torch 2.12."""
    return getattr(state, "_fsdp_param_groups", [])


def ranks_of(info: Any, kind: str) -> dist.ProcessGroup | None:
    """Return the group of a layout's ranks that ``shard`` a parameter or ``replicate`` it, None for one rank."""
    group: dist.ProcessGroup | None = getattr(info, f"{kind}_process_group", None)
    return group if group is not None and group.size() > 1 else None


def begin_again(group: Any, other: Any) -> None:
    """Let FSDP take up the parameters of a group that it did not know for a while, as it has those of another one."""
    if hasattr(other.comm_ctx, "device_handle"):  # it was used
        group.comm_ctx = other.comm_ctx
        group._reset_sharded_params = False
        for hooks in attrgetter(*_STATE_DICT_HOOKS.split())(group):
            for handle in hooks.values():  # lazy_init registers none beside others
                handle.remove()
            hooks.clear()
        group.lazy_init()


def forget(group: Any, source: Any) -> None:
    """Have FSDP communicate a parameter of a group no more."""
    group.fsdp_params.remove(source)
    if getattr(group, "_reduce_scatter_param_indices", None):  # torch 2.15, once it was used
        group._init_reduce_scatter_param_order()


def reduced_dtype(group: Any) -> torch.dtype:
    """Return the dtype in which FSDP reduces the gradients of a group, and have its records know that of computation.

    FSDP settles both in the first forward, and doing so twice is the same. A policy without ``reduce_dtype`` means the
    widest ``grad_dtype`` of the parameters in torch 2.15, and before that the dtype of computation.
    """
    group._init_mp_dtypes()
    if group._reduce_dtype is not None:
        return group._reduce_dtype
    sources = [one for one in group.fsdp_params if one.sharded_param.requires_grad] or group.fsdp_params
    dtypes = (getattr(one, "unsharded_grad_dtype", None) or one.param_dtype or one.orig_dtype for one in sources)
    return reduce(torch.promote_types, dtypes)


def kept_dtype(source: Any) -> torch.dtype | None:
    """Return the dtype in which FSDP keeps the reduced gradient of a shard, None for that in which it was reduced."""
    return getattr(source, "sharded_grad_dtype", source.orig_dtype)


def watch_reductions(group: Any, reduces: Callable[[Sequence[Any]], object]) -> Callable[[], object]:
    """Call a function before each reduction of a group, with its records of parameters in the order of the flat tensor.

    Returns:
        What undoes that.
    """
    own = vars(group)
    if (take := getattr(group, "_take_unsharded_grads_to_reduce", None)) is not None:  # torch 2.15

        def taken() -> Any:
            sources, gradients = take()
            reduces(sources)
            return sources, gradients

        group._take_unsharded_grads_to_reduce = taken
        return lambda: own.pop("_take_unsharded_grads_to_reduce", None)
    stock = group.post_backward

    def post_backward(*unused: Any) -> None:
        with_zeros = getattr(group, "reduce_scatter_unused_params", False)
        reduces([source for source in group.fsdp_params if _is_reduced_next(source, with_zeros)])
        stock(*unused)

    group.post_backward = post_backward
    return lambda: own.pop("post_backward", None)


def _is_reduced_next(source: Any, with_zeros: bool) -> bool:
    """Return whether FSDP has a gradient to reduce next, of this backward pass or of earlier ones, or zeros."""
    whole = getattr(source, "_unsharded_param", None)  # not before it was gathered first
    has_gradient = whole is not None and (source.unsharded_accumulated_grad is not None or whole.grad is not None)
    return has_gradient or (with_zeros and whole is not None and whole.requires_grad)


def gathers_again(state: Any, group: Any) -> bool:
    """Return whether FSDP gathers a group's parameters in backward too: not those of the root, if nobody says so."""
    return group.post_forward_mesh_info is not None and not (state._is_root and state._auto_reshard_after_forward)


def set_collectives(group: Any, all_gather: Any, reduce_scatter: Any, choose: Any = None) -> None:
    """Let other objects gather the parameters of a group of FSDP's and reduce their gradients.

    With ``choose`` FSDP calls that where it would put collectives of its own there, which allocate otherwise.
    """
    group._all_gather_comm, group._reduce_scatter_comm = all_gather, reduce_scatter
    for name in ("set_allocate_memory_from_process_group", "set_symm_mem"):
        vars(group).pop(name, None) if choose is None else setattr(group, name, choose)


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of one dimension with all ranks of a mesh. The first call is collective."""
    return mesh if mesh.ndim == 1 else mesh._flatten()


def without_replicas(group: Any) -> Callable[[], None]:
    """Keep FSDP from all-reducing a group's gradients over replicas; return what undoes that."""
    stock = {name: getattr(group, name) for name in ("mesh_info", "post_forward_mesh_info")}
    info = copy(group.mesh_info)
    info.__class__ = next((one for one in type(info).__mro__ if one.__name__ == "FSDPMeshInfo"), type(info))
    vars(group).update({name: info for name, other in stock.items() if other == stock["mesh_info"]})
    return lambda: vars(group).update(stock)


def without_synchronization(ddp: DistributedDataParallel) -> Callable[[], None]:
    """Keep DDP from averaging gradients and from broadcasting buffers, as in ``no_sync``; return what undoes that."""

    def synchronize(value: bool = True) -> None:
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = value

    synchronize(False)
    return synchronize


_DDP = """
    _comm_hooks _join_config _get_active_ddp_module _build_params_for_reducer _build_debug_param_to_name_mapping
    _ddp_init_helper require_backward_grad_sync require_forward_param_sync parameters_to_ignore mixed_precision logger
    reducer.prepare_for_forward reducer.prepare_for_backward reducer._update_process_group _delay_all_reduce_params
    bucket_bytes_cap bucket_bytes_cap_default bucket_bytes_cap_list reducer._rebuild_buckets"""
_STATE_DICT_HOOKS = "_module_to_pre_save_state_dict_hook_handle _module_to_pre_load_state_dict_hook_handle"
_GROUPS = f"""{_STATE_DICT_HOOKS}
    _to_sharded _init_mp_dtypes _all_gather_comm _reduce_scatter_comm _all_reduce_hook _reset_sharded_params lazy_init
    fsdp_params post_backward mesh_info.mesh._flatten mesh_info.shard_mesh_dim mesh_info.replicate_mesh_dim reduce_grads
    post_forward_mesh_info all_reduce_grads gradient_divide_factor comm_ctx device"""
_PARAMETERS = "sharded_param sharded_size padded_sharded_param_size offload_to_cpu orig_dtype param_dtype"


def needed(model: nn.Module) -> Iterator[tuple[object, str]]:
    """Yield what has private names that a model needs, and the names; what later ones need of earlier ones is there."""
    yield torch._C, "_current_graph_task_id _dynamo.eval_frame.set_code_exec_strategy"
    yield torch.autograd, f"Variable._execution_engine.queue_callback graph.{ENGINE_FRAME}"
    yield Tensor, "_version _backward_hooks _post_accumulate_grad_hooks"
    if isinstance(model, DistributedDataParallel):
        yield dist, "_compute_bucket_assignment_by_size _DEFAULT_FIRST_BUCKET_BYTES"
        yield model, _DDP
    for module in filter(is_sharded, model.modules()):
        yield module, "_get_fsdp_state"
        yield fsdp_state(module), "_is_root _auto_reshard_after_forward"
        for group in parameter_groups(module):
            yield group, _GROUPS
            group._init_mp_dtypes()
            yield group, "_reduce_dtype"
            yield group.fsdp_params[0], _PARAMETERS
