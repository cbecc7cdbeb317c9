"""Start the holder of this host, connect to it, and stop it; load the secret that all of a job's holders share;
remember the runs of this host, also when its holder has lost all memory."""

import contextlib
import ctypes
import hashlib
import json
import os
import pwd
import secrets
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from socket import getaddrinfo
from typing import Any

from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.replication import is_loopback, parse_address
from thinwire.checkpoint.holder.slots import parse_json
from thinwire.checkpoint.holder.store import BudgetError, available_bytes, parse_bytes
from thinwire.checkpoint.holder.version import NONCE_BITS, field
from thinwire.errors import CorruptMessageError, LostPeerError, ThinwireError

SECRET_VARIABLE, SOCKET_VARIABLE = "THINWIRE_SECRET", "THINWIRE_HOLDER"
AGENT_VARIABLE = "THINWIRE_AGENT"  # the process of the elastic agent, for its workers
STANDBYS_VARIABLE = "THINWIRE_STANDBYS"  # holders of hosts that stand by or are gone, for them too
PATIENCE_SECONDS = 60.0  # to start, or to end: a process that fails says so at once, and a busy host took 20 s for one
_PATH_BYTES = 100  # of the 107 of <sys/un.h>: warm workers listen beside it, first at PATH.01234~
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_EXITING = 0x4  # in the flags of a process (PF_EXITING of <linux/sched.h>): its memory may take long to free


@dataclass(frozen=True)
class HolderOptions:
    """Options to start a holder; None for the defaults: half of the available memory, this user's socket, its secret.

    ``bind`` is the address on which peers reach this host, ``port`` 0 picks a free one. With ``detach`` the holder
    outlives the process that starts it, and logs to ``<socket>.log``, 10 MB at most and two older ones. ``ready_file``
    gets the address and the like, as JSON. ``tls_cert``, ``tls_key`` and ``tls_ca`` are files, all or none, the same
    authority for all holders. ``metrics``: ``host:port`` or an absolute path, to serve Prometheus's text there.
    """

    bind: str = "127.0.0.1"
    port: int = 0
    socket: str | None = None
    secret_file: str | None = None
    memory_budget: str | None = None
    timeout_seconds: float = 10.0
    deadline_seconds: float = 30.0
    drain_seconds: float = 5.0
    detach: bool = False
    ready_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    metrics: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "socket": str(socket_path(self.socket))}


def default_directory() -> Path:
    """Return this user's directory for the socket of a holder; a reboot may empty it.

    It depends on the user alone: a login, cron and a batch system set XDG_RUNTIME_DIR and TMPDIR each in its way, and
    the next start of a run has to find the holder of the one before.
    """
    return Path("/tmp") / f"thinwire-{os.getuid()}"


def socket_path(given: str | Path | None = None) -> Path:
    """Return the socket of this host's holder: ``given``, else $THINWIRE_HOLDER, else in this user's own directory."""
    named = given or os.environ.get(SOCKET_VARIABLE)
    if named:
        path = Path(named).absolute()
        if not given and not os.path.isabs(named):
            raise ValueError(
                f"{SOCKET_VARIABLE}={named} is another socket in each working directory: set it to an absolute path"
            )
        if not path.parent.is_dir():
            raise ValueError(f"{path.parent} is not a directory")
        if len(os.fsencode(path)) > _PATH_BYTES:
            raise ValueError(f"{path} is too long for a socket: name a shorter path with {SOCKET_VARIABLE} or --socket")
        return path
    directory = default_directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    result = directory.lstat()
    if not stat.S_ISDIR(result.st_mode) or result.st_uid != os.getuid() or result.st_mode & 0o077:
        raise ValueError(f"{directory} is open to other users; remove it, or name another path with {SOCKET_VARIABLE}")
    return directory / "holder.sock"


def beside(socket: Path, name: str = "") -> Path:
    """Return a path for this run beside the socket: the jobs of a host share their holder, and nothing else."""
    run = os.environ.get("THINWIRE_RUN_ID", "")  # an elastic agent sets it, for its workers too
    return Path(f"{socket}.{hashlib.sha256(os.fsencode(run)).hexdigest()[:5]}{name}")


def load_secret(socket: Path, secret_file: str | Path | None = None) -> bytes:
    """Return the secret: of the file, else of $THINWIRE_SECRET, else the one generated beside the socket.

    It may have several lines, each a secret: two sides need one in common. Raises ValueError if there is none, if one
    is shorter than 16 characters, or if others can read the file.
    """
    named = os.environ.get(SECRET_VARIABLE, "")
    path = Path(secret_file) if secret_file is not None else _generated(socket)
    if secret_file is None and named:
        where, text = f"${SECRET_VARIABLE}", named.encode()
    else:
        try:
            mode, text, where = path.stat().st_mode, path.read_bytes(), str(path)
        except OSError as error:
            raise ValueError(f"no secret in {path} ({error.strerror}); write one, or set {SECRET_VARIABLE}") from error
        if mode & 0o077:
            raise ValueError(f"others can read {path}: chmod 600 {path}")
    result = [line.strip() for line in text.splitlines() if line.strip()]
    if not result or min(map(len, result)) < 16:
        raise ValueError(f"the secret in {where} is shorter than 16 characters; make one with: openssl rand -hex 32")
    return b"\n".join(result)


def _generated(socket: Path) -> Path:
    return socket.with_name(f"{socket.name}.secret")


def _secret_for(bind: str, socket: Path, secret_file: str | None) -> bytes:
    path = _generated(socket)
    if secret_file is None and not os.environ.get(SECRET_VARIABLE):
        if not is_loopback(bind):
            try:
                getaddrinfo(bind, None)
            except OSError as error:
                raise ValueError(f"--bind {bind}: {error.strerror or error}") from error
            raise ValueError(
                f"peers connect to {bind}: give all holders and trainers of the job one secret, by --secret-file or"
                f" {SECRET_VARIABLE}"
            )
        if not path.exists():  # whole or not at all: others that start at the same time read it
            partial = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)
            partial.unlink()
    return load_secret(socket, secret_file)


def budget_bytes(memory_budget: str | None) -> int:
    """Return the bytes of the text, or half of the available memory. Raises BudgetError if more than available."""
    available = available_bytes()
    if memory_budget is None:
        return available // 2
    needed = parse_bytes(memory_budget)
    if needed > available:
        raise BudgetError(
            f"a memory budget of {needed:,} bytes is more than the {available:,} that are available here (MemAvailable,"
            " and the limits of the control groups)"
        )
    return needed


@dataclass(frozen=True)
class HolderConfig(HolderOptions):
    """The options of a holder, and what they come to on its host, looked up and checked (`config_of`).

    ``secret``: one or more, a line each; all are accepted, and ``reload_secret`` reads them again. ``generated_secret``
    is its file if it was generated here. ``tls``: files of the certificate, its key, and the authority.
    """

    secret: bytes = b""
    budget_bytes: int = 0
    reload_secret: Callable[[], bytes] | None = None
    generated_secret: Path | None = None
    tls: tuple[str, str, str] | None = None

    @property
    def socket_path(self) -> Path:
        return Path(self.socket or "")


def config_of(options: dict[str, Any]) -> HolderConfig:
    """Return the configuration for ``HolderOptions.to_json()``. Raises ValueError for options that cannot be."""
    path, secret_file = Path(options["socket"]), options["secret_file"]
    certificate, key, authority = (options.get(name) or "" for name in ("tls_cert", "tls_key", "tls_ca"))
    if any((certificate, key, authority)) and not all((certificate, key, authority)):
        raise ValueError("TLS needs all three of --tls-cert, --tls-key and --tls-ca")
    is_file = secret_file is not None or not os.environ.get(SECRET_VARIABLE)
    return HolderConfig(
        **options,
        secret=_secret_for(options["bind"], path, secret_file),
        budget_bytes=budget_bytes(options["memory_budget"]),
        reload_secret=partial(load_secret, path, secret_file) if is_file else None,
        generated_secret=_generated(path) if is_file and secret_file is None else None,
        tls=(certificate, key, authority) if certificate else None,
    )


def command(options: HolderOptions) -> list[str]:
    """Return the command line of a holder's process. The secret is not in it: others can see command lines."""
    script = Path(__file__).with_name("daemon.py")
    return [sys.executable, "-P", str(script), json.dumps(options.to_json())]


def start_holder(options: HolderOptions | None = None, timeout_seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
    """Start a detached holder, wait until it is ready, and return ``pid``, ``socket``, ``address``, ``budget_bytes``.

    It runs in a session of its own and is nobody's child, so it outlives the trainers and their launcher. Raises
    ValueError with the reason if it cannot start.

    Example: start_holder(HolderOptions(bind="10.0.0.1", secret_file="job.secret"))["address"]
    """
    given = command(replace(options or HolderOptions(), detach=True))
    try:
        ended = subprocess.run(given, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        raise ValueError(f"the holder did not start in {timeout_seconds} seconds") from None
    try:
        said = json.loads(ended.stdout)
    except ValueError:
        raise ValueError(f"the holder did not start: {ended.stderr.strip() or 'no reason given'}") from None
    if "ready" not in said:
        raise ValueError(f"the holder did not start: {said.get('error')}")
    return said


def ensure_holder(options: HolderOptions | None = None, timeout_seconds: float = PATIENCE_SECONDS) -> HolderClient:
    """Connect to the holder of this host, which is started if there is none; any number of ranks may call it.

    Raises ValueError, PeerError (another secret). For torchrun, call it in each rank before anything else: the first
    one starts the holder, which then outlives the restarts of the workers.

    Example: client = ensure_holder(HolderOptions(bind="10.0.0.1", secret_file="job.secret"))
    """
    options = options or HolderOptions()
    path, deadline = socket_path(options.socket), time.monotonic() + timeout_seconds
    while True:
        reason = ""
        try:
            if path.exists():
                client = HolderClient.connect(path, load_secret(path, options.secret_file))
                address = client.holder_status()["address"]
                if is_loopback(options.bind) or not is_loopback(parse_address(address)[0]):
                    return client
                client.close()
                raise ValueError(
                    f"an earlier start left the holder of this host at {address}, where other hosts cannot reach it:"
                    " end it, and free what it keeps, with: thinwire holder --stop"
                )
        except LostPeerError as error:
            reason = str(error)
        try:
            start_holder(options, timeout_seconds)
        except ValueError as error:
            if "already serves" not in str(error):
                raise
            if time.monotonic() > deadline:
                raise ValueError(reason or str(error)) from error
            time.sleep(0.05)  # another rank has just started it


def stop_holder(client: HolderClient, timeout_seconds: float = PATIENCE_SECONDS) -> None:
    """End the holder that ``client`` is connected to, and wait until its memory is free. Raises ThinwireError."""
    status = client.holder_status()
    client.stop_holder()
    client.close()
    deadline = time.monotonic() + timeout_seconds
    while Path(f"/proc/{status['pid']}").exists() and Path(status["socket"]).exists():
        if time.monotonic() > deadline:
            raise ThinwireError(f"the holder, process {status['pid']}, has not ended after {timeout_seconds} seconds")
        time.sleep(0.02)


def birth_of(pid: int) -> str:
    """Return when a process started, in ticks since the boot; empty if it is ending, gone, or not seen from here."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" or int(fields[5]) & _EXITING else fields[18]


def end_with_agent() -> None:
    """Have the kernel kill this worker when its agent dies in any way: others would train on beside an orphan."""
    if os.environ.get(AGENT_VARIABLE) == str(os.getppid()):
        end_with_parent()


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends in any way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class KnownRun:
    """``step`` is one that the run has reached, or -1; ``holders`` are the addresses of its hosts' holders then.

    Versions of attempts below ``attempt`` were given up by a fresh start. ``origin`` is the attempt of the fresh start
    that its training began with, or -1: two trainings of one name have two.
    """

    step: int = -1
    attempt: int = 0
    holders: tuple[str, ...] = ()
    origin: int = -1

    def has_given_up(self, attempt: int) -> bool:
        return attempt >> NONCE_BITS < self.attempt >> NONCE_BITS

    def order(self) -> tuple[int, int]:
        """Sort key, newest last: a fresh start is newer than all steps before it."""
        return self.attempt >> NONCE_BITS, self.step


class RunMarker:
    """Files in which a host remembers a run, each where a later start may look: beside the socket; for the default one,
    which a reboot may delete, below each home that this user has; and in the ``directory`` of a disk, if that is there.
    """

    def __init__(self, socket: Path, run_id: str, directory: Path | None = None) -> None:
        name = hashlib.sha256(run_id.encode(errors="surrogatepass")).hexdigest()[:16]  # an id may be no UTF-8
        is_default = socket.parent == default_directory()
        self._own = [socket.parent, *(_state_directories() if is_default else [])]
        self.paths = [each / f"{socket.name}.run-{name}" for each in self._own]
        self.paths += [directory / f"run-{name}"] if directory is not None else []

    def read(self) -> KnownRun:
        """Return what is known; nothing if there is no file, or none can be read."""
        known = [_read_marker(path) for path in self.paths]
        own = max(known[: len(self._own)], key=KnownRun.order)  # in which training this host took part, it knows itself
        return max(own, *(replace(each, origin=own.origin) for each in known), key=KnownRun.order)

    def write(self, known: KnownRun) -> str:
        """Replace all files, and return why none of them could be, or an empty text: training goes on."""
        reasons = []
        for path in self.paths:
            partial = path.with_name(f"{path.name}.{os.uname().nodename}.partial")  # hosts may share a home, or a disk
            try:
                if path.parent in self._own:
                    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                partial.write_text(json.dumps(asdict(known)))
                partial.replace(path)
            except OSError as error:
                reasons.append(f"{path}: {error.strerror}")
        return "; ".join(reasons) if len(reasons) == len(self.paths) else ""

    def remove(self) -> None:
        for path in self.paths:
            with contextlib.suppress(OSError):
                path.unlink()


def _state_directories() -> list[Path]:
    """Below the homes of this user: by its entry, and by the environment, in which cron and sudo have another one."""
    states = [os.getenv("XDG_STATE_HOME", ""), os.path.expanduser("~/.local/state")]
    with contextlib.suppress(KeyError):
        states.append(os.path.join(pwd.getpwuid(os.getuid()).pw_dir, ".local/state"))
    return list(dict.fromkeys(Path(state, "thinwire") for state in states if os.path.isabs(state)))


def _read_marker(path: Path) -> KnownRun:
    try:
        values: Any = parse_json(path.read_bytes())
        holders = tuple(map(str, field(values, "holders", list)))
        own = field(values, "step", int, -1), field(values, "attempt", int), holders, field(values, "origin", int, -1)
        return KnownRun(*own)
    except (OSError, CorruptMessageError):
        return KnownRun()
