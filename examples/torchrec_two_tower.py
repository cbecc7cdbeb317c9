"""TorchRec's two-tower retrieval example, trained stock and with thinwire, on a machine without a GPU.

    THINWIRE_ROUTE=rows torchrun --standalone --nproc-per-node 2 examples/torchrec_two_tower.py

THINWIRE_ROUTE=rows sends rows from the first step on. Without it training begins as stock DDP, and rows are tried once
steps have waited for the network for 3 s in all: on one machine hardly ever.

The model is that of torchrec's examples/retrieval: an `EmbeddingBagCollection` of users and items, a tower over each,
and their dot product. Users are replicated (``data_parallel``), items are sharded (``table_wise``). Data are random.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import thinwire

FEATURES = ("user", "item")
ROWS, WIDTH, BATCH, STEPS = 20_000, 64, 100, 20


class TwoTower(nn.Module):
    """Two tables, a tower over each, and the logit that a user takes an item."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(name=name, embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[name])
                  for name in FEATURES]  # fmt: skip
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.query, self.candidate = (
            nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()) for _ in FEATURES
        )

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        embeddings = self.ebc(batch)
        return (self.query(embeddings["user"]) * self.candidate(embeddings["item"])).sum(dim=1)


def data(rank: int, step: int) -> tuple[KeyedJaggedTensor, Tensor]:
    """Return a batch of one user and one item each, and whether the one took the other; no two steps alike in size."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    size = BATCH + step % 3
    values = torch.randint(ROWS, (2 * size,), generator=generator)
    batch = KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=torch.ones(2 * size, dtype=torch.int64))
    return batch, torch.randint(2, (size,), generator=generator).float()


def planned(model: TwoTower, kinds: tuple[str, str], world_size: int) -> ShardingPlan:
    """Plan each table as one kind, and give sharded ones the optimizer that updates them in their backward."""
    constraints = {}
    for name, kind in zip(FEATURES, kinds, strict=True):
        is_replicated = kind == "data_parallel"
        kernel = "dense" if is_replicated else "fused"
        constraints[name] = ParameterConstraints(sharding_types=[kind], compute_kernels=[kernel])
        if not is_replicated:
            table = model.ebc.embedding_bags[name]
            apply_optimizer_in_backward(RowWiseAdagrad, table.parameters(), {"lr": 0.05})
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device="cpu"), constraints=constraints
    )
    return planner.collective_plan(model, [EmbeddingBagCollectionSharder()], dist.group.WORLD)


def train(attached: bool) -> tuple[list[float], dict[str, float]]:
    """Return the losses of all steps, and thinwire's statistics."""
    torch.manual_seed(0)
    model = TwoTower()
    plan = planned(model, ("data_parallel", "table_wise"), dist.get_world_size())
    model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[EmbeddingBagCollectionSharder()]
    )
    sync = thinwire.integrations.torchrec.attach(model) if attached else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        batch, label = data(dist.get_rank(), step)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    stats = {} if sync is None else sync.stats()
    if sync is not None:
        sync.detach()
    return losses, stats


def main() -> None:
    dist.init_process_group("gloo")
    stock, _ = train(attached=False)
    losses, stats = train(attached=True)
    if dist.get_rank() == 0:
        print(f"losses equal: {losses == stock}, last {losses[-1]:.4f}")
        sent, dense = (stats[f"comm/bytes_{kind}"] / STEPS for kind in ("sent", "dense"))
        print(f"bytes sent per step: {sent:,.0f}, stock {dense:,.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
