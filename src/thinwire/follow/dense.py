"""Whether dense gradients travel losslessly coded: measured, sampled, tried, and decided again, on all ranks alike.

The link is measured first. Where the best code could pay on it, gradients of two steps are sampled: their sum, coded as
gradients would be, shows bits and seconds of the code on these ranks at work. If that promises a gain, some steps are
timed both ways, and the faster way stays. Nothing is measured where all ranks are on one host.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codes import floats
from thinwire.comm.channel import Subject
from thinwire.comm.hosts import ranks_of_hosts
from thinwire.comm.lane import Lane
from thinwire.comm.machine import Machine
from thinwire.gradients.buckets import OTHERS
from thinwire.gradients.lossless import ROW, SAMPLED_STEPS, GradientSampler, LosslessSync
from thinwire.kernels import dispatch
from thinwire.lossless.decide import Code, Ranks, Verdict, decide
from thinwire.lossless.sum import SumReport, all_reduce

SKIPPED_STEPS, TIMED_STEPS, KEPT_STEPS, DECLINED_STEPS = 2, 5, 100, 1000
BUCKET_BYTES = 25 * 1024 * 1024
GAIN = 1.03
"""Least ratio of the seconds of native steps to those of lossless ones for the lossless way to stay."""

_log = logging.getLogger("thinwire")


class DenseChoice:
    """The choice between the native and the lossless way. All ranks call `finish_step` after every counted step.

    Args:
        lane: the lane of all ranks, which are on several hosts.
        lossless: what takes the lossless way.
        num_bytes: bytes of all gradients of each dtype.
        sample: has a sampler called with gradients from the next step on, by names that all ranks share; None ends it.
        turn: lets gradients of these dtypes go the lossless way from the next step on.
    """

    def __init__(
        self,
        lane: Lane,
        lossless: LosslessSync,
        num_bytes: Mapping[torch.dtype, int],
        sample: Callable[[GradientSampler | None], None],
        turn: Callable[[Sequence[torch.dtype]], None],
    ) -> None:
        self._lane, self._lossless, self._num_bytes = lane, lossless, num_bytes
        self._sample, self._turn = sample, turn
        self._per_host = max(map(len, ranks_of_hosts(lane.exchange.hosts)))
        self._sampler: GradientSampler | None = None
        self._machine: Machine | None = None
        self._is_measured = False
        self._verdicts: dict[torch.dtype, Verdict] = {}
        self._native_seconds = 0.0
        self._seconds: list[float] = []
        self._since: float | None = None
        self._enter(self._probe, SKIPPED_STEPS)

    def finish_step(self) -> None:
        """Decide what is due after a step; the next one may go another way."""
        if self._since is not None:
            self._seconds.append(time.perf_counter() - self._since)
        self._left -= 1
        if self._left <= 0:
            self._phase()
        self._since = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Return the decision, which decides about bits of sums."""
        dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in self._lossless.dtypes)
        return {"dtypes": dtypes, "native": dict(self._lossless.native), "reason": self._lossless.reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a decision; it is made again when it would be due."""
        self._turn([getattr(torch, name) for name in state["dtypes"]])
        self._lossless.native.update(state["native"])
        self._lossless.reason = state["reason"]
        if state["dtypes"]:
            self._enter(self._look_again, KEPT_STEPS)

    # --- phases

    def _enter(self, phase: Callable[[], None], steps: int) -> None:
        self._phase, self._left = phase, steps
        self._seconds.clear()

    def _probe(self) -> None:
        """Measure the link; sample gradients if the best code could pay on it."""
        if not any(self._verdict(_best(dtype), dtype).is_lossless for dtype in self._num_bytes):
            self._decline("no code could pay on this link")
            return
        kernels.warm_up(wait=False)
        self._sampler = GradientSampler(sum(size // dtype.itemsize for dtype, size in self._num_bytes.items()))
        self._sample(self._sampler)
        self._enter(self._try_code, SAMPLED_STEPS)

    def _try_code(self) -> None:
        """Sum the samples losslessly, and learn from it what the code achieves."""
        assert self._sampler is not None
        self._sample(None)
        samples, self._sampler = self._sampler.samples(), None
        for sample in samples.values():  # which loads the kernels
            floats.bits_per_value(sample)
            floats.decode(floats.encode(sample), torch.empty_like(sample))
        unready = dispatch.unready_calls()
        mine = [number for sample in samples.values() for number in self._lane.submit(_sum_of(sample)).wait()]
        is_typical = unready == dispatch.unready_calls() and not dispatch.is_compiling()
        *columns, typical = _totals(self._gather("bits and seconds of the code", [*mine, float(is_typical)]))
        if typical < self._lane.world_size:
            self._enter(self._probe, KEPT_STEPS // 10)
            return
        found = [_code(columns[12 * place :][:12], dtype.itemsize) for place, dtype in enumerate(samples)]
        self._verdicts = {dtype: self._verdict(code, dtype) for code, dtype in zip(found, samples, strict=True)}
        if any(verdict.is_lossless for verdict in self._verdicts.values()):
            self._enter(self._time_native, SKIPPED_STEPS + TIMED_STEPS)
        else:
            self._decline("; ".join(verdict.reason for verdict in self._verdicts.values()))

    def _time_native(self) -> None:
        self._native_seconds = self._typical_seconds()
        self._turn([dtype for dtype, verdict in self._verdicts.items() if verdict.is_lossless])
        self._lossless.reason = "; ".join(verdict.reason for verdict in self._verdicts.values())
        self._enter(self._compare, SKIPPED_STEPS + TIMED_STEPS)

    def _compare(self) -> None:
        """Keep the lossless way if steps became shorter by it."""
        seconds = self._typical_seconds()
        text = f"a step takes {1e3 * seconds:.1f} ms, natively {1e3 * self._native_seconds:.1f} ms"
        if self._native_seconds < GAIN * seconds:
            self._decline(text)
            return
        self._explain(f"{self._lossless.reason}; {text}")
        self._enter(self._look_again, KEPT_STEPS)

    def _look_again(self) -> None:
        """Leave buckets to the native way whose codes pay no more, by the bits that their messages had."""
        reports = dict(sorted(self._lossless.reports.items()))
        self._lossless.reports.clear()
        mine = [number for report in reports.values() for number in _numbers(report)]
        columns = _totals(self._gather(f"bits and seconds of {', '.join(reports)}", mine)) if mine else []
        for place, (bucket, report) in enumerate(reports.items()):
            code = _code(columns[12 * place :][:12], report.num_bytes / max(1, report.values))
            verdict = self._decision(code, report.num_bytes / KEPT_STEPS, was_lossless=True)
            if not verdict.is_lossless:
                self._lossless.native[bucket] = verdict.reason
                self._explain(f"{bucket} is summed natively: {verdict.reason}")
        if reports.keys() <= self._lossless.native.keys():
            self._decline(self._lossless.reason)
        else:
            self._enter(self._look_again, KEPT_STEPS)

    def _decline(self, reason: str) -> None:
        self._turn(())
        self._explain(f"dense gradients are summed natively: {reason}")
        self._enter(self._probe, DECLINED_STEPS)

    # --- numbers

    def _verdict(self, code: Code, dtype: torch.dtype) -> Verdict:
        return self._decision(code, min(BUCKET_BYTES, self._num_bytes.get(dtype, 0)))

    def _decision(self, code: Code, num_bytes: float, was_lossless: bool = False) -> Verdict:
        if not self._is_measured:
            self._machine, self._is_measured = self._lane.submit(_measured).wait(), True
        if self._machine is None:
            return Verdict(False, "the link could not be measured")
        ranks = Ranks(self._lane.world_size, self._per_host, cores=os.cpu_count() or 1)
        return decide(num_bytes, ranks, self._machine, code, was_lossless)

    def _typical_seconds(self) -> float:
        """Return the median step of the median rank, which is the same on all ranks."""
        mine = statistics.median(self._seconds[-TIMED_STEPS:])
        return statistics.median(seconds for (seconds,) in self._gather("seconds of a step", [mine]))

    def _gather(self, what: str, mine: Sequence[float]) -> list[list[float]]:
        def job(lane: Lane) -> list[list[float]]:
            with lane.setting_up():
                return lane.channel(Subject(what, f"{len(mine)} numbers")).gather_numbers(mine)

        return self._lane.submit(job).wait()

    def _explain(self, reason: str) -> None:
        self._lossless.reason = reason
        for name in (OTHERS, ROW):
            if name in self._lossless.records:
                self._lossless.records[name].reason = reason
        if self._lane.rank == 0:
            _log.info("%s", reason)


def _measured(lane: Lane) -> Machine | None:
    with lane.setting_up():
        lane.channel(Subject("the cost of the link", "dense gradients")).open()
        machine = lane.machine()
    # Where a message seems slow, the probe of an all-reduce attributes to its bytes as little as a quarter of its time.
    # With several ranks on a host the ring crosses its link once, and messages of all to all more often.
    is_alone = len(set(lane.exchange.hosts)) == lane.world_size
    return machine.slowed(machine.byte_seconds) if machine is not None and is_alone else machine


def _sum_of(sample: Tensor) -> Callable[[Lane], list[float]]:
    """Return a job that sums a sample as gradients are summed, and returns what that took."""

    def job(lane: Lane) -> list[float]:
        report = SumReport()
        with lane.setting_up():
            channel = lane.channel(Subject("a sample of dense gradients", f"{sample.dtype} {sample.numel()}"))
            channel.open()
            all_reduce(sample, channel, 1.0, report)
        return _numbers(report)

    return job


def _numbers(report: SumReport) -> list[float]:
    return [float(number) for half in (report.push, report.pull) for number in astuple(half)]


def _totals(told: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*told, strict=True)]


def _code(numbers: Sequence[float], value_bytes: float) -> Code:
    """Return what a code achieves, from the `_numbers` of all ranks together."""
    values, num_bytes, encoded, encoding, decoded, decoding = range(6)

    def of(half: Sequence[float]) -> tuple[float, float, float]:
        bits = 8.0 * half[num_bytes] / max(1.0, half[values])
        encode, decode = half[encoding] / max(1.0, half[encoded]), half[decoding] / max(1.0, half[decoded])
        return bits, encode / value_bytes, decode / value_bytes

    (push, encode, decode), (pull, encode_sum, decode_sum) = of(numbers[:6]), of(numbers[6:12])
    return Code(push, pull, encode, decode, encode_sum, decode_sum, round(8 * value_bytes))


def _best(dtype: torch.dtype) -> Code:
    """Return a code that no gradients are known to reach."""
    bits, seconds = {2: 10.0, 4: 12.0, 8: 32.0}[dtype.itemsize], 3e-10
    return Code(bits, bits, seconds, seconds, seconds, seconds, 8 * dtype.itemsize)
