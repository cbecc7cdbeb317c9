"""Whether dense gradients travel losslessly coded: watched, priced and tried, on all ranks alike.

A trial (`thinwire.tune.trial`) decides, with the native sum as the arm that stands. Once steps have waited for the
network for long enough, a price says whether the other arm is worth a test: the link is measured, and a code that no
gradients are known to reach has to pay on it. Nothing is measured where all ranks are on one host.

The host does not see a GPU wait. So there the same price is asked at once, a few coded steps show what codes achieve,
and then a price decides, of the bits and seconds that they had and of the links of both ways.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch

from thinwire import kernels
from thinwire.comm.channel import Subject
from thinwire.comm.hosts import ranks_of_hosts
from thinwire.comm.lane import Lane
from thinwire.comm.machine import Machine
from thinwire.compress.assign import LOSSLESS, NATIVE
from thinwire.errors import logger
from thinwire.gradients.exact import OTHERS
from thinwire.gradients.lossless import ROW, LosslessSync
from thinwire.gradients.tables import weak
from thinwire.rows import floats
from thinwire.sums.lossless import SumReport
from thinwire.tune.lossless import Code, Ranks, Verdict, decide
from thinwire.tune.playing import SETUP_SECONDS, Playing
from thinwire.tune.trial import Trial

KEPT_STEPS = 100
"""Steps between two looks at the bits of coded messages, which say whether a bucket still pays."""
PRICED_AFTER, PRICED_STEPS = 2, 3
"""Steps before the price of gradients on a GPU is asked, and coded steps whose bits and seconds decide. The first coded
step does not count, in which Triton compiles."""
BUCKET_BYTES = 25 * 1024 * 1024
PINNED = '; dense="{}" pins that, and so the last bits of sums'


class DenseChoice:
    """The choice between the native and the lossless way. All ranks call `finish_step` after every counted step.

    Args:
        lane: the lane of all ranks, which are on several hosts.
        lossless: what takes the lossless way.
        num_bytes: bytes of all gradients of each dtype.
        turn: lets gradients of these dtypes go the lossless way from the next step on; also whether that stands.
        own_links: for gradients on a GPU, measures the links of the group that sums natively, as
            `thinwire.comm.machine.measure_collectives` returns them, or () if that is the lane; None on the CPU.
        is_free: returns whether the model can have a hook, as a script may register one after `attach`.
    """

    def __init__(
        self,
        lane: Lane,
        lossless: LosslessSync,
        num_bytes: Mapping[torch.dtype, int],
        turn: Callable[[Sequence[torch.dtype], bool], None],
        own_links: Callable[[], Sequence[Machine]] | None = None,
        is_free: Callable[[], bool] = lambda: True,
    ) -> None:
        self._lane, self._lossless, self._num_bytes = lane, lossless, num_bytes
        self._turn, self._own_links, self._is_free, self._steps = turn, own_links, is_free, 0
        self._per_host = max(map(len, ranks_of_hosts(lane.exchange.hosts)))
        mine = [float(os.cpu_count() or 1), float(floats.is_possible(imports=False))]
        cores, can = zip(*lane.agree("cores and kernels of ranks", mine), strict=True)
        self._unable = _unable(can, lane)
        self._cores = self._per_host if own_links is not None else min(cores)  # a rank has its GPU alone
        self._machine: Machine | None = None
        self._is_measured = False
        self._dtypes: tuple[torch.dtype, ...] = ()  # whose code may pay on this link
        self._coded = 0
        self.trial = Trial([NATIVE, LOSSLESS], SETUP_SECONDS)
        self._playing = Playing(lane.agree, "sums of dense gradients", self.trial, weak(self._play))

    def finish_step(self, waited: float) -> None:
        """Decide what is due after a step; the next one may be summed another way."""
        before = self.trial.standing
        self._coded += bool(self._lossless.dtypes)
        if self._own_links is not None:
            self._finish_priced_step()
            return
        self._playing.finish_step(waited)
        if self.trial.standing != before:
            how = "losslessly" if self.trial.standing else "natively"
            pin = PINNED.format(LOSSLESS if self.trial.standing else NATIVE)
            self._explain(f"dense gradients are summed {how}: {self.trial.explain()}", pin)
        if self.trial.standing and self.trial.is_settled and self._coded >= KEPT_STEPS:
            self._look_again()

    def _finish_priced_step(self) -> None:
        self._steps += 1
        if self._steps == PRICED_AFTER and (self.trial.standing or self._may_pay()):
            self.trial.standing = 1
            self._playing.turn()
        elif self._steps == PRICED_AFTER + 1:
            self._lossless.reports.clear()
            self._coded = 0
        elif self._coded >= KEPT_STEPS or self._coded == self._steps - PRICED_AFTER - 1 == PRICED_STEPS:
            self._look_again()

    def state_dict(self) -> dict[str, Any]:
        """Return the decision, which decides about bits of sums."""
        dtypes = self._dtypes if self.trial.standing else ()  # else none, or on trial
        names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        native, reason = dict(self._lossless.native), self._lossless.reason
        said = {"dtypes": names, "native": native, "reason": reason, "trial": self.trial.state_dict()}
        return {**said, "world_size": self._lane.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a decision of as many ranks; it is made again when it would be due, and a test begins again."""
        if state.get("world_size", self._lane.world_size) != self._lane.world_size:
            return
        self._coded = 0
        self._dtypes = tuple(getattr(torch, name) for name in state["dtypes"])
        self._lossless.native.update(state["native"])
        self._lossless.reason = state["reason"]
        decided = {"standing": LOSSLESS, "left": KEPT_STEPS, "reason": state["reason"]} if self._dtypes else {}
        self._playing.load_state_dict(state.get("trial", {**self.trial.state_dict(), **decided}))  # was there no trial
        if self._dtypes and self._unable:  # on these hosts
            self._decline(self._unable)

    def _play(self, arm: str, stands: bool) -> None:
        """Have the next step sum by this arm, once a price says that it is worth a test."""
        if arm != LOSSLESS and self.trial.is_settled:
            self._dtypes = ()  # so that it is asked before the next test whether that can be
        if arm != LOSSLESS or self._dtypes or self._may_pay():
            self._turn(self._dtypes if arm == LOSSLESS else (), stands)

    def _may_pay(self) -> bool:
        """Return whether the best code could pay on this link, which is measured; decline the trial if not."""
        mine = [float(floats.is_possible()), float(self._is_free())]
        can, free = zip(*self._lane.agree("who can make codes of floats", mine), strict=True)
        named = self._lane.exchange.global_ranks
        taken = "" if all(free) else f"rank {named[free.index(0.0)]} has registered another communication hook"
        if unable := _unable(can, self._lane) or taken:
            self._decline(unable)
            return False
        self._dtypes = tuple(one for one in self._num_bytes if self._verdict(self._best(one), one).is_lossless)
        if not self._dtypes:
            self._decline("no code could pay on this link")
            return False
        kernels.warm_up(wait=False)
        self._explain("some steps are summed losslessly, to time them", PINNED.format(f'{LOSSLESS}" or "{NATIVE}'))
        self._lossless.native.clear()
        self._lossless.reports.clear()
        self._coded = 0
        return True

    def _look_again(self) -> None:
        """Leave buckets to the native way whose codes pay no more, by the bits that their messages had."""
        reports, kept = dict(sorted(self._lossless.reports.items())), ""
        self._lossless.reports.clear()
        mine = [number for report in reports.values() for number in _numbers(report)]
        gathered = self._lane.agree(f"bits and seconds of {', '.join(reports)}", mine) if mine else []
        columns = [sum(column) for column in zip(*gathered, strict=True)]
        for index, (bucket, report) in enumerate(reports.items()):
            code = _code(columns[12 * index :][:12], report.num_bytes / max(1, report.values))
            verdict = self._decision(code, report.num_bytes / self._coded, was_lossless=True)
            if not verdict.is_lossless:
                self._lossless.native[bucket] = verdict.reason
                self._explain(
                    f"{bucket} is summed natively: {verdict.reason}", PINNED.format(f'{LOSSLESS}" or "{NATIVE}')
                )
            kept = verdict.reason if verdict.is_lossless else kept
        self._coded = 0
        if reports.keys() <= self._lossless.native.keys():
            self._decline(self._lossless.reason)
        elif self._own_links is not None:
            self._explain(f"dense gradients are summed losslessly: {kept}", PINNED.format(LOSSLESS))

    def _decline(self, reason: str) -> None:
        """Sum natively, and learn what a code achieves before it is tried again."""
        self._dtypes = ()
        self._explain(f"dense gradients are summed natively: {reason}", PINNED.format(NATIVE))
        self.trial.decline(reason)
        self._playing.turn()

    # --- numbers

    def _verdict(self, code: Code, dtype: torch.dtype) -> Verdict:
        return self._decision(code, min(BUCKET_BYTES, self._num_bytes.get(dtype, 0)))

    def _decision(self, code: Code, num_bytes: float, was_lossless: bool = False) -> Verdict:
        if not self._is_measured:
            own = self._own_links() if self._own_links is not None else ()
            self._machine, self._is_measured = self._lane.submit(_measured).wait(), True
            if self._machine is not None and own:
                message, reduced = own[0].message_seconds, own[0].reduced_byte_seconds
                self._machine = replace(self._machine, message_seconds=message, reduced_byte_seconds=reduced)
        if self._machine is None:
            return Verdict(False, "the link could not be measured")
        ranks = Ranks(self._lane.world_size, self._per_host, self._cores)
        return decide(num_bytes, ranks, self._machine, code, was_lossless)

    def _best(self, dtype: torch.dtype) -> Code:
        """Return a code that no gradients are known to reach."""
        bits, seconds = {2: 10.0, 4: 12.0, 8: 32.0}[dtype.itemsize], 3e-10 if self._own_links is None else 1e-11
        return Code(bits, bits, seconds, seconds, seconds, seconds, 8 * dtype.itemsize)

    def _explain(self, reason: str, more: str) -> None:
        self._lossless.reason = reason
        for name in (OTHERS, ROW):
            if name in self._lossless.records:
                self._lossless.records[name].reason = reason
        if self._lane.rank == 0:
            logger.info("%s%s", reason, more)


def _measured(lane: Lane) -> Machine | None:
    with lane.setting_up():
        lane.channel(Subject("the cost of the link", "dense gradients")).open()
        machine = lane.machine()
    # Where a message seems slow, the probe of an all-reduce attributes to its bytes as little as a quarter of its time.
    # With several ranks on a host the ring crosses its link once, and messages of all to all more often.
    is_alone = len(set(lane.exchange.hosts)) == lane.world_size
    return machine.slowed(machine.byte_seconds) if machine is not None and is_alone else machine


def _unable(can: Sequence[float], lane: Lane) -> str:
    """Return which rank can make no codes, "" if all can."""
    if all(can):
        return ""
    return f"rank {lane.exchange.global_ranks[can.index(0.0)]} cannot run compiled kernels: {floats.CURE}"


def _numbers(report: SumReport) -> list[float]:
    return [float(number) for half in (report.push, report.pull) for number in astuple(half)]


def _code(numbers: Sequence[float], value_bytes: float) -> Code:
    """Return what a code achieves, from the `_numbers` of all ranks together."""
    values, num_bytes, encoded, encoding, decoded, decoding = range(6)

    def of(half: Sequence[float]) -> tuple[float, float, float]:
        bits = 8.0 * half[num_bytes] / max(1.0, half[values])
        encode, decode = half[encoding] / max(1.0, half[encoded]), half[decoding] / max(1.0, half[decoded])
        return bits, encode / value_bytes, decode / value_bytes

    (push, encode, decode), (pull, encode_sum, decode_sum) = of(numbers[:6]), of(numbers[6:12])
    return Code(push, pull, encode, decode, encode_sum, decode_sum, round(8 * value_bytes))
