"""Which rows a gradient can have: known for every kind of lookup, and only when it is certain; sums stay exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinwire.gradients.tables import LookupRows

ROWS = 600


class Shifted(nn.Embedding):
    """Looks up another id than it was given, and scales what it finds."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + 1) * 3.0


class Bare(nn.Module):
    """A table that is a parameter of the user's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, 16))
        self.other = nn.Parameter(torch.randn(ROWS, 16))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(F.embedding(ids, self.weight)).sum() + self.other.square().sum()


class Model(nn.Module):
    """Tables under names, and a forward that is given."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **tables: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, table in tables.items():
            self.add_module(name, table)

    def forward(self, ids: Tensor) -> Tensor:
        return self.run(self, ids)


def embedding(**options: Any) -> nn.Embedding:
    return nn.Embedding(ROWS, 16, **options)


def bags(module: Any, ids: Tensor) -> Tensor:
    """Three lookups of one table in bags, and weights for one of them."""
    weights = torch.linspace(0.5, 2.0, ids.numel())
    first = module.table(ids.view(2, -1), per_sample_weights=weights.view(2, -1))
    third = F.embedding_bag(ids.view(6, -1), module.table.weight)
    return first.square().sum() + module.table(ids.view(3, -1)).sum() + third.sum()


def towers(module: Any, ids: Tensor) -> Tensor:
    return (module.table(ids) - module.table(ids.flip(0) // 2)).square().sum()


def five(module: Any, ids: Tensor) -> Tensor:
    return torch.stack([(module.table(ids // k) ** k).sum() for k in range(1, 6)]).sum()


def functional(module: Any, ids: Tensor) -> Tensor:
    return F.embedding(ids, module.table.weight).square().sum() + module.table(ids // 2).sum()


CASES: dict[str, Callable[[], nn.Module]] = {
    "one": lambda: Model(lambda m, ids: m.table(ids).sum(), table=embedding()),
    "two towers": lambda: Model(towers, table=embedding()),
    "same batch twice": lambda: Model(lambda m, ids: (m.table(ids) * m.table(ids)).sum(), table=embedding()),
    "five": lambda: Model(five, table=embedding()),
    "padding": lambda: Model(towers, table=embedding(padding_idx=7)),
    "norm": lambda: Model(towers, table=embedding(max_norm=1.0)),
    "frequency": lambda: Model(towers, table=embedding(scale_grad_by_freq=True)),
    "bags": lambda: Model(bags, table=nn.EmbeddingBag(ROWS, 16, mode="sum")),
    "maxima": lambda: Model(lambda m, ids: m.table(ids.view(2, -1)).sum(), table=nn.EmbeddingBag(ROWS, 16, mode="max")),
    "subclass": lambda: Model(towers, table=Shifted(ROWS, 16)),
    "functional on a module's": lambda: Model(functional, table=embedding()),
    "functional on a parameter": Bare,
    "half": lambda: Model(towers, table=embedding(dtype=torch.bfloat16)),
}


def batch(step: int) -> Tensor:
    data = torch.Generator().manual_seed(step)
    return torch.randint(0, ROWS - 1, (12 + 6 * step,), generator=data)


def weight_of(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


@pytest.mark.parametrize("case", CASES)
def test_rows_of_every_kind_of_lookup_are_known_and_the_sum_is_stock(case: str) -> None:
    torch.manual_seed(0)
    stock, model = CASES[case](), CASES[case]()
    model.load_state_dict(stock.state_dict())
    lookups = LookupRows(model)
    for step in range(4):
        for each in (stock, model):
            each.zero_grad()
            each(batch(step)).backward()
        weight, expected = weight_of(model), weight_of(stock).grad
        assert expected is not None
        assert weight.grad is not None
        assert torch.equal(weight.grad, expected)
        if step == 0 and isinstance(model, Bare):
            assert lookups.take(weight) is None
            assert lookups.looked_up == {id(weight)}
            lookups.adopt([weight])
            continue
        known = lookups.take(weight)
        assert known is not None
        touched = expected.float().abs().sum(1).nonzero().flatten().tolist()
        assert touched
        assert set(touched) <= set(known.tolist())
        assert len(known.unique()) <= 5 * batch(step).numel()
    lookups.remove()


# --- whatever else reaches the weight: the sum of stock, and rows that are not known


def tied(module: Any, ids: Tensor) -> Tensor:
    return (module.table(ids) @ module.table.weight.T).square().sum() + module.table(ids // 2).sum()


def dense_before(module: Any, ids: Tensor) -> Tensor:
    return module.table.weight[5:9].sum() + module.table(ids).square().sum() + module.table(ids // 2).sum()


def dense_after(module: Any, ids: Tensor) -> Tensor:
    return module.table(ids).square().sum() + module.table(ids // 2).sum() + module.table.weight.square().sum()


def reentrant(module: Any, ids: Tensor) -> Tensor:
    """A backward inside of the backward, which also looks up."""
    one = torch.ones(1, requires_grad=True)
    inner = checkpoint(lambda x: (module.table(ids) * x - module.table(ids // 3)).sum(), one, use_reentrant=True)
    return inner + module.table(ids).square().sum() + module.table(ids // 2).sum()


def recomputed(module: Any, ids: Tensor) -> Tensor:
    one = torch.ones(1, requires_grad=True)
    return (
        checkpoint(
            lambda x: (F.embedding(ids, module.table.weight) * x - module.table(ids // 3)).sum(),
            one,
            use_reentrant=False,
        )
        + module.table(ids // 2).sum()
    )


OTHERS = (tied, dense_before, dense_after, reentrant, recomputed)


@pytest.mark.parametrize("run", OTHERS)
def test_any_other_use_gives_the_sum_of_stock(run: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    stock, model = Model(run, table=embedding()).double(), Model(run, table=embedding()).double()
    model.load_state_dict(stock.state_dict())
    lookups = LookupRows(model)
    for step in range(3):
        for each in (stock, model):
            each.zero_grad()
            each(batch(step)).backward()
        weight, expected = weight_of(model), weight_of(stock).grad
        torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-12)
        known = lookups.take(weight)
        if known is not None:
            assert run is recomputed
            assert expected is not None
            assert set(expected.abs().sum(1).nonzero().flatten().tolist()) <= set(known.tolist())
    lookups.remove()


def two(model: nn.Module, ids: Tensor) -> Tensor:
    return (model(ids) - model(ids // 2)).square()


def looked_up(model: Any, ids: Tensor) -> Tensor:
    return model.table(ids).square().sum()


def test_gradients_that_no_parameter_accumulates() -> None:
    """`torch.autograd.grad` in the weight, of second order, and of other leaves; and a hook of a user from before."""
    torch.manual_seed(0)
    seen: list[Tensor] = []
    for hooked in (False, True):
        model = Model(looked_up, table=embedding())
        weight = weight_of(model)
        if hooked:
            weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
        expected = torch.autograd.grad(two(model, batch(0)), weight)[0]
        second = torch.autograd.grad(two(model, batch(0)), weight, create_graph=True)[0].square().sum()
        second.backward()
        expected_second = weight.grad
        weight.grad = None
        lookups = LookupRows(model)
        assert torch.equal(torch.autograd.grad(two(model, batch(0)), weight)[0], expected)
        second = torch.autograd.grad(two(model, batch(0)), weight, create_graph=True)[0].square().sum()
        second.backward()
        torch.testing.assert_close(weight.grad, expected_second)
        weight.grad = None
        two(model, batch(0)).backward()
        torch.testing.assert_close(weight.grad, expected)
        assert (lookups.take(weight) is None) == hooked
        lookups.remove()
    assert all(torch.equal(entry * 2, expected) for entry in (seen[0], seen[-1]))


def fails(gradient: Tensor) -> None:
    raise FloatingPointError


def test_a_backward_that_failed_leaves_nothing_for_the_next() -> None:
    model = Model(lambda m, ids: (m.table(ids), m.table(ids // 2)), table=embedding())  # type: ignore[arg-type,return-value]
    lookups = LookupRows(model)
    first, second = model(batch(1))
    first.register_hook(fails)  # the second lookup, whose backward is the first, is done by then
    with pytest.raises(FloatingPointError):
        (first.sum() + second.sum()).backward()
    weight = weight_of(model)
    assert weight.grad is None
    model(batch(0))[0].sum().backward()
    expected = torch.zeros(ROWS, 16).index_add_(0, batch(0), torch.ones(12, 16))
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)
    lookups.remove()


def test_a_model_without_bare_lookups_is_searched_once() -> None:
    model = nn.Sequential(embedding(), nn.Linear(16, 4))
    lookups = LookupRows(model)
    before = len(model._forward_hooks)
    model(batch(0)).sum().backward()
    assert len(model._forward_hooks) == before - 1
    assert not lookups.candidates
    lookups.remove()
