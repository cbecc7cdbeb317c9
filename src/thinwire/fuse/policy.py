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

    @property
    def name(self) -> str:
        """Name of the policy, as `thinwire.fuse.parse` reads it: ``byte_cap:mb=8``."""
        settings = {item.name: getattr(self, item.name) for item in fields(self)}
        changed = [item.name for item in fields(self) if settings[item.name] != item.default]
        return ":".join([self.constructor, *(f"{name}={settings[name]!r}" for name in changed)])


def groups_ending_at(ends: Iterable[int]) -> Groups:
    """Return groups that end before these tensors; the last end is the number of tensors.

    Example:
        >>> groups_ending_at([2, 3])
        ((0, 1), (2,))
    """
    return tuple(tuple(range(start, end)) for start, end in pairwise((0, *ends)))
