"""Triton kernels in Triton's interpreter, on tensors of the CPU; and whether a GPU could run them.

The interpreter shows that a kernel computes what it should. It has one thread, so it cannot show a race, and says
nothing of speed. tests/gpu has the same tests on a real GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU is here: tests/gpu runs these tests on it", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
pytest.importorskip("triton", reason="triton is missing: pip install triton, or torch for CUDA, which brings it")

from gpu_laws import *  # noqa: F403

pytestmark = pytest.mark.slow  # Triton's interpreter takes two minutes for them


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


# Types of the arguments of every kernel, and of its constants, as its wrapper has them.
COMPILED = """
import sys
import triton, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from thinwire.kernels.gpu import bits as gpu_bits, codes as gpu_codes, find as gpu_find, hash as gpu_hash
from thinwire.kernels.gpu import ids as gpu_ids, rows as gpu_rows, union as gpu_union

longs = dict.fromkeys(("words", "weights", "combined"), "*i64")
i32 = {"words": "*i32", "bitmap": "*i32", "homeless": "*i32", "falling": "*i32"}
seeds = dict.fromkeys(("seed_low", "seed_high", "level_seed_low", "level_seed_high"), "i64")
pointers = "ids counts ends hashed positions places count before first keys slots_tried sums"
pointers = dict.fromkeys(pointers.split(), "*i64")
key = {"PLACE_BITS": 40, "BLOCK": 1024}
tiles = {"ROWS": 32, "COLUMNS": 64}
cases = [
    (gpu_bits, "_set_bits", {"size": "i64", "BLOCK": 1024}),
    (gpu_bits, "_count_ones", {"BLOCK": 128}),
    (gpu_bits, "_list_ones", {"BLOCK": 128}),
    (gpu_find, "_flag", {"words": "*i64", **tiles, "BLOCK_ROWS": 4096}),
    (gpu_find, "_flag", {"words": "*i16", "width": 1, "ROWS": 4096, "COLUMNS": 1, "BLOCK_ROWS": 4096}),
    (gpu_ids, "_hash_ids", {"WORLD_SIZE": 0, "BLOCK": 1024}),
    (gpu_ids, "_hash_ids", {"WORLD_SIZE": 7, "BLOCK": 1024, "seed_low": 1}),
    (gpu_ids, "_dealt_ids", {"WORLD_SIZE": 7, "BLOCK": 1024, "owner": 1}),
    (gpu_ids, "_count_owners", {"WORLD_SIZE": 8, "DEALT": True, "BLOCK": 1024, "num_blocks": 1}),
    (gpu_ids, "_scatter_owners", {"WORLD_SIZE": 7, "DEALT": True, "BLOCK": 1024}),
    (gpu_ids, "_scatter_owners", {"WORLD_SIZE": 7, "DEALT": False, "BLOCK": 1024}),
    (gpu_hash, "_try_slots", {"WORLD_SIZE": 8, "FIRST": True, "LAST": False, **key, "slots": "i64"}),
    (gpu_hash, "_try_slots", {"WORLD_SIZE": 8, "FIRST": False, "LAST": False, **key, "rounds_left": 1}),
    (gpu_hash, "_try_slots", {"WORLD_SIZE": 8, "FIRST": False, "LAST": True, **key}),
    (gpu_union, "_count_before", {"BLOCK": 128}),
    (gpu_union, "_rank_ids", {"BLOCK": 1024}),
    (gpu_codes, "_combine_chunk", {**longs, "SHIFT": 29, "CHUNK": 512}),
    (gpu_rows, "_gather", {"source": "*i64", "target": "*i64", **tiles}),
    (gpu_rows, "_scatter", {"source": "*u8", "target": "*u8", "width": 1, "ROWS": 2048, "COLUMNS": 1}),
    (gpu_rows, "_add_rows", {"values": "*bf16", "total": "*fp32", **tiles}),
    (gpu_rows, "_add_rows", {"values": "*fp64", "total": "*fp64", "width": 1, "ROWS": 2048, "COLUMNS": 1}),
    (gpu_rows, "_add_rows_one_by_one", {"values": "*fp16", "total": "*fp32", "num_places": 1, "COLUMNS": 64}),
]
known = {module: {n for n, v in vars(module).items() if hasattr(v, "arg_names")} for module, _, _ in cases}
launched = set().union(*known.values()) - {"popcount", "mixed", "_finalize", "hashed_owner", "_owners"}
assert launched == {name for _, name, _ in cases}, launched ^ {name for _, name, _ in cases}
part, parts, capability = map(int, sys.argv[1:])
for module, name, given in cases[part::parts]:
    kernel = getattr(module, name)
    types = {a: given.get(a, i32.get(a) or pointers.get(a) or seeds.get(a) or "i32") for a in kernel.arg_names}
    constants = {argument: value for argument, value in types.items() if not isinstance(value, str)}
    signature = {argument: "constexpr" if argument in constants else kind for argument, kind in types.items()}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"], name
"""


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("part", range(4))
def test_every_kernel_compiles_for_a_gpu(part: int, capability: int, tmp_path: Any) -> None:
    """To machine code of compute capability 8.0 and 9.0, without a GPU. Scalars that are 1 are constants."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    (tmp_path / "compile.py").write_text(COMPILED)
    command = [sys.executable, str(tmp_path / "compile.py"), str(part), "4", str(capability)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
