"""DeepSpeed: checkpoints of an engine in the memory of peers, and exact sparse gradients for ZeRO stage 0.

An engine of ZeRO stage 1 or 2 has a shard of the optimizer on each rank: flat fp32 masters, which are the parameters of
the torch optimizer inside of DeepSpeed's, and that optimizer's state. Read on deepspeed 0.19.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.attach import attach as attach_model
from thinwire.checkpoint import Checkpointer
from thinwire.gradients.synchronizer import Synchronizer

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def checkpointer(engine: Any, **options: Any) -> Checkpointer:
    """Return a `Checkpointer` of an engine's model, optimizer, schedule, loss scale and counters; on all ranks.

    Call its ``restore`` before training, and its ``step`` after ``engine.step()`` wherever that stepped: at the end of
    an accumulation. Restored on as many ranks, training goes on bitwise as it would have.

    Args:
        engine: what ``deepspeed.initialize`` returned first, of ZeRO stage 0, 1 or 2.
        options: other arguments of `Checkpointer`, such as ``policy`` and ``storage``.

    Raises:
        ValueError: an engine of stage 3; and as `Checkpointer`.

    Example:
        >>> checkpointer = thinwire.integrations.deepspeed.checkpointer(engine)          # doctest: +SKIP
        >>> first = checkpointer.restore() or 0                                          # doctest: +SKIP
        >>> for step in range(first, num_steps):                                         # doctest: +SKIP
        ...     engine.backward(loss(engine, step))
        ...     engine.step()
        ...     checkpointer.step()
    """
    if engine.zero_optimization_stage() > 2:
        raise ValueError("ZeRO stage 3 shards parameters too, which is not saved here: use stage 0, 1 or 2")
    state = EngineState(engine, options.pop("data", None))
    return Checkpointer(engine.module, _stepped(engine), scheduler=engine.lr_scheduler, data=state, **options)


class EngineState:
    """The state of an engine that neither its module nor its torch optimizer has, on this rank.

    Args:
        engine: the engine.
        data: the position in the data, with ``state_dict`` and ``load_state_dict``; or None.
    """

    def __init__(self, engine: Any, data: Any = None) -> None:
        self._engine, self._data = engine, data

    def state_dict(self) -> dict[str, Any]:
        """Return masters, which are the optimizer's own tensors, and numbers."""
        scaler = self._scaler()
        return {
            "world_size": dist.get_world_size(),
            "masters": self._masters(),
            "counters": {name: getattr(self._engine, name) for name in COUNTERS},
            "scaler": {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)},
            "data": None if self._data is None else self._data.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank.

        Raises:
            ValueError: it is of another number of ranks, which share the optimizer in other shards.
        """
        if state["world_size"] != dist.get_world_size():
            raise ValueError(
                f"ZeRO's shards of {state['world_size']} ranks cannot be loaded on {dist.get_world_size()}: start as"
                " many, or use DeepSpeed's universal checkpoints"
            )
        for master, saved in zip(self._masters(), state["masters"], strict=True):
            master.copy_(saved)
        for name, value in state["counters"].items():
            setattr(self._engine, name, value)
        for name, value in state["scaler"].items():
            setattr(self._scaler(), name, value)
        if self._data is not None:
            self._data.load_state_dict(state["data"])

    def _masters(self) -> list[nn.Parameter]:
        """Return what the optimizer steps, where that is not the module's parameters themselves."""
        own = {id(parameter) for parameter in self._engine.module.parameters()}
        stepped = [entry for group in _stepped(self._engine).param_groups for entry in group["params"]]
        return [entry for entry in stepped if id(entry) not in own]

    def _scaler(self) -> Any:
        """Return what has the loss scale: of ZeRO, of fp16 without it, or None."""
        optimizer = self._engine.optimizer
        return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _stepped(engine: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer, which DeepSpeed's own may have inside."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


class EngineSync:
    """A `thinwire.Synchronizer` of an engine's module, with all its methods; `detach` gives its all-reduce back."""

    def __init__(self, engine: Any, synchronizer: Synchronizer) -> None:
        self._engine, self._synchronizer = engine, synchronizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_synchronizer"], name)

    def detach(self) -> None:
        """Return the engine to its own all-reduce, on all ranks."""
        self._synchronizer.detach()
        self._engine.enable_backward_allreduce = True


def attach(engine: Any, **options: Any) -> EngineSync:
    """Synchronize the gradients of an engine of ZeRO stage 0 through thinwire, in place of its own all-reduce.

    With gradient accumulation, run all backward passes but the last inside ``sync.no_sync()``.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
        options: keyword arguments of `thinwire.attach`.

    Raises:
        ValueError: an engine of another stage, which reduces gradients into shards by itself; and as `thinwire.attach`.

    Example:
        >>> engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)   # doctest: +SKIP
        >>> sync = thinwire.integrations.deepspeed.attach(engine)                        # doctest: +SKIP
    """
    if stage := engine.zero_optimization_stage():
        raise ValueError(f"ZeRO stage {stage} reduces gradients into shards by itself: only stage 0 can be attached")
    engine.enable_backward_allreduce = False
    try:
        return EngineSync(engine, attach_model(engine.module, **options))
    except BaseException:  # Ctrl-C, too
        engine.enable_backward_allreduce = True
        raise
