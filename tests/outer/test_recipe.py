"""Recipes of outer loops: settings that make sense, and the schedule that follows from them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import thinwire
from thinwire.outer import OuterRecipe, diloco, local_sgd, shadow_sync


@st.composite
def recipes(draw: st.DrawFn) -> OuterRecipe:
    every = draw(st.integers(1, 40))
    fragments, delay = draw(st.integers(1, every)), draw(st.integers(0, every))
    return replace(diloco(every, fragments=fragments, delay=delay), start_step=draw(st.integers(0, 9)))


@given(recipe=recipes())
def test_each_fragment_is_launched_once_in_every_steps_and_evenly(recipe: OuterRecipe) -> None:
    assert recipe.every is not None
    steps = range(recipe.start_step + 1, recipe.start_step + 3 * recipe.every + 1)
    launches = [step for step in steps for _ in range(recipe.launched(step) - recipe.launched(step - 1))]
    assert len(launches) == 3 * recipe.fragments
    for fragment in range(recipe.fragments):
        own = launches[fragment :: recipe.fragments]
        assert [later - step for step, later in pairwise(own)] == [recipe.every] * 2
    gaps = {later - step for step, later in pairwise(launches)}
    assert gaps <= {recipe.every // recipe.fragments, -(-recipe.every // recipe.fragments)}
    assert launches[-1] == steps[-1], "a full round ends with a launch"


@given(recipe=recipes())
def test_up_to_the_start_step_all_fragments_are_launched_after_each_step(recipe: OuterRecipe) -> None:
    for step in range(recipe.start_step + 1):
        assert recipe.launched(step) == step * recipe.fragments


@given(recipe=recipes(), launched=st.integers(0, 200))
def test_the_schedule_goes_on_from_any_number_of_launches(recipe: OuterRecipe, launched: int) -> None:
    """No launch is due at once, and each is still due at most a full round later."""
    assert recipe.every is not None
    step = recipe.step_of(launched)
    assert recipe.launched(step) <= launched
    assert recipe.launched(step + 1 + -(-recipe.every // recipe.fragments)) > launched


def test_a_training_of_few_rounds_gets_a_warning_with_figures_and_a_shorter_round() -> None:
    assert diloco(every=64).few_rounds(6400) == ""
    warning = diloco(every=64).few_rounds(2000)
    assert warning.startswith(
        "2,000 steps are 31 rounds of diloco(every=64); from scratch, fewer than 100 ended 11 to 44 %"
    )
    assert "pass a smaller every=" in warning
    assert "are 15 rounds of diloco(every=64)" in diloco(every=64).after(1000).few_rounds(2000)
    assert diloco(every=64).few_rounds(float("inf")) == diloco(every=64).few_rounds(-1) == "", "nobody knows"
    assert shadow_sync().few_rounds(20) == "", "which does not count steps"


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (local_sgd, {"every": 0}, "every is 0"),
    (local_sgd, {"every": None}, "every is None"),
    (local_sgd, {"every": True}, "every is True"),
    (local_sgd, {"every": 2.0}, "every is 2.0"),
    (local_sgd, {"start_step": -1}, "start_step is -1"),
    (local_sgd, {"min_ranks": 0}, "min_ranks is 0"),
    (diloco, {"lr": 0.0}, "lr is 0.0"),
    (diloco, {"lr": float("nan")}, "lr is nan"),
    (diloco, {"lr": "0.7"}, "lr is '0.7'"),
    (diloco, {"momentum": 1.0}, "momentum is 1.0"),
    (diloco, {"nesterov": 1}, "nesterov is 1"),
    (diloco, {"mix": 0.0}, "mix is 0.0"),
    (diloco, {"mix": 1.5}, "mix is 1.5"),
    (diloco, {"fragments": 0}, "fragments is 0"),
    (diloco, {"every": 4, "fragments": 5}, "5 fragments do not fit"),
    (diloco, {"every": 4, "delay": 5}, "delay=5 is more than every=4"),
    (shadow_sync, {"algorithm": "esgd"}, "Did you mean 'easgd'"),
    (shadow_sync, {"algorithm": None}, "unknown algorithm"),
    (shadow_sync, {"every_seconds": -1}, "every_seconds is -1"),
    (shadow_sync, {"every_seconds": False}, "every_seconds is False"),
    (shadow_sync, {"every_seconds": float("inf")}, "every_seconds is inf"),
    (shadow_sync, {"algorithm": "average", "lr": 0.5}, "takes the mean as it is"),
    (shadow_sync, {"algorithm": "easgd", "momentum": 0.5}, "has no momentum"),
]


@pytest.mark.parametrize(("make", "settings", "message"), WRONG)
def test_a_setting_that_makes_no_sense_is_refused_in_one_line(
    make: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make(**settings)
    assert "\n" not in str(caught.value)


def test_a_recipe_is_plain_data() -> None:
    for recipe in (local_sgd(), diloco(every=32, fragments=4, delay=2, mix=0.5), shadow_sync("bmuf")):
        assert pickle.loads(pickle.dumps(recipe)) == recipe
        assert hash(recipe) == hash(pickle.loads(pickle.dumps(recipe)))
        with pytest.raises(AttributeError):
            recipe.mix = 0.3  # pyrefly: ignore
    assert local_sgd(every=8) != diloco(every=8, lr=1.0, momentum=0.0, nesterov=False), "they have names"
    assert [one.in_background for one in (local_sgd(), diloco(), shadow_sync())] == [False, False, True]


def test_recipes_need_no_torch() -> None:
    text = "import sys, thinwire; thinwire.outer.diloco(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
    assert {"diloco", "local_sgd", "shadow_sync", "OuterLoop"} <= set(dir(thinwire.outer))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = thinwire.outer.nonsense
