"""Tags of messages."""

from __future__ import annotations

import random

import pytest

from thinwire.checkpoint.holder import mac
from thinwire.checkpoint.holder.replication import PIECE_BYTES

pytestmark = pytest.mark.ranks


def test_tags_of_openssl_are_those_of_aes_gcm() -> None:
    aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")
    if "gmac" not in mac.macs():
        pytest.skip("this Python has no shared OpenSSL")
    chance = random.Random(0)
    for size in (1, 15, 16, 17, 4096, PIECE_BYTES + 1):
        key, number, payload = chance.randbytes(32), chance.randrange(1 << 64), chance.randbytes(size)
        expected = aead.AESGCM(key).encrypt(number.to_bytes(12, "little"), b"", payload)
        assert mac._gmac(key, number, payload) == mac._gmac(key, number, memoryview(bytearray(payload))) == expected


@pytest.mark.parametrize("name", ["gmac", "hmac"])
def test_a_tag_depends_on_key_place_and_every_byte(name: str) -> None:
    if name not in mac.macs():
        pytest.skip("this Python has no shared OpenSSL")
    payload, tags = bytearray(random.Random(1).randbytes(5000)), mac.Tags(b"key", name)
    tag = tags.of_payload(3, payload)
    assert len(tag) == mac.TAG_BYTES
    assert tag == mac.Tags(b"key", name).of_payload(3, memoryview(payload))
    others = [tags.of_payload(4, payload), mac.Tags(b"yek", name).of_payload(3, payload)]
    for place in (0, 15, 16, 2500, 4999):
        payload[place] ^= 1
        others.append(tags.of_payload(3, payload))
        payload[place] ^= 1
    assert tag not in others
    assert len(set(others)) == len(others)
