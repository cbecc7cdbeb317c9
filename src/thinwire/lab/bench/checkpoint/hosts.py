"""Emulated hosts with a holder on each, which can be lost and replaced."""

import json
import os
import secrets
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import HolderOptions, command, end_with_parent, load_secret
from thinwire.lab.bench.train.account import bytes_sent_in
from thinwire.lab.testbed.network import EmulatedNetwork, Link, enter_namespace


class HolderHosts:
    """Holders on ``hosts`` hosts, each in its host's network namespace; with an unlimited link all are on loopback.

    It is a context manager, and leaves no process behind: a holder dies with the thread that started it.

    Raises:
        NetAdminError: a link is asked for, but the process may not make network namespaces.
        ValueError: a holder did not start, with its reason.
    """

    def __init__(self, hosts: int, link: Link, directory: str, memory_budget: str | None = None) -> None:
        self.hosts, self._directory, self._budget = hosts, Path(directory), memory_budget
        self.network = None if link.mbit is None else EmulatedNetwork(hosts, link)
        self.link_mbit: float | None = None
        self._threads: list[ThreadPoolExecutor] = []
        self._processes: dict[int, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        try:
            if self.network is not None:
                self.network.__enter__()
                self.link_mbit = self.network.measure()
            (self._directory / "secret").write_text(secrets.token_hex(32))
            (self._directory / "secret").chmod(0o600)
            for host in range(self.hosts):
                os.link(self._directory / "secret", f"{self.sockets[host]}.secret")  # where trainers look for it
                self._threads.append(ThreadPoolExecutor(1, f"host {host}"))
                if self.network is not None:
                    self._threads[host].submit(enter_namespace, self.network.namespace(host)).result()
                self.start(host)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def sockets(self) -> tuple[str, ...]:
        """Socket paths of the holders, host by host."""
        return tuple(str(self._directory / f"host-{host}.sock") for host in range(self.hosts))

    def start(self, host: int) -> None:
        """Start an empty holder."""
        address = "127.0.0.1" if self.network is None else self.network.address(host)
        options = HolderOptions(
            bind=address, socket=self.sockets[host], secret_file=f"{self.sockets[host]}.secret",
            memory_budget=self._budget, drain_seconds=0.0,
        )  # fmt: skip
        self._processes[host] = self._threads[host].submit(_start, command(options)).result()
        output = self._processes[host].stdout
        assert output is not None
        said = json.loads(output.readline() or "{}")
        if "ready" not in said:
            raise ValueError(f"the holder of host {host} did not start: {said.get('error', 'it gave no reason')}")

    def lose(self, host: int) -> None:
        """Kill the holder of a host with SIGKILL, which loses all its versions."""
        process = self._processes.pop(host)
        process.kill()
        process.communicate()
        shutil.rmtree(self._directory / f"host-{host}.disk", ignore_errors=True)  # of rivals that write there

    def connect(self, host: int) -> HolderClient:
        """Connect to the holder like a process of that host."""
        socket = Path(self.sockets[host])
        return HolderClient.connect(socket, load_secret(socket, f"{socket}.secret"))

    def status(self, host: int) -> dict[str, Any]:
        with self.connect(host) as client:
            return client.holder_status()

    def forget(self, run_id: str) -> None:
        """Free the memory that all holders use for a run."""
        for host in range(self.hosts):
            with self.connect(host) as client:
                client.forget(run_id)

    def link_bytes_counter(self, host: int) -> int:
        """Return a descriptor of the host's table of interfaces; read it with `link_bytes`, and close it."""
        assert self.network is not None
        path = "/proc/thread-self/net/dev"
        return self._threads[host].submit(os.open, path, os.O_RDONLY | os.O_CLOEXEC).result()

    def _close(self) -> None:
        for host in list(self._processes):
            self.lose(host)
        for thread in self._threads:
            thread.shutdown()
        if self.network is not None:
            self.network.__exit__()


def link_bytes(counter: int) -> int:
    """Return the bytes that the host has put on its link so far, headers included."""
    return bytes_sent_in(os.pread(counter, 1 << 16, 0).decode(), EmulatedNetwork.interface)


def _start(line: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=end_with_parent,  # the thread that starts it, so also when this process is killed
    )  # fmt: skip
