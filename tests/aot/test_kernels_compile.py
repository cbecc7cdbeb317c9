"""Every kernel that the library launches compiles to machine code for every GPU, and to good code. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # 15 to 25 s of a processor each

ROOT = Path(__file__).parents[2]
TRITONS = ("3.5.1", "3.9.0")
"""The oldest supported version, and the newest one; `make test-kernels` installs them beside the environment."""
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
MOST_REGISTERS = 168
"""Of a thread, so that three programs of 128 threads run at a time, or more."""
MOST_SPILLED_BYTES = 0


@cache
def compiled(version: str, target: str, *options: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The measures of all variants, and the names of the kernels; compiled once a process."""
    installed = Path(sys.prefix) / f"triton-{version}"
    if not installed.is_dir():
        pytest.fail(f"Triton {version} is not in {installed}: `make test-kernels` installs it")
    path = os.pathsep.join([str(ROOT / "src"), str(installed)])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "aot" / "compile.py"), target, *options]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380)
    assert result.returncode == 0, result.stderr[-3000:]
    *variants, names = map(json.loads, result.stdout.splitlines())
    assert names["triton"] == version
    return variants, names


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("version", TRITONS)
def test_every_kernel_compiles(version: str, target: str) -> None:
    variants, names = compiled(version, target)
    assert {variant["kernel"] for variant in variants} == set(names["kernels"]), (
        "a kernel without a case, or not launched"
    )
    assert names["compiled_again"] == [], "sizes that vary from step to step must not compile anything"
    for variant in variants:
        what = f"{variant['kernel']} for {variant['case']}"
        assert variant["size"] > 0, what
        assert variant["fused"] == [], f"{what}: bits would not be those of the CPU"
        assert variant["spilled"] <= MOST_SPILLED_BYTES, what
        assert variant["registers"] <= MOST_REGISTERS, what
        check_widths(variant, target, what)


@pytest.mark.parametrize("version", TRITONS)
def test_a_warm_up_compiles_what_a_training_launches(version: str) -> None:
    _, names = compiled(version, "sm_90", "--warm")
    assert names["compiled_again"] == []


def check_widths(variant: dict[str, Any], target: str, what: str) -> None:
    """Rows and elements at aligned addresses are read, and rows written, 128 bits at a time.

    A warp that adds runs has 128 columns: two for each of the 64 lanes of an AMD GPU.
    """
    case, loads, stores = variant["case"], variant["loads"], variant["stores"]
    if not case.startswith("aligned") or case == "aligned rows of 3 bfloat16":
        return
    if variant["kernel"] == "_flag" and case != "aligned rows of 50 float32":
        assert 128 in loads, what
    if variant["kernel"] in ("_gather", "_scatter") and case in (
        "aligned rows of 64 float32",
        "aligned rows of 512 float32",
    ):
        assert 128 in loads, what
        assert set(stores) == {128}, what
    if variant["kernel"] == "_add_runs" and case.endswith(("of 64 float32", "of 1024 float32", "64 float64")):
        widest = 128 if target.startswith("sm") or "float64" in case else 64
        assert widest in loads, what
        assert set(stores) == {widest}, what
