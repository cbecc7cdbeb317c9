"""Which rank a failure is put down to: the first cause, whatever it did to the others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from thinwire.lab.analyze.failure import describe, kept

LOST = "RuntimeError: [tcp] Connection closed by peer [127.0.0.1]:1234"
VALUE = "ValueError: the loss is not a number"
EXITED = "it called sys.exit(3)"


@pytest.mark.parametrize(
    ("errors", "exit_codes", "last"),
    [
        ({1: VALUE}, {1: 1}, VALUE),
        ({0: LOST, 1: VALUE}, {0: 1, 1: 1}, VALUE),
        ({1: EXITED}, {0: -signal.SIGABRT, 1: 3}, "ended on rank 1: it called sys.exit(3)"),
        ({1: EXITED}, {0: -signal.SIGSEGV}, "ended on rank 1: it called sys.exit(3)"),
        ({1: VALUE, 0: "KeyError: 'late'"}, {0: 1, 1: 1}, VALUE),
        ({0: LOST}, {0: 1, 1: 4}, "exit status 4 on rank 1"),
        ({}, {0: -signal.SIGABRT, 1: 4}, "exit status 4 on rank 1"),
        ({0: LOST}, {0: 1, 1: -signal.SIGKILL}, "rank 1 was killed by SIGKILL"),
        ({}, {0: -signal.SIGTERM, 1: -signal.SIGKILL}, "rank 1 was killed by SIGKILL"),
        ({0: LOST}, {0: 1, 1: -signal.SIGTERM}, LOST),
        ({0: "thinwire.errors.LostPeerError: rank 0: rank 1 is gone"}, {1: -signal.SIGKILL}, "killed by SIGKILL"),
    ],
)
def test_an_error_beats_an_exit_and_that_a_signal(
    errors: dict[int, str], exit_codes: dict[int, int], last: str
) -> None:
    assert last in describe("train.py", errors, exit_codes).splitlines()[-1]


def test_errors_are_read_in_the_order_in_which_they_happened(tmp_path: Path) -> None:
    for rank, seconds in ((0, 30), (2, 10), (10, 20)):
        file = tmp_path / f"rank{rank}.error"
        file.write_text(f"error {rank}")
        os.utime(file, (seconds, seconds))
    assert list(kept(tmp_path).items()) == [(2, "error 2"), (10, "error 10"), (0, "error 0")]
