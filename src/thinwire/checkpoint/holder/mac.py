"""Tags of frames and payloads under the key of one direction of one connection.

Payloads have GMAC (NIST SP 800-38D, AES-256) by the OpenSSL that Python has loaded for `hashlib`: 12 GB/s on a core,
where HMAC-SHA256 has 1.6 and would make replication cost three times its CPU. Where Python was built without a shared
OpenSSL, it is HMAC-SHA256. Both sides agree on one in their handshake.
"""

import ctypes
import hmac
from contextlib import suppress
from functools import cache
from typing import Any

TAG_BYTES = 16
_GET_TAG = 16  # EVP_CTRL_AEAD_GET_TAG
_KNOWN_TAG = "756a3912c9a117fd0000e486bf08a3f0"  # of 41 zeros, under a key of zeros and nonce 1


class Tags:
    """Tags under one key. ``mac`` is one of `macs`, for payloads.

    A number must never be used for two payloads of one key: with GMAC that would give the key away.
    """

    def __init__(self, key: bytes = b"", mac: str = "hmac") -> None:
        self._key, self._mac = key, mac
        self._payload_key = hmac.digest(key, b"payload", "sha256")

    @property
    def is_trusted(self) -> bool:
        return bool(self._key)

    def of_frame(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, "sha256")[:TAG_BYTES]

    def of_payload(self, number: int, payload: bytes | memoryview) -> bytes:
        """Return the tag of the payload of the frame with that number; other threads run meanwhile."""
        if self._mac == "gmac":
            return _gmac(self._payload_key, number, payload)
        tag = hmac.new(self._payload_key, number.to_bytes(8, "little"), "sha256")
        tag.update(payload)
        return tag.digest()[:TAG_BYTES]


@cache
def macs() -> tuple[str, ...]:
    """Return the names of what can make tags of payloads here, the fastest first."""
    with suppress(AttributeError, ImportError, OSError, ValueError):  # no shared OpenSSL, or one that does not offer it
        if _gmac(bytes(32), 1, bytes(41)).hex() == _KNOWN_TAG:
            return "gmac", "hmac"
    return ("hmac",)


@cache
def _openssl() -> Any:
    import _hashlib

    library, pointer, number = ctypes.CDLL(_hashlib.__file__), ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in (
        ("EVP_CIPHER_CTX_new", pointer, ()),
        ("EVP_CIPHER_CTX_free", None, (pointer,)),
        ("EVP_aes_256_gcm", pointer, ()),
        ("EVP_EncryptInit_ex", number, (pointer, pointer, pointer, ctypes.c_char_p, ctypes.c_char_p)),
        ("EVP_EncryptUpdate", number, (pointer, pointer, pointer, pointer, number)),
        ("EVP_EncryptFinal_ex", number, (pointer, pointer, pointer)),
        ("EVP_CIPHER_CTX_ctrl", number, (pointer, number, number, pointer)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _gmac(key: bytes, number: int, payload: bytes | memoryview) -> bytes:
    """The tag of AES-256-GCM over ``payload`` as data that is authenticated and not encrypted."""
    openssl, size, tag = _openssl(), ctypes.c_int(), ctypes.create_string_buffer(TAG_BYTES)
    is_view = isinstance(payload, memoryview) and not payload.readonly
    data = (ctypes.c_char * len(payload)).from_buffer(payload) if is_view else bytes(payload)
    context = openssl.EVP_CIPHER_CTX_new()
    try:
        done = (
            openssl.EVP_EncryptInit_ex(context, openssl.EVP_aes_256_gcm(), None, key, number.to_bytes(12, "little"))
            and openssl.EVP_EncryptUpdate(context, None, ctypes.byref(size), data, len(payload))
            and openssl.EVP_EncryptFinal_ex(context, tag, ctypes.byref(size))
            and openssl.EVP_CIPHER_CTX_ctrl(context, _GET_TAG, TAG_BYTES, tag)
        )
    finally:
        openssl.EVP_CIPHER_CTX_free(context)
    if done != 1:
        raise ValueError("OpenSSL made no tag")
    return tag.raw
