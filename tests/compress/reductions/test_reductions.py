"""Exchanges of compressed gradients, on ranks that are threads: every compressor by every exchange that it allows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import thinwire.compress
from clocks import FakeClock
from loopback import LoopbackExchange, run_ranks
from thinwire.comm.channel import Channel, Subject
from thinwire.compress import packing
from thinwire.compress.base import Compressor, Identity, Memory, Parameter, Payload, State, check_parameter
from thinwire.compress.memory import ErrorFeedback, MomentumCorrection, with_memory
from thinwire.compress.methods.select import TopK, top_k
from thinwire.compress.reductions import base as exchange_module
from thinwire.compress.reductions.base import Phase, Result, Stopwatch, Task
from thinwire.compress.reductions.by_scheme import ByScheme
from thinwire.compress.reductions.choose import AUTO, REDUCTIONS, reduction_for, scattered
from thinwire.compress.state import check_fits, copied, outstanding, redistribute
from thinwire.compress.wrappers import code_of
from thinwire.errors import CorruptMessageError, LostPeerError, PeerError, ThinwireError
from thinwire.gradients.compressed import ChannelPeers
from thinwire.rows.formats import Header
from thinwire.sums.named import ZEN

MATRICES = (Parameter("a.weight", (33, 17)), Parameter("b.weight", (5, 3)), Parameter("c.weight", (1, 1)))
SCHEME = ByScheme("zen")
ALL_REDUCTIONS = (*REDUCTIONS, SCHEME)
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


def is_possible(name: str, compressor: Compressor) -> bool:
    try:
        for parameter in fitting(compressor):
            reduction_for(name, compressor, parameter, 2)
    except ValueError:
        return False
    return bool(fitting(compressor))


def fitting(compressor: Compressor, dtype: torch.dtype = torch.float32) -> tuple[Parameter, ...]:
    """The parameters that a compressor takes."""
    found = []
    for parameter in MATRICES:
        try:
            check_parameter(compressor, parameter)
        except ValueError:
            continue
        found.append(replace(parameter, dtype=dtype))
    return tuple(found)


CASES = [
    (name, exchange) for name in COMPRESSORS for exchange in ALL_REDUCTIONS if is_possible(exchange, COMPRESSORS[name])
]


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


def has_fixed_size(compressor: Compressor, parameters: Sequence[Parameter]) -> bool:
    return all(code_of(compressor).packed_bytes(parameter) is not None for parameter in parameters)


def check(name: str, exchange: str, world_size: int) -> None:
    compressor = COMPRESSORS[name]
    parameters = fitting(compressor)
    outcomes = run_ranks(world_size, lambda network: train(network, compressor, exchange, parameters))
    ranks = [outcome.get() for outcome in outcomes]
    for step, results in enumerate(ranks[0].results):
        for place, result in enumerate(results):
            assert result.mean.shape == parameters[place].shape
            assert result.mean.dtype == torch.float32
            assert bool(torch.isfinite(result.mean).all())
            assert all(torch.equal(result.mean, other.results[step][place].mean) for other in ranks)
            assert 0.0 <= result.density <= 1.0
    for rank in ranks:
        assert rank.predicted_bytes is not None or not has_fixed_size(compressor, parameters) or exchange == SCHEME
        if rank.predicted_bytes is not None:
            assert rank.sent_bytes == [rank.predicted_bytes] * len(rank.sent_bytes)


@pytest.mark.few(47)
@pytest.mark.parametrize(("name", "exchange"), CASES)
def test_ranks_agree_bitwise_and_send_what_was_predicted(name: str, exchange: str) -> None:
    check(name, exchange, 3)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("exchange", ALL_REDUCTIONS)
def test_every_world_size(exchange: str, world_size: int) -> None:
    wanted = ("error_feedback(identity)", "top_k", "random_k", "qsgd", "power_sgd")
    for name in wanted:
        if (name, exchange) in CASES:
            check(name, exchange, world_size)


def test_every_exchange_is_tried_by_several_compressors() -> None:
    for exchange in ALL_REDUCTIONS:
        assert len([name for name, tried in CASES if tried == exchange]) >= 3
    assert {name for name, _ in CASES} == set(COMPRESSORS)


# --- what is averaged


@pytest.mark.few(6)
@pytest.mark.parametrize("exchange", ALL_REDUCTIONS)
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_without_loss_it_is_the_dense_mean(exchange: str, world_size: int) -> None:
    candidates: list[Compressor] = [Identity(), ErrorFeedback(Identity()), with_memory(top_k(1.0))]
    for compressor in candidates:
        try:
            reduction_for(exchange, compressor, MATRICES[0], world_size)
        except ValueError:
            continue
        parameters = fitting(compressor)

        def run(
            network: LoopbackExchange, compressor: Compressor = compressor, parameters: Sequence[Parameter] = parameters
        ) -> Steps:
            return train(network, compressor, exchange, parameters)

        seen = run_ranks(world_size, run)[0].get()
        for step, results in enumerate(seen.results):
            for parameter, result in zip(parameters, results, strict=True):
                dense = torch.stack([gradient_of(parameter, rank, step) for rank in range(world_size)]).mean(0)
                torch.testing.assert_close(result.mean, dense, atol=1e-6, rtol=1e-5)


CONSERVING = ("top_k", "random_k", "gaussian_k", "threshold", "fp8", "int8", "top_k, bf16", "error_feedback(identity)")
CONSERVING += ("power_sgd", "power_sgd, mxfp4", "mxfp4")
CONSERVING += ("deep_reduce", "deep_reduce, huffman", "deep_reduce, bloom:p0", "deep_reduce, bloom:p2")


@pytest.mark.few(15)
@pytest.mark.parametrize(("name", "exchange"), [(name, exchange) for name, exchange in CASES if name in CONSERVING])
@pytest.mark.parametrize("world_size", [2, 5])
def test_nothing_is_lost(name: str, exchange: str, world_size: int) -> None:
    """What all ranks were given = what they got in all steps, and what workers and owners still keep."""
    compressor = COMPRESSORS[name] if COMPRESSORS[name].memory is Memory.OWN else ErrorFeedback(COMPRESSORS[name])
    parameters = fitting(compressor, torch.float64)
    outcomes = run_ranks(world_size, lambda network: train(network, compressor, exchange, parameters, num_steps=3))
    ranks = [outcome.get() for outcome in outcomes]
    for place, parameter in enumerate(parameters):
        given = sum(gradient_of(parameter, rank, step) for rank in range(world_size) for step in range(3))
        got = torch.stack([results[place].mean for results in ranks[0].results]).sum(0)
        kept = mean_memory([rank.states[place] for rank in ranks], parameter)
        torch.testing.assert_close(world_size * (got + kept), given, atol=1e-9, rtol=1e-9)


def mean_memory(states: Sequence[State], parameter: Parameter) -> Tensor:
    """What will be added to coming gradients, as a mean over the ranks."""
    kept = [outstanding(state, rank, len(states)) for rank, state in enumerate(states)]
    return torch.stack([memory.view(parameter.shape) for memory in kept if memory is not None]).mean(0)


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot", SCHEME])
def test_elements_that_several_ranks_chose_add_up(exchange: str) -> None:
    """9 and 7 at one place give 16, so the mean of two ranks is 8."""
    parameter = Parameter("fc.weight", (4, 5))

    def gradient(parameter: Parameter, rank: int, step: int) -> Tensor:
        dense = torch.zeros(parameter.shape)
        dense[2, 3] = (9.0, 7.0)[rank]
        return dense

    outcomes = run_ranks(
        2, lambda network: train(network, with_memory(top_k(0.05)), exchange, [parameter], 1, gradient)
    )
    for outcome in outcomes:
        mean = outcome.get().results[0][0].mean
        assert mean[2, 3] == 8.0
        assert mean.count_nonzero() == 1


def test_seconds_are_booked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run_ranks(2, lambda network: train(network, with_memory(top_k(0.1)), "two_shot", MATRICES))[0].get()
    assert all(seen.seconds[phase] > 0.0 for phase in Phase)
    clock, stopwatch = FakeClock(), Stopwatch()
    monkeypatch.setattr(exchange_module, "time", clock)
    with stopwatch.phase(Phase.EXCHANGE):
        clock.pass_by(1.0)
        with stopwatch.phase(Phase.COMPRESS):
            clock.pass_by(2.0)
        clock.pass_by(4.0)
    assert stopwatch.seconds == {**dict.fromkeys(Phase, 0.0), Phase.EXCHANGE: 5.0, Phase.COMPRESS: 2.0}


# --- what goes wrong


@dataclass
class FlipPayload:
    """Flips a bit of the first payload that rank 1 sends to rank 0 and that has more bytes than a header."""

    swap: int | None = None

    def __call__(self, rank_from: int, rank_to: int, swap_number: int, tensor: Tensor) -> Tensor:
        if (rank_from, rank_to) != (1, 0) or tensor.numel() <= Header.NUM_BYTES or self.swap is not None:
            return tensor
        self.swap = swap_number
        changed = tensor.clone()
        changed[-1] ^= 1
        return changed


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
def test_a_corrupt_message_names_its_sender(exchange: str) -> None:
    """Found before the last swap all ranks hear of it; found after it, the lane tells them at its next job."""
    tamper = FlipPayload()
    outcomes = run_ranks(
        3, lambda network: train(network, with_memory(top_k(0.5)), exchange, MATRICES, 1), tamper=tamper
    )
    assert tamper.swap is not None
    assert isinstance(outcomes[0].error, CorruptMessageError)
    assert "from rank 1" in str(outcomes[0].error)
    for outcome in outcomes[1:]:
        if exchange == "two_shot":
            assert isinstance(outcome.error, PeerError)
            assert "rank 0 reports" in str(outcome.error)
        else:
            assert outcome.error is None


@dataclass(frozen=True)
class Failing(Identity):
    """Cannot compress on rank 1, which its state tells."""

    def init(self, parameter: Parameter) -> State:
        return {"salt": 0}

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        if state["salt"] == 1:
            raise ValueError("the singular values did not converge")
        return super().compress(gradient, parameter, state)


@dataclass(frozen=True)
class FailingSparse(TopK):
    """The same, of a sparsifier."""

    def init(self, parameter: Parameter) -> State:
        return Failing().init(parameter)

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        Failing().compress(gradient, parameter, state)
        return super().compress(gradient, parameter, state)


@pytest.mark.parametrize("exchange", ALL_REDUCTIONS)
def test_a_failing_compressor_fails_all_ranks(exchange: str) -> None:
    compressor = FailingSparse() if exchange == SCHEME else Failing()
    outcomes = run_ranks(3, lambda network: train(network, compressor, exchange, [MATRICES[1]], 1))
    assert "did not converge" in str(outcomes[1].error)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, LostPeerError if exchange == "all_reduce" else PeerError)


@dataclass(frozen=True)
class Huge(Identity):
    """Sends more than it told."""

    def pack(self, payload: Payload, parameter: Parameter) -> Tensor:
        extra = 8 if payload.parts[0].numel() else 0
        return torch.cat([super().pack(payload, parameter), torch.zeros(extra, dtype=torch.uint8)])


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
def test_more_bytes_than_a_compressor_can_send_are_not_received(exchange: str) -> None:
    outcomes = run_ranks(2, lambda network: train(network, Huge(), exchange, MATRICES, 1))
    assert all(isinstance(outcome.error, ThinwireError) for outcome in outcomes)


# --- messages


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_messages_round_trip(payloads: list[bytes]) -> None:
    packed = [
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        for data in payloads
    ]
    message = packing.join(packed)
    assert message.numel() == packing.message_bytes([len(data) for data in payloads])
    assert message.numel() % 8 == 0
    assert all(map(torch.equal, packing.split(message, len(packed)), packed))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 1))
def test_lengths_that_lie_are_refused(length: int, place: int) -> None:
    packed = [torch.ones(24, dtype=torch.uint8), torch.ones(9, dtype=torch.uint8)]
    message = packing.join(packed)
    message[8 * place : 8 * place + 8].view(torch.int64)[0] = length
    if packing.message_bytes([24, 9]) == sum((16, -(-length // 8) * 8, (16, 24)[place])):
        return
    with pytest.raises(CorruptMessageError):
        packing.split(message, 2)


def test_truncated_messages_are_refused() -> None:
    message = packing.join([torch.ones(24, dtype=torch.uint8)])
    for cut in (0, 7, 8, 31):
        with pytest.raises(CorruptMessageError):
            packing.split(message[:cut], 1)


# --- the choice


@pytest.mark.parametrize(
    ("name", "world_size", "expected"),
    [
        ("fp16", 8, "all_reduce"),
        ("bf16", 2, "all_reduce"),
        ("power_sgd", 8, "all_reduce"),
        ("random_k", 8, "all_reduce"),
        ("top_k", 8, "all_gather"),
        ("gaussian_k", 8, "all_gather"),
        ("qsgd", 2, "all_gather"),
        ("qsgd", 8, "two_shot"),
        ("int8", 8, "two_shot"),
        ("identity", 1, "all_reduce"),
    ],
)
def test_auto_takes_the_fewest_bytes(name: str, world_size: int, expected: str) -> None:
    assert reduction_for(AUTO, COMPRESSORS[name], MATRICES[0], world_size).name == expected


@pytest.mark.parametrize(
    ("name", "exchange", "reason"),
    [
        ("top_k", "all_reduce", "cannot be added element by element"),
        ("qsgd", SCHEME, "use a sparsifier"),
        ("power_sgd", "all_gather", "only the mean of its payloads"),
        ("power_sgd", "two_shot", "only the mean of its payloads"),
        ("atomo", "two_shot", "a piece of a flat gradient"),
    ],
)
def test_an_impossible_exchange_says_why(name: str, exchange: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        reduction_for(exchange, COMPRESSORS[name], MATRICES[0], 4)


@pytest.mark.parametrize(
    ("exchange", "expected"), [(AUTO, "reduce_scatter"), ("two_shot", "reduce_scatter"), ("all_reduce", "all_reduce")]
)
def test_gradients_of_shards_take_an_exchange_by_name(exchange: str, expected: str) -> None:
    """The first of two shots is all that FSDP's shards need."""
    assert scattered(COMPRESSORS["bf16"].by(exchange), MATRICES[0], 4).name == expected
    with pytest.raises(ValueError, match=r"bf16 by all_gather .* leave out \.by\(\)"):
        scattered(thinwire.compress.bf16().by("all_gather"), MATRICES[0], 4)


# --- states of another number of ranks


def states_of(ranks: Sequence[Steps]) -> list[dict[str, object]]:
    return [
        {
            "steps": 3,
            "compress": {
                "rank": rank,
                "world_size": len(ranks),
                "methods": {},
                "states": {parameter.name: state for parameter, state in zip(MATRICES, steps.states, strict=True)},
            },
        }
        for rank, steps in enumerate(ranks)
    ]


@pytest.mark.parametrize(
    ("exchange", "name"), [("all_gather", "top_k"), ("two_shot", "top_k"), ("all_reduce", "random_k")]
)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_redistribution_conserves_the_mean_memory(exchange: str, name: str, world_size: int) -> None:
    compressor = COMPRESSORS[name]
    ranks = [o.get() for o in run_ranks(3, lambda network: train(network, compressor, exchange, MATRICES, 3))]
    old = states_of(ranks)
    before = [copied(state["compress"]) for state in old]  # type: ignore[arg-type]
    dealt = redistribute(old, world_size)
    assert len(dealt) == world_size
    for rank, state in enumerate(dealt):
        assert (state["steps"], state["compress"]["rank"], state["compress"]["world_size"]) == (3, rank, world_size)
    for state, untouched_state in zip(old, before, strict=True):
        check_fits(state["compress"], untouched_state, "unchanged")  # type: ignore[arg-type]
    for parameter in MATRICES:
        kept = [
            mean_memory([s["compress"]["states"][parameter.name] for s in states], parameter) for states in (old, dealt)
        ]  # type: ignore[index]
        torch.testing.assert_close(*kept, atol=1e-6, rtol=1e-5)
        expected = reduction_for(exchange, compressor, parameter, world_size)
        for rank, state in enumerate(dealt):
            fresh = expected.init(compressor, parameter, rank, world_size)
            check_fits(state["compress"]["states"][parameter.name], fresh, parameter.name)


def test_redistribution_refuses_what_is_not_all_ranks_of_one_run() -> None:
    ranks = [
        o.get() for o in run_ranks(2, lambda network: train(network, COMPRESSORS["top_k"], "all_gather", MATRICES))
    ]
    states = states_of(ranks)
    with pytest.raises(ValueError, match="in rank order"):
        redistribute(states[::-1], 3)
    with pytest.raises(ValueError, match="in rank order"):
        redistribute(states[:1], 3)
    with pytest.raises(ValueError, match="1 or more"):
        redistribute(states, 0)
    with pytest.raises(ValueError, match="no compression"):
        redistribute([{"compress": None}], 2)
