"""Every private name of torch's process groups that is needed is there in this torch, and is what it is taken for."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from thinwire.comm import c10d


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
