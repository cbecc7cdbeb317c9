"""Take a gradient bucket of DDP apart: sparse gradients, tables with few non-zero rows, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor, nn

from thinwire.hooks.embedding import LookupRows
from thinwire.hooks.gradients import GradientSync
from thinwire.lane import Lane

OTHERS = "all other parameters"
"""The row of `Synchronizer.table` for what is all-reduced in buckets."""

Job = Callable[[Lane], Tensor]
Piece = Callable[[Lane], None]


class Buckets:
    """Makes the job that synchronizes a bucket.

    Args:
        gradients: what is done with each gradient.
        lookups: which parameters are tables, and which of their rows a backward touched.
        names: of parameters, by ``id()``.
    """

    def __init__(self, gradients: GradientSync, lookups: LookupRows, names: Mapping[int, str]) -> None:
        self._gradients = gradients
        self._lookups = lookups
        self._names = names
        self._tables = {id(parameter) for parameter in lookups.parameters}

    def job(self, bucket: dist.GradBucket) -> Job:
        """For the lane; it returns what DDP takes for the bucket: a new sparse tensor, or its buffer, in place."""
        if bucket.buffer().is_sparse:
            return self._sparse_job(bucket)
        return self._dense_job(bucket)

    def _sparse_job(self, bucket: dist.GradBucket) -> Job:
        gradient, name = bucket.buffer(), self._names[id(bucket.parameters()[0])]
        return lambda lane: self._gradients.sparse(lane, name, gradient)

    def _dense_job(self, bucket: dist.GradBucket) -> Job:
        buffer, pieces = bucket.buffer(), self._pieces(bucket)

        def job(lane: Lane) -> Tensor:
            for piece in pieces:
                piece(lane)
            return buffer

        return job

    def _pieces(self, bucket: dist.GradBucket) -> list[Piece]:
        """Tables one by one, and what lies between them in the bucket as one piece each."""
        buffer = bucket.buffer()
        pieces: list[Piece] = []
        done = 0
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if id(parameter) in self._tables:
                begin = int(gradient.storage_offset() - buffer.storage_offset())
                if begin > done:
                    pieces.append(self._between(bucket, done, begin))
                pieces.append(self._table(parameter, gradient))
                done = begin + gradient.numel()
        if buffer.numel() > done:
            pieces.append(self._between(bucket, done, buffer.numel()))
        return pieces

    def _between(self, bucket: dist.GradBucket, begin: int, stop: int) -> Piece:
        gradient = bucket.buffer()[begin:stop]
        name = f"elements {begin} to {stop} of gradient bucket {bucket.index()}"
        return lambda lane: self._gradients.dense(lane, name, gradient, OTHERS)

    def _table(self, parameter: Tensor, gradient: Tensor) -> Piece:
        assert isinstance(parameter, nn.Parameter)
        name, touched = self._names[id(parameter)], self._lookups.take(parameter)
        return lambda lane: self._gradients.table(lane, name, gradient, touched)
