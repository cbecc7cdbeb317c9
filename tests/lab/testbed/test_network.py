"""Emulated hosts: the link is what was asked for, Gloo runs over it, and nothing stays behind."""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

import thinwire
from clocks import PATIENCE, wait_until
from namespaces import needs_namespaces
from thinwire.lab.testbed import network as network_module
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link, NetAdminError, in_namespace, require_net_admin

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]


def machine_state() -> tuple[list[str], list[str], str]:
    """What the machine's own namespace has: interfaces, named namespaces, the namespace itself."""
    named = Path("/var/run/netns")
    return (
        sorted(os.listdir("/sys/class/net")),
        sorted(os.listdir(named)) if named.exists() else [],
        os.readlink("/proc/thread-self/ns/net"),
    )


def open_namespaces() -> int:
    """Network namespaces held open by a descriptor of this process."""
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("net:") for link in links if link.is_symlink())


def wait_until_carried(network: EmulatedNetwork, least_mbit: float) -> None:
    """Wait until a network carries this much: a busy machine may send less for a while, a slower link always does."""
    wait_until(lambda: network.measure(0.7) >= least_mbit)


def sum_and_locate(context: RankContext, elements: int) -> tuple[float, int, int, str]:
    total = torch.full((elements,), float(context.rank + 1))
    dist.all_reduce(total)
    namespace = os.readlink("/proc/self/ns/net")
    return total.unique().item(), context.host, context.local_rank, namespace


def hang(context: RankContext) -> None:
    context.send(os.getpid())
    time.sleep(600)


def hold_network() -> None:
    """What a launcher does that is about to be killed."""
    with EmulatedNetwork(2, Link(100.0)) as network:
        run_ranks(hang, world_size=2, network=network, on_message=lambda rank, pid: print(pid, flush=True))


@pytest.mark.parametrize(
    ("text", "mbit"),
    [("100mbit", 100.0), ("1gbit", 1000.0), ("2.5gbit", 2500.0), (" 10Mbit ", 10.0), ("none", None)],
)
def test_link_parses(text, mbit):
    assert Link.parse(text) == Link(mbit)


@pytest.mark.parametrize("text", ["", "100", "mbit", "-1mbit", "1e3mbit", "100mbps", "1.gbit", "fast"])
def test_bad_link_lists_the_legal_forms(text):
    with pytest.raises(ValueError, match=r"'100mbit', '1gbit', '2.5gbit', 'none'"):
        Link.parse(text)


@pytest.mark.parametrize("mbit", [0.0, -1.0, float("nan"), 1e9])
def test_impossible_rate_is_refused(mbit):
    with pytest.raises(ValueError, match="link rate"):
        Link(mbit)


@pytest.mark.parametrize("hosts", [0, -1, 251])
def test_impossible_host_count_is_refused(hosts):
    with pytest.raises(ValueError, match="hosts must be between 1 and 250"):
        EmulatedNetwork(hosts, Link(None))


def test_missing_right_is_named_with_the_way_out(monkeypatch):
    def forbid(name: str, *arguments: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(network_module, "_system_call", forbid)
    with pytest.raises(NetAdminError, match=r"start the command by `unshare -Ur`.*or use `--link none`"):
        require_net_admin()


def test_missing_pyroute2_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[testbed\]' in a checkout"), EmulatedNetwork(1, Link(None)):
        pass


@needs_namespaces
def test_both_directions_hold_the_rate():
    before = machine_state()
    with EmulatedNetwork(3, Link(100.0)) as network:
        started, sent = time.perf_counter(), network.wire_bytes_sent(0)
        wait_until_carried(network, least_mbit=85.0)
        sent = network.wire_bytes_sent(0) - sent
        assert 8 * sent <= 100e6 * (time.perf_counter() - started + network_module._BURST_SECONDS)
        assert machine_state() == before, "the machine's own namespace must not change"


@needs_namespaces
def test_receiving_is_limited_as_well():
    """Two hosts send to one: each could send at the full rate, the receiver cannot take it."""
    with EmulatedNetwork(3, Link(50.0)) as network:
        outcomes = run_ranks(seconds_to_send_to_rank_0, 500_000, world_size=3, network=network)
    on_the_wire = 2 * 500_000 * 8 / 50e6  # half of that if only the senders were limited
    assert outcomes[0].value >= 0.9 * on_the_wire


def seconds_to_send_to_rank_0(context: RankContext, size_bytes: int) -> float:
    messages = [torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(2)]
    dist.barrier()
    start = time.perf_counter()
    if context.rank:
        works = [dist.isend(messages[0], 0)]
    else:
        works = [dist.irecv(message, source) for source, message in enumerate(messages, start=1)]
    for work in works:
        work.wait()
    return time.perf_counter() - start


def reaches(network: EmulatedNetwork, source: int, target: int, seconds: float = PATIENCE) -> bool:
    """Whether a connection is made within that time."""

    def connect(port: int) -> bool:
        try:
            socket.create_connection((network.address(target), port), timeout=seconds).close()
        except TimeoutError:
            return False
        return True

    with in_namespace(
        network.namespace(target), lambda: socket.create_server((network.address(target), 0))
    ) as listener:
        return in_namespace(network.namespace(source), lambda: connect(listener.getsockname()[1]))


@needs_namespaces
def test_a_host_that_is_cut_off_hears_and_says_nothing_until_it_is_mended():
    with EmulatedNetwork(3, Link(None)) as network:
        assert reaches(network, 0, 1)
        network.cut(1)
        assert not reaches(network, 0, 1, seconds=0.5)
        assert not reaches(network, 1, 0, seconds=0.5)
        assert reaches(network, 0, 2)
        network.mend(1)
        assert reaches(network, 0, 1)
        with pytest.raises(ValueError, match="host must be"):
            network.cut(3)


@needs_namespaces
def test_gloo_sums_between_namespaces():
    with EmulatedNetwork(3, Link(200.0)) as network:
        sent = network.wire_bytes_sent(0)
        outcomes = run_ranks(sum_and_locate, 50_000, world_size=5, ranks_per_host=2, network=network)
        sent = network.wire_bytes_sent(0) - sent
    assert [outcome.value[:3] for outcome in outcomes] == [
        (15.0, 0, 0),
        (15.0, 0, 1),
        (15.0, 1, 0),
        (15.0, 1, 1),
        (15.0, 2, 0),
    ]
    namespaces = [outcome.value[3] for outcome in outcomes]
    assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3] != namespaces[4]
    assert os.readlink("/proc/self/ns/net") not in namespaces
    assert sent > 200_000, "a sum of 200 KB has to cross the link"


@needs_namespaces
def test_too_many_ranks_are_refused():
    with EmulatedNetwork(2, Link(None)) as network, pytest.raises(ValueError, match="do not fit"):
        run_ranks(hang, world_size=3, ranks_per_host=1, network=network)


@needs_namespaces
def test_unlimited_link_is_faster_than_a_gigabit():
    with EmulatedNetwork(2, Link(None)) as network:
        wait_until_carried(network, least_mbit=1000.0)
        assert network.wire_bytes_sent(0) > 0


@needs_namespaces
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_behind(error):
    before, namespaces = machine_state(), open_namespaces()
    network = EmulatedNetwork(2, Link(100.0))
    try:
        with network:
            assert open_namespaces() == namespaces + 3
            if error is not None:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        pass
    assert machine_state() == before
    assert open_namespaces() == namespaces
    assert multiprocessing.active_children() == []
    with pytest.raises(RuntimeError, match="closed"):
        network.namespace(0)


@pytest.mark.slow
@needs_namespaces
def test_killed_launcher_leaves_nothing():
    before = machine_state()
    code = "from tests.lab.testbed import test_network; test_network.hold_network()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline()) for _ in range(2)]
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "the ranks must not outlive the launcher"
        time.sleep(0.05)
    assert machine_state() == before


_RESTARTED = """
import os
from thinwire.lab.testbed.network import require_net_admin, restart_as_root_of_a_user_namespace
restart_as_root_of_a_user_namespace()
require_net_admin()
print("made as", os.getuid(), *__import__("sys").argv[1:])
"""


def _pythons_of_an_ordinary_user() -> list[list[str]]:
    """Commands that run this package as a user without rights."""
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.getuid() == 0 else []
    candidates = [[*user, python] for python in (sys.executable, "/usr/bin/python3")]
    again = "import os, sys, thinwire.lab.testbed.network; os.execv(sys.executable, [sys.executable, '-c', ''])"
    return [python for python in candidates if _works([*python, "-c", again])]


def _works(command: list[str]) -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(command, env=_ENVIRONMENT, capture_output=True, check=False).returncode == 0
    return False


_ENVIRONMENT = {"PYTHONPATH": str(Path(thinwire.__file__).parents[1]), "PATH": os.environ["PATH"]}


def test_an_ordinary_user_makes_networks_in_a_user_namespace():
    pythons = _pythons_of_an_ordinary_user()
    if not pythons or not _works(["unshare", "-Ur", "true"]):
        pytest.skip("user namespaces are not allowed here, or a user may run no Python")
    command = [*pythons[0], "-c", _RESTARTED, "--an", "argument"]
    ran = subprocess.run(command, env=_ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == "made as 0 --an argument\n", ran.stderr
