"""The board of a run: the agents that are there, those that train in this round, and the group rank of each host.

A pure state machine, whose only clock is the one that is passed in: agents are lost by how long the board has not heard
from them, so the clocks of hosts need not agree. A *rank* is here
the group rank of a host. Shards of checkpoints belong to ranks, so a host that stays keeps its own, and its shards need
not move.

Every agent at an endpoint serves a board, and agents agree on which of them to use. The frames are those between
holders: JSON under a key made from the job's secret, with limits and timeouts.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from thinwire.checkpoint.holder.acceptor import Acceptor
from thinwire.checkpoint.holder.frames import Connection, FrameKind, Handshake
from thinwire.checkpoint.holder.replication import call, is_loopback, parse_address
from thinwire.checkpoint.holder.version import field
from thinwire.errors import CorruptMessageError, LostPeerError, PeerError, ThinwireError, logger

_MOST_FORMER = 16


class Claim(NamedTuple):
    """The rank that a host had last: in that round, among that many hosts."""

    round: int
    hosts: int
    rank: int


def assign_ranks(claims: Mapping[str, Claim | None]) -> list[str]:
    """Return the agents in the order of their ranks, from what their hosts had before; None for a new host.

    With as many hosts as in the last round, each keeps its rank and new ones take the free ones. With more or fewer,
    hosts of the last round keep their order, and others follow. Where two claim the same rank, the later round counts.

    Example:
        >>> assign_ranks({"a": Claim(1, 3, 0), "new": None, "c": Claim(1, 3, 2)})
        ['a', 'new', 'c']
        >>> assign_ranks({"a": Claim(1, 3, 0), "c": Claim(1, 3, 2)})
        ['a', 'c']
    """

    def order(name: str) -> tuple[int, int, str]:
        claim = claims[name]
        return (1, 0, name) if claim is None else (-claim.round, claim.rank, name)

    in_order = sorted(claims, key=order)
    last = max((claim for claim in claims.values() if claim is not None), default=None)
    if last is None or last.hosts != len(claims):
        return in_order
    ranks: dict[int, str] = {}
    for name in in_order:
        claim = claims[name]
        if claim is not None and claim.rank < len(claims):
            ranks.setdefault(claim.rank, name)
    others = iter([name for name in in_order if name not in ranks.values()])
    return [ranks[rank] if rank in ranks else next(others) for rank in range(len(claims))]


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
        self._ranks: list[str] = []  # of the round that is on; empty if none is
        self._agents: dict[str, _Agent] = {}
        self._former: list[Any] = []  # holders of agents that are gone, the last one first
        self._values: dict[str, str] = {}
        self._added: dict[tuple[str, str], str] = {}  # result by key and sender, who may not have got it
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
        gathered = field(request, "run", str), *field(request, "hosts", list, 2, 2)
        if gathered != (self.run_id, low, high):
            raise ValueError(
                f"the agent at the endpoint has --rdzv-id={self.run_id} --nnodes={low}:{high}, and this one"
                f" --rdzv-id={gathered[0]} --nnodes={gathered[1]}:{gathered[2]}: start all of them alike"
            )
        want, claim = field(request, "want", str), request.get("claim")
        self._drop([other for other, agent in self._agents.items() if agent.seen + self.patience < now])
        if want in ("leave", "close"):
            self.closed |= want == "close"
            self._drop([name])
        else:
            if claim is not None:
                if [type(part) for part in field(request, "claim", list, 3, 3)] != [int, int, int] or min(claim) < 0:
                    raise CorruptMessageError("a claim is three numbers: round, hosts, rank")
                claim = Claim(*claim)
            if want == "join" and name in self._ranks and claim is not None and claim.round == self.round:
                self._ranks = []  # its workers have ended
            if name not in self._agents:
                self._arrivals += 1
            arrival = self._agents[name].arrival if name in self._agents else self._arrivals
            where = field(request, "where", list, 3, 3)
            self._agents[name] = _Agent(want, field(request, "fresh", bool), claim, where, now, arrival)
        self._form(now)
        if name in self._ranks:
            self._agents[name].want = "run"  # it hears of it now
        joining = any(agent.want == "join" and other not in self._ranks for other, agent in self._agents.items())
        return {
            "round": self.round,
            "hosts": len(self._ranks),
            "rank": self._ranks.index(name) if name in self._ranks else None,
            "master": self._agents[self._ranks[0]].where[:2] if self._ranks else None,
            "holders": self.holders()["holders"],
            "grow": 0 < len(self._ranks) < high and joining,
            "closed": self.closed,
        }

    def holders(self) -> dict[str, Any]:
        """Return the addresses of the holders of this round by rank, then of standbys, and of agents that are gone:
        their holders may live."""
        names = [*self._ranks, *(name for name in self._agents if name not in self._ranks)]
        return {"holders": list(dict.fromkeys([*(self._agents[name].where[2] for name in names), *self._former]))}

    def disconnected(self, names: set[str], now: float) -> None:
        """Note that the connection of these agents was closed: they are lost soon, unless they return."""
        for agent in [self._agents[name] for name in names if name in self._agents]:
            agent.seen = min(agent.seen, now - self.patience / 2)

    def store(self, round_number: int, request: Mapping[str, Any]) -> dict[str, Any]:
        """Get, set or add to a value that the agents of the newest round share; None for agents of another one.

        An addition of the same key and ``by`` is done once.
        """
        if round_number != self.round:
            return {"value": None}
        key, value = field(request, "key", str, 1, 512), request.get("value")
        if isinstance(value, int):
            by = field(request, "by", str, 0, 64)
            if not by or (key, by) not in self._added:
                self._added[key, by] = self._values[key] = str(int(self._values.get(key, "0")) + value)
            return {"value": self._added[key, by]}
        if isinstance(value, str):
            self._values[key] = value
        return {"value": self._values.get(key)}

    def _drop(self, names: list[str]) -> None:
        for name in names:
            if (agent := self._agents.pop(name, None)) is not None:
                self._former = [agent.where[2], *self._former][:_MOST_FORMER]
            if name in self._ranks:
                self._ranks = []

    def _form(self, now: float) -> None:
        """Start a round once enough agents are ready, and the agents of the last one have stopped their workers or are
        lost."""
        low, high = self.hosts
        ready = {name: agent for name, agent in self._agents.items() if agent.want == "join"}
        if self._ready[0] != set(ready):
            self._ready = set(ready), now
        if self._ranks or self.closed or len(ready) < low or len(ready) < len(self._agents):
            return
        call = self._last_call[not all(agent.fresh for agent in ready.values())]
        if len(ready) < high and now < self._ready[1] + call:
            return
        chosen = sorted(ready, key=lambda name: (-(ready[name].claim or (0,))[0], ready[name].arrival))[:high]
        self.round = 1 + max([self.round, *(agent.claim.round for agent in ready.values() if agent.claim is not None)])
        self._ranks = assign_ranks({name: ready[name].claim for name in chosen})
        self._values, self._added = {}, {}


_LOST_SECONDS = 0.2  # for another look at the board that was just lost, where others answer
_IDLE_SECONDS = 60.0  # an agent speaks every second


def is_local(host: str) -> bool:
    """Return whether ``host`` is an address of this machine, which is so if a socket can be bound to it."""
    with contextlib.suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as sock:
            sock.bind(where)
            return True
    return False


class BoardServer:
    """A server of one board on all addresses of this host, or on loopback only if that is the endpoint.

    Raises OSError if the port is taken.
    """

    def __init__(self, board: Board, endpoint: str, secret: bytes) -> None:
        self._board, self._lock, self._connections = board, threading.Lock(), set[Connection]()
        host, port = parse_address(endpoint)
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where if is_loopback(host) else ("", port), family=family, backlog=512)
        self._acceptor = Acceptor(
            listener, lambda: Handshake(secret), self._admit, lambda *why: logger.debug("%s", why)
        )

    def close(self) -> None:
        self._acceptor.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def _admit(self, sock: socket.socket, handshake: Handshake, _: str) -> None:
        connection = Connection(sock, self._board.patience, handshake=handshake)
        with self._lock:
            self._connections.add(connection)
        try:
            threading.Thread(target=self._serve, args=(connection,), daemon=True, name="agent").start()
        except RuntimeError:  # no more threads now; those who call later may be served
            connection.close()
            self._connections.discard(connection)

    def _serve(self, connection: Connection) -> None:
        names: set[str] = set()
        try:
            while True:
                request = connection.receive(_IDLE_SECONDS).json
                try:
                    connection.send(FrameKind.REPLY, self._answer(request, names))
                except ValueError as error:
                    connection.send_error(error)
        except (ThinwireError, OSError):
            pass
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)
                self._board.disconnected(names, time.monotonic())

    def _answer(self, request: dict[str, Any], names: set[str]) -> dict[str, Any]:
        op = field(request, "op", str)
        with self._lock:
            if op == "sync":
                name = field(request, "name", str, 1, 256)
                names.add(name)
                return self._board.sync(name, request, time.monotonic())
            if op == "store":
                return self._board.store(field(request, "round", int), request)
            return self._board.holders() if op == "holders" else self._board.look()


class Boards:
    """The boards at all endpoints, as an agent sees them: it uses the one where the run is furthest, and of several
    the first. So agents that lost one find each other at the next, and a host that returns finds the others.

    ``endpoints`` are ``host:port``, in the same order on all hosts. ``timeout`` seconds are for a connection, and for
    an answer. ``new_board`` makes the board that this agent serves at an endpoint of its own.
    """

    def __init__(self, endpoints: Sequence[str], secret: bytes, timeout: float, new_board: Callable[[], Board]) -> None:
        self.endpoints, self._secret, self._timeout, self._new_board = list(endpoints), secret, timeout, new_board
        self._served: dict[str, BoardServer] = {}
        self._endpoint: str | None = None
        self._connection: Connection | None = None
        self._lock, self._closed = threading.Lock(), False

    @property
    def serving(self) -> bool:
        """Whether this agent serves the board that it uses."""
        return self._endpoint in self._served

    def request(self, op: str, content: dict[str, Any], choose: bool = False) -> dict[str, Any]:
        """Ask the board in use. If the connection is lost, try it again, or with ``choose`` the best of all boards.

        Raises LostPeerError if it does not answer, PeerError for another secret, ValueError for another run.
        """
        with self._lock:
            if self._closed:
                raise LostPeerError("this agent has ended")
            if self._connection is None:
                self._use(self._best() if choose or self._endpoint is None else self._endpoint)
            assert self._connection is not None
            try:
                return self._connection.request(op, content).json
            except ThinwireError as error:
                self._connection = self._connection.close()
                raise LostPeerError(f"the agent at {self._endpoint}: {error}") from error

    def review(self, leave: dict[str, Any]) -> None:
        """Change to a better board, if there is one now; ``leave`` is what to say to the one in use."""
        if len(self.endpoints) < 2:
            return
        with self._lock:
            if not self._closed and (best := self._best()) != self._endpoint and self._connection is not None:
                with contextlib.suppress(ThinwireError, ValueError):
                    self._connection.request("sync", leave)
                self._connection = self._connection.close()
                self._use(best)

    def close(self) -> None:
        """End the conversation and all boards here. A request of another thread connects no more."""
        with self._lock:
            self._closed, self._connection = True, self._connection and self._connection.close()
            for server in self._served.values():
                server.close()

    def _use(self, endpoint: str) -> None:
        try:
            self._connection, self._endpoint = call(endpoint, self._secret, self._timeout), endpoint
        except (ThinwireError, OSError) as error:
            kind = LostPeerError if type(error) is not PeerError else PeerError
            reason = str(error).removeprefix(f"holder {endpoint}: ")
            raise kind(f"the agent at {endpoint}: {reason}") from error

    def _best(self) -> str:
        """Return the endpoint where the run is furthest, the first of those; serve at its own endpoints, too."""
        for endpoint in self.endpoints:
            if endpoint not in self._served and is_local(parse_address(endpoint)[0]):
                with contextlib.suppress(OSError):  # another agent of this host serves it
                    self._served[endpoint] = BoardServer(self._new_board(), endpoint, self._secret)
        result: dict[str, int] = {}
        failed: dict[str, Exception] = {}

        def look(endpoint: str) -> None:
            try:
                with contextlib.closing(call(endpoint, self._secret, self._timeout)) as connection:
                    result[endpoint] = field(connection.request("look", {}).json, "round", int)
            except (ThinwireError, OSError, ValueError) as error:
                failed[endpoint] = error

        lost = self._endpoint if self._connection is None else None
        ordered = sorted(self.endpoints, key=lambda endpoint: endpoint == lost)
        threads = [threading.Thread(target=look, args=(endpoint,), daemon=True) for endpoint in ordered]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + self._timeout
        for endpoint, thread in zip(ordered, threads, strict=True):  # a stopped process accepts and never answers
            seconds = _LOST_SECONDS if endpoint == lost and result else self._timeout
            thread.join(max(0.0, min(seconds, deadline - time.monotonic())))
        answered = dict(result)
        if not answered:
            reasons = dict(failed)
            for error in reasons.values():
                if type(error) is PeerError:
                    raise error
            raise LostPeerError(f"no agent answers at {', '.join(self.endpoints)}: {reasons or 'no answer in time'}")
        return max(self.endpoints, key=lambda endpoint: answered.get(endpoint, -1))
