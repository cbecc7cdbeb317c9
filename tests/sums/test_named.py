"""Named points of the design space."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinwire import schemes
from thinwire.sums.named import name_of, resolve


def test_named_points_are_distinct_and_know_their_names() -> None:
    aliases = {"hierarchical_centralization": "sparcml"}
    assert len(set(schemes.NAMED.values())) == len(schemes.NAMED) - len(aliases)
    for name, scheme in schemes.NAMED.items():
        assert resolve(name) is scheme
        assert resolve(scheme) is scheme
        assert name_of(scheme) == aliases.get(name, name)
        assert getattr(schemes, name.upper()) is scheme
    unnamed = replace(schemes.ZEN, seed=1)
    assert name_of(unnamed) == unnamed.describe()
    assert resolve("auto") is None


def test_unknown_names_list_the_legal_ones() -> None:
    with pytest.raises(ValueError, match="unknown scheme 'zenn'") as error:
        resolve("zenn")
    for name in ("auto", *schemes.NAMED):
        assert name in str(error.value)
