"""Sharded models."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Storage


class Sharded:
    """A training of the ranks of a group, with shapes that no number of ranks divides."""

    def __init__(self, group: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.group = group
        mesh = DeviceMesh.from_group(group, "cpu")
        self.model = nn.Sequential(nn.Linear(7, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 1))
        for layer in (self.model[0], self.model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        torch.manual_seed(100 * seed + dist.get_rank())

    def train(self, steps: int, checkpointer: Checkpointer | None = None) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 7)).square().mean().backward()
            self.optimizer.step()
            if checkpointer is not None:
                checkpointer.step()
                assert checkpointer.flush(20)

    def checkpointer(self, sockets: list[str], compress: str | None = None, **storage: Any) -> Checkpointer:
        socket = sockets[dist.get_rank()]
        named = Storage(**{"run_id": "run", "holder_socket": socket, "process_group": self.group, **storage})
        return Checkpointer(
            self.model, self.optimizer, policy=CheckpointPolicy(on_divergence="off", compress=compress), storage=named
        )

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def kept(self) -> list[Tensor]:
        """Parameters and moments."""
        moments = [value for state in self.optimizer.state_dict()["state"].values() for value in state.values()]
        return [tensor.detach() for tensor in (*self.model.parameters(), *moments)]

    def whole(self) -> list[Tensor]:
        """The same of all ranks put together; collective."""
        return [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in self.kept()]

    def mine(self) -> list[Tensor]:
        """And what this rank has alone."""
        return [*self.whole(), *(buffer.clone() for buffer in self.model.buffers()), torch.get_rng_state()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
