"""The roofline of GPUs: laws of its formulas, and the page of the docs against the script."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_roofline import A100, FABRICS, H100, collective, native, staged, taken
from thinwire.sums.cost import Demand
from thinwire.tune.prices import Route

ROOT = Path(__file__).parents[3]
WAYS = (native, collective, staged)
demands = st.builds(
    lambda world_size, num_rows, width, share: Demand.of(
        [max(1.0, share * num_rows)] * world_size, num_rows, width, itemsize=4
    ),
    st.integers(2, 64),
    st.integers(1000, 10_000_000),
    st.integers(1, 1024),
    st.floats(0.0001, 0.5),
)


@given(demands)
def test_no_way_is_faster_than_its_wire_and_faster_links_and_devices_help(demand: Demand) -> None:
    for way in WAYS:
        ethernet = [way(demand, H100, fabric) for fabric in FABRICS[:4]]
        assert all(0 < each.wire_seconds < each.seconds for each in ethernet)
        assert [each.seconds for each in ethernet] == sorted((each.seconds for each in ethernet), reverse=True)
        assert way(demand, A100, FABRICS[0]).seconds >= ethernet[0].seconds
        assert len({each.sent_bytes for each in ethernet}) == 1


@given(demands)
def test_rows_send_less_than_zeros_where_few_rows_are_held(demand: Demand) -> None:
    if demand.union < 0.4 * demand.num_rows and demand.width >= 8 and demand.num_rows > 100_000:
        assert collective(demand, H100, FABRICS[0]).sent_bytes < native(demand, H100, FABRICS[0]).sent_bytes


def test_auto_takes_rows_on_a_slow_link_and_zeros_for_a_small_table_on_a_fast_one() -> None:
    large, small = Demand(8, 1_000_000, 64, 4, 52_000, 350_000), Demand.of([1000] * 8, 20_000, 16, 4)
    assert taken(large, FABRICS[0]) is Route.COLLECTIVE
    assert taken(small, FABRICS[-1]) is Route.NATIVE


def test_the_page_has_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "benchmarks" / "gpu_roofline.py"), run_name="__main__")
    printed = capsys.readouterr().out.strip()
    assert printed.count("**") > 10
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert page.strip().endswith(printed), "run: python benchmarks/gpu_roofline.py, and put it at the page's end"
