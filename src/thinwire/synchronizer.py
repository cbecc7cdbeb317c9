"""What `thinwire.attach` returns: the account, the state, and the end of a synchronization."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire import kernels
from thinwire.cuda.staging import staging_for
from thinwire.hooks.buckets import OTHERS, Buckets
from thinwire.hooks.compressed import KIND, CompressedSync
from thinwire.hooks.compression import Compression, Planned
from thinwire.hooks.embedding import LookupRows
from thinwire.hooks.gradients import GradientSync
from thinwire.hooks.native import NativeAllReduce, is_native
from thinwire.hooks.parameters import ParameterHooks, broadcast_module, trained_parameters
from thinwire.hooks.plug import DdpPlug, Plug
from thinwire.lane import Lane, resolve_group
from thinwire.observe.ledger import ParameterRecord
from thinwire.sync.channel import Subject
from thinwire.sync.scheme import Scheme
from thinwire.sync.two_level import TwoLevel

logger = logging.getLogger("thinwire")
_STATE_VERSION = 2
_attached: WeakSet[nn.Module] = WeakSet()


class Synchronizer:
    """What `attach` returns: the account, the state, and the end of a synchronization."""

    def __init__(
        self,
        model: nn.Module,
        scheme: str | Scheme | TwoLevel,
        timeout: timedelta | None,
        plans: Mapping[str, Planned] | None = None,
        compression: Compression | None = None,
    ) -> None:
        self._model = model
        self._module = module_of(model)
        self._names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        self._gradients = GradientSync(scheme)
        self._in_flight: list[Future[Tensor]] = []
        self._began = False
        self._exposed_seconds = 0.0
        self._steps = 0
        self._forwards = 0
        self._forward_hook: RemovableHandle | None = None
        trained = (parameter.device for parameter in model.parameters() if parameter.requires_grad)
        device = next(trained, torch.device("cpu"))
        group = resolve_group(model.process_group if isinstance(model, DistributedDataParallel) else None)
        self._staging = staging_for(device)
        self._native = NativeAllReduce(group, self._gradients, OTHERS) if is_native(group, device) else None
        self._lane = Lane(group, timeout, self._staging)
        self._compressed: CompressedSync | None = None
        try:
            if plans is not None and compression is not None:
                self._compressed = CompressedSync(plans, compression, self._lane, self._gradients.records)
            self._lane.submit(self._agree_on_configuration).wait()
            if not isinstance(model, DistributedDataParallel):
                broadcast_module(model, group)
            self._plug = self._make_plug()
        except Exception:
            self._lane.close()
            raise
        self._lane.submit(lambda lane: kernels.warm_up())  # while the first forward runs
        self._forward_hook = model.register_forward_pre_hook(self._before_forward)
        _attached.add(model)

    def stats(self) -> dict[str, float]:
        """Totals of this rank since `attach`: bytes, seconds, steps. Slash names, for any metrics logger.

        ``comm/seconds`` is the time that the lane worked, ``comm/exposed_seconds`` the part of it for which the
        backward pass had to wait, ``comm/bytes_dense`` what all-reducing everything would have sent. With compression,
        ``compress/encode_seconds``, ``compress/wire_seconds`` and ``compress/decode_seconds`` are parts of the former,
        and ``compress/bytes_sent`` is what the jobs of compressed parameters sent, small ones that travel with them
        included. On a GPU ``cuda/pinned_bytes`` is host memory that the lane has, and ``cuda/overflow_rounds`` counts
        copies of what did not fit it.
        """
        traffic = self._lane.exchange.traffic
        return {
            "comm/steps": float(self._steps),
            "comm/bytes_sent": float(traffic.sent_bytes),
            "comm/bytes_received": float(traffic.received_bytes),
            "comm/bytes_sent_between_hosts": float(traffic.sent_between_hosts_bytes),
            "comm/bytes_dense": float(sum(record.total_dense_bytes for record in self._records())),
            "comm/seconds": self._lane.busy_seconds,
            "comm/exposed_seconds": self._exposed_seconds,
            **self._staging.stats(),
            **(self._compressed.stats() if self._compressed is not None else {}),
        }

    def table(self) -> list[dict[str, str | int | float]]:
        """One row per parameter, those that are all-reduced together in one: density, scheme, formats, bytes.

        ``bytes`` were sent by this rank in the last step; ``predicted_bytes`` is what perfectly even ownership
        would have taken, so the difference is imbalance. ``fused`` is the number of parameters that were synchronized
        together with this one, itself included; they share the bytes by their rows. ``reason`` says why "auto" took
        what it took last: bytes and seconds that it expected, and the next best. (The same line is logged, at level
        INFO of the logger "thinwire", whenever the choice changes.)

        Of a compressed parameter ``scheme`` is its exchange, ``formats`` its compressor, and ``density`` the part of
        its elements that this rank sent.
        """
        return [record.row() for record in self._records()]

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate: gradients of backward passes in it stay here, until the next pass outside sends their sum.

        Example:
            >>> with sync.no_sync():                 # doctest: +SKIP
            ...     loss(model(first)).backward()
            >>> loss(model(second)).backward()       # doctest: +SKIP
        """
        return self._plug.no_sync()

    def state_dict(self) -> dict[str, Any]:
        """What has to survive a restart for the same decisions to be taken, and the memories of compressors.

        Plain Python values and tensors, which ``torch.load(..., weights_only=True)`` reads. With compression each rank
        has a state of its own: save all of them. The tensors are the memories themselves, as in other state dicts of
        torch: copy a state (``copy.deepcopy``) that is to be kept in memory.
        """
        return {
            "version": _STATE_VERSION,
            "steps": self._steps,
            "parameters": sorted(self._names.values()),
            "choices": dict(self._gradients.choices),
            "pauses": dict(self._gradients.pauses),
            "unions": dict(self._gradients.unions),
            "compress": None if self._compressed is None else self._compressed.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank. Training goes on with bitwise the same steps.

        Without compression another world size is fine; with it see `thinwire.compress.redistribute`.

        Raises:
            ValueError: a state of another version, of a model with other parameters, of another compressor or
                exchange, rank or world size; nothing is changed.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"a state of version {state.get('version')!r}; this thinwire reads {_STATE_VERSION}")
        unknown = set(state["parameters"]) ^ set(self._names.values())
        if unknown:
            raise ValueError(
                f"the state belongs to a model with other parameters; {min(unknown)!r} is only in one of them"
            )
        compressed = state["compress"]
        if (compressed is None) != (self._compressed is None):
            saved, here = ("without", "with") if compressed is None else ("with", "without")
            raise ValueError(f"the state was saved {saved} compression, and attach was called {here} it")
        if self._compressed is not None:
            self._compressed.check_state(compressed)
            self._compressed.load_state_dict(compressed)
        self._steps = int(state["steps"])
        self._gradients.choices = {name: str(scheme) for name, scheme in state["choices"].items()}
        self._gradients.pauses = {name: int(steps) for name, steps in state["pauses"].items()}
        self._gradients.unions = {name: int(rows) for name, rows in state["unions"].items()}

    def watch_lane(self, watcher: Callable[[float, float], None] | None) -> None:
        """Have ``watcher`` called with the start and end (`time.perf_counter`) of each job of the lane, on its thread.

        That is when the network is busy. None ends it.
        """
        self._lane.watcher = watcher

    def detach(self) -> None:
        """Take all hooks off and release the lane, on all ranks; a DDP model is stock again. Twice does nothing."""
        if self._forward_hook is None:
            return
        self._plug.remove()
        self._lookups.remove()
        self._forward_hook.remove()
        self._forward_hook = None
        self._lane.close()
        _attached.discard(self._model)

    def _records(self) -> list[ParameterRecord]:
        return list(self._gradients.records.values())

    def _make_plug(self) -> Plug:
        is_ddp = isinstance(self._model, DistributedDataParallel)
        plans = {} if self._compressed is None else self._compressed.plans
        compressed = [name for name, _ in self._module.named_parameters() if name in plans]
        weights = {id(self._module.get_parameter(name)) for name in compressed}
        self._lookups = LookupRows(self._module, own_hooks=1 if is_ddp else 2, compressed=weights)
        self._buckets = buckets = Buckets(
            self._gradients, self._lookups, self._names, self._lane, self._staging, self._native, self._compressed
        )
        try:
            if isinstance(self._model, DistributedDataParallel):
                return DdpPlug(self._model, buckets, self._begin_backward, self._in_flight.append)
            trained = trained_parameters(self._module, self._lookups, self._names, compressed)
            return ParameterHooks(
                trained, buckets, self._lookups, self._lane, self._begin_backward, self._in_flight.append
            )
        except Exception:
            self._lookups.remove()
            raise

    def _agree_on_configuration(self, lane: Lane) -> Tensor:
        scheme = self._gradients.scheme
        lines = [f"scheme={scheme if isinstance(scheme, str) else scheme.describe()}"]
        for name, parameter in self._module.named_parameters():
            frozen = "" if parameter.requires_grad else ", frozen"
            lines.append(f"parameter {name!r}: {parameter.dtype} {list(parameter.shape)}{frozen}")
        if not isinstance(self._model, DistributedDataParallel):
            lines += [
                f"buffer {name!r}: {buffer.dtype} {list(buffer.shape)}" for name, buffer in self._module.named_buffers()
            ]
        if self._compressed is not None:
            lines += self._compressed.describe()
        lane.channel(Subject("attach", "\n".join(lines))).open()
        return torch.empty(0)

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Warn when a whole step went by without the hook: then stock DDP, or nobody, reduced the gradients."""
        del module, args
        synchronizes = not isinstance(self._model, DistributedDataParallel) or self._model.require_backward_grad_sync
        if not (self._model.training and torch.is_grad_enabled() and synchronizes):
            return
        if self._began:  # the last backward was broken off by an exception
            self._began = False
            self._plug.reset()
        self._forwards += 1
        if self._forwards == 2 and self._steps == 0 and isinstance(self._model, DistributedDataParallel):
            text = (
                "thinwire is attached, but a forward pass went by and its hook was not called: gradients are not"
                " synchronized by thinwire. Call the DDP model itself (not model.module), and run backward."
            )
            logger.warning(text)
            warnings.warn(text, stacklevel=3)

    def _begin_backward(self) -> bool:
        """Have `_finish_backward` called at the end of the running backward; whether there is one."""
        if not self._began:
            try:
                Variable._execution_engine.queue_callback(self._finish_backward)
            except RuntimeError:
                return False
            self._began = True
        return True

    def _finish_backward(self) -> None:
        """Runs when backward has nothing left to compute: what is waited for here is exposed communication."""
        self._began = False
        self._plug.finish()
        started = time.perf_counter()
        in_flight = self._in_flight.copy()
        self._in_flight.clear()
        for future in in_flight:
            future.wait()
        self._exposed_seconds += time.perf_counter() - started
        self._plug.deliver()
        self._gradients.finish_step()
        if self._compressed is not None:
            self._compressed.finish_step()
        self._steps += 1
        if self._steps == 1 and self._lane.rank == 0:
            logger.info("%s", self._summary())

    def _summary(self) -> str:
        records = self._records()
        rows = [record for record in records if record.kind not in ("all-reduce", KIND)]
        tables = "; ".join(
            f"{record.name} ({record.kind}, {record.density:.2%} dense) by {record.scheme}" for record in rows
        )
        compressed = sorted({f"{record.formats} by {record.scheme}" for record in records if record.kind == KIND})
        count = sum(record.kind == KIND for record in records)
        saved = self.stats()
        return (
            f"thinwire synchronizes {len(rows)} of {len(self._names)} parameters as rows"
            f"{': ' + tables if rows else ''};{f' {count} compressed: ' + ', '.join(compressed) + ';' if count else ''}"
            f" the others are all-reduced. First step:"
            f" {saved['comm/bytes_sent']:,.0f} bytes sent, {saved['comm/bytes_dense']:,.0f} for a dense all-reduce"
            f" ({self._lane.world_size} ranks)"
        )


def is_attached(model: nn.Module) -> bool:
    """Whether a `Synchronizer` of this model was not detached yet."""
    return model in _attached


def module_of(model: nn.Module) -> nn.Module:
    """The module that a model trains: that inside DDP, or itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model
