"""Payloads of sparsifiers that are damaged, or sealed and nonsense."""

from __future__ import annotations

import pytest
import torch

from tests.compress.sparsified import METHODS, gradient_of, sent_by
from thinwire import compress
from thinwire.compress.base import Compressor, Parameter
from thinwire.compress.methods.sparsify import HEADER_BYTES
from thinwire.errors import CorruptMessageError


@pytest.mark.parametrize("method", ["top_k", "redsync", "random_k"])
@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
def test_damage_is_noticed(method: str, density: float) -> None:
    parameter, compressor = Parameter("weight", (300,)), METHODS[method](density)
    data = compressor.pack(sent_by(compressor, gradient_of(parameter), parameter), parameter)
    for place in range(data.numel()):
        damaged = data.clone()
        damaged[place] ^= 1 << int(torch.randint(8, ()))
        with pytest.raises(CorruptMessageError):
            compressor.unpack(damaged, parameter)
    for size in {0, 7, 8, HEADER_BYTES, data.numel() - 8, data.numel() - 1}:
        with pytest.raises(CorruptMessageError):
            compressor.unpack(data[:size].clone(), parameter)
    with pytest.raises(CorruptMessageError):
        compressor.unpack(torch.cat([data, torch.zeros(8, dtype=torch.uint8)]), parameter)


def test_well_sealed_nonsense_is_refused() -> None:
    """A checksum is no secret: counts, formats and ids are looked at too."""
    from thinwire.compress.methods.sparsify import sealed

    parameter, compressor = Parameter("weight", (300,)), compress.top_k(0.01)
    good = compressor.pack(sent_by(compressor, gradient_of(parameter), parameter), parameter)[HEADER_BYTES:]
    for count in (0, 2, 4, 300, 301, (1 << 56) - 1):
        with pytest.raises(CorruptMessageError):
            compressor.unpack(sealed(count, 0, [good]), parameter)
    for code in (0, 1, 2, 3, 4, 255):
        if not torch.equal(wrong := sealed(3, code, [good]), sealed(3, int(_code_of(compressor, parameter)), [good])):
            with pytest.raises(CorruptMessageError):
                compressor.unpack(wrong, parameter)
    for _ in range(200):
        body = torch.randint(256, (good.numel(),), dtype=torch.uint8)
        try:
            payload = compressor.unpack(sealed(3, int(_code_of(compressor, parameter)), [body]), parameter)
        except CorruptMessageError:
            continue
        ids = payload.parts[0]
        assert ids.numel() == 3
        assert 0 <= int(ids[0]) < int(ids[1]) < int(ids[2]) < 300
    shared = compress.random_k(0.01)
    for count, step in ((301, 0), (3, -1), (4, 0)):
        body = [torch.tensor([step]).view(torch.uint8), torch.ones(3).view(torch.uint8)]
        with pytest.raises(CorruptMessageError):
            shared.unpack(sealed(count, 0, body) if count != 4 else sealed(5, 0, body), parameter)


def _code_of(compressor: Compressor, parameter: Parameter) -> int:
    return int(compressor.pack(sent_by(compressor, gradient_of(parameter), parameter), parameter)[7])
