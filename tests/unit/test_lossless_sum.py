"""Lossless sums of dense tensors: the bits of a sum in rank order, on all ranks, and errors on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopback import LoopbackExchange, run_ranks
from thinwire.codes import floats
from thinwire.comm.channel import Channel, Subject, opening_bytes
from thinwire.errors import CorruptMessageError, LostPeerError
from thinwire.lossless import sum as sums
from thinwire.lossless.sum import SumReport, all_reduce, pieces, reduce_scatter

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers; those of all NaNs are alike, because a sum of two may have either's."""
    return tensor.nan_to_num(nan=1.5, posinf=torch.inf, neginf=-torch.inf).view(BITS[tensor.element_size()])


def rank_order_sum(tensors: Sequence[Tensor], scale: float) -> Tensor:
    """What an uncoded sum in rank order gives: sixteen-bit values are added and scaled in float32, and rounded once."""
    dtype = tensors[0].dtype
    total = tensors[0].to(torch.float32) if dtype.itemsize == 2 else tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor.to(total.dtype)
    return (total * scale).to(dtype)


def gradients(numel: int, world_size: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Values of many sizes, of which some are zeros, and float32 ones mostly short, as under autocast."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(world_size):
        values = torch.randn(numel, generator=generator) * torch.exp(2 * torch.randn(numel, generator=generator))
        values[torch.rand(numel, generator=generator) < 0.1] = 0.0
        if dtype is torch.float32:
            values = values.to(torch.bfloat16).float()
        found.append(values.to(dtype))
    return found


def summed(
    tensors: Sequence[Tensor], scale: float, report: Sequence[SumReport] | None = None
) -> tuple[list[Tensor], list[int]]:
    """The sum on each rank, and the bytes that each sent."""

    def run(exchange: LoopbackExchange) -> Tensor:
        channel = Channel(exchange, Subject("gradient", f"{tensors[0].shape}"), 0)
        channel.open()
        mine = tensors[exchange.rank].clone()
        all_reduce(mine, channel, scale, None if report is None else report[exchange.rank])
        return mine

    outcomes = run_ranks(len(tensors), run)
    return [outcome.get() for outcome in outcomes], [outcome.traffic.sent_bytes for outcome in outcomes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_the_bits_of_a_sum_in_rank_order(dtype: torch.dtype, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "SEGMENT_VALUES", 512)
    for numel in (0, 1, world_size - 1, world_size, 64 * world_size + 1, 9001):
        tensors = gradients(numel, world_size, dtype, seed=numel)
        expected = bits(rank_order_sum(tensors, 1 / world_size))
        for result in summed(tensors, 1 / world_size)[0]:
            assert torch.equal(bits(result), expected), f"{numel} values"


@pytest.fixture(autouse=True)
def everything_is_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few values are sent as they are, which the last of these tests shows."""
    monkeypatch.setattr(sums, "LEAST_VALUES", 1)


@pytest.mark.parametrize(("is_compiled", "most_bits"), [(True, 40), (False, 65)])
def test_large_tensors_travel_as_they_are_until_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, is_compiled: bool, most_bits: int
) -> None:
    monkeypatch.setattr(sums, "PLAIN_VALUES", 20_000)
    monkeypatch.setattr(floats, "is_compiled", lambda: is_compiled)
    tensors, reports = gradients(20_000, 2, torch.float32), [SumReport() for _ in range(2)]
    found, sent = summed(tensors, 0.5, reports)
    assert all(torch.equal(bits(one), bits(rank_order_sum(tensors, 0.5))) for one in found)
    for report, num_bytes in zip(reports, sent, strict=True):
        assert most_bits - 25 < report.bits < most_bits
        assert is_compiled or report.predicted_bytes == num_bytes - opening_bytes(2)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_that_are_no_numbers_are_values_like_others(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(2, 4))
    dtype = data.draw(st.sampled_from(DTYPES))
    tensors = gradients(data.draw(st.integers(1, 400)), world_size, dtype, data.draw(st.integers(0, 99)))
    odd = [torch.inf, -torch.inf, torch.nan, -0.0, torch.finfo(dtype).tiny / 4, torch.finfo(dtype).max]
    for _ in range(data.draw(st.integers(1, 9))):
        tensor = tensors[data.draw(st.integers(0, world_size - 1))]
        tensor[data.draw(st.integers(0, tensor.numel() - 1))] = data.draw(st.sampled_from(odd))
    scale = data.draw(st.sampled_from([1.0, 1 / world_size]))
    results = summed(tensors, scale)[0]
    for result in results:
        assert torch.equal(bits(result), bits(rank_order_sum(tensors, scale)))
    if scale == 1.0:  # the owner made the NaN, and all others have its bits
        assert len({result.view(torch.uint8).numpy().tobytes() for result in results}) == 1


@pytest.mark.parametrize("posted_bytes", [1, 5000, 1 << 30])
def test_receives_may_be_posted_late(posted_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "SEGMENT_VALUES", 256)
    monkeypatch.setattr(sums, "POSTED_BYTES", posted_bytes)
    tensors = gradients(7777, 3, torch.float32)
    for result in summed(tensors, 1 / 3)[0]:
        assert torch.equal(bits(result), bits(rank_order_sum(tensors, 1 / 3)))


def _scattered(tensors: Sequence[Tensor], size: int, exchange: LoopbackExchange) -> Tensor:
    channel = Channel(exchange, Subject("shards", ""), 0)
    channel.open()
    out = tensors[0].new_empty(size)
    reduce_scatter(tensors[exchange.rank], out, channel, 1 / len(tensors))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_rank_gets_its_part_of_a_scattered_sum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "SEGMENT_VALUES", 128)
    for world_size, size in ((1, 5), (2, 0), (3, 1), (3, 777), (5, 130)):
        tensors = gradients(size * world_size, world_size, dtype, seed=size)
        expected = rank_order_sum(tensors, 1 / world_size) if size else tensors[0]

        before = [tensor.clone() for tensor in tensors]
        outcomes = run_ranks(world_size, partial(_scattered, tensors, size))
        assert torch.equal(bits(torch.cat([outcome.get() for outcome in outcomes])), bits(expected))
        assert all(map(torch.equal, tensors, before))


def test_bytes_sent_are_those_of_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report counts what the exchange counts, and its bits are those of the codes of gradients and of the sum."""
    monkeypatch.setattr(sums, "SEGMENT_VALUES", floats.CHUNK_VALUES)
    world_size, numel = 3, 6 * floats.CHUNK_VALUES
    tensors = gradients(numel, world_size, torch.float32)
    reports = [SumReport() for _ in tensors]
    _, sent = summed(tensors, 1 / world_size, reports)
    total = rank_order_sum(tensors, 1.0)
    pulled = sum(floats.encode(part).numel() for part in total.split(floats.CHUNK_VALUES))
    for rank, report in enumerate(reports):
        owned = pieces(numel, world_size)
        others = [tensors[rank][owned[owner]] for owner in range(world_size) if owner != rank]
        pushed = sum(floats.encode(part).numel() for other in others for part in other.split(floats.CHUNK_VALUES))
        assert report.values == report.pull.values == numel
        assert report.push.values == report.push.encoded == report.push.decoded == 2 * numel // 3
        frames = 24 * 64 * world_size  # a size, a seal and padding
        assert 0 <= report.push.num_bytes - pushed < frames
        assert 0 <= report.pull.num_bytes - pulled < frames
        own = floats.encode(total[owned[rank]][: floats.CHUNK_VALUES]).numel()
        own += floats.encode(total[owned[rank]][floats.CHUNK_VALUES :]).numel()
        assert 0 <= sent[rank] - opening_bytes(world_size) - report.push.num_bytes - 2 * own < frames
        assert report.predicted_bytes == pytest.approx(sent[rank] - opening_bytes(world_size), rel=0.02)
        assert report.bits == pytest.approx(8 * (pushed / (numel * 2 / 3) + pulled / numel), rel=0.001)


def _flipped(position: int) -> object:
    def tamper(source: int, target: int, swap: int, data: Tensor) -> Tensor:
        if (source, target) != (1, 0) or swap == 0 or data.numel() < 200:
            return data
        data = data.clone()
        data[position] ^= 0x40
        return data

    return tamper


@pytest.mark.parametrize("position", [0, 1, 7, 8, 100, -1, -9])
def test_an_altered_message_is_an_error_on_all_ranks(position: int) -> None:
    tensors = gradients(20_000, 3, torch.float32)

    def run(exchange: LoopbackExchange) -> None:
        channel = Channel(exchange, Subject("gradient", ""), 0)
        channel.open()
        all_reduce(tensors[exchange.rank].clone(), channel)

    errors = [outcome.error for outcome in run_ranks(3, run, tamper=_flipped(position), timeout_seconds=5)]
    assert isinstance(errors[0], CorruptMessageError)
    assert "rank 0, gradient: from rank 1" in str(errors[0])
    assert all(isinstance(error, (CorruptMessageError, LostPeerError)) for error in errors[1:])


def test_a_message_that_is_no_code_names_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seal is right, so the peer itself encoded something else."""
    encode = floats.encode
    tensors = gradients(20_000, 2, torch.float32)

    def run(exchange: LoopbackExchange) -> None:
        channel = Channel(exchange, Subject("gradient", ""), 0)
        channel.open()
        mine = tensors[exchange.rank].clone()
        if exchange.rank == 1:
            mine[0] = 77.0
        all_reduce(mine, channel)

    def truncated(values: Tensor) -> Tensor:
        return encode(values)[:-1] if values[0] == 77.0 else encode(values)

    monkeypatch.setattr(floats, "encode", truncated)
    errors = [outcome.error for outcome in run_ranks(2, run, timeout_seconds=5)]
    assert isinstance(errors[0], CorruptMessageError)
    assert "rank 0, gradient: from rank 1" in str(errors[0])
    assert isinstance(errors[1], LostPeerError)


def test_few_values_are_sent_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "LEAST_VALUES", 500)
    tensors, reports = gradients(900, 2, torch.float32), [SumReport(), SumReport()]
    results, sent = summed(tensors, 1.0, reports)
    assert all(torch.equal(bits(result), bits(rank_order_sum(tensors, 1.0))) for result in results)
    for report, num_bytes in zip(reports, sent, strict=True):
        assert report.predicted_bytes == num_bytes - opening_bytes(2)
        assert 64.0 <= report.bits < 65.0


@given(st.integers(0, 100_000), st.integers(1, 40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_cover_a_tensor_evenly(numel: int, world_size: int) -> None:
    found = pieces(numel, world_size)
    assert [piece.start for piece in found] == [0, *(piece.stop for piece in found[:-1])]
    assert found[-1].stop == numel
    sizes = [piece.stop - piece.start for piece in found]
    assert max(sizes) - min(sizes) <= 128
