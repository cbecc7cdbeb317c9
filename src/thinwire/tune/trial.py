"""Which of several options makes the steps of a training shortest, decided while it runs: the one decision of its kind.

A `Trial` is pure: it returns which arm each of the next steps plays, and is given the numbers that all ranks gathered
about them. It reads no clock and sends nothing, so ranks that are given the same numbers play the same arms. The first
arm is stock: it plays until another one has won, and again in pairs with whatever has won.

1. *Watch.* Before anything is imported, compiled or measured for another arm, the seconds for which steps of stock
   waited for the network are added up: no other arm can save more. What another arm costs before its first step is
   spent only when it is less than `RENT` of that, so whoever leaves early has lost little, and a model that never waits
   never pays. Ranks meet to ask when the number of steps has doubled, and not while no other arm could begin. Of the
   first `FIRST_STEPS` steps it may cost `FIRST_SHARE`: with the regret below that makes 5 %, for an arm that is up to
   `DECISIVE` times as slow.
2. *Test.* A challenger plays against the arm that stands, in pairs of neighbouring steps, in the order of Thue and
   Morse (ABBA BAAB), so that neither has the better half of a drift. A step takes as long as on its slowest rank. A
   pair is void if kernels were compiled in it, or one of its steps took `DECISIVE` times as long as the last ones of
   its arm, as when somebody evaluates. Any other is won if the challenger is faster by `GAIN`. Whether it wins more
   than half of them is tested by a gambler who bets on wins at fair odds: whatever the noise, his capital reaches c
   with a probability of at most 1 / c where wins are no likelier than losses (Ville), at any time. So tests may end as
   soon as they can, and all tests of a life together take an arm that is not faster with a probability of at most
   `ERROR`. What is faster by `DECISIVE` in `WON_PAIRS` in a row wins at once.
3. *Bounded regret.* What pairs that are not void cost more than the standing arm alone would have is at most
   `FIRST_REGRET` steps and a share of `REGRET_SHARE` of all steps, and the last block of pairs. A test that would
   exceed that waits.
4. *Rest, and look again.* Where stock stands nothing is measured at all; a challenger that lost comes back after
   `LOOK_STEPS`, then twice that number, and so on. An arm that won plays a pair against stock every `CHECK_STEPS`; a
   gambler bets on stock, never with less than his first capital, and takes it back. Where stock is no faster in half of
   the pairs, that happens once in 1 / `ERROR` of them on average, or less often (Page's test).
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ERROR = 0.02
"""Largest probability that any test in the life of a trial takes an arm that is not faster by `GAIN`."""
MISSED = 0.2
"""Largest probability that a test gives up an arm that is faster by `GAIN` in more than half of the pairs."""
GAIN = 0.05
"""Share by which a step of a challenger must be faster; so arms of equal speed do not alternate."""
DECISIVE = 3.0
"""Factor of speed that decides a test if pairs in a row show it: no more steps are spent on the slower arm. A step that
takes so many times as long as its arm did lately is disturbed, as by an evaluation, and decides nothing."""
LOST_PAIRS, WON_PAIRS = 2, 3
"""Numbers of such pairs; more for a change of what stands, which a disturbed step of the standing arm would look like
where nothing is known yet of how long it takes."""
LATELY = 5
STAKES = (0.4, 0.9)
"""Shares of their capital that the gamblers bet: a careful one, for noisy pairs, and a bold one, for clear ones."""
MOST_PAIRS = 32
RENT = 0.5
"""Share of the seconds that steps have waited for the network, up to which another arm may cost before its first
step."""
FIRST_STEPS, FIRST_SHARE = 200, 0.01
"""So many first steps of stock, and the share of their seconds that another arm may cost before its first one there."""
FIRST_REGRET, REGRET_SHARE = 4.0, 0.02
"""Bound of the extra time of tests: so many steps, and a share of all steps so far."""
CHECK_STEPS, SOON_STEPS = 200, 2
"""Steps between two pairs of a challenger that won and stock, and after a pair that it lost."""
LOOK_STEPS, MOST_LOOK_STEPS = 1000, 64_000


_RESTS = ("_look", "_check")


@dataclass
class Gambler:
    """Capital of one who bets on the next outcome at fair odds, as the mean of several stakes.

    Args:
        least: what the capital of a stake never falls below, so that a long good past does not hide a change.
    """

    least: float = 0.0
    capitals: list[float] = field(default_factory=lambda: [1.0] * len(STAKES))

    def bet(self, has_won: bool) -> None:
        factors = [1.0 + stake if has_won else 1.0 - stake for stake in STAKES]
        self.capitals = [max(self.least, one * by) for one, by in zip(self.capitals, factors, strict=True)]

    @property
    def capital(self) -> float:
        return statistics.fmean(self.capitals)


class Trial:
    """Decides which arm plays in each step.

    Call `note` after each step, which played `arm`. When it returns numbers, gather them from all ranks, and pass all
    of them to `learn` before the next step, or after one of the standing arm that is not noted.

    Args:
        arms: names, which `explain` says: stock first, then challengers in the order in which they are tested.
        setup_seconds: seconds that a challenger costs a rank before its first step; 0 to begin at once.
        gain: share by which a step of a challenger must be faster.
    """

    def __init__(self, arms: Sequence[str], setup_seconds: float = 0.0, gain: float = GAIN) -> None:
        self.arms = list(arms)
        self.standing = 0
        self.steps = self.tests = 0
        self.regret = 0.0  # in steps of the arm that stood
        self._setup_seconds, self._gain = setup_seconds, gain
        self._looks = 0
        self._waiting = list(range(1, len(self.arms)))  # challengers to be tested
        self._challenger = self._pairs = self._voids = 0
        self._wins: list[bool] = []
        self._ratios: list[float] = []  # of seconds of the challenger over seconds of the standing arm
        self._forecast = {0: 1.0}  # the last measured one of each arm to stock
        self._for, self._against, self._doubt = Gambler(), Gambler(), Gambler(least=1.0)
        self._lately: dict[int, deque[float]] = {}  # seconds of the last steps of each arm on this rank
        self._block: list[int] = []  # arms of the steps of the running pairs
        self._numbers: list[float] = []
        self._left = 0  # steps of the standing arm, where no pairs run
        self.is_idle = False  # whether the last step changed nothing but these numbers
        self._then = ""  # name of the method that goes on after them
        self._waited = self._seconds = 0.0
        self._totals = (0.0, 0.0, 0.0)
        self._why = f"{self.arms[0]}: no other was tried yet"
        self._go_on()

    @property
    def arm(self) -> str:
        """Name of the arm of the next step."""
        return self.arms[self._index]

    @property
    def _index(self) -> int:
        return self._block[len(self._numbers)] if self.is_timed else self.standing

    @property
    def is_timed(self) -> bool:
        """Whether the next step is one of a pair."""
        return len(self._numbers) < len(self._block)

    @property
    def is_settled(self) -> bool:
        """Whether all challengers were tested, and the standing arm plays until it is time to look again."""
        return not self._block and self._then in _RESTS

    @property
    def is_watching(self) -> bool:
        """Whether it is not known yet that there is anything to gain."""
        return self._setup_seconds > 0.0 and bool(self._waiting)

    def offer(self, arms: Sequence[str]) -> None:
        """Test further challengers, or those of before again, when what is under way has ended."""
        for arm in arms:
            if arm not in self.arms:
                self.arms.append(arm)
            if (index := self.arms.index(arm)) not in (*self._waiting, self.standing):
                self._waiting.append(index)
        if self.is_settled:
            self._go_on()

    def note(self, seconds: float, waited: float = 0.0, is_typical: bool = True) -> list[float] | None:
        """Note a step; return the numbers that all ranks must gather now, or None.

        Of a watch these are seconds for which steps waited, all of their seconds, and those for which they waited for
        processors, of which `Playing` knows.

        Args:
            seconds: what it took on this rank.
            waited: how much of that this rank waited for the network.
            is_typical: whether it says anything about later ones: not if kernels were compiled in it.
        """
        self.steps += 1
        self.is_idle = not self._block and self._left > LATELY
        if not self.is_idle:
            lately = self._lately.setdefault(self._index, deque(maxlen=LATELY))
            is_typical &= not lately or seconds <= DECISIVE * statistics.median(lately)
            lately.append(seconds)
        if self._block:
            self._numbers.append(seconds if is_typical else -seconds)
            return self._numbers if len(self._numbers) == len(self._block) else None
        self._waited, self._seconds = self._waited + waited, self._seconds + seconds
        self._left -= 1
        if self._left > 0:
            return None
        if self._then == "_watch":
            return [self._waited, self._seconds, 0.0]
        getattr(self, self._then)()
        return None

    def learn(self, numbers: Sequence[Sequence[float]]) -> None:
        """Decide by the numbers of all ranks, see `note`."""
        columns = list(zip(*numbers, strict=True))
        if not self._block:
            least = min(columns[0]), min(columns[1]), max(columns[2])
            self._totals = tuple(total + one for total, one in zip(self._totals, least, strict=True))
            self._watch()
            return
        slowest = [max(map(abs, column)) for column in columns]
        is_typical = [min(column) > 0.0 for column in columns]
        block, self._block, self._numbers = self._block, [], []
        seen = 0
        for one in range(0, len(block), 2):
            mine, standing = (one, one + 1) if block[one] == self._challenger else (one + 1, one)
            if is_typical[one] and is_typical[one + 1]:
                seen += 1
                ratio = slowest[mine] / max(slowest[standing], 1e-9)
                self.regret = max(0.0, self.regret + min(ratio, max(DECISIVE, self._expected())) - 1.0)
                self._ratios.append(ratio)
        self._pairs += seen
        self._voids = 0 if seen else self._voids + 1
        if seen and self._challenger == 0:
            self._judge_check()
        elif seen:
            self._judge_test(self._ratios[-seen:])
        else:
            self._pause(min(CHECK_STEPS, SOON_STEPS**self._voids), "_play")

    def interrupt(self) -> None:
        """Break off the running pairs, whose numbers are not complete; they begin again after the next step."""
        if self.is_timed:
            self._pause(1, "_play")
            self._numbers = []

    def decline(self, reason: str) -> None:
        """Let stock stand, because prices say so: a challenger is not worth a test, or not any more."""
        self.standing, self._why = 0, reason
        self._waiting, self._block, self._numbers = [], [], []
        self._go_on()

    def explain(self) -> str:
        """Return why the standing arm stands, in a line."""
        return self._why

    def state_dict(self) -> dict[str, Any]:
        """Return what was decided, as plain values; seconds are left out, because they may be of another machine."""
        return {
            "standing": self.arms[self.standing],
            "steps": self.steps,
            "regret": self.regret,
            "tests": self.tests,
            "looks": self._looks,
            "left": self._left if self._then in _RESTS else 0,
            "reason": self._why,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another run ended; a test that it had not completed begins again."""
        if state["standing"] not in self.arms:  # it was offered later
            self.arms.append(state["standing"])
        self.standing = self.arms.index(state["standing"])
        self.steps, self.regret, self._why = int(state["steps"]), float(state["regret"]), str(state["reason"])
        self.tests, self._looks, left = int(state["tests"]), int(state["looks"]), int(state["left"])
        self._block, self._numbers, self._ratios, self._lately = [], [], [], {}
        self._waiting = [index for index in range(1, len(self.arms)) if index != self.standing and not left]
        if self.standing:
            self._setup_seconds = 0.0
        if left:
            self._pause(left, "_check" if self.standing else "_look")
        else:
            self._go_on()

    # --- what follows what

    def _pause(self, steps: int, then: str) -> None:
        """Play the standing arm for some steps."""
        self._block, self._left, self._then = [], max(1, steps), then
        self._waited = self._seconds = 0.0

    def _go_on(self) -> None:
        """Begin the next test, or rest if no challenger is left."""
        if self.is_watching:
            self._pause(min(LOOK_STEPS, self.steps), "_watch")
        elif self._waiting:
            self._challenger = self._waiting.pop(0)
            self.tests += 1
            self._for, self._against = Gambler(), Gambler()
            self._pairs, self._ratios, self._wins = 0, [], []
            self._lately.pop(self._challenger, None)  # of an earlier test
            self._play()
        elif self.standing:
            self._doubt = Gambler(least=1.0)
            self._pause(CHECK_STEPS, "_check")
        else:
            self._pause(min(MOST_LOOK_STEPS, LOOK_STEPS << min(16, self._looks)), "_look")

    def _watch(self) -> None:
        """Begin tests if the steps of stock have waited for long enough."""
        waited, seconds, delayed = self._totals
        is_cheap = self._setup_seconds * self.steps <= FIRST_SHARE * FIRST_STEPS * seconds
        if RENT * waited < self._setup_seconds or waited < self._gain * seconds:
            self._why = f"{self.arms[0]}: steps wait {waited / max(seconds, 1e-9):.1%} of their time for the network"
            self._why += f", and {delayed / seconds:.1%} for processors" if delayed else ""
        elif not is_cheap and self.steps < FIRST_STEPS:
            self._why = f"{self.arms[0]}: no other is tried in the first {FIRST_STEPS} steps, which are short"
        else:
            self._setup_seconds = 0.0
        self._go_on()
        if self.is_watching and not is_cheap:
            self._left = max(self._left, FIRST_STEPS - self.steps)

    def _look(self) -> None:
        """Test all challengers again."""
        self._looks += 1
        self._waiting = list(range(1, len(self.arms)))
        self._go_on()

    def _check(self) -> None:
        """Play a pair of the standing arm and stock."""
        self._challenger = self._pairs = 0
        self._ratios = self._ratios[1 - WON_PAIRS :]
        self._play()

    def _play(self) -> None:
        """Play the next pairs, once they are expected to keep the regret within its bound."""
        pairs = 1 if self._challenger == 0 or self._pairs < WON_PAIRS else 2 if self._pairs < 6 else 4
        missing = self.regret + pairs * max(0.0, self._expected() - 1.0) - FIRST_REGRET - REGRET_SHARE * self.steps
        if missing > 0.0:
            self._pause(math.ceil(missing / REGRET_SHARE), "_play")
            return
        both = [self.standing, self._challenger]
        orders = [(self.steps // 2 + number).bit_count() % 2 for number in range(pairs)]
        self._block = [one for order in orders for one in (both[::-1] if order else both)]

    def _expected(self) -> float:
        """Return the expected ratio of a step of the challenger to one of the standing arm.

        A single pair may be disturbed where its arm has not played before: beyond `DECISIVE` it says no more than that.
        """
        forecast = self._forecast.get(self._challenger, 1.0) / self._forecast.get(self.standing, 1.0)
        return min(max(DECISIVE, forecast), statistics.median_low(self._ratios[-3:] or [forecast]))

    def _judge_test(self, ratios: Sequence[float]) -> None:
        for ratio in ratios:
            has_won = ratio * (1.0 + self._gain) < 1.0
            self._for.bet(has_won)
            self._against.bet(not has_won)
            self._wins.append(has_won)
        is_lost = len(self._ratios) >= LOST_PAIRS and min(self._ratios[-LOST_PAIRS:]) > DECISIVE
        if self._for.capital >= self.tests * (self.tests + 1) / ERROR or self._is_won:
            self._end_test(has_won=True)
        elif self._against.capital >= 1.0 / MISSED or is_lost or len(self._wins) >= MOST_PAIRS:
            self._end_test(has_won=False)
        else:
            self._play()

    @property
    def _is_won(self) -> bool:
        """Whether the last pairs show a challenger that is faster beyond doubt."""
        return len(self._ratios) >= WON_PAIRS and max(self._ratios[-WON_PAIRS:]) * DECISIVE < 1.0

    def _end_test(self, has_won: bool) -> None:
        ratio = statistics.median(self._ratios)
        challenger, standing = self.arms[self._challenger], self.arms[self.standing]
        winner, loser, factor = (challenger, standing, 1.0 / ratio) if has_won else (standing, challenger, ratio)
        self._why = (
            f"{winner}: a step with {loser} takes {factor:.2f} times as long; {challenger} won {sum(self._wins)} of"
            f" {len(self._wins)} pairs"
        )
        self._forecast[self._challenger] = ratio * self._forecast.get(self.standing, 1.0)
        if has_won:
            self.standing = self._challenger
        self._ratios = [1.0 / self._forecast.get(self.standing, 1.0)]  # of stock to it, for the next check
        self._go_on()

    def _judge_check(self) -> None:
        ratio = self._ratios[-1]
        self._doubt.bet(ratio < 1.0)
        if self._doubt.capital >= 1.0 / ERROR or self._is_won:
            self._why = f"{self.arms[0]}: {self.arms[self.standing]} has become slower"
            self.standing = 0
            self._looks += 1
            self._go_on()
        else:
            self._pause(SOON_STEPS if ratio < 1.0 else CHECK_STEPS, "_check")
