"""Compile every kernel that the library launches, for one GPU, on a machine that has none; print what came of it.

    PYTHONPATH=src:.venv/triton-3.9.0 python tests/aot/compile.py sm_90

The library's own functions run on CPU tensors, by `compiling_only`, with a driver that names a GPU and does nothing
else. So each variant is what a training compiles there: same arguments, same specialization, same options. Tensors
have no meaningful values. Each line of the output is the JSON of one variant, and the last one the names of all
kernels. With ``--warm`` the library's own warm-up runs first, and only what it has not compiled is named.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from pkgutil import iter_modules
from tempfile import NamedTemporaryFile
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from thinwire.kernels import gpu
from thinwire.kernels.gpu import find, floats, ids, rows
from thinwire.kernels.gpu.jit import compiling_only
from thinwire.kernels.warm import _compile_for_gpu

MODULES = [import_module(f"{gpu.__name__}.{module.name}") for module in iter_modules(gpu.__path__)]
TARGETS = {f"sm_{capability}": GPUTarget("cuda", capability, 32) for capability in (80, 90, 100)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class NoDevice:
    """A driver of Triton's for a GPU that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


def matrix(num_rows: int, width: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """Zeros whose address is a multiple of 16, plus ``offset`` elements."""
    memory = torch.zeros(num_rows * width + offset + 16, dtype=dtype)
    start = -memory.data_ptr() % 16 // dtype.itemsize + offset
    return memory[start : start + num_rows * width].view(num_rows, width)


def cases(size: int = 40) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of all functions that launch kernels, and names of these, by which tests say what they expect.

    With another size, what varies from step to step in a training is different, lists are parts of others.
    """
    some = torch.arange(size + 1)[size % 2 :]
    for name, width, dtype, offset in (
        ("aligned rows of 64 float32", 64, torch.float32, 0),
        ("unaligned rows of 64 float32", 64, torch.float32, 2),
        ("aligned rows of 50 float32", 50, torch.float32, 0),
        ("aligned rows of 512 float32", 512, torch.float32, 0),
        ("aligned rows of 3 bfloat16", 3, torch.bfloat16, 0),
        ("aligned elements of 8 bytes", 1, torch.float64, 0),
        ("aligned elements of 4 bytes", 1, torch.float32, 0),
        ("unaligned elements of 4 bytes", 1, torch.float32, 1),
        ("aligned elements of 2 bytes", 1, torch.bfloat16, 0),
        ("unaligned elements of 1 byte", 1, torch.uint8, 1),
    ):
        table, others = matrix(2 * size, width, dtype, offset), matrix(some.numel(), width, dtype, offset)
        yield name, lambda table=table: find.find_rows(table, size // 3)
        yield name, lambda table=table: rows.take_rows(table, some)
        yield name, lambda table=table, others=others: rows.put_rows(table, some, others)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for name, width, offset in (("aligned", 64, 0), ("unaligned", 50, 1), ("aligned", 1, 0), ("aligned", 1024, 0)):
            values = matrix(some.numel(), width, dtype, offset)
            name = f"{name} sums of {width} {str(dtype).removeprefix('torch.')}"
            yield name, lambda values=values: rows.merge_rows(some, values, size, size // 2 + 1, 0.5)
    for world_size in (8, 100_000):
        yield f"{world_size} owners", lambda world_size=world_size: ids.deal_rows(some, size, world_size, 2**40 + 1)
        yield f"{world_size} owners", lambda world_size=world_size: ids.dealt_ids(1, some, world_size, 2**40 + 1)
    for name, offset in (("aligned", 0), ("unaligned", 1)):
        positions, bitmap = (matrix(size, 1, dtype, offset).view(-1) for dtype in (torch.int64, torch.uint8))
        yield f"{name} bits", lambda positions=positions: find.pack_bits(positions, 8 * size)
        yield f"{name} bits", lambda bitmap=bitmap: find.find_bits(bitmap, size)


    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for name, offset in (("aligned", 0), ("unaligned", 1)):
            values, message = matrix(size, 50, dtype, offset), matrix(size, 1, torch.uint8, offset).view(-1)
            name = f"{name} floats of {str(dtype).removeprefix('torch.')}"
            yield name, lambda values=values: floats.encode_floats(values)
            yield name, lambda values=values, message=message: floats.decode_floats(message, values)
            yield name, lambda values=values: floats.estimate_floats(values)


def jitted() -> dict[str, Any]:
    found = {}
    for module in MODULES:
        found |= {name: value for name, value in vars(module).items() if isinstance(value, triton.JITFunction)}
    return found


def launched(functions: dict[str, Any]) -> set[str]:
    """The kernels: functions compiled by Triton that no other one calls."""
    called = set()
    for function in functions.values():
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
        called |= {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "id")}
    return set(functions) - called


def measures(kind: str, compiled: Any) -> dict[str, Any]:
    """Registers, spilled bytes, and the bits of the loads and stores of global memory."""
    if kind == "hip":
        code = compiled.asm["amdgcn"]
        numbers = {key: int(re.search(rf"{key}:\s*(\d+)", code)[1]) for key in ("vgpr_count", "vgpr_spill_count")}  # pyrefly: ignore
        widths = [32 * int(words or 1) for words in re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?\b", code)]
        stores = [32 * int(words or 1) for words in re.findall(r"(?:global|buffer)_store_dword(?:x(\d))?\b", code)]
        size = len(compiled.asm["hsaco"])
        fused = re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mad)_(?:f|bf|mix)\w+.*", code)
        fused = [line for line in fused if not re.match(r"v_fma_mix_f32 .*\b1\.0\b", line)]  # a sum with a float16
        return {
            "registers": numbers["vgpr_count"], "spilled": 4 * numbers["vgpr_spill_count"], "size": size,
            "loads": widths, "stores": stores, "fused": fused,
        }  # fmt: skip
    code = compiled.asm["ptx"]
    with NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [NVIDIA / "cuobjdump", "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": numbers["REG"],
        "spilled": max(numbers["STACK"], numbers["LOCAL"]),
        "size": len(compiled.asm["cubin"]),
        "loads": list(map(_bits, re.findall(r"ld\.global\S*", code))),
        "stores": list(map(_bits, re.findall(r"st\.global\S*", code))),
        "fused": re.findall(r"\bfma\.\S*|\S*\.ftz\S*", code),
    }


def _bits(instruction: str) -> int:
    vector = re.search(r"\.v(\d)", instruction)
    return int(re.findall(r"\.[busf](\d+)", instruction)[-1]) * (int(vector[1]) if vector else 1)


def main(target: str, warm: bool) -> None:
    driver.set_active(NoDevice(TARGETS[target]))
    functions = jitted()
    seen: set[int] = set()
    again = []

    def new(what: str) -> Iterator[tuple[str, str, Any]]:
        for kernel, function in functions.items():
            for compiled in function.device_caches[0][0].values():
                if id(compiled) not in seen:
                    seen.add(id(compiled))
                    yield kernel, what, compiled

    if warm:
        with patch.object(torch.cuda, "set_device"):
            _compile_for_gpu(0)
        list(new("warm-up"))
    for size in (40, 1, 16, 41, 5000):
        for case, call in usual(size) if warm else cases(size):
            with compiling_only():
                call()
            for kernel, what, compiled in new(case):
                if warm or size != 40:
                    again.append(f"{kernel} for {what}, size {size}")
                else:
                    found = measures(TARGETS[target].backend, compiled)
                    print(json.dumps({"kernel": kernel, "case": what, **found}))
    names = {"kernels": sorted(launched(functions)), "compiled_again": again, "triton": triton.__version__}
    print(json.dumps({**names, "variants": len(seen)}))


def usual(size: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of a training, for which nothing may be compiled after a warm-up."""
    some = torch.arange(size)
    for dtype, width in product(
        (torch.float32, torch.bfloat16), (1, 16, 32, 48, 64, 96, 128, 256, 384, 512, 1024, 4096)
    ):
        if width * dtype.itemsize % 128 and width not in (1, 16, 32):
            continue
        table, name = torch.zeros(size, width, dtype=dtype), f"{width} {dtype}"
        yield name, lambda table=table: find.nonzero_rows(table)
        yield name, lambda table=table: find.find_rows(table, size)
        yield name, lambda table=table: rows.put_rows(table, some, rows.take_rows(table, some))
        yield name, lambda table=table: rows.merge_rows(some, table, size, size)
        yield name, lambda table=table: rows.sum_rows([(some, table)])
    yield "ids", lambda: ids.dealt_ids(3, ids.deal_rows(some, size, 16, 5)[0], 16, 5)
    yield "bits", lambda: find.find_bits(find.pack_bits(some, size), size)


if __name__ == "__main__":
    main(sys.argv[1], warm="--warm" in sys.argv)
