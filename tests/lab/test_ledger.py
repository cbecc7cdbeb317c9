"""The least bytes that any scheme can send."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import schemes
from thinwire.lab import ledger
from thinwire.schemes import Scheme

named = pytest.mark.parametrize("scheme", schemes.NAMED.values(), ids=schemes.NAMED.keys())


@pytest.mark.few(8)
@named
@given(st.integers(2, 8), st.integers(1, 200), st.integers(0, 1000), st.floats(0, 1))
def test_nobody_sends_fewer_bytes_than_the_bound(
    scheme: Scheme, world_size: int, num_rows: int, seed: int, share: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = [(torch.rand(num_rows, generator=generator) < share).nonzero().flatten() for _ in range(world_size)]
    sent = ledger.sent_bytes(scheme, ids, num_rows, 3, torch.float32)
    assert sum(sent) / world_size >= ledger.value_lower_bound_bytes(ids, 12)


def test_the_bound_by_hand() -> None:
    """Row 1 is held by both ranks (each sends it once), row 2 by one (which sends it): 3 rows, 1.5 a rank."""
    assert ledger.value_lower_bound_bytes([torch.tensor([1, 2]), torch.tensor([1])], 10) == 15.0
    everywhere = [torch.arange(10)] * 4
    assert ledger.value_lower_bound_bytes(everywhere, 8) == 10 * 8 * (4 + 4 - 2) / 4
    empty = [torch.empty(0, dtype=torch.int64)] * 3
    assert ledger.value_lower_bound_bytes(empty, 8) == 0


def test_the_bound_is_reached_by_zen_but_for_ids_and_headers() -> None:
    """Full overlap, wide rows: ZEN's bytes are within 3 % of the bound."""
    ids = [torch.arange(0, 40_000, 4)] * 4
    sent = ledger.sent_bytes(schemes.ZEN, ids, 40_000, 256, torch.float32)
    assert max(sent) < 1.03 * ledger.value_lower_bound_bytes(ids, 1024)


@pytest.mark.slow
def test_no_training_loads_the_ledger() -> None:
    """Only the laboratory does; what a table shows comes from the closed forms, when somebody looks."""
    loads = "import sys, thinwire; thinwire.attach, thinwire.sparse_all_reduce, thinwire.schemes, thinwire.Plan; "
    script = f"{loads}sys.exit('thinwire.lab.ledger' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
