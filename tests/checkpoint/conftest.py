"""Groups, holders and meshes that files of several folders start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holders import SECRET, running_holders
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import HolderOptions, start_holder, stop_holder


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    said = start_holder(HolderOptions(socket=str(tmp_path / "h"), memory_budget="20MB", drain_seconds=0.0))
    yield said["socket"]
    with HolderClient.connect(said["socket"], SECRET.encode()) as client:
        stop_holder(client)


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Of the holders of two hosts, for four ranks."""
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    with running_holders(tmp_path, "200MB") as places:
        yield [places[0], places[0], places[1], places[1]]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """Of this process alone."""
    store = Path(tmp_path_factory.mktemp("group")) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()
