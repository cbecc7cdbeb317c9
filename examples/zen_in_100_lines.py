"""ZEN in a hundred lines of plain torch: the sum of a sparse gradient over all ranks, in near the fewest bytes.

    torchrun --nproc-per-node 4 examples/zen_in_100_lines.py

Each rank holds some rows of a large table. Every row has one owner, found by a hash, so that owners have equal shares
whatever the rows are. Ranks push each row to its owner, owners add up what arrives, and all ranks pull the sums. A row
crosses a link once on its way to the owner and once on its way back, however many ranks hold it: that is why it beats
an all-gather of everything (ZEN, OSDI'25, section 3).

`thinwire.schemes.ZEN` does this with formats for ids that take a few bits instead of 64, with compiled kernels, with
checksums, and with errors that reach every rank. Its result has the same bits, which the end of this script checks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def hashed(ids: Tensor) -> Tensor:
    """Scramble int64 ids [k] to 32 bits (int64): the finalizer of MurmurHash3."""
    mask = 0xFFFFFFFF
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        ids = ((ids ^ (ids >> 16)) * factor) & mask
    return ids ^ (ids >> 16)


def owner_of(ids: Tensor, world_size: int) -> Tensor:
    """The rank [k] that adds up each row: ids are dealt in groups of ``world_size``, each from another rank on.

    Any range of ids is spread evenly, and no rank needs a table to know who owns what.
    """
    return (ids + hashed(ids // world_size)) % world_size


def exchange(parts: list[Tensor]) -> list[Tensor]:
    """Send ``parts[r]`` to each rank r, and return what each rank sent here, in rank order."""
    sizes = torch.tensor([len(part) for part in parts])
    arriving = torch.empty_like(sizes)
    dist.all_to_all_single(arriving, sizes)
    received = parts[0].new_empty(int(arriving.sum()), *parts[0].shape[1:])
    dist.all_to_all_single(received, torch.cat(parts), arriving.tolist(), sizes.tolist())
    return list(received.split(arriving.tolist()))


def gather(part: Tensor) -> list[Tensor]:
    """What each rank holds, on all ranks, in rank order."""
    return exchange([part] * dist.get_world_size())


def add_up(ids: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Add rows with equal ids, piece by piece, so that every run adds in the order of ranks."""
    union, places = torch.cat(ids).unique(return_inverse=True)
    total = torch.zeros(len(union), values[0].shape[1], dtype=values[0].dtype)
    for place, rows in zip(places.split([len(piece) for piece in ids]), values, strict=True):
        total.index_add_(0, place, rows)
    return union, total


def zen(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sum rows over all ranks.

    Args:
        ids: the rows that this rank holds, int64 [k], each once.
        values: [k, width].

    Returns:
        ids, sorted, of all rows that any rank holds, and their sums: the same on every rank.
    """
    owners = owner_of(ids, dist.get_world_size())
    mine = [owners == rank for rank in range(dist.get_world_size())]
    pushed_ids = exchange([ids[rows] for rows in mine])
    pushed_values = exchange([values[rows] for rows in mine])
    owned_ids, owned_sums = add_up(pushed_ids, pushed_values)
    all_ids, all_sums = torch.cat(gather(owned_ids)), torch.cat(gather(owned_sums))
    order = all_ids.argsort()
    return all_ids[order], all_sums[order]


def main() -> None:
    """Sum random rows with `zen` and with thinwire, and compare every bit."""
    import thinwire

    dist.init_process_group("gloo")
    rank, num_rows, width = dist.get_rank(), 10_000, 16
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randperm(num_rows, generator=generator)[: 300 + 50 * rank].sort().values
    values = torch.randn(len(ids), width, generator=generator)

    sum_ids, sums = zen(ids, values)
    gradient = torch.sparse_coo_tensor(ids[None], values, (num_rows, width), is_coalesced=True, check_invariants=True)
    expected = thinwire.sparse_all_reduce(gradient, scheme=thinwire.schemes.ZEN)

    assert torch.equal(sum_ids, expected.indices()[0])
    assert torch.equal(sums, expected.values())
    print(f"rank {rank}: {len(ids)} rows here, {len(sum_ids)} in the sum, the same bits as thinwire.schemes.ZEN")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
