"""Many frames in one buffer: encode_many, decode_many, timing_columns."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys

import numpy as np
import pytest
import reference as ref
from conftest import SALT, golden
from support import CODEC, classes, codec_at, crate_name, drawn, oracle_form, signed_frame

import flodl_fast as ff

HEARTBEAT = ff.Heartbeat(3, 1000)
FRAME = CODEC.encode(HEARTBEAT)
MANY = 150  # more than the codec looks at together, and no multiple of it


def frames_of(messages, prefixed):
    """The frames as one buffer, one at a time, and where each starts."""
    frames = [CODEC.encode(message) for message in messages]
    whole = b"".join(ref.add_prefix(frame) if prefixed else frame for frame in frames)
    starts, at = [], 0
    for frame in frames:
        starts.append(at)
        at += len(frame) + 4 * prefixed
    return whole, starts


def forms(messages):
    return [oracle_form(message) for message in messages]


@pytest.fixture(params=[False, True], ids=["plain", "prefixed"])
def prefixed(request):
    return request.param


# --------------------------------------------------------------------------------------------------------- encode_many


@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 32, 33, MANY])
def test_many_are_one_after_the_other(prefixed, count):
    messages = drawn(21, count, finite=True)
    whole, _ = frames_of(messages, prefixed)
    assert CODEC.encode_many(messages, prefixed=prefixed) == whole
    assert CODEC.encode_many(tuple(messages), prefixed=prefixed) == whole
    assert CODEC.encode_many((message for message in messages), prefixed=prefixed) == whole
    assert CODEC.decode_many(whole, prefixed=prefixed) == (messages, len(whole))


@pytest.mark.parametrize(("wrong", "error", "text"), [
    (ff.Heartbeat(1, -1), ff.EncodeError, r"message 3: Heartbeat\.step_count: expected an integer"),
    (ff.Heartbeat(1, "2"), TypeError, r"message 3: Heartbeat\.step_count: expected an integer, got str"),
    (None, TypeError, r"message 3: NoneType is not a message"),
    (ff.RelayHelloAck(), TypeError, r"message 3: RelayHelloAck travels in a mux record"),
    (ff.DashboardSetSvg(1, "x" * (16 << 20)), ff.EncodeError, r"message 3: DashboardSetSvg: .*\(max_payload\)"),
])
def test_a_bad_message_among_many_is_named(prefixed, wrong, error, text):
    with pytest.raises(error, match=text) as caught:
        CODEC.encode_many([HEARTBEAT, ff.Exiting(1), HEARTBEAT, wrong, HEARTBEAT], prefixed=prefixed)
    assert caught.type is error


def test_what_is_not_many():
    for value in (None, 5, HEARTBEAT):
        with pytest.raises(TypeError, match="iterable"):
            CODEC.encode_many(value)


def test_an_iterable_that_fails_is_passed_on():
    def failing():
        yield HEARTBEAT
        raise error

    for error in (KeyError("mine"), TypeError("mine"), ff.EncodeError("mine")):
        with pytest.raises(type(error)) as caught:
            CODEC.encode_many(failing())
        assert caught.value.args == ("mine",)


def test_big_messages_among_small_ones(prefixed):
    messages = [HEARTBEAT, ff.DashboardSetMetadata(1, "x" * 100_000), HEARTBEAT, ff.NewNcclIdGenerated(1, bytes(16384)),
                ff.DashboardSetMetadata(1, "y" * 16300), HEARTBEAT]
    whole, _ = frames_of(messages, prefixed)
    assert CODEC.encode_many(messages, prefixed=prefixed) == whole
    assert CODEC.decode_many(whole, prefixed=prefixed) == (messages, len(whole))
    assert [rows["index"].tolist() for rows in CODEC.timing_columns(whole, prefixed=prefixed).values()] == [
        [0, 2, 5], [3], [1, 4]]


@pytest.mark.parametrize("sizes", [
    [200_000] + [1] * 300, [1] * 300 + [200_000], [1] * 40 + [3000] * 40 + [1] * 40, [1, 500] * 100, [40] * 2000,
])
def test_frames_of_all_sizes_fit_whatever_room_was_foreseen(prefixed, sizes):
    messages = [ff.DashboardSetMetadata(i, "x" * size) for i, size in enumerate(sizes)]
    whole, _ = frames_of(messages, prefixed)
    got = CODEC.encode_many(messages, prefixed=prefixed)
    assert got == whole
    # A bytes object ends with a null byte that C code may rely on.
    assert ctypes.string_at(ctypes.cast(ctypes.c_char_p(got), ctypes.c_void_p).value, len(got) + 1) == whole + b"\0"


def test_one_message_changed_on_the_way_is_taken_each_time():
    def beats():
        message = ff.Heartbeat(1, 0)
        for message.step_count in range(100):
            yield message

    assert CODEC.encode_many(beats()) == CODEC.encode_many([ff.Heartbeat(1, i) for i in range(100)])


# --------------------------------------------------------------------------------------------------------- decode_many


def test_many_vectors_of_one_salt(prefixed):
    frames = [ref.encode_frame(SALT, case["kind"], case["msg"]) for name in ("timing", "control", "join")
              for case in golden(name) if "null" not in str(case["msg"]) and ref.one_byte_form(case["msg"])]
    whole = b"".join(ref.add_prefix(frame) if prefixed else frame for frame in frames)
    messages, consumed = CODEC.decode_many(whole, prefixed=prefixed, trailing="error")
    assert (len(messages), consumed) == (len(frames), len(whole))
    assert forms(messages) == forms(CODEC.decode(frame) for frame in frames)
    assert CODEC.encode_many(messages, prefixed=prefixed) == whole


def test_a_partial_last_frame_is_left(prefixed):
    messages = [HEARTBEAT, ff.Exiting(1), ff.CoordHeartbeat()]
    whole, starts = frames_of(messages, prefixed)
    for size in range(len(whole) + 1):
        complete = sum(1 for start in [*starts[1:], len(whole)] if start <= size)
        expected = messages[:complete], ([*starts, len(whole)])[complete]
        assert CODEC.decode_many(whole[:size], prefixed=prefixed) == expected
        assert CODEC.decode_many(bytearray(whole[:size]), prefixed=prefixed, trailing="error") == expected


def test_a_buffer_can_be_decoded_in_any_pieces(prefixed):
    messages = drawn(22, MANY, finite=True)
    whole, _ = frames_of(messages, prefixed)
    rng = random.Random(22)
    got, rest, at = [], b"", 0
    while at < len(whole):
        size = rng.choice((1, 5, 30, 200, 5000))
        rest += whole[at:at + size]
        at += size
        more, consumed = CODEC.decode_many(rest, prefixed=prefixed)
        got += more
        rest = rest[consumed:]
    assert got == messages
    assert rest == b""


FAULTS = {
    "MAC": (lambda frame: frame[:8] + bytes(8) + frame[16:], ff.AuthenticationError),
    "magic": (lambda frame: b"\0" + frame[1:], ff.BadMagicError),
    "version": (lambda frame: frame[:4] + b"\7" + frame[5:], ff.VersionMismatchError),
    "kind": (lambda frame: frame[:16] + b"\7\1" + frame[18:], ff.UnknownKindError),
    "length": (lambda frame: frame[:23] + b"\7" + frame[24:], ff.LimitError),
    "payload": (lambda frame: signed_frame(2, b"\x63" + frame[25:]), ff.PayloadError),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("place", [0, 1, 2, 31, 32, 33, MANY - 1])
def test_a_fault_gives_what_came_before_it_and_its_place(prefixed, name, place):
    break_it, error = FAULTS[name]
    messages = drawn(23, MANY, finite=True, kinds=("Timing",))
    frames = [CODEC.encode(message) for message in messages]
    frames[place] = break_it(frames[place])
    for after in (frames[place + 1:], [], [FRAME[:10]]):
        parts = [ref.add_prefix(frame) if prefixed else frame for frame in frames[:place + 1] + after]
        whole, offset = b"".join(parts), sum(map(len, parts[:place]))
        for call in (CODEC.decode_many, CODEC.timing_columns):
            with pytest.raises(error, match=f"frame at byte {offset}: ") as caught:
                call(whole, prefixed=prefixed)
            assert caught.type is error
            assert caught.value.offset == offset
            if call == CODEC.decode_many:
                assert caught.value.decoded == messages[:place]


def test_the_first_of_two_faults_is_the_one_that_is_told(prefixed):
    frames = [FRAME, signed_frame(2, b"\x63"), FRAME, FRAME[:8] + bytes(8) + FRAME[16:], b"\0" * 30]
    whole = b"".join(ref.add_prefix(frame) if prefixed else frame for frame in frames)
    for call in (CODEC.decode_many, CODEC.timing_columns):
        with pytest.raises(ff.PayloadError) as caught:
            call(whole, prefixed=prefixed)
        assert caught.value.offset == len(FRAME) + 4 * prefixed


def test_single_frames_have_no_offset():
    with pytest.raises(ff.DecodeError) as caught:
        CODEC.decode(b"\0" * 24)
    assert caught.value.offset is None
    assert len(caught.value.decoded) == 0


def test_prefixes_that_do_not_fit():
    for body, error in ((b"", ff.TruncatedError), (FRAME[:10], ff.TruncatedError), (FRAME[:-1], ff.TruncatedError)):
        whole = ref.add_prefix(FRAME) + ref.add_prefix(body) + ref.add_prefix(FRAME)
        for call in (CODEC.decode_many, CODEC.timing_columns):
            with pytest.raises(error, match=f"frame at byte {len(FRAME) + 4}") as caught:
                call(whole, prefixed=True)
            assert caught.value.offset == len(FRAME) + 4
    with pytest.raises(ff.LimitError, match=r"1073741825 bytes is above the limit of 1073741824 \(frame_ceiling\)"):
        CODEC.decode_many(b"\1\0\0\x40", prefixed=True)
    assert CODEC.decode_many(b"\0\0\0\x40", prefixed=True) == ([], 0)


def test_bytes_after_a_frame_in_its_prefix():
    whole = ref.add_prefix(FRAME) + ref.add_prefix(FRAME + b"xyz") + ref.add_prefix(FRAME)
    assert CODEC.decode_many(whole, prefixed=True) == ([HEARTBEAT] * 3, len(whole))
    assert CODEC.timing_columns(whole, prefixed=True)["Heartbeat"]["index"].tolist() == [0, 1, 2]
    for call in (CODEC.decode_many, CODEC.timing_columns):
        with pytest.raises(ff.TrailingDataError, match=r"3 extra bytes") as caught:
            call(whole, prefixed=True, trailing="error")
        assert caught.value.offset == len(FRAME) + 4


def test_columns_check_the_prefixes_of_other_kinds():
    whole = ref.add_prefix(CODEC.encode(ff.Shutdown()) + b"xyz")
    assert CODEC.timing_columns(whole, prefixed=True) == {}
    with pytest.raises(ff.TrailingDataError, match=r"3 extra bytes"):
        CODEC.timing_columns(whole, prefixed=True, trailing="error")


@pytest.mark.parametrize("message", [HEARTBEAT, ff.DashboardSetMetadata(1, "text")])
def test_bytes_after_a_value_in_its_frame(prefixed, message):
    frame = signed_frame(2, CODEC.encode_payload(message) + b"xy")
    whole = b"".join(ref.add_prefix(f) if prefixed else f for f in (FRAME, frame, FRAME))
    assert CODEC.decode_many(whole, prefixed=prefixed)[0] == [HEARTBEAT, message, HEARTBEAT]
    with pytest.raises(ff.TrailingDataError, match="2 extra bytes") as caught:
        CODEC.decode_many(whole, prefixed=prefixed, trailing="error")
    assert caught.value.decoded == [HEARTBEAT]
    assert caught.value.offset == len(FRAME) + 4 * prefixed
    CODEC.timing_columns(whole, prefixed=prefixed)
    with pytest.raises(ff.TrailingDataError, match="2 extra bytes"):
        CODEC.timing_columns(whole, prefixed=prefixed, trailing="error")


# ------------------------------------------------------------------------------------------------------ timing_columns


COLUMN = {"u64": "u8", "u16": "u2", "f64": "f8"}
NEWEST = codec_at("0.8")
VARIANTS = classes(ff.TimingMsg)


def expected_dtype(variant):
    fields = [("index", "i8")]
    for name, of in ref.SCHEMAS["0.8"]["Timing"].variants[variant].items():
        inner = of.of if isinstance(of, ref.Opt) else of
        kind = "u4" if isinstance(inner, ref.Enum) else COLUMN.get(inner, "O") if isinstance(inner, str) else "O"
        fields.append((name, kind))
        if isinstance(of, ref.Opt):
            fields.append((f"{name}_present", "?"))
    return np.dtype(fields)


def bits_of(value):
    """What tells a value from another one, a NaN and -0.0 included."""
    if isinstance(value, ff.ResourceSample):
        return repr(value)
    return np.float64(value).tobytes() if isinstance(value, float) else value


def check_columns(columns, messages):
    """Each row of the columns holds what decode_many gives."""
    timing = [(i, message) for i, message in enumerate(messages) if type(message) in VARIANTS]
    assert list(columns) == [cls.__name__ for cls in VARIANTS if any(type(m) is cls for _, m in timing)]
    for name, rows in columns.items():
        met = [(i, message) for i, message in timing if type(message).__name__ == name]
        expected = expected_dtype(crate_name(getattr(ff, name)))
        assert [(field, rows.dtype[field]) for field in rows.dtype.names] == [
            (field, expected[field]) for field in expected.names]
        assert rows.shape == (len(met),)
        assert rows["index"].tolist() == [i for i, _ in met]
        for field in type(met[0][1]).__slots__:
            values = [getattr(message, field) for _, message in met]
            column = rows[field].tolist()
            if f"{field}_present" in rows.dtype.names:
                assert rows[f"{field}_present"].tolist() == [value is not None for value in values]
                if rows.dtype[field] == np.float64:
                    assert all(np.isnan(got) for got, value in zip(column, values, strict=True) if value is None)
                    column = [got if value is not None else None for got, value in zip(column, values, strict=True)]
            assert list(map(bits_of, column)) == list(map(bits_of, values))


def test_columns_hold_what_decode_many_gives(prefixed):
    for seed, kinds in ((31, ("Timing",)), (32, ("Timing", "Metrics", "Control", "Join"))):
        messages = drawn(seed, 600, kinds=kinds)
        whole = CODEC.encode_many(messages, prefixed=prefixed)
        check_columns(CODEC.timing_columns(whole, prefixed=prefixed), messages)


@pytest.mark.parametrize("counts", [(64,), (65,), (2000,), (1, 500), (500, 1, 300), (40, 40, 40, 40)])
def test_columns_of_any_length(counts):
    """Runs of one variant, then of another: more than was foreseen, and less."""
    kinds = [lambda i: ff.Batch(i, i / 3, 0.5, i, batch_loss=0.25), lambda i: ff.LrUpdate(i, 1 / (1 + i))]
    messages = [kinds[run % 2](i) for run, count in enumerate(counts) for i in range(count)]
    columns = CODEC.timing_columns(CODEC.encode_many(messages))
    check_columns(columns, messages)
    for rows in columns.values():
        # No memory of others shows where a record has no field.
        raw = np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), -1)
        used = {at + i for of, at in rows.dtype.fields.values() for i in range(of.itemsize)}
        assert not raw[:, sorted(set(range(rows.itemsize)) - used)].any()


@pytest.mark.parametrize("cls", VARIANTS, ids=crate_name)
def test_columns_of_one_variant(cls):
    messages = [message for message in drawn(33, 600, "0.8", kinds=("Timing",)) if type(message) is cls]
    for count in (1, 2, len(messages)):
        columns = NEWEST.timing_columns(NEWEST.encode_many(messages[:count]), trailing="error")
        assert list(columns) == [cls.__name__]
        check_columns(columns, messages[:count])


def test_columns_of_nothing(prefixed):
    assert CODEC.timing_columns(b"", prefixed=prefixed) == {}
    others = [ff.Shutdown(), ff.MetricsMsg(1, 2), ff.Reserved(4, b"x"), ff.JoinAbort("why")]
    assert CODEC.timing_columns(CODEC.encode_many(others, prefixed=prefixed), prefixed=prefixed) == {}


def test_columns_skip_other_kinds_but_count_them():
    messages = [ff.Shutdown(), HEARTBEAT, ff.MetricsMsg(1, 2), ff.Reserved(5, b"x"), HEARTBEAT, ff.Exiting(9)]
    columns = CODEC.timing_columns(CODEC.encode_many(messages))
    assert columns["Heartbeat"].tolist() == [(1, 3, 1000), (4, 3, 1000)]
    assert columns["Exiting"].tolist() == [(5, 9)]


def test_columns_check_the_macs_of_other_kinds():
    frames = [FRAME, CODEC.encode(ff.Shutdown())]
    frames[1] = frames[1][:8] + bytes(8) + frames[1][16:]
    with pytest.raises(ff.AuthenticationError) as caught:
        CODEC.timing_columns(b"".join(frames))
    assert caught.value.offset == len(FRAME)


def test_a_buffer_of_columns_must_end_with_a_whole_frame(prefixed):
    whole = CODEC.encode_many([HEARTBEAT] * 2, prefixed=prefixed)
    half = len(whole) // 2
    for size in [*range(1, half), *range(half + 1, len(whole))]:
        with pytest.raises(ff.TruncatedError, match="inside its last frame") as caught:
            CODEC.timing_columns(whole[:size], prefixed=prefixed)
        assert caught.value.offset == (0 if size < half else half)


def test_columns_are_ordinary_arrays():
    batches = [ff.Batch(1, 2.0, 3.0, 4), ff.Batch(5, 6.0, 7.0, 8, 0.5, 0.25, 0.125)]
    rows = CODEC.timing_columns(CODEC.encode_many(batches))["Batch"]
    assert rows.ndim == 1
    assert rows.flags.c_contiguous
    assert rows.flags.aligned
    assert rows.flags.writeable
    assert rows["batch_ms"].mean() == 4.0
    assert rows["param_norm"][rows["param_norm_present"]].tolist() == [0.5]
    rows["rank"] = 7
    assert rows.copy().tolist()[1] == (1, 7, 6.0, 7.0, 8, 0.5, True, 0.25, 0.125, True)
    assert np.concatenate([rows, rows]).shape == (4,)


def test_present_nans_are_told_from_absent_ones():
    messages = [ff.SyncAck(1, 0), ff.SyncAck(1, 0, float("nan"), 0.0, -0.0), ff.SyncAck(1, 0, float("inf"))]
    rows = CODEC.timing_columns(CODEC.encode_many(messages))["SyncAck"]
    assert np.isnan(rows["divergence"]).tolist() == [True, True, False]
    assert rows["divergence_present"].tolist() == [False, True, True]
    assert np.signbit(rows["pre_norm"][1])
    assert rows["post_norm_present"].tolist() == [False, True, False]


def test_numbers_at_their_ends_in_columns():
    top = 2**64 - 1
    messages = [ff.Heartbeat(top, top), ff.DashboardRegister(top, 65535), ff.Intent(top, ff.IntentKind.CHECKPOINT_NOW),
                ff.EvalResult(top, top, top, 1.0, 2.0, None)]
    columns = CODEC.timing_columns(CODEC.encode_many(messages))
    assert columns["Heartbeat"].tolist() == [(0, top, top)]
    assert columns["DashboardRegister"].tolist() == [(1, top, 65535)]
    assert columns["Intent"].tolist() == [(2, top, 1)]
    assert columns["EvalResult"].tolist() == [(3, top, top, top, 1.0, 2.0, None, False)]


@pytest.mark.parametrize("cls", VARIANTS, ids=crate_name)
def test_columns_refuse_every_payload_that_decode_refuses(cls):
    """Whole, cut short at each byte, and with each byte changed."""
    for message in [m for m in drawn(34, 64, "0.8", kinds=("Timing",)) if type(m) is cls]:
        payload = NEWEST.encode_payload(message)[:120]
        bad = [payload[:at] for at in range(len(payload))]
        bad += [payload[:at] + bytes([byte]) + payload[at + 1:] for at in range(len(payload)) for byte in (2, 251, 255)]
        good = NEWEST.encode(HEARTBEAT)
        for damaged in bad:
            frame, message, refused = signed_frame(2, damaged, "0.8"), None, None
            try:
                message = NEWEST.decode(frame)
            except ff.DecodeError as error:
                refused = error
            if refused is None:
                check_columns(NEWEST.timing_columns(frame + good), [message, HEARTBEAT])
                continue
            with pytest.raises(type(refused)) as caught:
                NEWEST.timing_columns(good * 3 + frame + good)
            assert str(caught.value) == f"frame at byte {3 * len(good)}: {refused}"


OVERRUN = """
import sys
sys.path[:0] = {path!r}
from support import CODEC, signed_frame
import flodl_fast as ff
full = CODEC.encode(ff.Batch(1, 1.0, 2.0, 3))
short = signed_frame(2, bytes([0, 1]) + bytes([255]) * 16)
for _ in range(300):
    for n in (0, 1, 2, 3, 7):
        try:
            CODEC.timing_columns(full * n + short)
        except ff.PayloadError:
            continue
        raise SystemExit("a payload that ends early was taken")
"""


def test_a_payload_that_ends_early_is_not_written_past_the_columns():
    """In a process of its own, which memory written out of bounds brings down."""
    script = OVERRUN.format(path=[path for path in sys.path if path.endswith("tests")])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
