"""The persistent tier: checkpoints on a disk at long intervals, in the background, as plain DCP, with digests.

    DIRECTORY/step-00000042/            torch.distributed.checkpoint (DCP): .metadata thinwire.json __0_0.distcp ...
    DIRECTORY/step-00000042.partial/    one that is being written
    DIRECTORY/step-00000042.given-up/   one that a start afresh, or from an older step, has set aside; nothing reads it
    DIRECTORY/run                       as old as the run; locked while a job writes here

Tensors that are the same on all ranks are stored once, and parts of a DTensor as parts of one tensor, both under their
names in the state (``model.layer.weight``), so any reader of DCP finds them, on any number of ranks. Tensors that
differ are stored as ``rank1.optimizer...``.

What data parallelism keeps alike is compared by its digests before anything is written: a state in which ranks differ
is not saved, once they were the same. So ``certified`` in ``thinwire.json`` is true; null where nothing is to be alike;
or false, where ranks have never been the same.

Neither DCP nor torch.load compares the bytes with a digest: one flipped bit of a weight comes back unnoticed (tried
with torch 2.13). So ``thinwire.json``, written last, has the digests of ``.metadata`` and of each rank's
``rank1.digests``, and those have the digests of all tensors that the rank needs. A tensor that does not match is not
loaded.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from thinwire.checkpoint.group import PrivateGroup, describe, gather_json, odd_ranks, on_all
from thinwire.checkpoint.holder.faultpoint import reach
from thinwire.checkpoint.holder.slots import parse_json
from thinwire.checkpoint.holder.version import field, start_order
from thinwire.checkpoint.options import Disk, parse_seconds
from thinwire.checkpoint.records import Notices
from thinwire.checkpoint.state.coding import tensors_of
from thinwire.checkpoint.state.encode import Encoded, alike
from thinwire.checkpoint.state.layout import DTYPES, ShardPart, StateLayout
from thinwire.errors import CorruptMessageError, ThinwireError, logger


class PartsPlanner(dcp.DefaultSavePlanner):
    """Planner that saves tensors by name; ``parts`` are those that several ranks save under the same name."""

    def __init__(self, parts: Mapping[str, ShardPart]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def create_local_plan(self) -> dcp.SavePlan:
        self.plan = dcp.SavePlan([self._item(name, tensor) for name, tensor in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]

    def _item(self, name: str, tensor: Tensor) -> dcp.WriteItem:
        part = self._parts.get(name)
        offset = Size(part.offset if part is not None else [0] * tensor.dim())
        whole = tensor.size() if part is None else Size(part.shape)
        data = TensorWriteData(dcp.ChunkStorageMetadata(offset, tensor.size()), TensorProperties(tensor.dtype), whole)
        kind = WriteItemType.TENSOR if part is None else WriteItemType.SHARD
        return dcp.WriteItem(MetadataIndex(name, offset), kind, tensor_data=data)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A box to read into ``tensor``: the elements of the named tensor from ``offset`` on, in its shape."""

    name: str
    offset: tuple[int, ...]
    tensor: Tensor


def read_chunks(reader: dcp.StorageReader, metadata: dcp.Metadata, wanted: Sequence[Wanted]) -> None:
    """Fill all of ``wanted`` from the stored parts, combined by DCP's resharding.

    Raises KeyError for names that are not stored, ValueError for values that are no tensors.
    """
    items = []
    for number, each in enumerate(wanted):
        stored = metadata.state_dict_metadata[each.name]
        if not isinstance(stored, dcp.TensorStorageMetadata):
            raise ValueError(f"{each.name} is not a tensor")
        chunk, into = dcp.ChunkStorageMetadata(Size(each.offset), each.tensor.size()), MetadataIndex(str(number))
        made = create_read_items_for_chunk_list(each.name, stored, [chunk])
        items += [dataclasses.replace(item, dest_index=into) for item in made]
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({str(number): each.tensor for number, each in enumerate(wanted)}, metadata)
    reader.read_data(reader.prepare_local_plan(dcp.LoadPlan(items)), planner).wait()


_ABOUT, _METADATA = "thinwire.json", ".metadata"
_REPLACED = ".replaced"  # of a checkpoint of a step that was trained once more
_FIELDS = (
    ("topology", str), ("state", str), ("world_size", int), ("attempt", int), ("metadata", str), ("digests", list)
)  # fmt: skip


def write_shards(
    directory: Path, layout: StateLayout, tensors: Sequence[Tensor], group: dist.ProcessGroup
) -> dict[str, Any]:
    """Write the state of each rank to an empty directory that all ranks see, and return what to tell `write_about` of
    it; collective.

    Raises ThinwireError on all ranks, with the error of the system, if one cannot write; and if ranks differ in what
    they should have alike (``layout.shared_bytes``), and have had.
    """
    rank = dist.get_rank(group)
    state, certified = _named(layout, tensors, rank, group)
    parts = {name: item.part for name, item in zip(_names(layout), layout.slices, strict=True) if item.part is not None}
    try:
        dcp.save(state, storage_writer=_Writer(str(directory)), process_group=group, planner=PartsPlanner(parts))
    except dcp.CheckpointException as error:
        raise ThinwireError(_why_not(error, directory, state, parts, group)) from error
    return {"certified": certified, "digests": gather_json(_digest(state[_own(rank, "digests")]), group)}


def write_about(directory: Path, about: dict[str, Any]) -> None:
    """Write the file that makes the others a checkpoint, last and once; not collective.

    ``about`` has step, attempt, topology, state, world_size, and what `write_shards` returned.
    """
    about |= {"metadata": _digest_of((directory / _METADATA).read_bytes())}
    with (directory / _ABOUT).open("w") as file:
        file.write(json.dumps({**about, "digest": _digest_of(_canonical(about))}))
        file.flush()
        os.fsync(file.fileno())


class _Writer(dcp.FileSystemWriter):
    """DCP's writer. It raises the error of the system, which torch has in the context of one of its own: DCP pickles
    errors for the other ranks, and the context gets lost."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


def _why_not(
    error: dcp.CheckpointException,
    directory: Path,
    state: dict[str, Tensor],
    parts: dict[str, Any],
    group: dist.ProcessGroup,
) -> str:
    """Why nothing was written, for people. Other ranks are taken to have as many bytes of their own as this one."""
    alone = _own(dist.get_rank(group), "")
    shares = [
        tensor.nbytes * (dist.get_world_size(group) if name in parts or name.startswith(alone) else 1)
        for name, tensor in state.items()
    ]
    failed = "; ".join(f"rank {rank}: {describe(each)}" for rank, (each, _) in sorted(error.failures.items())[:4])
    free = os.statvfs(directory.parent)
    return (
        f"{failed} (about {sum(shares):,} bytes are needed; {free.f_bavail * free.f_frsize:,} bytes and"
        f" {free.f_favail:,} files were free beside what was written)"
    )


def _named(
    layout: StateLayout, tensors: Sequence[Tensor], rank: int, group: dist.ProcessGroup
) -> tuple[dict[str, Tensor], bool | None]:
    """Tensors that a rank saves, and whether ranks have alike what they should: parts, and those equal on all ranks,
    under their own names, others under the rank's."""
    names = _names(layout)
    digests = {name: _digest(tensor) for name, tensor in zip(names, tensors, strict=True)}
    group_name = alike(layout.slices, layout.shared_bytes)
    mine = digests, _shared(layout, digests), group_name, layout.about.get("certified", -1)
    gathered, shared, groups, steps = zip(*gather_json(mine, group), strict=True)
    differ, certified = odd_ranks(shared, groups)[1], max(steps)
    if differ and certified >= 0:
        text = f"parameters or optimizer state of {differ}, and at step {certified} all were the same"
        raise ThinwireError(f"silent corruption: {text} (if ranks are meant to differ: on_divergence='off')")
    described = layout.to_bytes()
    all_digests = {"layout": _digest_of(described), "tensors": digests}
    state = {_own(rank, "layout"): _as_tensor(described), _own(rank, "digests"): _as_tensor(_canonical(all_digests))}
    for item, name, tensor in zip(layout.slices, names, tensors, strict=True):
        same = item.part is not None or all(each.get(name) == digests[name] for each in gathered)
        if tensor.numel():
            state[name if same else _own(rank, name)] = tensor
    return state, not differ if any(shared) and len(shared) > 1 else None


def read_about(directory: Path, step: int) -> dict[str, Any]:
    """Read the description of a checkpoint. Raises OSError, or CorruptMessageError if it is of another step, was
    altered, or lacks a digest."""
    about = parse_json((directory / _ABOUT).read_bytes())
    digest = field(about, "digest", str)
    assert isinstance(about, dict), "field has seen to it"
    described = {name: value for name, value in about.items() if name != "digest"}
    _check(_ABOUT, _digest_of(_canonical(described)), digest)
    if field(about, "step", int) != step:
        raise CorruptMessageError(f"it is of step {about['step']}")
    for name, kind in _FIELDS:
        field(about, name, kind)
    return about


class DiskShards:
    """The states of all ranks of a checkpoint on disk. Any rank may read any of them; nothing is collective.

    Raises OSError, ValueError, KeyError or CorruptMessageError wherever files are missing or altered.
    """

    def __init__(self, directory: Path, about: dict[str, Any]) -> None:
        metadata = _digest_of((directory / _METADATA).read_bytes())
        _check(directory / _METADATA, metadata, about["metadata"])
        self.world_size: int = about["world_size"]
        self._about = about
        self._reader = dcp.FileSystemReader(str(directory))
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        self._layouts: dict[int, StateLayout] = {}
        self._digests: dict[int, dict[str, str]] = {}

    def layout(self, owner: int) -> StateLayout:
        if owner not in self._layouts:
            described, digests = self._whole(_own(owner, "layout")), self._whole(_own(owner, "digests"))
            _check(_own(owner, "digests"), _digest(digests), self._about["digests"][owner])
            expected = json.loads(digests.numpy().tobytes())
            _check(_own(owner, "layout"), _digest(described), expected["layout"])
            self._layouts[owner] = StateLayout.from_bytes(described.numpy().tobytes())
            self._digests[owner] = expected["tensors"]
        return self._layouts[owner]

    def tensors(self, owner: int, numbers: Sequence[int]) -> list[Tensor]:
        """Read the tensors of the slices of these indices."""
        layout = self.layout(owner)
        names, wanted = _names(layout), []
        for number in numbers:
            item = layout.slices[number]
            own = _own(owner, names[number])
            name = own if own in self._metadata.state_dict_metadata else names[number]
            offset = (0,) * len(item.shape) if item.part is None else item.part.offset
            wanted.append(Wanted(name, offset, torch.empty(item.shape, dtype=DTYPES[item.dtype])))
        read_chunks(self._reader, self._metadata, [each for each in wanted if each.tensor.numel()])
        for number, each in zip(numbers, wanted, strict=True):
            _check(each.name, _digest(each.tensor), self._digests[owner][names[number]])
        return [each.tensor for each in wanted]

    def shared(self, owner: int) -> str:
        """Return a digest of what all ranks should have alike; empty if there is nothing."""
        return _shared(self.layout(owner), self._digests[owner])

    def alike(self, owner: int) -> str:
        """A name of the group of ranks that should have alike what this one has."""
        layout = self.layout(owner)
        return alike(layout.slices, layout.shared_bytes)

    def _whole(self, name: str) -> Tensor:
        stored = self._metadata.state_dict_metadata[name]
        if not isinstance(stored, dcp.TensorStorageMetadata):
            raise CorruptMessageError(f"{name} is not a tensor")
        wanted = Wanted(name, (0,), torch.empty(stored.size, dtype=torch.uint8))
        read_chunks(self._reader, self._metadata, [wanted])
        return wanted.tensor


def _names(layout: StateLayout) -> list[str]:
    """Names of the tensors on the disk: their paths, with a suffix where those are not unique."""
    seen: set[str] = set()
    names = []
    for number, item in enumerate(layout.slices):
        names.append(f"{item.path}#{number}" if item.path in seen else item.path)
        seen.add(names[-1])
    return names


def _shared(layout: StateLayout, digests: Mapping[str, str]) -> str:
    """Digest of what all ranks should have alike; empty if there is nothing."""
    items = zip(layout.slices, _names(layout), strict=True)
    shared: dict[str, Any] = {name: digests[name] for item, name in items if item.offset < layout.shared_bytes}
    optimizers = {name.partition(".state.")[0] for name in shared if ".state." in name}
    for name, node in layout.tree["dict"]:
        for key, values in node["dict"] if name in optimizers else ():
            shared |= {f"{name}.{key}": values} if key in ("state", "param_groups") else {}
    return _digest_of(_canonical(shared)) if shared else ""


def _own(rank: int, name: str) -> str:
    return f"rank{rank}.{name}"


def _check(name: object, result: str, expected: object) -> None:
    if result != expected:
        raise CorruptMessageError(f"{name} was altered, or is of another checkpoint")


def _canonical(values: Any) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def digest_of_shared(encoded: Encoded) -> str:
    """Return a digest of what all ranks should have alike of a state; empty if there is nothing."""
    items = zip(encoded.slices, encoded.tensors, strict=True)
    shared = {
        item.offset: _digest(tensor.detach().cpu()) for item, tensor in items if item.offset < encoded.shared_bytes
    }
    shared |= {-1: encoded.values} if shared else {}
    return _digest_of(_canonical(shared)) if shared else ""


def _digest(tensor: Tensor) -> str:
    return _digest_of(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _digest_of(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


_RETRY_SECONDS = 60.0  # at most, until a save that failed is tried again

Take = Callable[[], tuple[bytes, memoryview, memoryview | None]]


def check_parent(directory: Path) -> None:
    """Raise ValueError if there is neither the directory nor the one that it would be made in."""
    if not directory.is_dir() and not directory.parent.is_dir():
        raise ValueError(
            f"Disk({str(directory)!r}): there is no directory {directory.parent} on {os.uname().nodename}: mount its"
            " file system, or make it (only the last directory of the path is made by itself)"
        )


class PersistentTier:
    """A store of states of all ranks in a directory that all of them see, used by this run alone: nothing is read or
    written where a checkpoint names another one.

    The seconds between two checkpoints are by the clock of rank 0. They count from the newest checkpoint in the
    directory, or from the first start of the run, so that a job that fails more often still saves. ``about`` has
    ``run``, ``topology``, ``state`` and ``world_size``. Only the thread that saves uses ``group``, or others while it
    does not run. ``notices`` gets the failures, from rank 0.
    """

    def __init__(self, disk: Disk, about: dict[str, Any], group: PrivateGroup, notices: Notices) -> None:
        self.directory, self._every_seconds, self._keep = Path(disk.directory), parse_seconds(disk.every), disk.keep
        self._about, self._notices = about, notices
        self._own, self._group = group, group.process_group
        self._rank = dist.get_rank(self._group)
        self._thread: threading.Thread | None = None
        self._due_at: float | None = None  # of time.monotonic, on rank 0
        self._is_made = False
        self.obstacle = ""  # why no slot may be overwritten now
        self.saved_step = -1
        self.errors, self.last_error = 0, ""

    def is_due(self) -> bool:
        """Return whether this rank would save now: the last save is done, and on rank 0 the interval is over."""
        if self._rank == 0 and self._due_at is None:
            self._due_at = time.monotonic() + self._every_seconds - self._age_seconds()
        busy = self._thread is not None and self._thread.is_alive()
        return not busy and (self._rank != 0 or time.monotonic() >= (self._due_at or 0.0))

    def _age_seconds(self) -> float:
        """Of the newest checkpoint on the disk, or else of the run; at most an interval. Hosts' clocks differ: it is by
        that of the file system, the time of a file that is made now."""
        with contextlib.suppress(OSError):
            written = [path.stat().st_mtime for path in (*map(self._path, self._steps()), self.directory / "run")]
            try:
                with tempfile.TemporaryFile(dir=self.directory) as clock:
                    now = os.fstat(clock.fileno()).st_mtime
            except OSError:  # nothing can be written: try to save, which says why
                return self._every_seconds
            return min(max(0.0, now - max(written[:-1] or written)), self._every_seconds)
        return 0.0

    def save(self, step: int, attempt: int, take: Take) -> None:
        """Save the result of ``take``, layout and payload of the slot and what is in common, in the background.

        Call it on all ranks, for the same step; a rank that has nothing to save passes a ``take`` that raises. Until it
        has returned, ``obstacle`` says that slots must be left alone.
        """
        self.obstacle = f"step {step} is being copied for the disk"

        def save() -> None:
            if (reason := self.save_now(step, attempt, take)) and self._rank == 0:
                self._notices.add(reason)

        thread = threading.Thread(target=save, name="persist", daemon=True)
        thread.start()
        self._thread = thread  # another thread may `join` it from now on

    def save_now(self, step: int, attempt: int, take: Take) -> str:
        """Save like `save`, and return why it failed, the same on all ranks, or an empty text; collective."""
        self._due_at = time.monotonic() + self._every_seconds
        reason = ""
        try:
            self._save(step, attempt, take)
            self.saved_step = step
        except (Exception, dcp.CheckpointException) as error:  # a full disk is no reason to stop training
            reason = f"no checkpoint was saved to {self.directory}: {describe(error)}"
            self.errors, self.last_error = self.errors + 1, f"step {step}: {reason}"
            self._due_at = time.monotonic() + min(self._every_seconds, _RETRY_SECONDS)
        return reason

    def _save(self, step: int, attempt: int, take: Take) -> None:
        partial, final = self._path(step, ".partial"), self._path(step)

        def taken() -> tuple[StateLayout, list[Tensor]]:
            try:
                text, payload, common = take()
            finally:
                self.obstacle = ""
            layout = StateLayout.from_bytes(text)
            tensors = list(tensors_of(layout, payload, common))  # on the disk as they are
            return dataclasses.replace(layout, codes=()), tensors

        layout, tensors = on_all(self._group, taken)
        about = {**self._about, "step": step, "attempt": attempt}
        with contextlib.ExitStack() as stack:

            def begin() -> None:
                stack.enter_context(self._locked())
                self._remove_partial()
                self._readable()
                partial.mkdir()

            self._on_rank_0(begin)
            try:
                gathered = write_shards(partial, layout, tensors, self._group)
                self._on_rank_0(lambda: [write_about(partial, about | gathered), self._publish(partial, final)])
            finally:
                if self._rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)

    def _on_rank_0(self, do: Callable[[], Any]) -> None:
        """Raises ThinwireError on all ranks if rank 0 fails; they do not wait for it in vain."""
        on_all(self._group, do if self._rank == 0 else lambda: None)

    def _publish(self, partial: Path, final: Path) -> None:
        if final.exists():  # of the same step, trained once more
            final.rename(final.with_name(final.name + _REPLACED))
        partial.rename(final)
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._remove_partial()
        orders = self._orders()
        for old in sorted(orders, key=lambda step: orders[step], reverse=True)[self._keep :]:
            shutil.rmtree(self._path(old), ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the directory as long as this process writes to it, so that what others left half-written can go.

        Raises BlockingIOError if another process writes to it. A file system without locks is taken as it is.
        """
        if not self._is_made:  # one that has gone since then is on a file system that was there
            self.directory.mkdir(exist_ok=True)
            self._is_made = True
        with (self.directory / "run").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BlockingIOError(error.errno, f"another job writes to {self.directory}") from error
            except OSError as error:
                logger.info("%s cannot be locked: %s", self.directory, error)
            yield

    def _remove_partial(self) -> None:
        """Remove what a killed job left half-written, and put back what it was about to replace; under the lock."""
        for path in self.directory.glob("step-*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.directory.glob(f"step-*{_REPLACED}"):
            final = path.with_name(path.name.removesuffix(_REPLACED))
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(final)

    def _path(self, step: int, suffix: str = "") -> Path:
        return self.directory / f"step-{step:08d}{suffix}"

    def _steps(self) -> list[int]:
        """Steps of complete checkpoints, newest first."""
        result = [re.fullmatch(r"step-(\d{8,})", path.name) for path in self.directory.glob("step-*")]
        return sorted((int(match[1]) for match in result if match), reverse=True)

    def _orders(self) -> dict[int, tuple[int, int]]:
        """Sort key of each step, newest last; a directory that is no checkpoint counts as the oldest."""
        orders = {step: (-1, step) for step in self._steps()}
        return orders | {about["step"]: start_order(about["attempt"], about["step"]) for about in self._readable()}

    def _readable(self) -> list[dict[str, Any]]:
        """Raises ThinwireError if another run uses the directory. Earlier releases named no run, as nobody does whose
        name is made up."""
        abouts: list[dict[str, Any]] = []
        for step in self._steps():
            try:
                abouts.append(read_about(self._path(step), step))
            except (OSError, ThinwireError) as error:
                logger.warning("%s is not a checkpoint: %s", self._path(step), error)
        for about in abouts:
            if None not in (own := self._about["run"], about.get("run")) and about["run"] != own:
                raise ThinwireError(
                    f"{self.directory} has checkpoints of run {about['run']!r}, and this is run {own!r}:"
                    f" go on from them with run_id={about['run']!r}, or take a directory that no other run uses"
                )
        return abouts

    def survey(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the descriptions of the checkpoints that rank 0 sees, highest step first, and the steps of those that
        it cannot read; collective. It waits for a running save, and starts the clock of the run.

        Raises ValueError on all ranks if another run uses the directory.
        """
        self.join()
        found = on_all(self._group, lambda: self._found() if self._rank == 0 else ([], []), ValueError)
        return tuple(gather_json(found, self._group)[0])

    def _found(self) -> tuple[list[dict[str, Any]], list[int]]:
        try:
            with self._locked():
                self._remove_partial()
        except OSError as error:
            self._notices.add(f"nothing can be saved to {self.directory}: {describe(error)}")
        readable = self._readable()
        known = {about["step"] for about in readable}
        return readable, [step for step in self._steps() if step not in known]

    def give_up(self) -> None:
        """Set all checkpoints aside, so that no later start goes back to them; collective.

        Raises ThinwireError on all ranks.
        """
        self._on_rank_0(lambda: [self.set_aside(), os.utime(self.directory / "run")])

    def set_aside(self, after: tuple[int, int] = (-1, -1)) -> None:
        """Set aside the checkpoints that are newer than one with that sort key (`start_order`), by default all; not
        collective, for rank 0. Raises OSError."""
        with self._locked():
            for step in [step for step, order in self._orders().items() if order > after]:
                aside = self._path(step, ".given-up")
                shutil.rmtree(aside, ignore_errors=True)
                self._path(step).rename(aside)

    def open(self, about: dict[str, Any]) -> DiskShards:
        """Open the states of a checkpoint listed by `survey`; not collective. Raises ThinwireError for altered ones."""
        reach("disk", self._rank, about["step"])
        return DiskShards(self._path(about["step"]), about)

    def join(self, seconds: float | None = None) -> None:
        """Wait until the running save is done."""
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self, seconds: float | None = None) -> None:
        """Wait until the running save is done, then close; after ``seconds``, break it off."""
        self.join(seconds)
        self._own.shut_down()
        self.join(seconds)
        self._own.destroy()
