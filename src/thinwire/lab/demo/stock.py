"""Seconds and bytes of stock DDP, which runs without any hook of ours.

Seconds come from DDP's own log. Gloo keeps no count of bytes: they follow from the formulas of its collectives and
the rows of each gradient.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.process_group import ring_all_reduce_bytes, sparse_all_reduce_bytes


def sent_bytes(model: DistributedDataParallel, looked_up: Sequence[Tensor], world_size: int) -> int:
    """Return the bytes that each rank sends in a step; exact for the mean over ranks, which look up other rows.

    Args:
        looked_up: the ids looked up in each table of sparse gradients by this rank, repeated or not.
    """
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding) and module.sparse]
    of_tables = sum(
        sparse_all_reduce_bytes([ids.unique().numel()] * world_size, 0, weight[0].nbytes)
        for weight, ids in zip(tables, looked_up, strict=True)
    )
    dense = sum(weight.nbytes for weight in model.parameters()) - sum(weight.nbytes for weight in tables)
    return ring_all_reduce_bytes(dense, world_size) + of_tables


def comm_seconds(model: DistributedDataParallel) -> float:
    """Return the seconds from the first collective of the last backward pass to the end of its last one.

    DDP has to measure every step for that, instead of one in a hundred: ``_set_ddp_runtime_logging_sample_rate(1)``.
    """
    assert model.logger is not None, "DDP makes it when it is built"
    model.logger.set_runtime_stats_and_log()  # as the next forward pass would
    return int(model._get_ddp_logging_data().get("backward_comm_time", 0)) / 1e9
