"""What holds for every encoder and decoder, at every revision, whatever is encoded.

What is written is read the same; a stream means the same byte by byte as whole; a part of a frame is never a value;
nor is a frame with one bit changed.
"""

from __future__ import annotations

import dataclasses
import io
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import SALT
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nst
from test_fuzz_control import fuzz

import flodl_fast as ff
from flodl_fast import capture
from flodl_fast.layout import Shape, struct_of, variants_of
from flodl_fast.messages import PAYLOADS

REVISIONS = list(ff.Revision)
LIMITS = {"u8": 2**8, "u16": 2**16, "u32": 2**32, "u64": 2**64}
PARTS = 60  # the cuts and flips tried on a frame of more bytes than that


# ----------------------------------------------------------------------------------------------------------- strategies


def of_shape(shape: Shape, revision: ff.Revision) -> st.SearchStrategy[Any]:
    """Values of a wire type, drawn from the layouts that the messages declare."""
    def part(i: int) -> st.SearchStrategy[Any]:
        return of_shape(shape.parts[i], revision)

    match shape.op:
        case "u8" | "u16" | "u32" | "u64":
            return st.integers(0, LIMITS[shape.op] - 1)
        case "i32":
            return st.integers(-(2**31), 2**31 - 1)
        case "f32" | "f64":
            return st.floats(width=int(shape.op[1:]))
        case "str":
            return st.text(max_size=30)
        case "bytes":
            return st.binary(max_size=60)
        case "fixed":
            return st.binary(min_size=shape.size, max_size=shape.size)
        case "opt":
            return st.none() | part(0)
        case "list":
            return st.lists(part(0), max_size=4)
        case "tuple":
            return st.tuples(*(part(i) for i in range(len(shape.parts))))
        case "map":
            return st.dictionaries(part(0), part(1), max_size=4)
        case "enum":
            return st.sampled_from(list(shape.cls))
        case _:
            fields = {name: part(i) for i, (name, since) in enumerate(zip(shape.names, shape.since, strict=True))
                      if since is None or not revision < since}
            return st.builds(shape.cls, **fields)


def messages(revision: ff.Revision, *families: str) -> st.SearchStrategy[Any]:
    classes = [cls for family in families for cls, since in (variants_of(PAYLOADS[family][1])
                                                             or [(PAYLOADS[family][1], None)])
               if since is None or not revision < since]
    return st.one_of(*(of_shape(struct_of(cls), revision) for cls in classes))


masses = st.floats(0, allow_nan=False, allow_infinity=False)
arrays = nst.arrays(np.uint32, nst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
                    elements=st.integers(0, 2**32 - 1)).map(lambda bits: bits.view(np.float32))
round_frames = st.builds(ff.RoundFrame, st.lists(arrays, max_size=4), st.sampled_from(ff.RoundKind), masses)
u32 = st.integers(0, 2**32 - 1)


def frames_of(revision: ff.Revision) -> st.SearchStrategy[Any]:
    reserved = st.builds(ff.Reserved, st.sampled_from([ff.MsgKind.PARAM_SNAPSHOT_META, ff.MsgKind.HEARTBEAT]),
                         st.binary(max_size=60))
    return messages(revision, *(family for family in PAYLOADS if family != "Relay")) | reserved


def records_of(revision: ff.Revision) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(ff.MuxRecord, st.just(ff.MuxKind.DATA), u32, st.binary(max_size=60)),
        st.builds(ff.MuxRecord, st.just(ff.MuxKind.CONTROL), st.just(0), messages(revision, "Relay")),
        st.builds(ff.MuxRecord, st.sampled_from([ff.MuxKind.HOST_FRAME, ff.MuxKind.BROADCAST]), st.just(0),
                  st.binary(max_size=60)),
    )


def hellos_of(revision: ff.Revision) -> st.SearchStrategy[Any]:
    sig = st.binary(min_size=32, max_size=32) if revision is ff.Revision.V0_8 else st.none()
    return st.tuples(u32, sig)


def shown(item: Any) -> str:
    """An item as text that tells every two different ones apart, NaN and the sign of zero included."""
    if isinstance(item, ff.RoundFrame):
        return repr((item.kind, item.weight, [(t.shape, t.dtype, t.tobytes()) for t in item.tensors]))
    return f"{type(item)} {dataclasses.asdict(item)}" if dataclasses.is_dataclass(item) else repr(item)


class Wire(NamedTuple):
    """Something that goes over the wire: what there is of it, how it is written, and how read."""

    items: Callable[[ff.Revision], st.SearchStrategy[Any]]
    encode: Callable[[ff.Codec, Any], bytes]
    decode: Callable[[ff.Codec, bytes], Any]
    stream: str | None = None


WORLD = 3
WIRES = {
    "control": Wire(frames_of, ff.Codec.encode, ff.Codec.decode, "control"),
    "round": Wire(lambda _: round_frames, ff.Codec.encode_round, ff.Codec.decode_round, "round"),
    "mux": Wire(records_of, ff.Codec.encode_mux, ff.Codec.decode_mux, "mux"),
    "control hello": Wire(hellos_of, lambda codec, item: codec.control_hello(item[0], WORLD, item[1]),
                          lambda codec, data: codec.check_control_hello(data, WORLD)),
    "control ack": Wire(lambda _: st.none(), lambda codec, _: codec.control_ack(), ff.Codec.check_control_ack),
    "data ack": Wire(lambda _: st.none(), lambda codec, _: codec.data_ack(), ff.Codec.check_data_ack),
    # What the wire does not authenticate, its rank, is the one value that another may stand for.
    "data hello": Wire(lambda _: st.just(0), lambda codec, rank: codec.data_hello(rank, WORLD),
                       lambda codec, data: codec.check_data_hello(data, WORLD)),
}
STREAMS = [name for name, wire in WIRES.items() if wire.stream]

every_wire = pytest.mark.parametrize("name", WIRES)
every_revision = pytest.mark.parametrize("revision", REVISIONS, ids=lambda revision: revision.value)


def refused(call: Callable[..., Any], *args: Any) -> bool:
    """Whether a call raises a documented error; any other passes."""
    try:
        call(*args)
    except (ff.DecodeError, ff.HandshakeError):
        return True
    return False


def places(data: st.DataObject, n: int) -> list[int]:
    """All numbers below n, or some of them where they are many."""
    return list(range(n)) if n <= PARTS else data.draw(st.lists(st.integers(0, n - 1), min_size=9, max_size=9))


# ----------------------------------------------------------------------------------------------------------- properties


@every_revision
@every_wire
def test_what_is_written_is_read_the_same(name, revision):
    wire, codec = WIRES[name], ff.Codec(SALT, revision)

    @fuzz(40)
    @given(wire.items(revision))
    def holds(item):
        raw = wire.encode(codec, item)
        got = wire.decode(codec, raw)
        assert shown(got) == shown(item)
        if wire.stream:
            assert wire.encode(codec, got) == raw

    holds()


@every_revision
@every_wire
def test_a_part_is_never_a_value(name, revision):
    wire, codec = WIRES[name], ff.Codec(SALT, revision)

    @fuzz(15)
    @given(wire.items(revision), st.data())
    def holds(item, data):
        raw = wire.encode(codec, item)
        for size in places(data, len(raw)):
            with pytest.raises(ff.TruncatedError):
                wire.decode(codec, raw[:size])
            if wire.stream:
                reader = ff.FrameReader(codec, wire.stream)
                reader.feed(raw[:size])
                assert reader.next() is None
                if size:
                    with pytest.raises(ff.TruncatedError):
                        reader.eof()
            if name == "control":
                assert codec.decode_many(raw[:size]) == ([], 0)
                if size:
                    with pytest.raises(ff.TruncatedError):
                        codec.timing_columns(raw[:size])

    holds()


@every_revision
@every_wire
def test_a_flipped_bit_is_never_a_value(name, revision):
    wire, codec = WIRES[name], ff.Codec(SALT, revision)

    @fuzz(15)
    @given(wire.items(revision), st.data())
    def holds(item, data):
        raw = wire.encode(codec, item)
        for place in places(data, 8 * len(raw)):
            flipped = bytearray(raw)
            flipped[place // 8] ^= 1 << place % 8
            if name == "data hello" and 8 <= place // 8 < 12:
                assert wire.decode(codec, flipped) == item ^ 1 << place - 64
                continue
            assert refused(wire.decode, codec, flipped)
            if wire.stream:
                reader = ff.FrameReader(codec, wire.stream)
                reader.feed(flipped)
                assert refused(reader.next) or refused(reader.eof)  # a length that grew asks for more
            if name == "control":
                assert refused(codec.timing_columns, flipped)
                assert refused(codec.decode_many, flipped) or codec.decode_many(flipped) == ([], 0)

    holds()


@every_revision
@pytest.mark.parametrize(("name", "prefixed"), [
    *((name, False) for name in STREAMS), ("control", True), ("round", True),
])
def test_a_stream_is_the_same_byte_by_byte(name, prefixed, revision):
    wire, codec = WIRES[name], ff.Codec(SALT, revision)
    writer = ff.FrameWriter(codec, name, prefixed=prefixed)

    @fuzz(15)
    @given(st.lists(wire.items(revision), max_size=4))
    def holds(items):
        pieces = [bytes(writer.write(item)) for item in items]
        whole, slow = (ff.FrameReader(codec, name, prefixed=prefixed, trailing="error") for _ in range(2))
        whole.feed(b"".join(pieces))
        assert [shown(item) for item in whole] == [shown(item) for item in items]
        for item, piece in zip(items, pieces, strict=True):
            for at in range(len(piece)):
                assert slow.next() is None
                slow.feed(piece[at:at + 1])
            assert shown(slow.next()) == shown(item)
        for reader in (whole, slow):
            assert reader.next() is None
            reader.eof()

    holds()


@every_revision
def test_json_is_read_as_it_was_written(revision):
    finite = st.one_of(*(messages(revision, family).map(lambda message, family=family: (family, message))
                         for family in PAYLOADS))

    @fuzz(150)
    @given(finite)
    def holds(pair):
        family, message = pair
        written = ff.to_json(message, revision=revision)
        if "nan" in shown(message) or "inf" in shown(message):
            return  # null in JSON
        back = ff.from_json(family, written, revision=revision)
        assert shown(back) == shown(message)

    holds()


@fuzz(60)
@given(st.lists(st.tuples(st.binary(max_size=50), st.text(st.characters(codec="utf-8"), max_size=20),
                          st.sampled_from(capture.Direction), st.integers(0, 2**64 - 1)), max_size=4), st.data())
def test_a_capture_is_read_as_it_was_written(records, data):
    file = io.BytesIO()
    writer = capture.CaptureWriter(file, revision="0.7")
    ends = {file.tell()}
    for frame, leg, direction, time_ns in records:
        writer.write(frame, leg, direction, time_ns=time_ns)
        ends.add(file.tell())
    raw = file.getvalue()
    found = list(capture.read_capture(io.BytesIO(raw)))
    assert [(bytes(r.data), r.leg, r.direction, r.time_ns) for r in found] == records
    assert {r.revision for r in found} <= {"0.7"}
    for size in places(data, len(raw)):
        partial = capture.read_capture(io.BytesIO(raw[:size]))
        if size in ends or size == 0:
            assert len(list(partial)) <= len(records)
        else:
            with pytest.raises(ff.TruncatedError):
                list(partial)


@fuzz(60)
@given(st.lists(arrays, min_size=1, max_size=4), masses, st.sampled_from(ff.RoundKind), st.data())
def test_a_layout_writes_and_reads_as_the_codec_does(tensors, mass, kind, data):
    codec = ff.Codec(SALT)
    raw = codec.encode_round(ff.RoundFrame(tensors, kind, mass))
    layout = ff.TensorLayout.of(tensors)
    assert layout.encode(codec, tensors, kind, mass) == raw
    assert b"".join(layout.parts(codec, tensors, kind, mass)) == raw
    assert ff.TensorLayout.from_frame(codec, raw) == layout
    out = [np.full_like(tensor, 7) for tensor in tensors]
    assert layout.decode_into(codec, raw, out) == (kind, mass)
    assert [array.tobytes() for array in out] == [tensor.tobytes() for tensor in tensors]
    for size in places(data, len(raw)):
        with pytest.raises(ff.TruncatedError):
            ff.TensorLayout.from_frame(codec, raw[:size])
        with pytest.raises(ff.TruncatedError):
            layout.decode_into(codec, raw[:size], out)
    for place in places(data, 8 * len(raw)):
        flipped = bytearray(raw)
        flipped[place // 8] ^= 1 << place % 8
        assert refused(ff.TensorLayout.from_frame, codec, flipped)
        assert refused(layout.decode_into, codec, flipped, out)
    assert [array.tobytes() for array in out] == [tensor.tobytes() for tensor in tensors]


@fuzz(60)
@given(st.binary(min_size=16, max_size=16), st.binary(max_size=200))
def test_a_tag_is_of_this_salt_and_these_bytes(salt, data):
    tag = ff.Codec(salt).mac(data)
    assert ff.Codec(salt.hex()).mac(data) == ff.Codec(f" {salt.hex().upper()}\n").mac(memoryview(data)) == tag
    other = bytearray(salt)
    other[struct.unpack("<Q", tag)[0] % 16] ^= 1
    assert ff.Codec(other).mac(data) != tag
