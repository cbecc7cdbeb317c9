"""Digits with and without scikit-learn."""

from __future__ import annotations

import pytest

from thinwire.lab.bench.jobs.images import DigitsJob


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[train\]' in a checkout"):
        DigitsJob().load()


@pytest.mark.slow
def test_the_digits_are_split() -> None:
    pytest.importorskip("sklearn")
    data = DigitsJob().load()
    assert (len(data.train), len(data.held_out)) == (1437, 360)
    assert data.train.inputs.aminmax() == (0.0, 1.0)
    assert data.held_out.targets.bincount().min() > 20
