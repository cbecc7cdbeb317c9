"""Differences of state dicts: what a model that others hold changed to, in the bytes that changed.

A server of a model, or a rank that joins, has the weights of some step and wants those of a later one. A fine-tuning
step in bfloat16 leaves most words as they were, so the positions of those that changed, in Elias-Fano coding, and the
bits that did are a small part of the state. A delta knows the state that it was made from by a digest of each tensor,
so it is never applied to another one.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import CorruptMessageError, MismatchError

MAGIC = b"TWDELTA1"
DIGEST_BYTES = 16
_PROLOG_BYTES = len(MAGIC) + 8 + DIGEST_BYTES  # with the length of the header, and the digest of all that follows
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

__all__ = ["apply", "encode", "fold"]


def encode(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> bytes:
    """Return the difference of two state dicts, for `apply`.

    Args:
        old: tensors by name, of any dtype and device; dense.
        new: tensors of the same names, shapes and dtypes.

    Raises:
        MismatchError: names, shapes or dtypes differ; the message has the first that does.
        TypeError: a value is no dense tensor.

    Example:
        >>> old = {"weight": torch.zeros(1000)}
        >>> new = {"weight": torch.zeros(1000)}
        >>> new["weight"][7] = 1.0
        >>> delta = encode(old, new)
        >>> apply(old, delta)
        >>> old["weight"][7].item(), len(delta) < 300
        (1.0, True)
    """
    _check_alike({name: _described(name, value) for name, value in old.items()}, new)
    rows, parts = [], []
    for name, value in old.items():
        before, after = _words(value), _words(new[name])
        changed = before ^ after
        positions = changed.nonzero().view(-1)
        ids = kernels.elias_fano_encode(positions, changed.numel()) if positions.numel() < changed.numel() else None
        bits = [_deflate(plane) for plane in _planes(changed[positions])]
        codes = ([] if ids is None else [_raw(ids)]) + bits
        sizes = [len(code) for code in codes]
        about = [*_described(name, value), positions.numel(), _digest(before), _digest(after), sizes]
        rows.append([name, *about])
        parts += codes
    return _sealed(rows, parts)


def apply(state: Mapping[str, Tensor], delta: bytes) -> None:
    """Change a state dict in place to the one that the delta was made for: all of it, or nothing.

    Args:
        state: what `encode` was given as ``old``, to the bit. Tensors may share memory, as tied weights do.
        delta: what `encode` returned.

    Raises:
        CorruptMessageError: the delta was truncated or altered.
        MismatchError: the state is not the one that the delta was made from.
        TypeError: a value is no dense tensor.
        ValueError: elements of a tensor to change share memory, or tensors that the delta makes different do.
    """
    rows, body = _parse(delta)
    _check_alike({name: [dtype, shape] for name, dtype, shape, *_ in rows}, state)
    changed: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
    ends: dict[tuple[Any, ...], str] = {}
    for name, _dtype, _shape, count, before, after, sizes in rows:
        words = _words(state[name])
        if _digest(words) != before:
            raise MismatchError(f"{name!r} has other bits than the tensor that the delta was made from")
        if ends.setdefault(_memory(state[name]), after) != after:
            raise ValueError(f"{name!r} shares memory with a tensor of other bits behind the delta: untie them first")
        codes = [body.pop(0) for _ in sizes]
        if not count:
            continue
        if any(step == 0 and size > 1 for step, size in zip(state[name].stride(), state[name].shape, strict=True)):
            raise ValueError(
                f"{name!r} has elements that share memory, as expand() makes them: call contiguous() first"
            )
        words = words.clone()
        positions = _positions(name, codes, count, words.numel())
        words[positions] ^= _joined(name, codes, count, words.dtype)
        if _digest(words) != after:
            raise CorruptMessageError(f"the delta does not lead to the bits that it announces for {name!r}")
        changed[_memory(state[name])] = state[name], words
    is_inference = any(tensor.is_inference() for tensor, _ in changed.values())
    with torch.inference_mode(is_inference), torch.no_grad():  # inference_mode(False) records
        for tensor, words in changed.values():
            tensor.copy_(words.view(tensor.dtype).view(tensor.shape))


def fold(old: Mapping[str, Tensor], deltas: Iterable[bytes]) -> bytes:
    """Return one delta from ``old`` to where several lead, one after another; ``old`` stays as it is.

    Raises:
        CorruptMessageError: a delta was truncated or altered.
        MismatchError: the first was made from another state, or the next from one that those before do not lead to.
    """
    state = {name: value.detach().clone() for name, value in old.items()}
    for delta in deltas:
        apply(state, delta)
    return encode(old, state)


def _sealed(rows: list[Any], codes: list[Any]) -> bytes:
    header = json.dumps(rows, separators=(",", ":")).encode()
    body = b"".join([header, *codes])
    return MAGIC + len(header).to_bytes(8, "little") + blake2b(body, digest_size=DIGEST_BYTES).digest() + body


def _described(name: str, value: Tensor) -> list[Any]:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
        raise TypeError(f"{name!r} is no dense tensor, but {type(value).__name__}: leave it out, and send it by itself")
    return [str(value.dtype).removeprefix("torch."), list(value.shape)]


def _check_alike(expected: Mapping[str, list[Any]], given: Mapping[str, Tensor]) -> None:
    for name in [*expected, *given]:
        if name not in given or name not in expected:
            raise MismatchError(f"{name!r} is in one of the two states only")
        if (found := _described(name, given[name])) != expected[name]:
            here, there = (" ".join(map(str, one)) for one in (found, expected[name]))
            raise MismatchError(f"{name!r} is {here}, and {there} in the other state")


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers [k] on the CPU; they may share its memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(_WORDS[tensor.element_size()])


def _raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data


def _digest(words: Tensor) -> str:
    return blake2b(_raw(words), digest_size=DIGEST_BYTES).hexdigest()


def _planes(words: Tensor) -> Iterator[memoryview]:
    """Yield the first bytes of all words, the second ones, and so on: high ones are mostly zeros."""
    matrix = words.view(torch.uint8).view(-1, words.element_size())
    return (_raw(matrix[:, byte]) for byte in range(words.element_size() if len(words) else 0))


def _deflate(plane: memoryview) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, strategy=zlib.Z_HUFFMAN_ONLY)
    return coder.compress(plane) + coder.flush()


def _inflate(code: bytes, size: int) -> bytes:
    coder = zlib.decompressobj(-zlib.MAX_WBITS)
    plane = coder.decompress(code, size)
    if len(plane) != size or not coder.eof or coder.unused_data:
        raise zlib.error
    return plane


def _positions(name: str, codes: list[bytes], count: int, size: int) -> Tensor:
    """Return the positions of the words that change, int64 [count]; take their code off the list."""
    if count == size:
        return torch.arange(size)
    code = torch.frombuffer(bytearray(codes.pop(0)), dtype=torch.uint8)
    if code.numel() == kernels.elias_fano_bytes(count, size):
        positions = kernels.elias_fano_decode(code, count, size)
        if positions.numel() == count and positions[0] >= 0 and positions[-1] < size and (positions.diff() > 0).all():
            return positions
    raise CorruptMessageError(f"the delta has no valid positions for {name!r}")


def _joined(name: str, codes: list[bytes], count: int, dtype: torch.dtype) -> Tensor:
    """Return the bits that change of as many words, from the codes of their first, second, ... bytes."""
    try:
        if len(codes) != dtype.itemsize:
            raise zlib.error
        planes = [torch.frombuffer(bytearray(_inflate(code, count)), dtype=torch.uint8) for code in codes]
    except zlib.error:
        raise CorruptMessageError(f"the delta has no valid bits for {name!r}") from None
    return torch.stack(planes, dim=1).view(-1).view(dtype)


def _parse(delta: bytes) -> tuple[list[Any], list[bytes]]:
    """Return the rows of the header and the codes, after checks of lengths and of the digest."""
    start = len(MAGIC) + 8
    length = int.from_bytes(delta[len(MAGIC) : start], "little")
    body = memoryview(delta)[_PROLOG_BYTES:]
    whole = len(delta) >= _PROLOG_BYTES and delta[: len(MAGIC)] == MAGIC and length <= len(body)
    if not whole or blake2b(body, digest_size=DIGEST_BYTES).digest() != delta[start:_PROLOG_BYTES]:
        raise CorruptMessageError("these bytes are no delta, or it was truncated or altered")
    try:
        rows = json.loads(bytes(body[:length]))
        codes, at = [], length
        for name, _dtype, shape, count, _before, _after, sizes in rows:
            are_numbers = all(isinstance(number, int) and number >= 0 for number in (*shape, count, *sizes))
            if not are_numbers or not isinstance(name, str) or (count and not (sizes and all(sizes))):
                raise ValueError
            for size in sizes:
                codes.append(bytes(body[at : at + size]))
                at += size
        if at != len(body):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise CorruptMessageError("the header of the delta is not valid") from None
    return rows, codes
