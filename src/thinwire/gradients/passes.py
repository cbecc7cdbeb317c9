"""The beginning and end of a step: the running backward pass, and what happens when an exception ends it.

A step begins after the forward of the model, and ends with its backward, including passes that re-entrant
checkpointing runs inside of it. After an exception peers would wait for gradients that never come, so the lane is
broken off.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from thinwire.comm.lane import Lane
from thinwire.errors import ThinwireError, ranks_told
from thinwire.gradients.ddp import Plug
from thinwire.gradients.model import INSIDE_DDP, is_replicated, module_of, synchronized_parameters
from thinwire.gradients.tables import Hook, weakly
from thinwire.observe.step import Clock


class Backward:
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

    def watch(self, output: object) -> None:
        """Enter the next pass that goes through the output of a model."""
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._on_output)

    @torch.compiler.disable
    def _on_output(self, gradients: tuple[Tensor, ...]) -> None:
        del gradients
        self.enter()

    @torch.compiler.disable
    def _end(self) -> None:
        self._callback = None
        self._ended()


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield the tensors in the output of a module."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_of(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_of(vars(value))


REASON = "an exception ended a backward pass of rank {rank} before all its gradients were there"


class Guard:
    """A guard that breaks the lane off when an exception ends a backward pass that ranks make together.

    Autograd calls back at the end of a pass. After an exception it drops the callback uncalled, whatever raised: a hook
    of the user, a function of torch, or Ctrl-C.

    Args:
        lanes: the lanes on which peers wait.
        waits_from_output: whether they wait for a pass as soon as it goes through the output of the model.
    """

    def __init__(self, lanes: Sequence[Lane], waits_from_output: bool = True) -> None:
        self._lanes, self._waits_from_output = lanes, waits_from_output
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
        for tensor in tensors_of(output) if self._waits_from_output else ():
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._on_output)

    @torch.compiler.disable
    def _on_output(self, gradients: tuple[Tensor, ...]) -> None:
        del gradients
        self.enter()

    def failed(self, error: BaseException) -> None:
        """Break off after an error in the work at the end of a pass, unless all ranks raise it and stay in step."""
        if ranks_told(error) < self._lanes[0].world_size:
            self._broke_off()

    def check(self) -> None:
        """Raise ThinwireError at the beginning of a step that cannot be synchronized any more."""
        for lane in self._lanes:
            lane.check("the gradients of this step")

    def _broke_off(self) -> None:
        for lane in self._lanes:
            if lane.world_size > 1:
                lane.break_off(REASON.format(rank=self._lanes[0].rank))


class _Pass:
    def __init__(self, broke_off: Callable[[], None]) -> None:
        self._broke_off: Callable[[], None] | None = broke_off

    def __call__(self) -> None:
        self._broke_off = None

    def __del__(self) -> None:
        if self._broke_off is not None:
            self._broke_off()


logger = logging.getLogger("thinwire")


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
        self._is_local = False  # whether the last forward was one of no_sync
        self._plug: Plug | None = None
        self._guard: Guard | None = None
        self._handles: list[RemovableHandle] = []
        self._warning: RemovableHandle | None = None
        self._changes: Changes | None = None

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
        self._changes = Changes(model)
        if self._is_ddp:
            self._warning = register_optimizer_step_pre_hook(weakly(self._before_optimizer))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._changes is not None:
            self._changes.remove()
            self._changes = None
        self._stop_warning()

    def begin(self) -> bool:
        """Arrange for ``finish`` to be called at the end of the running backward; return whether there is one."""
        assert self._guard is not None
        self._guard.enter()
        self._forget_broken_off()
        if not self._began:
            if self._changes is not None:
                self._changes.check()
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
            self._stop_warning()
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
        self._is_local = not self._plug.synchronizes
        self._forget_broken_off()
        if not self._is_local:
            assert self._guard is not None
            self._guard.check()
            if self._is_ddp and self._changes is not None:  # its hooks are lost with a cast, and `begin` is not called
                try:
                    self._changes.check()
                except ThinwireError as error:
                    self._guard.failed(error)
                    raise

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
        """Warn if gradients are used that thinwire has not seen: stock DDP, or nothing, reduced them."""
        model = self._model()
        if model is None or self._is_local or not _has_gradients_of(optimizer, model):
            return
        self._stop_warning()
        text = (
            "thinwire is attached, but a backward pass went by and its hook was not called: gradients are not"
            " synchronized by thinwire. Call the DDP model itself (not model.module), and run backward."
        )
        logger.warning(text)
        warnings.warn(text, stacklevel=4)

    def _stop_warning(self) -> None:
        if self._warning is not None:
            self._warning.remove()
            self._warning = None


class Changes:
    """A watcher of a model that is attached: of parameters that are moved, cast, added or replaced afterwards.

    Nobody would average the gradient of a new parameter, and DDP loses those of parameters that are cast. Torch calls a
    hook wherever a parameter or a module is assigned to a module; moved ones are found in each step (12 us for 100).
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(synchronized_parameters(model))
        self._known = {id(parameter) for parameter in model.parameters()}
        self._were = [_where(parameter) for parameter in self._parameters.values()]
        self._modules = WeakSet(model.modules())
        self._new = ""
        assigned = weakly(self._assigned)
        self._handles = [
            register_module_parameter_registration_hook(assigned),
            register_module_module_registration_hook(assigned),
        ]

    def check(self) -> None:
        """Raise ThinwireError if the model has changed."""
        if self._new:
            raise ThinwireError(
                f"{self._new} was assigned to the model after thinwire.attach, so nobody would average its gradient:"
                " call detach() on the Synchronizer, and attach the changed model, on all ranks (with DDP, wrap it"
                " again first)"
            )
        for (name, parameter), was in zip(self._parameters.items(), self._were, strict=True):
            if _where(parameter) != was:
                raise ThinwireError(
                    f"parameter {name!r} was {was[0]} on {was[1]} when thinwire was attached, and is {parameter.dtype}"
                    f" on {parameter.device} now: move or cast the model before attach (and before DDP), on all ranks"
                )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _assigned(self, module: nn.Module, name: str, value: object) -> None:
        if module in self._modules:
            parameters = list(value.parameters()) if isinstance(value, nn.Module) else [value]
            if any(
                isinstance(parameter, nn.Parameter) and parameter.requires_grad and id(parameter) not in self._known
                for parameter in parameters
            ):
                self._new = f"{name!r} of a {type(module).__name__}"


def _where(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _has_gradients_of(optimizer: Optimizer, model: nn.Module) -> bool:
    """Return whether the next step of an optimizer uses gradients of a model."""
    mine = {id(parameter) for parameter in model.parameters() if parameter.grad is not None}
    groups: list[dict[str, Any]] = optimizer.param_groups
    return any(id(parameter) in mine for group in groups for parameter in group["params"])


def _refuse_inside_ddp(module: nn.Module) -> None:
    """Raise for a plain module inside DDP: gradients would travel twice, and stay uncompressed."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if is_replicated(module) or (ddp is not None and _share_parameters(ddp, module)):
        raise ThinwireError(INSIDE_DDP)


def _share_parameters(ddp: DistributedDataParallel, module: nn.Module) -> bool:
    mine = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    return any(id(parameter) in mine for _, parameter in synchronized_parameters(ddp))
