"""Statistics for `Checkpointer.stats`."""

from __future__ import annotations

from thinwire.checkpoint.agreement import Agreement
from thinwire.checkpoint.dcp.tier import PersistentTier
from thinwire.checkpoint.pacing.gaps import Pacer
from thinwire.checkpoint.records import Records
from thinwire.checkpoint.registration import Registration


def statistics(
    records: Records, agreement: Agreement, registration: Registration, pacer: Pacer, tier: PersistentTier | None
) -> dict[str, float | str]:
    """Return the statistics by slash name; ``checkpoint/grants`` and ``checkpoint/schedule`` are texts for people."""
    found = records.stats()
    return {
        **found,
        "checkpoint/dropped": float(agreement.status.get("dropped", 0)),
        "checkpoint/replicated_step": float(agreement.keep),
        "checkpoint/persistent_step": float(tier.saved_step if tier is not None else -1),
        "checkpoint/persistent_errors": float(tier.errors if tier is not None else 0),
        "checkpoint/persistent_error": tier.last_error if tier is not None else "",
        "checkpoint/certified_step": float(agreement.divergence.certified),
        "checkpoint/diverged_ranks": float(len(agreement.divergence.diverged)),
        "checkpoint/replicas": float(registration.replicas),
        "checkpoint/bytes_sent": float(agreement.status.get("bytes_sent", 0)),
        "checkpoint/iteration_seconds": pacer.iteration_seconds,
        "checkpoint/idle_seconds": pacer.idle_seconds,
        "checkpoint/iterations_needed": float(pacer.iterations_needed),
        **_bounds(int(found["checkpoint/bytes"]), found["checkpoint/copy_seconds"], agreement, registration),
        "checkpoint/grants": pacer.how,
        "checkpoint/schedule": pacer.schedule,
    }


def _bounds(num_bytes: int, copying: float, agreement: Agreement, registration: Registration) -> dict[str, float]:
    """Least cost of a version at the measured speeds: a rank sends its shard to its peers, and copies theirs too."""
    if not num_bytes or not copying:
        return {}
    sent = (registration.replicas - 1) * num_bytes
    return {
        "checkpoint/bound_network_seconds": sent / (agreement.link_bytes_per_second or float("inf")),
        "checkpoint/bound_copy_seconds": registration.replicas * copying,
    }
