"""What the doctor says of lossless sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from measured import AUTOCAST, measurement
from thinwire.comm.machine import Machine
from thinwire.compress.base import Parameter
from thinwire.lab.doctor.lossless import break_even_mbit, lossless_option
from thinwire.tune.lossless import Code, Ranks, lossless_seconds, native_seconds


def test_gradients_without_a_code_stay_native_in_the_price() -> None:
    measured = measurement(100, dense_codes=[AUTOCAST])
    mixed = replace(
        measured,
        parameters=tuple(
            Parameter(entry.name, entry.shape, torch.bfloat16 if place % 2 else torch.float32)
            for place, entry in enumerate(measured.parameters)
        ),
    )
    native, coded = mixed.costs(), mixed.lossless_costs()
    for place, entry in enumerate(mixed.parameters):
        assert (coded.tensors[place].wire_seconds == native.tensors[place].wire_seconds) == (
            entry.dtype == torch.bfloat16
        )
    option = lossless_option(mixed)
    assert option is not None
    sizes = {True: 0, False: 0}
    for entry in mixed.parameters:
        sizes[entry.dtype == torch.bfloat16] += entry.numel * entry.dtype.itemsize
    assert option.sent_bytes == pytest.approx(7 / 8 * (2 * sizes[True] + sizes[False] * 29 / 32))
    assert lossless_option(replace(mixed, dense_codes=())) is None


def test_break_even_is_where_both_take_equally_long() -> None:
    code = AUTOCAST.code
    for cores in (1, 2):
        mbit = break_even_mbit(1e8, Ranks(8), code, cores)
        link = Machine(0.0, 0.0, 8e-6 / mbit, 8e-6 / mbit, *[0.0] * 7)
        ranks = Ranks(8, 1, cores)
        assert lossless_seconds(1e8, ranks, link, code) == pytest.approx(native_seconds(1e8, 8, link), rel=1e-6)
    # ranks of a host push through one link what a ring sends over it once
    assert break_even_mbit(1e8, Ranks(8, 4), code) < break_even_mbit(1e8, Ranks(8), code)
    assert break_even_mbit(1e8, Ranks(8), replace(code, push_bits=32.0, pull_bits=32.0)) == 0.0
    assert break_even_mbit(1e8, Ranks(8), Code(16.0, 16.0, 0.0, 0.0, 0.0, 0.0)) == pytest.approx(1e7)
