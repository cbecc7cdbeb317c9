"""Samples of calls of each kernel."""

from __future__ import annotations

import pytest

from thinwire.kernels.dispatch import KERNELS, Kernel

every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


@every_kernel
def test_samples_have_a_size_and_are_known_to_the_compiled_twin(kernel: Kernel) -> None:
    samples = list(kernel.samples())
    assert samples
    for sample in samples:
        assert kernel.size(*sample.args, **sample.settings) >= 0
    known = [kernel.knows(*sample.args, **sample.settings) for sample in samples]
    assert any(known) == (kernel.cpu is not None)
