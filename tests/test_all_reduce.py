"""`sparse_all_reduce` on real process groups: layouts, groups, futures, and every kind of bad input."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from thinwire.all_reduce import _lane_of
from thinwire.comm.process_group import Exchange
from thinwire.errors import LostPeerError
from thinwire.lab.testbed.launch import Outcome, RankContext, run_ranks

pytestmark = pytest.mark.ranks

SCHEMES = [*thinwire.schemes.NAMED, "auto"]


def coo(rank: int, count: int, shape: tuple[int, ...], sparse_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random uncoalesced COO tensor with duplicates."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.stack([torch.randint(0, size, (count,), generator=generator) for size in shape[:sparse_dim]])
    values = torch.randn(count, *shape[sparse_dim:], generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


def _all_layouts(context: RankContext) -> None:
    for scheme in SCHEMES:
        for shape, sparse_dim in (((50,), 1), ((40, 3), 1), ((9, 8), 2), ((5, 6, 2, 2), 2)):
            for empty_rank in (-1, context.world_size - 1):
                counts = [0 if rank == empty_rank else 20 + rank for rank in range(context.world_size)]
                _check_one(context, scheme, shape, sparse_dim, counts)


def _check_one(context: RankContext, scheme: str, shape: tuple[int, ...], sparse_dim: int, counts: list[int]) -> None:
    parts = [coo(rank, count, shape, sparse_dim) for rank, count in enumerate(counts)]
    exact = sum(part.to_dense().double() for part in parts)
    mine = parts[context.rank]
    total = thinwire.sparse_all_reduce(mine, scheme=scheme)
    assert total.layout == torch.sparse_coo
    assert total.is_coalesced()
    assert (total.shape, total.sparse_dim()) == (mine.shape, sparse_dim)
    torch.testing.assert_close(total.to_dense().double(), exact, atol=1e-5, rtol=1e-6)
    mean = thinwire.sparse_all_reduce(mine.to_dense(), scheme=scheme, op="mean")
    assert mean.layout == torch.strided
    torch.testing.assert_close(mean.double() * context.world_size, exact, atol=1e-5, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)]
)
def test_layouts_and_operations(world_size: int) -> None:
    run_ranks(_all_layouts, world_size=world_size, timeout_seconds=100)


def _bits(context: RankContext) -> dict[str, bytes]:
    tensor = coo(context.rank, 60, (64, 5), 1)
    return {
        scheme: thinwire.sparse_all_reduce(tensor, scheme=scheme).to_dense().numpy().tobytes() for scheme in SCHEMES
    }


def test_same_bits_on_all_ranks_and_for_all_one_shot_schemes() -> None:
    outcomes = run_ranks(_bits, world_size=4)
    for scheme in SCHEMES:
        assert len({outcome.value[scheme] for outcome in outcomes}) == 1
    named = thinwire.schemes.NAMED.items()
    add_on_the_way = [n for n, s in named if s.aggregation == "incremental" and s.communication != "point_to_point"]
    one_shot = {outcomes[0].value[scheme] for scheme in SCHEMES if scheme not in (*add_on_the_way, "auto")}
    assert len(one_shot) == 1


def _groups_and_futures(context: RankContext) -> None:
    tensor = coo(context.rank, 20, (30, 2), 1)
    everyone = thinwire.sparse_all_reduce(tensor, scheme="zen").to_dense()
    mesh = init_device_mesh("cpu", (context.world_size,))
    assert torch.equal(thinwire.sparse_all_reduce(tensor, "zen", process_group=mesh).to_dense(), everyone)
    futures = [thinwire.sparse_all_reduce(tensor, scheme="zen", async_op=True) for _ in range(3)]
    assert all(torch.equal(future.wait().to_dense(), everyone) for future in futures)
    group = dist.new_group([0, 2])
    if context.rank in (0, 2):
        pair = thinwire.sparse_all_reduce(tensor, scheme="zen", process_group=group).to_dense()
        expected = sum(coo(rank, 20, (30, 2), 1).to_dense() for rank in (0, 2))
        torch.testing.assert_close(pair, expected)
    with pytest.raises(ValueError, match="dimensions"):
        thinwire.sparse_all_reduce(tensor, process_group=init_device_mesh("cpu", (1, context.world_size)))


def test_process_groups_meshes_and_futures() -> None:
    run_ranks(_groups_and_futures, world_size=3)


def _sixteen_bits(context: RankContext) -> None:
    for dtype, tolerance in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float64, 2**-50)):
        total = thinwire.sparse_all_reduce(coo(context.rank, 25, (16, 4), 1, dtype), scheme="zen")
        assert total.dtype == dtype
        # duplicates of one rank are added and rounded before they travel, the sum over ranks once more
        parts = [coo(rank, 25, (16, 4), 1, dtype).to_dense().double() for rank in range(context.world_size)]
        bound = 4 * tolerance * sum(part.abs() for part in parts) + 1e-12
        assert bool(((total.to_dense().double() - sum(parts)).abs() <= bound).all())


def test_dtypes() -> None:
    run_ranks(_sixteen_bits, world_size=3)


def _owns_its_sum(context: RankContext) -> None:
    mine = coo(context.rank, 20, (40, 3), 1).coalesce()
    before = mine.to_dense()
    for tensor in (mine, before.clone(), torch.sparse_coo_tensor(size=(5, 2))):
        thinwire.sparse_all_reduce(tensor, "zen").div_(2.0)
    assert torch.equal(mine.to_dense(), before)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sum_shares_no_memory_with_the_tensor_of_a_rank(world_size: int) -> None:
    run_ranks(_owns_its_sum, world_size=world_size, timeout_seconds=30)


def _mode_of_the_call(context: RankContext) -> None:
    """The lane of rank 1 comes to the call after the mode has changed, that of rank 0 before."""
    tensor, may_begin = coo(context.rank, 20, (40, 3), 1), threading.Event()
    torch.use_deterministic_algorithms(True)
    if context.rank == 1:
        _lane_of(dist.group.WORLD).submit(lambda lane: may_begin.wait())
    else:
        _lane_of(dist.group.WORLD).submit(lambda lane: None)
    future = thinwire.sparse_all_reduce(tensor, async_op=True)
    if context.rank == 1:
        torch.use_deterministic_algorithms(False)
    may_begin.set()
    future.wait()


def test_the_mode_of_algorithms_is_that_of_the_call() -> None:
    run_ranks(_mode_of_the_call, world_size=2, timeout_seconds=30)


def test_without_a_process_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        thinwire.sparse_all_reduce(torch.zeros(3, 2))


# --- bad input: an error on every rank, naming rank and reason, and the lane still works afterwards


def _one_rank_is_wrong(context: RankContext, case: str) -> str:
    good = torch.ones(6, 4)
    tensor, options = good, {}
    if context.rank == 1:
        tensor, options = {
            "shape": (torch.ones(7, 4), {}),
            "dtype": (good.double(), {}),
            "layout": (good.to_sparse(), {}),
            "scheme": (good, {"scheme": "zen"}),
            "seed": (good, {"scheme": replace(thinwire.schemes.ZEN, seed=7)}),
            "op": (good, {"op": "mean"}),
            "unknown scheme": (good, {"scheme": "zenn"}),
            "unknown op": (good, {"op": "max"}),
            "non-contiguous": (torch.ones(4, 6).t(), {}),
            "integer": (torch.ones(6, 4, dtype=torch.int64), {}),
            "no gradient": (None, {}),
            "no scheme": (good, {"scheme": ["zen"]}),
            "ids out of range": (
                torch.sparse_coo_tensor(torch.tensor([[9]]), torch.ones(1, 4), (6, 4), check_invariants=False), {},
            ),
        }[case]  # fmt: skip
    if case == "ids out of range" and context.rank != 1:
        tensor = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.ones(1, 4), (6, 4), check_invariants=False)
    options.setdefault("scheme", "auto")
    try:
        thinwire.sparse_all_reduce(tensor, **options)
    except (ValueError, thinwire.ThinwireError) as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "no error"
    after = thinwire.sparse_all_reduce(good, scheme="zen")
    assert torch.equal(after, good * context.world_size), "the lane must be in step again"
    return text


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("shape", "[7, 4]"),
        ("dtype", "float64"),
        ("layout", "sparse_coo"),
        ("scheme", "scheme=zen"),
        ("seed", "seed=7"),
        ("op", "op=mean"),
        ("unknown scheme", "zenn"),
        ("unknown op", "max"),
        ("non-contiguous", "contiguous"),
        ("integer", "int64"),
        ("no gradient", "NoneType"),
        ("no scheme", "['zen']"),
        ("ids out of range", "out of range"),
    ],
)
def test_what_one_rank_does_wrong_every_rank_is_told(case: str, says: str) -> None:
    for outcome in run_ranks(_one_rank_is_wrong, case, world_size=3, timeout_seconds=60):
        assert says in outcome.value
        assert "rank 1" in outcome.value or outcome.rank == 1


def _all_unknown(context: RankContext) -> None:
    with pytest.raises(ValueError, match="legal are auto, dense, agsparse"):
        thinwire.sparse_all_reduce(torch.ones(4), scheme="nonsense")
    with pytest.raises(ValueError, match="legal are sum and mean"):
        thinwire.sparse_all_reduce(torch.ones(4), op="max")
    with pytest.raises(ValueError, match=r"on meta.*\.cpu\(\)"):
        thinwire.sparse_all_reduce(torch.ones(4, device="meta"))


def test_what_all_ranks_do_wrong() -> None:
    run_ranks(_all_unknown, world_size=2)


def _dies(context: RankContext, dying: int) -> str:
    tensor = torch.ones(64, 8)
    thinwire.sparse_all_reduce(tensor)
    if context.rank == dying:
        os._exit(1)
    try:
        thinwire.sparse_all_reduce(tensor)
    except LostPeerError as error:
        return str(error)
    return "no error"


def test_a_rank_that_dies_is_an_error_on_all_others() -> None:
    outcomes = run_ranks(_dies, 1, world_size=4, check=False, timeout_seconds=60)
    others = [outcome for outcome in outcomes if outcome.rank != 1]
    assert all(outcome.value.startswith("rank 1 ") and "died" in outcome.value for outcome in others)


def _stalls(context: RankContext) -> str:
    group = dist.new_group(timeout=timedelta(seconds=2))
    assert isinstance(group, dist.ProcessGroup)
    if context.rank == 0:
        import time

        time.sleep(6)
        return "stalled"
    try:
        Exchange(group).swap_records([torch.zeros(8, dtype=torch.uint8)] * context.world_size)
    except LostPeerError as error:
        return str(error)
    return "no error"


def test_a_rank_that_stalls_is_an_error_after_the_timeout() -> None:
    outcomes = run_ranks(_stalls, world_size=2, check=False, timeout_seconds=60)
    assert "timeout" in outcomes[1].value


class _Tampered(Exchange):
    """Flips a bit of what arrives from rank 0, in the swap of payloads with the given number."""

    def __init__(self, group: dist.ProcessGroup, at: int) -> None:
        super().__init__(group)
        self.countdown = at

    def swap(self, outgoing, receive_bytes):
        incoming = super().swap(outgoing, receive_bytes)
        self.countdown -= 1
        if self.countdown == 0 and self.rank == 1 and incoming[0].numel():
            incoming[0][3] ^= 16
        return incoming


def _flipped(context: RankContext, at: int) -> list[str]:
    from thinwire.all_reduce import _lane_of
    from thinwire.comm.groups import resolve_group

    tensor = torch.ones(64, 8)
    thinwire.sparse_all_reduce(tensor, scheme="zen")
    lane = _lane_of(resolve_group(None))
    exchange = lane.exchange
    assert isinstance(exchange, Exchange)
    assert exchange.process_group is not None
    lane.exchange = _Tampered(exchange.process_group, at)
    texts = []
    for _ in range(2):
        try:
            thinwire.sparse_all_reduce(tensor, scheme="zen")
        except thinwire.ThinwireError as error:
            texts.append(f"{type(error).__name__}: {error}")
        else:
            texts.append("")
    return texts


@pytest.mark.few(1)
@pytest.mark.parametrize("at", [1, 2])
def test_a_flipped_bit_is_never_a_wrong_sum_and_every_rank_learns_of_it(at: int) -> None:
    """In the push (at = 1) all are told in the same call; in the pull (at = 2) rank 1 hangs up, as the others hear."""
    outcomes: list[Outcome] = run_ranks(_flipped, at, world_size=3, timeout_seconds=60)
    assert "checksum" in outcomes[1].value[0]
    assert "from rank 0" in outcomes[1].value[0]
    for rank in (0, 2):
        first, second = outcomes[rank].value
        if at == 1:
            assert "rank 1" in first
            assert "checksum" in first
        else:
            assert "LostPeerError: rank 1 " in second
            assert "checksum" in second
