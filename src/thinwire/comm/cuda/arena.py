"""Pinned memory of the lane, handed out front to back during a job and taken back all at once."""

from collections.abc import Callable

from torch import Tensor

ALIGNMENT_BYTES = 64
FIRST_BYTES = 4 << 20
LIMIT_BYTES = 256 << 20


class Arena:
    """One block of pinned memory, which grows after a job that asked for more, up to a limit.

    Pinning memory makes the device wait, so sizes double: nothing is pinned after the first steps.

    Args:
        allocate: returns uint8 [num_bytes] of pinned memory.
        first_bytes, limit_bytes: capacity in the first job, and the largest capacity of any job.
    """

    def __init__(
        self, allocate: Callable[[int], Tensor], first_bytes: int = FIRST_BYTES, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._allocate = allocate
        self._limit_bytes = limit_bytes
        self._wanted_bytes = min(first_bytes, limit_bytes)
        self._memory: Tensor | None = None
        self._taken_bytes = self._asked_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a contiguous tensor lies in this memory."""
        start = 0 if self._memory is None else self._memory.data_ptr()
        return start <= tensor.data_ptr() < start + self.capacity_bytes

    def begin(self) -> None:
        """Take all memory back. The host uses nothing of it any more; copies of the device may be under way."""
        if self._memory is None or self._wanted_bytes > self._memory.numel():
            self._memory = None  # freed before the larger block is allocated
            self._memory = self._allocate(self._wanted_bytes)
        self._taken_bytes = self._asked_bytes = 0

    def take(self, num_bytes: int) -> Tensor | None:
        """Return uint8 [num_bytes] for this job, aligned, or None if less than that is left."""
        assert self._memory is not None, "an arena begins before it is taken from"
        aligned = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._asked_bytes += aligned
        if self._asked_bytes > self.capacity_bytes:
            power_of_two = 1 << (self._asked_bytes - 1).bit_length()
            self._wanted_bytes = min(max(self._wanted_bytes, power_of_two), self._limit_bytes)
        start = self._taken_bytes
        if start + num_bytes > self.capacity_bytes:
            return None
        self._taken_bytes += aligned
        return self._memory[start : start + num_bytes]
