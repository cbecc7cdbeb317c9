"""The rendezvous of torchrun's agents: ranks that stay, lost hosts, standbys, and a holder that is kept."""

import contextlib
import json
import os
import secrets
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from thinwire.checkpoint.elastic.board import Board, Boards, Claim, is_local
from thinwire.checkpoint.elastic.heartbeat import Heartbeats
from thinwire.checkpoint.elastic.warm import Warm
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.replication import parse_address
from thinwire.checkpoint.holder.start import (
    AGENT_VARIABLE,
    SOCKET_VARIABLE,
    STANDBYS_VARIABLE,
    HolderOptions,
    beside,
    birth_of,
    ensure_holder,
    load_secret,
    socket_path,
)
from thinwire.errors import LostPeerError, PeerError, ThinwireError, logger

BIND_VARIABLE = "THINWIRE_BIND"
_PORT = 29400
_POLL_SECONDS = 0.05
_REVIEW_SECONDS = 2.0
_HEED_SECONDS = 1.0  # for a worker that hangs to end by SIGTERM


class ElasticRendezvous(RendezvousHandler):
    """The ``thinwire`` rendezvous backend: `torchrun --rdzv-backend=thinwire`.

    Agents beyond the greatest number of hosts stand by. When an agent fails or falls silent, the others stop their
    workers and start them again with a standby instead, or with fewer hosts if ``--nnodes=MIN:MAX`` allows that.

    ``--rdzv-endpoint`` is a list of ``host:port``: agents on those hosts serve the rendezvous, one at a time. Options
    of ``--rdzv-conf``: ``keep_alive_interval`` (0.3 s), ``keep_alive_max_attempt`` (4), ``last_call_timeout`` (30 s at
    the first start, 3 s later), ``join_timeout`` (600 s), ``step_timeout`` (1800 s), ``memory_budget`` and
    ``secret_file`` of the holder.

    Raises:
        ValueError: no run id, no endpoint, no secret, or a holder that cannot start.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        if params.run_id in ("", "none"):
            raise ValueError("a run needs a name that is the same on all hosts: start torchrun with --rdzv-id=NAME")
        self._run_id, low, high = params.run_id, params.min_nodes, params.max_nodes
        os.environ.setdefault("THINWIRE_RUN_ID", self._run_id)  # of the workers, as the holder's socket below
        if 2 * low <= high:
            warnings.warn(
                f"--nnodes={low}:{high}: if the network falls into halves, both may train on;"
                f" {high // 2 + 1}:{high} excludes that",
                stacklevel=2,
            )
        endpoints = [_with_port(endpoint.strip()) for endpoint in params.endpoint.split(",") if endpoint.strip()]
        if not endpoints:
            raise ValueError("say where agents meet: --rdzv-endpoint=HOST:PORT[,HOST:PORT...]")
        self._interval = _seconds(params, "keep_alive_interval", 0.3)
        self._patience = self._interval * _seconds(params, "keep_alive_max_attempt", 4)
        last_call = _seconds(params, "last_call_timeout", 30.0), _seconds(params, "last_call_timeout", 3.0)
        self._join_timeout = _seconds(params, "join_timeout", 600.0)
        self._step_timeout = _seconds(params, "step_timeout", 1800.0)
        bind = os.environ.get(BIND_VARIABLE) or params.local_addr or _address_towards(endpoints)
        path = socket_path()
        given = {name: params.get(name) for name in ("secret_file", "memory_budget")}
        self._holder = HolderOptions(bind=bind, socket=str(path), **given)
        self._ended, self._starting = threading.Event(), threading.Lock()
        self._store: TCPStore | None = None  # of this host's workers, if the first of them is here
        self._holder_pid = 0
        self._ensure_holder()
        os.environ[SOCKET_VARIABLE], os.environ[AGENT_VARIABLE] = str(path), str(os.getpid())
        self._warm, self._heartbeats = Warm(), Heartbeats(path)
        self._warm.ensure()
        self._address, self._file = params.local_addr or bind, beside(path, ".rank")
        self._name = f"{self._address} {os.getpid()} {secrets.token_hex(4)}"
        secret, timeout = load_secret(path, self._holder.secret_file), max(0.5, self._patience / 3)
        new_board = partial(Board, self._run_id, (low, high), self._patience, last_call)
        self._boards = Boards(endpoints, secret, timeout, new_board)
        self._hosts = [low, high]
        self._want, self._fresh, self._claim, self._master = "", True, self._read_claim(), [self._address, 0]
        self._heard, self._over, self._closed = time.monotonic(), False, False
        self._has_met = False  # the run before its end: what ended before this agent came is an earlier start of it
        self._lock = threading.Lock()
        for target in (self._keep_in_touch, self._keep_holder, self._watch_steps):
            threading.Thread(target=target, daemon=True, name=target.__name__).start()

    def get_backend(self) -> str:
        return "thinwire"

    @property
    def use_agent_store(self) -> bool:
        """True: the agent of the first host has a new store for each round, without the addresses of those before."""
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round and return this host's rank in it; a standby waits here until it is needed.

        Raises RendezvousTimeoutError if there are too few hosts for ``join_timeout``, RendezvousClosedError if the run
        has ended, SystemExit with status 0 if it has ended without this standby, and RendezvousConnectionError if the
        others have another secret, run or number of hosts.
        """
        with self._lock:
            # It listens before workers start: a worker that finds no store waits for half a second.
            self._store = store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
            self._want, self._master = "join", [self._address, store.port]
        self._warm.ensure()
        deadline, reviewed = time.monotonic() + self._join_timeout, time.monotonic()
        reason, spare = "too few hosts", self._fresh
        while True:
            try:
                view = self._sync(choose=True)
            except (PeerError, ValueError) as error:
                if self._fresh and type(error) is not LostPeerError:
                    raise RendezvousConnectionError(str(error)) from error
                reason, view = str(error), None
            now = time.monotonic()
            if view is not None:
                if view["rank"] is not None and (self._claim is None or view["round"] > self._claim.round):
                    return self._start(view)
                if view["hosts"]:  # it goes on without this host, which stands by
                    deadline, reason, spare = now + self._join_timeout, "too few hosts", True
            if self._closed and spare:
                raise SystemExit(0)  # torchrun of torch 2.13 stumbles over its own RendezvousGracefulExitError
            if self._closed or self._ended.is_set():
                raise RendezvousClosedError("the run has ended")
            if now > deadline:
                raise RendezvousTimeoutError(f"run {self._run_id!r} did not start in {self._join_timeout} s: {reason}")
            if now > reviewed + _REVIEW_SECONDS:
                with contextlib.suppress(ThinwireError):
                    self._boards.review(self._word("leave"))
                reviewed = time.monotonic()
            time.sleep(_POLL_SECONDS)

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round is over: torchrun then stops its workers and calls `next_rendezvous`."""
        return int(self._over)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._part("close")

    def _part(self, want: str) -> None:
        with contextlib.suppress(ThinwireError, ValueError):
            self._boards.request("sync", self._word(want))

    def shutdown(self) -> bool:
        """End the run for all, unless this host only waited to be needed: then the others go on without it.

        The agent that serves the run stays a little longer, so that standbys hear of its end.
        """
        self._end()
        self._part("close" if self._want == "run" else "leave")
        if self._boards.serving:
            time.sleep(2 * self._patience)
        self._boards.close()
        self._warm.close()
        with self._lock:
            self._store = None  # which ends its server, though a record of a log may hold this agent
        return True

    def _end(self) -> None:
        """Start no holder any more: the one that is there may be stopped from now on."""
        self._ended.set()
        with self._starting:
            pass

    def _start(self, view: dict[str, Any]) -> RendezvousInfo:
        hosts, rank = view["hosts"], view["rank"]
        self._heartbeats.clear()
        with self._lock:
            self._claim, self._want, self._over = Claim(view["round"], hosts, rank), "run", False
            self._fresh, self._heard = False, time.monotonic()
        text = json.dumps({"run": self._run_id, "claim": self._claim})
        with contextlib.suppress(OSError):  # only an agent that starts again on this host misses it
            partial = self._file.with_suffix(".partial")
            partial.write_text(text)
            partial.replace(self._file)
        outside = [holder for holder in view["holders"][hosts:] if isinstance(holder, str)]
        os.environ[STANDBYS_VARIABLE] = " ".join(outside)  # of the workers, who ask them for what others lack
        address, port = view["master"]
        logger.info("run %s, round %s: rank %s of %s hosts", self._run_id, view["round"], rank, hosts)
        store: Any = _RoundStore(self._boards, self._claim, lambda: self._over or self._ended.is_set(), self._prefetch)
        return RendezvousInfo(store, rank, hosts, RendezvousStoreInfo(address, port))

    def _word(self, want: str) -> dict[str, Any]:
        return {
            "run": self._run_id, "hosts": self._hosts, "name": self._name, "want": want, "claim": self._claim,
            "fresh": self._fresh, "where": [*self._master, self._holder_address],
        }  # fmt: skip

    def _sync(self, choose: bool) -> dict[str, Any]:
        with self._lock:
            claim, want = self._claim, self._want
            view = self._boards.request("sync", self._word(want), choose=choose)
            self._heard, self._has_met = time.monotonic(), self._has_met or not view["closed"]
            self._closed = self._has_met and (self._closed or view["closed"])
            if want == "run" and claim is not None:
                self._over |= view["round"] != claim.round or view["rank"] is None or view["grow"]
            return view

    def _keep_in_touch(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                if self._want:  # a host that has not joined yet has no store for the workers of others
                    self._sync(choose=False)
            except (ThinwireError, ValueError) as error:
                if not self._over and self._want == "run" and time.monotonic() > self._heard + self._patience:
                    logger.warning("run %s: %s; workers start again with those that answer", self._run_id, error)
                    self._over = True

    def _watch_steps(self) -> None:
        """End the round if workers of this host hang, and then those that do not heed torchrun's signal."""
        while not self._ended.wait(self._interval):
            for seconds, pid, step in self._heartbeats.silent(time.monotonic()):
                if self._want != "run" or seconds < self._step_timeout:
                    continue
                if not self._over:
                    logger.warning(
                        "run %s: worker %s has made no step for %.0f s, its last was %s: workers start again",
                        self._run_id, pid, seconds, step,
                    )  # fmt: skip
                    self._over = True
                elif seconds > self._step_timeout + _HEED_SECONDS:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)

    def _connect(self) -> HolderClient:
        """Connect to the holder of this host, which is started if there is none. Raises ThinwireError at the end."""
        with self._starting:
            if self._ended.is_set():
                raise ThinwireError("this agent has ended")
            return ensure_holder(self._holder)

    def _ensure_holder(self) -> None:
        with self._connect() as client:
            status = client.holder_status()
        self._holder_pid, self._holder_address = status["pid"], status["address"]

    def _prefetch(self, ranks: range, world_size: int) -> None:
        """Have the holder bring this host's shards from its peers while the workers start: it may be a new host."""

        def bring() -> None:
            try:
                holders = self._boards.request("holders", {})["holders"]
                with self._connect() as client:
                    brought = client.prefetch(
                        os.environ["THINWIRE_RUN_ID"], ranks, world_size, set(holders) - {self._holder_address}
                    )
                logger.info("run %s: this host has its shards; brought from peers: %s", self._run_id, brought)
            except (ThinwireError, ValueError, OSError) as error:
                logger.info("the shards of this host are fetched when they are restored: %s", error)

        threading.Thread(target=bring, daemon=True, name="prefetch").start()

    def _keep_holder(self) -> None:
        while not self._ended.wait(self._interval):
            if not birth_of(self._holder_pid):
                try:
                    self._ensure_holder()
                    logger.warning("the holder of this host had ended; there is a new one")
                except (ThinwireError, ValueError, OSError) as error:
                    logger.warning("this host has no holder: %s", error)

    def _read_claim(self) -> Claim | None:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            gathered = json.loads(self._file.read_text())
            if gathered["run"] == self._run_id:
                return Claim(*map(int, gathered["claim"]))
        return None


class _RoundStore:
    """What torchrun's agents share in a round: the ranks of their workers, and the barrier at the end.

    If the round ends meanwhile, nothing is waited for: torchrun gives up for good when this raises, so the ranks of
    workers are made up then. They are started and stopped at once.
    """

    def __init__(
        self, boards: Boards, claim: Claim, over: Callable[[], bool], on_ranks: Callable[[range, int], None]
    ) -> None:
        self._boards, self._claim, self._over, self._on_ranks = boards, claim, over, on_ranks
        self._role, self._num_adds = "{}", 0
        # torchrun sets it; to leave its barrier at the end after that would end the workers of hosts that still train
        self.timeout: Any = None

    def set_timeout(self, timeout: Any) -> None:
        self.timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        text = value if isinstance(value, str) else value.decode()
        if key.startswith("torchelastic/role_info/"):
            self._role = text
        self._ask(key, text)

    def add(self, key: str, amount: int) -> int:
        self._num_adds += 1
        return int(self._ask(key, amount, f"{self._claim.rank}/{self._num_adds}") or 0)

    def get(self, key: str) -> bytes:
        result = self._wait(key)
        if result is not None and key.startswith("torchelastic/assigned_ranks/"):
            first, world_size, _, _ = json.loads(result)
            self._on_ranks(range(first, first + json.loads(self._role)["local_world_size"]), world_size)
        if result is None:
            _, hosts, rank = self._claim
            result = self._role if "role_info" in key else json.dumps([rank, hosts, rank, hosts])
        return result.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        for key in keys:
            if self._wait(key) is None:
                raise LostPeerError("another host has failed or ended")

    def _wait(self, key: str) -> str | None:
        while (result := self._ask(key)) is None and not self._over():
            time.sleep(_POLL_SECONDS / 2)
        return result

    def _ask(self, key: str, value: str | int | None = None, by: str = "") -> str | None:
        """Ask until there is an answer, or the round is over. What was asked may have been done where none came."""
        while True:
            with contextlib.suppress(ThinwireError):
                request = {"round": self._claim.round, "key": key, "value": value, "by": by}
                return self._boards.request("store", request).get("value")
            if self._over():
                return None
            time.sleep(_POLL_SECONDS)


def _seconds(params: RendezvousParameters, key: str, default: float) -> float:
    try:
        value = float(params.get(key, default))
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise ValueError(f"--rdzv-conf {key}={params.get(key)}: expected a number above 0, such as {default:g}")
    return value


def _with_port(endpoint: str) -> str:
    endpoint = endpoint if endpoint.rpartition(":")[2].isdecimal() else f"{endpoint}:{_PORT}"
    parse_address(endpoint)
    return endpoint


def _address_towards(endpoints: list[str]) -> str:
    """The address of this host from which the others are reached."""
    hosts = [parse_address(endpoint)[0] for endpoint in endpoints]
    for host in [*(host for host in hosts if not is_local(host)), *hosts]:
        with contextlib.suppress(OSError):
            family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(where)
                return str(sock.getsockname()[0])
    raise ValueError(f"no address leads to {', '.join(hosts)}: pass --local-addr, or set {BIND_VARIABLE}")
