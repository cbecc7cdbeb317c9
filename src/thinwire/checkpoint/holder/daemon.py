"""The holder's process, run by path: ``python -P daemon.py '{"socket": ...}'``, see ``start.py``.

It must start fast and stay small: 0.1 s and 20 MB, where torch would make it 2 s and 250 MB. So this room imports the
standard library only, and `import thinwire` loads nothing else.
"""

import json
import logging
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

_LOG_BYTES = 10_000_000
_LOOK_SECONDS = 0.5  # between looks at the socket's path
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(options: dict[str, Any]) -> int:
    """Serve until SIGTERM or SIGINT. One line of JSON on standard output says that it is ready, or why it is not."""
    if options.get("detach"):
        return _detach(options)
    return _serve(options, sys.stdout.fileno())


def _detach(options: dict[str, Any]) -> int:
    """Serve in a session of its own, as nobody's child; wait here for its ready line."""
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        with os.fdopen(read_end) as lines:
            line = lines.readline()
        sys.stdout.write(line)
        return 0 if "ready" in json.loads(line or "{}") else 1
    os.close(read_end)
    os.setsid()
    silence = os.open(os.devnull, os.O_RDWR)
    os.umask(0o077)
    log = os.open(f"{options['socket']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, silence), (1, silence), (2, log)):
        os.dup2(source, target)
    return _serve(options, write_end)


def _serve(options: dict[str, Any], ready: int) -> int:
    from thinwire.checkpoint.holder.server import Holder
    from thinwire.checkpoint.holder.start import config_of
    from thinwire.errors import ThinwireError

    handler = _log_file(f"{options['socket']}.log") if options.get("detach") else logging.StreamHandler()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, handlers=[handler])
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each slot and each connection is one
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # in the threads of the holder too, which inherit the mask
    try:
        holder = Holder(config_of(options))
    except (ValueError, ThinwireError, OSError) as error:
        _say(ready, {"error": str(error), "kind": type(error).__name__})
        return 1
    threading.Thread(target=_obey_signals, args=(holder,), daemon=True).start()
    status = {key: holder.status()[key] for key in ("pid", "socket", "address", "budget_bytes")}
    if options.get("ready_file"):
        _write_whole(Path(options["ready_file"]), json.dumps(status, indent=2) + "\n")
    _say(ready, {"ready": True, **status})
    while not holder.stopping.wait(_LOOK_SECONDS):
        holder.keep_socket()
    holder.stop()
    return 0


def _write_whole(path: Path, text: str) -> None:
    """Write a file that somebody waits for, who reads it as soon as it is there; a pipe or a device as it is."""
    partial = path.with_name(f"{path.name}.partial") if path.is_file() or not path.exists() else path
    partial.write_text(text)
    if partial != path:
        partial.replace(path)


def _obey_signals(holder: Any) -> None:
    """Reload at each SIGHUP, and stop at SIGTERM or SIGINT.

    A thread takes them, and no handler: that runs between any two instructions of the main thread, and waits for ever
    for the lock of an event that the main thread holds there.
    """
    while signal.sigwait(_SIGNALS) == signal.SIGHUP:
        try:
            holder.reload()
        except (ValueError, OSError) as error:
            logging.error("nothing was read again: %s", error)
    holder.stopping.set()


def _log_file(path: str) -> logging.Handler:
    from logging.handlers import RotatingFileHandler

    return RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=2)


def _say(descriptor: int, content: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(content).encode() + b"\n")
    if descriptor > 2:
        os.close(descriptor)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    status = main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)  # threads that wait for a dead peer delay nothing
