"""Quantizers and low rank on the CPU: megabytes of gradient a second, encoded and decoded, with one thread.

    python benchmarks/bench_quantize.py --shape 1024 1024 --methods int8 qsgd
    THINWIRE_KERNELS=reference python benchmarks/bench_quantize.py

The floor is the time of reading the gradient once, at the bandwidth that is measured here. Encoding is `compress` and
`pack`, decoding `unpack` and `accumulate`, which are called as exchanges do; of summed methods encoding is all that
happens before and between all-reduces, decoding what happens after them. Times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from thinwire import compress, kernels
from thinwire.compress.base import Compressor, Parameter, Payload, Summable
from thinwire.compress.wrappers import code_of, packed_code, summable_code, unwrapped

METHODS: dict[str, Compressor] = {
    method.name: method
    for method in (
        compress.fp16(),
        compress.bf16(),
        compress.int8(),
        compress.int8(stochastic=True),
        compress.fp8("e4m3"),
        compress.fp8("e5m2"),
        compress.mxfp8(),
        compress.mxfp8(stochastic=True),
        compress.mxfp4(),
        compress.qsgd(8),
        compress.qsgd(4),
        compress.qsgd(2),
        compress.terngrad(),
        compress.natural(),
        compress.sign_sgd(),
        compress.ef_sign_sgd(),
        compress.power_sgd(1),
        compress.power_sgd(4),
        compress.acp_sgd(4),
    )
}


@dataclass(frozen=True)
class Result:
    method: str
    elements: int
    bytes_per_element: float
    floor_seconds: float
    encode_seconds: float
    decode_seconds: float


def median_seconds(call: Callable[[], object], repeat: int) -> float:
    call()
    samples = []
    for _ in range(repeat):
        started = time.perf_counter()
        call()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def measure(method: Compressor, gradient: Tensor, repeat: int) -> Result:
    parameter = Parameter("weight", tuple(gradient.shape))
    state = method.init(parameter)
    floor = median_seconds(gradient.sum, repeat)
    if isinstance(code_of(method), Summable):
        sent_bytes, encode, decode = measure_summed(method, gradient, parameter, repeat)
    else:
        code = packed_code(method)
        data = code.pack(method.compress(gradient, parameter, state), parameter)
        total = torch.zeros_like(gradient)
        sent_bytes = data.numel()
        encode = median_seconds(lambda: code.pack(method.compress(gradient, parameter, state), parameter), repeat)
        decode = median_seconds(lambda: code.add(code.unpack(data, parameter), parameter, total), repeat)
    return Result(method.name, gradient.numel(), sent_bytes / gradient.numel(), floor, encode, decode)


def measure_summed(method: Compressor, gradient: Tensor, parameter: Parameter, repeat: int) -> tuple[int, float, float]:
    """Of a world of one rank, whose payloads are their own means."""
    state, encoding, decoding, sent_bytes = method.init(parameter), [], [], 0
    code, (_, inside) = summable_code(method), unwrapped(method, state)
    for _ in range(repeat + 1):
        started = time.perf_counter()
        following: Payload | None = method.compress(gradient, parameter, state)
        sent_bytes = 0
        while following is not None:
            payload, sent_bytes = following, sent_bytes + following.num_bytes
            following = code.next_round(payload, parameter, inside)
        encoded = time.perf_counter()
        mean = code.reconstruct(payload, parameter, inside)
        method.finish(mean, parameter, state)
        encoding.append(encoded - started)
        decoding.append(time.perf_counter() - encoded)
    return sent_bytes, statistics.median(encoding[1:]), statistics.median(decoding[1:])


def measure_torch_hook(rank: int, gradient: Tensor, repeat: int) -> Result:
    """What torch's hook computes for one matrix, without its all-reduces."""
    matrix = gradient.view(gradient.shape[0], -1)[None]
    n, m = matrix.shape[1:]
    p, q, out = torch.empty(1, n, rank), torch.randn(1, m, rank), torch.empty_like(matrix)

    def encode() -> None:
        powerSGD_hook._orthogonalize(q)
        torch.bmm(matrix, q, out=p)
        powerSGD_hook._orthogonalize(p)
        torch.bmm(matrix.transpose(1, 2), p, out=q)

    encoded = median_seconds(encode, repeat)
    decoded = median_seconds(lambda: torch.bmm(p, q.transpose(1, 2), out=out), repeat)
    floor = median_seconds(gradient.sum, repeat)
    return Result(
        f"torch's PowerSGD hook ({rank})", gradient.numel(), 4 * rank * (n + m) / (n * m), floor, encoded, decoded
    )


def show(result: Result) -> None:
    megabytes = 4e-6 * result.elements
    print(
        f"{result.method:28} {result.bytes_per_element:6.3f} bytes an element"
        f"  encode {1e3 * result.encode_seconds:8.2f} ms {megabytes / result.encode_seconds:8.0f} MB/s"
        f" {result.encode_seconds / result.floor_seconds:6.1f} floors"
        f"  decode {1e3 * result.decode_seconds:8.2f} ms {megabytes / result.decode_seconds:8.0f} MB/s"
        f" {result.decode_seconds / result.floor_seconds:6.1f} floors",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs="+", default=[4096, 2048])
    parser.add_argument("--methods", nargs="+", default=[""], help="only those whose names begin so")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", metavar="PATH", help="write the results there")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    kernels.warm_up()
    gradient = torch.randn(options.shape)
    print(f"a gradient of {options.shape}, one read of which takes {1e3 * median_seconds(gradient.sum, 7):.2f} ms")
    results = []
    for name, method in METHODS.items():
        if name.startswith(tuple(options.methods)):
            results.append(measure(method, gradient, options.repeat))
            show(results[-1])
    for rank in (1, 4):
        if "torch".startswith(tuple(options.methods)):
            results.append(measure_torch_hook(rank, gradient, options.repeat))
            show(results[-1])
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(result) for result in results], file)


if __name__ == "__main__":
    main()
