"""`attach`: synchronize the gradients of a model through thinwire, with one line in the training script."""

from __future__ import annotations

import logging
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire import kernels
from thinwire.hooks import ddp as ddp_hook
from thinwire.hooks.buckets import Buckets
from thinwire.hooks.embedding import LookupRows
from thinwire.hooks.gradients import GradientSync
from thinwire.lane import Lane
from thinwire.observe.ledger import ParameterRecord
from thinwire.sparse import SUPPORTED_DTYPES
from thinwire.sync.channel import Subject
from thinwire.sync.named import AUTO, resolve
from thinwire.sync.scheme import Scheme
from thinwire.sync.two_level import TwoLevel

logger = logging.getLogger("thinwire")
_STATE_VERSION = 1


def attach(model: nn.Module, scheme: str | Scheme | TwoLevel = AUTO, timeout: timedelta | None = None) -> Synchronizer:
    """Synchronize the gradients of a DDP model exactly, with sparse ones sent as what they are.

    From the next backward on, gradients of ``nn.Embedding(sparse=True)`` and the non-zero rows of dense embedding
    gradients travel by ``scheme``; everything else is all-reduced. The mean over ranks is what stock DDP computes, up
    to the rounding of another order of addition, and has the same bits on all ranks. Gradients keep their layout, so
    any optimizer works. Call it on all ranks, after wrapping the model and before the first backward.

    Args:
        model: a ``DistributedDataParallel`` whose parameters are on the CPU.
        scheme: a name of `thinwire.schemes`, a `Scheme` or a `TwoLevel` ("two_level:zen": ranks of one host add up
            first); "auto" takes the one of fewest bytes at each step.
        timeout: how long to wait for a peer; None takes that of the model's process group.

    Returns:
        A `Synchronizer`: statistics, state, and `Synchronizer.detach`.

    Raises:
        ValueError: the model is not wrapped, has another hook, or thinwire is attached already; an unknown scheme.
        MismatchError: ranks attach different models or schemes; on every rank.

    Example:
        >>> model = DistributedDataParallel(model)   # doctest: +SKIP
        >>> sync = thinwire.attach(model)            # doctest: +SKIP
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"attach needs a DistributedDataParallel model, not {type(model).__name__}: wrap it first,"
            " model = torch.nn.parallel.DistributedDataParallel(model)"
        )
    resolve(scheme)
    _check_parameters(model)
    if ddp_hook.is_attached(model):
        raise ValueError("thinwire is attached to this model already: call detach() on its Synchronizer first")
    return Synchronizer(model, scheme, timeout)


class Synchronizer:
    """What `attach` returns: the account, the state, and the end of a synchronization."""

    def __init__(
        self, model: DistributedDataParallel, scheme: str | Scheme | TwoLevel, timeout: timedelta | None
    ) -> None:
        self._model = model
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._gradients = GradientSync(scheme)
        self._in_flight: list[Future[Tensor]] = []
        self._exposed_seconds = 0.0
        self._steps = 0
        self._forwards = 0
        self._lane = Lane(model.process_group, timeout)
        try:
            self._lane.submit(self._agree_on_configuration).wait()
            ddp_hook.install(model, self._on_bucket)
        except Exception:
            self._lane.close()
            raise
        self._lookups = LookupRows(model.module)
        self._lane.submit(lambda lane: kernels.warm_up())  # while the first forward runs
        self._buckets = Buckets(self._gradients, self._lookups, self._names, self._lane)
        self._forward_hook: RemovableHandle | None = model.register_forward_pre_hook(self._before_forward)

    def stats(self) -> dict[str, float]:
        """Totals of this rank since `attach`: bytes, seconds, steps. Slash names, for any metrics logger.

        ``comm/seconds`` is the time that the lane worked, ``comm/exposed_seconds`` the part of it for which the
        backward pass had to wait, ``comm/bytes_dense`` what all-reducing everything would have sent.
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
        }

    def table(self) -> list[dict[str, str | int | float]]:
        """One row per parameter, those that are all-reduced together in one: density, scheme, formats, bytes.

        ``bytes`` were sent by this rank in the last step; ``predicted_bytes`` is what perfectly even ownership
        would have taken, so the difference is imbalance. ``fused`` is the number of parameters that were synchronized
        together with this one, itself included; they share the bytes by their rows. ``reason`` says why "auto" took
        what it took last: bytes and seconds that it expected, and the next best. (The same line is logged, at level
        INFO of the logger "thinwire", whenever the choice changes.)
        """
        return [record.row() for record in self._records()]

    def state_dict(self) -> dict[str, Any]:
        """What has to survive a restart for the same decisions to be taken; plain Python values."""
        return {
            "version": _STATE_VERSION,
            "steps": self._steps,
            "parameters": sorted(self._names.values()),
            "choices": dict(self._gradients.choices),
            "pauses": dict(self._gradients.pauses),
            "unions": dict(self._gradients.unions),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on all ranks alike; another world size is fine.

        Raises:
            ValueError: a state of another version or of a model with other parameters; nothing is changed.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"a state of version {state.get('version')!r}; this thinwire reads {_STATE_VERSION}")
        unknown = set(state["parameters"]) ^ set(self._names.values())
        if unknown:
            raise ValueError(
                f"the state belongs to a model with other parameters; {min(unknown)!r} is only in one of them"
            )
        self._steps = int(state["steps"])
        self._gradients.choices = {name: str(scheme) for name, scheme in state["choices"].items()}
        self._gradients.pauses = {name: int(steps) for name, steps in state["pauses"].items()}
        self._gradients.unions = {name: int(rows) for name, rows in state["unions"].items()}

    def detach(self) -> None:
        """Give the gradients back to stock DDP and release the lane, on all ranks. Twice does nothing."""
        if ddp_hook.is_attached(self._model) and self._forward_hook is not None:
            ddp_hook.uninstall(self._model)
            self._lookups.remove()
            self._forward_hook.remove()
            self._forward_hook = None
            self._buckets.flush()
            self._lane.close()

    def _records(self) -> list[ParameterRecord]:
        return list(self._gradients.records.values())

    def _agree_on_configuration(self, lane: Lane) -> Tensor:
        scheme = self._gradients.scheme
        lines = [f"scheme={scheme if isinstance(scheme, str) else scheme.describe()}"]
        for name, parameter in self._model.module.named_parameters():
            lines.append(f"parameter {name!r}: {parameter.dtype} {list(parameter.shape)}")
        lane.channel(Subject("attach", "\n".join(lines))).open()
        return torch.empty(0)

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Warn when a whole step went by without the hook: then stock DDP, or nobody, reduced the gradients."""
        del module, args
        if not (self._model.training and torch.is_grad_enabled() and self._model.require_backward_grad_sync):
            return
        self._forwards += 1
        if self._forwards == 2 and self._steps == 0:
            text = (
                "thinwire is attached, but a forward pass went by and its hook was not called: gradients are not"
                " synchronized by thinwire. Call the DDP model itself (not model.module), and run backward."
            )
            logger.warning(text)
            warnings.warn(text, stacklevel=3)

    def _on_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Called by DDP in backward for each bucket, in the same order on all ranks."""
        future = self._buckets.add(bucket)
        if self._in_flight or self._in_backward():
            self._in_flight.append(future)
        return future

    def _in_backward(self) -> bool:
        """Have `_finish_backward` called at the end of the running backward, if there is one.

        Under ``model.join()`` DDP also calls its hook outside of backward, for ranks that ran out of data.
        """
        try:
            Variable._execution_engine.queue_callback(self._finish_backward)
        except RuntimeError:
            return False
        return True

    def _finish_backward(self) -> None:
        """Runs when backward has nothing left to compute: what is waited for here is exposed communication."""
        self._buckets.flush()
        started = time.perf_counter()
        in_flight, self._in_flight = self._in_flight, []
        for future in in_flight:
            future.wait()
        self._exposed_seconds += time.perf_counter() - started
        self._gradients.finish_step()
        self._steps += 1
        if self._steps == 1 and self._lane.rank == 0:
            logger.info("%s", self._summary())

    def _summary(self) -> str:
        rows = [record for record in self._records() if record.kind != "all-reduce"]
        tables = "; ".join(
            f"{record.name} ({record.kind}, {record.density:.2%} dense) by {record.scheme}" for record in rows
        )
        saved = self.stats()
        return (
            f"thinwire synchronizes {len(rows)} of {len(self._names)} parameters as rows"
            f"{': ' + tables if rows else ''}; the others are all-reduced. First step:"
            f" {saved['comm/bytes_sent']:,.0f} bytes sent, {saved['comm/bytes_dense']:,.0f} for a dense all-reduce"
            f" ({self._lane.world_size} ranks)"
        )


def _check_parameters(model: DistributedDataParallel) -> None:
    for name, parameter in model.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.device.type != "cpu":
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, but this version synchronizes CPU tensors only"
            )
        if parameter.dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"parameter {name!r} has dtype {parameter.dtype}, which is not supported")
