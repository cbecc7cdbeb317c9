"""Every point of the design space of exact schemes, and a short text for each."""

from collections.abc import Iterable
from itertools import product
from typing import Any

from thinwire.rows.formats import FORMATS, Format
from thinwire.sums.named import NAMED
from thinwire.sums.scheme import Aggregation, Balance, Communication, Ownership, Partitioning, Scheme, Unit


def points() -> list[Scheme]:
    """Return all meaningful combinations of the dimensions, ownership, unit and pull, in a fixed order.

    Formats are all of them, or dense only where no other is meaningful. The switch to dense and the number of servers,
    which combine with many of the points, keep their defaults.

    Example:
        >>> label(points()[0])
        'point_to_point/incremental/centralization/rows'
    """
    dimensions: dict[str, Iterable[Any]] = {
        "communication": Communication,
        "aggregation": Aggregation,
        "partition": Partitioning,
        "balance": (None, *Balance),
        "ownership": (None, *Ownership),
        "unit": Unit,
        "pull_communication": (None, *Communication),
    }
    combinations = (dict(zip(dimensions, values, strict=True)) for values in product(*dimensions.values()))
    return list(dict.fromkeys(scheme for point in combinations if (scheme := _legal(point)) is not None))


def label(scheme: Scheme) -> str:
    """Return the name of a scheme, or its dimensions and unusual settings.

    Example:
        >>> label(replace(ZEN, communication="ring"))
        'ring/incremental/parallelism/permutation/rows'
    """
    name = next((name for name, point in NAMED.items() if point == scheme), None)
    if name is not None:
        return name
    push, pull = _usual_formats(scheme.communication, scheme.ownership)
    words = (scheme.communication, scheme.aggregation, scheme.partition, scheme.ownership, scheme.unit)
    extras = {
        f"pull by {scheme.pull_communication}": scheme.pull_communication is not None,
        f"push as {' or '.join(scheme.push_format)}": scheme.push_format != push,
        f"pull as {' or '.join(scheme.pull_format)}": scheme.pull_format != pull,
        "dense switch": scheme.dense_switch,
        f"{scheme.servers} servers": scheme.servers is not None,
        f"seed {scheme.seed}": scheme.seed != 0,
    }
    unusual = (text for text, is_unusual in extras.items() if is_unusual)
    return "/".join([*(word.value for word in words if word is not None), *unusual])


def _legal(point: dict[str, Any]) -> Scheme | None:
    push, pull = _usual_formats(point["communication"], point["ownership"])
    try:
        return Scheme(**point, push_format=push, pull_format=pull)
    except ValueError:
        return None


def _usual_formats(
    communication: Communication, ownership: Ownership | None
) -> tuple[tuple[Format, ...], tuple[Format, ...]]:
    """Formats of push and pull: all of them, or dense where no other is meaningful."""
    dense = (Format.DENSE,)
    if communication is Communication.NATIVE:
        return dense, dense
    return FORMATS, dense if ownership in (Ownership.COLUMNS, Ownership.UNION) else FORMATS
