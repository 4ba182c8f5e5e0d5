"""Recorded traffic in a file: frames in the order they were seen, each with its time, direction and leg.

docs/cli.md has the layout. Captures are appended to by opening their file with mode "ab", and joined by writing one
after the other: a header may stand wherever a record may.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from enum import IntEnum
from typing import BinaryIO, NamedTuple, Protocol

from .errors import BadMagicError, DecodeError, EncodeError, TruncatedError, UnknownKindError, VersionMismatchError
from .protocol import Revision, supported_revision

__all__ = ["CaptureWriter", "Direction", "Record", "Source", "read_capture"]

MAGIC = b"\x89flodl\r\n"
FORMAT = 1
CHUNK = 1 << 20

_HEADER = struct.Struct("<8sBB")  # magic, format, length of the revision's name, which follows
_RECORD = struct.Struct("<BBIQ")  # direction, lengths of leg and frame, which follow, and the time


class Direction(IntEnum):
    """Which way a frame went: UP to the controller, DOWN to the ranks."""

    UP = 0
    DOWN = 1


class Record(NamedTuple):
    """One frame of a capture.

    Attributes:
        offset: where the frame's first byte is in the file.
        revision: the name of the revision that the traffic speaks.
        time_ns: when the frame was seen, in nanoseconds since 1970.
        direction: which way it went.
        leg: the connection it was on.
        data: its bytes, without a length prefix.
    """

    offset: int
    revision: str
    time_ns: int
    direction: Direction
    leg: str
    data: bytearray

    def __repr__(self) -> str:
        way, seconds = self.direction.name.lower(), self.time_ns / 1e9
        return f"Record({len(self.data)} bytes {way} on {self.leg!r} at {seconds:.6f} s, offset {self.offset})"


class CaptureWriter:
    """Writes frames to a capture; belongs to one thread.

    Args:
        file: a binary file open for writing ("wb") or appending ("ab"); the caller closes it.
        revision: the revision that the traffic speaks.

    Raises:
        ValueError: a revision that is not supported.
    """

    def __init__(self, file: BinaryIO, *, revision: Revision | str = "0.6") -> None:
        name = supported_revision(revision).value.encode()
        self._file = file
        file.write(_HEADER.pack(MAGIC, FORMAT, len(name)) + name)

    def write(
        self, data: bytes | bytearray | memoryview, leg: str, direction: Direction, *, time_ns: int | None = None
    ) -> None:
        """Add one frame.

        Args:
            data: the whole control frame, round frame, mux record, hello or acknowledgement, without a length prefix.
            leg: the connection it was on, such as "rank 0 control"; at most 255 bytes of UTF-8.
            direction: which way it went.
            time_ns: when it was seen, in nanoseconds since 1970; None is now.

        Raises:
            EncodeError: a leg, frame or time that is too long for its field.
        """
        name = leg.encode(errors="backslashreplace")
        size = memoryview(data).nbytes
        if time_ns is None:
            time_ns = time.time_ns()
        try:
            head = _RECORD.pack(Direction(direction), len(name), size, time_ns)
        except struct.error as error:
            raise EncodeError(
                f"a record holds a leg of up to 255 bytes, a frame of up to {0xFFFFFFFF} and a u64 time, "
                f"got {len(name)}, {size} and {time_ns}"
            ) from error
        self._file.write(head + name)
        self._file.write(data)


def read_capture(file: Readable | Source) -> Iterator[Record]:
    """The frames of a capture, read as they are asked for, in any format that CaptureWriter has written.

    Args:
        file: a binary file open for reading, a pipe for instance; or a Source of one.

    Raises:
        DecodeError: BadMagicError (no capture), VersionMismatchError (of the capture's format), UnknownKindError (of
            direction), TruncatedError; ``.offset`` is the byte where the faulty header or record starts.
    """
    source = file if isinstance(file, Source) else Source(file)
    revision = None
    while source.look(1):
        start = source.offset
        try:
            if revision is None or source.look(1)[0] == MAGIC[0]:
                revision = _read_header(source)
                continue
            record = _read_record(source, revision)
        except DecodeError as error:
            error.offset = start
            raise
        yield record


def _read_record(source: Source, revision: str) -> Record:
    direction, leg_size, size, time_ns = _RECORD.unpack(source.take(_RECORD.size, "a record's header"))
    if direction not in Direction._value2member_map_:
        raise UnknownKindError(f"no record starts here: its direction would be {direction}, known are 0 and 1")
    leg = source.take(leg_size, "the name of a leg").decode(errors="backslashreplace")
    offset = source.offset
    return Record(offset, revision, time_ns, Direction(direction), leg, source.take(size, "a frame"))


def _read_header(source: Source) -> str:
    magic, version, size = _HEADER.unpack(source.take(_HEADER.size, "a capture's header"))
    if magic != MAGIC:
        raise BadMagicError(f"expected a capture's magic {MAGIC.hex()}, got {magic.hex()}")
    if version != FORMAT:
        raise VersionMismatchError(f"capture format {version}, this release reads {FORMAT}")
    return source.take(size, "the name of a revision").decode(errors="backslashreplace")


class Readable(Protocol):
    """A binary file that can give what is there without waiting for more."""

    def read1(self, size: int, /) -> bytes: ...


class Source:
    """Reads a binary file forwards, with a look at what comes next; a pipe is never waited on for more than is needed.

    Args:
        file: the file.

    Attributes:
        offset: of the next byte that ``take`` gives.
    """

    def __init__(self, file: Readable) -> None:
        self.offset = 0
        self._file = file
        self._ahead = bytearray()

    def look(self, size: int) -> bytearray:
        """What comes next; not to be changed.

        Args:
            size: the least number of bytes to give; less come only at the end of the file.
        """
        while len(self._ahead) < size:
            piece = self._file.read1(CHUNK)
            if not piece:
                break
            self._ahead += piece
        return self._ahead

    def take(self, size: int, what: str) -> bytearray:
        """The next bytes, exactly so many.

        Args:
            size: how many.
            what: what they are, for the error's message.

        Raises:
            TruncatedError: the file has less.
        """
        ahead = self.look(size)
        if len(ahead) < size:
            raise TruncatedError(f"the file ends inside {what}, after {len(ahead)} of {size} bytes")
        self.offset += size
        if len(ahead) == size:
            self._ahead = bytearray()
            return ahead
        taken = ahead[:size]
        del ahead[:size]
        return taken
