"""The numbers of the wire: magics, versions, kinds, limits (docs/wire.md §1, §3, §6, §7, §9)."""

from __future__ import annotations

from enum import Enum, IntEnum
from functools import total_ordering
from typing import NamedTuple

__all__ = ["MsgKind", "MuxKind", "Revision", "RoundKind"]

# Magics, u32 little-endian on the wire (§1).
MAGIC_DATA_HELLO = 0xF10D17C0
MAGIC_DATA_ACK = 0xF10D17C1
MAGIC_CONTROL_HELLO = 0xF10D17C2
MAGIC_CONTROL_ACK = 0xF10D17C3
MAGIC_CONTROL_FRAME = 0xF10D17C4
MAGIC_MUX = 0xF10D17D0
MAGIC_ROUND = 0xF10D17F1

# Frame layout (§3, §6, §7).
MAC_SIZE = 8
CONTROL_HEADER = 24  # magic, version, MAC, kind, payload length
MUX_HEADER = 25  # magic, version, kind, rank, payload length, MAC
ROUND_HEADER = 17  # magic, tensor count, kind, weight
GREETING = 8  # the magic and version that every hello and ack begins with
LENGTH_PREFIX = 4
MAX_PREFIX = 2**32 - 1

# Limits: local, not negotiated, each a keyword of Codec (§3, §6, §7).
MAX_PAYLOAD = 16 << 20
MAX_TENSORS = 65536
FRAME_CEILING = 1 << 30
MIN_FRAME_CEILING = 64 << 20

SALT_SIZE = 16
MAX_RANK = 2**32 - 1  # where a header holds a rank; messages have 64 bits for it
RESERVED_RANK = 2**64 - 1

DTYPE_F32 = 0
DTYPE_BF16 = 1


@total_ordering
class Revision(Enum):
    """A revision of the crate's wire, named after the flodl release that speaks it; they order by age."""

    V0_6 = "0.6"
    V0_7 = "0.7"
    V0_8 = "0.8"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Revision):
            return NotImplemented
        members = list(Revision)
        return members.index(self) < members.index(other)


BF16_SINCE = Revision.V0_7  # tensors of bfloat16 (§9)
ELISION_SINCE = Revision.V0_8  # tensors of zeros without data (§9)


class Versions(NamedTuple):
    """What a revision announces: its version numbers, and the bytes of its control hello (§9)."""

    control: int
    data: int
    mux: int
    hello: int


VERSIONS = {
    Revision.V0_6: Versions(control=2, data=2, mux=1, hello=24),
    Revision.V0_7: Versions(control=2, data=2, mux=1, hello=24),
    Revision.V0_8: Versions(control=4, data=3, mux=1, hello=56),
}


def supported_revision(revision: Revision | str) -> Revision:
    """The Revision of that name.

    Raises:
        ValueError: the name is unknown; the message lists those that are known.
    """
    try:
        return Revision(revision)
    except ValueError:
        names = ", ".join(repr(r.value) for r in Revision)
        given = "" if isinstance(revision, str) else f" (a {type(revision).__name__}, not a string)"
        raise ValueError(f"flodl revision {revision!r}{given} is not supported; supported: {names}") from None


def lookalike(revision: Revision) -> Revision | None:
    """The other revision that announces the same, so that no handshake can tell the two apart (§9)."""
    return next((r for r in Revision if r is not revision and VERSIONS[r] == VERSIONS[revision]), None)


class MsgKind(IntEnum):
    """What a control frame carries (docs/wire.md §3). The last two of 1-5 are reserved and dead."""

    CONTROL = 1
    TIMING = 2
    METRICS = 3
    PARAM_SNAPSHOT_META = 4
    HEARTBEAT = 5
    RENDEZVOUS = 6
    JOIN = 7


class RoundKind(IntEnum):
    """How a round frame is reduced (docs/wire.md §6): MODEL is divided by the summed weight, CONTROL never."""

    MODEL = 0
    CONTROL = 1


class MuxKind(IntEnum):
    """What a mux record carries between relay and controller (docs/wire.md §7)."""

    DATA = 1
    CONTROL = 2
    HOST_FRAME = 3
    BROADCAST = 4


def parse_salt(salt: bytes | str) -> bytes:
    """The 16 bytes of a session salt.

    Args:
        salt: 16 bytes, or 32 hex digits of either case as text, spaces around them ignored (§7).

    Raises:
        TypeError: neither bytes nor text.
        ValueError: the wrong length or not hex; the message never holds the salt.
    """
    if isinstance(salt, str):
        digits = salt.strip()
        try:
            raw = bytes.fromhex(digits) if len(digits) == 2 * SALT_SIZE else b""
        except ValueError:
            raw = b""
        if len(raw) != SALT_SIZE:
            raise ValueError(f"a salt as text is {2 * SALT_SIZE} hex digits; these {len(digits)} characters are not")
        return raw
    if not isinstance(salt, (bytes, bytearray, memoryview)):
        raise TypeError(f"a salt is {SALT_SIZE} bytes or {2 * SALT_SIZE} hex digits, got {type(salt).__name__}")
    raw = bytes(salt)
    if len(raw) != SALT_SIZE:
        raise ValueError(f"a salt is {SALT_SIZE} bytes, got {len(raw)}")
    return raw


# Channels and their deadlines, in seconds (§1, §7); * is scaled by FLODL_NET_TIMEOUT_SCALE.
MAGIC_CHANNEL_RENDEZVOUS = 0xF10D17E0
MAGIC_CHANNEL_DATA = 0xF10D17E1
MAGIC_CHANNEL_CONTROL = 0xF10D17E2
MAGIC_CHANNEL_JOIN = 0xF10D17E3

CONNECT_ATTEMPTS = 60  # *
CONNECT_PAUSE = 0.5
FIRST_BYTES = 5  # * for the magic on the controller's port
HANDSHAKE = 10
WRITE_STALL = 30  # *
REDUCE_REPLY = 120  # * each read
STARVATION = 60  # inside a frame
LIVENESS = 30  # * control frames to a rank, timing frames from one
DIAL_IN = 60  # * until the relays cover the world
JOIN_REPLY = 30  # * the agent's wait
FORMATION_MARGIN = 30  # beyond what the controller says the world may take to form

_MAGICS = {
    MAGIC_DATA_HELLO: "a data hello",
    MAGIC_DATA_ACK: "a data ack",
    MAGIC_CONTROL_HELLO: "a control hello",
    MAGIC_CONTROL_ACK: "a control ack",
    MAGIC_CONTROL_FRAME: "a control frame",
    MAGIC_MUX: "a mux record",
    MAGIC_ROUND: "a round frame",
    MAGIC_CHANNEL_RENDEZVOUS: "a rendezvous channel",
    MAGIC_CHANNEL_DATA: "a data channel",
    MAGIC_CHANNEL_CONTROL: "a control channel",
    MAGIC_CHANNEL_JOIN: "a join channel",
}


def wrong_magic(expected: int, found: int, following: int = 0) -> str:
    """What is wrong with these first four bytes, in words: another kind of frame is named, or a length prefix."""
    known = f"{_MAGICS[found]}'s" if found in _MAGICS else "which is none of flodl's"
    if following == expected:
        known = f"a length prefix of {found} bytes before it (prefixed=True)"
    return f"expected {_MAGICS[expected]}'s magic {expected:#x}, got {found:#x}, {known}"


def too_long(size: int, ceiling: int) -> str:
    """What is wrong with a length prefix above the limit, in words: the magic of a frame without one is named."""
    hint = f": it is {_MAGICS[size]}'s magic, without a prefix before it" if size in _MAGICS else ""
    return f"a length prefix of {size} bytes is above the limit of {ceiling} (frame_ceiling){hint}"


def wrong_version(what: str, field: str, found: int, revision: Revision) -> str:
    """What is wrong with a version, in words: the revisions that announce it are named."""
    names = " or ".join(r.value for r, versions in VERSIONS.items() if getattr(versions, field) == found)
    expected = getattr(VERSIONS[revision], field)
    return f"{what} version {found} (of {names or 'no known revision'}), revision {revision.value} has {expected}"
