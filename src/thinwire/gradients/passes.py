"""The beginning and end of a step: the running backward pass, and what happens when an exception ends it.

A step begins after the forward of the model, and ends with its backward, including passes that re-entrant
checkpointing runs inside of it. After an exception peers would wait for gradients that never come, so the lane is
broken off.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from thinwire.comm.lane import Lane
from thinwire.errors import ThinwireError, ranks_told
from thinwire.gradients.ddp import Alone, Plug
from thinwire.gradients.model import (
    INSIDE_DDP,
    check_engine,
    is_replicated,
    is_sharded,
    module_of,
    synchronized_parameters,
)
from thinwire.gradients.tables import Hook, tensors_of, weakly
from thinwire.observe.step import Clock

logger = logging.getLogger("thinwire")


class _FromOutput:
    """What is entered by the backward pass through the output of a model."""

    def enter(self) -> object:
        raise NotImplementedError

    def watch(self, output: object) -> None:
        """Enter the next pass that goes through the output of a model."""
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._on_output)

    @torch.compiler.disable
    def _on_output(self, gradients: tuple[Tensor, ...]) -> None:
        del gradients
        self.enter()


class Backward(_FromOutput):
    """The backward pass that runs when `enter` is called, at whose end ``ended`` is called.

    Autograd calls back at the end of the innermost pass. The outermost one goes through the output of the model before
    any other begins, so it is entered there if that is watched.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._callback: weakref.ref[partial[None]] | None = None
        self._task = -1

    @property
    def is_running(self) -> bool:
        """Whether the entered pass has not ended. Autograd drops the callback if an exception ends it."""
        return self._callback is not None and self._callback() is not None

    @property
    def is_nested(self) -> bool:
        """Whether this is called by another pass, inside of the one that was entered."""
        return self.is_running and self._task != torch._C._current_graph_task_id()

    def enter(self) -> bool:
        """Arrange for ``ended`` to be called; return whether a backward runs at all."""
        if not self.is_running:
            callback = partial(self._end)
            try:
                Variable._execution_engine.queue_callback(callback)
            except RuntimeError:
                return False
            self._callback, self._task = weakref.ref(callback), torch._C._current_graph_task_id()
        return True

    @torch.compiler.disable
    def _end(self) -> None:
        self._callback = None
        self._ended()


class Structure:
    """The parameters that a model had when it was attached, to check before each forward that it still has them.

    The check costs 0.1 us a parameter and a module. FSDP replaces the parameters of its modules all the time, so
    theirs are not checked.

    Args:
        model: the model, which this does not keep alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        trained = model.named_parameters() if is_sharded(model) else synchronized_parameters(model)
        self._known = {id(parameter): parameter for _, parameter in trained}
        self._is_functional = False
        self._note()

    def check(self) -> None:
        """Raise ThinwireError if a parameter was moved, replaced or added, or another wrapper took the model over."""
        if not (
            all(registry.get(name) is value for registry, name, value in self._places)
            and all(len(registry) == size for registry, size in self._sizes)
            and all(parameter.dtype is dtype and parameter.device == device for parameter, dtype, device in self._kept)
        ):
            self._explain()

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._known

    def _note(self) -> None:
        model = self._model()
        assert model is not None
        modules = list(module_of(model).modules())
        if any(map(is_sharded, modules)):
            modules = []
        scripted = torch.jit.ScriptModule  # nobody can change one, and its registries are no dicts
        fluid = [module for module in modules if not isinstance(module, scripted)]
        own = [registry for module in fluid for registry in (module._parameters, module._modules)]
        self._places = [(registry, name, value) for registry in own for name, value in registry.items()]
        self._sizes = [(registry, len(registry)) for registry in (*own, *(m._forward_pre_hooks for m in modules[:1]))]
        self._kept = [(entry, entry.dtype, entry.device) for entry in self._known.values()] if modules else []

    def _explain(self) -> None:
        """Raise for the first change that matters, and note the others."""
        model = self._model()
        assert model is not None
        module = module_of(model)
        again = "call detach() on its Synchronizer before, and attach again afterwards"
        if any(map(is_sharded, module.modules())):
            raise ThinwireError(
                f"the model was sharded after attach: {again}, as in `fully_shard(model); sync ="
                " thinwire.attach(model)`"
            )
        try:
            check_engine(module)
        except ValueError as error:
            raise ThinwireError(str(error)) from None
        kinds = {id(parameter): (dtype, device) for parameter, dtype, device in self._kept}
        trained = [(name, parameter) for name, parameter in synchronized_parameters(model) if parameter.requires_grad]
        for name, parameter in trained:
            now = (parameter.dtype, parameter.device)
            if kinds.get(id(parameter), now) != now:
                raise ThinwireError(
                    f"parameter {name!r} became {now[0]} on {now[1]} after attach: move or cast the model first, and"
                    f" attach it last; or {again}"
                )
            if parameter not in self and isinstance(parameter, nn.Parameter):
                raise ThinwireError(
                    f"parameter {name!r} was added or replaced after attach, and would not be synchronized: {again}"
                )
        others = [name for name, parameter in trained if parameter not in self and parameter.is_leaf]
        if others and not self._is_functional:
            self._is_functional = True
            text = (
                f"the attached model was called with another tensor as its parameter {others[0]!r}, as torch.func does:"
                " the gradient of that tensor is not synchronized by thinwire"
            )
            logger.warning("%s", text)
            warnings.warn(text, stacklevel=5)
        if all(isinstance(parameter, nn.Parameter) for parameter in module.parameters()):
            self._note()


REASON = "an exception ended a backward pass of rank {rank} before all its gradients were there"


class Guard(_FromOutput):
    """A guard that breaks the lane off when an exception ends a backward pass that ranks make together.

    Autograd calls back at the end of a pass. After an exception it drops the callback uncalled, whatever raised: a hook
    of the user, a function of torch, or Ctrl-C.

    Args:
        lanes: the lanes on which peers wait.
        waits_from_output: whether they wait for a pass as soon as it goes through the output of the model.
    """

    def __init__(self, lanes: Sequence[Lane], waits_from_output: bool = True) -> None:
        self._lanes, self.waits_from_output = lanes, waits_from_output
        self._running: weakref.ref[_Pass] | None = None

    def enter(self) -> None:
        """Guard the running backward pass, for which peers wait; outside of one nothing happens."""
        if self._running is None or self._running() is None:
            running = _Pass(self._broke_off)
            try:
                Variable._execution_engine.queue_callback(running)
            except RuntimeError:
                running()
            else:
                self._running = weakref.ref(running)

    def watch(self, output: object) -> None:
        """Guard the pass through the output of the model: it may fail before there is any gradient."""
        if self.waits_from_output:
            super().watch(output)

    def failed(self, error: BaseException) -> None:
        """Break off after an error in the work at the end of a pass, unless all ranks raise it and stay in step."""
        if ranks_told(error) < self._lanes[0].world_size:
            self._broke_off()

    def check(self, structure: Structure) -> None:
        """Raise ThinwireError at the beginning of a step that cannot be synchronized any more, on all ranks."""
        for lane in self._lanes:
            lane.check(
                "the gradients of this step", ". Call detach() and attach again on all ranks, or restart the job"
            )
        if self._lanes[0].world_size > 1:
            try:
                structure.check()
            except ThinwireError as error:
                for lane in self._lanes:
                    lane.break_off(f"rank {lane.global_rank}: {error}")
                raise

    def _broke_off(self) -> None:
        for lane in self._lanes:
            if lane.world_size > 1:
                lane.break_off(REASON.format(rank=self._lanes[0].global_rank))


class _Pass:
    def __init__(self, broke_off: Callable[[], None]) -> None:
        self._broke_off: Callable[[], None] | None = broke_off

    def __call__(self) -> None:
        self._broke_off = None

    def __del__(self) -> None:
        if self._broke_off is not None:
            self._broke_off()


class Passes:
    """The forward and backward passes of a model, which it does not keep alive.

    Args:
        model: the model; `watch` registers hooks on its forward.
        clock: records when its forward has ended.
        finish: called at the end of each backward pass in which `begin` was called, with whether that is a step: under
            DDP re-entrant checkpointing ends several for one forward, of which the first counts.
    """

    def __init__(self, model: nn.Module, clock: Clock, finish: Callable[[bool], None]) -> None:
        self._model, self._clock, self._finish = weakref.ref(model), clock, finish
        self._is_ddp = isinstance(model, DistributedDataParallel)
        self._began = False
        self._backward = Backward(weakly(self._end_backward))
        self._forwards = self._counted = 0  # so far, and at the last counted step
        self.is_local = False  # whether no_sync was called since the last synchronized pass
        self._plug: Plug | None = None
        self._guard: Guard | None = None
        self._handles: list[RemovableHandle] = []
        self._structure = Structure(model)
        self._warning: RemovableHandle | None = None
        self._finished = 0  # backward passes so far
        self._used: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # those at an optimizer's last step

    @property
    def are_watched(self) -> bool:
        return bool(self._handles)

    def watch(self, plug: Plug, guard: Guard) -> None:
        self._plug, self._guard = plug, guard
        model = self._model()
        assert model is not None
        module = module_of(model)  # hooks on DDP itself would break its compiled graph once more
        self._handles = [
            module.register_forward_pre_hook(Hook(self._before_forward)),
            module.register_forward_hook(Hook(self._after_forward)),
        ]
        if not isinstance(plug, Alone):
            self._warning = register_optimizer_step_pre_hook(weakly(self._before_optimizer))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stop_warning()

    def begin(self) -> bool:
        """Arrange for ``finish`` to be called at the end of the running backward; return whether there is one."""
        assert self._guard is not None
        self._guard.enter()
        if self._began:
            self._forget_broken_off()
        if not self._began:
            self._began = self._backward.enter()
        return self._began

    def is_nested(self) -> bool:
        """Return whether re-entrant checkpointing runs a backward inside of the one that ends with ``finish``."""
        return self._backward.is_nested

    def _end_backward(self) -> None:
        began, self._began = self._began, False
        assert self._plug is not None
        assert self._guard is not None
        if began or self._plug.is_idle:
            self._finished, self.is_local = self._finished + 1, False
            is_repeated = self._is_ddp and 0 < self._forwards == self._counted
            self._counted = self._forwards
            try:
                self._finish(not is_repeated)
            except BaseException as error:
                self._guard.failed(error)
                raise

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if torch.compiler.is_compiling():  # anything would break its graph
            return
        self._forwards += 1
        if not self._is_ddp:
            _refuse_inside_ddp(module)
        if not torch.is_grad_enabled():
            return
        assert self._plug is not None
        self.is_local = not self._plug.synchronizes
        self._forget_broken_off()
        if not self.is_local:
            assert self._guard is not None
            self._guard.check(self._structure)

    def _after_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Record the beginning of backward: only the training script knows it more exactly."""
        if torch.compiler.is_compiling():
            return
        assert self._plug is not None
        if not (torch.is_grad_enabled() and self._plug.synchronizes):
            return
        if module.training:
            self._clock.start()
        if self._plug.begins_at_output:
            self._backward.watch(output)
        assert self._guard is not None
        self._guard.watch(output)

    def _forget_broken_off(self) -> None:
        """Forget a backward pass that an exception broke off."""
        if self._began and not self._backward.is_running:
            assert self._plug is not None
            self._began = False
            self._plug.reset()
            self._clock.reset()

    def _before_optimizer(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Warn once of gradients that thinwire has not seen since the last step of this optimizer.

        Those of `no_sync` are local on purpose. An optimizer that has mostly gradients of other models may share a few
        parameters with this one. An optimizer may step inside of a backward pass, when FSDP has reduced its gradients.
        ``torch.distributed.checkpoint`` makes the state of a new one by a step with learning rates of zero.
        """
        last, self._used[optimizer] = self._used.get(optimizer, 0), self._finished
        if last != self._finished or self.is_local or self._backward.is_running:
            return
        groups: list[dict[str, Any]] = optimizer.param_groups
        if all(float(group.get("lr", 1.0)) == 0.0 for group in groups):
            return
        used = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
        if 2 * sum(parameter in self._structure for parameter in used) <= len(used):
            return
        self._stop_warning()
        model = "DDP model itself (not model.module)" if self._is_ddp else "attached model itself (not a part of it)"
        text = (
            f"thinwire is attached, but {type(optimizer).__name__} uses gradients that it did not synchronize: no"
            f" backward pass reached its hooks since the last step of this optimizer. Call the {model} and"
            " loss.backward(): gradients of torch.autograd.grad and torch.func are not seen. For"
            " local steps on purpose use Synchronizer.no_sync()"
        )
        logger.warning(text)
        warnings.warn(text, stacklevel=5)

    def _stop_warning(self) -> None:
        if self._warning is not None:
            self._warning.remove()
            self._warning = None


def _refuse_inside_ddp(module: nn.Module) -> None:
    """Raise for a plain module inside DDP: gradients would travel twice, and stay uncompressed."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if is_replicated(module) or (ddp is not None and _share_parameters(ddp, module)):
        raise ThinwireError(INSIDE_DDP)


def _share_parameters(ddp: DistributedDataParallel, module: nn.Module) -> bool:
    mine = {id(parameter) for _, parameter in synchronized_parameters(module) if parameter.requires_grad}
    return any(id(parameter) in mine for _, parameter in synchronized_parameters(ddp))
