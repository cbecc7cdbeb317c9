"""Trains DeepSpeed engines that lose a worker, beside ones that do not; run with ``--max-restarts 2``.

The last rank kills itself in the first attempt with ZeRO stage 1, and in the second with stage 2 in bf16.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from ending import leave
from torch import Tensor, nn

import thinwire

STEPS, KILL_AT, ROWS = 12, 6, 4000
KINDS = {"stage 1": {"zero_optimization": {"stage": 1}},
         "stage 2, bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}}  # fmt: skip


def engine_of(settings: dict[str, Any], optimizer: str = "Adam") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(ROWS, 16), nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 1))
    chosen = {"type": optimizer, "params": {"lr": 0.01} | ({"torch_adam": True} if optimizer == "Adam" else {})}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01}}
    config = {"train_micro_batch_size_per_gpu": 8, "optimizer": chosen, "scheduler": schedule, **settings}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine: Any, number: int) -> float:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    bags = torch.randint(ROWS, (8 + number % 3, 4), generator=generator)
    output = engine(bags)
    loss = (output - (bags.sum(1, keepdim=True) % 2).to(output.dtype)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss)


def values(engine: Any) -> list[Tensor]:
    """Return parameters, masters and moments of this rank."""
    basic = getattr(engine.optimizer, "optimizer", engine.optimizer)
    masters = [entry for group in basic.param_groups for entry in group["params"]]
    moments = [entry for master in masters for entry in basic.state[master].values() if isinstance(entry, Tensor)]
    return [entry.detach().clone() for entry in (*engine.module.parameters(), *masters, *moments)]


def survive(name: str, kills: bool) -> dict[str, Any]:
    whole = engine_of(KINDS[name])
    losses = [step(whole, number) for number in range(STEPS)]
    engine = engine_of(KINDS[name])
    checkpointer = thinwire.integrations.deepspeed.checkpointer(
        engine, storage=thinwire.checkpoint.Storage(name, replicas=1)
    )
    first = checkpointer.restore() or 0
    after = []
    for number in range(first, STEPS):
        after.append(step(engine, number))
        checkpointer.step()
        if kills and number + 1 == KILL_AT and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.flush()
    checkpointer.close()
    pairs = list(zip(values(whole), values(engine), strict=True))
    return {
        "first": first,
        "losses_equal": after == losses[first:],
        "tensors": len(pairs),
        "bitwise": all(torch.equal(one, other) for one, other in pairs),
        "counters": [engine.global_steps == whole.global_steps, engine.get_lr() == whole.get_lr()],
    }


def attached() -> dict[str, Any]:
    """Compare an engine of stage 0 with one whose gradients thinwire averages; and what refusals say."""
    whole, engine, sharded = engine_of({}, "SGD"), engine_of({}, "SGD"), engine_of(KINDS["stage 1"])
    refused = []
    for attach, model in (
        (thinwire.attach, engine),
        (thinwire.attach, engine.module),
        (thinwire.integrations.deepspeed.attach, sharded),
    ):
        try:
            attach(model)
        except ValueError as error:
            refused.append(str(error))
    sync = thinwire.integrations.deepspeed.attach(engine)
    losses = [(step(whole, number), step(engine, number)) for number in range(STEPS)]
    stats = sync.stats()
    sync.detach()
    losses += [(step(whole, number), step(engine, number)) for number in range(STEPS, STEPS + 3)]
    return {"losses": losses, "stats": stats, "refused": refused}


def main() -> None:
    folder, attempt = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for minutes at first use
    deepspeed.init_distributed("gloo")
    result: dict[str, Any] = {name: survive(name, kills=attempt == number) for number, name in enumerate(KINDS)}
    result["attached"] = attached()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps({"ranks": everyone, "attempt": attempt}))
    leave()


if __name__ == "__main__":
    main()
