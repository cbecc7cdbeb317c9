"""What strangers send to holders, and what trainers keep there meanwhile."""

from __future__ import annotations

import random

from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.version import CHUNK_BYTES

SECRET = b"the secret of the campaign"  # which `checkpoint_faults` has too
NUM_BYTES = CHUNK_BYTES + 12_345


def write(client: HolderClient, step: int, num_bytes: int = NUM_BYTES) -> bytes:
    payload = random.Random(step).randbytes(num_bytes)
    writer = client.slot(step)
    assert writer is not None
    writer.payload[:num_bytes] = payload
    writer.payload.release()
    writer.publish(b"{}", num_bytes, wait=True)
    return payload


def hello(client: HolderClient, *replicas: str, run_id: str = "run") -> None:
    client.hello(run_id, {"ranks": 2}, 0, NUM_BYTES, replicas)
