"""Every private name of torch's process groups that is needed is there in this torch, and is what it is taken for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from hidden import Without
from thinwire import backend
from thinwire.checkpoint import Checkpointer, MemoryWriter, Storage
from thinwire.comm import c10d
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.outer import Members, diloco
from thinwire.reproducible import Steps


@pytest.mark.usefixtures("one_rank")
def test_groups_have_a_device_a_store_and_a_name_of_our_choice() -> None:
    world = dist.group.WORLD
    assert world is not None
    assert c10d.device_of(world) == torch.device("cpu")
    c10d.store_of(world).set("mine", "here")
    c10d.default_store().set("default", "there")
    assert c10d.default_store().get("default") == b"there"
    group = c10d.gloo_group("a name", [0], timedelta(seconds=9))
    assert (group.rank(), group.size(), dist.get_process_group_ranks(group)) == (0, 1, [0])
    assert dist.get_backend(group) == "gloo"
    dist.destroy_process_group(group)


@pytest.mark.usefixtures("one_rank")
def test_a_local_group_of_torchs_has_the_same_name_whatever_groups_are_ours() -> None:
    """Before 2.14 torch counts groups for it."""
    group = c10d.gloo_group("another name", [0], timedelta(seconds=9))
    one = dist.new_group([0], use_local_synchronization=True)
    dist.destroy_process_group(group)
    two = dist.new_group([0], use_local_synchronization=True)
    assert one.group_name != two.group_name
    dist.destroy_process_group(two)
    dist.destroy_process_group(one)


def test_groups_of_gloo_have_a_timeout() -> None:
    assert c10d.default_timeout() > timedelta(0)


def test_a_method_that_is_never_compiled_runs_as_it_is() -> None:
    """A compiler that saw it would call its own back end."""

    def halved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor / 2

    def refused(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> None:
        raise AssertionError(f"compiled {graph.code}")

    c10d.never_compiled(halved)
    assert torch.compile(halved, backend=refused)(torch.ones(())) == 0.5


@pytest.mark.parametrize("name", ["set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction"])
def test_a_torch_without_a_name_of_the_compiler_still_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.eval_frame, name)
    assert c10d.never_compiled(lambda: 3)() == 3


@pytest.mark.usefixtures("one_rank")
def test_a_group_that_torch_does_not_know_has_a_timeout_and_global_ranks() -> None:
    group = c10d.unregistered_group(dist.HashStore(), [0], 0, timedelta(seconds=7))
    assert c10d.timeout_of(group) == timedelta(seconds=7)
    c10d.set_timeout(group, timedelta(seconds=5))
    assert c10d.back_end_of(group).options.global_ranks_in_group == [0]
    with pytest.raises(RuntimeError):
        c10d.back_end_of(group, "cuda")
    ones = torch.ones(2)
    group.allreduce([ones]).wait()
    assert torch.equal(ones, torch.ones(2))


def _calls() -> list[tuple[str, str, Callable[[], object]]]:
    """What makes groups, the names that it needs, and a call of it."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, both = Storage(run_id="of a test"), f"{c10d.NEEDED} {c10d.UNREGISTERED}"
    outer = lambda recipe, group=None: thinwire.outer.attach(model, optimizer, recipe, process_group=group)  # noqa: E731
    return [
        ("attach", c10d.NEEDED, lambda: thinwire.attach(model)),
        ("sparse_all_reduce", c10d.NEEDED, lambda: thinwire.sparse_all_reduce(torch.ones(4))),
        ("a checkpoint in memory", c10d.NEEDED, lambda: Checkpointer(model, storage=kept)),
        ("a checkpoint in memory", c10d.NEEDED, lambda: MemoryWriter(kept)),
        ("outer.attach", c10d.NEEDED, lambda: outer(diloco(every=2))),
        ("outer.attach", both, lambda: outer(diloco(every=2, min_ranks=1))),
        ("outer.attach", both, lambda: outer(diloco(every=2), Members(dist.HashStore(), 0, 2))),
        ("reproducible.Steps", both, lambda: Steps(model, micro_batches=2, steps=2)),
        ("reproducible.Steps", both, lambda: Steps(model, 2, 2, process_group=Members(dist.HashStore(), 0, 2))),
        ('the back end "thinwire"', c10d.UNREGISTERED, lambda: backend.create(None, None)),  # type: ignore[arg-type]
    ]


def _refuses_alone(context: RankContext) -> list[float]:
    for what, names, call in _calls() if context.rank == 0 else ():  # it would wait for the others if it sent anything
        for name in names.split():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(c10d, "distributed_c10d", Without(c10d.distributed_c10d, name))
                with pytest.raises(ValueError, match=f"^{what} does not know torch ") as refused:
                    call()
            for part in (torch.__version__, repr(name.split(".")[-1]), f": install torch {c10d.TESTED}, or "):
                assert part in str(refused.value), (what, name)
    return thinwire.sparse_all_reduce(torch.ones(2)).tolist()


@pytest.mark.ranks
def test_a_torch_without_a_name_is_refused_before_anything_is_sent() -> None:
    """By each call that makes groups, for each name that it needs."""
    assert [outcome.value for outcome in run_ranks(_refuses_alone, world_size=2)] == [[2.0, 2.0]] * 2
