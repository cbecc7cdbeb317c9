"""The holders' memory as a storage of torch.distributed.checkpoint (DCP): common base of writing and reading."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.checkpoint.group import new_group, run_id_of
from thinwire.checkpoint.registration import Registration
from thinwire.comm.lane import Group

STATE = "dcp"  # in the layout's ``about``, where a Checkpointer has the digest of its model


class MemoryStorage:
    """The ranks of a `MemoryWriter` or `MemoryReader`, their registration, and the step that DCP asked for."""

    def __init__(
        self,
        run_id: str | None,
        replicas: int,
        holder_socket: str | Path | None,
        process_group: Group,
        timeout: timedelta | None,
        leases: bool,
    ) -> None:
        self._run_id = run_id_of(run_id)
        self._group: Any = new_group(process_group, timeout or timedelta(minutes=30))
        self._about = {"world_size": dist.get_world_size(self._group), "state": STATE}
        try:
            self._registration = Registration(
                holder_socket, self._run_id, self._about, replicas, 0, self._group, leases=leases
            )
        except Exception:
            dist.destroy_process_group(self._group)
            raise
        self._given: int | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._given = None if checkpoint_id is None else _step_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return str(checkpoint_id).isdecimal()

    def close(self) -> None:
        """Close the storage; saved versions stay. A second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            self._registration.close()
            dist.destroy_process_group(group)


def _step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """Raises ValueError for a text that is no number."""
    text = str(checkpoint_id)
    if not text.isdecimal():
        raise ValueError(f"checkpoint_id={text!r}: in memory a checkpoint is named by its step, a number")
    return int(text)
