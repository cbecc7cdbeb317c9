"""What is measured: fits, links on other wires, files, the cache, costs that add up to the bytes that are sent."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from loopback import LoopbackExchange, run_ranks
from measured import codec, link, measurement, parameters
from thinwire.compress.assign import with_memory
from thinwire.compress.base import Parameter
from thinwire.compress.named import NAMES, parse
from thinwire.compress.reductions.base import Stopwatch, Task
from thinwire.compress.reductions.choose import reduction_for
from thinwire.lab.planning import cache
from thinwire.lab.planning.cache import Setting, Speeds
from thinwire.lab.planning.codecs import EchoPeers, exchanges_of
from thinwire.lab.planning.costs import added_bytes
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.ready import WARM_STEPS, DeviceClock, StepWatch, agree, typical
from thinwire.lab.planning.speeds import Fit, MeasuredLink
from thinwire.observe.step import median_of_slowest
from thinwire.plan.profile import Linear

FIXED = [(text, way) for text in ("bf16", "top_k:density=0.01", "ef_sign_sgd", "power_sgd", "int8", "terngrad")
         for way in exchanges_of(text)]  # fmt: skip


def test_a_fit_says_how_far_off_it_is() -> None:
    exact = Fit.of([(1000, 0.002), (2000, 0.003), (5000, 0.006)])
    assert exact.line(3000) == pytest.approx(0.004)
    assert exact.residual == pytest.approx(0.0, abs=1e-12)
    bent = Fit.of([(1000, 0.002), (2000, 0.003), (5000, 0.012)])
    errors = sorted(abs(bent.line(size) - seconds) / seconds for size, seconds in bent.points)
    assert bent.residual == errors[1] > 0.01


def test_a_line_for_more_bytes_than_were_measured_has_the_slope_of_the_long_messages() -> None:
    """Points of an all-reduce at 100 Mbit/s; 24 kB took as long as 98 kB."""
    points = [(6144, 5.3e-3), (24576, 8.7e-3), (98304, 8.6e-3), (393216, 31.7e-3), (786432, 64.7e-3),
              (1572864, 130e-3), (3145728, 263.3e-3)]  # fmt: skip
    assert Fit.of(points, extrapolates=True)(19.3e6) == pytest.approx(19.3e6 / 3145728 * 263.3e-3, rel=0.02)


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(1e-6, 1.0))
def test_a_link_at_another_rate_changes_the_wire_alone(measured: float, other: float, alpha: float) -> None:
    slow, overhead = link(measured, alpha), 3e-9
    slow = replace(slow, all_reduce=Fit(Linear(alpha, slow.message.beta + overhead)))
    moved = slow.at(other)
    assert moved.mbit == pytest.approx(other, rel=1e-6)
    assert moved.all_reduce.line.alpha == alpha
    assert moved.all_reduce.line.beta == pytest.approx(8e-6 / other + overhead, rel=1e-4)
    assert slow.at(slow.mbit).all_reduce.line.beta == pytest.approx(slow.all_reduce.line.beta)


def test_a_link_that_takes_no_time_is_refused() -> None:
    free = Fit(Linear(1e-3, 0.0))
    with pytest.raises(ValueError, match=r"the link was measured as zero: a byte of all_reduce.*--fresh"):
        replace(link(100), all_reduce=free)
    with pytest.raises(ValueError, match=r"measured as zero: a round"):
        replace(link(100), round=Linear(0.0, 0.0))
    with pytest.raises(ValueError, match="rate above 0"):
        link(100).at(0.0)


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


def test_a_measurement_is_of_one_model() -> None:
    measured = measurement()
    measured.check(parameters()[::-1])
    with pytest.raises(ValueError, match=r"lacks 1 tensors of this model, such as 'extra'"):
        measured.check([*parameters(), Parameter("extra", (1,))])
    with pytest.raises(ValueError, match="another model"):
        measured.check(parameters()[1:])


def test_what_was_not_measured_is_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"int8 by all_gather was not measured \(top_k:density=0.01 by all_gather, "):
        measurement().costs("int8", "all_gather")
    with pytest.raises(ValueError, match="int8 by auto was not measured"):
        measurement().profile("int8")


def test_a_compressor_of_no_fixed_size_cannot_be_planned_with() -> None:
    for text in ("gaussian_k:density=0.01", "sidco", "atomo", "ok_topk", "acp_sgd"):
        with pytest.raises(ValueError, match="nobody can tell beforehand what it takes: plan with"):
            exchanges_of(text)
    unfixed = measurement(codecs=[codec("gaussian_k:density=0.01", "all_gather")])
    with pytest.raises(ValueError, match="depends on the gradients"):
        unfixed.costs("gaussian_k:density=0.01", "all_gather")


def test_exchanges_that_are_planned_with_are_those_that_can_run() -> None:
    assert exchanges_of("bf16") == ("all_reduce",)
    assert exchanges_of("top_k") == ("all_gather",)
    assert exchanges_of("ef_sign_sgd") == ("all_gather", "two_shot")


@pytest.mark.parametrize(("text", "way"), FIXED)
def test_bytes_of_a_group_are_those_of_its_tensors(text: str, way: str) -> None:
    """What costs add up is what an exchange sends, but for headers and the rounding of a ring to whole bytes."""
    compressor, world_size = with_memory(parse(text)), 8
    plans = [(compressor, parameter) for parameter in parameters([(64, 64), (256, 512), (77, 33)])]
    exchange = reduction_for(way, *plans[0], world_size)
    sent = max(exchange.sent_bytes(plans, rank, world_size) or 0 for rank in range(world_size))
    added = sum(added_bytes(*plan, exchange, world_size) for plan in plans)
    assert 0 <= sent - added <= 2 * 7 * 64 + 8 * len(plans)


def test_costs_of_a_group_are_a_constant_and_its_tensors() -> None:
    measured = measurement(codecs=[codec("top_k:density=0.01", "all_gather", 1e-4, 1e-9)])
    exact, coded = measured.costs(), measured.costs("top_k:density=0.01", "all_gather")
    size, wire, alpha = 4 * 1024 * 512, 8e-6 / 100, 1e-3
    assert exact.seconds([4]) == pytest.approx(2 * alpha + size * (wire * 14 / 8 + 2e-12) + 2e-6)
    parameter = measured.parameters[4]
    sent = added_bytes(with_memory(parse("top_k:density=0.01")), parameter, reduction_for(
        "all_gather", parse("top_k:density=0.01"), parameter, 8), 8)  # fmt: skip
    assert coded.seconds([4]) == pytest.approx(3 * alpha + sent * wire + 2 * (1e-4 + size * 1e-9))
    assert coded.coded == (True, False) * 4
    with_vector = coded.seconds([4, 5]) - coded.seconds([4])  # which adds an all-reduce to the job
    assert with_vector == pytest.approx(alpha + 2e-6 + 2048 * (wire * 14 / 8 + 2e-12))
    assert coded.seconds([5]) == pytest.approx(exact.seconds([5]))


def test_what_was_measured_badly_is_told() -> None:
    noisy = replace(codec("bf16", "all_reduce"), decode=Fit(Linear(1e-5, 1e-10), residual=0.4))
    assert measurement(codecs=[noisy]).doubts() == ["bf16 (decode)"]
    assert measurement().doubts() == []


def test_few_bytes_take_no_less_than_the_floor() -> None:
    """A fit that is flat up to 1 MB, in a job of one small gradient and in one of a large one."""
    measured = measurement(shapes=[(64, 64), (2048, 1024)])
    bent = Fit(Linear(0.0, 8e-8), floor=0.08)
    exact = replace(measured, link=replace(measured.link, all_reduce=bent)).costs()
    assert exact.seconds([0]) == pytest.approx(1e-3 + 0.08, rel=1e-3)
    assert exact.seconds([0, 1]) == pytest.approx(1e-3 + 8e-8 * 14 / 8 * 4 * (64 * 64 + 2048 * 1024), rel=1e-3)


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


@pytest.mark.parametrize("text", [name for name in NAMES if name not in ("threshold", "ok_topk", "hi_top_k")])
def test_echoes_are_what_ranks_that_agree_would_send(text: str) -> None:
    """So that timing them is timing a real exchange: the mean of equal gradients, as one rank alone decodes it."""
    compressor, parameter = with_memory(parse(text)), Parameter("weight", (64, 32))
    for world_size in (1, 4):
        exchange = reduction_for("auto", compressor, parameter, world_size)
        state = exchange.init(compressor, parameter, 0, world_size)
        peers, gradient = EchoPeers(0, world_size), torch.randn(64, 32)
        (result,) = exchange.run([Task(compressor, parameter, gradient, state)], peers, Stopwatch())
        assert result.mean.shape == gradient.shape
        assert torch.isfinite(result.mean).all()


def test_steps_are_timed_without_those_that_warm_up() -> None:
    module, waited = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), []
    watch = StepWatch(module, dict(module.named_parameters()), lambda: waited.append(1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with torch.no_grad():
        module(torch.ones(1, 4))  # is no step
    for _ in range(WARM_STEPS + 5):
        optimizer.zero_grad()
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    times = watch.close()
    assert times.shape == (5, 6)
    assert len(waited) == WARM_STEPS + 5
    forward, ready, end = times[:, 0], times[:, 1:-1], times[:, -1]
    assert (forward > 0).all()
    assert (ready >= forward[:, None]).all()
    assert (end >= ready.amax(1)).all()
    module(torch.ones(1, 4)).sum().backward()  # nobody watches any more
    assert watch.num_steps == WARM_STEPS + 5


def test_moments_of_a_gpu_are_read_when_they_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        moments, has_come = iter((1000.0, 1250.0, 1500.0, 1750.0, 2000.0)), False

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.milliseconds = next(self.moments)

        def elapsed_time(self, later: Any) -> float:
            assert self.has_come
            return later.milliseconds - self.milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(Event, "has_come", True))
    clock = DeviceClock(torch.device("cuda"))
    clock.begin()
    clock.start()
    clock.ready("b")
    clock.ready("a")
    step = clock.finish()
    assert (step.began, step.started, step.ready, step.ended) == (0.0, 0.25, {"b": 0.5, "a": 0.75}, 1.0)
    assert step.moment("unused") == 0.75


def test_the_typical_step_is_in_the_order_of_gradients() -> None:
    """Forward 1 s; gradients after 3, 2 and 2 s, of which the last registered comes first; 4 s in all."""
    step = torch.tensor([1.0, 3.0, 2.0, 2.0, 4.0], dtype=torch.float64)
    ready = typical(
        median_of_slowest([torch.cat([step, 100 * step, step]).tolist()], 5), parameters([(1,), (2,), (3,)])
    )
    assert [parameter.shape for parameter in ready.parameters] == [(3,), (2,), (1,)]
    assert ready.backward_seconds == (1.0, 0.0, 1.0)
    assert (ready.forward_seconds, ready.rest_seconds) == (1.0, 1.0)


def test_ranks_agree_on_the_slowest() -> None:
    def work(exchange: LoopbackExchange) -> Any:
        mine = torch.tensor([[1.0, 2.0 + exchange.rank, 5.0]], dtype=torch.float64)
        return agree(exchange, mine, parameters([(1,)]))

    results = [outcome.get() for outcome in run_ranks(3, work)]
    assert results[0].backward_seconds == (3.0,)
    assert results[0] == results[1] == results[2]


def test_without_steps_there_is_nothing_to_agree_on() -> None:
    def work(exchange: LoopbackExchange) -> Any:
        return agree(exchange, torch.empty(0, 3), parameters([(1,)]))

    with pytest.raises(ValueError, match="no training step was measured"):
        run_ranks(1, work)[0].get()


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Setting.here(torch.device("cpu"), 8, "a link")


def test_what_was_measured_is_kept_for_its_setting(cached: Setting, tmp_path: Path) -> None:
    assert cache.load(cached) == Speeds()
    first = Speeds().having([codec("bf16", "all_reduce")], link(100))
    cache.save(cached, first)
    assert cache.load(cached) == first
    newer = first.having([codec("bf16", "all_reduce", alpha=2.0), codec("int8", "all_gather")], link(50))
    assert [entry.compressor for entry in newer.codecs] == ["bf16", "int8"]
    assert newer.codec("bf16", "all_reduce") == codec("bf16", "all_reduce", alpha=2.0)
    assert newer.codec("bf16", "all_gather") is None
    for change in ({"world_size": 4}, {"link": "another"}, {"host": "b"}, {"device": "H200"}, {"torch": "3"}):
        assert cache.load(replace(cached, **change)) == Speeds()
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "thinwire"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 9}', '{"version": 3, "link": {}, "codecs": []}'])
def test_a_damaged_cache_is_empty(cached: Setting, text: str) -> None:
    cached.path().parent.mkdir()
    cached.path().write_text(text)
    assert cache.load(cached) == Speeds()


def test_a_place_that_cannot_be_written_is_no_error(cached: Setting, tmp_path: Path) -> None:
    (tmp_path / "thinwire").write_text("a file in the way")
    cache.save(cached, Speeds(link(100)))
    assert cache.load(cached) == Speeds()


def test_links_survive_json() -> None:
    measured = replace(link(100), all_reduce=Fit.of([(1000, 0.25), (3000, 0.5)]))
    assert MeasuredLink.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    assert math.isclose(measured.mbit, 100)


def test_equal_measurements_have_equal_fingerprints() -> None:
    def shuffled(entry: Measurement) -> Measurement:
        return replace(entry, parameters=entry.parameters[::-1])

    assert shuffled(measurement()).fingerprint == measurement().fingerprint
