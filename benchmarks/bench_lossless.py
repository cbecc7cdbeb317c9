"""Measure the code of floats beside memcpy, its bits beside an ideal code, or fuzz it.

    python benchmarks/bench_lossless.py                       # simulated gradients
    python benchmarks/bench_lossless.py --gradients a.pt ...  # of ranks: each file a list of equal-sized float32
    python benchmarks/bench_lossless.py --fuzz 10000000       # blocks that must come back, and malformed ones

The ideal code has, for each chunk, the sign, the entropy of the exponent, that of the trailing zeros of the mantissa
given the exponent, and the mantissa's other bits. One thread; each time is the best of several.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.cpu.floats import _decode, _encode
from thinwire.kernels.jit import njit
from thinwire.kernels.reference.floats import LAYOUTS, words_of
from thinwire.rows import floats

SIMULATED = 1 << 20
REPEATS = 10
POOL_VALUES = 1 << 13
GUARD = 64
INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients", nargs="+", type=Path, help="files of torch.save: a list of tensors, one a rank")
    parser.add_argument("--fuzz", type=int, metavar="BLOCKS", help="round trips of as many random blocks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels.warm_up()
    result = fuzz(options.fuzz, options.seed) if options.fuzz else measure(options.gradients or [])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(files: list[Path]) -> list[dict[str, float | str]]:
    print("bits of a value; GB/s and million values a second")
    print(f"{'values':32} {'ideal':>6} {'code':>6} {'est.':>6}  {'encode':>13} {'decode':>14} {'memcpy':>7}")
    return [measure_one(name, values) for name, values in inputs(files)]


def inputs(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield gradients of one rank in several dtypes, and float32 sums of several ranks in their order."""
    generator = torch.Generator().manual_seed(0)
    simulated = [torch.randn(SIMULATED, generator=generator).bfloat16().float() for _ in range(16)]
    ranks_of = {path.stem: torch.load(path) for path in files} or {"normal": simulated}
    for name, ranks in ranks_of.items():
        yield name, ranks[0].float()
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            yield f"{name} as {str(dtype).removeprefix('torch.')}", ranks[0].to(dtype)
        for count in (2, 4, 8, 16):
            if count <= len(ranks):
                total = ranks[0].float().clone()
                for values in ranks[1:count]:
                    total += values
                yield f"{name} sum of {count}", total
    if not files:
        yield "float32 without zero low bits", torch.randn(SIMULATED, generator=generator)
        yield "weights of a linear layer", torch.nn.Linear(1024, 1024).weight.detach()
        yield "30 % zeros", simulated[0] * (torch.rand(SIMULATED, generator=generator) > 0.3)


def measure_one(name: str, values: Tensor) -> dict[str, float | str]:
    message, out = floats.encode(values), torch.empty_like(values)
    floats.decode(message, out)
    assert torch.equal(out.view(torch.uint8), values.view(torch.uint8)), name
    bits = 8 * message.numel() / values.numel()
    seconds = [
        best_of(call)
        for call in (lambda: floats.encode(values), lambda: floats.decode(message, out), lambda: out.copy_(values))
    ]
    encode, decode, copy = (values.nbytes / each / 1e9 for each in seconds)
    ideal, estimate = ideal_bits(values), floats.bits_per_value(values)
    rates = [values.numel() / each / 1e6 for each in seconds]
    coded = f"{encode:5.2f} {rates[0]:7.0f}  {decode:5.2f} {rates[1]:7.0f}"
    print(f"{name:32} {ideal:6.2f} {bits:6.2f} {estimate:6.2f}  {coded}  {copy:6.1f}", flush=True)
    return {
        "values": name, "ideal_bits": ideal, "bits": bits, "estimated_bits": estimate,
        "encode_gb_per_s": encode, "decode_gb_per_s": decode, "memcpy_gb_per_s": copy,
    }  # fmt: skip


def best_of(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def ideal_bits(values: Tensor) -> float:
    """Return the bits of a value in an ideal code of each chunk, with no bits for its tables."""
    layout, total = LAYOUTS[values.dtype], 0.0
    words = values.reshape(-1).view(torch.uint8).numpy().view(layout.word).astype(np.uint64)
    for start in range(0, words.size, floats.CHUNK_VALUES):
        chunk = words[start : start + floats.CHUNK_VALUES]
        exponents = (chunk >> np.uint64(layout.mantissa) & np.uint64((1 << layout.exponent) - 1)).astype(np.int64)
        mantissas = chunk & np.uint64((1 << layout.mantissa) - 1)
        lowest = np.frexp((mantissas & (~mantissas + np.uint64(1))).astype(np.float64))[1]
        widths = np.where(mantissas > 0, layout.mantissa + 1 - lowest, 0)
        total += entropy(exponents * 64 + widths) + chunk.size + np.maximum(widths - 1, 0).sum()
    return total / words.size


def entropy(symbols: np.ndarray) -> float:
    counts = np.bincount(symbols)
    counts = counts[counts > 0]
    return float((counts * np.log2(symbols.size / counts)).sum())


def fuzz(blocks: int, seed: int) -> dict[str, int]:
    """Code random blocks, most of at most 64 values, compare every bit, and decode changed and truncated messages.

    All blocks go through the compiled twin; some through the reference too, which must give equal bytes.
    """
    generator = np.random.default_rng(seed)
    done, told, compared, refused, other, started = 0, 0, 0, 0, 0, time.perf_counter()
    with kernels.using("numba"):
        while done < blocks:
            for pool in pools(generator):
                sizes = generator.integers(0, 65, 4000)
                sizes[1:40] = generator.integers(65, 5000, 39)
                starts = (generator.random(sizes.size) * (POOL_VALUES - sizes)).astype(np.int64)
                failed = round_trips(pool, starts, sizes)
                assert failed < 0, f"seed {seed}, block {done + failed}"
                for block, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True), start=done):
                    values = pool[start : start + size]
                    if size and block % 50 == 0:
                        was_refused = attack(generator, kernels.encode_floats(values), values)
                        refused, other = refused + was_refused, other + (not was_refused)
                    if block % 5000 == 0 or (size > 64 and block % 200 == 1):
                        compared += 1
                        message = kernels.encode_floats(values)
                        with kernels.using("reference"):
                            assert torch.equal(kernels.encode_floats(values), message), (seed, block)
                            check(message, values)
                done += sizes.size
                if done >= told:
                    both, seconds = f"{compared:,} by both twins", time.perf_counter() - started
                    changed = f"changed messages: {refused:,} refused, {other:,} gave values"
                    print(f"{done:>11,} blocks, {both}; {changed}; {seconds:.0f} s", flush=True)
                    told += max(1, blocks // 20)
                if done >= blocks:
                    break
            check_large(generator)
    return {"blocks": done, "by both twins": compared, "refused": refused, "gave values": other, "seed": seed}


def round_trips(pool: Tensor, starts: np.ndarray, sizes: np.ndarray) -> int:
    """Code blocks of the values, without Python between them; return the first that did not come back, or -1."""
    words, layout = words_of(pool)
    out, message = np.empty(words.nbytes, np.uint8), np.empty(16 * words.nbytes + 1024, np.uint8)
    raw, item = words.view(np.uint8), words.itemsize
    return int(_round_trips(raw, item, layout.exponent, layout.mantissa, starts, sizes, message, out))


@njit
def _round_trips(
    raw: np.ndarray, item: int, exponent_bits: int, mantissa: int, starts: np.ndarray, sizes: np.ndarray,
    message: np.ndarray, out: np.ndarray,
) -> int:  # fmt: skip
    for block in range(starts.size):
        part, back = raw[starts[block] * item : (starts[block] + sizes[block]) * item], out[: sizes[block] * item]
        size = _encode(part, item, exponent_bits, mantissa, message)
        if size < part.size:  # else the values travel
            back[:] = 255
            if not _decode(message[:size], back, item, exponent_bits, mantissa):
                return block
            for place in range(part.size):
                if part[place] != back[place]:
                    return block
    return -1


def pools(generator: np.random.Generator) -> Iterator[Tensor]:
    """Yield values of each dtype and kind: parts of them are blocks."""
    normal = torch.from_numpy(generator.standard_normal(POOL_VALUES))
    rare = torch.from_numpy(generator.random(POOL_VALUES))
    share = float(generator.random()) ** 3
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, 1e-30, 5e-324])
    steps = torch.from_numpy(generator.integers(0, 1 + int(300 * share), POOL_VALUES)).double()
    for dtype in LAYOUTS:
        scale = normal.float().bfloat16().double() * 2.0 ** float(generator.integers(-30, 10))
        bits = torch.from_numpy(generator.integers(0, 256, POOL_VALUES * dtype.itemsize, dtype=np.uint8)).view(dtype)
        kinds = [
            normal, scale, torch.where(rare < share, normal, scale), torch.where(rare < share, 0.0, scale), steps,
            scale.roll(1) + scale + scale.roll(7), normal * torch.exp2(40 * normal), normal.sort().values,
            torch.zeros(POOL_VALUES), torch.full((POOL_VALUES,), share), normal * torch.finfo(dtype).smallest_normal,
            torch.where(rare < share, special[(rare * 1e6).long() % len(special)].double(), scale),
        ]  # fmt: skip
        yield from (kind.to(dtype) for kind in kinds)
        yield bits
        yield torch.where(rare < share, bits, scale.to(dtype))


def check(message: Tensor, values: Tensor) -> None:
    assert message.numel() <= values.nbytes, "a code is never larger"
    out = torch.empty_like(values)
    assert kernels.decode_floats(message, out)
    assert torch.equal(bits_of(out), bits_of(values))


def bits_of(values: Tensor) -> Tensor:
    return values.view(INTEGERS[values.dtype])


def attack(generator: np.random.Generator, message: Tensor, values: Tensor) -> bool:
    """Decode a message with changed bits or another length; return whether it was refused, and not by a crash."""
    changed = message.clone()
    kind, place = generator.integers(4), int(generator.integers(changed.numel()))
    if kind == 0:
        changed = changed[:place]
    elif kind == 1:
        changed[place] = int(generator.integers(256))
    else:
        changed[place if kind == 2 else place % min(28, changed.numel())] ^= 1 << int(generator.integers(8))
    guarded = torch.ones(values.numel() + 2 * GUARD, dtype=values.dtype)
    decoded = kernels.decode_floats(changed, guarded[GUARD:-GUARD])
    assert (guarded[:GUARD] == 1).all()
    assert (guarded[-GUARD:] == 1).all()
    return not decoded


def check_large(generator: np.random.Generator) -> None:
    """Code one tensor of several chunks."""
    dtype = list(LAYOUTS)[generator.integers(len(LAYOUTS))]
    values = torch.from_numpy(generator.standard_normal(int(generator.integers(100_000)))).bfloat16().to(dtype)
    check(kernels.encode_floats(values), values)


if __name__ == "__main__":
    main()
