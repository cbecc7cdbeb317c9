"""HiTopKComm on ranks that are threads: what is exact, what is kept, and what crosses hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from loopback import LoopbackExchange, run_ranks
from thinwire import compress
from thinwire.comm.channel import Channel, Subject
from thinwire.comm.hosts import Hosts
from thinwire.compress.base import Compressor, Parameter, State
from thinwire.compress.memory import ErrorFeedback, with_memory
from thinwire.compress.methods.select import hi_top_k
from thinwire.compress.papers.hi_top_k import HiTopKReduction
from thinwire.compress.reductions.base import Phase, Result, Stopwatch, Task
from thinwire.compress.reductions.choose import AUTO, reduction_for
from thinwire.compress.state import copied, redistribute
from thinwire.errors import CorruptMessageError, PeerError
from thinwire.gradients.compressed import ChannelPeers
from thinwire.lab.ledger import host_of_ranks
from thinwire.rows.formats import Header

PARAMETERS = (
    Parameter("a", (33, 17), torch.float64),
    Parameter("b", (1,), torch.float64),
    Parameter("c", (0, 3), torch.float64),
    Parameter("d", (301,), torch.float32),
)
LAYOUTS: tuple[Hosts, ...] = (
    ((0,),),
    ((0, 1, 2),),
    ((0,), (1,), (2,)),
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),
    ((0, 1, 2), (3,), (4, 5)),
    ((0, 1, 2, 3), (4, 5, 6, 7)),
    ((0, 1, 5), (2, 3, 4, 6)),
)
every_layout = pytest.mark.parametrize("hosts", LAYOUTS, ids=str)


@dataclass
class Seen:
    """What one rank saw, for each step."""

    results: list[list[Result]] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    before: list[list[Tensor]] = field(default_factory=list)
    after: list[list[Tensor]] = field(default_factory=list)
    between_hosts_bytes: list[int] = field(default_factory=list)
    seconds: dict[Phase, float] = field(default_factory=dict)


def memory(state: State) -> Tensor:
    return state["error"] if "error" in state else memory(state["inner"])


def normal(parameter: Parameter, rank: int, step: int) -> Tensor:
    seeded = torch.Generator().manual_seed(1000 * step + 7 * rank + parameter.numel)
    return torch.randn(parameter.shape, generator=seeded, dtype=parameter.working_dtype)


def zero(parameter: Parameter, rank: int, step: int) -> Tensor:
    return torch.zeros(parameter.shape, dtype=parameter.working_dtype)


def train(
    network: LoopbackExchange,
    hosts: Hosts,
    compressor: Compressor,
    parameters: Sequence[Parameter] = PARAMETERS,
    num_steps: int = 3,
    gradient: Callable[[Parameter, int, int], Tensor] = normal,
    states: list[State] | None = None,
    first_step: int = 0,
) -> Seen:
    network.hosts = host_of_ranks(hosts)
    rank, world_size = network.rank, network.world_size
    exchange, stopwatch, seen = reduction_for(AUTO, compressor, parameters[0], world_size), Stopwatch(), Seen()
    seen.states = states or [exchange.init(compressor, parameter, rank, world_size) for parameter in parameters]
    for step in range(first_step, first_step + num_steps):
        channel = Channel(network, Subject("bucket", "the same on all ranks"), step)
        channel.open()
        gradients = [gradient(parameter, rank, step) for parameter in parameters]
        seen.before.append([memory(state).clone() for state in seen.states])
        before = network.traffic.sent_between_hosts_bytes
        tasks = [
            Task(compressor, parameter, g.clone(), state)
            for parameter, g, state in zip(parameters, gradients, seen.states, strict=True)
        ]
        peers = ChannelPeers(channel, lambda subject: Channel(network, subject, 0))
        seen.results.append(exchange.run(tasks, peers, stopwatch))
        assert all(torch.equal(task.gradient, g) for task, g in zip(tasks, gradients, strict=True))
        seen.between_hosts_bytes.append(network.traffic.sent_between_hosts_bytes - before)
        seen.after.append([memory(state).clone() for state in seen.states])
    seen.seconds = stopwatch.seconds
    return seen


def on_hosts(hosts: Hosts, compressor: Compressor, **more: object) -> list[Seen]:
    world_size = sum(map(len, hosts))
    outcomes = run_ranks(world_size, lambda network: train(network, hosts, compressor, **more))  # type: ignore[arg-type]
    return [outcome.get() for outcome in outcomes]


def spans(parameter: Parameter, num_shards: int) -> list[slice]:
    ends = [parameter.numel * place // num_shards for place in range(num_shards + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


@pytest.mark.few(8)
@every_layout
@pytest.mark.parametrize("gradient", [normal, zero], ids=lambda gradient: gradient.__name__)
def test_laws(hosts: Hosts, gradient: Callable[[Parameter, int, int], Tensor]) -> None:
    """All ranks get the same bits, and what they had = what they got and what the owners of shards keep."""
    ranks = on_hosts(hosts, hi_top_k(0.1), gradient=gradient)
    num_shards = min(map(len, hosts))
    for step, results in enumerate(ranks[0].results):
        for place, parameter in enumerate(PARAMETERS):
            mean = results[place].mean
            assert (mean.shape, mean.dtype) == (parameter.shape, parameter.working_dtype)
            assert all(torch.equal(mean, seen.results[step][place].mean) for seen in ranks)
            had = sum(seen.before[step][place] + gradient(parameter, rank, step) for rank, seen in enumerate(ranks))
            kept = torch.stack([seen.after[step][place] for seen in ranks]).sum(0)
            tolerance = 1e-10 if parameter.dtype == torch.float64 else 1e-5
            torch.testing.assert_close(len(ranks) * mean + kept, had, atol=tolerance, rtol=tolerance)
            for members in hosts:
                for number, rank in enumerate(members):
                    error = ranks[rank].after[step][place].view(-1).clone()
                    if number < num_shards:
                        error[spans(parameter, num_shards)[number]] = 0.0
                    assert not error.any()  # only of its own shard a rank keeps anything


@every_layout
def test_a_host_sends_the_largest_of_its_sum(hosts: Hosts) -> None:
    """Written down once more in plain torch: sum inside hosts, MSTop-K of shards, sum over hosts."""
    parameter, world_size = Parameter("a", (601,), torch.float64), sum(map(len, hosts))
    num_shards = min(map(len, hosts))
    expected = torch.zeros(601, dtype=torch.float64)
    for members in hosts:
        total = torch.stack([normal(parameter, rank, 0) for rank in members]).sum(0)
        for span in spans(parameter, num_shards):
            shard = total[span]
            density = 0.05 if len(hosts) > 1 else 1.0
            ids, values = compress.top_k(density).select(shard, Parameter("a", (shard.numel(),)), {})
            expected[span][ids] += values
    (seen, *_) = on_hosts(hosts, hi_top_k(0.05), parameters=[parameter], num_steps=1)
    torch.testing.assert_close(seen.results[0][0].mean, expected / world_size, atol=1e-12, rtol=1e-12)


def test_one_rank_on_each_host_is_an_all_gather_of_ms_top_k() -> None:
    """The same bits, bytes of the same size and the same memories."""
    hosts = ((0,), (1,), (2,), (3,))
    parameters = [Parameter("a", (301, 7))]
    ours = on_hosts(hosts, hi_top_k(0.05), parameters=parameters)
    flat = on_hosts(hosts, with_memory(compress.ms_top_k(0.05)), parameters=parameters)
    for mine, theirs in zip(ours, flat, strict=True):
        assert mine.between_hosts_bytes == theirs.between_hosts_bytes
        for step in range(3):
            assert torch.equal(mine.results[step][0].mean, theirs.results[step][0].mean)
            assert torch.equal(mine.after[step][0], theirs.after[step][0])


def test_one_host_leaves_nothing_out() -> None:
    ranks = on_hosts(((0, 1, 2),), hi_top_k(0.01))
    for step in range(3):
        for place, parameter in enumerate(PARAMETERS):
            dense = torch.stack([normal(parameter, rank, step) for rank in range(3)]).mean(0)
            torch.testing.assert_close(ranks[0].results[step][place].mean, dense)
            assert all(not seen.after[step][place].any() for seen in ranks)
    assert all(not any(seen.between_hosts_bytes) for seen in ranks)


@pytest.mark.parametrize("hosts", [((0, 1), (2, 3), (4, 5)), ((0, 1, 2, 3), (4, 5, 6, 7))], ids=str)
def test_bytes_between_hosts_fall_with_the_square_of_the_ranks_of_a_host(hosts: Hosts) -> None:
    """A flat all-gather sends r selections from a host, each of them r times to each other host."""
    parameters, ranks_per_host = [Parameter("a", (40_000,))], len(hosts[0])
    ours = on_hosts(hosts, hi_top_k(0.02), parameters=parameters, num_steps=2)
    flat = on_hosts(hosts, with_memory(compress.top_k(0.02)), parameters=parameters, num_steps=2)

    def per_host(ranks: Sequence[Seen]) -> int:
        return max(sum(ranks[rank].between_hosts_bytes[1] for rank in members) for members in hosts)

    ratio = per_host(flat) / per_host(ours)
    assert 0.9 * ranks_per_host**2 < ratio < 1.1 * ranks_per_host**2


# --- what goes wrong


@dataclass
class Flip:
    """Flips a bit of the first payload between two ranks that is no header."""

    source: int
    target: int
    is_done: bool = False

    def __call__(self, rank_from: int, rank_to: int, swap_number: int, tensor: Tensor) -> Tensor:
        if (rank_from, rank_to) != (self.source, self.target) or tensor.numel() <= Header.NUM_BYTES or self.is_done:
            return tensor
        self.is_done = True
        changed = tensor.clone()
        changed[-1] ^= 1
        return changed


@pytest.mark.parametrize(("source", "target"), [(1, 0), (2, 0)])
def test_a_corrupt_message_names_its_sender_and_stops_its_host(source: int, target: int) -> None:
    """Inside a host before anything crosses, all ranks hear of it; between hosts, those of the host do."""
    hosts, tamper = ((0, 1), (2, 3)), Flip(source, target)
    outcomes = run_ranks(4, lambda network: train(network, hosts, hi_top_k(0.1), num_steps=1), tamper=tamper)
    assert tamper.is_done
    assert isinstance(outcomes[0].error, CorruptMessageError)
    assert isinstance(outcomes[1].error, PeerError)
    if source == 1:  # rank 2 waits for rank 0, and rank 3 for rank 2
        assert isinstance(outcomes[2].error, PeerError)
        assert isinstance(outcomes[3].error, PeerError)


def test_a_rank_that_fails_stops_all() -> None:
    """Told from host to host; nobody waits for a timeout."""
    hosts = ((0, 1, 4), (2, 3))

    def run(network: LoopbackExchange) -> Seen:
        states: list[State] | None = None
        if network.rank == 4:  # has no shard; its memory has another shape than its gradient
            states = [{"error": torch.zeros(9, 9)}]
        return train(network, hosts, hi_top_k(0.1), PARAMETERS[:1], 1, states=states)

    outcomes = run_ranks(5, run, timeout_seconds=100.0)
    assert isinstance(outcomes[4].error, RuntimeError)
    assert all(isinstance(outcome.error, PeerError) for outcome in outcomes[:4])


# --- as a method


def test_it_takes_its_own_reduction_and_no_other() -> None:
    parameter, compressor = Parameter("a", (9000,)), hi_top_k(0.1)
    assert with_memory(compressor) is compressor
    assert isinstance(reduction_for(AUTO, compressor, parameter, 4), HiTopKReduction)
    for other in ("all_gather", "two_shot", "all_reduce", "zen"):
        with pytest.raises(ValueError, match="an exchange of its own"):
            reduction_for(other, compressor, parameter, 4)
    with pytest.raises(ValueError, match="is not HiTopKComm"):
        HiTopKReduction().check(compress.ms_top_k(0.1), parameter)
    with pytest.raises(ValueError, match="already"):
        ErrorFeedback(compressor)
    with pytest.raises(ValueError, match="density"):
        hi_top_k(0.0)
    assert HiTopKReduction().sent_bytes([(compressor, parameter)], 0, 1) == 0


def test_a_warm_up_is_dense() -> None:
    ranks = on_hosts(((0, 1), (2, 3)), compress.warm_up(hi_top_k(0.1), 2), parameters=PARAMETERS[:1])
    for step in range(2):
        dense = torch.stack([normal(PARAMETERS[0], rank, step) for rank in range(4)]).mean(0)
        torch.testing.assert_close(ranks[0].results[step][0].mean, dense)
        assert all(not seen.after[step][0].any() for seen in ranks)
    assert 0 < int(ranks[0].results[2][0].mean.count_nonzero()) <= 2 * 57


def test_a_resumed_run_has_the_same_bits_and_may_have_other_hosts() -> None:
    hosts, parameters = ((0, 1), (2, 3)), list(PARAMETERS[:1])
    whole = on_hosts(hosts, hi_top_k(0.1), parameters=parameters, num_steps=4)
    first = on_hosts(hosts, hi_top_k(0.1), parameters=parameters, num_steps=2)
    saved = [copied(seen.states[0]) for seen in first]

    def resume(network: LoopbackExchange) -> Seen:
        return train(network, hosts, hi_top_k(0.1), parameters, 2, states=[saved[network.rank]], first_step=2)

    for one, other in zip(whole, [outcome.get() for outcome in run_ranks(4, resume)], strict=True):
        assert torch.equal(one.results[3][0].mean, other.results[1][0].mean)
    states = [
        {"compress": {"rank": rank, "world_size": 4, "states": {"a": seen.states[0]}}}
        for rank, seen in enumerate(first)
    ]
    dealt = [state["compress"]["states"]["a"] for state in redistribute(states, 3)]
    torch.testing.assert_close(
        torch.stack([memory(state) for state in dealt]).mean(0),
        torch.stack([memory(seen.states[0]) for seen in first]).mean(0),
    )


def test_seconds_are_booked_in_all_phases() -> None:
    (seen, *_) = on_hosts(((0, 1), (2, 3)), hi_top_k(0.1))
    assert all(seen.seconds[phase] > 0.0 for phase in Phase)
