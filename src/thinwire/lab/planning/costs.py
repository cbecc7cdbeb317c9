"""The cost of synchronizing a group of gradients by one job of the lane, from measured lines. Pure.

A job is a round of headers, then an all-reduce of the gradients that are not compressed, then the encoding, the
messages and the decoding of the others. All of it runs on the lane, one job after the other, beside backward.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.compress.assign import NATIVE, leave_small
from thinwire.compress.base import Compressor, Parameter, Summable, check_parameter
from thinwire.compress.memory import with_memory
from thinwire.compress.named import parse
from thinwire.compress.reductions.base import Reduction
from thinwire.compress.reductions.choose import reduction_for
from thinwire.compress.wrappers import code_of
from thinwire.lab.planning.speeds import Codec, DenseCode, Fit, MeasuredLink
from thinwire.plan.plan import LOSSLESS
from thinwire.tune.lossless import SEGMENT_BYTES

EXACT = "exact"
"""Kind of the messages of gradients that are not compressed."""

_BUCKET_BYTES = 25 << 20


class Messages(NamedTuple):
    """The cost in seconds of a job's messages, beside that of its bytes.

    Attributes:
        kind: the exchange of the messages, or `EXACT`. Tensors of a job whose messages are equal share them.
        alpha: seconds beside the bytes' own.
        floor: least seconds of messages and bytes together.
        fixed: seconds added to either.
    """

    kind: str
    alpha: float
    floor: float = 0.0
    fixed: float = 0.0

    def seconds(self, wire_seconds: float) -> float:
        """Return the seconds of the messages with bytes that alone last ``wire_seconds``."""
        return self.fixed + max(self.floor, self.alpha + wire_seconds)


class TensorCost(NamedTuple):
    """The seconds of one tensor in a job: encoding, bytes, decoding; and the messages that it shares with others."""

    encode_seconds: float
    wire_seconds: float
    decode_seconds: float
    messages: Messages


@dataclass(frozen=True)
class Costs:
    """The costs of any group of a model's gradients.

    Args:
        tensors: costs of each tensor, whose seconds add up in a group.
        opening_seconds: seconds of every job, for its headers.
    """

    tensors: tuple[TensorCost, ...]
    opening_seconds: float

    @property
    def coded(self) -> tuple[bool, ...]:
        """Whether each tensor is compressed."""
        return tuple(tensor.messages.kind != EXACT for tensor in self.tensors)

    @property
    def wire_seconds(self) -> float:
        """Seconds of the bytes of all tensors."""
        return math.fsum(tensor.wire_seconds for tensor in self.tensors)

    @property
    def group_seconds(self) -> float:
        """Seconds of a job with all kinds of messages, without the tensors."""
        kinds = dict.fromkeys(tensor.messages for tensor in self.tensors)
        return self.opening_seconds + sum(messages.seconds(0.0) for messages in kinds)

    def seconds(self, members: Sequence[int]) -> float:
        """Return the seconds of one job."""
        return job_seconds(self.opening_seconds, [self.tensors[index] for index in members])


def job_seconds(opening_seconds: float, tensors: Iterable[TensorCost]) -> float:
    """Return the seconds of one job, of any mixture of messages."""
    work, wires = 0.0, dict[Messages, float]()
    for encode_seconds, wire_seconds, decode_seconds, messages in tensors:
        work += encode_seconds + decode_seconds
        wires[messages] = wires.get(messages, 0.0) + wire_seconds
    return opening_seconds + sum(messages.seconds(wire) for messages, wire in wires.items()) + work


def exact_costs(parameters: Sequence[Parameter], link: MeasuredLink, copies: Codec, world_size: int) -> Costs:
    """Return the costs of gradients that are all-reduced.

    Args:
        copies: the codec of copying into one tensor and back.
    """
    return Costs(tuple(_exact(entry, link, copies, world_size) for entry in parameters), link.round.alpha)


def coded_costs(
    parameters: Sequence[Parameter], link: MeasuredLink, copies: Codec, codec: Codec, world_size: int
) -> Costs:
    """Return the costs of gradients of which `leave_small` compresses the large ones.

    Raises:
        ValueError: the compressor's bytes cannot be predicted, or it does not allow the exchange.
    """
    compressor = with_memory(parse(codec.compressor))
    policy = leave_small(compressor)
    coded = [policy(parameter) != NATIVE for parameter in parameters]
    large = list(compress(parameters, coded))
    for parameter in large:
        check_parameter(compressor, parameter)
    rounds = max((_rounds(compressor, parameter) for parameter in large), default=0)
    line, messages = _collective(link, codec.exchange).line, _messages(link, codec.exchange, rounds)
    tensors: list[TensorCost] = []
    for parameter, is_coded in zip(parameters, coded, strict=True):
        if not is_coded:
            tensors.append(_exact(parameter, link, copies, world_size))
            continue
        size_bytes = parameter.numel * parameter.working_dtype.itemsize
        reduction = reduction_for(codec.exchange, compressor, parameter, world_size)
        sent = added_bytes(compressor, parameter, reduction, world_size)
        tensors.append(TensorCost(codec.encode(size_bytes), line.beta * sent, codec.decode(size_bytes), messages))
    return Costs(tuple(tensors), link.round.alpha)


def lossless_costs(
    parameters: Sequence[Parameter], link: MeasuredLink, copies: Codec, codes: Sequence[DenseCode], world_size: int
) -> Costs:
    """Return the costs of gradients that are summed losslessly; gradients of a dtype without a code stay native.

    Of coding and wire the longer one counts, and of the other the share that cannot overlap, as in
    `thinwire.tune.lossless.lossless_seconds` for a bucket of DDP.
    """
    exact, known = exact_costs(parameters, link, copies, world_size), {entry.dtype: entry for entry in codes}
    total = sum(parameter.numel * parameter.dtype.itemsize for parameter in parameters)
    segments = max(1, math.ceil(min(total, _BUCKET_BYTES) / world_size / SEGMENT_BYTES))
    deal, gather = link.all_to_all, link.all_gather
    messages = Messages(LOSSLESS, deal.line.alpha + gather.line.alpha, deal.floor + gather.floor)
    tensors: list[TensorCost] = []
    for parameter, native in zip(parameters, exact.tensors, strict=True):
        if parameter.dtype not in known:
            tensors.append(native)
            continue
        known_code, size_bytes = known[parameter.dtype], parameter.numel * parameter.dtype.itemsize
        coding = known_code.code.coding_seconds(size_bytes, world_size, known_code.cores)
        sending = known_code.code.sent_bytes(size_bytes, world_size) * deal.line.beta
        encode = native.encode_seconds + min(coding, sending) / segments
        tensors.append(TensorCost(encode, max(coding, sending), native.decode_seconds, messages))
    return Costs(tuple(tensors), exact.opening_seconds)


def chosen_costs(options: Sequence[Costs], choices: Sequence[int]) -> Costs:
    """Return the costs of the same gradients, each in the option of the given index."""
    tensors = tuple(options[choice].tensors[index] for index, choice in enumerate(choices))
    return Costs(tensors, options[0].opening_seconds)


def _exact(parameter: Parameter, link: MeasuredLink, copies: Codec, world_size: int) -> TensorCost:
    size_bytes = parameter.numel * parameter.dtype.itemsize
    sent = ring_all_reduce_bytes(size_bytes, world_size)
    line, into, back = link.all_reduce.line, copies.encode.line, copies.decode.line
    messages = Messages(EXACT, line.alpha, link.all_reduce.floor, into.alpha + back.alpha)
    return TensorCost(into.beta * size_bytes, line.beta * sent, back.beta * size_bytes, messages)


def added_bytes(compressor: Compressor, parameter: Parameter, reduction: Reduction, world_size: int) -> int:
    """Return the bytes that one more parameter like this adds to the busiest rank's, without headers.

    Raises:
        ValueError: the bytes depend on the gradients.
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


def _collective(link: MeasuredLink, exchange: str) -> Fit:
    return {"all_reduce": link.all_reduce, "all_gather": link.all_gather, "two_shot": link.all_to_all}[exchange]


def _messages(link: MeasuredLink, exchange: str, rounds: int) -> Messages:
    """Return the cost of each shot with its headers, or of one all-reduce per round."""
    if exchange == "all_reduce":
        return Messages(exchange, rounds * link.all_reduce.line.alpha, rounds * link.all_reduce.floor)
    gather = link.all_gather
    if exchange == "all_gather":
        return Messages(exchange, gather.line.alpha, gather.floor, link.round.alpha)
    deal = link.all_to_all
    return Messages(exchange, deal.line.alpha + gather.line.alpha, deal.floor + gather.floor, 2 * link.round.alpha)


def _rounds(compressor: Compressor, parameter: Parameter) -> int:
    """Return the number of all-reduces of a compressor whose payloads are summed: one per round and dtype."""
    code = code_of(compressor)
    if not isinstance(code, Summable):
        return 0
    return sum(len({spec.dtype for spec in specs}) for specs in code.round_specs(parameter))
