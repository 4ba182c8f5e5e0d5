"""TensorLayout: its columns, and frames written and read by a layout kept from an earlier round."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
from conftest import SALT, golden_params
from round_support import CODEC, Forged, forge, frame_of, noise, numbers, numpy_holds, run_python, wire, words

import flodl_fast as ff

SHAPES = [(2, 3), (), (0, 4), (5,), (1, 1, 2, 1)]


def arrays(seed):
    return [noise(seed + i, *shape) for i, shape in enumerate(SHAPES)]


def zeros():
    return [np.zeros(shape, np.float32) for shape in SHAPES]


def columns(layout):
    return {name: getattr(layout, name).tolist() for name in ("dtype", "ndim", "shape", "nbytes", "offset")}


# Columns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [
    ff.TensorLayout.of,
    lambda tensors: ff.TensorLayout.of(iter(tensors)),
    lambda tensors: ff.TensorLayout.from_frame(CODEC, wire(tensors)),
], ids=["of arrays", "of an iterator", "from a frame"])
def test_columns(make):
    layout = make(arrays(1))
    assert columns(layout) == {
        "dtype": [0] * 5,
        "ndim": [2, 0, 2, 1, 4],
        "shape": [[2, 3, 1, 1], [1, 1, 1, 1], [0, 4, 1, 1], [5, 1, 1, 1], [1, 1, 2, 1]],
        "nbytes": [24, 4, 0, 20, 8],
        # A frame's first 17 bytes, then a header of 10 + 4 * ndim before each tensor's data.
        "offset": [17 + 18, 35 + 24 + 10, 69 + 4 + 18, 91 + 14, 105 + 20 + 26],
    }
    types = [(c, getattr(layout, c).dtype.str) for c in ("dtype", "ndim", "shape", "nbytes", "offset")]
    assert types == [("dtype", "|u1"), ("ndim", "|u1"), ("shape", "<u4"), ("nbytes", "<i8"), ("offset", "<i8")]
    assert (len(layout), layout.frame_size) == (5, len(wire(arrays(1))))
    assert repr(layout) == f"TensorLayout(5 tensors, a frame of {layout.frame_size} bytes)"


@pytest.mark.parametrize("case", golden_params("round"))
def test_columns_point_at_the_data_of_the_vectors(case):
    codec, raw = ff.Codec(case["salt"], case["revision"]), bytes.fromhex(case["bytes"])
    layout = ff.TensorLayout.from_frame(codec, raw)
    tensors = case["frame"]["tensors"]
    rows = zip(layout.dtype, layout.ndim, layout.shape, layout.nbytes, layout.offset, tensors, strict=True)
    for dtype, ndim, shape, nbytes, offset, tensor in rows:
        assert (dtype, shape[:ndim].tolist()) == (tensor["dtype"], tensor["shape"])
        assert (shape[ndim:] == 1).all()
        assert raw[offset:offset + nbytes].hex() == tensor["bytes"]
    assert layout.frame_size == len(raw)
    if all(numpy_holds(tensor["shape"]) for tensor in tensors):
        assert layout == ff.TensorLayout.of(frame_of(case["frame"]).tensors)


def test_no_tensors():
    layout = ff.TensorLayout.of([])
    assert layout == ff.TensorLayout.from_frame(CODEC, wire([]))
    assert [getattr(layout, c).shape for c in ("dtype", "ndim", "shape", "nbytes", "offset")] == [
        (0,), (0,), (0, 0), (0,), (0,),
    ]
    raw = layout.encode(CODEC, [], ff.RoundKind.CONTROL, 1.0)
    assert raw == wire([], "Control", 1.0)
    assert layout.decode_into(CODEC, raw, []) == (ff.RoundKind.CONTROL, 1.0)


def test_columns_are_copies():
    layout = ff.TensorLayout.of(arrays(1))
    for name in ("dtype", "ndim", "shape", "nbytes", "offset"):
        getattr(layout, name)[...] = 9
    assert layout == ff.TensorLayout.of(arrays(1))
    assert layout.encode(CODEC, arrays(1), 0, 1.0) == wire(arrays(1), weight=1.0)


def test_equality():
    layout = ff.TensorLayout.of(arrays(1))
    assert layout == ff.TensorLayout.of(arrays(2))
    assert layout == ff.TensorLayout.of([a.copy("F").astype(">f4") for a in arrays(3)])
    for others in (arrays(1)[:-1], [*arrays(1), numbers()], arrays(1)[::-1], [*arrays(1)[:-1], noise(1, 2)]):
        assert layout != ff.TensorLayout.of(others)
    # The same bytes per header, split otherwise: (2,) and () against () and (2,).
    assert ff.TensorLayout.of([numbers(2), numbers()]) != ff.TensorLayout.of([numbers(), numbers(2)])
    assert layout != "layout"
    with pytest.raises(TypeError, match="unhashable"):
        hash(layout)


def test_a_layout_outlives_its_frame():
    raw = bytearray(wire(arrays(1)))
    layout = ff.TensorLayout.from_frame(CODEC, raw)
    raw[:] = b"\xff" * len(raw)
    raw.clear()
    assert layout == ff.TensorLayout.of(arrays(1))
    assert layout.encode(CODEC, arrays(4), 1, 2.0) == wire(arrays(4), "Control", 2.0)


@pytest.mark.parametrize("bad", [np.zeros(3), [1.0], None, np.ma.masked_array(numbers(2))])
def test_of_takes_float32_only(bad):
    with pytest.raises(TypeError, match="tensor 1: "):
        ff.TensorLayout.of([numbers(2), bad])


def test_a_layout_of_many_tensors():
    tensors = [numbers(i % 5) for i in range(5000)]
    layout = ff.TensorLayout.of(tensors)
    assert layout == ff.TensorLayout.from_frame(CODEC, wire(tensors))
    assert layout.nbytes.tolist() == [4 * (i % 5) for i in range(5000)]
    assert (np.diff(layout.offset) == layout.nbytes[:-1] + 14).all()


# Kept between rounds -------------------------------------------------------------------------------------


def test_rounds_through_a_kept_layout():
    layout, into = ff.TensorLayout.of(arrays(0)), zeros()
    kinds = list(ff.RoundKind)
    for turn in range(6):
        kind, weight = kinds[turn % 2], turn / 4
        raw = layout.encode(CODEC, arrays(10 * turn), kind, weight)
        assert raw == wire(arrays(10 * turn), kind.name.title(), weight)
        given = layout.decode_into(CODEC, raw, into)
        assert given == (kind, weight)
        assert type(given[0]) is ff.RoundKind
        assert [words(a) for a in into] == [words(a) for a in arrays(10 * turn)]


def test_a_layout_serves_any_codec():
    layout, other = ff.TensorLayout.of(arrays(0)), ff.Codec("ff" * 16)
    raw = layout.encode(other, arrays(1), 0, 1.0)
    assert raw == other.encode_round(ff.RoundFrame(arrays(1), weight=1.0))
    assert layout.decode_into(other, raw, zeros()) == (0, 1.0)
    into = zeros()
    with pytest.raises(ff.AuthenticationError):
        layout.decode_into(CODEC, raw, into)
    assert not any(a.any() for a in into)


def test_encode_into_a_buffer():
    layout = ff.TensorLayout.of(arrays(0))
    raw = wire(arrays(1), weight=1.0)
    room = bytearray(b"\xee" * (len(raw) + 4))
    assert layout.encode(CODEC, arrays(1), 0, 1.0, out=room) == len(raw)
    assert room == raw + b"\xee" * 4
    with memoryview(room)[4:] as part:
        assert layout.encode(CODEC, arrays(2), 0, 1.0, out=part) == len(raw)
    assert room == raw[:4] + wire(arrays(2), weight=1.0)


def test_strided_and_swapped_arrays():
    layout = ff.TensorLayout.of(arrays(0))
    odd = [a.copy("F").astype(">f4") for a in arrays(1)]
    raw = wire(arrays(1))
    assert layout.encode(CODEC, odd, 0, 0.0) == raw
    into = [a.copy("F").astype(">f4") for a in zeros()]
    layout.decode_into(CODEC, raw, into)
    assert [words(a) for a in into] == [words(a) for a in arrays(1)]


# Inside a mux record --------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [ff.MuxKind.HOST_FRAME, ff.MuxKind.BROADCAST])
@pytest.mark.parametrize("sizes", [[], [0, 3], [5, 16_384, 3], [100_001], [7] * 3000], ids=lambda s: str(s)[:24])
def test_a_record_is_written_and_signed_with_its_frame(record, sizes):
    tensors = [noise(i, size) for i, size in enumerate(sizes)]
    layout = ff.TensorLayout.of(tensors)
    for scale in (None, 0.5):
        frame = layout.encode(CODEC, tensors, 0, 2.0, scale=scale)
        expected = CODEC.encode_mux(ff.MuxRecord(record, 0, frame))
        room = bytearray(len(expected) + 3)
        assert layout.encode_record(CODEC, tensors, 0, 2.0, record, room, scale=scale) == len(expected)
        assert room == expected + bytes(3)
    strided = [np.repeat(t, 2)[::2] for t in tensors]
    assert layout.encode_record(CODEC, strided, 0, 2.0, record, room) == len(expected)
    assert CODEC.decode_mux(room).payload == layout.encode(CODEC, tensors, 0, 2.0)


def test_a_record_that_does_not_fit_is_not_begun():
    layout, room = ff.TensorLayout.of(arrays(1)), bytearray(25 + ff.TensorLayout.of(arrays(1)).frame_size - 1)
    with pytest.raises(ff.EncodeError, match=r"room|bytes"):
        layout.encode_record(CODEC, arrays(1), 0, 1.0, ff.MuxKind.HOST_FRAME, room)
    small = ff.Codec(SALT, frame_ceiling=layout.frame_size - 1)
    with pytest.raises(ff.EncodeError, match=r"frame_ceiling\) in a mux record"):
        layout.encode_record(small, arrays(1), 0, 1.0, ff.MuxKind.HOST_FRAME, bytearray(500))
    assert not any(room)


@pytest.mark.parametrize(("record", "error"), [
    (0, ff.EncodeError), (ff.MuxKind.DATA, ff.EncodeError), (5, ff.EncodeError), (300, ff.EncodeError),
    (None, TypeError), (True, TypeError), (3.0, TypeError), ("HOST_FRAME", TypeError),
], ids=str)
def test_a_record_of_another_kind_is_not_begun(record, error):
    layout = ff.TensorLayout.of(arrays(1))
    room = bytearray(25 + layout.frame_size)
    with pytest.raises(error, match=r"record: expected an integer"):
        layout.encode_record(CODEC, arrays(1), 0, 1.0, record, room)
    assert not any(room)


def test_a_record_goes_into_a_buffer():
    with pytest.raises(TypeError, match="bytes-like"):
        ff.TensorLayout.of(arrays(1)).encode_record(CODEC, arrays(1), 0, 1.0, ff.MuxKind.HOST_FRAME, None)


@pytest.mark.parametrize("strides", [1, 2])
def test_a_record_is_not_written_over_its_own_arrays(strides):
    layout = ff.TensorLayout.of([numbers(2)])
    room = bytearray(25 + layout.frame_size)
    inside = np.frombuffer(room, np.float32, 2 * strides)[::strides]  # within the record's header
    inside[:] = 7.0
    before = bytes(room)
    with pytest.raises(ValueError, match="tensor 0: the array lies in the frame's own buffer"):
        layout.encode_record(CODEC, [inside], 0, 1.0, ff.MuxKind.HOST_FRAME, room)
    assert room == before


KINDS = [ff.MuxKind.HOST_FRAME, ff.MuxKind.BROADCAST]


@pytest.mark.parametrize("record", KINDS)
@pytest.mark.parametrize("sizes", [[], [0, 3], [5, 16_384, 3], [100_001], [7] * 3000], ids=lambda s: str(s)[:24])
@pytest.mark.parametrize("after", [b"", bytes(2), bytes(300)], ids=len)
def test_a_record_is_opened_with_its_frame(record, sizes, after):
    tensors = [noise(i, size) for i, size in enumerate(sizes)]
    layout = ff.TensorLayout.of(tensors)
    raw = CODEC.encode_mux(ff.MuxRecord(record, 0, layout.encode(CODEC, tensors, 1, 2.0) + after))
    given, into = [[np.ones_like(tensor) for tensor in tensors] for _ in range(2)]
    frames = [CODEC.decode_round(raw + b"more", record=record, **how) for how in ({}, {"copy": False}, {"out": given})]
    frames.append(ff.RoundFrame(into, *layout.decode_into(CODEC, raw, into, record=record)))
    for frame in frames:
        assert (frame.kind, frame.weight) == (ff.RoundKind.CONTROL, 2.0)
        assert [words(tensor) for tensor in frame.tensors] == [words(tensor) for tensor in tensors]
    for buffer in (raw, raw + b"more"):
        extra = (buffer != raw) or len(after)
        if not extra:
            assert layout.decode_into(CODEC, buffer, into, record=record, trailing="error") == (1, 2.0)
            continue
        with pytest.raises(ff.TrailingDataError, match=f"^{4 if buffer != raw else extra} extra bytes after a "):
            layout.decode_into(CODEC, buffer, into, record=record, trailing="error")


def refused(call, *args, **options):
    """The class and the text of what a call raises."""
    with pytest.raises(ff.DecodeError) as caught:
        call(*args, **options)
    return type(caught.value), str(caught.value)


def damaged_records():
    """Records around a frame of arrays(1): damaged, or around a damaged frame; what should be found."""
    frame = ff.TensorLayout.of(arrays(1)).encode(CODEC, arrays(1), 0, 2.0)
    seal = partial(CODEC.seal_record, ff.MuxKind.BROADCAST, 0)
    whole = seal(frame)
    for i in range(len(whole)):
        yield whole[:i] + bytes([whole[i] ^ 0x40]) + whole[i + 1 :]
        yield whole[:i]
    for i in range(len(frame)):
        yield seal(frame[:i] + bytes([frame[i] ^ 0x40]) + frame[i + 1 :])
        yield seal(frame[:i])
        yield seal(frame[:i] + bytes([frame[i] ^ 1]) + frame[i + 1 :] + b"more")


def test_a_damaged_record_is_refused_as_record_and_frame_one_by_one_are():
    layout = ff.TensorLayout.of(arrays(1))
    into = arrays(9)
    seen = set()
    for raw in damaged_records():
        expected = refused(lambda raw: CODEC.decode_round(CODEC.open_record(raw)[2]), raw)
        assert refused(CODEC.decode_round, raw, record=ff.MuxKind.BROADCAST) == expected
        expected = refused(lambda raw: layout.decode_into(CODEC, CODEC.open_record(raw)[2], into), raw)
        assert refused(layout.decode_into, CODEC, raw, into, record=ff.MuxKind.BROADCAST) == expected
        seen.add(expected[0])
    assert [words(a) for a in into] == [words(a) for a in arrays(9)]
    assert seen >= {ff.AuthenticationError, ff.BadMagicError, ff.LimitError, ff.TruncatedError, ff.UnknownKindError}


@pytest.mark.parametrize("record", KINDS)
def test_a_record_of_another_kind_is_refused(record):
    layout = ff.TensorLayout.of(arrays(1))
    other = KINDS[1 - KINDS.index(record)]
    raw = CODEC.seal_record(other, 0, layout.encode(CODEC, arrays(1), 0, 2.0))
    into = arrays(9)
    with pytest.raises(ff.UnknownKindError, match=f"a {other.name} record where a {record.name} one was expected"):
        layout.decode_into(CODEC, raw, into, record=record)
    with pytest.raises(ValueError, match="7 is not a valid MuxKind"):
        layout.decode_into(CODEC, raw, into, record=7)
    assert [words(a) for a in into] == [words(a) for a in arrays(9)]


# Parts, to send without joining --------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [
    [], [0], [5], [16_384], [100_000], [16_383, 16_384, 16_385], [3, 50_000, 0, 2, 50_000, 50_000, 7], [20_000] * 3,
], ids=str)
def test_parts_join_to_the_frame(sizes):
    tensors = [noise(i, size) for i, size in enumerate(sizes)]
    layout = ff.TensorLayout.of(tensors)
    for kind in ff.RoundKind:
        parts = layout.parts(CODEC, tensors, kind, 0.5)
        assert b"".join(parts) == wire(tensors, kind.name.title(), 0.5)


def test_large_tensors_of_parts_are_the_arrays_own_memory():
    large, small, locked = noise(1, 300, 100), noise(2, 10), noise(3, 50_000)
    locked.flags.writeable = False
    tensors = [small, large, locked, large]
    parts = ff.TensorLayout.of(tensors).parts(CODEC, tensors, 0, 1.0)
    shared = [next((i for i, t in enumerate(tensors) if np.shares_memory(np.asarray(part), t)), None) for part in parts]
    assert shared == [None, 1, None, 2, None, 1, None]
    assert b"".join(parts) == wire(tensors, weight=1.0)


@pytest.mark.parametrize("change", [
    lambda a: a.T, lambda a: a.astype(">f4"), lambda a: np.asfortranarray(a), lambda a: np.broadcast_to(a[0], a.shape),
    lambda a: np.frombuffer(b"x" + a.tobytes(), np.float32, a.size, 1).reshape(a.shape), lambda a: a[::-1, ::-1],
], ids=["transposed", "big-endian", "Fortran order", "broadcast", "unaligned", "backwards"])
def test_parts_of_arrays_that_cannot_be_sent_as_they_are(change):
    tensors = [noise(1, 3), change(noise(2, 200, 200)), noise(3, 50_000), change(noise(4, 2, 2))]
    assert b"".join(ff.TensorLayout.of(tensors).parts(CODEC, tensors, 0, 1.0)) == wire(tensors, weight=1.0)


def test_parts_outlive_layout_and_list():
    tensors = [noise(1, 40_000), noise(2, 4)]
    parts = ff.TensorLayout.of(tensors).parts(CODEC, tensors, 0, 1.0)
    right = wire(tensors, weight=1.0)
    tensors.clear()
    assert b"".join(parts) == right


@pytest.mark.parametrize(("arguments", "codec", "error", "text"), [
    (([noise(0, 3), noise(0, 40_001)], 0, 1.0), CODEC, ff.TensorError, r"tensor 1: .*\(40000,\).*\(40001,\)"),
    (([noise(0, 3)], 0, 1.0), CODEC, ff.TensorError, r"2.*1"),
    (([noise(0, 3), np.zeros(40_000)], 0, 1.0), CODEC, TypeError, "tensor 1: .*float64"),
    (([noise(0, 3), noise(0, 40_000)], 2, 1.0), CODEC, ff.EncodeError, "kind"),
    (([noise(0, 3), noise(0, 40_000)], 0, -1.0), CODEC, ff.EncodeError, "weight"),
    (([noise(0, 3), noise(0, 40_000)], 0, "1"), CODEC, TypeError, "weight"),
    (([noise(0, 3), noise(0, 40_000)], 0, 1.0), ff.Codec(SALT, max_tensors=1), ff.EncodeError, "max_tensors"),
    (([noise(0, 3), noise(0, 40_000)], 0, 1.0), ff.Codec(SALT, frame_ceiling=99), ff.EncodeError, "frame_ceiling"),
], ids=["shape", "count", "dtype", "kind", "weight", "weight's type", "max_tensors", "frame_ceiling"])
def test_parts_check_what_encode_checks(arguments, codec, error, text):
    layout = ff.TensorLayout.of([noise(0, 3), noise(0, 40_000)])
    for write in (layout.parts, layout.encode):
        with pytest.raises(error, match=text):
            write(codec, *arguments)


# Mismatches ----------------------------------------------------------------------------------------------

# What becomes of the arrays, and how an error tells them from those of SHAPES: tensor, right and wrong.
MISMATCHES = {
    "too few": (lambda a: a[:-1], None, "5", "4"),
    "too many": (lambda a: [*a, np.zeros((), np.float32)], None, "5", "6"),
    "transposed": (lambda a: [a[0].T, *a[1:]], 0, "(2, 3)", "(3, 2)"),
    "flat": (lambda a: [a[0].ravel(), *a[1:]], 0, "(2, 3)", "(6,)"),
    "one more axis": (lambda a: [*a[:3], a[3][None], a[4]], 3, "(5,)", "(1, 5)"),
    "scalar as vector": (lambda a: [a[0], a[1][None], *a[2:]], 1, "()", "(1,)"),
    "another empty": (lambda a: [*a[:2], noise(0, 4, 0), *a[3:]], 2, "(0, 4)", "(4, 0)"),
    "larger": (lambda a: [*a[:3], np.zeros(6, np.float32), a[4]], 3, "(5,)", "(6,)"),
}


def told(tensor, first, second):
    """The pattern of an error that names the tensor and then both, in this order."""
    where = "" if tensor is None else f"tensor {tensor}: "
    return f"{where}.*{re.escape(first)}.*{re.escape(second)}"


@pytest.mark.parametrize(("change", "tensor", "right", "wrong"), MISMATCHES.values(), ids=MISMATCHES)
def test_arrays_of_another_layout_are_refused(change, tensor, right, wrong):
    layout, room, into = ff.TensorLayout.of(arrays(0)), bytearray(500), change(zeros())
    for out in (None, room):
        with pytest.raises(ff.TensorError, match=told(tensor, right, wrong)):
            layout.encode(CODEC, change(arrays(1)), 0, 1.0, out=out)
    with pytest.raises(ff.TensorError, match=told(tensor, right, wrong)):
        layout.decode_into(CODEC, wire(arrays(1)), into)
    assert not any(room)
    assert not any(a.any() for a in into)


@pytest.mark.parametrize(("change", "tensor", "right", "wrong"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_frame_of_another_layout_is_refused(change, tensor, right, wrong):
    layout = ff.TensorLayout.of(change(arrays(0)))
    for into in (change(zeros()), zeros()):
        with pytest.raises(ff.TensorError, match=told(tensor, right, wrong)):
            layout.decode_into(CODEC, wire(arrays(1)), into)
        assert not any(a.any() for a in into)


def test_a_mismatch_gives_both_shapes():
    layout = ff.TensorLayout.of([numbers(2), numbers(2, 3)])
    with pytest.raises(ff.TensorError, match=r"tensor 1: the frame has shape \(3, 2\), the layout \(2, 3\)"):
        layout.decode_into(CODEC, wire([numbers(2), numbers(3, 2)]), [np.zeros(2, "f4"), np.zeros((2, 3), "f4")])


@pytest.mark.parametrize(("change", "error"), [
    ({"magic": 1}, ff.BadMagicError),
    ({"count": 4}, ff.AuthenticationError),
    ({"count": 6}, ff.TruncatedError),
    ({"count": 65_537}, ff.LimitError),
    ({"kind": 2}, ff.UnknownKindError),
    ({"weight": float("nan")}, ff.TensorError),
    ({"weight": -1.0}, ff.TensorError),
], ids=str)
def test_decode_into_checks_the_first_bytes_of_a_frame_that_fits(change, error):
    layout, into = ff.TensorLayout.of(arrays(0)), zeros()
    raw = forge(*(Forged(a.shape, words(a)) for a in arrays(1)), **change)
    with pytest.raises(error):
        layout.decode_into(CODEC, raw, into)
    assert not any(a.any() for a in into)


@pytest.mark.parametrize(("change", "error", "text"), [
    ({"dtype": 1}, ff.TensorError, "tensor 3: dtype 1"),
    ({"dtype": 7}, ff.TensorError, "tensor 3: dtype 7"),
    ({"data": bytes(16)}, ff.TensorError, "tensor 3: .*20.*16"),
    ({"nbytes": 1 << 31}, ff.LimitError, "tensor 3: .*frame_ceiling"),
    ({"nbytes": 1 << 29}, ff.TruncatedError, "tensor 4"),
])
def test_decode_into_checks_the_tensors_of_a_frame_that_does_not_fit(change, error, text):
    layout, into = ff.TensorLayout.of(arrays(0)), zeros()
    tensors = [Forged(a.shape, words(a)) for a in arrays(1)]
    tensors[3] = tensors[3]._replace(**change)
    with pytest.raises(error, match=text):
        layout.decode_into(CODEC, forge(*tensors), into)
    assert not any(a.any() for a in into)


def test_limits_of_the_codec_hold_for_a_kept_layout():
    layout, raw = ff.TensorLayout.of(arrays(0)), wire(arrays(0))
    for codec, setting in ((ff.Codec(SALT, max_tensors=4), "max_tensors"),
                           (ff.Codec(SALT, frame_ceiling=55), "frame_ceiling")):
        into, room = zeros(), bytearray(500)
        with pytest.raises(ff.EncodeError, match=setting):
            layout.encode(codec, arrays(1), 0, 1.0, out=room)
        with pytest.raises(ff.LimitError, match=setting):
            layout.decode_into(codec, raw, into)
        with pytest.raises(ff.LimitError, match=setting):
            ff.TensorLayout.from_frame(codec, raw)
        assert not any(room)
        assert not any(a.any() for a in into)
    exact = ff.Codec(SALT, max_tensors=5, frame_ceiling=56)
    assert layout.decode_into(exact, layout.encode(exact, arrays(1), 0, 1.0), zeros()) == (0, 1.0)


@pytest.mark.parametrize(("kind", "weight", "error"), [
    (2, 1.0, ff.EncodeError), ("Model", 1.0, ff.EncodeError), (True, 1.0, ff.EncodeError), (None, 1.0, ff.EncodeError),
    (0, -1.0, ff.EncodeError), (0, float("nan"), ff.EncodeError), (0, float("inf"), ff.EncodeError),
    (0, "1", TypeError), (0, True, TypeError), (0, None, TypeError),
])
def test_encode_checks_kind_and_weight(kind, weight, error):
    layout, room = ff.TensorLayout.of(arrays(0)), bytearray(500)
    with pytest.raises(error):
        layout.encode(CODEC, arrays(0), kind, weight, out=room)
    assert not any(room)


def test_encode_needs_room_it_may_write_to():
    layout = ff.TensorLayout.of(arrays(0))
    room = bytearray(layout.frame_size - 1)
    with pytest.raises(ff.EncodeError, match=f"{layout.frame_size}.*{layout.frame_size - 1}"):
        layout.encode(CODEC, arrays(0), 0, 1.0, out=room)
    assert not any(room)
    with pytest.raises(TypeError, match="read-only"):
        layout.encode(CODEC, arrays(0), 0, 1.0, out=bytes(500))


def test_codec_and_layout_are_checked_by_type():
    # In a process of its own: None passes for an instance where a compiled function does not forbid it.
    done = run_python("""
import numpy as np, flodl_fast as ff
arrays = [np.zeros(3, np.float32)]
layout, raw = ff.TensorLayout.of(arrays), ff.Codec(bytes(16)).encode_round(ff.RoundFrame(arrays))
for other in (bytes(16), layout, None):
    for call in (lambda: layout.encode(other, arrays, 0, 1.0), lambda: layout.parts(other, arrays, 0, 1.0),
                 lambda: layout.decode_into(other, raw, arrays), lambda: ff.TensorLayout.from_frame(other, raw)):
        try:
            call()
        except TypeError:
            print("refused")
""")
    assert (done.returncode, done.stdout.split()) == (0, ["refused"] * 12), done.stderr


@pytest.mark.parametrize("targets", [
    lambda: [*zeros()[:-1], np.broadcast_to(numbers(), (1, 1, 2, 1))],
    lambda: [*zeros()[:-1], np.frombuffer(bytes(8), np.float32).reshape(1, 1, 2, 1)],
], ids=["broadcast", "of bytes"])
def test_decode_into_needs_writable_arrays(targets):
    into = targets()
    with pytest.raises(ValueError, match=r"tensor 4: .*read-only"):
        ff.TensorLayout.of(arrays(0)).decode_into(CODEC, wire(arrays(1)), into)
    assert not any(a.any() for a in into[:-1])


# Scaled on the way ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 3.0, 0.1, 2.5e-39, np.float64(1) / 3, 0.0, -0.0, float("inf")])
def test_values_are_scaled_in_float32_on_their_way_into_the_frame(scale):
    plain = noise(21, 40_000)
    strided, swapped = noise(22, 900).reshape(30, 30).T[::-1], noise(23, 50).astype(">f4")
    tensors = [plain, strided, swapped, np.float32(7).reshape(()), np.zeros((0, 3), np.float32)]
    layout = ff.TensorLayout.of(tensors)
    with np.errstate(all="ignore"):
        scaled = [np.multiply(t, np.float32(scale), dtype=np.float32) for t in tensors]
        got = layout.encode(CODEC, tensors, 0, 1.0, scale=scale)
    assert got == layout.encode(CODEC, scaled, 0, 1.0)
    assert words(plain) == words(noise(21, 40_000))


def test_a_scale_that_is_no_number_is_refused():
    layout, room = ff.TensorLayout.of(arrays(0)), bytearray(500)
    with pytest.raises(TypeError):
        layout.encode(CODEC, arrays(0), 0, 1.0, out=room, scale="2")
    assert not any(room)
