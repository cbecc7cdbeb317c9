"""Trainings whose processes, hosts and holders are killed: what is restored is bitwise what was, or nothing is."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from clocks import PATIENCE, wait_until
from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Disk, Storage, copier, cycle, records
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import HolderOptions, start_holder, stop_holder
from thinwire.checkpoint.state import coding
from thinwire.checkpoint.state.layout import StateLayout
from thinwire.errors import LostPeerError

pytestmark = pytest.mark.ranks

SECRET = "a secret of the tests, long enough"
STEPS, SLOW_SECONDS = 14, 0.05
CODED = CheckpointPolicy(compress="lossless")


@dataclass(frozen=True)
class Job:
    """One start of a training. ``sockets``: of the holder of each rank; ranks with the same one are on one host.

    ``paced``: it makes the steps that `Running.allow` allows, and ends with `Running.end`.
    """

    directory: str
    sockets: tuple[str, ...]
    name: str
    steps: int = STEPS
    step_seconds: float = SLOW_SECONDS
    width: int = 64
    attached: bool = False
    paced: bool = False
    storage: dict[str, Any] = field(default_factory=dict)
    policy: CheckpointPolicy = CheckpointPolicy()  # noqa: RUF009 (it is frozen)

    def path(self, rank: int, what: str) -> Path:
        return Path(self.directory) / f"{self.name}.{rank}.{what}"

    def may_make(self, step: int) -> bool:
        """Whether there is such a step; one that is not yet allowed is waited for."""
        if not self.paced:
            return step < self.steps
        allowed, end = self.path(0, "allowed"), self.path(0, "end")
        wait_for(lambda: end.exists() or (allowed.exists() and int(allowed.read_text()) > step))
        return not end.exists()


class Net(nn.Module):
    """With random numbers in the forward pass, and a buffer that changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all bits of parameters, buffers, moments, and what the next random numbers depend on."""
    states = [*model.state_dict().values()]
    states += [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    states += [torch.get_rng_state(), torch.tensor(random.getstate()[1])]
    text = b"".join(state.contiguous().numpy().tobytes() for state in states)
    return hashlib.sha256(text + repr(np.random.get_state()).encode()).hexdigest()


def trainer(job: Job, rank: int) -> None:
    """A rank: what it restored, how far it came, what it warned of and its parameters go to files."""
    os.environ["THINWIRE_SECRET"] = SECRET
    torch.set_num_threads(1)
    coding.LEAST_VALUES, coding.floats.is_compiled = 1, lambda: True
    store = f"file://{job.directory}/{job.name}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=len(job.sockets))
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)
    model = DistributedDataParallel(Net(job.width))
    synchronizer = thinwire.attach(model) if job.attached else None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    parts: dict[str, Any] = {"scheduler": scheduler, "synchronizer": synchronizer, "policy": job.policy}
    storage = Storage(**{"run_id": "run", "holder_socket": job.sockets[rank], **job.storage})
    with warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        try:
            checkpointer = stack.enter_context(Checkpointer(model, optimizer, storage=storage, **parts))
            first = checkpointer.restore()
        except (ValueError, thinwire.ThinwireError) as error:
            job.path(rank, "refused").write_text(f"{type(error).__name__}: {error}")
            return
        job.path(rank, "restored").write_text(f"{first}")
        job.path(rank, "restored_digest").write_text(digest(model, optimizer))
        for step in itertools.takewhile(job.may_make, itertools.count(first or 0)):
            x = torch.randn(6, 8) + random.random() + float(np.random.rand())
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            job.path(rank, f"digest.{step + 1}").write_text(digest(model, optimizer))
            checkpointer.step()
            job.path(rank, "step").write_text(f"{step + 1}")
            job.path(rank, "stats.new").write_text(repr(checkpointer.stats()))
            job.path(rank, "stats.new").rename(job.path(rank, "stats"))  # whole, wherever it is killed
            if job.paced and step + 1 == job.steps:
                torch.save([*model.state_dict().values()], job.path(rank, "parameters"))
            time.sleep(job.step_seconds)
        if not job.paced:
            torch.save([*model.state_dict().values()], job.path(rank, "parameters"))
        job.path(rank, "warned").write_text("\n".join(str(warning.message) for warning in caught))
        dist.barrier()


class Running:
    """The processes of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "thinwire.lab.testbed.launch"])
        self.processes: list[BaseProcess] = []
        for rank in range(len(job.sockets)):
            process = context.Process(target=trainer, args=(job, rank), daemon=True)
            process.start()
            self.processes.append(process)

    def reached(self) -> int:
        """The step that all ranks have reached."""
        return min(int(self.read(rank, "step") or 0) for rank in range(len(self.processes)))

    def read(self, rank: int, what: str) -> str:
        path = self.job.path(rank, what)
        return path.read_text() if path.exists() else ""

    def allow(self, steps: int) -> None:
        """Let a paced job make so many steps, and wait until it has."""
        new = self.job.path(0, "allowed.new")
        new.write_text(f"{steps}")
        new.rename(self.job.path(0, "allowed"))
        wait_for(lambda: self.reached() >= steps)

    def end(self) -> list[str]:
        """End a paced job that has made what was allowed, and return as `finish` does."""
        self.job.path(0, "end").touch()
        return self.finish()

    def stats(self, rank: int) -> dict[str, Any]:
        return eval(self.read(rank, "stats") or "{}", {"inf": float("inf")})

    def promised(self) -> int:
        """The step that a restore cannot fall behind, by what the ranks have said of what is at risk."""
        stats = [self.stats(rank) for rank in range(len(self.processes))]
        return max(int(each["checkpoint/steps"] - each["checkpoint/at_risk_steps"]) if each else 0 for each in stats)

    def kill(self, at: int) -> int:
        """SIGKILL to all of them at a step, with a version of this start that all have, or at the end; return the step.

        How many steps are at risk by then is up to the machine: a busy one copies, codes and sends for longer, and the
        governor makes fewer versions.
        """
        at, first = min(at, self.job.steps), int(self.read(0, "restored").replace("None", "0") or 0)
        wait_for(lambda: self.reached() == self.job.steps or (self.reached() >= at and self.promised() > first))
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        return self.reached()

    def finish(self) -> list[str]:
        """What each rank restored, or ``refused``."""
        for process in self.processes:
            process.join(90)
            assert process.exitcode == 0, f"rank ended with {process.exitcode}"
        return [self.read(rank, "restored") or "refused" for rank in range(len(self.processes))]

    def parameters(self) -> list[list[Tensor]]:
        return [torch.load(self.job.path(rank, "parameters")) for rank in range(len(self.processes))]


def wait_for(condition: Callable[[], Any], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.005)


@dataclass
class Hosts:
    """Emulated hosts, each with a holder."""

    directory: Path
    pids: dict[str, int] = field(default_factory=dict)

    def start(self, name: str) -> str:
        options = HolderOptions(socket=str(self.directory / name), memory_budget="60MB", drain_seconds=0.0)
        said = start_holder(options)
        self.pids[name] = said["pid"]
        return said["socket"]

    def lose(self, name: str) -> None:
        pid = self.pids.pop(name)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not alive(pid))

    def shard(self, name: str, owner: int) -> dict[str, Any]:
        """The status of a rank's shard at the holder of its host."""
        with HolderClient.connect(self.directory / name, SECRET.encode()) as client:
            shards = [shard for shard in client.holder_status()["shards"] if shard["role"] == "own"]
        return next(shard for shard in shards if shard["shard"]["owner"] == owner)

    def wait_until_sent(self, name: str) -> None:
        """With no trainer, a holder sends all that is complete."""

        def sent() -> bool:
            with HolderClient.connect(self.directory / name, SECRET.encode()) as client:
                shards = [shard for shard in client.holder_status()["shards"] if shard["role"] == "own"]
            return all(shard["newest_local"] == shard["newest_replicated"] for shard in shards)

        wait_for(sent)

    def job(self, name: str, *hosts: str, **options: Any) -> Running:
        sockets = tuple(str(self.directory / host) for host in hosts)
        return Running(Job(str(self.directory), sockets, name, **options))


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    made = Hosts(tmp_path)
    try:
        yield made
    finally:
        for name in list(made.pids):
            made.lose(name)
        for child in multiprocessing.active_children():
            child.kill()
            child.join()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[Tensor]]:
    """Parameters and buffers of both ranks of a training that nothing happens to."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THINWIRE_SECRET", SECRET)
        made = Hosts(directory)
        made.start("a")
        try:
            running = made.job("job", "a", "a", step_seconds=0.0, storage={"replicas": 1})
            assert running.finish() == ["None", "None"]
            return running.parameters()
        finally:
            made.lose("a")


def same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for rank, other in zip(found, expected, strict=True) for a, b in zip(rank, other, strict=True)
    )


@pytest.mark.parametrize(
    "kinds", [(None, None, None), pytest.param(("lossless", None, "lossless"), marks=pytest.mark.slow)]
)
def test_a_killed_training_goes_on_bitwise(
    hosts: Hosts, undisturbed: list[list[Tensor]], kinds: tuple[str | None, ...]
) -> None:
    """All trainers are killed twice, at whatever point; the second time they come back on the other host.

    No more is lost than the ranks said was at risk.
    """
    hosts.start("a"), hosts.start("b")
    first = hosts.job("first", "a", "b", policy=CheckpointPolicy(compress=kinds[0]))
    reached = first.kill(at=5)
    second = hosts.job("second", "a", "b", policy=CheckpointPolicy(compress=kinds[1]))
    second.kill(at=reached + 3)
    restored = [int(second.read(rank, "restored").replace("None", "0")) for rank in (0, 1)]
    assert restored[0] == restored[1] >= first.promised()
    third = hosts.job("third", "b", "a", policy=CheckpointPolicy(compress=kinds[2]))
    assert len(set(third.finish())) == 1
    assert int(third.read(0, "restored")) >= second.promised()
    assert same(third.parameters(), undisturbed)


def test_a_lost_host_is_restored_from_its_peer(hosts: Hosts, undisturbed: list[list[Tensor]]) -> None:
    """Also by another number of ranks; and what cannot be is refused or left alone: another model, another run."""
    hosts.start("a"), hosts.start("b")
    first = hosts.job("first", "a", "b")
    first.kill(at=6)
    hosts.wait_until_sent("b")
    hosts.lose("b")
    hosts.start("b")
    for name, places, options, reason in (
        ("wider", ("a", "b"), {"width": 65}, "Start as many ranks of the same model"),
        ("four", ("a", "b"), {"storage": {"replicas": 4}}, "4 replicas need 4 machines"),
    ):
        refused = hosts.job(name, *places, **options)
        assert refused.finish() == ["refused"] * len(places)
        assert reason in refused.read(0, "refused")
    assert hosts.job("other", "a", "b", steps=1, storage={"run_id": "other"}).finish() == ["None", "None"]
    more = hosts.job("more", "a", "b", "b", steps=1)
    steps = set(more.finish())
    assert len(steps) == 1
    for rank in (0, 1):  # and rank 2 has random numbers of its own
        assert more.read(rank, "restored_digest") == first.read(rank, f"digest.{next(iter(steps))}")
    again = hosts.job("again", "a", "b")
    restored = again.finish()
    assert restored[0] == restored[1]
    assert int(restored[0]) >= first.promised()
    assert same(again.parameters(), undisturbed)
    assert "'checkpoint/replicas': 2.0" in again.read(0, "stats")


def test_a_killed_holder_does_not_stop_training(hosts: Hosts, undisturbed: list[list[Tensor]]) -> None:
    """Nor does one that comes back at another address: checkpoints go on with it."""
    hosts.start("a"), hosts.start("b")
    running = hosts.job("job", "a", "b", paced=True)
    running.allow(3)
    hosts.lose("b")
    running.allow(6)
    hosts.start("b")
    running.allow(STEPS)
    more = itertools.count(STEPS + 1)  # it connects, registers and sends while steps are made
    while running.stats(0)["checkpoint/replicated_step"] <= 6:
        running.allow(next(more))
    assert running.end() == ["None", "None"]
    assert same(running.parameters(), undisturbed)
    assert "training goes on without checkpoints" in running.read(1, "warned")
    assert running.stats(0)["checkpoint/skipped"] >= 2


@pytest.mark.slow
def test_the_persistent_tier_is_read_when_the_memory_is_gone(hosts: Hosts, undisturbed: list[list[Tensor]]) -> None:
    """Bitwise too, in what differs between ranks; a checkpoint that is damaged gives way to the one before."""
    hosts.start("a")
    storage = {"replicas": 1, "disk": Disk(hosts.directory / "disk", every=0.01)}
    first = hosts.job("first", "a", "a", steps=9, storage=storage)
    assert first.finish() == ["None", "None"]
    hosts.lose("a")
    hosts.start("a")
    older, newest = sorted((hosts.directory / "disk").glob("step-*"))
    next(newest.glob("*.distcp")).unlink()
    step = str(int(older.name.removeprefix("step-")))
    more = hosts.job("more", "a", "a", "a", steps=1, storage=storage)
    assert more.finish() == [step] * 3
    assert more.read(0, "restored_digest") == first.read(0, f"digest.{step}")
    refused = hosts.job("wider", "a", "a", width=65, storage=storage)
    assert refused.finish() == ["refused"] * 2
    told = r"of another model: it has (\d+) tensors of the model, and this model \1; model\..* was .*64.* and is .*65"
    assert re.search(told, refused.read(0, "refused"))
    again = hosts.job("again", "a", "a", storage=storage)
    assert again.finish() == [step] * 2
    assert same(again.parameters(), undisturbed)


@pytest.mark.slow
def test_ranks_of_a_host_with_thinwire_attached(hosts: Hosts) -> None:
    """Four ranks on two hosts, and bytes go in the gaps of the lane."""
    hosts.start("a"), hosts.start("b")
    options: dict[str, Any] = {"attached": True, "steps": 40, "step_seconds": 0.02}
    first = hosts.job("first", "a", "a", "b", "b", **options)
    first.kill(at=26)
    stats = first.stats(0)
    assert "idle timespans" in stats["checkpoint/grants"]
    assert 0 < stats["checkpoint/idle_seconds"] <= stats["checkpoint/iteration_seconds"]
    # A slot is written again when all peers have what is in it, so each version but that which is on its way was sent.
    (size,) = {version["payload_bytes"] for version in hosts.shard("a", owner=0)["versions"]}
    gone = stats["checkpoint/bytes_sent"] + stats["checkpoint/bytes_unchanged"]
    assert gone >= (stats["checkpoint/versions"] - 2) * size > 0
    hosts.wait_until_sent("b")
    hosts.lose("b")
    hosts.start("b")
    again = hosts.job("again", "a", "a", "b", "b", **{**options, "steps": 28})
    steps = again.finish()
    assert len(set(steps)) == 1
    assert int(steps[0]) >= first.promised()
    for rank in range(4):  # not of later steps: DDP sums in another order until it has rebuilt its buckets
        assert again.read(rank, "restored_digest") == first.read(rank, f"digest.{steps[0]}") != ""


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_limit_of_age_raises_and_nothing_else_does(hosts: Hosts) -> None:
    model = nn.Linear(3, 3)
    with Checkpointer(
        model, policy=CheckpointPolicy(max_age_steps=3), storage=Storage("run", 1, holder_socket=hosts.start("a"))
    ) as checkpointer:
        assert checkpointer.restore() is None
        assert repr(checkpointer) == "<Checkpointer of run 'run', rank 0: 0 steps, no step that all ranks have>"
        for step in range(1, 6):
            checkpointer.step()
            wait_until(lambda: f"rank 0: {step} steps, all ranks have step {step}>" in repr(checkpointer))  # noqa: B023
        assert [record.skipped for record in checkpointer.records()] == [""] * 5
        hosts.lose("a")
        with pytest.warns(UserWarning, match="training goes on without checkpoints"):
            checkpointer.step()

        def go_on() -> None:
            for _ in range(5):
                checkpointer.step()

        with pytest.raises(thinwire.ThinwireError, match=r"4 steps old, and max_age_steps is 3: .*holder"):
            go_on()


@pytest.mark.usefixtures("alone")
def test_a_step_after_the_end_is_refused(hosts: Hosts) -> None:
    """As of a loop that goes on behind the block: the second one waited for a thread that had ended, for ever."""
    with Checkpointer(nn.Linear(3, 3), storage=Storage("run", 1, holder_socket=hosts.start("a"))) as checkpointer:
        checkpointer.restore()
        checkpointer.step()
    with pytest.raises(ValueError, match="this Checkpointer is closed"):
        checkpointer.step()


@pytest.mark.usefixtures("alone")
def test_why_a_holder_that_is_there_cannot_be_used_is_said(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to be gone."""
    storage = Storage("run", 1, holder_socket=hosts.start("a"))
    with Checkpointer(nn.Linear(3, 3), storage=storage) as checkpointer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointer.restore()
        checkpointer.step()
        hosts.lose("a")
        with monkeypatch.context() as patch:
            patch.setenv("THINWIRE_SECRET", "another secret of that length")
            hosts.start("a")
        wait_for(lambda: checkpointer.step() or "another secret" in checkpointer.records()[-1].skipped)
    assert any("no checkpoints: " in str(each.message) and "another secret" in str(each.message) for each in caught)
    with pytest.raises(ValueError, match="another secret"):
        checkpointer._registration._hello(1, 1, [])


@pytest.mark.usefixtures("alone")
def test_old_checkpoints_are_warned_of_without_being_asked_for(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(records.AgeAlarm.__init__, "__defaults__", (lambda: now,))
    with Checkpointer(nn.Linear(3, 3), storage=Storage("run", 1, holder_socket=hosts.start("a"))) as checkpointer:
        checkpointer.restore()
        checkpointer.step()
        hosts.lose("a")
        with pytest.warns(UserWarning, match="training goes on without checkpoints"):
            checkpointer.step()
        for _ in range(20):
            checkpointer.step()
        now += 61
        with pytest.warns(UserWarning, match=r"2\d steps and 61 s old: the holder of this host is gone"):
            checkpointer.step()
        checkpointer.step()


class Whole:
    """A training with every part that a checkpoint takes, on one rank, with a model that is copied beside it."""

    def __init__(self, seed: int) -> None:
        for each in (torch.manual_seed, random.seed, np.random.seed):
            each(seed)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(160, 160), nn.Dropout(0.2), nn.Linear(160, 1)))
        self.synchronizer = thinwire.attach(self.model, dense=thinwire.compress.top_k(0.1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.data = Position()

    def checkpointer(self, socket: str) -> Checkpointer:
        parts = {name: getattr(self, name) for name in ("scheduler", "scaler", "synchronizer", "data")}
        return Checkpointer(self.model, self.optimizer, **parts, storage=Storage("run", 1, holder_socket=socket))

    def train(self, steps: int, checkpointer: Checkpointer | None = None) -> list[float]:
        losses = []
        for _ in range(steps):
            self.data.taken += 1
            x = torch.randn(4, 160) + self.data.taken + random.random() + float(np.random.rand())
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            losses.append(loss.item())
            if checkpointer is not None:
                checkpointer.step()
                assert checkpointer.flush(20)
        return losses


@dataclass
class Position:
    """In the data."""

    taken: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


@pytest.mark.usefixtures("alone")
def test_every_part_of_a_training_goes_on_bitwise(hosts: Hosts) -> None:
    """Also memories of compressors, and however much is copied beside the training."""
    socket = hosts.start("a")
    first = Whole(seed=1)
    with first.checkpointer(socket) as checkpointer:
        assert checkpointer.restore() is None
        first.train(5, checkpointer)
        assert [record.skipped for record in checkpointer.records()] == [""] * 5
    expected = first.train(3)
    again = Whole(seed=2)
    again.train(1)
    with again.checkpointer(socket) as checkpointer:
        assert checkpointer.restore() == 5
    error = "0.weight"
    assert again.synchronizer.state_dict()["compress"]["states"][error]["error"].count_nonzero() > 0
    assert again.train(3) == expected
    assert (again.scaler.get_scale(), again.data.taken) == (first.scaler.get_scale(), 8)
    assert again.scheduler.state_dict() == first.scheduler.state_dict()
    for training in (first, again):
        training.synchronizer.detach()


@pytest.mark.usefixtures("alone")
def test_parameters_that_change_while_they_are_copied_make_no_version(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is dropped, and from then on copies are made before step returns."""
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copying, written, real = threading.Event(), threading.Event(), copier._bytes

    def slow(source: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            copying.set()
            assert written.wait(PATIENCE)
        return real(source)

    storage = Storage("run", replicas=1, holder_socket=hosts.start("a"))
    with Checkpointer(model, optimizer, storage=storage) as checkpointer:
        checkpointer.restore()
        with monkeypatch.context() as patch:
            patch.setattr(copier, "_bytes", slow)
            checkpointer.step()
            assert copying.wait(PATIENCE)
            with torch.no_grad():
                model.weight.add_(1)
            written.set()
            with pytest.warns(UserWarning, match="from now on step waits"):
                checkpointer.step()
        for _ in range(2):
            expected = model.weight.detach().clone()
            checkpointer.step()
            with torch.no_grad():
                model.weight.add_(1)
            assert checkpointer.flush(20)
        reasons = [record.skipped for record in checkpointer.records()]
        assert ["written to" in reason for reason in reasons] == [True, False, False, False]
    with Checkpointer(model, optimizer, storage=storage) as checkpointer:
        assert checkpointer.restore() == 4
        assert torch.equal(model.weight, expected)


@pytest.mark.usefixtures("alone")
def test_the_optimizer_waits_until_its_parameters_are_copied(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    storage = Storage("run", replicas=1, holder_socket=hosts.start("a"))
    real = copier._bytes
    with Checkpointer(model, optimizer, storage=storage) as checkpointer:
        checkpointer.restore()
        monkeypatch.setattr(copier, "_bytes", lambda source: (time.sleep(0.1), real(source))[1])
        expected = model.weight.detach().clone()
        checkpointer.step()
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        assert not torch.equal(model.weight, expected)
        assert checkpointer.flush(20)
        (record,) = checkpointer.records()
        assert record.skipped == ""
        assert record.blocking_seconds > 0.05, "the optimizer waited, and that counts"
    with Checkpointer(model, optimizer, storage=storage) as checkpointer:
        assert checkpointer.restore() == 1
        assert torch.equal(model.weight, expected)


@pytest.mark.usefixtures("alone")
def test_nothing_waits_until_a_version_is_coded(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on and skips checkpoints meanwhile; what becomes a version is the state of its step."""
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    go_on, real = threading.Event(), cycle.pack
    monkeypatch.setattr(coding.floats, "is_compiled", lambda: True)

    def slow(*args: Any) -> Any:
        assert go_on.wait(20)
        return real(*args)

    storage = Storage("run", replicas=1, holder_socket=hosts.start("a"))
    with Checkpointer(model, optimizer, policy=CODED, storage=storage) as checkpointer:
        checkpointer.restore()
        monkeypatch.setattr(cycle, "pack", slow)
        kept = []
        for _ in range(4):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            kept.append(model.weight.detach().clone())
            checkpointer.step()
        assert [record.skipped for record in checkpointer.records()] == [
            "",
            *["the last version is still being coded"] * 3,
        ]
        with HolderClient.connect(storage.holder_socket or "", SECRET.encode()) as client:
            assert client.inventory("run") == []
            go_on.set()
            assert checkpointer.flush(20)
            (version,) = client.inventory("run")
            with client.open(version) as reader:
                layout = StateLayout.from_bytes(reader.layout)
                tensors = zip(layout.slices, coding.tensors_of(layout, reader.payload), strict=True)
                (weight,) = [tensor for where, tensor in tensors if where.path == "model.weight"]
            assert version.step == 1
            assert torch.equal(weight, kept[0])
            checkpointer.step()
            assert checkpointer.flush(20)
        stats = checkpointer.stats()
        assert 0 < stats["checkpoint/coded_bytes"] <= stats["checkpoint/bytes"]
        assert stats["checkpoint/coding_seconds"] > 0
        assert [record.skipped == "" for record in checkpointer.records()] == [True, False, False, False, True]
    with Checkpointer(model, optimizer, storage=storage) as checkpointer:
        assert checkpointer.restore() == 5
        assert torch.equal(model.weight, kept[-1])


@pytest.mark.usefixtures("alone")
def test_versions_are_not_coded_until_that_is_fast(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain code takes minutes for a gigabyte; as soon as the compiled one is there, versions are coded."""
    model, are_there = nn.Linear(300, 300), []
    monkeypatch.setattr(coding.floats, "is_compiled", lambda: bool(are_there))
    storage = Storage("run", replicas=1, holder_socket=hosts.start("a"))
    with Checkpointer(model, policy=CODED, storage=storage) as checkpointer:
        checkpointer.restore()
        sizes = []
        for step in range(5):
            if step == 2:
                are_there.append(True)
            checkpointer.step()
            assert checkpointer.flush(20)
            sizes.append(checkpointer.stats()["checkpoint/coded_bytes"])
    assert sizes[0] == sizes[1] == checkpointer.stats()["checkpoint/bytes"] > sizes[-1]
    with Checkpointer(other := nn.Linear(300, 300), storage=storage) as checkpointer:
        assert checkpointer.restore() == 5
        assert torch.equal(other.weight, model.weight)


@pytest.mark.usefixtures("alone")
def test_a_code_that_fails_costs_a_version(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    monkeypatch.setattr(coding.floats, "is_compiled", lambda: True)

    def fail(*_: object) -> Any:
        raise MemoryError("none left")

    storage = Storage("run", replicas=1, holder_socket=hosts.start("a"))
    with Checkpointer(model, optimizer, policy=CODED, storage=storage) as checkpointer:
        checkpointer.restore()
        with monkeypatch.context() as patch:
            patch.setattr(coding.floats, "encode", fail)
            checkpointer.step()
            assert checkpointer.flush(20)
        with pytest.warns(UserWarning, match="step 1 is missing: it was not coded: MemoryError: none left"):
            checkpointer.step()
        assert checkpointer.flush(20)
        assert ["not coded" in record.skipped for record in checkpointer.records()] == [True, False]
    with monkeypatch.context() as patch, Checkpointer(model, optimizer, storage=storage) as checkpointer:
        patch.setattr(coding.zlib, "crc32", lambda data: 0)  # as if other bits had been decoded
        with pytest.raises((ValueError, thinwire.ThinwireError)):
            checkpointer.restore()


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_is_refused_at_once(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv("THINWIRE_RUN_ID", raising=False)
    socket = str(hosts.directory / "nobody")
    for made, options, reason in (
        (CheckpointPolicy, {"every": 0}, "every=0"),
        (CheckpointPolicy, {"compress": "zip"}, "compress='zip': it is 'lossless' or None"),
        (CheckpointPolicy, {"on_divergence": "stop"}, "on_divergence='stop'"),
        (Disk, {"directory": "", "every": "soon"}, "not a time"),
        (Disk, {"directory": "", "keep": 0}, "keep=0"),
    ):
        with pytest.raises(ValueError, match=reason):
            made(**options)  # type: ignore[arg-type]
    for options, reason in (
        ({"run_id": None}, "a run needs a name"),
        ({}, "no holder at"),
        ({"holder_socket": hosts.start("a"), "replicas": 0}, "at least one copy"),
    ):
        with pytest.raises(ValueError, match=reason):
            Checkpointer(
                nn.Linear(3, 3),
                storage=Storage(**{"run_id": "run", "holder_socket": socket, "replicas": 1, **options}),
            )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_survives(tmp_path: Path) -> None:
    """torchrun starts the killed workers anew, and they start the holder themselves."""
    example = Path(__file__).parents[2] / "examples" / "survive_kill.py"
    socket = tmp_path / "holder.sock"
    variables = {"THINWIRE_HOLDER": str(socket), "THINWIRE_RUN_ID": "demo", "THINWIRE_SECRET": SECRET}
    variables |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # torchrun picks a port for the workers' store seconds before a worker opens it: on a busy machine somebody else may
    # have it by then, and torchrun starts the workers once more.
    command += ["--max-restarts", "3", str(example), "--steps", "20", "--kill-at", "12"]
    try:
        ended = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=500, check=False
        )
    finally:
        with contextlib.suppress(LostPeerError), HolderClient.connect(socket, SECRET.encode()) as client:
            stop_holder(client)
    assert ended.returncode == 0, ended.stderr
    starts = re.findall(r"starts at step (\d+)", ended.stdout)
    assert starts[0] == "0"
    assert 0 < int(starts[1]) <= 12, "a busy host skips versions, and never restarts from nothing"
    assert "step 20: loss" in ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_survives_the_loss_of_a_host() -> None:
    example = Path(__file__).parents[2] / "examples" / "survive_host_loss.py"
    command = [sys.executable, str(example), "--hosts", "2", "--steps", "40", "--lose-at", "12"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr
    starts = [int(step) for step in re.findall(r"starts at step (\d+)", ended.stdout)]
    safe = int(re.findall(r"step (\d+) is on another host", ended.stdout)[0])
    assert starts[0] == 0
    assert 0 < safe <= starts[1] <= 40, "how many steps are at risk is up to the machine, and is said"
    assert "step 40: loss" in ended.stdout or starts[1] == 40
