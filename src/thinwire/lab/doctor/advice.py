"""The lines that do what a `Option` says, which the doctor prints for pasting and runs to see whether they are
right."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import cast

from thinwire.compress.assign import AUTO, EXACT, LOSSLESS, Method
from thinwire.compress.memory import with_memory
from thinwire.compress.named import CONSTRUCTORS, colons, parse, split
from thinwire.compress.reductions.choose import reduction_for
from thinwire.lab.planning.measurement import DdpSite, Measurement
from thinwire.lab.planning.planner import Option, plan_of
from thinwire.plan.plan import STOCK, Plan


@dataclass(frozen=True)
class Advice:
    """What to change in a training.

    Args:
        name: name of the option.
        dense: what `thinwire.attach` gets by that name: a text of `method`, or a plan; None for
            stock DDP, without ``attach``.
    """

    name: str
    dense: str | Plan | None = AUTO

    @property
    def plan(self) -> Plan | None:
        """The plan to follow, if there is one."""
        return self.dense if isinstance(self.dense, Plan) else None


def advice_of(option: Option, measurement: Measurement, options: Sequence[Option]) -> Advice:
    """Return what to change so that a training goes this way.

    Args:
        found: all options, which a plan has as its candidates; the first is stock DDP.
    """
    if option.name == STOCK:
        return Advice(option.name, None)
    if not option.is_plain:
        return Advice(option.name, plan_of(option, measurement, options))
    if option.is_exact:
        return Advice(option.name, LOSSLESS if option.is_lossless else AUTO)
    (compressor, exchange), *_ = option.codecs
    code, costs = with_memory(parse(compressor)), measurement.costs(compressor, exchange)
    by_itself = {
        reduction_for("auto", code, parameter, measurement.world_size).name
        for parameter, coded in zip(measurement.parameters, costs.coded, strict=True)
        if coded
    }
    return Advice(option.name, compressor if by_itself == {exchange} else f"{compressor} by {exchange}")


def lines_of(advice: Advice, ddp: DdpSite | None, plan_path: str = "plan.json") -> list[str]:
    """Return the lines to paste, none for stock DDP.

    Args:
        ddp: the DDP model of the script; None for a plain module called ``model``.
        plan_path: path of the file with the plan.
    """
    if advice.dense is None:
        return []
    model = ddp.target if ddp is not None and ddp.target else "model"
    scaled = f", grad_scaler={scaler}" if (scaler := _scaler(advice, ddp)) else ""
    if isinstance(advice.dense, str):
        dense = "" if advice.dense == AUTO else f", dense={expression(advice.dense)}"
        return ["import thinwire", f"sync = thinwire.attach({model}{dense}{scaled})"]
    lines = ["import thinwire", f'plan = thinwire.Plan.load("{plan_path}")']
    if ddp is not None:
        built = ddp.grouped_call or "DistributedDataParallel(module, bucket_cap_mb_list=plan.bucket_cap_mb_list())"
        lines.append(f"{model} = {built}")
    return [*lines, f"sync = thinwire.attach({model}, dense=plan{scaled})"]


def method(text: str) -> Method:
    """Return what ``dense=`` of `thinwire.attach` takes of "native", "lossless", "auto" or a compressor's text.

    Example:
        >>> method("top_k:density=0.001 by two_shot").exchange
        'two_shot'
    """
    compressor, by, exchange = text.partition(" by ")
    return cast("Method", text) if text in EXACT else parse(compressor).by(exchange) if by else parse(text)


def where_to_paste(advice: Advice, ddp: DdpSite | None) -> str:
    """Return a sentence that says where the lines belong, and what their names stand for."""
    if ddp is None:
        return "before the first step, with `model` the plain module on every rank, without DistributedDataParallel"
    instead = advice.plan is not None
    lines = f"lines {ddp.line} to {ddp.last_line}" if instead and ddp.last_line > ddp.line else f"line {ddp.last_line}"
    line = f"{lines} of {PurePath(ddp.file).name}" if ddp.file else "the line that builds it"
    inner = f"; line {ddp.inner_line} builds it, and needs bucket_cap_mb_list=plan.bucket_cap_mb_list()"
    where = f"in place of {line}" if instead else f"after {line}"
    meant = ["`model` is the DistributedDataParallel", *(["`module` what it wraps"] if instead else [])]
    if ddp.target:
        where, meant = f"{where}, `{ddp.target} = {ddp.call}`", []
    if scaler := _scaler(advice, ddp):
        meant.append(f"`{scaler}` is the script's GradScaler, which has to be built before")
    where += f", where {' and '.join(meant)}" if meant else ""
    return where + (inner if instead and ddp.target and ddp.inner_line else "")


def _scaler(advice: Advice, ddp: DdpSite | None) -> str:
    """Return the variable of the scaler whose scale gradients carry, which the memories of compressors need to know."""
    is_lossy = any(group.compressor for group in advice.plan.groups) if advice.plan else advice.dense not in EXACT
    return ddp.scaler if ddp is not None and is_lossy else ""


def expression(text: str) -> str:
    """Return the Python expression of a text of `method`.

    Example:
        >>> expression("top_k:density=0.01:values=bf16 by two_shot")
        'thinwire.compress.top_k(density=0.01, values=thinwire.compress.bf16()).by("two_shot")'
    """
    compressor, by, exchange = text.partition(" by ")
    return f'"{text}"' if text in EXACT else _compressor(compressor) + (f'.by("{exchange}")' if by else "")


def _compressor(text: str) -> str:
    name, settings = split(text)
    arguments = [f"{key}={_argument(value)}" for key, value in settings.items()]
    return f"thinwire.compress.{name}({', '.join(arguments)})"


def _argument(value: object) -> str:
    text = colons(value) if isinstance(value, str) else ""
    return _compressor(text) if text.split(":")[0] in CONSTRUCTORS else repr(text or value)
