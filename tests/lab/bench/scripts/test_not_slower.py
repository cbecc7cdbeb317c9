"""The judge of "never slower than stock DDP": what it makes of steps whose ratio is known."""

import numpy as np
import pytest

import not_slower

FIRST, ROUNDS = 200, 600


def _steps(slower: float, noise: float, seed: int = 0) -> np.ndarray:
    """Return seconds of steps of stock, thinwire and the control, by a machine whose speed drifts."""
    random = np.random.default_rng(seed)
    drift = 1.0 + 0.3 * np.sin(np.arange(ROUNDS) / 40.0)
    seconds = 0.01 * drift * np.exp(noise * random.standard_normal((3, ROUNDS)))
    seconds[1] *= slower
    return seconds


@pytest.mark.parametrize(("slower", "noise", "said"), [
    (1.0, 0.03, "not slower"), (1.01, 0.03, "not slower"), (1.1, 0.05, "SLOWER"), (1.02, 0.3, "not resolved"),
])  # fmt: skip
def test_a_verdict_is_that_of_the_interval(slower: float, noise: float, said: str) -> None:
    figures = not_slower.figures(_steps(slower, noise), FIRST)
    assert not_slower.verdict([(figures["ratio"], 1.02), (figures["first_ratio"], 1.05)]) == said


def test_intervals_have_the_true_ratio_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(not_slower, "RESAMPLES", 200)
    seen = [not_slower.figures(_steps(1.03, 0.1, seed), FIRST) for seed in range(40)]
    truth = {"ratio": 1.03, "control_ratio": 1.0, "sum_ratio": 1.03, "first_ratio": 1.03}
    hits = {key: sum(one[key][1] <= true <= one[key][2] for one in seen) for key, true in truth.items()}
    assert min(hits.values()) >= 32, hits


def test_stock_steps_behind_slow_background_work_are_seen() -> None:
    seconds, orders = _steps(1.0, 0.01), [[0, 1, 2], [2, 1, 0]] * (ROUNDS // 2)
    for number, order in enumerate(orders):
        seconds[order[2], number] *= 1.2  # the step that follows thinwire's
    assert 1.15 < not_slower.behind_ours(seconds, orders, FIRST) < 1.25
