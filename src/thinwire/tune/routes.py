"""How tables of a model travel whose own process group takes their tensors, as NCCL does on a GPU. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.comm.hosts import Hosts
from thinwire.comm.machine import Machine
from thinwire.sums.cost import Demand
from thinwire.sums.scheme import Scheme
from thinwire.tune.prices import Point, Route, RoutePrice, is_dense, route_prices, shared_seconds
from thinwire.tune.window import class_of

Options = dict[Route, RoutePrice]
"""The price of a table by each route that it has."""
SAMPLES = 3
"""Number of the last timed sums, of which the least counts, because a disturbance makes one longer."""


@dataclass(eq=False)
class Routes:
    """What was learned of the ways of all tables of a model whose own group takes their tensors.

    Tables that travel as rows share one sum a step, with its rounds and launches. So which of them do is decided
    together: those that are faster that way, if they save more than the sum costs before its first byte.

    Args:
        own: costs on the model's own group, as `thinwire.comm.machine.measure_collectives` returns them.
        lane: costs on the lane; None without those.
        hosts: the ranks of each host.
        schemes: the schemes that run on the collectives of the group; of two levels only if ``own`` knows those.
        is_host: whether gradients are on the CPU.
    """

    own: Sequence[Machine]
    lane: Machine | None
    hosts: Hosts
    schemes: Sequence[Point]
    is_host: bool = False
    _last: dict[str, tuple[Demand, bool]] = field(default_factory=dict)
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _known: dict[tuple[object, ...], Options] = field(default_factory=dict)  # by class of size

    def learn(self, seconds: float, demands: Mapping[str, tuple[Demand, bool]], schemes: Mapping[str, Point]) -> None:
        """Learn the seconds of a sum, from demands as in `choose`, by these schemes."""
        expected = shared_seconds(self.own[0], self.is_host, schemes.values())
        for name, (demand, is_sparse) in demands.items():
            expected += self._priced(demand, is_sparse, [schemes[name]])[Route.COLLECTIVE].seconds
        self._ratios.append(seconds / expected)
        self._known.clear()

    def choose(self, demands: Mapping[str, tuple[Demand, bool]]) -> dict[str, list[RoutePrice]]:
        """Return the ways of each table, the choice first.

        Args:
            demands: for each table of this step its demand, and whether its gradient is a COO tensor. Demands of
                other tables are remembered.
        """
        self._last.update(demands)
        ratio = min(self._ratios, default=1.0)
        flat = tuple(point for point in self.schemes if isinstance(point, Scheme))
        offers = [self._offer(schemes, ratio) for schemes in dict.fromkeys((flat, tuple(self.schemes)))]
        chosen = min(offers, key=lambda offer: offer[0])[1]
        return {name: chosen[name] for name in demands}

    def _offer(self, schemes: Sequence[Point], ratio: float) -> tuple[float, dict[str, list[RoutePrice]]]:
        """Return the expected seconds of all tables by some schemes, and the prices of each table, the choice first."""
        known = {name: self._options(*one, schemes, ratio) for name, one in self._last.items()}
        best = {name: self._best(options, self._last[name][0]) for name, options in known.items()}
        others = {name: self._others(options) for name, options in known.items()}
        rows = [name for name, option in best.items() if option.route is Route.COLLECTIVE]
        saved = sum(others[name][0].seconds - best[name].seconds for name in rows if others[name])
        points = [best[name].price.scheme for name in rows]
        shared = ratio * shared_seconds(self.own[0], self.is_host, points) if rows else 0.0
        if saved <= shared and all(others[name] for name in rows):
            best.update({name: others[name][0] for name in rows})
            shared = 0.0
        prices = {name: [one, *(it for it in known[name].values() if it is not one)] for name, one in best.items()}
        return shared + sum(one.seconds for one in best.values()), prices

    def _options(self, demand: Demand, is_sparse: bool, schemes: Sequence[Point], ratio: float) -> Options:
        """Return the prices of about such a demand: to work them out takes as long as a small sum."""
        sizes = demand.num_rows, demand.row_bytes, class_of(demand.held), class_of(demand.union), is_dense(demand)
        key = (*sizes, is_sparse, len(schemes))
        if key not in self._known:
            self._known[key] = self._priced(demand, is_sparse, schemes, ratio)
        return self._known[key]

    def _priced(self, demand: Demand, is_sparse: bool, schemes: Sequence[Point], ratio: float = 1.0) -> Options:
        options = route_prices(demand, schemes, self.own, self.lane, self.hosts, is_sparse, self.is_host, ratio)
        return {option.route: option for option in options}

    @staticmethod
    def _best(options: Options, demand: Demand) -> RoutePrice:
        """Return the fastest way; a table with hardly any zeros goes with its bucket, which hides behind backward."""
        if is_dense(demand) and Route.NATIVE in options:
            return options[Route.NATIVE]
        return min(options.values(), key=lambda option: option.seconds)

    @staticmethod
    def _others(options: Options) -> list[RoutePrice]:
        """Return the ways of a table that are not a sum by collectives, the fastest first."""
        rest = [option for route, option in options.items() if route is not Route.COLLECTIVE]
        return sorted(rest, key=lambda option: option.seconds)
