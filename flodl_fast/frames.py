"""Codec: a salt and a revision, and with them every frame of the wire (docs/wire.md §3, §6, §7)."""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, get_args

from . import _round
from ._codec import FrameCodec, whole_number
from .display import one_line
from .errors import (
    AuthenticationError,
    BadMagicError,
    HandshakeError,
    TrailingDataError,
    TruncatedError,
    VersionMismatchError,
)
from .messages import RelayMsg
from .protocol import (
    FRAME_CEILING,
    GREETING,
    MAC_SIZE,
    MAGIC_CONTROL_ACK,
    MAGIC_CONTROL_HELLO,
    MAGIC_DATA_ACK,
    MAGIC_DATA_HELLO,
    MAX_PAYLOAD,
    MAX_RANK,
    MAX_TENSORS,
    VERSIONS,
    MuxKind,
    Revision,
    wrong_magic,
    wrong_version,
)
from .rounds import RoundFrame
from .signature import told_signatures

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Codec", "MuxRecord"]


_RANK_OF = {kind: f"MuxRecord.rank of a {kind.name} record" for kind in MuxKind}


@dataclass(slots=True)
class MuxRecord:
    """One record between relay and controller.

    Attributes:
        kind: DATA carries a rank's control frame, CONTROL a RelayMsg, HOST_FRAME and BROADCAST a round frame.
        rank: whose frame DATA carries; 0 on the others.
        payload: bytes, or for CONTROL a RelayMsg.
    """

    kind: MuxKind
    rank: int = 0
    payload: bytes | RelayMsg = b""

    __repr__ = one_line


class Codec(FrameCodec):
    """Encodes and decodes every frame of one cluster; safe to share between threads.

    Args:
        salt: the session salt, 16 bytes or 32 hex digits with spaces around them ignored.
        revision: the flodl release whose wire to speak: a Revision or its name.
        max_payload: the largest control payload taken or sent, in bytes.
        max_tensors: the most tensors in a round frame.
        frame_ceiling: the most tensor bytes in a round frame, and the most bytes in a mux payload or length prefix.
        lenient: 0.6 and 0.7 announce the same versions, so that no handshake tells them apart (docs/wire.md §9). True
            decodes what only the other one's layout fits, to the last byte: an EpochAggregated, or 0.7's
            TimingResourceSample. Encoding keeps to ``revision``, as does ``timing_columns``; at 0.8 nothing changes.

    Raises:
        ValueError: a salt or limit that cannot be, or a revision that is not supported.
        TypeError: a salt that is neither bytes nor text.
    """

    __slots__ = ()

    def __init__(
        self,
        salt: bytes | str,
        revision: Revision | str = "0.6",
        *,
        max_payload: int = MAX_PAYLOAD,
        max_tensors: int = MAX_TENSORS,
        frame_ceiling: int = FRAME_CEILING,
        lenient: bool = False,
    ) -> None:
        # FrameCodec has taken the arguments; here they are for `help` and whoever else reads signatures.
        pass

    # -- round frames

    def encode_round(self, frame: RoundFrame, *, wire: str | None = None, elide: bool = False) -> bytes:
        """The whole round frame, as bytes.

        Args:
            frame: its tensors may have any strides and byte order; what is sent is their C-order values.
            wire: "bf16" sends every tensor as bfloat16 (0.7 on): float32 values are rounded to nearest, ties to even.
                By default each travels in its own dtype.
            elide: send tensors whose values are all +0.0 without their data (0.8 on).

        Raises:
            EncodeError: weight, kind or sizes out of range, or what this revision does not have: bfloat16, elision.
            TypeError: a tensor that is neither float32 nor bfloat16.
            ValueError: another ``wire``.
        """
        return cast(bytes, self._encode_round(frame, wire, elide, None, 0))

    def encode_round_into(
        self, frame: RoundFrame, buffer: Buffer, offset: int = 0, *, wire: str | None = None, elide: bool = False
    ) -> int:
        """Write the round frame into a buffer; nothing is written unless all of it fits.

        Args:
            frame: as ``encode_round``.
            buffer: any writable, contiguous buffer.
            offset: where the frame is to start in it, in bytes.
            wire: as ``encode_round``.
            elide: as ``encode_round``.

        Returns:
            The number of bytes written.

        Raises:
            EncodeError: as ``encode_round``, or the buffer has too little room.
            TypeError: as ``encode_round``, or the buffer is read-only.
        """
        return cast(int, self._encode_round(frame, wire, elide, buffer, offset))

    def _encode_round(
        self, frame: RoundFrame, wire: str | None, elide: bool, buffer: Buffer | None, offset: int
    ) -> bytes | int:
        if not isinstance(frame, RoundFrame):
            raise TypeError(f"expected a RoundFrame, got {type(frame).__name__}")
        return _round.encode_round(self, frame.tensors, frame.kind, frame.weight, wire, elide, buffer, offset)

    def decode_round(
        self,
        buffer: Buffer,
        *,
        copy: bool = True,
        out: Iterable[Any] | None = None,
        elided: str = "zeros",
        finite: bool = False,
        record: MuxKind | int | None = None,
        trailing: str = "ignore",
    ) -> RoundFrame:
        """The round frame at the start of a buffer.

        Args:
            buffer: any contiguous buffer.
            copy: True gives new, aligned, writable arrays, of float32 or ``ml_dtypes.bfloat16``. False gives read-only
                views that keep the buffer alive and, a bytearray, from being resized; wire data is rarely aligned,
                ``flags.aligned`` tells.
            out: writable arrays of the frame's dtypes and shapes to decode into, none on another's memory, which become
                the frame's tensors; a float32 array takes a bfloat16 tensor widened. On an error they are as they were.
            elided: what becomes of tensors that came without data (0.8 on): "zeros", or "keep" for an Elided.
            finite: refuse a NaN or an infinity.
            record: a MuxKind, HOST_FRAME or BROADCAST, where the buffer starts with such a mux record and the frame is
                its payload. Both MACs are checked in one pass, which takes little longer than one of them.
            trailing: as ``decode``; what may be left is after the frame.

        Raises:
            DecodeError: TruncatedError, BadMagicError, LimitError, UnknownKindError, TensorError (for the weight),
                AuthenticationError, TrailingDataError, TensorError (for the tensors: a shape that its bytes do not
                fill, or a dtype or elision that this revision does not have), LimitError (for elided zeros above
                ``frame_ceiling``), in this order of checks; before them, with ``record``, those of ``decode_mux`` and
                an UnknownKindError where it is of another kind.
            TypeError, ValueError: arrays in ``out`` that cannot be written, a ``record`` that is no MuxKind, or
                keywords that contradict each other.
        """
        if elided not in ("zeros", "keep"):
            raise ValueError(f'elided must be "zeros" or "keep", got {elided!r}')
        if out is not None and (not copy or elided == "keep"):
            raise ValueError(f"{'elided=keep' if copy else 'copy=False'} and out= contradict each other")
        frame = RoundFrame(())
        frame.tensors, frame.kind, frame.weight = _round.decode_round(
            self, buffer, copy, out, elided == "keep", finite, record, trailing
        )
        return frame

    # -- mux records

    def encode_mux(self, record: MuxRecord) -> bytes:
        """The whole mux record, as bytes.

        Args:
            record: the record.

        Raises:
            EncodeError: a rank that is out of range, or set on a record that is not DATA; a payload above
                ``frame_ceiling``.
            TypeError: a payload that does not belong to the kind.
        """
        if not isinstance(record, MuxRecord):
            raise TypeError(f"expected a MuxRecord, got {type(record).__name__}")
        kind = record.kind
        if type(kind) is not MuxKind:
            kind = MuxKind(whole_number(kind, "MuxRecord.kind", MuxKind.DATA, MuxKind.BROADCAST))
        rank = record.rank
        if kind is MuxKind.DATA or rank != 0:
            rank = whole_number(rank, _RANK_OF[kind], 0, MAX_RANK if kind is MuxKind.DATA else 0)
        payload: Any = record.payload
        if kind is MuxKind.CONTROL:
            if not isinstance(payload, get_args(RelayMsg)):
                raise TypeError(f"a CONTROL record carries a RelayMsg, got {type(payload).__name__}")
            payload = self.encode_payload(payload)
        return self.seal_record(kind, rank, payload)

    def decode_mux(self, buffer: Buffer, *, trailing: str = "ignore") -> MuxRecord:
        """The mux record at the start of a buffer; a rank is given as it came.

        Args:
            buffer: any contiguous buffer.
            trailing: as ``decode``, of bytes after the record and after a CONTROL record's message.

        Raises:
            DecodeError: TruncatedError, BadMagicError, VersionMismatchError, LimitError, AuthenticationError,
                UnknownKindError, TrailingDataError, PayloadError, in this order of checks.
        """
        kind, rank, payload = self.open_record(buffer, trailing=trailing)
        if kind is MuxKind.CONTROL:
            return MuxRecord(kind, rank, self.decode_payload("Relay", payload, trailing=trailing))
        return MuxRecord(kind, rank, payload)

    # -- handshakes

    def control_hello(self, rank: int, world: int, model_sig: bytes | None = None) -> bytes:
        """A rank's first bytes on a control channel (docs/wire.md §7).

        Args:
            rank: the rank, below 2**32.
            world: the number of ranks of the cluster, below 2**32.
            model_sig: the 32 bytes of ``flodl_fast.model_sig``: needed at 0.8, not there before.

        Raises:
            EncodeError: a number that does not fit in 32 bits; ``model_sig`` as ``told_signatures``.
        """
        body = _greeting(MAGIC_CONTROL_HELLO, VERSIONS[self.revision].control, rank, world)
        return self._signed(body + b"".join(told_signatures(self.revision, model_sig)))

    def control_ack(self) -> bytes:
        """The answer to a control hello."""
        return self._signed(struct.pack("<2I", MAGIC_CONTROL_ACK, VERSIONS[self.revision].control))

    def data_hello(self, rank: int, world: int) -> bytes:
        """A rank's first bytes on a data channel; the wire does not authenticate them (docs/wire.md §7).

        Args:
            rank: the rank.
            world: the number of ranks of the cluster.

        Raises:
            EncodeError: a number that does not fit in 32 bits.
        """
        return _greeting(MAGIC_DATA_HELLO, VERSIONS[self.revision].data, rank, world)

    def data_ack(self) -> bytes:
        """The answer to a data hello."""
        return struct.pack("<2I", MAGIC_DATA_ACK, VERSIONS[self.revision].data)

    def measure_control_hello(self, head: bytes) -> int:
        """The bytes of a whole control hello, told by its first eight: those of a later revision are more.

        Args:
            head: its first eight bytes, or more of it.

        Raises:
            DecodeError: TruncatedError, BadMagicError, VersionMismatchError.
        """
        size = VERSIONS[self.revision].hello
        self._check_greeting("control", "hello", head, MAGIC_CONTROL_HELLO, size)
        return size

    def check_control_hello(self, data: bytes, world: int) -> tuple[int, bytes | None]:
        """The (rank, model_sig) of a control hello; model_sig is None at revisions that have none.

        Args:
            data: its bytes, all of them and no more.
            world: the number of ranks that there should be.

        Raises:
            DecodeError: TruncatedError, BadMagicError, VersionMismatchError, TrailingDataError, AuthenticationError.
            HandshakeError: the rank belongs to a world of another size.
        """
        body = self._greeted("control", "hello", data, MAGIC_CONTROL_HELLO, VERSIONS[self.revision].hello)
        rank = _check_world(body, world)
        self._check_mac("control hello", data)
        return rank, body[8:-MAC_SIZE] or None

    def check_data_hello(self, data: bytes, world: int) -> int:
        """The rank of a data hello.

        Args:
            data: its bytes, all of them and no more.
            world: the number of ranks that there should be.

        Raises:
            DecodeError: TruncatedError, BadMagicError, VersionMismatchError, TrailingDataError.
            HandshakeError: the rank belongs to a world of another size.
        """
        return _check_world(self._greeted("data", "hello", data, MAGIC_DATA_HELLO, len(self.data_hello(0, 0))), world)

    def check_control_ack(self, data: bytes) -> None:
        """Raise unless these bytes answer a control hello.

        Args:
            data: the bytes.

        Raises:
            DecodeError: TruncatedError, BadMagicError, VersionMismatchError, TrailingDataError, AuthenticationError.
        """
        self._greeted("control", "ack", data, MAGIC_CONTROL_ACK, len(self.control_ack()))
        self._check_mac("control ack", data)

    def check_data_ack(self, data: bytes) -> None:
        """Raise unless these bytes answer a data hello.

        Args:
            data: the bytes.

        Raises:
            DecodeError: TruncatedError, BadMagicError, VersionMismatchError, TrailingDataError.
        """
        self._greeted("data", "ack", data, MAGIC_DATA_ACK, len(self.data_ack()))

    def _signed(self, body: bytes) -> bytes:
        return body + self.mac(body)

    def _greeted(self, channel: str, part: str, data: bytes, magic: int, size: int) -> bytes:
        """What follows magic and version, both checked before the size, which a revision's version decides."""
        self._check_greeting(channel, part, data, magic, size)
        if len(data) < size:
            raise TruncatedError(f"a {channel} {part} has {size} bytes, got {len(data)}")
        if len(data) > size:
            raise TrailingDataError(f"{len(data) - size} extra bytes after a {channel} {part} of {size}")
        return bytes(data[GREETING:])

    def _check_greeting(self, channel: str, part: str, data: bytes, magic: int, size: int) -> None:
        if len(data) < GREETING:
            raise TruncatedError(f"a {channel} {part} has {size} bytes, got {len(data)}")
        found_magic, found = struct.unpack_from("<2I", data)
        if found_magic != magic:
            raise BadMagicError(wrong_magic(magic, found_magic))
        if found != getattr(VERSIONS[self.revision], channel):
            raise VersionMismatchError(wrong_version(f"{channel} {part}", channel, found, self.revision))

    def _check_mac(self, what: str, data: bytes) -> None:
        if not hmac.compare_digest(self.mac(bytes(data[:-MAC_SIZE])), bytes(data[-MAC_SIZE:])):
            raise AuthenticationError(f"the MAC of a {what} does not hold: another salt, or changed bytes")


def _greeting(magic: int, version: int, rank: int, world: int) -> bytes:
    rank = whole_number(rank, "rank", 0, MAX_RANK)
    return struct.pack("<4I", magic, version, rank, whole_number(world, "world", 0, MAX_RANK))


def _check_world(body: bytes, world: int) -> int:
    """The rank that the body of a hello starts with, its world size checked."""
    rank: int
    rank, found = struct.unpack_from("<2I", body)
    if found != world:
        raise HandshakeError(f"rank {rank} belongs to a world of {found} ranks, this one has {world}")
    return rank
