"""A scheme is a point of the design space: points without meaning are refused, and no two look alike."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch

from thinwire import schemes
from thinwire.lab.bench.design_space import label
from thinwire.rows.partition import BlockCyclic, Contiguous, HierarchicalHash, Permutation
from thinwire.schemes import Aggregation, Balance, Communication, Format, Ownership, Partitioning, Scheme, Unit


@pytest.mark.parametrize(
    ("base", "change", "reason"),
    [
        (schemes.ZEN, {"balance": None}, "balance belongs to parallelism"),
        (schemes.AGSPARSE, {"balance": "balanced"}, "balance belongs to parallelism"),
        (schemes.ZEN, {"communication": "native"}, "native all-reduce partitions by itself"),
        (schemes.AGSPARSE, {"communication": "native"}, "moves dense values only"),
        (schemes.AGSPARSE, {"ownership": "permutation"}, "ownership belongs to parallelism"),
        (schemes.ZEN, {"ownership": "contiguous"}, "balanced is: permutation, hierarchical_hash"),
        (schemes.SPARSE_PS, {"ownership": "permutation"}, "permutation ownership is not imbalanced"),
        (schemes.ZEN, {"push_format": ()}, "push_format is empty"),
        (schemes.ZEN, {"communication": "carrier_pigeon"}, "legal are point_to_point, native"),
        (schemes.ZEN, {"aggregation": "later"}, "legal are incremental, one_shot"),
        (schemes.ZEN, {"partition": "some"}, "legal are centralization, parallelism"),
        (schemes.ZEN, {"balance": "hm"}, "legal are imbalanced, balanced"),
        (schemes.ZEN, {"ownership": "mine"}, "legal are contiguous, block_cyclic, permutation"),
        (schemes.ZEN, {"push_format": "zip"}, "unknown push_format 'zip'; legal are coo, bitmap, hash_bitmap, dense"),
        (schemes.ZEN, {"pull_format": ("coo", "zip")}, "unknown pull_format 'zip'"),
        (schemes.ZEN, {"partition": None}, "unknown partition None"),
        (schemes.SPARSE_PS, {"communication": "hierarchy"}, "by up to log2 n hands"),
        (schemes.COLUMN_SPLIT, {"communication": "hierarchy"}, "learn the union from all ranks at once"),
        (schemes.SPARCML, {"pull_communication": "ring"}, "pull_communication belongs to parallelism"),
        (schemes.ZEN, {"pull_communication": "native"}, "the pull only gathers"),
        (schemes.ZEN, {"pull_communication": "pigeon"}, "pull_communication 'pigeon'; legal are point_to_point"),
        (schemes.COLUMN_SPLIT, {"pull_communication": "hierarchy"}, "whose sizes all ranks know"),
        (schemes.DENSE_PS, {"dense_switch": True}, "every message is dense already"),
        (schemes.DENSE, {"dense_switch": True}, "every message is dense already"),
        (schemes.COLUMN_SPLIT, {"dense_switch": True}, "must get the same ids from a rank"),
        (schemes.ZEN, {"servers": 0}, "servers is 0: give 1 or more"),
        (schemes.ZEN, {"servers": -2}, "servers is -2: give 1 or more"),
        (schemes.AGSPARSE, {"servers": 2}, "owners to whom all ranks send directly"),
        (schemes.DENSE_RING, {"servers": 2}, "owners to whom all ranks send directly"),
        (schemes.COLUMN_SPLIT, {"servers": 2}, "ownership is shared out to all ranks"),
        (schemes.SPARSE_PS, {"communication": "ring"}, "brings every piece past every rank"),
        (schemes.SPARCML, {"communication": "ring"}, "hold other bits"),
        (schemes.COLUMN_SPLIT, {"communication": "ring"}, "learn the union from all ranks at once"),
        (schemes.ZEN, {"unit": "bits"}, "legal are rows, elements, blocks"),
        (schemes.DENSE, {"unit": "blocks"}, "nothing for a unit to name"),
        (schemes.COLUMN_SPLIT, {"unit": "elements"}, "an element has one column"),
    ],
)  # fmt: skip
def test_points_without_meaning_are_refused(base: Scheme, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(base, **change)


VARIATIONS = [
    ({"servers": 3}, "/3 servers"),
    ({"dense_switch": True}, "/dense switch"),
    ({"seed": 5}, "/seed 5"),
    ({"pull_communication": "ring"}, "/pull by ring"),
    ({"push_format": "coo"}, "/push as coo"),
    ({"pull_format": ("coo", "dense")}, "/pull as coo or dense"),
]


@pytest.mark.parametrize(("change", "text"), VARIATIONS)
def test_a_label_tells_what_is_not_as_usual(change: dict[str, Any], text: str) -> None:
    assert label(replace(schemes.ZEN, **change)) == f"point_to_point/incremental/parallelism/permutation/rows{text}"


def test_a_pull_as_the_push_is_no_other_scheme() -> None:
    assert replace(schemes.ZEN, pull_communication="point_to_point") == schemes.ZEN
    assert schemes.ZEN.pull_by is Communication.POINT_TO_POINT
    assert schemes.SPARCML_SPLIT.pull_by is Communication.HIERARCHY


@pytest.mark.parametrize(("world_size", "core"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8)])
def test_owners_are_the_first_ranks(world_size: int, core: int) -> None:
    """All ranks, the core of a hierarchy, or the servers; the parts of others are empty, and all rows have one."""
    halving = replace(schemes.ZEN, communication="hierarchy")
    for scheme, num_owners in ((schemes.ZEN, world_size), (halving, core), (replace(schemes.ZEN, servers=1), 1)):
        assert scheme.num_owners(world_size) == num_owners
        partition = scheme.rows_partition(50, world_size)
        sizes = [part.size for part in partition.parts]
        assert (len(sizes), sum(sizes), sum(sizes[:num_owners])) == (world_size, 50, 50)
        ids = torch.arange(0, 50, 3)
        split = partition.split(ids)
        assert [positions.numel() for positions, _ in split[num_owners:]] == [0] * (world_size - num_owners)
        assert int(partition.owners(ids).max()) < num_owners
        for positions in ([p for p, _ in split], [p for p, _ in split[:num_owners]]):
            assert torch.equal(partition.join(positions).sort().values, ids)


def test_text_does_for_members() -> None:
    assert Scheme("point_to_point", "incremental", "parallelism", "balanced") == schemes.ZEN
    assert replace(schemes.ZEN, ownership="hierarchical_hash").ownership is Ownership.HIERARCHICAL_HASH
    assert replace(schemes.ZEN, push_format="coo").push_format == (Format.COO,)
    assert replace(schemes.ZEN, push_format=["coo", "bitmap"]).push_format == (Format.COO, Format.BITMAP)
    assert replace(schemes.AGSPARSE, push_format="auto").push_format == tuple(Format)


def test_schemes_are_values() -> None:
    assert len({schemes.ZEN, replace(schemes.ZEN)}) == 1
    with pytest.raises(FrozenInstanceError):
        schemes.ZEN.seed = 3  # type: ignore[misc]


def test_ownership_follows_balance() -> None:
    assert schemes.ZEN.ownership is Ownership.PERMUTATION
    assert schemes.SPARSE_PS.ownership is Ownership.CONTIGUOUS
    assert schemes.AGSPARSE.ownership is None
    assert isinstance(schemes.ZEN.rows_partition(10, 2), Permutation)
    assert isinstance(schemes.SPARSE_PS.rows_partition(10, 2), Contiguous)
    assert isinstance(schemes.OMNIREDUCE.rows_partition(10, 2), BlockCyclic)
    assert isinstance(replace(schemes.ZEN, ownership="hierarchical_hash").rows_partition(10, 2), HierarchicalHash)


def test_the_seed_reaches_the_partition() -> None:
    for ownership in (Ownership.PERMUTATION, Ownership.HIERARCHICAL_HASH):
        partition = replace(schemes.ZEN, ownership=ownership, seed=77).rows_partition(10, 2)
        assert partition.seed == 77


VARIANTS: dict[str, tuple[Scheme, Any]] = {
    "communication": (schemes.DENSE, Communication.POINT_TO_POINT),
    "aggregation": (schemes.ZEN, Aggregation.ONE_SHOT),
    "partition": (replace(schemes.SPARSE_PS), None),  # changes with balance and ownership: below
    "balance": (schemes.ZEN, Balance.IMBALANCED),
    "ownership": (schemes.ZEN, Ownership.HIERARCHICAL_HASH),
    "push_format": (schemes.ZEN, (Format.COO,)),
    "pull_format": (schemes.ZEN, (Format.COO,)),
    "seed": (schemes.ZEN, 1),
    "unit": (schemes.ZEN, Unit.BLOCKS),
    "pull_communication": (schemes.ZEN, Communication.RING),
    "dense_switch": (schemes.ZEN, True),
    "servers": (schemes.ZEN, 2),
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in fields(Scheme)])
def test_the_description_tells_any_two_apart(field: str) -> None:
    base, value = VARIANTS[field]
    if field == "partition":
        other = replace(base, partition=Partitioning.CENTRALIZATION, balance=None, ownership=None)
    elif field == "balance":
        other = replace(base, balance=value, ownership=None)
    else:
        other = replace(base, **{field: value})
    assert other != base
    assert other.describe() != base.describe()
    assert other.describe() != base.describe()
    assert f"{field}=" in base.describe()


def test_the_order_of_formats_is_part_of_the_identity() -> None:
    """Of two formats of equal size the earlier one is taken, so ranks must have the same order."""
    first = replace(schemes.ZEN, push_format=(Format.COO, Format.BITMAP))
    assert first.describe() != replace(schemes.ZEN, push_format=(Format.BITMAP, Format.COO)).describe()


@pytest.mark.slow
def test_the_description_is_the_same_in_another_process() -> None:
    code = "from thinwire import schemes; print(schemes.ZEN.describe())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == schemes.ZEN.describe()
