"""Each framework passes the word on: its losses are those by Gloo, to the last bit where two ranks add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]
Run = Callable[..., dict[str, Any]]
CODED = "dense=lossless,least_bytes=1024"


@pytest.mark.parametrize(
    ("framework", "ranks", "settings"),
    [
        ("torch", 4, "dense=native"),
        ("torch", 4, CODED),
        ("accelerate", 2, CODED),
        ("transformers", 2, CODED),
        ("lightning", 2, CODED),
        ("deepspeed", 2, CODED),
        ("ray", 2, CODED),
    ],
)
def test_losses_are_those_of_gloo(torchrun: Run, framework: str, ranks: int, settings: str) -> None:
    script = "tests/integrations/scripts/one_word.py"
    stock, ours = (torchrun(script, ranks, framework, word, THINWIRE_BACKEND=settings) for word in ("gloo", "thinwire"))
    assert not stock["loaded"]
    assert ours["word"] == "thinwire"
    assert settings != CODED or any(count["bytes_sent"] for count in ours["stats"].values())
    assert stock["losses"].keys() == ours["losses"].keys()
    for name, expected in stock["losses"].items():
        is_exact = ranks == 2 or settings != CODED  # else Gloo adds in another order than rank order
        assert ours["losses"][name] == (expected if is_exact else pytest.approx(expected, rel=5e-3)), name
