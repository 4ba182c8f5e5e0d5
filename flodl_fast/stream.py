"""Frames out of bytes that arrive in any pieces, and back, without I/O (docs/wire.md §7, §10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, TypeVar, cast, overload

from ._codec import is_strict
from ._round import RoundMeter, TensorLayout
from .errors import EncodeError, FlodlError, LimitError, TruncatedError
from .frames import Codec, MuxRecord
from .messages import Message
from .protocol import LENGTH_PREFIX, MAX_PREFIX, too_long
from .rounds import RoundFrame

__all__ = ["FrameReader", "FrameWriter"]

_KINDS = ("control", "round", "mux")

Item = TypeVar("Item")


class FrameReader(Generic[Item]):
    """Takes the bytes of one stream in any pieces and gives its frames; belongs to one reader.

    Args:
        codec: the Codec of the stream's cluster.
        kind: "control", "round" or "mux": what the stream carries.
        prefixed: each frame has its u32 length before it, as on a rank's legs; never with "mux".
        trailing: as ``Codec.decode``; with a prefix it also covers bytes after the frame inside the prefix.

    An error sticks: after it the stream has no known place to go on from, so every later call raises it again.

    Raises:
        ValueError: another kind, a prefix with "mux", or another ``trailing``.
    """

    @overload
    def __init__(
        self: FrameReader[Message],
        codec: Codec,
        kind: Literal["control"],
        *,
        prefixed: bool = False,
        trailing: str = "ignore",
    ) -> None: ...
    @overload
    def __init__(
        self: FrameReader[RoundFrame],
        codec: Codec,
        kind: Literal["round"],
        *,
        prefixed: bool = False,
        trailing: str = "ignore",
    ) -> None: ...
    @overload
    def __init__(
        self: FrameReader[MuxRecord], codec: Codec, kind: Literal["mux"], *, trailing: str = "ignore"
    ) -> None: ...
    @overload
    def __init__(
        self: FrameReader[Any], codec: Codec, kind: str, *, prefixed: bool = False, trailing: str = "ignore"
    ) -> None: ...
    def __init__(self, codec: Codec, kind: str, *, prefixed: bool = False, trailing: str = "ignore") -> None:
        _check_kind(kind, prefixed)
        self._codec = codec
        self._prefixed = prefixed
        self._trailing = trailing
        self._strict = is_strict(trailing)
        calls: dict[str, tuple[Callable[..., Any], Callable[..., int | None]]] = {
            "control": (codec.decode, codec.measure_frame),
            "round": (codec.decode_round, RoundMeter(codec).measure),
            "mux": (codec.decode_mux, codec.measure_record),
        }
        self._decode, self._measure = calls[kind]
        # Control frames are small and many: one call for each.
        self._take = codec.take_frame if kind == "control" else None
        self._buffer = bytearray()
        self._start = 0
        self._error: FlodlError | None = None
        self._ended = False

    def feed(self, data: Any) -> None:
        """Add bytes that arrived.

        Args:
            data: any contiguous buffer; it is copied.

        Raises:
            FlodlError: the error that stopped the stream.
            ValueError: the stream has ended.
        """
        self._check()
        if self._ended:
            raise ValueError("the stream has ended, nothing can follow")
        if self._start and self._start >= len(self._buffer) // 2:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += memoryview(data).cast("B")

    def next(self) -> Item | None:
        """The next frame's message, round frame or mux record; None where more bytes are needed.

        Raises:
            DecodeError: the bytes are no such frame, as soon as those that say so are there.
        """
        if self._error is not None:
            self._check()
        try:
            take = self._take
            taken = take(self._buffer, self._start, self._prefixed, self._strict) if take else self._cut()
            if taken is None:
                if self._ended:
                    self._whole()
                return None
        except FlodlError as error:
            self._error = error
            raise
        self._start += taken[1]
        return cast(Item, taken[0])

    @property
    def pending(self) -> int:
        """How many bytes have been fed that belong to no frame taken yet."""
        return len(self._buffer) - self._start

    @property
    def rest(self) -> bytes:
        """Those bytes, for whoever reads on in this reader's place."""
        return bytes(self._buffer[self._start :])

    def eof(self) -> None:
        """Say that no bytes follow. Frames that are complete can still be taken.

        Raises:
            TruncatedError: the stream ends inside its next frame; now, or from ``next`` once the frames before it are
                taken.
        """
        self._check()
        self._ended = True
        try:
            self._whole()
        except FlodlError as error:
            self._error = error
            raise

    def __iter__(self) -> Iterator[Item]:
        """The frames that are complete."""
        while (item := self.next()) is not None:
            yield item

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)  # which would grow with each time, and hold its callers' frames

    def _cut(self) -> tuple[Any, int] | None:
        """The next frame's content and its size, its prefix included."""
        size = self._whole()
        if size is None:
            return None
        first = self._start + (LENGTH_PREFIX if self._prefixed else 0)
        with memoryview(self._buffer) as whole, whole[first : self._start + size] as frame:
            return self._decode(frame, trailing=self._trailing), size

    def _whole(self) -> int | None:
        """The size of the next frame, its prefix included, where all of it is there."""
        left = self.pending
        size = self._prefix(left) if self._prefixed else self._measure(self._buffer, self._start)
        if size is not None and size <= left:
            return size
        if self._ended and left:
            raise TruncatedError(f"the stream ends {left} bytes into a frame")
        return None

    def _prefix(self, left: int) -> int | None:
        if left < LENGTH_PREFIX:
            return None
        size = int.from_bytes(self._buffer[self._start : self._start + LENGTH_PREFIX], "little")
        if size > self._codec.frame_ceiling:
            raise LimitError(too_long(size, self._codec.frame_ceiling))
        # A frame that cannot be is refused at once, not when all that its prefix announces has been stored.
        first = self._start + LENGTH_PREFIX
        with memoryview(self._buffer) as whole, whole[first : first + size] as there:
            self._measure(there)
        return LENGTH_PREFIX + size


class FrameWriter:
    """Gives the bytes of one stream, a whole frame at a time.

    Args:
        codec: the Codec of the stream's cluster.
        kind: "control", "round" or "mux": what the stream carries.
        prefixed: put the u32 length before each frame, as on a rank's legs; never with "mux".

    Raises:
        ValueError: another kind, or a prefix with "mux".
    """

    def __init__(self, codec: Codec, kind: str, *, prefixed: bool = False) -> None:
        _check_kind(kind, prefixed)
        self._codec = codec
        self._kind = kind
        self._prefixed = prefixed

    def write(self, item: Any) -> bytes | bytearray:
        """The bytes that carry a message, round frame or mux record.

        Args:
            item: a Message, RoundFrame or MuxRecord, as the stream's kind says.

        Raises:
            EncodeError, TypeError: as the Codec's encoders.
        """
        if self._kind == "mux":
            return self._codec.encode_mux(item)
        if self._kind == "control":
            return self._codec.encode_many([item], prefixed=True) if self._prefixed else self._codec.encode(item)
        if not self._prefixed:
            return self._codec.encode_round(item)
        if not isinstance(item, RoundFrame):
            raise TypeError(f"expected a RoundFrame, got {type(item).__name__}")
        layout = TensorLayout.of(item.tensors)
        if layout.frame_size > MAX_PREFIX:
            raise EncodeError(f"a round frame of {layout.frame_size} bytes does not fit a length prefix of 32 bits")
        data = bytearray(LENGTH_PREFIX + layout.frame_size)
        data[:LENGTH_PREFIX] = layout.frame_size.to_bytes(LENGTH_PREFIX, "little")
        with memoryview(data) as whole, whole[LENGTH_PREFIX:] as body:
            layout.encode(self._codec, item.tensors, item.kind, item.weight, out=body)
        return data


def _check_kind(kind: str, prefixed: bool) -> None:
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {_KINDS}, got {kind!r}")
    if prefixed and kind == "mux":
        raise ValueError("mux records never have a length prefix")
