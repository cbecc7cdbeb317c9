"""Compiled kernels against the reference, bit by bit; and which of the two runs when."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

from compiled import compiled_functions
from references.float_codes import definition
from tests.kernels.parity import JIT, check_same
from thinwire import kernels
from thinwire.kernels import dispatch

numba = pytest.importorskip("numba")

pytestmark = pytest.mark.usefixtures("nothing_compiles_after_warm_up")


@pytest.mark.parametrize("kernel", dispatch.compiled_kernels(), ids=lambda kernel: kernel.name)
def test_twins_give_the_same_for_their_samples(kernel: dispatch.Kernel) -> None:
    """Also in what they write to; sums of magnitudes to 1e-12."""
    for sample, other in zip(kernel.samples(), kernel.samples(), strict=True):
        expected, got = sample.call(definition(kernel)), other.call(kernel.on_cpu())
        if kernel.equal_bits:
            check_same([expected, sample.args], [got, other.args])
        else:
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_the_compiled_twin_runs_from_its_size_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.kernels.cpu import ids as cpu_ids

    monkeypatch.setattr(cpu_ids, "mix", lambda ids, seed: "compiled")
    ran = {}
    for mode in dispatch.MODES:
        with kernels.using(mode):
            ran[mode] = [kernels.mix(torch.arange(size), 0) == "compiled" for size in (1, 4096)]
            assert kernels.mix(torch.arange(8192)[::2], 0) != "compiled", "strided: unknown to the compiled twin"
    assert ran == {"auto": [False, True], "reference": [False, False], "numba": [True, True]}


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


WITHOUT_NUMBA = """
import logging, sys
sys.modules["numba"] = None
logging.basicConfig(level=logging.INFO)
import torch
from thinwire import kernels
assert kernels.mix(torch.arange(4096), 0).numel() == 4096
assert kernels.nonzero_rows(torch.ones(4096, 1)).numel() == 4096
"""


@pytest.mark.slow
def test_without_numba_the_reference_runs_and_one_line_says_so() -> None:
    result = run_python(WITHOUT_NUMBA, THINWIRE_KERNELS="auto")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("INFO:thinwire:") == 1
    assert "pip install '.[cpu]' in a checkout" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "says"), [("numba", "numba cannot be imported"), ("cuda", "use one of auto, reference, numba")]
)
def test_a_mode_that_cannot_be_is_an_error(mode: str, says: str) -> None:
    result = run_python(WITHOUT_NUMBA, THINWIRE_KERNELS=mode)
    assert result.returncode == 1
    assert f"ValueError: THINWIRE_KERNELS{'=' if mode == 'numba' else ' is '}" in result.stderr
    assert says in result.stderr


@pytest.mark.slow
def test_numba_is_imported_by_the_first_large_call_and_forks_no_threads() -> None:
    code = """
import sys, torch
from thinwire import kernels
kernels.mix(torch.arange(3), 0)
assert "numba" not in sys.modules
kernels.mix(torch.arange(4096), 0)
assert "numba" in sys.modules
assert "numba.np.ufunc.omppool" not in sys.modules
"""
    result = run_python(code, THINWIRE_KERNELS="auto")
    assert result.returncode == 0, result.stderr


def test_kernels_run_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the package nor the user has a directory to write to."""
    if not JIT:
        pytest.skip("nothing is compiled")
    from thinwire.kernels import jit

    def refuse(*settings: object, **named: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(jit.tempfile, "TemporaryFile", refuse)
    jit._log_uncached.cache_clear()
    jit.code_directory.cache_clear()
    with caplog.at_level(logging.INFO, "thinwire"):
        try:
            assert jit.njit(lambda number: number + 1)(1) == 2
            assert jit.njit(lambda number: number + 2)(1) == 3
        finally:
            jit.code_directory.cache_clear()
    assert [record.message for record in caplog.records if "NUMBA_CACHE_DIR" in record.message] == [
        "compiled kernels cannot be kept ([Errno 30] Read-only file system), so each process compiles them; set"
        " NUMBA_CACHE_DIR"
    ]


def test_every_kernel_releases_the_gil_and_is_serial_and_kept() -> None:
    if not JIT:
        pytest.skip("kernels are plain functions without compilation")
    compiled = [function for function in compiled_functions().values() if hasattr(function, "targetoptions")]
    assert len(compiled) >= 40
    for kernel in compiled:
        options = kernel.targetoptions
        assert (options["nogil"], options["error_model"], options.get("parallel", False)) == (True, "numpy", False)
        assert not options.get("fastmath", False), "additions keep their order"
