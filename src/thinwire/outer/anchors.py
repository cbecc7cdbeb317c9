"""The anchors of a model, which all ranks have in common, and the outer optimizer that steps them. Nothing is sent."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import warn
from thinwire.gradients.module import local_of
from thinwire.outer.recipe import OuterRecipe

Fragments = tuple[tuple[str, ...], ...]


def cut(sizes: Mapping[str, int], count: int) -> Fragments:
    """Cut names, in their order, into so many fragments of similar size, none of them empty.

    Args:
        sizes: elements of each parameter, by name.

    Raises:
        ValueError: there are fewer names than fragments.

    Example:
        >>> cut({"a": 10, "b": 10, "c": 20}, 2)
        (('a', 'b'), ('c',))
    """
    if count > len(sizes):
        raise ValueError(f"{count} fragments of {len(sizes)} parameters: pass fragments={max(1, len(sizes))} or less")
    fragments: list[list[str]] = [[]]
    before, left, total = 0, len(sizes), max(1, sum(sizes.values()))
    for name, size in sizes.items():
        is_due = before + size / 2 >= total * len(fragments) / count
        if fragments[-1] and len(fragments) < count and (is_due or left <= count - len(fragments)):
            fragments.append([])
        fragments[-1].append(name)
        before, left = before + size, left - 1
    return tuple(map(tuple, fragments))


class Anchors:
    """The anchors of trained parameters, which have the same bits on all ranks, and an outer SGD for each fragment.

    Anchors of 16-bit parameters have 32 bits, others the bits of the parameter. The anchor of a frozen parameter is the
    parameter itself, until it is trained.

    Args:
        parameters: parameters by name, in an order that all ranks share.
        recipe: the settings of the outer optimizer, and the number of fragments.
        buffers: returns the floating buffers by name, as they are now; those that are finite are anchored.

    Raises:
        ValueError: more fragments than parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        recipe: OuterRecipe,
        buffers: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self._parameters, self._buffers = dict(parameters), buffers
        self.fragments = cut({name: local_of(entry).numel() for name, entry in parameters.items()}, recipe.fragments)
        self.anchors = {  # `.data` has a version of its own: stepping an anchor must not look like writing a parameter
            name: nn.Parameter(local_of(entry.detach()).data, requires_grad=False)
            for name, entry in self._parameters.items()
        }
        self.buffers = {name: _wide(buffer) for name, buffer in buffers().items() if bool(buffer.isfinite().all())}
        self._frozen = set(self._parameters)
        self._kept: dict[str, Tensor] = {}
        self.adopt()
        sgd = partial(torch.optim.SGD, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov)
        self._outers = [sgd([self.anchors[name] for name in names]) for names in self.fragments]

    def adopt(self) -> None:
        """Anchor parameters that are trained from now on where they are; call it before each step of the optimizer."""
        self._widen([name for name in self._frozen if self._parameters[name].requires_grad])

    def check_start(self, optimized: Iterable[Tensor], is_loaded: bool) -> None:
        """Look for one of these parameters that was written to since it was anchored, which rounds take for training.

        That is right for a model that norms its own weights, or an optimizer that steps away and back.

        Raises:
            ValueError: there is one, and a state was loaded into the model.
        """
        ids = set(map(id, optimized))
        for name in (name for name, entry in self._parameters.items() if id(entry) in ids and name not in self._frozen):
            if not torch.equal(self.local(name), self.anchors[name].detach().to(self._parameters[name].dtype)):
                text = (
                    f"parameter {name!r} was written to between attach and the first step, which rounds take for"
                    " training: load a model before attach, or the saved state of the outer loop as well"
                )
                if is_loaded:
                    raise ValueError(text)
                warn(f"{text}; a model that writes to its own parameters may do so")
                return

    def local(self, name: str) -> Tensor:
        """Return this rank's part of a parameter, in the same memory."""
        return local_of(self._parameters[name].detach())

    def trained(self, fragment: int) -> list[str]:
        """Return the names of a fragment that have been trained, on all ranks alike."""
        return [name for name in self.fragments[fragment] if name not in self._frozen]

    def difference(self, fragment: int) -> dict[str, Tensor]:
        """Return ``anchor - parameter`` of a fragment, in the precision of the anchor.

        The anchor is rounded to the precision of the parameter first: rounding is no training, and a row that nobody
        touched must differ by zero.
        """
        differences = {}
        for name in self.trained(fragment):
            local, anchor = self.local(name), self.anchors[name].detach()
            differences[name] = torch.sub(anchor.to(local.dtype).to(anchor.dtype), local).contiguous()
        return differences

    def step(self, fragment: int, means: Mapping[str, Tensor], is_plain: bool = False) -> None:
        """Step the anchors of a fragment by mean differences, which are used up.

        Args:
            is_plain: whether the mean of the parameters becomes the anchor, without the outer optimizer.
        """
        for name, mean in means.items():
            if is_plain:
                self.anchors[name].detach().sub_(mean)
            else:
                self.anchors[name].grad = mean
        if not is_plain:
            self._outers[fragment].step()
            self._outers[fragment].zero_grad(set_to_none=True)

    @torch.no_grad()
    def mix(self, names: Iterable[str], weight: float) -> None:
        """Move trained parameters towards their anchors; a weight of 1 replaces them."""
        for name in names:
            _mix(self.local(name), self.anchors[name].detach(), weight)

    def buffer_difference(self) -> dict[str, Tensor | None]:
        """Return ``anchor - buffer`` by name, and None for a buffer that is gone or has another shape."""
        there = self._there()
        return {
            name: (anchor - there[name]).contiguous() if name in there else None
            for name, anchor in self.buffers.items()
        }

    @torch.no_grad()
    def land_buffers(self, means: Mapping[str, Tensor], weight: float) -> None:
        """Make the means of buffers their anchors, and move the buffers towards them."""
        there = self._there() if means else {}
        for name, mean in means.items():
            anchor = self.buffers[name].sub_(mean)
            if name in there:
                _mix(there[name], anchor, weight)

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return what is trained and the buffers, in the same memory, with their anchors.

        A buffer that is gone or has another shape is its anchor.
        """
        there = self._there()
        trained = [name for name in self.anchors if name not in self._frozen]
        pairs = {name: (self.local(name), self.anchors[name].detach()) for name in trained}
        return pairs | {name: (there.get(name, anchor), anchor) for name, anchor in self.buffers.items()}

    @torch.no_grad()
    def replace(self) -> None:
        """Put the anchors into the parameters and buffers."""
        for local, anchor in self.pairs().values():
            local.copy_(anchor)

    @property
    def are_swapped(self) -> bool:
        return bool(self._kept)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Put the anchors into the parameters and buffers, and what was there back at the end."""
        self._kept = {name: local.clone() for name, (local, _) in self.pairs().items()}
        try:
            self.replace()
            yield
        finally:
            kept, self._kept = self._kept, {}
            self.load_own(kept)

    def own(self) -> dict[str, Tensor]:
        """Return this rank's own parameters and buffers, also while they are `swapped`: the tensors themselves."""
        return self._kept or {name: local for name, (local, _) in self.pairs().items()}

    @torch.no_grad()
    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Put what `own` returned into the parameters and buffers."""
        for name, (local, anchor) in self.pairs().items():
            if name in state and local is not anchor:
                local.copy_(state[name])

    def state_dict(self) -> dict[str, Any]:
        """Return anchors, outer momentum and buffers by name: the tensors themselves."""
        momenta = {}
        for outer, names in zip(self._outers, self.fragments, strict=True):
            for name in names:
                momentum = outer.state.get(self.anchors[name], {}).get("momentum_buffer")
                if momentum is not None:
                    momenta[name] = momentum
        anchors = {name: anchor.detach() for name, anchor in self.anchors.items() if name not in self._frozen}
        return {"anchors": anchors, "momenta": momenta, "buffers": dict(self.buffers)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if `load_state_dict` cannot restore a state."""
        for kind, here in (("anchors", self.anchors), ("momenta", self.anchors), ("buffers", self.buffers)):
            for name, tensor in state[kind].items():
                if name not in here or tensor.shape != here[name].shape:
                    raise ValueError(f"the state has {kind} of {name!r} {list(tensor.shape)}, and this model has not")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `check_state` has accepted."""
        self._widen(self._frozen.intersection(state["anchors"]))
        for name, saved in state["anchors"].items():
            self.anchors[name].detach().copy_(saved)
        for name, saved in state["buffers"].items():
            self.buffers[name].copy_(saved)
        for outer, names in zip(self._outers, self.fragments, strict=True):
            outer.state.clear()
            for name in names:
                if name in state["momenta"]:
                    anchor = self.anchors[name]
                    momentum = state["momenta"][name].to(anchor.device, anchor.dtype, copy=True)
                    outer.state[anchor]["momentum_buffer"] = momentum

    def _widen(self, names: Collection[str]) -> None:
        """Give parameters that were frozen anchors of their own."""
        self._frozen.difference_update(names)
        for name in names:
            self.anchors[name].data = _wide(self.anchors[name].detach())

    def _there(self) -> dict[str, Tensor]:
        """Return the buffers that have the shape of their anchors."""
        buffers, known = self._buffers().items() if self.buffers else (), self.buffers
        return {name: one.detach() for name, one in buffers if name in known and one.shape == known[name].shape}


def _mix(local: Tensor, anchor: Tensor, weight: float) -> None:
    """Move a tensor towards its anchor; a weight of 1 replaces it, whatever it was."""
    local.copy_(torch.lerp(local.to(anchor.dtype), anchor, weight) if weight < 1.0 else anchor)


def _wide(tensor: Tensor) -> Tensor:
    """Return a contiguous copy, of at least 32 bits."""
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    return tensor.detach().to(dtype, copy=True).contiguous()
