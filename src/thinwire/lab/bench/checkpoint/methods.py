"""Checkpoint methods to compare, each behind the same few calls; all of them save the same state."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Storage
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import load_secret, socket_path
from thinwire.lab.bench.checkpoint.work import Trainer

NONE, DCP_SYNC, DCP_ASYNC, BLOCKING, THINWIRE = "none", "dcp_sync", "dcp_async", "blocking", "thinwire"
LM_RESILIENCY, NVRX = "lm_resiliency", "nvrx"
METHODS = (NONE, DCP_SYNC, DCP_ASYNC, BLOCKING, THINWIRE)
RIVALS = (LM_RESILIENCY, NVRX)  # of other packages
IN_PEERS = (BLOCKING, THINWIRE)


@dataclass(frozen=True)
class Destination:
    """Destination of checkpoints: the sockets of the holders, host by host, and a directory that all hosts see.

    ``compress`` is that of `CheckpointPolicy`.
    """

    sockets: tuple[str, ...]
    directory: str
    replicas: int
    run_id: str
    compress: Any = None


@dataclass(frozen=True)
class Call:
    """Result of `CheckpointMethod.step`: the time for which training stood still, and whether a checkpoint was made."""

    blocking_seconds: float
    made: bool


class CheckpointMethod(Protocol):
    """Interface of a method that saves one rank's state.

    All calls are made on all ranks, but `finish` waits for this rank alone.
    """

    def step(self, step: int) -> bool:
        """Take a turn after ``step`` optimizer steps and return whether a checkpoint was begun."""

    def finish(self) -> float | None:
        """Wait until the last checkpoint is safe, and return the seconds from its call of `step` until then."""
        return None

    def account(self, calls: list[Call]) -> list[Call]:
        """Return the last calls of `step`, completed with the results known after `finish`."""
        return calls

    def restore(self) -> int | None:
        """Restore the newest checkpoint and return the number of steps before it; None if there is none."""

    def close(self) -> None:
        """Free what the method has, which may be nothing."""
        return


def cpu_seconds(destination: Destination, rank: int) -> float:
    """Return the CPU time so far of this rank: of its process, its children, and the holder of its host."""
    socket = socket_path(destination.sockets[rank])
    with HolderClient.connect(socket, load_secret(socket)) as holder:
        used = float(holder.holder_status()["cpu_seconds"])
    pending = [os.getpid()]
    while pending:
        pid = pending.pop()
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                pending += [int(child) for child in (task / "children").read_text().split()]
            user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        except (OSError, ValueError):  # it has ended
            continue
        used += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return used


class NoCheckpoints(CheckpointMethod):
    """A method without checkpoints: the training by itself."""

    def step(self, step: int) -> bool:
        return False

    def restore(self) -> int | None:
        return None


class InPeers:
    """The method of `thinwire.checkpoint.Checkpointer`, which sends in the gaps of the lane."""

    name = THINWIRE
    _max_overhead: Any = "auto"

    def __init__(self, trainer: Trainer, destination: Destination, rank: int) -> None:
        training, socket = trainer.training, socket_path(destination.sockets[rank])
        self._run_id, self._rank = f"{destination.run_id}-{self.name}", rank
        self.checkpointer = Checkpointer(
            training.model,
            training.optimizer,
            synchronizer=self._synchronizer(training.synchronizer),
            data=training.data,
            policy=CheckpointPolicy(max_overhead=self._max_overhead, compress=destination.compress),
            storage=Storage(self._run_id, destination.replicas, holder_socket=socket),
        )
        self._holder = HolderClient.connect(socket, load_secret(socket))

    def _synchronizer(self, synchronizer: Any) -> Any:
        return synchronizer

    def step(self, step: int) -> bool:
        self.checkpointer.step()
        records = self.checkpointer.records()
        return bool(records) and records[-1].step == self.checkpointer.steps and not records[-1].skipped

    def finish(self) -> float | None:
        """Wait until all peers have acknowledged the version, and return the seconds until it was safe."""
        written = [record for record in self.checkpointer.records() if not record.skipped]
        if not written or not self.checkpointer.flush():
            return None
        replicas = self._shard()["replicas"].values()
        seconds = [replica["seconds_of_last"] for replica in replicas if replica["seconds_of_last"] is not None]
        return written[-1].blocking_seconds + max(seconds, default=0.0)

    def account(self, calls: list[Call]) -> list[Call]:
        """Return the calls including the time for which the next ``optimizer.step`` waited for the copy."""
        first = self.checkpointer.steps - len(calls) + 1
        by_step = {record.step: record for record in self.checkpointer.records()[-len(calls) :]}
        records = [by_step.get(step) for step in range(first, first + len(calls))]
        return [
            call if record is None else Call(record.blocking_seconds, not record.skipped)
            for call, record in zip(calls, records, strict=True)
        ]

    def _shard(self) -> dict[str, Any]:
        names = (self._run_id, self._rank)
        shards = self._holder.holder_status()["shards"]
        return next(shard for shard in shards if (shard["shard"]["run_id"], shard["shard"]["owner"]) == names)

    def restore(self) -> int | None:
        return self.checkpointer.restore()

    def close(self) -> None:
        self._holder.close()
        self.checkpointer.close()


class Blocking(InPeers):
    """A variant of `InPeers` in which training waits at each step until the peers have the version (the paper's figure
    16): the baseline for gaps and for the holder's sending beside the training."""

    name = BLOCKING
    _max_overhead = None

    def _synchronizer(self, synchronizer: Any) -> Any:
        return StateOnly(synchronizer)

    def step(self, step: int) -> bool:
        made = super().step(step)
        if made and not self.checkpointer.flush():
            raise RuntimeError("the peers did not get a version; see the log of the holders")
        return made

    def finish(self) -> float | None:
        return None

    def account(self, calls: list[Call]) -> list[Call]:
        return calls


@dataclass(frozen=True)
class StateOnly:
    """A synchronizer's state without its lane: a training that waits has no use for gaps."""

    synchronizer: Any

    def state_dict(self) -> dict[str, Any]:
        return self.synchronizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.synchronizer.load_state_dict(state)
