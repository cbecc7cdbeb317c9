"""Events as a Chrome trace: each where and when it was, from the first of its process on."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.observe.trace import Event, chrome_trace

events = st.lists(
    st.builds(
        Event, st.text(max_size=5), st.sampled_from(["compute", "channel"]), st.floats(-1e3, 1e3), st.floats(0, 1e3)
    ),
    max_size=8,
)


@given(events, events)
def test_every_event_is_there_on_its_track_in_order_of_time(predicted: list[Event], measured: list[Event]) -> None:
    records = chrome_trace({"predicted": predicted, "measured": measured})["traceEvents"]
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in records if each["name"].endswith("_name")}
    for process, made in enumerate((predicted, measured), 1):
        works = [each for each in records if each["ph"] == "X" and each["pid"] == process]
        origin = min((event.start_seconds for event in made), default=0.0)
        assert [each["ts"] for each in works] == sorted(each["ts"] for each in works)
        assert sorted((each["name"], names[process, each["tid"]], each["ts"], each["dur"]) for each in works) == sorted(
            (event.name, event.track, 1e6 * (event.start_seconds - origin), 1e6 * event.seconds) for event in made
        )
        assert names[process, 0] == ("predicted", "measured")[process - 1]


@pytest.mark.parametrize(("start", "seconds"), [(0.0, -1.0), (0.0, math.nan), (0.0, math.inf), (math.nan, 1.0)])
def test_what_cannot_have_been_is_refused(start: float, seconds: float) -> None:
    with pytest.raises(ValueError, match=r"'encode' starts at .*: no event"):
        chrome_trace({"measured": [Event("encode", "compute", start, seconds)]})
