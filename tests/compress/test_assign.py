"""Which compressor a parameter has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gradients.compressed import PARAMETERS
from thinwire import compress
from thinwire.compress.assign import Method, assign, leave_small
from thinwire.compress.base import Exchanged, Identity, Parameter
from thinwire.compress.memory import ErrorFeedback


def test_a_compressor_leaves_small_parameters_alone() -> None:
    small = [Parameter("few", (31, 33)), Parameter("bias", (5000,)), Parameter("large", (32, 32))]
    large = Exchanged(ErrorFeedback(compress.top_k(0.1)))
    assert assign(compress.top_k(0.1), small) == {"few": "native", "bias": "native", "large": large}
    bare = leave_small(compress.top_k(0.1).by("two_shot"), min_elements=0, min_dimensions=0)
    assert assign(bare, small[:1]) == {"few": Exchanged(ErrorFeedback(compress.top_k(0.1)), "two_shot")}
    assert leave_small(compress.top_k(0.1), rest="lossless")(small[1]) == "lossless"


def test_a_rule_and_patterns_decide_alone() -> None:
    def rule(parameter: Parameter) -> Method:
        return compress.qsgd() if parameter.name == "b.bias" else "auto"

    names = [parameter.name for parameter in PARAMETERS]
    assert assign(rule, PARAMETERS) == {**dict.fromkeys(names, "auto"), "b.bias": Exchanged(compress.qsgd())}
    patterns = {"a.*": compress.bf16(), "*.bias": "lossless", "b.*": rule}
    found = assign(patterns, PARAMETERS)
    assert found == {"a.weight": Exchanged(compress.bf16()), "b.weight": "auto", "b.bias": "lossless"}
    assert assign({"a.*": compress.bf16()}, PARAMETERS)["b.bias"] == "native", "what no pattern matches"


def test_what_cannot_be_compressed_has_the_exact_sum_of_its_pattern() -> None:
    table = [Parameter("words.weight", (100, 8))]
    for dense, expected in (
        ("lossless", "lossless"),
        ({"words.*": "lossless", "*": compress.top_k(0.1)}, "lossless"),
        ({"*": compress.top_k(0.1)}, "native"),
        (compress.top_k(0.1), "native"),
        (lambda parameter: "lossless", "lossless"),
        (lambda parameter: compress.top_k(0.1), "native"),
        ({"*": lambda parameter: "lossless"}, "lossless"),
        (compress.leave_small(compress.top_k(0.1), 10**9, rest="lossless"), "lossless"),
    ):
        assert assign(dense, PARAMETERS, table)["words.weight"] == expected


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (compress.top_k, "made by calling its constructor"),
        ("top_k", "unknown dense 'top_k'; legal are native, lossless, auto, a compressor such as"),
        (lambda parameter: 0.01, r"answers for parameter 'a.weight' 0.01: pass 'native'"),
        ({"a.weight": 0.01}, r"has for 'a.weight' 0.01: pass 'native'"),
        ({"c.*": Identity()}, "no parameter that can be compressed .* has a name like 'c.*'"),
    ],
)
def test_what_is_no_compressor_is_refused(how: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        assign(how, PARAMETERS)


def test_integer_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="only floating-point gradients"):
        assign(lambda parameter: compress.top_k(0.1), [Parameter("ids", (64, 64), torch.int64)])
