"""Traffic on each host's link while checkpoints are made, sampled every few milliseconds."""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.checkpoint.holder.client import HolderClient
from thinwire.lab.bench.checkpoint.hosts import HolderHosts, link_bytes

INTERVAL_SECONDS = 0.01
BIN_SECONDS = 0.02
_HEADERS = 1514 / 1448  # bytes of a full Ethernet frame, and of the payload in it


@dataclass(frozen=True)
class TrafficSample:
    """Counters of one host since its start: bytes on its link, and checkpoint bytes acknowledged by peers."""

    at: float
    link_bytes: int
    checkpoint_bytes: int


class Sampler:
    """Thread that samples all hosts of an emulated network from `start` to `stop`."""

    def __init__(self, hosts: HolderHosts) -> None:
        self._hosts, self._stopping = hosts, threading.Event()
        self.samples: list[list[TrafficSample]] = [[] for _ in range(hosts.hosts)]
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(self._hosts.connect(host)) for host in range(self._hosts.hosts)]
            counters = [self._hosts.link_bytes_counter(host) for host in range(self._hosts.hosts)]
            for counter in counters:
                stack.callback(os.close, counter)
            while not self._stopping.is_set():
                next_at = time.perf_counter() + INTERVAL_SECONDS
                for samples, client, counter in zip(self.samples, clients, counters, strict=True):
                    samples.append(TrafficSample(time.perf_counter(), link_bytes(counter), _acknowledged(client)))
                self._stopping.wait(max(0.0, next_at - time.perf_counter()))


def _acknowledged(client: HolderClient) -> int:
    shards = client.holder_status()["shards"]
    return sum(replica["bytes_acknowledged"] for shard in shards for replica in shard["replicas"].values())


def rates(
    samples: Sequence[TrafficSample], started: float, ended: float
) -> tuple[list[float], list[float], list[float]]:
    """Return the middles of bins in seconds from ``started``, and the Mbit/s of other traffic and of checkpoints in
    each.

    Both include headers. A byte counts between the samples around it, evenly.

    Example:
        >>> rates([Sample(0.0, 0, 0), Sample(0.02, 5000, 1448)], 0.0, 0.02)
        ([0.01], [1.394...], [0.605...])
    """
    count = max(1, round((ended - started) / BIN_SECONDS))
    edges = started + (ended - started) * np.arange(count + 1) / count
    at = [sample.at for sample in samples]
    link = np.interp(edges, at, [sample.link_bytes for sample in samples])
    own = _HEADERS * np.interp(edges, at, [sample.checkpoint_bytes for sample in samples])
    to_mbit = 8e-6 / np.diff(edges)
    checkpoints = to_mbit * np.diff(own)
    others = np.maximum(0.0, to_mbit * np.diff(link) - checkpoints)
    return ((edges[:-1] + edges[1:]) / 2 - started).tolist(), others.tolist(), checkpoints.tolist()


def timeline(
    samples: Sequence[Sequence[TrafficSample]], steps: Sequence[Sequence[tuple[float, float]]]
) -> dict[str, Any]:
    """Return the data of the picture, for JSON: rates of each host, and its rank's times in `Checkpointer.step`.

    Args:
        steps: for each rank, begin and end of each call.
    """
    started = min(begin for marks in steps for begin, _ in marks)
    ended = max(end for marks in steps for _, end in marks)
    hosts = []
    for own, marks in zip(samples, steps, strict=True):
        middles, others, checkpoints = rates(own, started, ended)
        hosts.append(
            {
                "seconds": _rounded(middles),
                "gradient_mbit": _rounded(others),
                "checkpoint_mbit": _rounded(checkpoints),
                "steps": [_rounded([begin - started, end - started]) for begin, end in marks],
            }
        )
    return {"seconds": round(ended - started, 4), "hosts": hosts}


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]
