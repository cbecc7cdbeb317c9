"""The model that is attached, and its trained parameters: those of the module inside DDP that DDP does not ignore."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from thinwire.sparse import SUPPORTED_DTYPES

logger = logging.getLogger("thinwire")

INSIDE_DDP = (
    "thinwire is attached to a module that DistributedDataParallel or replicate() synchronizes too, so gradients would"
    " travel twice: attach the DDP model, as in `ddp = DistributedDataParallel(module); sync = thinwire.attach(ddp)`"
    " (with Accelerate what prepare() returned, in a callback of transformers `trainer.model_wrapped`); or train the"
    " plain module without either"
)


def module_of(model: nn.Module) -> nn.Module:
    """Return the module that a model trains: that inside DDP, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def synchronized_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters by name, without those that DDP ignores: ranks may have others there, of other shapes.

    DDP ignores a name only below the root, and a parameter that has several names only by all of them.
    """
    ignored = model.parameters_to_ignore if isinstance(model, DistributedDataParallel) else ()
    known: set[int] = set()
    named = nn.Module.named_parameters(module_of(model), remove_duplicate=False)  # which modules of TorchRec override
    for name, parameter in named:
        is_ignored = (name if "." in name else f".{name}") in ignored
        if not is_ignored and id(parameter) not in known:
            known.add(id(parameter))
            yield name, parameter


def is_replicated(module: nn.Module) -> bool:
    """Return whether ``torch.distributed._composable.replicate``, DDP without a wrapper, was called on a module."""
    loaded = sys.modules.get("torch.distributed._composable.replicate")
    return loaded is not None and isinstance(module, loaded.DDP)


def find_model(model: nn.Module) -> nn.Module:
    """Return the model itself, or the one DDP that it wraps, as results of `torch.compile` and Fabric do."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"an object of {type(model).__name__}"
        raise ValueError(f"attach needs the model, not {given}: pass a DistributedDataParallel or another nn.Module")
    for module in model.modules():
        if _is_any(module, "torch.distributed.fsdp", "FSDPModule", "FullyShardedDataParallel"):
            raise ValueError(
                "attach does not take FSDP models yet: a shard has its gradient on one rank only. Use"
                " DistributedDataParallel, or a plain module"
            )
        if is_replicated(module):
            raise ValueError(INSIDE_DDP)
        _check_engine(module)
    inside = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel) and module is not model
    ]
    if not inside:
        return model
    name, ddp = inside[0]
    if len(inside) == 1 and not isinstance(model, DistributedDataParallel) and _has_all_parameters(ddp, model):
        logger.info("%s is a wrapper of a DistributedDataParallel, %r: attached to that", type(model).__name__, name)
        return ddp
    raise ValueError(
        f"there is a DistributedDataParallel inside of this module, which trains other parameters too: attach that one"
        f" instead, with attach(model.{name})"
    )


def _check_engine(module: nn.Module) -> None:
    """Raise ValueError for what DeepSpeed or TorchRec synchronizes where no DDP is seen: in hooks, and in lists."""
    for hook in module._forward_pre_hooks.values():
        if getattr(hook, "__qualname__", "").startswith("DeepSpeedEngine."):
            held = (cell.cell_contents for cell in hook.__closure__ or ())
            if any(getattr(engine, "enable_backward_allreduce", False) for engine in held):
                raise ValueError(
                    "a DeepSpeed engine reduces the gradients of this module by itself, so they would travel twice:"
                    " with ZeRO stage 0 use thinwire.integrations.deepspeed.attach(engine), else train without attach"
                )
    parts = module.modules() if hasattr(module, "_dmp_wrapped_module") else ()
    if any(isinstance(lookup, DistributedDataParallel) for part in parts for lookup in getattr(part, "_lookups", ())):
        raise ValueError(
            "this DistributedModelParallel has replicated tables in DDPs of their own: use"
            " thinwire.integrations.torchrec.attach(model), which attaches to them and to its dense parameters"
        )


def _has_all_parameters(part: nn.Module, whole: nn.Module) -> bool:
    """Return whether all trained parameters of the whole are in a part."""
    known = {id(parameter) for parameter in part.parameters()}
    return all(id(parameter) in known for parameter in whole.parameters() if parameter.requires_grad)


def check_parameters(model: nn.Module) -> None:
    """Raise ValueError if a model has no trained parameters, or one that cannot be synchronized."""
    trained = (parameter.device for _, parameter in synchronized_parameters(model) if parameter.requires_grad)
    device = next(trained, None)
    if next(synchronized_parameters(model), None) is None:
        raise ValueError(
            f"{type(model).__name__} has no parameters, so there is nothing to synchronize: pass the model"
        )
    if device is None:
        raise ValueError(f"no parameter of {type(model).__name__} requires a gradient, so none would be synchronized")
    for name, parameter in synchronized_parameters(model):
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name!r} is lazy and has no shape yet: run a batch through the model first")
        if parameter.requires_grad and parameter.device != device:
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, others are on {device}: move all to one device"
            )
        if parameter.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device and has no values yet: see Module.to_empty()")
        is_known = parameter.dtype in SUPPORTED_DTYPES or parameter.is_complex()
        if parameter.requires_grad and not is_known:
            raise ValueError(f"parameter {name!r} has dtype {parameter.dtype}, which is not supported")


def check_mesh(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError if a process group, in which gradients are averaged, has several parts of one DTensor."""
    ranks = set(dist.get_process_group_ranks(group))
    for name, parameter in synchronized_parameters(model):
        for number, placement in enumerate(parameter.placements if is_dtensor(parameter) else ()):
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            others = ranks.intersection(dist.get_process_group_ranks(mesh.get_group(number))) - {dist.get_rank()}
            if others and not placement.is_replicate():
                raise ValueError(
                    f"parameter {name!r} is a DTensor, {placement} over ranks {sorted(others | {dist.get_rank()})}, and"
                    " gradients are averaged over ranks that have copies: pass process_group=mesh['dp'], the"
                    " data-parallel dimension of the mesh"
                )


def is_dtensor(tensor: object) -> bool:
    return _is_any(tensor, "torch.distributed.tensor", "DTensor")


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank has, in the same memory, or any other tensor itself."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def like(parameter: Any, local: Tensor) -> Tensor:
    """Return this rank's part of a DTensor as a DTensor that is laid out like ``parameter``, if that is one."""
    if not is_dtensor(parameter):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return type(parameter.data).from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _is_any(value: object, module: str, *names: str) -> bool:
    """Return whether a value is of one of these classes, without importing them: FSDP costs 1.2 s."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, tuple(getattr(loaded, name) for name in names))
