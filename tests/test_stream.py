"""FrameReader and FrameWriter: every framing, in any pieces."""

from __future__ import annotations

import gc
import random
import struct
import traceback
import tracemalloc

import numpy as np
import pytest
import reference as ref
from conftest import SALT
from generate import damage, round_frames
from round_support import form_of, frame_of, numpy_holds
from support import CODEC, drawn, oracle_form, signed_frame, signed_record

import flodl_fast as ff

HEARTBEAT = ff.Heartbeat(3, 1000)
FRAME = CODEC.encode(HEARTBEAT)
FRAMINGS = [("control", False), ("control", True), ("round", False), ("round", True), ("mux", False)]


@pytest.fixture(params=FRAMINGS, ids=lambda framing: framing[0] + "-prefixed" * framing[1])
def framing(request):
    return request.param


def as_oracle(item):
    """A frame's content in a form that can be compared."""
    if isinstance(item, ff.RoundFrame):
        return repr(form_of(item))
    if isinstance(item, ff.MuxRecord):
        payload = item.payload if isinstance(item.payload, bytes) else repr(oracle_form(item.payload))
        return "mux", item.kind, item.rank, payload
    return repr(oracle_form(item))


def some(kind, seed=51, count=40):
    """Messages, round frames or mux records, of all sorts."""
    if kind == "control":
        return drawn(seed, count)
    if kind == "round":
        forms = round_frames(seed, count)
        return [frame_of(form) for form in forms if all(numpy_holds(t["shape"]) for t in form["tensors"])]
    rng = random.Random(seed)
    records = [ff.MuxRecord(ff.MuxKind.CONTROL, 0, message) for message in drawn(seed, 8, kinds=("Relay",))]
    records += [ff.MuxRecord(ff.MuxKind.DATA, rng.getrandbits(32), CODEC.encode(m)) for m in drawn(seed, count)]
    records += [ff.MuxRecord(kind, 0, rng.randbytes(size)) for kind in (3, 4) for size in (0, 1, 70_000)]
    rng.shuffle(records)
    return [ff.MuxRecord(ff.MuxKind(record.kind), record.rank, record.payload) for record in records]


def frames_of(items, framing):
    kind, prefixed = framing
    encode = {"control": CODEC.encode, "round": CODEC.encode_round, "mux": CODEC.encode_mux}[kind]
    return [ref.add_prefix(encode(item)) if prefixed else encode(item) for item in items]


def new(framing, codec=CODEC, **options):
    kind, prefixed = framing
    return ff.FrameReader(codec, kind, prefixed=prefixed, **options)


def run(reader, pieces, end=True):
    """All that a reader gives for these pieces, and the class of the error that stops it, if one does."""
    got = []
    try:
        for piece in pieces:
            reader.feed(piece)
            got += map(as_oracle, reader)
        if end:
            reader.eof()
            got += map(as_oracle, reader)
    except ff.DecodeError as error:
        return got, type(error)
    return got, None


def cut(rng, data, sizes):
    at = 0
    while at < len(data):
        size = rng.choice(sizes)
        yield data[at:at + size]
        at += size


def test_any_pieces_give_the_same(framing):
    items = some(framing[0])
    data = b"".join(frames_of(items, framing))
    expected = list(map(as_oracle, items))
    assert run(new(framing), [data]) == (expected, None)
    assert run(new(framing, trailing="error"), [data]) == (expected, None)
    rng = random.Random(52)
    for sizes in ((1, 2, 3), (1, 7, 24, 25, 100), (5000, 1, 100_000), (4096,)):
        assert run(new(framing), cut(rng, data, sizes)) == (expected, None)


def test_byte_by_byte(framing):
    items = [item for item, frame in zip(some(framing[0]), frames_of(some(framing[0]), framing), strict=True)
             if len(frame) < 2000]
    data = b"".join(frames_of(items, framing))
    assert len(items) > 10
    assert run(new(framing), (data[at:at + 1] for at in range(len(data)))) == (list(map(as_oracle, items)), None)


def test_frames_come_one_at_a_time_and_no_sooner(framing):
    items = some(framing[0], count=10)
    reader = new(framing)
    assert reader.next() is None
    for item, frame in zip(items, frames_of(items, framing), strict=True):
        reader.feed(frame[:-1])
        assert reader.next() is None
        reader.feed(frame[-1:])
        assert as_oracle(reader.next()) == as_oracle(item)
        assert reader.next() is None
    reader.feed(b"")
    assert list(reader) == []
    reader.eof()
    assert reader.next() is None


def test_what_is_fed_and_not_taken_is_told(framing):
    items = some(framing[0], count=3)[:3]
    first, second, third = frames_of(items, framing)
    reader = new(framing)
    assert (reader.pending, reader.rest) == (0, b"")
    reader.feed(first + second + third[:-1])
    for left in (first + second + third[:-1], second + third[:-1], third[:-1]):
        assert (reader.pending, reader.rest) == (len(left), left)
        last = reader.next()
    assert last is None
    other = new(framing)
    other.feed(reader.rest + third[-1:])
    assert as_oracle(other.next()) == as_oracle(items[2])
    assert (other.pending, other.rest) == (0, b"")


@pytest.mark.parametrize("form", [
    bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data))[:],
    lambda data: np.frombuffer(data, np.uint8),
], ids=["bytes", "bytearray", "memoryview", "slice", "ndarray"])
def test_every_kind_of_buffer_can_be_fed(framing, form):
    items = some(framing[0], count=6)
    reader, got = new(framing), []
    for frame in frames_of(items, framing):
        for piece in (frame[:3], frame[3:6], frame[6:]):
            reader.feed(form(piece))
            got += map(as_oracle, reader)
    assert got == list(map(as_oracle, items))


@pytest.mark.parametrize("value", [None, "text", 5, [1, 2], object()])
def test_what_cannot_be_fed(framing, value):
    reader = new(framing)
    with pytest.raises(TypeError):
        reader.feed(value)
    frame = frames_of(some(framing[0], count=1), framing)[0]
    reader.feed(frame)
    assert reader.next() is not None


def test_what_was_fed_may_change_afterwards(framing):
    items = some(framing[0], count=3)
    frames = frames_of(items, framing)
    buffer = bytearray(max(map(len, frames)))
    reader, got = new(framing), []
    for frame in frames:
        buffer[:len(frame)] = frame
        reader.feed(memoryview(buffer)[:len(frame)])
        buffer[:] = bytes(len(buffer))
        got += map(as_oracle, reader)
    assert got == list(map(as_oracle, items))


# ---------------------------------------------------------------------------------------------------------------- ends


def test_an_end_between_frames_is_clean(framing):
    reader = new(framing)
    reader.eof()
    assert reader.next() is None
    reader.eof()
    items = some(framing[0], count=3)
    reader = new(framing)
    reader.feed(b"".join(frames_of(items, framing)))
    reader.eof()
    assert [as_oracle(item) for item in reader] == list(map(as_oracle, items))
    assert reader.next() is None
    with pytest.raises(ValueError, match="has ended"):
        reader.feed(b"x")
    with pytest.raises(ValueError, match="has ended"):
        reader.feed(b"")


def test_an_end_inside_a_frame_is_not(framing):
    items = sorted(some(framing[0]), key=lambda item: len(frames_of([item], framing)[0]))[5:8]
    *first, last = frames_of(items, framing)
    for size in range(1, len(last)):
        reader = new(framing)
        reader.feed(last[:size])
        with pytest.raises(ff.TruncatedError, match=f"ends {size} bytes into a frame"):
            reader.eof()
        with pytest.raises(ff.TruncatedError):
            reader.next()
        assert run(new(framing), [*first, last[:size]]) == (list(map(as_oracle, items[:2])), ff.TruncatedError)


def test_frames_before_a_truncated_one_can_still_be_taken(framing):
    items = some(framing[0], count=3)
    frames = frames_of(items, framing)
    reader = new(framing)
    reader.feed(b"".join(frames)[:-1])
    reader.eof()
    got = []
    while len(got) < len(items) - 1:
        got.append(as_oracle(reader.next()))
    assert got == list(map(as_oracle, items[:-1]))
    with pytest.raises(ff.TruncatedError):
        reader.next()


# -------------------------------------------------------------------------------------------------------------- errors


def test_an_error_sticks(framing):
    good = frames_of(some(framing[0], count=2), framing)
    bad = bytearray(good[1])
    bad[-1] ^= 1
    reader = new(framing)
    reader.feed(good[0] + bytes(bad) + good[0])
    assert reader.next() is not None
    with pytest.raises(ff.DecodeError) as first:
        reader.next()
    for call in (
        reader.next, reader.eof, lambda: reader.feed(good[0]), lambda: next(iter(reader)), lambda: reader.feed(None),
    ):
        with pytest.raises(type(first.value)) as again:
            call()
        assert again.value is first.value


def test_an_error_that_sticks_holds_no_more_each_time(framing):
    """Each raise of an exception adds to its traceback, and that holds the frames of all who called."""
    reader = new(framing)
    reader.feed(bytes(64))
    lengths = []
    for _ in range(10):
        with pytest.raises(ff.DecodeError) as caught:
            next(iter(reader))
        lengths.append(len(list(traceback.walk_tb(caught.value.__traceback__))))
    assert lengths[1:] == [lengths[1]] * 9


def test_damaged_streams_end_alike_in_any_pieces(framing):
    rng = random.Random(53)
    items = [item for item in some(framing[0], count=60) if len(frames_of([item], framing)[0]) < 600]
    ends = set()
    for _ in range(250):
        frames = frames_of(rng.sample(items, 4), framing)
        at = rng.randrange(4)
        body = frames[at][4 * framing[1]:]
        match rng.randrange(4):
            case 0 if framing[0] == "control":
                body = signed_frame(2, damage(rng, body[24:] or b"?"))
            case 0 if framing[0] == "mux":
                body = signed_record(body[8], damage(rng, body[25:] or b"?"))
            case 0:
                body = damage(rng, body[:-8])
                body += ref.mac8(SALT, body)
            case 1 if framing[1]:  # a prefix that does not fit
                frames[at] = struct.pack("<I", rng.choice((0, 3, 20, len(body) - 1, len(body) + 1, 1 << 31))) + body
                body = None
            case _:
                body = damage(rng, body)
        if body is not None:
            frames[at] = ref.add_prefix(body) if framing[1] else body
        data = b"".join(frames)
        expected = run(new(framing), [data])
        assert run(new(framing), (data[i:i + 1] for i in range(len(data)))) == expected
        assert run(new(framing), cut(rng, data, (1, 10, 30, 200))) == expected
        ends.add(expected[1])
    assert {None, ff.AuthenticationError, ff.BadMagicError, ff.TruncatedError} <= ends


def test_readers_refuse_what_the_codec_refuses(framing):
    rng = random.Random(54)
    decode = {"control": CODEC.decode, "round": CODEC.decode_round, "mux": CODEC.decode_mux}[framing[0]]
    for frame in frames_of(some(framing[0], seed=55), framing):
        body = damage(rng, frame[4 * framing[1]:])
        try:
            expected = [as_oracle(decode(body))], None
        except ff.DecodeError as error:
            expected = [], type(error)
        if framing[1]:
            assert run(new(framing), [ref.add_prefix(body)]) == expected
        elif body:
            got, error = run(new(framing), [body])
            assert (got, error) == expected or (error is ff.TruncatedError and got == expected[0])


@pytest.mark.parametrize("how", ["ignore", "error"])
@pytest.mark.parametrize("kind", ["control", "round"])
def test_bytes_after_a_frame_in_its_prefix(kind, how):
    item = HEARTBEAT if kind == "control" else ff.RoundFrame([np.ones(3, np.float32)])
    frame, = frames_of([item], (kind, False))
    data = ref.add_prefix(frame) + ref.add_prefix(frame + b"xyz") + ref.add_prefix(frame)
    for pieces in ([data], [data[i:i + 1] for i in range(len(data))]):
        got = run(new((kind, True), trailing=how), pieces)
        assert got == (([as_oracle(item)], ff.TrailingDataError) if how == "error" else ([as_oracle(item)] * 3, None))


@pytest.mark.parametrize(("framing", "data"), [
    (("control", False), signed_frame(2, FRAME[24:] + b"xy")), (("mux", False), signed_record(2, b"\1xy")),
])
def test_bytes_after_a_value_in_its_frame(framing, data):
    assert run(new(framing), [data])[1] is None
    assert run(new(framing, trailing="error"), [data]) == ([], ff.TrailingDataError)


@pytest.mark.parametrize("kind", ["control", "round"])
@pytest.mark.parametrize("size", [0, 1, 3, 16, 17, 23, 24, 28])
def test_a_prefix_that_is_too_short_for_its_frame(kind, size):
    item = HEARTBEAT if kind == "control" else ff.RoundFrame([np.ones(3, np.float32)])
    frame, = frames_of([item], (kind, False))
    data = ref.add_prefix(frame) + ref.add_prefix(frame[:size]) + ref.add_prefix(frame) * 2
    for pieces in ([data], [data[i:i + 1] for i in range(len(data))]):
        assert run(new((kind, True)), pieces) == ([as_oracle(item)], ff.TruncatedError)


def header(magic, *fields):
    return struct.pack("<" + "I" * (1 + len(fields)), magic, *fields)


ROUND = struct.pack("<IIBd", ref.ROUND_FRAME, 1, 0, 1.0)


@pytest.mark.parametrize(("kind", "start", "error", "text"), [
    ("control", header(ref.CONTROL_FRAME, 2, 0, 0, 1, (1 << 24) + 1), ff.LimitError,
     r"16777217.*16777216 \(max_payload\)"),
    ("control", header(ref.CONTROL_FRAME, 2, 0, 0, 1, 0xFFFFFFFF), ff.LimitError, r"max_payload"),
    ("control", header(ref.CONTROL_FRAME, 2, 0, 0, 8, 5), ff.UnknownKindError, "kind 8"),
    ("control", header(ref.CONTROL_FRAME, 4, 0, 0, 1, 5), ff.VersionMismatchError, "version 4"),
    ("control", header(ref.MUX_RECORD, 2, 0, 0, 1, 5), ff.BadMagicError, "0xf10d17d0"),
    ("mux", header(ref.MUX_RECORD, 1) + struct.pack("<BII", 1, 0, (1 << 30) + 1) + bytes(8), ff.LimitError,
     "frame_ceiling"),
    ("mux", header(ref.MUX_RECORD, 2) + bytes(17), ff.VersionMismatchError, "version 2"),
    ("mux", bytes(25), ff.BadMagicError, "0x0"),
    ("round", header(ref.MUX_RECORD, 1), ff.BadMagicError, "0xf10d17d0"),
    ("round", header(ref.ROUND_FRAME, 65537), ff.LimitError, r"65537.*65536 \(max_tensors\)"),
    ("round", header(ref.ROUND_FRAME, 1) + b"\2", ff.UnknownKindError, "kind 2"),
    ("round", struct.pack("<IIBd", ref.ROUND_FRAME, 1, 0, float("nan")), ff.TensorError, "weight.*nan"),
    ("round", struct.pack("<IIBd", ref.ROUND_FRAME, 1, 0, -1.0), ff.TensorError, r"weight.*-1\.0"),
    ("round", ROUND + struct.pack("<BBIQ", 0, 1, 1 << 28, (1 << 30) + 4), ff.LimitError, "frame_ceiling"),
    ("round", ROUND + struct.pack("<BBIQ", 0, 1, 1, (1 << 64) - 4), ff.LimitError, "frame_ceiling"),
])
@pytest.mark.parametrize("prefixed", [False, True], ids=["plain", "prefixed"])
def test_what_cannot_be_is_refused_from_its_header_alone(kind, start, error, text, prefixed):
    """No byte of what the header announces has come."""
    if kind == "mux" and prefixed:
        with pytest.raises(ValueError, match="never have a length prefix"):
            ff.FrameReader(CODEC, kind, prefixed=True)
        return
    start = struct.pack("<I", 1 << 30) + start if prefixed else start
    reader = ff.FrameReader(CODEC, kind, prefixed=prefixed)
    reader.feed(start)
    with pytest.raises(error, match=text):
        reader.next()
    reader = ff.FrameReader(CODEC, kind, prefixed=prefixed)
    reader.feed(start[:-1])
    assert reader.next() is None


@pytest.mark.parametrize("kind", ["control", "round"])
def test_a_prefix_above_the_ceiling_is_refused_at_once(kind):
    reader = ff.FrameReader(ff.Codec(SALT, frame_ceiling=1000), kind, prefixed=True)
    reader.feed(struct.pack("<I", 1001)[:3])
    assert reader.next() is None
    reader.feed(struct.pack("<I", 1001)[3:])
    with pytest.raises(ff.LimitError, match=r"1001 bytes is above the limit of 1000 \(frame_ceiling\)"):
        reader.next()


def test_limits_are_those_of_the_codec():
    codec = ff.Codec(SALT, max_payload=10)
    reader = ff.FrameReader(codec, "control")
    reader.feed(FRAME + CODEC.encode(ff.DashboardSetMetadata(1, "12345678"))[:24])
    assert reader.next() == HEARTBEAT
    with pytest.raises(ff.LimitError, match=r"11 bytes.*10"):
        reader.next()


def test_a_reader_holds_no_more_than_it_must(framing):
    item = some(framing[0], count=1)[0]
    frame, = frames_of([item], framing)
    pieces = [(frame * 3)[at:at + 40] for at in range(0, 3 * len(frame), 40)]
    reader = new(framing)

    def work(times):
        for _ in range(times):
            for piece in pieces:
                reader.feed(piece)
                for _ in reader:
                    pass

    tracemalloc.start()
    try:
        work(20)
        before = tracemalloc.get_traced_memory()[0]
        work(500)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 4 * len(frame) + 4096


@pytest.mark.parametrize("kind", ["Control", "", None, 1, "data"])
def test_kinds_that_are_none(kind):
    for make in (ff.FrameReader, ff.FrameWriter):
        with pytest.raises(ValueError, match="kind must be one of"):
            make(CODEC, kind)


@pytest.mark.parametrize("trailing", ["warn", None, True])
def test_trailing_that_is_none(framing, trailing):
    with pytest.raises(ValueError, match='"ignore" or "error"'):
        new(framing, trailing=trailing)


def test_writers_give_what_readers_take(framing):
    kind, prefixed = framing
    writer, reader = ff.FrameWriter(CODEC, kind, prefixed=prefixed), new(framing)
    items = some(kind, seed=56)
    for item, frame in zip(items, frames_of(items, framing), strict=True):
        written = writer.write(item)
        assert bytes(written) == frame
        reader.feed(written)
        assert as_oracle(reader.next()) == as_oracle(item)


def test_writers_refuse_what_the_codec_refuses(framing):
    kind, prefixed = framing
    writer = ff.FrameWriter(CODEC, kind, prefixed=prefixed)
    wrong = {
        "control": (ff.Heartbeat(-1, 0), None), "round": (ff.RoundFrame([], weight=-1.0), None),
        "mux": (ff.MuxRecord(ff.MuxKind.BROADCAST, 1), None),
    }[kind]
    with pytest.raises(ff.EncodeError):
        writer.write(wrong[0])
    for other in (wrong[1], ff.FrameReader, 3):
        with pytest.raises(TypeError):
            writer.write(other)
    with pytest.raises(ValueError, match="never have a length prefix"):
        ff.FrameWriter(CODEC, "mux", prefixed=True)
