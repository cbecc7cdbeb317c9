"""Parameters of a model by name, whatever a module makes of the methods that list them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor, nn

from thinwire.gradients.module import left_out, synchronized_parameters


class Lookup(nn.Module):
    """A table that lists its parameters without duplicates only, as those of TorchRec do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)
        self.register_buffer("seen", self.table.weight.detach()[:, 0])

    def named_parameters(self, *args: Any, remove_duplicate: bool = True, **options: Any) -> Iterator[Any]:
        assert remove_duplicate, "not supported"
        return super().named_parameters(*args, remove_duplicate=True, **options)

    def named_buffers(self, *args: Any, remove_duplicate: bool = True, **options: Any) -> Iterator[Any]:
        assert remove_duplicate, "not supported"
        return super().named_buffers(*args, remove_duplicate=True, **options)


@pytest.mark.parametrize("wraps", [lambda lookup: lookup, lambda lookup: nn.Sequential(lookup, nn.Linear(2, 1))])
def test_modules_that_list_their_parameters_in_one_way_only(wraps: Any) -> None:
    model = wraps(Lookup())
    prefix = "" if isinstance(model, Lookup) else "0."
    chosen: list[str | Tensor] = ["*table.*", model.get_buffer(f"{prefix}seen")]
    assert left_out(model, ()) == frozenset()
    assert left_out(model, chosen) == {f"{prefix}table.weight", f"{prefix}seen"}
    trained = dict(synchronized_parameters(model, {f"{prefix}table.weight"}))
    assert trained.keys() == ({"1.weight", "1.bias"} if prefix else set())
