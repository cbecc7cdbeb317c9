"""What thinwire asks of a DDP model: which buckets it forms, its one hook, and what a plug of any model promises."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from thinwire.errors import ThinwireError
from thinwire.gradients import torch_internals as internals
from thinwire.gradients.ddp import (
    Alone,
    Groups,
    Plug,
    _Dispatcher,
    _dispatchers,
    _PlugOfDdp,
    are_same,
    check_buckets,
    check_free,
    expected_buckets,
    install,
    is_joining,
    renew,
)

pytestmark = pytest.mark.usefixtures("one_rank")

SIZES = (300, 40, 500, 7, 1000, 64)


class Layers(nn.Module):
    """Vectors that are used in the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.ones(size) for size in SIZES])

    def forward(self, factor: Tensor) -> Tensor:
        total = factor
        for part in self.parts:
            total = total * part.mean()
        return total


BACKWARD = tuple(f"parts.{number}" for number in reversed(range(len(SIZES))))


def backward(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(())).backward()


def unchanged(bucket: dist.GradBucket) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def of_a_user(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types
    return allreduce_hook(state, bucket)


# --- buckets


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), min_size=1, max_size=6), st.randoms())
def test_groups_are_the_same_in_any_order_and_in_no_other_division(
    numbers: list[list[int]], order: random.Random
) -> None:
    groups = [[f"{place}.{number}" for number in set(group)] for place, group in enumerate(numbers)]
    shuffled = [order.sample(group, len(group)) for group in order.sample(groups, len(groups))]
    assert are_same(groups, shuffled)
    assert not are_same(groups, [*shuffled, ["one more"]])
    assert not are_same(groups, shuffled[1:])
    if len(groups) > 1:
        assert not are_same(groups, [[*shuffled[0], *shuffled[1]], *shuffled[2:]])


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("mb", [0.0001, 0.001, 0.003, 0.0041, 25])
def test_expected_buckets_are_those_that_ddp_forms_once_it_has_seen_a_backward(
    mb: float, settings: dict[str, Any]
) -> None:
    ddp = DistributedDataParallel(Layers(), bucket_cap_mb=mb, **settings)
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    seen: list[tuple[str, ...]] = []

    def target(bucket: dist.GradBucket) -> Future[Tensor]:
        seen.append(tuple(names[id(parameter)] for parameter in bucket.parameters()))
        return unchanged(bucket)

    install(ddp, target)
    for _ in range(3):
        seen.clear()
        backward(ddp)
    assert are_same(seen, expected_buckets(ddp, (BACKWARD,)))
    assert are_same(seen, expected_buckets(ddp, (BACKWARD[:2], BACKWARD[2:]))), "whatever the groups are"
    assert sorted(name for bucket in seen for name in bucket) == sorted(BACKWARD)


def test_a_plan_of_other_groups_is_refused_with_the_line_to_write() -> None:
    groups: Groups = (BACKWARD[:2], BACKWARD[2:])
    check_buckets(DistributedDataParallel(Layers(), bucket_cap_mb=25), (BACKWARD,))
    says = (
        r"the plan has 2 groups, and DDP was built for 1 other buckets.*bucket_cap_mb_list=plan.bucket_cap_mb_list\(\)"
    )
    with pytest.raises(ValueError, match=rf"{says}\); or attach"):
        check_buckets(DistributedDataParallel(Layers(), bucket_cap_mb=25), groups)
    with pytest.raises(ValueError, match=rf"{says}\) and without find_unused_parameters"):
        check_buckets(DistributedDataParallel(Layers(), bucket_cap_mb=25, find_unused_parameters=True), groups)
    assert expected_buckets(DistributedDataParallel(Layers()), ()) == ()


# --- the hook


def test_the_one_hook_has_one_target_at_a_time_and_means_without_one() -> None:
    ddp = DistributedDataParallel(Layers())
    calls: list[int] = []

    def target(bucket: dist.GradBucket) -> Future[Tensor]:
        calls.append(bucket.index())
        return unchanged(bucket)

    install(ddp, target)
    with pytest.raises(ValueError, match="attached to this model already: call detach"):
        install(ddp, target)
    backward(ddp)
    counted = len(calls)
    assert counted > 0
    _dispatchers[ddp].target = None
    ddp.zero_grad()
    backward(ddp)
    assert len(calls) == counted
    assert all(parameter.grad is not None and parameter.grad.all() for parameter in ddp.parameters())
    install(ddp, target)
    backward(ddp)
    assert len(calls) > counted


def test_a_hook_of_the_user_is_left_alone_and_refuses_ours() -> None:
    ddp = DistributedDataParallel(Layers())
    check_free(ddp)
    ddp.register_comm_hook(None, of_a_user)
    with pytest.raises(ValueError, match=r"has a communication hook already.*leave out register_comm_hook"):
        check_free(ddp)
    with pytest.raises(ValueError, match="has a communication hook already"):
        install(ddp, unchanged)
    assert ddp not in _dispatchers
    assert not renew(ddp), "which would drop it"
    assert [hook for hook, _ in internals.comm_hooks(ddp)] == [of_a_user]


@pytest.mark.parametrize(
    ("settings", "stays"), [({}, False), ({"gradient_as_bucket_view": True}, True), ({"static_graph": True}, True)]
)
def test_an_idle_hook_gives_way_where_ddp_can_drop_it(settings: dict[str, Any], stays: bool) -> None:
    ddp = DistributedDataParallel(Layers(), **settings)
    install(ddp, unchanged)
    with pytest.raises(ValueError, match="leave out register_comm_hook"):
        ddp.register_comm_hook(None, of_a_user)
    _dispatchers[ddp].target = None
    if stays:
        with pytest.raises(ValueError, match=r"for another one build DistributedDataParallel\(model\) again"):
            ddp.register_comm_hook(None, of_a_user)
        assert not renew(ddp)
        check_free(ddp)
    else:
        ddp.register_comm_hook(None, of_a_user)
        assert ddp not in _dispatchers
        assert [hook for hook, _ in internals.comm_hooks(ddp)] == [of_a_user]
    backward(ddp)


def test_a_renewed_model_has_had_no_hook() -> None:
    ddp = DistributedDataParallel(Layers())
    for _ in range(2):
        install(ddp, unchanged)
        assert renew(ddp)
        assert ddp not in _dispatchers
        assert internals.comm_hooks(ddp) == []
        backward(ddp)


def test_copies_and_files_of_the_hook_are_torchs_own() -> None:
    hook = _Dispatcher(DistributedDataParallel(Layers()))
    hook.target = unchanged
    assert copy.deepcopy(hook) is allreduce_hook
    assert pickle.loads(pickle.dumps(hook)) is allreduce_hook
    ddp = DistributedDataParallel(Layers())
    install(ddp, unchanged)
    hooks = pickle.loads(pickle.dumps([hook for hook, _ in internals.comm_hooks(ddp)]))
    assert hooks == [allreduce_hook]
    assert type(pickle.loads(pickle.dumps(type(internals.comm_hooks(ddp))([1, 2])))) is list


def test_a_hook_that_is_called_without_a_bucket_says_what_to_set() -> None:
    with pytest.raises(ThinwireError, match=r'python_reducer.*set it to "ddp_optimizer" or False'):
        _Dispatcher(DistributedDataParallel(Layers()))(None, torch.ones(3))  # type: ignore[arg-type]


def test_a_mixed_precision_ddp_is_told_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", object)  # torch's build with CUDA makes none without a driver
    wanted = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    ddp = DistributedDataParallel(nn.Linear(4, 4), mixed_precision=wanted)
    with pytest.raises(ValueError, match="train under torch autocast"):
        check_free(ddp)


# --- plugs


def test_ranks_may_run_out_of_data_only_inside_of_join() -> None:
    ddp = DistributedDataParallel(Layers())
    assert not is_joining(None)
    assert not is_joining(ddp.module)
    assert not is_joining(ddp)
    with ddp.join():
        assert is_joining(ddp)
        assert not _PlugOfDdp(ddp).can_hold
        backward(ddp)
    others = [DistributedDataParallel(Layers(), static_graph=is_static) for is_static in (False, True)]
    assert [_PlugOfDdp(one).can_hold for one in others] == [True, False], "plugs do not keep them alive"


@pytest.mark.parametrize(
    "make",
    [lambda ddp: Plug(), lambda ddp: Alone(ddp.module), Alone, _PlugOfDdp],
    ids=["any", "alone", "alone, DDP", "DDP"],
)
def test_no_sync_may_be_nested_and_ends_with_an_error_too(make: Callable[[DistributedDataParallel], Plug]) -> None:
    ddp = DistributedDataParallel(Layers())
    plug = make(ddp)
    assert plug.synchronizes
    with suppress(KeyError), plug.no_sync():
        assert not plug.synchronizes
        with plug.no_sync():
            assert not plug.synchronizes
        assert not plug.synchronizes
        raise KeyError
    assert plug.synchronizes


def test_a_plug_alone_follows_no_sync_of_its_ddp() -> None:
    ddp = DistributedDataParallel(Layers())
    plug = Alone(ddp)
    with ddp.no_sync():
        assert not plug.synchronizes
    assert plug.synchronizes
    del ddp
    assert plug.synchronizes, "of a model that is gone"


def test_gradients_are_sent_once_in_a_pass_that_adds_nothing_to_them() -> None:
    class Sending(Plug):
        calls = 0

        def _send(self) -> None:
            self.calls += 1

    plug, weight = Sending(), nn.Parameter(torch.ones(3))
    plug.send()
    assert plug.calls == 1
    with torch.no_grad():
        plug._pass_without_work(weight).backward()
    assert plug.calls == 2
    assert weight.grad is None
    plug.in_flight.append(Future())
    assert len(plug.take_in_flight()) == 1
    assert plug.take_in_flight() == []


def test_a_forward_while_gradients_are_held_gets_buffers_as_outside() -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    plug, wanted = _PlugOfDdp(ddp), list[bool]()
    will_sync = ddp._sync_buffers
    ddp._sync_buffers = lambda: wanted.append(True) or will_sync()  # type: ignore[method-assign]
    with plug.hold():
        assert not plug.synchronizes
        for _ in range(2):
            ddp(torch.ones(4, 3)).sum().backward()
    assert plug.synchronizes
    assert ddp.require_forward_param_sync, "the next forward too"
    assert len(wanted) == 2
    assert not ddp._forward_pre_hooks
