"""What is in recorded bytes, frame by frame, for people and programs: ``inspect`` of the command line.

The one place of the package that looks into frames whose MAC does not hold, or cannot be checked for want of a salt:
it reads them with the same decoders as everything else and says of each how its MAC stands.
"""

from __future__ import annotations

import dataclasses
import hmac
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import capture, packets
from ._codec import family_name
from ._round import Elided, RoundMeter
from .capture import Direction, Source
from .errors import BadMagicError, DecodeError, LimitError, TrailingDataError, TruncatedError, VersionMismatchError
from .frames import Codec
from .jsonform import member_name, to_json, variant_names
from .messages import Reserved
from .protocol import (
    CONTROL_HEADER,
    GREETING,
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
    VERSIONS,
    MsgKind,
    MuxKind,
    Revision,
    RoundKind,
    supported_revision,
)
from .rounds import RoundFrame

__all__ = ["FRAMINGS", "Entry", "Inspection", "Tensor", "every_kind", "inspect_frames"]

#: How a stream can be framed; "auto" looks at the magic of each frame, and finds captures and packets.
FRAMINGS = ("auto", "control", "round", "mux", "prefixed-control", "prefixed-round")

_MAGIC = 4  # bytes of a magic
_CHANNELS = {
    "rendezvous": MAGIC_CHANNEL_RENDEZVOUS,
    "data": MAGIC_CHANNEL_DATA,
    "control": MAGIC_CHANNEL_CONTROL,
    "join": MAGIC_CHANNEL_JOIN,
}

_COMMON = MAGIC_CONTROL_FRAME.to_bytes(4, "little")[1:]  # the last three bytes of every magic
_HELLOS = ("control hello", "data hello")
_ELIDED = {"f32": "float32", "bf16": "bfloat16"}  # what NumPy calls the dtypes of tensors without data
_PREFIXED = ("control", "round")  # what a length prefix may stand before
_WAYS = {  # which way a frame of this kind always goes
    "Timing": Direction.UP,
    "Metrics": Direction.UP,
    "HostFrame": Direction.UP,
    "Control": Direction.DOWN,
    "Broadcast": Direction.DOWN,
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
        offset: where its first byte is in the file, after a length prefix; of packets, in its direction of the TCP
            stream.
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
        time_ns, direction, leg: what a capture or the packets say of it.
        leg_rank: the rank whose leg it is on, once that leg's hello was seen.
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
    leg_rank: int | None = None

    def __repr__(self) -> str:
        words = " ".join(filter(None, (self.frame, self.kind, self.name)))
        fault = "" if self.fault is None else f", {self.fault}"
        return f"Entry({words}, {self.size} bytes at {self.offset}, MAC {self.mac}{fault})"

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
) -> Inspection:
    """The frames of a file, one at a time in memory.

    Args:
        file: a capture, packets in pcap or pcapng form, the bytes of one stream, or one frame.
        salt: the session salt; None checks no MAC.
        framing: one of FRAMINGS.
        revision: the revision to read as; None is the capture's own, elsewhere what the frames tell.

    Returns:
        An iterator over Entry. It raises DecodeError where the bytes from ``.offset`` on are no frame, and where the
        next one starts cannot be known. A frame that is faulty in itself is an Entry that says so.

    Raises:
        ValueError, TypeError: as Codec, or a framing that is not known.
    """
    if framing not in FRAMINGS:
        raise ValueError(f"framing must be one of {FRAMINGS}, got {framing!r}")
    return Inspection(file, salt, framing, revision)


def every_kind() -> Iterator[Entry]:
    """An empty entry for each kind of frame that there can be, with its names."""
    yield Entry(0, 0)
    for form in _Inspector(None, None).forms.values():
        yield Entry(0, 0, form.name)
    for family in map(family_name, MsgKind):
        for name in variant_names(family):
            yield Entry(0, 0, "control", family, name)
    for kind in map(member_name, MuxKind):
        yield Entry(0, 0, "mux", kind)
    for name in variant_names("Relay"):
        yield Entry(0, 0, "mux", member_name(MuxKind.CONTROL), name)
    for kind in map(member_name, RoundKind):
        yield Entry(0, 0, "round", kind)


class Inspection:
    """The entries of a file, as an iterator, and what is known of the whole so far; ``inspect_frames`` makes it."""

    def __init__(
        self, file: capture.Readable, salt: bytes | str | None, framing: str, revision: Revision | str | None
    ) -> None:
        self._given = revision
        self._salt = salt
        self._inspector = _Inspector(salt, None if revision is None else (supported_revision(revision), "as asked"))
        self._connections: packets.Reader | None = None
        self._entries = self._read(Source(file), framing)

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    @property
    def revision(self) -> tuple[Revision, str]:
        """The revision that frames are read as at present, and what says so."""
        return self._inspector.revision

    @property
    def notes(self) -> list[str]:
        """What the packets hold beside the frames of flodl, and what of them could not be read."""
        return [] if self._connections is None else self._connections.notes()

    def _read(self, source: Source, framing: str) -> Iterator[Entry]:
        if framing == "auto" and source.look(len(capture.MAGIC)).startswith(capture.MAGIC):
            yield from self._capture(source)
        elif framing == "auto" and packets.are_packets(source.look(4)):
            yield from self._packets(source)
        else:
            yield from self._inspector.stream(source, framing)

    def _capture(self, source: Source) -> Iterator[Entry]:
        ranks: dict[str, int | None] = {}
        inspectors: dict[str, _Inspector] = {}
        for record in capture.read_capture(source):
            if self._given is None:
                if record.revision not in inspectors:
                    try:
                        spoken = supported_revision(record.revision)
                    except ValueError as error:
                        raise _at(record.offset, VersionMismatchError(str(error))) from None
                    inspectors[record.revision] = _Inspector(self._salt, (spoken, "as the capture says"))
                self._inspector = inspectors[record.revision]
            entry = self._inspector.whole(record.data, record.offset)
            entry.time_ns, entry.direction, entry.leg = record.time_ns, record.direction, record.leg
            if entry.frame in _HELLOS:
                ranks[record.leg] = entry.rank
            entry.leg_rank = ranks.get(record.leg)
            yield entry

    def _packets(self, source: Source) -> Iterator[Entry]:
        self._connections = packets.Reader(source)
        flows: dict[tuple[packets.Connection, bool], _Flow] = {}
        for piece in self._connections:
            key = (piece.connection, piece.from_client)
            if key not in flows:
                flows[key] = _Flow(self._inspector, piece.connection, piece.from_client)
            yield from flows[key].feed(piece)
        for flow in flows.values():
            yield from flow.end("the capture ends")


class _Form(NamedTuple):
    """A kind of frame.

    Attributes:
        meter: makes a function from the bytes that are there to the frame's size, None while they do not tell it.
        read: decodes the frame and fills in its entry.
        tag: where the MAC is; None if it has none.
        signed: what the MAC covers.
        announces: which of a revision's version numbers stands after its magic.
    """

    name: str
    meter: Callable[[], Callable[[bytearray | memoryview], int | None]]
    read: Callable[[Entry, memoryview], None]
    tag: slice | None = slice(-MAC_SIZE, None)
    signed: tuple[slice, ...] = (slice(-MAC_SIZE),)
    announces: str | None = None


class _Place(NamedTuple):
    """Where the next frame of a stream is: after its length prefix, if it has one."""

    form: _Form
    start: int
    end: int


class _Inspector:
    """Reads frames under one salt, and finds out which revision they speak unless it is told."""

    def __init__(self, salt: bytes | str | None, told: tuple[Revision, str] | None) -> None:
        self._candidates, self._reason = (list(Revision), "") if told is None else ([told[0]], told[1])
        self._zero = Codec(bytes(SALT_SIZE))
        self._codecs = {revision: Codec(bytes(SALT_SIZE) if salt is None else salt, revision) for revision in Revision}
        self._salted = salt is not None
        # A control frame's MAC stands after magic and version, which it does not cover; a mux record's ends the header.
        tag = slice(8, 8 + MAC_SIZE)
        control = _Form(
            "control", lambda: self._measure_control, self._control, tag, (slice(tag.stop, None),), "control"
        )
        tag = slice(MUX_HEADER - MAC_SIZE, MUX_HEADER)
        covered = (slice(tag.start), slice(tag.stop, None))
        mux = _Form("mux", lambda: self._codec.measure_record, self._mux, tag, covered)
        round_ = _Form("round", lambda: RoundMeter(self._codec).measure, self._round)
        self._named = {form.name: form for form in (control, round_, mux)}
        codec = self._codec
        self.forms = {
            MAGIC_CONTROL_FRAME: control,
            MAGIC_ROUND: round_,
            MAGIC_MUX: mux,
            MAGIC_CONTROL_HELLO: _Form(
                "control hello", lambda: self._measure_hello, self._control_hello, announces="control"
            ),
            MAGIC_CONTROL_ACK: _Form(
                "control ack", _fixed(len(codec.control_ack())), self._control_ack, announces="control"
            ),
            MAGIC_DATA_HELLO: _Form(
                "data hello", _fixed(len(codec.data_hello(0, 1))), self._data_hello, None, announces="data"
            ),
            MAGIC_DATA_ACK: _Form("data ack", _fixed(len(codec.data_ack())), self._data_ack, None, announces="data"),
        }
        for name, magic in _CHANNELS.items():
            self.forms[magic] = _Form(f"{name} channel", _fixed(_MAGIC), lambda *_: None, None)

    # -- which revision

    @property
    def revision(self) -> tuple[Revision, str]:
        """The one that frames are read as at present, and why."""
        first, *others = self._candidates
        if others:
            return first, f"{' and '.join(r.value for r in self._candidates)} look alike so far"
        return first, self._reason

    @property
    def _codec(self) -> Codec:
        return self._codecs[self._candidates[0]]

    def _narrow(self, candidates: list[Revision], reason: str) -> None:
        if candidates and len(candidates) < len(self._candidates):
            self._candidates, self._reason = candidates, reason

    def _hear(self, form: _Form, data: bytearray | memoryview) -> None:
        """Take note of the version that a frame announces, if it does (docs/wire.md §9)."""
        if form.announces is not None and len(data) >= GREETING:
            version = _u32(data[_MAGIC:])
            fitting = [r for r in self._candidates if getattr(VERSIONS[r], form.announces) == version]
            self._narrow(fitting, f"{form.announces} version {version}")

    def _decode(self, entry: Entry, decode: Callable[[Codec, str], Any], *, compare: bool = True) -> Any:
        """What the first of the possible revisions reads to the last byte; those that cannot are possible no more.

        Where none can, bytes left after a value are no fault, but of note.

        Args:
            entry: of the frame, to name it and for the note.
            decode: with a codec, and ``trailing``.
            compare: ask the later ones too, where they could differ.
        """
        found: dict[Revision, Any] = {}
        for revision in self._candidates:
            try:
                found[revision] = decode(self._codecs[revision], "error")
            except DecodeError:
                continue
            if not compare:
                found |= dict.fromkeys(self._candidates[self._candidates.index(revision) + 1 :])
                break
        if found and entry.mac != BAD:
            name = type(next(iter(found.values()))).__name__
            self._narrow(list(found), f"the layout of {'an' if name[0] in 'AEIOU' else 'a'} {name}")
        if self._candidates[0] in found:
            return found[self._candidates[0]]
        try:
            return decode(self._codec, "error")
        except TrailingDataError as error:
            entry.notes.append(str(error))
            return decode(self._codec, "ignore")

    # -- where frames start and end

    def stream(self, source: Source, framing: str) -> Iterator[Entry]:
        """The frames of a stream."""
        while source.look(1):
            start = source.offset
            try:
                place = self._await(source, framing)
            except DecodeError as error:
                raise _at(start, error) from None
            data = source.take(place.end, "a frame")
            yield self.entry(place.form, memoryview(data)[place.start :], start + place.start)

    def _await(self, source: Source, framing: str) -> _Place:
        """Where the next frame is, once all of it is there."""
        finder = Finder(self, framing)
        data = source.look(1)
        while (place := finder.find(data)) is None or place.end > len(data):
            there = len(data)
            data = source.look(there + 1 if place is None else place.end)
            if len(data) == there:
                raise TruncatedError(finder.cut(there))
        return place

    def whole(self, data: bytearray, offset: int) -> Entry:
        """The one frame that these bytes are."""
        form = self.forms.get(_u32(data))
        if form is None:
            return Entry(offset, len(data), fault=f"no frame starts with the bytes {data[:8].hex()}")
        return self.entry(form, memoryview(data), offset)

    def expected(self, framing: str) -> tuple[_Form, bool]:
        """The form of what comes next in a stream of that framing, and whether it has a length prefix."""
        return self._named[framing.removeprefix("prefixed-")], framing.startswith("prefixed-")

    def prefix(self, data: bytearray | memoryview) -> int:
        """The size that a length prefix announces."""
        size = _u32(data)
        if size > self._codec.frame_ceiling:
            raise LimitError(f"a length prefix of {size} bytes is above the limit of {self._codec.frame_ceiling}")
        return size

    def _measure_control(self, data: bytearray | memoryview) -> int | None:
        self._hear(self._named["control"], data)
        return self._codec.measure_frame(data)

    def _measure_hello(self, data: bytearray | memoryview) -> int | None:
        if len(data) < GREETING:
            return None
        self._hear(self.forms[MAGIC_CONTROL_HELLO], data)
        return VERSIONS[self._candidates[0]].hello

    # -- what a frame says

    def entry(self, form: _Form, data: memoryview, offset: int) -> Entry:
        """The frame at the start of these bytes, which may be changed."""
        entry = Entry(offset, len(data), form.name)
        try:
            size = form.meter()(data)
            if size is None or size > len(data):
                raise TruncatedError(_cut(form, size, len(data)))
            if size < len(data):
                entry.notes.append(f"{len(data) - size} extra bytes after the frame")
            entry.size = size
            self._hear(form, data)
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
        message = self._decode(entry, lambda codec, trailing: codec.decode(data, trailing=trailing))
        if isinstance(message, Reserved):
            entry.notes.append("a reserved kind, which carries no message")
        else:
            self._message(entry, message)

    def _mux(self, entry: Entry, data: memoryview) -> None:
        entry.payload = len(data) - MUX_HEADER
        kind, rank, payload = self._codec.open_record(data)
        entry.kind = member_name(kind)
        if kind is MuxKind.CONTROL:
            message = self._decode(
                entry, lambda codec, trailing: codec.decode_payload("Relay", payload, trailing=trailing)
            )
            self._message(entry, message)
            return
        if kind is MuxKind.DATA:
            entry.rank = rank
        form = self._named["control" if kind is MuxKind.DATA else "round"]
        entry.inner = self.entry(form, data[MUX_HEADER:], entry.offset + MUX_HEADER)

    def _round(self, entry: Entry, data: memoryview) -> None:
        frame = self._decode(
            entry, lambda codec, trailing: _read_round(codec, data, trailing), compare=False
        )
        entry.kind = member_name(frame.kind)
        entry.fields["weight"] = frame.weight
        entry.tensors = [_tensor(tensor) for tensor in frame.tensors]
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


class Finder:
    """Finds the next frame of one stream, asked anew as its bytes come; one for each frame."""

    def __init__(self, inspector: _Inspector, framing: str = "auto") -> None:
        self._inspector = inspector
        self._framing = framing
        self._form: _Form | None = None
        self._size: int | None = None
        self._start = 0

    def find(self, data: bytearray | memoryview) -> _Place | None:
        """Where the frame is that these bytes start with; None while they do not tell.

        Raises:
            DecodeError: no frame starts with them.
        """
        if self._form is None:
            found = self._recognise(data) if self._framing == "auto" else self._inspector.expected(self._framing)
            if found is None:
                return None
            self._form, prefixed = found
            self._start = LENGTH_PREFIX if prefixed else 0
            self._meter = self._form.meter()
        if self._size is None:
            if self._start == 0:
                self._size = self._meter(data)
            elif len(data) >= self._start:
                self._size = self._inspector.prefix(data)
            if self._size is None:
                return None
        return _Place(self._form, self._start, self._start + self._size)

    def cut(self, there: int) -> str:
        """What a stream that ends after so many bytes ends in."""
        if self._form is None or (self._start and self._size is None):
            return f"the stream ends {there} bytes into a frame"
        return _cut(self._form, self._size, there - self._start)

    def _recognise(self, data: bytearray | memoryview) -> tuple[_Form, bool] | None:
        """The form of a frame by its magic, and whether it has a length prefix."""
        # No length is a magic: that would be a frame of 4 GB.
        for prefixed in (False, True):
            start = LENGTH_PREFIX * prefixed
            head = data[start : start + _MAGIC]
            if len(head) < _MAGIC:
                return None
            form = self._inspector.forms.get(_u32(head))
            if form is not None and (not prefixed or form.name in _PREFIXED):
                return form, prefixed
        raise BadMagicError(
            f"no frame starts with the bytes {data[: LENGTH_PREFIX + _MAGIC].hex()}, with or without a length prefix"
        )


class _Flow:
    """The frames of one direction of a TCP connection, and what is missing of them."""

    def __init__(self, inspector: _Inspector, connection: packets.Connection, from_client: bool) -> None:
        self._inspector = inspector
        self._connection = connection
        self._up = from_client
        self._data = bytearray()
        self._offset = 0  # of the first byte of data in the stream
        self._holes: list[tuple[int, int]] = []  # from and to, in the stream
        self._skipped = 0  # bytes in front that belong to no frame
        self._seeking = not connection.opened
        self._known = False  # whether a frame was found
        self._other = False
        self._finder = Finder(inspector)

    def feed(self, piece: packets.Piece) -> Iterator[Entry]:
        """The frames that this piece completes."""
        if self._other:
            return
        if piece.missing > packets.WINDOW:  # too much for zeros to stand for: the frame that it began in is given up
            self._drop(len(self._data) + piece.missing)
            self._seeking, self._finder = True, Finder(self._inspector)
        elif piece.missing:
            start = self._offset + len(self._data)
            self._holes.append((start, start + piece.missing))
            self._data += bytes(piece.missing)
        self._data += piece.data
        while self._data:
            entry = self._next()
            if entry is None:
                break
            yield self._placed(entry, piece.time_ns)
        if piece.end:
            yield from self.end("the connection ends", piece.time_ns, fault=True)

    def end(self, why: str, time_ns: int | None = None, *, fault: bool = False) -> Iterator[Entry]:
        """What is left that is no whole frame."""
        if not self._other and self._known and self._data:
            entry = Entry(self._offset, len(self._data))
            text = f"{why} inside it: {self._finder.cut(len(self._data))}"
            if fault:
                entry.fault = text
            else:
                entry.notes.append(text)
            yield self._placed(entry, time_ns)
        self._other = True

    def _next(self) -> Entry | None:
        if self._seeking and not self._seek():
            return None
        try:
            place = self._finder.find(self._data)
        except DecodeError as error:
            if not self._known:
                self._other = True
                self._connection.others = True
                self._data.clear()
                return None
            self._seeking = True
            entry = Entry(self._offset, len(self._data), fault=str(error))
            in_hole = any(begin < self._offset + GREETING for begin, _ in self._holes)
            self._drop(1)
            return self._next() if in_hole else entry
        if place is None or place.end > len(self._data):
            return None
        self._known = True
        start, size = self._offset + place.start, place.end - place.start
        lost = sum(max(0, min(end, start + size) - max(begin, start)) for begin, end in self._holes)
        if lost:
            entry = Entry(start, size, place.form.name, mac=UNCHECKED, notes=[f"{lost} bytes of it are not captured"])
        else:
            entry = self._inspector.entry(place.form, memoryview(self._data[place.start : place.end]), start)
        if self._skipped:
            entry.notes.append(f"{self._skipped} bytes before it are no whole frame")
            self._skipped = 0
        self._take(place.end)
        self._finder = Finder(self._inspector)
        return entry

    def _seek(self) -> bool:
        """Drop what comes before the next bytes that look like a frame's start."""
        at = -1
        while (at := self._data.find(_COMMON, at + 1)) >= 0:
            if at == 0 or _u32(self._data[at - 1 : at + 3]) not in self._inspector.forms:
                continue
            start = at - 1
            form = self._inspector.forms[_u32(self._data[start : start + _MAGIC])]
            if self._connection.framing == "mux" and form.name != "mux":
                continue  # the frame inside a record
            for prefix in (LENGTH_PREFIX, 0):
                finder = Finder(self._inspector)
                if start < prefix or (prefix == 0 and self._connection.framing == "prefixed"):
                    continue
                try:
                    place = finder.find(self._data[start - prefix : start + MUX_HEADER])
                except DecodeError:
                    continue
                if place is not None and (prefix == 0 or self._fits(place, start)):
                    self._drop(start - prefix)
                    self._seeking = False
                    self._finder = Finder(self._inspector)
                    return True
        self._drop(max(0, len(self._data) - LENGTH_PREFIX - GREETING - CONTROL_HEADER))
        return False

    def _fits(self, place: _Place, start: int) -> bool:
        """Whether the length prefix before a frame is its own."""
        if place.start == 0:
            return False
        with suppress(DecodeError):
            return place.form.meter()(self._data[start : start + CONTROL_HEADER]) in (None, place.end - place.start)
        return False

    def _drop(self, count: int) -> None:
        self._skipped += count
        self._take(count)

    def _take(self, count: int) -> None:
        del self._data[:count]
        self._offset += count
        self._holes = [hole for hole in self._holes if hole[1] > self._offset]

    def _placed(self, entry: Entry, time_ns: int | None) -> Entry:
        connection = self._connection
        if not connection.opened and entry.kind in _WAYS:
            connection.turned = _WAYS[entry.kind] is not (Direction.UP if self._up else Direction.DOWN)
        entry.time_ns = connection.last_ns if time_ns is None else time_ns
        entry.direction = Direction.UP if self._up is not connection.turned else Direction.DOWN
        if entry.frame in _HELLOS:
            connection.rank = entry.rank
            connection.framing = "prefixed"
            connection.leg = f"rank {entry.rank} {entry.frame.removesuffix(' hello')}"
        elif entry.frame.endswith(" channel"):
            connection.leg = entry.frame.removesuffix(" channel")
        elif entry.name == "Hello" and isinstance(entry.fields.get("host"), str):
            connection.leg = f"{entry.fields['host']} {connection.leg}"
        if entry.frame == "mux":
            connection.framing = "mux"
        entry.leg, entry.leg_rank = connection.leg, connection.rank
        return entry


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


def _read_round(codec: Codec, data: memoryview, trailing: str) -> RoundFrame:
    return codec.decode_round(data, copy=False, elided="keep", trailing=trailing)


def _tensor(tensor: Any) -> Tensor:
    if isinstance(tensor, Elided):
        return Tensor(_ELIDED[tensor.dtype], tensor.shape, 0)
    return Tensor(tensor.dtype.name, tensor.shape, tensor.nbytes)


def _fixed(size: int) -> Callable[[], Callable[[bytearray | memoryview], int | None]]:
    return lambda: lambda _: size


def _cut(form: _Form, size: int | None, there: int) -> str:
    return f"a {form.name} frame{'' if size is None else f' of {size} bytes'} ends after {there}"


def _control_kind(data: memoryview) -> int:
    return _u32(data[CONTROL_HEADER - 8 :])


def _is_join(form: _Form, data: memoryview) -> bool:
    return form.name == "control" and _control_kind(data) == MsgKind.JOIN


def _u32(data: bytearray | memoryview) -> int:
    return int.from_bytes(data[:_MAGIC], "little")


def _at(offset: int, error: DecodeError) -> DecodeError:
    error.offset = offset
    return error
