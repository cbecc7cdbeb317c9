"""Compiled kernels against the reference, bit by bit; and which of the two runs when."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled import compiled_functions
from references.float_codes import definition
from thinwire import kernels
from thinwire.kernels import dispatch
from thinwire.rows.sparse import SUPPORTED_DTYPES

numba = pytest.importorskip("numba")
JIT = os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
LARGE = 100_003 if JIT else 3_001  # as Python, kernels run a thousand times as long
SIZES = (0, 1, 7, 1023, 1024, 1025, LARGE)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

pytestmark = pytest.mark.usefixtures("nothing_compiles_after_warm_up")
every_size = pytest.mark.parametrize("size", SIZES)
every_dtype = pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
every_fill = pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.6, 1.0])
increasing = st.sets(st.integers(0, 5000), max_size=200).map(lambda ids: torch.tensor(sorted(ids), dtype=torch.int64))


def twins(call: Callable[[], Any]) -> tuple[Any, Any]:
    with kernels.using("reference"):
        expected = call()
    with kernels.using("numba"):
        return expected, call()


def assert_same(call: Callable[[], Any]) -> None:
    check_same(*twins(call))


def check_same(expected: Any, got: Any) -> None:
    """Equal to the last bit, of one dtype and shape, and as good to take views of."""
    assert type(expected) is type(got)
    if isinstance(expected, Tensor):
        assert (expected.dtype, expected.shape) == (got.dtype, got.shape)
        assert got.view(torch.uint8).numel() == got.nbytes, "an empty one can be viewed too"
        bits = BITS[expected.element_size()]
        assert torch.equal(expected.contiguous().view(bits), got.contiguous().view(bits))
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(got)
        for one, other in zip(expected, got, strict=True):
            check_same(one, other)
    else:
        assert expected == got


def some_ids(count: int, size: int) -> Tensor:
    """Sorted unique ids below ``size``, at most ``count``."""
    return torch.randint(0, max(size, 1), (count if size else 0,)).unique()


def some_rows(num_rows: int, width: int, dtype: torch.dtype, density: float) -> Tensor:
    dense = torch.randn(num_rows, width).to(dtype)
    dense[torch.rand(num_rows) >= density] = 0
    return dense


def layouts(rows: Tensor) -> dict[str, Tensor]:
    """The same matrix as it may lie in memory."""
    num_rows, width = rows.shape
    shifted = torch.empty(rows.numel() + 1, dtype=rows.dtype)[1:].view(num_rows, width).copy_(rows)
    strided = torch.empty(num_rows, width + 3, dtype=rows.dtype)[:, 1 : width + 1].copy_(rows)
    transposed = rows.t().contiguous().t()
    raw = bytearray(rows.numel() * rows.element_size() + 9)
    unaligned = torch.frombuffer(raw, dtype=rows.dtype, offset=1, count=rows.numel()) if rows.numel() else rows
    return {
        "contiguous": rows,
        "odd offset": shifted,
        "strided": strided,
        "transposed": transposed,
        "unaligned": unaligned.view(num_rows, width).copy_(rows),
    }


@pytest.mark.parametrize("kernel", dispatch.compiled_kernels(), ids=lambda kernel: kernel.name)
def test_twins_give_the_same_for_their_samples(kernel: dispatch.Kernel) -> None:
    """Also in what they write to; sums of magnitudes to 1e-12."""
    for sample, other in zip(kernel.samples(), kernel.samples(), strict=True):
        expected, got = sample.call(definition(kernel)), other.call(kernel.on_cpu())
        if kernel.equal_bits:
            check_same([expected, sample.args], [got, other.args])
        else:
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


@every_size
@every_dtype
@every_fill
def test_nonzero_rows(size: int, dtype: torch.dtype, density: float) -> None:
    for width in (1, 2, 3, 8, 19):
        dense = some_rows(size // width, width, dtype, density)
        assert_same(lambda: kernels.nonzero_rows(dense))  # noqa: B023


def test_nonzero_rows_finds_more_than_the_first_rows_promise() -> None:
    """Memory for ids is guessed from the density so far."""
    size = 3 * LARGE
    for start in (0, size // 2, size - 100):
        dense = torch.zeros(size, 1)
        dense[start:] = 1
        assert_same(lambda: kernels.nonzero_rows(dense))  # noqa: B023


@every_dtype
@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_rows_wherever_they_lie(dtype: torch.dtype, width: int) -> None:
    rows = some_rows(700, width, dtype, 0.3)
    ids = some_ids(300, 700)
    for name, dense in layouts(rows).items():
        expected, got = twins(lambda: kernels.nonzero_rows(dense))  # noqa: B023
        assert torch.equal(expected, got), name
        assert torch.equal(expected, rows.float().ne(0).any(1).nonzero().flatten()), name
        assert_same(lambda: kernels.gather_rows(dense, ids))  # noqa: B023
        piece = (ids, dense[: ids.numel()])
        assert_same(lambda: kernels.sum_rows([piece, piece], 0.3))  # noqa: B023
    for name, target in layouts(torch.zeros_like(rows)).items():
        with kernels.using("numba"):
            kernels.scatter_rows(target, ids, rows[: ids.numel()])
        assert torch.equal(target, torch.zeros_like(rows).index_copy_(0, ids, rows[: ids.numel()])), name


@every_size
@every_dtype
@pytest.mark.parametrize("width", [0, 1, 2, 3, 16])
def test_gather_and_scatter(size: int, dtype: torch.dtype, width: int) -> None:
    rows = torch.randn(size, width).to(dtype)
    places = torch.randint(0, max(size, 1), (size // 2,))
    assert_same(lambda: kernels.gather_rows(rows, places))
    payload = torch.zeros(places.numel() * width * dtype.itemsize + 8, dtype=torch.uint8)
    out = payload[: places.numel() * width * dtype.itemsize].view(dtype).view(places.numel(), width)
    assert_same(lambda: kernels.gather_rows(rows, places, out).clone())
    ids = some_ids(size // 2, size)
    assert_same(lambda: kernels.scatter_rows(rows.clone(), ids, rows[: ids.numel()]))


@pytest.mark.parametrize("wrong", [-1, 50])
def test_a_row_that_is_not_there_is_an_error_not_a_crash(wrong: int) -> None:
    rows, ids = torch.zeros(50, 2), torch.tensor([3, wrong])
    calls = [
        lambda: kernels.gather_rows(rows, ids),
        lambda: kernels.scatter_rows(rows, ids, torch.zeros(2, 2)),
        lambda: kernels.sum_rows_at([(ids, torch.zeros(2, 2))], 50, 2, torch.float32),
        lambda: kernels.union_positions([ids], 50),
        lambda: kernels.pack_bits(ids, 50),
        lambda: kernels.elias_fano_encode(ids * 10**6, 50),
        lambda: kernels.group_by_owner(ids, 50),
    ]
    with kernels.using("numba"):
        for call in calls:
            with pytest.raises(IndexError, match=r"not in \[0, 50\)|out of range|below 50"):
                call()


@every_size
@every_dtype
def test_sum_rows(size: int, dtype: torch.dtype) -> None:
    for width, scale in ((1, 1.0), (3, 0.125), (40, 1 / 3)):
        num_rows = max(1, size // width)
        pieces = []
        for exponent in (0, 3, -4, 1):
            ids = some_ids(num_rows // 2, num_rows)
            pieces.append((ids, (torch.randn(ids.numel(), width) * 10.0**exponent).to(dtype)))
        assert_same(lambda: kernels.sum_rows(pieces, scale))  # noqa: B023


@every_dtype
def test_sum_of_more_rows_than_fit_a_cache_block(dtype: torch.dtype) -> None:
    num_rows, width = (60_000, 16) if JIT else (9_000, 600)
    pieces = []
    for _ in range(3):
        ids = some_ids(num_rows // (1 if JIT else 200), num_rows)
        pieces.append((ids, torch.randn(ids.numel(), width).to(dtype)))
    assert_same(lambda: kernels.sum_rows(pieces, 0.5))


@every_dtype
def test_sum_rows_of_repeated_unsorted_ids(dtype: torch.dtype) -> None:
    for largest in (40, 2**40):
        pieces = [(torch.randint(0, largest, (500,)), torch.randn(500, 3).to(dtype)) for _ in range(3)]
        pieces[1] = (pieces[0][0].flip(0), pieces[1][1])
        assert_same(lambda: kernels.sum_rows(pieces))  # noqa: B023


def test_sixteen_bit_sums_round_as_the_reference_does() -> None:
    """Every bfloat16, nan and inf too, added to one that makes ties."""
    values = torch.arange(-(2**15), 2**15, 1 if JIT else 64).to(torch.int16).view(torch.bfloat16)[:, None]
    ids = torch.arange(values.shape[0])
    for other in (1.0, 2.0**-8, -(2.0**-126), float("inf")):
        second = torch.full_like(values, other)
        expected, got = twins(lambda: kernels.sum_rows([(ids, values), (ids, second)])[1])  # noqa: B023
        assert torch.equal(expected.isnan(), got.isnan())
        check_same(expected.nan_to_num(), got.nan_to_num())


def test_sum_of_mixed_dtypes_is_rounded_to_the_first() -> None:
    ids = torch.arange(300)
    for first, second in (
        (torch.float32, torch.float64),
        (torch.float64, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ):
        pieces = [(ids, torch.randn(300, 2, dtype=torch.float64).to(dtype)) for dtype in (first, second)]
        assert_same(lambda: kernels.sum_rows(pieces))  # noqa: B023


def test_sum_rows_at_takes_pieces_one_by_one() -> None:
    """While they arrive: the second one is made when the first one has been added."""
    log = []

    def arriving() -> Any:
        for piece in range(3):
            log.append(piece)
            yield torch.tensor([piece]), torch.ones(1, 2)

    with kernels.using("numba"):
        total = kernels.sum_rows_at(arriving(), 3, 2, torch.float32)
    assert torch.equal(total, torch.ones(3, 2))
    assert log == [0, 1, 2]


@pytest.mark.few(14)
@every_size
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64, 1000])
def test_deal(size: int, world_size: int) -> None:
    for seed in (0, 2**50 + 3):
        for ids in (torch.arange(size), some_ids(size // 3, size), some_ids(size // 3, 100 * size)):
            assert_same(lambda: kernels.deal(ids, world_size, seed))  # noqa: B023
            assert_same(lambda: kernels.dealt_ids(world_size - 1, ids, world_size, seed))  # noqa: B023


@given(increasing, st.integers(1, 70), st.integers(0, 2**64 - 1), st.sampled_from([0, 2**31, 2**40, 2**52, 2**61]))
def test_deal_of_any_ids(ids: Tensor, world_size: int, seed: int, first: int) -> None:
    assert_same(lambda: kernels.deal(ids + first, world_size, seed))
    dealt = kernels.deal(ids + first, world_size, seed)
    back = [kernels.dealt_ids(owner, positions, world_size, seed) for owner, (positions, _) in enumerate(dealt)]
    assert torch.equal(torch.cat(back).sort().values, ids + first)


@settings(max_examples=min(50, settings.default.max_examples))
@given(st.integers(1, 300), st.lists(st.integers(2**51, 2**52 + 2**20), min_size=1, max_size=20, unique=True))
def test_deal_divides_exactly_where_floats_end(world_size: int, large: list[int]) -> None:
    near = torch.tensor([id // world_size * world_size + step for id in large for step in (-1, 0, 1)]).unique()
    assert_same(lambda: kernels.deal(near, world_size, 1))


@every_size
def test_hashes(size: int) -> None:
    for ids in (torch.arange(size), torch.randint(0, 2**62, (size,))):
        for seed in (0, 5, 2**63 + 1):
            assert_same(lambda: kernels.mix(ids, seed))  # noqa: B023
            assert_same(lambda: kernels.owner_by_hash(ids, 7, seed))  # noqa: B023


@every_size
def test_group_by_owner(size: int) -> None:
    assert_same(lambda: kernels.group_by_owner(torch.arange(size) * 7919 % 5, 6))


@every_size
@pytest.mark.parametrize("num_pieces", [1, 2, 8, 20])
@pytest.mark.parametrize("spread", [1, 10, 10**7])
def test_union_positions(size: int, num_pieces: int, spread: int) -> None:
    """By a bitmap and by a merge; up to 10^12, so beyond 2^31 with few ids."""
    pieces = [some_ids(size // 2, size * spread) for _ in range(num_pieces)]
    assert_same(lambda: kernels.union_positions(pieces, size * spread))


@given(st.lists(increasing, min_size=1, max_size=5), st.sampled_from([5001, 2**33, 2**61]))
def test_union_of_any_ids(pieces: list[Tensor], size: int) -> None:
    assert_same(lambda: kernels.union_positions(pieces, size))
    assert_same(lambda: kernels.union_positions([ids + (size - 5001) for ids in pieces], size))


@given(st.lists(st.lists(st.integers(0, 300), max_size=30), min_size=1, max_size=4), st.sampled_from([301, 2**50]))
def test_union_of_repeated_and_unsorted_ids(lists: list[list[int]], size: int) -> None:
    pieces = [torch.tensor(ids, dtype=torch.int64) for ids in lists]
    assert_same(lambda: kernels.union_positions(pieces, size))


@every_size
@every_fill
def test_bitmaps(size: int, density: float) -> None:
    positions = (torch.rand(size) < density).nonzero().flatten()
    assert_same(lambda: kernels.pack_bits(positions, size))
    bitmap = kernels.pack_bits(positions, size)
    for offset in range(9):  # as it lies in a payload
        moved = torch.cat([torch.full((offset,), 255, dtype=torch.uint8), bitmap])[offset:]
        assert_same(lambda: kernels.unpack_bits(moved))  # noqa: B023


@every_size
@pytest.mark.parametrize("spread", [1, 2, 19, 1000, 2**40])
def test_elias_fano(size: int, spread: int) -> None:
    positions = some_ids(size, size * spread)
    assert_same(lambda: kernels.elias_fano_encode(positions, size * spread))
    data = torch.cat([torch.zeros(3, dtype=torch.uint8), kernels.elias_fano_encode(positions, size * spread)])[3:]
    expected, got = twins(lambda: kernels.elias_fano_decode(data, positions.numel(), size * spread))
    check_same(expected, got)
    assert torch.equal(got, positions)


@settings(max_examples=min(300, settings.default.max_examples))
@given(st.integers(1, 60), st.sampled_from([0, 1, 40, 3000, 2**40]), st.data())
def test_elias_fano_of_any_bytes(count: int, spare: int, data: st.DataObject) -> None:
    """Half of them with as many ones as there should be, so that the rest is looked at too."""
    size = count + spare
    num_bytes = kernels.elias_fano_bytes(count, size)
    coded = torch.tensor(list(data.draw(st.binary(min_size=num_bytes, max_size=num_bytes))), dtype=torch.uint8)
    if data.draw(st.booleans()):
        valid = kernels.elias_fano_encode(torch.arange(count) * (size // count), size)
        place = data.draw(st.integers(0, num_bytes - 1))
        coded = torch.cat([coded[:place], valid[place:]])
    assert_same(lambda: kernels.elias_fano_decode(coded, count, size))


@pytest.mark.parametrize("size", [0, 8, 56, 4088, 4096, 4104, 8 * LARGE])
def test_checksum(size: int) -> None:
    for buffer in (torch.randint(0, 256, (size,), dtype=torch.uint8), torch.full((size,), 255, dtype=torch.uint8)):
        assert_same(lambda: kernels.checksum(buffer))  # noqa: B023
        moved = torch.cat([torch.zeros(3, dtype=torch.uint8), buffer])[3:]
        assert_same(lambda: kernels.checksum(moved))  # noqa: B023


def test_the_compiled_twin_runs_from_its_size_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.kernels.cpu import ids as cpu_ids

    monkeypatch.setattr(cpu_ids, "mix", lambda ids, seed: "compiled")
    ran = {}
    for mode in dispatch.MODES:
        with kernels.using(mode):
            ran[mode] = [kernels.mix(torch.arange(size), 0) == "compiled" for size in (1, 4096)]
            assert kernels.mix(torch.arange(8192)[::2], 0) != "compiled", "strided: unknown to the compiled twin"
    assert ran == {"auto": [False, True], "reference": [False, False], "numba": [True, True]}


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


WITHOUT_NUMBA = """
import logging, sys
sys.modules["numba"] = None
logging.basicConfig(level=logging.INFO)
import torch
from thinwire import kernels
assert kernels.mix(torch.arange(4096), 0).numel() == 4096
assert kernels.nonzero_rows(torch.ones(4096, 1)).numel() == 4096
"""


@pytest.mark.slow
def test_without_numba_the_reference_runs_and_one_line_says_so() -> None:
    result = run_python(WITHOUT_NUMBA, THINWIRE_KERNELS="auto")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("INFO:thinwire:") == 1
    assert "pip install '.[cpu]' in a checkout" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "says"), [("numba", "numba cannot be imported"), ("cuda", "use one of auto, reference, numba")]
)
def test_a_mode_that_cannot_be_is_an_error(mode: str, says: str) -> None:
    result = run_python(WITHOUT_NUMBA, THINWIRE_KERNELS=mode)
    assert result.returncode == 1
    assert f"ValueError: THINWIRE_KERNELS{'=' if mode == 'numba' else ' is '}" in result.stderr
    assert says in result.stderr


@pytest.mark.slow
def test_numba_is_imported_by_the_first_large_call_and_forks_no_threads() -> None:
    code = """
import sys, torch
from thinwire import kernels
kernels.mix(torch.arange(3), 0)
assert "numba" not in sys.modules
kernels.mix(torch.arange(4096), 0)
assert "numba" in sys.modules
assert "numba.np.ufunc.omppool" not in sys.modules
"""
    result = run_python(code, THINWIRE_KERNELS="auto")
    assert result.returncode == 0, result.stderr


def test_kernels_run_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the package nor the user has a directory to write to."""
    if not JIT:
        pytest.skip("nothing is compiled")
    from thinwire.kernels import jit

    def refuse(*settings: object, **named: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(jit.tempfile, "TemporaryFile", refuse)
    jit._log_uncached.cache_clear()
    jit.code_directory.cache_clear()
    with caplog.at_level(logging.INFO, "thinwire"):
        try:
            assert jit.njit(lambda number: number + 1)(1) == 2
            assert jit.njit(lambda number: number + 2)(1) == 3
        finally:
            jit.code_directory.cache_clear()
    assert [record.message for record in caplog.records if "NUMBA_CACHE_DIR" in record.message] == [
        "compiled kernels cannot be kept ([Errno 30] Read-only file system), so each process compiles them; set"
        " NUMBA_CACHE_DIR"
    ]


def test_every_kernel_releases_the_gil_and_is_serial_and_kept() -> None:
    if not JIT:
        pytest.skip("kernels are plain functions without compilation")
    compiled = [function for function in compiled_functions().values() if hasattr(function, "targetoptions")]
    assert len(compiled) >= 40
    for kernel in compiled:
        options = kernel.targetoptions
        assert (options["nogil"], options["error_model"], options.get("parallel", False)) == (True, "numpy", False)
        assert not options.get("fastmath", False), "additions keep their order"
