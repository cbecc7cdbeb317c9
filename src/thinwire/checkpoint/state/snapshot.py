"""Content of a checkpoint: the training state of one rank, gathered, and put back in place."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.checkpoint.state.decode import is_writable, prepare
from thinwire.checkpoint.state.encode import flatten
from thinwire.checkpoint.state.layout import StateLayout, TensorSlice
from thinwire.checkpoint.state.sharding import Targets, fill_own
from thinwire.errors import ThinwireError

_PARTS = "optimizer", "scheduler", "scaler", "synchronizer", "data"


@dataclass(frozen=True)
class TrainingState:
    """All state that training needs to continue as if uninterrupted.

    Everything but the model has ``state_dict`` and ``load_state_dict``; parts that are None are left out. There may be
    a list, tuple or dict of optimizers, and of the others: parts named ``optimizer.0`` or ``optimizer.generator``.
    ``compares``: whether ranks that differ in what data parallelism keeps alike are an error.
    """

    model: nn.Module
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    synchronizer: Any = None
    data: Any = None
    compares: bool = True

    def __post_init__(self) -> None:
        for name, part in {"model": self.model, **self.parts()}.items():
            if not hasattr(part, "load_state_dict"):
                raise ValueError(f"{name} is of class {type(part).__name__}, which has no load_state_dict")

    @property
    def module(self) -> nn.Module:
        """The model, without DDP around it."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def parts(self) -> dict[str, Any]:
        return {name: part for kind in _PARTS for name, part in _each(kind, getattr(self, kind))}

    def optimizers(self) -> list[Any]:
        return [part for _, part in _each("optimizer", self.optimizer)]

    def capture(self, step: int) -> dict[str, Any]:
        """Return the state after ``step`` steps. Its tensors are the training's own: copy them before they change."""
        states = {name: _state_of(name, part) for name, part in self.parts().items()}
        model = self.module.state_dict(keep_vars=True)
        return {"model": model, **states, "step": step, "random": random_states(_devices(model))}

    def is_stepped(self, where: TensorSlice, tensor: Tensor) -> bool:
        """Return whether ``optimizer.step`` alone writes to a tensor: a parameter, or the optimizer's own state."""
        if where.path.startswith("optimizer"):
            return ".state." in where.path
        groups = [group for optimizer in self.optimizers() for group in optimizer.param_groups]
        return any(tensor is parameter for group in groups for parameter in group["params"])

    @property
    def keeps_ranks_alike(self) -> bool:
        """Whether ranks should be the same after every step: under an outer loop of thinwire they are now and then."""
        synchronizers = _each("synchronizer", self.synchronizer)
        return self.compares and all(getattr(part, "keeps_ranks_alike", True) for _, part in synchronizers)

    def is_replicated(self, path: str, value: Any) -> bool:
        """Return whether data parallelism keeps a tensor or another value alike on all ranks: parameters, and the
        optimizer's state, with its learning rates and the like."""
        if not self.keeps_ranks_alike:
            return False
        if path.startswith("optimizer"):
            is_kept_alike = ".state." in path or ".param_groups." in path
            return is_kept_alike and all(_local(each) is each for each in self.optimizers())
        return path.startswith("model.") and isinstance(value, nn.Parameter)

    def load(self, layout: StateLayout, tensors: Sequence[Tensor]) -> int:
        """Load a state that this rank stored, tensors in place, and return the number of steps before it.

        Raises ValueError if its parts differ from this training's.
        """
        state, targets = self.prepare(layout)
        fill_own(targets, layout, tensors)
        return self.adopt(state)

    def prepare(self, layout: StateLayout) -> tuple[dict[str, Any], Targets]:
        """Return a stored state for `adopt`, and its tensors, to be filled before that. Raises ValueError."""
        existing = self.capture(0)
        state, targets = prepare(existing, layout)
        if not isinstance(state, dict) or set(state) != set(existing):
            raise ValueError(
                f"the checkpoint has {sorted(state)} and this training {sorted(existing)}: pass the Checkpointer the"
                " same parts"
            )
        return state, targets

    def adopt(self, state: dict[str, Any], keep: Sequence[str] = ()) -> int:
        """Load a state and return the number of steps before it. Parts in ``keep`` keep their own state."""
        self.module.load_state_dict(state["model"])
        for name, part in self.parts().items():
            if name not in keep:
                _load(part, state[name])
        if "random" not in keep:
            set_random_states(state["random"], _devices(self.module.state_dict(keep_vars=True)))
        return int(state["step"])

    def _model_tensors(self) -> dict[str, str]:
        return _described(flatten({"model": self.module.state_dict()})[0])

    def difference(self, layout: StateLayout) -> str:
        """Return in what a stored state is of another training, by the first name that differs."""
        stored, here = _described(layout), self._model_tensors()
        counts = f"it has {len(stored)} tensors of the model, and this model {len(here)}"
        for name in [*here, *stored]:
            if name not in stored:
                return f"{counts}; {name} is new, {here[name]}"
            if name not in here:
                return f"{counts}; {name} is gone, {stored[name]}"
            if stored[name] != here[name]:
                return f"{counts}; {name} was {stored[name]} and is {here[name]}"
        parts = [str(key) for key, _ in layout.tree["dict"]] if isinstance(layout.tree, dict) else []
        own = ["model", *self.parts(), "step", "random"]
        if sorted(parts) != sorted(own):
            return f"it has the parts {', '.join(parts)}, and this training {', '.join(own)}"
        return "its model is the same, but not the class of an optimizer"

    def describe(self) -> str:
        """Return a digest of everything in which checkpoints of other models differ: names, shapes, dtypes, parts.

        The same on all ranks, and on any number of them. Raises ValueError, with the path, for a state that cannot be
        stored, or not restored.
        """
        lines = [f"{name} {kind}" for name, kind in self._model_tensors().items()]
        for name, part in self.parts().items():
            try:
                state = _local(part).state_dict()
            except Exception:  # perhaps it has none yet: the first checkpoint will tell
                continue
            flatten({name: state})
        for name, part in {"model": self.module, **self.parts()}.items():
            for key, tensor in part.state_dict().items() if isinstance(part, nn.Module) else ():
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not is_writable(tensor):
                    raise ValueError(
                        f"{name}.{key}: load_state_dict cannot write to it, because it was made by expand() or in"
                        " inference mode: register a clone() of it, made outside of inference mode"
                    )
        lines += [name for name in self.parts() if not name.startswith("optimizer")]
        optimizers = _each("optimizer", self.optimizer) or [("optimizer", None)]
        lines += [f"{name} {type(part).__name__}" for name, part in optimizers]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _described(layout: StateLayout) -> dict[str, str]:
    """The tensors of the model by their names: in what another model differs."""
    result = {}
    for item in layout.slices:
        if item.path.startswith("model."):
            result[item.path] = f"{item.dtype} {item.shape if item.part is None else item.part.shape}"
            result[item.path] += f" {item.part.placements} {item.part.mesh}" if item.part is not None else ""
    return result


def _devices(model: dict[str, Any]) -> list[torch.device]:
    """Return the CUDA devices of a model, which need not be the current one."""
    result = {entry.device for entry in model.values() if isinstance(entry, Tensor) and entry.is_cuda}
    return sorted(result, key=lambda device: device.index)


def _each(kind: str, parts: Any) -> list[tuple[str, Any]]:
    """One part, or a list, tuple or dict of them, by name."""
    if isinstance(parts, (list, tuple)):
        parts = dict(enumerate(parts))
    if isinstance(parts, dict):
        return [(f"{kind}.{name}", part) for name, part in parts.items()]
    return [] if parts is None else [(kind, parts)]


def _local(part: Any) -> Any:
    """Torch's ZeroRedundancyOptimizer has one for this rank's share; its own state is that of all, sent to one rank."""
    return part.optim if hasattr(part, "consolidate_state_dict") else part


def _state_of(name: str, part: Any) -> Any:
    try:
        return _local(part).state_dict()
    except (OSError, ThinwireError):  # these may pass
        raise
    except Exception as error:
        raise ValueError(f"{name}: {type(part).__name__}.state_dict raised {type(error).__name__}: {error}") from error


def _load(part: Any, state: Any) -> None:
    local = _local(part)
    local.load_state_dict(state)
    if local is not part:
        for group, loaded in zip(part.param_groups, local.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})


def random_states(devices: Sequence[torch.device] = ()) -> dict[str, Any]:
    """Return the random states of torch, on the host and on these CUDA devices, of Python and of numpy."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, last = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cat([torch.cuda.get_rng_state(device) for device in devices]) if devices else None,
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
        "numpy": [str(name), torch.from_numpy(np.array(keys, np.int64)), int(position), int(has_gauss), float(last)],
    }


def set_random_states(states: dict[str, Any], devices: Sequence[torch.device] = ()) -> None:
    """Restore what `random_states` returned. Devices may be others; of more or fewer, the first ones are restored."""
    version, internal, gauss = states["python"]
    name, keys, *others = states["numpy"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    np.random.set_state((name, keys.numpy().astype(np.uint32), *others))
    torch.set_rng_state(states["torch"])
    if (cuda := states["cuda"]) is not None and devices:
        for device, state in zip(devices, cuda.split(len(torch.cuda.get_rng_state(devices[0]))), strict=False):
            torch.cuda.set_rng_state(state, device)
