"""What a newcomer gets wrong is answered with a sentence that says what to do, before anything is sent."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import compress, fuse, schemes
from thinwire.comm.lane import Lane
from thinwire.errors import unknown
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.plan import Group, Plan
from thinwire.tune.prices import Route
from versions import takes_tables


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_buffer("mask", buffer)
    return module


def plan(world_size: int = 1) -> Plan:
    return Plan(world_size, "other", (Group(("fc.weight",), 10),), 0.1, 0.2)


def plan_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


WRONG_OBJECTS: dict[str, tuple[Any, str]] = {
    "optimizer": (torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), "needs the model, not an object of SGD"),
    "class": (nn.Linear, "needs the model, not the class Linear"),
    "nothing": (None, "not an object of NoneType"),
    "list": ([nn.Linear(1, 1)], "not an object of list"),
    "no parameters": (nn.ReLU(), "ReLU has no parameters"),
    "frozen": (nn.Linear(4, 4).requires_grad_(False), "no parameter of Linear requires a gradient"),
    "lazy": (nn.LazyLinear(4), "'weight' is lazy and has no shape yet: run a batch through the model first"),
    "expanded": (
        with_buffer(torch.ones(1, 4).expand(4, 4)),
        "buffer 'mask' is expanded or sparse, .* by exclude='mask'",
    ),
    "sparse": (with_buffer(torch.eye(4).to_sparse()), "buffer 'mask' is expanded or sparse, .*contiguous"),
    "meta": (nn.Linear(4, 4, device="meta"), "on the meta device and has no values yet: see Module.to_empty"),
}


@pytest.mark.parametrize("name", WRONG_OBJECTS)
@pytest.mark.usefixtures("alone")
def test_what_is_no_model(name: str) -> None:
    given, says = WRONG_OBJECTS[name]
    with pytest.raises(ValueError, match=says):
        thinwire.attach(given)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_whole_script_module() -> None:
    with pytest.raises(ValueError, match=r"ScriptModule.*wrap it in an nn.Module, or script its parts"):
        thinwire.attach(torch.jit.script(nn.Linear(4, 4)))


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"rows": "zeen"}, r"unknown scheme 'zeen'; legal are auto, .* Did you mean 'zen'\?$"),
    ({"rows": "ZEN"}, r"Did you mean 'zen'\?$"),
    ({"rows": "two_level:zan"}, r"unknown scheme 'two_level:zan'"),
    ({"rows": compress.top_k(0.01)}, r"top_k\(0.01\) is no scheme: pass a name .*a compressor is for dense="),
    ({"rows": 3}, "3 is no scheme: pass a name"),
    ({"dense": "top_k"}, r"unknown dense 'top_k'; legal are .*, a compressor such as thinwire.compress.top_k\(0.01\)"),
    ({"dense": 0.01}, "dense is 0.01: pass 'native', 'lossless', 'auto', a compressor"),
    ({"dense": compress.top_k}, "a compressor is made by calling its constructor"),
    ({"dense": {"fc": compress.top_k(0.01)}}, "rows can.* has a name like 'fc'; such names are 0.weight"),
    ({"dense": {"0.wieght": compress.top_k(0.01)}}, r"did you mean '0.weight'\?$"),
    ({"dense": {"fc": "lossless"}}, "no parameter has a name like 'fc'; such names are 0.weight, 0.bias"),
    ({"dense": {0: compress.top_k(0.01)}}, r"dense has the key 0: keys are names or patterns"),
    ({"dense": lambda parameter: {}[parameter.name]}, "failed for parameter '0.weight': KeyError: '0.weight'"),
    ({"dense": "zen"}, "unknown dense 'zen'; .*; schemes belong in rows="),
    ({"dense": {"*": "top_k"}}, "unknown dense 'top_k'"),
    ({"dense": {"*": plan()}}, r"for '\*' <Plan .*: pass .* policies of thinwire.fuse and plans are for all gradients"),
    ({"dense": lambda parameter: None}, "answers for parameter '0.weight' None: pass 'native'"),
    ({"dense": None}, "dense is None: pass 'native'"),
    ({"dense": compress.top_k(0.01).by("all_reduce")}, r"leave out .by\(\)"),
    ({"dense": compress.top_k(0.01).by(3)}, "3 is no scheme"),
    ({"dense": "cupcake"}, "unknown dense 'cupcake'"),
    ({"dense": fuse.cupcake}, r"answers for parameter '0.weight' cupcake\("),
    ({"dense": fuse.cupcake(fuse.layerwise())}, r"dense is layerwise\(\): pass .* are for all gradients"),
    ({"dense": plan()}, "another model: it does not know 4 of this model's parameters, such as '0.bias'"),
    ({"dense": plan(4)}, "for 4 ranks, and there are 1: make one"),
    ({"dense": compress.dgc(0.01), "optimizer": torch.optim.SGD}, "pass the optimizer of the model"),
    ({"exclude": 3}, "exclude has 3, which is no parameter or buffer of Sequential"),
    ({"exclude": lambda name: True}, "exclude has <function .*, which is no parameter"),
    ({"exclude": [3]}, "exclude has 3, which"),
    ({"exclude": "*"}, "Sequential has no parameters but those of exclude=, which leaves nothing"),
    ({"timeout": "5"}, r"timeout is '5': pass a positive datetime.timedelta, such as timedelta\(seconds=5\)"),
    ({"timeout": 5}, r"timedelta\(seconds=5\)"),
    ({"grad_scaler": 1}, "grad_scaler is 1: pass the torch.amp.GradScaler"),
    ({"dense": compress.top_k(0.01), "grad_scaler": True}, "grad_scaler is True: pass the torch.amp.GradScaler"),
]


@pytest.mark.parametrize(("arguments", "says"), ARGUMENTS)
@pytest.mark.usefixtures("alone")
def test_wrong_arguments_of_attach(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        thinwire.attach(model(), **arguments)


@pytest.mark.parametrize("dense", ["zen", 3, None, compress.top_k])
@pytest.mark.usefixtures("alone")
def test_a_model_of_tables_only_refuses_what_is_no_way_for_dense_gradients(dense: Any) -> None:
    with pytest.raises(ValueError, match=r"dense is|unknown dense|its constructor"):
        thinwire.attach(nn.Sequential(nn.Embedding(8, 4, sparse=True)), dense=dense)


@pytest.mark.usefixtures("alone")
def test_a_policy_around_a_pattern_compresses_a_table_as_the_pattern_alone_does() -> None:
    table = nn.Sequential(nn.Embedding(64, 64))
    patterns = {"0.weight": compress.top_k(0.01)}
    for dense in (patterns, fuse.cupcake(patterns)):
        thinwire.attach(table, dense=dense).detach()


def _one_mistake_with_rows_in_shards(context: RankContext, rows: str, says: str) -> float:
    """Rank 1 names no scheme, or leaves to FSDP the table of which rank 0 wants rows only."""
    module = fully_shard(nn.Sequential(nn.Embedding(8000, 32), nn.Linear(32, 4)))
    dist.barrier()
    began = time.monotonic()
    kind = ValueError if context.rank and rows != "dense" else thinwire.MismatchError
    with pytest.raises(kind, match=says):
        thinwire.attach(module, rows=rows if context.rank else "zen", timeout=timedelta(seconds=40))
    return time.monotonic() - began


@takes_tables
@pytest.mark.ranks
@pytest.mark.parametrize(("rows", "says"), [("zeen", "unknown scheme 'zeen'"), ("dense", "of which rows travel")])
def test_a_mistake_about_rows_in_shards_is_heard_by_all(rows: str, says: str) -> None:
    for outcome in run_ranks(_one_mistake_with_rows_in_shards, rows, says, world_size=2, timeout_seconds=60):
        assert outcome.value < 20.0


def _one_mistake(context: RankContext, options: dict[str, Any], says: str) -> None:
    has_outer, options, module = "grad_scaler" not in options, options if context.rank else {}, model()
    with pytest.raises(ValueError if context.rank else thinwire.MismatchError, match=says):
        thinwire.attach(module, **options)
    if has_outer:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        with pytest.raises(ValueError if context.rank else thinwire.ThinwireError, match=says):
            thinwire.outer.attach(module, optimizer, thinwire.outer.local_sgd(every=1), **options)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rows": "zeen"}, "unknown scheme 'zeen'"),
        ({"dense": {"*": "top_k"}}, "unknown dense 'top_k'"),
        ({"grad_scaler": 1}, "grad_scaler is 1"),
        ({"timeout": -1}, "timeout is -1: pass"),
        ({"timeout": timedelta(seconds=-1)}, "timeout is -1 s: pass a positive datetime.timedelta"),
        ({"timeout": timedelta()}, "timeout is 0 s: pass a positive datetime.timedelta"),
        ({"exclude": 3}, "exclude has 3"),
    ],
)
def test_a_mistake_on_one_rank_is_heard_by_all(options: dict[str, Any], says: str) -> None:
    run_ranks(_one_mistake, options, says, world_size=2, timeout_seconds=60)


@pytest.mark.usefixtures("alone")
def test_a_model_that_is_attached_already_or_inside_of_ddp() -> None:
    module = model()
    sync = thinwire.attach(module)
    with pytest.raises(ValueError, match=r"attached to this model already, and averages gradients: call detach\(\)"):
        thinwire.attach(module)
    sync.detach()
    sync.detach()
    assert sync.stats()["comm/steps"] == 0.0, "still there when detached"
    ddp = DistributedDataParallel(module)
    with pytest.raises(ValueError, match="attach the plain module instead"):
        thinwire.attach(ddp, dense=fuse.cupcake())
    with pytest.raises(
        ValueError, match=r"'module.0.\*', which is no parameter or .* of Sequential. Did you mean '0.\*'"
    ):
        thinwire.attach(ddp, exclude="module.0.*")
    inner = thinwire.attach(module)
    with pytest.raises(thinwire.ThinwireError, match="attach the DDP model, as in `ddp = DistributedDataParallel"):
        ddp(torch.ones(2, 64)).sum().backward()
    inner.detach()


def _refused(says: str, attach: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "__init__", lambda *arguments: pytest.fail("ranks were to be asked"))
        with pytest.raises(ValueError, match=says):
            attach()


def _shares_parameters(context: RankContext) -> None:
    """A part, the whole, a container, what is compiled, and what DDP averages; in both orders."""
    module = model()
    ddp, compiled = DistributedDataParallel(module), torch.compile(module, backend="eager")
    for part, whole, name in (
        (module[0], module, "(0.)?weight"),
        (module, nn.Sequential(module), "(0.)?0.weight"),
        (module, compiled, "(_orig_mod.)?0.weight"),
        (module, ddp, "0.weight"),
    ):
        for first, second in ((part, whole), (whole, part)):
            sync = thinwire.attach(first)
            says = rf"another {type(first).__name__} with parameter '{name}' of this one already, .*: call detach\(\)"
            _refused(f"{says} .*, or pass exclude='{name}'$", lambda second=second: thinwire.attach(second))
            sync.detach()
            thinwire.attach(second).detach()
    ends = thinwire.attach(module[0]), thinwire.attach(module, exclude="0.*")
    module(torch.full((1, 64), float(context.rank))).sum().backward()
    mean = module[0].weight.grad.clone()
    dist.all_reduce(mean)
    assert torch.equal(mean / 2, module[0].weight.grad)
    for sync in ends:
        sync.detach()
    module[0].requires_grad_(False)  # as a backbone that is trained by none
    ends = thinwire.attach(module), thinwire.attach(nn.Sequential(module[0], nn.Linear(64, 2)))
    for sync in ends:
        sync.detach()
    module[0].requires_grad_(True)
    container = nn.Sequential(module)
    thinwire.attach(container)
    del container
    gc.collect()
    ends = thinwire.attach(ddp), thinwire.attach(DistributedDataParallel(module))  # of which each averages its passes
    for sync in ends:
        sync.detach()


@pytest.mark.ranks
def test_parameters_that_are_synchronized_already_are_refused_before_anything_is_sent() -> None:
    run_ranks(_shares_parameters, world_size=2, timeout_seconds=60)


def _loop_and_attach(context: RankContext) -> None:
    module, loop_of = model(), thinwire.outer.local_sgd(every=4)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def apart(given: nn.Module = module) -> thinwire.OuterLoop:
        return thinwire.outer.attach(given, optimizer, loop_of)

    loop, ddp = apart(), DistributedDataParallel(module)
    says = r"outer loop of {} runs already, and trains ranks apart: call detach\(\) on it first"
    _refused(says.format("this model"), lambda: thinwire.attach(module))
    _refused(says.format("another Sequential with parameter '0.weight' of this one"), lambda: thinwire.attach(ddp))
    _refused(says.format("this model"), apart)
    loop.detach()
    sync = thinwire.attach(module)
    _refused("thinwire is attached to this model already, and averages gradients", apart)
    sync.detach()
    alone = [dist.new_group([rank]) for rank in range(2)][context.rank]
    loop, sync = apart(), thinwire.attach(module, process_group=alone)  # as hosts that average gradients inside
    for ends in (loop, sync):
        ends.detach()


@pytest.mark.ranks
def test_an_outer_loop_and_averaged_gradients_of_the_same_ranks_are_refused() -> None:
    run_ranks(_loop_and_attach, world_size=2, timeout_seconds=60)


@pytest.mark.slow
def test_without_a_process_group() -> None:
    lines = "import thinwire, torch; thinwire.attach(torch.nn.Linear(1, 1))"
    ran = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False)
    last = ran.stderr.splitlines()[-1]
    assert "call torch.distributed.init_process_group() first, and start the script with torchrun" in last


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path / "none.json", "cannot read the plan .*none.json: No such file"),
        (tmp_path, "Is a directory"),
        (plan_file(tmp_path / "text", "hello"), "is no plan, which is a JSON file"),
        (plan_file(tmp_path / "empty", "{}"), "not a plan that this thinwire reads"),
        (Path(__file__).parents[2] / "docs/lstm-100mbit.json", "is a measurement of `thinwire plan --m.*, not a plan"),
    ):
        with pytest.raises(ValueError, match=says) as caught:
            Plan.load(path)
        assert "thinwire plan --measure --output plan.json" in str(caught.value)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: compress.top_k(0.01).by("allreduce"), r"unknown exchange 'allreduce'.*Did you mean 'all_reduce'\?$"),
        (lambda: compress.top_k(1.5), r"in \(0, 1\], not 1.5"),
        (lambda: compress.top_k("1%"), r"in \(0, 1\], not '1%'"),
        (lambda: compress.error_feedback("top_k"), "'top_k' is no compressor: pass one"),
        (lambda: compress.momentum_correction(compress.top_k), "is no compressor: pass one"),
        (lambda: compress.leave_small("top_k"), "pass a compressor"),
        (lambda: compress.error_feedback(compress.error_feedback(compress.top_k(0.01))), "leave error_feedback out"),
        (lambda: compress.power_sgd(0), "rank of at least 1"),
        (lambda: fuse.parse("cupcak"), r"Did you mean 'cupcake'\?"),
    ],
)
def test_wrong_arguments_of_constructors(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.usefixtures("alone")
def test_wrong_arguments_of_a_sum_and_of_a_checkpointer() -> None:
    sparse = torch.ones(3, 3).to_sparse()
    for arguments, says in (
        (([1, 2],), "a tensor is needed, sparse COO or dense, not list"),
        ((sparse, "zan"), r"Did you mean 'zen'\?"),
        ((sparse, "zen", "avg"), "unknown op 'avg'; legal are sum and mean"),
        ((sparse, "zen", "sum", "world"), "pass a ProcessGroup, a DeviceMesh, or None for all"),
        ((sparse, schemes.ZEN, "sum", dist.GroupMember.NON_GROUP_MEMBER), "this rank is not in the process group"),
    ):
        with pytest.raises(ValueError, match=says):
            thinwire.sparse_all_reduce(*arguments)
    storage = thinwire.checkpoint.Storage("run")
    with pytest.raises(ValueError, match=r"optimizer\.inner is of class int, which has no load_state_dict"):
        thinwire.checkpoint.Checkpointer(model(), {"inner": 7}, storage=storage)
    with pytest.raises(ValueError, match="model is of class str"):
        thinwire.checkpoint.Checkpointer("model", storage=storage)


def test_python_suggests_the_nearest_public_name() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import thinwire; thinwire.attatch"], capture_output=True, text=True, check=False
    )
    assert "Did you mean: 'attach'?" in ran.stderr


def test_the_nearest_name_is_suggested_only_if_there_is_one() -> None:
    assert str(unknown("scheme", "Zen", ["auto", "zen"])) == (
        "unknown scheme 'Zen'; legal are auto, zen. Did you mean 'zen'?"
    )
    assert str(unknown("route", "stage", Route)).endswith("Did you mean 'staged'?")
    assert str(unknown("scheme", "x", ["zen"], " or a Scheme")) == "unknown scheme 'x'; legal are zen or a Scheme"
