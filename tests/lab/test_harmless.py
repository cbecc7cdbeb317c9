"""A script that is measured leaves its real run as it was: versions of its Checkpointer and files, bit for bit."""

from __future__ import annotations

import hashlib
import os
import signal
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import thinwire
from compiled import own_cache
from holders import SECRET, running_holders
from thinwire.backend import stats
from thinwire.checkpoint import Checkpointer, MemoryReader, MemoryWriter
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.lab.analyze.run import run_script
from thinwire.lab.analyze.steps import measure_script
from thinwire.lab.analyze.trials import run_on_ranks, try_script
from thinwire.lab.analyze.worker import run_as_main
from thinwire.lab.bench.jobs.own import OwnJob
from thinwire.lab.bench.measured import measure_on_hosts
from thinwire.lab.doctor.advice import Advice
from thinwire.lab.harmless import harmless, without_attach
from thinwire.lab.planning.planner import price_options
from thinwire.lab.planning.training import How
from thinwire.lab.testbed.network import Link
from thinwire.lab.testbed.rank import RankContext
from thinwire.outer.members import Members

KINDS = ("memory", "disk", "dcp-memory", "dcp-disk", "except", "with", "finally", "atexit", "end", "loop")
"""How the script keeps checkpoints: by ours, by DCP in memory and on a disk at the end, and by ``torch.save``."""

TRAIN = """
    import atexit, hashlib, sys
    from contextlib import ExitStack, suppress
    from functools import partial
    from pathlib import Path
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.nn.parallel import DistributedDataParallel
    from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Disk, MemoryReader, MemoryWriter, Storage

    class Keeper:
        def __init__(self, kinds, model, optimizer):
            self.kinds, self.model, self.steps = kinds.split(","), model, 0
            self.ours, policy = [], CheckpointPolicy(max_overhead=None, on_divergence="off")
            for kind, disk in (("memory", None), ("disk", Disk("disk", "1d"))):
                if kind in self.kinds:
                    storage = Storage(f"run-{kind}", disk=disk)
                    self.ours.append(Checkpointer(model, optimizer, policy=policy, storage=storage))
            if "dcp-memory" in self.kinds:
                self.writer = MemoryWriter("run-dcp")

        def restore(self):
            first = [keeper.restore() or 0 for keeper in self.ours]
            if "dcp-memory" in self.kinds:
                reader = MemoryReader("run-dcp")
                with suppress(CheckpointException):  # there is none yet
                    dcp.load(self.model.state_dict(), storage_reader=reader)
                    first.append(reader.step)
                reader.close()
            self.steps = max(first, default=0)
            return self.steps

        def step(self):
            self.steps += 1
            for keeper in self.ours:
                keeper.step()
            if "dcp-memory" in self.kinds and self.steps % 4 == 0:
                dcp.save(self.model.state_dict(), storage_writer=self.writer, checkpoint_id=self.steps)
            self.end("loop")

        def end(self, kind):
            if kind not in self.kinds:
                return
            if kind == "dcp-disk":
                return dcp.save(self.model.state_dict(), checkpoint_id="dcp")
            torch.save(self.model.state_dict(), f"{kind}-{dist.get_rank() if dist.is_initialized() else 0}.pt")

        def close(self):
            for keeper in self.ours:
                if "disk" in self.kinds and keeper is self.ours[-1]:
                    keeper.persist_now()
                keeper.flush()
                keeper.close()
            if "dcp-memory" in self.kinds:
                self.writer.close()

    def train(steps, kinds):
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(16, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(dist.get_rank())
        keeper = Keeper(kinds, model, optimizer)
        first = keeper.restore()
        ended = Path(f"ended-{dist.get_rank()}")
        atexit.register(keeper.end, "atexit")
        with ExitStack() as stack:
            stack.callback(keeper.end, "with")
            try:
                for step in range(first, steps):
                    optimizer.zero_grad()
                    try:
                        model(torch.randn(4, 16)).square().mean().backward()
                    except:
                        keeper.end("except")
                        continue
                    optimizer.step()
                    keeper.step()
            except:
                keeper.end("except")
            finally:
                keeper.end("finally")
                keeper.end("dcp-disk")
                digest = hashlib.sha256(model.module.weight.detach().numpy().tobytes()).hexdigest()
                ended.write_text(f"{first} {digest}")
        keeper.end("end")
        keeper.close()

    def make():
        kinds = Path("kinds").read_text()
        model = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keeper = Keeper(kinds, model, optimizer)
        keeper.restore()
        atexit.register(keeper.end, "atexit")

        def batch():
            keeper.step()
            return torch.randn(4, 16)

        return model, batch, lambda model, batch: model(batch).square().mean(), optimizer

    if __name__ == "__main__":
        train(int(sys.argv[1]), Path("kinds").read_text())
"""


def run_rank(context: RankContext, script: str, arguments: list[str]) -> None:
    run_as_main(script, arguments)


def train(steps: int) -> list[str]:
    """Run the real training; return the step at which each rank began, and a digest of its end."""
    run_on_ranks(run_rank, "train.py", [str(steps)], world_size=2, network=None)
    return [Path(f"ended-{rank}").read_text() for rank in range(2)]


def everything(socket: str) -> dict[str, str]:
    """Return digests of what the holder has of the runs, and of all files beside it."""
    with HolderClient.connect(socket, SECRET.encode()) as client:
        found = {}
        for run in ("run-memory", "run-disk", "run-dcp"):
            for version in client.inventory(run):
                with client.open(version) as reader:
                    found[repr(version)] = hashlib.sha256(reader.payload).hexdigest()
    files = [path for path in Path().rglob("*") if path.is_file() and "cache" not in path.parts]
    return found | {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def real_run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A run of 12 steps that keeps checkpoints in the ways that the test names; yields the holder's socket."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path))
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    Path("train.py").write_text(textwrap.dedent(TRAIN))
    Path("kinds").write_text(request.param)
    with running_holders(tmp_path, "50MB", "a") as (socket,):
        monkeypatch.setenv("THINWIRE_HOLDER", socket)
        assert [end.split()[0] for end in train(12)] == ["0", "0"]
        yield socket


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("real_run", [",".join(KINDS[:-1])], indirect=True, ids=["all"])
def test_a_real_run_is_the_same_before_and_after_its_script_is_measured(real_run: str) -> None:
    before, script, kinds = everything(real_run), Path("train.py"), Path("kinds").read_text().split(",")
    assert [kind for kind in kinds if kind in KINDS[:2] and not any(f"run-{kind}" in name for name in before)] == []
    assert ("disk" not in kinds) or sum("disk/" in name for name in before) > 2
    assert ("dcp-disk" not in kinds) or sum("dcp/" in name for name in before) > 2
    run_script(script, ["1000000"], workers=2, steps=4)
    assert everything(real_run) == before, "analyze"
    measured = measure_script(script, ["1000000"], 2, How((), steps=2))
    assert everything(real_run) == before, "the doctor measures"
    (stock, *_) = price_options(measured, ())
    (row,) = try_script(script, ["1000000"], [(stock, Advice(stock.name, None))], measured, None)
    assert row.measured_step_seconds, row.failure
    assert everything(real_run) == before, "the doctor tries"
    assert measure_on_hosts(OwnJob("train.py:make"), How((), steps=2), 2, 1, Link(None), print).world_size == 2
    assert everything(real_run) == before, "a job of one's own"
    ends = train(14)
    assert {end.split()[0] for end in ends} == {"12" if set(KINDS[:3]) & set(kinds) else "0"}, "from its newest version"
    assert len({end.split()[1] for end in ends}) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_keeps_checkpoints_does_nothing_without_a_holder_or_ranks(tmp_path: Path) -> None:
    model, restore = nn.Linear(2, 2), Checkpointer.restore
    with harmless():
        with Checkpointer(model, torch.optim.SGD(model.parameters())) as keeper:
            assert keeper.restore() is None
            keeper.step()
            keeper.persist_now()
            assert (keeper.steps, keeper.flush(1.0), keeper.records(), keeper.stats()["checkpoint/versions"]) == (
                1, True, [], 0.0,
            )  # fmt: skip
            assert "keeps nothing" in repr(keeper)
        writer, reader = MemoryWriter("the-run"), MemoryReader("the-run")
        dcp.save({"model": model.state_dict()}, storage_writer=writer, no_dist=True)
        with pytest.raises(CheckpointException, match="no checkpoint is read"):
            dcp.load({"model": model.state_dict()}, storage_reader=reader, no_dist=True)
        writer.close()
        reader.close()
    assert Checkpointer.restore is restore


def test_a_script_that_is_measured_saves_nothing_where_a_signal_comes() -> None:
    """As Ctrl-C in the terminal of a command, which all ranks get, and the warning of a scheduler."""
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before, calls = [*map(signal.getsignal, (*ends, signal.SIGALRM))], []
    try:
        with harmless():
            for number in (*ends, signal.SIGALRM):
                known = signal.signal(number, lambda number, frame: calls.append(number))
                assert known in before
            assert [*map(signal.getsignal, ends)] == before[:-1]
            signal.raise_signal(signal.SIGALRM)
        assert calls == [signal.SIGALRM], "the handlers of other signals are the script's"
    finally:
        for number, handler in zip((*ends, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)


def sum_by_the_word(context: RankContext, is_harmless: bool) -> dict[str, str]:
    """Return what the back end "thinwire" decided about a large dense and a sparse sum of two ranks."""
    os.environ["THINWIRE_BACKEND"] = "dense=lossless,rows=zen"
    store = torch.distributed.FileStore(str(Path("store").absolute()), 2)
    with harmless() if is_harmless else nullcontext():
        torch.distributed.init_process_group("thinwire", store=store, rank=context.rank, world_size=2)
        dense, rows = torch.full((100_000,), 1.5), torch.sparse_coo_tensor([[context.rank, 2]], [1.0, 2.0], (4,))
        torch.distributed.all_reduce(dense)
        torch.distributed.all_reduce(rows)
        assert dense.eq(3.0).all()
        assert rows.to_dense().tolist() == [1.0, 1.0, 4.0, 0.0]
        decided = {name: count["decision"] for name, count in stats().items()}
        torch.distributed.destroy_process_group()
    return decided


@pytest.mark.ranks
@pytest.mark.parametrize("is_harmless", [False, True])
def test_the_back_end_thinwire_codes_nothing_while_a_script_is_measured(
    is_harmless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else stock DDP, with which ways are compared, would be coded itself."""
    monkeypatch.chdir(tmp_path)
    for decided in run_on_ranks(sum_by_the_word, is_harmless, world_size=2, network=None, kernels=()):
        assert set(decided.values()) == ({"native"} if is_harmless else {"lossless", "zen"}), decided


def test_members_of_other_jobs_are_refused() -> None:
    members = Members(torch.distributed.HashStore(), 0, 2)
    with harmless(), pytest.raises(ValueError, match="must not join"):
        members.prepare(lambda lane, roll: None)


def test_attach_does_nothing_from_wherever_it_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ddp, calls = nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), []
        with without_attach(lambda: calls.append(1)):
            from thinwire.attach import attach
            from thinwire.outer import attach as attach_outer

            for sync in (thinwire.attach(ddp), attach(ddp), attach_outer(ddp, None, None)):  # type: ignore[arg-type]
                with sync.one_sync(), sync.no_sync(), sync.global_parameters():  # type: ignore[union-attr]
                    sync.gathered().save_files("nowhere")
                sync.detach()
        assert len(calls) == 3
    finally:
        torch.distributed.destroy_process_group()
