"""What is measured: fits, links on other wires, files, the cache, costs that add up to the bytes that are sent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from measured import measurement
from thinwire.compress.base import Parameter
from thinwire.lab.planning.measurement import Measurement


def test_a_measurement_survives_its_file(tmp_path: Path) -> None:
    path, measured = tmp_path / "measured.json", measurement()
    measured.save(path)
    assert Measurement.load(path) == measured


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"backward_seconds": (0.1,) * 7}, r"7 backward times for 8 parameters: tensors are missing"),
        ({"backward_seconds": (0.1,) * 7 + (-0.1,)}, r"backward of 'layer7.weight' took -0.1 s, which is no time"),
        ({"forward_seconds": float("inf")}, "forward_seconds took inf s"),
        ({"parameters": (), "backward_seconds": ()}, "no gradients to plan for"),
        ({"parameters": (Parameter("a", (1,)),) * 8}, "measured twice"),
        ({"world_size": 1}, "two ranks are needed"),
        ({"hosts": 9}, "8 ranks on 9 hosts"),
        ({"codecs": ()}, "copying gradients that are not compressed was not measured"),
        ({"version": 3}, "version 3, and it should be 1"),
    ],
)
def test_what_is_no_measurement_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(measurement(), **changes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("link"), "a damaged measurement"),
        (lambda data: data["parameters"][0].pop("seconds"), "a damaged measurement"),
        (lambda data: data["parameters"][0].update(dtype="float31"), "dtype 'float31'"),
        (lambda data: data["link"]["all_gather"]["line"].update(beta=0.0), "measured as zero"),
        (lambda data: data["link"]["round"].update(alpha=-1.0), "alpha must be 0 or more"),
        (lambda data: data.update(version=0), "version 0, and it should be 1"),
        (lambda data: data.update(colour="red"), "a damaged measurement"),
    ],
)
def test_a_damaged_file_is_refused(change: Any, says: str) -> None:
    data = json.loads(json.dumps(measurement().to_json()))
    change(data)
    with pytest.raises(ValueError, match=says):
        Measurement.from_json(data)


def test_what_was_not_measured_is_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"int8 by all_gather was not measured \(top_k:density=0.01 by all_gather, "):
        measurement().costs("int8", "all_gather")
    with pytest.raises(ValueError, match="int8 by auto was not measured"):
        measurement().profile("int8")


def test_a_profile_has_the_costs_of_the_whole_model() -> None:
    measured = measurement()
    everything = range(len(measured.parameters))
    for compressor in (None, "bf16", "top_k:density=0.01"):
        lane = measured.profile(compressor)
        costs = measured.costs(compressor, measured.fastest_exchange(compressor) if compressor else "all_reduce")
        total = sum(measured.size_bytes)
        assert lane.communicate(total) == pytest.approx(costs.seconds(everything))
        compute = measured.profile(compressor, on="compute")
        parts = (compute.compress, compute.communicate, compute.decompress)
        assert sum(line(total) for line in parts) == pytest.approx(lane.communicate(total))
        assert lane.other_seconds == 0.03


def test_equal_measurements_have_equal_fingerprints() -> None:
    def shuffled(entry: Measurement) -> Measurement:
        return replace(entry, parameters=entry.parameters[::-1])

    assert shuffled(measurement()).fingerprint == measurement().fingerprint
