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
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Storage
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import HolderOptions, start_holder, stop_holder
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

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

    def checkpointer(self, socket: str, run_id: str = "run", **parts: Any) -> Checkpointer:
        optimizer = self.optimizers if len(self.optimizers) > 1 else self.optimizers["generator"]
        parts = {"scheduler": self.schedulers, "data": self.data, **parts}
        return Checkpointer(self.model, optimizer, **parts, storage=Storage(run_id, 1, holder_socket=socket))

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
        run_id = f"run {number}"
        first = Training(4, zero)
        with first.checkpointer(sockets[context.rank], run_id) as checkpointer:
            assert checkpointer.restore() is None
            first.train(3, checkpointer)
            assert [record.skipped for record in checkpointer.records()] == [""] * 3
        stored = [tensor.clone() for tensor in first.state()]
        first.train(2)
        again = Training(5, zero)
        with again.checkpointer(sockets[context.rank], run_id) as checkpointer:
            assert checkpointer.restore() == 3
        assert same(again.state(), stored)
        assert {type(each) for each in again.data.position["seen"]} == {np.int64}
        assert type(again.data.position["rate"]) is np.float32
        again.train(2)
        assert same(again.state(), first.state())


@pytest.mark.slow
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


class Replica:
    """A replica of a network with dropout and batch statistics, which are its own."""

    def __init__(self, group: Any, dtype: torch.dtype, attach: dict[str, Any] | None = None) -> None:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 90), nn.BatchNorm1d(90), nn.Dropout(0.2), nn.Linear(90, 200)).to(dtype)
        self.model = DistributedDataParallel(net, process_group=group, broadcast_buffers=False)
        self.synchronizer = None if attach is None else thinwire.attach(self.model, **attach)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.dtype, self.group = dtype, group
        torch.manual_seed(10 + dist.get_rank())

    def checkpointer(self, socket: str, run_id: str, on_divergence: str = "raise") -> Checkpointer:
        storage = Storage(run_id, 1, holder_socket=socket, process_group=self.group)
        policy = CheckpointPolicy(on_divergence=on_divergence)
        return Checkpointer(self.model, self.optimizer, synchronizer=self.synchronizer, policy=policy, storage=storage)

    def train(self, steps: int, checkpointer: Checkpointer) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 6, dtype=self.dtype)).square().mean().backward()
            self.optimizer.step()
            checkpointer.step()
            assert checkpointer.flush(20)

    def flip(self, bit: int) -> None:
        """One bit of one parameter, or of one moment."""
        moment = self.optimizer.state[self.model.module[3].weight]["exp_avg"]
        tensor = moment if bit % 2 else self.model.module[3].bias
        raw = tensor.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]).view(-1)
        raw[77] ^= 1 << bit


def finds(context: RankContext, sockets: list[str]) -> None:
    socket, rank, world = sockets[context.rank], context.rank, dist.group.WORLD
    two = dist.new_group([0, 1])
    for dtype, group, broken, bit in (
        (torch.float32, world, 2, 0), (torch.float64, world, 0, 41), (torch.bfloat16, world, 3, 1),
        (torch.float32, two, 1, 22),
    ):  # fmt: skip
        if group is two and rank > 1:
            continue
        run_id, kept = f"{dtype} of {dist.get_world_size(group)}", []
        replica = Replica(group, dtype)
        with replica.checkpointer(socket, run_id) as checkpointer:
            checkpointer.restore()
            replica.train(4, checkpointer)
            kept = [parameter.detach().clone() for parameter in replica.model.parameters()]
            if rank == broken:
                replica.flip(bit)
            named = "ranks 0, 1 differ from each other" if group is two else f"rank {broken} differ from the other"
            words = f"silent corruption: .*{named}.* at step 5, and at step 4"
            with pytest.raises(thinwire.ThinwireError, match=words):
                replica.train(2, checkpointer)
            stats = checkpointer.stats()
            assert (stats["checkpoint/certified_step"], checkpointer.steps) == (4, 6), "within two versions"
            assert stats["checkpoint/diverged_ranks"] == (2 if group is two else 1)
        if group is two:
            continue
        again = Replica(group, dtype)
        with again.checkpointer(socket, run_id, on_divergence="warn") as checkpointer:
            assert checkpointer.restore() == 4, "5 is newer, and not the same on all ranks"
            assert all(map(torch.equal, again.model.parameters(), kept))
            again.train(3, checkpointer)
            if rank == broken:
                again.flip(bit)
            with pytest.warns(UserWarning, match="silent corruption"):
                again.train(2, checkpointer)
            again.train(1, checkpointer)
            assert checkpointer.stats()["checkpoint/versions"] == 6, "warned of, and training goes on"


@pytest.mark.slow
def test_one_flipped_bit_is_found_and_undone(sockets: list[str]) -> None:
    run_ranks(finds, sockets, world_size=4, timeout_seconds=60)


def finds_nothing(context: RankContext, sockets: list[str]) -> None:
    """In any way in which replicas stay the same; and ranks that train on their own are not compared."""
    compress = thinwire.compress.error_feedback(thinwire.compress.top_k(0.1))
    for number, attach in enumerate((None, {}, {"dense": compress})):
        replica = Replica(dist.group.WORLD, torch.float32, attach)
        with replica.checkpointer(sockets[context.rank], f"run {number}") as checkpointer:
            checkpointer.restore()
            replica.train(6, checkpointer)
            stats = checkpointer.stats()
            assert stats["checkpoint/certified_step"] >= 5, "the last one perhaps not yet"
            assert stats["checkpoint/diverged_ranks"] == 0
        if replica.synchronizer is not None:
            replica.synchronizer.detach()
    alone = Replica(dist.group.WORLD, torch.float32)
    for word in ("raise", "raise", "off"):
        with alone.checkpointer(sockets[context.rank], "alone", on_divergence=word) as checkpointer:
            before = checkpointer.restore() or 0
            told = pytest.warns(UserWarning, match="ranks 0, 1, 2 differ from each other since the first .*'off'")
            with told if word == "raise" and not context.rank else contextlib.nullcontext(), alone.model.no_sync():
                alone.train(6, checkpointer)
            assert [record.skipped for record in checkpointer.records()] == [""] * 6
            assert checkpointer.stats()["checkpoint/certified_step"] == -1
            assert checkpointer.steps == before + 6, "the newest version was restored"
    with HolderClient.connect(sockets[0], SECRET.encode()) as client:
        assert {version.shared for version in client.inventory("alone")} == {""}


@pytest.mark.slow
def test_replicas_that_stay_the_same_are_certified(sockets: list[str]) -> None:
    run_ranks(finds_nothing, sockets, world_size=3, timeout_seconds=60)


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Of the holder of four ranks."""
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    place = str(tmp_path / "a")
    with contextlib.ExitStack() as stack:
        start_holder(HolderOptions(socket=place, memory_budget="200MB", drain_seconds=0.0))
        stack.callback(lambda: stop_holder(HolderClient.connect(place, SECRET.encode())))
        yield [place] * 4
