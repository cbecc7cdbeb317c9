"""The board of a run: the agents that are there, those that train in this round, and the place of each host.

A pure state machine, whose only clock is the one that is passed in: agents are lost by how long the board has not heard
from them, so the clocks of hosts need not agree. A *place* is the group rank of a host. Shards of checkpoints belong to
ranks, so a host that stays keeps its place, and its shards need not move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from thinwire.errors import CorruptMessageError
from thinwire.holder.version import field

_CLOSED_CONNECTION_SECONDS = 1.0  # after which an agent whose connection was closed is lost, if it does not return


class Claim(NamedTuple):
    """The place that a host had last: in that round, of that many hosts."""

    round: int
    hosts: int
    place: int


def assign_places(claims: Mapping[str, Claim | None]) -> list[str]:
    """Return the agents in the order of their places, from what their hosts had before; None for a new host.

    With as many hosts as in the last round, each keeps its place and new ones take the free places. With more or fewer,
    hosts of the last round keep their order, and others follow. Where two claim one place, the later round counts.

    Example:
        >>> assign_places({"a": Claim(1, 3, 0), "new": None, "c": Claim(1, 3, 2)})
        ['a', 'new', 'c']
        >>> assign_places({"a": Claim(1, 3, 0), "c": Claim(1, 3, 2)})
        ['a', 'c']
    """

    def order(name: str) -> tuple[int, int, str]:
        claim = claims[name]
        return (1, 0, name) if claim is None else (-claim.round, claim.place, name)

    in_order = sorted(claims, key=order)
    last = max((claim for claim in claims.values() if claim is not None), default=None)
    if last is None or last.hosts != len(claims):
        return in_order
    places: dict[int, str] = {}
    for name in in_order:
        claim = claims[name]
        if claim is not None and claim.place < len(claims):
            places.setdefault(claim.place, name)
    others = iter([name for name in in_order if name not in places.values()])
    return [places[place] if place in places else next(others) for place in range(len(claims))]


@dataclass
class _Agent:
    """``want``: "join" the next round, or "run", to go on in this one. ``fresh``: it has not trained yet.

    ``where``: its address, a free port there, and the address of its holder.
    """

    want: str
    fresh: bool
    claim: Claim | None
    where: list[Any]
    seen: float
    arrival: int


class Board:
    """The agents of a run and its rounds.

    Args:
        run_id: the name of the run.
        hosts: least and greatest number of hosts that train.
        patience: seconds without a word after which an agent is lost.
        last_call: seconds to wait for more hosts once the least number is there: at the first start, and later.
    """

    def __init__(self, run_id: str, hosts: tuple[int, int], patience: float, last_call: tuple[float, float]) -> None:
        self.run_id, self.hosts, self.patience, self._last_call = run_id, hosts, patience, last_call
        self.round, self.closed = 0, False
        self._places: list[str] = []  # of the round that is on; empty if none is
        self._agents: dict[str, _Agent] = {}
        self._values: dict[str, str] = {}
        self._ready: tuple[set[str], float] = set(), 0.0
        self._arrivals = 0

    def look(self) -> dict[str, Any]:
        """Return how far the run is here, by which agents choose among boards; what an agent has from an earlier start
        of the run does not count."""
        claims = [agent.claim.round for agent in self._agents.values() if agent.claim is not None and not agent.fresh]
        return {"run": self.run_id, "round": max([self.round, *claims]), "closed": self.closed}

    def sync(self, name: str, request: Mapping[str, Any], now: float) -> dict[str, Any]:
        """Take the word of an agent and return what is on. Raises ValueError if it does not fit this run."""
        low, high = self.hosts
        told = field(request, "run", str), *field(request, "hosts", list, 2, 2)
        if told != (self.run_id, low, high):
            raise ValueError(
                f"the agent at the endpoint has --rdzv-id={self.run_id} --nnodes={low}:{high}, and this one"
                f" --rdzv-id={told[0]} --nnodes={told[1]}:{told[2]}: start all of them alike"
            )
        want, claim = field(request, "want", str), request.get("claim")
        self._drop([other for other, agent in self._agents.items() if agent.seen + self.patience < now])
        if want in ("leave", "close"):
            self.closed |= want == "close"
            self._drop([name])
        else:
            if claim is not None:
                if [type(part) for part in field(request, "claim", list, 3, 3)] != [int, int, int] or min(claim) < 0:
                    raise CorruptMessageError("a claim is three numbers: round, hosts, place")
                claim = Claim(*claim)
            if want == "join" and name in self._places and claim is not None and claim.round == self.round:
                self._places = []  # its workers have ended
            if name not in self._agents:
                self._arrivals += 1
            arrival = self._agents[name].arrival if name in self._agents else self._arrivals
            where = field(request, "where", list, 3, 3)
            self._agents[name] = _Agent(want, field(request, "fresh", bool), claim, where, now, arrival)
        self._form(now)
        if name in self._places:
            self._agents[name].want = "run"  # it hears of it now
        joining = any(agent.want == "join" and other not in self._places for other, agent in self._agents.items())
        return {
            "round": self.round,
            "hosts": len(self._places),
            "place": self._places.index(name) if name in self._places else None,
            "master": self._agents[self._places[0]].where[:2] if self._places else None,
            "grow": 0 < len(self._places) < high and joining,
            "closed": self.closed,
        }

    def holders(self) -> dict[str, Any]:
        """Return the addresses of the holders of the hosts of this round, by place."""
        return {"holders": [self._agents[name].where[2] for name in self._places]}

    def disconnected(self, names: set[str], now: float) -> None:
        """Note that the connection of these agents was closed: they are lost soon, unless they return."""
        for agent in [self._agents[name] for name in names if name in self._agents]:
            agent.seen = min(agent.seen, now - self.patience + _CLOSED_CONNECTION_SECONDS)

    def store(self, round_number: int, request: Mapping[str, Any]) -> dict[str, Any]:
        """Get, set or add to a value that the agents of the newest round share; None for those of another one."""
        if round_number != self.round:
            return {"value": None}
        key, value = field(request, "key", str, 1, 512), request.get("value")
        if isinstance(value, int):
            self._values[key] = str(int(self._values.get(key, "0")) + value)
        elif isinstance(value, str):
            self._values[key] = value
        return {"value": self._values.get(key)}

    def _drop(self, names: list[str]) -> None:
        for name in names:
            self._agents.pop(name, None)
            if name in self._places:
                self._places = []

    def _form(self, now: float) -> None:
        """Start a round once enough agents are ready, and those of the last one have stopped their workers or are
        lost."""
        low, high = self.hosts
        ready = {name: agent for name, agent in self._agents.items() if agent.want == "join"}
        if self._ready[0] != set(ready):
            self._ready = set(ready), now
        if self._places or self.closed or len(ready) < low or len(ready) < len(self._agents):
            return
        call = self._last_call[not all(agent.fresh for agent in ready.values())]
        if len(ready) < high and now < self._ready[1] + call:
            return
        chosen = sorted(ready, key=lambda name: (-(ready[name].claim or (0,))[0], ready[name].arrival))[:high]
        self.round = 1 + max([self.round, *(agent.claim.round for agent in ready.values() if agent.claim is not None)])
        self._places = assign_places({name: ready[name].claim for name in chosen})
        self._values = {}
