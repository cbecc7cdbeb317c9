"""The state of a synchronization that survives a restart: in a file a rank, or of all ranks in one file.

See `thinwire.Synchronizer.state_dict` and `thinwire.Synchronizer.gathered`.
"""

import copy
import io
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thinwire.comm.agree import gather_json
from thinwire.comm.channel import Draft, Subject
from thinwire.comm.lane import Lane
from thinwire.compress.state import redistribute
from thinwire.errors import ThinwireError
from thinwire.gradients.compressed import CompressedSync
from thinwire.gradients.exact import GradientSync
from thinwire.gradients.steps.dense import DenseChoice
from thinwire.gradients.steps.execution import Execution
from thinwire.rows.formats import Format, Kind

T = TypeVar("T")


class Gathered:
    """The states of all ranks as one object with a state dict, see `thinwire.Synchronizer.gathered`.

    Args:
        save: returns the state of this rank.
        load: restores it.
        number: of this rank among those that train as one with it, and that have files in the same folder.
    """

    def __init__(
        self, lane: Lane, save: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None], number: int = 0
    ) -> None:
        self._lane, self._save, self._load, self._number = lane, save, load, number
        self._global_ranks: Sequence[int] = ()  # of the last gather, for messages

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, which writes them, and none on the others. All ranks call it.

        Raises:
            ThinwireError: a rank could not make its state; on all ranks.
        """
        received = self._swapped([self._together("packing states", lambda: packed(self._save()), ThinwireError)])
        return {"ranks": received if self._lane.rank == 0 else []}

    def of_rank_0(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank loads of the state dict that rank 0 passes, for nodes that do not share a disk.

        All ranks call it. Each receives its own state and no other.

        Raises:
            ValueError: as `load_state_dict`, on all ranks.
        """
        has_states = self._lane.rank == 0 and bool(state)
        parts = self._together("reading states", lambda: self._for_each_rank(state) if has_states else [])
        if not self._gather("whether rank 0 has states", has_states)[0]:
            return {}
        received = self._swapped(parts)
        return {"ranks": [received[0] if rank == self._lane.rank else None for rank in range(self._lane.world_size)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state from those that rank 0 wrote; all ranks call it.

        Where compression has another number of ranks than before, its memories are redistributed, see
        `thinwire.compress.redistribute`.

        Raises:
            ValueError: as `thinwire.Synchronizer.load_state_dict`; or a state that another rank than 0 wrote.
        """
        self._load(unpacked(self._for_each_rank(state)[self._lane.rank]))

    def save_files(self, folder: str | Path) -> None:
        """Write the state of each rank to a file of its own, such as ``thinwire-00003.pt``. All ranks call it.

        No state is sent, and the files of all ranks are complete when it returns. Ranks may share the folder, or have
        disks of their own. Files that more ranks have left in the folder are removed.

        Raises:
            ThinwireError: a rank could not write its file; on all ranks.
        """
        mark = self._gather("mark of a checkpoint", secrets.randbits(48))[0]
        path, error = Path(folder) / file_name(self._lane.rank, self._number), ""
        unfinished = path.with_suffix(".part")
        try:
            state = self._save()
            content = {"rank": self._lane.rank, "world_size": self._lane.world_size, "mark": mark, "state": state}
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, unfinished)
            unfinished.replace(path)
            for other in path.parent.glob(f"thinwire-{5 * '[0-9]'}{path.name[len('thinwire-00000') :]}"):
                if other.name > file_name(self._lane.world_size - 1, self._number):  # left by more ranks than these
                    other.unlink(missing_ok=True)
        except Exception as failure:  # torch raises RuntimeError on a full disk; others wait for this rank's word
            error = f"cannot write {path}: {failure}"
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
        self._raise_first("writing states", error, ThinwireError)

    def load_files(self, folder: str | Path | None) -> bool:
        """Restore what `save_files` wrote; return False if no rank has a file. All ranks call it.

        A rank reads its own file, and no state is sent. If the number of ranks has changed, rank 0 reads all files,
        redistributes memories, and sends each rank its state.

        Args:
            folder: where this rank looks; None if it has no such folder.

        Raises:
            ValueError: a rank has no file, or one of another checkpoint, or cannot restore its state; on all ranks, and
                none has restored its own.
        """
        rank, world_size = self._lane.rank, self._lane.world_size
        saved, error = None, ""
        try:
            saved = None if folder is None else _read(Path(folder) / file_name(rank, self._number), rank)
        except Exception as failure:  # whatever torch and pickle raise for a damaged file
            error = f"cannot read {file_name(rank, self._number)} in {folder}: {failure}"
        own = None if saved is None else [saved["world_size"], saved["mark"]]
        gathered = self._gather("checkpoints that ranks have", own)
        there = [one for one in gathered if one is not None]
        saved_by, mark = there[0] if there else (0, 0)
        cure = "or delete thinwire-*.pt on all nodes to go on without these states"
        if own is None and saved_by == world_size and not error:
            error = (
                f"no {file_name(rank, self._number)} in {folder or 'a folder of this checkpoint'}, and {len(there)} of"
                f" {world_size} ranks have theirs: copy it from the node where it was written, {cure}"
            )
        elif own is not None and own != [saved_by, mark]:
            error = (
                f"{file_name(rank, self._number)} in {folder} is of another checkpoint than the file of rank"
                f" {self._global_ranks[gathered.index(there[0])]}: copy it from the node where it was written, {cure}"
            )
        self._raise_first("reading states", error, ValueError)
        if not there:
            return False
        if saved_by == world_size:
            assert saved is not None
            self._restore(lambda: self._load(saved["state"]))
        else:
            self.load_of_rank_0({"ranks": self._all_files(folder, saved_by, mark)})
        return True

    def load_of_rank_0(self, state: dict[str, Any]) -> bool:
        """Restore the states of all ranks from what rank 0 read, or return False if that is nothing; on all ranks.

        Raises:
            ValueError: as `load_state_dict`; on all ranks, and none has restored its state.
        """
        mine = self.of_rank_0(state)
        if mine:
            self._restore(lambda: self.load_state_dict(mine))
        return bool(mine)

    def _restore(self, load: Callable[[], None]) -> None:
        """Load on all ranks, or on none."""
        loaded: list[dict[str, Any]] = []  # over the state that was there before

        def attempt() -> None:
            before = copy.deepcopy(self._save())
            load()
            loaded.append(before)

        try:
            self._together("restoring states", attempt)
        except ValueError:
            for before in loaded:
                self._load(before)
            raise

    def _all_files(self, folder: str | Path | None, saved_by: int, mark: int) -> list[Tensor]:
        """Return on rank 0 the states that another number of ranks wrote."""

        def read() -> list[Tensor]:
            try:
                saved = [_read(Path(str(folder)) / file_name(rank, self._number), rank) for rank in range(saved_by)]
                if not all(one is not None and one["mark"] == mark for one in saved):
                    raise ValueError("not all of them are there")
                return [packed(one["state"]) for one in saved if one is not None]
            except Exception as failure:
                raise ValueError(
                    f"{saved_by} ranks saved this checkpoint, and there are {self._lane.world_size} now: rank"
                    f" {self._global_ranks[0]} needs thinwire-*.pt of all {saved_by} in {folder}: {failure}"
                ) from failure

        return self._together("reading states", lambda: read() if self._lane.rank == 0 else [])

    def _for_each_rank(self, state: Mapping[str, Any]) -> list[Tensor]:
        """Return the states for this number of ranks, from those that any number of ranks saved."""
        world_size, ranks = self._lane.world_size, state.get("ranks")
        if not ranks:
            raise ValueError(
                "no states of all ranks in it: rank 0 writes them, and this is what one rank has for itself"
            )
        if len(ranks) == world_size:
            return list(ranks)
        states = [unpacked(entry) for entry in ranks]
        parts = [state.get("averager", state) for state in states]  # that of an outer loop is a part
        each = parts[:1] * world_size if parts[0]["compress"] is None else redistribute(parts, world_size)
        return [packed({**states[0], "averager": part} if "averager" in states[0] else part) for part in each]

    def _together(self, what: str, make: Callable[[], T], kind: type[Exception] = ValueError) -> T:
        """Return what ``make`` returns; whatever it raises on one rank, for whose word the others wait, all raise."""
        made, error = [], ""
        try:
            made = [make()]
        except Exception as failure:
            error = str(failure) or type(failure).__name__
        self._raise_first(what, error, kind)
        return made[0]

    def _raise_first(self, what: str, error: str, kind: type[Exception]) -> None:
        """Raise the error of the first rank that has one, on all ranks."""
        errors = self._gather(f"errors of {what}", error)
        first = next((rank for rank, text in enumerate(errors) if text), None)
        if first is not None:
            others = sum(map(bool, errors)) - 1
            raise kind(
                f"rank {self._global_ranks[first]}: {errors[first]}" + f" (and {others} more ranks)" * (others > 0)
            )

    def _gather(self, what: str, value: object) -> list[Any]:
        def gather(lane: Lane) -> list[Any]:
            self._global_ranks = lane.exchange.global_ranks
            with lane.setting_up():
                return gather_json(lane.exchange, what, value)

        return self._lane.submit(gather).wait()

    def _swapped(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send parts to as many ranks, and nothing to the others; return what each rank sent here."""
        nothing = [torch.empty(0, dtype=torch.uint8)] * (self._lane.world_size - len(parts))
        return self._lane.submit(lambda lane: _swap(lane, [*parts, *nothing])).wait()


def _swap(lane: Lane, parts: Sequence[Tensor]) -> list[Tensor]:
    """Send each rank its part in a job of the lane; return those that ranks sent here, as bytes that nobody reads."""

    def drafts() -> list[Draft]:  # payloads are words of 8 bytes
        return [Draft(Format.COO, 0, nn.functional.pad(part, (0, -part.numel() % 8))) for part in parts]

    received = []
    with lane.setting_up():  # no gradients
        numbers = lane.channel(Subject("bytes of states", "1 number for each rank"))
        sizes = [int(of_rank[lane.rank]) for of_rank in numbers.gather_numbers([part.numel() for part in parts])]
        channel = lane.channel(Subject("the states of ranks", f"{len(sizes)} states"))
        for message, size in zip(channel.swap(Kind.GATHER, drafts, max(sizes) + 7), sizes, strict=True):
            with channel.reading(message):
                received.append(message.payload[:size].clone())
    return received


def file_name(rank: int, number: int = 0) -> str:
    """Return the name of the file that `Gathered.save_files` writes on a rank."""
    return f"thinwire-{rank:05}.pt" if number == 0 else f"thinwire-{rank:05}-{number}.pt"


def _read(path: Path, rank: int) -> dict[str, Any] | None:
    """Return the content of a file of `Gathered.save_files`, or None if it is not there."""
    if not path.is_file():
        return None
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if saved["rank"] != rank:
        raise ValueError(f"it is the state of rank {saved['rank']}")
    return saved


def packed(state: dict[str, Any]) -> Tensor:
    """Return a state as bytes, for `unpacked`."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpacked(state: Tensor) -> dict[str, Any]:
    """Return the state of `packed`, which may come from elsewhere: numbers, texts and tensors, on the host."""
    content: dict[str, Any] = torch.load(io.BytesIO(bytes(state.cpu().numpy())), map_location="cpu", weights_only=True)
    return content


VERSION = 3


def saved(
    steps: int,
    names: Iterable[str],
    gradients: GradientSync,
    compressed: CompressedSync | None,
    execution: Execution | None,
    choice: DenseChoice | None = None,
) -> dict[str, Any]:
    """Return the state; ``names`` are the names of all parameters of the model."""
    return {
        "version": VERSION,
        "steps": steps,
        "parameters": sorted(names),
        "choices": dict(gradients.choices),
        "pauses": dict(gradients.pauses),
        "unions": dict(gradients.unions),
        "auto": gradients.learned(),
        "compress": None if compressed is None else compressed.memories.state_dict(),
        "plan": None if execution is None else execution.state_dict(),
        "dense": None if choice is None else choice.state_dict(),
    }


def check(
    state: Mapping[str, Any], names: Iterable[str], compressed: CompressedSync | None, execution: Execution | None
) -> None:
    """Raise ValueError if `restore` cannot restore the state."""
    if state.get("version") != VERSION:
        raise ValueError(f"a state of version {state.get('version')!r}; this thinwire reads {VERSION}")
    unknown = set(state["parameters"]) ^ set(names)
    if unknown:
        raise ValueError(f"the state belongs to a model with other parameters; {min(unknown)!r} is only in one of them")
    if (state["compress"] is None) != (compressed is None):
        before, here = ("without", "with") if state["compress"] is None else ("with", "without")
        raise ValueError(f"the state was saved {before} compression, and attach was called {here} it")
    if compressed is not None:
        compressed.memories.check_state(state["compress"])
    if execution is not None and state["plan"] is not None:
        execution.check_state(state["plan"])


def restore(
    state: Mapping[str, Any],
    gradients: GradientSync,
    compressed: CompressedSync | None,
    execution: Execution | None,
    choice: DenseChoice | None = None,
) -> None:
    """Restore the result of `saved`, after `check`."""
    if execution is not None and state["plan"] is not None:
        execution.load_state_dict(state["plan"])
    if compressed is not None:
        compressed.memories.load_state_dict(state["compress"])
    gradients.choices = {name: str(scheme) for name, scheme in state["choices"].items()}
    gradients.pauses = {name: int(steps) for name, steps in state["pauses"].items()}
    gradients.unions = {name: int(rows) for name, rows in state["unions"].items()}
    gradients.recall(state.get("auto"))
    if choice is not None and state.get("dense") is not None:
        choice.load_state_dict(state["dense"])
