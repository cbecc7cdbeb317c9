"""Messages that are corrupt, or longer than what any compressor sends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from loopback import run_ranks
from tests.compress.reductions.averaged import MATRICES, train
from thinwire.compress.base import Identity, Parameter, Payload
from thinwire.compress.memory import with_memory
from thinwire.compress.methods.select import top_k
from thinwire.errors import CorruptMessageError, PeerError, ThinwireError
from thinwire.rows.formats import Header


@dataclass
class FlipPayload:
    """Flips a bit of the first payload that rank 1 sends to rank 0 and that has more bytes than a header."""

    swap: int | None = None

    def __call__(self, rank_from: int, rank_to: int, swap_number: int, tensor: Tensor) -> Tensor:
        if (rank_from, rank_to) != (1, 0) or tensor.numel() <= Header.NUM_BYTES or self.swap is not None:
            return tensor
        self.swap = swap_number
        changed = tensor.clone()
        changed[-1] ^= 1
        return changed


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
def test_a_corrupt_message_names_its_sender(exchange: str) -> None:
    """Found before the last swap all ranks hear of it; found after it, the lane tells them at its next job."""
    tamper = FlipPayload()
    outcomes = run_ranks(
        3, lambda network: train(network, with_memory(top_k(0.5)), exchange, MATRICES, 1), tamper=tamper
    )
    assert tamper.swap is not None
    assert isinstance(outcomes[0].error, CorruptMessageError)
    assert "from rank 1" in str(outcomes[0].error)
    for outcome in outcomes[1:]:
        if exchange == "two_shot":
            assert isinstance(outcome.error, PeerError)
            assert "rank 0 reports" in str(outcome.error)
        else:
            assert outcome.error is None


@dataclass(frozen=True)
class Huge(Identity):
    """Sends more than it told."""

    def pack(self, payload: Payload, parameter: Parameter) -> Tensor:
        extra = 8 if payload.parts[0].numel() else 0
        return torch.cat([super().pack(payload, parameter), torch.zeros(extra, dtype=torch.uint8)])


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
def test_more_bytes_than_a_compressor_can_send_are_not_received(exchange: str) -> None:
    outcomes = run_ranks(2, lambda network: train(network, Huge(), exchange, MATRICES, 1))
    assert all(isinstance(outcome.error, ThinwireError) for outcome in outcomes)
