"""PowerSGD, ACP-SGD and ATOMO: against their papers, against torch's hook, and at their limits."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.compress.factored import SUMMED, all_reduced, every_method, gradients_of, mean_of, states_of
from thinwire import compress
from thinwire.compress.base import Compressor, Parameter, Payload, State
from thinwire.compress.memory import ErrorFeedback
from thinwire.compress.methods.low_rank import LowRank, matrix_shape, next_basis, orthonormal, probabilities
from thinwire.compress.named import parse
from thinwire.compress.reductions.base import salted
from thinwire.compress.wrappers import summable_code
from thinwire.errors import CorruptMessageError

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SHAPES = ((0,), (), (7,), (0, 5), (5, 0), (1023,), (37, 53), (64, 3, 5, 5), (53, 1), (1, 53))
every_summed = pytest.mark.parametrize("method", SUMMED, ids=lambda method: method.name)


def low_rank_gradients(parameter: Parameter, rank: int, world_size: int, seed: int = 0) -> list[Tensor]:
    """Of which the mean has this rank."""
    generator = torch.Generator().manual_seed(seed)
    n, m = matrix_shape(parameter)
    right = torch.randn(rank, m, generator=generator)
    return [(torch.randn(n, rank, generator=generator) @ right).view(parameter.shape) for _ in range(world_size)]


@every_method
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(method: LowRank, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parameter = Parameter("weight", shape, dtype)
    with_memory = ErrorFeedback(method)
    states = states_of(with_memory, parameter, 3)
    for step in range(3):
        gradients = gradients_of(parameter, 3, step)
        before = [gradient.clone() for gradient in gradients]
        corrected = mean_of([state["error"] + g for state, g in zip(states, gradients, strict=True)])
        mean = all_reduced(with_memory, gradients, parameter, states)
        assert (mean.shape, mean.dtype) == (parameter.shape, parameter.working_dtype)
        assert all(map(torch.equal, gradients, before)), "gradients are not written to"
        kept = mean_of([state["error"] for state in states])
        assert torch.allclose(mean + kept, corrected, atol=1e-5), "nothing is lost"
        assert all(set(state["inner"]) <= {"step", "p", "q"} for state in states), "nothing is left between steps"
        if method.rank_of(parameter) == 0:
            assert torch.allclose(mean, mean_of(gradients), atol=1e-6)
            assert not any(state["error"].any() for state in states), "what was sent whole leaves nothing"


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (9, 2, 5)], ids=str)
def test_full_rank_equals_dense(shape: tuple[int, ...]) -> None:
    """To rounding, from the first step on: M Q of an orthonormal square Q spans all columns."""
    parameter = Parameter("weight", shape)
    method = compress.power_sgd(100, min_compression_rate=0.0)
    assert method.rank_of(parameter) == min(matrix_shape(parameter))
    states = states_of(method, parameter, 3)
    for step in range(3):
        gradients = gradients_of(parameter, 3, step)
        mean = all_reduced(method, gradients, parameter, states)
        assert torch.allclose(mean, mean_of(gradients), atol=3e-6)


def test_acp_of_full_rank_equals_dense_where_the_basis_is_square() -> None:
    method, parameter = compress.acp_sgd(100, min_compression_rate=0.0), Parameter("weight", (8, 8))
    states = states_of(method, parameter, 3)
    for step in range(4):
        gradients = gradients_of(parameter, 3, step)
        mean = all_reduced(method, gradients, parameter, states)
        assert torch.allclose(mean, mean_of(gradients), atol=3e-6)


@every_summed
def test_a_gradient_of_that_rank_is_exact(method: LowRank) -> None:
    """PowerSGD in one step; ACP-SGD needs one more to find the basis."""
    parameter = Parameter("weight", (40, 60))
    gradients = low_rank_gradients(parameter, 2, 3)
    states = states_of(method, parameter, 3)
    errors = [
        float((all_reduced(method, gradients, parameter, states) - mean_of(gradients)).abs().max()) for _ in range(4)
    ]
    assert max(errors[2:]) < 1e-4
    assert errors[0] < 1e-4 or method.label == "acp_sgd"


def parts_of(parameter: Parameter, step: int) -> tuple[list[Tensor], list[Tensor]]:
    """What gradients of three ranks are made of: a part that stays, and one of each step."""
    return low_rank_gradients(parameter, 6, 3), gradients_of(parameter, 3, step)


class Model:
    """Algorithms 1 and 2 of PowerSGD, line by line, for ranks that share a thread, in float64."""

    def __init__(self, q: Tensor, world_size: int, n: int) -> None:
        self.q = q
        self.errors = [torch.zeros(n, q.shape[0], dtype=torch.float64) for _ in range(world_size)]

    def step(self, gradients: list[Tensor]) -> Tensor:
        deltas = [gradient.double() + error for gradient, error in zip(gradients, self.errors, strict=True)]
        p = torch.linalg.qr(mean_of([delta @ self.q for delta in deltas]))[0]
        self.q = mean_of([delta.t() @ p for delta in deltas])
        approximation = p @ self.q.t()
        self.errors = [delta - approximation for delta in deltas]
        return approximation


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_power_sgd_equals_a_model_of_the_paper(rank: int) -> None:
    parameter = Parameter("weight", (48, 64))
    method = ErrorFeedback(compress.power_sgd(rank))
    states = states_of(method, parameter, 3)
    model = Model(states[0]["inner"]["q"].t().double(), 3, 48)
    for step in range(8):
        gradients = [g + 0.5 * s for g, s in zip(*parts_of(parameter, step), strict=True)]
        mean, expected = all_reduced(method, gradients, parameter, states), model.step(gradients)
        assert float((mean - expected).norm() / expected.norm()) < 1e-4
        for state, error in zip(states, model.errors, strict=True):
            assert float((state["error"] - error).norm() / error.norm()) < 1e-4


def test_acp_sgd_equals_a_model_of_the_paper() -> None:
    parameter, method = Parameter("weight", (48, 64)), ErrorFeedback(compress.acp_sgd(4))
    states = states_of(method, parameter, 3)
    p, q = (states[0]["inner"][name].t().double() for name in "pq")
    errors = [torch.zeros(48, 64, dtype=torch.float64) for _ in range(3)]
    for step in range(6):
        gradients = [g + 0.5 * s for g, s in zip(*parts_of(parameter, step), strict=True)]
        deltas = [gradient.double() + error for gradient, error in zip(gradients, errors, strict=True)]
        if step % 2 == 0:
            q = torch.linalg.qr(q)[0]
            local = [delta @ q @ q.t() for delta in deltas]
            p = mean_of([delta @ q for delta in deltas])
        else:
            p = torch.linalg.qr(p)[0]
            local = [p @ p.t() @ delta for delta in deltas]
            q = mean_of([delta.t() @ p for delta in deltas])
        errors = [delta - sent for delta, sent in zip(deltas, local, strict=True)]
        mean, expected = all_reduced(method, gradients, parameter, states), p @ q.t()
        assert float((mean - expected).norm() / expected.norm()) < 1e-4
        for state, error in zip(states, errors, strict=True):
            assert float((state["error"] - error).norm() / error.norm()) < 1e-4


@pytest.mark.parametrize("rank", [1, 4])
def test_power_sgd_equals_the_hook_of_torch(rank: int) -> None:
    """One rank, the same first Q: the same gradients and errors, step by step."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    parameter = Parameter("weight", (48, 64))
    method = ErrorFeedback(compress.power_sgd(rank))
    (state,) = states_of(method, parameter, 1)
    error, q = torch.zeros(48, 64), state["inner"]["q"].t().clone()
    for step in range(5):
        (gradient,) = low_rank_gradients(parameter, 6, 1, step)
        matrix = (gradient + error)[None]
        q = q[None].clone()
        hook._orthogonalize(q)
        p = torch.bmm(matrix, q)
        hook._orthogonalize(p)
        q = torch.bmm(matrix.transpose(1, 2), p)
        expected = torch.bmm(p, q.transpose(1, 2))[0]
        q, error = q[0], matrix[0] - expected
        mean = all_reduced(method, [gradient], parameter, [state])
        assert float((mean - expected).norm() / expected.norm()) < 1e-4
        assert torch.allclose(state["error"], error, atol=1e-3)


@every_method
def test_the_memory_stays_bounded_and_everything_arrives(method: LowRank) -> None:
    """Of a constant gradient the mean of what arrived comes near it."""
    parameter, world_size, steps = Parameter("weight", (32, 48)), 2, 200
    with_memory = ErrorFeedback(method)
    gradients, states = gradients_of(parameter, world_size), states_of(with_memory, parameter, world_size)
    total = torch.zeros(parameter.shape)
    for _ in range(steps):
        total += all_reduced(with_memory, gradients, parameter, states)
    target = mean_of(gradients)
    assert float((total / steps - target).norm() / target.norm()) < 0.15


@every_summed
@pytest.mark.parametrize("fill", [0.0, 2.5, 1e30, 1e-38, 1e-42])
def test_constants_of_every_size(method: LowRank, fill: float) -> None:
    parameter = Parameter("weight", (40, 60))
    gradient = torch.full(parameter.shape, fill)
    states = states_of(method, parameter, 2)
    for _ in range(3):
        mean = all_reduced(method, [gradient, gradient], parameter, states)
        assert bool(mean.isfinite().all())
    assert torch.allclose(mean / fill if fill else mean, gradient / fill if fill else gradient, rtol=0.01, atol=0.01)


@every_summed
def test_rows_and_columns_that_were_zero_are_found_later(method: LowRank) -> None:
    """Torch's hook divides by zero here. A basis made of zeros must not hide what comes after them."""
    parameter = Parameter("weight", (40, 60))
    states = states_of(method, parameter, 1)
    for _ in range(3):
        assert not all_reduced(method, [torch.zeros(40, 60)], parameter, states).any()
    gradient = torch.zeros(40, 60)
    gradient[30, 50] = 1.0
    for _ in range(3):
        mean = all_reduced(method, [gradient], parameter, states)
    assert torch.allclose(mean, gradient, atol=1e-4)


def test_what_saves_too_little_is_sent_whole() -> None:
    """The rule of torch's hook: rank (n + m) rate < n m."""
    method = compress.power_sgd(4)
    sizes = {(32, 32): 4, (16, 16): 0, (17, 17): 4, (1000,): 0, (1000, 1): 0, (3, 4000): 0, (64, 3, 7, 7): 4, (): 0}
    assert {shape: method.rank_of(Parameter("weight", shape)) for shape in sizes} == sizes
    assert compress.power_sgd(4, min_compression_rate=10).rank_of(Parameter("weight", (32, 32))) == 0


def test_a_rank_above_the_smaller_side_is_cut_to_it() -> None:
    assert compress.power_sgd(64, min_compression_rate=0.0).rank_of(Parameter("weight", (5, 9))) == 5
    assert compress.power_sgd(64).rank_of(Parameter("weight", (5, 9))) == 0


@every_method
def test_dense_steps_come_first_and_leave_nothing(method: LowRank) -> None:
    from dataclasses import replace

    parameter = Parameter("weight", (40, 60))
    started = ErrorFeedback(replace(method, start_step=2))
    states = states_of(started, parameter, 2)
    for step in range(4):
        gradients = gradients_of(parameter, 2, step)
        mean = all_reduced(started, gradients, parameter, states)
        exact = torch.allclose(mean, mean_of(gradients), atol=1e-6)
        assert exact == (step < 2)
        assert any(bool(state["error"].any()) for state in states) == (step >= 2)
    code = summable_code(started)
    assert code.packed_bytes(parameter) is None
    assert code.round_specs(parameter)[0][0].numel is None


@every_method
def test_a_state_that_was_saved_continues_bitwise(method: LowRank) -> None:
    parameter, with_memory = Parameter("weight", (40, 60)), ErrorFeedback(method)
    states = states_of(with_memory, parameter, 2)
    for step in range(3):
        all_reduced(with_memory, gradients_of(parameter, 2, step), parameter, states)
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for step in range(3, 6):
        gradients = gradients_of(parameter, 2, step)
        one = all_reduced(with_memory, gradients, parameter, states)
        assert torch.equal(one, all_reduced(with_memory, gradients, parameter, loaded))


def test_few_bits_cost_little_more_rounds_of_feedback() -> None:
    """Of a gradient of that rank and a tenth of noise, most arrives in one step, and nearly all in a few."""
    parameter, method = Parameter("weight", (64, 96)), ErrorFeedback(compress.power_sgd(4, values=compress.mxfp4()))
    constant = low_rank_gradients(parameter, 4, 3)
    states, total = states_of(method, parameter, 3), torch.zeros(parameter.shape)
    errors = []
    for step in range(1, 9):
        total += all_reduced(method, constant, parameter, states)
        errors.append(float((total / step - mean_of(constant)).norm() / mean_of(constant).norm()))
    assert errors[0] < 0.25
    assert errors[-1] < 0.04


def test_a_rank_below_one_is_a_part_of_the_smaller_side() -> None:
    method = compress.power_sgd(0.1)
    sizes = {(512, 512): 51, (512, 128): 13, (128, 512): 13, (8, 4000): 1, (1000,): 0, (64, 3, 7, 7): 6}
    assert {shape: method.rank_of(Parameter("weight", shape)) for shape in sizes} == sizes
    assert method.name == "power_sgd(0.1)"
    text = "power_sgd(0.1, values=mxfp4(e2m1))"
    assert parse("power_sgd:rank=0.1:values=mxfp4").name == text


def test_first_bases_follow_from_the_seed_and_the_name() -> None:
    def first(method: Compressor, name: str) -> Tensor:
        return method.init(Parameter(name, (40, 60)))["q"]

    assert torch.equal(first(compress.power_sgd(2), "a"), first(compress.power_sgd(2), "a"))
    assert not torch.equal(first(compress.power_sgd(2), "a"), first(compress.power_sgd(2), "b"))
    assert not torch.equal(first(compress.power_sgd(2), "a"), first(compress.power_sgd(2, seed=1), "a"))


def test_the_bytes_of_power_sgd_are_those_of_both_factors() -> None:
    parameter = Parameter("weight", (512, 256))
    specs = compress.power_sgd(4).round_specs(parameter)
    assert [[spec.numel for spec in round] for round in specs] == [[4 * 512], [4 * 256]]
    assert compress.power_sgd(4).packed_bytes(parameter) == 8 + 16 * 512 + 8 + 16 * 256


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1.0, 1e30])
def test_orthonormal_rows(scale: float) -> None:
    rows = torch.randn(4, 50) * scale
    for made in (orthonormal(rows), orthonormal(torch.zeros(4, 50)), orthonormal(rows[:1].repeat(4, 1))):
        assert torch.allclose(made @ made.t(), torch.eye(4), atol=1e-5)
        assert made.is_contiguous()
    before = orthonormal(torch.randn(4, 50))
    assert torch.equal(next_basis(torch.zeros(4, 50), before), before)


def atomo_state(parameter: Parameter, rank: int = 0) -> State:
    return salted(compress.atomo(2).init(parameter), rank)


# ATOMO


def test_the_probabilities_of_atomo_add_up() -> None:
    for values in ([5.0, 1.0, 1.0, 1.0, 0.5], [100.0, 50.0, 1.0, 1e-3], [1.0] * 7, [1e30, 1e20, 1.0]):
        for rank in (1, 2, 3):
            chances = probabilities(torch.tensor(values, dtype=torch.float64), rank)
            assert float(chances.sum()) == pytest.approx(rank)
            assert bool(((chances > 0) | (rank > 1 and values[0] == 1e30)).all()), "all can be chosen, but for rounding"
            assert bool((chances <= 1).all())
            uncertain = chances < 1
            ratios = chances[uncertain] / torch.tensor(values, dtype=torch.float64)[uncertain]
            assert torch.allclose(ratios, ratios[:1].expand_as(ratios)), "in proportion to the singular values"
    assert probabilities(torch.tensor([3.0, 0.0, 0.0]), 2).tolist() == [1.0, 0.0, 0.0]
    assert probabilities(torch.zeros(3), 2).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.slow
def test_atomo_is_unbiased() -> None:
    """10 000 draws, at 4 sigma of each element."""
    method, parameter, draws = compress.atomo(2, min_compression_rate=1.0), Parameter("weight", (5, 6)), 10_000
    (gradient,) = gradients_of(parameter, 1)
    left, values, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    chances = probabilities(values, 2)
    state, total, components = atomo_state(parameter), torch.zeros(5, 6, dtype=torch.float64), 0
    for _ in range(draws):
        payload = method.compress(gradient, parameter, state)
        total += method.decompress(payload, parameter)
        components += payload.parts[1].numel() // 6
    variance = left.square() @ torch.diag(values.square() * (1 - chances) / chances) @ right.square()
    assert bool(((total / draws - gradient).abs() <= 4 * (variance / draws).sqrt()).all())
    spread = math.sqrt(float((chances * (1 - chances)).sum()))
    assert abs(components / draws - 2) < 4 * spread / math.sqrt(draws)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_atomo_travels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    method, parameter = compress.atomo(2), Parameter("weight", shape, dtype)
    (gradient,) = gradients_of(parameter, 1)
    payload = method.compress(gradient, parameter, atomo_state(parameter))
    unpacked = method.unpack(method.pack(payload, parameter), parameter)
    assert all(map(torch.equal, payload.parts, unpacked.parts))
    value = method.decompress(unpacked, parameter)
    assert (value.shape, value.dtype) == (parameter.shape, parameter.working_dtype)
    if method.rank_of(parameter) == 0:
        assert torch.equal(value, gradient)


@pytest.mark.parametrize("fill", [0.0, 2.5, 1e30, 1e-42])
def test_atomo_of_constants(fill: float) -> None:
    """Of rank one, so its only component is certain."""
    method, parameter = compress.atomo(2), Parameter("weight", (40, 60))
    gradient = torch.full((40, 60), fill)
    value = method.decompress(method.compress(gradient, parameter, atomo_state(parameter)), parameter)
    assert torch.allclose(value, gradient, rtol=0.01, atol=1e-3 * fill)


def test_ranks_of_atomo_draw_differently_and_equal_states_alike() -> None:
    method, parameter = compress.atomo(2), Parameter("weight", (40, 60))
    (gradient,) = gradients_of(parameter, 1)
    drawn = [method.compress(gradient, parameter, atomo_state(parameter, rank)).parts[0] for rank in (0, 0, 1, 2, 3)]
    assert torch.equal(drawn[0], drawn[1])
    assert any(part.shape != drawn[0].shape or not torch.equal(part, drawn[0]) for part in drawn[2:])


def test_atomo_refuses_what_no_rank_packs() -> None:
    method, parameter = compress.atomo(2), Parameter("weight", (40, 60))
    good = (torch.ones(2, 40), torch.ones(2, 60))
    bad = [
        (torch.ones(81), good[1]),
        (good[0], torch.ones(1, 60)),
        (torch.full((2, 40), math.nan), good[1]),
        (torch.full((2, 40), 3e38), good[1]),
        (good[0], 2 * good[1]),
        (good[0], torch.full((2, 60), math.nan)),
        (good[0], torch.ones(41, 60)),
    ]
    for parts in bad:
        data = method.pack(Payload(tuple(part.reshape(-1) for part in parts)), parameter)
        with pytest.raises(CorruptMessageError):
            method.unpack(data, parameter)
    data = method.pack(Payload(tuple(part.reshape(-1) for part in good)), parameter)
    assert bool(method.decompress(method.unpack(data, parameter), parameter).isfinite().all())
    for end in (0, 7, 8, 100, data.numel() - 8):
        with pytest.raises(CorruptMessageError):
            method.unpack(data[:end].clone(), parameter)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: compress.power_sgd(0), "rank of at least 1"),
        (lambda: compress.acp_sgd(-1), "rank of at least 1"),
        (lambda: compress.atomo(1.5), "rank of at least 1"),  # type: ignore[arg-type]
        (lambda: compress.power_sgd(min_compression_rate=-1.0), "at least 0"),
        (lambda: compress.power_sgd(min_compression_rate=math.nan), "at least 0"),
        (lambda: compress.power_sgd(start_step=-1), "step from 0 on"),
        (lambda: compress.power_sgd(1.0), "such as 0.1"),
        (lambda: compress.power_sgd(values=compress.mxfp4(stochastic=True)), "draws nothing, such as bf16"),
        (lambda: compress.power_sgd(values=compress.ef_sign_sgd()), "without a memory"),
        (lambda: compress.power_sgd(values=compress.top_k(0.1)), "element by element"),
    ],
)
def test_bad_settings_are_refused_with_advice(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
