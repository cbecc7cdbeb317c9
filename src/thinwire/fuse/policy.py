"""What a fusion policy is: a profile in, groups of tensors out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar, Protocol

from thinwire.fuse.profile import Groups, Profile


class Policy(Protocol):
    """Decides which gradients travel together, from the profile alone: ranks with the same profile decide the same."""

    @property
    def name(self) -> str:
        """As `thinwire.fuse.parse` reads it."""
        ...

    def groups(self, profile: Profile) -> Groups:
        """Contiguous groups in backward order, every tensor in one of them."""
        ...


@dataclass(frozen=True)
class NamedPolicy:
    """A policy whose name is that of its constructor, with the settings that are not the defaults."""

    constructor: ClassVar[str]

    @property
    def name(self) -> str:
        """As `thinwire.fuse.parse` reads it: ``byte_cap:mb=8``."""
        settings = {item.name: getattr(self, item.name) for item in fields(self)}
        changed = [item.name for item in fields(self) if settings[item.name] != item.default]
        return ":".join([self.constructor, *(f"{name}={settings[name]!r}" for name in changed)])


def groups_ending_at(ends: Iterable[int]) -> Groups:
    """Groups that end before these tensors; the last end is the number of tensors.

    Example:
        >>> groups_ending_at([2, 3])
        ((0, 1), (2,))
    """
    return tuple(tuple(range(start, end)) for start, end in pairwise((0, *ends)))
