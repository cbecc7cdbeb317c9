"""The cycle of a checkpoint from one optimizer step to the next: captured, agreed on, copied, published.

    optimizer.step   checkpointer.step          forward, backward             optimizer.step
                     capture, small copy                                      fence
                                     [ copy of parameters ][ publish, grants ] [ next turn ]

The steps in brackets run on a thread of its own, which does one job after the other. The fence waits for the copy. The
ranks agree on the next checkpoint once the peers have this one, at the latest while the optimizer computes: with 8
ranks of a machine with two cores that cost 20 ms, for which training now waits only if sending lasts the whole
iteration. A coded version is coded in its slot, on a thread of low priority, while training goes on and the ranks skip
checkpoints; then it is published.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch

from thinwire.checkpoint.agreement import FAILURES, Agreement, Turn, tail_offset
from thinwire.checkpoint.copier import Copier, Copy
from thinwire.checkpoint.holder.client import SlotWriter
from thinwire.checkpoint.pacing.governor import Governor
from thinwire.checkpoint.records import Notices, Records, VersionRecord
from thinwire.checkpoint.state.coding import pack
from thinwire.checkpoint.state.encode import Encoded, StateEncoder
from thinwire.checkpoint.state.layout import write
from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.errors import ThinwireError
from thinwire.rows import floats

T = TypeVar("T")


class Worker:
    """A daemon thread that does one job after the other; a job that waits for a dead peer does not block the exit.

    ``niceness`` is added to that of the process.
    """

    def __init__(self, name: str, niceness: int = 0) -> None:
        self._niceness = niceness
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.cpu_seconds = 0.0  # of all jobs that are done
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(run)
        return future

    def close(self, seconds: float) -> bool:
        """Stop and return whether all jobs were done within that time; the rest goes on, or is never done."""
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # 0 is this thread, not the process
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + self._niceness)
        while (job := self._jobs.get()) is not None:
            job()
            self.cpu_seconds = time.thread_time()


_CLOSE_SECONDS = 5.0
_CODING_NICENESS = 10
_LITTLE_BYTES, _LITTLE_SHARE = 64 << 10, 0.01  # of a version: random states, buffers; sending them disturbs nothing


class Cycle:
    """The cycle of checkpoints of one training, on its thread.

    ``governor`` says at which steps there is one, ``overlap`` is whether parameters
    are copied beside the training; that ends when they are written to meanwhile. ``codes``: whether versions are coded.
    """

    def __init__(
        self,
        training: TrainingState,
        agreement: Agreement,
        notices: Notices,
        governor: Governor,
        overlap: bool,
        codes: bool = False,
    ) -> None:
        self._training, self._agreement, self._notices = training, agreement, notices
        self._governor, self._overlap = governor, overlap
        self._encoder, self._copier = StateEncoder(training.is_replicated), Copier(training.is_stepped)
        self._worker = Worker("thinwire-checkpoint")
        self._coder = Worker("thinwire-coder", _CODING_NICENESS) if codes else None
        agreement.can_code = floats.is_compiled if codes else lambda: False
        self._turn: Future[Turn] | None = None  # of the next checkpoint
        self._needed = threading.Event()  # set when the turn is needed now
        self._closing = False
        self._copying: Future[tuple[int, float, str]] | None = None  # of the last one: step, seconds, why there is none
        # its step, bytes, seconds, and why there is none
        self._coding: Future[tuple[int, int, float, str]] | None = None
        self._cpu_seconds = 0.0  # of the training's thread
        self.step = 0  # the last step
        self.started = False  # whether all ranks take part, so that they can agree
        self.broken = ""  # why there will be no more checkpoints
        self.records = Records()
        self._stepped: set[int] = set()  # id() of the optimizers that have come through the hook
        self._has_stepped = False  # whether one has, since the last checkpoint
        self._unhook = self._hook()
        groups = [group for optimizer in training.optimizers() for group in getattr(optimizer, "param_groups", ())]
        if overlap and any(group.get("capturable") for group in groups):
            self._copy_alone("the optimizer is capturable, and a replayed CUDA graph does not wait for a copy")

    def do(self, job: Callable[[], Any]) -> Any:
        """Run a job on the worker, where the group of the ranks is used, and wait for its result."""
        return self._worker.submit(job).result()

    def checkpoint(self) -> None:
        """Count an optimizer step and make a checkpoint if one is due.

        Raises, on all ranks, what the ranks agreed to raise (`Turn`).
        """
        self.settle(whole=False)
        self.step += 1
        has_stepped, self._has_stepped = self._has_stepped, False
        if self.broken:
            return
        if not self._governor.is_due(self.step):
            self._take_early()
            return
        started, cpu_started, raises = time.perf_counter(), time.thread_time(), None
        try:
            encoded = self._encode()
            turn = self._agreed(encoded)
            record, raises = self._begin(turn, encoded), turn.raises
        except FAILURES as error:  # an error of the ranks' group: they cannot agree any more
            self.broken = f"the ranks cannot agree any more: {error}"
            self._notices.add(f"no more checkpoints: {self.broken}")
            record = VersionRecord(self.step, skipped=self.broken)
        self.records.add(replace(record, blocking_seconds=time.perf_counter() - started))
        self._cpu_seconds += time.thread_time() - cpu_started
        if not record.skipped:
            self._take_early()
        if self._copying is not None and not self._is_fenced(has_stepped):
            self.settle(whole=False)
        if raises is not None:
            raise raises

    def settle(self, whole: bool = True) -> None:
        """Wait until the last checkpoint is copied, so that parameters may change; ``whole``: until it is coded too."""
        if self._copying is not None:
            started = time.perf_counter()
            copying, self._copying = self._copying, None
            try:
                step, copy_seconds, skipped = copying.result()
            except Exception as error:
                step, copy_seconds, skipped = self.step, 0.0, f"{type(error).__name__}: {error}"
                self._notices.add(f"a checkpoint was not copied: {skipped}")
            self.records.amend(step, time.perf_counter() - started, copy_seconds=copy_seconds, skipped=skipped)
        if self._coding is not None and (whole or self._coding.done()):
            coding, self._coding = self._coding, None
            step, num_bytes, seconds, skipped = coding.result()
            self.records.amend(step, coded_bytes=num_bytes, coding_seconds=seconds, skipped=skipped)

    def copy(self) -> tuple[bytes, memoryview, None]:
        """Return layout and payload of the state now, outside of the slots, nothing of it apart.

        Raises an error for a state that cannot be stored.
        """
        encoded = self._encoder.encode(self._training.capture(self.step))
        payload = memoryview(bytearray(encoded.payload_bytes))
        write(encoded.slices, encoded.tensors, payload)
        encoded = replace(encoded, shared_bytes=0) if self._agreement.divergence.is_off else encoded
        return encoded.to_bytes(self._agreement.about), payload, None

    @property
    def cpu_seconds(self) -> float:
        """CPU time of this process for all checkpoints so far."""
        return self._cpu_seconds + self._worker.cpu_seconds + (self._coder.cpu_seconds if self._coder else 0.0)

    def drop_turn(self) -> None:
        """Drop the ranks' agreement on the next checkpoint; the next step is due."""
        self._governor.next_step = 0
        turn, self._turn = self._turn, None
        self._needed.set()
        if turn is not None:
            with contextlib.suppress(*FAILURES):
                if (writer := turn.result().writer) is not None:
                    self.do(lambda: self._agreement.abandon(writer))
                self._agreement.persist(self.step + 1, "it was given up")

    def close(self) -> bool:
        """Publish the last checkpoint and stop, without waiting for the ranks' next agreement.

        Return whether the thread has ended; if not, it waits for other ranks.
        """
        self.settle()
        if self._unhook is not None:
            self._unhook()
        self._closing = True
        self._needed.set()
        if self._coder is not None:
            self._coder.close(_CLOSE_SECONDS)
        return self._worker.close(_CLOSE_SECONDS)

    def _hook(self) -> Callable[[], None] | None:
        """None if there is no optimizer, or one of them cannot be made to wait: one around another."""
        optimizers = self._training.optimizers()
        with contextlib.suppress(AttributeError), contextlib.ExitStack() as stack:
            for optimizer in optimizers:
                stack.callback(optimizer.register_step_pre_hook(self._before_optimizer).remove)
            return stack.pop_all().close if optimizers else None
        return None

    def _is_fenced(self, has_stepped: bool) -> bool:
        """Return whether the next ``optimizer.step`` will wait for a copy, by the hook.

        Replays of a CUDA graph call no hook, and torch counts none of their writes. So on a GPU each optimizer must
        have come through the hook once, and one of them since the last checkpoint (``has_stepped``).
        """
        if not self._overlap or self._unhook is None:
            return False
        return not self._copier.uses_device or (has_stepped and len(self._stepped) == len(self._training.optimizers()))

    def _copy_alone(self, reason: str) -> None:
        """Let no copy run beside the training any more."""
        self._overlap = False
        self._notices.add(f"{reason}: from now on step waits until parameters are copied (overlap=False)")

    def _before_optimizer(self, optimizer: object, *_: object) -> None:
        self.settle(whole=False)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._copy_alone("optimizer.step is captured in a CUDA graph, whose replays do not wait for a copy")
            return
        self._stepped.add(id(optimizer))
        self._has_stepped = True
        if self._turn is not None:
            self._needed.set()
        elif not self.broken:
            self._take_early()

    def _take_early(self) -> None:
        """Take the turn of the next step, if it is due, once the last version is everywhere: no rank waits for it."""
        step = self.step + 1
        if self._turn is None and self._governor.is_due(step) and self.started and self._agreement.is_registered:
            self._turn = self._worker.submit(lambda: self._take(step))

    def _take(self, step: int) -> Turn:
        """On the worker. Ranks that close take part: others may be in this turn already, and would wait for them."""
        if self._closing:
            self._agreement.obstacle = "the training ends"
        return self._agreement.take_turn(step)

    def _watch(self) -> None:
        """On the worker: note when the version is everywhere, unless the next turn is needed before."""
        if self._agreement.wait_until_sent(self._needed):
            self._governor.note_sent()

    def _begin(self, turn: Turn, encoded: Encoded | None) -> VersionRecord:
        if turn.stride:
            self._governor.agree(self.step, turn.stride)
        writer, obstacle = turn.writer, self._agreement.obstacle
        if writer is None:
            self._agreement.persist(self.step, turn.skipped)
            return VersionRecord(self.step, skipped=turn.skipped)
        target = self._agreement.target(writer, encoded) if encoded is not None else None
        if encoded is not None and target is None:
            obstacle = f"the state has grown beyond its slots of {len(writer.payload):,} bytes: they grow next"
        if encoded is None or target is None or obstacle:
            self.do(lambda: self._agreement.abandon(writer))
            return VersionRecord(self.step, skipped=obstacle)
        encoded = encoded if turn.compares else replace(encoded, shared_bytes=0)
        self.settle()  # the last version is coded, or the ranks had not agreed on this one
        try:
            copy = self._copier.begin(encoded, target)
        except Exception as error:  # such as no memory on a device: the ranks can agree on the next one
            reason = f"it was not copied: {type(error).__name__}: {error}"
            self._notices.add(f"a checkpoint of step {self.step} is missing: {reason}")
            self.do(lambda: self._agreement.abandon(writer))
            return VersionRecord(self.step, skipped=reason)
        self._copying = self._worker.submit(lambda: self._finish(writer, turn.coded, copy, encoded))
        self._governor.note_begun()
        self._needed.clear()
        self._worker.submit(self._watch)
        own_bytes = encoded.payload_bytes - tail_offset(writer, encoded)
        little = max(_LITTLE_BYTES, _LITTLE_SHARE * encoded.payload_bytes)
        self._governor.sends_little = writer.common is not None and own_bytes <= little
        return VersionRecord(self.step, encoded.payload_bytes, coded_bytes=0 if turn.coded else own_bytes)

    def _encode(self) -> Encoded | None:
        """The state now; an error in it is an obstacle that the ranks learn of, and raise if it is no passing one."""
        encoded, obstacle, refusal = None, "", ""
        try:
            encoded = self._encoder.encode(self._training.capture(self.step))
            self._agreement.sizes = encoded.payload_bytes, encoded.shared_bytes
        except (OSError, ThinwireError) as error:
            obstacle = f"the state could not be read: {error}"
        except Exception as error:
            obstacle = refusal = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if obstacle and not refusal:
            self._notices.add(f"no checkpoints: {obstacle}")
        self._agreement.obstacle, self._agreement.refusal = obstacle, refusal
        return encoded

    def _agreed(self, encoded: Encoded | None) -> Turn:
        turn, self._turn = self._turn, None
        step, agreement = self.step, self._agreement
        turn = self._worker.submit(lambda: agreement.take_turn(step)) if turn is None else turn
        self._needed.set()
        agreed = turn.result()
        if not agreed.registers:
            return agreed
        try:
            if self.do(lambda: agreement.register(step, encoded)):
                agreed = self.do(lambda: agreement.take_turn(step))
        except ValueError as error:
            return Turn(str(error), raises=error)
        return Turn("there are no slots") if agreed.registers else agreed

    def _finish(self, writer: SlotWriter, coded: bool, copy: Copy, encoded: Encoded) -> tuple[int, float, str]:
        """On the worker: the step, seconds of copying, and why there is no version, or empty."""
        try:
            unchanged = copy.finish()
        except FAILURES as error:
            self._agreement.abandon(writer)
            return writer.step, copy.seconds, f"it was not copied: {error}"
        if not unchanged:
            self._agreement.abandon(writer)
            reason = "parameters were written to before the next optimizer.step"
            self._copy_alone(reason)
            return writer.step, copy.seconds, reason
        if self._coder is None or not coded:
            return writer.step, copy.seconds, self._agreement.publish(writer, encoded, copy.crcs)
        self._agreement.coding = True
        self._coding = self._coder.submit(lambda: self._code(writer, encoded, copy.crcs))
        return writer.step, copy.seconds, ""

    def _code(self, writer: SlotWriter, encoded: Encoded, crcs: Sequence[int]) -> tuple[int, int, float, str]:
        """On the coder: step, bytes of the codes, seconds of coding, and why there is no version, or empty."""
        started, coded_bytes = time.perf_counter(), 0
        try:
            codes = pack(encoded, writer.payload, tail_offset(writer, encoded))
            coded_bytes, seconds = codes.payload_bytes, time.perf_counter() - started
            return writer.step, coded_bytes, seconds, self._agreement.publish(writer, encoded, crcs, codes=codes)
        except Exception as error:
            reason = f"it was not coded: {type(error).__name__}: {error}"
            self._notices.add(f"a checkpoint of step {writer.step} is missing: {reason}")
            self._agreement.abandon(writer)
            return writer.step, 0, 0.0, reason
        finally:
            self._agreement.coding = False
