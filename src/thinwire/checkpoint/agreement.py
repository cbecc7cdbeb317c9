"""Agreement of the ranks on one checkpoint, the slot of this rank, and its way to the holder; beside the training.

One reduction of a few bytes for each checkpoint tells all ranks whether all of them can write a version, and the newest
step that all of them have everywhere. It does not promise that all of them will write: a holder may die right after it.
A version that some ranks have and some do not is never complete, so it is never restored, and the newest complete one
stays.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from thinwire.checkpoint.copier import Target, copy_of
from thinwire.checkpoint.dcp.tier import PersistentTier
from thinwire.checkpoint.group import failures_of, gather, gather_json, odd_ranks
from thinwire.checkpoint.holder.client import SlotWriter
from thinwire.checkpoint.holder.version import CHUNK_BYTES, MAX_LAYOUT_BYTES, Manifest, ShardId, chunk_count
from thinwire.checkpoint.pacing.gaps import Pacer
from thinwire.checkpoint.pacing.governor import Governor
from thinwire.checkpoint.records import Notices
from thinwire.checkpoint.registration import Registration
from thinwire.checkpoint.state.coding import Codes
from thinwire.checkpoint.state.encode import Encoded
from thinwire.checkpoint.state.layout import aligned
from thinwire.errors import LostPeerError, ThinwireError, logger

FAILURES = (ThinwireError, ValueError, OSError, RuntimeError)
_RETRY_STEPS = 10  # until refused slots are requested again
_POLL_SECONDS = 0.001
_POLL_SHARE = 0.02  # of an iteration, between two looks at what is sent: each costs trainer and holder 0.3 ms
_RECONNECT_SECONDS = 0.05
_REPORTED = 2  # versions of which each rank sends the digests: those in its slots
_GONE = "the holder of this host is gone"


@dataclass(frozen=True)
class Turn:
    """Decision of the ranks about one checkpoint: the writer of this rank's slot, or why it is ``skipped``.

    ``registers``: whether all ranks have to call `Agreement.register` first. ``stride``: multiples of ``every`` until
    the next checkpoint; 0 to try again at once. ``raises``: error for `Checkpointer.step` to raise, on all ranks.
    ``coded``: whether the version is to be coded: on all ranks or on none, so that digests of the same state are equal.
    ``compares``: whether ranks should be alike, so that the version has a digest to compare.
    """

    skipped: str = ""
    writer: SlotWriter | None = None
    registers: bool = False
    stride: int = 0
    raises: Exception | None = None
    coded: bool = False
    compares: bool = True


def tail_offset(writer: SlotWriter, encoded: Encoded) -> int:
    """Return where in a state the payload of its slot begins: after what is kept in common with other ranks."""
    return 0 if writer.common is None else aligned(encoded.shared_bytes)


class Divergence:
    """The search for ranks that differ in what all ranks should have alike: parameters, and the optimizer's state.

    Data parallelism keeps them the same to the bit, so that a rank that differs computed or kept something wrong. Ranks
    that differ at the first comparison, and were never known to be the same, train different models or parts, or
    synchronize now and then only: then nothing is compared any more (``is_off``). Ranks that do so and are the same at
    the first comparison are so at all of them: both steps are multiples of the period.

    ``certified`` is the newest step at which all were the same, which may be before this start of the run, or -1;
    ``diverged`` the ranks that differ; ``text`` says what there is to say.
    """

    def __init__(self, certified: int = -1) -> None:
        self.certified, self.text = certified, ""
        self.diverged: tuple[int, ...] = ()
        self.is_off, self._newest = False, -1

    def compare(self, gathered: Sequence[Sequence[int]], groups: Sequence[int] = ()) -> bool:
        """Compare the steps that all ranks have sent, those of a group with each other, and return whether ``text`` is
        new.

        Each rank sends steps and digests in turn, or zeros.
        """
        by_rank = [dict(zip(numbers[::2], numbers[1::2], strict=True)) for numbers in gathered]
        common = sorted(set.intersection(*map(set, by_rank))) if len(gathered) > 1 else []
        said = [self._compare(step, [digests[step] for digests in by_rank], groups) for step in common]
        return any(said)

    def _compare(self, step: int, digests: Sequence[int], groups: Sequence[int]) -> bool:
        if step <= self._newest or not all(digests) or self.is_off:
            return False
        before, (odd, names) = self.diverged, odd_ranks(digests, groups)
        self._newest = step
        if not odd:
            self.certified, self.diverged = step, ()
        elif self.certified < 0:
            self.is_off = True
            self.text = (
                f"parameters or optimizer state of {names} since the first checkpoint, at step {step}: ranks are not"
                " compared any more to find silent errors. If they are meant to differ, say so with"
                " on_divergence='off'; if not, they train different models: start them with the same parameters"
            )
        elif not before:
            self.diverged = odd
            self.text = (
                f"silent corruption: parameters or optimizer state of {names} at step {step},"
                f" and at step {self.certified} all were the same: a memory or a computation went wrong"
            )
        return self.is_off or (bool(self.diverged) and not before)


class Agreement:
    """Agreement of the ranks over their group, and this rank's holder; for one thread at a time.

    ``keep`` is the newest step that all ranks have everywhere, ``attempt`` the number of this start of the run,
    ``origin`` that of the fresh start before it, ``obstacle`` the reason why this rank cannot make a checkpoint, or
    empty; ``refusal`` one that does not pass by itself, which all ranks raise; ``status`` is the holder's last answer,
    ``sizes`` the bytes of this rank's state and of its part that ranks have alike: slots that are too small for it are
    registered again. ``coding`` is
    set while another thread codes a version, and publishes it; ``can_code`` returns whether this rank can.
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
        self.keep, self.attempt, self.origin, self.obstacle, self.refusal = -1, -1, -1, "", ""
        self.status: dict[str, Any] = {}
        self._register_at, self._offered_until = 0, 0
        self._persisting: int | None = None  # step that all ranks will pass to the persistent tier
        self.sizes, self._short, self.coding = (0, 0), "", False
        # attempt, step and digest of its last versions
        self._reported: deque[tuple[int, int, int]] = deque(maxlen=_REPORTED)
        self.can_code: Callable[[], bool] = lambda: False
        self._reconnecting: threading.Thread | None = None

    def wait_until_sent(self, needed: threading.Event) -> bool:
        """Wait until every peer has this rank's latest version; return False if ``needed`` is set first."""
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
        registered = not self.coding and self._registration.has_room(*self.sizes)
        safe = bool(self.status.get("safe"))
        due = self._tier is not None and self._tier.is_due()
        refusal, votes = self.refusal, [not obstacle, registered, replicated, free, due, safe, -self._governor.stride]
        votes.append(self.can_code())
        gathered = gather([not refusal, *votes, *self._digests()], self._group)
        storable, ready, registered, keep, free, due, safe, stride, coded, *_ = map(min, zip(*gathered, strict=True))
        if not storable:
            failed = failures_of(refusal, self._group)
            return Turn(failed, raises=ValueError(f"the state cannot be stored, so there are no checkpoints: {failed}"))
        result = self.divergence.compare([numbers[-2 * _REPORTED :] for numbers in gathered], self._registration.groups)
        if self.divergence.diverged and self._raises_divergence:  # before ``keep`` leaves the version before
            text = f"{self.divergence.text}; restart, to go on from there (or, if it is meant, on_divergence='off')"
            return Turn(text, raises=ThinwireError(text))
        if result and (self.divergence.diverged or self._registration.rank == 0):
            self._notices.add(self.divergence.text)
        registered = registered and (self._has_in_common or not self._registration.has_in_common)
        self.keep = max(self.keep, keep)
        if safe and registered and self._registration.moving:
            with self.losing():
                self._registration.release()
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
        if (writer := self._slot(step)) is None:
            return self._stay_away(step, -stride)
        return Turn("", writer, False, -stride, coded=bool(coded), compares=not self.divergence.is_off)

    @property
    def _has_in_common(self) -> bool:
        """Whether what ranks should have alike is kept once: as long as it is not known to differ."""
        return not (self.divergence.is_off or self.divergence.diverged)

    def register(self, step: int, encoded: Encoded | None) -> bool:
        """Register slots on all ranks and return whether all have them; if not, retry some steps later. Collective.

        Raises ValueError on all ranks if the memory budget of a holder is too small for a first version.
        """
        payload_bytes, registration = 0 if encoded is None else encoded.payload_bytes, self._registration
        if encoded is not None:
            longest = min(2 * len(encoded.to_bytes(self.about)), MAX_LAYOUT_BYTES)
            registration.layout_bytes = max(registration.layout_bytes, longest)
        mine = (encoded.alike, encoded.shared_bytes) if encoded is not None else ("", 0)
        alike = gather_json(mine, self._group)
        commons = [(alike.index(each), each[1] if self._has_in_common else 0) for each in alike]
        reason = registration.shortage(payload_bytes, commons)
        if reason and self.keep < 0:  # later there is a version to go back to, and training goes on
            raise ValueError(f"there can be no checkpoints: {reason}")
        try:
            registration.register(payload_bytes, self.attempt, commons)
            return True
        except ValueError as error:
            self._register_at = step + _RETRY_STEPS
            self._notices.add(f"no slots for checkpoints: {reason or error}")
            return False

    def target(self, writer: SlotWriter, encoded: Encoded) -> Target | None:
        """Where a state goes; None if there is no room for it."""
        if not self._registration.has_room(encoded.payload_bytes, encoded.shared_bytes):
            return None
        first, last = self._registration.share(chunk_count(encoded.shared_bytes, CHUNK_BYTES))
        return Target(writer.payload, writer.common, first * CHUNK_BYTES, last * CHUNK_BYTES)

    def publish(
        self, writer: SlotWriter, encoded: Encoded, crcs: Sequence[int], wait: bool = False, codes: Codes | None = None
    ) -> str:
        """Make the copied state a version, have it sent, and return why it did not become one, or an empty text.

        ``crcs``: of the chunks of what ranks should have alike. With ``wait`` it is complete on this host when this
        returns.
        """
        registration, alike = self._registration, None
        if crcs:
            shard = ShardId(registration.run_id, registration.topology, -1 - registration.groups[registration.rank])
            alike = Manifest.stated(shard, writer.step, self.attempt, encoded.shared_bytes, crcs)
            alike = replace(alike, shared=encoded.values)  # in the layout of each rank, and compared with the bytes
            self._reported.append((self.attempt, writer.step, int(alike.version.digest, 16) >> 12))
        codes = codes or Codes([], encoded.payload_bytes - tail_offset(writer, encoded))
        layout = encoded.to_bytes(self.about, codes.pieces)
        if len(layout) > registration.layout_bytes:
            registration.layout_bytes = min(2 * len(layout), MAX_LAYOUT_BYTES)  # so slots are registered again
        try:
            writer.publish(layout, codes.payload_bytes, wait, [size for size, _ in codes.pieces], alike)
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

    @property
    def about(self) -> dict[str, Any]:
        """What a version says of itself: its training and its origin, where the other shards are, and what there was to
        go back to if ranks differ."""
        added = {"holders": self._registration.holders, "certified": self.divergence.certified, "origin": self.origin}
        return {**self._registration.about, **added}

    def persist(self, step: int, failure: str = "") -> None:
        """Have the version of a turn saved, or tell the waiting ranks why there is none; once for each turn.

        The training's thread waits for the call, or makes it: no other save of this rank begins meanwhile.
        """
        if self._tier is None or self._persisting != step:
            return
        client, attempt, self._persisting = self._registration.client, self.attempt, None

        def take() -> tuple[bytes, memoryview, memoryview | None]:
            if failure:
                raise ThinwireError(failure)
            return copy_of(client, step, attempt)

        self._tier.save(step, attempt, take)

    def abandon(self, writer: SlotWriter) -> None:
        """Give a slot back, empty."""
        self.persist(writer.step, "it was given up")
        with self.losing():
            writer.abandon()

    @contextlib.contextmanager
    def losing(self) -> Iterator[None]:
        """Go on after the block without the holder, if that does not answer any more."""
        try:
            yield
        except FAILURES as error:
            self.lose(error)

    def lose(self, error: Exception) -> None:
        """Record that the holder does not answer any more."""
        self._registration.close()
        self._notices.add(f"the holder of this host is lost, and training goes on without checkpoints: {error}")

    def grant(self, num_bytes: int) -> None:
        """Grant bytes to the holder, on the pacer's thread."""
        if (client := self._registration.client) is not None:
            client.grant(num_bytes)

    def revoke(self) -> int:
        """Revoke what was granted and not sent, and return the bytes left of the last offer; on the pacer's thread."""
        if (client := self._registration.client) is None:
            return 0
        client.revoke()
        status = client.status()
        left = self._offered_until - int(status["bytes_sent"])
        return max(0, left if status["writing"] else min(left, int(status["bytes_pending"])))

    @property
    def holder_cpu_seconds(self) -> float:
        """CPU time of the holder of this host so far, divided by its ranks."""
        return float(self.status.get("cpu_seconds", 0.0)) / self._registration.holders.count(self._registration.here)

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
            return self.obstacle or self._why_gone(registration.failure), -1, False
        if self.obstacle or not registration.registered:
            return self.obstacle, -1, False
        try:
            self.status = registration.client.status()
            if self.status["short"] not in ("", self._short):
                self._short = self.status["short"]
                self._notices.add(f"no room for checkpoints: {self._short}")
        except FAILURES as error:
            self.lose(error)
            return _GONE, -1, False
        newest = self.status["newest_replicated"]
        versions = [(version["attempt"], version["step"]) for version in self.status["versions"]]
        ours = newest == self.keep or (self.attempt, newest) in versions  # not of an attempt that was given up
        obstacle = self._tier.obstacle if self._tier is not None else ""
        return obstacle, newest if ours and newest is not None else -1, self.status["free"]

    def _why_gone(self, failure: Exception | None) -> str:
        """Also a warning, if a holder is there and refuses this rank: that does not pass by itself."""
        if failure is None or isinstance(failure, LostPeerError):
            return f"{_GONE}: {failure}" if failure else _GONE
        self._notices.add(f"no checkpoints: {failure}")
        return str(failure)

    def _digests(self) -> list[int]:
        """Steps and digests of this rank's versions of this attempt; a gathered number has 53 bits."""
        pairs = [(step, digest) for attempt, step, digest in list(self._reported) if attempt == self.attempt]
        return [number for pair in [(0, 0), (0, 0), *pairs][-_REPORTED:] for number in pair]

    def _reconnect(self) -> None:
        """In the background, because a paused holder answers late; a healthy one answers at once."""
        if self._reconnecting is None or not self._reconnecting.is_alive():
            self._reconnecting = threading.Thread(target=self._registration.reconnect, name="reconnect", daemon=True)
            self._reconnecting.start()
            self._reconnecting.join(_RECONNECT_SECONDS)

    def _slot(self, step: int) -> SlotWriter | None:
        client = self._registration.client
        with self.losing():
            return None if client is None else client.slot(step, self.keep if self.keep >= 0 else None)
        return None

    def _stay_away(self, step: int, stride: int) -> Turn:
        """Take no part in a version that others write; those of this host must not wait for this rank."""
        with contextlib.suppress(*FAILURES):
            if self._registration.client is not None:
                self._registration.client.leave(step)
        return Turn(self._skip(step, "the holder gave no slot").skipped, stride=stride)

    def _offer(self, num_bytes: int) -> None:
        """Have a version, and pending bytes of earlier ones, sent in the gaps of the network."""
        if (client := self._registration.client) is None or not self._registration.peers:
            return
        total = int(self.status.get("bytes_pending", 0)) + num_bytes * len(self._registration.peers)
        self._offered_until = int(self.status.get("bytes_sent", 0)) + total
        with self.losing():
            client.revoke()
            self._pacer.offer(total, self.link_bytes_per_second, float(self.status.get("latency_seconds", 0.0)))

    def _skip(self, step: int, reason: str) -> Turn:
        logger.info("no checkpoint of step %s: %s", step, reason)
        return Turn(skipped=reason)
