"""What 0.7 and 0.8 add to round frames: bfloat16 tensors, and tensors of zeros without data (docs/wire.md §9)."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import reference as ref
from conftest import SALT
from round_support import (
    BF16,
    CODEC,
    CODEC7,
    CODEC8,
    Forged,
    forge,
    halves,
    narrowed,
    noise,
    numbers,
    widened,
    wire,
    words,
)
from test_arrays import LAYOUTS, OldProducer, Producer, optional, params

import flodl_fast as ff

MODEL, CONTROL = ff.RoundKind.MODEL, ff.RoundKind.CONTROL
KINDS = pytest.mark.parametrize("kind", list(ff.RoundKind))
LATER = pytest.mark.parametrize("codec", [CODEC7, CODEC8], ids=["0.7", "0.8"])
# Sizes around vectors, the blocks that are converted and signed at once, and stores past the caches.
SIZES = (0, 1, 7, 8, 9, 16, 100, 8191, 16_384, 20_001, 70_003)

# Rounding to bfloat16, in bits: exact, below and above a tie, ties to even from both sides, into the next power of
# two, into infinity, subnormals, and NaN with payloads above, below and across the cut.
ROUNDED = [
    (0x3F800000, 0x3F80), (0x3F807FFF, 0x3F80), (0x3F808000, 0x3F80), (0x3F808001, 0x3F81), (0x3F818000, 0x3F82),
    (0xBF808000, 0xBF80), (0xBF818000, 0xBF82), (0x3FFF8000, 0x4000), (0x7F7F7FFF, 0x7F7F), (0x7F7F8000, 0x7F80),
    (0xFF7FFFFF, 0xFF80), (0x7F800000, 0x7F80), (0xFF800000, 0xFF80), (0x00000000, 0x0000), (0x80000000, 0x8000),
    (0x00000001, 0x0000), (0x00008000, 0x0000), (0x00008001, 0x0001), (0x00018000, 0x0002), (0x807F8000, 0x8080),
    (0x7FC00000, 0x7FC0), (0x7F800001, 0x7FC0), (0x7F80FFFF, 0x7FC0), (0xFFADBEEF, 0xFFED), (0x7FFFFFFF, 0x7FFF),
    (0xFF810000, 0xFFC1),
]


def bits(values):
    return np.array(values, np.uint32).view(np.float32)


def bf16(*values):
    return np.array(values, np.float32).astype(BF16)


def same_nans(array):
    """A bfloat16 array with one NaN for all."""
    return np.where(np.isnan(array.astype(np.float32)), np.uint16(0x7FC0), array.view(np.uint16))


# Rounding ------------------------------------------------------------------------------------------------


def test_rounding_to_bfloat16():
    frame = ff.RoundFrame([bits([before for before, _ in ROUNDED])])
    decoded = CODEC7.decode_round(CODEC7.encode_round(frame, wire="bf16")).tensors[0]
    assert decoded.view(np.uint16).tolist() == [after for _, after in ROUNDED]
    assert [ref.rounded(before) for before, _ in ROUNDED] == [after for _, after in ROUNDED]


def test_rounding_of_a_sample_of_all_bits():
    # Every upper half, each with lower halves around the tie and at random.
    rng = np.random.default_rng(16)
    lower = np.concatenate([np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), rng.integers(0, 1 << 16, 10)])
    values = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | lower.astype(np.uint32)).view(np.float32)
    decoded = CODEC7.decode_round(CODEC7.encode_round(ff.RoundFrame([values]), wire="bf16")).tensors[0]
    assert words(decoded) == words(narrowed(values))
    with np.errstate(invalid="ignore"):
        assert (same_nans(decoded) == same_nans(values.astype(BF16))).all()  # NaN aside, the package's own rounding


def test_widening_is_exact():
    every = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    out = np.ones(1 << 16, np.float32)
    CODEC7.decode_round(wire([every], revision="0.7"), out=[out])
    assert words(out) == words(widened(every))


# Encoding ------------------------------------------------------------------------------------------------


@LATER
@KINDS
@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_arrays_travel_as_they_are(codec, kind, size):
    tensors = [numbers(3), halves(size, size), halves(1)]
    raw = wire(tensors, kind.name.title(), 2.0, "0.7")
    frame = ff.RoundFrame(tensors, kind, 2.0)
    assert codec.encode_round(frame) == raw
    layout = ff.TensorLayout.of(tensors)
    assert layout.encode(codec, tensors, kind, 2.0) == raw
    assert b"".join(layout.parts(codec, tensors, kind, 2.0)) == raw
    for options in ({}, {"copy": False}, {"out": [np.ones(t.shape, t.dtype) for t in tensors]}):
        decoded = codec.decode_round(raw, **options)
        assert [t.dtype for t in decoded.tensors] == [np.float32, BF16, BF16]
        assert [words(t) for t in decoded.tensors] == [words(t) for t in tensors]
    into = [np.ones(t.shape, t.dtype) for t in tensors]
    assert layout.decode_into(codec, raw, into) == (kind, 2.0)
    assert [words(t) for t in into] == [words(t) for t in tensors]


@pytest.mark.parametrize("size", SIZES)
def test_float32_arrays_are_rounded_where_it_is_asked_for(size):
    tensors = [noise(size, size), halves(3, 4), noise(5)]
    expected = wire([narrowed(tensors[0]), tensors[1], narrowed(tensors[2])], weight=1.0, revision="0.7")
    frame = ff.RoundFrame(tensors, weight=1.0)
    assert CODEC7.encode_round(frame, wire="bf16") == expected
    room = bytearray(len(expected) + 3)
    assert CODEC7.encode_round_into(frame, room, 3, wire="bf16") == len(expected)
    assert room[3:] == expected
    layout = ff.TensorLayout.of(tensors, wire="bf16")
    assert layout == ff.TensorLayout.from_frame(CODEC7, expected)
    assert layout.encode(CODEC7, tensors, MODEL, 1.0) == expected
    assert b"".join(layout.parts(CODEC7, tensors, MODEL, 1.0)) == expected
    assert (layout.dtype.tolist(), layout.nbytes.tolist()) == ([1, 1, 1], [2 * size, 8, 2])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [3.0, 0.1, 0.0])
def test_a_scale_multiplies_in_float32_before_rounding(size, scale):
    single, half = noise(size, size), halves(size + 1, size)
    with np.errstate(all="ignore"):
        expected = [narrowed(single * np.float32(scale)), narrowed(widened(half) * np.float32(scale))]
    raw = ff.TensorLayout.of([single, half], wire="bf16").encode(CODEC7, [single, half], MODEL, 1.0, scale=scale)
    decoded = CODEC7.decode_round(raw)
    for tensor, right in zip(decoded.tensors, expected, strict=True):
        assert (same_nans(tensor) == same_nans(right)).all()
    kept = ff.TensorLayout.of([half]).encode(CODEC7, [half], MODEL, 1.0, scale=scale)
    assert (same_nans(CODEC7.decode_round(kept).tensors[0]) == same_nans(expected[1])).all()


@pytest.mark.parametrize("make", params(LAYOUTS))
def test_float32_arrays_of_every_layout_are_rounded_and_filled(make):
    values = noise(7, 4, 6)
    expected = wire([narrowed(values)], revision="0.7")
    assert CODEC7.encode_round(ff.RoundFrame([make(values)]), wire="bf16") == expected
    scaled = ff.TensorLayout.of([make(values)], wire="bf16").encode(CODEC7, [make(values)], MODEL, 0.0, scale=1.0)
    assert scaled == expected
    target = make(np.ones((4, 6), np.float32))
    CODEC7.decode_round(expected, out=[target])
    assert words(np.asarray(target).view(np.ndarray)) == words(widened(narrowed(values)))


HALF_LAYOUTS = {
    "C order": lambda v: v.copy(),
    "Fortran order": lambda v: np.asfortranarray(v),
    "every other": lambda v: np.repeat(v, 2, axis=1)[:, ::2],
    "backwards": lambda v: v[::-1, ::-1].copy()[::-1, ::-1],
    "unaligned": lambda v: np.frombuffer(bytearray(b"x" + v.tobytes()), BF16, v.size, 1).reshape(v.shape),
    "big-endian": lambda v: v.view(np.uint16).astype(">u2").view(BF16.newbyteorder(">")),
    "big-endian, transposed": lambda v: v.T.copy().view(np.uint16).astype(">u2").view(BF16.newbyteorder(">")).T,
    "DLPack before 1.0": lambda v: OldProducer(v.copy(), code=4, bits=16),
    "DLPack before 1.0, transposed": lambda v: OldProducer(
        v.T.copy(), shape=v.shape, strides=(1, v.shape[0]), code=4, bits=16
    ),
}


@pytest.mark.parametrize("make", params(HALF_LAYOUTS))
def test_bfloat16_arrays_of_every_layout(make):
    values = halves(9, 4, 6)
    tensor, expected = make(values), wire([values], revision="0.7")
    assert CODEC7.encode_round(ff.RoundFrame([tensor])) == expected
    assert CODEC7.encode_round(ff.RoundFrame([tensor])) == expected  # An export leaves the producer as it was.
    with np.errstate(invalid="ignore"):
        assert words(ff.sum_frames([ff.RoundFrame([tensor])]).tensors[0]) == words(
            narrowed(np.float32(0) + widened(values))
        )
    layout = ff.TensorLayout.of([tensor])
    scaled = CODEC7.decode_round(layout.encode(CODEC7, [tensor], MODEL, 0.0, scale=2.0)).tensors[0]
    with np.errstate(all="ignore"):
        assert (same_nans(scaled) == same_nans(narrowed(widened(values) * np.float32(2)))).all()
    if isinstance(tensor, np.ndarray):
        target = make(np.zeros((4, 6), BF16))
        layout.decode_into(CODEC7, expected, [target])
        assert words(target) == words(values)


@pytest.mark.parametrize("make", params(LAYOUTS))
def test_zeros_are_found_and_written_in_every_layout(make):
    zeros, minus = make(np.zeros((4, 6), np.float32)), np.zeros((4, 6), np.float32)
    minus[3, 5] = -0.0
    raw = CODEC8.encode_round(ff.RoundFrame([zeros, make(minus)]), elide=True)
    assert raw == wire([ff.Elided((4, 6)), minus], revision="0.8")
    targets = [make(numbers(4, 6)), make(numbers(4, 6))]
    CODEC8.decode_round(raw, out=targets)
    assert [words(np.asarray(t).view(np.ndarray)) for t in targets] == [bytes(96), words(minus)]


def test_torch_and_jax_bfloat16():
    torch = optional("torch")
    tensor = torch.tensor([[1.0, -2.5], [3.0, 0.0]], dtype=torch.bfloat16)
    raw = wire([bf16(1.0, -2.5, 3.0, 0.0).reshape(2, 2)], revision="0.7")
    assert CODEC7.encode_round(ff.RoundFrame([tensor])) == raw
    assert CODEC7.encode_round(ff.RoundFrame([tensor.T.contiguous().T])) == raw
    target = torch.zeros(2, 2, dtype=torch.bfloat16)
    CODEC7.decode_round(raw, out=[target])
    assert torch.equal(target, tensor)


def test_jax_bfloat16():
    jnp = optional("jax.numpy")
    array = jnp.asarray([1.0, -2.5], dtype=jnp.bfloat16)
    assert CODEC7.encode_round(ff.RoundFrame([array])) == wire([bf16(1.0, -2.5)], revision="0.7")


def test_bfloat16_by_dlpack_shares_memory_and_holds_its_producer():
    held = halves(1, 1000)
    frame = ff.RoundFrame([OldProducer(held, code=4, bits=16)])
    held[3] = bf16(42)[0]
    assert frame.tensors[0][3] == 42
    with pytest.raises(TypeError, match="tensor 0: Producer gives no memory"):
        ff.RoundFrame([Producer(held)])  # NumPy's own export does not know the dtype.


# Refusals ------------------------------------------------------------------------------------------------


def test_bfloat16_at_0_6():
    tensors = [numbers(2), halves(1, 3)]
    room = bytearray(200)
    for encode in (
        lambda: CODEC.encode_round(ff.RoundFrame(tensors)),
        lambda: CODEC.encode_round_into(ff.RoundFrame(tensors), room),
        lambda: ff.TensorLayout.of(tensors).encode(CODEC, tensors, MODEL, 1.0, room),
        lambda: ff.TensorLayout.of(tensors).parts(CODEC, tensors, MODEL, 1.0),
    ):
        with pytest.raises(ff.EncodeError, match=r"^tensor 1: revision 0\.6 has no bfloat16"):
            encode()
    with pytest.raises(ff.EncodeError, match=r"^tensor 0: revision 0\.6 has no bfloat16"):
        CODEC.encode_round(ff.RoundFrame(tensors), wire="bf16")
    assert not any(room)
    raw, into = wire(tensors, revision="0.7"), [np.ones(2, np.float32), np.ones(3, BF16)]
    for decode in (
        lambda: CODEC.decode_round(raw),
        lambda: CODEC.decode_round(raw, out=into),
        lambda: ff.TensorLayout.of(tensors).decode_into(CODEC, raw, into),
        lambda: ff.TensorLayout.from_frame(CODEC, raw),
    ):
        with pytest.raises(ff.TensorError, match=r"tensor 1: dtype 1 \(bfloat16\) .*0\.6.*float32"):
            decode()
    assert [words(t) for t in into] == [words(np.ones(2, np.float32)), words(np.ones(3, BF16))]


@LATER
def test_an_unknown_dtype(codec):
    with pytest.raises(ff.TensorError, match=r"tensor 0: dtype 2 \(unknown\).* 0 \(float32\) and 1 \(bfloat16\)"):
        codec.decode_round(forge(Forged((2,), bytes(4), 2)))
    with pytest.raises(ff.TensorError, match=r"tensor 0: shape \(3,\) takes 6 bytes, the frame gives 12"):
        codec.decode_round(forge(Forged((3,), bytes(12), 1)))


def test_nothing_is_converted_that_was_not_asked_for():
    single, half = [numbers(4)], [halves(1, 4)]
    for made, given, text in (
        (ff.TensorLayout.of(half), single, "expected bfloat16, the array has float32"),
        (ff.TensorLayout.from_frame(CODEC7, wire(half, revision="0.7")), single, "expected bfloat16, .* float32"),
        (ff.TensorLayout.of(single), half, "expected float32, the array has bfloat16"),
    ):
        for write in (made.encode, made.parts):
            with pytest.raises(ff.TensorError, match="^tensor 0: " + text):
                write(CODEC7, given, MODEL, 1.0)
    with pytest.raises(ff.TensorError, match="tensor 0: expected float32, out has bfloat16"):
        CODEC7.decode_round(wire(single), out=half)
    with pytest.raises(ff.TensorError, match="tensor 0: the frame has bfloat16, the layout float32"):
        ff.TensorLayout.of(single).decode_into(CODEC7, wire(half, revision="0.7"), single)
    for fold in (ff.sum_frames, ff.reduce_frames):
        with pytest.raises(ff.TensorError, match="frame 1, tensor 0: bfloat16, frame 0 has float32"):
            fold([ff.RoundFrame(single), ff.RoundFrame(half)])


@pytest.mark.parametrize("wire_name", ["bfloat16", "f32", 1, b"bf16", True])
def test_other_names_for_the_wire(wire_name):
    for call in (
        lambda: CODEC7.encode_round(ff.RoundFrame([numbers(2)]), wire=wire_name),
        lambda: ff.TensorLayout.of([numbers(2)], wire=wire_name),
    ):
        with pytest.raises(ValueError, match=f'wire must be "bf16" or None, got {re.escape(repr(wire_name))}'):
            call()


# Decoding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_float32_arrays_take_bfloat16_widened(size):
    tensors = [halves(size, size), noise(3, 5), halves(4, 2)]
    raw = wire(tensors, weight=1.0, revision="0.7")
    expected = [widened(tensors[0]), tensors[1], widened(tensors[2])]
    out = [np.ones(t.shape, np.float32) for t in tensors]
    frame = CODEC7.decode_round(raw, out=out)
    assert [t is o for t, o in zip(frame.tensors, out, strict=True)] == [True] * 3
    assert [words(t) for t in out] == [words(t) for t in expected]
    for array in out:
        array[...] = 1
    ff.TensorLayout.of(tensors).decode_into(CODEC7, raw, out)
    assert [words(t) for t in out] == [words(t) for t in expected]


def test_widening_into_unaligned_memory_at_every_offset():
    values = halves(3, 70_000)
    raw, store = wire([values], revision="0.7"), bytearray(4 * 70_000 + 64)
    for offset in range(8):
        target = np.frombuffer(store, np.float32, 70_000, offset)
        CODEC7.decode_round(raw, out=[target])
        assert words(target) == words(widened(values))


def test_views_of_bfloat16_share_the_buffer():
    source = bytearray(wire([halves(1, 3)], revision="0.7"))
    view = CODEC7.decode_round(source, copy=False).tensors[0]
    assert (view.dtype, view.flags.writeable) == (BF16, False)
    source[31:33] = bytes.fromhex("2842")
    assert view[0] == 42
    with pytest.raises(BufferError):
        source.append(0)
    del view
    source.append(0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 5, 999])
def test_finite_looks_into_bfloat16(value, at):
    tensor = bf16(*range(1000))
    tensor[at] = value
    raw = wire([numbers(2), tensor], revision="0.7")
    with pytest.raises(ff.TensorError, match=f"^tensor 1: {value} at element {at}$"):
        CODEC7.decode_round(raw, finite=True)
    with pytest.raises(ff.TensorError, match=f"frame 0, tensor 1: {value} at element {at}$"):
        ff.sum_frames([ff.RoundFrame([numbers(2), tensor])], finite=True)
    assert CODEC7.decode_round(wire([bf16(*range(1000))], revision="0.7"), finite=True).weight == 0.0


def test_a_0_d_bfloat16():
    raw = wire([bf16(2.5).reshape(())], revision="0.7")
    assert CODEC7.encode_round(ff.RoundFrame([np.array(2.5, np.float32)]), wire="bf16") == raw
    assert CODEC7.decode_round(raw).tensors[0].shape == ()
    assert CODEC7.decode_round(raw, out=[np.zeros((), np.float32)]).tensors[0] == 2.5


# Folds ---------------------------------------------------------------------------------------------------


def folded(tensors, weight=None):
    """NumPy's own: in float32 from +0.0 on, rounded to bfloat16, times the factor, rounded again."""
    total = np.zeros(tensors[0].shape, np.float32)
    with np.errstate(all="ignore"):
        for tensor in tensors:
            total = total + widened(tensor)
        total = narrowed(total)
        return total if weight is None else narrowed(widened(total) * np.float32(1.0 / weight))


@pytest.mark.parametrize("count", [1, 2, 4, 12, 13, 25])
@pytest.mark.parametrize("size", [0, 1, 7, 2047, 2048, 2049, 70_001])
def test_sums_of_bfloat16(count, size):
    tensors = [halves(100 * size + i, size) for i in range(count)]
    frames = [ff.RoundFrame([tensor], MODEL, 0.5 + i) for i, tensor in enumerate(tensors)]
    fold = ff.RoundFold()
    for whole, take, weight in (
        (ff.sum_frames, fold.sum, None), (ff.reduce_frames, fold.reduce, sum(0.5 + i for i in range(count))),
    ):
        right = same_nans(folded(tensors, weight))
        assert (same_nans(whole(frames).tensors[0]) == right).all()
        for frame in frames:
            fold.add(frame)
        assert (same_nans(take().tensors[0]) == right).all()


def test_a_sum_of_bfloat16_is_rounded_before_it_is_scaled():
    # 2 + 2**-6 is rounded to 2; unrounded it would come out as 1.015625.
    frames = [ff.RoundFrame([bf16(value)], MODEL, 1.0) for value in (2.0, 2.0**-7, 2.0**-7 - 2.0**-14)]
    total = ff.sum_frames(frames).tensors[0].astype(np.float32)
    assert ff.reduce_frames(frames).tensors[0] == narrowed(total * np.float32(1 / 3))


def test_what_is_elided_adds_zeros():
    full, elided = ff.RoundFrame([numbers(3), bf16(-0.0, 1, 2)]), ff.RoundFrame(
        [ff.Elided((3,)), ff.Elided((3,), "bf16")]
    )
    for order in ([full, elided, full], [elided, full, full], [full, full, elided], [elided, elided, full, full]):
        fold = ff.RoundFold()
        for frame in order:
            fold.add(frame)
        for total in (ff.sum_frames(order), ff.reduce_frames(order), fold.sum()):
            assert words(total.tensors[0]) == words(2 * numbers(3))
            assert words(total.tensors[1]) == words(bf16(0.0, 2, 4))
    fold.add(elided)
    fold.add(elided)
    for total in (ff.sum_frames([elided] * 2), ff.reduce_frames([None, elided]), fold.reduce()):
        assert total.tensors == elided.tensors


@pytest.mark.parametrize(("bad", "text"), [
    (ff.Elided((4,)), r"frame 1, tensor 0: shape \(4,\), frame 0 has \(3,\)"),
    (ff.Elided((3, 1)), r"shape \(3, 1\), frame 0 has \(3,\)"),
    (ff.Elided((3,), "bf16"), "frame 1, tensor 0: bfloat16, frame 0 has float32"),
])
def test_what_is_elided_must_match_too(bad, text):
    for good in (numbers(3), ff.Elided((3,))):
        fold = ff.RoundFold()
        fold.add(ff.RoundFrame([good]))
        with pytest.raises(ff.TensorError, match=text):
            ff.sum_frames([ff.RoundFrame([good]), ff.RoundFrame([bad])])
        with pytest.raises(ff.TensorError, match=text):
            fold.add(ff.RoundFrame([bad]))
        fold.add(ff.RoundFrame([numbers(3)]))
        assert fold.sum().tensors[0][0] in (1, 2)


# Elision -------------------------------------------------------------------------------------------------


def test_elided():
    elided = ff.Elided([2, np.int64(3)], "bf16")
    assert (elided.shape, elided.dtype, repr(elided)) == ((2, 3), "bf16", "Elided((2, 3), 'bf16')")
    assert elided == ff.Elided((2, 3), "bf16") == pickle.loads(pickle.dumps(elided))
    assert len({elided, ff.Elided((2, 3), "bf16"), ff.Elided((2, 3)), ff.Elided((3, 2), "bf16")}) == 3
    assert ff.Elided(()) != ()
    for name in ("shape", "dtype"):
        with pytest.raises(AttributeError):
            setattr(elided, name, ())


@pytest.mark.parametrize(("arguments", "error"), [
    (((-1,),), ValueError), (((1 << 32,),), ValueError), (((1,) * 256,), ValueError), (((1,), "float32"), ValueError),
    (((1,), None), ValueError), (((1.5,),), TypeError), ((3,), TypeError), ((("1",),), TypeError), ((), TypeError),
    (((2, True),), TypeError),
])
def test_elided_that_cannot_be(arguments, error):
    with pytest.raises(error):
        ff.Elided(*arguments)


ZEROS = [ff.Elided((2, 3)), numbers(2), ff.Elided((5,), "bf16"), ff.Elided(()), np.zeros((0, 4), np.float32)]
ZEROS_RAW = wire(ZEROS, "Control", 0.0, "0.8")


def dense():
    """ZEROS as arrays of zeros."""
    kinds = {"f32": np.float32, "bf16": BF16}
    return [np.zeros(t.shape, kinds[t.dtype]) if isinstance(t, ff.Elided) else t for t in ZEROS]


def test_elided_tensors_travel_without_data():
    frame = ff.RoundFrame(ZEROS, CONTROL)
    assert CODEC8.encode_round(frame) == ZEROS_RAW
    layout = ff.TensorLayout.of(ZEROS)
    assert layout == ff.TensorLayout.from_frame(CODEC8, ZEROS_RAW)
    assert layout.encode(CODEC8, ZEROS, CONTROL, 0.0) == ZEROS_RAW
    assert b"".join(layout.parts(CODEC8, ZEROS, CONTROL, 0.0)) == ZEROS_RAW
    assert (layout.nbytes.tolist(), layout.dtype.tolist()) == ([0, 8, 0, 0, 0], [0, 0, 1, 0, 0])
    assert (len(layout), layout.frame_size) == (5, len(ZEROS_RAW))


def test_zeros_are_elided_where_it_is_asked_for():
    frame = ff.RoundFrame(dense(), CONTROL)
    assert CODEC8.encode_round(frame, elide=True) == ZEROS_RAW
    room = bytearray(len(ZEROS_RAW))
    assert CODEC8.encode_round_into(frame, room, elide=True) == len(room)
    assert room == ZEROS_RAW
    assert CODEC8.encode_round(frame) == wire(dense(), "Control", 0.0, "0.8")
    halves_of = [t if isinstance(t, ff.Elided) else t.astype(BF16) for t in ZEROS]
    halves_of = [ff.Elided(t.shape, "bf16") if isinstance(t, ff.Elided) else t for t in halves_of]
    assert CODEC8.encode_round(frame, wire="bf16", elide=True) == wire(halves_of, "Control", 0.0, "0.8")


@pytest.mark.parametrize("at", [0, 1, 4095, 9999])
def test_one_bit_is_enough_to_be_no_zero(at):
    for value in (-0.0, 1e-45, np.nan):
        tensor = np.zeros(10_000, np.float32)
        tensor[at] = value
        assert CODEC8.encode_round(ff.RoundFrame([tensor]), elide=True) == wire([tensor])


def test_elided_tensors_come_back_as_zeros_or_as_they_were():
    decoded = CODEC8.decode_round(ZEROS_RAW)
    assert [(t.dtype, words(t)) for t in decoded.tensors] == [(t.dtype, words(t)) for t in dense()]
    assert all(t.flags.writeable and t.flags.owndata for t in decoded.tensors)
    views = CODEC8.decode_round(ZEROS_RAW, copy=False)
    assert [(t.dtype, words(t)) for t in views.tensors] == [(t.dtype, words(t)) for t in dense()]
    assert not any(t.flags.writeable for t in views.tensors)
    for options in ({}, {"copy": False}):
        kept = CODEC8.decode_round(ZEROS_RAW, elided="keep", **options)
        assert [t for t in kept.tensors if isinstance(t, ff.Elided)] == [ZEROS[0], ZEROS[2], ZEROS[3]]
        assert CODEC8.encode_round(kept) == ZEROS_RAW
        assert (kept.kind, kept.realized) == (CONTROL, True)


def test_elided_tensors_go_into_arrays_as_zeros():
    for layout in (ff.TensorLayout.of(ZEROS), ff.TensorLayout.of(dense())):
        out = [np.ones(t.shape, t.dtype) for t in dense()]
        assert layout.decode_into(CODEC8, ZEROS_RAW, out) == (CONTROL, 0.0)
        assert [words(t) for t in out] == [words(t) for t in dense()]
        assert layout.decode_into(CODEC8, wire(dense(), revision="0.8"), out) == (MODEL, 0.0)
    widest = [np.ones(t.shape, np.float32) for t in dense()]
    assert CODEC8.decode_round(ZEROS_RAW, out=widest).tensors == widest
    assert [words(t) for t in widest] == [words(t.astype(np.float32)) for t in dense()]


def test_bad_words_for_elided():
    with pytest.raises(ValueError, match='elided must be "zeros" or "keep", got \'drop\''):
        CODEC8.decode_round(ZEROS_RAW, elided="drop")
    with pytest.raises(ValueError, match="elided=keep and out= contradict"):
        CODEC8.decode_round(ZEROS_RAW, elided="keep", out=dense())


@pytest.mark.parametrize(("codec", "name"), [(CODEC, "0.6"), (CODEC7, "0.7")])
def test_elision_before_0_8(codec, name):
    tensors, room = [numbers(2), ff.Elided((2, 3))], bytearray(200)
    for encode in (
        lambda: codec.encode_round(ff.RoundFrame(tensors)),
        lambda: ff.TensorLayout.of(tensors).encode(codec, tensors, MODEL, 1.0, room),
        lambda: ff.TensorLayout.of(tensors).parts(codec, tensors, MODEL, 1.0),
    ):
        with pytest.raises(ff.EncodeError, match=f"^tensor 1: revision {name} cannot elide zero tensors"):
            encode()
    for frame in (ff.RoundFrame([np.zeros(2, np.float32)]), ff.RoundFrame([numbers(2)]), ff.RoundFrame([])):
        with pytest.raises(ff.EncodeError, match=f"^revision {name} cannot elide zero tensors"):
            codec.encode_round_into(frame, room, elide=True)
    assert not any(room)
    raw, into = wire(tensors, revision="0.8"), [np.ones(2, np.float32), np.ones((2, 3), np.float32)]
    for decode in (
        lambda: codec.decode_round(raw, elided="keep"),
        lambda: codec.decode_round(raw, out=into),
        lambda: ff.TensorLayout.of(tensors).decode_into(codec, raw, into),
        lambda: ff.TensorLayout.from_frame(codec, raw),
    ):
        with pytest.raises(ff.TensorError, match=r"tensor 1: shape \(2, 3\) takes 24 bytes, the frame gives 0"):
            decode()
    assert all((t == 1).all() for t in into)


def test_a_layout_that_elides_takes_no_array_and_one_that_does_not_no_elided():
    layout = ff.TensorLayout.of([numbers(2), ff.Elided((3,))])
    with pytest.raises(ff.TensorError, match="tensor 1: the layout elides it, got an array"):
        layout.encode(CODEC8, [numbers(2), numbers(3)], MODEL, 1.0)
    with pytest.raises(ff.TensorError, match=r"tensor 0: the layout has data of it, got Elided\(\(2,\), 'f32'\)"):
        layout.encode(CODEC8, [ff.Elided((2,)), ff.Elided((3,))], MODEL, 1.0)
    with pytest.raises(TypeError, match="tensor 1: Elided gives no memory"):
        CODEC8.decode_round(wire([numbers(2), numbers(3)]), out=[numbers(2), ff.Elided((3,))])


@pytest.mark.parametrize("shape", [(1 << 28, 2), (1 << 31, 1 << 31), ((1 << 32) - 1,) * 255])
def test_a_few_bytes_do_not_make_more_zeros_than_a_frame_may_hold(shape):
    raw = forge(Forged((2,), bytes(8)), Forged(shape))
    for options in ({}, {"copy": False}, {"elided": "keep"}):
        with pytest.raises(ff.LimitError, match=r"tensor 1: .*bytes of zeros.*1073741824.*frame_ceiling"):
            CODEC8.decode_round(raw, **options)
    with pytest.raises(ff.EncodeError, match=r"frame_ceiling"):
        CODEC8.encode_round(ff.RoundFrame([ff.Elided(shape)]))
    small = ff.Codec(SALT, "0.8", frame_ceiling=20)
    assert small.decode_round(wire([numbers(2), ff.Elided((3,))], revision="0.8")).tensors[1].tolist() == [0, 0, 0]
    with pytest.raises(ff.LimitError, match=r"tensor 1: with its 16 bytes of zeros.* 20 "):
        small.decode_round(wire([numbers(2), ff.Elided((4,))], revision="0.8"))


def test_a_kept_layout_lets_no_more_zeros_through_than_a_frame_may_hold():
    tensors = [numbers(2), ff.Elided((4,))]
    layout, raw = ff.TensorLayout.of(tensors), wire(tensors, revision="0.8")
    into = [numbers(2), numbers(4)]
    with pytest.raises(ff.LimitError, match=r"tensor 1: with its 16 bytes of zeros.* 20 "):
        layout.decode_into(ff.Codec(SALT, "0.8", frame_ceiling=20), raw, into)
    assert into[1].tolist() == numbers(4).tolist()
    layout.decode_into(ff.Codec(SALT, "0.8", frame_ceiling=24), raw, into)
    assert into[1].tolist() == [0] * 4


def test_case_8_at_0_8():
    raw = bytes.fromhex("f1170df10100000000000000000000f03f0001020000000000000000000000d9e6dac181029229")
    assert CODEC8.decode_round(raw).tensors[0].tolist() == [0, 0]
    assert CODEC8.decode_round(raw, elided="keep").tensors == [ff.Elided((2,))]


def test_case_18_at_0_7():
    raw = bytes.fromhex("f1170df10100000000000000000000f03f0101020000000400000000000000803f0040a717aedb13586d3e")
    assert CODEC7.decode_round(raw).tensors[0].astype(np.float32).tolist() == [1.0, 2.0]
    assert CODEC7.encode_round(ff.RoundFrame([bf16(1.0, 2.0)], weight=1.0)) == raw
    assert CODEC7.encode_round(ff.RoundFrame([np.array([1.0, 2.0], np.float32)], weight=1.0), wire="bf16") == raw
