"""Which rank a failure is put down to: the first cause, whatever it did to the others."""

from __future__ import annotations

import runpy
import signal

import pytest

from thinwire.lab.analyze import failure
from thinwire.lab.analyze.failure import ScriptError, describe, raised_by_script
from thinwire.lab.testbed.launch import Outcome, RanksFailed

LOST = "RuntimeError: [tcp] Connection closed by peer [127.0.0.1]:1234"
VALUE = "ValueError: the loss is not a number"
EXITED = "it called sys.exit(3)"
RAISED = f"Traceback (most recent call last):\n{ScriptError.__module__}.{ScriptError.__name__}: "


@pytest.mark.parametrize(
    ("errors", "exit_codes", "last"),
    [
        ({1: VALUE}, {1: 1}, VALUE),
        ({0: LOST, 1: VALUE}, {0: 1, 1: 1}, VALUE),
        ({1: EXITED}, {0: -signal.SIGABRT, 1: 3}, "ended on rank 1: it called sys.exit(3)"),
        ({1: EXITED}, {0: -signal.SIGSEGV}, "ended on rank 1: it called sys.exit(3)"),
        ({1: VALUE, 0: "KeyError: 'late'"}, {0: 1, 1: 1}, VALUE),
        ({0: LOST}, {0: 1, 1: 4}, "exit status 4 on rank 1"),
        ({0: LOST}, {0: 1, 1: 0}, "exit status 0 on rank 1"),
        ({}, {0: -signal.SIGABRT, 1: 4}, "exit status 4 on rank 1"),
        ({0: LOST}, {0: 1, 1: -signal.SIGKILL}, "rank 1 was killed by SIGKILL"),
        ({}, {1: -signal.SIGKILL, 0: -signal.SIGABRT}, "rank 1 was killed by SIGKILL"),
        ({0: LOST}, {0: 1}, LOST),
        ({0: "thinwire.errors.LostPeerError: rank 0: rank 1 is gone"}, {1: -signal.SIGKILL}, "killed by SIGKILL"),
    ],
)
def test_an_error_beats_an_exit_and_that_a_signal(
    errors: dict[int, str], exit_codes: dict[int, int], last: str
) -> None:
    """Ranks fail in the order in which they stand here."""
    texts = {rank: RAISED + text for rank, text in errors.items()}
    order = [*errors, *(rank for rank in exit_codes if rank not in errors)]
    outcomes = [
        Outcome(rank, None, texts.get(rank), exit_codes.get(rank), float(order.index(rank))) for rank in sorted(order)
    ]
    returned = Outcome(2, [], None, 0)
    assert last in describe("train.py", RanksFailed("", [*outcomes, returned])).splitlines()[-1]


def test_a_module_that_a_package_lacks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_LIBRARIES", (*failure._LIBRARIES, __file__))
    with pytest.raises(ScriptError) as raised, raised_by_script("-m json.nosuch"):
        runpy.run_module("json.nosuch")
    assert str(raised.value) == "ImportError: No module named json.nosuch"


def test_a_file_of_a_package_is_to_be_given_as_its_module() -> None:
    error = "ImportError: attempted relative import with no known parent package"
    text = describe("train.py", RanksFailed("", [Outcome(0, None, RAISED + error, 1, 0.0)]))
    assert text.splitlines()[0].endswith("a file of a package is -m PACKAGE.MODULE):")
