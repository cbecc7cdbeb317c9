"""Trees that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire.checkpoint.state.decode import unflatten
from thinwire.checkpoint.state.encode import flatten
from thinwire.checkpoint.state.layout import StateLayout
from thinwire.errors import CorruptMessageError


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor": 1}, {"tensor": -1}, {"tensor": "0"}, {"float": 1}, {"bytes": "!"}, {"what": 1}, {}, 1.5,
        {"dict": [1]},
        {"numpy": ["|O", "00"]}, {"numpy": ["<f8", "00"]}, {"numpy": ["<i4", ""]}, {"numpy": ["<i4", "00" * 8]},
        {"numpy": 5}, {"numpy": ["V8", "00" * 8]}, {"complex": ["0x0p0"]}, {"range": [1, 2, 0]}, {"range": ["a"]},
        {"slice": []}, {"size": ["a"]}, {"set": [[]]}, {"set": [{"tensor": 0}]}, {"dtype": "nn"}, {"dtype": 5},
        {"device": "moon"}, {"array": 5}, {"array": {"float": "0x0p0"}}, {"subclass": [[], []]}, {"subclass": [5, 5]},
        {"subclass": [["os", "system", [], [], None], 5]}, {"subclass": [[5, 5, [], [], None], [["a", 1]]]},
        {"subclass": [["os", "path", ["a"], [], None], []]},
    ],
)  # fmt: skip
def test_a_tree_that_is_none_is_refused(tree: Any) -> None:
    layout, tensors = flatten([torch.ones(3)])
    with pytest.raises(CorruptMessageError):
        unflatten(StateLayout(tree, layout.slices, layout.payload_bytes), tensors)
