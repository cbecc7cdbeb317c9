"""Messages of several parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.compress import packing
from thinwire.errors import CorruptMessageError


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_messages_round_trip(payloads: list[bytes]) -> None:
    packed = [
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        for data in payloads
    ]
    message = packing.join(packed)
    assert message.numel() == packing.message_bytes([len(data) for data in payloads])
    assert message.numel() % 8 == 0
    assert all(map(torch.equal, packing.split(message, len(packed)), packed))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 1))
def test_lengths_that_lie_are_refused(length: int, place: int) -> None:
    packed = [torch.ones(24, dtype=torch.uint8), torch.ones(9, dtype=torch.uint8)]
    message = packing.join(packed)
    message[8 * place : 8 * place + 8].view(torch.int64)[0] = length
    if packing.message_bytes([24, 9]) == sum((16, -(-length // 8) * 8, (16, 24)[place])):
        return
    with pytest.raises(CorruptMessageError):
        packing.split(message, 2)


def test_truncated_messages_are_refused() -> None:
    message = packing.join([torch.ones(24, dtype=torch.uint8)])
    for cut in (0, 7, 8, 31):
        with pytest.raises(CorruptMessageError):
            packing.split(message[:cut], 1)
