"""A torch that does not have a private name."""

from __future__ import annotations

from typing import Any


class Without:
    """What has a private name in this torch, as it is in one that does not have it; ``hidden`` may be a path."""

    def __init__(self, owner: object, hidden: str) -> None:
        self._owner, (self._first, _, self._rest) = owner, hidden.partition(".")

    def __getattr__(self, name: str) -> Any:
        if name == self._first and not self._rest:
            raise AttributeError(f"{type(self._owner).__name__!r} object has no attribute {name!r}", name=name)
        value = getattr(self._owner, name)
        return Without(value, self._rest) if name == self._first else value
