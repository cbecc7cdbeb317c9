"""Ok-Topk on ranks that are threads: the laws of its result and memory, its thresholds and regions, and its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopback import LoopbackExchange, run_ranks
from thinwire import compress
from thinwire.comm.channel import Channel, Subject
from thinwire.compress.base import Compressor, Parameter, State
from thinwire.compress.memory import with_memory
from thinwire.compress.papers.ok_topk import ok_topk
from thinwire.compress.papers.ok_topk_reduction import OkTopkReduction, OkTopkTask
from thinwire.compress.reductions.base import Phase, Result, Stopwatch, Task
from thinwire.compress.reductions.choose import AUTO, reduction_for
from thinwire.compress.state import copied, redistribute
from thinwire.errors import CorruptMessageError, PeerError
from thinwire.gradients.compressed import ChannelPeers
from thinwire.rows.formats import Header

pytestmark = pytest.mark.slow

Gradient = Callable[[Parameter, int, int], Tensor]
PAIR_BYTES = 8  # an id and a float32, as the paper sends them


@dataclass
class Seen:
    """What one rank saw: for each step its results and bytes, and the corrected gradients and memories."""

    results: list[list[Result]] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    corrected: list[list[Tensor]] = field(default_factory=list)
    errors: list[list[Tensor]] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    seconds: dict[Phase, float] = field(default_factory=dict)


def memory(state: State) -> Tensor:
    return state["error"] if "error" in state else memory(state["inner"])


def core(state: State) -> State:
    return core(state["inner"]) if "inner" in state else state


def train(
    network: LoopbackExchange,
    compressor: Compressor,
    parameters: Sequence[Parameter],
    num_steps: int,
    gradient: Gradient,
    states: list[State] | None = None,
    first_step: int = 0,
) -> Seen:
    rank, world_size = network.rank, network.world_size
    exchange, stopwatch, seen = reduction_for(AUTO, compressor, parameters[0], world_size), Stopwatch(), Seen()
    seen.states = states or [exchange.init(compressor, parameter, rank, world_size) for parameter in parameters]
    for step in range(first_step, first_step + num_steps):
        channel = Channel(network, Subject("bucket", "the same on all ranks"), step)
        channel.open()
        gradients = [gradient(parameter, rank, step) for parameter in parameters]
        seen.corrected.append([g + memory(s) for g, s in zip(gradients, seen.states, strict=True)])
        before = network.traffic.sent_bytes
        tasks = [
            Task(compressor, parameter, g.clone(), state)
            for parameter, g, state in zip(parameters, gradients, seen.states, strict=True)
        ]
        peers = ChannelPeers(channel, lambda subject: Channel(network, subject, 0))
        seen.results.append(exchange.run(tasks, peers, stopwatch))
        assert all(torch.equal(task.gradient, g) for task, g in zip(tasks, gradients, strict=True))
        seen.sent_bytes.append(network.traffic.sent_bytes - before)
        seen.errors.append([memory(state).clone() for state in seen.states])
    seen.seconds = stopwatch.seconds
    return seen


def normal(parameter: Parameter, rank: int, step: int) -> Tensor:
    seeded = torch.Generator().manual_seed(1000 * step + 7 * rank + parameter.numel)
    return torch.randn(parameter.shape, generator=seeded, dtype=parameter.working_dtype)


def skewed(parameter: Parameter, rank: int, step: int) -> Tensor:
    """All that is large is in the first hundredth, wherever regions were cut in step 0."""
    scale = torch.full((parameter.numel,), 0.01, dtype=parameter.working_dtype)
    if step:
        scale[: max(1, parameter.numel // 50)] = 10.0
    return normal(parameter, rank, step) * scale.view(parameter.shape)


def disjoint(parameter: Parameter, rank: int, step: int) -> Tensor:
    """Each rank has a stretch of its own; 9 stands for more ranks than there are."""
    flat = normal(parameter, rank, step).view(-1)
    mine = torch.arange(parameter.numel) * 9 // max(1, parameter.numel) == rank
    return (flat * mine).view(parameter.shape)


def common(parameter: Parameter, rank: int, step: int) -> Tensor:
    """As gradients of one loss are: mostly the same on all ranks."""
    return normal(parameter, 99, step) + 0.3 * normal(parameter, rank, step)


def opposed(parameter: Parameter, rank: int, step: int) -> Tensor:
    """Two ranks cancel each other out."""
    return normal(parameter, 0, step) * (-1.0) ** rank


def equal(parameter: Parameter, rank: int, step: int) -> Tensor:
    return torch.full(parameter.shape, 0.5, dtype=parameter.working_dtype)


def zero(parameter: Parameter, rank: int, step: int) -> Tensor:
    return torch.zeros(parameter.shape, dtype=parameter.working_dtype)


def name_of(case: object) -> str:
    return getattr(case, "__name__", str(case))


GRADIENTS = (normal, skewed, disjoint, common, opposed, equal, zero)


def on_ranks(world_size: int, function: Callable[[LoopbackExchange], Seen]) -> list[Seen]:
    return [outcome.get() for outcome in run_ranks(world_size, function)]


def check_laws(ranks: Sequence[Seen], parameters: Sequence[Parameter]) -> None:
    """All ranks get the same bits; what they had = what they got and what they keep; memories are as they were or 0."""
    world_size = len(ranks)
    for step, results in enumerate(ranks[0].results):
        for place, parameter in enumerate(parameters):
            mean = results[place].mean
            assert mean.shape == parameter.shape
            assert mean.dtype == parameter.working_dtype
            assert all(torch.equal(mean, other.results[step][place].mean) for other in ranks)
            had = torch.stack([rank.corrected[step][place] for rank in ranks]).sum(0)
            kept = torch.stack([rank.errors[step][place] for rank in ranks]).sum(0)
            torch.testing.assert_close(world_size * mean + kept, had, atol=1e-10, rtol=1e-10)
            everything = core(ranks[0].states[place])["k"] == parameter.numel
            for rank in ranks:
                error, corrected = rank.errors[step][place], rank.corrected[step][place]
                arrived = (mean != 0) | everything
                assert bool(((error == corrected) | ((error == 0) & arrived)).all())


SHAPES = (
    Parameter("a", (33, 17), torch.float64),
    Parameter("b", (1,), torch.float64),
    Parameter("c", (0, 3), torch.float64),
)


CASES = [(world_size, gradient) for world_size in (1, 2, 5) for gradient in GRADIENTS]
CASES += [(world_size, gradient) for world_size in (3, 4, 6, 7, 8) for gradient in (skewed, disjoint)]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "gradient"), CASES, ids=name_of)
def test_laws(world_size: int, gradient: Gradient) -> None:
    compressor = with_memory(ok_topk(0.1, reselect_every=3, repartition_every=2))
    ranks = on_ranks(world_size, lambda network: train(network, compressor, SHAPES, 4, gradient))
    check_laws(ranks, SHAPES)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_laws_for_any_gradients(data: st.DataObject) -> None:
    """Small whole numbers: ties, zeros, sums that cancel out, everything at once."""
    world_size, numel = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    density = data.draw(st.floats(0.01, 1.0))
    seed = data.draw(st.integers(0, 2**31))
    parameters = [Parameter("a", (numel,), torch.float64)]

    def gradient(parameter: Parameter, rank: int, step: int) -> Tensor:
        seeded = torch.Generator().manual_seed(seed + 100 * rank + step)
        return torch.randint(-3, 4, parameter.shape, generator=seeded).double()

    compressor = with_memory(ok_topk(density, reselect_every=2, repartition_every=3))
    ranks = on_ranks(world_size, lambda network: train(network, compressor, parameters, 4, gradient))
    check_laws(ranks, parameters)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_density_1_is_the_dense_mean(world_size: int) -> None:
    """Also where sums cancel out: nothing stays in any memory."""
    for gradient in (normal, opposed):
        ranks = on_ranks(
            world_size, lambda network, g=gradient: train(network, with_memory(ok_topk(1.0)), SHAPES, 3, g)
        )
        for step in range(3):
            for place, parameter in enumerate(SHAPES):
                dense = torch.stack([gradient(parameter, rank, step) for rank in range(world_size)]).mean(0)
                torch.testing.assert_close(ranks[0].results[step][place].mean, dense, atol=1e-12, rtol=1e-12)
                assert all(not rank.errors[step][place].any() for rank in ranks)


def test_what_several_ranks_choose_adds_up() -> None:
    """9 and 7 at one place are 16, the mean of two ranks is 8."""
    parameter = Parameter("a", (4, 25))

    def gradient(parameter: Parameter, rank: int, step: int) -> Tensor:
        dense = torch.zeros(parameter.shape)
        dense[2, 3] = (9.0, 7.0)[rank]
        return dense

    for seen in on_ranks(2, lambda network: train(network, with_memory(ok_topk(0.01)), [parameter], 1, gradient)):
        mean = seen.results[0][0].mean
        assert mean[2, 3] == 8.0
        assert mean.count_nonzero() == 1
        assert not seen.errors[0][0].any()


# --- what is chosen


@pytest.mark.parametrize(
    ("world_size", "gradient"),
    [(2, equal), (3, skewed), (5, common), (5, disjoint)],
    ids=name_of,
)
def test_an_exact_threshold_is_that_of_the_k_largest_sums(world_size: int, gradient: Gradient) -> None:
    """Of the sums of what each rank selected, exactly, whoever owns them."""
    parameter, k = Parameter("a", (3001,), torch.float64), 300
    compressor = with_memory(ok_topk(0.1, reselect_every=1))
    ranks = on_ranks(world_size, lambda network: train(network, compressor, [parameter], 2, gradient))
    for step in range(2):
        total = torch.zeros(parameter.numel, dtype=torch.float64)
        for seen in ranks:
            corrected = seen.corrected[step][0]
            ids = compress.top_k(0.1).select(corrected, parameter, {})[0]
            total[ids] += corrected[ids]
        total /= world_size
        ids = compress.top_k(0.1).select(total, parameter, {})[0]
        expected = torch.zeros_like(total)
        expected[ids] = total[ids]
        mean = ranks[0].results[step][0].mean
        assert int(mean.count_nonzero()) <= k
        torch.testing.assert_close(mean, expected, atol=1e-12, rtol=1e-12)


def test_thresholds_are_reused_and_nudged() -> None:
    parameter = Parameter("a", (10_000,))
    compressor = ok_topk(0.1)
    state = compressor.init(parameter)
    gradient = normal(parameter, 0, 0)

    def count(scale: float) -> int:
        return compressor.compress(gradient * scale, parameter, state).parts[0].numel()

    assert count(1.0) == 1000
    first = state["threshold"]
    assert count(1.0) == 1000
    assert state["threshold"] == first  # inside the tolerance nothing changes
    assert 1250 < count(1.15) <= 1500
    assert state["threshold"] == pytest.approx(1.012 * first)
    assert 500 <= count(0.85) < 667
    assert state["threshold"] == pytest.approx(first)
    assert count(100.0) == 1000  # too many: found anew at once
    assert state["threshold"] == pytest.approx(100.0 * first)
    assert count(0.1) == 1000  # none reaches it


def test_thresholds_are_exact_every_so_many_steps() -> None:
    parameter, compressor = Parameter("a", (10_000,)), ok_topk(0.1, reselect_every=4)
    state = compressor.init(parameter)
    counts = [
        compressor.compress(normal(parameter, 0, 0) * (1 + step / 100), parameter, state).parts[0].numel()
        for step in range(9)
    ]
    assert [counts[step] == 1000 for step in range(9)] == [step % 4 == 0 for step in range(9)]


def test_the_global_threshold_follows_from_the_counts_of_all() -> None:
    """It is the same on all ranks, moves only by 1.008 between exact steps, and keeps about k."""
    parameter, k = Parameter("a", (20_000,)), 200
    ranks = on_ranks(4, lambda network: train(network, with_memory(ok_topk(0.01)), [parameter], 12, common))
    assert len({core(seen.states[0])["global_threshold"] for seen in ranks}) == 1
    assert all(torch.equal(core(seen.states[0])["bounds"], core(ranks[0].states[0])["bounds"]) for seen in ranks)
    counts = [int(results[0].mean.count_nonzero()) for results in ranks[0].results]
    assert counts[0] == k
    assert all(k / 2 <= count <= 3 * k / 2 for count in counts)


def lasting(parameter: Parameter, rank: int, step: int) -> Tensor:
    """Elements have scales and means of their own, so that memories pile up below thresholds."""
    seeded = torch.Generator().manual_seed(0)
    scales = torch.randn(parameter.shape, generator=seeded).exp_()
    means = 0.5 * scales * torch.randn(parameter.shape, generator=seeded)
    return means + scales * normal(parameter, rank, step)


def test_the_global_threshold_is_found_as_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Error feedback makes it jump; a ladder of thresholds that are counted with it spares nearly all searches."""
    searched: list[int] = []
    decide_exactly = OkTopkTask.decide_exactly

    def spied(self: OkTopkTask, candidates: Sequence[Tensor]) -> None:
        searched.append(self.task.state["inner"]["step"] - 1)
        decide_exactly(self, candidates)

    monkeypatch.setattr(OkTopkTask, "decide_exactly", spied)
    parameter, num_steps = Parameter("a", (20_000,)), 48
    on_ranks(4, lambda network: train(network, with_memory(ok_topk(0.01)), [parameter], num_steps, lasting))
    steps = set(searched)
    assert {0, 32} <= steps
    assert len(steps - {0, 32}) <= 0.1 * num_steps


# --- bytes


@pytest.mark.parametrize(
    ("world_size", "gradient"),
    [(2, common), (4, skewed), (8, normal), (8, disjoint), (8, skewed)],
    ids=name_of,
)
def test_a_rank_sends_less_than_6_k_pairs(world_size: int, gradient: Gradient) -> None:
    """In every step of these, headers and all."""
    parameter = Parameter("a", (100_000,))
    k = 1000
    ranks = on_ranks(world_size, lambda network: train(network, with_memory(ok_topk(0.01)), [parameter], 4, gradient))
    for seen in ranks:
        assert max(seen.sent_bytes) < 6 * k * PAIR_BYTES
    if gradient in (normal, common):  # the paper counts words, two a pair
        assert max(sum(seen.sent_bytes) / 4 for seen in ranks) < 6 * k * PAIR_BYTES / 2


@pytest.mark.parametrize(
    ("world_size", "most"),
    [(2, 8.0), pytest.param(4, 11.0, marks=pytest.mark.slow), pytest.param(8, 13.0, marks=pytest.mark.slow)],
)
def test_bytes_of_each_of_the_k_elements(world_size: int, most: float) -> None:
    """Of the busiest rank, on average over the steps, headers, tallies and searches for thresholds included."""
    parameter, num_steps, k = Parameter("a", (200_000,)), 34, 2000
    ranks = on_ranks(
        world_size, lambda network: train(network, with_memory(ok_topk(0.01)), [parameter], num_steps, lasting)
    )
    assert max(sum(seen.sent_bytes) for seen in ranks) / num_steps / k < most


def test_bytes_do_not_grow_with_the_ranks() -> None:
    parameter = Parameter("a", (100_000,))

    def most(world_size: int, compressor: Compressor) -> int:
        ranks = on_ranks(world_size, lambda network: train(network, with_memory(compressor), [parameter], 2, common))
        return max(sum(seen.sent_bytes) for seen in ranks)

    eight, of_top_k = most(8, ok_topk(0.01)), most(8, compress.top_k(0.01))
    assert eight < 1.5 * most(4, ok_topk(0.01))
    assert of_top_k > 3 * most(3, compress.top_k(0.01))
    assert eight < 0.45 * of_top_k


def test_a_skew_is_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions are those of step 0; then all that is large is in the first, whose owner would send it to all."""
    parameter = Parameter("a", (100_000,))

    def most() -> int:
        ranks = on_ranks(8, lambda network: train(network, with_memory(ok_topk(0.01)), [parameter], 2, skewed))
        check_same(ranks)
        return max(seen.sent_bytes[1] for seen in ranks)

    balanced = most()
    monkeypatch.setattr("thinwire.compress.papers.ok_topk_reduction._WORTH_A_ROUND", 10**9)
    assert balanced < 0.75 * most()


def check_same(ranks: Sequence[Seen]) -> None:
    for step, results in enumerate(ranks[0].results):
        assert all(torch.equal(results[0].mean, seen.results[step][0].mean) for seen in ranks)


# --- what goes wrong


@dataclass
class Flip:
    """Flips a bit of the ``number``-th payload (and not header) that rank 1 sends to rank 0."""

    number: int
    seen: int = 0

    def __call__(self, rank_from: int, rank_to: int, swap_number: int, tensor: Tensor) -> Tensor:
        if (rank_from, rank_to) != (1, 0) or tensor.numel() == Header.NUM_BYTES or not tensor.numel():
            return tensor
        self.seen += 1
        if self.seen != self.number + 1:
            return tensor
        changed = tensor.clone()
        changed[-1] ^= 1
        return changed


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4])
def test_a_corrupt_message_names_its_sender_and_stops_all(number: int) -> None:
    """Boundaries, pairs, tallies, magnitudes; found after the last message, only the rank that got it knows."""
    tamper = Flip(number)
    parameter = Parameter("a", (9000,))
    outcomes = run_ranks(
        3, lambda network: train(network, with_memory(ok_topk(0.1)), [parameter], 1, normal), tamper=tamper
    )
    assert tamper.seen > number
    assert isinstance(outcomes[0].error, CorruptMessageError)
    assert "from rank 1" in str(outcomes[0].error)
    for outcome in outcomes[1:]:
        assert outcome.error is None if number == 4 else isinstance(outcome.error, PeerError)


# --- as a method


def test_it_takes_its_own_reduction_and_no_other() -> None:
    parameter, compressor = Parameter("a", (9000,)), with_memory(ok_topk(0.1))
    assert isinstance(reduction_for(AUTO, compressor, parameter, 4), OkTopkReduction)
    for other in ("all_gather", "two_shot", "all_reduce", "zen"):
        with pytest.raises(ValueError, match="an exchange of its own"):
            reduction_for(other, compressor, parameter, 4)
    with pytest.raises(ValueError, match="is not Ok-Topk"):
        OkTopkReduction().check(with_memory(compress.top_k(0.1)), parameter)
    assert OkTopkReduction().sent_bytes([(compressor, parameter)], 0, 1) == 0


def test_it_can_be_warmed_up() -> None:
    """From dense steps to its own density; thresholds are found anew where k changes."""
    compressor = with_memory(compress.warm_up(ok_topk(0.01), steps=3, start_density=1.0))
    parameters = [Parameter("a", (3001,), torch.float64)]
    ranks = on_ranks(3, lambda network: train(network, compressor, parameters, 6, common))
    counts = [int(results[0].mean.count_nonzero()) for results in ranks[0].results]
    assert counts[0] == 3001
    assert counts[1:4] == [round(3001 * 0.01 ** (1 / 3)), round(3001 * 0.01 ** (2 / 3)), 30]
    check_same(ranks)


def test_a_resumed_run_has_the_same_bits() -> None:
    parameters = [Parameter("a", (3001,)), Parameter("b", (20, 31))]
    compressor = with_memory(ok_topk(0.02, reselect_every=4, repartition_every=3))
    whole = on_ranks(3, lambda network: train(network, compressor, parameters, 8, common))
    first = on_ranks(3, lambda network: train(network, compressor, parameters, 5, common))
    saved = [[copied(state) for state in seen.states] for seen in first]
    second = on_ranks(
        3, lambda network: train(network, compressor, parameters, 3, common, saved[network.rank], first_step=5)
    )
    for one, other in zip(whole, second, strict=True):
        for step in range(3):
            for mine, theirs in zip(one.results[5 + step], other.results[step], strict=True):
                assert torch.equal(mine.mean, theirs.mean)


def test_it_goes_on_with_another_number_of_ranks() -> None:
    parameters = [Parameter("a", (3001,), torch.float64)]
    compressor = with_memory(ok_topk(0.02))
    first = on_ranks(4, lambda network: train(network, compressor, parameters, 3, common))
    saved = [
        {"compress": {"rank": rank, "world_size": 4, "states": {"a": seen.states[0]}}}
        for rank, seen in enumerate(first)
    ]
    dealt = redistribute(saved, 3)
    memories = [memory(state["compress"]["states"]["a"]) for state in dealt]
    torch.testing.assert_close(
        torch.stack(memories).mean(0), torch.stack([memory(seen.states[0]) for seen in first]).mean(0)
    )
    second = on_ranks(
        3,
        lambda network: train(
            network, compressor, parameters, 2, common, [dealt[network.rank]["compress"]["states"]["a"]], first_step=3
        ),
    )
    check_laws(second, parameters)


def test_messages_of_a_bucket_travel_together() -> None:
    """Twelve parameters, of two dtypes, cost no more messages than two, and seconds are booked in all phases."""
    dtypes = (torch.float32, torch.float64)
    parameters = [Parameter(f"p{number}", (64, 40), dtypes[number % 2]) for number in range(12)]
    together = on_ranks(4, lambda network: train(network, with_memory(ok_topk(0.05)), parameters, 2, common))
    alone = on_ranks(4, lambda network: train(network, with_memory(ok_topk(0.05)), parameters[:1], 2, common))
    check_laws_in_float32(together)
    assert sum(together[0].sent_bytes) < 12 * sum(alone[0].sent_bytes)
    assert all(together[0].seconds[phase] > 0.0 for phase in Phase)


def check_laws_in_float32(ranks: Sequence[Seen]) -> None:
    for step, results in enumerate(ranks[0].results):
        for place, result in enumerate(results):
            had = torch.stack([seen.corrected[step][place] for seen in ranks]).sum(0)
            kept = torch.stack([seen.errors[step][place] for seen in ranks]).sum(0)
            torch.testing.assert_close(len(ranks) * result.mean + kept, had, atol=1e-5, rtol=1e-5)
