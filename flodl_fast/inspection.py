"""What is in recorded bytes, frame by frame, for people and programs: ``inspect`` of the command line.

The one place of the package that looks into frames whose MAC does not hold, or cannot be checked for want of a salt:
it reads them with the same decoders as everything else and says of each how its MAC stands.
"""

from __future__ import annotations

import dataclasses
import hmac
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import capture
from ._codec import family_name
from ._round import RoundMeter
from .capture import Direction, Source
from .errors import BadMagicError, DecodeError, LimitError, TrailingDataError, TruncatedError, VersionMismatchError
from .frames import Codec
from .jsonform import to_json
from .messages import Reserved
from .protocol import (
    CONTROL_HEADER,
    LENGTH_PREFIX,
    MAC_SIZE,
    MAGIC_CHANNEL_CONTROL,
    MAGIC_CHANNEL_DATA,
    MAGIC_CHANNEL_JOIN,
    MAGIC_CHANNEL_RENDEZVOUS,
    MAGIC_CONTROL_ACK,
    MAGIC_CONTROL_FRAME,
    MAGIC_CONTROL_HELLO,
    MAGIC_DATA_ACK,
    MAGIC_DATA_HELLO,
    MAGIC_MUX,
    MAGIC_ROUND,
    MUX_HEADER,
    SALT_SIZE,
    MsgKind,
    MuxKind,
    Revision,
)

__all__ = ["FRAMINGS", "Entry", "Tensor", "inspect_frames"]

#: How a stream can be framed; "auto" looks at the magic of each frame, and finds captures.
FRAMINGS = ("auto", "control", "round", "mux", "prefixed-control", "prefixed-round")

_MAGIC = 4  # bytes of a magic
_CHANNELS = {
    "rendezvous": MAGIC_CHANNEL_RENDEZVOUS,
    "data": MAGIC_CHANNEL_DATA,
    "control": MAGIC_CHANNEL_CONTROL,
    "join": MAGIC_CHANNEL_JOIN,
}

OK, BAD, UNCHECKED, UNSIGNED = "ok", "BAD", "not checked", "none"
ZERO_SALT = "zero salt"  # of a join frame under open admission (docs/wire.md §4)


class Tensor(NamedTuple):
    """A tensor's metadata."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(slots=True)
class Entry:
    """One frame as it was found.

    Attributes:
        offset: where its first byte is in the file, after a length prefix.
        size: its bytes, without a length prefix.
        frame: "control", "round", "mux", "control hello", "control ack", "data hello", "data ack", or what a
            connection to the controller opens with, such as "join channel"; "unknown" where nothing fits.
        kind: of a control frame, round frame or mux record, by the crate's name.
        name: of the message's variant, by the crate's name.
        rank: whom it is from or about, where it says so; so for epoch and step.
        payload: bytes of the payload; of a round frame those of its tensors.
        mac: "ok", "BAD", "not checked" (no salt), "none" (the frame carries none), or "zero salt" (a
            join frame under open admission).
        fields: what else it says, by name.
        message: the message in the crate's JSON form.
        tensors: of a round frame.
        inner: the frame that a mux record carries.
        notes: what is odd about it but allowed.
        fault: what is wrong with it apart from its MAC.
        time_ns, direction, leg: what a capture says of it.
    """

    offset: int
    size: int
    frame: str = "unknown"
    kind: str | None = None
    name: str | None = None
    rank: int | None = None
    epoch: int | None = None
    step: int | None = None
    payload: int | None = None
    mac: str = UNSIGNED
    fields: dict[str, Any] = field(default_factory=dict)
    message: Any = None
    tensors: list[Tensor] | None = None
    inner: Entry | None = None
    notes: list[str] = field(default_factory=list)
    fault: str | None = None
    time_ns: int | None = None
    direction: Direction | None = None
    leg: str | None = None

    @property
    def good(self) -> bool:
        """Whether nothing is wrong, its MAC and the frame inside included."""
        return self.fault is None and self.mac != BAD and (self.inner is None or self.inner.good)

    def to_json(self) -> dict[str, Any]:
        """The entry as a JSON object, without what it does not have."""
        names = ("offset", "size", "time_ns", "leg", "frame", "kind", "name", "rank", "epoch", "step", "payload", "mac")
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.direction is not None:
            found["direction"] = self.direction.name.lower()
        if self.message is not None:
            found["msg"] = self.message
        else:
            found |= self.fields
        if self.tensors is not None:
            found["tensors"] = [tensor._asdict() for tensor in self.tensors]
        if self.inner is not None:
            found["inner"] = self.inner.to_json()
        if self.notes:
            found["notes"] = self.notes
        if self.fault is not None:
            found["error"] = self.fault
        return found


def inspect_frames(
    file: capture.Readable,
    *,
    salt: bytes | str | None = None,
    framing: str = "auto",
    revision: Revision | str | None = None,
) -> Iterator[Entry]:
    """The frames of a file, one at a time in memory.

    Args:
        file: a capture, or the bytes of one stream, or one frame.
        salt: the session salt; None checks no MAC.
        framing: one of FRAMINGS.
        revision: the revision to read as; None is the capture's own, 0.6 elsewhere.

    Raises:
        DecodeError: the bytes from ``.offset`` on are no frame, and where the next one starts cannot be known. A frame
            that is faulty in itself is an Entry that says so.
        ValueError, TypeError: as Codec, or a framing that is not known.
    """
    if framing not in FRAMINGS:
        raise ValueError(f"framing must be one of {FRAMINGS}, got {framing!r}")
    source = Source(file)
    if framing == "auto" and source.look(len(capture.MAGIC)).startswith(capture.MAGIC):
        yield from _inspect_capture(source, salt, revision)
    else:
        yield from _Inspector(salt, revision or "0.6").stream(source, framing)


def _inspect_capture(source: Source, salt: bytes | str | None, revision: Revision | str | None) -> Iterator[Entry]:
    inspectors: dict[Revision | str, _Inspector] = {}
    for record in capture.read_capture(source):
        spoken = revision or record.revision
        if spoken not in inspectors:
            try:
                inspectors[spoken] = _Inspector(salt, spoken)
            except ValueError as error:
                raise _at(record.offset, VersionMismatchError(str(error))) from None
        entry = inspectors[spoken].whole(record.data, record.offset)
        entry.time_ns, entry.direction, entry.leg = record.time_ns, record.direction, record.leg
        yield entry


class _Form(NamedTuple):
    """A kind of frame.

    Attributes:
        meter: makes a function from the bytes that are there to the frame's size, None while they do not tell it.
        read: decodes the frame and fills in its entry.
        tag: where the MAC is; None if it has none.
        signed: what the MAC covers.
    """

    name: str
    meter: Callable[[], Callable[[bytearray | memoryview], int | None]]
    read: Callable[[Entry, memoryview], None]
    tag: slice | None = slice(-MAC_SIZE, None)
    signed: tuple[slice, ...] = (slice(-MAC_SIZE),)


class _Inspector:
    """Reads frames under one salt and revision."""

    def __init__(self, salt: bytes | str | None, revision: Revision | str) -> None:
        self._zero = Codec(bytes(SALT_SIZE), revision)
        self._codec = self._zero if salt is None else Codec(salt, revision)
        self._salted = salt is not None
        codec = self._codec
        # A control frame's MAC stands after magic and version, which it does not cover; a mux record's ends the header.
        tag = slice(8, 8 + MAC_SIZE)
        control = _Form("control", lambda: codec.measure_frame, self._control, tag, (slice(tag.stop, None),))
        tag = slice(MUX_HEADER - MAC_SIZE, MUX_HEADER)
        covered = (slice(tag.start), slice(tag.stop, None))
        mux = _Form("mux", lambda: codec.measure_record, self._mux, tag, covered)
        round_ = _Form("round", lambda: RoundMeter(codec).measure, self._round)
        self._named = {form.name: form for form in (control, round_, mux)}
        self._forms = {
            MAGIC_CONTROL_FRAME: control,
            MAGIC_ROUND: round_,
            MAGIC_MUX: mux,
            MAGIC_CONTROL_HELLO: _Form("control hello", _fixed(len(codec.control_hello(0, 1))), self._control_hello),
            MAGIC_CONTROL_ACK: _Form("control ack", _fixed(len(codec.control_ack())), self._control_ack),
            MAGIC_DATA_HELLO: _Form("data hello", _fixed(len(codec.data_hello(0, 1))), self._data_hello, None),
            MAGIC_DATA_ACK: _Form("data ack", _fixed(len(codec.data_ack())), self._data_ack, None),
        }
        for name, magic in _CHANNELS.items():
            self._forms[magic] = _Form(f"{name} channel", _fixed(_MAGIC), lambda *_: None, None)

    # -- where frames start and end

    def stream(self, source: Source, framing: str) -> Iterator[Entry]:
        """The frames of a stream."""
        while source.look(1):
            yield self._next(source, framing)

    def _next(self, source: Source, framing: str) -> Entry:
        start = source.offset
        try:
            form, prefixed = self._expected(framing) if framing != "auto" else self._found(source)
            if prefixed:
                data = source.take(self._prefix(source), f"a prefixed {form.name} frame")
            else:
                data = source.take(self._measure(form, source.look), f"a {form.name} frame")
        except DecodeError as error:
            raise _at(start, error) from None
        return self._entry(form, memoryview(data), source.offset - len(data))

    def whole(self, data: bytearray, offset: int) -> Entry:
        """The one frame that these bytes are."""
        form = self._forms.get(_u32(data))
        if form is None:
            return Entry(offset, len(data), fault=f"no frame starts with the bytes {data[:8].hex()}")
        return self._entry(form, memoryview(data), offset)

    def _expected(self, framing: str) -> tuple[_Form, bool]:
        return self._named[framing.removeprefix("prefixed-")], framing.startswith("prefixed-")

    def _found(self, source: Source) -> tuple[_Form, bool]:
        """The form of what comes next, and whether it has a length prefix, by its magic."""
        head = source.look(LENGTH_PREFIX + _MAGIC)[: LENGTH_PREFIX + _MAGIC]
        # No length is a magic: that would be a frame of 4 GB.
        for prefixed in (False, True):
            form = self._forms.get(_u32(head[LENGTH_PREFIX * prefixed :]))
            if form is not None:
                return form, prefixed
        if len(head) < LENGTH_PREFIX + _MAGIC:
            raise TruncatedError(f"the file ends {len(head)} bytes into a frame")
        raise BadMagicError(f"no frame starts with the bytes {head.hex()}, with or without a length prefix")

    def _prefix(self, source: Source) -> int:
        size = _u32(source.take(LENGTH_PREFIX, "a length prefix"))
        if size > self._codec.frame_ceiling:
            raise LimitError(f"a length prefix of {size} bytes is above the limit of {self._codec.frame_ceiling}")
        return size

    def _measure(self, form: _Form, look: Callable[[int], bytearray | memoryview]) -> int:
        """The size of a frame whose bytes ``look`` gives, all of which are there."""
        meter = form.meter()
        there = len(look(1))
        while (size := meter(look(there))) is None or size > len(look(size)):
            if len(look(there + 1)) == there:
                of = "" if size is None else f" of {size} bytes"
                raise TruncatedError(f"a {form.name} frame{of} ends after {there}")
            there = len(look(there + 1))
        return size

    # -- what a frame says

    def _entry(self, form: _Form, data: memoryview, offset: int) -> Entry:
        """The frame at the start of these bytes, which may be changed."""
        entry = Entry(offset, len(data), form.name)
        try:
            size = self._measure(form, lambda _: data)
            if size < len(data):
                entry.notes.append(f"{len(data) - size} extra bytes after the frame")
            entry.size = size
            form.read(entry, self._sign(form, entry, data[:size]))
        except DecodeError as error:
            entry.fault = str(error)
        return entry

    def _sign(self, form: _Form, entry: Entry, data: memoryview) -> memoryview:
        """Compare the MAC, then put one there that holds: so the decoders read a frame whatever its MAC was."""
        if form.tag is not None:
            pieces = [data[piece] for piece in form.signed]
            signed = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            tag = self._codec.mac(signed)
            if not self._salted:
                entry.mac = UNCHECKED
            elif hmac.compare_digest(tag, data[form.tag]):
                entry.mac = OK
            elif _is_join(form, data) and hmac.compare_digest(self._zero.mac(signed), data[form.tag]):
                entry.mac = ZERO_SALT
            else:
                entry.mac = BAD
            data[form.tag] = tag
        return data

    def _control(self, entry: Entry, data: memoryview) -> None:
        entry.payload = len(data) - CONTROL_HEADER
        entry.kind = family_name(_control_kind(data))
        message = _decode(self._codec.decode, entry, data)
        if isinstance(message, Reserved):
            entry.notes.append("a reserved kind, which carries no message")
        else:
            self._message(entry, message)

    def _mux(self, entry: Entry, data: memoryview) -> None:
        entry.payload = len(data) - MUX_HEADER
        record = _decode(self._codec.decode_mux, entry, data)
        entry.kind = record.kind.name.title().replace("_", "")
        if record.kind is MuxKind.CONTROL:
            self._message(entry, record.payload)
            return
        if record.kind is MuxKind.DATA:
            entry.rank = record.rank
        form = self._named["control" if record.kind is MuxKind.DATA else "round"]
        entry.inner = self._entry(form, data[MUX_HEADER:], entry.offset + MUX_HEADER)

    def _round(self, entry: Entry, data: memoryview) -> None:
        frame = self._codec.decode_round(data, copy=False)
        entry.kind = frame.kind.name.title()
        entry.fields["weight"] = frame.weight
        entry.tensors = [Tensor(t.dtype.name, t.shape, t.nbytes) for t in frame.tensors]
        entry.payload = sum(tensor.nbytes for tensor in entry.tensors)

    def _control_hello(self, entry: Entry, data: memoryview) -> None:
        entry.fields["world"] = _u32(data[12:])
        entry.rank, _ = self._codec.check_control_hello(bytes(data), entry.fields["world"])

    def _data_hello(self, entry: Entry, data: memoryview) -> None:
        entry.fields["world"] = _u32(data[12:])
        entry.rank = self._codec.check_data_hello(bytes(data), entry.fields["world"])

    def _control_ack(self, entry: Entry, data: memoryview) -> None:
        self._codec.check_control_ack(bytes(data))

    def _data_ack(self, entry: Entry, data: memoryview) -> None:
        self._codec.check_data_ack(bytes(data))

    def _message(self, entry: Entry, message: Any) -> None:
        entry.message = to_json(message, revision=self._codec.revision)
        if entry.kind != "Metrics":
            entry.name = entry.message if isinstance(entry.message, str) else next(iter(entry.message))
        fields = dict(_fields(message))
        entry.rank = _first(fields, "rank", "target_rank", "global_rank", "new_rank")
        entry.epoch = _first(fields, "epoch")
        entry.step = _first(fields, "step_count", "global_step")
        entry.fields = fields


def _decode(decode: Callable[..., Any], entry: Entry, data: memoryview) -> Any:
    """The message or record; bytes left after a value are no fault, but of note: a later revision may have sent it."""
    try:
        return decode(data, trailing="error")
    except TrailingDataError as error:
        entry.notes.append(str(error))
        return decode(data)


def _fields(message: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a message, those of a struct inside it among them."""
    for slot in dataclasses.fields(message):
        value = getattr(message, slot.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value)
        else:
            yield slot.name, value


def _first(fields: dict[str, Any], *names: str) -> Any:
    """The value of the first of these names that is there, taken out."""
    for name in names:
        if name in fields:
            return fields.pop(name)
    return None


def _fixed(size: int) -> Callable[[], Callable[[bytearray | memoryview], int | None]]:
    return lambda: lambda _: size


def _control_kind(data: memoryview) -> int:
    return _u32(data[CONTROL_HEADER - 8 :])


def _is_join(form: _Form, data: memoryview) -> bool:
    return form.name == "control" and _control_kind(data) == MsgKind.JOIN


def _u32(data: bytearray | memoryview) -> int:
    return int.from_bytes(data[:_MAGIC], "little")


def _at(offset: int, error: DecodeError) -> DecodeError:
    error.offset = offset
    return error
