"""Contexts in which an error is told to whoever has to hear of it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class Telling:
    """A context in which exceptions are told to a function, which may raise another one.

    Without a generator: a small step enters a dozen, and `contextlib.contextmanager` takes three times the calls.
    """

    __slots__ = ("_tell",)

    def __init__(self, tell: Callable[[BaseException], None]) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._tell(error)
