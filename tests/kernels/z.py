"""z"""

from __future__ import annotations

import pytest

from thinwire.kernels.dispatch import KERNELS

every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
