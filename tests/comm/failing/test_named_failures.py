"""All survivors raise one sentence about the rank that failed: killed, frozen, raised, or not there at all."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.comm import groups, lane
from thinwire.comm.c10d import default_store
from thinwire.comm.channel import Subject
from thinwire.errors import LostPeerError, raising
from thinwire.gradients import synchronizer
from thinwire.lab.testbed import launch
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.outer import loop
from versions import takes_tables

pytestmark = pytest.mark.ranks

TIMEOUT = timedelta(seconds=40)
LIMIT_SECONDS = 20.0  # for what otherwise takes the timeout, on a busy machine too
Heard = tuple[str, str, int | None, float]
launch.preload("torch._dynamo")


def _model(tables: bool) -> nn.Module:
    torch.manual_seed(0)
    first: list[nn.Module] = [nn.Embedding(2000, 16, sparse=True)] if tables else [nn.Linear(16, 16)]
    return nn.Sequential(*first, nn.Linear(16, 16), nn.Linear(16, 4))


def _inputs(tables: bool) -> Tensor:
    return torch.arange(40) if tables else torch.ones(8, 16)


def _heard(error: BaseException, began: float) -> Heard:
    return type(error).__name__, str(error), getattr(error, "rank", None), time.monotonic() - began


class _OfTheUser(ValueError):
    pass


def _raises(parameter: Tensor) -> None:
    raise _OfTheUser("in a hook")


def _fails_and_trains_on(context: RankContext) -> dict[str, Heard]:
    """Rank 1 raises in a backward and lives on, in several models one after the other, on the same ranks."""
    heard = {}
    for kind, place in (("ddp", "backward"), ("ddp", "no_sync"), ("tables", "no_sync"), ("plain", "detach")):
        tables = kind == "tables"
        module = _model(tables)
        model = module if kind == "plain" else DistributedDataParallel(module)
        sync = thinwire.attach(model, "zen" if tables else "auto", timeout=TIMEOUT)
        for _ in range(2):  # DDP itself talks before its second step
            model(_inputs(tables)).sum().backward()
        dist.barrier()
        began = time.monotonic()
        if context.rank == 1 and place != "detach":
            module[1].weight.register_post_accumulate_grad_hook(_raises)  # type: ignore[union-attr,operator,index]

        def step(model: nn.Module = model, sync: Any = sync, tables: bool = tables, place: str = place) -> None:
            for is_local in (True, False) if place == "no_sync" else (False,):
                with sync.no_sync() if is_local else nullcontext():
                    loss = model(_inputs(tables)).sum()
                    if context.rank == 1 and place == "detach":
                        sync.detach()
                        raise _OfTheUser("in the loss")
                    loss.backward()

        with pytest.raises((_OfTheUser, LostPeerError)) as caught:
            step()
        heard[f"{kind}, {place}"] = _heard(caught.value, began)
        sync.detach()
        dist.barrier()  # the group of the model itself is as good as before
    model = DistributedDataParallel(_model(True))
    sync = thinwire.attach(model, "zen", timeout=TIMEOUT)  # no group of a step that was not completed is taken again
    model(_inputs(True) + context.rank).sum().backward()
    sync.detach()
    return heard


def test_a_living_rank_that_fails_is_named_by_all_others_at_once() -> None:
    outcomes = run_ranks(_fails_and_trains_on, world_size=3, timeout_seconds=90)
    assert {kind for kind, *_ in outcomes[1].value.values()} == {"_OfTheUser"}
    for case in outcomes[0].value:
        texts = set()
        for outcome in (outcomes[0], outcomes[2]):
            kind, text, rank, seconds = outcome.value[case]
            assert (kind, rank) == ("LostPeerError", 1), (case, text)
            assert seconds < LIMIT_SECONDS
            texts.add(text)
        assert len(texts) == 1, texts
        (text,) = texts
        assert re.match(r"rank 1 \(host .+\) failed in step 3, in (backward|the loss)", text), text
        assert ("_OfTheUser: in a hook" in text) == ("detach" not in case), text


def _ends(how: str) -> None:
    if how == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)


def _dies(context: RankContext, kind: str, how: str, victim: int, directory: str) -> Heard:
    """The victim ends in the middle of a backward, or before it attaches; the store is in the process of rank 0."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), context.world_size, is_master=context.rank == 0)
    limit = timedelta(seconds=4) if how == "frozen" else TIMEOUT
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size, timeout=limit)
    tables = kind == "tables"
    (Path(directory) / f"pid{context.rank}").write_text(str(os.getpid()))
    model = DistributedDataParallel(_model(tables))
    dist.barrier()
    began = time.monotonic()
    try:
        if kind == "attach" and context.rank == victim:
            _ends(how)
        if kind == "second group" and context.rank == victim:
            take, calls = groups.take_group, iter((True, False))
            groups.take_group = lambda *known: take(*known) if next(calls) else _ends(how)
        if kind == "first job" and context.rank == victim:  # behind it is that of the agreement
            lane.discover = lambda exchange: _ends(how)  # type: ignore[assignment]
        thinwire.attach(model, "zen" if tables else "auto", timeout=limit)
        for step in range(3):
            began = time.monotonic()
            if step == 2 and context.rank == victim:
                model.module[1].weight.register_post_accumulate_grad_hook(lambda parameter: _ends(how))
            model(_inputs(tables)).sum().backward()
    except RuntimeError as error:
        heard = _heard(error, began)
    (Path(directory) / f"done{context.rank}").touch()
    others = context.world_size - 1
    while len(list(Path(directory).glob("done*"))) < others:
        time.sleep(0.02)
    if how == "frozen":  # all of the others end the victim
        with suppress(ProcessLookupError):
            os.kill(int((Path(directory) / f"pid{victim}").read_text()), signal.SIGKILL)
    return heard


@pytest.mark.parametrize(
    ("kind", "how", "victim"),
    [
        pytest.param("attach", "killed", 1, marks=pytest.mark.slow),
        ("second group", "killed", 1),
        ("first job", "killed", 2),
        ("tables", "killed", 2),
        pytest.param("ddp", "killed", 0, marks=pytest.mark.slow),
        ("ddp", "frozen", 2),
    ],
)
def test_a_rank_that_dies_is_named_by_all_others(kind: str, how: str, victim: int, tmp_path: Path) -> None:
    arguments: tuple[Any, ...] = kind, how, victim, str(tmp_path)
    outcomes = run_ranks(_dies, *arguments, world_size=4, timeout_seconds=60, check=False, init_process_group=False)
    for outcome in outcomes:
        if outcome.rank != victim:
            name, text, rank, seconds = outcome.value or ("", outcome.error, None, 0.0)
            assert (name, rank) == ("LostPeerError", victim), text
            assert text.startswith(f"rank {victim} "), text
            assert ("stopped answering" in text) == (how == "frozen"), text
            assert seconds < LIMIT_SECONDS


def _skips(context: RankContext) -> Heard:
    """Rank 1 skips the backward of a bad batch, and comes one short at the end."""
    model = DistributedDataParallel(_model(False))
    thinwire.attach(model, timeout=timedelta(seconds=3))
    began = time.monotonic()
    try:
        for step in range(4):
            loss = model(_inputs(False)).sum()
            if not (context.rank == 1 and step == 2):
                loss.backward()
    except RuntimeError as error:
        return _heard(error, began)
    return "", "", None, 0.0


def test_a_rank_that_skips_a_backward_of_ddp_is_named() -> None:
    outcomes = run_ranks(_skips, world_size=3, timeout_seconds=60)
    for outcome in (outcomes[0], outcomes[2]):
        name, text, rank, _ = outcome.value
        assert (name, rank) == ("LostPeerError", 1), text
        assert re.match(r"rank 1 \(host .+\) ", text), text


def _two_passes(model: nn.Module, compressed: bool, accumulated: bool) -> None:
    sync = thinwire.attach(model, dense=thinwire.compress.top_k(0.5) if compressed else "auto", timeout=TIMEOUT)
    for is_local in (accumulated, False):
        with sync.no_sync() if is_local else nullcontext():
            model(_inputs(False)).sum().backward()


def _fails_in_shards(context: RankContext, shape: tuple[int, ...], compressed: bool) -> dict[str, Heard]:
    """Rank 1 raises where its peers wait in FSDP's own collectives next, and lives on."""
    heard = {}
    names = ("replicas", "shards")[-len(shape) :]
    for place in ("no_sync", "backward", "attach"):
        model: Any = fully_shard(_model(False), mesh=dist.init_device_mesh("cpu", shape, mesh_dim_names=names))
        if context.rank == 1 and place != "attach":
            model[1].register_forward_hook(lambda unused, inputs, output: output.register_hook(_raises) and None)
        dist.barrier()
        began = time.monotonic()
        if context.rank == 1 and place == "attach":  # which is the last one
            synchronizer.LookupRows = lambda *unused, **more: _raises(torch.empty(0))  # type: ignore[assignment,misc]
        with pytest.raises((_OfTheUser, LostPeerError)) as caught:
            _two_passes(model, compressed, place == "no_sync")
        heard[place] = _heard(caught.value, began)
    return heard


@pytest.mark.parametrize(
    ("shape", "compressed"), [((3,), False), pytest.param((3,), True, marks=pytest.mark.slow), ((2, 2), False)]
)
def test_a_living_rank_that_fails_under_fsdp_is_named_by_all_others_at_once(
    shape: tuple[int, ...], compressed: bool
) -> None:
    outcomes = run_ranks(_fails_in_shards, shape, compressed, world_size=math.prod(shape), timeout_seconds=120)
    assert {kind for kind, *_ in outcomes[1].value.values()} == {"_OfTheUser"}
    for place in outcomes[0].value:
        heard = [outcome.value[place] for outcome in outcomes if outcome.rank != 1]
        assert {(kind, rank) for kind, _, rank, _ in heard} == {("LostPeerError", 1)}, (place, heard)
        assert len({text for _, text, *_ in heard}) == 1, (place, heard)
        assert max(seconds for *_, seconds in heard) < LIMIT_SECONDS, (place, heard)


def _fails_with_rows_in_shards(context: RankContext, how: str) -> tuple[Heard, int]:
    """Rank 1 raises in a backward of `no_sync`, and lives on; or it is killed there. Others look rows up next."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(8000, 32), nn.Linear(32, 16), nn.Linear(16, 4))
    for layer in (model[1], model):
        fully_shard(layer)
    before = len(dist.distributed_c10d._world.pg_map)
    sync = thinwire.attach(model, timeout=TIMEOUT)
    assert sync._methods.tables.names
    model(torch.arange(10)).sum().backward()
    if context.rank == 1:
        hook = (lambda gradient: _ends(how)) if how == "killed" else _raises
        model[1].register_forward_hook(lambda unused, inputs, output: output.register_hook(hook) and None)
    dist.barrier()
    began = time.monotonic()

    def step() -> None:
        for is_local in (True, False):
            with sync.no_sync() if is_local else nullcontext():
                model(torch.arange(10)).sum().backward()

    with pytest.raises((_OfTheUser, LostPeerError)) as caught:
        step()
    heard = _heard(caught.value, began)
    sync.detach()
    return heard, len(dist.distributed_c10d._world.pg_map) - before


@takes_tables
@pytest.mark.parametrize("how", ["raises", "killed"])
def test_a_rank_that_fails_is_named_where_rows_of_shards_are_looked_up(how: str) -> None:
    outcomes = run_ranks(_fails_with_rows_in_shards, how, world_size=2, timeout_seconds=90, check=False)
    assert outcomes[0].value is not None, outcomes[0].error
    (name, text, rank, seconds), more_groups = outcomes[0].value
    assert (name, rank) == ("LostPeerError", 1), text
    assert text.startswith("rank 1 "), text
    assert seconds < LIMIT_SECONDS
    assert more_groups == 0


def _dies_in_forward(context: RankContext) -> Heard:
    """Rank 1 dies between two collectives of FSDP's; the lane of rank 0 sees it first, and lets its group go."""
    model: Any = _model(False)
    fully_shard(model[1])
    sync = thinwire.attach(fully_shard(model), timeout=TIMEOUT)
    own = sync._inner
    own.submit(lambda lane: None).wait()

    def between(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if context.rank == 1:
            _ends("killed")
        while not own._own.dead():
            time.sleep(0.02)
        own.lost_to(RuntimeError("rank 1 is gone"))
        while own._own is not None:
            time.sleep(0.02)

    model[0].register_forward_hook(between)
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        model(_inputs(False))
    return _heard(caught.value, began)


def test_a_collective_of_fsdp_behind_the_end_of_a_lane_names_who_ended_it() -> None:
    outcome = run_ranks(_dies_in_forward, world_size=2, timeout_seconds=60, check=False)[0]
    name, text, rank, _ = outcome.value or ("", outcome.error, None, 0.0)
    assert (name, rank) == ("LostPeerError", 1), text
    assert text.startswith("rank 1 "), text


def _answers_late(context: RankContext, silences: int) -> list[int | None]:
    """The store does not answer rank 1 in time for a while; rank 2 fails, and in the next lane rank 0."""
    named: list[int | None] = []
    cloned, calls = groups.cloned, count()
    if context.rank == 1:
        groups.cloned = lambda store: None if next(calls) < silences else cloned(store)
    for victim in (2, 0):

        def job(own: lane.Lane, victim: int = victim) -> None:
            own.channel(Subject("a table", "")).open()
            if context.rank == victim:
                raise _OfTheUser
            own.channel(Subject("the next table", "")).open()

        own = lane.Lane(None, TIMEOUT)
        with pytest.raises((_OfTheUser, LostPeerError)) as caught:
            own.submit(job).wait()
        named.append(getattr(caught.value, "rank", victim))
        own.close()
        dist.barrier()
    return named


@pytest.mark.parametrize(("silences", "known"), [(1, 2), (2, None)])
def test_a_rank_whose_store_was_slow_once_reads_the_notes_of_its_lane(silences: int, known: int | None) -> None:
    outcomes = run_ranks(_answers_late, silences, world_size=3, timeout_seconds=60)
    assert [outcome.value for outcome in outcomes] == [[2, 0], [known, 0], [2, 0]]


def _interrupts(context: RankContext, kind: str) -> Heard:
    """Ctrl-C inside of attach on rank 1, which lives on until the others have raised."""
    model: Any = _model(False)
    if kind == "second lane":
        fully_shard(model, ignored_params=set(model[2].parameters()))
    attach, interrupt, calls = thinwire.attach, raising(KeyboardInterrupt()), count()
    if kind == "outer loop":
        optimizer, recipe = torch.optim.SGD(model.parameters(), 0.1), thinwire.outer.local_sgd(4)
        attach = partial(thinwire.outer.attach, optimizer=optimizer, recipe=recipe)
    with pytest.MonkeyPatch.context() as patch:
        if context.rank == 1 and kind == "second lane":
            first = lane.Lane
            patch.setattr(
                synchronizer, "Lane", lambda *one, **more: interrupt() if next(calls) else first(*one, **more)
            )
        elif context.rank == 1:
            patch.setattr(synchronizer if kind == "attach" else loop, "share_first", lambda *unused: interrupt())
        began = time.monotonic()
        with pytest.raises((KeyboardInterrupt, LostPeerError)) as caught:
            attach(model, timeout=TIMEOUT)
    heard, store = _heard(caught.value, began), default_store()  # where a lane is made, its group may not be in step
    store.set(f"rank {context.rank} raised", "")
    store.wait(["rank 0 raised", "rank 1 raised"], TIMEOUT)
    if kind == "attach":
        thinwire.attach(model, timeout=TIMEOUT).detach()
    return heard


@pytest.mark.parametrize("kind", ["attach", "outer loop", "second lane"])
def test_ctrl_c_inside_of_attach_is_heard_by_the_others_at_once(kind: str) -> None:
    first, second = run_ranks(_interrupts, kind, world_size=2, timeout_seconds=90)
    name, text, rank, seconds = first.value
    assert (second.value[0], name, rank) == ("KeyboardInterrupt", "LostPeerError", 1), text
    assert "KeyboardInterrupt" in text
    assert seconds < LIMIT_SECONDS
