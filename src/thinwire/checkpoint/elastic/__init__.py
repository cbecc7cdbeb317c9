"""Hosts that fail are replaced by themselves: a rendezvous for torchrun, ``--rdzv-backend=thinwire``.

torchrun stays the launcher; the entry point ``torchrun.handlers`` makes the backend known wherever thinwire is
installed. See docs/guides/elastic.md.
"""

from typing import Any


def handler() -> Any:
    """Return the creator of the rendezvous, for torchrun, which calls this at each start: so it imports nothing."""

    def create(params: Any) -> Any:
        from thinwire.checkpoint.elastic.rendezvous import ElasticRendezvous

        return ElasticRendezvous(params)

    return create
