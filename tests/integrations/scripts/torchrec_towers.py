"""Trains TorchRec's two towers stock and with thinwire: the models and laws of test_torchrec.py, on ranks of torchrun.

torchrun --nproc-per-node 4 torchrec_towers.py FOLDER {parallel,replicas,outer,plain,refusals} SHARDING SHARDING
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
from ending import leave
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel, model_parallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DMPCollection

import thinwire
from torchrec_two_tower import STEPS, TwoTower, data, planned

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


def outer(kinds: tuple[str, str]) -> dict[str, Any]:
    """Return losses, bytes and differences of replicas of outer loops, and of averages of whole tables."""
    whole = of_replicas(kinds, None)
    every_step = of_replicas(kinds, {"outer": thinwire.outer.local_sgd(every=1)})
    pairs = list(zip(whole.pop("values"), every_step.pop("values"), strict=True))
    difference = max(float((one - other).abs().max() / one.abs().max()) for one, other in pairs)
    found = {"whole": whole, "every step": every_step, "difference": difference}
    recipe = thinwire.outer.diloco(every=2, lr=1.0, momentum=0.0, nesterov=False, delay=1)
    for name, options in (
        ("delayed", {"outer": recipe}),
        ("compressed", {"tables": thinwire.compress.top_k(0.05)}),
    ):
        found[name] = of_replicas(kinds, options)
        del found[name]["values"]
    return found


def of_replicas(kinds: tuple[str, str], options: dict[str, Any] | None) -> dict[str, Any]:
    """Train with a ``sync()`` of weights in each step; None is TorchRec alone."""
    model = build("replicas", kinds)
    group = model._ctxs[0].replica_pg
    weights = [weight for context in model._ctxs for tensors in context.weights_by_dtype.values() for weight in tensors]
    sync = None if options is None else thinwire.integrations.torchrec.attach(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        batch, label = data(dist.get_rank(), step)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), label)
        loss.backward()
        optimizer.step()
        model.sync(include_optimizer_state=False)
        losses.append(loss.item())
    state: dict[str, Any] = {}
    if sync is not None:
        sync.synchronize()
        state = {name: value for name, value in sync.stats().items() if name.startswith(("comm/bytes", "outer/"))}
        sync.load_state_dict(sync.state_dict())
        sync.detach()
    apart = 0.0
    for weight in weights:
        same = [torch.empty_like(weight) for _ in range(group.size())]
        dist.all_gather(same, weight.detach(), group=group)
        apart = max(apart, *(float((one - same[0]).abs().max()) for one in same))
    values = [weight.detach().clone() for weight in weights]
    return {"losses": losses, "stats": state, "apart": apart, "values": values}


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
    faulthandler.dump_traceback_later(150, exit=True)
    folder, how, *kinds = sys.argv[1:]
    dist.init_process_group("gloo")
    let_collections_run_on_cpus()
    if how == "refusals":
        mine: Any = refusals()
    else:
        mine = outer((kinds[0], kinds[1])) if how == "outer" else compare(how, (kinds[0], kinds[1]))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        (Path(folder) / "result.json").write_text(json.dumps({"ranks": everyone}))
    leave()


if __name__ == "__main__":
    main()
