"""Methods of `thinwire bench train` by name, and their settings.

``NAME`` has the settings of the table below; ``NAME:density=0.001`` changes some of them. Every method of thinwire
also accepts ``warm_up``, the share of the steps over which `thinwire.compress.warm_up` leads to it, ``leave``, a
pattern (`fnmatch`) of names that stay exact, and ``fuse``, a policy around it; ``top_k:density=0.001 by two_shot`` is
its `Compressor.by`, as doctor and plan write it. With ``fuse`` and ``plan`` the model is a plain module, whose
gradients can travel in any groups; see `thinwire.lab.bench.train.planned`. The name of a scheme, such as "zen", is
`thinwire.attach` with that scheme for embedding tables; ``zen:dense=lossless`` says how all other gradients travel.
Any text of `thinwire.compress.named` is a method; "bf16" and "lossless" are others by these names. Outer loops, which
are another algorithm, are in `thinwire.lab.bench.train.outer`.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor, nn

from thinwire.compress.assign import EXACT as SUMS
from thinwire.compress.assign import NATIVE, Dense, Rule, leave_small
from thinwire.compress.base import Exchanged, Parameter
from thinwire.compress.named import CONSTRUCTORS, construct, split
from thinwire.errors import unknown
from thinwire.gradients.compression import has_momentum
from thinwire.lab.bench.jobs.job import Job
from thinwire.lab.bench.jobs.own import OwnJob
from thinwire.lab.bench.train.account import Account, RunningMethod
from thinwire.lab.bench.train.outer import CODEC, Outer, OuterMethod, codec_of
from thinwire.lab.bench.train.outer import SETTINGS as OUTER_SETTINGS
from thinwire.lab.bench.train.planned import Planning, grouping
from thinwire.plan.plan import Plan
from thinwire.rows import SchemeName
from thinwire.sums.named import AUTO

DDP, BF16, POWER_SGD_TORCH, THINWIRE, PLAN = "ddp", "bf16", "powersgd_torch", "thinwire", "plan"
RANK_ORDER, LOSSLESS = "rank_order", "lossless"
"""The uncoded sum in rank order, and ``attach(model, dense="lossless")``, which has its bits; ``lossless:auto`` is
``dense="auto"``."""
EXACT = "exact"
"""Another name of "thinwire": `thinwire.attach(model)`, as doctor and plan call ways without compression."""
TORCH_METHODS = (DDP, BF16, POWER_SGD_TORCH, RANK_ORDER)
_CODEC, _BY = "codec", " by "
SCHEMES = get_args(SchemeName)
OUTER_METHODS = tuple(OUTER_SETTINGS)
"""Outer loops: another algorithm than data-parallel training."""
NAMES = (*TORCH_METHODS, THINWIRE, EXACT, LOSSLESS, PLAN, *OUTER_METHODS)


@dataclass(frozen=True)
class Method:
    """A method ready for one job.

    Args:
        attach: attaches it to a model and its optimizer; called on all ranks, once.
        compresses: returns whether it compresses a parameter of this name. The next three concern those only.
        optimizer_momentum: whether the optimizer keeps the job's momentum; False if the method has it.
        clips_after_sum: whether the job's clipping of the synchronized gradient stays; False if the method clips.
        learning_rate_scale: factor for methods whose steps have another length than the gradient.
        inner_lr: factor for the learning rate of all parameters.
        longer: factor for the number of steps.
        one_bucket: whether DDP must put all gradients into one bucket.
        is_plain: whether the model is a plain module, and not under DDP.
        planning: makes the plan before the first step, which then decides how the model is synchronized.
    """

    attach: Callable[[Any, torch.optim.Optimizer], RunningMethod]
    compresses: Callable[[str, Tensor], bool] = lambda name, parameter: False
    optimizer_momentum: bool = True
    clips_after_sum: bool = True
    learning_rate_scale: float = 1.0
    inner_lr: float = 1.0
    longer: float = 1.0
    one_bucket: bool = False
    is_plain: bool = False
    planning: Planning | None = None


@dataclass(frozen=True)
class MethodSetting:
    """Arguments for a constructor of `thinwire.compress`: fixed ``arguments``, and ``of_run``'s for the run."""

    arguments: dict[str, Any] = field(default_factory=dict)
    of_run: Callable[[Job | OwnJob, int, int], dict[str, Any]] | None = None
    clips_after_sum: bool = True
    learning_rate_scale: float = 1.0


def _dgc_of_run(job: Job | OwnJob, steps: int, world_size: int) -> dict[str, Any]:
    """The job's momentum, its clipping as in section 3.2 of the paper, and a warm-up over a tenth of the run."""
    clip_norm = None if job.clip_norm is None else job.clip_norm / math.sqrt(world_size)
    steps_per_epoch = max(1, steps // 40)
    return {"momentum": job.momentum, "nesterov": True, "clip_norm": clip_norm, "steps_per_epoch": steps_per_epoch}


SETTINGS: dict[str, MethodSetting] = {
    "top_k": MethodSetting({"density": 0.03}),
    "dgc": MethodSetting({"density": 0.03, "masking": False}, _dgc_of_run, clips_after_sum=False),
    "gaussian_k": MethodSetting({"density": 0.01}),
    "redsync": MethodSetting({"density": 0.01}),
    "sidco": MethodSetting({"density": 0.01}),
    "ms_top_k": MethodSetting({"density": 0.01}),
    "random_k": MethodSetting({"density": 0.1}),
    "sign_sgd": MethodSetting({"momentum": 0.9}, clips_after_sum=False, learning_rate_scale=0.002),
    "ef_sign_sgd": MethodSetting({"warm_up": 0.1}),
    "qsgd": MethodSetting({"bits": 8}),
    **dict.fromkeys(("terngrad", "natural", "int8", "fp8", "mxfp8", "mxfp4", "fp16"), MethodSetting()),
    "power_sgd": MethodSetting({"rank": 8}),
    "acp_sgd": MethodSetting({"rank": 4}),
    "atomo": MethodSetting({"rank": 4}),
    "ok_topk": MethodSetting({"density": 0.01}),
    "hi_top_k": MethodSetting({"density": 0.01}),
    "deep_reduce": MethodSetting(),
}  # fmt: skip
"""Settings of thinwire's own methods; arguments not given here have the constructor's defaults."""


def method_of(text: str, job: Job | OwnJob, steps: int, world_size: int) -> Method:
    """Return the method that a text names, for a job of ``steps`` steps on ``world_size`` ranks.

    Raises:
        ValueError: an unknown name, or settings that it does not have; the message says what is legal.
    """
    name, settings = parse(text)
    if name in TORCH_METHODS:
        return _torch_method(name, settings)
    if name == PLAN:
        return Method(_unplanned, planning=Planning.of(settings, world_size))
    if name in OUTER_METHODS:
        return _outer_method(name, settings)
    if name in (LOSSLESS, THINWIRE, EXACT, *SCHEMES):
        exact = settings.pop("dense", LOSSLESS if name == LOSSLESS else NATIVE if "fuse" in settings else AUTO)
        if exact not in SUMS:
            raise unknown("dense", str(exact), SUMS)
        dense, is_plain = grouping(settings.pop("fuse", None), exact)
        _refuse(name, settings)
        rows = name if name in SCHEMES else AUTO
        return Method(lambda model, _: ThinwireMethod(model, rows, dense), is_plain=is_plain)
    setting = SETTINGS.get(name, MethodSetting())
    arguments = dict(setting.arguments)
    if setting.of_run is not None:
        arguments |= setting.of_run(job, steps, world_size)
    arguments |= settings
    warm_up = arguments.pop("warm_up", 0.0)
    exchange, leave, fuse = arguments.pop(_BY, AUTO), str(arguments.pop("leave", "")), arguments.pop("fuse", None)
    compressor = construct(name, arguments)
    rule = _rule(_warmed_up(compressor, round(warm_up * steps)).by(exchange), leave)
    dense, is_plain = grouping(fuse, rule)
    return Method(
        lambda model, _: ThinwireMethod(model, AUTO, dense),
        lambda key, tensor: rule(Parameter(key, tuple(tensor.shape), tensor.dtype)) != NATIVE,
        not has_momentum(compressor),
        setting.clips_after_sum,
        setting.learning_rate_scale,
        is_plain=is_plain,
    )


def method_of_plan(plan: Plan) -> Method:
    """Return the method that executes a plan: stock DDP, if the plan is to do nothing."""
    if plan.does_nothing:
        return _torch_method(DDP, {})
    return Method(lambda model, _: ThinwireMethod(model, AUTO, plan), is_plain=True)


def _outer_method(name: str, settings: dict[str, Any]) -> Method:
    """Return an outer loop; the compressor of its differences has no part in what happens to gradients."""
    codec = settings.pop(_CODEC, None)
    outer = Outer.of(name, settings)
    dense: Dense = NATIVE
    if codec is not None:
        method, arguments = _split(codec)
        setting = SETTINGS.get(method, MethodSetting())
        arguments = {key: value for key, value in setting.arguments.items() if key != "warm_up"} | arguments
        exchange, leave = arguments.pop(_BY, AUTO), str(arguments.pop("leave", ""))
        compressor = codec_of(method, arguments)
        if has_momentum(compressor):
            raise ValueError(f"codec={codec} has momentum, and so has the outer optimizer: take one without")
        dense = _rule(compressor.by(exchange), leave)
    return Method(
        lambda model, optimizer: OuterMethod(model, optimizer, outer.recipe, dense),
        inner_lr=outer.inner_lr,
        longer=outer.longer,
        is_plain=True,
    )


def _unplanned(model: object, optimizer: object) -> NoReturn:
    raise AssertionError("a plan decides how to synchronize before that is done")


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``"top_k:density=0.001"`` into a name and settings; values are Python literals, or else texts.

    ``"plan:plan.json"`` is short for ``"plan:file=plan.json"``. What follows ``codec=`` of an outer loop is one text.

    Raises:
        ValueError: an unknown name or a setting without a value.
    """
    if text.startswith(f"{PLAN}:") and "=" not in text:
        return PLAN, {"file": text.removeprefix(f"{PLAN}:")}
    if text == f"{LOSSLESS}:{AUTO}":
        return LOSSLESS, {"dense": AUTO}
    loop, separator, codec = text.partition(CODEC)
    name, settings = (text, {}) if text in SCHEMES else _split(loop)
    legal = (*NAMES, *SCHEMES, *SETTINGS, *CONSTRUCTORS)
    if name not in legal:
        raise unknown("method", name, dict.fromkeys(one for one in legal if ":" not in one))
    if _BY in settings and name in (*NAMES, *SCHEMES):
        raise ValueError(f"{name} has no exchange here: a compressor has one, as in top_k:density=0.01 by two_shot")
    if separator and name not in OUTER_METHODS:
        raise ValueError(f"{name} has no codec=, which outer loops have: {', '.join(OUTER_METHODS)}")
    return name, settings | ({_CODEC: codec} if separator else {})


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """Return what `split` does, with the exchange of ``NAME by EXCHANGE`` as one more setting."""
    compressor, by, exchange = text.partition(_BY)
    name, settings = split(compressor)
    return name, settings | ({_BY: exchange.strip()} if by else {})


def _refuse(name: str, settings: dict[str, Any]) -> None:
    if settings:
        raise ValueError(f"{name} has no setting {next(iter(settings))!r}")


def _torch_method(name: str, settings: dict[str, Any]) -> Method:
    from thinwire.lab.bench.train import stock

    if name == POWER_SGD_TORCH:
        rank = settings.pop("rank", stock.POWER_SGD_RANK)
        _refuse(name, settings)
        # Its callbacks wait for all-reduces on the threads that Gloo runs these on: two buckets at once dead-lock.
        return Method(lambda model, _: stock.TorchPowerSgd(model, rank), one_bucket=True)
    _refuse(name, settings)
    kind = {DDP: stock.StockDdp, BF16: stock.Bf16AllReduce, RANK_ORDER: stock.RankOrderAllReduce}[name]
    return Method(lambda model, _: kind(model))


def _warmed_up(compressor: Any, steps: int) -> Any:
    from thinwire.compress import warm_up
    from thinwire.compress.memory import with_memory

    return warm_up(with_memory(compressor), steps) if steps else compressor


def _rule(compressor: Exchanged, leave: str) -> Rule:
    """The decision of `thinwire.attach` for a parameter that is no embedding table; tables travel as exact rows."""
    large = leave_small(compressor)
    return lambda parameter: NATIVE if fnmatchcase(parameter.name, leave) else large(parameter)


class ThinwireMethod(RunningMethod):
    """Method that attaches thinwire to a model."""

    def __init__(self, model: nn.Module, rows: Any, dense: Any) -> None:
        import thinwire

        self._synchronizer = thinwire.attach(model, rows, dense)

    def account(self) -> Account:
        return Account.of_stats(self._synchronizer.stats())

    def no_sync(self) -> AbstractContextManager[None]:
        return self._synchronizer.no_sync()

    def close(self) -> None:
        self._synchronizer.detach()
