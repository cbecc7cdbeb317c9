"""The exchange of each compressor."""

from __future__ import annotations

import pytest

from tests.gradients.compressed import PARAMETERS
from thinwire import compress
from thinwire.compress.assign import assign
from thinwire.gradients.compression import planned


def test_an_unknown_exchange_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"auto, all_reduce, all_gather, two_shot, .*zen"):
        planned(assign(lambda parameter: compress.top_k(0.1).by("all_together"), PARAMETERS), PARAMETERS, 2)
