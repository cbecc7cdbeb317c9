"""Bits of ids and of values by each code of `thinwire.compress.deep_reduce`, on real gradients, as Markdown.

    python benchmarks/deep_reduce.py --job gpt --steps 20

One rank trains the job. At each density top-k with error feedback selects in every matrix, as `attach` would do; the
codes then code what it selects in the last step. Bits are what travels over selected elements, without the 24 bytes of
a payload's header and of the length of ids. The error of a code of values is the norm of what is lost over the norm
of the values. Volumes are whole payloads over the gradient in float32. Seconds are of one call each, one thread.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire import compress
from thinwire.compress import deep_reduce, int8, qsgd, top_k
from thinwire.compress.base import Parameter
from thinwire.compress.papers.deep_reduce.compressor import DeepReduce
from thinwire.compress.papers.deep_reduce.indices import Bloom, index_codec
from thinwire.lab.bench.jobs.named import get_job

DENSITIES = (0.001, 0.01, 0.1)
INDICES = ("elias_fano", "bitmap", "run_length", "huffman", "auto", "bloom:p0", "bloom:p1", "bloom:p2")
VALUES = {
    "raw": "raw",
    "lossless": "lossless",
    "bf16": compress.bf16(),
    "qsgd(8)": qsgd(8),
    "int8": int8(),
    "qsgd(4)": qsgd(4),
    "polynomial": "polynomial",
    "double_exponential": "double_exponential",
}
# Relative volumes as reported: Table 2 (LSTM, Stack Overflow) and Table 5 (MobileNet, CIFAR-10), both top-r at 10 %.
REPORTED = {
    "top-r, plain pairs": (None, "0.2033", "0.2069"),
    "BF-P0, raw": (deep_reduce(top_k(0.1), "bloom:p0"), "0.1425", "0.1475"),
    "no code of ids, Fit-Poly": (None, "0.1039", "0.1087"),
    "BF-P0, QSGD": (deep_reduce(top_k(0.1), "bloom:p0", qsgd(7)), "0.0621", "0.0713"),
    "elias_fano, raw": (deep_reduce(top_k(0.1)), "", ""),
    "elias_fano, polynomial": (deep_reduce(top_k(0.1), values="polynomial"), "", ""),
    "elias_fano, qsgd(7)": (deep_reduce(top_k(0.1), values=qsgd(7)), "", ""),
}


def corrected(name: str, steps: int) -> dict[float, dict[Parameter, Tensor]]:
    """Gradients of all matrices in the last step, with what error feedback of top-k kept, by density."""
    training = get_job(name).training(None, 0, 1, seed=0)
    step = training.stepper()
    found: dict[float, dict[Parameter, Tensor]] = {density: {} for density in DENSITIES}
    for _ in range(steps):
        step()
        for key, tensor in training.model.named_parameters():
            if tensor.grad is None or tensor.dim() < 2:
                continue
            parameter = Parameter(key, tuple(tensor.shape))
            gradient = tensor.grad.to_dense() if tensor.grad.is_sparse else tensor.grad
            for density, memories in found.items():
                memory = memories.setdefault(parameter, torch.zeros(parameter.shape))
                code = top_k(density)
                code.add(code.compress(memory, parameter, {}), parameter, memory, negated=True)
                memory.add_(gradient)
    return found


def sizes(code: DeepReduce, gradients: dict[Parameter, Tensor]) -> tuple[int, int, float, float, float]:
    """Selected elements, bytes, hits over selected ones, relative error of values sent, and seconds both ways."""
    selected = num_bytes = hits = 0
    lost = norm = seconds = 0.0
    for parameter, gradient in gradients.items():
        state = code.init(parameter)
        started = time.perf_counter()
        data = code.pack(code.compress(gradient, parameter, state), parameter)
        payload = code.unpack(data, parameter)
        seconds += time.perf_counter() - started
        ids, values = code.chosen(payload, parameter)
        wanted, _ = code.inner.select(gradient.view(-1), parameter, {})
        truth = gradient.view(-1)[ids].double()
        selected, num_bytes = selected + wanted.numel(), num_bytes + data.numel()
        hits += int(torch.isin(wanted, ids).sum())
        lost, norm = lost + float((values - truth).square().sum()), norm + float(truth.square().sum())
    return selected, num_bytes, hits / selected, math.sqrt(lost / norm), seconds


def row(cells: Sequence[object]) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def head(title: str, cells: Sequence[str]) -> None:
    print(f"\n**{title}**\n")
    row(cells)
    print(f"|{'---|' * len(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="gpt")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = corrected(options.job, options.steps)
    numel = sum(parameter.numel for parameter in found[0.01])
    print(f"{options.job}, step {options.steps}: {len(found[0.01])} matrices of {numel:,} elements")

    percent = [f"{density:.1%}" for density in DENSITIES]
    head("Bits an id", ["index", *(f"{text} (random ids)" for text in percent), "hits at 1%", "seconds at 1%"])
    row(["entropy", *(f"({entropy(density):.2f})" for density in DENSITIES), "", ""])
    for text in INDICES:
        cells, more = [], ["", ""]
        for density in DENSITIES:
            codec = index_codec(text)
            chosen = expected = num_bytes = 0.0
            for parameter, gradient in found[density].items():
                ids, _ = top_k(density).select(gradient.view(-1), parameter, {})
                chosen, num_bytes = chosen + ids.numel(), num_bytes + codec.encode(ids, parameter.numel).numel()
                expected += codec.expected_bytes(ids.numel(), parameter.numel)
            cells.append(f"{8 * num_bytes / chosen:.2f} ({8 * expected / chosen:.2f})")
            if density == 0.01:
                _, _, hits, _, seconds = sizes(deep_reduce(top_k(density), codec), found[density])
                more = [f"{hits:.1%}", f"{seconds:.3f}"]
        rate = ""
        if isinstance(codec := index_codec(text), Bloom) and codec.policy == "p0":
            extra = [codec.rate(round(density * 1e6), 10**6) * (1 / density - 1) for density in DENSITIES]
            rate = f" (and {', '.join(f'{more:.2f}' for more in extra)} more values a value)"
        row([text + rate, *cells, *more])

    columns = [f"{text} bits{tail}" for text in percent for tail in ("", ", error")]
    head("Bits a value, and error", ["values", *columns, "seconds at 1%"])
    for text, values in VALUES.items():
        cells, last = [], ""
        for density in DENSITIES:
            chosen, num_bytes, _, error, seconds = sizes(deep_reduce(top_k(density), "bitmap", values), found[density])
            ids = sum(24 + -(-parameter.numel // 64) * 8 for parameter in found[density])
            cells += [f"{8 * (num_bytes - ids) / chosen:.2f}", f"{error:.4f}" if error else "0"]
            last = f"{seconds:.3f}" if density == 0.01 else last
        row([text, *cells, last])

    head("Relative volume at 10 %", ["ids, values", options.job, "paper, Table 2", "paper, Table 5"])
    for name, (code, *reported) in REPORTED.items():
        own = f"{sizes(code, found[0.1])[1] / (4 * numel):.4f}" if code else ""
        row([name, own, *reported])


def entropy(density: float) -> float:
    """Bits an id of random ids: the entropy of a presence, over the density."""
    absent = 1.0 - density
    return -(density * math.log2(density) + absent * math.log2(absent)) / density


if __name__ == "__main__":
    main()
