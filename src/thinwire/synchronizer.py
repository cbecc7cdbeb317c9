"""`Synchronizer`: the statistics, the state, and the end of a synchronization."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import kernels
from thinwire.comm.channel import Subject
from thinwire.comm.lane import Lane, lane_stats
from thinwire.comm.process_group import Staging
from thinwire.cuda.staging import staging_for
from thinwire.follow import state as states
from thinwire.follow.dense import DenseChoice
from thinwire.follow.describe import configuration
from thinwire.follow.execution import Execution
from thinwire.follow.grouping import Following, Intent
from thinwire.follow.state import Gathered
from thinwire.follow.steps import Steps, Trace
from thinwire.gradients.buckets import OTHERS, Buckets, as_real
from thinwire.gradients.collective import CollectiveTables
from thinwire.gradients.compressed import CompressedSync
from thinwire.gradients.compression import Compression, Planned, PlannedCompression
from thinwire.gradients.ddp import Alone, DdpPlug, LeftToDdp, Plug
from thinwire.gradients.exact import GradientSync, NativeAllReduce, is_native, route_asked_for
from thinwire.gradients.fsdp import ShardedHooks, sharding_of
from thinwire.gradients.fused import FusedSync
from thinwire.gradients.lossless import AUTO, LEAST_BYTES, LOSSLESS, NATIVE, GradientSampler, LosslessSync
from thinwire.gradients.model import module_of, synchronized_buffers, synchronized_parameters
from thinwire.gradients.parameters import ParameterHooks, broadcast_all, places_of, trained_parameters
from thinwire.gradients.passes import Guard, Passes
from thinwire.gradients.tables import LookupRows, has_tables, weakly
from thinwire.observe.step import Clock, ParameterRecord
from thinwire.sparse import SUPPORTED_DTYPES
from thinwire.sync.choose import Route
from thinwire.sync.named import DENSE, name_of
from thinwire.sync.scheme import Scheme
from thinwire.sync.two_level import TwoLevel

_attached: WeakSet[nn.Module] = WeakSet()


class Synchronizer:
    """A running synchronization, which `attach` returns: its statistics, its state, and its end.

    It keeps its model alive, and the model does not need it: hooks hold its parts. When neither is referenced,
    the model is freed, and its lane with it, as if `detach` had been called.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        scheme: str | Scheme | TwoLevel,
        timeout: timedelta | None,
        plans: Mapping[str, Planned] | None = None,
        compression: Compression | PlannedCompression | None = None,
        intent: Intent | None = None,
        dense: str = NATIVE,
    ) -> None:
        self._model = model
        self._module = module_of(model)
        self._names = {id(parameter): name for name, parameter in synchronized_parameters(model)}
        self._gradients = GradientSync(scheme)
        self._clock = Clock()
        self._route = route_asked_for()
        self._intent = intent
        self._dense = dense
        trained = (parameter.device for _, parameter in synchronized_parameters(model) if parameter.requires_grad)
        device = next(trained, torch.device("cpu"))
        self._staging = staging_for(device)
        self._sharding = sharding_of(model)
        inner = group if self._sharding is None else self._sharding.dimension()
        self._all_names = [*self._names.values(), *([] if self._sharding is None else self._sharding.names())]
        self._lane = self._inner = Lane(group, timeout, self._staging)
        if inner != group or (self._sharding is not None and self._names):  # jobs of both come in any order
            self._inner = Lane(inner, timeout, self._staging)
        self._lanes = list(dict.fromkeys((self._lane, self._inner)))
        self._steps = Steps(model, len(self._all_names), self._lanes, self._gradients, self._clock)
        self._passes = Passes(model, self._clock, self._steps.finish)
        self._compressed: CompressedSync | None = None
        self._execution: Execution | None = None
        try:
            if plans is not None and compression is not None:
                kind = CompressedSync if compression.ahead else FusedSync
                self._compressed = kind(plans, compression, self._inner, self._gradients.records)
            for lane in self._lanes:
                lane.submit(self._agree_on_configuration).wait()
            if self._sharding is not None and self._sharding.replicas is not None:
                gather = partial(_gather_numbers, self._sharding.checksum())  # on the stream that wrote the shards
                self._sharding.compare(self._lane.submit(gather).wait())
            if not isinstance(model, DistributedDataParallel):
                buffers = () if self._sharding is not None else synchronized_buffers(model)
                broadcast_all((tensor for _, tensor in (*synchronized_parameters(model), *buffers)), group)
            for lane in self._lanes:
                lane.codes_values = dense == LOSSLESS
            self._lossless = self._make_lossless(device)
            self._native = self._make_native(group, device)
            self._collective = self._make_collective(group)
            self._plug = self._make_plug()
            guard = Guard(self._lanes, not self._is_left_to_ddp)
            self._choice = self._make_choice(guard)
            if intent is not None:
                hooks = self._plug if isinstance(self._plug, ParameterHooks) else None
                following = Following(intent.names, intent.groups, hooks, self._compressed)
                ahead = compression is None or compression.ahead
                self._execution = Execution(intent, self._lane, following, self._buckets.take_formed, ahead)
        except Exception:
            for lane in self._lanes:
                lane.close()
            raise
        if not (self._is_left_to_ddp or isinstance(self._plug, Alone)):
            self._lane.submit(partial(_warm_up, self._staging))  # while the first forward runs
        self._steps.plug, self._steps.compressed, self._steps.execution = self._plug, self._compressed, self._execution
        self._steps.native, self._steps.collective = self._native, self._collective
        self._steps.lossless, self._steps.choice = self._lossless, self._choice
        if self._lookups.candidates and self._sharding is None:
            self._steps.after_first = partial(_adopt_tables, self._buckets, self._plug)
        self._passes.watch(self._plug, guard)
        _attached.add(model)
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

        ``comm/bytes_sent`` is the traffic of gradients; ``comm/setup_bytes`` is all other traffic: to discover hosts,
        measure the link and agree, 2 MB at most. ``comm/bytes_dense`` is what stock DDP would have sent: an all-reduce
        of dense gradients, and for ``sparse=True`` tables torch's own sparse all-reduce, which gathers the rows of all
        ranks on each. ``comm/host_waits`` counts how often sums by the model's own group made the host wait for the
        device: twice a step. ``comm/rehearsals`` counts how often "auto" tried schemes in a few steps.

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
        return {
            **lane_stats(self._lanes),
            "comm/steps": float(self._steps.count),
            "comm/host_waits": 0.0 if self._collective is None else float(self._collective.host_waits),
            "comm/bytes_dense": float(sum(record.total_dense_bytes for record in self._records())),
            "comm/exposed_seconds": self._steps.exposed_seconds,
            "comm/rehearsals": float(self._gradients.rehearsals),
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
        of its elements that this rank sent.
        """
        return [record.row() for record in self._records()]

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients of backward passes inside locally, until the next pass outside sends their sum.

        Example:
            >>> with sync.no_sync():                 # doctest: +SKIP
            ...     loss(model(first)).backward()
            >>> loss(model(second)).backward()       # doctest: +SKIP
        """
        self._passes.is_local = True
        return self._plug.no_sync()

    def synchronize(self) -> None:
        """Do nothing: after a backward all ranks have the same gradients. With ``outer=`` it ends all rounds."""

    def global_parameters(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: ranks have the same parameters. With ``outer=`` they are the anchors."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that decisions depend on after a restart, and the memories of compressors.

        Plain Python values and tensors, which ``torch.load(..., weights_only=True)`` reads. With compression each rank
        has a state of its own: save all of them, each in a file of its own, or all in one by `gathered`. The tensors
        are the memories themselves, as in other state dicts of torch: copy a state (``copy.deepcopy``) that is to be
        kept in memory.
        """
        steps, names = self._steps.count, self._all_names
        return states.saved(steps, names, self._gradients, self._compressed, self._execution, self._choice)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank. Training goes on with bitwise the same steps.

        Without compression another world size is fine; with it see `thinwire.compress.redistribute`.

        Raises:
            ValueError: a state of another version, of a model with other parameters, of another compressor or
                exchange, rank or world size; nothing is changed.
        """
        states.check(state, self._all_names, self._compressed, self._execution)
        states.restore(state, self._gradients, self._compressed, self._execution, self._choice)
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
        self._observe()
        return self._steps.start_trace(steps)

    def watch_lane(self, watcher: Callable[[float, float], None] | None) -> None:
        """Call ``watcher`` with the start and end (`time.perf_counter`) of each job and each all-reduce.

        Those are the times when the network is busy. It is called on the thread of the lane as a job ends, and for
        all-reduces of buckets at the end of backward. None removes the watcher.
        """
        self._observe()
        for lane in self._lanes:
            lane.watcher = watcher

    def _observe(self) -> None:
        """Let traces and watchers see each bucket from now on."""
        if isinstance(self._plug, LeftToDdp):
            self._plug.observe()

    def detach(self) -> None:
        """Remove all hooks and release the lane, on all ranks; a DDP model is stock again. Safe to call twice."""
        if not self._passes.are_watched:
            return
        self._release.detach()
        self._plug.remove()
        self._lookups.remove()
        self._passes.remove()
        for lane in self._lanes:
            lane.close()
        _attached.discard(self._model)

    def _records(self) -> list[ParameterRecord]:
        return list(self._gradients.records.values())

    def _make_native(self, group: dist.ProcessGroup, device: torch.device) -> NativeAllReduce | None:
        """Return the all-reduce beside the lane, or None where jobs of the lane do it.

        They do where jobs have to be timed, for gradients of a GPU that the group does not take, and on the CPU for
        plain modules: their ranks may freeze or use different parameters, which only the lane's headers reveal.
        """
        group = group if self._sharding is None else self._sharding.dimension()
        if is_native(group, device):
            return NativeAllReduce(group, self._gradients, OTHERS, "NCCL", is_own=True)
        if self._is_left_to_ddp:
            return NativeAllReduce(group, self._gradients, OTHERS, name_of(DENSE))
        is_alike = isinstance(self._model, DistributedDataParallel) or self._sharding is not None
        if device.type != "cpu" or self._intent is not None or not is_alike:
            return None
        return NativeAllReduce(self._inner.native_group(), self._gradients, OTHERS, name_of(DENSE))

    def _make_collective(self, group: dist.ProcessGroup) -> CollectiveTables | None:
        """Return the sums of tables by the model's own group, or None where jobs of the lane sum them."""
        is_own = self._native is not None and self._native.is_own and self._sharding is None
        if not is_own or self._lane.world_size == 1 or self._route == Route.STAGED:
            return None
        return CollectiveTables(group, self._gradients, self._lane)

    @property
    def _is_left_to_ddp(self) -> bool:
        """Whether there is nothing to gain over stock DDP."""
        is_exact = self._compressed is None and self._intent is None and self._dense != LOSSLESS
        return (
            isinstance(self._model, DistributedDataParallel) and is_exact and not has_tables(self._module, self._names)
        )

    def _make_plug(self) -> Plug:
        is_ddp = isinstance(self._model, DistributedDataParallel)
        planned = () if self._intent is None else self._intent.names
        dense = {*planned, *(() if self._compressed is None else self._compressed.plans)}
        rows = {key for key, name in self._names.items() if name not in dense}
        others = {id(parameter) for parameter in self._module.parameters()} - rows
        is_alone = self._lane.world_size == 1 and self._compressed is None and self._intent is None
        watched = nn.Module() if is_alone else self._module
        self._lookups = LookupRows(watched, others, is_called=not is_ddp)
        self._buckets = buckets = Buckets(
            self._gradients,
            self._lookups,
            self._names,
            self._inner,
            self._staging,
            self._native,
            self._compressed,
            self._clock,
            self._collective,
            self._lossless,
        )
        if is_alone:
            return Alone(self._model)
        begin, expect = weakly(self._passes.begin), self._steps.in_flight.append
        try:
            if isinstance(self._model, DistributedDataParallel):
                if not self._is_left_to_ddp:
                    return DdpPlug(self._model, buckets, begin, expect)
                assert self._native is not None
                hooked = partial(DdpPlug, buckets=buckets, begin=begin, expect=expect)
                return LeftToDdp(self._model, self._native, self._lane, begin, hooked)
            trained = trained_parameters(self._module, self._lookups, self._names)
            names = None if self._intent is None else self._intent.groups
            groups = None if names is None else places_of(trained, names)
            is_nested = weakly(self._passes.is_nested)
            if self._sharding is not None:
                ignored = Buckets(self._gradients, self._lookups, self._names, self._lane, self._staging)
                rest = trained, ignored, self._lookups, self._lane, begin, expect, self._clock, None, is_nested
                count = (lambda num_bytes: None) if self._native is None else self._native.count
                return ShardedHooks(self._sharding, buckets, count, *rest)
            return ParameterHooks(
                trained, buckets, self._lookups, self._lane, begin, expect, self._clock, groups, is_nested
            )
        except Exception:
            self._lookups.remove()
            raise

    def _make_lossless(self, device: torch.device) -> LosslessSync | None:
        """Return the lossless way of dense gradients, or None where it is not asked for or cannot pay.

        "auto" does not time steps of FSDP both ways, nor those of a GPU.
        """
        if self._dense == LOSSLESS and self._inner.world_size > 1:
            return LosslessSync(self._gradients.records, frozenset(SUPPORTED_DTYPES))
        has_hosts = len(set(self._lane.exchange.hosts)) > 1 and device.type == "cpu" and self._sharding is None
        if self._dense != AUTO or not has_hosts:
            return None
        return LosslessSync(self._gradients.records, least_bytes=LEAST_BYTES)

    def _make_choice(self, guard: Guard) -> DenseChoice | None:
        """Return what decides about the lossless way, or None where that is asked for or cannot pay."""
        lossless = self._lossless
        if lossless is None or self._dense == LOSSLESS:
            return None
        num_bytes: dict[torch.dtype, int] = {}
        for _, parameter in synchronized_parameters(self._model):
            if parameter.requires_grad:
                dtype = as_real(torch.empty(0, dtype=parameter.dtype)).dtype
                num_bytes[dtype] = num_bytes.get(dtype, 0) + parameter.nbytes
        plug, buckets, lane = self._plug, self._buckets, self._lane  # and not this object, which holds the model

        def sample(sampler: GradientSampler | None) -> None:
            if isinstance(plug, LeftToDdp):
                plug.sample(sampler)
            else:
                buckets.sampler = sampler

        def turn(dtypes: Sequence[torch.dtype]) -> None:
            assert lossless is not None
            lossless.turn(dtypes)
            lane.codes_values = bool(dtypes)
            if dtypes and isinstance(plug, LeftToDdp):
                plug.observe()
                guard.waits_from_output = True

        return DenseChoice(lane, lossless, num_bytes, sample, turn)

    def _agree_on_configuration(self, lane: Lane) -> Tensor:
        compressed = self._compressed if lane is self._inner else None  # shards of other ranks differ
        text = configuration(self._gradients.scheme, self._model, compressed, self._intent)
        text += f"\nTHINWIRE_ROUTE={self._route}\ndense={self._dense}"
        text += "" if self._sharding is None else f"\n{self._sharding.describe()}"
        with lane.setting_up():
            lane.channel(Subject("attach", text)).open()
        return torch.empty(0)


def _gather_numbers(checksum: Sequence[float], lane: Lane) -> list[list[float]]:
    with lane.setting_up():
        return lane.channel(Subject("attach", "checksums of shards")).gather_numbers(checksum)


def _warm_up(staging: Staging, lane: Lane) -> None:
    with staging.selected():  # threads begin on device 0, and kernels are compiled for the current one
        kernels.warm_up(wait=False)


def _adopt_tables(buckets: Buckets, plug: Plug) -> None:
    tables = buckets.adopt()
    if isinstance(plug, ParameterHooks):
        plug.adopt(tables)
    elif tables and isinstance(plug, LeftToDdp):
        plug.observe()


def _release(hooks: Sequence[Passes | LookupRows], lanes: Sequence[Lane]) -> None:
    """Detach a model that is gone: like `Synchronizer.detach`, but without waiting, and not on all ranks at once."""
    for hook in hooks:
        hook.remove()
    for lane in lanes:
        lane.abandon()


def is_attached(model: nn.Module) -> bool:
    """Return whether a `Synchronizer` of this model is not detached yet."""
    return model in _attached
