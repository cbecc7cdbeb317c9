"""Triton kernels in Triton's interpreter, on tensors of the CPU.

The interpreter shows that a kernel computes what it should. It has one thread, so it cannot show a race, and says
nothing of speed. tests/aot compiles the kernels, and tests/gpu has the same tests on a real GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU is here: tests/gpu runs these tests on it", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
pytest.importorskip("triton", reason="triton is missing, which `make test-kernels` brings")

from gpu_laws import *  # noqa: F403

# Triton's interpreter takes 6 s of processor for 1,300 floats, which take minutes where others use it, too.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")
