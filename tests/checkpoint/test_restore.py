"""What a restart may take, must refuse, or gives up when told to; the directory on a disk; and the end of a process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from clocks import wait_until
from holders import SECRET, running_holders
from tests.checkpoint.common.restored import keeper, on_disk
from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Disk, Storage
from thinwire.checkpoint.dcp.tier import PersistentTier
from thinwire.checkpoint.group import private_group, restart_hint
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import HolderOptions, KnownRun, RunMarker, start_holder, stop_holder
from thinwire.checkpoint.holder.version import NONCE_BITS
from thinwire.checkpoint.records import Notices
from thinwire.errors import ThinwireError
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Of the holders of three hosts."""
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with running_holders(tmp_path, "20MB", "abc") as made:
        yield made


def restart(socket: str, memory_budget: str = "20MB") -> None:
    """The host loses its memory."""
    with HolderClient.connect(socket, SECRET.encode()) as client:
        stop_holder(client)
    start_holder(HolderOptions(socket=socket, memory_budget=memory_budget, drain_seconds=0.0))


def train(
    context: RankContext,
    sockets: list[str],
    steps: int,
    restore: dict[str, Any] | None,
    every: int,
    options: dict[str, Any],
) -> tuple[Any, str, list[float]]:
    """One start: what was restored, or the error; what was warned of; and the weights at the end."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    torch.manual_seed(1)
    model = nn.Linear(40, 30)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        socket = sockets[context.rank]
        storage, policy = Storage("run", holder_socket=socket, **options), CheckpointPolicy(every=every)
        with Checkpointer(model, optimizer, storage=storage, policy=policy) as checkpointer:
            try:
                restored = None if restore is None else checkpointer.restore(**restore)
                for step in range(restored or 0, (restored or 0) + steps):
                    optimizer.zero_grad()
                    model(torch.full((2, 40), 1.0 + step)).square().mean().backward()
                    optimizer.step()
                    checkpointer.step()
                    assert checkpointer.flush(20) or (step + 1) % every
                    # there is no version while one is copied for the disk, however long that takes
                    wait_until(lambda: checkpointer._tier is None or not checkpointer._tier.obstacle)
            except (ValueError, ThinwireError) as error:
                restored = f"{type(error).__name__}: {error}"
        texts = "\n".join(str(warning.message) for warning in caught)
        return restored, texts, model.weight.detach().flatten().tolist()


def start(
    sockets: list[str], steps: int, restore: dict[str, Any] | None = None, every: int = 1, **options: Any
) -> tuple[Any, str, list[float]]:
    """All ranks restore the same, or refuse for the same reason; the warnings are those of rank 0."""
    restore = {} if restore is None else restore
    outcomes = run_ranks(
        train, sockets, steps, None if restore == {"never": True} else restore, every, options,
        world_size=len(sockets), timeout_seconds=60,
    )  # fmt: skip
    found = [outcome.value for outcome in outcomes]
    assert len({str(restored) for restored, _, _ in found}) == 1, found
    return found[0]


def steps_at(socket: str) -> set[tuple[int, int]]:
    """Owner and step of all versions; what owners have in common is there too."""
    with HolderClient.connect(socket, SECRET.encode()) as client:
        listed = {(version.shard.owner, version.step) for version in client.inventory("run")}
    own = {(owner, step) for owner, step in listed if owner >= 0}
    assert {step for _, step in own} <= {step for _, step in listed - own}
    return own


def address_of(socket: str) -> str:
    with HolderClient.connect(socket, SECRET.encode()) as client:
        return str(client.holder_status()["address"])


@pytest.mark.slow
def test_what_other_hosts_can_bring_back_is_not_overwritten_unasked(sockets: list[str]) -> None:
    """Host a has shard 0, and b shard 1; the job starts again on c and b, while a is away."""
    a, b, c = sockets
    start([a, b], 8, replicas=1)
    refused, _, _ = start([a, b], 3, {"never": True}, replicas=1)
    assert "has a checkpoint of step 8, which the first step would overwrite: call restore()" in refused
    kept, gone = steps_at(b), address_of(a)
    assert (1, 8) in kept, "and mostly the one before, if that was not left out"
    restart(a)
    for restore in ({}, {"never": True}):  # a first step without a restore overwrites as well
        refused, _, _ = start([c, b], 3, restore, replicas=1)
        assert refused.startswith("ValueError: no checkpoint of run 'run' can be restored: step 8")
        for said in (
            "nobody has a copy of shard 0",
            f"Asked outside of it: {gone} did not answer (",
            "restore(fresh=True)",
        ):
            assert said in refused
    assert steps_at(b) == kept
    restored, warned, _ = start([c, b], 1, {"fresh": True}, replicas=1)
    assert restored is None
    assert re.search("starts over, and gives up its steps ([67], )?8", warned)
    assert steps_at(b) == {(1, 1)}, "what was given up is freed"


def restore_and_wait(context: RankContext, sockets: list[str]) -> tuple[int | None, int | None]:
    """What was restored, and the newest step of this rank that its replica has, soon, before any step."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    model = nn.Linear(40, 30)
    storage = Storage("run", holder_socket=sockets[context.rank])
    with Checkpointer(model, torch.optim.Adam(model.parameters()), storage=storage) as checkpointer:
        restored, deadline = checkpointer.restore(), time.monotonic() + 20
        client = checkpointer._registration.client
        assert client is not None
        while (newest := client.status()["newest_replicated"]) != restored and time.monotonic() < deadline:
            time.sleep(0.01)
        return restored, newest


@pytest.mark.slow
def test_copies_are_there_again_before_the_first_step_after_a_lost_host(sockets: list[str]) -> None:
    """Until then a second loss would cost them; and the first step may take minutes, to compile or to load data."""
    a, b, _ = sockets
    start([a, b], 4)
    restart(b)
    outcomes = run_ranks(restore_and_wait, [a, b], world_size=2, timeout_seconds=60)
    assert [outcome.value for outcome in outcomes] == [(4, 4), (4, 4)]


@pytest.mark.slow
def test_a_holder_outside_of_the_job_sends_what_the_job_lacks(sockets: list[str]) -> None:
    """Host a has shard 0, and b shard 1; the job starts again on c and b, where a is named by the layout of b."""
    a, b, c = sockets
    _, _, trained = start([a, b], 8, replicas=1)
    kept = steps_at(a)
    refused, _, _ = start([c, b], 1, {"never": True}, replicas=1)
    assert "has a checkpoint of step 8, which the first step would overwrite" in refused
    restored, warned, weights = start([c, b], 0, replicas=1)
    assert (restored, warned, weights) == (8, "", trained)
    assert (0, 8) in steps_at(c)
    assert steps_at(a) == kept, "it sends, and becomes no part of the job"
    start([a, b], 0, {"fresh": True}, replicas=1)
    start([c, b], 0, {"fresh": True}, replicas=1)
    assert start([c, b], 0, replicas=1)[0] is None


@pytest.mark.slow
def test_the_hosts_that_stand_by_are_asked_where_nobody_here_knows_the_run(
    sockets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the state of another number of ranks. What a fresh start gave up is not asked for again."""
    a, b, c = sockets
    _, _, trained = start([a, b], 4, replicas=1)
    monkeypatch.setenv("THINWIRE_STANDBYS", f"{address_of(a)} {address_of(b)} no-address")
    restored, _, weights = start([c], 0, replicas=1)
    assert (restored, weights) == (4, trained)
    restored, warned, _ = start([c], 0, {"fresh": True}, replicas=1)
    assert "gives up its steps" in warned
    assert start([c], 1, replicas=1)[0] is None


@pytest.mark.slow
def test_two_trainings_of_one_name_that_never_met_are_said(sockets: list[str]) -> None:
    """A host that took part in one of them is given the state of the other: once, with the hosts of both."""
    a, _, c = sockets
    start([a], 5, replicas=1)
    start([c], 8, replicas=1)
    addresses = []
    for socket in (a, c):
        with HolderClient.connect(socket, SECRET.encode()) as client:
            addresses.append(str(client.holder_status()["address"]))
    restored, warned, _ = start([a, c], 4, replicas=1)
    assert restored == 8
    assert f"holder {addresses[0]} keeps another training of the name 'run'" in warned
    assert f"the restored one was kept at {addresses[1]}" in warned
    assert start([a, c], 0, replicas=1)[1] == "", "from then on both are one training"


def test_a_known_run_that_nobody_has_does_not_start_anew_in_silence(
    sockets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hosts were started again, and the directory on the disk is not mounted: it is there, and empty. Or the hosts
    are others, and the disk has no checkpoint yet."""
    options = {"replicas": 1, "disk": Disk(tmp_path / "disk", every="1d")}
    assert start(sockets[:1], 6, **options)[:2] == (None, ""), "the first start of a run is none"
    restart(sockets[0])
    here, disk = RunMarker(Path(sockets[0]), "run", tmp_path / "disk").paths
    for path, other in ((here, disk), (disk, here)):
        os.rename(path, tmp_path / "kept")
        refused, _, _ = start(sockets[:1], 1, **options)
        assert "it had reached step " in refused, f"which {other} says"
        os.rename(tmp_path / "kept", path)
    rarely, _, _ = start(sockets[:1], 1, every=10, **options)
    assert "it had reached step " in rarely, "however often versions are made from now on"
    refused, _, _ = start(sockets[:1], 1, **options)
    for said in ("it had reached step ", f"none in {tmp_path}/disk: is it mounted?", "restore(fresh=True)"):
        assert said in refused
    assert start(sockets[:1], 1, {"fresh": True}, **options)[0] is None
    assert start(sockets[:1], 0, **options)[0] == 1, "which is the same run from then on"


def test_a_host_that_cannot_remember_a_run_says_so(sockets: list[str]) -> None:
    path = RunMarker(Path(sockets[0]), "run").paths[0]
    path.mkdir()
    assert (
        f"cannot remember run 'run', so a restart that gets nothing of it would start over in silence: {path}"
        in (start(sockets[:1], 4, replicas=1)[1])
    )


def test_a_restart_that_finds_nothing_says_so(sockets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that died together with the workers at the beginning leaves nothing that would tell of the run."""
    assert start(sockets[:1], 2, replicas=1)[:2] == (None, ""), "the first start of a run is none"
    restart(sockets[0])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    restored, warned, _ = start(sockets[:1], 1, replicas=1)
    assert restored is None
    assert "the workers were started again, and nobody has a checkpoint of run 'run'" in warned


@pytest.mark.slow
def test_a_step_of_choice(sockets: list[str]) -> None:
    """The one before the newest; others are refused with those that exist. Then it is the newest."""
    hosts = sockets[:2]
    _, _, six = start(hosts, 6, every=2)
    start(hosts, 2, every=2)
    refused, _, _ = start(hosts, 0, {"step": 3})
    assert "run 'run' has no step 3 to restore; it has 6, 8" in refused
    restored, _, weights = start(hosts, 0, {"step": 6})
    assert (restored, weights) == (6, six)
    refused, _, _ = start(hosts, 0, {"step": 6, "fresh": True})
    assert "pass one of them" in refused
    assert start(hosts, 2)[0] in (6, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "every", "begins"),
    [
        pytest.param(1, 1, True, marks=pytest.mark.slow),
        (2, 1, True),
        pytest.param(6, 3, True, marks=pytest.mark.slow),
        (3, 1, False),
    ],
)
def test_a_run_that_died_at_its_beginning_starts_anew(sockets: list[str], steps: int, every: int, begins: bool) -> None:
    """Shard 1 is nowhere. With a third version, steps were lost that a crash does not cost."""
    hosts = sockets[:2]
    start(hosts, steps, replicas=1, every=every)
    restart(hosts[1])
    restored, warned, _ = start(hosts, 1, replicas=1, every=every)
    if begins:
        assert restored is None
        assert "It was at its beginning, so training starts over" in warned
        assert steps_at(hosts[0]) == ({(0, 1)} if every == 1 else set())
    else:
        assert "nobody has a copy of shard 1" in restored


@pytest.mark.slow
def test_older_steps_than_a_crash_costs_are_said(sockets: list[str], tmp_path: Path) -> None:
    """The disk has step 1, the memory lost step 9 with host b."""
    hosts, options = sockets[:2], {"replicas": 1, "disk": Disk(tmp_path / "disk", every="1d")}
    os.makedirs(tmp_path / "disk")
    (tmp_path / "disk" / "run").touch()
    os.utime(tmp_path / "disk" / "run", (1.0, 1.0))  # due at once, and not again today
    start(hosts, 9, **options)
    restart(hosts[1])
    restored, warned, _ = start(hosts, 0, **options)
    assert restored <= 3
    assert re.search(r"newer ones are given up, steps (\d+, )*[89]: .*nobody has a copy of shard 1", warned)


def _loses_its_connection(context: RankContext, sockets: list[str], disk: Disk) -> tuple[Any, str]:
    """Rank 1 loses the connection to its holder as it begins to load."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    torch.manual_seed(1)
    model = nn.Linear(40, 30)
    storage = Storage("run", holder_socket=sockets[context.rank], disk=disk)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        with Checkpointer(model, torch.optim.Adam(model.parameters(), lr=0.01), storage=storage) as checkpointer:
            restorer = checkpointer._restorer
            load, lost = restorer._load, [context.rank == 1]

            def lose_and_load(candidate: Any) -> str:
                if lost[0] and restorer._registration.client is not None:
                    lost[0] = False
                    restorer._registration.client.close()
                return load(candidate)

            patch.setattr(restorer, "_load", lose_and_load)
            return checkpointer.restore(), "\n".join(str(warning.message) for warning in caught)


@pytest.mark.slow
def test_a_lost_connection_in_a_restore_is_no_reason_to_go_back_to_the_disk(sockets: list[str], tmp_path: Path) -> None:
    hosts, options = sockets[:2], {"disk": Disk(tmp_path / "disk", every="1d")}
    os.makedirs(tmp_path / "disk")
    (tmp_path / "disk" / "run").touch()
    os.utime(tmp_path / "disk" / "run", (1.0, 1.0))  # due at once, and not again today
    start(hosts, 9, **options)
    assert min(on_disk(tmp_path / "disk")) <= 3
    found = run_ranks(_loses_its_connection, hosts, options["disk"], world_size=2, timeout_seconds=60)
    assert [outcome.value[0] for outcome in found] == [9, 9], found[0].value[1]


# --- the directory on a disk


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_that_was_about_to_be_replaced_when_the_job_was_killed_is_there(
    socket: str, tmp_path: Path
) -> None:
    """Of a step that is trained once more: between two renames neither has its name."""
    with keeper(socket, tmp_path / "disk") as checkpointer:
        checkpointer.restore()
        checkpointer.step()
        checkpointer.persist_now()
    (name,) = (tmp_path / "disk").glob("step-????????")
    name.rename(name.with_name(name.name + ".replaced"))
    with HolderClient.connect(socket, SECRET.encode()) as client:
        client.forget("run")
    with keeper(socket, tmp_path / "disk") as checkpointer:
        assert checkpointer.restore() == 1
    assert on_disk(tmp_path / "disk") == [1]


def step_until(checkpointer: Checkpointer, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        checkpointer.step()
        time.sleep(0.005)


@pytest.mark.usefixtures("alone")
def test_what_was_given_up_while_a_host_was_away_stays_given_up(socket: str, tmp_path: Path) -> None:
    """A fresh start elsewhere is remembered here, and nothing of it is left: new versions come after it."""
    known = KnownRun(attempt=3 << NONCE_BITS)
    for fresh in (None, known):
        if fresh is not None:
            RunMarker(Path(socket), "run").write(fresh)
        with Checkpointer(nn.Linear(9, 9), storage=Storage("run", replicas=1, holder_socket=socket)) as checkpointer:
            assert checkpointer.restore() is None
            for _ in range(2):
                checkpointer.step()
                assert checkpointer.flush(20)
    with HolderClient.connect(socket, SECRET.encode()) as client:
        newest = max(client.inventory("run"), key=lambda version: version.attempt)
    assert not known.has_given_up(newest.attempt)
    with Checkpointer(nn.Linear(9, 9), storage=Storage("run", replicas=1, holder_socket=socket)) as checkpointer:
        assert checkpointer.restore() == 2


@pytest.mark.usefixtures("alone")
def test_the_interval_is_that_of_the_run(socket: str, tmp_path: Path) -> None:
    """A start that is younger than the interval saves, once the run or its newest checkpoint is old enough."""
    directory = tmp_path / "disk"
    with keeper(socket, directory) as checkpointer:
        assert checkpointer.restore() is None
        for _ in range(5):
            checkpointer.step()
    assert on_disk(directory) == []
    os.utime(directory / "run", (time.time() - 90_000,) * 2)
    with keeper(socket, directory) as checkpointer:
        checkpointer.restore()
        step_until(checkpointer, lambda: on_disk(directory))
        (first,) = on_disk(directory)
        for _ in range(5):
            checkpointer.step()
    assert on_disk(directory) == [first]
    os.utime(directory / f"step-{first:08d}", (time.time() - 90_000,) * 2)
    with keeper(socket, directory) as checkpointer:
        checkpointer.restore()
        step_until(checkpointer, lambda: len(on_disk(directory)) == 2)


@pytest.mark.usefixtures("alone")
def test_a_budget_that_can_never_hold_a_version_is_refused_at_the_first_step(socket: str) -> None:
    with Checkpointer(nn.Linear(1000, 2500), storage=Storage("run", replicas=1, holder_socket=socket)) as checkpointer:
        checkpointer.restore()
        words = (
            r"there can be no checkpoints: the holder at .* has a memory budget of 20,000,000 bytes and needs ([\d,]+),"
            r" which is 2 slots for each of the 1 shards .*for the 0 bytes that its ranks have in common.* 16,384 for"
        )
        with pytest.raises(ValueError, match=words) as caught:
            checkpointer.step()
    needed = int(re.search(r"--memory-budget=(\d+) or more", str(caught.value))[1])
    storage = Storage("run", replicas=1, holder_socket=socket)
    restart(socket, str(needed - 1))
    with (
        Checkpointer(nn.Linear(1000, 2500), storage=storage) as checkpointer,
        pytest.raises(ValueError, match=f"{needed:,}"),
    ):
        checkpointer.step()
    restart(socket, str(needed))
    with Checkpointer(nn.Linear(1000, 2500), storage=storage) as checkpointer:
        checkpointer.step()
        assert checkpointer.flush()
        assert checkpointer.stats()["checkpoint/versions"] == 1.0


@pytest.mark.usefixtures("alone")
def test_a_name_that_torchrun_makes_up_at_each_start_is_that_of_no_run(socket: str, tmp_path: Path) -> None:
    """A job of `torchrun --standalone` goes on from its disk, as it always did."""
    for step in range(3):
        with keeper(socket, tmp_path / "disk", run=str(uuid.uuid4())) as checkpointer:
            assert checkpointer.restore() == (step or None)
            checkpointer.step()
            checkpointer.persist_now()


def saves_with_a_limit(context: RankContext, socket: str, directory: str) -> list[str]:
    """The files of rank 1 must not exceed 20 kB, which its part does; then they may."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    told = []
    torch.manual_seed(context.rank)  # different weights: each rank writes its own
    with Checkpointer(
        nn.Linear(90, 90), storage=Storage("run", 1, Disk(directory, every="1d"), socket)
    ) as checkpointer:
        checkpointer.restore()
        checkpointer.step()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for limit in (20_000, limits[0]):
            if context.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            try:
                checkpointer.persist_now()
                told.append("saved")
            except ThinwireError as error:
                told.append(str(error))
            dist.barrier()
            told.append(" ".join(sorted(os.listdir(directory))))
            dist.barrier()
    return told


def test_an_error_of_the_system_on_one_rank_is_said_by_name_on_all(socket: str, tmp_path: Path) -> None:
    """With what is needed and what is free; and no half-written directory stays."""
    outcomes = run_ranks(saves_with_a_limit, socket, str(tmp_path / "disk"), world_size=2, timeout_seconds=60)
    for outcome in outcomes:
        failed, left, saved, there = outcome.value
        assert f"rank 1: {errno.errorcode[errno.EFBIG]}" in failed
        assert re.search(r"about [\d,]{6,} bytes are needed; [\d,]+ bytes and [\d,]+ files were free", failed)
        assert (left, saved, there) == ("run", "saved", "run step-00000001")


def publishes_on_one(context: RankContext, socket: str, directory: str) -> tuple[list[int], float]:
    """Rank 1 gets no version of the first step that would go to the disk."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    model = nn.Linear(9, 9)
    with Checkpointer(model, storage=Storage("run", 1, Disk(directory, every=0.0), socket)) as checkpointer:
        checkpointer.restore()
        agreement = checkpointer._agreement
        slot, lacking = agreement._slot, iter([context.rank == 1])
        agreement._slot = lambda step: None if next(lacking, False) else slot(step)  # type: ignore[method-assign]
        step_until(checkpointer, lambda: checkpointer.steps == 40)
    return on_disk(Path(directory)), float(checkpointer.stats()["checkpoint/persistent_errors"])


@pytest.mark.slow
def test_a_rank_without_a_version_keeps_nobody_waiting(socket: str, tmp_path: Path) -> None:
    """The others learn that it has nothing to save, and the next one is saved."""
    for outcome in run_ranks(publishes_on_one, socket, str(tmp_path / "disk"), world_size=2, timeout_seconds=60):
        found, errors = outcome.value
        assert found
        assert errors >= 1


def test_a_save_can_be_waited_for_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker began the one of the last step while the training's thread closed the Checkpointer: RuntimeError."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group = private_group(None, None)
    about = {"topology": "a", "state": "b", "world_size": 1}
    tier, start = PersistentTier(Disk(tmp_path / "disk"), about, group, Notices(0)), threading.Thread.start

    def waited_for(thread: threading.Thread) -> None:
        tier.join()
        start(thread)

    def nothing() -> tuple[bytes, memoryview, None]:
        raise ThinwireError("nothing to save")

    monkeypatch.setattr(threading.Thread, "start", waited_for)
    tier.save(1, 1, nothing)
    tier.join()
    assert "nothing to save" in tier.last_error
    tier.close()
    dist.destroy_process_group()


_SCRIPT = """
import json, os, sys, torch, torch.distributed as dist
from torch import nn
from thinwire.checkpoint import Checkpointer, Storage
ending, directory = sys.argv[1:]
def main(rank, attempt):
    store = f"file://{directory}/store{attempt}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = nn.Linear(200, 200)
    checkpointer = Checkpointer(model, storage=Storage(f"run{attempt}", replicas=1, holder_socket=f"{directory}/h"))
    checkpointer.restore()
    for step in range(5):
        checkpointer.step()
    if ending == "raise" and rank == 1: raise LookupError("on purpose")
    if ending == "exit" and rank == 1: sys.exit(3)
    if ending == "destroy": dist.destroy_process_group()
    os.write(1, b"ended\\n")  # at once, where the other one writes too
statuses = []
for attempt in range(3):
    pair = []
    for rank in (0, 1):
        pair.append(os.fork())
        if pair[-1] == 0:
            main(rank, attempt)
            sys.exit()
    statuses += [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in pair]
print(json.dumps(statuses))
"""
"""Processes are forked for three trainings, one after the other: to start Python and load torch took most of the test.
They end as any: whoever forks a process and returns from it ends Python, and all that it has loaded."""


# --- the end of a process


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("ending", ["destroy", "nothing", "raise", "exit"])
def test_no_process_aborts_at_its_end(ending: str, socket: str, tmp_path: Path) -> None:
    """Without a close, a thread came back from Gloo after Python had gone: SIGABRT in one of six runs."""
    command = [sys.executable, "-c", _SCRIPT, ending, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            *said, statuses = process.communicate()[0].splitlines()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    expected = {"raise": 1, "exit": 3}.get(ending, 0)
    assert json.loads(statuses) == [0, expected] * 3
    assert said == ["ended"] * (6 if expected == 0 else 3)


def test_a_restart_that_would_hang_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_RESTARTS", "3"), ("RESTART_COUNT", "0"), ("USE_AGENT_STORE", "True")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in restart_hint()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert restart_hint() == "", "it is not restarted any more"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert restart_hint() == ""
