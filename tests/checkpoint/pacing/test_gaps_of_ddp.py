"""Under plain DDP the bursts of gradients are found by the counters of the interface, and checkpoints keep out of them.

Two emulated hosts with links of 100 Mbit/s. Counted are the bytes of checkpoints that a host puts on its link while the
gradients of DDP are on it, with the gaps known and with even pacing.
"""

import os
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from namespaces import NEEDS_NAMESPACES
from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Storage
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import load_secret
from thinwire.checkpoint.registration import Registration
from thinwire.lab.bench.checkpoint.hosts import HolderHosts
from thinwire.lab.testbed.launch import RankContext, preload, run_ranks
from thinwire.lab.testbed.network import Link

pytestmark = [*NEEDS_NAMESPACES, pytest.mark.ranks]

_WIDTH = 500  # 1 MB of gradients, 80 ms on the link; a state of 3 MB, 240 ms
_COMPUTE_SECONDS = 0.25
_COUNTED = 12


def share_in_bursts(context: RankContext, sockets: tuple[str, ...], paced: str) -> tuple[str, float, int]:
    """How bytes are granted, the share of the checkpoints' bytes that went while gradients did, and how many."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if paced == "evenly":
        Registration.sampler = lambda self: None  # type: ignore[method-assign]
    torch.manual_seed(context.rank)  # what ranks have in common would not be sent
    model = DistributedDataParallel(nn.Linear(_WIDTH, _WIDTH), init_sync=False)
    bursts: list[tuple[float, float]] = []

    def hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        started = time.perf_counter()
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None

        def ended(future: Any) -> Any:
            bursts.append((started, time.perf_counter()))
            return future.value()[0]

        return work.get_future().then(ended)

    model.register_comm_hook(None, hook)
    optimizer = torch.optim.Adam(model.parameters())
    socket = sockets[context.rank]
    seen: list[tuple[float, int]] = []
    stop = threading.Event()
    with Checkpointer(
        model, optimizer, policy=CheckpointPolicy(max_overhead=0.9), storage=Storage(paced, holder_socket=socket)
    ) as checkpointer:
        checkpointer.restore()

        def step() -> None:
            time.sleep(_COMPUTE_SECONDS)
            optimizer.zero_grad()
            model(torch.randn(4, _WIDTH)).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad.mul_(1 + context.rank)
            optimizer.step()
            checkpointer.step()

        for _ in range(75 if paced == "gaps" else 25):
            step()
        bursts.clear()

        def watch() -> None:
            with HolderClient.connect(socket, load_secret(Path(socket))) as client:
                while not stop.wait(0.004):
                    (shard,) = [each for each in client.holder_status()["shards"] if each["role"] == "own"]
                    sent = sum(replica["bytes_acknowledged"] for replica in shard["replicas"].values())
                    seen.append((time.perf_counter(), sent))

        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(_COUNTED):
            step()
        stop.set()
        watcher.join()
        how = str(checkpointer.stats()["checkpoint/grants"])
        dist.barrier()
    inside = 0.0
    for (began, before), (ended, after) in pairwise(seen):
        overlap = sum(max(0.0, min(ended, end) - max(began, start)) for start, end in bursts)
        inside += (after - before) * overlap / (ended - began)
    total = seen[-1][1] - seen[0][1]
    return how, inside / total, total


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_checkpoints_keep_out_of_the_bursts_of_ddp(tmp_path: Path) -> None:
    preload("torch._dynamo")
    found = {}
    with HolderHosts(2, Link(100.0), str(tmp_path)) as hosts:
        for paced in ("evenly", "gaps"):
            outcomes = run_ranks(
                share_in_bursts, hosts.sockets, paced, world_size=2, network=hosts.network, timeout_seconds=80.0
            )
            found[paced] = [outcome.value for outcome in outcomes]
            hosts.forget(paced)
    for even, gaps in zip(found["evenly"], found["gaps"], strict=True):
        assert "evenly" in even[0]
        assert "by the transmit counters of eth0" in gaps[0]
        assert "idle timespans" in gaps[0]
        assert gaps[2] > 3_000_000
        assert gaps[1] < 0.5 * even[1], found
