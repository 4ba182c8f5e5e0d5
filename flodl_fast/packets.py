"""Recorded network traffic: the TCP streams in a pcap or pcapng file, put together again.

The libraries for such files that are kept well either bring a whole tool kit and half a second of import, cut packets
of loopback that are longer than 64 KiB and keep silent of a file that ends early, or take the time as a float and know
one interface a file. What is needed of the two formats and of the headers below TCP is this page.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from ipaddress import ip_address
from typing import NamedTuple

from .capture import Source
from .errors import DecodeError, LimitError, PayloadError, TruncatedError

__all__ = ["Connection", "Piece", "Reader", "are_packets"]

MAX_BLOCK = 64 << 20  # bytes of a packet or block that are believed
WINDOW = 16 << 20  # bytes that wait for those before them; what is missing then was never captured

_PCAP = {  # magic: byte order and nanoseconds of a time's last digit
    b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\x3c\x4d": (">", 1),
    b"\x4d\x3c\xb2\xa1": ("<", 1),
}
_PCAPNG = b"\x0a\x0d\x0d\x0a"
_SECTION, _INTERFACE, _OLD_PACKET, _SIMPLE_PACKET, _PACKET = 0x0A0D0D0A, 1, 2, 3, 6
_TSRESOL, _TSOFFSET = 9, 14  # options of an interface

_IPV4, _IPV6 = 0x0800, 0x86DD
_VLANS = (0x8100, 0x88A8, 0x9100)
_AF_INET = 2
_AF_INET6 = (10, 24, 28, 30)  # as Linux, the BSDs and macOS number it
_TCP = 6
_HOP_BY_HOP, _ROUTING, _FRAGMENT, _AUTHENTICATION, _DESTINATION = 0, 43, 44, 51, 60
_FIN, _SYN, _RST, _ACK = 1, 2, 4, 16


class Packet(NamedTuple):
    """What a file has of one packet.

    Attributes:
        link: what its first header is, by the number that the file formats share.
        size: its bytes on the wire, of which ``data`` may be the first ones only.
    """

    time_ns: int
    link: int
    data: bytearray
    size: int


class Segment(NamedTuple):
    """A TCP segment; ``missing`` bytes of it, after ``data``, were not captured."""

    time_ns: int
    source: tuple[bytes, int]
    target: tuple[bytes, int]
    sequence: int
    flags: int
    data: memoryview
    missing: int


@dataclass(slots=True, eq=False)
class Connection:
    """A TCP connection, and what its reader has found out.

    Attributes:
        client: address and port of the side that dialled; so for the server.
        opened: whether its start was captured, which tells who dialled; else the lower port is the server's.
        leg: its name.
        rank: of the hello on it.
        framing: "mux" or "prefixed", as its frames show; empty before.
        turned: client and server are the other way round, as its frames show.
        others: it carries something else than flodl.
        last_ns: when the last segment was seen.
    """

    client: tuple[bytes, int]
    server: tuple[bytes, int]
    opened: bool
    leg: str = ""
    rank: int | None = None
    framing: str = ""
    turned: bool = False
    others: bool = False
    last_ns: int = 0
    halves: tuple[_Half, _Half] = field(default_factory=lambda: (_Half(), _Half()), repr=False)

    def __post_init__(self) -> None:
        host, port = self.client
        text = str(ip_address(host))
        self.leg = f"[{text}]:{port}" if ":" in text else f"{text}:{port}"

    def half_of(self, segment: Segment) -> _Half:
        """The direction that a segment belongs to."""
        return self.halves[segment.source != self.client]


class Piece(NamedTuple):
    """The next bytes of one direction of a connection; ``missing`` ones before ``data`` were not captured."""

    time_ns: int
    connection: Connection
    from_client: bool
    data: bytes | memoryview = b""
    missing: int = 0
    end: bool = False


def are_packets(start: bytes | bytearray) -> bool:
    """Whether a file that starts like this holds packets."""
    return bytes(start[:4]) in _PCAP or start[:4] == _PCAPNG


class Reader:
    """The pieces of all TCP streams of a file, in the order of the packets that completed them.

    Iterating raises DecodeError where the file is no such file, or cut; ``.offset`` is where.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._packets = 0
        self._skipped: Counter[str] = Counter()
        self._connections: list[Connection] = []
        self._open: dict[frozenset[tuple[bytes, int]], Connection] = {}

    def __iter__(self) -> Iterator[Piece]:
        for packet in read_packets(self._source):
            self._packets += 1
            segment = self._segment(packet)
            if segment is not None:
                yield from self._take(segment)
        for connection in self._connections:
            for half, from_client in zip(connection.halves, (True, False), strict=True):
                for data, missing, end in half.flush():
                    yield Piece(connection.last_ns, connection, from_client, data, missing, end)

    def notes(self) -> list[str]:
        """What the file holds besides, and what of it could not be read."""
        others = sum(connection.others for connection in self._connections)
        found = [f"{self._packets} packets, {len(self._connections)} TCP connections"]
        if others:
            found.append(f"{others} of the connections carry something else than flodl")
        found += [f"{count} packets passed over: {why}" for why, count in self._skipped.items()]
        repeated = sum(half.repeated for connection in self._connections for half in connection.halves)
        if repeated:
            found.append(f"{repeated} segments brought nothing new: sent or captured twice")
        lost = sum(half.lost for connection in self._connections for half in connection.halves)
        if lost:
            found.append(f"{lost} bytes are not captured: packets that were cut short, or missed")
        return found

    def _segment(self, packet: Packet) -> Segment | None:
        try:
            return _parse(packet)
        except _Passed as why:
            self._skipped[str(why)] += 1
        except (IndexError, struct.error):
            self._skipped["cut inside their headers"] += 1
        return None

    def _take(self, segment: Segment) -> Iterator[Piece]:
        ends = frozenset((segment.source, segment.target))
        connection = self._open.get(ends)
        opening = segment.flags & _SYN and not segment.flags & _ACK
        if connection is None or (opening and connection.half_of(segment).begun_otherwise(segment.sequence)):
            connection = self._open[ends] = _connection(segment)
            self._connections.append(connection)
        connection.last_ns = segment.time_ns
        from_client = segment.source == connection.client
        half = connection.half_of(segment)
        for data, missing, end in half.take(segment):
            yield Piece(segment.time_ns, connection, from_client, data, missing, end)


def _connection(segment: Segment) -> Connection:
    source, target = segment.source, segment.target
    if segment.flags & _SYN:
        client, server = (target, source) if segment.flags & _ACK else (source, target)
        return Connection(client, server, True)
    client, server = (source, target) if source[1] >= target[1] else (target, source)
    return Connection(client, server, False)


class _Half:
    """One direction of a connection: segments in any order in, the bytes in order out."""

    def __init__(self) -> None:
        self.repeated = 0
        self.lost = 0
        self._next: int | None = None  # the sequence number that comes next, counted on beyond 32 bits
        self._first: int | None = None  # the number of its SYN, also where that was not captured
        self._waiting: list[tuple[int, int, memoryview, int, bool]] = []
        self._waiting_bytes = 0
        self._count = 0
        self._ended = False

    def begun_otherwise(self, sequence: int) -> bool:
        """Whether a SYN with this number opens another connection than the one that is known."""
        return self._first is not None and self._first != sequence

    def take(self, segment: Segment) -> Iterator[tuple[bytes | memoryview, int, bool]]:
        """What is in order now: data, the bytes missing before it, and whether the stream ends there."""
        sequence = segment.sequence + bool(segment.flags & _SYN)
        if self._next is None:
            self._next = sequence
            self._first = (sequence - 1) & 0xFFFFFFFF
        start = self._next + ((sequence - self._next + 0x80000000) & 0xFFFFFFFF) - 0x80000000
        size = len(segment.data) + segment.missing
        fin = bool(segment.flags & _FIN)
        if segment.flags & _RST:
            yield from self.flush()
            if not self._ended:
                self._ended = True
                yield b"", 0, True
        elif size or fin:
            if start + size <= self._next and not (fin and start + size == self._next and not self._ended):
                self.repeated += 1
                return
            self._count += 1
            heappush(self._waiting, (start, self._count, segment.data, segment.missing, fin))
            self._waiting_bytes += size
            yield from self._in_order()
            while self._waiting_bytes > WINDOW:
                yield from self._over_the_gap()

    def flush(self) -> Iterator[tuple[bytes | memoryview, int, bool]]:
        """What still waits for bytes that will not come."""
        while self._waiting:
            yield from self._over_the_gap()

    def _over_the_gap(self) -> Iterator[tuple[bytes | memoryview, int, bool]]:
        assert self._next is not None
        gap = self._waiting[0][0] - self._next
        self._next += gap
        self.lost += gap
        yield b"", gap, False
        yield from self._in_order()

    def _in_order(self) -> Iterator[tuple[bytes | memoryview, int, bool]]:
        assert self._next is not None
        while self._waiting and self._waiting[0][0] <= self._next:
            start, _, data, missing, fin = heappop(self._waiting)
            self._waiting_bytes -= len(data) + missing
            end = start + len(data) + missing
            known = self._next - start
            if end > self._next:
                fresh = data[known:]
                missing = end - max(self._next, start + len(data))
                self._next = end
                if fresh:
                    yield fresh, 0, False
                if missing:
                    self.lost += missing
                    yield b"", missing, False
            elif data:
                self.repeated += 1
            if fin and end == self._next and not self._ended:
                self._ended = True
                yield b"", 0, True


# --------------------------------------------------------------------------------------------- headers below the data


class _Passed(Exception):
    """A packet that holds nothing for us, and why."""


def _parse(packet: Packet) -> Segment | None:
    """The TCP segment in a packet; None for one of other protocols.

    Raises:
        _Passed: TCP, but in a form that is not read.
        IndexError, struct.error: cut inside its headers.
    """
    data = memoryview(packet.data)
    family, at = _network(packet.link, data)
    if family == _IPV4:
        if data[at] >> 4 != 4:
            return None
        total, fragment, protocol = struct.unpack_from(">H2xH1xB", data, at + 2)
        if protocol != _TCP:
            return None
        if fragment & 0x3FFF:
            raise _Passed("fragments of IP packets")
        source, target = bytes(data[at + 12 : at + 16]), bytes(data[at + 16 : at + 20])
        end = at + (total or packet.size - at)  # 0 where the network card cuts it up afterwards
        size = (data[at] & 15) * 4
        if size < 20:
            raise _Passed("of IP with a header that cannot be")
        at += size
    elif family == _IPV6:
        length, following = struct.unpack_from(">HB", data, at + 4)
        source, target = bytes(data[at + 8 : at + 24]), bytes(data[at + 24 : at + 40])
        end = at + 40 + length if length else packet.size
        at += 40
        while following in (_HOP_BY_HOP, _ROUTING, _DESTINATION, _AUTHENTICATION, _FRAGMENT):
            if following == _FRAGMENT:
                if struct.unpack_from(">H", data, at + 2)[0] & 0xFFF9:
                    raise _Passed("fragments of IP packets")
                size = 8
            else:
                size = (data[at + 1] + 2) * 4 if following == _AUTHENTICATION else (data[at + 1] + 1) * 8
            following = data[at]
            at += size
        if following != _TCP:
            return None
    else:
        return None
    source_port, target_port, sequence, offset, flags = struct.unpack_from(">HHI4xBB", data, at)
    at += (offset >> 4) * 4
    # Behind a short packet Ethernet's padding may stand.
    payload = data[at:end]
    missing = max(0, end - at - len(payload))
    return Segment(packet.time_ns, (source, source_port), (target, target_port), sequence, flags, payload, missing)


def _network(link: int, data: memoryview) -> tuple[int, int]:
    """The EtherType of what is inside a link layer's header, and where that starts.

    Raises:
        _Passed: a link layer that is not read.
    """
    if link == 1:  # Ethernet
        kind, at = struct.unpack_from(">H", data, 12)[0], 14
        while kind in _VLANS:
            kind, at = struct.unpack_from(">H", data, at + 2)[0], at + 4
        return kind, at
    if link in (0, 108):  # BSD loopback: the family in the byte order of the machine, or of the network
        family = min(int.from_bytes(data[:4], "little"), int.from_bytes(data[:4], "big"))
        return (_IPV4 if family == _AF_INET else _IPV6 if family in _AF_INET6 else 0), 4
    if link == 113:  # Linux cooked
        return struct.unpack_from(">H", data, 14)[0], 16
    if link == 276:  # Linux cooked, version 2
        return struct.unpack_from(">H", data)[0], 20
    if link in (12, 14, 101, 228, 229):  # IP alone
        return {4: _IPV4, 6: _IPV6}.get(data[0] >> 4, 0), 0
    raise _Passed(f"of link type {link}, which is not read")


# ------------------------------------------------------------------------------------------------------- file formats


def read_packets(source: Source) -> Iterator[Packet]:
    """The packets of a pcap or pcapng file.

    Raises:
        DecodeError: TruncatedError, LimitError (a block of more than 64 MiB), PayloadError (a block that cannot be);
            ``.offset`` is where the faulty one starts.
    """
    read = _read_pcapng if source.look(4)[:4] == _PCAPNG else _read_pcap
    start = source.offset
    packets = read(source)
    while True:
        try:
            packet = next(packets, None)
        except DecodeError as error:
            error.offset = start
            raise
        if packet is None:
            return
        yield packet
        start = source.offset


def _read_pcap(source: Source) -> Iterator[Packet]:
    header = source.take(24, "the header of a pcap file")
    order, nanoseconds = _PCAP[bytes(header[:4])]
    link = struct.unpack_from(order + "I", header, 20)[0] & 0xFFFF  # the rest tells of frame checks
    while source.look(1):
        seconds, fraction, there, size = struct.unpack(order + "4I", source.take(16, "a packet's header"))
        _limit(there)
        data = source.take(there, "a packet")
        yield Packet(seconds * 1_000_000_000 + fraction * nanoseconds, link, data, size)


class _Interface(NamedTuple):
    """What a pcapng file says of an interface: the link, ticks of its clock a second, and seconds to add."""

    link: int
    ticks: int
    offset: int
    longest: int


def _read_pcapng(source: Source) -> Iterator[Packet]:
    order = "<"
    interfaces: list[_Interface] = []
    while source.look(1):
        if source.look(12)[:4] == _PCAPNG:
            order = "<" if source.look(12)[8:12] == b"\x4d\x3c\x2b\x1a" else ">"
            interfaces = []
        kind, size = struct.unpack(order + "2I", source.take(8, "a block's header"))
        _limit(size)
        if size < 12 or size % 4:
            raise PayloadError(f"a block of {size} bytes; they have at least 12, and a multiple of 4")
        body = source.take(size - 12, "a block")
        source.take(4, "a block")
        try:
            if kind == _INTERFACE:
                interfaces.append(_interface(order, body))
            elif kind in (_PACKET, _OLD_PACKET):
                form = "I" if kind == _PACKET else "H2x"
                number, high, low, there, length = struct.unpack_from(f"{order}{form}4I", body)
                interface = interfaces[number]
                time_ns = (high << 32 | low) * 1_000_000_000 // interface.ticks + interface.offset * 1_000_000_000
                yield Packet(time_ns, interface.link, _inside(body, 20, there), length)
            elif kind == _SIMPLE_PACKET:
                (length,) = struct.unpack_from(order + "I", body)
                there = min(length, interfaces[0].longest or length)
                yield Packet(0, interfaces[0].link, _inside(body, 4, there), length)
        except struct.error:
            raise PayloadError(f"a block of type {kind} and {size} bytes is too short for its fields") from None
        except IndexError:
            raise PayloadError("a packet of an interface that the file does not describe") from None


def _interface(order: str, body: bytearray) -> _Interface:
    link, longest = struct.unpack_from(order + "H2xI", body)
    ticks, offset, at = 1_000_000, 0, 8
    while at + 4 <= len(body):
        code, size = struct.unpack_from(order + "2H", body, at)
        value = body[at + 4 : at + 4 + size]
        if code == _TSRESOL and size == 1:
            ticks = 2 ** (value[0] & 0x7F) if value[0] & 0x80 else 10 ** value[0]
        elif code == _TSOFFSET and size == 8:
            (offset,) = struct.unpack(order + "q", value)
        at += 4 + (size + 3) // 4 * 4
    return _Interface(link, ticks, offset, longest)


def _inside(body: bytearray, start: int, size: int) -> bytearray:
    if size > len(body) - start:
        raise TruncatedError(f"a packet of {size} bytes in a block that has {len(body) - start}")
    return body[start : start + size]


def _limit(size: int) -> None:
    if size > MAX_BLOCK:
        raise LimitError(f"a packet or block of {size} bytes; more than {MAX_BLOCK} are not believed")
