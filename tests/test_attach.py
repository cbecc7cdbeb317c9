"""`attach` against stock DDP on real ranks: the same training, in every mode of DDP; and what it refuses."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from injected import Faults
from thinwire.gradients import exact
from thinwire.gradients.tables import LookupRows
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

NUM_WORDS, NUM_TAGS, WIDTH, STEPS = 1500, 600, 16, 4


class Tagger(nn.Module):
    """Two tables of which a batch touches few rows, and dense layers."""

    def __init__(
        self, sparse: bool = False, tied: bool = False, twice: bool = False, num_words: int = NUM_WORDS
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, WIDTH, sparse=sparse)
        self.tags = nn.EmbeddingBag(NUM_TAGS, WIDTH, sparse=sparse, mode="sum")
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, num_words if tied else 7)
        self.twice = twice
        if tied:
            self.out.weight = self.words.weight

    def forward(self, words: Tensor, use_tags: bool = True) -> Tensor:
        found = self.words(words)
        if self.twice:
            found = found + self.words(words.flip(0))
        if use_tags:
            found = found + self.tags(words % NUM_TAGS, torch.arange(len(words)))
        return self.out(torch.tanh(self.hidden(found)))


def train(
    context: RankContext,
    model_options: dict[str, Any],
    ddp_options: dict[str, Any],
    attached: bool,
    accumulate: int = 1,
    scale: float = 1.0,
    tags_on: tuple[int, ...] | None = None,
) -> tuple[list[Tensor], thinwire.Synchronizer | None, DistributedDataParallel]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Tagger(**model_options), **ddp_options)
    sync = thinwire.attach(model) if attached else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(100 + context.rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            words = (torch.rand(24, generator=data) ** 3 * NUM_WORDS).long()
            use_tags = tags_on is None or context.rank in tags_on
            with model.no_sync() if micro + 1 < accumulate else contextlib.nullcontext():
                (model(words, use_tags).square().mean() * scale).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / scale
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()], sync, model


def _same_as_stock(context: RankContext, options: dict[str, Any], kinds: list[str]) -> None:
    exact.LEFT_BYTES = -1
    stock, _, _ = train(context, attached=False, **options)
    mine, sync, _ = train(context, attached=True, **options)
    for ours, theirs in zip(mine, stock, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    flat = torch.cat([parameter.flatten() for parameter in mine])
    everyone = [torch.empty_like(flat) for _ in range(context.world_size)]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(other, flat) for other in everyone)
    assert sync is not None
    found = {row["name"]: row["kind"] for row in sync.table()}
    assert [found["words.weight"], found["tags.weight"]] == kinds, found
    stats = sync.stats()
    assert stats["comm/steps"] == STEPS
    assert stats["comm/bytes_sent"] == sum(int(row["total_bytes"]) for row in sync.table())
    sync.detach()


KNOWN, SCANNED = "dense gradient, rows known", "dense gradient, rows scanned"
SPARSE = "sparse gradient"
MODES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "sparse": ({"model_options": {"sparse": True}, "ddp_options": {}}, [SPARSE, SPARSE]),
    "dense": ({"model_options": {}, "ddp_options": {}}, [KNOWN, KNOWN]),
    "tied": ({"model_options": {"tied": True}, "ddp_options": {}}, [SCANNED, KNOWN]),
    "tied, too large to be fused": (
        {"model_options": {"tied": True, "num_words": 5000}, "ddp_options": {}},
        ["all-reduce", KNOWN],
    ),
    "looked up twice": ({"model_options": {"twice": True}, "ddp_options": {}}, [KNOWN, KNOWN]),
    "static graph": ({"model_options": {}, "ddp_options": {"static_graph": True}}, [KNOWN, KNOWN]),
    "static graph, sparse": (
        {"model_options": {"sparse": True}, "ddp_options": {"static_graph": True}},
        [SPARSE, SPARSE],
    ),
    "bucket view": ({"model_options": {}, "ddp_options": {"gradient_as_bucket_view": True}}, [KNOWN, KNOWN]),
    "many buckets": ({"model_options": {}, "ddp_options": {"bucket_cap_mb": 0.01}}, [KNOWN, KNOWN]),
    "accumulation": ({"model_options": {}, "ddp_options": {}, "accumulate": 3}, [SCANNED, SCANNED]),
    "accumulation, sparse": (
        {"model_options": {"sparse": True}, "ddp_options": {}, "accumulate": 2},
        [SPARSE, SPARSE],
    ),
    "loss scale": ({"model_options": {}, "ddp_options": {}, "scale": 65536.0}, [KNOWN, KNOWN]),
    "table unused on some ranks": (
        {"model_options": {}, "ddp_options": {"find_unused_parameters": True}, "tags_on": (0,)},
        [KNOWN, ""],
    ),
}
OFTEN = "sparse", "tied"


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[] if mode in OFTEN else pytest.mark.slow)
        for mode in MODES
        if mode != "table unused on some ranks"
    ],
)
def test_trains_as_stock_ddp(mode: str) -> None:
    run_ranks(_same_as_stock, *MODES[mode], world_size=3, timeout_seconds=60)


class Normed(Tagger):
    """With buffers, which DDP broadcasts unless it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)

    def forward(self, words: Tensor, use_tags: bool = True) -> Tensor:
        return self.norm(super().forward(words, use_tags))


DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "static graph": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "many buckets": {"bucket_cap_mb": 0.01},
    "a cap for each bucket": {"bucket_cap_mb_list": [0.01, 0.05, 1]},
    "finds unused": {"find_unused_parameters": True},
    "own buffers": {"broadcast_buffers": False},
    "batched copies": {"batched_grad_copy": True},
    "batched copies into views": {"batched_grad_copy": True, "gradient_as_bucket_view": True},
    "lazy buckets": {"lazy_bucket_allocation": True},
    "lazy buckets, batched copies": {"lazy_bucket_allocation": True, "batched_grad_copy": True},
}
KNOWN_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters.keys()  # some are of torch 2.14 and 2.15


def _trained(
    context: RankContext, options: dict[str, Any], by_hand: bool, how: dict[str, Any] | None, accumulates: bool
) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(Normed(), **options)
    sync = None if how is None else thinwire.attach(model, **how)
    model.require_manual_backward_finalization = by_hand
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(100 + context.rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 2 and accumulates:
            with model.no_sync():
                model((torch.rand(24, generator=data) ** 3 * NUM_WORDS).long()).square().mean().backward()
        model((torch.rand(24, generator=data) ** 3 * NUM_WORDS).long()).square().mean().backward()
        if by_hand:
            model.finalize_backward()
        optimizer.step()
    if sync is not None:
        sync.detach()
    return [tensor.detach().clone() for tensor in (*model.module.parameters(), *model.module.buffers())]


def _same_bits_as_stock(context: RankContext, options: dict[str, Any]) -> None:
    sparsifier = {"dense": thinwire.compress.top_k(0.1)}
    accumulates = not options.get("static_graph")  # which stock DDP refuses
    plain = _trained(context, {}, False, sparsifier, accumulates) if options.get("broadcast_buffers", True) else None
    for by_hand in (False, True) if hasattr(DistributedDataParallel, "finalize_backward") else (False,):
        stock = _trained(context, options, by_hand, None, accumulates)
        for how in ({"rows": "zen"}, {"rows": "auto"}, {"dense": "lossless"}):
            assert all(map(torch.equal, _trained(context, options, by_hand, how, accumulates), stock)), (how, by_hand)
        if plain is not None:
            assert all(map(torch.equal, _trained(context, options, by_hand, sparsifier, accumulates), plain)), by_hand


@pytest.mark.parametrize("name", [name for name, options in DDP_OPTIONS.items() if options.keys() <= KNOWN_OPTIONS])
def test_options_of_ddp_change_no_bit(name: str) -> None:
    """On two ranks, whose sums have one order; of a compressor, no bit of what it does without them."""
    run_ranks(_same_bits_as_stock, DDP_OPTIONS[name], world_size=2, timeout_seconds=60)


def _unused(context: RankContext) -> None:
    options = MODES["table unused on some ranks"][0]
    stock, _, _ = train(context, attached=False, **options)
    mine, sync, _ = train(context, attached=True, **options)
    for ours, theirs in zip(mine, stock, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert sync is not None
    kinds = {row["name"]: row["kind"] for row in sync.table()}
    assert kinds["tags.weight"] == (KNOWN if context.rank == 0 else SCANNED)
    sync.detach()


@pytest.mark.filterwarnings("ignore")
def test_a_table_that_some_ranks_do_not_use() -> None:
    run_ranks(_unused, world_size=3, timeout_seconds=60)


def _infinite(context: RankContext) -> None:
    """A scaled loss that overflows on one rank must reach the scaler of every rank."""
    for sparse in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Tagger(sparse=sparse))
        sync = thinwire.attach(model)
        loss = model(torch.arange(10)).sum()
        factor = float("inf") if context.rank == 1 else 1.0
        (loss * factor).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            assert not bool(torch.isfinite(gradient).all())
        sync.detach()


def test_infinities_arrive_unharmed() -> None:
    run_ranks(_infinite, world_size=2, timeout_seconds=60)


def _grad_scaler(context: RankContext) -> None:
    for sparse in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Tagger(sparse=sparse))
        sync = thinwire.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(2):
            optimizer.zero_grad()
            loss = model(torch.arange(10) + context.rank).square().mean()
            poison = float("inf") if step == 0 and context.rank == 0 else 1.0
            scaler.scale(loss * poison).backward()
            scaler.step(optimizer)
            scaler.update()
            unchanged = all(map(torch.equal, before, model.parameters()))
            assert unchanged == (step == 0), "the step with the infinity is skipped on every rank"
        assert scaler.get_scale() == 512.0
        sync.detach()


def test_grad_scaler_skips_the_same_step_on_all_ranks() -> None:
    run_ranks(_grad_scaler, world_size=2, timeout_seconds=60)


def _life_cycle(context: RankContext) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("thinwire").addHandler(handler)
    logging.getLogger("thinwire").setLevel(logging.INFO)
    model = DistributedDataParallel(Tagger())
    sync = thinwire.attach(model)
    with pytest.raises(ValueError, match="attached to this model already"):
        thinwire.attach(model)
    words = torch.arange(8) + context.rank
    model(words).sum().backward()
    lines = [record.getMessage() for record in records]
    all_reduced = [line for line in lines if "all-reduced" in line]
    assert len(all_reduced) == (context.rank == 0)
    assert all("words.weight" in line for line in all_reduced)
    assert all("rather than" in line for line in lines if line not in all_reduced)
    assert bool(lines) == (context.rank == 0)
    state = sync.state_dict()
    sync.detach()
    sync.detach()
    model.zero_grad()
    model(words).sum().backward()
    stock = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    again = thinwire.attach(model)
    again.load_state_dict(state)
    assert again.state_dict() == state
    with pytest.raises(ValueError, match="other parameters"):
        again.load_state_dict(state | {"parameters": ["elsewhere"]})
    with pytest.raises(ValueError, match="version"):
        again.load_state_dict(state | {"version": 99})
    model.zero_grad()
    model(words).sum().backward()
    mine = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for ours, theirs in zip(mine, stock, strict=True):
        torch.testing.assert_close(ours, theirs)
    again.detach()


def test_life_cycle_and_state() -> None:
    run_ranks(_life_cycle, world_size=3, timeout_seconds=60)


def _refusals(context: RankContext) -> None:
    hooked = DistributedDataParallel(Tagger())
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="communication hook already"):
        thinwire.attach(hooked)
    model = DistributedDataParallel(Tagger())
    with pytest.raises(ValueError, match="legal are auto"):
        thinwire.attach(model, rows="zenith")
    with pytest.raises(thinwire.MismatchError, match="rows="):
        thinwire.attach(model, rows="zen" if context.rank else "agsparse")
    other = DistributedDataParallel(
        Tagger(), process_group=dist.new_group([context.rank], use_local_synchronization=True)
    )
    sync = thinwire.attach(other)
    other(torch.arange(4)).sum().backward()
    assert sync.stats()["comm/bytes_sent"] == 0
    sync.detach()


def test_refusals() -> None:
    run_ranks(_refusals, world_size=2, timeout_seconds=60)


def _dies_in_training(context: RankContext, faults: Faults) -> str:
    model = DistributedDataParallel(Tagger(sparse=True))
    thinwire.attach(model)
    for step in range(4):
        faults.strike(context.rank, step)
        try:
            model(torch.arange(8)).sum().backward()
        except thinwire.PeerError as error:
            return str(error)
    return "no error"


def test_a_rank_that_dies_in_training_is_a_clear_error_out_of_backward() -> None:
    outcomes = run_ranks(_dies_in_training, Faults().kill(rank=2, step=2), world_size=4, check=False)
    for outcome in outcomes:
        if outcome.rank == 2:
            assert outcome.exit_code == -9
        else:
            assert outcome.value.startswith("rank 2 ")
            assert "died or exited" in outcome.value


# --- small tables travel together

SMALL_SIZES = ((50, 8), (600, 8), (7, 8), (1200, 8), (300, 16), (900, 16), (20_000, 16))  # the last is large at first


class Recommender(nn.Module):
    """A table for each feature, as small as features are, and one that is not."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width, sparse=sparse) for rows, width in SMALL_SIZES])
        self.out = nn.Linear(sum(width for _, width in SMALL_SIZES), 1)

    def forward(self, features: Tensor) -> Tensor:
        found = [table(features[:, place] % table.num_embeddings) for place, table in enumerate(self.tables)]
        return torch.tanh(self.out(torch.cat(found, dim=1)))


def recommend(
    context: RankContext, sparse: bool, attached: bool, static_graph: bool = False, scheme: str = "zen"
) -> tuple[Tensor, list[int], list[int], thinwire.Synchronizer | None]:
    """The parameters, and of each step the jobs of the lane and the header rounds."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Recommender(sparse), static_graph=static_graph)
    sync = thinwire.attach(model, scheme) if attached else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(100 + context.rank)
    jobs, rounds = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        features = torch.randint(0, 10**6, (12, len(SMALL_SIZES)), generator=data)
        loss = model(features).square().mean()
        with counted_calls(sync) as calls:
            loss.backward()
        jobs.append(calls["submit"])
        rounds.append(calls["swap_records"])
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), jobs, rounds, sync


@contextlib.contextmanager
def counted_calls(sync: thinwire.Synchronizer | None) -> Iterator[Counter[str]]:
    """How often the lane gets a job, and how often it opens a round of headers."""
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((sync._lane, "submit"), (sync._lane.exchange, "swap_records")) if sync else ():
            patch.setattr(owner, name, counting(calls, name, getattr(owner, name)))
        yield calls


def counting(calls: Counter[str], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return original(*args, **options)

    return call


def _together(context: RankContext, sparse: bool, static_graph: bool) -> dict[str, Any]:
    mine, jobs, rounds, sync = recommend(context, sparse, attached=True, static_graph=static_graph)
    assert sync is not None
    fused = {row["name"]: row["fused"] for row in sync.table()}
    stats = sync.stats()
    assert stats["comm/bytes_sent"] == sum(int(row["total_bytes"]) for row in sync.table())
    sync.detach()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "SMALL_TABLE_BYTES", -1)
        alone, jobs_alone, rounds_alone, sync = recommend(context, sparse, attached=True, static_graph=static_graph)
    assert sync is not None
    assert {row["fused"] for row in sync.table()} == {1}
    sync.detach()
    assert torch.equal(mine, alone), "the same bits"
    stock, _, _, _ = recommend(context, sparse, attached=False, static_graph=static_graph)
    torch.testing.assert_close(mine, stock, atol=1e-6, rtol=1e-5)
    everyone = [torch.empty_like(mine) for _ in range(context.world_size)]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(other, mine) for other in everyone)
    return {
        "fused": [fused.get(f"tables.{place}.weight", 0) for place in range(len(SMALL_SIZES))],
        "jobs": jobs,
        "jobs alone": jobs_alone,
        "rounds": rounds,
        "rounds alone": rounds_alone,
    }


# A synchronization by zen opens two rounds of headers, an all-reduce none, and dense buckets are no jobs. No sparse
# bucket waits in the first step. Of dense tables those in one bucket are fused; the large one has a bucket of its own,
# and the two that are too small to be looked at are 0 here.
TOGETHER: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "sparse": (True, False, {"fused": [4, 4, 4, 4, 3, 3, 3], "jobs": [7, 1, 1, 1], "jobs alone": [7] * 4}
               | {"rounds": [14, 4, 4, 4], "rounds alone": [14] * 4}),
    "sparse, static graph": (True, True, {"fused": [4, 4, 4, 4, 3, 3, 3], "jobs": [7, 1, 1, 1], "jobs alone": [7] * 4}
                             | {"rounds": [14, 4, 4, 4], "rounds alone": [14] * 4}),
    "dense": (False, False, {"fused": [0, 2, 0, 2, 2, 2, 1], "jobs": [1, 2, 2, 2], "jobs alone": [1, 2, 2, 2]}
              | {"rounds": [6] * 4, "rounds alone": [10] * 4}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow if number else ()) for number, mode in enumerate(TOGETHER)]
)
def test_small_tables_travel_together(mode: str) -> None:
    """With stock DDP's result, the bits of tables that travel alone, and fewer rounds."""
    sparse, static_graph, expected = TOGETHER[mode]
    for outcome in run_ranks(_together, sparse, static_graph, world_size=3, timeout_seconds=60):
        assert outcome.value == expected


def _left_early(context: RankContext, how: str) -> None:
    """Some buckets wait when backward ends without the last one, or fails, or thinwire is detached."""
    exact.LEFT_BYTES = -1  # no table is left to stock DDP, which has nothing wait
    torch.manual_seed(0)
    model = DistributedDataParallel(Recommender(sparse=True))
    sync = thinwire.attach(model, "zen")  # "auto" leaves tables as small as these to DDP
    features = torch.arange(12 * len(SMALL_SIZES)).view(12, -1) * (context.rank + 1)
    model(features).sum().backward()
    model(features).sum().backward()
    model.zero_grad()
    loss = model(features).sum()
    tables = model.module.tables
    if how == "unused parameters":  # DDP expects gradients of all that it was called with
        sum(table(features[:, 0] % 7).sum() for table in tables[3:]).backward()
    else:
        handle = strike_at(tables[2].weight, sync, how)
        with pytest.raises(RuntimeError, match="on purpose") if how == "exception" else contextlib.nullcontext():
            loss.backward()
        handle.remove()
    assert not sync._buckets._waiting or how == "exception"
    sync.detach()
    assert not sync._buckets._waiting
    if how == "detach":
        mean = torch.cat([parameter.grad.to_dense().flatten() for parameter in model.parameters()])
        everyone = [torch.empty_like(mean) for _ in range(context.world_size)]
        dist.all_gather(everyone, mean)
        assert all(torch.equal(other, mean) for other in everyone)
        model.zero_grad()
        model(features).sum().backward()
        stock = torch.cat([parameter.grad.to_dense().flatten() for parameter in model.parameters()])
        torch.testing.assert_close(mean, stock)


def strike_at(weight: Tensor, sync: thinwire.Synchronizer, how: str) -> Any:
    def strike(gradient: Tensor) -> None:
        assert sync._buckets._waiting, "the test is about buckets that wait"
        if how == "exception":
            raise RuntimeError("on purpose")
        sync.detach()

    return weight.register_hook(strike)


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["unused parameters", "exception", "detach"])
def test_no_bucket_waits_forever(how: str) -> None:
    run_ranks(_left_early, how, world_size=2, timeout_seconds=20)


def _uneven(context: RankContext) -> list[int]:
    """Under join, DDP hands over zeros outside of backward for a rank that ran out of data."""
    exact.LEFT_BYTES = -1
    torch.manual_seed(0)
    model = DistributedDataParallel(Recommender(sparse=True))
    sync = thinwire.attach(model, "zen")  # "auto" leaves tables as small as these to DDP
    with counted_calls(sync) as calls, model.join():
        for _ in range(2 + 2 * context.rank):
            model(torch.arange(12 * len(SMALL_SIZES)).view(12, -1)).sum().backward()
            model.zero_grad()
    sync.detach()
    return [calls["submit"], calls["swap_records"]]


def test_ranks_that_ran_out_of_data_form_the_same_jobs() -> None:
    first, second = run_ranks(_uneven, world_size=2, timeout_seconds=30)
    assert first.value == second.value
    assert first.value[0] == 7 + 3 * 1


# --- which rows a gradient can have: known only when it is certain


def rows_after(model: nn.Module, table: nn.Embedding, loss) -> Tensor | None:
    lookups = LookupRows(model)
    loss().backward()
    found = lookups.take(table.weight)
    lookups.remove()
    return None if found is None else found.unique()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).sum()


def test_rows_are_known_after_one_lookup_and_only_then() -> None:
    ids = torch.tensor([[3, 3], [1, 499]])
    model = Table()
    weight = model.table.weight
    assert rows_after(model, model.table, lambda: model(ids)).tolist() == [1, 3, 499]
    assert rows_after(model, model.table, lambda: model(ids)) is None, "accumulated on an earlier gradient"
    weight.grad = None
    assert rows_after(model, model.table, lambda: model(ids) + weight[7].sum()) is None
    weight.grad = None
    assert rows_after(model, model.table, lambda: weight[7].sum() + model(ids)) is None
    weight.grad = None
    assert rows_after(model, model.table, lambda: model(ids) * 2).tolist() == [1, 3, 499]
    weight.grad = None
    assert rows_after(model, model.table, lambda: model(ids) + model.table(ids // 2).sum()).tolist() == [
        0,
        1,
        3,
        249,
        499,
    ]
    weight.grad = None
    assert rows_after(model, model.table, lambda: model.table(input=ids).sum()).tolist() == [1, 3, 499]


def edit_afterwards(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.add_(1.0)


def test_rows_are_unknown_when_a_hook_edits_the_gradient() -> None:
    ids = torch.tensor([3, 1])
    for edit in (lambda gradient: gradient + 1.0, lambda gradient: gradient.add_(1.0)):
        model = Table()
        model.table.weight.register_hook(edit)
        assert rows_after(model, model.table, lambda model=model: model(ids)) is None
    model = Table()
    model.table.weight.register_post_accumulate_grad_hook(edit_afterwards)
    assert rows_after(model, model.table, lambda: model(ids)) is None


EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda weight: weight.grad.add_(1.0),
    "in place, a view": lambda weight: weight.grad[5].fill_(1.0),
    "another tensor": lambda weight: setattr(weight, "grad", weight.grad + 1.0),
    "gone": lambda weight: setattr(weight, "grad", None),
}


@pytest.mark.parametrize("edit", EDITS)
def test_rows_are_unknown_when_the_gradient_is_edited_before_they_are_asked_for(edit: str) -> None:
    model = Table()
    assert rows_after(model, model.table, lambda: model(torch.tensor([3]))).tolist() == [3]
    model.table.weight.grad = None
    lookups = LookupRows(model)
    model(torch.tensor([3])).backward()
    EDITS[edit](model.table.weight)
    assert lookups.take(model.table.weight) is None


def test_rows_are_unknown_while_others_have_hooks_that_could_write_uncounted() -> None:
    """Through ``.data`` the version counter stays as it is."""
    model = Table()
    weight = model.table.weight
    node = get_gradient_edge(weight).node
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook, node.register_hook):
        weight.grad = None
        handle = register(lambda *_: None)
        assert rows_after(model, model.table, lambda: model(torch.tensor([3]))) is None
        handle.remove()
        weight.grad = None
        assert rows_after(model, model.table, lambda: model(torch.tensor([3]))) is not None


def test_small_tables_are_left_alone() -> None:
    assert not LookupRows(nn.Sequential(nn.Embedding(10, 4))).parameters
