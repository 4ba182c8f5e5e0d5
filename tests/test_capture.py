"""The capture format: what is written is read back, and whatever is damaged is told."""

from __future__ import annotations

import io
import os
import struct
import time

import pytest

import flodl_fast as ff
from flodl_fast.capture import CaptureWriter, Direction, Source, read_capture

HEADER = b"\x89flodl\r\n\x01\x030.6"
FRAMES = [
    (b"\xc4\x17\x0d\xf1abc", "rank 0 control", Direction.UP, 1_700_000_000_000_000_001),
    (b"", "", Direction.DOWN, 0),
    (bytes(300), "é", Direction.DOWN, 2**64 - 1),
]


def record(data, leg, direction, time_ns):
    """A record as docs/cli.md lays it out."""
    name = leg.encode()
    return struct.pack("<BBIQ", direction, len(name), len(data), time_ns) + name + data


def written(frames=FRAMES):
    file = io.BytesIO()
    writer = CaptureWriter(file)
    for data, leg, direction, time_ns in frames:
        writer.write(data, leg, direction, time_ns=time_ns)
    return file.getvalue()


def read(data):
    return [(bytes(r.data), r.leg, r.direction, r.time_ns) for r in read_capture(io.BytesIO(data))]


def test_layout():
    assert written() == HEADER + b"".join(record(*frame) for frame in FRAMES)


def test_what_is_written_is_read():
    data = written()
    assert read(data) == FRAMES
    for found in read_capture(io.BytesIO(data)):
        assert data[found.offset : found.offset + len(found.data)] == found.data
        assert found.revision == "0.6"


def test_a_capture_without_frames():
    assert read(written([])) == []
    assert read(b"") == []


def test_any_buffer_is_a_frame():
    words = memoryview(struct.pack("<2I", 1, 2)).cast("I")
    file = io.BytesIO()
    writer = CaptureWriter(file, revision=ff.Revision.V0_6)
    for data in (b"ab", bytearray(b"cd"), words):
        writer.write(data, "leg", 1)
    assert [data for data, *_ in read(file.getvalue())] == [b"ab", b"cd", words.tobytes()]


def test_time_is_now_unless_given():
    before = time.time_ns()
    file = io.BytesIO()
    CaptureWriter(file).write(b"x", "leg", Direction.UP)
    (found,) = read_capture(io.BytesIO(file.getvalue()))
    assert before <= found.time_ns <= time.time_ns()


def test_captures_are_appended_to_and_joined(tmp_path):
    path = tmp_path / "run.capture"
    for frame in FRAMES:
        with path.open("ab") as file:
            data, leg, direction, time_ns = frame
            CaptureWriter(file).write(data, leg, direction, time_ns=time_ns)
    assert read(path.read_bytes()) == FRAMES
    assert read(written() + written()) == FRAMES * 2


def test_every_cut_is_found():
    data = written()
    ends, starts = {len(HEADER)}, [0, len(HEADER)]
    for frame in FRAMES:
        starts.append(starts[-1] + len(record(*frame)))
        ends.add(starts[-1])
    for cut in range(1, len(data)):
        found, error = [], None
        try:
            found.extend(read_capture(io.BytesIO(data[:cut])))
        except ff.TruncatedError as caught:
            error = caught
        if cut in ends:
            assert error is None
        else:
            assert error.offset == max(start for start in starts if start < cut)


def test_frames_before_a_fault_are_given():
    reader = read_capture(io.BytesIO(written()[:-1]))
    assert [next(reader).data, next(reader).data] == [FRAMES[0][0], b""]
    with pytest.raises(ff.TruncatedError, match="ends inside a frame, after 299 of 300 bytes"):
        next(reader)


@pytest.mark.parametrize(
    ("data", "error", "offset"),
    [
        (b"\xc4\x17\x0d\xf1" + bytes(20), ff.BadMagicError, 0),
        (HEADER.replace(b"\r\n", b"\n\n") + bytes(20), ff.BadMagicError, 0),
        (HEADER[:8] + b"\x02" + HEADER[9:], ff.VersionMismatchError, 0),
        (HEADER + b"\x02" + bytes(13), ff.UnknownKindError, len(HEADER)),
        (HEADER + record(*FRAMES[1]) + HEADER[:8] + b"\x07\x00", ff.VersionMismatchError, len(HEADER) + 14),
    ],
)
def test_what_is_no_capture(data, error, offset):
    with pytest.raises(error) as caught:
        list(read_capture(io.BytesIO(data)))
    assert caught.value.offset == offset


def test_a_huge_length_is_not_allocated():
    data = HEADER + struct.pack("<BBIQ", 0, 0, 0xFFFFFFFF, 0) + b"abc"
    with pytest.raises(ff.TruncatedError, match="inside a frame, after 3 of 4294967295 bytes"):
        list(read_capture(io.BytesIO(data)))


def test_a_name_that_is_not_text_is_shown_escaped():
    data = HEADER + struct.pack("<BBIQ", 0, 2, 0, 0) + b"\xff\x00"
    assert read(data) == [(b"", "\\xff\x00", Direction.UP, 0)]


@pytest.mark.parametrize(
    ("leg", "time_ns", "named"),
    [("x" * 256, 0, "got 256, 1 and 0"), ("x", -1, "got 1, 1 and -1"), ("x", 2**64, f"got 1, 1 and {2**64}")],
)
def test_what_a_record_cannot_hold(leg, time_ns, named):
    file = io.BytesIO()
    writer = CaptureWriter(file)
    with pytest.raises(ff.EncodeError, match=named):
        writer.write(b"f", leg, Direction.UP, time_ns=time_ns)
    assert file.getvalue() == HEADER


def test_wrong_direction_and_revision():
    with pytest.raises(ValueError, match="2 is not a valid Direction"):
        CaptureWriter(io.BytesIO()).write(b"f", "leg", 2)
    with pytest.raises(ValueError, match=r"supported: '0\.6'"):
        CaptureWriter(io.BytesIO(), revision="0.5")


def test_a_source_waits_for_no_more_than_it_needs():
    reading, writing = os.pipe()
    with open(reading, "rb") as file, open(writing, "wb", buffering=0) as pipe:
        source = Source(file)
        pipe.write(b"abcdef")
        assert source.look(2).startswith(b"abc")
        assert source.take(4, "x") == b"abcd"
        assert source.offset == 4
        assert source.take(2, "x") == b"ef"
        pipe.write(b"gh")
        assert source.look(1) == b"gh"
        pipe.close()
        assert source.look(100) == b"gh"
        with pytest.raises(ff.TruncatedError, match="inside x, after 2 of 3 bytes"):
            source.take(3, "x")
