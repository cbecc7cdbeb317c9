"""What a restart takes where ranks have differed: what is certified, or something else with a warning."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Disk, Storage
from thinwire.checkpoint.dcp import tier
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import HolderOptions, start_holder, stop_holder
from thinwire.errors import ThinwireError
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

SECRET = "a secret of the tests, long enough"


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of the holder of all ranks."""
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    place = str(tmp_path / "a")
    start_holder(HolderOptions(socket=place, memory_budget="50MB", drain_seconds=0.0))
    yield place
    with HolderClient.connect(place, SECRET.encode()) as client:
        stop_holder(client)


class Training:
    """Two ranks that do the same, until one of them flips a bit."""

    def __init__(self, socket: str, run_id: str, on_divergence: str = "warn", disk: Disk | None = None) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(40, 30)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        policy, storage = CheckpointPolicy(on_divergence=on_divergence), Storage(run_id, 1, disk, socket)
        self.checkpointer = Checkpointer(self.model, self.optimizer, policy=policy, storage=storage)

    def train(self, steps: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 40)).square().mean().backward()
            self.optimizer.step()
            meanwhile()
            self.checkpointer.step()
            assert self.checkpointer.flush(20)

    def flip(self) -> None:
        if dist.get_rank() == 1:
            self.model.weight.detach().view(torch.int32)[3, 3] ^= 1 << 9

    def flip_a_rate(self) -> None:
        if dist.get_rank() == 1:
            self.optimizer.param_groups[0]["lr"] *= 1.5

    def weights(self) -> list[float]:
        return self.model.weight.detach().flatten().tolist()


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught if "Checkpointer" not in str(warning.message)]


def differs(context: RankContext, socket: str) -> list[list[str]]:
    said = []
    first = Training(socket, "run")
    with told() as texts, first.checkpointer:
        first.checkpointer.restore()
        first.train(3)
        first.flip()
        first.train(4)  # so nothing of before is left
    said.append(texts)
    for word in ("warn", "raise", "off"):
        again = Training(socket, "run", on_divergence=word)
        with told() as texts, again.checkpointer:
            assert again.checkpointer.restore() == 7 or word == "off"
            if word == "raise":
                with pytest.raises(
                    ThinwireError, match=r"corruption: .* ranks 0, 1 differ .* at step 3 all were the same"
                ):
                    again.train(3)
            if word == "off":
                again.train(3)
        said.append(texts)
    return said


@pytest.mark.slow
def test_ranks_that_load_what_differs_say_so_at_once_and_go_on_comparing(socket: str) -> None:
    for rank, outcome in enumerate(run_ranks(differs, socket, world_size=2, timeout_seconds=60)):
        alarm, restored, raised, off = outcome.value
        assert ["silent corruption" in text for text in alarm] == [True]
        assert (len(restored), restored, off) == (rank == 0, raised, []), "once for the job"
        for text in restored:
            for words in (
                "step 7, restored from memory, is not certified", "state of ranks 0, 1 differ from each other",
                "step 3, at which all were the same, is not available", "restore(step=...)", "on_divergence='off'",
            ):  # fmt: skip
                assert words in text


def has_another_rate(context: RankContext, socket: str, directory: str) -> list[str]:
    """In the state of step 4 parameters are the same on all ranks, for the last time."""
    disk = Disk(directory, every="1d")
    training = Training(socket, "run", disk=disk)
    with told() as texts, training.checkpointer:
        training.checkpointer.restore()
        training.train(3)
        training.checkpointer.persist_now()
        kept = training.weights()
        training.train(1, training.flip_a_rate)
        with pytest.raises(
            ThinwireError, match=r"silent corruption: .* ranks 0, 1 differ .* at step 3 all were the same"
        ):
            training.checkpointer.persist_now()
        training.train(2)
    again = Training(socket, "run", disk=disk)
    with told(), again.checkpointer:
        assert again.checkpointer.restore() == 3
        assert again.weights() == kept
        again.train(2)
        assert again.checkpointer.stats()["checkpoint/certified_step"] >= 4
    return texts


def test_a_learning_rate_that_one_rank_has_otherwise_is_no_state_to_go_back_to(socket: str, tmp_path: Path) -> None:
    for outcome in run_ranks(has_another_rate, socket, str(tmp_path / "disk"), world_size=2, timeout_seconds=60):
        assert any("ranks 0, 1 differ" in text and "at step 3 all were the same" in text for text in outcome.value)


def differs_from_the_start(context: RankContext, socket: str) -> list[list[str]]:
    """Before anything was compared; so versions do not say what should be alike."""
    said = []
    for start in range(2):
        training = Training(socket, "run", on_divergence="raise")
        with told() as texts, training.checkpointer:
            training.checkpointer.restore()
            if start == 0:
                training.flip()
                training.train(4)
        said.append(texts)
    return said


@pytest.mark.slow
def test_ranks_that_load_what_was_never_compared_are_compared(socket: str) -> None:
    (first, restored), (_, others) = (
        outcome.value for outcome in run_ranks(differs_from_the_start, socket, world_size=2, timeout_seconds=60)
    )
    assert "since the first checkpoint" in first[0]
    assert others == [], "once for the job"
    assert len(restored) == 1
    assert re.search("step [34], restored from memory, is not certified: .* of ranks 0, 1 differ", restored[0])


def edit(directory: str, **fields: Any) -> None:
    """Have step 3 on the disk as another release wrote it, or somebody else."""
    dist.barrier()
    if dist.get_rank() == 0:
        path = Path(directory) / "step-00000003/thinwire.json"
        about = {name: value for name, value in json.loads(path.read_text()).items() if name != "digest"}
        about = {name: value for name, value in (about | fields).items() if value != "missing"}
        digest = tier._digest_of(tier._canonical(about))
        path.write_text(json.dumps({**about, "digest": digest}))


def forget(socket: str) -> None:
    """The holder has nothing of the run any more, which no rank uses."""
    dist.barrier()
    if dist.get_rank() == 0:
        with HolderClient.connect(socket, SECRET.encode()) as client:
            client.forget("run")
    dist.barrier()


def saves(context: RankContext, socket: str, directory: str) -> dict[str, Any]:
    """What is on the disk, and what is restored of it once the memory is gone."""
    found: dict[str, Any] = {}

    def restart(name: str, **options: Any) -> Training:
        forget(socket)
        training = Training(socket, "run", disk=Disk(directory, every="1d"), **options)
        with told() as texts:
            found[name] = training.checkpointer.restore()
        found[f"{name}, told"] = texts
        return training

    first = restart("first")
    first.train(2)
    first.checkpointer.persist_now()
    first.train(1)
    first.checkpointer.persist_now()
    kept = first.weights()
    first.flip()
    for steps in (0, 1):  # a state that was not compared before, and one of a step
        with told(), contextlib.suppress(ThinwireError):
            first.train(steps)
        try:
            first.checkpointer.persist_now()
        except ThinwireError as error:
            found[f"refused {steps}"] = str(error)
    found["errors"] = first.checkpointer.stats()["checkpoint/persistent_errors"]
    first.checkpointer.close()
    second = restart("second")  # of the disk alone
    assert second.weights() == kept
    second.flip()
    with pytest.raises(ThinwireError, match=r"silent corruption.* at step 3 all were the same"):
        second.checkpointer.persist_now()
    second.checkpointer.close()
    for name, value in (("missing", "missing"), ("forged", 1), ("text", "true")):
        edit(directory, certified=value)
        restart(name).checkpointer.close()
    restart("off", on_divergence="off").checkpointer.close()
    edit(directory, certified="missing", step=3)
    found["listed"] = sorted(path.name for path in Path(directory).glob("step-*"))
    return found


def test_only_what_was_compared_is_on_the_disk_to_go_back_to(socket: str, tmp_path: Path) -> None:
    directory = str(tmp_path / "disk")
    for rank, outcome in enumerate(run_ranks(saves, socket, directory, world_size=2, timeout_seconds=60)):
        found = outcome.value
        for steps in (0, 1):
            assert "ranks 0, 1 differ from each other, and at step" in found[f"refused {steps}"]
        assert (found["errors"], found["second"], found["second, told"]) == (2.0, 3, [])
        assert found["listed"] == ["step-00000002", "step-00000003"]
        for name in ("missing", "forged", "text"):
            assert found[name] == 2, "the certified one"
            assert len(found[f"{name}, told"]) == (rank == 0)
        assert (found["off"], found["off, told"]) == (3, [])


def cannot_say(context: RankContext, socket: str, directory: str) -> str:
    """Rank 1 cannot say what of its state should be alike, which the disk does not say either."""
    training = Training(socket, "run", disk=Disk(directory))
    training.checkpointer.restore()
    training.train(3)
    training.checkpointer.persist_now()
    training.checkpointer.close()
    edit(directory, certified="missing")

    def fails(step: int) -> Any:
        raise OSError("a part of the state is gone")

    forget(socket)
    with contextlib.closing(Training(socket, "run", disk=Disk(directory)).checkpointer) as checkpointer:
        if context.rank == 1:
            object.__setattr__(checkpointer._training, "capture", fails)
        with pytest.raises(ThinwireError) as caught:
            checkpointer.restore()
    return str(caught.value)


def test_what_one_rank_cannot_say_of_a_disk_is_an_error_of_all(socket: str, tmp_path: Path) -> None:
    outcomes = run_ranks(cannot_say, socket, str(tmp_path / "disk"), world_size=2, timeout_seconds=60)
    assert {outcome.value for outcome in outcomes} == {"rank 1: OSError: a part of the state is gone"}
