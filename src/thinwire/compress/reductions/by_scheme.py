"""Selected elements added up by an exact scheme of `thinwire.sums`, which loses nothing more."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, Parameter
from thinwire.compress.methods.sparsify import Sparsifier
from thinwire.compress.reductions.base import Peers, Phase, Reduction, Result, Stopwatch, Task
from thinwire.compress.wrappers import code_of


@dataclass(frozen=True)
class ByScheme(Reduction):
    """A reduction of ids and values by a scheme, stacked as one sparse vector for each dtype: top-k over ZEN.

    Elements that several ranks selected are added up before they travel on, so bytes follow the union of selections
    and not their sum over the ranks. Coded values are decoded before: a scheme adds plain ones.

    Args:
        name: name of the scheme.
        scheme: the scheme, which `Peers.sparse_sum` runs.
    """

    name: str  # type: ignore[override]  # a class attribute elsewhere
    scheme: object = None  # type: ignore[override]

    def check(self, compressor: Compressor, parameter: Parameter) -> None:
        if not isinstance(code_of(compressor), Sparsifier):
            raise ValueError(
                f"{compressor.name}: a scheme such as {self.name} adds up ids and values, which this compressor does"
                f" not make (parameter {parameter.name!r}): use a sparsifier such as top_k, or leave out .by()"
            )

    def run(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> list[Result]:
        by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
        for index, task in enumerate(tasks):
            by_dtype[task.parameter.working_dtype].append(index)
        results: dict[int, Result] = {}
        for indices in by_dtype.values():
            means = _summed([tasks[index] for index in indices], peers, stopwatch)
            results.update(zip(indices, means, strict=True))
        return [results[index] for index in range(len(tasks))]


def _summed(tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> list[Result]:
    ends = list(accumulate((task.parameter.numel for task in tasks), initial=0))
    counts: list[int] = []
    itemsize = tasks[0].parameter.working_dtype.itemsize

    def prepare() -> tuple[Tensor, Tensor]:
        with stopwatch.phase(Phase.COMPRESS):
            chosen = [_chosen(task) for task in tasks]
            counts.extend(ids.numel() for ids, _ in chosen)
            ids = torch.cat([ids + offset for (ids, _), offset in zip(chosen, ends[:-1], strict=True)])
            return ids, torch.cat([values for _, values in chosen])

    with stopwatch.phase(Phase.EXCHANGE):
        ids, values = peers.sparse_sum(prepare, ends[-1], 1.0 / peers.world_size)
    with stopwatch.phase(Phase.DECOMPRESS):
        flat = torch.zeros(ends[-1], dtype=values.dtype)
        flat[ids] = values
        results = []
        for task, count, (start, stop) in zip(tasks, counts, pairwise(ends), strict=True):
            mean = flat[start:stop].view(task.parameter.shape)
            task.finish(mean)
            results.append(Result(mean, count * (8 + itemsize), count / max(1, task.parameter.numel)))
        return results


def _chosen(task: Task) -> tuple[Tensor, Tensor]:
    payload = task.compress()
    ids, *values = payload.parts
    if len(values) == 1 and values[0].dtype == task.parameter.working_dtype and values[0].shape == ids.shape:
        return ids, values[0]
    return ids, task.compressor.decompress(payload, task.parameter).view(-1)[ids]
