"""Lengths that lie: every length field of the wire, taken from the layouts, is compared with what is there before
anything is allocated for it.

Run as a program, it prints how long the slowest refusal takes.
"""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import reference as ref
from conftest import SALT
from round_support import Forged, forge
from support import NUMBER_OF, signed_record

import flodl_fast as ff
from flodl_fast.layout import Shape, struct_of, variants_of
from flodl_fast.messages import PAYLOADS
from flodl_fast.protocol import VERSIONS

REVISIONS = list(ff.Revision)
FLAT = 1 << 16  # bytes that a refusal may take, its error's text included
COUNTS = (2**64 - 1, 2**40, 200)  # items; no payload here has so many bytes
LEFT = bytes(100)  # what follows the count


def least(shape: Shape) -> bytes:
    """The shortest bytes of a type: zeros."""
    match shape.op:
        case "f64" | "f32":
            return bytes(int(shape.op[1:]) // 8)
        case "fixed":
            return bytes(shape.size)
        case "struct" | "tuple":
            return b"".join(least(part) for part in shape.parts)
        case _:
            return b"\0"


def lengths(shape: Shape, revision: ff.Revision) -> Iterator[tuple[str, bytes]]:
    """The way to each length field inside a type, and the bytes before it."""
    if shape.op in ("str", "bytes", "list", "map"):
        yield "", b""
    match shape.op:
        case "opt":
            yield from ((way, b"\1" + before) for way, before in lengths(shape.parts[0], revision))
        case "list":
            yield from ((f"[0]{way}", b"\1" + before) for way, before in lengths(shape.parts[0], revision))
        case "map":
            yield "[key]", b"\1"
            yield from (("['']" + way, b"\1\0" + before) for way, before in lengths(shape.parts[1], revision))
        case "struct" | "tuple":
            done = b""
            names = shape.names or [str(i) for i in range(len(shape.parts))]
            since = shape.since or [None] * len(shape.parts)
            for name, part, brought in zip(names, shape.parts, since, strict=True):
                if brought is None or not revision < brought:
                    yield from ((f".{name}{way}", done + before) for way, before in lengths(part, revision))
                    done += least(part)


def fields() -> Iterator[tuple[ff.Revision, str, str, bytes]]:
    """Revision, kind, name and the bytes before it of every length field of every message."""
    for revision in REVISIONS:
        for family, (_, union) in PAYLOADS.items():
            variants = variants_of(union)
            for index, (cls, since) in enumerate(variants or [(union, None)]):
                if since is None or not revision < since:
                    for way, before in lengths(struct_of(cls), revision):
                        yield revision, family, cls.__name__ + way, (bytes([index]) if variants else b"") + before


def varint(number: int) -> bytes:
    return ref.put_varint(number)


def frame_of(codec: ff.Codec, family: str, payload: bytes) -> bytes:
    """The frame or record, its MAC right, that carries a payload."""
    if family == "Relay":
        return signed_record(2, payload)
    signed = struct.pack("<II", NUMBER_OF[family], len(payload)) + payload
    version = VERSIONS[codec.revision].control
    return struct.pack("<II", ref.CONTROL_FRAME, version) + codec.mac(signed) + signed


def refusals() -> Iterator[tuple[str, Any]]:
    """The name of a field with a size in it that lies, and the call that must refuse it."""
    for revision, family, name, before in fields():
        codec = ff.Codec(SALT, revision)
        for count in COUNTS:
            payload = before + varint(count) + LEFT
            frame = frame_of(codec, family, payload)
            what = f"{revision.value} {name} = {count}"
            yield what, lambda codec=codec, family=family, payload=payload: codec.decode_payload(family, payload)
            calls = [codec.decode_mux] if family == "Relay" else [codec.decode, codec.decode_many]
            for call in calls + [codec.timing_columns] * (family == "Timing"):
                yield what, lambda call=call, frame=frame: call(frame)
    codec = ff.Codec(SALT)
    control, mux = codec.encode(ff.SyncNow()), codec.encode_mux(ff.MuxRecord(ff.MuxKind.DATA))
    for size in (2**32 - 1, 2**31, (1 << 30) + 1, (1 << 24) + 1):
        number = struct.pack("<I", size)
        for call in (codec.decode, codec.decode_many, codec.timing_columns):
            yield f"control payload length {size}", lambda call=call, n=number: call(control[:20] + n + control[24:])
        yield f"mux payload length {size}", lambda n=number: codec.decode_mux(mux[:13] + n + mux[17:] + LEFT)
        yield f"tensor count {size}", lambda size=size: codec.decode_round(forge(count=size))
        for dims in ((size,), (size, size), (size,) * 8):
            for nbytes in (0, 4):
                yield f"tensor dims {dims}, {nbytes} bytes", lambda dims=dims, nbytes=nbytes: ff.Codec(
                    SALT, "0.6").decode_round(forge(Forged(dims, bytes(nbytes), nbytes=nbytes)))
        for kind in ("control", "round"):
            yield f"{kind} length prefix {size}", lambda kind=kind, n=number: read(kind, n + LEFT, prefixed=True)
        yield f"prefixed batch {size}", lambda n=number: codec.timing_columns(n + control, prefixed=True)
    for nbytes in (2**64 - 1, 2**63, 2**62, 2**40, (1 << 30) + 1, 104):
        raw = forge(Forged((25,), LEFT, nbytes=nbytes))
        yield f"tensor nbytes {nbytes}", lambda raw=raw: codec.decode_round(raw)
        yield f"tensor nbytes {nbytes}", lambda raw=raw: ff.TensorLayout.from_frame(codec, raw)
        yield f"second tensor's nbytes {nbytes}", lambda nbytes=nbytes: codec.decode_round(
            forge(Forged((1,), bytes(4)), Forged((25,), LEFT, nbytes=nbytes)))
        yield f"stream's tensor nbytes {nbytes}", lambda raw=raw: read("round", raw)
    newest = ff.Codec(SALT, REVISIONS[-1])
    for dims in ((2**32 - 1,), (2**32 - 1,) * 2, (2**32 - 1,) * 8, (2**16, 2**16), (2**28 + 1,)):
        yield f"elided {dims}", lambda dims=dims: newest.decode_round(forge(Forged(dims)))


def read(kind: str, data: bytes, **options: Any) -> None:
    """Read a stream of these bytes to its end."""
    reader = ff.FrameReader(ff.Codec(SALT), kind, **options)
    reader.feed(data)
    reader.next()
    reader.eof()


def oracle_lengths(of: Any, revision: str) -> int:
    """How many length fields one of the oracle's types has."""
    match of:
        case "text":
            return 1
        case str():
            return 0
        case ref.Vec(inner):
            return 1 + oracle_lengths(inner, revision)
        case ref.Map(inner):
            return 2 + oracle_lengths(inner, revision)
        case ref.Opt(inner) | ref.Array(inner, _):
            return oracle_lengths(inner, revision)
        case ref.Tuple(parts):
            return sum(oracle_lengths(part, revision) for part in parts)
        case ref.Enum(parts) | dict(parts):
            return sum(oracle_lengths(part, revision) for part in parts.values())


@pytest.mark.parametrize("revision", REVISIONS, ids=lambda revision: revision.value)
def test_every_length_of_every_message_is_met(revision):
    expected = sum(oracle_lengths(of, revision.value) for of in ref.SCHEMAS[revision.value].values())
    assert sum(found is revision for found, *_ in fields()) == expected > 40


def test_lengths_that_lie_are_refused_with_flat_memory():
    worst = 0
    tracemalloc.start()
    try:
        for what, call in refusals():
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                call()
            except ff.DecodeError:
                pass
            else:
                pytest.fail(f"{what} is taken")
            worst = max(worst, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert worst < FLAT


def test_a_stream_waits_for_what_is_announced_without_room_for_it():
    """A length below its limit is believed only as its bytes come."""
    codec = ff.Codec(SALT)
    starts = [
        ("control", False, codec.encode(ff.SyncNow())[:20] + struct.pack("<I", 1 << 24)),
        ("control", True, struct.pack("<I", 1 << 30)),
        ("round", False, forge(Forged((1 << 28,), nbytes=1 << 30))[:31]),
        ("mux", False, codec.encode_mux(ff.MuxRecord(ff.MuxKind.DATA))[:13] + struct.pack("<I", 1 << 30) + bytes(8)),
    ]
    for kind, prefixed, start in starts:
        reader = ff.FrameReader(codec, kind, prefixed=prefixed)
        tracemalloc.start()
        try:
            reader.feed(start)
            assert reader.next() is None
            assert tracemalloc.get_traced_memory()[1] < FLAT
        finally:
            tracemalloc.stop()
        with pytest.raises(ff.TruncatedError):
            reader.eof()


def main() -> None:
    slowest, tried = (0.0, ""), 0
    for what, call in refusals():
        best = min(timed(call) for _ in range(5))  # of a few, as a busy machine adds its own
        slowest, tried = max(slowest, (best, what)), tried + 1
    print(f"{len(list(fields()))} length fields of messages, {tried} lengths that lie, "
          f"the slowest refused in {slowest[0] * 1e6:.0f} µs ({slowest[1]})")


def timed(call: Any) -> float:
    start = time.perf_counter()
    try:
        call()
    except ff.DecodeError:
        return time.perf_counter() - start
    raise AssertionError("taken")


if __name__ == "__main__":
    main()
