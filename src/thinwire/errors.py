"""What can go wrong, as types. Every message names the rank, what was being synchronized, and the reason."""

from __future__ import annotations


class ThinwireError(RuntimeError):
    """Base of the errors that thinwire raises about a synchronization; bad arguments are ``ValueError``."""


class MismatchError(ThinwireError):
    """Ranks disagree about what is being synchronized: shape, dtype, scheme, seed, or the order of calls."""


class CorruptMessageError(ThinwireError):
    """A message arrived truncated, altered, or from another conversation; nothing of it was used."""


class PeerError(ThinwireError):
    """Another rank reported a failure, died, or did not answer within the timeout."""


class CorruptHeaderError(CorruptMessageError):
    """A header arrived altered, so the lengths that follow are unknown and the conversation cannot go on."""


class LostPeerError(PeerError):
    """A peer died, or did not answer within the timeout."""
