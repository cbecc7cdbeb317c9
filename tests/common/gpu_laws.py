"""What Triton kernels must hold, wherever they run: a module of tests imports all of this and has a fixture ``device``.

Expected is what the reference gives on the CPU, bit by bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from references import float_codes
from thinwire.kernels.dispatch import KERNELS, Kernel
from thinwire.kernels.gpu import find as gpu_find
from thinwire.kernels.gpu import floats as gpu_floats
from thinwire.kernels.gpu import ids as gpu_ids
from thinwire.kernels.gpu import rows as gpu_rows
from thinwire.kernels.reference import codes as reference_codes
from thinwire.kernels.reference import rows as reference
from thinwire.kernels.reference.floats import CHUNK_VALUES
from thinwire.rows.sparse import SUPPORTED_DTYPES

SIZES = (0, 1, 7, 1023, 1024, 1025, 9_001)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WAITS = ("_local_scalar_dense", "nonzero", "unique", "_unique2", "masked_select", "bincount")

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

every_size = pytest.mark.parametrize("size", SIZES)
every_dtype = pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)


def check_same(expected: Any, got: Any) -> None:
    if isinstance(expected, Tensor):
        assert (expected.dtype, expected.shape) == (got.dtype, got.shape)
        bits = BITS[expected.element_size()]
        assert torch.equal(expected.contiguous().view(bits), got.cpu().contiguous().view(bits))
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(got)
        for one, other in zip(expected, got, strict=True):
            check_same(one, other)
    else:
        assert expected == got


def some_ids(count: int, size: int) -> Tensor:
    return torch.randint(0, max(size, 1), (count if size else 0,)).unique()


def some_rows(num_rows: int, width: int, dtype: torch.dtype, density: float) -> Tensor:
    dense = torch.randn(num_rows, width).to(dtype)
    dense[torch.rand(num_rows) >= density] = 0
    return dense


class _Unwaiting(TorchDispatchMode):
    """Raises where an operation would need a value of the device on the host, or give a tensor of unknown length."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


class _Counting(TorchDispatchMode):
    """Counts operations other than views, and those for which the host would wait."""

    operations = waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not func.is_view
        self.waits += func.overloadpacket.__name__ in WAITS
        return func(*args, **(kwargs or {}))


@contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        with _Unwaiting():
            yield
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_waiting_is_seen(device: torch.device) -> None:
    with pytest.raises((AssertionError, RuntimeError)), without_waiting(device):
        gpu_find.nonzero_rows(torch.ones(3, 1, device=device))


def moved(value: Any, device: torch.device) -> Any:
    """A copy on the device, of tensors in lists too."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    return type(value)(moved(item, device) for item in value) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("kernel", [row for row in KERNELS.values() if row.gpu], ids=lambda kernel: kernel.name)
def test_every_kernel_gives_the_same_for_its_samples(device: torch.device, kernel: Kernel) -> None:
    """Also in what it writes to."""
    for sample in kernel.samples():
        args = moved(sample.args, device)
        got = kernel.on_gpu()(*args, **sample.settings)
        check_same([sample.call(float_codes.definition(kernel)), sample.args], [got, args])


@every_size
@every_dtype
@pytest.mark.parametrize("width", [1, 3, 8, 300])
def test_nonzero_rows(device: torch.device, size: int, dtype: torch.dtype, width: int) -> None:
    for density in (0.0, 0.05, 1.0):
        dense = some_rows(size // width, width, dtype, density)
        check_same(reference.nonzero_rows(dense), gpu_find.nonzero_rows(dense.to(device)))


@every_dtype
def test_nonzero_rows_wherever_they_lie(device: torch.device, dtype: torch.dtype) -> None:
    rows = some_rows(700, 3, dtype, 0.3)
    rows[5, 1], rows[6, 0] = float("nan"), -0.0
    shifted = torch.empty(2101, dtype=dtype, device=device)[1:].view(700, 3).copy_(rows)
    strided = torch.empty(700, 6, dtype=dtype, device=device)[:, 1:4].copy_(rows)
    for dense in (shifted, strided, rows.to(device).t().contiguous().t()):
        check_same(reference.nonzero_rows(rows), gpu_find.nonzero_rows(dense))


@every_size
@pytest.mark.parametrize("capacity", [0, 5, 20_000])
def test_find_rows(device: torch.device, size: int, capacity: int) -> None:
    """The first ids that fit, then padding, and the number of all."""
    dense = some_rows(size, 2, torch.float32, 0.4)
    on_device = dense.to(device)
    with without_waiting(device):
        found = gpu_find.find_rows(on_device, capacity)
    check_same(reference.find_rows(dense, capacity), found)
    expected = reference.nonzero_rows(dense)
    assert found[1].tolist() == [expected.numel()]
    assert found[0].tolist() == (expected.tolist() + [size] * capacity)[:capacity]


@pytest.mark.parametrize("width", [0, 1, 5])
def test_find_rows_of_a_stack(device: torch.device, width: int) -> None:
    """Of matrices of any number of rows, each found as alone."""
    sizes = (3, 0, 32, 4100, 1, 0)
    matrices = [some_rows(size, width, torch.float32, 0.4) for size in sizes]
    *starts, num_rows = reference.stack_starts(sizes)
    first, *below = [matrix.to(device) for matrix in matrices]
    for capacity in (0, 100, 5000):
        with without_waiting(device):
            found = gpu_find.find_rows(first, capacity, below)
        check_same(reference.find_rows(matrices[0], capacity, matrices[1:]), found)
    expected = [reference.nonzero_rows(matrix) + start for matrix, start in zip(matrices, starts, strict=True)]
    assert torch.equal(found[0].cpu()[: int(found[1])], torch.cat(expected))
    assert int(found[0][-1]) == num_rows


@every_size
@pytest.mark.parametrize("spread", [1, 10**9])
@pytest.mark.parametrize("world_size", [1, 3, 8, 100, 40_000])
def test_deal_rows(device: torch.device, size: int, spread: int, world_size: int) -> None:
    """Ids above 2^31 too, with padding, and more owners than 16 bits number."""
    if world_size > 100 and size != 1025:
        pytest.skip("once is enough")
    seed, num_rows = 2**63 + 2**50 + 3, size * spread // 2
    ids = torch.cat([torch.tensor([-3]), some_ids(size, size * spread)])
    on_device = ids.to(device)
    expected = reference.deal(ids[(ids >= 0) & (ids < num_rows)], world_size, seed)
    with without_waiting(device):
        dealt = gpu_ids.deal_rows(on_device, num_rows, world_size, seed)
    check_same(reference.deal_rows(ids, num_rows, world_size, seed), dealt)
    assert dealt[2].tolist() == [positions.numel() for positions, _ in expected]
    parts = dealt[0].cpu().split([*dealt[2].tolist(), ids.numel() - int(dealt[2].sum())])
    assert torch.equal(torch.cat(parts[:-1]) // world_size, torch.cat([positions for positions, _ in expected]))
    assert torch.equal(ids[dealt[1].cpu()], dealt[0].cpu())
    for owner, (mine, _) in enumerate(expected):
        assert torch.equal(gpu_ids.dealt_ids(owner, mine.to(device), world_size, seed).cpu(), parts[owner])


@every_size
@pytest.mark.parametrize("density", [0.0, 0.01, 0.6, 1.0])
def test_bitmaps(device: torch.device, size: int, density: float) -> None:
    positions = (torch.rand(size) < density).nonzero().flatten()
    bitmap, on_device = reference_codes.pack_bits(positions, size), positions.to(device)
    with without_waiting(device):
        check_same(bitmap, gpu_find.pack_bits(on_device, size).to(device))
    for offset in (0, 1, 3):  # as it lies in a payload
        moved = torch.cat([torch.full((offset,), 255, dtype=torch.uint8), bitmap]).to(device)[offset:]
        for capacity in (0, 3, positions.numel()):
            with without_waiting(device):
                found = gpu_find.find_bits(moved, capacity)
            check_same(reference.find_bits(bitmap, capacity), found)
        assert torch.equal(found[0].cpu(), positions)


@every_dtype
@pytest.mark.parametrize("size", [0, 1, 1025])
@pytest.mark.parametrize("width", [0, 1, 3, 16, 200])
def test_gather_and_scatter(device: torch.device, size: int, dtype: torch.dtype, width: int) -> None:
    rows = torch.randn(size, width).to(dtype)
    places = torch.randint(0, max(size, 1), (size // 2,))
    expected = reference.gather_rows(rows, places)
    check_same(expected, gpu_rows.gather_rows(rows.to(device), places.to(device)))
    payload = torch.zeros(expected.nbytes + dtype.itemsize, dtype=torch.uint8, device=device)
    out = payload[dtype.itemsize :].view(dtype).view(expected.shape)
    check_same(expected, gpu_rows.gather_rows(rows.to(device), places.to(device), out))
    check_same(expected, out)
    ids = some_ids(size // 2, size)
    expected = reference.scatter_rows(rows.clone(), ids, rows[: ids.numel()])
    check_same(expected, gpu_rows.scatter_rows(rows.clone().to(device), ids.to(device), rows[: ids.numel()].to(device)))


def test_rows_that_are_not_there_are_left_alone(device: torch.device) -> None:
    rows, ids = torch.ones(5, 2, device=device), torch.tensor([3, -1, 5], device=device)
    assert gpu_rows.gather_rows(rows, ids).tolist() == [[1, 1], [0, 0], [0, 0]]
    assert gpu_rows.scatter_rows(rows, ids, torch.full((3, 2), 2.0, device=device)).sum() == 12


@every_dtype
@pytest.mark.parametrize("size", [0, 1, 1025])
@pytest.mark.parametrize("width", [0, 1, 3, 200])
def test_take_and_put(device: torch.device, size: int, dtype: torch.dtype, width: int) -> None:
    """With padding, and of rows that are no neighbors."""
    rows = torch.randn(size, width).to(dtype)
    ids = torch.cat([torch.tensor([-1, size, size]), some_ids(size // 2, size)])
    strided = torch.empty(size, 2 * width, dtype=dtype, device=device)[:, width:].copy_(rows)
    on_device = ids.to(device)
    for dense in (rows.to(device), strided):
        with without_waiting(device):
            taken = gpu_rows.take_rows(dense, on_device)
        check_same(reference.take_rows(rows, ids), taken)
        kept = torch.full_like(taken, 7.0)
        with without_waiting(device):
            gpu_rows.take_rows(dense, on_device, kept)
        check_same(reference.take_rows(rows, ids, torch.full_like(taken.cpu(), 7.0)), kept)
        target = torch.zeros_like(dense)
        with nullcontext() if dense is strided else without_waiting(device):
            gpu_rows.put_rows(target, on_device, taken)
        check_same(reference.put_rows(torch.zeros_like(rows), ids, taken.cpu()), target)


@every_dtype
@pytest.mark.parametrize("size", [0, 1, 120])
@pytest.mark.parametrize("width", [0, 1, 3, 140])
def test_merge_rows(device: torch.device, size: int, dtype: torch.dtype, width: int) -> None:
    """In their order: float additions do not commute, and these differ by powers of ten. Some are no rows."""
    for num_rows, scale in ((max(1, size // 5), 1.0), (2**40, 1 / 3)):
        ids = torch.randint(-2, num_rows + max(2, num_rows // 8), (size,))
        ids[size // 2 :] = torch.randint(0, 3, (size - size // 2,))  # long runs
        values = (torch.randn(size, width) * 10.0 ** torch.randint(-4, 4, (size, 1))).to(dtype)
        moved = ids.to(device), values.to(device)
        for capacity in (0, 2, size + 3):
            with without_waiting(device):
                merged = gpu_rows.merge_rows(*moved, num_rows, capacity, scale)
            check_same(reference.merge_rows(ids, values, num_rows, capacity, scale), merged)
        inside = (ids >= 0) & (ids < num_rows)
        union, sums = reference.sum_rows([(ids[inside], values[inside])], scale)
        assert merged[2].tolist() == [union.numel()]
        check_same((union, sums), (merged[0][: union.numel()], merged[1][: union.numel()]))


@every_dtype
@pytest.mark.parametrize("size", [0, 1, 7, 1025, 4_001])
def test_sum_rows(device: torch.device, size: int, dtype: torch.dtype) -> None:
    """In the order of the pieces: float additions do not commute, and these differ by powers of ten."""
    for width, scale in ((1, 1.0), (3, 0.125), (140, 1 / 3)):
        num_rows = max(1, size // width)
        pieces = []
        for exponent in (0, 3, -4, 1):
            ids = some_ids(num_rows // 2, num_rows)
            pieces.append((ids, (torch.randn(ids.numel(), width) * 10.0**exponent).to(dtype)))
        moved = [(ids.to(device), values.to(device)) for ids, values in pieces]
        check_same(reference.sum_rows(pieces, scale), gpu_rows.sum_rows(moved, scale))


@every_dtype
@pytest.mark.parametrize("largest", [40, 2**40])
def test_sum_of_repeated_unsorted_ids(device: torch.device, dtype: torch.dtype, largest: int) -> None:
    pieces = [(torch.randint(0, largest, (200,)), torch.randn(200, 3).to(dtype)) for _ in range(3)]
    moved = [(ids.to(device), values.to(device)) for ids, values in pieces]
    check_same(reference.sum_rows(pieces), gpu_rows.sum_rows(moved))
    check_same(reference.sum_rows(pieces[:1]), gpu_rows.sum_rows(moved[:1]))


@pytest.mark.parametrize("num_pieces", [1, 8])
def test_the_host_waits_once_for_a_sum(device: torch.device, monkeypatch: pytest.MonkeyPatch, num_pieces: int) -> None:
    """And the device gets as many operations for eight pieces as for one, but for two concatenations."""
    pieces = [(torch.randint(0, 40, (200,)).to(device), torch.randn(200, 3).to(device)) for _ in range(num_pieces)]
    launches = []
    monkeypatch.setattr(gpu_rows, "launch", lambda kernel, *_, **__: launches.append(kernel))
    with _Counting() as counting:
        gpu_rows.sum_rows(pieces)
    assert counting.waits == 1
    assert counting.operations + len(launches) <= 11 + 2 * (num_pieces > 1), (counting.operations, len(launches))


def some_floats(size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Values of each mode of the code, with patches, with low bits, and with what is no number."""
    normal, rare = torch.randn(size), torch.rand(size)
    bits = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    made = {
        "normal": normal,
        "as a bfloat16 computation gives": torch.where(rare < 0.02, normal, normal.bfloat16().float()),
        "mostly low bits": torch.where(rare < 0.3, normal.bfloat16().float(), normal),
        "sums of 8": sum(torch.randn(8, size).bfloat16().float()) * (rare < 0.7),
        "wide": normal.double() * torch.randn(size).double().mul(6).exp2(),
        "no numbers": torch.where(rare < 0.1, float("nan"), torch.where(rare < 0.2, float("-inf"), normal)),
        "subnormal": normal.double() * torch.finfo(dtype).smallest_normal / 16,
        "negative zeros": -torch.zeros(size),
    }
    return {name: values.to(dtype) for name, values in made.items()} | {"random bits": bits}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [0, 1, 2, 1023, 2500])
def test_floats(device: torch.device, dtype: torch.dtype, size: int) -> None:
    """The bytes of the reference, wherever the values lie; of them the values, and nothing beside them is written."""
    for number, (name, values) in enumerate(some_floats(size, dtype).items()):
        shifted = torch.full((size + 9,), 3.0, dtype=dtype, device=device)
        place = slice(number % 3, number % 3 + size)
        expected = float_codes.encode_floats(values)
        out = shifted.clone()
        shifted[place] = values.to(device)
        check_same(expected, gpu_floats.encode_floats(shifted[place]).to("cpu"))
        assert gpu_floats.estimate_floats(shifted[place]) == float_codes.estimate_floats(values), name
        payload = torch.cat([expected[:0].new_full((number % 4,), 255), expected]).to(device)[number % 4 :]
        assert gpu_floats.decode_floats(payload, out[place]), name
        check_same(shifted.cpu(), out.cpu())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_of_several_chunks(device: torch.device, dtype: torch.dtype) -> None:
    """Each of another kind, one of equal values, the last one short."""
    parts = some_floats(CHUNK_VALUES, dtype)
    names = ("sums of 8", "negative zeros", "random bits", "as a bfloat16 computation gives")
    values = torch.cat([parts[name] for name in names])[: -CHUNK_VALUES + 1100]
    expected, out = float_codes.encode_floats(values), torch.empty_like(values, device=device)
    check_same(expected, gpu_floats.encode_floats(values.to(device)).cpu())
    assert gpu_floats.estimate_floats(values.to(device)) == float_codes.estimate_floats(values)
    assert gpu_floats.decode_floats(expected.to(device), out)
    check_same(values, out.cpu())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_malformed_floats_are_refused_as_by_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    """And what is accepted gives the same values; nothing beside these is written to."""
    kinds, refused = list(some_floats(1300, dtype).values())[:6], 0
    if device.type == "cpu":  # a trial takes 6 s in Triton's interpreter: each kind with one or two of the dtypes
        kinds = kinds[FLOATS.index(dtype) % 3 :: 3]
    for number, values in enumerate(kinds):
        message = float_codes.encode_floats(values).clone()
        for trial in range(3):
            changed = message.clone() if trial else message[:-1]
            if trial:
                place = int(torch.randint(0, changed.numel(), ())) % (changed.numel() if trial % 2 else 40)
                changed[place] ^= 1 << number % 8
            expected = values.new_zeros(1300)
            out = torch.full((1500,), 3.0, dtype=dtype, device=device)
            verdict = float_codes.decode_floats(changed, expected)
            assert gpu_floats.decode_floats(changed.to(device), out[100:1400]) == verdict
            if verdict:
                check_same(expected, out[100:1400].cpu())
            assert (out[:100] == 3).all()
            assert (out[1400:] == 3).all()
            refused += not verdict
    assert refused >= len(kinds), "truncated ones at least"


def test_patches_in_a_wrong_order_are_refused(device: torch.device) -> None:
    """Two of one value would be written in any order."""
    values = torch.randn(1000).bfloat16()
    values[::100] *= 2.0**60
    message, out = float_codes.encode_floats(values), torch.empty_like(values, device=device)
    start = 20 + 2 + int(message[20:22].view(torch.int16))
    assert message[8:10].view(torch.int16) == 10
    for one, other in ((0, 1), (8, 9)):
        changed = message.clone()
        changed[start + 2 * one : start + 2 * one + 2] = message[start + 2 * other : start + 2 * other + 2]
        assert not gpu_floats.decode_floats(changed.to(device), out)
    assert gpu_floats.decode_floats(message.to(device), out)


def test_the_host_waits_once_for_a_code_and_once_for_values(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, launches = torch.randn(3000).bfloat16(), []
    launch = gpu_floats.launch
    monkeypatch.setattr(
        gpu_floats, "launch", lambda kernel, *a, **b: (launches.append(kernel), launch(kernel, *a, **b))
    )
    on_device, message = values.to(device), float_codes.encode_floats(values).to(device)
    gpu_floats.encode_floats(on_device)  # the table of logarithms is there then
    launches.clear()
    with _Counting() as counting:
        gpu_floats.encode_floats(on_device)
    assert (counting.waits, len(launches)) == (1, 5)
    with _Counting() as counting:
        gpu_floats.decode_floats(message, on_device)
    assert (counting.waits, len(launches)) == (1, 10)
