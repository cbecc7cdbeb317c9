"""What no outer loop can be attached to is refused before anything is sent, with what to pass instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from thinwire import outer
from thinwire.outer.attachment import _unwrapped
from thinwire.outer.recipe import OuterRecipe


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def attach(recipe: Any, **settings: Any) -> Any:
    model = nn.Linear(3, 2)
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return outer.attach(model, optimizer, recipe, **settings)


@pytest.mark.parametrize("recipe", ["diloco", 64, None, OuterRecipe])
def test_what_is_no_recipe_is_refused_without_a_group(recipe: Any) -> None:
    with pytest.raises(ValueError, match=r"^recipe is .*: pass a recipe such as thinwire.outer.diloco\(every=64\)$"):
        attach(recipe)


@pytest.mark.usefixtures("alone")
def test_rounds_that_depend_on_the_network_are_not_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(ValueError, match=r"no two runs are alike, which torch.use_deterministic_algorithms"):
        attach(outer.shadow_sync("average"))


@pytest.mark.usefixtures("alone")
def test_more_ranks_than_there_are_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="min_ranks=3 is more than the 1 ranks of the process group"):
        attach(outer.diloco(every=4, min_ranks=3))


@pytest.mark.usefixtures("alone")
def test_an_optimizer_of_another_model_and_an_unknown_scheme_are_refused() -> None:
    other = torch.optim.Adam(nn.Linear(1, 1).parameters())
    with pytest.raises(ValueError, match="Adam has no parameter of the model: pass the optimizer that trains it"):
        attach(outer.diloco(every=4), optimizer=other)
    with pytest.raises(ValueError, match="unknown scheme 'zenn'"):
        attach(outer.diloco(every=4), rows="zenn")


class Wrapped(torch.optim.Optimizer):
    """What Accelerate and Lightning make of an optimizer."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


class Plugin:
    """What is no optimizer, and has one."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


def test_the_optimizer_inside_of_wrappers_is_counted() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    assert _unwrapped(optimizer, model) is optimizer
    assert _unwrapped(Wrapped(Wrapped(optimizer)), model) is optimizer
    assert _unwrapped(Plugin(optimizer), model) is optimizer
    for nothing in (None, model, Plugin(None)):
        with pytest.raises(ValueError, match="an outer loop counts the steps of an optimizer, and optimizer is"):
            _unwrapped(nothing, model)
