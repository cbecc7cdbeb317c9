"""Holders, each as on a host of its own, and their clients."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.server import Holder
from thinwire.checkpoint.holder.start import HolderOptions, start_holder
from thinwire.checkpoint.holder.version import CHUNK_BYTES

SECRET = b"a secret of the tests, long enough"
TOPOLOGY = {"machines": [0, 1]}
NUM_BYTES = CHUNK_BYTES + 12_345
LAYOUT = b'{"tree": 1}'


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


@contextlib.contextmanager
def client_of(holder: Holder | Path, hello: bool = True, **options: Any) -> Iterator[HolderClient]:
    path = holder if isinstance(holder, Path) else holder.config.socket_path
    with HolderClient.connect(path, SECRET) as client:
        if hello:
            given = {"run_id": "run", "topology": TOPOLOGY, "owner": 0, "payload_bytes": NUM_BYTES, **options}
            client.hello(**given)
        yield client


def payload_of(step: int) -> bytes:
    return bytes((step * 7 + i) % 251 for i in range(1000)) * (NUM_BYTES // 1000 + 1)


def write(client: HolderClient, step: int, keep_step: int | None = None, wait: bool = True) -> bool:
    writer = client.slot(step, keep_step)
    if writer is None:
        return False
    writer.payload[:] = payload_of(step)[:NUM_BYTES]
    writer.payload.release()
    writer.publish(LAYOUT, wait=wait)
    return True


def steps(client: HolderClient, **options: Any) -> list[int]:
    return sorted(version.step for version in client.inventory("run", **options))


def check(client: HolderClient, step: int) -> None:
    (version,) = [version for version in client.inventory("run") if version.step == step]
    with client.open(version) as reader:
        assert reader.layout == LAYOUT
        assert reader.payload == payload_of(step)[:NUM_BYTES]


@contextlib.contextmanager
def holder_process(directory: Path, name: str, **options: Any) -> Iterator[dict[str, Any]]:
    secret = directory / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    given = {"socket": str(directory / name), "secret_file": str(secret), "memory_budget": "200MB", **options}
    said = start_holder(HolderOptions(**given))
    try:
        yield said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(said["pid"], signal.SIGCONT)
            os.kill(said["pid"], signal.SIGKILL)
        wait_for(lambda: not _alive(said["pid"]))


def _state(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return "gone"


def _alive(pid: int) -> bool:
    """A zombie is dead: who adopts it may not be in a hurry."""
    return _state(pid) not in ("Z", "X", "gone")


def pause(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _state(pid) == "T")


def flip(holder: Holder, step: int, place: int) -> None:
    for shard in holder.store.shards.values():
        for holding in shard.holdings:
            if holding.manifest is not None and holding.manifest.step == step:
                with holding.slot.payload() as payload:
                    payload[place] ^= 1


def is_there(holder: Holder, step: int, payload: bytes) -> bool:
    with client_of(holder, hello=False) as peer:
        (version,) = [version for version in peer.inventory("run") if version.step == step]
        with peer.open(version) as reader:
            return bytes(reader.payload) == payload
