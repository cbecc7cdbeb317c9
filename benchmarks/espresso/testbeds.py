"""The two testbeds of Espresso (Wang et al., EuroSys'23)."""

from __future__ import annotations

from published.cluster import Cluster
from thinwire.plan.profile import Linear

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
