"""The page that a person with a GPU sends back: made of rows, so no GPU is needed to test it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_page

    return gpu_page


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="test_good"/>
<testcase classname="tests.gpu.test_a" name="test_bad"><failure message="assert 1 == 2&#10;more"/></testcase>
<testcase classname="tests.gpu.test_a" name="test_broken"><error message="no memory">text</error></testcase>
<testcase classname="tests.gpu.test_a" name="test_two_gpus"><skipped message="one GPU"/></testcase>
</testsuite></testsuites>"""


def test_the_tests_are_counted_and_failures_named(gpu_page) -> None:
    counts, *failures = gpu_page.test_rows(JUNIT)
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (1, 2, 1)
    assert failures == [
        {"test": "tests.gpu.test_a::test_bad", "what": "assert 1 == 2"},
        {"test": "tests.gpu.test_a::test_broken", "what": "no memory"},
    ]


def test_the_page_has_a_table_for_each_part_and_all_numbers(gpu_page) -> None:
    parts = {
        "Machine": [{"name": "devices", "value": "A|B"}],
        "Kernels": [{"operation": "find", "seconds": 1.25e-4}, {"operation": "copy", "of_a_copy": 1.0}],
    }
    text = gpu_page.page(parts)
    assert "| devices | A\\|B |" in text
    assert "| operation | seconds | of_a_copy |\n| --- | --- | --- |\n| find | 0.000125 |  |\n| copy |  | 1 |" in text
    numbers = next(line for line in text.splitlines() if line.startswith("{"))
    assert json.loads(numbers) == parts


@pytest.mark.parametrize(
    ("row", "green"),
    [
        ({"passed": 3, "failed": 0}, True),
        ({"failed": 1}, False),
        ({"what": "FAILED: no"}, False),
        ({"what": "x"}, True),
    ],
)
def test_it_says_whether_something_failed(gpu_page, row: dict[str, object], green: bool) -> None:
    assert gpu_page.is_green({"Tests": [{"name": "other"}], "Steps": [row]}) == green


def test_a_part_that_fails_is_a_line_and_the_others_go_on(gpu_page, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(cpu: bool) -> list[dict[str, object]]:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setitem(gpu_page.PARTS, "Kernels", fails)
    parts = gpu_page.measured(["Kernels", "Machine"], cpu=True)
    assert parts["Kernels"] == [{"what": "FAILED: RuntimeError: out of memory"}]
    assert len(parts["Machine"]) > 3
    assert not gpu_page.is_green(parts)


@pytest.mark.slow
def test_all_parts_run_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_page.py"), "--cpu", "--output", str(tmp_path / "page.md")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr[-2000:]
    text = (tmp_path / "page.md").read_text()
    assert "FAILED" not in text
    for part in ("Machine", "Tests", "A step of a training", "Kernels", "All-reduce"):
        assert f"\n## {part}\n" in text
