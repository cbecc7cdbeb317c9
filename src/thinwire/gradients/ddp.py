"""Gradients of a DistributedDataParallel model: its communication hook, its buckets, and models left to stock DDP.

DDP takes one hook per model for life, so the hook has a target that can change. Buckets are fixed when DDP is built, so
the groups of a plan are compared with them. A model whose gradients are best sent as stock DDP sends them gets no hook,
and is only watched: a hook in Python costs, even if it does no more than DDP does. 20 buckets of 256 kB on two ranks of
one machine cost 7.7 ms by torch's own `allreduce_hook`, and 5.8 ms without one.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.comm.c10d import never_compiled
from thinwire.comm.groups import let_go
from thinwire.comm.lane import Lane
from thinwire.errors import ThinwireError, warn
from thinwire.gradients import torch_internals as internals
from thinwire.gradients.buckets import Buckets, Pending
from thinwire.gradients.exact import NativeAllReduce
from thinwire.gradients.module import synchronized_parameters
from thinwire.gradients.tables import sparse_tables_of

Groups = tuple[tuple[str, ...], ...]


def keep_group(model: DistributedDataParallel, group: dist.ProcessGroup | None = None) -> None:
    """Keep a group until the C++ parts of a DDP model are gone, which otherwise may be its last owners; None: its own.

    They would wait for the group's threads with Python locked, for ever if one of these wants it to drop its last work.
    """
    for part in (model.reducer, model.logger):
        weakref.finalize(part, let_go, group or model.process_group).atexit = False  # type: ignore[misc]  # in the stubs a field


def check_buckets(model: DistributedDataParallel, groups: Groups) -> None:
    """Check that the buckets of a DDP model are the groups of a plan.

    Args:
        groups: names of parameters of each group, in the order in which gradients become ready.

    Raises:
        ValueError: they differ; the message has the argument to pass.
    """
    buckets = expected_buckets(model, groups)
    if not are_same(buckets, groups):
        raise ValueError(
            f"the plan has {len(groups)} groups, and DDP was built for {len(buckets)} other buckets, which cannot"
            f" change any more: {_how(model)}"
        )


def are_same(buckets: Sequence[Sequence[str]], groups: Sequence[Sequence[str]]) -> bool:
    """Return whether the same parameters are together; embedding tables, which no plan has, must have been left out."""
    return set(map(frozenset, buckets)) == set(map(frozenset, groups))


def expected_buckets(model: DistributedDataParallel, groups: Groups) -> Groups:
    """Return the buckets that DDP forms of the parameters in the groups, once it has seen one backward pass."""
    names = [name for group in groups for name in group]
    if keeps_buckets(model):
        known = set(names)
        names = [name for name, _ in model.module.named_parameters() if name in known]
    tensors: list[Tensor] = [model.module.get_parameter(name) for name in names]
    indices = internals.bucket_indices(model, tensors) if tensors else ()
    return tuple(tuple(names[index] for index in bucket) for bucket in indices)


def _how(model: DistributedDataParallel) -> str:
    unused = " and without find_unused_parameters, under which they follow no plan" if keeps_buckets(model) else ""
    return (
        f"build it as DistributedDataParallel(model, bucket_cap_mb_list=plan.bucket_cap_mb_list()){unused}; or attach"
        " the plain module, whose groups follow any plan"
    )


def keeps_buckets(model: Any) -> bool:
    """Return whether a DDP model keeps its buckets in their first form, in the order of registration.

    Its all-reduces cannot go through another group: ``model.join()`` sends a part of them through the model's own.
    """
    return bool(model.find_unused_parameters) and not model.static_graph


# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, not with text.


OnBucket = Callable[[dist.GradBucket], Future[Tensor]]
_TAKEN = (
    "this DDP model has a communication hook already, and DDP takes only one: leave out register_comm_hook or"
    " thinwire.attach"
)
_STAYS = (
    "DDP keeps its first communication hook, thinwire's, with static_graph or gradient_as_bucket_view: for another one"
    " build DistributedDataParallel(model) again"
)
_TAKEN_BY_TORCH = (
    "DDP(mixed_precision=...) has a communication hook of torch's own, which casts gradients back, and DDP takes only"
    " one: leave it out and train under torch autocast, whose gradients dense='lossless' sends in fewer bytes"
)


class _Dispatcher:
    """The one hook of a DDP model, which it never removes: it forwards to a target, or does what stock DDP does.

    A copy of the model, which has a reducer of its own and no hook in it, carries torch's `allreduce_hook` on its list.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.__name__ = self.__qualname__ = "thinwire"  # DDP reads both
        self.process_group: Any = ddp.process_group
        self._model = weakref.ref(ddp)
        self.target: OnBucket | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., Future[Tensor]]:
        return allreduce_hook

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return copy, (allreduce_hook,)

    @never_compiled
    def __call__(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Return the future of the mean of a bucket.

        Raises:
            ThinwireError: join divides by the number of ranks that have data left. It is raised on all ranks, because
                ranks without data come here too.
        """
        if not isinstance(bucket, dist.GradBucket):
            raise ThinwireError(
                "DDP called the hook without a bucket, as it does under torch._dynamo.config.optimize_ddp ="
                ' "python_reducer": set it to "ddp_optimizer" or False'
            )
        if is_joining(model := self._model()) and not internals.divides_by_initial_world_size(model):
            raise ThinwireError(
                "join(divide_by_initial_world_size=False) divides by a number that DDP does not tell its hooks: call"
                " model.join() without it, or build DistributedDataParallel(model) again, without thinwire"
            )
        if self.target is not None:
            return self.target(bucket)
        return _stock(self.process_group, bucket.buffer())


_dispatchers: WeakKeyDictionary[DistributedDataParallel, _Dispatcher] = WeakKeyDictionary()


class _Hooks(list[Any]):
    """The hooks of a DDP model, to which it adds one before its reducer refuses a second."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return list, (list(self),)

    def append(self, hook: Any) -> None:
        """Add a hook in place of the idle one, on all ranks: to a reducer that has none, which DDP then takes it to."""
        for ddp, idle in [one for one in _dispatchers.items() if internals.comm_hooks(one[0]) is self]:
            if idle.target is not None or idle.process_group != ddp.process_group:
                raise ValueError(_TAKEN)
            if not renew(ddp):
                raise ValueError(_STAYS)
        super().append(hook)


def install(ddp: DistributedDataParallel, target: OnBucket) -> None:
    """Call ``target`` with every gradient bucket of ``ddp``, in the order that all ranks share.

    Raises:
        ValueError: thinwire is attached to this model already, or another communication hook is registered.
    """
    if ddp not in _dispatchers:
        dispatcher = _Dispatcher(ddp)
        try:
            ddp.register_comm_hook(None, dispatcher)
        except RuntimeError as error:
            internals.set_comm_hooks(ddp, [*internals.comm_hooks(ddp)][:-1])  # it was added before it was refused
            raise ValueError(f"{_taken(ddp)} ({str(error).splitlines()[0]})") from error
        _dispatchers[ddp] = dispatcher
        internals.set_comm_hooks(ddp, _Hooks(internals.comm_hooks(ddp)))
    if _dispatchers[ddp].target is not None:
        raise ValueError("thinwire is attached to this model already: call detach() on its Synchronizer first")
    _dispatchers[ddp].target = target


def check_free(ddp: DistributedDataParallel) -> None:
    """Raise ValueError if another communication hook is registered, without registering one."""
    if ddp not in _dispatchers and internals.comm_hooks(ddp):
        raise ValueError(_taken(ddp))


def _taken(ddp: DistributedDataParallel) -> str:
    return _TAKEN if ddp.mixed_precision is None else _TAKEN_BY_TORCH


def renew(ddp: DistributedDataParallel) -> bool:
    """Give ``ddp`` a reducer that has never had a hook, between two backward passes; return whether that was possible.

    All ranks do, as a new one broadcasts its buckets. DDP does the same when it is read from a file. It is left out
    where parts of the old one live on: gradients in its buckets, the order of a static graph, or hooks of torch's own.
    """
    is_plain = not (ddp.static_graph or ddp.gradient_as_bucket_view or ddp.mixed_precision)
    if not is_plain or len(internals.comm_hooks(ddp)) > (ddp in _dispatchers) or internals.delays_all_reduces(ddp):
        return False
    _dispatchers.pop(ddp, None)
    internals.renew_reducer(ddp)
    keep_group(ddp)
    return True


failed: WeakSet[DistributedDataParallel] = WeakSet()
"""Models that were detached after a failure: their reducers may wait for the rest of a backward."""


def prepare(model: DistributedDataParallel, lane: Lane) -> None:
    """Keep the group of a model, and give it another reducer, if that can be, after a failure on any rank."""
    keep_group(model)
    if [1.0] in lane.agree("whose model was detached after a failure", [float(model in failed)]):
        failed.discard(model)
        renew(model)


def _stock(process_group: dist.ProcessGroup, gradient: Tensor) -> Future[Tensor]:
    """Start a mean of the bits of DDP without a hook: of a product, or of a quotient if it is sparse."""
    size, is_sparse = process_group.size(), gradient.is_sparse
    # torch's thread replaces indices and values of a sparse one, see `NativeAllReduce.start_sparse`
    total = gradient.detach() if is_sparse else gradient.mul_(1.0 / size)
    work = dist.all_reduce(total, group=process_group, async_op=True)
    assert work is not None

    def mean(done: Future[Any]) -> Tensor:
        (summed,) = done.value()  # of a complex one, a view of it as pairs
        return torch.div(summed, size) if is_sparse else gradient

    return work.get_future().then(mean)


class Plug:
    """The connection of a `thinwire.Synchronizer` to a model, whether that is DDP or a plain module."""

    begins_at_output = False
    """Whether a step is a backward through the output of the model, with any passes inside of it; DDP ends each."""
    is_idle = False
    """Whether nothing is synchronized, so that every backward ends a step."""
    is_free = True
    """Whether buckets can be seen: not where DDP has a communication hook of somebody else."""
    is_stale = False
    """Whether `before_forward` has anything to do."""
    is_timed = True
    """Whether somebody wants to know when the forward of the model has ended."""
    plays_stock = False
    """Whether stock sums embedding tables until a trial shows that something else is faster."""

    def __init__(self) -> None:
        self._accumulates = False
        self.in_flight: list[Pending] = []  # what is waited for when backward has nothing left to compute

    @property
    def synchronizes(self) -> bool:
        """Whether the next backward pass synchronizes, and is not one of `no_sync`."""
        return not self._accumulates

    def finish_left(self, computed: float) -> float | None:
        """Note a step that stock DDP did, if it did; return the seconds for which it waited since it had computed."""
        return None

    def book(self) -> None:
        """Add steps that were left to DDP to the statistics: nobody has read them before."""

    def finish(self) -> float:
        """Submit the rest at the end of backward; return when computing ended (`time.perf_counter`)."""
        return time.perf_counter()

    def take_in_flight(self) -> Sequence[Pending]:
        """Return the work to wait for, of which there is none afterwards."""
        taken, self.in_flight = self.in_flight, []
        return taken

    def deliver(self) -> None:
        """Store the results of the lane, when all of them are known."""

    def adopt(self, tables: Sequence[nn.Parameter]) -> None:
        """Let these parameters travel as rows from the next pass on; on all ranks, and between two passes."""

    def observe(self, who: str, does: bool) -> None:
        """Let somebody on this rank see each bucket from now on, or, from the end of a step on, no more."""

    def see(self, why: str, does: bool, for_long: bool) -> None:
        """See the buckets of the next steps for a reason of all ranks, or not any more: for long, or in a trial."""

    def reset(self) -> None:
        """Forget a backward that was not completed."""

    def before_forward(self) -> None:
        """Prepare for a forward of the model that a backward follows."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients stay on this rank, and add up until the next pass outside."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    can_hold = True
    """Whether gradients may stay here for a while, and be sent by `send`."""

    def hold(self) -> AbstractContextManager[None]:
        """Return a context like `no_sync`, for passes inside of another, at whose end `send` follows."""
        return self.no_sync()

    def send(self) -> None:
        """Send what the gradients are now, in a backward pass without any other work."""
        self._pass_without_work().backward()

    def _pass_without_work(self, *reached: nn.Parameter) -> Tensor:
        """Return the output of a graph whose backward calls `_send`, and the hooks of DDP on these parameters."""
        with torch.enable_grad():
            return _Nothing.apply(self._send, torch.zeros((), requires_grad=True), *reached)  # type: ignore[no-any-return]

    def _send(self) -> None:
        """Send gradients, inside of the pass of `send`, if no hook of a parameter does."""

    def remove(self) -> None:
        """Remove all hooks from the model."""


_NOBODY = Plug()


class _Nothing(torch.autograd.Function):
    """A function whose backward calls another one, and reaches parameters without a gradient for them."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], object], one: Tensor, *reached: Tensor) -> Tensor:  # type: ignore[override]
        ctx.call, ctx.count = call, len(reached)
        return one.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        ctx.call()
        return (None,) * (2 + ctx.count)


class Alone(Plug):
    """The plug of a single rank, which has nothing to synchronize: gradients stay as they are; steps are counted."""

    begins_at_output = is_idle = True
    can_hold = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._ddp = weakref.ref(model) if isinstance(model, DistributedDataParallel) else lambda: None

    @property
    def synchronizes(self) -> bool:
        return super().synchronizes if (ddp := self._ddp()) is None else ddp.require_backward_grad_sync

    def no_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]  # that of a generator
        return super().no_sync() if (ddp := self._ddp()) is None else ddp.no_sync()


class _PlugOfDdp(Plug):
    """What plugs of a DDP model share; they do not keep it alive."""

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__()
        self._weak_model = weakref.ref(model)

    @property
    def _model(self) -> DistributedDataParallel:
        model = self._weak_model()
        assert model is not None, "what calls this goes with the model"
        return model

    @property
    def synchronizes(self) -> bool:
        return bool(getattr(self._weak_model(), "require_backward_grad_sync", False))

    def no_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]  # that of a generator
        return self._model.no_sync()

    @property
    def can_hold(self) -> bool:  # type: ignore[override]
        """Whether no rank may run out of data, and DDP has not counted how often each gradient comes."""
        return not (is_joining(self._model) or self._model.static_graph)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Return a context like `no_sync`, in which each forward gets the buffers of rank 0, as outside of it."""
        model = self._model
        try:
            with model.register_forward_pre_hook(_want_buffers), model.no_sync():
                yield
        finally:
            model.require_forward_param_sync = True

    def send(self) -> None:
        trained = [parameter for _, parameter in synchronized_parameters(self._model) if parameter.requires_grad]
        used = [parameter for parameter in trained if parameter.grad is not None]
        for one in set(trained).difference(used).intersection(sparse_tables_of(self._model.module)):
            one.grad = one.detach()[:0].to_sparse(1).sparse_resize_(one.shape, 1, 1)  # DDP takes no table without one
        # once, on all ranks, as the forward does that a rank may lack
        getattr(self._model.reducer, internals.REBUILD)()
        # of a rank without any pass
        end = self._pass_without_work(*(used or trained[: 1 if self._model.find_unused_parameters else None]))
        self._model.reducer.prepare_for_forward()
        self._model.reducer.prepare_for_backward([end] if self._model.find_unused_parameters else [])
        end.backward()


def _want_buffers(model: Any, args: object) -> None:
    model.require_forward_param_sync = True


class DdpPlug(_PlugOfDdp):
    """The plug of a DDP model, which stores the means of its buckets itself, and which this object does not keep alive.

    Args:
        model: the model that gets the communication hook.
        buckets: the queue for its buckets.
        begin: called at each bucket; returns whether a backward runs, at whose end `finish` and `deliver` are called.
    """

    def __init__(self, model: DistributedDataParallel, buckets: Buckets, begin: Callable[[], bool]) -> None:
        super().__init__(model)
        self._buckets, self._begin = buckets, begin
        frozen = (parameter for _, parameter in synchronized_parameters(model) if not parameter.requires_grad)
        self._frozen = [weakref.ref(parameter) for parameter in frozen]
        self._remembered: list[tuple[Tensor, Tensor]] = []  # parameters with a memory, and their means
        install(model, self._on_bucket)

    def finish(self) -> float:
        return self._buckets.finish()

    def deliver(self) -> None:
        """Store means that DDP may leave out, and warn of unfrozen parameters, which it ignores if built before.

        DDP leaves the gradient of a parameter alone that no rank used, but a part of its memory was sent.
        """
        self._buckets.count_left()
        remembered, self._remembered = self._remembered, []
        for parameter, mean in remembered:
            if parameter.grad is not None:
                parameter.grad.detach().copy_(mean)
            elif mean.any():
                parameter.grad = mean if self._model.gradient_as_bucket_view else mean.clone()
        if any(parameter.requires_grad for weak in self._frozen if (parameter := weak()) is not None):
            self._frozen = []
            warn(
                "parameters were unfrozen after DistributedDataParallel was built: it does not synchronize them, so the"
                " models of the ranks drift apart. Build it again after unfreezing, and attach the new one"
            )

    def reset(self) -> None:
        self._remembered = []

    def remove(self) -> None:
        _dispatchers[self._model].target = None
        with suppress(ThinwireError):  # of an earlier failure
            self._buckets.flush()

    def _on_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Submit a bucket of DDP, which calls this in backward in the same order on all ranks.

        Under ``model.join()`` also outside of backward, for ranks that ran out of data.
        """
        pending = self._buckets.add(bucket)
        if self._begin():
            self.in_flight.append(pending)
            if self._model.find_unused_parameters or self._model.static_graph:
                self._remembered += self._buckets.remembered(bucket)
        return pending if isinstance(pending, Future) else pending.future()


def is_joining(model: nn.Module | None) -> bool:
    """Return whether ranks may run out of data before others, under ``model.join()``: no more can be agreed on then."""
    return bool(getattr(getattr(model, internals.JOIN_CONFIG, None), "enable", False))


ROWS, CODES = "rows", "codes"
"""Why all ranks see the buckets of a model that is left to DDP otherwise."""


class LeftToDdp(_PlugOfDdp):
    """The plug of a DDP model left to DDP: it detects the end of backward passes, and counts the bytes that DDP sends.

    DDP sends them through the group of ``native``, which hangs up when this rank fails, so that others do not wait.
    Between two steps it can become one that sees each bucket, and back.

    Args:
        model: a model without a communication hook, which gets none.
        native: statistics of bytes.
        lane: statistics of seconds: those for which backward waits, as no others can be measured.
        begin: arranges for `finish` and `deliver` to be called, when DDP has waited for its buckets.
        hooked: returns a plug that sees each bucket of the model.

    Raises:
        ValueError: another communication hook is registered.
    """

    plays_stock = True

    def __init__(
        self,
        model: DistributedDataParallel,
        native: NativeAllReduce,
        lane: Lane,
        begin: Callable[[], object],
        hooked: Callable[[DistributedDataParallel], Plug],
    ) -> None:
        check_free(model)
        super().__init__(model)
        self._native, self._lane, self._begin, self._hooked = native, lane, begin, hooked
        self._seen: Plug = _NOBODY  # what sees each bucket
        self._observers = set[str]()  # on this rank, of buckets that stay as they are
        self._reasons = set[str]()  # that all ranks have to see the buckets
        had_hook = lane.agree("whose model has had a hook", [float(model in _dispatchers)])
        self._has_hook = self.is_stale = [1.0] in had_hook
        self._is_reached = self.is_timed = False  # whether DDP has got a gradient of the running backward
        self._begin_group()
        sparse = {id(weight) for weight in sparse_tables_of(model.module)}
        trained = [parameter for _, parameter in synchronized_parameters(model) if parameter.requires_grad]
        self._num_bytes = sum(parameter.nbytes for parameter in trained if id(parameter) not in sparse)
        self._sparse = [(weakref.ref(one), 8 + one[:1].nbytes) for one in trained if id(one) in sparse]
        self._left_steps = self._row_bytes = 0  # steps, and bytes of rows and ids of their sums, that are not counted
        self._handles: list[RemovableHandle] = []
        self._add_hooks()

    @property
    def is_free(self) -> bool:  # type: ignore[override]
        return self._model in _dispatchers or not internals.comm_hooks(self._model)

    def observe(self, who: str, does: bool) -> None:
        """Let somebody see each bucket. The messages stay the same, so not all ranks have to; the hook stays, idle."""
        (self._observers.add if does else self._observers.discard)(who)
        if does:
            self._settle()

    def see(self, why: str, does: bool, for_long: bool) -> None:
        (self._reasons.add if does else self._reasons.discard)(why)
        self._has_hook |= does
        self._settle()
        self.is_stale = for_long and self._has_hook and not self._reasons

    def before_forward(self) -> None:
        """Drop the hook, which DDP would call with each bucket for life, if all ranks leave the model to DDP."""
        if is_joining(self._model):  # a rank without data makes no new reducer
            return
        self.is_stale = self._has_hook = False
        observers, self._observers = self._observers, set()
        self._settle()
        if renew(self._model):
            self._begin_group()
            self._model.reducer.prepare_for_forward()  # DDP has done that with the other one
        self._observers = observers
        self._settle()

    def _settle(self) -> None:
        self.is_timed = bool(self._observers or self._reasons)
        if self.is_timed == (self._seen is not _NOBODY):
            return
        if self._seen is _NOBODY:
            self._remove_hooks()
            self._seen = self._hooked(self._model)
        else:
            self._seen.remove()
            self._seen = _NOBODY
            self._use_group(self._native.process_group)
            self._add_hooks()

    def _begin_group(self) -> None:
        keep_group(self._model, self._native.process_group)
        self._use_group(self._native.process_group)

    def _use_group(self, group: Any) -> None:
        """Have DDP send its buckets through its own group, or through that which hangs up, if it is another.

        An idle hook does the same, as other ranks may have none.
        """
        if self._model in _dispatchers:
            _dispatchers[self._model].process_group = group
        if self._native.process_group != self._model.process_group:
            internals.update_process_group(self._model, group)

    def _add_hooks(self) -> None:
        trained = [parameter for _, parameter in synchronized_parameters(self._model) if parameter.requires_grad]
        hook = partial(self._on_gradient, weakref.ref(self))
        # otherwise each backward reaches any
        first = trained if self._model.find_unused_parameters or self._model.static_graph else trained[:1]
        self._handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in first]

    def take_in_flight(self) -> Sequence[Pending]:
        return self._seen.take_in_flight()

    def finish_left(self, computed: float) -> float | None:
        if self._seen is not _NOBODY or not self._is_reached:
            return None
        waited, self._is_reached = time.perf_counter() - computed, False
        self._lane.busy_seconds += waited
        self._left_steps += 1
        if self._sparse:
            self._note_rows()
        return waited

    def book(self) -> None:
        if steps := self._left_steps:
            self._left_steps = 0
            self._native.count(self._num_bytes)
            self._count_rows(steps)
            self._native.finish_step(self._lane, steps)
            self._native.account.finish_step(steps)

    def finish(self) -> float:
        return self._seen.finish()

    def deliver(self) -> None:
        self._is_reached = False
        self._seen.deliver()
        self._settle()

    def _note_rows(self) -> None:
        for table, row_bytes in self._sparse:
            if (gradient := getattr(table(), "grad", None)) is not None and gradient.is_sparse:
                self._row_bytes += gradient._nnz() * row_bytes

    def _count_rows(self, steps: int) -> None:
        self._native.count_rows(self._row_bytes / steps, len(self._sparse))
        self._row_bytes = 0

    def reset(self) -> None:
        self._is_reached = False
        self._seen.reset()

    def remove(self) -> None:
        self._hooked = lambda model: _NOBODY  # whoever wants to see buckets from now on
        self._remove_hooks()
        self._seen.remove()
        self._use_group(self._model.process_group)

    def _send(self) -> None:
        if self._seen is _NOBODY:
            self._on_gradient(weakref.ref(self))

    @staticmethod
    @never_compiled
    def _on_gradient(weak: "weakref.ref[LeftToDdp]", parameter: Tensor | None = None) -> None:
        """Queue `begin` before DDP's callback, which waits for its buckets; `begin` queues another behind that."""
        if (left := weak()) is not None and not left._is_reached and left.synchronizes:
            left._is_reached = True
            internals.at_end_of_backward(left._begin)

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()
