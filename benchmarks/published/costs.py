"""Published costs of compression and of links: the constants of Espresso's public simulator, and of the paper.

Source: github.com/zhuangwang93/Espresso, commit a0294e3, byteps/torch/mergeComp/scheduler/{model_tensor,
simulator_espresso}.py, measured by its authors on NVIDIA V100; the paper is EuroSys'23, doi 10.1145/3552326.3567505.

- Encode and decode: a constant time for a tensor of up to 2^20 elements, and in proportion beyond. MergeComp (arXiv
  2103.15195) measured that small ones cost no less, and so did the paper: over 0.1 ms to encode a tensor, over 0.03 ms
  to decode one.
- On the wire: 2 * density of the bytes for sparsifiers (value and index), 1/32 for signs.
- Processors: one rate in Gbit/s at which a host encodes and decodes a whole gradient: 20, "set 40 for BERT and 8 for
  VGG16". How it splits is not published; here as on the GPU.
- The link inside a host: 0.02 us/KB with NVLink, 0.4 with PCIe. Copies to host memory: PCIe 3.0 x16 at 100 Gbit/s (the
  paper's footnote 1).
- The link between hosts: TCP does not fill it. Of 25 Gbit/s 20 are used, the public simulator's default. Of 100 Gbit/s
  40 are used: to scale on 64 GPUs as in the paper's table 1, dense BERT needs 44 here, and dense GPT2 17. A message
  costs 25 us: an all-reduce between 8 hosts then starts with 150 us, the public simulator's alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.lab.planning.speeds import fit_line
from thinwire.plan.profile import Linear


@dataclass(frozen=True)
class KernelCosts:
    """Cost max(launch, beta * size_bytes) in seconds: a kernel that works while the next is launched, or waits for
    launches.

    Args:
        launch: seconds for a tensor of any small size.
        beta: seconds a byte, for large ones.

    Raises:
        ValueError: numbers that are not finite or below 0.

    Example:
        >>> kernel = Kernel(launch=1e-4, beta=1e-10)
        >>> kernel(1000), kernel(10_000_000)
        (0.0001, 0.001)
    """

    launch: float
    beta: float

    def __post_init__(self) -> None:
        Linear(self.launch, self.beta)  # the same rules

    def __call__(self, size_bytes: float) -> float:
        return max(self.launch, self.beta * size_bytes)

    def linear(self, size_bytes: Sequence[float]) -> Linear:
        """Return the nearest line at these sizes, by relative error: for planners that need alpha and beta."""
        return fit_line(size_bytes, [self(size) for size in size_bytes], relative=True)


Cost = Linear | KernelCosts


@dataclass(frozen=True)
class CompressionCosts:
    """Costs of a compressor, on either device.

    Args:
        name: name for tables.
        ratio: bytes on the wire over bytes of the gradient, from 0 to 1. Size and costs must not depend on the values:
            a method whose size does has no fixed position in a timeline.
        encode, decode: costs on the accelerator, of the gradient bytes that one rank encodes or decodes at once.
        cpu_encode, cpu_decode: costs on a host's processors, of the bytes of all ranks of the host together.
        further_payload: decoding n payloads of one region into one sum is a pass over bytes * (1 + (n - 1) * this).
            1 where each payload is a whole pass (signs); about the density where only the first is (sparse).

    Raises:
        ValueError: a ratio or further_payload outside [0, 1], or costs that are neither Linear nor Kernel.
    """

    name: str
    ratio: float
    encode: Cost
    decode: Cost
    cpu_encode: Cost
    cpu_decode: Cost
    further_payload: float = 1.0

    def __post_init__(self) -> None:
        for what in ("ratio", "further_payload"):
            if not 0 <= getattr(self, what) <= 1:
                raise ValueError(f"{what} of {self.name} is {getattr(self, what)}; it is from 0 to 1")
        for what in ("encode", "decode", "cpu_encode", "cpu_decode"):
            if not isinstance(getattr(self, what), Cost):
                raise ValueError(f"{what} of {self.name} is {getattr(self, what)!r}: give a Linear or a Kernel")


DENSITY = 0.01

_UNIT_BYTES = 4 * 2**20
_MICROSECOND = 1e-6

# Microseconds to encode and to decode 2^20 elements, wire bytes over gradient bytes, cost of a further payload.
_CONSTANTS: dict[str, tuple[float, float, float, float]] = {
    "random_k": (88, 34, 2 * DENSITY, DENSITY),
    "dgc": (390, 34, 2 * DENSITY, DENSITY),
    "ef_sign_sgd": (270, 140, 1 / 32, 1.0),
    "onebit": (620, 170, 1 / 32, 1.0),
}
ALGORITHMS = tuple(_CONSTANTS)

CPU_GBIT = 20.0


def compression(algorithm: str, cpu_gbit: float = CPU_GBIT) -> CompressionCosts:
    """Return the published costs of a compressor.

    Args:
        algorithm: one of `ALGORITHMS`; sparsifiers at 1 %.
        cpu_gbit: the rate of a host's processors.

    Raises:
        ValueError: another algorithm, or a rate that is not above 0.

    Example:
        >>> compression("dgc").encode(1000)
        0.00039
    """
    if algorithm not in _CONSTANTS:
        raise ValueError(f"no published costs of {algorithm!r}: there are {', '.join(ALGORITHMS)}")
    if not cpu_gbit > 0:
        raise ValueError(f"cpu_gbit is {cpu_gbit}; processors encode at more than 0 Gbit/s")
    encode, decode, ratio, further = _CONSTANTS[algorithm]
    byte_seconds = 8 / (cpu_gbit * 1e9)
    return CompressionCosts(
        name=algorithm,
        ratio=ratio,
        encode=_kernel(encode),
        decode=_kernel(decode),
        cpu_encode=Linear(0.0, byte_seconds * encode / (encode + decode)),
        cpu_decode=Linear(0.0, byte_seconds * decode / (encode + decode)),
        further_payload=further,
    )


def _kernel(microseconds: float) -> KernelCosts:
    return KernelCosts(microseconds * _MICROSECOND, microseconds * _MICROSECOND / _UNIT_BYTES)
