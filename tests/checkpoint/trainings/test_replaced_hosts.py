"""Hosts replaced one after the other, jobs that share a name, states that grow: on real holders, to the bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from checkpoint_faults.hosts import SECRET, Hosts
from checkpoint_faults.training import Job, restart
from injected import Faults
from thinwire.checkpoint.checkpointer import Checkpointer
from thinwire.checkpoint.holder.client import DEFAULT_LAYOUT_BYTES, HolderClient
from thinwire.checkpoint.holder.slots import SlotSize
from thinwire.checkpoint.options import Storage
from thinwire.checkpoint.registration import room_bytes
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STATE_BYTES = 2_900_000  # of `checkpoint_faults.training`
SLOT_BYTES = SlotSize(room_bytes(STATE_BYTES), DEFAULT_LAYOUT_BYTES).total_bytes


def used(hosts: Hosts, names: str) -> list[int]:
    found = []
    for name in names:
        with hosts.client(name) as client:
            found.append(client.holder_status()["used_bytes"])
    return found


def replace_one_by_one(directory: Path, names: str, replaced: list[tuple[int, str]], drawn: random.Random) -> None:
    """The host at an index by one of another name, so that ranks are numbered anew; ranks are killed in between too.

    Each host has memory for two slots of its shard and of its replica, and not a byte more.
    """
    budget = f"{4 * SLOT_BYTES}"
    with Hosts(directory) as hosts:
        hosts.start(names, budget=budget)
        steps = 2
        assert restart(Job(hosts.sockets(names), steps=steps)).ended == "fresh"
        for number, (victim, new) in enumerate(replaced):
            hosts.kill(names[victim])
            hosts.start(new, budget=budget)
            names = "".join(sorted(names.replace(names[victim], "") + new))
            if number % 2 == 0:  # and killed before it is done
                fault = Faults().kill(drawn.randrange(len(names)), 0, at=drawn.choice(("survey", "load")))
                with pytest.raises(RuntimeError, match="a rank died"):
                    restart(Job(hosts.sockets(names), steps=0, faults=fault))
            outcome = restart(Job(hosts.sockets(names), steps=steps + 2))
            assert (outcome.ended, outcome.step) == ("restored", steps), outcome.says
            steps += 2
            assert max(used(hosts, names)) <= int(budget)


def test_replaced_hosts_fit_into_the_memory_that_the_guide_names(tmp_path: Path) -> None:
    """The first one by a last one, so that all shards belong elsewhere."""
    replace_one_by_one(tmp_path, "dhl", [(0, "z")], random.Random(5))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.timeout(400)
def test_ten_successive_replacements(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    letters = drawn.sample(sorted(set("abcdefghijklmnopqrstuvwxyz") - set("dhlp")), 10)
    replace_one_by_one(tmp_path, "dhlp", [(drawn.randrange(4), letter) for letter in letters], drawn)


def lives(context: RankContext, socket: str, run_id: str, until: str = "") -> str:
    """A rank that trains until there is a file; why its constructor raised, or the step that it restored."""
    os.environ["THINWIRE_SECRET"] = SECRET
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    model = nn.Linear(3, 3)
    try:
        checkpointer = Checkpointer(model, storage=Storage(run_id, 1, holder_socket=socket))
    except ValueError as error:
        return str(error)
    with checkpointer:
        restored = checkpointer.restore()
        ended = not until
        while not ended:
            ended = Path(until).exists()
            flags = [None] * dist.get_world_size()
            dist.all_gather_object(flags, ended)
            ended = any(flags)
            checkpointer.step()
            time.sleep(0.02)
            context.send("step")
        checkpointer.flush()
    return f"restored {restored}"


def test_two_living_jobs_do_not_share_a_run(tmp_path: Path) -> None:
    """The second one is refused on all ranks, of any number, from the start; one that was killed is no hindrance."""
    with Hosts(tmp_path) as hosts:
        hosts.start("a")
        socket, running = hosts.socket("a"), threading.Event()
        first: list[Any] = []

        def run_first() -> None:
            told, stop = lambda *_: running.set(), str(tmp_path / "stop")
            first.extend(run_ranks(lives, socket, "run", stop, world_size=2, on_message=told, timeout_seconds=60))

        thread = threading.Thread(target=run_first)
        thread.start()
        assert running.wait(30)
        (refused,) = run_ranks(lives, socket, "run", world_size=1, timeout_seconds=60)
        assert "run 'run' is in use by another job" in refused.value
        assert "pass another run_id, or end that process" in refused.value
        (other,) = run_ranks(lives, socket, "other", world_size=1, timeout_seconds=60)
        assert other.value == "restored None"
        (tmp_path / "stop").touch()
        thread.join()
        assert [outcome.value for outcome in first] == ["restored None"] * 2
        again = run_ranks(lives, socket, "run", world_size=2, timeout_seconds=60)
        assert [outcome.value for outcome in again] != ["restored None"] * 2


CHILD = """
import os, sys, time
from thinwire.checkpoint.holder.client import HolderClient
client = HolderClient.connect(sys.argv[1], os.environb[b"THINWIRE_SECRET"])
client.join("run", "first")
client.hello("run", {}, 0, 1000)
if os.fork() == 0:  # as the workers of a DataLoader, which keep what they inherit open
    time.sleep(60)
print("joined", flush=True)
time.sleep(60)
"""


def test_a_killed_job_is_no_hindrance_though_its_children_live(tmp_path: Path) -> None:
    with Hosts(tmp_path) as hosts:
        hosts.start("a")
        environment = {**os.environ, "THINWIRE_SECRET": SECRET}
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, hosts.socket("a")], env=environment, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "joined\n"
            with HolderClient.connect(hosts.socket("a"), SECRET.encode()) as client:
                with pytest.raises(ValueError, match=rf"in use by another job.*process {child.pid}"):
                    client.join("run", "second")
                client.join("another", "second")
                os.kill(child.pid, signal.SIGKILL)
                client.join("run", "second")
                client.hello("run", {}, 0, 1000)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()


class Growing(nn.Module):
    """Its second part gets gradients from a step on, so that the optimizer has a state for it only then."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(8, 10_000), nn.Linear(8, 60_000)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.early(x).mean() + (self.late(x).mean() if both else 0.0)


def grows(context: RankContext, socket: str, late: int, steps: int) -> tuple[int | None, list[str], list[bytes], str]:
    os.environ["THINWIRE_SECRET"] = SECRET
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    torch.manual_seed(0)
    model = Growing()
    optimizer = torch.optim.Adam(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        storage = Storage("run", holder_socket=socket, domain="rack 1")
        with Checkpointer(model, optimizer, storage=storage) as checkpointer:
            first = checkpointer.restore()
            found = [entry["exp_avg"].numpy().tobytes() for entry in optimizer.state_dict()["state"].values()]
            for step in range(first or 0, steps):
                optimizer.zero_grad()
                model(torch.full((2, 8), float(step)), step >= late).backward()
                optimizer.step()
                checkpointer.step()
                checkpointer.flush(20)
            if first is None:
                found = [entry["exp_avg"].numpy().tobytes() for entry in optimizer.state_dict()["state"].values()]
            return first, [r.skipped for r in checkpointer.records()], found, "\n".join(str(w.message) for w in caught)


def test_a_state_that_grows_gets_larger_slots(tmp_path: Path) -> None:
    """Here and at its peers; at most three steps have no version, and none is lost."""
    with Hosts(tmp_path) as hosts:
        hosts.start("ab")
        outcomes = run_ranks(_grows_on, hosts.sockets("ab"), 4, 12, world_size=2, timeout_seconds=60)
        for outcome in outcomes:
            skipped = outcome.value[1]
            assert len([reason for reason in skipped if reason]) <= 3, skipped
            assert skipped[:4] == [""] * 4
            assert skipped[-3:] == [""] * 3
        again = run_ranks(_grows_on, hosts.sockets("ab"), 4, 12, world_size=2, timeout_seconds=60)
        for outcome, before in zip(again, outcomes, strict=True):
            assert outcome.value[0] == 12
            assert outcome.value[2] == before.value[2]


def _grows_on(context: RankContext, sockets: tuple[str, ...], late: int, steps: int) -> Any:
    return grows(context, sockets[context.rank], late, steps)


def test_a_state_that_outgrows_the_budget_warns_with_bytes(tmp_path: Path) -> None:
    with Hosts(tmp_path) as hosts:
        hosts.start("ab", budget="14MB")
        outcomes = run_ranks(_grows_on, hosts.sockets("ab"), 4, 8, world_size=2, timeout_seconds=60)
        assert ["one failure domain" in outcome.value[3] for outcome in outcomes] == [True, False], "once"
        for outcome in outcomes:
            _, skipped, _, warned = outcome.value
            assert skipped[:4] == [""] * 4
            assert all(skipped[4:])
            assert "no slots for checkpoints" in warned
            assert "has a memory budget of 14,000,000 bytes and needs" in warned
            assert "Start the holder with --memory-budget=" in warned
        again = run_ranks(_grows_on, hosts.sockets("ab"), 100, 0, world_size=2, timeout_seconds=60)
        assert [outcome.value[0] for outcome in again] == [4, 4], "the version before that stays"
