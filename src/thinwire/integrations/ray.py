"""Ray Train: prepare a model and attach to it in one call, and report statistics with the metrics of a step."""

from __future__ import annotations

from typing import Any

import ray.train
import ray.train.torch
from torch import nn

from thinwire.integrations.attachment import Attachment


class RaySync(Attachment):
    """What `prepare_model` returns beside the model."""

    def report(self, metrics: dict[str, Any], checkpoint: ray.train.Checkpoint | None = None) -> None:
        """Report metrics, and the statistics of the steps since the last call, to Ray Train. All workers call it."""
        ray.train.report({**metrics, **self.per_step()}, checkpoint=checkpoint)


def prepare_model(model: nn.Module, prepare: dict[str, Any] | None = None, **options: Any) -> tuple[nn.Module, RaySync]:
    """Move a model to this worker's device, wrap it in DDP, and attach; on all workers, in the training function.

    With one worker the model is not wrapped, and nothing is attached.

    Args:
        model: the plain module.
        prepare: keyword arguments of ``ray.train.torch.prepare_model``.
        options: keyword arguments of `thinwire.attach`; or ``outer``, a recipe of `thinwire.outer`, with ``optimizer``
            and what else `thinwire.outer.attach` takes.

    Returns:
        the model to call, and its synchronizer.

    Raises:
        ValueError: as `thinwire.attach`.

    Example:
        >>> def train(config):
        ...     model, sync = thinwire.integrations.ray.prepare_model(Model())
        ...     for batch in batches:
        ...         ...
        ...         sync.report({"loss": loss.item()})
        >>> TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()       # doctest: +SKIP
    """
    prepared = ray.train.torch.prepare_model(model, **(prepare or {}))
    return prepared, RaySync(prepared, "leave out prepare={'parallel_strategy': None}", **options)
