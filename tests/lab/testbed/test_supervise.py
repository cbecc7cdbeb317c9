"""Which failure is the cause."""

import signal
from types import SimpleNamespace

import pytest

from thinwire.lab.testbed.supervise import RankProcess, describe

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ({0: (None, -signal.SIGABRT), 1: ("ValueError: no data", 1)}, 1),
        ({0: (None, -signal.SIGSEGV), 1: (None, 3)}, 1),
        ({0: ("RuntimeError: Connection closed by peer", 1), 1: (None, -signal.SIGKILL)}, 1),
        ({0: ("ValueError: no data", 1), 1: ("ValueError: no data", 1)}, 0),
    ],
)
def test_an_error_or_an_exit_is_a_cause_before_a_signal(ends: dict[int, tuple[str | None, int]], first: int) -> None:
    """Ranks in the order in which their ends were noticed."""
    ranks = [
        RankProcess(rank, SimpleNamespace(exitcode=code), None, error=error, failed_at=float(rank))  # type: ignore[arg-type]
        for rank, (error, code) in ends.items()
    ]
    assert describe(ranks).startswith(f"2 of 2 ranks failed; first rank {first}\nrank {first}: ")
