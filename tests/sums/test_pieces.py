"""Pieces of tables as bytes of a device: they come back, are as long as both ends know, and damage is noticed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.rows.formats import FormatChoice
from thinwire.sums.pieces import ALIGNMENT_BYTES, FORMATS, CodedPiece, Coding

parts = st.integers(1, 300).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1))))
codings = st.builds(
    Coding,
    st.sampled_from([FormatChoice(FORMATS), FormatChoice(FORMATS[:1]), FormatChoice(FORMATS[1:2])]),
    st.integers(1, 5),
    st.sampled_from([torch.float32, torch.bfloat16]),
)


def given_rows(coding: Coding, held: list[tuple[int, set[int]]]) -> tuple[Tensor, Tensor, list[CodedPiece], Tensor]:
    """What `encode` is given: positions, values, pieces and their counts."""
    positions = torch.tensor([place for _, places in held for place in sorted(places)], dtype=torch.int64)
    values = torch.randn(positions.numel(), coding.width).to(coding.dtype)
    pieces = [coding.piece(len(places), size) for size, places in held]
    return positions, values, pieces, torch.tensor([len(places) for _, places in held])


def sent(coding: Coding, positions: Tensor, values: Tensor, pieces: list[CodedPiece], counts: Tensor) -> list[Tensor]:
    return [torch.cat(parts) for parts in coding.encode(positions, values, pieces, counts)]


@given(codings, st.lists(parts, min_size=1, max_size=4))
def test_pieces_come_back_from_as_many_bytes_as_both_ends_know(
    coding: Coding, held: list[tuple[int, set[int]]]
) -> None:
    positions, values, pieces, counts = given_rows(coding, held)
    payloads = sent(coding, positions, values, pieces, counts)
    assert [payload.numel() for payload in payloads] == [piece.num_bytes for piece in pieces]
    assert all(piece.num_bytes % ALIGNMENT_BYTES == 0 for piece in pieces)
    got, same, wrong = coding.decode(payloads, pieces, counts)
    assert torch.equal(got, positions)
    assert torch.equal(same, values)
    assert not wrong.any()


@pytest.mark.parametrize("size", [40, 70_000])
@pytest.mark.parametrize("damage", ["beyond the part", "repeated", "in another order"])
def test_ids_that_a_piece_cannot_hold_are_noticed(size: int, damage: str) -> None:
    coding = Coding(FormatChoice(FORMATS[:1]), 2, torch.float32)
    _, values, pieces, counts = given_rows(coding, [(size, {1, 5, 8}), (size, {0, 2})])
    wrong_positions = {
        "beyond the part": [1, 5, size, 0, 2], "repeated": [1, 5, 5, 0, 2], "in another order": [1, 8, 5, 0, 2],
    }  # fmt: skip
    payloads = sent(coding, torch.tensor(wrong_positions[damage]), values, pieces, counts)
    got, _, wrong = coding.decode(payloads, pieces, counts)
    assert wrong.tolist() == [False, False, True, False, False]
    assert int(got.max()) < size, "no row is written elsewhere"


def test_a_bitmap_with_a_bit_less_is_noticed() -> None:
    coding = Coding(FormatChoice(FORMATS[1:2]), 1, torch.float32)
    positions, values, pieces, counts = given_rows(coding, [(64, {3, 9, 60})])
    (payload,) = sent(coding, positions, values, pieces, counts)
    payload[3 * coding.row_bytes] ^= 1 << 3
    assert coding.decode([payload], pieces, counts)[2].any()
