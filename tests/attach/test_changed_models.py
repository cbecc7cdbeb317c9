"""Models that change after attach, or that not all ranks attach: a clear error on each rank, and no rank hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.errors import LostPeerError
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 16)
        self.hidden = nn.Linear(16, 32)
        self.out = nn.Linear(32, 8)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.hidden(self.words(words).to(self.hidden.weight.dtype)))


def cast(net: nn.Module) -> None:
    net.to(torch.float64)


def add_a_parameter(net: nn.Module) -> None:
    net.hidden.gain = nn.Parameter(torch.ones(32))


def replace_a_parameter(net: nn.Module) -> None:
    net.out.weight = nn.Parameter(torch.ones(8, 32))


def reshape(net: nn.Module) -> None:
    net.out.weight.data, net.out.bias.data = torch.ones(4, 32), torch.ones(4)


def replace_a_module(net: nn.Module) -> None:
    net.out = nn.Linear(32, 8)


AGAIN = r"after attach.*call detach\(\) on its Synchronizer before, and attach again"
CHANGES: dict[Callable[[nn.Module], None], str] = {
    cast: rf"'words.weight' became torch.float64 \[1000, 16\] on cpu {AGAIN}",
    reshape: rf"'out.weight' became torch.float32 \[4, 32\] on cpu {AGAIN}",
    add_a_parameter: rf"'hidden.gain' was added or replaced {AGAIN}",
    replace_a_parameter: rf"'out.weight' was added or replaced {AGAIN}",
    replace_a_module: rf"'out.weight' was added or replaced {AGAIN}",
}


def step(model: nn.Module, size: int) -> None:
    model(torch.arange(size)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def attached(ddp: bool) -> tuple[nn.Module, nn.Module, thinwire.Synchronizer]:
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net, find_unused_parameters=True) if ddp else net
    sync = thinwire.attach(model, timeout=timedelta(seconds=20))
    step(model, 5)
    return net, model, sync


def _refused(context: RankContext, ddp: bool) -> None:
    for change, message in list(CHANGES.items())[: 1 if ddp else None]:
        net, model, sync = attached(ddp)
        net.words.weight = net.words.weight  # the same one again
        net.hidden.scale = nn.Parameter(torch.ones(1), requires_grad=False)  # no gradient to average
        step(model, 6)
        change(net)
        with pytest.raises(thinwire.ThinwireError, match=message):
            step(model, 7)
        sync.detach()
        step(net, 5)  # as stock does


@pytest.mark.few(1)
@pytest.mark.parametrize("ddp", [True, False])
def test_a_changed_model_is_refused_on_all_ranks(ddp: bool) -> None:
    run_ranks(_refused, ddp, world_size=2)


def _changed_on_one(context: RankContext) -> float:
    net, model, _sync = attached(ddp=False)
    if context.rank:
        replace_a_module(net)
    began = time.monotonic()
    with pytest.raises(thinwire.ThinwireError, match=r"'out\.weight' was added" if context.rank else "rank 1|rank 0"):
        step(model, 7)
    return time.monotonic() - began


def test_the_peers_of_a_changed_model_do_not_wait_for_the_timeout() -> None:
    for outcome in run_ranks(_changed_on_one, world_size=2):
        assert outcome.value < 15, "the timeout is 20 s"


def _on_some(context: RankContext) -> None:
    if context.rank == 0:
        with pytest.raises(thinwire.LostPeerError, match=r"rank 1 stopped .* must be called on all") as caught:
            thinwire.attach(Net(), timeout=timedelta(seconds=1))
        assert caught.value.rank == 1
        context.send("refused")
    else:
        time.sleep(3)


def test_attach_on_some_ranks_only_says_so() -> None:
    run_ranks(_on_some, world_size=2, on_message=lambda rank, message: None)


def _scripted(context: RankContext) -> None:
    """A table is traced and a layer is scripted: the model trains as it does without."""
    for ddp in (False, True):
        trained = []
        for scripted in (False, True):
            torch.manual_seed(0)
            net = Net()
            if scripted:
                net.words = torch.jit.trace(net.words, torch.arange(5))
                net.hidden = torch.jit.script(net.hidden)
            model = DistributedDataParallel(net) if ddp else net
            sync = thinwire.attach(model, timeout=timedelta(seconds=20))
            for index in range(4):
                step(model, 3 + index + 5 * context.rank)
            trained.append([parameter.detach().clone() for parameter in net.parameters()])
            sync.detach()
        torch.testing.assert_close(trained[1], trained[0])


@pytest.mark.slow
def test_parts_may_be_compiled_by_torchscript() -> None:
    run_ranks(_scripted, world_size=2)


def _in_another_order(context: RankContext) -> str:
    models = [Net(), Net()]
    for model in models:
        thinwire.attach(model, timeout=timedelta(seconds=4))
    for model in models if context.rank else reversed(models):
        try:
            step(model, 5)
        except thinwire.ThinwireError as error:
            return str(error)
    return ""


def test_models_that_run_backward_in_another_order_say_so() -> None:
    found = [one.value for one in run_ranks(_in_another_order, world_size=2, timeout_seconds=60)]
    assert all(found)
    assert any("or several attached models ran backward in another order" in message for message in found), found


def _trains_on(context: RankContext, rows: str, where: str) -> None:
    """Rank 1 fails once; all detach, attach the same DDP model again, and have the means of stock from then on."""
    net = Net()
    ddp = DistributedDataParallel(net)
    words = torch.arange(40).view(4, 10) + context.rank
    sync = thinwire.attach(ddp, rows=rows)

    def step() -> None:
        ddp.zero_grad()
        ddp(words).square().mean().backward()

    def fails(*_: object) -> None:
        raise ValueError("once")

    step()
    if context.rank == 1:
        hook = net.hidden.register_full_backward_hook if where == "backward" else net.hidden.register_forward_hook
        handle = hook(fails)
    with pytest.raises((ValueError, LostPeerError)):
        step()
    if context.rank == 1:
        handle.remove()
    sync.detach()
    sync = thinwire.attach(ddp, rows=rows)
    for _ in range(3):
        step()
        for parameter, mine in zip(
            net.parameters(), torch.autograd.grad(net(words).square().mean(), [*net.parameters()]), strict=True
        ):
            dist.all_reduce(mine)
            torch.testing.assert_close(parameter.grad, mine / context.world_size)
    sync.detach()


@pytest.mark.parametrize("where", ["backward", "forward"])
@pytest.mark.parametrize("rows", ["auto", "zen"])
def test_a_ddp_model_trains_on_after_a_failure_once_it_is_attached_again(rows: str, where: str) -> None:
    """The reducer of a rank whose backward has failed waits for the rest of it."""
    run_ranks(_trains_on, rows, where, world_size=2, timeout_seconds=60)
