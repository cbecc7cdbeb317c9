"""One test of many texts, in place of one item for each: an item costs more than to read a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")


def for_each(
    values: Sequence[T], name: Callable[[T], str] = str
) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """Decorate a test of one value: it runs for all of them, and fails with the names and errors of all that fail."""

    def decorate(test: Callable[[T], None]) -> Callable[[], None]:
        def run() -> None:
            assert values, "nothing to test"
            failed = []
            for value in values:
                try:
                    test(value)
                except (Exception, pytest.fail.Exception) as error:
                    failed.append(f"{value}: {type(error).__name__}: {error}")
            assert not failed, "\n".join([f"{len(failed)} of {len(values)} failed:", *failed])

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorate
