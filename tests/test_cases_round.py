"""Public bug reports about tensors, turned into inputs for this package: each states the right value.

The numbers are those of the project's list of such cases.
"""

from __future__ import annotations

import itertools
import math
import struct
import warnings
from functools import partial

import numpy as np
import pytest
import reference as ref
from conftest import SALT
from round_support import CODEC, Forged, forge, measures_memory, noise, numbers, wire, words
from support import check_that_nothing_is_left

import flodl_fast as ff

EMPTY = bytes.fromhex("f1170df10100000000000000000000f03f0002000000000300000000000000000000001b27b53eef2cae21")
HALF = bytes.fromhex("f1170df10100000000000000000000f03f000102000000040000000000000000000000f2d76c7af37036b5")
ELIDED = bytes.fromhex("f1170df10100000000000000000000f03f0001020000000000000000000000d9e6dac181029229")
NAN_WEIGHT = bytes.fromhex("f1170df10000000000000000000000f87f9db5d613cacd3dc7")
MINUS_ZERO_WEIGHT = bytes.fromhex("f1170df100000000000000000000000080e3dfeaa2fa3264fe")
BF16 = bytes.fromhex("f1170df10100000000000000000000f03f0101020000000400000000000000803f0040a717aedb13586d3e")

MODEL, CONTROL = ff.RoundKind.MODEL, ff.RoundKind.CONTROL


def frame(*tensors, kind=MODEL, weight=1.0):
    return ff.RoundFrame(tensors, kind, weight)


# 6. Byte order: ijl/orjson #472, safetensors #75 --------------------------------------------------------


@pytest.mark.parametrize("array", [
    np.array([1.0], ">f4"), np.array([1.0], "<f4"), np.array([(0, 1.0)], [("n", ">u4"), ("x", ">f4")])["x"],
], ids=["big-endian", "little-endian", "big-endian field"])
def test_6_byte_order(array):
    assert CODEC.encode_round(frame(array))[31:35].hex() == "0000803f"
    assert ff.TensorLayout.of([array]).encode(CODEC, [array], MODEL, 1.0)[31:35].hex() == "0000803f"
    out = np.zeros_like(array)
    assert CODEC.decode_round(wire([np.ones(1, np.float32)]), out=[out]).tensors[0] is out
    assert out[0] == 1.0
    assert ff.sum_frames([frame(array), frame(array)]).tensors[0][0] == 2.0


# 7. Empty tensors: safetensors #442 ----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"copy": False}, {"out": [np.zeros((0, 3), np.float32)]}],
                         ids=["copy", "view", "out"])
def test_7_an_empty_tensor(options):
    decoded = CODEC.decode_round(EMPTY, **options)
    assert [(t.shape, t.dtype) for t in decoded.tensors] == [((0, 3), np.dtype(np.float32))]
    assert (decoded.kind, decoded.weight) == (MODEL, 1.0)
    assert CODEC.encode_round(decoded) == EMPTY
    assert ff.reduce_frames([decoded, decoded]).tensors[0].shape == (0, 3)
    layout = ff.TensorLayout.from_frame(CODEC, EMPTY)
    assert layout.encode(CODEC, decoded.tensors, decoded.kind, decoded.weight) == EMPTY


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_7_an_empty_tensor_in_other_libraries(library):
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    tensor = module.asarray(CODEC.decode_round(EMPTY).tensors[0])
    assert tuple(tensor.shape) == (0, 3)
    assert CODEC.encode_round(frame(tensor)) == EMPTY


def test_7_no_tensors():
    raw = CODEC.encode_round(frame())
    assert raw == wire([], weight=1.0)
    assert CODEC.decode_round(raw).tensors == []


# 8. Shape and byte count disagree: ml-explore/mlx #3363 -------------------------------------------------


@pytest.mark.parametrize(("raw", "got"), [(HALF, 4), (ELIDED, 0)], ids=["half", "none"])
def test_8_shape_and_size_disagree(raw, got):
    into = np.ones(2, np.float32)
    for decode in (
        lambda: CODEC.decode_round(raw), lambda: CODEC.decode_round(raw, copy=False),
        lambda: CODEC.decode_round(raw, out=[into]), lambda: ff.TensorLayout.from_frame(CODEC, raw),
        lambda: ff.TensorLayout.of([into]).decode_into(CODEC, raw, [into]),
    ):
        with pytest.raises(ff.TensorError, match=rf"tensor 0: .*\(2,\).* 8 bytes.* {got}$"):
            decode()
    assert into.tolist() == [1.0, 1.0]
    assert raw[-8:] == ref.mac8(SALT, raw[:-8])


# 9. Alignment: pyzmq #864, mila-iqia/fuel #273, jax-ml/jax #29810 ----------------------------------------


def test_9_alignment():
    values, others = noise(1, 1001), numbers(1001)
    store = np.zeros(5000, np.uint8)
    place = store[-store.ctypes.data % 64:]
    raw = wire([values], weight=1.0)
    place[:len(raw)] = np.frombuffer(raw, np.uint8)
    view, copy = CODEC.decode_round(place, copy=False).tensors[0], CODEC.decode_round(place).tensors[0]
    into = np.zeros(1001, np.float32)
    CODEC.decode_round(place, out=[into])
    assert [array.flags.aligned for array in (view, copy, into)] == [False, True, True]
    assert words(view) == words(copy) == words(into) == words(values)
    sums = [ff.sum_frames([frame(array), frame(others)]).tensors[0] for array in (view, copy)]
    assert words(sums[0]) == words(sums[1])
    assert sums[0].flags.aligned
    assert CODEC.encode_round(frame(view)) == CODEC.encode_round(frame(copy)) == raw


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_9_a_copy_goes_to_other_libraries(library):
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    values = numbers(1001)
    tensor = module.asarray(CODEC.decode_round(wire([values])).tensors[0])
    assert tensor.sum().item() == values.sum()


# 10. Read-only memory: cython #1605, pyzmq #1566, radixark/miles PR #703 --------------------------------


def test_10_read_only_inputs():
    locked = numbers(3)
    locked.flags.writeable = False
    data = words(numbers(3))
    for tensor in (locked, np.frombuffer(data, "<f4"), memoryview(data).cast("f"), memoryview(data).cast("f")[::1]):
        assert CODEC.encode_round(frame(tensor)) == wire([numbers(3)], weight=1.0)
        assert ff.sum_frames([frame(tensor)]).tensors[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda raw: memoryview(raw)[::1]],
                         ids=["bytes", "bytearray", "memoryview", "memoryview slice"])
def test_10_views_are_read_only_and_copies_are_not(make):
    raw = wire([numbers(3)])
    view = CODEC.decode_round(make(raw), copy=False).tensors[0]
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 9
    copy = CODEC.decode_round(make(raw)).tensors[0]
    copy[0] = 9
    assert (copy.tolist(), view.tolist()) == ([9, 2, 3], [1, 2, 3])


def test_10_torch_takes_a_copy_without_a_warning():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = torch.from_numpy(CODEC.decode_round(wire([numbers(3)]), copy=True).tensors[0])
    tensor[0] = 9
    assert tensor.tolist() == [9, 2, 3]


# 14. Failure paths leak: msgpack-python #152, cython #4296, msgspec #379 --------------------------------


@measures_memory
def test_14_failing_decodes_and_encodes_leak_nothing():
    good = wire([numbers(2, 3), numbers(100)], weight=1.0)
    bad = [HALF, ELIDED, BF16, NAN_WEIGHT, good[:-1] + b"?", *(good[:size] for size in range(0, len(good), 7))]
    into, first, second = [np.zeros((2, 3), np.float32), np.zeros(100, np.float32)], numbers(1000), np.zeros(3)
    layout, half_bad = ff.TensorLayout.of(into), frame(first)
    half_bad.tensors.append(second)
    calls = [
        lambda raw: CODEC.decode_round(raw), lambda raw: CODEC.decode_round(raw, copy=False),
        lambda raw: CODEC.decode_round(raw, out=into), lambda raw: layout.decode_into(CODEC, raw, into),
        lambda raw: CODEC.encode_round(half_bad), lambda raw: ff.RoundFrame([first, second]),
    ]
    check_that_nothing_is_left(
        (partial(call, raw) for raw, call in itertools.product(bad, calls)), [first, second, *into, *bad]
    )
    assert not any(array.any() for array in into)


# 16. Sizes: python/asyncio #99, elasticdl #571 -----------------------------------------------------------


def test_16_a_32_mib_round_in_pieces():
    values = np.arange(8 << 20, dtype=np.float32)
    raw = CODEC.encode_round(frame(values))
    assert len(raw) == (32 << 20) + 39
    for prefixed in (False, True):
        reader = ff.FrameReader(CODEC, "round", prefixed=prefixed)
        stream = memoryview((len(raw).to_bytes(4, "little") if prefixed else b"") + raw)
        for start in range(0, len(stream), 1 << 16):
            assert reader.next() is None
            reader.feed(stream[start:start + (1 << 16)])
        got = reader.next()
        assert np.array_equal(got.tensors[0], values)
        assert reader.next() is None
        reader.eof()


def test_16_limits_name_themselves_and_their_setting():
    with pytest.raises(ff.LimitError, match=r"65537.*65536.*max_tensors"):
        CODEC.decode_round(forge(count=65_537))
    assert CODEC.frame_ceiling == 1 << 30
    above = forge(Forged((1 << 28, 2), nbytes=(1 << 30) + 4))
    with pytest.raises(ff.LimitError, match=r"1073741828.*1073741824.*frame_ceiling"):
        CODEC.decode_round(above)
    with pytest.raises(ff.TruncatedError):
        ff.Codec(SALT, frame_ceiling=(1 << 30) + 4).decode_round(above)
    small = ff.Codec(SALT, max_tensors=1, frame_ceiling=12)
    assert small.decode_round(wire([numbers(3)])).tensors[0].tolist() == [1, 2, 3]
    with pytest.raises(ff.LimitError, match=r"16.*12.*frame_ceiling"):
        small.decode_round(wire([numbers(4)]))
    with pytest.raises(ff.LimitError, match=r"2 tensors.*1.*max_tensors"):
        small.decode_round(wire([numbers(1), numbers(1)]))


# 17. No mass, NaN: flwrlabs/flower #7645, NVIDIA/NVFlare PR #5240 ---------------------------------------


def test_17_no_mass_keeps_local_state():
    reduced = ff.reduce_frames([frame(numbers(2), weight=0.0), frame(numbers(2), weight=0.0)])
    assert (reduced.weight, reduced.realized) == (0.0, False)
    assert reduced.tensors[0].tolist() == [2, 4]
    decoded = CODEC.decode_round(CODEC.encode_round(reduced))
    assert (decoded.weight, decoded.realized) == (0.0, False)
    assert ff.reduce_frames([frame(numbers(2), weight=0.0), frame(numbers(2), weight=2.0)]).realized


@pytest.mark.parametrize(("raw", "text"), [
    (NAN_WEIGHT, "nan"), (forge(weight=-1.0), "-1.0"), (forge(weight=math.inf), "inf"),
    (forge(weight=-math.inf), "-inf"),
], ids=["nan", "-1", "inf", "-inf"])
def test_17_a_weight_that_cannot_be(raw, text):
    with pytest.raises(ff.TensorError, match=f"weight.*{text}"):
        CODEC.decode_round(raw)
    with pytest.raises(ff.EncodeError, match=f"weight.*{text}"):
        CODEC.encode_round(frame(weight=float(text)))


def test_17_minus_zero_is_a_weight():
    decoded = CODEC.decode_round(MINUS_ZERO_WEIGHT)
    assert struct.pack("<d", decoded.weight) == struct.pack("<d", -0.0)
    assert not decoded.realized
    assert CODEC.encode_round(decoded) == MINUS_ZERO_WEIGHT


def test_17_nan_in_a_tensor_is_kept_bit_for_bit_or_refused_where_asked():
    tensor = np.frombuffer(bytes.fromhex("0000803f" "efbeadff" "0100807f"), "<f4")
    raw = CODEC.encode_round(frame(numbers(2), tensor))
    for options in ({}, {"copy": False}, {"out": [np.zeros(2, np.float32), np.zeros(3, np.float32)]}):
        assert words(CODEC.decode_round(raw, **options).tensors[1]) == words(tensor)
        with pytest.raises(ff.TensorError, match="tensor 1: nan at element 1"):
            CODEC.decode_round(raw, finite=True, **options)
    for fold in (ff.sum_frames, ff.reduce_frames):
        with pytest.raises(ff.TensorError, match="frame 2, tensor 0: nan at element 1"):
            fold([frame(numbers(3)), frame(numbers(3)), frame(tensor)], finite=True)
        assert np.isnan(fold([frame(numbers(3)), frame(tensor)]).tensors[0]).tolist() == [False, True, True]


def test_17_idle_work_has_no_mass():
    for gamma in (1.0, 0.0, -1.0):
        assert ff.gamma_mass(0, gamma) == 0.0
        assert not ff.is_realized(ff.gamma_mass(0, gamma))
    assert ff.mover_mass(0) == 0.0


# 18. Mismatches: pytorch/gloo PR #456, pytorch #150248 --------------------------------------------------


@pytest.mark.parametrize("fold", [ff.sum_frames, ff.reduce_frames])
def test_18_mismatches_say_what_differs(fold):
    good = frame(numbers(1), numbers(2, 3))
    for bad, text in (
        (frame(numbers(1), numbers(3, 2)), r"frame 2, tensor 1: shape \(3, 2\), frame 0 has \(2, 3\)"),
        (frame(numbers(1)), "frame 2 has 1 tensors, frame 0 has 2"),
        (frame(numbers(1), numbers(2, 3), kind=CONTROL), "frame 2 is CONTROL, frame 0 is MODEL"),
    ):
        with pytest.raises(ff.TensorError, match=text):
            fold([good, good, bad])


def test_18_bfloat16_is_not_read_as_float32():
    for decode in (lambda: CODEC.decode_round(BF16), lambda: CODEC.decode_round(BF16, copy=False),
                   lambda: ff.TensorLayout.from_frame(CODEC, BF16)):
        with pytest.raises(ff.TensorError, match=r"tensor 0: dtype 1 \(bfloat16\).*0\.6.*float32"):
            decode()


def test_18_dead_ranks_count_in_neither_sum_nor_divisor():
    reduced = ff.reduce_frames([None, frame(numbers(2), weight=1.0), None, frame(numbers(2), weight=1.0)])
    assert (reduced.weight, reduced.tensors[0].tolist()) == (2.0, [1, 2])
    for nobody in ([], [None], [None, None]):
        with pytest.raises(ff.TensorError, match="no frame"):
            ff.reduce_frames(nobody)
