"""Hosts of a training: a holder in a process of its own on each, which can be killed, paused, cut off and altered."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any, Self

from injected import Faults
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.slots import State
from thinwire.checkpoint.holder.start import HolderOptions
from thinwire.checkpoint.holder.version import Manifest
from thinwire.lab.testbed.network import EmulatedNetwork, enter_namespace

SECRET = "the secret of the campaign"
BUDGET = "100MB"
_SCRIPT = Path(__file__).with_name("holder_process.py")
_STATE_AND_MANIFEST = struct.Struct("<IQI")  # of a slot: state, bytes and CRC-32 of the manifest
_STATE_OFFSET, _PAYLOAD_OFFSET_AT, _HEADER_BYTES, _MANIFEST_OFFSET = 12, 40, 56, 4096
_WAIT_SECONDS = 20.0


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Raises TimeoutError, with ``what``, if the condition does not come to be in 20 seconds."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {_WAIT_SECONDS:.0f} seconds: {what}")
        time.sleep(0.01)


class Hosts:
    """Hosts by name, ``a``, ``b`` and so on; a context manager that leaves no process behind.

    With a ``network``, the holders are on its hosts, in the order of their names; else all are on loopback.
    """

    def __init__(self, directory: Path, network: EmulatedNetwork | None = None) -> None:
        self.directory, self._network = directory, network
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._processes):
            self.kill(name)

    def socket(self, name: str) -> str:
        return str(self.directory / name)

    def sockets(self, names: str) -> tuple[str, ...]:
        """Of the holder of each rank: ``"abb"`` for three ranks on two hosts."""
        return tuple(self.socket(name) for name in names)

    def start(
        self,
        names: str,
        faults: Faults | None = None,
        budget: str = BUDGET,
        secret: str = SECRET,
        file_limit_bytes: int | None = None,
        clock_jumps: bool = False,
    ) -> None:
        """Holders with nothing in them. Raises ValueError, with the reason, for one that does not start."""
        plan = {
            "faults": [asdict(fault) for fault in (faults or Faults()).planned],
            "file_limit_bytes": file_limit_bytes,
            "clock_jumps": clock_jumps,
        }
        for name in names:
            secret_file = self.directory / f"{name}.job-secret"
            secret_file.write_text(secret)
            secret_file.chmod(0o600)
            options = HolderOptions(
                bind="127.0.0.1" if self._network is None else self._network.address(ord(name) - ord("a")),
                socket=self.socket(name), secret_file=str(secret_file), memory_budget=budget, timeout_seconds=1.0,
                deadline_seconds=1.0, drain_seconds=0.0,
            )  # fmt: skip
            self._processes[name] = self._spawn(name, json.dumps(options.to_json()), json.dumps(plan))
            output = self._processes[name].stdout
            assert output is not None
            said = json.loads(output.readline() or "{}")
            if "ready" not in said:
                raise ValueError(f"the holder of host {name} did not start: {said.get('error', 'it gave no reason')}")

    def _spawn(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        def spawn() -> subprocess.Popen[str]:
            if self._network is not None:
                enter_namespace(self._network.namespace(ord(name) - ord("a")))
            return subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip

        with ThreadPoolExecutor(1) as pool:  # a thread of its own, which alone enters the namespace
            return pool.submit(spawn).result()

    def kill(self, *names: str) -> None:
        """SIGKILL: the holder and all that it held are gone."""
        for name in names:
            process = self._processes.pop(name)
            process.kill()
            process.communicate()

    def pause(self, name: str) -> None:
        os.kill(self._processes[name].pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        os.kill(self._processes[name].pid, signal.SIGCONT)

    def wait_until_dead(self, name: str) -> None:
        """For one that a planned fault kills."""
        self._processes[name].wait(_WAIT_SECONDS)
        self.kill(name)

    def client(self, name: str) -> HolderClient:
        return HolderClient.connect(self.socket(name), SECRET.encode(), timeout_seconds=5.0)

    def settle(self, names: str) -> None:
        """Wait until all replicas have what these hosts have; without a trainer, a holder sends it without limit."""

        def settled(name: str) -> bool:
            with self.client(name) as client:
                shards = [shard for shard in client.holder_status()["shards"] if shard["role"] == "own"]
            return all(shard["newest_local"] == shard["newest_replicated"] for shard in shards)

        for name in names:
            wait_for(lambda name=name: settled(name), f"host {name} has sent all that it has")

    def slots(self, name: str, owner: int) -> list[SlotFile]:
        """The complete slots of a shard on a host, the newest first."""
        found = []
        for path in Path(f"/proc/{self._processes[name].pid}/fd").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if "thinwire-slot" in os.readlink(path):
                    found.append(SlotFile.of(path))
        mine = [slot for slot in found if slot.manifest.shard.owner == owner]
        return sorted(mine, key=lambda slot: slot.manifest.order, reverse=True)


class SlotFile:
    """The shared memory of another process's slot, as it lies there."""

    def __init__(self, path: Path, manifest: Manifest, manifest_bytes: int, payload_offset: int) -> None:
        self._path, self.manifest, self._manifest_bytes = path, manifest, manifest_bytes
        self.places = {
            "header": _STATE_OFFSET,
            "manifest": _MANIFEST_OFFSET + manifest_bytes // 2,
            "layout": _MANIFEST_OFFSET + manifest_bytes + manifest.layout_bytes // 2,
            "payload": payload_offset + manifest.payload_bytes // 2,
        }

    @classmethod
    def of(cls, path: Path) -> SlotFile:
        """Raises ValueError if there is no complete version in it."""
        with path.open("rb") as file:
            start = file.read(1 << 20)
        state, manifest_bytes, _ = _STATE_AND_MANIFEST.unpack_from(start, _STATE_OFFSET)
        if state != State.COMPLETE:
            raise ValueError("there is no complete version in it")
        content = json.loads(start[_MANIFEST_OFFSET : _MANIFEST_OFFSET + manifest_bytes])
        (payload_offset,) = struct.unpack_from("<Q", start, _PAYLOAD_OFFSET_AT)
        return cls(path, Manifest.from_json(content), manifest_bytes, payload_offset)

    def flip(self, what: str) -> None:
        """One bit, in the middle of its header, manifest, layout or payload."""
        with FileIO(self._path, "r+") as file:
            _write(file, self.places[what], bytes([_read(file, self.places[what], 1)[0] ^ 4]))

    def drop_digests(self) -> None:
        """Take the digests of the payload out of the manifest, and make everything else match again."""
        text = json.dumps({**self.manifest.to_json(), "chunk_crcs": []}).encode().ljust(self._manifest_bytes)
        with FileIO(self._path, "r+") as file:
            _write(file, _MANIFEST_OFFSET, text)
            header = bytearray(_read(file, 0, _HEADER_BYTES))
            _STATE_AND_MANIFEST.pack_into(header, _STATE_OFFSET, State.COMPLETE, len(text), zlib.crc32(text))
            _write(file, 0, bytes(header) + zlib.crc32(header).to_bytes(4, "little"))


def _read(file: FileIO, offset: int, num_bytes: int) -> bytes:
    return os.pread(file.fileno(), num_bytes, offset)


def _write(file: FileIO, offset: int, content: bytes) -> None:
    os.pwrite(file.fileno(), content, offset)
