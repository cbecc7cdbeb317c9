"""The frozen `Plan`: groups of gradients, how each travels, and the predicted seconds. A JSON file."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from thinwire.compress.assign import AUTO, LOSSLESS, NATIVE, Exact, LeaveSmall, Method, Rule, leave_small
from thinwire.compress.base import Exchanged, Parameter
from thinwire.compress.named import parse, text_of
from thinwire.plan.text import format_bytes, format_seconds

VERSION = 1
STOCK = "stock DDP"
"""Name of the candidate that does nothing."""
ROWS = "exact, tables as rows"
"""Name of what ``attach(model)`` does for a model with tables."""
EXACT = "exact"
"""Prefix of the names of candidates without compression."""
SHORT = f"{EXACT}, {LOSSLESS}"
"""Prefix of the names of candidates that sum losslessly: exact sums in fewer bytes."""
WORTH = 1.03
"""Least ratio of step times at which an exact way replaces a simpler one."""

_BYTES_PER_MB = 1024 * 1024  # as DDP counts
SHOWN = 12
"""Largest number of groups and candidates that `Plan.explain` shows; the rest of a longer list is counted."""
_HOW = "make one with `thinwire plan --measure --output plan.json`"
_TYPES: dict[object, Any] = {
    "int": int,
    "float": (int, float),
    "str": str,
    "bool": bool,
    "str | None": (str, type(None)),
}
"""Types of fields by their annotations."""


def _check(entry: Any, of: str) -> None:
    """Raise ValueError for a field that is not of its type, or a number below 0: Python would go on with it."""
    for one in fields(entry):
        value, kind = getattr(entry, one.name), _TYPES.get(one.type, object)
        is_number = kind in (int, (int, float))
        if not isinstance(value, kind) or (is_number and (isinstance(value, bool) or not 0 <= value < math.inf)):
            raise ValueError(f"{of} {one.name}={value!r}, no {one.type}{' of at least 0' * is_number}: {_HOW}")


@dataclass(frozen=True)
class Group:
    """A group of gradients that one job synchronizes, as soon as the last of them is ready.

    Args:
        parameters: names in backward order.
        size_bytes: bytes of their gradients, uncompressed.
        compressor: text of `thinwire.compress.named.parse`, also of wrappers; None for an exact all-reduce. It is for
            the parameters that `thinwire.compress.leave_small` lets through; the others are summed exactly by the same
            job.
        exchange: the exchange that averages payloads, by its name, as `thinwire.compress.Compressor.by` takes it.
        joins: whether it travels by the job of the group before it, which then waits for both.
        dense: how gradients that are not compressed are summed: "native", "lossless" or "auto", see ``dense=`` of
            `thinwire.attach`.
        min_elements, min_dimensions: limits of `thinwire.compress.leave_small`; 0 compress small ones, too.

    Raises:
        ValueError: no names of parameters; an unknown compressor, exchange or sum.

    Example:
        >>> Group.of(["fc.bias"], 4096, parse("qsgd:bits=4").by("zen")).describe()
        'qsgd:bits=4, zen'
    """

    parameters: tuple[str, ...]
    size_bytes: int = 0
    compressor: str | None = None
    exchange: str = "all_reduce"
    joins: bool = False
    dense: Exact = NATIVE
    min_elements: int = LeaveSmall.min_elements
    min_dimensions: int = LeaveSmall.min_dimensions

    def __post_init__(self) -> None:
        if isinstance(self.parameters, str) or {*map(type, self.parameters)} != {str}:
            raise ValueError(f"a group of a plan has no parameters, but {self.parameters!r}: {_HOW}")
        object.__setattr__(self, "parameters", tuple(self.parameters))
        of = f"the group of {self.parameters[0]!r} has"
        _check(self, of)
        if self.dense not in (NATIVE, LOSSLESS, AUTO):
            raise ValueError(f"{of} dense={self.dense!r}; legal are native, lossless, auto")
        self.method(Parameter("", ()))  # raises ValueError for what is unknown

    @classmethod
    def of(cls, parameters: Sequence[str], size_bytes: int, dense: Method | LeaveSmall, joins: bool = False) -> Group:
        """Return the group of gradients that travel by one value of ``dense=``, as of `Synchronizer.methods`.

        Raises:
            ValueError: a compressor or a scheme without a name: of a class of the user's own, or of hosts by hand.
        """
        if isinstance(dense, str):
            return cls(tuple(parameters), size_bytes, joins=joins, dense=dense)
        rule = dense if isinstance(dense, LeaveSmall) else leave_small(dense, 0, 0)
        one = rule.compressor if isinstance(rule.compressor, Exchanged) else Exchanged(rule.compressor)
        settings: Any = one.exchange, joins, rule.rest, rule.min_elements, rule.min_dimensions
        return cls(tuple(parameters), size_bytes, text_of(one.compressor), *settings)

    def method(self, parameter: Parameter) -> Method:
        """Return how the gradient of one of the parameters travels."""
        if self.compressor is None:
            return self.dense
        exchanged = parse(self.compressor).by(self.exchange)
        return leave_small(exchanged, self.min_elements, self.min_dimensions, self.dense)(parameter)

    def describe(self) -> str:
        exact = f"exact, {'all_reduce' if self.dense == NATIVE else self.dense}"
        return exact if self.compressor is None else f"{self.compressor}, {self.exchange}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields; those since the first version only where they say something, so that earlier versions read
        all other plans."""
        data = {**asdict(self), "parameters": list(self.parameters)}
        unsaid = {(name, getattr(Group, name)) for name in ("joins", "dense", "min_elements", "min_dimensions")}
        return {name: value for name, value in data.items() if name == "parameters" or (name, value) not in unsaid}


@dataclass(frozen=True)
class Candidate:
    """A priced way: seconds from the start of backward until the last gradient is synchronized."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A plan for the gradients of one model on a number of ranks, which `thinwire.attach` executes.

    Args:
        world_size: number of ranks.
        fingerprint: fingerprint of the model, see `fingerprint`.
        groups: groups in the order in which they travel; together all parameters but embedding tables, each once.
        predicted_seconds: seconds from the start of backward until the last gradient is synchronized.
        dense_seconds: the same for stock DDP.
        other_seconds: seconds of forward and optimizer, which no plan changes.
        choice: name of the candidate that this plan is; `STOCK` means to do nothing.
        fallback: whether to drop the plan, on all ranks at the same step, where it turns out slower than exact
            synchronization: ``dataclasses.replace(plan, fallback=True)``.
        candidates: all priced ways, fastest first.
        created: time as ISO 8601.
        note: a remark of the planner.
        version: version of this format.

    Raises:
        ValueError: a parameter that is in two groups, negative seconds, another version, no ranks.

    Example:
        >>> plan = Plan(2, fingerprint([]), (Group(("fc.weight",), 4096),), 0.1, 0.2)
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    world_size: int
    fingerprint: str
    groups: tuple[Group, ...]
    predicted_seconds: float
    dense_seconds: float
    other_seconds: float = 0.0
    choice: str = ""
    fallback: bool = False
    candidates: tuple[Candidate, ...] = ()
    created: str = ""
    note: str = ""
    version: int = VERSION

    def __repr__(self) -> str:
        name = f"Plan {self.choice}" if self.choice else "Plan"
        predicted, stock = 1e3 * self.predicted_seconds, 1e3 * self.dense_seconds
        return (
            f"<{name} for {self.world_size} ranks: {len(self.parameters)} parameters in {len(self.groups)} groups,"
            f" {predicted:.1f} ms predicted, {stock:.1f} ms with stock DDP>"
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        object.__setattr__(self, "candidates", tuple(self.candidates))
        for one in (self, *self.candidates):
            _check(one, "the plan has")
        if self.version != VERSION:
            raise ValueError(f"the plan has version {self.version}, and this thinwire reads version {VERSION}: {_HOW}")
        if self.world_size < 1:
            raise ValueError(f"a plan is for at least one rank, not {self.world_size}: {_HOW}")
        if not self.groups and self.choice not in (STOCK, ROWS):  # a model that has nothing but tables
            raise ValueError(f"the plan has no groups: {_HOW}")
        if self.groups and self.groups[0].joins:
            raise ValueError(f"the first group of the plan joins the group before it, and there is none: {_HOW}")
        twice = next((name for name, count in Counter(self.parameters).items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"parameter {twice!r} is in the plan twice: {_HOW}")

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters, in the order of the groups."""
        return tuple(name for group in self.groups for name in group.parameters)

    @property
    def jobs(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of each job: of a group, and of the groups that join it."""
        jobs: list[tuple[str, ...]] = []
        for group in self.groups:
            joined = jobs.pop() if group.joins else ()
            jobs.append((*joined, *group.parameters))
        return tuple(jobs)

    @property
    def does_nothing(self) -> bool:
        """Whether no way beats stock DDP by enough."""
        return self.choice == STOCK

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a whole training step."""
        return self.other_seconds + self.predicted_seconds

    @property
    def speedup(self) -> float:
        """Ratio of a step of stock DDP to a step of this plan."""
        return (self.other_seconds + self.dense_seconds) / self.step_seconds if self.step_seconds else 1.0

    def check(self, parameters: Sequence[Parameter], world_size: int) -> None:
        """Check that the plan is for this model, on this number of ranks.

        Args:
            parameters: all trained parameters without embedding tables.

        Raises:
            ValueError: the plan is for something else; the message says for what, and what to do.
        """
        if world_size != self.world_size:
            raise ValueError(f"the plan is for {self.world_size} ranks, and there are {world_size}: {_HOW} on these")
        planned, present = set(self.parameters), {parameter.name for parameter in parameters}
        if planned != present:
            raise ValueError(f"the plan is for another model: {_difference(planned, present)}; {_HOW} of this one")
        if fingerprint(parameters) != self.fingerprint:
            raise ValueError(
                f"the plan is for another model: its parameters have the same names, but other shapes or dtypes; {_HOW}"
                " of this one"
            )

    def dense(self) -> Method | Rule:
        """Return how gradients travel, for `thinwire.compress.assign.assign`: one exact sum of all, or a rule."""
        exact = {group.dense for group in self.groups}
        if len(exact) == 1 and all(group.compressor is None for group in self.groups):
            return exact.pop()
        group_of = {name: group for group in self.groups for name in group.parameters}
        return lambda one: group_of[one.name].method(one) if one.name in group_of else NATIVE  # tables are in none

    def bucket_cap_mb_list(self) -> list[float]:
        """Return caps for ``DistributedDataParallel(bucket_cap_mb_list=...)``, so that its buckets are the plan's jobs.

        A bucket of DDP closes as soon as its bytes reach its cap, so the cap is the bytes of the job.
        """
        size_bytes: list[int] = []
        for group in self.groups:
            size_bytes.append(group.size_bytes + (size_bytes.pop() if group.joins else 0))
        return [size / _BYTES_PER_MB for size in size_bytes]

    def explain(self) -> str:
        """Return a text for people: what the plan does, and why."""
        return "\n".join([*_head(self), "", *_groups(self), *_candidates(self)]).rstrip() + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return the fields, which docs/guides/plans.md describes."""
        groups = [group.to_json() for group in self.groups]
        candidates = [asdict(candidate) for candidate in self.candidates]
        data = asdict(replace(self, candidates=()))
        if not self.fallback:  # earlier versions read all other plans
            del data["fallback"]
        return {"version": data.pop("version"), **data, "groups": groups, "candidates": candidates}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Parse the result of `to_json`.

        Raises:
            ValueError: it is no plan, or one of another version.
        """
        if isinstance(data, Mapping) and "link" in data:
            raise ValueError(f"this is a measurement of `thinwire plan --measurement`, not a plan: {_HOW}")
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != VERSION:
            raise ValueError(
                f"not a plan that this thinwire reads (version {version!r}, and it should be {VERSION}): {_HOW}"
            )
        try:
            entries: dict[str, Any] = dict(data)
            if not entries.pop("ahead", True):
                raise ValueError(f"the plan compresses groups as one flat tensor, which was removed: {_HOW}")
            entries["groups"] = [Group(**group) for group in data["groups"]]
            entries["candidates"] = [Candidate(**candidate) for candidate in data.get("candidates", ())]
            return cls(**entries)
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"a damaged plan ({type(error).__name__}: {error}): {_HOW}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file of `save`.

        Raises:
            ValueError: there is no such file, or it is no plan.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_bytes()))
        except OSError as error:
            raise ValueError(f"cannot read the plan {path}: {error.strerror}; {_HOW}") from error
        except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, or of a plan
            how = "" if _HOW in str(error) else f"; {_HOW}"
            raise ValueError(f"{path} is no plan, which is a JSON file: {error}{how}") from error


def fingerprint(parameters: Iterable[Parameter]) -> str:
    """Return the SHA-256 over names, shapes and dtypes, independent of the order of parameters."""
    lines = sorted(f"{entry.name!r} {entry.dtype} {list(entry.shape)}" for entry in parameters)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _difference(planned: set[str], present: set[str]) -> str:
    unknown, missing = sorted(present - planned), sorted(planned - present)
    parts = [f"it does not know {len(unknown)} of this model's parameters, such as {unknown[0]!r}"] if unknown else []
    parts += [f"{len(missing)} of its parameters are not here, such as {missing[0]!r}"] if missing else []
    return " and ".join(parts)


def _head(plan: Plan) -> list[str]:
    size = format_bytes(sum(group.size_bytes for group in plan.groups))
    made = f", made {plan.created}" if plan.created else ""
    lines = [f"Plan for {plan.world_size} ranks and {len(plan.parameters)} parameters, {size} of gradients{made}"]
    stock = format_seconds(plan.other_seconds + plan.dense_seconds)
    if plan.does_nothing:
        lossless = " no lossless sum by 10 %," * any(one.name.startswith(SHORT) for one in plan.candidates)
        lines.append(
            f"Do nothing: no exact way is better than stock DDP by more than 3 %,{lossless} and no lossy one by"
            f" 30 %. Predicted step: {stock}."
        )
    else:
        lines.append(
            f"Take {plan.choice or 'these groups'}. Predicted step: {format_seconds(plan.step_seconds)};"
            f" stock DDP: {stock}, {plan.speedup:.2f} times as long."
        )
        lines += _lossy(plan)
    if plan.note:
        lines.append(plan.note)
    return lines


def _lossy(plan: Plan) -> list[str]:
    """Return a warning if the plan is lossy; its candidates are sorted."""
    if not any(group.compressor for group in plan.groups):
        return []
    exact = next((entry for entry in plan.candidates if entry.name == STOCK or entry.name.startswith(EXACT)), None)
    text = "It is lossy: compare the loss, too."
    if exact is not None:
        text += f" The best exact way is {exact.name}: {format_seconds(plan.other_seconds + exact.seconds)}."
    return [text]


def _groups(plan: Plan) -> list[str]:
    lines = [f"{'group':>5}  {'parameters':>10}  {'gradients':>9}  what happens"]
    for number, group in enumerate(plan.groups[:SHOWN], start=1):
        first, last = group.parameters[0], group.parameters[-1]
        what = group.describe() + ", with the group before" * group.joins
        what += f": {first}" + f" .. {last}" * (first != last)
        lines.append(f"{number:>5}  {len(group.parameters):>10}  {format_bytes(group.size_bytes):>9}  {what}")
    if len(plan.groups) > SHOWN:
        lines.append(f"  and {len(plan.groups) - SHOWN} more")
    return lines


def _candidates(plan: Plan) -> list[str]:
    if not plan.candidates:
        return []
    lines = ["", f"{'seconds':>9}  candidates, from the start of backward until the last gradient is there"]
    for one in plan.candidates[:SHOWN]:
        lines.append(f"{format_seconds(one.seconds):>9}  {one.name}{'  <- taken' * (one.name == plan.choice)}")
    if len(plan.candidates) > SHOWN:
        lines.append(f"  and {len(plan.candidates) - SHOWN} slower ones")
    return lines
