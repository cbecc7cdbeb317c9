"""Measure the CPU seconds of two holders per GB: to seal a version, to send it, to receive it, and to fetch it.

    python benchmarks/checkpoint_cpu.py --mb 256 --versions 5

One rank publishes versions of random bytes, which its holder sends to the other one over loopback; at last an empty
holder fetches the newest. CPU seconds are those of the processes, from /proc, so other programs hardly change them. The
first two versions map the pages of new slots; later ones write to slots that were used before.
"""

from __future__ import annotations

import argparse
import os
import secrets
import tempfile
import time
from pathlib import Path

import numpy as np

from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import HolderOptions, ensure_holder, stop_holder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256, help="of a version")
    parser.add_argument("--versions", type=int, default=5)
    options = parser.parse_args()
    os.environ["THINWIRE_SECRET"] = secrets.token_hex(16)
    num_bytes = options.mb << 20
    with tempfile.TemporaryDirectory() as directory:
        clients = [
            ensure_holder(HolderOptions(socket=str(Path(directory) / name), memory_budget=f"{4 * options.mb}MB"))
            for name in ("sender", "receiver", "new")
        ]
        try:
            measure(clients, num_bytes, options.versions)
        finally:
            for client in clients:
                stop_holder(client)


def measure(clients: list[HolderClient], num_bytes: int, versions: int) -> None:
    trainer, gigabytes = clients[0], num_bytes / 1e9
    pids = [int(client.holder_status()["pid"]) for client in clients]
    addresses = [str(client.holder_status()["address"]) for client in clients]
    trainer.hello("cpu", {"world_size": 1}, 0, num_bytes, [addresses[1]], attempt=1)
    content = np.frombuffer(os.urandom(1 << 20) * (num_bytes >> 20), np.uint8)
    print("CPU seconds per GB:   seal   send   receive   all")
    for step in range(1, versions + 1):
        writer = trainer.slot(step)
        assert writer is not None
        payload = np.frombuffer(writer.payload, np.uint8)
        np.copyto(payload, content)
        payload[step::4096] = step
        del payload
        begun = [cpu_seconds(pid) for pid in pids]
        writer.publish(b"{}", num_bytes, wait=True)
        sealed = cpu_seconds(pids[0])
        trainer.grant_all()
        while trainer.status()["newest_replicated"] != step:
            time.sleep(0.02)
        ended = [cpu_seconds(pid) for pid in pids]
        costs = [sealed - begun[0], ended[0] - sealed, ended[1] - begun[1]]
        print(f"version {step:<13}", *(f"{cost / gigabytes:6.2f}" for cost in (*costs, sum(costs))), flush=True)
    newest, begun = trainer.inventory("cpu")[-1], [cpu_seconds(pid) for pid in pids]
    clients[2].fetch(newest, *addresses[:2])
    served = [cpu_seconds(pid) - before for pid, before in zip(pids, begun, strict=True)]
    print(f"fetch from both: served {sum(served[:2]) / gigabytes:.2f}, fetched {served[2] / gigabytes:.2f}")


def cpu_seconds(pid: int) -> float:
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
