"""What it takes to synchronize a group of gradients by one job of the lane, from measured lines. Pure.

A job is a round of headers, then an all-reduce of the gradients that are not compressed, then the encoding, the
messages and the decoding of the others. All of it runs on the lane, one job after the other, beside backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.compress.assign import with_memory
from thinwire.compress.base import Compressor, Parameter, Summable, check_parameter
from thinwire.compress.choose import reduction_for
from thinwire.compress.exchange import Reduction
from thinwire.compress.named import parse
from thinwire.compress.policy import leave_small
from thinwire.compress.wrapper import code_of
from thinwire.plan.speeds import Codec, Fit, Link
from thinwire.sync.exchange import ring_all_reduce_bytes


@dataclass(frozen=True)
class Messages:
    """Seconds of the messages of a job, whatever tensors they are about.

    Args:
        alpha: added to those of the bytes.
        floor: less they never take, with their bytes.
        fixed: added to either.
    """

    alpha: float
    floor: float = 0.0
    fixed: float = 0.0

    def seconds(self, wire_seconds: float) -> float:
        """With bytes that take so long by themselves."""
        return self.fixed + max(self.floor, self.alpha + wire_seconds)


@dataclass(frozen=True)
class Costs:
    """Seconds of any group of the gradients of a model.

    Args:
        encode_seconds, wire_seconds, decode_seconds: of each tensor; more of them in a group take as much longer.
        coded: whether it is compressed.
        opening_seconds: of every job.
        exact: of a job with tensors that are not compressed.
        compressed: of a job with tensors that are.
    """

    encode_seconds: tuple[float, ...]
    wire_seconds: tuple[float, ...]
    decode_seconds: tuple[float, ...]
    coded: tuple[bool, ...]
    opening_seconds: float
    exact: Messages
    compressed: Messages = Messages(0.0)  # frozen

    @property
    def tensor_seconds(self) -> tuple[float, ...]:
        """Of each tensor, all three together."""
        parts = zip(self.encode_seconds, self.wire_seconds, self.decode_seconds, strict=True)
        return tuple(sum(seconds) for seconds in parts)

    @property
    def group_seconds(self) -> float:
        """Of a job of whatever kinds of tensors there are, without the tensors."""
        exact = self.exact.seconds(0.0) if not all(self.coded) else 0.0
        return self.opening_seconds + exact + (self.compressed.seconds(0.0) if any(self.coded) else 0.0)

    def seconds(self, members: Sequence[int]) -> float:
        """Of one job."""
        work = sum(self.encode_seconds[place] + self.decode_seconds[place] for place in members)
        exact = [self.wire_seconds[place] for place in members if not self.coded[place]]
        coded = [self.wire_seconds[place] for place in members if self.coded[place]]
        messages = self.exact.seconds(sum(exact)) if exact else 0.0
        messages += self.compressed.seconds(sum(coded)) if coded else 0.0
        return self.opening_seconds + messages + work


def exact_costs(parameters: Sequence[Parameter], link: Link, copies: Codec, world_size: int) -> Costs:
    """Of gradients that are all-reduced.

    Args:
        copies: into one tensor and back.
    """
    encode, wire, decode = zip(*(_exact(entry, link, copies, world_size) for entry in parameters), strict=True)
    return Costs(encode, wire, decode, (False,) * len(parameters), link.round.alpha, _exact_messages(link, copies))


def coded_costs(parameters: Sequence[Parameter], link: Link, copies: Codec, codec: Codec, world_size: int) -> Costs:
    """Of gradients of which `leave_small` has the large ones compressed.

    Raises:
        ValueError: the compressor sends what nobody can tell beforehand, or its reduction does not allow it.
    """
    compressor = with_memory(parse(codec.compressor))
    policy = leave_small(compressor)
    rows, coded, rounds = [], [], 0
    for parameter in parameters:
        is_coded = policy(parameter) is not None
        coded.append(is_coded)
        if is_coded:
            check_parameter(compressor, parameter)
            reduction = reduction_for(codec.exchange, compressor, parameter, world_size)
            rows.append(_coded(parameter, link, codec, compressor, reduction, world_size))
            rounds = max(rounds, _rounds(compressor, parameter))
        else:
            rows.append(_exact(parameter, link, copies, world_size))
    encode, wire, decode = zip(*rows, strict=True)
    compressed = _messages(link, codec.exchange, rounds)
    return Costs(encode, wire, decode, tuple(coded), link.round.alpha, _exact_messages(link, copies), compressed)


def _exact(parameter: Parameter, link: Link, copies: Codec, world_size: int) -> tuple[float, float, float]:
    size_bytes = parameter.numel * parameter.dtype.itemsize
    sent = ring_all_reduce_bytes(size_bytes, world_size)
    line, into, back = link.all_reduce.line, copies.encode.line, copies.decode.line
    return into.beta * size_bytes, line.beta * sent, back.beta * size_bytes


def _exact_messages(link: Link, copies: Codec) -> Messages:
    fit = link.all_reduce
    return Messages(fit.line.alpha, fit.floor, copies.encode.line.alpha + copies.decode.line.alpha)


def _coded(
    parameter: Parameter, link: Link, codec: Codec, compressor: Compressor, reduction: Reduction, world_size: int
) -> tuple[float, float, float]:
    size_bytes = parameter.numel * parameter.working_dtype.itemsize
    sent = added_bytes(compressor, parameter, reduction, world_size)
    line = _collective(link, codec.exchange).line
    return codec.encode(size_bytes), line.beta * sent, codec.decode(size_bytes)


def added_bytes(compressor: Compressor, parameter: Parameter, reduction: Reduction, world_size: int) -> int:
    """By how many bytes one more parameter like this makes what the busiest rank sends longer: without headers.

    Raises:
        ValueError: it depends on the gradients.
    """
    plan, added = (compressor, parameter), []
    for rank in {0, world_size - 1}:
        one = reduction.sent_bytes([plan], rank, world_size)
        two = reduction.sent_bytes([plan, plan], rank, world_size)
        if one is None or two is None:
            raise ValueError(
                f"{compressor.name}: how many bytes it sends depends on the gradients, so nobody can tell beforehand"
                " what it takes: plan with a compressor of fixed size, such as top_k, ef_sign_sgd or power_sgd"
            )
        added.append(two - one)
    return max(added)


def _collective(link: Link, exchange: str) -> Fit:
    return {"all_reduce": link.all_reduce, "all_gather": link.all_gather, "two_shot": link.all_to_all}[exchange]


def _messages(link: Link, exchange: str, rounds: int) -> Messages:
    """Of each shot with its headers, or of as many all-reduces as there are rounds."""
    if exchange == "all_reduce":
        return Messages(rounds * link.all_reduce.line.alpha, rounds * link.all_reduce.floor)
    gather = link.all_gather
    if exchange == "all_gather":
        return Messages(gather.line.alpha, gather.floor, link.round.alpha)
    deal = link.all_to_all
    return Messages(deal.line.alpha + gather.line.alpha, deal.floor + gather.floor, 2 * link.round.alpha)


def _rounds(compressor: Compressor, parameter: Parameter) -> int:
    """All-reduces of a compressor whose payloads are summed: one for each round and dtype."""
    code = code_of(compressor)
    if not isinstance(code, Summable):
        return 0
    return sum(len({spec.dtype for spec in specs}) for specs in code.round_specs(parameter))
