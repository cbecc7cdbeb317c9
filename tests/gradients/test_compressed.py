"""Jobs of the lane with compressed gradients: scales, non-finite values, states and accounts; without sockets."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopback import LoopbackExchange, run_ranks
from tests.gradients.compressed import PARAMETERS
from thinwire import compress
from thinwire.comm.channel import Channel, Subject
from thinwire.compress.assign import Dense, assign
from thinwire.compress.base import Compressor, Exchanged, Identity, Parameter
from thinwire.compress.memory import ErrorFeedback, with_memory
from thinwire.compress.reductions.base import Stopwatch, Task
from thinwire.compress.reductions.choose import reduction_for
from thinwire.compress.state import copied
from thinwire.errors import MismatchError
from thinwire.gradients.compressed import ChannelPeers, CompressedSync, Statistics
from thinwire.gradients.compression import GradScaler, planned
from thinwire.observe.step import ParameterRecord, ParameterRecords
from threaded import LoopbackLane

OTHERS = "all other parameters"


@dataclass
class Scaler:
    """A loss scale that somebody else decides."""

    scale: float = 1024.0

    def get_scale(self) -> float:
        return self.scale

    def is_enabled(self) -> bool:
        return True


@dataclass
class Job:
    """One rank with a synchronization of all `PARAMETERS`, as one bucket."""

    network: LoopbackExchange
    how: Dense
    exchange: str = "auto"
    scaler: GradScaler | None = None
    dtype: torch.dtype = torch.float32
    records: dict[str, ParameterRecord] = field(default_factory=ParameterRecords)

    def __post_init__(self) -> None:
        self.lane: Any = LoopbackLane(self.network)
        parameters = [Parameter(parameter.name, parameter.shape, self.dtype) for parameter in PARAMETERS]
        methods = {
            name: replace(method, exchange=self.exchange) if isinstance(method, Exchanged) else method
            for name, method in assign(self.how, parameters).items()
        }
        plans = planned(methods, parameters, self.network.world_size)
        self.sync = CompressedSync(plans, self.lane, Statistics(self.records, self.network.world_size), self.scaler)

    def gradients(self, step: int, scale: float = 1.0) -> dict[str, Tensor]:
        seeded = torch.Generator().manual_seed(100 * step + self.network.rank)
        return {
            parameter.name: (torch.randn(parameter.shape, generator=seeded) * scale).to(self.dtype)
            for parameter in PARAMETERS
        }

    def step(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The means, in place."""
        named = [(name, gradient) for name, gradient in gradients.items() if name in self.sync.plans]
        others = [gradient for name, gradient in gradients.items() if name not in self.sync.plans]
        self.sync.synchronize(self.lane, named, others)
        self.sync.finish_step()
        self.sync.memories.commit(self.sync.plans)
        for record in self.records.values():
            record.finish_step()
        return gradients

    def steps(self, numbers: Sequence[int]) -> list[dict[str, Tensor]]:
        return [self.step(self.gradients(number)) for number in numbers]


def on_ranks(world_size: int, function: Callable[[LoopbackExchange], Any]) -> list[Any]:
    return [outcome.get() for outcome in run_ranks(world_size, function)]


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Bitwise, nested."""
    if set(one) != set(other):
        return False
    for name, entry in one.items():
        theirs = other[name]
        if isinstance(entry, Mapping):
            equal = same(entry, theirs)
        else:
            equal = torch.equal(entry, theirs) if isinstance(entry, Tensor) else entry == theirs
        if not equal:
            return False
    return True


METHODS: dict[str, Callable[[], Compressor]] = {
    "top_k": lambda: compress.top_k(0.1),
    "dgc": lambda: compress.dgc(0.05),
    "random_k": lambda: compress.random_k(0.1),
    "qsgd": lambda: compress.qsgd(),
    "ef_sign_sgd": lambda: compress.ef_sign_sgd(),
    "mxfp8": lambda: compress.mxfp8(stochastic=True),
    "mxfp4": lambda: compress.error_feedback(compress.mxfp4()),
    "power_sgd": lambda: compress.power_sgd(2),
    "power_sgd, mxfp4": lambda: compress.power_sgd(2, values=compress.mxfp4()),
    "acp_sgd": lambda: compress.acp_sgd(2),
    "ef21": lambda: compress.ef21(compress.power_sgd(2, values=compress.mxfp4())),
    "warm_up": lambda: compress.warm_up(compress.top_k(0.1), 4),
    "sidco": lambda: compress.sidco(0.05),
}
SUMMED_ONLY = ("power_sgd", "power_sgd, mxfp4", "acp_sgd", "ef21")
RESUMED = [(method, "auto") for method in METHODS]


RESUMED += [(method, "two_shot") for method in METHODS if method not in SUMMED_ONLY]


@pytest.mark.few(8)
@pytest.mark.parametrize(("method", "exchange"), RESUMED)
def test_a_resumed_run_is_bitwise_the_same(method: str, exchange: str) -> None:
    def run(network: LoopbackExchange) -> bool:
        through = Job(network, METHODS[method](), exchange).steps(range(6))
        first = Job(network, METHODS[method](), exchange)
        first.steps(range(3))
        saved = io.BytesIO()
        torch.save(first.sync.memories.state_dict(), saved)
        saved.seek(0)
        state = torch.load(saved, weights_only=True)
        second = Job(network, METHODS[method](), exchange)
        second.sync.memories.check_state(state)
        second.sync.memories.load_state_dict(state)
        rest = second.steps(range(3, 6))
        assert same(state, first.sync.memories.state_dict()), "a state that was loaded belongs to the caller"
        return all(same(mine, theirs) for mine, theirs in zip(rest, through[3:], strict=True))

    assert on_ranks(2, run) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_a_mean_has_the_same_bits_whatever_else_travels(method: str, world_size: int) -> None:
    """DDP has other buckets in the first step, so nothing else would resume to the bit."""

    def run(network: LoopbackExchange) -> bool:
        together, apart = (Job(network, METHODS[method]()) for _ in range(2))
        means = together.steps(range(3))
        for step in range(3):
            gradients = apart.gradients(step)
            for name in reversed(apart.sync.plans):
                apart.sync.synchronize(apart.lane, [(name, gradients[name])], [])
            apart.sync.finish_step()
            if not all(torch.equal(gradients[name], means[step][name]) for name in apart.sync.plans):
                return False
        return True

    assert all(on_ranks(world_size, run))


def test_small_parameters_are_exact() -> None:
    def run(network: LoopbackExchange) -> Tensor:
        job = Job(network, compress.top_k(0.01))
        assert list(job.sync.plans) == ["a.weight", "b.weight"]
        return job.step(job.gradients(0))["b.bias"]

    dense = on_ranks(3, lambda network: Job(network, Identity()).gradients(0)["b.bias"])
    for mean in on_ranks(3, run):
        torch.testing.assert_close(mean, sum(dense) / 3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize(("dtype", "rounds"), [(torch.float32, 2), (torch.float64, 3), (torch.bfloat16, 3)])
def test_small_parameters_ride_in_the_first_round_of_an_all_reduce(
    world_size: int, dtype: torch.dtype, rounds: int
) -> None:
    """P and the others, then Q; where that would not be in their own dtype, the others have a round of their own."""

    def run(network: LoopbackExchange) -> Tensor:
        sizes: list[int] = []
        job = Job(network, compress.power_sgd(2), scaler=Scaler(), dtype=dtype)
        original = job.network.all_reduce
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job.network, "all_reduce", lambda tensor: sizes.append(tensor.numel()) or original(tensor))
            mean = job.step(job.gradients(0))["b.bias"]
        assert len(sizes) == rounds
        assert sum(sizes) == 2 * (40 + 30 + 64 + 33) + 64
        rows = {name: record.row() for name, record in job.records.items()}
        assert sum(int(row["total_bytes"]) for row in rows.values()) == network.traffic.sent_bytes
        assert rows[OTHERS]["total_bytes"] == -(-2 * (world_size - 1) * 64 * dtype.itemsize // world_size)
        return mean

    dense = on_ranks(world_size, lambda network: Job(network, Identity(), dtype=dtype).gradients(0)["b.bias"])
    for mean in on_ranks(world_size, run):
        exact = torch.stack([gradient.double() for gradient in dense]).mean(0)
        worst = world_size * torch.finfo(dtype).eps * max(gradient.abs().max().item() for gradient in dense)
        assert (mean.double() - exact).abs().max() <= worst, "every addition rounds once"


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["a.weight", "b.bias"])
def test_one_rank_without_finite_gradients(poison: float, where: str) -> None:
    """All ranks get NaN, no memory changes, and the next step is as if nothing had been."""

    def run(network: LoopbackExchange) -> Any:
        job = Job(network, compress.top_k(0.1))
        job.step(job.gradients(0))
        before = copied(job.sync.memories.state_dict()["states"])
        gradients = job.gradients(1)
        if network.rank == 1:
            gradients[where].view(-1)[5] = poison
        means = job.step(gradients)
        assert same(before, job.sync.memories.state_dict()["states"])
        assert all(bool(torch.isnan(means[name]).all()) for name in job.sync.plans)
        assert bool(torch.isfinite(means["b.bias"]).all()) == (where != "b.bias")
        assert job.sync.stats()["compress/nonfinite_steps"] == 1.0
        return job.step(job.gradients(2))

    def undisturbed(network: LoopbackExchange) -> Any:
        job = Job(network, compress.top_k(0.1))
        return job.steps([0, 2])[-1]

    for mine, theirs in zip(on_ranks(3, run), on_ranks(3, undisturbed), strict=True):
        assert same(mine, theirs)


def test_memories_are_kept_without_the_loss_scale() -> None:
    """A scale that changes between steps makes no difference."""
    scales = (1024.0, 1024.0, 512.0, 2048.0)

    def scaled(network: LoopbackExchange) -> Any:
        scaler = Scaler()
        job = Job(network, compress.top_k(0.1), scaler=scaler)
        found = []
        for step, scaler.scale in enumerate(scales):
            means = job.step(job.gradients(step, scaler.scale))
            found.append({name: mean / scaler.scale for name, mean in means.items()})
        return found

    plain = on_ranks(2, lambda network: Job(network, compress.top_k(0.1)).steps(range(4)))
    for mine, theirs in zip(on_ranks(2, scaled), plain, strict=True):
        assert all(same(one, other) for one, other in zip(mine, theirs, strict=True))


def test_a_step_that_overflowed_leaves_all_memories_as_they_were() -> None:
    """Of two buckets one was finite and went out; the scaler skips the step, so it must come again."""

    def run(network: LoopbackExchange) -> None:
        scaler = Scaler()
        job = Job(network, compress.top_k(0.1), scaler=scaler)
        job.step(job.gradients(0, 1024.0))
        before = copied(job.sync.memories.state_dict()["states"])
        overflow_in_second(job)
        assert not same(before, job.sync.memories.states)
        scaler.scale = 512.0
        assert same(before, job.sync.memories.state_dict()["states"])

    run_ranks_without_result(2, run)


def overflow_in_second(job: Job) -> dict[str, Tensor]:
    """Average the gradients of a step in two jobs, of which only the first is finite."""
    means = job.gradients(1, 1024.0)
    if job.network.rank == 0:
        means["a.weight"][0, 0] = float("inf")
    for name in ("b.weight", "a.weight"):
        job.sync.synchronize(job.lane, [(name, means[name])], [])
    job.sync.finish_step()
    return means


def test_what_one_of_two_optimizers_applied_in_a_step_that_overflowed_is_sent_once() -> None:
    """A scaler has only those skip the step whose own gradients are not finite."""

    def run(network: LoopbackExchange) -> tuple[Tensor, Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        job = Job(network, compress.top_k(0.1), scaler=scaler)
        scaler.scale(torch.zeros(()))  # which makes its scale
        weights = {name: nn.Parameter(torch.zeros(plan.parameter.shape)) for name, plan in job.sync.plans.items()}
        optimizers = {name: torch.optim.SGD([weight], lr=1.0) for name, weight in weights.items()}
        for name, optimizer in optimizers.items():
            optimizer.register_step_pre_hook(lambda optimizer, *_, name=name: job.sync.commit(optimizer, [name]))
        for name, mean in overflow_in_second(job).items():
            if name in weights:
                weights[name].grad = mean
                scaler.step(optimizers[name])
        scaler.update()
        assert not weights["a.weight"].any(), "its optimizer is skipped"
        kept = job.sync.memories.state_dict()["states"]
        assert not kept["a.weight"]["error"].any()
        return weights["b.weight"].detach(), kept["b.weight"]["error"]

    gradients = on_ranks(2, lambda network: Job(network, Identity()).gradients(1)["b.weight"])
    (applied, one), (_, other) = on_ranks(2, run)
    torch.testing.assert_close((one + other) / 2 - applied, sum(gradients) / 2)


def test_a_step_that_is_skipped_for_another_gradient_leaves_all_memories_as_they_were() -> None:
    """All that was compressed was finite, in two passes; a table was not, and the scaler lowers its scale."""

    def run(network: LoopbackExchange) -> None:
        scaler = Scaler()
        job = Job(network, compress.top_k(0.1), scaler=scaler)
        job.step(job.gradients(0, 1024.0))
        before = copied(job.sync.memories.state_dict()["states"])
        for number in (1, 2):
            gradients = job.gradients(number, 1024.0)
            job.sync.synchronize(job.lane, [(name, gradients[name]) for name in ("a.weight", "b.weight")], [])
            job.sync.finish_step()
        assert not same(before, job.sync.memories.state_dict()["states"])
        scaler.scale = 512.0
        assert same(before, job.sync.memories.state_dict()["states"])
        job.step(job.gradients(3, 512.0))
        after = copied(job.sync.memories.state_dict()["states"])
        scaler.scale = 256.0  # by hand: the optimizer has made the step
        assert same(after, job.sync.memories.state_dict()["states"])

    run_ranks_without_result(2, run)


@pytest.mark.parametrize(
    ("compressor", "counts"),
    [
        (compress.sign_sgd(), True),
        (compress.sign_sgd(0.9), True),
        (compress.dgc(0.05), True),
        (compress.warm_up(compress.momentum_correction(compress.top_k(0.1)), 4), True),
        (compress.momentum_correction(compress.top_k(0.1), 0.0), False),
        (compress.ef_sign_sgd(), False),
    ],
)
def test_a_second_pass_for_one_step_is_warned_of_once_where_each_counts_as_a_step(
    compressor: Compressor, counts: bool
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def run(network: LoopbackExchange) -> None:
        scaler = Scaler()
        job = Job(network, {"*.weight": compressor}, scaler=scaler)

        def passes(count: int) -> None:
            for number in range(count):
                gradients = job.gradients(number)
                job.sync.synchronize(job.lane, [(name, gradients[name]) for name in job.sync.plans], [])
                job.sync.finish_step()

        passes(1)
        scaler.scale = 512.0  # so the optimizer was skipped
        passes(1)
        job.sync.commit(optimizer, ["b.weight", "a.weight", "b.bias"])
        assert not caught, "one pass for each step"
        for _ in range(2):
            passes(2)
            job.sync.commit(optimizer, ["b.weight", "a.weight", "b.bias"])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks_without_result(1, run)
    assert len(caught) == counts, caught
    for warning in caught:
        assert "SGD steps after several synchronized backward passes" in str(warning.message)
        assert f"{compressor.name} of parameter 'b.weight'" in str(warning.message)


def run_ranks_without_result(world_size: int, function: Callable[[LoopbackExchange], None]) -> None:
    for outcome in run_ranks(world_size, function):
        if outcome.error is not None:
            raise outcome.error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_worked_on_in_their_working_dtype(dtype: torch.dtype) -> None:
    def run(network: LoopbackExchange) -> dict[str, Tensor]:
        job = Job(network, compress.top_k(0.2), dtype=dtype)
        means = job.step(job.gradients(0))
        state = job.sync.memories.state_dict()["states"]["a.weight"]
        assert state["error"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        return means

    means = on_ranks(2, run)
    for name in ("a.weight", "b.weight", "b.bias"):
        assert means[0][name].dtype == dtype
        assert torch.equal(means[0][name], means[1][name])


@pytest.mark.parametrize("scaler", [None, Scaler()])
def test_memories_beyond_float16_make_no_gradient_infinite_without_a_scaler(scaler: Scaler | None) -> None:
    """With one they do: it skips the step, takes a smaller scale, and memories stay as they were."""

    def run(network: LoopbackExchange) -> list[dict[str, Tensor]]:
        job = Job(network, compress.top_k(0.5), dtype=torch.float16, scaler=scaler)
        gradients = {name: torch.full_like(one, 40000.0) for name, one in job.gradients(0).items()}
        return [job.step(copied(gradients)) for _ in range(2)]

    for _, means in on_ranks(2, run):
        largest = max(float(mean.max()) for name, mean in means.items() if name.endswith("weight"))
        assert largest == (65504.0 if scaler is None else float("inf"))


def test_a_float16_gradient_that_is_not_finite_is_seen() -> None:
    """Beside compressed ones, and in a compressed one itself: training has diverged."""

    def run(network: LoopbackExchange) -> dict[str, Tensor]:
        job = Job(network, compress.leave_small(compress.top_k(0.5)), dtype=torch.float16)
        gradients = job.gradients(0)
        for gradient in gradients.values():
            gradient.view(-1)[:1] = float("inf") if network.rank else 1.0
        return job.step(gradients)

    for means in on_ranks(2, run):
        assert not any(mean.view(-1)[0].isfinite() for mean in means.values())
        assert means["b.bias"].view(-1)[0] == float("inf")


@pytest.mark.parametrize("exchange", ["auto", "two_shot", "zen"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_account_adds_up(exchange: str, world_size: int) -> None:
    def run(network: LoopbackExchange) -> None:
        job = Job(network, compress.top_k(0.1), exchange)
        job.steps(range(3))
        rows = {name: record.row() for name, record in job.records.items()}
        assert sum(int(row["total_bytes"]) for row in rows.values()) == network.traffic.sent_bytes
        assert job.sync.stats()["compress/bytes_sent"] == network.traffic.sent_bytes
        for name in job.sync.plans:
            row = rows[name]
            assert (row["kind"], row["formats"]) == ("compressed", "error_feedback(top_k(0.1))")
            assert row["scheme"] == ("all_gather" if exchange == "auto" else exchange)
            assert row["density"] == pytest.approx(0.1, abs=0.01)
            assert row["dense_bytes"] > row["bytes"] or world_size == 1
            if exchange == "zen":
                assert row["bytes"] == pytest.approx(row["predicted_bytes"], rel=0.1)
            else:
                assert abs(int(row["bytes"]) - int(row["predicted_bytes"])) <= 1  # both are shared out
        assert rows[OTHERS]["bytes"] == rows[OTHERS]["predicted_bytes"]

    run_ranks_without_result(world_size, run)


def test_ranks_that_compress_differently_are_told() -> None:
    def run(network: LoopbackExchange) -> None:
        Job(network, compress.top_k(0.1 if network.rank else 0.2)).steps([0])

    for outcome in run_ranks(2, run):
        assert isinstance(outcome.error, MismatchError)
        assert "top_k(0.1)" in str(outcome.error)


def test_states_of_something_else_are_refused() -> None:
    def run(network: LoopbackExchange) -> None:
        job = Job(network, compress.top_k(0.1))
        state = job.sync.memories.state_dict()
        before = copied(state["states"])
        other = Job(network, compress.qsgd())
        refusals = [
            (other.sync.memories.state_dict(), "error_feedback\\(top_k\\(0.1\\)\\) by all_gather here, and was qsgd"),
            (Job(network, compress.top_k(0.1), "two_shot").sync.memories.state_dict(), "was .* by two_shot"),
            (Job(network, {"a.*": compress.top_k(0.1)}).sync.memories.state_dict(), "was not compressed"),
            (state | {"world_size": 5}, "redistribute"),
            (state | {"rank": 1 - network.rank}, "memories of its own"),
            (state | {"states": state["states"] | {"a.weight": {}}}, "one of the states only"),
            (
                state | {"states": state["states"] | {"a.weight": {"error": torch.zeros(2, 2), "inner": {}}}},
                r"float32 \[2, 2\] in the state, and a tensor of float32 \[40, 30\] here",
            ),
        ]
        for refused, reason in refusals:
            with pytest.raises(ValueError, match=reason):
                job.sync.memories.check_state(refused)
        assert same(before, job.sync.memories.state_dict()["states"])

    run_ranks_without_result(2, run)


def own_compressor() -> Compressor:
    """The one of docs/guides/compression.md, as it is there."""
    text = (Path(__file__).parents[2] / "docs" / "guides" / "compression.md").read_text()
    code = text.split("## Your own compressor")[1].split("```python")[1].split("```")[0]
    names: dict[str, Any] = {"__name__": "own"}
    exec(compile(code, "docs/guides/compression.md", "exec", dont_inherit=True), names)
    return names["RowMeans"]()


@pytest.mark.parametrize("exchange", ["all_reduce", "all_gather"])
def test_the_compressor_of_the_documentation_is_averaged(exchange: str) -> None:
    compressor, parameter = with_memory(own_compressor()), Parameter("weight", (6, 4))
    assert isinstance(compressor, ErrorFeedback)
    assert reduction_for("auto", compressor, parameter, 2).name == "all_reduce"
    with pytest.raises(ValueError, match="cannot be compressed for itself"):
        reduction_for("two_shot", compressor, parameter, 2)
    reduction = reduction_for(exchange, compressor, parameter, 2)

    def run(network: LoopbackExchange) -> Tensor:
        channel = Channel(network, Subject("weight", "the same on all ranks"), 0)
        channel.open()
        state = reduction.init(compressor, parameter, network.rank, 2)
        gradient = torch.arange(4.0).repeat(6, 1) + network.rank
        (result,) = reduction.run(
            [Task(compressor, parameter, gradient, state)], ChannelPeers(channel, lambda subject: channel), Stopwatch()
        )
        assert torch.equal(state["error"], torch.arange(4.0).repeat(6, 1) - 1.5), "what is not the mean of its row"
        return result.mean

    for outcome in run_ranks(2, run):
        assert torch.equal(outcome.get(), torch.full((6, 4), 2.0))
