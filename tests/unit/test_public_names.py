"""What a package offers is what `dir` lists, and no name that is not there."""

from __future__ import annotations

import importlib
import pickle

import pytest

import thinwire

PACKAGES = ("thinwire", "thinwire.plan", "thinwire.checkpoint")


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_lists_all_public_names_and_each_is_there(name: str) -> None:
    package = importlib.import_module(name)
    assert set(package.__all__) <= set(dir(package))
    assert not {"Any", "TYPE_CHECKING", "import_module", "sys"} & set(dir(package))
    for public in package.__all__:
        assert getattr(package, public) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = package.nonsense


def test_values_that_are_public_can_be_pickled() -> None:
    for value in (thinwire.schemes.ZEN, thinwire.compress.top_k(0.01), thinwire.compress.power_sgd(4)):
        assert pickle.loads(pickle.dumps(value)) == value
