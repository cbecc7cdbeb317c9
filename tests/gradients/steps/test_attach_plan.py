"""`attach` with plans and fusion policies on real ranks: the same steps, the same switch, the same refusals."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import compress
from thinwire.compress.base import Parameter
from thinwire.gradients.steps import execution, grouping
from thinwire.gradients.steps.grouping import Pace
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.plan.plan import Group, Plan, fingerprint
from thinwire.tune.trial import Trial

pytestmark = pytest.mark.ranks

QUICK = Pace(skipped_steps=1, measured_steps=4, window_steps=3)


class Network(nn.Module):
    """Layers in the order of their use, and two tables, one with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 16, sparse=True)
        self.tags = nn.Embedding(600, 16)
        self.first = nn.Linear(16, 48)
        self.middle = nn.Linear(48, 48)
        self.last = nn.Linear(48, 30)

    def forward(self, batch: Tensor) -> Tensor:
        ids = (batch[:, 0].abs() * 1000).long() % 500
        hidden = batch + self.words(ids) + self.tags(ids + 3)
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(hidden)))))


ORDER = ("last.bias", "last.weight", "middle.bias", "middle.weight", "first.bias", "first.weight")
PAIRS = (ORDER[:2], ORDER[2:4], ORDER[4:])
ONE = (ORDER,)


def dense_parameters(model: nn.Module) -> list[Parameter]:
    return [Parameter(name, tuple(model.get_parameter(name).shape)) for name in ORDER]


def plan_for(groups: Sequence[Sequence[str]], compressor: str | None = None, **changes: Any) -> Plan:
    model = Network()
    made = tuple(
        Group(tuple(group), sum(4 * model.get_parameter(name).numel() for name in group), compressor, "auto")
        for group in groups
    )
    settings = {"world_size": 2, "fingerprint": fingerprint(dense_parameters(model)), "predicted_seconds": 0.01}
    return Plan(**{**settings, "dense_seconds": 1000.0, "groups": made, **changes})


def attached(ddp: dict[str, Any] | None = None, **options: Any) -> tuple[nn.Module, thinwire.Synchronizer]:
    torch.manual_seed(0)
    model: nn.Module = Network()
    if ddp is not None:
        model = DistributedDataParallel(model, **ddp)
    return model, thinwire.attach(model, **options)


def train(context: RankContext, model: nn.Module, steps: range) -> list[Tensor]:
    data = torch.Generator().manual_seed(100 + context.rank)
    batches = [torch.randn(12, 16, generator=data) for _ in range(steps.stop)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        model(batches[step]).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same_everywhere(context: RankContext, parameters: Sequence[Tensor]) -> None:
    flat = torch.cat([parameter.flatten() for parameter in parameters])
    gathered = [torch.empty_like(flat) for _ in range(context.world_size)]
    dist.all_gather(gathered, flat)
    assert all(torch.equal(other, flat) for other in gathered)


def jobs_of(trace: Any) -> list[int]:
    """Jobs of each step that have dense gradients."""
    return [sum(event.track == "channel" and event.arguments["bytes"] > 0 for event in step) for step in trace.steps]


# --- the same steps in any groups


def _followed(context: RankContext) -> None:
    """A plan on a plain module and under DDP, ahead, takes bitwise the steps of compression without a plan."""
    model, sync = attached(dense=thinwire.compress.top_k(0.1))
    expected = train(context, model, range(4))
    sync.detach()
    for groups, ddp in ((PAIRS, None), (ONE, None), (ONE, {})):
        model, sync = attached(ddp, dense=plan_for(groups, "top_k:density=0.1"))
        with sync.trace(steps=4) as trace:
            found = train(context, model, range(4))
        for mine, theirs in zip(found, expected, strict=True):  # biases are summed in other groups, to rounding
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
        assert_same_everywhere(context, found)
        if ddp is None:
            assert jobs_of(trace) == [len(groups)] * 4
        assert sync.stats()["compress/parameters"] == 2
        sync.detach()


def test_a_plan_takes_the_steps_of_what_it_plans() -> None:
    run_ranks(_followed, world_size=2, timeout_seconds=120)


def _mixed(context: RankContext) -> None:
    """One job with four options takes the steps of a job for each of them; also one of a file."""
    options = {
        "last.weight": compress.top_k(0.1).by("all_gather"),
        "middle.weight": compress.power_sgd(),
        "first.weight": compress.error_feedback(compress.top_k(0.1), 0.9).by("zen"),  # which is small
    }
    exact = tuple(name for name in ORDER if name not in options)
    found = []
    for joins in (False, True):
        groups = (Group.of(exact, 0, "auto"), *(Group.of([name], 0, how, joins) for name, how in options.items()))
        plan = Plan.from_json(json.loads(json.dumps(replace(plan_for(ONE), groups=groups).to_json())))
        model, sync = attached(dense=plan)
        assert {sync.methods[name] for name in exact} == {"auto"}
        assert sync.methods["first.weight"] == options["first.weight"]
        with sync.trace(steps=4) as trace:
            found.append(train(context, model, range(4)))
        assert jobs_of(trace) == [1 if joins else 4] * 4
        assert sync.stats()["compress/parameters"] == 3
        assert_same_everywhere(context, found[-1])
        sync.detach()
    for one, other in zip(*found, strict=True):  # exact ones are added together with others, to rounding
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_a_job_of_several_compressors_takes_the_steps_of_its_parts() -> None:
    run_ranks(_mixed, world_size=2, timeout_seconds=120)


class Stack(nn.Module):
    """Without tables, so that a plan has all that a bucket of DDP has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(5)))

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(batch)


def _buckets(context: RankContext) -> None:
    names = [name for name, _ in Stack().named_parameters()][::-1]
    groups = (names[:3], names[3:4], names[4:])
    parameters = [Parameter(name, tuple(entry.shape)) for name, entry in Stack().named_parameters()]
    made = tuple(
        Group(tuple(group), sum(4 * Stack().get_parameter(name).numel() for name in group)) for group in groups
    )
    plan = Plan(2, fingerprint(parameters), made, 1000.0, 1000.0)
    torch.manual_seed(0)
    model = DistributedDataParallel(Stack(), bucket_cap_mb_list=plan.bucket_cap_mb_list())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # DDP forms the groups of the plan
        sync = thinwire.attach(model, dense=plan)
        with sync.trace(steps=4) as trace:
            for _ in range(4):
                model(torch.ones(2, 40)).sum().backward()
    sizes = [sorted(event.arguments["bytes"] for event in step if event.track == "channel") for step in trace.steps]
    assert sizes[1:] == [sorted(group.size_bytes for group in made)] * 3, "after the first pass, which forms them"
    sync.detach()
    for options in ({}, {"bucket_cap_mb": 0.005}, {"find_unused_parameters": True}):
        other = DistributedDataParallel(Stack(), **options)
        with pytest.raises(ValueError, match=r"bucket_cap_mb_list=plan\.bucket_cap_mb_list\(\)"):
            thinwire.attach(other, dense=plan)


def test_ddp_must_have_the_buckets_of_the_plan() -> None:
    run_ranks(_buckets, world_size=2, timeout_seconds=120)


# --- a policy, measured in the run


class Halves:
    """Two groups of as many tensors, whatever was measured."""

    name = "halves"

    def __init__(self, dense: Any = "native") -> None:
        self.dense = dense

    def groups(self, profile: Any) -> tuple[tuple[int, ...], ...]:
        half = profile.num_tensors // 2
        return tuple(range(half)), tuple(range(half, profile.num_tensors))


def _measured(context: RankContext) -> None:
    """Exact and compressed: all ranks switch at the same step, and a resumed run goes on alike."""
    for policy in (Halves(), Halves(thinwire.compress.top_k(0.1))):
        model, sync = attached(dense=policy)
        with sync.trace() as trace:
            parameters = train(context, model, range(13))
        assert_same_everywhere(context, parameters)
        assert jobs_of(trace)[:11] == [1] * 6 + [6] * 4 + [2], "2 that do not count, 8 measured, then the policy's"
        assert sync.stats()["plan/predicted_seconds"] > 0.0
        saved = sync.state_dict()
        sync.detach()
        again = Network()
        again.load_state_dict(model.state_dict())
        resumed = thinwire.attach(again, dense=policy)
        resumed.load_state_dict(saved)
        with resumed.trace() as trace:
            train(context, again, range(2))
        assert jobs_of(trace) == [2, 2]
        resumed.detach()


@pytest.mark.slow
def test_a_policy_is_followed_after_ten_steps() -> None:
    run_ranks(_measured, world_size=2, timeout_seconds=120)


# --- planned anew, dropped


def _drifting(context: RankContext) -> None:
    grouping.DEFAULT_PACE = QUICK
    model, sync = attached(dense=plan_for(PAIRS, predicted_seconds=1e-6))
    parameters = train(context, model, range(20))
    stats = sync.stats()
    assert stats["plan/replans"] >= 1.0, "a step cannot take a microsecond"
    told: list[Any] = [None] * context.world_size
    groups = sync.state_dict()["plan"]["groups"]
    dist.all_gather_object(told, (stats["plan/replans"], groups))
    assert all(other == told[0] for other in told)
    assert_same_everywhere(context, parameters)
    sync.detach()


@pytest.mark.slow
def test_a_plan_that_promised_too_much_is_made_anew() -> None:
    run_ranks(_drifting, world_size=2, timeout_seconds=120)


def _dropped(context: RankContext) -> None:
    """Under DDP and as a plain module, where a step with compression takes five times as long."""
    grouping.DEFAULT_PACE = QUICK
    note = Trial.note
    Trial.note = lambda trial, *_: note(trial, 1.0 if trial.arm == execution.PLAN else 0.2)  # type: ignore[method-assign]
    for ddp in (None, {}):
        plan = plan_for(ONE, "top_k:density=0.1", dense_seconds=1e-6)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model, sync = attached(ddp, dense=replace(plan, fallback=True))
            parameters = train(context, model, range(14))
        told = [str(warning.message) for warning in seen if "It is dropped" in str(warning.message)]
        assert len(told) == (context.rank == 0)
        stats = sync.stats()
        assert stats["plan/dropped"] == 1.0
        before = stats["compress/bytes_sent"]
        parameters = train(context, model, range(2))
        assert sync.stats()["compress/bytes_sent"] == before, "nothing is compressed any more"
        assert_same_everywhere(context, parameters)
        sync.detach()


def test_a_plan_that_does_not_pay_is_dropped_everywhere() -> None:
    run_ranks(_dropped, world_size=2, timeout_seconds=120)


# --- what is refused


def _refused(context: RankContext) -> None:
    for reason, options in {
        "DDP fixed its buckets when it was built": {"ddp": {}, "dense": Halves()},
        "Halves answers for parameter": {"dense": Halves},
        "for 3 ranks, and there are 2": {"dense": plan_for(ONE, world_size=3)},
        "for another model": {"dense": plan_for((ORDER[:4],))},
        "other shapes or dtypes": {"dense": plan_for(ONE, fingerprint="0" * 64)},
    }.items():
        with pytest.raises(ValueError, match=reason):
            attached(**options)
    ours = plan_for(ONE, world_size=2 + context.rank)
    with pytest.raises(ValueError if context.rank else thinwire.MismatchError, match="is for 3 ranks"):
        attached(dense=ours)
    with pytest.raises(thinwire.MismatchError, match="group 0 of the plan"):
        attached(dense=plan_for(PAIRS if context.rank else ONE))
    model, sync = attached(dense=plan_for(ONE))
    assert_same_everywhere(context, train(context, model, range(2)))
    sync.detach()


def test_refusals() -> None:
    run_ranks(_refused, world_size=2, timeout_seconds=120)
