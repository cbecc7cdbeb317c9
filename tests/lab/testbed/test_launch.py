"""run_ranks: values in rank order, failures with their cause first, no process left behind; the laws of Faults."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from injected import Faults, InjectedFault
from thinwire.lab.testbed.launch import RankContext, RanksFailed, free_port, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]


def sum_ranks(context: RankContext, scale: float) -> tuple[int, float]:
    total = torch.tensor([scale * context.rank])
    dist.all_reduce(total)
    return context.rank, total.item()


def describe_environment(context: RankContext) -> dict[str, str]:
    assert not dist.is_initialized()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "FROM_PARENT")
    assert int(os.environ["MASTER_PORT"]) > 0
    return {name: os.environ[name] for name in names} | {"threads": str(torch.get_num_threads())}


def imported_by_the_rank(context: RankContext) -> set[str]:
    """Modules that the server had not imported when it took what it had from the garbage collector."""
    collected = {id(entry) for entry in gc.get_objects()}
    return {name for name, module in list(sys.modules.items()) if id(getattr(module, "__dict__", None)) in collected}


def train(context: RankContext, faults: Faults) -> int:
    for step in range(5):
        faults.strike(context.rank, step)
        dist.barrier()
    return context.rank


def work_alone(context: RankContext, faults: Faults) -> int:
    faults.strike(context.rank, 0)
    return context.rank


def wait_long(context: RankContext) -> None:
    context.send((os.getpid(), os.getppid()))
    if context.rank == 1:
        time.sleep(600)
    dist.barrier()


def gone(pids: set[int], seconds: float = 60.0) -> bool:
    """Whether all processes end within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def launch_and_wait(network=None) -> None:
    """What a launcher does that is about to be killed: it prints the processes that it started."""
    run_ranks(
        wait_long,
        world_size=2,
        network=network,
        on_message=lambda rank, pids: print(*pids, flush=True),
    )


def start_launcher(call: str, directory: str) -> tuple[subprocess.Popen, set[int]]:
    """A launcher process, and the processes that it has started."""
    paths = [directory, str(Path(__file__).parents[2] / "common")]
    # What a shell starts in the background ignores interrupts, tests included.
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"import sys; sys.path[:0] = {paths!r}; {heeding}; {call}"
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert launcher.stdout is not None
    pids = {int(word) for _ in range(2) for word in launcher.stdout.readline().split()}
    assert len(pids) == 3, "two ranks and the fork server"
    return launcher, pids


def test_a_tmpdir_that_is_too_long_for_sockets_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    monkeypatch.setattr(forkserver, "connect_to_new_process", forkserver.ForkServer().connect_to_new_process)
    with pytest.raises(ValueError, match=f"no socket fits in {deep}: set TMPDIR to a shorter path"):
        run_ranks(sum_ranks, 1.0, world_size=1)


def test_ranks_start_with_what_their_module_imports() -> None:
    (outcome,) = run_ranks(imported_by_the_rank, world_size=1)
    assert __name__ in outcome.value
    assert not outcome.value & {"torch", "torch._dynamo", "pytest", "hypothesis", "thinwire.checkpoint.checkpointer"}
    assert len(outcome.value) < 50


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_values_come_in_rank_order(world_size):
    outcomes = run_ranks(sum_ranks, 2.0, world_size=world_size)
    total = 2.0 * sum(range(world_size))
    assert [outcome.value for outcome in outcomes] == [(rank, total) for rank in range(world_size)]
    assert all(outcome.error is None and outcome.exit_code == 0 for outcome in outcomes)
    assert multiprocessing.active_children() == []


def test_environment_is_torchruns(monkeypatch):
    monkeypatch.setenv("FROM_PARENT", "yes")
    outcomes = run_ranks(describe_environment, world_size=2, init_process_group=False)
    for rank, outcome in enumerate(outcomes):
        assert outcome.value == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "GLOO_SOCKET_IFNAME": "lo",
            "FROM_PARENT": "yes",
            "threads": "1",
        }


def test_failing_rank_is_the_cause_and_its_peers_follow():
    with pytest.raises(RanksFailed, match="first rank 1") as caught:
        run_ranks(train, Faults().fail(rank=1, step=3), world_size=3)
    text = str(caught.value)
    assert "InjectedFault: injected fault on rank 1 at step 3" in text
    assert text.index("rank 1: Traceback") < min(text.index("rank 0:"), text.index("rank 2:"))
    assert [outcome.rank for outcome in caught.value.outcomes] == [0, 1, 2]
    assert multiprocessing.active_children() == []


def test_killed_rank_is_the_cause():
    with pytest.raises(RanksFailed, match=r"first rank 2\nrank 2: killed by SIGKILL"):
        run_ranks(train, Faults().kill(rank=2, step=1), world_size=3)


def test_without_check_failures_are_outcomes():
    faults = Faults().kill(rank=0, step=0).fail(rank=2, step=0)
    killed, fine, failed = run_ranks(work_alone, faults, world_size=3, check=False, init_process_group=False)
    assert (killed.exit_code, killed.error, killed.value) == (-signal.SIGKILL, None, None)
    assert (fine.exit_code, fine.error, fine.value) == (0, None, 1)
    assert failed.exit_code == 1
    assert "InjectedFault" in failed.error


def test_ranks_that_outlive_a_failure_are_killed():
    faults = Faults().fail(rank=0, step=0).pause(rank=1, step=0, seconds=600)
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1: killed 5 s after rank 0 had failed"):
        run_ranks(work_alone, faults, world_size=2, init_process_group=False)
    assert time.monotonic() - start < 100


def test_timeout_shows_where_each_rank_hangs():
    pids: set[int] = set()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(wait_long, world_size=2, timeout_seconds=10, on_message=lambda rank, message: pids.add(message[0]))
    assert str(caught.value).count("in wait_long") == 2, "which one holds the other up is not known"
    assert len(pids) == 2
    assert gone(pids)
    for outcome in caught.value.outcomes:
        assert outcome.error.startswith("still running after 10 s")
        assert "in wait_long" in outcome.error
        assert outcome.exit_code == -signal.SIGKILL


def test_ranks_may_return_long_before_others():
    """A rank that left at once would reset connections which slower ranks still set up."""
    for _ in range(5):
        outcomes = run_ranks(work_alone, Faults().pause(rank=3, step=0, seconds=0.1), world_size=4)
        assert [outcome.value for outcome in outcomes] == [0, 1, 2, 3]


def test_a_value_survives_the_timeout_of_another_rank():
    faults = Faults().pause(rank=1, step=0, seconds=600)
    outcomes = run_ranks(work_alone, faults, world_size=2, timeout_seconds=10, check=False)
    assert (outcomes[0].value, outcomes[0].error, outcomes[0].exit_code) == (0, None, 0)
    assert outcomes[1].error.startswith("still running after 10 s")


def test_error_in_on_message_leaves_no_process():
    pids: set[int] = set()

    def interrupt(rank: int, message: tuple[int, int]) -> None:
        pids.add(message[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ranks(wait_long, world_size=2, on_message=interrupt)
    assert pids
    assert gone(pids)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_end_of_the_launcher_ends_its_ranks(number):
    call = "import test_launch; test_launch.launch_and_wait()"
    launcher, pids = start_launcher(call, os.path.dirname(__file__))
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == -number
    assert gone(pids)
    assert b"resource_tracker" not in errors


def test_local_function_is_refused():
    with pytest.raises(ValueError, match="at the top of a module"):
        run_ranks(lambda context: None, world_size=1)


def test_faults_strike_only_their_rank_and_step():
    plan = Faults().fail(rank=1, step=5).pause(rank=0, step=2, seconds=0.2)
    for rank in range(3):
        for step in range(7):
            if (rank, step) != (1, 5):
                plan.strike(rank, step)
    with pytest.raises(InjectedFault, match="rank 1 at step 5"):
        plan.strike(1, 5)
    start = time.monotonic()
    plan.strike(0, 2)
    assert time.monotonic() - start >= 0.2


def test_faults_are_values():
    empty = Faults()
    assert empty.kill(rank=0, step=1) == Faults().kill(rank=0, step=1)
    assert empty == Faults()
    assert hash(empty.fail(1, 2)) != hash(empty)


@pytest.mark.parametrize(
    "plan",
    [
        lambda: Faults().kill(rank=-1, step=0),
        lambda: Faults().fail(rank=0, step=-1),
        lambda: Faults().pause(rank=0, step=0, seconds=-1.0),
    ],
)
def test_negative_faults_are_refused(plan):
    with pytest.raises(ValueError, match="must not be negative"):
        plan()


def test_a_port_of_rank_0_is_none_that_the_system_gives_to_connections() -> None:
    """Else one of these may have it before rank 0 listens: on a busy machine seconds later."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(free_port() for _ in range(20)) < first
