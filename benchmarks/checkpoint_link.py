"""Measure the share of its link at which a host that has lost its memory gets a version from one, two and more others.

    python benchmarks/checkpoint_link.py --link 100mbit --mb 48 --sources 1,2,3      # as root, for emulated hosts

Each host is emulated and has a holder. One rank publishes a version of random bytes, which its holder sends to all
other sources; then the holder of an empty host fetches it, `--repeat` times. A row has the median and the extremes of
the payload's bits a second, over the goodput that one stream of TCP has between two of these hosts in the same run.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import HolderOptions, ensure_holder, stop_holder
from thinwire.lab.testbed.network import EmulatedNetwork, Link, in_namespace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", type=Link.parse, default="100mbit")
    parser.add_argument("--mb", type=int, default=48, help="of a version")
    parser.add_argument("--sources", default="1,2,3", help="numbers of hosts that have it")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    os.environ["THINWIRE_SECRET"] = secrets.token_hex(16)
    print("| sources | Mbit/s of one stream | seconds | share of the link (least, most) | bytes of each source |")
    print("|---|---|---|---|---|")
    for count in map(int, options.sources.split(",")):
        with EmulatedNetwork(count + 1, options.link) as network, tempfile.TemporaryDirectory() as directory:
            print(measure(network, directory, options.mb << 20, options.repeat), flush=True)


def measure(network: EmulatedNetwork, directory: str, num_bytes: int, repeat: int) -> str:
    """Return a row; the last host of the network is the one that fetches."""
    count = network.hosts - 1
    goodput = network.measure()

    def holder(host: int) -> HolderClient:
        path = str(Path(directory) / f"host{host}.sock")
        options = HolderOptions(bind=network.address(host), socket=path, memory_budget=str(3 * num_bytes))
        return in_namespace(network.namespace(host), lambda: ensure_holder(options))

    clients = [holder(host) for host in range(count)]
    try:
        trainer, addresses = clients[0], [str(client.holder_status()["address"]) for client in clients]
        trainer.hello("link", {"world_size": 1}, 0, num_bytes, addresses[1:], attempt=1)
        writer = trainer.slot(1)
        assert writer is not None
        np.copyto(np.frombuffer(writer.payload, np.uint8), np.frombuffer(os.urandom(num_bytes), np.uint8))
        writer.publish(b"{}", num_bytes, wait=True)
        trainer.grant_all()
        while trainer.status()["newest_replicated"] != 1:
            time.sleep(0.02)
        (version,), seconds = trainer.inventory("link"), []
        for _ in range(repeat):
            client = holder(count)
            began = time.monotonic()
            client.fetch(version, *addresses)
            seconds.append(time.monotonic() - began)
            stop_holder(client)
        served = [int(client.holder_status()["bytes_served"]) for client in clients]
    finally:
        for client in clients:
            stop_holder(client)
    shares = sorted(8 * num_bytes / 1e6 / each / goodput for each in seconds)
    parts = ", ".join(f"{100 * each / sum(served):.0f} %" for each in served)
    return (
        f"| {count} | {goodput:.1f} | {statistics.median(seconds):.2f} | {statistics.median(shares):.3f}"
        f" ({shares[0]:.3f}, {shares[-1]:.3f}) | {parts} |"
    )


if __name__ == "__main__":
    main()
