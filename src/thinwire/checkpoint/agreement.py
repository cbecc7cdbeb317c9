"""Agreement of the ranks on one checkpoint, the slot of this rank, and its way to the holder; beside the training.

One reduction of a few bytes for each checkpoint tells all ranks whether all of them can write a version, and the newest
step that all of them have everywhere. It does not promise that all of them will write: a holder may die right after it.
A version that some ranks have and some do not is never complete, so it is never restored, and the newest complete one
stays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from thinwire.checkpoint.copier import copy_of
from thinwire.checkpoint.dcp.tier import PersistentTier
from thinwire.checkpoint.group import failures_of, gather
from thinwire.checkpoint.pacing.gaps import Pacer
from thinwire.checkpoint.pacing.governor import Governor
from thinwire.checkpoint.records import Notices
from thinwire.checkpoint.registration import Registration
from thinwire.checkpoint.state.coding import Codes
from thinwire.checkpoint.state.encode import Encoded
from thinwire.errors import ThinwireError
from thinwire.holder.client import HolderClient, SlotWriter

logger = logging.getLogger("thinwire")

FAILURES = (ThinwireError, ValueError, OSError, RuntimeError)
_RETRY_STEPS = 10  # until refused slots are requested again
_HURRY_SHARE = 0.02  # of an iteration: longest wait for the rest of a version before the next one is skipped for it
_POLL_SECONDS = 0.001
_POLL_SHARE = 0.02  # of an iteration, between two looks at what is sent: each costs trainer and holder 0.3 ms
_RECONNECT_SECONDS = 0.05
_SURE = 3  # times that the ranks were the same before a difference is an error
_TOLD = 2  # versions that each rank tells the digests of: those in its slots
_GONE = "the holder of this host is gone"


@dataclass(frozen=True)
class Turn:
    """Decision of the ranks about one checkpoint: the writer of this rank's slot, or why it is ``skipped``.

    ``registers``: whether all ranks have to call `Agreement.register` first. ``stride``: multiples of ``every`` until
    the next checkpoint; 0 to try again at once. ``raises``: error for `Checkpointer.step` to raise, on all ranks.
    ``coded``: whether the version is to be coded: on all ranks or on none, so that digests of the same state are equal.
    """

    skipped: str = ""
    writer: SlotWriter | None = None
    registers: bool = False
    stride: int = 0
    raises: Exception | None = None
    coded: bool = False


class Divergence:
    """The search for ranks that differ in what all ranks should have alike: parameters, and the optimizer's state.

    Data parallelism keeps them the same to the bit, so that a rank that differs computed or kept something wrong. If
    the ranks differ before they were the same three times, they train different models or parts, or synchronize now and
    then only: that is no error, and nothing is compared any more.

    ``certified`` is the newest step at which all were the same, ``diverged`` the ranks that differ, ``text`` says so.
    """

    def __init__(self) -> None:
        self.certified, self.text = -1, ""
        self.diverged: tuple[int, ...] = ()
        self._equal, self._newest = 0, -1

    def compare(self, told: Sequence[Sequence[int]]) -> bool:
        """Compare the newest step that all ranks have told of, and return whether they differ and did not before.

        Each rank tells steps and digests in turn, or zeros.
        """
        by_rank = [dict(zip(numbers[::2], numbers[1::2], strict=True)) for numbers in told]
        step = max(set.intersection(*map(set, by_rank)), default=-1)
        digests = [digests.get(step, 0) for digests in by_rank]
        if len(told) < 2 or step <= self._newest or not all(digests) or self._equal < 0:
            return False
        self._newest, ((most, count), *others) = step, Counter(digests).most_common()
        if not others:
            self.certified, self.diverged, self._equal = step, (), self._equal + 1
        elif self._equal < _SURE:
            self._equal = -1
            logger.info("ranks differ in parameters or optimizer state: they are not compared to find silent errors")
        elif not self.diverged:
            majority = most if count > others[0][1] else None
            self.diverged = tuple(rank for rank, digest in enumerate(digests) if digest != majority)
            names = f"rank{'s' * (len(self.diverged) > 1)} {', '.join(map(str, self.diverged[:8]))}"
            others_are = "those of the other ranks" if majority is not None else "each other"
            self.text = (
                f"silent corruption: parameters or optimizer state of {names} differ from {others_are} at step {step},"
                f" and at step {self.certified} all were the same: a memory or a computation went wrong"
            )
            return True
        return False


class Agreement:
    """Agreement of the ranks over their group, and this rank's holder; for one thread at a time.

    ``keep`` is the newest step that all ranks have everywhere, ``attempt`` the number of this start of the run,
    ``obstacle`` the reason why this rank cannot make a checkpoint, or empty; ``refusal`` one that does not pass by
    itself, which all ranks raise; ``status`` is the holder's last answer, ``payload_bytes`` the size of this rank's
    state: slots that are too small for it are registered anew. ``coding`` is set while another thread codes a version,
    and publishes it; ``can_code`` returns whether this rank can.
    """

    def __init__(
        self,
        registration: Registration,
        group: dist.ProcessGroup,
        tier: PersistentTier | None,
        pacer: Pacer,
        notices: Notices,
        governor: Governor | None = None,
        raises_divergence: bool = False,
    ) -> None:
        self._registration, self._group, self._tier, self._pacer = registration, group, tier, pacer
        self._notices, self._governor = notices, governor or Governor()
        self._raises_divergence, self.divergence = raises_divergence, Divergence()
        self.keep, self.attempt, self.obstacle, self.refusal = -1, -1, "", ""
        self.status: dict[str, Any] = {}
        self._register_at, self._offered_until = 0, 0
        self._persisting: int | None = None  # step that all ranks will pass to the persistent tier
        self.payload_bytes, self._short, self.coding = 0, "", False
        self.can_code: Callable[[], bool] = lambda: False
        self._reconnecting: threading.Thread | None = None

    def wait_until_sent(self, needed: threading.Event) -> bool:
        """Wait until all peers of this rank have its last version, or ``needed`` is set; which of both happened."""
        needed.wait(min(self._pacer.seconds_left, threading.TIMEOUT_MAX))
        while not needed.is_set():
            if self._is_sent():
                return True
            needed.wait(max(_POLL_SECONDS, _POLL_SHARE * self._pacer.iteration_seconds))
        return False

    def _is_sent(self) -> bool:
        """Also True when the status is unknown, which `take_turn` will find out."""
        if self.coding:
            return False
        client = self._registration.client
        try:
            status = client.status() if client is not None and self._registration.registered else None
        except FAILURES:
            return True
        return status is None or (not status["writing"] and status["newest_local"] == status["newest_replicated"])

    def take_turn(self, step: int) -> Turn:
        """Agree on whether to make a checkpoint of ``step``; collective, one reduction."""
        obstacle, replicated, free = self._look()
        registered = not self.coding and self._registration.has_room(self.payload_bytes)
        safe = bool(self.status.get("safe"))
        due = self._tier is not None and self._tier.is_due()
        refusal, votes = self.refusal, [not obstacle, registered, replicated, free, due, safe, -self._governor.stride]
        votes.append(self.can_code())
        told = gather([not refusal, *votes, *self._digests()], self._group)
        storable, ready, registered, keep, free, due, safe, stride, coded, *_ = map(min, zip(*told, strict=True))
        if not storable:
            failed = failures_of(refusal, self._group)
            return Turn(failed, raises=ValueError(f"the state cannot be stored, so there are no checkpoints: {failed}"))
        found = self.divergence.compare([numbers[-2 * _TOLD :] for numbers in told])
        if self.divergence.diverged and self._raises_divergence:  # before ``keep`` leaves the version before
            text = f"{self.divergence.text}; restart, to go on from there (or on_divergence='warn', if it is meant)"
            return Turn(text, raises=ThinwireError(text))
        if found:
            self._notices.add(self.divergence.text)
        self.keep = max(self.keep, keep)
        if safe and registered and self._registration.moving:
            try:
                self._registration.release()
            except FAILURES as error:
                self.lose(error)
            return self.take_turn(step)  # with the slots that there is room for now
        if not ready:
            return self._skip(step, obstacle or "another rank cannot make one")
        if not registered:
            refused = step < self._register_at
            return self._skip(step, "there are no slots") if refused else Turn(registers=True)
        if not free:
            self._offer(0)
            return self._skip(step, "no slot is free on all ranks: older versions are still on their way")
        self._persisting = step if due else None
        writer = self._slot(step)
        skipped = "" if writer is not None else self._skip(step, "the holder gave no slot").skipped
        return Turn(skipped, writer, False, -stride, coded=bool(coded))

    def register(self, step: int, payload_bytes: int) -> bool:
        """Register slots on all ranks and return whether all have them; if not, retry some steps later. Collective."""
        try:
            self._registration.register(payload_bytes, self.attempt)
            return True
        except ValueError as error:
            self._register_at = step + _RETRY_STEPS
            self._notices.add(f"no slots for checkpoints: {error}")
            return False

    def publish(
        self, turn: Turn, encoded: Encoded, about: dict[str, Any], wait: bool = False, codes: Codes | None = None
    ) -> str:
        """Make the copied state a version, have it sent, and return why it did not become one, or an empty text.

        With ``wait`` it is complete on this host when this returns.
        """
        writer = turn.writer
        assert writer is not None
        registration = self._registration
        about = {**about, "holders": registration.holders}  # where to look for the other shards
        codes = codes or Codes([], encoded.payload_bytes, encoded.shared_bytes)
        layout = encoded.to_bytes(about, codes.pieces)
        if len(layout) > registration.layout_bytes:
            registration.layout_bytes = 2 * len(layout)  # so there is no room, and slots are registered anew
        try:
            writer.publish(layout, codes.payload_bytes, wait, codes.shared_bytes, [size for size, _ in codes.pieces])
        except ValueError as error:
            self.abandon(writer)
            return str(error)
        except FAILURES as error:
            self.lose(error)
            self.persist(writer.step, "it was not published")
            return f"it was not published: {error}"
        self._offer(codes.payload_bytes)
        self.persist(writer.step)
        return ""

    def persist(self, step: int, failure: str = "") -> None:
        """Have the version of a turn saved, or tell the waiting ranks why there is none; once for each turn.

        The training's thread waits for the call, or makes it: no other save of this rank begins meanwhile.
        """
        if self._tier is None or self._persisting != step:
            return
        client, attempt, self._persisting = self._registration.client, self.attempt, None

        def take() -> tuple[bytes, memoryview]:
            if failure:
                raise ThinwireError(failure)
            return copy_of(client, step, attempt)

        self._tier.save(step, attempt, take)

    def abandon(self, writer: SlotWriter) -> None:
        """Give a slot back, empty."""
        self.persist(writer.step, "it was given up")
        try:
            writer.abandon()
        except FAILURES as error:
            self.lose(error)

    def lose(self, error: Exception) -> None:
        """Record that the holder does not answer any more."""
        self._registration.close()
        self._notices.add(f"the holder of this host is lost, and training goes on without checkpoints: {error}")

    def grant(self, num_bytes: int) -> None:
        """Grant bytes to the holder, on the pacer's thread."""
        client = self._registration.client
        if client is not None:
            client.grant(num_bytes)

    def revoke(self) -> int:
        """Revoke what was granted and not sent, and return the bytes left of the last offer; on the pacer's thread."""
        client = self._registration.client
        if client is None:
            return 0
        client.revoke()
        status = client.status()
        left = self._offered_until - int(status["bytes_sent"])
        return max(0, left if status["writing"] else min(left, int(status["bytes_pending"])))

    @property
    def holder_cpu_seconds(self) -> float:
        """CPU time of the holder of this host so far, divided by its ranks."""
        return float(self.status.get("cpu_seconds", 0.0)) / max(1, self._registration.local_ranks)

    @property
    def is_registered(self) -> bool:
        return self._registration.registered

    @property
    def link_bytes_per_second(self) -> float | None:
        """Speed at which the last versions were sent, to all peers together; None before the first one."""
        return self.status.get("bytes_per_second")

    def _look(self) -> tuple[str, int, bool]:
        """Why this rank cannot take part, or empty; the newest step that all its replicas have; if a slot is free."""
        registration = self._registration
        if self.coding:  # the other thread may find the holder lost
            return self.obstacle or "the last version is still being coded", -1, False
        if registration.client is None:
            self._reconnect()
        if registration.client is None:
            return self.obstacle or _GONE, -1, False
        if self.obstacle or not registration.registered:
            return self.obstacle, -1, False
        try:
            self.status = registration.client.status()
            if self.status["short"] not in ("", self._short):
                self._short = self.status["short"]
                self._notices.add(f"no room for checkpoints: {self._short}")
            if not self.status["free"]:
                self._hurry(registration.client)
        except FAILURES as error:
            self.lose(error)
            return _GONE, -1, False
        newest = self.status["newest_replicated"]
        versions = [(version["attempt"], version["step"]) for version in self.status["versions"]]
        ours = newest == self.keep or (self.attempt, newest) in versions  # not of an attempt that was given up
        obstacle = self._tier.obstacle if self._tier is not None else ""
        return obstacle, newest if ours and newest is not None else -1, self.status["free"]

    def _digests(self) -> list[int]:
        """Steps and digests of this rank's versions of this attempt; a gathered number has 53 bits."""
        own = [each for each in self.status.get("versions", []) if each["attempt"] == self.attempt]
        pairs = [(each["step"], int(each["shared"] or "0", 16) >> 12) for each in own]
        return [number for pair in [(0, 0), (0, 0), *pairs][-_TOLD:] for number in pair]

    def _hurry(self, client: HolderClient) -> None:
        """Backward is over and the network idle: a nearly complete version can be sent now."""
        speed, seconds = self.link_bytes_per_second, _HURRY_SHARE * self._pacer.iteration_seconds
        if speed is None or int(self.status["bytes_pending"]) > speed * seconds:
            return
        client.grant_all()
        until = time.monotonic() + seconds
        while not self.status["free"] and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            self.status = client.status()

    def _reconnect(self) -> None:
        """In the background, because a paused holder answers late; a healthy one answers at once."""
        if self._reconnecting is None or not self._reconnecting.is_alive():
            self._reconnecting = threading.Thread(target=self._registration.reconnect, name="reconnect", daemon=True)
            self._reconnecting.start()
            self._reconnecting.join(_RECONNECT_SECONDS)

    def _slot(self, step: int) -> SlotWriter | None:
        client = self._registration.client
        try:
            return None if client is None else client.slot(step, self.keep if self.keep >= 0 else None)
        except FAILURES as error:
            self.lose(error)
            return None

    def _offer(self, num_bytes: int) -> None:
        """Have a version, and pending bytes of earlier ones, sent in the gaps of the network."""
        client = self._registration.client
        if client is None or not self._registration.peers:
            return
        total = int(self.status.get("bytes_pending", 0)) + num_bytes * len(self._registration.peers)
        self._offered_until = int(self.status.get("bytes_sent", 0)) + total
        try:
            client.revoke()
            self._pacer.offer(total, self.link_bytes_per_second, float(self.status.get("latency_seconds", 0.0)))
        except FAILURES as error:
            self.lose(error)

    def _skip(self, step: int, reason: str) -> Turn:
        logger.info("no checkpoint of step %s: %s", step, reason)
        return Turn(skipped=reason)
