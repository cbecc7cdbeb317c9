"""`sparse_all_reduce`: the sum of a sparse tensor over ranks, as a function."""

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Literal, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.comm.c10d import check_names
from thinwire.comm.channel import Subject
from thinwire.comm.collectives import Collectives
from thinwire.comm.groups import Group, resolve_group
from thinwire.comm.lane import Lane
from thinwire.rows.sparse import Layout, SparseRows
from thinwire.sums.collective import CollectiveSum, NamedGradient
from thinwire.sums.named import AUTO, ZEN, Rows, resolve
from thinwire.sums.scheme import Scheme
from thinwire.sums.synchronize import agree, synchronize
from thinwire.sums.two_level import TwoLevel
from thinwire.tune.prices import chosen

Op = Literal["sum", "mean"]

_lanes: WeakKeyDictionary[dist.ProcessGroup, Lane] = WeakKeyDictionary()
_sums: WeakKeyDictionary[dist.ProcessGroup, CollectiveSum] = WeakKeyDictionary()


@overload
def sparse_all_reduce(
    tensor: Tensor, scheme: Rows = ..., op: Op = ..., process_group: Group = ..., async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def sparse_all_reduce(
    tensor: Tensor, scheme: Rows = ..., op: Op = ..., process_group: Group = ..., *, async_op: Literal[True]
) -> Future[Tensor]: ...
def sparse_all_reduce(
    tensor: Tensor, scheme: Rows = AUTO, op: Op = "sum", process_group: Group = None, async_op: bool = False
) -> Tensor | Future[Tensor]:
    """Sum (or average) a sparse tensor over all ranks of a process group, exactly.

    The result is the sum in rank order, rounded once for 16-bit dtypes, and the same bits on every rank. All
    ranks of the group must call it, in the same order, with the same shape, dtype, layout, scheme and op;
    the number of non-zeros may differ, and may be zero. The first call on a group makes a lane for it.

    Args:
        tensor: float32, float64, bfloat16 or float16, on the CPU, or on a GPU where the group has NCCL. Sparse COO of
            any number of sparse and dense dimensions, coalesced or not: one row for each index. Or dense and
            contiguous: rows of the first dimension, or single elements when one-dimensional; one scan skips the zeros.
            It is not changed. With ``async_op`` it must not be written to until the future is done.
        scheme: "auto", another name of `thinwire.schemes.NAMED`, such as "zen" or "dense", or a `Scheme`; or
            "two_level:zen" (any name but "dense"), or a `TwoLevel`: ranks of one host add up first. On a GPU "auto" is
            "zen", and schemes that send in stages are refused, as are hosts of several sizes. Under
            ``torch.use_deterministic_algorithms(True)`` "auto" chooses among schemes that add in rank order.
        op: "sum" or "mean" (over ranks).
        process_group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group.
        async_op: whether to return at once, with a future of the result.

    Returns:
        A new tensor of the same layout and shape (COO: coalesced), or a future of it.

    Raises:
        ValueError: an argument is illegal. A bad tensor on one rank raises ValueError there and `PeerError` on the
            others.
        MismatchError: ranks disagree about shape, dtype, layout, scheme, op, or the order of calls.
        PeerError: a peer failed, died, or did not call within the group's timeout.
        CorruptMessageError: a message arrived changed.

    On a GPU the sum is by NCCL, on the calling thread and the current stream; the host waits twice for the device, and
    three times with two levels.

    Memory: up to four times the values received (sixteen-bit values: seven and a half, because they are summed in
    float32), plus one bit for each row and rank; tested in tests/sums/laws/test_memory.py.

    Example:
        >>> gradient = torch.sparse_coo_tensor([[0, 7]], torch.ones(2, 16), (1000, 16))  # doctest: +SKIP
        >>> total = thinwire.sparse_all_reduce(gradient)                                  # doctest: +SKIP
    """
    group = resolve_group(process_group)
    on_gpu = isinstance(tensor, Tensor) and tensor.is_cuda and "nccl" in dist.get_backend_config(group)
    if not on_gpu and group.size() > 1:
        in_order = torch.are_deterministic_algorithms_enabled()  # which may change before the job runs
        future = _lane_of(group).submit(lambda lane: sum_on(lane, tensor, scheme, op, in_order)[0])
        return future if async_op else future.wait()
    total = _on_gpu(tensor, scheme, op, group) if on_gpu else _alone(tensor, scheme, op)
    if not async_op:
        return total
    done: Future[Tensor] = Future(devices=[total.device] if total.is_cuda else None)
    done.set_result(total)
    return done


def sum_on(lane: Lane, tensor: Tensor, scheme: Rows, op: Op, in_order: bool) -> tuple[Tensor, Scheme | TwoLevel]:
    """Return the sum or mean and its scheme, in a job of the lane, which all its ranks run in the same order.

    Args:
        in_order: whether algorithms were deterministic at the call, so that "auto" adds in rank order.
    """
    text = scheme.describe() if isinstance(scheme, (Scheme, TwoLevel)) else str(scheme)
    text += ", in rank order" * (in_order and scheme == AUTO)
    channel = lane.channel(Subject("sparse_all_reduce", f"{_kind(tensor)}, op={op}, scheme={text}"))
    choose = partial(chosen, in_rank_order=in_order)
    rows, point = agree(lambda: _rows(tensor, op), scheme, channel, choose)
    total = synchronize(rows, point, channel, 1.0 if op == "sum" else 1.0 / channel.world_size)
    return Layout.of(tensor).tensor(total), point


def _rows(tensor: Tensor, op: Op) -> SparseRows:
    _check(op)
    return Layout.of(tensor).rows(tensor)


def _check(op: Op) -> None:
    if op not in ("sum", "mean"):
        raise ValueError(f"unknown op {op!r}; legal are sum and mean")


def _on_gpu(tensor: Tensor, scheme: Rows, op: Op, group: dist.ProcessGroup) -> Tensor:
    """Return the sum by collectives of the group, whose ranks all learn of a bad argument on one of them."""

    def points() -> Iterator[Scheme | TwoLevel]:
        _check(op)
        yield resolve(scheme) or ZEN

    if group not in _sums:
        exchange = Collectives(group)
        exchange.find_hosts(tensor.device)
        _sums[group] = CollectiveSum(exchange)
    gradient = NamedGradient("sparse_all_reduce", tensor.detach() if tensor.is_sparse else tensor.detach().clone())
    (total,) = _sums[group].all_reduce([gradient], points(), 1.0 / group.size() if op == "mean" else 1.0)
    return total


def _alone(tensor: Tensor, scheme: Rows, op: Op) -> Tensor:
    """Return the sum over one rank, a copy by the same rules, without starting a lane."""
    resolve(scheme)
    total = Layout.of(tensor).tensor(_rows(tensor, op))
    return total.clone() if total.is_sparse else total  # whose values may be those of the argument


def _kind(tensor: Tensor) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__  # which `_rows` refuses
    sparse = f", {tensor.sparse_dim()} sparse dimensions" if tensor.is_sparse else ""
    return f"{tensor.dtype} {list(tensor.shape)} {tensor.layout}{sparse}"


def _lane_of(group: dist.ProcessGroup) -> Lane:
    """Return the lane of a group; the first call, which all its ranks make, creates it."""
    if group not in _lanes:
        check_names("sparse_all_reduce", 'call torch.distributed.all_reduce, under init_process_group("thinwire")')
        lane = _lanes[group] = Lane(group)
        weakref.finalize(group, lane.abandon)
    return _lanes[group]
