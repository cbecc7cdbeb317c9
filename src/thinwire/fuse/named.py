"""Policies by name: ``byte_cap:mb=8`` is ``byte_cap(mb=8)``, as plans and command lines write it."""

from __future__ import annotations

import ast
from collections.abc import Callable

from thinwire.errors import unknown
from thinwire.fuse.buckets import ByteCap, byte_cap, equal_count, layerwise, mg_wfbp, omgs, one_bucket
from thinwire.fuse.cupcake import cupcake
from thinwire.fuse.policy import Policy
from thinwire.fuse.safusion import SaFusion, safusion

POLICIES: dict[str, Callable[..., Policy]] = {
    "layerwise": layerwise,
    "byte_cap": byte_cap,
    "equal_count": equal_count,
    "one_bucket": one_bucket,
    "mg_wfbp": mg_wfbp,
    "omgs": omgs,
    "cupcake": cupcake,
    "safusion": safusion,
}
"""Constructors of policies by name."""


def parse(text: str) -> Policy:
    """Return the policy that ``NAME`` or ``NAME:key=value:...`` denotes; a policy's ``name`` gives an equal one.

    Raises:
        ValueError: an unknown name, or settings that the constructor does not take; the message says what is legal.

    Example:
        >>> parse("byte_cap:mb=8").name
        'byte_cap:mb=8'
    """
    name, *pairs = text.strip().split(":")
    if name not in POLICIES:
        raise unknown("fusion policy", name, POLICIES)
    settings = dict(_setting(text, pair) for pair in pairs)
    try:
        return POLICIES[name](**settings)
    except TypeError as error:
        raise ValueError(f"thinwire.fuse.{name} does not take these settings: {error}") from error


def default_policies() -> tuple[Policy, ...]:
    """Return the policies of `thinwire.fuse`, byte caps of 1 and 25 MB among them."""
    return layerwise(), one_bucket(), byte_cap(1), byte_cap(25), mg_wfbp(), omgs(), cupcake(), safusion()


def counts_bytes(policy: Policy) -> bool:
    """Return whether a policy closes groups at a number of bytes of gradients, and not by their cost."""
    return isinstance(policy, ByteCap) or (isinstance(policy, SaFusion) and not policy.adapt)


def _setting(text: str, pair: str) -> tuple[str, object]:
    key, _, value = pair.partition("=")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        raise ValueError(f"{text!r}: a setting is NAME=VALUE, as in byte_cap:mb=8, not {pair!r}") from None
