"""Every error of flodl_fast, in one tree under FlodlError.

A message says what was wrong, where (byte, field, rank, tensor), what was expected and what came.
It never holds a computed tag or the salt: either would let its reader forge frames (docs/wire.md §10).
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AuthenticationError",
    "BadMagicError",
    "ChannelClosed",
    "ChannelError",
    "DecodeError",
    "EncodeError",
    "FlodlError",
    "HandshakeError",
    "LimitError",
    "PayloadError",
    "ReservedTargetError",
    "TensorError",
    "TrailingDataError",
    "TruncatedError",
    "UnknownKindError",
    "VersionMismatchError",
]


class FlodlError(Exception):
    """The root of every error that flodl_fast raises on its own account."""


class EncodeError(FlodlError, ValueError):
    """A value has the right type but no place on the wire: out of range, too long, or not in this revision."""


class DecodeError(FlodlError, ValueError):
    """Bytes that are not what they should be.

    Attributes:
        offset: byte offset of the frame in the buffer given, where several frames were decoded at once; else None.
        decoded: the messages decoded before the fault by ``Codec.decode_many``; else an empty tuple.
    """

    offset: int | None = None
    decoded: list[Any] | tuple[()] = ()


class TruncatedError(DecodeError):
    """The input ends inside a frame."""


class BadMagicError(DecodeError):
    """The first four bytes name another kind of frame, or none."""


class VersionMismatchError(DecodeError):
    """The frame announces a wire version that this revision does not speak."""


class UnknownKindError(DecodeError):
    """A kind byte or number that the revision does not define."""


class AuthenticationError(DecodeError):
    """The MAC does not hold: a wrong salt, or bytes changed on the way."""


class LimitError(DecodeError):
    """A length or count above a limit; the message names the limit and the setting that moves it."""


class PayloadError(DecodeError):
    """An authentic payload that does not decode as the message it claims to be."""


class TrailingDataError(DecodeError):
    """Bytes left over after the value or the frame, where ``trailing="error"`` forbids them."""


class TensorError(DecodeError):
    """A tensor that cannot be: unknown dtype, shape and size at odds, or frames that do not match each other."""


class ReservedTargetError(FlodlError, ValueError):
    """A message aimed at rank 2**64 - 1, which flodl reserves for "nobody" (docs/wire.md §5)."""


class ChannelError(FlodlError, OSError):
    """A connection to a flodl peer cannot go on."""


class ChannelClosed(ChannelError):
    """The channel is closed, by either side."""


class HandshakeError(ChannelError):
    """The peer's hello or acknowledgement does not fit this cluster."""
