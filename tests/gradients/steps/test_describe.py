"""Lines on which ranks must agree: each thing that decides what is sent is in them; and the line of the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from thinwire import fuse, schemes
from thinwire.gradients.compressed import KIND
from thinwire.gradients.steps.describe import configuration, first_step
from thinwire.gradients.steps.grouping import Intent
from thinwire.observe.step import ParameterRecord


class Model(nn.Module):
    """A table, a layer and a buffer."""

    def __init__(self, width: int = 4, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(10, width, sparse=sparse)
        self.norm = nn.BatchNorm1d(width)


def frozen() -> Model:
    model = Model()
    model.norm.bias.requires_grad_(False)
    return model


def described(model: nn.Module, scheme: Any = "auto", excluded: frozenset[str] = frozenset(), **more: Any) -> str:
    return configuration(scheme, model, excluded, **more)


def test_every_parameter_and_buffer_has_its_line() -> None:
    assert described(Model()).splitlines() == [
        "rows=auto",
        "parameter 'words.weight': torch.float32 [10, 4], sparse",
        "parameter 'norm.weight': torch.float32 [4]",
        "parameter 'norm.bias': torch.float32 [4]",
        "buffer 'norm.running_mean': torch.float32 [4]",
        "buffer 'norm.running_var': torch.float32 [4]",
        "buffer 'norm.num_batches_tracked': torch.int64 []",
    ]
    assert described(Model(), schemes.ZEN).splitlines()[0] == f"rows={schemes.ZEN.describe()}"


@pytest.mark.parametrize(
    "other",
    [
        lambda: described(Model(5)),
        lambda: described(Model(sparse=False)),
        lambda: described(frozen()),
        lambda: described(Model().double()),
        lambda: described(Model(), "zen"),
        lambda: described(Model(), excluded=frozenset({"norm.bias"})),
        lambda: described(Model(), excluded=frozenset({"norm.running_mean"})),
        lambda: described(Model(), intent=Intent(("norm.bias",))),
    ],
    ids=["shape", "sparse", "frozen", "dtype", "scheme", "parameter left out", "buffer left out", "intent"],
)
def test_ranks_that_differ_describe_themselves_differently(other: Callable[[], str]) -> None:
    assert other() == other(), "equal ranks are equal"
    assert other() != described(Model())


def test_plans_that_differ_are_described_differently() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"policies": (fuse.cupcake(),)}, {"policies": (fuse.cupcake(), fuse.one_bucket())}, {"fallback": True},
        {"groups": (("a", "b"),)}, {"groups": (("a",), ("b",))}, {"predicted_seconds": 0.5}, {"dense_seconds": 0.5},
    ]  # fmt: skip
    texts = ["\n".join(Intent(("a", "b"), **change).describe()) for change in changes]
    assert len(set(texts)) == len(changes)
    assert "grouped by nobody" in texts[0]
    assert "group 1 of the plan: b" in texts[5]


def test_the_first_step_has_one_line_with_all_bytes() -> None:
    """Embedding tables by name, compressed parameters by kind, and the bytes of all."""
    table = ParameterRecord("words.weight", "dense gradient, rows known", "zen", density=0.012, total_dense_bytes=9000)
    layers = [ParameterRecord(name, KIND, "all_gather", "top_k(0.01)", total_dense_bytes=500) for name in "ab"]
    rest = ParameterRecord("all others", "all-reduce", "dense", total_dense_bytes=1000)
    assert first_step([table, *layers, rest], 7, 1234, 4) == (
        "thinwire synchronizes 1 of 7 parameters as rows: words.weight (dense gradient, rows known, 1.20% dense) by zen"
        "; 2 compressed: top_k(0.01) by all_gather; the others are all-reduced. First step: 1,234 bytes sent, 11,000 by"
        " stock DDP (4 ranks)"
    )
    alone = first_step([replace(rest, kind="reduce-scatter")], 7, 0, 2)
    assert alone.startswith("thinwire synchronizes 0 of 7 parameters as rows; the others are all-reduced")
