"""What a restart may take, must refuse, or gives up when told to; the directory on a disk; and the end of a process."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from thinwire.checkpoint import Checkpointer
from thinwire.checkpoint.group import restart_hint
from thinwire.errors import ThinwireError
from thinwire.holder.client import HolderClient
from thinwire.holder.start import HolderOptions, start_holder, stop_holder
from thinwire.lab.testbed.launch import RankContext, run_ranks

SECRET = "a secret of the tests, long enough"


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Of the holders of three hosts."""
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    made = [str(tmp_path / name) for name in "abc"]
    for socket in made:
        start_holder(HolderOptions(socket=socket, memory_budget="20MB", drain_seconds=0.0))
    yield made
    for socket in made:
        with HolderClient.connect(socket, SECRET.encode()) as client:
            stop_holder(client)


def restart(socket: str) -> None:
    """The host loses its memory."""
    with HolderClient.connect(socket, SECRET.encode()) as client:
        stop_holder(client)
    start_holder(HolderOptions(socket=socket, memory_budget="20MB", drain_seconds=0.0))


def train(
    context: RankContext, sockets: list[str], steps: int, restore: dict[str, Any] | None, options: dict[str, Any]
) -> tuple[Any, str, list[float]]:
    """One start: what was restored, or the error; what was warned of; and the weights at the end."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    torch.manual_seed(1)
    model = nn.Linear(40, 30)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        socket = sockets[context.rank]
        with Checkpointer(model, optimizer, run_id="run", holder_socket=socket, **options) as checkpointer:
            try:
                restored = None if restore is None else checkpointer.restore(**restore)
                for step in range(restored or 0, (restored or 0) + steps):
                    optimizer.zero_grad()
                    model(torch.full((2, 40), 1.0 + step)).square().mean().backward()
                    optimizer.step()
                    checkpointer.step()
                    assert checkpointer.flush(20) or (step + 1) % options.get("every", 1)
            except (ValueError, ThinwireError) as error:
                restored = f"{type(error).__name__}: {error}"
        texts = "\n".join(str(warning.message) for warning in caught)
        return restored, texts, model.weight.detach().flatten().tolist()


def start(
    sockets: list[str], steps: int, restore: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, str, list[float]]:
    """All ranks restore the same, or refuse for the same reason; the warnings are those of rank 0."""
    restore = {} if restore is None else restore
    outcomes = run_ranks(
        train, sockets, steps, None if restore == {"never": True} else restore, options,
        world_size=len(sockets), timeout_seconds=60,
    )  # fmt: skip
    found = [outcome.value for outcome in outcomes]
    assert len({str(restored) for restored, _, _ in found}) == 1, found
    return found[0]


def steps_at(socket: str) -> set[tuple[int, int]]:
    """Owner and step of all versions."""
    with HolderClient.connect(socket, SECRET.encode()) as client:
        return {(version.shard.owner, version.step) for version in client.inventory("run")}


def test_what_other_hosts_can_bring_back_is_not_overwritten_unasked(sockets: list[str]) -> None:
    """Host a has shard 0, and b shard 1; the job starts again on c and b."""
    a, b, c = sockets
    _, _, trained = start([a, b], 8, replicas=1)
    kept = steps_at(b)
    assert (1, 8) in kept, "and mostly the one before, if that was not left out"
    for restore in ({}, {"never": True}):  # a first step without a restore overwrites as well
        refused, _, _ = start([c, b], 3, restore, replicas=1)
        assert refused.startswith("ValueError: no checkpoint of run 'run' can be restored: step 8")
        for said in ("Shards 0 of step 8 were on the hosts at 127", "not part of this job", "restore(fresh=True)"):
            assert said in refused
    assert steps_at(b) == kept
    refused, _, _ = start([a, b], 3, {"never": True}, replicas=1)
    assert "has a checkpoint of step 8, which the first step would overwrite: call restore()" in refused
    restored, warned, weights = start([a, b], 0, replicas=1)
    assert (restored, weights) == (8, trained)
    restored, warned, _ = start([c, b], 1, {"fresh": True}, replicas=1)
    assert restored is None
    assert re.search("starts anew, and gives up its steps ([67], )?8", warned)
    assert steps_at(b) == {(1, 1)}, "what was given up is freed"


def test_a_restart_that_finds_nothing_says_so(sockets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that died together with the workers leaves nothing that would tell of the run."""
    assert start(sockets[:1], 3, replicas=1)[:2] == (None, ""), "the first start of a run is none"
    restart(sockets[0])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    restored, warned, _ = start(sockets[:1], 1, replicas=1)
    assert restored is None
    assert "the workers were started again, and nobody has a checkpoint of run 'run'" in warned


def test_a_step_of_choice(sockets: list[str]) -> None:
    """The one before the newest; others are refused with those that exist. Then it is the newest."""
    hosts = sockets[:2]
    _, _, six = start(hosts, 6)
    start(hosts, 1)
    refused, _, _ = start(hosts, 0, {"step": 3})
    assert "run 'run' has no step 3 to restore; it has 6, 7" in refused
    restored, _, weights = start(hosts, 0, {"step": 6})
    assert (restored, weights) == (6, six)
    refused, _, _ = start(hosts, 0, {"step": 6, "fresh": True})
    assert "pass one of them" in refused
    assert start(hosts, 2)[0] in (6, 7)


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
        assert "It was at its beginning, so training starts anew" in warned
        assert steps_at(hosts[0]) == ({(0, 1)} if every == 1 else set())
    else:
        assert "nobody has a copy of shard 1" in restored


def test_older_steps_than_a_crash_costs_are_said(sockets: list[str], tmp_path: Path) -> None:
    """The disk has step 1, the memory lost step 9 with host b."""
    hosts, options = sockets[:2], {"replicas": 1, "persistent": str(tmp_path / "disk"), "persistent_every": "1d"}
    os.makedirs(options["persistent"])
    (tmp_path / "disk" / "run").touch()
    os.utime(tmp_path / "disk" / "run", (1.0, 1.0))  # due at once, and not again today
    start(hosts, 9, **options)
    restart(hosts[1])
    restored, warned, _ = start(hosts, 0, **options)
    assert restored <= 3
    assert re.search(r"newer ones are given up, steps (8, )?9: .*nobody has a copy of shard 1", warned)


# --- the directory on a disk


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    said = start_holder(HolderOptions(socket=str(tmp_path / "h"), memory_budget="20MB", drain_seconds=0.0))
    yield said["socket"]
    with HolderClient.connect(said["socket"], SECRET.encode()) as client:
        stop_holder(client)


def keeper(socket: str, directory: Path, every: float | str = "1d") -> Checkpointer:
    options = {"persistent": directory, "persistent_every": every}
    return Checkpointer(nn.Linear(9, 9), run_id="run", replicas=1, holder_socket=socket, **options)


def on_disk(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-????????"))


def step_until(checkpointer: Checkpointer, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        checkpointer.step()
        time.sleep(0.005)


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
def test_persist_now_returns_when_it_is_there_or_says_why_not(socket: str, tmp_path: Path) -> None:
    """And what a killed job left half-written goes, but not what another one writes."""
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" / "disk"
    with keeper(socket, directory) as checkpointer:
        with pytest.raises(ValueError, match=r"restore\(\) or step\(\) before it"):
            checkpointer.persist_now()
        with pytest.warns(UserWarning, match="nothing can be saved to .*ENOTDIR"):
            assert checkpointer.restore() is None
        checkpointer.step()
        with pytest.raises(ThinwireError, match=r"no checkpoint was saved to .*ENOTDIR"):
            checkpointer.persist_now()
        assert checkpointer.stats()["checkpoint/persistent_errors"] == 1.0
        assert "ENOTDIR" in str(checkpointer.stats()["checkpoint/persistent_error"])
        (tmp_path / "file").unlink()
        (directory / "step-00000007.partial").mkdir(parents=True)
        with (directory / "run").open("a") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(ThinwireError, match=r"EAGAIN: .*another job writes to"):
                checkpointer.persist_now()
            assert (directory / "step-00000007.partial").exists()
        checkpointer.persist_now()
        assert [path.name for path in directory.glob("step-*")] == ["step-00000001"]
        checkpointer.step()
        checkpointer.persist_now()
        checkpointer.persist_now()  # the same step once more
        assert on_disk(directory) == [1, 2]
    with pytest.warns(UserWarning, match="gives up its steps .*2"), keeper(socket, directory) as checkpointer:
        assert checkpointer.restore(fresh=True) is None
    assert sorted(path.name for path in directory.glob("step-*")) == [f"step-0000000{n}.given-up" for n in (1, 2)]


def saves_with_a_limit(context: RankContext, socket: str, directory: str) -> list[str]:
    """The files of rank 1 must not exceed 20 kB, which its part does; then they may."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    told = []
    torch.manual_seed(context.rank)  # different weights: each rank writes its own
    with Checkpointer(
        nn.Linear(90, 90), run_id="run", replicas=1, holder_socket=socket, persistent=directory, persistent_every="1d"
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
    with Checkpointer(
        model, run_id="run", replicas=1, holder_socket=socket, persistent=directory, persistent_every=0.0
    ) as checkpointer:
        checkpointer.restore()
        agreement = checkpointer._agreement
        slot, lacking = agreement._slot, iter([context.rank == 1])
        agreement._slot = lambda step: None if next(lacking, False) else slot(step)  # type: ignore[method-assign]
        step_until(checkpointer, lambda: checkpointer.steps == 40)
    return on_disk(Path(directory)), float(checkpointer.stats()["checkpoint/persistent_errors"])


def test_a_rank_without_a_version_keeps_nobody_waiting(socket: str, tmp_path: Path) -> None:
    """The others learn that it has nothing to save, and the next one is saved."""
    for outcome in run_ranks(publishes_on_one, socket, str(tmp_path / "disk"), world_size=2, timeout_seconds=60):
        found, errors = outcome.value
        assert found
        assert errors >= 1


# --- the end of a process


_SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from thinwire.checkpoint import Checkpointer
rank, ending, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
def main():
    model = nn.Linear(200, 200)
    checkpointer = Checkpointer(model, run_id="run", replicas=1, holder_socket=f"{directory}/h")
    checkpointer.restore()
    for step in range(5):
        checkpointer.step()
    if ending == "raise" and rank == 1: raise LookupError("on purpose")
    if ending == "exit" and rank == 1: sys.exit(3)
    if ending == "destroy": dist.destroy_process_group()
    print("ended", flush=True)
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["destroy", "nothing", "raise", "exit"])
def test_no_process_aborts_at_its_end(ending: str, socket: str, tmp_path: Path) -> None:
    """Without a close, a thread came back from Gloo after Python had gone: SIGABRT in one of six runs."""
    for attempt in range(6):
        (tmp_path / "store").unlink(missing_ok=True)
        command = [sys.executable, "-c", _SCRIPT.replace('"run"', f'"run{attempt}"')]
        processes = [
            subprocess.Popen([*command, str(rank), ending, str(tmp_path)], stdout=subprocess.PIPE, text=True)
            for rank in (0, 1)
        ]
        said = [process.communicate(timeout=60)[0] for process in processes]
        expected = {"raise": 1, "exit": 3}.get(ending, 0)
        assert [process.returncode for process in processes] == [0, expected]
        assert said == ["ended\n", "ended\n" if expected == 0 else ""]


def test_a_restart_that_would_hang_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_RESTARTS", "3"), ("RESTART_COUNT", "0"), ("USE_AGENT_STORE", "True")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in restart_hint()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert restart_hint() == "", "it is not restarted any more"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert restart_hint() == ""
