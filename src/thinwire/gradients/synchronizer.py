"""`Synchronizer`: the statistics, the state, and the end of a synchronization."""

import weakref
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import kernels
from thinwire.comm.channel import Subject
from thinwire.comm.cuda.staging import staging_for
from thinwire.comm.lane import Lane, lane_stats
from thinwire.comm.machine import Machine
from thinwire.comm.process_group import Staging, reduce_scatter_bytes
from thinwire.compress.assign import AUTO, LOSSLESS
from thinwire.compress.base import Exchanged
from thinwire.errors import logger
from thinwire.gradients.buckets import Buckets, Sums, as_real
from thinwire.gradients.collective import CollectiveTables, measured
from thinwire.gradients.compressed import CompressedSync, Statistics
from thinwire.gradients.compression import GradScaler, Methods
from thinwire.gradients.ddp import CODES, ROWS, Alone, DdpPlug, LeftToDdp, Plug, failed, keeps_buckets, prepare
from thinwire.gradients.exact import OTHERS, GradientSync, NativeAllReduce, is_gloo, is_native, route_asked_for
from thinwire.gradients.lossless import LosslessSync
from thinwire.gradients.module import module_of, synchronized_buffers, synchronized_parameters, trained_names
from thinwire.gradients.parameters import ParameterHooks, Trained, indices_of, share_first, trained_parameters
from thinwire.gradients.passes import Guard, Passes
from thinwire.gradients.sharded.layout import ShardedHooks, Sharding, sharding_of
from thinwire.gradients.steps import state as states
from thinwire.gradients.steps.dense import DenseChoice
from thinwire.gradients.steps.describe import configuration
from thinwire.gradients.steps.execution import Execution
from thinwire.gradients.steps.grouping import Following, Intent
from thinwire.gradients.steps.state import Gathered
from thinwire.gradients.steps.steps import Decisions, StepLoop, Trace
from thinwire.gradients.steps.trials import RowsChoice
from thinwire.gradients.tables import LookupRows, sparse_tables_of, table_names, weak
from thinwire.observe.step import Clock, ParameterRecord
from thinwire.rows import floats
from thinwire.sums.named import Rows
from thinwire.tune.prices import Route


class Attached:
    """What runs on a model after it was attached, of one kind: whose parameters it averages.

    A copy or a file of a model that has it as an attribute has None there: those are not attached.
    """

    keeps_ranks_alike: ClassVar[bool] = True
    """Whether all ranks have the same parameters after each step, so that a difference is corruption."""
    refusal: ClassVar[str]
    """Why nothing else may be attached, with a blank for the model."""
    _running: ClassVar[WeakKeyDictionary[nn.Module, tuple[frozenset[str], frozenset[int]]]]
    """What each model leaves alone, and its ranks."""

    def __init_subclass__(cls) -> None:
        cls._running = WeakKeyDictionary()

    @classmethod
    def check_free(cls, model: nn.Module, excluded: frozenset[str], ranks: frozenset[int]) -> None:
        """Raise ValueError if a trained parameter is averaged by what is attached already, to this model or another.

        DDP models may share parameters: each averages what its own forward uses. An outer loop may have ranks among
        which no others average gradients.
        """
        mine = trained_names(model, excluded)
        for kind in Attached.__subclasses__():
            for other, (alone, theirs) in kind._running.items():
                are_ddp = other is not model and all(isinstance(one, DistributedDataParallel) for one in (model, other))
                is_apart = are_ddp or (kind is not cls and len(ranks & theirs) < 2)
                shared = {} if is_apart else mine if (other, kind) == (model, cls) else trained_names(other, alone)
                for name in (name for key, name in mine.items() if key in shared):
                    what = f"another {type(other).__name__} with parameter {name!r} of this one"
                    what, cure = ("this model", "") if other is model else (what, f", or pass exclude={name!r}")
                    raise ValueError(kind.refusal.format(what) + cure)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@final
class Synchronizer(Attached):
    """A running synchronization, which `attach` returns: its statistics, its state, and its end.

    It keeps its model alive, and the model does not need it: hooks hold its parts. When neither is referenced,
    the model is freed, and its lane with it, as if `detach` had been called.
    """

    refusal = "thinwire is attached to {} already, and averages gradients: call detach() on its Synchronizer first"

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        rows: Rows,
        timeout: timedelta | None,
        methods: Methods,
        excluded: frozenset[str],
        intent: Intent | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        self._model = model
        self._module = module_of(model)
        named = dict(synchronized_parameters(model, excluded))
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._gradients = GradientSync(rows)
        self._clock = Clock()
        self._route = route_asked_for()
        self._intent = intent
        self._methods = methods
        self._sharding = sharding_of(model)
        self._device = self._device_of(named)
        self._staging = staging_for(self._device)
        inner = group if self._sharding is None else self._sharding.dimension()
        self._of_rows = [] if methods.tables is None else sorted(methods.tables.names)  # in shards
        shards = [] if self._sharding is None else self._sharding.names()
        self._all_names = [*self._names.values(), *shards, *self._of_rows]
        self._compressed: CompressedSync | None = None
        self._execution: Execution | None = None
        self._lane = self._inner = Lane(group, timeout, self._staging)
        self._lanes = [self._lane]
        try:
            if methods.tables is not None:
                methods.tables.count(self._gradients.records)
            self._passes = Passes(model, self._clock, excluded)
            self._make_lanes(group, inner, timeout)
            if methods.has(LOSSLESS) and self._inner.world_size > 1:
                floats.require('dense="lossless"')
            if methods.compressed:
                self._compressed = self._make_compressed(grad_scaler)
            for lane in self._lanes:
                lane.submit(partial(self._agree_on_configuration, excluded)).wait()
            if self._sharding is not None and self._sharding.replicas is not None:
                checksum = self._sharding.checksum()  # on the stream that wrote the shards
                self._sharding.compare(self._lane.agree("checksums of shards", checksum))
            if not isinstance(model, DistributedDataParallel):
                buffers = () if self._sharding is not None else synchronized_buffers(model, excluded)
                share_first((*named.values(), *dict(buffers).values()), group, self._lane)
            for lane in self._lanes:
                lane.codes_values = methods.has(LOSSLESS)
            self._lossless = self._make_lossless()
            self._native = self._make_native(inner)
            if self._native is not None and (self._sharding is None or self._native.is_own):
                self._gradients.leave_to(self._native, self._staging.is_host)
            collective = self._make_collective(inner, self._inner, self._native)
            self._sums = Sums(self._gradients, self._native, collective, self._compressed, self._lossless)
            guard = Guard(self._lanes)
            if methods.tables is not None:
                methods.tables.follow(self._lane, guard.broke_off)
            self._plug = self._make_plug(self._sums, guard)
            self._choice, begin = self._make_choice(named), self._make_rows()
            if intent is not None:
                hooks = self._plug if isinstance(self._plug, ParameterHooks) else None
                following = Following(intent.names, intent.groups, hooks, self._compressed)
                self._execution = Execution(intent, self._lane, following, self._buckets.take_formed)
        except BaseException as error:
            for lane in self._lanes:
                lane.fail(error)
            for made in filter(None, map(vars(self).get, ("_plug", "_lookups"))):  # whose hooks the model would keep
                made.remove()
            raise
        self._tables = table_names(self._module, self._names)
        sends_rows, scatters = self._tables or self._of_rows, self._lossless is not None and self._lossless.scatters
        needs_kernels = sends_rows or scatters or methods.has(LOSSLESS) or self._compressed is not None
        if needs_kernels and not (self._is_left or isinstance(self._plug, Alone)):
            self._lane.submit(partial(_warm_up, self._staging))  # while the first forward runs
        choice = begin(self._tables) if begin is not None and self._tables else None
        adopt = None
        if self._lookups.candidates and self._sharding is None:
            adopt = partial(_adopt_tables, self._buckets, self._plug, self._names, begin)
        decisions = Decisions(self._execution, self._choice, choice)
        count, clock = len(self._all_names), self._clock
        self._steps = StepLoop(model, count, self._lanes, clock, self._sums, self._plug, adopt, decisions)
        self._passes.watch(self._plug, guard, self._steps.finish, getattr(self._compressed, "commit", None))
        self._warn_of_no_gain()
        for lane in self._lanes:
            lane.doing = weak(self._passes.doing)
        self._running[model] = excluded.difference(self._of_rows), frozenset(dist.get_process_group_ranks(group))
        hooks = (self._passes, self._lookups) if self._sharding is None else ()  # FSDP's hold the model
        self._release = weakref.finalize(model, _release, hooks, self._lanes)
        self._release.atexit = False  # type: ignore[misc]  # a property, which the stubs make a field

    def __repr__(self) -> str:
        of = f"<Synchronizer of {type(self._model).__name__}"
        if not self._passes.are_watched:
            return f"{of}, detached>"
        lossy = "" if self._compressed is None else f" ({len(self._compressed.plans)} compressed)"
        return (
            f"{of}: {len(self._all_names)} parameters{lossy} by {self._gradients.scheme} on"
            f" {self._lane.world_size} ranks, {self._steps.count} steps>"
        )

    def stats(self) -> dict[str, float]:
        """Return totals of this rank since `attach`: bytes, seconds, steps. Slash names suit any metrics logger.

        ``comm/steps`` counts synchronized backward passes, ``comm/optimizer_steps`` the steps of optimizers that took
        their gradients: several passes belong to one where gradients are accumulated without `no_sync`, or cached.

        ``comm/bytes_sent`` is the traffic of gradients; ``comm/setup_bytes`` is all other traffic: to discover hosts,
        measure the link and agree, 2 MB at most, and states of `gathered`. ``comm/bytes_dense`` is what stock DDP would
        have sent: an all-reduce of dense gradients, and for ``sparse=True`` tables torch's own sparse all-reduce, which
        gathers the rows of all ranks on each. ``comm/host_waits`` counts how often sums by the model's own group made
        the host wait for the device: twice a step. ``comm/rehearsals`` counts how often "auto" tried schemes in a few
        steps.

        ``comm/seconds`` is the time of the lane's jobs and of all-reduces, ``comm/exposed_seconds`` the part of it for
        which the backward pass had to wait, which is all that can be measured of a model that is left to DDP. With
        compression, ``compress/encode_seconds``, ``compress/wire_seconds`` and ``compress/decode_seconds`` are parts of
        the former, and ``compress/bytes_sent`` is what the jobs of compressed parameters sent, including small
        parameters in the same jobs. ``compress/tensor_missing_rate`` is the fraction of tensors of which a sparsifier
        selected no element.

        With a plan or a fusion policy ``plan/groups`` is the number of groups that gradients travel in,
        ``plan/replans`` how often they were planned again, and ``plan/dropped`` whether the plan was dropped;
        ``plan/predicted_seconds`` and ``plan/measured_seconds`` are seconds of a step from the end of the model's
        forward until the last mean is known.

        On a GPU ``cuda/pinned_bytes`` is the lane's pinned host memory, and ``cuda/overflow_rounds`` counts copies of
        tensors that did not fit it.
        """
        rows = self._steps.decisions.rows
        self._plug.book()
        lanes = lane_stats(self._lanes)
        waits = sum(collective.exchange.host_waits for collective in self._sums.collectives)
        if self._methods.tables is not None:
            lanes["comm/bytes_sent"] += self._methods.tables.bytes_sent
            waits += self._methods.tables.host_waits
        return {
            **lanes,
            "comm/steps": float(self._steps.count),
            "comm/optimizer_steps": float(self._passes.optimizer_steps),
            "comm/host_waits": float(waits),
            "comm/bytes_dense": float(sum(one.total_dense_bytes for one in list(self._gradients.records.values()))),
            "comm/exposed_seconds": self._steps.exposed_seconds,
            "comm/rehearsals": 0.0 if rows is None else float(rows.trial.tests),
            **self._staging.stats(),
            **(self._compressed.stats() if self._compressed is not None else {}),
            **(self._execution.stats() if self._execution is not None else {}),
            **(self._lossless.stats() if self._lossless is not None else {}),
        }

    def table(self) -> list[dict[str, str | int | float]]:
        """Return one row per parameter or all-reduced group: density, scheme, formats, bytes.

        ``bytes`` were sent by this rank in the last step; ``predicted_bytes`` is the cost with perfectly even
        ownership, so the difference is imbalance. ``fused`` is the number of parameters that were synchronized
        together with this one, itself included; they share the bytes by their rows. ``reason`` explains the last choice
        of "auto": the bytes and seconds that it expected, and the next best. (The same line is logged, at level INFO of
        the logger "thinwire", whenever the choice changes.)

        For a compressed parameter ``scheme`` is its exchange, ``formats`` its compressor, and ``density`` the fraction
        of its elements that this rank sent. Where parameters are summed exactly in different ways, each has a row with
        its ``scheme``; their bytes are in the rows of all together.
        """
        self._plug.book()
        exact, records = self._methods.exact, dict(self._gradients.records)
        if len(set(exact.values())) > 1:
            records |= {
                name: ParameterRecord(name, "all-reduce", how, "dense", reason=f"bytes: see {OTHERS!r}")
                for name, how in exact.items()
                if not (name in records or name in self._tables)
            }
        choice, is_local = self._steps.decisions.choice, len(set(self._lane.exchange.hosts)) == 1
        watched = choice.trial.explain() if choice is not None and choice.trial.is_watching else ""
        if OTHERS in records and self._methods.has(AUTO) and (is_local or watched):
            records[OTHERS].reason = "all ranks are on one host" if is_local else watched
        return [record.row() for record in records.values()]

    @property
    def methods(self) -> dict[str, str | Exchanged]:
        """The method of each dense gradient by name, which ``dense=`` of `attach` takes again.

        An embedding table has one for the steps in which its gradient goes with the others.
        """
        return dict(self._methods.each)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients of backward passes inside locally, until the next pass outside sends their sum.

        Example:
            >>> with sync.no_sync():                 # doctest: +SKIP
            ...     loss(model(first)).backward()
            >>> loss(model(second)).backward()       # doctest: +SKIP
        """
        self._passes.is_local = True
        return self._plug.no_sync()

    @contextmanager
    def one_sync(self) -> Iterator[None]:
        """Add gradients of backward passes inside up locally, and send their sum once, at the end.

        Stock DDP sends after each backward, so this is for loops in which the last one is not known beforehand. Numbers
        of passes may differ between ranks. An exception leaves the gradients of this rank as they are, unsent. Backward
        passes inside of another one, as of GradCache, are sent once without it.

        Raises:
            ValueError: an FSDP model, or a DDP model that is a static graph or joins ranks without data.

        Example:
            >>> with sync.one_sync():                # doctest: +SKIP
            ...     for part in parts:
            ...         loss(model(part)).backward()
            >>> optimizer.step()                     # doctest: +SKIP
        """
        if not self._plug.can_hold and not isinstance(self._plug, Alone):
            raise ValueError(
                "FSDP sums the gradients of each pass itself: call model.set_requires_gradient_sync(False) before all"
                " backward passes of a step but the last"
                if self._sharding is not None
                else "DDP with static_graph=True, and under model.join(), counts its backward passes: call"
                " model.no_sync() around all of a step but the last"
            )
        with self.no_sync():
            yield
        if self._plug.can_hold:
            self._passes.send()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that decisions depend on after a restart, and the memories of compressors.

        Plain Python values and tensors, which ``torch.load(..., weights_only=True)`` reads. With compression each rank
        has a state of its own: save all of them, each in a file of its own, or all in one by `gathered`. The tensors
        are the memories themselves, as in other state dicts of torch: copy a state (``copy.deepcopy``) that is to be
        kept in memory.
        """
        steps, names = self._steps.count, self._all_names
        state = states.saved(steps, names, self._gradients, self._compressed, self._execution, self._choice)
        rows = self._steps.decisions.rows
        state["rows"] = None if rows is None else rows.state_dict()
        routes = [collective.state_dict() for collective in self._sums.collectives]  # each of other tables
        keys = routes[0] if routes else ()
        state["routes"] = {key: dict(ChainMap(*(one[key] for one in routes))) for key in keys} or None
        hooks = self._plug if isinstance(self._plug, ParameterHooks) else None
        state["order"], state["kinds"] = (None, None) if hooks is None else (hooks.names, hooks.kinds)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank.

        Training goes on with bitwise the same steps, as far as docs/guides/lossless.md says.

        Without compression another world size is fine; with it see `thinwire.compress.redistribute`.

        Raises:
            ValueError: a state of another version, of a model with other parameters, of another compressor or
                exchange, rank or world size; nothing is changed.
        """
        whole = {**state, "parameters": {*state.get("parameters", ()), *self._of_rows}}  # which earlier states lack
        states.check(whole, self._all_names, self._compressed, self._execution)
        states.restore(state, self._gradients, self._compressed, self._execution, self._choice)
        if state.get("routes") is not None:
            for collective in self._sums.collectives:
                collective.load_state_dict(state["routes"])
        rows = self._steps.decisions.rows
        if rows is not None and state.get("rows") is not None:
            rows.load_state_dict(state["rows"])
        if isinstance(self._plug, ParameterHooks) and state.get("order") is not None:
            self._plug.expect_order(state["order"], state.get("kinds"))
        if not getattr(self._model, "static_graph", False):  # whose first backward cannot let tables wait
            self._buckets.expect(state["unions"])
        self._steps.count = int(state["steps"])

    def gathered(self) -> Gathered:
        """Return `state_dict` and `load_state_dict` of all ranks at once, for frameworks where rank 0 writes one file.

        Its ``state_dict()`` is called on all ranks, and returns the states of all of them on rank 0; its
        ``load_state_dict()`` takes this rank's state out of what rank 0 wrote.

        Example:
            >>> accelerator.register_for_checkpointing(sync.gathered())              # doctest: +SKIP
        """
        return Gathered(self._lane, self.state_dict, self.load_state_dict)

    def trace(self, steps: int | None = None) -> Trace:
        """Record the timing of the next steps: backward of each gradient, and each job with its phases.

        Under DDP only the backward of each bucket can be seen. On a GPU backward is seen as it is launched.

        Args:
            steps: number of steps to record; None to record until `Trace.stop`, or the end of a ``with`` block.

        Raises:
            ValueError: another trace is being recorded.

        Example:
            >>> with sync.trace() as trace:         # doctest: +SKIP
            ...     train(steps=3)
            >>> trace.save("step.json")             # doctest: +SKIP
        """
        return self._steps.start_trace(steps)

    def watch_lane(self, watcher: Callable[[float, float], None] | None) -> None:
        """Call ``watcher`` with the start and end (`time.perf_counter`) of each job and each all-reduce.

        Those are the times when the network is busy. It is called on the thread of the lane as a job ends, and for
        all-reduces of buckets at the end of backward. None removes the watcher.
        """
        self._plug.observe("a watcher", watcher is not None)
        for lane in self._lanes:
            lane.watcher = watcher

    def detach(self) -> None:
        """Remove all hooks and release the lane, on all ranks; a DDP model is stock again. Safe to call twice.

        A hook that DDP was given stays, and does what DDP does, until the model is attached or built again; where DDP
        can give it up, it makes room for one that is registered.
        Between a forward and the end of its step, or of its accumulation, peers may wait for this rank: they raise.
        Inside of backward, which all ranks then do alike, what waits is still sent, and stock DDP does the rest.
        """
        if not self._passes.are_watched:
            return
        self._passes.send_held()
        for lane in self._lanes:
            if self._passes.is_midway and not self._passes.is_running and lane.world_size > 1:
                lane.break_off(f"detach() in the middle of a step of rank {lane.global_rank}")
        if isinstance(self._model, DistributedDataParallel) and any(lane.is_broken for lane in self._lanes):
            failed.add(self._model)
        self._release.detach()
        self._plug.remove()
        self._lookups.remove()
        self._running.pop(self._model, None)
        self._passes.remove()
        if self._methods.tables is not None:
            self._methods.tables.remove()
        try:
            for lane in self._lanes:
                lane.close()
        except BaseException:  # Ctrl-C while it waits for jobs
            for lane in self._lanes:
                lane.abandon()
            raise

    def _warn_of_no_gain(self) -> None:
        """Warn if everything stays with FSDP."""
        if self._sharding is None or self._sharding.replicas is not None or self._names or self._compressed is not None:
            return
        if not self._of_rows and self._lossless is None and self._lane.world_size > 1 and self._lane.rank == 0:
            logger.warning(
                "nothing of this model is sent by thinwire: FSDP's collectives stay as they are, and no embedding table"
                ' can travel as rows. Without loss init_process_group("thinwire") sends fewer bytes, and'
                ' dense="lossless" of gradients; with loss compressors such as dense=thinwire.compress.bf16()'
            )

    def _device_of(self, named: Mapping[str, nn.Parameter]) -> torch.device:
        """Return where gradients are."""
        if self._sharding is not None:
            return torch.device(self._sharding.units[0].group.device)
        return next((one.device for one in named.values() if one.requires_grad), torch.device("cpu"))

    def _make_lanes(self, group: dist.ProcessGroup, inner: dist.ProcessGroup, timeout: timedelta | None) -> None:
        """Make the lanes beside that of the group: of the ranks that sum, of other meshes, of shards and tables."""

        def within(ranks: dist.ProcessGroup) -> Lane:
            self._lanes.append(Lane(ranks, timeout, self._staging, self._lane.notes))
            return self._lanes[-1]

        others = [] if self._sharding is None else [one for one in self._sharding.others if one.replicas is None]
        if inner != group or (self._sharding is not None and self._names) or others:  # jobs of both come in any order
            self._inner = within(inner)
        self._meshes = {one: within(one.dimension()) for one in others}
        self._hung = self._lanes_of_shards(within)
        groups = () if self._methods.tables is None else self._methods.tables.replicated()
        self._replicas = {one: self._inner if one == inner else within(one) for one in groups}  # of tables in shards
        if self._inner is not self._lane:  # steps take the last one
            self._lanes.remove(self._inner)
            self._lanes.append(self._inner)

    def _lanes_of_shards(self, within: Callable[[dist.ProcessGroup], Lane]) -> dict[dist.ProcessGroup, Lane]:
        """Return a lane for each group of Gloo's over which FSDP gathers parameters, for its connections."""
        if self._sharding is None or self._device.type != "cpu":
            return {}
        lanes = ((self._sharding, self._inner), *self._meshes.items())
        known = {one.dimension(): lane for one, lane in lanes}
        shards = [one.shards for one in (self._sharding, *self._sharding.others) if one.shards is not None]
        return {group: known.get(group) or within(group) for group in dict.fromkeys(shards) if is_gloo(group)}

    def _make_native(self, group: dist.ProcessGroup) -> NativeAllReduce | None:
        """Return the all-reduce beside the lane, or None where jobs of the lane do it.

        They do where jobs have to be timed, and for gradients of a GPU that the group does not take.
        """
        is_own, on_host = is_native(group, self._device), self._device.type == "cpu"
        stays = not on_host or self._inner.world_size == 1
        if is_own or (self._is_left_to_ddp and (stays or keeps_buckets(self._model))):
            return NativeAllReduce(group, self._gradients, self._inner.lost_to, is_own)
        if not on_host or self._intent is not None:
            return None
        tables = sparse_tables_of(self._module) if self._sharding is None else ()  # FSDP's go through that group, too
        sparse = [name for weight in tables if (name := self._names.get(id(weight)))]
        native = self._inner.native_group(bool(sparse))
        return NativeAllReduce(native, self._gradients, self._inner.lost_to, sparse=sparse)

    def _make_collective(
        self, group: dist.ProcessGroup, lane: Lane, native: NativeAllReduce | None
    ) -> CollectiveTables | None:
        """Return the sums of tables by the model's own group, or None where jobs of the lane sum them."""
        if native is None or not native.is_own or lane.world_size == 1 or self._route == Route.STAGED:
            return None
        return CollectiveTables(group, self._gradients, lane)

    def _beside(self, group: dist.ProcessGroup, lane: Lane) -> Buckets:
        """Return a queue for gradients that FSDP does not reduce: by the group if it is of NCCL, else by the lane."""
        native = NativeAllReduce(group, self._gradients, lane.lost_to, True) if is_native(group, self._device) else None
        sums = Sums(self._gradients, native, self._make_collective(group, lane, native))
        self._sums.beside.append((sums, lane))
        return Buckets(sums, self._lookups, self._names, lane, self._staging)

    @property
    def _is_left_to_ddp(self) -> bool:
        """Whether stock DDP does everything, without a hook of ours, as long as there is nothing to gain over it.

        It does not where its sums of sparse gradients would go through a group that it keeps, which runs two at a time.
        """
        if not isinstance(self._model, DistributedDataParallel) or not self._is_left:
            return False
        return not (keeps_buckets(self._model) and sparse_tables_of(self._module))

    @property
    def _is_left(self) -> bool:
        """Whether gradients are summed as stock DDP sums them until a trial shows that something else is faster."""
        is_exact = self._compressed is None and self._intent is None and not self._methods.has(LOSSLESS)
        if self._sharding is not None or not is_exact:
            return False
        return self._plays_stock or not table_names(self._module, self._names)

    @property
    def _plays_stock(self) -> bool:
        """Whether stock sums tables until a trial shows that something else is faster.

        It does not where its bits would depend on a clock, where its waiting cannot be seen, as on a GPU, where torch
        has no sum of sparse values of sixteen bits, and where the environment says how tables travel.
        """
        is_free = self._gradients.scheme == AUTO and not self._gradients.in_rank_order and self._route == AUTO
        can_sum = all(weight.dtype.itemsize >= 4 for weight in sparse_tables_of(self._module))
        is_host = self._staging.is_host and self._lane.world_size > 1
        return is_free and can_sum and is_host

    def _make_plug(self, sums: Sums, guard: Guard) -> Plug:
        if is_ddp := isinstance(self._model, DistributedDataParallel):
            prepare(self._model, self._lane)
        planned = () if self._intent is None else self._intent.names
        dense = {*planned, *(() if self._compressed is None else self._compressed.plans)}
        rows = {key for key, name in self._names.items() if name not in dense}
        others = {id(parameter) for parameter in self._module.parameters()} - rows
        is_alone = self._lane.world_size == 1 and self._compressed is None and self._intent is None
        watched = nn.Module() if is_alone else self._module
        self._lookups = LookupRows(watched, others, is_called=not is_ddp, waits=self._is_left)
        self._buckets = buckets = Buckets(sums, self._lookups, self._names, self._inner, self._staging, self._clock)
        if is_alone:
            return Alone(self._model)
        begin = weak(self._passes.begin)
        try:
            if isinstance(self._model, DistributedDataParallel):
                if not self._is_left_to_ddp:
                    plug = DdpPlug(self._model, buckets, begin)
                    plug.plays_stock = self._is_left and self._plays_stock
                    return plug
                assert self._native is not None
                hooked = partial(DdpPlug, buckets=buckets, begin=begin)
                return LeftToDdp(self._model, self._native, self._lane, weak(self._passes.begin), hooked)
            trained = trained_parameters(self._module, self._lookups, self._names)
            names = None if self._intent is None else self._intent.groups
            groups = None if names is None else indices_of(trained, names)
            is_nested = weak(self._passes.is_nested)
            if self._sharding is not None:
                ignored = self._beside(self._sharding.group(), self._lane)
                rest = trained, ignored, self._lookups, self._lane, begin, self._clock, None, is_nested
                count = (lambda num_bytes: None) if self._native is None else self._native.count_moved
                tables = []
                for one, lane in self._replicas.items():
                    assert self._methods.tables is not None, "replicas are of tables"
                    of_group = [Trained(*pair, is_table=True) for pair in self._methods.tables.replicated()[one]]
                    tables.append((of_group, buckets if lane is self._inner else self._beside(one, lane), lane))
                how = count, weak(self._passes.reduces), tables, self._hung, guard.broke_off
                return ShardedHooks(self._sharding, self._queues(buckets), *how, *rest)
            hooks = ParameterHooks(trained, buckets, self._lookups, self._lane, begin, self._clock, groups, is_nested)
            hooks.plays_stock = self._is_left and self._plays_stock
            return hooks
        except Exception:
            self._lookups.remove()
            raise

    def _queues(self, buckets: Buckets) -> dict[Sharding, Buckets]:
        """Return the queues of shards: of the largest mesh, and of others whose ranks gain by one."""
        assert self._sharding is not None
        queues = {self._sharding: buckets}
        sums = Sums(self._gradients, lossless=self._lossless)
        for one, lane in self._meshes.items():
            if self._lossless is not None and not (self._lossless.scatters and len(set(lane.exchange.hosts)) == 1):
                queues[one] = Buckets(sums, self._lookups, self._names, lane, self._staging, self._clock)
        return queues

    def _make_compressed(self, scaler: GradScaler | None) -> CompressedSync:
        size, stock = self._inner.world_size, None
        if self._sharding is not None and self._sharding.replicas is None:
            device = torch.device(self._sharding.mesh.device_type)
            stock = partial(reduce_scatter_bytes, world_size=size, device=device)
        counts = Statistics(self._gradients.records, size, stock)
        return CompressedSync(self._methods.compressed, self._inner, counts, scaler, staging=self._staging)

    def _make_lossless(self) -> LosslessSync | None:
        """Return the coded sums of dense gradients, or None where there are none."""
        lossless = LosslessSync(self._gradients.records, exact=self._methods.exact, working=self._staging.working)
        is_coded = lossless.is_asked_for and self._inner.world_size > 1
        lossless.scatters = lossless.alike == AUTO and self._scatters()
        return lossless if is_coded or lossless.scatters or self._may_code() else None

    def _scatters(self) -> bool:
        """Return whether "auto" sends gradients straight to owners for FSDP: Gloo would send twice the bytes."""
        if self._sharding is None or self._sharding.replicas is not None or self._gradients.in_rank_order:
            return False
        has_hosts = len(set(self._inner.exchange.hosts)) > 1 and self._sharding.mesh.device_type == "cpu"
        return has_hosts and is_gloo(self._sharding.dimension())

    def _may_code(self) -> bool:
        """Return whether "auto" may code a gradient. It times no steps of FSDP both ways."""
        has_hosts = len(set(self._lane.exchange.hosts)) > 1 and self._sharding is None
        if not self._methods.has(AUTO) or not has_hosts:
            return False
        if self._gradients.in_rank_order and self._lane.rank == 0:
            logger.info('dense="auto" is "native" under deterministic algorithms; "lossless" repeats its bits, too')
        return not self._gradients.in_rank_order

    def _make_rows(self) -> Callable[[Sequence[str]], RowsChoice] | None:
        """Return what makes the trial of the schemes of tables of given names, or None where nothing is tried."""
        is_timed = self._gradients.scheme == AUTO and not self._gradients.in_rank_order and self._intent is None
        if not is_timed or self._lane.world_size == 1 or self._sums.collectives:
            return None
        warm_up = partial(self._lane.submit, partial(_warm_up, self._staging))
        return partial(RowsChoice, self._lane, self._gradients, self._plug, self._lookups, warm_up=warm_up)

    def _make_choice(self, named: Mapping[str, nn.Parameter]) -> DenseChoice | None:
        """Return what decides about coded sums, or None where "auto" has nothing to decide."""
        lossless = self._lossless
        if lossless is None or not self._may_code():
            return None
        num_bytes = Counter[torch.dtype]()
        for name, parameter in named.items():
            if parameter.requires_grad and lossless.how(name) == AUTO:
                num_bytes[as_real(torch.empty(0, dtype=parameter.dtype)).dtype] += parameter.nbytes
        plug, lane = self._plug, self._lane  # and not this object, which holds the model

        def turn(dtypes: Sequence[torch.dtype], stands: bool) -> None:
            assert lossless is not None
            lossless.turn(dtypes)
            lane.codes_values = bool(dtypes) or lossless.is_asked_for
            plug.see(CODES, bool(dtypes), stands)

        links: Callable[[], Sequence[Machine]] = tuple
        if self._native is not None and self._native.is_own:
            links = partial(measured, self._native.process_group, lane, self._device)
        own_links = None if self._staging.is_host else links
        return DenseChoice(lane, lossless, num_bytes, turn, own_links, lambda: plug.is_free)

    def _agree_on_configuration(self, excluded: frozenset[str], lane: Lane) -> Tensor:
        compressed = self._compressed if lane is self._inner else None  # shards of other ranks differ
        text = configuration(self._gradients.scheme, self._model, excluded, compressed, self._intent)
        text += f"\nTHINWIRE_ROUTE={self._route}\n{self._methods.describe()}"
        text += f"\ntorch.use_deterministic_algorithms({self._gradients.in_rank_order})"
        text += "" if self._sharding is None else f"\n{self._sharding.describe()}"
        with lane.setting_up():
            lane.channel(Subject("attach", text)).open()
        return torch.empty(0)


def _warm_up(staging: Staging, lane: Lane) -> None:
    with staging.selected():  # threads begin on device 0, and kernels are compiled for the current one
        kernels.warm_up(wait=False)


def _adopt_tables(
    buckets: Buckets,
    plug: Plug,
    names: Mapping[int, str],
    begin: Callable[[Sequence[str]], RowsChoice] | None,
    rows: RowsChoice | None,
) -> RowsChoice | None:
    """Adopt the tables that the first step has shown; return the choice of their schemes, given that of the others."""
    tables = buckets.adopt()
    plug.adopt(tables)
    found = [names[id(table)] for table in tables]
    if rows is not None:
        rows.adopt(found)
    elif found and begin is not None:
        return begin(found)
    elif found:
        plug.see(ROWS, True, True)
    return rows


def _release(hooks: Sequence[Passes | LookupRows], lanes: Sequence[Lane]) -> None:
    """Detach a model that is gone: like `Synchronizer.detach`, but without waiting, and not on all ranks at once."""
    for hook in hooks:
        hook.remove()
    for lane in lanes:
        lane.abandon()
