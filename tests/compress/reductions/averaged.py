"""Gradients of ranks, averaged by each exchange."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import thinwire.compress
from loopback import LoopbackExchange
from thinwire.comm.channel import Channel, Subject
from thinwire.compress.base import Compressor, Identity, Parameter, State
from thinwire.compress.memory import ErrorFeedback, MomentumCorrection, with_memory
from thinwire.compress.methods.select import top_k
from thinwire.compress.reductions.base import Phase, Result, Stopwatch, Task
from thinwire.compress.reductions.by_scheme import ByScheme
from thinwire.compress.reductions.choose import reduction_for
from thinwire.compress.state import outstanding
from thinwire.gradients.compressed import ChannelPeers
from thinwire.sums.named import ZEN

MATRICES = (Parameter("a.weight", (33, 17)), Parameter("b.weight", (5, 3)), Parameter("c.weight", (1, 1)))
SCHEME = ByScheme("zen")
NO_CONSTRUCTORS = {"ef21", "redistribute", "warm_up", "leave_small", "error_feedback", "momentum_correction"}


NO_CONSTRUCTORS |= {"ok_topk", "hi_top_k"}  # exchanges of their own, with tests of their own


SETTINGS: dict[str, dict[str, object]] = {
    "threshold": {"value": 1.5},
    "power_sgd": {"rank": 1},
    "acp_sgd": {"rank": 1},
    "atomo": {"rank": 1},
}


def all_compressors() -> dict[str, Compressor]:
    """Every constructor that `thinwire.compress` exports, as `thinwire.attach` would use it, and some wrappers."""
    found: dict[str, Compressor] = {"identity": Identity(), "error_feedback(identity)": ErrorFeedback(Identity())}
    for name in sorted(set(thinwire.compress.__all__) - NO_CONSTRUCTORS):
        constructor = getattr(thinwire.compress, name)
        if not name.islower():
            continue
        settings = dict(SETTINGS.get(name, {}))
        if "density" in inspect.signature(constructor).parameters:
            settings["density"] = 0.1
        found[name] = with_memory(constructor(**settings))
    found["top_k, bf16"] = with_memory(top_k(0.1, values=thinwire.compress.bf16()))
    found["top_k, lossless"] = with_memory(top_k(0.1, values=thinwire.compress.lossless()))
    found["random_k, lossless bf16"] = with_memory(
        thinwire.compress.random_k(0.1, values=thinwire.compress.lossless(thinwire.compress.bf16()))
    )
    for index, values in (("huffman", "polynomial"), ("bloom:p0", "lossless"), ("bloom:p2", thinwire.compress.qsgd(4))):
        code = thinwire.compress.deep_reduce(top_k(0.1), index, values)
        found[f"deep_reduce, {index}"] = with_memory(code)
    found["warm_up(deep_reduce)"] = thinwire.compress.warm_up(found["deep_reduce, huffman"], 2)
    factors = thinwire.compress.power_sgd(0.3, values=thinwire.compress.mxfp4(), min_compression_rate=1.0)
    found["power_sgd, mxfp4"] = with_memory(factors)
    found["momentum(top_k)"] = MomentumCorrection(top_k(0.1), 0.5)
    found["warm_up(top_k)"] = with_memory(thinwire.compress.warm_up(top_k(0.1), 2))
    return found


COMPRESSORS = all_compressors()


def gradient_of(parameter: Parameter, rank: int, step: int) -> Tensor:
    seed = 1000 * rank + 10 * step + len(parameter.shape) + parameter.numel
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=parameter.working_dtype)


@dataclass
class Steps:
    """What one rank saw: for each step its results, and the states after the last."""

    results: list[list[Result]] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    predicted_bytes: int | None = None
    seconds: dict[Phase, float] = field(default_factory=dict)


def peers_of(network: LoopbackExchange, sequence: int) -> ChannelPeers:
    channel = Channel(network, Subject("bucket", "the same on all ranks"), sequence)
    channel.open()
    return ChannelPeers(channel, lambda subject: Channel(network, subject, sequence + 1), ZEN)


def train(
    network: LoopbackExchange,
    compressor: Compressor,
    exchange_name: str,
    parameters: Sequence[Parameter],
    num_steps: int = 2,
    gradient: Callable[[Parameter, int, int], Tensor] = gradient_of,
) -> Steps:
    """Some steps of one bucket with parameters that all have the same compressor."""
    rank, world_size = network.rank, network.world_size
    exchange = reduction_for(exchange_name, compressor, parameters[0], world_size)
    stopwatch, seen = Stopwatch(), Steps()
    seen.states = [exchange.init(compressor, parameter, rank, world_size) for parameter in parameters]
    for step in range(num_steps):
        peers = peers_of(network, 10 * step)
        before = network.traffic.sent_bytes
        tasks = [
            Task(compressor, parameter, gradient(parameter, rank, step), state)
            for parameter, state in zip(parameters, seen.states, strict=True)
        ]
        untouched_gradients = [task.gradient.clone() for task in tasks]
        seen.results.append(exchange.run(tasks, peers, stopwatch))
        seen.sent_bytes.append(network.traffic.sent_bytes - before)
        for task, gradient_before in zip(tasks, untouched_gradients, strict=True):
            assert torch.equal(task.gradient, gradient_before), "a gradient is not written to"
    seen.predicted_bytes = exchange.sent_bytes([(compressor, parameter) for parameter in parameters], rank, world_size)
    seen.seconds = stopwatch.seconds
    return seen


def mean_memory(states: Sequence[State], parameter: Parameter) -> Tensor:
    """What will be added to coming gradients, as a mean over the ranks."""
    kept = [outstanding(state, rank, len(states)) for rank, state in enumerate(states)]
    return torch.stack([memory.view(parameter.shape) for memory in kept if memory is not None]).mean(0)
