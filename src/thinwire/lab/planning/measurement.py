"""The frozen `Measurement`: all that planning needs to know of a model, its machines and their link. A JSON file."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Self

import torch

from thinwire.comm.hosts import Hosts
from thinwire.compress.base import Parameter
from thinwire.lab.planning.costs import Costs, coded_costs, exact_costs, lossless_costs
from thinwire.lab.planning.speeds import COPIES, Codec, DenseCode, Extra, MeasuredLink
from thinwire.lab.planning.tables import EmbeddingTable, RowJob, row_jobs
from thinwire.observe.step import differences
from thinwire.plan.plan import STOCK, fingerprint
from thinwire.plan.profile import Linear, Profile

VERSION = 1
DOUBTFUL = 0.3
"""Relative residual of a fit above which the machine was probably busy with something else."""

BELIEVED = 0.15
"""Largest share of the timeline by which a training may be faster: more is a measurement that went wrong."""

_PLAIN = (
    "version", "world_size", "hosts", "device", "created", "environment", "forward_seconds", "rest_seconds", "passes",
    "synchronizations", "optimizer",
)  # fmt: skip
"""Fields that are in the file as they are."""
_HOW = "measure with `thinwire plan --measure --measurement measured.json`"


@dataclass(frozen=True)
class DdpSite:
    """The `DistributedDataParallel` of a measured script, and the line that builds it.

    Args:
        buckets: names of the parameters in each bucket, in the order in which buckets are sent.
        file, line: where it is built.
        target: the variable that holds it, such as ``ddp``; empty if the line does not say.
        call: text of the call that builds it, such as ``DDP(model)``; empty if the line does not say.
        grouped_call: the same with ``bucket_cap_mb_list=plan.bucket_cap_mb_list()``.
        follows_plans: whether its buckets can be the jobs of a plan: without ``find_unused_parameters``.
        last_line: the line where the statement ends.
        inner_line: where a function that returns the model builds it; 0 if ``line`` itself does.
        others: number of further DDP models of the script, which are not measured.
        left_out: lines of the script that were not run, such as its own ``thinwire.attach``.
        scaler: the variable that holds the ``GradScaler`` by which the optimizer steps, ``scaler`` if that is not
            known; empty if nothing scales the loss.
    """

    buckets: tuple[tuple[str, ...], ...] = ()
    file: str = ""
    line: int = 0
    target: str = ""
    call: str = ""
    grouped_call: str = ""
    follows_plans: bool = False
    last_line: int = 0
    inner_line: int = 0
    others: int = 0
    left_out: tuple[str, ...] = ()
    scaler: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", tuple(map(tuple, self.buckets)))
        object.__setattr__(self, "left_out", tuple(self.left_out))
        object.__setattr__(self, "last_line", max(self.line, self.last_line))


@dataclass(frozen=True)
class Measurement:
    """The measurements of a group of ranks, all of them measured at once.

    Args:
        world_size: number of ranks.
        hosts: number of machines.
        parameters: trained parameters without embedding tables, in the order in which gradients are ready.
        backward_seconds: seconds of each from the gradient before it to its own.
        forward_seconds: seconds of the model's forward.
        rest_seconds: seconds from the last gradient to the next forward, such as the optimizer's.
        link: costs of the collectives of the ranks.
        codecs: costs of compressors on this device; that of `COPIES` is among them.
        tables: embedding tables, whose gradients `thinwire.attach` sends as rows. No plan is about them.
        device: type of the model's device.
        environment: notes for people: versions, host, the nominal link.
        created: time as ISO 8601.
        extras: errors of the timeline in training; see `thinwire.lab.planning.calibrate`.
        dense_codes: what the lossless code achieves on the gradients, by dtype; empty if it was not measured.
        ddp: the DDP model of a script; None for a plain module, which DDP would wrap with its default buckets.
        passes: backwards of a step, such as accumulated batches make.
        synchronizations: how many of them are synchronized; ``backward_seconds`` belong to one pass.
        optimizer: types of torch's optimizers of the model, such as "AdamW"; empty if that is not known.
        version: version of this format.

    Raises:
        ValueError: missing tensors, times that are negative or infinite, one rank, no codec for exact gradients.
    """

    world_size: int
    parameters: tuple[Parameter, ...]
    backward_seconds: tuple[float, ...]
    forward_seconds: float
    rest_seconds: float
    link: MeasuredLink
    codecs: tuple[Codec, ...]
    hosts: int = 1
    tables: tuple[EmbeddingTable, ...] = ()
    device: str = "cpu"
    environment: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    extras: tuple[Extra, ...] = ()
    ddp: DdpSite | None = None
    dense_codes: tuple[DenseCode, ...] = ()
    passes: int = 1
    synchronizations: int = 1
    optimizer: str = ""
    version: int = VERSION

    def __post_init__(self) -> None:
        for name in ("parameters", "backward_seconds", "codecs", "tables", "extras", "dense_codes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.version != VERSION:
            raise ValueError(f"the measurement has version {self.version}, and it should be {VERSION}: {_HOW} again")
        if self.world_size < 2 or not 1 <= self.hosts <= self.world_size:
            raise ValueError(
                f"a measurement of {self.world_size} ranks on {self.hosts} hosts: two ranks are needed, because one has"
                " nobody to synchronize with"
            )
        self._check_tensors()
        self.codec(COPIES, "all_reduce")

    def _check_tensors(self) -> None:
        if not (self.parameters or self.tables):
            raise ValueError("the model has no gradients to plan for: are all of its parameters frozen?")
        if len(self.backward_seconds) != len(self.parameters):
            raise ValueError(
                f"{len(self.backward_seconds)} backward times for {len(self.parameters)} parameters: tensors are"
                f" missing; {_HOW} again"
            )
        names = [parameter.name for parameter in self.parameters]
        if len(set(names)) < len(names):
            raise ValueError(f"a parameter was measured twice; {_HOW} again")
        if not 1 <= self.synchronizations <= self.passes:
            raise ValueError(
                f"{self.synchronizations} synchronizations of {self.passes} backwards a step; {_HOW} again"
            )
        times = {"forward_seconds": self.forward_seconds, "rest_seconds": self.rest_seconds}
        if not all(math.isfinite(extra.seconds) for extra in self.extras):
            raise ValueError(f"the difference from the timeline is no time; {_HOW} again")
        times |= {f"backward of {name!r}": time for name, time in zip(names, self.backward_seconds, strict=True)}
        for what, seconds in times.items():
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise ValueError(f"{what} took {seconds} s, which is no time; {_HOW} again")

    @property
    def size_bytes(self) -> tuple[int, ...]:
        """Bytes of each gradient that a plan is about."""
        return tuple(parameter.numel * parameter.dtype.itemsize for parameter in self.parameters)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def ready_seconds(self) -> tuple[float, ...]:
        """Seconds from the start of backward until each gradient is ready."""
        return tuple(accumulate(self.backward_seconds))

    @property
    def pass_seconds(self) -> float:
        """Seconds of one synchronized backward, with the gradients of tables."""
        return max([math.fsum(self.backward_seconds), *(table.ready_seconds for table in self.tables)])

    @property
    def all_backward_seconds(self) -> float:
        """Seconds of all synchronized backwards of a step."""
        return self.synchronizations * self.pass_seconds

    @cached_property
    def row_jobs(self) -> tuple[RowJob, ...]:
        """The jobs in which `thinwire.attach` sends the tables."""
        return row_jobs(self.tables, self.link, self.alike)

    @property
    def alike(self) -> Hosts:
        """Ranks of each host, if all hosts have as many; else nothing."""
        per_host, rest = divmod(self.world_size, self.hosts)
        ranks = range(self.world_size)
        return () if rest else tuple(tuple(ranks[first : first + per_host]) for first in ranks[::per_host])

    @property
    def other_seconds(self) -> float:
        """Seconds of a step outside of backward."""
        return self.forward_seconds + self.rest_seconds

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the model, as in a `thinwire.Plan` for it."""
        return fingerprint(self.parameters)

    def codec(self, compressor: str, exchange: str) -> Codec:
        """Return the measured costs of a compressor by an exchange.

        Raises:
            ValueError: they were not measured; the message says which were.
        """
        for codec in self.codecs:
            if (codec.compressor, codec.exchange) == (compressor, exchange):
                return codec
        legal = ", ".join(f"{codec.compressor} by {codec.exchange}" for codec in self.codecs if codec.compressor)
        what = f"{compressor} by {exchange}" if compressor else "copying gradients that are not compressed"
        raise ValueError(f"{what} was not measured ({legal or 'no compressor'} was): {_HOW} with it")

    def extra_seconds(self, compressor: str | None, exchange: str) -> float:
        """Return the seconds of a step beyond its timeline, or 0 if it was not trained with this compressor.

        Args:
            compressor: None for exact gradients; `STOCK` for DDP's, which default to the exact ones.
        """
        known = {(extra.compressor, extra.exchange): extra.seconds for extra in self.extras}
        exact = known.get((COPIES, exchange), 0.0)
        return known.get((compressor or COPIES, exchange), exact if compressor == STOCK else 0.0)

    def exchanges(self, compressor: str) -> tuple[str, ...]:
        """Return the exchanges by which a compressor was measured."""
        return tuple(codec.exchange for codec in self.codecs if codec.compressor == compressor)

    def costs(self, compressor: str | None = None, exchange: str = "all_reduce") -> Costs:
        """Return the costs of any group, on the lane.

        Raises:
            ValueError: the compressor was not measured, or its bytes depend on the gradients.
        """
        copies = self.codec(COPIES, "all_reduce")
        if compressor is None:
            return exact_costs(self.parameters, self.link, copies, self.world_size)
        codec = self.codec(compressor, exchange)
        return coded_costs(self.parameters, self.link, copies, codec, self.world_size)

    def lossless_costs(self) -> Costs:
        """Return the costs of any group that is summed losslessly, where `dense_codes` were measured."""
        copies = self.codec(COPIES, "all_reduce")
        return lossless_costs(self.parameters, self.link, copies, self.dense_codes, self.world_size)

    def profile(
        self, compressor: str | None = None, exchange: str = "auto", on: Literal["lane", "compute"] = "lane"
    ) -> Profile:
        """Return costs as lines over the bytes of uncompressed gradients, for fusion policies and the timeline.

        A line is independent of tensors: it has the mean rate of this model, including small exact gradients.
        `costs` prices any group exactly.

        Args:
            compressor: a measured one, or None for exact all-reduces.
            exchange: a measured one; "auto" chooses the fastest.
            on: "lane" puts encoding and decoding on the channel, as thinwire runs on a CPU; "compute" puts them on the
                stream of backward, as in the papers.

        Raises:
            ValueError: the compressor was not measured, or its bytes depend on the gradients.
        """
        if compressor is None:
            exchange = "all_reduce"
        elif exchange == "auto":
            exchange = self.fastest_exchange(compressor)
        return self.profile_of(self.costs(compressor, exchange), on)

    def profile_of(self, costs: Costs, on: Literal["lane", "compute"] = "lane") -> Profile:
        """Return costs as lines over bytes; see `profile`."""
        total = max(1, sum(self.size_bytes))
        wire = costs.wire_seconds / total
        encode = math.fsum(tensor.encode_seconds for tensor in costs.tensors) / total
        decode = math.fsum(tensor.decode_seconds for tensor in costs.tensors) / total
        free = Linear(0.0, 0.0)
        lane = on == "lane"
        return Profile(
            self.backward_seconds,
            self.size_bytes,
            free if lane else Linear(0.0, encode),
            free if lane else Linear(0.0, decode),
            Linear(costs.group_seconds, encode + wire + decode if lane else wire),
            self.names,
            self.other_seconds,
        )

    def fastest_exchange(self, compressor: str) -> str:
        """Return the fastest measured exchange of a compressor, for all gradients at once."""
        everything = range(len(self.parameters))
        exchanges = self.exchanges(compressor)
        if not exchanges:
            self.codec(compressor, "auto")  # its error lists what was measured
        return min(exchanges, key=lambda exchange: self.costs(compressor, exchange).seconds(everything))

    def doubts(self) -> list[str]:
        """Return names of doubtful measurements.

        They are those where half of the points are further off than `DOUBTFUL`, and compressors whose training was
        faster than the timeline by more than `BELIEVED`.
        """
        fits = self.link.fits
        for codec in self.codecs:
            name = codec.compressor or "copies"
            fits |= {f"{name} (encode)": codec.encode, f"{name} (decode)": codec.decode}
        least = -BELIEVED * self.all_backward_seconds
        gains = [extra.compressor or "exact gradients" for extra in self.extras if extra.seconds < least]
        bent = [name for name, fit in fits.items() if fit.residual > DOUBTFUL]
        return bent + [f"{name} (faster in training than its parts)" for name in dict.fromkeys(gains)]

    def whole(self) -> Self:
        """Return the same model with its dense tables as gradients like all others, as DDP sees them; for pricing."""
        rows = [*zip(self.ready_seconds, self.parameters, strict=True)]
        dense = [table for table in self.tables if not table.is_sparse]
        rows += [
            (table.ready_seconds, Parameter(table.name, (table.num_rows, table.width), table.dtype)) for table in dense
        ]
        rows.sort(key=lambda row: row[0])
        return replace(
            self,
            parameters=tuple(entry for _, entry in rows),
            backward_seconds=differences([ready for ready, _ in rows]),
            tables=self.tables if not rows else (),
        )

    def at(self, mbit: float) -> Self:
        """Return the same model on the same machines with another link, see `MeasuredLink.at`.

        The extra seconds of exact gradients change with the cost of a byte. Extras of compressors are work of
        processors: on a faster link they stay, on a slower one they grow, and a gain is not carried over, because none
        must be promised that was never measured.
        """
        slower = self.link.mbit / mbit

        def moved(extra: Extra) -> Extra:
            if extra.compressor in (COPIES, STOCK):
                return replace(extra, seconds=slower * extra.seconds)
            seconds = extra.seconds if slower == 1.0 else max(0.0, extra.seconds)
            return replace(extra, seconds=max(1.0, slower) * seconds)

        extras = tuple(map(moved, self.extras))
        return replace(self, link=self.link.at(mbit), extras=extras)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, which docs/guides/plans.md describes."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "parameters": [
                {
                    "name": entry.name,
                    "shape": list(entry.shape),
                    "dtype": str(entry.dtype).removeprefix("torch."),
                    "seconds": seconds,
                }
                for entry, seconds in zip(self.parameters, self.backward_seconds, strict=True)
            ],
            "tables": [table.to_json() for table in self.tables],
            "link": asdict(self.link),
            "codecs": [asdict(codec) for codec in self.codecs],
            "extras": [asdict(extra) for extra in self.extras],
            "dense_codes": [code.to_json() for code in self.dense_codes],
            "ddp": None if self.ddp is None else asdict(self.ddp),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Parse the result of `to_json`.

        Raises:
            ValueError: it is no measurement, or one of another version.
        """
        if isinstance(data, Mapping) and "groups" in data:
            raise ValueError(f"this is a plan, not a measurement of `thinwire plan --measurement`: {_HOW}")
        version = data.get("version") if isinstance(data, Mapping) else None
        if not isinstance(data, Mapping) or version != VERSION:
            raise ValueError(
                f"not a measurement that this thinwire reads (version {version!r}, and it should be {VERSION}): {_HOW}"
            )
        try:
            fields = dict(data)
            rows = fields.pop("parameters")
            fields["parameters"] = [
                Parameter(row["name"], tuple(map(int, row["shape"])), _dtype(row["dtype"])) for row in rows
            ]
            fields["backward_seconds"] = [float(row["seconds"]) for row in rows]
            fields["link"] = MeasuredLink.from_json(fields["link"])
            fields["codecs"] = [Codec.from_json(codec) for codec in fields["codecs"]]
            for name, kind in (("extras", Extra), ("dense_codes", DenseCode), ("tables", EmbeddingTable)):
                fields[name] = [kind.from_json(row) for row in fields.get(name, ())]
            fields["ddp"] = None if fields.get("ddp") is None else DdpSite(**fields["ddp"])
            return cls(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a damaged measurement ({type(error).__name__}: {error}): {_HOW} again") from error

    def save(self, path: str | Path) -> None:
        """Write the measurement as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of `save`. Raise ValueError if there is no such file, or it is no measurement."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read the measurement {path}: {error.strerror}; {_HOW}") from error
        except ValueError as error:
            raise ValueError(f"{path} is not a measurement, which is a JSON file ({error}): {_HOW}") from error
        try:
            return cls.from_json(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a parameter has dtype {name!r}, which torch does not have; {_HOW} again")
    return dtype
