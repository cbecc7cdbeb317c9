"""`OuterLoop`: a model that ranks train apart, and rounds that bring them together."""

import copy
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thinwire.comm.c10d import never_compiled
from thinwire.comm.cuda.staging import staging_for
from thinwire.comm.lane import Lane, lane_stats
from thinwire.comm.process_group import ring_all_reduce_bytes, sparse_all_reduce_bytes
from thinwire.compress.assign import NATIVE, Dense
from thinwire.errors import ThinwireError, logger
from thinwire.gradients.compression import is_skipped
from thinwire.gradients.module import is_sharded, local_of, module_of, synchronized_buffers, synchronized_parameters
from thinwire.gradients.parameters import share_first
from thinwire.gradients.steps.describe import configuration
from thinwire.gradients.steps.state import Gathered
from thinwire.gradients.synchronizer import Attached
from thinwire.gradients.tables import Hook, tables_of, weak
from thinwire.observe.step import ParameterRecords
from thinwire.outer.anchors import Anchors
from thinwire.outer.average import Averager, Entry
from thinwire.outer.inner import inner_group, load_local_state, local_state, ranks_of, reshard, train_apart
from thinwire.outer.members import Members, Roll
from thinwire.outer.recipe import OuterRecipe
from thinwire.outer.rounds import Rounds, agree
from thinwire.outer.shadow import ShadowRounds
from thinwire.outer.stepped import SteppedRounds
from thinwire.sums.named import Rows

VERSION = 1
MOMENTUM_TWICE = (
    "error feedback sends the rest of a difference in later rounds, and Nesterov momentum then counts it once more:"
    " SparseLoCo (arXiv 2508.15706) trains without outer momentum, as with momentum=0.0, nesterov=False and"
    " dense=thinwire.compress.error_feedback(compressor, decay=0.95)"
)


@final
class OuterLoop(Attached):
    """A running outer loop, which `thinwire.outer.attach` returns.

    Hooks of the optimizer hold its parts, so it need not be kept; it keeps its model alive, and when the model is freed
    its lane is released.

    Example:
        >>> recipe = thinwire.outer.diloco(every=64)                                     # doctest: +SKIP
        >>> loop = thinwire.outer.attach(model, optimizer, recipe)                       # doctest: +SKIP
        >>> train(model, optimizer)                                                      # doctest: +SKIP
        >>> loop.synchronize()                                                           # doctest: +SKIP
    """

    refusal = "an outer loop of {} runs already, and trains ranks apart: call detach() on it first"
    keeps_ranks_alike = False  # so that a Checkpointer does not take ranks that differ for broken ones

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | Members,
        recipe: OuterRecipe,
        optimizer: torch.optim.Optimizer,
        rows: Rows,
        dense: Dense,
        excluded: frozenset[str],
        timeout: timedelta | None,
    ) -> None:
        self._model, self._recipe = model, recipe
        every = model.named_parameters() if is_sharded(model) else synchronized_parameters(model, excluded)
        named = {name: p for name, p in every if name not in excluded and (p.is_floating_point() or p.is_complex())}
        self._parameter_names = list(named)
        tables = {id(table) for table in tables_of(module_of(model))}
        entries = [Entry(name, parameter, id(parameter) in tables) for name, parameter in named.items()]
        device = next(parameter.device for parameter in named.values() if parameter.requires_grad)
        self._staging = staging = staging_for(device)
        self._host = inner = inner_group(model, group, named, recipe)
        self._speaks = inner is None or inner.speaks
        self._rows = ParameterRecords()
        text = "\n".join([repr(recipe), configuration(rows, model, excluded)])
        module = weakref.ref(module_of(model))
        own = dense if self._speaks else NATIVE, self._rows

        def average(lane: Lane, dense: Dense, records: ParameterRecords) -> Averager:
            return Averager(lane, entries, dense, rows, records, staging)

        def begin(lane: Lane, averager: Averager) -> Rounds:  # members hold it, so it must not hold the model
            if recipe.nesterov and averager.remembers and lane.rank == 0:
                logger.warning(MOMENTUM_TWICE)
            anchors = Anchors(named, recipe, partial(_floating_buffers, module, excluded))
            parts = recipe, anchors, averager, lane, staging, text, partial(_untrained, module, excluded)
            return ShadowRounds(*parts) if recipe.in_background else SteppedRounds(*parts, inner=inner)

        begun: list[Rounds] = []

        def enter(lane: Lane, roll: Roll) -> None:
            if not begun:
                begun.append(begin(lane, average(lane, *own)))
            begun[0].enter(lane, roll)

        members: Members | None = None
        if isinstance(group, Members):
            members = group
            members.prepare(enter, recipe.min_ranks, timeout, staging)
            lane = members.enter()
        else:
            lane = Lane(group, timeout, staging)
            try:
                averager = average(lane, *own)
                whole = averager if self._speaks else average(lane, dense, ParameterRecords())
                lane.submit(partial(agree, text=text, averager=whole)).wait()  # refused here, too
                share_first(
                    (*named.values(), *dict(synchronized_buffers(module_of(model), excluded)).values()), group, lane
                )
                begun.append(begin(lane, averager))
                if recipe.min_ranks is not None:
                    members = Members.of(group, timeout)
                    members.prepare(enter, recipe.min_ranks, timeout, staging)
                    members.watch(lane)
            except BaseException as error:
                lane.fail(error)
                raise
        (self._rounds,) = begun
        self._averager = self._rounds.averager
        self._rounds.meet_in(lane, members if recipe.min_ranks is not None else None)
        self._optimizer = optimizer
        self._average_again = train_apart(model, group)
        self._hook = StepHook(self._rounds, named)
        self._hook.register(optimizer, module_of(model))
        self._running[model] = excluded, ranks_of(group)
        self._at_end = weakref.finalize(model, _release, self._hook)
        self._at_end.atexit = False  # type: ignore[misc]  # a property, which the stubs make a field

    @property
    def _lane(self) -> Lane:  # members may begin another
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

        ``comm/steps`` and ``comm/optimizer_steps`` are steps of the optimizer; ``comm/bytes_dense`` is what stock DDP
        would have sent in them. ``comm/exposed_seconds`` is how long the training thread waited for rounds.
        ``outer/rounds`` have been averaged, each of one fragment; ``outer/ranks`` counted in the last one; in
        ``outer/skipped_rounds`` none did.
        ``outer/refused`` is how often a rank was left out because its parameters were not finite. ``outer/lost_steps``
        are inner steps of this rank that nobody got, because the others went on without it.
        """
        return {
            **lane_stats([self._lane]),
            "comm/steps": float(self._rounds.steps),
            "comm/optimizer_steps": float(self._rounds.steps),
            "comm/bytes_dense": float(self._hook.dense_bytes),
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

    def synchronize(self) -> None:
        """End all rounds now; afterwards all ranks have the same parameters. All ranks call it, as before saving.

        Ranks that have made more steps than others are waited for, up to the timeout.

        Raises:
            ThinwireError: a round has failed.
        """
        if not self._hook.is_registered:
            raise ThinwireError("this outer loop was detached: attach the model again")
        self._rounds.check_outside("synchronize()")
        self._rounds.synchronize()
        reshard(self._model)

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Give the model the anchors, for evaluation or saving; this rank's own parameters come back at the end.

        Anchors have the same bits on all ranks. Nothing is sent, so ranks need not call it together. It may be nested;
        steps of the optimizer, `synchronize`, `load_state_dict` and `detach` are refused inside.

        Example:
            >>> with loop.global_parameters():                                           # doctest: +SKIP
            ...     evaluate(model)
        """
        try:
            with nullcontext() if self._rounds.anchors.are_swapped else self._rounds.swapped():
                reshard(self._model)
                yield
        finally:
            reshard(self._model)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: anchors, outer momentum, counts, means in flight, memories of compressors.

        It waits for what is in flight, which ends once all ranks have launched it; so ranks that train as one, inside
        of DDP or FSDP2, call it together. Parameters are in the state of the model, and each rank has its own: save all
        of them, or `synchronize` before. The tensors are the anchors themselves, as in other state dicts of torch.
        """
        with self._rounds.still():
            state = {
                "version": VERSION,
                "recipe": repr(self._recipe),
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
        self._rounds.check_outside("load_state_dict()")
        if state.get("version") != VERSION or "recipe" not in state:
            raise ValueError(f"this is no state of an outer loop of version {VERSION}: thinwire.attach saved another")
        if state["recipe"] != repr(self._recipe):
            raise ValueError(f"the state was saved with {state['recipe']}, and here is {self._recipe!r}")
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
            if "own" in state:  # of `gathered`: rounds that begin copy what is in the model then
                load_local_state(self._optimizer, state["optimizer"])
                self._rounds.anchors.load_own(state["own"])
                reshard(self._model)

    def gathered(self) -> Gathered:
        """Return the states of all ranks as one object, as `Synchronizer.gathered`.

        They have what else each rank has of its own in the middle of a round: its parameters, also inside of
        `global_parameters`, and the state of its optimizer. So a trainer whose checkpoint has the model and the
        optimizer of rank 0 can restore those of all ranks: load this last.
        """
        runs_jobs: Any = self._rounds  # as a lane does, but between rounds
        number = 0 if self._host is None else self._host.number
        return Gathered(runs_jobs, self._state_of_rank, self.load_state_dict, number)

    def _state_of_rank(self) -> dict[str, Any]:
        return {**self.state_dict(), "own": self._rounds.anchors.own(), "optimizer": local_state(self._optimizer)}

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
        self._rounds.check_outside("detach()")
        self._at_end.detach()
        self._hook.remove()
        self._average_again()
        self._running.pop(self._model, None)
        try:
            self._rounds.land_all()
            reshard(self._model)
        finally:
            self._lane.close()


class StepHook:
    """The hooks of the optimizer whose steps are counted.

    Args:
        parameters: by name, for what stock DDP would have sent for them.
    """

    def __init__(self, rounds: Rounds, parameters: Mapping[str, nn.Parameter]) -> None:
        self.rounds = rounds
        self._parameters = list(parameters.values())
        self._handles: list[RemovableHandle] = []
        self.dense_bytes = self._refusals = 0
        self._is_empty = self._is_loaded = False

    @property
    def is_registered(self) -> bool:
        return bool(self._handles)

    def register(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        """Watch the steps of an optimizer, and whether a state is loaded into a model before them."""
        before, after = optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)
        self._handles = [before, after, module.register_load_state_dict_post_hook(Hook(weak(self._on_load)))]

    def remove(self) -> None:
        """Watch no further steps."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @never_compiled
    def _before(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._is_empty = not optimizer.state and _is_empty(optimizer)
        if self._is_empty:
            return
        if not self.rounds.steps:
            optimized = (entry for group in optimizer.param_groups for entry in group["params"])
            try:
                self.rounds.check_start(optimized, self._is_loaded)
            except ValueError as error:  # ranks that go on are told
                self.rounds.lane.break_off(f"rank {self.rounds.lane.global_rank}: {error}", error)
                raise
        self._mend(optimizer)  # of rounds that ended between two steps
        self.rounds.before_step()

    def _on_load(self, *unused: object) -> None:
        self._is_loaded = True

    @never_compiled
    def _after(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._is_empty or is_skipped(optimizer):
            return
        with torch.no_grad():
            self.rounds.after_step()
        self._mend(optimizer)
        self._count_dense()

    def _mend(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget moments that are not finite: from anchors they would lead to parameters that are not, again."""
        if self._refusals == self.rounds.refusals:
            return
        self._refusals = self.rounds.refusals
        for state in optimizer.state.values():
            for tensor in state.values():
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

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


def _is_empty(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step is that of torch.distributed.checkpoint, by zero gradients, for state to load into."""
    gradients = (entry.grad for group in optimizer.param_groups for entry in group["params"] if entry.requires_grad)
    is_still = not any(float(group.get("lr", 1.0)) for group in optimizer.param_groups)
    return is_still and all(one is not None and not one.is_sparse and not local_of(one).any() for one in gradients)


def _floating_buffers(module: weakref.ref[nn.Module], excluded: Container[str]) -> dict[str, Tensor]:
    """Return the floating buffers of a module, as they are now, without those of 8 bits; none if it is gone."""
    owner = module()
    named = () if owner is None else synchronized_buffers(owner, excluded)
    return {name: one for name, one in named if one.is_floating_point() and one.element_size() > 1}  # as torch adds


def _untrained(module: weakref.ref[nn.Module], excluded: Container[str]) -> dict[str, Tensor]:
    """Return what has no anchor and is the same on all ranks at the start: frozen parameters, and buffers."""
    owner = module()
    if owner is None:
        return {}
    named = synchronized_parameters(owner, excluded)
    frozen = [(name, entry.detach()) for name, entry in named if not entry.requires_grad]
    return {name: local_of(tensor) for name, tensor in (*frozen, *synchronized_buffers(owner, excluded))}


def _release(hook: StepHook) -> None:
    """Detach a model that is gone: like `OuterLoop.detach`, but without waiting, and not on all ranks at once."""
    hook.remove()
    hook.rounds.drop()
    hook.rounds.lane.abandon()
