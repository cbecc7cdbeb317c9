"""Trains TorchRec's two towers stock and with thinwire: the models and laws of test_torchrec.py, on ranks of torchrun.

torchrun --nproc-per-node 4 torchrec_towers.py FOLDER {parallel,replicas,plain,refusals} SHARDING SHARDING
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel, model_parallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DMPCollection
from torchrec_two_tower import STEPS, TwoTower, data, planned

import thinwire

CPU = torch.device("cpu")


def let_collections_run_on_cpus() -> None:
    """Patch torchrec 1.9: `DMPCollection` asserts a GPU, and gives shards devices with an index, which CPUs lack."""
    for name, refusal, instead in (
        ("__init__", 'device.type == "cuda" or device.type == "mtia"', "True"),
        ("_remap_sharding_plan", "{self._device.type}:{shard_rank % get_local_size()}", "cpu"),
    ):
        source = textwrap.dedent(inspect.getsource(getattr(DMPCollection, name)))
        if refusal not in source:
            raise SystemExit(f"torchrec has another DMPCollection.{name}: see whether it runs on CPUs now")
        source = source.replace(refusal, instead).replace("super()", "super(DMPCollection, self)")
        found: dict[str, Any] = {}
        exec("from __future__ import annotations\n" + source, vars(model_parallel), found)
        setattr(DMPCollection, name, found[name])


def build(how: str, kinds: tuple[str, str]) -> nn.Module:
    torch.manual_seed(0)
    model, world_size, sharders = TwoTower(), dist.get_world_size(), [EmbeddingBagCollectionSharder()]
    if how == "plain":
        return DistributedDataParallel(model)
    if how == "parallel":
        plan = planned(model, kinds, world_size)
        return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    plan = planned(model, kinds, world_size // 2)
    return DMPCollection(model, CPU, plan, world_size, world_size // 2, dist.group.WORLD, sharders=sharders)


def tables_of(model: nn.Module) -> list[Tensor]:
    """Return all that is trained: dense parameters, replicated tables, shards, and states of fused optimizers."""
    lookups = [lookup for module in model.modules() for lookup in getattr(module, "_lookups", ())]
    parts = dict.fromkeys(part for module in (model, *lookups) for part in module.modules())
    found = [parameter for part in parts for parameter in part._parameters.values()]
    found += [state["sum"] for part in parts if hasattr(part, "get_optimizer_state")
              for state in part.get_optimizer_state()]  # fmt: skip
    return [tensor.detach().clone() for tensor in found if tensor is not None and tensor.numel()]


def train(how: str, kinds: tuple[str, str], attached: bool) -> dict[str, Any]:
    model = build(how, kinds)
    sync: Any = None
    if attached:
        sync = thinwire.attach(model) if how == "plain" else thinwire.integrations.torchrec.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, sent = [], []
    for step in range(STEPS):
        batch, label = data(dist.get_rank(), step)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), label)
        loss.backward()
        optimizer.step()
        if how == "replicas" and step % 3 != 1:  # rows of several steps go together
            model.sync(include_optimizer_state=step % 2 == 0)
        if how == "replicas" and step == STEPS // 2:  # as load_state_dict does, and here it makes replicas differ
            with torch.no_grad():
                for weight in next(iter(model._ctxs[0].weights_by_dtype.values())):
                    weight.mul_(1.0 + 0.1 * dist.get_rank())
        losses.append(loss.item())
        sent.append({} if sync is None else sync.stats())
    if how == "replicas":
        model.sync()
    result = {
        "losses": losses,
        "stats": sent,
        "table": [] if sync is None else sync.table(),
        "values": tables_of(model),
    }
    if sync is not None:
        state = sync.state_dict()
        sync.load_state_dict(state)
        sync.detach()
    return result


def compare(how: str, kinds: tuple[str, str]) -> dict[str, Any]:
    stock, ours = train(how, kinds, attached=False), train(how, kinds, attached=True)
    pairs = list(zip(stock.pop("values"), ours.pop("values"), strict=True))
    difference = max(float((one - other).abs().max() / one.abs().max().clamp_min(1e-30)) for one, other in pairs)
    return {"stock": stock, "ours": ours, "difference": difference, "tensors": len(pairs)}


def refusals() -> list[str]:
    """Return what attach says to models with nothing to synchronize, or synchronized in another way."""
    texts = []
    not_ready = DistributedModelParallel(TwoTower(), device=CPU, init_data_parallel=False)
    taken = build("replicas", ("table_wise", "table_wise"))
    taken.set_all_reduce_hook(lambda group, tensors: None)
    for model in (nn.Linear(2, 2), not_ready, taken):
        try:
            thinwire.integrations.torchrec.attach(model)
        except ValueError as error:
            texts.append(str(error))
    try:
        thinwire.attach(build("parallel", ("data_parallel", "table_wise")))
    except ValueError as error:
        texts.append(str(error))
    return texts


def main() -> None:
    faulthandler.dump_traceback_later(60, exit=True)
    folder, how, *kinds = sys.argv[1:]
    dist.init_process_group("gloo")
    let_collections_run_on_cpus()
    mine = refusals() if how == "refusals" else compare(how, (kinds[0], kinds[1]))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        (Path(folder) / "result.json").write_text(json.dumps({"ranks": everyone}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
