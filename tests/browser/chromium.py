"""A headless Chromium, driven over a pair of pipes by its DevTools protocol: nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ANSWER_SECONDS = 60.0
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
_START = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(descriptor), fcntl.F_DUPFD, 10) for descriptor in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Starts the browser with its pipes where it expects them: commands on descriptor 3, answers on 4."""


def find() -> str | None:
    """Return the path of the browser, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A browser with one page at a time; a context manager, which ends it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._id = 0
        self._buffer = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        """What the page printed to the console, and its errors, since it was opened."""

    def __enter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        reads, self._writer = os.pipe()
        self._reader, writes = os.pipe()
        flags = [*_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _START, str(reads), str(writes), self._path, *flags],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._writer)  # at its end the browser ends, too
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._reader)
        self._profile.cleanup()

    def open(self, page: Path, width: int, height: int = 900, dark: bool = False, media: str = "screen") -> None:
        """Open a file in a window of this width, for a reader of light or dark pages."""
        if self._session is None:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.complaints.clear()
        self.call("Page.navigate", url=page.as_uri())
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") != page.as_uri():
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; events that come meanwhile are looked through."""
        self._id += 1
        request = {"id": self._id, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._writer, json.dumps(request).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._look_at(message)

    def _look_at(self, event: Mapping[str, Any]) -> None:
        if event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(event["params"])[:1000])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._reader], [], [], _ANSWER_SECONDS)[0]:
                raise TimeoutError(f"the browser did not answer within {_ANSWER_SECONDS:.0f} s")
            part = os.read(self._reader, 1 << 20)
            if not part:
                raise RuntimeError("the browser ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
