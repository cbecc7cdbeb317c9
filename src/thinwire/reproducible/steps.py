"""`Steps`: a training of a fixed number of micro-batches a step, dealt to whatever ranks there are.

A step is all or nothing. When a rank has made its share, all ranks exchange exact sums and hold the mean; a rank that
knows that all others hold it too is done with the step. If one is lost before, those that are left meet again. They
still have the sums of what they have made, deal what is missing, and exchange again. Whether a rank that died had gone
on by itself does not matter, because the mean has the same bits whoever makes it.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from thinwire.comm.agree import gather_json
from thinwire.comm.c10d import NEEDED, UNREGISTERED, check_names
from thinwire.comm.channel import Subject
from thinwire.comm.groups import Group, resolve_group
from thinwire.comm.lane import Lane
from thinwire.errors import CorruptMessageError, MismatchError, ThinwireError, logger, told
from thinwire.outer.members import Members, Roll, hand_over
from thinwire.reproducible.digests import digest, of_arithmetic, of_state
from thinwire.reproducible.exact import MOST_ADDED
from thinwire.reproducible.gradients import Gradients
from thinwire.rows.formats import digest64

_SMOOTHING = 0.5
_AFTER, _CHECKED, _OUTSIDE = -1, -2, -3
"""Parts of a step beside its micro-batches, for seeds: after them, which one is checked, and before them."""
_OPINIONS = 3
"""Number of ranks that make a micro-batch before it is said whose arithmetic differs."""


class Stateful(Protocol):
    """What can be handed over: an optimizer, a scheduler, averaged weights."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class ElasticStep:
    """One step of `Steps`: iterate over it for the micro-batches of this rank, once. ``number`` counts from 0."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self.number = steps, steps.number

    @property
    def is_made(self) -> bool:
        """Whether ``.grad`` is the mean: not so where others gave this rank up, whose model is no checkpoint then."""
        return self._steps._is_complete

    def __iter__(self) -> Iterator[int]:
        return self._steps._indices()


class Steps:
    """The steps of a training whose result has the same bits on any number of ranks.

    Iterate over it for steps, and over each step for the micro-batches of this rank: first its share of
    ``range(micro_batches)``, then what a lost rank left. Make the gradient of each, as if it were alone. After the
    last one ``.grad`` is the mean over all micro-batches, correctly rounded, and None where no rank had a gradient.

    Each micro-batch finds torch's generators seeded by (seed, step, index). All ranks begin with the parameters, the
    buffers, the optimizer and the step of rank 0, or of the first rank that is there. Another loop over the steps goes
    on with the next one; another loop over a step that an exception has left goes on with its micro-batch.

    A rank that was frozen for so long that the others gave it up ends its step with gradients of zero. What it then
    does to the model and the optimizer is replaced by the state of a peer, before its next step.

    Args:
        model: a plain module, the same on all ranks.
        micro_batches: number of micro-batches of a step.
        steps: number of steps; or their range, as in ``range(120, 200)``, to resume from a checkpoint. The first number
            of rank 0 counts.
        seed: seed of torch's generators.
        optimizer: whose state ranks get that join later; without it none can. A list may have several, and all else
            that has ``state_dict`` and ``load_state_dict``: a scheduler, a ``GradScaler``, averaged weights.
        process_group: the ranks; None for all, or for this process alone where torch.distributed is not initialized.
            `thinwire.outer.Members` are ranks without a process group in common, which may die and come back.
        threads: torch's threads on each rank; other numbers give other bits.
        check_every: in every so many steps one micro-batch is made by a second rank too, and compared, and so are all
            parameters; None for never.

    Raises:
        ValueError: a model whose forward writes state, as BatchNorm does; numbers out of range; a parameter that is in
            none of the optimizers.
        MismatchError: ranks differ in model, settings, version of torch, threads, or in how they compute.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> for step in Steps(model, micro_batches=4, steps=2, optimizer=optimizer):
        ...     for index in step:
        ...         model(torch.randn(5, 3)).square().mean().backward()
        ...     optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        micro_batches: int,
        steps: int | range,
        seed: int = 0,
        optimizer: Stateful | Sequence[Stateful] | None = None,
        process_group: Group | Members = None,
        *,
        threads: int = 1,
        check_every: int | None = None,
    ) -> None:
        first, end = (steps.start, steps.stop) if isinstance(steps, range) else (0, steps)
        if isinstance(steps, range) and steps.step != 1:
            raise ValueError(f"steps is {steps}: none is left out, so pass range({first}, {end})")
        for name, value, least, most in (
            ("micro_batches", micro_batches, 1, MOST_ADDED),
            ("steps", end, 1, 1 << 62),
            ("threads", threads, 1, 1024),
            ("the first of steps", first, 0, end),
        ):
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name} is {value!r}: pass a number from {least} to {most}")
        if check_every is not None and (type(check_every) is not int or check_every < 1):
            raise ValueError(f"check_every is {check_every!r}: pass a number of steps, or None")
        torch.set_num_threads(threads)
        self._gradients = Gradients(model, micro_batches)
        self._model, self._seed, self._threads = model, seed, threads
        self._states = (
            None if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        )
        self._check_optimizers()
        self._micro_batches, self._steps, self._check_every = micro_batches, end, check_every
        self.number = first
        self._done: set[int] = set()  # micro-batches of this step whose gradients this rank has added
        self._queue: list[int] = []  # those that it has to make
        self._again: list[int] = []  # those that it makes only to compare
        self._checked: int | None = None  # the one that several ranks make
        self._print: str | None = None  # digest of the gradients of that one
        self._is_begun = self._is_prepared = self._is_complete = self._is_asked = self._is_over = False
        self._given: dict[str, Any] | None = None  # the state of a peer, for a rank that was given up within a step
        self._seconds: float | None = None  # of a micro-batch
        self._pauses: list[float] = []  # seconds for which ranks met that are left
        self._members: Members | None = None
        self._lane: Lane | None = None
        self._begin(process_group)

    def __iter__(self) -> Iterator[ElasticStep]:
        while True:
            if self._given is not None:
                self._take(self._given)
            elif self._is_complete:
                if logger.isEnabledFor(logging.DEBUG):
                    logger.debug("digest after step %d: %s", self.number, digest(self._model))
                self._advance()
            if self.number >= self._steps:
                break
            if self._is_asked:
                self._meet(None)
            self._is_complete = False
            self._begin_part(_OUTSIDE)
            yield ElasticStep(self)
            if not self._is_complete and self._given is None:
                raise ThinwireError(
                    f"step {self.number} was left before its end: iterate over all micro-batches of a step"
                )
        self._end()

    def stats(self) -> dict[str, float]:
        """Return totals of this rank: bytes, bits of a value (push and pull of a mean, as ``lossless/bits_per_value``),
        elements whose sum float64 does not hold, and seconds of pauses in which ranks that are left met."""
        traffic = None if self._lane is None else self._lane.exchange.traffic
        return {
            "comm/bytes_sent": float(0 if traffic is None else traffic.sent_bytes),
            "reproducible/bits_per_value": self._gradients.push.bits + self._gradients.pull.bits,
            "reproducible/inexact": float(self._gradients.inexact),
            "reproducible/ranks": float(1 if self._lane is None else self._lane.world_size),
            "reproducible/losses": float(len(self._pauses)),
            "reproducible/pause_seconds": sum(self._pauses),
        }

    # --- ranks

    def _begin(self, process_group: Group | Members) -> None:
        """Meet the other ranks, and take what rank 0 has."""
        if process_group is None and not (dist.is_available() and dist.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ValueError(
                    f"this is one of {os.environ['WORLD_SIZE']} processes, by WORLD_SIZE, and each would train by"
                    " itself: call torch.distributed.init_process_group() first"
                )
            self._deal(range(self._micro_batches), [1.0], 0, 0)
            return
        check_names("reproducible.Steps", "train by DDP", f"{NEEDED} {UNREGISTERED}")
        if isinstance(process_group, Members):
            members = process_group
            members.prepare(self._enter, 1, has_heart=True)
            self._lane = members.enter()
        else:
            group = resolve_group(process_group)
            members = Members.of(group)
            members.prepare(self._enter, 1, has_heart=True)
            self._lane = lane = Lane(group)
            roll = Roll(0, frozenset(range(1, lane.world_size)), 0)
            lane.submit(lambda lane: self._enter(lane, roll)).wait()
            lane.is_watched = True
            members.watch(lane)
        self._members = members

    def _text(self) -> str:
        """Return what ranks have to agree on, a line each."""
        lines = [
            f"{self._micro_batches} micro-batches, {self._steps} steps, seed {self._seed}",
            f"check_every={self._check_every}",
            f"optimizer {[type(one).__name__ for one in self._states or ()]}",
            f"torch {torch.__version__}, {torch.get_num_threads()} threads",
            f"arithmetic {of_arithmetic(self._gradients.device)}: other processors round differently",
        ]
        return "\n".join([*lines, *self._gradients.describe()])

    def _enter(self, lane: Lane, roll: Roll) -> None:
        """Begin with the ranks of a lane, as a job of it, while the thread of training waits."""
        with lane.setting_up():
            lane.channel(Subject("steps", self._text())).open()
            is_new = lane.rank in roll.new
            own = None if is_new else self._seconds
            mine = {"number": self.number, "prepared": self._is_prepared, "done": sorted(self._done), "seconds": own}
            statuses = gather_json(lane.exchange, "steps of ranks", mine)
            old = [rank for rank in range(lane.world_size) if rank not in roll.new]
            # Nobody has ended a step for which a rank is not prepared. Newcomers need a rank that has not ended the
            # step that comes: where all are prepared for its end, they make it again.
            target = min(statuses[rank]["number"] + statuses[rank]["prepared"] for rank in old)
            if roll.new and all(statuses[rank]["number"] != target for rank in old):
                target -= 1
            there = [rank for rank in old if statuses[rank]["number"] == target]
            if roll.new:
                state = self._state(target) if lane.rank == there[0] else {}
                found = hand_over(lane, Roll(there[0], roll.new, target), state)
                if is_new:
                    was_begun = self._is_begun or self._given is not None  # by a generation that failed before this one
                    given = copy.deepcopy(found) if was_begun else None  # optimizers keep the tensors that they load
                    self._take(found)
                    self._given = given
                self._compare(lane, [*there, *roll.new])
            if not is_new and self.number < target:
                self._is_complete = True
            self._is_prepared = False
            kept = [set(one["done"]) if rank in there else set() for rank, one in enumerate(statuses)]
            missing = set(range(self._micro_batches)).difference(*kept)
            known = [one["seconds"] for one in statuses if one["seconds"] is not None]
            seconds = [one["seconds"] or (sum(known) / len(known) if known else 1.0) for one in statuses]
            self._deal(sorted(missing), seconds, lane.rank, target)

    def _state(self, number: int) -> dict[str, Any]:
        """Return what a rank needs that joins before the sums of a step."""
        return {"number": number, "model": self._gradients.state(), "states": self._state_dicts()}

    def _take(self, state: dict[str, Any]) -> None:
        self._gradients.take(state["model"])
        for one, given in zip(self._states or (), state["states"], strict=True):
            try:
                one.load_state_dict(given)
            except (ValueError, KeyError, RuntimeError) as error:
                raise MismatchError(
                    f"the state of {type(one).__name__} that a peer has given does not fit ({error}): build it with the"
                    " same parameter groups as there, before Steps"
                ) from error
        self.number, self._done = int(state["number"]), set()
        self._is_begun = self._is_complete = False
        self._given = None

    def _state_dicts(self) -> list[Any]:
        return [one.state_dict() for one in self._states or ()]

    def _check_optimizers(self) -> None:
        """Raise ValueError if a trained parameter is in no optimizer: the state of another is not handed over."""
        groups = [group for one in self._states or () for group in getattr(one, "param_groups", ())]
        known = {id(entry) for group in groups for entry in group["params"]}
        for name, parameter in self._model.named_parameters():
            if groups and parameter.requires_grad and id(parameter) not in known:
                raise ValueError(
                    f"parameter {name} is in none of the optimizers, and ranks that join get the state of those"
                    " that you pass: pass all of them, optimizer=[one, other], or freeze it by requires_grad_(False)"
                )

    def _settings(self) -> str:
        """Return a digest of the settings of all optimizers, such as learning rates; if checked, of the model too."""
        groups = [group for one in self._states or () for group in getattr(one, "param_groups", ())]
        kinds = int, float, str, tuple, torch.Tensor
        settings = [{key: value for key, value in group.items() if isinstance(value, kinds)} for group in groups]
        return of_state(settings) + ("" if self._checked is None else f" {digest(self._model)}")

    def _compare(self, lane: Lane, ranks: Sequence[int]) -> None:
        """Raise MismatchError on all ranks unless these have the same bits."""
        digests = gather_json(lane.exchange, "digests", f"{digest(self._model)} {of_state(self._state_dicts())}")
        if others := [rank for rank in ranks if digests[rank] != digests[ranks[0]]]:
            names = [lane.exchange.global_ranks[rank] for rank in others]
            raise MismatchError(
                f"ranks {names} have other parameters, buffers or states of the optimizer than rank"
                f" {lane.exchange.global_ranks[ranks[0]]} gave them: what state_dict() leaves out cannot be handed over"
            )

    def _meet(self, error: Exception | None) -> None:
        """Go on with who is there: after an error without who is lost, else with who asked."""
        if self._members is None or self._lane is None:
            raise error or ThinwireError("nobody to meet")
        self._is_asked = False
        began = time.monotonic()
        self._lane = self._members.go_on(self._lane, lambda: self.number + self._is_prepared, error)
        if error is not None:
            self._pauses.append(time.monotonic() - began)
            logger.warning(
                "step %d goes on with %d ranks after %.1f s; this one makes %d more micro-batches",
                self.number, self._lane.world_size, self._pauses[-1], len(self._queue),
            )  # fmt: skip

    def _end(self) -> None:
        """Wait for the other ranks, as far as they are there."""
        is_over, self._is_over = self._is_over, True
        if not is_over and self._lane is not None and self._members is not None:
            with suppress(ThinwireError):
                self._lane.submit(lambda lane: lane.channel(Subject("the end of all steps", "")).open()).wait()
            self._members.leave()
            self._lane.abandon()

    # --- micro-batches

    def _deal(self, missing: Sequence[int], seconds: Sequence[float], rank: int, number: int) -> None:
        """Deal the micro-batches of a step that nobody has made; alike on all ranks.

        In every so many steps one is made by a second rank too, unless a rank was lost in it.
        """
        shares = deal(missing, seconds)
        self._queue, self._again, self._checked, self._print = shares[rank], [], None, None
        is_whole = len(missing) == self._micro_batches
        if self._check_every is not None and number % self._check_every == 0 and len(shares) > 1 and is_whole:
            self._checked = _hashed(self._seed, number, _CHECKED) % self._micro_batches
            maker = next(one for one, share in enumerate(shares) if self._checked in share)
            self._again = [self._checked] if rank == (maker + 1) % len(shares) else []

    def _indices(self) -> Iterator[int]:
        if self._is_complete:
            raise ThinwireError(f"step {self.number} is complete: iterate over a step once")
        if not self._is_begun:
            self._gradients.clear()
            self._is_begun = True
        while not self._is_complete:
            while self._queue or self._again:
                queue = self._queue or self._again
                yield from self._made(queue[0], is_again=not self._queue)
                queue.pop(0)  # not before: user code may leave the loop, and come back
            try:
                self._exchange()
            except ThinwireError as error:
                if self._lane is None or self._lane.is_forked or not self._lane.is_broken:
                    raise
                self._meet(error)
            if self._given is not None:
                self._gradients.deliver_zeros()
                return
        self._gradients.deliver()
        self._begin_part(_AFTER)

    def _begin_part(self, part: int) -> None:
        """Seed torch's generators, for a micro-batch or another part of the step."""
        torch.manual_seed(_hashed(self._seed, self.number, part))
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    def _made(self, index: int, is_again: bool) -> Iterator[int]:
        """Have the gradient of a micro-batch made, and add it, or only note its digest."""
        self._gradients.begin()
        self._begin_part(index)
        began = time.perf_counter()
        yield index
        seconds = max(time.perf_counter() - began, 1e-6)
        self._seconds = seconds if self._seconds is None else self._seconds + _SMOOTHING * (seconds - self._seconds)
        if index == self._checked:
            self._print = self._gradients.fingerprint()
        if not is_again:
            self._gradients.add()
            self._done.add(index)

    def _exchange(self) -> None:
        """Exchange sums for the mean, and know that all ranks have it; or have another rank make one again."""
        if self._lane is None:
            self._gradients.exchange(None, [self._gradients.status()], self.number)
            ranks: list[list[float]] | None = [[1.0, 0.0]]
        else:
            ranks = self._lane.submit(self._sum).wait()
        if ranks is not None:
            self._is_complete, self._is_asked = True, any(asked for _, asked in ranks)
            rank = 0 if self._lane is None else self._lane.rank
            self._deal(range(self._micro_batches), [seconds for seconds, _ in ranks], rank, self.number + 1)

    def _sum(self, lane: Lane) -> list[list[float]] | None:
        """Make the mean, as a job; return seconds of each rank, and whether one asks to be let in."""
        lane.check(f"step {self.number}")
        mine = {
            "done": sorted(self._done), "print": self._print, "settings": self._settings(), **self._gradients.status()
        }  # fmt: skip
        with lane.setting_up():
            statuses = gather_json(lane.exchange, f"what ranks made in step {self.number}", mine)
        made = sorted(index for one in statuses for index in one["done"])
        if made != list(range(self._micro_batches)):
            raise CorruptMessageError(f"rank {lane.global_rank}: ranks have made micro-batches {made}")
        others = [rank for rank, one in enumerate(statuses) if one["settings"] != statuses[0]["settings"]]
        try:
            if others:
                names = [lane.exchange.global_ranks[rank] for rank in others]
                raise MismatchError(
                    f"step {self.number}: ranks {names} have other learning rates or settings of the optimizer, or"
                    f" other parameters, than rank {lane.exchange.global_ranks[0]}:"
                    " derive them from step.number, or pass the scheduler, too, in optimizer=[...]"
                )
            if not self._is_confirmed(lane, [one["print"] for one in statuses]):
                return None
            self._gradients.exchange(lane, statuses, self.number)
        except (MismatchError, ValueError) as error:
            raise told(error, lane.world_size) from None  # as all ranks do
        self._is_prepared = True
        asked = self._states is not None and self._members is not None and self._members.asked(lane)
        with lane.setting_up():
            channel = lane.channel(Subject(f"the end of step {self.number}", ""))
            return channel.gather_numbers([self._seconds or 1.0, float(asked)])

    def _is_confirmed(self, lane: Lane, prints: Sequence[str | None]) -> bool:
        """Return whether all ranks that made the checked micro-batch got the same; if not, ask one more, then raise."""
        makers = [rank for rank, one in enumerate(prints) if one is not None]
        if len({prints[rank] for rank in makers}) < 2:
            return True
        others = [rank for rank in range(lane.world_size) if rank not in makers]
        if len(makers) < _OPINIONS and others:
            self._again = [self._checked] * (lane.rank == others[0]) if self._checked is not None else []
            return False
        usual, times = Counter(prints[rank] for rank in makers).most_common(1)[0]
        names = [lane.exchange.global_ranks[rank] for rank in makers if times == 1 or prints[rank] != usual]
        raise MismatchError(
            f"step {self.number}, micro-batch {self._checked}: made by ranks"
            f" {[lane.exchange.global_ranks[rank] for rank in makers]}, its gradients have other bits on rank"
            f" {' or '.join(map(str, names))}: that rank computes wrong, or the model is not deterministic. The step"
            " was not made: go on from a checkpoint of before, without that host"
        )

    def _advance(self) -> None:
        """Go on to the next step."""
        self.number, self._is_prepared = self.number + 1, False
        self._done, self._print = set(), None
        self._is_begun = self._is_complete = False


def deal(indices: Sequence[int], seconds: Sequence[float]) -> list[list[int]]:
    """Return the micro-batches of each rank: each in turn goes to the rank that would have made it first.

    Example:
        >>> deal(range(6), [1.0, 1.0, 2.0])
        [[0, 2, 4], [1, 5], [3]]
    """
    shares: list[list[int]] = [[] for _ in seconds]
    for index in indices:
        rank = min(range(len(shares)), key=lambda rank: (len(shares[rank]) + 1) * seconds[rank])
        shares[rank].append(index)
    return shares


def _hashed(seed: int, number: int, index: int) -> int:
    """Return a seed that follows from the numbers of a micro-batch."""
    return digest64(f"{seed} {number} {index}".encode()) >> 1
