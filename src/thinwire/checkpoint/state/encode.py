"""Encoding of a state, after every step, to a layout and the tensors that are to be copied."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thinwire.checkpoint.state.layout import COLLECTIONS, DTYPES, STORABLE, TAGS, StateLayout, TensorSlice, aligned
from thinwire.checkpoint.state.sharding import local_of, part_of

_PLAIN_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
Replicated = Callable[[str, Any], bool]
_MOST_LEVELS = 100  # that a reader can follow, deep in the calls of a trainer
_TOO_DEEP = f"{{}}: containers in one another more than {_MOST_LEVELS} deep cannot be stored: make them flatter"
_LEAVES = frozenset((*_PLAIN_TYPES, DTensor, int, float, str, bool, bytes, type(None), torch.Size))


@dataclass(frozen=True, eq=False)
class Encoded:
    """A state with encoded values, whose tensors are still the training's own.

    ``slices`` is the same object as long as names, shapes and positions stay the same. For each of them, ``tensors``
    has the local tensor of this rank, and ``originals`` that of the state, which may be a DTensor. The first
    ``shared_bytes`` of ``payload_bytes`` are of slices that all ranks should have alike.
    """

    slices: tuple[TensorSlice, ...]
    tensors: list[Tensor]
    originals: list[Tensor]
    payload_bytes: int
    shared_bytes: int
    _pieces: Sequence[str]
    _texts: Sequence[str]
    _slices_text: str
    _values: Sequence[int]

    @property
    def values(self) -> str:
        """A digest of the values that all ranks should have alike, such as a learning rate; empty if there is none."""
        texts = [self._texts[hole] for hole in self._values]
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] if texts else ""

    @property
    def alike(self) -> str:
        """A digest of what there is to be alike, without its bits: ranks have it in common if theirs are the same."""
        return alike(self.slices, self.shared_bytes)

    def to_bytes(self, about: dict[str, Any] | None = None, codes: Sequence[tuple[int, int]] = ()) -> bytes:
        """Return the layout, as JSON. Any thread may call it, even after the state has changed."""
        parts = [text for pair in zip(self._pieces, (*self._texts, ""), strict=True) for text in pair]
        tail = f'"payload_bytes":{self.payload_bytes},"about":{_dumps(about or {})}'
        tail += f',"codes":{_dumps(codes)}' if codes else ""
        tail += f',"shared_bytes":{self.shared_bytes}}}' if self.shared_bytes else "}"
        return f'{{"tree":{"".join(parts)},"slices":{self._slices_text},{tail}'.encode()


def alike(slices: Sequence[TensorSlice], shared_bytes: int) -> str:
    """Return a digest of the first slices, without their bits; empty if nothing is shared."""
    first = [item.to_json() for item in slices if item.offset < shared_bytes]
    return hashlib.sha256(_dumps(first).encode()).hexdigest() if first else ""


class StateEncoder:
    """An encoder of the state of a training after every step.

    While keys, shapes and positions stay the same, only numbers and the like are encoded again: 9 ms instead of 120 for
    a state of 4,000 tensors.

    Args:
        replicated: returns whether ranks have a tensor or another value alike, by its path. Such tensors come first in
            the payload. If some are held in parts, only those are alike of which several ranks hold the same part.
    """

    def __init__(self, replicated: Replicated = lambda path, value: False) -> None:
        self._form: _Form | None = None
        self._replicated = replicated

    def encode(self, state: Any) -> Encoded:
        """Encode a state made of the types in `layout.STORABLE`.

        Subclasses of dict, list, tuple, set, int, float, str and bytes come back as those; numpy's numbers and arrays,
        and tensors of classes with ``__tensor_flatten__``, as what they were. The same view of the same memory twice
        (tied weights) is stored once. Raises ValueError, with the path, for anything else.
        """
        structure: list[Any] = []
        leaves: list[Any] = []
        try:
            _scan(state, structure, leaves)
        except RecursionError as error:
            raise ValueError(_TOO_DEEP.format("the state")) from error
        encoded = self._form.fill(leaves) if self._form is not None and self._form.structure == structure else None
        if encoded is None:
            self._form = _Form(state, structure, leaves, self._replicated)
            encoded = self._form.fill(leaves)
            assert encoded is not None, "a form fits the state that it was made of"
        return encoded


def flatten(state: Any) -> tuple[StateLayout, list[Tensor]]:
    """Return the layout of a state (`StateEncoder`), and its tensors in the order of the slices; nothing is copied.

    Example: layout, tensors = flatten({"model": model.state_dict(), "step": 7})
    """
    encoded = StateEncoder().encode(state)
    return StateLayout.from_bytes(encoded.to_bytes()), [tensor.detach() for tensor in encoded.tensors]


def _scan(value: Any, structure: list[Any], leaves: list[Any]) -> None:
    """Everything of a state in one order: its structure, and its leaves."""
    if type(value) in _LEAVES:
        structure.append(_form_of(value))
        leaves.append(value)
    elif isinstance(value, dict):
        keys = tuple(value)
        kinds = tuple(map(type, keys))
        # (1,) equals (True,); and types go first: (1, 2) == np.int8(1) is an array, which is neither true nor false
        structure.append((repr(keys) if tuple in kinds else kinds, keys))
        for inner in value.values():
            _scan(inner, structure, leaves)
    elif isinstance(value, (list, tuple)):
        structure.append((isinstance(value, tuple), len(value)))
        for inner in value:
            _scan(inner, structure, leaves)
    elif isinstance(value, np.ndarray):
        leaves.append(_array(value))
        structure.append((np.ndarray, _form_of(leaves[-1])))
    elif _is_wrapper(value):
        names, context = value.__tensor_flatten__()
        structure.append((type(value), tuple(names), repr(context), value.shape, value.stride()))
        for name in names:
            _scan(getattr(value, name), structure, leaves)
    else:
        structure.append(_form_of(value))
        leaves.append(value)


def _is_wrapper(value: Any) -> bool:
    """Whether a tensor is made of inner tensors (of torchao's quantized weights and optimizers, for example)."""
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__") and not isinstance(value, DTensor)


def _array(value: np.ndarray) -> Any:
    """The array as a tensor, of the same memory if it is in order and writable; itself if torch has no such dtype."""
    value = value.copy() if any(stride < 0 for stride in value.strides) else value  # torch has no such strides
    try:
        return torch.from_numpy(np.require(value, requirements=("C", "W", "E")))
    except (TypeError, ValueError):
        return value


class _TensorLeaf(NamedTuple):
    """The index of a tensor among the leaves, the number of its slice, and the leaf that it is tied to, or its own."""

    index: int
    number: int
    first: int


def _form_of(leaf: Any) -> Any:
    """All that has to stay as it is of a tensor for the same slice; None for a value, which may be any other."""
    if not isinstance(leaf, Tensor):
        return None
    spec = (leaf.placements, leaf.device_mesh) if isinstance(leaf, DTensor) else None
    return type(leaf), leaf.shape, leaf.dtype, leaf.device, leaf.layout, spec


class _Form:
    """JSON of a state with holes for values that change, and the indices of its tensors. Raises ValueError."""

    def __init__(self, state: Any, structure: list[Any], leaves: list[Any], replicated: Replicated) -> None:
        self.structure, self._scanned = structure, leaves
        self._tensors: list[_TensorLeaf] = []
        self._slices: list[TensorSlice] = []
        self._payload_bytes = 0
        self._seen: dict[Any, int] = {}  # the leaf of each view of memory
        self._pieces = [""]
        self._holes: list[tuple[int, str]] = []  # leaf, path
        self._values: list[Any] = []
        self._texts: list[str] = []
        self._leaves = self._depth = 0
        self._write(state, "")
        self._shared_bytes = self._lay_out(replicated)
        self._scanned = []
        self._alike = [hole for hole, (_, path) in enumerate(self._holes) if replicated(path, self._values[hole])]
        self._final_slices = tuple(self._slices)
        self._slices_text = _dumps([item.to_json() for item in self._slices])

    def _lay_out(self, replicated: Replicated) -> int:
        """Give each slice its offset, replicated ones first; how many bytes those are."""
        originals = {leaf.number: self._scanned[leaf.index] for leaf in reversed(self._tensors)}
        sharded = any(item.part is not None for item in self._slices)
        first = [
            (not sharded or _is_copied(originals[n])) and replicated(item.path, originals[n])
            for n, item in enumerate(self._slices)
        ]
        shared_bytes = 0
        for number in sorted(originals, key=lambda number: (not first[number], number)):
            offset = aligned(self._payload_bytes)
            item = self._slices[number] = replace(self._slices[number], offset=offset)
            self._payload_bytes = offset + item.nbytes
            shared_bytes = self._payload_bytes if first[number] else shared_bytes
        return shared_bytes

    def fill(self, leaves: list[Any]) -> Encoded | None:
        """None if the state is not of this form any more."""
        tensors: list[Tensor] = []
        originals: list[Tensor] = []
        for index, number, first in self._tensors:
            local = local_of(leaves[index])
            if local.shape != self._slices[number].shape:  # a DTensor may be cut anywhere
                return None
            if first == index:
                tensors.append(local)
                originals.append(leaves[index])
            elif _view(local) != _view(local_of(leaves[first])):
                return None
        for hole, (index, path) in enumerate(self._holes):
            value = leaves[index]
            if value is not self._values[hole] or isinstance(value, set):  # a set may have changed
                self._values[hole], self._texts[hole] = value, _dumps(_plain(value, path))
        sizes, texts = (self._payload_bytes, self._shared_bytes), ([*self._texts], self._slices_text, self._alike)
        return Encoded(self._final_slices, tensors, originals, *sizes, self._pieces, *texts)

    def _write(self, value: Any, path: str) -> None:
        if isinstance(value, dict):
            items = [(_dumps(_key(key, f"{path}, key")), inner, _join(path, key)) for key, inner in value.items()]
            self._nest('{"dict":[', [(f"[{key},", inner, joined, "]") for key, inner, joined in items], "]}")
        elif isinstance(value, np.ndarray) and isinstance(tensor := self._scanned[self._leaves], Tensor):
            self._nest('{"array":', [("", tensor, path, "")], "}")
        elif _is_wrapper(value):
            names, kind = value.__tensor_flatten__()[0], kind_of(value)
            parts = [(f"[{_dumps(name)},", getattr(value, name), _join(path, name), "]") for name in names]
            self._nest(f'{{"subclass":[{_dumps(kind)},[', parts, "]]}")
        elif isinstance(value, (list, tuple)) and type(value) is not torch.Size:
            opening, closing = ('{"tuple":[', "]}") if isinstance(value, tuple) else ("[", "]")
            self._nest(opening, [("", inner, _join(path, i), "") for i, inner in enumerate(value)], closing)
        elif isinstance(value, Tensor):
            self._add(value, path)
            self._leaves += 1
        else:
            self._holes.append((self._leaves, path))
            self._values.append(value)
            self._texts.append(_dumps(_plain(value, path)))
            self._pieces.append("")
            self._leaves += 1

    def _nest(self, opening: str, items: list[tuple[str, Any, str, str]], closing: str) -> None:
        self._depth += 1
        if self._depth > _MOST_LEVELS:
            raise ValueError(_TOO_DEEP.format(f"{items[0][2][:80]}..." if items else "the state"))
        self._pieces[-1] += opening
        for number, (before, inner, path, after) in enumerate(items):
            self._pieces[-1] += f",{before}" if number else before
            self._write(inner, path)
            self._pieces[-1] += after
        self._pieces[-1] += closing
        self._depth -= 1

    def _add(self, tensor: Tensor, path: str) -> None:
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or name not in DTYPES or tensor.device.type == "meta":
            raise ValueError(f"{path}: a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be stored")
        try:
            part = part_of(tensor) if isinstance(tensor, DTensor) else None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        local = local_of(tensor)
        if type(local) not in _PLAIN_TYPES:
            raise ValueError(f"{path}: a {type(tensor).__name__} cannot be stored; give the tensors that it is made of")
        nbytes = local.numel() * local.itemsize
        view = (_view(local), part)
        first = self._seen.setdefault(view, self._leaves) if nbytes else self._leaves
        if first == self._leaves:
            self._slices.append(TensorSlice(path, name, tuple(local.shape), 0, nbytes, part))
            number = len(self._slices) - 1
        else:
            number = next(leaf.number for leaf in self._tensors if leaf.index == first)
        self._tensors.append(_TensorLeaf(self._leaves, number, first))
        self._pieces[-1] += f'{{"tensor":{number}}}'


def _is_copied(tensor: Tensor) -> bool:
    """Whether several ranks hold the same part of a DTensor: those along a dimension of its mesh (of HSDP, say)."""
    if not isinstance(tensor, DTensor):
        return False
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(placement.is_replicate() and size > 1 for placement, size in sizes)


def _view(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for two tensors that are the same view of the same memory."""
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), flags)


def kind_of(tensor: Any) -> list[Any]:
    """Return the class of a tensor made of inner tensors, its shape and strides, and all else it takes to make one.

    The last is None if it cannot be stored.
    """
    try:
        context = _key(tensor.__tensor_flatten__()[1], "")
    except ValueError:
        context = None
    kind = type(tensor)
    return [kind.__module__, kind.__qualname__, list(tensor.shape), list(tensor.stride()), context]


def _plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, str)):
        return str(value) if isinstance(value, str) else int(value)
    for tag, (kind, write, _) in TAGS.items():
        if isinstance(value, kind):
            return {tag: write(value)}
    for tag, (kind, write, _) in COLLECTIONS.items():
        if isinstance(value, kind):
            return {tag: [_key(item, path) for item in write(value)]}
    what = f"numpy array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise ValueError(f"{path or 'the state'}: a {what} cannot be stored; make it of {STORABLE}")


def _key(key: Any, path: str) -> Any:
    if isinstance(key, (list, tuple)) and type(key) is not torch.Size:
        items = [_key(item, path) for item in key]
        return {"tuple": items} if isinstance(key, tuple) else items
    if isinstance(key, dict):
        return {"dict": [[_key(name, path), _key(item, path)] for name, item in key.items()]}
    if isinstance(key, Tensor):
        raise ValueError(f"{path or 'the state'}: a tensor cannot be a key")
    return _plain(key, path)


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
