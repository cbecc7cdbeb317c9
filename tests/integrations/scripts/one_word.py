"""Trainings in which only the word of the back end differs: ``one_word.py FOLDER FRAMEWORK WORD``.

Nothing of thinwire is imported but its statistics, at the end. Writes the losses of each training to result.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ending import leave
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


class Net(nn.Module):
    """A table and layers large enough to be coded."""

    def __init__(self, is_sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(3000, 32, sparse=is_sparse, mode="sum")
        self.layers = nn.Sequential(nn.Linear(32, 1024), nn.GELU(), nn.Linear(1024, 256), nn.GELU())
        self.head = nn.Linear(256, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.words(words)))


def made(is_sparse: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(is_sparse)


def batch(step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randint(0, 3000, (8, 4), generator=generator), torch.randint(0, 5, (8,), generator=generator)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int = 1, clip: bool = False) -> list[float]:
    found = []
    for step in range(STEPS):
        for part in range(accumulate):
            words, target = batch(accumulate * step + part)
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(part == accumulate - 1)
            loss = nn.functional.cross_entropy(model(words).float(), target)
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def sharded(**policy: Any) -> nn.Module:
    model = made()
    for layer in (model.layers, model.head):
        fully_shard(layer, **policy)
    return fully_shard(model, **policy)


def layouts() -> dict[str, list[float]]:
    """Train with torch alone, in each of its layouts."""
    world_size = dist.get_world_size()
    flat, grid = (
        init_device_mesh("cpu", (world_size,)),
        init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")),
    )
    found = {}
    ddp = DistributedDataParallel(made())
    found["ddp"] = losses(ddp, torch.optim.AdamW(ddp.parameters(), 1e-3), clip=True)
    sparse = DistributedDataParallel(made(is_sparse=True))
    found["ddp sparse"] = losses(sparse, torch.optim.SGD(sparse.parameters(), 0.1))
    whole = sharded(mesh=flat)
    optimizer = torch.optim.AdamW(whole.parameters(), 1e-3)
    found["fsdp2"] = losses(whole, optimizer, accumulate=2, clip=True)
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder)
        model, moments = get_state_dict(whole, optimizer)
        dcp.save({"model": model, "moments": moments}, checkpoint_id=folder[0])
        expected = losses(whole, optimizer)
        dcp.load({"model": model, "moments": moments}, checkpoint_id=folder[0])
        set_state_dict(whole, optimizer, model_state_dict=model, optim_state_dict=moments)
        found["dcp"] = losses(whole, optimizer)
        assert found["dcp"] == expected
        dist.barrier()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    low = sharded(mesh=flat, mp_policy=half)
    found["fsdp2 bf16"] = losses(low, torch.optim.AdamW(low.parameters(), 1e-3))
    hybrid = sharded(mesh=grid)
    found["hsdp"] = losses(hybrid, torch.optim.AdamW(hybrid.parameters(), 1e-3))
    offloaded = sharded(mesh=flat, offload_policy=CPUOffloadPolicy(pin_memory=False))
    found["offloaded"] = losses(offloaded, torch.optim.AdamW(offloaded.parameters(), 1e-3))
    found["compiled"] = compiled(flat.get_group())
    found["experts"] = experts(grid.get_group(0))
    found["experts on a mesh"] = experts_on(grid)
    found["pipeline"] = pipeline()
    return found


def experts(group: dist.ProcessGroup) -> list[float]:
    """Route rows to the ranks of a group, each with an expert of its own, and back."""
    torch.manual_seed(dist.get_rank(group))
    expert, found = nn.Linear(32, 32), []
    optimizer = torch.optim.SGD(expert.parameters(), 0.1)
    for step in range(STEPS):
        rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(step + dist.get_rank()), requires_grad=True)
        there = dist.nn.functional.all_to_all_single(torch.empty_like(rows), rows, group=group)
        back = dist.nn.functional.all_to_all_single(torch.empty_like(rows), expert(there), group=group)
        loss = (back - rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def experts_on(grid: DeviceMesh) -> list[float]:
    """Route unequal numbers of rows within a dimension of a mesh; FSDP shards each expert over the other one."""
    group, world_size = grid.get_group("shard"), grid.size(1)
    mine = grid.get_local_rank("shard")
    torch.manual_seed(mine)
    expert = fully_shard(nn.Sequential(nn.Linear(32, 1024), nn.GELU(), nn.Linear(1024, 32)), mesh=grid["replicate"])
    optimizer, found = torch.optim.AdamW(expert.parameters(), 1e-3), []
    counts = [[64 + 8 * (source + target) for target in range(world_size)] for source in range(world_size)]
    there, back = counts[mine], [row[mine] for row in counts]
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step + dist.get_rank())
        rows = torch.randn(sum(there), 32, generator=generator, requires_grad=True)
        routed = funcol.all_to_all_single_autograd(rows, back, there, group)
        returned = funcol.all_to_all_single_autograd(expert(routed), there, back, group)
        loss = (returned - rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def compiled(group: dist.ProcessGroup) -> list[float]:
    """Call functional collectives in a compiled function, without a break of its graph."""
    world_size = dist.get_world_size(group)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(values: Tensor) -> Tensor:
        total = funcol.all_reduce(values, "sum", group)
        part = funcol.reduce_scatter_tensor(total, "sum", 0, group)
        return funcol.all_gather_tensor(part, 0, group) / world_size**2 + values

    generator = torch.Generator().manual_seed(dist.get_rank())
    values = torch.randint(-8, 8, (8192 * world_size,), generator=generator).float()
    return [step(values * number).square().mean().item() for number in range(1, 3)]


def pipeline() -> list[float]:
    """Train in two stages, of which each has half of the layers; return the losses, which the last one has."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    found = _stages(rank, pair) if rank < 2 else []
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone[1]


def _stages(rank: int, pair: dist.ProcessGroup) -> list[float]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    parts = made()
    mine = nn.Sequential(parts.words, parts.layers) if rank == 0 else parts.head
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"), group=pair)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.cross_entropy)
    optimizer, found = torch.optim.SGD(mine.parameters(), 0.1), []
    for step in range(STEPS):
        words, target = batch(step, rank=0)
        parts_of_loss: list[Tensor] = []
        schedule.step(words) if rank == 0 else schedule.step(target=target, losses=parts_of_loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(sum(parts_of_loss)))
    return found


def with_torch(word: str) -> dict[str, list[float]]:
    dist.init_process_group(word)
    return layouts()


def with_accelerate(word: str) -> dict[str, list[float]]:
    from accelerate import Accelerator

    dist.init_process_group(word)  # on a GPU InitProcessGroupKwargs(backend=word), which means Gloo on the CPU
    accelerator = Accelerator(cpu=True)
    model = made()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    return {"accelerate": losses(model, optimizer)}


def with_transformers(word: str) -> dict[str, list[float]]:
    from transformers import Trainer, TrainingArguments

    dist.init_process_group(word)  # on a GPU TrainingArguments(ddp_backend=word), which means Gloo on the CPU

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = made()

        def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = self.net(words)
            return {"loss": nn.functional.cross_entropy(output, labels), "logits": output}

    data = [
        {"words": words, "labels": label} for step in range(20) for words, label in zip(*batch(step, 0), strict=True)
    ]
    options = TrainingArguments(
        tempfile.mkdtemp(), max_steps=STEPS, use_cpu=True, report_to=[], logging_steps=1,
        per_device_train_batch_size=4, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(Whole(), options, train_dataset=data)
    trainer.train()
    return {"transformers": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


def with_lightning(word: str) -> dict[str, list[float]]:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Whole(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.found = made(), list[float]()

        def training_step(self, numbers: tuple[Tensor, Tensor]) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(numbers[0]), numbers[1])
            self.found.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    parts = [torch.cat(one) for one in zip(*(batch(step, 0) for step in range(2 * STEPS)), strict=True)]
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*parts), batch_size=8)
    model = Whole()
    lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=word), max_steps=STEPS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, data)  # fmt: skip
    return {"lightning": model.found}


def with_ray(word: str) -> dict[str, list[float]]:
    """Make the group by what Ray Train calls in its workers; its daemons need more than a busy machine has."""
    from ray.train.torch.config import TorchConfig, _setup_torch_process_group

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _setup_torch_process_group(TorchConfig(backend=word).backend, rank, world_size, "env://")
    model = DistributedDataParallel(made())
    return {"ray": losses(model, torch.optim.AdamW(model.parameters(), 1e-3))}


def with_deepspeed(word: str) -> dict[str, list[float]]:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for minutes at first use
    deepspeed.init_distributed(dist_backend=word)
    found = {}
    for stage in (1, 2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True},
            "gradient_clipping": 0.5,
        }
        model = made()
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-3), config=config
        )
        values = []
        for step in range(STEPS):
            words, target = batch(step)
            loss = nn.functional.cross_entropy(engine(words).float(), target)
            engine.backward(loss)
            engine.step()
            values.append(loss.item())
        found[f"stage {stage}"] = values
    return found


def main() -> None:
    folder, framework, word = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    run: Callable[[str], dict[str, list[float]]] = globals()[f"with_{framework}"]
    result: dict[str, Any] = {
        "losses": run(word),
        "word": dist.get_backend(),
        "loaded": "thinwire.backend" in sys.modules,
    }
    if result["loaded"]:
        from thinwire import backend

        result["stats"] = backend.stats()
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
