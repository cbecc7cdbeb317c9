"""Gradients of a device on their way to the lane and back: in which order, and that no memory is used too early.

The device here is a fake with the hazards of a real one, see tests/common/fake_device.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

from fake_device import FakeDevice
from loopback import LoopbackExchange, run_ranks
from thinwire.comm.channel import Channel, Subject
from thinwire.comm.cuda.staging import DeviceStaging, staging_for
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import Staging
from thinwire.errors import LostPeerError, ThinwireError
from thinwire.gradients.buckets import Buckets, Sums
from thinwire.gradients.compressed import CompressedSync, NamedGradients, Statistics
from thinwire.gradients.exact import GradientSync, Started
from thinwire.gradients.module import check_parameters
from thinwire.gradients.tables import StagedTable, TableGradient, staged
from thinwire.observe.step import ParameterRecords
from thinwire.rows.sparse import SUPPORTED_DTYPES, SparseRows


def small_staging(limit_bytes: int = 1 << 16) -> tuple[FakeDevice, DeviceStaging]:
    device = FakeDevice()
    return device, DeviceStaging(device, first_bytes=1024, limit_bytes=limit_bytes, chunk_bytes=64)


def some_table(num_rows: int, width: int, dtype: torch.dtype, rank: int, density: float = 0.2) -> Tensor:
    source = torch.Generator().manual_seed(rank)
    dense = torch.randn(num_rows, width, generator=source).to(dtype)
    dense[torch.rand(num_rows, generator=source) >= density] = 0
    return dense


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 300])
def test_tensors_come_to_the_host_and_back_whether_they_fit_or_not(num_rows: int, dtype: torch.dtype) -> None:
    device, staging = small_staging()
    tensors = [torch.arange(num_rows), some_table(num_rows, 7, dtype, 0)]
    rounds = []
    for _ in range(3):
        with staging.taking(staging.hand_over(tensors)):
            hosts = staging.to_host(*tensors)
            assert all(map(torch.equal, hosts, tensors))
            assert all(map(torch.equal, staging.to_device(*hosts), tensors))
        rounds.append(staging.stats()["cuda/overflow_rounds"])
    assert (rounds[0] > 0) == (num_rows == 300)
    assert rounds[0] == rounds[1] == rounds[2], "after an overflow the capacity is larger"
    pins = [line for line in device.log if line.startswith("pin")]
    assert staging.stats()["cuda/pinned_bytes"] <= sum(int(line.split()[1]) for line in pins)
    assert all(any(kept is tensor for kept in device.kept) for tensor in tensors)


def test_an_overflow_that_no_growth_ends_is_exact_and_counted() -> None:
    _, staging = small_staging(limit_bytes=1024)
    dense = some_table(1000, 3, torch.float32, 1)
    for step in range(1, 4):
        with staging.taking(staging.hand_over([dense])):
            (host,) = staging.to_host(dense)
            assert torch.equal(host, dense)
        assert staging.stats()["cuda/overflow_rounds"] == 188 * step, "12,000 bytes by 64"
        assert staging.stats()["cuda/pinned_bytes"] == 1024 + 2 * 64


def test_the_device_sees_an_error_of_the_order() -> None:
    """The fake must notice what it is there for."""
    device, staging = small_staging()
    dense = torch.ones(4)
    memory = device.pinned(16).view(torch.float32)
    with device.lane_stream():
        device.copy(memory, dense)
        assert not torch.equal(memory, dense), "nobody has waited"
        device.synchronize(device.record())
        assert torch.equal(memory, dense)
        device.copy(dense, memory)
        memory.zero_()
        with pytest.raises(AssertionError, match="written while"):
            device.synchronize(device.record())
    with pytest.raises(AssertionError, match="training stream"):
        device.copy(memory, dense)
    with pytest.raises(AssertionError, match="nobody waits"):
        device.synchronize(device.record())
    del staging


class FakeLane:
    """Runs a job where it is submitted, as the lane's thread would."""

    def __init__(self, exchange: LoopbackExchange, staging: DeviceStaging) -> None:
        self.exchange = _Staged(exchange, staging)
        self.world_size, self.rank = exchange.world_size, exchange.rank
        self._sequence = 0

    def submit(self, job: Any, begin: Any = None) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(job(self) if begin is None else job(self, begin(self)))
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
        return future

    def channel(self, subject: Subject) -> Channel:
        self._sequence += 1
        return Channel(self.exchange, subject, self._sequence)  # pyrefly: ignore [bad-argument-type]


class _Staged:
    """A loopback exchange that all-reduces as `StagedExchange` does, and notes what it is asked for."""

    def __init__(self, inner: LoopbackExchange, staging: DeviceStaging) -> None:
        self._inner, self._staging = inner, staging

    def __getattr__(self, name: str) -> Any:
        if name in ("swap", "swap_records"):
            self._staging._device.log.append("exchange")  # type: ignore[attr-defined]
        return getattr(self._inner, name)

    def all_reduce(self, tensor: Tensor) -> None:
        def summed(chunk: Tensor) -> None:
            self._staging._device.log.append("exchange")  # type: ignore[attr-defined]
            self._inner.all_reduce(chunk)

        self._staging.all_reduce(tensor, summed, self._inner.world_size)


class FakeBucket:
    def __init__(self, buffer: Tensor, parameters: Sequence[nn.Parameter], sizes: Sequence[int] = ()) -> None:
        self._buffer, self._parameters, self._sizes = buffer, parameters, sizes

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> Sequence[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        parts = self._buffer.split(list(self._sizes))
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)]

    def is_last(self) -> bool:
        return True

    def index(self) -> int:
        return 0


class Lookups:
    def __init__(self, *parameters: nn.Parameter) -> None:
        self.parameters = parameters

    def take(self, parameter: nn.Parameter, bucket: Tensor | None = None) -> Tensor | None:
        return torch.tensor([0])  # wrong on purpose: on a device rows are looked for

    def matrix(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient


def _one_step(exchange: LoopbackExchange, kind: str, scheme: str) -> tuple[Tensor, Tensor, list[str], dict[str, float]]:
    """What DDP gets for a bucket of a table and a dense layer, or of a sparse table, and what should be in it."""
    device, staging = small_staging()
    table, layer = nn.Parameter(torch.zeros(200, 4)), nn.Parameter(torch.zeros(57))
    everyone = [some_table(200, 4, torch.float32, rank) for rank in range(exchange.world_size)]
    layers = [torch.full((57,), float(rank)) for rank in range(exchange.world_size)]
    mine = everyone[exchange.rank]
    mean = torch.stack(everyone).sum(0) * (1 / exchange.world_size)
    gradients = GradientSync(scheme)
    names = {id(table): "table", id(layer): "layer"}
    lane = FakeLane(exchange, staging)
    lookups: Any = Lookups(table)
    buckets = Buckets(Sums(gradients), lookups, names, lane, staging)  # pyrefly: ignore [bad-argument-type]
    if kind == "sparse":
        ids = mine.any(1).nonzero().flatten()
        twice = torch.cat([ids.flip(0), ids])
        values = torch.cat([mine[ids.flip(0)] * 0.25, mine[ids] * 0.75])
        bucket = FakeBucket(torch.sparse_coo_tensor(twice[None], values, (200, 4), check_invariants=False), [table])
        expected = mean
    else:
        buffer = torch.cat([mine.flatten(), layers[exchange.rank]])
        bucket = FakeBucket(buffer, [table, layer], [800, 57])
        expected = torch.cat([mean.flatten(), torch.stack(layers).mean(0)])
    result = buckets.add(bucket).wait()  # type: ignore[arg-type]
    got = result.to_dense() if result.is_sparse else result
    return got, expected, device.log, staging.stats()


# --- the order of things


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("scheme", ["zen", "dense", "agsparse"])
def test_a_step_is_the_mean_and_happens_in_order(kind: str, scheme: str) -> None:
    for outcome in run_ranks(3, lambda exchange: _one_step(exchange, kind, scheme)):
        got, expected, log, stats = outcome.get()
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
        assert log[0] == "record on training", "what DDP wrote is marked first"
        lane = log.index("wait for training")
        assert lane < log.index("keep") < log.index("download") < log.index("upload")
        assert log.index("download") < log.index("synchronize") < len(log) - 1 - log[::-1].index("exchange")
        last_upload = len(log) - 1 - log[::-1].index("upload")
        assert last_upload < log.index("future done on lane"), "the future's event is behind the copies"
        assert log.count("record on training") == 1
        assert stats["cuda/pinned_bytes"] > 0


def _failing(exchange: LoopbackExchange) -> str:
    device, staging = small_staging()
    table = nn.Parameter(torch.zeros(200, 4))
    lane = FakeLane(exchange, staging)
    lookups: Any = Lookups(table)
    buckets = Buckets(Sums(GradientSync("zen")), lookups, {id(table): "t"}, lane, staging)  # pyrefly: ignore [bad-argument-type]

    def no_memory(num_bytes: int) -> Tensor:
        raise RuntimeError(f"cannot pin {num_bytes} bytes")

    device.pinned = no_memory  # type: ignore[method-assign]
    staging._arena._allocate = no_memory
    waiting: list[Future[Tensor]] = []
    make_future = staging.future

    def future() -> Future[Tensor]:
        waiting.append(make_future())
        return waiting[-1]

    staging.future = future  # type: ignore[method-assign]
    buckets.add(FakeBucket(torch.ones(800), [table], [800]))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="cannot pin"):
        waiting[0].wait()
    return "told"


def test_where_no_memory_can_be_pinned_ddp_is_told() -> None:
    """The future must not be left open: DDP waits for it."""
    assert [outcome.get() for outcome in run_ranks(1, _failing)] == ["told"]


def _failing_strangely(exchange: LoopbackExchange) -> str:
    class Local(Exception):
        """Cannot be pickled, as classes in functions and objects with locks cannot."""

    class Broken(GradientSync):
        def tables(self, lane: Any, tables: Any) -> list[Tensor]:
            raise Local("no way")

    _, staging = small_staging()
    table = nn.Parameter(torch.zeros(200, 4))
    lookups, lane = cast(Any, Lookups(table)), cast(Any, FakeLane(exchange, staging))
    pending = Buckets(Sums(Broken("zen")), lookups, {id(table): "t"}, lane, staging).add(
        cast(Any, FakeBucket(torch.ones(800), [table], [800]))
    )
    assert isinstance(pending, Future)
    assert pending.done(), "DDP would wait for ever"
    with pytest.raises(ThinwireError, match="Local: no way"):
        pending.wait()
    return "told"


def test_an_error_that_cannot_be_pickled_reaches_ddp() -> None:
    assert [outcome.get() for outcome in run_ranks(1, _failing_strangely)] == ["told"]


def _beside_native(exchange: LoopbackExchange) -> list[str]:
    device, staging = small_staging()
    table, layer = nn.Parameter(torch.zeros(200, 4)), nn.Parameter(torch.zeros(57))
    work = cast(Any, SimpleNamespace(wait=lambda: device.log.append(f"{device.current} waits for native")))
    native = cast(
        Any, SimpleNamespace(start=lambda dense: tuple(Started(work, LostPeerError) for _ in dense), is_own=True)
    )
    names = {id(table): "table", id(layer): "layer"}
    lane, lookups = cast(Any, FakeLane(exchange, staging)), cast(Any, Lookups(table))
    buckets = Buckets(Sums(GradientSync("zen"), native), lookups, names, lane, staging)
    buckets.add(cast(Any, FakeBucket(torch.ones(857), [table, layer], [800, 57]))).wait()
    return device.log


def test_the_stream_of_the_lane_does_not_wait_for_a_native_all_reduce() -> None:
    """It copies the next bucket to the host, for which the lane's thread waits. The future waits for both."""
    for outcome in run_ranks(2, _beside_native):
        log = outcome.get()
        assert "lane waits for native" not in log
        upload = len(log) - 1 - log[::-1].index("upload")
        assert upload < log.index("completion waits for native") < log.index("future done on completion")


def test_what_came_from_the_device_in_this_job_goes_back_from_where_it_is() -> None:
    device, staging = small_staging()
    gradient = torch.arange(50.0)
    for _ in range(3):
        with staging.taking(staging.hand_over([gradient])):
            hosts = [host.mul_(2) for host in staging.to_host(gradient, gradient[:7])]
            back = staging.to_device(*hosts, torch.ones(3))
            assert [tensor.tolist() for tensor in back] == [host.tolist() for host in (*hosts, torch.ones(3))]
        assert device.uploaded_from[-3:-1] == [host.data_ptr() for host in hosts]
        assert device.uploaded_from[-1] not in device.uploaded_from[-3:-1]


def test_the_host_waits_before_it_writes_where_an_earlier_job_may_be_read() -> None:
    """Also in a job that only writes. The fake raises where memory was written while the device copied from it."""
    device, staging = small_staging()
    for number in range(3):
        before = len(device.log)
        with staging.taking(staging.hand_over([])):
            staging.to_device(torch.full((9,), float(number)), torch.ones(2))
        assert [line for line in device.log[before:] if line in ("synchronize", "upload")] == [
            "synchronize",
            "upload",
            "upload",
        ]


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 16, 17, 1000])
def test_an_all_reduce_in_chunks_is_one_all_reduce(size: int, dtype: torch.dtype) -> None:
    """The same sums and, as a ring sends, the same bytes; while a chunk is summed the next is on its way."""

    def summed(exchange: LoopbackExchange) -> tuple[Tensor, int, Tensor, int, list[str]]:
        device, staging = small_staging()
        mine = (torch.randn(size, generator=torch.Generator().manual_seed(exchange.rank)) * 10).to(dtype)
        whole = mine.clone()
        exchange.all_reduce(whole)
        of_whole = exchange.traffic.sent_bytes
        _Staged(exchange, staging)
        with staging.taking(staging.hand_over([mine])):
            _Staged(exchange, staging).all_reduce(mine)
        return mine, exchange.traffic.sent_bytes - of_whole, whole, of_whole, device.log

    for outcome in run_ranks(3, summed):
        mine, sent, whole, of_whole, log = outcome.get()
        assert torch.equal(mine, whole)
        assert sent == of_whole
        steps = [line for line in log if line in ("download", "exchange", "upload")]
        if size == 1000:
            assert steps[:6] == ["download", "download", "exchange", "upload", "download", "exchange"]
        assert steps.count("download") == steps.count("upload") == steps.count("exchange")


# --- who gets which staging


def test_a_table_of_the_cpu_is_left_as_it_is() -> None:
    table = TableGradient("t", torch.ones(2, 2))
    assert staged(table, Staging()) is table
    assert isinstance(staged(table, small_staging()[1]), StagedTable)
    with Staging().taking(Staging().hand_over([table.gradient])):
        assert Staging().to_host(table.gradient)[0] is table.gradient
        assert Staging().to_device(table.gradient)[0] is table.gradient


def test_rows_of_a_staged_table_are_those_of_the_plain_one() -> None:
    for gradient in (some_table(90, 5, torch.float32, 4), some_table(90, 5, torch.float32, 4).to_sparse(1)):
        _, staging = small_staging()
        with staging.taking(staging.hand_over([gradient])):
            rows = staged(TableGradient("t", gradient), staging).rows()
            plain = TableGradient("t", gradient).rows()
            assert isinstance(rows, SparseRows)
            assert torch.equal(rows.ids, plain.ids)
            assert torch.equal(rows.values, plain.values)


def test_devices_that_are_not_supported_are_named() -> None:
    with pytest.raises(ValueError, match=r"meta: .* CPU and CUDA"):
        staging_for(torch.device("meta"))
    with pytest.raises(ValueError, match=r"1.weight.*is on meta, others are on cpu"):
        check_parameters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def test_the_lane_stream_is_left_again() -> None:
    device, staging = small_staging()

    def failing() -> None:
        with staging.taking(staging.hand_over([])):
            assert device.current == "lane"
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert device.current == "training"


class Tripled(CompressedSync):
    """A compressor that triples what it is given, of which it may be given no more than it asked for."""

    def takes(self, name: str) -> bool:
        return name == "layer"

    def _synchronize(self, lane: Lane, gradients: NamedGradients, others: Sequence[Tensor], coded: object) -> bool:
        assert coded is None
        assert [name for name, _ in gradients] == ["layer"]
        for tensor in (*(gradient for _, gradient in gradients), *others):
            tensor.mul_(3)
        return True


def _compressed(exchange: LoopbackExchange) -> tuple[Tensor, list[str]]:
    device, staging = small_staging()
    layer, bias = nn.Parameter(torch.zeros(30, 20)), nn.Parameter(torch.zeros(7))
    lookups: Any = Lookups()
    lane: Any = FakeLane(exchange, staging)
    compressed = Tripled({}, lane, Statistics(ParameterRecords(), 1), staging=staging)
    names = {id(layer): "layer", id(bias): "bias"}
    buckets = Buckets(Sums(GradientSync("zen"), compressed=compressed), lookups, names, lane, staging)
    bucket: Any = FakeBucket(torch.arange(607.0), [layer, bias], [600, 7])
    return buckets.add(bucket).wait(), device.log


def test_compressed_gradients_go_to_the_host_and_come_back() -> None:
    for outcome in run_ranks(1, _compressed):
        result, log = outcome.get()
        assert torch.equal(result, torch.arange(607.0) * 3)
        assert log.index("download") < log.index("upload") < log.index("future done on lane")
