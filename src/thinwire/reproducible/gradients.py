"""The gradients of a model: micro-batches in, exact sums, and their mean over all ranks out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.agree import gather_bytes
from thinwire.comm.channel import Subject
from thinwire.comm.lane import Lane
from thinwire.errors import CorruptMessageError, MismatchError
from thinwire.reproducible.digests import of_tensors
from thinwire.reproducible.exact import ExactSum
from thinwire.reproducible.owned import ExactMean
from thinwire.rows import floats
from thinwire.rows.sparse import Layout, SparseRows
from thinwire.sums import owners
from thinwire.sums.lossless import Half

NONE, DENSE, SPARSE, FROZEN = "-dsf"
TERMS_AT_ONCE = 1 << 20
"""Most terms of a message, of 16 bytes: a model in float64 can have one for each value."""


class Gradients:
    """Exact sums of the gradients of a model's micro-batches.

    They take 8 bytes for each element of a parameter with dense gradients, and 16 for each addition that float64 does
    not hold; of a table with sparse gradients the rows of this rank's micro-batches are kept as they are.

    Args:
        count: number of micro-batches of a step.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise ValueError("the model has a DistributedDataParallel, which sums gradients itself: pass its module")
        self._model, self._count = model, count
        tables = (one for one in model.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse)
        weights = (dict(table.named_parameters(recurse=False)).get("weight") for table in tables)
        self._tables = {id(weight) for weight in weights if weight is not None}  # one that is parametrized is computed
        self._norms = [(name, one) for name, one in model.named_modules() if hasattr(one, "track_running_stats")]
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "device_mesh") or not parameter.is_floating_point():
                kind = f"{type(parameter).__name__} of {parameter.dtype}"
                raise ValueError(f"parameter {name} is a {kind}: only whole ones of a real dtype can be summed")
        if (first := next(model.parameters(), None)) is None:
            raise ValueError("the model has no parameters")
        self.device = first.device
        self.push, self.pull, self.inexact = Half(), Half(), 0
        self._sums: dict[torch.dtype, ExactSum] = {}
        self._codes = False  # whether all ranks read codes in this step
        self._check_norms()
        self.clear()

    def describe(self) -> Iterator[str]:
        """Yield a line for each parameter and buffer, for ranks to agree on."""
        for name, tensor in self._tensors().items():
            yield f"{name}: {tuple(tensor.shape)}, {tensor.dtype}"

    def state(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        return {name: tensor.detach().cpu() for name, tensor in self._tensors().items()}

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(state[name])

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    # --- micro-batches

    def clear(self) -> None:
        """Begin a step."""
        self._trained = [(name, entry) for name, entry in self._model.named_parameters() if entry.requires_grad]
        sizes: dict[torch.dtype, int] = {}
        self._starts: dict[str, int] = {}
        for name, parameter in self._trained:
            if id(parameter) not in self._tables:
                self._starts[name] = sizes.get(parameter.dtype, 0)
                sizes[parameter.dtype] = self._starts[name] + parameter.numel()
        self._sums = {dtype: _emptied(self._sums.get(dtype), size, self.device) for dtype, size in sizes.items()}
        self._pieces: dict[str, list[SparseRows]] = {}
        self._kinds = {name: NONE if one.requires_grad else FROZEN for name, one in self._model.named_parameters()}
        self._written: dict[str, str] = {}
        self._means: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Begin a micro-batch."""
        self._check_norms()
        for _, parameter in self._trained:
            parameter.grad = None
        self._versions = {name: (id(buffer), buffer._version) for name, buffer in self._model.named_buffers()}

    def add(self) -> None:
        """Add the gradients of a micro-batch; none if that raises, as it may be made again."""
        self._check_buffers()
        for name, parameter in self._trained:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            kind = SPARSE if gradient.is_sparse else DENSE
            if self._kinds[name] not in (NONE, kind) or (kind == DENSE and name not in self._starts):
                raise ValueError(f"parameter {name} has sparse gradients and dense ones: only one kind can be summed")
            self._kinds[name] = kind
            if kind == SPARSE:
                self._pieces.setdefault(name, []).append(_layout(parameter).rows(gradient))
            else:
                self._sums[parameter.dtype].add(gradient.detach().reshape(-1).to(self.device), self._starts[name])

    def fingerprint(self) -> str:
        """Return a digest of the gradients of a micro-batch, before they are added."""
        return of_tensors((name, parameter.grad) for name, parameter in self._trained)

    def _check_norms(self) -> None:
        for name, module in self._norms:
            if module.training and module.track_running_stats:
                raise ValueError(
                    f"{name} is a {type(module).__name__}, whose running statistics depend on which micro-batches"
                    " a rank sees: take GroupNorm or LayerNorm, or track_running_stats=False, or put it into eval()"
                )

    def _check_buffers(self) -> None:
        """Raise ValueError if a forward writes a buffer, unless each writes the same."""
        for name, buffer in self._model.named_buffers():
            if self._versions.get(name) != (id(buffer), buffer._version):
                now = of_tensors([(name, buffer)])
                if self._written.setdefault(name, now) != now:
                    raise ValueError(
                        f"buffer {name} is written by forward, and depends on which micro-batches a rank sees: leave"
                        " it as it is while training, or write the same in each forward"
                    )

    # --- the mean

    def status(self) -> dict[str, Any]:
        """Return what all ranks have to know before `exchange`."""
        codes = floats.is_compiled()
        return {"kinds": "".join(self._kinds.values()), "written": self._written, "codes": codes}

    def exchange(self, lane: Lane | None, statuses: Sequence[Mapping[str, Any]], number: int) -> None:
        """Make the mean of all ranks, as a job of the lane, or that of this one; sums stay as they are."""
        kinds = self._agreed(statuses)
        self._codes = all(status["codes"] is True for status in statuses)
        if set(kinds.values()) <= {NONE, FROZEN}:
            raise ValueError(
                f"step {number} has no gradients: call backward() for each micro-batch within the loop over the step,"
                " before the next one is asked for; list(step) does not work"
            )
        means = {
            dtype: self._mean(lane, total, dtype, f"{dtype} gradients of step {number}")
            for dtype, total in self._sums.items()
        }
        self._means = {}
        for name, parameter in self._trained:
            if kinds[name] == DENSE:
                start = self._starts[name]
                self._means[name] = means[parameter.dtype][start : start + parameter.numel()].view(parameter.shape)
            elif kinds[name] == SPARSE:
                self._means[name] = self._table_mean(lane, name, parameter, number)

    def deliver(self) -> None:
        """Store the mean in ``.grad``."""
        for name, parameter in self._trained:
            parameter.grad = self._means[name].to(parameter.device) if name in self._means else None
        self._means = {}

    def deliver_zeros(self) -> None:
        """Store gradients of zero, for a step that others have made."""
        for _, parameter in self._trained:
            is_table = id(parameter) in self._tables
            parameter.grad = torch.zeros_like(parameter, layout=torch.sparse_coo if is_table else None)

    def _agreed(self, statuses: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the kind of gradient of each parameter, over all ranks; raise on all of them where they disagree."""
        found = {}
        for name, *kinds in zip(self._kinds, *(status["kinds"] for status in statuses), strict=True):
            several = set(kinds) - {NONE}
            if FROZEN in several and set(kinds) != {FROZEN}:
                raise MismatchError(
                    f"parameter {name} is trained on some ranks and frozen on others: freeze it by step.number,"
                    " before the loop over micro-batches"
                )
            if len(several) > 1:
                raise MismatchError(f"parameter {name} has sparse gradients on some ranks and dense ones on others")
            found[name] = several.pop() if several else NONE
        written: dict[str, str] = {}
        for name, text in (item for status in statuses for item in status["written"].items()):
            if written.setdefault(name, text) != text:
                raise ValueError(
                    f"buffer {name} is written by forward, and ranks have written different values: leave it as it is"
                    " while training, or write the same in each forward"
                )
        return found

    def _mean(self, lane: Lane | None, total: ExactSum, dtype: torch.dtype, what: str) -> Tensor:
        self.inexact += sum(ids.numel() for ids, _ in total.terms)
        if lane is None or lane.world_size == 1:
            return total.mean(self._count, dtype).cpu()
        terms = _gathered_terms(lane, what, total)
        channel = lane.channel(Subject(what, f"{total.values.numel()} values, the mean of {self._count}"))
        out = torch.empty(total.values.shape, dtype=dtype)
        channel.open()
        code = ExactMean(total, self._count, out, channel, self.push, self.pull, terms, self._codes)
        owners.begin(code, channel)()
        return out

    def _table_mean(self, lane: Lane | None, name: str, parameter: Tensor, number: int) -> Tensor:
        """Return the mean of the sparse gradients of a table: first all ranks learn which rows any of them has."""
        layout, pieces = _layout(parameter), self._pieces.get(name, [])
        ids = torch.cat([piece.ids.cpu() for piece in pieces] or [torch.empty(0, dtype=torch.int64)]).unique()
        if lane is not None and lane.world_size > 1:
            what = f"rows of {name} in step {number}"
            gathered = gather_bytes(lane.exchange, what, ids.numpy().tobytes())
            ids = torch.cat([_words(data, what) for data in gathered]).unique()
            if ids.numel() and not 0 <= int(ids[0]) <= int(ids[-1]) < layout.num_rows:
                raise CorruptMessageError(f"{what}: a row that the table does not have")
        total = ExactSum(torch.zeros(ids.numel() * layout.width, dtype=torch.float64))
        for piece in pieces:
            rows = torch.zeros(ids.numel(), layout.width, dtype=parameter.dtype)
            rows[torch.searchsorted(ids, piece.ids.cpu())] = piece.values.cpu()
            total.add(rows.view(-1))
        mean = self._mean(lane, total, parameter.dtype, f"rows of {name} in step {number}")
        return layout.tensor(SparseRows.trusted(ids, mean.view(ids.numel(), layout.width), layout.num_rows))


def _layout(table: Tensor) -> Layout:
    """Return how sparse gradients of a table are rows."""
    return Layout(tuple(table.shape), 1)


def _emptied(known: ExactSum | None, size: int, device: torch.device) -> ExactSum:
    """Return a sum of zeros, in the memory of an earlier one if that fits."""
    if known is None or known.values.numel() != size:
        return ExactSum(torch.zeros(size, dtype=torch.float64, device=device))
    return ExactSum(known.values.zero_())


def _gathered_terms(lane: Lane, what: str, total: ExactSum) -> list[tuple[Tensor, Tensor]]:
    """Return the terms of the sums of all ranks, which have few."""
    ids = torch.cat([ids.cpu() for ids, _ in total.terms] or [torch.empty(0, dtype=torch.int64)])
    terms = torch.cat([terms.cpu() for _, terms in total.terms] or [torch.empty(0, dtype=torch.float64)])
    most, start, pairs, more = 16 * TERMS_AT_ONCE, 0, list[tuple[Tensor, Tensor]](), True
    while more:
        part = slice(start, start + TERMS_AT_ONCE)
        mine = ids[part].numpy().tobytes() + terms[part].numpy().tobytes()
        gathered, start = gather_bytes(lane.exchange, f"terms of {what}", mine, most), part.stop
        more = max(map(len, gathered)) == most  # as all ranks see
        for data in gathered:
            theirs, values = _words(data, what, 16).view(2, -1)
            if theirs.numel() and not 0 <= int(theirs.min()) <= int(theirs.max()) < total.values.numel():
                raise CorruptMessageError(f"{what}: a term of an element that is not there")
            pairs.append((theirs, values.view(torch.float64)))
    return pairs


def _words(data: bytes, what: str, size: int = 8) -> Tensor:
    if len(data) % size:
        raise CorruptMessageError(f"{what}: {len(data)} bytes are no words of {size}")
    return torch.frombuffer(bytearray(data), dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64)
