"""The holders' memory as a storage that torch.distributed.checkpoint (DCP) writes to.

A rank saves a version like those of the Checkpointer: layout and raw bytes. DCP's metadata is not stored; the reader
builds it from the layouts of all ranks. Values that are no tensors are stored as JSON, so the pickles that DCP makes of
them do not leave the process.
"""

from __future__ import annotations

import io
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from thinwire.checkpoint.agreement import Agreement, Turn
from thinwire.checkpoint.dcp.storage import MemoryStorage
from thinwire.checkpoint.group import failures_of, gather_json
from thinwire.checkpoint.pacing.gaps import Pacer
from thinwire.checkpoint.records import Notices
from thinwire.checkpoint.recovery import survey
from thinwire.checkpoint.state.encode import Encoded, StateEncoder
from thinwire.checkpoint.state.layout import view_of
from thinwire.comm.lane import Group
from thinwire.errors import ThinwireError

_TURN_SECONDS = 60.0
_POLL_SECONDS = 0.005
_LAYOUT_ROOM = 2  # times the first layout: numbers get longer


class MemoryWriter(MemoryStorage, StorageWriter):
    """A DCP writer to the memory of this host and of its peers: ``dcp.save(state,
    storage_writer=MemoryWriter("my-run"))``.

    Make one for all saves of a training, on all ranks. ``checkpoint_id`` is the step, a number that grows; without one
    saves are counted. `torch.distributed.checkpoint.save` returns when the version is complete on each host; it goes on
    to the peers after that. Two versions are kept. A save waits, for at most a minute, while the one before is still on
    its way to the peers.

    Args:
        run_id: names the run, as in `Checkpointer`; take another one than a Checkpointer of the same training.
        replicas: copies of each rank's part, including the one on its own machine.
        holder_socket: path of the holder of this host; default $THINWIRE_HOLDER.
        process_group: the ranks that save; default all.
        timeout: how long ranks wait for each other; default 30 minutes.

    Raises:
        ValueError: as `Checkpointer` does; and in `torch.distributed.checkpoint.save`, for a value that JSON and
            tensors cannot express.
        ThinwireError: in `torch.distributed.checkpoint.save`: the holder is lost, or there was no free slot in time.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        replicas: int = 2,
        holder_socket: str | Path | None = None,
        process_group: Group = None,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(run_id, replicas, holder_socket, process_group, timeout, leases=True)
        self._notices, self._encoder = Notices(dist.get_rank(self._group)), StateEncoder()
        self._pacer = Pacer(self._grant, every=1, watched=False)
        self._agreement = Agreement(self._registration, self._group, None, self._pacer, self._notices)
        self._step: int | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all ranks do the same, so there is nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        encoded, reason = None, ""
        try:
            encoded = self._encoder.encode(_state_of(plan, planner))
            self._agreement.payload_bytes = encoded.payload_bytes
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        failed = failures_of(reason, self._group)
        if failed or encoded is None:
            raise ValueError(failed)
        self._write(encoded)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: a checkpoint is complete once all ranks' versions are, so nothing is written last."""

    def close(self) -> None:
        """Close the writer; saved versions stay. A second call does nothing."""
        self._pacer.close()
        super().close()

    def _write(self, encoded: Encoded) -> None:
        registration = self._registration
        if self._step is None:
            found = survey(registration.client, registration.holders, self._run_id, "", self._group)
            steps = [version.step for versions in found.inventories.values() for version in versions]
            self._agreement.attempt, self._step = found.attempt, max(steps, default=0)
        step = self._step + 1 if self._given is None else self._given
        self._given = None  # DCP says nothing when there is nothing to say
        self._pacer.note_step()
        described_bytes = len(encoded.to_bytes(self._about))
        if described_bytes > registration.layout_bytes or not registration.registered:
            registration.layout_bytes = max(registration.layout_bytes, _LAYOUT_ROOM * described_bytes)
        turn = self._turn(step, encoded.payload_bytes)
        failed = failures_of(self._publish(turn, encoded), self._group)
        if failed:
            raise ThinwireError(f"step {step} was not saved: {failed}")
        self._step = step

    def _turn(self, step: int, payload_bytes: int) -> Turn:
        """A turn with a slot, on all ranks. Raises ThinwireError on all ranks."""
        deadline = time.monotonic() + _TURN_SECONDS
        while True:
            turn = self._agreement.take_turn(step)
            if turn.registers:
                if not self._agreement.register(step, payload_bytes):
                    raise ThinwireError(f"step {step} was not saved: {self._notices.last}")
                continue
            told = gather_json([turn.skipped, time.monotonic() > deadline], self._group)
            if not any(skipped for skipped, _ in told):
                return turn
            if any(late for _, late in told) or self._registration.client is None:
                raise ThinwireError(f"step {step} was not saved: {[skipped for skipped, _ in told][:4]}")
            time.sleep(_POLL_SECONDS)

    def _publish(self, turn: Turn, encoded: Encoded) -> str:
        """Why the version of this rank is not complete, or empty."""
        writer = turn.writer
        assert writer is not None
        try:
            with torch.no_grad():
                for where, tensor in zip(encoded.slices, encoded.tensors, strict=True):
                    view_of(writer.payload, where).copy_(tensor)
        except RuntimeError as error:
            self._agreement.abandon(writer)
            return str(error)
        return self._agreement.publish(turn, encoded, self._about, wait=True)

    def _grant(self, num_bytes: int) -> None:
        """On the pacer's thread."""
        self._agreement.grant(num_bytes)


def _state_of(plan: SavePlan, planner: SavePlanner) -> dict[str, Any]:
    """State that a rank saves. ``chunks`` are tensors, ``items`` their names, whole shapes and offsets."""
    values, items, chunks = {}, [], []
    for item in plan.items:
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            values[item.index.fqn] = _plain(item, data)
        else:
            assert isinstance(data, Tensor)
            assert item.tensor_data is not None
            items.append([item.index.fqn, list(item.tensor_data.size), list(item.tensor_data.chunk.offsets)])
            chunks.append(data.detach())
    return {"values": values, "items": items, "chunks": chunks, "planner_data": plan.planner_data or {}}


def _plain(item: WriteItem, data: io.BytesIO) -> Any:
    """The value that a planner has pickled: the pickle is of this process, and is not sent."""
    data.seek(0)
    try:
        return torch.load(data, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{item.index.fqn} is not made of dict, list, tuple, tensor, int, float, str, bool, None and bytes"
        ) from error
