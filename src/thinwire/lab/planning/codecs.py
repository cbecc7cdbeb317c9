"""Measure what compressors cost on this device: curves of encoding and decoding over the size of a gradient.

The code that is timed is that of a real exchange; only the network is left out: what a rank sends comes back to it as
if every other rank had sent the same. All ranks measure at the same time, so that processors shared in training are
shared here as well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.agree import gather_numbers
from thinwire.comm.lane import Lane
from thinwire.compress.assign import with_memory
from thinwire.compress.base import Compressor, Parameter
from thinwire.compress.methods.sparsify import Sparsifier
from thinwire.compress.named import parse
from thinwire.compress.reduction.base import Phase, Stopwatch, Task
from thinwire.compress.reduction.choose import REDUCTIONS, reduction_for
from thinwire.compress.wrappers import code_of
from thinwire.lab.planning.link import wait_for_all
from thinwire.lab.planning.speeds import COPIES, Codec, Fit

T = TypeVar("T")
Point = tuple[float, float]
"""A measured point: bytes and seconds."""

SHAPES = ((32, 64), (128, 128), (256, 512), (512, 1024))
"""Shapes of the gradients that are timed: 8 kB to 2 MB."""

_RUNS = 5
_CPU = torch.device("cpu")


def measure_codec(lane: Lane, text: str, exchange: str, device: torch.device = _CPU) -> Codec:
    """Measure encoding and decoding of one compressor in a job of the lane, which all ranks submit.

    Args:
        text: text of `thinwire.compress.named.parse`, or `COPIES`.
        exchange: one that the compressor allows, see `exchanges_of`.
        device: the device of the gradients. They are compressed on the host, so copies there and back count.

    Raises:
        ValueError: an unknown compressor, or an exchange that it does not allow.
    """
    if text == COPIES:
        return _measure_copies(lane, device)
    compressor = with_memory(parse(text))
    points = [_coding_seconds(lane, compressor, exchange, shape, device) for shape in SHAPES]
    encode, decode = zip(*points, strict=True)
    return Codec(text, exchange, _fit(encode), _fit(decode))


def exchanges_of(text: str) -> tuple[str, ...]:
    """Return the exchanges by which a planner may average a compressor's payloads.

    Payloads that can be summed are summed. "two_shot" would select again among the elements that the ranks of a
    sparsifier selected, so it is left to those who ask for it.

    Raises:
        ValueError: an unknown compressor, or one whose bytes depend on the gradients, so that no plan can predict it.
    """
    compressor, parameter = with_memory(parse(text)), Parameter("example.weight", SHAPES[0])
    found: list[str] = []
    for name in REDUCTIONS:
        if found == ["all_reduce"] or (name == "two_shot" and isinstance(code_of(compressor), Sparsifier)):
            continue
        try:
            reduction = reduction_for(name, compressor, parameter, world_size=2)
        except ValueError:
            continue
        if reduction.sent_bytes([(compressor, parameter)], 0, 2) is not None:
            found.append(name)
    if not found:
        raise ValueError(
            f"{text}: how many bytes it sends depends on the gradients or the step, so nobody can tell beforehand what"
            " it takes: plan with a compressor of fixed size, such as top_k, ef_sign_sgd or power_sgd"
        )
    return tuple(found)


def _coding_seconds(
    lane: Lane, compressor: Compressor, exchange: str, shape: tuple[int, ...], device: torch.device
) -> list[Point]:
    """Return two points, of encoding and of decoding."""
    parameter = Parameter("measured.weight", shape)
    way = reduction_for(exchange, compressor, parameter, lane.world_size)
    state = way.init(compressor, parameter, lane.rank, lane.world_size)
    gradient = torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(lane.rank)).to(device)
    peers = EchoPeers(lane.rank, lane.world_size)

    def run() -> tuple[float, float]:
        stopwatch = Stopwatch()
        started = time.perf_counter()
        (result,) = way.run([Task(compressor, parameter, gradient.cpu(), state)], peers, stopwatch)
        averaged = time.perf_counter()
        gradient.clone().copy_(result.mean)
        settle(device)
        decode = stopwatch.seconds[Phase.DECOMPRESS]
        return averaged - started - decode, decode + time.perf_counter() - averaged

    return [(4.0 * parameter.numel, seconds) for seconds in _typical(lane, run)]


def _typical(lane: Lane, run: Callable[[], tuple[float, float]]) -> list[float]:
    """Return the median over ranks of the median of runs, which all ranks begin together after one warm-up run."""
    run()
    wait_for_all(lane.exchange)
    runs = [run() for _ in range(_RUNS)]
    mine = [statistics.median(values) for values in zip(*runs, strict=True)]
    return [statistics.median(values) for values in zip(*gather_numbers(lane.exchange, "seconds", mine), strict=True)]


def _measure_copies(lane: Lane, device: torch.device) -> Codec:
    """Measure the copies around an all-reduce: gradients into one tensor that is scaled, and back."""
    points = [_copying_seconds(lane, shape, device) for shape in SHAPES]
    into, back = zip(*points, strict=True)
    return Codec(COPIES, "all_reduce", _fit(into), _fit(back))


def _copying_seconds(lane: Lane, shape: tuple[int, ...], device: torch.device) -> list[Point]:
    parts = [torch.ones(shape, dtype=torch.float32, device=device) for _ in range(2)]

    def run() -> tuple[float, float]:
        started = time.perf_counter()
        flat = torch.cat([part.view(-1) for part in parts]).mul_(1.0)
        settle(device)
        copied = time.perf_counter()
        for part, mean in zip(parts, flat.split(flat.numel() // 2), strict=True):
            part.view(-1).copy_(mean)
        settle(device)
        return copied - started, time.perf_counter() - copied

    return [(4.0 * sum(part.numel() for part in parts), seconds) for seconds in _typical(lane, run)]


def settle(device: torch.device) -> None:
    """Wait until a GPU has finished the work queued on it; return at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fit(points: Sequence[Point]) -> Fit:
    return Fit.of([(size, max(seconds, 1e-7)) for size, seconds in points])  # 0 s has no relative error


class EchoPeers:
    """An implementation of `thinwire.compress.reduction.base.Peers` without a network, which echoes messages.

    Messages are verified as those of a network are.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.hosts: Sequence[Sequence[int]] = [[other] for other in range(world_size)]

    def among(self, ranks: Sequence[int]) -> EchoPeers:
        return EchoPeers(list(ranks).index(self.rank), len(ranks))

    def attempt(self, prepare: Callable[[], T]) -> T:
        return prepare()

    def all_reduce(self, tensor: Tensor) -> None:
        """Do nothing: the copies inside an all-reduce belong to the link's curve."""

    def all_gather(self, prepare: Callable[[], Tensor], max_bytes: int) -> Sequence[EchoedMessage]:
        del max_bytes
        return [EchoedMessage(_sealed(prepare()))] * self.world_size

    def all_to_all(self, prepare: Callable[[], Sequence[Tensor]], max_bytes: int) -> Sequence[EchoedMessage]:
        del max_bytes
        messages = [_sealed(message) for message in prepare()]
        return [EchoedMessage(messages[self.rank])] * self.world_size

    def sparse_sum(self, prepare: Callable[[], tuple[Tensor, Tensor]], numel: int, scale: float) -> NoReturn:
        raise ValueError("schemes are not planned with: what they send depends on which elements ranks choose")


class EchoedMessage:
    """A message of an `EchoPeers`; see `thinwire.compress.reduction.base.Arrived`."""

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def read(self, parse: Callable[[Tensor], T]) -> T:
        return parse(_sealed(self._data))


def _sealed(message: Tensor) -> Tensor:
    kernels.checksum(message)
    return message
