"""`thinwire holder`: the process of a host that keeps checkpoints in memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from thinwire.lab.cli.commands import Command, option
from thinwire.lab.cli.output import STDOUT, clear_errors, open_console, plain_table, say, write_json

if TYPE_CHECKING:
    from thinwire.checkpoint.holder.client import HolderClient
    from thinwire.checkpoint.holder.start import HolderOptions


app = typer.Typer(add_completion=False)


@app.command(cls=Command, epilog="Example: thinwire holder --bind 10.0.0.1 --secret-file secret --memory-budget 64GiB")
def holder(
    bind: str = typer.Option("127.0.0.1", help="Address of this host on which the peers' holders reach it."),
    port: int = typer.Option(0, min=0, max=65535, help="TCP port; 0 takes a free one and says which."),
    socket: Path = typer.Option(None, help="Unix socket for the trainers of this host; default $THINWIRE_HOLDER."),
    secret_file: Path = typer.Option(
        None, help="Secret that all holders and trainers of the job share; default $THINWIRE_SECRET."
    ),
    memory_budget: str = typer.Option(
        None, help="Memory for all slots, such as 64GiB; default half of what is available."
    ),
    timeout: float = typer.Option(10.0, min=0.1, help="Seconds after which a silent peer is lost."),
    deadline: float = typer.Option(30.0, min=0.1, help="Seconds without progress after which a version is dropped."),
    detach: bool = typer.Option(False, "--detach", help="Return when it is ready, and leave it running."),
    status: bool = typer.Option(False, "--status", help="Show what the holder of this host has."),
    stop: bool = typer.Option(False, "--stop", help="Send what is pending, end the holder, and free its memory."),
    reload: bool = typer.Option(
        False, "--reload", help="Have it read its secret file and certificates again; nothing is lost."
    ),
    pid: int = typer.Option(None, help="With --stop: end this process, if it is a holder whose socket is gone."),
    tls_cert: Path = typer.Option(
        None, help="Certificate for TLS between holders, in PEM, with --tls-key and --tls-ca."
    ),
    tls_key: Path = typer.Option(None, help="Its private key."),
    tls_ca: Path = typer.Option(None, help="Authority that signs the certificates of all holders."),
    metrics: str = typer.Option(
        None, metavar="HOST:PORT", help="Serve metrics for Prometheus there by HTTP, or at this path of a Unix socket."
    ),
    forget: str = typer.Option(None, metavar="RUN", help="Free the memory of one run."),
    json_path: Path = option("--json"),
) -> None:
    """Keep checkpoints in this host's memory, whatever becomes of the trainers; one holder for each host.

    Without --detach it serves until SIGTERM or Ctrl-C, and ends with status 0.
    """
    from thinwire.checkpoint.holder.start import HolderOptions, config_of

    options = HolderOptions(
        bind=bind,
        port=port,
        socket=str(socket) if socket else None,
        secret_file=_absolute(secret_file),
        memory_budget=memory_budget,
        timeout_seconds=timeout,
        deadline_seconds=deadline,
        tls_cert=_absolute(tls_cert),
        tls_key=_absolute(tls_key),
        tls_ca=_absolute(tls_ca),
        metrics=metrics,
    )
    console = open_console({"--json": json_path})
    with clear_errors(ValueError):
        asked = {"--status": status, "--stop": stop, "--reload": reload, "--forget": forget is not None}
        if sum(asked.values()) > 1:
            raise ValueError(f"give one of {', '.join(name for name, is_asked in asked.items() if is_asked)}")
        if pid is not None:
            if not stop:
                raise ValueError("--pid belongs to --stop")
            _end(pid, console)
            return
        if stop or status or reload or forget is not None:
            _talk(options, console, stop, reload, forget, json_path)
            return
        config_of(options.to_json())  # which raises what is wrong
        if detach:
            _start(options, console, json_path)
        else:
            _become(options, json_path)


def _absolute(path: Path | None) -> str | None:
    return str(path.absolute()) if path else None


def _end(pid: int, console: Console) -> None:
    """End a holder by its process, for one that cannot be reached any more."""
    command = Path(f"/proc/{pid}/cmdline")
    if not command.exists() or b"/holder/daemon.py" not in command.read_bytes():
        raise ValueError(f"process {pid} is no holder")
    os.kill(pid, signal.SIGTERM)
    console.print(f"Asked process {pid} to end; it sends what is pending first.", highlight=False)


def _talk(
    options: HolderOptions, console: Console, stop: bool, reload: bool, forget: str | None, json_path: Path | None
) -> None:
    from thinwire.checkpoint.holder.start import stop_holder

    with _connect(options) as client:
        if forget is not None:
            say(console, f"Forgot {client.forget(forget)} shards of run {_printable(forget)}.")
        if reload:
            console.print(f"Secrets that the holder accepts now: {client.reload()}", highlight=False)
        status = client.holder_status()
        if stop:
            stop_holder(client)
            say(console, f"Stopped the holder at {status['address']}.")
        elif not reload:
            _print(status, console)
    write_json(status, json_path)


def _connect(options: HolderOptions) -> HolderClient:
    from thinwire.checkpoint.holder.client import HolderClient
    from thinwire.checkpoint.holder.start import load_secret, socket_path
    from thinwire.errors import LostPeerError

    path = socket_path(options.socket)
    if not path.exists():
        raise LostPeerError(f"no holder at {path}; start one with: thinwire holder --bind ADDRESS")
    return HolderClient.connect(path, load_secret(path, options.secret_file))


def _start(options: HolderOptions, console: Console, json_path: Path | None) -> None:
    from thinwire.checkpoint.holder.start import start_holder

    said = start_holder(options)
    say(console, f"Holder at {said['address']}, process {said['pid']}, socket {said['socket']}")
    write_json(said, json_path)


def _become(options: HolderOptions, json_path: Path | None) -> None:
    """Replace this process by the holder, which needs none of the modules imported here.

    Its first line on standard output is JSON: the address, when it is ready, or the error.
    """
    from dataclasses import replace

    from thinwire.checkpoint.holder.start import command

    if json_path is not None and json_path != STDOUT:
        options = replace(options, ready_file=str(json_path.absolute()))
    line = command(options)
    os.execv(line[0], line)


def _printable(text: str) -> str:
    """The text with what no terminal should get escaped: halves of surrogate pairs, sequences that control it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _print(status: dict[str, Any], console: Console) -> None:
    used, budget = status["used_bytes"] / 1e9, status["budget_bytes"] / 1e9
    say(console, f"Holder at {status['address']}, process {status['pid']}: {used:.2f} of {budget:.2f} GB")
    table = plain_table()
    for column in ("run", "owner", "role", "steps", "replicated", "age", "pending", "replicas", "last error"):
        table.add_column(column, overflow="fold")
    for shard in status["shards"]:
        speeds = [
            f"{escape(address)} {replica['mb_per_second'] or 0:.0f} MB/s"
            for address, replica in shard["replicas"].items()
        ]
        table.add_row(
            escape(_printable(shard["shard"]["run_id"])),
            str(shard["shard"]["owner"]),
            shard["role"],
            ", ".join(str(version["step"]) for version in shard["versions"]) or "none",
            "none" if shard["newest_replicated"] is None else str(shard["newest_replicated"]),
            "none" if shard["newest_age_seconds"] is None else f"{shard['newest_age_seconds']:.0f} s",
            f"{shard['bytes_pending'] / 1e6:.1f} MB",
            "\n".join(speeds),
            escape(_printable(shard["last_error"])),
        )
    if status["shards"]:
        console.print(table)
