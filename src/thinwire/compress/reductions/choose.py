"""The choice of a reduction for a compressor: one that its type allows, with the fewest bytes."""

from thinwire.compress.base import Compressor, Exchanged, Parameter
from thinwire.compress.methods.sparsify import Sparsifier
from thinwire.compress.papers.hi_top_k import HiTopKReduction
from thinwire.compress.papers.ok_topk_reduction import OkTopkReduction
from thinwire.compress.reductions.all_gather import AllGather
from thinwire.compress.reductions.all_reduce import AllReduce
from thinwire.compress.reductions.base import OwnReduction, Reduction
from thinwire.compress.reductions.messages import max_packed_bytes
from thinwire.compress.reductions.two_shot import ReduceScatter, TwoShot
from thinwire.compress.wrappers import code_of, core_of, summable_code
from thinwire.rows.formats import ring_all_reduce_bytes

AUTO = "auto"
_GENERIC: dict[str, Reduction] = {reduction.name: reduction for reduction in (AllReduce(), AllGather(), TwoShot())}
REDUCTIONS = tuple(_GENERIC)
_OWN: tuple[OwnReduction, ...] = (OkTopkReduction(), HiTopKReduction())
_WORTH_A_SECOND_CODING = 0.9
"""Ratio of bytes below which two shots are chosen: they code twice and lose twice."""


def reduction_for(
    exchange: str | Reduction, compressor: Compressor, parameter: Parameter, world_size: int
) -> Reduction:
    """Return the reduction of that name, or with "auto" the one of fewest bytes; a `ByScheme` is a reduction already.

    A rank sends, of ``b`` packed bytes (sums of rounds for an all-reduce) on ``n`` ranks: inside an all-reduce and in
    two shots ``2 (n - 1) / n b``, gathered ``(n - 1) b``. Sparse payloads are gathered: two shots would select again
    among the ranks' selections. "auto" never chooses a scheme: its savings depend on how often ranks select the same
    elements, which is not known beforehand. Methods with a reduction of their own (`OwnReduction`) get that.

    Raises:
        ValueError: payloads of the compressor cannot be averaged that way.

    Example:
        >>> from thinwire.compress.base import Identity
        >>> reduction_for("auto", Identity(), Parameter("fc.weight", (8, 8)), world_size=4).name
        'all_reduce'
    """
    name = exchange if isinstance(exchange, str) else exchange.name
    core = core_of(compressor)
    if (own := next((reduction for reduction in _OWN if isinstance(core, reduction.method)), None)) is not None:
        if name != AUTO:
            raise ValueError(
                f"{compressor.name} is a method with an exchange of its own, so {name} cannot average its payloads"
                f" (parameter {parameter.name!r}): leave out .by()"
            )
        return own
    if name != AUTO:
        reduction = _GENERIC[exchange] if isinstance(exchange, str) else exchange
        reduction.check(compressor, parameter)
        return reduction
    possible = [each for each, reduction in _GENERIC.items() if _is_possible(reduction, compressor, parameter)]
    prices = {each: _price(each, compressor, parameter, world_size) for each in possible}
    if not prices:
        raise ValueError(
            f"{compressor.name}: its payloads can neither be summed nor decoded alone, so no exchange can average them:"
            " derive it from Packed or Summable of thinwire.compress.base"
        )
    if isinstance(code_of(compressor), Sparsifier):
        prices.pop(TwoShot.name, None)
    return _GENERIC[min(prices, key=lambda each: prices[each])]


def scattered(method: Exchanged, parameter: Parameter, world_size: int) -> Reduction:
    """Return the reduction for a gradient of which each rank keeps one piece, as of FSDP's shards.

    Sums of payloads (power_sgd) are all-reduced; in "two_shot" other payloads go to the owners of pieces only, which is
    the first shot. "auto" takes the one of fewest bytes.

    Raises:
        ValueError: payloads of the compressor cannot be averaged that way.
    """
    compressor, asked = method.compressor, method.exchange
    both: dict[str, Reduction] = {AllReduce.name: AllReduce(), TwoShot.name: ReduceScatter()}
    possible = [one for name, one in both.items() if asked in (AUTO, name) and _is_possible(one, compressor, parameter)]
    if not possible:
        raise ValueError(
            f"{compressor.name}{'' if asked == AUTO else f' by {asked}'} cannot compress gradients that are scattered"
            f" to the owners of their shards (parameter {parameter.name!r}): leave out .by(), compress the replicas of"
            " a two-dimensional mesh, or use another compressor"
        )
    return min(possible, key=lambda one: _price(one.name, compressor, parameter, world_size))


def _price(name: str, compressor: Compressor, parameter: Parameter, world_size: int) -> float:
    if name == AllReduce.name:
        specs = [spec for specs in summable_code(compressor).round_specs(parameter) for spec in specs]
        return ring_all_reduce_bytes(sum((spec.numel or 0) * spec.dtype.itemsize for spec in specs), world_size)
    packed = max_packed_bytes(compressor, parameter)
    if name == ReduceScatter.name:
        return packed * (world_size - 1) / world_size
    if name == AllGather.name:
        return (world_size - 1) * packed
    return ring_all_reduce_bytes(packed, world_size) / _WORTH_A_SECOND_CODING


def _is_possible(reduction: Reduction, compressor: Compressor, parameter: Parameter) -> bool:
    try:
        reduction.check(compressor, parameter)
    except ValueError:
        return False
    return True
