"""What the blocking and the asyncio channels share: deadlines, handshakes, framing, rounds; no I/O (docs/wire.md §7).

A conversation is a generator of steps, each bytes to send or a view to fill, which either kind of channel carries out.
"""

from __future__ import annotations

import ipaddress
import math
import os
import struct
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, Union
from weakref import ref

import ml_dtypes
import numpy as np

from . import protocol
from ._round import TensorLayout, arrays_of
from .errors import (
    ChannelClosed,
    ChannelError,
    EncodeError,
    FlodlError,
    HandshakeError,
    LimitError,
    TensorError,
    TruncatedError,
)
from .frames import Codec, MuxRecord
from .messages import Message, RelayDeclareDead, RelayHello, RelayHelloAck, RelayMsg
from .protocol import LENGTH_PREFIX, MUX_HEADER, MuxKind, Revision, RoundKind, too_long
from .rounds import Elided, RoundFrame
from .stream import FrameReader, FrameWriter

__all__ = ["Deadlines", "scaled", "timeout_scale"]

T = TypeVar("T")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
READ_SIZE = 1 << 18  # bytes asked of a socket at once where frames are small
GROWTH = 64 << 20  # bytes of a frame that are made room for before any has come

# -------------------------------------------------------------------------------------------------------- deadlines


def timeout_scale() -> float:
    """The factor that FLODL_NET_TIMEOUT_SCALE sets: a finite number from 0.1 on, else 1.0 with a warning."""
    raw = os.environ.get("FLODL_NET_TIMEOUT_SCALE")
    if raw is None:
        return 1.0
    try:
        scale = math.nan if "_" in raw else float(raw)  # Python alone reads 1_0 as a number.
    except ValueError:
        scale = math.nan
    if math.isfinite(scale) and scale >= 0.1:
        return scale
    warnings.warn(f"FLODL_NET_TIMEOUT_SCALE={raw!r} is not a number of at least 0.1; using 1.0", stacklevel=2)
    return 1.0


def scaled(base: float) -> int:
    """A deadline's seconds, or a count of attempts, scaled: rounded up and at least 1."""
    return max(1, math.ceil(base * timeout_scale()))


def _scaled(base: float) -> Any:
    return field(default_factory=lambda: scaled(base))


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long channels wait, in seconds; the defaults are the crate's.

    Those marked * are scaled by the environment's FLODL_NET_TIMEOUT_SCALE as it is when the object is made.

    Attributes:
        attempts: * how often a dial is tried.
        pause: between two of them.
        first_bytes: * for a dialler to say which channel it wants.
        handshake: for the next bytes of a handshake, and for one attempt at a dial.
        write_stall: * for a peer that takes no byte.
        reply: * for each read of a reduced frame.
        starvation: for the next byte of a frame that has begun.
        liveness: * for any control frame, where ``ControlChannel.recv`` is asked to watch.
    """

    attempts: int = _scaled(protocol.CONNECT_ATTEMPTS)
    pause: float = protocol.CONNECT_PAUSE
    first_bytes: float = _scaled(protocol.FIRST_BYTES)
    handshake: float = protocol.HANDSHAKE
    write_stall: float = _scaled(protocol.WRITE_STALL)
    reply: float = _scaled(protocol.REDUCE_REPLY)
    starvation: float = protocol.STARVATION
    liveness: float = _scaled(protocol.LIVENESS)


# ------------------------------------------------------------------------------------------------------------ steps


class Send(NamedTuple):
    """Send all of these bytes."""

    data: Any


class Fill(NamedTuple):
    """Fill the view with the bytes that come.

    Attributes:
        wait: the longest silence in seconds, None for no limit.
        at: how many bytes of the frame came before.
        poll: silence is the caller's to judge, and harmless.
    """

    view: Any
    wait: float | None
    at: int = 0
    poll: bool = False

    def late(self, got: int) -> Exception:
        """What to raise where ``wait`` has passed, with so many bytes of the view there."""
        return Elapsed("no frame came in time") if self.poll else silent(self.wait, self.at + got)

    def ended(self, got: int) -> ChannelError:
        """What to raise where the peer ends the stream, with so many bytes of the view there."""
        return ended(self.at + got)


Steps = Generator[Union[Send, Fill], None, T]


def send(data: Any) -> Steps[None]:
    """The conversation that sends these bytes."""
    yield Send(data)


# ----------------------------------------------------------------------------------------------------------- errors


class Elapsed(TimeoutError):
    """A wait of the caller's has passed and nothing is lost; a class of its own, for signal handlers raise its base."""


def silent(wait: float | None, at: int) -> ChannelError:
    """The peer has sent nothing for so long, so many bytes into a frame."""
    return ChannelError(f"the peer has sent nothing for {wait} s" + (f", {at} bytes into a frame" if at else ""))


def ended(at: int) -> ChannelError:
    """The peer ends the stream, so many bytes into a frame."""
    if not at:
        return ChannelClosed("the peer has closed the channel")
    error = ChannelError(f"the peer has closed the channel {at} bytes into a frame")
    error.__cause__ = TruncatedError(f"the stream ends {at} bytes into a frame")
    return error


def stalled(deadlines: Deadlines) -> ChannelError:
    """The peer takes nothing."""
    return ChannelError(f"the peer has taken nothing for {deadlines.write_stall} s")


def _closed(reason: FlodlError) -> ChannelClosed:
    """What later calls raise on a channel that an error, or its owner, has closed."""
    return ChannelClosed(f"the channel is closed: {reason}")


def check_address(address: object) -> None:
    """Refuse what is no address before anything is dialled.

    Raises:
        TypeError: it is not a host and a port.
    """
    match address:
        case (str(), _):
            return
    raise TypeError(f"expected a (host, port) pair or a socket to connect to, got {address!r}")


def no_answer(address: tuple[str, int], deadlines: Deadlines, error: Exception) -> HandshakeError:
    """Nobody takes the dial."""
    return HandshakeError(f"{address[0]}:{address[1]} did not answer in {deadlines.attempts} attempts: {error}")


def handshake_failed(error: FlodlError) -> HandshakeError:
    """The handshake ends with this error."""
    # It hangs up, or where revisions differ waits for bytes that do not come.
    deaf = type(error) in (ChannelError, ChannelClosed)
    hint = "; a peer does so where salt, rank, world or revision differ" if deaf else ""
    return HandshakeError(f"the handshake failed: {error}{hint}")


# ---------------------------------------------------------------------------------------------------- public peers

# What the crate takes for private: loopback, RFC 1918, link-local, RFC 6598 where overlays live, and RFC 4193.
_PRIVATE = [
    ipaddress.ip_network(network)
    for network in (
        "127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10",
        "::1/128", "fe80::/10", "fc00::/7",
    )
]  # fmt: skip
_warned: set[str] = set()


def is_private(host: str) -> bool:
    """Whether an IP address belongs to this machine or to a private network."""
    address: Any = ipaddress.ip_address(host)
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address.version == network.version and address in network for network in _PRIVATE)


def warn_of_public(peer: Any) -> None:
    """Warn, once for each host, of a peer whose address is public: all that goes there can be read on the way.

    Args:
        peer: as ``socket.getpeername`` gives it; what is no IP address is left alone.
    """
    if not isinstance(peer, tuple) or peer[0] in _warned or is_private(peer[0]):
        return
    _warned.add(peer[0])
    warnings.warn(
        f"flodl peer {peer[0]} is outside any private network, and the wire is not encrypted: whoever sees the traffic "
        "reads parameters and metrics; keep it in a private network or a tunnel (docs/security.md)",
        stacklevel=2,
    )


# ------------------------------------------------------------------------------------------------- links, channels


class Link(ABC):
    """The life of a connection: open until the first reason to end it, which later calls give.

    Args:
        deadlines: the Deadlines in use.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self.deadlines = deadlines
        self._reason: FlodlError | None = None
        self._first: ref[FlodlError]

    @property
    def closed(self) -> bool:
        return self._reason is not None

    @contextmanager
    def guard(self, *harmless: type[BaseException]) -> Iterator[None]:
        """Close where what happens inside leaves the stream in the middle of a frame or a round.

        A wait that has passed between frames does not, nor does a TensorError, nor what is named harmless.
        """
        passes: tuple[type[BaseException], ...] = (Elapsed, TensorError, *harmless)
        if self._reason is not None:
            raise _closed(self._reason) from self._reason
        try:
            yield
        except passes:
            raise
        except FlodlError as error:
            if (before := self.shut(error)) is not None:
                raise _closed(before) from before
            raise
        except BaseException:
            self.shut(ChannelError("a call was interrupted"))
            raise

    def shut(self, reason: FlodlError) -> FlodlError | None:
        """End the stream, which wakes whoever waits; the reason that has ended it before, if another one has."""
        if self._reason is None:
            # A copy, which is never raised: a traceback would hold on to its frames, these to the channel and to all of
            # its memory, until the garbage collector comes by.
            self._first, self._reason = ref(reason), copy(reason)
            self._end()
        return None if self._first() is reason else self._reason

    @abstractmethod
    def _end(self) -> None: ...

    @abstractmethod
    def fileno(self) -> int: ...

    @abstractmethod
    def peer(self) -> Any:
        """The other end's address, as ``socket.getpeername`` gives it; None where it has none any more."""


class Channel:
    """What all channels share.

    Attributes:
        codec: the Codec in use.
        ranks: the ranks at the other end of a served channel, ascending; at a rank's own end just that rank. Empty on
            a JoinChannel.
        world: the number of ranks of the cluster; 0 on a JoinChannel.
        host: the host's name on a direct channel, from either end; None through a relay.
        model_sigs: on a control channel of 0.8, what its ranks tell of their models: a signature each, in the order of
            ``ranks``, or none of a relay that tells none. Empty on other channels.
        deadlines: the Deadlines in use.
    """

    ranks: tuple[int, ...] = ()
    world: int = 0
    host: str | None = None
    model_sigs: tuple[bytes, ...] = ()

    def __init__(self, link: Link, codec: Codec, line: Line | None) -> None:
        self._link = link
        self.codec = codec
        self.deadlines = link.deadlines
        if line is not None:
            self.ranks, self.world, self.host = line.ranks, line.world, line.host
            self.model_sigs = line.model_sigs

    def __repr__(self) -> str:
        word = "rank" if len(self.ranks) == 1 else "ranks"
        whose = f"{word} {', '.join(map(str, self.ranks))} of {self.world}, " if self.ranks else ""
        way = f"host {self.host!r}, " if self.host is not None else ""
        state = "closed" if self.closed else "open"
        return f"{type(self).__name__}({whose}{way}revision {self.codec.revision.value}, {state})"

    @property
    def closed(self) -> bool:
        """Whether the channel is closed, by ``close`` or by an error."""
        return self._link.closed

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed.

        Not readable does not mean that ``recv`` has nothing: it may hold frames that it has read already.
        """
        return self._link.fileno()


# ------------------------------------------------------------------------------------------------------- handshakes


@dataclass(frozen=True, slots=True)
class Line:
    """Whose frames a channel carries, and from which end it is seen.

    Attributes:
        ranks: ascending; from a rank's end just that rank.
        world: the number of ranks of the cluster.
        host: the host's name where frames go as mux records; None where each has a length prefix.
        served: seen from the controller's end.
        model_sigs: as Channel's.
    """

    ranks: tuple[int, ...]
    world: int
    host: str | None = None
    served: bool = False
    model_sigs: tuple[bytes, ...] = ()

    @classmethod
    def of_rank(cls, rank: int, world: int, host: str | None, model_sigs: Iterable[bytes] = ()) -> Line:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not in a world of {world}")
        return cls((rank,), world, host, model_sigs=tuple(model_sigs))


def dial_control(codec: Codec, line: Line, wait: float) -> Steps[None]:
    """A rank's side of a control handshake."""
    if line.host is not None:
        hello = RelayHello(line.host, list(line.ranks), list(line.model_sigs))
        return (yield from _dial_controller(codec, protocol.MAGIC_CHANNEL_CONTROL, hello, wait))
    yield Send(codec.control_hello(line.ranks[0], line.world, *line.model_sigs))
    codec.check_control_ack((yield from _take(len(codec.control_ack()), wait)))


def dial_data(codec: Codec, line: Line, wait: float) -> Steps[None]:
    """A rank's side of a data handshake."""
    if line.host is not None:
        hello = RelayHello(line.host, list(line.ranks))
        return (yield from _dial_controller(codec, protocol.MAGIC_CHANNEL_DATA, hello, wait))
    yield Send(codec.data_hello(line.ranks[0], line.world))
    codec.check_data_ack((yield from _take(len(codec.data_ack()), wait)))


def dial_join() -> Steps[None]:
    """An agent's first bytes; the window answers its JoinHello."""
    yield Send(_magic(protocol.MAGIC_CHANNEL_JOIN))


def serve(codec: Codec, world: int, deadlines: Deadlines) -> Steps[tuple[int, Line | None]]:
    """The controller's side of whatever handshake comes: the channel's magic, and its line, None on a join channel."""
    first = yield from _take(len(_magic(0)), deadlines.first_bytes)
    magic = int.from_bytes(first, "little")
    wait = deadlines.handshake
    if magic == protocol.MAGIC_CHANNEL_JOIN:
        return magic, None
    if magic == protocol.MAGIC_CONTROL_HELLO:
        head = first + (yield from _take(protocol.GREETING - len(first), wait))
        # Its version comes before its size: bytes that another revision does not send are not waited for.
        hello = head + (yield from _take(codec.measure_control_hello(head) - len(head), wait))
        rank, model_sig = codec.check_control_hello(hello, world)
        line = _served([rank], world, model_sigs=() if model_sig is None else (model_sig,))
        yield Send(codec.control_ack())
        return protocol.MAGIC_CHANNEL_CONTROL, line
    if magic == protocol.MAGIC_DATA_HELLO:
        hello = first + (yield from _take(len(codec.data_hello(0, 1)) - len(first), wait))
        line = _served([codec.check_data_hello(hello, world)], world)
        yield Send(codec.data_ack())
        return protocol.MAGIC_CHANNEL_DATA, line
    if magic in (protocol.MAGIC_CHANNEL_CONTROL, protocol.MAGIC_CHANNEL_DATA):
        record = yield from _take_record(codec, wait)
        if not isinstance(record.payload, RelayHello):
            raise HandshakeError(f"expected a RelayHello, got {record}")
        told = record.payload
        line = _served(told.ranks, world, told.host, tuple(told.model_sigs))
        yield Send(codec.encode_mux(MuxRecord(MuxKind.CONTROL, payload=RelayHelloAck())))
        return magic, line
    raise HandshakeError(f"the first bytes {first.hex()} ask for no channel that is served here")


def _dial_controller(codec: Codec, magic: int, hello: RelayHello, wait: float) -> Steps[None]:
    yield Send(_magic(magic) + codec.encode_mux(MuxRecord(MuxKind.CONTROL, payload=hello)))
    record = yield from _take_record(codec, wait)
    if not isinstance(record.payload, RelayHelloAck):
        raise HandshakeError(f"expected a RelayHelloAck, got {record}")


def _served(
    ranks: Sequence[int], world: int, host: str | None = None, model_sigs: tuple[bytes, ...] = ()
) -> Line:
    if not ranks or sorted(set(ranks)) != list(ranks) or ranks[-1] >= world:
        raise HandshakeError(f"ranks {list(ranks)} are not ascending in a world of {world}")
    if len(model_sigs) not in (0, len(ranks)):
        raise HandshakeError(f"ranks {list(ranks)} come with {len(model_sigs)} model signatures")
    return Line(tuple(ranks), world, host, served=True, model_sigs=model_sigs)


def _magic(magic: int) -> bytes:
    return magic.to_bytes(4, "little")


def _take(size: int, wait: float) -> Steps[bytes]:
    data = bytearray(size)
    yield Fill(memoryview(data), wait)
    return bytes(data)


def _take_record(codec: Codec, wait: float) -> Steps[MuxRecord]:
    head = yield from _take(MUX_HEADER, wait)
    size = _payload_size(codec, head)
    if size > codec.max_payload:
        raise LimitError(f"a relay message of {size} bytes is above the limit of {codec.max_payload} (max_payload)")
    return codec.decode_mux(head + (yield from _take(size, wait)))


def _payload_size(codec: Codec, head: Any) -> int:
    """The size of a mux record's payload, by its whole header."""
    size = codec.measure_record(head)
    assert size is not None
    return size - MUX_HEADER


# --------------------------------------------------------------------------------------------------------- messages


class Messages:
    """The framing of a message channel: bytes in any pieces to messages, and back.

    Args:
        codec: the Codec.
        line: whose frames; None for the bare frames of a join channel.
    """

    def __init__(self, codec: Codec, line: Line | None) -> None:
        self._ranks = () if line is None else line.ranks
        self._served = line is not None and line.served
        self._prefixed = line is not None and line.host is None
        self._mux = line is not None and line.host is not None
        self._use(codec)
        self._heard = self._moved = time.monotonic()

    def _use(self, codec: Codec, rest: bytes = b"") -> None:
        self._codec = codec
        self._writer = FrameWriter(codec, "control", prefixed=self._prefixed)
        self._reader: FrameReader[Any] = FrameReader(codec, "mux" if self._mux else "control", prefixed=self._prefixed)
        self._reader.feed(rest)

    def rekey(self, codec: Codec) -> None:
        """Go on with another Codec after the messages taken so far."""
        self._use(codec, self._reader.rest)

    def pack(self, message: Message, rank: int | None = None) -> bytes | bytearray:
        """The bytes that carry a message, to or from one of the line's ranks."""
        frame = self._writer.write(message)
        if not self._ranks:
            return frame
        if rank is None and len(self._ranks) == 1:
            rank = self._ranks[0]
        if rank is None or rank not in self._ranks:
            raise ValueError(f"rank {rank} is not one of {list(self._ranks)}, which this channel serves")
        return self._codec.seal_record(MuxKind.DATA, rank, frame) if self._mux else frame

    def feed(self, data: Any) -> None:
        """Add bytes that came."""
        self._moved = time.monotonic()
        self._reader.feed(data)

    def next(self) -> Message | RelayMsg | None:
        """The next message that is complete; a relay's own message only where the line is served."""
        while (item := self._reader.next()) is not None:
            message: Message | RelayMsg | None = self._unpack(item) if self._mux else item
            if message is not None:
                self._heard = time.monotonic()
                return message
        return None

    def _unpack(self, record: MuxRecord) -> Message | RelayMsg | None:
        payload: Any = record.payload
        if record.kind is MuxKind.DATA:
            # The payload says whose it is; towards a rank the tag says for whom.
            return self._codec.decode(payload) if self._served or record.rank in self._ranks else None
        if record.kind is MuxKind.CONTROL:
            message: RelayMsg = payload
            return message if self._served else None
        raise ChannelError(f"a {record.kind.name} record has no place on a control channel")

    def patience(
        self, until: float | None, liveness: float | None, starvation: float
    ) -> tuple[float | None, Exception]:
        """How long to wait for bytes, None for no limit, and what to raise if none come.

        Args:
            until: when the caller wants to wait no longer, on the monotonic clock.
            liveness: the longest silence after a message.
            starvation: the longest silence inside a frame.
        """
        ends: list[tuple[float, Exception]] = []
        if until is not None:
            ends.append((until, Elapsed("no message came in time")))
        if liveness is not None:
            ends.append((self._heard + liveness, ChannelError(f"the peer has sent no message for {liveness} s")))
        if self._reader.pending:
            ends.append((self._moved + starvation, silent(starvation, self._reader.pending)))
        if not ends:
            return None, Elapsed()
        when, error = min(ends, key=lambda end: end[0])
        return max(0.0, when - time.monotonic()), error

    def ended(self) -> ChannelError:
        """What to raise where the peer ends the stream."""
        return ended(self._reader.pending)


# ----------------------------------------------------------------------------------------------------------- rounds


class _Scratch:
    """The bytes of one frame, kept from round to round."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    @property
    def size(self) -> int:
        return self._bytes.size

    def view(self, size: int, keep: int = 0) -> memoryview:
        """So many bytes, of which so many are kept if the memory must grow."""
        if size > self._bytes.size:
            grown = np.empty(size, np.uint8)
            grown[:keep] = self._bytes[:keep]
            self._bytes = grown
        return self._bytes.data[:size]


class Rounds:
    """The framing of a data channel: arrays to the bytes of a frame, and back.

    A frame starts at byte MUX_HEADER of its scratch, right behind its length prefix or its record's header. From a
    rank's end frames go and come in turn and share one scratch.

    Attributes:
        begun: whether the first byte has come of the frame that ``receive`` waits for.
    """

    def __init__(self, codec: Codec, line: Line) -> None:
        self.begun = False
        self._codec = codec
        self._line = line
        self._mux = line.host is not None
        self._sent, self._expected = MuxKind.HOST_FRAME, MuxKind.BROADCAST
        self._out = self._in = _Scratch()
        if line.served:
            self._sent, self._expected = self._expected, self._sent
            self._out = _Scratch()
        self._record = self._expected if self._mux else None
        self._came = memoryview(b"")  # a frame, or the record around it
        # A reply with bytes after its frame: 0.6 ignores them, and so does whoever serves (docs/wire.md §6).
        self._trailing = "ignore" if line.served or codec.revision < Revision.V0_7 else "error"
        self._elides = not line.served and codec.revision >= protocol.ELISION_SINCE
        self._layouts: dict[Any, TensorLayout] = {}  # rounds of parameters, buffers, counts, with data or without
        self._asked: tuple[TensorLayout, RoundKind, Sequence[Any], str | None] | None = None

    def free(self) -> None:
        """Let go of the memory, for the channel is closed: its error's traceback may keep the rest of it for long."""
        self._in = self._out = _Scratch()
        self._came = memoryview(b"")

    def ask(
        self,
        arrays: Iterable[Any],
        kind: RoundKind,
        weight: float,
        out: Iterable[Any] | None,
        scale: float | None,
        wire: str | None,
    ) -> memoryview:
        """The bytes that ask for a round, once ``out`` is known to fit the reply."""
        arrays = arrays_of(arrays, True)
        if out is not None:
            _check_targets(arrays, arrays_of(out), wire)
        if scale == 0 and self._elides:
            arrays = [Elided(array.shape, _sent_dtype(array, wire)) for array in arrays]
        layout, request = self._pack(arrays, kind, weight, scale, wire)
        self._asked = layout, RoundKind(kind), arrays, wire
        return request

    def pack(self, arrays: Iterable[Any], kind: RoundKind, weight: float) -> memoryview:
        """The bytes that carry a round frame."""
        return self._pack(arrays_of(arrays, True), kind, weight, None, None)[1]

    def _pack(
        self, arrays: Sequence[Any], kind: RoundKind, weight: float, scale: float | None, wire: str | None
    ) -> tuple[TensorLayout, memoryview]:
        key = len(arrays), wire, any(isinstance(array, Elided) for array in arrays)
        layout = self._layouts.get(key) or TensorLayout.of(arrays, wire=wire)
        try:
            size = self._encode(layout, arrays, kind, weight, scale)
        except TensorError:  # Other shapes than the last such round.
            layout = TensorLayout.of(arrays, wire=wire)
            size = self._encode(layout, arrays, kind, weight, scale)
        self._layouts[key] = layout
        whole = self._out.view(MUX_HEADER + size)
        if self._mux:
            return layout, whole
        struct.pack_into("<I", whole, MUX_HEADER - LENGTH_PREFIX, size)
        return layout, whole[MUX_HEADER - LENGTH_PREFIX :]

    def _encode(
        self, layout: TensorLayout, arrays: Sequence[Any], kind: RoundKind, weight: float, scale: float | None
    ) -> int:
        size, limit = layout.frame_size, min(self._codec.frame_ceiling, protocol.MAX_PREFIX)
        if size > limit:
            raise EncodeError(f"a round frame of {size} bytes is above the limit of {limit} (frame_ceiling)")
        whole = self._out.view(MUX_HEADER + size)
        if self._mux:
            layout.encode_record(self._codec, arrays, kind, weight, self._sent, whole, scale=scale)
        else:
            layout.encode(self._codec, arrays, kind, weight, out=whole[MUX_HEADER:], scale=scale)
        return size

    def tell(self, message: RelayMsg) -> bytes:
        """The bytes that carry a relay message; none where frames have length prefixes."""
        return self._codec.encode_mux(MuxRecord(MuxKind.CONTROL, payload=message)) if self._mux else b""

    def exchange(self, request: memoryview, wait: float) -> Steps[None]:
        """One round: the request, and its reply into the scratch."""
        yield Send(request)
        yield from self.receive(wait, wait)

    def receive(self, wait: float | None, rest: float, *, poll: bool = False) -> Steps[RelayMsg | None]:
        """Take the next frame into the scratch; or return what the relay of a served line says.

        Args:
            wait: the longest silence before the frame, None for no limit.
            rest: the longest silence inside it.
            poll: silence before the frame is the caller's to judge.
        """
        head = MUX_HEADER if self._mux else LENGTH_PREFIX
        while True:
            self.begun = False
            view = self._in.view(MUX_HEADER)[MUX_HEADER - head :]
            yield Fill(view[:1], wait, poll=poll)
            self.begun = True
            yield Fill(view[1:], rest, at=1)
            end = MUX_HEADER + self._measure(view)
            got = MUX_HEADER
            while got < end:
                upto = min(end, max(self._in.size, 2 * got, GROWTH))
                yield Fill(self._in.view(upto, keep=got)[got:upto], rest, at=got - MUX_HEADER + head)
                got = upto
            self._came = self._in.view(end)[0 if self._mux else MUX_HEADER :]
            if not self._mux or self._came[_KIND] == self._expected:
                return None  # the decoder checks the record's MAC along with the frame's
            kind, _, payload = self._codec.open_record(self._came)
            if kind is not MuxKind.CONTROL:
                raise ChannelError(f"a {kind.name} record has no place on this data channel")
            message = self._codec.decode_payload("Relay", payload)
            if self._line.served:
                return message
            if isinstance(message, RelayDeclareDead) and message.rank in self._line.ranks:
                raise ChannelError(f"the controller has declared rank {message.rank} dead")

    def _measure(self, head: memoryview) -> int:
        if self._mux:
            return _payload_size(self._codec, head)
        size = int.from_bytes(head, "little")
        if size > self._codec.frame_ceiling:
            raise LimitError(too_long(size, self._codec.frame_ceiling))
        return size

    def take(self) -> RoundFrame:
        """The frame that was received, in new arrays; what it elides stays so."""
        return self._codec.decode_round(self._came, elided="keep", record=self._record)

    def adopt(self, out: Sequence[Any] | None, view: bool) -> RoundFrame:
        """The frame that was received, as the reply to the one that was asked for.

        Its tensors are ``out``; if that is None, new arrays, or with ``view`` read-only ones on the scratch.
        """
        assert self._asked is not None
        layout, asked, arrays, wire = self._asked
        self._asked = None  # the caller's arrays are not for the channel to keep
        # What the header says is believed only once a decoder has checked the MAC.
        head = self._came[MUX_HEADER if self._mux else 0 :][: _HEAD.size]
        kind, weight = _HEAD.unpack(head) if len(head) == _HEAD.size else (asked, 1.0)
        options: dict[str, Any] = {"record": self._record, "trailing": self._trailing}
        keep = out is not None and kind == RoundKind.MODEL and weight == 0
        targets: Sequence[Any] = out or ()
        if out is None and not view:
            targets = [np.empty(array.shape, _dtype(array)) for array in arrays]
        if kind != asked:
            self._codec.decode_round(self._came, copy=False, elided="keep", **options)
            raise TensorError(f"a {asked.name} round was asked for, the reply is {RoundKind(kind).name}")
        if view or keep:
            came = self._codec.decode_round(self._came, copy=False, **options).tensors
            _check_reply(came, arrays, wire)
            targets = came if view else targets
        else:
            layout.decode_into(self._codec, self._came, targets, **options)
        return RoundFrame(targets, asked, weight)

    def broadcast(self, arrays: Iterable[Any], root: int) -> Sequence[Any]:
        """What this rank gives to a broadcast of the root's arrays."""
        if not 0 <= root < self._line.world:
            raise ValueError(f"root {root} is not in a world of {self._line.world}")
        arrays = arrays_of(arrays)
        if root in self._line.ranks:
            return arrays
        if self._elides:
            return [Elided(array.shape, _sent_dtype(array, None)) for array in arrays]
        return [np.broadcast_to(np.zeros((), array.dtype), array.shape) for array in arrays]

    def gather(self, value: float) -> np.ndarray:
        """What this rank gives to a gather."""
        slots = np.zeros(self._line.world, np.float32)
        slots[self._line.ranks[0]] = value
        return slots


_HEAD = struct.Struct("<8xBd")  # a round frame's kind and weight
_KIND = 8  # where a mux record has its kind


def _dtype(array: Any) -> Any:
    """The dtype of an array's values, or of what stands for them."""
    return (BFLOAT16 if array.dtype == "bf16" else np.float32) if isinstance(array, Elided) else array.dtype


def _sent_dtype(array: Any, wire: str | None) -> str:
    """The dtype that an array travels in, as Elided names it."""
    return wire or ("bf16" if _dtype(array) == BFLOAT16 else "f32")


def _check_targets(arrays: Sequence[Any], targets: Sequence[np.ndarray], wire: str | None) -> None:
    if len(targets) != len(arrays):
        raise TensorError(f"{len(arrays)} tensors to reduce, out has {len(targets)}")
    for i, (array, target) in enumerate(zip(arrays, targets, strict=True)):
        if target is not array and target.shape != array.shape:
            raise TensorError(f"tensor {i}: expected shape {array.shape}, out has {target.shape}")
        if not target.flags.writeable:
            raise ValueError(f"tensor {i}: out is read-only")
        if target.dtype == BFLOAT16 and _sent_dtype(array, wire) != "bf16":
            raise TensorError(f"tensor {i}: expected float32, out has bfloat16")


def _check_reply(tensors: Sequence[np.ndarray], asked: Sequence[Any], wire: str | None) -> None:
    if len(tensors) != len(asked):
        raise TensorError(f"the reply has {len(tensors)} tensors, the request had {len(asked)}")
    for i, (tensor, array) in enumerate(zip(tensors, asked, strict=True)):
        if tensor.shape != array.shape:
            raise TensorError(f"tensor {i}: the reply has shape {tensor.shape}, the request had {array.shape}")
        came, sent = _sent_dtype(tensor, None), _sent_dtype(array, wire)
        if came != sent:
            raise TensorError(f"tensor {i}: the reply is {came}, the request was {sent}")
