"""`OuterLoop`: a model that ranks train apart, and rounds that bring them together, in step with training."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from thinwire.comm.channel import Subject
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import Staging, ring_all_reduce_bytes, sparse_all_reduce_bytes
from thinwire.cuda.staging import staging_for
from thinwire.errors import ThinwireError
from thinwire.follow.describe import configuration
from thinwire.follow.state import Gathered
from thinwire.gradients.compression import Compression
from thinwire.gradients.model import is_sharded, local_of, module_of, synchronized_buffers, synchronized_parameters
from thinwire.gradients.parameters import broadcast_all
from thinwire.gradients.tables import tables_of
from thinwire.observe.step import ParameterRecord
from thinwire.outer.anchors import Anchors
from thinwire.outer.average import Averager, Entry, Told, submit
from thinwire.outer.inner import InnerGroup, inner_group
from thinwire.outer.recipe import OuterRecipe
from thinwire.sync.scheme import Scheme
from thinwire.sync.two_level import TwoLevel
from thinwire.synchronizer import Synchronizer

VERSION = 1
ENDING = 1
"""Flag of a rank that is in `Rounds.synchronize`."""


@dataclass(eq=False)
class Flight:
    """A fragment between its launch and its landing.

    Args:
        lands_at: inner step after which it lands.
        steps: inner steps of this rank that it stands for.
        is_plain: whether the parameters are averaged, without the outer optimizer.
        differences, buffers: by name; their means once ``future`` is done, which has the names of the buffers that
            were averaged. None: they are there.
        is_refused: whether the parameters of this rank were not finite.
        counts: whether any rank had a mean to give.
        flags: those of all ranks, once it is done.
    """

    fragment: int
    lands_at: int
    steps: int
    is_plain: bool
    differences: dict[str, Tensor]
    buffers: Mapping[str, Tensor | None]
    future: Future[tuple[tuple[Told, list[str]], Sequence[Tensor]]] | None
    is_refused: bool = False
    counts: bool = True
    flags: tuple[int, ...] = ()


class Rounds:
    """The rounds of a model in step with its training. Hooks of the optimizer hold it; it holds no module.

    All ranks launch the same fragments in the same order, whatever steps they have made, so their jobs match.

    Args:
        buffers: returns the floating buffers by name, as they are now.
        staging: the way of differences to the lane, and back.
        inner: the ranks that train as one with this one, or None.
    """

    def __init__(
        self,
        recipe: OuterRecipe,
        anchors: Anchors,
        averager: Averager,
        lane: Lane,
        buffers: Callable[[], Mapping[str, Tensor]],
        staging: Staging,
        inner: InnerGroup | None = None,
    ) -> None:
        self._recipe, self._anchors, self._averager, self._lane = recipe, anchors, averager, lane
        self._buffers, self._staging, self._inner = buffers, staging, inner
        self._flights: list[Flight] = []
        self._since = [0] * recipe.fragments  # inner steps since the last launch
        self._position = 0  # in the schedule
        self._launched = self.landed = 0
        self.steps = self.ranks = 0
        self._is_swapped = False
        self.exposed_seconds = 0.0

    def after_step(self) -> None:
        """Count an inner step; land what is due, and launch what is due.

        Raises:
            ThinwireError: a round has failed; parameters stay as they are.
        """
        if self._is_swapped:
            raise ThinwireError("a step inside of global_parameters(), which would train the anchors: step outside")
        self.steps += 1
        self._position += 1
        self._since = [count + 1 for count in self._since]
        for flight in self._flights if self._inner is None else ():  # those wait together
            if flight.future is not None and flight.future.done():
                self._wait(flight)
        self._land_due()
        while self._launched < self._recipe.launched(self._position):
            self._launch()
        self._land_due()

    def synchronize(self) -> None:
        """End all rounds now; afterwards all ranks have the same parameters. All ranks call it.

        Ranks may have made unlike numbers of rounds. Those that have none left go on with rounds, for which they have
        no steps, until all are here.
        """
        self.land_all()
        together = 0
        while together < self._recipe.fragments:
            flight = self._launch(ENDING)
            self._land(flight, 1.0)
            together = together + 1 if all(flag & ENDING for flag in flight.flags) else 0
        self._position = self._recipe.step_of(self._launched)

    def land_all(self) -> None:
        """Land what is in flight."""
        while self._flights:
            self._land(self._flights[0], self._recipe.mix)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the model the anchors, and its own parameters back at the end; no step may be made inside."""
        self._is_swapped = True
        try:
            with self._anchors.swapped(self._buffers()):
                yield
        finally:
            self._is_swapped = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the means of what is in flight, for which it waits."""
        for flight in self._flights:
            self._wait(flight)
        flights = [
            {
                "fragment": flight.fragment,
                "lands_at": flight.lands_at,
                "plain": flight.is_plain,
                "means": flight.differences,
                "buffers": flight.buffers,
                "refused": flight.is_refused,
                "counts": flight.counts,
            }
            for flight in self._flights
        ]
        return {
            "steps": self.steps,
            "position": self._position,
            "launched": self._launched,
            "since": list(self._since),
            "flights": flights,
            **self._anchors.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if `load_state_dict` cannot restore the state."""
        self._anchors.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `check_state` has accepted."""
        for flight in self._flights:
            self._wait(flight)
        self._anchors.load_state_dict(state)
        self.steps, self._position = int(state["steps"]), int(state["position"])
        self._launched, self._since = int(state["launched"]), list(state["since"])
        self._flights = [
            Flight(
                int(one["fragment"]),
                int(one["lands_at"]),
                0,
                bool(one["plain"]),
                {name: mean.clone() for name, mean in one["means"].items()},
                {name: mean.clone() for name, mean in one["buffers"].items()},
                None,
                bool(one["refused"]),
                bool(one["counts"]),
            )
            for one in state["flights"]
        ]

    def _launch(self, flag: int = 0) -> Flight:
        """Send the differences of the next fragment, and with the first one buffers, on their way."""
        recipe = self._recipe
        fragment = self._launched % recipe.fragments
        is_plain = self._launched < recipe.start_step * recipe.fragments
        differences = self._anchors.difference(fragment)
        buffers = self._anchors.buffer_difference(self._buffers()) if fragment == 0 else {}
        steps, self._since[fragment] = self._since[fragment], 0
        sent = [tensor for tensor in (*differences.values(), *buffers.values()) if tensor is not None]

        def run(lane: Lane) -> tuple[Told, list[str]]:
            moved = _moved(lane, buffers) if buffers else []
            told = self._averager.mean(lane, differences, steps, [*_chosen(buffers, moved).values()], flag)
            self._averager.finish_round(True)
            return told, moved

        speaks = self._inner is None or self._inner.speaks
        future = submit(self._lane, self._staging, sent, run) if speaks else Future()
        lands_at = self.steps + (0 if is_plain or flag & ENDING else recipe.delay)
        flight = Flight(fragment, lands_at, steps, is_plain, differences, buffers, future)
        self._flights.append(flight)
        self._launched += 1
        return flight

    def _land_due(self) -> None:
        for flight in [flight for flight in self._flights if flight.lands_at <= self.steps]:
            self._land(flight, self._recipe.mix)

    def _land(self, flight: Flight, mix: float) -> None:
        """Step the anchors of a fragment by its means, and mix them in."""
        self._wait(flight)
        self._flights.remove(flight)
        weight = 1.0 if flight.is_plain or flight.is_refused else mix
        if flight.counts:
            self._anchors.step(flight.fragment, flight.differences, flight.is_plain)
            self._anchors.land_buffers(self._buffers(), _chosen(flight.buffers, flight.buffers), weight)
        self._anchors.mix(flight.fragment, weight)
        self.landed += 1

    def _wait(self, flight: Flight) -> None:
        """Wait for the means of a launched fragment."""
        if flight.future is None:
            return
        started = time.perf_counter()
        try:
            told, moved = self._told(flight)
        except Exception:
            self._drop_failed()
            raise
        finally:
            self.exposed_seconds += time.perf_counter() - started
        flight.future, flight.flags, flight.counts = None, told.flags, told.total > 0
        flight.is_refused = self._lane.rank in told.refused
        flight.buffers = _chosen(flight.buffers, moved)
        self.ranks = told.ranks or self.ranks

    def _told(self, flight: Flight) -> tuple[Told, list[str]]:
        """Return what a round told, and the buffers that were averaged, on all ranks that train as one."""

        def numbers() -> list[float]:
            assert flight.future is not None, "it is waited for once"
            (told, moved), _ = flight.future.wait()
            return [*told.numbers(), *(float(name not in moved) for name in flight.buffers)]

        count = 3 * self._lane.world_size
        told = numbers() if self._inner is None else self._inner.wait(numbers, count + len(flight.buffers))
        moved = [name for name, stays in zip(flight.buffers, told[count:], strict=True) if not stays]
        if self._inner is not None:
            self._inner.share([*flight.differences.values(), *_chosen(flight.buffers, moved).values()])
        return Told.of(told[:count]), moved

    def _drop_failed(self) -> None:
        """Forget all launches that fail: later ones send what they were to send. The failure surfaces once."""
        for flight in [flight for flight in self._flights if flight.future is not None]:
            if self._inner is not None or _has_failed(flight.future):  # ranks that train as one forget the same
                self._flights.remove(flight)
                self._since[flight.fragment] += flight.steps


def _has_failed(future: Future[Any] | None) -> bool:
    try:
        if future is not None:
            future.wait()
    except Exception:
        return True
    return False


def _moved(lane: Lane, buffers: Mapping[str, Tensor | None]) -> list[str]:
    """Return the buffers that any rank has changed, and that all ranks have as they were when they were anchored."""
    channel = lane.channel(Subject("buffers of a round", "\n".join(buffers)))
    mine = [-1.0 if entry is None else float(entry.ne(0).any()) for entry in buffers.values()]
    numbers = zip(*channel.gather_numbers(mine), strict=True)
    return [name for name, of_ranks in zip(buffers, numbers, strict=True) if max(of_ranks) > 0 and min(of_ranks) >= 0]


def _chosen(buffers: Mapping[str, Tensor | None], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: buffer for name in names if (buffer := buffers[name]) is not None}


_attached: WeakSet[nn.Module] = WeakSet()


class OuterLoop(Synchronizer):
    """A running outer loop, which `thinwire.attach` returns where it is given ``outer=``.

    It has the methods of a `Synchronizer`, for parameters in place of gradients. Hooks of the optimizer hold its parts,
    so it need not be kept; it keeps its model alive, and when the model is freed its lane is released.

    Example:
        >>> recipe = thinwire.outer.diloco(every=64)                                     # doctest: +SKIP
        >>> sync = thinwire.attach(model, outer=recipe, optimizer=optimizer)             # doctest: +SKIP
        >>> train(model, optimizer)                                                      # doctest: +SKIP
        >>> sync.synchronize()                                                           # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        recipe: OuterRecipe,
        optimizer: torch.optim.Optimizer,
        compression: Compression | None,
        scheme: str | Scheme | TwoLevel,
        timeout: timedelta | None,
    ) -> None:
        self._model, self._recipe = model, recipe
        named = dict(model.named_parameters() if is_sharded(model) else synchronized_parameters(model))
        named = {name: one for name, one in named.items() if one.is_floating_point() or one.is_complex()}
        self._parameter_names = list(named)
        tables = {id(table) for table in tables_of(module_of(model))}
        entries = [Entry(name, parameter, id(parameter) in tables) for name, parameter in named.items()]
        device = next(parameter.device for parameter in named.values() if parameter.requires_grad)
        self._staging = staging_for(device)
        self._host = inner = inner_group(model, group, device)
        speaks = inner is None or inner.speaks
        self._rows: dict[str, ParameterRecord] = {}
        self._lane = Lane(group, timeout, self._staging)
        try:
            coded = compression if speaks else None
            self._averager = Averager(self._lane, entries, coded, scheme, self._rows, self._staging)
            lines = [recipe.describe(), configuration(scheme, model, None, None), *self._averager.describe()]
            self._lane.submit(partial(_agree, "\n".join(lines))).wait()
            broadcast_all((*named.values(), *dict(synchronized_buffers(module_of(model))).values()), group)
            buffers = partial(_floating_buffers, weakref.ref(module_of(model)))
            finite = {name: buffer for name, buffer in buffers().items() if bool(buffer.isfinite().all())}
            anchors = Anchors(named, finite, recipe)
            self._rounds = Rounds(recipe, anchors, self._averager, self._lane, buffers, self._staging, inner)
        except Exception:
            self._lane.close()
            raise
        self._hook = StepHook(self._rounds, anchors, named, self._lane.world_size)
        self._hook.register(optimizer)
        _attached.add(model)
        self._at_end = weakref.finalize(model, _release, self._hook, self._lane)
        self._at_end.atexit = False  # type: ignore[misc]  # a property, which the stubs make a field

    def __repr__(self) -> str:
        of = f"<OuterLoop of {type(self._model).__name__}"
        if not self._hook.is_registered:
            return f"{of}, detached>"
        return (
            f"{of}: {self._recipe.name}, {len(self._parameter_names)} parameters on {self._lane.world_size} ranks,"
            f" {self._rounds.steps} inner steps, {self._rounds.landed} rounds>"
        )

    def stats(self) -> dict[str, float]:
        """Return totals of this rank since `attach`, with the names of `Synchronizer.stats`.

        ``comm/steps`` are steps of the optimizer, and ``comm/bytes_dense`` is what stock DDP would have sent in them.
        ``comm/exposed_seconds`` is how long the training thread waited for rounds. ``outer/rounds`` have been averaged,
        each of one fragment; ``outer/ranks`` counted in the last one; in ``outer/skipped_rounds`` none did.
        ``outer/refused`` is how often a rank was left out because its parameters were not finite.
        """
        traffic = self._lane.exchange.traffic
        return {
            "comm/steps": float(self._rounds.steps),
            "comm/bytes_sent": float(traffic.sent_bytes),
            "comm/setup_bytes": float(self._lane.setup.sent_bytes),
            "comm/bytes_received": float(traffic.received_bytes),
            "comm/bytes_sent_between_hosts": float(traffic.sent_between_hosts_bytes),
            "comm/bytes_dense": float(self._hook.dense_bytes),
            "comm/seconds": self._lane.busy_seconds,
            "comm/exposed_seconds": self._rounds.exposed_seconds,
            "outer/inner_steps": float(self._rounds.steps),
            "outer/ranks": float(self._rounds.ranks),
            **self._averager.stats(),
            **self._staging.stats(),
        }

    def table(self) -> list[dict[str, str | int | float]]:
        """Return one row per parameter or averaged group, as `Synchronizer.table`; a step is a round."""
        return [record.row() for record in self._rows.values()]

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: only steps of the optimizer count."""
        return nullcontext()

    def synchronize(self) -> None:
        """End all rounds now; afterwards all ranks have the same parameters. All ranks call it, as before saving.

        Ranks that have made more steps than others are waited for, up to the timeout.

        Raises:
            ThinwireError: a round has failed.
        """
        self._check_attached()
        self._rounds.synchronize()

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Give the model the anchors, for evaluation or saving; this rank's own parameters come back at the end.

        Anchors have the same bits on all ranks. Nothing is sent, so ranks need not call it together.

        Example:
            >>> with sync.global_parameters():                                           # doctest: +SKIP
            ...     evaluate(model)
        """
        with self._rounds.swapped():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: anchors, outer momentum, counts, means in flight, memories of compressors.

        It waits for what is in flight, which ends once all ranks have launched it. Parameters are in the state of the
        model, and each rank has its own: save all of them, or `synchronize` before. The tensors are the anchors
        themselves, as in other state dicts of torch.
        """
        return {
            "version": VERSION,
            "recipe": self._recipe.describe(),
            "parameters": sorted(self._parameter_names),
            **self._rounds.state_dict(),
            "averager": self._averager.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank. With the parameters of then, the same steps follow bitwise.

        Raises:
            ValueError: a state of another version, recipe or model; nothing is changed.
        """
        if state.get("version") != VERSION or "recipe" not in state:
            raise ValueError(
                f"this is no state of an outer loop of version {VERSION}: attach with outer= saved another"
            )
        if state["recipe"] != self._recipe.describe():
            raise ValueError(f"the state was saved with {state['recipe']}, and here is {self._recipe.describe()}")
        unknown = set(state["parameters"]) ^ set(self._parameter_names)
        if unknown:
            raise ValueError(f"the state belongs to a model with other parameters; {min(unknown)!r} is in one of them")
        self._rounds.check_state(state)
        self._averager.check_state(state["averager"])
        self._rounds.load_state_dict(state)
        self._averager.load_state_dict(state["averager"])

    def gathered(self) -> Gathered:
        """Return the states of all ranks as one object, as `Synchronizer.gathered`."""
        return Gathered(self._lane, self.state_dict, self.load_state_dict)

    def trace(self, steps: int | None = None) -> NoReturn:
        """Raise ValueError: traces show the parts of a backward pass, in which nothing is sent."""
        raise ValueError("trace() shows what is sent during backward, and with outer= nothing is: see stats()")

    def watch_lane(self, watcher: Callable[[float, float], None] | None) -> None:
        """Call ``watcher`` with the start and end of each job, as `Synchronizer.watch_lane`."""
        self._lane.watcher = watcher

    def detach(self) -> None:
        """Land what is in flight, remove the hooks and release the lane, on all ranks. Safe to call twice.

        Ranks keep their own parameters; call `synchronize` before for the same on all.

        Raises:
            ThinwireError: what was in flight has failed; it is detached nevertheless.
        """
        if not self._hook.is_registered:
            return
        self._at_end.detach()
        self._hook.remove()
        _attached.discard(self._model)
        try:
            self._rounds.land_all()
        finally:
            self._lane.close()

    def _check_attached(self) -> None:
        if not self._hook.is_registered:
            raise ThinwireError("this outer loop was detached: attach the model again")


class StepHook:
    """The hooks of the optimizer whose steps are counted.

    Args:
        parameters: by name, for what stock DDP would have sent for them.
    """

    def __init__(
        self, rounds: Rounds, anchors: Anchors, parameters: Mapping[str, nn.Parameter], world_size: int
    ) -> None:
        self._rounds, self._anchors, self._world_size = rounds, anchors, world_size
        self._parameters = list(parameters.values())
        self._handles: list[RemovableHandle] = []
        self.dense_bytes = 0

    @property
    def is_registered(self) -> bool:
        return bool(self._handles)

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch the steps of an optimizer."""
        before, after = optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)
        self._handles = [before, after]

    def remove(self) -> None:
        """Watch no further steps."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @torch.compiler.disable
    def _before(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._anchors.adopt()

    @torch.compiler.disable
    def _after(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # of a GradScaler whose optimizer skips by itself
        if found_inf is not None and float(found_inf):
            return
        with torch.no_grad():
            self._rounds.after_step()
        self._count_dense()

    def _count_dense(self) -> None:
        """Count what stock DDP would have sent in this step, if all ranks have as many rows of sparse gradients."""
        dense = 0
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                held = [gradient._nnz()] * self._world_size
                row_bytes = gradient._values()[:1].nbytes
                self.dense_bytes += sparse_all_reduce_bytes(held, 0, row_bytes)
            elif parameter.requires_grad:
                dense += local_of(parameter).nbytes
        self.dense_bytes += ring_all_reduce_bytes(dense, self._world_size)


def _agree(text: str, lane: Lane) -> None:
    with lane.setting_up():
        lane.channel(Subject("attach", text)).open()


def _floating_buffers(module: weakref.ref[nn.Module]) -> dict[str, Tensor]:
    """Return the floating buffers of a module, as they are now; none if it is gone."""
    found = module()
    named = () if found is None else synchronized_buffers(found)
    return {name: buffer for name, buffer in named if buffer.is_floating_point()}


def _release(hook: StepHook, lane: Lane) -> None:
    """Detach a model that is gone: like `OuterLoop.detach`, but without waiting, and not on all ranks at once."""
    hook.remove()
    lane.abandon()


def is_outer(model: nn.Module) -> bool:
    """Return whether an `OuterLoop` of this model is not detached yet."""
    return model in _attached
