"""Fusion policies: each constructor returns a `Policy`, a function from a profile to groups of gradients."""

# ruff: noqa: F403  each constructor is a name of this module

from thinwire.plan import policy
from thinwire.plan.policy import *

__all__ = policy.__all__
