"""Measure what compressors cost on this device: curves of encoding and decoding over the size of a gradient; and what
the lossless code of floats achieves on the gradients of a training.

The code that is timed is that of a real exchange; only the network is left out: what a rank sends comes back to it as
if every other rank had sent the same. All ranks measure at the same time, so that processors shared in training are
shared here as well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.agree import gather_numbers
from thinwire.comm.lane import Lane
from thinwire.compress.base import Compressor, Parameter
from thinwire.compress.memory import with_memory
from thinwire.compress.methods.sparsify import Sparsifier
from thinwire.compress.named import parse
from thinwire.compress.reductions.base import Phase, Stopwatch, Task
from thinwire.compress.reductions.choose import REDUCTIONS, reduction_for
from thinwire.compress.wrappers import code_of
from thinwire.lab.planning.link import wait_for_all
from thinwire.lab.planning.speeds import COPIES, Codec, DenseCode, Fit
from thinwire.rows import floats
from thinwire.tune.lossless import Code

T = TypeVar("T")
Point = tuple[float, float]
"""A measured point: bytes and seconds."""

SHAPES = ((32, 64), (128, 128), (256, 512), (512, 1024))
"""Shapes of the gradients that are timed: 8 kB to 2 MB."""

CODED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that have a lossless code."""

SAMPLES, SAMPLED_VALUES = 128, 4096
"""Runs of values that are coded to see what the code of gradients achieves, and values of each: 2 MB of float32. The
bits of a value differ between layers: with 16 runs of eight times as many they were off by up to 2.5 %. Runs of
different layers have different exponents: four of them in one code were 4 % too many on the job `bert`."""

_RUNS = 5
_ROUNDS, _SECONDS, _LEAST_CORES = 3, 0.1, 0.01
_FASTEST_BYTE_SECONDS = 1e-12
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
        points = [_copying_seconds(lane, shape, device) for shape in SHAPES]
    else:
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
    exchanges: list[str] = []
    for name in REDUCTIONS:
        if exchanges == ["all_reduce"] or (name == "two_shot" and isinstance(code_of(compressor), Sparsifier)):
            continue
        try:
            reduction = reduction_for(name, compressor, parameter, world_size=2)
        except ValueError:
            continue
        if reduction.sent_bytes([(compressor, parameter)], 0, 2) is not None:
            exchanges.append(name)
    if not exchanges:
        raise ValueError(
            f"{text}: how many bytes it sends depends on the gradients or the step, so nobody can tell beforehand what"
            " it takes: plan with a compressor of fixed size, such as top_k, ef_sign_sgd or power_sgd"
        )
    return tuple(exchanges)


def _coding_seconds(
    lane: Lane, compressor: Compressor, exchange: str, shape: tuple[int, ...], device: torch.device
) -> list[Point]:
    """Return two points, of encoding and of decoding."""
    parameter = Parameter("measured.weight", shape)
    reduction = reduction_for(exchange, compressor, parameter, lane.world_size)
    state = reduction.init(compressor, parameter, lane.rank, lane.world_size)
    gradient = torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(lane.rank)).to(device)
    peers = EchoPeers(lane.rank, lane.world_size)

    def run() -> tuple[float, float]:
        stopwatch = Stopwatch()
        started = time.perf_counter()
        (result,) = reduction.run([Task(compressor, parameter, gradient.cpu(), state)], peers, stopwatch)
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


def _copying_seconds(lane: Lane, shape: tuple[int, ...], device: torch.device) -> list[Point]:
    """Return sizes and seconds of the copies around an all-reduce: into one tensor that is scaled, and back."""
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
    """An implementation of `thinwire.compress.reductions.base.Peers` without a network, which echoes messages.

    Messages are verified as a network's are.
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
        return [EchoedMessage(_sealed(prepare()))] * self.world_size

    def all_to_all(self, prepare: Callable[[], Sequence[Tensor]], max_bytes: int) -> Sequence[EchoedMessage]:
        messages = [_sealed(message) for message in prepare()]
        return [EchoedMessage(messages[self.rank])] * self.world_size

    def sparse_sum(self, prepare: Callable[[], tuple[Tensor, Tensor]], numel: int, scale: float) -> NoReturn:
        raise ValueError("schemes are not planned with: what they send depends on which elements ranks choose")


class EchoedMessage:
    """A message of an `EchoPeers`; see `thinwire.compress.reductions.base.Arrived`."""

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def read(self, parse: Callable[[Tensor], T]) -> T:
        return parse(_sealed(self._data))


def _sealed(message: Tensor) -> Tensor:
    kernels.checksum(message)
    return message


class GradientSample:
    """Runs of a model's gradients, spread evenly over them; all ranks take the same positions.

    Args:
        trained: parameters by name, in the order of registration.
        left_out: names of those whose gradients are not dense: tables.

    Attributes:
        values: what was taken, one flat tensor for each dtype.
        taken: number of gradients that were taken; of one parameter the last one counts.
    """

    def __init__(self, trained: dict[str, Tensor], left_out: Collection[str] = ()) -> None:
        self.values: dict[torch.dtype, Tensor] = {}
        self.taken = 0
        self._slices: dict[str, tuple[torch.dtype, list[tuple[int, int, int]]]] = {}
        for dtype in CODED:
            names = [name for name in reversed(trained) if name not in left_out and trained[name].dtype == dtype]
            sizes = [trained[name].numel() for name in names]
            spans = list(_spans(sum(sizes)))
            self.values[dtype] = torch.zeros(sum(end - start for start, end in spans), dtype=dtype)
            self._note_slices(dtype, names, sizes, spans)

    def _note_slices(
        self, dtype: torch.dtype, names: Sequence[str], sizes: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> None:
        """Note which values of each gradient are taken: from, to, and where to."""
        begin = 0
        for name, size in zip(names, sizes, strict=True):
            offset, exchanges = 0, []
            for start, end in spans:
                first, last = max(start, begin), min(end, begin + size)
                if first < last:
                    exchanges.append((first - begin, last - begin, offset + first - start))
                offset += end - start
            if exchanges:
                self._slices[name] = dtype, exchanges
            begin += size

    def take(self, name: str, gradient: Tensor | None) -> None:
        """Take the values of a gradient; one that is not sampled, sparse, missing, or of another dtype gives none."""
        dtype, slices = self._slices.get(name, (None, []))
        if gradient is None or gradient.dtype != dtype or gradient.layout != torch.strided:
            return
        self.taken += 1
        flat = gradient.detach().reshape(-1)
        for start, end, target in slices:
            self.values[gradient.dtype][target : target + end - start].copy_(flat[start:end])


def _spans(total: int) -> Iterator[tuple[int, int]]:
    """Yield the values that are taken of so many: runs at equal distances, or all of them."""
    if total <= SAMPLES * SAMPLED_VALUES:
        yield 0, total
        return
    for number in range(SAMPLES):
        start = number * (total - SAMPLED_VALUES) // (SAMPLES - 1)
        yield start, start + SAMPLED_VALUES


def measure_codes(lane: Lane, sample: GradientSample) -> tuple[DenseCode, ...]:
    """Code the sample and the sum of all ranks' samples, in a job of the lane that all ranks submit.

    Returns:
        a code for each dtype; none for a dtype of which some rank took no gradients.
    """
    taken = min(gather_numbers(lane.exchange, "gradients taken", [sample.taken]))[0]
    if not taken:
        return ()
    return tuple(_measured(lane, values) for values in sample.values.values() if values.numel())


def _measured(lane: Lane, values: Tensor) -> DenseCode:
    world_size = lane.world_size
    sums = values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
    lane.exchange.all_reduce(sums)
    sums = sums if sums.dtype == values.dtype else (sums / world_size).to(values.dtype)
    pushed, pulled = pieces_of(values, world_size), pieces_of(sums, world_size)
    wait_for_all(lane.exchange)
    seconds, cores = _coding(pushed, pulled)
    byte_seconds = [max(_FASTEST_BYTE_SECONDS, each / values.nbytes) for each in seconds]
    mine = [mean_bits(pushed), mean_bits(pulled), *byte_seconds, cores]
    push, pull, *rest = zip(*gather_numbers(lane.exchange, "codes", mine), strict=True)
    *times, typical_cores = map(statistics.median, rest)
    code = Code(statistics.fmean(push), statistics.fmean(pull), *times, value_bits=8 * values.element_size())
    return DenseCode(values.dtype, code, typical_cores)


def pieces_of(values: Tensor, world_size: int) -> tuple[Tensor, ...]:
    """Return flat values in the pieces in which they are coded: runs, or a rank's share where that is smaller."""
    return values.split(max(1, min(SAMPLED_VALUES, -(-values.numel() // world_size))))


def mean_bits(pieces: Sequence[Tensor]) -> float:
    """Return the bits of a value that the codes of these pieces have."""
    values = sum(piece.numel() for piece in pieces)
    return 8 * sum(floats.encode(piece).numel() for piece in pieces) / max(1, values)


def _coding(pushed: Sequence[Tensor], pulled: Sequence[Tensor]) -> tuple[list[float], float]:
    """Return the processor seconds of encoding and decoding gradients, then sums; and the cores for them.

    One thread encodes for `_SECONDS` and another decodes, as in a sum. Of each kind of work the fastest round counts.
    """
    codes, sum_codes = [floats.encode(piece) for piece in pushed], [floats.encode(piece) for piece in pulled]
    out = [torch.empty_like(piece) for piece in pushed]
    total = [torch.zeros_like(piece, dtype=torch.promote_types(piece.dtype, torch.float32)) for piece in pushed]

    def encode(pieces: Sequence[Tensor]) -> None:
        for piece in pieces:
            floats.encode(piece)

    def decode(messages: Sequence[Tensor], adds: bool = False) -> None:
        for message, piece, into in zip(messages, out, total, strict=True):
            floats.decode(message, piece)
            if adds:
                into.add_(piece)

    began = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(_timed, began + _SECONDS, partial(encode, pushed), partial(encode, pulled))
        decoding = _timed(began + _SECONDS, partial(decode, codes, adds=True), partial(decode, sum_codes))
        (push, pull, encoded), (added, stored, decoded) = encoding.result(), decoding
    cores = (encoded + decoded) / (time.perf_counter() - began)
    return [push, added, pull, stored], max(_LEAST_CORES, cores)


def _timed(until: float, *work: Callable[[], object]) -> tuple[float, ...]:
    """Return the processor seconds of the fastest run of each, and of all runs, in turns until it is time."""
    rounds: list[list[float]] = []
    began = time.thread_time()
    while len(rounds) < _ROUNDS or time.perf_counter() < until:
        moments = [time.thread_time()]
        for each in work:
            each()
            moments.append(time.thread_time())
        rounds.append([end - start for start, end in pairwise(moments)])
    return (*(min(column) for column in zip(*rounds, strict=True)), time.thread_time() - began)
