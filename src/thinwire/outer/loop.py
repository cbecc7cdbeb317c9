"""`OuterLoop`: a model that ranks train apart, and rounds that bring them together, in step with training."""

from __future__ import annotations

import copy
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
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
from thinwire.outer.inner import InnerGroup, inner_group, reshard
from thinwire.outer.members import Members, Roll, hand_over
from thinwire.outer.recipe import OuterRecipe
from thinwire.outer.shadow import ShadowRounds
from thinwire.sync.scheme import Scheme
from thinwire.sync.two_level import TwoLevel
from thinwire.synchronizer import Synchronizer

VERSION = 1
MOMENTUM_TWICE = (
    "error feedback sends the rest of a difference in later rounds, and Nesterov momentum then counts it once more:"
    " SparseLoCo (arXiv 2508.15706) trains without outer momentum, as with momentum=0.0, nesterov=False and"
    " compress=thinwire.compress.error_feedback(compressor, decay=0.95)"
)
ENDING = 1
"""Flag of a rank that is in `Rounds.synchronize`."""
ASKED = 2
"""Flag of a rank that knows of a process that waits to be let in."""


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
        number: how many were launched before.
        flag: that of this rank.
        generation: number of that of the members whose lane averages it.
        means: what its job makes of differences and buffers, which are kept where it may be made again.
        told: what the job returns, as soon as all means are there.
        is_committed: whether all ranks have them.
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
    number: int = 0
    flag: int = 0
    generation: int = 0
    means: tuple[dict[str, Tensor], Mapping[str, Tensor | None]] = field(default_factory=lambda: ({}, {}))
    told: tuple[Told, list[str]] | None = None
    is_committed: bool = False


class Rounds:
    """The rounds of a model in step with its training. Hooks of the optimizer hold it; it holds no module.

    All ranks launch the same fragments in the same order, whatever steps they have made, so their jobs match.

    Args:
        buffers: returns the floating buffers by name, as they are now.
        staging: the way of differences to the lane, and back.
        inner: the ranks that train as one with this one, or None.
        text: what ranks have to agree on, with what the averager describes.
        untrained: returns the tensors by name that newcomers take besides anchors.
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
        text: str = "",
        untrained: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self._recipe, self.anchors, self.averager, self.lane = recipe, anchors, averager, lane
        self._buffers, self._staging, self._inner = buffers, staging, inner
        self._text, self._untrained = text, untrained
        self._members: Members | None = None  # those with whom rounds are made again, if a rank may be lost
        self._flights: list[Flight] = []
        self._since = [0] * recipe.fragments  # inner steps since the last launch
        self._position = 0  # in the schedule
        self._launched = self.landed = 0
        self._finished = 0  # launches whose means this rank has, landed or not
        self._joined_at: int | None = None  # inner step of the others at which this rank took their state
        self.lost_steps = 0
        self.steps = self.ranks = self.refusals = 0
        self._is_swapped = False
        self.exposed_seconds = 0.0

    def meet_in(self, members: Members | None, lane: Lane, timeout: timedelta | None) -> None:
        """Go on with the ranks of a lane; if some are enough, with those that are left when one is lost.

        Args:
            members: the ranks that take part; None for those of the lane.
        """
        self.lane = lane
        if members is not None and self._recipe.min_ranks is not None:
            self._members = members
            members.watch(lane, self.enter, self._recipe.min_ranks, timeout, self._staging)

    def check_start(self, optimized: Iterable[Tensor]) -> None:
        """Raise ValueError before the first step if parameters are not those of attach."""
        self.anchors.check_start(optimized)

    def before_step(self) -> None:
        """Anchor parameters that are trained from now on."""
        self.anchors.adopt()

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
        for flight in list(self._flights) if self._inner is None else ():  # those wait together
            if flight.future is not None and flight.future.done():
                self._wait(flight)
        if self._members is not None and self.lane.is_broken:
            self._regroup(ThinwireError("another rank is gone"))
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
            together = together + 1 if flight.flags and all(flag & ENDING for flag in flight.flags) else 0
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
            with self.anchors.swapped(self._buffers()):
                yield
        finally:
            self._is_swapped = False

    def still(self) -> AbstractContextManager[None]:
        """Return a context in which the state of this rank changes only by its own calls, as it does here anyway."""
        return nullcontext()

    stopped = still

    def drop(self) -> None:
        """Begin no more rounds."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the means of what is in flight, for which it waits."""
        for flight in self._flights:
            self._wait(flight)
        return self._state()

    def _state(self) -> dict[str, Any]:
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
            if flight.future is None
        ]
        return {
            "steps": self.steps,
            "position": self._position,
            "launched": self._launched,
            "since": list(self._since),
            "flights": flights,
            **self.anchors.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if `load_state_dict` cannot restore the state."""
        if self._joined_at is not None and self._joined_at == self.steps and "untrained" not in state:
            raise ValueError(
                "this rank joined others and has their state, which an older one must not replace: restore model and"
                " the optimizer before attach, and the outer loop where all ranks begin"
            )
        self.anchors.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `check_state` has accepted."""
        for flight in self._flights:
            self._wait(flight)
        self.anchors.load_state_dict(state)
        self.steps, self._position = int(state["steps"]), int(state["position"])
        self._launched = self._finished = int(state["launched"])
        self._since = list(state["since"])
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
        differences = self.anchors.difference(fragment)
        buffers = self.anchors.buffer_difference(self._buffers()) if fragment == 0 else {}
        steps, self._since[fragment] = self._since[fragment], 0
        lands_at = self.steps + (0 if is_plain or flag & ENDING else recipe.delay)
        flight = Flight(fragment, lands_at, steps, is_plain, differences, buffers, None)
        flight.number, flight.flag = self._launched, flag
        self._send(flight)
        self._flights.append(flight)
        self._launched += 1
        return flight

    def _send(self, flight: Flight) -> None:
        """Have the lane average a flight."""
        members, differences, buffers = self._members, flight.differences, flight.buffers
        if members is not None:
            differences = {name: tensor.clone() for name, tensor in differences.items()}
            buffers = {name: None if tensor is None else tensor.clone() for name, tensor in buffers.items()}
            flight.generation = members.number
        flight.means = differences, buffers
        sent = [tensor for tensor in (*differences.values(), *buffers.values()) if tensor is not None]

        def run(lane: Lane) -> tuple[Told, list[str]]:
            flag = flight.flag | ASKED * (members is not None and members.asked(lane))
            moved = _moved(lane, buffers) if buffers else []
            averaged = [*_chosen(buffers, moved).values()]
            told = self.averager.mean(lane, differences, flight.steps, averaged, flag, flight.is_plain)
            if members is not None:  # who passes this knows that all have the means
                flight.told, self._finished = (told, moved), flight.number + 1
                lane.channel(Subject(f"the end of round {flight.number}", "")).open()
            self.averager.finish_round(True)
            flight.is_committed = True
            return told, moved

        speaks = self._inner is None or self._inner.speaks
        flight.future = submit(self.lane, self._staging, sent, run) if speaks else Future()

    def _land_due(self) -> None:
        for flight in [flight for flight in self._flights if flight.lands_at <= self.steps]:
            self._land(flight, self._recipe.mix)

    def _land(self, flight: Flight, mix: float) -> None:
        """Step the anchors of a fragment by its means, and mix them in."""
        self._wait(flight)
        if flight not in self._flights:
            return  # this rank was left out, and has gone on from what others have
        self._flights.remove(flight)
        weight = 1.0 if flight.is_plain or flight.is_refused else mix
        if flight.counts:
            self.anchors.step(flight.fragment, flight.differences, flight.is_plain)
        self.anchors.land_buffers(self._buffers(), _chosen(flight.buffers, flight.buffers), weight)
        self.anchors.mix(flight.fragment, weight)
        self.landed += 1
        members, flags = self._members, flight.flags
        if members is None or flight.generation != members.number or any(flag & ENDING for flag in flags):
            return
        if any(flag & ASKED for flag in flags):
            self.lane = members.admit(self.lane, lambda: self._finished)
            self._send_again()

    def _wait(self, flight: Flight) -> None:
        """Wait for the means of a launched fragment."""
        started = time.perf_counter()
        try:
            while flight.future is not None and flight in self._flights:
                try:
                    self._accept(flight, *self._told(flight))
                except Exception as error:
                    self._regroup(error)
        except Exception:
            self._drop_failed()
            raise
        finally:
            self.exposed_seconds += time.perf_counter() - started

    def _accept(self, flight: Flight, told: Told, moved: Sequence[str]) -> None:
        """Record the means of a flight."""
        flight.future, flight.flags, flight.counts = None, told.flags, told.total > 0
        flight.is_refused = self.lane.rank in told.refused
        self.refusals += flight.is_refused
        flight.differences, flight.buffers = flight.means[0], _chosen(flight.means[1], moved)
        self.ranks = told.ranks or self.ranks

    def _regroup(self, error: Exception) -> None:
        """Go on with the ranks that are left; raise the error if there are no others to go on with."""
        if self._members is None:
            raise error
        self.lane = self._members.regroup(self.lane, error, lambda: self._finished)
        self._send_again()

    def _send_again(self) -> None:
        for flight in self._flights:
            if flight.future is not None:
                self._send(flight)

    def enter(self, lane: Lane, roll: Roll) -> None:
        """Begin with the ranks of a lane, as a job of it, while the thread of training waits."""
        is_new = lane.rank in roll.new
        self._settle(-1 if is_new else roll.done)
        self.averager.moved_to(lane)
        lane.channel(Subject("attach", "\n".join([self._text, *self.averager.describe()]))).open()
        if not roll.new:
            return
        state = {**self._state(), "launched": roll.done, "untrained": self._untrained()} if not is_new else {}
        state = hand_over(lane, roll, state)
        if is_new:
            self._take(state)
            self._joined_at = self.steps if roll.began else None

    def _settle(self, done: int) -> None:
        """Accept what all ranks have finished, and take back what they have not."""
        flights = [flight for flight in self._flights if flight.future is not None]
        middle = next((flight for flight in flights if not flight.is_committed), None)
        if middle is not None:
            self.averager.finish_round(middle.number < done)
        for flight in flights:
            if flight.number < done:
                assert flight.told is not None, "finished, so it was told"
                self._accept(flight, *flight.told)
        self._finished = max(done, 0)

    @torch.no_grad()
    def _take(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another rank, with no steps that count."""
        lost = list(self._since)
        for flight in self._flights:
            lost[flight.fragment] += flight.steps
        self.lost_steps += max(lost)
        self._flights = []
        self.check_state(state)
        self.load_state_dict(state)
        self._since = [0] * self._recipe.fragments
        for flight in self._flights:
            flight.is_refused = False
        for fragment in range(self._recipe.fragments):
            self.anchors.mix(fragment, 1.0)
        for name, tensor in self._untrained().items():
            tensor.copy_(state["untrained"][name])

    def _told(self, flight: Flight) -> tuple[Told, list[str]]:
        """Return what a round told, and the buffers that were averaged, on all ranks that train as one."""

        def numbers() -> list[float]:
            assert flight.future is not None, "it is waited for once"
            (told, moved), _ = flight.future.wait()
            return [*told.numbers(), *(float(name not in moved) for name in flight.buffers)]

        count = 3 * self.lane.world_size
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


logger = logging.getLogger("thinwire")
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

    keeps_ranks_alike = False  # so that a Checkpointer does not take ranks that differ for broken ones

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | Members,
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
        self._host = inner = _inner_group(model, group, device, recipe)
        self._speaks = inner is None or inner.speaks
        self._rows: dict[str, ParameterRecord] = {}
        text = "\n".join([recipe.describe(), configuration(scheme, model, None, None)])
        module = weakref.ref(module_of(model))
        buffers, untrained = partial(_floating_buffers, module), partial(_untrained, module)
        coded = compression if self._speaks else None

        def average(lane: Lane) -> Averager:
            return Averager(lane, entries, coded, scheme, self._rows, self._staging)

        def begin(lane: Lane, averager: Averager) -> Rounds | ShadowRounds:
            if recipe.nesterov and averager.remembers and lane.rank == 0:
                logger.warning(MOMENTUM_TWICE)
            finite = {name: buffer for name, buffer in buffers().items() if bool(buffer.isfinite().all())}
            anchors = Anchors(named, finite, recipe)
            parts = recipe, anchors, averager, lane, buffers, self._staging
            if recipe.in_background:
                return ShadowRounds(*parts, [one.name for one in entries if one.is_table], text, untrained)
            return Rounds(*parts, inner, text, untrained)

        if isinstance(group, Members):
            found: list[Rounds | ShadowRounds] = []

            def enter(lane: Lane, roll: Roll) -> None:
                found[:] = found or [begin(lane, average(lane))]
                found[0].enter(lane, roll)

            lane = group.enter(enter, recipe.min_ranks, timeout, self._staging)
            self._rounds, members = found[0], group
        else:
            lane = Lane(group, timeout, self._staging)
            try:
                averager = average(lane)
                whole = averager if self._speaks else Averager(lane, entries, compression, scheme, {}, self._staging)
                lane.submit(partial(_agree, "\n".join([text, *whole.describe()]))).wait()  # of those that speak, too
                broadcast_all((*named.values(), *dict(synchronized_buffers(module_of(model))).values()), group)
                self._rounds = begin(lane, averager)
                members = None if recipe.min_ranks is None else Members.of(group)
            except Exception:
                lane.close()
                raise
        self._averager = self._rounds.averager
        self._rounds.meet_in(members, lane, timeout)
        self._hook = StepHook(self._rounds, named)
        self._hook.register(optimizer)
        _attached.add(model)
        self._at_end = weakref.finalize(model, _release, self._hook)
        self._at_end.atexit = False  # type: ignore[misc]  # a property, which the stubs make a field

    @property
    def _lane(self) -> Lane:  # type: ignore[override]  # members may begin another
        return self._rounds.lane

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
        ``outer/refused`` is how often a rank was left out because its parameters were not finite. ``outer/lost_steps``
        are inner steps of this rank that nobody got, because the others went on without it.
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
            "outer/lost_steps": float(self._rounds.lost_steps),
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
        reshard(self._model)

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Give the model the anchors, for evaluation or saving; this rank's own parameters come back at the end.

        Anchors have the same bits on all ranks. Nothing is sent, so ranks need not call it together.

        Example:
            >>> with sync.global_parameters():                                           # doctest: +SKIP
            ...     evaluate(model)
        """
        try:
            with self._rounds.swapped():
                reshard(self._model)
                yield
        finally:
            reshard(self._model)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: anchors, outer momentum, counts, means in flight, memories of compressors.

        It waits for what is in flight, which ends once all ranks have launched it; so ranks that train as one, inside
        of DDP or FSDP2, call it together. Parameters are in the state of the
        model, and each rank has its own: save all of them, or `synchronize` before. The tensors are the anchors
        themselves, as in other state dicts of torch.
        """
        with self._rounds.still():
            state = {
                "version": VERSION,
                "recipe": self._recipe.describe(),
                "parameters": sorted(self._parameter_names),
                "shard": 0 if self._host is None else self._host.shard,
                **self._rounds.state_dict(),
                "averager": self._averager.state_dict(),
            }
            return copy.deepcopy(state) if self._recipe.in_background else state

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
        shard = 0 if self._host is None else self._host.shard
        if state["shard"] != shard:
            raise ValueError(f"a state of shard {state['shard']}, and here is shard {shard}: save that of every rank")
        self._rounds.check_state(state)
        if self._speaks:
            self._averager.check_state(state["averager"])
        with self._rounds.stopped():
            self._rounds.load_state_dict(state)  # which waits for what is in flight and writes to memories
            if self._speaks:
                self._averager.load_state_dict(state["averager"])

    def gathered(self) -> Gathered:
        """Return the states of all ranks as one object, as `Synchronizer.gathered`.

        Raises:
            ValueError: ranks have shards of parameters.
        """
        if self._host is not None and not self._host.is_alike:
            raise ValueError("rank 0 does not write the shards of all ranks: save sync.state_dict() on every rank")
        lane: Any = self._rounds if self._recipe.in_background else self._lane
        return Gathered(lane, self.state_dict, self.load_state_dict)

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
            reshard(self._model)
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

    def __init__(self, rounds: Rounds | ShadowRounds, parameters: Mapping[str, nn.Parameter]) -> None:
        self.rounds = rounds
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
        if not self.rounds.steps:
            self.rounds.check_start(entry for group in optimizer.param_groups for entry in group["params"])
        self.rounds.before_step()

    @torch.compiler.disable
    def _after(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # of a GradScaler whose optimizer skips by itself
        if found_inf is not None and float(found_inf):
            return
        refusals = self.rounds.refusals
        with torch.no_grad():
            self.rounds.after_step()
        if self.rounds.refusals > refusals:
            _mend(optimizer)
        self._count_dense()

    def _count_dense(self) -> None:
        """Count what stock DDP would have sent in this step, if all ranks have as many rows of sparse gradients."""
        dense = 0
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                held = [gradient._nnz()] * self.rounds.lane.world_size
                row_bytes = gradient._values()[:1].nbytes
                self.dense_bytes += sparse_all_reduce_bytes(held, 0, row_bytes)
            elif parameter.requires_grad:
                dense += local_of(parameter).nbytes
        self.dense_bytes += ring_all_reduce_bytes(dense, self.rounds.lane.world_size)


def _mend(optimizer: torch.optim.Optimizer) -> None:
    """Forget moments that are not finite: from anchors they would lead to parameters that are not, again."""
    for state in optimizer.state.values():
        for tensor in state.values():
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _agree(text: str, lane: Lane) -> None:
    with lane.setting_up():
        lane.channel(Subject("attach", text)).open()


def _floating_buffers(module: weakref.ref[nn.Module]) -> dict[str, Tensor]:
    """Return the floating buffers of a module, as they are now; none if it is gone."""
    found = module()
    named = () if found is None else synchronized_buffers(found)
    return {name: buffer for name, buffer in named if buffer.is_floating_point()}


def _untrained(module: weakref.ref[nn.Module]) -> dict[str, Tensor]:
    """Return what has no anchor and is the same on all ranks at the start: frozen parameters, and buffers."""
    found = module()
    if found is None:
        return {}
    frozen = [(name, entry.detach()) for name, entry in synchronized_parameters(found) if not entry.requires_grad]
    return {name: local_of(tensor) for name, tensor in (*frozen, *synchronized_buffers(found))}


def _inner_group(
    model: nn.Module, group: dist.ProcessGroup | Members, device: torch.device, recipe: OuterRecipe
) -> InnerGroup | None:
    """Return the ranks that train as one with this one, or None; raise ValueError where they cannot."""
    if isinstance(group, Members):
        if isinstance(model, DistributedDataParallel) or is_sharded(model):
            raise ValueError("Members are ranks that train alone: attach the plain module, not one of DDP or FSDP2")
        return None
    inner = inner_group(model, group, device)
    if inner is not None:
        inner.check(recipe)
    return inner


def _release(hook: StepHook) -> None:
    """Detach a model that is gone: like `OuterLoop.detach`, but without waiting, and not on all ranks at once."""
    hook.remove()
    hook.rounds.drop()
    hook.rounds.lane.abandon()


def is_outer(model: nn.Module) -> bool:
    """Return whether an `OuterLoop` of this model is not detached yet."""
    return model in _attached
