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

from thinwire.fuse.profile import Linear
from thinwire.lab.espresso.cluster import Cluster
from thinwire.lab.espresso.job import CompressionCosts, KernelCosts

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


_MESSAGE_SECONDS = 25e-6
_STEP_SECONDS = 10e-6  # inside a host; not published
_HOST_COPY = Linear(20e-6, 8 / 100e9)


def nvlink_100g(hosts: int = 8, ranks_per_host: int = 8, link_gbit: float = 40.0) -> Cluster:
    """Return the paper's first testbed: 8 hosts of 8 V100 with NVLink, 100 Gbit/s between them.

    Args:
        link_gbit: the part of the link's rate that gradients get.
    """
    return _testbed("NVLink, 100 Gbit/s", hosts, ranks_per_host, 0.02e-9, link_gbit)


def pcie_25g(hosts: int = 8, ranks_per_host: int = 8, link_gbit: float = 20.0) -> Cluster:
    """Return the paper's second testbed: 8 hosts of 8 V100 on PCIe, 25 Gbit/s between them.

    Args:
        link_gbit: the part of the link's rate that gradients get.
    """
    return _testbed("PCIe, 25 Gbit/s", hosts, ranks_per_host, 0.4e-9, link_gbit)


def _testbed(name: str, hosts: int, ranks_per_host: int, intra_byte_seconds: float, link_gbit: float) -> Cluster:
    intra = Linear(_STEP_SECONDS, intra_byte_seconds)
    return Cluster(hosts, ranks_per_host, intra, Linear(_MESSAGE_SECONDS, 8e-9 / link_gbit), _HOST_COPY, name)


TESTBEDS = {"nvlink_100g": nvlink_100g, "pcie_25g": pcie_25g}
