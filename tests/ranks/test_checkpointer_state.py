"""What a checkpoint takes: any number of optimizers, any plain value; and what it cannot take stops all ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.checkpoint import Checkpointer
from thinwire.holder.client import HolderClient
from thinwire.holder.start import HolderOptions, start_holder, stop_holder
from thinwire.lab.testbed.launch import RankContext, run_ranks

SECRET = "a secret of the tests, long enough"


class Data:
    """A position in the data; ``ready`` is the number of calls after which it has a state."""

    def __init__(self, position: Any, ready: int = 0) -> None:
        self.position, self.ready = position, ready

    def state_dict(self) -> dict[str, Any]:
        self.ready -= 1
        if self.ready >= 0:
            raise AttributeError("no iterator yet")
        return {"sampler": {"position": self.position}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["sampler"]["position"]


class Training:
    """Two networks with an optimizer each, as in a GAN."""

    def __init__(self, seed: int, zero: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"generator": nn.Linear(5, 170), "critic": nn.Linear(170, 1)})
        self.data = Data({"seen": {np.int64(seed)}, "rate": np.float32(seed), "order": np.arange(seed)})
        generator, critic = self.model["generator"].parameters(), self.model["critic"].parameters()
        self.optimizers: dict[str, Any] = {
            "generator": torch.optim.Adam(generator, lr=0.01),
            "critic": torch.optim.SGD(critic, lr=0.1, momentum=0.9),
        }
        if zero:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what torch itself has deprecated
                from torch.distributed.optim import ZeroRedundancyOptimizer
            chosen = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
            self.optimizers = {"generator": chosen}
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in self.optimizers.values()]

    def checkpointer(self, socket: str, **options: Any) -> Checkpointer:
        optimizer = self.optimizers if len(self.optimizers) > 1 else self.optimizers["generator"]
        parts = {"scheduler": self.schedulers, "data": self.data, "holder_socket": socket}
        return Checkpointer(self.model, optimizer, replicas=1, **{"run_id": "run", **parts, **options})

    def train(self, steps: int, checkpointer: Checkpointer | None = None) -> None:
        for _ in range(steps):
            self.data.position["seen"].add(np.int64(len(self.data.position["seen"])))
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
                self.model["critic"](self.model["generator"](torch.ones(3, 5))).square().mean().backward()
                for parameter in self.model.parameters():
                    dist.all_reduce(parameter.grad)
                optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()
            if checkpointer is not None:
                checkpointer.step()
                assert checkpointer.flush(20)

    def state(self) -> list[Any]:
        locals_ = [getattr(optimizer, "optim", optimizer) for optimizer in self.optimizers.values()]
        moments = [v for each in locals_ for entry in each.state_dict()["state"].values() for v in entry.values()]
        rates = [group["lr"] for each in self.optimizers.values() for group in each.param_groups]
        numbers = [torch.tensor(sorted(self.data.position["seen"])), torch.tensor(self.data.position["order"])]
        return [*self.model.parameters(), *(m for m in moments if m is not None), torch.tensor(rates), *numbers]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def goes_on(context: RankContext, sockets: list[str]) -> None:
    for number, zero in enumerate((False, True)):
        options: dict[str, Any] = {"run_id": f"run {number}"}
        first = Training(4, zero)
        with first.checkpointer(sockets[context.rank], **options) as checkpointer:
            assert checkpointer.restore() is None
            first.train(3, checkpointer)
            assert [record.skipped for record in checkpointer.records()] == [""] * 3
        stored = [tensor.clone() for tensor in first.state()]
        first.train(2)
        again = Training(5, zero)
        with again.checkpointer(sockets[context.rank], **options) as checkpointer:
            assert checkpointer.restore() == 3
        assert same(again.state(), stored)
        assert {type(each) for each in again.data.position["seen"]} == {np.int64}
        assert type(again.data.position["rate"]) is np.float32
        again.train(2)
        assert same(again.state(), first.state())


def test_several_optimizers_and_values_of_numpy_go_on_bitwise(sockets: list[str]) -> None:
    """Each optimizer waits for the copy; a ZeroRedundancyOptimizer goes on with this rank's share."""
    run_ranks(goes_on, sockets, world_size=2, timeout_seconds=45)


def stops(context: RankContext, sockets: list[str]) -> None:
    """Rank 1 alone has what cannot be stored, from the start, after the constructor, or after some steps."""
    bad = Fraction(1, 2) if context.rank == 1 else 3
    words = r"rank 1: data\.sampler\.position: a Fraction cannot be stored; make it of dict, list"
    with pytest.raises(ValueError, match=words):
        Training(1).checkpointer(sockets[context.rank], data=Data(bad))
    training, late = Training(1), Data(3)
    for steps, data in ((0, Data(bad, ready=1)), (4, late)):
        with training.checkpointer(sockets[context.rank], data=data) as checkpointer:
            checkpointer.restore()
            training.train(steps, checkpointer)
            late.position = bad if data is late else late.position
            with pytest.raises(ValueError, match=words) as caught:
                training.train(5, checkpointer)
            assert "rank 0:" not in str(caught.value)
            where = torch.tensor([checkpointer.steps])
            dist.all_reduce(where, dist.ReduceOp.MAX)
            assert checkpointer.steps == where.item() <= steps + 2, "in the same step"
            assert steps or checkpointer.steps == 1, "the first"


def test_what_cannot_be_stored_raises_on_all_ranks_in_the_same_step(sockets: list[str]) -> None:
    run_ranks(stops, sockets, world_size=3, timeout_seconds=45)


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Of the holder of four ranks."""
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    place = str(tmp_path / "a")
    with contextlib.ExitStack() as stack:
        start_holder(HolderOptions(socket=place, memory_budget="200MB", drain_seconds=0.0))
        stack.callback(lambda: stop_holder(HolderClient.connect(place, SECRET.encode())))
        yield [place] * 4
