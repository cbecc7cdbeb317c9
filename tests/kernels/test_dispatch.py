"""Which twin of a kernel gets tensors of a GPU, and that a line says so where it is not Triton's. No GPU is needed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import dispatch
from thinwire.kernels.reference import codes as reference_codes
from thinwire.kernels.reference import rows as reference


class OnGpu(Tensor):
    """Says that it is on a GPU, and is not."""

    is_cuda = True  # pyrefly: ignore [bad-override]

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Triton kernels that say so, for tensors `OnGpu`."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(dispatch, "_BUILT_FOR_GPU", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    compiled = SimpleNamespace(
        dealt_ids=lambda owner, positions, *_: "triton",
        sum_rows=lambda pieces, scale=1.0: f"triton, {len(list(pieces))} pieces",
    )
    monkeypatch.setattr(dispatch, "_has_triton", lambda device: True)
    monkeypatch.setattr(dispatch, "_module", lambda name: compiled)
    return compiled


def on_gpu(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnGpu)


def test_cuda_tensors_go_to_triton(as_on_gpu: SimpleNamespace) -> None:
    ids, values = on_gpu(torch.arange(3)), on_gpu(torch.ones(3, 2))
    assert kernels.dealt_ids(0, ids, 2, 0) == "triton"
    for pieces in ([(ids, values)] * 2, iter([(ids, values)] * 2)):
        assert kernels.sum_rows(pieces) == "triton, 2 pieces"
    positions = torch.arange(3)
    expected = reference.dealt_ids(0, positions, 2, 0)
    assert torch.equal(kernels.dealt_ids(0, positions, 2, 0), expected), "those of the CPU do not"
    total = kernels.sum_rows_at(iter([(torch.arange(3), torch.ones(3, 2))] * 2), 3, 2, torch.float32)
    assert torch.equal(total, torch.full((3, 2), 2.0))


def test_what_triton_does_not_know_goes_to_the_reference(as_on_gpu: SimpleNamespace) -> None:
    assert kernels.dealt_ids(0, on_gpu(torch.arange(3, dtype=torch.int32)), 2, 0).dtype == torch.int32
    assert kernels.count_at_least(on_gpu(torch.arange(3.0)), 1.0) == 2, "has no Triton twin"
    with kernels.using("reference"):
        assert torch.equal(
            kernels.dealt_ids(0, on_gpu(torch.arange(3)), 2, 0), reference.dealt_ids(0, torch.arange(3), 2, 0)
        )


@pytest.mark.slow
def test_without_triton_the_reference_runs_and_one_line_says_so() -> None:
    code = """
import logging, sys
sys.modules["triton"] = None
logging.basicConfig(level=logging.INFO)
import torch
from thinwire import kernels
torch.cuda.get_device_capability = lambda *_: (9, 0)
from thinwire.kernels import dispatch
class OnGpu(torch.Tensor):
    is_cuda = True
tensor = torch.ones(1).as_subclass(OnGpu)
assert not dispatch.runs_on_gpu(tensor)
assert not dispatch.runs_on_gpu(tensor)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("WARNING:thinwire:") == 1
    assert "run in plain torch, which is slower: ModuleNotFoundError" in result.stderr


def fails(*_: object) -> Tensor:
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")


@pytest.mark.parametrize(
    ("capability", "finds", "reason"),
    [
        ((6, 1), lambda tensor: torch.tensor([1, 3]), "compute capability 7.0, not 6.1"),
        ((9, 0), fails, "Failed to find C compiler. Please specify"),
        ((9, 0), lambda tensor: torch.tensor([1, 2]), r"found [1, 2], not [1, 3]"),
        ((9, 0), lambda tensor: torch.tensor([1, 3]), ""),
    ],
)
def test_a_gpu_on_which_triton_does_not_run_gets_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, as_on_gpu: SimpleNamespace,
    capability: tuple[int, int], finds: Callable[[Tensor], Tensor], reason: str,
) -> None:  # fmt: skip
    """Too old for it, without a compiler for the driver's stub, or wrong; a launch shows it, and one line says so."""
    monkeypatch.undo()
    as_on_gpu.nonzero_rows = finds
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(dispatch, "_BUILT_FOR_GPU", True)
    monkeypatch.setattr(dispatch, "_module", lambda name: as_on_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    dispatch._has_triton.cache_clear()
    try:
        with caplog.at_level("INFO", "thinwire"):
            results = [kernels.dealt_ids(0, on_gpu(torch.arange(3)), 2, 0) for _ in range(2)]
    finally:
        dispatch._has_triton.cache_clear()
    expected = reference.dealt_ids(0, torch.arange(3), 2, 0).tolist()
    assert [result if reason == "" else result.tolist() for result in results] == [expected if reason else "triton"] * 2
    assert len(caplog.messages) == bool(reason)
    assert reason in caplog.text


def test_the_reference_on_a_gpu_takes_codes_through_the_host(as_on_gpu: SimpleNamespace) -> None:
    """They are numpy's."""
    ids = torch.tensor([1, 5, 9])
    dense = torch.tensor([[0.0], [2.0], [0.0], [3.0]])
    with kernels.using("reference"):
        bitmap = kernels.pack_bits(on_gpu(ids), 12)
        assert torch.equal(bitmap, reference_codes.pack_bits(ids, 12))
        assert kernels.find_bits(on_gpu(bitmap), 4)[0].tolist() == [1, 5, 9, 16]
        assert kernels.find_rows(on_gpu(dense), 3)[0].tolist() == [1, 3, 4]


@pytest.mark.parametrize("capacity", [0, 1, 2, 3])
def test_what_does_not_fit_is_counted(capacity: int) -> None:
    ids, count = kernels.find_rows(torch.tensor([[0.0], [2.0], [0.0], [3.0]]), capacity)
    assert ids.tolist() == [1, 3, 4][:capacity]
    assert count.tolist() == [2]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_warm_up_compiles_for_the_device_of_the_process_and_launches_nothing(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """In a thread of its own; each local rank starts elsewhere, so that together they are soon done."""
    calls, compiling, devices = [], [], []

    class Module:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args, **settings: calls.append((name, list(compiling), threading.current_thread().name))

    @contextmanager
    def compiling_only() -> Iterator[None]:
        compiling.append("compiles only")
        yield
        compiling.clear()

    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(dispatch, "has_numba", lambda: False)
    monkeypatch.setattr(dispatch, "_module", lambda name: Module())
    jit = SimpleNamespace(compiling_only=compiling_only)
    monkeypatch.setitem(sys.modules, "thinwire.kernels.gpu.jit", cast(ModuleType, jit))
    kernels.warm_up()
    assert devices == [5]
    with_twins = {kernel.name for kernel in dispatch.KERNELS.values() if kernel.gpu}
    assert {name for name, _, _ in calls} == with_twins - {"encode_floats", "decode_floats", "estimate_floats"}, (
        "no step of a training codes floats on a GPU yet"
    )
    assert {tuple(state) for _, state, _ in calls} == {("compiles only",)}
    assert {thread for _, _, thread in calls} == {"thinwire-compiles-triton"}
    assert (calls[0][0] == "nonzero_rows") == (rank == 0)
    with kernels.using("reference"):
        calls.clear()
        kernels.warm_up()
    assert calls == []


def test_floats_go_through_the_host_where_triton_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is written to, and what it decides."""
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    values = torch.randn(2000).bfloat16()
    encode, decode = (
        dispatch._on_gpu(dispatch.KERNELS[name], False, getattr(kernels, name))
        for name in ("encode_floats", "decode_floats")
    )
    message, out = encode(values), torch.zeros_like(values)
    assert message.numel() < values.nbytes
    assert decode(message, out) is True
    assert torch.equal(out, values)
    assert decode(message[:-1], out) is False


@pytest.mark.parametrize("name", [name for name, kernel in dispatch.KERNELS.items() if not kernel.equal_bits])
def test_twins_of_other_bits_do_not_take_turns_under_deterministic_algorithms(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """When a kernel is compiled depends on the clock."""
    kernel, called = dispatch.KERNELS[name], []
    monkeypatch.setattr(dispatch, "is_compiled", lambda name: True)
    monkeypatch.setattr(dispatch, "has_numba", lambda: True)
    monkeypatch.setattr(dispatch.Kernel, "on_cpu", lambda self: lambda *args: called.append(self.name))
    monkeypatch.setattr(dispatch, "_forced", "auto")
    call, sample = dispatch._dispatched(kernel.reference, replace(kernel, from_size=0)), next(kernel.samples())
    sample.call(call)
    assert called == [name]
    torch.use_deterministic_algorithms(True)
    try:
        sample.call(call)
    finally:
        torch.use_deterministic_algorithms(False)
    assert called == [name]
