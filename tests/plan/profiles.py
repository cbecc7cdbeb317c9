"""Profiles at random."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import strategies as st

from thinwire.plan import Groups, Linear, Profile


def random_profile(seed: int, count: int | None = None, most: int = 12) -> Profile:
    """Any kind: even, skewed or sorted tensors, zeros among them; costs from nothing to a hundred times backward."""
    random = np.random.default_rng(seed)
    count = count or int(random.integers(1, most + 1))
    backward = [
        np.full(count, 1.0),
        random.random(count),
        random.lognormal(0, 1.5, count),
        np.sort(random.random(count)),
    ][seed % 4]
    sizes = [
        np.full(count, 40_000),
        random.integers(1, 400_000, count),
        4 * np.exp(random.normal(9, 2.5, count)).astype(int),
        random.choice([1024, 8192, 2**20, 2**22], count),
    ][(seed // 4) % 4]
    if seed % 5 == 0:
        backward, sizes = backward * (random.random(count) < 0.6), sizes * (random.random(count) < 0.6)
    costs = [random_cost(random, float(backward.sum()), sizes) for _ in range(3)]
    return Profile(backward, sizes, *costs)


def random_cost(random: np.random.Generator, backward: float, sizes: np.ndarray) -> Linear:
    """From 1/1000 to 10 times backward for all bytes; launches of all tensors from 1/1000 to 100 times that."""
    moved = max(backward, 0.1) * 10 ** random.uniform(-3, 1)
    launches = moved * 10 ** random.uniform(-3, 2)
    alpha, beta = launches / len(sizes), moved / max(int(sizes.sum()), 1)
    return Linear(alpha * (random.random() > 0.15), beta * (random.random() > 0.1))


def near(expected: float) -> object:
    return pytest.approx(expected, rel=1e-9, abs=1e-15)


seconds = st.one_of(st.just(0.0), st.floats(1e-6, 10.0))


lines = st.builds(Linear, seconds, st.one_of(st.just(0.0), st.floats(1e-9, 1e-2)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Profile, Groups]:
    count = draw(st.integers(1, 9))
    backward = draw(st.lists(seconds, min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    cuts = draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()
    groups = tuple(tuple(range(start, end)) for start, end in pairwise([0, *sorted(cuts), count]))
    return Profile(backward, sizes, draw(lines), draw(lines), draw(lines)), groups
