"""Every iteration's checkpoint in the memory of peers, recovered without a disk.

The method is GEMINI's (Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints", SOSP'23).
"""

from thinwire.checkpoint.placement import placement, recovery_probability

__all__ = ["placement", "recovery_probability"]
