"""Measure a model, its machines and their link in one `Measurement`, the same on all ranks."""

import math
import platform
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import __version__, kernels
from thinwire.comm.agree import broadcast_json, gather_json, gather_numbers
from thinwire.comm.groups import Group
from thinwire.comm.lane import Lane
from thinwire.compress.base import Parameter
from thinwire.gradients.tables import tables_of
from thinwire.lab.planning import cache
from thinwire.lab.planning.cache import Setting, Speeds
from thinwire.lab.planning.calibrate import OnStage, calibrate
from thinwire.lab.planning.codecs import exchanges_of, measure_codec, measure_codes
from thinwire.lab.planning.link import Probe, measure_link, wait_for_all
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.planner import defaults
from thinwire.lab.planning.ready import WARM_STEPS, Ready, StepWatch, TouchedRows, Training, agree, agree_on_rows
from thinwire.lab.planning.speeds import COPIES
from thinwire.lab.planning.tables import EmbeddingTable
from thinwire.observe.step import differences

STEPS = 9
"""Number of training steps that are measured, after those that warm up."""


@dataclass(frozen=True)
class How:
    """Settings of `measure_training`: what to measure, and how.

    Args:
        compressors: texts of `thinwire.compress.named.parse`; None for those that suit the optimizer, see
            `thinwire.lab.planning.planner.defaults`.
        steps: training steps that count.
        link: name of the link in the cache; empty for its address.
        fresh: whether to measure again what is in the cache.
        calibrate: whether to train with the best ways too, for what the timeline leaves out; in the default group only.
    """

    compressors: Sequence[str] | None = None
    steps: int = STEPS
    link: str = ""
    fresh: bool = False
    calibrate: bool = True


def measure_training(
    training: Training, how: How | None = None, process_group: Group = None, on_stage: OnStage = lambda stage: None
) -> Measurement:
    """Train a few steps without synchronization, then measure link and compressors; a collective call.

    The optimizer's steps change the parameters.

    Raises:
        ValueError: one rank; a compressor that is unknown or has no fixed size; a model without gradients.
        LostPeerError: a rank died.

    Example:
        >>> training = Training(model, lambda: next(batches), loss)                     # doctest: +SKIP
        >>> plan = best_plan(measure_training(training))                                # doctest: +SKIP
    """
    how = how or How()
    if training.optimizer is None and how.compressors is None:
        how = replace(how, compressors=defaults(""))  # the SGD that steps it here is ours
    check(how.compressors or ())
    lane = Lane(process_group)
    try:
        on_stage("training steps")
        trained, tables = trained_parameters(training.model)
        watch = _train(training, trained, tables, lane, how.steps)
        measured = finish(lane, watch, trained, tables, how, on_stage)
    finally:
        lane.close()
    if training.optimizer is None:
        measured = replace(measured, optimizer="")
    if not how.calibrate or process_group is not None:
        return measured
    return calibrate(training, measured, how.compressors, on_stage)


def finish(
    lane: Lane, watch: StepWatch, trained: dict[str, Tensor], tables: Collection[str], how: How, on_stage: OnStage
) -> Measurement:
    """Return the measurement of a model whose steps were timed; a collective call.

    Args:
        watch: the stopwatch of these steps, which is closed.
        trained: parameters by name, as the stopwatch has them.
        tables: names of the embedding tables among them.
    """
    times = watch.close()
    names = lane.submit(lambda lane: gather_json(lane.exchange, "optimizers", watch.boundary.optimizers)).wait()
    optimizer = " + ".join(sorted(set(chain(*names))))  # of all ranks: one may have skipped every step
    if how.compressors is None:
        how = replace(how, compressors=defaults(optimizer))
    parameters = tuple(Parameter(name, tuple(tensor.shape), tensor.dtype) for name, tensor in trained.items())
    device = next((tensor.device for tensor in trained.values()), torch.device("cpu"))
    everything: Ready = lane.submit(lambda lane: agree(lane.exchange, times, parameters)).wait()
    num_rows = {name: trained[name].shape[0] for name in trained if name in tables}
    touched = lane.submit(lambda lane: agree_on_rows(lane.exchange, watch.rows, num_rows)).wait()
    ready, measured_tables = _apart(everything, dict(zip(num_rows, touched, strict=True)), watch.sparse)
    counts = lane.submit(lambda lane: gather_numbers(lane.exchange, "backwards", list(watch.counts))).wait()
    passes, synchronizations = (round(max(column)) for column in zip(*counts, strict=True))
    lane.submit(lambda lane: kernels.warm_up()).wait()
    speeds = _speeds(lane, how, device, on_stage)
    assert speeds.link is not None
    on_stage("the code of gradients")
    codes = lane.submit(lambda lane: measure_codes(lane, watch.sample)).wait()
    versions = {"thinwire": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return Measurement(
        world_size=lane.world_size,
        hosts=len(set(lane.exchange.hosts)),
        parameters=ready.parameters,
        backward_seconds=ready.backward_seconds,
        forward_seconds=ready.forward_seconds,
        rest_seconds=ready.rest_seconds,
        link=speeds.link,
        codecs=speeds.codecs,
        tables=tuple(measured_tables),
        dense_codes=codes,
        passes=passes,
        synchronizations=synchronizations,
        optimizer=optimizer,
        device=device.type,
        environment={**versions, "link": how.link},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _apart(
    everything: Ready, touched: dict[str, TouchedRows], sparse: Collection[str]
) -> tuple[Ready, list[EmbeddingTable]]:
    """Split the measured step into the gradients that a plan is about, and the tables."""
    moments = dict(zip(everything.parameters, accumulate(everything.backward_seconds), strict=True))
    tables = []
    for entry in everything.parameters:
        if (name := entry.name) in touched:
            shape = entry.shape[0], math.prod(entry.shape[1:]), entry.dtype
            tables.append(EmbeddingTable(name, *shape, name in sparse, *touched[name], moments[entry]))
    others = tuple(entry for entry in everything.parameters if entry.name not in touched)
    gaps = differences([moments[entry] for entry in others])
    return replace(everything, parameters=others, backward_seconds=gaps), tables


def trained_parameters(module: nn.Module) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Return all trained parameters by name, and the names of the embedding tables among them, which travel as rows."""
    tables = {id(table) for table in tables_of(module)}
    trained: dict[str, Tensor] = {name: entry for name, entry in module.named_parameters() if entry.requires_grad}
    return trained, frozenset(name for name, parameter in trained.items() if id(parameter) in tables)


def check(compressors: Iterable[str]) -> None:
    """Raise ValueError for a compressor that is unknown or whose bytes cannot be predicted."""
    for text in compressors:
        exchanges_of(text)


def begin_together(lane: Lane) -> None:
    """Return when all ranks have called this function."""
    lane.submit(lambda lane: wait_for_all(lane.exchange)).wait()


def _train(
    training: Training, trained: dict[str, Tensor], tables: Collection[str], lane: Lane, steps: int
) -> StepWatch:
    if not trained:
        raise ValueError("the model has no parameters to plan for: are all of them frozen?")
    step = training.stepper()
    watch = StepWatch(training.model, trained, lambda: begin_together(lane), tables)
    for _ in range(WARM_STEPS + steps):
        step()
    return watch


def _speeds(lane: Lane, how: How, device: torch.device, on_stage: OnStage) -> Speeds:
    """Return the speeds of link and compressors: those in rank 0's cache, and measurements of all others."""
    setting = Setting.here(device, lane.world_size, how.link)
    known = Speeds() if how.fresh else _of_first(lane, cache.load(setting) if lane.rank == 0 else Speeds())
    if known.link is None:
        on_stage("the link")
    link = known.link or lane.submit(lambda lane: measure_link(lane, _native(device))).wait()
    codecs = []
    coded = [(text, exchange) for text in how.compressors or () for exchange in exchanges_of(text)]
    for text, exchange in [(COPIES, "all_reduce"), *coded]:
        codec = known.codec(text, exchange)
        if codec is None:
            on_stage(f"{text} by {exchange}" if text else "copies")
            codec = lane.submit(partial(measure_codec, text=text, exchange=exchange, device=device)).wait()
        codecs.append(codec)
    if lane.rank == 0:
        cache.save(setting, known.having(codecs, link))
    return Speeds(link, tuple(codecs))


def _of_first(lane: Lane, mine: Speeds) -> Speeds:
    """Broadcast the speeds of rank 0 to all ranks."""
    known = mine.to_json()
    return Speeds.from_json(lane.submit(lambda lane: broadcast_json(lane.exchange, "speeds", known)).wait())


def _native(device: torch.device) -> Probe | None:
    """Return a probe of DDP's all-reduce on a GPU, or None on a CPU, where the lane's own is probed."""
    if device.type != "cuda":
        return None

    def probe(size: int) -> Callable[[], object]:
        tensor = torch.zeros(size // 4, dtype=torch.float32, device=device)

        def all_reduce() -> None:
            dist.all_reduce(tensor)
            torch.cuda.synchronize(device)

        return all_reduce

    return probe
