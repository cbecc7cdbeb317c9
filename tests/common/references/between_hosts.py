"""What each host sends to other hosts, from the ledger of all pairs of ranks: the reference of what ranks count."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.hosts import Hosts
from thinwire.lab.ledger import host_of_ranks, pair_bytes
from thinwire.sums.scheme import Scheme
from thinwire.sums.two_level import TwoLevel


def between_hosts_bytes(
    scheme: Scheme | TwoLevel,
    hosts: Hosts,
    ids_per_rank: Sequence[Tensor],
    num_rows: int,
    width: int,
    dtype: torch.dtype,
) -> list[int]:
    """Return the exact bytes that the ranks of each host send to other hosts; see `pair_bytes`.

    It equals what ``Traffic.sent_between_hosts_bytes`` of the ranks of a host grows by. ``hosts`` are the ranks of
    each host.
    """
    host = host_of_ranks(hosts)
    if isinstance(scheme, TwoLevel):
        scheme = scheme.placed(host)
    totals = [0] * len(hosts)
    for source, row in enumerate(pair_bytes(scheme, ids_per_rank, num_rows, width, dtype)):
        totals[host[source]] += sum(sent for target, sent in enumerate(row) if host[target] != host[source])
    return totals
