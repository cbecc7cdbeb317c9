"""Rivals: checkpoints in memory by lm-resiliency (GEMINI's first author), and local checkpoints by NVRx (NVIDIA).

Each is used as its documentation says, with a checkpoint in every iteration and one replica on the next rank. Neither
package is needed by anything else here.
"""

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.lab.bench.checkpoint import methods
from thinwire.lab.bench.checkpoint.dcp import DcpAsync, DcpSync
from thinwire.lab.bench.checkpoint.work import Trainer

_PACKAGES = {
    methods.LM_RESILIENCY: ("lm_resiliency", "lm-resiliency"),
    methods.NVRX: ("nvidia_resiliency_ext", "nvidia-resiliency-ext"),
}


def unavailable(method: str) -> str:
    """Return why a method cannot run here, or an empty text."""
    module, package = _PACKAGES.get(method, ("", ""))
    return f"pip install {package}" if module and importlib.util.find_spec(module) is None else ""


def host_directory(destination: methods.Destination, rank: int) -> Path:
    """Return the directory of a rank's own host, which is lost with it."""
    return Path(destination.directory) / f"host-{rank}.disk"


class LmResiliency(methods.CheckpointMethod):
    """lm-resiliency's GEMINI: two own versions and two of the peer in the memory of the trainer, copied by a thread.

    A killed trainer loses them. Its disk tier is written every 100 steps, as by default.
    """

    name = methods.LM_RESILIENCY

    def __init__(self, training: TrainingState, destination: methods.Destination, rank: int) -> None:
        package = importlib.import_module("lm_resiliency.checkpointing")
        self._training, self._started = training, 0.0
        config = package.InMemoryCkptConfig(
            interval=1, replication_jump=1, disk_folder=str(host_directory(destination, rank)),
            run_id=f"{destination.run_id}-{self.name}", pin_memory=torch.cuda.is_available(),
        )  # fmt: skip
        self._manager = package.InMemoryCheckpointManager(config)
        optimizer = training.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        self._unhook = optimizer.register_step_pre_hook(lambda *_: self._manager.maybe_wait()).remove

    def step(self, step: int) -> bool:
        self._started = time.perf_counter()
        with torch.no_grad():
            self._manager.save(self._training.capture(step), step)
        if step % self._manager.config.disk_flush_interval == 0:
            self._manager.flush_to_disk(step)
        return True

    def finish(self) -> float | None:
        self._manager.finalize_replication()
        return time.perf_counter() - self._started

    def restore(self) -> int | None:
        loaded = self._manager.load()
        return None if loaded is None else self._training.adopt(loaded[0])

    def close(self) -> None:
        self._unhook()
        self._manager.close()


class Nvrx(methods.CheckpointMethod):
    """NVRx's local checkpoints with clique replication, to a directory of each host.

    They are synchronous: the asynchronous ones wait for CUDA, even where there is none.
    """

    name = methods.NVRX

    def __init__(self, training: TrainingState, destination: methods.Destination, rank: int) -> None:
        local = "nvidia_resiliency_ext.checkpointing.local"
        manager = importlib.import_module(f"{local}.ckpt_managers.local_manager").LocalCheckpointManager
        clique = importlib.import_module(f"{local}.replication.strategies").CliqueReplicationStrategy
        self._training = training
        strategy = clique.from_replication_params(replication_jump=1, replication_factor=2)
        session = f"{destination.run_id}-{self.name}"
        self._manager = manager(host_directory(destination, rank), session, strategy)

    def step(self, step: int) -> bool:
        self._manager.save(CpuState(self._training.capture(step)), step, is_async=False)
        return True

    def restore(self) -> int | None:
        newest = self._manager.find_latest()
        for path in Path(self._manager.local_ckpt_dir).glob("iter_*"):
            if int(path.name.split("_")[1]) > newest:
                path.unlink()  # of a step that not all ranks have: it would refuse to save it again
        if newest == -1:
            return None
        loaded, _ = self._manager.load()
        return self._training.adopt(loaded.whole())


class CpuState:
    """A state in NVRx's interface for it (`TensorAwareStateDict`): its own class for that insists on CUDA."""

    def __init__(self, state: dict[str, Any]) -> None:
        leaves, self._spec = pytree.tree_flatten(state)
        self._plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._where = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._tensors: list[Tensor] | None = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in self._tensors]

    def whole(self) -> dict[str, Any]:
        leaves = list(self._plain)
        for number, tensor in zip(self._where, self.tensors, strict=True):
            leaves[number] = tensor
        return pytree.tree_unflatten(leaves, self._spec)

    def pop_tensors(self) -> Sequence[Tensor]:
        tensors, self._tensors = list(self.tensors), None
        return tensors

    @property
    def tensors(self) -> Iterable[Tensor]:
        assert self._tensors is not None
        return self._tensors

    @property
    def is_hollow(self) -> bool:
        return self._tensors is None

    def insert_tensors(self, tensor_data: Iterable[Tensor]) -> None:
        self._tensors = list(tensor_data)

    def init_tensors(self) -> None:
        self._tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in self._shapes]

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self._tensors = [tensor.clone() for tensor in self.tensors]

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Do nothing: they are where they were."""


_OF_STATE: dict[str, Callable[..., methods.CheckpointMethod]] = {
    kind.name: kind for kind in (DcpSync, DcpAsync, LmResiliency, Nvrx)
}


def make(method: str, trainer: Trainer, destination: methods.Destination, rank: int) -> methods.CheckpointMethod:
    """Create the method of that name, on all ranks."""
    if method == methods.NONE:
        return methods.NoCheckpoints()
    if method in methods.IN_PEERS:
        return (methods.InPeers if method == methods.THINWIRE else methods.Blocking)(trainer, destination, rank)
    return _OF_STATE[method](trainer.training, destination, rank)
