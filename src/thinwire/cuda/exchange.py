"""An exchange that can all-reduce tensors of a device."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from thinwire.cuda.staging import Staging
from thinwire.sync.exchange import ProcessGroupExchange


class StagedExchange(ProcessGroupExchange):
    """A `ProcessGroupExchange` over Gloo whose all-reduce takes dense gradients where they are."""

    def __init__(self, process_group: dist.ProcessGroup, staging: Staging) -> None:
        super().__init__(process_group)
        self._staging = staging

    def all_reduce(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu":
            super().all_reduce(tensor)
        elif self.world_size > 1:
            self._staging.all_reduce(tensor, super().all_reduce, self.world_size)
