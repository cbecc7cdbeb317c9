"""Which exchange a compressor takes: what its traits allow, at the fewest bytes."""

from __future__ import annotations

from thinwire.compress.all_gather import AllGather
from thinwire.compress.all_reduce import AllReduce
from thinwire.compress.base import Compressor, Parameter
from thinwire.compress.by_scheme import ByScheme
from thinwire.compress.exchange import Exchange, ring_bytes
from thinwire.compress.hi_top_k_exchange import HiTopKExchange
from thinwire.compress.ok_topk_exchange import OkTopkExchange
from thinwire.compress.two_shot import TwoShot

AUTO = "auto"
_GENERIC: dict[str, Exchange] = {exchange.name: exchange for exchange in (AllReduce(), AllGather(), TwoShot())}
EXCHANGES = tuple(_GENERIC)
_OWN: dict[str, Exchange] = {exchange.name: exchange for exchange in (OkTopkExchange(), HiTopKExchange())}
_WORTH_A_SECOND_CODING = 0.9
"""Two shots code twice and lose twice: only for at least a tenth fewer bytes."""


def exchange_for(name: str, compressor: Compressor, parameter: Parameter, world_size: int) -> Exchange:
    """The exchange of that name, or with "auto" the one of fewest bytes; any other name is that of a scheme.

    A rank sends, of ``b`` packed bytes (sums of rounds for an all-reduce) on ``n`` ranks: inside an all-reduce and in
    two shots ``2 (n - 1) / n b``, gathered ``(n - 1) b``. Sparse payloads are gathered: two shots would choose
    again among what the ranks chose. A scheme is never taken by itself: what it saves depends on how often ranks choose
    the same elements, which nobody knows beforehand. Methods that are an exchange too (`Traits.own_exchange`) have it.

    Raises:
        ValueError: the compressor cannot be exchanged that way.

    Example:
        >>> from thinwire.compress.base import Identity
        >>> exchange_for("auto", Identity(), Parameter("fc.weight", (8, 8)), world_size=4).name
        'all_reduce'
    """
    own = _OWN.get(compressor.traits.own_exchange)
    if own is not None:
        if name != AUTO:
            raise ValueError(
                f"{compressor.name} is a method with an exchange of its own, so {name} cannot average its payloads"
                f' (parameter {parameter.name!r}): leave exchange="auto"'
            )
        return own
    if name != AUTO:
        exchange = _GENERIC.get(name) or ByScheme(name)
        exchange.check(compressor, parameter)
        return exchange
    prices = {
        candidate: _price(candidate, compressor, parameter, world_size)
        for candidate, exchange in _GENERIC.items()
        if _is_possible(exchange, compressor, parameter)
    }
    if not prices:
        raise ValueError(
            f"{compressor.name}: its payloads can neither be summed nor decoded alone, so no exchange can average them"
        )
    if compressor.traits.sparse or not compressor.traits.fixed_size:
        prices.pop(TwoShot.name, None)
    return _GENERIC[min(prices, key=lambda candidate: prices[candidate])]


def _price(name: str, compressor: Compressor, parameter: Parameter, world_size: int) -> float:
    if name == AllReduce.name:
        return ring_bytes(_summed_bytes(compressor, parameter), world_size)
    packed = compressor.packed_bytes(parameter)
    if packed is None:
        return float("inf")
    if name == AllGather.name:
        return (world_size - 1) * packed
    return ring_bytes(packed, world_size) / _WORTH_A_SECOND_CODING


def _summed_bytes(compressor: Compressor, parameter: Parameter) -> int:
    specs = [spec for specs in compressor.round_specs(parameter) for spec in specs]
    return sum((spec.numel or 0) * spec.dtype.itemsize for spec in specs)


def _is_possible(exchange: Exchange, compressor: Compressor, parameter: Parameter) -> bool:
    try:
        exchange.check(compressor, parameter)
    except ValueError:
        return False
    return True
