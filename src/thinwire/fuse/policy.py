"""The protocol of a fusion policy: a profile in, groups of tensors out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar, Protocol

from thinwire.fuse.profile import Groups, Profile


class Policy(Protocol):
    """A choice of gradients that travel together, by the profile alone: the same on ranks with the same profile."""

    @property
    def name(self) -> str:
        """Name of the policy, as `thinwire.fuse.parse` reads it."""
        ...

    def groups(self, profile: Profile) -> Groups:
        """Return contiguous groups in backward order, every tensor in one of them."""
        ...


@dataclass(frozen=True)
class NamedPolicy:
    """A policy whose name is that of its constructor, with the settings that are not defaults."""

    constructor: ClassVar[str]

    def __init_subclass__(cls, constructor: str) -> None:
        super().__init_subclass__()
        cls.constructor = constructor
        cls.__repr__ = NamedPolicy.__repr__  # before `dataclass` writes one with the name of the class

    def __repr__(self) -> str:
        return f"{self.constructor}({', '.join(self._settings())})"

    @property
    def name(self) -> str:
        """Name of the policy, as `thinwire.fuse.parse` reads it: ``byte_cap:mb=8``."""
        return ":".join([self.constructor, *self._settings()])

    def _settings(self) -> list[str]:
        values = {item: getattr(self, item.name) for item in fields(self)}
        return [f"{item.name}={value!r}" for item, value in values.items() if value != item.default]


def groups_ending_at(ends: Iterable[int]) -> Groups:
    """Return groups that end before these tensors; the last end is the number of tensors.

    Example:
        >>> groups_ending_at([2, 3])
        ((0, 1), (2,))
    """
    return tuple(tuple(range(start, end)) for start, end in pairwise((0, *ends)))
