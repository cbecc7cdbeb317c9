"""Which items of a function with many of them run: with ``--pairs`` so many that each two values meet, with ``--rest``
the others, the slow ones, and what hypothesis draws, of which there are more.

Most of what breaks in a product of parameters breaks for one value, or for two together: 936 items of 39 schemes x
6 sizes x 4 dtypes are 234 that have each scheme with each size, each scheme with each dtype, and each size with each
dtype. `make test` runs those, `make test-slow` the others; without either option all run.

Where an item starts ranks or takes long, `@pytest.mark.few(N)` says how many of a function are enough for `make test`:
they are spread evenly, with the first and the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import pytest

T = TypeVar("T")
MANY = 24  # items of a function; of fewer, all run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--pairs", action="store_true", help="of products of parameters, items that cover all pairs")
    group.addoption("--rest", action="store_true", help="what `-m 'not slow' --pairs` leaves out or cuts short")
    group.addoption("--part", default="0/1", metavar="K/N", help="of the slow tests the K-th of N parts, K any number")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of tests that start ranks, import no file without any: they are more than half of the files."""
    if config.option.markexpr.startswith("ranks and ") and collection_path.match("test_*.py"):
        return "mark.ranks" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(trylast=True)  # after all that add parameters
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Drop what ``--pairs`` leaves out before it is an item: 7,200 more of them took a quarter of a worker's start."""
    calls = metafunc._calls  # the only list of them, and no part of pytest's interface
    option = metafunc.config.option
    if option.pairs and calls and "not slow" not in option.markexpr:
        calls[:] = _first(calls, [call.params for call in calls], None)
    elif option.pairs and calls:
        is_slow = metafunc.definition.get_closest_marker("slow") is not None
        few = metafunc.definition.get_closest_marker("few")
        quick = [call for call in calls if not any(mark.name == "slow" for mark in call.marks)]
        calls[:] = calls[:1] if is_slow or not quick else _first(quick, [call.params for call in quick], few)


@pytest.hookimpl(tryfirst=True)  # before `-m` takes items away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.rest:
        return
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            functions[item.nodeid.partition("[")[0]].append(item)
    first = {
        item
        for function in functions.values()
        for item in _first(function, list(map(_parameters, function)), function[0].get_closest_marker("few"))
    }
    part, parts = map(int, config.option.part.split("/"))

    def is_kept(item: pytest.Item) -> bool:
        if item.get_closest_marker("slow") is not None:
            return crc32(item.nodeid.encode()) % parts == part % parts
        return item not in first or hasattr(getattr(item, "obj", None), "hypothesis")

    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item)])
    items[:] = [item for item in items if is_kept(item)]


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _first(each: Sequence[T], rows: Sequence[dict[str, Any]], few: pytest.Mark | None) -> list[T]:
    """What of a function runs first, of calls or items whose parameters are these."""
    if few is not None:
        return [each[number] for number in spread(len(each), *few.args)]
    if len(each) < MANY or len(rows[0]) < 2:
        return list(each)
    return [each[number] for number in covering(rows)]


def spread(count: int, few: int) -> list[int]:
    """So many numbers below a count, evenly spread from the first to the last.

    >>> spread(11, 4), spread(4, 1), spread(2, 5)
    ([0, 3, 7, 10], [0], [0, 1])
    """
    few = min(few, count)
    return [round(number * (count - 1) / max(few - 1, 1)) for number in range(few)]


def covering(rows: Sequence[dict[str, Any]]) -> list[int]:
    """The numbers of rows in which any two values meet that meet in any row; the row with the most new pairs first.

    >>> covering([{"a": a, "b": b, "c": c} for a in (0, 1) for b in (0, 1) for c in (0, 1)])
    [0, 3, 5, 6]
    """
    numbers: dict[object, int] = {}
    pairs = [
        {numbers.setdefault(pair, len(numbers)) for pair in combinations(sorted(map(_value, row.items())), 2)}
        for row in rows
    ]
    missing, kept = set(numbers.values()), []
    heap = [(-len(new), number) for number, new in enumerate(pairs)]  # it may be fewer by now, and is never more
    heapify(heap)
    while missing:
        most, best = heappop(heap)
        new = len(pairs[best] & missing)
        if new == -most:
            missing -= pairs[best]
            kept.append(best)
        else:
            heappush(heap, (-new, best))
    return sorted(kept)


def _value(entry: tuple[str, Any]) -> tuple[str, str]:
    """Equal for equal values that are written as such, and for one object; the order is the same in all processes."""
    name, value = entry
    return name, (repr(value) if _is_plain(value) else f"object {id(value)}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (int, float, str, bytes)) or type(value).__module__ == "torch"
