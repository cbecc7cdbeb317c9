"""A scheme is a point of the design space: points without meaning are refused, and no two look alike."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from thinwire import schemes
from thinwire.schemes import Aggregation, Balance, Communication, Format, Ownership, Partitioning, Scheme, Unit
from thinwire.sync.named import name_of, resolve
from thinwire.sync.partition import BlockCyclic, Contiguous, HierarchicalHash, Permutation


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
        (schemes.ZEN, {"communication": "hierarchy"}, "hierarchy is for centralization"),
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


def test_named_points_are_distinct_and_know_their_names() -> None:
    aliases = {"hierarchical_centralization": "sparcml"}
    assert len(set(schemes.NAMED.values())) == len(schemes.NAMED) - len(aliases)
    for name, scheme in schemes.NAMED.items():
        assert resolve(name) is scheme
        assert resolve(scheme) is scheme
        assert name_of(scheme) == aliases.get(name, name)
        assert getattr(schemes, name.upper()) is scheme
    unnamed = replace(schemes.ZEN, seed=1)
    assert name_of(unnamed) == unnamed.describe()
    assert resolve("auto") is None


def test_unknown_names_list_the_legal_ones() -> None:
    with pytest.raises(ValueError, match="unknown scheme 'zenn'") as error:
        resolve("zenn")
    for name in ("auto", *schemes.NAMED):
        assert name in str(error.value)


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
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in fields(Scheme)])
def test_the_digest_tells_any_two_apart(field: str) -> None:
    base, value = VARIANTS[field]
    if field == "partition":
        other = replace(base, partition=Partitioning.CENTRALIZATION, balance=None, ownership=None)
    elif field == "balance":
        other = replace(base, balance=value, ownership=None)
    else:
        other = replace(base, **{field: value})
    assert other != base
    assert other.describe() != base.describe()
    assert other.digest() != base.digest()
    assert f"{field}=" in base.describe()


def test_the_order_of_formats_is_part_of_the_identity() -> None:
    """Of two formats of equal size the earlier one is taken, so ranks must have the same order."""
    first = replace(schemes.ZEN, push_format=(Format.COO, Format.BITMAP))
    assert first.digest() != replace(schemes.ZEN, push_format=(Format.BITMAP, Format.COO)).digest()


def test_the_digest_is_the_same_in_another_process() -> None:
    code = "from thinwire import schemes; print(schemes.ZEN.digest())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(result.stdout) == schemes.ZEN.digest()
