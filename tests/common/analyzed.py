"""Scripts that are analyzed."""

from __future__ import annotations

FAILING = """
import os, signal, sys
import torch.distributed as dist
from torch import nn, ones
from torch.nn.parallel import DistributedDataParallel

def learn(model):
    if dist.get_rank() == 1:
        {end}
    model(ones(4, 8)).sum().backward()

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 8))
    learn(model)
    learn(model)
"""
