"""How to swap payloads between ranks over Gloo: the patterns that docs/design.md compares, over the wire's time.

    python benchmarks/bench_exchange.py --hosts 8 --link 100mbit --kilobytes 112

Needs the right to make network namespaces.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

import torch
import torch.distributed as dist

from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link


def all_at_once(outgoing: list[torch.Tensor], incoming: list[torch.Tensor], others: list[int], window: int) -> None:
    receives = [dist.irecv(incoming[rank], src=rank) for rank in reversed(others)]
    sends: deque[dist.Work | None] = deque()
    for rank in others:
        sends.append(dist.isend(outgoing[rank], dst=rank))
        if len(sends) == window:
            finish(sends.popleft())
    for work in (*sends, *receives):
        finish(work)


def finish(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def measure(context: RankContext, size: int, repeat: int) -> dict[str, list[tuple[float, float]]]:
    world_size, rank = context.world_size, context.rank
    others = [(rank + step) % world_size for step in range(1, world_size)]
    sent, received = (
        torch.zeros(world_size * size, dtype=torch.uint8),
        torch.empty(world_size * size, dtype=torch.uint8),
    )
    outgoing, incoming = list(sent.split(size)), list(received.split(size))
    patterns = {
        "all_to_all_single": lambda: dist.all_to_all_single(received, sent),
        "receives first, all sends": lambda: all_at_once(outgoing, incoming, others, world_size),
        "receives first, two sends": lambda: all_at_once(outgoing, incoming, others, 2),
        "receives first, one send": lambda: all_at_once(outgoing, incoming, others, 1),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in patterns}
    for _ in range(repeat):
        for name, pattern in patterns.items():
            dist.barrier()
            instant = torch.tensor([time.perf_counter() + 0.05], dtype=torch.float64)
            dist.broadcast(instant, 0)
            time.sleep(max(0.0, instant.item() - time.perf_counter()))
            started = time.perf_counter()
            pattern()
            times[name].append((started, time.perf_counter()))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--link", type=Link.parse, default="100mbit")
    parser.add_argument("--kilobytes", type=int, default=112, help="for each peer")
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    size = options.kilobytes * 1000
    with EmulatedNetwork(options.hosts, options.link) as network:
        mbit = network.measure()
        outcomes = run_ranks(measure, size, options.repeat, world_size=options.hosts, network=network)
    bound = (options.hosts - 1) * size * 8e-6 / mbit
    print(
        f"{options.hosts} hosts, {mbit:.1f} Mbit/s measured, {options.kilobytes} kB a peer: {bound:.4f} s on the wire"
    )
    for name in outcomes[0].value:
        runs = zip(*(outcome.value[name] for outcome in outcomes), strict=True)
        seconds = [max(end for _, end in run) - min(start for start, _ in run) for run in runs]
        print(f"{name:28} {statistics.median(seconds):.4f} s  {statistics.median(seconds) / bound:.2f}x")


if __name__ == "__main__":
    main()
