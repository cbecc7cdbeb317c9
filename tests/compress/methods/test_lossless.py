"""Values in a code that loses nothing: of whole gradients, of casts, of what sparsifiers select, and of rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from loopback import LoopbackExchange, Tamper, run_ranks, untouched
from thinwire import compress
from thinwire.comm.channel import Channel, Subject
from thinwire.compress.base import Compressor, Identity, Memory, Parameter, State
from thinwire.compress.memory import ErrorFeedback, with_memory
from thinwire.compress.named import parse
from thinwire.compress.reductions import stacked
from thinwire.compress.reductions.base import Result, Stopwatch, Task
from thinwire.compress.reductions.by_scheme import ByScheme
from thinwire.compress.reductions.choose import AUTO, reduction_for, scattered
from thinwire.compress.wrappers import packed_code
from thinwire.errors import CorruptMessageError
from thinwire.gradients.compressed import ChannelPeers
from thinwire.rows import formats as wire
from thinwire.rows.formats import Format, Whole
from thinwire.rows.sparse import SparseRows
from thinwire.sums.known_ids import _Shares
from thinwire.sums.named import COLUMN_SPLIT, NAMED, SPARCML, UNION_SPLIT, ZEN, name_of
from thinwire.sums.scheme import Communication
from thinwire.sums.synchronize import synchronize
from thinwire.sums.two_level import TwoLevel
from thinwire.sums.union_shares import UnionPlan

SIZES = (0, 1, 7, 1000, 5000)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def like_autocast(numel: int, seed: int = 0) -> Tensor:
    """Float32 values of 16 bits, as gradients under autocast are."""
    scales = torch.randn(numel, generator=torch.Generator().manual_seed(seed + 99)).exp()
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-4 * scales
    return values.bfloat16().float()


def arrived(code: Compressor, gradient: Tensor, parameter: Parameter) -> tuple[Tensor, int]:
    """A gradient through the bytes, and their number."""
    packed = packed_code(code)
    data = packed.pack(code.compress(gradient, parameter, code.init(parameter)), parameter)
    return packed.decompress(packed.unpack(data, parameter), parameter), data.numel()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_every_bit_arrives_and_no_payload_grows(numel: int, dtype: torch.dtype) -> None:
    parameter = Parameter("weight", (numel,), dtype)
    gradient = like_autocast(numel).to(parameter.working_dtype)
    gradient[: numel // 3 : 2] = -0.0
    value, num_bytes = arrived(compress.lossless(), gradient, parameter)
    assert same_bits(value, gradient)
    assert num_bytes <= 8 + gradient.nbytes + 7
    rounded, _ = arrived(compress.bf16(), gradient, parameter)
    coded, num_bytes = arrived(compress.lossless(values=compress.bf16()), gradient, parameter)
    assert same_bits(coded, rounded)
    assert num_bytes <= 8 + 2 * numel + 7


@pytest.mark.parametrize("numel", [1000, 20_000])
@pytest.mark.parametrize(
    "selector",
    [compress.top_k(0.1), compress.gaussian_k(0.1), compress.random_k(0.1), compress.sidco(0.1)],
    ids=lambda selector: selector.name,
)
def test_selected_values_arrive_as_they_are(selector: Any, numel: int) -> None:
    """And the memory of error feedback is zero exactly where they were."""
    parameter, gradient = Parameter("weight", (numel,)), like_autocast(numel)
    coded = replace(selector, values=compress.lossless())
    plain, plain_bytes = arrived(selector, gradient, parameter)
    value, num_bytes = arrived(coded, gradient, parameter)
    assert same_bits(value, plain)
    assert num_bytes <= plain_bytes + 16
    memory = ErrorFeedback(coded)
    state = memory.init(parameter)
    memory.compress(gradient, parameter, state)
    assert same_bits(state["error"], gradient - plain)


def test_what_lossless_codes() -> None:
    assert compress.lossless().memory is Memory.UNBIASED
    assert compress.lossless(compress.fp16()).memory is Memory.OPTIONAL
    assert parse("top_k:density=0.001:values=lossless") == compress.top_k(0.001, values=compress.lossless())
    assert parse("lossless:values=bf16").name == "lossless(values=bf16)"
    assert not compress.top_k(0.1, values=compress.lossless(compress.bf16())).is_exact
    for wrong in (compress.int8(), compress.top_k(0.1), compress.power_sgd(4), "bf16"):
        with pytest.raises(ValueError, match=r"bf16\(\), fp16\(\) or nothing"):
            compress.lossless(wrong)  # type: ignore[arg-type]


def test_codes_of_the_wrong_size_are_refused() -> None:
    parameter, code = Parameter("weight", (1000,)), compress.lossless()
    data = code.pack(code.compress(like_autocast(1000), parameter, {}), parameter)
    longer = data.clone()
    longer[:8].view(torch.int64)[0] = 4001
    negative = data.clone()
    negative[:8].view(torch.int64)[0] = -1
    for bad in (data[:-8], data[:4], data[:0], torch.cat([data, data]), longer, negative):
        with pytest.raises(CorruptMessageError):
            code.unpack(bad, parameter)
    with pytest.raises(CorruptMessageError):
        code.unpack(data[:8].clone().zero_(), parameter)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_whole_gradients_go_in_two_shots_where_that_is_less(world_size: int) -> None:
    parameter = Parameter("weight", (100, 100))
    expected = "all_gather" if world_size == 2 else "two_shot"
    for code in (compress.lossless(), compress.lossless(compress.bf16())):
        assert reduction_for(AUTO, code, parameter, world_size).name == expected
        assert scattered(code.by(AUTO), parameter, world_size).name == "reduce_scatter"
    sparse = compress.threshold(1.0, values=compress.lossless())
    assert reduction_for(AUTO, with_memory(sparse), parameter, world_size).name == "all_gather"


def averaged(
    compressor: Compressor, reduction: str | ByScheme, world_size: int, steps: int = 3
) -> list[list[list[Result]]]:
    """The results of each rank, step and parameter, of two parameters whose sizes differ."""
    parameters = [Parameter("a.weight", (70, 61)), Parameter("b.weight", (5, 3)), Parameter("c.weight", (1, 2))]

    def rank_of(exchange: LoopbackExchange) -> list[list[Result]]:
        rank = exchange.rank
        way = reduction_for(reduction, compressor, parameters[0], world_size)
        states: list[State] = [way.init(compressor, parameter, rank, world_size) for parameter in parameters]
        found = []
        for step in range(steps):
            channel = Channel(exchange, Subject("bucket", "the same on all ranks"), 2 * step)
            channel.open()
            peers = ChannelPeers(channel, partial(opened, exchange, 2 * step + 1), ZEN)
            tasks = [
                Task(compressor, parameter, gradient_of(parameter, rank, step), state)
                for parameter, state in zip(parameters, states, strict=True)
            ]
            found.append(way.run(tasks, peers, Stopwatch()))
        return found

    return [outcome.get() for outcome in run_ranks(world_size, rank_of)]


def opened(exchange: LoopbackExchange, sequence: int, subject: Subject) -> Channel:
    return Channel(exchange, subject, sequence)


def gradient_of(parameter: Parameter, rank: int, step: int) -> Tensor:
    return like_autocast(parameter.numel, 100 * step + rank).view(parameter.shape)


@pytest.mark.parametrize("reduction", ["two_shot", "all_gather"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_means_are_those_of_uncoded_gradients_in_rank_order(reduction: str, world_size: int) -> None:
    of_ranks = averaged(compress.lossless(), reduction, world_size)
    for step, results in enumerate(of_ranks[0]):
        for place, shape in enumerate([(70, 61), (5, 3), (1, 2)]):
            total = torch.zeros(shape)
            for rank in range(world_size):
                total += gradient_of(Parameter("", shape), rank, step)
            total /= world_size
            assert all(same_bits(of_rank[step][place].mean, results[place].mean) for of_rank in of_ranks)
            assert same_bits(results[place].mean, total)


@pytest.mark.parametrize("reduction", ["all_gather", ByScheme("zen")])
def test_stacks_of_selections_are_the_same_with_coded_values(reduction: str) -> None:
    """They travel as one vector of all parameters, as those with plain values do, and no vector has both."""
    plain, coded = (with_memory(compress.top_k(0.1, values=values)) for values in (None, compress.lossless()))
    for one, other in zip(averaged(plain, reduction, 3), averaged(coded, reduction, 3), strict=True):
        for results, others in zip(one, other, strict=True):
            for result, another in zip(results, others, strict=True):
                assert same_bits(result.mean, another.mean)
    plans = [(method, Parameter(str(place), (50,))) for place, method in enumerate([plain, coded, plain, coded])]
    assert [stack.indices for stack in stacked.stacks(plans)] == [(0, 2), (1, 3)]
    assert stacked.predicted_bytes(plans) is None


def test_identity_is_not_mistaken_for_no_code() -> None:
    """Its values are coded apart, by a packing of their own."""
    assert stacked.stack_code(compress.top_k(0.1, values=Identity())) is None


# --- values of rows


def rows_of(rank: int, num_rows: int = 900, width: int = 16, dtype: torch.dtype = torch.float32) -> SparseRows:
    """Rows that ranks share in part, of values as under autocast; another number on each rank."""
    chosen = torch.randperm(num_rows, generator=torch.Generator().manual_seed(rank))[: 250 + 17 * rank]
    ids = chosen.sort().values
    values = like_autocast(ids.numel() * width, rank).view(-1, width)
    return SparseRows(ids, values.to(dtype), num_rows)


def summed(world_size: int, scheme: Any, codes_values: bool, dtype: torch.dtype, tamper: Tamper = untouched) -> Any:
    def rank_of(exchange: LoopbackExchange) -> tuple[SparseRows, int, int]:
        exchange.hosts = [rank // 2 for rank in range(world_size)]
        channel = Channel(exchange, Subject("rows", "the same on all ranks"), 0)
        channel.codes_values = codes_values
        total = synchronize(rows_of(exchange.rank, dtype=dtype), scheme, channel, 1.0 / world_size)
        return total, exchange.traffic.sent_bytes, channel.saved_bytes

    return run_ranks(world_size, rank_of, tamper=tamper)


SCHEMES = (*NAMED.values(), TwoLevel(ZEN))
CASES = [(scheme, 3, torch.float32) for scheme in SCHEMES]
CASES += [(scheme, n, torch.float32) for scheme in (ZEN, COLUMN_SPLIT, SPARCML) for n in (2, 4)]
CASES += [(scheme, 3, dtype) for scheme in (ZEN, UNION_SPLIT) for dtype in DTYPES[1:]]


def case_id(part: Any) -> str:
    return str(part) if isinstance(part, (int, torch.dtype)) else name_of(part)


@pytest.mark.few(12)
@pytest.mark.parametrize(("scheme", "world_size", "dtype"), CASES, ids=case_id)
def test_sums_of_rows_are_the_same_with_coded_values(scheme: Any, world_size: int, dtype: torch.dtype) -> None:
    plain = [outcome.get() for outcome in summed(world_size, scheme, False, dtype)]
    coded = [outcome.get() for outcome in summed(world_size, scheme, True, dtype)]
    assert all(saved == 0 for _, _, saved in plain)
    for (total, sent, _), (other, fewer, saved) in zip(plain, coded, strict=True):
        assert torch.equal(other.ids, total.ids)
        assert same_bits(other.values, total.values)
        if isinstance(scheme, TwoLevel) or not scheme.communication is scheme.pull_by is Communication.POINT_TO_POINT:
            continue  # stages pass on messages of others, whose savings nobody counts
        assert fewer == sent - saved
        assert saved > (0.3 * sent if dtype is torch.float32 else 0)


@pytest.mark.parametrize("format", wire.FORMATS)
@pytest.mark.parametrize("num_rows", [40, 1000, 6000])
def test_a_coded_payload_is_shorter_and_gives_back_every_bit(format: Format, num_rows: int) -> None:
    part = Whole(num_rows)
    positions = torch.arange(0, num_rows, 1 if format is Format.DENSE else 3)
    values = like_autocast(positions.numel() * 12).view(-1, 12)
    plain = wire.encode(format, part, positions, values)
    payload = wire.encode(format, part, positions, values, codes_values=True)
    assert payload.numel() % 8 == 0
    assert payload.numel() == plain.numel() if values.nbytes < wire.MIN_CODED_BYTES else True
    assert payload.numel() <= plain.numel()
    got, decoded = wire.decode(format, part, positions.numel(), payload, 12, torch.float32)
    assert torch.equal(got, positions)
    assert same_bits(decoded, values)
    for end in range(0, payload.numel(), 8):
        with pytest.raises(CorruptMessageError):
            wire.decode(format, part, positions.numel(), payload[:end], 12, torch.float32)


@pytest.mark.parametrize("kind", ["short", "long", "no code", "only ids"])
def test_a_malformed_code_of_values_is_refused(kind: str) -> None:
    """Though its frame is right: by the rank that sent it, say, with other rows."""
    plan = UnionPlan((300, 300), 300, 16, 4, replace(COLUMN_SPLIT, push_format=(Format.COO,)))
    channel = MagicMock(rank=1, world_size=2)
    shares = _Shares(rows_of(1, 300), plan, channel, 1.0)
    lead, size = plan.lead_bytes(0, 0), plan.lead_bytes(0, 0) + 300 * 8 * 4
    content = {"short": lead + 100, "long": size, "no code": size - 8, "only ids": lead}[kind]
    data = torch.full((content,), 255, dtype=torch.uint8)
    if kind == "long":
        assert shares._values(data, lead, 300, 8).shape == (300, 8)  # as they are
    else:
        with pytest.raises(CorruptMessageError):
            shares._values(data, lead, 300, 8)
