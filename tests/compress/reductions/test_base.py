"""What all reductions share: seconds of phases, each booked once, and methods that need an exchange of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import pytest

from clocks import FakeClock
from loopback import run_ranks
from tests.compress.reductions.averaged import MATRICES, train
from thinwire import compress
from thinwire.compress.base import Identity, Parameter
from thinwire.compress.memory import with_memory
from thinwire.compress.methods.select import TopK, top_k
from thinwire.compress.reductions import base as exchange_module
from thinwire.compress.reductions.base import OwnReduction, Peers, Phase, Result, Stopwatch, Task


def test_seconds_are_booked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run_ranks(2, lambda network: train(network, with_memory(top_k(0.1)), "two_shot", MATRICES))[0].get()
    assert all(seen.seconds[phase] > 0.0 for phase in Phase)
    clock, stopwatch = FakeClock(), Stopwatch()
    monkeypatch.setattr(exchange_module, "time", clock)
    with stopwatch.phase(Phase.EXCHANGE):
        clock.pass_by(1.0)
        with stopwatch.phase(Phase.COMPRESS):
            clock.pass_by(2.0)
        clock.pass_by(4.0)
    assert stopwatch.seconds == {**dict.fromkeys(Phase, 0.0), Phase.EXCHANGE: 5.0, Phase.COMPRESS: 2.0}


def test_a_listener_hears_every_stretch_also_of_a_phase_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[Phase, float, float]] = []
    clock, stopwatch = FakeClock(), Stopwatch(listener=lambda *stretch: heard.append(stretch))
    monkeypatch.setattr(exchange_module, "time", clock)
    with suppress(ValueError), stopwatch.phase(Phase.EXCHANGE):
        clock.pass_by(1.0)
        with stopwatch.phase(Phase.DECOMPRESS):
            clock.pass_by(2.0)
            raise ValueError("no gradient")
    clock.pass_by(8.0)  # of nobody
    with stopwatch.phase(Phase.COMPRESS):
        clock.pass_by(4.0)
    assert [(phase, end - start) for phase, start, end in heard] == [
        (Phase.EXCHANGE, 1.0), (Phase.DECOMPRESS, 2.0), (Phase.EXCHANGE, 0.0), (Phase.COMPRESS, 4.0),
    ]  # fmt: skip
    assert heard[-1][1] - heard[-2][2] == 8.0
    for phase in Phase:
        assert stopwatch.seconds[phase] == sum(end - start for one, start, end in heard if one is phase)


@dataclass(frozen=True)
class OfTopK(OwnReduction):
    """An exchange of its own, of top-k."""

    name = "own"
    method = TopK
    title = "Top-k"

    def run(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> list[Result]:
        raise NotImplementedError


def test_an_exchange_of_one_method_takes_it_through_wrappers_and_no_other() -> None:
    parameter, own = Parameter("fc.weight", (4, 4)), OfTopK()
    own.check(with_memory(top_k(0.5)), parameter)
    with pytest.raises(ValueError, match=r"identity is not Top-k, whose exchange this is \(parameter 'fc.weight'\)"):
        own.check(Identity(), parameter)
    assert own.sent_bytes([(top_k(0.5), parameter)], 0, 1) == 0
    assert own.sent_bytes([(top_k(0.5), parameter)], 0, 2) is None, "it depends on the gradients"


def test_states_of_ranks_differ_in_their_salt_alone() -> None:
    parameter, qsgd = Parameter("a", (4,)), with_memory(compress.qsgd())
    states = [OfTopK().init(qsgd, parameter, rank, 3) for rank in range(3)]
    assert [state["salt"] for state in states] == [0, 1, 2]
    assert all({**state, "salt": 0} == states[0] for state in states)
