"""Sums and reductions of round frames, bit for bit."""

from __future__ import annotations

import math
import random
import struct

import numpy as np
import pytest
import reference as ref
from conftest import golden_params, same
from generate import round_groups
from round_support import CODEC, form_of, frame_of, noise, numbers, wire, words

import flodl_fast as ff

RoundKind = ff.RoundKind
MODEL, CONTROL = RoundKind.MODEL, RoundKind.CONTROL
BOTH = pytest.mark.parametrize("fold", [ff.sum_frames, ff.reduce_frames])


def f32(*values):
    return np.array(values, np.float32)


def model(weight, *tensors):
    return ff.RoundFrame(tensors, MODEL, weight)


def bits(weight):
    return struct.pack(">d", weight).hex()


def expected_sum(tensors, weight=None):
    """NumPy's own: from +0.0, frame by frame, each step rounded to float32; then the factor, rounded likewise."""
    total = np.zeros(tensors[0].shape, np.float32)
    with np.errstate(all="ignore"):
        for tensor in tensors:
            total = total + tensor
        return total if weight is None else total * np.float32(1.0 / weight)


def same_bits(got, expected):
    """Equal bit for bit, any two NaN alike."""
    return got.shape == expected.shape and words(np.where(got == got, got, np.float32(np.nan))) == words(
        np.where(expected == expected, expected, np.float32(np.nan))
    )


# Against vectors and oracle ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden_params("reduce"))
def test_vectors(case):
    frames = [form and frame_of(form) for form in case["frames"]]
    if "error" in case:
        with pytest.raises(ff.TensorError):
            ff.reduce_frames(frames)
    else:
        reduced = ff.reduce_frames(frames)
        assert bits(reduced.weight) == case["frame"]["weight_bits"]
        right = {key: case["frame"][key] for key in ("kind", "weight", "tensors")}
        assert same(ref.plain_nans(form_of(reduced)), ref.plain_nans(right))


@pytest.mark.parametrize(("ours", "oracle"), [(ff.sum_frames, ref.sum_frames), (ff.reduce_frames, ref.reduce_frames)],
                         ids=["sum", "reduce"])
def test_generated_groups_against_the_oracle(ours, oracle, revision):
    rng, outcomes = random.Random(21), set()
    for group in round_groups(21, 300, revision):
        if ours is ff.reduce_frames:
            group = [form if rng.random() < 0.8 else None for form in group]
        held = all(len(tensor["shape"]) <= 32 for form in group if form for tensor in form["tensors"])
        if not held:
            continue
        frames = [form and frame_of(form) for form in group]
        fold = ff.RoundFold()
        try:
            right = oracle(group)
        except ref.WireError:
            with pytest.raises(ff.TensorError):
                ours(frames)
            outcomes.add("refused")
        else:
            assert same(ref.plain_nans(form_of(ours(frames))), ref.plain_nans(right))
            for frame in filter(None, frames):
                fold.add(frame)
            folded = fold.sum() if ours is ff.sum_frames else fold.reduce()
            assert same(ref.plain_nans(form_of(folded)), ref.plain_nans(right))
            outcomes.add(right["kind"])
    assert outcomes == {"refused", "Model", "Control"}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 11, 12, 13, 25])
@pytest.mark.parametrize("size", [0, 1, 7, 63, 1000, 4095, 4096, 8192, 65_535, 65_537, 70_001])
def test_all_sizes_against_numpy(count, size):
    tensors = [noise(100 * size + i, size) for i in range(count)]
    frames = [model(0.5 + i, tensor) for i, tensor in enumerate(tensors)]
    weight = sum(0.5 + i for i in range(count))
    assert same_bits(ff.sum_frames(frames).tensors[0], expected_sum(tensors))
    reduced = ff.reduce_frames(frames)
    assert same_bits(reduced.tensors[0], expected_sum(tensors, weight))
    assert reduced.weight == weight


def test_views_of_frames_sum_like_copies():
    tensors = [[noise(7 * i + j, 5000 + j) for j in range(3)] for i in range(3)]
    raws = [wire(row, weight=1.0) for row in tensors]
    views = [CODEC.decode_round(raw, copy=False) for raw in raws]
    assert not all(t.flags.aligned for frame in views for t in frame.tensors)
    for fold in (ff.sum_frames, ff.reduce_frames):
        from_views, from_copies = fold(views), fold([CODEC.decode_round(raw) for raw in raws])
        pairs = zip(from_views.tensors, from_copies.tensors, strict=True)
        assert all(same_bits(a, b) for a, b in pairs)
        assert from_views.weight == from_copies.weight


# The arithmetic ------------------------------------------------------------------------------------------


def test_order_of_addition():
    big, one = f32(16777216.0), f32(1.0)
    assert ff.sum_frames([model(0, big), model(0, one), model(0, one)]).tensors[0] == 16777216
    assert ff.sum_frames([model(0, one), model(0, one), model(0, big)]).tensors[0] == 16777218


@BOTH
def test_sums_start_at_plus_zero(fold):
    total = fold([model(0.0, f32(-0.0, 0.0)), model(0.0, f32(-0.0, -0.0))])
    assert words(total.tensors[0]) == bytes(8)
    assert words(fold([model(0.0, f32(-0.0))]).tensors[0]) == bytes(4)
    assert words(fold([ff.RoundFrame([f32(-0.0)], CONTROL, 1.0)]).tensors[0]) == bytes(4)


def test_the_factor_is_rounded_to_float32_first():
    reduced = ff.reduce_frames([model(1.0, f32(1.0, 6.0)), model(2.0, f32(3.0, 8.0))])
    # 4 / 3 comes out as if divided, 14 / 3 one unit above.
    assert words(reduced.tensors[0]).hex() == "abaaaa3f" + "56559540"
    assert words(f32(4.0 / 3.0, 14.0 / 3.0)).hex() == "abaaaa3f" + "55559540"


@pytest.mark.parametrize(("weights", "total"), [
    ([-0.0], "8000000000000000"), ([-0.0, -0.0, -0.0], "8000000000000000"), ([-0.0, 0.0], "0000000000000000"),
    ([0.0, -0.0], "0000000000000000"), ([0.1, 0.2, 0.3], bits(0.1 + 0.2 + 0.3)),
    ([0.3, 0.2, 0.1], bits(0.3 + 0.2 + 0.1)), ([1e308, 1e308], "7ff0000000000000"), ([5e-324] * 2, bits(1e-323)),
    ([9007199254740992.0, 1.0, 1.0], bits(9007199254740992.0)),
])
@BOTH
def test_weights_add_up_in_float64_in_order(fold, weights, total):
    frames = [model(weight, f32(1.0)) for weight in weights]
    assert bits(fold(frames).weight) == total


@BOTH
def test_weights_of_other_types_add_up_in_float64(fold):
    for one in (np.float32(1), np.int32(1), 1, np.float64(1)):
        total = fold([model(np.float32(16777216), f32(1)), model(one, f32(1)), model(one, f32(1))]).weight
        assert total == 16777218.0
        assert isinstance(total, float)
    total = fold([model((1 << 53) + 1, f32(1)), model(1, f32(1))]).weight
    assert bits(total) == bits(9007199254740992.0 + 1.0)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
@BOTH
def test_a_weight_that_cannot_be_does_not_pass_unnoticed(fold, weight):
    with pytest.raises(ff.TensorError, match=f"frame 1.*weight.*{weight}"):
        fold([model(1.0, f32(1)), model(weight, f32(1)), model(5.0, f32(1))])


def test_a_weight_that_overflows_divides_by_infinity_as_the_crate_does():
    assert words(ff.reduce_frames([model(1e308, f32(3)), model(1e308, f32(4))]).tensors[0]) == bytes(4)


def test_a_tiny_weight_multiplies_by_infinity_as_the_crate_does():
    assert words(ff.reduce_frames([model(5e-324, f32(3.0, -3.0))]).tensors[0]) == words(f32(math.inf, -math.inf))


@BOTH
def test_control_frames_are_never_divided(fold):
    total = fold([ff.RoundFrame([f32(3.0)], CONTROL, 2.0), ff.RoundFrame([f32(4.0)], CONTROL, 1.0)])
    assert (total.kind, total.weight, total.tensors[0].tolist(), total.realized) == (CONTROL, 3.0, [7.0], True)


@pytest.mark.parametrize("weight", [0.0, -0.0])
def test_a_total_of_zero_is_not_divided_and_not_realized(weight):
    reduced = ff.reduce_frames([model(weight, f32(3.0)), model(weight, f32(4.0))])
    assert (reduced.weight, reduced.tensors[0].tolist(), reduced.realized) == (0.0, [7.0], False)


@pytest.mark.parametrize(("number", "kind"), [(0, MODEL), (1, CONTROL)])
def test_a_kind_that_was_set_to_its_number_is_that_kind(number, kind):
    frames = [ff.RoundFrame([f32(4.0)], kind, 2.0), ff.RoundFrame([f32(8.0)], kind, 2.0), model(0.0, f32(0.0))]
    expected = ff.reduce_frames(frames[:2])
    for frame in frames:
        frame.kind = number
    fold = ff.RoundFold()
    for frame in frames[:2]:
        fold.add(frame)
    for reduced in (ff.reduce_frames(frames[:2]), fold.reduce()):
        assert (reduced.kind, reduced.weight, reduced.tensors[0]) == (kind, 4.0, expected.tensors[0])
    assert frames[2].realized is (kind is CONTROL)
    with pytest.raises(ff.TensorError, match=rf"frame 1 is {kind.name}, frame 0 is {RoundKind(1 - number).name}"):
        ff.sum_frames([ff.RoundFrame([f32(1.0)], 1 - number), frames[0]])


@pytest.mark.parametrize("kind", [2, None, True, "MODEL"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_kind_that_is_none_is_refused(kind, at):
    frames, fold = [model(1.0, f32(1)), model(1.0, f32(1))], ff.RoundFold()
    frames[at].kind = kind
    for reduce in (ff.sum_frames, ff.reduce_frames, lambda frames: [fold.add(frame) for frame in frames]):
        with pytest.raises(ff.TensorError, match=f"frame {at}: kind must be a RoundKind, got"):
            reduce(frames)


def test_a_single_frame():
    tensor = noise(3, 100)
    assert same_bits(ff.sum_frames([model(4.0, tensor)]).tensors[0], expected_sum([tensor]))
    assert same_bits(ff.reduce_frames([model(4.0, tensor)]).tensors[0], expected_sum([tensor], 4.0))


def test_not_finite_values_go_through():
    inf, nan = math.inf, math.nan
    total = ff.sum_frames([model(0, f32(inf, inf, nan, 1, 3e38)), model(0, f32(1, -inf, 1, nan, 3e38))]).tensors[0]
    assert [str(x) for x in total.tolist()] == ["inf", "nan", "nan", "nan", "inf"]


# Absent frames -------------------------------------------------------------------------------------------


def test_absent_frames_count_in_neither_sum_nor_weight():
    frames = [None, model(1.0, f32(1.0)), None, model(3.0, f32(7.0)), None]
    reduced = ff.reduce_frames(frames)
    assert (reduced.weight, reduced.tensors[0].tolist()) == (4.0, [2.0])
    assert ff.reduce_frames(iter(frames)).weight == 4.0


@pytest.mark.parametrize("frames", [[], [None], [None, None]])
def test_no_frame_at_all(frames):
    with pytest.raises(ff.TensorError, match="no frame"):
        ff.reduce_frames(frames)


def test_a_sum_knows_no_absent_frames():
    with pytest.raises(ff.TensorError, match="no frame"):
        ff.sum_frames([])
    for frames in ([None], [model(1.0, f32(1)), None], [f32(1)], [model(1.0, f32(1)), "frame"]):
        with pytest.raises(TypeError):
            ff.sum_frames(frames)
    with pytest.raises(TypeError):
        ff.reduce_frames([model(1.0, f32(1)), f32(1)])


# Mismatches ----------------------------------------------------------------------------------------------


MISMATCHES = {
    "transposed": ([numbers(1), numbers(2, 3)], [numbers(1), numbers(3, 2)], r"tensor 1: .*\(3, 2\).*\(2, 3\)"),
    "flat": ([numbers(2, 3)], [numbers(6)], r"tensor 0: .*\(6,\).*\(2, 3\)"),
    "one more axis": ([numbers(3)], [numbers(1, 3)], r"tensor 0: .*\(1, 3\).*\(3,\)"),
    "scalar": ([numbers(1)], [numbers()], r"tensor 0: .*\(\).*\(1,\)"),
    "empty": ([numbers(0, 3)], [numbers(0)], r"tensor 0: .*\(0,\).*\(0, 3\)"),
    "larger": ([numbers(5)], [numbers(6)], r"tensor 0: .*\(6,\).*\(5,\)"),
    "fewer": ([numbers(1), numbers(1)], [numbers(1)], "1 tensors.*2"),
    "more": ([numbers(1)], [numbers(1), numbers(1)], "2 tensors.*1"),
    "none": ([numbers(1)], [], "0 tensors.*1"),
}


@pytest.mark.parametrize(("good", "bad", "text"), MISMATCHES.values(), ids=MISMATCHES)
def test_mismatches_name_frame_tensor_and_both_shapes(good, bad, text):
    frames = [model(1.0, *good), model(1.0, *good), model(1.0, *bad)]
    for fold in (ff.sum_frames, ff.reduce_frames):
        with pytest.raises(ff.TensorError, match=f"frame 2.*{text}") as caught:
            fold(frames)
        assert "frame 0" in str(caught.value)
    # Among absent frames it is the place in the list that counts: the rank.
    with pytest.raises(ff.TensorError, match=f"frame 4.*{text}") as caught:
        ff.reduce_frames([None, *frames[:2], None, frames[2]])
    assert "frame 1" in str(caught.value)


def test_mismatched_kinds_name_both():
    frames = [model(1.0, f32(1)), ff.RoundFrame([f32(1)], CONTROL, 1.0)]
    for fold in (ff.sum_frames, ff.reduce_frames):
        with pytest.raises(ff.TensorError, match=r"frame 1 is CONTROL.*frame 0 is MODEL"):
            fold(frames)
    with pytest.raises(ff.TensorError, match=r"frame 3 is MODEL.*frame 1 is CONTROL"):
        ff.reduce_frames([None, frames[1], None, frames[0]])


def test_another_dtype_names_the_tensor():
    frame = model(1.0, f32(1), f32(2))
    frame.tensors[1] = np.zeros(1)
    with pytest.raises(TypeError, match=r"tensor 1: .*float64"):
        ff.sum_frames([model(1.0, f32(1), f32(2)), frame])


# finite=True ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1, 31, 4000, 4999])
def test_finite_names_frame_tensor_and_element(value, at):
    good, bad = numbers(5000), numbers(5000)
    bad[at:] = value
    frames = [model(1.0, good, good), model(1.0, good, bad)]
    for fold in (ff.sum_frames, ff.reduce_frames):
        with pytest.raises(ff.TensorError, match=f"frame 1, tensor 1: {value} at element {at}$"):
            fold(frames, finite=True)
        assert not math.isfinite(fold(frames).tensors[1][at])
    with pytest.raises(ff.TensorError, match=f"frame 3, tensor 1: {value} at element {at}$"):
        ff.reduce_frames([frames[0], None, None, frames[1]], finite=True)


def test_finite_counts_elements_in_c_order():
    bad = numbers(3, 4)
    bad[1, 2] = math.nan
    for tensor in (bad, np.asfortranarray(bad), bad.astype(">f4"), np.pad(bad, 1)[1:-1, 1:-1]):
        with pytest.raises(ff.TensorError, match="frame 0, tensor 0: nan at element 6"):
            ff.sum_frames([model(1.0, tensor)], finite=True)


def test_finite_lets_finite_frames_pass():
    extremes = f32(3.4028235e38, -3.4028235e38, 1e-45, -0.0)
    assert ff.sum_frames([model(1.0, extremes), model(1.0, numbers(4) * 0)], finite=True).weight == 2.0
    # What finite inputs add up to is not looked at.
    assert ff.sum_frames([model(1.0, extremes)] * 2, finite=True).tensors[0][0] == math.inf


# Frame by frame ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 13])
@pytest.mark.parametrize("size", [0, 1, 63, 4096, 70_001])
def test_a_fold_gives_the_bits_of_the_whole_list(count, size):
    frames = [model(0.25 + i, noise(50 * size + i, size), numbers()) for i in range(count)]
    fold = ff.RoundFold()
    for take, whole in ((fold.sum, ff.sum_frames), (fold.reduce, ff.reduce_frames), (fold.sum, ff.sum_frames)):
        for frame in frames:
            fold.add(frame)
        got, right = take(), whole(frames)
        assert (got.kind, bits(got.weight)) == (right.kind, bits(right.weight))
        assert all(same_bits(a, b) for a, b in zip(got.tensors, right.tensors, strict=True))


def test_a_fold_takes_arrays_of_any_layout_and_keeps_none():
    source = numbers(3, 4)
    fold = ff.RoundFold()
    for tensor in (source, source.astype(">f4"), np.asfortranarray(source), np.pad(source, 1)[1:-1, 1:-1]):
        fold.add(ff.RoundFrame([tensor], CONTROL, 1.0))
    source[...] = 0
    total = fold.reduce()
    assert (total.kind, total.weight) == (CONTROL, 4.0)
    assert words(total.tensors[0]) == words(4 * numbers(3, 4))


def test_a_fold_of_weightless_frames():
    fold = ff.RoundFold()
    fold.add(model(-0.0, f32(-0.0)))
    fold.add(model(-0.0, f32(-0.0)))
    total = fold.reduce()
    assert (bits(total.weight), words(total.tensors[0]), total.realized) == ("8000000000000000", bytes(4), False)


def test_a_fold_starts_anew_and_empty_it_is_an_error():
    fold = ff.RoundFold()
    for take in (fold.sum, fold.reduce):
        with pytest.raises(ff.TensorError, match="no frame"):
            take()
        fold.add(model(1.0, numbers(2)))
        first = take()
        fold.add(ff.RoundFrame([numbers(3)], CONTROL, 2.0))
        assert words(take().tensors[0]) == words(numbers(3))
        assert words(first.tensors[0]) == words(numbers(2))


NAN = f32(1, math.nan, 3)


@pytest.mark.parametrize(("bad", "error", "text"), [
    (model(1.0, numbers(3), numbers(2, 3)), ff.TensorError, r"frame B, tensor 1: .*\(2, 3\).*frame A.*\(3, 2\)"),
    (model(1.0, numbers(3)), ff.TensorError, "frame B has 1 tensors, frame A has 2"),
    (ff.RoundFrame([numbers(3), numbers(3, 2)], CONTROL, 1.0), ff.TensorError, "frame B is CONTROL, frame A is MODEL"),
    (model(1.0, NAN, numbers(3, 2)), ff.TensorError, "frame B, tensor 0: nan at element 1"),
    (model("1", numbers(3), numbers(3, 2)), TypeError, "weight|str"),
    (model(math.nan, numbers(3), numbers(3, 2)), ff.TensorError, "frame B.*weight.*nan"),
    (None, TypeError, None),
], ids=["shape", "count", "kind", "not finite", "weight's type", "weight", "no frame"])
def test_a_frame_that_does_not_fit_leaves_the_fold_as_it_was(bad, error, text):
    good = model(2.0, numbers(3), numbers(3, 2))
    fold = ff.RoundFold()
    fold.add(good, "A")
    with pytest.raises(error, match=text):
        fold.add(bad, "B", finite=True)
    fold.add(good, "C")
    total = fold.sum()
    assert total.weight == 4.0
    assert words(total.tensors[0]) == words(2 * numbers(3))
    assert words(total.tensors[1]) == words(2 * numbers(3, 2))


def test_a_first_frame_that_cannot_be_leaves_the_fold_empty():
    fold, bad = ff.RoundFold(), model(1.0, numbers(3))
    bad.tensors.append(np.zeros(3))
    with pytest.raises(TypeError, match=r"tensor 1: .*float64"):
        fold.add(bad)
    with pytest.raises(ff.TensorError, match="frame 0, tensor 0: nan at"):
        fold.add(model(1.0, NAN), finite=True)
    fold.add(model(1.0, numbers(2)))
    assert fold.sum().weight == 1.0


def test_frames_without_a_name_are_numbered():
    fold = ff.RoundFold()
    fold.add(model(1.0, numbers(3)))
    fold.add(model(1.0, numbers(3)))
    with pytest.raises(ff.TensorError, match=r"frame 2, tensor 0: .*\(4,\).*frame 0.*\(3,\)"):
        fold.add(model(1.0, numbers(4)))


# What comes out ------------------------------------------------------------------------------------------


@BOTH
def test_the_result_is_new_and_native(fold):
    sources = [numbers(2, 3), numbers(2, 3).astype(">f4"), np.asfortranarray(numbers(2, 3))]
    frames = [model(1.0, source, f32(1)) for source in sources]
    result = fold(frames)
    assert type(result) is ff.RoundFrame
    for tensor in result.tensors:
        assert tensor.dtype == np.float32
        assert tensor.dtype.isnative
        assert tensor.flags.c_contiguous
        assert tensor.flags.aligned
        assert tensor.flags.writeable
        assert not any(np.shares_memory(tensor, source) for source in sources)
    result.tensors[0][...] = 0
    assert all(words(source) == words(numbers(2, 3)) for source in sources)


@BOTH
def test_frames_without_tensors(fold):
    result = fold([model(1.0), model(2.0)])
    assert (result.tensors, result.weight) == ([], 3.0)


@BOTH
def test_the_same_frame_twice(fold):
    frame = model(1.0, numbers(3))
    assert fold([frame, frame]).weight == 2.0
    assert words(frame.tensors[0]) == words(numbers(3))


def test_a_reduction_travels():
    frames = [model(1.0, numbers(2, 3)), model(1.0, numbers(2, 3, start=3))]
    decoded = CODEC.decode_round(CODEC.encode_round(ff.reduce_frames(frames)))
    assert words(decoded.tensors[0]) == words(numbers(2, 3, start=2))
    assert (decoded.kind, decoded.weight) == (MODEL, 2.0)
