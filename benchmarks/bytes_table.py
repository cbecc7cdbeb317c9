"""Bytes of every named scheme for every workload, on 2 to 16 ranks, over what no scheme can go below, as Markdown.

    python benchmarks/bytes_table.py --workloads lstm,nmt --ranks 2,4,8,16

Computed by the cost functions, which tests hold equal to the bytes that are sent.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from thinwire.lab.bench.workload import Workload
from thinwire.lab.ledger import sent_bytes, value_lower_bound_bytes
from thinwire.sums.cost import Demand, expected_bytes
from thinwire.sums.named import NAMED, name_of
from thinwire.sums.scheme import Ownership, Scheme
from thinwire.tune.prices import choose

LARGE_ELEMENTS = 1 << 22


def busiest_rank_bytes(scheme: Scheme, workload: Workload, ids: list[torch.Tensor]) -> tuple[float, bool]:
    """Bytes of the rank that sends most, and whether they are exact: hash tables of large tensors are not built."""
    num_rows, width = workload.shape()
    if scheme.ownership is not Ownership.HIERARCHICAL_HASH or num_rows * width < LARGE_ELEMENTS:
        return max(sent_bytes(scheme, ids, num_rows, width, workload.dtype)), True
    dealt = replace(scheme, ownership=Ownership.PERMUTATION)
    held, union = sum(part.numel() for part in ids) / len(ids), torch.cat(ids).unique().numel()
    demand = Demand(len(ids), num_rows, width, workload.dtype.itemsize, held, union)
    return expected_bytes(dealt, demand), False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="lstm,deepfm,nmt,bert,llm_dgc")
    parser.add_argument("--ranks", default="2,4,8,16")
    options = parser.parse_args()
    ranks = [int(count) for count in options.ranks.split(",")]
    for name in options.workloads.split(","):
        table: dict[str, list[str]] = {scheme: [] for scheme in NAMED}
        heads, picks = [], []
        for world_size in ranks:
            workload = Workload(name, False, None, 0, world_size, torch.float32)
            num_rows, width = workload.shape()
            ids = [workload.ids(rank) for rank in range(world_size)]
            bound = value_lower_bound_bytes(ids, width * 4)
            heads.append(f"{world_size} ranks ({bound / 1e6:.2f} MB)")
            union = torch.cat(ids).unique().numel()
            picks.append(name_of(choose(Demand.of([part.numel() for part in ids], num_rows, width, 4, union))))
            for scheme, point in NAMED.items():
                sent, exact = busiest_rank_bytes(point, workload, ids)
                table[scheme].append(f"{'' if exact else '~'}{sent / bound:.2f}x")
        print(f"\n**{name}** ({num_rows:,} x {width})\n")
        print(f"| scheme | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
        for scheme, cells in sorted(table.items(), key=lambda item: float(item[1][-1].strip("~x"))):
            print(f"| {scheme} | {' | '.join(cells)} |", flush=True)
        print(f"| *taken by auto* | {' | '.join(picks)} |", flush=True)


if __name__ == "__main__":
    main()
