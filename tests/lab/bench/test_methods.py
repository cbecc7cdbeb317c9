"""Texts that name a method of `bench sync`."""

from __future__ import annotations

import pytest

from thinwire.lab.bench.design_space import label
from thinwire.lab.bench.methods import AGSPARSE_TORCH, METHODS, design_space, scheme_of
from thinwire.sums.named import AUTO, NAMED
from thinwire.sums.two_level import TWO_LEVEL_PREFIX, TwoLevel


def test_every_name_and_every_label_is_read_as_what_it_names() -> None:
    assert {name: scheme_of(name) for name in NAMED} == NAMED
    assert scheme_of(AUTO) is None
    assert all(scheme_of(text) == scheme and label(scheme) == text for text, scheme in design_space().items())
    assert len(set(design_space().values())) == len(design_space()), "each point has one label"
    assert isinstance(scheme_of(f"{TWO_LEVEL_PREFIX}zen"), TwoLevel)


def test_an_unknown_text_is_answered_with_all_that_are_legal() -> None:
    with pytest.raises(ValueError, match="unknown scheme 'zenn'") as refused:
        scheme_of("zenn")
    assert all(method in str(refused.value) for method in METHODS)
    with pytest.raises(ValueError, match="unknown scheme"):
        scheme_of(AGSPARSE_TORCH)  # a baseline, and no scheme
