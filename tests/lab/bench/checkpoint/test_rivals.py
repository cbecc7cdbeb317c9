"""Methods of other packages."""

from __future__ import annotations

import pytest

from tests.lab.bench.checkpoint.results import RECOVERY, records
from thinwire.lab.bench.checkpoint.methods import THINWIRE
from thinwire.lab.bench.checkpoint.rivals import unavailable
from thinwire.lab.bench.checkpoint.rows import row_of
from thinwire.lab.bench.checkpoint.summary import table_rows


def test_a_method_without_its_package_has_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert unavailable("lm_resiliency") == "pip install lm-resiliency"
    assert unavailable(THINWIRE) == ""
    row = {
        **dict.fromkeys(row_of(THINWIRE, records(), RECOVERY, None)),
        "method": "nvrx",
        "unavailable": unavailable("nvrx"),
    }
    assert table_rows([row])[0][0] == "nvrx: pip install nvidia-resiliency-ext"
