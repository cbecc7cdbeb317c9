"""The same bits on any number of ranks, and through the loss of any of them.

::

    steps = reproducible.Steps(model, micro_batches=24, steps=200, seed=0, optimizer=optimizer)
    for step in steps:
        for index in step:
            loss(model, data(step.number, index)).backward()
        optimizer.step()

See docs/guides/reproducible.md.
"""

from thinwire.reproducible.digests import digest
from thinwire.reproducible.steps import Steps

__all__ = ["Steps", "digest"]
