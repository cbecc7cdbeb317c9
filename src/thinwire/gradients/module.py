"""The model that is attached, and its trained parameters: without those that DDP ignores, or that are left out."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from datetime import timedelta
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from thinwire.errors import logger
from thinwire.rows.sparse import SUPPORTED_DTYPES

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

INSIDE_DDP = (
    "thinwire is attached to a module that DistributedDataParallel or replicate() synchronizes too, so gradients would"
    " travel twice: attach the DDP model, as in `ddp = DistributedDataParallel(module); sync = thinwire.attach(ddp)`"
    " (with Accelerate what prepare() returned, in a callback of transformers `trainer.model_wrapped`); or train the"
    " plain module without either"
)


_ORDINARY = (Tensor, nn.Parameter)


def module_of(model: nn.Module) -> nn.Module:
    """Return the module that a model trains: that inside DDP, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def left_out(model: nn.Module, chosen: str | Iterable[str | Tensor]) -> frozenset[str]:
    """Return the names of the parameters and buffers that are left alone.

    Args:
        chosen: names, patterns of names (``fnmatch``), or the parameters themselves, under all of their names.

    Raises:
        ValueError: a name or pattern that matches nothing, a tensor of another model, or one that DDP or FSDP
            synchronizes.
    """
    is_one = isinstance(chosen, (str, Tensor)) or not isinstance(chosen, Iterable | None)
    wanted = [chosen] if is_one else list(chosen or ())
    module = module_of(model)
    parameters = nn.Module.named_parameters(module, remove_duplicate=False)  # which modules of TorchRec override
    tensors = dict([*parameters, *nn.Module.named_buffers(module, remove_duplicate=False)])
    alone: set[int] = set()
    for entry in wanted:
        matches = {
            id(t) for name, t in tensors.items() if t is entry or (isinstance(entry, str) and fnmatchcase(name, entry))
        }
        if not matches:
            shown = f"a {type(entry).__name__} of another model" if isinstance(entry, Tensor) else repr(entry)
            known = [*tensors, *(f"{name}.*" for name, _ in module.named_modules() if name)]
            near = get_close_matches(entry, known, n=1, cutoff=0.4) if isinstance(entry, str) else ()
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"exclude has {shown}, which is no parameter or buffer of {type(module).__name__}{hint}")
        alone |= matches
    names = frozenset(name for name, tensor in tensors.items() if id(tensor) in alone)
    wrapped = names if module is not model else {name for name in names if is_dtensor(tensors[name])}
    if wrapped and (module is not model or is_sharded(model)):
        raise ValueError(
            f"exclude has {min(wrapped)!r}, which the model averages itself. DDP: before building it call"
            " DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names). FSDP: pass"
            " ignored_params= to fully_shard, and exclude= for these"
        )
    return names


def synchronized_parameters(model: nn.Module, excluded: Container[str] = ()) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters by name, without those that DDP ignores or that are excluded: ranks may have others there.

    DDP ignores a name only below the root, and a parameter that has several names only by all of them. Of a model that
    FSDP2 shards those are yielded that FSDP ignores: `thinwire.gradients.sharded.layout` knows the others.
    """
    shards = is_sharded(model)
    ignored = model.parameters_to_ignore if isinstance(model, DistributedDataParallel) else ()
    known: set[int] = set()
    named = nn.Module.named_parameters(module_of(model), remove_duplicate=False)  # as in `left_out`
    for name, parameter in named:
        is_ignored = (name if "." in name else f".{name}") in ignored or name in excluded
        is_ignored = is_ignored or (shards and is_dtensor(parameter))
        if not is_ignored and id(parameter) not in known:
            known.add(id(parameter))
            yield name, parameter


def trained_names(model: nn.Module, excluded: Container[str] = ()) -> dict[int, str]:
    """Return the names of trained parameters by identity, of those too that FSDP shards."""
    named = model.named_parameters() if is_sharded(model) else synchronized_parameters(model, excluded)
    return {id(one): name for name, one in named if one.requires_grad and name not in excluded}


def synchronized_buffers(module: nn.Module, excluded: Container[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers by name, without those that are excluded."""
    return ((name, buffer) for name, buffer in module.named_buffers() if name not in excluded)


def is_sharded(module: nn.Module) -> bool:
    """Return whether ``fully_shard``, or the ``replicate`` that is built on it, was called on a module."""
    return is_any(module, "torch.distributed.fsdp", "FSDPModule")


def is_replicated(module: nn.Module) -> bool:
    """Return whether ``torch.distributed._composable.replicate``, DDP without a wrapper, was called on a module."""
    loaded = sys.modules.get("torch.distributed._composable.replicate")
    return loaded is not None and isinstance(module, loaded.DDP)


def find_model(model: nn.Module) -> nn.Module:
    """Return the model itself, or the one DDP or FSDP2 model that it wraps, as `torch.compile` and Fabric do."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"an object of {type(model).__name__}"
        raise ValueError(f"attach needs the model, not {given}: pass a DistributedDataParallel or another nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "attach does not take a whole torch.jit.ScriptModule, whose forward runs no hooks in Python: wrap it in an"
            " nn.Module, or script its parts"
        )
    for module in model.modules():
        if is_any(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            raise ValueError(
                "attach does not take FullyShardedDataParallel, which torch has replaced: shard the model with"
                " torch.distributed.fsdp.fully_shard"
            )
        if is_replicated(module):
            raise ValueError(INSIDE_DDP)
        check_engine(module)
    inside: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules() if not is_sharded(model) else ():
        is_inner = is_sharded(module) and any(name.startswith(f"{outer}.") for outer, _ in inside)
        if (isinstance(module, DistributedDataParallel) or is_sharded(module)) and module is not model and not is_inner:
            inside.append((name, module))
    if not inside:
        return model
    (name, ddp), *others = inside
    kind = "an FSDP model" if is_sharded(ddp) else "a DistributedDataParallel"
    has_all = trained_names(model).keys() <= set(map(id, ddp.parameters()))
    if not others and not isinstance(model, DistributedDataParallel) and has_all:
        logger.info("%s is a wrapper of %s, %r: attached to that", type(model).__name__, kind, name)
        return ddp
    if is_sharded(ddp):
        raise ValueError(
            f"fully_shard was called on parts of this module, such as {name!r}, and not on the whole: call it on the"
            " module itself too, after its parts"
        )
    lines = " and ".join(f"attach(model.{name})" for name, _ in inside)
    raise ValueError(
        f"there is a DistributedDataParallel inside of this {type(model).__name__}, which trains other parameters too:"
        f" attach that one instead, with {lines}"
        if not others
        else f"there are {len(inside)} DistributedDataParallel inside of this {type(model).__name__}: attach each of"
        f" them, with {lines}"
    )


def check_engine(module: nn.Module) -> None:
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


def check_parameters(model: nn.Module, excluded: Container[str] = ()) -> None:
    """Raise ValueError if a model has no trained parameters, or one that cannot be synchronized."""
    named = dict(synchronized_parameters(model, excluded))
    device = next((parameter.device for parameter in named.values() if parameter.requires_grad), None)
    if is_sharded(model) and device is None:  # FSDP ignores nothing that is trained
        return
    if not named:
        why = " but those of exclude=, which leaves nothing" if excluded else ": pass the model"
        raise ValueError(f"{type(model).__name__} has no parameters{why}")
    if device is None:
        raise ValueError(f"no parameter of {type(model).__name__} requires a gradient, so none would be synchronized")
    for name, parameter in named.items():
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
    if not (is_sharded(model) or isinstance(model, DistributedDataParallel)):
        for name, buffer in synchronized_buffers(model, excluded):
            strides = zip(buffer.shape, buffer.stride(), strict=True) if buffer.layout == torch.strided else [(2, 0)]
            if any(size > 1 and stride == 0 for size, stride in strides):
                raise ValueError(
                    f"buffer {name!r} is expanded or sparse, and cannot be filled with the values of rank 0: make it"
                    f" contiguous, or leave it out by exclude={name!r}"
                )


def check_timeout(timeout: object) -> None:
    """Raise ValueError for what is no time to wait."""
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        shown = f"{timeout.total_seconds():g} s" if isinstance(timeout, timedelta) else repr(timeout)
        raise ValueError(f"timeout is {shown}: pass a positive datetime.timedelta, such as timedelta(seconds=5)")


def check_mesh(model: nn.Module, group: dist.ProcessGroup, excluded: Container[str] = ()) -> None:
    """Raise ValueError if a process group, in which gradients are averaged, has several parts of one DTensor."""
    ranks = set(dist.get_process_group_ranks(group))
    for name, parameter in synchronized_parameters(model, excluded):
        tensor: object = parameter
        if not is_dtensor(tensor):
            continue
        for number, placement in enumerate(tensor.placements):
            line = tensor.device_mesh.get_group(number)
            others = ranks.intersection(dist.get_process_group_ranks(line)) - {dist.get_rank()}
            if others and not placement.is_replicate():
                raise ValueError(
                    f"parameter {name!r} is a DTensor, {placement!r} over ranks {sorted({dist.get_rank(), *others})},"
                    " and gradients are averaged over ranks that have copies: pass process_group=mesh['dp'], the"
                    " data-parallel dimension of the mesh"
                )


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    return type(tensor) not in _ORDINARY and is_any(tensor, "torch.distributed.tensor", "DTensor")


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank has, in the same memory, or any other tensor itself."""
    given: object = tensor
    return given.to_local().detach() if is_dtensor(given) else tensor


def like(parameter: object, local: Tensor) -> Tensor:
    """Return this rank's part of a DTensor as a DTensor that is laid out like ``parameter``, if that is one."""
    if not is_dtensor(parameter):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return parameter.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def is_any(value: object, module: str, *names: str) -> bool:
    """Return whether a value is of one of these classes, without importing them: FSDP costs 1.2 s."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, tuple(getattr(loaded, name) for name in names))
