"""Holders and the owners of shards in one process: all of the protocol, without the training, in milliseconds."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from checkpoint_faults.hosts import SECRET
from checkpoint_faults.kind import Outcome, WrongRestore
from thinwire.checkpoint.choice import Choice, choose
from thinwire.checkpoint.holder import faultpoint
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.server import Holder, HolderConfig
from thinwire.checkpoint.holder.version import next_attempt, topology_digest
from thinwire.checkpoint.placement import placement
from thinwire.errors import ThinwireError

RUN = "run"
NUM_BYTES = 3 << 20  # three pieces on the wire
_TRIES = 3
_WAIT_SECONDS = 10.0
_BUDGET_BYTES = 1 << 30


def content(owner: int, step: int, history: str, num_bytes: int) -> bytes:
    """What a shard is at a step: other bytes for every owner, step, and history of the run."""
    return random.Random(f"{history} {owner} {step}").randbytes(num_bytes)


class Shards:
    """One owner and one holder for each host; a context manager that leaves nothing behind.

    Args:
        via: what a sender is told a peer's address is, for whoever wants to be in between.

    Example:
        with Shards(directory, hosts=3) as shards:
            shards.train([1, 2])
            shards.replace(2)
            outcome = shards.recover()
    """

    def __init__(
        self,
        directory: Path,
        hosts: int = 2,
        replicas: int = 2,
        num_bytes: int = NUM_BYTES,
        via: Callable[[str], str] = str,
        deadline_seconds: float = 1.0,
    ) -> None:
        self.num_hosts, self.num_bytes, self._directory, self._via = hosts, num_bytes, directory, via
        self._deadline_seconds = deadline_seconds
        self._placement = placement(hosts, replicas)
        self._stack = contextlib.ExitStack()
        self._started = 0
        self.attempt, self.history = next_attempt([], 0), "first"
        self.topology = {"world_size": hosts}
        self.owners: dict[int, HolderClient] = {}
        self.places = list(range(hosts))  # where the owners live
        self.holders = [self._start() for _ in range(hosts)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        faultpoint.arm(None)
        self.end_owners()
        self._stack.close()

    def _start(self) -> Holder:
        self._started += 1
        config = HolderConfig(
            socket=str(self._directory / f"holder-{self._started}"), secret=SECRET.encode(), drain_seconds=0.0,
            budget_bytes=_BUDGET_BYTES, timeout_seconds=2.0, deadline_seconds=self._deadline_seconds,
        )  # fmt: skip
        return self._stack.enter_context(Holder(config))

    def replace(self, host: int) -> None:
        """The host is lost with all that it holds, and its owner; another one takes its place."""
        self.end_owner(host)
        self.holders[host].stop()
        self.holders[host] = self._start()

    def client(self, host: int) -> HolderClient:
        """Of whoever is not the owner of a shard."""
        return HolderClient.connect(self.holders[host].config.socket_path, SECRET.encode(), timeout_seconds=5.0)

    def register(self, owner: int) -> HolderClient:
        """The trainer of a shard starts."""
        client = self.client(self.places[owner])
        hosts = [self.places[peer] for peer in self._placement[owner][1:]]
        peers = [self._via(self.holders[host].address) for host in hosts]
        try:
            client.hello(RUN, self.topology, owner, self.num_bytes, peers, self.attempt)
        except BaseException:
            client.close()
            raise
        self.owners[owner] = client
        return client

    def end_owner(self, owner: int) -> None:
        """The trainer of a shard dies."""
        client = self.owners.pop(owner, None)
        if client is not None:
            client.close()

    def end_owners(self) -> None:
        for owner in list(self.owners):
            self.end_owner(owner)

    def write(self, owner: int, step: int, keep_step: int | None = None) -> bool:
        """The trainer writes a version; whether it got a slot."""
        client = self.owners.get(owner) or self.register(owner)
        writer = client.slot(step, keep_step)
        if writer is None:
            return False
        writer.payload[:] = content(owner, step, self.history, self.num_bytes)
        writer.payload.release()
        writer.publish(json.dumps({"owner": owner, "step": step, "history": self.history}).encode(), wait=True)
        return True

    def train(self, steps: Sequence[int], replicate: bool = True) -> None:
        """All owners write these steps, and with ``replicate`` their peers get them, each before the next."""
        keep = None
        for step in steps:
            for owner in range(self.num_hosts):
                assert self.write(owner, step, keep), f"owner {owner} has no slot for step {step}"
                self.owners[owner].grant_all()
            if replicate:
                self.wait_for(lambda step=step: self.replicated(step), f"step {step} is everywhere")
                keep = step

    def replicated(self, step: int) -> bool:
        return all(client.status()["newest_replicated"] == step for client in self.owners.values())

    def recover(self, places: Sequence[int] | None = None) -> Outcome:
        """All trainers have died; they start again, on these hosts, and each loads its shard.

        As a Checkpointer does it, and every byte compared with what was written. Raises WrongRestore.
        """
        self.end_owners()
        self.places = self.places if places is None else list(places)
        reason = ""
        for _ in range(_TRIES):
            choice = self._choose()
            if choice.step is None:
                reasons = [reason, *choice.reasons] if reason else choice.reasons
                return Outcome("refused", says="; ".join(reasons) or "nobody has anything")
            try:
                histories = {self._load(owner, choice) for owner in range(self.num_hosts)}
            except (ThinwireError, ValueError) as error:
                reason = str(error)
                self.end_owners()
                continue
            if len(histories) > 1:
                raise WrongRestore(f"shards of histories {histories} were put together")
            self.history = histories.pop()
            here = [self.holders[host].address for host in self.places]
            return Outcome("restored", "memory" if [*choice.sources] == here else "peer", choice.step, reason)
        return Outcome("refused", says=reason)

    def _choose(self) -> Choice:
        inventories = {}
        for host in sorted(set(self.places)):
            with contextlib.suppress(ThinwireError), self.client(host) as client:
                inventories[self.holders[host].address] = client.inventory(RUN)
        seen = [version.attempt for versions in inventories.values() for version in versions]
        self.attempt = next_attempt(seen, random.getrandbits(32))
        faultpoint.reach("survey")
        addresses = [self.holders[host].address for host in self.places]
        return choose(inventories, addresses, RUN, topology_digest(self.topology))

    def _load(self, owner: int, choice: Choice) -> str:
        """The history that the shard is of."""
        client, version, source = self.register(owner), choice.versions[owner], choice.sources[owner]
        if source != self.holders[self.places[owner]].address:
            client.fetch(version, self._via(source))
        with client.open(version) as reader:
            is_of = json.loads(reader.layout)
            loaded = bytes(reader.payload)
            reader.verify()
        if (is_of["owner"], is_of["step"]) != (owner, choice.step):
            raise WrongRestore(f"owner {owner} of step {choice.step} got {is_of}")
        if loaded != content(owner, is_of["step"], is_of["history"], self.num_bytes):
            raise WrongRestore(f"the bytes of owner {owner} are not those of {is_of}")
        client.keep(version)
        return is_of["history"]

    @staticmethod
    def wait_for(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {_WAIT_SECONDS:.0f} seconds: {what}")
            time.sleep(0.002)
