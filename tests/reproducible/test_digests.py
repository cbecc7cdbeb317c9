"""Digests: what changes them, and what does not."""

from __future__ import annotations

import copy

import torch
from torch import nn

from thinwire.reproducible import digest
from thinwire.reproducible.digests import of_arithmetic, of_state, of_tensors


def flipped(tensor: torch.Tensor, bit: int) -> None:
    with torch.no_grad():
        tensor.view(-1)[3:4].view(torch.int32).bitwise_xor_(1 << bit)


def test_each_bit_name_shape_and_dtype_counts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    other = copy.deepcopy(model)
    assert digest(model) == digest(other)
    flipped(other[0].weight, 0)
    assert digest(model) != digest(other)
    flipped(other[0].weight, 0)
    assert digest(model) == digest(other)
    other[1].running_mean += 1
    assert digest(model) != digest(other)
    values = torch.zeros(6)
    found = {of_tensors([("a", values)]), of_tensors([("b", values)]), of_tensors([("a", values.view(2, 3))])}
    found |= {of_tensors([("a", values.int())]), of_tensors([("a", None)]), of_tensors([("a", -values)])}
    assert len(found) == 6


def test_a_sparse_tensor_counts_by_its_rows() -> None:
    table = torch.sparse_coo_tensor([[1, 0, 1]], torch.ones(3, 2), (4, 2), check_invariants=False)
    same = torch.sparse_coo_tensor([[0, 1]], torch.tensor([[1.0, 1.0], [2.0, 2.0]]), (4, 2), check_invariants=False)
    assert of_tensors([("", table)]) == of_tensors([("", same)])


def test_the_state_of_an_optimizer_counts() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = of_state(optimizer.state_dict())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    after = of_state(optimizer.state_dict())
    assert before != after == of_state(copy.deepcopy(optimizer.state_dict()))
    flipped(optimizer.state[model.weight]["exp_avg"], 3)
    assert of_state(optimizer.state_dict()) != after


def test_1000_faults_of_a_bit_in_a_product_are_seen() -> None:
    """Those that change a gradient change its digest; the same product never does."""
    torch.manual_seed(0)
    model, draw = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.Generator().manual_seed(0)
    inputs = torch.randn(5, 6)
    fault: list[tuple[int, int]] = []

    def strike(module: nn.Module, given: object, product: torch.Tensor) -> torch.Tensor:
        for index, bit in fault:
            product = product.clone()
            flipped_product = product.detach().view(-1)[index : index + 1].view(torch.int32)
            flipped_product.bitwise_xor_(1 << bit)
        return product

    model[0].register_forward_hook(strike)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(inputs).square().mean().backward()
        return [entry.grad.clone() for entry in model.parameters()]

    right = gradients()
    names = [name for name, _ in model.named_parameters()]
    known, changed = of_tensors(zip(names, right, strict=True)), 0
    for _ in range(1000):
        fault[:] = [(int(torch.randint(40, (), generator=draw)), int(torch.randint(32, (), generator=draw)))]
        found = gradients()
        is_changed = any(
            not torch.equal(one.view(torch.int32), other.view(torch.int32))
            for one, other in zip(found, right, strict=True)
        )
        assert (of_tensors(zip(names, found, strict=True)) != known) == is_changed
        changed += is_changed
    fault.clear()
    assert of_tensors(zip(names, gradients(), strict=True)) == known
    assert 300 < changed < 1000


def test_the_probe_depends_on_nothing_but_the_machine() -> None:
    device = torch.device("cpu")
    first = of_arithmetic(device)
    torch.manual_seed(7)
    assert of_arithmetic(device) == first
