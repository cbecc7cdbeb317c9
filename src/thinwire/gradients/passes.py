"""The beginning and end of a step: the running backward pass, and what happens when an exception ends it.

A step begins after the forward of the model, and ends with its backward, including passes that re-entrant
checkpointing runs inside of it. After an exception peers would wait for gradients that never come, so the lane is
broken off.
"""

import sys
import time
import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from types import FrameType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from thinwire.comm.c10d import never_compiled
from thinwire.comm.lane import Lane
from thinwire.errors import LostPeerError, ThinwireError, is_of_a_peer, ranks_told, warn
from thinwire.gradients.ddp import Alone, Plug
from thinwire.gradients.module import (
    INSIDE_DDP,
    check_engine,
    is_replicated,
    is_sharded,
    module_of,
    synchronized_parameters,
    trained_names,
)
from thinwire.gradients.tables import Hook, tensors_of, weak
from thinwire.gradients.torch_internals import ENGINE_FRAME, active_ddp, at_end_of_backward, graph_task, has_optimizer
from thinwire.observe.step import Clock

EARLY_STEP = (
    "{}: gradients are used up before they are averaged over the ranks, so the models of the ranks would drift apart."
    " Step after backward(), or step in the hook only after detach()"
)


def watch(output: object, enter: Callable[[], object]) -> None:
    """Enter the next pass that goes through the output of a model."""
    for tensor in (output,) if isinstance(output, Tensor) else tensors_of(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(partial(_on_output, enter))


@never_compiled
def _on_output(enter: Callable[[], object], gradients: tuple[Tensor, ...]) -> None:
    enter()


class Backward:
    """The backward pass that runs when `enter` is called, at whose end ``ended`` is called.

    Autograd calls back at the end of the innermost pass. The outermost one goes through the output of the model before
    any other begins, so it is entered there if that is watched.
    """

    def __init__(self, ended: Callable[[], object] = NoneType) -> None:
        self._ended = ended
        self._callback: Callable[[], partial[None] | None] = NoneType  # a weak reference while a pass runs
        self._task = -1

    @property
    def is_running(self) -> bool:
        """Whether the entered pass has not ended. Autograd drops the callback if an exception ends it."""
        return self._callback() is not None

    def is_nested(self) -> bool:
        """Whether this is called by another pass, inside of the one that was entered."""
        return self.is_running and self._task != graph_task()

    def enter(self) -> bool:
        """Arrange for ``ended`` to be called; return whether a backward runs at all."""
        if self._callback() is None and graph_task() >= 0:
            callback = partial(self._end_backward)
            at_end_of_backward(callback)
            self._callback, self._task = weakref.ref(callback), graph_task()
        return self._callback() is not None

    @never_compiled
    def _end_backward(self) -> None:
        self._callback = NoneType
        self._ended()


class _Held:
    """The gradients of passes inside of another pass, which stay on this rank until that ends; autograd keeps this.

    Args:
        context: in which gradients stay.
        send: sends them.
    """

    def __init__(self, context: AbstractContextManager[None], send: Callable[[], None]) -> None:
        self._send: Callable[[], None] | None = send
        self._context = context
        context.__enter__()

    @never_compiled
    def __call__(self) -> None:
        """Send them, once."""
        send, self._send = self._send, None
        if send is not None:
            self._context.__exit__(None, None, None)
            send()

    def __del__(self) -> None:
        """Leave them, because an exception has ended the outer pass."""
        if self._send is not None:
            self._context.__exit__(None, None, None)


class Structure:
    """The parameters that a model had when it was attached, to check before each forward that it still has them.

    The check costs less than 0.1 us a parameter and a module, and calls nothing of Python for them. FSDP replaces the
    parameters of its modules all the time, so theirs are not checked.

    Args:
        model: the model, which this does not keep alive.
        excluded: names of parameters that are left alone.
    """

    def __init__(self, model: nn.Module, excluded: Container[str] = ()) -> None:
        self._model, self._excluded = weakref.ref(model), excluded
        trained = model.named_parameters() if is_sharded(model) else synchronized_parameters(model, excluded)
        self.known = {id(parameter): (parameter, name) for name, parameter in trained}
        self._is_functional = False
        self._note()

    def check(self) -> None:
        """Raise ThinwireError if a parameter was moved, replaced or added, or another wrapper took the model over."""
        now = [*map(id, chain.from_iterable(self._views))]  # no loop of Python's: one for each step
        if now != self._ids or len(self._first) != self._num_hooks or [*map(_KIND, self._kept)] != self._kinds:
            self._explain()

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self.known

    def _note(self) -> None:
        model = self._model()
        assert model is not None
        modules = list(module_of(model).modules())
        if any(map(is_sharded, modules)):
            modules = []
        scripted = torch.jit.ScriptModule  # nobody can change one, and its registries are no dicts
        fluid = [module for module in modules if not isinstance(module, scripted)]
        self._views = [one.values() for module in fluid for one in (module._parameters, module._modules)]
        self._values = [*chain.from_iterable(self._views)]  # alive, so ids are theirs
        self._ids = [*map(id, self._values)]
        self._first = modules[0]._forward_pre_hooks if modules else {}
        self._num_hooks = len(self._first)
        self._kept = [entry for entry, _ in self.known.values()] if modules else []
        self._kinds = [*map(_KIND, self._kept)]

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
        kinds = {id(parameter): kind for parameter, kind in zip(self._kept, self._kinds, strict=True)}
        trained = [pair for pair in synchronized_parameters(model, self._excluded) if pair[1].requires_grad]
        for name, parameter in trained:
            dtype, device, shape = now = _KIND(parameter)
            if kinds.get(id(parameter), now) != now:
                raise ThinwireError(
                    f"parameter {name!r} became {dtype} {list(shape)} on {device} after attach: move, cast or resize"
                    f" the model first, and attach it last; or {again}"
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
            warn(text, 5)
        if all(isinstance(parameter, nn.Parameter) for parameter in module.parameters()):
            self._note()


_KIND, _PARAMETERS, _NAME = attrgetter("dtype", "device", "shape"), itemgetter("params"), itemgetter(1)
_IS_BROKEN = attrgetter("is_broken")
CURE = ". Call detach() and attach again on all ranks, or restart the job"
REASON = "an exception ended a backward pass of rank {rank} before all its gradients were there"


class Guard:
    """A guard that breaks the lane off when an exception ends a backward pass that ranks make together.

    Autograd calls back at the end of a pass. After an exception it drops the callback uncalled, whatever raised: a hook
    of the user, a function of torch, or Ctrl-C. Where it is torch's about a lost peer, as from the all-reduces of a
    model that is left to DDP, `LostPeerError` is raised instead.

    Args:
        lanes: the lanes on which peers wait.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes
        self.is_entered = False  # since the last forward
        self.running: Callable[[], _Pass | None] = _Pass  # what to call where a pass that is guarded breaks off

    @never_compiled
    def enter(self, *gradients: object) -> None:
        """Guard the running backward pass, for which peers wait; outside of one nothing happens."""
        if graph_task() >= 0 and not self.running():
            running = _Pass((self.broke_off,))
            at_end_of_backward(partial(at_end_of_backward, running.clear))  # after DDP's, which waits for its buckets
            self.running, self.is_entered = weakref.ref(running), True

    def failed(self, error: BaseException) -> None:
        """Break off after an error in the work at the end of a pass, unless all ranks raise it and stay in step."""
        if ranks_told(error) < self.lanes[0].world_size:
            self.broke_off(error)
        elif running := self.running():
            running.clear()

    def broke_off(self, error: BaseException | None) -> LostPeerError | None:
        """Break off after an error, None for an unknown one; return what to raise instead, if anything."""
        lanes, lost = [lane for lane in self.lanes if lane.world_size > 1], None
        if lanes and is_of_a_peer(error) and not isinstance(error, LostPeerError):
            assert error is not None
            error = lost = lanes[0].lost_to(error)
        for lane in lanes:
            why = "" if error is None else f": {type(error).__name__}: {error}"
            lane.break_off(REASON.format(rank=lane.global_rank) + why, error)
        return lost


_BrokeOff = Callable[[BaseException | None], BaseException | None]


class _Pass(list[_BrokeOff]):
    """What to call if the pass breaks off. Its end clears the list, without a call of Python's."""

    def __del__(self) -> None:
        if self:
            _Unwinding(self[0]).watch(sys._getframe().f_back)


class _Unwinding:
    """An exception of autograd that is not one of Python yet: the frame of torch that called autograd sees it first.

    That frame is traced for this one event, so passes that do not fail cost nothing, unlike a wrapper of backward.

    Args:
        broke_off: called once, with the exception, or with None if that cannot be seen; what it returns is raised.
    """

    def __init__(self, broke_off: _BrokeOff) -> None:
        self._broke_off: _BrokeOff | None = broke_off

    def watch(self, frame: FrameType | None) -> None:
        if frame is None or frame.f_code.co_name != ENGINE_FRAME:
            self._end(None)
            return
        before, outer = sys.gettrace(), frame.f_trace

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            if event != "exception":
                return trace
            sys.settrace(before)
            frame.f_trace = outer
            error = self._end(arg[1])
            if error is not None:
                raise error from arg[1]
            return outer

        frame.f_trace = trace
        sys.settrace(lambda *event: None)

    def _end(self, error: BaseException | None) -> BaseException | None:
        broke_off, self._broke_off = self._broke_off, None
        return None if broke_off is None else broke_off(error)

    def __del__(self) -> None:
        self._end(None)


class Passes(Backward):
    """The forward and backward passes of a model, which it does not keep alive.

    Args:
        model: the model; `watch` registers hooks on its forward.
        clock: records when its forward has ended.
        excluded: names of parameters that are left alone.
    """

    _plug: Plug  # of `watch`, like the two below
    _guard: Guard
    _finish: Callable[[bool, float], None]

    def __init__(self, model: nn.Module, clock: Clock, excluded: Container[str] = ()) -> None:
        super().__init__()
        self._model, self._clock, self._excluded = weakref.ref(model), clock, excluded
        self._is_ddp = isinstance(model, DistributedDataParallel)
        self._began = 0.0  # when the first bucket was there, or under stock DDP, when there was nothing left to compute
        self._counted: object = None  # what guarded the last pass that ended, by which those inside of it are known
        self.is_local = False  # whether no_sync was called since the last synchronized pass
        self.is_midway = False  # whether a forward has begun a step that no synchronized pass has ended
        self._phase = "the first forward"
        self._held: weakref.ref[_Held] | None = None
        self._handles: list[RemovableHandle] = []
        self._structure = Structure(model, excluded)
        self._has_warned = False
        self._finished = self._taken = 0  # backward passes so far, and when an optimizer last took their gradients
        self._completed = 0  # passes of which all means are known
        self.optimizer_steps = 0  # that took gradients of new passes; optimizers of one pass count once
        self._used: dict[weakref.ref[Optimizer], int] = {}  # those at an optimizer's last step

    @property
    def are_watched(self) -> bool:
        return bool(self._handles)

    def watch(self, plug: Plug, guard: Guard, finish: Callable[..., None], commit: Callable[..., None] | None) -> None:
        """Register hooks on the forward.

        Args:
            plug: the connection to the model.
            guard: what breaks off when a pass fails.
            finish: called at the end of each backward pass in which `begin` was called, with whether that is a step,
                and when it was called first (`time.perf_counter`): under DDP re-entrant checkpointing ends several
                passes for one forward, of which the first counts.
            commit: called with an optimizer that is about to step, and the names of its parameters of this model;
                None if nobody asks.
        """
        self._plug, self._guard, self._finish, self._commit = plug, guard, finish, commit
        model = self._model()
        assert model is not None
        module = module_of(model)  # hooks on DDP itself would break its compiled graph once more
        self._handles = [
            module.register_forward_pre_hook(Hook(self._before_forward)),
            module.register_forward_hook(Hook(self._after_forward)),
        ]
        if not isinstance(plug, Alone):
            hook = self._before_optimizer if self._is_ddp else weak(self._before_optimizer)  # FSDP's hold the model
            self._handles.append(register_optimizer_step_pre_hook(hook))

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def begin(self) -> bool:
        """Arrange for ``finish`` to be called at the end of the running backward; return whether there is one."""
        if not self._guard.running():
            self._guard.enter()
        if self._began:
            self._forget_broken_off()
        if not self._began and self.enter():
            self._began = time.perf_counter()
        return bool(self._began)

    def reduces(self) -> None:
        """Begin with a reduction of FSDP's; outside of backward, as in a pipeline, send what no pass has sent."""
        if not self.begin() and self.is_midway:
            self.send()

    def doing(self) -> str:
        """Return the step, and what this rank does in it, for messages."""
        is_backward = self.are_watched and self._guard.is_entered
        return f"step {self._completed + 1}, in {'backward' if is_backward else self._phase}"

    @never_compiled
    def _end_backward(self) -> None:
        self._callback = NoneType
        began, self._began = self._began, 0.0
        if began or self._plug.is_idle:
            self._finished, self.is_local = self._finished + 1, False
            is_repeated = self._is_ddp and self._guard.running is self._counted
            self._counted = self._guard.running
            try:
                self._finish(not is_repeated, began)
            except BaseException as error:
                self._guard.failed(error)
                raise
            self._completed, self.is_midway, self._guard.is_entered = self._finished, False, False
            self._phase = "other code after it"

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if is_compiling():  # anything would break its graph
            return
        if not self._is_ddp:
            _refuse_inside_ddp(module, self._excluded)
        if not torch.is_grad_enabled():
            return
        self.is_local = not self._plug.synchronizes
        self.is_midway, self._guard.is_entered, self._phase = True, False, "forward"
        if self._began:
            self._forget_broken_off()
        if not self.is_local:
            self._check()
            if self._plug.is_stale:
                self._plug.before_forward()
            if graph_task() >= 0:
                self._hold()

    def _check(self) -> None:
        """Raise ThinwireError if gradients of this model cannot be sent: an earlier step failed, or it has changed."""
        for lane in filter(_IS_BROKEN, self._guard.lanes):
            if not lane.is_forked or active_ddp() is not None:  # else backward raises, if it is called at all
                lane.check("the gradients of this step", CURE)
        if self._guard.lanes[0].world_size > 1:
            try:
                self._structure.check()
            except ThinwireError as error:
                for lane in self._guard.lanes:
                    lane.break_off(f"rank {lane.global_rank}: {error}")
                raise

    def _hold(self) -> None:
        """Keep gradients on this rank until the pass ends that runs now, if it does not go through the model's output.

        Passes of the model inside of it, as GradCache makes them, are then sent once, and not each.
        """
        if self._plug.can_hold and not (self._guard.running() or self.is_running):
            held = _Held(self._plug.hold(), self.send)
            at_end_of_backward(held)
            self._held = weakref.ref(held)
            self._guard.enter()

    def send_held(self) -> None:
        """Send what is held back, inside of the pass at whose end it would be: for an optimizer, or before the end."""
        held = None if self._held is None else self._held()
        if held is not None:
            held()

    def send(self) -> None:
        """Send what gradients are now."""
        self._check()
        self._clock.start()
        self._plug.send()

    def _after_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Record the beginning of backward: only the training script knows it more exactly."""
        if is_compiling() or not torch.is_grad_enabled():
            return
        self._phase = "the loss"
        if not self.is_local:
            if module.training and self._plug.is_timed:
                self._clock.start()
            if self._plug.begins_at_output:
                watch(output, self.enter)
        for tensor in (output,) if isinstance(output, Tensor) else tensors_of(output):  # two calls less than `watch`
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._guard.enter)

    def _forget_broken_off(self) -> None:
        """Forget a backward pass that an exception broke off."""
        if self._began and not self.is_running:
            self._began = 0.0
            self._plug.reset()
            self._clock.reset()

    @never_compiled
    def _before_optimizer(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Count steps, and warn once of gradients that thinwire has not seen since the last step of this optimizer.

        Gradients of `no_sync` are local on purpose. An optimizer that has mostly gradients of other models may share a
        few parameters with this one. An optimizer may step inside of a backward pass, when FSDP has reduced its
        gradients. ``torch.distributed.checkpoint`` makes the state of a new one by a step with learning rates of zero.
        """
        if self._held is not None:
            self.send_held()
        if self._is_ddp and self.is_midway and not self.is_local and graph_task() >= 0 and self._trains(optimizer):
            raise ThinwireError(EARLY_STEP.format(f"{type(optimizer).__name__} steps in a hook of backward"))
        last, self._used[one] = self._used.get(one := weakref.ref(optimizer), 0), self._finished
        its = map(id, chain.from_iterable(map(_PARAMETERS, optimizer.param_groups)))
        names = map(_NAME, filter(None, map(self._structure.known.get, its)))
        if name := next(names, ""):  # not for each parameter, where nobody asks
            self.optimizer_steps += self._taken != self._finished
            self._taken = self._finished
            if self._commit is not None:
                self._commit(optimizer, [name, *names])
        if last != self._finished or self.is_local or self.is_running or self._has_warned:
            return
        if all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups) or not self._trains(optimizer):
            return
        self._has_warned = True
        model = "DDP model itself (not model.module)" if self._is_ddp else "attached model itself (not a part of it)"
        text = (
            f"thinwire is attached, but {type(optimizer).__name__} uses gradients that it did not synchronize: no"
            " backward pass reached its hooks since the last step of this optimizer. Call the"
            f" {model} and loss.backward(), where its parameters are used: gradients of torch.autograd.grad and"
            " torch.func are not seen. For local steps on purpose use Synchronizer.no_sync()"
        )
        warn(text, 5)

    def _trains(self, optimizer: Optimizer) -> bool:
        """Return whether most gradients that an optimizer is about to use are of this model."""
        used = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        return 2 * sum(parameter in self._structure for parameter in used) > len(used)


def check_optimizers(model: nn.Module, excluded: Container[str]) -> None:
    """Raise ValueError if a parameter has an optimizer that steps in backward."""
    for name, parameter in synchronized_parameters(model, excluded):
        if has_optimizer(parameter):
            raise ValueError(EARLY_STEP.format(f"parameter {name!r} has an optimizer that steps in backward"))


def _refuse_inside_ddp(module: nn.Module, excluded: Container[str]) -> None:
    """Raise for a plain module inside DDP: gradients would travel twice, and stay uncompressed."""
    ddp = active_ddp()
    theirs = () if ddp is None else (id(parameter) for _, parameter in synchronized_parameters(ddp))
    if is_replicated(module) or (ddp is not None and not trained_names(module, excluded).keys().isdisjoint(theirs)):
        raise ThinwireError(INSIDE_DDP)
