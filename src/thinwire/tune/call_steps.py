"""The steps of a training, found in the sequence of its collective calls: a process group sees nothing else of them."""

from collections.abc import Hashable, Sequence

LEAST_CALLS, MOST_CALLS = 16, 1 << 14
"""Calls that are looked at for a period: so many at first, then twice that number, and so on."""
PROVEN, MOST_EXCEPTIONS = 16, 3
"""Times the calls that were looked at, after which a period is right and another call an exception, as an evaluation
is; so many times. Else part of a step repeated itself, as layers of one size do."""


class CallSteps:
    """Says which calls begin a step, once their sequence repeats itself.

    Ranks that make the same calls in the same order are given the same answers.

    Example:
        >>> steps = CallSteps()
        >>> sum(steps.note(call) for call in "abab" * 100) > 150
        True
    """

    def __init__(self) -> None:
        self._calls: list[Hashable] = []
        self._least = LEAST_CALLS
        self._cycle: list[Hashable] = []
        self._repeated = self._exceptions = 0
        self.index = 0
        """Index in its step of the next call, if it is the expected one."""

    @property
    def length(self) -> int:
        """Number of calls of a step; 0 as long as the sequence does not repeat itself."""
        return len(self._cycle)

    def note(self, call: Hashable) -> bool:
        """Note the next call; return whether it is the first of a step."""
        if self._cycle and call == self._cycle[self.index]:
            self._repeated += 1
            self.index = (self.index + 1) % len(self._cycle)
            return self.index == 1 % len(self._cycle)
        if self._cycle:
            self._exceptions += 1
            if self._repeated < PROVEN * self._least or self._exceptions > MOST_EXCEPTIONS:
                self._least, self._exceptions = min(2 * self._least, MOST_CALLS), 0
            self._calls, self._cycle, self._repeated, self.index = [], [], 0, 0
        self._calls.append(call)
        if len(self._calls) >= self._least:
            half = self._calls[len(self._calls) // 2 :]
            self._cycle = half[len(half) - period(half) :] if period(half) else []
            self._least = self._least if self._cycle else min(2 * self._least, MOST_CALLS)
            if self._cycle or len(self._calls) >= MOST_CALLS:
                self._calls = []
        return False

    def begin_at(self, index: int) -> None:
        """Have steps begin at the call that has this index until now."""
        self._cycle = self._cycle[index:] + self._cycle[:index]
        self.index = (self.index - index) % max(1, len(self._cycle))


def period(calls: Sequence[Hashable]) -> int:
    """Return the shortest period of a sequence that has three of them; 0 if it has none.

    >>> period("abcabcabca"), period("abcabcab"), period("aaaa")
    (3, 0, 1)
    """
    borders = [0] * len(calls)  # longest proper prefix that is a suffix too, of each prefix (Knuth, Morris and Pratt)
    for end in range(1, len(calls)):
        border = borders[end - 1]
        while border and calls[end] != calls[border]:
            border = borders[border - 1]
        borders[end] = border + (calls[end] == calls[border])
    shortest = len(calls) - borders[-1] if calls else 0
    return shortest if 0 < 3 * shortest <= len(calls) else 0
