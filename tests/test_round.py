"""Round frames in and out of bytes: vectors, the ways to decode, checks in order, limits, failures, memory, threads."""

from __future__ import annotations

import array
import ctypes
import mmap
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import reference as ref
from conftest import SALT, golden, golden_params, same
from round_support import (
    BF16,
    CODEC,
    WAYS,
    Forged,
    forge,
    form_of,
    frame_of,
    measures_memory,
    noise,
    numbers,
    numpy_holds,
    run_python,
    wire,
    words,
    zeros_of,
)

import flodl_fast as ff

TENSORS = [numbers(2, 3), numbers(), numbers(0, 5), numbers(7, start=-3)]
FRAME = ff.RoundFrame(TENSORS, ff.RoundKind.CONTROL, 2.5)
RAW = wire(TENSORS, "Control", 2.5)
FILL = np.float32(-77.5)


def targets():
    """Arrays of the shapes of TENSORS, filled with what no tensor holds."""
    return [np.full(t.shape, FILL, np.float32) for t in TENSORS]


def untouched(arrays):
    return all((array == FILL).all() for array in arrays)


def equal(tensors, expected):
    return len(tensors) == len(expected) and all(
        t.shape == e.shape and t.dtype == np.float32 and words(t) == words(e)
        for t, e in zip(tensors, expected, strict=True)
    )


# Vectors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden_params("round"))
def test_vectors(case):
    codec, raw = ff.Codec(case["salt"], case["revision"]), bytes.fromhex(case["bytes"])
    frame = frame_of(case["frame"])
    assert codec.encode_round(frame) == raw
    room = bytearray(b"\xee" * (len(raw) + 9))
    assert codec.encode_round_into(frame, room, 4) == len(raw)
    assert room == b"\xee" * 4 + raw + b"\xee" * 5
    for options in ({}, {"copy": False}):
        decoded = codec.decode_round(raw, elided="keep", **options)
        assert same(form_of(decoded), case["frame"])
        assert codec.encode_round(decoded) == raw
    out = [np.ones(t.shape, BF16 if t.dtype in ("bf16", BF16) else np.float32) for t in frame.tensors]
    for options in ({}, {"copy": False}, {"out": out}):
        assert same(form_of(codec.decode_round(raw, **options)), zeros_of(case["frame"]))
    layout = ff.TensorLayout.from_frame(codec, raw)
    assert layout.encode(codec, frame.tensors, frame.kind, frame.weight) == raw


@pytest.mark.parametrize(("sent", "read"), [("0.7", "0.6"), ("0.8", "0.6"), ("0.8", "0.7")])
def test_frames_of_later_revisions_are_taken_or_refused(sent, read):
    outcomes = set()
    for case in golden("round", sent):
        codec, raw = ff.Codec(case["salt"], read), bytes.fromhex(case["bytes"])
        frame = frame_of(case["frame"])
        try:
            ref.decode_round(bytes.fromhex(case["salt"]), raw, revision=read)
        except ref.WireError:
            outcomes.add("refused")
            with pytest.raises(ff.TensorError, match=r"^tensor \d+: "):
                codec.decode_round(raw)
            with pytest.raises(ff.EncodeError, match=rf"^tensor \d+: revision {read} "):
                codec.encode_round(frame)
        else:
            outcomes.add("taken")
            assert same(form_of(codec.decode_round(raw)), case["frame"])
            assert codec.encode_round(frame) == raw
    assert outcomes == {"taken", "refused"}


# Ways to decode ------------------------------------------------------------------------------------------


def test_decode_copies_into_new_arrays():
    source = bytearray(RAW)
    frame = CODEC.decode_round(source)
    source[:] = bytes(len(source))
    assert (frame.kind, frame.weight, frame.realized) == (ff.RoundKind.CONTROL, 2.5, True)
    assert equal(frame.tensors, TENSORS)
    assert all(t.flags.aligned and t.flags.writeable and t.flags.owndata and t.dtype.isnative for t in frame.tensors)
    source.append(0)


def test_decode_out_fills_and_returns_the_arrays_given():
    into = targets()
    frame = CODEC.decode_round(RAW, out=into)
    assert equal(into, TENSORS)
    assert [id(t) for t in frame.tensors] == [id(t) for t in into]


def test_tensors_by_name_are_refused():
    for make in (ff.RoundFrame, ff.TensorLayout.of):
        with pytest.raises(TypeError, match=r"expected several tensors, got a dict of them: give its values\(\)"):
            make({"weight": np.zeros(3, np.float32)})


def test_decode_out_takes_any_iterable():
    into = targets()
    frame = CODEC.decode_round(RAW, out=iter(into))
    assert equal(into, TENSORS)
    assert equal(frame.tensors, TENSORS)


def test_views_share_the_buffer_and_cannot_be_written():
    source = bytearray(RAW)
    frame = CODEC.decode_round(source, copy=False)
    assert equal(frame.tensors, TENSORS)
    for tensor in frame.tensors:
        assert not tensor.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            tensor[...] = 0
    at = RAW.index(words(TENSORS[0]))
    source[at:at + 4] = struct.pack("<f", 99)
    assert frame.tensors[0][0, 0] == 99


def test_views_of_bytes_cannot_be_made_writable():
    for tensor in CODEC.decode_round(RAW, copy=False).tensors:
        with pytest.raises(ValueError, match="WRITEABLE"):
            tensor.flags.writeable = True


def test_views_say_whether_they_are_aligned():
    store = np.zeros(len(RAW) + 16, np.uint8)
    first = -store.ctypes.data % 8
    for offset in range(4):
        place = store[first + offset:][:len(RAW)]
        place[:] = np.frombuffer(RAW, np.uint8)
        tensor = CODEC.decode_round(place, copy=False).tensors[0]
        assert tensor.flags.aligned == (tensor.ctypes.data % 4 == 0) == (offset == 1)
        assert words(tensor) == words(TENSORS[0])


@pytest.mark.parametrize("make", [bytes, bytearray, lambda raw: np.frombuffer(bytearray(raw), np.uint8)],
                         ids=["bytes", "bytearray", "ndarray"])
def test_views_survive_the_deletion_of_frame_codec_and_buffer(make):
    codec, buffer = ff.Codec(SALT), make(wire([noise(1, 50_000)]))
    frame = codec.decode_round(buffer, copy=False)
    view = frame.tensors[0]
    part = view[10_000:20_000]
    del codec, buffer, frame, view
    rubbish = [bytearray(b"\xff" * 200_100) for _ in range(20)]
    assert words(part) == words(noise(1, 50_000)[10_000:20_000])
    assert len(rubbish) == 20


@pytest.mark.skipif(sys.version_info < (3, 12), reason="classes export buffers from Python 3.12 on")
def test_views_keep_the_memory_that_was_read():
    class Anew:
        """Gives other memory each time it is asked."""

        def __buffer__(self, flags):
            return memoryview(bytearray(wire([noise(1, 50_000)])))

    view = CODEC.decode_round(Anew(), copy=False).tensors[0]
    rubbish = [bytearray(b"\xff" * 200_100) for _ in range(20)]
    assert words(view) == words(noise(1, 50_000))
    assert len(rubbish) == 20


def test_a_bytearray_with_a_live_view_cannot_be_resized():
    source = bytearray(RAW)
    frame = CODEC.decode_round(source, copy=False)
    view = frame.tensors[3]
    del frame
    for resize in (lambda: source.append(0), source.clear, lambda: source.extend(b"12"), source.pop):
        with pytest.raises(BufferError):
            resize()
    assert source == RAW
    del view
    source.append(0)


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_leave_a_bytearray_free(way):
    source = bytearray(RAW)
    kept = WAYS[way](source, targets()) if way != "view" else None
    source.append(0)
    assert way == "view" or kept is not None


def buffers(raw):
    """The same bytes in every kind of contiguous buffer."""
    mapped = mmap.mmap(-1, len(raw))
    mapped[:] = raw
    wider = b"12345" + raw + b"67"
    return {
        "bytes": raw,
        "bytearray": bytearray(raw),
        "memoryview": memoryview(raw),
        "part of a memoryview": memoryview(wider)[5:-2],
        "signed memoryview": memoryview(raw).cast("b"),
        "array.array": array.array("B", raw),
        "ndarray": np.frombuffer(raw, np.uint8),
        "2-d ndarray": np.frombuffer(raw, np.uint8).reshape(1, -1),
        "ctypes": (ctypes.c_char * len(raw)).from_buffer_copy(raw),
        "mmap": mapped,
    }


@pytest.mark.parametrize("kind", buffers(RAW))
def test_every_kind_of_buffer_decodes(kind):
    buffer = buffers(RAW)[kind]
    assert equal(CODEC.decode_round(buffer).tensors, TENSORS)
    into = targets()
    assert CODEC.decode_round(buffer, out=into).weight == 2.5
    assert equal(into, TENSORS)
    views = CODEC.decode_round(buffer, copy=False).tensors
    assert equal(views, TENSORS)
    assert len(ff.TensorLayout.from_frame(CODEC, buffer)) == 4


@pytest.mark.parametrize("kind", [k for k, v in buffers(RAW).items() if not memoryview(v).readonly])
def test_every_kind_of_writable_buffer_is_encoded_into(kind):
    buffer = buffers(bytes(len(RAW)))[kind]
    assert CODEC.encode_round_into(FRAME, buffer) == len(RAW)
    assert bytes(buffer) == RAW


@pytest.mark.parametrize("way", WAYS)
def test_strided_buffers_are_refused(way):
    doubled = bytes(2 * len(RAW))
    with pytest.raises((BufferError, ValueError)):
        WAYS[way](memoryview(doubled)[::2], targets())
    with pytest.raises(TypeError):
        WAYS[way]("text", targets())


# Trailing bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [way for way in WAYS if way != "layout"])
def test_trailing_bytes(way):
    assert WAYS[way](RAW + b"\xde\xad", targets())
    assert WAYS[way](RAW, targets(), trailing="error")
    into = targets()
    with pytest.raises(ff.TrailingDataError, match=f"2 extra bytes .* {len(RAW)}"):
        WAYS[way](RAW + b"\xde\xad", into, trailing="error")
    assert untouched(into)
    with pytest.raises(ValueError, match="trailing"):
        WAYS[way](RAW, into, trailing="maybe")


# The order of checks (docs/wire.md §6) -------------------------------------------------------------------

# What can be wrong with a frame, in the order in which it is found.
FAULTS = [
    ({"magic": 0xF10D17C4}, ff.BadMagicError, "0xf10d17f1.*0xf10d17c4"),
    ({"count": 65_537}, ff.LimitError, "65537 tensors.*65536.*max_tensors"),
    ({"kind": 2}, ff.UnknownKindError, "kind 2"),
    ({"weight": -1.0}, ff.TensorError, "weight.*-1"),
    ({"nbytes": (1 << 30) + 1}, ff.LimitError, "tensor 0.*1073741825.*1073741824.*frame_ceiling"),
    ({"cut": 1}, ff.TruncatedError, "footer"),
    ({"flip": -1}, ff.AuthenticationError, "MAC"),
    ({"tail": b"\0"}, ff.TrailingDataError, "1 extra"),
    ({"dtype": 1}, ff.TensorError, r"tensor 0: dtype 1 \(bfloat16\).*0\.6"),
]


def faulty(faults):
    """A frame of one tensor with all these faults."""
    has = {name: value for change, _, _ in faults for name, value in change.items()}
    tensor = Forged((2,), bytes(8), has.get("dtype", 0), has.get("nbytes"))
    raw = bytearray(forge(tensor, **{k: has[k] for k in ("magic", "count", "kind", "weight") if k in has}))
    if "flip" in has:
        raw[has["flip"]] ^= 1
    if "cut" in has:
        return bytes(raw[:-has["cut"]])
    return bytes(raw) + has.get("tail", b"")


@pytest.mark.parametrize("first", range(len(FAULTS)), ids=[error.__name__ for _, error, _ in FAULTS])
def test_the_first_fault_in_the_documented_order_is_named(first):
    with pytest.raises(ff.DecodeError, match=FAULTS[first][2]) as caught:
        CODEC.decode_round(faulty(FAULTS[first:]), trailing="error")
    assert type(caught.value) is FAULTS[first][1]
    with pytest.raises(FAULTS[first][1]):
        CODEC.decode_round(faulty([FAULTS[first]]), trailing="error")


def test_a_frame_without_faults_decodes():
    assert words(CODEC.decode_round(faulty([]), trailing="error").tensors[0]) == bytes(8)


@pytest.mark.parametrize(("fault", "seen_at"), [(0, 8), (1, 8), (2, 9), (3, 17), (4, 31)],
                         ids=["magic", "count", "kind", "weight", "nbytes"])
def test_a_fault_is_found_as_soon_as_its_bytes_are_there(fault, seen_at):
    raw, (_, error, text) = faulty([FAULTS[fault]]), FAULTS[fault]
    reader = ff.FrameReader(CODEC, "round")
    reader.feed(raw[:seen_at])
    with pytest.raises(error, match=text):
        reader.next()
    with pytest.raises(error, match=text):
        CODEC.decode_round(raw[:seen_at])


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), float("-inf"), -1.0, -5e-324])
def test_a_weight_that_cannot_be(weight):
    with pytest.raises(ff.TensorError, match=f"weight.*{weight}"):
        CODEC.decode_round(forge(weight=weight))
    with pytest.raises(ff.EncodeError, match="weight"):
        CODEC.encode_round(ff.RoundFrame([], weight=weight))


@pytest.mark.parametrize("weight", [0.0, -0.0, 5e-324, 1.7976931348623157e308])
def test_a_weight_that_can_be(weight):
    raw = forge(weight=weight)
    assert CODEC.encode_round(ff.RoundFrame([], weight=weight)) == raw
    assert struct.pack("<d", CODEC.decode_round(raw).weight) == struct.pack("<d", weight)


# Truncation, damage and other failures: nothing of the caller's changes ---------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_truncated_at_every_byte(way):
    into = targets()
    for size in range(len(RAW)):
        with pytest.raises(ff.TruncatedError):
            WAYS[way](RAW[:size], into)
    assert untouched(into)


@pytest.mark.parametrize("way", WAYS)
def test_every_changed_byte_is_refused(way):
    into = targets()
    for at in range(len(RAW)):
        for bit in (0x01, 0x80):
            raw = bytearray(RAW)
            raw[at] ^= bit
            with pytest.raises(ff.DecodeError):
                WAYS[way](raw, into)
    assert untouched(into)


@pytest.mark.parametrize("way", WAYS)
def test_another_salt_is_refused(way):
    into = targets()
    raw = ref.encode_round(bytes(16), form_of(FRAME))
    with pytest.raises(ff.AuthenticationError) as caught:
        WAYS[way](raw, into)
    assert untouched(into)
    text = str(caught.value)
    assert RAW[-8:].hex() not in text
    assert SALT.hex() not in text


def last(change):
    """The frame's tensors in forged form, the last one changed."""
    forged = [Forged(t.shape, words(t)) for t in TENSORS]
    return forge(*forged[:-1], forged[-1]._replace(**change))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("raw", [
    last({"shape": (7, 2)}), last({"shape": (6,)}), last({"data": b""}), last({"dtype": 1}), last({"dtype": 255}),
    last({"shape": (1 << 31, 1 << 31), "data": b""}),
], ids=["twice the values", "fewer values", "no data", "bfloat16", "unknown dtype", "a product of 2**64"])
def test_a_last_tensor_that_cannot_be(way, raw):
    into = targets()
    with pytest.raises(ff.TensorError, match="tensor 3: "):
        WAYS[way](raw, into)
    assert untouched(into)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("way", ["out", "decode_into"])
@pytest.mark.parametrize(("change", "error", "text"), [
    (lambda into: into[:-1], ff.TensorError, "4.*3"),
    (lambda into: [*into, into[0].copy()], ff.TensorError, "4.*5"),
    (lambda into: [*into[:-1], np.zeros(8, np.float32)], ff.TensorError, r"tensor 3: .*\(7,\).*\(8,\)"),
    (lambda into: [*into[:-1], np.zeros((7, 1), np.float32)], ff.TensorError, r"tensor 3: .*\(7,\).*\(7, 1\)"),
    (lambda into: [*into[:-1], np.zeros((), np.float32)], ff.TensorError, r"tensor 3: .*\(7,\).*\(\)"),
    (lambda into: [*into[:-1], read_only(into[-1])], ValueError, "tensor 3: .*read-only"),
    (lambda into: [*into[:-1], np.broadcast_to(into[1], 7)], ValueError, "tensor 3: .*read-only"),
    (lambda into: [*into[:-1], np.zeros(7)], TypeError, "tensor 3: .*float64"),
    (lambda into: [*into[:-1], None], TypeError, "tensor 3: .*NoneType"),
    (lambda into: [*into[:-1], [0.0] * 7], TypeError, "tensor 3: .*list"),
], ids=["too few", "too many", "size", "ndim", "0-d", "read-only", "broadcast", "float64", "None", "list"])
def test_arrays_that_do_not_fit(way, change, error, text):
    into, layout = targets(), ff.TensorLayout.of(TENSORS)
    fill = {
        "out": lambda arrays: CODEC.decode_round(RAW, out=arrays),
        "decode_into": lambda arrays: layout.decode_into(CODEC, RAW, arrays),
    }[way]
    with pytest.raises(error, match=text):
        fill(change(into))
    assert untouched(into)


def test_keywords_that_contradict_or_are_unknown():
    into = targets()
    with pytest.raises(ValueError, match="copy=False and out="):
        CODEC.decode_round(RAW, copy=False, out=into)
    with pytest.raises(ValueError, match=r"elided.*ones"):
        CODEC.decode_round(RAW, elided="ones", out=into)
    with pytest.raises(ff.EncodeError, match=r"0\.6 cannot elide"):
        CODEC.encode_round(FRAME, elide=True)
    assert untouched(into)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("way", ["copy", "view", "out"])
def test_finite_names_the_tensor_and_the_element(way, value):
    tensors = [t.copy() for t in TENSORS]
    assert WAYS[way](wire(tensors), targets(), finite=True)
    tensors[3][5:] = value
    into = targets()
    with pytest.raises(ff.TensorError, match=f"tensor 3: {value} at element 5"):
        WAYS[way](wire(tensors), into, finite=True)
    assert untouched(into)
    assert words(WAYS[way](wire(tensors), into).tensors[3]) == words(tensors[3])


# Limits --------------------------------------------------------------------------------------------------


def test_tensor_count_limit():
    assert len(CODEC.decode_round(forge(*[Forged((0,))] * 65_536)).tensors) == 65_536
    with pytest.raises(ff.LimitError, match=r"65537.*65536.*max_tensors"):
        CODEC.decode_round(forge(*[Forged((0,))] * 65_537))
    small = ff.Codec(SALT, max_tensors=2)
    empty = [np.zeros(0, np.float32)]
    raw = small.encode_round(ff.RoundFrame(empty * 2))
    assert len(small.decode_round(raw).tensors) == 2
    with pytest.raises(ff.EncodeError, match=r"3 tensors.*2.*max_tensors"):
        small.encode_round(ff.RoundFrame(empty * 3))
    with pytest.raises(ff.LimitError, match=r"3 tensors.*2.*max_tensors"):
        small.decode_round(CODEC.encode_round(ff.RoundFrame(empty * 3)))
    large = ff.Codec(SALT, max_tensors=70_000)
    assert len(large.decode_round(large.encode_round(ff.RoundFrame(empty * 65_537))).tensors) == 65_537


def test_frame_ceiling_counts_the_data_of_all_tensors():
    small = ff.Codec(SALT, frame_ceiling=40)
    raw = small.encode_round(ff.RoundFrame([numbers(6), numbers(4)]))
    assert len(small.decode_round(raw).tensors) == 2
    over = ff.RoundFrame([numbers(6), numbers(0), numbers(5)])
    with pytest.raises(ff.EncodeError, match=r"44.*40.*frame_ceiling"):
        small.encode_round(over)
    with pytest.raises(ff.LimitError, match=r"tensor 2: .*40.*frame_ceiling"):
        small.decode_round(CODEC.encode_round(over))


@pytest.mark.parametrize("sizes", [
    [(1 << 30) + 1], [(1 << 64) - 1], [1 << 63], [(1 << 63) - 1], [8, (1 << 30) - 7], [8, (1 << 64) - 8],
])
def test_a_size_above_the_ceiling_needs_no_data_to_be_refused(sizes):
    *before, size = sizes
    tensors = [Forged((n // 4,), bytes(n)) for n in before]
    raw = forge(*tensors, Forged((2,), b"", nbytes=size))[:-8]
    with pytest.raises(ff.LimitError, match=f"tensor {len(before)}: .*{size}.*frame_ceiling"):
        CODEC.decode_round(raw)


@pytest.mark.parametrize("size", [1 << 30, (1 << 30) - 1])
def test_a_size_within_the_ceiling_is_truncated_without_its_data(size):
    with pytest.raises(ff.TruncatedError):
        CODEC.decode_round(forge(Forged((2,), bytes(8), nbytes=size)))


@pytest.mark.parametrize("ceiling", [(1 << 62) - 1, (1 << 63) - 1])
def test_sizes_near_the_largest_ceilings(ceiling):
    codec = ff.Codec(SALT, frame_ceiling=ceiling)
    assert equal(codec.decode_round(RAW).tensors, TENSORS)
    for size in (ceiling, ceiling - 40, ceiling // 2):
        for tensors in ([Forged((2,), nbytes=size)], [Forged((1,), bytes(4)), Forged((2,), nbytes=size - 4)]):
            with pytest.raises(ff.TruncatedError):
                codec.decode_round(forge(*tensors, Forged((1,), bytes(4))))


def test_sizes_that_wrap_64_bits_are_not_encoded():
    # Each array takes 2**62 bytes, at no memory; four of them sum to 2**64. In a process of its own, since an
    # encoder that trusts such a sum writes outside its buffer.
    done = run_python("""
import numpy as np, flodl_fast as ff
array = np.broadcast_to(np.float32(1), (1 << 30, 1 << 30))
for count in (1, 2, 3, 4, 5):
    for encode in (lambda: ff.Codec(bytes(16)).encode_round(ff.RoundFrame([array] * count)),
                   lambda: ff.Codec(bytes(16), frame_ceiling=(1 << 63) - 1).encode_round_into(
                       ff.RoundFrame([array] * count), bytearray(100)),
                   lambda: ff.TensorLayout.of([array] * count).encode(ff.Codec(bytes(16)), [array] * count, 0, 1.0)):
        try:
            encode()
        except ff.EncodeError as error:
            print(count, "refused")
""")
    assert (done.returncode, done.stdout.split("\n")[:-1]) == (0, [f"{n} refused" for n in (1, 2, 3, 4, 5)
                                                                   for _ in range(3)]), done.stderr


def test_a_dimension_beyond_32_bits_is_not_encoded():
    for shape in ((1 << 32,), (0, 1 << 32)):
        wide = np.broadcast_to(np.float32(1), shape)
        with pytest.raises(ff.EncodeError, match=f"tensor 1: dimension {len(shape) - 1} .*4294967296"):
            CODEC.encode_round(ff.RoundFrame([numbers(2), wide]))
    edge = np.broadcast_to(np.float32(1), (0, (1 << 32) - 1))
    assert CODEC.decode_round(CODEC.encode_round(ff.RoundFrame([edge]))).tensors[0].shape == edge.shape


# Shapes --------------------------------------------------------------------------------------------------

# 2**62 + 1 is the product of these two, so that their 4-byte elements take 4 bytes if 64 bits may wrap.
WRAPS_TO_ONE = ((1 << 31) - (1 << 16) + 1, (1 << 31) + (1 << 16) + 1)


@pytest.mark.parametrize(("shape", "data"), [
    ((65536,) * 4, b""), ((1 << 31, 1 << 31), b""), ((1 << 31, 1 << 31, 4), b""), ((1 << 16,) * 8, b""),
    ((2,) * 62, b""), (WRAPS_TO_ONE, bytes(4)), ((*WRAPS_TO_ONE, 3), bytes(12)), ((1 << 31,) * 255, b""),
], ids=lambda value: str(value)[:24])
@pytest.mark.parametrize("way", WAYS)
def test_a_product_that_wraps_64_bits_is_refused(way, shape, data):
    with pytest.raises(ff.TensorError, match=r"tensor 0: .*\(") as caught:
        WAYS[way](forge(Forged(shape, data)), [np.zeros((1,) * min(len(shape), 32), np.float32)])
    assert str(4 * np.prod(shape, dtype=object)) in str(caught.value)


@pytest.mark.parametrize("shape", [
    (0,), (0, 3), ((1 << 32) - 1, 0), (0, (1 << 32) - 1), (2, 0, (1 << 32) - 1), (0,) * 32, (1,) * 32,
    # From here on only some NumPy, or none, has such an array.
    (1,) * 64, (0,) * 64, (1,) * 65, (0,) * 65, (1,) * 255, (0,) * 255,
    ((1 << 32) - 1, (1 << 32) - 1, 0), (0, 65536, 65536, 65536, 65536), ((1 << 32) - 1, 0) * 16,
], ids=lambda shape: f"{len(shape)} dimensions {str(shape)[:24]}")
@pytest.mark.parametrize("way", ["copy", "view"])
def test_shapes_that_numpy_may_not_hold(way, shape):
    values = 0 if 0 in shape else 1
    raw = forge(Forged((2,), bytes(8)), Forged(shape, bytes(4 * values)))
    if numpy_holds(shape):
        tensor = WAYS[way](raw, None).tensors[1]
        assert (tensor.shape, tensor.size) == (shape, values)
        assert CODEC.encode_round(ff.RoundFrame([np.zeros(2, np.float32), tensor], weight=1.0)) == raw
    else:
        with pytest.raises(ff.TensorError, match=f"^tensor 1: .*{len(shape)}.*dimensions"):
            WAYS[way](raw, None)
    layout = ff.TensorLayout.from_frame(CODEC, raw)
    assert tuple(layout.shape[1][:len(shape)]) == shape


# Encoding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight", "value"), [
    (3, 3.0), (np.float32(0.1), float(np.float32(0.1))), (np.int64(7), 7.0), (np.float64(0.1), 0.1),
    (np.float16(0.5), 0.5), (np.array(2.5), 2.5),
])
def test_weights_of_other_number_types(weight, value):
    assert CODEC.decode_round(CODEC.encode_round(ff.RoundFrame([], weight=weight))).weight == value


@pytest.mark.parametrize("weight", ["1", None, True, 1j, [1.0], b"1"])
def test_weights_of_the_wrong_type(weight):
    with pytest.raises(TypeError, match="weight.*" + type(weight).__name__):
        CODEC.encode_round(ff.RoundFrame([], weight=weight))


def test_kinds():
    for kind in ff.RoundKind:
        for given in (kind, int(kind)):
            raw = CODEC.encode_round(ff.RoundFrame([], given))
            assert raw[8] == kind
            assert CODEC.decode_round(raw).kind is kind
    for kind in (2, -1, "Model"):
        with pytest.raises(ValueError, match="RoundKind"):
            ff.RoundFrame([], kind)
    frame = ff.RoundFrame([])
    for frame.kind in (2, -1, 256, "Model", None, True):
        with pytest.raises(ff.EncodeError, match="kind"):
            CODEC.encode_round(frame)


@pytest.mark.parametrize("other", [None, [numbers(2)], numbers(2), {"tensors": []}, b"", ff.MuxRecord])
def test_what_is_no_round_frame_is_a_type_error(other):
    with pytest.raises(TypeError):
        CODEC.encode_round(other)
    with pytest.raises(TypeError):
        CODEC.encode_round_into(other, bytearray(100))


def test_a_round_frame_shares_memory_and_shows_itself():
    tensors = [numbers(2, 2), numbers(3)]
    frame = ff.RoundFrame(iter(tensors), weight=4.0)
    assert [t is s for t, s in zip(frame.tensors, tensors, strict=True)] == [True, True]
    tensors[0][0, 0] = 42
    assert CODEC.decode_round(CODEC.encode_round(frame)).tensors[0][0, 0] == 42
    assert repr(frame) == "RoundFrame(2 tensors, <RoundKind.MODEL: 0>, weight=4.0)"


def test_realized():
    model, control = ff.RoundKind.MODEL, ff.RoundKind.CONTROL
    for kind, weight, realized in [
        (model, 0.0, False), (model, -0.0, False), (model, 5e-324, True), (control, 0.0, True), (control, 1.0, True),
    ]:
        assert ff.RoundFrame([], kind, weight).realized is realized


def test_encode_into_writes_its_own_bytes_only():
    for offset in (0, 1, 3, 8):
        room = bytearray(b"\xee" * (len(RAW) + offset + 5))
        assert CODEC.encode_round_into(FRAME, room, offset) == len(RAW)
        assert room == b"\xee" * offset + RAW + b"\xee" * 5
    exact = bytearray(len(RAW))
    assert CODEC.encode_round_into(FRAME, exact) == len(RAW)
    assert exact == RAW


@pytest.mark.parametrize(("frame", "size", "offset", "codec", "error"), [
    (FRAME, len(RAW) - 1, 0, CODEC, ff.EncodeError),
    (FRAME, len(RAW) + 5, 6, CODEC, ff.EncodeError),
    (FRAME, len(RAW), -1, CODEC, ff.EncodeError),
    (FRAME, len(RAW), 1 << 62, CODEC, ff.EncodeError),
    (FRAME, len(RAW), sys.maxsize, CODEC, ff.EncodeError),
    (FRAME, 0, 0, CODEC, ff.EncodeError),
    (FRAME, len(RAW), 0, ff.Codec(SALT, max_tensors=3), ff.EncodeError),
    (FRAME, len(RAW), 0, ff.Codec(SALT, frame_ceiling=55), ff.EncodeError),
    (ff.RoundFrame(TENSORS, weight=-1.0), len(RAW), 0, CODEC, ff.EncodeError),
    (ff.RoundFrame(TENSORS, weight="1"), len(RAW), 0, CODEC, TypeError),
], ids=["one short", "offset", "negative offset", "far offset", "farthest offset", "no room", "max_tensors",
        "frame_ceiling", "weight", "weight's type"])
def test_encode_into_writes_nothing_on_failure(frame, size, offset, codec, error):
    room = bytearray(b"\xee" * size)
    with pytest.raises(error):
        codec.encode_round_into(frame, room, offset)
    assert room == b"\xee" * size


def test_encode_into_writes_nothing_where_the_last_tensor_is_bad():
    room = bytearray(b"\xee" * (len(RAW) + 100))
    for bad in (np.zeros(3), None, np.ma.masked_array(np.zeros(3, np.float32)), [1.0]):
        frame = ff.RoundFrame(TENSORS)
        frame.tensors.append(bad)
        with pytest.raises(TypeError, match="tensor 4: "):
            CODEC.encode_round_into(frame, room)
        with pytest.raises(TypeError, match="tensor 4: "):
            CODEC.encode_round(frame)
    with pytest.raises(ff.EncodeError, match="tensor 4: "):
        CODEC.encode_round_into(ff.RoundFrame([*TENSORS, np.broadcast_to(numbers(), (0, 1 << 32))]), room)
    assert room == b"\xee" * (len(RAW) + 100)


@pytest.mark.parametrize("buffer", [bytes(500), memoryview(bytes(500)), read_only(np.zeros(500, np.uint8))],
                         ids=["bytes", "memoryview", "ndarray"])
def test_encode_into_refuses_a_read_only_buffer(buffer):
    with pytest.raises(TypeError, match=r"(?i)read-only.*" + type(buffer).__name__):
        CODEC.encode_round_into(FRAME, buffer)
    with pytest.raises(TypeError):
        CODEC.encode_round_into(FRAME, "text")


@pytest.mark.parametrize("shift", [0, 4, 40_000, -4, -40_000])
def test_tensors_that_lie_in_the_buffer_encoded_into_arrive_whole_or_are_refused(shift):
    raw = wire([noise(seed, 30_000 + seed) for seed in range(3)], weight=1.0)
    before = bytes(50_000) + raw + bytes(50_000)
    room = bytearray(before)
    frame = CODEC.decode_round(memoryview(room)[50_000:], copy=False)
    try:
        CODEC.encode_round_into(frame, room, 50_000 + shift)
    except ValueError:
        assert room == before
    else:
        assert room[50_000 + shift:][:len(raw)] == raw


# References and memory -----------------------------------------------------------------------------------


def test_reference_counts_stay_flat():
    tensor, into, raw, dtype = numbers(100), np.zeros(100, np.float32), bytearray(wire([numbers(100)])), np.dtype("<f4")
    strided, bad = numbers(200)[::2], np.zeros(3)
    many_dims = forge(Forged((1,) * 255, bytes(4)))
    layout = ff.TensorLayout.of([tensor])
    held = (tensor, into, raw, dtype, strided, bad, many_dims, layout, CODEC)

    def work():
        for arrays in ([tensor], [strided]):
            CODEC.encode_round_into(ff.RoundFrame(arrays), bytearray(CODEC.encode_round(ff.RoundFrame(arrays))))
            layout.encode(CODEC, arrays, 0, 1.0)
        CODEC.decode_round(raw)
        CODEC.decode_round(raw, copy=False)
        CODEC.decode_round(raw, out=[into])
        CODEC.decode_round(raw, out=[strided.copy()])
        layout.decode_into(CODEC, raw, [into])
        ff.TensorLayout.from_frame(CODEC, raw)
        for bad_raw in (raw[:-1], bytes(raw[:-1]) + b"?", many_dims):
            for options in ({}, {"copy": False}, {"out": [into]}):
                with pytest.raises((ff.DecodeError, ValueError)):
                    CODEC.decode_round(bad_raw, **options)
            with pytest.raises(ff.DecodeError):
                layout.decode_into(CODEC, bad_raw, [into])
        frame = ff.RoundFrame([tensor])
        frame.tensors.append(bad)
        with pytest.raises(TypeError):
            CODEC.encode_round(frame)
        with pytest.raises(TypeError):
            ff.RoundFrame([tensor, bad])
        with pytest.raises(ff.TensorError):
            layout.encode(CODEC, [tensor, tensor], 0, 1.0)
        with pytest.raises(ff.EncodeError):
            CODEC.encode_round_into(ff.RoundFrame([tensor]), bytearray(4))

    work()
    before = [sys.getrefcount(thing) for thing in held]
    for _ in range(50):
        work()
    # A few for whatever the interpreter keeps of its own; a leak of one a round would be fifty.
    assert all(abs(sys.getrefcount(thing) - count) < 5 for thing, count in zip(held, before, strict=True))
    raw.append(0)


# Prints how far the peak of resident memory rose above its start, less the result that is still held.
PEAK = """
import re, numpy as np, flodl_fast as ff

def status(field):
    return int(re.search(field + r":\\s*(\\d+) kB", open("/proc/self/status").read())[1]) << 10

codec, count = ff.Codec(bytes(16)), 16 << 20
arrays = [np.ones(count // 4, np.float32) for _ in range(4)]
small = codec.encode_round(ff.RoundFrame([np.ones(9, np.float32)]))
codec.decode_round(small), codec.decode_round(small, copy=False)
{prepare}
open("/proc/self/clear_refs", "w").write("5")
start = status("VmRSS")
result = {work}
print(status("VmHWM") - start - {size})
"""


@measures_memory
@pytest.mark.parametrize(("prepare", "work", "size"), [
    ("frame = ff.RoundFrame(arrays)", "codec.encode_round(frame)", "len(result)"),
    ("frame = ff.RoundFrame([a.reshape(2048, -1).T for a in arrays])", "codec.encode_round(frame)", "len(result)"),
    ("frame = ff.RoundFrame(arrays); room = bytearray(b'x') * (65 << 20)", "codec.encode_round_into(frame, room)", "0"),
    ("layout = ff.TensorLayout.of(arrays)", "layout.encode(codec, arrays, 0, 1.0)", "len(result)"),
    ("raw = codec.encode_round(ff.RoundFrame(arrays))", "codec.decode_round(raw)", "(64 << 20)"),
    ("raw = codec.encode_round(ff.RoundFrame(arrays))", "codec.decode_round(raw, finite=True)", "(64 << 20)"),
    ("raw = codec.encode_round(ff.RoundFrame(arrays))", "codec.decode_round(raw, copy=False)", "0"),
    ("raw = codec.encode_round(ff.RoundFrame(arrays))", "codec.decode_round(raw, out=arrays)", "0"),
    ("raw = codec.encode_round(ff.RoundFrame(arrays)); layout = ff.TensorLayout.of(arrays)",
     "layout.decode_into(codec, raw, arrays)", "0"),
    ("frames = [ff.RoundFrame([a]) for a in arrays]", "ff.sum_frames(frames)", "(16 << 20)"),
], ids=["encode", "encode transposed", "encode_into", "layout encode", "decode", "decode finite", "views", "out",
        "decode_into", "sum"])
def test_peak_memory_is_the_result_and_less_than_4_mib(prepare, work, size):
    done = run_python(PEAK.format(prepare=prepare, work=work, size=size))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4 << 20


# Threads -------------------------------------------------------------------------------------------------


def test_the_gil_is_released_around_a_large_mac():
    data = bytes(256 << 20)
    ticks, started, stop = [0], threading.Event(), threading.Event()

    def tick():
        while not stop.is_set():
            ticks[0] += 1
            started.set()
            stop.wait(0.0001)

    thread = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    # So long that no thread has to give way: the other one moves only while this one waits or lets go by itself.
    sys.setswitchinterval(1000)
    try:
        thread.start()
        assert started.wait(60)
        before, turns = ticks[0], 100  # A busy machine may have no processor for the other one the first time.
        while turns and ticks[0] == before:
            CODEC.mac(data)
            turns -= 1
        after = ticks[0]
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert after > before


@pytest.mark.parametrize("size", [40, 300_000], ids=["small", "large"])
def test_threads_that_share_a_codec_agree_with_one(size):
    rounds = [[noise(10 * i + j, size + i) for j in range(3)] for i in range(4)]
    raws = [wire(tensors, weight=float(i)) for i, tensors in enumerate(rounds)]
    start = threading.Barrier(2)

    def work(turn):
        start.wait(60)
        right = True
        for _ in range(4):
            for i in range(turn, turn + 4):
                tensors, raw = rounds[i % 4], raws[i % 4]
                right &= CODEC.encode_round(ff.RoundFrame(tensors, weight=float(i % 4))) == raw
                right &= equal(CODEC.decode_round(raw).tensors, tensors)
                room = bytearray(len(raw))
                CODEC.encode_round_into(CODEC.decode_round(raw, copy=False), room)
                right &= room == raw
        return right

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (0, 1))) == [True, True]
