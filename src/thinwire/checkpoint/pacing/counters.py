"""Times in which the network is busy, from the counters of bytes that this host has sent.

They show whatever sends: DDP, FSDP and NCCL too. They are read every 2 ms, only while
iterations are profiled (20 of them), and only those count in which no checkpoint is on its way.
"""

import contextlib
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

INTERVAL_SECONDS = 0.002
BUSY_SHARE = 0.05  # of the highest rate of an iteration: slower is other traffic
QUIET_BYTES_PER_SECOND = 250_000  # slower is no traffic of a training
_SIOCGIFADDR = 0x8915
_WORD_BYTES = 4  # port_xmit_data counts words


def interface_to(host: str) -> str:
    """Return the name of the interface on which this host sends to another one: "lo" to itself, "" if unknown."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # of UDP: nothing is sent
            own = probe.getsockname()[0]
            if own == where[0]:
                return "lo"
            for _, name in socket.if_nameindex():
                try:
                    result = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:  # an interface without an IPv4 address
                    continue
                if family == socket.AF_INET and socket.inet_ntoa(result[20:24]) == own:
                    return name
    return ""


class TransmitCounters:
    """Counter of bytes sent by an interface (all but loopback if its name is ""), and by all InfiniBand ports.

    Example: TransmitCounters("eth0").read() returns the bytes since the host was started.
    """

    def __init__(self, interface: str, root: Path = Path("/")) -> None:
        self.interface = interface
        paths = [root / "proc/thread-self/net/dev"]
        paths += sorted((root / "sys/class/infiniband").glob("*/ports/*/counters/port_xmit_data"))
        self._files = [path.open("rb", buffering=0) for path in paths]

    @property
    def name(self) -> str:
        ports = f" and {len(self._files) - 1} InfiniBand ports" if len(self._files) > 1 else ""
        return f"the transmit counters of {self.interface or 'all interfaces'}{ports}"

    def read(self) -> int:
        """Return the bytes sent so far. Raises OSError, or ValueError for a table of another form."""
        table, *ports = (os.pread(file.fileno(), 1 << 16, 0) for file in self._files)
        total = sum(_WORD_BYTES * int(port) for port in ports)
        for line in table.decode().splitlines()[2:]:
            name, _, counts = line.partition(":")
            if name.strip() == self.interface or (not self.interface and name.strip() != "lo"):
                total += int(counts.split()[8])
        return total

    def close(self) -> None:
        for file in self._files:
            file.close()


def busy_periods(samples: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """Return begin and end of the times in which the counter of (time, bytes) rises fast.

    Example:
        >>> busy_periods([(0.0, 0), (1.0, 0), (2.0, 10**9), (3.0, 10**9)])
        [(1.0, 2.0)]
    """
    rates = [
        (began, ended, (after - before) / (ended - began)) for (began, before), (ended, after) in pairwise(samples)
    ]
    least = max(QUIET_BYTES_PER_SECOND, BUSY_SHARE * max((rate for *_, rate in rates), default=0.0))
    return [(began, ended) for began, ended, rate in rates if rate > least]


class BusySampler:
    """A thread that reads the counters every 2 ms while it is switched on."""

    def __init__(self, counters: TransmitCounters) -> None:
        self.counters = counters
        self._samples: list[tuple[float, int]] = []
        self._on, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="thinwire-counters", daemon=True)
        self._thread.start()

    def switch(self, on: bool) -> None:
        (self._on.set if on else self._on.clear)()

    def take(self) -> list[tuple[float, int]]:
        """Return the (time by `time.perf_counter`, bytes) since the last call."""
        samples, self._samples = self._samples, []
        return samples

    def _run(self) -> None:
        while self._on.wait() and not self._closed:
            try:
                self._samples.append((time.perf_counter(), self.counters.read()))
            except (OSError, ValueError):  # the interface is gone: nothing is profiled any more
                self._on.clear()
            time.sleep(INTERVAL_SECONDS)
        self.counters.close()

    def close(self) -> None:
        self._closed = True
        self._on.set()
        self._thread.join()
