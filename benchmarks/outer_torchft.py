"""DiLoCo of thinwire and of torchft, of the same model on the same batches: how far apart do the parameters end?

    pip install torchft-nightly
    python benchmarks/outer_torchft.py [--ranks 4] [--steps 200] [--every 20] [--fragments 1] [--mix 1.0] [--json FILE]

Each rank trains two copies of a small character model, both by AdamW, one under ``thinwire.outer.attach`` and one
under ``torchft.local_sgd.DiLoCo``. torchft's manager, which needs a lighthouse, is a stand-in that averages by an
all-reduce over the same ranks and commits every round, as in torchft's own unit tests. With fragments, those of torchft
are the ones that thinwire made. Parameters are compared after each round. The delay is 0: with a delay of d steps
torchft sends a fragment d steps before the round ends, and thinwire at its end.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks

SYMBOLS, LENGTH, WIDTH, BATCH = 40, 16, 32, 8


def made(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(SYMBOLS, WIDTH), layer, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)).to(dtype)


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Text of which each symbol follows from the one before, with noise of the rank."""
    data = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(0, SYMBOLS, (BATCH, 1), generator=data)
    noise = torch.randint(0, 3, (BATCH, LENGTH), generator=data)
    text = (first + torch.cumsum(noise + 1, 1)) % SYMBOLS
    return text[:, :-1], text[:, 1:]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


class StandInManager:
    """What `torchft.local_sgd.DiLoCo` asks of a manager, for ranks of which none fails."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self.rounds = 0

    def start_quorum(self) -> None:
        pass

    def current_step(self) -> int:
        return self.rounds

    def should_commit(self) -> bool:
        self.rounds += 1
        return True

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Any:
        from torchft.work import _DummyWork

        assert not should_quantize
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
        return _DummyWork(tensor)

    def disallow_state_dict_read(self) -> None:
        pass

    def allow_state_dict_read(self) -> None:
        pass

    def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None:
        del key, load, save


class Fragment(nn.Module):
    """Some parameters of a model, as the module that torchft takes for a fragment."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        for place, parameter in enumerate(parameters):
            self.register_parameter(f"parameter_{place}", parameter)


def compared(context: RankContext, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Train both; return, after each round, how far apart their parameters are."""
    from torchft.local_sgd import DiLoCo

    dtype = getattr(torch, arguments.dtype)
    ours, theirs = made(dtype), made(dtype)
    inner = [torch.optim.AdamW(model.parameters(), 3e-3) for model in (ours, theirs)]
    recipe = thinwire.outer.diloco(arguments.every, fragments=arguments.fragments, mix=arguments.mix)
    sync: Any = thinwire.outer.attach(ours, inner[0], recipe)
    named = dict(theirs.named_parameters())
    fragments = [Fragment([named[name] for name in names]) for names in sync._rounds.anchors.fragments]
    outers = [
        torch.optim.SGD(one.parameters(), lr=recipe.lr, momentum=recipe.momentum, nesterov=True) for one in fragments
    ]
    manager: Any = StandInManager()
    rows = []
    with DiLoCo(manager, fragments, inner[1], outers, arguments.every, fragment_update_alpha=1.0 - arguments.mix):
        for step in range(1, arguments.steps + 1):
            batch = batch_of(context.rank, step)
            losses = [trained(model, optimizer, batch) for model, optimizer in zip((ours, theirs), inner, strict=True)]
            if step % arguments.every == 0:
                flat = [nn.utils.parameters_to_vector(model.parameters()).detach() for model in (ours, theirs)]
                apart = float((flat[0] - flat[1]).abs().max())
                rows.append({"step": step, "largest_difference": apart, "loss": losses[0], "loss_torchft": losses[1]})
    moved = nn.utils.parameters_to_vector(made(dtype).parameters()) - flat[0]
    rows[-1] |= {"largest_parameter": float(flat[0].abs().max()), "largest_change": float(moved.detach().abs().max())}
    sync.detach()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--mix", type=float, default=1.0)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    outcomes = run_ranks(compared, arguments, world_size=arguments.ranks)
    versions = {name: version(name) for name in ("torch", "torchft-nightly")} | {"python": platform.python_version()}
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    for row in outcomes[0].value:
        print(", ".join(f"{name} {value:.6g}" for name, value in row.items()))
    worst = max(row["largest_difference"] for outcome in outcomes for row in outcome.value)
    print(f"largest difference of a parameter on any rank after any round: {worst:.3g}")
    if arguments.json:
        rows = [outcome.value for outcome in outcomes]
        found = {"versions": versions, "settings": vars(arguments), "ranks": rows}
        arguments.json.write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
