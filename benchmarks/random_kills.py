"""Random failures of one rank, and whether all others name it: killed, exited, frozen or raised, anywhere in a step.

    python benchmarks/random_kills.py --runs 200 --first 0 --json random_kills.json

Each run is a job of 3 or 4 ranks that its seed determines: what is trained, which rank fails, how, where and when. A
line per run has all of it and what the survivors raised, so that `--first SEED --runs 1` repeats it.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab.testbed import launch
from thinwire.lab.testbed.launch import RankContext, run_ranks

TIMEOUT_SECONDS, RUN_SECONDS, STEPS = 8.0, 45.0, 6
KINDS = ("plain", "plain table", "ddp", "ddp table", "ddp sparse", "lossless", "outer", "zen", "agsparse", "sparcml")
KINDS += ("fsdp", "fsdp compressed", "fsdp replicas")
HOWS = ("kill", "exit", "freeze", "raise", "raise and live")
PLACES = ("attach", "forward", "no_sync", "loss", "backward")


@dataclass(frozen=True)
class Case:
    """What happens in one run."""

    seed: int
    world_size: int
    kind: str
    how: str
    place: str
    victim: int
    step: int
    delay: float

    @classmethod
    def of(cls, seed: int) -> Case:
        rng = random.Random(seed)
        size, kind, how, place = rng.choice((3, 4)), rng.choice(KINDS), rng.choice(HOWS), rng.choice(PLACES)
        if how == "raise and live" and place in ("forward", "loss"):
            place = "backward"  # nobody can know of an exception that the script handles before any peer waits
        if kind == "outer" and place in ("no_sync", "backward"):
            place = "loss"  # its ranks train apart
        if kind == "outer" and how == "raise and live":
            how = "raise"
        return cls(seed, size, kind, how, place, rng.randrange(size), rng.randrange(STEPS - 2), rng.uniform(0.0, 0.3))


class _Trigger(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, pull: Callable[[str], None]) -> Tensor:  # type: ignore[override]
        ctx.pull = pull
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.pull("backward")
        return gradient, None


class _Model(nn.Module):
    def __init__(self, tables: str, pull: Callable[[str], None]) -> None:
        super().__init__()
        self.table = nn.Embedding(4000, 16, sparse=tables == "sparse") if tables else nn.Linear(1, 16)
        self.layers = nn.Sequential(nn.Linear(16, 300), nn.ReLU(), nn.Linear(300, 300))
        self.out = nn.Linear(300, 4)
        self._pull = pull

    def forward(self, ids: Tensor) -> Tensor:
        looked_up = self.table(ids if isinstance(self.table, nn.Embedding) else ids[:, None] / 4000.0)
        self._pull("forward")
        return self.out(_Trigger.apply(self.layers(looked_up), self._pull))


class _Raised(ValueError):
    pass


def _fail(how: str, marker: Path) -> None:
    marker.write_text(repr(time.time()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    if how == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise _Raised("of the user")


def _wrapped(case: Case, module: nn.Module) -> nn.Module:
    if not case.kind.startswith("fsdp"):
        return DistributedDataParallel(module)
    has_replicas = case.kind == "fsdp replicas"
    shape, names = ((case.world_size, 1), ("replicas", "shards")) if has_replicas else ((case.world_size,), ("shards",))
    return fully_shard(module, mesh=dist.init_device_mesh("cpu", shape, mesh_dim_names=names))


def _trained(case: Case, pull: Callable[[str], None]) -> Iterator[str]:
    tables = {"plain table": "dense", "ddp table": "dense", "zen": "dense", "agsparse": "sparse", "sparcml": "dense"}
    torch.manual_seed(0)
    module = _Model("sparse" if case.kind == "ddp sparse" else tables.get(case.kind, ""), pull)
    model = module if case.kind in ("plain", "plain table", "outer", "sparcml") else _wrapped(case, module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    pull("attach")
    scheme = case.kind if case.kind in ("zen", "agsparse", "sparcml") else "auto"
    if case.kind == "outer":
        sync = thinwire.outer.attach(model, optimizer, thinwire.outer.diloco(every=2), timeout=timeout)
    else:
        dense = {"lossless": "lossless", "fsdp compressed": thinwire.compress.top_k(0.1)}.get(case.kind, "native")
        sync = thinwire.attach(model, scheme, dense=dense, timeout=timeout)  # type: ignore[assignment]
    yield "attached"
    for step in range(STEPS):
        for micro in (0, 1):
            with sync.no_sync() if micro == 0 and case.kind != "outer" else nullcontext():
                loss = model(torch.randint(0, 4000, (64,))).square().mean()
                pull("loss")
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield f"step {step}"
    sync.detach()


def _run(context: RankContext, case: Case, directory: str) -> tuple[str, str, int | None, float]:
    warnings.simplefilter("ignore")
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rank=context.rank,
        world_size=context.world_size, timeout=limit,
    )  # fmt: skip
    (Path(directory) / f"pid{context.rank}").write_text(str(os.getpid()))
    marker, now = Path(directory) / "failed", {"step": -1, "micro": 0}
    is_victim = context.rank == case.victim

    def begin_attach() -> None:
        """Fail inside of attach, or as long after its beginning as the case says; what DDP does before is not ours."""
        if case.how.startswith("raise"):

            def failing(*args: object, **kwargs: object) -> None:
                _fail(case.how, marker)

            name = (
                "thinwire.outer.loop.StepHook" if case.kind == "outer" else "thinwire.gradients.synchronizer.LookupRows"
            )
            module, _, attribute = name.rpartition(".")
            setattr(import_module(module), attribute, failing)
        else:
            threading.Timer(case.delay, _fail, (case.how, marker)).start()

    def meet() -> None:
        (Path(directory) / f"here{context.rank}").touch()
        while len(list(Path(directory).glob("here*"))) < context.world_size:
            time.sleep(0.005)

    def pull(where: str) -> None:
        if where == "attach":
            meet()  # no rank fails while another one is in the constructor of DDP, whose errors are torch's
            if is_victim and case.place == "attach":
                begin_attach()
            return
        if where == "forward":
            now["micro"] = 1 - now["micro"]  # 1 in the first micro-batch of a step, which accumulates
        wanted = "backward" if case.place == "no_sync" else case.place
        if (
            is_victim
            and now["step"] == case.step
            and where == wanted
            and (now["micro"] == 1) == (case.place == "no_sync")
        ):
            _fail(case.how, marker)

    dist.barrier()
    try:
        for _ in _trained(case, pull):
            now["step"] += 1
    except _Raised:
        if case.how == "raise and live":
            time.sleep(3.0 * TIMEOUT_SECONDS)
        raise
    except BaseException as error:
        seconds = time.time() - float(marker.read_text()) if marker.exists() else -1.0
        time.sleep(2.0)  # others hear of it although this process lives
        (Path(directory) / f"done{context.rank}").touch()
        if case.how in ("freeze", "raise and live"):
            _end_victim(Path(directory), case)
        return type(error).__name__, str(error), getattr(error, "rank", None), seconds
    return "nothing raised", "", None, 0.0


def _end_victim(directory: Path, case: Case) -> None:
    """Kill the rank that hangs, once all others are done."""
    deadline = time.monotonic() + 2.0 * TIMEOUT_SECONDS
    while len(list(directory.glob("done*"))) < case.world_size - 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    with suppress(OSError, ValueError):
        os.kill(int((directory / f"pid{case.victim}").read_text()), signal.SIGKILL)


def _one(seed: int) -> dict[str, Any]:
    case = Case.of(seed)
    with TemporaryDirectory() as directory:
        outcomes = run_ranks(
            _run, case, directory, world_size=case.world_size, timeout_seconds=RUN_SECONDS, check=False,
            init_process_group=False,
        )  # fmt: skip
    survivors = []
    for outcome in outcomes:
        if outcome.rank == case.victim:
            continue
        kind, text, rank, seconds = outcome.value or ("no answer", str(outcome.error)[-300:], None, -1.0)
        names = bool(re.match(rf"ranks? {case.victim}\b", text)) and "ranks" not in text.split(" ")[0]
        survivors.append({
            "rank": outcome.rank, "type": kind, "names": names and rank == case.victim, "seconds": round(seconds, 2),
            "text": text[:300], "ended": outcome.exit_code == 0,
        })  # fmt: skip
    return asdict(case) | {"survivors": survivors}


def main(
    runs: Annotated[int, typer.Option(help="How many runs.")] = 200,
    first: Annotated[int, typer.Option(help="Seed of the first run; the others count on.")] = 0,
    out: Annotated[str, typer.Option("--json", help="Write all runs to this file.")] = "",
    until: Annotated[str, typer.Option(help="Begin no run after this time of the day, as 07:15.")] = "",
) -> None:
    """Run jobs in which one rank fails, and count the survivors that name it."""
    launch.preload("torch._dynamo")
    launch.preload("thinwire.gradients.synchronizer")
    rows = []
    for seed in range(first, first + runs):
        if until and time.strftime("%H:%M") >= until:
            break
        rows.append(row := _one(seed))
        print(json.dumps(row), flush=True)
    survivors = [one for row in rows for one in row["survivors"]]
    quick = [one["seconds"] for row in rows if row["how"] in ("kill", "exit", "raise") for one in row["survivors"]]
    late = [one["seconds"] for row in rows if row["how"] == "freeze" for one in row["survivors"]]
    summary = {
        "runs": len(rows),
        "survivors": len(survivors),
        "name_the_rank": sum(one["names"] for one in survivors),
        "ended_by_themselves": sum(one["ended"] for one in survivors),
        "seconds_median": statistics.median(quick or [0.0]),
        "seconds_max": max(quick, default=0.0),
        "frozen_seconds_median": statistics.median(late or [0.0]),
        "frozen_seconds_max": max(late, default=0.0),
    }
    print(json.dumps(summary))
    if out:
        Path(out).write_text(json.dumps({"summary": summary, "rows": rows}, indent=1))


if __name__ == "__main__":
    typer.run(main)
