"""Who does not know the secret changes no byte and keeps nobody out; and what those see who look after holders."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from checkpoint_faults.wire import Frame, Proxy, babble, connect, header
from clocks import PATIENCE, wait_until
from handshakes import welcome
from strange_holders import NUM_BYTES, SECRET, hello, write
from thinwire.checkpoint.holder import acceptor, daemon, frames, mac, server, sessions, start
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.frames import FrameKind
from thinwire.checkpoint.holder.replication import call
from thinwire.checkpoint.holder.server import AlreadyRunning, Holder, HolderConfig
from thinwire.checkpoint.holder.start import HolderOptions, ensure_holder, load_secret, start_holder
from thinwire.errors import CorruptMessageError, LostPeerError, PeerError, ThinwireError

pytestmark = pytest.mark.ranks


@pytest.fixture
def host(host: Callable[..., Holder]) -> Callable[..., Holder]:
    return partial(host, deadline_seconds=2.0, secret=SECRET)


@contextlib.contextmanager
def process(directory: Path, name: str, **options: Any) -> Iterator[dict[str, Any]]:
    """A holder in a process of its own, with the secret of the file ``secret`` in the directory."""
    file = directory / "secret"
    if not file.exists():
        file.touch(0o600)
        file.write_bytes(SECRET)
    given = {"socket": str(directory / name), "secret_file": str(file), "memory_budget": "100MB", **options}
    said = start_holder(HolderOptions(**given))
    try:
        yield said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(said["pid"], signal.SIGKILL)


def read(client: HolderClient, step: int) -> bytes:
    (version,) = [version for version in client.inventory("run") if version.step == step]
    with client.open(version) as reader:
        return bytes(reader.payload)


def forged(data: bytes, crc: int, place: int) -> bytes:
    """The same data with 4 bytes at ``place`` changed so that its CRC-32 is ``crc``, which needs no secret."""
    base = bytearray(data)
    base[place : place + 4] = bytes(4)
    effects = []
    for bit in range(32):
        flipped = bytearray(base)
        flipped[place + bit // 8] ^= 1 << bit % 8
        effects.append((zlib.crc32(flipped) ^ zlib.crc32(base), 1 << bit))
    wanted, chosen = zlib.crc32(base) ^ crc, 0
    for bit in range(32):
        found = next(((value, bits) for value, bits in effects if value >> bit & 1), None)
        if found is None:
            continue
        effects.remove(found)
        effects = [(v ^ found[0], b ^ found[1]) if v >> bit & 1 else (v, b) for v, b in effects]
        if wanted >> bit & 1:
            wanted, chosen = wanted ^ found[0], chosen ^ found[1]
    base[place : place + 4] = chosen.to_bytes(4, "little")
    assert zlib.crc32(base) == crc
    return bytes(base)


class Forger:
    """Changes the first weight of every piece to 666 and keeps the CRC-32, while ``active``."""

    def __init__(self) -> None:
        self.active, self.forgeries = True, 0

    def __call__(self, frame: Frame) -> bytes:
        if self.active and frame.kind is FrameKind.DATA and len(frame.payload) > 1000:
            crc = zlib.crc32(frame.payload)
            frame.payload[:4] = struct.pack("<f", 666.0)
            frame.payload[:] = forged(bytes(frame.payload), crc, len(frame.payload) - 4)
            self.forgeries += 1
        return bytes(frame)


@pytest.mark.few(1)
@pytest.mark.parametrize("known", [("gmac", "hmac"), ("hmac",)])
def test_a_forged_weight_never_becomes_a_version(
    host: Callable[..., Holder],
    known: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither as a replica nor at recovery, though its CRC-32 is right; the true bytes arrive once nobody forges."""
    monkeypatch.setattr(frames, "macs", lambda: known)
    here, there, forger = host("a"), host("b"), Forger()
    with Proxy(forger) as proxy, HolderClient.connect(here.config.socket_path, SECRET) as client:
        hello(client, proxy.to(there.address))
        payload = write(client, 1)
        client.grant_all()
        wait_until(lambda: there.refused >= 2)
        with HolderClient.connect(there.config.socket_path, SECRET) as peer:
            assert peer.inventory("run") == []
            assert "127.0.0.1" in caplog.text
            assert "altered or forged" in caplog.text
            forger.active = False
            wait_until(lambda: client.status()["newest_replicated"] == 1 or client.status()["dropped"])
            if client.status()["dropped"]:
                payload = write(client, 2)
                wait_until(lambda: client.status()["newest_replicated"] == 2)
            step = client.status()["newest_replicated"]
            assert read(peer, step) == payload
        forger.active, before = True, forger.forgeries
        third = host("c")
        with HolderClient.connect(third.config.socket_path, SECRET) as empty:
            (version,) = [version for version in client.inventory() if version.step == step]
            with pytest.raises(CorruptMessageError, match="altered or forged"):
                empty.fetch(version, proxy.to(here.address))
            assert forger.forgeries > before
            assert empty.inventory("run") == []
            forger.active = False
            empty.fetch(version, proxy.to(here.address))
            assert read(empty, step) == payload


@pytest.mark.parametrize("what", ["exchanged", "repeated", "cut", "of another connection"])
def test_a_piece_counts_in_its_place_only(host: Callable[..., Holder], what: str) -> None:
    here, there = host("a"), host("b")
    first: list[Frame] = []
    done = threading.Event()

    def tamper(frame: Frame) -> bytes | None:
        if frame.kind is not FrameKind.DATA or done.is_set():
            return bytes(frame)
        if not first:
            first.append(frame)
            return None if what == "of another connection" else bytes(frame)
        done.set()
        if what == "repeated":
            return bytes(frame) * 2
        if what == "cut":
            return bytes(frame)[:-9]
        return bytes(Frame(frame.kind, 0, frame.header, frame.text, first[0].payload, first[0].tag))

    with Proxy(tamper) as proxy, HolderClient.connect(here.config.socket_path, SECRET) as client:
        hello(client, proxy.to(there.address))
        payload = write(client, 1)
        client.grant_all()
        wait_until(lambda: client.status()["newest_replicated"] == 1)
        assert done.is_set()
        assert client.status()["bytes_sent"] > NUM_BYTES, "it was sent again"
        with HolderClient.connect(there.config.socket_path, SECRET) as peer:
            assert read(peer, 1) == payload


def reach(path: Path, secret: bytes = SECRET) -> None:
    """Connect as a trainer does, or raise. Who waits for strangers has no answer within its handshake."""
    with HolderClient.connect(path, secret, 5.0) as client:
        client.holder_status()


def more_files(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))


def test_a_thousand_slow_strangers_keep_nobody_out(tmp_path: Path) -> None:
    """They say a byte now and then, over TCP and over the Unix socket: trainers and peers connect all the while."""
    more_files(4096)
    with process(tmp_path, "a") as said, contextlib.ExitStack() as stack:
        path, greeting = tmp_path / "a", header(FrameKind.GREETING, 4000, 0)
        threads = len(os.listdir(f"/proc/{said['pid']}/task"))
        strangers = [stack.enter_context(connect(said["address"])) for _ in range(1000)]
        local = subprocess.Popen(
            [sys.executable, "-c", _LOCAL_STRANGERS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stack.enter_context(local)
        stack.callback(local.kill)
        assert local.stdout is not None
        assert local.stdout.readline() == b"there\n"
        for place in range(20):
            for stranger in strangers:
                with contextlib.suppress(OSError):
                    stranger.send(greeting[place : place + 1])
            reach(path)
            call(said["address"], SECRET, 5.0).close()
        assert len(os.listdir(f"/proc/{said['pid']}/task")) < threads + 20, "no thread for a stranger"


_LOCAL_STRANGERS = """
import socket, sys, time
strangers = []
for _ in range(300):
    strangers.append(socket.socket(socket.AF_UNIX)); strangers[-1].connect(sys.argv[1])
print("there", flush=True); time.sleep(100)
"""


def test_a_handshake_has_one_deadline_however_many_bytes_come(
    host: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 0.5)
    here = host("a")
    with connect(here.address) as stranger:
        greeting = header(FrameKind.GREETING, 4000, 0) + b" " * 4000
        said = 0
        with contextlib.suppress(OSError):
            for said in range(len(greeting)):
                stranger.sendall(greeting[said : said + 1])
                time.sleep(0.05)
        assert said < len(greeting) - 1
    wait_until(lambda: here.refused == 1)


@pytest.mark.parametrize("says", [b"", b"drip"])
def test_a_peer_that_accepts_and_says_nothing_is_given_up(says: bytes) -> None:
    """Nor does one that says a byte now and then hold a caller longer than the handshake may take."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                while not ended.wait(0.05):
                    sock.sendall(header(FrameKind.GREETING, 4000, 0)[:1] if says else b"")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(LostPeerError, match="handshake"):
            call(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, 0.5)
        ended.set()
        thread.join()


def test_a_full_queue_of_callers_is_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(str(tmp_path / "a"))
        listener.listen(0)
        listener.settimeout(5.0)
        waiting = []
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
                waiting[-1].setblocking(False)
                waiting[-1].connect(str(tmp_path / "a"))

        def serve() -> None:
            time.sleep(0.2)
            for _ in waiting[:-1]:
                listener.accept()[0].close()
            with contextlib.closing(frames.Connection(listener.accept()[0], 5.0)) as connection:
                welcome(connection, SECRET)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            HolderClient.connect(tmp_path / "a", SECRET).close()
        finally:
            thread.join()


def test_a_flood_keeps_nobody_out(tmp_path: Path) -> None:
    with process(tmp_path, "a") as said:
        flood = [subprocess.Popen([sys.executable, "-c", _FLOOD, *said["address"].split(":")]) for _ in range(2)]
        try:
            time.sleep(0.3)
            for _ in range(20):
                reach(tmp_path / "a")
        finally:
            for each in flood:
                each.kill()
                each.wait()


_FLOOD = """
import socket, sys
while True:
    try:
        sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1)
        sock.sendall(bytes(10)); sock.close()
    except OSError:
        pass
"""


@pytest.mark.parametrize("frames_said", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_whatever_is_said_memory_stays_and_nobody_is_kept_out(tmp_path: Path, frames_said: int) -> None:
    chance = random.Random(frames_said)

    def resident() -> int:
        return int(Path(f"/proc/{said['pid']}/status").read_text().partition("VmRSS:")[2].split()[0])

    with process(tmp_path, "a") as said, HolderClient.connect(tmp_path / "a", SECRET) as client:
        hello(client)
        payload, before, count, looked = write(client, 1), 0, 0, 0
        while count < frames_said:
            address = chance.choice([said["address"], str(tmp_path / "a")])
            count += babble(address, chance, knows_secret=chance.random() < 0.95, sentences=50)
            if before == 0 and count > frames_said // 3:
                before = resident()
            if count > looked + 100:
                looked = count
                reach(tmp_path / "a")
        assert resident() < before + 20_000, "KB"
        assert read(client, 1) == payload


def said_by_a_stranger(number: int, text: bytes) -> bytes:
    """A frame of a handshake, which has a tag that anybody can make."""
    head = frames._HEADER.pack(frames._MAGIC, FrameKind.GREETING, len(text), 0, number)
    return head + mac.Tags().of_frame(head + text) + text


GREETING = b'{"nonce": "%s", "macs": ["hmac"]}'


@pytest.mark.parametrize(
    "greetings",
    [[GREETING % (rb"\ud800" * 32)], [GREETING % (b"a" * 32), b'{"proof": "%s"}' % (rb"\u00e9" * 64)]],
    ids=["nonce", "proof"],
)
def test_no_stranger_can_end_the_thread_that_accepts(host: Callable[..., Holder], greetings: list[bytes]) -> None:
    here = host("a")
    for where in (here.address, str(here.config.socket_path)):
        with connect(where) as sock:
            for number, text in enumerate(greetings):
                sock.sendall(said_by_a_stranger(number, text))
                said = sock.recv(4096)
            assert not said, "it is refused"
    call(here.address, SECRET, 5.0).close()
    reach(here.config.socket_path)
    assert here.refused == 2


def test_a_peer_whose_nonce_is_no_number_counts_as_unreachable() -> None:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(frames.Connection(ours, 2.0)) as connection:
        answer = b'{"nonce": "%s", "mac": "hmac", "proofs": []}' % (rb"\ud800" * 32)
        theirs.sendall(said_by_a_stranger(0, answer))
        with pytest.raises(CorruptMessageError, match="nonce"):
            connection.greet(SECRET)


def test_another_release_is_named(host: Callable[..., Holder], caplog: pytest.LogCaptureFixture) -> None:
    here = host("a")
    with connect(here.address) as old:
        old.sendall(struct.pack("<IBIQQ", 0x31465754, 1, 44, 0, 0) + bytes(16 + 44))
        wait_until(lambda: "another release of thinwire" in caplog.text)  # it is counted before it is logged


def test_secrets_are_changed_without_losing_memory_or_connections(host: Callable[..., Holder], tmp_path: Path) -> None:
    """Old; old and new; new: at each step hosts that have been told and hosts that have not work together."""
    old, new = b"0123456789abcdef-old", b"0123456789abcdef-new"
    paths = [tmp_path / f"secret-{name}" for name in "ab"]
    for path in paths:
        path.touch(0o600)
        path.write_bytes(old)

    def start(name: str, path: Path) -> Holder:
        return host(name, secret=load_secret(path, path), reload_secret=lambda: load_secret(path, path))

    here, there = start("a", paths[0]), start("b", paths[1])
    with HolderClient.connect(here.config.socket_path, old) as client:
        hello(client, there.address)
        client.grant_all()
        for step, (holder, content) in enumerate(
            [(here, old + b"\n" + new), (there, old + b"\n" + new), (here, new), (there, new)], start=1
        ):
            paths[holder is there].write_bytes(content + b"\n")
            assert holder.reload() == len(content.split())
            assert write(client, step), "the connection stays"
            wait_until(lambda step=step: client.status()["newest_replicated"] == step)
            here.call(there.address).close()
            there.call(here.address).close()
        with pytest.raises(PeerError, match="another secret"):
            HolderClient.connect(here.config.socket_path, old)
        paths[0].write_bytes(b"short")
        with pytest.raises(ValueError, match="16 characters"):
            client.reload()
        reach(here.config.socket_path, new)  # what was known stays


def test_a_holder_reads_its_secret_again_when_it_is_told(tmp_path: Path) -> None:
    new = b"another secret, long enough"
    with process(tmp_path, "a") as said, HolderClient.connect(tmp_path / "a", SECRET) as client:
        (tmp_path / "secret").write_bytes(SECRET + b"\n" + new)
        os.kill(said["pid"], signal.SIGHUP)
        wait_until(lambda: client.holder_status()["secrets"] == 2)
        reach(tmp_path / "a", new)
        (tmp_path / "secret").write_bytes(new)
        assert "accepts now: 1" in run(tmp_path, "--reload")


def test_a_short_secret_is_refused_wherever_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_SECRET", "x")
    with pytest.raises(ValueError, match=r"THINWIRE_SECRET is shorter than 16 characters.*openssl rand"):
        load_secret(tmp_path / "holder.sock")


def run(directory: Path, *options: str) -> str:
    from typer.testing import CliRunner

    from thinwire.lab.cli.main import app

    given = ["holder", "--socket", str(directory / "a"), "--secret-file", str(directory / "secret"), *options]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "200"})  # so that no name is folded
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_is_forgotten_though_its_trainer_is_still_being_let_go(
    host: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended before somebody asks to forget its run, and the holder may notice a little later."""
    here, noticed, end = host("a"), threading.Event(), sessions.TrainerSession.end

    def end_late(session: sessions.TrainerSession) -> None:
        assert noticed.wait(PATIENCE)
        end(session)

    monkeypatch.setattr(sessions.TrainerSession, "end", end_late)
    with HolderClient.connect(here.config.socket_path, SECRET) as trainer:
        hello(trainer)
    later = threading.Timer(0.3, noticed.set)
    later.start()
    with HolderClient.connect(here.config.socket_path, SECRET) as client:
        assert client.forget("run") == 1
    later.join()


def test_names_with_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    with process(tmp_path, "a"):
        with HolderClient.connect(tmp_path / "a", SECRET) as client:
            hello(client, run_id="a[/b][red]")
        assert "a[/b][red]" in run(tmp_path, "--status")
        assert "a[/b][red]" in run(tmp_path, "--forget", "a[/b][red]")


def test_names_that_no_terminal_can_show_are_escaped(tmp_path: Path) -> None:
    """Half a surrogate pair is what Python makes of a THINWIRE_RUN_ID that is no UTF-8."""
    with process(tmp_path, "a"):
        for name in ("caf\udce9", "\x1b[31mred"):
            with HolderClient.connect(tmp_path / "a", SECRET) as client:
                hello(client, run_id=name)
        shown = run(tmp_path, "--status")
        assert r"caf\udce9" in shown
        assert r"\x1b[31mred" in shown
        with HolderClient.connect(tmp_path / "a", SECRET) as client:  # who has left is noticed soon after
            wait_until(lambda: client.holder_status()["connections"]["trainer"] <= 1)
        assert r"run caf\udce9" in run(tmp_path, "--forget", "caf\udce9")


def test_a_generated_secret_is_there_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of holders that start at the same time, one writes it, and the others read it."""

    def token(size: int) -> str:
        assert not (tmp_path / "a.secret").exists()
        return "ab" * size

    monkeypatch.delenv("THINWIRE_SECRET", raising=False)
    monkeypatch.setattr(start.secrets, "token_hex", token)
    assert start._secret_for("127.0.0.1", tmp_path / "a", None) == b"ab" * 32
    assert [path.name for path in tmp_path.iterdir()] == ["a.secret"]


def test_a_deleted_socket_comes_back_with_all_that_was_held(tmp_path: Path) -> None:
    """With its directory, its lock and the generated secret; and while it cannot come back, that is said."""
    directory = tmp_path / "run"
    directory.mkdir()
    options = HolderOptions(socket=str(directory / "a"), memory_budget="100MB")
    said = start_holder(options)
    try:
        secret = load_secret(directory / "a")
        with HolderClient.connect(directory / "a", secret) as client:
            hello(client)
            payload = write(client, 1)
        shutil.rmtree(directory)
        wait_until(lambda: (directory / "a.secret").exists() and (directory / "a").exists())
        assert load_secret(directory / "a") == secret
        wait_until(lambda: _connects(directory / "a", secret))
        with pytest.raises(ValueError, match="already serves"):
            start_holder(options)
        with HolderClient.connect(directory / "a", secret) as client:
            assert read(client, 1) == payload
            shutil.rmtree(directory)
            directory.write_text("a file in the way")
            wait_until(lambda: client.holder_status()["socket_error"])
            directory.unlink()
            wait_until(lambda: not client.holder_status()["socket_error"])
    finally:
        run(tmp_path, "--stop", "--pid", str(said["pid"]))
    wait_until(lambda: not Path(f"/proc/{said['pid']}").exists() or _is_zombie(said["pid"]))


def _connects(path: Path, secret: bytes) -> bool:
    with contextlib.suppress(ThinwireError):
        reach(path, secret)
        return True
    return False


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    return True


def test_a_directory_in_place_of_the_socket_ends_nothing(host: Callable[..., Holder], tmp_path: Path) -> None:
    here = host("a")
    with HolderClient.connect(tmp_path / "a", SECRET) as client:
        (tmp_path / "a").unlink()
        (tmp_path / "a").mkdir()
        for _ in range(2):
            here.keep_socket()
            assert "no socket" in client.holder_status()["socket_error"]
        (tmp_path / "a").rmdir()
        here.keep_socket()
        assert not client.holder_status()["socket_error"]
    assert _connects(tmp_path / "a", SECRET)


@pytest.mark.parametrize("where", ["socket", "metrics"])
def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path, where: str) -> None:
    (tmp_path / "weights.pt").write_text("weights")
    path = tmp_path / ("weights.pt" if where == "socket" else "a")
    metrics = str(tmp_path / "weights.pt") if where == "metrics" else None
    with pytest.raises(ValueError, match="no socket"):
        Holder(HolderConfig(socket=str(path), secret=SECRET, budget_bytes=1 << 20, metrics=metrics))
    assert (tmp_path / "weights.pt").read_text() == "weights"


def test_the_socket_of_another_holder_is_left_to_it(host: Callable[..., Holder], tmp_path: Path) -> None:
    here = host("a")
    (tmp_path / "a").unlink()
    with pytest.raises(AlreadyRunning):
        host("a")
    (tmp_path / "a.lock").unlink()
    other = host("a")
    here.keep_socket()
    assert "already serves" in here.socket_error
    here.stop()
    with HolderClient.connect(tmp_path / "a", SECRET) as client:
        assert client.holder_status()["address"] == other.address


def test_a_holder_of_another_release_is_named_with_what_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the lock of the socket, and hangs up on who speaks another protocol."""

    def refuse(*_: object) -> None:
        raise ValueError("a holder already serves it")

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    monkeypatch.setattr(start, "start_holder", refuse)
    monkeypatch.setenv("THINWIRE_SECRET", SECRET.decode())
    said = f"process {os.getpid()}.* another release.* thinwire holder --stop --pid {os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "a"))
        listener.listen()
        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            with pytest.raises(ValueError, match=said):
                ensure_holder(HolderOptions(socket=str(tmp_path / "a")), timeout_seconds=0.2)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_holder_that_does_not_start_in_time_is_an_error_like_others(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did not start in"):
        start_holder(HolderOptions(socket=str(tmp_path / "a")), timeout_seconds=1e-6)


def test_a_living_job_in_a_container_keeps_its_run(
    host: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where processes are not seen from the holder, all of them have the number 0."""
    monkeypatch.setattr(frames, "peer_pid", lambda sock: 0)
    monkeypatch.setattr(sessions, "_TAKEOVER_SECONDS", 0.2)
    path = host("a").config.socket_path
    with HolderClient.connect(path, SECRET) as first, HolderClient.connect(path, SECRET) as second:
        first.join("run", "first")
        with pytest.raises(ValueError, match="a process in a container"):
            second.join("run", "second")
        first.close()
        second.join("run", "second")


def test_a_process_that_is_no_holder_is_not_ended(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from thinwire.lab.cli.main import app

    result = CliRunner().invoke(app, ["holder", "--stop", "--pid", str(os.getpid())])
    assert result.exit_code == 2
    assert "is no holder" in result.output


def test_the_log_of_a_detached_holder_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_LOG_BYTES", 1000)
    handler = daemon._log_file(str(tmp_path / "log"))
    for number in range(500):
        handler.emit(logging.makeLogRecord({"msg": f"line {number} of a holder"}))
    handler.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"log", "log.1", "log.2"}
    assert max(sizes.values()) <= 1000
    assert "line 499" in (tmp_path / "log").read_text()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, str, str]]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates")
    directory = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)

    def make(authority: str) -> tuple[str, str, str]:
        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        if not (directory / f"{authority}.pem").exists():
            openssl("req", "-x509", *new, "-keyout", f"{authority}.key", "-out", f"{authority}.pem",
                    "-subj", f"/CN={authority}", "-days", "2")  # fmt: skip
            openssl("req", *new, "-keyout", f"{authority}-host.key", "-out", "request", "-subj", "/CN=host")
            openssl("x509", "-req", "-in", "request", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
                    "-CAcreateserial", "-out", f"{authority}-host.pem", "-days", "2")  # fmt: skip
        names = f"{authority}-host.pem", f"{authority}-host.key", f"{authority}.pem"
        return tuple(str(directory / name) for name in names)  # type: ignore[return-value]

    return make


def test_with_certificates_nothing_is_readable_and_strangers_have_no_handshake(
    host: Callable[..., Holder], certificates: Callable[[str], tuple[str, str, str]]
) -> None:
    here, there = (host(name, tls=certificates("job")) for name in "ab")
    seen = bytearray()

    def record(address: str) -> str:
        return _Tap(address, seen, stack).address

    with contextlib.ExitStack() as stack, HolderClient.connect(here.config.socket_path, SECRET) as client:
        hello(client, record(there.address))
        payload = write(client, 1)
        client.grant_all()
        wait_until(lambda: client.status()["newest_replicated"] == 1)
        assert len(seen) > NUM_BYTES
        assert payload[1000:1032] not in seen
        assert b'"op":"receive"' not in seen
        third = host("c", tls=certificates("job"))
        with HolderClient.connect(third.config.socket_path, SECRET) as empty:
            empty.fetch(client.inventory()[0], here.address)
            assert read(empty, 1) == payload
        write(client, 2)
        wait_until(lambda: client.status()["newest_replicated"] == 2)
        (replica,) = client.status()["replicas"].values()
        assert replica["bytes_sent"] == 2 * NUM_BYTES, "the connection stayed while it was idle"
    for other in (host("d", tls=certificates("another")), host("e")):
        with pytest.raises(ThinwireError):
            other.call(here.address)
        with pytest.raises(ThinwireError):
            here.call(other.address)
    wait_until(lambda: here.refused >= 2)


def test_certificates_that_are_read_again_replace_those_before_or_change_nothing(
    host: Callable[..., Holder], certificates: Callable[[str], tuple[str, str, str]], tmp_path: Path
) -> None:
    """Also when a certificate is renewed and its key not yet, and when the old authority is not to be trusted more."""
    files = tuple(str(tmp_path / name) for name in ("cert", "key", "ca"))

    def give(authority: str, count: int = 3) -> None:
        for source, target in list(zip(certificates(authority), files, strict=True))[:count]:
            shutil.copy(source, target)

    give("job")
    here = host("a", tls=files, reload_secret=lambda: SECRET + b"\n" + b"x" * 16)
    old, new = (host(name, tls=certificates(name)) for name in ("job", "another"))
    with HolderClient.connect(here.config.socket_path, SECRET) as client:
        give("another", 1)
        with pytest.raises(ValueError, match="TLS with"):
            client.reload()
        assert client.holder_status()["secrets"] == 1
        old.call(here.address).close()
        here.call(old.address).close()
        give("another")
        assert client.reload() == 2
        new.call(here.address).close()
        here.call(new.address).close()
        with pytest.raises(ThinwireError):
            old.call(here.address)
        with pytest.raises(ThinwireError):
            here.call(old.address)


class _Tap:
    """Passes on what callers say to ``target``, and keeps it."""

    def __init__(self, target: str, seen: bytearray, stack: contextlib.ExitStack) -> None:
        self._target, self._seen = target, seen
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._sockets: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        stack.callback(self._end)
        threading.Thread(target=self._accept, daemon=True).start()

    def _end(self) -> None:
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], connect(self._target)
                far.settimeout(None)
                self._sockets += [near, far]
                for source, sink, keep in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pump, args=(source, sink, keep), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._seen.extend(data if keep else b"")
                sink.sendall(data)


def test_tls_needs_all_its_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="all three of --tls-cert"):
        start_holder(HolderOptions(socket=str(tmp_path / "a"), tls_cert="cert.pem"))
    with pytest.raises(ValueError, match=r"TLS with .*No such file"):
        server._tls_contexts("cert.pem", "key.pem", "ca.pem")


def test_a_stopped_peer_holds_up_nothing_but_its_own_replica(host: Callable[..., Holder], tmp_path: Path) -> None:
    """Neither the registration of a shard, though three peers of four say nothing, nor the copy on the fourth."""
    fourth = host("z")
    with contextlib.ExitStack() as stack:
        stopped = [stack.enter_context(process(tmp_path, name)) for name in "bcd"]
        for each in stopped:
            os.kill(each["pid"], signal.SIGSTOP)
        here = host("a", timeout_seconds=1.0, deadline_seconds=1.0)
        client = stack.enter_context(HolderClient.connect(here.config.socket_path, SECRET))
        together, connect_to = threading.Barrier(3), here.call

        def call_together(address: str, *rest: Any) -> Any:
            if address != fourth.address and client_waits:
                together.wait(PATIENCE)
            return connect_to(address, *rest)

        client_waits, here.call = True, call_together
        hello(client, *(each["address"] for each in stopped), fourth.address)  # they are asked at the same time
        client_waits = False
        assert len(client.unreachable) == 3
        payload = write(client, 1)
        client.grant_all()
        wait_until(lambda: client.status()["replicas"][fourth.address]["bytes_pending"] == 0)
        with HolderClient.connect(fourth.config.socket_path, SECRET) as peer:
            wait_until(lambda: [version.step for version in peer.inventory("run")] == [1])
            assert read(peer, 1) == payload
