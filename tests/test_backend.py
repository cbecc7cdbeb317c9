"""The back end "thinwire" beside Gloo: the same results, fewer bytes, and one word."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import backend, kernels
from thinwire.all_reduce import sum_on
from thinwire.comm import point_to_point
from thinwire.comm.lane import Lane
from thinwire.errors import MissingPackageError, ThinwireError
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.tune import playing

pytestmark = pytest.mark.ranks


def begin(context: RankContext, settings: backend.Options | None = None) -> None:
    limit = timedelta(seconds=30)
    dist.init_process_group("thinwire", pg_options=settings, timeout=limit)


def every_collective(context: RankContext, word: str) -> dict[str, Any]:
    """The results of each collective, of numbers whose sums are exact."""
    dist.init_process_group(word, timeout=timedelta(seconds=30))
    rank, world_size, results = context.rank, context.world_size, {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        mine = (torch.arange(12 * world_size) % 5 + rank).to(dtype)

        def empty(dtype: torch.dtype = dtype) -> list[Tensor]:
            return [torch.empty(12 * world_size, dtype=dtype) for _ in range(world_size)]

        total = mine.clone()
        op = dist.ReduceOp.BOR if dtype == torch.bool else dist.ReduceOp.SUM
        if dtype != torch.bool:
            dist.all_reduce(total, op)
        largest = mine.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.broadcast(sent := mine.clone(), src=1)
        dist.all_gather(gathered := empty(), mine)
        dist.all_gather_into_tensor(joined := torch.cat(empty()), mine)
        dist.all_to_all_single(turned := torch.empty_like(mine), mine)
        results[str(dtype)] = [total, largest, sent, gathered, joined, turned]
        if dtype != torch.bool:
            dist.reduce_scatter_tensor(part := torch.empty(12, dtype=dtype), mine)
            dist.reduce(reduced := mine.clone(), dst=0)
            dist.scatter(piece := torch.empty(12, dtype=dtype), list(mine.split(12)) if rank == 0 else None, src=0)
            dist.gather(mine, everything := empty() if rank == 0 else None, dst=0)
            results[str(dtype)] += [part, reduced if rank == 0 else None, piece, everything]
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(few := torch.ones(3), group=group)
        results["group"] = few, dist.get_backend(group) == word
    dist.all_gather_object(objects := [None] * world_size, {"rank": rank})
    if rank == 0:
        dist.send(torch.arange(5), 1)
    elif rank == 1:
        dist.recv(got := torch.empty(5, dtype=torch.int64), 0)
        results["received"] = got
    work = dist.all_reduce(later := torch.ones(7), async_op=True)
    assert work is not None
    work.wait()
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    results |= {"objects": objects, "later": later}
    dist.destroy_process_group()
    return results


def test_every_collective_gives_what_gloo_gives() -> None:
    words = [run_ranks(every_collective, word, world_size=3, init_process_group=False) for word in ("gloo", "thinwire")]
    for stock, ours in zip(*words, strict=True):
        torch.testing.assert_close(ours.value, stock.value, rtol=0, atol=0)


def sums(context: RankContext, dtype: torch.dtype, settings: backend.Options) -> tuple[Any, ...]:
    """A sum, a mean, and parts of a sum, of tensors of several sizes; and what was sent."""
    begin(context, settings)
    generator = torch.Generator().manual_seed(context.rank)
    results = []
    for numel in (1, 30_000, 120_001):
        mine = torch.randn(numel, generator=generator).to(dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) if settings.dense == "lossless" else (dist.ReduceOp.SUM,):
            dist.all_reduce(total := mine.clone(), op)
            results.append((mine, total, op == dist.ReduceOp.AVG))
    flat = torch.randn(context.world_size * 20_000, generator=generator).to(dtype)
    dist.reduce_scatter_tensor(part := torch.empty(20_000, dtype=dtype), flat)
    return results, flat, part, backend.stats()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_coded_sums_are_those_in_rank_order(dtype: torch.dtype) -> None:
    settings = backend.Options(dense="lossless", least_bytes=1000)
    values = [outcome.value for outcome in run_ranks(sums, dtype, settings, world_size=3, init_process_group=False)]
    for parts in zip(*(value[0] for value in values), strict=True):
        mine, totals, is_mean = zip(*parts, strict=True)
        exact = torch.stack([one.double() for one in mine]).sum(0) / (3 if is_mean[0] else 1)
        for total in totals:
            assert torch.equal(total, totals[0]), "the same bits on all ranks"
            torch.testing.assert_close(total.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    exact = torch.stack([value[1].double() for value in values]).sum(0)
    for rank, value in enumerate(values):
        mean = exact[rank * 20_000 :][:20_000]
        torch.testing.assert_close(value[2].double(), mean, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        counted = value[3]["all_reduce"]
        if dtype == torch.bfloat16:
            coded = 2 * 2 * (30_000 + 120_001) * dtype.itemsize
            assert 0 < counted["bytes_sent"] < 0.8 * 4 / 3 * coded / 2 + 10_000


def trains(context: RankContext, word: str, settings: backend.Options | None, kind: str) -> tuple[list[float], Any]:
    """Losses of a few steps of DDP with sparse gradients, or of FSDP2."""
    dist.init_process_group(word, pg_options=settings, timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.EmbeddingBag(5000, 16, sparse=kind == "ddp" and word == "thinwire"), nn.Linear(16, 2000), nn.Linear(2000, 4)
    )
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (context.world_size,))
        for layer in list(model.children())[1:]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(context.rank)
    losses = []
    for _ in range(4):
        loss = model(torch.randint(0, 5000, (8, 3))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    counts = backend.stats() if word == "thinwire" else {}
    return losses, counts  # the group is left: torch hangs now and then where its models outlive it


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_trainings_take_the_steps_of_gloo(kind: str) -> None:
    settings = backend.Options(dense="lossless", rows="zen", least_bytes=1000)
    stock = run_ranks(trains, "gloo", None, kind, world_size=2, init_process_group=False)
    ours = run_ranks(trains, "thinwire", settings, kind, world_size=2, init_process_group=False)
    for one, other in zip(stock, ours, strict=True):
        torch.testing.assert_close(one.value[0], other.value[0], rtol=1e-5, atol=1e-6)
        counts = other.value[1]
        name = "all_reduce" if kind == "ddp" else "reduce_scatter"
        assert counts[name]["bytes_sent"] > 0
        if kind == "ddp":
            rows = counts["all_reduce_sparse"]
            assert rows["calls"] == 4
            assert 0 < rows["bytes_sent"] < 3 * rows["bytes"]


def _decides(context: RankContext, seconds: dict[bool, float], hosts: int) -> tuple[Any, ...]:
    """What auto decides where a step takes these seconds with codes and without, and whether sums had the same bits."""
    os.environ["THINWIRE_HOST"] = str(context.rank % hosts)
    clock, moments = [0.0], time.perf_counter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "SETUP_SECONDS", 0.0)
        begin(context, backend.Options(least_bytes=1000))
        patch.setattr(playing.time, "perf_counter", lambda: clock[0])
        group = dist.group.WORLD
        assert isinstance(group, backend.ThinwireGroup)
        played, equal = [], True
        for step in range(120):
            dist.all_reduce(torch.ones(3), group=group)  # too small to be coded
            for numel in (3000, 3000, 5000):
                mine = torch.arange(numel).float() * (context.rank + step)
                dist.all_reduce(mine)
                equal &= bool((mine == torch.arange(numel).float() * (1 + 2 * step)).all())
            if step == 60:  # an evaluation
                dist.all_reduce(torch.ones(7777))
            codes = backend.stats()["all_reduce"]["bytes_sent"]
            played.append(codes)
            clock[0] += seconds[len(played) > 1 and played[-1] > played[-2]]
        patch.setattr(playing.time, "perf_counter", moments)
        return played, equal, backend.stats()["all_reduce"]["reason"]


def _watched(context: RankContext) -> str:
    os.environ["THINWIRE_HOST"] = str(context.rank)
    begin(context, backend.Options(least_bytes=1000))
    for _ in range(60):
        dist.all_reduce(torch.ones(3000))
    return backend.stats()["all_reduce"]["reason"]


def test_counts_say_what_a_watch_has_seen_so_far() -> None:
    """And not for ever that nothing was tried yet."""
    for outcome in run_ranks(_watched, world_size=2, init_process_group=False):
        assert outcome.value.startswith("native: steps wait ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("coded", "hosts", "reason"),
    [
        (0.5, 2, "lossless: "),
        pytest.param(2.0, 2, "native: ", marks=pytest.mark.slow),
        (0.5, 1, "all ranks are on one host"),
    ],
    ids=["codes pay", "codes do not pay", "one host"],
)
def test_auto_keeps_what_makes_steps_shorter(coded: float, hosts: int, reason: str) -> None:
    found = run_ranks(_decides, {False: 1.0, True: coded}, hosts, world_size=2, init_process_group=False)
    (played, equal, why), (others, also, _) = (outcome.value for outcome in found)
    coded_calls, other_calls = ([b > a for a, b in pairwise(one)] for one in (played, others))
    assert coded_calls == other_calls, "ranks decide alike"
    assert equal
    assert also
    assert why.startswith(reason)
    assert any(coded_calls) == (hosts > 1)
    assert all(coded_calls[-10:]) == (why[0] == "l")
    assert any(coded_calls[-10:]) == (why[0] == "l")


def test_a_choice_that_changes_bits_is_logged_with_the_word_that_pins_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "warm_up", lambda wait: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    choice = backend._Choice("coded collectives", lambda what, numbers: [list(numbers)])
    caplog.set_level(logging.INFO, "thinwire")
    for arm in ("lossless", "lossless", "native"):
        choice._play(arm, True)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        f"coded collectives: dense={arm} from this step on" for arm in ("lossless", "native")
    ]
    assert "THINWIRE_BACKEND='dense=native' pins it" in caplog.records[-1].getMessage()


def test_calls_that_are_no_steps_any_more_play_what_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that is broken off in a step of the other arm begins again when calls are steps again."""
    monkeypatch.setattr(backend, "warm_up", lambda wait: None)
    monkeypatch.setattr(backend, "SETUP_SECONDS", 0.0)
    choice = backend._Choice("coded collectives", lambda what, numbers: [list(numbers)])

    def coded(calls: Sequence[str]) -> list[bool]:
        found = []
        for name in calls:
            choice.note((name, 1000, torch.float32))
            found.append(choice.codes)
        return found

    while not choice.codes:
        coded("ab")
    assert not any(coded([f"evaluation {number}" for number in range(50)])[1:])
    assert choice.trial.arms[choice.trial.standing] == "native"
    assert any(coded("ab" * 200))


def _decided_under_deterministic_algorithms(context: RankContext) -> list[str]:
    os.environ["THINWIRE_HOST"] = str(context.rank)
    begin(context, backend.Options(least_bytes=1000))
    group = dist.group.WORLD
    assert isinstance(group, backend.ThinwireGroup)
    assert group._choice is not None
    group._choice.codes, group._choice.note = True, lambda call: None  # as measured seconds may decide
    dist.all_reduce(torch.ones(3000))  # makes the lane, by calls of its own
    decided = []
    for is_deterministic in (True, False):
        torch.use_deterministic_algorithms(is_deterministic)
        dist.all_reduce(torch.ones(3000))
        dist.all_gather_into_tensor(torch.empty(6000), torch.ones(3000))
        decided += [backend.stats()[name]["decision"] for name in ("all_reduce", "all_gather")]
    return decided


def test_under_deterministic_algorithms_no_clock_decides_in_which_order_is_added() -> None:
    found = run_ranks(_decided_under_deterministic_algorithms, world_size=2, init_process_group=False)
    assert [outcome.value for outcome in found] == [["native", "lossless", "lossless", "lossless"]] * 2


def _messages(context: RankContext) -> tuple[list[Tensor], dict[str, Any]]:
    """What rank 1 receives of rank 0: in order and not, by tags, of anybody, larger and smaller than what is coded."""
    begin(context, backend.Options(dense="lossless", least_bytes=1000))
    generator = torch.Generator().manual_seed(0)
    kinds = [
        (dtype, numel) for dtype in (torch.float32, torch.bfloat16, torch.float64) for numel in (7, 30_000, 120_001)
    ]
    tensors = [torch.randn(numel, generator=generator).relu().to(dtype) for dtype, numel in kinds]
    tensors += [torch.zeros(50_000), torch.full((300, 7), float("nan")), torch.arange(9000)]
    if context.rank == 0:
        works = [dist.isend(tensor, 1, tag=index % 3) for index, tensor in enumerate(tensors)]
        for work in works:
            assert work is not None
            work.wait()
        dist.send(tensors[1].clone(), 1)
        dist.send(tensors[2], 1)
    elif context.rank == 1:
        posted = [(index, torch.empty_like(tensor)) for index, tensor in enumerate(tensors)]
        received = [(dist.irecv(into, 0, tag=index % 3), into) for index, into in posted]
        for work, _ in reversed(received):
            assert work is not None
            work.wait()
        again = torch.empty_like(tensors[1])
        work = dist.irecv(again, 0)
        assert work is not None
        assert work.wait()
        assert work.is_completed(), "as of Gloo's, once it was waited for"
        anybody = torch.empty_like(tensors[2])
        assert dist.recv(anybody) == 0
        for (_, into), tensor in zip(
            [*received, (None, again), (None, anybody)], [*tensors, *tensors[1:3]], strict=True
        ):
            assert torch.equal(into.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    everyone = [tensors[1] + context.rank, tensors[7] * (context.rank + 1), torch.arange(5) * context.rank]
    for source in range(context.world_size):
        for tensor in everyone:
            dist.broadcast(sent := tensor.clone(), source)
            expected = (tensors[1] + source, tensors[7] * (source + 1), torch.arange(5) * source)
            assert any(torch.equal(sent, one) for one in expected if one.shape == sent.shape)
    return tensors, backend.stats()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_messages_and_broadcasts_lose_nothing(world_size: int) -> None:
    found = [outcome.value for outcome in run_ranks(_messages, world_size=world_size, init_process_group=False)]
    tensors, counts = found[0]
    large = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.nbytes >= 1000]
    sent = sum(tensor.nbytes for tensor in [*large, tensors[1], tensors[2]])
    assert 0 < counts["send"]["bytes_sent"] < 0.8 * sent, "half of a ReLU's values are zero"
    assert counts["send"]["calls"] == len(tensors) + 2
    assert found[1][1]["recv"]["decision"] == "native"
    assert counts["broadcast"]["bytes_sent"] > 0


def _sends(context: RankContext, coded: float) -> tuple[list[bool], str]:
    """Which steps of rank 0 sent codes under auto, where such a step takes ``coded`` seconds and any other one 1."""
    os.environ["THINWIRE_HOST"] = str(context.rank)
    clock, coded_steps, sent = [0.0], [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "SETUP_SECONDS", 0.0)
        begin(context, backend.Options(least_bytes=1000))
        patch.setattr(playing.time, "perf_counter", lambda: clock[0])
        for step in range(120):
            for numel in (3000, 5000, 5000):
                tensor = torch.arange(numel).float() % (step + 2)
                if context.rank == 0:
                    dist.send(tensor, 1)
                else:
                    dist.recv(into := torch.empty(numel), 0)
                    assert torch.equal(into, tensor)
            if context.rank == 0:
                before, sent = sent, backend.stats()["send"]["bytes_sent"]
                coded_steps.append(sent - before < 4 * 13_000)
                clock[0] += coded if coded_steps[-1] else 1.0
            else:
                clock[0] += 1.0
    return coded_steps, backend.stats()["send" if context.rank == 0 else "recv"]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("coded", [0.5, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_sender_decides_for_itself(coded: float) -> None:
    (coded_steps, reason), _ = (
        outcome.value for outcome in run_ranks(_sends, coded, world_size=2, init_process_group=False)
    )
    assert not any(coded_steps[:4])
    assert any(coded_steps)
    assert all(one == (coded < 1) for one in coded_steps[-10:]), reason
    assert reason.startswith("lossless" if coded < 1 else "native")


OTHERS = [(1000, torch.int64), (1200, torch.float32), (3000, torch.bfloat16), (9000, torch.uint8), (1000, torch.int64)]
"""What a rank receives into: another one sends 1000 values of float32 each, and at last 1000 of int64."""


def _said(into: Tensor) -> str:
    try:
        dist.recv(into, 0)
    except ThinwireError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _wrong_messages(context: RankContext) -> list[str]:
    begin(context, backend.Options(dense="lossless", least_bytes=1000))
    said = []
    if context.rank == 0:
        dist.send(torch.ones(1000), 1)
        dist.send(torch.ones(500, dtype=torch.float64), 1)
        dist.send(torch.ones(900, dtype=torch.int32), 1)
        for _ in range(4):
            dist.send(torch.randn(1000), 1)
        dist.send(torch.arange(1000), 1)
        altered = point_to_point.pack(torch.randn(1000), 0, True)
        altered[-3] ^= 1
        dist.send(altered, 1)
        dist.send(point_to_point.pack(torch.ones(1000), 2, True), 1)
    else:
        for _ in range(5):
            said.append(_said(torch.empty(1000)))
            if len(said) == 3:
                said += [_said(torch.empty(numel, dtype=dtype)) for numel, dtype in OTHERS]
    dist.barrier()
    return said


def test_a_message_that_is_another_one_is_refused() -> None:
    _, second = run_ranks(_wrong_messages, world_size=2, init_process_group=False)
    sent = "MismatchError: rank 0 sent 1000 values of torch.float32, and this rank receives"
    others = [f"{sent} {numel} of {dtype}" for numel, dtype in OTHERS[:-1]]
    texts = ["", "MismatchError: rank 0 sent 500 values of torch.float64, and this rank receives 1000 of torch.float32",
             "made another call", *others, "", "bits changed", "a message of rank 2, where a tensor"]  # fmt: skip
    assert all(text in said for text, said in zip(texts, second.value, strict=True)), second.value
    assert second.value[0] == ""


def _unusual_calls(context: RankContext, group_of: str) -> dict[str, Any]:
    """Results of calls that scripts make and examples do not; what a call raises is its result."""
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", timeout=limit)
    settings = {"pg_options": backend.Options(dense="lossless", least_bytes=1000)} if group_of == "thinwire" else {}
    rank, world_size, results = context.rank, context.world_size, {}

    def group() -> Any:
        return dist.new_group(backend=group_of, timeout=limit, **settings)

    def values(*shape: int) -> Tensor:
        return (torch.arange(torch.Size(shape).numel()) % 7 + rank).float().view(shape)

    many, one = [values(2000) + index for index in range(30)], group()
    works = [dist.all_reduce(tensor, group=one, async_op=True) for tensor in many]
    for work in reversed(works):
        work.wait()
    results["thirty equal calls"] = many
    for tensor in many:
        dist.all_reduce(tensor, group=one, async_op=True)
    dist.all_reduce(last := values(3000), group=one)
    results["works that nobody keeps"] = [*many, last]

    said = []
    if rank == 1:
        time.sleep(0.3)
    work = dist.all_reduce(late := values(2000), group=one, async_op=True)
    assert work is not None
    if rank == 0:
        try:
            work.wait(timedelta(milliseconds=20))
        except RuntimeError as error:
            said.append(str(error).splitlines()[0])
    work.wait(timedelta(seconds=20))
    results["a wait with a timeout"] = [late]
    results["what it says"] = said

    weight = nn.Parameter(values(2000))
    dist.broadcast(weight, 1, group=one)
    dist.all_reduce(weight, group=one)
    results["parameters"] = weight.detach()
    with torch.inference_mode():
        total, gathered, part = values(2000) * 1, torch.empty(2000 * world_size), torch.empty(2000)
        dist.all_reduce(total, group=one)
        dist.broadcast(total, 0, group=one)
        dist.all_gather_into_tensor(gathered, total, group=one)
        dist.reduce_scatter_tensor(part, gathered, group=one)
        rows = torch.sparse_coo_tensor(torch.tensor([[1, 5 + rank]]), values(2, 8), (100, 8))
        dist.all_reduce(rows, group=one)
        results["inference"] = [tensor.clone() for tensor in (total, gathered, part, rows.to_dense())]
    turned = values(80, 40).t()
    dist.all_reduce(turned, group=one)
    results["strides"] = [turned.contiguous()]
    lists = [values(2000), values(2000) + 5], [values(2000), values(2000) + rank]
    one.allreduce(lists[0]).wait()
    one.broadcast(lists[1], dist.BroadcastOptions()).wait()
    results["several tensors"] = [tensor for several in lists for tensor in several]
    for name, call in {
        "too short": lambda: dist.reduce_scatter_tensor(torch.empty(1500), values(2000 * world_size), group=group()),
        "too long": lambda: dist.all_gather_into_tensor(torch.empty(2500 * world_size), values(2000), group=group()),
        "other dtype": lambda: dist.all_gather_into_tensor(
            torch.empty(2000 * world_size, dtype=torch.float64), values(2000), group=group()
        ),
    }.items():
        try:
            call()
        except RuntimeError as error:
            results[name] = type(error).__name__
        else:
            results[name] = "no error"
    return results


@pytest.mark.slow
def test_unusual_calls_give_what_gloo_gives() -> None:
    stock, ours = (
        [outcome.value for outcome in run_ranks(_unusual_calls, word, world_size=2, init_process_group=False)]
        for word in ("gloo", "thinwire")
    )
    for mine, theirs in zip(ours, stock, strict=True):
        for name, expected in theirs.items():
            if name == "what it says":
                assert mine[name] == expected
            elif isinstance(expected, str):
                assert mine[name] == expected == "RuntimeError", name
            else:
                torch.testing.assert_close(mine[name], expected, rtol=0, atol=0)


def _differently_strided(context: RankContext) -> list[Tensor]:
    begin(context, backend.Options(dense="lossless", least_bytes=1000))
    whole = torch.arange(8000.0).view(80, 100) * (context.rank + 1)
    strided = whole.t().contiguous().t() if context.rank else whole
    dist.reduce_scatter_tensor(part := torch.empty(40, 100), strided)
    dist.all_gather_into_tensor(gathered := torch.empty(160, 100), strided)
    dist.broadcast(given := strided.clone(), 0)
    return [part, gathered, given.contiguous()]


def test_strides_may_differ_between_ranks() -> None:
    """Which tensors are coded follows from what is alike on all ranks."""
    whole = torch.arange(8000.0).view(80, 100)
    for rank, outcome in enumerate(run_ranks(_differently_strided, world_size=2, init_process_group=False)):
        part, gathered, given = outcome.value
        assert torch.equal(part, 3 * whole.chunk(2)[rank])
        assert torch.equal(gathered, torch.cat([whole, 2 * whole]))
        assert torch.equal(given, whole)


def _with_own_settings(context: RankContext, hosts: bool) -> str:
    if hosts and context.rank:
        os.environ["THINWIRE_HOST"] = str(context.rank)
    settings = backend.Options(dense="auto" if hosts or context.rank else "lossless", least_bytes=1000)
    try:
        begin(context, settings)
    except ValueError as error:
        return str(error)
    dist.all_reduce(total := torch.ones(1000))
    other = torch.full((1000,), -1.0)
    dist.send(total, 1) if context.rank == 0 else dist.recv(other, 0)
    return f"{other[0].item()}"


def test_ranks_with_other_settings_raise_alike() -> None:
    outcomes = run_ranks(_with_own_settings, False, world_size=2, init_process_group=False)
    assert len({outcome.value for outcome in outcomes}) == 1
    assert "rank 0 has Options(dense='lossless'" in outcomes[0].value
    assert "rank 1 Options(dense='auto'" in outcomes[0].value


def test_who_refuses_settings_waits_until_all_have_read_them() -> None:
    """Rank 0 often hosts the store: if it ended first, the others would be without the reason."""
    store, refused = dist.HashStore(), []

    def rank_0() -> None:
        made = SimpleNamespace(group_size=2, group_rank=0, global_ranks_in_group=[], store=store)
        try:
            backend._agreed(made, backend.Options())  # type: ignore
        except ValueError as error:
            refused.append(error)

    store.set("settings of 1", json.dumps([True, "a", str(backend.Options(rows="zen"))]))
    (thread := threading.Thread(target=rank_0)).start()
    store.wait(["refused by 0"], timedelta(seconds=30))
    assert not refused
    assert thread.is_alive()
    store.set("refused by 1", "")
    thread.join(30)
    assert "rows='zen'" in str(refused[0])


def _without_codes_on_rank_1(context: RankContext, dense: str) -> str:
    os.environ["THINWIRE_HOST"] = str(context.rank)
    with kernels.using("reference") if context.rank else nullcontext():
        try:
            begin(context, backend.Options(dense=dense, least_bytes=1000))
        except MissingPackageError as error:
            return str(error)
        dist.all_reduce(torch.ones(1000))
        assert not dist.group.WORLD._codes  # type: ignore
        count = backend.stats()["all_reduce"]
        return f"{count['decision']}: {count['reason']}"


@pytest.mark.parametrize(("dense", "says"), [("lossless", "dense='lossless': "), ("auto", "native: ")])
def test_all_ranks_know_that_one_can_make_no_codes(dense: str, says: str) -> None:
    """As without numba; then "auto" is native."""
    outcomes = run_ranks(_without_codes_on_rank_1, dense, world_size=2, init_process_group=False)
    assert {outcome.value for outcome in outcomes} == {
        f"{says}rank 1 cannot run compiled kernels: pip install '.[cpu]' in a checkout, and do not set"
        " THINWIRE_KERNELS=reference"
    }


def test_a_launcher_that_tells_one_rank_of_other_hosts_tells_all() -> None:
    outcomes = run_ranks(_with_own_settings, True, world_size=2, init_process_group=False)
    assert [outcome.value for outcome in outcomes] == ["-1.0", "2.0"]


def _loses_a_rank(context: RankContext, kind: str) -> tuple[str, float]:
    """What a rank is told after another one has died in the middle of sums, and after how many seconds."""
    begin(context, backend.Options(dense="lossless", rows="zen", least_bytes=1000))
    model, started = DistributedDataParallel(nn.Linear(300, 300)), 0.0
    try:
        for step in range(1000):
            if step == 5:
                started = time.perf_counter()
                if context.rank == 1:
                    os._exit(1)
            if kind == "rows":
                dist.all_reduce(torch.sparse_coo_tensor(torch.arange(50)[None], torch.ones(50, 8), (5000, 8)))
            elif kind == "all_reduce":
                dist.all_reduce(torch.ones(200_000))
            elif kind == "functional":
                assert funcol.all_reduce(torch.ones(200_000), "sum", [0, 1, 2]).sum() == 600_000
            elif kind == "ddp":
                model(torch.ones(1, 300)).sum().backward()
            elif kind == "reduce_scatter":
                dist.reduce_scatter_tensor(torch.empty(50_000), torch.ones(150_000))
            else:
                dist.all_gather_into_tensor(torch.empty(150_000), torch.ones(50_000))
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - started
    return "nothing", 0.0


def parameters(every_run: Sequence[str], others: Sequence[str]) -> list[Any]:
    return [*every_run, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kind", parameters(["rows", "ddp"], ["all_reduce", "functional", "reduce_scatter", "all_gather"])
)
def test_a_rank_that_dies_is_named_by_all_others(kind: str) -> None:
    found = run_ranks(_loses_a_rank, kind, world_size=3, init_process_group=False, check=False, timeout_seconds=60)
    for rank in (0, 2):
        said, seconds = found[rank].value
        assert "rank 1" in said, said
        assert "died or exited" in said
        assert seconds < 10.0, "far below the timeout of 30 s"


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ("dense=lossles", "rows=zem", "speed=11", "dense", "calls=send+recv", "dtypes=int8"):
        with pytest.raises(ValueError, match=r"legal|is not one of"):
            backend.Options.parse(wrong)
    assert backend.Options.parse("dense=lossless, rows=zen") == backend.Options(dense="lossless", rows="zen")
    with pytest.raises(ValueError, match="not initialized"):
        backend.stats()


@pytest.mark.slow
def test_torch_alone_loads_no_module_of_thinwire() -> None:
    """The entry point registers the word; the first group loads the rest."""
    code = (
        "import sys, json, torch.distributed as dist\n"
        "loaded = [name for name in sys.modules if name.split('.')[0] == 'thinwire']\n"
        "print(json.dumps([loaded, 'thinwire' in dist.Backend.backend_list]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], True]
    assert thinwire.__name__ in sys.modules


def _by_rules(context: RankContext) -> dict[str, Any]:
    """What was decided about calls of two dtypes, in a group whose rules name some of each."""
    begin(context)
    rules = backend.Options(dense="lossless", least_bytes=1000, calls="all_gather+send", dtypes="bfloat16+float64")
    group = dist.new_group(pg_options=rules)
    coded = {}
    for dtype in (torch.float32, torch.bfloat16):
        mine = torch.ones(2000, dtype=dtype)
        dist.all_reduce(mine.clone(), group=group)
        dist.broadcast(mine.clone(), 0, group=group)
        dist.all_gather_into_tensor(torch.empty(4000, dtype=dtype), mine, group=group)
        dist.reduce_scatter_tensor(torch.empty(1000, dtype=dtype), mine, group=group)
        if context.rank == 0:
            dist.send(mine, 1, group=group)
        else:
            dist.recv(got := torch.empty_like(mine), 0, group=group)
            assert torch.equal(got, mine)
        coded[str(dtype)] = {name for name, count in backend.stats(group).items() if count["decision"] == "lossless"}
    return coded


def test_rules_say_what_is_coded() -> None:
    sender, receiver = (outcome.value for outcome in run_ranks(_by_rules, world_size=2, init_process_group=False))
    assert sender == {"torch.float32": set(), "torch.bfloat16": {"all_gather", "send"}}
    assert receiver == {"torch.float32": set(), "torch.bfloat16": {"all_gather"}}


def _from_nobody(context: RankContext) -> list[Any]:
    begin(context, backend.Options(dense="lossless", least_bytes=1000))
    with pytest.raises(RuntimeError, match="invalid root rank: 7"):
        dist.broadcast(torch.ones(1000), 7)
    dist.all_reduce(total := torch.ones(1000))
    return total.tolist()


def test_a_root_that_is_no_rank_is_refused_as_by_gloo() -> None:
    for outcome in run_ranks(_from_nobody, world_size=2, init_process_group=False):
        assert outcome.value == [2.0] * 1000


def _first_calls(context: RankContext) -> list[Tensor]:
    """The first rank calls, and then sends a message without which the second one does not call."""
    begin(context, backend.Options(dense="lossless", least_bytes=1000))
    found = []
    for group in (None, dist.new_group([0, 1])):
        total = torch.full((1000,), float(context.rank))
        if context.rank == 0:
            work = dist.all_reduce(total, group=group, async_op=True)
            dist.send(torch.ones(3), 1)
            assert work is not None
            work.wait()
        else:
            dist.recv(torch.empty(3), 0)
            dist.all_reduce(total, group=group)
        found.append(total)
    return found


def test_a_first_call_waits_for_nobody() -> None:
    for outcome in run_ranks(_first_calls, world_size=2, init_process_group=False):
        assert all(torch.equal(total, torch.ones(1000)) for total in outcome.value)


def _asks_while_others_wait(context: RankContext) -> list[float]:
    """As `_first_calls`, in each step of a training on two hosts under auto, whose ranks agree on how it goes on."""
    os.environ["THINWIRE_HOST"] = str(context.rank)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "SETUP_SECONDS", 0.0)
        begin(context, backend.Options(least_bytes=1000))
        for step in range(40):
            total = torch.full((1000,), float(context.rank + step))
            if context.rank == 1:
                dist.recv(torch.empty(3), 0)
            work = dist.all_reduce(total, async_op=True)
            if context.rank == 0:
                dist.send(torch.ones(3), 1)
            assert work is not None
            work.wait()
            found.append(float(total[0]))
    assert backend.stats()["all_reduce"]["bytes_sent"] > 0, "codes were tried"
    return found


def test_what_ranks_decide_waits_for_nobody() -> None:
    for outcome in run_ranks(_asks_while_others_wait, world_size=2, init_process_group=False):
        assert outcome.value == [2.0 * step + 1 for step in range(40)]


def _rows_of_ddp(context: RankContext) -> tuple[int, int, int]:
    """Bytes of the sum of a table's gradients by DDP, of the same sum by ZEN, and at least of torch's own gather."""
    begin(context, backend.Options(rows="zen"))
    torch.manual_seed(0)
    table = nn.Embedding(20_000, 32, sparse=True)
    model = DistributedDataParallel(nn.Sequential(table))
    torch.manual_seed(1 + context.rank)
    words = (2000 * torch.rand(8000) ** 2).long()  # most rows have a gradient on all ranks
    model(words).sum().backward()
    count = backend.stats()["all_reduce_sparse"]
    assert (count["calls"], count["decision"]) == (1, "zen")
    gradient = torch.sparse_coo_tensor(words[None], torch.ones(8000, 32), (20_000, 32))
    lane = Lane(dist.new_group(backend="gloo"))
    lane.submit(lambda lane: sum_on(lane, gradient, "zen", "mean", False)).wait()
    rows = gradient.coalesce()
    gathered = (context.world_size - 1) * (rows.indices().nbytes + rows.values().nbytes)
    return int(count["bytes_sent"]), lane.exchange.traffic.sent_bytes, gathered


def _sums_rows(context: RankContext, hosts: int) -> tuple[list[str], str]:
    """How rows are summed under "auto", in 32, 64 and 16 bits, and why."""
    os.environ["THINWIRE_HOST"] = str(context.rank % hosts)
    begin(context, backend.Options(dense="native"))
    plain, decisions, reasons = dist.new_group(backend="gloo"), [], []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for step in range(3):
            data = torch.Generator().manual_seed(10 * step + context.rank)
            ids = torch.randint(100, (context.rank * step * 7,), generator=data)
            mine = torch.sparse_coo_tensor(
                ids[None], torch.randn(len(ids), 8, generator=data).to(dtype), (100, 8)
            ).coalesce()
            stock = mine.double()
            dist.all_reduce(mine)
            dist.all_reduce(stock, group=plain)
            torch.testing.assert_close(mine.to_dense().double(), stock.to_dense(), rtol=0.02, atol=1e-5)
        count = backend.stats()["all_reduce_sparse"]
        decisions.append(str(count["decision"]))
        reasons.append(str(count["reason"]))
    return decisions, reasons[0]


@pytest.mark.parametrize("hosts", [1, 2])
def test_rows_are_left_to_gloo_where_all_ranks_are_on_one_host(hosts: int) -> None:
    """Bytes cost nothing there: a step with five small tables took 2.3 to 3.6 times as long as with Gloo."""
    (decisions, reason), *others = [
        outcome.value for outcome in run_ranks(_sums_rows, hosts, world_size=2, init_process_group=False)
    ]
    assert others == [(decisions, reason)]
    if hosts == 1:
        assert (decisions[:2], reason) == (["native", "native"], "all ranks are on one host")
        assert decisions[2] != "native", "torch sums no sparse values of 16 bits"
    else:
        assert "native" not in decisions


def test_ddp_with_sparse_gradients_sends_what_zen_sends() -> None:
    found = [outcome.value for outcome in run_ranks(_rows_of_ddp, world_size=3, init_process_group=False)]
    for ours, zen, _ in found:
        assert ours == zen > 0
    assert sum(ours for ours, *_ in found) < 0.8 * sum(gathered for *_, gathered in found)
