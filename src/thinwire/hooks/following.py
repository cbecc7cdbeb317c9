"""The groups that a model follows at the moment, and whether it compresses."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.hooks.compressed import CompressedSync
from thinwire.hooks.fit import Gradient
from thinwire.hooks.groups import Groups, places_of, plan_groups
from thinwire.hooks.parameters import ParameterHooks
from thinwire.hooks.replan import contiguous

Names = tuple[tuple[str, ...], ...]


class Following:
    """Changes what the next step does; on all ranks alike, and between two steps.

    Args:
        names: of all parameters but tables of embeddings.
        groups: to follow; None for those of the default.
        hooks: of a plain module, whose groups can change; None for DDP, whose buckets cannot.
        compressed: what can be paused, and dropped.
    """

    def __init__(
        self,
        names: Sequence[str],
        groups: Names | None,
        hooks: ParameterHooks | None,
        compressed: CompressedSync | None,
    ) -> None:
        self.groups = groups
        self._names, self._hooks, self._compressed = frozenset(names), hooks, compressed

    @property
    def can_regroup(self) -> bool:
        return self._hooks is not None

    @property
    def can_be_dropped(self) -> bool:
        """Whether exact synchronization in the default groups would be anything else."""
        return self._hooks is not None or self._compressed is not None

    @property
    def compresses(self) -> bool:
        """Whether there is anything to drop memories of."""
        return self._compressed is not None

    @property
    def num_groups(self) -> int:
        """With those of tables."""
        return len(self.groups or ()) if self._hooks is None else len(self._hooks.groups)

    def follow(self, groups: Names | None) -> None:
        self.groups = groups
        self._regroup(self._planned)

    def pause(self, paused: bool) -> None:
        """Without compression and in the groups of the default, or back."""
        if self._compressed is not None:
            self._compressed.paused = paused
        self._regroup(None if paused else self._planned)

    def send_alone(self) -> None:
        """Each gradient for itself; until the next `follow`."""
        self._regroup(tuple((place,) for place in self._order()))

    def drop(self) -> bool:
        """Exact synchronization in the groups of the default, for good; whether memories are handed out."""
        self.follow(None)
        return self._compressed is not None and self._compressed.memories.drop()

    def current(self) -> Groups | None:
        """The groups to follow, as positions in the order in which gradients become ready; None if no runs of it."""
        assert self._hooks is not None
        order = self._order()
        known = set(order)
        default = plan_groups(self._hooks.trained, self._hooks.order)
        groups = ([place for place in group if place in known] for group in self._planned or default)
        return contiguous([group for group in groups if group], order)

    def gradients(self) -> list[Gradient]:
        """In the order in which they become ready."""
        assert self._hooks is not None
        found = []
        for place in self._order():
            entry = self._hooks.trained[place]
            compresses = self._compressed is not None and self._compressed.takes(entry.name)
            found.append(Gradient(entry.name, entry.num_bytes, compresses))
        return found

    @property
    def _planned(self) -> Groups | None:
        if self.groups is None or self._hooks is None:
            return None
        return places_of(self._hooks.trained, self.groups)

    def _order(self) -> list[int]:
        assert self._hooks is not None
        return [place for place in self._hooks.order if self._hooks.trained[place].name in self._names]

    def _regroup(self, groups: Groups | None) -> None:
        if self._hooks is not None:
            self._hooks.regroup(groups)
