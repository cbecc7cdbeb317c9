"""PyTorch's own DDP tests on Gloo, with every DistributedDataParallel attached as soon as it is built, or without.

    python tests/attach/suite.py attached test_ddp_inference test_ddp_uneven_inputs

prints one JSON object: for each test "passed", or why it was skipped or failed. The first argument is "stock",
"attached", or "hooked": attached, and models that would be left to stock DDP get the communication hook too. Without
names all tests run that build a DDP. With "gloo" or "thinwire", the back end, all tests run, and nothing is attached.
Most of them are written for GPUs: here "cuda" means the CPU. Each test runs on two ranks that are forked for it, so
none sees what another has left behind.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
import time
import traceback
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

WORLD_SIZE = 2
TEST_SECONDS = float(os.environ.get("TS", "60"))
GRACE_SECONDS = 2.0  # for the other rank, once one has failed
os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
try:
    import expecttest  # noqa: F401
except ImportError:  # torch's test utilities import it, and no test of DDP uses it
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed, common_utils

common_distributed.skip_if_lt_x_gpu = lambda *args, **options: lambda test: test
common_distributed.skip_if_no_gpu = lambda test: test
from torch.testing._internal.distributed import distributed_test

import _thinwire_backend
import thinwire
import thinwire.outer.loop  # what attach imports, before ranks are forked: it took most of their time

BACK_ENDS = ("gloo", "thinwire")
BASE = distributed_test.DistributedTest._DistTestBase
MODES = ("stock", "attached", "hooked", "gloo", "thinwire")
TOO_LONG = {"test_ddp_uneven_inputs"}  # over two minutes here: convolutions, in 40 ways to run out of data


class OnCpu(TorchFunctionMode):
    """Tensors asked for on a GPU are on the CPU."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if "device" in options:
            options["device"] = _on_cpu(options["device"])
        if function in (torch.Tensor.to, torch.device, torch._C._nn._parse_to):
            args = tuple(map(_on_cpu, args))
        return function(*args, **options)


def _on_cpu(device: object) -> object:
    is_number = isinstance(device, int) and not isinstance(device, bool)
    is_gpu = (isinstance(device, str) and device.startswith("cuda")) or getattr(device, "type", "") == "cuda"
    return "cpu" if is_number or is_gpu else device


class Case(BASE, distributed_test.TestDistBackend):
    """The tests, run by a rank itself instead of by processes that it starts."""

    world_size = WORLD_SIZE

    def join_or_run(self, test: Callable[[], None]) -> Callable[[], None]:
        return test


def names(mode: str) -> Iterator[str]:
    """Yield the names of all tests, or of those that build a DDP, directly or by a method that they call."""
    if mode in BACK_ENDS:
        yield from (name for name in vars(BASE) if name.startswith("test_") and name not in TOO_LONG)
        return
    sources = {name: inspect.getsource(value) for name, value in vars(BASE).items() if inspect.isfunction(value)}
    builders = {name for name, source in sources.items() if "DistributedDataParallel(" in source}
    while more := {
        name
        for name, source in sources.items()
        if name not in builders and any(f"self.{other}(" in source for other in builders)
    }:
        builders |= more
    yield from (name for name in sources if name in builders - TOO_LONG and name.startswith("test_"))


def _patch_ddp(mode: str) -> None:
    build = DistributedDataParallel.__init__

    def init(self: DistributedDataParallel, module: nn.Module, *args: Any, **options: Any) -> None:
        args = (None, None, *args[2:])[: len(args)]  # device_ids and output_device
        options |= {key: None for key in ("device_ids", "output_device") if key in options}
        build(self, module, *args, **options)
        if mode in ("stock", *BACK_ENDS):
            return
        sync = thinwire.attach(self)
        if mode == "hooked":  # models that would be left to DDP get the hook, too
            sync.watch_lane(lambda start, end: None)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _patch_cuda() -> None:
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, lambda *args, **options: None)
    torch.cuda.device_count = lambda: WORLD_SIZE  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    nn.SyncBatchNorm.convert_sync_batchnorm = lambda module, group=None: module  # type: ignore[assignment]  # GPUs only
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda self, module: None  # type: ignore[assignment]


def _rank(rank: int, mode: str, name: str, directory: Path) -> None:
    """Run one test as one rank, and write how it went."""
    os.environ |= {"RANK": str(rank), "TEMP_DIR": str(directory)}
    log = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    outcome = "passed"
    try:
        _thinwire_backend.register()
        distributed_test.Barrier.init()
        dist.init_process_group(
            "thinwire" if mode == "thinwire" else "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=WORLD_SIZE,
            timeout=timedelta(seconds=TEST_SECONDS / 2),
        )
        _patch_ddp(mode)
        _patch_cuda()
        common_utils.set_rng_seed()
        warnings.simplefilter("ignore")
        case = Case(name)
        case.rank, case.file_name = rank, str(directory / "store")
        with OnCpu():
            getattr(case, name)()
        dist.barrier()
    except unittest.SkipTest as reason:
        outcome = f"skipped: {reason}"
    except SystemExit as reason:
        outcome = "passed" if reason.code == 0 else f"skipped: {_skip_reason(reason.code)}"
    except BaseException:
        outcome = f"failed: {traceback.format_exc()}".split("\nTo execute this test")[0].strip()
    (directory / f"rank{rank}.part").write_text(outcome)
    (directory / f"rank{rank}.part").rename(directory / f"rank{rank}")
    os._exit(0)


def _skip_reason(code: object) -> str:
    return next((skip.message for skip in common_distributed.TEST_SKIPS.values() if skip.exit_code == code), str(code))


def run(mode: str, name: str) -> str:
    """Fork the ranks of one test, and return how it went on the rank where it went worst."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        for folder in ("barrier", "test_dir", "init_dir"):
            (directory / folder).mkdir()
        ranks = []
        for rank in range(WORLD_SIZE):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                _rank(rank, mode, name, directory)
        outcomes = _wait(ranks, directory)
        for order in ("failed", "skipped"):
            if worst := [outcome for outcome in outcomes if outcome.startswith(order)]:
                return worst[0]
        return "passed"


def _wait(ranks: list[int], directory: Path) -> list[str]:
    end = time.monotonic() + TEST_SECONDS
    left = set(ranks)
    while left and time.monotonic() < end:
        for process in [process for process in left if os.waitpid(process, os.WNOHANG)[0]]:
            left.discard(process)
            path = directory / f"rank{ranks.index(process)}"
            if not path.exists() or path.read_text().startswith("failed"):
                end = min(end, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.01)
    for process in left:
        os.kill(process, 9)
        os.waitpid(process, 0)
    paths = [directory / f"rank{rank}" for rank in range(WORLD_SIZE)]
    texts = [path.read_text() if path.exists() else "" for path in paths]
    output = (directory / "output").read_text()[-2000:]
    is_known = any(text.startswith("failed") for text in texts)
    missing = "passed" if is_known else f"failed: no result after {TEST_SECONDS:g} s\n{output}"
    return [text or missing for text in texts]


if __name__ == "__main__":
    mode, *chosen = sys.argv[1:]
    assert mode in MODES, f"the first argument is one of {MODES}"
    torch.set_num_threads(1)
    results = {}
    for name in chosen or names(mode):
        start = time.monotonic()
        results[name] = run(mode, name)
        print(f"{time.monotonic() - start:6.2f} s  {name}: {results[name].strip().splitlines()[-1]}", file=sys.stderr)
    print(json.dumps(results))
