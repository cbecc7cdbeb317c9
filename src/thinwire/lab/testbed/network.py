"""Emulated hosts: one network namespace per host on a bridge, every link rate-limited both ways.

The namespaces are anonymous: only open file descriptors of the launching process keep them alive, and the
bridge has a namespace of its own. Nothing is ever created in the machine's own namespace or under
/var/run/netns, so when the launching process ends in any way, SIGKILL included, the kernel frees everything.

    with EmulatedNetwork(hosts=4, link=Link.parse("100mbit")) as network:
        print(network.measure())                      # about 95: Mbit/s of TCP payload
        run_ranks(train, world_size=4, network=network)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TypeVar

from thinwire.errors import ThinwireError
from thinwire.lab.missing import missing_package
from thinwire.lab.testbed.goodput import hang_up, receive_rate_mbit, send_until_closed

Result = TypeVar("Result")

_CLONE_NEWNET = 0x40000000  # <linux/sched.h>; os.setns and os.unshare exist from Python 3.12 only
_MAX_HOSTS = 250  # one /24

# The bucket holds 4 ms of the link, at least 32 KiB: small beside a 100 KB message at 100 Mbit/s, yet longer
# than a late timer on a busy machine, so that the rate is held.
_BURST_SECONDS = 4e-3
_BURST_MIN_BYTES = 32 * 1024
# TCP hands down segments of at most half a bucket. Larger ones are cut into packets in the queue, whose crowds
# overrun the kernel's packet backlog (1000 a CPU): 60-90 % goodput instead of 95 % at 8 hosts, 100 Mbit/s.
_SEGMENT_MAX_BYTES = 65536
# Deep queues: a drop would measure TCP's recovery instead of the link.
_QUEUE_BYTES = 256 * 1024 * 1024
_QUEUE_PACKETS = 1_000_000
_QUEUE_HANDLE = 0x10000  # 1:0
_TBF_MAX_BYTES_PER_SECOND = 2**32 - 1  # the kernel's 32-bit rate field, as pyroute2 fills it
_STALL_SECONDS = 10.0


class NetAdminError(ThinwireError):
    """Raised when the process may not make network namespaces."""


@dataclass(frozen=True)
class Link:
    """The link between a host and the switch, the same in both directions; `mbit=None` is unlimited."""

    mbit: float | None

    def __post_init__(self) -> None:
        limit = _TBF_MAX_BYTES_PER_SECOND * 8 / 1e6
        if self.mbit is not None and not 0 < self.mbit <= limit:
            raise ValueError(f"link rate must be above 0 and at most {limit:.0f} Mbit/s, got {self.mbit}")

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse a text such as "100mbit", "1gbit", "2.5gbit" or "none". Raises ValueError for anything else."""
        normalized = text.strip().lower()
        if normalized == "none":
            return cls(None)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", normalized)
        if match is None:
            raise ValueError(f"unknown link {text!r}; legal forms: '100mbit', '1gbit', '2.5gbit', 'none'")
        return cls(float(match[1]) * {"mbit": 1.0, "gbit": 1000.0}[match[2]])


def enter_namespace(path: str) -> None:
    """Move the calling thread into the network namespace at `path` (see `EmulatedNetwork.namespace`).

    Call it before the process makes any socket or thread: sockets stay in the namespace of their creation. Raises
    OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _system_call("setns", fd, _CLONE_NEWNET)
    finally:
        os.close(fd)


def require_net_admin() -> None:
    """Try to make a network namespace; raise NetAdminError with the way out if that is not allowed."""
    try:
        os.close(_new_namespace())
    except OSError as error:
        raise NetAdminError(
            "emulated hosts need network namespaces, which this process may not make "
            f"({error.strerror}); start the command by `unshare -Ur`, where user namespaces are allowed, run it as root"
            " or in a container with CAP_NET_ADMIN and CAP_SYS_ADMIN, or use `--link none`"
        ) from error


_RESTARTED = "THINWIRE_IN_USER_NAMESPACE"
_AS_ROOT_OF_ITS_OWN = """
import ctypes, os, sys
user, group = os.getuid(), os.getgid()
def enter():
    if ctypes.CDLL(None).unshare(0x10000000) != 0:  # CLONE_NEWUSER
        raise OSError
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
child = os.fork()  # which tries: there is no way back
if child == 0:
    try:
        enter()
    except OSError:
        os._exit(1)
    os._exit(0)
if os.waitpid(child, 0)[1] == 0:
    enter()
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def restart_as_root_of_a_user_namespace() -> None:
    """Restart the command of this process in a user namespace where it may make network namespaces.

    There the user has the identity of root and no additional right. Another program does it, because the kernel lets
    only a process of one thread enter. Returns if this process is the restarted one.
    """
    if _RESTARTED not in os.environ:
        os.environ[_RESTARTED] = "1"
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-S", "-c", _AS_ROOT_OF_ITS_OWN, *sys.orig_argv[1:]])


def emulated(hosts: int, link: Link) -> contextlib.AbstractContextManager[EmulatedNetwork | None]:
    """Return emulated hosts with such a link, or None in their place without a limit: the loopback."""
    return contextlib.nullcontext() if link.mbit is None else EmulatedNetwork(hosts, link)


class EmulatedNetwork:
    """A network of `hosts` namespaces on one bridge; a context manager, which raises NetAdminError if not allowed.

    Each host has an interface `interface` (MTU 1500) with the address `address(host)` and a loopback. A token
    bucket at both ends of its cable limits sending and receiving to `link` each, headers included.
    """

    interface = "eth0"

    def __init__(self, hosts: int, link: Link) -> None:
        if not 1 <= hosts <= _MAX_HOSTS:
            raise ValueError(f"hosts must be between 1 and {_MAX_HOSTS}, got {hosts}")
        self.hosts = hosts
        self.link = link
        self._namespace_fds: list[int] = []

    def __enter__(self) -> Self:
        _pyroute2()
        require_net_admin()
        try:
            self._build()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def address(self, host: int) -> str:
        """Return the IPv4 address of `host`."""
        self._check(host)
        return f"10.77.0.{host + 1}"

    def namespace(self, host: int) -> str:
        """Return a path for `enter_namespace`, for any process of the same user, valid while the network is open."""
        self._check(host)
        if not self._namespace_fds:
            raise RuntimeError("the emulated network is closed; use it inside its `with` block")
        return f"/proc/{os.getpid()}/fd/{self._namespace_fds[host]}"

    def cut(self, host: int) -> None:
        """Drop all traffic to and from `host` from now on, unnoticed: its cable stays up."""
        self._plug(host, plugged=False)

    def mend(self, host: int) -> None:
        """Undo `cut`."""
        self._plug(host, plugged=True)

    def _plug(self, host: int, plugged: bool) -> None:
        """Connect a host's port to the switch, or disconnect it; once down, a port needs a second to come back."""
        self._check(host)

        def plug() -> None:
            with _pyroute2().IPRoute() as route:
                bridge, port = (route.link_lookup(ifname=name)[0] for name in ("bridge", f"port{host}"))
                route.link("set", index=port, master=bridge if plugged else 0)

        in_namespace(f"/proc/{os.getpid()}/fd/{self._namespace_fds[-1]}", plug)

    def wire_bytes_sent(self, host: int) -> int:
        """Return the bytes that `host` has put on its link so far, with Ethernet, IP and TCP headers.

        It is the counter of the queue, which knows the packets that a large segment is cut into; the counter
        of the interface sees one header per segment of up to 64 KB.
        """
        return in_namespace(self.namespace(host), _queue_bytes_sent)

    def measure(self, seconds: float = 1.0) -> float:
        """Return the TCP goodput in Mbit/s of streams host i -> (i + 1) % hosts, all at once; the minimum over hosts.

        A warm-up empties the token buckets first. With one host the stream stays on its loopback.
        """
        with ThreadPoolExecutor(2 * self.hosts) as pool, contextlib.ExitStack() as sockets:
            rates = []
            streams = [self._stream(host, (host + 1) % self.hosts, sockets) for host in range(self.hosts)]
            for sender, receiver in streams:
                pool.submit(send_until_closed, sender)
                rates.append(pool.submit(receive_rate_mbit, receiver, seconds))
            return min(rate.result() for rate in rates)

    def _check(self, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise ValueError(f"host must be between 0 and {self.hosts - 1}, got {host}")

    def _close(self) -> None:
        while self._namespace_fds:
            os.close(self._namespace_fds.pop())

    def _build(self) -> None:
        for _ in range(self.hosts):
            self._namespace_fds.append(_new_namespace())
        # The switch is last. No other process enters it, and it lives as long as the cables of the hosts.
        self._namespace_fds.append(_new_namespace())
        switch = f"/proc/{os.getpid()}/fd/{self._namespace_fds[-1]}"
        in_namespace(switch, lambda: _build_switch(self._namespace_fds[: self.hosts], self.link))
        for host in range(self.hosts):
            address = self.address(host)
            in_namespace(self.namespace(host), lambda address=address: _build_host(address, self.link))

    def _stream(self, source: int, target: int, sockets: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
        """A connected TCP pair from `source` to `target`; `sockets` hangs up and closes both."""
        address = self.address(target)
        with in_namespace(self.namespace(target), lambda: socket.create_server((address, 0))) as listener:
            port = listener.getsockname()[1]
            sender = sockets.enter_context(
                in_namespace(self.namespace(source), lambda: socket.create_connection((address, port)))
            )
            receiver = sockets.enter_context(listener.accept()[0])
        receiver.settimeout(_STALL_SECONDS)
        sockets.callback(hang_up, sender)
        return sender, receiver


def _pyroute2() -> ModuleType:
    try:
        import pyroute2
    except ImportError as error:
        raise missing_package("pyroute2", "a network of emulated hosts") from error
    return pyroute2


def _system_call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def _in_new_thread(function: Callable[[], Result]) -> Result:
    """Run `function` in a thread of its own, so that its change of namespace ends with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def in_namespace(path: str, function: Callable[[], Result]) -> Result:
    """Return the result of `function`, run in a thread that is inside the network namespace at `path`."""

    def run() -> Result:
        enter_namespace(path)
        return function()

    return _in_new_thread(run)


def _new_namespace() -> int:
    """A descriptor of a new anonymous network namespace."""

    def unshare() -> int:
        _system_call("unshare", _CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_new_thread(unshare)


def _build_switch(host_namespace_fds: list[int], link: Link) -> None:
    """In the switch's namespace: a bridge, and for each host a cable whose far end is put into the host."""
    with _pyroute2().IPRoute() as route:
        route.link("add", ifname="bridge", kind="bridge")
        bridge = route.link_lookup(ifname="bridge")[0]
        route.link("set", index=bridge, state="up")
        for host, fd in enumerate(host_namespace_fds):
            peer = {"ifname": EmulatedNetwork.interface, "net_ns_fd": fd}
            route.link("add", ifname=f"port{host}", kind="veth", peer=peer)
            port = route.link_lookup(ifname=f"port{host}")[0]
            _limit(route, port, link)
            route.link("set", index=port, master=bridge, state="up")


def _build_host(address: str, link: Link) -> None:
    """In a host's namespace: loopback, the interface, its address and its queue."""
    # Reno fills a queue that never drops (95.2 % at 50-200 Mbit/s, spread 0.1 %); cubic can leave slow start at the
    # first delay, BBR pauses to probe for one (60 % seen). A read-only /proc keeps the default, less steady.
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
    with _pyroute2().IPRoute() as route:
        route.link("set", index=route.link_lookup(ifname="lo")[0], state="up")
        index = route.link_lookup(ifname=EmulatedNetwork.interface)[0]
        route.addr("add", index=index, address=address, prefixlen=24)
        _limit(route, index, link)
        route.link("set", index=index, state="up")


def _limit(route: Any, index: int, link: Link) -> None:
    if link.mbit is None:
        # Unlimited, but a queue that counts packets and does not drop them.
        route.tc("add", "pfifo", index=index, handle=_QUEUE_HANDLE, limit=_QUEUE_PACKETS)
        return
    rate = int(link.mbit * 1e6 / 8)  # bytes per second
    burst_bytes = max(_BURST_MIN_BYTES, int(rate * _BURST_SECONDS))
    route.link("set", index=index, gso_max_size=min(_SEGMENT_MAX_BYTES, burst_bytes // 2))
    route.tc("add", "tbf", index=index, handle=_QUEUE_HANDLE, rate=rate, burst=burst_bytes, limit=_QUEUE_BYTES)


def _queue_bytes_sent() -> int:
    with _pyroute2().IPRoute() as route:
        index = route.link_lookup(ifname=EmulatedNetwork.interface)[0]
        for qdisc in route.get_qdiscs(index=index):
            if qdisc["handle"] == _QUEUE_HANDLE:
                return qdisc.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["bytes"]
    raise AssertionError("the interface of an emulated host has lost its queue")
