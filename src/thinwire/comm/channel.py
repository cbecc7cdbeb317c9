"""A conversation about one tensor: messages with identity and checksum, and failures that reach every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.comm.agree import broadcast_json, gather_bytes, gather_numbers
from thinwire.comm.machine import Machine
from thinwire.comm.process_group import Exchange, Stream, Telling, check_fits
from thinwire.errors import (
    CorruptHeaderError,
    CorruptMessageError,
    LostPeerError,
    MismatchError,
    PeerError,
    ThinwireError,
    in_exchange,
    raising,
    told,
)
from thinwire.observe.step import named
from thinwire.rows.formats import ALIGNMENT_BYTES, Format, Header, Kind, Message, aligned, digest64

_MAX_DESCRIPTION_BYTES = 1 << 20
MAX_ERROR_BYTES = 4096
_LARGEST_TAG = (1 << 31) - 1


T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """Identity of what is synchronized, which must be equal on all ranks.

    Args:
        name: name for error messages: a parameter, or the number of a call.
        description: everything that has to agree: shape, dtype, operation, scheme, seed.
    """

    name: str
    description: str

    def digest(self) -> int:
        return digest64(f"{Header.VERSION}\n{self.name}\n{self.description}".encode())


@dataclass(frozen=True, eq=False)
class Draft:
    """An unaddressed message: encoded rows, and the number of rows that the sender holds in all."""

    format: Format
    count: int
    payload: Tensor
    held: int = 0
    saved_bytes: int = 0  # by the code of its values


class Channel:
    """A conversation about one subject over an `Exchange`, made of swaps of messages.

    Each swap is two collectives: headers of a fixed size, then payloads of the announced sizes. Whatever fails
    while a rank prepares a swap is sent in place of its messages, so that every rank raises, and none waits.
    """

    def __init__(
        self, exchange: Exchange, subject: Subject, sequence: int, measure: Callable[[], Machine | None] | None = None
    ) -> None:
        self.exchange = exchange
        self.rank, self.world_size = exchange.rank, exchange.world_size
        self._measure = measure
        self.subject = subject
        self.sequence = sequence & 0xFFFFFFFF
        self.held: list[int] = []  # rows that each rank holds, known after the first swap
        self.max_held: int | None = None  # most rows that a rank can hold, where that is known
        self.codes_values = False  # whether values of rows travel as their code where it pays; alike on all ranks
        self.saved_bytes = 0  # by such codes
        self.formats_sent: dict[Kind, set[Format]] = {}
        self._opened: tuple[Sequence[Message], Callable[[], Sequence[Tensor]]] | None = None  # by `begin_open`
        self.digest = subject.digest()

    def global_rank(self, rank: int | None = None) -> int:
        """Return the rank that logs have for a rank, or for this one: messages name that."""
        return self.exchange.global_ranks[self.rank if rank is None else rank]

    def among(self, ranks: Sequence[int]) -> Channel:
        """Return the channel of a conversation among some of the ranks, this one included, in the order given."""
        name = f"{self.subject.name} (among ranks {', '.join(map(str, ranks))}, which count from 0 here)"
        channel = Channel(self.exchange.subset(ranks), Subject(name, self.subject.description), self.sequence)
        channel.codes_values = self.codes_values
        return channel

    def machine(self) -> Machine | None:
        """Return what the exchange costs, or None if it cannot be measured.

        Call it after `open`. The first call measures, so it is collective.
        """
        return None if self._measure is None else self._run(self._measure)

    def attempt(self, prepare: Callable[[], T]) -> T:
        """Return what ``prepare`` returns; if it raises, tell all ranks in place of the next swap and raise."""
        try:
            return prepare()
        except Exception as error:
            failure = error

        self.swap(Kind.OPEN, raising(failure))
        raise AssertionError("a swap raises what prepare raises")

    def open(self, held: int = 0) -> list[int]:
        """Agree that all ranks mean the same subject, and return the number of rows that each rank holds.

        It is not needed before another swap, which checks the same.

        Raises:
            MismatchError: a rank means another subject; raised on every rank.
            PeerError: another rank failed in `attempt`.
        """
        self.swap(Kind.OPEN, lambda: self._opening(held))
        return self.held

    def begin_open(self) -> None:
        """Begin to `open`, without waiting for the others; `settle` completes it, before anything else is exchanged.

        What a stream sends meanwhile reaches only ranks that mean the same.
        """
        outgoing = self.seal(Kind.OPEN, self._opening(0))
        complete = self._run(self.exchange.begin_records, _packed(outgoing))
        self._opened = outgoing, complete

    def settle(self) -> None:
        """Complete `begin_open`, if that was called.

        Raises:
            MismatchError, PeerError: as for `open`; but messages are on their way that nobody receives, so the
                conversations of these ranks are over.
        """
        opened, self._opened = self._opened, None
        if opened is not None:
            outgoing, complete = opened
            try:
                self._completed(Kind.OPEN, outgoing, None, self._run(complete), 0)
            except Exception as error:
                raise told(error, 0) from None

    def _opening(self, held: int) -> list[Draft]:
        return [Draft(Format.COO, 0, torch.empty(0, dtype=torch.uint8), held)] * self.world_size

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Gather the numbers of each rank, in rank order; the subject has to settle how many there are.

        Raises:
            MismatchError, PeerError: as for `open`.
            CorruptMessageError: a gathered number is not finite.
        """
        self.open()
        return self._run(gather_numbers, self.exchange, self.subject.name, numbers)

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on all ranks: numbers, texts, lists and dicts.

        Raises:
            MismatchError, PeerError: as for `open`.
        """
        self.open()
        return self._run(broadcast_json, self.exchange, self.subject.name, value)

    def swap(self, kind: Kind, prepare: Callable[[], Sequence[Draft]], max_payload_bytes: int = 0) -> list[Message]:
        """Send the draft for each rank and return the message of each rank, in rank order; see `reading`.

        Args:
            prepare: makes the drafts, one for each rank; the same object may serve several ranks.
            max_payload_bytes: largest payload that a peer may announce; nothing longer is received.

        Raises:
            MismatchError, PeerError: as for `open`.
            CorruptHeaderError: a header announces a payload that cannot be received.
        """
        failure: Exception | None = None
        try:
            outgoing = self.seal(kind, prepare())
            self.saved_bytes += sum(message.saved_bytes for message in outgoing) - outgoing[self.rank].saved_bytes
        except Exception as error:
            failure = error
            outgoing = [self.seal_error(error)] * self.world_size
        records = self._run(self.exchange.swap_records, _packed(outgoing))
        return self._completed(kind, outgoing, failure, records, max_payload_bytes)

    def _completed(
        self,
        kind: Kind,
        outgoing: Sequence[Message],
        failure: Exception | None,
        records: Sequence[Tensor],
        max_payload_bytes: int,
    ) -> list[Message]:
        """Complete a swap whose headers have been exchanged as records."""
        headers = [self._unpack(record, source) for source, record in enumerate(records)]
        self._check_identity(headers)
        for source, header in enumerate(headers):
            self._check_sender(header, source)
            if failure is None:
                self._check_announcement(header, kind, max_payload_bytes)
        check_fits(sum(header.payload_bytes for header in headers), self.where)
        if kind is Kind.OPEN or not self.held:
            self.held = [self._checked_held(header) for header in headers]
        lengths = [header.payload_bytes for header in headers]
        payloads = self._run(self.exchange.swap, [message.payload for message in outgoing], lengths)
        if failure is not None:
            raise told(failure, self.world_size)
        incoming = [Message(header, payload) for header, payload in zip(headers, payloads, strict=True)]
        try:
            self.raise_reported(incoming)
        except PeerError as error:
            raise told(error, self.world_size) from None
        return incoming

    def swap_with(
        self,
        kind: Kind,
        target: int | None,
        outgoing: Sequence[Message],
        source: int | None,
        origins: Sequence[int],
        max_payload_bytes: int,
    ) -> list[Message]:
        """Send messages to one rank and return those that another one sends here; after `open`.

        Args:
            origins: the rank that made each incoming message; the source may pass on what others made.

        Errors of peers are returned as messages; `thinwire.sums.schedules` builds patterns from this.

        Raises:
            CorruptHeaderError: a header announces a payload that cannot be received.
        """
        self.saved_bytes += sum(message.saved_bytes for message in outgoing)  # not by ids of other ranks
        packed = _joined(_packed(outgoing))
        data = self._run(self.exchange.swap_with, target, packed, source, len(origins) * Header.NUM_BYTES)
        records = [data[index * Header.NUM_BYTES :][: Header.NUM_BYTES] for index in range(len(origins))]
        headers = [self.unpack(*pair, kind, max_payload_bytes) for pair in zip(records, origins, strict=True)]
        check_fits(sum(header.payload_bytes for header in headers), self.where)
        ends = list(accumulate((header.payload_bytes for header in headers), initial=0))
        payload = _joined([message.payload for message in outgoing])
        data = self._run(self.exchange.swap_with, target, payload, source, ends[-1])
        return [Message(header, data[start:end]) for header, (start, end) in zip(headers, pairwise(ends), strict=True)]

    def reading(self, message: Message) -> Telling:
        """Verify a message and return a context in which errors about it name its sender.

        Raises:
            CorruptMessageError: the message is corrupt. Read it where the next swap is prepared, if there is one,
                so that all ranks learn of the error there.
        """

        def tell(error: BaseException) -> None:
            if isinstance(error, CorruptMessageError):
                raise CorruptMessageError(f"{self.where(message.header.source)}: {error}") from error

        reading = Telling(tell)
        with reading:
            message.verify()
        return reading

    def seal_error(self, error: Exception) -> Message:
        """Return the message that reports a failure of this rank."""
        return self.seal(Kind.ERROR, [_error_draft(error)])[0]

    def seal(self, kind: Kind, drafts: Sequence[Draft]) -> list[Message]:
        """Return the drafts as sealed messages of this rank; a draft that occurs twice is sealed once."""
        sealed: dict[int, Message] = {}
        for draft in drafts:
            if id(draft) not in sealed:
                header = Header(kind, self.rank, self.sequence, self.digest, draft.format, draft.held, draft.count)
                sealed[id(draft)] = Message.sealed(header, draft.payload, draft.saved_bytes)
            if draft.count and kind in (Kind.PUSH, Kind.PULL, Kind.GATHER):
                self.formats_sent.setdefault(kind, set()).add(draft.format)
        return [sealed[id(draft)] for draft in drafts]

    def _unpack(self, record: Tensor, source: int) -> Header:
        try:
            return Header.unpack(record.numpy().tobytes())
        except CorruptMessageError as error:
            raise CorruptHeaderError(f"{self.where(source)}: {error}") from error

    def _check_identity(self, headers: Sequence[Header]) -> None:
        """Raise on all ranks if their subjects differ, which all of them see; gather the descriptions to say how."""
        if all(header.digest == self.digest and header.sequence == self.sequence for header in headers):
            return
        texts = self._swap_text(f"call {self.sequence} on this lane: {self.subject.name}\n{self.subject.description}")
        others = ((rank, text) for rank, text in enumerate(texts) if text != texts[self.rank])
        rank, theirs = next(others, (None, None))
        if rank is None or theirs is None:
            raise CorruptHeaderError(f"{self.where()}: a header of another conversation, with the same description")
        mine_line, their_line = first_difference(texts[self.rank], theirs)
        error = MismatchError(
            f"{self.where()}: ranks disagree about what is synchronized.\n  rank {self.global_rank()}: {mine_line}\n"
            f"  rank {self.global_rank(rank)}: {their_line}\nAll ranks must make the same calls in the same order, with"
            " the same shapes, dtypes, scheme and seed."
        )
        raise told(error, self.world_size)

    def unpack(self, record: Tensor, origin: int, kind: Kind, max_payload_bytes: int) -> Header:
        """Return the header in a record that a rank made in this conversation.

        Raises:
            CorruptHeaderError: it is none, of another rank, kind or conversation, or announces too much.
        """
        header = self._unpack(record, origin)
        self._check_sender(header, origin)
        if (header.digest, header.sequence) != (self.digest, self.sequence):
            raise CorruptHeaderError(f"{self.where()}: rank {self.global_rank(origin)} is in another conversation")
        self._check_announcement(header, kind, max_payload_bytes)
        return header

    def _check_sender(self, header: Header, origin: int) -> None:
        """Raise if the header names a wrong sender; only an error may be passed on by ranks other than its maker."""
        known = header.source < self.world_size if header.kind is Kind.ERROR else header.source == origin
        if not known:
            raise CorruptHeaderError(
                f"{self.where()}: a header of rank {self.global_rank(origin)} says that rank {header.source} made it"
            )

    def _checked_held(self, header: Header) -> int:
        if self.max_held is not None and header.held > self.max_held:
            raise CorruptHeaderError(
                f"{self.where()}: rank {self.global_rank(header.source)} says that it holds {header.held} rows"
                f" of {self.max_held}"
            )
        return header.held

    def _check_announcement(self, header: Header, kind: Kind, max_payload_bytes: int) -> None:
        if header.kind not in (kind, Kind.ERROR):
            raise CorruptHeaderError(
                f"{self.where()}: rank {self.global_rank(header.source)} sent {header.kind.name}, this rank"
                f" waits for {kind.name}"
            )
        limit = MAX_ERROR_BYTES if header.kind is Kind.ERROR else max_payload_bytes
        if header.payload_bytes > limit or header.payload_bytes % ALIGNMENT_BYTES:
            raise CorruptHeaderError(
                f"{self.where()}: rank {self.global_rank(header.source)} announces {header.payload_bytes} bytes, where"
                f" a multiple of {ALIGNMENT_BYTES} up to {limit} makes sense"
            )

    def raise_reported(self, incoming: Sequence[Message]) -> None:
        """Raise PeerError if one of the messages is an ERROR; CorruptMessageError if its reason is malformed."""
        for message in incoming:
            if message.header.kind is Kind.ERROR:
                with self.reading(message):
                    reason = _reason(message)
                raise PeerError(f"{self.where()}: rank {self.global_rank(message.header.source)} reports: {reason}")

    def _swap_text(self, text: str) -> list[str]:
        mine = text.encode()[:_MAX_DESCRIPTION_BYTES]
        point_to_point = self.exchange.subset(range(self.world_size))  # some ranks may have begun a later collective
        incoming = self._run(gather_bytes, point_to_point, "description", mine, _MAX_DESCRIPTION_BYTES)
        return [data.decode(errors="replace") for data in incoming]

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a dense tensor over the ranks, in place; after `open`, so that all ranks mean the same."""
        self._run(self.exchange.all_reduce, tensor)

    @contextmanager
    def stream(self) -> Iterator[Stream]:
        """Open a stream (see `thinwire.comm.process_group`), in which a failure cannot be reported to the peers.

        Its tag is that of this conversation alone: the next one of a lane begins before this one ends, and can have
        the same subject.
        """
        try:
            with self.exchange.stream((self.digest + self.sequence) & _LARGEST_TAG) as stream:
                yield stream
        except BaseException as error:
            in_exchange(error)
            raise

    def _run(self, exchange: Callable[..., T], *args: object) -> T:
        """Return what an exchange returns; a failure in it, of which the peers cannot learn, names the subject."""
        try:
            with named("exchange"):
                return exchange(*args)
        except LostPeerError as error:
            raise LostPeerError(f"{self.subject.name}: {error}") from error
        except BaseException as error:
            in_exchange(error)
            raise

    def where(self, source: int | None = None) -> str:
        """Return what begins a message: this rank, the subject, and which rank's bytes it is about."""
        text = f"rank {self.global_rank()}, {self.subject.name}"
        return text if source is None else f"{text}: from rank {self.global_rank(source)}"


def opening_bytes(world_size: int) -> int:
    """Return the bytes that a rank sends in `Channel.open`."""
    return (world_size - 1) * Header.NUM_BYTES


def _error_draft(error: Exception) -> Draft:
    says_enough = isinstance(error, (ThinwireError, ValueError)) and str(error)
    reason = str(error) if says_enough else f"{type(error).__name__}: {error}"
    data = reason.encode()[: MAX_ERROR_BYTES - ALIGNMENT_BYTES]
    return Draft(Format.COO, len(data), _as_bytes(data.ljust(aligned(len(data)), b"\0")))


def _reason(message: Message) -> str:
    """Return the reason in an ERROR message; check it, since an error ends the conversation of this rank alone."""
    data = message.payload.numpy().tobytes()
    text = data[: message.header.count]
    if not text or data[len(text) :].strip(b"\0") or len(data) - len(text) >= ALIGNMENT_BYTES:
        raise CorruptMessageError("a reason that is not one")
    return text.decode(errors="replace")


def _packed(messages: Sequence[Message]) -> list[Tensor]:
    return [_as_bytes(message.header.pack()) for message in messages]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.uint8)


def _as_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def first_difference(mine: str, theirs: str) -> tuple[str, str]:
    """Return the first lines in which two texts differ."""
    lines = zip_longest(mine.splitlines(), theirs.splitlines(), fillvalue="(nothing more)")
    return next(((a, b) for a, b in lines if a != b), ("(a long description)", "(another one, equal at first)"))
