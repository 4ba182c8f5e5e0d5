"""Inputs on which tools of this kind have failed, messages and frames: each with its right value.

The numbers are those of a list of public bug reports that the project keeps; round frames have their own file.
"""

from __future__ import annotations

import hmac
import itertools
import struct
from functools import partial

import numpy as np
import pytest
import reference as ref
from conftest import SALT
from round_support import measures_memory
from support import CODEC, check_that_nothing_is_left, oracle_form, signed_frame

import flodl_fast as ff
from flodl_fast import convert

UPDATE = "c4170df102000000a13e7e5fb41a625d0100000003000000010700"


def decode(frame, **options):
    return CODEC.decode(bytes.fromhex(frame), **options)


def payload(message):
    return CODEC.encode_payload(message).hex()


# 1: bytes left after a value.

LEFTOVER = "c4170df10200000035d38a7fe3a61a5b010000000300000012dead"


def test_1_bytes_after_a_value_are_ignored_or_named():
    assert decode(LEFTOVER) == decode(LEFTOVER, trailing="ignore") == ff.CoordHeartbeat()
    with pytest.raises(ff.TrailingDataError, match=r"2 extra bytes of 3"):
        decode(LEFTOVER, trailing="error")
    with pytest.raises(ff.TrailingDataError, match=r"2 extra bytes of 3"):
        CODEC.decode_payload("Control", b"\x12\xde\xad", trailing="error")


def test_1_bytes_after_a_value_are_not_the_next_frame():
    for stream in (bytes.fromhex(LEFTOVER + UPDATE), bytes.fromhex(LEFTOVER * 2 + UPDATE)):
        expected = [ff.CoordHeartbeat()] * (len(stream) // 27 - 1) + [ff.Update(7)]
        assert CODEC.decode_many(stream) == (expected, len(stream))
        reader = ff.FrameReader(CODEC, "control")
        for at in range(len(stream)):
            reader.feed(stream[at:at + 1])
        assert list(reader) == expected
        reader.eof()


def test_1_a_younger_peer_with_the_same_version_number():
    """EpochAggregated of 0.7.0 has two fields more, here empty, and announces itself like 0.6.0."""
    message = ff.EpochAggregated(ff.EpochMetrics(3, {"loss": 0.5}))
    frame = signed_frame(1, CODEC.encode_payload(message) + b"\0\0")
    assert CODEC.decode(frame) == message
    with pytest.raises(ff.TrailingDataError, match=r"EpochAggregated ends at payload byte .* 2 extra bytes"):
        CODEC.decode(frame, trailing="error")


# 2: many byte strings for one value, and tags that are none.


def test_2_a_wide_integer_is_read_and_written_narrow():
    message = decode("c4170df102000000aa231ba3b71a056d010000000500000001fb070000", trailing="error")
    assert message == ff.Update(7, None)
    assert payload(message) == "010700"


BAD_TAG = "c4170df102000000dac3cf6c2ec962330100000003000000010702"
BAD_VARIANT = "c4170df1020000002255609c07ddfe85010000000100000014"


@pytest.mark.parametrize(("frame", "text"), [
    (BAD_TAG, r"Update\.next_plan: option tag must be 0 or 1, got 2 \(payload byte 2\)"),
    (BAD_VARIANT, r"unknown variant 20 of Control.*\(payload byte 0\)"),
])
def test_2_bad_tags_and_variants(frame, text):
    with pytest.raises(ff.PayloadError, match=text):
        decode(frame)


@pytest.mark.parametrize(("kind", "raw", "at"), [
    ("Control", "09ff", 1), ("Control", "ff", 0), ("Control", "09fe" + "07" + "00" * 15, 1),
    ("Control", "fe" + "00" * 16, 0),
    ("Control", "fd0000000000000000", 0), ("Timing", "0b01fc901f0000", 2), ("Relay", "02fd0500000000000000", 1),
    ("Join", "0400fd0100000000000000", 2), ("Timing", "0400fd0000000000000000", 2),
])
def test_2_leads_that_do_not_fit_the_type(kind, raw, at):
    """Width beyond the type fails even where the value fits."""
    with pytest.raises(ff.PayloadError, match=rf"lead byte.*\(payload byte {at}\)"):
        CODEC.decode_payload(kind, bytes.fromhex(raw))


# 3: one integer encoding, this one.


@pytest.mark.parametrize(("message", "expected"), [
    *((ff.SetGlobalStep(value), "09" + raw) for value, raw in (
        (250, "fa"), (251, "fbfb00"), (65535, "fbffff"), (65536, "fc00000100"), (2**32, "fd0000000001000000"))),
    (ff.DashboardRegister(1, 8080), "0b01" + "fb901f"),
    *((ff.JoinRankExited(0, value), "0400" + raw) for value, raw in ((-1, "01"), (-9, "11"), (137, "fb1201"))),
    (ff.ShutdownWithSave(255), "0eff"),
    (ff.RendezvousUid(bytes([1, 255, 251])), "02" + "0301fffb"),
    (ff.RendezvousHello(bytes([7] * 32), 0, ""), "00" + "07" * 32 + "00" + "00"),
])
def test_3_integers(message, expected):
    assert payload(message) == expected
    kind, form = oracle_form(message)
    assert CODEC.decode_payload(kind, bytes.fromhex(expected), trailing="error") == message
    assert ref.encode_payload(kind, form).hex() == expected


# 4: maps.


def test_4_the_order_of_a_map_is_no_part_of_its_value():
    pairs = [("a", 1.0), ("b", 2.0)]
    one, other = (ff.EpochAggregated(ff.EpochMetrics(0, dict(order))) for order in (pairs, pairs[::-1]))
    frames = CODEC.encode(one), CODEC.encode(other)
    assert frames[0] != frames[1]
    assert CODEC.decode(frames[0]) == CODEC.decode(frames[1]) == one
    assert CODEC.encode(one) == frames[0]
    assert [list(CODEC.decode(frame).metrics.scalars) for frame in frames] == [["a", "b"], ["b", "a"]]
    assert CODEC.encode(CODEC.decode(frames[1])) == frames[1]


def test_4_of_two_equal_keys_the_last_wins():
    scalars = "02" + "0161" + struct.pack("<d", 1.0).hex() + "0161" + struct.pack("<d", 2.0).hex()
    metrics = CODEC.decode_payload("Control", bytes.fromhex("0f00" + scalars) + bytes(23), trailing="error").metrics
    assert metrics.scalars == {"a": 2.0}
    assert payload(ff.EpochAggregated(metrics)).startswith("0f00" + "01" + "0161")


# 5: what the MAC covers.


def test_5_the_mac_covers_kind_length_and_payload():
    assert decode(UPDATE) == ff.Update(7)
    assert CODEC.encode(ff.Update(7)).hex() == UPDATE
    signed = bytes.fromhex(UPDATE)[16:]
    assert hmac.digest(SALT, signed, "sha256")[:8].hex() == UPDATE[16:32]
    payload_only = hmac.digest(SALT, signed[8:], "sha256")[:8].hex()
    assert payload_only == "33192ea1d804a399"
    with pytest.raises(ff.AuthenticationError):
        decode(UPDATE[:16] + payload_only + UPDATE[32:])


def test_5_every_flipped_bit_is_refused():
    frame = bytes.fromhex(UPDATE)
    for at in range(len(frame)):
        for bit in range(8):
            flipped = frame[:at] + bytes([frame[at] ^ 1 << bit]) + frame[at + 1:]
            with pytest.raises(ff.DecodeError) as caught:
                CODEC.decode(flipped)
            if 8 <= at < 16 or at >= 24:
                assert caught.type is ff.AuthenticationError
    with pytest.raises(ff.AuthenticationError):
        CODEC.decode(frame[:16] + b"\2" + frame[17:])  # Control turned Timing


def test_5_a_record_for_another_rank_is_refused():
    record = bytes.fromhex("d0170df1010000000103000000020000007b0f02ad55c4cb3b6869")
    assert CODEC.decode_mux(record) == ff.MuxRecord(ff.MuxKind.DATA, 3, b"hi")
    assert CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 3, b"hi")) == record
    with pytest.raises(ff.AuthenticationError):
        CODEC.decode_mux(record[:9] + b"\2" + record[10:])


def test_5_an_error_does_not_hand_out_the_tag():
    right = bytes.fromhex(UPDATE)[8:16]
    with pytest.raises(ff.AuthenticationError) as caught:
        decode(UPDATE[:16] + "00" * 8 + UPDATE[32:])
    shown = f"{caught.value} {caught.value.args!r} {vars(caught.value)!r}"
    for form in (right.hex(), right[::-1].hex(), str(int.from_bytes(right, "little")), repr(right)):
        assert form not in shown


# 10: read-only input.


@pytest.mark.parametrize("form", [
    bytes, lambda data: memoryview(data)[::1], lambda data: memoryview(bytearray(data)).toreadonly(),
    lambda data: np.frombuffer(data, np.uint8),
], ids=["bytes", "view", "read-only", "ndarray"])
def test_10_read_only_input(form):
    frame = bytes.fromhex(UPDATE)
    assert CODEC.decode(form(frame)) == ff.Update(7)
    assert CODEC.decode_many(form(frame)) == ([ff.Update(7)], len(frame))
    assert CODEC.timing_columns(form(frame)) == {}
    reader = ff.FrameReader(CODEC, "control")
    reader.feed(form(frame))
    assert reader.next() == ff.Update(7)


def test_10_read_only_values_and_targets():
    for uid in (b"uid", memoryview(b"uid")[::1], memoryview(bytearray(b"uid")).toreadonly()):
        assert payload(ff.RendezvousUid(uid)) == "0203756964"
    for target in (bytes(99), memoryview(bytearray(99)).toreadonly()):
        with pytest.raises(TypeError, match="writable"):
            CODEC.encode_into(ff.Update(7), target)


# 11: array scalars.


@pytest.mark.parametrize(("loss", "count"), [
    (np.float32(0.1), np.int64(3)), (np.float32(0.1), np.uint8(3)), (np.array(0.1, np.float32), np.array(3)),
])
def test_11_numpy_scalars(loss, count):
    raw = payload(ff.MetricsMsg(0, 0, scalars={"loss": (loss, count)}))
    assert raw == "00" * 44 + "01" + "046c6f7373" + "000000a09999b93f" + "03" + "00"


def test_11_the_other_floats():
    for value in (np.float64(0.1), np.float16(0.1), np.array(0.1), np.longdouble(0.25)):
        assert payload(ff.LrUpdate(0, value)) == "0300" + struct.pack("<d", float(value)).hex()


@pytest.mark.parametrize(("value", "text"), [
    ("x", "str 'x'"), (None, "NoneType"), (1j, "complex"), (np.complex64(1), "complex64"),
])
def test_11_what_is_no_number_names_key_and_type(value, text):
    with pytest.raises(TypeError, match=rf"MetricsMsg\.scalars\['loss'\]\[0\]: expected a float, got {text}"):
        CODEC.encode(ff.MetricsMsg(0, 0, scalars={"loss": (value, 3)}))
    with pytest.raises(TypeError, match=rf"MetricsMsg\.scalars\['loss'\]\[1\]: expected an integer, got {text}"):
        ff.metrics_msg_to_wire(ff.MetricsMsg(0, 0, scalars={"loss": (0.1, value)}))


# 12: text.


BAD_TEXT = "c4170df10200000041324a348620468e02000000050000000d0002c328"


def test_12_bytes_that_are_no_text():
    text = r"DashboardSetMetadata\.json: text is not UTF-8.*\(payload byte 3\)"
    with pytest.raises(ff.PayloadError, match=text) as caught:
        decode(BAD_TEXT)
    assert not isinstance(caught.value, UnicodeError)
    for raw in ("03eda080", "02c080"):
        with pytest.raises(ff.PayloadError, match=r"not UTF-8.*\(payload byte 2\)"):
            CODEC.decode_payload("Join", bytes.fromhex("02" + raw))


def test_12_text_that_has_no_bytes():
    with pytest.raises(ff.EncodeError, match=r"MetricsMsg\.scalars\['\\ud800'\].*surrogate"):
        CODEC.encode(ff.MetricsMsg(0, 0, scalars={"\ud800": (1.0, 1)}))
    with pytest.raises(ff.EncodeError, match=r"JoinReject\.reason.*surrogate"):
        CODEC.encode(ff.JoinReject("\ud800"))


@pytest.mark.parametrize("text", ["\0", "", "🦀", "a\0b"])
def test_12_text_that_round_trips(text):
    for message in (ff.JoinReject(text), ff.MetricsMsg(0, 0, scalars={text: (1.0, 1)})):
        assert CODEC.decode(CODEC.encode(message), trailing="error") == message


# 13: integers.


@pytest.mark.parametrize(("rank", "error"), [
    (-1, ff.EncodeError), (2**64, ff.EncodeError), (np.int64(-1), ff.EncodeError), (1.5, TypeError), ("1", TypeError),
    (True, TypeError),
])
def test_13_ranks_that_are_none(rank, error):
    for call in (CODEC.encode, ff.timing_msg_to_wire):
        with pytest.raises(error, match=r"Exiting\.rank: expected an integer"):
            call(ff.Exiting(rank))


def test_13_the_largest_integer():
    assert CODEC.decode(CODEC.encode(ff.Exiting(2**64 - 1))) == ff.Exiting(2**64 - 1)


def test_13_the_reserved_rank_is_read_but_not_converted():
    message = decode("c4170df10200000007cea3f00e8f8946010000000b0000000a00fdffffffffffffffff")
    assert message == ff.Checkpoint(0, 2**64 - 1)
    for reserved in (message, ff.ExecuteEvalCallback(1, 2, 2**64 - 1), ff.SaveConsensusModel(2**64 - 1)):
        with pytest.raises(ff.ReservedTargetError, match="reserve"):
            ff.control_wire_to_msg(reserved)
    with pytest.raises(ff.EncodeError, match=r"Checkpoint\.target_rank.*-1"):
        ff.control_wire_to_msg(ff.Checkpoint(0, np.int64(-1)))
    assert ff.control_wire_to_msg(ff.DeclareDead(2**64 - 1)) == convert.DeclareDead()


# 14: what fails leaves nothing behind.


@measures_memory
def test_14_failing_decodes_and_encodes_leak_nothing():
    good = CODEC.encode(ff.MetricsMsg(3, 5, scalars={"loss": (0.5, 3)}))
    bad = [*map(bytes.fromhex, (BAD_TAG, BAD_VARIANT, BAD_TEXT)), good[:-1] + b"?"]
    bad += [good[:size] for size in range(0, len(good), 7)]
    first, second = np.float32(0.5), object()
    calls = [
        lambda raw: CODEC.decode(raw), lambda raw: CODEC.timing_columns(raw + b"?"),
        lambda raw: CODEC.decode(memoryview(raw), trailing="error"),
        lambda raw: CODEC.encode(ff.MetricsMsg(0, 0, scalars={"first": (first, 1), "second": (second, 1)})),
        lambda raw: CODEC.encode_many([ff.LrUpdate(0, first), ff.LrUpdate(0, second)]),
    ]
    check_that_nothing_is_left(
        (partial(call, raw) for raw, call in itertools.product(bad, calls)), [first, second, *bad]
    )


# 16: sizes.


def test_16_the_largest_payload():
    blob = bytes(16_777_216 - 6)  # an index and a length before it
    message = ff.RendezvousUid(blob)
    frame = CODEC.encode(message)
    assert len(frame) == 24 + 16_777_216
    assert CODEC.decode(frame) == message
    assert CODEC.decode_many(frame) == ([message], len(frame))
    with pytest.raises(ff.EncodeError, match=r"16777217 bytes is above the limit of 16777216 \(max_payload\)"):
        CODEC.encode(ff.RendezvousUid(blob + b"x"))


def test_16_a_larger_payload_is_refused_before_any_of_it_is_read():
    header = bytes.fromhex("c4170df10200000000000000000000000100000001000001")
    assert len(header) == 24
    for call in (CODEC.decode, CODEC.decode_many, CODEC.timing_columns):
        with pytest.raises(ff.LimitError, match=r"16777217 bytes is above the limit of 16777216 \(max_payload\)"):
            call(header)
    reader = ff.FrameReader(CODEC, "control")
    reader.feed(header)
    with pytest.raises(ff.LimitError, match=r"max_payload"):
        reader.next()
    with pytest.raises(ff.TruncatedError):
        ff.Codec(SALT, max_payload=16_777_217).decode(header)


def test_16_counts_are_compared_with_what_is_left():
    for kind, raw in (
        ("Control", "13fdffffffffffffff7f"), ("Control", "0f00fdffffffffffffff7f"), ("Control", "07fdffffffffffffff7f"),
        ("Timing", "0d00fdffffffffffffff7f"), ("Timing", "0d00fd0000000000000080"), ("Join", "000000fcffffffff"),
    ):
        with pytest.raises(ff.PayloadError, match=r"announced, 0 bytes left"):
            CODEC.decode_payload(kind, bytes.fromhex(raw))
