"""The table of `thinwire bench sync`."""

from __future__ import annotations

import pytest

from tests.lab.cli.screens import cells_of, printed, stored
from thinwire.lab.cli import bench_sync


@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("name", ["sync-lstm-8x100mbit.json", "contenders-bert-8x100mbit.json"])
def test_bench_sync(name: str, width: int) -> None:
    result = stored(name)
    words = cells_of(printed(lambda console: bench_sync._print(result, console), width))
    for row in result["rows"]:
        assert f"{row['seconds_median']:.3f}" in words
        assert f"{row['bytes_sent_max'] / 1e6:.2f}" in words
        assert f"{row['max_abs_error']:.0e}" in words


@pytest.mark.parametrize("width", [60, 80, 160])
def test_bench_sync_by_size(width: int) -> None:
    result = stored("sync-lstm-8x100mbit.json")
    rows = [
        row | {"size_bytes": size, "algbw": 123e6, "busbw": 216e6} for size in (10**6, 10**9) for row in result["rows"]
    ]
    words = cells_of(printed(lambda console: bench_sync._print_sizes(result | {"rows": rows}, console), width))
    assert {"1", "1e+03", "123.0", "216.0"} <= words
    assert {f"{row['seconds_median']:.4f}" for row in rows} <= words
