"""Each law of a kernel holds for both twins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from thinwire import kernels


@pytest.fixture(scope="module", params=["reference", "numba"])
def twin(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs with each twin, at every size."""
    if request.param == "numba":
        pytest.importorskip("numba")
    with kernels.using(request.param):
        yield request.param
