"""The lines that do what a `Option` says, which the doctor prints for pasting and runs to see whether they are
right."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from thinwire.compress.memory import with_memory
from thinwire.compress.named import NAMES, colons, parse, split
from thinwire.compress.reductions.choose import reduction_for
from thinwire.lab.planning.measurement import DdpSite, Measurement
from thinwire.lab.planning.planner import Option, plan_of
from thinwire.plan.plan import LOSSLESS, STOCK, Exact, Plan


@dataclass(frozen=True)
class Advice:
    """What to change in a training.

    Args:
        name: name of the option.
        attaches: whether to call ``thinwire.attach`` at all; False for stock DDP.
        compressor: text of `thinwire.compress.named.parse`; None for none.
        exchange: its exchange; None where "auto" takes the right one.
        plan: the plan to follow, or None.
        dense: the exact sum; None where "auto" decides.
    """

    name: str
    attaches: bool = True
    compressor: str | None = None
    exchange: str | None = None
    plan: Plan | None = None
    dense: Exact | None = None


def advice_of(option: Option, measurement: Measurement, options: Sequence[Option]) -> Advice:
    """Return what to change so that a training goes this way.

    Args:
        found: all options, which a plan has as its candidates; the first is stock DDP.
    """
    if option.name == STOCK:
        return Advice(option.name, attaches=False)
    if not option.is_plain:
        return Advice(option.name, plan=plan_of(option, measurement, options))
    if option.is_exact:
        return Advice(option.name, dense=LOSSLESS if option.is_lossless else None)
    (compressor, exchange), *_ = option.codecs
    code, costs = with_memory(parse(compressor)), measurement.costs(compressor, exchange)
    by_itself = {
        reduction_for("auto", code, parameter, measurement.world_size).name
        for parameter, coded in zip(measurement.parameters, costs.coded, strict=True)
        if coded
    }
    return Advice(option.name, True, compressor, None if by_itself == {exchange} else exchange)


def lines_of(advice: Advice, ddp: DdpSite | None, plan_path: str = "plan.json") -> list[str]:
    """Return the lines to paste, none for stock DDP.

    Args:
        ddp: the DDP model of the script; None for a plain module called ``model``.
        plan_path: path of the file with the plan.
    """
    if not advice.attaches:
        return []
    model = ddp.target if ddp is not None and ddp.target else "model"
    if advice.plan is None:
        arguments = [model]
        arguments += [f'dense="{advice.dense}"'] if advice.dense else []
        if advice.compressor:
            exchange = f'.by("{advice.exchange}")' if advice.exchange else ""
            arguments.append(f"dense={expression(advice.compressor)}{exchange}")
        return ["import thinwire", f"sync = thinwire.attach({', '.join(arguments)})"]
    lines = ["import thinwire", f'plan = thinwire.Plan.load("{plan_path}")']
    if ddp is not None:
        built = ddp.grouped_call or "DistributedDataParallel(module, bucket_cap_mb_list=plan.bucket_cap_mb_list())"
        lines.append(f"{model} = {built}")
    return [*lines, f"sync = thinwire.attach({model}, dense=plan)"]


def where_to_paste(advice: Advice, ddp: DdpSite | None) -> str:
    """Return a sentence that says where the lines belong, and what their names stand for."""
    if ddp is None:
        return "before the first step, with `model` the plain module on every rank, without DistributedDataParallel"
    instead = advice.plan is not None
    lines = f"lines {ddp.line} to {ddp.last_line}" if instead and ddp.last_line > ddp.line else f"line {ddp.last_line}"
    line = f"{lines} of {PurePath(ddp.file).name}" if ddp.file else "the line that builds it"
    inner = f"; line {ddp.inner_line} builds it, and needs bucket_cap_mb_list=plan.bucket_cap_mb_list()"
    if ddp.target and instead:
        return f"in place of {line}" + (inner if ddp.inner_line else "")
    if ddp.target:
        return f"after {line}, `{ddp.target} = {ddp.call}`"
    names = "`model` is the DistributedDataParallel" + (" and `module` what it wraps" if instead else "")
    return f"{'in place of' if instead else 'after'} {line}, where {names}"


def expression(compressor: str) -> str:
    """Return the Python expression of a compressor's text.

    Example:
        >>> expression("top_k:density=0.01:values=bf16")
        'thinwire.compress.top_k(density=0.01, values=thinwire.compress.bf16())'
    """
    name, settings = split(compressor)
    arguments = [f"{key}={_argument(value)}" for key, value in settings.items()]
    return f"thinwire.compress.{name}({', '.join(arguments)})"


def _argument(value: object) -> str:
    text = colons(value) if isinstance(value, str) else ""
    return expression(text) if text.split(":")[0] in NAMES else repr(text or value)
