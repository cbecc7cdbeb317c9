"""A training under torchrun with the thinwire rendezvous, on emulated hosts that are lost, stopped and replaced.

    with ElasticCluster(hosts=3, standbys=1, steps=60) as cluster:
        cluster.wait_for_step(20)
        cluster.lose(1)                     # every process by kill -9, its memory, its link
        print(cluster.wait_until_finished())

The module is also the program of the workers: each step is written to a file, with its time, and at the end a digest of
all parameters. `reference_digest` is that of a training that nothing disturbs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Self

from thinwire.checkpoint.elastic.warm import MODULE
from thinwire.lab.testbed import network
from thinwire.lab.testbed.network import EmulatedNetwork, Link, enter_namespace

_SOURCE = Path(network.__file__).resolve().parents[3]
_PORT, _RUN_ID = 29400, "elastic"


class ElasticCluster:
    """Hosts with an agent each; a context manager, which leaves no process behind.

    Args:
        hosts: hosts that train, one rank each.
        standbys: hosts beyond them.
        steps: of the training.
        min_hosts: least number of hosts that go on; default all of them.
        endpoints: how many of the first hosts serve the rendezvous.
        emulated: hosts with a network of their own (needs rights), or processes of this host that share its loopback.
        width: of the model's hidden layers, by which the state grows.
        step_seconds: sleep in each step.
        link: of each emulated host.
        warm: workers are forks of a process that has imported torch.
        step_timeout: seconds without a step after which a worker hangs.
    """

    def __init__(
        self,
        hosts: int,
        standbys: int = 0,
        steps: int = 60,
        min_hosts: int | None = None,
        endpoints: int = 1,
        emulated: bool = True,
        width: int = 64,
        step_seconds: float = 0.05,
        link: Link | None = None,
        stop: _StopFile | None = None,
        warm: bool = True,
        step_timeout: float = 1800.0,
    ) -> None:
        self._stop, self._warm, self._step_timeout = stop, warm, step_timeout
        self.hosts, self.standbys, self.steps, self.step_seconds, self.width = (
            hosts,
            standbys,
            steps,
            step_seconds,
            width,
        )
        self._low = hosts if min_hosts is None else min_hosts
        self._network = EmulatedNetwork(hosts + standbys, link or Link(None)) if emulated else None
        self._endpoints, self._secret = endpoints, secrets.token_hex(16)
        self._port = _PORT if emulated else random.randrange(20000, 29000)
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._starts: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        self.directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-elastic-")))
        (self.directory / "events").mkdir()
        _declare_backend(self.directory)
        try:
            if self._network is not None:
                self._stack.enter_context(self._network)
            for host in range(self.hosts + self.standbys):
                self.start(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in list(self._agents):
            self._kill(host)
        self._stack.close()

    def all_hosts(self) -> list[int]:
        return sorted(self._agents)

    def address(self, host: int) -> str:
        return "127.0.0.1" if self._network is None else self._network.address(host)

    def start(self, host: int) -> None:
        """Start the agent of a host that has none, as the host's init system would."""
        own = self.directory / f"host{host}"
        own.mkdir(exist_ok=True)
        self._starts[host] = self._starts.get(host, 0) + 1
        ports = range(self._port, self._port + self._endpoints)
        endpoints = [f"{self.address(at)}:{self._port if self._network else port}" for at, port in enumerate(ports)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_SOURCE), str(self.directory), os.environ.get("PYTHONPATH", "")]),
            "THINWIRE_SECRET": self._secret,
            "THINWIRE_HOLDER": str(own / "holder.sock"),
            "GLOO_SOCKET_IFNAME": "lo" if self._network is None else EmulatedNetwork.interface,
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=thinwire", f"--rdzv-id={_RUN_ID}",
            f"--rdzv-endpoint={','.join(endpoints)}", f"--nnodes={self._low}:{self.hosts}", "--nproc-per-node=1",
            f"--rdzv-conf=memory_budget=256MiB,step_timeout={self._step_timeout}", "--max-restarts=1000",
            f"--local-addr={self.address(host)}", *(["-m", MODULE] if self._warm else []),
            str(Path(__file__).resolve()), str(self.steps), str(self.step_seconds), str(self.width),
            str(self.directory / "events"), str(host), "" if self._stop is None else str(self._stop.path),
        ]  # fmt: skip
        namespace = None if self._network is None else self._network.namespace(host)
        with (own / "log").open("ab") as log:
            self._agents[host] = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=None if namespace is None else lambda: enter_namespace(namespace),
            )

    def lose(self, host: int) -> None:
        """Take a host away with everything on it: its link first, so that no farewell gets out."""
        if self._network is not None:
            self._network.cut(host)
        self._kill(host)
        shutil.rmtree(self.directory / f"host{host}" / "run", ignore_errors=True)
        for file in (self.directory / f"host{host}").glob("holder.sock*"):
            file.unlink(missing_ok=True)

    def replace(self, host: int) -> None:
        """Start an empty host at the address of one that was lost."""
        if self._network is not None:
            self._network.mend(host)
        self.start(host)

    def kill_workers(self, host: int) -> None:
        for pid in self._workers(host):
            _signal(pid, signal.SIGKILL)

    def freeze_workers(self, host: int) -> None:
        """Stop the workers of a host and nothing else, as a deadlock would."""
        for pid in self._workers(host):
            _signal(pid, signal.SIGSTOP)

    def kill_agent(self, host: int) -> None:
        """Kill torchrun on a host; its workers are orphans then."""
        _signal(self._agents[host].pid, signal.SIGKILL)
        self._agents[host].wait()

    def kill_holder(self, host: int) -> None:
        for pid, command in self._processes(host):
            if "daemon.py" in command:
                _signal(pid, signal.SIGKILL)

    def freeze(self, host: int) -> None:
        """Stop every process of a host, as a hung machine would; `thaw` lets them go on."""
        for pid, _ in self._processes(host):
            _signal(pid, signal.SIGSTOP)

    def thaw(self, host: int) -> None:
        for pid, _ in self._processes(host):
            _signal(pid, signal.SIGCONT)

    def cut(self, host: int) -> None:
        """Drop all traffic of a host that goes on running; `mend` undoes it."""
        assert self._network is not None, "only emulated hosts have a link of their own"
        self._network.cut(host)

    def mend(self, host: int) -> None:
        assert self._network is not None
        self._network.mend(host)

    def events(self) -> list[dict[str, Any]]:
        """Return what workers wrote, by time: "started", "imported", "joined", "restored", "step", "finished"."""
        found = []
        for file in (self.directory / "events").iterdir():
            for line in file.read_text().splitlines():
                with contextlib.suppress(ValueError):  # a line that a killed worker did not finish
                    found.append(json.loads(line))
        return sorted(found, key=lambda event: event["time"])

    def wait_for(self, kind: str, after: float = 0.0, step: int = 0, timeout: float = 120.0) -> dict[str, Any]:
        """Return the first event of that kind, and of that step or a later one, after a moment; TimeoutError."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for event in self.events():
                if event["kind"] == kind and event["time"] > after and event["step"] >= step:
                    return event
            self._check_agents()
            time.sleep(0.05)
        raise TimeoutError(f"no {kind!r} of step {step} in {timeout} s:\n{self.logs()}")

    def wait_until_warm(self, timeout: float = 120.0) -> None:
        """Wait until the warm processes of all hosts that run have imported everything, those of standbys included."""
        running = [host for host, agent in self._agents.items() if agent.poll() is None and self._warm]
        for host in running:
            run = hashlib.sha256(_RUN_ID.encode()).hexdigest()[:5]  # as the names of all that is of one run
            path, deadline = f"{self.directory}/host{host}/holder.sock.{run}", time.monotonic() + timeout
            while True:
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                    stranger.settimeout(timeout)
                    stranger.connect(path)
                    stranger.shutdown(socket.SHUT_WR)  # it asks for nothing, and is answered by the end
                    if stranger.recv(1) == b"":
                        break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"host {host} is not warm in {timeout} s:\n{self.logs()}")
                time.sleep(0.1)

    def training_hosts(self) -> list[int]:
        """Return the hosts of the newest round, in the order of their ranks."""
        newest: dict[int, dict[str, Any]] = {}
        for event in self.events():
            if event["kind"] == "restored":
                newest = {rank: other for rank, other in newest.items() if other["round"] == event["round"]}
                newest[event["rank"]] = event
        return [newest[rank]["host"] for rank in sorted(newest)]

    def wait_until_finished(self, timeout: float = 120.0) -> str:
        """Return the digest of the parameters, the same on all ranks, once all agents that live have ended.

        Raises AssertionError if ranks differ, or if a torchrun that was not killed does not end with status 0.
        """
        self.wait_for("finished", timeout=timeout)
        deadline = time.monotonic() + 30
        while any(agent.poll() is None for agent in self._agents.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if any(agent.poll() is None for agent in self._agents.values()):
            raise TimeoutError(f"agents did not end:\n{self.logs()}")
        codes = {host: agent.returncode for host, agent in self._agents.items()}
        if any(code not in (0, -signal.SIGKILL) for code in codes.values()):
            raise AssertionError(f"torchrun ended with {codes}:\n{self.logs()}")
        digests = {event["digest"] for event in self.events() if event["kind"] == "finished"}
        if len(digests) != 1:
            raise AssertionError(f"ranks ended with different parameters: {digests}")
        return digests.pop()

    def logs(self, lines: int = 40) -> str:
        texts = []
        for host in sorted(self._agents):
            log = (self.directory / f"host{host}" / "log").read_text(errors="replace").splitlines()
            texts.append(f"--- host {host}\n" + "\n".join(log[-lines:]))
        return "\n".join(texts)

    def newest_round(self) -> str:
        return next((event["round"] for event in reversed(self.events()) if event["kind"] == "restored"), "")

    def seconds_until_going_on(self, since: float, before: str, timeout: float = 120.0) -> dict[str, float]:
        """Return seconds from ``since`` to each phase of the first round after ``before`` that makes a step.

        "started": the last worker's process runs; "imported": torch is imported; "joined": it has a process group;
        "restored"; "step": the first step is done.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            later = [event for event in self.events() if event["round"] != before and event["time"] > since]
            step = next((event for event in later if event["kind"] in ("step", "finished")), None)
            if step is not None:
                of_round = [event for event in later if event["round"] == step["round"]]
                phases = ("started", "imported", "joined", "restored")
                times = {kind: [event["time"] for event in of_round if event["kind"] == kind] for kind in phases}
                found = {kind: max(moments) - since for kind, moments in times.items() if moments}
                return {**found, "step": step["time"] - since, "from_step": float(step["step"])}
            self._check_agents()
            time.sleep(0.05)
        raise TimeoutError(f"training did not go on in {timeout} s:\n{self.logs()}")

    def _check_agents(self) -> None:
        if self._agents and all(agent.poll() is not None for agent in self._agents.values()):
            raise RuntimeError(f"all agents have ended:\n{self.logs()}")

    def _kill(self, host: int) -> None:
        for _ in range(3):  # one that is being killed may just have started another
            for pid, _ in self._processes(host):
                _signal(pid, signal.SIGKILL)
        self._agents[host].wait()

    def _workers(self, host: int) -> list[int]:
        """Return the processes of a host that train, by the names of the files in which they write events."""
        running = {pid for pid, _ in self._processes(host)}
        return [
            pid for file in (self.directory / "events").glob(f"{host}.*") if (pid := int(file.suffix[1:])) in running
        ]

    def _processes(self, host: int) -> list[tuple[int, str]]:
        """Everything that runs on a host, known by the holder's socket in its environment."""
        mark = f"THINWIRE_HOLDER={self.directory}/host{host}/holder.sock".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        found.append((int(entry.name), command))
        return found


FAULTS = ("lose", "lose the endpoint", "workers", "agent", "holder", "freeze", "cut", "hang", "lose during replacement")


def run_elastic(
    hosts: int = 3,
    standbys: int = 1,
    faults: Sequence[str] = FAULTS,
    seed: int = 0,
    width: int = 64,
    link: Link | None = None,
    log: Callable[[dict[str, Any]], None] | None = None,
    warm: bool = True,
    step_timeout: float = 10.0,
) -> list[dict[str, Any]]:
    """Inject faults into a training on emulated hosts, one after the other, at random moments; return a row for each.

    A lost host is replaced by an empty one once training goes on, which stands by then. Rows have the fault, the host,
    the newest step by then, ``lost_steps``, and the seconds from the fault to each phase of the way back (see
    `ElasticCluster.seconds_until_going_on`). Raises AssertionError if the parameters at the end are not, to the bit,
    those of a training that nothing disturbed.
    """
    rows: list[dict[str, Any]] = []
    chance, endless = random.Random(seed), 10**6
    stop = _StopFile()
    options: Any = {"endpoints": hosts, "width": width, "link": link, "warm": warm, "step_timeout": step_timeout}
    with stop, ElasticCluster(hosts, standbys, endless, stop=stop, **options) as cluster:
        cluster.wait_for("step", step=5)
        for fault in faults:
            cluster.wait_until_warm()
            time.sleep(chance.uniform(0.5, 3.0))
            row = _inject(cluster, fault, chance)
            rows.append(row)
            (log or (lambda row: None))(row)
        cluster.wait_until_warm()  # a standby that starts after the end of the run waits for another one
        stop.at(max(event["step"] for event in cluster.events()) + 20)
        digest, steps = cluster.wait_until_finished(), stop.step
    reference = reference_digest(hosts, steps, width)
    if digest != reference:
        raise AssertionError(f"after {steps} steps the parameters are {digest}, and undisturbed {reference}")
    return rows


def _inject(cluster: ElasticCluster, fault: str, chance: random.Random) -> dict[str, Any]:
    training, before = cluster.training_hosts(), cluster.newest_round()
    victim, since = chance.choice(training), time.monotonic()
    if fault == "lose the endpoint":  # the first of the list that trains; another one may serve by now
        victim = min(training)
    step = max(event["step"] for event in cluster.events() if event["kind"] == "step")
    lost = [victim] if fault.startswith("lose") else []
    if lost:
        cluster.lose(victim)
    else:
        {"workers": cluster.kill_workers, "agent": cluster.kill_agent, "holder": cluster.kill_holder,
         "freeze": cluster.freeze, "cut": cluster.cut, "hang": cluster.freeze_workers}[fault](victim)  # fmt: skip
    if fault == "lose during replacement":
        time.sleep(chance.uniform(0.0, 8.0))
        newcomer = next((host for host in cluster.all_hosts() if host not in training), None)
        if newcomer is not None:  # which keeps nothing yet that no other host has
            cluster.lose(newcomer)
            lost.append(newcomer)
            cluster.replace(victim)
            lost.remove(victim)
    if fault == "holder":
        phases = {"step": cluster.wait_for("step", after=since)["time"] - since, "from_step": step + 1.0}
    else:
        phases = cluster.seconds_until_going_on(since, before)
    {"freeze": cluster.thaw, "cut": cluster.mend, "agent": cluster.start}.get(fault, lambda host: None)(victim)
    for host in lost:
        cluster.replace(host)
    from_step = int(phases.pop("from_step"))
    cluster.wait_for("step", step=step + 5)
    seconds = {f"{phase}_seconds": round(value, 2) for phase, value in phases.items()}
    return {"fault": fault, "host": victim, "step": step, "lost_steps": max(0, step - from_step + 1), **seconds}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _declare_backend(directory: Path) -> None:
    """In a source tree that was installed before it had the entry point, declare it."""
    if "thinwire" not in {point.name for point in entry_points(group="torchrun.handlers")}:
        info = directory / "thinwire_elastic-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thinwire-elastic\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[torchrun.handlers]\nthinwire = thinwire.checkpoint.elastic:handler\n")


class _StopFile:
    """A file with the number of steps, written once it is known when the training is to end."""

    def __init__(self) -> None:
        self.step = 0

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="thinwire-stop-")
        self.path = Path(self._directory.name) / "steps"
        return self

    def __exit__(self, *_: object) -> None:
        self._directory.cleanup()

    def at(self, step: int) -> None:
        self.step = step
        partial = self.path.with_suffix(".partial")
        partial.write_text(str(step))
        partial.replace(self.path)


def reference_digest(hosts: int, steps: int, width: int = 64) -> str:
    """Return the digest of the parameters of the same training on as many ranks, undisturbed, without checkpoints."""
    from thinwire.lab.testbed.launch import run_ranks

    outcomes = run_ranks(_reference, steps, width, world_size=hosts)
    return outcomes[0].value


def _reference(context: Any, steps: int, width: int) -> str:
    return train(steps, 0.0, width, keep=False)


def train(
    steps: int, step_seconds: float, width: int, report: Any = None, keep: bool = True, stop: Path | None = None
) -> str:
    """Train on this rank and return a digest of the parameters; the same bits whatever happens on the way."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from thinwire.checkpoint import Checkpointer, Storage

    report = report or (lambda *_, **__: None)
    report("imported")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    report("joined")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    with contextlib.ExitStack() as stack:
        step, checkpointer = 0, None
        if keep:
            storage = Storage(replicas=min(2, dist.get_world_size()))
            checkpointer = stack.enter_context(Checkpointer(model, optimizer, storage=storage))
            step = checkpointer.restore() or 0
            report("restored", step)
        while step < _last_step(steps, stop):
            inputs = torch.randn(8, 16)
            optimizer.zero_grad()
            (model(inputs).flatten() - inputs.sum(1)).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            optimizer.step()
            step += 1
            if checkpointer is not None:
                checkpointer.step()
            report("step", step)
            time.sleep(step_seconds)
        dist.barrier()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    report("finished", step, digest=digest.hexdigest())
    if keep:
        dist.destroy_process_group()
    return digest.hexdigest()


def _last_step(steps: int, stop: Path | None) -> int:
    with contextlib.suppress(OSError, ValueError):
        return steps if stop is None else int(stop.read_text())
    return steps


def _main() -> None:
    steps, step_seconds, width = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    events, host, stop = Path(sys.argv[4]), int(sys.argv[5]), Path(sys.argv[6]) if sys.argv[6] else None
    about = {"rank": int(os.environ["RANK"]), "host": host, "round": os.environ["MASTER_PORT"]}
    with (events / f"{host}.{os.getpid()}").open("a", buffering=1) as file:

        def report(kind: str, step: int = 0, **more: Any) -> None:
            event = {"kind": kind, "step": step, "time": time.monotonic(), **about, **more}
            file.write(json.dumps(event) + "\n")

        report("started")
        train(steps, step_seconds, width, report, stop=stop)


if __name__ == "__main__":
    _main()
