"""The simulated device: streams and host threads with vector clocks, events, pinned memory, the caching allocator.

Every operation runs at once on the CPU, in memory that this module hands out, and is booked on the stream that a GPU
would run it on. Two accesses to a byte, one of them a write, race unless a stream, an event or a wait of the host puts
one after the other. The clock of an actor (a stream, or a thread of the host) maps each actor to the last of its
operations that is known to be over.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

PINNED = -1
"""Device index of a block of pinned host memory."""
_ROUND = 512

Clock = dict[str, int]


def join(one: Clock, other: Clock) -> None:
    for actor, tick in other.items():
        if one.get(actor, 0) < tick:
            one[actor] = tick


_PLUMBING = (
    "threading.py", "contextlib.py", "weakref.py", "queue.py", "mock.py", "simgpu/device.py", "simgpu/tensors.py",
    "simgpu/torch_semantics.py",
)  # fmt: skip


def where() -> str:
    """The innermost line of thinwire that runs, else of a test."""
    frame = sys._getframe(1)
    fallback = "?"
    while frame is not None:
        name = frame.f_code.co_filename
        if "/thinwire/" in name and "/simgpu/" not in name and "/lab/testbed/" not in name:
            return f"{name.rsplit('/thinwire/', 1)[1]}:{frame.f_lineno}"
        is_ours = "/torch/" in name or name.startswith("<") or name.endswith(_PLUMBING)
        if fallback == "?" and not is_ours:
            fallback = f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return fallback


def _is_called_by(part: str) -> bool:
    frame = sys._getframe(2)
    return part in frame.f_code.co_filename


def _functions() -> set[str]:
    """Names of all functions of Python that run in this thread."""
    frame, names = sys._getframe(1), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return names


@dataclass(frozen=True, eq=False)
class Access:
    start: int
    end: int
    is_write: bool
    actor: str
    tick: int
    where: str


@dataclass(eq=False)
class Block:
    """Memory of the allocator; it is never given back to the system, so its address names it for good."""

    memory: np.ndarray
    device: int
    stream: str  # on which it was allocated; "" for pinned memory
    made_in: str
    accesses: list[Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)
    is_live: bool = True
    freed_by: Clock = field(default_factory=dict)  # what the thread knew that freed it last

    @property
    def address(self) -> int:
        return int(self.memory.__array_interface__["data"][0])


class Stream:
    """What ``torch.cuda.Stream`` is under simulation."""

    device_type = 1  # CUDA's, which FSDP of torch 2.15 hands to an operator that does nothing for CUDA

    def __init__(self, device: object = None, priority: int = 0, *, kind: str = "") -> None:
        self.world = current()
        self.device_index = index_of(device)
        self.device = torch.device("cuda", self.device_index)
        self.priority = priority
        if not kind:
            self.world.use(self.device_index, "a stream is made")
            kind = f"fsdp {next(self.world.numbers)}" if _is_called_by("/_fully_shard/") else ""
        self.name = f"cuda:{self.device_index} {kind or f'stream {next(self.world.numbers)}'}"
        self.stream_id = len(self.world.streams)
        self._queue: deque[Callable[[], None]] = deque()
        self._added = self._done = 0
        self.world.streams[self.name] = self

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            with self.world.lock:
                join(self.world.clocks[self.name], event.clock)
                self.put(partial(event.stream.run, event.position))

    def put(self, work: Callable[[], None]) -> int:
        """Queue what is done as late as possible; return the number of works so far."""
        self._queue.append(work)
        self._added += 1
        return self._added

    def copies_from(self, memory: np.ndarray) -> bool:
        """Whether a queued copy reads this memory."""
        return any(
            isinstance(work, partial) and work.func is np.copyto and np.may_share_memory(work.args[1], memory)
            for work in self._queue
        )

    def run(self, until: int | None = None) -> None:
        """Do the queued works, or those up to a number."""
        while self._queue and (until is None or self._done < until):
            work = self._queue.popleft()
            self._done += 1
            work()

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.world.host_waits("stream.synchronize", self.world.clocks[self.name], self)

    def query(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __enter__(self) -> Stream:
        self._context = StreamContext(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__()


class Event:
    """What ``torch.cuda.Event`` is under simulation. One that was never recorded orders nothing."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: object):
        self.clock: Clock = {}
        self.device_index = -1
        self.stream: Stream | None = None
        self.position = 0
        self.enable_timing, self.blocking = enable_timing, blocking
        self._moment = 0

    def record(self, stream: Stream | None = None) -> None:
        world = current()
        stream = stream or world.stream()
        world.use(stream.device_index, "an event is recorded")
        self.stream, self.device_index, self.position = stream, stream.device_index, stream._added
        self.clock = world.point(stream)
        self._moment = next(world.numbers)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current().stream()).wait_event(self)

    def synchronize(self) -> None:
        current().host_waits("event.synchronize", self.clock, self.stream, self.position)

    def query(self) -> bool:
        """Whether it is known to be over; a device that is as slow as it may be has not reached any other."""
        world = current()
        mine = world.clocks[world.host().name]
        return all(mine.get(actor, 0) >= tick for actor, tick in self.clock.items())

    def elapsed_time(self, end: Event) -> float:
        return 1e-3 * (end._moment - self._moment)


class StreamContext:
    """``torch.cuda.StreamContext``, step by step as torch 2.13 has it: leaving it sets the device of before."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        world = current()
        self._before, self._there = world.stream(), world.stream(self.stream.device_index)
        world.set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        if self.stream is None:
            return
        world = current()
        if self._before.device_index != self.stream.device_index:
            world.set_stream(self._there)
        world.set_stream(self._before)


class DeviceContext:
    """``torch.cuda.device``: it restores a device only if that is in use already, and so makes no context."""

    def __init__(self, device: object) -> None:
        self.idx = index_of(device)

    def __enter__(self) -> None:
        host = current().host()
        self._before, host.device = host.device, self.idx

    def __exit__(self, *error: object) -> None:
        current().host().device = self._before


@dataclass
class Host:
    """A thread of the host: its name as an actor, its current device, and its current stream on each."""

    name: str
    device: int = 0
    streams: dict[int, Stream] = field(default_factory=dict)


class World:
    """All of one process under simulation.

    Args:
        own: indices of the devices that this process may use; work on any other is an error, because it creates a
            context of half a gigabyte there.
    """

    def __init__(self, own: tuple[int, ...] = (0, 1)) -> None:
        self.own = own
        self.numbers = count(1)
        self.lock = threading.RLock()
        self.clocks: dict[str, Clock] = defaultdict(dict)
        self.blocks: dict[int, Block] = {}
        self.pool: dict[tuple[int, str, int], list[Block]] = defaultdict(list)
        self.delayed: list[tuple[Block, Clock]] = []  # freed blocks that recorded streams may still use
        self.defaults: dict[int, Stream] = {}
        self.streams: dict[str, Stream] = {}
        self.races: list[str] = []
        self.errors: list[str] = []
        self.waits: Counter[tuple[str, str, str]] = Counter()  # thread, what, where
        self.waits_midway = Counter[str]()  # those inside of backward, and not at its end
        self.launches: Counter[tuple[str, str, str]] = Counter()  # thread, stream, what
        self.stashed: dict[int, list[Tensor]] = {}  # tensors of collectives of NCCL that nobody has waited for
        self.issued_nccl: dict[int, set[str]] = defaultdict(set)
        self.captured: Stream | None = None
        self.has_nccl = False
        self.is_computed = False  # whether the running backward pass has nothing left to compute
        self.delayed_hooks: list[Any] = []  # futures of hooks that DDP calls after that
        self.reused = 0
        self.pinned = Counter[str]()  # how often pinned memory was allocated, by the line
        self.messages: Any = None  # the clocks of messages, see `simgpu.network`
        self._local = threading.local()
        self._threads = count(1)

    # --- threads

    def host(self) -> Host:
        host = getattr(self._local, "host", None)
        if host is None:
            thread = threading.current_thread()
            name = "main" if thread is threading.main_thread() else f"{thread.name} #{next(self._threads)}"
            host = self._local.host = Host(name)
        return host

    def tell(self) -> Clock:
        """What the calling thread knows, to hand over to another one by a queue or the like."""
        with self.lock:
            self.tick(self.host().name)
            return dict(self.clocks[self.host().name])

    def learn(self, clock: Clock) -> None:
        with self.lock:
            join(self.clocks[self.host().name], clock)

    def tick(self, actor: str) -> int:
        clock = self.clocks[actor]
        clock[actor] = clock.get(actor, 0) + 1
        return clock[actor]

    # --- devices and streams

    def use(self, device: int, why: str) -> None:
        if device not in self.own and device != PINNED:
            self.error(f"a context on cuda:{device}, which this rank does not own: {why} on {self.host().name}")

    def stream(self, device: int | None = None) -> Stream:
        """The current stream of the calling thread on a device."""
        host = self.host()
        index = host.device if device is None else device
        return host.streams[index] if index in host.streams else self.default_stream(index)

    def default_stream(self, index: int) -> Stream:
        if index not in self.defaults:
            self.defaults[index] = Stream(torch.device("cuda", index), kind="default")
        return self.defaults[index]

    def set_stream(self, stream: Stream) -> None:
        self.use(stream.device_index, "its stream becomes the current one")
        host = self.host()
        host.device = stream.device_index
        host.streams[stream.device_index] = stream

    def set_device(self, index: int) -> None:
        self.use(index, "it becomes the current device")
        self.host().device = index

    def point(self, stream: Stream) -> Clock:
        """What is over when the work that the stream has so far is over."""
        with self.lock:
            join(self.clocks[stream.name], self.clocks[self.host().name])
            return dict(self.clocks[stream.name])

    def host_waits(self, what: str, clock: Clock, stream: Stream | None = None, until: int | None = None) -> None:
        """Let the calling thread wait for a point of a stream."""
        with self.lock:
            self.count_wait(what)
            join(self.clocks[self.host().name], clock)
            if stream is not None:
                stream.run(until)

    def count_wait(self, what: str) -> None:
        self.waits[self.host().name, what, where()] += 1
        functions = _functions()
        if "_engine_run_backward" in functions and "_end_backward" not in functions:
            self.waits_midway[f"{what} at {where()}"] += 1

    def launch(self, device: int, what: str, is_late: bool = False, stream: Stream | None = None) -> Stream:
        """Book an operation on a stream, by default the current one of a device, before it is done.

        What the stream has to do before is done now, unless this is put into its queue too (``is_late``).
        """
        self.use(device, f"{what} is launched")
        stream = stream or self.stream(device)
        if stream == self.captured and not what.startswith("captured"):
            self.error(f"{what} is launched while a graph is captured")
        if not is_late:
            stream.run()
        self.tick(self.host().name)
        join(self.clocks[stream.name], self.clocks[self.host().name])
        self.tick(stream.name)
        self.launches[self.host().name, stream.name, what] += 1
        return stream

    # --- accesses

    def touch(self, actor: str, block: Block, start: int, end: int, is_write: bool, what: str) -> None:
        if end <= start:
            return
        clock, kept = self.clocks[actor], []
        for old in block.accesses:
            if old.start < end and start < old.end:
                over = old.actor == actor or clock.get(old.actor, 0) >= old.tick
                if not over and (is_write or old.is_write):
                    self.race(block, actor, is_write, what, old)
                if (
                    over
                    and start <= old.start
                    and old.end <= end
                    and (is_write or (old.actor == actor and not old.is_write))
                ):
                    continue  # whatever races with the old one races with the new one too
            kept.append(old)
        kept.append(Access(start, end, is_write, actor, clock.get(actor, 0), what))
        block.accesses = kept

    def race(self, block: Block, actor: str, is_write: bool, what: str, old: Access) -> None:
        new, before = ("write" if is_write else "read"), ("write" if old.is_write else "read")
        memory = "pinned memory" if block.device == PINNED else f"memory of cuda:{block.device}"
        text = f"RACE in {memory}: {new} by {actor} ({what}) and {before} by {old.actor} ({old.where}) have no order"
        if text not in self.races:
            self.races.append(text)

    def error(self, text: str) -> None:
        text = f"{text} at {where()}"
        if text not in self.errors:
            self.errors.append(text)

    # --- memory

    def allocate(self, num_bytes: int, device: int) -> Tensor:
        """Return uint8 [num_bytes] for the current stream: at best the block that was freed there last."""
        with self.lock:
            self.use(device, "memory is allocated")
            if device == PINNED:
                self.pinned[where()] += 1
            capacity = max(1, -(-num_bytes // _ROUND)) * _ROUND
            stream = "" if device == PINNED else self.stream(device).name
            self._take_back()
            free = self.pool[device, stream, capacity]
            if free:
                block = free.pop()
                for actor in filter(None, (self.host().name, stream)):  # by the allocator's lock
                    join(self.clocks[actor], block.freed_by)
                block.is_live, block.recorded, block.made_in = True, set(), where()
                self.reused += 1
            else:
                block = Block(np.full(capacity, 0xAB, np.uint8), device, stream, where())
                self.blocks[block.address] = block
            view = block.memory[:]
            weakref.finalize(view, _freed, self, block).atexit = False
            return torch.from_numpy(view)[:num_bytes]

    def _take_back(self) -> None:
        """Put blocks of recorded streams into the pool, as far as the host knows that these are done."""
        known = self.clocks[self.host().name]
        looked_at, self.delayed = self.delayed, []
        for block, needed in looked_at:
            if all(known.get(actor, 0) >= tick for actor, tick in needed.items()):
                join(block.freed_by, needed)  # whoever gets it is behind the events, though another thread saw them end
                self._to_pool(block)
            else:
                self.delayed.append((block, needed))

    def _to_pool(self, block: Block) -> None:
        self.pool[block.device, block.stream, block.memory.nbytes].append(block)

    def empty(self, block: Block) -> None:
        """Give the memory of a storage back that may be filled again later, as FSDP does with whole parameters."""
        if block.is_live:
            self._end(block)

    def fill(self, block: Block) -> None:
        """Allocate the memory of an emptied storage on the current stream; it has no past, as nobody else had it."""
        with self.lock:
            if not block.is_live:
                block.is_live, block.recorded, block.accesses, block.made_in = True, set(), [], where()
                block.stream = self.stream(block.device).name
                block.memory[:] = 0xAB

    def free(self, block: Block) -> None:
        with self.lock:
            needed = self._end(block) if block.is_live else {}
            if any(needed.values()):
                self.delayed.append((block, needed))
            else:
                self._to_pool(block)

    def _end(self, block: Block) -> Clock:
        """Report who may still use memory that is given back; return which recorded streams have to be waited for."""
        with self.lock:
            block.is_live = False
            owner, host = self.clocks[block.stream], self.clocks[self.host().name]
            block.freed_by = dict(host)
            waited_for = [
                old
                for old in block.accesses
                if old.actor != block.stream
                and owner.get(old.actor, 0) < old.tick
                and host.get(old.actor, 0) < old.tick
            ]
            for old in waited_for if block.device != PINNED else ():
                text = (
                    f"FREED IN USE: memory of {block.stream} (made in {block.made_in}), which {old.actor} uses"
                    f" ({old.where}): the next tensor of {block.stream} gets it, and no record_stream prevents that"
                )
                if " fsdp " in block.stream:  # which waits for training before it takes its memory again, or races then
                    continue
                if old.actor not in block.recorded and text not in self.races:
                    self.races.append(text)
            needed = {name: self.clocks[name].get(name, 0) for name in block.recorded - {block.stream}}
            if block.device == PINNED:  # the allocator of pinned memory records events of the streams that copied
                needed = {old.actor: old.tick for old in waited_for if old.actor.startswith("cuda")}
            block.accesses = waited_for  # whoever gets the memory next is ordered behind the others by this thread
            return needed

    def block_of(self, tensor: Tensor) -> Block | None:
        """The block that a tensor lies in, or None if it is in ordinary memory of the host."""
        if getattr(self._local, "is_blind", False):
            return None
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        if tensor.layout is not torch.strided:
            if tensor.layout is not torch.sparse_coo:
                return None
            with torch._C._DisableTorchDispatch():
                tensor = torch._C.TensorBase._values(tensor)
        try:
            return self.blocks.get(tensor.untyped_storage().data_ptr())
        except (NotImplementedError, RuntimeError):  # without memory
            return None

    @contextmanager
    def blind(self) -> Iterator[None]:
        """A time in which the calling thread sees ordinary tensors of the CPU, and nothing is booked."""
        self._local.is_blind = True
        try:
            with torch._C._DisableTorchDispatch():
                yield
        finally:
            self._local.is_blind = False


def _freed(world: World, block: Block) -> None:
    world.free(block)


_current: World | None = None


def current() -> World:
    assert _current is not None, "no device is simulated: use simgpu.simulated()"
    return _current


def make_current(world: World | None) -> None:
    global _current
    _current = world


@contextmanager
def capturing() -> Iterator[None]:
    """A time in which the current stream is captured into a graph."""
    world = current()
    world.captured = world.stream()
    try:
        yield
    finally:
        world.captured = None


def index_of(device: object) -> int:
    if device is None:
        return current().host().device
    if isinstance(device, int):
        return device
    made = torch.device(device)  # type: ignore[arg-type]
    assert made.type == "cuda", f"{made} is no CUDA device"
    return current().host().device if made.index is None else made.index
