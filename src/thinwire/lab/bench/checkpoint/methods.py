"""Checkpoint methods to compare, each behind the same few calls; all of them save the same state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from thinwire.checkpoint import Checkpointer
from thinwire.holder.client import HolderClient
from thinwire.holder.start import load_secret, socket_path
from thinwire.lab.bench.checkpoint.work import Trainer

NONE, DCP_SYNC, DCP_ASYNC, BLOCKING, THINWIRE = "none", "dcp_sync", "dcp_async", "blocking", "thinwire"
METHODS = (NONE, DCP_SYNC, DCP_ASYNC, BLOCKING, THINWIRE)
IN_PEERS = (BLOCKING, THINWIRE)


@dataclass(frozen=True)
class Place:
    """Destination of checkpoints: the sockets of the holders, host by host, and a directory that all hosts see."""

    sockets: tuple[str, ...]
    directory: str
    replicas: int
    run_id: str


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
        ...

    def finish(self) -> float | None:
        """Wait until the last checkpoint is safe, and return the seconds from its call of `step` until then."""
        ...

    def account(self, calls: list[Call]) -> list[Call]:
        """Return the last calls of `step`, completed with the results known after `finish`."""
        ...

    def restore(self) -> int | None:
        """Restore the newest checkpoint and return the number of steps before it; None if there is none."""
        ...

    def close(self) -> None: ...


def make(method: str, trainer: Trainer, place: Place, rank: int) -> CheckpointMethod:
    """Create the method of that name, on all ranks. Raises ValueError for an unknown name."""
    if method == NONE:
        return NoCheckpoints()
    if method == THINWIRE:
        return InPeers(trainer, place, rank)
    if method == BLOCKING:
        return Blocking(trainer, place, rank)
    from thinwire.lab.bench.checkpoint.dcp import DcpAsync, DcpSync

    if method in (DCP_SYNC, DCP_ASYNC):
        return (DcpSync if method == DCP_SYNC else DcpAsync)(trainer.training, place, rank)
    raise ValueError(f"unknown method {method!r}; legal are {', '.join(METHODS)}")


class NoCheckpoints:
    """A method without checkpoints: the training by itself."""

    def step(self, step: int) -> bool:
        del step
        return False

    def finish(self) -> float | None:
        return None

    def account(self, calls: list[Call]) -> list[Call]:
        return calls

    def restore(self) -> int | None:
        return None

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class InPeers:
    """The method of `thinwire.checkpoint.Checkpointer`, which sends in the gaps of the lane."""

    name = THINWIRE

    def __init__(self, trainer: Trainer, place: Place, rank: int) -> None:
        training, socket = trainer.training, socket_path(place.sockets[rank])
        self._run_id, self._rank = f"{place.run_id}-{self.name}", rank
        self.checkpointer = Checkpointer(
            training.model,
            training.optimizer,
            synchronizer=self._synchronizer(training.synchronizer),
            data=training.data,
            replicas=place.replicas,
            run_id=self._run_id,
            holder_socket=socket,
        )
        self._holder = HolderClient.connect(socket, load_secret(socket))

    def _synchronizer(self, synchronizer: Any) -> Any:
        return synchronizer

    def step(self, step: int) -> bool:
        del step
        self.checkpointer.step()
        return not self.checkpointer.records()[-1].skipped

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
        records = self.checkpointer.records()[-len(calls) :]
        return [Call(record.blocking_seconds, not record.skipped) for record in records]

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
