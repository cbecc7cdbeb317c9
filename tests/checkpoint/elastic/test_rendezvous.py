"""The rendezvous of torchrun's agents, over sockets: places, standbys, lost endpoints, and the whole loop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from clocks import PATIENCE, wait_until
from elastic_cluster import ElasticCluster, reference_digest, run_elastic
from namespaces import needs_namespaces
from thinwire.checkpoint.elastic.board import Board, Boards, Claim
from thinwire.checkpoint.elastic.rendezvous import ElasticRendezvous, _RoundStore
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import HolderOptions, ensure_holder, stop_holder
from thinwire.errors import LostPeerError

pytestmark = pytest.mark.ranks


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


class Hosts:
    """Agents of this process, each with the holder of its own host."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, endpoints: int = 1) -> None:
        self._directory, self._patch = directory, patch
        self.endpoint = ",".join(f"127.0.0.1:{free_port()}" for _ in range(endpoints))
        self.agents: dict[str, ElasticRendezvous] = {}
        self.waiting: dict[str, tuple[threading.Thread, dict[str, Any]]] = {}
        patch.setenv("THINWIRE_SECRET", "a secret of sixteen characters")

    def start(self, name: str, nodes: tuple[int, int], run_id: str = "run", **more: Any) -> ElasticRendezvous:
        if name in self.agents:  # one that goes on would start the holder again that `close` stops
            self.die(name)
        self._patch.setenv("THINWIRE_HOLDER", str(self._directory / f"{name}.sock"))
        conf = {"keep_alive_interval": "0.2", "keep_alive_max_attempt": "15", "last_call_timeout": "2"}
        conf |= {"memory_budget": "8MiB", **more}
        params = RendezvousParameters("thinwire", self.endpoint, run_id, *nodes, local_addr="127.0.0.1", **conf)
        self.agents[name] = ElasticRendezvous(params)
        return self.agents[name]

    def die(self, name: str) -> None:
        """As by kill -9: no farewell."""
        agent = self.agents.pop(name)
        agent._end()
        agent._boards.close()
        agent._store = None

    def join(self, *names: str) -> dict[str, RendezvousInfo]:
        """All of them at once, each in a thread; those that do not come back in time stand by."""
        found: dict[str, Any] = {}

        def run(name: str) -> None:
            try:
                found[name] = self.agents[name].next_rendezvous()
            except BaseException as error:
                found[name] = error

        threads = {name: threading.Thread(target=run, args=(name,), daemon=True) for name in names}
        for thread in threads.values():
            thread.start()
        self.waiting |= {name: (thread, found) for name, thread in threads.items()}
        return found

    def joined(self, *names: str, seconds: float = PATIENCE) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        for name in names:
            thread, found = self.waiting[name]
            thread.join(max(0.0, deadline - time.monotonic()))
            assert name in found, f"{name} still waits"
        return {name: self.waiting[name][1][name] for name in names}

    def wait_until_over(self, *names: str, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not all(self.agents[name].num_nodes_waiting() for name in names):
            assert time.monotonic() < deadline, "the loss was not noticed"
            time.sleep(0.02)

    def close(self) -> None:
        for name in list(self.agents):
            self.die(name)
        for thread, _ in self.waiting.values():
            thread.join(PATIENCE)
        self.waiting.clear()  # with what agents have returned and raised, which holds their stores
        for path in self._directory.glob("*.sock"):
            stop_holder(ensure_holder(HolderOptions(socket=str(path))))


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """An agent names the run for its workers in the environment of its own process."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    it = Hosts(tmp_path, monkeypatch, endpoints=2)
    yield it
    it.close()


def places(infos: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {name: (info.rank, info.world_size) for name, info in infos.items()}


def test_a_standby_takes_the_place_of_the_endpoint_host_that_died(hosts: Hosts) -> None:
    for name in "ab":
        hosts.start(name, (2, 2))
    hosts.join("a", "b")
    infos = hosts.joined("a", "b")
    hosts.start("c", (2, 2))
    hosts.join("c")
    assert sorted(places(infos).values()) == [(0, 2), (1, 2)]
    stays = places(infos)["b"][0]
    assert len({info.bootstrap_store_info.master_port for info in infos.values()}) == 1
    hosts.die("a")  # which served the rendezvous
    hosts.wait_until_over("b")
    hosts.join("b")
    infos = hosts.joined("b", "c")
    assert places(infos) == {"b": (stays, 2), "c": (1 - stays, 2)}
    # and what torchrun's agents tell each other goes over the new one
    infos["c"].store.set("key", b"value")
    assert infos["b"].store.get("key") == b"value"
    assert [infos[name].store.add("members", 1) for name in "bc"] == [1, 2]


def test_a_host_counts_once_its_store_listens(hosts: Hosts) -> None:
    """Else the workers of others would be given port 0, if it became the first."""
    a, b = (hosts.start(name, (2, 2), keep_alive_interval="60") for name in "ab")
    hosts.join("b")
    wait_until(lambda: b._boards.serving)
    with patch.object(a, "_ended", Mock(**{"wait.side_effect": [False, True]})):
        a._keep_in_touch()
    assert b._sync(choose=False)["rank"] is None
    hosts.join("a")
    ports = {info.bootstrap_store_info.master_port for info in hosts.joined("a", "b").values()}
    assert len(ports) == 1
    assert ports != {0}


def test_an_agent_that_starts_again_on_its_host_has_its_place_and_its_holder(hosts: Hosts) -> None:
    for name in "ab":
        hosts.start(name, (2, 2))
    hosts.join("a", "b")
    before = places(hosts.joined("a", "b"))
    pid = hosts.agents["b"]._holder_pid
    hosts.die("b")
    hosts.wait_until_over("a")
    hosts.start("b", (2, 2))
    assert hosts.agents["b"]._holder_pid == pid
    hosts.join("b", "a")
    assert places(hosts.joined("a", "b")) == before
    os.kill(pid, signal.SIGKILL)
    while hosts.agents["b"]._holder_pid == pid:  # until the limit of a test
        time.sleep(0.02)


def test_fewer_hosts_go_on_where_that_is_allowed_and_nobody_waits_for_the_dead(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def patient_at_first(
        run_id: str, between: tuple[int, int], patience: float, last_call: tuple[float, float]
    ) -> Board:
        return Board(run_id, between, patience, (PATIENCE, last_call[1]))

    monkeypatch.setattr("thinwire.checkpoint.elastic.rendezvous.Board", patient_at_first)
    for name in "abc":
        hosts.start(name, (2, 3))
    hosts.join("a", "b", "c")
    infos = hosts.joined("a", "b", "c")
    gone = next(name for name in "bc" if infos[name].rank)  # not the one that serves
    stay = [name for name in "abc" if name != gone]
    hosts.die(gone)
    # torchrun's agents are in the middle of dealing out ranks: they must get an answer, or give up for good
    role = b'{"role": "default", "rank": 0, "local_world_size": 1}'
    store = infos["a"].store
    store.set(f"torchelastic/role_info/{infos['a'].rank}", role)
    assert store.multi_get([f"torchelastic/role_info/{infos[gone].rank}"]) == [role]
    assert store.get("torchelastic/assigned_ranks/0").startswith(b"[")
    with pytest.raises(RuntimeError, match="another host"):
        store.wait(["barrier"])
    hosts.wait_until_over(*stay)
    hosts.join(*stay)
    order = sorted(stay, key=lambda name: infos[name].rank)
    assert places(hosts.joined(*stay)) == {name: (place, 2) for place, name in enumerate(order)}
    hosts.agents["a"].shutdown()
    with pytest.raises(RendezvousClosedError):
        hosts.agents[next(name for name in stay if name != "a")].next_rendezvous()


def test_what_is_wrong_is_said(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hosts.start("a", (1, 1))
    hosts.join("a")
    hosts.joined("a")
    with pytest.raises(RendezvousConnectionError, match=r"--rdzv-id=run --nnodes=1:1.*--rdzv-id=other"):
        hosts.start("b", (1, 1), run_id="other").next_rendezvous()
    impatient = hosts.start("b", (1, 1))
    hosts.join("b")
    time.sleep(0.3)
    impatient.shutdown()  # as by Ctrl-C on a standby, which ends nothing but itself
    assert isinstance(hosts.joined("b")["b"], RendezvousClosedError)
    assert not first._sync(choose=False)["closed"]
    spare = hosts.start("c", (1, 1))
    hosts.join("c")
    time.sleep(0.3)
    first.shutdown()
    assert repr(hosts.joined("c")["c"]) == "SystemExit(0)"
    assert spare.is_closed()
    with pytest.raises(ValueError, match=r"--rdzv-id=NAME"):
        hosts.start("d", (1, 1), run_id="none")
    with pytest.raises(ValueError, match=r"keep_alive_interval=soon: expected a number"):
        hosts.start("d", (1, 1), keep_alive_interval="soon")
    with pytest.warns(UserWarning, match=r"2:3 excludes that"):
        lonely = hosts.start("d", (1, 3), join_timeout="0.3", last_call_timeout="100")
    with pytest.raises(RendezvousTimeoutError, match=r"did not start in 0.3 s"):
        lonely.next_rendezvous()


def test_a_start_right_after_the_end_of_the_run_is_no_standby_of_it(hosts: Hosts) -> None:
    """It ended with status 0 and no training, as the second command of `torchrun ... && torchrun ...`."""
    first = hosts.start("a", (1, 1))
    hosts.join("a")
    hosts.joined("a")
    second, seen, goes_on = hosts.start("b", (1, 1)), list[bool](), threading.Event()
    sync = second._sync

    def seeing(choose: bool) -> dict[str, Any]:
        view = sync(choose)
        seen.append(view["closed"])
        goes_on.set()
        return view

    def sleep(seconds: float) -> None:
        if threading.current_thread().name == "the end":
            hosts.join("b")
            assert goes_on.wait(PATIENCE)
        else:
            time.sleep(seconds)

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    with patch.object(second, "_sync", seeing), patch("thinwire.checkpoint.elastic.rendezvous.time", clock):
        ends = threading.Thread(target=first.shutdown, name="the end")
        ends.start()
        ends.join(PATIENCE)
        assert hosts.joined("b")["b"].rank == 0
    assert seen[0]


def test_a_request_of_a_round_that_gets_no_answer_is_made_again() -> None:
    """A host whose rank was not set, or that was counted twice or never, kept all hosts waiting for ever."""
    board = Board("run", (2, 2), 3, (0, 0))

    class Asked:
        def __init__(self, *lost: str) -> None:
            self.lost = list(lost)

        def request(self, op: str, content: dict[str, Any]) -> dict[str, Any]:
            lost = self.lost.pop(0) if self.lost else ""
            if lost == "request":
                raise LostPeerError("no answer")
            answer = board.store(content["round"], content)
            if lost == "answer":
                raise LostPeerError("no answer")
            return answer

    def store(rank: int, over: bool, *lost: str) -> _RoundStore:
        return _RoundStore(cast(Boards, Asked(*lost)), Claim(0, 2, rank), lambda: over, Mock())

    one, other = store(0, True), store(1, False, "request", "answer", "answer")
    other.set("torchelastic/role_info/1", "its role")
    assert one.get("torchelastic/role_info/1") == b"its role"
    assert (other.add("members", 1), one.add("members", 1), one.add("members", 1)) == (1, 2, 3)
    assert store(1, True, "request").add("members", 1) == 0, "the round is over"


def test_an_agent_that_has_ended_serves_no_store(hosts: Hosts) -> None:
    """Whoever holds the agent, as the record of a warning does with the error in it, and that with its frames."""
    agent = hosts.start("a", (1, 1))
    hosts.join("a")
    served = hosts.joined("a")["a"].bootstrap_store_info
    address = served.master_addr, served.master_port
    socket.create_connection(address, PATIENCE).close()
    agent.shutdown()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, PATIENCE)


def test_an_agent_that_has_ended_starts_no_holder(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if it was looking whether the holder lives as it ended: that one would stay behind."""
    agent, looking, ended = hosts.start("a", (1, 1)), threading.Event(), threading.Event()
    (keeper,) = [thread for thread in threading.enumerate() if thread.name == "_keep_holder"]

    def birth_of(pid: int) -> str:
        if agent._ended.is_set():
            return "0"
        looking.set()
        ended.wait(10)
        return ""

    monkeypatch.setattr("thinwire.checkpoint.elastic.rendezvous.birth_of", birth_of)
    assert looking.wait(PATIENCE)
    hosts.die("a")
    with HolderClient.connect(os.environ["THINWIRE_HOLDER"], b"a secret of sixteen characters") as client:
        stop_holder(client)
    ended.set()
    keeper.join(PATIENCE)
    assert not Path(os.environ["THINWIRE_HOLDER"]).exists()


def test_an_agent_that_has_ended_connects_no_more() -> None:
    """A thread of it may be about to: the connection would stay open, and the port of a board taken."""
    endpoint, secret, board = (
        f"127.0.0.1:{free_port()}",
        b"a secret of sixteen characters",
        Board("run", (1, 1), 3, (1, 1)),
    )
    boards = Boards([endpoint, "127.0.0.1:1"], secret, 1.0, lambda: board)
    boards.close()
    with pytest.raises(LostPeerError, match="this agent has ended"):
        boards.request("look", {}, choose=True)
    boards.review({})
    assert boards._served == {}


def test_a_stranger_is_not_admitted(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.start("a", (2, 2))
    hosts.join("a")
    wait_until(lambda: hosts.agents["a"]._boards.serving)  # or the stranger would serve
    stranger = hosts.start("b", (2, 2))
    stranger._boards._secret = b"another secret of that length"
    with pytest.raises(RendezvousConnectionError, match="another secret"):
        stranger.next_rendezvous()


def test_a_worker_that_makes_no_step_ends_the_round_and_is_killed(
    hosts: Hosts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is stopped, so it does not heed the signal of torchrun."""
    hosts.start("a", (1, 1), keep_alive_interval="0.1", step_timeout="0.5")
    hosts.join("a")
    hosts.joined("a")
    code = "import time; from thinwire.checkpoint.elastic.heartbeat import *; import pathlib, sys\n"
    code += "heart = Heartbeat(pathlib.Path(sys.argv[1])); heart.beat(7); print(1, flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code, os.environ["THINWIRE_HOLDER"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"1\n"
        worker.send_signal(signal.SIGSTOP)
        hosts.wait_until_over("a")
        assert f"worker {worker.pid} has made no step for" in caplog.text
        assert worker.wait(PATIENCE) == -signal.SIGKILL
    assert hosts.agents["a"].next_rendezvous().world_size == 1
    assert hosts.agents["a"].num_nodes_waiting() == 0


@pytest.mark.timeout(60)
def test_a_worker_dies_with_its_agent() -> None:
    worker = "import time; from thinwire.checkpoint.holder.start import *; end_with_agent();"
    worker += " print(1, flush=True); time.sleep(600)"
    agent = (
        "import os, subprocess, sys; os.environ['THINWIRE_AGENT'] = str(os.getpid());"
        f"subprocess.run([sys.executable, '-c', {worker!r}])"
    )
    with subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        process.kill()
        assert process.stdout.read() == b""  # which comes when the last process that has the other end is gone


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_replaces_a_host_of_this_machine_by_itself() -> None:
    with ElasticCluster(hosts=2, standbys=1, steps=60, emulated=False, endpoints=1) as cluster:
        cluster.wait_for("step", step=10)
        before, training, since = cluster.newest_round(), cluster.training_hosts(), time.monotonic()
        victim = training[1] if training[1] != 0 else training[0]
        cluster.lose(victim)
        phases = cluster.seconds_until_going_on(since, before)
        assert phases["from_step"] > 5
        spare = next(host for host in range(3) if host not in training)
        assert cluster.training_hosts() == [spare if host == victim else host for host in training]
        assert cluster.wait_until_finished() == reference_digest(2, 60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_holder_of_a_host_whose_agent_died_sends_the_only_copy() -> None:
    """That of the other host dies at the same time, and the standby knows nothing of the run."""
    with ElasticCluster(hosts=2, standbys=1, steps=60, emulated=False, endpoints=1) as cluster:
        cluster.wait_for("step", step=20)
        before, training, since = cluster.newest_round(), cluster.training_hosts(), time.monotonic()
        victim = training[1] if training[1] != 0 else training[0]
        (other,) = set(training) - {victim}
        cluster.kill_holder(other)
        cluster.kill_agent(victim)
        assert cluster.seconds_until_going_on(since, before)["from_step"] > 10
        assert cluster.wait_until_finished() == reference_digest(2, 60)


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_namespaces
def test_emulated_hosts_are_replaced_whatever_happens_to_them() -> None:
    rows = run_elastic(faults=["lose the endpoint", "freeze", "hang", "lose during replacement", "workers"], seed=3)
    assert all(row["lost_steps"] < row["step"] for row in rows), rows  # no start from nothing
