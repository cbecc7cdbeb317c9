"""The page that a person with a GPU sends back: made of rows, so no GPU is needed to test it."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from clocks import wait_until

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


def test_a_part_that_fails_is_a_row_and_rows_are_on_the_page_before_the_next(
    gpu_page, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(here: object) -> Iterator[dict[str, object]]:
        yield {"operation": "first"}
        assert "| first |" in result.output.read_text()
        raise RuntimeError("out of\nmemory")

    monkeypatch.setitem(gpu_page.PARTS, "Kernels", gpu_page.Part(fails, 1))
    result = gpu_page.Page(tmp_path / "deep" / "page.md")
    result.begin(dry=True)
    gpu_page.measure("Kernels", result, dry=True)
    assert result.parts()["Kernels"] == [{"operation": "first"}, {"what": "FAILED: RuntimeError: out of memory"}]
    assert result.knows("Machine", "dry run") == "no figure of this page is of a GPU"
    assert not gpu_page.is_green(result.parts())


def begun(folder: Path, output: IO[bytes] | int, *options: str) -> subprocess.Popen[bytes]:
    """Start the page where nothing of thinwire is found but the checkout itself, and no Triton beside it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [sys.executable, str(BENCHMARKS / "gpu_page.py"), "--dry", *options]
    return subprocess.Popen(command, start_new_session=True, stdout=output, stderr=output, env=environment, cwd=folder)


def headings(text: str) -> list[str]:
    return re.findall("^## (.*)$", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_parts_run_without_a_gpu_and_without_an_installation_and_a_kill_after_each_leaves_it(
    gpu_page, tmp_path: Path
) -> None:
    """What is on the page when the next part has its first row is what a kill there would leave.

    Limits are for a machine that others use: at a load of 10 on two cores it took five minutes."""
    page, printed = tmp_path / "page.md", tmp_path / "printed"
    with printed.open("wb") as output:
        process = begun(tmp_path, output, "--output", str(page), "--seconds", "800")
        left: dict[str, str] = {}
        deadline = time.monotonic() + 850
        while process.poll() is None and time.monotonic() < deadline:
            text = page.read_text() if page.exists() else ""
            left.update((part, text) for part in headings(text) if part not in left)
            time.sleep(0.1)
        process.kill()
        text = page.read_text()
    assert process.wait() == 0, text + printed.read_text()[-2000:]
    assert "FAILED" not in text
    assert headings(text) == [*gpu_page.PARTS]
    parts = list(left)
    for before, after in itertools.pairwise(parts):
        whole = text.split(f"## {before}\n")[1].split("\n## ")[0].split("\n<details>")[0].strip()
        assert whole in left[after], f"{before} is not all on the page that has {after}"
        assert left[after].endswith("</details>\n")


@pytest.mark.slow
def test_a_page_that_is_cut_short_has_the_rows_so_far(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    options = "--output", str(page), "--parts", "Machine", "Kernels", "Lossless codes"
    process = begun(tmp_path, subprocess.DEVNULL, *options)
    wait_until(lambda: page.exists() and "## Kernels" in page.read_text(), 60)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert headings(page.read_text())[:2] == ["Machine", "Kernels"]
    assert page.read_text().endswith("</details>\n")


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_killed_and_the_next_one_begins(
    gpu_page, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_page, "__file__", str(tmp_path / "part.py"))
    (tmp_path / "part.py").write_text("import sys, time; time.sleep(60 * ('Bits' in sys.argv))")
    for name in ("Bits", "Kernels"):
        monkeypatch.setitem(
            gpu_page.PARTS, name, gpu_page.Part(gpu_page.PARTS[name].measure, 1 + 299 * (name != "Bits"))
        )
    monkeypatch.setattr(gpu_page, "ENVIRONMENT", {"THINWIRE_KERNELS": "reference"})
    result = gpu_page.Page(tmp_path / "page.md")
    result.begin(dry=True)
    gpu_page.run(["Bits", "Kernels"], result, dry=True, seconds=600.0)
    assert result.parts()["Bits"] == [{"what": "FAILED: killed after 4 s"}]
    assert "Kernels" not in result.parts()
    gpu_page.run(["Steps"], result, dry=True, seconds=5.0)
    assert result.parts()["Steps"] == [{"what": "not begun: 5 s are left"}]
